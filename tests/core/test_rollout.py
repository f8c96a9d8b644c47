"""The samples of a step, of a sampler whose rewards are known: which groups train, which prompts are drawn, the end."""

import itertools
import os
import pickle
import re
import sys
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from environments import ready
from fakes import FakeEngine, FakeTokenizer
from samples import sampled, with_grade, with_tokens

import envs
from base.graders.pool import PoolEnvironment
from base.hf import turns
from base.inputs.mixing import Mixture
from base.inputs.scan import Dataset
from base.system.exits import Interrupted, StopRun
from base.system.ranks import Ranks
from config import Config, DataConfig, EnvConfig, GRPOConfig, RewardShapingConfig
from judges.pool import Graded, GraderPool
from metrics import sample_metrics
from records import Grade, Problem, SamplingOptions
from rollout import Conversation, Sampler, deal, sample_seed, sample_step

ROWS = [Problem(i, [], "", "exact", [1, 2]) for i in range(50)]
SIZE = 4
GOLDEN_SEED = 221_851_323_711_279


class StubSampler:
    """Samples of rewards that `rewards_of(row_id)` gives; remembers the prompts of each call."""

    def __init__(self, rewards_of, lengths=(3,), version=4):
        self.version = version
        self.rewards_of, self.lengths, self.calls = rewards_of, lengths, []

    def sample(self, prompts, num_samples, options, seed_key, step):
        assert (num_samples, options.temperature, options.max_new_tokens, step) == (SIZE, 1.0, 256, 5)
        assert seed_key[1] == 5
        self.calls.append([(index, row.row_id) for index, row in prompts])
        return [self.one(*prompt, i) for prompt in prompts for i in range(SIZE)]

    def one(self, prompt, row, i):
        length, reward = self.lengths[i % len(self.lengths)], float(self.rewards_of(row.row_id)[i])
        reason, outcome = "length" if length == 8 else "stop", "ok" if reward > 0 else "wrong"
        grade = Grade(reward, outcome)
        fields = {"version": self.version, "row_id": row.row_id, "finish_reason": reason, "grade": grade}
        return sampled(prompt, i, [1, 2], [prompt] * length, **fields)


def config_of(num_prompts=4, *, shuffle=False, **grpo):
    options = {"num_prompts_per_step": num_prompts, "num_generations_per_prompt": SIZE} | grpo
    return Config(grpo=GRPOConfig(**options), data=DataConfig(shuffle=shuffle))


def collect(cfg, rows, position, sampler):
    """sample_step over one training set, from `position` on: (samples, number of prompts drawn, metrics)."""
    mixture = Mixture([Dataset("rows.jsonl", rows, "", "rows")], cfg)
    step = sample_step(sampler, cfg, mixture, mixture.start() | {"position": position}, 5, 5)
    metrics = sample_metrics(step.generated, step.trained) | step.metrics
    return step.trained, step.cursor["position"] - position, metrics


def by_remainder(row_id):
    """Of three rows one is all wrong, one all right, one has a lone right answer."""
    return [[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 0]][row_id % 3]


def rows_of(samples):
    return [sample.row_id for sample in samples[::SIZE]]


def test_without_dynamic_sampling_every_group_trains():
    sampler = StubSampler(by_remainder)
    samples, drawn, metrics = collect(config_of(), ROWS, 7, sampler)
    assert drawn == 4 and sampler.calls == [[(0, 7), (1, 8), (2, 9), (3, 10)]]
    assert [(s.prompt, s.index) for s in samples] == [(p, i) for p in range(4) for i in range(SIZE)]
    assert not any(name.startswith("dynamic") for name in metrics)
    assert (metrics["zero_variance_fraction"], metrics["num_overlong_filtered"]) == (0.75, 0)


def test_groups_are_kept_whole_until_the_step_is_full():
    """Rows 7..18 hold four mixed groups, of rows 8, 11, 14, 17: three batches of four, of which the last one
    allowed is used up exactly."""
    sampler, cfg = StubSampler(by_remainder), config_of(use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=3)
    samples, drawn, metrics = collect(cfg, ROWS, 7, sampler)
    assert (drawn, len(sampler.calls)) == (12, 3)
    assert [pair for batch in sampler.calls for pair in batch] == [(i, 7 + i) for i in range(12)]  # no seed twice
    assert rows_of(samples) == [8, 11, 14, 17]
    assert [(s.prompt, s.index) for s in samples] == [(p, i) for p in range(4) for i in range(SIZE)]
    assert [s.grade.reward for s in samples] == [0, 0, 1, 0] * 4  # the lone right one with its peers
    assert metrics["dynamic_sampling_num_gen_batches"] == 3
    assert metrics["dynamic_sampling_num_discarded_valid_samples"] == 0
    assert metrics["reward"] == pytest.approx((4 * 1 + 4 * 0.25) / 12) and metrics["filtered_reward"] == 0.25
    assert (metrics["total_turns"], metrics["total_num_tokens"]) == (48, 16 * 5)


def test_surplus_groups_are_discarded_and_counted():
    options = {"use_dynamic_sampling": True, "batch_multiplier": 2.5}
    samples, drawn, metrics = collect(config_of(2, **options), ROWS, 0, StubSampler(lambda row: [row % 2, 0, 0, 0]))
    assert (drawn, rows_of(samples)) == (5, [1, 3])
    samples, drawn, metrics = collect(config_of(2, **options), ROWS, 1, StubSampler(lambda row: [row % 2, 0, 0, 0]))
    assert (drawn, rows_of(samples)) == (5, [1, 3])  # rows 1, 3 and 5 of 1..5 are mixed
    assert metrics["dynamic_sampling_num_discarded_valid_samples"] == 1 * SIZE
    assert metrics["dynamic_sampling_num_gen_batches"] == 1


def test_lengths_alone_do_not_make_a_group_worth_keeping():
    shaping = RewardShapingConfig(enabled=True, overlong_buffer_length=4, max_response_length=8)
    cfg = config_of(2, use_dynamic_sampling=True, reward_shaping=shaping)
    samples, drawn, metrics = collect(cfg, ROWS, 0, StubSampler(by_remainder, lengths=(3, 6, 4, 8)))
    assert rows_of(samples) == [2, 5] and drawn == 6
    assert [s.grade.reward for s in samples[:SIZE]] == [0, -0.5, 1, -1]
    assert [s.grade.unshaped_reward for s in samples[:SIZE]] == [0, 0, 1, 0]
    assert metrics["zero_variance_fraction"] == 0
    assert metrics["unshaped_zero_variance_fraction"] == pytest.approx(2 / 3)


def test_overlong_filtering_leaves_the_reward_and_the_numbers():
    samples, _, metrics = collect(
        config_of(1, overlong_filtering=True), ROWS, 2, StubSampler(by_remainder, lengths=(3, 8))
    )
    assert [s.num_trained_tokens for s in samples] == [3, 0, 3, 0] and [s.grade.reward for s in samples] == [0, 0, 1, 0]
    assert (metrics["num_overlong_filtered"], metrics["truncation_rate"]) == (2, 0.5)
    assert metrics["mean_gen_tokens_per_sample"] == 5.5
    samples, _, metrics = collect(config_of(1), ROWS, 2, StubSampler(by_remainder, lengths=(3, 8)))
    assert all(s.num_trained_tokens == s.num_gen_tokens for s in samples), "only if asked"
    assert metrics["num_overlong_filtered"] == 0


class Ungraded(StubSampler):
    """Sample 2 of each group could not be graded."""

    def one(self, *args):
        sample = super().one(*args)
        sample.grade.outcome = "error" if sample.index == 2 else sample.grade.outcome
        return sample


def test_what_could_not_be_graded_is_not_trained(monkeypatch):
    """NeMo-RL#431. What the policy did is trained: a timeout of its program, a reply that is no answer."""
    samples, _, metrics = collect(config_of(2), ROWS, 0, Ungraded(by_remainder))
    assert [s.num_trained_tokens for s in samples] == [3, 3, 0, 3] * 2 and metrics["outcome/error"] == 0.25
    for outcome in ("timeout", "parse_fail", "wrong"):
        monkeypatch.setattr(
            Ungraded, "one", lambda self, *a, o=outcome: with_grade(StubSampler.one(self, *a), outcome=o)
        )
        samples, _, _ = collect(config_of(2), ROWS, 0, Ungraded(by_remainder))
        assert [s.num_trained_tokens for s in samples] == [3] * 8


def test_what_could_not_be_graded_mixes_no_group():
    """Of by_remainder's groups [0, 0, 1, 0] the ungraded sample is the lone right one."""
    with pytest.raises(StopRun, match="gave 0 groups of unequal rewards"):
        collect(config_of(1, use_dynamic_sampling=True), ROWS, 0, Ungraded(by_remainder))
    sampler = Ungraded(lambda row: [1, 0, 7, 0] if row == 3 else [0, 0, 7, 0])
    assert rows_of(collect(config_of(1, use_dynamic_sampling=True), ROWS, 0, sampler)[0]) == [3]


class Cut(StubSampler):
    """All samples of the first rows are cut."""

    def __init__(self, num_cut, rewards_of=by_remainder):
        super().__init__(rewards_of)
        self.num_cut = num_cut

    def one(self, prompt, row, i):
        self.lengths = (8,) if row.row_id < self.num_cut else (3,)
        return super().one(prompt, row, i)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_step_of_truncated_samples_alone_is_skipped_and_counted(dynamic):
    """huggingface/trl#6439: one unlucky batch ended the run. With dynamic sampling, rows 2, 5 and 8 are mixed."""
    sampler = Cut(6)
    samples, drawn, metrics = collect(
        config_of(1, overlong_filtering=True, use_dynamic_sampling=dynamic), ROWS, 2, sampler
    )
    assert rows_of(samples) == ([8] if dynamic else [6]) and [s.prompt for s in samples] == [0] * SIZE
    assert all(s.num_trained_tokens for s in samples) and drawn == len(sampler.calls) == (7 if dynamic else 5)
    assert metrics["num_skipped_samples"] == (2 if dynamic else 4) * SIZE and metrics["num_overlong_filtered"] == 0
    indices = [index for call in sampler.calls for index, _ in call]
    assert indices == list(range(drawn)), "no two samples of a step share a seed"
    samples, _, metrics = collect(config_of(2, overlong_filtering=True), ROWS, 5, Cut(6))  # one prompt of two is cut
    assert rows_of(samples) == [5, 6] and metrics["num_skipped_samples"] == 0 and metrics["num_overlong_filtered"] == 4


def test_groups_that_wait_are_trained_before_more_are_drawn():
    """A batch of four prompts, all mixed; those of the first two rows are cut."""
    sampler = Cut(2, lambda row: [1, 0, 0, 0])
    cfg = config_of(1, overlong_filtering=True, use_dynamic_sampling=True, batch_multiplier=4.0)
    samples, drawn, metrics = collect(cfg, ROWS, 0, sampler)
    assert rows_of(samples) == [2] and drawn == 4 and metrics["num_skipped_samples"] == 2 * SIZE


def test_steps_of_truncated_samples_alone_are_bounded():
    with pytest.raises(
        StopRun, match=r"of 10 batches .* 4 of 4 ran into .*=256 with grpo\.overlong_filtering=true"
    ) as stop:
        collect(config_of(1, overlong_filtering=True), ROWS, 2, Cut(99))
    assert stop.value.cursor["position"] == 12  # a resumed run draws other prompts


def test_a_step_without_a_row_to_train_on_stops_the_run():
    class Masked(StubSampler):
        def one(self, *args):
            sample = super().one(*args)
            return with_tokens(sample, mask=sample.row_id > 1)  # what rollout.py does for loss_multiplier 0

    samples, _, metrics = collect(config_of(2), ROWS, 1, Masked(by_remainder))
    assert [s.num_trained_tokens > 0 for s in samples] == [False] * SIZE + [True] * SIZE and metrics["reward"] == 5 / 8
    with pytest.raises(StopRun, match="all rows have loss_multiplier=0"):
        collect(config_of(2), ROWS[:2], 0, Masked(by_remainder))


def test_too_few_groups_stop_the_run_with_counts_and_keys():
    sampler = StubSampler(lambda row: [[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]][row % 4])
    cfg = config_of(8, use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=2, batch_multiplier=1.5)
    with pytest.raises(StopRun) as caught:
        collect(cfg, ROWS, 0, sampler)
    assert len(sampler.calls) == 2  # exactly; NeMo RL goes one beyond
    told = str(caught.value)
    for fact in (
        "2 batches (24 prompts)",
        "6 groups of unequal rewards",
        "num_prompts_per_step=8",
        "In 6 groups every answer was right",
    ):
        assert fact in told
    assert "in 12 none was" in told and "Raise grpo.dynamic_sampling_max_gen_batches" in told
    assert caught.value.cursor["position"] == 24 and pickle.loads(pickle.dumps(caught.value)).cursor["position"] == 24


def test_what_there_is_can_be_trained_when_the_batches_are_used_up():
    """volcengine/verl#1108: a step with fewer groups is better than the end. Without any group it is the end."""
    cfg = config_of(8, use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=2)
    cfg = replace(cfg, grpo=replace(cfg.grpo, dynamic_sampling_when_exhausted="train"))
    samples, drawn, metrics = collect(cfg, ROWS, 0, StubSampler(by_remainder))
    assert rows_of(samples) == [2, 5, 8, 11, 14] and drawn == 16
    assert [(s.prompt, s.index) for s in samples] == [(p, i) for p in range(5) for i in range(SIZE)]
    assert metrics["dynamic_sampling_num_missing_groups"] == 3
    full, _, metrics = collect(cfg, ROWS, 0, StubSampler(lambda row: [1, 0, 0, 0]))
    assert len(full) == 8 * SIZE and metrics["dynamic_sampling_num_missing_groups"] == 0
    with pytest.raises(StopRun, match="gave 0 groups of unequal rewards"):
        collect(cfg, ROWS, 0, StubSampler(lambda row: [1, 1, 1, 1]))


def test_sample_seeds_differ_and_are_fixed():
    keys = [(42, step, prompt, index) for step in range(-1, 4) for prompt in range(8) for index in range(8)]
    assert len({sample_seed(*key) for key in keys}) == len(keys)
    assert sample_seed(42, 1, 0, 0) == GOLDEN_SEED  # changing this changes what every resumed run samples


# ------------------------------------------------------------------------------------- which engine draws which sample


def problems_of(*prompt_lengths):
    return list(enumerate(Problem(i, [], "1", "exact", [7] * n) for i, n in enumerate(prompt_lengths)))


def pairs(share):
    return [(prompt, index) for _, prompt, index in share]


@pytest.mark.parametrize("num_engines", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("max_new_tokens", [1, 1024])
@pytest.mark.parametrize("num_samples", [1, 4, 16])
def test_every_sample_is_dealt_once(num_engines, max_new_tokens, num_samples):
    prompts = problems_of(*np.random.default_rng(0).integers(1, 400, 30).tolist())
    shares = deal(prompts, num_samples, num_engines, max_new_tokens)
    dealt = [pair for share in shares for pair in pairs(share)]
    assert len(shares) == num_engines
    assert sorted(dealt) == [(p, i) for p in range(30) for i in range(num_samples)]
    assert max(map(len, shares)) <= -(-30 // num_engines) * num_samples  # what max_num_seqs counts on
    for share in shares:
        lengths = [len(problem.prompt_ids) for problem, *_ in share]
        assert lengths == sorted(lengths, reverse=True)


def test_a_group_is_spread_where_its_prompt_is_cheap_beside_its_replies():
    shares = deal(problems_of(100, 120, 90), 16, 8, 1024)
    assert all(pairs(share) == [(p, i) for p in (1, 0, 2) for i in (e, e + 8)] for e, share in enumerate(shares))
    # 7 further prefills of 147 tokens are 1/16 of 16 x 1024 new ones, and a little more; of 146 they are less
    assert [len({p for p, _ in pairs(share)}) for share in deal(problems_of(*[146] * 8), 16, 8, 1024)] == [8] * 8
    whole = deal(problems_of(*[147] * 8), 16, 8, 1024)
    assert [pairs(share) for share in whole] == [[(p, i) for i in range(16)] for p in range(8)]
    # engines that would have no group at all cost nothing: 3 prompts on 8 engines, each on two
    shares = deal(problems_of(4000, 4000, 4000), 16, 8, 64)
    assert [pairs(share) for share in shares[:2]] == [
        [(0, i) for i in range(0, 16, 2)],
        [(0, i) for i in range(1, 16, 2)],
    ]
    assert [len(share) for share in shares] == [8] * 6 + [0, 0]
    # the long ones whole, first; the others fill up
    shares = deal(problems_of(10, 5000, 10, 10), 4, 2, 100)
    assert pairs(shares[0])[:4] == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert [len(share) for share in shares] == [8, 8]


@pytest.mark.parametrize("num_engines", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("num_samples", [4, 16])
def test_groups_that_must_be_whole_are(num_engines, num_samples):
    """TRL#4707, #6680: rewards that compare the samples of a prompt. Each group lies together and in order; no engine
    has more samples than with groups that may be cut, nor more than max_num_seqs counts on."""
    lengths = np.random.default_rng(1).integers(1, 400, 13 * num_engines)
    prompts = [(i, replace(p, env_name="ab"[i % 3 > 0])) for i, p in problems_of(*lengths.tolist())]
    shares = deal(prompts, num_samples, num_engines, 1024, {"a"})
    dealt = [pair for share in shares for pair in pairs(share)]
    assert sorted(dealt) == [(p, i) for p in range(len(prompts)) for i in range(num_samples)]
    for p in range(0, len(prompts), 3):
        (share,) = [pairs(share) for share in shares if (p, 0) in pairs(share)]
        first = share.index((p, 0))
        assert share[first : first + num_samples] == [(p, i) for i in range(num_samples)]
    assert max(map(len, shares)) <= 13 * num_samples + num_samples % num_engines * (num_engines > num_samples)
    assert deal(prompts, num_samples, num_engines, 1024) == deal(prompts, num_samples, num_engines, 1024, {"c"})


@pytest.mark.parametrize("name", ["Compares", "compares"])
def test_a_reward_that_compares_samples_sees_whole_groups_on_any_number_of_engines(name, monkeypatch):
    """The rank of a reply among its prompt's replies, by an environment's attribute or a function of TRL's."""
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(Compares=Compares, compares=compares))
    environment = ready(f"mine:{name}", EnvConfig())
    prompts = [(i, replace(problem, env_name="e")) for i, problem in problems_of(5, 9, 2, 40)]
    found = []
    for num_engines in (1, 2, 4):
        samples = []
        for rank in range(num_engines):
            ranks = Ranks(rank, num_engines, rank, 1)
            sampler = Sampler(FakeEngine(), FakeTokenizer(), {"e": environment}, ranks)
            conversations = [c for c in sampler.start(prompts, 6, SamplingOptions(1.0, 1024), (3, 1)) if c.request_id]
            assert {c.sample.engine for c in conversations} == {rank} and conversations
            sampler._converse(conversations)
            samples += [conversation.sample for conversation in conversations]
        samples.sort(key=lambda sample: (sample.prompt, sample.index))
        found.append([(s.prompt, s.index, s.grade.reward) for s in samples])
    assert found[0] == found[1] == found[2] and len({reward for *_, reward in found[0]}) > 2


def compares(completions, prompt_ids, **columns):
    groups = Counter(len(ids) for ids in prompt_ids)
    assert set(groups.values()) == {6}, groups
    pairs = list(zip(map(len, prompt_ids), completions, strict=True))
    return [sum(other <= reply for prompt, other in pairs if prompt == mine) for mine, reply in pairs]


class Compares(envs.Environment):
    whole_groups = True

    def step(self, turns):
        rewards = compares([t.whole_reply for t in turns], [t.prompt_ids for t in turns])
        return [envs.StepResult(reward, "ok") for reward in rewards]


class Raises(envs.Environment):
    def step(self, turns):
        raise ZeroDivisionError("of mine")  # the line that raises


@pytest.mark.parametrize("bound", [1.0, 0.5])
def test_what_an_environment_raises_grades_nothing_and_is_bounded(bound, capfd, monkeypatch, one_rank):
    """NeMo-RL#431, prime-rl#1416. The other environments' samples stay; over the bound the run ends with the line."""
    environments = {"bad": Raises(), "exact": envs.Exact()}
    names = ["bad", "exact", "bad", "exact", "bad"]
    prompts = [(i, replace(p, env_name=name)) for (i, p), name in zip(problems_of(*range(1, 6)), names, strict=True)]
    sampler = Sampler(FakeEngine(), FakeTokenizer(), environments, Ranks(0, 1, 0, 1), max_error_fraction=bound)
    line = Raises.step.__code__.co_firstlineno + 1
    where = rf"env_name 'bad' raised ZeroDivisionError: of mine \({__file__}:{line}\)"
    if bound == 1.0:
        samples = sampler.sample(prompts, 2, SamplingOptions(1.0, 8), (3, 1))
        assert [s.grade.outcome == "error" for s in samples] == [name == "bad" for name in names for _ in range(2)]
    else:
        with pytest.raises(StopRun, match=rf"6 of 10 answers .*{{'bad': 6}}.*=0.5: {where}$"):
            sampler.sample(prompts, 2, SamplingOptions(1.0, 8), (3, 1))
    assert re.search(rf"WARNING: {where}", capfd.readouterr().err)


# ---------------------------------------------------------------------------------------------------------- no barrier


def decoder(lasts=None):
    """Replies of three ids, by the seed, of a long tail of ticks, or as long as lasts(row, turn); a prompt begins with
    its row."""

    def reply(seed, options):
        ids = np.random.default_rng(seed).integers(1, 99, 3)
        return np.int32(ids), -np.float32(ids)

    def ticks(seed):
        return 1 + int(3 * np.random.default_rng(seed).pareto(1)) % 200

    return FakeEngine(reply, ticks, lasts=lasts and (lambda ids: lasts(ids[0], ids.count(HINT))))


def begun(engine):
    """(row, turn) of each request."""
    return [(request.ids[0], request.ids.count(HINT)) for request in engine.started]


HINT = 1000


class Ids:
    """Ids as text."""

    def decode(self, ids):
        return " ".join(map(str, ids))


@pytest.fixture(autouse=True)
def an_observation_is_one_id(monkeypatch):
    monkeypatch.setattr(turns, "observation_ids", lambda *_: [HINT])


class Twice(PoolEnvironment):
    """Two turns; the first one of row 0 is graded when `path` is there."""

    def __init__(self, path):
        self.path, self.seconds = str(path), 20

    def start(self):
        self.pool = GraderPool("worker_jobs:run", num_workers=1, deadline_s=20, memory_mib=1024)
        self.pool.workers.append(self.pool._start_worker())
        return self

    def job(self, turn):
        waits = not turn.state and turn.prompt_ids[0] == 0
        return ["await", self.path] if waits else ["double", sum(turn.completion_ids)]

    def result(self, turn, graded):
        assert graded.outcome == "ok", graded
        done, hint = bool(turn.state), ({"role": "user", "content": "again"},)
        return envs.StepResult(sum(turn.completion_ids) % 7, "ok", done, hint, {"turn": 1})


class InThread(Twice):
    """The same without workers."""

    def start(self):
        return self

    def step(self, turns):
        end = time.monotonic() + 20
        for turn in turns:
            kind, value = self.job(turn)
            while kind == "await" and not os.path.exists(value):
                assert time.monotonic() < end, "never let go"
                time.sleep(0.001)
        return [self.result(turn, Graded("ok")) for turn in turns]


def rows_with(names):
    """Prompts of ids [row, 7]; row 0 has the first environment."""
    return [(i, Problem(i, [], "", name, [i, 7])) for i, name in enumerate(names)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Twice, InThread])
def test_nothing_waits_for_another_conversation(kind, tmp_path, one_rank):
    """Row 0's first reply is graded until row 1 has begun its second turn, and row 2's first reply is drawn until row
    0's second one begins: whoever waited for all replies, all grades, or a whole turn would wait for ever."""
    path = tmp_path / "go"

    def lasts(row, turn):
        if (1, 1) in begun(engine):
            path.touch()
        if (row, turn) == (2, 0):
            return (0, 1) not in begun(engine)
        return None

    engine = decoder(lasts)
    slow, quick = kind(path).start(), kind(path).start()
    sampler = Sampler(engine, Ids(), {"slow": slow, "quick": quick}, Ranks(0, 1, 0, 1), max_turns=2)
    samples = sampler.sample(rows_with(["slow", *["quick"] * 7]), 1, SamplingOptions(1.0, 99), (3, 1))
    assert [s.num_turns for s in samples] == [2] * 8 and all(s.grade.outcome == "ok" for s in samples)
    order = begun(engine)
    assert order.index((1, 1)) < order.index((0, 1)) and sorted(order) == [(i, t) for i in range(8) for t in range(2)]
    assert min(engine.batches) > 0, "the engine decoded nothing while a reply could run"
    for environment in (slow, quick):
        environment.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Twice, InThread])
def test_samples_do_not_depend_on_who_is_graded_when(kind, tmp_path, one_rank):
    """All numbers of long-tailed conversations, graded one by one or all at once, after the last reply of a turn."""
    path = tmp_path / "go"
    path.touch()
    found = []
    environment = kind(path).start()
    prompts = rows_with(["e"] * 5)
    sampler = Sampler(decoder(), Ids(), {"e": environment}, Ranks(0, 1, 0, 1), max_turns=3)
    for _ in range(3):
        found.append(sampler.sample(prompts, 4, SamplingOptions(1.0, 99), (3, 1)))
    lockstep = [Conversation(row, i, j, SamplingOptions(1.0, 99), (3, 1), 0) for i, row in prompts for j in range(4)]
    engine = decoder()
    for turn in range(2):
        seeds = [sample_seed(3, 1, c.sample.prompt, c.sample.index, *[turn][:turn]) for c in lockstep]
        names = engine.start([c.sample.sequence.token_ids for c in lockstep], seeds, None)
        while not engine.is_idle:
            engine.advance(names)
        turns = [c.add_reply(engine.unclaimed[name], Ids()) for c, name in zip(lockstep, names, strict=True)]
        for conversation, result in zip(lockstep, environment.step(turns), strict=True):
            conversation.add_result(result, Ids(), 512, 3)
    assert {s.num_turns for s in found[0]} == {2} and len({s.grade.reward for s in found[0]}) > 3
    for samples in found:
        for s, conversation in zip(samples, lockstep, strict=True):
            assert (s.prompt, s.index, s.grade.reward) == (
                conversation.sample.prompt,
                conversation.sample.index,
                conversation.sample.grade.reward,
            )
            assert (s.sequence.tokens == conversation.sample.sequence.tokens).all()
    environment.close()


class Groups(envs.Environment):
    """Goes on with the even samples of a group, which it must see together."""

    whole_groups = True

    def __init__(self):
        self.calls = []

    def step(self, turns):
        self.calls.append([(turn.prompt_ids[0], turn.state.get("turn", 0)) for turn in turns])
        hint = ({"role": "user", "content": "again"},)
        return [
            envs.StepResult(1.0, "ok", bool(turn.state) or i % 2 == 1, hint, {"turn": 1})
            for i, turn in enumerate(turns)
        ]


def test_a_group_is_graded_when_it_is_whole_while_others_are_drawn(one_rank):
    environment = Groups()
    graded = lambda: any((0, 1) in call for call in environment.calls)  # noqa: E731
    engine = decoder(lambda row, turn: None if row != 4 or turn else not graded())
    sampler = Sampler(engine, Ids(), {"e": environment}, Ranks(0, 1, 0, 1), max_turns=2)
    samples = sampler.sample(rows_with(["e"] * 5), 4, SamplingOptions(1.0, 99), (3, 1))
    assert [s.num_turns for s in samples] == [2, 1] * 10
    seen = Counter(pair for call in environment.calls for pair in call)
    assert seen == {(row, turn): 4 >> turn for row in range(5) for turn in range(2)}
    for call in environment.calls:
        assert all(count == 4 >> turn for (_, turn), count in Counter(call).items()), "whole groups"
        assert [pair for pair, _ in itertools.groupby(call)] == list(dict.fromkeys(call)), "prompt by prompt"


@pytest.mark.slow
@pytest.mark.parametrize("replies_run", [False, True])
def test_told_to_stop_amid_grading_nothing_is_left_in_the_engine(replies_run, tmp_path):
    """By a signal on this rank, of which a pool hears; the engine's own look is engine.py's."""
    environment = Twice(tmp_path / "never").start()
    engine = decoder(lambda row, turn: True if replies_run and row == 1 else None)
    told = {"max_turns": 2, "stop": lambda: len(engine.batches) > 3}
    sampler = Sampler(engine, Ids(), {"e": environment}, Ranks(0, 1, 0, 1), **told)
    first = sampler.start(rows_with(["e"] * 2), 1, SamplingOptions(1.0, 99), (3, 1))
    with pytest.raises(Interrupted):
        sampler._converse(first)
    environment.close()


def test_a_stop_of_the_graders_ends_the_engines_requests(monkeypatch, one_rank, tmp_path):
    environment, engine = InThread(tmp_path / "go"), decoder(lambda row, turn: row == 1 or None)
    monkeypatch.setattr(environment, "step", lambda turns: (_ for _ in ()).throw(StopRun("of mine")), raising=False)
    sampler = Sampler(engine, Ids(), {"e": environment}, Ranks(0, 1, 0, 1), max_turns=2)
    with pytest.raises(StopRun, match="of mine"):
        sampler.sample(rows_with(["e"] * 2), 1, SamplingOptions(1.0, 99), (3, 1))
    assert (engine.calls, engine.is_idle) == (["abort"], True)
