"""Every command of the pages (helpers/commands.py finds them) is run: by this test, by another one, or by a committed
script. tests/commands.yaml says by which; here that is held to be so.
"""

import ast
import importlib.util
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from commands import HISTORY, ROOT, SETTINGS, documented, in_comment, in_markdown, tidy

from check import reader, rules

TABLE = yaml.safe_load((ROOT / "tests" / "commands.yaml").read_text(encoding="utf-8"))
COMMANDS = documented()
PAGES_OF: dict[str, list[str]] = {}
for text, page in COMMANDS:
    PAGES_OF.setdefault(tidy(text), []).append(page)
RUNS: dict[str, str] = {}
for part in ("here", "long"):
    for group in TABLE[part].values():
        RUNS |= {command: as_run or command for command, as_run in group.items()}
ROWS = [*RUNS, *TABLE["tests"], *TABLE["scripts"]]
SCRIPT = re.compile(
    r"(?:python (?:-m )?|torchrun .*?|bash |^|^\S* )([\w./]+\.(?:py|sh)|(?:bench|examples|run)(?:\.\w+)+)(?= |$)"
)
# The files that a newcomer is to write, by their first lines, `# NAME`.
SHOWN = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
SHOWN_FILES = {text.split()[1]: text for text in re.findall(r"```python\n(.*?)```", SHOWN, re.DOTALL)}
FEW = "grpo.max_num_steps=1 grpo.val_period=0 grpo.val_at_start=false grpo.val_at_end=false checkpointing.enabled=false"
OURS = "policy.model_name=examples/arithmetic/starter policy.generation.max_new_tokens=8 grpo.num_prompts_per_step=4"
OURS += " data.train.data_path=small/gsm8k.jsonl data.validation.data_path=small/gsm8k.jsonl grpo.max_val_samples=8"
OURS += " grpo.num_generations_per_prompt=4 policy.train_global_batch_size=16 policy.max_total_sequence_length=512"
NO_NETWORK = re.compile(r"pip could not fetch|No matching distribution|Temporary failure in name resolution")


def selects_tests(command: str) -> bool:
    return bool(re.match(r"tests/run\.sh (?=-|tests/)", command))


# ------------------------------------------------------------------------------------------------- the table


def test_every_command_has_a_row_and_every_row_a_command():
    missing = {text: pages for text, pages in PAGES_OF.items() if text not in ROWS and not selects_tests(text)}
    assert missing == {}, "say in tests/commands.yaml who runs them"
    assert [row for row in ROWS if row not in PAGES_OF] == [], "no page has them any more: take them out"
    assert [row for row, count in Counter(ROWS).items() if count > 1] == []
    assert len(PAGES_OF) > 100


def pattern_of(word: str) -> str:
    """What a word of a page may be when it is run: a name in capitals is anything, and processes are as many as fit."""
    if "|" in word or word == "...":
        return ".*"
    word = re.sub(r"(?<=^--nproc_per_node=)\d+|(?<![A-Z_])[A-Z][A-Z_0-9]+", ".*", re.sub(r"([.+()*$])", r"\\\1", word))
    return word.replace("/path/to/", "")


@pytest.mark.parametrize("command", RUNS)
def test_what_is_run_is_the_command(command):
    """Its words in their order, and others."""
    words = iter(RUNS[command].split())
    for word in command.split():
        assert any(re.fullmatch(pattern_of(word), other) for other in words) or pattern_of(word) == ".*", word


def sources(path: Path) -> str:
    """The text of a test, and of the helpers that it names."""
    text = path.read_text(encoding="utf-8")
    helpers = (ROOT / "tests" / "helpers").glob("*.py")
    return "\n".join([text, *(file.read_text() for file in helpers if re.search(rf"\b{file.stem}\b", text))])


@pytest.mark.parametrize("command", TABLE["tests"])
def test_the_test_runs_it(command):
    name, *words = TABLE["tests"][command]
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    text = sources(ROOT / file)
    assert words and all(word in command and word in text for word in words), words


def code_of(script: Path) -> str:
    """Without its docstring, comments at the top and usage: they run nothing and read no option."""
    text = script.read_text(encoding="utf-8")
    usage = r"(?s)^\"\"\".*?^\"\"\"$|<<'USAGE'.*?^USAGE$|(?-s:^#.*)"
    return re.sub(usage, "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("command", TABLE["scripts"])
def test_the_script_runs_it(command):
    name, *words = TABLE["scripts"][command]
    code = code_of(ROOT / name)
    assert words and all(word in command and word in code for word in words), words


@pytest.mark.parametrize("command", [text for text in PAGES_OF if selects_tests(text)])
def test_the_selected_tests_exist(command):
    """Options that tests/run.sh knows, files that are there, and names that -k finds in them."""
    words = command.split()[1:]
    files = [word for word in words if word.startswith("tests/")]
    options = {word for word in words if word.startswith("-")}
    assert options <= {"--long", "--fast", "-k"} and all((ROOT / file).exists() for file in files)
    if "-k" in words:
        text = "".join((ROOT / file).read_text() for file in files)
        chosen = [found for found in re.findall(r"^def (test_\w+)", text, re.MULTILINE) if words[-1] in found]
        assert chosen, words[-1]
    if "--long" in words and files:
        assert all("pytest.mark.long" in (ROOT / file).read_text() for file in files)


# ------------------------------------------------------------------------------------------------- its arguments


def script_of(command: str) -> Path | None:
    """The file of ours that a command starts."""
    found = SCRIPT.search(re.sub(f"^{SETTINGS}", "", command))
    if not found:
        return None
    name = found[1].replace("/path/to/", "")
    return ROOT / (name if name.endswith((".py", ".sh")) else f"{name.replace('.', '/')}.py")


@pytest.mark.parametrize("command", sorted({command.text for command in COMMANDS if script_of(tidy(command.text))}))
def test_the_script_is_there_and_knows_the_options(command):
    """Also those of its [optional parts]."""
    script = script_of(tidy(command))
    if str(script.relative_to(ROOT)) in SHOWN_FILES:
        return
    code = code_of(script)
    if script.name in ("grpo.py", "eval.py"):  # which read their command line there
        code += "".join(code_of(ROOT / "run" / name) for name in ("preflight.py", "convert.py"))
    _, _, words = command.partition(script.stem)
    options = {word for word in re.findall(r"(?<=[\s\[])--?[a-z]\w*", words) if not selects_tests(tidy(command))}
    assert [option for option in options if not re.search(rf"{option}\b", code)] == []


def config_of(command: str) -> tuple[str, list[str], int] | None:
    """The config that a command trains, checks or scores, its settings with those in brackets, and the ranks."""
    match = re.search(r"(?:grpo\.py|eval\.py|train\.sh|slurm\.sh|walk\.py|moments\.py record \S+)(?: (.*))?$", command)
    if not match or "--from" in command or "--help" in command:
        return None
    words = [word.strip("[]") for word in (match[1] or "").split()]
    settings = [word for word in words if re.match(r"(?!key\.sub|key=|their)[a-z_]+(\.\w+)+=", word)]
    files = [word for word in words if word.endswith(".yaml")]
    known = [file for file in files if not file.startswith(("CONFIG", "logs/"))]
    ranks = re.search(r"--nproc_per_node=(\d+)", command)
    return known[0] if known else "configs/smoke.yaml", settings, int(ranks[1]) if ranks else 2


TAKES_A_CONFIG = [
    command.text
    for command in COMMANDS
    if config_of(command.text)
    and "/path/to/" not in command.text
    and "ratio_l2_coef" not in command.text
    and command.page != "examples/forks/README.md"
]


@pytest.mark.parametrize("command", sorted(set(TAKES_A_CONFIG)))
def test_the_config_is_there_and_has_the_settings(command, monkeypatch):
    """Those of a fork are read by its own command, after its diff (group `forks` of the table)."""
    monkeypatch.chdir(ROOT)
    file, settings, ranks = config_of(command)
    cfg = reader.load(file, settings)
    rules.validate(cfg, world_size=1 if cfg.cluster.gpus_per_node == 1 else ranks)


# ------------------------------------------------------------------------------------------------- they are run


def make_copy(folder: Path) -> Path:
    """The repository as it would be committed now, in a repository of its own; small/ and .venv beside it."""

    def git(*words: str, cwd: Path) -> str:
        return subprocess.run(["git", *words], cwd=cwd, capture_output=True, text=True, check=True).stdout

    for file in git("ls-files", "-z", "-co", "--exclude-standard", cwd=ROOT).split("\0"):
        if file and (ROOT / file).is_file():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, folder / file)
    git("init", "-q", cwd=folder)
    git("add", "-A", cwd=folder)
    git("-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "-qm", "copy", cwd=folder)
    (folder / ".venv").symlink_to(sys.prefix)
    if (ROOT / "examples/smollm2/model").exists():
        (folder / "examples/smollm2/model").symlink_to(ROOT / "examples/smollm2/model")
    small = folder / "small"
    small.mkdir()
    pairs = [(a, a + 7) for a in range(20, 60)]
    rows = [{"question": f"{a}+{b}=", "answer": f"By counting.\n#### {a + b}"} for a, b in pairs]
    (small / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (small / "rows.csv").write_text("\n".join(["problem,answer", *(f"{a}+{b}=,{a + b}" for a, b in pairs)]) + "\n")
    with closing(sqlite3.connect(small / "rows.db")) as database, database:
        database.execute("create table rows (problem text, answer text)")
        database.executemany("insert into rows values (?, ?)", [(f"{a}+{b}=", str(a + b)) for a, b in pairs])
    for name, text in SHOWN_FILES.items():
        (folder / name).write_text(text)
    with (folder / ".git" / "info" / "exclude").open("a") as file:
        file.write("\n".join([*SHOWN_FILES, "small/"]))
    return folder


def make_mistral(folder: Path) -> None:
    from tiny import FAMILIES, make_tiny
    from transformers import MistralConfig

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "mistral", (MistralConfig, heads))
        make_tiny(folder, family="mistral", tied=False)


def run_all(commands: dict[str, str | None], folder: Path) -> None:
    """One after the other; what was run already is not run again."""
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GRPO_EXIT_FILE")
    env = {name: value for name, value in os.environ.items() if name not in (*unset, "TRITON_INTERPRET")}
    env |= {"FEW": FEW, "OURS": OURS, "ROOT": str(ROOT), "GRPO_DEVICE": "cpu", "GRPO_PYTHON": sys.executable}
    env |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    done = set()
    for command, as_run in commands.items():
        line = as_run or command
        if line in done:
            continue
        done.add(line)
        run = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line], cwd=folder, env=env, capture_output=True, text=True
        )
        output = run.stdout[-2000:] + run.stderr[-3000:]
        if run.returncode and NO_NETWORK.search(output):
            pytest.skip(f"no network for `{line}`: {output[-300:]}")
        assert run.returncode == 0, f"`{line}` ended with {run.returncode}:\n{output}"


@pytest.mark.parametrize("group", TABLE["here"])
def test_here(group, tmp_path):
    run_all(TABLE["here"][group], make_copy(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("group", TABLE["long"])
def test_in_a_small_form(group, tmp_path):
    """With the real engine, on 2 CPU cores."""
    copy = make_copy(tmp_path)
    if any("small/mistral" in (as_run or "") for as_run in TABLE["long"][group].values()):
        make_mistral(copy / "small" / "mistral")
    run_all(TABLE["long"][group], copy)


# ------------------------------------------------------------------------------------------------- examples/README.md


def test_the_newcomers_environment_and_reward_function(tmp_path):
    """By hand: 85 is right, 75 forgets the carry, 84 is wrong; what is no whole number gets nothing."""
    modules = {}
    for name in ("my_env", "my_reward"):
        spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
        (tmp_path / f"{name}.py").write_text(SHOWN_FILES[f"examples/{name}.py"])
        modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[name])
    grade = modules["my_env"].Sums().grade
    graded = {reply: grade(reply, "85") for reply in ("85", "75", "95", "84", "8.5", "", "\u0665", "\u00b2", "-85")}
    right = [(1.0, "ok"), (0.5, "wrong"), (0.5, "wrong"), (0.0, "wrong"), *[(0.0, "parse_fail")] * 5]
    assert [(result.reward, result.outcome) for result in graded.values()] == right
    completions = [[{"role": "assistant", "content": text}] for text in ("85", "75")]
    assert modules["my_reward"].right_sum(completions, ["85", "85"], prompts=[]) == [1.0, 0.0]


def test_the_loss_that_is_shown_is_the_forks():
    (shown,) = re.findall(r"```diff\n(.*?)```", SHOWN, re.DOTALL)
    fork = (ROOT / "examples/forks/loss_term.diff").read_text(encoding="utf-8")
    added = re.findall(r"^\+(?!\+).*", fork, re.MULTILINE)
    assert re.findall(r"^\+.*", shown, re.MULTILINE) == added and len(added) == 4
    assert all(f"\n{line[1:]}\n" in fork.replace("\n ", "\n") for line in re.findall("^ {4}.*", shown, re.MULTILINE))


# ------------------------------------------------------------------------------------------------- the search


def test_the_search_sees_commands_and_leaves_mentions():
    """The rules above would hold for ever if nothing were seen."""
    page = """Text with `python grpo.py --help`, a mention of `torchrun` and `grpo.py`, and `./train.sh
a.yaml` over two lines; `torchrun --nnodes --nproc_per_node` is a mention, too.

    ./train.sh x.yaml          # a note
    .venv/bin/python bench/a.py --b \\
        --c
    git apply -R a.diff        # or: patch -p1 < a.diff
    accuracy      0.200 -> 1.000
    TensorBoard   tensorboard --logdir logs

```
bash bench/a.sh [--cpu] [key.sub=value ...]
loss = 1
```
| `tests/run.sh --long` | `eval.py CONFIG` |
"""
    assert sorted(map(tidy, in_markdown(page))) == [
        "./train.sh a.yaml",
        "./train.sh x.yaml",
        "bash bench/a.sh",
        "git apply -R a.diff",
        "patch -p1 < a.diff",
        "python bench/a.py --b --c",
        "python eval.py CONFIG",
        "python grpo.py --help",
        "tensorboard --logdir logs",
        "tests/run.sh --long",
    ]
    comment = """What it does: ./train.sh a.yaml
torchrun turns every failure into one.

    python -m bench.a [--long]  half a minute
    git = ["git", "log"]
python tests/b.py       writes
"""
    assert sorted(map(tidy, in_comment(comment))) == ["./train.sh a.yaml", "python -m bench.a", "python tests/b.py"]
    pages = {command.page for command in COMMANDS}
    assert {"README.md", "docs/tasks.md", "examples/forks/README.md", "grpo.py", "train.sh", "bench/gpu.sh"} <= pages
    assert not pages & HISTORY
