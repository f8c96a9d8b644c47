"""What saves a GPU's memory: FSDP units of their own for embedding and head, moments that wait in host memory or are
rounded, everything on the host."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hf_folders import FAMILIES, make_hf_folder, make_pack
from optimizer_case import (
    ADAMW,
    LENGTHS,
    MUON,
    ROUNDED,
    check_checkpoints,
    check_offload,
    check_units,
    fresh,
    gradients_of_packs,
    local,
    moments,
    train,
)
from safetensors.torch import load_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import model as model_module
from hf.weights import full_tensors
from model import Reference, load_policy
from optim import build_optimizer
from run import checkpoint
from system.exits import exit_process
from system.optimizer import Optimizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    for family in ("qwen2", "qwen3"):  # tied, untied
        make_hf_folder(root / family, **FAMILIES[family])
    return root


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_units_of_embedding_and_head_change_no_gradient(folders, one_rank, family):
    check_units(folders / family, one_rank[2], (0, 1))


def look_at_gradient(out, look):
    if out.requires_grad:
        out.register_hook(look)


def test_embedding_and_head_are_gathered_only_while_they_compute(folders, one_rank):
    """What is gathered during a block is what a GPU holds at the peak."""
    gathered = {}
    for family in ("qwen2", "qwen3"):
        model = load_policy(folders / family, device="cpu", mesh=one_rank[2])
        ends = [model.model["embed_tokens"], *filter(None, [model.lm_head])]
        seen = []

        def look(*_, ends=ends, seen=seen):
            seen.append([not isinstance(end.weight, DTensor) for end in ends])

        for block in model.model["layers"]:
            block.register_forward_pre_hook(look)
            block.register_full_backward_pre_hook(look)
        ends[0].register_forward_hook(lambda module, tokens, out, look=look: look_at_gradient(out, look))
        gradients_of_packs(model, (0,))
        look()
        with torch.no_grad():
            model(*make_pack(LENGTHS))
        look()
        gathered[family] = seen
        assert len(seen) == 3 * len(model.model["layers"]) + 3
    assert not any(any(ends) for ends in gathered["qwen3"])
    tied, layers = [ends[0] for ends in gathered["qwen2"]], 2
    assert tied == [True] * (2 * layers + 1) + [False] + [True] * layers + [False]


# ------------------------------------------------------------------------------------ where and as what the moments lie


@pytest.mark.parametrize("cfg", [ADAMW, MUON, ROUNDED], ids=["adamw", "muon", "rounded"])
def test_offload_changes_no_number(folders, one_rank, cfg):
    check_offload(folders / "qwen3", one_rank[2], cfg, 20)


@pytest.mark.parametrize("cfg", [ADAMW, ROUNDED], ids=["adamw", "rounded"])
def test_checkpoints_with_and_without_offload_are_the_same(folders, one_rank, tmp_path, cfg):
    check_checkpoints(folders / "qwen3", one_rank[2], one_rank[0], tmp_path, cfg)
    # And with the other state_dtype: what was loaded is rounded, or widened, at once.
    other, first_moment = (ADAMW, torch.float32) if cfg is ROUNDED else (ROUNDED, torch.bfloat16)
    for folder, offloads in (("offloads True", False), ("offloads False", True)):
        model, optimizer = fresh(folders / "qwen3", one_rank[2], other, offloads=offloads)
        checkpoint.load(tmp_path / folder, model, optimizer, one_rank[0], {}, mode=None)
        for _ in range(2):
            dtypes = {key: value.dtype for key, value in moments(optimizer, model.lm_head.weight).items()}
            assert dtypes == {"exp_avg": first_moment, "exp_avg_sq": torch.float32}
            train(model, optimizer, (2,))


def noise():
    """4,000 gradients of sizes between 1e-7 and 1e-1."""
    generator = torch.Generator().manual_seed(0)
    size_N = 10 ** (torch.rand(5_000, generator=generator) * 6 - 7)
    return (size_N * torch.randn(5_000, generator=generator) for _ in range(4_000))


def recorded():
    """Those of 1,000 steps of the smoke task (the file says which; of some they are all 0), four times over."""
    return [*load_file(Path(__file__).with_name("smoke_gradients.safetensors"))["grad"]] * 4


@pytest.mark.parametrize("gradients", [noise, recorded])
def test_rounded_moments_give_the_updates_of_whole_ones(gradients):
    """In 4,000 steps. The second moment, rounded to bfloat16, would be 46% too large by then, and 104%."""
    runs, errors = [], []
    for cfg in (ADAMW, ROUNDED):
        cfg = replace(cfg, kwargs=replace(cfg.kwargs, weight_decay=0.0))
        model = nn.ParameterDict({"weight": nn.Parameter(torch.zeros(len(next(iter(gradients())))))})
        runs.append((model["weight"], build_optimizer(model, cfg)))
    for grad_N in gradients():
        for weight, optimizer in runs:
            weight.detach().zero_()  # so that it is the update
            weight.grad = grad_N.clone()
            optimizer.step()
        exact_N, rounded_N = (weight.detach() for weight, _ in runs)
        errors.append(float((rounded_N - exact_N).norm() / exact_N.norm()))
    states = [optimizer.state[weight] for weight, optimizer in runs]
    assert [state["exp_avg"].dtype for state in states] == [torch.float32, torch.bfloat16]
    assert len(errors) == 4_000 and 0 < errors[-1] <= max(errors) <= 0.02, (errors[-1], max(errors))
    assert torch.equal(states[0]["exp_avg_sq"], states[1]["exp_avg_sq"])


META = torch.device("meta")


class DeviceCopies(TorchDispatchMode):
    """Meta tensors are the GPU's: writes down what goes between them and host memory, [direction, dtype in host memory,
    bytes there]."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name, (first, *rest) = func.overloadpacket.__name__, args
        if name == "copy_" and {first.device, rest[0].device} != {META}:
            assert first.device.type == "cpu" and rest[0].device == META, "moments go to the device as new tensors"
            waits = not (rest[1:] or [False])[0]
            self.seen.append(["out, waits" if waits else "out", first.dtype, first.nbytes])
            return first
        if name == "_to_copy" and first.device.type == "cpu" and torch.device(kwargs["device"]) == META:
            assert kwargs["non_blocking"]
            self.seen.append(["in", first.dtype, first.nbytes])
        return func(*args, **kwargs)


class OneStep:
    """As a fused AdamW: its state is made by its first step, on the device, the counter too."""

    def __init__(self, params, seen):
        self.param_groups = [{"params": params}]
        self.state = {}
        self.seen = seen
        self.counters = {}

    def step(self):
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            for key in () if state else ("step", "exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros((), device=META) if key == "step" else torch.zeros_like(param)
            assert {(x.device, x.dtype) for x in state.values()} == {(META, torch.float32)}
            assert state["step"] is self.counters.setdefault(param, state["step"])  # left where it is
        self.seen.append(["step", len(self.param_groups[0]["params"])])


@pytest.mark.parametrize("first_moment", [torch.float32, torch.bfloat16])
def test_copies_of_a_gpu_in_their_order(monkeypatch, first_moment):
    """Of one parameter after another: its moments in, the step, the moments out into the same pinned buffers; at the
    end one wait, before anything reads them."""
    copies, pinned, empty_like = DeviceCopies(), [], torch.empty_like

    def pinned_like(tensor, *, pin_memory=False, **options):
        assert pin_memory == (options.get("device") == "cpu")
        pinned.append(tensor.shape)
        return empty_like(tensor, **options)

    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: x.device == META), raising=False)
    monkeypatch.setattr(torch, "empty_like", pinned_like)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: copies.seen.append(["wait"]))
    params = [nn.Parameter(torch.empty(shape, device=META)) for shape in ((6, 4), (5,))]
    optimizer = Optimizer({partial(OneStep, seen=copies.seen): params}, offloads=True, first_moment=first_moment)
    optimizer.state.update({param: {} for param in params})
    wide, first = 4, first_moment.itemsize
    expected = []
    for size in (24, 5):
        kinds = [[first_moment, first * size], [torch.float32, wide * size]]
        expected += [["in", *kind] for kind in kinds] + [["step", 1]] + [["out", *kind] for kind in kinds]
    with copies:
        optimizer.step()
        assert copies.seen == [
            [name.replace("out", "out, waits"), *rest] for name, *rest in [*expected, ["wait"]] if name != "in"
        ]
        for _ in range(2):
            copies.seen.clear()
            optimizer.step()
            assert copies.seen == [*expected, ["wait"]]
    assert pinned == [(6, 4), (6, 4), (5,), (5,)]  # once: all later copies go to these
    for param in params:
        places = {key: (x.device.type, x.dtype) for key, x in optimizer.state[param].items()}
        moments = {"exp_avg": ("cpu", first_moment), "exp_avg_sq": ("cpu", torch.float32)}
        assert places == {"step": ("meta", torch.float32), **moments}


def on_a_cuda_mesh(rank, folder):
    """Shards of fake tensors, which have a device and no numbers, on a mesh of two GPUs that are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cuda", (2,))
    pinned, gathered, to = [], [], torch.Tensor.to

    def pin(tensor):
        pinned.append(tensor.shape)
        return tensor

    def full_tensor(tensor):
        gathered.append(tensor.to_local().device.type)
        return torch.zeros(tensor.shape, device="cpu")

    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.Tensor, "to", lambda x, *a, **k: to(x, *("cuda:0" if v == "cuda" else v for v in a), **k))
    patch.setattr(torch.Tensor, "pin_memory", pin)
    with FakeTensorMode(allow_non_fake_inputs=True):
        # The moments of shards that lie on the GPU.
        params = [DTensor.from_local(torch.empty(3, 5, device="cuda:0"), mesh, [Shard(0)])]
        parts = {partial(torch.optim.AdamW, fused=True): params}
        optimizer = Optimizer(parts, offloads=True, first_moment=torch.bfloat16)
        for key, dtype in (("exp_avg", torch.bfloat16), ("exp_avg_sq", torch.float32)):
            value = optimizer.at_rest(key, torch.zeros_like(params[0]))
            assert isinstance(value, DTensor) and (value.device.type, value.to_local().device.type) == ("cpu", "cpu")
            assert value.dtype == dtype and value.placements == params[0].placements
            back = value.to(params[0].device, torch.float32, non_blocking=True, copy=True)
            assert (back.device.type, back.to_local().device.type, back.dtype) == ("cuda", "cuda", torch.float32)

        # cpu_offload: weights, gradients and moments of a decoder.
        patch.setattr(model_module, "load_weights", lambda *_: None)
        model = load_policy(folder, device="cuda:0", mesh=mesh, precision="bfloat16", cpu_offload=True)
        params = list(model.parameters())
        assert len(pinned) == len(params) > 20
        for param in params:
            param.grad = torch.zeros_like(param)
        norm = torch.nn.utils.clip_grad_norm_(params, 1.0).full_tensor()
        optimizer = build_optimizer(model, ADAMW)
        optimizer.step()
        patch.setattr(checkpoint, "_read_rows", lambda files, name, param: torch.zeros(param.to_local().shape))
        loaded = checkpoint._read_state([], "sharded.exp_avg.name", "sharded", params[0])
        host = [norm, loaded, *params, *(x for state in optimizer.state.values() for x in state.values())]
        assert {local(tensor).device.type for tensor in host} == {"cpu"}
        patch.setattr(DTensor, "full_tensor", full_tensor)
        names = [name for name, _ in full_tensors(model, torch.bfloat16)]
        assert len(names) == len(params) and {*gathered} == {"cuda"}  # what a sync sends is on the GPU
    patch.undo()
    exit_process(0)


def test_on_a_mesh_of_gpus_everything_is_where_it_belongs(folders):
    mp.spawn(on_a_cuda_mesh, (folders / "qwen3",), nprocs=1)


def test_before_weights_in_host_memory_change_the_gpu_has_read_them(folders, one_rank, monkeypatch):
    model = load_policy(folders / "qwen2", device="cpu", mesh=one_rank[2], cpu_offload=True)
    reference, waits = Reference(model), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(model.lm_head is None))
    with reference.in_place_of(model):
        assert len(waits) == 1
    assert len(waits) == 2
