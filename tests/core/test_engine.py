"""The engine against the trainer and transformers: same tokens, same log-probabilities; a stale one is found."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from dist_case import settings
from loop import CPU, make_run, train
from samples import of_version, sample
from tiny import VOCAB_SIZE

import config
import envs
from base.hf.tokenizer import Tokenizer
from base.hf.weights import full_tensors
from base.system.exits import Interrupted, StopRun
from gap import check_canary, check_versions
from head import HeadOptions, response_logps
from kernels.filter import SamplingFilter
from model import load_policy
from pack import pack_samples, rows_of, to_device
from records import Problem, SamplingOptions, groups_of
from rollout import Sampler, sample_seed

TEMPERATURE = 0.7
HEAD = HeadOptions(TEMPERATURE, VOCAB_SIZE)
OLD = "sampler and trainer disagree by"


@pytest.fixture
def policy(request, one_rank, tiny):
    """All of its weights are trained, or by WITH_LORA also one with adapters, as steps would have left them."""
    _, device, mesh = one_rank
    lora = config.LoRAConfig(enabled=getattr(request, "param", "") == "LoRA")
    model = load_policy(tiny[0], device=device, mesh=mesh, lora=lora)
    if lora.enabled:
        step(model)
    return model


WITH_LORA = pytest.mark.parametrize("policy", ["all weights", "LoRA"], indirect=True)


@pytest.fixture
def tokenizer(tiny):
    return Tokenizer(tiny[0])


def sync(engine, policy, version=0, without=None):
    engine.sync(((n, t) for n, t in full_tensors(policy, engine.dtype) if n != without), version)


def draw(engine, tokenizer, ranks, num_prompts, num_samples, options):
    """Samples from prompts of several lengths, graded by the arithmetic environment (all wrong: random weights)."""
    texts = [f"{i}+{7 * i}" * (1 + i % 4) for i in range(num_prompts)]
    rows = [
        Problem(
            i, [{"role": "user", "content": text}], "1", "exact", tokenizer.render([{"role": "user", "content": text}])
        )
        for i, text in enumerate(texts)
    ]
    sampler = Sampler(engine, tokenizer, {"exact": envs.Exact()}, ranks)
    return sampler.sample(list(enumerate(rows)), num_samples, options, (0,))


@pytest.fixture
def samples_of(engine, tokenizer, one_rank):
    def draw_samples(num_prompts, num_samples, max_new_tokens):
        options = SamplingOptions(TEMPERATURE, max_new_tokens)
        return draw(engine, tokenizer, one_rank[0], num_prompts, num_samples, options)

    return draw_samples


def gaps(policy, samples, head=HEAD):
    """|sampler - trainer| of every sampled token, through the packs that training uses."""
    gap = []
    for pack in pack_samples([rows_of(group) for group in groups_of(samples)], 2048):
        micro = to_device(pack, CPU)
        with torch.no_grad():
            logp_R, _ = response_logps(policy, micro.model_inputs, micro.target_R, head)
        gap.append((logp_R - micro.sampler_logp_R).abs())
    return torch.cat(gap)


@pytest.mark.slow
def test_sampler_equals_trainer_and_transformers_with_padded_vocabulary(engine, policy, samples_of, tiny):
    sync(engine, policy)
    samples = samples_of(32, 8, 60)
    gap = gaps(policy, samples)
    assert len(gap) == sum(int(s.sequence.tokens["mask"].sum()) for s in samples) >= 10_000
    assert gap.max() <= 1e-4, gap.max()
    assert max(s.sequence.tokens["id"].max() for s in samples) < VOCAB_SIZE < tiny[1].config.vocab_size
    # An oracle that shares nothing with us: the padded rows hold probability in transformers' logits and must be cut.
    for s in samples[::37]:
        ids = torch.tensor(s.sequence.token_ids)
        with torch.no_grad():
            logits_TV = tiny[1](ids[None]).logits[0, len(s.sequence.prompt_ids) - 1 : -1]
        padded_mass = logits_TV.softmax(-1)[:, VOCAB_SIZE:].sum(-1)
        logp_TV = (logits_TV[:, :VOCAB_SIZE] / TEMPERATURE).log_softmax(-1)
        expected = logp_TV.gather(1, ids[len(s.sequence.prompt_ids) :, None])[:, 0]
        assert (expected - torch.from_numpy(s.sequence.tokens["logp"])).abs().max() <= 1e-4
        assert padded_mass.mean() > 0.01  # so that forgetting to cut them would show


@pytest.mark.slow
@WITH_LORA
def test_every_parameter_reaches_the_engine(engine, policy, samples_of):
    sync(engine, policy)
    assert gaps(policy, samples_of(8, 2, 12)).max() <= 1e-4
    for name, param in policy.named_parameters():
        if not param.requires_grad:
            continue
        with torch.no_grad():
            generator = torch.Generator().manual_seed(1)
            local = param.to_local()
            local.add_(0.1 * torch.randn(local.shape, generator=generator))
        stale = gaps(policy, samples_of(8, 2, 12))
        assert stale.max() > 1e-3, f"{name}: the probe does not see that the engine is stale"
        sync(engine, policy)
        fresh = gaps(policy, samples_of(8, 2, 12))
        assert fresh.max() <= 1e-4, f"{name} did not reach the engine: {fresh.max()}"


@pytest.mark.slow
@WITH_LORA
def test_skipped_sync_after_an_optimizer_step_stops_the_run(engine, policy, samples_of, one_rank):
    cfg = settings(
        grpo={"logp_gap_limit": 1e-3},
        policy={"max_total_sequence_length": 128, "generation": config.GenerationConfig(temperature=TEMPERATURE)},
    )
    sync(engine, policy)
    run = make_run(policy, cfg, one_rank[0], optimizer=torch.optim.AdamW(policy.parameters(), lr=1e-2))

    def one_step():
        samples = [of_version(s, run.state.step) for s in samples_of(8, 4, 12)]  # as if they were new
        run.num_steps = run.state.step + 1
        train(run, samples, np.linspace(-1, 1, len(samples)).tolist())

    one_step()
    assert run.metrics["logp_gap_max"] <= 1e-4
    with pytest.raises(StopRun, match="the engine holds old weights"):
        one_step()  # no sync in between: the run's goes to another engine
    policy.zero_grad()
    sync(engine, policy)
    one_step()
    assert run.metrics["logp_gap_max"] <= 1e-4 and run.state.step == 2


def test_partial_sync_is_refused(engine, policy):
    weights = [
        (name, tensor) for name, tensor in full_tensors(policy, engine.dtype) if "layers.1.mlp.up_proj" not in name
    ]
    with pytest.raises(StopRun, match="up_proj"):
        engine.sync(iter(weights), 0)
    sync(engine, policy)


def test_a_sample_depends_on_its_seed_not_on_the_batch(engine, policy, samples_of):
    sync(engine, policy)
    everything = samples_of(6, 4, 20)
    prompts = [s.sequence.prompt_ids for s in everything]
    seeds = [sample_seed(0, s.prompt, s.index) for s in everything]
    order = [17, 3, 8]
    options = SamplingOptions(TEMPERATURE, 20)
    alone = engine.generate([prompts[i] for i in order], [seeds[i] for i in order], options)
    for i, completion in zip(order, alone, strict=True):
        assert completion.ids == everything[i].sequence.output_ids
        assert np.array_equal(completion.tokens["logp"], everything[i].sequence.tokens["logp"])
    assert len({tuple(s.sequence.output_ids) for s in everything if s.prompt == 0}) == 4


def test_greedy_is_the_argmax_of_transformers(engine, policy, tokenizer, tiny):
    sync(engine, policy)
    prompt = tokenizer.render([{"role": "user", "content": "12+34="}])
    ids = engine.generate([prompt], [0], SamplingOptions(0.0, 24))[0].ids
    expected = list(prompt)
    with torch.no_grad():
        for _ in ids:
            expected.append(int(tiny[1](torch.tensor([expected])).logits[0, -1, : tokenizer.vocab_size].argmax()))
    assert ids == expected[len(prompt) :]


@pytest.mark.parametrize(("filters", "num_kept"), [({"top_k": 3}, 3), ({"top_p": 0.6}, None), ({"top_k": 1}, 1)])
def test_filters_of_validation(engine, policy, tokenizer, tiny, filters, num_kept):
    """All samples come from the kept ids and no kept id of some weight is missing; logps are those after the filter."""
    sync(engine, policy)
    prompt = tokenizer.render([{"role": "user", "content": "12+34="}])
    with torch.no_grad():
        probs = tiny[1](torch.tensor([prompt])).logits[0, -1, : tokenizer.vocab_size].double().softmax(0)
    ordered, ids = probs.sort(descending=True)
    if num_kept is None:  # the fewest ids that hold top_p of the probability
        num_kept = 1 + int((ordered.cumsum(0) < filters["top_p"]).sum())
    kept = dict(zip(ids[:num_kept].tolist(), (ordered[:num_kept] / ordered[:num_kept].sum()).tolist(), strict=True))
    completions = engine.generate([prompt] * 400, list(range(400)), SamplingOptions(1.0, 1, **filters))
    sampled = {int(c.ids[0]): float(c.tokens["logp"][0]) for c in completions}
    assert {i for i, p in kept.items() if p > 0.03} <= sampled.keys() <= kept.keys() and len(kept) < 60
    assert all(abs(logp - np.log(kept[i])) < 1e-4 for i, logp in sampled.items())


@pytest.mark.slow
@pytest.mark.parametrize(("top_p", "top_k"), [(0.8, None), (1.0, 20), (0.9, 60)])
def test_the_trainer_filters_as_the_sampler(engine, policy, tokenizer, one_rank, top_p, top_k):
    """The stored log-probabilities are the trainer's, which cuts no sampled token; unfiltered ones are not."""
    sync(engine, policy)
    options = SamplingOptions(TEMPERATURE, 60, top_p, top_k)
    samples = draw(engine, tokenizer, one_rank[0], 16, 4, options)
    assert gaps(policy, samples).mean() > 0.05
    filtered = replace(HEAD, sampling_filter=SamplingFilter(top_p, top_k))
    gap = gaps(policy, samples, filtered)
    assert len(gap) > 2000 and gap.max() <= 1e-4, gap.max()
    assert check_canary(policy, filtered, engine, 1e-3, CPU, "") <= 1e-4  # which compares without filter
    step(policy)
    assert gaps(policy, samples, filtered).max() == torch.inf  # of other weights the sampled tokens are not all kept


def test_a_rank_without_problems_generates_nothing(engine, policy):
    sync(engine, policy)
    assert engine.generate([], [], SamplingOptions(1.0, 4)) == []


@pytest.mark.slow
def test_lengths_end_tokens_and_finish_reasons(engine, policy, tokenizer, monkeypatch):
    sync(engine, policy)
    ours, of_the_folder = list(range(0, 250, 30)), list(range(15, 250, 30))
    monkeypatch.setattr(engine, "stop_token_ids", ours)
    folder = engine.llm.llm_engine.input_processor.generation_config_fields
    monkeypatch.setitem(folder, "eos_token_id", of_the_folder)
    prompt = tokenizer.render([{"role": "user", "content": "x" * 230}])
    completions = engine.generate([prompt] * 64, list(range(64)), SamplingOptions(1.0, 60))
    room = engine.max_total_tokens - len(prompt)
    assert room < 60 and {len(c.ids) for c in completions if c.finish_reason == "length"} == {room}
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert stopped and all(c.ids[-1] in ours for c in stopped)  # the end token is kept, and trained on
    amid = {i for c in completions for i in c.ids[:-1]}
    assert amid.isdisjoint(ours) and not amid.isdisjoint(of_the_folder)


# ------------------------------------------------------------------------------------------------- is the engine fresh?


@pytest.fixture
def synced(engine, policy):
    sync(engine, policy, 0)
    assert look(policy, engine) <= 1e-4, "fresh, also with prompts cached in the engine before"
    return engine


def look(policy, engine):
    return check_canary(policy, HEAD, engine, 1e-3, CPU, "after step 1")


def step(policy, only=None):
    """An optimizer's step of the size that a large learning rate makes, the same each time."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in policy.named_parameters():
            local = param.to_local()
            noise = 0.02 * torch.randn(local.shape, generator=generator)
            if param.requires_grad and only in (None, name):
                local.add_(noise)


@WITH_LORA
def test_skipped_sync(synced, policy):
    assert synced.vocab_size == VOCAB_SIZE
    step(policy)
    with pytest.raises(StopRun, match=f"after step 1: on a fixed prompt, {OLD}"):
        look(policy, synced)
    samples = [of_version(sample(0, 1.0, "ok", 3), version) for version in (1, 0)]
    check_versions(samples[:1], 1, config.GRPOConfig())
    for wrong in (samples, samples[1:], [of_version(samples[0], 2)]):
        with pytest.raises(StopRun, match=r"weight versions .* at 1: "):
            check_versions(wrong, 1, config.GRPOConfig())
    sync(synced, policy, 1)
    assert look(policy, synced) <= 1e-4


@pytest.mark.slow
@WITH_LORA
def test_prefix_cache_that_outlives_a_sync(synced, policy, monkeypatch):
    """The engine says that it has dropped its cache, and has not: the canary's first block is of the old weights."""
    step(policy)
    with monkeypatch.context() as patch:
        patch.setattr(synced.llm, "reset_prefix_cache", lambda **_: True)
        sync(synced, policy, 1)
    with pytest.raises(StopRun, match=OLD):
        look(policy, synced)
    sync(synced, policy, 1)
    assert look(policy, synced) <= 1e-4
    with monkeypatch.context() as patch:
        patch.setattr(synced.llm, "reset_prefix_cache", lambda **_: False)
        with pytest.raises(StopRun, match="did not drop its prefix cache"):
            sync(synced, policy, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight", "model.norm.weight"]
)
def test_dropped_parameter(synced, policy, name, monkeypatch):
    """By the sender, which the names show; or by the engine, which only the canary does."""
    step(policy, only=name)
    with pytest.raises(StopRun, match=f"not sent: .*{name}"):
        sync(synced, policy, 1, without=name)
    with monkeypatch.context() as patch:
        patch.setattr(synced, "param_names", synced.param_names - {name})
        sync(synced, policy, 1, without=name)
    with pytest.raises(StopRun, match=OLD):
        look(policy, synced)
    sync(synced, policy, 1)
    assert look(policy, synced) <= 1e-4


@pytest.mark.slow
def test_stale_tied_head(synced, policy, monkeypatch):
    """The embedding arrives, the head's packed copy of it does not: what vLLM's CPU layers do with a tied head."""
    step(policy, only="model.embed_tokens.weight")
    with monkeypatch.context() as patch:
        patch.setattr(synced, "send_head_copy", False)
        with pytest.raises(StopRun, match=r"not sent: \['lm_head\.weight'\]"):
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
    with pytest.raises(StopRun, match=r"down_proj\.weight has shape \[63, \d+\]; at first it had \[64, \d+\]"):
        list(synced._engine_weights(cut, {}))
    assert next(cut, None) is None, "in a split job the trainers would wait with what nobody takes"


@pytest.mark.slow
def test_the_canary_is_not_given_up(synced, policy, monkeypatch):
    """Ranks would be told at different tokens, and the canary is a collective of all."""
    monkeypatch.setattr(synced, "should_stop", lambda: True)
    assert look(policy, synced) <= 1e-4


@pytest.mark.slow
def test_told_to_stop_between_decode_steps(synced, policy, monkeypatch):
    """What was asked for is given up, and the engine is as before."""
    prompts, seeds = [[5, 6, 7 + i] for i in range(8)], [sample_seed(i) for i in range(8)]
    options = SamplingOptions(TEMPERATURE, 60)
    before = synced.generate(prompts, seeds, options)
    looks = []
    monkeypatch.setattr(synced, "should_stop", lambda: looks.append(1) or len(looks) == 2)
    with pytest.raises(Interrupted):
        synced.generate(prompts, seeds, options)
    assert not synced.llm.llm_engine.has_unfinished_requests()
    monkeypatch.undo()
    after = synced.generate(prompts, seeds, options)
    assert [c.ids for c in after] == [c.ids for c in before]
    assert all((a.tokens["logp"] == b.tokens["logp"]).all() for a, b in zip(after, before, strict=True))
