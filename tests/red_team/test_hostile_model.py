"""Hostile model folders: templates that leave jinja's sandbox, and files that lie. `--check` answers each with one
sentence that names the place."""

import json
import shutil

import pytest
from dataset_case import refusal
from small_run import STARTER

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


def edited(name, **changes):
    """Changes top-level fields of a JSON file of the folder."""

    def change(folder):
        value = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps(value))

    return change


def template(text):
    return edited("tokenizer_config.json", chat_template=text)


def headers(edit):
    """model.safetensors with its header, a dict, after edit(header)."""

    def change(folder):
        content = (folder / "model.safetensors").read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        text = json.dumps(edit(header) or header).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])

    return change


def index(weight_map):
    """An index file in place of model.safetensors, which is renamed to 1.safetensors."""

    def change(folder):
        (folder / "model.safetensors").rename(folder / "1.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

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
    "eos, one of": (edited("generation_config.json", eos_token_id=[257, 262]), ["model: end tokens", "262"]),
    "10^7 layers": (
        edited("config.json", num_hidden_layers=10**7),
        ["model: model.layers.2.", "missing", "config.json"],
    ),
    "hidden 10^12": (edited("config.json", hidden_size=10**12), ["[262, 128]", "[262, 1000000000000]"]),
    "one layer": (edited("config.json", num_hidden_layers=1), ["model.layers.1.", "not in the model", "config.json"]),
    "untied": (edited("config.json", tie_word_embeddings=False), ["model: lm_head.weight is missing"]),
    "integers": (headers(lambda header: header["model.norm.weight"].update(dtype="I16")), ["model.norm.weight", "I16"]),
    "no tensor": (headers(lambda header: {"__metadata__": {}}), ["model/model.safetensors"]),
    "a file of the system": (index({"a": "/etc/passwd"}), ["model/passwd: not a readable safetensors file"]),
    "a missing shard": (index({"a": "1.safetensors", "b": "2.safetensors"}), ["model/2.safetensors"]),
    "a shard that is none": (index({"a": "1.safetensors", "b": "config.json"}), ["model/config.json: not a readable"]),
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
        (
            "policy.tokenizer.chat_template",
            "no_such_file",
            "policy.tokenizer.chat_template: neither template nor file: no_",
        ),
        ("policy.tokenizer.chat_template", "'{{ [1, 2] | random }}'", "'random'"),
    ],
)
def test_refused_where_the_config_says_it(work, key, value, named):
    assert named in refusal(f"{key}={value}")
