"""What an optimizer step and its memory options leave as they are, on any number of ranks."""

from dataclasses import replace

import pytest
import torch
from hf_folders import make_pack, response_rows
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import config
import model as model_module
from head import HeadOptions, response_logps
from model import load_policy
from optim import build_optimizer, clip_grad_norm
from run import checkpoint, restore

LENGTHS = [5, 9, 3]
ADAMW = config.OptimizerConfig(kwargs=config.OptimizerKwargs(lr=1e-3))
MUON = replace(ADAMW, name="torch.optim.Muon")
ROUNDED = replace(ADAMW, kwargs=replace(ADAMW.kwargs, state_dtype="bfloat16"))


def one_root_unit(model, mesh, **_):
    """As `shard`, but embedding and head are the root's."""
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=module is not model)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def gradients_of_packs(model, seeds):
    """Whole gradients of some micro-batches, name -> tensor."""
    for seed in seeds:
        pack = make_pack(LENGTHS, vocab=200, seed=seed)
        pos_R, target_R = response_rows(LENGTHS, pack[0])
        logp_R, entropy_R = response_logps(model, (*pack, pos_R), target_R, HeadOptions())
        (entropy_R.sum() - logp_R.sum()).backward()
    return {name: param.grad.full_tensor() for name, param in model.named_parameters()}


def check_units(folder, mesh, seeds):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module, "shard", one_root_unit)
        expected = gradients_of_packs(load_policy(folder, device="cpu", mesh=mesh), seeds)
    for name, grad in gradients_of_packs(load_policy(folder, device="cpu", mesh=mesh), seeds).items():
        assert grad.norm() > 0 and torch.equal(grad, expected[name]), name  # to the bit: nothing else is added up


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def moments(optimizer, param):
    return {key: local(value) for key, value in optimizer.state[param].items() if value.dim()}


def fresh(folder, mesh, cfg, *, offloads, cpu_offload=False):
    model = load_policy(folder, device="cpu", mesh=mesh, cpu_offload=cpu_offload)
    return model, build_optimizer(model, cfg, offloads=offloads)


def train(model, optimizer, steps):
    for step in steps:
        gradients_of_packs(model, (step,))
        clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def snapshot(model, optimizer):
    """Copies of this rank's weights and moments."""
    return {
        f"{key} {name}": tensor.clone()
        for name, param in model.named_parameters()
        for key, tensor in {"param": param.to_local().detach(), **moments(optimizer, param)}.items()
    }


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys() and ours
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def check_offload(folder, mesh, cfg, num_steps):
    """The moments lie in buffers of their own, the same at all times, and the numbers are those without."""
    plain, offloaded, host = (
        fresh(folder, mesh, cfg, offloads=offloads, cpu_offload=cpu_offload)
        for offloads, cpu_offload in ((False, False), (True, False), (False, True))
    )
    model, optimizer = offloaded
    for pair in (plain, offloaded, host):
        train(*pair, (0,))
    addresses = {key: x.data_ptr() for p in model.parameters() for key, x in named(moments(optimizer, p), p)}
    in_step = {}
    for part in optimizer.optimizers:
        (param,) = part.param_groups[0]["params"]
        part.register_step_pre_hook(
            lambda *_, param=param: in_step.update(
                (k, x.data_ptr()) for k, x in named(moments(optimizer, param), param)
            )
        )
    for pair in (plain, offloaded, host):
        train(*pair, range(1, num_steps))
    assert addresses == {key: x.data_ptr() for p in model.parameters() for key, x in named(moments(optimizer, p), p)}
    assert in_step.keys() == addresses.keys() and not {*in_step.values()} & {*addresses.values()} - {0}
    assert_equal(snapshot(*offloaded), snapshot(*plain))
    assert_equal(snapshot(*host), snapshot(*plain))


def named(tensors, param):
    return [((id(param), key), tensor) for key, tensor in tensors.items()]


def check_checkpoints(folder, mesh, ranks, work, cfg):
    """Each of two runs goes on from the other's checkpoint, as the one that did not stop."""
    unbroken = fresh(folder, mesh, cfg, offloads=False)
    train(*unbroken, range(4))
    for offloads in (False, True):
        model, optimizer = fresh(folder, mesh, cfg, offloads=offloads)
        train(model, optimizer, range(2))
        saver = checkpoint.Saver(work / f"offloads {offloads}", config.CheckpointingConfig(), ranks)
        saver.save(2, model, optimizer, {}, {}, {})
        train(model, optimizer, (2,))  # while it is being written
        saver.finish()
        model, optimizer = fresh(folder, mesh, cfg, offloads=not offloads)
        restore.load(saver.folder, config.CheckpointingConfig(), model, optimizer, ranks, {})
        train(model, optimizer, (2, 3))
        assert_equal(snapshot(model, optimizer), snapshot(*unbroken))
