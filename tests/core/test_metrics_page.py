"""docs/metrics.md against what runs write: no metric without a row, no row without a metric, formulas recomputed."""

import json
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loss_cases import hard_batch, token_columns
from metrics_page import formulas, matches, rows, undocumented
from one_process import run_in_this_process
from samples import answers, sample, with_grade
from small_run import ROOT, arguments, write_rows

import grpo
from advantages import advantage_metrics
from base.agents.metrics import agent_metrics
from base.plan.gpus import PEAK_FLOPS
from config import Config, GRPOConfig, LossConfig
from gap import gap_of_pack, seq_logp_error_mask
from loss import policy_loss
from metrics import derived_metrics, reduce_over_ranks, sample_metrics, summarize
from run import memory

COMMITTED = ROOT / "examples" / "smollm2" / "metrics.jsonl"
OPTIONS = (  # what writes metrics of its own, in one run
    "logger.dump_rollouts=1",
    "grpo.max_num_steps=2",
    "grpo.val_at_start=false",
    "grpo.canary_period=1",
    "grpo.async_grpo.enabled=true",
    "grpo.use_dynamic_sampling=true",
    "grpo.dynamic_sampling_max_gen_batches=99",
    "grpo.seq_logprob_error_threshold=2",
    "grpo.logp_gap_limit=null",
    "policy.train_global_batch_size=16",
    "policy.precision=bfloat16",
    "policy.generation.top_p=0.95",
    "loss_fn.reference_policy_kl_penalty=0.1",
    "loss_fn.entropy_target=0.2",
    "loss_fn.use_importance_sampling_correction=true",
    "loss_fn.truncated_importance_sampling_type=icepop",
    "loss_fn.truncated_importance_sampling_ratio=2",
    "loss_fn.truncated_importance_sampling_ratio_min=0.5",
    "loss_fn.sequence_rejection_ratio_max=9",
    "checkpointing.save_hf_at_end=false",
)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def records(one_rank, tmp_path_factory):
    """The objects of metrics.jsonl of a run with OPTIONS and two validation sets, over the stand-in for vLLM."""
    folder = tmp_path_factory.mktemp("run")
    write_rows(folder)
    sets = [{"data_path": f"{folder}/heldout.jsonl", "name": name} for name in "ab"]
    file = folder / "two_sets.yaml"
    file.write_text(json.dumps({"defaults": str(ROOT / "configs" / "smoke.yaml"), "data": {"validation": sets}}))
    words = [word for word in arguments(folder)[1:] if not word.startswith("data.validation")]
    with pytest.MonkeyPatch.context() as patch:
        run_in_this_process(patch, one_rank)
        patch.setitem(PEAK_FLOPS, "CPU", 1e12)  # as if its peak were known
        patch.setattr(sys, "argv", ["", str(file), *words, *OPTIONS])
        assert grpo.main() == 0
    return read(folder / "exp_001" / "metrics.jsonl")


def keys_of_other_machines():
    """Of a GPU's memory."""
    plan = SimpleNamespace(cfg=Config(), size=lambda phase: 0, woken=0)
    counted = SimpleNamespace(plan=plan, engine_bytes=0, engine_reserved=0)
    return memory.Memory.metrics(counted, dict.fromkeys(memory.PHASES, (1, 1, 1))).keys()


@pytest.mark.house
@pytest.mark.slow
def test_every_metric_has_a_row_and_every_row_a_metric(records):
    written = {key for record in [*records, *read(COMMITTED)] for key in record} | keys_of_other_machines()
    several = [
        with_grade(SAMPLES[0], rewards={"a": 1.0}),
        replace(SAMPLES[1], engine=1, by_agent=True),
    ]  # parts, engines, agents
    written |= {f"train/{key}" for key in sample_metrics(several, several) | agent_metrics(several)}
    assert undocumented(written) == [], "docs/metrics.md has no row of these"
    assert len(written) > 170
    without = [pattern for pattern in rows() if not any(matches(pattern, key) for key in written)]
    assert without == [], "docs/metrics.md has rows of what no run writes"


# ------------------------------------------------------------------------------------------------------- the formulas

THRESHOLD = 1.25  # of the masked sequences below
SAMPLES = [
    sample(0, 1.0, "ok", 2),
    sample(0, 1.0, "ok", 4),
    sample(1, 0.0, "wrong", 6, unsampled=4),
    sample(1, 0.0, "parse_fail", 8, finish_reason="length"),
    sample(2, 1.0, "ok", 1, finish_reason="max_turns", num_turns=4),
    sample(2, 0.25, "timeout", 3),
]
for number, with_reward in enumerate(SAMPLES):
    with_reward.grade.unshaped_reward = [0.5, 1.0, 0.0, 0.0, 1.0, 1.0][number]
LOSS = LossConfig(truncated_importance_sampling_type="tis", truncated_importance_sampling_ratio=1.3)
VALIDATED = [answers("7", "1", None, "7"), answers("7", "7", "7", "3")]
FUNCTIONS = {name: getattr(np, name) for name in "exp log abs minimum maximum mean sum min max".split()}
FUNCTIONS |= {"k1": lambda x: -x, "k2": lambda x: x**2 / 2, "k3": lambda x: np.exp(x) - 1 - x}
FUNCTIONS |= {f"{name}_{dim}": FUNCTIONS[name] for name in ("mean", "sum", "min", "max") for dim in "RBP"}


def of_tokens():
    """(names of the formulas -> numbers, metric -> what the code says) of a batch with every side of every clip."""
    batch = hard_batch(torch.float64)
    del batch["positive_R"], batch["num_positive_tokens"]
    mask = batch["mask_R"].numpy()
    tokens = {name.removesuffix("_R"): x.detach().numpy()[mask] for name, x in batch.items() if name.endswith("_R")}
    old, sampler, seq = tokens["old_logp"], tokens["sampler_logp"], tokens["seq"]
    raw = np.exp(old - sampler)
    ratio = np.exp(tokens["logp"] - old)
    names = tokens | {"old": old, "sampler": sampler, "ref": tokens["ref_logp"], "ratio": ratio}
    names |= {"weight": np.minimum(raw, 1.3), "outside": raw > 1.3, "mix": np.log((np.exp(old) + np.exp(sampler)) / 2)}
    names |= {"clamped": ratio.clip(0.8, 1.2), "ratio_clip_min": 0.2, "ratio_clip_max": 0.2}
    names |= {"reference_policy_kl_penalty": 0.01, "seq_logprob_error_threshold": THRESHOLD}
    names["by_seq"] = lambda x: np.array([x[seq == number].mean() for number in np.unique(seq)])
    counts = {"num_valid_tokens": int(mask.sum()), "num_valid_seqs": len(np.unique(seq))}
    _, metrics = policy_loss(**batch | counts, cfg=LOSS)
    pack = SimpleNamespace(**batch | {"mask_R": batch["mask_R"] != 0, "reward_R": batch["mask_R"]})
    pack.tokens_R = token_columns(len(pack.mask_R))
    metrics |= gap_of_pack(pack, batch["logp_R"], 0, GRPOConfig())
    _, masked = seq_logp_error_mask(pack, THRESHOLD)
    return names, derived_metrics(reduce_over_ranks(metrics | masked))


def of_samples():
    reward = np.array([s.grade.reward for s in SAMPLES])
    groups = np.array([s.prompt for s in SAMPLES])
    advantage = np.array([0.0, 0.5, -1.0, 2.0, -0.25, 0.75])
    lengths = {"gen_tokens": "num_gen_tokens", "env_tokens": "num_env_tokens", "tokens": "num_tokens"}
    names = {name: np.array([getattr(s.sequence, field) for s in SAMPLES]) for name, field in lengths.items()}
    for name, field in {"turns": "num_turns", "finish_reason": "finish_reason"}.items():
        names[name] = np.array([getattr(s, field) for s in SAMPLES])
    names |= {
        "reward": reward,
        "advantage": advantage,
        "prompt_tokens": np.array([len(s.sequence.prompt_ids) for s in SAMPLES]),
    }
    names["outcome"] = np.array([s.grade.outcome for s in SAMPLES])
    names["unshaped_reward"] = np.array([s.grade.unshaped_reward for s in SAMPLES])
    for name, reduce in ("min", np.min), ("max", np.max):
        names[f"{name}_G"] = lambda x, reduce=reduce: np.array([reduce(x[groups == g]) for g in np.unique(groups)])
    names["baseline"] = np.array([reward[(groups == g) & (np.arange(6) != i)].mean() for i, g in enumerate(groups)])
    tensors = torch.tensor(reward), torch.tensor(groups), torch.tensor(advantage)
    return names, sample_metrics(SAMPLES, SAMPLES) | advantage_metrics(*tensors, GRPOConfig())


def values_of(formula, names):
    """Of several keys in one row, each formula is its key's."""
    return float(eval(formula, {"__builtins__": {}}, FUNCTIONS | names))


def test_formulas_of_the_loss_and_of_samples(one_rank):
    names, code = map(lambda both: both[0] | both[1], zip(of_tokens(), of_samples(), strict=True))
    texts = {key.removeprefix("train/"): text for key, text in formulas().items() if key.startswith("train/")}
    assert len(texts) >= 45
    names["kl_penalty"] = code["kl_penalty"]  # the loss's formula names it
    for key, text in texts.items():
        assert values_of(text, names) == pytest.approx(code[key], rel=1e-6, abs=1e-9), (key, text)
    distinct = {key for key in texts if not math.isclose(code[key], round(code[key]), abs_tol=1e-9)}
    assert len(distinct) >= 25, "numbers that any formula has by chance show nothing"


def test_formulas_of_validation():
    code = summarize(VALIDATED)
    samples = [sample for group in VALIDATED for sample in group]
    names = {"n": 4, "c": np.array([2, 3]), "comb": np.vectorize(math.comb)}
    names["outcome"] = np.array([s.grade.outcome for s in samples])
    names["reward"] = np.array([s.grade.reward for s in samples])
    names["gen_tokens"] = np.array([s.num_gen_tokens for s in samples])
    names["finish_reason"] = np.array([s.finish_reason for s in samples])
    texts = {key: text for key, text in formulas().items() if key.startswith("validation/")}
    assert len(texts) == 6
    for key, text in texts.items():
        for k in (1, 2, 4) if "<k>" in key else (0,):
            name = key.removeprefix("validation/<mode>/").replace("<k>", str(k))
            assert values_of(text, names | {"k": k}) == pytest.approx(code[name]), (key, text)


@pytest.mark.slow
def test_formulas_of_rates(records):
    """Of the run's own numbers: of one rank."""
    texts = {key: text for key, text in formulas().items() if key.startswith(("performance/", "timing/"))}
    assert len(texts) >= 10
    steps = [record for record in records if "train/loss" in record]
    for record in steps:
        names = {key.rpartition("/")[2]: value for key, value in record.items()} | {"num_gpus": 1}
        for key, text in texts.items():
            assert values_of(text, names) == pytest.approx(record[key], rel=1e-9), (key, text)
