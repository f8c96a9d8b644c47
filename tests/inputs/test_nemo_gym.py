"""examples/nemo_gym: rows of NeMo Gym become chats, its own files among them."""

import json
from pathlib import Path

import pytest
from dataset_case import USER, load, refused
from talks import TEMPLATES

from base.hf.tokenizer import Tokenizer

GYM = Path(__file__).resolve().parents[3] / "shared" / "data" / "nemo_gym"  # files of its repository
TOOL = {"type": "function", "strict": True, "parameters": {"type": "object"}, "name": "add"}
CALL = {"type": "function_call", "name": "add", "call_id": "c1", "id": "f1", "arguments": '{"b": [1, 2.50]}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "3"}
CHAT_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
PROCESSOR = {"processor": "examples.nemo_gym.rows:to_chat"}


@pytest.mark.parametrize(
    ("row", "keys", "messages", "answer"),
    [
        (
            {"responses_create_params": {"input": "p", "instructions": "s"}, "expected_answer": "9", "reward": 1.0},
            {},
            [("system", "s"), ("user", "p")],
            "9",
        ),
        (
            {"responses_create_params": {"input": [{"role": "developer", "content": "s"}, USER]}, "label": "B"},
            {"env_name": "m:C"},
            [("system", "s"), ("user", "a")],
            "B",
        ),
        *(
            ({"responses_create_params": {"input": [USER]}} | place, {}, [("user", "a")], "9")
            for place in (
                {"verifier_metadata": {"ground_truth": "9"}},
                {"metadata": {"answer": 9}},
                {"extra_env_info": {"expected_answer": "9"}},
                {"reward_model": {"ground_truth": "9"}},
            )
        ),
        ({"responses_create_params": {"input": [USER], "metadata": {"output": "9"}}}, {}, [("user", "a")], "9"),
    ],
)
def test_forms_of_a_row(tokenizer, row, keys, messages, answer):
    (found,) = load(tokenizer, [row], **PROCESSOR, **keys).problems
    assert [(message["role"], message["content"]) for message in found.messages] == messages
    assert found.answer == answer and row.items() <= found.fields.items()


def called(number=1, arguments=None):
    """A call as transformers' chat templates take it."""
    function = {"name": "add", "arguments": {"b": [1, 2.5]} if arguments is None else arguments}
    return {"type": "function", "id": f"c{number}", "function": function}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        (
            [USER, CALL, OUTPUT],
            [
                USER,
                {"role": "assistant", "content": "", "tool_calls": [called()]},
                {"role": "tool", "tool_call_id": "c1", "content": "3"},
            ],
        ),
        (  # a turn of the assistant ends where another speaks; a message of two calls has two outputs
            [
                {"role": "developer", "content": "s"},
                USER | {"type": "message"},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t1"}, {"text": " t2"}], "id": "r"},
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "I", "logprobs": 0}],
                },
                {"role": "assistant", "content": " add"},
                CALL,
                CALL | {"call_id": "c2", "arguments": ""},
                OUTPUT,
                OUTPUT | {"call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
                {"type": "reasoning", "summary": [], "encrypted_content": "x"},
                {"type": "reasoning", "summary": None, "content": [{"type": "reasoning_text", "text": "t3"}]},
                CALL,
                OUTPUT,
            ],
            [
                {"role": "system", "content": "s"},
                USER | {"type": "message"},
                {
                    "role": "assistant",
                    "content": "I add",
                    "reasoning_content": "t1 t2",
                    "tool_calls": [called(), called(2, {})],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "3"},
                {"role": "tool", "tool_call_id": "c2", "content": "4"},
                {"role": "assistant", "content": "", "reasoning_content": "t3", "tool_calls": [called()]},
                {"role": "tool", "tool_call_id": "c1", "content": "3"},
            ],
        ),
        (  # calls in the form of a chat stay as they are
            [USER, {"role": "assistant", "content": None, "tool_calls": [called(7)]}, OUTPUT],
            [
                USER,
                {"role": "assistant", "content": "", "tool_calls": [called(7)]},
                {"role": "tool", "tool_call_id": "c1", "content": "3"},
            ],
        ),
    ],
)
def test_items_of_the_responses_api_become_messages(tokenizer, items, messages):
    writes_all = Tokenizer(tokenizer.file.parent, "{{ messages }} {{ tools }}")
    row = {"responses_create_params": {"input": items, "tools": [TOOL]}, "answer": "1"}
    (problem,) = load(writes_all, [row], **PROCESSOR).problems
    assert problem.messages == messages
    assert json.dumps(problem.tools) == json.dumps([CHAT_TOOL])  # the order of keys too: a template writes it
    assert row.items() <= problem.fields.items()  # for the environment


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(GYM.glob("*.jsonl")), ids=lambda path: path.name[-60:])
def test_real_files_of_nemo_gym(path, tokenizer):
    """Every row, and the dataset's env_name for all of them."""
    writes_calls = Tokenizer(tokenizer.file.parent, TEMPLATES["chatml_tools"])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    dataset = load(writes_calls, rows, max_prompt_tokens=10**6, **PROCESSOR, env_name="m:C")
    assert len(dataset.problems) == len(rows) == 5
    assert all(row.items() <= problem.fields.items() for row, problem in zip(rows, dataset.problems, strict=True))
    assert {problem.env_name for problem in dataset.problems} == {"m:C"}
    kinds = [item.get("type") for row in rows for item in row["responses_create_params"]["input"]]
    messages = [message for problem in dataset.problems for message in problem.messages]
    assert sum(len(message.get("tool_calls", ())) for message in messages) == kinds.count("function_call")
    assert sum(message["role"] == "tool" for message in messages) == kinds.count("function_call_output")
    if any("task_name" in row for row in rows):
        assert "task_name" in refused(writes_calls, rows, max_prompt_tokens=10**6, **PROCESSOR)


def gym(*items, **keys):
    return {"responses_create_params": {"input": [USER, *items, USER]} | keys, "answer": "1"}


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"responses_create_params": {"input": 3}, "answer": "1"}, "TypeError"),
        (gym({"type": "function_call"}), "'name'"),
        (gym(CALL | {"arguments": '{"a":'}), "JSONDecodeError"),
        (gym({"type": "item_reference", "id": "x"}), "item_reference"),
        (gym({"type": "function_call_output", "output": {"a": 1}}), "messages"),
        (gym(tools=[{"type": "web_search"}]), "web_search"),
        (
            {"responses_create_params": {"input": [USER, CALL]}, "answer": "1"},
            "the assistant's last message counts as the answer",
        ),
    ],
)
def test_a_wrong_row_is_named_with_its_line(tokenizer, row, named):
    message = refused(tokenizer, [gym(), row], **PROCESSOR)
    assert message.startswith("rows.jsonl:2: ") and named in message, message
