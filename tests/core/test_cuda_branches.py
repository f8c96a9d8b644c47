"""The training step of one process as on CUDA, on meta tensors: the shape, dtype and device of everything in it.

Real are model, head, loss, autograd, clipping and optimizer, with the branches that a CUDA device takes. Stand-ins:
`Launch` for a Triton kernel, `reduce_gradients` for FSDP2, `verdict` for the number that a step reads back, and
`foreach_for_fused` for AdamW's kernel. Meta tensors have no numbers: code that reads another one back raises.
"""

import inspect
from collections import Counter
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from dist_case import make_samples, settings
from hf_folders import SIZES
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attention
import grpo
from attention import PackLayout, uses_flash_attention
from gap import Gap
from head import HeadOptions, LossPath, response_logps
from kernels import row_kernels, sizes
from kernels.backend import choose_backend
from metrics import accumulate
from model import Decoder
from optim import build_optimizer, clip_grad_norm, judge_step
from pack import finish_minibatches, make_minibatches
from support.inputs.model_config import ModelConfig
from support.run import start

META, CPU = torch.device("meta"), torch.device("cpu")
VOCAB = 200  # of the tokenizer; the model has 211 rows
CHUNK = 48  # rows of logits at once: several chunks, the last one smaller
QWEN3 = SIZES | {"model_type": "qwen3", "head_dim": 16, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 1e6}
# What a kernel reads or writes through each of its pointers.
POINTERS = dict.fromkeys(["logits_ptr", "stats_ptr", "g_ptr", "h_ptr"], torch.float32)
POINTERS |= {"dlogits_ptr": torch.bfloat16, "target_ptr": torch.int64}
WAYS = {  # kernel backend, path of the loss, kernels of a step
    "one pass": ("auto", "one pass", {"row_stats_kernel", "dlogits_kernel"}),
    "two passes": ("auto", "two passes", {"row_stats_kernel", "dlogits_kernel"}),
    "torch": ("torch", "one pass", set()),
}
MATMULS = ("aten.mm.", "aten.addmm.", "aten.bmm.")
WIDE_MATMULS = {"aten.mm.dtype_out", "aten.addmm.dtype_out"}  # of 16 bits, summed and written as float32


class Launch:
    """In place of a Triton kernel: binds each launch to the kernel's own parameters, and checks what it would get."""

    def __init__(self, kernel, launched: Counter):
        self.name = kernel.fn.__name__
        self.parameters = inspect.signature(kernel.fn)
        self.launched = launched

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, num_stages=3, **constants):
            given = self.parameters.bind(*arguments, **constants).arguments
            for name, value in given.items():
                if isinstance(value, torch.Tensor):
                    assert (value.device, value.dtype) == (META, POINTERS[name]), (self.name, name)
            # Rows for at least as many programs, each row whole in 16 bytes.
            num_rows, row_stride = len(given["target_ptr"]), given["logits_ptr"].stride(0)
            assert 0 < grid[0] <= num_rows == len(given["logits_ptr"]) == given["num_rows"]
            assert given["vocab"] == VOCAB <= given["row_stride"] == row_stride and row_stride % 16 == 0
            assert num_warps in (1, 2, 4, 8, 16)
            self.launched[self.name] += 1

        return launch


def reduce_gradients(compute: Decoder, masters: Decoder) -> None:
    """As FSDP2: the gradients of the bfloat16 copies that compute are added to those of the float32 parameters."""
    for (name, copy), master in zip(compute.named_parameters(), masters.parameters(), strict=True):
        assert (copy.grad.shape, copy.grad.dtype, copy.grad.device) == (copy.shape, torch.bfloat16, META), name
        grad = copy.grad.float()
        master.grad = grad if master.grad is None else master.grad + grad
        copy.grad = None


class OnDevice(TorchDispatchMode):
    """Counts the operations, and refuses what CUDA refuses: tensors of the host beside the device's. Factors of
    matmuls must have 16 bits. A copy to the host is of ones, and a "host wait"."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, tensors = str(func), [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if name == "aten._to_copy.default" and (args[0].device, kwargs.get("device")) == (META, CPU):
            self.counts["host waits"] += 1
            return torch.ones(args[0].shape, dtype=args[0].dtype)  # what the host reads
        out = func(*args, **(kwargs or {}))
        on_host = [x for x in tensors if x.device != META and x.dim()]
        assert not on_host or len(on_host) == len(tensors), f"{name}: {[(x.shape, x.device) for x in tensors]}"
        if name.startswith(MATMULS) and not on_host:
            dtypes = Counter(x.dtype for x in tensors)
            assert dtypes.pop(torch.bfloat16) >= 2 and bool(dtypes) == (name in WIDE_MATMULS), (name, tensors)
        self.counts[name] += 1
        return out


@pytest.fixture
def launched(monkeypatch):
    """Meta tensors are taken for those of a GPU with 132 multiprocessors. Returns the launches by kernel."""
    launched, gpu = Counter(), SimpleNamespace(multi_processor_count=132, L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: x.device == META), raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(attention, "uses_flash_attention", lambda _, dtype: uses_flash_attention("cuda", dtype))
    monkeypatch.setitem(sizes.TORCH_CHUNK_ELEMENTS, "meta", CHUNK * VOCAB)  # its entry for "cuda" takes the pack whole
    for name, kernel in list(vars(row_kernels).items()):
        if name.endswith("_kernel"):
            monkeypatch.setattr(row_kernels, name, Launch(kernel, launched))
    return launched


def policy(*, recompute: bool) -> Decoder:
    with META:
        model = Decoder(ModelConfig.from_hf(QWEN3))
    for block in model.model["layers"]:
        block.recompute = recompute
    return model


def head_of(way: str) -> HeadOptions:
    option, kind, _ = WAYS[way]
    path = LossPath(kind, zero_adv_has_grad=False)
    return HeadOptions(vocab=VOCAB, backend=choose_backend(option, "cuda", CHUNK), path=path)


def meta_minibatch(cfg, path, ranks):
    """Built and counted on the host, as the numbers in it are read: then with its tensors on the device."""
    samples, adv_B = make_samples(VOCAB)
    adv_B[3] = adv_B[12] = 0.0  # rows without a gradient
    (minibatch,) = make_minibatches(samples, adv_B, cfg, ranks, CPU)
    finish_minibatches([minibatch], cfg, path, 0)
    for i, micro in enumerate(minibatch.micros):
        tensors = {f.name: getattr(micro, f.name) for f in fields(micro)}
        tensors = {name: x.to(META) for name, x in tensors.items() if isinstance(x, torch.Tensor)}
        layout = PackLayout.of(micro.cu_seqlens, micro.prefix_S, len(micro.token_T), META)
        minibatch.micros[i] = replace(micro, layout=layout, **tensors)
    return minibatch


def check_attention(monkeypatch, model):
    """A function that gives the calls of varlen_attn, each of which was checked, since it was asked last."""
    sizes, calls = model.config, []

    def checked(query_TNH, key_MKH, value_MKH, cu_queries, cu_keys, most_queries, most_keys, **options):
        heads, keys, H = sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim
        assert query_TNH.shape[1:] == (heads, H) and key_MKH.shape[1:] == value_MKH.shape[1:] == (keys, H)
        assert {x.dtype for x in (query_TNH, key_MKH, value_MKH)} == {torch.bfloat16}
        assert {(x.dtype, x.device) for x in (cu_queries, cu_keys)} == {(torch.int32, META)}
        assert cu_queries.shape == cu_keys.shape and isinstance(most_queries, int) and isinstance(most_keys, int)
        calls.append((len(query_TNH), len(key_MKH)))
        return varlen_attn(query_TNH, key_MKH, value_MKH, cu_queries, cu_keys, most_queries, most_keys, **options)

    def check_stream(block, inputs, hidden_TD):
        assert (hidden_TD.dtype, hidden_TD.device) == (torch.float32, META) and hidden_TD.shape == inputs[0].shape

    monkeypatch.setattr(attention, "varlen_attn", checked)
    for block in model.model["layers"]:
        block.register_forward_hook(check_stream)
    return calls


def foreach_for_fused(optimizer):
    """A step of AdamW but for one branch, which meta tensors do not have: one kernel for many parameters."""
    assert all(group["fused"] for group in optimizer.param_groups)
    with pytest.raises(RuntimeError, match=r"`fused=True` requires .* supported devices"):
        optimizer.step()
    for group in optimizer.param_groups:
        group |= {"fused": False, "foreach": True}
    optimizer.step()


def verdict(monkeypatch):
    """The gradient's norm, of which a step reads the number: it is one float32 of the device, and counts as 0.5."""
    total_norm, clip = torch.nn.utils.get_total_norm, torch.nn.utils.clip_grads_with_norm_
    number = SimpleNamespace(item=lambda: 0.5)

    def measured(gradients):
        norm = total_norm(gradients)
        assert (norm.device, norm.dtype, norm.shape) == (META, torch.float32, ())
        return SimpleNamespace(tensor=norm, device_mesh=SimpleNamespace(ndim=1), full_tensor=lambda: number)

    monkeypatch.setattr(torch.nn.utils, "get_total_norm", measured)
    monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", lambda *args: clip(*args[:-1], args[-1].tensor))


@pytest.mark.slow("two passes|torch|False")
@pytest.mark.parametrize("share_prefix", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_on_the_branches_of_cuda(way, share_prefix, launched, one_rank, monkeypatch):
    recompute = way == "one pass"
    cfg = settings(policy={"sequence_packing": replace(settings().policy.sequence_packing, share_prefix=share_prefix)})
    model, head = policy(recompute=recompute), head_of(way)
    minibatch = meta_minibatch(cfg, head.path, one_rank[0])
    attention_calls = check_attention(monkeypatch, model)
    verdict(monkeypatch)
    masters, sums = policy(recompute=recompute), {}
    model.bfloat16()
    optimizer = build_optimizer(masters, cfg.policy.optimizer)
    with OnDevice() as on_device:
        for micro in minibatch.micros:
            assert 0 < micro.num_grad_rows < len(micro.pos_R)
            with torch.no_grad():  # as for old and reference log-probabilities
                micro.old_logp_R, entropy_R = response_logps(model, micro.model_inputs, micro.target_R, head)
            assert micro.old_logp_R.shape == entropy_R.shape == micro.pos_R.shape
            assert {(x.dtype, x.device) for x in (micro.old_logp_R, entropy_R)} == {(torch.float32, META)}
            loss, metrics = grpo.compute_loss(model, head, micro, minibatch, cfg)
            assert (loss.dtype, loss.shape, loss.device) == (torch.float32, (), META)
            loss.backward()
            reduce_gradients(model, masters)
            accumulate(sums, metrics)
        assert {x.shape for x in tree_leaves(sums)} == {()}
        grad_norm = clip_grad_norm(masters, cfg.policy.max_grad_norm)
        zeros = dict.fromkeys(sums, 0.0)
        assert judge_step(zeros, Gap(0.0, 0.0), grad_norm, 0, cfg.grpo, step=1) == (True, 0)
        foreach_for_fused(optimizer)
    layers, (micro,) = model.config.num_hidden_layers, minibatch.micros
    assert len(attention_calls) == layers * (3 if recompute else 2)
    ((num_queries, num_keys),) = set(attention_calls)
    assert num_queries == len(micro.token_T) and (num_keys > num_queries) == share_prefix
    assert launched.keys() == WAYS[way][2], launched
    assert on_device.counts.keys() >= WIDE_MATMULS, on_device.counts
    # Keys and values are sorted once, in the layout; only the head's rows and the embedding's tokens are sorted here.
    assert on_device.counts["aten.segment_reduce.default"] == 2 * layers * share_prefix
    assert on_device.counts["aten.embedding_dense_backward.default"] == 2 and not on_device.counts["aten.tril.default"]
    for param in masters.parameters():
        moments = {name: x for name, x in optimizer.state[param].items() if name != "step"}
        assert moments.keys() == {"exp_avg", "exp_avg_sq"}
        assert {(x.shape, x.dtype, x.device) for x in moments.values()} == {(param.shape, torch.float32, META)}


@pytest.mark.parametrize("is_installed", [False, True])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flash_attention_3_is_for_hopper_where_it_is_installed(dtype, capability, is_installed, monkeypatch):
    activated = []
    monkeypatch.setattr(
        start, "find_spec", lambda name: "spec" if is_installed and "flash_attn_inter" in name else None
    )
    monkeypatch.setattr(start, "activate_flash_attention_impl", activated.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    words = start.choose_attention(torch.device("cuda", 0), dtype)
    is_third = dtype == torch.bfloat16 and capability == (9, 0) and is_installed
    assert activated == ["FA3"] * is_third and ("FlashAttention 3" in words) == is_third
    assert ("SDPA" in words) == (dtype == torch.float32)
