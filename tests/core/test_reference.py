"""The reference policy: where its weights lie, in which type, and that nothing is lost by that."""

from dataclasses import replace

import pytest
import torch
from dist_case import settings
from families import make_family
from hf_folders import make_pack, response_rows

from base.hf.weights import sharded_parameters
from head import HeadOptions, response_logps
from model import load_policy
from reference import Reference, Teacher
from run.build import reference_dtype


@pytest.fixture
def policy(one_rank, tiny):
    return load_policy(tiny[0], device="cpu", mesh=one_rank[2], precision="bfloat16")


@torch.no_grad()
def logps(model):
    pack = make_pack([30, 5])
    pos_R, target_R = response_rows([30, 5], pack[0])
    return torch.stack(response_logps(model, (*pack, pos_R), target_R, HeadOptions()))


@torch.no_grad()
def shift(model):
    for param in model.parameters():
        param.mul_(1.1)


def shards(model):
    return {name: param.to_local().detach().clone() for name, param in sharded_parameters(model).items()}


def test_in_the_precision_of_the_forward_nothing_is_lost(policy):
    first = logps(policy)
    references = [Reference(policy), Reference(policy, torch.bfloat16)]
    shift(policy)
    moved, moved_shards = logps(policy), shards(policy)
    assert not torch.equal(moved, first)
    for reference in references:
        with reference.in_place_of(policy):
            assert torch.equal(logps(policy), first)
        assert torch.equal(logps(policy), moved)
        assert all(torch.equal(shard, moved_shards[name]) for name, shard in shards(policy).items())
    sizes = [sum(rows.nbytes for rows in reference.shards.values()) for reference in references]
    assert sizes[0] == 2 * sizes[1] > 0


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_moe", "glm4_moe"])
def test_a_teacher_scores_with_its_own_weights_and_shape(family, policy, one_rank, tmp_path):
    """prime-rl#2189: against the log-probabilities of transformers' model. The buffers of a teacher in bfloat16 stay in
    float32, such as rotary frequencies."""
    theirs = make_family(family, vocab_size=policy.config.vocab_size)
    theirs.save_pretrained(tmp_path)
    teacher = load_policy(tmp_path, device="cpu", mesh=one_rank[2], frozen=True)
    before, reference, pack = logps(policy), Teacher(teacher), make_pack([30, 5])
    with reference.in_place_of(policy) as scorer, torch.no_grad():
        pos_R, target_R = response_rows([30, 5], pack[0])
        logp_R, _ = response_logps(scorer, (*pack, pos_R), target_R, HeadOptions(temperature=0.7))
        parts = [theirs(ids[None]).logits[0] for ids in pack[0].split([30, 5])]
    want_RV = (torch.cat(parts)[pos_R] / 0.7).log_softmax(-1)
    torch.testing.assert_close(logp_R, want_RV.gather(1, target_R[:, None])[:, 0], rtol=0, atol=1e-4)
    assert torch.equal(logps(policy), before) and reference.shards == {}
    rounded = load_policy(tmp_path, device="cpu", mesh=one_rank[2], precision="bfloat16", frozen=True)
    routers = {param for router in rounded.model.routers for param in router.parameters()}
    assert len(routers) == len(teacher.model.routers) and not any(param.requires_grad for param in rounded.parameters())
    assert {param.dtype for param in rounded.parameters() if param not in routers} == {torch.bfloat16}
    assert all(tensor.dtype == torch.float32 for tensor in [*routers, *rounded.buffers()])
    rounded_R, _ = response_logps(rounded, (*pack, pos_R), target_R, HeadOptions(temperature=0.7))
    assert (rounded_R - logp_R).abs().mean() <= 0.05


def test_it_is_an_average_in_float32_or_a_copy(policy):
    grpo = settings(grpo={"ref_policy_update_period": 2, "ref_policy_update_alpha": 0.25}).grpo
    average, copy, first = Reference(policy), Reference(policy, torch.bfloat16), shards(policy)
    shift(policy)
    now = shards(policy)
    average.follow(policy, grpo, 1)
    assert all(torch.equal(rows, first[name]) for name, rows in average.shards.items())
    average.follow(policy, grpo, 2)
    copy.follow(policy, replace(grpo, ref_policy_update_alpha=1.0), 2)
    for name, shard in now.items():
        assert torch.equal(average.shards[name], torch.lerp(first[name], shard, 0.25))
        assert torch.equal(copy.shards[name], shard.bfloat16()) and copy.shards[name].dtype == torch.bfloat16


def test_which_type_the_config_asks_for():
    def dtype(alpha=1.0, precision="bfloat16"):
        grpo = {"ref_policy_update_period": 2, "ref_policy_update_alpha": alpha}
        return reference_dtype(settings(grpo=grpo, policy={"precision": precision}))

    assert dtype() == torch.bfloat16
    assert dtype(alpha=0.5) == dtype(precision="float32") == torch.float32
