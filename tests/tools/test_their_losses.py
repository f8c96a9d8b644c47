"""What a converted config trains is what TRL 1.16.0 and verl 0.9.1 train, or the report says what differs.

`trl_loss` and `verl_loss` are their formulas, over sequences of one padded batch. core/test_loss_peers.py has numbers
that their own code gave for the same inputs.
"""

import pytest
import torch
import yaml
from small_run import ROOT

from base.inputs import reader
from config import ConfigError
from loss import policy_loss
from tools.convert import LEFT, NOT_QUITE, convert, load_table

INPUTS = yaml.safe_load((ROOT / "tests/core/loss_peers.yaml").read_text(encoding="utf-8"))["inputs"]
ENTROPY = [[1.0, 0.5, 0.2], [0.8, 0.1, 1.5]]
WIDTH = 512  # TRL's max_completion_length and verl's max_response_length, by default


def batch(name):
    return {key: torch.tensor(rows, dtype=torch.float64) for key, rows in INPUTS[name].items()}


def trl_loss(logp, b, k):
    """k: TRL's keys, with its defaults."""
    mask = b["mask"]
    adv = b["adv"][:, None]
    log_ratio = logp - b["old"]
    if k["importance_sampling_level"] == "sequence":
        log_ratio = ((log_ratio * mask).sum(1) / mask.sum(1))[:, None]
    ratio = log_ratio.exp()
    high = k["epsilon"] if k["epsilon_high"] is None else k["epsilon_high"]
    if k["loss_type"] == "cispo":
        loss = -ratio.clamp(max=high).detach() * adv * logp
    elif k["loss_type"] == "sapo":
        tau = (adv > 0).double() * k["sapo_temperature_pos"] + (adv <= 0).double() * k["sapo_temperature_neg"]
        loss = -adv * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    else:
        clipped = ratio.clamp(1 - k["epsilon"], 1 + high)
        bounded = ratio if k["delta"] is None else ratio.clamp(max=k["delta"])
        loss = -torch.minimum(bounded * adv, clipped * adv)
    if k["use_vllm"]:
        log_weight = b["old"] - b["sampler"]
        mode = k["vllm_importance_sampling_mode"]
        if mode.startswith("sequence"):
            log_weight = (log_weight * mask).sum(1, keepdim=True)
        weight = log_weight.exp()
        low, most = k["vllm_importance_sampling_clip_min"], k["vllm_importance_sampling_clip_max"]
        low = -float("inf") if low is None else low
        most = float("inf") if most is None else most
        if mode.endswith("truncate"):
            weight = weight.clamp(low, most)
        else:
            weight = weight * (weight >= low) * (weight <= most)
        loss = loss * weight
    if k["off_policy_mask_threshold"] is not None:
        left = ((b["sampler"] - logp.detach()) * mask).sum(1) / mask.sum(1)
        loss = loss * ((adv >= 0) | (left <= k["off_policy_mask_threshold"])[:, None])
    if k["beta"]:
        difference = b["ref"] - logp
        kl = difference.exp() - difference - 1
        if k["use_bias_correction_kl"]:
            kl = kl * ratio
        loss = loss + k["beta"] * kl
    loss = loss * mask
    if k["loss_type"] in ("grpo", "sapo"):
        return (loss.sum(1) / mask.sum(1)).mean()
    if k["loss_type"] == "dr_grpo":
        return loss.sum() / (len(mask) * WIDTH)
    if k["loss_type"] == "luspo":
        return loss.sum(1).mean()
    assert k["loss_type"] in ("dapo", "cispo"), k
    return loss.sum() / mask.sum()


def verl_loss(logp, b, k):
    """k: verl's keys by their last parts, with its defaults."""
    mask = b["mask"] * not_rejected(b, k)
    length = mask.sum(1).clamp(min=1)
    adv = b["adv"][:, None]
    log_ratio = logp - b["old"]
    if k["loss_mode"] == "gspo":
        mean = ((log_ratio * mask).sum(1) / length)[:, None]
        log_ratio = mean.detach() + logp - logp.detach()
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - k["clip_ratio_low"], 1 + k["clip_ratio_high"])
    loss = torch.maximum(-adv * ratio, -adv * clipped)
    if k["loss_mode"] == "vanilla":
        loss = torch.where(adv < 0, torch.minimum(loss, -adv * k["clip_ratio_c"]), loss)
    elif k["loss_mode"] == "cispo":
        loss = -adv * clipped.detach() * logp
    elif k["loss_mode"] == "gpg":
        loss = -adv * logp
    elif k["loss_mode"] == "sapo":
        tau = (adv > 0).double() * k["tau_pos"] + (adv <= 0).double() * k["tau_neg"]
        loss = -adv * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    elif k["loss_mode"] == "dppo_tv":
        moved = (logp.exp() - b["old"].exp()).detach()
        is_kept = torch.where(adv > 0, moved <= k["clip_ratio_high"], moved >= -k["clip_ratio_low"])
        loss = -adv * ratio.clamp(max=k["clip_ratio_c"]).detach() * logp * is_kept
    elif k["loss_mode"] == "geo_mean":
        clipped = log_ratio.clamp(-k["clip_ratio_low"], k["clip_ratio_high"])
        pessimistic = adv.sign() * torch.minimum(adv.sign() * log_ratio, adv.sign() * clipped)
        mean_ratio = ((pessimistic * mask).sum(1) / length).exp()
        loss = (-adv * mean_ratio[:, None]).expand_as(mask)
    if k["rollout_is"]:
        log_weight = b["old"] - b["sampler"]
        if k["rollout_is"] == "sequence":
            log_weight = (log_weight * b["mask"]).sum(1, keepdim=True).expand_as(mask)
        weight = log_weight.exp()
        low, _, high = str(k["rollout_is_threshold"]).rpartition("_")
        if low:
            weight = weight * (weight >= float(low)) * (weight <= float(high))
        else:
            weight = weight.clamp(max=float(high))
        loss = loss * weight
    if k["use_kl_loss"]:
        difference = b["ref"] - logp
        kinds = {"k1": -difference, "k2": difference.square() / 2}
        bounded = difference.clamp(-20, 20)
        kinds["low_var_kl"] = (bounded.exp() - bounded - 1).clamp(-10, 10)
        loss = loss + k["kl_loss_coef"] * kinds[k["kl_loss_type"]]
    loss = loss - k["entropy_coeff"] * torch.tensor(ENTROPY, dtype=torch.float64)
    loss = loss * mask
    average = k["loss_agg_mode"]
    if k["loss_mode"] in ("sapo", "geo_mean"):
        average = "seq-mean-token-mean"
    if average == "token-sum":
        return loss.sum()
    if average == "token-mean":
        return loss.sum() / b["mask"].sum()  # batch_num_tokens, of loss_mask
    if average == "seq-mean-token-mean":
        return (loss.sum(1) / length).mean()
    width = {"seq-mean-token-sum": 1, "seq-mean-token-sum-norm": k["loss_scale_factor"] or WIDTH}[average]
    return loss.sum(1).mean() / width


def not_rejected(b, k):
    """What compute_rollout_rejection_mask leaves: k1 = -log ratio is within the logs of the bounds."""
    k1 = b["sampler"] - b["old"]
    mean = (k1 * b["mask"]).sum(1, keepdim=True) / b["mask"].sum(1, keepdim=True)
    options = (k["rollout_rs"] or "").split(",")
    bounds = str(k["rollout_rs_threshold"]).split(",")
    kept = torch.ones_like(k1)
    for option, bound in zip(options, bounds * len(options), strict=False):
        if option:
            low, _, high = bound.rpartition("_")
            statistic = {"token_k1": k1, "seq_mean_k1": mean}[option].exp()
            kept = kept * (statistic >= float(low or 1 / float(high))) * (statistic <= float(high))
    return kept


def our_loss(logp, b, cfg):
    mask = b["mask"] != 0
    rows = {key: b[key][mask] for key in ("old", "sampler", "ref")}
    seq = torch.arange(2)[:, None].expand_as(mask)
    loss, _ = policy_loss(
        logp[mask],
        old_logp_R=rows["old"],
        sampler_logp_R=rows["sampler"],
        ref_logp_R=rows["ref"] if cfg.reference_policy_kl_penalty else None,
        adv_R=b["adv"][:, None].expand_as(mask)[mask],
        mask_R=mask[mask],
        seq_R=seq[mask],
        num_valid_tokens=int(mask.sum()),
        num_valid_seqs=2,
        entropy_R=torch.tensor(ENTROPY, dtype=torch.float64)[mask],
        cfg=cfg,
    )
    return loss


def value_and_gradient(loss_of, name, keys):
    b = batch(name)
    logp = b["logp"].requires_grad_()
    loss = loss_of(logp, b, keys)
    loss.backward()
    return loss.item(), logp.grad


ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
SECTIONS = {
    f"{ACTOR}.policy_loss": "loss_mode",
    ACTOR: "clip_ratio_low clip_ratio_high clip_ratio_c loss_agg_mode loss_scale_factor entropy_coeff use_kl_loss "
    "kl_loss_coef kl_loss_type tau_pos tau_neg",
    CORRECTION: "rollout_is rollout_is_threshold rollout_rs rollout_rs_threshold",
}
FULL_KEYS = {name: f"{section}.{name}" for section, names in SECTIONS.items() for name in names.split()}
VERL_DEFAULTS = load_table("verl")["recorded"]
DEFAULTS = {"trl": load_table("trl")["recorded"], "verl": {n: VERL_DEFAULTS[key] for n, key in FULL_KEYS.items()}}
LOSS_OF = {"trl": trl_loss, "verl": verl_loss}
GSPO = {"importance_sampling_level": "sequence", "loss_type": "grpo"}
VERL_GSPO = {"loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-mean"}
WEIGHTS = {"use_vllm": True, "vllm_importance_sampling_clip_max": 1.2}
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
PLAIN_KL = {"beta": 0.1, "use_bias_correction_kl": False}
NAN = "vllm_importance_sampling_correction"  # the key of the note on a sampler's NaN

EQUAL = [  # system, keys beside the defaults
    ("trl", {}),
    ("trl", {"loss_type": "grpo"}),
    ("trl", {"loss_type": "dr_grpo"}),
    ("trl", {"loss_type": "luspo"}),
    ("trl", {"loss_type": "luspo", "importance_sampling_level": "sequence"}),
    ("trl", {"epsilon_high": 0.28}),
    ("trl", {"delta": 1.2}),
    ("trl", {"delta": 1.4, "epsilon_high": 0.28}),
    ("trl", {"delta": 1.25, **GSPO}),
    ("trl", {"loss_type": "cispo", "epsilon_high": 5.0}),
    ("trl", {"loss_type": "cispo", "epsilon_high": 1.1, "delta": 1.05}),
    ("trl", GSPO),
    ("trl", {**GSPO, "loss_type": "dr_grpo"}),
    ("trl", {**GSPO, "loss_type": "dapo"}),
    ("trl", {"loss_type": "sapo"}),
    ("trl", {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5, "epsilon": 0.1}),
    ("trl", {"off_policy_mask_threshold": 0.02}),
    ("trl", {"off_policy_mask_threshold": 0.02, **GSPO}),
    ("trl", PLAIN_KL),
    ("trl", {**PLAIN_KL, **GSPO}),
    ("trl", {"use_vllm": True}),
    *(("trl", {**WEIGHTS, "vllm_importance_sampling_mode": mode}) for mode in MODES),
    *(("trl", {**WEIGHTS, "vllm_importance_sampling_mode": mode, **GSPO}) for mode in MODES),
    *(
        ("trl", {**WEIGHTS, "vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_min": 0.9, **more})
        for mode in MODES
        for more in ({}, GSPO)
    ),
    *(
        ("trl", {"use_vllm": True, "vllm_importance_sampling_clip_max": None, "vllm_importance_sampling_mode": mode})
        for mode in MODES
    ),
    ("verl", {}),
    ("verl", {"clip_ratio_high": 0.28}),
    ("verl", {"clip_ratio_c": 1.25}),
    ("verl", {"loss_agg_mode": "seq-mean-token-mean"}),
    ("verl", {"loss_agg_mode": "seq-mean-token-sum"}),
    ("verl", {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 16}),
    ("verl", {"loss_mode": "cispo"}),
    ("verl", {"loss_mode": "cispo", "clip_ratio_low": 10.0}),
    ("verl", {"loss_mode": "gpg"}),
    ("verl", {"loss_mode": "gpg", "loss_agg_mode": "seq-mean-token-mean", "rollout_is": "token"}),
    ("verl", VERL_GSPO),
    ("verl", {**VERL_GSPO, "loss_agg_mode": "seq-mean-token-sum"}),
    ("verl", {"loss_mode": "gspo"}),
    ("verl", {"loss_mode": "gspo", "rollout_is": "token", "rollout_is_threshold": 1.2}),
    ("verl", {**VERL_GSPO, "rollout_is": "token", "rollout_is_threshold": 1.2}),
    ("verl", {**VERL_GSPO, "rollout_is": "token", "rollout_is_threshold": "0.9_1.2"}),
    ("verl", {"loss_agg_mode": "token-sum"}),
    ("verl", {"loss_mode": "sapo"}),
    ("verl", {"loss_mode": "sapo", "tau_pos": 2.0, "tau_neg": 0.5, "rollout_is": "token"}),
    ("verl", {"loss_mode": "dppo_tv", "clip_ratio_low": 0.05, "clip_ratio_high": 0.1}),
    ("verl", {"loss_mode": "dppo_tv", "clip_ratio_c": 1.3, "loss_agg_mode": "seq-mean-token-mean"}),
    ("verl", {"loss_mode": "geo_mean"}),
    ("verl", {"loss_mode": "geo_mean", "clip_ratio_low": 0.4, "clip_ratio_high": 0.1}),
    ("verl", {**VERL_GSPO, "rollout_is": "sequence"}),
    ("verl", {**VERL_GSPO, "rollout_is": "sequence", "rollout_is_threshold": "0.3_1.2"}),
    ("verl", {"entropy_coeff": 0.1}),
    ("verl", {"entropy_coeff": 0.1, "loss_agg_mode": "seq-mean-token-mean"}),
    *(
        ("verl", {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": kind})
        for kind in ("low_var_kl", "k1", "k2")
    ),
    *(
        ("verl", {"rollout_is": level, "rollout_is_threshold": bounds})
        for level in ("token", "sequence")
        for bounds in (1.2, "1.2", "0.9_1.2", "0.3_1.2")
    ),
    *(
        ("verl", {"rollout_rs": options, "rollout_rs_threshold": bounds, **more})
        for options, bounds in (
            ("token_k1", "0.8_1.4"),
            ("token_k1", 1.3),
            ("seq_mean_k1", "0.9_1.1"),
            ("seq_mean_k1", "1.05"),
            ("token_k1,seq_mean_k1", "0.7_1.4,0.87_1.2"),
            ("seq_mean_k1,token_k1", 1.2),
        )
        for more in (
            {},
            {"loss_agg_mode": "seq-mean-token-mean", "use_kl_loss": True, "entropy_coeff": 0.1},
            {"loss_agg_mode": "seq-mean-token-sum", "rollout_is": "token"},
            {"loss_mode": "gspo"},
            {"loss_mode": "geo_mean"},
        )
    ),
    ("verl", {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.1", "rollout_is": "sequence"}),
]
ON_POLICY = [("trl", {"beta": 0.1}), ("trl", {"beta": 0.1, "loss_type": "grpo"})]  # old = log p: one optimizer step


def words_of(system, keys):
    if system == "trl":
        return [f"{key}={'null' if value is None else value}" for key, value in keys.items()]
    return [f"{FULL_KEYS[key]}={'null' if value is None else value}" for key, value in keys.items()]


def converted(system, words, folder):
    """(our loss_fn, the report)."""
    (folder / "theirs.yaml").write_text(
        "{algorithm: {adv_estimator: grpo}, actor_rollout_ref: {}}" if system == "verl" else "{}"
    )
    report = convert(system, str(folder / "theirs.yaml"), words, str(folder / "ours.yaml"))
    assert "loss_fn" not in report.partition(LEFT)[2], report
    return reader.read(folder / "ours.yaml").cfg.loss_fn, report


def assert_equal(system, keys, names, folder):
    cfg, _ = converted(system, words_of(system, keys), folder)
    for name in names:
        theirs, gradient = value_and_gradient(LOSS_OF[system], name, DEFAULTS[system] | keys)
        ours, our_gradient = value_and_gradient(our_loss, name, cfg)
        assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-12), (name, keys)
        error = (our_gradient - gradient).abs().max()
        assert error <= 1e-12 * max(1.0, gradient.abs().max()), (name, keys, our_gradient, gradient)


@pytest.mark.parametrize(("system", "keys"), EQUAL)
def test_the_loss_is_equal(system, keys, tmp_path):
    assert_equal(system, keys, INPUTS, tmp_path)


def test_trls_kl_is_equal_with_several_optimizer_steps(tmp_path):
    """Without the input whose KL is e^25: its two parts cancel to rounding."""
    assert_equal("trl", {"beta": 0.1, "num_iterations": 2, "loss_type": "grpo"}, ["S1", "S2", "S3"], tmp_path)


@pytest.mark.parametrize(("system", "keys"), ON_POLICY)
def test_the_loss_is_equal_with_one_optimizer_step(system, keys, tmp_path):
    assert_equal(system, keys, ["S3"], tmp_path)


MODE = f"{ACTOR}.policy_loss.loss_mode"
SAID = [  # what is trained almost alike: the key of the line that says what differs
    ("trl", ["steps_per_generation=4"], "loss_type=dapo"),
    ("trl", ["loss_type=cispo", "epsilon_high=5.0", "steps_per_generation=4"], "loss_type=cispo"),
    ("trl", ["loss_type=grpo", "mask_truncated_completions=true"], "mask_truncated_completions=true"),
    ("trl", ["loss_type=dr_grpo", "mask_truncated_completions=true"], "mask_truncated_completions=true"),
    ("trl", ["entropy_coef=0.01"], "entropy_coef=0.01"),
    ("trl", ["use_vllm=true"], f"{NAN}=true"),
    ("trl", ["multi_objective_aggregation=normalize_then_sum"], "multi_objective_aggregation=normalize_then_sum"),
    ("trl", ["weight_decay=0.1"], "weight_decay=0.1"),
    ("verl", [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"], f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"),
    ("verl", [f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"], f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"),
    ("verl", [f"{MODE}=geo_mean"], f"{MODE}=geo_mean"),
    ("verl", [f"{MODE}=sapo", f"{ACTOR}.entropy_coeff=0.1"], f"{ACTOR}.loss_agg_mode=token-mean: verl averages"),
    ("verl", [f"{ACTOR}.strategy=megatron"], f"{ACTOR}.optim.weight_decay=0.01"),
    ("verl", [f"{CORRECTION}.rollout_is=token"], f"{CORRECTION}.rollout_is=token"),
    ("verl", ["algorithm.adv_estimator=reinforce_plus_plus"], "algorithm.adv_estimator=reinforce_plus_plus"),
    (
        "verl",
        ["algorithm.adv_estimator=opo", f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=2"],
        f"{CORRECTION}.rollout_rs=token_k1",
    ),
    ("verl", ["algorithm.adv_estimator=reinforce_plus_plus_baseline"], "algorithm.adv_estimator=reinforce_plus_plus_b"),
]


@pytest.mark.parametrize(("system", "words", "line"), SAID)
def test_what_differs_is_said(system, words, line, tmp_path):
    _, report = converted(system, words, tmp_path)
    assert f"\n  {line}" in report.partition(NOT_QUITE)[2]
    comments = [line for line in (tmp_path / "ours.yaml").read_text().splitlines() if line.startswith("#")]
    assert any(line in comment for comment in comments), "in the file, too"


@pytest.mark.parametrize(
    ("system", "words"),
    [
        ("trl", ["mask_truncated_completions=true"]),
        ("trl", ["loss_type=grpo", "num_iterations=2"]),
        ("trl", ["weight_decay=0.1", "use_peft=true"]),
        ("verl", []),
        ("verl", [f"{MODE}=gspo"]),
        ("verl", [f"{ACTOR}.strategy=megatron", f"{ACTOR}.optim.weight_decay=0.0"]),
    ],
)
def test_what_is_equal_is_not_said_to_differ(system, words, tmp_path):
    assert NOT_QUITE not in converted(system, words, tmp_path)[1]


AVERAGE, KL_KIND = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.kl_loss_type"
NOT_HERE = [  # words -> the key that is refused
    ("trl", ["beta=0.1", "loss_type=grpo", "importance_sampling_level=sequence"], "use_bias_correction_kl"),
    ("trl", ["importance_sampling_level=sequence", "loss_type=sapo"], "importance_sampling_level"),
    ("trl", ["importance_sampling_level=sequence", "loss_type=cispo"], "importance_sampling_level"),
    ("trl", ["loss_type=cispo"], "epsilon"),
    ("trl", ["loss_type=cispo", "epsilon_high=0.28"], "epsilon_high"),
    ("trl", ["delta=1.1"], "delta"),
    ("trl", ["delta=1.25", "epsilon_high=0.28"], "delta"),
    *(("trl", [f"loss_type={loss}"], "loss_type") for loss in ("bnpo", "vespo")),
    ("trl", ["top_entropy_quantile=0.5"], "top_entropy_quantile"),
    ("trl", ["use_adaptive_entropy=true"], "use_adaptive_entropy"),
    ("verl", [f"{MODE}=geo_mean", f"{CORRECTION}.rollout_is=token"], f"{CORRECTION}.rollout_is"),
    ("verl", [f"{MODE}=cispo", f"{AVERAGE}=seq-mean-token-mean"], AVERAGE),
    *(("verl", [f"{MODE}={mode}"], MODE) for mode in ("dppo_kl", "clip_cov", "kl_cov", "dro")),
    *(("verl", [f"{ACTOR}.use_kl_loss=true", f"{KL_KIND}={kind}"], KL_KIND) for kind in ("k3+", "abs", "full")),
    ("verl", [f"{CORRECTION}.rollout_rs=token_k1,seq_max_k2"], f"{CORRECTION}.rollout_rs"),
    (
        "verl",
        [f"{CORRECTION}.rollout_{words}" for words in ("rs=token_k1", "rs_threshold=2.0", "is=sequence")],
        f"{CORRECTION}.rollout_rs",
    ),
    *(("verl", [f"algorithm.adv_estimator={name}"], "algorithm.adv_estimator") for name in ("gae", "grpo_passk")),
]


@pytest.mark.parametrize(("system", "words", "key"), NOT_HERE)
def test_what_is_not_here_is_refused_by_name(system, words, key, tmp_path):
    with pytest.raises(ConfigError) as error:
        converted(system, words, tmp_path)
    assert f"\n{key}=" in str(error.value)
    assert not (tmp_path / "ours.yaml").exists()
