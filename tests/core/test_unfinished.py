"""Responses that outlast weight changes (grpo.async_grpo): tokens, their versions, their log-probabilities."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import FakeEngine, FakeTokenizer
from hf_folders import layout_of
from tiny import VOCAB_SIZE

import engine as engine_module
import envs
from ahead import Ahead, age_metrics
from base.hf.tokenizer import Tokenizer
from base.hf.weights import full_tensors
from base.inputs.mixing import Mixture
from base.inputs.scan import Dataset
from base.system.exits import StopRun
from config import AsyncGRPOConfig, Config, DataConfig, GRPOConfig
from gap import check_versions
from head import HeadOptions, response_logps
from model import load_policy
from records import Problem, SamplingOptions
from rollout import Sampler, sample_step
from run.split.generators import serve

TEMPERATURE = 0.7
HEAD = HeadOptions(TEMPERATURE, VOCAB_SIZE)
LONG, SHORT = SamplingOptions(TEMPERATURE, 60), SamplingOptions(TEMPERATURE, 12)


@pytest.fixture(scope="module")
def policies(one_rank, tiny):
    """Four sets of weights, each an optimizer's large step from the one before."""
    _, device, mesh = one_rank
    generator = torch.Generator().manual_seed(1)
    policies = []
    for version in range(4):
        policy = load_policy(tiny[0], device=device, mesh=mesh)
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


def gap_of_each(policies, prompt, tokens):
    """[tokens]: |log-probability as stored - that of a trainer with the token's own weights|."""
    ids = torch.tensor([*prompt, *tokens["id"].tolist()])
    position_T = torch.arange(len(ids) - 1)
    logps = []
    for policy in policies:
        with torch.no_grad():
            inputs = (ids[:-1], position_T, layout_of(len(position_T)), position_T[len(prompt) - 1 :])
            logp_R, _ = response_logps(policy, inputs, ids[len(prompt) :], HEAD)
        logps.append(logp_R.numpy())
    return np.abs(np.stack(logps)[tokens["version"], np.arange(len(tokens))] - tokens["logp"])


PROMPTS = [[5 + i, 6, 7] * (1 + i % 4) for i in range(8)]


def carried(engine, policies, first_seed):
    """Replies to PROMPTS during which the weights change three times, and what else was asked for meanwhile."""
    sync(engine, policies, 0)
    engine.unclaimed.clear()  # what a test of a signal has left in this engine
    request_ids = engine.start(PROMPTS, range(first_seed, first_seed + 8), LONG)
    others = []
    for version in (1, 2, 3):
        others += engine.generate([PROMPTS[0]] * 2, [version, first_seed], SHORT)
        assert len(engine.versions_by_request) >= 4, "it waited for them"
        sync(engine, policies, version)
    return engine.wait(request_ids), others


@pytest.fixture
def spans(monkeypatch):
    """vLLM's own: [(version, start, end) of each span] of each reply, as they end."""
    seen, completion_of = [], engine_module.completion_of

    def completion(output, *args):
        seen.append([(int(s.version), s.start, s.end) for s in output.weight_versions])
        return completion_of(output, *args)

    monkeypatch.setattr(engine_module, "completion_of", completion)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 100, 200])
def test_every_token_is_of_the_weights_of_its_version(engine, policies, spans, seed):
    replies, others = carried(engine, policies, seed)
    assert sum(set(reply.tokens["version"]) == {0, 1, 2, 3} for reply in replies) >= 4
    for prompt, reply in zip(PROMPTS + [PROMPTS[0]] * 6, [*replies, *others], strict=True):
        assert gap_of_each(policies, prompt, reply.tokens).max() <= 1e-4
    ours = [np.flatnonzero(np.diff(reply.tokens["version"], prepend=-1)).tolist() for reply in replies]
    theirs = [[start for _, start, _ in reply] for reply in spans]
    assert len(theirs) == 14 and all(starts in theirs for starts in ours)
    assert not engine.versions_by_request and not engine.unclaimed


@pytest.mark.slow
def test_without_the_rebuild_a_token_is_of_no_weights_at_all(engine, policies, monkeypatch):
    """What the sync asks vLLM for, left out: so the test above can fail."""
    monkeypatch.setattr(engine.llm, "reset_prefix_cache", lambda reset_running_requests: True)
    replies, _ = carried(engine, policies, 0)
    gaps = [gap_of_each(policies, prompt, reply.tokens) for prompt, reply in zip(PROMPTS, replies, strict=True)]
    assert max(gap[reply.tokens["version"] == 0].max() for gap, reply in zip(gaps, replies, strict=True)) <= 1e-4
    for version in (1, 2, 3):
        gap = np.concatenate(
            [gap[reply.tokens["version"] == version] for gap, reply in zip(gaps, replies, strict=True)]
        )
        assert gap.max() > 0.1, (version, gap.max())
    monkeypatch.undo()
    sync(engine, policies, 0)


class Script:
    """Trainers that ask a split job's generator for each thing after so many of its decode steps; weights are those of
    the policy whose number comes in place of the shapes."""

    num_trainers = 1

    def __init__(self, policies, requests):
        self.policies, self.requests, self.answers = policies, list(requests), []

    def announce(self, async_op):
        looks = iter([False] * self.requests[0][0])
        return SimpleNamespace(is_completed=lambda: next(looks, True), wait=lambda: None)

    def broadcast(self, value, root):
        if root == 0:
            return self.requests.pop(0)[1]
        if isinstance(value, list):  # samples, whose tokens the trainers would ask for
            for sample, tokens in zip(value, self.held, strict=True):
                sample.sequence.tokens = tokens
        return self.answers.append(value)

    def hold_tokens(self, sequences):
        self.held = [sequence.tokens for sequence in sequences]

    def drop_tokens(self):
        pass

    def receive_weights(self, version, dtype, _):
        return full_tensors(self.policies[version], dtype)


def split_samples(engine, policies, ranks, seed):
    """(samples during which the weights change three times, samples that were begun after that), of a generator."""
    long_prompt = [7 + i % 50 for i in range(150)]  # more than a block of the prefix cache
    problems = [Problem(i, [], "1", "exact", ids) for i, ids in enumerate([*PROMPTS, long_prompt])]
    prompts, key = list(enumerate(problems)), (seed,)
    started, finished = ("start", prompts, 1, LONG, key), (0, ("finish",))
    requests = [(0, ("weight_sync", 0, 0)), (0, (*started, 1))]
    requests += [(12, ("weight_sync", version, version)) for version in (1, 2, 3)]
    requests += [(5, (*started, 2)), finished, finished, (0, ("end",))]
    script = Script(policies, requests)
    ranks = replace(ranks, bridge=script)
    sampler = Sampler(engine, FakeTokenizer(), {"exact": envs.Exact()}, ranks, ahead=Ahead())
    engine.unclaimed.clear()
    engine.drains = False
    watchdog = SimpleNamespace(step=0, enter=lambda phase, waits=False: None)
    serve(sampler, torch.device("cpu"), watchdog)
    *_, first, second = script.answers
    assert watchdog.step == 4 and not engine.versions_by_request and not engine.unclaimed
    return first, second


def gaps_of(policies, samples):
    return [gap_of_each(policies, s.sequence.prompt_ids, s.sequence.tokens) for s in samples]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 100, 200])
def test_a_split_job_is_exact_to_the_token(engine, policies, one_rank, seed):
    first, second = split_samples(engine, policies, one_rank[0], seed)
    assert sum(set(sample.sequence.tokens["version"]) == {0, 1, 2, 3} for sample in first) >= 4
    assert {version for sample in second for version in sample.sequence.tokens["version"]} == {3}
    assert max(gap.max() for gap in gaps_of(policies, first + second)) <= 1e-4


@pytest.mark.slow
def test_a_split_job_that_keeps_keys_and_values_mixes_weights_in_old_requests_alone(
    engine, policies, one_rank, monkeypatch
):
    """recompute_kv_cache_after_weight_updates=false, also the negative control of the test above."""
    monkeypatch.setattr(engine, "rebuilds_cache", False)
    first, second = split_samples(engine, policies, one_rank[0], 0)
    gaps = gaps_of(policies, first)
    for version in (0, 1, 2, 3):
        gap = np.concatenate(
            [gap[sample.sequence.tokens["version"] == version] for gap, sample in zip(gaps, first, strict=True)]
        )
        assert gap.max() > 0.1 if version else gap.max() <= 1e-4, (version, gap.max())
    assert max(gap.max() for gap in gaps_of(policies, second)) <= 1e-4


@pytest.mark.parametrize(
    ("rebuilds_cache", "in_flight", "versions"),
    [(True, 0, [1, 1, 1]), (False, 0, [0, 1, 1]), (False, 1, [0, 1, 1]), (False, 2, [0, 0, 1])],
)
def test_a_request_without_a_token_may_have_keys_of_the_old_weights(rebuilds_cache, in_flight, versions):
    """vLLM computes long prompts in pieces, and is steps ahead of what it has given: weights come amid that."""
    engine = object.__new__(engine_module.VLLMEngine)
    detokenizer = SimpleNamespace(num_output_tokens=lambda: 0)
    states = {"7-ab": SimpleNamespace(external_req_id="7", detokenizer=detokenizer)}
    scheduler = SimpleNamespace(requests={"7-ab": SimpleNamespace(num_output_placeholders=in_flight)})
    inner = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    core = SimpleNamespace(output_processor=SimpleNamespace(request_states=states), engine_core=inner)
    words = {"collective_rpc": lambda *_, **words: None, "reset_prefix_cache": lambda **words: True}
    engine.llm, engine.param_names, engine.fused_layers = SimpleNamespace(llm_engine=core, **words), set(), {}
    engine.rebuilds_cache, engine.must_pack_experts = rebuilds_cache, False
    engine.versions_by_request = {"7": [(0, 0)]}
    engine.sync([], 1)
    places = {"start_indices": [0, 1, 2], "end_indices": [1, 2, 3]}
    logprobs = SimpleNamespace(**places, token_ids=[5, 6, 7], logprobs=[-0.1, -0.2, -0.3])
    output = SimpleNamespace(token_ids=[5, 6, 7], logprobs=logprobs, finish_reason="stop")
    assert engine_module.completion_of(output, engine.versions_by_request["7"]).tokens["version"].tolist() == versions


@pytest.mark.slow
def test_a_sample_survives_being_put_back_into_the_queue(engine, policies):
    """The same weights: each validation amid a response puts it back, and it goes on with its seed, to the bit."""
    sync(engine, policies, 0)
    whole = engine.generate(PROMPTS, range(8), LONG)
    request_ids = engine.start(PROMPTS, range(8), LONG, priority=1)
    for _ in range(3):
        engine.generate([PROMPTS[0]], [9], SHORT)
    for before, after in zip(whole, engine.wait(request_ids), strict=True):
        assert before.ids == after.ids and (before.tokens["logp"] == after.tokens["logp"]).all()


@pytest.mark.slow
def test_a_validation_goes_before_what_is_carried(engine, policies):
    """With more requests in the engine than it runs at once."""
    sync(engine, policies, 0)
    room = engine.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
    request_ids = engine.start([[5, 6, 7]] * (room + 20), range(room + 20), LONG, priority=1)
    engine.generate([[5, 6]], [0], SamplingOptions(TEMPERATURE, 2))
    engine.generate([[5, 6]] * 3, range(3), SHORT)
    assert len(engine.versions_by_request) >= room, "a validation waits for none of them"
    engine.llm.llm_engine.abort_request(request_ids)
    engine.versions_by_request.clear()


class Hints(envs.Environment):
    """Two observations, whatever the replies are."""

    def step(self, turns):
        numbers = [turn.state.get("number", 0) for turn in turns]
        hint = ({"role": "user", "content": "hint"},)
        return [envs.StepResult(0.5, "ok", number == 2, hint, {"number": number + 1}) for number in numbers]


@pytest.mark.slow
def test_conversations_of_several_turns_go_on_over_weight_changes(engine, policies, tiny, one_rank, monkeypatch):
    """Two environments, each token of the weights of its version; a turn leaves the cache of what runs beside it."""
    tokenizer, resets = Tokenizer(tiny[0]), []
    monkeypatch.setattr(engine, "stop_token_ids", list(range(0, 250, 20)))
    sampler = Sampler(engine, tokenizer, {"exact": envs.Exact(), "hints": Hints()}, one_rank[0], max_turns=3)
    messages = [{"role": "user", "content": "1+1"}]
    ids = tokenizer.render(messages)
    rows = [Problem(i, messages, "2", ("hints", "exact")[i % 2], ids) for i in range(8)]
    sync(engine, policies, 0)
    batches, lengths = [], (SHORT, SHORT, LONG, LONG)
    for step, length in enumerate(lengths):
        batches.append(sampler.start([(2 * step + i, rows[2 * step + i]) for i in (0, 1)], 4, length, (7,), step + 1))
    reset = engine.llm.reset_prefix_cache
    monkeypatch.setattr(engine.llm, "reset_prefix_cache", lambda **words: resets.append(words) or reset(**words))
    samples = []
    for version, batch in enumerate(batches):
        samples += sampler.finish(batch)
        assert len(resets) == version, "one for each sync"
        assert version or max(s.num_turns for s in samples) > 1 < len(engine.versions_by_request)
        if version < 3:
            sync(engine, policies, version + 1)
    for s in samples:
        gaps = gap_of_each(policies, s.sequence.prompt_ids, s.sequence.tokens)
        assert gaps[s.sequence.tokens["mask"]].max() <= 1e-4
    seen = [set(s.sequence.tokens["version"][s.sequence.tokens["mask"]].tolist()) for s in samples]
    assert {s.num_turns for s in samples if s.env_name == "hints"} >= {1, 3} and {0, 1} in seen and len(seen) == 32
    assert all(s.num_turns == 1 for s in samples if s.env_name == "exact")


# ------------------------------------------------------------------------------------------------------------ pacing


def length_of(seed):
    """Of a reply: log-normal, the longest a hundred times the median."""
    return 1 + int(20 * np.exp(1.2 * np.random.default_rng(seed).normal()))


def timed(slots):
    """An engine of which no token means anything, and a token takes a tick."""
    engine = FakeEngine(lambda seed, _: np.zeros((2, length_of(seed)), np.int32), length_of, slots)
    engine.max_total_tokens, engine.weight_version = 10**6, 0
    return engine


def simulate(max_age, ranks, *, num_steps, slots):
    """Steps of 10 groups of 2: (samples of each step, ticks that each step took and those it needed, the engine)."""
    rows = [Problem(i, [], "1", "exact", [1, 2]) for i in range(10 * num_steps)]
    grpo = GRPOConfig(
        num_prompts_per_step=10,
        num_generations_per_prompt=2,
        async_grpo=AsyncGRPOConfig(enabled=True, max_trajectory_age_steps=max_age),
    )
    cfg = Config(grpo=grpo, data=DataConfig(shuffle=False))
    engine = timed(slots)
    sampler = Sampler(engine, FakeTokenizer(), {"exact": envs.Exact()}, ranks, ahead=Ahead())
    mixture = Mixture([Dataset("rows.jsonl", rows, "", "rows")], cfg)
    cursor, steps, waits, ages = mixture.start(), [], [], []
    for step in range(1, num_steps + 1):
        before = engine.ticks
        due = {request.request_id for request in sampler.ahead.batches[0][0]} if sampler.ahead.batches else set()
        samples = sample_step(sampler, cfg, mixture, cursor, step, num_steps)
        needed = max((engine.ended[name] for name in due), default=engine.ticks)
        waits.append((engine.ticks, max(before, needed)))
        check_versions(samples.trained, step - 1, cfg.grpo)
        numbers = age_metrics(samples.trained, step, sampler.groups_under_way())
        assert numbers["max_trajectory_age"] <= max_age
        cursor, engine.weight_version = samples.cursor, step
        steps.append(samples.trained)
        ages.append(numbers["avg_trajectory_age"])
    return steps, waits, ages, engine


@pytest.mark.slow
@pytest.mark.parametrize(("max_age", "num_steps"), [(1, 100), (2, 200), (4, 100)])
def test_pacing(one_rank, max_age, num_steps):
    """Up to 10,000 groups: each is trained once, at the step it was begun for, however long it takes."""
    steps, waits, ages, engine = simulate(max_age, one_rank[0], num_steps=num_steps, slots=20)
    assert [[s.row_id for s in step[::2]] for step in steps] == np.arange(10 * num_steps).reshape(-1, 10).tolist()
    trained = sorted(len(s.sequence.output_ids) for step in steps for s in step)
    assert trained == sorted(length_of(request.seed) for request in engine.started)
    assert trained[-1] > 20 * trained[10 * num_steps]
    assert waits == [(needed, needed) for _, needed in waits], "no step waits for more than its own groups"
    priorities = [request.priority for request in engine.started]
    assert priorities == np.repeat(np.arange(1, num_steps + 1), 20).tolist(), "oldest first"
    assert engine.is_idle and not engine.unclaimed
    assert 0.2 < np.mean(ages) < max_age


def test_what_is_carried_fills_the_places_that_long_responses_leave(one_rank):
    """Ticks for the same 500 groups: places that wait for the longest response of a step cost most without it."""
    ticks = [simulate(max_age, one_rank[0], num_steps=50, slots=20)[3].ticks for max_age in (0, 1, 2)]
    assert ticks[0] > 1.5 * ticks[1] > 1.5 * ticks[2], ticks


def test_a_users_sampler_sees_the_newest_metrics(one_rank):
    """Also for a batch that dynamic sampling draws amid a step, behind those that were drawn in steps before."""
    seen = []

    def draw(before, count):
        seen.append(before["records"]["step"])
        rows = [Problem(before["position"] + i, [], "1", "exact", [1, 2]) for i in range(count)]
        return rows, before | {"position": before["position"] + count}

    grpo = replace(
        GRPOConfig(num_prompts_per_step=2, num_generations_per_prompt=2),
        use_dynamic_sampling=True,
        dynamic_sampling_max_gen_batches=3,
    )
    cfg = Config(grpo=replace(grpo, async_grpo=AsyncGRPOConfig(enabled=True, max_trajectory_age_steps=2)))
    sampler = Sampler(timed(9), FakeTokenizer(), {"exact": envs.Exact()}, one_rank[0], ahead=Ahead())
    for step in (1, 2):
        with pytest.raises(StopRun, match="3 batches"):  # no group has unequal rewards
            sample_step(sampler, cfg, SimpleNamespace(draw=draw), {"position": 9, "records": {"step": step}}, step, 99)
    assert seen == [1] * 5 + [2] * 3
