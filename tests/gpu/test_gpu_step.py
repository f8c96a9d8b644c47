"""A training step of random weights, sharded over one rank: each way of the output layer, compiled blocks, waits."""

import warnings

import pytest
import torch

from base.hf.weights import sharded_parameters
from bench.train_step import QWEN, TINY, TOKENIZER, WAYS, config_of, head_of, random_batch, random_policy
from grpo import compute_gradients

pytestmark = pytest.mark.gpu

MOST_WAITS = 6  # of the host for the GPU, in forward and backward of all packs of a step: estimated, not yet measured


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def step(request, place):
    """(policy, a batch of packs)."""
    hf = TINY if place.is_tiny else QWEN | {"num_hidden_layers": 2}
    policy = random_policy(hf | {"tie_word_embeddings": request.param}, place.device, "bfloat16")
    batch = random_batch(config_of("one pass"), TOKENIZER[hf["vocab_size"]], 16, place.ranks, place.device)
    return policy, batch


def gradients(step, way, device):
    """(all gradients in one vector, those of the output layer's weight)."""
    policy, batch = step
    compute_gradients(policy, head_of(way, policy, device), batch, config_of(way))
    shards = {name: param.grad.to_local().flatten() for name, param in sharded_parameters(policy).items()}
    policy.zero_grad(set_to_none=True)
    head = "lm_head.weight" if "lm_head.weight" in shards else "model.embed_tokens.weight"
    return torch.cat(list(shards.values())), shards[head]


def test_each_way_has_the_gradient_of_plain_torch(step, place, check, relative_error):
    """Compiled blocks round less often, so they may differ more."""
    policy, _ = step
    exact, exact_head = gradients(step, "torch", place.device)
    for way in WAYS.keys() - {"torch"}:
        found, found_head = gradients(step, way, place.device)
        check(f"step, {way}: gradient", relative_error(found, exact), 1e-2)
        check(f"step, {way}: gradient of the head", relative_error(found_head, exact_head), 1e-2)
    if place.is_tiny:
        return
    policy.compile_blocks()
    found, found_head = gradients(step, "torch", place.device)
    check("step, compiled: gradient", relative_error(found, exact), 3e-2)
    check("step, compiled: gradient of the head", relative_error(found_head, exact_head), 3e-2)


def test_the_host_hardly_waits_for_the_gpu(step, place, check):
    """A wait in each pack leaves the GPU idle while the host prepares what comes next."""
    gradients(step, "one pass", place.device)  # what compiles or allocates may wait
    if not place.is_tiny:
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradients(step, "one pass", place.device)
    if not place.is_tiny:
        torch.cuda.set_sync_debug_mode("default")
    waits = [f"{w.filename}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message)]
    print("\n".join(waits))
    check("waits for the GPU in forward and backward", len(waits), MOST_WAITS)


def test_inputs_in_host_memory_leave_the_gradient_as_it_is(place, check):
    """To the bit: activation_checkpointing=offload copies on a stream of its own."""
    hf = TINY if place.is_tiny else QWEN | {"num_hidden_layers": 4}
    found = []
    for recompute in (True, "offload", "offload"):
        policy = random_policy(hf, place.device, "bfloat16", recompute)
        policy.deterministic = True
        batch = random_batch(config_of("torch"), TOKENIZER[hf["vocab_size"]], 16, place.ranks, place.device)
        found.append(gradients((policy, batch), "torch", place.device)[0])
    for gradient in found[1:]:
        num_other = (gradient != found[0]).sum().item()
        check("step, inputs in host memory: elements of the gradient that differ", num_other, 0)
