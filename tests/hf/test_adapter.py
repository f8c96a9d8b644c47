"""LoRA's folders: PEFT computes from ours what the trainer does, ours is trained from PEFT's; others are refused."""

import copy
import json
import shutil
import warnings
from dataclasses import replace

import pytest
import torch
from hf_folders import LENGTHS, make_pack, response_rows
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, make_tiny

from config import ConfigError, DTensorConfig, LoRAConfig, OptimizerConfig, PolicyConfig
from hf.adapter import CONFIG, WEIGHTS, adapter_config, check_adapter
from hf.model_config import read_model_config, resolve_folder
from hf.weights import load_adapter, save_adapter, save_hf
from model import load_policy
from optim import build_optimizer
from run.canary import check_canary
from run.checkpoint import weights_sha256

SHA256 = "0" * 64
CHOICES = {
    "all": LoRAConfig(enabled=True, dim=8, alpha=32.0),
    "by name": LoRAConfig(True, dim=1, alpha=0.5, match_all_linear=False, target_modules=("q_proj", "down_proj")),
    "by layer": LoRAConfig(True, dim=3, alpha=6.0, match_all_linear=False, target_modules=("*.layers.1.*_proj",)),
}


def policy_of(folder, lora):
    return PolicyConfig(model_name=str(folder), precision="float32", dtensor_cfg=DTensorConfig(lora_cfg=lora))


def adapted(folder, lora, seed=0):
    """The policy with adapters whose B is not the zeros of the start."""
    model = load_policy(folder, device="cpu", lora=lora, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("lora_B"):
                param.normal_(0, 0.1, generator=generator)
    return model


def write(model, folder, out, lora, sha256=SHA256):
    save_adapter(model, out, adapter_config(policy_of(folder, lora), read_model_config(folder)), sha256)
    return out


@torch.no_grad()
def logits_of(hf_model, token_T):
    return torch.cat([hf_model(ids[None]).logits[0] for ids in token_T.split(LENGTHS)])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(folder, transformers' model) of each family."""
    root = tmp_path_factory.mktemp("base")
    return {family: (root / family, make_tiny(root / family, family=family)) for family in FAMILIES}


@pytest.mark.slow("qwen|by name|llama-all")
@pytest.mark.parametrize(
    ("family", "choice"), [*((f, "all") for f in FAMILIES), ("qwen3", "by name"), ("llama", "by layer")]
)
@torch.no_grad()
def test_peft_and_transformers_compute_what_the_trainer_does(base, family, choice, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, hf_model = base[family]
    lora = CHOICES[choice]
    model, pack = adapted(folder, lora), make_pack(LENGTHS, vocab=250)
    ours_TV = model(*pack)
    bound = 1e-5 * ours_TV.abs().max()
    before_TV = logits_of(hf_model, pack[0])
    assert (ours_TV - before_TV).abs().max() > 1000 * bound  # or nothing is adapted
    for _ in range(2):  # the second replaces the first
        write(model, folder, tmp_path / "adapter", lora)
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [CONFIG, WEIGHTS]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PEFT warns of missing or unknown names
        theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / WEIGHTS)
    assert {t.dtype for t in stored.values()} == {torch.float32}
    assert len(stored) == sum("lora_" in name for name, _ in theirs.named_parameters())
    assert (logits_of(theirs, pack[0]) - ours_TV).abs().max() <= bound

    save_hf(model, tmp_path / "merged", folder, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (logits_of(merged, pack[0]) - ours_TV).abs().max() <= bound
    assert torch.equal(load_policy(tmp_path / "merged", device="cpu")(*pack), ours_TV)
    # In float32 the bound is of the largest logit, about 5; without its rounding it is an absolute one.
    assert (logits_of(theirs.double(), pack[0]) - model.double()(*pack)).abs().max() <= 1e-5


@pytest.mark.parametrize("choice", CHOICES)
@torch.no_grad()
def test_a_folder_of_ours_is_a_start(base, choice, tmp_path):
    folder, lora = base["qwen3"][0], CHOICES[choice]
    model, pack = adapted(folder, lora), make_pack(LENGTHS)
    path = write(model, folder, tmp_path / "adapter", lora)
    lora = replace(lora, adapter_path=str(path))
    check_adapter(policy_of(folder, lora), read_model_config(folder))
    started = load_policy(folder, device="cpu", lora=lora, seed=7)
    assert not torch.equal(started(*pack), model(*pack))
    load_adapter(started, path, SHA256)
    assert torch.equal(started(*pack), model(*pack))


@torch.no_grad()
def test_a_folder_of_peft_is_a_start(base, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = base["qwen2"][0]
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    config = LoraConfig(r=5, lora_alpha=20, target_modules=["v_proj", "up_proj"], task_type="CAUSAL_LM")
    theirs = get_peft_model(theirs, config).eval()
    for name, param in theirs.named_parameters():
        if "lora_B" in name:
            param.normal_(0, 0.1)
    theirs.save_pretrained(tmp_path / "adapter")
    names = ("up_proj", "v_proj")
    path = str(tmp_path / "adapter")
    lora = LoRAConfig(True, dim=5, alpha=20.0, match_all_linear=False, target_modules=names, adapter_path=path)
    check_adapter(policy_of(folder, lora), read_model_config(folder))
    model = load_policy(folder, device="cpu", lora=lora)
    load_adapter(model, path, SHA256)
    pack = make_pack(LENGTHS, vocab=250)
    ours_TV = model(*pack)
    assert (logits_of(theirs, pack[0]) - ours_TV).abs().max() <= 1e-5 * ours_TV.abs().max()


# ------------------------------------------------------------------------------------------------- what is refused


def edit_config(**changes):
    def edit(path):
        fields = json.loads((path / CONFIG).read_text())
        (path / CONFIG).write_text(json.dumps(fields | changes))

    return edit


def edit_tensors(change, metadata=None):
    def edit(path):
        tensors = load_file(path / WEIGHTS)
        change(tensors)
        save_file(tensors, path / WEIGHTS, metadata=metadata)

    return edit


A = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
K = "base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"
CUT, DROP = edit_tensors(lambda tensors: tensors.update({A: torch.zeros(8, 65)})), edit_tensors(lambda t: t.pop(A))
REFUSED = {
    "DoRA": (edit_config(use_dora=True), "use_dora=True is not trained here"),
    "rsLoRA": (edit_config(use_rslora=True), "use_rslora=True is not trained here"),
    "biases": (edit_config(bias="all"), "bias='all' is not trained here"),
    "whole modules": (edit_config(modules_to_save=["lm_head"]), "modules_to_save=.'lm_head'. is not trained here"),
    "ranks of their own": (edit_config(rank_pattern={"q_proj": 4}), "rank_pattern={'q_proj': 4} is not trained here"),
    "PiSSA": (edit_config(init_lora_weights="pissa"), "init_lora_weights='pissa' is not trained here"),
    "a field of tomorrow": (edit_config(use_zora=True), "use_zora=True is not trained here"),
    "another method": (edit_config(peft_type="IA3"), "peft_type='IA3', but LORA by policy.dtensor_cfg.lora_cfg"),
    "rank": (edit_config(r=16), r"r=16, but 8 by policy.dtensor_cfg.lora_cfg.dim"),
    "alpha": (edit_config(lora_alpha=8), r"lora_alpha=8, but 32.0 by policy.dtensor_cfg.lora_cfg.alpha"),
    "shape": (
        CUT,
        rf"{WEIGHTS}: '{A}' is \[8, 65\], but \[8, 64\] by the model and policy.dtensor_cfg.lora_cfg, whose",
    ),
    "type": (edit_tensors(lambda t: t.update({K: t[K].int()})), rf"{K}' is I32, but \[64, 8\] by the model"),
    "missing": (DROP, rf"'{A}' is no tensor, but \[8, 64\] by the model"),
    "unknown": (
        edit_tensors(lambda t: t.update({K.replace("k_proj", "qkv"): t[K] + 1})),
        r"layers.0.self_attn.qkv.lora_B.weight' is \[64, 8\], but no tensor by the model and .*target_modules and ",
    ),
    "half a file": (lambda path: (path / WEIGHTS).write_bytes(b"\x08"), f"{WEIGHTS}: not a readable safetensors file"),
    "no file": (lambda path: (path / WEIGHTS).unlink(), f"{WEIGHTS}: not a readable safetensors file|cannot be read"),
    "no config": (lambda path: (path / CONFIG).unlink(), f"{CONFIG}: cannot be read"),
}


@pytest.fixture(scope="module")
def written(base, tmp_path_factory):
    """(base folder, adapter folder) of qwen3."""
    folder = base["qwen3"][0]
    out = tmp_path_factory.mktemp("written") / "adapter"
    return folder, write(adapted(folder, CHOICES["all"]), folder, out, CHOICES["all"])


def copied(written, tmp_path):
    """(what check_adapter gets, adapter folder) of a copy."""
    folder, source = written
    path = shutil.copytree(source, tmp_path / "copy")
    policy = policy_of(folder, replace(CHOICES["all"], adapter_path=str(path)))
    return (policy, read_model_config(folder)), path


@pytest.mark.parametrize("case", REFUSED)
def test_an_adapter_that_is_not_trained_is_refused_in_a_sentence(written, tmp_path, case):
    inputs, path = copied(written, tmp_path)
    check_adapter(*inputs)
    edit, text = REFUSED[case]
    edit(path)
    with pytest.raises(ConfigError, match=text) as error:
        check_adapter(*inputs)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


def test_an_adapter_of_another_base_is_refused(written, tmp_path):
    (policy, model), path = copied(written, tmp_path)
    with pytest.raises(ConfigError, match=rf"^{path}: .* other weights than policy.model_name"):
        load_adapter(load_policy(written[0], device="cpu", lora=CHOICES["all"]), path, "1" * 64)
    for name in ("hub/qwen3", "qwen3/", "./somewhere/qwen3"):  # a copy elsewhere: its weights are compared
        check_adapter(replace(policy, model_name=name), model)
    edit_tensors(lambda tensors: None)(path)  # without the fingerprint, as PEFT's
    for name in ("hub/qwen3", "qwen3/", "./somewhere/qwen3"):
        check_adapter(replace(policy, model_name=name), model)
    load_adapter(load_policy(written[0], device="cpu", lora=CHOICES["all"]), path, "1" * 64)
    for base, name in (("hub/other", "hub/qwen3"), (None, "hub/qwen3"), ("hub/qwen3", "hub/qwen3-base")):
        edit_config(base_model_name_or_path=base)(path)
        with pytest.raises(
            ConfigError, match=rf"{CONFIG}: an adapter of {base!r}, not of policy.model_name={name}: set"
        ):
            check_adapter(replace(policy, model_name=name), model)


def test_a_number_that_is_not_finite_is_refused(written, tmp_path):
    inputs, path = copied(written, tmp_path)
    edit_tensors(lambda tensors: tensors[A].view(-1).__setitem__(5, torch.nan))(path)
    check_adapter(*inputs)
    with pytest.raises(ConfigError, match=rf"{WEIGHTS}: {A} holds NaN or infinity"):
        load_adapter(load_policy(written[0], device="cpu", lora=CHOICES["all"]), path, SHA256)


def test_an_adapter_in_the_place_of_a_model_says_where_it_belongs(written):
    with pytest.raises(
        ConfigError, match=r"^policy.model_name: .* is an adapter: give its base here, and the adapter by"
    ):
        resolve_folder(str(written[1]), "policy.model_name")


# ---------------------------------------------------------------------------------------------- the base stays the base


@pytest.mark.slow
def test_100_steps_leave_the_base_as_it_was(one_rank, written, tmp_path):
    folder, (ranks, device, mesh) = shutil.copytree(written[0], tmp_path / "base"), one_rank
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    sha256 = weights_sha256(folder, ranks)
    model = load_policy(folder, device=device, mesh=mesh, lora=replace(CHOICES["all"], dim=2))
    start = {name: param.to_local().detach().clone() for name, param in model.named_parameters()}
    optimizer = build_optimizer(model, OptimizerConfig())
    pack = make_pack([7])
    rows = response_rows([7], pack[0])
    for _ in range(100):
        logp_R, _ = model(*pack, *rows)
        logp_R.sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    moved = {name for name, param in model.named_parameters() if not torch.equal(param.to_local(), start[name])}
    assert moved == {name for name in start if name.endswith(("lora_A", "lora_B"))} and len(moved) == 28
    save_adapter(model, tmp_path / "adapter", {}, sha256)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert weights_sha256(folder, ranks) == sha256 != weights_sha256(written[0].parent / "llama", ranks)
    with safe_open(tmp_path / "adapter" / WEIGHTS, "pt") as file:
        assert file.metadata()["base_sha256"] == sha256


@pytest.mark.slow
def test_vllm_reads_the_merged_folder_and_samples_as_the_trainer_scores(engine, one_rank, tiny, tmp_path):
    """Its own loader reads the files; on CPU only `Engine.sync` refreshes a tied head."""
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    model = adapted(tiny[0], CHOICES["all"])
    model.vocab_limit = engine.vocab_size
    save_hf(model, tmp_path / "merged", tiny[0], dtype=torch.float32)
    gaps = []
    for folder in (tiny[0], tmp_path / "merged"):
        model_config = copy.copy(engine.llm.model_config)
        model_config.model = str(folder)
        weights = get_model_loader(LoadConfig(load_format="safetensors")).get_all_weights(model_config, engine)
        named = ((name, tensor) for name, tensor in weights if name != "lm_head.weight")
        engine.sync(named, 1)
        gaps.append(check_canary(model, engine, None, one_rank[1], "here"))
    assert gaps[0] > 0.1 and gaps[1] < 1e-5, gaps
