"""Sliding puzzle, a game of many turns: slide tiles into the gap until 1, 2, 3, ... stand in order, the gap last.

    .venv/bin/python -m examples.envs.sliding_puzzle NUM_PUZZLES OUT.jsonl [SEED] [MAX_SIZE] [MAX_SHUFFLE]    puzzles

In the config: env_name: examples.envs.sliding_puzzle:SlidingPuzzle, grpo.max_rollout_turns: as many as moves may take.
Without a file, dataset_name: examples.envs.sliding_puzzle:puzzles, subset: "MAX_SIZE MAX_SHUFFLE". A config of NeMo RL
with `env.sliding_puzzle_game` means both.
Rules and rewards are NeMo RL's (nemo_rl/environments/games/sliding_puzzle.py): a move is what stands in the last
<action>...</action> of a reply: up, down, left, right (where the tile goes), `slide ROW COLUMN`, or view. 1 for the
solved board, 0 for all else; after `max_moves` moves the game is over. Unlike there, a reply without an action may be
followed by one with an action, and what the game says comes as a chat message.
"""

import json
import random
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from config import ConfigError, DatasetConfig
from envs import StepResult, Turn

RULES = """Slide the tiles of this board until they are in order, row by row from 1 to {last}, with the gap at the end:

{board}

Each turn, think, then write one action: <action>up</action>, down, left or right move the tile below, above, right or \
left of the gap into it; <action>slide 1 2</action> moves the tile in row 1, column 2; <action>view</action> shows the \
board."""
ACTION = re.compile(r"<action>((?:(?!<action>).)*?)</action>", re.IGNORECASE | re.DOTALL)
# Where the tile that moves is, seen from the gap: "up" moves the one below.
FROM = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}

NUM_PUZZLES = 2048

Grid = list[list[int]]


class SlidingPuzzle:
    """The board travels in the state of the conversation; rows bring the first one in `grid`, 0 for the gap."""

    def __init__(self, *, max_moves: int = 50):
        self.max_moves = max_moves

    def step(self, turns: Sequence[Turn]) -> list[StepResult]:
        return [self.play(turn) for turn in turns]

    def play(self, turn: Turn) -> StepResult:
        state = turn.state or {"grid": turn.fields["grid"], "moves": 0}
        actions = ACTION.findall(turn.messages[-1]["content"])
        if not actions:
            says = f"{draw(state['grid'])}\n\nNo action found. Write one like this: <action>up</action>"
            return StepResult(0.0, "parse_fail", done=False, observation=(_says(says),), state=state)
        action = " ".join(actions[-1].lower().split())
        if action == "view":
            return StepResult(0.0, "wrong", done=False, observation=(_says(draw(state["grid"])),), state=state)
        moves = state["moves"] + 1
        grid = move(state["grid"], action)
        if grid == solved(len(state["grid"])):
            return StepResult(1.0, "ok", extracted=str(moves))
        says = "That is not possible." if grid is None else f"Moved.\n\n{draw(grid)}"
        state = {"grid": grid or state["grid"], "moves": moves}
        return StepResult(0.0, "wrong", done=moves >= self.max_moves, observation=(_says(says),), state=state)

    def check_answers(self, answers: Iterable[tuple[str, str, dict]]) -> None:
        """ConfigError for a row without a `grid`. The author of a puzzle must see to it that it can be solved."""
        for where, _, fields in answers:
            grid = fields.get("grid")
            square = isinstance(grid, list) and all(isinstance(row, list) and len(row) == len(grid) for row in grid)
            tiles = [tile for row in grid for tile in row if type(tile) is int] if square else []
            if not tiles or sorted(tiles) != list(range(len(grid) ** 2)):
                raise ConfigError(f"{where}: grid={grid!r} is not a square grid of 0 (the gap), 1, 2, 3 and so on")

    def close(self) -> None:
        pass


def _says(text: str) -> dict:
    return {"role": "user", "content": text}


def move(grid: Grid, action: str) -> Grid | None:
    """The board after an action in lower case; None where it is none, or moves no tile into the gap."""
    gap_row, gap_column = find_gap(grid)
    if action in FROM:
        row, column = gap_row + FROM[action][0], gap_column + FROM[action][1]
    elif re.fullmatch(r"slide [1-9] [1-9]", action):
        row, column = (int(word) - 1 for word in action.split()[1:])
    else:
        return None
    inside = 0 <= row < len(grid) and 0 <= column < len(grid)
    if not inside or abs(row - gap_row) + abs(column - gap_column) != 1:
        return None
    after = [list(line) for line in grid]
    after[gap_row][gap_column], after[row][column] = grid[row][column], 0
    return after


def find_gap(grid: Grid) -> tuple[int, int]:
    return next((r, c) for r, line in enumerate(grid) for c, tile in enumerate(line) if tile == 0)


def solved(size: int) -> Grid:
    """1, 2, 3, ... row by row, then the gap."""
    return [[(r * size + c + 1) % size**2 for c in range(size)] for r in range(size)]


def draw(grid: Grid) -> str:
    """One line per row; the gap is a dot."""
    width = len(str(len(grid) ** 2 - 1))
    return "\n".join(" ".join(f"{tile or '.':>{width}}" for tile in line) for line in grid)


def make_puzzle(rng: random.Random, max_size: int, max_shuffle: int) -> Grid:
    """A board 2 x 2 to max_size x max_size, an odd number of random moves away from the solved one: never solved, for
    each move changes the parity."""
    grid = solved(rng.randint(2, max_size))
    for _ in range(rng.randint(1, max_shuffle) | 1):
        grid = rng.choice([after for action in FROM if (after := move(grid, action))])
    return grid


def make_row(rng: random.Random, max_size: int, max_shuffle: int) -> dict:
    """A row of a data set: the rules with the board, and the board."""
    grid = make_puzzle(rng, max_size, max_shuffle)
    text = RULES.format(last=len(grid) ** 2 - 1, board=draw(grid))
    return {"messages": [{"role": "user", "content": text}], "answer": draw(solved(len(grid))), "grid": grid}


class Puzzles(Sequence):
    """NUM_PUZZLES rows, each made from `name`, its number and the seed when it is asked for."""

    def __init__(self, name: str, seed: int, max_size: int, max_shuffle: int):
        self.name, self.seed, self.limits = name, seed, (max_size, max_shuffle)

    def __len__(self) -> int:
        return NUM_PUZZLES

    def __getitem__(self, number: int) -> dict:
        return make_row(random.Random(f"{self.name} {self.seed} {number}"), *self.limits)


def puzzles(cfg: DatasetConfig) -> Puzzles:
    """The rows of a data section: `subset` has the largest size and the largest number of shuffling moves; train and
    validation are two values of `split`, with other puzzles."""
    words = (cfg.subset or "3 15").split()
    if len(words) != 2 or not all(word.isdecimal() for word in words) or not 2 <= int(words[0]) <= 9:
        raise ConfigError(
            f"subset: {cfg.subset!r:.80}: expected a size from 2 to 9 and a number of moves, as in '5 10'"
        )
    return Puzzles(cfg.split or "train", cfg.seed, int(words[0]), max(1, int(words[1])))


if __name__ == "__main__":
    count, out, *rest = sys.argv[1:]
    seed, max_size, max_shuffle = [*map(int, rest), *(0, 3, 15)[len(rest) :]]
    rng = random.Random(seed)
    with Path(out).open("w", encoding="utf-8") as file:
        for _ in range(int(count)):
            file.write(json.dumps(make_row(rng, max_size, max_shuffle)) + "\n")
