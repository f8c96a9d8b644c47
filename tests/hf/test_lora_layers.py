"""Which layers get an adapter: names, patterns, and what is refused, on shapes alone."""

from dataclasses import replace

import pytest
from families import hf_config
from hf_folders import QWEN2

from base.hf import families
from base.hf.folder import from_hf
from base.hf.lora_layers import adapted_layers
from base.plan.memory_plan import Plan
from config import Config, ConfigError, LoRAConfig

SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=1)
MODEL = from_hf({**QWEN2, "model_type": "qwen3", **SIZES})
NAMES = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
NAMES += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
SECTION = "policy.dtensor_cfg.lora_cfg"


def layers(dim=8, **keys):
    match_all = not ({"target_modules", "exclude_modules"} & keys.keys())
    return adapted_layers(MODEL, LoRAConfig(enabled=True, dim=dim, match_all_linear=match_all, **keys))


def test_all_linear_layers_of_the_blocks_but_not_the_head():
    found = layers()
    assert list(found) == [f"model.layers.{i}.{name}" for i in range(12) for name in NAMES]
    shapes = [found[f"model.layers.3.{name}"] for name in NAMES]
    assert shapes == [(64, 64), (16, 64), (16, 64), (64, 64), (96, 64), (96, 64), (64, 96)]
    assert layers(dim=16) == layers(target_modules=()) == found, "nothing named: all, as *_proj in NeMo RL"
    assert adapted_layers(MODEL, LoRAConfig()) == {}


@pytest.mark.parametrize(
    ("patterns", "number"),
    [
        (("q_proj", "v_proj"), 24),
        (("*_proj",), 84),
        (("*.layers.1.*",), 7),  # and not those of layers 10 and 11
        (("*.layers.1*",), 21),
        (("self_attn.o_proj",), 12),
        (("model.layers.7.mlp.up_proj",), 1),
        (("*.layers.0.*.q_proj", "*.layers.1.*.q_proj"), 2),
    ],
)
def test_names_and_patterns(patterns, number):
    chosen = layers(target_modules=patterns)
    assert len(chosen) == number
    if number < 84:
        rest = layers(exclude_modules=(*patterns, "lm_head"))
        assert chosen.keys().isdisjoint(rest) and chosen.keys() | rest.keys() == layers().keys()


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            {"target_modules": ("q_proj", "k_pro")},
            f"{SECTION}.target_modules: no linear layer of the blocks is called 'k_pro'; use q_proj, k_proj, ",
        ),
        (
            {"target_modules": ("lm_head",)},
            f"{SECTION}.target_modules: no linear layer of the blocks is called 'lm_head'; use q_proj, "
            "k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
        ),
        ({"exclude_modules": ("linear_qkv",)}, f"{SECTION}.exclude_modules: no linear layer of the blocks is called"),
        ({"exclude_modules": ("*",)}, f"{SECTION}.exclude_modules leaves no linear layer to adapt"),
        (
            {"dim": 17},
            f"{SECTION}.dim=17 is more than the rank of model.layers.0.self_attn.k_proj, 16 x 64: use 16 or less",
        ),
        ({"dim": 65, "target_modules": ("q_proj",)}, "of model.layers.0.self_attn.q_proj, 64 x 64: use 64 or less"),
    ],
)
def test_refused(keys, problem):
    with pytest.raises(ConfigError) as error:
        layers(**keys)
    assert problem in str(error.value) and "\n" not in str(error.value)


def test_a_routers_name_is_said_once(monkeypatch):
    """In the family's row: with another one there, LoRA leaves the router out, and the plan counts it as frozen."""
    row = families.FAMILIES["qwen3_moe"]
    name = "mlp.chooser.weight"
    renamed = replace(row, experts=replace(row.experts, router=families.Names(name, name, name)))
    monkeypatch.setitem(families.FAMILIES, "qwen3_moe", renamed)
    model = from_hf(hf_config("qwen3_moe").to_dict())
    names = [shape_name for shape_name, _ in model.tensor_shapes()]
    assert "model.layers.1.mlp.chooser.weight" in names
    assert not any("chooser" in layer for layer in adapted_layers(model, LoRAConfig(enabled=True, dim=4)))
    plan = Plan(Config(), model, model.vocab_size, 1)
    assert "model.layers.1.mlp.chooser.weight" not in plan.trained and len(plan.trained) > 20
