"""run/log.py: the files of a run as they are read back, and its lines."""

import json
import math
import resource
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from samples import sample, sampled, with_grade

import config
from base.hf.tokenizer import Tokenizer
from base.system.disk import write_whole
from run.health import RULES
from run.job import RunState
from run.log import RunLog, Timers

STARTER = Path(__file__).resolve().parents[2] / "examples/arithmetic/starter"
NAMES = ("metrics.jsonl", "samples.jsonl")
NAN, INF = float("nan"), float("inf")


SAMPLES = [sample(0, 1.0, "ok", 2), sample(0, 1.0, "ok", 4), sample(1, 0.0, "wrong", 6, unsampled=4)]

TRAIN = {
    "reward": 0.625,
    "unshaped_reward": 0.5,
    "accuracy": 0.5,
    "loss": -0.0123,
    "grad_norm": 1.75,
    "logp_gap_mean": 4e-7,
    "logp_gap_max": 3e-6,
    "train_tokens": 900,
}
SECONDS = {"generation": 1.5, "data_processing": 0.25, "policy_training": 2.0, "prepare_for_generation": 0.5}
SECONDS["total_step_time"] = 4.0
PERFORMANCE = {"performance/tokens_per_sec": 300.0, "performance/train_tokens": 900}


def open_log(folder, first_step=1, tensorboard=False):
    cfg = config.LoggerConfig(num_samples_to_log=2, num_val_samples_to_print=1, tensorboard_enabled=tensorboard)
    return RunLog(folder, cfg, first_step=first_step, num_steps=10)


def records(folder, name="metrics.jsonl"):
    """samples.jsonl as a parser reads it that keeps to the standard: without Python's NaN and Infinity."""
    lines = (folder / name).read_bytes().decode().split("\n")[:-1]
    return [json.loads(line, parse_constant=float if name == "metrics.jsonl" else pytest.fail) for line in lines]


def test_step_in_metrics_file_and_on_the_console(tmp_path, capsys):
    log = open_log(tmp_path)
    log.step(1, TRAIN | {"probs_ratio": NAN, "grad_norm_max": INF}, SECONDS, PERFORMANCE)
    (record,) = records(tmp_path)
    assert math.isnan(record.pop("train/probs_ratio")) and record.pop("train/grad_norm_max") == INF
    assert record == {
        "step": 1,
        **{f"train/{name}": value for name, value in TRAIN.items() if name != "train_tokens"},
        **{f"train/health/{rule.__name__}": 0.0 for rule in RULES},
        "timing/train/generation": 1.5,
        "timing/train/data_processing": 0.25,
        "timing/train/policy_training": 2.0,
        "timing/train/prepare_for_generation/total": 0.5,
        "timing/train/total_step_time": 4.0,
        **PERFORMANCE,
    }
    (line,) = capsys.readouterr().out.splitlines()
    start = "step 1/10 | accuracy 0.500 | loss -0.0123 grad 1.750 | logp gap 4e-07 max 3e-06 | 300 tok/s | "
    assert line.startswith(f"{start}4.00s (gen 1.50 data 0.25 train 2.00 sync 0.50) | ETA -"), line


def test_a_run_speaks_of_reward_once_one_is_neither_0_nor_1(tmp_path, capsys):
    log = open_log(tmp_path)
    for unshaped in (0.5, 0.43, 0.5):
        log.step(1, TRAIN | {"unshaped_reward": unshaped}, SECONDS, PERFORMANCE)
    spoken = [line.split(" | ")[1] for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert spoken == ["accuracy 0.500", "reward 0.625", "reward 0.625"]


def test_validation_of_several_sets(tmp_path, capsys):
    """Set a has partial credit, in the end; set b has not."""
    first = {
        "validation/a/greedy/accuracy": 0.0,
        "validation/a/greedy/reward": 0.0,
        "validation/a/greedy/num_problems": 9,
    }
    first |= {"validation/b/sampled/accuracy": 0.5, "validation/b/sampled/reward": 0.5}
    sure = {"accuracy_ci95_low": 0.29, "accuracy_ci95_high": 0.7143, "num_problems": 20}
    first |= {f"validation/b/sampled/{name}": value for name, value in sure.items()}
    last = {"validation/a/greedy/accuracy": 1.0, "validation/a/greedy/reward": 0.43}
    log = open_log(tmp_path)
    log.validation(5, first | {"timing/validation/total_validation_time": 2.0})
    b = "b sampled accuracy 0.500 (0.290 to 0.714, 20 problems)"
    assert capsys.readouterr().out == f"validation after step 5 | a greedy accuracy 0.000, {b} | 2.0s\n"
    log.close(RunState({}, {}, first_validation=first, last_validation=last))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert records(tmp_path)[0]["validation/a/greedy/reward"] == 0.0
    assert lines[1:3] == ["a greedy reward 0.000 -> 0.430", "a greedy outcome ok 0.000 -> 1.000"]
    assert lines[3] == f"b sampled accuracy {b.partition('accuracy ')[2]} -> ?"


def test_samples_file_and_console(tmp_path, capsys):
    log = open_log(tmp_path)
    parts = {"correctness": 0.0, "format": 1.0}
    samples = [replace(SAMPLES[1], expected="7")]
    longest = replace(SAMPLES[2], advantage=-0.5, expected="9" * 3000)
    samples.append(with_grade(longest, rewards=parts))
    log.samples(3, "a/greedy", samples, Tokenizer(STARTER))
    log.samples(3, "train", [], Tokenizer(STARTER))
    first = dict(step=3, kind="a/greedy", row_id=40, index=0, prompt="2", reply="111<|end|>", reward=1.0, outcome="ok")
    first |= dict(expected="7", unshaped_reward=1.0, env_name="math", advantage=None)
    first |= dict(finish_reason="stop", weight_version=7, num_gen_tokens=4)
    second = dict(row_id=41, prompt="22", reply="11111<|end|>", reward=0.0, outcome="wrong", num_gen_tokens=2)
    second |= dict(expected="9" * 2000, unshaped_reward=0.0, env_name="games", advantage=-0.5, rewards=parts)
    assert records(tmp_path, "samples.jsonl") == [first, first | second]
    assert capsys.readouterr().out == "    [a/greedy] '2' -> '111<|end|>'  ok, reward 1, expected '7'\n"


def test_logged_samples_of_training_have_their_tokens(tmp_path):
    """Three sampled tokens of two turns after an observation of one; of later samples of a step only the text."""
    mask = np.array([True, False, True, True])
    two_turns = sampled(1, 0, [17, 17], [16, 17, 18, 257], logp=[-0.123456, 0.0, -2.5, -0.5], mask=mask)
    two_turns.advantage, two_turns.sequence.turn_tokens = [0.5, -0.5], [1, 2]
    cfg = config.LoggerConfig(num_samples_to_log=40, tensorboard_enabled=False)
    log = RunLog(tmp_path, cfg, first_step=1, num_steps=10)
    log.samples(3, "train", [two_turns, *SAMPLES * 10], Tokenizer(STARTER))
    log.samples(3, "greedy", [two_turns], Tokenizer(STARTER))
    first, *others, validated = records(tmp_path, "samples.jsonl")
    assert first["tokens"] == ["1", "2", "3", "<|end|>"] and "".join(first["tokens"]) == first["reply"]
    assert first["sampler_logps"] == [-0.1235, None, -2.5, -0.5]
    assert (first["advantage"], first["turn_tokens"]) == ([0.5, -0.5], [1, 2])
    assert ["tokens" in other for other in others] == [True] * 15 + [False] * 15
    assert "turn_tokens" not in others[0] and "tokens" not in validated


def test_samples_are_strict_json_whatever_a_row_brings(tmp_path):
    """Validation does not shape: NaN. A row's id may be NaN, or half of a surrogate pair."""
    log = open_log(tmp_path)
    parts = {"a": NAN, "b": -INF, "c": 0.5}
    hostile = [
        with_grade(replace(SAMPLES[0], row_id=row_id), unshaped_reward=NAN, rewards=parts)
        for row_id in ("a\ud800b", NAN)
    ]
    log.samples(0, "validation/greedy", hostile, Tokenizer(STARTER))
    first, second = records(tmp_path, "samples.jsonl")
    assert first["unshaped_reward"] is second["unshaped_reward"] is second["row_id"] is None
    assert first["row_id"] == "a\ud800b" and first["rewards"] == {"a": None, "b": None, "c": 0.5}


@pytest.mark.parametrize("line", [b"\0\0\0\0", b"[]", b'{"step": "x"}', b"\xff"])
def test_a_damaged_line_is_named_when_a_run_is_resumed(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + line + b"\n")
    with pytest.raises(config.ConfigError, match=rf"^{tmp_path}/metrics\.jsonl:2: .*remove"):
        open_log(tmp_path, first_step=2)


@pytest.mark.parametrize("cut", [b'{"step": 2, "re', '{"step": 2, "reply": "é'.encode()[:-1]])
def test_resuming_drops_what_came_after_the_checkpoint(tmp_path, cut):
    """Also of replies with line ends that only text knows, and with a last line that was cut inside a character."""
    reply = "a\u2028b\x85c\x0b\x0c\x1cd\r\ne"
    kept = [{"step": 1, "reply": reply, "n": None}, {"step": 2, "reply": "é" + reply}]
    for name in ("metrics.jsonl", "samples.jsonl"):
        lines = [json.dumps(x, ensure_ascii=False) + "\n" for x in [*kept, {"step": 3, "reply": reply}, {"step": 4}]]
        (tmp_path / name).write_bytes("".join(lines).encode() + cut)
    log = open_log(tmp_path, first_step=3)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert records(tmp_path, name) == kept
    log.metrics(3, {"x": 1.0})
    assert records(tmp_path)[2:] == [{"step": 3, "x": 1.0}]


def test_a_new_run_appends_to_nothing_and_a_second_log_keeps_the_first_steps(tmp_path):
    for step in (1, 2, 3):
        open_log(tmp_path, first_step=step).metrics(step, {"x": step})
    assert records(tmp_path) == [{"step": step, "x": step} for step in (1, 2, 3)]


def test_lines_that_have_no_room_are_lost_whole_and_said_once(tmp_path, capsys):
    """A limit on the size of files: the file takes a part of a line, and then refuses the rest."""
    log = open_log(tmp_path, tensorboard=True)
    log.metrics(1, {"train/reward": 1.0})
    (tmp_path / "wandb_id").write_text("before")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 9, limit[1]))
    try:
        for step in (2, 3):
            log.metrics(step, {"train/reward": 1.0})
            log.samples(step, "train", SAMPLES, Tokenizer(STARTER))
        with pytest.raises(OSError, match="too large"):
            write_whole(tmp_path / "wandb_id", "a" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    log.metrics(4, {"train/reward": 1.0})
    assert [record["step"] for record in records(tmp_path)] == [1, 4]
    assert (tmp_path / "samples.jsonl").read_bytes() == b"" and (tmp_path / "wandb_id").read_text() == "before"
    (tmp_path / "metrics.jsonl").unlink()  # a folder in its place, or none
    (tmp_path / "metrics.jsonl").mkdir()
    log.metrics(5, {"train/reward": 1.0})
    assert [event.step for event in events_of(tmp_path).Scalars("train/reward")] == [1, 4, 5]
    log.close(RunState({}, {}))
    said = capsys.readouterr().out.splitlines()
    lost = [line for line in said if line.startswith("WARNING: ")]
    assert len(lost) == 3 and all(sum(name in line for line in lost) == 1 for name in (*NAMES, "tfevents"))
    (row,) = [line for line in said if line.startswith("not written")]
    assert "metrics.jsonl: 3 times" in row and "samples.jsonl: 2 times" in row
    open_log(tmp_path / "gone").metrics(1, {})
    assert not (tmp_path / "gone").exists() and f"WARNING: {tmp_path}/gone" in capsys.readouterr().out


def events_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard")).Reload()


def test_tensorboard_has_the_numbers_of_the_metrics_file(tmp_path):
    logs = []
    for first_step in (1, 3):  # killed after step 4, resumed after step 2
        logs.append(open_log(tmp_path, first_step, tensorboard=True))
        for step in range(first_step, 5):
            logs[-1].metrics(step, {"train/reward": step / 8 + first_step})
    # before anything is closed
    events = events_of(tmp_path)
    assert events.Tags()["scalars"] == ["train/reward"]
    points = [(event.step, event.value) for event in events.Scalars("train/reward")]
    assert points == [(record["step"], record["train/reward"]) for record in records(tmp_path)]
    for log in logs:
        log.close(RunState({}, {}))


def test_timers_name_each_phase_to_the_watchdog_and_begin_anew_when_taken(monkeypatch):
    clock = iter([0.0, 1.0, 2.0, 4.0, 5.0, 5.5, 10.0, 20.0, 21.0])  # seconds
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    phases = []
    timer = Timers(phases.append)  # 0
    timer.start_step()  # 1
    with timer("generation"):  # 2 to 4
        pass
    with pytest.raises(ZeroDivisionError), timer("generation"):  # 5 to 5.5; what breaks off is counted
        _ = 1 / 0
    assert timer.take() == {"generation": 2.5, "total_step_time": 9.0}  # at 10
    timer.start_step()  # 20
    assert timer.take() == {"total_step_time": 1.0} and phases == ["generation", "generation"]  # at 21
