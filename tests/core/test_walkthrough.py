"""docs/walkthrough.md: its lines behind >>> are executed in order and print what it says, and its table has the files
and functions of the recorded step. (tests/test_links.py compares the code that it quotes.)"""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from run_page import executed
from small_run import ROOT

from base.system import ranks as system_ranks
from bench import timeline

pytestmark = pytest.mark.house

PAGE = (ROOT / "docs" / "walkthrough.md").read_text(encoding="utf-8")
RECORDING = ROOT / "bench" / "results" / "walk_2026-11-22.json"


@pytest.fixture
def in_the_repository(one_rank, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(system_ranks, "start_process_group", lambda **_: one_rank[:2])
    options = vars(torch._tensor_str.PRINT_OPTS).copy()
    with np.printoptions():
        yield
    torch.set_printoptions(**options)


@pytest.mark.slow
def test_what_the_page_prints(in_the_repository):
    names = {}
    now = executed(PAGE, names)
    assert PAGE.count("```pycon") >= 12
    assert now == PAGE, "python tests/helpers/run_page.py docs/walkthrough.md writes what its lines print now"
    # The step on the page is the one that the real engine was recorded in.
    recorded, samples = names["recorded"], names["samples"].trained
    assert names["loss"].item() == pytest.approx(recorded["metrics"]["loss"], abs=1e-6)
    assert names["grad_norm"] == pytest.approx(recorded["metrics"]["grad_norm"], abs=1e-5)
    assert len(names["metrics"].keys() & recorded["metrics"].keys()) > 60
    for sample, before in zip(samples, recorded["samples"], strict=True):
        assert sample.sequence.output_ids == before["id"] and sample.advantage == before["advantage"]


def table_of_the_page():
    """Stage -> (files, functions), as the page has them."""
    rows = re.findall(r"^\| (\w[\w ]*) \| (.*?) \| (.*?) \|$", PAGE, re.M)
    return {
        stage: (re.findall(r"[\w/]+\.py(?! \(in a worker)", files), re.findall(r"`([\w.]+)`", functions))
        for stage, files, functions in rows
        if stage != "stage of `train`"
    }


def differences(stages):
    """Where the page's table is not that of the stages: stage -> file -> functions."""
    page = table_of_the_page()
    found = [] if list(page) == list(stages) else [f"{list(page)} are not {list(stages)}"]
    for stage, (files, functions) in page.items():
        entered = stages.get(stage, {})
        names = [name for file in entered.values() for name in file]
        found += [] if files == list(entered) else [f"{stage}: {files} are not {list(entered)}"]
        # The page writes rollout.Sampler.finish where the trace has Sampler.finish.
        found += [
            f"{stage}: {f}" for f in functions if not any(f in (name, f"{f.split('.')[0]}.{name}") for name in names)
        ]
    return found


def test_the_table_is_that_of_the_recorded_step():
    recorded = json.loads(RECORDING.read_text())
    assert differences(recorded["stages"]) == []
    files = {file for files in recorded["stages"].values() for file in files}
    assert f" {len(files)} files run" in PAGE and f"{len(recorded['operation'])} more files" in PAGE


@pytest.mark.long
def test_the_recording_is_what_the_program_does(tmp_path):
    """bench/walk.py with the real engine, again: the same samples to rounding, the same functions."""
    script = "import sys, bench.walk as walk; walk.RECORDING = walk.Path(sys.argv.pop()); walk.main()"
    command = [sys.executable, "-c", script, "--write", str(tmp_path / "walk.json")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    old, new = (json.loads(path.read_text()) for path in (RECORDING, tmp_path / "walk.json"))
    assert new["stages"] == old["stages"] and new["operation"] == old["operation"]
    for before, after in zip(old["samples"], new["samples"], strict=True):
        assert after.pop("logp") == pytest.approx(before.pop("logp"), abs=1e-5)
        assert after == before
    assert new["metrics"] == pytest.approx(old["metrics"], abs=1e-5)


def test_the_timeline_is_that_of_its_recording(tmp_path):
    """And of the memory plan of today. Both ranks came to the same collectives; none ended before both were there."""
    timeline.write_pictures(tmp_path)
    for name in ("timeline_light.svg", "timeline_dark.svg"):
        drawn = (tmp_path / name).read_text()
        assert drawn == (ROOT / "docs" / "images" / name).read_text(), "python bench/timeline.py draw"
    of_ranks = [rank["collectives"] for rank in json.loads(timeline.RECORDING.read_text())["ranks"]]
    for one, other in zip(*of_ranks, strict=True):
        assert [one[key] for key in ("name", "place", "unit", "bytes")] == [
            other[key] for key in ("name", "place", "unit", "bytes")
        ]
        assert min(one["end"], other["end"]) > max(one["begin"], other["begin"])
