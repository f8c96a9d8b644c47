"""What the steps of a run sample, token by token, in a file beside it: for tests of what outlasts a step or a kill."""

import json
from dataclasses import replace
from pathlib import Path

COLUMNS = {"output_ids": "id", "sampler_logps": "logp", "versions": "version", "mask": "mask"}  # there -> in TOKEN
FIELDS = ("prompt", "index", "row_id", "dataset", "env_name", "num_turns")


def record(program, file: Path) -> None:
    """From now on the `sample_step` that `program` calls writes a line for each step: all samples that it generated,
    numbered as they were sampled, and which of them are trained."""
    from base.system.exchange import move_tokens

    original = program.sample_step

    def sample_step(sampler, cfg, mixture, cursor, step, num_steps):
        result = original(sampler, cfg, mixture, cursor, step, num_steps)
        trained = {(sample.dataset, sample.row_id, sample.index) for sample in result.trained}
        is_trained = [(sample.dataset, sample.row_id, sample.index) in trained for sample in result.generated]
        generated = [replace(s, sequences=[replace(s.sequence)]) for s in result.generated]
        move_tokens([[s.sequence for s in generated]])
        if sampler.ranks.rank == 0:
            samples = [
                {name: s.sequence.tokens[column].tolist() for name, column in COLUMNS.items()}
                | {name: getattr(s, name) for name in FIELDS}
                | {"prompt_ids": s.sequence.prompt_ids}
                | {"reward": s.grade.reward, "outcome": s.grade.outcome}
                | {"trained": trained}
                for s, trained in zip(generated, is_trained, strict=True)
            ]
            with file.open("a") as lines:
                lines.write("\n" + json.dumps({"step": step, "samples": samples}))
        return result

    program.sample_step = sample_step


def give_places(number: int) -> None:
    """From now on an engine runs so many requests at once, and goes on by a token while others wait: so work for later
    steps is cut by the end of each."""
    import ahead
    import engine

    class LLM(engine.LLM):
        def __init__(self, **words):
            super().__init__(max_num_seqs=number, **words)

    engine.LLM = LLM
    ahead.STEPS_BETWEEN_STOPS = 1


def recorded(file: Path) -> dict[int, list[dict]]:
    """Step -> samples, of the last life that had it."""
    steps = {}
    for line in file.read_text().splitlines():
        try:
            part = json.loads(line)
        except json.JSONDecodeError:  # cut by a kill, or the first one, which is empty
            continue
        steps = {step: samples for step, samples in steps.items() if step < part["step"]}
        steps[part["step"]] = part["samples"]
    return steps


def versions_of_first_reply(sample: dict) -> list[int]:
    return sample["versions"][: (sample["mask"] + [False]).index(False)]
