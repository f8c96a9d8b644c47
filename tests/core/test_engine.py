"""A sampler that stayed old in one of the ways seen in the wild is found within one step, on a real engine."""

from dataclasses import replace

import freshness
import pytest
import torch
from samples import sample

import config
from hf.tokenizer import Tokenizer
from hf.weights import full_tensors
from model import load_policy
from rollout import sample_seed
from system.exits import Interrupted, StopRun

CFG = config.Config(
    grpo=config.GRPOConfig(logp_gap_limit=1e-3),
    policy=config.PolicyConfig(
        precision="float32", max_total_sequence_length=256, generation=config.GenerationConfig(temperature=0.7)
    ),
)
OLD = "sampler and trainer disagree by"


@pytest.fixture
def policy(one_rank, tiny):
    _, device, mesh = one_rank
    return load_policy(tiny[0], device=device, mesh=mesh)


@pytest.fixture
def synced(engine, policy):
    sync(engine, policy, 0)
    assert look(policy, engine) <= 1e-4, "fresh, also with prompts cached in the engine before"
    return engine


def sync(engine, policy, version, without=None):
    engine.sync(((n, t) for n, t in full_tensors(policy, engine.dtype) if n != without), version)


def look(policy, engine):
    return freshness.check_canary(CFG, policy, engine, torch.device("cpu"), "after step 1")


def step(policy, only=None):
    """An optimizer's step of the size that a large learning rate makes, the same each time."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in policy.named_parameters():
            local = param.to_local()
            noise = 0.02 * torch.randn(local.shape, generator=generator)
            if only is None or name == only:
                local.add_(noise)


def test_skipped_sync(synced, policy, tiny):
    tokenizer = Tokenizer(tiny[0])
    assert synced.vocab_size == tokenizer.vocab_size
    step(policy)
    with pytest.raises(StopRun, match=f"after step 1: on a fixed prompt {OLD}"):
        look(policy, synced)
    samples = [replace_version(version) for version in (1, 0)]
    freshness.check_versions(samples[:1], 1)
    with pytest.raises(StopRun, match=r"weights of steps \[0, 1\], to train those of step 1: no sync"):
        freshness.check_versions(samples, 1)
    sync(synced, policy, 1)
    assert look(policy, synced) <= 1e-4


def replace_version(version):
    return replace(sample(0, 1.0, "ok", 3), weight_version=version)


def test_prefix_cache_that_outlives_a_sync(synced, policy, monkeypatch):
    """The engine says that it has dropped its cache, and has not: the canary's first block is of the old weights."""
    step(policy)
    with monkeypatch.context() as patch:
        patch.setattr(synced.llm, "reset_prefix_cache", lambda: True)
        sync(synced, policy, 1)
    with pytest.raises(StopRun, match=OLD):
        look(policy, synced)
    sync(synced, policy, 1)
    assert look(policy, synced) <= 1e-4
    with monkeypatch.context() as patch:
        patch.setattr(synced.llm, "reset_prefix_cache", lambda: False)
        with pytest.raises(StopRun, match="did not drop its prefix cache"):
            sync(synced, policy, 2)


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight", "model.norm.weight"]
)
def test_dropped_parameter(synced, policy, name, monkeypatch):
    """By the sender, which the names show; or by the engine, which only the canary does."""
    step(policy, only=name)
    with pytest.raises(StopRun, match=f"the engine did not get its .*{name}"):
        sync(synced, policy, 1, without=name)
    with monkeypatch.context() as patch:
        patch.setattr(synced, "param_names", synced.param_names - {name})
        sync(synced, policy, 1, without=name)
    with pytest.raises(StopRun, match=OLD):
        look(policy, synced)
    sync(synced, policy, 1)
    assert look(policy, synced) <= 1e-4


def test_stale_tied_head(synced, policy, monkeypatch):
    """The embedding arrives, the head's packed copy of it does not: what vLLM's CPU layers do with a tied head."""
    step(policy, only="model.embed_tokens.weight")
    with monkeypatch.context() as patch:
        patch.setattr(synced, "send_head_copy", False)
        with pytest.raises(StopRun, match=r"the engine did not get its \['lm_head\.weight'\]"):
            sync(synced, policy, 1)
        patch.setattr(synced, "param_names", synced.param_names - {"lm_head.weight"})
        sync(synced, policy, 1)
    with pytest.raises(StopRun, match=OLD):
        look(policy, synced)
    sync(synced, policy, 1)
    assert look(policy, synced) <= 1e-4


def test_wrong_shape_is_refused(synced, policy):
    """Of the first sync vLLM checks them, with a bare assertion; later ones must be as that."""
    name = "model.layers.0.mlp.down_proj.weight"
    cut = ((n, t[:-1] if n == name else t) for n, t in full_tensors(policy, synced.dtype))
    with pytest.raises(StopRun, match=r"down_proj\.weight has shape \[63, \d+\], before \[64, \d+\]"):
        list(synced._engine_weights(cut, set()))


def test_the_canary_is_not_given_up(synced, policy, monkeypatch):
    """Ranks would be told at different tokens, and the canary is a collective of all."""
    monkeypatch.setattr(synced, "stop", lambda: True)
    assert look(policy, synced) <= 1e-4


def test_told_to_stop_between_decode_steps(synced, policy, monkeypatch):
    """What was asked for is given up, and the engine is as before."""
    prompts, seeds = [[5, 6, 7 + i] for i in range(8)], [sample_seed(i) for i in range(8)]
    how = {"temperature": 0.7, "max_new_tokens": 60}
    before = synced.generate(prompts, seeds, **how)
    asked = []
    monkeypatch.setattr(synced, "stop", lambda: asked.append(1) or len(asked) == 2)
    with pytest.raises(Interrupted):
        synced.generate(prompts, seeds, **how)
    assert not synced.llm.llm_engine.has_unfinished_requests()
    monkeypatch.undo()
    after = synced.generate(prompts, seeds, **how)
    assert [c.ids.tolist() for c in after] == [c.ids.tolist() for c in before]
    assert all((a.logps == b.logps).all() for a, b in zip(after, before, strict=True))
