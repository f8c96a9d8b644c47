"""What is read of a row in each of its forms, and what a user hears of a row that is wrong."""

import json
from pathlib import Path

import pytest
from dataset_case import GOOD, USER, load, refused

from base.hf.tokenizer import Tokenizer
from base.inputs.chats import read_messages

CHAT_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("row", "keys", "messages", "answer"),
    [
        ({"input": "p", "output": "5"}, {}, [("user", "p")], "5"),
        ({"input": "p", "output": 5.5}, {}, [("user", "p")], "5.5"),
        ({"problem": "p", "expected_answer": "5", "problem_source": "x"}, {}, [("user", "p")], "5"),  # OpenMathInstruct
        ({"question": "q", "answer": "She has 9 * 2 = 18.\n#### 18"}, {}, [("user", "q")], "18"),  # GSM8K
        ({"a": {"b": "p"}, "c": {"d": {"e": 7}}}, {"input_key": "a.b", "output_key": "c.d.e"}, [("user", "p")], "7"),
        ({"a.b": "p", "a": {"b": "no"}, "answer": "7"}, {"input_key": "a.b"}, [("user", "p")], "7"),
        (
            {"prompt": [USER], "reward_model": {"ground_truth": "34", "style": "rule"}},
            {"dataset_name": "DAPOMath17K"},
            [("user", "a")],
            "34",
        ),
        ({"messages": [USER], "answer": "7", "question": "q"}, {"input_key": "question"}, [("user", "q")], "7"),
        ({"messages": [USER], "answer": "7", "question": "unused"}, {}, [("user", "a")], "7"),
        ({"messages": [USER, {"role": "assistant", "content": "8"}]}, {}, [("user", "a")], "8"),  # the answer is there
        ({"messages": [USER | {"content": [{"type": "text", "text": "b"}]}], "output": "8"}, {}, [("user", "b")], "8"),
        ({"messages": None, "input": "p", "output": "1", "tools": None}, {}, [("user", "p")], "1"),  # arrow's nulls
        ({"input": "p"}, {"env_name": "reward_model"}, [("user", "p")], ""),  # what needs no answer asks for none
        ({"input": "p", "answer": {"a": [1]}}, {"env_name": "m:C"}, [("user", "p")], '{"a": [1]}'),
        ({"input": "p", "answer": "x\n#### 5"}, {"env_name": "code"}, [("user", "p")], "x\n#### 5"),  # a comment
    ],
)
def test_forms_of_a_row(tokenizer, row, keys, messages, answer):
    (found,) = load(tokenizer, [row], **keys).problems
    assert [(message["role"], message["content"]) for message in found.messages] == messages
    assert (found.answer, found.fields, found.dataset, found.loss_multiplier) == (answer, row, "rows", 1.0)
    assert bytes(tokenizer.decode(found.prompt_ids), "utf-8") == "".join(text for _, text in messages).encode()


def test_the_keys_of_a_message_keep_their_order():
    """A dataset's fingerprint is of them: a run would not find its data again."""
    for message in ({"role": "user", "content": "a", "name": "b"}, {"name": "b", "content": "a", "role": "user"}):
        assert [*read_messages([message])[0]] == [*message]


def test_tools_of_a_row(tokenizer):
    writes_tools = Tokenizer(tokenizer.file.parent, "{{ tools }} {{ messages[0].content }}")
    rows = load(writes_tools, [GOOD | {"tools": [CHAT_TOOL]}, GOOD | {"tools": []}]).problems
    assert [row.tools for row in rows] == [[CHAT_TOOL], None]
    assert [writes_tools.decode(row.prompt_ids) for row in rows] == [f"{[CHAT_TOOL]} 1+1", "None 1+1"]


def test_the_word_of_the_dataset_beside_a_foreign_task_name(tokenizer):
    rows = [GOOD | {"task_name": name} for name in ("algebra", "code", "mine", None, "algebra")]
    dataset = load(tokenizer, rows, env_name="math", tasks={"mine": "m:C"})
    assert [problem.env_name for problem in dataset.problems] == ["math", "code", "m:C", "math", "math"]
    keys = {"input_key": "input", "output_key": "output"}  # the env_name of a preset is nobody's word
    assert "task_name 'algebra' is not an environment" in refused(tokenizer, rows, dataset_name="gsm8k", **keys)


@pytest.mark.parametrize("name", ["math", "code", "calculator", "mine", "other"])
def test_agents3_1_the_name_of_a_data_file_decides_no_grader(tokenizer, name):
    """The same rows under another name go where they went, whatever their task_name names."""
    tasks = {"mine": "m:C", "calculator": "calculator"}
    rows = [GOOD | {"task_name": task} for task in ("math", "code", "calculator", "mine", None)]
    expected = ["math", "code", "calculator", "m:C", "exact"]
    file = Path(f"{name}.jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for keys in ({"data_path": str(file)}, {"name": name}):
        assert [problem.env_name for problem in load(tokenizer, rows, tasks=tasks, **keys).problems] == expected
    file.write_text(json.dumps(GOOD | {"task_name": "other"}) + "\n")
    assert "task_name 'other' is not an environment" in refused(tokenizer, [], data_path=str(file))


def test_prompts_go_around_the_last_user_message_and_a_rows_own_system_message_stays(tokenizer):
    Path("prompt.txt").write_text(r"<{}> \boxed{{}} {x}")
    Path("system.txt").write_text("Sys ü")
    talk = [USER, {"role": "assistant", "content": "b"}, {"role": "user", "content": "{}c"}]
    own = [{"role": "system", "content": "own"}, USER]
    rows = [{"input": "1+{}", "output": "2"}, {"messages": talk, "output": "2"}, {"messages": own, "output": "2"}]
    dataset = load(tokenizer, rows, prompt_file="prompt.txt", system_prompt_file="system.txt")
    assert [[message["content"] for message in row.messages] for row in dataset.problems] == [
        ["Sys ü", r"<1+{}> \boxed{} {x}"],
        ["Sys ü", "a", "b", r"<{}c> \boxed{} {x}"],
        ["own", r"<a> \boxed{} {x}"],
    ]
    for text in (b"no place", b"{} and {}", b"{{}}", b"\xff{}"):
        Path("prompt.txt").write_bytes(text)
        assert refused(tokenizer, [GOOD], prompt_file="prompt.txt").startswith("prompt.txt: ")
    assert refused(tokenizer, [GOOD], system_prompt_file="absent.txt").startswith("absent.txt: cannot be read")
    Path("prompt.txt").write_text("Think. {}<|end|>")
    assert "'<|end|>'" in refused(tokenizer, [GOOD], prompt_file="prompt.txt")


def test_loss_multiplier(tokenizer):
    rows = load(tokenizer, [GOOD | {"loss_multiplier": value} for value in (0, 1.0)] + [GOOD]).problems
    assert [row.loss_multiplier for row in rows] == [0, 1, 1]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (b'{"input": "1+1", "output"', "JSON"),
        (b'{"input": "\xff", "output": "2"}', "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'["1+1"]', "object"),
        (b'{"input": "\\ud800", "output": "2"}', "TypeError"),  # half a surrogate pair
        (b'{"input": "1", "output": NaN}', "Out of range float"),
        (
            {"input": "1+1", "result": "2"},
            "output, expected_answer, ground_truth, answer in the row, which has input, result",
        ),
        ({"input": "1+1", "output": None}, "output_key"),
        ({"text": "1+1", "output": "2"}, "input_key"),
        ({"input": 5, "output": "2"}, "TypeError"),
        ({"input": "", "output": "2"}, "the prompt is empty"),
        ({"messages": [], "output": "2"}, "messages"),
        ({"messages": [{"role": "user", "content": None}], "output": "2"}, "messages"),
        ({"messages": [{"role": "user", "content": [{"text": None}]}], "output": "2"}, "TypeError"),
        ({"messages": ["a"], "output": "2"}, "AttributeError"),
        (
            {"messages": [USER, USER | {"role": "assistant"}], "output": "2"},
            "the assistant's last message counts as the answer",
        ),
        ({"messages": [USER | {"role": "assistant"}]}, "no message before the assistant's"),
        (GOOD | {"task_name": "os:system"}, "'os:system' is not an environment: use exact, math, code"),
        (GOOD | {"loss_multiplier": 0.5}, "loss_multiplier=0.5"),
        *(
            (GOOD | {"output": answer, "task_name": task}, f"{answer!r} is neither text nor number")
            for answer in ([], ["2"], [1, 2], {}, {"value": 2}, True, False)
            for task in ("exact", "math", "math_multi_reward")
        ),
    ],
)
def test_every_error_of_a_row_names_file_and_line(tokenizer, line, named):
    message = refused(tokenizer, [GOOD, b"", line])
    assert message.startswith("rows.jsonl:3: ") and named in message, message


def test_explicit_keys_are_the_only_ones(tokenizer):
    assert "rows.jsonl:1: there is no 'result' in the row, which has input, output: set output_key" in refused(
        tokenizer, [GOOD], output_key="result"
    )
    row = {"question": "1+1", "answer": "2"}
    assert "no 'problem' in the row, which has question, answer: set input_key" in refused(
        tokenizer, [row], input_key="problem"
    )
    row = {"messages": [USER], "answer": "7"}
    assert "set input_key" in refused(tokenizer, [row], input_key="question")
    Path("prompt.txt").write_text("{}")
    row = {"messages": [USER | {"role": "tool"}], "answer": "1"}
    assert "prompt_file=prompt.txt" in refused(tokenizer, [row], prompt_file="prompt.txt")


@pytest.mark.parametrize("env_name", ["exact", "math", "code", "my.rewards:f", "my.envs:Class"])
@pytest.mark.parametrize("keys", [{"output_key": "sol"}, {"input_key": "q"}, {"output_key": "a.b"}])
def test_a_named_key_that_a_row_lacks_is_an_error_in_every_environment(tokenizer, env_name, keys):
    """Else a reward function gets '' for each answer. A key that is there may be null where no answer is compared."""
    row = GOOD | {"a": {"c": 1}}
    (key,) = keys
    assert f"set {key}" in refused(tokenizer, [row], env_name=env_name, **keys)
    if env_name == "my.envs:Class":
        (problem,) = load(tokenizer, [GOOD | {"sol": None}], env_name=env_name, output_key="sol").problems
        assert problem.answer == ""


@pytest.mark.parametrize(
    ("answer", "final"),
    [
        ("one\n#### 5 \n", "5"),
        ("1\n#### 2\n#### 3", "3"),
        *((x, x) for x in ("#### 5", "x\n####5", "x\n#### ", "5\n", "")),
    ],
)
def test_the_answer_of_gsm8k_follows_its_last_mark(tokenizer, answer, final):
    assert load(tokenizer, [GOOD | {"output": answer}]).problems[0].answer == final


def parameters(**types):
    return {"type": "object", "properties": {name: {"type": kind} for name, kind in types.items()}}


def function(name, schema):
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def called(name, arguments, **more):
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
    } | more


F, G = function("f", parameters(a="string")), function("g", parameters(a="string", b="integer"))
TOOL_ROWS = [  # with the nulls that an arrow table adds: of g's b to f, of the arguments of one call to the other
    {"messages": [USER], "tools": [F], "output": "2"},
    {"messages": [USER], "tools": [F, G], "output": "2"},
    {"messages": [USER, called("f", {"a": "x"}), {"role": "tool", "content": "1"}], "tools": [F, G], "output": "2"},
    {"messages": [USER, called("g", {"a": "y", "b": 3}), {"role": "tool", "content": "1", "name": "g"}], "output": "2"},
]
SHOWS_ALL = (
    "{{ tools | tojson if tools }}{% for m in messages %}{{ m.role }}{% if 'tool_calls' in m %}{% for c in "
    "m.tool_calls %}{{ c | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}{{ 'name' in m }}{% endfor %}"
)


def in_texts(row):
    """As datasets have it whose columns hold no objects of several forms."""
    texts = json.loads(json.dumps(row))
    if "tools" in texts:
        texts["tools"] = json.dumps(texts["tools"])
    for message in texts["messages"]:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return texts


def test_r1_tools_and_calls_are_the_same_from_each_kind_of_file(tokenizer):
    """TRL#5118, axolotl#3136: parquet adds null keys, and JSON comes as text: as a whole, or object by object."""
    shows_all = Tokenizer(tokenizer.file.parent, SHOWS_ALL)
    want = load(shows_all, TOOL_ROWS).problems
    assert '"b"' not in shows_all.decode(want[0].prompt_ids) and "null" not in shows_all.decode(want[2].prompt_ids)
    pyarrow = pytest.importorskip("pyarrow")
    write = pytest.importorskip("pyarrow.parquet").write_table
    table = pyarrow.Table.from_pylist(TOOL_ROWS)
    padded = table.to_pylist()
    assert padded[0]["tools"][0]["function"]["parameters"]["properties"]["b"] is None
    write(table, "rows.parquet")
    texts = [in_texts(row) for row in TOOL_ROWS]
    write(pyarrow.Table.from_pylist(texts), "texts.parquet")
    each_text = [row | {"tools": [json.dumps(tool) for tool in row.get("tools", ())]} for row in TOOL_ROWS]
    part_texts = json.loads(json.dumps(TOOL_ROWS))
    part_texts[0]["tools"][0]["function"]["parameters"] = json.dumps(F["function"]["parameters"])
    part_texts[1]["tools"][1]["function"]["parameters"]["properties"]["b"] = '{"type": "integer"}'
    part_texts[2]["messages"][1]["tool_calls"] = json.dumps(part_texts[2]["messages"][1]["tool_calls"])
    part_texts[3]["messages"] = json.dumps(part_texts[3]["messages"], indent=1)
    loaded = [load(shows_all, rows).problems for rows in (padded, texts, each_text, part_texts)]
    loaded += [load(shows_all, [], data_path=file).problems for file in ("rows.parquet", "texts.parquet")]
    without_calls = [
        row | {"messages": [{"tool_calls": []} | message for message in row["messages"]]} for row in TOOL_ROWS
    ]
    loaded.append(load(shows_all, without_calls).problems)  # as of datasets
    for found in loaded:
        assert [row.prompt_ids for row in found] == [row.prompt_ids for row in want]
        assert [(row.messages, row.tools) for row in found] == [(row.messages, row.tools) for row in want]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, called("f", {"a": [1, None]}), {"role": "tool", "content": "1"}]},
        {"messages": [USER, called("f", '{"a": null}'), {"role": "tool", "content": "1"}]},
        {"messages": [USER], "tools": json.dumps([function("f", {"properties": {"a": {"default": None}}})])},
    ],
)
def test_r1_a_null_in_a_list_or_in_a_text_is_meant(tokenizer, row):
    (found,) = load(Tokenizer(tokenizer.file.parent, SHOWS_ALL), [row | {"output": "2"}]).problems
    assert "null" in tokenizer.decode(found.prompt_ids)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tools": "search the web"}, "tools: expected a list"),
        ({"tools": '{"type": "function"}'}, "tools: expected a list"),
        ({"tools": ["search"]}, "a tool: expected an object"),
        ({"tools": [{"function": "search"}]}, "function: expected an object"),
        ({"tools": [{"function": {"name": "f", "parameters": "none"}}]}, "parameters: expected an object"),
        ({"messages": [USER, called("f", "{'a': 1}"), USER]}, "arguments: expected an object"),
        ({"messages": [USER, called("f", "[1]"), USER]}, "arguments: expected an object"),
        ({"messages": [USER, called("f", [1]), USER]}, "arguments: expected an object"),
        ({"messages": [USER, called("f", "[" * 5000), USER]}, "arguments: expected an object"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": "f(x)"}, USER]}, "tool_calls: expected a list"),
    ],
)
def test_r1_what_is_no_tool_and_no_call_is_refused(tokenizer, change, named):
    message = refused(tokenizer, [GOOD, GOOD | {"messages": [USER]} | change])
    assert message.startswith("rows.jsonl:2: ") and named in message


def test_r5_a_null_content_beside_calls_stays_null(tokenizer):
    template = "{% for m in messages %}{{ 'CALLS' if m.content is none else m.content }}{% endfor %}"
    row = {"messages": [USER, called("f", {}), {"role": "tool", "content": "1"}], "output": "2"}
    (found,) = load(Tokenizer(tokenizer.file.parent, template), [row]).problems
    assert tokenizer.decode(found.prompt_ids) == "aCALLS1"
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == {}
