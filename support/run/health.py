"""Says when a run does not learn: rules over the metrics of its steps, which do not affect training. No torch.

A rule gets the steps so far (each: metric -> value, without `train/`) and returns what is wrong, or "". NaN fires no
rule. A threshold names its source, or was set by runs of this repository: tests/run/health has what real sick runs
fire, and how far healthy runs stay from firing. docs/faq.md says what to do.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from envs import OUTCOMES

Steps = Sequence[dict[str, float]]
START = 10  # the first steps, with which later ones are compared
RECENT = 5  # steps: enough to smooth the noise
LONG = 30  # steps: long enough to have waited
FEW = 3  # steps: enough for what holds for nearly all answers
MOST = 0.9  # "nearly all"
GAP, CLIPPED = "logp_gap_mean", ("ratio_clip_low_fraction", "ratio_clip_high_fraction")
OUTCOME = ("accuracy", *(f"outcome/{name}" for name in OUTCOMES[1:]))
OTHERS = ("reward", "zero_variance_fraction", "advantages/min", "advantages/max", "truncation_rate")
SHARES = ("gradient/largest_group_share", "gradient/num_groups", "advantage_abs_max")
READ = (GAP, *CLIPPED, *OUTCOME, *OTHERS, *SHARES, "entropy", "grad_norm")


def logp_gap_grows(steps: Steps) -> str:
    """Sampler and trainer diverge: 0.02 nats are 2% of a token's probability, where NeMo RL's healthy range ends
    (token_mult_prob_error, docs/guides/grpo.md). bfloat16 may start there."""
    first, now = mean(steps[:RECENT], GAP), mean(steps[-RECENT:], GAP)
    return f"logp gap {now:.1e}, at first {first:.1e}" if now > max(0.02, 3 * first) else ""


def gradient_explodes(steps: Steps) -> str:
    """The gradient is 30 times as long as at first (with LoRA it grows sixfold here, because the second factor starts
    at 0), and longer than 1, the default of policy.max_grad_norm. NaN counts as infinite."""
    first = [norm for norm in column(steps[: START + RECENT], "grad_norm")[:-RECENT] if 0 < norm < math.inf]
    before = np.median(first) if len(first) >= FEW else math.inf
    now = np.median(np.nan_to_num(column(steps[-RECENT:], "grad_norm"), nan=math.inf, posinf=math.inf))
    return f"gradient norm {now:.3g}, at first {before:.3g}" if now > max(1, 30 * before) else ""


def one_group(steps: Steps) -> str:
    """One group makes most of the step's gradient, where an equal share is an eighth or less: its advantages are
    hundreds of times the others', as those of nearly equal peers are (NVIDIA-NeMo/RL#1518), or its replies so long."""
    share, num_groups, largest = (mean(steps[-1:], name) for name in SHARES)
    said = f"{share:.0%} of the gradient is from one of {num_groups:.0f} groups; the largest advantage is {largest:.3g}"
    return said if num_groups >= 8 and share > 0.5 else ""


def many_clipped(steps: Steps) -> str:
    """GSPO trains well with 15% of its tokens clipped, GRPO with 0.13% (Zheng et al. 2025, section 5.2)."""
    share = sum(mean(steps[-RECENT:], name) for name in CLIPPED)
    return f"{share:.0%} of the tokens are clipped" if len(steps) >= RECENT and share > 0.2 else ""


def reward_fell(steps: Steps) -> str:
    """The reward fell by half, and by more than five standard errors over ten steps. Three steps are enough if rewards
    no longer differ in any group, and differed in four of ten: by chance 0.6^24 with 8 prompts a step."""
    is_flat = len(steps) > FEW and all(map(has_no_signal, steps[-FEW:]))
    width = FEW if is_flat else START
    now, noise = (f(column(steps[-width:], "reward")) for f in (np.mean, np.var))
    for k in range(1 if is_flat else START, min(START, len(steps) - width) + 1):
        first, first_noise = (f(column(steps[:k], "reward")) for f in (np.mean, np.var))
        least = abs(first) / 2 if is_flat else max(abs(first) / 2, 5 * math.sqrt((noise + first_noise) / START))
        if first - now > least and (mean(steps[:k], "zero_variance_fraction") <= 0.6 or not is_flat):
            cause = f"nearly always because the learning rate is too high, here train/lr {max(column(steps, 'lr')):.3g}"
            return f"reward {now:.3f}, at first {first:.3f}: {cause}"
    return ""


def truncated(steps: Steps) -> str:
    """Nearly all answers are cut, so the policy never sees an end."""
    share = np.min(column(steps[-FEW:], "truncation_rate"))
    return f"{share:.0%} of the replies are cut off by the length limit" if len(steps) >= FEW and share >= MOST else ""


def parse_fail(steps: Steps) -> str:
    """Nearly all answers cannot be parsed, and not because they are cut."""
    share = np.min(column(steps[-FEW:], "outcome/parse_fail"))
    holds = len(steps) >= FEW and share >= MOST and not truncated(steps)
    return f"{share:.0%} of the replies have no answer that can be found; read samples.jsonl" if holds else ""


def entropy_gone(steps: Steps) -> str:
    """Reward is bought with entropy (Cui et al. 2025, arXiv 2505.22617). If most answers are right, it is well spent:
    healthy runs here end at 0.001 to 0.03 nats, and have 0.018 or more before."""
    now, accuracy = (mean(steps[-RECENT:], name) for name in ("entropy", "accuracy"))
    holds = len(steps) >= RECENT and now < 0.005 and accuracy < MOST
    same = f"all samples of a prompt are identical, and only {accuracy:.0%} of the answers are right"
    return f"entropy {now:.4f} nats: {same}" if holds else ""


def no_gradient(steps: Steps) -> str:
    """No reward differs within its group, step after step, and the task is not solved."""
    if len(steps) < RECENT or not all(map(has_no_signal, steps[-RECENT:])) or solved(steps):
        return ""
    shares = (f"{name.removeprefix('outcome/')} {mean(steps[-RECENT:], name):.0%}" for name in OUTCOME)
    return f"{RECENT} steps without a gradient: no group's rewards differ ({', '.join(shares)}); read samples.jsonl"


def few_groups(steps: Steps) -> str:
    """Over 30 steps hardly a group has two different rewards, and the task is not solved: most rollouts train nothing.
    SmolLM2 learns with 78% of equal groups."""
    share = mean(steps[-LONG:], "zero_variance_fraction")
    holds = len(steps) >= LONG and share > 0.85 and mean(steps[-LONG:], "accuracy") < MOST
    return f"over {LONG} steps, {share:.0%} of the groups had equal rewards; such groups train nothing" if holds else ""


# If several start to hold at one step, the first is nearest to the cause.
RULES = [logp_gap_grows, one_group, gradient_explodes, many_clipped, reward_fell]
RULES += [truncated, parse_fail, entropy_gone, no_gradient, few_groups]


def column(steps: Steps, name: str) -> list[float]:
    return [step.get(name, math.nan) for step in steps]


def mean(steps: Steps, name: str) -> float:
    return float(np.mean(column(steps, name)))


def has_no_signal(step: dict[str, float]) -> bool:
    """All advantages are 0. grad_norm would not show it: it is the norm of the last minibatch, with the KL."""
    return step.get("advantages/min") == step.get("advantages/max") == 0


def solved(steps: Steps) -> str:
    """Nearly all answers are right, and were not always: a reward that never differed is no success."""
    is_over = all(map(has_no_signal, steps[-RECENT:])) and mean(steps[-RECENT:], "accuracy") >= MOST
    holds = is_over and not all(map(has_no_signal, steps))
    return "nearly all answers are right: nothing is left to learn" if holds else ""


class Health:
    """The rules over a run. records: the lines of its metrics.jsonl, so that a resumed run goes on as the unbroken."""

    def __init__(self, records: Iterable[dict] = ()):
        self.steps: list[dict[str, float]] = []
        self.held: dict[str, list[int]] = {}  # rule, or `solved` -> steps
        for record in records:
            if "train/reward" in record:
                self.add(record["step"], {name.removeprefix("train/"): value for name, value in record.items()})

    def add(self, step: int, train: dict[str, float]) -> tuple[dict[str, float], list[str]]:
        """Takes a step; returns `health/<rule>` (1.0 if it holds, else 0.0) and a line for each that starts to hold."""
        self.steps.append({name: train[name] for name in (*READ, "lr") if name in train})
        with np.errstate(all="ignore"):
            problems = {rule.__name__: rule(self.steps) for rule in [*RULES, solved]}
        lines = []
        for name, problem in problems.items():
            if problem:
                held = self.held.setdefault(name, [])
                if not held or step > held[-1] + START:
                    follows = "reward_fell" in self.held and name not in ("reward_fell", "solved")
                    after = " (after reward_fell: read that first)" if follows else ""
                    lines.append(f"health: {name}: {problem} (docs/faq.md#{name}){after}")
                held.append(step)
        return {f"health/{rule.__name__}": float(problems[rule.__name__] != "") for rule in RULES}, lines

    def summary(self) -> str:
        """The line of the table at the end of a run."""
        spans = [f"{name} ({len(held)} of steps {held[0]}-{held[-1]})" for name, held in self.held.items()]
        if self.held.keys() - {"solved"}:
            return ", ".join(spans) + ": see docs/faq.md"
        short = f"too few steps to tell ({len(self.steps)}; it takes {RECENT})"
        return ", ".join([short if len(self.steps) < RECENT else "nothing wrong seen", *spans])
