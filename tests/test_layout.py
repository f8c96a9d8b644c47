"""The rules of the house that a reader relies on: rooms and what they import, sizes, a test beside each file, nothing
that runs a stranger's code."""

import ast
import re
import subprocess
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
import layout_table
from layout_table import ROOMS

# A unit (a file on top, or a room) imports units of its own level and of those before it, and never in a circle.
LEVELS = (
    ("config",),
    ("kernels", "system", "hf", "data"),
    ("envs", "dataset"),
    ("graders", "advantages", "loss", "optim", "lora"),
    ("model", "engine", "batch", "check"),
    ("metrics", "loss_path", "rollout"),
    ("run",),
    ("eval",),
    ("grpo",),
)
LEVEL_OF = {unit: number for number, level in enumerate(LEVELS) for unit in level}
TORCH_FREE = re.compile(
    r"(config|data|envs)\.py|hf/(?!weights).*|dataset/.*|graders/.*|system/(exits|imports|progress)\.py"
    r"|check/.*|run/(__init__|health)\.py"
)
MAX_CORE_LINES, MAX_PRODUCT_LINES, MAX_FILES_ON_TOP = 4600, 14680, 15  # docs/LOG.md, 2026-11-22: what was tried
MAX_FILE_LINES, MAX_CONFIG_LINES, MAX_FUNCTION_LINES = 400, 604, 60  # config.py is a table: some lines for each key

NAMES = layout_table.product_files()
SCRIPTS = layout_table.of_the_house(
    path for folder in ("examples", "bench", "tools") for path in ROOT.glob(f"{folder}/**/*.py")
)
TREES = {name: ast.parse((ROOT / name).read_text(encoding="utf-8")) for name in NAMES + SCRIPTS}
FILE_OF = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in NAMES}


def unit_of(name):
    return name.split("/")[0].removesuffix(".py")


def imports(tree):
    """Dotted names of all imports, those inside functions too; of `from a import b` both a and a.b."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def packages(tree):
    return {name.split(".")[0] for name in imports(tree)}


IMPORTED = {name: {FILE_OF[used] for used in imports(TREES[name]) if used in FILE_OF} - {name} for name in NAMES}


# --------------------------------------------------------------------------------------------------------- imports


def test_every_room_has_its_level():
    assert {unit_of(name) for name in NAMES} <= LEVEL_OF.keys(), "a new file or room: say in LEVELS where it stands"
    folders = {name.split("/")[0] for name in layout_table.of_the_house(ROOT.glob("[a-z]*/*.py"))}
    assert folders - {"tests", "bench", "examples", "tools"} == set(ROOMS), (
        "a folder with code: say in tests/layout_table.py that it is a room"
    )
    assert len(NAMES) >= 30


@pytest.mark.parametrize("name", NAMES)
def test_imports_go_one_way(name):
    later = [used for used in IMPORTED[name] if LEVEL_OF.get(unit_of(used), 0) > LEVEL_OF.get(unit_of(name), 99)]
    assert later == []
    assert not {"tests", "examples", "bench", "tools", "transformers"} & packages(TREES[name])
    assert "vllm" not in packages(TREES[name]) or name == "engine.py"
    if name.startswith("kernels/"):
        assert all(used.startswith("kernels/") for used in IMPORTED[name]), "kernels know tensors and callables"


def test_no_file_imports_in_a_circle():
    """A room's `__init__` that gathers its files would be a circle for who imports the room's files only by name."""
    try:
        TopologicalSorter(IMPORTED).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize("name", [name for name in NAMES if TORCH_FREE.fullmatch(name)])
def test_without_torch(name):
    """`--check` answers before torch is loaded: neither the file nor what it imports of ours needs it."""
    assert "torch" not in packages(TREES[name])
    assert [used for used in IMPORTED[name] if not TORCH_FREE.fullmatch(used)] == []


# ----------------------------------------------------------------------------------------------------------- sizes


def lines_of(name):
    return len((ROOT / name).read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("name", NAMES)
def test_sizes(name):
    assert lines_of(name) <= (MAX_CONFIG_LINES if name == "config.py" else MAX_FILE_LINES)
    functions = [node for node in ast.walk(TREES[name]) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    sizes = {node.name: node.end_lineno - node.lineno + 1 for node in functions}
    assert {function: size for function, size in sizes.items() if size > MAX_FUNCTION_LINES} == {}


def test_size_of_the_core_and_of_the_product():
    core = [name for name in NAMES if "/" not in name or name.startswith("kernels/")]
    shell = layout_table.of_the_house(ROOT.glob("*.sh"))
    assert len([name for name in core if "/" not in name]) <= MAX_FILES_ON_TOP
    assert sum(map(lines_of, core)) <= MAX_CORE_LINES
    assert sum(map(lines_of, NAMES + shell)) <= MAX_PRODUCT_LINES


def packed(tree):
    """Lines that hold more than their statement: what a line budget tempts to."""
    found = []
    for node in ast.walk(tree):
        for block in (getattr(node, field, None) for field in ("body", "orelse", "finalbody")):
            if not isinstance(block, list):  # a lambda's body, an expression's else
                continue
            found += [f"line {b.lineno}: two statements" for a, b in pairwise(block) if b.lineno <= a.end_lineno]
            if hasattr(node, "lineno") and isinstance(node, ast.stmt) and block and block[0].lineno == node.lineno:
                found.append(f"line {node.lineno}: a block on the line that opens it")
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            width = len(node.value.elts)
            if width > 2 and any(isinstance(t, ast.Tuple) and len(t.elts) == width for t in node.targets):
                found.append(f"line {node.lineno}: {width} assignments in one")
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List):
            found.append(f"line {node.lineno}: a list packed into a list")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_no_line_is_packed(name):
    assert packed(TREES[name]) == []


def test_packed_sees_each_of_them():
    for code, count in {
        "a, b = 1, 2": 0,
        "a, b, c = 1, 2, 3": 1,
        "a, b, c = f()": 0,
        "a = 1; b = 2": 1,
        "if a: b = 1": 1,
        "if a:\n    b = 1\nelse: b = 2": 0,  # ruff's E701 sees it
        "for a in b: f()": 1,
        "x = [*('a', 'b'), *y]": 1,
        "x = [*f(), *y]": 0,
        "x = lambda: 1": 0,
    }.items():
        assert len(packed(ast.parse(code))) == count, code


@pytest.mark.parametrize("name", NAMES)
def test_file_says_its_job(name):
    docstring = ast.get_docstring(TREES[name])
    assert docstring and len(docstring.splitlines()[0]) >= 20


# ------------------------------------------------------------------------------------------------- tests and pages


def test_every_file_has_a_test_beside_it():
    """Or an entry of tests/layout_table.py that says which test holds it and why there."""
    assert layout_table.problems() == []


def test_a_file_of_the_user_is_not_held_to_the_house(tmp_path):
    files = [tmp_path / "theirs.py", tmp_path / "ours.py"]
    for file in files:
        file.touch()
    assert layout_table.of_the_house(files, tmp_path) == ["ours.py", "theirs.py"]  # no repository: all
    layout_table.tracked.cache_clear()
    for command in (["init", "-q"], ["add", "ours.py"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert layout_table.of_the_house(files, tmp_path) == ["ours.py"]


def test_the_table_of_tests_is_what_the_mirror_says():
    readme = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    assert layout_table.filled_in(readme) == readme, "run `python tests/layout_table.py`"


def test_readme_names_every_room_and_every_file_on_top():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    names = {f"{name.split('/')[0]}/" if "/" in name else name for name in NAMES}
    assert [name for name in sorted(names) if not re.search(rf"(?<![\w/]){re.escape(name)}", readme)] == []


# ---------------------------------------------------------------------------------------------------------- safety


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


@pytest.mark.parametrize("name", NAMES + SCRIPTS)
def test_nothing_unsafe(name):
    """One call of exec(), where the code of policies runs: in a throw-away process."""
    assert unsafe(TREES[name]) == (["exec"] if name == "graders/sandbox.py" else [])


def test_sockets_are_local():
    """Who binds or listens; torch's and vLLM's rendezvous are given 127.0.0.1 (system/ranks.py, engine.py)."""
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
