"""Two turns beat one: sums of which most are wanted without the carry, and only the environment knows which are not.

In the config: env_name: examples.arithmetic.second_try:SecondTry, grpo.max_rollout_turns: 2. Nothing in a problem says
whether 37+48 shall be 75, as for two of three problems, or 85. So whoever replies once is right on 0.2 + 0.8 * 2/3 =
0.73 of the problems, of which 80% have a carry, at most. A wrong reply gets the problem's text again, and that says
enough: the other sum is the right one.
"""

import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

import envs
from config import ConfigError
from envs import StepResult, Turn
from examples.arithmetic.make_problems import sum_without_carry

PROBLEM = re.compile(r"(\d\d)\+(\d\d)=")


class SecondTry(envs.Environment):
    """`exact`, twice: 1 for the wanted sum at either try."""

    def __init__(self):
        self.exact = envs.Exact()

    def step(self, turns: Sequence[Turn]) -> list[StepResult]:
        return [self.one(turn) for turn in turns]

    def one(self, turn: Turn) -> StepResult:
        problem = turn.messages[0]
        result = self.exact.grade(replace(turn, answer=wanted(problem["content"])))
        is_first = len(turn.messages) == 2
        done = result.outcome == "ok" or not is_first
        return replace(result, done=done, observation=() if done else (problem,))

    def check_answers(self, answers: Iterable[tuple[str, str, dict]]) -> None:
        for where, answer, _ in answers:
            if not re.fullmatch(r"\d{2,3}", answer):
                raise ConfigError(f"{where}: answer {answer!r} is not a number of 2 or 3 digits")


def wanted(problem: str) -> str:
    """The sum, or the sum without the carry: by a checksum of the text, which a model cannot guess for new problems."""
    a, b = map(int, PROBLEM.fullmatch(problem).groups())
    return str(a + b if zlib.crc32(problem.encode()) % 3 == 0 else sum_without_carry(a, b))
