"""Files that nobody meant to be read: the converter ends in time, with a config or with one message."""

import random
import re
import signal
from contextlib import contextmanager

import pytest
from small_run import ROOT
from test_theirs import SYSTEM_OF, USERS

from base.inputs import reader
from config import ConfigError
from tools.convert import COMPUTED, convert

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


CALL = "from trl import GRPOConfig, GRPOTrainer\n"
MANY = "".join(f"x{i + 1} = x{i} + x{i}\n" for i in range(40))
BASES = "".join(f"class C{i + 1}(C{i}, C{i}): pass\n" for i in range(30))
ALIASES = "a0: &a0 [1, 1]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(40))
INTERPOLATED = "data:\n  a0: x\n" + "".join(f"  a{i + 1}: ${{data.a{i}}}${{data.a{i}}}\n" for i in range(40))
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
    ("trl", "a.yaml", "x" * 500_000, "more than 400,000 characters"),
    ("trl", "a.yaml", b"\xff\xfe\x00", "cannot be read"),
    ("trl", "a.py", "\ufeff" + CALL + "GRPOConfig(beta=0.1)", "beta=0.1"),
    ("trl", "a.py", CALL + "GRPOConfig(beta=1e308*10)", "expected a finite number"),
    ("trl", "a.py", CALL + "a = 10\n" + "a1 = a**64\nb = a1**64\nc = b**64\nGRPOConfig(seed=c)", COMPUTED),
    ("trl", "a.py", CALL + "GRPOConfig(output_dir='x' * 10**10)", COMPUTED),
    ("trl", "a.py", CALL + "x0 = 'long'\n" + MANY + "GRPOConfig(output_dir=x40)", COMPUTED),
    ("trl", "a.py", CALL + "x0 = ''\n" + MANY + "GRPOConfig(output_dir=x40)", COMPUTED),
    ("trl", "a.py", CALL + "class C0(GRPOConfig): beta = 0.1\n" + BASES + "C30()", "C30"),
    ("trl", "a.py", CALL + "class A(B): pass\nclass B(A): pass\nA(beta=1)\nGRPOConfig(**A())", "**A()"),
    ("trl", "a.py", CALL + f"GRPOConfig(seed={'+'.join(['1'] * 3000)})", "error: "),
    ("trl", "a.py", CALL + f"GRPOConfig(seed={'(' * 150}1{')' * 150})", "seed=1"),
    ("trl", "a.py", CALL + "GRPOConfig(seed=1)\0", "not Python"),
    ("verl", "a.yaml", INTERPOLATED + "  seed: ${data.a40}", "data.seed="),
    ("verl", "a.yaml", "data: {seed: '" + "${" * 500 + "'}", "data.seed="),
    ("verl", "a.sh", "A='$A$A'\n" * 30 + "python $A$A data.seed=1", "data.seed=1"),
    ("verl", "a.sh", "A=$A$A$A data.seed=${A:-" * 30, "not a shell command"),
    ("verl", "a.sh", "data.seed=$((9**9**9**9))", "data.seed="),
    ("verl", "a.sh", "N=9;" + "N=$((N*N*N*N));" * 50 + "x data.seed=$N", "data.seed="),
    ("verl", "a.sh", "x data.seed=$((" + "(" * 400 + ")" * 400 + "))", "not a shell command"),
    ("verl", "a.sh", "A=" + "b" * 9000 + "\n" + "x $A data.seed=1\n" * 200, "not a shell command"),
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


ODD = "null -1 0 1e999 [] {} '' \" ' \\ $ ${ $(( ` &a *a ** yield if \ud800 \0 () ( ) = : , # nan True".split(" ")
ODD += ["!!int x", "\t", "lambda: 0", "\u2028", "9" * 400, "\n"]


def seeds_of_files():
    """(system, name, text) of files as users have them."""
    peers = ROOT / "tests" / "helpers" / "peers"
    files = [(path.name.partition("_")[0], path.name, path.read_text()) for path in sorted(peers.glob("*_*.*"))]
    files = [file for file in files if file[0] in ("trl", "verl") and not file[1].endswith(".py")]
    files += [(SYSTEM_OF[row["file"]], f"theirs.{row['file']}", row["text"]) for row in USERS]
    return files


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
    files = seeds_of_files()
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
