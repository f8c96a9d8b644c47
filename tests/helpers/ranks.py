"""Functions of a test file that run as the ranks of a job.

    @ranks(2)
    def sum_of_ranks(factor):
        ranks, _ = start_process_group(tp_size=1)
        return factor * sum(gather(ranks.rank))

    def test_the_ranks_add_up():
        assert sum_of_ranks(3) == [3, 3]          # what each rank returned, by rank

Each rank is a new process with torchrun's environment, the test's directory and a rendezvous of its own, so tests may
run beside each other. Arguments and results are pickled; the function stands at the top level of a test file or of a
helper. A test itself can be decorated if its fixtures' values can be pickled (tmp_path, not monkeypatch). A rank that
raises, dies or is late fails the test, with the output of every rank. `ends_of(function, size, *args)` returns an End
for each rank instead, for tests of ranks that die. Mark the tests `slow`.

`stand_in=True` puts helpers/fake_vllm.py in vLLM's place before the function's file is imported. `with_vllm=True` forks
the rank from a process that has imported vLLM, and has made no LLM and no thread (warm_engine.py): the five processor
seconds of that import are paid once. The function's file imports engine.py at its top, which sets what vLLM reads.
"""

import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from multiprocessing import context, forkserver, popen_forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")  # imports torch once; each rank is forked from it
LIBRARIES = ["torch.distributed.fsdp", "torch.nn.attention.varlen", "triton", "safetensors.torch", "numpy"]
LIBRARIES += ["huggingface_hub", "tokenizers", "jinja2.sandbox", "tensorboard.summary.writer.record_writer", "yaml"]
CONTEXT.set_forkserver_preload(LIBRARIES)

HELPERS = Path(__file__).resolve().parent
WITH_VLLM = forkserver.ForkServer()
WITH_VLLM.set_forkserver_preload(["warm_engine"])


class PopenWithVllm(popen_forkserver.Popen):
    """Forked by WITH_VLLM instead of the one server that multiprocessing knows."""

    def _launch(self, process):
        paths = {"PYTHONPATH": f"{HELPERS.parents[1]}{os.pathsep}{HELPERS}"}
        with mock.patch.dict(os.environ, paths):
            WITH_VLLM.ensure_running()
        with mock.patch.object(forkserver, "connect_to_new_process", WITH_VLLM.connect_to_new_process):
            super()._launch(process)


class ProcessWithVllm(context.ForkServerProcess):
    @staticmethod
    def _Popen(process):
        return PopenWithVllm(process)


STARTED = b"started"
STARTS_WITHIN = 300  # seconds: imports are slow on a busy machine, and the deadline of a test is not about them


class End(NamedTuple):
    code: int  # exit code; 0 too of a rank that returned; -9 of one that was killed, by the deadline for example
    value: Any  # what it returned
    output: str


def ranks(size: int, seconds: float = 120, stand_in: bool = False, with_vllm: bool = False):
    def decorate(function):
        @functools.wraps(function)
        def launch(*args, **kwargs):
            ends = ends_of(function, size, *args, seconds=seconds, stand_in=stand_in, with_vllm=with_vllm, **kwargs)
            said = "\n".join(f"--- rank {rank}: {end.code}\n{end.output[-4000:]}" for rank, end in enumerate(ends))
            assert not any(end.code for end in ends), said
            return None if function.__name__.startswith("test_") else [end.value for end in ends]

        return launch

    return decorate


def ends_of(
    function, size: int, *args, seconds: float = 120, stand_in: bool = False, with_vllm: bool = False, **kwargs
) -> list[End]:
    """One End for each rank. The others have 10 seconds left once a rank fails."""
    call = pickle.dumps((args, kwargs))
    Process = ProcessWithVllm if with_vllm else CONTEXT.Process
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # no port that another test may take
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    place |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    values: list = [None] * size
    returned = set()
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(rank) for rank in range(size)]
        processes, pipes = [], []
        for rank, output in enumerate(outputs):
            environ = {**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ours, theirs = CONTEXT.Pipe()
            given = (theirs, environ, str(output), function.__module__, function.__qualname__, call, stand_in, seconds)
            processes.append(Process(target=_rank, args=given, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        deadline = time.monotonic() + STARTS_WITHIN
        running = set(range(size))
        while running and (left := deadline - time.monotonic()) > 0:
            ready = wait([pipes[rank] for rank in running], left)
            for rank in [rank for rank in running if pipes[rank] in ready]:
                try:
                    message = pipes[rank].recv_bytes()
                except EOFError:  # it ended without a result
                    running.discard(rank)
                    processes[rank].join()
                    if processes[rank].exitcode:
                        deadline = min(deadline, time.monotonic() + 10)
                    continue
                if message == STARTED:
                    deadline = time.monotonic() + seconds
                else:
                    running.discard(rank)
                    returned.add(rank)
                    values[rank] = pickle.loads(message)
        for process, pipe in zip(processes, pipes, strict=True):
            process.kill()  # those that returned wait for this, with their connections open
            process.join()
            pipe.close()
        texts = [output.read_text(errors="replace") if output.exists() else "" for output in outputs]
    codes = [0 if rank in returned else process.exitcode for rank, process in enumerate(processes)]
    return [End(*end) for end in zip(codes, values, texts, strict=True)]


def _rank(pipe, environ, output, module, name, call, stand_in, seconds) -> None:
    with open(output, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(environ)  # before anything of ours is imported
    gc.set_threshold(50_000, 20, 20)
    code = 1
    try:
        if stand_in:
            import fake_vllm

            fake_vllm.install()
        function = getattr(importlib.import_module(module), name)
        args, kwargs = pickle.loads(call)
        pipe.send_bytes(STARTED)
        faulthandler.dump_traceback_later(0.9 * seconds)
        value = pickle.dumps(getattr(function, "__wrapped__", function)(*args, **kwargs))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    if code == 0:
        pipe.send_bytes(value)
        wait([pipe])  # until the test ends this process: other ranks may still read from it
    os._exit(code)
