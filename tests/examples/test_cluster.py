"""examples/cluster: valid for whom they are for, and each starts train.sh as slurm.sh does.

SkyPilot's parser is there where the package `skypilot` is; Kubeflow's schemas where KUBEFLOW_CRDS names the folder
manifests/base/crds of github.com/kubeflow/trainer (1.1 MB: too large to be kept here).
"""

import copy
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


@pytest.mark.parametrize("name", ["kubernetes.yaml", "skypilot.yaml"])
def test_the_file_says_that_nobody_ran_it(name):
    assert "NOT RUN ON A CLUSTER" in (CLUSTER / name).read_text()


def strict(schema):
    """Kubernetes drops a field that the schema has not: here it is an error."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: strict(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        schema.pop("type", None)
    keeps = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    return (
        schema if keeps or not isinstance(schema.get("properties"), dict) else schema | {"additionalProperties": False}
    )


def problems(document: dict) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema", reason="the package jsonschema is not installed")
    if "KUBEFLOW_CRDS" not in os.environ:
        pytest.skip("KUBEFLOW_CRDS names no folder manifests/base/crds of github.com/kubeflow/trainer")
    plural = {"TrainJob": "trainjobs", "TrainingRuntime": "trainingruntimes"}[document["kind"]]
    file = Path(os.environ["KUBEFLOW_CRDS"]) / f"trainer.kubeflow.org_{plural}.yaml"
    versions = yaml.load(file.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]["versions"]
    version = next(each for each in versions if document["apiVersion"] == f"trainer.kubeflow.org/{each['name']}")
    schema = strict(version["schema"]["openAPIV3Schema"]["properties"]["spec"])
    return [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(document["spec"])]


@pytest.mark.parametrize("number", [0, 1])
def test_kubeflow_takes_it(number):
    assert problems(KUBERNETES[number]) == []
    wrong = copy.deepcopy(KUBERNETES[number])
    if number == 0:
        wrong["spec"]["template"]["spec"]["failurePolicy"]["rules"][0]["action"] = "StartAgain"
        wrong["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailPolicy"] = {}
    else:
        wrong["spec"]["trainer"]["numNodes"] = "two"
        wrong["spec"]["trainer"]["nodes"] = 2
    assert len(problems(wrong)) == 2, "or the schema would let anything pass"


def test_skypilot_takes_it():
    sky = pytest.importorskip("sky", reason="the package skypilot is not installed")
    task = sky.Task.from_yaml_config(copy.deepcopy(SKYPILOT))
    (resources,) = task.resources
    assert task.num_nodes == 2 and resources.accelerators == {"H100": 8}
    assert resources.job_recovery["recover_on_exit_codes"] == [75]
    wrong = copy.deepcopy(SKYPILOT)
    wrong["nodes"] = 2
    with pytest.raises(ValueError, match="nodes"):
        sky.Task.from_yaml_config(wrong)
