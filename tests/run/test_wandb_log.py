"""W&B's file of a run, read back: it has the numbers of metrics.jsonl, whatever happens to the run. Offline."""

import json
import math
import struct
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

import config
from base.inputs import run_inputs
from base.system import exits
from config import ConfigError
from run.job import RunState
from run.log import RunLog

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
NAN, INF = float("nan"), float("inf")
BLOCK, HEADER = 32768, 7


def records(file):
    """The records of a .wandb file: a LevelDB log after a header of 7 bytes, in blocks of 32 KiB, each with pieces of
    checksum (4 bytes), length (2) and type (1: whole, 2: first, 3: middle, 4: last)."""
    from wandb.proto import wandb_internal_pb2

    data = file.read_bytes()
    assert data[:4] == b":W&B"
    place, whole = HEADER, b""
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + HEADER])
        whole += data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def value_of(item):
    return json.loads(item.value_json)


def read_back(folder):
    """(rows, W&B's own steps, config, exit codes, ids) of all parts of a run, in the order of their starts."""
    rows, steps, runs, codes = [], [], [], []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_ctime_ns):
        for record in records(file):
            if record.HasField("run"):
                runs.append(record.run)
            elif record.HasField("exit"):
                codes.append(record.exit.exit_code)
            elif record.HasField("history"):
                items = {item.key or "/".join(item.nested_key): value_of(item) for item in record.history.item}
                steps.append(record.history.step.num)
                assert items.pop("_step", steps[-1]) == steps[-1]
                rows.append({key: value for key, value in items.items() if not key.startswith("_")})
    return rows, steps, runs, codes


def exactly(rows):
    """Texts of the numbers as float64, to the last bit; NaN is itself there. W&B writes 1.0 as 1."""
    return [json.dumps({key: float(value) for key, value in sorted(row.items())}) for row in rows]


@pytest.fixture
def offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="requirements/tests.txt is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "config.yaml").write_text("grpo: {seed: 7, loss: [1, null]}\npolicy: {precision: float32}\n")
    return tmp_path


def open_log(folder, first_step=1):
    cfg = config.LoggerConfig(
        tensorboard_enabled=False, wandb_enabled=True, wandb=config.WandbConfig(project="mine", name=None)
    )
    return RunLog(folder, cfg, first_step=first_step, num_steps=9)


def step(log, number, validates=False):
    log.metrics(number, {"train/loss": 0.1 + 0.2 * number, "train/nan": NAN, "train/inf": -INF, "timing/train/x": 1.0})
    if validates:
        log.metrics(number, {"validation/greedy/accuracy": number / 7, "timing/validation/total_validation_time": 2.5})


def finish(log):
    import wandb

    log.close(RunState({}, {}))
    wandb.finish()  # as exit_process does
    wandb.teardown()  # the service may write its last block after `finish` has returned


def test_the_numbers_are_those_of_the_metrics_file_in_one_run(offline):
    log = open_log(offline)
    log.metrics(0, {"validation/greedy/accuracy": 0.25})
    for number in range(1, 5):
        step(log, number, validates=number % 2 == 0)
    finish(log)
    written = [json.loads(line) for line in (offline / "metrics.jsonl").read_text().splitlines()]
    rows, steps, runs, codes = read_back(offline)
    assert exactly(rows) == exactly(written) and len(rows) == 1 + 4 + 2 and math.isnan(rows[1]["train/nan"])
    assert (steps, codes) == ([1, 2, 4, 5, 6, 8, 9], [0])
    values = {item.key: value_of(item) for item in runs[0].config.update if item.key != "_wandb"}
    assert values == {"grpo": {"seed": 7, "loss": [1, None]}, "policy": {"precision": "float32"}}
    log = open_log(offline, first_step=3)  # resumed after step 2
    step(log, 3)
    finish(log)
    _, _, runs, _ = read_back(offline)
    assert len({run.run_id for run in runs}) == 1
    assert {(run.project, run.display_name) for run in runs} == {("mine", offline.name)}


@pytest.mark.long
def test_a_run_that_a_signal_ends_leaves_its_rows_and_exit_code(offline):
    code = f"""
import os, sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests/run")!r}, {str(ROOT / "tests/helpers")!r}]
import fake_vllm; fake_vllm.install()  # the real one takes 9 seconds to import
import test_wandb_log, pathlib, torch; from base.system import exits
test_wandb_log.step(test_wandb_log.open_log(pathlib.Path({str(offline)!r})), 1)
torch.cuda.is_initialized = lambda: True  # no atexit function runs then
exits.exit_process(75)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 75, done.stderr
    rows, _, _, codes = read_back(offline)
    assert exactly(rows) == exactly([json.loads(line) for line in (offline / "metrics.jsonl").read_text().splitlines()])
    assert codes == [75]


@pytest.mark.parametrize("broken", ["init", "log"])
def test_a_failure_of_wandb_is_said_once_and_training_goes_on(tmp_path, monkeypatch, capsys, broken):
    (tmp_path / "config.yaml").write_text("{}")
    wandb = MagicMock()
    getattr(wandb if broken == "init" else wandb.init.return_value, broken).side_effect = RuntimeError("no service")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    log = open_log(tmp_path)
    for number in (1, 2, 3):
        step(log, number)
    log.close(RunState({}, {}))
    (warning,) = (line for line in capsys.readouterr().out.splitlines() if "W&B" in line)
    assert "no service" in warning and "logger.wandb_enabled=false" in warning
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_failure_of_wandb_at_the_end_keeps_the_exit_code(monkeypatch):
    wandb = MagicMock()
    wandb.finish.side_effect = RuntimeError("no service")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with pytest.raises(SystemExit) as end:
        exits.exit_process(75)
    assert end.value.code == 75 and wandb.finish.called


def test_a_missing_package_is_an_error_before_anything_is_loaded(monkeypatch):
    cfg = config.Config(logger=config.LoggerConfig(wandb_enabled=True))
    monkeypatch.setattr(run_inputs.importlib.metadata, "distributions", lambda name: iter(()))
    with pytest.raises(ConfigError) as error:
        run_inputs.read_inputs(cfg)
    fix = f"run `{sys.executable} -m pip install wandb=={run_inputs.WANDB_VERSION}`, or set it to false"
    assert str(error.value) == f"logger.wandb_enabled=true needs W&B's package, which is not installed: {fix}"
    with pytest.raises(ConfigError, match=r"^(?!logger\.wandb)"):  # who only scores sends nothing
        run_inputs.read_inputs(cfg, to_train=False)
    pins = (ROOT / "requirements" / "tests.txt").read_text().splitlines()
    assert f"wandb=={run_inputs.WANDB_VERSION}" in pins
