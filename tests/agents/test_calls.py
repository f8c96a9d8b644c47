"""Prompts of calls with the templates of real models, vLLM's parsers by name, and what an agent may give."""

import json
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest

from agents.calls import Refused, Request, Rollout, link_of, read_message
from agents.environment import Agent
from agents.worker import GIVEN, run
from config import AgentConfig, ChatServerConfig, ConfigError
from graders.pool import Graded
from hf.tokenizer import Tokenizer

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": [2]}'}}
CHATML = (
    "{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}<|end|>\n"
    "{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
)


def request(*messages, **options):
    return Request.model_validate_json(json.dumps({"messages": messages} | options))


def reply_of(call, tokenizer, text, ends=True):
    ids = tokenizer.backend.encode(text, add_special_tokens=False).ids + tokenizer.eos_token_ids[:1] * ends
    zeros = np.zeros(len(ids), np.float32)
    call.completion = SimpleNamespace(ids=np.int32(ids), logps=zeros, versions=zeros, finish_reason="stop")


@pytest.fixture
def tokenizer(tiny):
    return Tokenizer(tiny[0], CHATML)


def test_what_clients_add_or_write_otherwise_is_no_other_message():
    plain = {"role": "assistant", "content": "x", "tool_calls": [CALL]}
    other = json.loads(json.dumps(plain)) | {"refusal": None, "audio": None, "function_call": None, "content": " x\n"}
    other["tool_calls"][0]["function"]["arguments"] = {"a": [2], "b": 1}
    other["reasoning_content"] = "hm"
    one, same = (link_of(read_message(message)) for message in (plain, other))
    assert one == same
    for change in ({"content": "y"}, {"role": "user"}, {"tool_calls": []}, {"tool_calls": [CALL, CALL]}):
        assert link_of(read_message(plain | change)) != one
    # The template may ask whether there are calls: a client's null is none.
    assert read_message({"role": "assistant", "content": "x", "tool_calls": None}) == {
        "role": "assistant",
        "content": "x",
    }


def test_a_tree_of_calls(tokenizer):
    rollout, user = Rollout((1, 2), 250, 8), {"role": "user", "content": "hi"}
    [first] = rollout.ask(1, request(user), 10, tokenizer)
    reply_of(first, tokenizer, "a")
    first.add_reply({"role": "assistant", "content": "a"}, "")
    said = [user, {"role": "assistant", "content": "a "}]
    two = rollout.ask(2, request(*said, {"role": "user", "content": "?"}, n=2), 10, tokenizer)
    [other] = rollout.ask(3, request(*said, {"role": "user", "content": "!"}), 10, tokenizer)
    [again] = rollout.ask(4, request(user), 10, tokenizer)
    [changed] = rollout.ask(5, request({"role": "system", "content": "s"}, *said, user), 10, tokenizer)
    assert [call.parent for call in (*two, other, again, changed)] == [first, first, first, None, None]
    assert two[0].prompt_ids == two[1].prompt_ids and len({call.seed for call in rollout.calls}) == 6
    assert again.prompt_ids == first.prompt_ids and again.seed != first.seed
    assert (
        tokenizer.decode(other.prompt_ids[len(first.ids) :], special=True) == "\n<|user|>user\n!<|end|>\n<|assistant|>"
    )
    for call in rollout.calls[1:]:
        reply_of(call, tokenizer, "b")
    rows = rollout.rows()
    assert sorted(map(len, rows)) == [1, 1, 1, 1, 2] and [first] != rows[0]
    assert {call for row in rows for call in row} == set(rollout.calls)
    rollout.forget(again.ask)
    assert rollout.ask(6, request(user), 10, tokenizer)[0].seed == again.seed
    with pytest.raises(Refused, match="max_calls=8") as refused:
        rollout.ask(7, request(user, n=3), 10, tokenizer)
    assert refused.value.status == 429


PARTS = {"reward": 2, "rewards": {"a": np.float32(0.5)}, "extracted": 0}
NAN = float("nan")
GIVES = [  # what an agent gives -> (reward, outcome, rewards, extracted), whether it counts as the policy's failure
    (1, (1.0, "ok", {}, None), False),
    (True, (1.0, "ok", {}, None), False),
    (np.float32(-0.5), (-0.5, "wrong", {}, None), False),
    (Decimal("0.25"), (0.25, "ok", {}, None), False),
    (PARTS, (2.0, "ok", {"a": 0.5}, "0"), False),
    ({"reward": 1, "outcome": "wrong"}, (1.0, "wrong", {}, None), False),
    ({"reward": 1, "outcome": "error"}, (1.0, "error", {}, None), False),
    (None, (0.0, "error", {}, None), False),
    (NAN, (0.0, "error", {}, None), False),
    (10**400, (0.0, "error", {}, None), False),
    ({"reward": 1, "rewards": {"a": NAN}}, (0.0, "error", {"a": 0.0}, None), False),
    ("1", (0.0, "error", {}, None), True),
    ([1], (0.0, "error", {}, None), True),
    (object(), (0.0, "error", {}, None), True),
    ({}, (0.0, "error", {}, None), True),
    ({"reward": None}, (0.0, "error", {}, None), True),
    ({"reward": "1", "outcome": "ok"}, (0.0, "error", {}, None), True),
    ({"reward": 1, "done": False}, (0.0, "error", {}, None), True),
    ({"reward": 1, "outcome": ["ok"]}, (0.0, "error", {}, None), True),
    ({"reward": 1, "rewards": {"a": "1"}}, (0.0, "error", {}, None), True),
    ({"reward": 1, "rewards": [1]}, (0.0, "error", {}, None), True),
]


@pytest.mark.parametrize(("value", "expected", "counts"), GIVES, ids=range(len(GIVES)))
def test_what_an_agent_may_give(value, expected, counts, monkeypatch):
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "")
    job = dict.fromkeys(GIVEN, "") | {"function": "copy:copy", "kwargs": {"x": value}}
    agent = object.__new__(Agent)
    agent.cfg = AgentConfig(name="a")
    result = agent.result(None, Graded("ok", json.loads(json.dumps(run(job)))))
    assert (result.reward, result.outcome, result.rewards, result.extracted) == expected
    assert result.state.get("counts", False) == counts
    assert bool(result.state.get("message")) == (expected[1] == "error" and value != {"reward": 1, "outcome": "error"})


@pytest.mark.slow
def test_vllms_parsers_by_name(tiny, capfd):
    from agents.replies import ReplyParser
    from engine import reply_parsers

    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    tokenizer = Tokenizer(tiny[0])
    good = {"hermes": 'So: <tool_call>\n{"name": "f", "arguments": {"a": %d}}\n</tool_call>', "pythonic": "[f(a=%d)]"}
    bad = {"hermes": ['<tool_call>{"name": "f"', "<tool_call>%d</tool_call>"], "pythonic": ["[f(a=%d", "[f(%d)] x"]}
    for name in good:
        parse = ReplyParser(reply_parsers(), tokenizer, ChatServerConfig(tool_parser=name))
        for i in range(20):
            reasoning, content, calls = parse(good[name] % i, tools)
            assert reasoning is None and [c | {"arguments": json.loads(c["arguments"])} for c in calls] == [
                {"name": "f", "arguments": {"a": i}}
            ], content
            assert parse(good[name] % i, None) == (None, good[name] % i, [])
            for text in bad[name]:
                text = text.replace("%d", str(i))
                assert parse(text, tools) == (None, text, [])
    assert ReplyParser(reply_parsers(), tokenizer, ChatServerConfig())("<think>a</think>b", tools) == (
        None,
        "<think>a</think>b",
        [],
    )
    said = capfd.readouterr()
    assert "Traceback" not in said.err + said.out
    with pytest.raises(ConfigError, match=r"http_server_serving_chat_kwargs.*nonesuch"):
        ReplyParser(reply_parsers(), tokenizer, ChatServerConfig(tool_parser="nonesuch"))
