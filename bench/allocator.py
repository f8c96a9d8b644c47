"""What torch's caching allocator reserves for training steps, without a GPU: sizes recorded, and replayed.

    python -m bench.allocator [--layers 28] [--steps 20]        minutes; Qwen2.5-1.5B's form, one rank, any packs

The sizes are those of the tensors of this program on the device `meta`, as tests/helpers/count_memory.py has them. The
allocator is a copy of c10/cuda/CUDACachingAllocator.cpp as far as it decides what is reserved: sizes rounded to 512
bytes, pools of small (up to 1 MiB) and large blocks, the best fit, segments of 2, 20 or whole MiB, splits, merges, and
expandable segments, which map pages of 2 or 20 MiB. It has one stream, and never too little memory.
"""

import argparse
import bisect
import sys
import weakref
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

import grpo
from attention import PackLayout
from config import SequencePackingConfig
from kernels import KernelBackend, LossPath
from model import Decoder, shard
from optim import build_optimizer
from support.check.memory_plan import CONTEXT, GIB, Plan

MIB = 2**20
SMALL, LARGE = MIB, 10 * MIB  # the largest small block; the smallest that gets a segment of its own
QWEN = {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
QWEN |= {"head_dim": 128, "vocab_size": 151936}


class Block:
    """A piece of a segment. state: "used", "free", or of an expandable segment "unmapped"."""

    def __init__(self, start: int, size: int, state: str = "free"):
        self.start, self.size, self.state = start, size, state
        self.before: Block | None = None
        self.after: Block | None = None


class Allocator:
    """allocated, reserved: bytes now; largest: of each."""

    def __init__(self, expandable: bool = False):
        self.expandable = expandable
        self.free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}  # by size, then address; of small?
        self.used: dict[int, tuple[Block, bool]] = {}
        self.segments: dict[bool, Block] = {}  # the first block of an expandable one
        self.address = self.allocated = self.reserved = 0
        self.largest = {"allocated": 0, "reserved": 0}

    def allocate(self, key: int, size: int) -> None:
        size = max(512, -(-size // 512) * 512)
        small = size <= SMALL
        free = self.free[small]
        at = bisect.bisect_left(free, (size,))
        if at < len(free):
            block = free.pop(at)[2]
        else:
            block = self._expand(size, small) if self.expandable else self._segment(size)
        rest, block.state = block.size - size, "used"
        if rest >= (512 if small or self.expandable else SMALL + 1):
            self._insert(Block(block.start + size, rest), block, small)
            block.size = size
        self.used[key] = block, small
        self.allocated += block.size
        self.largest["allocated"] = max(self.largest["allocated"], self.allocated)
        self.largest["reserved"] = max(self.largest["reserved"], self.reserved)

    def release(self, key: int) -> None:
        block, small = self.used.pop(key)
        self.allocated -= block.size
        self._merge(block, small)

    def empty_cache(self) -> None:
        """Gives back whole segments, or whole pages of expandable ones."""
        for small, free in self.free.items():
            page = 2 * MIB if small else 20 * MIB
            for entry in list(free):
                block = entry[2]
                if not self.expandable:
                    if block.before is block.after is None:
                        free.remove(entry)
                        self.reserved -= block.size
                    continue
                first, last = -(-block.start // page) * page, (block.start + block.size) // page * page
                if first < last:
                    free.remove(entry)
                    end, after = block.start + block.size, block
                    if first > block.start:
                        block.size = first - block.start
                        bisect.insort(free, (block.size, block.start, block))
                        after = self._link(Block(first, last - first, "unmapped"), block)
                    else:
                        block.size, block.state = last - first, "unmapped"
                    if end > last:
                        self._insert(Block(last, end - last), after, small)
                    self.reserved -= last - first
            self._join_unmapped(small)

    def _segment(self, size: int) -> Block:
        whole = 2 * MIB if size <= SMALL else 20 * MIB if size < LARGE else -(-size // (2 * MIB)) * 2 * MIB
        self.reserved += whole
        self.address += whole
        return Block(self.address - whole, whole)

    def _expand(self, size: int, small: bool) -> Block:
        """Maps pages at the lowest address that has room, beginning with the free block before it."""
        page = 2 * MIB if small else 20 * MIB
        block = self.segments.setdefault(small, Block(0, 1 << 50, "unmapped"))
        while True:
            first, room, end = block, 0, block
            while end and end.state != "used" and room < size:
                room, end = room + end.size, end.after
            if room >= size and (block.state == "unmapped" or block.after.state == "unmapped"):
                break
            block = block.after
        while first.size < size or first.state == "unmapped":
            hole = first if first.state == "unmapped" else first.after
            if hole.state == "unmapped":
                wanted = size - (first.size if hole is not first else 0)
                mapped = min(hole.size, -(-wanted // page) * page)
                if mapped < hole.size:
                    self._link(Block(hole.start + mapped, hole.size - mapped, "unmapped"), hole)
                hole.size, hole.state = mapped, "free"
                self.reserved += mapped
            else:
                self.free[small].remove((hole.size, hole.start, hole))
            if hole is not first:
                if (first.size, first.start, first) in self.free[small]:
                    self.free[small].remove((first.size, first.start, first))
                first.size += hole.size
                self._unlink(hole)
        return first

    def _merge(self, block: Block, small: bool) -> None:
        block.state = "free"
        for other in (block.before, block.after):
            if other and other.state == "free":
                self.free[small].remove((other.size, other.start, other))
                lower, upper = sorted((block, other), key=lambda each: each.start)
                lower.size += upper.size
                self._unlink(upper)
                block = lower
        bisect.insort(self.free[small], (block.size, block.start, block))

    def _insert(self, block: Block, before: Block, small: bool) -> None:
        self._merge(self._link(block, before), small)

    def _join_unmapped(self, small: bool) -> None:
        block = self.segments.get(small)
        while block and block.after:
            if block.state == block.after.state == "unmapped":
                block.size += block.after.size
                self._unlink(block.after)
            else:
                block = block.after

    @staticmethod
    def _link(block: Block, before: Block) -> Block:
        block.before, block.after, before.after = before, before.after, block
        if block.after:
            block.after.before = block
        return block

    @staticmethod
    def _unlink(block: Block) -> None:
        block.before.after = block.after
        if block.after:
            block.after.before = block.before


class Events(TorchDispatchMode):
    """What operations on meta tensors allocate and free, in order: (key, bytes), and (key, 0) for a free; FSDP resizes
    storages. Marks are texts."""

    def __init__(self):
        super().__init__()
        self.events: list = []
        self.keys: dict[int, int] = {}  # address of a storage -> key
        self.num_keys = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        result = function(*args, **kwargs or {})
        if not function.is_view:
            for x in tree_leaves(result):
                if isinstance(x, torch.Tensor) and x.device.type == "meta":
                    self.see(x.untyped_storage())
        return result

    def see(self, storage) -> None:
        if storage._cdata not in self.keys:
            weakref.finalize(storage, self.gone, storage._cdata)
            self.add(storage._cdata, storage.nbytes())

    def add(self, address: int, size: int) -> None:
        self.keys[address], self.num_keys = self.num_keys, self.num_keys + 1
        if size:
            self.events.append((self.keys[address], size))
        else:
            self.keys[address] = -1

    def gone(self, address: int) -> None:
        if (key := self.keys.pop(address)) >= 0:
            self.events.append((key, 0))

    @contextmanager
    def resized(self):
        """FSDP allocates and frees what it gathers by the sizes of storages."""

        def alloc(tensor):
            storage = tensor.untyped_storage()
            if storage.size() == 0:
                storage.resize_(tensor.numel() * tensor.itemsize)
                self.see(storage)
                if self.keys[storage._cdata] < 0:
                    self.add(storage._cdata, storage.nbytes())

        def free(tensor):
            storage = tensor.untyped_storage()
            if storage.size():
                storage.resize_(0)
                if self.keys.get(storage._cdata, -1) >= 0:
                    self.events.append((self.keys[storage._cdata], 0))
                self.keys[storage._cdata] = -1

        with (
            mock.patch.object(_fsdp_param, "alloc_storage", alloc),
            mock.patch.object(_fsdp_param, "free_storage", free),
        ):
            yield


def micro_of(num_tokens: int, num_rows: int, vocab: int) -> SimpleNamespace:
    """A pack of sequences of up to 1,024 tokens, of which so many are rows of the head."""
    row_T, x_R = torch.arange(num_tokens, device="meta"), torch.empty(num_rows, device="meta")
    row_R = row_T[:num_rows]
    ends = np.array([*range(0, num_tokens, 1024), num_tokens])
    layout = PackLayout.of(ends, None, num_tokens, torch.device("meta"))
    inputs = (row_T % vocab, row_T % 1024, layout, row_R, row_R % vocab)
    rows = {name: x_R for name in ("sampler_logp_R", "adv_R", "reward_R")} | {"old_logp_R": None, "ref_logp_R": None}
    return SimpleNamespace(model_inputs=inputs, **rows, mask_R=row_R >= 0, seq_R=row_R // 1024, num_grad_rows=num_rows)


def record(num_layers: int, num_steps: int, tokens: int, pack_rows: int, mesh) -> tuple[list, Plan]:
    """The events of steps of two packs each, and the plan of packs of `tokens`, the most that a pack has."""
    from count_memory import meta_gpu, model_config, run_config

    cfg = run_config(recompute=False, compile=False, sequence_packing=SequencePackingConfig(train_mb_tokens=tokens))
    model_cfg = model_config("qwen2", True, **QWEN, num_hidden_layers=num_layers)
    random, events = np.random.default_rng(0), Events()
    with meta_gpu():
        with torch.device("meta"):
            model = Decoder(model_cfg)
        shard(model, mesh, precision=cfg.policy.precision)
        model.to_empty(device="meta")
        model.backend, model.loss_path = KernelBackend("triton", None, pack_rows), LossPath("one pass")
        optimizer = build_optimizer(model, cfg.policy.optimizer)
        with events, events.resized():
            for param in model.parameters():
                events.see(param.to_local().untyped_storage())
            for _ in range(num_steps):
                for is_last in (False, True):
                    num_tokens = int(random.integers(tokens * 3 // 4, tokens + 1))
                    num_rows = int(num_tokens * random.uniform(0.6, 1))
                    micro = micro_of(num_tokens, num_rows, QWEN["vocab_size"])
                    counts = SimpleNamespace(num_tokens=9, num_seqs=9, num_positive_tokens=9, version=0)
                    loss, _ = grpo.compute_loss(model, micro, counts, cfg)
                    model.backward(loss, is_last=is_last)
                    del loss, micro
                events.events.append("step")
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                events.events.append("wake")
    return events.events, Plan(cfg, model_cfg, QWEN["vocab_size"], 1)


def replay(events: list, *, expandable: bool = False, clean: bool = False) -> tuple[Allocator, list[int]]:
    """The allocator after the events, and what is reserved but not allocated at each wake of the engine. clean: the
    cache is emptied before the first optimizer step."""
    allocator, unused = Allocator(expandable), []
    for event in events:
        if event == "step":
            if clean and not unused:
                allocator.empty_cache()
        elif event == "wake":
            allocator.empty_cache()
            unused.append(allocator.reserved - allocator.allocated)
        elif event[1]:
            allocator.allocate(*event)
        else:
            allocator.release(event[0])
    return allocator, unused


def table(num_layers: int, num_steps: int, tokens: int, mesh) -> list[tuple[str, float, float, float, float]]:
    """(what is on, planned, allocated, reserved at most, unused at the worst wake) in GiB."""
    lines = []
    for pack_rows in (0, tokens):
        events, plan = record(num_layers, num_steps, tokens, pack_rows, mesh)
        planned = (plan.size("train") - CONTEXT) / GIB
        for clean, expandable in ((False, False), (True, False), (True, True)):
            allocator, unused = replay(events, expandable=expandable, clean=clean)
            on = [(pack_rows, "one buffer"), (clean, "moments apart"), (expandable, "expandable segments")]
            name = ", ".join(text for is_on, text in on if is_on) or "before"
            sizes = (*allocator.largest.values(), max(unused))
            lines.append((name, planned, *(size / GIB for size in sizes)))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    from support.system.ranks import fsdp_mesh, start_process_group

    start_process_group(tp_size=1)
    print(f"{'GiB':50} planned  allocated  reserved  over plan  unused at a wake")
    for name, *sizes in table(args.layers, args.steps, args.tokens, fsdp_mesh("cpu")):
        planned, allocated, reserved, unused = sizes
        over = f"{reserved / planned - 1:9.1%}"
        print(f"{name:50} {planned:7.2f}  {allocated:9.2f}  {reserved:8.2f}  {over}  {unused:16.2f}")


if __name__ == "__main__":
    main()
