"""Which keys of our loss a config of TRL 1.16.0 or verl 0.9.1 becomes, and what the report says where they differ.

Numbers are not computed here: core/test_loss_peers.py has those that their own code printed, for the keys of ours that
the same settings become here.
"""

from dataclasses import asdict

import pytest
import yaml
from small_run import ROOT

from base.inputs import reader
from config import ConfigError, LossConfig
from tools.convert import LEFT, NOT_QUITE, convert

ROWS = yaml.safe_load((ROOT / "tests/tools/their_losses.yaml").read_text(encoding="utf-8"))
PRINTED = yaml.safe_load((ROOT / "tests/core/loss_peers.yaml").read_text(encoding="utf-8"))["printed"]
OF_PEERS = [(name, system) for name, printed in PRINTED.items() for system in ("trl", "verl") if system in printed]

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
MODE, AVERAGE, KL_KIND = f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.loss_agg_mode", f"{ACTOR}.kl_loss_type"
NAN = "vllm_importance_sampling_correction"  # the key of the note on a sampler's NaN


def full_key(name):
    """verl's key by its last part."""
    if name == "loss_mode":
        return MODE
    return f"{CORRECTION}.{name}" if name.startswith("rollout_") else f"{ACTOR}.{name}"


def words_of(system, keys):
    named = {key if system == "trl" else full_key(key): value for key, value in keys.items()}
    return [f"{key}={'null' if value is None else value}" for key, value in named.items()]


def converted(system, words, folder):
    """(our loss_fn, the report)."""
    empty = {"trl": "{}", "verl": "{algorithm: {adv_estimator: grpo}, actor_rollout_ref: {}}"}
    (folder / "theirs.yaml").write_text(empty[system])
    (folder / "ours.yaml").unlink(missing_ok=True)
    report = convert(system, str(folder / "theirs.yaml"), words, str(folder / "ours.yaml"))
    assert "loss_fn" not in report.partition(LEFT)[2], report
    return reader.read(folder / "ours.yaml").cfg.loss_fn, report


def rounded(keys):
    """As the tables have them."""
    return {key: round(value, 6) if isinstance(value, float) else value for key, value in keys.items()}


@pytest.mark.parametrize(("system", "theirs", "ours"), ROWS)
def test_the_keys_of_the_loss(system, theirs, ours, tmp_path):
    base = LossConfig()
    if theirs:
        base, _ = converted(system, [], tmp_path)
    cfg, _ = converted(system, words_of(system, theirs), tmp_path)
    assert rounded(asdict(cfg)) == rounded(asdict(base) | ours)


def keys_that_count(cfg):
    """The keys of a loss, without those of a KL that it has not, and of weights that it has not."""
    idle = []
    if not cfg.reference_policy_kl_penalty:
        idle += ["kl_", "reference_policy_kl_type"]
    if not cfg.use_importance_sampling_correction:
        idle += ["truncated_", "importance_sampling_correction_level"]
    return rounded({key: value for key, value in asdict(cfg).items() if not key.startswith(tuple(idle))})


@pytest.mark.parametrize(("name", "system"), OF_PEERS)
def test_the_keys_of_the_losses_whose_numbers_their_own_code_printed(name, system, tmp_path):
    cfg, _ = converted(system, words_of(system, PRINTED[name][system]), tmp_path)
    assert keys_that_count(cfg) == keys_that_count(LossConfig(**PRINTED[name]["keys"]))


SAID = [  # what is trained almost alike: the key of the line that says what differs
    ("trl", ["steps_per_generation=4"], "loss_type=dapo"),
    ("trl", ["loss_type=cispo", "epsilon_high=5.0", "steps_per_generation=4"], "loss_type=cispo"),
    ("trl", ["loss_type=grpo", "mask_truncated_completions=true"], "mask_truncated_completions=true"),
    ("trl", ["loss_type=dr_grpo", "mask_truncated_completions=true"], "mask_truncated_completions=true"),
    ("trl", ["entropy_coef=0.01"], "entropy_coef=0.01"),
    ("trl", ["use_vllm=true"], f"{NAN}=true"),
    ("trl", ["multi_objective_aggregation=normalize_then_sum"], "multi_objective_aggregation=normalize_then_sum"),
    ("trl", ["weight_decay=0.1"], "weight_decay=0.1"),
    ("trl", ["epsilon=0.4", "loss_type=grpo"], "epsilon=0.4: 0.4 with loss_type=grpo are the defaults of TRL's GMPO"),
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
        ("trl", ["epsilon=0.4"]),
        ("trl", ["epsilon=0.3", "loss_type=grpo"]),
        ("trl", ["weight_decay=0.1", "use_peft=true"]),
        ("verl", []),
        ("verl", [f"{MODE}=gspo"]),
        ("verl", [f"{ACTOR}.strategy=megatron", f"{ACTOR}.optim.weight_decay=0.0"]),
    ],
)
def test_what_is_equal_is_not_said_to_differ(system, words, tmp_path):
    assert NOT_QUITE not in converted(system, words, tmp_path)[1]


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
    ("trl", ["use_adaptive_entropy=true", "entropy_coef_min=0.1"], "entropy_coef_min"),
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
    *(("verl", [f"algorithm.adv_estimator={name}"], "algorithm.adv_estimator") for name in ("gae", "remax")),
]


@pytest.mark.parametrize(("system", "words", "key"), NOT_HERE)
def test_what_is_not_here_is_refused_by_name(system, words, key, tmp_path):
    with pytest.raises(ConfigError) as error:
        converted(system, words, tmp_path)
    assert f"\n{key}=" in str(error.value)
    assert not (tmp_path / "ours.yaml").exists()
