"""Files that nobody meant to be read: the converter ends in time, with a config or with one message."""

import json
import random
import re
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
from small_run import ROOT
from test_configs import CONFIGS, nested, written

from base.inputs import reader
from config import ConfigError
from tools.convert import NAMES, convert, load_table

SECONDS = 20  # of one file, on a busy machine; all but the largest take less than one


@contextmanager
def time_limit():
    def stop(*_):
        raise TimeoutError(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(system, name, text, folder):
    """The report, or the message; anything else is a failure."""
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    (folder / "ours.yaml").unlink(missing_ok=True)
    with time_limit():
        try:
            return convert(system, str(folder / name), [], str(folder / "ours.yaml"))
        except ConfigError as error:
            return f"error: {error}"


ALIASES = "a0: &a0 [1, 1]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(40))
NESTED = '{"chat_template_kwargs": ' + "[" * 200 + "]" * 200 + "}"
MANY = "{" + ", ".join(f'"key{i}": 1' for i in range(20_000)) + "}"
GRPO = "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {rollout: {n: 8}}\n"
INTERPOLATED = GRPO + "data:\n  a0: x\n" + "".join(f"  a{i + 1}: ${{data.a{i}}}${{data.a{i}}}\n" for i in range(40))
LONG = GRPO + f"data:\n  a: {'x' * 200_000}\n  prompt_key: '{'${data.a}' * 20_000}'"
# system, file, text -> a part of the message or of the report
CASES = [
    (
        "trl",
        "a.yaml",
        "lr_scheduler_kwargs: {min_lr: x}\nlr_scheduler_type: cosine_with_min_lr",
        "min_lr=x: expected a number",
    ),
    (
        "trl",
        "a.yaml",
        "learning_rate: 0\nlr_scheduler_kwargs: {min_lr: 1.0e-7}",
        "learning_rate=0: expected a number above 0",
    ),
    ("trl", "a.yaml", "num_train_epochs: .inf", "num_train_epochs=Infinity: expected a finite number"),
    ("trl", "a.yaml", "num_train_epochs: .nan", "num_train_epochs=NaN: expected a finite number"),
    (
        "trl",
        "a.yaml",
        "per_device_train_batch_size: 0",
        "per_device_train_batch_size=0: expected a whole number, 1 or more",
    ),
    ("trl", "a.yaml", "num_generations: -8", "num_generations=-8: expected a whole number"),
    ("trl", "a.yaml", "5: 1", "5=1: unknown to this converter"),
    ("trl", "a.yaml", "beta: 1\nnull: 1", "null=1: unknown to this converter"),
    ("trl", "a.yaml", "beta: !!float x", "a.yaml line 1: beta: 'x' is not of type float"),
    ("trl", "a.yaml", "beta: !!python/object:os.system x", "a.yaml line 1: beta"),
    ("trl", "a.yaml", 'run_name: "\\ud800"\nloss_type: "\\ud800"', "error: "),
    ("trl", "a.json", '{"run_name": "\\ud800", "output_dir": "a\\nb: c"}', "run_name=\\ud800"),
    ("trl", "a.yaml", f"seed: {'9' * 5000}", "error: "),
    ("trl", "a.yaml", "a: &a {b: *a}", "more than 30 levels deep"),
    ("trl", "a.yaml", ALIASES, "a.yaml line"),
    ("trl", "a.yaml", "a: " + "[" * 900 + "]" * 900, "not yaml"),
    ("trl", "a.json", "[" * 100_000, "not valid JSON"),
    ("trl", "a.yaml", "\ufeffbeta: 0.1", "beta=0.1"),
    ("trl", "a.yaml", "x" * 2_000_000, "a config has at most"),
    ("trl", "a.json", MANY, "20,000 keys"),
    ("trl", "a.json", NESTED, "more than 30 levels deep"),
    ("trl", "a.json", '{"beta": NaN}', "beta=NaN: expected a finite number"),
    ("trl", "a.json", '{"max_grad_norm": Infinity}', "max_grad_norm=Infinity: expected a finite number"),
    ("trl", "a.json", '{"beta": 1e400}', "beta=Infinity: expected a finite number"),
    ("trl", "a.json", '{"lr_scheduler_kwargs": {"min_lr": NaN}}', "min_lr=NaN: expected a number"),
    ("trl", "a.json", f'{{"delta": {"9" * 400}}}', "expected a finite number"),
    ("trl", "a.json", f'{{"delta": "{"9" * 400}"}}', "expected a number"),
    ("trl", "a.json", f'{{"num_iterations": {"9" * 17}, "generation_batch_size": {"8" * 17}0}}', "num_iterations="),
    ("trl", "a.json", '{"beta": 0.1, "beta": 0.2}', "'beta' is there twice"),
    ("trl", "a.json", '{"beta": 0.1} // of the run', "not valid JSON"),
    ("trl", "a.json", '{"beta": 0.1,}', "not valid JSON"),
    ("trl", "a.json", "{'beta': 0.1}", "not valid JSON"),
    ("trl", "a.json", "", "not valid JSON"),
    ("trl", "a.json", b"\xff{}", "not valid JSON"),
    ("trl", "a.yaml", b"\xff\xfe\x00", "not yaml"),
    ("trl", "a.yaml", "beta: 0.1\nbeta: 0.2", "beta is set again"),
    ("trl", "a.yaml", "- !!map [", "not yaml"),
    ("verl", "a.yaml", INTERPOLATED + "  seed: ${data.a40}", "data.seed="),
    ("verl", "a.yaml", GRPO + "data: {seed: '" + "${" * 500 + "'}", "data.seed="),
    ("verl", "a.yaml", LONG, "only hydra knows"),
    ("verl", "a.yaml", GRPO + "data: {seed: '${data.seed}'}", "data.seed="),
    ("verl", "a.yaml", GRPO + "data: {train_files: {a: b}, gen_batch_size: [1]}", "data.gen_batch_size=[1]"),
    (
        "verl",
        "a.yaml",
        GRPO + "algorithm.rollout_correction: {rollout_rs: token_k1, rollout_rs_threshold: [1, 2]}",
        "rollout_rs_threshold=[1, 2]",
    ),
]


@pytest.mark.parametrize(("system", "name", "text", "said"), CASES)
def test_values_that_nobody_means(system, name, text, said, tmp_path):
    answer = outcome(system, name, text, tmp_path)
    assert said in answer, answer[:2000]
    if not answer.startswith("error: "):
        problems = reader.read(tmp_path / "ours.yaml").problems
        assert not [problem for problem in problems if "must be" not in problem], "out of bounds is all that may be"


def test_a_text_cannot_add_a_line_to_the_config(tmp_path):
    outcome(
        "trl", "a.json", '{"min_p": 0.1, "a\\nloss_fn: {ratio_clip_c: 9}": 1, "optim": "x\\ngrpo: {seed: 9}"}', tmp_path
    )
    cfg = reader.read(tmp_path / "ours.yaml").cfg
    assert cfg.loss_fn.ratio_clip_c is None and cfg.grpo.seed == 42


ODD = "null -1 0 1e999 [] {} '' \" ' \\ $ ${ } ${data.seed} &a *a ** << \ud800 \0 ( ) = : , # nan True !!int".split(" ")
ODD += ["!!int x", "\t", "\u2028", "9" * 400, "\n", "\n    ", "// x"]


def files_of_users(folder):
    """(system, name, text) of files as users have them."""
    peers = ROOT / "tests" / "helpers" / "peers"
    files = [path for path in sorted(peers.iterdir()) if path.name.startswith(("trl_", "verl_"))]
    for row in CONFIGS:
        path = Path(written(row, folder))
        yield row["system"], path.name, path.read_text()
    for path in files:
        yield path.name.partition("_")[0], path.name, path.read_text()


def mutated(text, rng):
    for _ in range(rng.randint(1, 2)):
        pieces = re.findall(r"\w+|\W", text)
        place = rng.randrange(len(pieces) + 1)
        kind = rng.randrange(6)
        if kind == 0:
            pieces[place:place] = [rng.choice(ODD)]
        elif kind == 1:
            pieces[place : place + rng.randint(1, 4)] = []
        elif kind == 2:
            pieces[place : place + 1] = [rng.choice(ODD)]
        elif kind == 3:
            pieces = (
                pieces[:place] + pieces[place : place + rng.randint(1, 20)] * rng.choice([2, 3, 50]) + pieces[place:]
            )
        elif kind == 4:
            other = rng.randrange(len(pieces) + 1)
            pieces[place:place] = pieces[other : other + rng.randint(1, 9)]
        else:
            pieces = pieces[:place]
        text = "".join(pieces)
    return text


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_mutated_files(count, tmp_path):
    rng = random.Random(count)
    files = list(files_of_users(tmp_path))
    num_converted = 0
    for number in range(count):
        system, name, text = rng.choice(files)
        text = mutated(text, rng)
        try:
            answer = outcome(system, name, text, tmp_path)
        except Exception as error:
            raise AssertionError(f"file {number}, {system} {name}: {error!r}:\n{text}") from error
        num_converted += not answer.startswith("error: ")
        if not answer.startswith("error: "):
            (tmp_path / "ours.yaml").read_text(encoding="utf-8")
    assert num_converted > count / 10


DEEP = [[["x"] * 3] * 3] * 3
OF_OTHER_TYPES = [
    None,
    True,
    -1,
    1e308,
    10**400,
    "",
    "x\ny",
    "nan",
    "0.5_",
    [],
    [None],
    ["a", 1],
    {},
    {"a": None},
    DEEP,
]
LATER = [pytest.param(number, marks=pytest.mark.long) for number in range(1, len(OF_OTHER_TYPES))]


@pytest.mark.parametrize("offset", [0, *LATER])
@pytest.mark.parametrize("system", NAMES)
def test_values_of_other_types(system, offset, tmp_path):
    """Each key has each of these values once, beside an ordinary config."""
    name = {"trl": "a.json", "verl": "a.yaml"}[system]
    ordinary = {"trl": {}, "verl": {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 8}}[system]
    answers = []
    for number, key in enumerate(load_table(system)["keys"]):
        value = OF_OTHER_TYPES[(number + offset) % len(OF_OTHER_TYPES)]
        if "*" in key or "(" in key:
            continue
        config = ordinary | {key: value}
        text = json.dumps(nested(config) if system == "verl" else config)
        answers.append(outcome(system, name, text, tmp_path))
    assert len({answer.startswith("error: ") for answer in answers}) == 2, "some are refused, some converted"


@pytest.mark.parametrize("word", ["", "beta", "=0.1", "beta=[", "beta=&a *a", f"beta={'[' * 500}", "beta=!!float x"])
def test_words_that_nobody_means(word, tmp_path):
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ConfigError):
        convert("trl", str(tmp_path / "a.json"), [word], str(tmp_path / "ours.yaml"))
