"""Hostile configs and overrides against the real `grpo.py --check`: each is taken or refused in one short message."""

import json
import random
import re
import shutil
from pathlib import Path

import pytest
import yaml
from red_team import assert_answered

from check import nemo
from check.keys import FIELDS, FREE, SECTIONS

ROOT = Path(__file__).resolve().parents[2]
RECIPES = [*sorted((ROOT / "configs").glob("*.yaml")), *sorted((ROOT / "tests/helpers/nemo_yaml").glob("*.yaml"))]
BASE = f"""
grpo: {{num_prompts_per_step: 4, max_num_steps: 5, val_period: 0}}
policy:
  model_name: {ROOT}/examples/arithmetic/starter
  max_total_sequence_length: 32
  generation: {{max_new_tokens: 8}}
data:
  train: {{data_path: train.jsonl, output_key: answer}}
"""
RICH = f"""
grpo: {{num_prompts_per_step: 4, val_at_end: true, val_period: 2, max_val_samples: '${{.val_period}}'}}
policy:
  model_name: {ROOT}/examples/arithmetic/starter
  max_total_sequence_length: '${{mul: 4, 8}}'
  train_micro_batch_size: 2
  tokenizer: {{chat_template_kwargs: {{enable_thinking: false, styles: [a, {{b: 1e-3}}]}}}}
  generation: {{max_new_tokens: 8, stop_token_ids: [3, 4], vllm_cfg: {{async_engine: false}}}}
  optimizer: {{kwargs: {{lr: 1e-4, betas: [0.9, 0.95]}}}}
  scheduler:
    - {{name: torch.optim.lr_scheduler.LinearLR, kwargs: {{start_factor: 0.1, end_factor: 1.0, total_iters: 50}}}}
    - {{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {{factor: 1.0, total_iters: 10000}}}}
    - {{milestones: [50]}}
data:
  default: {{output_key: answer, split: "${{policy.model_name}}"}}
  task_to_env: {{algebra: exact}}
  train: [{{data_path: train.jsonl, name: one}}, {{data_path: train.jsonl, name: two, repeat: 2}}]
  validation: {{data_path: train.jsonl, _override_: true}}
env: {{custom: {{"nobody:Nothing": {{limit: 5, words: [x, y]}}}}}}
logger: {{wandb_enabled: false, wandb: {{project: a, name: "${{.project}}"}}}}
checkpointing: {{metric_name: "val:accuracy", checkpoint_must_save_by: "00:03:45:00", keep_top_k: 3}}
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a good config, base.yaml, and files that are no files."""
    folder = tmp_path_factory.mktemp("configs")
    (folder / "base.yaml").write_text(BASE)
    (folder / "rich.yaml").write_text(RICH)
    for recipe in RECIPES:
        shutil.copy(recipe, folder)
    rows = [json.dumps({"input": f"{n}+1=", "answer": n + 1}) for n in range(10, 20)]
    (folder / "train.jsonl").write_text("\n".join(rows))
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "nothing").symlink_to("not mounted")
    (folder / "circle").symlink_to("circle")
    for i in range(22):  # 2^22 reads
        (folder / f"fan{i}.yaml").write_text(f"defaults: [fan{i + 1}.yaml, fan{i + 1}.yaml]")
    (folder / "fan22.yaml").write_text("grpo: {seed: 1}")
    return folder


def answer_to(check, work, text, *overrides):
    """The answer to a config of this text over base.yaml, or to these bytes alone."""
    content = text if isinstance(text, bytes) else f"defaults: base.yaml\n{text}".encode()
    (work / "run.yaml").write_bytes(content)
    return check(work, "run.yaml", *overrides)


BOMB = "{" + ", ".join(f"k{i}: &k{i} [{', '.join([f'*k{i - 1}' if i else '1'] * 8)}]" for i in range(9)) + "}"
SELF = "&a {x: *a}"
OURS = "env: {custom: {'m:C': {x: %s}}}"
KWARGS = "policy: {tokenizer: {chat_template_kwargs: {x: %s}}}"
SCHEDULER = "policy: {scheduler: %s}"
LOG = "logger: {log_dir: %s}"
MUCH = "too much: over 20,000 values"
NO_LIST = "of lists, only a LinearLR up to 1.0 before a ConstantLR is understood"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # Aliases: a bomb and a loop, wherever a value may be
        *((text % BOMB, MUCH) for text in (OURS, KWARGS, SCHEDULER, "data: {task_to_env: %s}", "logger: {wandb: %s}")),
        *((text % SELF, MUCH) for text in (OURS, KWARGS, SCHEDULER, "data: {task_to_env: %s}", "data: {train: [%s]}")),
        ("grpo: &a {adv_estimator: *a}", MUCH),
        ("policy: {generation: {stop_token_ids: &a [*a]}}", "line 2: policy.generation.stop_token_ids.0.0"),
        # Tags, and scalars that PyYAML cannot convert
        *((OURS % value, "env.custom.m:C.x: ") for value in ("!!int ''", "!!bool maybe", "!!float a", "0x_", "0b_")),
        *((OURS % value, "has no finite value") for value in (".inf", ".nan", "1e999", "9" * 5000, "1" + ":01" * 500)),
        *((OURS % value, "the tag 'set' has") for value in ("!!set {a}", "[{a: !!set {b}}]")),
        (KWARGS % "!!binary AAAA", "the tag 'binary' has no meaning here; write the value without it"),
        (SCHEDULER % "[!!python/object/apply:os.system ['touch touched']]", "the tag 'python/object/apply:os.system'"),
        (SCHEDULER % "[{? [1] : 2}]", "line 2: expected the name of a key, got ['1' (int)]"),
        (OURS % "{<<: {a: 1}}", "line 2: expected the name of a key, got '<<' (merge)"),
        (OURS % "{a: 1, a: 2}", "line 2: env.custom.m:C.x.a is set again, first in line 2; remove one"),
        # The shape of what NeMo RL writes
        *((SCHEDULER % value, NO_LIST) for value in ("[]", "[5]", "[[1]]", "[{name: LinearLR, kwargs: 5}]")),
        (SCHEDULER % "[{name: LinearLR, kwargs: [1]}, {name: ConstantLR}]", NO_LIST),
        # References
        *((LOG % f"'${{mul: {value}}}'", "only keys, and mul of") for value in ("1.2.3, 2", "., 2", "", "-1, 2", "²")),
        *((LOG % f"'{value}'", "is not closed") for value in ("${logger.log_dir", "${${logger.log_dir}", "${a$}")),
        (LOG % ("'" + "${policy.model_name}" * 600 + "'"), "too deep or long"),
        (f"logger.log_dir: '{'${.wandb.a}' * 99}'\nlogger.wandb.a: '{'${logger.wandb.b}' * 99}'", "too deep or long"),
        (f"logger.log_dir: '{'${.wandb.a}' * 99}'\nlogger.wandb.a: {'x' * 9000}", "too deep or long"),
        # Text that no file system or tokenizer takes, or that would break the line
        *(
            (text % r'"a\0b"', r"'a\x00b' (str): take out the byte 0")
            for text in (OURS, LOG, "policy: {model_name: %s}")
        ),
        *(
            (text % r'"\ud800"', r"'\ud800' (str): take out")
            for text in (OURS, LOG, "data: {train: {prompt_file: %s}}")
        ),
        (r'"\e[2J\n": 1', r"unknown key '\x1b[2J\n'"),
        # Numbers
        *((f"grpo: {{seed: {text}}}", "grpo.seed: expected int, got") for text in ("0o10", "0x10", "1:30")),
        ("data: {default: {repeat: 1000000000000000000}}", "data.train.repeat=1000000000000000000: must be"),
        ("grpo: {num_generations_per_prompt: 1000000000000}", "grpo.num_generations_per_prompt=1000000000000: no"),
        ("grpo: {num_generations_per_prompt: 10000000}", "over 10,000,000 samples, which a step holds"),
        (f"grpo: {{max_num_steps: {'9' * 4000}}}", "grpo.max_num_steps=9999"),
        ("watchdog: {min_seconds: 1e300}", "watchdog.min_seconds=1e+300: no number here is above"),
        *((f"checkpointing: {{checkpoint_must_save_by: '{by}'}}", "must be DD:") for by in ("00:00:00:00", "1" * 5000)),
        # Names and sizes
        (f"{'x' * 900}: 1", "over 200 characters of a key"),
        (f"grpo: {{seed: {'x' * 50_000}}}", "grpo.seed: expected int, got 'xxxx"),
        ("grpo: {3: {seed: 5}}", "unknown key 'grpo.3'"),
        ("_override_: true", "unknown key '_override_'"),
        (("- a\n" * 5_000_000).encode(), "run.yaml: a config with all its defaults has at most 64 KiB"),
        (f"defaults: base.yaml\n{OURS % ('[' + '1,' * 25_000 + ']')}".encode(), MUCH),
        # Folders
        *((LOG % name, f"logger.log_dir={name}: ") for name in ("nothing", "circle/x", "/proc/x", "/dev/null/x")),
        (LOG % ("a/" * 3000), "logger.log_dir='a/a/"),
        # Files
        *((f"defaults: {name}".encode(), name) for name in ("circle", "nothing", ".")),
        *((f"defaults: {name}".encode(), "defaults: exp") for name in ("", "[[]]", "{a: 1}", "''")),
        (b"defaults: fan0.yaml", "has at most 64 KiB and 100 files"),
        (f"defaults: {'a/' * 3000}x".encode(), "a/a/a"),
        (b'a: "\\UFFFFFFFF"', "run.yaml: not yaml"),
        (b"%YAML 1." + b"9" * 5000 + b"\n---\na: 1", "run.yaml: not yaml"),
        (BASE.encode("utf-32"), "run.yaml: not yaml"),
        (bytes(range(256)), "run.yaml: not yaml"),
        (b"a: " + b"[" * 900, "run.yaml: nested too deeply"),
    ],
)
def test_refused(check, work, text, message):
    answer = answer_to(check, work, text)
    assert_answered(answer, code=2)
    assert message in answer.message and answer.message.count("\n") == 1 + answer.message.count("data.default.repeat")
    assert not (work / "touched").exists()


ENV = "command line 'env.custom"
FORM = "here stands an env_name, then its arguments: env.custom.my_module:MyClass.near=6"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.train.1000000.name=x"], "unknown key 'data.train.1000000.name'"),
        ([f"data.train.{'9' * 5000}.name=x"], "unknown key 'data.train.999"),
        (["data.train.7.name=x"], "data.train.7 is set, but not data.train.1"),
        (["data.train=null", "data.train.1.data_path=train.jsonl"], "data.train.1 is set, but not data.train.0"),
        *(
            ([f"data.train.{index}.name=x"], f"unknown key 'data.train.{index}.name'")
            for index in ("00", "²", "٣", "-1")
        ),
        (["grpo.3.seed=5"], "unknown key 'grpo.3.seed'"),
        (["data.custom_dataloader=os:getpid"], "has no effect with data.use_multiple_dataloader=false"),
        (["env.custom.a=5"], f"{ENV}.a=5': env.custom.a: expected mapping, got '5' (int); {FORM}"),
        (["env.custom.a.b=6", "env.custom.a=5"], f"{ENV}.a=5': env.custom.a: expected mapping"),
        (["env.custom=&a {x: *a}"], f"{ENV}=&a"),
        (["data.task_to_env.t=5"], "data.task_to_env.t: expected str, got '5' (int)"),
        (["data.task_to_env={t: true}"], "data.task_to_env.t: expected str, got 'true' (bool)"),
        (["policy.tokenizer.chat_template_kwargs.x=0x_"], "'0x_' (int) has no finite value"),
        (["policy.optimizer.kwargs.betas=&a [*a, *a]"], MUCH),
        (["policy.optimizer.kwargs.betas=[[[["], "not yaml"),
        (["grpo.seed=1", "grpo.seed.a=2"], "unknown key 'grpo.seed.a'"),
        (["logger.log_dir=${logger.log_dir}"], "goes in a circle"),
        (["data.task_to_env=[" + "1," * 20_000 + "]"] * 3, "command line 'data.task_to_env=[1,1"),
        ([f"logger.log_dir={'x' * 60_000}"], "logger.log_dir='xxx"),
        (["x" * 60_000], "command line 'xxx"),
        (
            ["grpo.num_prompts_per_step=100000000", "grpo.num_generations_per_prompt=100000000"],
            "over 10,000,000 samples",
        ),
    ],
)
def test_overrides_refused(check, work, overrides, message):
    answer = answer_to(check, work, "", *overrides)
    assert_answered(answer, code=2)
    assert message in answer.message


@pytest.mark.parametrize("words", [["circle"], ["nothing"], ["."], [""], ["a\nb"]])
def test_configs_that_are_no_files(check, work, words):
    answer = check(work, *words)
    assert_answered(answer, *(repr(word)[1:-1] for word in words), code=2)
    assert answer.message.count("\n") == 1


def test_accepted(check, work):
    """What only looks wrong: aliases within reason, a date, << and = as text, UTF-16."""
    shared = (
        f"logger.mlflow: {{a: &a {{b: [1, 2]}}, c: [*a, *a]}}\n{KWARGS % '2024-99-99'}\n{OURS % '[<<, =, ~, 1e-6]'}"
        "\ndata: {task_to_env: {t: 'm:C'}}"  # else no data set has the environment
    )
    for text in (
        shared,
        f"defaults: base.yaml\n{shared}".encode("utf-16"),
        f"\ufeffdefaults: base.yaml\n{shared}".encode(),
    ):
        answer = answer_to(check, work, text)
        assert answer.code == 0, answer
    assert answer_to(check, work, "data: {train: {download_dir: x}}").code == 0
    for override in (
        "data.train.download_dir=x",
        "logger.mlflow.a.b.c=2024-99-99",
        "policy.tokenizer.chat_template_kwargs.x==",
        "data.task_to_env.t=math",
    ):
        assert answer_to(check, work, "", override).code == 0


# ------------------------------------------------------------------------------------------------------- generated

THEIRS = [re.sub(r"\.?\*", "", pattern).strip(".") for pattern, _ in nemo.PATTERNS]  # keys of NeMo RL
VALUES = [
    None,
    True,
    -1,
    0,
    1.5,
    10**12,
    10**400,
    float("nan"),
    float("inf"),
    "",
    "x" * 3000,
    "\ud800",
    "a\0b",
    "\u202e\x1b[2J\n",
    "${grpo.seed}",
    "${mul: 2, 3}",
    "${.name}${.name}",
    "${",
    "2024-99-99",
    "<<",
    "../../..",
    "/proc/self/mem",
    "nobody:nothing",
    [],
    [[]],
    {},
    {"": {"": 1}},
    [1, "a", None, {"a": [1]}],
    list(range(3000)),
    {f"k{i}": i for i in range(300)},
]
TEXTS = [
    b"&a [*a]",
    b"*a",
    b"&a ",
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
TEXTS += [
    b"'",
    b'"',
    b"#",
    b"|\n",
    b"%",
    b"---\n",
    b"\n" * 50,
    b"[" * 300,
    b"9" * 5000,
    b"\xc2\x85",
    b"\xef\xbb\xbf",
    b"\\ud800",
]


def places(node, path=()):
    """The paths to the values of a nest, which may hold itself."""
    children = (
        ()
        if len(path) > 6
        else node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    )
    for key, child in children:
        yield (*path, key)
        yield from places(child, (*path, key))


def mutated_nest(rng, nest):
    """One change of a config: a value or key deleted, doubled, renamed, retyped, nested, or from another place."""
    *path, last = rng.choice(list(places(nest)))
    parent = nest
    for key in path:
        parent = parent[key]
    change = rng.randrange(7)
    value = parent[last]
    if change == 0:
        del parent[last]
    elif change == 1:
        parent[last] = [value, value]
    elif change == 2 and isinstance(parent, dict):
        parent[rng.choice([last + "_", last.upper(), f"{last}.{last}", last[1:], 3, "_override_", "<<"])] = parent.pop(
            last
        )
    elif change == 3:
        parent[last] = {last: value}
    elif change == 4:
        parent[last] = nest  # an alias of a node above: it holds itself
    elif change == 5:
        *others, other = rng.choice(list(places(nest)))
        source = nest
        for key in others:
            source = source[key]
        parent[last] = source[other]
    else:
        parent[last] = rng.choice(VALUES)


def mutated_text(rng, content):
    """The text with a piece taken out, doubled, moved or replaced by what yaml reads in its own way."""
    for _ in range(rng.choice([1, 1, 2, 5])):
        start = rng.randrange(len(content) + 1)
        end = min(len(content), start + rng.choice([0, 0, 1, 5, 40]))
        piece = rng.choice([b"", rng.choice(TEXTS), rng.randbytes(3), content[start:end] * 2, content[:200]])
        content = content[:start] + piece + content[end:]
    return content


def hostile_override(rng):
    """An override of a key of ours, or nearly, with a value of VALUES or of the key's own kind."""
    names = [*(f"{free}.a.b" for free in FREE), *(f"{section}._override_" for section in SECTIONS), *THEIRS]
    name = rng.choice([rng.choice([*FIELDS]), rng.choice(names)])
    name = rng.choice([name] * 6 + [f"{name}.x", f"{name}.0.name", name[:-1], name.replace(".", ".0.", 1), f"{name}."])
    value = rng.choice([*VALUES, "[1, 2]", "{a: 1}", "&a [*a]", "1e5", "0x_"])
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{name}={text}".replace("\0", "").encode("utf-8", "replace").decode()


def run_hostile(check, work, seed, names=("rich.yaml",)):
    """The answer to the seed's change of one of the files, or its overrides of it, held to the rules."""
    rng = random.Random(seed)
    recipe, kind = work / rng.choice(names), rng.randrange(3)
    overrides = []
    if kind == 0:
        nest = yaml.safe_load(recipe.read_text())
        for _ in range(rng.choice([1, 1, 1, 3])):
            mutated_nest(rng, nest)
        content = yaml.dump(nest, allow_unicode=True).encode("utf-8", "surrogatepass")
    elif kind == 1:
        content = mutated_text(rng, recipe.read_bytes())
    else:
        content = f"defaults: {recipe.name}".encode()
        overrides = [hostile_override(rng) for _ in range(rng.choice([1, 1, 2, 5]))]
    (work / "hostile.yaml").write_bytes(content)
    answer = check(work, "hostile.yaml", *overrides)
    message = re.sub(r"^these keys.*\n(  .*\n)*in force.*\n(  .*\n)*", "", answer.message)
    answer = type(answer)(answer.code, message, answer.output, answer.seconds)
    files = [".yaml", ".jsonl", ": cannot be read", *(override.partition("=")[2][:20] for override in overrides)]
    assert_answered(answer, "command line", *files, *(f"{section}." for section in SECTIONS if section))
    return answer


def test_mutated_configs(check, work):
    for seed in range(60):
        run_hostile(check, work, seed)


@pytest.mark.long
def test_1000_mutated_configs(check, work):
    names = ["rich.yaml"] * 8 + [recipe.name for recipe in RECIPES]
    codes = [run_hostile(check, work, seed, names).code for seed in range(1000, 2000)]
    assert 30 < codes.count(0) < 970, "both kinds are there"
