"""Seconds and bytes of every collective of a step, on 8 to 512 GPUs: computed from the shapes of the model and from the
speeds of the links, not measured. docs/scale.md has the last of the tables that it prints.

    .venv/bin/python bench/scale.py
"""

import math
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base.hf.folder import from_hf

FIELDS = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
FIELDS += ("num_key_value_heads", "vocab_size", "tie_word_embeddings")
MODELS = {  # fields of their config.json
    "Qwen2.5-1.5B": ("qwen2", 1536, 8960, 28, 12, 2, 151_936, True),
    "Qwen3-8B": ("qwen3", 4096, 12288, 36, 32, 8, 151_936, False),
    "Qwen2.5-32B": ("qwen2", 5120, 27648, 64, 40, 8, 152_064, False),
}
GPUS = (8, 64, 512)
GPUS_PER_NODE = 8
# Speeds in bytes per second, times in seconds.
NVLINK = 0.8 * 450e9  # one direction of a GPU; NVIDIA: an H100 has 900e9 in both
# Of a node. NVIDIA expects 46e9 to 48e9 of a NIC's 50e9 (nccl-tests#290).
NICS = {"8 x 400 Gb/s": 0.8 * 8 * 50e9, "1 x 100 Gb/s": 0.8 * 12.5e9}
ETHERNET = 1.25e9  # of a node, for what is in host memory: 10 Gb/s, assumed
# NCCL's own model (baseLat, hwLat of src/graph/tuning.cc: ring, simple); TCP in one rack is assumed.
BASE, NVLINK_HOP, NETWORK_HOP, TCP_HOP = 8.4e-6, 3.4e-6, 14e-6, 25e-6
FLOPS = 0.35 * 989e12  # of an H100; torchtitan publishes 33 to 39% (Llama-3-8B)
# Of the step: all samples, tokens of each with its prompt (NeMo RL's benchmark: 64 x 32 of about 800 to 1,020).
SAMPLES, SAMPLE_TOKENS, PACK_TOKENS = 2048, 1024, 8192
TOKEN_BYTES = 13  # id 4, log-probability 4, mask 1, version of the weights 4
SAMPLE_BYTES = 316  # pickled, of a sample of one turn without its tokens, which every rank gets (exchange.py)
HALF, FULL = 2, 4  # bytes of a number in bfloat16 and float32
SCORING = "gather, a scoring pass"  # not in the sums: not every run has one


@dataclass(frozen=True)
class Shape:
    """What of a model the collectives carry. Units are those of `model.shard`."""

    num_blocks: int
    block: int  # numbers of one
    rest: int  # numbers of the other units
    num_rest_units: int

    @classmethod
    def of(cls, name: str) -> "Shape":
        fields = dict(zip(FIELDS, MODELS[name], strict=True)) | {"rms_norm_eps": 1e-6, "hidden_act": "silu"}
        config = from_hf(fields)
        sizes = {weight: math.prod(shape) for weight, shape in config.tensor_shapes()}
        block = sum(size for weight, size in sizes.items() if weight.startswith("model.layers.0."))
        rest = sum(size for weight, size in sizes.items() if ".layers." not in weight)
        return cls(config.num_hidden_layers, block, rest, 1 if config.tie_word_embeddings else 3)

    @property
    def size(self) -> int:
        return self.num_blocks * self.block + self.rest

    @property
    def num_units(self) -> int:
        return self.num_blocks + self.num_rest_units


@dataclass(frozen=True)
class Collective:
    """One kind, in a step: how many, the bytes that enter a node or, on one node, a GPU; and all their seconds."""

    name: str
    count: int
    num_bytes: float
    seconds: float
    grows_with: str


def ring_seconds(num_bytes: float, count: int, num_gpus: int, nics: float) -> float:
    """Of `count` all-gathers or reduce-scatters that carry num_bytes together: NCCL's rings pass through each node
    once, and through all its NICs."""
    nodes = num_gpus // GPUS_PER_NODE
    speed, network_hops = (min(NVLINK, nics), nodes) if nodes > 1 else (NVLINK, 0)
    hops = network_hops * NETWORK_HOP + (num_gpus - 1 - network_hops) * NVLINK_HOP
    return num_bytes * (num_gpus - 1) / num_gpus / speed + count * (BASE + hops)


def replica_seconds(num_bytes: float, count: int, num_replicas: int, nics: float) -> float:
    """Of `count` all-reduces, each by a GPU of every node, whose eight share the NICs: twice what a gather takes."""
    through = 2 * num_bytes * (num_replicas - 1) / num_replicas / nics
    return through + count * (BASE + 2 * (num_replicas - 1) * NETWORK_HOP)


def num_micro_batches(num_gpus: int) -> int:
    return max(1, SAMPLES * SAMPLE_TOKENS // (num_gpus * PACK_TOKENS))


def fsdp(shape: Shape, num_gpus: int, nics: float, *, replicas: int = 1) -> list[Collective]:
    """Of FSDP over all GPUs, or over those of each of `replicas` nodes."""
    micros, shards = num_micro_batches(num_gpus), num_gpus // replicas
    units, blocks = shape.num_units, shape.num_blocks
    kinds = [
        ("gather, forward", units * micros, HALF * shape.size * micros, "micro-batches"),
        # Embedding, head and root are not gathered twice (`reshard_after_forward`, `set_unshard_in_backward`).
        ("gather, backward", blocks * micros, HALF * blocks * shape.block * micros, "micro-batches"),
        ("reduce-scatter", units * micros, FULL * shape.size * micros, "micro-batches"),
        (SCORING, units * micros, HALF * shape.size * micros, "micro-batches"),
        ("gather, weight sync", blocks + 2, HALF * shape.size, "-"),
    ]
    rows = [Collective(*kind[:3], ring_seconds(kind[2], kind[1], shards, nics), kind[3]) for kind in kinds]
    rows.append(Collective("clip norm", 1, FULL, 2 * ring_seconds(FULL, 1, num_gpus, nics), "GPUs (hops)"))
    if replicas > 1:  # a GPU's shard of the gradient, once for each GPU of a node
        size = FULL * shape.size
        seconds = replica_seconds(size, units, replicas, nics)
        rows.append(Collective(f"all-reduce, {replicas} replicas", units, 2 * size, seconds, "optimizer steps"))
    return rows


def on_hosts(num_gpus: int) -> list[Collective]:
    """By gloo, whose rings pass through every process: bytes that enter one."""
    known, tokens = SAMPLES * SAMPLE_BYTES, SAMPLES * SAMPLE_TOKENS * TOKEN_BYTES
    ring, speed = (num_gpus - 1) * TCP_HOP, ETHERNET if num_gpus > GPUS_PER_NODE else 4 * ETHERNET
    direct = GPUS_PER_NODE * tokens / num_gpus / speed  # those of a node share its link
    return [
        Collective("samples: metadata to all ranks", 2, known, known / speed + 2 * ring, "samples"),
        Collective("samples: tokens to their trainer", 1, tokens / num_gpus, direct + ring, "samples of a GPU"),
        Collective("counts, metrics, flags", 6, 6 * 300, 10 * ring, "GPUs (hops)"),  # an all-reduce goes around twice
    ]


def compute_seconds(shape: Shape, num_gpus: int) -> float:
    """Matmuls of training alone: 6 flops for each weight and token, and 2 where blocks are computed again."""
    return 8 * shape.size * SAMPLES * SAMPLE_TOKENS / num_gpus / FLOPS


def total(collectives: list[Collective]) -> float:
    return sum(collective.seconds for collective in collectives if collective.name != SCORING)


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in [header, *rows]]
    lines.insert(1, "|" + "---|" * len(header))
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.2g}"


def cell(collective: Collective) -> str:
    return f"{collective.count:,}: {size(collective.num_bytes)}, {number(1e3 * collective.seconds)} ms"


def size(num_bytes: float) -> str:
    for unit, bytes_of_unit in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= bytes_of_unit:
            return f"{number(num_bytes / bytes_of_unit)} {unit}"
    return f"{number(num_bytes)} B"


def collectives_table(name: str, columns: list[list[Collective]]) -> str:
    rows = [[kinds[0].name, *map(cell, kinds), kinds[0].grows_with] for kinds in zip(*columns, strict=True)]
    return table([name, *(f"{n} GPUs" for n in GPUS), "grows with"], rows)


def model_table(name: str) -> str:
    shape, nics = Shape.of(name), NICS["8 x 400 Gb/s"]
    title = f"{name}, {shape.size / 1e9:.2f} G weights in {shape.num_units} units"
    text = collectives_table(title, [fsdp(shape, n, nics) for n in GPUS])
    for n in GPUS[1:]:
        last = fsdp(shape, n, nics, replicas=n // GPUS_PER_NODE)[-1]
        text += f"| {last.name} | {' | '.join(cell(last) if n == m else '' for m in GPUS)} | {last.grows_with} |\n"
    return text


def pays_table() -> str:
    """Seconds of a step's matmuls, and of its collectives: by FSDP, by HSDP of a node each, and on the hosts."""
    rows = []
    for name, n in product(MODELS, GPUS):
        shape = Shape.of(name)
        ways = [fsdp(shape, n, nics, replicas=r) for nics in NICS.values() for r in (1, n // GPUS_PER_NODE)]
        seconds = [compute_seconds(shape, n), *map(total, ways), total(on_hosts(n))]
        rows.append([name, str(n), str(num_micro_batches(n)), *map(number, seconds)])
    links = [f"{kind}, {nics}" for nics in NICS for kind in ("FSDP", "HSDP")]
    return table(["seconds of a step", "GPUs", "micro-batches", "matmuls", *links, "hosts"], rows)


def page() -> str:
    hosts = collectives_table("of any model, by gloo", [on_hosts(n) for n in GPUS])
    return "\n".join([model_table("Qwen3-8B"), hosts, pays_table()])


if __name__ == "__main__":
    print(page())
