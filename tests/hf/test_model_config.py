"""What --check asks of a model folder without torch: numbers that are numbers, and whole safetensors files."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from families import hf_config
from hf_folders import LLAMA3, QWEN2
from safetensors.numpy import save_file

from base.hf import families
from base.hf.folder import check_weights, from_hf, read_model_config, weight_files
from config import ConfigError, HFConfigOverrides

ROOT = Path(__file__).resolve().parents[2]
LLAMA = dict(model_type="llama", hidden_act="silu", rms_norm_eps=1e-6, vocab_size=100, hidden_size=64)
LLAMA |= dict(intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(vocab_size=-1), "vocab_size=-1: expected int above 0"),
        (dict(num_hidden_layers=2.5), "num_hidden_layers=2.5: expected int"),
        (dict(hidden_size=None), "hidden_size=None: expected int"),
        (dict(head_dim=-16), "head_dim=-16: expected int above 0"),
        (dict(rms_norm_eps="1e-6"), "rms_norm_eps='1e-6': expected float"),
        (dict(rms_norm_eps=float("nan")), "rms_norm_eps=nan: expected float above 0"),
        (dict(rope_theta=0), "rope_theta=0: expected float above 1"),
        (dict(rope_scaling={**LLAMA3, "factor": "8"}), "rope_scaling: factor='8': expected float or int"),
        (dict(tie_word_embeddings="false"), "tie_word_embeddings='false': expected bool"),
    ],
)
def test_each_field_is_of_its_type(change, named):
    with pytest.raises(ConfigError) as error:
        from_hf({**LLAMA, **change}, "folder/config.json")
    assert str(error.value).startswith(f"folder/config.json: {named}")


def test_good_numbers_are_taken():
    assert from_hf(LLAMA).max_position_embeddings is None
    numbers = {"num_key_value_heads": 2, "head_dim": 10, "rope_theta": 500_000, "max_position_embeddings": 128}
    config = from_hf({**LLAMA, **numbers, "rope_scaling": LLAMA3, "layer_types": ["full_attention"] * 2})
    assert numbers == {name: getattr(config, name) for name in numbers} and config.rope_scaling.factor == 8


# ---------------------------------------------------------------------------------------------------------- weights


def write_shards(folder):
    """Two shards that safetensors itself wrote, and their index."""
    save_file({"a": np.ones((3, 5), np.float32), "b": np.zeros(2, np.int8)}, folder / "1.safetensors", {"format": "pt"})
    save_file({"c": np.ones(7, np.float16), "none": np.ones((0, 4), np.float32)}, folder / "2.safetensors")
    names = {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors", "none": "2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def refused(folder):
    with pytest.raises(ConfigError) as error:
        check_weights(folder, [])
    assert "\n" not in str(error.value)
    return str(error.value).removeprefix(f"{folder}")


def test_whole_files_are_found(tmp_path):
    write_shards(tmp_path)
    assert weight_files(tmp_path) == [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    save_file({}, tmp_path / "model.safetensors")  # safetensors writes and reads a file without a tensor
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_a_file_cut_anywhere_or_too_long_is_refused(tmp_path):
    write_shards(tmp_path)
    file = tmp_path / "2.safetensors"
    content = file.read_bytes()
    for size in (0, 7, 8, 20, len(content) - 14, len(content) - 1):
        file.write_bytes(content[:size])
        message = refused(tmp_path)
        assert message.startswith("/2.safetensors: not a readable safetensors file (")
        assert message.endswith("); fetch it again (other formats are not read: they can run code)")
    file.write_bytes(content + b"x")
    assert "/2.safetensors: not a readable safetensors file (" in refused(tmp_path)


def test_missing_files_are_refused(tmp_path):
    assert refused(tmp_path).startswith("/model.safetensors: not a readable safetensors file (No such file")
    write_shards(tmp_path)
    (tmp_path / "1.safetensors").unlink()
    assert refused(tmp_path).startswith("/1.safetensors: not a readable safetensors file (No such file")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "/model.safetensors.index.json: "),
        ("[]", "/model.safetensors.index.json: "),
        ('{"weight_map": {"a": "/etc/passwd"}}', "/passwd: not a readable safetensors file"),
        ('{"weight_map": {"a": "1.safetensors", "b": "config.json"}}', "/config.json: not a readable"),
        ('{"weight_map": {"a": "1.safetensors", "b": "3.safetensors"}}', "/3.safetensors: not a readable"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path, text, named):
    write_shards(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert refused(tmp_path).startswith(named)


def test_sizes_that_lie_end_at_the_first_tensor_that_is_missing_and_integers_are_no_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 65536, "hidden_size": 10**9}))
    save_file({"model.embed_tokens.weight": np.zeros((100, 3), np.int16)}, tmp_path / "model.safetensors")
    for expected, named in (
        (read_model_config(tmp_path).tensor_shapes(), r"is I16, but config.json says \[100, 1000000000\]"),
        ([("a", (1,))], "a is missing"),
    ):
        with pytest.raises(ConfigError, match=named):
            check_weights(tmp_path, expected)


def test_a_config_json_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"/config.json: cannot be read"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"/config.json: not valid JSON"):
        read_model_config(tmp_path)


UNSUPPORTED = [
    (dict(model_type="gpt2"), "model_type='gpt2' is not supported; supported: llama, "),
    (dict(hidden_act="gelu"), "hidden_act='gelu': expected \"silu\""),
    (dict(use_sliding_window=True), "use_sliding_window=True is not supported; supported: absent, False"),
    (dict(layer_types=["full_attention", "sliding_attention"]), "layer_types: only 'full_attention' is"),
    (dict(mlp_bias=True), "mlp_bias=True is not supported; supported: absent, False"),
    (dict(quantization_config={"bits": 4}), "quantization_config={'bits': 4} is not supported; supported: absent"),
    (dict(attention_multiplier=0.5), "attention_multiplier=0.5: expected null"),
    (dict(attention_dropout=0.1), "attention_dropout=0.1 is not supported"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5: expected 1"),
    (dict(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor=0.5: expected 1"),
    (dict(rope_scaling={"rope_type": "yarn", "factor": 2.0}), "rope_type='yarn' is not supported; supported"),
    (dict(rope_scaling={"type": "linear", "factor": 4.0}), "rope_type='linear' is not supported"),
    (dict(rope_parameters={"rope_type": "dynamic"}), "rope_type='dynamic': expected \"default\""),
    (
        dict(rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        "original_max_position_embeddings=None",
    ),
    (dict(rope_parameters={"full_attention": {"rope_type": "default"}}), "full_attention={'rope_type'"),
    (dict(rope_scaling={"rope_type": "default", "factor": 4.0}), "remove factor: no effect with rope_type='default'"),
    (dict(rope_scaling=LLAMA3, rope_parameters={"rope_theta": 1e6}), "rope_parameters and rope_scaling differ"),
    (dict(sliding_window=64, model_type="llama"), "sliding_window=64 is not supported; supported: absent"),
    (dict(architectures=["Qwen3ForCausalLM"]), "architectures=['Qwen3ForCausalLM'] is not of model_type='qwen2'"),
    (dict(logit_scale=2.0), "logit_scale=2.0: expected absent"),
    (dict(qkv_bias=True), "qkv_bias=True is not supported; supported: absent, False"),
    (dict(text_config={}), "text_config={}: expected null"),
]


@pytest.mark.parametrize(("change", "message"), UNSUPPORTED)
def test_unsupported_configs_name_the_field(change, message):
    from_hf(QWEN2)
    with pytest.raises(ConfigError) as error:
        from_hf({**QWEN2, **change}, "folder/config.json")
    assert str(error.value).startswith("folder/config.json: ") and message in str(error.value)


OTHER_FAMILY = {**QWEN2, "model_type": "mistral", "num_key_value_heads": 2}
SOME_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
EXPERTS = {"model_type": "qwen3_moe", **SOME_EXPERTS}
GEMMA4 = {"model_type": "gemma4_text"}
LATENT = {"model_type": "deepseek_v3", "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
LATENT |= {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
LATENT |= {"moe_intermediate_size": 96, "n_group": 1, "topk_group": 1}
REFUSED = [
    (dict(model_type="jamba"), "model_type='jamba': a layer carries state across sequences"),
    (dict(model_type="kimi_linear"), "model_type='kimi_linear': a layer carries state across sequences"),
    (dict(model_type="stablelm", hidden_act="gelu"), "model_type='stablelm': its layers do not hand"),
    (dict(model_type="gemma2", final_logit_softcapping=30.0), "use a Gemma 3"),
    (dict(model_type="gemma3"), "text_config=None: expected an object with model_type='gemma3'"),
    (dict(model_type="gemma3", text_config=OTHER_FAMILY), "text_config: model_type='mistral' is not supported"),
    (dict(model_type="mistral3", text_config={"vocab_size": "4"}), "vocab_size='4': expected int"),
    (dict(model_type="mistral3", text_config={}, quantization_config={"bits": 4}), "checkpoint that is not quantized"),
    (dict(model_type="gpt_oss"), "use a Qwen3 MoE"),
    (dict(model_type="ernie4_5_moe"), "ignores the bias of its routers"),
    (dict(GEMMA4, enable_moe_block=True), "use a Gemma 4 without experts"),
    (dict(GEMMA4, num_kv_shared_layers=1), "num_kv_shared_layers=1: expected an earlier layer of each type"),
    (dict(GEMMA4, num_kv_shared_layers=9), "num_kv_shared_layers=9: expected an earlier layer of each type"),
    (dict(GEMMA4, num_kv_shared_layers=-1), "num_kv_shared_layers=-1: expected an earlier layer of each type"),
    (dict(GEMMA4, vocab_size_per_layer_input=8), "vocab_size_per_layer_input=8 is less than vocab_size"),
    (dict(GEMMA4, per_layer_config={"1": {"head_dim": 64, "sliding_window": 4}}), "per_layer_config={'1': {"),
    (dict(GEMMA4, per_layer_config={"0": {"head_dim": 64}}), "expected the same head_dim for each layer of"),
    (dict(GEMMA4, per_layer_config={"1": 3}), "per_layer_config={'1': 3}: expected the same head_dim"),
    (dict(GEMMA4, per_layer_config={"1": {"head_dim": "64"}}), "global_head_dim='64': expected int above 0"),
    (dict(GEMMA4, per_layer_config=None), "per_layer_config=None: expected object"),
    (dict(GEMMA4, global_head_dim=63), "head_dim=63: expected an even number"),
    (dict(GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=5), "num_key_value_heads=5 does not divide"),
    (dict(GEMMA4, rope_parameters={"rope_type": "default"}), "sliding_attention is missing"),
    (dict(GEMMA4, rope_parameters={"full_attention": {"rope_type": "default"}}), "sliding_attention is missing"),
    (dict(GEMMA4, hidden_size_per_layer_input=-1), "hidden_size_per_layer_input=-1: expected int above -1"),
    (dict(GEMMA4, use_bidirectional_attention="all"), 'supported: absent, "vision"'),
    (dict(model_type="cohere2", tie_word_embeddings=False), "tie_word_embeddings=false with model_type='cohere2'"),
    (dict(model_type="llama4_text"), "use a Llama 3"),
    (dict(vision_config={"depth": 1}), "vision_config={'depth': 1} is not supported: use one of docs/families.md"),
    (dict(quantization_config={"bits": 4}), "use a checkpoint that is not quantized"),
    (dict(final_logit_softcapping=30.0), "with model_type='mistral': transformers ignores it; remove it"),
    (dict(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0 is not supported"),
    (dict(use_bidirectional_attention=True), "only causal attention is supported"),
    (dict(layer_types=["chunked_attention"] * 2), "layer_types: 'chunked_attention' is not supported"),
    (dict(rope_scaling={"type": "dynamic", "factor": 2.0}), "type='dynamic': expected \"default\""),
    (dict(rope_parameters={"rope_type": "longrope"}), "rope_type='longrope': expected \"default\""),
    (dict(head_dim=512), "head_dim=512: attention over packs takes up to 256"),
    (dict(architectures=["MixtralForCausalLM"]), "expected MistralForCausalLM with model_type='mistral'"),
    (dict(num_key_value_heads=None), "num_key_value_heads=None: expected int"),
    (dict(layer_types=["full_attention"]), "layer_types names 1 layers: expected num_hidden_layers=2"),
    (dict(sliding_window=0), "sliding_window=0: expected int above 0, or null"),
    (dict(sliding_window="4k"), "sliding_window='4k': expected int"),
    (dict(model_type="qwen3_moe"), "num_experts=None: expected int above 0"),
    (dict(model_type="glm4_moe"), "num_experts=None: expected int above 0"),
    (dict(EXPERTS, num_experts_per_tok=None), "num_experts_per_tok=None: expected int"),
    (dict(EXPERTS, moe_intermediate_size="96"), "moe_intermediate_size='96': expected int"),
    (dict(EXPERTS, num_experts_per_tok=9), "num_experts_per_tok=9 is more than num_experts=8: use 8 or less"),
    (dict(EXPERTS, model_type="qwen2_moe"), "shared_expert_intermediate_size=None: expected int above 0"),
    (dict(model_type="olmoe", **SOME_EXPERTS, norm_topk_prob=True), "norm_topk_prob=true with model_type='olmoe'"),
    (dict(LATENT, kv_lora_rank=None), "kv_lora_rank=None: expected int"),
    (dict(LATENT, head_dim=192), "head_dim=192: transformers rotates as many, vLLM qk_rope_head_dim=64"),
    (dict(LATENT, rope_interleave=False), "rope_interleave=false with model_type='deepseek_v3'"),
    (dict(LATENT, topk_method="greedy"), 'transformers and vLLM 0.32 differ; supported: absent, "noaux_tc"'),
    (dict(model_type="kimi_k2"), "its weights are published quantized"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_other_families_are_refused_by_their_model_type_first(change, message):
    from_hf(OTHER_FAMILY)
    with pytest.raises(ConfigError) as error:
        from_hf({**OTHER_FAMILY, **change}, "folder/config.json")
    assert str(error.value).startswith("folder/config.json: ") and message in str(error.value)


@pytest.mark.parametrize("field", [*families.REFUSED, *families.ABSENT])
def test_each_refusal_names_a_way_out(field):
    """As --check does, which loads no torch (tests/test_layout.py)."""
    change = {field: 1.0} if field in families.ABSENT else {"model_type": field}
    with pytest.raises(ConfigError, match=r"^folder/config\.json: .*: use (an?|one) \w+"):
        from_hf({**OTHER_FAMILY, **change}, "folder/config.json")


def test_what_changes_nothing_is_taken():
    """What real folders have: Qwen's window that is switched off, the dropout of training, two equal rope settings."""
    plain = from_hf(QWEN2)
    for fields in (
        dict(use_sliding_window=False, sliding_window=4096, max_window_layers=28),
        dict(attention_dropout=0.0, pretraining_tp=2, use_cache=False, torch_dtype="bfloat16", _name_or_path="x"),
        dict(architectures=["Qwen2ForCausalLM"], quantization_config=None, rope_scaling=None),
        dict(rope_scaling={"rope_type": "default"}, rope_parameters={"rope_type": "default"}),
        dict(rope_parameters={"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 1.0}),
    ):
        assert from_hf({**QWEN2, **fields}) == plain, fields


def test_a_class_without_dense_layers_needs_no_size_of_one():
    """As the published folders of Qwen3.5's mixtures. Of Nemotron 3 Super the experts have another form."""
    fields = hf_config("qwen3_5_moe_text").to_dict()
    whole = list(from_hf(fields, "folder/config.json").tensor_shapes())
    del fields["intermediate_size"]
    assert list(from_hf(fields, "folder/config.json").tensor_shapes()) == whole
    latent = hf_config("nemotron_h", moe_latent_size=16).to_dict()
    with pytest.raises(ConfigError, match="moe_latent_size=16"):
        from_hf(latent, "folder/config.json")


def test_both_forms_of_config_json_mean_the_same():
    old = {**QWEN2, "model_type": "llama", "rope_theta": 5e5, "rope_scaling": LLAMA3}
    new = {**QWEN2, "model_type": "llama", "rope_parameters": {"rope_theta": 5e5, **LLAMA3}}
    del new["rope_theta"]
    config = from_hf(old)
    assert config == from_hf(new)
    assert (config.rope_theta, config.rope_scaling.factor, config.head_dim) == (5e5, 8.0, 12)
    assert (config.qkv_bias, config.o_bias, config.qk_norm, config.tie_word_embeddings) == (False,) * 4
    assert from_hf({**old, "head_dim": 20}).head_dim == 20
    assert from_hf({**QWEN2, "rope_scaling": {"type": "default"}}) == from_hf(QWEN2)


def test_an_override_of_config_json(tmp_path):
    """policy.hf_config_overrides: the model, and what is exported."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 64}))
    config = read_model_config(tmp_path, HFConfigOverrides(max_position_embeddings=128))
    assert config.max_position_embeddings == config.hf["max_position_embeddings"] == 128
    plain = read_model_config(tmp_path)
    assert replace(config, max_position_embeddings=64) == plain == read_model_config(tmp_path, HFConfigOverrides())
    assert plain.hf == LLAMA | {"max_position_embeddings": 64}


@pytest.mark.parametrize("force_hf", [False, True])
@pytest.mark.parametrize("field", ["architectures", "rope_parameters", "rope_scaling", "model_type"])
@pytest.mark.parametrize("value", [1, True, 1.5, [[1]], [1], [None]])
def test_red_team4_m4_a_field_of_another_form_is_named(field, value, force_hf):
    with pytest.raises(ConfigError, match=f"{field}="):
        from_hf(QWEN2 | {field: value}, force_hf=force_hf)


@pytest.mark.parametrize("force_hf", [False, True])
@pytest.mark.parametrize("value", [1, True, 1.5, "full_attention", {"0": "full_attention"}, [[]], [1]])
def test_layer_types_of_another_form_are_named(value, force_hf):
    with pytest.raises(ConfigError, match="layer_types"):
        from_hf(QWEN2 | {"layer_types": value}, force_hf=force_hf)
