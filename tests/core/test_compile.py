"""policy.compile: the halves of a block around its attention, and the loss, compiled, against the same functions run as
they are."""

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hf_folders import FAMILIES, make_hf_folder, make_pack
from torch._dynamo.utils import counters

from config import ConfigError, LoRAConfig
from model import load_policy
from run import build

LENGTHS = [1, 2, 3, 64, 128, 5, 8, 13, 21, 31, 47, 60, 75, 90, 99, 100, 7, 16, 111, 4]


@pytest.fixture
def num_graphs(monkeypatch):
    """How many graphs were compiled so far; by a backend that runs their operations one by one, derivatives too."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(disable=False):  # engine.py disables it on CPU
        yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def logits_and_gradients(model, length):
    """Of a pack of two sequences, or of one where it is shorter than 4 tokens; whole gradients of what is trained."""
    logits_TV = model(*make_pack([length // 3, length - length // 3] if length >= 4 else [length]))
    logits_TV.sin().sum().backward()
    gradients = [param.grad.full_tensor() for param in model.parameters() if param.requires_grad]
    model.zero_grad()
    return [logits_TV.detach(), *gradients]


@pytest.mark.slow  # seconds, and --fast puts calls into what is compiled
@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("recompute", [True, pytest.param(False, marks=pytest.mark.long)])
def test_compiled_halves_equal_eager_with_two_graphs(recompute, lora, num_graphs, one_rank, tmp_path):
    """Under FSDP2. Two graphs for all blocks and 20 lengths, none for a lone token, and two more without gradients.
    With LoRA two more for the first block, whose input has no gradient."""
    make_hf_folder(tmp_path, **FAMILIES["qwen3_tied_bias"])
    options = {"device": "cpu", "mesh": one_rank[2], "lora": LoRAConfig(enabled=lora), "recompute": recompute}
    eager, compiled = (load_policy(tmp_path, **options) for _ in range(2))
    with torch.no_grad():
        for name, param in (*eager.named_parameters(), *compiled.named_parameters()):
            if name.endswith("lora_B"):
                param.to_local().fill_(0.01)
    compiled.compile_blocks()
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in eager.named_parameters()]
    assert len(set(LENGTHS)) == 20
    gaps = []
    for length in LENGTHS[:6] if lora else LENGTHS:
        found, expected = (logits_and_gradients(model, length) for model in (compiled, eager))
        assert num_graphs() == (0 if length == 1 else 4 if lora else 2)
        largest = max(gradient.abs().max() for gradient in expected[1:])  # of two tokens, some are 0 but for rounding
        scales = [expected[0].abs().max(), *[largest] * len(expected[1:])]
        gaps += [(a - b).abs().max() / scale for a, b, scale in zip(found, expected, scales, strict=True)]
    print(f"largest difference {max(gaps):.1e}")
    assert max(gaps) <= 1e-6
    if not recompute:
        with torch.no_grad():
            for length in LENGTHS[:5]:
                compiled(*make_pack([length]))
        assert num_graphs() == (6 if lora else 4)


@pytest.mark.parametrize(
    ("backend", "cases"),
    [
        pytest.param(
            "aot_eager",
            ("GSPO 0", "entropy held at a target", "the larger half", "does not compile"),
            marks=pytest.mark.slow,
        ),
        pytest.param("inductor", ("GRPO 0",), marks=pytest.mark.slow),
        pytest.param("aot_eager", (), marks=pytest.mark.long),
        pytest.param("inductor", (), marks=pytest.mark.long),
    ],
)
def test_the_compiled_loss_is_the_loss(backend, cases):
    """Of all algorithms of docs/algorithms.md, and of ten edits of loss.py: in two graphs, with metrics and without,
    for 20 lengths and counts. In a process of its own: here nothing is compiled."""
    if backend == "inductor" and not shutil.which("g++"):
        pytest.skip("no C++ compiler, which inductor needs on a CPU")
    script = Path(__file__).parents[1] / "helpers" / "compiled_losses.py"
    command = [sys.executable, str(script), backend, *cases]
    environment = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = [json.loads(line) for line in output.splitlines()]
    assert [case["case"] for case in found] == list(cases) if cases else len(found) >= 54
    for case in found:
        if case["case"] == "does not compile":
            assert case["text"].startswith("eager, as it does not compile: "), case
            continue
        limit = 0.0 if backend == "aot_eager" else 1e-6
        assert max(case["slopes"], case["loss"]) <= limit, case
        assert case["metrics"] <= 10 * limit, case  # k3 of a small gap is the difference of nearly equal numbers
        assert case["graphs"] == 2 and not case["entropy"] and not case.get("empty"), case
        kernels = int(case["text"].removeprefix("compiled into ").split()[0])
        assert (0 < kernels <= 40) if backend == "inductor" else kernels == 0, case


@pytest.fixture
def can_compile(monkeypatch, tmp_path):
    """A machine with gcc and nothing in the way; the folder where gcc is."""
    for name in ("CC", "TORCHDYNAMO_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "gcc").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with torch._dynamo.config.patch(disable=False):
        yield tmp_path


def test_when_blocks_are_compiled(can_compile):
    choices = [(option, device) for device in ("cuda", "cpu") for option in (None, True, False)]
    choices.remove((True, "cpu"))
    assert [build.compiles(*choice) for choice in choices] == [True, True, False, False, False]
    with pytest.raises(ConfigError, match=r"policy\.compile needs a GPU.* set policy\.compile=false"):
        build.compiles(True, "cpu")


@pytest.mark.parametrize("option", [None, True])
def test_where_nothing_can_be_compiled_the_fix_is_named(option, can_compile, monkeypatch):
    (can_compile / "gcc").unlink()
    with pytest.raises(ConfigError, match="a C compiler"):
        build.compiles(option, "cuda")
    assert not build.compiles(False, "cuda")
    monkeypatch.setenv("CC", "icx")
    with pytest.raises(ConfigError, match="CC"):
        build.compiles(option, "cuda")
    (can_compile / "icx").touch(mode=0o755)
    assert build.compiles(option, "cuda")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(ConfigError, match="TORCHDYNAMO_DISABLE"):
        build.compiles(option, "cuda")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    with torch._dynamo.config.patch(disable=True), pytest.raises(ConfigError, match="TORCH_COMPILE_DISABLE"):
        build.compiles(option, "cuda")
