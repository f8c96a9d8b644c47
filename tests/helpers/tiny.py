"""A tiny model folder with a byte-level tokenizer and a padded vocabulary, for tests that need a whole model."""

import json
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

NUM_PADDED = 37
VOCAB_SIZE = 256 + 3  # of the tokenizer: bytes and special tokens


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "qwen3": (Qwen3Config, {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}),
    "qwen2": (Qwen2Config, {"num_attention_heads": 2, "num_key_value_heads": 1}),  # head_dim is hidden / heads
    "llama": (
        LlamaConfig,
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rope_parameters": LLAMA3_ROPE},
    ),
}


def make_tiny(folder: Path, *, family: str = "qwen3", tied: bool = True, seed: int = 0, **sizes) -> PreTrainedModel:
    """Writes the folder, returns transformers' float32 model of it. Weights large enough for peaked distributions.
    sizes: fields of its config.json that are to be other than they are here."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|user|>", "<|assistant|>", "<|end|>"])
    vocab_size = tokenizer.get_vocab_size()
    torch.manual_seed(seed)
    config_class, heads = FAMILIES[family]
    model = AutoModelForCausalLM.from_config(
        config_class(
            vocab_size=vocab_size + NUM_PADDED,
            num_hidden_layers=2,
            tie_word_embeddings=tied,
            eos_token_id=tokenizer.token_to_id("<|end|>"),
            initializer_range=0.15,
            **{"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 256} | heads | sizes,
        ),
        dtype=torch.float32,
    ).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("norm.weight"):
                param.add_(torch.randn_like(param) * 0.2)
            elif name.endswith(".bias"):
                param.normal_(0, 0.5)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}<|assistant|>"
    settings = {"chat_template": template, "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return model
