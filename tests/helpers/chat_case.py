"""A small tokenizer folder for tests: an id per byte, then three special tokens."""

import json

import tokenizers
from tokenizers import decoders, models, pre_tokenizers


def write_tokenizer(folder, *, vocab=None, **settings):
    """A byte-level tokenizer.json (ids 0..255, then the specials), and tokenizer_config.json of `settings`."""
    vocab = vocab or {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<|user|>", "<|assistant|>", "<|end|>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"} | settings))
    return backend
