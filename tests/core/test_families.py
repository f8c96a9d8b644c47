"""Every parameter of every family arrives in the engine. Qwen3, tied, is in test_engine.py; each engine needs a process
of its own."""

import contextlib
from dataclasses import replace

import operators_on_cpu
import pytest
import torch
import torch.distributed as dist
from families import hf_config, make_family
from ranks import ranks
from tiny import VOCAB_SIZE, make_tiny

import config
import engine as engine_module
from base.hf.families import FAMILIES, WHOLE
from base.hf.family import NATIVE
from base.hf.folder import from_hf
from base.hf.tokenizer import Tokenizer
from base.hf.weights import full_tensors, local_shard, sharded_parameters
from base.system.ranks import start_process_group
from config import ConfigError
from engine import VLLMEngine
from head import HeadOptions, response_logps
from model import load_policy
from pack import pack_samples, rows_of, to_device
from records import Sample, SamplingOptions, TokenSequence
from run.build import check_cpu_operators, check_cpu_sizes

HEAD = HeadOptions(0.8, VOCAB_SIZE)


def gap(engine, policy):
    """Largest |sampler - trainer| over some sampled tokens."""
    prompts = [[(31 * i + 7 * j) % 250 for j in range(4 + i)] for i in range(8)]
    done = engine.generate(prompts, list(range(8)), SamplingOptions(0.8, 8))
    worst = 0.0
    for ids, completion in zip(prompts, done, strict=True):
        (pack,) = pack_samples([rows_of([Sample(0, 0, 0, [TokenSequence(ids, completion.tokens)])])], 64)
        with torch.no_grad():
            micro = to_device(pack, torch.device("cpu"))
            head = replace(HEAD, softcap=policy.config.softcap)
            logp_R, _ = response_logps(policy, micro.model_inputs, micro.target_R, head)
        worst = max(worst, (logp_R - micro.sampler_logp_R).abs().max().item())
    return worst


def head_error(engine, policy):
    """Largest difference between the engine's logits and float64's of the hidden states it had, and of the head that
    the policy has."""
    seen = []

    def keep(_, inputs, logits):
        seen.append((inputs[1].double(), logits.double()))

    (hook,) = engine.llm.apply_model(lambda model: model.logits_processor.register_forward_hook(keep))
    gap(engine, policy)
    hook.remove()
    head_VD = dict(full_tensors(policy, engine.dtype))["lm_head.weight"][:VOCAB_SIZE].double()
    return max((logits - hidden @ head_VD.T).abs().max().item() for hidden, logits in seen)


@ranks(1, seconds=180, with_vllm=True)
def gaps_of(family, folder, compare, precision="float32", names=None, packs_experts_anew=True):
    """Name of a parameter -> (gap after it alone was perturbed, gap after the next sync); "start" is before."""
    if family in ("qwen2", "llama"):
        make_tiny(folder, family=family, tied=False)
    else:
        make_tiny(folder)  # for its tokenizer
        make_family(family).save_pretrained(folder)
    _, device = start_process_group(tp_size=1)
    tokenizer, mesh = Tokenizer(folder), dist.init_device_mesh("cpu", (1,))
    policy = load_policy(folder, device=device, mesh=mesh, precision=precision)
    cfg = config.Config(policy=config.PolicyConfig(precision=precision, max_total_sequence_length=64))
    if policy.config.family.state is not None:
        operators_on_cpu.install()
    engine = VLLMEngine(folder, policy.config, tokenizer, cfg)
    if not packs_experts_anew:
        engine_module._pack_experts_anew = lambda model: None
    engine.sync(full_tensors(policy, engine.dtype), 0)
    found = {"start": (0.0, compare(engine, policy))}
    for name, param in sharded_parameters(policy).items():
        is_of_early_block = "layers.0." in name
        if policy.config.num_hidden_layers > 2 and policy.config.family.state is None:  # its layers are of one kind
            is_of_early_block |= "layers.1." in name
        if name in names if names else not is_of_early_block:
            with torch.no_grad():
                shard = local_shard(param)
                shard.add_(0.1 * torch.randn(shard.shape, generator=torch.Generator().manual_seed(1)))
            stale = compare(engine, policy)
            engine.sync(full_tensors(policy, engine.dtype), 0)
            found[name] = stale, compare(engine, policy)
    return found


# What Qwen3, all of whose parameters test_engine.py changes, has not.
ONLY_QWEN2 = [f"model.layers.1.self_attn.{name}_proj.bias" for name in "qkv"] + ["lm_head.weight"]
NUM_PARAMETERS = {"qwen2": 15, "llama": 12}  # outside the first block


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("qwen2", ONLY_QWEN2),
        pytest.param("qwen2", None, marks=pytest.mark.long),
        pytest.param("llama", None, marks=pytest.mark.long),
    ],
)
def test_every_parameter_reaches_the_engine(family, names, tmp_path):
    (gaps,) = gaps_of(family, tmp_path, gap, names=names)
    assert gaps.pop("start")[1] <= 1e-4
    assert len(gaps) == (len(names) if names else NUM_PARAMETERS[family]), gaps.keys()
    assert "lm_head.weight" in gaps
    assert ("model.layers.1.self_attn.k_proj.bias" in gaps) == (family == "qwen2")
    unseen = {name for name, (stale, _) in gaps.items() if stale <= 1e-3}
    assert all(name.endswith("k_proj.bias") for name in unseen), unseen  # softmax does not see it
    assert {name: fresh for name, (_, fresh) in gaps.items() if fresh > 1e-4} == {}


@pytest.mark.long
def test_an_engine_in_bfloat16_has_the_logits_of_the_head_it_was_sent_in_float32(tmp_path):
    """Logits of 1 to 4, rounded to bfloat16, would be off by up to 8e-3."""
    (errors,) = gaps_of("llama", tmp_path, head_error, "bfloat16", ["lm_head.weight"])
    assert errors["start"][1] <= 1e-5
    stale, fresh = errors["lm_head.weight"]
    assert stale >= 0.1 and fresh <= 1e-5, errors


# In vLLM, olmo3 is transformers' own class, which vLLM changes for the whole process.
ALWAYS = ("olmo3", "qwen3_moe")
OTHERS = [name for name in FAMILIES if name not in NATIVE] + [*WHOLE]
TABLE = [pytest.param(name, marks=pytest.mark.slow if name in ALWAYS else pytest.mark.long) for name in OTHERS]
UNSEEN = ("k_proj.bias", "layers.3.layer_scalar")  # softmax does not see the one, nor the final norm Gemma 4's last


@pytest.mark.parametrize("family", TABLE)
def test_every_parameter_of_transformers_blocks_reaches_the_engine(family, tmp_path):
    (gaps,) = gaps_of(family, tmp_path, gap)
    print({name: f"{stale:.1e} {fresh:.1e}" for name, (stale, fresh) in gaps.items()})
    assert gaps.pop("start")[1] <= 1e-4
    assert {name for name, (stale, _) in gaps.items() if stale <= 1e-3 and not name.endswith(UNSEEN)} == set()
    assert {name: fresh for name, (_, fresh) in gaps.items() if fresh > 1e-4} == {}


def test_experts_that_vllm_does_not_compute_on_a_cpu():
    config = from_hf(hf_config("qwen3_moe", hidden_size=72).to_dict())
    with pytest.raises(ConfigError, match=r"policy\.model_name: hidden_size=72: .* multiples of 32: use another"):
        check_cpu_sizes(config, "cpu")
    check_cpu_sizes(config, "cuda")
    check_cpu_sizes(from_hf(hf_config("qwen3_moe").to_dict()), "cpu")
    check_cpu_sizes(from_hf(hf_config("mistral", hidden_size=72).to_dict()), "cpu")


@pytest.mark.parametrize(
    ("family", "fields", "precision", "problem"),
    [
        ("qwen3_next", {}, "float32", "gated delta nets in bfloat16 alone"),
        ("qwen3_next", {}, "bfloat16", None),
        ("nemotron_h", {}, "float32", "no experts without a gate"),
        ("nemotron_h", {"layers_block_type": ["linear_attention", "full_attention", "mlp"]}, "float32", None),
        ("granitemoehybrid", {}, "float32", None),
        ("lfm2_moe", {}, "float32", None),
    ],
)
def test_operators_that_vllm_does_not_have_on_a_cpu(family, fields, precision, problem):
    if fields:
        fields = fields | {"num_hidden_layers": 3}
    hf = hf_config(family, **fields).to_dict()
    hf.pop("time_step_limit", None)
    expected = pytest.raises(ConfigError, match=problem) if problem else contextlib.nullcontext()
    with expected:
        check_cpu_operators(from_hf(hf), config.Config(policy=config.PolicyConfig(precision=precision)))


@pytest.mark.slow  # asks the real vLLM
@pytest.mark.parametrize(("size", "is_computed"), [(16, False), (32, True), (48, False), (96, True), (200, False)])
def test_heads_that_vllm_does_not_compute_on_a_cpu_are_an_error(size, is_computed):
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert (size in CPUAttentionBackend.get_supported_head_sizes()) == is_computed
    config = from_hf(hf_config("mistral", head_dim=size).to_dict())
    check_cpu_sizes(config, "cuda")
    if is_computed:
        check_cpu_sizes(config, "cpu")
        return
    with pytest.raises(ConfigError, match=f"head_dim={size}"):
        check_cpu_sizes(config, "cpu")


@pytest.mark.long
def test_vllm_does_not_pack_experts_anew_by_itself(tmp_path):
    """When this fails, `engine._pack_experts_anew` has become redundant."""
    (gaps,) = gaps_of(
        "qwen3_moe", tmp_path, gap, names=["model.layers.2.mlp.experts.down_proj"], packs_experts_anew=False
    )
    assert gaps["start"][1] > 0.1
