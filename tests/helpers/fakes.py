"""An engine and a tokenizer for tests of what stands around them."""

import numpy as np


class FakeEngine:
    """Answers "7" to every prompt, and "5" to odd seeds of sampled requests; remembers the options of each call."""

    weight_version, max_total_tokens, is_idle = 3, 512, True

    def __init__(self):
        self.calls, self.unclaimed, self.num_started = [], {}, 0

    def start(self, prompts, seeds, options, priority=0):
        from engine import Completion

        self.calls.append((len(prompts), options))
        names = [str(self.num_started + i) for i in range(len(prompts))]
        self.num_started += len(prompts)
        for name, seed in zip(names, seeds, strict=True):
            ids = np.array([ord("5" if options.temperature and seed % 2 else "7")], np.int32)
            versions = np.array([self.weight_version])
            self.unclaimed[name] = Completion(ids, np.zeros(1, np.float32), "stop", versions)
        return names

    def advance(self, requests):
        return [*requests]

    def preempt(self):
        pass

    def abort(self):
        pass


class FakeTokenizer:
    def decode(self, ids):
        return "".join(map(chr, ids))
