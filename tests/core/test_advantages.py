"""advantages.py against plain Python sums, worked examples, and the numbers of other systems."""

import itertools
import math
from dataclasses import replace
from functools import partial
from statistics import mean, stdev

import numpy as np
import pytest
import torch
from by_hand import naive_advantages
from samples import sampled, with_grade

from advantages import (
    estimate_advantages,
    gdpo_advantages,
    group_advantages,
    overlong_penalty,
    scale_reward,
    shape_rewards,
    step_advantages,
)
from config import AdvEstimatorConfig, ConfigError, GRPOConfig, LossConfig, RewardScalingConfig, RewardShapingConfig
from metrics import sample_metrics
from records import Grade
from rollout import is_mixed

REWARDS = {3: [1.0, 0, 0, 0.5], 9: [0.3, 1, -0.5, 2], 5: [0.2, 0.2, 0.2], 7: [-1.0, 1], 8: [-3, 0]}
REWARD_B = torch.tensor([r for rewards in REWARDS.values() for r in rewards], dtype=torch.float64)
GROUP_B = torch.tensor([name for name, rewards in REWARDS.items() for _ in rewards])
TOKENS_B = torch.tensor([2, 1, 4, 3, 2, 0, 1, 5, 2, 2, 1, 1, 6, 2, 3])
PLUS = GRPOConfig(adv_estimator=AdvEstimatorConfig(name="reinforce_plus_plus"))


def equal(got, want):
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-9)


ESTIMATORS = {
    "leave one out": {},
    "group": {"use_leave_one_out_baseline": False, "reward_std": "group"},
    "batch": {"reward_std": "batch"},
    "dr. grpo": {"normalize_rewards": False, "use_leave_one_out_baseline": False},
    "gdpo": {"adv_estimator": AdvEstimatorConfig(name="gdpo")},
    "plus": {"adv_estimator": AdvEstimatorConfig(name="reinforce_plus_plus")},
    "max_rl": {"adv_estimator": AdvEstimatorConfig(name="max_rl")},
    "opo": {"adv_estimator": AdvEstimatorConfig(name="opo")},
    "gpg": {"adv_estimator": AdvEstimatorConfig(name="gpg")},
    "pkpo": {"adv_estimator": AdvEstimatorConfig(name="pkpo", pass_k=3)},
    "grpo_passk": {"adv_estimator": AdvEstimatorConfig(name="grpo_passk")},
    "plus, no baseline": {"adv_estimator": AdvEstimatorConfig(name="reinforce_plus_plus", minus_baseline=False)},
}
STDS = [{"reward_std": std} for std in ("baseline", "group", "batch")] + [{"normalize_rewards": False}]
FORMS = [{"use_leave_one_out_baseline": loo, **std} for loo in (True, False) for std in STDS]
FORMS += [{"reward_std_floor": 0.0}, {"reward_std_floor": 0.9}, *ESTIMATORS.values()]
FORMS += [{"adv_estimator": AdvEstimatorConfig(name="gdpo", reward_weights=(2.0, 0.5))}]
FORMS += [{"adv_estimator": AdvEstimatorConfig(name="gdpo"), "normalize_rewards": False}]
FORMS += [{"adv_estimator": AdvEstimatorConfig(name="grpo_passk"), "normalize_rewards": False}]


@pytest.mark.parametrize("options", FORMS, ids=range(len(FORMS)))
def test_each_estimator_in_any_order_of_the_samples(options):
    """Groups of two to four, of equal rewards, of a mean that is 0 or below it; a sample without a trained token."""
    grpo, parts = (
        GRPOConfig(**options),
        {"format": REWARD_B.flip(0), "correct": REWARD_B},
    )  # the alphabet's order counts
    of_lists = ({name: r.tolist() for name, r in parts.items()}, GROUP_B.tolist(), TOKENS_B.tolist())
    want = torch.tensor(naive_advantages(REWARD_B.tolist(), *of_lists, grpo), dtype=torch.float64)
    for seed in range(3):
        order_B = torch.randperm(len(REWARD_B), generator=torch.Generator().manual_seed(seed))
        parts_B = {name: r[order_B] for name, r in parts.items()}
        got = estimate_advantages(REWARD_B[order_B], GROUP_B[order_B], TOKENS_B[order_B], grpo, parts_B)
        equal(got, want[order_B])


def test_group_as_trl_to_printed_digits():
    # (r - mean) / (std + 1e-4): std of [1, 0, 0, 0] is .5, so .75 / .5001 and -.25 / .5001
    reward_B = torch.tensor([1.0, 0, 0, 0])
    got = group_advantages(reward_B, torch.zeros(4), leave_one_out=False, normalize=True, std="group")
    torch.testing.assert_close(got, torch.tensor([1.499700, -0.499900, -0.499900, -0.499900]), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "reward, leave_one_out, adv",
    [
        ([1, 0, 0, 0], True, [1, -0.577349, -0.577349, -0.577349]),
        ([1, 0, 0, 0], False, [1.499997, -0.499999, -0.499999, -0.499999]),
        ([1, 1, 0, 0], True, [1.154698, 1.154698, -1.154698, -1.154698]),
        ([1, 1, 0, 0], False, [0.866024, 0.866024, -0.866024, -0.866024]),
        ([1, 0], True, [1, -1]),
        ([1, 0], False, [0.707106, -0.707106]),
        ([0.3, 1, -0.5, 2], True, [-0.423850, 0.313304, -1.872656, 2.309398]),
        ([0.3, 1, -0.5, 2], False, [-0.376844, 0.282633, -1.130533, 1.224744]),
        ([5], True, [0]),
        ([5], False, [0]),
    ],
)
def test_nemo_rls_numbers_to_printed_digits(reward, leave_one_out, adv):
    reward_B, group_B = torch.tensor(reward, dtype=torch.float32), torch.zeros(len(reward), dtype=torch.long)
    got_B = group_advantages(reward_B, group_B, leave_one_out=leave_one_out, normalize=True)
    assert got_B.dtype == torch.float32
    torch.testing.assert_close(got_B, torch.tensor(adv, dtype=torch.float32), rtol=0, atol=1e-6)


@pytest.mark.parametrize("leave_one_out", [True, False])
def test_equal_rewards_have_no_spread_whatever_the_rounding(leave_one_out):
    # 0.1 and 0.3 are not representable: their mean differs from them in the last bit, and a std from 0.
    for value, size in itertools.product([0.1, 0.3, 0.7, 1 / 3, 1e4 + 0.1], [*range(2, 18), 32, 33, 64, 100]):
        reward_B = torch.full((size,), value, dtype=torch.float64)
        group_B = torch.zeros(size, dtype=torch.long)
        adv_B = group_advantages(reward_B, group_B, leave_one_out=leave_one_out, normalize=True)
        assert adv_B.abs().max() < 1e-10 * value, (value, size, adv_B)
        if leave_one_out:
            reward_B[0] = value + 1  # the others stay equal: unnormalized, so 1 and not a million
            adv_B = group_advantages(reward_B, group_B, leave_one_out=True, normalize=True)
            assert abs(adv_B[0] - 1) < 1e-9, (value, size, adv_B)


NEARLY_EQUAL = [  # rewards of a group, and what the largest |A| exceeds without a floor
    ([1.0, -1 / 4096, 0, 0, 0, 0, 0, 0], 10_000),  # one right, a peer a token into the overlong buffer of 4,096
    ([1.0, -0.1, 0, 0, 0, 0, 0, 0], 26),
    ([0.2, 0.8, 0.801, 0.8], 1_000),  # a judge's scores
    ([-50.0, 100, 100, 100.001], 100_000),
]


@pytest.mark.parametrize("reward, unbounded", NEARLY_EQUAL)
def test_nearly_equal_peers_give_no_advantages_of_thousands(reward, unbounded):
    """NVIDIA-NeMo/RL#1518."""
    reward_B, group_B = torch.tensor(reward, dtype=torch.float64), torch.zeros(len(reward), dtype=torch.long)
    find = partial(estimate_advantages, reward_B, group_B, torch.ones(len(reward)), parts={})
    nemo_B, adv_B = find(grpo=GRPOConfig(reward_std_floor=0)), find(grpo=GRPOConfig())
    assert nemo_B.abs().max() >= unbounded and adv_B.abs().max() <= 20
    equal(adv_B, naive_advantages(reward, {}, [0] * len(reward), [1] * len(reward), GRPOConfig()))


def test_the_floor_leaves_other_deviations_as_they_are():
    """Zero, above the floor, with the sample's own reward, of the group or of the batch: the same bits."""
    random, group_B = np.random.default_rng(0), torch.arange(64) // 8
    for reward in (random.integers(0, 2, 64), random.random(64), 0.25 * random.integers(0, 5, 64)):
        reward_B = torch.tensor(reward, dtype=torch.float32)
        for loo, std in itertools.product([True, False], ["baseline", "group", "batch"]):
            find = partial(group_advantages, reward_B, group_B, leave_one_out=loo, normalize=True, std=std)
            assert find(std_floor=0.05).equal(find())
    lone_B = torch.eye(1, 1000)[0]  # its deviation is 0.03 of the range, and bounds |A| itself
    find = partial(group_advantages, lone_B, lone_B.long() * 0, leave_one_out=False, normalize=True)
    assert find(std_floor=0.05).equal(find())


def whitened(values, weights):
    total = sum(weights)
    center = sum(v * w for v, w in zip(values, weights, strict=True)) / total
    spread = math.sqrt(max(sum(w * (v - center) ** 2 for v, w in zip(values, weights, strict=True)) / total, 1e-8))
    return [(v - center) / spread for v in values]


def test_reinforce_plus_plus_by_hand():
    """Two tokens of A = 1 and one of -1: mean 1/3, variance 8/9. A spread of 1e-5 is below the floor of 1e-4: rounding
    is not blown up to advantages of 1."""
    grpo = GRPOConfig(adv_estimator=AdvEstimatorConfig(name="reinforce_plus_plus", minus_baseline=False))
    got = estimate_advantages(torch.tensor([1.0, -1]), torch.tensor([0, 1]), torch.tensor([2, 1]), grpo, {})
    torch.testing.assert_close(got, torch.tensor([1, -2]) / math.sqrt(2), rtol=0, atol=1e-6)
    reward_B = torch.tensor([1 + 1e-5, 1 - 1e-5], dtype=torch.float64)
    equal(estimate_advantages(reward_B, torch.zeros(2), torch.ones(2), grpo, {}), [0.1, -0.1])


# Two groups of four, and what the systems' own code gives for three lists of rewards.
PRINTED_REWARDS = ([1, 0, 0, 1, 0.5, 0.5, 0.5, 0.5], [1, 0, 0, 0, 0.2, 0.9, 0.4, 0.1], [0, 0, 0, 0, 3, -1, 2, 0])
PRINTED_TOKENS = [3, 9, 5, 4, 2, 8, 6, 7]
PRINTED = {
    "max_rl": (  # prime-rl
        [1, -1, -1, 1, 0, 0, 0, 0],
        [3, -1, -1, -1, -0.5, 1.25, 0, -0.75],
        [0, 0, 0, 0, 2, -2, 1, -1],
    ),
    "opo": (  # verl 0.9.1
        [0.66667, -0.33333, -0.33333, 0.66667, 0, 0, 0, 0],
        [0.85714, -0.14286, -0.14286, -0.14286, -0.26522, 0.43478, -0.06522, -0.36522],
        [0, 0, 0, 0, 2.56522, -1.43478, 1.56522, -0.43478],
    ),
    "gpg": (  # verl 0.9.1
        [0.66667, -0.66667, -0.66667, 0.66667, 0, 0, 0, 0],
        [1.2, -0.4, -0.4, -0.4, -0.32, 0.8, 0, -0.48],
        [0, 0, 0, 0, 5.33333, -5.33333, 2.66667, -2.66667],
    ),
    "grpo_passk": (  # verl 0.9.1
        [0] * 8,
        [2, 0, 0, 0, 0, 1.40487, 0, 0],
        [0, 0, 0, 0, 0.54772, 0, 0, 0],
    ),
    "pkpo": (  # four times what the paper's listing 1 gives, its loo minus one, for k = 3
        [1, 0, 0, 1, 0, 0, 0, 0],
        [3, 0, 0, 0, 0, 1.7, 0.2, 0],
        [0, 0, 0, 0, 5, 0, 2, 0],
    ),
}


@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("name", PRINTED)
def test_numbers_of_the_systems_that_have_the_estimator(name, case):
    grpo = GRPOConfig(adv_estimator=AdvEstimatorConfig(name=name, pass_k=3))
    reward_B = torch.tensor(PRINTED_REWARDS[case], dtype=torch.float64)
    group_B = torch.tensor([0] * 4 + [1] * 4)
    got = estimate_advantages(reward_B, group_B, torch.tensor(PRINTED_TOKENS), grpo, {})
    assert got.tolist() == pytest.approx(PRINTED[name][case], abs=5e-6)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_the_best_of_k_over_all_subsets(size):
    """pkpo for every k, and grpo_passk: to 1e-12, with ties and rewards below 0."""
    random = np.random.default_rng(size)
    rewards = [*random.normal(size=size), *random.integers(0, 2, size), *random.integers(-1, 3, size) / 3]
    group_B = torch.arange(3).repeat_interleave(size)
    estimators = [AdvEstimatorConfig(name="pkpo", pass_k=k) for k in range(2, size + 2)]
    for estimator in [*estimators, AdvEstimatorConfig(name="grpo_passk")]:
        grpo = GRPOConfig(adv_estimator=estimator, normalize_rewards=False)
        got = estimate_advantages(torch.tensor(rewards), group_B, torch.ones(3 * size), grpo, {})
        want = naive_advantages(rewards, {}, group_B.tolist(), [1] * 3 * size, grpo)
        assert got.tolist() == pytest.approx(want, rel=0, abs=1e-12)


def test_the_expected_gradient_of_pkpo_is_that_of_pass_k():
    """Exact, over all groups of five replies of two kinds: right with probability p."""
    p, k, size = 0.3, 3, 5
    grpo = GRPOConfig(adv_estimator=AdvEstimatorConfig(name="pkpo", pass_k=k))
    slope = 0.0
    for group in itertools.product([0.0, 1.0], repeat=size):
        reward_B = torch.tensor(group, dtype=torch.float64)
        adv_B = estimate_advantages(reward_B, torch.zeros(size), torch.ones(size), grpo, {})
        slope_of_logp_B = reward_B / p - (1 - reward_B) / (1 - p)
        chance = math.prod(p if reward else 1 - p for reward in group)
        slope += chance * (adv_B * slope_of_logp_B).mean().item()
    assert slope == pytest.approx(k * (1 - p) ** (k - 1), abs=1e-12)  # of 1 - (1 - p)^k


def test_no_valid_token_is_no_nan():
    assert estimate_advantages(torch.ones(2), torch.zeros(2), torch.zeros(2), PLUS, {}).tolist() == [0, 0]


def test_gdpo_of_equal_rewards_is_zero():
    same = {"a": torch.ones(4), "b": torch.ones(4)}
    assert gdpo_advantages(same, torch.zeros(4), GRPOConfig()).tolist() == [0] * 4


# ------------------------------------------------------------------------------------------ the samples of a step

GDPO = GRPOConfig(adv_estimator=AdvEstimatorConfig(name="gdpo"))
MIXED = [("exact", 1.0, {}), ("countdown", 0.1, {"answer": 0.0, "format": 0.1}), ("math", 0.0, {})]


def sample(length, reward=1.0, prompt=0, *, finish_reason="stop", grade=None, **fields):
    """A sample of `length` trained tokens."""
    graded = replace(grade or Grade(), reward=reward)
    return sampled(prompt, 0, [5] * 100, [0] * length, finish_reason=finish_reason, grade=graded, **fields)


def graded(env_name, prompt, reward, rewards, length=3):
    return sample(length, reward, prompt, env_name=env_name, grade=Grade(rewards=rewards))


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus"])
def test_environments_that_name_different_rewards_share_a_batch(name, first):
    """Only gdpo reads the parts of a reward. Whichever environment comes first, the others may have other parts."""
    samples = []
    for prompt, (env_name, reward, rewards) in enumerate(MIXED[first:] + MIXED[:first]):
        samples += [graded(env_name, prompt, reward, rewards, length=2), graded(env_name, prompt, 0.5, rewards)]
    adv_B, metrics = step_advantages(samples, replace(PLUS, adv_estimator=AdvEstimatorConfig(name=name)), LossConfig())
    # Groups of two: reward r against 0.5.
    distances = [sign * (sample.grade.reward - 0.5) for sample in samples[::2] for sign in (1, -1)]
    want = distances if name == "grpo" else whitened([d / 2 for d in distances], [2, 3] * 3)
    assert adv_B == pytest.approx(want, abs=1e-6)
    assert metrics["advantages/max"] == max(adv_B)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_what_could_not_be_graded_is_in_no_statistic(name):
    """NeMo-RL#431, TRL#5775, prime-rl#1416. The others have the numbers of a step in which the ungraded ones are not;
    whatever reward they carry; and a sample that is left alone has none."""
    rng, grpo = np.random.default_rng(0), GRPOConfig(**ESTIMATORS[name])
    outcomes = [["ok", "wrong", "error", "parse_fail"], ["error", "timeout", "error", "error"], ["error"] * 4]
    outcomes += [["wrong", "ok", "wrong", "ok"]]
    samples = []
    for prompt, group in enumerate(outcomes):
        for outcome in group:
            rewards = {} if outcome == "error" and prompt < 2 else {"a": rng.normal(), "b": rng.normal()}
            samples.append(graded("e", prompt, rng.normal(), rewards, length=int(rng.integers(1, 9))))
            samples[-1].grade.outcome = outcome
    adv_B, metrics = step_advantages(samples, grpo, LossConfig())
    rest = [sample for sample in samples if sample.grade.outcome != "error"]
    want, want_metrics = step_advantages(rest, grpo, LossConfig())
    assert [adv for adv, sample in zip(adv_B, samples, strict=True) if sample.grade.outcome != "error"] == want
    assert metrics == want_metrics and len(rest) == 8
    assert adv_B[2] == adv_B[5] == 0 and adv_B[4:12] == [0.0] * 8  # prompt 1 has one sample left, 2 has none
    is_moved = [adv_B[i] != 0 for i in (0, 1, 3, 12, 13, 14, 15)]
    assert all(is_moved) or (name in ("pkpo", "grpo_passk") and any(is_moved))  # these train the best samples alone
    for sample in samples:
        sample.grade.reward = 1e3 if sample.grade.outcome == "error" else sample.grade.reward
    assert step_advantages(samples, grpo, LossConfig())[0] == adv_B


def test_gdpo_names_the_environment_that_lacks_a_reward():
    complete = [graded("countdown", 0, 1.0, {"answer": 0.9, "format": reward}) for reward in (0.0, 0.1)]
    assert len(step_advantages(complete, GDPO, LossConfig())[0]) == 2
    for rewards in ({"answer": 1.0}, {}):
        with pytest.raises(ConfigError) as error:
            step_advantages([*complete, graded("mine", 1, 1.0, rewards)], GDPO, LossConfig())
        for named in ("env_name 'mine'", f"has {[*rewards]}", "adv_estimator.name=gdpo", "['answer', 'format']"):
            assert named in str(error.value)
    for rewards in ({"answer": 1.0}, {}):
        with pytest.raises(ConfigError, match=r"^env_name 'mine': .*name=gdpo .* at least two; seen: \["):
            step_advantages([graded("mine", 1, 1.0, rewards)], GDPO, LossConfig())


@pytest.mark.parametrize("name", ["grpo", "gdpo", "reinforce_plus_plus", "opo", "gpg"])
def test_clip_is_the_last_step(name):
    grpo = GRPOConfig(adv_estimator=AdvEstimatorConfig(name=name))
    rewards = {"a": REWARD_B, "b": REWARD_B.square()}
    free = estimate_advantages(REWARD_B, GROUP_B, TOKENS_B, grpo, rewards)
    assert free.min() < -0.4 and free.max() > 0.3
    for low, high in [(-0.4, 0.3), (None, 0.3), (-0.4, None)]:
        clipped = replace(grpo, advantage_clip_low=low, advantage_clip_high=high)
        want = [min(max(a, low or -math.inf), high or math.inf) for a in free.tolist()]
        equal(estimate_advantages(REWARD_B, GROUP_B, TOKENS_B, clipped, rewards), want)


TURNS = [  # prompt, outcome, (reward, trained tokens) of each turn
    (4, "ok", [(0.25, 3), (1.0, 2), (0.5, 4)]),
    (4, "wrong", [(0.75, 1), (-1.0, 5)]),
    (4, "ok", [(1.5, 2), (0.125, 7)]),
    (4, "error", [(9.0, 2), (9.0, 2), (9.0, 2)]),
    (1, "ok", [(0.2, 6)]),
    (1, "ok", [(0.9, 0), (0.3, 0), (0.1, 0)]),  # of a row with loss_multiplier 0
    (1, "wrong", [(0.4, 1), (0.7, 2), (0.6, 3)]),
]


def conversations():
    samples = []
    for prompt, outcome, turns in TURNS:
        rewards, tokens = map(list, zip(*turns, strict=True))
        samples.append(sample(sum(tokens), sum(rewards), prompt, grade=Grade(turn_rewards=rewards)))
        samples[-1].sequence.turns, samples[-1].sequence.turn_tokens = [*range(len(turns))], tokens
        samples[-1].grade.outcome, samples[-1].num_turns = outcome, len(turns)
        samples[-1].is_filtered = not samples[-1].grade.is_valid
    return samples


def turn_by_turn(grpo):
    """{(number in TURNS, turn): advantage} of the graded samples, by plain sums."""
    turns = {(i, t): r for i, row in enumerate(TURNS) for t, (r, _) in enumerate(row[2]) if row[1] != "error"}
    found = {}
    for (i, t), reward in turns.items():
        peers = [r for (j, u), r in turns.items() if u == t and j != i and TURNS[j][0] == TURNS[i][0]]
        if not peers:
            found[i, t] = 0.0
        elif grpo.adv_estimator.name == "reinforce_plus_plus":
            found[i, t] = reward - mean([reward, *peers])
        else:
            spread = stdev(peers) if len(peers) > 1 and grpo.normalize_rewards else 0
            floor = 0.05 * (max(reward, *peers) - min(reward, *peers))
            found[i, t] = (reward - mean(peers)) / (max(spread, floor) + 1e-6 if spread > 0 else 1)
    if grpo.adv_estimator.name == "reinforce_plus_plus":
        flat = whitened([*found.values()], [TURNS[i][2][t][1] for i, t in found])
        found = {place: 0.0 if found[place] == 0 else adv for place, adv in zip(found, flat, strict=True)}
    return found


@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize("options", [{}, {"normalize_rewards": False}, {"adv_estimator": PLUS.adv_estimator}])
def test_each_turn_has_the_advantage_of_its_own_reward(options, token_level):
    """unslothai/unsloth#3615. The peers of a turn are the same turns of the prompt's other samples."""
    samples, grpo = conversations(), GRPOConfig(max_rollout_turns=3, turn_level_advantages=True, **options)
    want = turn_by_turn(grpo)
    adv_B, metrics = step_advantages(samples, grpo, LossConfig(token_level_loss=token_level))
    assert want[0, 2] == 0 and sum(adv != 0 for adv in want.values()) == 13  # one alone
    for i, (_, outcome, turns) in enumerate(TURNS):
        expected = 0.0 if outcome == "error" else [want[i, t] for t in range(len(turns))]
        assert adv_B[i] == pytest.approx(expected, rel=1e-5, abs=1e-6), i
    sizes = {4: 0.0, 1: 0.0}  # of the gradient
    for (i, t), adv in want.items():
        tokens = TURNS[i][2][t][1]
        sizes[TURNS[i][0]] += abs(adv) * tokens / (1 if token_level else max(1, sum(n for _, n in TURNS[i][2])))
    assert metrics["gradient/largest_group_share"] == pytest.approx(max(sizes.values()) / sum(sizes.values()), rel=1e-5)
    assert metrics["gradient/num_groups"] == 2
    assert metrics["advantage_abs_max"] == pytest.approx(max(map(abs, want.values())), rel=1e-5)
    samples[2].is_filtered = True  # the overlong filter: in the baseline, and in no weight
    again_B, again = step_advantages(samples, grpo, LossConfig(token_level_loss=token_level))
    if "adv_estimator" not in options:
        assert again_B == adv_B and again["gradient/largest_group_share"] != metrics["gradient/largest_group_share"]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_without_turn_level_advantages_turns_change_nothing(name):
    """The sum over the conversation, to the bit."""
    samples, grpo = conversations(), GRPOConfig(max_rollout_turns=3, **ESTIMATORS[name])
    for i, sample in enumerate(samples):
        sample.grade.rewards = {"a": sample.grade.reward, "b": float(i % 2)}
    adv_B, metrics = step_advantages(samples, grpo, LossConfig())
    plain = []
    for sample in samples:
        without_turns = replace(sample.sequence, turns=[], turn_tokens=[])
        plain.append(with_grade(replace(sample, sequences=[without_turns], num_turns=1), turn_rewards=[]))
    assert (adv_B, metrics) == step_advantages(plain, grpo, LossConfig())
    graded = [sample for sample in samples if sample.grade.is_valid]
    numbers = zip(*((sample.grade.reward, sample.prompt, sample.num_trained_tokens) for sample in graded), strict=True)
    parts = {key: torch.tensor([sample.grade.rewards[key] for sample in graded]) for key in "ab"}
    want = estimate_advantages(*map(torch.tensor, numbers), grpo, parts).tolist()
    assert [adv for adv, sample in zip(adv_B, samples, strict=True) if sample.grade.is_valid] == want


def test_turns_are_scaled_each_and_dynamic_sampling_looks_at_them():
    """unslothai/unsloth#3615. Equal sums of unequal turns are worth training."""
    scaling = RewardScalingConfig(enabled=True, source_max=2.0, target_min=-1.0)
    group = [sample(2, 1.0, grade=Grade(turn_rewards=rewards), num_turns=2) for rewards in ([0.0, 1.0], [3.0, -2.0])]
    shape_rewards(group, GRPOConfig(reward_scaling=scaling), 8)
    assert [sample.grade.turn_rewards for sample in group] == [[-1.0, 0.0], [1.0, -1.0]] and group[0].grade.reward == 0
    assert is_mixed(group, by_turn=True) and not is_mixed(group)
    turns = ((1.0, [1.0]), (2.0, [1.0, 1.0]))
    group = [sample(2, r, grade=Grade(unshaped_reward=r, turn_rewards=rewards)) for r, rewards in turns]
    assert is_mixed(group) and not is_mixed(group, by_turn=True)  # the second turn has no peer


@pytest.mark.parametrize(
    "rewards, differ",
    [
        ([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1], False),
        ([0.6, 0.6000000000000001], False),
        ([100.1 + 0.7 - 0.1, 100.7], False),
        ([1.0, 1.0, 1 - 1e-12], False),
        ([0.6, 0.600001], True),
        ([0.0, 1e-9], True),
        ([1.0], False),
    ],
)
def test_rewards_that_differ_by_rounding_are_equal(rewards, differ):
    """huggingface/trl#6681: dynamic sampling and zero_variance_fraction compare as the advantages do."""
    group = [sample(3, reward, grade=Grade(unshaped_reward=reward)) for reward in rewards]
    adv_B, metrics = step_advantages(group, GRPOConfig(), LossConfig())
    assert any(adv_B) == (metrics["gradient/num_groups"] == 1) == is_mixed(group) == differ
    found = sample_metrics(group, group)
    assert found["zero_variance_fraction"] == found["unshaped_zero_variance_fraction"] == 1 - differ


# ------------------------------------------------------------------------------------------ scaling and shaping

OVERLONG = {"enabled": True, "overlong_buffer_length": 4, "overlong_buffer_penalty": 1.0, "max_response_length": 20}


def shaped(samples, max_new_tokens=99, scaling=None, **shaping):
    grpo = GRPOConfig(reward_scaling=scaling or RewardScalingConfig(), reward_shaping=RewardShapingConfig(**shaping))
    shape_rewards(samples, grpo, max_new_tokens)
    return [s.grade.reward for s in samples]


GOLDEN = {16: 1, 17: 0.75, 18: 0.5, 20: 0, 24: -1}  # from NeMo RL's code


def test_overlong_penalty_is_nemo_rls():
    assert shaped([sample(length) for length in GOLDEN], **OVERLONG) == list(GOLDEN.values())
    assert shaped([sample(1), sample(15)], **OVERLONG) == [1, 1]


def test_penalty_scales_and_the_longest_response_is_that_of_the_engine():
    cfg = RewardShapingConfig(enabled=True, overlong_buffer_length=10, overlong_buffer_penalty=0.3)
    assert [overlong_penalty(length, cfg, 50) for length in (40, 45, 50, 60)] == pytest.approx([0, 0.15, 0.3, 0.6])
    assert overlong_penalty(45, cfg, 99) == 0


def test_lengths_are_the_policys_own_tokens():
    """Neither the prompt's nor the environment's, whatever the mask says."""
    long = sample(24)
    long.sequence.num_env_tokens = 6
    long.sequence.tokens["mask"] = False
    assert shaped([long], **OVERLONG) == [GOLDEN[18]]


@pytest.mark.parametrize("turns, tokens, lost", [(3, 450, 0), (3, 1408, 0), (3, 1472, 0.5), (1, 448, 0.5)])
def test_the_limit_of_a_conversation_is_of_all_its_turns(turns, tokens, lost):
    """rllm-org/rllm#575: three turns of 150 tokens under a cap of 512 lose nothing."""
    grpo = GRPOConfig(max_rollout_turns=turns, reward_shaping=RewardShapingConfig(enabled=True))
    conversation = sample(tokens, num_turns=turns)
    shape_rewards([conversation], grpo, 512)
    assert conversation.grade.reward == 1 - lost


def test_stop_properly_takes_the_place_of_the_penalty():
    samples = [sample(24, 0.8), sample(24, 0.8, finish_reason="length"), sample(24, -1.0, finish_reason="length")]
    assert shaped(samples, stop_properly_penalty_coef=0.25, **OVERLONG) == [0.8, 0.2, -0.25]
    assert shaped([sample(4, 0.8, finish_reason="length")], stop_properly_penalty_coef=0, **OVERLONG) == [0]


def test_scaling_by_hand():
    cfg = RewardScalingConfig(enabled=True, source_min=-1, source_max=3, target_min=10, target_max=20)
    assert [scale_reward(reward, cfg) for reward in (-5, -1, 0, 1, 3, 8)] == [10, 10, 12.5, 15, 20, 20]


def test_scale_comes_first_and_its_result_is_kept():
    """Reward 1 becomes 5, less the penalty .5: 4.5. The other order would scale .5 to 4."""
    scaling = RewardScalingConfig(enabled=True, target_min=3, target_max=5)
    graded = sample(18, grade=Grade(rewards={"format": 0.5, "answer": 7}))
    assert shaped([graded], scaling=scaling, **OVERLONG) == [4.5]
    assert (graded.grade.unshaped_reward, graded.grade.rewards) == (5, {"format": 4, "answer": 5})


def test_disabled_is_nothing():
    samples = [sample(30, 7.0, finish_reason="length", grade=Grade(rewards={"a": 9}))]
    assert shaped(samples, **OVERLONG | {"enabled": False}, stop_properly_penalty_coef=0.5) == [7]
    assert samples[0].grade.unshaped_reward == 7 and samples[0].grade.rewards == {"a": 9}


def test_turns_of_unequal_number_do_not_reward_going_on():
    """A policy that ends or goes on: the mean of the estimator over all groups is the gradient of each turn's own
    reward, times the chance that a peer comes so far. The sum of the later turns' advantages, which is not what we
    train, has the bias of verl-project/verl#7244."""
    goes_on, is_good = 0.6, (0.3, 0.8)  # probabilities: of a second turn, of a reward of 1 in each turn
    rollouts = []  # (probability, rewards, d log p(going on) / d goes_on)
    for first in (0, 1):
        chance = is_good[0] if first else 1 - is_good[0]
        rollouts.append((chance * (1 - goes_on), [first], -1 / (1 - goes_on)))
        for second in (0, 1):
            chance_of_second = is_good[1] if second else 1 - is_good[1]
            rollouts.append((chance * goes_on * chance_of_second, [first, second], 1 / goes_on))
    grpo = GRPOConfig(turn_level_advantages=True, normalize_rewards=False)
    going_on = summed = second_turn = 0.0
    for group in itertools.product(rollouts, repeat=3):
        chance = math.prod(p for p, _, _ in group)
        samples = []
        for _, rewards, _ in group:
            grade = Grade(sum(rewards), "ok", turn_rewards=[float(reward) for reward in rewards])
            samples.append(sample(len(rewards), sum(rewards), 0, grade=grade))
            sequence = samples[-1].sequence
            sequence.turns, sequence.turn_tokens = [*range(len(rewards))], [1] * len(rewards)
        adv_B, _ = step_advantages(samples, grpo, LossConfig())
        for (_, rewards, score), advs in zip(group, adv_B, strict=True):
            going_on += chance * advs[0] * score  # the first turn decides
            summed += chance * sum(advs) * score
            if len(rewards) == 2:
                score_of_second = 1 / is_good[1] if rewards[1] else -1 / (1 - is_good[1])
                second_turn += chance * advs[1] * score_of_second
    # The first turn's reward does not depend on going on: its gradient is 0.
    assert going_on == pytest.approx(0, abs=1e-6)
    has_peer = 1 - (1 - goes_on) ** 2
    assert second_turn == pytest.approx(3 * goes_on * has_peer, rel=1e-5)
    # The gradient of the later rewards is 3 * is_good[1]: the baseline of the second turn takes all of it away.
    assert summed == pytest.approx(0, abs=1e-5)
