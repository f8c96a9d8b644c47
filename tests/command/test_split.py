"""The real command by train.sh, on CPU, with real engines: 2 trainers and 1 generator give the bits of 2 ranks in
turns."""

import pytest
from run_life import assert_same, run_to_the_end

SPLIT = ("policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=1")
EVERY = ("checkpointing.save_period=1", "checkpointing.keep_latest=6")


@pytest.mark.long
def test_a_split_job_is_the_run_in_turns_to_the_bit(tmp_path):
    works = [tmp_path / name for name in ("in_turns", "split")]
    for work in works:
        work.mkdir()
    in_turns = run_to_the_end(works[0], 6, *EVERY)
    split = run_to_the_end(works[1], 6, "--nproc_per_node=3", *SPLIT, *EVERY)
    for step in range(1, 7):
        assert_same(split, in_turns, step)
    log = (works[1] / "life_0.log").read_text()
    assert log.count("engine: 1 x vLLM over 1 ranks each, vllm.v1.worker.") == 1 and "FSDP2 over 2 ranks" in log
    assert "Traceback" not in log
