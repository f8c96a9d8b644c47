"""Losses of TRL and verl on one batch: their own functions, executed. It prints what losses.json beside it holds.

    python tests/helpers/peers/losses.py FOLDER_OF_TRL FOLDER_OF_VERL > losses.json

The folders are unpacked wheels. Of TRL 1.16.0: GRPOTrainer._compute_loss in trl/trainer/grpo_trainer.py, with a
stand-in for the trainer that hands it the log-probabilities. Of verl 0.9.1: compute_policy_loss_*, kl_penalty_forward
and agg_loss in verl/trainer/ppo/core_algos.py. Each function is cut out of its file, and needs torch alone.
"""

import ast
import json
import sys
import tempfile
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch

MASK = [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]
BATCH = {
    "logp": [[-1.0, -0.5, -2.0, -0.1], [-0.2, -3.0, 0.0, 0.0], [-0.7, -1.6, -0.4, 0.0]],
    "old": [[-1.2, -0.5, -1.5, -0.1], [-0.3, -2.0, 0.0, 0.0], [-0.7, -3.4, -0.45, 0.0]],
    "sampler": [[-1.1, -0.6, -1.5, -0.15], [-0.3, -2.3, 0.0, 0.0], [-0.2, -2.0, -0.25, 0.0]],
    "ref": [[-1.1, -0.9, -1.8, -0.2], [-0.2, -2.5, 0.0, 0.0], [-0.5, -1.4, -0.9, 0.0]],
    "adv": [1.0, -0.5, -1.25],
}
TRL = {  # the keys of a GRPOConfig that the loss reads, beside its defaults
    "trl_gspo.yaml": {"loss_type": "grpo", "importance_sampling_level": "sequence", "low": 3e-4, "high": 4e-4},
    "trl_agent.json": {"use_vllm": True},
    "trl_intellect2.yaml": {"delta": 4.0, "beta": 0.001},
}
VERL = {
    "verl_math.sh": {"mode": "vanilla", "kl": 0.001},
    "verl_cispo.txt": {"mode": "cispo", "kl": 0.001, "clip_ratio_low": 10.0, "clip_ratio_high": 0.2},
    "verl_gspo.txt": {"mode": "gspo", "kl": 0.0, "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4},
}


def cut_out(file: Path, names: list[str], head: str):
    """A module with these functions of a file, without decorators and annotations."""
    text, parts = file.read_text(), [head]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.decorator_list, node.returns = [], None
            for argument in (*node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
            parts.append(ast.unparse(node))
    assert len(parts) == len(names) + 1, (file, names)
    with tempfile.NamedTemporaryFile("w", suffix=".py") as module_file:
        module_file.write("\n\n".join(parts))
        module_file.flush()
        spec = util.spec_from_file_location(file.stem, module_file.name)
        module = util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def tensors() -> dict[str, torch.Tensor]:
    batch = {name: torch.tensor(values, dtype=torch.float64) for name, values in BATCH.items()}
    return batch | {"mask": torch.tensor(MASK, dtype=torch.float64), "logp": batch["logp"].requires_grad_()}


def loss_of_trl(module, low=0.2, high=0.2, use_vllm=False, delta=None, beta=0.0, **options) -> tuple[float, list]:
    b = tensors()
    args = SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1)
    trainer = MagicMock(args=args, aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None)
    trainer.configure_mock(
        **{"importance_sampling_level": "token", "loss_type": "dapo", "beta": beta} | options,
        **{"epsilon_low": low, "epsilon_high": high, "use_vllm": use_vllm, "_entropy_bonus_enabled": False},
        **{"vllm_importance_sampling_correction": True, "current_gradient_accumulation_steps": 1},
    )
    trainer.accelerator.num_processes = 1
    trainer.accelerator.reduce = lambda values, reduction: values
    trainer._get_per_token_logps_and_entropies.return_value = b["logp"], torch.zeros_like(b["mask"]), None
    # sequence_mask with clip_max 3: the product of the ratios of a sequence, 0 where it is above
    weight_B = ((b["old"] - b["sampler"]) * b["mask"]).sum(-1, keepdim=True).exp()
    ids = torch.zeros_like(b["mask"], dtype=torch.long)
    inputs = {"prompt_ids": ids, "prompt_mask": b["mask"], "completion_ids": ids, "completion_mask": b["mask"]}
    inputs |= {"advantages": b["adv"], "old_per_token_logps": b["old"], "ref_per_token_logps": b["ref"]}
    inputs |= {"importance_sampling_ratio": weight_B * (weight_B <= 3), "num_items_in_batch": b["mask"].sum()}
    loss = module._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.item(), b["logp"].grad.tolist()


def loss_of_verl(module, mode: str, kl: float, **clips) -> tuple[float, list]:
    b = tensors()
    config = SimpleNamespace(clip_ratio=0.2, **{"clip_ratio_low": 0.2, "clip_ratio_high": 0.2} | clips)
    config.get, config.global_batch_info = (lambda name, default: default), {}
    agg = "seq-mean-token-mean" if mode == "gspo" else "token-mean"
    function = getattr(module, f"compute_policy_loss_{mode}")
    advantages = b["adv"][:, None].expand_as(b["mask"])
    loss, _ = function(b["old"], b["logp"], advantages, b["mask"], loss_agg_mode=agg, config=config)
    if kl:
        loss = loss + kl * module.agg_loss(module.kl_penalty_forward(b["logp"], b["ref"], "low_var_kl"), b["mask"], agg)
    loss.backward()
    return loss.item(), b["logp"].grad.tolist()


def main() -> None:
    trl, verl = map(Path, sys.argv[1:])
    helpers = "import torch\nnanmin = nanmax = lambda x: x.amin()"
    trl_module = cut_out(trl / "trl/trainer/grpo_trainer.py", ["_compute_loss"], helpers)
    functions = ["masked_sum", "masked_mean"]
    masked = cut_out(verl / "verl/utils/torch_functional.py", functions, "import torch")
    names = [
        "agg_loss",
        "kl_penalty_forward",
        *(f"compute_policy_loss_{mode}" for mode in ("vanilla", "cispo", "gspo")),
    ]
    verl_module = cut_out(verl / "verl/trainer/ppo/core_algos.py", names, "import torch\nActorConfig = object")
    verl_module.verl_F, verl_module.AlgoConfig = masked, type("AlgoConfig", (), {})
    found = {name: loss_of_trl(trl_module, **options) for name, options in TRL.items()}
    found |= {name: loss_of_verl(verl_module, **options) for name, options in VERL.items()}
    print(
        json.dumps({name: {"loss": loss, "gradient": gradient} for name, (loss, gradient) in found.items()}, indent=1)
    )


if __name__ == "__main__":
    main()
