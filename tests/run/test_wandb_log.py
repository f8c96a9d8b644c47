"""W&B's file of a run, read back: it has the numbers of metrics.jsonl, whatever happens to the run. Offline."""

import json
import math
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

import config
from check import preflight
from config import ConfigError
from run import wandb_log
from run.log import RunLog
from system import exits

ROOT = Path(__file__).resolve().parents[2]
NAN, INF = float("nan"), float("inf")
BLOCK, HEADER = 32768, 7


def records(file):
    """The records of a .wandb file, which is a LevelDB log behind a header of 7 bytes: blocks of 32 KiB, in them pieces
    with checksum (4 bytes), length (2) and type (1: whole, 2: first, 3: middle, 4: last)."""
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


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="requirements/tests.txt is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(exits, "followers", [])
    (tmp_path / "config.yaml").write_text("grpo: {seed: 7, loss: [1, null]}\npolicy: {precision: float32}\n")
    return tmp_path


def open_log(folder, first_step=1):
    cfg = config.LoggerConfig(tensorboard_enabled=False, wandb_enabled=True, wandb=config.WandbConfig("mine", None))
    return RunLog(folder, cfg, first_step=first_step, num_steps=9)


def end(log, code=None):
    """As a rank does; code None: it is killed, which the process sees as another parent."""
    if code is not None:
        (log.folder / "exit.json").write_text(json.dumps({"code": code}))
    assert log.wandb.wait(30) == 0, (log.folder / "wandb.log").read_text()
    (log.folder / "exit.json").unlink()


def step(log, number, validates=False):
    log.metrics(number, {"train/loss": 0.1 + 0.2 * number, "train/nan": NAN, "train/inf": -INF, "timing/train/x": 1.0})
    if validates:
        log.metrics(number, {"validation/greedy/accuracy": number / 7, "timing/validation/total_validation_time": 2.5})


def test_the_numbers_are_those_of_the_metrics_file_also_of_a_resumed_run(offline):
    """Killed after step 4, resumed after step 2, whose rows are W&B's already; the second part ends on a signal."""
    log = open_log(offline)
    assert exits.followers == [log.wandb]
    log.metrics(0, {"validation/greedy/accuracy": 0.25})
    for number in range(1, 5):
        step(log, number, validates=number % 2 == 0)
    end(log, 1)
    log = open_log(offline, first_step=3)
    for number in range(3, 7):
        step(log, number, validates=number % 2 == 0)
    end(log, 75)
    written = [json.loads(line) for line in (offline / "metrics.jsonl").read_text().splitlines()]
    rows, steps, runs, codes = read_back(offline)
    assert exactly(rows) == exactly(written) and len(rows) == 1 + 6 + 3 and math.isnan(rows[1]["train/nan"])
    assert steps == [1, 2, 4, 5, 6, 8, 9, 10, 12, 13]
    assert codes == [1, 75] and len({run.run_id for run in runs}) == 1
    assert {(run.project, run.display_name) for run in runs} == {("mine", offline.name)}
    values = {item.key: value_of(item) for item in runs[0].config.update if item.key != "_wandb"}
    assert values == {"grpo": {"seed": 7, "loss": [1, None]}, "policy": {"precision": "float32"}}
    assert wandb_log.describe(offline).startswith("offline: wandb sync ")


def test_a_killed_run_is_told_to_wandb(offline):
    """The process that started it is gone, without a word."""
    (offline / "metrics.jsonl").write_text('{"step": 1, "train/loss": 0.5}\n{"step": 2, "train')
    code = f"import os, sys; sys.path.insert(0, {str(ROOT)!r}); from run import wandb_log; from pathlib import Path\n"
    code += f"wandb_log.start(Path({str(offline)!r}), None, 'name'); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    wait_for(lambda: read_back(offline)[3])
    rows, _, (run, *_), codes = read_back(offline)
    assert rows == [{"step": 1, "train/loss": 0.5}] and codes == [1] and run.display_name == "name"


FAILING = "import time\nraise RuntimeError('no such service')\n"


def test_a_failure_of_wandb_is_said_once_and_training_goes_on(tmp_path, monkeypatch, capsys):
    (tmp_path / "site" / "wandb").mkdir(parents=True)
    (tmp_path / "site" / "wandb" / "__init__.py").write_text(FAILING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setattr(exits, "followers", [])
    log = open_log(tmp_path)
    step(log, 1)
    wait_for(lambda: log.wandb.poll() is not None)
    step(log, 2)
    step(log, 3)
    assert capsys.readouterr().out == (
        f"WARNING: W&B has ended, training goes on: see {tmp_path}/wandb.log; "
        "logger.wandb_enabled=false runs without it\n"
    )
    assert "no such service" in (tmp_path / "wandb.log").read_text()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert wandb_log.describe(tmp_path) == f"nothing was sent so far, see {tmp_path}/wandb.log"


def test_a_missing_package_is_an_error_before_anything_is_loaded(monkeypatch):
    cfg = config.Config(logger=config.LoggerConfig(wandb_enabled=True))
    monkeypatch.setattr(preflight.importlib.metadata, "distributions", lambda name: iter(()))
    with pytest.raises(ConfigError) as error:
        preflight.read_inputs(cfg)
    fix = f"`pip install wandb=={preflight.WANDB_VERSION}`, or set it to false"
    assert str(error.value) == f"logger.wandb_enabled=true needs W&B's package, which is not installed: {fix}"
    with pytest.raises(ConfigError, match=r"^(?!logger\.wandb)"):  # who only scores sends nothing
        preflight.read_inputs(cfg, to_train=False)
    pins = (ROOT / "requirements" / "tests.txt").read_text().splitlines()
    assert f"wandb=={preflight.WANDB_VERSION}" in pins
