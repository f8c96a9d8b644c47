"""LoRA's folders: PEFT computes from ours what the trainer does."""

import copy
import warnings

import pytest
import torch
from hf_folders import LENGTHS, make_pack
from safetensors.torch import load_file
from tiny import FAMILIES, make_tiny

from base.hf.adapters import adapter_config, save_adapter
from base.hf.folder import read_model_config, resolve_folder
from base.hf.weights import save_hf
from config import ConfigError, DTensorConfig, LoRAConfig, PolicyConfig
from gap import check_canary
from head import HeadOptions
from model import load_policy

CHOICES = {
    "all": LoRAConfig(enabled=True, dim=8, alpha=32.0),
    "by name": LoRAConfig(
        enabled=True, dim=1, alpha=0.5, match_all_linear=False, target_modules=("q_proj", "down_proj")
    ),
    "by layer": LoRAConfig(
        enabled=True, dim=3, alpha=6.0, match_all_linear=False, target_modules=("*.layers.1.*_proj",)
    ),
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


def write(model, folder, out, lora):
    save_adapter(model, out, adapter_config(policy_of(folder, lora), read_model_config(folder)))
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
    files = sorted(path.name for path in (tmp_path / "adapter").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PEFT warns of missing or unknown names
        theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.float32}
    assert len(stored) == sum("lora_" in name for name, _ in theirs.named_parameters())
    assert (logits_of(theirs, pack[0]) - ours_TV).abs().max() <= bound

    save_hf(model, tmp_path / "merged", folder, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (logits_of(merged, pack[0]) - ours_TV).abs().max() <= bound
    assert torch.equal(load_policy(tmp_path / "merged", device="cpu")(*pack), ours_TV)
    # In float32 the bound is of the largest logit, about 5; without its rounding it is an absolute one.
    assert (logits_of(theirs.double(), pack[0]) - model.double()(*pack)).abs().max() <= 1e-5


@pytest.fixture(scope="module")
def written(base, tmp_path_factory):
    """(base folder, adapter folder) of qwen3."""
    folder = base["qwen3"][0]
    out = tmp_path_factory.mktemp("written") / "adapter"
    return folder, write(adapted(folder, CHOICES["all"]), folder, out, CHOICES["all"])


def test_an_adapter_in_the_place_of_a_model_says_where_it_belongs(written):
    with pytest.raises(ConfigError, match=r"^policy.model_name: .* is an adapter: merge it into its base"):
        resolve_folder(str(written[1]), "policy.model_name")


# ---------------------------------------------------------------------------------------------- the base stays the base


@pytest.mark.slow
def test_vllm_reads_the_merged_folder_and_samples_as_the_trainer_scores(engine, one_rank, tiny, tmp_path):
    """Its own loader reads the files; on CPU only `VLLMEngine.sync` refreshes a tied head."""
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    model = adapted(tiny[0], CHOICES["all"])
    save_hf(model, tmp_path / "merged", tiny[0], dtype=torch.float32)
    gaps = []
    for folder in (tiny[0], tmp_path / "merged"):
        model_config = copy.copy(engine.llm.model_config)
        model_config.model = str(folder)
        weights = get_model_loader(LoadConfig(load_format="safetensors")).get_all_weights(model_config, engine)
        named = ((name, tensor) for name, tensor in weights if name != "lm_head.weight")
        engine.sync(named, 1)
        gaps.append(check_canary(model, HeadOptions(vocab=engine.vocab_size), engine, None, one_rank[1], "here"))
    assert gaps[0] > 0.1 and gaps[1] < 1e-5, gaps
