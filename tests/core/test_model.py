"""model.py against transformers, against itself one sequence at a time, and through its shards."""

import math
from itertools import pairwise

import pytest
import torch
from hf_folders import (
    FAMILIES,
    LENGTHS,
    QWEN2,
    SIZES,
    hf_from_pretrained,
    layout_of,
    make_hf_folder,
    make_pack,
    response_rows,
)
from ranks import ranks
from safetensors.torch import load_file
from samples import groups_that_share_prompts
from torch.distributed.device_mesh import init_device_mesh

import model as model_module
from base.hf.folder import from_hf
from base.hf.weights import full_tensors, load_weights, save_hf
from base.system.ranks import start_process_group
from head import HeadOptions, response_logps
from model import load_policy
from pack import assign_to_ranks, pack_samples, rows_of, to_device


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    return {family: (root / family, make_hf_folder(root / family, **FAMILIES[family])) for family in FAMILIES}


def grads(model):
    out = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    return out


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_equal_transformers(folders, family):
    folder, hf_model = folders[family]
    model = load_policy(folder, device="cpu")
    assert set(model.state_dict()) == {name for name, _ in hf_model.named_parameters()}
    token_T, position_T, layout = make_pack([97])
    position_T = 2 * position_T  # with gaps: attention sees differences of positions only
    attend_T = torch.ones_like(token_T)  # else transformers takes a gap for the start of a new sequence
    expected_TV = hf_model(token_T[None], attend_T[None], position_ids=position_T[None]).logits[0]
    assert expected_TV.std() > 0.5  # logits that would hide an error are none
    gap = (model(token_T, position_T, layout) - expected_TV).abs().max().item()
    print(f"{family}: max |delta logit| {gap:.1e} at std {expected_TV.std():.2f}")
    assert gap <= 1e-4


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama3"])
def test_packed_equals_one_by_one(folders, family):
    model = load_policy(folders[family][0], device="cpu")
    token_T, position_T, layout = make_pack(LENGTHS)
    packed_TV = model(token_T, position_T, layout)
    weight_TV = torch.randn(packed_TV.shape, generator=torch.Generator().manual_seed(1))
    (packed_TV * weight_TV).sum().backward()
    packed_grads = grads(model)
    for start, end in pairwise(layout.cu_queries.tolist()):
        rows = slice(start, end)
        single_TV = model(token_T[rows], position_T[rows], layout_of(end - start))
        assert (single_TV - packed_TV[rows]).abs().max() <= 1e-5
        (single_TV * weight_TV[rows]).sum().backward()
    for name, grad in grads(model).items():
        assert (grad - packed_grads[name]).norm() <= 1e-5 * grad.norm(), name


def test_logp_and_entropy_are_those_of_the_logits(folders):
    model = load_policy(folders["qwen2"][0], device="cpu")
    token_T, position_T, layout = make_pack(LENGTHS, vocab=200)
    pos_R, target_R = response_rows(LENGTHS, token_T)
    logp_R, entropy_R = response_logps(model, (token_T, position_T, layout, pos_R), target_R, HeadOptions(0.7, 200))
    logits_TV = model(token_T, position_T, layout).detach().double()
    for i, (row, target) in enumerate(zip(pos_R.tolist(), target_R.tolist(), strict=True)):
        scaled = [value / 0.7 for value in logits_TV[row, :200].tolist()]
        largest = max(scaled)
        log_sum = largest + math.log(sum(math.exp(value - largest) for value in scaled))
        assert abs(logp_R[i].item() - (scaled[target] - log_sum)) <= 2e-5
        entropy = -sum(math.exp(value - log_sum) * (value - log_sum) for value in scaled)
        assert abs(entropy_R[i].item() - entropy) <= 2e-5


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])  # tied, untied
def test_no_response_rows_gives_zero_gradients_everywhere(folders, family):
    model = load_policy(folders[family][0], device="cpu")
    none = torch.zeros(0, dtype=torch.int64)
    logp_R, entropy_R = response_logps(model, (*make_pack([1]), none), none, HeadOptions(vocab=200))
    assert logp_R.shape == entropy_R.shape == (0,)
    logp_R.sum().backward()
    for name, param in model.named_parameters():
        assert param.grad is not None and not param.grad.any(), name


# --- shards ---


def float64_logps(model, samples, max_tokens, *, share_prefix):
    """(logp of each sampled token, sample by sample; gradients of a loss of all of them; tokens computed) of two ranks
    together, with the head in plain float64."""
    logps = {}
    num_tokens = 0
    for share in assign_to_ranks(rows_of(samples), 2, max_tokens, share_prefix):
        for pack in pack_samples(share, max_tokens):
            micro = to_device(pack, torch.device("cpu"))
            logits_RV = model(*micro.model_inputs, lambda hidden_RD, weight_VD: hidden_RD @ weight_VD.T)
            logp_R = logits_RV.log_softmax(-1).gather(1, micro.target_R[:, None])[:, 0]
            (logp_R * torch.sin(3 * micro.adv_R.double() + micro.target_R)).sum().backward()
            logps |= {number: logp_R[micro.adv_R == number].detach() for number in micro.adv_R.unique().tolist()}
            num_tokens += len(micro.token_T)
    return torch.cat([logps[number] for number in sorted(logps)]), grads(model), num_tokens


@pytest.mark.slow("^(?!qwen3-True)")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prompts_change_nothing_in_float64(folders, family, recompute):
    model = load_policy(folders[family][0], device="cpu", recompute=recompute).double()
    for max_tokens in (90, 4000):  # groups split over packs, and whole
        samples = groups_that_share_prompts(max_tokens)
        logp, gradients, num_tokens = float64_logps(model, samples, max_tokens, share_prefix=True)
        expected, expected_gradients, num_tokens_alone = float64_logps(model, samples, max_tokens, share_prefix=False)
        assert num_tokens < num_tokens_alone
        assert ((logp - expected).abs() <= 1e-12 * expected.abs()).all()
        for name, grad in gradients.items():
            assert (grad - expected_gradients[name]).norm() <= 1e-12 * grad.norm(), name


def logp_loss(model, pack, pos_R, target_R, vocab=None):
    logp_R, _ = response_logps(model, (*pack, pos_R), target_R, HeadOptions(vocab=vocab))
    return -logp_R.sum()


@pytest.mark.slow("qwen2|False")
@pytest.mark.parametrize("recompute", [False, True, 1, "offload"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_one_rank_equals_the_plain_model(folders, family, recompute, one_rank, monkeypatch):
    folder, pack = folders[family][0], make_pack(LENGTHS, vocab=200)
    plain, rows = load_policy(folder, device="cpu"), response_rows(LENGTHS, pack[0])
    expected_TV = plain(*pack)
    logp_loss(plain, pack, *rows, vocab=200).backward()
    plain_grads = grads(plain)
    model = load_policy(folder, device="cpu", mesh=one_rank[2], recompute=recompute)
    assert [name for name, _ in model.named_parameters()] == list(plain_grads)
    with torch.no_grad():
        assert torch.equal(model(*pack), expected_TV)
    calls, attention = [], model_module.packed_attention
    monkeypatch.setattr(model_module, "packed_attention", lambda *args: calls.append(1) or attention(*args))
    logp_loss(model, pack, *rows, vocab=200).backward()
    num_blocks = SIZES["num_hidden_layers"]
    num_again = int(recompute) if recompute in (False, 1) and recompute is not True else num_blocks
    assert len(calls) == num_blocks + num_again
    for name, param in model.named_parameters():
        grad = param.grad.full_tensor()
        assert (grad - plain_grads[name]).norm() <= 1e-6 * grad.norm(), name


def test_bfloat16_compute_keeps_float32_masters(folders, one_rank):
    folder, hf_model = folders["llama3"]
    pack = make_pack([50])
    model = load_policy(folder, device="cpu", mesh=one_rank[2], precision="bfloat16")
    logits_TV = model(*pack)
    for name, tensor in full_tensors(model, torch.float32):  # not the bfloat16 copies the root has gathered
        assert torch.equal(tensor, hf_model.state_dict()[name]), name
    half = hf_from_pretrained(folder, torch.bfloat16)
    exact_TV, half_TV = (m(pack[0][None]).logits[0].float() for m in (hf_model, half))
    assert logits_TV.dtype == torch.bfloat16
    # as close to float32 as transformers is in the same precision
    assert (logits_TV.float() - exact_TV).norm() <= 1.2 * (half_TV - exact_TV).norm()
    logp_loss(model, pack, *response_rows([50], pack[0])).backward()
    assert {(p.dtype, p.grad.dtype) for p in model.parameters()} == {(torch.float32, torch.float32)}


def test_bfloat16_recompute_gives_the_same_gradients(folders, one_rank):
    """The float32 between the blocks is what recompute starts from."""
    pack = make_pack(LENGTHS, vocab=200)
    found = []
    for recompute in (False, True, 1, "offload"):
        options = {"precision": "bfloat16", "recompute": recompute}
        model = load_policy(folders["qwen3"][0], device="cpu", mesh=one_rank[2], **options)
        logp_loss(model, pack, *response_rows(LENGTHS, pack[0]), vocab=200).backward()
        found.append({name: param.grad.full_tensor() for name, param in model.named_parameters()})
    assert all(torch.equal(grad, grads[name]) for grads in found[1:] for name, grad in found[0].items())
    assert any(grad.abs().max() > 0 for grad in found[0].values())


def equal_share(found, exact) -> float:
    """Share of the elements that are `exact`, float64, rounded once. Where something else is rounded before, a quarter
    of them and more are not."""
    assert exact.dtype == torch.float64 and found.shape == exact.shape
    return (found == exact.to(found.dtype)).double().mean().item()


def test_bfloat16_norm_and_rope_round_once():
    generator = torch.Generator().manual_seed(0)
    x_TD, weight_D = torch.randn(300, 64, generator=generator) * 3, torch.rand(64, generator=generator).bfloat16() + 0.5
    norm = model_module.RMSNorm(64, 1e-5).bfloat16()
    norm.weight.data.copy_(weight_D)
    wide_TD = x_TD.double()
    expected_TD = wide_TD / (wide_TD.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight_D.double()
    assert norm(x_TD).dtype == torch.bfloat16 and equal_share(norm(x_TD), expected_TD) >= 0.99

    config, position_T = from_hf(QWEN2), torch.arange(300)
    x_TNH = torch.randn(300, 2, config.head_dim, generator=generator).bfloat16()
    even_H = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    angle_T1H = position_T.double()[:, None, None] * config.rope_theta ** (-even_H / config.head_dim)
    turned_TNH = torch.complex(*x_TNH.double().chunk(2, -1)) * torch.polar(torch.ones_like(angle_T1H), angle_T1H)
    rotated_TNH = model_module.apply_rope(x_TNH, *model_module.rope_cos_sin(config, position_T))
    assert rotated_TNH.dtype == torch.bfloat16
    assert equal_share(rotated_TNH, torch.cat((turned_TNH.real, turned_TNH.imag), -1)) >= 0.99


def test_bfloat16_matmuls_add_up_in_float32(folders, one_rank):
    """What reaches the last norm is the embedding and what each half of a block gave, in bfloat16, summed exactly."""
    model = load_policy(folders["llama3"][0], device="cpu", mesh=one_rank[2], precision="bfloat16")
    parts, sums = [], []
    halves = [half for block in model.model.layers for half in (block.self_attn.o_proj, block.mlp)]
    for module in (model.model.embed_tokens, *halves):
        module.register_forward_hook(lambda module, inputs, out: parts.append(out.detach()))
    model.model.norm.register_forward_pre_hook(lambda module, inputs: sums.append(inputs[0].detach()))
    model(*make_pack([50]))
    assert len(parts) == 1 + len(halves) and {part.dtype for part in parts} == {torch.bfloat16}
    exact_TD = sum(part.double() for part in parts)
    assert sums[0].dtype == torch.float32 and (sums[0] - exact_TD).norm() <= 1e-6 * exact_TD.norm()


@ranks(2)
def two_ranks(folder, work):
    place, _ = start_process_group(tp_size=1)
    rank, mesh = place.rank, init_device_mesh("cpu", (2,))
    plain, model = load_policy(folder, device="cpu"), load_policy(folder, device="cpu", mesh=mesh)
    rows = {name: len(param.to_local()) for name, param in model.named_parameters()}
    assert rows["model.embed_tokens.weight"] == [106, 105][rank]
    assert rows["model.layers.0.mlp.up_proj.weight"] == [1, 0][rank]
    pack, stored = make_pack([4 + rank, 7]), load_file(folder / "model.safetensors")

    # Each parameter's rows are where they belong, also right after a forward that left the root gathered.
    logits_TV = model(*pack)
    for name, tensor in full_tensors(model, torch.float32):
        assert torch.equal(tensor, stored.pop(name)), name
    assert not stored
    assert torch.equal(logits_TV, plain(*pack))

    # An optimizer's update and a load: no forward may see what the one before had gathered.
    held = list(model.parameters())
    with torch.no_grad():
        model(*pack)
        for param in (*held, *plain.parameters()):
            param.mul_(1.5)
        assert torch.equal(model(*pack), plain(*pack))
        load_weights(model, folder)
        assert all(param is sharded for param, sharded in zip(held, model.parameters(), strict=True))
        assert torch.equal(model(*pack), logits_TV)

        save_hf(model, work / "export", folder, dtype=torch.float32)
        export = load_policy(work / "export", device="cpu")
        assert torch.equal(export(*pack), logits_TV)

    # A rank without response rows takes part in the backward; gradients are sums over the ranks.
    pos_R, target_R = response_rows([4, 7], make_pack([4, 7])[0])
    used = slice(0) if rank == 1 else slice(None)
    logp_loss(model, make_pack([4, 7]), pos_R[used], target_R[used]).backward()
    plain = load_policy(folder, device="cpu")
    logp_loss(plain, make_pack([4, 7]), pos_R, target_R).backward()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        grad = param.grad.full_tensor()
        assert (grad - expected.grad).norm() <= 1e-5 * grad.norm(), name

    # bfloat16 gradients of two ranks are added in float32: the sums do not fit into bfloat16 again.
    model = load_policy(folder, device="cpu", mesh=mesh, precision="bfloat16")
    logp_loss(model, make_pack([4, 7], seed=rank), pos_R, target_R).backward()
    grad = model.lm_head.weight.grad.to_local()
    assert grad.dtype == torch.float32 and not torch.equal(grad, grad.bfloat16().float())


def test_two_ranks_with_uneven_and_empty_shards(tmp_path):
    make_hf_folder(tmp_path / "tiny", **FAMILIES["qwen3"], intermediate_size=1)
    two_ranks(tmp_path / "tiny", tmp_path)
