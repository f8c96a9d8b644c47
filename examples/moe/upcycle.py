"""Makes a mixture of experts of the arithmetic starter (sparse upcycling, Komatsuzaki et al. 2023, arXiv:2212.05055).

    .venv/bin/python -m examples.moe.upcycle models/moe
    ./train.sh configs/smoke.yaml policy.model_name=models/moe

Each expert is the starter's MLP with some noise, and the router is random. A token goes to 2 of 4 experts, so the model
computes nearly what the starter does, and learns the carry in a minute.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

STARTER = Path(__file__).resolve().parent.parent / "arithmetic" / "starter"
NUM_EXPERTS = 4
EXPERTS_PER_TOKEN = 2
NOISE = 0.1  # of an expert, in standard deviations of its weights
ROUTER_STD = 0.1


def upcycle(source: Path, target: Path) -> None:
    """Writes to `target` the Qwen3 of folder `source` as a Qwen3 MoE in float32."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    hf = json.loads((source / "config.json").read_text())
    hf |= {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "moe_intermediate_size": hf["intermediate_size"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    (target / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensor = tensor.float()
        block, is_of_mlp, part = name.partition(".mlp.")
        if not is_of_mlp:
            weights[name] = tensor
            continue
        for expert in range(NUM_EXPERTS):
            noise = NOISE * tensor.std() * torch.randn(tensor.shape, generator=generator)
            weights[f"{block}.mlp.experts.{expert}.{part}"] = tensor + noise
        router = ROUTER_STD * torch.randn(NUM_EXPERTS, hf["hidden_size"], generator=generator)
        weights[f"{block}.mlp.gate.weight"] = router
    save_file(weights, target / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the model goes")
    upcycle(STARTER, parser.parse_args().folder)
