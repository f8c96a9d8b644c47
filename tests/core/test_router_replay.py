"""The sampler's choice of experts, from the engine to the trainer's routers, whose weights and gradients are their own.

The oracle is transformers' model with a router of a few lines in place of its own, which is told what to choose.
"""

import numpy as np
import operators_on_cpu
import pytest
import torch
import torch.distributed as dist
from families import make_family
from ranks import ranks
from samples import sampled
from test_blocks import drawn_experts, folder_of, gradients, packed, segments, weighted_sums, with_experts
from tiny import VOCAB_SIZE, make_tiny

import config
from attention import PackLayout
from base.check import summary
from base.hf.families import FAMILIES
from base.hf.folder import read_model_config
from base.hf.tokenizer import Tokenizer
from base.hf.weights import full_tensors, local_shard, sharded_parameters
from base.inputs.run_inputs import read_policy_config
from base.system.exchange import send_tokens, without_tokens
from base.system.ranks import start_process_group
from config import ConfigError
from engine import VLLMEngine
from head import HeadOptions, response_logps
from model import load_policy
from pack import empty_pack, pack_samples, rows_of, to_device
from records import Completion, Sample, SamplingOptions, TokenSequence, make_tokens
from router_replay import RouterReplay

CPU = torch.device("cpu")
MIXTURES = [name for name, family in FAMILIES.items() if family.experts is not None]
ALWAYS = ("qwen3_moe", "deepseek_v3")
TABLE = [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.long) for name in MIXTURES]


def replaying(folder, hf_model, *, chooses=False):
    """The policy of the model, with its replay."""
    cfg = read_model_config(folder_of(hf_model, folder), force_hf=True)
    model = load_policy(folder, device="cpu", model_config=cfg, freeze_moe_router=False)
    model.model.replay = RouterReplay(model.model.routers, cfg.num_experts, chooses)
    return model


def fraction(metrics, name):
    total, count = metrics[f"router_{name}_fraction"]
    return float(total / count)


def told_router(family, router, expert_TA):
    """The forward of a router that is told its choice: Qwen 3's and DeepSeek V3's formulas."""

    def forward(hidden, *_):
        logits_TE = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
        if family == "qwen3_moe":
            weight_TA = logits_TE.softmax(dim=-1).gather(1, expert_TA)
            return logits_TE, weight_TA / weight_TA.sum(dim=-1, keepdim=True), expert_TA
        weight_TA = logits_TE.sigmoid().gather(1, expert_TA)
        return logits_TE, 2.5 * weight_TA / weight_TA.sum(dim=-1, keepdim=True), expert_TA

    return forward


@pytest.mark.parametrize("family", ALWAYS)
def test_logits_and_gradients_are_those_of_a_model_that_is_told_its_experts(family, tmp_path):
    """Of a prompt with three replies, and of sequences alone; routers learn, too."""
    hf_model = make_family(family)
    model = replaying(tmp_path, hf_model)
    tokens_S, prefix_S = segments()
    lengths = [len(tokens) for tokens in tokens_S]
    experts_TLA = drawn_experts(model, sum(lengths))
    logits_S = model(*with_experts(packed(tokens_S, prefix_S), experts_TLA)).split(lengths)
    experts_S = experts_TLA.long().split(lengths)
    hf_routers = [module for name, module in hf_model.named_modules() if name.endswith("mlp.gate")]
    expected_S = []
    for tokens, prefix, chosen_TLA in zip(tokens_S, prefix_S, experts_S, strict=True):
        if prefix >= 0:
            tokens = torch.cat([tokens_S[prefix], tokens])
            chosen_TLA = torch.cat([experts_S[prefix], chosen_TLA])
        for layer, router in enumerate(hf_routers):
            router.forward = told_router(family, router, chosen_TLA[:, layer])
        expected_S.append(hf_model(tokens[None], use_cache=False).logits[0])
    total, expected_total = weighted_sums(logits_S, expected_S, bound=1e-5)
    total.backward()
    expected_total.backward()
    expected_gradients = gradients(hf_model)
    for name, gradient in gradients(model).items():
        expected = expected_gradients[model.config.module_name(name)]
        assert (gradient - expected).abs().max() <= 1e-4 * expected.abs().max(), name
        assert expected.abs().max() > 0, name


@pytest.mark.parametrize("family", TABLE)
def test_a_choice_of_its_own_changes_no_bit_and_another_one_does(family, tmp_path):
    model = replaying(tmp_path, make_family(family))
    replay = model.model.replay
    inputs = packed(*segments())
    num_tokens = len(inputs[0])
    own = {}
    hooks = []
    for layer, router in enumerate(model.model.routers):

        def note(module, args, out, layer=layer):
            (own[layer],) = (part for part in out if not part.is_floating_point())

        hooks.append(router.register_forward_hook(note))
    plain = model(*inputs)
    plain.square().sum().backward()
    expected = gradients(model)
    for hook in hooks:
        hook.remove()
    assert all(float(total) == 0 for pair in replay.metrics().values() for total in pair)  # none was given
    own_TLA = torch.stack(list(own.values()), dim=1).flip(2).short()  # in another order: a choice has none
    assert model(*with_experts(inputs, own_TLA)).equal(plain)
    model(*with_experts(inputs, own_TLA)).square().sum().backward()
    assert all(gradient.equal(expected[name]) for name, gradient in gradients(model).items())
    metrics = replay.metrics()
    assert fraction(metrics, "flip") == fraction(metrics, "fallback") == 0

    # Of one token in one layer another one: the token moves, those before it do not.
    number_E = np.arange(model.config.num_experts)
    other_TLA = own_TLA.clone()
    other_TLA[3, -1, 0] = int(np.setdiff1d(number_E, own_TLA[3, -1].numpy())[0])
    moved = (model(*with_experts(inputs, other_TLA)) - plain).abs().amax(1)
    assert moved[3] > 1e-5 and moved[:3].max() == 0
    assert fraction(replay.metrics(), "flip") == pytest.approx(1 / own_TLA[:, :, 0].numel())

    # What is not known the trainer chooses, and so it does if it is only to measure.
    other_TLA[3] = -1
    assert model(*with_experts(inputs, other_TLA)).equal(plain)
    assert fraction(replay.metrics(), "fallback") == pytest.approx(1 / num_tokens)
    replay.chooses = True
    assert model(*with_experts(inputs, drawn_experts(model, num_tokens))).equal(plain)
    assert fraction(replay.metrics(), "flip") > 0.5


def test_recompute_sends_tokens_to_the_same_experts(tmp_path):
    """In the backward of a micro-batch. What the routers choose counts once, of whichever layers are recomputed."""
    found = []
    fallbacks = []
    for recompute in (False, True, 2):  # 2: the first layer has no router
        cfg = read_model_config(folder_of(make_family("qwen3_moe"), tmp_path), force_hf=True)
        model = load_policy(tmp_path, device="cpu", model_config=cfg, freeze_moe_router=False, recompute=recompute)
        model.model.replay = RouterReplay(model.model.routers, cfg.num_experts, chooses=False)
        inputs = packed(*segments())
        experts_TLA = drawn_experts(model, len(inputs[0]))
        experts_TLA[:, 0] = -1
        for _ in range(2):
            model(*with_experts(inputs, experts_TLA)).square().sum().backward()
        found.append(gradients(model))
        fallbacks.append(fraction(model.model.replay.metrics(), "fallback"))
    plain, *others = found
    for recomputed in others:
        assert all(gradient.equal(plain[name]) for name, gradient in recomputed.items())
    assert fallbacks == [1 / len(model.model.routers)] * 3


def test_packs_have_the_experts_of_each_input():
    """Against each sequence alone; of a shared prompt those of the first one; -1 behind what is known."""
    rng = np.random.default_rng(0)
    samples = []
    for prompt in range(5):
        prompt_ids = rng.integers(0, 200, rng.integers(1, 20)).tolist()
        for index in range(rng.integers(2, 6) if prompt < 3 else 1):
            ids = rng.integers(0, 200, rng.integers(1, 12))
            sample = sampled(prompt, index, prompt_ids, ids, advantage=1.0)
            num_known = len(prompt_ids) + len(ids) - 1 - int(rng.integers(2)) * (len(ids) > 1)
            sample.sequence.experts_TLA = rng.integers(0, 300, (num_known, 3, 2)).astype(np.uint16)
            samples.append(sample)
    by_prompt = [[sample for sample in samples if sample.prompt == prompt] for prompt in range(5)]
    num_seen = 0
    for pack in pack_samples([rows_of(group) for group in by_prompt], 160):
        assert pack.experts_TLA.dtype == np.int16
        micro = to_device(pack, CPU)
        assert micro.model_inputs[2].experts_TLA is pack.experts_TLA
        assert micro.inputs_of_reference[2].experts_TLA is None
        bounds = pack.cu_seqlens
        for segment, prefix in enumerate(pack.prefix_S):
            rows = slice(bounds[segment], bounds[segment + 1])
            before = pack.token_T[bounds[prefix] : bounds[prefix + 1]].tolist() if prefix >= 0 else []
            inputs = before + pack.token_T[rows].tolist()
            (owner, *_) = [s for s in samples if s.sequence.token_ids[: len(inputs)] == inputs]
            known_TLA = owner.sequence.experts_TLA[len(before) : len(inputs)]
            expected_TLA = np.full((len(inputs) - len(before), 3, 2), -1)
            expected_TLA[: len(known_TLA)] = known_TLA
            assert np.array_equal(pack.experts_TLA[rows], expected_TLA)
            num_seen += 1
        assert num_seen == len(pack.prefix_S)
    assert (
        empty_pack().experts_TLA is None
        and pack_samples([rows_of([sampled(0, 0, [1], [2])])], 9)[0].experts_TLA is None
    )


def test_a_token_keeps_the_experts_of_the_call_that_drew_it():
    """A later call computes it again, maybe with other weights; the last id of a reply is first read there."""
    sequence = TokenSequence([5, 7, 2])
    first_TLA = np.full((4, 2, 2), 1, np.uint8)
    sequence.add_reply(Completion(make_tokens([9, 3], mask=True), "stop", (), first_TLA), 0, is_trained=True)
    assert sequence.num_routed_tokens == 4
    sequence.add_context([4, 4])
    later_TLA = np.full((8, 2, 2), 2, np.uint8)
    sequence.add_reply(Completion(make_tokens([8, 6], mask=True), "stop", (), later_TLA), 1, is_trained=True)
    assert sequence.experts_TLA[:, 0, 0].tolist() == [1, 1, 1, 1, 2, 2, 2, 2] and sequence.num_routed_tokens == 8
    late = TokenSequence([5, 7, 2])  # whose experts come with the second reply
    late.add_reply(Completion(make_tokens([9, 3], mask=True), "stop", (), first_TLA[:2]), 0, is_trained=True)
    late.add_reply(Completion(make_tokens([8, 6], mask=True), "stop", (), later_TLA[:6]), 1, is_trained=True)
    assert late.experts_TLA[:, 0, 0].tolist() == [1, 1, 2, 2, 2, 2]
    with pytest.raises(AssertionError):  # they are of another sequence
        TokenSequence([5]).add_reply(Completion(make_tokens([8], mask=True), "stop", (), later_TLA), 0, is_trained=True)


@ranks(2)
def moved_tokens(*dtypes):
    """For each dtype: whether what a rank needs of both ranks arrives as it was."""
    group, _ = start_process_group(tp_size=1)
    return [moved_with(dtype, group.rank) for dtype in dtypes]


def moved_with(dtype, rank):
    rng = np.random.default_rng(0)
    samples = []
    for number in range(7):
        ids = rng.integers(0, 200, rng.integers(1, 9))
        sample = sampled(number, 0, [1, 2, 3], ids, logp=rng.normal(size=len(ids)), holder=number % 2)
        if dtype is not None:
            sample.sequence.experts_TLA = rng.integers(0, 200, (len(ids) + 2, 3, 1)).astype(dtype)
            sample.sequence.num_routed_tokens = len(ids) + 2
        samples.append(sample)
    whole = [(s.sequence.tokens, s.sequence.experts_TLA) for s in samples]
    for number, sample in enumerate(samples):
        if number % 2 != rank:
            samples[number] = without_tokens(sample)
    needed = [[samples[n].sequence for n in numbers] for numbers in ([0, 1, 3, 6], [5, 4, 1, 2])]
    send_tokens(needed)
    found = []
    for number in ([0, 1, 3, 6], [5, 4, 1, 2])[rank]:
        tokens, experts_TLA = whole[number]
        sequence = samples[number].sequence
        equal = sequence.tokens.dtype == tokens.dtype and np.array_equal(sequence.tokens, tokens)
        if dtype is None:
            equal &= sequence.experts_TLA is None
        else:
            equal &= sequence.experts_TLA.dtype == dtype and np.array_equal(sequence.experts_TLA, experts_TLA)
        found.append(bool(equal))
    return found


@pytest.mark.slow
def test_experts_move_with_the_tokens():
    assert moved_tokens(None, np.uint8, np.uint16) == [[[True] * 4] * 3] * 2


HEAD = HeadOptions(1.0, VOCAB_SIZE)
PROMPTS = [[(31 * i + 7 * j) % 250 for j in range(30 + i)] for i in range(8) for _ in range(4)]


def start_engine(family, folder, precision):
    """(engine, policy with its replay), of the same weights."""
    make_tiny(folder)  # for its tokenizer
    make_family(family).save_pretrained(folder)
    start_process_group(tp_size=1)
    mesh = dist.init_device_mesh("cpu", (1,))
    policy = load_policy(folder, device="cpu", mesh=mesh, precision=precision)
    policy.model.replay = RouterReplay(policy.model.routers, policy.config.num_experts, chooses=False)
    replay = config.RouterReplayConfig(enabled=True)
    cfg = config.PolicyConfig(precision=precision, max_total_sequence_length=96, router_replay=replay)
    if policy.config.family.state is not None:
        operators_on_cpu.install()
    engine = VLLMEngine(folder, policy.config, Tokenizer(folder), config.Config(policy=cfg))
    engine.sync(full_tensors(policy, engine.dtype), 0)
    return engine, policy


def gaps_of(policy, done, *, chooses):
    """(|sampler - trainer| of all tokens, flips, fallbacks); four replies to each prompt."""
    policy.model.replay.chooses = chooses
    gaps = []
    for first in range(0, len(done), 4):
        samples = []
        for number in range(first, first + 4):
            sample = Sample(first, number, 0, [TokenSequence(PROMPTS[number])])
            sample.sequence.add_reply(done[number], 0, is_trained=True)
            samples.append(sample)
        (pack,) = pack_samples([rows_of(samples)], 512)
        micro = to_device(pack, CPU)
        logp_R, _ = response_logps(policy, micro.model_inputs, micro.target_R, HEAD)
        gaps.append((logp_R.detach() - micro.sampler_logp_R).abs())
    metrics = policy.model.replay.metrics()
    return torch.cat(gaps), fraction(metrics, "flip"), fraction(metrics, "fallback")


@ranks(1, seconds=180, with_vllm=True)
def measured(family, folder, precision):
    """(with own choices, with the sampler's): mean and largest gap, flips, fallbacks; whether the gaps are equal."""
    engine, policy = start_engine(family, folder, precision)
    done = engine.generate(PROMPTS, list(range(len(PROMPTS))), SamplingOptions(1.0, 24))
    found = []
    for chooses in (True, False):
        gap, *fractions = gaps_of(policy, done, chooses=chooses)
        found.append((gap.mean().item(), gap.max().item(), *fractions))
    equal = gaps_of(policy, done, chooses=True)[0].equal(gaps_of(policy, done, chooses=False)[0])
    return *found, equal


SLOW = {name: pytest.mark.slow if name == "qwen3_moe" else pytest.mark.long for name in MIXTURES}
ON_THE_ENGINE = [pytest.param(name, marks=mark) for name, mark in SLOW.items()]


@pytest.mark.parametrize("family", ON_THE_ENGINE)
def test_in_float32_the_sampler_chooses_as_the_trainer(family, tmp_path):
    """So rows and layers are where they belong: 32 replies are decoded at once, and end at different steps."""
    ((own, replayed, equal),) = measured(family, tmp_path, "float32")
    print(own, replayed)
    assert equal and own[2:] == replayed[2:] == (0, 0) and own[0] <= 1e-4


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm4_moe"])
def test_in_bfloat16_the_largest_gap_is_of_tokens_that_went_elsewhere(family, tmp_path):
    ((own, replayed, _),) = measured(family, tmp_path, "bfloat16")
    print(own, replayed)
    assert 0.002 < own[2] < 0.05 and own[3] == replayed[3] == 0
    assert replayed[0] < 0.95 * own[0] and replayed[1] < 0.6 * own[1]


@pytest.mark.slow
@ranks(1, seconds=180, with_vllm=True)
def over_a_sync(folder):
    """Of tokens drawn over a sync, before which all were sent back to the queue: (places in the reply of the first one
    of the new weights, flips against the old weights before it, against the new ones behind it, against the old)."""
    engine, policy = start_engine("qwen3_moe", folder, "float32")
    names = engine.start(PROMPTS[:4], [0, 1, 2, 3], SamplingOptions(1.0, 24))
    for _ in range(6):
        engine.step()
    engine.preempt()
    for _ in range(3):
        engine.step()
    old = {name: param.detach().clone() for name, param in sharded_parameters(policy).items()}
    with torch.no_grad():
        for param in sharded_parameters(policy).values():
            shard = local_shard(param)
            shard.add_(0.1 * torch.randn(shard.shape, generator=torch.Generator().manual_seed(1)))
    engine.sync(full_tensors(policy, engine.dtype), 1)
    done = engine.wait(names)
    policy.model.replay.chooses = True

    def flips(rows_of_reply):
        for prompt, reply in zip(PROMPTS, done, strict=False):
            ids = torch.tensor([*prompt, *reply.ids[:-1]])
            first_new = len(prompt) + int((reply.tokens["version"] == 0).sum()) - 1  # the input that draws it
            experts_TLA = torch.from_numpy(reply.experts_TLA.astype(np.int16))
            experts_TLA[rows_of_reply(first_new)] = -1
            layout = PackLayout.of(np.array([0, len(ids)]), None, len(ids), CPU)
            inputs = with_experts((ids, torch.arange(len(ids)), layout), experts_TLA)
            policy(*inputs)
        return fraction(policy.model.replay.metrics(), "flip")

    places = [int((reply.tokens["version"] == 0).sum()) for reply in done if len(reply.ids) > 10]
    new_by_new = flips(lambda first: slice(None, first))
    with torch.no_grad():
        for name, param in sharded_parameters(policy).items():
            local_shard(param).copy_(local_shard(old[name]))
    return places, flips(lambda first: slice(first, None)), new_by_new, flips(lambda first: slice(None, first))


@pytest.mark.slow
def test_each_token_has_the_experts_of_the_weights_that_drew_it(tmp_path):
    ((places, old_by_old, new_by_new, new_by_old),) = over_a_sync(tmp_path)
    assert places and all(0 < place < 24 for place in places)
    assert old_by_old == new_by_new == 0 and new_by_old > 0.05


def test_a_model_without_experts_is_refused_and_bfloat16_gets_a_note(tmp_path):
    make_tiny(tmp_path)

    def read(folder, **replay):
        policy = config.PolicyConfig(router_replay=config.RouterReplayConfig(**replay))
        return read_policy_config(config.Config(policy=policy), folder)

    read(tmp_path)
    with pytest.raises(ConfigError, match=r"policy\.router_replay\.enabled=true: a qwen3 has no experts") as refused:
        read(tmp_path, enabled=True)
    assert len(refused.value.args) == 1
    folder = tmp_path / "mixture"
    model = read_model_config(folder_of(make_family("qwen3_moe"), folder))
    read(folder, enabled=True)

    def told(model, **fields):
        notes = summary.notes(config.Config(policy=config.PolicyConfig(**fields)), model, 1000)
        return [note for note in notes if "policy.router_replay.enabled=true" in note]

    assert len(told(model)) == 1
    assert not told(model, precision="float32") and not told(read(tmp_path))
    assert not told(model, router_replay=config.RouterReplayConfig(enabled=True))
