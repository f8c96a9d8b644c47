"""Untied Qwen2 (with biases) and Llama 3 (with scaled rope) in the engine: every parameter arrives. Qwen3, tied, is in
test_engine.py; each engine needs a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("qwen2", "llama")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Family -> parameter -> (gap while the engine is stale, gap after the sync)."""
    return run_workers({family: [family, str(tmp_path_factory.mktemp(family))] for family in FAMILIES})


def run_workers(arguments):
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # of `one_rank`
    env = {name: value for name, value in os.environ.items() if name not in ours} | {"OMP_NUM_THREADS": "1"}
    processes = {
        family: subprocess.Popen(
            [sys.executable, "tests/helpers/family_worker.py", *args],
            **{"cwd": ROOT, "env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True},
        )
        for family, args in arguments.items()
    }
    results = {}
    for family, process in processes.items():
        out, err = process.communicate(timeout=180)
        assert process.returncode == 0, err[-3000:]
        results[family] = json.loads(out.splitlines()[-1])
    return results


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_reaches_the_engine(found, family):
    gaps = found[family]
    assert gaps.pop("start")[1] <= 1e-4
    names = set(gaps)
    assert "lm_head.weight" in names and len(names) == (27 if family == "qwen2" else 21), names
    assert ("model.layers.1.self_attn.k_proj.bias" in names) == (family == "qwen2")
    assert {name for name, (stale, _) in gaps.items() if stale <= 1e-3} <= {
        n for n in names if n.endswith("k_proj.bias")
    }
    assert {name: fresh for name, (_, fresh) in gaps.items() if fresh > 1e-4} == {}


@pytest.mark.long
def test_an_engine_in_bfloat16_has_the_logits_of_the_head_it_was_sent_in_float32(tmp_path):
    """Logits of 1 to 4, rounded to bfloat16, would be off by up to 8e-3."""
    errors = run_workers({"llama": ["llama", str(tmp_path), "bfloat16"]})["llama"]
    assert errors["start"][1] <= 1e-5
    stale, fresh = errors["lm_head.weight"]
    assert stale >= 0.1 and fresh <= 1e-5, errors
