"""Graded samples, for tests of what is made of samples."""

from dataclasses import replace

import numpy as np

from records import Grade, Sample


def sample(prompt, reward, outcome, length, *, finish_reason="stop", unsampled=0, num_turns=1):
    mask = np.arange(length) >= unsampled
    ids, logps = np.array([16] * (length - 1) + [257], np.int32), np.zeros(length, np.float32)  # 257: the end token
    grade = Grade(reward, outcome, unshaped_reward=reward)
    prompt_ids, env_name = [17] * (prompt + 1), "games" if prompt else "math"
    found = Sample(prompt, 0, 40 + prompt, prompt_ids, ids, logps, mask, finish_reason, np.full(length, 7), grade)
    dataset = "" if prompt else "a"
    return replace(found, env_name=env_name, num_env_tokens=unsampled, num_turns=num_turns, dataset=dataset)


def with_grade(sample, **fields):
    """A copy of the sample with these fields in its grade."""
    return replace(sample, grade=replace(sample.grade, **fields))


def of_version(sample, version):
    """The sample, as if all its tokens were drawn from these weights."""
    return replace(sample, versions=np.full(len(sample.output_ids), version))


def answers(*given, right="7"):
    """One problem's samples by their answers; None: no answer was found."""
    samples = []
    for i, answer in enumerate(given):
        outcome = "parse_fail" if answer is None else "ok" if answer == right else "wrong"
        grade = Grade(float(outcome == "ok"), outcome, extracted=answer)
        ids, logps = np.zeros(2 + i, np.int32), np.zeros(2 + i, np.float32)
        samples.append(Sample(0, i, 0, [1], ids, logps, ids == 0, "stop", 0 * ids, grade))
    return samples


def groups_that_share_prompts(seed):
    """Groups of 1 to 16 samples that share a prompt: prompts and responses of 1 to 40 ids, some of each of 1."""
    rng = np.random.default_rng(seed)
    samples = []
    for prompt in range(4):
        prompt_ids = rng.integers(0, 200, 1 if prompt == 2 else rng.integers(1, 41)).tolist()
        for index in range((1, 16, 3, 7)[prompt]):
            output_ids = rng.integers(0, 200, 1 if index == 1 else rng.integers(1, 41)).astype(np.int32)
            no_logps = np.zeros(len(output_ids), np.float32)
            sampled = rng.random(len(output_ids)) < 0.8
            tokens = (output_ids, no_logps, sampled, "stop", np.zeros_like(output_ids))
            samples.append(Sample(prompt, index, prompt, prompt_ids, *tokens, advantage=len(samples)))
    return samples
