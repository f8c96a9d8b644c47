"""The optimizer: schedules against transformers', groups with a rate each, Muon with AdamW."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import config
import optim
from base.system.ranks import start_process_group
from head import HeadOptions
from run import checkpoint, restore

ADAMW = config.OptimizerConfig(kwargs=config.OptimizerKwargs(lr=1e-2, weight_decay=0.1))
MUON = replace(ADAMW, name="torch.optim.Muon", muon_lr=2e-2, muon_momentum=0.9)


@pytest.mark.parametrize("start", [0.0, 0.1])
def test_the_weight_of_the_entropy_bonus_is_that_of_a_plain_loop(start):
    """200 steps, TRL 1.16's rule: from 0 it rises; it is applied only after a step at or below the target."""
    cfg = config.LossConfig(entropy_target=0.3, entropy_coef=start, entropy_coef_delta=0.01, entropy_coef_max=0.25)
    entropies = [0.3 + 0.4 * math.sin(step / 15) for step in range(198)] + [0.3, math.nan]  # NaN: no token was trained
    bonus, coef, last, applied, want = optim.EntropyBonus(), start, math.inf, [], []
    for entropy in entropies:
        options = bonus.applied_to(HeadOptions(), cfg, torch.device("cpu"))
        applied.append(options.loss.call.keywords["entropy_coef"].item())
        want.append(coef if last <= 0.3 else 0.0)
        bonus.follow({"entropy": entropy}, cfg)
        bonus = optim.EntropyBonus(**json.loads(json.dumps(asdict(bonus))))  # a checkpoint at each step
        if entropy <= 0.3:
            coef, last = min(coef + 0.01, 0.25), entropy
        elif entropy > 0.3:
            coef, last = max(coef - 0.01, 0.0), entropy
        assert bonus.metrics == {"entropy_coef": coef}
    assert applied == pytest.approx(want, abs=1e-7)  # float32
    assert min(applied) == 0 and max(applied) == 0.25, "it fell to 0 and rose to its maximum"
    assert applied[60:].count(0) > 5 and applied[-1] > 0, "and rose again"


@pytest.mark.parametrize("target", [None, 0.5])
def test_a_policy_that_loses_its_entropy_keeps_it_at_the_target(target):
    """One of four tokens is always right: without a target the policy becomes certain of it."""
    cfg = config.LossConfig(entropy_target=target, entropy_coef_delta=0.01, entropy_coef_max=3.0)
    bonus, options, entropies = optim.EntropyBonus(), HeadOptions(), []
    logit_V = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    adv_R = torch.tensor([3.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    one_R = torch.ones(4, dtype=torch.float64)
    for _ in range(1500):
        logp_R = logit_V.log_softmax(0)
        entropy = -(logp_R.exp() * logp_R).sum()
        call = bonus.applied_to(options, cfg, torch.device("cpu")).loss.call
        loss, _ = call(
            logp_R,
            old_logp_R=None,
            sampler_logp_R=logp_R.detach(),
            adv_R=adv_R * logp_R.detach().exp(),
            mask_R=one_R,
            seq_R=torch.arange(4),
            num_valid_tokens=1,
            num_valid_seqs=1,
            entropy_R=entropy / 4 * one_R,
            cfg=cfg,
        )
        (slope_V,) = torch.autograd.grad(loss, logit_V)
        with torch.no_grad():
            logit_V -= 0.1 * slope_V
        bonus.follow({"entropy": entropy.item()}, cfg)
        entropies.append(entropy.item())
    if target is None:
        assert entropies[-1] < 0.1
    else:
        assert all(abs(entropy - target) < 0.1 for entropy in entropies[-500:])


def test_without_a_target_the_bonus_stays():
    options, cfg = HeadOptions(), config.LossConfig(entropy_coef=0.1)
    for bonus in (optim.EntropyBonus(), optim.EntropyBonus(coef=0.4)):  # a checkpoint's, of a run with a target
        bonus.follow({}, cfg)
        assert bonus == optim.EntropyBonus() and bonus.metrics == {}
        assert bonus.applied_to(options, cfg, torch.device("cpu")) is options


def rates(num_steps, **keys):
    """The factor of each step of a run."""
    cfg = config.SchedulerConfig(**keys)
    return [optim.learning_rate_factor(cfg, step, num_steps) for step in range(1, num_steps + 1)]


def rates_of_transformers(schedule, num_steps, **keys):
    """The rates at which a run with that schedule of transformers steps an optimizer of rate 1."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = schedule(optimizer, num_training_steps=num_steps, **keys)
    factors = []
    for _ in range(num_steps):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return factors


@pytest.mark.parametrize(("num_steps", "warmup"), [(1, 0), (3, 0), (10, 0), (10, 4), (5, 5), (4, 9)])
def test_schedules_are_those_of_transformers(num_steps, warmup):
    from transformers import optimization as oracle

    keys = {"warmup_steps": warmup, "warmup_start_factor": 0.0}
    for name, schedule in (
        ("linear", oracle.get_linear_schedule_with_warmup),
        ("cosine", oracle.get_cosine_schedule_with_warmup),
    ):
        expected = rates_of_transformers(schedule, num_steps, num_warmup_steps=warmup)
        assert rates(num_steps, name=name, **keys) == pytest.approx(expected, abs=1e-12)
    schedule = oracle.get_cosine_with_min_lr_schedule_with_warmup
    expected = rates_of_transformers(schedule, num_steps, num_warmup_steps=warmup, min_lr_rate=0.1)
    # transformers lifts the warm-up by min_lr_rate too, here it is the decay's alone
    assert rates(num_steps, name="cosine", min_factor=0.1, **keys)[warmup:] == pytest.approx(expected[warmup:])


def test_rates_by_hand_and_none_of_them_is_wasted():
    assert rates(3, warmup_steps=0, name="linear") == pytest.approx([1, 2 / 3, 1 / 3])
    assert rates(4, warmup_steps=0) == [1, 1, 1, 1]
    assert rates(4, warmup_steps=2, warmup_start_factor=0.5) == [0.5, 0.75, 1, 1]
    linear = rates(5, warmup_steps=2, warmup_start_factor=0.5, name="linear")
    assert linear == pytest.approx([0.5, 0.75, 1, 2 / 3, 1 / 3])
    assert rates(4, warmup_steps=0, name="linear", min_factor=0.2) == pytest.approx([1, 0.8, 0.6, 0.4])
    half = math.sqrt(0.5)
    cosine = rates(4, warmup_steps=0, name="cosine", min_factor=0.1)
    assert cosine == pytest.approx([1, 0.1 + 0.45 * (1 + half), 0.55, 0.1 + 0.45 * (1 - half)])


class Toy(nn.Module):
    """Parameters named and shaped as a decoder's: an embedding, blocks with uneven matrices, norms, biases."""

    def __init__(self, shapes=((6, 9), (9, 6), (5, 9))):
        super().__init__()
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(11, 9), "norm": nn.LayerNorm(9)})
        self.model["layers"] = nn.ModuleList(nn.Linear(columns, rows) for rows, columns in shapes)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.1)

    def forward(self, gradients):
        """A loss whose gradient is `gradients`, name -> tensor."""
        return sum((param * gradients[name]).sum() for name, param in self.named_parameters())


def gradients_of(model, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(param.shape, generator=generator) for name, param in model.named_parameters()}


def train(model, optimizer, steps):
    for step in steps:
        optim.set_learning_rate(optimizer, config.SchedulerConfig(warmup_steps=2), step, 9)
        model(gradients_of(model, step)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert all(param.grad is None for param in model.parameters())


def test_each_group_keeps_its_own_rate():
    model = Toy()
    optimizer = optim.build_optimizer(model, MUON)
    optim.set_learning_rate(optimizer, config.SchedulerConfig(warmup_steps=4, warmup_start_factor=0.5), 3, 9)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2 * 0.75, 2e-2 * 0.75]
    optim.set_learning_rate(optimizer, config.SchedulerConfig(warmup_steps=4), 5, 9)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 2e-2]
    same = optim.build_optimizer(model, replace(MUON, muon_lr=None))
    assert [group["lr"] for group in same.param_groups] == [1e-2, 1e-2]
    with pytest.raises(AssertionError, match=r"policy\.optimizer\.name=torch\.optim\.Adam"):
        optim.build_optimizer(model, replace(MUON, name="torch.optim.Adam"))


def test_adamw_is_torchs_and_one_group():
    model, twin = Toy(), Toy()
    optimizer = optim.build_optimizer(model, ADAMW)
    expected = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.1, betas=(0.9, 0.999), eps=1e-8)
    for seed in range(3):
        model(gradients_of(model, seed)).backward()
        twin(gradients_of(twin, seed)).backward()
        for either in (optimizer, expected):
            either.step()
            either.zero_grad()
    assert len(optimizer.param_groups) == 1
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-7)


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest():
    """A step by hand: momentum (1 - m) g, Nesterov, singular values near 1, scaled to 0.2 sqrt(longer side)."""
    model = Toy()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = optim.build_optimizer(model, MUON)
    gradients = gradients_of(model, 1)
    model(gradients).backward()
    optimizer.step()
    keys = {name: set(optimizer.state[param]) for name, param in model.named_parameters()}
    matrices = {f"model.layers.{i}.weight" for i in range(3)}
    assert {name for name in keys if keys[name] == {"momentum_buffer"}} == matrices
    assert all(keys[name] == {"step", "exp_avg", "exp_avg_sq"} for name in keys.keys() - matrices)
    for name, param in model.named_parameters():
        if name not in matrices:
            first = before[name] * (1 - 1e-2 * 0.1) - 1e-2 * gradients[name].sign()  # the moments cancel in step 1
            assert torch.allclose(param, first, atol=1e-5), name
            continue
        step = (before[name] * (1 - 2e-2 * 0.1) - param.detach()) / (2e-2 * 0.2 * math.sqrt(max(param.shape)))
        left, _, right = torch.linalg.svd(gradients[name], full_matrices=False)
        singular = left.T @ step @ right.T  # in the gradient's own basis the step is diagonal, about the identity
        assert 0.6 < singular.diagonal().min() and singular.diagonal().max() < 1.25, (name, singular.diagonal())
        assert (singular - singular.diagonal().diag()).abs().max() < 0.05, name


def as_one(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded(rank_count):
    model = Toy(((64, 96), (96, 64), (97, 64)))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (rank_count,)))
    model.set_gradient_divide_factor(float(rank_count))  # every rank has the whole gradient
    model.set_force_sum_reduction_for_comms(True)
    return model


@ranks(2)
def two_ranks(work):
    """Two steps, save, a third meanwhile. A fresh pair that loads them makes the third again, the same to the bit."""
    place, _ = start_process_group(tp_size=1)
    model = sharded(2)
    optimizer = optim.build_optimizer(model, MUON)
    train(model, optimizer, (1, 2))
    for param in model.parameters():  # as an optimizer that works on the rows of each rank would have it
        optimizer.state[param]["of_my_rows"] = param.to_local().clone()
    saver = checkpoint.Saver(work / "checkpoints", config.CheckpointingConfig(), place)
    saver.save(2, model, optimizer, {}, {}, {})
    train(model, optimizer, (3,))
    saver.finish()

    again = sharded(2)
    fresh = optim.build_optimizer(again, MUON)
    assert restore.load(work / "checkpoints", config.CheckpointingConfig(), again, fresh, place, {}) == {"step": 2}
    assert not torch.equal(next(again.parameters()).to_local(), next(model.parameters()).to_local())
    train(again, fresh, (3,))
    whole = {}
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        pairs = {"param": (one, other)}
        pairs |= {key: (value, fresh.state[other][key]) for key, value in optimizer.state[one].items()}
        assert optimizer.state[one].keys() == fresh.state[other].keys() != set()
        for key, pair in pairs.items():
            assert type(pair[0].data) is type(pair[1].data), (name, key)
            full = [as_one(tensor.detach()) for tensor in pair]
            assert torch.equal(*full), (name, key)
        whole[name] = as_one(one.detach())
    return whole


def test_muon_on_two_ranks_resumes_to_the_bit_and_is_within_3_percent_of_one(one_rank, tmp_path):
    two, _ = two_ranks(tmp_path)
    alone, start = sharded(1), Toy(((64, 96), (96, 64), (97, 64))).state_dict()
    train(alone, optim.build_optimizer(alone, MUON), (1, 2, 3))
    off = {}
    for name, param in alone.named_parameters():
        update = param.full_tensor().detach() - start[name]
        off[name] = float((two[name] - start[name] - update).norm() / update.norm())
        assert off[name] <= (0.03 if ".layers." in name and param.ndim == 2 else 1e-5), off
    # The checkpoint of two ranks on one: rows are put together, whatever their optimizer calls its tensors.
    resumed = sharded(1)
    optimizer = optim.build_optimizer(resumed, MUON)
    restore.load(tmp_path / "checkpoints", config.CheckpointingConfig(), resumed, optimizer, one_rank[0], {})
    for name, param in resumed.named_parameters():
        assert torch.equal(optimizer.state[param]["of_my_rows"], param.full_tensor()), name
    train(resumed, optimizer, (3,))
    for name, param in resumed.named_parameters():
        assert (as_one(param.detach()) - two[name]).norm() <= 0.03 * (two[name] - start[name]).norm(), name


def test_clipping_scales_the_whole_gradient_and_gives_its_norm(one_rank):
    for max_norm in (1e9, 0.5):
        model = Toy()
        gradients = gradients_of(model, 4)
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
        fully_shard(model, mesh=one_rank[2])
        model(gradients).backward()
        assert optim.clip_grad_norm(model, max_norm) == pytest.approx(norm, rel=1e-6) and norm > 1
        scale = min(1, max_norm / norm)
        for name, param in model.named_parameters():
            assert torch.allclose(as_one(param.grad), gradients[name] * scale, rtol=1e-5), name
