"""transformers' blocks beside model.Body: processor seconds of forward and backward, by turns, for the same model.

    .venv/bin/python -m bench.blocks [--rounds 20]

Two random policies with the same weights, one through `policy.dtensor_cfg.automodel_kwargs.force_hf`, sharded over one
rank as in a run, on one thread. A round is a pack of eight sequences through one and then the other, in the other order
each second round; its log-probabilities are the same to the bit. Printed: the median of each, and the median of the
rounds' quotients with the quartiles. Seconds of the process, not of a clock: other work on the machine counts less.
"""

import argparse
import statistics
import time

import numpy as np
import torch
import torch.distributed as dist

from attention import PackLayout
from base.hf.folder import from_hf
from head import HeadOptions, response_logps
from model import Decoder, shard

HF = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
STARTER = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
STARTER |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512}
WIDE = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 9}
WIDE |= {"num_key_value_heads": 3, "head_dim": 64, "vocab_size": 4096}
CASES = [  # model_type, sizes, tokens of a sequence, precision
    ("qwen3", STARTER, 24, "float32"),
    ("qwen3", STARTER, 256, "float32"),
    ("llama", WIDE, 32, "float32"),
    ("llama", WIDE, 32, "bfloat16"),
]
NUM_SEQUENCES = 8


def random_policy(hf: dict, precision: str, *, force_hf: bool) -> Decoder:
    with torch.device("meta"):
        model = Decoder(from_hf(hf, force_hf=force_hf), keeps_gathered=True)
    shard(model, dist.init_device_mesh("cpu", (1,)), precision=precision)
    model.to_empty(device="cpu")
    model.model.init_buffers("cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().normal_(0, 0.05, generator=generator)
    return model


def pack_of(length: int, vocab: int) -> tuple[tuple, torch.Tensor]:
    """(the inputs of a decoder, the tokens that its rows predict)."""
    num_tokens = NUM_SEQUENCES * length
    token_T = torch.randint(0, vocab, (num_tokens,), generator=torch.Generator().manual_seed(1))
    position_T = torch.arange(length).repeat(NUM_SEQUENCES)
    bounds = np.arange(0, num_tokens + 1, length)
    pos_R = torch.arange(num_tokens - 1)
    layout = PackLayout.of(bounds, None, num_tokens, torch.device("cpu"))
    return (token_T, position_T, layout, pos_R), token_T[1:]


def seconds_of(model: Decoder, inputs: tuple, target_R: torch.Tensor) -> tuple[float, torch.Tensor]:
    """(processor seconds of a forward and backward, log-probabilities)."""
    start = time.process_time()
    logp_R, _ = response_logps(model, inputs, target_R, HeadOptions())
    model.backward(logp_R.sum(), is_last=True)
    seconds = time.process_time() - start
    model.zero_grad(set_to_none=True)
    return seconds, logp_R.detach()


def compare(kind: str, sizes: dict, length: int, precision: str, rounds: int) -> None:
    hf = HF | sizes | {"model_type": kind}
    native = random_policy(hf, precision, force_hf=False)
    blocks = random_policy(hf, precision, force_hf=True)
    pack = pack_of(length, hf["vocab_size"])
    native_seconds, blocks_seconds = [], []
    for number in range(-2, rounds):  # two to warm up
        if number % 2:
            of_native, native_logp_R = seconds_of(native, *pack)
            of_blocks, blocks_logp_R = seconds_of(blocks, *pack)
        else:
            of_blocks, blocks_logp_R = seconds_of(blocks, *pack)
            of_native, native_logp_R = seconds_of(native, *pack)
        assert torch.equal(native_logp_R, blocks_logp_R)
        if number >= 0:
            native_seconds.append(of_native)
            blocks_seconds.append(of_blocks)
    quotients = [blocks / native for blocks, native in zip(blocks_seconds, native_seconds, strict=True)]
    low, middle, high = statistics.quantiles(quotients, n=4)
    print(
        f"{kind}, hidden {hf['hidden_size']}, {NUM_SEQUENCES} x {length} tokens, {precision}: model.py "
        f"{1e3 * statistics.median(native_seconds):.1f} ms, blocks {1e3 * statistics.median(blocks_seconds):.1f} ms, "
        f"quotient {middle:.3f} ({low:.3f} to {high:.3f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    for case in CASES:
        compare(*case, rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
