"""A graded sample, for tests of what is made of samples."""

from dataclasses import replace

import numpy as np

from data import Sample


def sample(prompt, reward, outcome, length, *, finish_reason="stop", unsampled=0, num_turns=1):
    mask = np.arange(length) >= unsampled
    ids, logps = np.array([16] * (length - 1) + [257], np.int32), np.zeros(length, np.float32)  # 257: the end token
    prompt_ids, env_name = [17] * (prompt + 1), "games" if prompt else "math"
    found = Sample(prompt, 0, 40 + prompt, prompt_ids, ids, logps, mask, finish_reason, 7, reward, outcome, reward)
    dataset = "" if prompt else "a"
    return replace(found, env_name=env_name, num_env_tokens=unsampled, num_turns=num_turns, dataset=dataset)
