"""Fixtures several test files share: one process group and one vLLM engine for the whole pytest process."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import pytest
import torch

from system.ranks import start_process_group

if not torch.cuda.is_available():
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


@pytest.fixture(scope="session")
def one_rank():
    """The process group of a lone rank, and its mesh: (ranks, device, mesh)."""
    import torch.distributed as dist

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
    from hf.tokenizer import Tokenizer
    from rollout import Engine

    return Engine(
        str(tiny[0]),
        Tokenizer(tiny[0]),
        config.GenerationConfig(),
        dtype="float32",
        tied_head=True,
        max_total_tokens=256,  # more than a block of the prefix cache
        seed=0,
    )


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory):
    """The folder of 6 steps of the real command without a break, with a checkpoint of each."""
    from run_life import run_to_the_end

    every = ("checkpointing.save_period=1", "checkpointing.keep_latest=6")
    return run_to_the_end(tmp_path_factory.mktemp("unbroken"), 6, *every)
