"""Conversations with tools through chat templates: at each turn an agent's prompt is what transformers renders.

Of the templates here, each has a trait of a family; the real ones are those of npm's tokenizers, and of a folder of
*.jinja files, such as vLLM's examples: `GRPO_TEMPLATES=FOLDER tests/run.sh --long tests/agents/test_templates.py`.
"""

import json
import os
import re
import tarfile
from pathlib import Path

import jinja2
import pytest
import tokenizers
from real_tokenizers import archive_of
from tokenizers import decoders, models, pre_tokenizers

from base.agents.calls import Rollout
from base.agents.wire_anthropic import Messages
from base.agents.wire_chat import Reply, Request, read_message
from base.agents.wire_responses import Responses
from base.hf.tokenizer import Tokenizer
from base.hf.turns import observation_ids, turn_ends
from config import DataError
from records import Completion, make_tokens

REAL = ("qwen2_5", "qwen3", "llama3_1", "llama3_2", "mistral_nemo", "deepseek_v3")
FOLDER = Path(__file__).resolve().parents[1] / "helpers" / "tool_templates"
OWN = {file.stem: file.read_text(encoding="utf-8") for file in sorted(FOLDER.glob("*.jinja"))}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f'{name}s <b>two</b> & says "é"',
            "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "x"}}},
        },
    }
    for name in ("search", "add")
]


def user(text):
    return {"role": "user", "content": text}


def says(text, *calls, **more):
    return {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {}) | more


def call(name, call_id, **arguments):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text, call_id, name):
    return {"role": "tool", "content": text, "tool_call_id": call_id, "name": name}


ONE, TWO, THREE = "aaaaaaaaa", "bbbbbbbbb", "ccccccccc"
SYSTEM = {"role": "system", "content": "Be brief."}
TALKS = {  # the last words of each reply are found again by SAID
    "calls in a row": [
        user("count"),
        says(None, call("search", ONE, a="SAID1")),
        result("HEARD1", ONE, "search"),
        says(None, call("add", TWO, a="é", b=[3, {"c": "SAID2"}])),
        result('{"sum": "HEARD2"}', TWO, "add"),
        says("so SAID3"),
        user("HEARD3"),
        says(None, call("search", THREE, a="SAID4")),
        result("HEARD4", THREE, "search"),
        says("SAID5"),
        user("HEARD5"),
        says("end"),
    ],
    "two at once": [
        SYSTEM,
        user("count"),
        says(None, call("search", ONE, a="x"), call("add", TWO, a="SAID1", b=2)),
        result("HEARD1", ONE, "search"),
        result("HEARD1", TWO, "add"),
        says("SAID2"),
        user("HEARD2"),
        says("end"),
    ],
    "words and a call": [
        user("count"),
        says("I look.", call("search", ONE, a="SAID1")),
        result("HEARD1", ONE, "search"),
        says("And add.", call("add", TWO, a="SAID2")),
        result("HEARD2", TWO, "add"),
        says("end"),
    ],
    "no arguments, thoughts": [
        SYSTEM,
        user("count"),
        says(None, call("search", ONE), reasoning_content="hm"),
        result("HEARD1", ONE, "search"),
        says("SAID2", reasoning_content="aha"),
        user("HEARD2"),
        says("end"),
    ],
}


def tokenizers_of(folder, template):
    """(ours, transformers'): an id per byte, and one for each mark of the template."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    marks = re.findall(r"<[|\uff5c][^<>{}'\"]*?>|<[^<>{}'\"| ]*?\|>|\[/?[A-Z_]{3,}\]|</?\w+_of_turn>", template)
    backend.add_special_tokens(list(dict.fromkeys(["<s>", "</s>", *marks])))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template
    )
    return Tokenizer(folder, template), theirs


def with_texts(messages):
    """With arguments as OpenAI's clients have them, which DeepSeek's templates ask for."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return messages


def rendered(theirs, messages, opening=True):
    """transformers' text; None if it refuses the messages in each form that a dataset may have them in."""
    without_null = [message | {"content": message["content"] or ""} for message in messages]
    for form in (messages, with_texts(messages), without_null, with_texts(without_null)):
        try:
            return theirs.apply_chat_template(form, tools=TOOLS, add_generation_prompt=opening, tokenize=False)
        except (jinja2.TemplateError, TypeError, ValueError):
            continue
    return None


def found(call):
    try:
        return call()
    except DataError:
        return None


def add_reply(asked, message, text, tokenizer):
    ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
    asked.completion = Completion(make_tokens(ids, mask=True), "stop")
    asked.add_reply(with_texts([message])[0], [message["content"] or ""])


def check_talk(talk, ours, theirs):
    """Each turn of an agent that keeps the whole conversation. The reply is what the template writes for its message.
    Returns the number of turns that are the whole text of transformers, and of those that are its end: from the reply's
    end on, where the template rewrites what was before."""
    rollout = Rollout((1,), 1 << 20, 100)
    counts = {"whole": 0, "end": 0, "refused": 0}
    last_reply, said, whole = -1, "", None
    for number, message in enumerate(talk):
        if message["role"] != "assistant":
            continue
        messages = talk[:number]
        want = rendered(theirs, messages)
        row = found(lambda: ours.render(messages, TOOLS))  # noqa: B023
        assert row is None or want is None or ours.backend.decode(row, skip_special_tokens=False) == want
        request = Request.model_validate_json(json.dumps({"messages": with_texts(messages), "tools": TOOLS}))
        asked = found(lambda: rollout.ask(number, request, 10, ours))  # noqa: B023
        if asked is None or want is None:
            counts["refused"] += 1
            break
        [asked] = asked
        text = ours.backend.decode(asked.prompt_ids, skip_special_tokens=False)
        before = 0
        if counts["whole"] + counts["end"]:
            assert asked.parent is not None
            before = len(asked.parent.ids)
        if text == want:
            counts["whole"] += 1
        else:
            added = ours.backend.decode(asked.prompt_ids[before:], skip_special_tokens=False)
            assert want.endswith(added), (want, added)
            new = re.findall(r"HEARD\d", json.dumps(messages[last_reply + 1 :]))
            assert re.findall(r"HEARD\d", added) == new, (want, added)
            if said and said in want and whole is not None:  # up to the end of the reply, and not further
                left = want[: -len(added)].rpartition(said)[2]
                assert whole.rpartition(said)[2].startswith(left), (want, added)
            counts["end"] += 1
        whole = rendered(theirs, [*messages, message], opening=False)
        reply = "x"
        if whole is not None and whole.startswith(want):
            reply = whole[len(want) :].rstrip()
        last_reply = number
        said = (re.findall(r"SAID\d", json.dumps(message)) or [""])[-1]
        if not reply.endswith(tuple(turn_ends(ours))):
            reply += turn_ends(ours)[-1]
        add_reply(asked, message, reply, ours)
    return counts


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", OWN)
def test_r3_each_turn_with_tools_is_what_transformers_renders(tmp_path, name, talk):
    counts = check_talk(TALKS[talk], *tokenizers_of(tmp_path, OWN[name]))
    is_refused = name == "take_turns" and TALKS[talk][0] is SYSTEM  # by transformers, too
    assert (counts["refused"] > 0) == (is_refused or (name, talk) == ("one_call", "two at once"))
    assert counts["whole"] + counts["end"] >= 1 - is_refused


def test_r3_two_results_in_a_row_by_hand(tmp_path):
    """As the report has them: the second result opens the list again, and no turn is refused."""
    talk = TALKS["calls in a row"][:5]
    for name, ending in (("null_calls", '<|outputs|><|output|>{"sum": "HEARD2"}<|outputs_end|>'), ("take_turns", None)):
        ours, theirs = tokenizers_of(tmp_path, OWN[name])
        ending = ending or '[TOOL_RESULTS]{"sum": "HEARD2"}[/TOOL_RESULTS]'
        rollout = Rollout((1,), 1 << 20, 100)
        for number in (1, 3, 5):
            messages = with_texts(talk[:number])
            [asked] = rollout.ask(number, Request.model_validate({"messages": messages, "tools": TOOLS}), 10, ours)
            if number < 5:
                add_reply(asked, talk[number], "sampled in a form of its own</s>", ours)
        text = ours.backend.decode(asked.prompt_ids, skip_special_tokens=False)
        assert text.endswith(f"sampled in a form of its own</s>{ending}")
        assert rendered(theirs, talk).endswith(ending)


@pytest.mark.parametrize("end", ["</s>", "", "<|eot|>"])
def test_what_follows_a_call_that_was_cut_or_ended_otherwise(tmp_path, end):
    """The template's own end is added where the policy has not sampled it."""
    ours, _ = tokenizers_of(tmp_path, "{#- <|eot|> #}" + OWN["parameters"])
    reply = ours.backend.encode("<f=search>" + end, add_special_tokens=False).ids
    calling = says(None, call("search", ONE, a="1"))
    ids = observation_ids(ours, [user("?")], reply, [result("r", ONE, "search")], TOOLS, calling=calling)
    text = ours.backend.decode(ids, skip_special_tokens=False)
    assert text == "<|im_end|>\n<|im_start|>user\n<r>r</r><|im_end|>\n<|im_start|>assistant\n"


def test_a_result_that_the_template_leaves_out_is_refused(tmp_path):
    """The policy would never see it. vLLM's template for GLM-4 is of this kind."""
    ours, _ = tokenizers_of(
        tmp_path, "{% for m in messages if m.role != 'tool' %}{{ m.content or '' }}</s>{% endfor %}"
    )
    for calling in (None, says(None, call("search", ONE))):
        with pytest.raises(DataError, match="leaves out a message"):
            observation_ids(ours, [user("?")], [5], [result("r", ONE, "search")], calling=calling)
    assert observation_ids(ours, [user("?")], [5], [user("r")])


@pytest.mark.long
def test_r3_real_templates(tmp_path):
    templates = {}
    for name in REAL:
        with tarfile.open(archive_of(name, tmp_path)) as archive:
            text = json.load(archive.extractfile("package/models/tokenizer_config.json"))["chat_template"]
        templates[name] = (
            text if isinstance(text, str) else {part["name"]: part["template"] for part in text}["default"]
        )
    for file in sorted(Path(os.environ.get("GRPO_TEMPLATES", tmp_path)).rglob("*.jinja")):
        text = file.read_text(encoding="utf-8")
        if "tool" in text and "strftime_now('%Y-%m-%d %H" not in text:  # the time of the day is midnight's here
            templates[file.stem] = text
    num_with_tools = 0
    for number, (name, template) in enumerate(templates.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        all_counts = [check_talk(talk, *tokenizers_of(folder, template)) for talk in TALKS.values()]
        counts = {key: sum(part[key] for part in all_counts) for key in ("whole", "end", "refused")}
        print(f"{name}: {counts}")
        num_with_tools += counts["whole"] + counts["end"] >= 8
    assert num_with_tools >= len(REAL)
    print(f"{num_with_tools} of {len(templates)} templates serve conversations with tools")


# ------------------------------------------------------------------------------------------------ messages of clients


def test_r5_a_null_content_stays_null_beside_calls(tmp_path):
    asked = says(None, call("search", ONE, a="1"))
    assert read_message(asked)["content"] is None
    for content in ("", "x"):
        assert read_message(asked | {"content": content})["content"] == content
    assert read_message(says(None))["content"] == ""
    item = {"type": "function_call", "call_id": ONE, "name": "search", "arguments": '{"a": "1"}'}
    block = {"type": "tool_use", "id": ONE, "name": "search", "input": {"a": "1"}}
    bodies = [
        Responses(json.dumps({"input": [user("?"), item]}).encode(), {}),
        Messages(json.dumps({"messages": [user("?"), says([block]), user("!")]}).encode(), {}),
    ]
    ours, theirs = tokenizers_of(tmp_path, OWN["null_calls"])
    for body in bodies:
        message = body.request.messages[1]
        assert message == read_message(asked)
        text = ours.backend.decode(ours.render([user("?"), message]), skip_special_tokens=False)
        assert '<|call|>search\n{"a": "1"}\n```' in text
        assert text == rendered(theirs, [user("?"), asked])


def test_r4_ids_of_calls_have_nine_letters():
    ids = set()
    for seed in range(50):
        tool_calls = [{"name": "f", "arguments": "{}"}, {"name": "f", "arguments": "{}"}]
        reply = Reply(seed, None, None, tool_calls, "stop", None, [], [], [])
        assert [made["id"] for made in reply.calls] == [made["id"] for made in reply.calls]
        ids.update(made["id"] for made in reply.calls)
    assert len(ids) == 100 and all(re.fullmatch("[a-zA-Z0-9]{9}", made) for made in ids)
