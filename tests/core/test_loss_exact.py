"""policy_loss and the advantages against loops in Python floats (by_hand.py): values and gradients.

First the algorithms of docs/algorithms.md on random batches, from rewards to gradients; then options in combination.
"""

import re

import pytest
import torch
from by_hand import naive_advantages, naive_loss
from cases import long_but
from loss_cases import MODES, WEIGHTS, allowed, hard_batch
from small_run import ROOT

from advantages import estimate_advantages
from base.check.contradictions import contradictions
from config import AdvEstimatorConfig, Config, GRPOConfig, LossConfig
from loss import policy_loss
from pack import HostRows, shares_of_samples

GSPO = {"sequence_level_importance_ratios": True, "token_level_loss": False}
TIS = {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 1.2}
BY_SEQUENCE = {"token_level_loss": False}
NO_LEAVE_ONE_OUT = {"grpo.use_leave_one_out_baseline": False, "grpo.reward_std_floor": 0.05}
MASKS = {"dppo_mask_low": 0.05, "dppo_mask_high": 0.1}
# A row of docs/algorithms.md -> its keys, once or more; in loss_fn unless prefixed.
ALGORITHMS = {
    "GRPO": [{"grpo.reward_std_floor": 0.0}, BY_SEQUENCE | NO_LEAVE_ONE_OUT | {"grpo.reward_std": "group"}],
    "Dr. GRPO": [
        BY_SEQUENCE
        | NO_LEAVE_ONE_OUT
        | {"grpo.normalize_rewards": False, "loss_scale_factor": 8.0, "reference_policy_kl_penalty": 0.0}
    ],
    "DAPO": [NO_LEAVE_ONE_OUT | {"ratio_clip_max": 0.28, "reference_policy_kl_penalty": 0.0}],
    "GSPO": [
        GSPO | {"ratio_clip_min": 0.03, "ratio_clip_max": 0.04},
        GSPO
        | TIS
        | {"truncated_importance_sampling_type": "tis", "importance_sampling_correction_level": "token"}
        | {"gspo_token": True},
    ],
    "LUSPO": [GSPO | {"loss_scale_factor": 1.0}],
    "CISPO": [{"use_cispo": True}, {"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 0.5}],
    "SAPO": [BY_SEQUENCE | {"token_loss": "sapo"}],
    "DPPO, IPO": [
        MASKS | {"token_loss": "dppo", "old_logprobs": "sampler"},
        MASKS | {"token_loss": "ipo", "old_logprobs": "sampler"},
        MASKS | {"token_loss": "dppo_tv", "ratio_clip_c": 1.3},
    ],
    "GMPO": [BY_SEQUENCE | {"token_loss": "gmpo", "ratio_clip_min": 0.4, "ratio_clip_max": 0.4}],
    "off-policy sequence mask": [{"off_policy_mask_threshold": 0.05}],
    "sum over tokens": [{"loss_scale_factor": 1.0}],
    "REINFORCE, RLOO, GPG's loss": [{"disable_ppo_ratio": True, "grpo.normalize_rewards": False}],
    "REINFORCE++": [
        {"grpo.adv_estimator.name": "reinforce_plus_plus"},
        {"grpo.adv_estimator.name": "reinforce_plus_plus", "grpo.adv_estimator.minus_baseline": False},
    ],
    "MaxRL": [{"grpo.adv_estimator.name": "max_rl"}],
    "OPO; GPG": [{"grpo.adv_estimator.name": "opo"}, {"grpo.adv_estimator.name": "gpg", "disable_ppo_ratio": True}],
    "PKPO; GRPO for pass@k": [
        {"grpo.adv_estimator.name": "pkpo", "grpo.adv_estimator.pass_k": 3},
        {"grpo.adv_estimator.name": "grpo_passk"},
    ],
    "GDPO": [
        {"grpo.adv_estimator.name": "gdpo"},
        {
            "grpo.adv_estimator.name": "gdpo",
            "grpo.adv_estimator.reward_weights": (2.0, 0.5),
            "grpo.reward_std": "group",
        },
    ],
    "dual clip": [{"ratio_clip_c": 1.5}],
    "entropy bonus": [{"entropy_coef": 0.1}],
    "VAPO's NLL": [{"positive_example_nll_weight": 0.1}],
    "KL to a reference": [
        {"reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": kind, "kl_gradient": gradient}
        for kind in ("k1", "k2", "k3")
        for gradient in ("score_function", "policy_ratio", "plain")
    ],
    "sampler mismatch: TIS, IcePop, sequence masks": [
        TIS | {"truncated_importance_sampling_type": kind, "truncated_importance_sampling_ratio_min": 0.7}
        for kind in ("tis", "icepop", "seq-mask-tis", "sequence-truncate", "sequence-mask")
    ],
    "rejection by the ratio to the sampler": [
        {"token_rejection_ratio_min": 0.8, "token_rejection_ratio_max": 1.3, **BY_SEQUENCE},
        {"sequence_rejection_ratio_min": 0.9, "sequence_rejection_ratio_max": 1.1, "entropy_coef": 0.1},
        {"token_rejection_ratio_max": 1.2, "sequence_rejection_ratio_min": 0.9, "old_logprobs": "sampler"},
    ],
}
OTHER_TESTS = {
    "prompts by their pass rate",  # rows that are no formula of a loss; the page names the test of each
    "entropy held at a target",
    "on-policy distillation",
    "distillation by the teacher's top k",
    "a teacher on a vLLM server",
    "routing replay (R3)",
    "sequences whose log-probabilities disagree",
    "several optimizer steps per rollout",
    "top-p and top-k, in sampling and in training",
    "[asynchronous](async.md): responses continue into later steps",
    "LoRA",
}
SPREADS = (None, 0.3, 1.0)  # of log p - old; None: one optimizer step of a rollout, where both are equal


def config_of(keys: dict) -> Config:
    """Refused by no rule."""
    loss_fn = {name: value for name, value in keys.items() if not name.startswith("grpo.")}
    grpo = {name.removeprefix("grpo."): value for name, value in keys.items() if name.startswith("grpo.")}
    of_estimator = {name for name in grpo if name.startswith("adv_estimator.")}
    estimator = AdvEstimatorConfig(**{name.removeprefix("adv_estimator."): grpo.pop(name) for name in of_estimator})
    cfg = Config(grpo=GRPOConfig(adv_estimator=estimator, **grpo), loss_fn=LossConfig(**loss_fn))
    problems = [text for text in contradictions(cfg) if "reward_std_floor" not in text]
    assert not problems, problems
    return cfg


def random_step(seed: int) -> dict:
    """Tokens of four groups of four samples, in any order; the first four samples have two sequences each. A sample may
    be left out whole, its tokens one by one; all that belongs to a masked token but its sequence is NaN."""
    generator = torch.Generator().manual_seed(seed)
    spread = SPREADS[seed % len(SPREADS)]
    length_S = torch.randint(1, 9, (20,), generator=generator)
    seq_R = torch.arange(20).repeat_interleave(length_S)
    seq_R = seq_R[torch.randperm(len(seq_R), generator=generator)]
    sample_R = seq_R % 16

    def normal(size: float) -> torch.Tensor:
        return size * torch.randn(len(seq_R), generator=generator, dtype=torch.float64)

    def uniform(size: float) -> torch.Tensor:
        return size * torch.rand(len(seq_R), generator=generator, dtype=torch.float64)

    mask_R = (uniform(1) < 0.8) & (sample_R != 5)
    logp_R = -uniform(3) - 0.05
    old_logp_R = logp_R if spread is None else logp_R - normal(spread)
    sampler_logp_R = old_logp_R + normal(0.3)
    sampler_logp_R[uniform(1) < 0.02] = -torch.inf
    step = {
        "logp_R": logp_R,
        "old_logp_R": None if spread is None else old_logp_R,
        "sampler_logp_R": sampler_logp_R,
        "ref_logp_R": logp_R + normal(0.5),
        "entropy_R": uniform(2),
    }
    for name, x_R in step.items():
        if x_R is not None:
            step[name] = torch.where(mask_R, x_R, torch.nan)
    step |= {"mask_R": mask_R, "seq_R": seq_R, "sample_R": sample_R}
    step["reward_PB"] = torch.randint(3, (2, 16), generator=generator).double() / 2  # two rewards of each sample
    step["pack_S"] = torch.randint(4, (20,), generator=generator)
    return step


def with_advantages(step: dict, adv_B: torch.Tensor) -> dict:
    """The tokens with what their sample has got."""
    adv_R = torch.where(step["mask_R"], adv_B[step["sample_R"]], torch.nan)
    reward_R = step["reward_PB"].sum(0)[step["sample_R"]]
    return {name: x for name, x in step.items() if name.endswith("_R")} | {"adv_R": adv_R, "reward_R": reward_R}


def with_counts(packs: list[dict]) -> tuple[list[dict], dict]:
    """(packs with share_R, counts) of pack.py."""
    rows = [HostRows(*(pack[name].numpy() for name in HostRows.__slots__)) for pack in packs]
    num_tokens_B = sum(of_pack.num_tokens_of_samples(16) for of_pack in rows)
    for pack, of_pack in zip(packs, rows, strict=True):
        pack["share_R"] = torch.from_numpy(shares_of_samples(of_pack, num_tokens_B))
    return packs, {
        "num_valid_tokens": int(num_tokens_B.sum()),
        "num_valid_seqs": int((num_tokens_B > 0).sum()),
        "num_positive_tokens": sum(of_pack.num_positive_tokens for of_pack in rows),
    }


def computed(step: dict, cfg: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages of the samples; loss, gradient in log p and in the entropy, in one vector) as the program computes
    them on two ranks of two packs each. Here one process adds up what ranks sum: counts, losses and gradients."""
    reward_B = step["reward_PB"].sum(0)
    group_B = torch.arange(16) // 4
    is_trained_R = step["mask_R"] & step["sampler_logp_R"].isfinite()
    length_B = torch.zeros(16, dtype=torch.int64).index_add(0, step["sample_R"], is_trained_R.long())
    parts = {"a": step["reward_PB"][0], "b": step["reward_PB"][1]}
    adv_B = estimate_advantages(reward_B, group_B, length_B, cfg.grpo, parts)
    tokens = with_advantages(step, adv_B)
    pack_R = step["pack_S"][step["seq_R"]]
    packs = []
    for number in range(4):
        packs.append({name: None if x_R is None else x_R[pack_R == number] for name, x_R in tokens.items()})
    packs, counts = with_counts(packs)
    logp_R, entropy_R = tokens["logp_R"].requires_grad_(), tokens["entropy_R"].requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for number, pack in enumerate(packs):
        pack |= {"logp_R": logp_R[pack_R == number], "entropy_R": entropy_R[pack_R == number]}
        pack["positive_R"] = pack.pop("reward_R") > 0
        del pack["sample_R"]
        loss, _ = policy_loss(**pack, **counts, cfg=cfg.loss_fn)
        loss.backward()
        total += loss.detach()
    return adv_B, torch.cat([total[None], *gradients(logp_R, entropy_R)])


def gradients(*leaves: torch.Tensor) -> list[torch.Tensor]:
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


def by_hand(step: dict, cfg: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as `computed`, of all tokens at once."""
    reward_PB = step["reward_PB"].tolist()
    rewards = [a + b for a, b in zip(*reward_PB, strict=True)]
    parts = {"a": reward_PB[0], "b": reward_PB[1]}
    is_trained = step["mask_R"] & step["sampler_logp_R"].isfinite()
    trained = step["sample_R"][is_trained].tolist()
    lengths = [trained.count(i) for i in range(16)]
    advantages = naive_advantages(rewards, parts, [i // 4 for i in range(16)], lengths, cfg.grpo)
    adv_B = torch.tensor(advantages, dtype=torch.float64)
    counts = {
        "num_valid_tokens": len(trained),
        "num_valid_seqs": len(set(trained)),
        "num_positive_tokens": sum(rewards[i] > 0 for i in trained),
    }
    tokens = with_advantages(step, adv_B)
    tokens["positive_R"] = tokens["reward_R"] > 0
    sums = naive_loss(tokens | counts, cfg.loss_fn)
    return adv_B, torch.tensor([sums.loss, *sums.slope, *sums.slope_of_entropy], dtype=torch.float64)


def largest_error(got: torch.Tensor, want: torch.Tensor, floor: float = 1e-3) -> float:
    """Relative to each number, or to `floor` of the largest where it is below that."""
    return ((got - want).abs() / want.abs().clamp(min=floor * want.abs().max())).max().item()


@pytest.mark.parametrize("num_steps", long_but([3], [3, 200]))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_algorithm_from_rewards_to_gradients(name, num_steps):
    for keys in ALGORITHMS[name]:
        cfg = config_of(keys)
        for seed in range(num_steps):
            step = random_step(seed)
            adv_B, numbers = computed(step, cfg)
            expected_adv_B, expected = by_hand(step, cfg)
            assert largest_error(adv_B, expected_adv_B) <= 1e-9, (keys, seed)
            assert largest_error(numbers, expected) <= 1e-9, (keys, seed, numbers, expected)


def test_each_row_of_the_page_is_here():
    table = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8").partition("\n\n## ")[0]
    rows = re.findall(r"^\| ([^|]+?) \| [^|]*`", table, re.M)
    assert rows and set(rows) == ALGORITHMS.keys() | OTHER_TESTS


# ----------------------------------------------------------------------------------------- options in combination

AGGREGATIONS = [
    {},
    {"loss_scale_factor": 3.0},
    {"token_level_loss": False},
    {"token_level_loss": False, "loss_scale_factor": 9.0},
]
KLS = [{"reference_policy_kl_penalty": 0.0}] + [
    {"reference_policy_kl_type": kind, "reference_policy_kl_penalty": 0.3} for kind in ("k1", "k2", "k3")
]
KL_VARIANTS = [
    {"kl_gradient": gradient, "use_on_policy_kl_approximation": approx, **clamps}
    for gradient in ("score_function", "policy_ratio", "plain")
    for approx in (False, True)
    for clamps in ({}, {"kl_input_clamp_value": 0.4}, {"kl_output_clamp_value": 0.1}, {"kl_input_clamp_value": None})
]
BATCH = hard_batch(torch.float64)


def check(configs: list[LossConfig], tolerance: float = 1e-12, floor: float = 1e-3, dtype=torch.float64) -> None:
    for cfg in configs:
        batch = hard_batch(dtype)
        loss, _ = policy_loss(**batch, cfg=cfg)
        loss.backward()
        got = torch.cat([loss.detach()[None], *gradients(batch["logp_R"], batch["entropy_R"])]).double()
        sums = naive_loss(BATCH, cfg)
        expected = torch.tensor([sums.loss, *sums.slope, *sums.slope_of_entropy], dtype=torch.float64)
        assert largest_error(got, expected, floor) <= tolerance, (cfg, got, expected)


def assert_all_are_in(configs: list[LossConfig], *choices: list[dict]) -> None:
    """No rule has left out one of the choices altogether."""
    for options in (options for choice in choices for options in choice):
        is_in = [all(getattr(cfg, name) == value for name, value in options.items()) for cfg in configs]
        assert any(is_in), options


@pytest.mark.slow
@pytest.mark.parametrize(
    "clip_max, dual", long_but([(0.2, None), (0.28, 1.05)], [(c, d) for c in (0.2, 0.28) for d in (None, 1.05, 3.0)])
)
def test_clip_dual_clip_weights_kl_aggregation_entropy(clip_max, dual):
    """Signs of the advantage and sides of the clips: all in the batch."""
    clip = [{"ratio_clip_max": clip_max, "ratio_clip_c": dual}]
    configs = allowed(clip, WEIGHTS, KLS, AGGREGATIONS, [{}, {"entropy_coef": 0.2}])
    assert_all_are_in(configs, WEIGHTS, KLS, AGGREGATIONS)
    check(configs)


@pytest.mark.slow
def test_modes_weights_aggregation():
    configs = allowed(MODES, WEIGHTS, AGGREGATIONS, [{"reference_policy_kl_penalty": 0.3, "entropy_coef": 0.2}])
    assert_all_are_in(configs, MODES, WEIGHTS, AGGREGATIONS)
    check(configs)


def test_kl_variants():
    configs = allowed(MODES[:3], KLS[1:], KL_VARIANTS, AGGREGATIONS)
    assert_all_are_in(configs, MODES[:3], KLS[1:], AGGREGATIONS)
    check(configs)


def test_positive_examples_and_a_lower_clip_of_its_own():
    check(allowed(MODES, AGGREGATIONS, [{"positive_example_nll_weight": 0.7, "ratio_clip_min": 0.05}]))


@pytest.mark.slow
def test_float32_is_close():
    configs = allowed(MODES, WEIGHTS, AGGREGATIONS, [{"entropy_coef": 0.2}]) + allowed(MODES, KLS, AGGREGATIONS)
    check(configs, tolerance=1e-6, floor=1, dtype=torch.float32)
