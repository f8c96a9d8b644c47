"""Whole runs of `grpo.main` and `eval.main` in the test's own process, with a stand-in for vLLM."""

import fake_vllm
from small_run import ROOT

import engine
from run import job


def use_stand_in(patch):
    """In a whole session engine.py has the real vLLM by now."""
    for name in ("LLM", "EngineArgs", "SamplingParams", "RequestOutputKind"):
        patch.setattr(engine, name, getattr(fake_vllm, name))


def run_in_this_process(patch, one_rank):
    """The session has its process group already, and keeps its signal handlers."""
    use_stand_in(patch)
    patch.chdir(ROOT)
    patch.setattr("signal.signal", lambda number, handler: None)
    patch.setattr(job, "start_process_group", lambda *_: one_rank[:2])
