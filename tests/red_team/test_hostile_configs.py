"""Damaged configs and overrides: each is read, or refused by one short ConfigError; nothing else is raised."""

import json
import random
from pathlib import Path

import pytest
import yaml

from check.keys import FIELDS, FREE
from check.nemo import PATTERNS
from check.reader import load
from check.rules import check_config
from config import ConfigError

ROOT = Path(__file__).resolve().parents[2]
FILES = [*sorted((ROOT / "configs").glob("*.yaml")), *sorted((ROOT / "tests/helpers/nemo_yaml").glob("*.yaml"))]
KEYS = [*FIELDS, *(f"{free}.a.b" for free in FREE), *(pattern.replace("*", "x") for pattern, _ in PATTERNS)]
VALUES = [
    None,
    True,
    -1,
    1.5,
    10**400,
    float("nan"),
    "",
    "x" * 3000,
    "\ud800",
    "a\0b",
    "\x1b[2J\n",
    "${grpo.seed}",
    "${",
]
VALUES += ["${mul: 2, 3}", "2024-99-99", "<<", [], [[]], {}, {"": {"": 1}}, [1, "a", None, {"a": [1]}]]
TEXTS = [
    b"&a [*a]",
    b"*a",
    b"!!set ",
    b"!!int ",
    b"!x ",
    b"? ",
    b"<<: ",
    b"\t",
    b"\0",
    b"\xff",
    b"- ",
    b"[",
    b"}",
    b": ",
]
TEXTS += [b"'", b'"', b"#", b"|\n", b"%", b"---\n", b"[" * 3000, b"9" * 5000, b"\xef\xbb\xbf", b'"\\UFFFFFFFF"']


def answer_to(file: Path, *words: str) -> str:
    """The refusal, or "". Anything but a ConfigError fails the test."""
    try:
        check_config(load(file, words), 2)
    except ConfigError as error:
        assert len(str(error)) <= 490
        return str(error)
    return ""


def places(node, path=()):
    """The paths to the values of a nest, which may hold itself."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children if len(path) < 6 else ():
        yield (*path, key)
        yield from places(child, (*path, key))


def damaged_nest(rng: random.Random, nest: dict) -> bytes:
    """A config with a value or key deleted, doubled, renamed, retyped, nested in itself, or replaced."""
    *path, last = rng.choice(list(places(nest)))
    parent = nest
    for key in path:
        parent = parent[key]
    value = parent[last]
    change = rng.randrange(6)
    if change == 0:
        del parent[last]
    elif change == 1 and isinstance(parent, dict):
        parent[rng.choice([f"{last}_", f"{last}.{last}", 3, "_override_", "<<"])] = parent.pop(last)
    else:
        parent[last] = [[value, value], {last: value}, nest, rng.choice(VALUES)][change % 4]
    return yaml.dump(nest, allow_unicode=True).encode("utf-8", "surrogatepass")


def damaged_text(rng: random.Random, content: bytes) -> bytes:
    """The text with a piece taken out, doubled, or replaced by what yaml reads in its own way."""
    start = rng.randrange(len(content) + 1)
    end = min(len(content), start + rng.choice([0, 1, 5, 40]))
    return content[:start] + rng.choice([b"", rng.choice(TEXTS), content[start:end] * 2]) + content[end:]


def override(rng: random.Random) -> str:
    name = rng.choice(KEYS)
    name = rng.choice([name] * 5 + [f"{name}.x", f"{name}.0.name", name[:-1], f"{name}."])
    value = rng.choice([*VALUES, "[1, 2]", "{a: 1}", "&a [*a]", "1e5", "0x_", "!!int ''", "[[[["])
    return f"{name}={value if isinstance(value, str) else json.dumps(value)}"


def test_damaged_configs(tmp_path):
    file, refused = tmp_path / "hostile.yaml", 0
    for seed in range(400):
        rng = random.Random(seed)
        source, words = rng.choice(FILES), []
        if seed % 3 == 0:
            file.write_bytes(damaged_nest(rng, yaml.safe_load(source.read_text())))
        elif seed % 3 == 1:
            file.write_bytes(damaged_text(rng, source.read_bytes()))
        else:
            file.write_text(f"defaults: {source}")
            words = [override(rng) for _ in range(rng.choice([1, 1, 3]))]
        refused += bool(answer_to(file, *words))
    assert 40 < refused < 390, "both kinds are there"


@pytest.mark.parametrize(
    "text", ["a: &a [*a]", "a: &a {b: *a}", "defaults: nope", "defaults: .", "!!python/object/apply:os.getpid []"]
)
def test_refused(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text)
    assert str(tmp_path) in answer_to(tmp_path / "run.yaml")


def test_the_command_answers_with_one_sentence(check, tmp_path):
    """The real `grpo.py --check`: exit code 2, no traceback."""
    (tmp_path / "run.yaml").write_text("grpo: {seed: &a [*a]}")
    answer = check(tmp_path, "run.yaml")
    assert answer.code == 2 and "Traceback" not in answer.message and answer.message.count("\n") == 1, answer
