"""What a run does not use is neither loaded nor needed: without it, the smoke run trains to the same bits."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from ranks import ranks
from small_run import ROOT, arguments, write_rows

# Part of the program -> what a config says that needs it.
AGENT = ["env.agents.name=a", "env.agents.function=m:f", "env.agents.num_workers=1", "data.default.env_name=a"]
PARTS = {
    "base/agents": AGENT,
    "run/split": ["policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=1"],
    "lora.py": ["policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dim=4"],
    "reference.py": ["loss_fn.reference_policy_kl_penalty=0.1"],
    "router_replay.py": ["policy.router_replay.enabled=true"],
    "run/reward_model.py": ["data.default.env_name=reward_model"],
    "judges": ["data.default.env_name=math"],
    "base/graders/judged.py": ["data.default.env_name=code"],
    "base/graders/reward_function.py": ["data.default.env_name=os.path:exists"],
    "run/dump.py": ["logger.dump_rollouts=1"],
    "blocks.py": ["policy.dtensor_cfg.automodel_kwargs.force_hf=true"],
    "tools": [],
    "base/check/preflight.py": [],
}
QUIET = ["grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false", "logger.tensorboard_enabled=false"]
QUIET += ["grpo.max_num_steps=2", "checkpointing.save_period=1"]


def copy_without(parts, copy):
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for file in filter(None, files.split("\0")):
        is_gone = any(file == part or file.startswith(f"{part}/") for part in parts)
        if not is_gone and not file.startswith(("tests/", "bench/", "docs/")) and (ROOT / file).is_file():
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, copy / file)
    return copy


@ranks(1, stand_in=True)
def train(copy: str, folder: str) -> tuple[list[dict], list[str]]:
    """The metrics of two steps, and the files of the copy that were loaded."""
    os.chdir(copy)
    sys.path.insert(0, copy)
    import grpo
    from run import job

    assert grpo.__file__ == f"{copy}/grpo.py"
    place = job.start_process_group(1)
    job.start_process_group = lambda *_: place
    sys.argv = ["grpo.py", *arguments(Path(folder)), *QUIET]
    with redirect_stdout(StringIO()) as said:
        assert grpo.main() == 0, said.getvalue()
    (metrics,) = Path(folder).glob("exp_*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    loaded = [file.removeprefix(f"{copy}/") for file in files if file.startswith(f"{copy}/")]
    return [row for row in rows if "train/loss" in row], loaded


def trained_without(parts, folder):
    work = folder / "work"
    work.mkdir(parents=True)
    write_rows(work)
    (answer,) = train(str(copy_without(parts, folder / "copy")), str(work))
    return answer


def bits_of(rows):
    return [{name: value for name, value in row.items() if name.startswith("train/")} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return trained_without([], tmp_path_factory.mktemp("whole"))


def test_a_run_loads_no_part_that_it_does_not_use(whole):
    _, loaded = whole
    used = [file for file in loaded for part in PARTS if file == part or file.startswith(f"{part}/")]
    assert used == [] and "grpo.py" in loaded


def test_without_all_of_them_the_bits_are_the_same(whole, tmp_path):
    rows, _ = trained_without(list(PARTS), tmp_path)
    assert len(rows) == 2 and bits_of(rows) == bits_of(whole[0])


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
def test_without_one_of_them_the_bits_are_the_same(part, whole, tmp_path):
    rows, _ = trained_without([part], tmp_path)
    assert bits_of(rows) == bits_of(whole[0])


@pytest.mark.slow
@pytest.mark.parametrize("part", [part for part, words in PARTS.items() if words])
def test_who_needs_a_part_that_is_gone_is_told_in_a_sentence(part, tmp_path):
    copy = copy_without([part], tmp_path)
    words = ["--check", "configs/smoke.yaml", *PARTS[part]]
    env = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    ended = subprocess.run([sys.executable, "grpo.py", *words], cwd=copy, capture_output=True, text=True, env=env)
    name = part.removesuffix(".py").replace("/", ".")
    assert ended.returncode == 2, ended.stderr
    assert part in ended.stderr or name in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr
