"""The first ten minutes on a GPU: five measurements beside what was estimated before there was one, as one table.

    python -m bench.gpu_first [--out FOLDER]       --dry: tiny, on a CPU, where nothing of a GPU is measured

1, 2 and 4 are of one run of configs/smoke.yaml: the history of the memory, the places where a step waits for the GPU
(torch.cuda.set_sync_debug_mode), and reserved, allocated and free GiB at each wake of the engine. 3 is a profile of a
micro-batch of bench/train_step.py. 5 is that of blocks of Qwen3-8B's form, with and without recomputing, of 36.
Estimates: research/review_gpu2.md of the project's notes, for an H100.
"""

import argparse
import collections
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from unittest import mock

import torch

import engine as engine_module
import grpo
from bench.gpu_smoke import used_gib
from bench.head import ROOT
from bench.train_step import QWEN, TINY, TOKENIZER, config_of, head_of, random_batch, random_policy, seconds
from support.run import start
from support.system.exits import exit_process

GIB = 2**30
EIGHT = QWEN | {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
EIGHT |= {"model_type": "qwen3", "head_dim": 128, "tie_word_embeddings": False}
NAMES = {"segment_reduce": "backward of shared prompts", "flash": "attention"}
ESTIMATES = {
    "1 gaps at the largest moment": "0 to 2 GiB of 2 in the plan (est.)",
    "2 waits for the GPU in a step": "at most 6 (est.)",
    "3 backward of shared prompts": "8% (est., sorted at each call)",
    "3 attention": "6% at 1,000 tokens (est.)",
    "4 reserved but not allocated at a wake": "below 1 GiB (est.)",
    "5 a token, 36 blocks of 8B, recomputed": "112 us (est., head and FSDP included)",
    "5 a token, 36 blocks of 8B, all kept": "85 us (est., head and FSDP included)",
}


def smoke_run(dry: bool, out: Path) -> dict[str, str]:
    """1, 2 and 4. Writes wakes.jsonl, waits.txt and, of a GPU, memory.pickle (for pytorch.org/memory_viz)."""
    steps, wakes, waits = (3 if dry else 20), [], []
    words = [f"logger.log_dir={tempfile.mkdtemp()}", "checkpointing.enabled=false", "grpo.val_period=0"]
    words += ["grpo.val_at_start=false", "grpo.val_at_end=false", f"grpo.max_num_steps={steps}"]
    words += ["policy.generation.vllm_cfg.enforce_eager=true"]
    if not dry:
        words += ["policy.precision=bfloat16", "grpo.logp_gap_limit=0.1"]
        words += ["policy.generation.vllm_cfg.gpu_memory_utilization=0.3"]
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    wake, enter = engine_module.Engine.wake, start.Timers.__call__

    def counted_wake(self, part):
        wake(self, part)
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            sizes = torch.cuda.memory_reserved(), torch.cuda.memory_allocated(), free, total
        else:
            sizes = (0,) * 4
        names = ("reserved", "allocated", "free", "total")
        wakes.append({"part": part} | {f"{name}_gib": size / GIB for name, size in zip(names, sizes, strict=True)})

    def counted_phase(self, name):
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn" if name == "policy_training" else "default")
        return enter(self, name)

    def show(message, category, filename, lineno, *_):
        if "called a synchronizing" in str(message):
            waits.append(f"{filename}:{lineno}")

    patches = [mock.patch.object(engine_module.Engine, "wake", counted_wake)]
    patches += [mock.patch.object(start.Timers, "__call__", counted_phase), mock.patch("warnings.showwarning", show)]
    patches += [mock.patch.object(sys, "argv", ["grpo.py", str(ROOT / "configs/smoke.yaml"), *words])]
    with patches[0], patches[1], patches[2], patches[3], warnings.catch_warnings():
        warnings.filterwarnings("always", message=".*called a synchronizing")
        code = grpo.main()
    assert code == 0, f"the smoke run ended with exit code {code}"
    (out / "wakes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in wakes))
    places = collections.Counter(waits).most_common()
    (out / "waits.txt").write_text("".join(f"{number:6} {place}\n" for place, number in places))
    if dry:
        absent = "no GPU"
        return dict.fromkeys([name for name in ESTIMATES if name[0] in "124"], absent)
    torch.cuda.memory._dump_snapshot(str(out / "memory.pickle"))
    gaps = (torch.cuda.max_memory_reserved() - torch.cuda.max_memory_allocated()) / GIB
    unused = [line["reserved_gib"] - line["allocated_gib"] for line in wakes if line["part"] == "kv_cache"]
    return {
        "1 gaps at the largest moment": f"{gaps:.2f} GiB (memory.pickle)",
        "2 waits for the GPU in a step": f"{len(waits) / steps:.1f} (waits.txt)",
        "4 reserved but not allocated at a wake": f"{unused[0]:.2f} at first, {unused[-1]:.2f} GiB after {steps} steps",
    }


def profile(device: torch.device, ranks, dry: bool, out: Path) -> dict[str, str]:
    """3: shares of the GPU's time (of a CPU's, dry), by kernels and by the operation that launched them, with prompts
    shared and not; and the share of the wall clock in which the GPU works."""
    model = random_policy(TINY if dry else QWEN, device, config_of("one pass").policy.precision)
    head_options = head_of("torch" if dry else "one pass", model, device)
    if not dry:
        model.compile_blocks()
    shares = {}
    for shared in (True, False):
        cfg = config_of("one pass", f"policy.sequence_packing.share_prefix={shared}")
        batch = random_batch(cfg, TOKENIZER[model.config.vocab_size], 4 if dry else 32, ranks, device)
        wall = seconds(lambda batch=batch, cfg=cfg: grpo.compute_gradients(model, head_options, batch, cfg), 3)
        with torch.profiler.profile(profile_memory=False) as measured:
            grpo.compute_gradients(model, head_options, batch, cfg)
        rows = measured.key_averages()
        name = "shared" if shared else "whole"
        sort = "self_cpu_time_total" if dry else "self_cuda_time_total"
        (out / f"profile_{name}.txt").write_text(rows.table(sort_by=sort, row_limit=40, max_name_column_width=90))

        def own(row) -> float:
            return row.self_cpu_time_total if dry else row.self_device_time_total

        # The operations that launched them and FSDP's annotations count the same time again.
        on_gpu = torch.autograd.DeviceType.CUDA
        kernels = [row for row in rows if dry or (row.device_type == on_gpu and not row.is_user_annotation)]
        total = sum(map(own, kernels))
        for part, label in NAMES.items() if shared else ():
            time_of = sum((row.cpu_time_total if dry else row.device_time_total) for row in rows if part in row.key)
            shares[f"3 {label}"] = f"{time_of / total:.1%}" + " of a CPU" * dry
        print(f"profile, {name}: {1e3 * wall:.1f} ms by the wall clock, kernels {total / 1e3:.1f} ms", flush=True)
        for row in sorted(kernels, key=own, reverse=True)[:14]:
            print(f"    {own(row) / 1e3:8.2f} ms {row.count:6} x {row.key[:100]}", flush=True)
    return shares


def blocks(device: torch.device, ranks, dry: bool) -> dict[str, str]:
    """5: four blocks of the form, less none of them, times nine."""
    found, cfg = {}, config_of("one pass")
    hf = TINY if dry else EIGHT | {"num_hidden_layers": 4}
    for recompute, name in ((True, "recomputed"), (False, "all kept")):
        took = []
        for num_layers in (hf["num_hidden_layers"], 1):
            model = random_policy(hf | {"num_hidden_layers": num_layers}, device, cfg.policy.precision)
            head_options = head_of("torch" if dry else "one pass", model, device)
            for block in model.model["layers"]:
                block.recompute = recompute
            if not dry:
                model.compile_blocks()
            batch = random_batch(cfg, TOKENIZER[model.config.vocab_size], 4 if dry else 32, ranks, device)

            def run(model=model, head_options=head_options, batch=batch) -> None:
                grpo.compute_gradients(model, head_options, batch, cfg)

            took.append(seconds(run, 2))
            num_tokens = sum(len(micro.token_T) for micro in batch.micros)
            del model, batch
        a_block = (took[0] - took[1]) / (hf["num_hidden_layers"] - 1) / num_tokens
        found[f"5 a token, 36 blocks of 8B, {name}"] = f"{36e6 * a_block:.0f} us" + " (tiny, a CPU)" * dry
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(tempfile.mkdtemp()))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    begun, measured = time.perf_counter(), smoke_run(args.dry, args.out)
    device = torch.device("cpu" if args.dry else "cuda")
    ranks = start.Ranks(0, 1, 0, 1)
    for part in (lambda: profile(device, ranks, args.dry, args.out), lambda: blocks(device, ranks, args.dry)):
        try:
            measured |= part()
        except (RuntimeError, ValueError) as error:  # the table has what there is
            print(f"FAIL {type(error).__name__}: {error}", flush=True)
    lines = ["| measurement | measured | before |", "|---|---|---|"]
    lines += [f"| {name} | {measured.get(name, 'broke off')} | {before} |" for name, before in ESTIMATES.items()]
    text = "\n".join([*lines, "", f"{time.perf_counter() - begun:.0f} s, {used_gib():.1f} GiB in use at the end"])
    (args.out / "first.md").write_text(text + "\n")
    print(text, flush=True)
    exit_process(len(measured) < len(ESTIMATES))


if __name__ == "__main__":
    main()
