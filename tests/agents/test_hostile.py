"""One hostile text costs one request, one sample or one rollout: over every path on which such texts enter."""

import json
import random
import re
import socket
import time

import httpx
import numpy as np
import openai
import pytest
from agent_case import MAX_TOKENS, OPTIONS, TOOLS, endpoint_of, post, sample, serve
from hostile_agent import TEXTS
from run_life import Life

from base.agents import server
from base.agents.parser import Parsed, ReplyParser
from base.agents.wire_anthropic import Messages
from base.agents.wire_chat import Chat, link_of, read_message
from base.graders.grading import Grading
from base.graders.reward_function import RewardFunction
from base.hf.tokenizer import Tokenizer
from base.hf.turns import observation_ids
from base.system.disk import say
from base.system.exits import StopRun, report_exit
from base.system.ranks import Ranks
from config import AgentConfig, ChatServerConfig
from envs import Environment, Turn

pytestmark = pytest.mark.slow
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def case(served):
    served.endpoint = endpoint_of(served)
    yield served
    served.endpoint.shut_down()


def is_plain(text):
    return all(c.isprintable() or c == "\n" for c in text)


def text_of(rng):
    """Hostile pieces and plain ones."""
    return "".join(rng.choice((*TEXTS, "é", "1+1=", "{}", "\\ud800", '"', "</tool_call>")) for _ in range(3))


def value_of(rng, depth=3):
    """JSON of any kind, with hostile texts."""
    kind = rng.randrange(8 if depth else 5)
    if kind >= 5:
        values = [value_of(rng, depth - 1) for _ in range(rng.randrange(3))]
        return values if kind == 5 else {text_of(rng): value for value in values}
    return rng.choice((text_of(rng), text_of(rng), None, True, 3, -1.5, 10**30, 1e308))


def chat_of(rng):
    """A request with hostile texts in one or more places."""
    arguments = rng.choice((json.dumps(value_of(rng)), text_of(rng), value_of(rng)))
    call = {"id": text_of(rng), "function": {"name": rng.choice(("f", text_of(rng))), "arguments": arguments}}
    messages = [
        {"role": "user", "content": text_of(rng)},
        {"role": "user", "content": [{"type": "text", "text": text_of(rng)}, value_of(rng)]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "x", "reasoning_content": value_of(rng)},
        {"role": "tool", "content": text_of(rng), "tool_call_id": value_of(rng)},
        {"role": text_of(rng), "content": "x"},
        {"role": "user", "content": "x", "name": value_of(rng), text_of(rng): value_of(rng)},
    ]
    return {"messages": rng.choices(messages, weights=(4, 1, 4, 2, 2, 1, 2), k=rng.randrange(1, 4)), "max_tokens": 2}


def response_of(rng):
    arguments = rng.choice((json.dumps(value_of(rng)), text_of(rng), value_of(rng)))
    items = [
        {"role": "user", "content": text_of(rng)},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text_of(rng)}, value_of(rng)]},
        {
            "type": "function_call",
            "call_id": text_of(rng),
            "name": rng.choice(("f", text_of(rng))),
            "arguments": arguments,
        },
        {"type": "function_call_output", "call_id": value_of(rng), "output": text_of(rng)},
        {"type": "reasoning", "summary": value_of(rng), "content": value_of(rng)},
        {"type": rng.choice(("message", text_of(rng))), "role": "assistant", "content": value_of(rng)},
        {"role": text_of(rng), text_of(rng): value_of(rng), "content": "x"},
    ]
    given = rng.choices(items, weights=(5, 1, 4, 3, 1, 1, 1), k=rng.randrange(1, 4))
    body = {"input": rng.choice((given, given, given, text_of(rng))), "max_output_tokens": 2}
    for name in ("instructions", "previous_response_id", "text", "reasoning", "include", "top_logprobs"):
        if rng.random() < 0.1:
            body[name] = value_of(rng)
    return body


def message_of(rng):
    blocks = [
        {"type": "text", "text": text_of(rng)},
        {
            "type": "tool_use",
            "id": text_of(rng),
            "name": "f",
            "input": rng.choice(({text_of(rng): "x"}, value_of(rng))),
        },
        {"type": "tool_result", "tool_use_id": value_of(rng), "content": text_of(rng)},
        {"type": "thinking", "thinking": text_of(rng), "signature": value_of(rng)},
        {"type": text_of(rng)},
        value_of(rng),
    ]
    messages = []
    for _ in range(rng.randrange(1, 4)):
        content = rng.choices(blocks, weights=(6, 3, 3, 2, 1, 1), k=rng.randrange(3))
        role = rng.choice(("user", "user", "assistant", "assistant", text_of(rng)))
        messages.append({"role": role, "content": rng.choice((content, content, text_of(rng)))})
    body = {"messages": messages, "max_tokens": 2}
    for name in ("system", "thinking", "stop_sequences", "metadata"):
        if rng.random() < 0.1:
            body[name] = value_of(rng)
    return body


HOSTILE = {"/chat/completions": chat_of, "/responses": response_of, "/messages": message_of}


def bytes_of(rng, path):
    """Of a request over that wire; some are no JSON, or not UTF-8."""
    body = HOSTILE[path](rng)
    function = {"name": "f", "description": text_of(rng), "parameters": {text_of(rng): value_of(rng)}}
    tools = {
        "/chat/completions": {"type": "function", "function": function},
        "/responses": {"type": "function", **function},
        "/messages": {"name": "f", "input_schema": function["parameters"]},
    }
    for name, value in {
        "tools": [rng.choice((tools[path], tools[path], value_of(rng)))],
        "stop": [text_of(rng)],
        "tool_choice": value_of(rng),
        "response_format": value_of(rng),
        "stream_options": value_of(rng),
        "user": text_of(rng),
        text_of(rng): value_of(rng),
        "stream": True,
        "logprobs": True,
    }.items():
        if rng.random() < 0.15:
            body[name] = value
    kind = rng.randrange(10)
    ascii_only = kind != 0
    raw = json.dumps(body, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    if kind == 1:
        cut = rng.randrange(len(raw))
        return raw[:cut] + rng.randbytes(3) + raw[cut + rng.randrange(3) :]
    if kind in (2, 3):  # the rest of the bodies are refused for a half pair in the outer JSON
        return raw
    return re.sub(rb"(?<!\\)((?:\\\\)*)\\ud[89a-f][0-9a-f]{2}", rb"\1?", raw)


@pytest.mark.parametrize("num_requests", [60, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.parametrize("path", HOSTILE)
def test_a_request_with_hostile_texts_costs_that_request(case, path, num_requests, capfd):
    rng = random.Random(8)
    _, url = case.endpoint.open((1,), OPTIONS, -1, 10 * num_requests)
    bodies = [bytes_of(rng, path) for _ in range(num_requests)]

    def ask(part):
        with httpx.Client(timeout=120) as client:
            return [client.post(url + path, content=body).status_code for body in part]

    found = serve(case.endpoint, [lambda start=start: ask(bodies[start::8]) for start in range(8)], seconds=900)
    codes = [found[i % 8][i // 8] for i in range(num_requests)]
    assert set(codes) == {200, 400}, {code: bodies[codes.index(code)][:300] for code in set(codes)}
    assert codes.count(200) > num_requests / 10
    assert case.endpoint.server.faults == []
    [answer] = serve(case.endpoint, [lambda: post(url, {"messages": USER})])
    said = capfd.readouterr()
    assert answer.status_code == 200 and said.err == "" and is_plain(said.out)


def test_deep_arguments_are_a_400_and_half_a_pair_in_them_stays_text(case):
    _, url = case.endpoint.open((1,), OPTIONS, -1, 50)

    def history(arguments):
        call = {"function": {"name": "f", "arguments": arguments}}
        return {"messages": [*USER, {"role": "assistant", "tool_calls": [call]}, *USER]}

    rows = [("[" * 50_000, 400), ("[" * 50_000 + "]" * 50_000, 400), ('{"a": "\\ud800"}', 200), ('"\\udfff"', 200)]
    rows += [('{"\\ud800": 1}', 200), ('{"a": "\\ud83d\\ude00"}', 200)]
    answers = serve(case.endpoint, [lambda text=text: post(url, history(text)) for text, _ in rows])
    assert [answer.status_code for answer in answers] == [code for _, code in rows]
    assert case.endpoint.server.faults == []


def test_a_fault_of_ours_is_one_500_that_no_client_repeats_and_too_many_stop_the_run(case, monkeypatch, capfd):
    render = case.tokenizer.render
    seen = []

    def fail(messages, *args, **kwargs):
        seen.append(messages)
        if "bad" in messages[0]["content"]:
            raise KeyError("\x1b[2J\ud800")
        return render(messages, *args, **kwargs)

    monkeypatch.setattr(case.tokenizer, "render", fail)
    monkeypatch.setattr(server, "MAX_FAULTS", 2)
    key, url = case.endpoint.open((1,), OPTIONS, -1, 10)
    bad = [{"role": "user", "content": "bad"}]
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=2)

    def ask(messages):
        return client.chat.completions.create(model="m", messages=messages).choices[0].finish_reason

    failed, right = serve(case.endpoint, [lambda: ask(bad), lambda: ask(USER)])
    assert isinstance(failed, openai.InternalServerError) and right in ("stop", "length")
    assert failed.response.headers["x-should-retry"] == "false" and len(seen) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert is_plain(line) and re.search(r"KeyError.*test_hostile\.py:\d+", line)
    assert len(case.endpoint.rollouts[key].calls) == 1
    with pytest.raises(StopRun, match=r"3 requests.*KeyError"):
        serve(case.endpoint, [lambda: ask(bad), lambda: ask(bad)])
        case.endpoint.before_step()  # both clients may have their answers before the last look
    client.close()


def test_a_reply_that_cannot_be_read_is_a_fault_and_is_not_trained(case, monkeypatch, capfd):
    def parse(text, tools, *_):
        raise OSError("no parser")

    parse.needs_special_tokens = parse.reads_calls = False
    monkeypatch.setattr(case.endpoint, "parse", parse)
    key, url = case.endpoint.open((1,), OPTIONS, -1, 10)
    [answer] = serve(case.endpoint, [lambda: post(url, {"messages": USER})])
    assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
    assert case.endpoint.rollouts[key].calls == [] and "test_hostile.py" in capfd.readouterr().err


CALLS = {  # parser -> a call whose argument JSON, or Python, makes half of a surrogate pair
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": "\\ud800"}}\n</tool_call>',
    "internlm": '<|action_start|><|plugin|>{"name": "f", "parameters": {"a": "\\ud800"}}<|action_end|>',
    "xlam": '[{"name": "f", "arguments": {"a": "\\ud800"}}]',
    "pythonic": "[f(a='\\ud800')]",
    "llama3_json": '{"name": "f", "parameters": {"a": "\\ud800"}}',
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_no_client_can_be_sent_stays_text(name, tiny):
    from engine import reply_parsers

    tokenizer = Tokenizer(tiny[0])
    tokenizer.backend.add_tokens(["<tool_call>", "</tool_call>", "<|python_tag|>", "<|tool_call|>"])
    parse = ReplyParser(reply_parsers(), tokenizer, ChatServerConfig(tool_parser=name))
    for text in (CALLS[name], CALLS[name].replace("\\ud800", "ok \\udfff\\ud800 x")):
        found = parse(text, TOOLS)
        json.dumps([found.content, found.tool_calls], ensure_ascii=False).encode()
    paired = parse(CALLS[name].replace("\\ud800", "ok"), TOOLS)
    assert [call["name"] for call in paired.tool_calls] == ["f"], "the form is one that the parser reads"


DEEP = ["[" * 1200, '{"a":' * 1200, "[" * 90_000, "[" * 600 + "]" * 600, '{"a":' * 300 + "1" + "}" * 300]
DEEP += ['{"a": 1' + "0" * 5000 + "}", '{"a": 1e999}', "NaN", '{"a": "\\ud800"}', '{"": {}}', "", "null", '"\u2028"']


@pytest.mark.parametrize("arguments", DEEP, ids=range(len(DEEP)))
def test_h2_what_a_policy_writes_is_no_fault(case, arguments, monkeypatch, capfd):
    """Over each wire the reply is given and trained, and the next call goes on from it. A policy that has collapsed
    into one bracket writes such arguments, and some parsers hand them on unread."""

    def parse(text, tools, *_):
        calls = [{"name": "f", "arguments": arguments}]
        return Parsed(None, None, calls if tools else [])

    parse.content_of_beginning = lambda *_: ""
    parse.needs_special_tokens = parse.reads_calls = True
    monkeypatch.setattr(case.endpoint, "parse", parse)
    key, url = case.endpoint.open((1,), OPTIONS, -1, 100)
    rollout = case.endpoint.rollouts[key]

    def ask(path, body):
        [answer] = serve(case.endpoint, [lambda: post(url, body, path=path)])
        assert answer.status_code == 200, answer.text[:300]
        return answer.json()

    function = TOOLS[0]["function"]
    tools = {"tools": TOOLS}
    message = ask("/chat/completions", {"messages": USER} | tools)["choices"][0]["message"]
    result = {"role": "tool", "content": "1", "tool_call_id": message["tool_calls"][0]["id"]}
    ask("/chat/completions", {"messages": [*USER, message, result]} | tools)
    tools = {"tools": [{"type": "function"} | function]}
    items = ask("/responses", {"input": USER} | tools)["output"]
    output = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "1"}
    ask("/responses", {"input": [*USER, *items, output]} | tools)
    tools = {"tools": [{"name": "f", "input_schema": function["parameters"]}], "max_tokens": 5}
    blocks = ask("/messages", {"messages": USER} | tools)["content"]
    given = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": "1"}]}
    ask("/messages", {"messages": [*USER, {"role": "assistant", "content": blocks}, given]} | tools)
    assert [call.parent is not None for call in rollout.calls[:6]] == [False, True] * 3
    assert case.endpoint.server.faults == [] and capfd.readouterr().err == ""
    case.endpoint.close(key)


def test_h2_replies_that_this_program_cannot_give_do_not_end_the_run(case, monkeypatch, capfd):
    monkeypatch.setattr(server, "MAX_FAULTS", 1)

    def reply(*_):
        raise KeyError("cannot be written")

    for path, wire in (("/chat/completions", Chat), ("/messages", Messages)):
        monkeypatch.setattr(wire, "reply", reply)
        key, url = case.endpoint.open((1,), OPTIONS, -1, 100)
        body = {"messages": USER, "max_tokens": 2}
        answers = serve(case.endpoint, [lambda path=path, url=url: post(url, body, path=path)] * 6)  # noqa: B023
        assert {answer.status_code for answer in answers} == {500}
        while case.endpoint.rollouts[key].calls:
            case.endpoint.before_step()
        case.endpoint.close(key)
    assert case.endpoint.server.faults == [] and capfd.readouterr().err.count("cannot be written") == 1


BAR, GAP = "\uff5c", "\u2581"  # of DeepSeek's marks
CALL_FORMS = {  # parser -> a call with these arguments
    "deepseek_v3": "<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>f\n```json\n%s\n```<|tool_call_end|>"
    "<|tool_calls_end|>",
    "deepseek_v31": "<|tool_calls_begin|><|tool_call_begin|>f<|tool_sep|>%s<|tool_call_end|><|tool_calls_end|>",
    "gigachat3": 'function call<|role_sep|>\n{"name": "f", "arguments": %s}',
    "ernie45": '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>\n',
    "hermes": '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>',
    "xlam": '[{"name": "f", "arguments": %s}]',
}


@pytest.mark.parametrize("name", CALL_FORMS)
def test_h2_what_vllms_parsers_make_of_brackets_is_read(name, tiny):
    from engine import reply_parsers

    form = CALL_FORMS[name]
    if name.startswith("deepseek"):
        form = form.replace("|", BAR).replace("_", GAP)
    tokenizer = Tokenizer(tiny[0])
    tokenizer.backend.add_tokens(["<think>", "</think>", "<response>", "</response>", *re.findall("<[^<> ]+>", form)])
    parse = ReplyParser(reply_parsers(), tokenizer, ChatServerConfig(tool_parser=name))
    num_calls = []
    for arguments in ('{"a": 1}', *DEEP):
        found = parse(form % arguments, TOOLS)
        calls = [{"function": call} for call in found.tool_calls]
        message = read_message({"role": "assistant", "content": found.content, "tool_calls": calls})
        assert len(link_of(message)) == 32
        num_calls.append(len(calls))
    assert num_calls[0] == 1


def connect(port, content):
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(content)
    return client


def read_models(client):
    """Whether the client gets the whole list."""
    content = b""
    while not content.endswith(b"]}"):
        content += client.recv(10_000)
    return content.startswith(b"HTTP/1.1 200")


def test_clients_that_leave_amid_the_body_leave_no_line(case, capfd):
    _, url = case.endpoint.open((1,), OPTIONS, -1, 1000)
    path = url.partition(f":{case.endpoint.server.port}")[2]
    head = f"POST {path}/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n".encode()
    chunked = head.replace(b"content-length: 5000", b"transfer-encoding: chunked") + b"10\r\n{"
    for content in (head + b'{"messages": [', head, head[:20], chunked, b"\x16\x03\x01", b"GET " + b"x" * 9000) * 20:
        connect(case.endpoint.server.port, content).close()
    late = connect(case.endpoint.server.port, head)  # is there when the run ends
    [answer] = serve(case.endpoint, [lambda: post(url, {"messages": USER})])
    assert answer.status_code == 200 and case.endpoint.server.faults == []
    case.endpoint.shut_down()
    late.close()
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")


def test_the_connections_of_a_rollout_end_with_it(case, monkeypatch):
    monkeypatch.setattr(server, "LINGER_SECONDS", 0.3)
    opened = [case.endpoint.open((n,), OPTIONS, -1, 10) for n in range(2)]
    port = case.endpoint.server.port
    get = "GET {}/models HTTP/1.1\r\nhost: x\r\n\r\n"
    clients = []
    for _, url in opened:
        path = url.partition(f":{port}")[2]
        clients.append([connect(port, get.format(path).encode()) for _ in range(20)])
    for client in (client for part in clients for client in part):
        assert read_models(client)
    case.endpoint.close(opened[0][0])
    # The next rollout of a worker uses a connection of the one before.
    moved, *left = clients[0]
    moved.sendall(get.format(opened[1][1].partition(f":{port}")[2]).encode())
    for client in left:
        client.settimeout(5.0)
        assert client.recv(10_000) == b""
    assert read_models(moved)
    time.sleep(0.5)
    for client in (moved, *clients[1]):
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(1)
    case.endpoint.close(opened[1][0])


def test_agents_whose_failures_quote_hostile_texts(case, capfd):
    hostile = AgentConfig(name="hostile", function="hostile_agent:solve", num_workers=4, deadline_s=60.0)
    samples = sample(case, [hostile], [("hostile", "1+1")], num_samples=32)
    assert len({s.grade.outcome for s in samples}) >= 2 and {s.num_calls for s in samples} == {1, 2}
    messages = [s.grade.message for s in samples if s.grade.message]
    assert len(messages) > 8 and all("\n" not in message for message in messages)
    assert any("\ud800" in message or "\udfff" in message for message in messages)
    said = capfd.readouterr()
    assert is_plain(said.out) and "agent rollouts failed" in said.out and "Traceback" not in said.err
    assert case.endpoint.server.faults == []


def test_a_reward_functions_exception_that_quotes_a_reply(capfd):
    def reward(completions, **columns):
        raise ValueError(completions[0])

    class Broken(Exception):
        def __str__(self):
            raise RuntimeError

    class Fails(Environment):
        def step(self, turns):
            raise Broken

    environments = {"reward": RewardFunction(reward, "reward"), "broken": Fails()}
    grading = Grading(environments)
    for name in environments:
        for text in TEXTS:
            turn = Turn([*USER, {"role": "assistant", "content": text}], "5", "stop", {}, {})
            results = grading.grade({name: [{"a": turn}]}, block=True)
            assert results["a"].outcome == "error"
    said = capfd.readouterr()
    assert is_plain(said.err) and said.err.count("WARNING") == len(TEXTS) + 1


def test_an_observation_that_cannot_be_encoded_gets_replacement_characters(case):
    reply = np.int32([65])
    for text, same in (("a\ud800b", "a\ufffdb"), ("\udfff", "\ufffd"), ("\ud83d\ude00", "😀")):
        ids, others = (
            observation_ids(case.tokenizer, USER, reply, [{"role": "user", "content": content}])
            for content in (text, same)
        )
        assert ids == others


def test_what_is_said_keeps_what_has_a_shape(capsys):
    said = {"é 中 😀\nnext": "é 中 😀\nnext", "a\x1b[2J\ud800\u202e\x85\t": "a\\x1b[2J\\ud800\\u202e\\x85\\t"}
    said["x" * MAX_TOKENS] = "x" * MAX_TOKENS
    for text, shown in said.items():
        say(text)
        assert capsys.readouterr().out == f"{shown}\n"


def test_what_is_said_of_a_hostile_text_is_plain(capfd, monkeypatch):
    monkeypatch.delenv("GRPO_EXIT_FILE", raising=False)
    for text in TEXTS:
        Ranks(0, 1, 0, 1).print_rank0(f"WARNING: {text}")
        report_exit(3, f"stopped: {text}", None)
    said = capfd.readouterr()
    assert is_plain(said.out) and is_plain(said.err)
    assert said.out.count("WARNING: ") == said.err.count("stopped: ") == len(TEXTS)


@pytest.mark.long
def test_no_hostile_text_ends_a_run_of_the_real_command(tmp_path):
    agent = {"name": "hostile", "function": "hostile_agent:solve", "num_workers": 4, "deadline_s": 60}
    settings = [f"env.agents.{name}={value}" for name, value in agent.items()]
    settings += ["data.train.0.env_name=hostile", "data.train.1.env_name=hostile_agent:reward"]
    settings += ["env.max_error_fraction=1", "policy.max_total_sequence_length=768"]
    life = Life(tmp_path, 3, *settings)
    code = life.process.wait(timeout=900)
    content = life.log.read_text(encoding="utf-8")
    assert code == 0, content[-3000:]
    assert is_plain(content) and "Traceback" not in content
    assert "agent rollouts failed" in content and "hostile_agent:reward" in content and "\\ud800" in content
    records = [json.loads(line) for line in (tmp_path / "logs/exp_001/samples.jsonl").open(encoding="utf-8")]
    assert any("\ud800" in record.get("message", "") for record in records)
