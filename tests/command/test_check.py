"""`grpo.py --check`, as a user starts it: every mistake is exit code 2, one message that names it, and no file made."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import config
from base.check import preflight

ROOT = Path(__file__).resolve().parents[2]
STARTER = ROOT / "examples/arithmetic/starter"
CONFIG = f"""
grpo: {{num_prompts_per_step: 4, max_num_steps: 5, val_period: 0}}
policy:
  model_name: {STARTER}
  max_total_sequence_length: 32
  generation: {{max_new_tokens: 8}}
  scheduler: {{warmup_steps: 0}}
data:
  train: {{data_path: train.jsonl, output_key: answer}}
"""
UNSET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GRPO_EXIT_FILE", "GRPO_DEVICE")


@pytest.fixture
def work(tmp_path):
    """A working directory with a config, a data file and a copy of the starter to spoil."""
    (tmp_path / "run.yaml").write_text(CONFIG)
    write_rows(tmp_path / "train.jsonl", range(10, 20))
    shutil.copytree(STARTER, tmp_path / "model")
    return tmp_path


def write_rows(file, numbers):
    file.write_text("".join(json.dumps({"input": f"{n}+1=", "answer": n + 1}) + "\n" for n in numbers))


def tree(work):
    return {path: path.is_file() and path.read_bytes() for path in work.rglob("*")}


def check(work, *words, **env):
    """(exit code, stdout, stderr) of the check; that it made and changed no file is asserted here."""
    env = {name: value for name, value in os.environ.items() if name not in UNSET} | env
    env |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "default"}
    before = tree(work)
    command = [sys.executable, str(ROOT / "grpo.py"), *words]
    run = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, timeout=60)
    assert tree(work) == before
    return run.returncode, run.stdout, run.stderr


def refused_here(work, monkeypatch, *words):
    """The message, as the command makes it, in this process: a command takes a second."""
    monkeypatch.chdir(work)
    for name in UNSET:
        monkeypatch.delenv(name, raising=False)
    before = tree(work)
    with pytest.raises(config.ConfigError) as error:
        preflight.check(preflight.parse_command_line(words, "usage"))
    assert tree(work) == before
    assert "\n" not in str(error.value)
    return str(error.value)


def refused(work, *words, **env):
    """The message of the real command, of which there is exactly one."""
    code, out, err = check(work, "--check", *words, **env)
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("error: ") == 1, (code, out, err)
    assert err.count("\n") == 1 and "Traceback" not in err, err
    return err.removeprefix("error: ").rstrip("\n")


def test_good_config_is_summed_up(work):
    write_rows(work / "held.jsonl", range(3))
    words = ["run.yaml", "data.validation.data_path=held.jsonl", "data.validation.output_key=answer"]
    code, out, err = check(work, "--check", *words, WORLD_SIZE="2")
    assert (code, err) == (0, "")
    row = np.random.Generator(np.random.PCG64([42, 0])).permutation(10)[0]  # that training draws first
    assert out.split("\nmemory ")[0].splitlines() == [
        f"model      {STARTER} (vocabulary 262)",
        "train      train.jsonl, graded by exact: 10 prompts",
        "validation held.jsonl, graded by exact: 3 prompts",
        f"first      row {row} of train: '<|user|>{10 + row}+1=<|end|><|assistant|>', expected answer '{11 + row}'",
        "steps      2, each with 4 prompts x 16 samples",
        "note       grpo.max_num_epochs=1 ends the run after 2 steps, before grpo.max_num_steps=5",
    ]


def test_trials4_f2_a_data_path_beside_a_function_is_refused(work):
    """It was ignored: the run trained on the function's rows."""
    message = refused(work, "run.yaml", "data.train.dataset_name=examples.smollm2.conversions:train")
    assert "data.train.data_path=train.jsonl" in message and "data.train.dataset_name=null" in message


def test_trials4_f3_the_time_of_a_step_reads_no_row_that_the_scan_left_out(work):
    rows = [json.dumps({"input": "1" * (60 if n % 50 == 0 else 3), "answer": "2"}) + "\n" for n in range(1, 6001)]
    (work / "train.jsonl").write_text("".join(rows))
    code, out, err = check(work, "--check", "run.yaml", "--gpu=H200")
    assert (code, err) == (0, "") and " s a step on 1 H200 SXM (" in out


def test_the_memory_plan_and_a_gpu_that_is_too_small(work):
    """The plan has no verdict where nobody knows the GPU; with one the exit code says it, after the plan."""
    first = "memory     GiB on each of 2 GPUs{}, packs of 8,192 tokens"
    words = ["--check", "run.yaml", "cluster.gpus_per_node=2"]
    code, out, err = check(work, *words)
    assert (code, err) == (0, "") and "\ndisk  " in out and "\ntime  " not in out
    assert f"{first.format('')} (chosen at the start" in out
    code, out, err = check(work, *words, GRPO_DEVICE="cpu")  # as train.sh calls it
    assert (code, err) == (0, "") and "memory  " not in out
    code, out, err = check(work, *words, "--gpu_memory=80", GRPO_DEVICE="cpu")
    assert (code, err) == (0, "") and first.format(" with 80") in out
    replicas = [*words[:2], "policy.dtensor_cfg.dp_replicate_size=2"]  # two at least
    code, out, err = check(work, *replicas, "--gpu_memory=80")
    assert (code, err) == (0, "") and first.format(" with 80") in out
    code, out, err = check(work, *words, "--gpu_memory=2")
    assert code == 2 and first.format(" with 2") in out
    assert err.startswith("error: memory: ") and " GiB on each GPU, which has 2; " in err and err.count("\n") == 1
    code, out, err = check(work, *words, "--gpu=H-200")  # F10: as users spell it
    assert (code, err) == (0, "") and first.format(" with 141") in out and " s a step on 2 H200 SXM (" in out
    assert refused(work, "run.yaml", "--gpu=h1000").startswith("--gpu=h1000: expected one of ")
    assert refused(work, "run.yaml", "--gpu_memory=much") == (
        "--gpu_memory=much: expected a GPU's memory in GiB, such as --gpu_memory=80"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent.yaml"], "absent.yaml: cannot be read"),
        (["run.yaml", "data.train.data_path=null"], "data.train.data_path is not set"),
        (["run.yaml", "grpo.val_period=1"], "data.validation.data_path is not set"),
        (["run.yaml", "data.train.env_name=exakt"], "env_name 'exakt' is unknown; known: exact"),
        (["run.yaml", "data.max_input_seq_length=7"], "train.jsonl: no usable row: 10 left out: over 7 tokens"),
        (["run.yaml", "grpo.num_prompts_per_step=11"], "10 prompts x grpo.max_num_epochs=1 are fewer than grpo.num_"),
        (["run.yaml", "policy.model_name=."], "config.json: cannot be read"),
        (["run.yaml", "policy.model_name=."], "policy.model_name: "),
        (["run.yaml", "policy.model_name=my models/one"], "policy.model_name: 'my models/one' is not a local folder"),
        (["run.yaml", "logger.log_dir=train.jsonl/logs"], "train.jsonl (Not a directory)"),
        (["run.yaml", "checkpointing.checkpoint_dir=run.yaml/a"], "checkpointing.checkpoint_dir=run.yaml/a: "),
        (["run.yaml", "checkpointing.resume_from=logs/exp_001"], "checkpointing.resume_from: no folder 'logs/exp_001'"),
        (["run.yaml", "checkpointing.resume_from=model"], "no complete checkpoint in model/checkpoints"),
    ],
)
def test_mistake_in_config_or_paths(work, monkeypatch, words, message):
    assert message in refused_here(work, monkeypatch, *words)


@pytest.mark.parametrize(
    ("words", "env", "message"),
    [
        (["run.yaml", "grpo.seed=many"], {}, "grpo.seed: expected int, got 'many'"),
        (["run.yaml", "data.train.output_key=output"], {}, "train.jsonl:1: there is no 'output'"),
        (["run.yaml", "policy.model_name=absent"], {}, "policy.model_name: no folder 'absent'"),
        (["run.yaml"], {"WORLD_SIZE": "3"}, "grpo.num_prompts_per_step=4 is not divisible by the 3 engines"),
        ([], {}, "usage: "),
    ],
)
def test_the_command_says_the_same(work, words, env, message):
    """A mistake of each kind: config, data, model, ranks, no config."""
    assert message in refused(work, *words, **env)


def test_hub_name_without_network(work, tmp_path_factory):
    env = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path_factory.mktemp("cache"))}
    message = refused(work, "run.yaml", "policy.model_name=nobody/nothing", **env)
    assert "'nobody/nothing' is not a local folder and could not be fetched from the hub" in message


def test_check_imports_neither_torch_nor_vllm(work):
    command = [sys.executable, "-X", "importtime", str(ROOT / "grpo.py"), "--check", "run.yaml"]
    run = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    imported = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in run.stderr.splitlines() if "|" in line}
    assert {"tokenizers", "numpy", "yaml"} <= imported and not {"torch", "vllm", "transformers"} & imported


def test_help_is_answered(work):
    code, out, err = check(work, "--help")
    assert (code, err) == (0, "") and out.startswith("usage: ") and "grpo.num_prompts_per_step: " in out
