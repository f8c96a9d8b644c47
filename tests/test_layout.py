"""What a reader of the code relies on: imports run one way, --check needs no torch, nothing runs what data holds.

No size is held here: a fork may be as large as it likes.
"""

import ast
import re
import subprocess
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.house

ROOT = Path(__file__).resolve().parent.parent

# A unit (a file on top, a folder, or a room of support/) imports units of its own level and of the levels before it;
# files never import each other in a circle.
LEVELS = (
    ("config",),
    ("support/__init__", "kernels", "judges", "support/system", "records"),
    ("envs", "advantages", "loss", "head", "attention"),
    ("support/graders", "support/agents", "support/hf", "support/inputs", "lora", "pack"),
    ("support/check",),
    ("model", "engine"),
    ("metrics", "rollout"),
    ("gap", "ahead"),
    ("optim",),
    ("support/run", "support/split"),
    ("eval",),
    ("grpo",),
    ("replay",),
)
LEVEL_OF = {unit: number for number, level in enumerate(LEVELS) for unit in level}
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


def unit_of(name):
    parts = name.removesuffix(".py").split("/")
    return "/".join(parts[:2]) if parts[0] == "support" else parts[0]


def imports(tree):
    """Dotted names of all imports, those inside functions too; of `from a import b` both a and a.b. Only judges/ has
    relative imports (`test_imports_go_one_way`)."""
    names = set()
    for node in ast.walk(tree):
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


def test_every_unit_has_its_level():
    assert {unit_of(name) for name in PRODUCT} == LEVEL_OF.keys(), "a new file or folder: say in LEVELS where it stands"


def test_imports_go_one_way():
    for name in PRODUCT:
        relative = [node for node in ast.walk(TREES[name]) if isinstance(node, ast.ImportFrom) and node.level]
        assert not relative or name.startswith("judges/"), "only judges/ has another name, in its workers"
        later = [used for used in IMPORTED[name] if LEVEL_OF.get(unit_of(used), 0) > LEVEL_OF.get(unit_of(name), 99)]
        assert later == [], name
        assert not {*OUTSIDE} & packages(TREES[name]), name
        assert "transformers" not in packages(TREES[name]) or name == "support/hf/blocks.py", name
        assert "vllm" not in packages(TREES[name]) or name == "engine.py", name
        if name.startswith(("kernels/", "judges/")):
            folder = name.split("/")[0]
            assert all(used.startswith(f"{folder}/") for used in IMPORTED[name]), f"{folder}/ imports only itself"


def test_no_file_imports_in_a_circle():
    """A folder's `__init__` that gathers its files would be a circle for a file that imports one of them by name."""
    try:
        TopologicalSorter(IMPORTED).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_check_needs_no_torch():
    """`--check` answers before torch is loaded: no file of inputs or check, nor what one imports, needs torch."""
    names = with_all_it_imports(name for name in PRODUCT if name.startswith(("support/check/", "support/inputs/")))
    assert [name for name in names if {"torch", "triton", "vllm"} & packages(TREES[name])] == []


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
