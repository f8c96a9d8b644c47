"""Kernels that a pack launches, counted by dispatch on a CPU: forward and backward, and scoring; and FSDP's part.

    python -m bench.launches

Blocks of Qwen2.5-1.5B's number and form with small matrices, bfloat16, one rank, eager. Each operation that computes
counts as a launch; views do not. FSDP's part is what the model launches beyond a model without FSDP. As a run has it
now, and as it was until 2026-11-28 (`train_step.set_way`); of several packs, each one's mean.
"""

import json
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from attention import PackLayout
from base.hf.folder import from_hf
from base.system.ranks import start_process_group
from bench.train_step import QWEN, random_policy, set_way
from head import HeadOptions, response_logps
from model import Decoder

SIZES = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 6, "num_key_value_heads": 1}
SMALL = QWEN | SIZES | {"vocab_size": 512, "head_dim": 8}
NUM_PACKS = 4


class Launches(TorchDispatchMode):
    """Counts the operations that compute."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        is_free = function.is_view or name.startswith(("profiler::", "aten::empty", "aten::detach"))
        self.count += not is_free
        return function(*args, **kwargs or {})


def num_launches(run: Callable[[], None]) -> float:
    """For each pack."""
    run()
    with Launches() as launches:
        run()
    return launches.count / NUM_PACKS


def pack(device: torch.device) -> tuple:
    """(the model's inputs, targets) of one sequence."""
    token_T = torch.arange(33, device=device)
    layout = PackLayout.of(np.array([0, 32]), None, 32, device)
    position_T = token_T[:-1]
    return (token_T[:-1], position_T, layout, position_T), token_T[1:]


def train(model: Decoder, is_sharded: bool, device: torch.device) -> None:
    inputs, target_R = pack(device)
    for number in range(1, NUM_PACKS + 1):
        logp_R, _ = response_logps(model, inputs, target_R, HeadOptions())
        if is_sharded:
            model.backward(logp_R.sum(), is_last=number == NUM_PACKS)
        else:
            logp_R.sum().backward()
    model.zero_grad(set_to_none=True)


@torch.no_grad()
def score(model: Decoder, device: torch.device) -> None:
    inputs, target_R = pack(device)
    with model.gathered_once():
        for _ in range(NUM_PACKS):
            response_logps(model, inputs, target_R, HeadOptions())


def main() -> None:
    _, device = start_process_group(tp_size=1)
    plain = Decoder(from_hf(SMALL)).to(device, torch.bfloat16)
    model = random_policy(SMALL, device, "bfloat16")
    of_plain = {
        "forward and backward": num_launches(lambda: train(plain, False, device)),
        "scoring": num_launches(lambda: score(plain, device)),
    }
    for as_before in (True, False):
        set_way(model, as_before)
        line = {"way": "before" if as_before else "now"}
        line["forward and backward"] = num_launches(lambda: train(model, True, device))
        line["scoring"] = num_launches(lambda: score(model, device))
        for name, count in of_plain.items():
            line[f"{name}, of these FSDP"] = line[name] - count
        print(json.dumps(line), flush=True)
    print(json.dumps({"way": "a model without FSDP"} | of_plain))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
