"""What saves a GPU's memory: FSDP units of their own for embedding and head, moments that wait in host memory or are
rounded, everything on the host."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hf_folders import FAMILIES, make_hf_folder
from optimizer_case import ADAMW, MUON, ROUNDED, check_checkpoints, check_offload, check_units, fresh, moments, train
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from base.system.optimizer import Optimizer
from config import CheckpointingConfig
from model import load_policy
from optim import build_optimizer
from reference import Reference
from run import restore

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


# ------------------------------------------------------------------------------------ where and as what the moments lie


@pytest.mark.parametrize("cfg", [ADAMW, MUON, ROUNDED], ids=["adamw", "muon", "rounded"])
def test_offload_changes_no_number(folders, one_rank, cfg):
    check_offload(folders / "qwen3", one_rank[2], cfg, 8)


@pytest.mark.parametrize("cfg", [ADAMW, ROUNDED], ids=["adamw", "rounded"])
def test_checkpoints_with_and_without_offload_are_the_same(folders, one_rank, tmp_path, cfg):
    check_checkpoints(folders / "qwen3", one_rank[2], one_rank[0], tmp_path, cfg)
    # And with the other state_dtype: what was loaded is rounded, or widened, at once.
    other, first_moment = (ADAMW, torch.float32) if cfg is ROUNDED else (ROUNDED, torch.bfloat16)
    for folder, offloads in (("offloads True", False), ("offloads False", True)):
        model, optimizer = fresh(folders / "qwen3", one_rank[2], other, offloads=offloads)
        restore.load(tmp_path / folder, CheckpointingConfig(), model, optimizer, one_rank[0], {})
        for _ in range(2):
            dtypes = {key: value.dtype for key, value in moments(optimizer, model.lm_head.weight).items()}
            assert dtypes == {"exp_avg": first_moment, "exp_avg_sq": torch.float32}
            train(model, optimizer, (2,))


def recorded():
    """The gradients of 1,000 steps of the smoke task (the file says which; of some they are all 0), four times over."""
    return [*load_file(Path(__file__).with_name("smoke_gradients.safetensors"))["grad"]] * 4


def test_rounded_moments_give_the_updates_of_whole_ones():
    """In 4,000 steps. The second moment, rounded to bfloat16, would be 104% too large by then."""
    gradients, runs, errors = recorded(), [], []
    for cfg in (ADAMW, ROUNDED):
        cfg = replace(cfg, kwargs=replace(cfg.kwargs, weight_decay=0.0))
        model = nn.ParameterDict({"weight": nn.Parameter(torch.zeros(len(gradients[0])))})
        runs.append((model["weight"], build_optimizer(model, cfg)))
    for grad_N in gradients:
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
    parts = [(partial(OneStep, seen=copies.seen), params)]
    optimizer = Optimizer(parts, offloads=True, first_moment_dtype=first_moment)
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


def test_before_weights_in_host_memory_change_the_gpu_has_read_them(folders, one_rank, monkeypatch):
    model = load_policy(folders / "qwen2", device="cpu", mesh=one_rank[2], cpu_offload=True)
    reference, waits = Reference(model), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(model.lm_head is None))
    with reference.in_place_of(model):
        assert len(waits) == 1
    assert len(waits) == 2
