"""The second promise of README: sampler and trainer are compared at every step.

A sampled token has two log-probabilities: the engine's, from when it drew the token, and the trainer's. With the same
weights they differ by rounding only. A larger gap means that one of the two computes another policy: weights that the
sync missed, a stale cache, another temperature or vocabulary, a wrong kernel. Training on such tokens looks healthy.
In examples/naive.py this is `old_logp_R=None,  # the weights that sampled are the weights that train: the ratio is 1`.

The gap of a step is measured with the weights at its start, the newest. Without grpo.async_grpo, these weights drew all
tokens of the step (`check_versions`). With it, some tokens are older, and only those of the newest weights are
measured (`newest_tokens`). With old_logprobs=sampler, a later optimizer step of a rollout reports the gap of the first.

The gap is measured

    while training         `gap_of_pack`: old_logp_R, or the first forward of the step, has these weights
    before training        `StepGap.before_training`: with async_grpo, if there are old_logp_R
    on a fixed prompt      `check_canary`, after the first sync and every grpo.canary_period steps
    of a sequence          `mask_disagreements`, with grpo.seq_logprob_error_threshold: it is then not trained

Above grpo.logp_gap_limit, `judge_step` discards the update. It stops the run after more than grpo.max_bad_steps in a
row, by default at once. docs/faq.md#logp_gap_grows tells what to do.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from attention import PackLayout
from base.system.exits import StopRun
from config import Config, GRPOConfig
from head import DEVIATION, HeadOptions, one_pass_problem, response_logps
from loss import Max, Metrics, Sequences, extremes
from metrics import Numbers, reduce_over_ranks, total_of
from model import Decoder
from pack import MicroBatch
from records import Completion, Engine, Sample, SamplingOptions

CANARY_PROMPT_TOKENS = 160  # more than a block of the prefix cache, where the model's length allows it
CANARY_NEW_TOKENS = 32
LIKELY_CAUSES = (
    "likely causes: the engine holds old weights (the sync was skipped, or does not reach a parameter, such as a tied "
    "head), a stale prefix cache, another temperature or vocabulary on one side, or a wrong attention kernel"
)


def check_versions(samples: Sequence[Sample], version: int, grpo: GRPOConfig) -> None:
    """Raises StopRun if a token was not drawn from the newest weights, `version`, or from those of one of the max_age
    steps before them."""
    oldest = min(sample.oldest_version for sample in samples)
    newest = max(sample.newest_version for sample in samples)
    oldest_allowed = version - grpo.async_grpo.max_age
    if oldest < oldest_allowed or newest > version:
        raise StopRun(
            f"samples are of weight versions {oldest} to {newest}; the oldest allowed is {oldest_allowed}, the trainer "
            f"is at {version}: a sync is missing"
        )


@dataclass(slots=True)
class StepGap:
    """The gap of a step with one or more optimizer steps: what each of these is judged by, and what is reported. A gap
    is |sampler - trainer|, in nats, over tokens of all ranks: {logp_gap_mean, logp_gap_max}.

    of_all: the gap of the weights at the start of the step, if it was measured before training; {} where each optimizer
    step measures its own. first_is_for_all (old_logprobs=sampler): the first one is then that of all, because the next
    would compare with weights that have moved."""

    of_all: Numbers
    first_is_for_all: bool

    @classmethod
    def before_training(cls, micros: Sequence[MicroBatch], version: int, cfg: Config) -> "StepGap":
        """With async_grpo, measured on the tokens of the newest weights, from log-probabilities at the start of the
        step (old_logp_R); 0 if there are no such tokens. Without it, or without old_logp_R, training measures. A
        collective."""
        of_all: Numbers = {}
        if cfg.grpo.async_grpo.max_age and micros[0].old_logp_R is not None:
            sums = total_of(gap_of_pack(micro, micro.old_logp_R, version, cfg.grpo) for micro in micros)
            of_all = reduce_over_ranks(sums)
        return cls(of_all, first_is_for_all=cfg.loss_fn.old_logprobs == "sampler")

    def of_optimizer_step(self, numbers: Numbers) -> Numbers:
        """The gap of the next optimizer step, among its reduced metrics."""
        if self.of_all:
            return self.of_all
        gap = {name: numbers[name] for name in ("logp_gap_mean", "logp_gap_max")}
        if self.first_is_for_all:
            self.of_all = gap
        return gap


def newest_tokens(micro: MicroBatch, version: int, grpo: GRPOConfig) -> Tensor | None:
    """[R], bool: where the gap is measured, at the tokens drawn from the newest weights, `version`. At older tokens the
    gap would include the training since. None without async_grpo: all tokens are new."""
    if not grpo.async_grpo.max_age:
        return None
    newest_R = micro.version_R == version
    if not grpo.async_grpo.recompute_kv_cache_after_weight_updates:
        # A reply that older weights began keeps their keys in the cache: no single weights compute its logps. Its whole
        # sequence is left out, with later replies, too, which compute all keys with weights of their own.
        is_old_R = ~newest_R
        num_old = torch.zeros_like(micro.adv_R).index_add(0, micro.seq_R, is_old_R.float())  # by number of the sequence
        newest_R = newest_R & (num_old[micro.seq_R] == 0)
    return newest_R


def gap_of_pack(micro: MicroBatch, logp_R: Tensor, version: int, grpo: GRPOConfig) -> Metrics:
    """The pack's part of the gap, by the reduction rule of loss.py. logp_R: from the forward that trains. If the pack
    has old_logp_R, these are compared instead, because the weights may have moved since. A token that top_p or top_k
    cut at the start of the step or in this forward, whose log-probability is -inf, is not measured."""
    logp_at_start_R = logp_R if micro.old_logp_R is None else micro.old_logp_R
    is_kept_R = (logp_at_start_R != -torch.inf) & (logp_R != -torch.inf)
    measured_R = micro.mask_R & micro.sampler_logp_R.isfinite() & is_kept_R
    newest_R = newest_tokens(micro, version, grpo)
    if newest_R is not None:
        measured_R = measured_R & newest_R
    # Where nothing is measured, as in a minibatch of filtered samples, the mean is 0: `judge_step` would refuse a NaN.
    count = measured_R.sum() + 1e-9
    gap_R = torch.where(measured_R, micro.sampler_logp_R - logp_at_start_R, 0.0).abs()
    largest = torch.cat([gap_R, gap_R.new_zeros(1)]).amax()
    return {"logp_gap_mean": (gap_R.sum(), count), "logp_gap_max": Max(largest)}


def mask_disagreements(micros: Sequence[MicroBatch], threshold: float) -> Numbers:
    """Removes from mask_R the sequences on which sampler and trainer disagree by more than the threshold. Returns the
    metrics of the mask. A collective."""
    parts = []
    for micro in micros:
        micro.mask_R, metrics = seq_logp_error_mask(micro, threshold)
        parts.append(metrics)
    return reduce_over_ranks(total_of(parts))


def seq_logp_error_mask(micro: MicroBatch, threshold: float) -> tuple[Tensor, Metrics]:
    """The pack's mask_R without the sequences whose mean of exp(|sampler - old|) exceeds the threshold, and metrics
    (NeMo RL).

    It is applied before the tokens and sequences of a step are counted, so it shrinks the counts, as in NeMo RL. A mask
    of importance weights does not. The mean skips tokens whose sampler logp is not finite, or that the filter cut
    (old_logp_R is -inf).
    """
    mask_R = micro.mask_R
    valid_R = mask_R & micro.sampler_logp_R.isfinite() & (micro.old_logp_R != -torch.inf)
    gap_R = torch.where(valid_R, micro.sampler_logp_R - micro.old_logp_R, 0.0).abs()
    seqs = Sequences(micro.seq_R, mask_R, gap_R.dtype)
    num_valid_R = seqs.sum_for_each_token(valid_R.to(gap_R.dtype)).clamp(min=1)
    error_R = seqs.sum_for_each_token(torch.where(valid_R, gap_R.exp(), 0.0)) / num_valid_R
    kept_R = mask_R & (error_R <= threshold)
    metrics: Metrics = {}
    for name, counted_R in (("seq_mult_prob_error", mask_R), ("seq_mult_prob_error_after_mask", kept_R)):
        one_R = counted_R.to(gap_R.dtype)
        metrics[f"mean_{name}"] = (seqs.sum_over_sequences(error_R * one_R), seqs.sum_over_sequences(one_R))
        metrics[f"min_{name}"], metrics[f"max_{name}"] = extremes(error_R, counted_R)
    lost_R = (mask_R & ~kept_R).to(gap_R.dtype)
    num_lost = seqs.sum_over_sequences(lost_R)
    metrics["num_masked_seqs_by_logprob_error"] = num_lost
    metrics["kept_fraction/seq_logprob_error"] = (kept_R.sum(), mask_R.sum())
    is_correct_R = micro.reward_R == 1  # the shaped reward: with shaping, few are exactly 1
    num_lost_correct = seqs.sum_over_sequences(lost_R * is_correct_R)
    metrics["masked_correct_pct"] = (num_lost_correct, num_lost)
    return kept_R, metrics


def gap_problem(gap: Numbers, num_nonfinite: float, limit: float | None) -> str | None:
    """What is wrong with the gap of an optimizer step, if anything. num_nonfinite: trained tokens whose sampler
    log-probability is not finite. limit: grpo.logp_gap_limit; with None, no gap is a problem."""
    if limit is None:
        return None
    is_within = gap["logp_gap_mean"] <= limit  # NaN is not
    if is_within and not num_nonfinite:
        return None
    return (
        f"sampler and trainer disagree by {gap['logp_gap_mean']:.4f} nats per token on average (max "
        f"{gap['logp_gap_max']:.4f}; {num_nonfinite:.0f} non-finite sampler logps; grpo.logp_gap_limit={limit}); "
        f"{LIKELY_CAUSES}"
    )


def judge_step(
    metrics: Numbers, gap: StepGap, grad_norm: float, num_bad_steps: int, cfg: GRPOConfig, step: int
) -> tuple[bool, int]:
    """(whether to apply an optimizer step, the number of bad steps in a row, with this one); num_bad_steps: before it.

    A step is bad if its loss or gradient norm is not finite. With logp_gap_limit, it is also bad if the gap is larger,
    or a sampler logp is not finite. Raises StopRun at more than max_bad_steps in a row, and on a `DEVIATION`.
    `metrics`, `gap` and `grad_norm` cover all ranks, so all ranks take the same branch.
    """
    problem = one_pass_problem(metrics[DEVIATION])
    if problem:
        raise StopRun(f"step {step}: {problem}. The step was not applied")
    problems = []
    if not (math.isfinite(metrics["loss"]) and math.isfinite(grad_norm)):
        problems.append(f"loss {metrics['loss']} and gradient norm {grad_norm} must both be finite")
    own_gap = gap.of_optimizer_step(metrics)
    disagreement = gap_problem(own_gap, metrics["num_nonfinite_sampler_logp"], cfg.logp_gap_limit)
    if disagreement:
        problems.append(disagreement)
    if not problems:
        return True, 0
    if num_bad_steps + 1 > cfg.max_bad_steps:
        raise StopRun(
            f"step {step}: {'; '.join(problems)}. Bad steps in a row: {num_bad_steps + 1} (grpo.max_bad_steps="
            f"{cfg.max_bad_steps}). The step was not applied; the weights are those before the first bad one"
        )
    return False, num_bad_steps + 1


def check_canary(
    model: Decoder, head_options: HeadOptions, engine: Engine, limit: float | None, device: torch.device, when: str
) -> float:
    """The mean gap, in nats per token, on a fixed prompt. This rank's engine continues it; in a split job, every engine
    does. A collective, with a forward without gradients for each of these engines. Raises StopRun above `limit`
    (grpo.logp_gap_limit).

    It finds stale weights, a stale cache or another compute path before a rollout is drawn from them: where there is
    room, the prompt is longer than a block of the prefix cache. Nothing is filtered: with top_k=1 the one token that is
    kept has logp 0 on both sides."""
    total = engine.max_total_tokens
    num_new = min(CANARY_NEW_TOKENS, max(1, total // 2))
    num_prompt = min(CANARY_PROMPT_TOKENS, total - num_new)
    prompt = np.random.Generator(np.random.PCG64(0)).integers(0, engine.vocab_size, num_prompt).tolist()
    sum_and_count = torch.zeros(2, dtype=torch.float64)
    sampling = SamplingOptions(head_options.temperature, num_new)
    for reply in engine.generate([prompt], [0], sampling, may_stop=False):
        logp_R = _score(model, head_options.unfiltered, prompt, reply, device)
        gap_R = (logp_R.cpu().double() - torch.from_numpy(reply.tokens["logp"])).abs()
        sum_and_count += torch.tensor([gap_R.sum(), len(gap_R)], dtype=torch.float64)
    dist.all_reduce(sum_and_count)
    gap = float(sum_and_count[0] / sum_and_count[1])
    if limit is not None and not gap <= limit:  # NaN is over the limit
        raise StopRun(
            f"{when}: on a fixed prompt, sampler and trainer disagree by {gap:.4f} nats per token (grpo.logp_gap_limit="
            f"{limit}); {LIKELY_CAUSES}"
        )
    return gap


@torch.no_grad()
def _score(
    model: Decoder, head_options: HeadOptions, prompt: list[int], reply: Completion, device: torch.device
) -> Tensor:
    """The trainer's log-probability of each id of the reply."""
    ids = torch.tensor([*prompt, *reply.ids], device=device)
    token_T, target_R = ids[:-1], ids[len(prompt) :]
    position_T = torch.arange(len(token_T), device=device)
    pos_R = position_T[len(prompt) - 1 :]
    layout = PackLayout.of(np.array([0, len(token_T)]), None, len(token_T), device)
    if reply.experts_TLA is not None:
        experts_TLA = np.full((len(token_T), *reply.experts_TLA.shape[1:]), -1, np.int16)  # -1: vLLM told none
        experts_TLA[: len(reply.experts_TLA)] = reply.experts_TLA
        layout = replace(layout, experts_TLA=experts_TLA)
    logp_R, _ = response_logps(model, (token_T, position_T, layout, pos_R), target_R, head_options)
    return logp_R
