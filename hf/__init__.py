"""Hugging Face's formats: a model folder's config, weights, tokenizer and chat template."""
