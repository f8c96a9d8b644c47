"""Conversations of several turns: token-exact, masked, bounded, with rewards and reasons that add up."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from dist_case import settings
from environments import ready
from loop import train_once

import base.hf.turns
import config
import envs
import records
from base.hf.tokenizer import Tokenizer
from base.hf.turns import observation_ids
from base.hf.weights import full_tensors
from config import ConfigError
from envs import StepResult
from model import load_policy
from records import Completion, SamplingOptions
from rollout import Conversation, Sampler

TEMPERATURE = 0.8


class Script(envs.Environment):
    """Answers every reply with "hint <turn>"; says what it saw. Done at turn `last` (counted from 0)."""

    reward_names = ("a", *(f"turn {number}" for number in range(10)))

    def __init__(self, last=99, observation=({"role": "user", "content": "hint"},)):
        self.last, self.observation, self.seen = last, observation, []

    def step(self, turns):
        self.seen.append(turns)
        verdicts = []
        for turn in turns:
            number = turn.state.get("number", 0)
            done = number >= self.last
            observation = () if done else tuple(m | {"content": f"{m['content']} {number}"} for m in self.observation)
            rewards = {"a": 0.25, f"turn {number}": 0.5}
            verdicts.append(
                StepResult(
                    0.75, "ok" if done else "wrong", done, observation, {"number": number + 1}, rewards, str(number)
                )
            )
        return verdicts


@pytest.fixture(scope="module")
def policy(one_rank, tiny):
    _, device, mesh = one_rank
    return load_policy(tiny[0], device=device, mesh=mesh)


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return Tokenizer(tiny[0])


@pytest.fixture
def synced(engine, policy, monkeypatch):
    """Random weights hardly ever end a reply: so with many more end tokens."""
    engine.sync(full_tensors(policy, engine.dtype), 3)
    monkeypatch.setattr(engine, "stop_token_ids", [*engine.stop_token_ids, *range(0, 250, 10)])
    return engine


def rows(tokenizer, texts, **fields):
    found = []
    for i, text in enumerate(texts):
        messages = [{"role": "user", "content": text}]
        found.append(records.Problem(i, messages, "1", "script", tokenizer.render(messages), **fields))
    return list(enumerate(found))


@pytest.fixture
def converse(synced, tokenizer, one_rank):
    """Samples of the environment's conversations about these prompts."""

    def sample(environment, prompts, *, num_samples=4, max_new_tokens=20, max_turns=3, max_error_fraction=1.0):
        sampler = Sampler(
            synced,
            tokenizer,
            {"script": environment},
            one_rank[0],
            max_turns=max_turns,
            max_error_fraction=max_error_fraction,
        )
        return sampler.sample(prompts, num_samples, SamplingOptions(TEMPERATURE, max_new_tokens), (7,))

    return sample


def turns_of(sample):
    """The runs of sampled and other tokens: [(sampled, ids, logps)]."""
    tokens = sample.sequence.tokens
    edges = [0, *(np.flatnonzero(np.diff(tokens["mask"])) + 1), len(tokens)]
    runs = [tokens[a:b] for a, b in itertools.pairwise(edges)]
    return [(bool(run["mask"][0]), run["id"].tolist(), run["logp"]) for run in runs]


@pytest.mark.slow
def test_the_trainers_logp_of_every_turn_is_the_samplers(converse, policy, one_rank, tokenizer, tiny):
    """Also against transformers, which shares nothing with us."""
    samples = converse(Script(), rows(tokenizer, [f"{i}+{i}" * (1 + i % 3) for i in range(8)]))
    assert {s.num_turns for s in samples} >= {1, 2, 3} and {s.oldest_version for s in samples} == {3}
    for s in samples:
        s.grade.reward = 1.0
    for max_tokens in (2048, 128):
        cfg = settings(policy={"sequence_packing": config.SequencePackingConfig(train_mb_tokens=max_tokens)})
        metrics, gradients = train_once(policy, samples, [1.0] * len(samples), cfg, one_rank[0], step=3)
        assert gradients and metrics["global_valid_toks"] == sum(s.num_gen_tokens for s in samples)
        assert metrics["logp_gap_max"] <= 1e-4
    longest = sorted(samples, key=lambda s: -s.num_turns)[:8]
    for s in longest:
        ids = torch.tensor(s.sequence.token_ids)
        with torch.no_grad():
            logits_TV = tiny[1](ids[None]).logits[0, len(s.sequence.prompt_ids) - 1 : -1, : tokenizer.vocab_size]
        logp_T = (logits_TV / TEMPERATURE).log_softmax(-1).gather(1, ids[len(s.sequence.prompt_ids) :, None])[:, 0]
        gap_T = (logp_T - torch.from_numpy(s.sequence.tokens["logp"])).abs()
        assert gap_T[torch.from_numpy(s.sequence.tokens["mask"])].max() <= 1e-4 and s.num_turns == 3
        assert (s.sequence.tokens["logp"][~s.sequence.tokens["mask"]] == 0).all()


class Uneven(Script):
    """A reward of its own for every turn of every conversation."""

    def step(self, turns):
        return [
            replace(result, reward=len(turn.completion_ids) % 5 / 4 - result.state["number"])
            for turn, result in zip(turns, super().step(turns), strict=True)
        ]


def test_a_step_trains_each_token_by_the_advantage_of_its_turn(converse, policy, one_rank, tokenizer, tiny):
    """unslothai/unsloth#3615. The gradient of -A logp / N, by transformers and by hand."""
    samples = converse(Uneven(), rows(tokenizer, ["1+1", "2+2"]), num_samples=4)
    assert {s.num_turns for s in samples} >= {2, 3}
    for s in samples:
        parts = [(ids, logps) for sampled, ids, logps in turns_of(s) if sampled]
        assert s.sequence.turn_tokens == [len(ids) for ids, _ in parts]
        assert s.grade.turn_rewards == [len(ids) % 5 / 4 - (turn + 1) for turn, (ids, _) in enumerate(parts)]
        assert s.grade.reward == sum(s.grade.turn_rewards)
    grpo_keys = {"turn_level_advantages": True, "max_rollout_turns": 3, "normalize_rewards": False}
    metrics, ours = train_once(policy, samples, None, settings(grpo=grpo_keys), one_rank[0], step=3)
    oracle = tiny[1]
    oracle.zero_grad()
    largest = 0.0
    for s in samples:
        ids = torch.tensor(s.sequence.token_ids)
        logits_TV = (
            oracle(ids[None]).logits[0, len(s.sequence.prompt_ids) - 1 : -1, : tokenizer.vocab_size] / TEMPERATURE
        )
        logp_T = logits_TV.log_softmax(-1).gather(1, ids[len(s.sequence.prompt_ids) :, None])[:, 0]
        adv_T, end = torch.zeros(len(logp_T)), 0
        for k, (sampled, part, _) in enumerate(turns_of(s)):
            peers = [o for o in samples if o is not s and o.prompt == s.prompt and o.num_turns > k // 2]
            others = [o.grade.turn_rewards[k // 2] for o in peers]
            if sampled and others:
                adv_T[end : end + len(part)] = s.grade.turn_rewards[k // 2] - sum(others) / len(others)
            end += len(part)
        largest = max(largest, adv_T.abs().max().item())
        (-(adv_T * logp_T).sum() / sum(o.num_gen_tokens for o in samples)).backward()
    for name, param in oracle.named_parameters():
        if name in ours:
            assert (ours[name] - param.grad).norm() <= 1e-4 * param.grad.norm(), name
    oracle.zero_grad(set_to_none=True)
    assert metrics["advantage_abs_max"] == pytest.approx(largest, rel=1e-6) and len(ours) > 10


def test_observations_are_the_templates_tokens_behind_the_sampled_ones(converse, synced, tokenizer, monkeypatch):
    """Replies of random bytes, half of them no UTF-8: decoded and encoded again they would be other tokens."""
    environment, asked = Script(), []
    monkeypatch.setattr(base.hf.turns, "observation_ids", lambda *args: asked.append(args) or observation_ids(*args))
    samples = converse(environment, rows(tokenizer, ["1+1", "2+2"]), num_samples=8)
    end = tokenizer.eos_token_ids[0]
    changed = 0
    for s in samples:
        parts = turns_of(s)
        assert [sampled for sampled, _, _ in parts] == [True, False] * (s.num_turns - 1) + [True]
        for k, (sampled, ids, _) in enumerate(parts):
            if sampled:
                assert ids[-1] in synced.stop_token_ids or k == len(parts) - 1  # half a reply is not answered
                changed += tokenizer.backend.encode(tokenizer.decode(ids)).ids != ids
                assert len(ids) <= 20
            else:
                user, assistant = (tokenizer.backend.token_to_id(t) for t in ("<|user|>", "<|assistant|>"))
                hint = tokenizer.backend.encode(f"hint {k // 2}").ids
                assert ids == [user, *hint, assistant]
        assert (
            s.sequence.num_env_tokens
            == sum(len(ids) for sampled, ids, _ in parts if not sampled)
            == int((~s.sequence.tokens["mask"]).sum())
        )
        assert (s.sequence.tokens["logp"][~s.sequence.tokens["mask"]] == 0).all()
        assert s.sequence.num_tokens == len(s.sequence.prompt_ids) + s.num_gen_tokens + s.sequence.num_env_tokens <= 128
    assert changed >= 8 and end not in [i for s in samples for i in s.sequence.tokens["id"][~s.sequence.tokens["mask"]]]
    for _, before, reply_ids, observation, tools in asked:  # the reply as ids only, and whose turn it is
        assert [m["role"] for m in before] == ["user", "assistant"] * (len(before) // 2) + ["user"] and not tools
        assert observation[0]["content"] == f"hint {len(before) // 2}" and reply_ids[-1] in synced.stop_token_ids
    # The whole conversation, as text, with what the environment said.
    third = [turn for turn in itertools.chain(*environment.seen) if turn.state.get("number") == 2]
    last = next(turn for turn in third if turn.messages[0]["content"] == "1+1")
    assert [m["role"] for m in last.messages] == ["user", "assistant"] * 3
    assert [m["content"] for m in last.messages[::2]] == ["1+1", "hint 0", "hint 1"] and last.state == {"number": 2}


def test_rewards_outcomes_and_reasons(converse, synced, tokenizer):
    prompts = rows(tokenizer, ["1+1"], dataset="sums", fields={"level": 3}, tools=[{"name": "t"}])
    for last, max_turns, reason in (
        (0, 1, "stop"),
        (0, 3, "stop"),
        (1, 3, "stop"),
        (2, 3, "stop"),
        (9, 3, "max_turns"),
        (1, 1, "max_turns"),
    ):
        environment = Script(last)
        samples = converse(environment, prompts, num_samples=12, max_turns=max_turns)
        assert environment.seen[0][0].fields == {"level": 3} and {s.dataset for s in samples} == {"sums"}
        whole = [s for s in samples if s.finish_reason != "length"]
        assert whole and {s.finish_reason for s in whole} == {reason}
        for s in whole:
            assert s.num_turns == min(last + 1, max_turns)
            assert s.grade.reward == 0.75 * s.num_turns and s.grade.extracted == str(s.num_turns - 1)
            assert s.grade.rewards == {"a": 0.25 * s.num_turns} | {f"turn {k}": 0.5 for k in range(s.num_turns)}
            assert s.grade.outcome == ("ok" if reason == "stop" else "wrong")
        cut = [s for s in samples if s.finish_reason == "length"]
        for s in cut:  # half a reply gets no answer, whatever the environment says
            sampled, ids, _ = turns_of(s)[-1]
            assert sampled and len(ids) == 20 and ids[-1] not in synced.stop_token_ids and s.num_turns <= max_turns


def test_a_conversation_without_room_ends_truncated(converse, synced, tokenizer, monkeypatch):
    """Of 128 tokens observations of 43 leave room for two turns, one of 128 for one."""
    monkeypatch.setattr(synced, "max_total_tokens", 128)
    prompts = rows(tokenizer, ["1"])
    for size, most in ((40, 4), (120, 1)):
        environment = Script(observation=({"role": "user", "content": "x" * size},))
        samples = converse(environment, prompts, num_samples=8, max_turns=9)
        assert {s.finish_reason for s in samples} == {"length"} and max(s.num_turns for s in samples) <= most
        for s in samples:
            sampled, ids, _ = turns_of(s)[-1]
            assert sampled and s.sequence.num_tokens <= 128  # never an observation that nothing answers
            if s.num_turns < most and size == 120:
                assert len(ids) == 20
    exact = 128 - 3 - 1 - 4  # prompt, a reply of one token, marks and " 0": one token of room is enough, none is not
    first = rows(tokenizer, ["1"])[0][1]
    assert len(first.prompt_ids) == 3
    for size, turns in ((exact - 1, 2), (exact, 1)):
        environment = Script(observation=({"role": "user", "content": "x" * size},))
        found = converse(environment, prompts, num_samples=32, max_turns=2, max_new_tokens=4)
        short = [s for s in found if turns_of(s)[0][1][-1] in synced.stop_token_ids and len(turns_of(s)[0][1]) == 1]
        assert short and {(s.num_turns, s.finish_reason == "length" or turns == 2) for s in short} == {(turns, True)}
        assert {s.sequence.num_tokens for s in short} == {128 if turns == 2 else 4}


def test_rows_with_loss_multiplier_0_are_sampled_but_not_trained_on(converse, tokenizer):
    (sample, *_), (masked, *_) = (converse(Script(), rows(tokenizer, ["1+1"], loss_multiplier=m)) for m in (1.0, 0.0))
    assert masked.sequence.output_ids == sample.sequence.output_ids and masked.grade.reward == sample.grade.reward
    assert masked.sequence.num_env_tokens == sample.sequence.num_env_tokens
    assert sample.num_trained_tokens > 0 and masked.num_trained_tokens == 0 and not masked.sequence.tokens["mask"].any()


def test_an_observation_of_another_form_ends_the_run_at_the_first_turn(converse, tokenizer):
    class Speaks(Script):
        def step(self, turns):
            return [replace(result, observation="hello") for result in super().step(turns)]

    with pytest.raises(ConfigError, match=r"^env_name 'script': step\(\) returned observation='hello'"):
        converse(Speaks(), rows(tokenizer, ["1"]), max_turns=1)


@pytest.mark.parametrize(
    ("end", "opened"),
    [
        ("<think>", "<think>"),
        ("<think>\n", "<think>\n"),
        (" <reasoning_process>\n\n", "<reasoning_process>\n\n"),
        ("<seed:think>", "<seed:think>"),
        ("<think>\n\n</think>\n\n", ""),
        ("<think> so", ""),
        ("<assistant>", ""),
        ("[|assistant|>", ""),
        ("2 <3> ?", ""),
        ("", ""),
    ],
)
def test_an_environment_sees_the_tag_that_the_prompt_left_open(tokenizer, end, opened):
    """TRL#6966: `<think>` of the template is no part of the reply, and a reward for form wants it."""
    plain = Tokenizer(tokenizer.file.parent, template=None)
    messages = [{"role": "user", "content": f"What is 1+1?{end}"}]
    problem = records.Problem(0, messages, "2", "script", plain.render(messages))
    reply = "1+1\n</think>\n<answer>2</answer>"
    tokens = records.make_tokens(tokenizer.backend.encode(reply).ids, version=3, mask=True)
    completion = Completion(tokens, "stop")
    turn = Conversation(problem, 0, 0, SamplingOptions(1.0, 64), (), 0).add_reply(completion, plain)
    assert (turn.opened, turn.whole_reply, turn.raw_reply) == (opened, reply, "")
    (result,) = ready("math_multi_reward", config.EnvConfig()).step([turn])
    assert result.rewards == {"correctness": 1, "integer": 1, "format": float("<think>" in opened)}
    (cut,) = ready("math_multi_reward", config.EnvConfig()).step([replace(turn, finish_reason="length")])
    assert cut.reward == 0 and cut.extracted == ""


@pytest.mark.slow  # the stand-in ends no reply by a special token
def test_an_environment_that_asks_gets_replies_with_their_special_tokens(converse, synced, tokenizer):
    """TRL#2897. The messages, which later turns and a reward model read, are without."""
    plain, asks = Script(0), Script(0)
    asks.special_tokens = True
    for environment in (plain, asks):
        converse(environment, rows(tokenizer, ["1+1", "2+2"]), num_samples=8)
    plain, asks = (
        sorted(itertools.chain(*environment.seen), key=lambda turn: (turn.prompt_ids, turn.completion_ids))
        for environment in (plain, asks)
    )
    for without, turn in zip(plain, asks, strict=True):
        assert without.raw_reply == "" and replace(turn, raw_reply="") == without
        assert turn.raw_reply == tokenizer.backend.decode(turn.completion_ids, skip_special_tokens=False)
    end = tokenizer.added[tokenizer.eos_token_ids[0]]
    assert any(end in turn.raw_reply for turn in asks)
    assert not any(end in turn.messages[-1]["content"] for turn in asks)
