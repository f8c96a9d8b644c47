"""Carry-over with everything else switched on: two ranks, a lost request, a second life, and what a naive sampler says.

tests/helpers/carry_worker.py runs it with a stand-in for vLLM, whose samples depend on weights, prompt and seed alone.
"""

import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
import torch
from record_samples import recorded, versions_of_first_reply
from safetensors.torch import load_file
from small_run import ROOT, STARTER

from base.hf.tokenizer import Tokenizer
from base.system.exits import host_name
from envs import exact_number
from rollout import sample_seed

pytestmark = pytest.mark.long
TEMPERATURE, MAX_AGE, NUM_PROMPTS, NUM_STEPS = 1.8, 2, 4, 6


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    """(run folder, what the two lives said, step -> its samples over both)."""
    work = tmp_path_factory.mktemp("carry")
    done = subprocess.run(
        [sys.executable, ROOT / "tests/helpers/carry_worker.py", work], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads((work / "answer.json").read_text())
    return Path(answer["lost"]["run"]), answer, recorded(work / "tokens.jsonl")


def test_a_lost_request_ends_the_run_in_time(lives):
    _, answer, _ = lives
    lost, name = answer["lost"], f"rank 1 on {host_name()}"
    assert lost["codes"][1] == 4 and lost["codes"][0] in (1, 4) and lost["exit"]["code"] == 4
    assert lost["exit"]["reason"].startswith(f"hung: {name} reached no collective; {name}: step ")
    assert answer["resumed"]["codes"] == [0, 0]


def test_every_prompt_is_used_once_and_no_token_is_too_old(lives):
    """Groups are numbered by their place in the data; trained are the first of unequal rewards, in that order."""
    _, _, steps = lives
    assert list(steps) == list(range(1, NUM_STEPS + 1))
    place, rows = 0, []
    for step, samples in steps.items():
        groups = [list(group) for _, group in groupby(samples, key=lambda s: s["prompt"])]
        assert [group[0]["prompt"] for group in groups] == list(range(place, place + len(groups)))
        assert all([s["index"] for s in group] == list(range(4)) for group in groups)
        place += len(groups)
        rows += [(group[0]["dataset"], group[0]["row_id"]) for group in groups]
        mixed = [group for group in groups if len({s["reward"] for s in group}) > 1]
        assert len(mixed) >= NUM_PROMPTS > len([g for g in mixed if g not in groups[-NUM_PROMPTS:]])
        trained = [s for s in samples if s["trained"]]
        assert trained == [s for group in mixed[:NUM_PROMPTS] for s in group]
        assert all(step - 1 - MAX_AGE <= version < step for s in samples for version in s["versions"])
    assert len(set(rows)) == len(rows)
    ages = {step - 1 - s["versions"][0] for step, samples in steps.items() for s in samples}
    assert ages == {0, 1, 2}
    assert any(len(set(versions_of_first_reply(s))) > 1 for samples in steps.values() for s in samples)


@pytest.fixture(scope="module")
def models(lives):
    """transformers' model by the steps that it was trained, in float64."""
    from transformers import AutoModelForCausalLM

    folder, models = lives[0], []
    for version in range(NUM_STEPS):
        model = AutoModelForCausalLM.from_pretrained(STARTER, dtype=torch.float64).eval()
        if version:
            files = sorted((folder / "checkpoints" / f"step_{version:06d}").glob("*.safetensors"))
            shards = [load_file(file) for file in files]
            names = [name for name in shards[0] if name.startswith("param.")]
            weights = {name[6:]: torch.cat([shard[name] for shard in shards]).double() for name in names}
            missing, unknown = model.load_state_dict(weights, strict=False)
            assert not unknown and set(missing) <= {"lm_head.weight"}
        models.append(model)
    return models


def test_every_token_is_what_a_naive_sampler_draws(lives, models):
    """Token by token from the weights of its version, the seed of its turn and all ids before it."""
    for samples in lives[2].values():
        for sample in samples:
            check_sample(sample, models)


def check_sample(sample, models):
    ids = torch.tensor([sample["prompt_ids"] + sample["output_ids"]])
    start, turn, generator = len(sample["prompt_ids"]), -1, None
    logp_by_version = {}
    for version in set(sample["versions"]):
        with torch.no_grad():
            logits_TV = models[version](ids).logits[0, :, : Tokenizer(STARTER).vocab_size]
        logp_by_version[version] = (logits_TV / TEMPERATURE).log_softmax(-1)
    for k, is_sampled in enumerate(sample["mask"]):
        if not is_sampled:
            generator = None
            assert sample["sampler_logps"][k] == 0
            continue
        if generator is None:
            turn += 1
            turns = (turn,) if turn else ()
            generator = torch.Generator().manual_seed(sample_seed(42, sample["prompt"], sample["index"], *turns))
        logp_V = logp_by_version[sample["versions"][k]][start + k - 1]
        point = torch.rand((), generator=generator, dtype=torch.float64)
        below_V = logp_V.exp().cumsum(0)
        token = int(torch.searchsorted(below_V, below_V[-1] * point, right=True))
        assert token == sample["output_ids"][k], (sample, k)
        assert abs(float(logp_V[token]) - sample["sampler_logps"][k]) <= 1e-5
    assert turn + 1 == sample["num_turns"]


def test_every_environment_has_its_part(lives):
    seen = {"exact": 0, "reward_model": 0, "carry_worker:TwoTurns": 0}
    tokenizer = Tokenizer(STARTER)
    for samples in lives[2].values():
        for s in samples:
            seen[s["env_name"]] += 1
            reply = tokenizer.decode(s["output_ids"])
            if s["env_name"] == "reward_model":
                assert s["reward"] == sum(map(ord, reply)) % 7 / 7
            elif s["env_name"] == "exact":
                is_number = exact_number(reply) is not None and len(s["output_ids"]) < 12
                assert (s["outcome"] == "parse_fail") != is_number
            else:
                assert s["num_turns"] == (2 if len(s["mask"]) > 12 or False in s["mask"] else 1)
    assert all(seen.values()), seen
