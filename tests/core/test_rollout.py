"""The sampler against the trainer and against transformers: same tokens, same log-probabilities, only fresh weights."""

import numpy as np
import pytest
import torch
import update
from dist_case import batch_of

import config
import data
import envs
from hf.tokenizer import Tokenizer
from hf.weights import full_tensors
from model import load_policy
from rollout import rollout, sample_seed
from system.exits import StopRun

TEMPERATURE = 0.7


@pytest.fixture
def policy(one_rank, tiny):
    _, device, mesh = one_rank
    return load_policy(tiny[0], device=device, mesh=mesh)


@pytest.fixture
def tokenizer(tiny):
    return Tokenizer(tiny[0])


def sync(engine, policy, version=0):
    engine.sync(full_tensors(policy, engine.dtype), version)


def sample(engine, tokenizer, num_prompts, num_samples, max_new_tokens, seed=0):
    """Samples from prompts of several lengths, graded by the arithmetic environment (all wrong: random weights)."""
    texts = [f"{i}+{7 * i}" * (1 + i % 4) for i in range(num_prompts)]
    rows = [
        data.Problem(
            i, [{"role": "user", "content": text}], "1", "exact", tokenizer.render([{"role": "user", "content": text}])
        )
        for i, text in enumerate(texts)
    ]
    return rollout(
        engine,
        tokenizer,
        {"exact": envs.Exact()},
        list(enumerate(rows)),
        num_samples=num_samples,
        temperature=TEMPERATURE,
        max_new_tokens=max_new_tokens,
        seed_key=(seed,),
    )


def gaps(policy, tokenizer, samples):
    """|sampler - trainer| of every sampled token, through the packs that training uses."""
    gap = []
    for pack in data.pack_samples(samples, [0.0] * len(samples), 2048):
        tensors = [torch.from_numpy(x) for x in (pack.token_T, pack.position_T)]
        with torch.no_grad():
            logp_R, _ = policy(
                *tensors,
                pack.cu_seqlens,
                torch.from_numpy(pack.pos_R),
                torch.from_numpy(pack.target_R),
                temperature=TEMPERATURE,
                vocab_size=tokenizer.vocab_size,
            )
        gap.append((logp_R - torch.from_numpy(pack.sampler_logp_R)).abs())
    return torch.cat(gap)


def test_sampler_equals_trainer_and_transformers_with_padded_vocabulary(engine, policy, tokenizer, tiny):
    sync(engine, policy)
    samples = sample(engine, tokenizer, num_prompts=32, num_samples=8, max_new_tokens=60)
    gap = gaps(policy, tokenizer, samples)
    assert len(gap) == sum(int(s.mask.sum()) for s in samples) >= 10_000
    assert gap.max() <= 1e-4, gap.max()
    assert max(s.output_ids.max() for s in samples) < tokenizer.vocab_size < tiny[1].config.vocab_size
    # An oracle that shares nothing with us: the padded rows hold probability in transformers' logits and must be cut.
    for s in samples[::37]:
        ids = torch.tensor([*s.prompt_ids, *s.output_ids.tolist()])
        with torch.no_grad():
            logits_TV = tiny[1](ids[None]).logits[0, len(s.prompt_ids) - 1 : -1]
        padded_mass = logits_TV.softmax(-1)[:, tokenizer.vocab_size :].sum(-1)
        logp_TV = (logits_TV[:, : tokenizer.vocab_size] / TEMPERATURE).log_softmax(-1)
        expected = logp_TV.gather(1, ids[len(s.prompt_ids) :, None])[:, 0]
        assert (expected - torch.from_numpy(s.sampler_logps)).abs().max() <= 1e-4
        assert padded_mass.mean() > 0.01  # so that forgetting to cut them would show


def test_every_parameter_reaches_the_engine(engine, policy, tokenizer):
    sync(engine, policy)
    for name, param in policy.named_parameters():
        with torch.no_grad():
            generator = torch.Generator().manual_seed(1)
            local = param.to_local()
            local.add_(0.1 * torch.randn(local.shape, generator=generator))
        stale = gaps(policy, tokenizer, sample(engine, tokenizer, 8, 2, 12))
        assert stale.max() > 1e-3, f"{name}: the probe does not see that the engine is stale"
        sync(engine, policy)
        fresh = gaps(policy, tokenizer, sample(engine, tokenizer, 8, 2, 12))
        assert fresh.max() <= 1e-4, f"{name} did not reach the engine: {fresh.max()}"


def test_skipped_sync_after_an_optimizer_step_stops_the_run(engine, policy, tokenizer):
    cfg = config.Config(
        policy=config.PolicyConfig(
            max_total_sequence_length=128, generation=config.GenerationConfig(temperature=TEMPERATURE)
        )
    )
    sync(engine, policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)

    def one_step():
        samples = sample(engine, tokenizer, 8, 4, 12)
        adv_B = np.linspace(-1, 1, len(samples)).tolist()
        packs = data.pack_samples(samples, adv_B, 512)
        metrics = update.compute_gradients(policy, batch_of(packs, samples), cfg, tokenizer.vocab_size)
        optimizer.step()
        optimizer.zero_grad()
        return metrics

    metrics = one_step()
    assert metrics["logp_gap_max"] <= 1e-4
    update.check_logp_gap(metrics, 1e-3, step=1)
    with pytest.raises(StopRun, match="the engine holds old weights"):
        update.check_logp_gap(one_step(), 1e-3, step=2)  # no sync in between
    sync(engine, policy)
    assert one_step()["logp_gap_max"] <= 1e-4


def test_partial_sync_is_refused(engine, policy):
    weights = [
        (name, tensor) for name, tensor in full_tensors(policy, engine.dtype) if "layers.1.mlp.up_proj" not in name
    ]
    with pytest.raises(StopRun, match="up_proj"):
        engine.sync(iter(weights), 0)
    sync(engine, policy)


def test_a_sample_depends_on_its_seed_not_on_the_batch(engine, policy, tokenizer):
    sync(engine, policy)
    everything = sample(engine, tokenizer, 6, 4, 20)
    prompts = [s.prompt_ids for s in everything]
    seeds = [sample_seed(0, s.prompt, s.index) for s in everything]
    order = [17, 3, 8]
    alone = engine.generate(
        [prompts[i] for i in order], [seeds[i] for i in order], temperature=TEMPERATURE, max_new_tokens=20
    )
    for i, completion in zip(order, alone, strict=True):
        assert completion.ids.tolist() == everything[i].output_ids.tolist()
        assert np.array_equal(completion.logps, everything[i].sampler_logps)
    assert len({tuple(s.output_ids.tolist()) for s in everything if s.prompt == 0}) == 4


def test_greedy_is_the_argmax_of_transformers(engine, policy, tokenizer, tiny):
    sync(engine, policy)
    prompt = tokenizer.render([{"role": "user", "content": "12+34="}])
    ids = engine.generate([prompt], [0], temperature=0.0, max_new_tokens=24)[0].ids.tolist()
    expected = list(prompt)
    with torch.no_grad():
        for _ in ids:
            expected.append(int(tiny[1](torch.tensor([expected])).logits[0, -1, : tokenizer.vocab_size].argmax()))
    assert ids == expected[len(prompt) :]


@pytest.mark.parametrize(("how", "num_kept"), [({"top_k": 3}, 3), ({"top_p": 0.6}, None), ({"top_k": 1}, 1)])
def test_filters_of_validation(engine, policy, tokenizer, tiny, how, num_kept):
    """All samples come from the kept ids and no kept id of some weight is missing; logps are those after the filter."""
    sync(engine, policy)
    prompt = tokenizer.render([{"role": "user", "content": "12+34="}])
    with torch.no_grad():
        probs = tiny[1](torch.tensor([prompt])).logits[0, -1, : tokenizer.vocab_size].double().softmax(0)
    ordered, ids = probs.sort(descending=True)
    if num_kept is None:  # the fewest ids that hold top_p of the probability
        num_kept = 1 + int((ordered.cumsum(0) < how["top_p"]).sum())
    kept = dict(zip(ids[:num_kept].tolist(), (ordered[:num_kept] / ordered[:num_kept].sum()).tolist(), strict=True))
    completions = engine.generate([prompt] * 400, list(range(400)), temperature=1.0, max_new_tokens=1, **how)
    found = {int(c.ids[0]): float(c.logps[0]) for c in completions}
    assert {i for i, p in kept.items() if p > 0.03} <= found.keys() <= kept.keys() and len(kept) < 60
    assert all(abs(logp - np.log(kept[i])) < 1e-4 for i, logp in found.items())


def test_a_rank_without_problems_generates_nothing(engine, policy):
    sync(engine, policy)
    assert engine.generate([], [], temperature=1.0, max_new_tokens=4) == []


def test_lengths_end_tokens_and_finish_reasons(engine, policy, tokenizer, monkeypatch):
    sync(engine, policy)
    monkeypatch.setattr(
        engine, "stop_token_ids", list(range(0, 250, 10))
    )  # random weights hardly ever end by themselves
    prompt = tokenizer.render([{"role": "user", "content": "x" * 230}])
    completions = engine.generate([prompt] * 64, list(range(64)), temperature=1.0, max_new_tokens=60)
    room = engine.max_total_tokens - len(prompt)
    assert room < 60 and {len(c.ids) for c in completions if c.finish_reason == "length"} == {room}
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert stopped and all(c.ids[-1] in engine.stop_token_ids for c in stopped)  # the end token is kept, and trained on
    assert not any(i in engine.stop_token_ids for c in completions for i in c.ids[:-1])


def test_sample_seeds_differ_and_are_fixed():
    keys = [(42, step, prompt, index) for step in range(-1, 4) for prompt in range(8) for index in range(8)]
    assert len({sample_seed(*key) for key in keys}) == len(keys)
    assert sample_seed(42, 1, 0, 0) == GOLDEN_SEED  # changing this changes what every resumed run samples


GOLDEN_SEED = 221_851_323_711_279
