"""What the engine does on CUDA: sleep, wake, sync and cache reset, on a stand-in that refuses what a GPU cannot.

bench/gpu.sh shows the same with vLLM on a GPU: bench/gpu_smoke.py, and a run of configs/smoke.yaml.
"""

import json
import os
import sys
from types import SimpleNamespace
from unittest import mock

import fake_vllm
import pytest
import torch
from small_run import ROOT, STARTER, arguments, write_rows

import config
import engine as engine_module
import envs
import grpo
from base.hf.folder import read_model_config
from base.hf.tokenizer import Tokenizer
from base.hf.weights import sync_weights
from base.plan.memory_plan import Plan
from base.system import allocator
from base.system.exits import Interrupted, StopRun
from model import load_policy
from records import Problem, SamplingOptions
from rollout import Sampler
from run import job
from run.reward_model import RewardModel

OPTIONS = SamplingOptions(temperature=1.0, max_new_tokens=40)
PROMPTS, SEEDS = [[5, 6, 7 + i] for i in range(8)], list(range(8))


class LLM(fake_vllm.LLM):
    """Keeps its arguments; to the model they are those of one rank."""

    newest: "LLM"

    def __init__(self, **options):
        LLM.newest, self.options = self, options
        super().__init__(**options | {"tensor_parallel_size": 1})


@pytest.fixture
def cuda(monkeypatch, one_rank):
    """engine.py on the stand-in, on CUDA as far as the engine sees; everything else stays on the CPU."""
    for name in ("EngineArgs", "SamplingParams", "RequestOutputKind"):
        monkeypatch.setattr(engine_module, name, getattr(fake_vllm, name))
    monkeypatch.setattr(engine_module, "LLM", LLM)
    construct = engine_module.VLLMEngine.__init__

    def construct_on_cuda(self, *args):
        with mock.patch.object(torch.cuda, "is_available", lambda: True):
            construct(self, *args)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(engine_module.VLLMEngine, "__init__", construct_on_cuda)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: setattr(LLM.newest, "kernels_run", False))
    return monkeypatch


@pytest.fixture
def policy(one_rank):
    return load_policy(STARTER, device=one_rank[1], mesh=one_rank[2])


def make_engine(grpo_config=None, **policy):
    policy_config = config.PolicyConfig(**{"precision": "float32", "max_total_sequence_length": 128} | policy)
    cfg = config.Config(policy=policy_config, grpo=grpo_config or config.GRPOConfig())
    return engine_module.VLLMEngine(STARTER, read_model_config(STARTER), Tokenizer(STARTER), cfg)


@pytest.fixture
def awake(cuda, policy):
    """The engine after the start of a run."""
    engine = make_engine()
    engine.stop_token_ids = [0]  # which no seed here samples
    engine.sleep()
    sync_weights(policy, engine, 3)
    return engine


def is_asleep(weights="dropped"):
    return LLM.newest.asleep == {"weights", "kv_cache"} and LLM.newest.weights == weights


# ----------------------------------------------------------------------------------------------------- sleep and sync


@pytest.mark.slow
def test_the_engine_sleeps_while_a_run_trains(cuda, policy, tmp_path, one_rank):
    """Start, canary, validation, two steps and the last validation. Nothing is unfinished when the engine sleeps, and
    segments grow only while it sleeps."""
    cuda.setattr("signal.signal", lambda number, handler: None)
    cuda.setattr(job, "start_process_group", lambda *_: one_rank[:2])
    cuda.chdir(ROOT)
    clip, asleep = grpo.clip_grad_norm, []

    def clip_asleep(*args):
        asleep.append(is_asleep())
        return clip(*args)

    on_cuda = mock.patch.object(torch.cuda, "is_available", lambda: True)  # from the engine's start to the call
    build = job.build

    def build_on_cuda(*args, **kwargs):
        built = build(*args, **kwargs)
        on_cuda.start()
        return built

    def expand_asleep():
        on_cuda.stop()
        asleep.append(is_asleep())

    cuda.setattr(grpo, "clip_grad_norm", clip_asleep)
    cuda.setattr(job, "build", build_on_cuda)
    cuda.setattr(allocator, "expand_segments", expand_asleep)
    write_rows(tmp_path)
    words = ("grpo.max_num_steps=2", "grpo.logp_gap_limit=null", "grpo.canary_period=2", "checkpointing.enabled=false")
    cuda.setattr(sys, "argv", ["", *arguments(tmp_path), *words])
    assert grpo.main() == 0
    assert asleep == [True] * 3, "at the start and in two steps"
    (metrics,) = tmp_path.glob("exp_*/metrics.jsonl")
    records = [record for record in map(json.loads, metrics.read_text().splitlines()) if "train/loss" in record]
    num_bytes = sum(param.numel() for param in policy.parameters()) * 4
    assert [record["train/weight_sync_bytes"] for record in records] == [num_bytes] * 2
    assert all(record["timing/train/prepare_for_generation/total"] > 0 for record in records)


def scores_by(score):
    """A reward model without a decoder."""
    model = object.__new__(RewardModel)
    model.score = score
    return model


def test_a_reward_model_scores_while_the_weights_wait_in_host_memory(awake, one_rank):
    """Also beside what is carried, which goes on afterwards."""
    asleep = []

    reward_model = scores_by(lambda texts: asleep.append(is_asleep("in host memory")) or [0.5] * len(texts))
    environments = {"rm": envs.RewardModelEnv()}
    sampler = Sampler(awake, Tokenizer(STARTER), environments, one_rank[0], reward_model=reward_model)
    rows = [(i, Problem(i, [{"role": "user", "content": "1"}], "1", "rm", PROMPTS[i])) for i in range(2)]
    request_ids = awake.start(PROMPTS, SEEDS, OPTIONS, priority=9)
    for _ in range(2):  # again with the weights that came back: no sync is needed
        samples = sampler.sample(rows, 3, SamplingOptions(1.0, 5), (0,))
        assert [s.grade.reward for s in samples] == [0.5] * 6 and {s.oldest_version for s in samples} == {3}
    assert asleep == [True, True]
    assert all(set(reply.tokens["version"]) == {3} and len(reply.ids) == 40 for reply in awake.wait(request_ids))
    awake.sleep()  # the loop's, after the samples
    assert is_asleep()


def test_what_is_unfinished_outlasts_sleep_and_sync(awake, policy):
    """In the order of a step with a validation after it, whose requests go first. Each
    weights give 10 tokens."""
    request_ids = awake.start(PROMPTS, SEEDS, OPTIONS, priority=1)
    for version in (4, 5):
        awake.generate([[9]], [0], SamplingOptions(1.0, 10))
        awake.sleep()
        assert is_asleep()
        with pytest.raises(AssertionError, match=r"advance\(\) before a sync\(\)"):
            awake.wait(request_ids)
        sync_weights(policy, awake, version)
    assert all(reply.tokens["version"].tolist() == [3] * 10 + [4] * 10 + [5] * 20 for reply in awake.wait(request_ids))
    assert not awake.versions_by_request and not awake.unclaimed
    awake.sleep()
    assert is_asleep()


def test_a_cache_that_is_not_dropped_under_running_requests_stops_the_run(awake, policy, cuda):
    awake.start(PROMPTS, SEEDS, OPTIONS, priority=1)
    awake.sleep()
    cuda.setattr(awake.llm, "reset_prefix_cache", lambda reset_running_requests: False, raising=False)
    with pytest.raises(StopRun, match="vLLM did not drop its prefix cache"):
        sync_weights(policy, awake, 4)


# ------------------------------------------------------------------------------------------------------ when it ends


def test_told_to_stop_it_aborts_all_that_is_unfinished(awake):
    """So that the sleep to come finds no request: it would go on with the next step's weights."""
    engine = awake
    looks = []
    engine.should_stop = lambda: looks.append(1) or len(looks) == 2
    with pytest.raises(Interrupted):
        engine.generate(PROMPTS, SEEDS, OPTIONS)
    assert not engine.llm.llm_engine.has_unfinished_requests()
    engine.sleep()
    engine.wake("weights")
    engine.wake("kv_cache")
    with pytest.raises(AssertionError, match="the weights are dummies, or dropped by sleep"):
        engine.generate(PROMPTS, SEEDS, OPTIONS)


def test_a_partial_sync_stops_the_run_before_the_engine_can_be_used(awake, policy):
    engine = awake
    engine.sleep()
    engine.wake("weights")
    some = [(name, param.full_tensor()) for name, param in policy.named_parameters() if "norm" in name]
    with pytest.raises(StopRun, match="weight sync: not sent"):
        engine.sync(some, 4)
    engine.wake("kv_cache")
    with pytest.raises(AssertionError, match="dropped by sleep"):
        engine.generate(PROMPTS, SEEDS, OPTIONS)


# ------------------------------------------------------------------------------------------------- what it is given


def test_arguments_on_cuda(cuda, capsys):
    options = make_engine().llm.options
    assert options["enable_sleep_mode"] and options["sleep_mode_offload_cudagraph"] and not options["enforce_eager"]
    assert options["hf_overrides"] == {"vocab_size": Tokenizer(STARTER).vocab_size, "head_dtype": "float32"}
    assert options["enable_flashinfer_autotune"] is False and "attention_backend" not in options
    cuda.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))  # a B200: its FlashInfer downloads kernels
    assert make_engine(precision="bfloat16").llm.options["attention_backend"] == "FLASH_ATTN"
    assert "attention_backend" not in make_engine().llm.options, "FlashAttention has no float32"
    assert capsys.readouterr().out == ""
    cuda.setattr(engine_module, "EngineArgs", object)  # vLLM 0.24, which also ignores the head's dtype
    rounds = property(lambda self: SimpleNamespace(head_dtype=torch.bfloat16), lambda self, value: None)
    cuda.setattr(LLM, "model_config", rounds, raising=False)
    old_options = make_engine(precision="bfloat16").llm.options
    assert not {"sleep_mode_offload_cudagraph", "enable_flashinfer_autotune"} & old_options.keys()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("WARNING: this vLLM rounds logits to bfloat16")


@pytest.mark.parametrize(
    ("version", "runner"),
    [((0, 24, 0), "0"), ((0, 28, 1, "cu130"), "0"), ((0, 29, 0), "unset"), ((0, 32, 0, "cpu"), "unset")],
)
def test_an_old_vllm_runs_v1_and_schedules_no_step_ahead(cuda, version, runner):
    cuda.setattr(engine_module.vllm, "__version_tuple__", version)
    with mock.patch.dict("os.environ", {}):
        os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
        options = make_engine().llm.options
        assert os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "unset") == runner
    assert options.get("async_scheduling", "vLLM's own") == (False if runner == "0" else "vLLM's own")


@pytest.mark.parametrize(
    ("keys", "num_engines", "expected"),
    [
        ({"num_prompts_per_step": 64}, 8, 128),
        ({"num_prompts_per_step": 9}, 8, 32),  # one engine has a group more
        ({"num_prompts_per_step": 64}, 1, 1024),
        ({"num_prompts_per_step": 512}, 1, 1024),
        ({"num_prompts_per_step": 8, "batch_multiplier": 2.5}, 2, 160),
        ({"num_prompts_per_step": 2, "max_val_samples": 256}, 4, 64),
        (
            {"num_prompts_per_step": 2, "max_val_samples": 256, "async_grpo": config.AsyncGRPOConfig(enabled=True)},
            4,
            16,
        ),
        ({"num_prompts_per_step": 2, "max_val_samples": 30, "val_num_generations_per_prompt": 16}, 8, 64),
    ],
)
def test_max_num_seqs(cuda, keys, num_engines, expected):
    """Two ranks to an engine: it has the samples of both."""
    cuda.setattr(torch.distributed, "get_world_size", lambda: 2 * num_engines)
    generation = config.GenerationConfig(vllm_cfg=config.VllmConfig(tensor_parallel_size=2))
    grpo_config = config.GRPOConfig(**{"num_generations_per_prompt": 16, "max_val_samples": 1} | keys)
    assert make_engine(grpo_config, generation=generation).llm.options["max_num_seqs"] == expected
    cfg = config.Config(grpo=grpo_config, policy=config.PolicyConfig(generation=generation))
    plan = Plan(cfg, read_model_config(STARTER), 262, 2 * num_engines)
    assert plan.engine["engine's buffers"] == 5 * 4 * expected * 262 + 2**30


def test_a_logprob_is_that_of_the_sampled_id():
    """A position may begin with another id; and an id may have been sampled or listed before."""
    flat = fake_vllm.FlatLogprobs()
    for entries in ({4: -1.0, 5: -2.0}, {5: -3.0}, {4: -4.0, 7: -5.0, 5: -6.0}):
        flat.append(entries)
    reply = SimpleNamespace(token_ids=[5, 5, 5], logprobs=flat, finish_reason="stop")
    assert engine_module.completion_of(reply, [(3, 0)]).tokens["logp"].tolist() == [-2.0, -3.0, -6.0]
    reply.token_ids = [5, 4, 5]  # 4 is listed at the positions before and behind
    with pytest.raises(ValueError, match="is not in list"):
        engine_module.completion_of(reply, [(3, 0)])


@pytest.mark.slow
def test_flat_logprobs_are_those_of_vllm():
    from vllm.logprobs import FlatLogprobs, Logprob

    theirs, ours = FlatLogprobs(), fake_vllm.FlatLogprobs()
    for entries in ({4: -1.0, 5: -2.0}, {5: -3.0}):
        theirs.append({token: Logprob(logprob) for token, logprob in entries.items()})
        ours.append(entries)
    assert all(getattr(theirs, name) == value for name, value in vars(ours).items())
