"""One rank of tests/system/test_ranks.py, under torchrun with 2: dist_worker.py MODEL_FOLDER RESULT_FOLDER

Writes what 2 ranks compute: gradients of an unevenly split batch, also with LoRA, what a weight sync sends and gathers,
then greedy tokens of one engine over both ranks. What tests/system/test_optimizer.py asserts of one rank, it asserts
itself.
"""

import json
import sys
from itertools import product
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import numpy as np
import torch
import torch.distributed as dist
from collectives import Collectives
from count_memory import differences
from dist_case import PROMPTS, adapted_policy, make_samples, packs_of, rank_share
from hf_folders import FAMILIES, make_hf_folder, make_pack
from loop import train_once
from optimizer_case import ADAMW, ROUNDED, check_checkpoints, check_offload, check_units
from safetensors.torch import save_file

import config
import data
import envs
from engine import Engine, SamplingOptions
from hf.tokenizer import Tokenizer
from hf.weights import full_tensors, merged_weight
from model import load_policy
from rollout import Sampler
from system.exits import exit_process
from system.ranks import start_process_group


class Disagrees(envs.Environment):
    """A grader that works against time: on each rank it says something else."""

    def __init__(self, rank):
        self.rank = rank

    def step(self, turns):
        observation = ({"role": "user", "content": f"rank {self.rank}"},)
        return [envs.StepResult(1.0 + self.rank, "wrong", done=False, observation=observation) for _ in turns]


def sync_facts(folder, mesh):
    """What `full_tensors` gives and gathers, for each precision of the policy and of the engine."""
    facts = {}
    for precision, dtype in product(("float32", "bfloat16"), (torch.float32, torch.bfloat16)):
        model = load_policy(folder, device="cpu", mesh=mesh, precision=precision)
        with torch.no_grad():
            for param in model.parameters():
                param.to_local().mul_(1 + 2**-13)  # the files' numbers fit into bfloat16
        expected = {name: param.full_tensor().to(dtype) for name, param in model.named_parameters()}
        with Collectives() as collectives:
            sent = dict(full_tensors(model, dtype))
        facts[f"{precision} to {dtype}"] = {
            "same_names": list(sent) == list(expected),
            "same_values": all(torch.equal(tensor, expected[name]) for name, tensor in sent.items()),
            "dtypes": sorted({str(tensor.dtype) for tensor in sent.values()}),
            "itemsize": dtype.itemsize,
            "num_parameters": sum(param.numel() for param in model.parameters()),
            "num_tensors": len(sent),
            "num_blocks": len(model.model["layers"]),
            "bytes_sent": sum(tensor.nbytes for tensor in sent.values()),
            "collectives": collectives.seen,
        }
    return facts


def lora_facts(folder, mesh):
    """The adapters as they started and the weights as they are sent, and whether those are what the forward used; by
    the precision of the policy."""
    tensors, same = {}, {}
    for precision in ("float32", "bfloat16"):
        model, used = adapted_policy(folder, mesh, precision), []
        with mock.patch("lora.merged_weight", lambda *args: used.append(merged_weight(*args)) or used[-1]):  # noqa: B023
            with torch.no_grad():
                model(*make_pack([20], vocab=200))
        sent = dict(full_tensors(model, torch.float32))
        whole = {name: param.full_tensor() for name, param in model.named_parameters() if "lora" in name}
        tensors |= {f"{precision} {name}": tensor.float() for name, tensor in (sent | whole).items()}
        layers = [name.replace("lora_A", "weight") for name in whole if "lora_A" in name]
        same[precision] = len(used) == len(layers) and all(
            any(torch.equal(weight.float(), sent[layer]) for layer in layers) for weight in used
        )
    return tensors, same


def check_optimizer(ranks, mesh, work):
    """Units, moments in host memory, rounded ones, and their checkpoints."""
    for family in ("qwen2", "qwen3"):  # tied, untied
        folder = work / family
        if ranks.rank == 0:
            make_hf_folder(folder, **FAMILIES[family])
        dist.barrier()
        check_units(folder, mesh, (2 * ranks.rank, 2 * ranks.rank + 1))
    for cfg in (ADAMW, ROUNDED):
        check_offload(folder, mesh, cfg, 3)
    check_checkpoints(folder, mesh, ranks, work, ADAMW)


def two_turns(engine, tokenizer, ranks):
    """[prompt, ids, reward, turns] of conversations with it."""
    messages = [{"role": "user", "content": "1+1"}]
    row = data.Problem(0, messages, "2", "x", tokenizer.render(messages))
    engine.stop_token_ids = [*engine.stop_token_ids, *range(0, 256, 2)]  # so that replies end
    sampler = Sampler(engine, tokenizer, {"x": Disagrees(ranks.rank)}, ranks, max_turns=2)
    samples = sampler.sample([(0, row), (1, row)], 2, SamplingOptions(1.0, 4), (0,))
    return [[s.prompt, s.output_ids.tolist(), s.reward, s.num_turns] for s in samples]


def carried_turns(engine, tokenizer, ranks, policies):
    """Conversations with it that go on over a weight change, beside those of the step before: their ids, the versions
    in each, and the largest gap to the log-probabilities of a token's own weights."""
    messages = [{"role": "user", "content": "1+1"}]
    row = data.Problem(0, messages, "2", "x", tokenizer.render(messages))
    engine.stop_token_ids = list(range(0, 256, 32))
    sampler = Sampler(engine, tokenizer, {"x": Disagrees(ranks.rank)}, ranks, max_turns=2)
    first = sampler.start([(0, row)], 2, SamplingOptions(0.8, 4), (0,), step=1)
    later = sampler.start([(1, row), (2, row)], 4, SamplingOptions(0.8, 40), (0,), step=2)
    sampler.finish(first)
    engine.sync(full_tensors(policies[1], engine.dtype), 1)
    samples = sampler.finish(later)
    gap = 0.0
    for s in samples:
        ids = torch.tensor([*s.prompt_ids, *s.output_ids.tolist()])
        position_T = torch.arange(len(ids) - 1)
        inputs = ids[:-1], position_T, np.array([0, len(position_T)]), position_T[-len(s.output_ids) :]
        with torch.no_grad():
            logps = [policy(*inputs, ids[-len(s.output_ids) :])[0].numpy() for policy in policies]
        logp_R = np.stack(logps)[s.versions, np.arange(len(s.versions))]
        gap = max(gap, float(np.abs(logp_R - s.sampler_logps)[s.mask].max()))
    return {
        "ids": [s.output_ids.tolist() for s in samples],
        "versions": [s.versions[s.mask].tolist() for s in samples],
        "turns": [s.num_turns for s in samples],
        "gap": gap,
    }


def moved(policy, mesh, folder):
    """The policy as an optimizer's large step would leave it."""
    other = load_policy(folder, device="cpu", mesh=mesh)
    other.temperature, other.vocab_limit = policy.temperature, policy.vocab_limit
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for param in other.parameters():
        local = param.detach().to_local()
        local.add_(0.02 * torch.randn(local.shape, generator=generator))
    return other


if __name__ == "__main__":
    folder, results = Path(sys.argv[1]), Path(sys.argv[2])
    ranks, device = start_process_group(tp_size=2)
    tokenizer = Tokenizer(folder)
    policy = load_policy(folder, device=device, mesh=dist.init_device_mesh("cpu", (2,)))
    policy.temperature = 0.8
    policy.vocab_limit = tokenizer.vocab_size

    samples, adv_B = make_samples(tokenizer.vocab_size)
    shares = [[[samples[i]] for i in share] for share in rank_share]
    with mock.patch("batch.assign_to_ranks", lambda *_: shares):
        metrics, gradients = train_once(policy, samples, adv_B, packs_of(40), ranks)

    mesh = dist.init_device_mesh("cpu", (2,))
    facts = sync_facts(folder, mesh)

    adapted = adapted_policy(folder, mesh)
    adapted.temperature = 0.8
    adapted.vocab_limit = tokenizer.vocab_size
    with mock.patch("batch.assign_to_ranks", lambda *_: shares):
        _, lora_gradients = train_once(adapted, samples, adv_B, packs_of(40), ranks)
    lora_tensors, lora_same = lora_facts(folder, mesh)
    memory = {name: differences(name, mesh) for name in ("qwen3", "qwen3 tied", "lora")}
    offloads = {"qwen3 tied": {"cpu_offload": True}, "lora": {"cpu_offload": True}}
    offloads["qwen3"] = {"offload_optimizer_for_logprob": True}
    memory |= {f"{name}, offload": differences(name, mesh, 4095, **key) for name, key in offloads.items()}

    check_optimizer(ranks, mesh, results)

    generation = config.GenerationConfig(vllm_cfg=config.VllmConfig(tensor_parallel_size=2))
    policy_cfg = config.PolicyConfig(precision="float32", max_total_sequence_length=128, generation=generation)
    grpo_cfg = config.GRPOConfig(async_grpo=config.AsyncGRPOConfig(enabled=True))  # more, and without it the same
    engine = Engine(folder, policy.config, tokenizer, config.Config(policy=policy_cfg, grpo=grpo_cfg))
    engine.sync(full_tensors(policy, engine.dtype), 0)
    completions = engine.generate(PROMPTS, [0] * len(PROMPTS), SamplingOptions(0.0, 24))
    greedy = [completion.ids.tolist() for completion in completions]
    conversations = two_turns(engine, tokenizer, ranks)
    carried = carried_turns(engine, tokenizer, ranks, [policy, moved(policy, mesh, folder)])
    (results / f"rank_{ranks.rank}.json").write_text(
        json.dumps(
            {
                "metrics": metrics,
                "sync": facts,
                "greedy": greedy,
                "conversations": conversations,
                "carried": carried,
                "lora_same": lora_same,
                "memory": memory,
            }
        )
    )
    if ranks.rank == 0:
        save_file(gradients, results / "gradients.safetensors")
        save_file(lora_gradients, results / "lora_gradients.safetensors")
        save_file(lora_tensors, results / "lora_tensors.safetensors")
    dist.barrier()
    exit_process(0)
