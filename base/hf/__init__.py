"""Hugging Face's formats: weights and adapters, read and written."""
