"""config_yaml.py: bounded trees, and plain values against what was dumped. More inputs: red_team/test_configs.py."""

import random

import pytest
import yaml

from check.config_yaml import MAX_NAME_CHARS, MAX_VALUES, NULL, check, compose, described, plain_value, scalar
from config import ConfigError


def value_of(text):
    return plain_value(compose(text, "a.yaml"), "a.yaml")


def nest(rng, depth):
    """Values as json has them."""
    kind = rng.randrange(8 if depth else 6)
    if kind == 6:
        return [nest(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return {f"{i} {rng.choice('aé<#:')}": nest(rng, depth - 1) for i in range(rng.randrange(4))}
    return [None, rng.random() < 0.5, rng.randint(-(2**70), 2**70), rng.gauss(0, 1e-9), "no # a: b\n", "é"][kind]


def test_plain_values_are_what_was_dumped():
    rng = random.Random(0)
    for _ in range(50):
        expected = nest(rng, 4)
        for flow in (True, False, None):
            assert value_of(yaml.safe_dump(expected, default_flow_style=flow, allow_unicode=True)) == expected


def test_values_that_yaml_sees_otherwise():
    assert value_of("[1e-6, '1e-6', 2024-01-01, <<, =, 0x10, 010, 1:30, yes, ~, .5]") == [
        *(1e-6, "1e-6", "2024-01-01", "<<", "=", 16, 8, 90, True, None, 0.5)
    ]
    assert value_of("") is None


def test_the_last_value_that_fits():
    """An alias counts as all that it stands for: a list of n values, m times, is n + 1 keys and m * (n + 1) more."""
    n = 99
    for more in (0, 1):
        m = (MAX_VALUES - 1 - (n + 1)) // (n + 1)
        rest = MAX_VALUES - 1 - (n + 1) - m * (n + 1) + more
        text = f"a: &a [{'1,' * n}]\nb: [{'*a,' * m}{'1,' * rest}]"
        if more:
            with pytest.raises(ConfigError, match=r"^a\.yaml line [12]: [ab]\.\d+: too much: over 20,000 values"):
                compose(text, "a.yaml")
        else:
            assert len(value_of(text)["b"]) == m + rest
    compose(f"? {'x' * MAX_NAME_CHARS}\n: 1", "a.yaml")
    with pytest.raises(ConfigError, match=r"^a\.yaml line 1: x{80}: too much: .* over 200 characters of a key$"):
        compose(f"? {'x' * (MAX_NAME_CHARS + 1)}\n: 1", "a.yaml")


def test_places_are_those_of_the_text():
    text = "a:\n  b:\n  - c: 1\n  - c: !!set {x}\n"
    with pytest.raises(ConfigError, match=r"^a\.yaml line 4: a\.b\.1\.c: the tag 'set' has no meaning here"):
        compose(text, "a.yaml")


def test_nodes_are_described():
    assert described(scalar("x" * 100)) == f"'{'x' * 49} ... {'x' * 24}' (str)"
    assert described(compose("[1, [2], {}, a, ~, 6, 7]", "")) == "['1' (int), ..., ..., 'a' (str), null, ...]"
    assert check(scalar("~"), "").tag == NULL and described(scalar("~")) == "null"
