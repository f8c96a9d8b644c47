"""Hostile datasets and users' functions: what `--check` answers to files, rows and functions of any kind, in one
sentence that names the place."""

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from chat_case import write_tokenizer
from dataset_case import GOOD, load, refused
from red_team import MAX_MESSAGE_CHARS

import envs
from check import preflight
from config import ConfigError
from dataset import scan
from graders.reward_function import RewardFunction
from hf.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
STARTER = ROOT / "examples/arithmetic/starter"
CONFIG = f"""
grpo: {{num_prompts_per_step: 1, max_num_steps: 1, val_period: 0}}
policy:
  model_name: {STARTER}
  max_total_sequence_length: 32
  generation: {{max_new_tokens: 8}}
data:
  train: {{data_path: rows.jsonl, env_name: exact}}
"""
ROW = {"input": "1+1=", "answer": "2"}


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with a config and a good data file, which is the working directory."""
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tokenizer(tmp_path, monkeypatch):
    """No template: the prompt is the messages' text, an id per byte. The working directory is the test's own."""
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path)
    return Tokenizer(tmp_path)


# --------------------------------------------------------------------------------------------------------- mutations

WORDS = 'null true false 0 -1 5 0.5 1.0 1e999 -1e999 NaN -Infinity 1e-400 [] {} [[]] [null] [5] {"a":1} "" "a"'
VALUES = [
    *WORDS.split(),
    *(
        json.dumps(text)
        for text in ("a b", "\0", "\ud800", "\udc00x", "####", "\n#### ", "\n#### 5\n", "{}", "é", "None")
    ),
    *(
        json.dumps(text)
        for text in ("<|end|>", "<|en", "d|>", "assistant", "system", "code", "math", "NaN", "x" * 3000)
    ),
    '["a","b"]',
    '[{"role":"user","content":"1+1="}]',
    '[{"role":5,"content":"a"}]',
    '[{"role":"user","content":[{"type":"text","text":"1"},{"text":null}]}]',
    '[{"role":"assistant","content":null,"tool_calls":[{"a":1}]}]',
    '{"input":[[]],"instructions":5}',
    '{"a":1,"a":2}',
    "1" * 4000,
    "1" * 10_000,
    "[" * 50 + "]" * 50,
    "[" * 480 + "]" * 480,
    "[" * 985 + "]" * 985,
    '{"a":' * 900 + "1" + "}" * 900,
    "[" * 100_000,
    json.dumps({f"key{i}" * 20: i for i in range(100)}),
]
KEYS = (
    "input",
    "answer",
    "messages",
    "tools",
    "responses_create_params",
    "id",
    "reward",
    "loss_multiplier",
    "task_name",
)
KEYS += ("output", "prompt", "metadata", "verifier_metadata", "role", "content", "x" * 2000, "\n", "", "a.b")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "1"}]}]
BASES = (
    {"input": "1+1=", "answer": "2", "id": "7"},
    {"messages": [*CHAT, {"role": "assistant", "content": "2"}], "tools": [TOOL]},
    {"responses_create_params": {"input": CHAT, "tools": [TOOL], "instructions": "i"}, "metadata": {"label": "2"}},
    {"responses_create_params": {"input": "1"}, "label": 2, "reward": 1.0},
    {"question": "1+1=", "answer": "one and one\n#### 2", "loss_multiplier": 1, "reward": 1.0},
)


def places(value):
    """(list or dict, index or key) of all that is in a nested value."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def row_text(rng):
    """A row as JSON text, in which one or two values, anywhere in it, are other ones, gone, added or twice there."""
    row = json.loads(json.dumps(rng.choice(BASES)))
    raw = {}
    for number in range(rng.choice((0, 1, 1, 1, 2))):
        inside, key = rng.choice(list(places(row)))
        kind = rng.choice(("value", "value", "value", "gone", "added", "twice"))
        mark = f"@{number}@"
        raw[f'"{mark}"'] = rng.choice(VALUES)
        if kind == "gone":
            del inside[key]
        elif kind == "value" or isinstance(inside, list):
            inside[key] = mark
        else:
            inside[rng.choice(KEYS)] = mark
            if kind == "twice":
                raw[f'"{mark}"'] += f", {json.dumps(key)}: 1"
        if not row:
            break
    text = json.dumps(row)
    for mark, value in raw.items():
        text = text.replace(mark, value)
    return text


LONG = 1000  # seeds from here on are for --long


def mutated(seed):
    """(content of rows.jsonl, words of the command line)"""
    rng = random.Random(seed)
    rows = [row_text(rng) for _ in range(rng.randint(1, 3))]
    rows += [json.dumps(ROW)] * rng.randint(0, 1)
    rng.shuffle(rows)
    content = ("\n".join(rows) + "\n").encode("utf-8", "surrogatepass")
    options = {
        "min_reward": ("0.5", "-1e308"),
        "input_key": ("input", "a.b", "messages", "'x '"),
        "output_key": ("answer", "metadata.a", "id"),
        "repeat": ("3", "1000000"),
        "split_validation_size": ("0.5", "1", "7"),
        "env_name": ("code", "math"),
    }
    words = []
    for key in rng.sample(sorted(options), rng.choice((0, 0, 1, 2))):
        if key != "env_name" or seed >= LONG:  # their processes take a second to start
            words.append(f"data.train.{key}={rng.choice(options[key])}")
    return content, words


def refusal(*words):
    """What `--check` says against the run; "" where it has nothing against it."""
    try:
        preflight.check(preflight.parse_command_line(["run.yaml", *words], "usage"))
    except ConfigError as error:
        assert len(str(error)) <= MAX_MESSAGE_CHARS and "\n" not in str(error), str(error)
        return str(error)
    return ""


# From 73 on: seeds of what once ended in a traceback or in a page of text.
@pytest.mark.parametrize(
    "seeds",
    [(*range(32), 73, 77, 147, 198, 228, 236), pytest.param(range(LONG, 2 * LONG), marks=pytest.mark.long)],
    ids=("some", "a thousand"),
)
def test_mutated_rows_and_files(work, seeds):
    answers = set()
    for seed in seeds:
        content, words = mutated(seed)
        (work / "rows.jsonl").write_bytes(content)
        message = refusal(*words)
        places = ["rows.jsonl", *(word.partition("=")[0] for word in words)]
        assert not message or any(place in message for place in places), (seed, content[:300], message)
        answers.add(bool(message))
    assert answers == {True, False}, "the mutations are neither all harmless nor all fatal"


# ------------------------------------------------------------------------------------------- names that lead to no file


@pytest.mark.parametrize("name", ["folder", "loop", "dangling", "a\0b", "\ud800", "x" * 6000])
def test_names_that_lead_to_no_file(tokenizer, name):
    Path("folder").mkdir()
    Path("loop").symlink_to("loop")
    Path("dangling").symlink_to("not_mounted/rows")
    for key in ("data_path", "prompt_file", "system_prompt_file"):
        assert ": cannot be read (" in refused(tokenizer, [GOOD], **{key: name})


# ---------------------------------------------------------------------------------------------------- rows and numbers


def test_time_grows_with_an_answer_and_not_with_its_square(tokenizer):
    """2 MB of what a pattern of GSM8K's form would try from each line on: its square takes an hour."""
    for answer in ("\n#### " * 350_000 + "x", "a\n" * 1_000_000, "#" * 2_000_000, "\n####" * 400_000 + "\n#### 5"):
        load(tokenizer, [GOOD | {"output": answer}])


@pytest.mark.parametrize(
    ("answer", "final"),
    [
        ("one\n#### 5", "5"),
        ("one\n#### 5 \n", "5"),
        ("1\n#### 2\n#### 3", "3"),
        ("#### 5", "#### 5"),
        ("x\n####5", "x\n####5"),
        ("x\n#### ", "x\n#### "),
        ("5\n", "5\n"),
        ("", ""),
    ],
)
def test_the_answer_of_gsm8k_follows_its_last_mark(tokenizer, answer, final):
    assert load(tokenizer, [GOOD | {"output": answer}]).problems[0].answer == final


@pytest.mark.parametrize("tools", [5, "abc", [5], [None], [[]], {}, True, 0, ""])
def test_tools_of_any_shape_are_objects_or_refused(tokenizer, tools):
    for row in (GOOD | {"tools": tools}, {"responses_create_params": {"input": "1", "tools": tools}, "answer": "2"}):
        assert refused(tokenizer, [row]).startswith("rows.jsonl:1: 'tools' must be a list of objects, not ")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"input": "1+1=", "input": "5+5=", "output": "2"}', ": not valid JSON (an object has the key 'input' twice)"),
        ('{"input": "1", "output": {"a": {"b": 1, "b": 2}}}', ": not valid JSON (an object has the key 'b' twice)"),
        ('{"messages": "text", "output": "2"}', ": 'messages' must be a non-empty list"),
        ('{"input": "1", "output": NaN}', ": the answer is neither text nor JSON (Out of range float"),
        ('{"input": "1", "output": [1, -1e999]}', ": the answer is neither text nor JSON (Out of range float"),
        ('{"input": "1", "output": "2", "loss_multiplier": NaN}', ": loss_multiplier=nan: 1 (trained on) or 0"),
        ('{"input": "1", "output": "2", "loss_multiplier": [1]}', ": loss_multiplier=[1]: 1 (trained on) or 0"),
        ('{"input": "1", "output": "2", "loss_multiplier": 0.5}', ": loss_multiplier=0.5: 1 (trained on) or 0"),
        ('{"input": "1", "output": %s}' % ("1" * 10_000), ": not valid JSON (Exceeds the limit (4300 digits)"),
    ],
)
def test_rows_are_refused_by_their_line(tokenizer, row, message):
    assert refused(tokenizer, [GOOD, row.encode()]).startswith(f"rows.jsonl:2{message}")


@pytest.mark.parametrize("reward", [b"NaN", b'"1"', b"true", b"null", b"[1]"])
def test_what_is_no_number_is_not_kept_by_min_reward(tokenizer, reward):
    row = json.dumps(GOOD).encode()[:-1] + b', "reward": ' + reward + b"}"
    assert refused(tokenizer, [row], min_reward=0.5).startswith("rows.jsonl:1: no number under 'reward'")


def test_huge_numbers_are_compared_as_they_are(tokenizer):
    rows = [GOOD | {"reward": 10**4000}, GOOD | {"reward": float("inf")}, GOOD | {"reward": -(10**400)}]
    assert len(load(tokenizer, rows, min_reward=0.5).problems) == 2


def test_rows_that_are_all_weighted_0_are_refused(work):
    weighted = [json.dumps(ROW | {"loss_multiplier": weight}) for weight in (0, 0.0, False, 1)]
    for rows, told in ((weighted[:3], "rows.jsonl: every row has loss_multiplier 0"), (weighted, "")):
        (work / "rows.jsonl").write_text("\n".join(rows))
        assert refusal().startswith(told) and bool(told) == bool(refusal())
    (work / "zeros.jsonl").write_text(weighted[0])  # it may be validated on
    assert not refusal("data.validation.data_path=zeros.jsonl", "grpo.val_period=1")


def test_only_the_start_of_a_hopeless_prompt_is_encoded(tokenizer):
    """All of 25 MB takes 24 s, and as much memory as a model."""
    encoded, encode = [], tokenizer.backend.encode
    tokenizer.backend = SimpleNamespace(encode=lambda text, **options: encoded.append(text) or encode(text, **options))
    rows = [{"input": text * 1_000_000, "output": "1"} for text in ("a", "\n", "é", "ab ")]
    rows.append({"messages": [{"role": "user", "content": [{"text": "x" * 1000}] * 1000}], "output": "1"})
    assert refused(tokenizer, rows, 100).endswith("5 left out: over 100 tokens")
    assert sum(map(len, encoded)) < 5 * 4096


def test_prompt_ids_are_whole_up_to_the_limit(tokenizer):
    """Around each length at which only the start of a text is encoded, a prompt has all of its ids or is left out."""
    for limit in (1, 7, 300):
        lengths = {*range(limit - 2, limit + 3), 16 * limit + 255, 16 * limit + 257, 64 * limit + 1024}
        rows = [{"input": "x" * max(1, length), "output": "1"} for length in sorted(lengths)]
        problems = load(tokenizer, rows, limit).problems
        assert [len(row.prompt_ids) for row in problems] == [
            n for n in map(len, (r["input"] for r in rows)) if n <= limit
        ]
    assert len(tokenizer.render([{"role": "user", "content": "x" * 5000}])) == 5000


# ----------------------------------------------------------------------------------------------- functions of a user's

DATASET, PROCESSOR, ENV = "data.train.dataset_name", "data.train.processor", "data.train.env_name"
SAMPLER = "data.custom_dataloader"
CLASS = "class C:\n def step(self, turns): {step}\n def check_answers(self, answers): {check}\n def close(self): pass\n"
CLASS += "f = C\n"
TESTED = "C.self_tests = [('a', 'b', 'ok')]"
ROWS_OF = "class R:\n def __len__(self): return {size}\n def __getitem__(self, i):\n  1/0\nf = lambda cfg: R()"
OBJECT = "class O:\n def __repr__(self): 1/0\n"
USERS = [  # key, code, what the message holds
    (DATASET, "x = = 1", 'mine.py", line 1'),
    (DATASET, "import sys\nsys.exit(7)", "SystemExit: 7 (FOLDER/mine.py:2)"),
    (DATASET, "import no_such_module", "No module named 'no_such_module' (FOLDER/mine.py:1)"),
    (DATASET, "raise type('E', (BaseException,), {})('x')", "E: x (FOLDER/mine.py:1)"),
    (DATASET, "f = 5", "TypeError: 'int' object is not callable"),
    (DATASET, "def f(): return []", "a sequence of rows, raised TypeError: f() takes 0"),
    (
        DATASET,
        "def f(cfg):\n yield {}",
        "a sequence of rows, raised TypeError: object of type 'generator' has no len()",
    ),
    (DATASET, "def f(cfg): return {'a': {}}", "mine:f, row 1 raised KeyError: 0"),
    (DATASET, "def f(cfg): return [1]", "mine:f, row 1: expected a JSON object, got int"),
    (DATASET, "def f(cfg):\n return open('absent')", "No such file or directory: 'absent' (FOLDER/mine.py:2)"),
    (DATASET, ROWS_OF.format(size=-1), "ValueError: __len__() should return >= 0"),
    (DATASET, ROWS_OF.format(size=1), "row 1 raised ZeroDivisionError: division by zero (FOLDER/mine.py:4)"),
    (PROCESSOR, "import sys\ndef f(row): sys.exit(7)", "rows.jsonl:1: processor mine:f raised SystemExit: 7 (FOLDER/"),
    (PROCESSOR, "def f(row):\n return row['x']", "processor mine:f raised KeyError: 'x' (FOLDER/mine.py:2)"),
    (PROCESSOR, "def f(row): raise GeneratorExit", "processor mine:f raised GeneratorExit (FOLDER/mine.py:1)"),
    (PROCESSOR, "class E(Exception):\n def __str__(self): 1/0\ndef f(row): raise E", "(FOLDER/mine.py:3)"),
    (PROCESSOR, "def f(row): raise ValueError('x\\n' * 9999)", "raised ValueError: x x x"),
    (PROCESSOR, "def f(row):\n return f(row)", "RecursionError: maximum recursion depth exceeded (FOLDER/mine.py:2)"),
    (PROCESSOR, "def f(row): return [row]", "rows.jsonl:1: processor mine:f gave list, not a row or None"),
    (
        PROCESSOR,
        "import numpy\ndef f(row): return row | {'answer': numpy.int64(2)}",
        "rows.jsonl:1: the answer is neither",
    ),
    (PROCESSOR, "def f(row): return row | {'answer': {(1, 2): 3}}", "rows.jsonl:1: the answer is neither"),
    (PROCESSOR, "def f(row): return row | {'loss_multiplier': 1 + 0j}", "rows.jsonl:1: loss_multiplier=(1+0j): 1"),
    (
        PROCESSOR,
        "import numpy\ndef f(row): return row | {'loss_multiplier': numpy.ones(2)}",
        "rows.jsonl:1: loss_multiplier=array([1., 1.])",
    ),
    (
        PROCESSOR,
        "def f(row): return row | {'messages': [{'role': 'user', 'content': '1', 'x': {1}}]}",
        "rows.jsonl:1: a part of messages or tools",
    ),
    (PROCESSOR, OBJECT + "def f(row): return row | {'id': O()}", "rows.jsonl:1: the `id` raised ZeroDivisionError"),
    (PROCESSOR, OBJECT + "def f(row): return row | {'task_name': O()}", "rows.jsonl:1: a value in the row raised Zero"),
    (PROCESSOR, "def f(row): return row | {'id': {1: 2, 'a': 3}}", None),
    (PROCESSOR, "def f(row): return {1: 2, 'a': 3}", "rows.jsonl:1: neither 'messages' nor text under"),
    (ENV, "def f(prompts): pass", "a reward function takes `completions`"),
    (ENV, "class f: pass", "no method step()"),
    (ENV, CLASS.format(step="1/0", check="raise KeyError('level')"), "rows.jsonl:1 raised KeyError: 'level' (FOLDER/"),
    (ENV, CLASS.format(step="1/0", check="exit(3)"), "SystemExit: 3 (FOLDER/mine.py:3)"),
    (
        ENV,
        CLASS.format(step="1/0", check="pass") + "C.__init__ = lambda self: {}['a']",
        "raised KeyError: 'a' (FOLDER/",
    ),
    (ENV, CLASS.format(step="1/0", check="pass") + TESTED, "ZeroDivisionError: division by zero (FOLDER/mine.py:2)"),
    (ENV, CLASS.format(step="return [None]", check="pass") + TESTED, "in its self_tests, raised AttributeError"),
    (ENV, CLASS.format(step="return []", check="pass") + "C.self_tests = 5", "in its self_tests, raised TypeError"),
    (ENV, CLASS.format(step="1/0", check="pass") + "C.__new__ = lambda _: 5", "no method step()"),
    (
        ENV,
        CLASS.format(step="1/0", check="pass").replace("close(self): pass", "close(self): 1/0"),
        "in close(), raised",
    ),
    (
        SAMPLER,
        "def f(**given):\n return given['absent']",
        "list of 1 sets, raised KeyError: 'absent' (FOLDER/mine.py:2)",
    ),
    (SAMPLER, "def f(**given): pass", "raised TypeError: 'NoneType' object is not"),
    (SAMPLER, "def f(**given): return [([], 0)]", "raised TypeError: "),
    (SAMPLER, "def f(**given): return ['rows', 'rows']", "gave 2 prompts instead of 1"),
    (SAMPLER, "def f(**given): return [('rows', 0.5)]", "raised TypeError: 'float' object cannot be interpreted"),
    (SAMPLER, "def f(**given): return [('rows', -1)]", "gave ('rows', -1), which is no problem of {'rows': 1}"),
    (SAMPLER, "def f(sizes, **given):\n sizes['x'] = 5\n return ['x']", "gave ('x', None), which is no problem of"),
    (SAMPLER, "def f(**given):\n while True: yield 'rows'", "gave 2 prompts instead of 1"),
    (SAMPLER, "def f(**given): return iter(['rows'])", None),
    (
        SAMPLER,
        "def f(memory, **given):\n memory['a'] = {1}\n return ['rows']",
        "its memory, which checkpoints keep, is",
    ),
]


@pytest.mark.parametrize(("key", "code", "message"), USERS)
def test_a_users_function_that_fails_is_named(work, monkeypatch, key, code, message):
    (work / "mine.py").write_text(code + "\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(work)])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    words = ["data.use_multiple_dataloader=true", "data.num_prompts_per_dataloader=1"] if key == SAMPLER else []
    answer = refusal(f"{key}=mine:f", *words)
    assert message.replace("FOLDER", str(work)) in answer if message else not answer, answer


@pytest.mark.parametrize(
    "path", [".mine:f", "mine:", ":f", "builtins:min", "builtins:print", "builtins:dict", "os:path", "..:f"]
)
def test_what_is_no_environment_is_refused_by_its_path(work, path):
    assert path in refusal(f"{ENV}={path}")


def test_a_processor_gets_each_row_as_it_was_read(tokenizer, monkeypatch):
    """Of a large set it is called again when the row's turn comes: one that changes its row must give the same then."""
    monkeypatch.setattr(scan, "HELD_ROWS", 0)

    def processor(row):
        row["messages"][0]["content"] += "!"
        return row

    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(processor=processor))
    Path("rows.json").write_text(json.dumps([{"messages": [{"role": "user", "content": "1"}], "answer": "2"}]))
    problems = load(tokenizer, [], data_path="rows.json", processor="mine:processor").problems
    assert problems[0] == problems[0] and problems[0].messages[0]["content"] == "1!"


def exits(completions):
    sys.exit(7)  # the line that ends it


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (exits, RuntimeError, r"^mine:f raised SystemExit: 7 \(.*test_hostile_data\.py:\d+\)$"),
        (
            lambda completions: completions.absent,
            RuntimeError,
            r"^mine:f raised AttributeError: .* \(.*test_hostile_data\.py",
        ),
        (lambda completions: None, RuntimeError, "^mine:f raised TypeError: 'NoneType' object is not iterable"),
        (lambda completions: ["1"], RuntimeError, "^mine:f raised (TypeError|OverflowError): "),
        (lambda completions: [1j], RuntimeError, "^mine:f raised (TypeError|OverflowError): "),
        (lambda completions: [10**400], RuntimeError, "^mine:f raised (TypeError|OverflowError): "),
        (lambda completions: [[1]], RuntimeError, "^mine:f raised (TypeError|OverflowError): "),
        (lambda completions: [1, 2], ValueError, "^mine:f gave 2 rewards for 1 completions"),
    ],
)
def test_a_reward_function_that_fails_amid_the_run_is_named(function, error, message):
    turn = envs.Turn([{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}], "2", "stop")
    with pytest.raises(error, match=message):
        RewardFunction(function, "mine:f").step([turn])
