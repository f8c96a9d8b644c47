"""The pictures of the pages, each in light and dark, drawn from numbers of this program.

    python bench/pictures.py        writes docs/images/{step,memory,pack,head}_{light,dark}.svg

step: the stages of `grpo.train`. memory: the memory plan of configs/math_1b.yaml. pack: the pack of
docs/walkthrough.md, made of the recorded samples. head: bytes of the output layer of that plan. They are 700 pixels
wide, and use the reader's fonts.
"""

import json
import sys
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.scale import FIELDS, MODELS
from bench.walk import RECORDING
from check import reader
from check.memory_plan import CHUNK_BYTES, GIB, Plan
from data import Pack, Sample, pack_samples
from hf.model_config import ModelConfig
from hf.tokenizer import Tokenizer

FOLDER = ROOT / "docs" / "images"
WIDTH = 700
NUM_GPUS, GPU_GIB, TOKENIZER_IDS = 8, 80, 151_665  # of Qwen2.5-1.5B, whose config.json is in bench/scale.py
SANS, MONO = "Helvetica, Arial, sans-serif", "Menlo, Consolas, 'DejaVu Sans Mono', monospace"
# Name -> its colour in light, in dark. Fills are pale in light and deep in dark: text on them keeps its colour.
COLORS = {
    "page": ("#ffffff", "#0d1117"),
    "text": ("#1f2328", "#e6edf3"),
    "dim": ("#4c555f", "#bcc4cd"),
    "line": ("#818b98", "#6e7681"),
    "empty": ("#f3f5f7", "#171c23"),
    "blue": ("#cfe4ff", "#173f6e"),
    "teal": ("#c4ecdf", "#12493f"),
    "green": ("#d5efbf", "#2c4f18"),
    "yellow": ("#fbe7ad", "#5c4709"),
    "orange": ("#ffd8b8", "#6b3510"),
    "red": ("#ffd0d2", "#6d2229"),
    "purple": ("#e3d8fb", "#43307a"),
    "gray": ("#dfe4ea", "#303742"),
    "accent": ("#0a5cc2", "#79b8ff"),
    "alarm": ("#b3261e", "#ff9a92"),
}
Point = tuple[float, float]


@dataclass
class Drawing:
    """SVG, from top to bottom. `text` is placed by its baseline."""

    dark: bool
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def color(self, name: str) -> str:
        return COLORS[name][self.dark] if name in COLORS else name

    def box(self, x, y, width, height, fill="empty", stroke="line", radius=5.0, dashed=False) -> None:
        shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"'
        style = f' fill="{self.color(fill)}" stroke="{self.color(stroke)}"' + ' stroke-dasharray="5 4"' * dashed
        self.parts.append(f"{shape}{style}/>")

    def text(self, x, y, words, size=13.0, color="text", anchor="start", bold=False, mono=False) -> None:
        style = f'font-size="{size:g}" fill="{self.color(color)}" text-anchor="{anchor}"'
        style += ' font-weight="600"' * bold + f' font-family="{MONO}"' * mono
        self.parts.append(f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>')

    def path(self, points: list[Point], color="line", width=1.3, arrow=False, curve=False) -> None:
        letter = " C " if curve else " L "
        steps = [f"{x:g} {y:g}" for x, y in points]
        line = f"M {steps[0]}{letter}{(' ' if curve else letter).join(steps[1:])}"
        head = f' marker-end="url(#{color})"' if arrow else ""
        self.parts.append(f'<path d="{line}" fill="none" stroke="{self.color(color)}" stroke-width="{width:g}"{head}/>')

    def labelled(self, x, y, width, height, title, lines=(), fill="empty") -> None:
        """A box with a bold title and lines below it."""
        self.box(x, y, width, height, fill)
        top = y + (height - 17 * (1 + len(lines))) / 2 + 13
        self.text(x + width / 2, top, title, bold=True, anchor="middle")
        for i, line in enumerate(lines, start=1):
            self.text(x + width / 2, top + 17 * i, line, 12, "dim", "middle")

    def svg(self) -> str:
        heads = ""
        for name in ("line", "accent"):
            shape = f'<path d="M 0 0 L 8 4 L 0 8 z" fill="{self.color(name)}"/>'
            size = 'markerWidth="8" markerHeight="8" refX="7" refY="4" markerUnits="userSpaceOnUse"'
            heads += f'<marker id="{name}" orient="auto" {size}>{shape}</marker>'
        size = f'width="{WIDTH}" height="{self.height}" viewBox="0 0 {WIDTH} {self.height}"'
        top = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{SANS}">'
        ground = f'<rect width="{WIDTH}" height="{self.height}" fill="{self.color("page")}"/>'
        title = f"<title>{escape(self.title)}</title>"
        return "\n".join([top, title, f"<defs>{heads}</defs>", ground, *self.parts, "</svg>\n"])


# ------------------------------------------------------------------------------------------------------------ the step


def draw_step(dark: bool) -> Drawing:
    """Time goes down. Left to right: what grades, what generates, what trains."""
    d = Drawing(dark, 656, "One step of GRPO: the records, and the processes they run in")
    d.box(210, 34, 480, 612, "page", dashed=True)
    d.text(450, 24, "a rank: one process and one GPU, which both sides use in turns", 13, "dim", "middle")
    d.text(92, 24, "worker processes, on CPUs", 13, "dim", "middle")
    d.text(312, 56, "engine (vLLM)", 14, "text", "middle", bold=True)
    d.text(572, 56, "trainer (FSDP2)", 14, "text", "middle", bold=True)
    d.labelled(472, 72, 204, 54, "draw P prompts", ["f(seed, epoch, cursor)"], "blue")
    lines = ["G replies to each prompt,", "with log-probabilities;", "seed f(step, prompt, sample)"]
    d.labelled(220, 72, 188, 108, "generate", lines, "purple")
    d.labelled(12, 82, 146, 88, "grade", ["a deadline for each:", "outcome, reward"], "yellow")
    arrows = [((472, 99), (408, 99), "Problem", 440), ((220, 106), (158, 106), "reply", 184)]
    arrows += [((158, 146), (220, 146), "reward", 184), ((408, 160), (472, 160), "Sample", 440)]
    for start, end, record, x in arrows:
        d.path([start, end], arrow=True)
        d.text(x, start[1] - 7, record, 13, "accent", "middle")
    d.box(220, 196, 188, 362, "empty", dashed=True)
    for i, words in enumerate(("asleep: its weights", "and its KV cache", "are not on the GPU")):
        d.text(314, 366 + 18 * i, words, 13, "dim", "middle")
    rows = [
        (148, "advantages", "each sample against its group", "teal", "adv_B"),
        (230, "pack", "no padding, a prompt once", "teal", "Pack, then MicroBatch"),
        (312, "score", "old policy, reference: if needed", "green", "old_logp_R, ref_logp_R"),
        (394, "loss and backward", "[T, V] logits never exist", "orange", "gradient of all ranks"),
        (476, "clip and step", "one verdict on all ranks", "orange", "new weights"),
        (558, "gather", "one block after another", "blue", ""),
    ]
    for y, title, line, fill, record in rows:
        d.labelled(472, y, 204, 54, title, [line], fill)
        if record:
            d.path([(492, y + 54), (492, y + 82)], arrow=True)
            d.text(500, y + 73, record, 13, "accent")
    d.labelled(220, 574, 188, 54, "wake, take weights", ["version n + 1: next step"], "purple")
    d.path([(472, 601), (408, 601)], arrow=True)
    d.text(440, 594, "tensors", 13, "accent", "middle")
    return d


# -------------------------------------------------------------------------------------------------------------- memory


def plan_1b() -> Plan:
    """Of configs/math_1b.yaml on GPUs of 80 GiB."""
    fields = dict(zip(FIELDS, MODELS["Qwen2.5-1.5B"], strict=True)) | {"rms_norm_eps": 1e-6, "hidden_act": "silu"}
    cfg = reader.load(ROOT / "configs" / "math_1b.yaml")
    return Plan(cfg, ModelConfig.from_hf(fields), TOKENIZER_IDS, NUM_GPUS, GPU_GIB * GIB)


# What holds memory -> what the picture calls it, and its colour.
ITEMS = {
    "CUDA and NCCL": ("CUDA, NCCL (assumed)", "gray"),
    "weights": ("weights, float32 shard", "blue"),
    "moments": ("optimizer's moments", "teal"),
    "gradients": ("gradients", "green"),
    "copy of the policy": ("copy of the policy", "blue"),
    "embedding and head": ("gathered weights", "yellow"),
    "gathered": ("gathered weights", "yellow"),
    "gathered to send": ("gathered weights", "yellow"),
    "canary's forward": ("gathered weights", "yellow"),
    "activations": ("activations", "orange"),
    "logits and gradient of the head": ("logits, head's gradient", "red"),
    "engine's weights": ("engine's weights", "green"),
    "engine's buffers": ("engine's buffers", "gray"),
    "KV cache": ("KV cache", "purple"),
}
PHASES = (("generate", "rollout"), ("score", "log-probabilities"), ("train", "training"), ("sync", "weight sync"))


def _swatch(d: Drawing, at: Point, words: str, color: str) -> Point:
    """A colour and what it is, on the next line where this one is full; where the next one goes."""
    width = 32 + 7 * len(words)
    x, y = at if at[0] + width < WIDTH + 10 else (14, at[1] + 18)
    d.box(x, y - 10, 11, 11, color, radius=2)
    d.text(x + 16, y, words, 12.5, "dim")
    return x + width, y


def draw_memory(dark: bool) -> Drawing:
    plan = plan_1b()
    d = Drawing(dark, 510, "Planned GPU memory in the phases of a step")
    d.text(14, 26, "GPU memory in the four phases of a step", 15, bold=True)
    model = f"Qwen2.5-1.5B, configs/math_1b.yaml, {NUM_GPUS} GPUs of {GPU_GIB} GiB, packs of {plan.tokens:,} tokens"
    d.text(14, 46, model, 13, "dim")
    d.text(14, 64, "Planned by check/memory_plan.py, each phase at its largest moment. Not yet measured.", 13, "dim")
    left, scale = 14, (WIDTH - 28) / GPU_GIB
    y = 84
    for phase, name in PHASES:
        merged: dict[tuple[str, str], float] = {}
        for item, size in plan.phases[phase][1].items():
            merged[ITEMS[item]] = merged.get(ITEMS[item], 0) + size / GIB
        d.text(left, y + 14, name, 14, bold=True)
        d.text(WIDTH - 14, y + 14, f"{plan.size(phase) / GIB:.1f} of {GPU_GIB} GiB", 13, "text", "end")
        d.box(left, y + 22, WIDTH - 28, 26, "empty", radius=3)
        x = left
        note: Point = (left, y + 65)
        for (label, color), size in sorted(merged.items(), key=lambda item: -item[1]):
            d.box(x, y + 22, size * scale, 26, color, radius=0)
            words = f"{label} {size:.1f}"
            if len(words) * 6.6 + 8 < size * scale:
                d.text(x + 6, y + 39.5, words, 12.5)
            else:
                note = _swatch(d, note, words, color)
            x += size * scale
        y += 106
    return d


# ---------------------------------------------------------------------------------------------------------------- pack


def recorded_pack() -> tuple[Pack, list[Sample]]:
    """The pack of docs/walkthrough.md."""
    types = {"output_ids": np.int32, "sampler_logps": np.float32, "mask": bool, "versions": np.int32}
    samples = []
    for fields in json.loads(RECORDING.read_text(encoding="utf-8"))["samples"]:
        samples.append(Sample(**fields | {name: np.array(fields[name], dtype) for name, dtype in types.items()}))
    (pack,) = pack_samples([samples], max_tokens=2048)
    return pack, samples


SHORT = {"<|user|>": "U", "<|end|>": "E", "<|assistant|>": "A"}
RESPONSES = ("orange", "teal", "yellow", "purple")
CELL = 12.7


def _cell(d: Drawing, x: float, y: float, token: str, fill: str) -> None:
    d.box(x, y, CELL, 22, fill, radius=0)
    d.text(x + CELL / 2, y + 15.5, SHORT.get(token, token), 12, "text", "middle", mono=True)


def draw_pack(dark: bool) -> Drawing:
    pack, samples = recorded_pack()
    d = Drawing(dark, 478, "A pack of one prompt and four responses, and the padded batch of the same samples")
    size, left = CELL, 18
    vocabulary = Tokenizer(ROOT / "examples" / "three_tasks" / "starter").backend

    bounds = pack.cu_seqlens.tolist()
    num_tokens, num_targets = len(pack.token_T), len(pack.target_R)
    d.text(left, 26, f"One pack: {num_tokens} input tokens (token_T), the prompt once", 15, bold=True)
    fills = ["blue", *RESPONSES]
    names = ["prompt", *(f"response {i}" for i in range(len(samples)))]
    for segment, (start, end) in enumerate(pairwise(bounds)):
        for row in range(start, end):
            _cell(d, left + row * size, 58, vocabulary.id_to_token(pack.token_T[row]), fills[segment])
        d.text(left + (start + end) / 2 * size, 50, names[segment], 12.5, "dim", "middle")
        first, last = pack.position_T[start], pack.position_T[end - 1]
        d.text(left + (start + end) / 2 * size, 95, f"positions {first}-{last}", 12, "dim", "middle")
    shift = bounds[1] - 1  # the first target under the row that predicts it
    for i, (row, target) in enumerate(zip(pack.pos_R.tolist(), pack.target_R.tolist(), strict=True)):
        x, y = left + (shift + i) * size, 168
        is_first = row == bounds[1] - 1
        start = (left + (row + 0.5) * size, 100 if is_first else 102)
        d.path([start, (x + size / 2, y - 1)], "accent" if is_first else "line", 1.6 if is_first else 0.8, is_first)
        _cell(d, x, y, vocabulary.id_to_token(target), RESPONSES[pack.seq_R[i]])
    for i, sample in enumerate(samples):
        x = left + (shift + (i + 0.5) * num_targets / len(samples)) * size
        d.text(x, 205, f"advantage {sample.advantage:.3g}", 12, "dim", "middle")
    d.text(left, 230, f"{num_targets} targets (target_R), each under the row that predicts it (pos_R).", 13)
    words = f"Row {bounds[1] - 1}, the end of the prompt, predicts the first id of every response (blue arrows)."
    d.text(left, 249, words, 13, "accent")
    words = "Each response attends to the prompt and to itself. A row without a target never reaches the head."
    d.text(left, 268, words, 13)
    d.text(left, 287, "U = <|user|>, A = <|assistant|>, E = <|end|>", 12.5, "dim")
    _padded_batch(d, samples, vocabulary, num_tokens, left)
    return d


def _padded_batch(d: Drawing, samples: list[Sample], vocabulary, num_tokens: int, left: float) -> None:
    """What a batch without packs would compute of the same samples."""
    inputs = [[*sample.prompt_ids, *sample.output_ids[:-1].tolist()] for sample in samples]
    longest = max(map(len, inputs))
    total, again = longest * len(inputs), (len(inputs) - 1) * len(samples[0].prompt_ids)
    d.text(left, 330, f"The padded batch of the same samples: {total} input tokens", 15, bold=True)
    for i, ids in enumerate(inputs):
        for j in range(longest):
            in_prompt = j < len(samples[0].prompt_ids)
            fill = ("blue" if i == 0 else "red") if in_prompt else RESPONSES[i] if j < len(ids) else "gray"
            _cell(d, left + j * CELL, 346 + 28 * i, vocabulary.id_to_token(ids[j]) if j < len(ids) else "", fill)
    right = left + longest * CELL + 24
    notes = [f"{again} of {total} tokens are the prompt again (red)."]
    notes += [f"The pack computes {num_tokens / total:.0%} of these rows."]
    notes += ["Where responses differ in length,", "padding comes on top. Here it does not."]
    for i, words in enumerate(notes):
        d.text(right, 364 + 21 * i, words, 13, "alarm" if i == 0 else "text")


# ---------------------------------------------------------------------------------------------------------------- head


def draw_head(dark: bool) -> Drawing:
    plan = plan_1b()
    num_rows, width, ids = plan.tokens, plan.model.vocab_size, TOKENIZER_IDS
    chunk = plan.logits(to_train=True)
    chunk_rows = round(chunk / (4 * width))
    d = Drawing(dark, 476, "The output layer: logits of a chunk of rows at a time")
    d.text(14, 26, "The output layer: [T, V] logits never exist", 15, bold=True)
    d.text(14, 46, f"V = {ids:,} ids, T = R = {num_rows:,} rows: a pack of configs/math_1b.yaml", 13, "dim")
    count = -(-num_rows // chunk_rows)
    top, height = 92, 60
    d.text(56, 80, "hidden_RD", 13, "text", "middle", bold=True)
    d.text(226, 80, "logits, one chunk", 13, "text", "middle", bold=True)
    d.text(414, 80, "vectors of R", 13, "text", "middle", bold=True)
    d.text(592, 80, "gradients", 13, "text", "middle", bold=True)
    for i in range(count):
        y = top + i * (height + 8)
        d.box(26, y, 60, height, "blue", radius=2)
        d.text(56, y + 27, "rows", 12.5, "text", "middle")
        d.text(56, y + 44, f"{chunk_rows:,}", 12.5, "text", "middle")
        d.box(140, y, 172, height, "red" if i == 0 else "page", radius=2, dashed=i > 0)
        d.text(226, y + 27, f"[{chunk_rows:,}, V] float32", 12.5, "text" if i == 0 else "dim", "middle")
        d.text(226, y + 44, "now in memory" if i == 0 else "later, in the same place", 12.5, "dim", "middle")
    d.path([(86, top + 30), (140, top + 30)], arrow=True)
    d.text(113, top + 23, "W^T", 12, "accent", "middle")
    d.labelled(358, top, 112, 60, "logp, entropy", ["of all rows"], "teal")
    d.labelled(358, top + 68, 112, 60, "loss.py", ["autograd"], "yellow")
    d.path([(312, top + 22), (358, top + 22)], arrow=True)
    d.path([(414, top + 60), (414, top + 68)], arrow=True)
    d.path([(358, top + 98), (337, top + 98), (337, top + 44), (312, top + 44)], "accent", arrow=True)
    d.text(414, top + 146, "dL/dlogp, dL/dentropy", 12, "accent", "middle")
    d.path([(312, top + 54), (326, top + 54), (326, top + 176), (592, top + 176), (592, top + 130)], arrow=True)
    d.text(336, top + 170, "dlogits, written over the logits", 12, "accent")
    d.labelled(516, top, 152, 60, "dX, these rows", ["dlogits W"], "green")
    d.labelled(516, top + 68, 152, 60, "dW, float32", ["+= dlogits^T hidden"], "green")
    _bytes_of_the_head(d, 304, num_rows, chunk)
    return d


def _bytes_of_the_head(d: Drawing, y: float, num_rows: int, chunk: float) -> None:
    whole = 4.0 * num_rows * TOKENIZER_IDS
    scale = (WIDTH - 220) / (2 * whole)
    d.text(14, y, "Bytes of logits and their gradient", 14, bold=True)
    bars = {"all rows at once, float32": [("logits ", whole), ("gradient ", whole)]}
    bars |= {"here, one chunk for both": [("", chunk)]}
    for label, parts in bars.items():
        y += 18
        d.text(14, y + 19, label, 13)
        x = 190.0
        for words, size in parts:
            d.box(x, y, size * scale, 28, "red", radius=0)
            d.text(x + 8, y + 19, f"{words}{size / GIB:.2f} GiB", 12.5)
            x += size * scale
        y += 26
    longest = 32_768
    most = 2 * 4 * longest * TOKENIZER_IDS / GIB
    words = f"A chunk is at most {CHUNK_BYTES / GIB:.2f} GiB, whatever T is. For {longest:,} rows all logits"
    d.text(14, y + 34, words, 13, "dim")
    words = f"and their gradient would be {most:.1f} GiB. Computed; on a GPU not yet measured."
    d.text(14, y + 52, words, 13, "dim")


PICTURES = {"step": draw_step, "memory": draw_memory, "pack": draw_pack, "head": draw_head}


def files() -> dict[str, str]:
    """File name -> SVG."""
    return {
        f"{name}_{'dark' if dark else 'light'}.svg": draw(dark).svg()
        for name, draw in PICTURES.items()
        for dark in (False, True)
    }


def main() -> None:
    for name, svg in files().items():
        (FOLDER / name).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
