"""examples/naive.py, which has no packs, no shared prompts, no shards and no head of its own: the same gradient."""

import ast
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dist_case import packs_of
from safetensors.torch import load_file
from samples import sampled

import config
import grpo
from examples import naive
from head import HeadOptions, LossOptions
from model import load_policy
from pack import finish_minibatches, make_minibatches
from run.build import loss_path_of

STARTER = naive.TASK / "starter"
PAGE = Path(naive.__file__).read_text(encoding="utf-8")
ROOT = Path(naive.__file__).resolve().parents[1]
CLEVER = ("pack", "attention", "head", "model", "engine", "rollout", "ahead", "gap", "lora", "optim")
CLEVER += ("kernels/__init__", "kernels/logp", "kernels/chunks", "kernels/row_kernels")


def groups_of(w, model_config, num_groups):
    """Groups of the starter's own replies, of different lengths, to prompts of different lengths; advantages."""
    rng = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    groups = []
    for i in range(num_groups):
        prompt = [258, *(rng.randrange(256) for _ in range(1 + 3 * i)), 257, 260]
        groups.append(naive.sample(w, model_config, prompt, 4, generator))
    return groups, torch.randn(num_groups, 4, generator=generator)


def samples_of(groups, adv_PG):
    """The replies as the program's own samples."""
    samples = []
    for prompt, group in enumerate(groups):
        for index, (token_T, logp_T, is_sampled_T) in enumerate(zip(*group, strict=True)):
            (where,) = is_sampled_T.nonzero(as_tuple=True)
            first, end = int(where[0]), int(where[-1]) + 1
            ids, logp = token_T[first:end].tolist(), logp_T[first:end].numpy()
            samples.append(sampled(prompt, index, token_T[:first].tolist(), ids, logp=logp, row_id=prompt))
    return samples, adv_PG.flatten().tolist()


def test_its_gradient_is_the_programs(one_rank):
    """Both in float32: sums in another order. Relative to a parameter's gradient, by the Euclidean norm."""
    ranks, device, mesh = one_rank
    model_config = json.loads((STARTER / "config.json").read_text())
    w = {name: x.float().requires_grad_() for name, x in load_file(STARTER / "model.safetensors").items()}
    groups, adv_PG = groups_of(w, model_config, 5)
    samples, adv_B = samples_of(groups, adv_PG)
    num_tokens = sum(sample.num_gen_tokens for sample in samples)
    for group, adv_G in zip(groups, adv_PG, strict=True):
        naive.loss_of_group(w, model_config, group, adv_G, num_tokens, len(samples)).backward()

    cfg = packs_of(48)
    cfg = replace(cfg, policy=replace(cfg.policy, generation=config.GenerationConfig(max_new_tokens=8)))
    assert cfg.loss_fn == naive.LOSS
    model = load_policy(STARTER, device=device, mesh=mesh)
    head_options = HeadOptions(loss=LossOptions(path=loss_path_of(cfg)))
    minibatches = make_minibatches(samples, adv_B, cfg, ranks, device)
    finish_minibatches(minibatches, head_options.loss.path, 0)
    (minibatch,) = minibatches
    assert len(minibatch.micros) > 2
    grpo.compute_gradients(model, head_options, minibatch, cfg)

    ours = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
    assert ours.keys() == w.keys()
    for name, grad in ours.items():
        exact = w[name].grad
        assert (grad - exact).norm() <= 1e-5 * exact.norm(), name


@pytest.mark.house
@pytest.mark.parametrize("name", CLEVER)
def test_a_clever_file_quotes_its_plain_sentence(name):
    said = ast.get_docstring(ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8")))
    (quoted,) = re.findall("In examples/naive.py this is `([^`]+)`", said)
    assert quoted in PAGE


@pytest.mark.house
def test_it_is_one_page():
    assert PAGE.count("\n") <= 150
