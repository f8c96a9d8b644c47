"""Folders of small models of every family that the program knows, written by transformers; packs of random tokens."""

import numpy as np
import torch

from attention import PackLayout

SIZES = dict(hidden_size=72, intermediate_size=100, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2)
SIZES |= dict(vocab_size=211, max_position_embeddings=128)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
FAMILIES = {
    "qwen2": dict(model_type="qwen2", tie_word_embeddings=True, rope_parameters={"rope_theta": 1e6}),
    "qwen3": dict(model_type="qwen3", head_dim=20, rms_norm_eps=1e-5, rope_parameters={"rope_theta": 5e5}),
    "qwen3_tied_bias": dict(model_type="qwen3", head_dim=20, tie_word_embeddings=True, attention_bias=True),
    "llama3": dict(model_type="llama", rope_parameters={"rope_theta": 1e4, **LLAMA3}),
    "llama_bias": dict(model_type="llama", attention_bias=True),
}
QWEN2 = dict(model_type="qwen2", **SIZES, rms_norm_eps=1e-6, hidden_act="silu", rope_theta=1e6)
LENGTHS = [5, 9, 9, 9, 1, 1, 40, 3]


def hf_from_pretrained(folder, dtype):
    from transformers import AutoModelForCausalLM  # not at the top: spawned ranks do without its seconds

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def make_hf_folder(folder, **fields):
    """A transformers model in which no norm or bias is at its initial value, and its saved folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**SIZES, **fields})
    torch.manual_seed(0)
    hf_model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, param in hf_model.named_parameters():
            if name.endswith("norm.weight"):
                param.uniform_(0.5, 1.5)
            else:
                param.normal_(0, 0.2)
    hf_model.save_pretrained(folder)
    return hf_model


def make_pack(lengths, vocab=211, seed=0):
    generator = torch.Generator().manual_seed(seed)
    token_T = torch.randint(vocab, (sum(lengths),), generator=generator)
    position_T = torch.cat([torch.arange(length) for length in lengths])
    return token_T, position_T, layout_of(*lengths)


def layout_of(*lengths):
    """Of whole sequences."""
    return PackLayout.of(np.cumsum([0, *lengths]), None, sum(lengths), torch.device("cpu"))


def response_rows(lengths, token_T):
    """Every row but each sequence's last, and the token after it."""
    last = set((np.cumsum(lengths) - 1).tolist())
    pos_R = torch.tensor([row for row in range(len(token_T)) if row not in last])
    return pos_R, token_T[pos_R + 1]
