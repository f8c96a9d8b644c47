"""Graded samples, for tests of what is made of samples."""

from dataclasses import replace

import numpy as np

from data import Sample


def sample(prompt, reward, outcome, length, *, finish_reason="stop", unsampled=0, num_turns=1):
    mask = np.arange(length) >= unsampled
    ids, logps = np.array([16] * (length - 1) + [257], np.int32), np.zeros(length, np.float32)  # 257: the end token
    prompt_ids, env_name = [17] * (prompt + 1), "games" if prompt else "math"
    found = Sample(
        prompt, 0, 40 + prompt, prompt_ids, ids, logps, mask, finish_reason, np.full(length, 7), reward, outcome, reward
    )
    dataset = "" if prompt else "a"
    return replace(found, env_name=env_name, num_env_tokens=unsampled, num_turns=num_turns, dataset=dataset)


def of_version(sample, version):
    """The sample, as if all its tokens were drawn from these weights."""
    return replace(sample, versions=np.full(len(sample.output_ids), version))


def answers(*given, right="7"):
    """One problem's samples by their answers; None: no answer was found."""
    samples = []
    for i, answer in enumerate(given):
        outcome = "parse_fail" if answer is None else "ok" if answer == right else "wrong"
        ids, logps = np.zeros(2 + i, np.int32), np.zeros(2 + i, np.float32)
        samples.append(Sample(0, i, 0, [1], ids, logps, ids == 0, "stop", 0 * ids, float(outcome == "ok"), outcome))
        samples[-1].extracted = answer
    return samples
