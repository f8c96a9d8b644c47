"""Which rows of a training set come next, by how often their past groups were right (data.train.prompt_selection).

A group whose replies are all right, or all wrong, trains nothing. How likely that is depends on the row's pass rate p,
which is estimated from the groups that the run has already sampled of the row. A group counts half as much as the next
one of its row, for the policy has changed since.

    p(1-p)            a row is drawn in proportion to p (1 - p), the variance of a reply's outcome
    thompson          of eight rows that are drawn uniformly, the one comes whose p, drawn from its Beta posterior, is
                      nearest to 1/2 (after MoPPS, Qu et al. 2025, arXiv:2507.04632)
    module:function   a row is drawn in proportion to function(right, graded) >= 0: a user's, of its replies so far
"""

import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence

import numpy as np

from base.system.exits import StopRun
from base.system.imports import import_attribute
from base.system.users_code import call
from config import ConfigError
from records import Sample

OLDER = 0.5  # the share of its weight that a group keeps when its row is sampled again
CANDIDATES = 8  # rows that thompson compares for each that it takes
LARGEST = 1e100  # weight of a row: all weights have a finite sum


def learnability(right: float, graded: float) -> float:
    """p (1 - p), with one right and one wrong reply added to those seen: an unseen row has 1/4, and none has 0."""
    rate = (right + 1) / (graded + 2)
    return rate * (1 - rate)


class Selection:
    """The rows of one set, numbered from 0, and what is known of them: equal on all ranks, as the samples are.

    right_N, graded_N: replies of outcome `ok`, and all that were graded, with older groups discounted. weight_N: of the
    rule. Dims: N rows, P rows that are drawn, C candidates for each.
    """

    def __init__(self, rule: str, num_rows: int):
        self.name = f"data.train.prompt_selection '{rule}'"
        self.is_thompson = rule == "thompson"
        self.weight_of: Callable[[float, float], float] = learnability
        if ":" in rule:
            self.weight_of = import_attribute(rule, "data.train.prompt_selection")
        self.right_N = np.zeros(num_rows)
        self.graded_N = np.zeros(num_rows)
        self.weight_N = np.full(num_rows, self._weight(0.0, 0.0))
        if not self.weight_N.all():
            raise ConfigError(f"{self.name} gives the weight 0 to a row that was never drawn: no row would come")
        self.number_of: dict[int, int] = {}  # row_id -> number, of the rows drawn so far

    def note_drawn(self, row_id: int, index: int) -> None:
        """index: of the problem; `repeat` has given the set each row several times."""
        self.number_of[row_id] = index % len(self.right_N)

    def draw(self, count: int, generator: np.random.Generator) -> list[int]:
        """Numbers of `count` rows, each drawn for itself. Raises StopRun where no row has a weight."""
        if self.is_thompson:
            return self._nearest_to_half(count, generator)
        sum_N = self.weight_N.cumsum()
        if sum_N[-1] == 0:
            raise StopRun(f"{self.name} gives every row the weight 0: nothing is left to train on")
        drawn_P = sum_N[-1] * generator.random(count)
        return np.searchsorted(sum_N, drawn_P, side="right").tolist()

    def _nearest_to_half(self, count: int, generator: np.random.Generator) -> list[int]:
        candidate_PC = generator.integers(len(self.right_N), size=(count, CANDIDATES))
        right_PC = self.right_N[candidate_PC]
        wrong_PC = self.graded_N[candidate_PC] - right_PC
        rate_PC = generator.beta(1 + right_PC, 1 + wrong_PC)
        best_P = np.abs(rate_PC - 0.5).argmin(1)
        return candidate_PC[np.arange(count), best_P].tolist()

    def record(self, group: Sequence[Sample]) -> None:
        """Counts a group of samples of one row. Those that could not be graded say nothing of it."""
        outcomes = [sample.grade.outcome for sample in group]
        num_graded = len(outcomes) - outcomes.count("error")
        if num_graded == 0:
            return
        number = self.number_of[group[0].row_id]
        right = OLDER * float(self.right_N[number]) + outcomes.count("ok")
        graded = OLDER * float(self.graded_N[number]) + num_graded
        self.right_N[number] = right
        self.graded_N[number] = graded
        self.weight_N[number] = self._weight(right, graded)

    def _weight(self, right: float, graded: float) -> float:
        """ConfigError unless the rule gives a number from 0 to LARGEST."""
        weight = call(self.name, self.weight_of, float(right), float(graded))
        if not isinstance(weight, int | float) or not 0 <= weight <= LARGEST:
            returned = f"returned {weight!r:.80} for {right:g} right of {graded:g} replies"
            raise ConfigError(f"{self.name} {returned}: expected a number from 0 to {LARGEST:g}")
        return float(weight)

    def saved(self) -> str:
        """The counts, as text for a checkpoint."""
        counts = np.stack([self.right_N, self.graded_N]).astype("<f8")
        compressed = zlib.compress(counts.tobytes(), level=1)
        return b64encode(compressed).decode()

    def restore(self, saved: str) -> None:
        """Takes counts that `saved` gave for the same rows."""
        compressed = b64decode(saved)
        counts = np.frombuffer(zlib.decompress(compressed), "<f8")
        self.right_N, self.graded_N = counts.reshape(2, -1).copy()
        for number in self.graded_N.nonzero()[0]:
            self.weight_N[number] = self._weight(self.right_N[number], self.graded_N[number])
