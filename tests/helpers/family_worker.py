"""python tests/helpers/family_worker.py qwen2|llama FOLDER [bfloat16]: one engine of a family; prints JSON.

For each parameter alone: perturb, compare sampler and trainer before and after the sync. With bfloat16, of the head
alone: how far its logits are from those of the weights that were sent, before and after the sync.
"""

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import torch
import torch.distributed as dist
from tiny import make_tiny

import config
import data
from batch import to_device
from engine import Engine, SamplingOptions
from hf.tokenizer import Tokenizer
from hf.weights import full_tensors
from model import load_policy
from system.exits import exit_process
from system.ranks import start_process_group


def gap(engine, policy) -> float:
    """Largest |sampler - trainer| over some sampled tokens."""
    prompts = [[(31 * i + 7 * j) % 250 for j in range(4 + i)] for i in range(12)]
    done = engine.generate(prompts, list(range(12)), SamplingOptions(0.8, 16))
    worst = 0.0
    for prompt, completion in zip(prompts, done, strict=True):
        sample = data.Sample(
            prompt=0,
            index=0,
            row_id=0,
            prompt_ids=prompt,
            output_ids=completion.ids,
            sampler_logps=completion.logps,
            mask=completion.ids >= 0,
            finish_reason="stop",
            versions=completion.versions,
            reward=0.0,
        )
        (pack,) = data.pack_samples([[sample]], 64)
        with torch.no_grad():
            logp_R, _ = policy(*to_device(pack, torch.device("cpu")).model_inputs)
        worst = max(worst, (logp_R - torch.from_numpy(pack.sampler_logp_R)).abs().max().item())
    return worst


def head_error(engine, policy) -> float:
    """Largest difference between the engine's logits and float64's of the hidden states it had, and of the head that
    the policy has."""
    seen = []

    def keep(_, inputs, logits):
        seen.append((inputs[1].double(), logits.double()))

    (hook,) = engine.llm.apply_model(lambda model: model.logits_processor.register_forward_hook(keep))
    gap(engine, policy)
    hook.remove()
    head_VD = dict(full_tensors(policy, engine.dtype))["lm_head.weight"][: policy.vocab_limit].double()
    return max((logits - hidden @ head_VD.T).abs().max().item() for hidden, logits in seen)


def main() -> None:
    family, folder, precision = sys.argv[1], Path(sys.argv[2]), (sys.argv[3:] or ["float32"])[0]
    make_tiny(folder, family=family, tied=False)
    _, device = start_process_group(tp_size=1)
    tokenizer = Tokenizer(folder)
    policy = load_policy(folder, device=device, mesh=dist.init_device_mesh("cpu", (1,)), precision=precision)
    policy.temperature = 0.8
    policy.vocab_limit = tokenizer.vocab_size
    policy_cfg = config.PolicyConfig(precision=precision, max_total_sequence_length=64)
    engine = Engine(folder, policy.config, tokenizer, config.Config(policy=policy_cfg))
    engine.sync(full_tensors(policy, engine.dtype), 0)
    compare = gap if precision == "float32" else head_error
    found = {"start": [0.0, compare(engine, policy)]}
    perturbed = [(n, p) for n, p in policy.named_parameters() if precision == "float32" or n == "lm_head.weight"]
    for name, param in perturbed:
        with torch.no_grad():
            param.to_local().add_(0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(1)))
        stale = compare(engine, policy)
        engine.sync(full_tensors(policy, engine.dtype), 0)
        found[name] = [stale, compare(engine, policy)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
    exit_process(0)
