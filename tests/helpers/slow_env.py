"""The environment `exact` that makes a phase of the run slow, for tests that end it there.

SLOW in the environment is json [phase, number]: when the first reply of the rollout with that number (from 1, on each
rank) is graded, the next such phase becomes slow; as soon as it is in it, the file SLOW_MARK appears. RECORD:
record_samples.py writes there, and an engine has places for 12 requests, so that work for later steps is cut by the end
of each.
"""

import json
import os
import sys
import time
from pathlib import Path

import record_samples

import envs
from judges.pool import GraderPool

PHASE, CALL = json.loads(os.environ.get("SLOW", "null")) or (None, 0)


def grade(seconds):
    time.sleep(seconds)


def here():
    Path(os.environ["SLOW_MARK"]).touch()


class Slow(envs.Exact):
    self_tests = ()  # the first reply is the run's

    def __init__(self):
        self.versions, self.pool = set(), None
        if os.environ.get("RECORD") and "RANK" in os.environ:
            record_samples.record(sys.modules["__main__"], Path(os.environ["RECORD"]))
            record_samples.give_places(12)

    def step(self, turns):
        is_first = turns[0].weight_version not in self.versions
        self.versions.add(turns[0].weight_version)
        is_slow = is_first and len(self.versions) == CALL
        if is_slow and PHASE == "grading":
            self.pool = GraderPool("slow_env:grade", num_workers=2, deadline_s=100, memory_mib=1024)
            here()
            self.pool.grade([60, 60, 60])
        elif is_slow:
            slow_down(PHASE)
        return super().step(turns)

    def close(self):
        assert self.pool is None, "a test's slow grading is never waited for"


def slow_down(phase):
    """Replaces what the phase calls. Decoding steps do nothing for a minute; everything else takes 3 s longer."""
    import torch
    from vllm.v1.engine.llm_engine import LLMEngine

    from engine import Engine
    from support.run import checkpoint

    owner, name = {
        "rollout": (LLMEngine, "step"),
        "validation": (LLMEngine, "step"),
        "update": (torch.optim.AdamW, "step"),
        "save": (checkpoint, "save_file"),
        "sync": (Engine, "sync"),
    }[phase]
    original, sync = getattr(owner, name), Engine.sync

    def decode(self):
        here()
        time.sleep(0.02)
        return []

    def sync_and_slow_down(*args):  # this rollout still decodes
        LLMEngine.step = decode
        return sync(*args)

    def late(*args, **kwargs):
        here()
        time.sleep(3)
        return original(*args, **kwargs)

    if owner is LLMEngine:
        Engine.sync = sync_and_slow_down
    else:
        setattr(owner, name, late)
