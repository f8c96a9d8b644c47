"""An engine and a tokenizer for tests of what stands around them."""

import numpy as np


class FakeEngine:
    """Answers "7" to every prompt, and "5" to odd seeds of sampled requests; remembers the options of each call."""

    weight_version, max_total_tokens = 3, 512

    def __init__(self):
        self.calls = []

    def generate(self, prompts, seeds, options):
        from engine import Completion

        self.calls.append((len(prompts), options))
        replies = ["5" if options.temperature and seed % 2 else "7" for seed in seeds]
        return [Completion(np.array([ord(c) for c in r], np.int32), np.zeros(1, np.float32), "stop") for r in replies]


class FakeTokenizer:
    def decode(self, ids):
        return "".join(map(chr, ids))
