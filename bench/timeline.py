"""A step on two ranks: what each does when, which collectives they meet in, and who waits for whom.

    python bench/timeline.py record     runs configs/smoke.yaml for some steps on two ranks; the quickest to RECORDING
    python bench/timeline.py draw       docs/images/timeline_{light,dark}.svg, of RECORDING and of the memory plan

While it records, each collective is waited for as soon as it has begun, so that its end is known: FSDP then prefetches
nothing. A collective begins on each rank when that rank comes to it, and ends on both when both have come.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

RECORDING = ROOT / "bench" / "results" / "timeline_2026-11-28.json"
NUM_STEPS = 30
SETTINGS = (
    *("grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false", f"grpo.max_num_steps={NUM_STEPS}"),
    *("grpo.canary_period=0", "checkpointing.enabled=false", "checkpointing.save_hf_at_end=false"),
    "logger.tensorboard_enabled=false",
)


# -------------------------------------------------------------------------------------------------------- the recording


def caller() -> tuple[str, str]:
    """Of the collective that begins: file and function of the program, and the unit of FSDP, if one gathers it."""
    unit = ""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        holder = frame.f_locals.get("self")
        if not unit and hasattr(holder, "_module_fqn"):
            unit = holder._module_fqn or "root"
        is_ours = file.startswith(f"{ROOT}/") and "/.venv/" not in file
        if is_ours and file not in (__file__, f"{ROOT}/base/system/ranks.py"):
            return f"{file[len(str(ROOT)) + 1 :]}:{frame.f_code.co_name}", unit
        frame = frame.f_back
    return "", unit


def record_rank(folder: str) -> None:
    """One rank of the run: for each step its phases and collectives, in seconds of the machine's clock."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
    from torch.utils._pytree import tree_leaves

    import engine
    import grpo
    from run import steps
    from run.log import Timers

    recorded: list[dict] = []

    class Collectives(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if DTensor in types:
                return NotImplemented  # comes again as what it does to the parts
            begin = time.time()
            result = func(*args, **kwargs or {})
            if "c10d" not in func.namespace or func.__name__.startswith(("wait", "_wrap")) or not recorded:
                return result
            leaves = tree_leaves(result)
            num_bytes = 0
            for leaf in leaves:
                if isinstance(leaf, torch.ScriptObject):
                    dist.Work.unbox(leaf).wait()
                elif func.namespace == "_c10d_functional":
                    torch.ops._c10d_functional.wait_tensor(leaf)
                if isinstance(leaf, torch.Tensor):
                    num_bytes += leaf.nbytes
            place, unit = caller()
            event = {"name": func.__name__.split(".")[0], "place": place, "unit": unit, "bytes": num_bytes}
            recorded[-1]["collectives"].append(event | {"begin": begin, "end": time.time()})
            return result

    remaining_steps, call, advance = steps.remaining_steps, Timers.__call__, engine.VLLMEngine.advance

    def recorded_steps(run):
        dist.barrier()
        for step in remaining_steps(run):
            recorded.append({"phases": [], "collectives": [], "begin": time.time()})
            yield step
            recorded[-1]["end"] = time.time()

    @contextmanager
    def recorded_phase(timer, name):
        begin = time.time()
        with call(timer, name):
            yield
        recorded[-1]["phases"].append({"name": name, "begin": begin, "end": time.time()})

    def plain_advance(*args, **kwargs):
        with _disable_current_modes():  # each operation of the engine would be looked at
            return advance(*args, **kwargs)

    steps.remaining_steps, Timers.__call__, engine.VLLMEngine.advance = recorded_steps, recorded_phase, plain_advance
    sys.argv = ["grpo.py", "configs/smoke.yaml", *SETTINGS, f"logger.log_dir={folder}"]
    with Collectives():
        code = grpo.main()
    Path(folder, f"rank_{os.environ['RANK']}.json").write_text(json.dumps(recorded))
    grpo.exit_process(code)


def record() -> None:
    """The quickest step, after the first two, in milliseconds from its begin."""
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        subprocess.run([*launch, __file__, "rank", folder], cwd=ROOT, check=True)
        ranks = [json.loads(Path(folder, f"rank_{rank}.json").read_text()) for rank in range(2)]
    lasted = [step["end"] - step["begin"] for step in ranks[0]]
    best = min(range(2, NUM_STEPS), key=lasted.__getitem__)
    begin = min(steps[best]["begin"] for steps in ranks)
    for steps in ranks:
        for event in (steps[best], *steps[best]["phases"], *steps[best]["collectives"]):
            for edge in ("begin", "end"):
                event[edge] = round(1000 * (event[edge] - begin), 3)
    content = {"step": best + 1, "ranks": [steps[best] for steps in ranks]}
    RECORDING.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------- the picture

WIDTH, TOP, HEIGHT = 700, 108, 440  # HEIGHT: of the time from FIRST milliseconds before the first collective on
FIRST, ROW = 12, 16.5  # ROW: pixels between two names
RANKS_X, RANK_WIDTH, NAMES_X = (88, 126), 32, 184
ENGINE_X, TRAINER_X, HELD_WIDTH = 474, 584, 102
# Name -> its colour in light, in dark. Fills are pale in light and deep in dark: text on them keeps its colour.
COLORS = {
    "page": ("#ffffff", "#0d1117"),
    "text": ("#1f2328", "#e6edf3"),
    "dim": ("#4c555f", "#bcc4cd"),
    "line": ("#818b98", "#6e7681"),
    "work": ("#cfe4ff", "#173f6e"),
    "wait": ("#ff9d8f", "#b8463b"),
    "move": ("#0a5cc2", "#79b8ff"),
    "engine": ("#e3d8fb", "#43307a"),
    "trainer": ("#d5efbf", "#2c4f18"),
}
STAGES = {
    "generation": "generation",
    "advantage_calculation": "advantages",
    "data_processing": "packs",
    "policy_training": "training",
    "prepare_for_generation": "sync",
}
OPERATIONS = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
}
# What the picture calls the items of the memory plan.
OF_ENGINE = {
    "engine's weights": "weights",
    "engine's weights and graphs": "weights",
    "engine's buffers": "buffers",
    "KV cache": "KV cache",
}
OF_TRAINER = {
    "weights": "shards",
    "moments": "shards",
    "gradients": "gradients",
    "gathered": "gathered",
    "embedding and head": "gathered",
    "gathered to send": "gathered",
    "canary's forward": "gathered",
    "activations": "activations",
    "logits and gradient of the head": "logits",
}


class Picture:
    """SVG, 700 pixels wide. `text` is placed by its baseline."""

    def __init__(self, dark: bool):
        self.dark = dark
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> None:
        colors = [COLORS[name][self.dark] if name in COLORS else name for name in (fill, stroke)]
        place = f'x="{x:g}" y="{y:.1f}" width="{width:g}" height="{max(height, 0.8):.1f}"'
        self.parts.append(f'<rect {place} fill="{colors[0]}" stroke="{colors[1]}"/>')

    def text(self, x: float, y: float, words: str, size: float = 12, color: str = "text", anchor="start") -> None:
        style = f'font-size="{size:g}" fill="{COLORS[color][self.dark]}" text-anchor="{anchor}"'
        self.parts.append(f'<text x="{x:g}" y="{y:.1f}" {style}>{escape(words)}</text>')

    def line(self, *points: tuple[float, float]) -> None:
        path = " ".join(f"{x:g},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{COLORS["line"][self.dark]}"/>')

    def svg(self, height: float) -> str:
        size = f'width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}"'
        start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="Helvetica, Arial, sans-serif">'
        page = f'<rect width="{WIDTH}" height="{height:g}" fill="{COLORS["page"][self.dark]}"/>'
        title = "<title>A step on two ranks: time goes down</title>"
        return "\n".join([start, title, page, *self.parts, "</svg>\n"])


def draw(recorded: dict, plan, dark: bool) -> str:
    """Time goes down. Left to right: the stages, the two ranks, their collectives, what the GPU holds by the plan."""
    picture = Picture(dark)
    ranks = recorded["ranks"]
    pairs = list(zip(*(steps["collectives"] for steps in ranks), strict=True))
    end = max(steps["end"] for steps in ranks)
    first = min(event["begin"] for event in pairs[0]) - FIRST
    scale = HEIGHT / (end - first)

    def y_of(time: float) -> float:
        return TOP + max(0.0, time - first) * scale

    said = f"A step of configs/smoke.yaml on two ranks: {end:.0f} ms. Not drawn: the first {first:.0f}, generation"
    picture.text(14, 22, said, 14)
    x = 14.0
    for color, words in (("work", "computes"), ("wait", "waits for the other rank"), ("move", "both exchange")):
        picture.box(x, 34, 11, 11, color, "line")
        picture.text(x + 16, 44, words, 12, "dim")
        x += 32 + 6.4 * len(words)
    picture.text(ENGINE_X, 44, "On a GPU, GiB by the memory plan:", 12, "dim")
    picture.text(ENGINE_X, 60, "Qwen2.5-1.5B, math_1b.yaml, 2 x 80", 12, "dim")
    for rank, x in enumerate(RANKS_X):
        picture.text(x + RANK_WIDTH / 2, TOP - 8, f"rank {rank}", 12, "text", "middle")
    picture.text(NAMES_X, TOP - 8, "collectives, and where they are called")
    picture.text(ENGINE_X, TOP - 8, "the engine")
    picture.text(TRAINER_X, TOP - 8, "the trainer")

    for x, steps in zip(RANKS_X, ranks, strict=True):
        picture.box(x, TOP, RANK_WIDTH, y_of(end) - TOP, "work", "line")
        for pair in pairs:
            both_are_there = max(event["begin"] for event in pair)
            event = pair[ranks.index(steps)]
            begin, met, over = y_of(event["begin"]), y_of(both_are_there), y_of(event["end"])
            if met > begin:
                picture.box(x, begin, RANK_WIDTH, met - begin, "wait")
            picture.box(x, met, RANK_WIDTH, over - met, "move")

    stages = {phase["name"]: phase for phase in ranks[0]["phases"]}
    lowest = TOP
    for name, words in STAGES.items():
        y = y_of(stages[name]["begin"])
        lowest = max(lowest, y) + 13
        picture.line((78, y), (RANKS_X[0], y))
        picture.text(74, lowest, words, 12, "text", "end")

    lowest = TOP - 4
    for pair in pairs:
        met = y_of(max(event["begin"] for event in pair))
        lowest = max(lowest + ROW, met)
        picture.line((RANKS_X[1] + RANK_WIDTH, met), (NAMES_X - 14, lowest), (NAMES_X - 4, lowest))
        place = pair[0]["place"].rpartition("/")[2]
        picture.text(NAMES_X, lowest + 4, f"{OPERATIONS[pair[0]['name']]} {pair[0]['unit']}".strip(), 11.5)
        picture.text(ENGINE_X - 14, lowest + 4, place, 11, "dim", "end")

    generation, training, sync = (stages[name] for name in ("generation", "policy_training", "prepare_for_generation"))
    spans = [
        ("generate", TOP, y_of(generation["end"])),
        ("train", y_of(training["begin"]), y_of(training["end"])),
        ("sync", y_of(sync["begin"]), y_of(sync["end"])),
    ]
    picture.box(TRAINER_X, TOP, HELD_WIDTH, y_of(sync["end"]) - TOP, "trainer", "line")  # shards stay
    for phase, begin, until in spans:
        items = plan.phases[phase][1]
        columns = ((ENGINE_X, "engine", OF_ENGINE), (TRAINER_X, "trainer", OF_TRAINER))
        for x, color, names in columns:
            sizes: dict[str, float] = {}
            for item, name in names.items():
                if item in items:
                    sizes[name] = sizes.get(name, 0.0) + items[item] / 2**30
            if not sizes:
                continue
            picture.box(x, begin, HELD_WIDTH, until - begin, color, "line")
            for number, (name, size) in enumerate(sizes.items()):
                picture.text(x + 6, begin + 15 + 15 * number, f"{name} {size:.1f}", 12)
    bottom = max(y_of(end), lowest) + 26
    said = f"Step {recorded['step']} of a run on 2 CPU cores, beside other work. CUDA and NCCL: 2.5 GiB more."
    picture.text(14, bottom - 8, said, 11.5, "dim")
    return picture.svg(bottom + 4)


def write_pictures(folder: Path) -> None:
    from base.inputs import reader
    from base.plan.memory_plan import Plan
    from bench.fits import GIB, VOCAB, model_config

    cfg = reader.load(ROOT / "configs" / "math_1b.yaml", ["loss_fn.reference_policy_kl_penalty=0"])
    plan = Plan(cfg, model_config("Qwen2.5-1.5B"), VOCAB, 2, 80 * GIB)
    recorded = json.loads(RECORDING.read_text(encoding="utf-8"))
    for dark, name in enumerate(("light", "dark")):
        picture = draw(recorded, plan, bool(dark))
        (folder / f"timeline_{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        record_rank(sys.argv[2])
    elif sys.argv[1] == "record":
        record()
    else:
        write_pictures(ROOT / "docs" / "images")
