"""Hostile model folders: files that are damaged or lie, and templates that leave jinja's sandbox. `--check` answers
each with one sentence that names the place: a table of known kinds, and seeded mutations of a good folder."""

import json
import shutil
from random import Random

import pytest
from red_team import MAX_MESSAGE_CHARS, ROOT

from check import preflight
from config import ConfigError

STARTER = ROOT / "examples" / "arithmetic" / "starter"
ROWS = [{"input": f"{i}+{i + 3}=", "answer": str(2 * i + 3)} for i in range(10, 16)]
YAML = """
grpo: {num_prompts_per_step: 2, max_num_steps: 2, val_period: 0}
policy: {model_name: model, precision: float32, max_total_sequence_length: 32, generation: {max_new_tokens: 8}}
data: {train: {data_path: rows.jsonl, output_key: answer}}
logger: {log_dir: logs}
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """The working directory: a run over a copy of the starter that ships."""
    shutil.copytree(STARTER, tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "run.yaml").write_text(YAML)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(*words):
    """What `--check` says against the run; "" where it has nothing against it."""
    try:
        preflight.check(preflight.parse_command_line(["run.yaml", *words], "usage"))
    except ConfigError as error:
        assert len(str(error)) <= MAX_MESSAGE_CHARS and "\n" not in str(error), str(error)
        return str(error)
    return ""


def edited(name, **changes):
    """Changes top-level fields of a JSON file of the folder."""

    def change(folder):
        value = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps(value))

    return change


def template(text):
    return edited("tokenizer_config.json", chat_template=text)


def in_place_of(name, kind):
    """A folder, a link to itself or a link to nothing where the folder's file was."""

    def change(folder):
        file = folder / name
        file.unlink(missing_ok=True)
        file.mkdir() if kind == "folder" else file.symlink_to(name if kind == "loop" else "not-there")

    return change


def headers(edit):
    """model.safetensors with its header, a dict, after edit(header)."""

    def change(folder):
        content = (folder / "model.safetensors").read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        text = json.dumps(edit(header) or header).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])

    return change


def sparse(size, header_size):
    """A model.safetensors of `size` bytes, all of which are 0 but the size of the header."""

    def change(folder):
        with open(folder / "model.safetensors", "wb") as file:
            file.write(header_size.to_bytes(8, "little"))
            file.truncate(size)

    return change


def index(weight_map, also=()):
    """An index file in place of model.safetensors, which is renamed to 1.safetensors; `also`: copies of that."""

    def change(folder):
        (folder / "model.safetensors").rename(folder / "1.safetensors")
        for name in also:
            shutil.copy(folder / "1.safetensors", folder / name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return change


def with_token(**fields):
    def change(folder):
        value = json.loads((folder / "tokenizer.json").read_text())
        token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        value["added_tokens"].append(token | {"id": 262} | fields)
        (folder / "tokenizer.json").write_text(json.dumps(value))

    return change


SANDBOX = "rows.jsonl:1: the chat template refuses"
REFUSED = {
    "a class of Python": (template("{{ ''.__class__.__mro__ }}"), [SANDBOX, "__class__"]),
    "a call of a class": (template("{{ ''.__class__.__mro__[1].__subclasses__() }}"), [SANDBOX, "__class__"]),
    "globals of a function": (template("{{ raise_exception.__globals__.os }}"), [SANDBOX, "__globals__"]),
    "a change of the messages": (template("{{ messages.append(1) }}"), [SANDBOX, "append"]),
    "a file": (template("{% include '/etc/passwd' %}"), [SANDBOX]),
    "a macro of itself": (template("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"), [SANDBOX, "Recursion"]),
    "random": (template("{{ [1, 2, 3] | random }}"), ["model: the chat template", "'random'"]),
    "random by name": (template("{{ [[1, 2, 3]] | map('random') | first }}"), ["'random'"]),
    "random words": (template("{{ lipsum(n=1) }}"), [SANDBOX, "lipsum"]),
    "id without an embedding": (with_token(content="<x>", id=10**6), ["model", "tokenizer.json", "vocab_size=262"]),
    "eos, generation": (edited("generation_config.json", eos_token_id=10**12), ["model/generation_config.json", "eos"]),
    "eos, one of": (edited("generation_config.json", eos_token_id=[257, 262]), ["model/generation_config.json", "eos"]),
    "eos, config": (edited("config.json", eos_token_id=262), ["model/config.json", "eos_token_id=262"]),
    "eos, text": (edited("tokenizer_config.json", eos_token="<no>"), ["model/tokenizer_config.json", "eos_token="]),
    "10^7 layers": (edited("config.json", num_hidden_layers=10**7), ["model", "config.json", "missing", "layers.2."]),
    "hidden 10^12": (edited("config.json", hidden_size=10**12), ["[262, 128]", "[262, 1000000000000]"]),
    "one layer": (edited("config.json", num_hidden_layers=1), ["unexpected: model.layers.1."]),
    "other heads": (edited("config.json", num_key_value_heads=4), ["k_proj.weight", "[64, 128]", "[128, 128]"]),
    "untied": (edited("config.json", tie_word_embeddings=False), ["missing: lm_head.weight"]),
    "eps 10^400": (edited("config.json", rms_norm_eps=10**400), ["model/config.json", "rms_norm_eps"]),
    "integers": (headers(lambda header: header["model.norm.weight"].update(dtype="I16")), ["model.norm.weight", "I16"]),
    "no tensor": (headers(lambda header: {"__metadata__": {}}), ["model/model.safetensors"]),
    "a header of 7 GB": (sparse(7 << 30, 7 << 30), ["model/model.safetensors"]),
    "a header of 90 MB": (sparse(1 << 27, 90 << 20), ["model/model.safetensors"]),
    "a file outside": (index({"a": "../model/1.safetensors"}), ["index.json", "../model/1.safetensors"]),
    "a file of the system": (index({"a": "/etc/passwd"}), ["index.json", "/etc/passwd"]),
    "no name": (index({"a": ""}), ["model"]),
    "the folder above": (index({"a": ".."}), ["model"]),
    "a missing shard": (index({"a": "1.safetensors", "b": "2.safetensors"}), ["model/2.safetensors"]),
    "each tensor twice": (
        index({"a": "1.safetensors", "b": "2.safetensors"}, ["2.safetensors"]),
        ["2.safetensors", "is in 1.safetensors too"],
    ),
    "a shard that is none": (index({"a": "1.safetensors", "b": "config.json"}), ["model/config.json: not a readable"]),
}
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
REFUSED |= {
    f"{name}: {kind}": (in_place_of(name, kind), ["model"]) for name in FILES for kind in ("folder", "loop", "nothing")
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(work, name):
    change, named = REFUSED[name]
    change(work / "model")
    message = refusal()
    assert message and all(part in message for part in named), message


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("policy.generation.stop_token_ids", "[257, 300]", "policy.generation.stop_token_ids: 300"),
        ("policy.generation.stop_token_ids", "[1000000000000]", "policy.generation.stop_token_ids"),
        ("policy.tokenizer.chat_template", "no_such_" + "x" * 300, "policy.tokenizer.chat_template='no_such_xxx"),
        ("policy.tokenizer.chat_template", "'{{ [1, 2] | random }}'", "'random'"),
    ],
)
def test_refused_where_the_config_says_it(work, key, value, named):
    assert named in refusal(f"{key}={value}")


# ----------------------------------------------------------------------------------------------- seeded mutations

JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")
VALUES = [None, True, False, -1, 0, 1, 2, 3.5, 1e308, 1e-320, 10**12, 2**63, -(2**31), 10**300]
VALUES += [float("nan"), float("inf"), "", "x", "x" * 3000, "\ud800", "\0", "../..", "<|end|>", "257", "true", [], {}]
VALUES += [[[]], [None], {"": 0}, [1] * 50, {"a": {"b": []}}, ["full_attention"], {"rope_type": "yarn"}]
VALUES += [{"content": "<|end|>"}, [257, 10**9]]


def places(value, at=()):
    """The path of each value in nested dicts and lists."""
    yield at
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in pairs:
        yield from places(entry, (*at, key))


def mutate_value(random, value):
    """A JSON value with one place in it gone, in a list, renamed or another one. Places near the top are as likely as
    all places below them."""
    paths = sorted(places(value), key=len)
    depth = random.randint(1, max(map(len, paths)) or 1)
    path = random.choice([path for path in paths if len(path) == depth] or [()])
    if not path:
        return random.choice(VALUES)
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    kind = random.randrange(5)
    if kind == 0:
        del parent[path[-1]]
    elif kind == 1:
        parent[path[-1]] = [parent[path[-1]]]
    elif kind == 2 and isinstance(parent, dict):
        parent[f"{path[-1]}_"] = parent.pop(path[-1])
    else:
        parent[path[-1]] = random.choice(VALUES)
    return value


def mutate_bytes(random, content):
    for _ in range(random.choice((1, 1, 2, 5, 50))):
        at, size = random.randrange(len(content) + 1), random.choice((1, 2, 8, 100))
        kind = random.randrange(5)
        piece = random.randbytes(size) if kind < 2 else content[at : at + size]
        content = content[:at] + (piece if kind != 4 else b"") + content[at + size * (kind % 2) :]
    return random.choice((content, content, content[: random.randrange(len(content) + 1)]))


def mutate(random, folder):
    kind, name = random.choice(("value", "bytes", "header", "index")), random.choice(JSON_FILES)
    if kind == "value":
        value = json.loads((folder / name).read_text())
        for _ in range(random.choice((1, 1, 2))):
            value = mutate_value(random, value)
        (folder / name).write_text(json.dumps(value))
    elif kind == "bytes":
        name = random.choice((*JSON_FILES, "model.safetensors"))
        (folder / name).write_bytes(mutate_bytes(random, (folder / name).read_bytes()))
    elif kind == "header":
        headers(lambda header: mutate_value(random, header))(folder)
    else:
        index(dict.fromkeys("ab", "1.safetensors") | {"c": random.choice(["1.safetensors", *VALUES])})(folder)


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 2000), marks=pytest.mark.long)])
def test_mutated(work, seeds):
    answers = set()
    for seed in seeds:
        shutil.rmtree(work / "model")
        shutil.copytree(STARTER, work / "model")
        mutate(Random(seed), work / "model")
        message = refusal()
        assert not message or "model" in message or "rows.jsonl" in message, (seed, message)
        answers.add(bool(message))
    assert answers == {True, False}, "the mutations are neither all harmless nor all fatal"
