"""The engine that a GPU has, on a CPU: vLLM's V2 model runner in Triton's interpreter, and its asynchronous scheduler.

tests/helpers/sitecustomize.py switches both on. Tests of the engine then run a second time, each file in a process of
its own, and the real command trains, carries responses over and resumes.
"""

import json
import os
import re
import subprocess
import sys

import pytest
from small_run import ROOT, arguments, write_rows

IN_V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
AGAIN = {  # file -> tests
    "core/test_engine.py": [
        "test_a_sample_depends_on_its_seed_not_on_the_batch",
        "test_greedy_is_the_argmax_of_transformers",
        "test_filters_of_validation",
        "test_lengths_end_tokens_and_finish_reasons",
        "test_skipped_sync[all weights]",
        "test_skipped_sync[LoRA]",
        "test_prefix_cache_that_outlives_a_sync",
        "test_dropped_parameter",
        "test_stale_tied_head",
        "test_told_to_stop_between_decode_steps",
    ],
    "core/test_unfinished.py": [
        "test_every_token_is_of_the_weights_of_its_version",
        "test_without_the_rebuild_a_token_is_of_no_weights_at_all",
        "test_a_split_job_is_exact_to_the_token[0]",
        "test_a_split_job_that_keeps_keys_and_values_mixes_weights_in_old_requests_alone",
        "test_a_sample_survives_being_put_back_into_the_queue",
        "test_conversations_of_several_turns_go_on_over_weight_changes",
    ],
    "core/test_fast_run.py": [
        "test_a_reply_ends_with_the_token_that_completes_a_stop_string[vllm]",
        "test_the_stand_in_is_like_vllm",
    ],
    "core/test_families.py": ["test_every_parameter_of_transformers_blocks_reaches_the_engine[qwen3_moe]"],
    "system/test_ranks.py": [
        "test_engine_over_two_ranks_gives_the_tokens_of_one",
        "test_conversations_of_an_engine_of_two_ranks_go_on_over_a_weight_change",
    ],
    "agents/test_rollouts.py": ["test_agents_lead_conversations_of_their_own_kinds"],
    "agents/test_endpoint.py": ["test_requests_right_and_wrong"],  # top log-probabilities among them
}


def environment() -> dict[str, str]:
    helpers = str(ROOT / "tests" / "helpers")
    return os.environ | {"VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": helpers, "GRPO_PYTHON": sys.executable}


@pytest.mark.skipif(not IN_V2, reason="run by the next test")
def test_the_engine_is_that_of_a_gpu(engine):
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    assert engine.runner == "vllm.v1.worker.cpu.model_runner"  # V2's, plus what a CPU needs
    assert type(scheduler).__name__ == "AsyncScheduler"


@pytest.mark.long
@pytest.mark.parametrize("file", AGAIN)
def test_what_holds_on_a_cpu_holds_there(file):
    """No test is left out, none is skipped."""
    names = [f"tests/{file}::{name}" for name in AGAIN[file]]
    own = f"{__file__}::test_the_engine_is_that_of_a_gpu"
    command = [sys.executable, "-m", "pytest", "-q", "-c", "pyproject.toml", "-m", "", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, own, *names], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    last = done.stdout.strip().splitlines()[-1]
    assert re.match(r"\d+ passed", last) and "skipped" not in last, last


def train(folder, *words) -> str:
    """What the real command says of a run of few tokens."""
    words = [*arguments(folder), "grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=4", *words]
    words += ["grpo.val_at_start=false", "grpo.val_at_end=false", "checkpointing.save_hf_at_end=false"]
    words += ["policy.generation.max_new_tokens=6", "logger.tensorboard_enabled=false"]
    env = environment() | {"VLLM_LOGGING_LEVEL": "INFO"}
    done = subprocess.run(
        ["./train.sh", "--nproc_per_node=1", *words], cwd=ROOT, env=env, capture_output=True, text=True
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-5000:]
    assert "vllm.v1.worker.cpu.model_runner" in said
    return said


def steps_of(folder):
    records = [json.loads(line) for line in (folder / "exp_001" / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "train/loss" in record]


@pytest.mark.long
@pytest.mark.parametrize("carried", [False, True])
def test_a_run_trains_and_resumes(carried, tmp_path):
    """A resumed run has the numbers of a whole one, also where responses are a step old."""
    words = ["grpo.async_grpo.enabled=true", "loss_fn.old_logprobs=sampler"] if carried else []
    found = []
    for name, lives in (("whole", [4]), ("resumed", [2, 4])):
        folder = tmp_path / name
        folder.mkdir()
        write_rows(folder)
        for number, last in enumerate(lives):
            resume = [f"checkpointing.resume_from={folder}/exp_001"] if number else []
            train(folder, *words, f"grpo.max_num_steps={last}", *resume)
        found.append(steps_of(folder))
    whole, resumed = found
    assert [record["step"] for record in whole] == [record["step"] for record in resumed] == [1, 2, 3, 4]
    assert all(record["train/logp_gap_max"] < 1e-4 for record in whole + resumed)
    assert [record["train/loss"] for record in whole] == [record["train/loss"] for record in resumed]
    if carried:
        assert max(record["train/max_trajectory_age"] for record in whole) == 1
