"""When the segments of torch's memory on a GPU grow: not while vLLM makes its memory pools, and from then on."""

import os

import torch

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads the first that is set


def take_out_expandable_segments() -> str:
    """Before CUDA starts: the environment variables that had torch's segments grow, which they no longer do."""
    taken = []
    for name in ALLOCATOR_VARIABLES:
        given = os.environ.get(name, "")
        options = given.split(",")
        kept = [option for option in options if option.replace(" ", "") != "expandable_segments:True"]
        if kept == options:
            continue
        taken.append(f"{name}={given}")
        if kept:
            os.environ[name] = ",".join(kept)
        else:
            del os.environ[name]
    return " ".join(taken)


def expand_segments() -> None:
    """From now on torch's segments grow, so that what is freed of one size serves another. Only while vLLM's memory
    pools are complete: with the option on, what they allocate cannot sleep (pytorch/pytorch#147851)."""
    given = ""
    for name in ALLOCATOR_VARIABLES:
        given = given or os.environ.get(name, "")
    is_set_by_user = "expandable_segments" in given
    if is_set_by_user:
        return
    torch.cuda.empty_cache()
    options = "expandable_segments:True"
    if given:
        options = f"{given},{options}"  # an option that is left out is reset
    torch._C._accelerator_setAllocatorSettings(options)
