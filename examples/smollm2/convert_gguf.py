"""Writes a GGUF file of the Llama family as an ordinary model folder: bfloat16 weights, configs, tokenizer.

    .venv/bin/python examples/smollm2/convert_gguf.py FILE.gguf FOLDER       (FOLDER: empty)

get_model.py runs it in a process that sees the packages `gguf` and `accelerate`, which transformers reads such
files with. The configs hold what defines the model and nothing that changes with the version of transformers, so
that the same file gives the same bytes; rope_theta stands where transformers 4 and 5 and vLLM look for it.
"""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

CONFIG_KEYS = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act")
CONFIG_KEYS += ("num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "mlp_bias")
CONFIG_KEYS += ("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_model(gguf: Path, folder: Path) -> None:
    """model.safetensors, config.json and generation_config.json."""
    # This also undoes the 4 bits; what its config says of a quantization is no longer true of what is written.
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    config = model.config
    if not config.tie_word_embeddings or config.rope_parameters["rope_type"] != "default":
        raise SystemExit(f"{gguf}: not the model this was written for: its head is not tied, or its RoPE is stretched")
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    os.chmod(folder / "model.safetensors", 0o644)  # safetensors makes files that only their owner can read
    ids = {key: getattr(config, key) for key in SPECIAL_IDS}
    fixed = {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    rope = {"rope_theta": config.rope_parameters["rope_theta"]}
    write_json(folder / "config.json", {key: getattr(config, key) for key in CONFIG_KEYS} | ids | fixed | rope)
    write_json(folder / "generation_config.json", ids)


def write_tokenizer(gguf: Path, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    special = {key: getattr(tokenizer, key) for key in SPECIAL_TOKENS}
    fixed = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", special | fixed)
    (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")


if __name__ == "__main__":
    write_tokenizer(Path(sys.argv[1]), Path(sys.argv[2]))
    write_model(Path(sys.argv[1]), Path(sys.argv[2]))
