"""Tries the user's environments before a run: it would find a mistake in one only after its engine has started."""

from collections.abc import Mapping, Sequence
from itertools import chain, islice

import envs
from base.graders.environments import read_results
from base.hf.tokenizer import Tokenizer
from base.inputs.scan import Dataset
from base.system.users_code import call

Sets = Sequence[tuple[str, Dataset]]
TRIED_ROWS = 1250  # of each set, among which a row is looked for to try an environment on


def try_environments(environments: Mapping[str, envs.Environment], sets: Sets, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Calls each class or function of the user's once, with two plain replies to a row. Returns the names of those that
    ask for another turn. ConfigError for what one raises."""
    asking = []
    for name, environment in environments.items():
        if ":" in name:
            results = _try_environment(name, environment, sets, tokenizer)
            if not all(result.done for result in results):
                asking.append(name)
    return tuple(asking)


def _try_environment(
    name: str, environment: envs.Environment, sets: Sets, tokenizer: Tokenizer
) -> list[envs.StepResult]:
    problems = chain.from_iterable(islice(dataset.problems, TRIED_ROWS) for _, dataset in sets)
    problem = next((problem for problem in problems if problem.env_name == name), None)
    if problem is None:  # its rows are rare
        return []
    turns = []
    for reply in (f"The answer is {problem.answer}.", "I do not know."):
        turn = envs.Turn(
            messages=[*problem.messages, {"role": "assistant", "content": reply}],
            answer=problem.answer,
            finish_reason="stop",
            fields=problem.fields,
            prompt_ids=problem.prompt_ids,
            completion_ids=tokenizer.backend.encode(reply).ids,
            raw_reply=reply,
        )
        turns.append(turn)
    tried = f"env_name '{name}', tried on row {problem.row_id} of {problem.dataset} before the run,"
    return call(tried, lambda: read_results(name, environment.step(turns), turns))
