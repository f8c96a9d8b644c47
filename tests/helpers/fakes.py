"""An engine and a tokenizer for tests of what stands around them."""

import numpy as np


class FakeEngine:
    """Answers "7" to every prompt, and "5" to odd seeds of sampled requests; remembers the options of each call."""

    weight_version, max_total_tokens = 3, 512

    def __init__(self):
        self.calls = []

    def start(self, prompts, seeds, options, priority=0):
        self.calls.append((len(prompts), options))
        return ["5" if options.temperature and seed % 2 else "7" for seed in seeds]

    def wait(self, replies, names):
        from engine import Completion

        ids, versions = [np.array([ord(reply)], np.int32) for reply in replies], np.array([self.weight_version])
        return [Completion(each, np.zeros(1, np.float32), "stop", versions) for each in ids]


class FakeTokenizer:
    def decode(self, ids):
        return "".join(map(chr, ids))
