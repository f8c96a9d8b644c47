"""Responses that outlast weight changes (grpo.async_grpo): tokens, their versions, their log-probabilities."""

import heapq
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import FakeTokenizer

import engine as engine_module
import envs
from config import AsyncGRPOConfig, Config, DataConfig, GRPOConfig
from data import Problem
from dataset.mixing import Mixture
from dataset.scan import Dataset
from engine import Completion, SamplingOptions, check_versions
from hf.tokenizer import Tokenizer
from hf.weights import full_tensors
from model import load_policy
from rollout import Sampler, sample_step
from run.metrics import age_metrics

TEMPERATURE = 0.7
LONG, SHORT = SamplingOptions(TEMPERATURE, 60), SamplingOptions(TEMPERATURE, 12)


@pytest.fixture(scope="module")
def policies(one_rank, tiny):
    """Four sets of weights, each an optimizer's large step from the one before."""
    _, device, mesh = one_rank
    generator = torch.Generator().manual_seed(1)
    policies = []
    for version in range(4):
        policy = load_policy(tiny[0], device=device, mesh=mesh)
        policy.temperature, policy.vocab_limit = TEMPERATURE, Tokenizer(tiny[0]).vocab_size
        for name, param in policy.named_parameters():
            local = param.to_local()
            with torch.no_grad():
                before = dict(policies[-1].named_parameters())[name].to_local() if version else local
                local.copy_(before + bool(version) * 0.02 * torch.randn(local.shape, generator=generator))
        policies.append(policy)
    return policies


def sync(engine, policies, version):
    engine.sync(full_tensors(policies[version], engine.dtype), version)
    engine.llm.llm_engine.set_weight_version(str(version))


def gap_of_each(policies, prompt, completion):
    """[tokens]: |log-probability as stored - that of a trainer with the token's own weights|."""
    ids = torch.tensor([*prompt, *completion.ids.tolist()])
    position_T = torch.arange(len(ids) - 1)
    logps = []
    for policy in policies:
        with torch.no_grad():
            logp_R, _ = policy(
                ids[:-1], position_T, np.array([0, len(position_T)]), position_T[len(prompt) - 1 :], ids[len(prompt) :]
            )
        logps.append(logp_R.numpy())
    return np.abs(np.stack(logps)[completion.versions, np.arange(len(completion.ids))] - completion.logps)


PROMPTS = [[5 + i, 6, 7] * (1 + i % 4) for i in range(8)]


def carried(engine, policies, first_seed):
    """Replies to PROMPTS during which the weights change three times, and what else was asked for meanwhile."""
    sync(engine, policies, 0)
    engine.finished.clear()  # what a test of a signal has left in this engine
    request_ids = engine.start(PROMPTS, range(first_seed, first_seed + 8), LONG)
    others = []
    for version in (1, 2, 3):
        others += engine.generate([PROMPTS[0]] * 2, [version, first_seed], SHORT)
        assert len(engine.spans) >= 4, "it waited for them"
        sync(engine, policies, version)
    return engine.wait(request_ids), others


@pytest.fixture
def spans(monkeypatch):
    """vLLM's own: [(version, start, end) of each span] of each reply, as they end."""
    seen, completion_of = [], engine_module._completion

    def completion(output, *args):
        seen.append([(int(s.version), s.start, s.end) for s in output.weight_versions])
        return completion_of(output, *args)

    monkeypatch.setattr(engine_module, "_completion", completion)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 100, 200])
def test_every_token_is_of_the_weights_of_its_version(engine, policies, spans, seed):
    replies, others = carried(engine, policies, seed)
    assert sum(set(reply.versions) == {0, 1, 2, 3} for reply in replies) >= 4
    for prompt, reply in zip(PROMPTS + [PROMPTS[0]] * 6, [*replies, *others], strict=True):
        assert gap_of_each(policies, prompt, reply).max() <= 1e-4
    ours = [np.flatnonzero(np.diff(reply.versions, prepend=-1)).tolist() for reply in replies]
    theirs = [[start for _, start, _ in reply] for reply in spans]
    assert len(theirs) == 14 and all(starts in theirs for starts in ours)
    assert not engine.spans and not engine.finished


@pytest.mark.slow
def test_without_the_rebuild_a_token_is_of_no_weights_at_all(engine, policies, monkeypatch):
    """What the sync asks vLLM for, left out: so the test above can fail."""
    monkeypatch.setattr(engine.llm, "reset_prefix_cache", lambda reset_running_requests: True)
    replies, _ = carried(engine, policies, 0)
    gaps = [gap_of_each(policies, prompt, reply) for prompt, reply in zip(PROMPTS, replies, strict=True)]
    assert max(gap[reply.versions == 0].max() for gap, reply in zip(gaps, replies, strict=True)) <= 1e-4
    for version in (1, 2, 3):
        gap = np.concatenate([gap[reply.versions == version] for gap, reply in zip(gaps, replies, strict=True)])
        assert gap.max() > 0.1, (version, gap.max())
    monkeypatch.undo()
    sync(engine, policies, 0)


@pytest.mark.slow
def test_a_sample_survives_being_put_back_into_the_queue(engine, policies):
    """The same weights: each validation amid a response puts it back, and it goes on with its seed, to the bit."""
    sync(engine, policies, 0)
    whole = engine.generate(PROMPTS, range(8), LONG)
    request_ids = engine.start(PROMPTS, range(8), LONG, priority=1)
    for _ in range(3):
        engine.generate([PROMPTS[0]], [9], SHORT)
    for before, after in zip(whole, engine.wait(request_ids), strict=True):
        assert before.ids.tolist() == after.ids.tolist() and (before.logps == after.logps).all()


@pytest.mark.slow
def test_a_validation_goes_before_what_is_carried(engine, policies):
    """With more requests in the engine than it runs at once."""
    sync(engine, policies, 0)
    room = engine.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
    request_ids = engine.start([[5, 6, 7]] * (room + 20), range(room + 20), LONG, priority=1)
    engine.generate([[5, 6]], [0], SamplingOptions(TEMPERATURE, 2))
    engine.generate([[5, 6]] * 3, range(3), SHORT)
    assert len(engine.spans) >= room, "a validation waits for none of them"
    engine.llm.llm_engine.abort_request(request_ids)
    engine.spans.clear()


# ------------------------------------------------------------------------------------------------------------ pacing


class TimedEngine:
    """Decodes `slots` requests at once, a token of each per tick, the lowest priority first; no token means anything.

    A reply's length is a function of its seed: log-normal, the longest a hundred times the median.
    """

    max_total_tokens = 10**6

    def __init__(self, slots):
        self.slots, self.ticks, self.weight_version = slots, 0, 0
        self.queue, self.running, self.finished = [], {}, {}
        self.lengths, self.ended, self.priorities = [], {}, []

    def start(self, prompts, seeds, options, priority):
        names = [str(len(self.lengths) + i) for i in range(len(seeds))]
        for name, seed in zip(names, seeds, strict=True):
            self.lengths.append(1 + int(20 * np.exp(1.2 * np.random.default_rng(seed).normal())))
            self.priorities.append(priority)
            heapq.heappush(self.queue, (priority, len(self.lengths), name))
        return names

    def wait(self, names, _):
        while any(name not in self.finished for name in names):
            while self.queue and len(self.running) < self.slots:
                _, number, name = heapq.heappop(self.queue)
                self.running[name] = [self.lengths[number - 1], []]
            ticks = min(left for left, _ in self.running.values())
            self.ticks += ticks
            for name, request in list(self.running.items()):
                request[0] -= ticks
                request[1] += [self.weight_version] * ticks
                if request[0] == 0:
                    versions = np.array(self.running.pop(name)[1], np.int32)
                    self.finished[name] = Completion(0 * versions, versions.astype(np.float32), "stop", versions)
                    self.ended[name] = self.ticks
        return [self.finished.pop(name) for name in names]


def simulate(max_age, ranks, *, num_steps, slots):
    """Steps of 10 groups of 2: (samples of each step, ticks that each step took and those it needed, the engine)."""
    rows = [Problem(i, [], "1", "exact", [1, 2]) for i in range(10 * num_steps)]
    grpo = GRPOConfig(10, 2, async_grpo=AsyncGRPOConfig(True, max_age))
    cfg = Config(grpo=grpo, data=DataConfig(shuffle=False))
    engine = TimedEngine(slots)
    sampler = Sampler(engine, FakeTokenizer(), {"exact": envs.Exact()}, ranks)
    mixture = Mixture([Dataset("rows.jsonl", rows, "", "rows")], cfg)
    cursor, steps, waits, ages = mixture.start(), [], [], []
    for step in range(1, num_steps + 1):
        before = engine.ticks
        due = {each.request_id for each in sampler.ahead[0][0]} if sampler.ahead else set()
        samples = sample_step(sampler, cfg, mixture, cursor, step, num_steps)
        needed = max((engine.ended[name] for name in due), default=engine.ticks)
        waits.append((engine.ticks, max(before, needed)))
        check_versions(samples.trained, step - 1, max_age)
        numbers = age_metrics(sampler, samples.trained, step)
        assert numbers["max_trajectory_age"] <= max_age
        cursor, engine.weight_version = samples.cursor, step
        steps.append(samples.trained)
        ages.append(numbers["avg_trajectory_age"])
    return steps, waits, ages, engine


@pytest.mark.parametrize(("max_age", "num_steps"), [(1, 100), pytest.param(2, 1000, marks=pytest.mark.slow), (4, 100)])
def test_pacing(one_rank, max_age, num_steps):
    """Up to 10,000 groups: each is trained once, at the step it was begun for, however long it takes."""
    steps, waits, ages, engine = simulate(max_age, one_rank[0], num_steps=num_steps, slots=20)
    assert [[s.row_id for s in step[::2]] for step in steps] == np.arange(10 * num_steps).reshape(-1, 10).tolist()
    trained = sorted(len(s.output_ids) for step in steps for s in step)
    assert trained == sorted(engine.lengths) and trained[-1] > 20 * trained[10 * num_steps]
    assert waits == [(needed, needed) for _, needed in waits], "no step waits for more than its own groups"
    assert engine.priorities == np.repeat(np.arange(1, num_steps + 1), 20).tolist(), "oldest first"
    assert not engine.running and not engine.queue and not engine.finished
    assert 0.2 < np.mean(ages) < max_age


def test_what_is_carried_fills_the_places_that_long_responses_leave(one_rank):
    """Ticks for the same 500 groups: places that wait for the longest response of a step cost most without it."""
    ticks = [simulate(max_age, one_rank[0], num_steps=50, slots=20)[3].ticks for max_age in (0, 1, 2)]
    assert ticks[0] > 1.5 * ticks[1] > 1.5 * ticks[2], ticks


def test_an_engine_goes_on_while_others_wait(one_rank, monkeypatch):
    """In rounds, until the last engine has what it waits for, or there is nothing more to do."""
    calls, looks = [], iter([False, False, True])
    work = SimpleNamespace(is_completed=lambda: next(looks), wait=lambda: calls.append("wait"))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, async_op: calls.append("begin") or work)
    engine = SimpleNamespace(spans={"1": []}, step=lambda: calls.append("step"))
    sampler = Sampler(engine, FakeTokenizer(), {}, one_rank[0])
    sampler._go_on()
    assert calls == ["begin", *["step"] * 32, "wait"]
    engine.spans.clear()
    sampler._go_on()
    assert calls[34:] == ["begin", "wait"]
