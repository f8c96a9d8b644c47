"""Two ranks compute what one does: gradients of a batch however it is cut, weights, tokens of an engine over both."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from count_memory import differences
from dist_case import PROMPTS, adapted_policy, alone, make_samples, packs_of, rank_share
from hf_folders import FAMILIES, layout_of, make_hf_folder, make_pack
from loop import train_once
from optimizer_case import ADAMW, ROUNDED, check_checkpoints, check_offload, check_units
from ranks import ranks
from tiny import VOCAB_SIZE

import base.system.allocator
import base.system.ranks
import config
import envs
from base.hf.tokenizer import Tokenizer
from base.hf.weights import full_tensors, merged_weight
from base.inputs.reader import load
from base.plan.gpus import GIB
from base.system.exchange import move_tokens
from base.system.ranks import start_process_group
from config import ConfigError
from engine import VLLMEngine
from head import HeadOptions, response_logps
from model import load_policy
from pack import pack_samples, rows_of
from records import Problem, SamplingOptions
from rollout import Sampler

ROOT = Path(__file__).resolve().parents[2]
ALLOC, CUDA_ALLOC = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"

HEAD = HeadOptions(0.8, VOCAB_SIZE)


class Disagrees(envs.Environment):
    """A grader that works against time: on each rank it says something else."""

    def __init__(self, rank):
        self.rank = rank

    def step(self, turns):
        observation = ({"role": "user", "content": f"rank {self.rank}"},)
        return [envs.StepResult(1.0 + self.rank, "wrong", done=False, observation=observation) for _ in turns]


def lora_facts(folder, mesh):
    """The adapters as they started and the weights as they are sent, and whether those are what the forward used; by
    the precision of the policy."""
    tensors, same = {}, {}
    for precision in ("float32", "bfloat16"):
        model, used = adapted_policy(folder, mesh, precision), []
        with mock.patch("lora.merged_weight", lambda *args: used.append(merged_weight(*args)) or used[-1]):  # noqa: B023
            with torch.no_grad():
                model(*make_pack([20], vocab=200))
        sent = dict(full_tensors(model, torch.float32))
        whole = {name: param.full_tensor() for name, param in model.named_parameters() if "lora" in name}
        tensors |= {f"{precision} {name}": tensor.float() for name, tensor in (sent | whole).items()}
        layers = [name.replace("lora_A", "weight") for name in whole if "lora_A" in name]
        same[precision] = len(used) == len(layers) and all(
            any(torch.equal(weight.float(), sent[layer]) for layer in layers) for weight in used
        )
    return tensors, same


def check_optimizer(ranks, mesh, work):
    """Units, moments in host memory, rounded ones, and their checkpoints."""
    for family in ("qwen2", "qwen3"):  # tied, untied
        folder = work / family
        if ranks.rank == 0:
            make_hf_folder(folder, **FAMILIES[family])
        dist.barrier()
        check_units(folder, mesh, (2 * ranks.rank, 2 * ranks.rank + 1))
    check_offload(folder, mesh, ROUNDED, 2)
    check_checkpoints(folder, mesh, ranks, work, ADAMW)


def carried_turns(engine, tokenizer, ranks, policies):
    """Conversations with it that go on over a weight change, beside those of the step before: their ids, the versions
    in each, and the largest gap to the log-probabilities of a token's own weights."""
    messages = [{"role": "user", "content": "1+1"}]
    row = Problem(0, messages, "2", "x", tokenizer.render(messages))
    engine.stop_token_ids = list(range(0, 256, 32))
    sampler = Sampler(engine, tokenizer, {"x": Disagrees(ranks.rank)}, ranks, max_turns=2)
    first = sampler.start([(0, row)], 2, SamplingOptions(0.8, 4), (0,), step=1)
    later = sampler.start([(1, row), (2, row)], 4, SamplingOptions(0.8, 40), (0,), step=2)
    sampler.finish(first)
    engine.sync(full_tensors(policies[1], engine.dtype), 1)
    samples = sampler.finish(later)
    sequences = [s.sequence for s in samples]
    move_tokens([sequences, sequences])
    gap = 0.0
    for s in samples:
        ids = torch.tensor(s.sequence.token_ids)
        position_T = torch.arange(len(ids) - 1)
        inputs = ids[:-1], position_T, layout_of(len(position_T)), position_T[-len(s.sequence.output_ids) :]
        target_R = ids[-len(s.sequence.output_ids) :]
        with torch.no_grad():
            logps = [response_logps(policy, inputs, target_R, HEAD)[0].numpy() for policy in policies]
        logp_R = np.stack(logps)[s.sequence.tokens["version"], np.arange(len(s.sequence.tokens["version"]))]
        gap = max(gap, float(np.abs(logp_R - s.sequence.tokens["logp"])[s.sequence.tokens["mask"]].max()))
    return {
        "ids": [s.sequence.output_ids for s in samples],
        "versions": [s.sequence.tokens["version"][s.sequence.tokens["mask"]].tolist() for s in samples],
        "turns": [s.num_turns for s in samples],
        "rewards": [s.grade.reward for s in samples],
        "gap": gap,
    }


def moved(mesh, folder):
    """The policy as an optimizer's large step would leave it."""
    other = load_policy(folder, device="cpu", mesh=mesh)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for param in other.parameters():
        local = param.detach().to_local()
        local.add_(0.02 * torch.randn(local.shape, generator=generator))
    return other


@ranks(2, seconds=900, with_vllm=True)
def facts_of_ranks(folder, work):
    place, device = start_process_group(tp_size=2)
    tokenizer = Tokenizer(folder)
    mesh = dist.init_device_mesh("cpu", (2,))
    policy = load_policy(folder, device=device, mesh=mesh)

    samples, adv_B = make_samples(tokenizer.vocab_size)
    rows = rows_of(samples)
    shares = [[[rows[i]] for i in share] for share in rank_share]
    with mock.patch("pack.assign_to_ranks", lambda *_: shares):
        metrics, gradients = train_once(policy, samples, adv_B, packs_of(40), place)

    adapted = adapted_policy(folder, mesh)
    with mock.patch("pack.assign_to_ranks", lambda *_: shares):
        _, lora_gradients = train_once(adapted, samples, adv_B, packs_of(40), place)
    lora_tensors, lora_same = lora_facts(folder, mesh)
    memory = {"lora": differences("lora", mesh)}
    memory["lora, kept"] = differences("lora", mesh, gpu_bytes=100 * GIB)
    memory["qwen3, late"] = differences("qwen3", mesh, defer_fsdp_grad_sync=True)
    memory["qwen3, late and kept"] = differences("qwen3", mesh, gpu_bytes=100 * GIB, defer_fsdp_grad_sync=True)
    memory["qwen3 tied, offload"] = differences("qwen3 tied", mesh, 4095, cpu_offload=True)

    check_optimizer(place, mesh, work)

    generation = config.GenerationConfig(vllm_cfg=config.VllmConfig(tensor_parallel_size=2))
    policy_cfg = config.PolicyConfig(precision="float32", max_total_sequence_length=128, generation=generation)
    grpo_cfg = config.GRPOConfig(async_grpo=config.AsyncGRPOConfig(enabled=True))  # more, and without it the same
    engine = VLLMEngine(folder, policy.config, tokenizer, config.Config(policy=policy_cfg, grpo=grpo_cfg))
    engine.sync(full_tensors(policy, engine.dtype), 0)
    completions = engine.generate(PROMPTS, [0] * len(PROMPTS), SamplingOptions(0.0, 24))
    greedy = [completion.ids for completion in completions]
    carried = carried_turns(engine, tokenizer, place, [policy, moved(mesh, folder)])
    return {
        "gradients": gradients,
        "metrics": metrics,
        "greedy": greedy,
        "carried": carried,
        "lora_gradients": lora_gradients,
        "lora_tensors": lora_tensors,
        "lora_same": lora_same,
        "memory": memory,
    }


def free_shared_memory():
    """vLLM gives two ranks' shared memory one name in every job, and frees it only when a rank exits by itself."""
    for file in Path("/dev/shm").glob("-tp:*cpushm*"):
        file.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def two_ranks(tiny, tmp_path_factory):
    """What each rank found."""
    free_shared_memory()
    yield facts_of_ranks(tiny[0], tmp_path_factory.mktemp("two_ranks"))
    free_shared_memory()


@pytest.fixture
def policy(one_rank, tiny):
    _, device, mesh = one_rank
    return load_policy(tiny[0], device=device, mesh=mesh)


def relative(a, b):
    assert a.keys() == b.keys()
    return max(((a[name] - b[name]).norm() / b[name].norm()).item() for name in a)


@pytest.fixture
def step():
    """(samples, advantages)."""
    return make_samples(VOCAB_SIZE)


def test_one_pack_equals_transformers_sequence_by_sequence_in_float64(policy, tiny, step, one_rank):
    samples, adv_B = step
    _, ours = train_once(policy, samples, adv_B, packs_of(10_000), one_rank[0])
    oracle = tiny[1].double()
    oracle.zero_grad()
    num_tokens = sum(int(s.sequence.tokens["mask"].sum()) for s in samples)
    for s, adv in zip(samples, adv_B, strict=True):  # ratio 1 on policy: the gradient of -A logp / N, by hand
        ids = torch.tensor(s.sequence.token_ids)
        logits_TV = oracle(ids[None]).logits[0, len(s.sequence.prompt_ids) - 1 : -1, :VOCAB_SIZE] / 0.8
        logp_T = logits_TV.log_softmax(-1).gather(1, ids[len(s.sequence.prompt_ids) :, None])[:, 0]
        (-adv * logp_T[torch.from_numpy(s.sequence.tokens["mask"])].sum() / num_tokens).backward()
    expected = {name: param.grad.float() for name, param in oracle.named_parameters() if name != "lm_head.weight"}
    tiny[1].float().zero_grad(set_to_none=True)
    assert relative(ours, expected) <= 1e-5
    assert ours["model.embed_tokens.weight"][VOCAB_SIZE:].abs().max() == 0  # padded rows get no gradient


def test_micro_batches_in_any_order_and_two_unequal_ranks_give_the_same_gradient(policy, step, two_ranks, one_rank):
    samples, adv_B = step
    metrics, gradients = train_once(policy, samples, adv_B, packs_of(10_000), one_rank[0])
    metrics_many, many = train_once(policy, samples, adv_B, packs_of(40), one_rank[0])
    packs = pack_samples(alone(samples[::-1], adv_B[::-1]), 40)
    assert len(packs) > 5
    shuffled = [packs[i] for i in np.random.default_rng(0).permutation(len(packs))]
    with mock.patch("pack.pack_samples", lambda *_: shuffled):
        metrics_other, other = train_once(policy, samples, adv_B, packs_of(40), one_rank[0])
    for computed in (many, other, two_ranks[0]["gradients"]):
        assert relative(computed, gradients) <= 1e-6
    del metrics["train_tokens"]  # a prompt is computed once for each pack that shares it
    for computed in (metrics_many, metrics_other, two_ranks[0]["metrics"], two_ranks[1]["metrics"]):
        del computed["train_tokens"]
        assert computed == pytest.approx(metrics, rel=1e-6, abs=1e-6, nan_ok=True)


def test_adapters_of_two_ranks_start_train_and_are_sent_as_those_of_one(step, two_ranks, one_rank, tiny):
    samples, adv_B = step
    tensors = dict(two_ranks[0]["lora_tensors"])
    adapted = adapted_policy(tiny[0], one_rank[2])
    _, expected = train_once(adapted, samples, adv_B, packs_of(10_000), one_rank[0])
    assert all("lora_" in name for name in expected) and relative(two_ranks[0]["lora_gradients"], expected) <= 2e-6
    assert all(fact["lora_same"] == {"float32": True, "bfloat16": True} for fact in two_ranks)
    for precision in ("float32", "bfloat16"):
        model = adapted_policy(tiny[0], one_rank[2], precision)
        whole = {name: param.full_tensor() for name, param in model.named_parameters() if param.requires_grad}
        for name, tensor in (dict(full_tensors(model, torch.float32)) | whole).items():
            assert torch.equal(tensors.pop(f"{precision} {name}"), tensor), name
    assert not tensors


def test_the_memory_plan_of_two_ranks_is_what_they_take(two_ranks):
    """Within 2%: nothing is off by more."""
    for rank in two_ranks:
        assert len(rank["memory"]) == 5 and not any(rank["memory"].values()), rank["memory"]


def test_engine_over_two_ranks_gives_the_tokens_of_one(engine, policy, two_ranks):
    engine.sync(full_tensors(policy, engine.dtype), 0)
    completions = engine.generate(PROMPTS, [0] * len(PROMPTS), SamplingOptions(0.0, 24))
    single = [completion.ids for completion in completions]
    assert two_ranks[0]["greedy"] == single and two_ranks[1]["greedy"] == single
    assert len({tuple(ids) for ids in single}) == len(PROMPTS)  # not one stuck answer


def test_conversations_of_an_engine_of_two_ranks_go_on_over_a_weight_change(two_ranks, tiny):
    """Each token is of the weights of its version. The engine's first rank grades and answers for both."""
    one, other = (facts["carried"] for facts in two_ranks)
    assert one["ids"] == other["ids"] and one["versions"] == other["versions"] and len(one["ids"]) == 8
    assert max(one["turns"]) == 2 and any(set(versions) == {0, 1} for versions in one["versions"])
    words = Tokenizer(tiny[0]).backend.encode("rank 0").ids
    for ids, num_turns, reward in zip(one["ids"], one["turns"], one["rewards"], strict=True):
        assert reward == num_turns
        assert num_turns == 1 or any(ids[i : i + len(words)] == words for i in range(len(ids)))
    assert max(one["gap"], other["gap"]) <= 1e-4


# ------------------------------------------------------------------------------------------------ which device, and how


def gpus(number, error=None, built=True):
    """A torch that sees so many GPUs, and what it says where it sees none."""
    cuda = {"is_available": number > 0, "device_count": number, "init": None}
    patches = [mock.patch(f"torch.cuda.{name}", return_value=value) for name, value in cuda.items()]
    patches[2] = mock.patch("torch.cuda.init", side_effect=error)
    return [*patches, mock.patch("torch.backends.cuda.is_built", return_value=built)]


OLD = RuntimeError("The NVIDIA driver on your system is too old (found version 12040).\nPlease update your GPU driver.")
NONE = RuntimeError("No CUDA GPUs are available")
BUILT = AssertionError("Torch not compiled with CUDA enabled")
DEVICES = [  # (GRPO_DEVICE, GPUs, what torch says, built for CUDA, CUDA_VISIBLE_DEVICES) -> device or refusal
    ("cuda", 2, None, True, None, "cuda:1"),
    (None, 2, None, True, "4,5", "cuda:1"),
    ("cpu", 0, BUILT, False, None, "cpu"),
    (None, 0, BUILT, False, None, "cpu"),
    ("cpu", 0, NONE, True, "", "cpu"),  # a torch for CUDA on a CPU, as told
    ("cuda", 0, OLD, True, None, r"too old \(found version 12040\)\. Please update your GPU driver \(see nvidia-smi\)"),
    ("cuda", 0, NONE, True, "", r"No CUDA GPUs are available \(CUDA_VISIBLE_DEVICES is '': unset it, or name a GPU\)"),
    (None, 0, NONE, True, "7", r"No CUDA GPUs are available \(CUDA_VISIBLE_DEVICES is '7'"),
    ("cuda", 1, None, True, None, "torch sees 1 GPUs, and each process needs one: use --nproc_per_node=1"),
    ("cpu", 1, None, True, None, "GRPO_DEVICE=cpu, but torch is for CUDA and sees a GPU: unset it, or"),
]


@pytest.mark.parametrize(("wanted", "number", "error", "built", "visible", "expected"), DEVICES)
def test_a_run_has_the_device_it_was_started_for_or_ends(monkeypatch, wanted, number, error, built, visible, expected):
    for name, value in (("GRPO_DEVICE", wanted), ("CUDA_VISIBLE_DEVICES", visible)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with contextlib.ExitStack() as stack:
        for patch in gpus(number, error, built):
            stack.enter_context(patch)
        if re.fullmatch(r"cpu|cuda:\d", expected):
            assert str(base.system.ranks.choose_device(1)) == expected
        else:
            with pytest.raises(ConfigError, match=expected) as refusal:
                base.system.ranks.choose_device(1)
            assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("given", "left", "later"),
    [
        ({}, {}, "expandable_segments:True"),
        ({ALLOC: "expandable_segments:True"}, {}, "expandable_segments:True"),
        ({CUDA_ALLOC: "max_split_size_mb:64, expandable_segments: True"}, {CUDA_ALLOC: "max_split_size_mb:64"}, None),
        ({ALLOC: "expandable_segments:True", CUDA_ALLOC: "expandable_segments:True"}, {}, "expandable_segments:True"),
        ({ALLOC: "expandable_segments:False"}, {ALLOC: "expandable_segments:False"}, ""),
    ],
)
def test_segments_grow_only_after_the_engine_sleeps(one_rank, monkeypatch, capsys, given, left, later):
    """Not as the environment says, from which vLLM's engine would get memory that cannot sleep."""
    for name in (ALLOC, CUDA_ALLOC):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen, told = [], []
    device = torch.device("cpu")
    monkeypatch.setattr(base.system.ranks, "choose_device", lambda _: seen.append(environment()) or device)
    monkeypatch.setattr(base.system.ranks.dist, "init_process_group", lambda *_, **__: None)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    start_process_group(tp_size=1)
    assert seen == [left] == [environment()]
    said = capsys.readouterr().out
    assert all(f"{name}={value}" in said for name, value in given.items()) if given != left else said == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("empty cache"))
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    base.system.allocator.expand_segments()
    later = "max_split_size_mb:64,expandable_segments:True" if later is None else later
    assert told == (["empty cache", later] if later else [])


def environment():
    return {name: os.environ[name] for name in (ALLOC, CUDA_ALLOC) if name in os.environ}


def test_a_watchdog_ends_a_run_before_a_collective_does(monkeypatch):
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    limit = base.system.ranks.COLLECTIVE_TIMEOUT.total_seconds()
    for name in ("min_seconds", "first_seconds"):
        assert getattr(load("configs/smoke.yaml", [f"watchdog.{name}={limit - 1}"]).watchdog, name) == limit - 1
        with pytest.raises(ConfigError, match=rf"watchdog\.{name}.*< {limit:.0f}"):
            load("configs/smoke.yaml", [f"watchdog.{name}={limit}"])


@pytest.mark.slow
def test_float32_is_no_tf32_and_files_have_no_low_limit_whatever_the_image_says():
    code = "import resource, torch, base.system.ranks as r; r.dist.init_process_group = lambda *_, **__: None\n"
    code += "r.gather = lambda *_: ['x']; before = torch.get_float32_matmul_precision()\n"
    code += "most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
    code += "resource.setrlimit(resource.RLIMIT_NOFILE, (200, most)); r.start_process_group(1)\n"
    code += "after = resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)\n"
    code += "print(before, torch.get_float32_matmul_precision(), after)"
    env = os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "GRPO_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.stdout == "high highest True\n", run.stderr


ABORTS_IN_TEARDOWN = """
import atexit, ctypes, sys
import torch
from base.system import exits
libc = ctypes.CDLL(None)
libc.on_exit(libc.abort, None)  # as a destructor does that finds what it needs destroyed before it
atexit.register(print, "at exit", file=sys.stderr)  # as vLLM 0.32 shuts its engine down
torch.cuda.is_initialized = lambda: sys.argv[1] == "cuda"
print("last words")
exits.exit_process(int(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("device", "code", "ends"), [("cuda", 0, 0), ("cuda", 75, 75), ("cpu", 0, -signal.SIGABRT)])
def test_on_cuda_what_the_teardown_frees_cannot_end_a_good_run_badly(device, code, ends):
    """The output goes to a pipe: it is in a buffer when the process ends."""
    command = [sys.executable, "-c", ABORTS_IN_TEARDOWN, device, str(code)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (ends, "last words\n", "at exit\n" if device == "cpu" else "")
