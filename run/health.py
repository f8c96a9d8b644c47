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
OUTCOME_METRICS = ("accuracy", *(f"outcome/{name}" for name in OUTCOMES[1:]))
READ = (  # the metrics that the rules read
    "reward",
    *OUTCOME_METRICS,
    "truncation_rate",
    "zero_variance_fraction",
    "advantages/min",
    "advantages/max",
    "advantage_abs_max",
    "gradient/largest_group_share",
    "gradient/num_groups",
    "logp_gap_mean",
    "ratio_clip_low_fraction",
    "ratio_clip_high_fraction",
    "entropy",
    "grad_norm",
    "lr",
)


def logp_gap_grows(steps: Steps) -> str:
    """Sampler and trainer diverge: 0.02 nats are 2% of a token's probability, where NeMo RL's healthy range ends
    (token_mult_prob_error, docs/guides/grpo.md). bfloat16 may start there."""
    first = mean(steps[:RECENT], "logp_gap_mean")
    now = mean(steps[-RECENT:], "logp_gap_mean")
    if now > max(0.02, 3 * first):
        return f"logp gap {now:.1e}, at first {first:.1e}"
    return ""


def gradient_explodes(steps: Steps) -> str:
    """The gradient is 30 times as long as at first (with LoRA it grows sixfold here, because the second factor starts
    at 0), and longer than 1, the default of policy.max_grad_norm. NaN counts as infinite."""
    first = column(steps[: START + RECENT], "grad_norm")[:-RECENT]
    first = [norm for norm in first if 0 < norm < math.inf]
    if len(first) < FEW:
        return ""
    before = np.median(first)
    recent = column(steps[-RECENT:], "grad_norm")
    now = np.median(np.nan_to_num(recent, nan=math.inf, posinf=math.inf))
    if now > max(1, 30 * before):
        return f"gradient norm {now:.3g}, at first {before:.3g}"
    return ""


def one_group(steps: Steps) -> str:
    """One group makes most of the step's gradient, where an equal share is an eighth or less: its advantages are
    hundreds of times the others', as those of nearly equal peers are (NVIDIA-NeMo/RL#1518), or its replies so long."""
    share = mean(steps[-1:], "gradient/largest_group_share")
    num_groups = mean(steps[-1:], "gradient/num_groups")
    largest = mean(steps[-1:], "advantage_abs_max")
    if num_groups >= 8 and share > 0.5:
        cause = f"the largest advantage is {largest:.3g}"
        return f"{share:.0%} of the gradient is from one of {num_groups:.0f} groups; {cause}"
    return ""


def many_clipped(steps: Steps) -> str:
    """GSPO trains well with 15% of its tokens clipped, GRPO with 0.13% (Zheng et al. 2025, section 5.2)."""
    low = mean(steps[-RECENT:], "ratio_clip_low_fraction")
    high = mean(steps[-RECENT:], "ratio_clip_high_fraction")
    share = low + high
    if len(steps) >= RECENT and share > 0.2:
        return f"{share:.0%} of the tokens are clipped"
    return ""


def reward_fell(steps: Steps) -> str:
    """The reward fell by half, and by more than five standard errors over ten steps. Three steps are enough if rewards
    no longer differ in any group, and differed in four of ten: by chance 0.6^24 with 8 prompts a step."""
    is_flat = len(steps) > FEW and all(map(has_no_signal, steps[-FEW:]))
    if is_flat:
        return _fell_flat(steps)
    if len(steps) < 2 * START:
        return ""
    first = column(steps[:START], "reward")
    recent = column(steps[-START:], "reward")
    fall = np.mean(first) - np.mean(recent)
    standard_error = math.sqrt((np.var(recent) + np.var(first)) / START)
    if fall > max(abs(np.mean(first)) / 2, 5 * standard_error):
        return _fall_of(steps, np.mean(first), np.mean(recent))
    return ""


def _fell_flat(steps: Steps) -> str:
    """`reward_fell`, where the newest steps have no signal: compared with the first 1, 2, ... steps."""
    now = mean(steps[-FEW:], "reward")
    for num_first in range(1, min(START, len(steps) - FEW) + 1):
        first = mean(steps[:num_first], "reward")
        had_signal = mean(steps[:num_first], "zero_variance_fraction") <= 0.6
        if had_signal and first - now > abs(first) / 2:
            return _fall_of(steps, first, now)
    return ""


def _fall_of(steps: Steps, first: float, now: float) -> str:
    highest = max(column(steps, "lr"))
    cause = f"nearly always because the learning rate is too high, here train/lr {highest:.3g}"
    return f"reward {now:.3f}, at first {first:.3f}: {cause}"


def truncated(steps: Steps) -> str:
    """Nearly all answers are cut, so the policy never sees an end."""
    share = np.min(column(steps[-FEW:], "truncation_rate"))
    if len(steps) >= FEW and share >= MOST:
        return f"{share:.0%} of the replies are cut off by the length limit"
    return ""


def parse_fail(steps: Steps) -> str:
    """Nearly all answers cannot be parsed, and not because they are cut."""
    share = np.min(column(steps[-FEW:], "outcome/parse_fail"))
    if len(steps) >= FEW and share >= MOST and not truncated(steps):
        return f"{share:.0%} of the replies have no answer that can be found; read samples.jsonl"
    return ""


def entropy_gone(steps: Steps) -> str:
    """Reward is bought with entropy (Cui et al. 2025, arXiv 2505.22617). If most answers are right, it is well spent:
    healthy runs here end at 0.001 to 0.03 nats, and have 0.018 or more before."""
    now = mean(steps[-RECENT:], "entropy")
    accuracy = mean(steps[-RECENT:], "accuracy")
    if len(steps) >= RECENT and now < 0.005 and accuracy < MOST:
        same = f"all samples of a prompt are identical, and only {accuracy:.0%} of the answers are right"
        return f"entropy {now:.4f} nats: {same}"
    return ""


def no_gradient(steps: Steps) -> str:
    """No reward differs within its group, step after step, and the task is not solved."""
    recent = steps[-RECENT:]
    is_flat = len(steps) >= RECENT and all(map(has_no_signal, recent))
    if not is_flat or solved(steps):
        return ""
    shares = []
    for name in OUTCOME_METRICS:
        shares.append(f"{name.removeprefix('outcome/')} {mean(recent, name):.0%}")
    return f"{RECENT} steps without a gradient: no group's rewards differ ({', '.join(shares)}); read samples.jsonl"


def few_groups(steps: Steps) -> str:
    """Over 30 steps hardly a group has two different rewards, and the task is not solved: most rollouts train nothing.
    SmolLM2 learns with 78% of equal groups."""
    share = mean(steps[-LONG:], "zero_variance_fraction")
    accuracy = mean(steps[-LONG:], "accuracy")
    if len(steps) >= LONG and share > 0.85 and accuracy < MOST:
        return f"over {LONG} steps, {share:.0%} of the groups had equal rewards; such groups train nothing"
    return ""


# If several start to hold at one step, the first is nearest to the cause.
RULES = (
    logp_gap_grows,
    one_group,
    gradient_explodes,
    many_clipped,
    reward_fell,
    truncated,
    parse_fail,
    entropy_gone,
    no_gradient,
    few_groups,
)


def column(steps: Steps, name: str) -> list[float]:
    return [step.get(name, math.nan) for step in steps]


def mean(steps: Steps, name: str) -> float:
    return float(np.mean(column(steps, name)))


def has_no_signal(step: dict[str, float]) -> bool:
    """All advantages are 0. grad_norm would not show it: it is the norm of the last minibatch, with the KL."""
    return step.get("advantages/min") == step.get("advantages/max") == 0


def solved(steps: Steps) -> str:
    """Nearly all answers are right, and were not always: a reward that never differed is no success."""
    recent = steps[-RECENT:]
    is_over = all(map(has_no_signal, recent)) and mean(recent, "accuracy") >= MOST
    had_signal = not all(map(has_no_signal, steps))
    if is_over and had_signal:
        return "nearly all answers are right: nothing is left to learn"
    return ""


class Health:
    """The rules over a run. records: the lines of its metrics.jsonl, so that a resumed run goes on as the unbroken."""

    def __init__(self, records: Iterable[dict] = ()):
        self.steps: list[dict[str, float]] = []
        self.held: dict[str, list[int]] = {}  # rule, or `solved` -> steps
        for record in records:
            if "train/reward" in record:
                train = {name.removeprefix("train/"): value for name, value in record.items()}
                self.add(record["step"], train)

    def add(self, step: int, train: dict[str, float]) -> tuple[dict[str, float], list[str]]:
        """Takes a step; returns `health/<rule>` (1.0 if it holds, else 0.0) and a line for each that starts to hold."""
        self.steps.append({name: train[name] for name in READ if name in train})
        values = {}
        lines = []
        for rule in (*RULES, solved):
            with np.errstate(all="ignore"):
                problem = rule(self.steps)
            if rule is not solved:
                values[f"health/{rule.__name__}"] = 1.0 if problem else 0.0
            if problem and self._holds_anew(rule.__name__, step):
                lines.append(self._line(rule.__name__, problem))
        return values, lines

    def _holds_anew(self, name: str, step: int) -> bool:
        """Notes that a rule holds at `step`. Whether it did not in the steps before."""
        held = self.held.setdefault(name, [])
        is_new = not held or step > held[-1] + START
        held.append(step)
        return is_new

    def _line(self, name: str, problem: str) -> str:
        line = f"health: {name}: {problem} (docs/faq.md#{name})"
        if "reward_fell" in self.held and name not in ("reward_fell", "solved"):
            line += " (after reward_fell: read that first)"
        return line

    def summary(self) -> str:
        """The line of the table at the end of a run."""
        spans = [f"{name} ({len(held)} of steps {held[0]}-{held[-1]})" for name, held in self.held.items()]
        something_is_wrong = len(self.held.keys() - {"solved"}) > 0
        if something_is_wrong:
            return ", ".join(spans) + ": see docs/faq.md"
        if len(self.steps) < RECENT:
            verdict = f"too few steps to tell ({len(self.steps)}; it takes {RECENT})"
        else:
            verdict = "nothing wrong seen"
        return ", ".join([verdict, *spans])
