"""Where the time of a training step goes on a GPU: shares of its kernels, and of a block with and without recomputing.

    python -m bench.gpu_profile [--out FOLDER]       --dry: tiny, on a CPU, where nothing of a GPU is measured

Shares: a micro-batch of bench/train_step.py under torch's profiler, with prompts shared and not. Blocks: those of
Qwen3-8B's form, with and without recomputing, in microseconds a token for 36 of them.
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path

import torch

from base.system.exits import exit_process
from base.system.ranks import Ranks, start_process_group
from bench.train_step import QWEN, TINY, TOKENIZER, config_of, head_of, median_seconds, random_batch, random_policy
from grpo import compute_gradients
from model import RECOMPUTED

EIGHT = QWEN | {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
LABELS = {"segment_reduce": "backward of shared prompts", "flash": "attention"}  # part of an operation's name -> label


def profile(device: torch.device, ranks: Ranks, dry: bool, out: Path) -> list[str]:
    """Shares of the GPU's time (of a CPU's, dry) by the operation that launched the kernels. Prints the time by the
    wall clock beside that of the kernels, and the longest kernels."""
    model = random_policy(TINY if dry else QWEN, device, config_of("one pass").policy.precision)
    head_options = head_of("torch" if dry else "one pass", model, device)
    if not dry:
        model.compile_blocks()
    lines = []
    for share_prefix in (True, False):
        cfg = config_of("one pass", f"policy.sequence_packing.share_prefix={share_prefix}")
        batch = random_batch(cfg, TOKENIZER[model.config.vocab_size], 4 if dry else 32, ranks, device)
        run = partial(compute_gradients, model, head_options, batch, cfg)
        wall = median_seconds(run, 3)
        with torch.profiler.profile(profile_memory=False) as measured:
            run()
        rows = measured.key_averages()
        name = "shared" if share_prefix else "whole"
        sort = "self_cpu_time_total" if dry else "self_cuda_time_total"
        (out / f"profile_{name}.txt").write_text(rows.table(sort_by=sort, row_limit=40, max_name_column_width=90))
        kernels = [row for row in rows if dry or is_kernel(row)]
        total = sum(own_time(row, dry) for row in kernels)
        print(f"profile, {name}: {1e3 * wall:.1f} ms by the wall clock, kernels {total / 1e3:.1f} ms", flush=True)
        for row in sorted(kernels, key=lambda row: own_time(row, dry), reverse=True)[:14]:
            print(f"    {own_time(row, dry) / 1e3:8.2f} ms {row.count:6} x {row.key[:100]}", flush=True)
        for part, label in LABELS.items():
            time = sum(row.cpu_time_total if dry else row.device_time_total for row in rows if part in row.key)
            lines.append(f"{label}, prompts {name}: {time / total:.1%} of the {'CPU' if dry else 'GPU'}'s time")
    return lines


def is_kernel(row: torch.autograd.profiler_util.FunctionEventAvg) -> bool:
    """The operations that launched the kernels, and FSDP's annotations, count the same time again."""
    return row.device_type == torch.autograd.DeviceType.CUDA and not row.is_user_annotation


def own_time(row: torch.autograd.profiler_util.FunctionEventAvg, dry: bool) -> float:
    return row.self_cpu_time_total if dry else row.self_device_time_total


def blocks(device: torch.device, ranks: Ranks, dry: bool) -> list[str]:
    """Several blocks of the form less one of them: the time of a block, without embedding, head and FSDP's root."""
    lines = []
    cfg = config_of("one pass")
    hf = TINY if dry else EIGHT | {"num_hidden_layers": 4}
    for recompute in (True, False):
        time_of = {}
        for num_layers in (hf["num_hidden_layers"], 1):
            model = random_policy(hf | {"num_hidden_layers": num_layers}, device, cfg.policy.precision)
            head_options = head_of("torch" if dry else "one pass", model, device)
            for block in model.model.layers:
                block.recomputed = RECOMPUTED if recompute else None
            if not dry:
                model.compile_blocks()
            batch = random_batch(cfg, TOKENIZER[model.config.vocab_size], 4 if dry else 32, ranks, device)
            time_of[num_layers] = median_seconds(partial(compute_gradients, model, head_options, batch, cfg), 2)
            num_tokens = sum(len(micro.token_T) for micro in batch.micros)
            del model, batch
        num_blocks = hf["num_hidden_layers"] - 1
        a_block = (time_of[hf["num_hidden_layers"]] - time_of[1]) / num_blocks / num_tokens
        name = "recomputed" if recompute else "all kept"
        lines.append(
            f"a token, 36 blocks of {'a tiny form on a CPU' if dry else '8B'}, {name}: {36e6 * a_block:.0f} us"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(tempfile.mkdtemp()))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    ranks, device = start_process_group(tp_size=1)
    lines = profile(device, ranks, args.dry, args.out)
    lines += blocks(device, ranks, args.dry)
    text = "\n".join(lines)
    (args.out / "profile.txt").write_text(f"{text}\n")
    print(text, flush=True)
    exit_process(0)


if __name__ == "__main__":
    main()
