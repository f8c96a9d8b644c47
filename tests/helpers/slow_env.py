"""The environment `exact` that makes a phase of the run slow, for tests that end it there.

SLOW in the environment is json [phase, number]: when the first reply of the rollout with that number (from 1, on each
rank) is graded, the next such phase becomes slow; as soon as it is in it, the file SLOW_MARK appears.
"""

import json
import os
import time
from pathlib import Path

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
        self.versions, self.pool, self.is_asked = set(), None, False

    def step(self, turns):
        if not self.is_asked:  # what the start asks, of no rollout
            self.is_asked = True
            return super().step(turns)
        is_first = turns[0].weight_version not in self.versions
        self.versions.add(turns[0].weight_version)
        if is_first and len(self.versions) == CALL:
            {"grading": self.grade_slowly, "rollout": stop_decoding, "update": step_slowly}[PHASE]()
        return super().step(turns)

    def grade_slowly(self):
        self.pool = GraderPool("slow_env:grade", num_workers=2, deadline_s=100, memory_mib=1024)
        here()
        self.pool.grade([60, 60, 60])

    def close(self):
        assert self.pool is None, "a test's slow grading is never waited for"


def stop_decoding():
    """From the next sync on, a decoding step does nothing: the rollout that is graded still decodes."""
    from vllm.v1.engine.llm_engine import LLMEngine

    from engine import VLLMEngine

    sync = VLLMEngine.sync

    def decode(self):
        here()
        time.sleep(0.02)
        return []

    def sync_and_stop(*args):
        LLMEngine.step = decode
        return sync(*args)

    VLLMEngine.sync = sync_and_stop


def step_slowly():
    """Every optimizer step takes 3 s longer."""
    import torch

    step = torch.optim.AdamW.step

    def late(*args, **kwargs):
        here()
        time.sleep(3)
        return step(*args, **kwargs)

    torch.optim.AdamW.step = late
