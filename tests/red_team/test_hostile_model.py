"""Hostile model folders: damaged, lying and bottomless files, and templates that do not end. `--check` answers each of
them with 0 or 2, in time, in one sentence. Tables of known kinds, and seeded mutations of a good folder."""

import base64
import json
import os
import shutil
from random import Random

import pytest
from red_team import ROOT, assert_answered

STARTER = ROOT / "examples" / "arithmetic" / "starter"
ROWS = [{"input": f"{i}+{i + 3}=", "answer": str(2 * i + 3)} for i in range(10, 16)]
YAML = """
grpo: {num_prompts_per_step: 2, max_num_steps: 2, val_period: 0}
policy: {model_name: model, precision: float32, max_total_sequence_length: 32, generation: {max_new_tokens: 8}}
data: {train: {data_path: rows.jsonl, output_key: answer}}
logger: {log_dir: logs}
"""
NUM_SEEDS, NUM_LONG_SEEDS = 40, 1000


@pytest.fixture
def work(tmp_path):
    """A run over a copy of the starter that ships."""
    shutil.copytree(STARTER, tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "run.yaml").write_text(YAML)
    return tmp_path


def edited(name, **changes):
    """Changes top-level fields of a JSON file of the folder; None takes one out."""

    def change(folder):
        value = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps({key: entry for key, entry in value.items() if entry is not None}))

    return change


def template(text):
    return edited("tokenizer_config.json", chat_template=text)


def written(name, content):
    def change(folder):
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(content)

    return change


def special_file(name, kind):
    """In place of the folder's file: something that is no file."""

    def change(folder):
        file = folder / name
        file.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(file)
        elif kind == "folder":
            file.mkdir()
        else:
            file.symlink_to({"loop": name, "device": "/dev/zero", "nothing": "not-there"}[kind])

    return change


def headers(edit, data=None):
    """model.safetensors with its header, a dict, after edit(header)."""

    def change(folder):
        content = (folder / "model.safetensors").read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        text = json.dumps(edit(header) or header).encode()
        body = content[8 + size :] if data is None else data
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)

    return change


def sparse(name, size, start=b""):
    def change(folder):
        with open(folder / name, "wb") as file:
            file.write(start)
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


def charsmap(text):
    return edited("tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": text})


def blow_up(times):
    """A normalizer that makes ten characters of each, so many times."""
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    return edited("tokenizer.json", normalizer={"type": "Sequence", "normalizers": [step] * times})


def with_token(**fields):
    def change(folder):
        value = json.loads((folder / "tokenizer.json").read_text())
        token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        value["added_tokens"].append(token | {"id": 262} | fields)
        (folder / "tokenizer.json").write_text(json.dumps(value))

    return change


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLE = "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}"

REFUSED = (
    {
        # the tokenizers library: panics, aborts, hangs
        "charsmap, panic": (charsmap("AAAA"), "model/tokenizer.json"),
        "charsmap, panic in the trie": (charsmap("CAAAAP////////8A"), "model/tokenizer.json"),
        "charsmap, abort": (charsmap("/////w=="), "model/tokenizer.json"),
        "normalizer x 10^9": (blow_up(9), "model/tokenizer.json"),
        "special token of 1 MB": (with_token(content="<" * 2**20), "model/tokenizer.json"),
        "id without an embedding": (with_token(content="<x>", id=10**6), "tokenizer.json"),
        "opening with an unknown id": (
            lambda folder: (
                edited("tokenizer_config.json", chat_template=None)(folder),
                edited(
                    "tokenizer.json",
                    post_processor={
                        "type": "TemplateProcessing",
                        "single": [
                            {"SpecialToken": {"id": "<s>", "type_id": 0}},
                            {"Sequence": {"id": "A", "type_id": 0}},
                        ],
                        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                        "special_tokens": {"<s>": {"id": "<s>", "ids": [10**6], "tokens": ["<s>"]}},
                    },
                )(folder),
            ),
            "model/tokenizer.json: its post_processor",
        ),
        # templates without end
        "loops": (template(LOOPS + "{{ messages[0].content }}"), "model: the chat template takes more than 3 s"),
        "a macro of itself": (
            template("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
            "rows.jsonl:1: the chat template",
        ),
        "a * 10^9": (template("{{ 'a' * 10**9 }}"), "model: the chat template"),
        "a * 10^7": (template("{{ 'a' * 10**7 }}"), "model: the chat template writes 10,000,000 characters"),
        "doubling": (template(DOUBLE), "the chat template"),
        "center": (template("{{ 'a' | center(10**9) }}"), "model: the chat template"),
        "padded number": (template("{{ '%999999999d' % 1 }}"), "the chat template"),
        "formatted": (template("{{ '{:>999999999}'.format(1) }}"), "model: the chat template"),
        "a large power": (template("{{ (7 ** (7 ** 12)) % 7 }}"), "the chat template"),
        "many dates": (template("{{ strftime_now('%A' * 10**6) }}"), "model: the chat template writes"),
        "much text": (template("x" * (5 * 2**20)), "model: the chat template has more than"),
        # templates that are no function of a row
        "random": (
            template("{{ [1, 2, 3] | random }}"),
            "model: the chat template does not parse (No filter named 'random'",
        ),
        "random by name": (template("{{ [[1, 2, 3]] | map('random') | first }}"), "No filter named 'random'"),
        "random words": (
            template("{{ lipsum(n=1) }}"),
            "the chat template refuses these messages ('lipsum' is undefined)",
        ),
        "an address": (template("{{ messages[0].items }}"), "model: the chat template writes another prompt each time"),
        "a part of an address": (
            template("{{ (messages[0].items | string)[30:-1] }}"),
            "model: the chat template writes another prompt each time",
        ),
        # ids
        "eos, generation": (
            edited("generation_config.json", eos_token_id=10**12),
            "model/generation_config.json: eos_token_id",
        ),
        "eos, one of": (
            edited("generation_config.json", eos_token_id=[257, 262]),
            "model/generation_config.json: eos_token_id",
        ),
        "eos, config": (edited("config.json", eos_token_id=262), "model/config.json: eos_token_id=262"),
        "eos, text": (
            edited("tokenizer_config.json", eos_token="<no token>"),
            "model/tokenizer_config.json: eos_token=",
        ),
        # what config.json asks for and nobody computes
        "rope twice": (
            edited("config.json", rope_parameters=PLAIN, rope_scaling=YARN),
            "rope_parameters or rope_scaling: expected one mapping",
        ),
        "yarn by layers": (edited("config.json", rope_parameters={"full_attention": YARN}), "full_attention="),
        "rope by layers": (edited("config.json", rope_parameters={"full_attention": PLAIN}), "full_attention="),
        "yarn": (edited("config.json", rope_parameters=YARN), "rope_type='yarn' is not supported"),
        "linear, as ever": (
            edited("config.json", rope_scaling={"type": "linear", "factor": 2.0}),
            "rope_type='linear'",
        ),
        "two rope types": (
            edited("config.json", rope_scaling={"type": "linear", "rope_type": "default"}),
            "type='linear'",
        ),
        "a factor of nothing": (
            edited("config.json", rope_parameters=PLAIN | {"factor": 8.0}),
            "factor=8.0 has no effect",
        ),
        "two thetas": (edited("config.json", rope_parameters={"rope_theta": 5e5}), "rope_theta=500000.0"),
        "part of a head": (edited("config.json", partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        "llama3 of no width": (
            edited("config.json", rope_scaling=LLAMA3 | {"low_freq_factor": 4.0}),
            "low_freq_factor=4.0 is not below high_freq_factor",
        ),
        "scaled logits": (edited("config.json", logit_scale=0.5), "logit_scale=0.5 is not supported"),
        "chunked attention": (
            edited("config.json", dual_chunk_attention_config={"chunk_size": 8}),
            "dual_chunk_attention",
        ),
        "layers of their own": (
            edited("config.json", per_layer_config={"0": {"hidden_act": "gelu"}}),
            "per_layer_config",
        ),
        "a model inside": (
            edited("config.json", text_config={"model_type": "llama"}),
            "model/config.json: text_config",
        ),
        "too few layer types": (
            edited("config.json", layer_types=["full_attention"]),
            "1 layer_types, num_hidden_layers=2",
        ),
        # sizes that lie
        "10^7 layers": (edited("config.json", num_hidden_layers=10**7), "model: weights do not match"),
        "hidden 10^12": (edited("config.json", hidden_size=10**12), "shape [262, 128], but [262, 1000000000000]"),
        "one layer": (edited("config.json", num_hidden_layers=1), "unexpected: model.layers.1."),
        "other heads": (edited("config.json", num_key_value_heads=4), "k_proj.weight: shape [64, 128], but [128, 128]"),
        "untied": (edited("config.json", tie_word_embeddings=False), "missing: lm_head.weight"),
        "hidden 10^400": (edited("config.json", rms_norm_eps=10**400), "rms_norm_eps=1000"),
        "integers": (
            headers(lambda header: header["model.norm.weight"].update(dtype="I16")),
            "model.norm.weight: dtype I16 is not one of",
        ),
        # safetensors
        "a header of 7 GB": (
            sparse("model.safetensors", 7 << 30, (7 << 30).to_bytes(8, "little")),
            "model/model.safetensors",
        ),
        "a header of 90 MB": (
            sparse("model.safetensors", 1 << 27, (90 << 20).to_bytes(8, "little")),
            "model/model.safetensors",
        ),
        "a file outside": (
            index({"a": "../model/1.safetensors"}),
            "index.json: 'model/../model/1.safetensors' is no file of",
        ),
        "a file of the system": (index({"a": "/etc/passwd"}), "index.json: '/etc/passwd' is no file of this folder"),
        "no name": (index({"a": ""}), "model"),
        "the folder itself": (index({"a": "."}), "model"),
        "a missing shard": (index({"a": "1.safetensors", "b": "2.safetensors"}), "model/2.safetensors"),
        "each tensor twice": (
            index({"a": "1.safetensors", "b": "2.safetensors"}, ["2.safetensors"]),
            "is in 1.safetensors too",
        ),
        "a shard that is none": (
            index({"a": "1.safetensors", "b": "config.json"}),
            "model/config.json: not a readable",
        ),
    }
    | {
        f"{name}: {kind}": (special_file(name, kind), "model")
        for name in (
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "model.safetensors",
        )
        for kind in ("pipe", "folder", "loop", "nothing")
    }
    | {
        f"{name}: {kind}": (special_file(name, kind), "model")
        for name in ("chat_template.jinja", "config.json", "tokenizer.json")
        for kind in ("pipe", "device")
    }
)


SLOW = {
    "loops",
    "normalizer x 10^9",
    "special token of 1 MB",
    "a large power",
    "a * 10^9",
    "doubling",
    "padded number",
    "center",
    "formatted",
}
OFTEN = {name for name in REFUSED if ": " in name} - {
    "config.json: pipe",
    "chat_template.jinja: device",
    "tokenizer.json: nothing",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in SLOW | OFTEN else name for name in REFUSED]
)
def test_refused(work, check, name):
    change, message = REFUSED[name]
    change(work / "model")
    answer = check(work, "run.yaml")
    assert_answered(answer, code=2)
    assert message in answer.message, answer.message


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("policy.generation.stop_token_ids", "[257, 300]", "policy.generation.stop_token_ids: 300 is no token"),
        ("policy.generation.stop_token_ids", "[1000000000000]", "stop_token_ids"),
        ("policy.tokenizer.chat_template", "no_such_" + "x" * 300, "no such file"),
        ("policy.tokenizer.chat_template", "'{{ [1, 2] | random }}'", "No filter named 'random'"),
        pytest.param("policy.tokenizer.chat_template", f"'{LOOPS}'", "takes more than 3 s", marks=pytest.mark.long),
        pytest.param("policy.tokenizer.chat_template", "/dev/zero", "no such file", marks=pytest.mark.long),
    ],
)
def test_refused_where_the_config_says_it(work, check, key, value, message):
    answer = check(work, "run.yaml", f"{key}={value}")
    assert_answered(answer, code=2)
    assert message in answer.message, answer.message


# ----------------------------------------------------------------------------------------------- seeded mutations

JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
VALUES = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    3.5,
    1e308,
    1e-320,
    10**12,
    2**63,
    -(2**31),
    10**300,
    float("nan"),
    float("inf"),
]
VALUES += [
    "",
    "x",
    "x" * 3000,
    "\ud800",
    "\0",
    "../..",
    "/dev/zero",
    "<|end|>",
    "257",
    "true",
    [],
    {},
    [[]],
    [None],
    {"": 0},
]
VALUES += [[1] * 50, {"a": {"b": []}}, ["full_attention"], {"rope_type": "yarn"}, {"content": "<|end|>"}, [257, 10**9]]
STRING = {"String": "a"}
PARTS = {
    "normalizer": [
        {"type": "Replace", "pattern": STRING, "content": ""},
        {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"},
        {"type": "Replace", "pattern": {"Regex": ""}, "content": "ab"},
        {"type": "Replace", "pattern": {"Regex": "(?<=x"}, "content": ""},
        {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": STRING, "content": "aaaa"}] * 6},
        {"type": "Prepend", "prepend": "<|end|>"},
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "NFKC"},
        {"type": "Lowercase"},
        {"type": "Nmt"},
    ],
    "pre_tokenizer": [
        {"type": "Split", "pattern": {"Regex": "(\\w+\\s?)+x"}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Removed", "invert": False},
        {"type": "Split", "pattern": {"Regex": "$^|"}, "behavior": "MergedWithNext", "invert": True},
        {"type": "Digits", "individual_digits": True},
        {"type": "Metaspace", "replacement": "xx", "prepend_scheme": "always", "split": True},
        {"type": "CharDelimiterSplit", "delimiter": "ab"},
        {"type": "FixedLength", "length": 0},
        {"type": "BertPreTokenizer"},
        {"type": "UnicodeScripts"},
        None,
    ],
    "decoder": [
        {"type": "Strip", "content": "xy", "start": 10**9, "stop": -1},
        {"type": "Strip", "content": "a", "start": 10**6, "stop": 10**6},
        {"type": "Replace", "pattern": {"Regex": "(a*)*b"}, "content": "a" * 1000},
        {"type": "WordPiece", "prefix": "", "cleanup": True},
        {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Sequence", "decoders": []},
        None,
    ],
    "model": [
        {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"},
        {
            "type": "WordPiece",
            "vocab": {"a": 0},
            "unk_token": "b",
            "continuing_subword_prefix": "",
            "max_input_chars_per_word": 0,
        },
        {"type": "Unigram", "unk_id": 0, "vocab": [["a", 1e308], ["b", -1e308]], "byte_fallback": True},
        {"type": "Unigram", "unk_id": 7, "vocab": [["a", 0.0]]},
        {"type": "Unigram", "unk_id": None, "vocab": []},
        {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"], ["b", "c"]]},
        {"type": "BPE", "vocab": {"a": 0, "aa": 4294967295}, "merges": ["a a"], "dropout": 0.5},
        {"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True},
    ],
}
FRAGMENTS = [
    "{{ messages[0].content }}",
    "{{ messages }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{% for m in messages %}",
]
FRAGMENTS += [
    "{% endfor %}",
    "{% if tools %}",
    "{% endif %}",
    "{{ 'a' * 10**6 }}",
    "{{ range(99999) | list }}",
    "{{ bos_token }}",
]
FRAGMENTS += [
    "{{ x.y.z }}",
    "{{ messages | random }}",
    "{{ 1 // 0 }}",
    "{% set x = messages %}",
    "{{ loop }}",
    "{{ '%s' % 5 }}",
]
FRAGMENTS += [
    "{{ ''.__class__ }}",
    "{{ messages.append(1) }}",
    "{% break %}",
    "{% generation %}",
    "{% endgeneration %}",
]
FRAGMENTS += [
    "{{ namespace }}",
    "{{ cycler('a', 'b').next() }}",
    "{% include 'x' %}",
    "{% import 'y' as z %}",
    "{# #}",
    "{{",
]
FRAGMENTS += [
    "{% macro m(x) %}{{ m(x) }}{% endmacro %}",
    "{{ m(1) }}",
    "{{ strftime_now('%d') }}",
    "{{ raise_exception('no') }}",
]
FRAGMENTS += [
    "{{ 'x' | indent(10**7) }}",
    "{{ 'a'.zfill(10**7) }}",
    "{{ messages | pprint }}",
    "{{ 'a' | wordwrap(0) }}",
    "\x00",
]
FRAGMENTS += ["{{ (messages | string) * 10**5 }}", "{{ [1] * 10**7 }}", "{{ 'x'.encode('utf-16') }}", "{{ '\ud800' }}"]


def places(value, at=()):
    """The path of each value in nested dicts and lists."""
    yield at
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in pairs:
        yield from places(entry, (*at, key))


def mutate_value(random, value):
    """A JSON value with one place in it changed. Places near the top are as likely as all those below them."""
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
    """One mutation of a model folder; returns its name."""
    kind = random.choice(
        ("value", "value", "value", "bytes", "part", "charsmap", "template", "header", "header", "index", "file")
    )
    name = random.choice(JSON_FILES)
    file = folder / name
    if kind == "value":
        value = json.loads(file.read_text())
        for _ in range(random.choice((1, 1, 2))):
            value = mutate_value(random, value)
        file.write_text(json.dumps(value))
    elif kind == "bytes":
        name = random.choice((*JSON_FILES, "model.safetensors"))
        (folder / name).write_bytes(mutate_bytes(random, (folder / name).read_bytes()))
    elif kind == "part":
        name = random.choice(list(PARTS))
        edited("tokenizer.json", **{name: random.choice(PARTS[name]) or {}})(folder)
    elif kind == "charsmap":
        size = random.choice((0, 1, 4, 20, 400)).to_bytes(4, "little")
        content = random.choice((b"", size)) + random.randbytes(random.choice((3, 4, 8, 40, 400)))
        charsmap(base64.b64encode(content).decode())(folder)
    elif kind == "template":
        name = random.choice(("tokenizer_config.json", "chat_template.jinja"))
        text = "".join(random.choices(FRAGMENTS, k=random.randint(1, 5)))
        (template(text) if name[0] == "t" else written(name, text.encode(errors="surrogatepass")))(folder)
    elif kind == "header":
        headers(lambda header: mutate_value(random, header))(folder)
        if random.random() < 0.3:
            content = (folder / "model.safetensors").read_bytes()
            (folder / "model.safetensors").write_bytes(random.randbytes(random.randint(1, 8)) + content[8:])
    elif kind == "index":
        weight_map = dict.fromkeys("ab", "1.safetensors") | {"c": random.choice(["1.safetensors", *VALUES])}
        index(weight_map)(folder)
        if random.random() < 0.5:
            file = folder / "model.safetensors.index.json"
            file.write_bytes(mutate_bytes(random, file.read_bytes()))
    else:
        name = random.choice((*JSON_FILES, "model.safetensors", "chat_template.jinja"))
        special_file(name, random.choice(("pipe", "folder", "loop", "device", "nothing")))(folder)
    return f"{kind} {name}"


@pytest.mark.parametrize(
    "seed", [*range(NUM_SEEDS), *(pytest.param(i, marks=pytest.mark.long) for i in range(NUM_SEEDS, NUM_LONG_SEEDS))]
)
def test_mutated(work, check, seed):
    mutate(Random(seed), work / "model")
    assert_answered(check(work, "run.yaml"), "model", "rows.jsonl")
