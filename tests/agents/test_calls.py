"""Prompts of calls with the templates of real models, vLLM's parsers by name, and what an agent may give."""

import json
import re
import sys
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dist_case import settings
from loop import CPU

from advantages import step_advantages
from base.agents.calls import Rollout
from base.agents.environment import WORKER, Agent
from base.agents.parser import Parsed, ReplyParser
from base.agents.wire_chat import Refused, Request, link_of, read_message
from base.check import preflight
from base.hf.tokenizer import Tokenizer
from base.hf.turns import open_reply_ids
from base.inputs.reader import load
from base.system.ranks import Ranks
from config import AgentConfig, ChatServerConfig, ConfigError, SequencePackingConfig
from grpo import compute_loss
from head import HeadOptions, LossOptions, LossPath
from judges import worker
from judges.pool import Graded
from pack import finish_minibatches, make_minibatches, rows_on_host
from records import Completion, Grade, Sample, TokenSequence, make_tokens

ROOT = Path(__file__).resolve().parents[2]
sys.modules[worker.PACKAGE] = sys.modules["judges"]  # as in a worker
run, run_command, GIVEN = (worker.load(f"{WORKER}:{name}") for name in ("run", "run_command", "GIVEN"))
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": [2]}'}}
CHATML = (
    "{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}<|end|>\n"
    "{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
)


def request(*messages, **options):
    return Request.model_validate_json(json.dumps({"messages": messages} | options))


def reply_of(call, tokenizer, text, ends=True, reason="stop"):
    ids = tokenizer.backend.encode(text, add_special_tokens=False).ids + tokenizer.eos_token_ids[:1] * ends
    call.completion = Completion(make_tokens(ids, mask=True), reason)


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
    first.add_reply({"role": "assistant", "content": "a"}, ["a"])
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


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_reply_goes_on_with_text_of_the_assistant(tokenizer, reason):
    """With its own ids where only the limit cut it, else with those of the text."""
    rollout, user = Rollout((1, 2), 250, 8), {"role": "user", "content": "hi"}
    [cut] = rollout.ask(1, request(user), 10, tokenizer)
    reply_of(cut, tokenizer, "ab", ends=False, reason=reason)
    cut.add_reply({"role": "assistant", "content": "ab"}, ["ab"])
    opening = {"role": "assistant", "content": "ab"}
    [on] = rollout.ask(2, request(user, opening, continue_final_message=True), 10, tokenizer)
    assert on.parent is (cut if reason == "length" else None)
    text = tokenizer.decode(on.prompt_ids, special=True)
    assert text.startswith("<|user|>user\nhi<|end|>") and text.endswith("ab") and "<|end|>" not in text[-8:]
    reply_of(on, tokenizer, "cd")
    on.add_reply({"role": "assistant", "content": "cd"}, ["cd"])
    [after] = rollout.ask(3, request(user, {"role": "assistant", "content": "abcd"}, user), 10, tokenizer)
    assert after.parent is on and after.prompt_ids[: len(on.ids)] == on.ids
    reply_of(after, tokenizer, "e")
    assert [len(row) for row in rollout.rows()] == ([3] if reason == "length" else [2, 1])


def test_arguments_of_the_template_are_part_of_what_a_call_goes_on_from(tiny):
    tokenizer = Tokenizer(tiny[0], CHATML + "{{ mood }}")
    rollout, user = Rollout((1, 2), 250, 8), {"role": "user", "content": "hi"}
    [first] = rollout.ask(1, request(user, chat_template_kwargs={"mood": "good"}), 10, tokenizer)
    assert tokenizer.decode(first.prompt_ids).endswith("good")
    reply_of(first, tokenizer, "a")
    first.add_reply({"role": "assistant", "content": "a"}, ["a"])
    said = (user, {"role": "assistant", "content": "a"}, user)
    for options, parent in (({"mood": "good"}, first), ({"mood": "bad"}, None), (None, None)):
        [call] = rollout.ask(2, request(*said, chat_template_kwargs=options), 10, tokenizer)
        assert call.parent is parent
        assert tokenizer.decode(call.prompt_ids).endswith((options or {"mood": ""})["mood"])


PARTS = {"reward": 2, "rewards": {"a": np.float32(0.5)}, "extracted": 0}
NAN = float("nan")
GIVES = [  # what an agent gives -> (reward, outcome, rewards, extracted), whether it is a crash after a reply
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
    ({"reward": 1, "call_rewards": [0, 0.5]}, (1.0, "ok", {}, None), False),
    ({"reward": 1, "call_rewards": [0, NAN]}, (0.0, "error", {}, None), False),
    ({"reward": 1, "call_rewards": [0, "1"]}, (0.0, "error", {}, None), True),
    ({"reward": 1, "call_rewards": [10**400]}, (0.0, "error", {}, None), True),
    ({"reward": 1, "call_rewards": 3}, (0.0, "error", {}, None), True),
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


@pytest.mark.parametrize(("value", "expected", "is_crash"), GIVES, ids=range(len(GIVES)))
def test_what_an_agent_may_give(value, expected, is_crash, monkeypatch):
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "")
    job = dict.fromkeys(GIVEN, "") | {"function": "copy:copy", "kwargs": {"x": value}}
    agent = object.__new__(Agent)
    agent.cfg = AgentConfig(name="a")
    result = agent.result(None, Graded("ok", json.loads(json.dumps(run(job)))))
    assert (result.reward, result.outcome, result.rewards, result.extracted) == expected
    assert result.state.get("crashed", False) == is_crash
    assert bool(result.state.get("message")) == (expected[1] == "error" and value != {"reward": 1, "outcome": "error"})


NODE = """file:///x/fails.mjs:3
throw new TypeError("no luck");
      ^

TypeError [ERR_X]: no luck
    at file:///x/fails.mjs:3:7
    at ModuleJob.run (node:internal/modules/esm/module_job:195:25)

Node.js v20.20.2
"""
PYTHON = """Traceback (most recent call last):
ValueError: the cause

During handling of the above exception, another exception occurred:

mine.NoLuck: the end
"""
JAVA = 'Exception in thread "main" java.lang.RuntimeException: no luck\n\tat Main.main(Main.java:3)\n'


@pytest.mark.parametrize(
    ("stderr", "named"),
    [
        (NODE, "TypeError [ERR_X]: no luck"),
        (PYTHON, "mine.NoLuck: the end"),
        (JAVA, JAVA.splitlines()[0]),
        ("Error: a\nerror behind it\n", "Error: a"),
        ("run.sh: line 3: foo: command not found\n", "run.sh: line 3: foo: command not found"),
        ("", "it wrote nothing"),
    ],
)
def test_the_message_of_a_failed_command_is_the_line_that_names_the_error(stderr, named):
    program = f"import sys; sys.stderr.write({stderr!r}); sys.exit(3)"
    with pytest.raises(RuntimeError, match=re.escape(f"ended with exit code 3: {named}") + "$"):
        run_command([sys.executable, "-c", program], {})


@pytest.mark.parametrize(("size", "is_whole"), [(10, True), (65_000, True), (65_537, False), (200_000, False)])
def test_a_last_line_that_is_too_long_is_an_error_that_says_so(size, is_whole):
    for num_before in (0, 20_000):
        command = [sys.executable, "-c", f"print('noise\\n' * {num_before} + 'x' * {size} + '\\n')"]
        if is_whole:
            assert run_command(command, {}) == "x" * size
        else:
            with pytest.raises(RuntimeError, match=r"last line .* longer than 65536 bytes"):
                run_command(command, {})


def rollouts(rng):
    """3 groups of 5 rollouts of 1 to 4 rows; rows share prompts, some have an observation, one rollout is ungraded."""
    samples = []
    for prompt, index in np.ndindex(3, 5):
        rows = []
        for number in range(1 + (prompt + index) % 4):
            size, context = int(rng.integers(2, 9)), [3 + prompt, 7, number // 2] * (1 + number // 2)
            ids, logps = rng.integers(0, 9, size), rng.normal(-2, 0.4, size)
            rows.append(TokenSequence(context, make_tokens(ids, logp=logps, version=1, mask=np.arange(size) % 4 != 2)))
        outcome = "ok"
        if index == 4:
            outcome = "error" if prompt == 1 else "crashed"
        grade = Grade(float(rng.random()), outcome)
        samples.append(Sample(prompt, index, 0, rows, grade, by_agent=True))
    return samples


def loop_advantage(own, others, grpo):
    peers = others if grpo.use_leave_one_out_baseline else [*others, own]
    mean = sum(peers) / len(peers)
    deviation = (sum((r - mean) ** 2 for r in peers) / (len(peers) - 1)) ** 0.5
    return (own - mean) / (deviation + 1e-6) if grpo.normalize_rewards else own - mean


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


BY_SAMPLE = {"token_level_loss": False}
GSPO = BY_SAMPLE | {"sequence_level_importance_ratios": True}


@pytest.mark.parametrize(
    ("keys", "loss_fn", "passes"),
    [
        ({}, {}, "one pass"),
        ({"normalize_rewards": False}, {}, "two passes"),
        ({"use_leave_one_out_baseline": False}, BY_SAMPLE, "one pass"),
        ({}, BY_SAMPLE, "two passes"),
        ({}, GSPO, "two passes"),
        ({}, BY_SAMPLE | {"loss_scale_factor": 7.0}, "one pass"),
    ],
    ids=str,
)
def test_rollouts_of_one_to_four_rows_against_a_loop_over_rollouts(keys, loss_fn, passes, float64, monkeypatch):
    """Advantages, the loss and its gradient, in float64, as two ranks pack the rows; the model is a table of logits by
    token and by position. A crash, which the policy may have caused, counts with reward 0. Some tokens and a whole row
    are masked: with token_level_loss=false a rollout weighs the same however many rows it has."""
    packing = SequencePackingConfig(train_mb_tokens=64)
    cfg = settings(
        grpo={"reward_std_floor": 0.0} | keys,
        loss_fn={"old_logprobs": "sampler"} | loss_fn,
        policy={"sequence_packing": packing},
    )
    samples = rollouts(np.random.default_rng(5))
    for s in samples:
        s.grade.reward *= s.grade.outcome == "ok"
        s.is_filtered = s.grade.outcome == "error"
    samples[2].sequences[2].tokens["logp"] = np.nan
    samples[3].sequence.tokens["logp"][0] = np.inf
    adv_B, _ = step_advantages(samples, cfg.grpo, cfg.loss_fn)
    tables = [torch.randn(size, 9, generator=torch.manual_seed(1)) for size in (12, 40)]
    ours, theirs = ([t.clone().requires_grad_() for t in tables] for _ in range(2))

    expected = []  # for each rollout the sum over its tokens, and their number
    for s, adv in zip(samples, adv_B, strict=True):
        peers = [o for o in samples if o.prompt == s.prompt and o is not s]
        graded = [o for o in peers if o.grade.outcome != "error"]
        want = loop_advantage(s.grade.reward, [o.grade.reward for o in graded], cfg.grpo) if s.grade.is_valid else 0.0
        assert adv == pytest.approx(want, rel=1e-9, abs=1e-9)
        losses = []
        for row in s.sequences if s.grade.is_valid else ():
            ids = row.token_ids
            log_ratios = []
            for i in np.flatnonzero(row.tokens["mask"]):
                at = len(row.prompt_ids) + int(i) - 1
                if np.isfinite(row.tokens["logp"][i]) and ids[at + 1] != 5:
                    logp = (theirs[0][ids[at]] + theirs[1][at]).log_softmax(0)[ids[at + 1]]
                    log_ratios.append(logp - float(row.tokens["logp"][i]))
            if log_ratios and cfg.loss_fn.sequence_level_importance_ratios:
                log_ratios = [sum(log_ratios) / len(log_ratios)] * len(log_ratios)
            for log_ratio in log_ratios:
                ratio = log_ratio.exp()
                bound = min(max(ratio.item(), 1 - cfg.loss_fn.ratio_clip_min), 1 + cfg.loss_fn.ratio_clip_max)
                losses.append(-want * (ratio if want * ratio <= want * bound else bound))
        if losses:
            expected.append((sum(losses), len(losses)))
    num_tokens = sum(number for _, number in expected)
    if cfg.loss_fn.token_level_loss:
        loop_loss = sum(loss for loss, _ in expected) / num_tokens
    else:
        loop_loss = sum(loss / (cfg.loss_fn.loss_scale_factor or number) for loss, number in expected) / len(expected)
    loop_loss.backward()

    of_ranks = [make_minibatches(samples, adv_B, cfg, Ranks(rank, 2, rank, 1), CPU)[0] for rank in range(2)]
    num_positive = 0
    num_tokens_B = np.zeros(of_ranks[0].num_samples, int)
    for minibatch in of_ranks:
        for micro in minibatch.micros:
            micro.mask_R = micro.target_R != 5
        for rows in rows_on_host(minibatch.micros):
            num_positive += rows.num_positive_tokens
            num_tokens_B += rows.num_tokens_of_samples(minibatch.num_samples)

    def all_reduce(total):
        total.copy_(torch.from_numpy(num_tokens_B) if total.dim() else torch.tensor(num_positive))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    options = HeadOptions(loss=LossOptions(path=LossPath(passes)))
    exact = {np.float32(adv).item(): adv for adv in adv_B}  # packs hold float32
    weight_VD = torch.cat(ours).T
    total = 0.0
    for minibatch in of_ranks:
        finish_minibatches([minibatch], options.loss.path, 0)
        assert (minibatch.num_tokens, minibatch.num_trained_samples) == (num_tokens, len(expected))
        for micro in minibatch.micros:
            micro.adv_R = torch.tensor([exact[adv] for adv in micro.adv_R.tolist()])
            micro.tokens_R["logp"] = micro.sampler_logp_R.double()
            hidden_RD = torch.zeros(len(micro.pos_R), 52)
            hidden_RD[torch.arange(len(hidden_RD)), micro.token_T[micro.pos_R]] = 1
            hidden_RD[torch.arange(len(hidden_RD)), 12 + micro.position_T[micro.pos_R]] = 1

            def model(*inputs_and_head, hidden_RD=hidden_RD):
                return inputs_and_head[-1](hidden_RD, weight_VD)

            total = total + compute_loss(model, options, micro, minibatch, cfg)[0]
    total.backward()
    assert len(of_ranks[0].micros) > 1 and total.item() == pytest.approx(loop_loss.item(), rel=1e-9)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our.grad, their.grad, rtol=1e-9, atol=1e-12)


HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": %d, "b": ["x"]}}\n</tool_call>'
LLAMA = '{"name": "f", "parameters": {"a": %d}}'
CODER = "<tool_call>\n<function=f>\n<parameter=a>\n%d\n</parameter>\n</function>\n</tool_call>"
TEXTS = {  # parser -> texts with calls, texts with none or broken ones
    "hermes": (
        [HERMES, "So: " + HERMES, HERMES + "\n" + HERMES, HERMES.replace('"x"', '"<tool_call>"'), HERMES[:-12]],
        [
            HERMES[:40],
            "<tool_call>%d</tool_call>",
            '<tool_call>{"nam": "f"}</tool_call>',
            "no call %d",
            "%d</tool_call>",
        ],
    ),
    "llama3_json": (
        [
            LLAMA,
            "<|python_tag|>" + LLAMA,
            LLAMA + "; " + LLAMA,
            "So: " + LLAMA,
            LLAMA.replace("parameters", "arguments"),
        ],
        [LLAMA[:20], "<|python_tag|>f(%d)", '{"name": "f"} %d', '{"a": %d}', "{%d"],
    ),
    "qwen3_coder": (
        [CODER, "So:\n" + CODER, CODER + "\n" + CODER, CODER[12:], CODER.replace("%d", "[%d, {}]")],
        [CODER[:25] + "%d", "<tool_call>%d</tool_call>", CODER.replace("=f", ""), "no call %d", "</function>%d"],
    ),
    "pythonic": (
        ["[f(a=%d)]", "[f(a=%d), f(b='x')]", "[f(a=[%d, {'c': None}])]", "[f()]", "[f(a=-%d)]"],
        ["[f(a=%d", "[f(%d)] x", "f(a=%d)", "[f(a=g(%d))]", "[%d]"],
    ),
}


def test_the_commands_of_the_page_pass_the_check(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    [code] = re.findall(r"my_agent\.py.*?```python\n(.*?)```", page, re.S)
    (tmp_path / "my_agent.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(ROOT)
    commands = re.findall(r"^    .*train\.sh (\S+\.yaml)(.*)$", page, re.M)
    assert len(commands) >= 4
    for config, words in commands:
        words = [*words.split(), "env.agents.0.num_workers=1"]
        cfg = load(config, words)
        if cfg.env.agents[0].python:  # which is not here
            cfg = load(config, [*words, f"env.agents.0.python={sys.executable}"])
        assert f"graded by {cfg.env.agents[0].name}" in preflight.check(cfg)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_vllms_parsers_by_name(name, tiny, tmp_path, capfd):
    """60 texts, a third without a call that can be read: as vLLM's server has them, with transformers' tokenizer."""
    from transformers import PreTrainedTokenizerFast

    from engine import reply_parsers

    tokenizer = Tokenizer(tiny[0])
    tokenizer.backend.add_tokens(["<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>"])
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    parse = ReplyParser(reply_parsers(), tokenizer, ChatServerConfig(tool_parser=name))
    get_parser, _, make_request = reply_parsers()
    request = make_request(messages=[{"role": "user", "content": ""}], tools=tools)
    texts = [text.replace("%d", str(i)) for text in TEXTS[name][0] for i in range(8)]
    texts += [text.replace("%d", str(i)) for text in TEXTS[name][1] for i in range(4)]
    num_calls = []
    for text in texts:
        want = get_parser(name)(theirs, request.tools).extract_tool_calls(text, request)
        calls = [{"name": call.function.name, "arguments": call.function.arguments} for call in want.tool_calls]
        assert parse(text, tools) == Parsed(None, want.content, calls)
        assert parse(text, None) == Parsed(None, text, [])
        num_calls.append(len(calls))
    assert len(texts) == 60 and all(num_calls[:40]) and num_calls[40:].count(0) >= 12, num_calls
    said = capfd.readouterr()
    assert "Traceback" not in said.err + said.out


THOUGHTS = [  # sampled; what a client may write as the content of the next turn
    ("<think>hm</think>ok", ["ok", " ok\n", "<think>hm</think>ok", "<think>\nhm\n</think>\n\nok"]),
    ("<think>\nhm\n</think>\n\nok", ["ok", "<think>\nhm\n</think>\n\nok"]),
    ("hm</think>ok", ["ok", "hm</think>ok", "<think>hm</think>ok", "<think>\nhm\n</think>\n\nok"]),
    ("<think>hm", ["", "<think>hm", "<think>hm</think>"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("sampled", "echoes"), THOUGHTS)
def test_a_client_that_puts_the_thought_back_continues_its_sequence(sampled, echoes, tiny):
    from base.agents.endpoint import Endpoint
    from engine import reply_parsers

    tokenizer = Tokenizer(tiny[0], CHATML)
    tokenizer.backend.add_tokens(["<think>", "</think>"])
    endpoint = object.__new__(Endpoint)
    endpoint.tokenizer, endpoint.engine = tokenizer, SimpleNamespace(stop_token_ids=tokenizer.eos_token_ids)
    endpoint.parse = ReplyParser(reply_parsers(), tokenizer, ChatServerConfig(reasoning_parser="deepseek_r1"))
    rollout, user = Rollout((1, 2), 250, 99), {"role": "user", "content": "q"}
    [call] = rollout.ask(1, request(user), 10, tokenizer)
    reply_of(call, tokenizer, sampled)
    reply = endpoint._read(call)
    assert "hm" in reply.reasoning and "think>" not in (reply.content or "")
    others = ["other", "<think>other</think>ok", "<think>hm</think>other"]
    for content in (*echoes, *others):
        for reasoning in ({}, {"reasoning_content": reply.reasoning}):
            back = {"role": "assistant", "content": content} | reasoning
            [after] = rollout.ask(2, request(user, back, user), 10, tokenizer)
            assert (after.parent is call) == (content in echoes), content
            assert after.parent is None or after.prompt_ids[: len(call.ids)] == call.ids


@pytest.mark.slow
def test_a_parser_is_named_or_there_is_none(tiny):
    from engine import reply_parsers

    given, text = (reply_parsers(), Tokenizer(tiny[0])), "<think>a</think>b"
    assert ReplyParser(*given, ChatServerConfig())(text, [CALL]) == Parsed(None, text, [])
    for name in ("nonesuch", "llama3_json"):  # whose <|python_tag|> the tokenizer lacks
        with pytest.raises(ConfigError, match=rf"http_server_serving_chat_kwargs.*({name}|python_tag)"):
            ReplyParser(*given, ChatServerConfig(tool_parser=name))


QWEN = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
QWEN += "{{ '<think>\n\n</think>\n\n' if off }}"
THINKING_OFF = [  # parser, arguments of the run's template, of the request, template, prompt, is the reply content?
    ("qwen3", {}, {}, QWEN, "q", False),
    ("qwen3", {"enable_thinking": False}, {}, QWEN, "q", True),
    ("qwen3", {}, {"enable_thinking": False}, QWEN, "q", True),
    ("qwen3", {"enable_thinking": False}, {"enable_thinking": True}, QWEN, "q", False),
    ("qwen3", {"off": True}, {}, QWEN, "q", True),  # a switch of another name
    ("qwen3", {}, {"off": True}, QWEN, "q /no_think", True),
    ("qwen3", {}, {}, QWEN, "<think>a</think>", False),  # of another turn
    ("qwen3", {"off": True}, {}, QWEN.replace("off }}", "off }}<think>"), "q", False),  # and opened again
    ("qwen3", {"enable_thinking": [1]}, {"enable_thinking": {"a": "\ud800"}}, QWEN, "q", True),  # cannot be read
    ("glm45", {"enable_thinking": False}, {}, QWEN, "q", True),
    ("glm45", {}, {}, QWEN, "q", False),
    ("deepseek_v3", {}, {}, QWEN, "q", True),  # which thinks where it is told to
    ("deepseek_v3", {"thinking": True}, {}, QWEN, "q", False),
    ("deepseek_r1", {"enable_thinking": False}, {}, QWEN, "q", False),  # has no switch
    ("deepseek_r1", {}, {"off": True}, QWEN, "q", True),
    ("qwen3", {"enable_thinking": False}, {"other": 1}, QWEN, "q", True),
    ("nemotron_v3", {}, {"enable_thinking": False}, QWEN, "q", True),
    ("minimax_m2", {}, {"off": True}, QWEN, "q", True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "own", "asked", "template", "text", "is_content"), THINKING_OFF)
def test_r2_a_reply_without_a_thought_is_content(name, own, asked, template, text, is_content, tiny):
    """vLLM#53284, #35230: the parser knows the template's arguments, and what the prompt has closed."""
    from engine import reply_parsers

    tokenizer = Tokenizer(tiny[0], template, own)
    tokenizer.backend.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    parse = ReplyParser(reply_parsers(), tokenizer, ChatServerConfig(reasoning_parser=name))
    ids = tokenizer.render([{"role": "user", "content": text}], template_kwargs=asked)
    found = parse("The answer is 5.", None, asked, ids)
    want = (None, "The answer is 5.") if is_content else ("The answer is 5.", "")
    assert (found.reasoning, found.content) == want
    assert parse.content_of_beginning("The", None, asked, ids) in (["", "The"] if is_content else [""])


@pytest.mark.slow
def test_r2_a_reply_that_goes_on_behind_a_closed_thought_is_content(tiny):
    from engine import reply_parsers

    tokenizer = Tokenizer(tiny[0], CHATML)
    tokenizer.backend.add_tokens(["<think>", "</think>"])
    parse = ReplyParser(reply_parsers(), tokenizer, ChatServerConfig(reasoning_parser="deepseek_r1"))
    for opening, reasoning in (("<think>hm</think>It is", None), ("<think>hm", "m")):
        ids = open_reply_ids(tokenizer, [{"role": "user", "content": "q"}, {"role": "assistant", "content": opening}])
        found = parse("m</think> 5" if reasoning else " 5", None, None, ids)
        assert (found.reasoning, found.content) == (reasoning, " 5")
