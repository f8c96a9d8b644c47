"""Has vLLM on a CPU take the path that it takes on a GPU: its V2 model runner and its asynchronous scheduler.

Python imports this file at the start of each process whose PYTHONPATH has this folder. It does nothing unless
VLLM_USE_V2_MODEL_RUNNER is set: to 1, or to 0 for the asynchronous scheduler with the runner of a CPU.

    VLLM_USE_V2_MODEL_RUNNER=1 PYTHONPATH=tests/helpers ./train.sh configs/smoke.yaml grpo.max_num_steps=2

V2's kernels run in Triton's interpreter, about 50 ms for each token.
"""

import os
import sys


class BeforeVllm:
    """Looks on as modules are imported, and acts before vLLM looks for Triton's backends."""

    def find_spec(self, name, path=None, target=None):
        if name == "vllm.triton_utils":
            sys.meta_path.remove(self)
            name_a_backend()
            count_in_scalars()
            schedule_asynchronously()


def name_a_backend() -> None:
    """vLLM on a CPU takes Triton only if there is a backend of this name. The interpreter needs none."""
    from triton.backends import Backend, backends
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.backends.nvidia.driver import CudaDriver

    backends["cpu"] = Backend(CUDABackend, CudaDriver)


def count_in_scalars() -> None:
    """tl.range gives Python's integers in the interpreter. vLLM's top-p kernel calls `.to` of them."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_core

    def patch_with_range(lang, scope) -> None:
        patch(lang, scope)
        numbers = lang.range
        scope.set_attr(lang, "range", lambda *args, **words: map(interpreter._implicit_cvt, numbers(*args, **words)))

    interpreter._patch_lang_core = patch_with_range


def schedule_asynchronously() -> None:
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config

    def update_all_else(config) -> None:
        asked = config.scheduler_config.async_scheduling
        update(config)
        config.scheduler_config.async_scheduling = asked

    CpuPlatform.check_and_update_config = staticmethod(update_all_else)


if "VLLM_USE_V2_MODEL_RUNNER" in os.environ:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    sys.meta_path.insert(0, BeforeVllm())
