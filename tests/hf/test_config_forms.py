"""A field of config.json with which transformers or vLLM do not start is named before a start (red_team4.md, M5)."""

import copy
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from config_forms import FILE, forms_of_kind, reserved
from families import hf_config
from hf_folders import FAMILIES, QWEN2, make_pack
from transformers import AutoConfig

from base.hf import families
from base.hf.folder import from_hf
from base.hf.tokenizer import Tokenizer
from config import ConfigError
from model import Decoder

STARTER = Path(__file__).resolve().parents[2] / "examples/arithmetic/starter"
WRONG = [
    dict(pad_token_id=[]),
    dict(use_cache=[1]),
    dict(dtype="8"),
    dict(torch_dtype="bf16"),
    dict(max_position_embeddings=2**64),
    dict(is_encoder_decoder=True),
    dict(bos_token_id="auto"),
    dict(id2label={"x": "y"}),
    dict(num_labels="x"),
    dict(num_labels=10**9),
    dict(problem_type="x"),
    dict(attention_dropout=-1),
    dict(head_dim=7),
    dict(num_key_value_heads=4),
    dict(num_hidden_layers=2**63),
    dict(num_kv_heads=1),
    dict(n_positions="8"),
    dict(rope_theta=None),
    dict(rope_parameters={"rope_theta": 10**400}),
    dict(rope_parameters={"full_attention": 1}),
    dict(auto_map=2),
    dict(is_heterogeneous=False),
    dict(to_dict=1),
    dict(base_model_tp_plan="x"),
]
VALUES = [None, True, 0, -1, 2, 3.5, 1e-5, 2**31, 2**64, 10**400, "x", "8", "silu", [], [1], ["x"], [[1]], {}]
VALUES += [{"x": "y"}, {"rope_type": "linear"}, {"rope_type": "yarn", "factor": 2.0}, {"full_attention": 1}]
VALUES += [float("nan"), 3, 300]
MORE_FIELDS = ["dtype", "num_labels", "rope_scaling", "rope_theta", "partial_rotary_factor", "n_positions", "id2label"]
MORE_FIELDS += ["sub_configs", "auto_map", "text_config", "mlp_layer_types", "sliding_window", "pad_token_id"]
NUM_MUTANTS = 240


def configs():
    """A config.json of each family: written by transformers 5, and, of the native ones, as older folders have it."""
    found = [json.loads(json.dumps(hf_config(kind).to_dict())) for kind in families.FAMILIES]
    for fields in FAMILIES.values():
        config = QWEN2 | fields
        if "rope_parameters" in fields:
            del config["rope_theta"]
        found.append(config)
    return found


def mutant(rng, config):
    """The config with one or two fields of another value, or without them."""
    config = copy.deepcopy(config)
    for _ in range(rng.choice([1, 1, 2])):
        where = config
        name = rng.choice([*config, *MORE_FIELDS])
        if name in ("rope_parameters", "rope_scaling") and isinstance(config.get(name), dict):
            where = config[name]
            name = rng.choice([*where, "factor", "beta_fast", "rope_theta"])
        where[name] = copy.deepcopy(rng.choice(VALUES))
        if rng.random() < 0.1:
            del where[name]
    return config


def computes(model, config):
    """As a run begins: transformers' config, the parameters that are told, and a forward of two sequences."""
    AutoConfig.for_model(**copy.deepcopy(config))
    torch.manual_seed(0)
    decoder = Decoder(model)
    decoder.model.init_buffers("cpu")
    computed = {name: tuple(param.shape) for name, param in [*decoder.named_parameters(), *decoder.named_buffers()]}
    assert dict(model.tensor_shapes(as_computed=True)).items() <= computed.items()
    for param in decoder.parameters():
        torch.nn.init.normal_(param, std=0.05)
    assert decoder(*make_pack((5, 3), vocab=min(model.vocab_size, 200))).isfinite().all()


MEASURED = ("llama", "ministral3", "gemma4_text", "deepseek_v3", "lfm2_moe")  # what is unlike in each is in one of them
KINDS = [pytest.param(kind, marks=() if kind in MEASURED else pytest.mark.long) for kind in families.FAMILIES]


@pytest.mark.parametrize("kind", [*KINDS, *families.WHOLE])
def test_the_forms_are_those_of_transformers(kind):
    assert json.loads(FILE.read_text())[kind] == forms_of_kind(kind)


def test_what_a_config_of_transformers_has_itself():
    assert json.loads(FILE.read_text())[""]["fields"] == reserved()


@pytest.mark.parametrize("fields", WRONG)
def test_red_team4_m5_a_field_of_another_form_is_named(fields):
    (name,) = fields
    for config in (QWEN2, QWEN2 | {"model_type": "mistral"}):
        from_hf(config)
        with pytest.raises(ConfigError, match=f"^config.json: .*{name}"):
            from_hf(config | fields)


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        ("tokenizer_config.json", dict(eos_token=3)),
        ("tokenizer_config.json", dict(eos_token={"content": None})),
        ("tokenizer_config.json", dict(pad_token={"id": 0})),
        ("tokenizer_config.json", dict(bos_token=["<s>"])),
        ("tokenizer_config.json", dict(chat_template={"default": "{{ messages }}"})),
        ("tokenizer_config.json", dict(chat_template=[{"name": "default"}])),
        ("tokenizer_config.json", dict(chat_template=[{"name": [], "template": "x"}])),
        ("tokenizer_config.json", dict(chat_template=["x"])),
        ("generation_config.json", dict(eos_token_id="</s>")),
        ("generation_config.json", dict(eos_token_id=[[1]])),
        ("generation_config.json", dict(eos_token_id=[1, None])),
        ("generation_config.json", dict(eos_token_id=True)),
        ("generation_config.json", dict(eos_token_id=-1)),
        ("generation_config.json", dict(eos_token_id=2**64)),
        ("generation_config.json", dict(eos_token_id=1.0)),
    ],
)
def test_files_beside_config_json(file, fields, tmp_path):
    for starter in STARTER.iterdir():
        if starter.suffix == ".json":
            shutil.copy(starter, tmp_path)
    Tokenizer(tmp_path)
    settings = {}
    if (tmp_path / file).exists():
        settings = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps(settings | fields))
    (name,) = fields
    with pytest.raises(ConfigError, match=f"{name}|end tokens") as error:
        Tokenizer(tmp_path)
    assert "\n" not in str(error.value)


def test_a_null_that_a_class_of_transformers_does_not_take():
    llama = QWEN2 | {"model_type": "llama"}
    with pytest.raises(ConfigError, match="attention_bias=None: expected bool"):
        from_hf(llama | {"attention_bias": None})
    from_hf(llama | {"head_dim": None, "pad_token_id": None, "layer_types": None})
    for kind in ("qwen2_moe", "hunyuan_v1_dense", "deepseek_v3"):
        fields = json.loads(json.dumps(hf_config(kind).to_dict())) | {"head_dim": None}
        computes(from_hf(fields), fields)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("gemma3_text", dict(query_pre_attn_scalar=0)),
        ("granite", dict(attention_multiplier=0)),
        ("granite", dict(logits_scaling=0.0)),
        ("granitemoehybrid", dict(hidden_size=1)),
        ("qwen2", dict(head_dim=None, hidden_size=1)),
        ("qwen3_moe", dict(moe_intermediate_size=62)),
        ("lfm2_moe", dict(layer_types=None)),
        ("granitemoehybrid", dict(layer_types=None)),
        ("smollm3", dict(no_rope_layers=[])),
        ("mistral", dict(logit_scale=2.0)),
        ("mistral", dict(is_causal=False)),
        ("mistral", dict(return_dict=False)),
        ("mistral", dict(quantization_config=False)),
        ("mistral", dict(initializer_range=1e30)),
        ("mistral", dict(mlp_only_layers=3)),
        ("nemotron_h", dict(routed_scaling_factor=float("inf"))),
        ("glm4_moe", dict(topk_group=4)),
        ("deepseek_v3", dict(n_group=8)),
        ("exaone4", dict(rope_parameters={"full_attention": {"rope_type": "default"}})),
        ("cohere2", dict(rope_parameters={"sliding_attention": {}})),
        ("olmo3", dict(rope_parameters={"full_attention": {"rope_type": "default"}, "rope_theta": 1e4})),
        ("gemma4_text", dict(num_experts=-1)),
        ("olmo2", dict(num_nextn_predict_layers=0.0)),
        ("qwen3_next", dict(linear_num_value_heads=5)),
        ("granitemoehybrid", dict(mamba_d_head=8)),
        ("nemotron_h", dict(layer_types=["mlp"])),
        ("nemotron_h", dict(moe_latent_size=-1)),
        ("granitemoehybrid", dict(layers_block_type=None)),
        ("qwen3_5_moe_text", dict(decoder_sparse_step=None)),
        ("phi3", dict(rope_parameters={"rope_type": "linear", "factor": 2.0})),
        ("ministral3", dict(rope_parameters={})),
        ("gemma4_text", dict(rope_scaling={})),
        ("olmo2", dict(rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0})),
        ("glm4_moe_lite", dict(rope_parameters={"partial_rotary_factor": 0.5})),
    ],
)
def test_order58_a_value_that_a_forward_does_not_take(kind, fields):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        from_hf(json.loads(json.dumps(hf_config(kind).to_dict())) | fields)


def test_a_field_that_is_missing_is_the_default_of_transformers():
    for kind, name in (("phi3", "pad_token_id"), ("deepseek_v3", "topk_group")):
        fields = json.loads(json.dumps(hf_config(kind).to_dict()))
        del fields[name]
        with pytest.raises(ConfigError, match=name):
            from_hf(fields)
    for kind, names in {
        "lfm2": ["layer_types"],
        "exaone4": ["rope_parameters"],
        "deepseek_v3": ["q_lora_rank"],
    }.items():
        fields = json.loads(json.dumps(hf_config(kind).to_dict()))
        for name in names:
            del fields[name]
        computes(from_hf(fields), fields)


WITHOUT_FORWARD = [
    ("deepseek_v3", "n_group"),
    ("deepseek_v3", "first_k_dense_replace"),
    ("granitemoe", "residual_multiplier"),
    ("granitemoehybrid", "mamba_expand"),
    ("falcon_h1", "ssm_out_multiplier"),
    ("gemma3_text", "sliding_window"),
    ("exaone4", "sliding_window"),
]


@pytest.mark.parametrize("kind, name", WITHOUT_FORWARD)
def test_a_null_that_a_forward_does_not_take(kind, name):
    fields = json.loads(json.dumps(hf_config(kind).to_dict()))
    with pytest.raises(ConfigError, match=name):
        from_hf(fields | {name: None})


def test_a_null_window_where_no_layer_has_one():
    """As in the published config.json of EXAONE 4.0 1.2B."""
    fields = json.loads(json.dumps(hf_config("exaone4").to_dict()))
    types = ["full_attention"] * fields["num_hidden_layers"]
    assert set(from_hf(fields | {"sliding_window": None, "layer_types": types}).windows) == {None}


def test_what_is_accepted_computes():
    rng = random.Random(58)
    num_built = 0
    for config in configs():
        from_hf(config)
    for config in rng.choices(configs(), k=NUM_MUTANTS):
        config = mutant(rng, config)
        try:
            model = from_hf(config)
        except ConfigError as error:
            assert "\n" not in str(error)
            continue
        if model.num_hidden_layers < 10 and model.hidden_size < 1000:
            computes(model, config)
            num_built += 1
    assert num_built > NUM_MUTANTS / 10
