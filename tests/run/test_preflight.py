"""Model against config, and what may be resumed: checked without torch, on folders made by hand."""

from dataclasses import replace
from types import SimpleNamespace

import config
from config import ConfigError
from hf.model_config import ModelConfig
from run.preflight import check_fits

MODEL = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": 100,
        "hidden_size": 96,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
    }
)


def fits(tmp_path, model=MODEL, *, length=64, tensor=1, vocab_size=100):
    vllm_cfg = config.VllmConfig(tensor_parallel_size=tensor)
    policy = config.PolicyConfig(
        max_total_sequence_length=length, generation=config.GenerationConfig(vllm_cfg=vllm_cfg)
    )
    try:
        check_fits(config.Config(policy=policy), tmp_path, model, SimpleNamespace(vocab_size=vocab_size))
    except ConfigError as error:
        return str(error)
    return "fits"


def test_length_and_vocabulary_against_the_model(tmp_path):
    assert fits(tmp_path) == fits(tmp_path, vocab_size=80) == "fits"
    assert fits(tmp_path, replace(MODEL, max_position_embeddings=None), length=10**6) == "fits"
    message = fits(tmp_path, length=65)
    assert message.startswith("policy.max_total_sequence_length=65 is more than the model's max_position_embeddings=64")
    assert message.endswith("use 64 or less")
    assert "tokenizer.json has ids up to 100, config.json vocab_size=100" in fits(tmp_path, vocab_size=101)


def test_tensor_parallel_sizes_are_those_that_vllm_takes(tmp_path):
    """vLLM: ranks divide the query heads, and divide the key heads or are a multiple of them."""

    def taken(model):
        return [tensor for tensor in range(1, 13) if fits(tmp_path, model, tensor=tensor) == "fits"]

    assert taken(MODEL) == [1, 2, 4, 6, 12]
    assert taken(replace(MODEL, num_key_value_heads=6)) == [1, 2, 3, 6, 12]
    assert taken(replace(MODEL, num_key_value_heads=1)) == [1, 2, 3, 4, 6, 12]
    assert taken(replace(MODEL, num_attention_heads=4)) == [1, 2, 4]
    assert taken(replace(MODEL, intermediate_size=98)) == [1, 2]
    key = "policy.generation.vllm_cfg.tensor_parallel_size"
    assert fits(tmp_path, tensor=5).startswith(f"{key}=5 does not divide the model's num_attention_heads=12")
    assert fits(tmp_path, tensor=3).startswith(f"{key}=3 does not divide the model's num_key_value_heads=2")
