"""Every command that a page of the repository shows is run.

A page is a script: its commands run in order, each by bash as it stands, in the page's own copy of the repository. In
the copy no rank starts: train.sh stops behind its check, in front of torchrun, and torchrun only checks. Models and
data of the hub are stand-ins in its cache. page_commands.yaml names what else a command needs, the tests that run
commands for real, and all that is not run, with the reason.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from report_runs import make_run
from small_run import ROOT
from test_forks import copy_with

pytestmark = [pytest.mark.slow, pytest.mark.house]

LISTS = yaml.safe_load(Path(__file__).with_name("page_commands.yaml").read_text(encoding="utf-8"))
STARTER = ROOT / "examples" / "arithmetic" / "starter"
ASSIGNMENTS = r"(?:[A-Z_]+=\S+ )*"
PROGRAM = re.compile(
    ASSIGNMENTS
    + r"(?:\.{0,2}/\S+|\.venv/bin/\S+|tests/run\.sh|python|python3|torchrun|bash|sbatch|git|pip|pipx|uv|npm|npx|"
    r"node|cp|ln|docker|kubectl|sky|apt-get|curl|wget|claude|codex)(?: |$)"
)
INLINE = re.compile(ASSIGNMENTS + r"(?:\./\S+\.sh|(?:\.venv/bin/)?(?:python|torchrun|pip) |bash |sbatch |git )")
SHELL = ("", "bash", "sh", "shell", "console")  # languages of fenced blocks that hold commands

# In place of torchrun and of base/system/launch.py: what the ranks would do first.
TORCHRUN = """#!/usr/bin/env bash
set -euo pipefail
[[ $1 != --nproc_per_node=* ]] || { export WORLD_SIZE=${1#*=} LOCAL_WORLD_SIZE=${1#*=}; shift; }
[[ $1 == grpo.py || $1 == eval.py ]]
exec .venv/bin/python grpo.py --check "${@:2}"
"""
LAUNCH = "import sys\nprint('torchrun would start:', *sys.argv[1:])\n"


def pages() -> list[str]:
    """All pages but the records of what was run once."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [page for page in listed.stdout.split() if not page.startswith(tuple(LISTS["records"]))]


def commands_of(text: str) -> list[str]:
    """Of blocks, fenced or indented, and of prose, in order."""
    found = []
    text = re.sub(r"\\\n\s*", "", text)
    for fence, language, block, paragraph in re.findall(
        r"(^```(\w*)[^\n]*\n(.*?)^```$)|((?:^(?!```)[^\n]+\n?)+)", text, re.M | re.S
    ):
        if fence and language in SHELL:
            lines = block.splitlines()
        elif paragraph.startswith("    "):
            lines = paragraph.splitlines()
        else:
            spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", paragraph)]
            found += [span for span in spans if INLINE.match(span)]
            continue
        commands = [re.split(r"\s+#(?: |$)", line)[0].strip() for line in lines]
        found += [command for command in commands if PROGRAM.match(command)]
    return found


def files_of(text: str) -> dict[str, str]:
    """The files that a page shows whole: blocks of Python whose first line is their name."""
    return dict(re.findall(r"^```python\n# ([\w/]+\.py)[^\n]*\n(.*?)^```$", text, re.M | re.S))


def plan_of(page: str) -> list[tuple[str, dict]]:
    """What is run of a page: (command, its entry of `with`, which may be empty)."""
    elsewhere = {command for commands in [*LISTS["by"].values(), *LISTS["not_run"].values()] for command in commands}
    found = commands_of((ROOT / page).read_text(encoding="utf-8"))
    needs = {entry["command"]: entry for entry in LISTS["with"] if page in entry.get("pages", [page])}
    return [(command, needs.get(command, {})) for command in dict.fromkeys(found) if command not in elsewhere]


def plans() -> dict[str, list[tuple[str, dict]]]:
    """Page -> what is run of it. A command that needs nothing is run for the first page that shows it."""
    found, seen = {}, set()
    for page in pages():
        plan = [(command, needs) for command, needs in plan_of(page) if needs or command not in seen]
        seen |= {command for command, needs in plan if not needs}
        if plan:
            found[page] = plan
    return found


PLANS = plans()


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """The repository as its working tree is, in git, with stand-ins for torchrun and for what the network gives."""
    copy = copy_with(None, tmp_path_factory.mktemp("pages") / "main", tests=True)
    (copy / "base" / "system" / "launch.py").write_text(LAUNCH)
    author = ["-c", "user.name=x", "-c", "user.email=x@x.x"]
    subprocess.run(["git", "init", "-q", "-b", "main"], cwd=copy, check=True)
    subprocess.run(["git", "add", "-A"], cwd=copy, check=True)
    subprocess.run(["git", *author, "commit", "-q", "-m", "all"], cwd=copy, check=True)
    binaries = copy / ".venv" / "bin"  # ignored by git
    binaries.mkdir(parents=True)
    (binaries / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (binaries / "torchrun").write_text(TORCHRUN)
    for file in binaries.iterdir():
        file.chmod(0o755)
    put_models_and_data(copy.parent)
    make_run(copy / "logs" / "exp_001", num_steps=4, num_envs=1, num_samples=4)
    shutil.copytree(copy / "logs" / "exp_001", copy / "logs" / "exp_002")
    for name in ("logs/exp_001/hf_model", "logs/gsm8k/exp_001/hf_model", "logs/gsm8k_cpu/exp_001/hf_model"):
        shutil.copytree(copy.parent / "model", copy / name)
    shutil.copytree(copy.parent / "model", copy / "examples" / "smollm2" / "model")
    return copy


def put_models_and_data(folder: Path) -> None:
    """A model with a long context, and the hub's cache with it and with rows of GSM8K's form."""
    model = folder / "model"
    shutil.copytree(STARTER, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40_960}))
    commit = "c" * 40
    for name in LISTS["models"]:
        cached = folder / "hub" / f"models--{name.replace('/', '--')}"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text(commit)
        shutil.copytree(model, cached / "snapshots" / commit)
    for name, splits in LISTS["datasets"].items():
        cached = folder / "hub" / f"datasets--{name.replace('/', '--')}"
        reference = cached / "refs" / "refs" / "convert" / "parquet"
        reference.parent.mkdir(parents=True)
        reference.write_text(commit)
        for split, row in splits.items():
            file = cached / "snapshots" / commit / split / "0000.parquet"
            file.parent.mkdir(parents=True)
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 600), file)


@pytest.fixture
def page_copy(repository, tmp_path):
    copy = tmp_path / "repository"
    subprocess.run(["cp", "-r", repository, copy], check=True)
    return copy


def run_page(page: str, copy: Path, repository: Path, *, long: bool = False) -> None:
    """Runs its commands, those that take long or the others; the first that does not end as it should is an error."""
    for name, code in files_of((ROOT / page).read_text(encoding="utf-8")).items():
        (copy / name).write_text(code)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GRPO_", "HF_", "PYTHON"))}
    env |= {"GRPO_PYTHON": str(copy / ".venv" / "bin" / "python"), "GRPO_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"}
    env |= {"HF_HUB_CACHE": str(repository.parent / "hub"), "HOME": str(copy.parent)}
    env["PATH"] = f"{copy}/.venv/bin:{env['PATH']}"
    for command, needs in PLANS[page]:
        if needs.get("long", False) != long:
            continue
        line = command
        for word, other in needs.get("words", {}).items():
            assert word in line
            line = line.replace(word, other)
        before, after = needs.get("before", []), needs.get("after", [])
        script = "\n".join(["set -eo pipefail", *before, "code=0", f"{line} || code=$?", *after, "exit $code"])
        done = subprocess.run(["bash", "-c", script], cwd=copy, env=env, capture_output=True, text=True)
        said = done.stdout + done.stderr
        expected = done.returncode == needs.get("code", 0) and needs.get("says", "") in said
        assert expected, f"{page}: {command}: exit code {done.returncode}\n{said[-3000:]}"


@pytest.mark.parametrize("page", [page for page in PLANS if any("long" not in needs for _, needs in PLANS[page])])
def test_commands_of(page, page_copy, repository):
    run_page(page, page_copy, repository)


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PLANS if any("long" in needs for _, needs in PLANS[page])])
def test_long_commands_of(page, page_copy, repository):
    run_page(page, page_copy, repository, long=True)


def test_the_lists_name_what_is_on_the_pages():
    """And each test that is said to run a command is there."""
    shown = {command for page in pages() for command in commands_of((ROOT / page).read_text(encoding="utf-8"))}
    listed = [command for commands in [*LISTS["by"].values(), *LISTS["not_run"].values()] for command in commands]
    listed += [entry["command"] for entry in LISTS["with"]]
    assert set(listed) - shown == set()
    assert len(shown) > 150 and len(PLANS) > 20
    for place in LISTS["by"]:
        file, _, test = place.partition("::")
        assert f"def {test}(" in (ROOT / file).read_text() if test else (ROOT / file).is_file(), place


def test_the_task_of_readme_grades_the_sums():
    names = {}
    exec(files_of((ROOT / "README.md").read_text(encoding="utf-8"))["my_task.py"], names)
    assert names["reward"]([[{"content": "85"}], [{"content": "75"}]], answer=["85", "85"]) == [1.0, 0.0]


def test_what_is_a_command():
    page = """Run `./train.sh a.yaml`, `python -m
x.y` or `grpo.py`; `loss.py` is a file.

    ./train.sh \\
        b=1     # a comment
    cp -r a b && .venv/bin/python c.py
    |user|>72+97=

```bash
A=1 torchrun d.py  # why
```

```yaml
git: no
```
"""
    assert commands_of(page) == [
        "./train.sh a.yaml",
        "python -m x.y",
        "./train.sh b=1",
        "cp -r a b && .venv/bin/python c.py",
        "A=1 torchrun d.py",
    ]
