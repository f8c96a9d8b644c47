"""A weight sync of a random Qwen2.5-1.5B into its sleeping engine: seconds, bytes, memory; and whether it arrived.

    python -m bench.gpu_sync [--rounds 5] [--out FILE]       --dry: tiny, on a CPU, where sleep does nothing

One rank, bfloat16, a vocabulary of 151,936 rows of which the tokenizer has 151,665, no CUDA graphs. sync: waking
the engine's weights, sending all parameters, waking its KV cache. used: of the whole GPU, with nothing cached by torch;
the policy's float32 weights are in it. tokens/s: 256 prompts of 128 tokens, 256 new ones each, the second of two calls.
"""

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

import engine as engine_module  # noqa: F401  (first: bench/train_step.py goes on without vLLM, here nothing can)
from base.hf.weights import sharded_parameters, sync_weights
from base.system.exits import exit_process
from base.system.ranks import start_process_group
from bench.gpu_smoke import check, failed, speed, used_gib
from bench.head import facts
from bench.train_step import QWEN, TINY, config_of, random_policy
from engine import VLLMEngine
from gap import check_canary
from head import HeadOptions
from records import SamplingOptions


def seconds(run) -> float:
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def model_folder(hf: dict) -> Path:
    """What the engine reads of a model whose weights it gets from the trainer."""
    folder = Path(tempfile.mkdtemp())
    rest = {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(hf | rest))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path, help="one line of JSON is added")
    args = parser.parse_args()
    vllm = "policy.generation.vllm_cfg"
    cfg = config_of("one pass", f"{vllm}.enforce_eager=true", f"{vllm}.gpu_memory_utilization=0.3")
    _, device = start_process_group(tp_size=1)
    hf = TINY if args.dry else QWEN
    policy = random_policy(hf, device, cfg.policy.precision)
    vocab = hf["vocab_size"] - 6 if args.dry else 151_665
    tokenizer = SimpleNamespace(vocab_size=vocab, eos_token_ids=[vocab - 1])
    num_params = sum(param.numel() for param in sharded_parameters(policy).values())
    line: dict = facts() | {"parameters": num_params, "used_GiB_before_engine": used_gib()}
    engine = VLLMEngine(model_folder(hf), policy.config, tokenizer, cfg)
    line["sleep_seconds"] = [seconds(engine.sleep)]
    line["sync_seconds"] = []
    line["used_GiB_asleep_first"] = used_gib()

    def sync(version: int) -> None:
        line["bytes_sent"] = sync_weights(policy, engine, version)

    for version in range(args.rounds):
        if version:
            line["sleep_seconds"].append(seconds(engine.sleep))
            line["used_GiB_asleep"] = used_gib()
        line["sync_seconds"].append(seconds(partial(sync, version)))
    line["used_GiB_awake"] = used_gib()
    line["canary_logp_gap"] = check_canary(policy, HeadOptions(vocab=vocab), engine, None, device, "after a sync")
    if not args.dry:  # a CPU's engine gets a tied head twice
        check("bytes sent, over two for each parameter", line["bytes_sent"] / (2 * num_params), 1)
    check("logp gap of random weights after a sync", line["canary_logp_gap"], 0.05)
    num_prompts, num_new = (4, 8) if args.dry else (256, 256)
    prompts = [[(7 * number + place) % tokenizer.vocab_size for place in range(128)] for number in range(num_prompts)]
    line["tokens_per_second"], _ = speed(engine, prompts, list(range(num_prompts)), SamplingOptions(1.0, num_new))
    text = json.dumps(line)
    print(text)
    if args.out:
        with args.out.open("a") as file:
            file.write(text + "\n")
    sys.stdout.flush()
    exit_process(1 if failed else 0)


if __name__ == "__main__":
    main()
