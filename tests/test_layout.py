"""What a reader of the code relies on: imports run one way, --check needs no torch, nothing runs what data holds.

No size is held here: a fork may be as large as it likes.
"""

import ast
import re
import subprocess
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.house

ROOT = Path(__file__).resolve().parent.parent

# The rooms of base/, the lowest first: each imports those before it.
ROOMS = ("system", "graders", "hf", "agents", "inputs", "plan", "check")
# What base/ may import of the core.
BELOW_BASE = {"config.py", "records.py", "envs.py", "kernels/__init__.py", "kernels/sizes.py"}
ENTRIES = {"grpo.py", "eval.py", "replay.py"}
BUILDS_THE_ENGINE = "run/build.py"
ALONE = ("judges", "kernels")  # folders that import nothing but themselves
OUTSIDE = ("tests", "judges/tests", "bench", "examples", "tools")  # nothing of the product imports these


def tracked_files() -> list[str]:
    """The Python files that git tracks; where the folder is no repository, all."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = (
        listed.stdout.split()
        if listed.returncode == 0
        else [str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py")]
    )
    return sorted(name for name in names if (ROOT / name).exists() and not name.startswith("."))


FILES = [name for name in tracked_files() if not name.startswith(("tests/", "judges/tests/"))]
TREES = {name: ast.parse((ROOT / name).read_text(encoding="utf-8")) for name in FILES}
PRODUCT = [name for name in FILES if name.split("/")[0] not in OUTSIDE]
FILE_OF = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in PRODUCT}


def folder_of(name):
    """base, run, judges or kernels; "" for a file on top."""
    return name.rpartition("/")[0].split("/")[0]


def imports(tree):
    """Dotted names of all imports, those inside functions too, but for those of types alone (`if TYPE_CHECKING`); of
    `from a import b` both a and a.b. Only judges/ has relative imports."""
    names = set()
    todo = [tree]
    for node in todo:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module
            if node.level:
                module = f"judges.{node.module}" if node.module else "judges"
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def packages(tree):
    return {name.split(".")[0] for name in imports(tree)}


IMPORTED = {name: {FILE_OF[used] for used in imports(TREES[name]) if used in FILE_OF} - {name} for name in PRODUCT}


def with_all_it_imports(names):
    found = set()
    todo = set(names)
    while todo:
        found |= todo
        todo = set().union(*(IMPORTED[name] for name in todo)) - found
    return sorted(found)


def wrong_imports(name, used):
    """Which rules the import of file `used` by file `name` breaks."""
    importer, imported = folder_of(name), folder_of(used)
    broken = []
    if importer in ALONE and imported != importer:
        broken.append(f"{importer}/ imports only itself")
    if importer == "base":
        if imported not in ("base", "judges") and used not in BELOW_BASE:
            broken.append("base/ is below the core")
        rooms = [file.split("/")[1] for file in (name, used) if file.count("/") == 2 and file.startswith("base/")]
        if len(rooms) == 2 and ROOMS.index(rooms[1]) > ROOMS.index(rooms[0]):
            broken.append("the rooms of base/ import one way")
    if used == "engine.py" and name != BUILDS_THE_ENGINE:
        broken.append("an engine is imported by the file that builds a run")
    if imported == "run" and importer != "run" and name not in ENTRIES:
        broken.append("run/ is for the entries")
    if used in ENTRIES and (name, used) != ("replay.py", "grpo.py"):
        broken.append("only the replay imports an entry")
    return broken


def test_a_path_says_what_a_file_may_import():
    for name in PRODUCT:
        for used in IMPORTED[name]:
            assert wrong_imports(name, used) == [], (name, used)
        relative = [node for node in ast.walk(TREES[name]) if isinstance(node, ast.ImportFrom) and node.level]
        assert not relative or name.startswith("judges/"), "only judges/ has another name, in its workers"
        assert not {*OUTSIDE} & packages(TREES[name]), name
        assert "transformers" not in packages(TREES[name]) or name == "blocks.py", name
        assert "vllm" not in packages(TREES[name]) or name == "engine.py", name


@pytest.mark.parametrize(
    ("name", "used", "is_wrong"),
    [
        ("base/hf/weights.py", "model.py", True),
        ("base/plan/memory_plan.py", "kernels/sizes.py", False),
        ("base/inputs/reader.py", "run/folder.py", True),
        ("base/system/disk.py", "base/inputs/reader.py", True),
        ("base/inputs/reader.py", "base/system/disk.py", False),
        ("pack.py", "run/log.py", True),
        ("gap.py", "engine.py", True),
        ("run/build.py", "engine.py", False),
        ("eval.py", "run/validation.py", False),
        ("run/steps.py", "grpo.py", True),
        ("replay.py", "grpo.py", False),
        ("kernels/logp.py", "loss.py", True),
        ("judges/pool.py", "config.py", True),
    ],
)
def test_the_rules_see_a_wrong_import(name, used, is_wrong):
    assert bool(wrong_imports(name, used)) == is_wrong


def test_no_file_imports_in_a_circle():
    """A folder's `__init__` that gathers its files would be a circle for a file that imports one of them by name."""
    try:
        TopologicalSorter(IMPORTED).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_check_needs_no_torch():
    """`--check` answers before torch is loaded: no file of check/, nor what one imports, needs torch."""
    names = with_all_it_imports(name for name in PRODUCT if name.startswith("base/check/"))
    assert [name for name in names if {"torch", "triton", "vllm"} & packages(TREES[name])] == []


# ------------------------------------------------------------------------------- the walk of `train` through the core


CORE = {name: TREES[name] for name in PRODUCT if "/" not in name}


def annotated(scope):
    """Name -> the class of its annotation (Reference of `Reference | None`), of a function's arguments or of fields."""
    named = [(node.arg, node.annotation) for node in ast.walk(scope) if isinstance(node, ast.arg) and node.annotation]
    named += [(ast.unparse(n.target), n.annotation) for n in ast.walk(scope) if isinstance(n, ast.AnnAssign)]
    return {name: ast.unparse(annotation).strip("'").split(" | ")[0] for name, annotation in named}


def entries_of_train():
    """(file of the core, what is called): calls on the page of `train` and of the functions of grpo.py that it calls. A
    method is of the class that its object's annotation names."""
    page = {node.name: node for node in CORE["grpo.py"].body if isinstance(node, ast.FunctionDef)}
    functions, methods = {}, {}
    for file, tree in CORE.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                functions[node.name] = file
            if isinstance(node, ast.ClassDef):
                methods |= {(node.name, part.name): file for part in node.body if isinstance(part, ast.FunctionDef)}
    of_run = {}
    for node in TREES["run/job.py"].body:
        if isinstance(node, ast.ClassDef):
            of_run |= annotated(node)
    entries = []
    todo = ["train"]
    for function in todo:
        types = of_run | annotated(page[function])
        for called, _ in calls_of(page[function]):
            *objects, name = called.split(".")
            if called in page and called not in todo:
                todo.append(called)
            elif called in functions and called not in page:
                entries.append((functions[called], called))
            elif types.get(called) in functions:  # the model is called
                entries.append((functions[types[called]], f"{called}()"))
            elif objects:
                owner = types.get(objects[-1], objects[-1])
                homes = [file for (cls, method), file in methods.items() if (cls, method) == (owner, name)]
                if not homes and len(objects) > 1:  # of an attribute without an annotation: the method alone tells
                    homes = {file for (_, method), file in methods.items() if method == name}
                entries += [(file, called) for file in homes]
    return entries


def test_who_follows_a_step_enters_no_file_of_the_core_more_than_five_times():
    entries = entries_of_train()
    seen = {("gap.py", "judge_step"), ("model.py", "model()"), ("optim.py", "bonus.follow")}
    assert seen <= {*entries}, entries
    for file, count in Counter(file for file, _ in entries).items():
        assert count <= 5, [called for name, called in entries if name == file]


# ---------------------------------------------------------------------------------------------------------- safety


@cache
def calls_of(tree):
    """(dotted name, its call) of every call."""
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


UNSAFE = ("weights_only=False", "allow_pickle=True", "shell=True", "trust_remote_code=True")


def unsafe(tree):
    """What must not be: code or objects out of data, a shell, an except that catches without saying what."""
    found = sorted(packages(tree) & {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"})
    for called, node in calls_of(tree):
        if called in ("eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load"):
            found.append(called)
        for keyword in node.keywords:
            text = f"{keyword.arg}={ast.unparse(keyword.value)}"
            found += [text] if text in UNSAFE else []
    return found + ["except:" for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler) and n.type is None]


def test_nothing_unsafe():
    """One call of exec(), where the code of policies runs: in a throw-away process."""
    assert {name: found for name in FILES if (found := unsafe(TREES[name]))} == {"judges/sandbox.py": ["exec"]}


def test_sockets_are_local():
    """Nothing here binds or listens; the rendezvous of torch and vLLM get 127.0.0.1."""
    found = {}
    for name, tree in TREES.items():
        sockets = [node for called, node in calls_of(tree) if re.search(r"^(?!inspect).*\.(bind|listen)$", called)]
        bound = [ast.unparse(node) for node in sockets]
        found |= {name: bound} if bound else {}
    assert found == {}


def test_unsafe_sees_each_of_them():
    """The rule above would hold for ever if its search found nothing."""
    for line, count in {
        "import pickle": 1,
        "def f():\n    from dill import load": 1,
        "eval(x); exec(x)": 2,
        "model.eval()": 0,
        "yaml.load(f, Loader=yaml.SafeLoader)": 1,
        "yaml.safe_load(f)": 0,
        "torch.load(f, weights_only=False)": 1,
        "np.load(f, allow_pickle=True)": 1,
        "subprocess.run(x, shell=True)": 1,
        "try:\n    f()\nexcept:\n    pass": 1,
        "try:\n    f()\nexcept OSError:\n    pass": 0,
    }.items():
        assert len(unsafe(ast.parse(line))) == count, line
