"""Checks the exercises of docs/exercises.md against numbers that are worked out here in the plainest way.

.venv/bin/python -m tests.exercises NAME        says "right", or what is missing or wrong; exit 0 or 1
.venv/bin/python -m tests.exercises             all of them, a line each
"""

import asyncio
import inspect
import json
import math
import os
import sqlite3
import sys
import tempfile
import threading
import traceback
from contextlib import closing, redirect_stdout
from dataclasses import fields, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor

import config
from config import ConfigError, LossConfig


class NotYet(Exception):
    """What is missing, or the number that is wrong."""


def expect(is_right: bool, otherwise: str) -> None:
    if not is_right:
        raise NotYet(otherwise)


def expect_close(found, expected, what: str, tolerance: float = 1e-9, case: str = "") -> None:
    """Numbers, or sequences of numbers, within the tolerance times the largest expected one. case ends the message: the
    numbers that they come from."""
    found_N = torch.as_tensor(found, dtype=torch.float64).flatten()
    right_ones = torch.as_tensor(expected, dtype=torch.float64).flatten()
    limit = tolerance * max(1.0, right_ones.abs().max().item())
    is_right = found_N.shape == right_ones.shape and bool(((found_N - right_ones).abs() <= limit).all())
    numbers = [[round(number, 6) for number in numbers_N.tolist()] for numbers_N in (found_N, right_ones)]
    expect(is_right, f"{what}: found {numbers[0]}, expected {numbers[1]}{case}")


def expect_key(section: type, name: str) -> None:
    names = [key.name for key in fields(section)]
    expect(name in names, f"config.py, {section.__name__}: there is no key {name}")


def expect_value(section: type, name: str, value: str) -> None:
    values = section.__annotations__[name].__args__
    expect(value in values, f'config.py, {section.__name__}: {name} has no value "{value}"')


RULES = "base/check/contradictions.yaml"


def said_of(*settings: str) -> list[str]:
    """What the rules refuse of the smoke run with these settings, words of a command."""
    from base.check.contradictions import contradictions
    from base.inputs.reader import load

    return list(contradictions(load(str(ROOT / "configs" / "smoke.yaml"), list(settings))))


def expect_refused(setting: str, ignored: str) -> None:
    """With the first setting nothing reads the key of the second, so a rule must name it."""
    key = ignored.partition("=")[0]
    is_named = any(f"{key}=" in problem for problem in said_of(setting, ignored))
    expect(is_named, f"{RULES}: with {setting}, nothing reads {key}; no rule refuses {ignored}")


def expect_accepted(setting: str, read: str) -> None:
    problems = said_of(setting, read)
    expect(problems == [], f"{RULES}: {setting} with {read} must be accepted: {'; '.join(problems)}")


# ------------------------------------------------------------------------------------------------------------- the loss

# Tokens of two packs, in nats. The last token of the first pack is not trained, and holds what would spoil a sum.
ADV = [[1.0, 1.0, -2.0, -2.0, 3.0], [0.5, 0.5, 0.5]]
OLD = [[-0.7, -1.2, -0.4, -2.0, -1.0], [-0.3, -0.9, -1.5]]
LOGP = [[-0.5, -1.6, -0.7, -1.4, math.nan], [-0.3, -0.2, -1.9]]
REFERENCE = [[-0.6, -1.1, -0.9, -1.3, -1.0], [-0.5, -0.4, -1.2]]
SEQUENCE = [[0, 1, 1, 1, 1], [0, 0, 1]]
IS_TRAINED = [[1, 1, 1, 1, 0], [1, 1, 1]]
SHARE = [[1.0, 1.0, 1.0, 1.0, 1.0], [2 / 3, 2 / 3, 1 / 3]]  # the second pack's two sequences are one sample
NUM_TOKENS, NUM_SAMPLES = 7, 3
TRAINED = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)]  # pack, token
OF_SAMPLE = [1, 3, 3, 3, 3, 3, 3]  # for each of them the trained tokens of its sample
NUMBERS = {"reference_policy_kl_penalty": 0.0}
ARGUMENTS = {
    "adv_R": ADV,
    "old_logp_R": OLD,
    "logp_R": LOGP,
    "ref_logp_R": REFERENCE,
    "mask_R": IS_TRAINED,
    "seq_R": SEQUENCE,
    "share_R": SHARE,
}


def packs(*names: str) -> str:
    """These arguments of both packs, a line each, so that the reader of a message can work out its number by hand."""
    text = f"\n  num_valid_tokens={NUM_TOKENS}, num_valid_seqs={NUM_SAMPLES} (samples)"
    for pack in range(2):
        for name in names:
            numbers = ", ".join(f"{number:.4g}" for number in ARGUMENTS[name][pack])
            text += f"\n  pack {pack + 1}, {name}: {numbers}"
    return text


def is_scalar(value) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def expect_form(name: str, value) -> None:
    """A metric is a tensor without dimensions, a Min or Max of one, or a pair of them."""
    from loss import Extreme

    if isinstance(value, tuple):
        is_pair = len(value) == 2 and is_scalar(value[0]) and is_scalar(value[1])
        expect(is_pair, f"{name}: sum and count must be tensors, without dimensions; found {value}")
    elif isinstance(value, Extreme):
        expect(is_scalar(value.value), f"{name}: its value must be a tensor without dimensions; found {value.value}")
    else:
        expect(is_scalar(value), f"{name}: needs a tensor without dimensions, or the pair (sum, count); found {value}")


def losses(cfg: LossConfig, **more) -> tuple[float, list[float], dict]:
    """The loss of the step, its slope in logp at each trained token, and the metrics' sums over the packs."""
    from loss import policy_loss
    from metrics import total_of

    total = 0.0
    slopes: list[float] = []
    parts = []
    for pack in range(2):
        logp_R = torch.tensor(LOGP[pack], dtype=torch.float64, requires_grad=True)
        old_logp_R = torch.tensor(OLD[pack], dtype=torch.float64)
        loss, metrics = policy_loss(
            logp_R,
            old_logp_R=old_logp_R,
            sampler_logp_R=old_logp_R,
            adv_R=torch.tensor(ADV[pack], dtype=torch.float64),
            mask_R=torch.tensor(IS_TRAINED[pack]),
            seq_R=torch.tensor(SEQUENCE[pack]),
            share_R=torch.tensor(SHARE[pack], dtype=torch.float64),
            num_valid_tokens=NUM_TOKENS,
            num_valid_seqs=NUM_SAMPLES,
            cfg=cfg,
            **{name: torch.tensor(of_packs[pack], dtype=torch.float64) for name, of_packs in more.items()},
        )
        (slope_R,) = torch.autograd.grad(loss, logp_R)
        total += loss.item()
        slopes += [slope_R[token].item() for place, token in TRAINED if place == pack]
        for name, value in metrics.items():
            expect_form(name, value)
        parts.append(metrics)
    return total, slopes, total_of(parts)


def per_token(of_packs: list[list[float]]) -> list[float]:
    return [of_packs[pack][token] for pack, token in TRAINED]


def log_ratios() -> list[float]:
    return [logp - old for logp, old in zip(per_token(LOGP), per_token(OLD), strict=True)]


def expect_metric(sums: dict, name: str, expected: float, file: str, case: str) -> None:
    expect(name in sums, f"{file}: policy_loss returns no metric {name}")
    pair = sums[name]
    expect(isinstance(pair, tuple), f"{name}: a mean over packs needs the pair (sum, count); see the top of loss.py")
    summed, count = pair
    expect_close(summed.item() / count.item(), expected, f"train/{name} over two packs", case=case)


def check_metric() -> None:
    from metrics import sample_metrics
    from records import Grade, Sample, TokenSequence

    _, _, sums = losses(LossConfig(**NUMBERS))
    case = packs("logp_R", "old_logp_R", "mask_R")
    above = sum(math.exp(log_ratio) > 1.1 for log_ratio in log_ratios())
    expect_metric(sums, "ratio_above_1.1_fraction", above / NUM_TOKENS, "loss.py, _token_metrics", case)
    samples = []
    for index, reward in enumerate((0.0, 1.0, 0.5, 1.0)):
        grade = Grade(reward=reward, outcome="ok", turn_rewards=[reward], unshaped_reward=reward)
        samples.append(Sample(0, index, 0, [TokenSequence([5])], grade, finish_reason="stop"))
    numbers = sample_metrics(samples, samples)
    expect("reward_std" in numbers, "metrics.py, sample_metrics: there is no reward_std")
    expect_close(numbers["reward_std"], math.sqrt(0.171875), "train/reward_std of the rewards 0, 1, 0.5, 1")


def check_reply_logp() -> None:
    _, _, sums = losses(LossConfig(**NUMBERS))
    expected = sum(per_token(LOGP)) / 4  # four sequences have a trained token
    case = packs("logp_R", "mask_R", "seq_R")
    expect_metric(sums, "reply_logp", expected, "loss.py, _token_metrics", case)


def check_loss_term() -> None:
    expect_key(LossConfig, "ratio_l2_coef")
    expect(LossConfig().ratio_l2_coef == 0, "ratio_l2_coef: the default must be 0, which trains as before")
    case = packs("logp_R", "old_logp_R", "mask_R", "seq_R", "share_R")
    for by_token in (True, False):
        cfg = LossConfig(**NUMBERS, token_level_loss=by_token)
        loss, slopes, _ = losses(cfg)
        more_loss, more_slopes, _ = losses(replace(cfg, ratio_l2_coef=0.3))
        expected, expected_slopes = 0.0, []
        for log_ratio, num_tokens in zip(log_ratios(), OF_SAMPLE, strict=True):
            weight = 0.3 / NUM_TOKENS if by_token else 0.3 / num_tokens / NUM_SAMPLES
            ratio = math.exp(log_ratio)
            expected += weight * (ratio - 1) ** 2
            expected_slopes.append(weight * 2 * (ratio - 1) * ratio)
        what = f"with token_level_loss={by_token}, what ratio_l2_coef=0.3 adds to"
        expect_close(more_loss - loss, expected, f"{what} the loss", case=case)
        added = [a - b for a, b in zip(more_slopes, slopes, strict=True)]
        expect_close(added, expected_slopes, f"{what} the slopes", case=case)
    expect_refused("loss_fn.disable_ppo_ratio=true", "loss_fn.ratio_l2_coef=0.1")
    expect_refused("loss_fn.force_on_policy_ratio=true", "loss_fn.ratio_l2_coef=0.1")
    expect_accepted("loss_fn.use_cispo=true", "loss_fn.ratio_l2_coef=0.1")


def check_topr() -> None:
    expect_value(LossConfig, "token_loss", "topr")
    loss, slopes, _ = losses(LossConfig(**NUMBERS, token_loss="topr"))
    case = packs("adv_R", "logp_R", "old_logp_R", "mask_R")
    expected, expected_slopes = 0.0, []
    for adv, logp, log_ratio in zip(per_token(ADV), per_token(LOGP), log_ratios(), strict=True):
        weight = 1.0
        if adv < 0:
            weight = min(1.0, math.exp(log_ratio))
        expected -= adv * weight * logp / NUM_TOKENS
        expected_slopes.append(-adv * weight / NUM_TOKENS)
    what = "the slope of the loss in each logp (the weight has no gradient)"
    expect_close(slopes, expected_slopes, what, case=case)
    expect_close(loss, expected, "the loss", case=case)
    for ignored in ("ratio_clip_min=0.1", "ratio_clip_max=0.1", "ratio_clip_c=3", "sapo_tau_positive=2"):
        expect_refused("loss_fn.token_loss=topr", f"loss_fn.{ignored}")
    for ignored in ("dppo_mask_low=0.1", "dppo_mask_high=0.1", "dppo_kl_tau=0.1"):
        expect_refused("loss_fn.token_loss=topr", f"loss_fn.{ignored}")


def check_kl_by_sample() -> None:
    expect_key(LossConfig, "kl_by_sample")
    expect(LossConfig().kl_by_sample is False, "kl_by_sample: the default must be false, which trains as before")
    case = packs("logp_R", "ref_logp_R", "mask_R", "seq_R", "share_R")
    for other in ({}, {"token_level_loss": False}, {"loss_scale_factor": 5.0}):
        cfg = LossConfig(reference_policy_kl_penalty=0.2, kl_by_sample=True, **other)
        loss, slopes, sums = losses(cfg, ref_logp_R=REFERENCE)
        plain_loss, plain_slopes, _ = losses(replace(cfg, **NUMBERS), ref_logp_R=REFERENCE)
        expected, expected_slopes = 0.0, []
        for logp, reference, num_tokens in zip(per_token(LOGP), per_token(REFERENCE), OF_SAMPLE, strict=True):
            d = logp - reference
            weight = 1 / num_tokens / NUM_SAMPLES
            expected += weight * (math.exp(-d) - 1 + d)
            expected_slopes.append(0.2 * weight * d)
        what = f"with kl_by_sample=true {other or ''}".strip()
        kl = sums["kl_penalty"]
        expect(not isinstance(kl, tuple), f"kl_penalty must be a sum that the packs add up to, not a pair; found {kl}")
        expect_close(kl.item(), expected, f"{what}, train/kl_penalty", case=case)
        expect_close(loss - plain_loss, 0.2 * expected, f"{what}, what the KL adds to the loss", case=case)
        added = [a - b for a, b in zip(slopes, plain_slopes, strict=True)]
        expect_close(added, expected_slopes, f"{what}, what the KL adds to the slopes", case=case)
    expect_refused("loss_fn.reference_policy_kl_penalty=0", "loss_fn.kl_by_sample=true")
    expect_accepted("loss_fn.reference_policy_kl_penalty=0.01", "loss_fn.kl_by_sample=true")


# ----------------------------------------------------------------------------------------------------------- advantages

REWARDS = [1.0, 0.0, 0.0, 0.0, 0.2, 0.9, 0.5, 0.3, 0.3, 0.7]
GROUPS = [0, 0, 0, 0, 1, 1, 1, 2, 2, 3]


def advantages(estimator: str, **keys) -> list[float]:
    """Of REWARDS in GROUPS, one of which has a single sample."""
    from advantages import estimate_advantages

    cfg = config.GRPOConfig(adv_estimator=config.AdvEstimatorConfig(name=estimator), **keys)
    lengths = torch.ones(len(GROUPS), dtype=torch.int64)
    try:
        adv_B = estimate_advantages(torch.tensor(REWARDS, dtype=torch.float64), torch.tensor(GROUPS), lengths, cfg, {})
    except AssertionError as error:
        raise NotYet(f"advantages.py: {error}") from error
    return adv_B.tolist()


def of_each_group(function) -> list[float]:
    """function(reward, rewards of its peers, rewards of its group), 0 in a group of one, for each reward."""
    result = []
    for place, group in enumerate(GROUPS):
        others = [REWARDS[i] for i, other in enumerate(GROUPS) if other == group and i != place]
        result.append(function(REWARDS[place], others, [*others, REWARDS[place]]) if others else 0.0)
    return result


OPTIONS = ("normalize_rewards=false", "use_leave_one_out_baseline=false", "reward_std=batch", "reward_std_floor=0.2")


def check_median() -> None:
    from statistics import median, stdev

    def normalized(reward: float, others: list[float], group: list[float]) -> float:
        """By the default keys: `grpo.reward_std=baseline`, and a floor of 0.05 of the range."""
        std = stdev(others) if len(others) > 1 else 0.0
        if std == 0:
            return reward - median(others)
        return (reward - median(others)) / (max(std, 0.05 * (max(group) - min(group))) + 1e-6)

    expect_value(config.AdvEstimatorConfig, "name", "median")
    plain = {"normalize_rewards": False}
    whole = advantages("median", use_leave_one_out_baseline=False, **plain)
    expect_close(
        whole, of_each_group(lambda r, _, all_of_them: r - median(all_of_them)), "reward - median of the group"
    )
    of_others = advantages("median", use_leave_one_out_baseline=True, **plain)
    expected = of_each_group(lambda r, others, _: r - median(others))
    expect_close(of_others, expected, "with use_leave_one_out_baseline=true, reward - median of the others")
    expected = of_each_group(normalized)
    expect_close(
        advantages("median"), expected, "with the default keys, divided by the standard deviation of the others"
    )
    mean = advantages("grpo", use_leave_one_out_baseline=False, **plain)
    expected = of_each_group(lambda r, _, group: r - sum(group) / len(group))
    expect_close(mean, expected, "grpo, which must be as before")
    for option in OPTIONS:
        expect_accepted("grpo.adv_estimator.name=median", f"grpo.{option}")


def check_pass_at_2() -> None:
    expect_value(config.AdvEstimatorConfig, "name", "pass_at_2")

    def advantage(reward: float, others: list[float], group: list[float]) -> float:
        with_it = sum(max(reward, other) for other in others) / len(others)
        pairs = [max(group[i], group[j]) for i in range(len(group)) for j in range(i)]
        return with_it - sum(pairs) / len(pairs)

    found = advantages("pass_at_2")
    expect_close(found[:4], [1 / 2, -1 / 6, -1 / 6, -1 / 6], "the advantages of the rewards 1, 0, 0, 0")
    expect_close(found, of_each_group(advantage), f"the advantages of the rewards {REWARDS} in groups {GROUPS}")
    for option in OPTIONS:
        expect_refused("grpo.adv_estimator.name=pass_at_2", f"grpo.{option}")


# ------------------------------------------------------------------------------------------------------------ naive.py


def by_hand_of_naive(naive, w: dict, model_config: dict, group, adv_G: Tensor, num_tokens: int) -> Tensor:
    """PPO's clipped loss, token by token; the sampler's log-probabilities are the old ones."""
    token_GT, old_GT, is_sampled_GT = group
    logp_GTV = naive.decode(w, model_config, token_GT).log_softmax(-1)
    total = torch.zeros(())
    for g, t in is_sampled_GT.nonzero().tolist():
        ratio = (logp_GTV[g, t - 1, token_GT[g, t]] - old_GT[g, t]).exp()
        total = total + torch.maximum(-adv_G[g] * ratio, -adv_G[g] * ratio.clamp(0.8, 1.2)) / num_tokens
    return total


def check_naive_epochs() -> None:
    from safetensors.torch import load_file

    from examples import naive

    expect(hasattr(naive, "EPOCHS"), "examples/naive.py: there is no EPOCHS")
    starter = ROOT / "examples" / "arithmetic" / "starter"
    model_config = json.loads((starter / "config.json").read_text())
    w = {name: x.float().requires_grad_() for name, x in load_file(starter / "model.safetensors").items()}
    group = naive.sample(w, model_config, [259, 21, 17, 10, 19, 21, 28, 257, 260], 4, torch.Generator().manual_seed(1))
    adv_G = torch.tensor([1.0, -0.5, 2.0, -1.5])
    num_tokens = int(group[2].sum())
    with torch.no_grad():
        for x in w.values():
            x.mul_(1.05)  # the weights of a second optimizer step
    params = list(w.values())
    found = torch.autograd.grad(naive.loss_of_group(w, model_config, group, adv_G, num_tokens, 4), params)
    expected = torch.autograd.grad(by_hand_of_naive(naive, w, model_config, group, adv_G, num_tokens), params)
    error = max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True))
    expect(error <= 1e-4, f"loss_of_group, at weights that have moved: its gradient differs from PPO's by {error:.1e}")

    counts = {"rollouts": 0, "steps": 0}
    sample, adamw_step = naive.sample, torch.optim.AdamW.step

    def counted_sample(*args):
        if args[-1] is not None:  # not one of the greedy ones
            counts["rollouts"] += 1
        return sample(*args)

    def counted_step(self, *args, **kwargs):
        counts["steps"] += 1
        return adamw_step(self, *args, **kwargs)

    with tempfile.TemporaryDirectory() as folder:
        os.symlink(starter, f"{folder}/starter")
        for name in ("train", "heldout"):
            rows = (starter.parent / f"{name}.jsonl").read_text().splitlines(keepends=True)
            Path(folder, f"{name}.jsonl").write_text("".join(rows[:4]))
        naive.TASK, naive.PROMPTS, naive.SAMPLES, naive.STEPS, naive.EPOCHS = Path(folder), 2, 4, 2, 3
        naive.sample, torch.optim.AdamW.step = counted_sample, counted_step
        try:
            with redirect_stdout(StringIO()):
                naive.train(1)
        finally:
            naive.sample, torch.optim.AdamW.step = sample, adamw_step
    expect(counts["rollouts"] == 4, f"2 steps of 2 prompts: {counts['rollouts']} groups were sampled, expected 4")
    expect(counts["steps"] == 6, f"2 steps with EPOCHS=3: {counts['steps']} optimizer steps, expected 6")


# ------------------------------------------------------------------------------------------------ tasks, agents, files


def check_environment() -> None:
    from envs import Turn

    try:
        from examples.envs.digits import Digits
    except ImportError as error:
        raise NotYet(f"from examples.envs.digits import Digits: {error}") from error
    cases = [
        ("85", "85", 1.0, "ok"),
        ("75", "85", 0.5, "wrong"),
        ("5", "85", 0.5, "wrong"),  # the last digit
        ("185", "85", 2 / 3, "wrong"),
        ("5", "105", 1 / 3, "wrong"),  # no digit is no zero
        ("10", "85", 0.0, "wrong"),
        ("about 85", "85", 0.0, "parse_fail"),
        ("", "85", 0.0, "parse_fail"),
    ]
    turns = []
    for reply, answer, _, _ in cases:
        turns.append(Turn(messages=[{"role": "assistant", "content": reply}], answer=answer, finish_reason="stop"))
    environment = Digits()
    results = environment.step([*turns, replace(turns[0], finish_reason="length")])
    for (reply, answer, reward, outcome), result in zip(cases, results, strict=False):
        found = f"reply {reply!r}, answer {answer!r}: found {result.reward:.4g}, {result.outcome}"
        is_right = abs(result.reward - reward) < 1e-9 and result.outcome == outcome
        expect(is_right, f"{found}; expected {reward:.4g}, {outcome}")
    expect(results[-1].reward == 0, "a reply that the length limit cut off must get 0: see Turn.whole_reply")
    try:
        environment.check_answers([("train.jsonl:1", "eight", {})])
    except ConfigError as error:
        expect("train.jsonl:1" in str(error), "the message of check_answers must name the row's place")
    else:
        raise NotYet("check_answers must raise ConfigError for the answer 'eight'")


class Endpoint(BaseHTTPRequestHandler):
    """POST /v1/chat/completions: the replies of the policy, by the last message."""

    asked: list[list[dict]]
    replies: dict[str, str]

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(request["messages"])
        reply = {"role": "assistant", "content": self.replies.get(request["messages"][-1]["content"], "?")}
        choice = {"index": 0, "message": reply, "finish_reason": "stop"}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


def check_nines() -> None:
    try:
        from examples.agents.nines import solve
    except ImportError as error:
        raise NotYet(f"from examples.agents.nines import solve: {error}") from error
    cases = [
        ("54+18=", "72", ["72"], {"reward": 1.0, "call_rewards": [1.0]}),
        ("54+18=", "72", ["62", "72"], {"reward": 1.0, "call_rewards": [0.0, 1.0]}),
        ("98+29=", "127", ["117", "117"], {"reward": 0.0, "call_rewards": [0.0, 0.0]}),
        ("26+24=", "50", ["fifty", "50"], {"reward": 1.0, "call_rewards": [0.0, 1.0]}),
        ("26+24=", "50", ["", "5"], {"reward": 0.0, "call_rewards": [0.0, 0.0]}),
        ("40+30=", "70", ["61"], {"reward": 0.0, "call_rewards": [0.0]}),  # wrong, but the tool does not see it
    ]
    server = HTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        for problem, answer, replies, expected in cases:
            a, b = problem.removesuffix("=").split("+")
            questions = [problem, f"{b}+{a}="][: len(replies)]
            Endpoint.asked, Endpoint.replies = [], dict(zip(questions, replies, strict=True))
            messages = [{"role": "user", "content": problem}]
            found = solve(base_url=f"http://127.0.0.1:{server.server_port}/v1", messages=messages, answer=answer)
            if inspect.iscoroutine(found):
                found = asyncio.run(found)
            expect(isinstance(found, dict), f"solve must return reward and call_rewards, as a dict; found {found!r}")
            asked = [[message["content"] for message in conversation] for conversation in Endpoint.asked]
            right_ones = [[question] for question in questions]
            expect(asked == right_ones, f"{problem}, replies {replies}: asked {asked}, expected {right_ones}")
            is_right = all(found.get(key) == value for key, value in expected.items())
            expect(is_right, f"{problem}, replies {replies}: found {found}, expected {expected}")
    finally:
        server.shutdown()
        server.server_close()


def check_sqlite() -> None:
    from base.inputs.sources import open_source
    from config import DataError, DatasetConfig

    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/train.db"
        with closing(sqlite3.connect(file)) as database, database:
            database.execute('CREATE TABLE "my sums" (problem TEXT, answer INTEGER, note REAL)')
            database.execute("""INSERT INTO "my sums" VALUES ('1+1=', 2, NULL), ('2+3=', 5, 0.5)""")
            database.execute("CREATE TABLE rows (problem TEXT)")
            database.execute("INSERT INTO rows VALUES ('only')")
        try:
            source = open_source(DatasetConfig(data_path=file, subset="my sums"))
            rows = [source.read(number) for number in source.numbers]
            first = open_source(DatasetConfig(data_path=file))
        except (DataError, UnicodeDecodeError) as error:
            raise NotYet(f"a file that ends in .db is not read as a table: {error}") from error
        expected = [{"problem": "1+1=", "answer": 2, "note": None}, {"problem": "2+3=", "answer": 5, "note": 0.5}]
        expect(rows == expected, f"rows of the table 'my sums': found {rows}, expected {expected}")
        found = [first.read(number) for number in first.numbers]
        expect(found == [{"problem": "only"}], f"without a subset, the table 'rows': found {found}")
        for subset, path in (("others", file), (None, f"{folder}/none.db")):
            name = subset or path
            try:
                open_source(DatasetConfig(data_path=path, subset=subset))
            except DataError as error:
                expect(name in str(error), f"the message must name {name}: {error}")
            else:
                raise NotYet(f"{name} is not there, and no DataError says so")
        expect(not Path(folder, "none.db").exists(), "reading must not make a file: open it with mode=ro")


# -------------------------------------------------------------------------------------------------- optimizer, families


def check_optimizer() -> None:
    from optim import build_optimizer

    name = "torch.optim.SGD"
    expect_value(config.OptimizerConfig, "name", name)
    kwargs = replace(config.OptimizerConfig().kwargs, lr=0.5, weight_decay=0.1)
    model = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0]]))
    optimizer = build_optimizer(model, config.OptimizerConfig(name=name, kwargs=kwargs))
    weights, velocities = [1.0, -2.0], [0.0, 0.0]
    for gradients in ([1.0, 0.5], [-2.0, 0.25], [0.5, 0.0]):
        model.weight.grad = torch.tensor([gradients])
        optimizer.step()
        for i, gradient in enumerate(gradients):
            velocities[i] = 0.9 * velocities[i] + gradient + 0.1 * weights[i]
            weights[i] -= 0.5 * velocities[i]
    expect_close(model.weight.detach(), weights, "the weights after three steps of SGD with momentum 0.9", 1e-6)
    held = {key for state in optimizer.state.values() for key in state}
    expect("momentum_buffer" in held, f"optimizer.state, which checkpoints save, has {sorted(held)}, no momentum")
    for ignored in ("betas=[0.8, 0.9]", "eps=1e-6"):
        expect_refused(f"policy.optimizer.name={name}", f"policy.optimizer.kwargs.{ignored}")


def check_family(name: str, cases: list[dict], defaults: list[str]) -> None:
    """A tiny random model for each case, which has fields of its config.json. defaults: fields that the file leaves out
    where they have transformers' default."""
    sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "hf")]
    import transformers
    from families import make_family

    from base.hf.families import FAMILIES

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    expect(name in FAMILIES, f'base/hf/families.py, FAMILIES: there is no "{name}"')
    for case in cases:
        hf_model = make_family(name, **case)
        try:
            check_model(hf_model, defaults, f"{name} with {case}")
        except ConfigError as error:
            raise NotYet(f"{name} with {case}: {error}") from error


def check_model(hf_model, defaults: list[str], said: str) -> None:
    """Names, shapes and logits against transformers, over a pack with shared prompts."""
    from test_blocks import folder_of, packed, segments

    from base.hf.folder import read_model_config
    from model import load_policy

    with tempfile.TemporaryDirectory() as temporary:
        folder = folder_of(hf_model, Path(temporary))
        file = folder / "config.json"
        in_file = json.loads(file.read_text())
        for field in defaults:
            if in_file[field] == getattr(type(hf_model.config)(), field):
                del in_file[field]
        file.write_text(json.dumps(in_file))
        model_config = read_model_config(folder, force_hf=True)
        found = dict(model_config.tensor_shapes())
        expected = {key: tuple(tensor.shape) for key, tensor in hf_model.state_dict().items()}
        if hf_model.config.tie_word_embeddings:
            del expected["lm_head.weight"]
        for key in sorted(found.keys() | expected.keys()):
            shapes = found.get(key, "missing"), expected.get(key, "none")
            expect(shapes[0] == shapes[1], f"{said}: {key} is {shapes[0]}, transformers has {shapes[1]}")
        model = load_policy(folder, device="cpu", model_config=model_config)
    tokens_S, prefix_S = segments()
    logits_S = model(*packed(tokens_S, prefix_S)).split([len(tokens) for tokens in tokens_S])
    for tokens, prefix, logits in zip(tokens_S, prefix_S, logits_S, strict=True):
        whole = torch.cat([tokens_S[prefix], tokens]) if prefix >= 0 else tokens
        expected_logits = hf_model(whole[None], use_cache=False).logits[0, -len(tokens) :]
        error = (logits - expected_logits).abs().max().item()
        expect(error <= 1e-5, f"{said}: logits differ from transformers' by {error:.1e}")


def check_gemma() -> None:
    cases = [{"tie_word_embeddings": True}, {"tie_word_embeddings": True, "head_dim": 256, "attention_bias": True}]
    check_family("gemma", cases=cases, defaults=["head_dim", "tie_word_embeddings"])


def check_cwm() -> None:
    windows = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    check_family("cwm", cases=[windows, windows | {"head_dim": 128}], defaults=["head_dim"])


CHECKS = {
    "reply_logp": check_reply_logp,
    "metric": check_metric,
    "environment": check_environment,
    "naive_epochs": check_naive_epochs,
    "median": check_median,
    "pass_at_2": check_pass_at_2,
    "loss_term": check_loss_term,
    "topr": check_topr,
    "kl_by_sample": check_kl_by_sample,
    "optimizer": check_optimizer,
    "sqlite": check_sqlite,
    "nines": check_nines,
    "gemma": check_gemma,
    "cwm": check_cwm,
}


def answer(name: str) -> str:
    """ "right", or "not yet: " and the reason."""
    try:
        CHECKS[name]()
    except NotYet as missing:
        return f"not yet: {missing}"
    except Exception:
        return f"not yet: it raises\n{traceback.format_exc()}"
    return "right"


def main(words: list[str]) -> int:
    unknown = [name for name in words if name not in CHECKS]
    if unknown:
        print(f"there is no exercise {unknown[0]}; there are {', '.join(CHECKS)}")
        return 2
    are_right = []
    for name in words or CHECKS:
        said = answer(name)
        print(f"{name}: {said}", flush=True)
        are_right.append(said == "right")
    return 0 if all(are_right) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
