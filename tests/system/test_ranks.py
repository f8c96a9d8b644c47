"""Two ranks compute what one does: gradients of a batch however it is cut, and tokens of an engine over two ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from dist_case import PROMPTS, alone, make_samples, packs_of
from loop import train_once
from safetensors.torch import load_file

import data
from engine import SamplingOptions
from hf.tokenizer import Tokenizer
from hf.weights import full_tensors
from model import load_policy

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def two_ranks(tiny, tmp_path_factory):
    """What tests/helpers/dist_worker.py wrote: (gradients, [rank 0's json, rank 1's])."""
    results = tmp_path_factory.mktemp("two_ranks")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "tests/helpers/dist_worker.py",
        str(tiny[0]),
        str(results),
    ]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return (
        load_file(results / "gradients.safetensors"),
        [json.loads((results / f"rank_{rank}.json").read_text()) for rank in range(2)],
    )


@pytest.fixture
def policy(one_rank, tiny):
    _, device, mesh = one_rank
    model = load_policy(tiny[0], device=device, mesh=mesh)
    model.temperature = 0.8
    model.vocab_limit = Tokenizer(tiny[0]).vocab_size
    return model


def relative(a, b):
    assert a.keys() == b.keys()
    return max(((a[name] - b[name]).norm() / b[name].norm()).item() for name in a)


@pytest.fixture
def step(policy):
    """(samples, advantages)."""
    return make_samples(policy.vocab_limit)


def test_one_pack_equals_transformers_sequence_by_sequence_in_float64(policy, tiny, step, one_rank):
    samples, adv_B = step
    _, ours = train_once(policy, samples, adv_B, packs_of(10_000), one_rank[0])
    oracle = tiny[1].double()
    oracle.zero_grad()
    num_tokens = sum(int(s.mask.sum()) for s in samples)
    for s, adv in zip(samples, adv_B, strict=True):  # ratio 1 on policy: the gradient of -A logp / N, by hand
        ids = torch.tensor([*s.prompt_ids, *s.output_ids.tolist()])
        logits_TV = oracle(ids[None]).logits[0, len(s.prompt_ids) - 1 : -1, : policy.vocab_limit] / 0.8
        logp_T = logits_TV.log_softmax(-1).gather(1, ids[len(s.prompt_ids) :, None])[:, 0]
        (-adv * logp_T[torch.from_numpy(s.mask)].sum() / num_tokens).backward()
    expected = {name: param.grad.float() for name, param in oracle.named_parameters() if name != "lm_head.weight"}
    tiny[1].float().zero_grad(set_to_none=True)
    assert relative(ours, expected) <= 1e-5
    assert ours["model.embed_tokens.weight"][policy.vocab_limit :].abs().max() == 0  # padded rows get no gradient


def test_micro_batches_in_any_order_and_two_unequal_ranks_give_the_same_gradient(policy, step, two_ranks, one_rank):
    samples, adv_B = step
    metrics, gradients = train_once(policy, samples, adv_B, packs_of(10_000), one_rank[0])
    metrics_many, many = train_once(policy, samples, adv_B, packs_of(40), one_rank[0])
    packs = data.pack_samples(alone(samples[::-1], adv_B[::-1]), 40)
    assert len(packs) > 5
    shuffled = [packs[i] for i in np.random.default_rng(0).permutation(len(packs))]
    with mock.patch("batch.pack_samples", lambda *_: shuffled):
        metrics_other, other = train_once(policy, samples, adv_B, packs_of(40), one_rank[0])
    for computed in (many, other, two_ranks[0]):
        assert relative(computed, gradients) <= 1e-6
    del metrics["train_tokens"]  # a prompt is computed once for each pack that shares it
    for computed in (metrics_many, metrics_other, two_ranks[1][0]["metrics"], two_ranks[1][1]["metrics"]):
        del computed["train_tokens"]
        assert computed == pytest.approx(metrics, rel=1e-6, abs=1e-6, nan_ok=True)


def test_engine_over_two_ranks_gives_the_tokens_of_one(engine, policy, two_ranks):
    engine.sync(full_tensors(policy, engine.dtype), 0)
    completions = engine.generate(PROMPTS, [0] * len(PROMPTS), SamplingOptions(0.0, 24))
    single = [completion.ids.tolist() for completion in completions]
    assert two_ranks[1][0]["greedy"] == single and two_ranks[1][1]["greedy"] == single
    assert len({tuple(ids) for ids in single}) == len(PROMPTS)  # not one stuck answer


def test_ranks_of_one_engine_go_by_the_verdicts_of_its_first(two_ranks, tiny):
    conversations = two_ranks[1][0]["conversations"]
    assert conversations == two_ranks[1][1]["conversations"] and len(conversations) == 4
    words = Tokenizer(tiny[0]).backend.encode("rank 0").ids
    for _, ids, reward, num_turns in conversations:
        assert reward == num_turns and (
            num_turns == 1 or any(ids[i : i + len(words)] == words for i in range(len(ids)))
        )
    assert max(num_turns for *_, num_turns in conversations) == 2
