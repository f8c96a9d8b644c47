"""examples/cluster: each file starts train.sh as slurm.sh does, and starts a saved run again."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "examples" / "cluster"
KUBERNETES = list(yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text()))
SKYPILOT = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
ENVIRONMENTS = {
    "kubernetes": {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "head", "PET_MASTER_PORT": "29500"}
    | {"PET_NPROC_PER_NODE": "8"},
    "skypilot": {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "head\nother"}
    | {"SKYPILOT_NUM_GPUS_PER_NODE": "8"},
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_each_node_starts_train_sh(tmp_path, name):
    trainer = KUBERNETES[1]["spec"]["trainer"]
    command = [*trainer["command"], *trainer["args"]] if name == "kubernetes" else ["bash", "-c", SKYPILOT["run"]]
    (tmp_path / "train.sh").write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "train.sh").chmod(0o755)
    env = {"PATH": os.environ["PATH"]} | ENVIRONMENTS[name]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    *options, config, log_dir, resume = done.stdout.splitlines()
    assert options == ["--nnodes=2", "--node_rank=1", "--rdzv_endpoint=head:29500", "--nproc_per_node=8"]
    assert (ROOT / config).is_file() and resume == "checkpointing.resume=auto"
    assert log_dir == "logger.log_dir=/shared/runs/math_8b"


def test_a_saved_run_starts_again():
    """And the disk of its run folders is one that all nodes mount."""
    template = KUBERNETES[0]["spec"]["template"]["spec"]
    (job,) = template["replicatedJobs"]
    pod = job["template"]["spec"]
    assert pod["podFailurePolicy"]["rules"][0] == {
        "action": "FailJob",
        "onExitCodes": {"containerName": "node", "operator": "In", "values": [75]},
    }
    assert template["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert template["failurePolicy"]["rules"][0]["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    (container,) = pod["template"]["spec"]["containers"]
    assert "/shared" in [mount["mountPath"] for mount in container["volumeMounts"]]
    assert SKYPILOT["resources"]["job_recovery"]["recover_on_exit_codes"] == [75] and "/shared" in SKYPILOT["volumes"]
    assert KUBERNETES[1]["spec"]["runtimeRef"]["name"] == KUBERNETES[0]["metadata"]["name"]
