"""The endpoint over vLLM: exact to the token, whatever an agent asks and in whatever order."""

import gzip
import json
import random
import re
import socket
import time
from collections import Counter
from functools import partial
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from agent_case import MAX_TOKENS, OPTIONS, TOOLS, as_calls, eight_calls, endpoint_of, gap_of, post, record_draws, serve

from base.agents.calls import sequence_of
from base.agents.endpoint import Endpoint, certain_text
from base.agents.parser import Parsed
from base.agents.server import RESET_SECONDS
from base.check import preflight
from base.hf.tokenizer import Tokenizer
from base.inputs.reader import load
from examples.agents import function_call
from pack import pack_samples, rows_of, to_device
from records import Grade, Sample

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
NUM_ROLLOUTS = 8  # 64 in docs/LOG.md


@pytest.fixture
def case(served):
    return served


@pytest.fixture
def endpoint(case):
    found = endpoint_of(case)
    yield found
    found.shut_down()


def samples_of(rollouts):
    samples = []
    for number, rollout in enumerate(rollouts):
        for i, row in enumerate(rollout.rows()):
            sequence = sequence_of(row, rollout.turns, True)
            samples.append(Sample(number, i, 0, [sequence], advantage=1.0, grade=Grade(1.0)))
    return samples


def run(endpoint, count, wait=lambda number: None):
    opened = [endpoint.open((7, number), OPTIONS, -1, 100) for number in range(count)]
    programs = [
        lambda url=url, number=number: eight_calls(url, number, lambda: wait(number))
        for number, (_, url) in enumerate(opened)
    ]
    assert serve(endpoint, programs) == [None] * count
    return [endpoint.close(number) for number, _ in opened]


def test_every_id_is_the_engines_and_is_trained_once(case, endpoint, monkeypatch):
    drawn = record_draws(case.engine, monkeypatch)
    rollouts = run(endpoint, NUM_ROLLOUTS, lambda number: time.sleep(random.random() / 50))
    calls = [call for rollout in rollouts for call in rollout.calls]
    assert len(calls) == 8 * NUM_ROLLOUTS and not case.engine.unclaimed and case.engine.is_idle
    assert drawn == Counter((tuple(call.prompt_ids), tuple(call.completion.ids)) for call in calls)
    continued = [call for call in calls if call.parent]
    assert len(continued) >= 3 * NUM_ROLLOUTS and {len(rollout.rows()) for rollout in rollouts} <= {4, 5}
    assert all(call.prompt_ids[: len(call.parent.ids)] == call.parent.ids for call in continued)
    samples = samples_of(rollouts)
    trained = [call for call in calls if call.request.train is not False]
    assert sum(s.num_trained_tokens for s in samples) == sum(len(call.completion.ids) for call in trained)
    ids = Counter(tuple(call.completion.ids) for call in trained)
    edges = [np.flatnonzero(np.diff(np.r_[False, s.sequence.tokens["mask"], False])) for s in samples]
    runs = Counter(
        tuple(s.sequence.tokens["id"][a:b].tolist())
        for s, e in zip(samples, edges, strict=True)
        for a, b in e.reshape(-1, 2)
    )
    assert runs == ids
    # Other ids, had the whole conversation been encoded again: what this is about.
    again = [case.tokenizer.render(c.request.messages, c.request.tools, escape=True) for c in continued]
    assert sum(ids != call.prompt_ids for ids, call in zip(again, continued, strict=True)) > len(continued) / 2
    assert largest_gap(case, samples) < 2e-5
    # Once more, in another order: the same ids in the same rows.
    others = samples_of(run(endpoint, NUM_ROLLOUTS, lambda number: time.sleep(random.random() / 50)))
    assert len(samples) == len(others)
    for one, other in zip(samples, others, strict=True):
        assert one.sequence.prompt_ids == other.sequence.prompt_ids
        assert (one.sequence.tokens == other.sequence.tokens).all() and (one.sequence.tokens["version"] == 3).all()


def largest_gap(case, samples):
    micros = [to_device(pack, torch.device("cpu")) for pack in pack_samples([[row] for row in rows_of(samples)], 2048)]
    return max(gap_of(case, micro) for micro in micros)


USER = [{"role": "user", "content": "hi"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
RIGHT = [
    {},
    {"max_tokens": 1},
    {"max_completion_tokens": 3, "max_tokens": None},
    {"n": 3},
    {"n": None, "stop": None, "tools": None, "tool_choice": None, "stream": None, "logprobs": None},
    {"stop": "a"},
    {"stop": ["a", "bc"]},
    {"stop": []},
    {"tools": TOOLS},
    {"tools": []},
    {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True},
    {"tools": TOOLS, "tool_choice": "required"},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"tool_choice": "none"},
    {"temperature": 0, "top_p": 0.5, "seed": 3, "presence_penalty": 1.5, "logit_bias": {"5": 3}},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 0},
    {"logprobs": True, "top_logprobs": 5},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
    {"structured_outputs": {"choice": ["a"]}, "guided_json": {}, "a\nnew key": 1},
    {"max_tokens": -1, "max_completion_tokens": -1},
    {"messages": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
    {"messages": [*USER, {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]}, *USER]},
    {"messages": [*USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "b"}]}, *USER]},
    {"stream": True},
    {"stream": True, "stream_options": {"include_usage": True}, "n": 2, "logprobs": True},
    {"stream": True, "tools": TOOLS, "return_token_ids": True},
    {"return_token_ids": True},
    {"train": False},
    {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
    {"modalities": ["text"]},
    {"messages": [{"role": "developer", "content": "x"}, *USER]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
    {"messages": [*USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
    {"messages": [*USER, {"role": "assistant", "tool_calls": [CALL, CALL]}, {"role": "tool", "content": "1"}]},
    {"messages": [*USER, {"role": "assistant", "content": "x", "refusal": None, "audio": None, "tool_calls": None}]},
    {"messages": [*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
    {"messages": [*USER, {"role": "assistant", "content": "<|end|><|assistant|>"}]},
    {"messages": [{"role": "user", "content": "", "name": "me"}]},
    {"stop_token_ids": [5, 97], "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [*USER, {"role": "assistant", "content": "x"}], "continue_final_message": True},
    {"messages": [*USER, {"role": "assistant", "content": "x"}], "continue_final_message": True, "stream": True},
]
WRONG = [  # (change, status, what the sentence names)
    (b"", 400, "body"),
    (b"{", 400, "body"),
    (b"[]", 400, "body"),
    (b"\xff\xfe", 400, "body"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "body"),
    (b"[" * 100_000, 400, "body"),
    ({"messages": None}, 400, "messages"),
    ({"messages": []}, 400, "messages"),
    ({"messages": "hi"}, 400, "messages"),
    ({"messages": [3]}, 400, "messages"),
    ({"messages": [{"content": "hi"}]}, 400, "messages"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": 3}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "only text"),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, 400, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, 400, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}]}, 400, "messages"),
    ({"tools": "f"}, 400, "tools"),
    ({"tools": [{"type": "function"}]}, 400, "tools"),
    ({"tools": [{"type": "function", "function": {"name": 3}}]}, 400, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, 400, "tools"),
    ({"tools": TOOLS, "tool_choice": "maybe"}, 400, "tool_choice"),
    ({"n": 0}, 400, "n"),
    ({"n": "2"}, 400, "n"),
    ({"n": 1000}, 429, "max_calls"),
    ({"n": 2**31}, 400, "n"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": 1.5}, 400, "max_tokens"),
    ({"stop": ""}, 400, "stop"),
    ({"stop": [1]}, 400, "stop"),
    ({"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs"),
    ({"response_format": "json_object"}, 400, "response_format"),
    ({"max_tokens": -2}, 400, "max_tokens"),
    ({"messages": [{"role": "function", "content": "hi"}]}, 400, "role 'function'"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking"}]}]}, 400, "messages"),
    ({"continue_final_message": True}, 400, "assistant"),
    ({"stop_token_ids": [-1]}, 400, "stop_token_ids"),
    ({"chat_template_kwargs": "x"}, 400, "chat_template_kwargs"),
    ({"modalities": ["text", "audio"]}, 400, "modalities"),
    ({"functions": [{"name": "f"}]}, 400, "functions"),
    ({"stream": "yes"}, 400, "stream"),
    ({"train": 0}, 400, "train"),
    ({"messages": [{"role": "user", "content": "x" * MAX_TOKENS}]}, 400, f"maximum context length is {MAX_TOKENS}"),
    ({"messages": [{"role": "user", "content": "x" * (1 << 20)}]}, 400, "max_total_sequence_length"),
    ({"messages": [{"role": "user", "content": "x" * (17 << 20)}]}, 413, "16 MiB"),
]


def test_requests_right_and_wrong(endpoint, capfd):
    key, url = endpoint.open((1,), OPTIONS, -1, 500)
    wrong = [body if isinstance(body, bytes) else {"messages": USER} | body for body, *_ in WRONG]
    bodies = [{"model": "any", "messages": USER} | body for body in RIGHT] + wrong
    answers = serve(endpoint, [lambda body=body: post(url, body, timeout=60) for body in bodies])
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    for body, answer in zip(RIGHT, answers, strict=False):
        assert answer.status_code == 200, (body, answer.text)
        if not body.get("stream"):
            found = ChatCompletion.model_validate(answer.json())
            assert len(found.choices) == (body.get("n") or 1) and found.usage.completion_tokens
            for choice in found.choices:
                assert (choice.finish_reason == "tool_calls") <= bool(choice.message.tool_calls)
                assert bool(choice.logprobs) == bool(body.get("logprobs"))
                for token in choice.logprobs.content if choice.logprobs else ():
                    logps = [other.logprob for other in token.top_logprobs]
                    assert len(logps) == body.get("top_logprobs", 0) and logps == sorted(logps, reverse=True)
                    assert not logps or token.logprob in logps or token.logprob < logps[-1]
            assert ("prompt_token_ids" in answer.json()) == bool(body.get("return_token_ids"))
            continue
        *lines, last = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        chunks = [ChatCompletionChunk.model_validate(json.loads(line.removeprefix("data: "))) for line in lines]
        assert last == "data: [DONE]" and bool(chunks[-1].usage) == ("stream_options" in body)
        ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
        assert len([end for end in ends if end]) == (body.get("n") or 1)
    for (body, status, named), answer in zip(WRONG, answers[len(RIGHT) :], strict=True):
        assert answer.status_code == status, (str(body)[:200], answer.text)
        error = answer.json()["error"]
        assert named in error["message"] and error["code"], (str(body)[:200], error)
    said = capfd.readouterr()
    assert said.err == ""
    for name in ("temperature", "tool_choice", "response_format", "structured_outputs", "guided_json"):
        assert said.out.count(f" {name}=") == 1, name
    for name in ("user", "metadata", "parallel_tool_calls", "stream", "model", "top_p=1", "top_logprobs"):
        assert f" {name}=" not in said.out, name
    assert all(line.startswith("NOTE: ") for line in said.out.splitlines())
    endpoint.close(key)


def test_bodies_that_are_packed_and_the_other_paths(endpoint):
    key, url = endpoint.open((1,), OPTIONS, -1, 500)
    plain = json.dumps({"messages": USER}).encode()
    bomb = gzip.compress(b" " * (1 << 30))
    assert len(bomb) < 2 << 20
    rows = [
        (gzip.compress(plain), "gzip", 200),
        (plain, "identity", 200),
        (plain, "gzip", 400),
        (gzip.compress(plain)[:-3], "gzip", 400),
        (b"", "gzip", 400),
        (gzip.compress(b"{"), "gzip", 400),
        (bomb, "gzip", 413),
        (plain, "br", 415),
    ]

    def packed(body, encoding):
        return post(url, body, headers={"content-encoding": encoding}, timeout=60)

    answers = serve(endpoint, [lambda row=row: packed(*row[:2]) for row in rows])
    assert [answer.status_code for answer in answers] == [status for *_, status in rows]
    for name in ("policy", "gpt-4.1", "org/name"):
        assert httpx.get(f"{url}/models/{name}").json()["object"] == "model"
    wire = post(url, {"prompt": "hi"}, path="/completions")
    assert wire.status_code == 404 and "chat/completions" in wire.json()["error"]["message"]
    assert httpx.get(f"{url}/chat/completions").status_code == 404
    endpoint.close(key)
    assert httpx.get(f"{url}/models/policy").status_code == 404


@pytest.mark.parametrize("num_guesses", [80, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_key_is_one_rollouts_and_dies_with_it(endpoint, num_guesses):
    opened = [endpoint.open((n,), OPTIONS, -1, 10) for n in range(2)]
    root = opened[0][1].split("/rollout/")[0]
    assert len(opened[0][1].split("/")[-2]) >= 22 and opened[0][1] != opened[1][1]

    def guess():
        with httpx.Client() as client:
            codes = set()
            for name in ("chat/completions", "responses", "messages"):
                keys = (random.randbytes(16).hex() for _ in range(num_guesses))
                codes |= {client.post(f"{root}/rollout/{key}/v1/{name}", json={}).status_code for key in keys}
            keys = (random.randbytes(16).hex() for _ in range(num_guesses))
            codes |= {client.get(f"{root}/rollout/{key}/v1/models").status_code for key in keys}
            for path in ("", "/", "/rollout", "/rollout//v1/models", "/docs", "/rollout/%2e%2e/v1/models", "/metrics"):
                codes.add(client.get(root + path).status_code)
            return codes, client.get(opened[1][1] + "/models").json()["data"][0]["id"]

    assert serve(endpoint, [guess]) == [({404}, "policy")]
    endpoint.close(opened[0][0])
    [late, alive] = serve(endpoint, [lambda url=url: post(url, {"messages": USER}) for _, url in opened])
    assert (late.status_code, alive.status_code) == (404, 200)
    port = endpoint.server.port
    with pytest.raises(httpx.ConnectError):  # another interface of this machine
        httpx.get(f"http://{other_address()}:{port}/", timeout=2).raise_for_status()
    endpoint.shut_down()
    with pytest.raises(httpx.ConnectError):
        httpx.get(root)


def other_address():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
        except OSError:
            return "127.0.0.2"
        return probe.getsockname()[0]


def test_a_client_that_goes_is_forgotten_and_gets_the_same_reply_when_it_asks_again(case, endpoint):
    number, url = endpoint.open((5,), OPTIONS, -1, 10)
    rollout = endpoint.rollouts[number]
    for stream in (False, True):
        with httpx.Client() as client:

            def go(stream=stream):
                with pytest.raises(httpx.ReadTimeout):
                    client.post(url + "/chat/completions", json={"messages": USER, "stream": stream}, timeout=0.3)

            thread = Thread(target=go)
            thread.start()
            while not endpoint.running:
                endpoint.before_step()  # the engine has it, and does not move
            seed = rollout.calls[0].seed
            thread.join()
        while endpoint.running:
            endpoint.before_step()
        assert not rollout.calls and case.engine.is_idle and not case.engine.unclaimed
        [answer] = serve(endpoint, [lambda: post(url, {"messages": USER, "return_token_ids": True})])
        assert answer.status_code == 200 and [call.seed for call in rollout.calls] == [seed]
        assert len(rollout.rows()) == 1
        rollout.forget(rollout.calls[0].ask)
    endpoint.close(number)


REFUSED = [
    {"stop_token_ids": [128_009]},  # of Llama
    {"stop_token_ids": [5, 97, 259]},  # one past the last
    {"stop_token_ids": [1 << 31]},
    {"stop_token_ids": [1 << 70], "n": 2},
    {"stop_token_ids": [151_645], "stream": True},
    {"stop": ["x"] * 17},
    {"stop": "x" * 1001},
    {"stop": ["x", "y" * 400_000], "stream": True},
]


def test_h1_m1_values_that_no_engine_takes_cost_their_request(case, endpoint, monkeypatch):
    """Also those that only the engine knows: what it raises at a request is that request's failure."""
    key, url = endpoint.open((1,), OPTIONS, -1, 100)
    tokens = case.engine.vocab_size
    assert REFUSED[1]["stop_token_ids"][-1] == tokens
    taken = [{"stop_token_ids": [tokens - 1]}, {"stop": ["y" * 1000] * 16}, {"stop": ["z"] * 16, "stream": True}]
    bodies = [{"messages": USER} | body for body in [*REFUSED, *taken]]
    answers = serve(endpoint, [lambda body=body: post(url, body, timeout=60) for body in bodies])
    assert [answer.status_code for answer in answers] == [400] * len(REFUSED) + [200] * len(taken)
    assert all(name in answers[i].json()["error"]["message"] for i, name in ((0, f"{tokens} tokens"), (5, "stop")))
    sequences = {"messages": USER, "max_tokens": 2, "stop_sequences": ["x"] * 17}
    [answer] = serve(endpoint, [lambda: post(url, sequences, path="/messages")])
    assert answer.status_code == 400 and "stop_sequences" in answer.json()["error"]["message"]

    add = case.engine.llm.llm_engine.add_request
    kinds = [ValueError, TypeError, AssertionError, OverflowError, RuntimeError]

    def refuse(request_id, request, params, **how):
        if params.max_tokens == 7:
            raise kinds[0]("a value of seven")
        if params.max_tokens == 6 and int(request_id) % 2:  # the second of two
            raise ValueError("the second one")
        add(request_id, request, params, **how)

    monkeypatch.setattr(case.engine.llm.llm_engine, "add_request", refuse)
    while kinds:
        bad, good = ({"messages": USER, "max_tokens": size} for size in (7, 3))
        answers = serve(endpoint, [lambda body=body: post(url, body) for body in (bad, good)])
        assert [answer.status_code for answer in answers] == [400, 200]
        assert "a value of seven" in answers[0].json()["error"]["message"]
        kinds.pop(0)
    [two] = serve(endpoint, [lambda: post(url, {"messages": USER, "max_tokens": 6, "n": 2})])
    assert two.status_code == 400 and case.engine.is_idle and not case.engine.unclaimed
    assert len(endpoint.close(key).calls) == len(taken) + 5 and endpoint.server.faults == []


def test_m1_a_streams_text_ends_before_what_may_become_a_stop_string():
    rng = random.Random(0)
    for _ in range(3000):
        text, *strings = ("".join(rng.choices("ab", k=rng.randrange(1, 9))) for _ in range(4))
        size = len(text)
        for string in strings:
            for start in range(1, len(string)):
                if text.endswith(string[:start]):
                    size = min(size, len(text) - start)
        assert certain_text(text, strings) == text[:size]


def test_l1_a_client_that_has_closed_its_side_gets_its_answer(case, endpoint, capfd):
    key, url = endpoint.open((1,), OPTIONS, -1, 100)
    port = endpoint.server.port
    path = url.partition(f":{port}")[2]
    wires = {"chat/completions": {}, "responses": {"input": "hi"}, "messages": {"max_tokens": 3}}

    def ask(name, more, version="1.1"):
        body = json.dumps({"messages": USER} | more | wires[name]).encode()
        head = f"POST {path}/{name} HTTP/{version}\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(head + body)
            client.shutdown(socket.SHUT_WR)
            content = b""
            while piece := client.recv(10_000):
                content += piece
            return content

    asked = [(name, more) for name in wires for more in ({}, {"stream": True})] * 3
    answers = serve(endpoint, [partial(ask, *words) for words in [*asked, ("chat/completions", {}, "1.0")]])
    for content in answers:
        assert content.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").startswith(b"HTTP/1.1 200"), content
        assert content.endswith(b"}") or content.endswith(b"\n\n") or content.endswith(b"0\r\n\r\n")
    time.sleep(2 * RESET_SECONDS)
    assert len(endpoint.close(key).calls) == len(answers) and capfd.readouterr().err == ""


def test_f4_the_user_hears_why_no_tool_is_ever_called(case, capfd):
    def as_text(text, *_):
        return Parsed(None, text, [])

    as_text.content_of_beginning = lambda text, *_: text
    as_text.needs_special_tokens = as_text.reads_calls = False
    blind, by_system, by_switch = (
        Tokenizer(case.tokenizer.file.parent, "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}" + shown)
        for shown in ("", "{{ tools if messages[0].role == 'system' }}", "{{ tools if show }}")
    )
    unseen, shown = "template does not write them", {"chat_template_kwargs": {"show": True}}
    for tokenizer, parse, more, named in (
        (case.tokenizer, as_text, {}, ["tool_parser"]),
        (blind, as_calls, {}, [unseen]),
        (blind, as_text, {}, ["tool_parser", unseen]),
        (case.tokenizer, as_calls, {}, []),
        (by_system, as_calls, {}, [unseen]),
        (by_system, as_calls, {"messages": [{"role": "system", "content": "s"}, *USER]}, []),
        (by_switch, as_calls, {}, [unseen]),
        (by_switch, as_calls, shown, []),
    ):
        endpoint = Endpoint(case.engine, tokenizer, case.ranks, parse)
        _, url = endpoint.open((1,), OPTIONS, -1, 100)
        bodies = [{"messages": USER} | more for more in ({}, {"tools": TOOLS, "tool_choice": "none"})]
        bodies += [{"messages": USER, "tools": TOOLS} | more] * 2
        capfd.readouterr()
        for body in bodies[:2]:
            serve(endpoint, [lambda body=body, url=url: post(url, body)])
        assert capfd.readouterr().out == ""
        for body in bodies[2:]:
            serve(endpoint, [lambda body=body, url=url: post(url, body)])
        said = capfd.readouterr().out.splitlines()
        assert len(said) == len(named) and all(word in line for word, line in zip(named, said, strict=True))
        endpoint.shut_down()


def test_f4_each_request_is_looked_at_until_the_user_has_heard(case, capfd):
    """The first tools of a run may be shown, and later ones not."""
    asked, by_system = {"messages": USER}, {"messages": [{"role": "system", "content": "s"}, *USER]}
    bare = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    hides_some = "{% for t in (tools or [])[:1] %}[{{ t.function.name }}]{% endfor %}" + bare
    system_only = "{{ tools if messages[0].role == 'system' }}" + bare
    second = [TOOLS[0] | {"function": TOOLS[0]["function"] | {"name": "another"}}]
    tools, both = {"tools": TOOLS}, {"tools": TOOLS + second}
    not_yet = {"tool_choice": "none"}
    for template, bodies, told_at in (
        (system_only, [by_system | tools, by_system | tools, asked | tools, asked | tools], 2),
        (system_only, [asked, asked | tools | not_yet, by_system | tools, asked | tools], 3),
        (hides_some, [asked | tools, by_system | tools, asked | both, by_system | both], 2),
        (hides_some, [asked | tools, asked | {"tools": second}], None),
        (bare, [asked | tools | not_yet, "goes on", "goes on"], 1),
    ):
        endpoint = Endpoint(case.engine, Tokenizer(case.tokenizer.file.parent, template), case.ranks, as_calls)
        _, url = endpoint.open((1,), OPTIONS, -1, 100)
        talk = []
        for number, body in enumerate(bodies):
            if body == "goes on":
                body = tools | {"messages": talk}
            capfd.readouterr()
            [answer] = serve(endpoint, [lambda body=body, url=url: post(url, body)])
            talk = [*body["messages"], answer.json()["choices"][0]["message"], *USER]
            is_told = "template does not write them" in capfd.readouterr().out
            assert is_told == (number == told_at), (template, number)
        endpoint.shut_down()


def test_f4_the_example_whose_policy_calls_a_function(case, capfd):
    """A scripted policy: it calls the function, or what is none, and answers with what comes back."""
    [row] = function_call.rows(SimpleNamespace(subset="7:8"))
    a, b = map(int, re.findall(r"\d+", row["problem"]))
    calls = [{"name": "multiply", "arguments": json.dumps({"a": a, "b": b})}]

    def parse(text, tools, template_kwargs, prompt_ids):
        prompt = case.tokenizer.decode(prompt_ids)
        if row["answer"] in prompt or not tools:
            return Parsed(None, f"It is {int(row['answer']):,}", [])
        return Parsed(None, None, calls)

    parse.content_of_beginning = lambda *_: ""
    parse.needs_special_tokens = parse.reads_calls = True
    endpoint = endpoint_of(case, parse)
    key, url = endpoint.open((1,), OPTIONS, -1, 100)
    messages = [{"role": "user", "content": row["problem"]}]
    for arguments, reward, num_calls in (
        (calls[0]["arguments"], 1.0, 2),
        ("[" * 5000, 0.0, 3),
        ('{"a": 1e999}', 0.0, 3),
    ):
        calls[0]["arguments"] = arguments
        rollout = endpoint.rollouts[key]
        rollout.calls.clear()
        [found] = serve(endpoint, [lambda: function_call.solve(url, messages, row["answer"])])
        assert (found, len(rollout.calls), len(rollout.rows())) == (reward, num_calls, 1)
    assert endpoint.server.faults == [] and capfd.readouterr().out == ""
    endpoint.shut_down()
    assert function_call.multiply("multiply", '{"a": "3", "b": 4}') == "12"
    for arguments in ("", "[]", "{}", '{"a": null, "b": 1}', '{"a": 1e999, "b": 1}', "null"):
        assert function_call.multiply("multiply", arguments).startswith("error: give")
    assert function_call.multiply("divide", "{}").startswith("error: there is no")


def test_f4_the_examples_config_passes_the_check(monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["policy.model_name=examples/arithmetic/starter", "env.agents.0.num_workers=1"]  # its own is downloaded
    cfg = load("examples/agents/function_call.yaml", words)
    assert "graded by multiply: 4,000 prompts" in preflight.check(cfg)
    assert cfg.policy.generation.vllm_cfg.http_server_serving_chat_kwargs.tool_parser == "hermes"


def vllms_stop(tokenizer, prompt_ids, ids, stops, stop_ids):
    """(text, how many of the ids) by vLLM's own detokenizer, which is given one id after another."""
    from transformers import PreTrainedTokenizerFast
    from vllm import SamplingParams
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    params = SamplingParams(stop=stops, skip_special_tokens=False)
    request = SimpleNamespace(sampling_params=params, prompt_token_ids=prompt_ids, request_id="")
    detokenizer = FastIncrementalDetokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend), request)
    for token_id in ids:
        if detokenizer.update([token_id], token_id in stop_ids) is not None:
            break
    return detokenizer.output_text, len(detokenizer.token_ids)


@pytest.mark.parametrize("num_replies", [16, pytest.param(200, marks=pytest.mark.long)])
def test_stop_strings_cut_the_text_as_vllms_and_the_ids_after_them(case, endpoint, num_replies):
    key, url = endpoint.open((6,), OPTIONS, -1, 1000)
    messages = [[{"role": "user", "content": f"{i}"}] for i in range(num_replies)]
    bodies = [{"messages": talk, "return_token_ids": True} for talk in messages]
    plain = serve(endpoint, [lambda body=body: post(url, body, timeout=120).json() for body in bodies])
    endpoint.close(key)
    texts = [body["choices"][0]["message"]["content"] for body in plain]
    stops = [char for char, _ in Counter("".join(texts).replace("\ufffd", "")).most_common(4)]
    stops += [text[1:3] for text in texts if len(text) > 3 and "\ufffd" not in text][:3]
    key, url = endpoint.open((6,), OPTIONS, -1, 1000)
    cut = serve(endpoint, [lambda body=body: post(url, body | {"stop": stops}, timeout=120).json() for body in bodies])
    rollout, num_cut = endpoint.rollouts[key], 0
    for whole, short in zip(plain, cut, strict=True):
        whole_ids, choice = whole["choices"][0]["token_ids"], short["choices"][0]
        text, size = vllms_stop(case.tokenizer, whole["prompt_token_ids"], whole_ids, stops, case.engine.stop_token_ids)
        assert choice["token_ids"] == whole_ids[:size]
        is_cut = size < len(whole_ids) or any(stop in whole["choices"][0]["message"]["content"] for stop in stops)
        # At the end of a reply vLLM leaves out what is half a character.
        assert choice["message"]["content"].removesuffix("" if is_cut else "\ufffd").rstrip("\ufffd") == text.rstrip(
            "\ufffd"
        )
        assert choice["finish_reason"] == "stop" or not is_cut
        num_cut += is_cut
    assert num_cut > num_replies / 4
    samples = samples_of([rollout])
    assert len(samples) == num_replies and largest_gap(case, samples) < 2e-5
    # The agent may write the string back, or not.
    call = next(
        c
        for c in rollout.calls
        if c.completion.ids[-1] not in case.engine.stop_token_ids and c.completion.finish_reason == "stop"
    )
    content = endpoint._read(call).content
    [missing] = [stop for stop in stops if stop in case.tokenizer.decode(call.completion.ids)][:1]
    for ending in ("", missing):
        messages = [*call.request.messages, {"role": "assistant", "content": content + ending}, USER[0]]
        serve(endpoint, [lambda messages=messages: post(url, {"messages": messages})])
        assert rollout.calls[-1].parent is call
    endpoint.close(key)
