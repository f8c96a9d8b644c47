"""examples/forks: each diff applies, edits two files of the product at most, and does what it says when it is run.

The edited copy is used in a process of its own (helpers/fork_worker.py); what it should have computed is computed here
by other means: by hand, in float64, with the standard library, or by transformers.
"""

import importlib.util
import json
import os
import re
import shutil
import sqlite3
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_run import ROOT
from tiny import FAMILIES, make_tiny

import envs

pytestmark = pytest.mark.slow  # each fork is a process that imports torch
FOLDER = ROOT / "examples" / "forks"
NAMES = ("loss_term", "soft_clip", "median", "environment", "optimizer", "metric", "mistral", "sqlite")
WORKER = ROOT / "tests" / "helpers" / "fork_worker.py"
NOT_PRODUCT = re.compile(r"(tests|bench|docs|examples)/")
SHORT = ("grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.max_num_steps=2")
TWO_EPOCHS = (*SHORT, "policy.ppo_epochs=2")  # in the second one the ratios are not 1
PLAIN = {"normalize_rewards": False, "use_leave_one_out_baseline": False}
GROUPS = [[1, 0, 0, 0], [3, 1, 0, 8], [2, 2, 2, 2], [1, 0, 0]]


@dataclass
class Fork:
    copy: Path  # of the repository, edited
    work: Path
    edited: list[str]
    problem: str = "was not run"

    def answer(self) -> dict:
        assert not self.problem, self.problem
        return json.loads((self.work / "answer.json").read_text())

    def metrics(self, number: int = 0) -> list[dict]:
        """Those of each step of a run."""
        records = read_lines(Path(self.answer()["runs"][number]) / "metrics.jsonl")
        return [record for record in records if "train/loss" in record]

    def samples(self) -> list[dict]:
        return read_lines(Path(self.answer()["runs"][0]) / "samples.jsonl")


def read_lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def make_job(name: str, work: Path) -> dict:
    """What the fork is to do, and the files that this takes."""
    loss_fn = {"reference_policy_kl_penalty": 0.0}
    if name in ("loss_term", "soft_clip", "metric"):
        save_file(loss_case(), work / "case.safetensors")
    if name == "loss_term":
        runs = [[*TWO_EPOCHS, f"loss_fn.ratio_l2_coef={value}"] for value in (0.0, 0.5)]
        return {"loss_fn": loss_fn | {"ratio_l2_coef": 0.5}, "runs": runs}
    if name == "soft_clip":
        runs = [[*TWO_EPOCHS, f"loss_fn.use_soft_clip={value}"] for value in ("false", "true")]
        return {"loss_fn": loss_fn | {"use_soft_clip": True}, "runs": runs}
    if name == "metric":
        return {"loss_fn": loss_fn, "runs": [TWO_EPOCHS]}
    if name == "median":
        median = {"adv_estimator": {"name": "median"}}
        keys = [PLAIN, {"normalize_rewards": False}, {"use_leave_one_out_baseline": False, "reward_std": "group"}]
        plain = [f"grpo.{key}=false" for key in PLAIN]
        return {
            "advantages": [[GROUPS, median | case] for case in keys],
            "runs": [[*SHORT, "grpo.adv_estimator.name=median", *plain]],
        }
    if name == "environment":
        return {"runs": [[*SHORT, "data.default.env_name=examples.envs.digits:Digits"]]}
    if name == "optimizer":
        sgd = ["policy.optimizer.name=torch.optim.SGD", "policy.optimizer.kwargs.weight_decay=0"]
        rate = ["policy.optimizer.kwargs.lr=0.015625", "policy.max_grad_norm=1000"]
        saves = ["grpo.max_num_steps=4", "checkpointing.save_period=1", "checkpointing.keep_latest=4"]
        common = [*SHORT, *sgd, *rate, *saves]
        return {"runs": [common, "cut", [*common, f"checkpointing.resume_from={work}/cut"]]}
    if name == "mistral":
        folders = write_mistral(work)
        settings = [f"policy.model_name={folders[0]}", "loss_fn.entropy_coef=0.1"]  # it gets no reward
        settings += ["policy.max_total_sequence_length=48", "grpo.max_num_steps=1"]
        return {"models": folders, "runs": [[*SHORT, *settings]]}
    assert name == "sqlite", name
    return {"sources": write_databases(work), "runs": [[*SHORT, f"data.train.data_path={work}/train.db"]]}


def make_fork(name: str, folder: Path) -> Fork:
    copy, work = folder / "copy", folder / "work"
    work.mkdir()
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for file in filter(None, files.split("\0")):
        if (ROOT / file).is_file() and not file.startswith(("tests/", "bench/", "docs/")):
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, copy / file)
    diff = FOLDER / f"{name}.diff"
    edited = re.findall(r"^\+\+\+ b/(.+)$", diff.read_text(), re.MULTILINE)
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder)}  # the copy is no repository, nor in one
    applied = subprocess.run(["git", "apply", str(diff)], cwd=copy, env=env, capture_output=True, text=True)
    fork = Fork(copy, work, edited)
    if applied.returncode:
        fork.problem = f"{diff} no longer applies; examples/forks/README.md says how to mend it: {applied.stderr}"
    return fork


def use(fork: Fork) -> None:
    """Runs the worker in the copy."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # of `one_rank`
    env = {name: value for name, value in os.environ.items() if name not in ours} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WORKER), str(fork.work)]
    done = subprocess.run(command, cwd=fork.copy, env=env, capture_output=True, text=True, timeout=300)
    fork.problem = f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}" if done.returncode else ""


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    """Name -> Fork: all of them, two at a time."""
    made = {name: make_fork(name, tmp_path_factory.mktemp(name)) for name in NAMES}
    good = [(name, fork) for name, fork in made.items() if "no longer applies" not in fork.problem]
    for name, fork in good:
        (fork.work / "job.json").write_text(json.dumps(make_job(name, fork.work)))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(use, [fork for _, fork in good]))
    return made


def test_every_diff_is_run_and_in_the_table():
    assert sorted(file.stem for file in FOLDER.glob("*.diff")) == sorted(NAMES)
    page = (FOLDER / "README.md").read_text()
    assert [name for name in NAMES if f"[{name}]({name}.diff)" not in page] == []


@pytest.mark.parametrize("name", NAMES)
def test_at_most_two_files(forks, name):
    fork = forks[name]
    assert all((fork.copy / file).is_file() for file in fork.edited), fork.problem
    product = [file for file in fork.edited if not NOT_PRODUCT.match(file)]
    assert len(product) == {"environment": 0, "mistral": 1, "sqlite": 1}.get(name, 2)
    assert product == [file for file in product if (ROOT / file).is_file()], "a fork edits files, it adds none"
    fork.answer()


# ---------------------------------------------------------------------------------------------------------- the loss


def loss_case() -> dict[str, torch.Tensor]:
    """One sequence of 40 tokens; ratios on both sides of the clip and of 1.1, advantages of each sign and 0."""
    generator = torch.Generator().manual_seed(0)
    row_R = torch.arange(40)
    hidden_RD, weight_VD = torch.randn(40, 13, generator=generator), torch.randn(37, 13, generator=generator)
    target_R = torch.randint(37, (40,), generator=generator)
    logp_R = (hidden_RD @ weight_VD.T).log_softmax(-1).gather(1, target_R[:, None])[:, 0]
    old_R = logp_R - torch.tensor([0.4, -0.4, 0.05, -0.05, 0.15, 0.0])[row_R % 6]
    return {
        "hidden": hidden_RD,
        "weight": weight_VD,
        "target": target_R,
        "old_logp_T": old_R,
        "sampler_logp_T": old_R.clone(),
        "adv_T": torch.tensor([1.3, -0.7, 0.0, 4.0, -2.1, 0.6, -4.0])[row_R % 7],
        "mask_T": torch.ones(40, dtype=torch.bool),
        "seq_T": torch.zeros(40, dtype=torch.int64),
    }


def oracle(loss_of_tokens) -> dict[str, torch.Tensor]:
    """The gradients of the mean of `loss_of_tokens(ratio, advantage)`, in float64 on all logits."""
    case = loss_case()
    leaves = {name: case[name].double().requires_grad_() for name in ("hidden", "weight")}
    logp_RV = (leaves["hidden"] @ leaves["weight"].T).log_softmax(-1)
    ratio_R = (logp_RV.gather(1, case["target"][:, None])[:, 0] - case["old_logp_T"].double()).exp()
    loss_of_tokens(ratio_R, case["adv_T"].double()).mean().backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


def hard_clip(ratio_R, adv_R):
    return -torch.minimum(adv_R * ratio_R, adv_R * ratio_R.clamp(0.8, 1.2))


def with_term(ratio_R, adv_R):
    return hard_clip(ratio_R, adv_R) + 0.5 * (ratio_R - 1) ** 2


def soft_clip(ratio_R, adv_R):
    temperature_R = 1.0 + 0.05 * (adv_R < 0)
    return -adv_R * 4 / temperature_R / (1 + torch.exp(-temperature_R * (ratio_R - 1)))


def difference(got, want):
    return max(((got[name].double() - want[name]).norm() / want[name].norm()).item() for name in want)


@pytest.mark.parametrize(
    ("name", "edited_loss", "moves_idle_tokens"), [("loss_term", with_term, True), ("soft_clip", soft_clip, False)]
)
def test_the_edited_loss_is_trained(forks, name, edited_loss, moves_idle_tokens):
    answer, want = forks[name].answer(), oracle(edited_loss)
    assert difference(oracle(hard_clip), want) > 0.05, "the fork changes nothing here"
    gradients = load_file(forks[name].work / "gradients.safetensors")
    for backend in ("torch", "triton"):
        got = {key: gradients[f"{backend}.{key}"] for key in want}
        assert difference(got, want) <= 1e-5, backend
        assert answer["loss"][backend]["zero_adv_moves"] == moves_idle_tokens
    assert answer["loss"]["torch"]["path"] == "loss: one pass, autograd of loss.py"
    assert "one pass, autograd of loss.py (loss.py was edited: " in answer["loss"]["triton"]["path"]
    before, after = forks[name].metrics(0), forks[name].metrics(1)
    assert before[0]["train/reward"] == after[0]["train/reward"], "the same first rollout"
    for one, other in zip(before, after, strict=True):
        assert other["train/grad_norm"] != pytest.approx(one["train/grad_norm"], rel=1e-3)
    if name == "soft_clip":
        assert all(record["train/ratio_clip_high_fraction"] == 0 for record in after), "nothing is clipped"


def test_edits_that_are_off_change_nothing(forks):
    """Two losses with their keys off, and one that only has a metric more: the same runs, to the bit."""
    runs = [forks[name].metrics(0) for name in ("loss_term", "soft_clip", "metric")]
    trained = [[(r["train/loss"], r["train/grad_norm"], r["train/reward"]) for r in run] for run in runs]
    assert trained[0] == trained[1] == trained[2] and len(trained[0]) == 2


def test_the_metrics(forks):
    answer, case = forks["metric"].answer(), loss_case()
    logp_RV = (case["hidden"].double() @ case["weight"].double().T).log_softmax(-1)
    ratio_R = (logp_RV.gather(1, case["target"][:, None])[:, 0] - case["old_logp_T"].double()).exp()
    share = sum(ratio > 1.1 for ratio in ratio_R.tolist()) / 40
    assert 0.2 < share < 0.5
    for backend in ("torch", "triton"):
        assert answer["loss"][backend]["metrics"]["ratio_above_1.1_fraction"] == pytest.approx(share)
    assert "fused" in answer["loss"]["triton"]["path"], "a metric is no edit of the loss"
    for record in forks["metric"].metrics():
        assert 0 < record["train/ratio_above_1.1_fraction"] < 1
        rewards = [sample["reward"] for sample in forks["metric"].samples() if sample["step"] == record["step"]]
        assert len(rewards) == 32 and record["train/reward_std"] == pytest.approx(statistics.pstdev(rewards))


# ------------------------------------------------------------------------------------- advantages, tasks, optimizers


def test_the_median(forks):
    plain, of_the_others, by_group = forks["median"].answer()["advantages"]
    assert plain == [1, 0, 0, 0, 1, -1, -2, 6, 0, 0, 0, 0, 1, 0, 0]
    assert of_the_others == [1, 0, 0, 0, 2, -2, -3, 7, 0, 0, 0, 0, 1, -0.5, -0.5]
    std = (38 / 3) ** 0.5 + 1e-4  # of 3, 1, 0, 8
    assert by_group[4:8] == pytest.approx([1 / std, -1 / std, -2 / std, 6 / std])
    for record in forks["median"].metrics():
        samples = [sample for sample in forks["median"].samples() if sample["step"] == record["step"]]
        groups = {row: [s["reward"] for s in samples if s["row_id"] == row] for row in {s["row_id"] for s in samples}}
        assert len(groups) == 4 and {len(group) for group in groups.values()} == {8}
        adv = [reward - statistics.median(group) for group in groups.values() for reward in group]
        for name, value in (("mean", statistics.mean(adv)), ("max", max(adv)), ("min", min(adv))):
            assert record[f"train/advantages/{name}"] == pytest.approx(value)


def test_the_environment(forks):
    fork = forks["environment"]
    assert fork.edited == ["examples/envs/digits.py"]
    fork.answer()
    spec = importlib.util.spec_from_file_location("digits", fork.copy / fork.edited[0])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cases = {
        ("85", "85"): (1, "ok"),
        ("75", "85"): (1 / 2, "wrong"),
        ("12", "112"): (2 / 3, "wrong"),
        ("185", "85"): (2 / 3, "wrong"),
        ("58", "85"): (0, "wrong"),
        ("it is 85", "85"): (0, "parse_fail"),
        ("", "85"): (0, "parse_fail"),
    }
    turns = [envs.Turn([{"role": "assistant", "content": reply}], answer, "stop") for reply, answer in cases]
    results = module.Digits().step([*turns, envs.Turn(turns[0].messages, "85", "length")])
    assert [(result.reward, result.outcome) for result in results] == [*cases.values(), (0, "parse_fail")]
    partial = 0
    for sample in fork.samples():
        a, b = map(int, re.search(r"(\d+)\+(\d+)=", sample["prompt"]).groups())
        want, reply = str(a + b), re.sub(r"<.*", "", sample["reply"])
        places = range(1, max(len(reply), len(want)) + 1)
        right = sum(reply[-place : len(reply) - place + 1] == want[-place : len(want) - place + 1] for place in places)
        whole = sample["finish_reason"] == "stop" and reply.isdigit()
        assert sample["reward"] == pytest.approx(right / len(places) if whole else 0), sample
        partial += 0 < sample["reward"] < 1
    assert partial > 5


def test_the_optimizer_is_saved_and_resumed(forks):
    """Momentum by hand: v_t = 0.9 v_(t-1) + g_t, p_t = p_(t-1) - lr v_t. The norm of g_t is in the metrics."""
    fork = forks["optimizer"]
    whole, cut = Path(fork.answer()["runs"][0]), fork.work / "cut"
    steps = {
        step: load_file(whole / "checkpoints" / f"step_{step:06d}" / "rank_00000.safetensors") for step in range(1, 5)
    }
    names = [name.removeprefix("param.") for name in steps[1] if name.startswith("param.")]
    velocity = {step: {n: steps[step][f"sharded.momentum_buffer.{n}"].double() for n in names} for step in steps}
    norms = {record["step"]: record["train/grad_norm"] for record in fork.metrics()}
    for step in (2, 3, 4):
        gradient = {n: velocity[step][n] - 0.9 * velocity[step - 1][n] for n in names}
        norm = sum(g.square().sum() for g in gradient.values()).sqrt().item()
        assert norm == pytest.approx(norms[step], rel=1e-4) and norm > 0
        for n in names:
            moved = steps[step - 1][f"param.{n}"].double() - steps[step][f"param.{n}"].double()
            assert torch.allclose(moved, velocity[step][n] / 64, atol=2e-7), n
    again = load_file(cut / "checkpoints" / "step_000004" / "rank_00000.safetensors")
    assert again.keys() == steps[4].keys() and all(torch.equal(again[n], steps[4][n]) for n in again)
    assert [record["step"] for record in read_lines(cut / "metrics.jsonl") if "train/loss" in record] == [1, 2, 3, 4]


# ------------------------------------------------------------------------------------------------- models and files


def write_mistral(work: Path) -> list[str]:
    """Model folders: a good one; one with a window; one whose config.json does not say, which means 4096."""
    save_file({"ids": torch.arange(40) * 7 % 250}, work / "ids.safetensors")
    good = work / "mistral"
    make_mistral(good)
    config = json.loads((good / "config.json").read_text())
    assert config["architectures"] == ["MistralForCausalLM"] and config["sliding_window"] is None
    folders = [good, work / "windowed", work / "silent"]
    for folder in folders[1:]:
        shutil.copytree(good, folder)
    (folders[1] / "config.json").write_text(json.dumps(config | {"sliding_window": 4096}))
    config.pop("sliding_window")
    (folders[2] / "config.json").write_text(json.dumps(config))
    return [str(folder) for folder in folders]


def make_mistral(folder: Path):
    from transformers import MistralConfig

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "mistral", (MistralConfig, heads))
        return make_tiny(folder, family="mistral", tied=False)


def test_mistral_is_transformers(forks, tmp_path):
    fork = forks["mistral"]
    logits, windowed, silent = fork.answer()["models"]
    theirs = make_mistral(tmp_path)  # the same seed
    with torch.no_grad():
        want_TV = theirs(load_file(fork.work / "ids.safetensors")["ids"][None]).logits[0]
    assert want_TV.std() > 1 and (torch.tensor(logits) - want_TV).abs().max() <= 1e-4
    assert windowed == f"{fork.work}/windowed/config.json: sliding_window=4096 is not supported; supported: null"
    assert silent == f"{fork.work}/silent/config.json: sliding_window=4096 is not supported; supported: null"
    (record,) = fork.metrics()
    assert record["train/grad_norm"] > 1e-3 and record["train/logp_gap_max"] <= 1e-4
    saved = load_file(Path(fork.answer()["runs"][0]) / "hf_model" / "model.safetensors")
    before = theirs.state_dict()
    assert saved.keys() == before.keys() and all(not torch.equal(saved[name], before[name]) for name in saved)


def write_databases(work: Path) -> list[str]:
    """train.db with the smoke task's first problems, and a column that is no text; files that are refused."""
    with closing(sqlite3.connect(work / "train.db")) as database, database:
        database.execute("CREATE TABLE rows (problem TEXT, answer INTEGER, note REAL)")
        database.executemany(
            "INSERT INTO rows VALUES (?, ?, ?)", [(f"{a}+{a + 7}=", 2 * a + 7, None) for a in range(20, 60)]
        )
    with closing(sqlite3.connect(work / "other.db")) as database, database:
        database.execute("CREATE TABLE others (problem TEXT)")
    (work / "text.db").write_text("problem,answer\n" * 100)
    return [f"{work}/{name}.db" for name in ("train", "other", "text", "absent")]


def test_a_table_is_read(forks):
    fork = forks["sqlite"]
    train, other, text, absent = fork.answer()["sources"]
    assert train == [{"problem": f"{a}+{a + 7}=", "answer": 2 * a + 7, "note": None} for a in range(20, 60)]
    assert other == f"{fork.work}/other.db: table 'rows' cannot be read (no such table: rows)"
    assert text == f"{fork.work}/text.db: table 'rows' cannot be read (file is not a database)"
    assert absent == f"{fork.work}/absent.db: table 'rows' cannot be read (unable to open database file)"
    problems = {row["problem"]: row["answer"] for row in train}
    right = 0
    for sample in fork.samples():
        (problem,) = (problem for problem in problems if problem in sample["prompt"])
        is_right = sample["reply"].startswith(f"{problems[problem]}<") and sample["finish_reason"] == "stop"
        assert sample["reward"] == is_right, sample
        right += is_right
    assert 0 < right < len(fork.samples()) == 64
    assert all(record["train/grad_norm"] > 0 for record in fork.metrics())
