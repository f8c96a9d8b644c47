"""A tiny Qwen3 folder with a byte-level tokenizer and a padded vocabulary, for tests that need a whole model."""

import json
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM

NUM_PADDED = 37


def make_tiny(folder: Path, *, tied: bool = True, seed: int = 0) -> Qwen3ForCausalLM:
    """Writes the folder, returns transformers' float32 model of it. Weights large enough for peaked distributions."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|user|>", "<|assistant|>", "<|end|>"])
    vocab_size = tokenizer.get_vocab_size()
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size + NUM_PADDED,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            tie_word_embeddings=tied,
            max_position_embeddings=256,
            eos_token_id=tokenizer.token_to_id("<|end|>"),
            initializer_range=0.15,
        )
    ).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("norm.weight"):
                param.add_(torch.randn_like(param) * 0.2)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}<|assistant|>"
    settings = {"chat_template": template, "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return model
