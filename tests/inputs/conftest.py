"""The tokenizer that the tests of datasets share."""

import pytest
from chat_case import write_tokenizer

from base.hf.tokenizer import Tokenizer


@pytest.fixture
def tokenizer(tmp_path, monkeypatch):
    """No template: the prompt is the messages' text, an id per byte. The working directory is the test's own."""
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path)
    return Tokenizer(tmp_path)
