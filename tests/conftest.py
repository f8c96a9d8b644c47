"""What all tests share: paths, the fast selection, one process group and one vLLM engine for the whole process.

`--fast` leaves out what is slow (the mark `slow`, and LAUNCHES) and puts a stand-in where vLLM would be imported.
With pytest-xdist (`-n 3 --dist loadfile`, as tests/run.sh has it) a file stays in one worker, and files that share an
expensive fixture (TOGETHER) stay together.
"""

import functools
import gc
import inspect
import linecache
import os
import re
import sys
from pathlib import Path

gc.disable()  # until all tests are collected: what is imported stays
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import pytest

# Not even imported: the real command; graders and hostile inputs, which wait for deadlines; whole examples; tools.
SLOW_FOLDERS = {ROOT / "tests" / name for name in ("command", "graders", "agents", "red_team", "examples", "tools")}
SLOW_FILE = re.compile(r"^pytestmark = \[?pytest\.mark\.slow\b", re.MULTILINE)
# By what it or one of its fixtures starts: ranks, or the real command.
LAUNCHES = re.compile(
    r"torch\.distributed\.run|mp\.spawn\(|_worker\.py|run_to_the_end\(|train\.sh|[@ ]ranks\(|ends_of\("
)
# Fixtures of the session that take long to make -> the files that use them: vLLM's engine.
TOGETHER = {
    "engine": (
        "core/test_engine.py",
        "core/test_families.py",
        "core/test_unfinished.py",
        "core/test_fast_run.py",
        "hf/test_adapter.py",
        "run/test_reward_model.py",
        "system/test_ranks.py",
    ),
    "served": ("agents/test_endpoint.py", "agents/test_rollouts.py"),
}
# Half a minute each: begun late, one of them would run alone at the end.
LONG_FILES = ("judges/tests/test_code.py", "examples/test_forks.py", "split/test_generators.py")
LONG_FILES += ("system/test_replicas.py", "command/test_nodes.py", "command/test_kill.py", "core/test_fast_run.py")
LONG_FILES += ("command/test_resumed_run.py", "command/test_numbers.py")

HAS_TESTS = "PYTEST_XDIST_WORKER" in os.environ or "-n" not in sys.argv  # xdist's controller needs no torch
if HAS_TESTS:
    import fake_vllm
    import torch

if HAS_TESTS and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: kernels run on CPU tensors
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast_of_the_interpreter = InterpreterBuilder.cast_impl

    def cast_as_gpus_do(self, src, dst_type):
        """The interpreter cuts a float32 off where a GPU rounds it to the nearest bfloat16."""
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return cast_of_the_interpreter(self, src, dst_type)
        return TensorHandle(torch.tensor(src.data).bfloat16().view(torch.uint16).numpy(), tl.bfloat16)

    InterpreterBuilder.cast_impl = cast_as_gpus_do


def pytest_addoption(parser):
    parser.addoption("--fast", action="store_true", help="seconds: no process is launched, vLLM is a stand-in")
    parser.addoption("--tiny", action="store_true", help="tests/gpu: tiny sizes, which a CPU can compute")


def pytest_configure(config):
    if config.getoption("--fast") and HAS_TESTS:
        fake_vllm.install()


def pytest_ignore_collect(collection_path, config):
    if not config.getoption("--fast"):
        return None
    is_slow_file = collection_path.suffix == ".py" and SLOW_FILE.search(collection_path.read_text())
    return True if is_slow_file or collection_path in SLOW_FOLDERS else None


def source_of(function) -> str:
    """As inspect.getsource, which takes a hundred times as long, but for lines at the end without code."""
    codes = [function.__code__]
    for code in codes:
        codes += [const for const in code.co_consts if inspect.iscode(const)]
    last = max(line for code in codes for *_, line in code.co_lines() if line)
    return "".join(linecache.getlines(codes[0].co_filename)[codes[0].co_firstlineno - 1 : last])


@functools.cache  # tests share fixtures, and a test's cases the function
def launches(function) -> bool:
    """Whether the function or a function of the tests that it calls, at any depth, starts a process."""
    todo, seen = [inspect.unwrap(function)], set()
    while todo:
        current = todo.pop()
        if LAUNCHES.search(source_of(current)):
            return True
        seen.add(current)
        named = [current.__globals__.get(name) for name in current.__code__.co_names]
        called = {inspect.unwrap(value) for value in named if inspect.isfunction(value)} - seen
        todo += [value for value in called if inspect.getsourcefile(value).startswith(f"{ROOT}/tests/")]
    return False


def is_slow(item) -> bool:
    """The mark may have a pattern for the ids of its cases: @pytest.mark.slow("triton")."""
    if item.path.is_relative_to(ROOT / "judges"):  # they wait for deadlines
        return True
    mark = item.get_closest_marker("slow")
    if mark and (not mark.args or re.search(mark.args[0], item.callspec.id)):
        return True
    fixtures = [found[-1].func for found in item._fixtureinfo.name2fixturedefs.values()]
    ours = [f for f in [item.function, *fixtures] if inspect.getsourcefile(f).startswith(str(ROOT))]
    return any(map(launches, ours))


def pytest_collection_modifyitems(config, items):
    if config.getoption("--fast"):
        slow = {item for item in items if is_slow(item)}
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    items.sort(key=lambda item: place_of(item.nodeid.split("::")[0]))


def place_of(file: str) -> int:
    """The longest parts first."""
    return 0 if scope_of(file) in TOGETHER else 1 if file.removeprefix("tests/") in LONG_FILES else 2


def scope_of(file: str) -> str:
    name = file.removeprefix("tests/")
    return next((fixture for fixture, files in TOGETHER.items() if name in files), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file stays in one worker, and so do files that share an expensive fixture."""
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return scope_of(super()._split_scope(nodeid))

    return Together(config, log)


def pytest_collection_finish(session):
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # looking for garbage among what tests import later takes a tenth of their time
    gc.enable()


@pytest.fixture(scope="session")
def one_rank():
    """The process group of a lone rank, and its mesh: (ranks, device, mesh)."""
    import torch.distributed as dist

    from base.system.ranks import start_process_group

    ranks, device = start_process_group(tp_size=1)
    return ranks, device, dist.init_device_mesh(device.type, (1,))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """(folder, transformers' model) of a tiny tied Qwen3 whose vocabulary is padded by 37 random rows."""
    from tiny import make_tiny

    folder = tmp_path_factory.mktemp("tiny")
    return folder, make_tiny(folder)


@pytest.fixture(scope="session")
def engine(one_rank, tiny):
    """The session's vLLM engine over `tiny`, without weights: tests call sync first."""
    import config
    from base.hf.folder import read_model_config
    from base.hf.tokenizer import Tokenizer
    from engine import VLLMEngine

    # 256: more than a block of the prefix cache
    policy = config.PolicyConfig(precision="float32", max_total_sequence_length=256)
    grpo = config.GRPOConfig(async_grpo=config.AsyncGRPOConfig(enabled=True))  # more than without it, which is the same
    return VLLMEngine(tiny[0], read_model_config(tiny[0]), Tokenizer(tiny[0]), config.Config(policy=policy, grpo=grpo))


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a yaml file into the test's working directory, so that messages name the file as a user would."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "run.yaml") -> str:
        path = Path(name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return name

    return write
