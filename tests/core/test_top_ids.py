"""The KL over a teacher's likeliest ids (loss_fn.topk_logits_k): the head's log-probabilities at them, the loss, and a
whole step, against float64 logits and Python floats."""

import copy
import math
from functools import partial

import pytest
import torch
from dist_case import make_samples, settings
from loop import train_once
from ranks import ranks
from tiny import VOCAB_SIZE, make_tiny

from base.system.ranks import start_process_group
from config import LossConfig, SequencePackingConfig
from head import HeadOptions, LossOptions, choose_loss_path, linear_loss
from kernels.backend import KernelBackend
from kernels.logits import LogitOptions
from kernels.logp import linear_logp
from loss import policy_loss
from model import load_policy
from reference import Teacher

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = [KernelBackend("torch"), KernelBackend("triton", 16)]
DISTILS = {"reference_policy_kl_penalty": 1.0, "topk_logits_k": 4, "kl_input_clamp_value": None}


def by_hand(top_RJ, ref_RJ, mask_R):
    """The mean over the trained tokens of the KL with all other ids as one, in Python floats."""
    total, count = 0.0, 0
    for tops, refs, trained in zip(top_RJ, ref_RJ, mask_R, strict=True):
        if not trained:
            continue
        count += 1
        p, q = [math.exp(x) for x in tops], [math.exp(x) for x in refs]
        for j in range(len(p)):
            total += p[j] * (tops[j] - refs[j])
        if sum(p) < 1 - 1e-9:
            total += (1 - sum(p)) * math.log((1 - sum(p)) / (1 - sum(q)))
    return total / count


def oracle(hidden_RD, weight_VD, temperature, softcap, vocab):
    logits_RV = hidden_RD @ weight_VD[:vocab].T
    if softcap:
        logits_RV = softcap * torch.tanh(logits_RV / softcap)
    return (logits_RV / temperature).log_softmax(-1)


@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("backend", BACKENDS, ids=["torch", "triton"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_log_probabilities_at_the_likeliest_ids_and_their_gradients(backend, dtype, limit, softcap):
    """Targets are among these ids in some rows; two rows of the weight are padding."""
    generator = torch.Generator().manual_seed(0)
    hidden_RD = torch.randn(35, 8, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
    weight_VD = torch.randn(39, 8, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
    weight_VD[37:] = 50  # the largest logits, of no id
    target_R = torch.randint(37, (35,), generator=generator).to(DEVICE)
    slope_RJ = torch.randn(35, 5, generator=generator).to(DEVICE)
    slope_R = torch.randn(35, generator=generator).to(DEVICE)
    options = LogitOptions(0.7, 37, backend=backend, softcap=softcap)
    ours = [x.clone().requires_grad_() for x in (hidden_RD, weight_VD)]
    theirs = [x.double().requires_grad_() for x in (hidden_RD, weight_VD)]
    want_RV = oracle(*theirs, 0.7, softcap, 37)

    alone_R, _, alone_RJ, ids_RJ = linear_logp(hidden_RD, weight_VD, target_R, options, top_k=5)
    logp_R, entropy_R, logp_RJ, _ = linear_logp(*ours, target_R, options, ids_TJ=ids_RJ)
    assert torch.equal(ids_RJ, want_RV.topk(5).indices) and (ids_RJ == target_R[:, None]).any()
    assert torch.equal(alone_RJ, logp_RJ) and torch.equal(alone_R, logp_R)
    assert (logp_RJ - want_RV.gather(1, ids_RJ)).abs().max() <= 1e-5

    ((logp_RJ * slope_RJ).sum() + ((logp_R + 0.3 * entropy_R) * slope_R).sum()).backward()
    want_R = want_RV.gather(1, target_R[:, None])[:, 0] - 0.3 * (want_RV.exp() * want_RV).sum(-1)
    ((want_RV.gather(1, ids_RJ) * slope_RJ).sum() + (want_R * slope_R).sum()).backward()
    for got, want in zip(ours, theirs, strict=True):
        assert (got.grad - want.grad).norm() <= limit * want.grad.norm()
    assert not ours[1].grad[37:].any()


@pytest.mark.parametrize("top_k", [1, 4, 30, 99])
def test_the_loss_is_the_kl_with_the_rest_as_one(top_k):
    """30 ids: from 30 on it is the whole KL. What is masked may be NaN."""
    generator = torch.Generator().manual_seed(1)
    hidden_RD = torch.randn(20, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weight_VD = torch.randn(30, 8, generator=generator, dtype=torch.float64)
    target_R = torch.randint(30, (20,), generator=generator)
    mask_R = torch.arange(20) % 6 != 5
    teacher_RD = hidden_RD.detach() + 0.5 * torch.randn(20, 8, generator=generator)
    ref_R, _, ref_RJ, ids_RJ = linear_logp(teacher_RD, weight_VD, target_R, LogitOptions(), top_k=top_k)
    ref_RJ[~mask_R] = torch.nan
    cfg = LossConfig(**DISTILS | {"topk_logits_k": top_k})
    zero_R = torch.zeros(20, dtype=torch.float64)
    pack = {"old_logp_R": None, "sampler_logp_R": zero_R, "adv_R": zero_R, "mask_R": mask_R, "seq_R": mask_R * 0}
    counts = {"num_valid_tokens": 17, "num_valid_seqs": 1}
    loss_of = partial(policy_loss, **pack, **counts, ref_logp_R=ref_R, ref_logp_RJ=ref_RJ, cfg=cfg)
    path = choose_loss_path(policy_loss, cfg, has_old=False, has_ref=True)
    assert (path.kind, path.zero_adv_has_grad) == ("two passes", True)
    options = HeadOptions(loss=LossOptions(path=path))
    loss, metrics, _ = linear_loss(
        hidden_RD, weight_VD, target_R, loss_of, options, num_grad_rows=20, ids_RJ=ids_RJ, needs_unfiltered=True
    )
    loss.backward()

    other_RD = hidden_RD.detach().clone().requires_grad_()
    logp_RV = oracle(other_RD, weight_VD, 1, None, None)
    expected = by_hand(logp_RV.gather(1, ids_RJ).tolist(), ref_RJ.tolist(), mask_R.tolist())
    assert float(loss) == pytest.approx(expected, rel=1e-5) and float(metrics["kl_penalty"]) == float(loss)
    if top_k >= 30:
        ref_RV = oracle(teacher_RD, weight_VD, 1, None, None)
        kl = (logp_RV.exp() * (logp_RV - ref_RV)).sum(-1)[mask_R].mean()
        assert float(loss) == pytest.approx(float(kl), rel=1e-5)
        kl.backward()
        assert (hidden_RD.grad - other_RD.grad).norm() <= 1e-5 * other_RD.grad.norm()


def distilled(folder, teacher_folder, place, mesh, max_tokens):
    """(metrics, gradients) of a step on the KL alone."""
    policy, teacher = (load_policy(file, device="cpu", mesh=mesh) for file in (folder, teacher_folder))
    cfg = settings(loss_fn=DISTILS, policy={"sequence_packing": SequencePackingConfig(train_mb_tokens=max_tokens)})
    samples, adv_B = make_samples(VOCAB_SIZE)
    reference = Teacher(teacher)
    return train_once(policy, samples, [0.0 for _ in adv_B], cfg, place, reference=reference)


@ranks(2, seconds=300)
def distilled_by_two(folder, teacher_folder):
    place, _ = start_process_group(tp_size=1)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    return distilled(folder, teacher_folder, place, mesh, 40)


@pytest.mark.slow
def test_a_step_distils_as_transformers_would_in_packs_and_on_two_ranks(one_rank, tiny, tmp_path):
    ranks_of_one, _, mesh = one_rank
    theirs = make_tiny(tmp_path, seed=3).double()
    metrics, gradients = distilled(tiny[0], tmp_path, ranks_of_one, mesh, 100)
    oracle = copy.deepcopy(tiny[1]).double()
    samples, _ = make_samples(VOCAB_SIZE)
    num_tokens = sum(int(s.sequence.tokens["mask"].sum()) for s in samples)
    total = 0.0
    for sample in samples:
        sequence = sample.sequence
        ids = torch.tensor(sequence.token_ids)
        rows = len(sequence.prompt_ids) - 1 + torch.from_numpy(sequence.tokens["mask"].nonzero()[0])
        both = [(model(ids[None]).logits[0, rows, :VOCAB_SIZE] / 0.8).log_softmax(-1) for model in (oracle, theirs)]
        ref = both[1].detach().topk(4)
        logp = both[0].gather(1, ref.indices)
        rest, ref_rest = 1 - logp.exp().sum(1), 1 - ref.values.exp().sum(1)
        kl_R = (logp.exp() * (logp - ref.values)).sum(1) + rest * (rest / ref_rest).log()
        (kl_R.clamp(max=10).sum() / num_tokens).backward()
        total += float(kl_R.clamp(max=10).sum()) / num_tokens
    assert metrics["kl_penalty"] == pytest.approx(total, rel=1e-4) and total > 0.1
    largest = max(param.grad.norm() for param in oracle.parameters())
    for name, param in oracle.named_parameters():
        if name in gradients:
            assert (gradients[name] - param.grad).norm() <= 1e-3 * param.grad.norm() + 1e-6 * largest, name
    for metrics_of_rank, gradients_of_rank in distilled_by_two(tiny[0], tmp_path):
        assert metrics_of_rank["kl_penalty"] == pytest.approx(metrics["kl_penalty"], rel=1e-5)
        for name, gradient in gradients.items():
            assert (gradients_of_rank[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7 * largest, name
