"""The endpoint over vLLM: exact to the token, whatever an agent asks and in whatever order."""

import json
import random
import time
from collections import Counter
from threading import Thread

import httpx
import numpy as np
import pytest
import torch
from agent_case import MAX_TOKENS, OPTIONS, TOOLS, eight_calls, endpoint_of, post, serve

import batch
from agents.calls import fill
from data import Sample, pack_samples

pytestmark = pytest.mark.slow
NUM_ROLLOUTS = 8  # 64 in docs/LOG.md


@pytest.fixture
def case(served):
    return served


@pytest.fixture
def endpoint(case):
    found = endpoint_of(case)
    yield found
    found.shut_down()
    case.engine.before_step = lambda: None


def samples_of(rollouts):
    samples = []
    for number, rollout in enumerate(rollouts):
        for i, row in enumerate(rollout.rows()):
            samples.append(Sample(number, i, 0, [], advantage=1.0, reward=1.0))
            fill(samples[-1], row, True)
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
    drawn, prompts = Counter(), {}
    start_of_engine, step = case.engine.start, case.engine.step

    def recorded_start(asked, *rest):
        names = start_of_engine(asked, *rest)
        prompts.update(zip(names, map(tuple, asked), strict=True))
        return names

    def recorded_step():
        for name in (ended := step()):
            drawn[prompts[name], tuple(case.engine.unclaimed[name].ids.tolist())] += 1
        return ended

    monkeypatch.setattr(case.engine, "start", recorded_start)
    monkeypatch.setattr(case.engine, "step", recorded_step)
    rollouts = run(endpoint, NUM_ROLLOUTS, lambda number: time.sleep(random.random() / 50))
    calls = [call for rollout in rollouts for call in rollout.calls]
    assert len(calls) == 8 * NUM_ROLLOUTS and not case.engine.unclaimed and case.engine.is_idle
    assert drawn == Counter((tuple(call.prompt_ids), tuple(call.completion.ids.tolist())) for call in calls)
    continued = [call for call in calls if call.parent]
    assert len(continued) >= 3 * NUM_ROLLOUTS and {len(rollout.rows()) for rollout in rollouts} <= {4, 5}
    assert all(call.prompt_ids[: len(call.parent.ids)] == call.parent.ids for call in continued)
    samples = samples_of(rollouts)
    trained = [call for call in calls if call.request.train is not False]
    assert sum(s.num_trained_tokens for s in samples) == sum(len(call.completion.ids) for call in trained)
    ids = Counter(tuple(call.completion.ids.tolist()) for call in trained)
    edges = [np.flatnonzero(np.diff(np.r_[False, s.mask, False])) for s in samples]
    runs = Counter(
        tuple(s.output_ids[a:b].tolist()) for s, e in zip(samples, edges, strict=True) for a, b in e.reshape(-1, 2)
    )
    assert runs == ids
    # Other ids, had the whole conversation been encoded again: what this is about.
    again = [case.tokenizer.render(c.request.messages, c.request.tools, escape=True) for c in continued]
    assert sum(ids != call.prompt_ids for ids, call in zip(again, continued, strict=True)) > len(continued) / 2
    micros = [batch.to_device(pack, torch.device("cpu")) for pack in pack_samples([[s] for s in samples], 2048)]
    with torch.no_grad():
        gaps = [(case.policy(*micro.model_inputs)[0] - micro.sampler_logp_R).abs().max() for micro in micros]
    assert max(gaps) < 2e-5
    # Once more, in another order: the same ids in the same rows.
    others = samples_of(run(endpoint, NUM_ROLLOUTS, lambda number: time.sleep(random.random() / 50)))
    assert len(samples) == len(others)
    for one, other in zip(samples, others, strict=True):
        assert one.prompt_ids == other.prompt_ids and (one.output_ids == other.output_ids).all()
        assert (one.mask == other.mask).all() and (one.versions == 3).all()


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
    {"response_format": {"type": "text"}},
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
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "text alone"),
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
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": 1.5}, 400, "max_tokens"),
    ({"stop": ""}, 400, "stop"),
    ({"stop": [1]}, 400, "stop"),
    ({"top_logprobs": 5, "logprobs": True}, 400, "top_logprobs"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, 400, "response_format"),
    ({"modalities": ["text", "audio"]}, 400, "modalities"),
    ({"functions": [{"name": "f"}]}, 400, "functions"),
    ({"stream": "yes"}, 400, "stream"),
    ({"train": 0}, 400, "train"),
    ({"messages": [{"role": "user", "content": "x" * MAX_TOKENS}]}, 400, "max_total_sequence_length"),
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
    assert said.out.count("temperature") == 1 and said.out.count("tool_choice") == 1 and said.err == ""
    endpoint.close(key)


def test_a_key_is_one_rollouts_and_dies_with_it(endpoint):
    opened = [endpoint.open((n,), OPTIONS, -1, 10) for n in range(2)]
    root = opened[0][1].split("/rollout/")[0]
    assert len(opened[0][1].split("/")[-2]) >= 22 and opened[0][1] != opened[1][1]

    def guess():
        with httpx.Client() as client:
            codes = {client.get(f"{root}/rollout/{i:022d}/v1/models").status_code for i in range(300)}
            for path in ("", "/", "/rollout", "/rollout//v1/models", "/docs", "/rollout/%2e%2e/v1/models", "/metrics"):
                codes.add(client.get(root + path).status_code)
            return codes, client.get(opened[1][1] + "/models").json()["data"][0]["id"]

    assert serve(endpoint, [guess]) == [({404}, "policy")]
    endpoint.close(opened[0][0])
    [late, alive] = serve(endpoint, [lambda url=url: post(url, {"messages": USER}) for _, url in opened])
    assert (late.status_code, alive.status_code) == (404, 200)
    port = endpoint.port
    with pytest.raises(httpx.ConnectError):  # another interface of this machine
        httpx.get(f"http://{other_address()}:{port}/", timeout=2).raise_for_status()
    endpoint.shut_down()
    with pytest.raises(httpx.ConnectError):
        httpx.get(root)


def other_address():
    import socket

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


def test_stop_strings_cut_the_text_as_vllms_and_the_ids_after_them(case, endpoint):
    """Against vLLM's own detokenizer, which never sees what comes after the string."""
    number, url = endpoint.open((6,), OPTIONS, -1, 1000)
    bodies = [{"messages": [{"role": "user", "content": f"{i}"}], "return_token_ids": True} for i in range(40)]
    plain = serve(endpoint, [lambda body=body: post(url, body).json() for body in bodies])
    endpoint.close(number)
    texts = [each["choices"][0]["message"]["content"] for each in plain]
    stops = [char for char, _ in Counter("".join(texts).replace("\ufffd", "")).most_common(4)] + [
        text[1:3] for text in texts if len(text) > 3 and "\ufffd" not in text
    ][:1]
    number, url = endpoint.open((6,), OPTIONS, -1, 1000)
    cut = serve(endpoint, [lambda body=body: post(url, body | {"stop": stops}).json() for body in bodies])
    num_cut = 0
    for whole, short in zip(plain, cut, strict=True):
        whole_ids, ids = whole["choices"][0]["token_ids"], short["choices"][0]["token_ids"]
        assert ids == whole_ids[: len(ids)]
        text = whole["choices"][0]["message"]["content"]
        ends = [text.index(stop) for stop in stops if stop in text]
        assert short["choices"][0]["message"]["content"] == text[: min(ends, default=len(text))]
        num_cut += bool(ends)
        if ends:
            assert short["choices"][0]["finish_reason"] == "stop"
            before = case.tokenizer.decode(ids[:-1], special=True)
            assert not any(stop in before for stop in stops)
    assert num_cut > 10
    # The agent may write the string back, or not.
    rollout = endpoint.rollouts[number]
    call = next(
        c
        for c in rollout.calls
        if c.completion.finish_reason == "stop" and c.completion.ids[-1] not in case.engine.stop_token_ids
    )
    text, missing = endpoint._message(call)
    for ending in ("", missing):
        messages = [*call.request.messages, {"role": "assistant", "content": text["content"] + ending}, USER[0]]
        serve(endpoint, [lambda messages=messages: post(url, {"messages": messages})])
        assert rollout.calls[-1].parent is call
    endpoint.close(number)
