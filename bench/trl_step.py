"""The two programs that bench/trl.py times, each held between its steps: `python -m bench.trl_step trl SPEC.json`, and
under torchrun `-m bench.trl_step ours FOLDER CONFIG [key.sub=value ...]`.

Each says in FOLDER that it is ready for a step, begins when told to, and leaves a record of it. Nothing of either
program is changed but this: both sample exactly as many tokens as they may (no end token ends a response), and what
they call for a part of the step is timed from outside.
"""

import functools
import gc
import hashlib
import json
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from base.system import exits


def reward(completion_ids, **_) -> list[float]:
    """Differs within every group, so that every response has a gradient; both programs call it alike."""
    return [sum(int(token) for token in ids) % 97 / 97 for ids in completion_ids]


def resident(name: str) -> int:
    """Bytes, of VmRSS (now) or VmHWM (at most)."""
    row = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(name))
    return int(row.split()[1]) * 1024


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Gate:
    """Holds this process before each step until the file go_STEP is there, and leaves done_STEP_RANK.json after it."""

    def __init__(self, folder: Path, rank: int = 0):
        self.folder, self.rank = folder, rank
        self.parts: dict[str, float] = defaultdict(float)
        self.record: dict = {}

    def begin(self, step: int) -> None:
        (self.folder / f"ready_{step}_{self.rank}").touch()
        while not (self.folder / f"go_{step}").exists():
            time.sleep(0.02)
        self.parts.clear()
        self.record, self.cpu, self.start = {}, cpu_seconds(), time.perf_counter()

    def end(self, step: int) -> None:
        """`seconds` is the whole step; of `parts`, sampler lies within generation."""
        seconds = time.perf_counter() - self.start
        times = {"seconds": seconds, "cpu_seconds": cpu_seconds() - self.cpu, "parts": dict(self.parts)}
        text = json.dumps(self.record | times | {"peak_bytes": resident("VmHWM")})
        written = self.folder / f"writing_{step}_{self.rank}"
        written.write_text(text)
        written.rename(self.folder / f"done_{step}_{self.rank}.json")

    def time(self, owner, name: str, part: str, look: Callable | None = None) -> None:
        """Counts the seconds of each call of `owner.name` for `part`; `look` gets what it returns."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args, **kwargs):
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.parts[part] += time.perf_counter() - start
            if look:
                look(result)
            return result

        setattr(owner, name, timed)

    def note_tokens(self, prompts: list[list[int]], lengths: list[int]) -> None:
        """What a step trains on; `prompts`, a hash of their ids in sorted order, is the same for the same prompts."""
        self.record["prompts"] = hashlib.sha256(json.dumps(sorted(prompts)).encode()).hexdigest()[:16]
        self.record["samples"] = len(lengths)
        self.record["prompt_tokens"] = sum(len(prompt) for prompt in prompts)
        self.record["new_tokens"], self.record["length_range"] = sum(lengths), [min(lengths), max(lengths)]


# ------------------------------------------------------------------------------------------------------------ this one


def ours(folder: Path) -> int:
    """A rank of grpo.py, whose arguments are those of this process."""
    import engine
    import grpo

    exits.die_with_parent()
    gate = Gate(folder, int(os.environ["RANK"]))
    params, steps = engine.SamplingParams, grpo.steps.remaining_steps
    engine.SamplingParams = lambda **kwargs: params(**kwargs | {"stop_token_ids": None, "ignore_eos": True})

    def note(samples) -> None:
        trained = samples.trained
        gate.note_tokens([s.sequence.prompt_ids for s in trained], [s.sequence.num_output_tokens for s in trained])

    def held(run):
        for step in steps(run):
            gate.begin(step)
            run.timer.start_step()
            yield step
            gate.record["computed_tokens"] = run.metrics["train_tokens"]
            gate.end(step)

    grpo.steps.remaining_steps = held
    gate.time(grpo, "sample_step", "generation", note)
    gate.time(engine.VLLMEngine, "generate", "sampler")
    gate.time(grpo, "compute_loss", "forward")
    gate.time(torch.Tensor, "backward", "backward")
    gate.time(grpo, "clip_grad_norm", "clip")
    gate.time(torch.optim.AdamW, "step", "optimizer")
    gate.time(grpo, "sync_weights", "sync")
    return grpo.main()


# ----------------------------------------------------------------------------------------------------------------- TRL


def trl(spec: dict) -> None:
    """TRL's GRPOTrainer, a fresh one for each of spec["settings"] in turn, each for spec["steps"] steps."""
    sys.modules["vllm"] = None  # unused on CPU: without it TRL is smaller in memory, and starts faster
    from accelerate import Accelerator
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    gate = Gate(Path(spec["folder"]))

    class Held(TrainerCallback):
        step = 0

        def on_step_begin(self, *args, **kwargs):
            Held.step += 1
            gate.begin(Held.step)

        def on_step_end(self, args, state, control, model=None, **kwargs):
            gate.record["weights"] = str(model.get_input_embeddings().weight.dtype)
            gate.end(Held.step)

    def note(batch) -> None:
        rows = zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
        gate.note_tokens([ids[mask.bool()].tolist() for ids, mask in rows], batch["completion_mask"].sum(1).tolist())

    gate.time(GRPOTrainer, "_generate_and_score_completions", "generation", note)
    gate.time(GRPOTrainer, "_generate_single_turn", "sampler")
    gate.time(GRPOTrainer, "compute_loss", "forward")
    gate.time(torch.Tensor, "backward", "backward")
    gate.time(Accelerator, "clip_grad_norm_", "clip")
    gate.time(torch.optim.AdamW, "step", "optimizer")
    for setting in spec["settings"]:
        torch.set_num_threads(setting["threads"])
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from VmRSS
        trainer = make_trainer(spec, setting)
        trainer.add_callback(Held())
        trainer.train()
        del trainer


def make_trainer(spec: dict, setting: dict):
    """Float32 weights; with bfloat16, the forward runs under autocast. What is not named here is TRL's default."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    micro_batch = min(setting["micro_batch"], spec["prompts"] * spec["samples"])
    rows = [json.loads(line) for line in Path(spec["data"]).read_text().splitlines()]
    args = GRPOConfig(
        output_dir=spec["folder"],
        use_cpu=True,
        bf16=spec["precision"] == "bfloat16",
        gradient_checkpointing=setting["gradient_checkpointing"],
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=spec["prompts"] * spec["samples"] // micro_batch,
        num_generations=spec["samples"],
        max_completion_length=spec["new_tokens"],
        generation_kwargs={"min_new_tokens": spec["new_tokens"]},
        temperature=1.0,
        beta=0.0,
        num_iterations=1,
        learning_rate=2e-5,
        lr_scheduler_type="constant",
        max_steps=spec["steps"],
        shuffle_dataset=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(spec["model"]),
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": row["messages"]} for row in rows]),
    )


if __name__ == "__main__":
    side = sys.argv.pop(1)
    if side == "trl":
        trl(json.loads(Path(sys.argv[1]).read_text()))
    else:
        exits.exit_process(ours(Path(sys.argv.pop(1))))
