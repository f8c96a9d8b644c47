"""Datasets of a few rows for tests: rows written to a file, and what loading them gives."""

import json
from pathlib import Path

import pytest

from base.check import preflight
from base.inputs.scan import load_dataset
from config import ConfigError, DatasetConfig

USER, GOOD = {"role": "user", "content": "a"}, {"input": "1+1", "output": "2"}
SCAN_OPTIONS = ("max_rows", "on_rank0")


def read(tokenizer, lines, max_prompt_tokens=1000, tasks=None, check=lambda *answers: None, **cfg):
    """(dataset, split) of rows.jsonl with these lines: objects, or bytes as they are."""
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    Path("rows.jsonl").write_bytes(b"\n".join(encoded) + b"\n")
    options = {name: cfg.pop(name) for name in SCAN_OPTIONS if name in cfg}
    cfg = DatasetConfig(**{"data_path": "rows.jsonl"} | cfg)
    return load_dataset(cfg, tokenizer, max_prompt_tokens, tasks or {}, check, **options)


def load(*args, **kwargs):
    return read(*args, **kwargs)[0]


def refused(*args, **kwargs):
    with pytest.raises(ConfigError) as error:
        read(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


def refusal(*words):
    """What `--check` says against run.yaml; "" where it has nothing against it."""
    try:
        preflight.check(preflight.parse_command_line(["run.yaml", *words], "usage"))
    except ConfigError as error:
        assert len(str(error)) <= 500 and "\n" not in str(error), str(error)
        return str(error)
    return ""
