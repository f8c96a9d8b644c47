"""Steps of configs/math_1b.yaml itself on one GPU, with random weights of Qwen2.5-1.5B: seconds, speed, memory.

    python -m bench.gpu_recipe --out FOLDER [--turns]     --dry: steps of the smoke recipe, on a CPU

--turns: every second step, beginning with the second, gathers, sums and packs as the program did until 2026-11-28
(`train_step.set_way`; packs of 8,192 tokens), with the loss as it is in place of compiled kernels. A row of
recipe.jsonl says which way it went.

Needs the tokenizer of Qwen2.5 in .gpu/qwen (bench/pack_gpu.sh). The questions are made here, as long as GSM8K's. Random
weights end hardly a reply, so each has its full 768 tokens; the reward is whether the number of characters is even.
The result is the run's metrics.jsonl, with the planned and the measured GiB of each phase.
"""

import argparse
import contextlib
import json
import random
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

import grpo
from base.hf.folder import from_hf
from base.inputs import reader
from base.system.exits import exit_process
from bench.head import ROOT
from bench.train_step import QWEN, set_way
from loss import policy_loss
from run.job import Run

QWEN_FILES = QWEN | {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768, "torch_dtype": "bfloat16"}


def even(completions: list[str]) -> list[float]:
    """The reward: half of all replies have it, whatever they say."""
    return [float(len(completion) % 2 == 0) for completion in completions]


def write_problems(file: Path) -> Path:
    """2,000 questions of 30 to 90 words."""
    rng = random.Random(0)
    texts = [
        " ".join(f"Then {rng.randint(2, 99)} of them were sold for {rng.randint(2, 99)} dollars." for _ in range(size))
        for size in (rng.randint(3, 9) for _ in range(2000))
    ]
    file.write_text("".join(json.dumps({"question": text, "answer": "#### 1"}) + "\n" for text in texts))
    return file


def random_model(folder: Path) -> None:
    from safetensors.torch import save_file

    shutil.copytree(ROOT / ".gpu/qwen", folder, dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN_FILES))
    generator = torch.Generator("cuda").manual_seed(0)
    weights = {}
    for name, shape in from_hf(QWEN).tensor_shapes():
        weight = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        weights[name] = (weight.fill_(1) if "norm" in name else weight.normal_(0, 0.02, generator=generator)).cpu()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


class Turns:
    """Stands for `grpo.train`: sets how each step works. WORDS: of a config as it was."""

    WORDS = ("policy.sequence_packing.train_mb_tokens=8192",)

    def __init__(self, words: list[str], config: str):
        self.old_cfg = reader.load(ROOT / config, [*words, *self.WORDS])
        self.train = grpo.train
        self.sample_step = grpo.sample_step
        self.make_minibatches = grpo.make_minibatches
        self.is_old = False

    def run(self, run: Run) -> None:
        new_options = run.head_options

        def sample_step(sampler, cfg, train, cursor, step, num_steps):
            self.is_old = step % 2 == 0
            set_way(run.model, self.is_old)
            as_it_is = replace(new_options, loss=replace(new_options.loss, call=policy_loss))
            run.head_options = as_it_is if self.is_old else new_options
            return self.sample_step(sampler, cfg, train, cursor, step, num_steps)

        def make_minibatches(samples, adv_B, cfg, ranks, device):
            return self.make_minibatches(samples, adv_B, self.old_cfg if self.is_old else cfg, ranks, device)

        with mock.patch.multiple(grpo, sample_step=sample_step, make_minibatches=make_minibatches):
            self.train(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--turns", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("words", nargs="*", help="key=value")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    logs = Path(tempfile.mkdtemp(prefix="recipe_", dir=args.out))  # has the steps of a run that is cut
    words = [f"logger.log_dir={logs}", "checkpointing.enabled=false", f"grpo.max_num_steps={args.steps}"]
    words += ["grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=0"]
    config = "configs/smoke.yaml"
    if not args.dry:
        config, model = "configs/math_1b.yaml", Path(tempfile.mkdtemp())
        random_model(model)
        problems = write_problems(logs / "problems.jsonl")
        words += [f"policy.model_name={model}", "cluster.gpus_per_node=1"]
        words += [f"data.train.data_path={problems}", f"data.validation.data_path={problems}"]
        words += ["data.default.env_name=bench.gpu_recipe:even", "grpo.num_prompts_per_step=16"]
    words += args.words
    patches = contextlib.ExitStack()
    patches.enter_context(mock.patch.object(sys, "argv", ["grpo.py", str(ROOT / config), *words]))
    if args.turns:
        patches.enter_context(mock.patch.object(grpo, "train", Turns(words, config).run))
    with patches:
        code = grpo.main()
    rows = [json.loads(line) for line in next(logs.glob("exp_*/metrics.jsonl")).read_text().splitlines()]
    for row in rows:
        row["as_before"] = args.turns and row["step"] % 2 == 0
    (args.out / "recipe.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        shown = {key: value for key, value in row.items() if key.startswith(("timing/", "performance/"))}
        print(json.dumps({"step": row["step"], "as_before": row["as_before"]} | shown))
    exit_process(code)


if __name__ == "__main__":
    main()
