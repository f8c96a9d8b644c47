"""Graded samples, for tests of what is made of samples."""

from dataclasses import replace

import numpy as np

from records import Grade, Sample, TokenSequence, make_tokens


def sampled(prompt, index, prompt_ids, ids, *, logp=0.0, version=0, mask=True, row_id=0, holder=None, **fields):
    """A sample of one sequence with these output ids."""
    tokens = make_tokens(ids, logp=logp, version=version, mask=mask)
    sequences = [TokenSequence(prompt_ids, tokens, holder=holder)]
    return Sample(prompt, index, row_id, sequences, **{"finish_reason": "stop"} | fields)


def sample(prompt, reward, outcome, length, *, finish_reason="stop", unsampled=0, num_turns=1):
    grade = Grade(reward, outcome, unshaped_reward=reward)
    fields = {"grade": grade, "finish_reason": finish_reason, "env_name": "games" if prompt else "math"}
    fields |= {"num_turns": num_turns, "dataset": "" if prompt else "a"}
    ids = [16] * (length - 1) + [257]  # 257: the end token
    mask = np.arange(length) >= unsampled
    found = sampled(prompt, 0, [17] * (prompt + 1), ids, version=7, mask=mask, row_id=40 + prompt, **fields)
    found.sequence.num_env_tokens = unsampled
    return found


def with_grade(sample, **fields):
    """A copy of the sample with these fields in its grade."""
    return replace(sample, grade=replace(sample.grade, **fields))


def with_tokens(sample, **columns):
    """A copy of the sample of one sequence with these columns in its tokens."""
    sequence = replace(sample.sequence, tokens=sample.sequence.tokens.copy())
    for name, values in columns.items():
        sequence.tokens[name] = values
    sequence.count_tokens()
    return replace(sample, sequences=[sequence])


def of_version(sample, version):
    """The sample, as if all its tokens were drawn from these weights."""
    return with_tokens(sample, version=version)


def answers(*given, right="7"):
    """One problem's samples by their answers; None: no answer was found."""
    samples = []
    for i, answer in enumerate(given):
        outcome = "parse_fail" if answer is None else "ok" if answer == right else "wrong"
        grade = Grade(float(outcome == "ok"), outcome, extracted=answer)
        samples.append(sampled(0, i, [1], [0] * (2 + i), grade=grade))
    return samples


def groups_that_share_prompts(seed):
    """Groups of 1 to 16 samples that share a prompt: prompts and responses of 1 to 40 ids, some of each of 1."""
    rng = np.random.default_rng(seed)
    samples = []
    for prompt in range(4):
        prompt_ids = rng.integers(0, 200, 1 if prompt == 2 else rng.integers(1, 41)).tolist()
        for index in range((1, 16, 3, 7)[prompt]):
            output_ids = rng.integers(0, 200, 1 if index == 1 else rng.integers(1, 41))
            mask = rng.random(len(output_ids)) < 0.8
            samples.append(
                sampled(prompt, index, prompt_ids, output_ids, mask=mask, row_id=prompt, advantage=len(samples))
            )
    return samples
