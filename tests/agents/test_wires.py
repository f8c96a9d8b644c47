"""Responses and messages: each is another form of the same calls, exact to the token, and answers in its own form."""

import json
import time
from threading import Event, Thread
from types import SimpleNamespace

import httpx
import pytest
from agent_case import MAX_TOKENS, OPTIONS, TEMPLATE, endpoint_of, post, serve
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from base.agents.calls import Rollout, sequence_of
from base.agents.endpoint import Endpoint, Stream
from base.agents.parser import Parsed, ReplyParser
from base.agents.wire_anthropic import Messages
from base.agents.wire_chat import Answer, Chat, Reply, Token, link_of, read_message
from base.agents.wire_responses import Responses
from base.hf.tokenizer import Tokenizer
from config import ChatServerConfig
from engine import reply_parsers
from records import Completion, SamplingOptions, make_tokens

SYSTEM = "Be brief."
NAME, SCHEMA = "f", {"type": "object", "properties": {"q": {"type": "integer"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": NAME, "description": "d", "parameters": SCHEMA}}]
RESPONSES_TOOLS = [{"type": "function", "name": NAME, "parameters": SCHEMA, "description": "d"}, {"type": "web_search"}]
MESSAGES_TOOLS = [{"name": NAME, "input_schema": SCHEMA, "description": "d"}, {"type": "bash_1", "name": "bash"}]
QUESTIONS = ("1+7?", "Sure?", "So?", "Bye.")
LONG = SamplingOptions(0.8, 400)


def parse(text, tools, *_):
    """Every third reply begins with a thought; with tools, every second has two calls."""
    reasoning = "hm" if tools and len(text) % 3 == 0 else None
    if tools and len(text) % 2 == 0:
        calls = [{"name": NAME, "arguments": f'{{"q": {number}}}'} for number in range(2)]
        return Parsed(reasoning, text[:2] if len(text) % 4 else None, calls)
    return Parsed(reasoning, text, [])


parse.needs_special_tokens = parse.reads_calls = True
parse.content_of_beginning = lambda text, tools, *_: "" if tools else text


@pytest.fixture
def endpoint(served):
    found = endpoint_of(served, parse)
    yield found
    found.shut_down()


def events_of(answer):
    """The objects of a stream, each with its name."""
    for event in answer.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in event.splitlines())
        if lines and lines["data"] != "[DONE]":
            data = json.loads(lines["data"])
            assert lines.get("event") == data.get("type")
            yield data


def over_chat(url, options):
    messages = [{"role": "system", "content": SYSTEM}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        tools = {"tools": CHAT_TOOLS} if options["tools"] else {}
        answer = post(url, {"messages": messages, "stream": options["stream"]} | tools, timeout=60)
        if options["stream"]:
            deltas = [event["choices"][0]["delta"] for event in events_of(answer)]
            reply = deltas[0] | deltas[-1] | {"role": "assistant"}
            reply["content"] = "".join(delta["content"] or "" for delta in deltas)
        else:
            reply = answer.json()["choices"][0]["message"]
        messages.append(reply)
        for call in reply.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": call["function"]["arguments"]})


def over_responses(url, options):
    items, previous = [], None
    for question in QUESTIONS:
        items.append({"role": "user", "content": [{"type": "input_text", "text": question}]})
        body = {"input": items, "instructions": SYSTEM, "stream": options["stream"], "previous_response_id": previous}
        if options["tools"]:
            body["tools"] = RESPONSES_TOOLS
        answer = post(url, body, path="/responses", timeout=60)
        if options["stream"]:
            *events, last = events_of(answer)
            reply = last["response"]
            told = {kind: "".join(e["delta"] for e in events if e["type"] == kind) for kind in map_of_kinds(reply)}
            assert told == map_of_kinds(reply)
            assert [e["sequence_number"] for e in events] == list(range(len(events)))
            assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == reply["output"]
        else:
            reply = answer.json()
        if options["by_id"]:
            items, previous = [], reply["id"]
        items += () if options["by_id"] else reply["output"]
        for item in reply["output"]:
            if item["type"] == "function_call":
                result = {"type": "function_call_output", "call_id": item["call_id"], "output": item["arguments"]}
                items.append(result)


def map_of_kinds(reply):
    """What the deltas of each kind add up to."""
    sums = {}
    for item in reply["output"]:
        for part in item.get("content", ()):
            sums[f"response.{part['type']}.delta"] = part["text"]
        if item["type"] == "function_call":
            kind = "response.function_call_arguments.delta"
            sums[kind] = sums.get(kind, "") + item["arguments"]
    return {kind: text for kind, text in sums.items() if text}


def over_messages(url, options):
    messages = []
    content = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": [*content, {"type": "text", "text": question}]})
        system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
        body = {"messages": messages, "system": system, "max_tokens": 999, "stream": options["stream"]}
        if options["tools"]:
            body["tools"] = MESSAGES_TOOLS
        base = url.removesuffix("/v1") if options["stream"] else url
        answer = post(base, body, path="/v1/messages", headers={"x-api-key": "none"}, timeout=60)
        blocks = blocks_of(events_of(answer)) if options["stream"] else answer.json()["content"]
        messages.append({"role": "assistant", "content": blocks})
        content = []
        for block in blocks:
            if block["type"] == "tool_use":
                text = [{"type": "text", "text": json.dumps(block["input"])}]
                content.append({"type": "tool_result", "tool_use_id": block["id"], "content": text})


def blocks_of(events):
    """As Anthropic's client adds them up."""
    start, *events, _, stop = events
    assert start["message"]["usage"]["input_tokens"] and stop == {"type": "message_stop"}
    blocks, inputs = [], {}
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            kind, text = event["delta"].values()
            name = kind.removesuffix("_delta")
            if name == "input_json":
                inputs[event["index"]] = inputs.get(event["index"], "") + text
            else:
                blocks[event["index"]][name] += text
    for index, text in inputs.items():
        blocks[index]["input"] = json.loads(text)
    return blocks


SPEAKERS = {"chat": over_chat, "responses": over_responses, "by id": over_responses, "messages": over_messages}


@pytest.mark.slow
@pytest.mark.parametrize("tools", [True, False], ids=("tools", "plain"))
def test_a_conversation_has_the_same_ids_over_each_wire_and_is_one_row(endpoint, tools, capfd):
    programs, keys = [], []
    for name, speak in SPEAKERS.items():
        for stream in (False, True):
            key, url = endpoint.open((7, 3), OPTIONS, -1, 100)
            options = {"tools": tools, "stream": stream, "by_id": name == "by id"}
            programs.append(lambda speak=speak, url=url, options=options: speak(url, options))
            keys.append(key)
    assert serve(endpoint, programs) == [None] * len(programs)
    sequences = []
    for key in keys:
        rollout = endpoint.close(key)
        [row] = rollout.rows()
        assert len(row) == len(QUESTIONS)
        sequences.append(sequence_of(row, rollout.turns, True))
    one, *others = sequences
    for other in others:
        assert other.token_ids == one.token_ids and len(other.prompt_ids) == len(one.prompt_ids)
        assert (other.tokens["mask"] == one.tokens["mask"]).all() and (other.tokens["logp"] == one.tokens["logp"]).all()
    assert one.tokens["mask"].any() and not one.tokens["mask"].all()
    said = capfd.readouterr().out
    assert said.count(" tools=") == tools and said.count("NOTE") == tools


REPLIES = [  # reasoning, content, calls: (name, arguments)
    (None, "ok", []),
    (None, "", []),
    (None, None, []),
    ("hm", "ok\n", []),
    ("hm", None, [("f", "{}")]),
    (None, "So:", [("f", '{"a": [1, {"b": null}]}'), ("g", '{"é": "\\u00e9"}')]),
    (None, None, [("f", '{"a": NaN}'), ("f", "no JSON"), ("f", "[1]"), ("f", '"text"'), ("f", '{"a": 1e999}')]),
]


@pytest.mark.parametrize("given", REPLIES, ids=range(len(REPLIES)))
def test_a_reply_that_comes_back_is_the_reply_that_was_sent(given):
    reasoning, content, calls = given
    calls = [{"name": name, "arguments": arguments} for name, arguments in calls]
    reply = Reply(9, reasoning, content, calls, "stop", None, [5], [Token("a", -1.0)], [])
    answer = Answer([1, 2], [reply])
    user = {"role": "user", "content": "hi"}
    chat = Chat(json.dumps({"messages": [user]}).encode(), {}).reply(answer)["choices"][0]["message"]
    before = {}
    response = Responses(b'{"input": "hi"}', before).reply(answer)
    message = json.loads(json.dumps(Messages(json.dumps({"messages": [user]}).encode(), {}).reply(answer)))
    Response.model_validate(response)
    assert message["stop_reason"] == ("tool_use" if calls else "end_turn")
    links = [link_of(read_message(message)) for message in (user, {"role": "assistant", **reply.message}, user)]
    for wire, body in (
        (Chat, {"messages": [user, chat, user]}),
        (Responses, {"input": [user, *response["output"], user]}),
        (Responses, {"input": "hi", "previous_response_id": response["id"]}),
        (Messages, {"messages": [user, {"role": "assistant", "content": message["content"]}, user]}),
    ):
        request = wire(json.dumps(body).encode(), before).request
        assert [link_of(message) for message in request.messages] == links
        if wire is not Chat:
            assert request.messages[1].get("reasoning_content") == reasoning


HERMES = '<tool_call>{"name": "f", "arguments": {"q": 7}}</tool_call>'
LLAMA = '{"name": "f", "parameters": {"q": 7}}'
CODER = "<tool_call>\n<function=f>\n<parameter=q>\n7\n</parameter>\n</function>\n</tool_call>"
BEGINNINGS = [  # parser, sampled, what a stream tells before the end, the content, the number of calls
    ("hermes", "So:\n" + HERMES, "So:", "So:\n", 1),
    ("hermes", "So:" + HERMES + HERMES, "So:", "So:", 2),
    ("hermes", HERMES, "", None, 1),
    ("hermes", "So <tool_call>{", "So", "So <tool_call>{", 0),
    ("hermes", "is a < b ?", "is a", "is a < b ?", 0),
    ("hermes", "no call", "no call", "no call", 0),
    ("llama3_json", "So: " + LLAMA, "So:", "So:", 1),  # which drops the text
    ("qwen3_coder", "So:\n\n" + CODER, "So:", "So:", 1),  # which drops the blanks
    ("pythonic", "[f(q=7)]", "", None, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize("wire", [Chat, Responses, Messages])
@pytest.mark.parametrize(("name", "sampled", "told", "content", "num_calls"), BEGINNINGS)
def test_a_stream_tells_what_stands_before_a_call(name, sampled, told, content, num_calls, wire, tiny):
    """And the reply, put together by the client, is the one that was sampled."""
    tokenizer = Tokenizer(tiny[0], TEMPLATE)
    tokenizer.backend.add_tokens(["<tool_call>", "</tool_call>", "<|python_tag|>"])
    endpoint = object.__new__(Endpoint)
    endpoint.tokenizer = tokenizer
    endpoint.parse = ReplyParser(reply_parsers(), tokenizer, ChatServerConfig(tool_parser=name))
    ids = [*tokenizer.backend.encode(sampled, add_special_tokens=False).ids, tokenizer.eos_token_ids[0]]
    so_far = {"a": []}
    endpoint.engine = SimpleNamespace(stop_token_ids=tokenizer.eos_token_ids, ids_so_far=lambda: so_far)
    deltas = []
    endpoint._answer = lambda _, delta: deltas.append(delta)
    tools = {Chat: CHAT_TOOLS, Responses: RESPONSES_TOOLS[:1], Messages: MESSAGES_TOOLS[:1]}[wire]
    given = "input" if wire is Responses else "messages"
    rollout, before = Rollout((1, 2), 999, 9), {}
    asked = wire(json.dumps({given: [USER], "tools": tools}).encode(), before)
    [call] = rollout.ask(1, asked.request, 10, tokenizer)
    endpoint.streams = {"a": Stream(1, 0, call.seed, call)}
    for token_id in ids[:-1]:
        so_far["a"].append(token_id)
        endpoint._tell_streams()
    assert "".join(delta.text for delta in deltas) == told and (len(deltas) > 1) == bool(told)
    call.completion = Completion(make_tokens(ids, mask=True), "stop")
    answer = Answer(call.prompt_ids, [endpoint._read(call)])
    text = "".join([*map(asked.stream_delta, deltas), asked.stream_end(answer)])
    history, reply = history_of(wire, [*events_of(SimpleNamespace(text=text))])
    assert (reply["content"] or None, len(reply.get("tool_calls", ()))) == (content, num_calls)
    again = wire(json.dumps({given: [USER, *history, USER], "tools": tools}).encode(), before)
    [after] = rollout.ask(2, again.request, 10, tokenizer)
    assert after.parent is call and after.prompt_ids[: len(call.ids)] == call.ids


def history_of(wire, events):
    """What the client of a stream sends back, and that as a message of chat completions."""
    if wire is Responses:
        items = events[-1]["response"]["output"]
        told = {
            kind: "".join(e["delta"] for e in events if e["type"] == kind)
            for kind in map_of_kinds(events[-1]["response"])
        }
        assert told == map_of_kinds(events[-1]["response"])
        return items, Responses(json.dumps({"input": items}).encode(), {}).request.messages[0]
    if wire is Messages:
        message = {"role": "assistant", "content": blocks_of(iter(events))}
        return [message], Messages(json.dumps({"messages": [message, USER]}).encode(), {}).request.messages[0]
    message = {"role": "assistant"}
    for event in events:
        [choice] = event["choices"]
        for key, value in choice["delta"].items():
            if key == "content" and value:
                message[key] = (message.get(key) or "") + value
            elif key != "role":
                message.setdefault(key, value)
    return [message], message


USER = {"role": "user", "content": "hi"}
CALLED = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
IMAGE = {"type": "input_image", "image_url": "data:"}
RIGHT = {
    "/responses": [
        {"input": "hi"},
        {"input": [USER], "instructions": "x", "max_output_tokens": 1},
        {"input": [{"type": "message", "role": "developer", "content": "x"}, USER], "store": False},
        {"input": [USER, CALLED, {"type": "function_call_output", "call_id": "a", "output": "1"}]},
        {"input": [USER, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}, CALLED, USER]},
        {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"input": "hi", "tools": RESPONSES_TOOLS, "tool_choice": "required", "parallel_tool_calls": True},
        {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}},
        {"input": "hi", "reasoning": {"effort": "low"}, "truncation": "disabled", "prompt_cache_key": "k"},
        {"input": "hi", "stream": True, "tools": RESPONSES_TOOLS},
        {"input": "hi", "stream": True},
        {"input": "hi", "train": False, "chat_template_kwargs": {"a": 1}},
    ],
    "/messages": [
        {"messages": [USER], "max_tokens": 5},
        {"messages": [USER, {"role": "assistant", "content": "ok, "}], "system": "x", "max_tokens": 3},
        {"messages": [USER, {"role": "assistant", "content": []}, USER], "stop_sequences": ["a"]},
        {"messages": [USER], "tools": MESSAGES_TOOLS, "tool_choice": {"type": "any"}, "temperature": 1, "top_k": 3},
        {"messages": [USER], "tools": MESSAGES_TOOLS, "tool_choice": {"type": "none"}, "metadata": {"user_id": "a"}},
        {"messages": [USER], "thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
        {"messages": [USER], "stream": True},
        {"messages": [USER], "stream": True, "tools": MESSAGES_TOOLS, "train": False},
    ],
}
WRONG = {  # (body, status, what the sentence names)
    "/responses": [
        (b"{", 400, "body"),
        ({}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": [USER, IMAGE]}, 400, "input_image"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, 400, "only text"),
        ({"input": [{"role": "robot", "content": "x"}]}, 400, "robot"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "item_reference"),
        ({"input": [{"type": "function_call", "name": "f"}]}, 400, "input"),
        ({"input": "hi", "tools": [{"type": "function", "name": 3}]}, 400, "tools"),
        ({"input": "hi", "max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"input": "hi", "background": True}, 400, "background"),
        ({"input": "hi", "conversation": "c"}, 400, "conversation"),
        ({"input": "hi", "previous_response_id": "resp_1"}, 400, "previous_response_id"),
        ({"input": "x" * MAX_TOKENS}, 400, "maximum context length is"),
        ({"input": "x" * (17 << 20)}, 413, "16 MiB"),
    ],
    "/messages": [
        (b"[]", 400, "body"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "robot"),
        ({"messages": [{"role": "user"}]}, 400, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "only text"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}, USER]}, 400, "messages.0"),
        ({"messages": [USER], "system": [{"type": "image"}]}, 400, "only text"),
        ({"messages": [USER], "tools": [{"name": 3, "input_schema": {}}]}, 400, "tools"),
        ({"messages": [USER], "tool_choice": {"type": "maybe"}}, 400, "tool_choice"),
        ({"messages": [USER], "max_tokens": 0}, 400, "max_tokens"),
        ({"messages": [USER], "stop_sequences": [""]}, 400, "stop_sequences"),
        ({"messages": [{"role": "user", "content": "x" * MAX_TOKENS}]}, 400, "prompt is too long: "),
    ],
}
STREAM_EVENT = TypeAdapter(ResponseStreamEvent)


def sentence_of(path, answer):
    """Of an error, in the form that the wire's clients read."""
    body = answer.json()
    error = body["error"]
    if path == "/messages":
        kinds = {400: "invalid_request_error", 404: "not_found_error", 413: "request_too_large"}
        assert body["type"] == "error" and error["type"] == kinds[answer.status_code]
    else:
        assert error["code"] and error["type"]
    return error["message"]


@pytest.mark.slow
@pytest.mark.parametrize("path", RIGHT)
def test_requests_right_and_wrong(endpoint, path, capfd):
    key, url = endpoint.open((1,), OPTIONS, -1, 500)
    bodies = [*RIGHT[path], *(body for body, *_ in WRONG[path])]
    answers = serve(endpoint, [lambda body=body: post(url, body, path=path, timeout=60) for body in bodies])
    for body, answer in zip(RIGHT[path], answers, strict=False):
        assert answer.status_code == 200, (body, answer.text)
        if path == "/responses" and body.get("stream"):
            kinds = [STREAM_EVENT.validate_python(event).type for event in events_of(answer)]
            assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
        elif path == "/responses":
            found = Response.model_validate(answer.json())
            parts = [part for item in found.output if item.type == "message" for part in item.content]
            tokens = [token for part in parts for token in part.logprobs]
            assert len(tokens) == ("include" in body) * found.usage.output_tokens
            assert all(len(token.top_logprobs) == 2 for token in tokens)
    for (body, status, named), answer in zip(WRONG[path], answers[len(RIGHT[path]) :], strict=True):
        assert answer.status_code == status, (str(body)[:200], answer.text)
        assert named in sentence_of(path, answer), (str(body)[:200], answer.text)
    wrong_key = post(url.replace(key, "0" * 32), RIGHT[path][0], path=path)
    assert wrong_key.status_code == 404 and "key" in sentence_of(path, wrong_key)
    said = capfd.readouterr()
    named = {"/responses": ("tool_choice", "text", "reasoning", "tools")}
    named["/messages"] = ("tool_choice", "temperature", "top_k", "thinking", "tools")
    assert said.err == "" and len(said.out.splitlines()) == len(named[path])
    assert all(f" {name}=" in said.out for name in named[path])
    endpoint.close(key)


@pytest.mark.slow
def test_a_response_of_one_rollout_is_none_of_another(endpoint):
    opened = [endpoint.open((n,), OPTIONS, -1, 10) for n in range(2)]

    def ask(url, previous):
        return post(url, {"input": "hi", "previous_response_id": previous}, path="/responses", timeout=60)

    [first] = serve(endpoint, [lambda: ask(opened[0][1], None)])
    name = first.json()["id"]
    answers = serve(endpoint, [lambda url=url: ask(url, name) for _, url in opened])
    assert [answer.status_code for answer in answers] == [200, 400]
    assert answers[1].json()["error"]["code"] == "previous_response_not_found"
    assert len(endpoint.close(opened[0][0]).rows()) == 1 and endpoint.close(opened[1][0]).calls == []


STREAMED = {
    "/chat/completions": ({"messages": [USER]}, '"content": "'),
    "/responses": ({"input": "hi"}, "response.output_text.delta"),
    "/messages": ({"messages": [USER]}, "text_delta"),
}


@pytest.mark.slow
@pytest.mark.parametrize("path", STREAMED)
def test_a_stream_tells_while_the_engine_decodes_and_may_be_left(served, endpoint, path, monkeypatch):
    monkeypatch.setattr(served.engine, "stop_token_ids", served.engine.stop_token_ids[:1])
    body, sign = STREAMED[path]
    key, url = endpoint.open((5,), LONG, -1, 10)
    rollout = endpoint.rollouts[key]
    has_begun = Event()

    def read_the_beginning():
        with httpx.stream("POST", url + path, json=body | {"stream": True}, timeout=60) as answer:
            for line in answer.iter_lines():
                if sign in line:
                    has_begun.set()
                    return

    thread = Thread(target=read_the_beginning)
    thread.start()
    while thread.is_alive() and not has_begun.is_set():
        endpoint.before_step()
        served.engine.step()
        time.sleep(0.01)
    assert [call.completion for call in rollout.calls] == [None], "all is decoded: the stream came in one piece"
    thread.join()
    while endpoint.running:
        endpoint.before_step()
    assert not rollout.calls and not endpoint.streams and served.engine.is_idle and not served.engine.unclaimed
    plain, streamed = serve(
        endpoint,
        [lambda stream=stream: post(url, body | {"stream": stream}, path=path, timeout=60) for stream in (False, True)],
    )
    first, second = sorted(rollout.calls, key=lambda call: call.ask)
    assert plain.status_code == 200 and streamed.text.count(sign) > 5
    assert first.prompt_ids == second.prompt_ids and first.seed != second.seed
    endpoint.close(key)
