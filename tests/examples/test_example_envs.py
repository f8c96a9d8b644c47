"""Tools and the sliding puzzle: played through, against a search, and against what would hang a calculator."""

import json
import os
import random
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest
from environments import ready

from config import ConfigError, DatasetConfig, EnvConfig
from envs import Turn
from examples.arithmetic import second_try
from examples.envs import reasoning_gym, sliding_puzzle
from examples.envs.tools import calculate

ROOT = Path(__file__).resolve().parents[2]
PUZZLE = "examples.envs.sliding_puzzle:SlidingPuzzle"


def says(environment, reply, *, answer="391", finish_reason="stop", state=None, **columns):
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": reply}]
    (result,) = environment.step([Turn(messages, answer, finish_reason, state or {}, columns)])
    return result


# ------------------------------------------------------------------------------------------------------------ tools


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("17 * 23", "391"),
        (" (1+2)/4\n", "0.75"),
        ("2/3", "0.666666666667"),
        ("0.1 + 0.2 - 0.3", "0"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("2 ** -2", "0.25"),
        ("2**100", str(2**100)),
        ("-2**2", "-4"),
        ("1e3", "1000"),
        ("(-1) ** 99999999999", "-1"),
        ("95**36**83", "error: the number is too large"),
        ("9**9**9**9", "error: the number is too large"),
        ("*".join(["2**2000"] * 3), "error: the number is too large"),
        ("7 ** 0.5", "error: an exponent must be a whole number"),
        ("1/0", "error: division by zero"),
        ("0 ** -1", "error: division by zero"),
        ("10**400/3", "error: integer division result too large for a float"),
        ("", "error: not a formula"),
        ("2 +", "error: not a formula"),
        ("x", "error: only numbers, + - * / // % ** and parentheses"),
        ("True", "error: only numbers, + - * / // % ** and parentheses"),
        ("__import__('os').system('x')", "error: only numbers, + - * / // % ** and parentheses"),
        ("1 < 2", "error: only numbers, + - * / // % ** and parentheses"),
        ("1" * 201, "error: more than 200 characters"),
    ],
)
def test_calculator(formula, value):
    assert calculate(formula) == value


def test_no_formula_ends_the_run():
    """200 characters of anything: an answer or an error, at once."""
    rng = random.Random(0)
    for pieces in ("()", "(", "-", "~", "[", "1+", "9**", "lambda:", "\0", "\\", "é", "1_", "0x", "1j*", "'"):
        assert calculate(pieces * (200 // len(pieces))).startswith("error") or pieces in "()-"
    for _ in range(2000):
        formula = "".join(rng.choice("0123456789+-*/%(). e") for _ in range(rng.randint(1, 60)))
        assert isinstance(calculate(formula), str)


TOOLS = "examples.envs.tools:Tools"


def tools_of(**options):
    return ready(TOOLS, EnvConfig(custom={TOOLS: options} if options else {}))


def test_calls_come_back_and_the_answer_is_graded():
    tools = tools_of()
    result = says(tools, "Let me see: <calc>2+2</calc> and <calc>17 * 23</calc> \n")
    assert not result.done and result.reward == 0
    assert result.observation == ({"role": "user", "content": "<result>391</result>"},)
    (answer,) = says(tools, "<python>1</python>").observation
    assert answer["content"] == "<result>error: there is no tool python</result>"
    for reply, outcome in (
        ("#### 391", "ok"),
        ("391", "ok"),
        ("<calc>17*23</calc> so #### 392", "wrong"),  # no call: the reply went on behind it
        ("<calc>17*23</calc> so 391", "parse_fail"),
        ("<calc>17*23", "parse_fail"),
    ):
        result = says(tools, reply)
        assert result.done and (result.outcome, result.reward) == (outcome, outcome == "ok"), reply
    assert says(tools, "<calc>17*23</calc>", finish_reason="length").done  # cut off: nobody would answer the result
    (answer,) = says(tools_of(role="tool"), "<calc>" + "1" * 200 + "</calc>").observation
    assert answer == {"role": "tool", "content": f"<result>{'1' * 200}</result>"}
    with pytest.raises(ConfigError, match="tools: 'shell' is unknown; known: calc, python"):
        tools_of(tools=["shell"])
    with pytest.raises(ConfigError, match="r:1: answer 'x' is not one plain number"):
        tools.check_answers([("r:1", "x", {})])


@pytest.mark.slow
def test_programs_run_in_the_sandbox():
    tools = tools_of(tools=["python"], isolation="none", num_workers=2, python_timeout_s=3.0)
    programs = {
        "n = 17\nprint(n * 23)": "391",
        "print('x' * 5000)": "x" * 1000,
        "1 / 0": "error: the program failed",
        "while True: pass": "error: more than 3 s",
        "import os; os.fork()": "error: the program failed",
        "": "",
    }
    turns = [Turn([{"role": "assistant", "content": f"<python>{code}</python>"}], "391", "stop") for code in programs]
    turns.insert(1, Turn([{"role": "assistant", "content": "<calc>1</calc>"}], "391", "stop"))
    turns.insert(3, Turn([{"role": "assistant", "content": "#### 391"}], "391", "stop"))
    results = tools.step(turns)
    tools.close()
    assert results.pop(3).outcome == "ok"
    assert results.pop(1).observation[0]["content"] == "<result>error: there is no tool calc</result>"
    for result, printed in zip(results, programs.values(), strict=True):
        assert not result.done and result.observation[0]["content"] == f"<result>{printed}</result>"


# --------------------------------------------------------------------------------------------------- sliding puzzle


def shortest(grid):
    """Moves of a shortest solution, by a search over flat boards that knows nothing of ours."""
    size = len(grid)
    start, goal = tuple(tile for row in grid for tile in row), (*range(1, size * size), 0)
    queue, seen = deque([(start, ())]), {start}
    while queue:
        board, moves = queue.popleft()
        if board == goal:
            return list(moves)
        gap = board.index(0)
        for name, tile in (("up", gap + size), ("down", gap - size), ("left", gap + 1), ("right", gap - 1)):
            same_row = tile // size == gap // size
            if 0 <= tile < size * size and (same_row or name in ("up", "down")):
                after = list(board)
                after[gap], after[tile] = after[tile], 0
                if tuple(after) not in seen:
                    seen.add(tuple(after))
                    queue.append((tuple(after), (*moves, name)))
    return None


def test_puzzles_can_be_solved_and_are_not_solved(tmp_path):
    out = tmp_path / "puzzles.jsonl"
    command = [sys.executable, "-m", "examples.envs.sliding_puzzle", "20", str(out), "7"]
    subprocess.run(command, cwd=ROOT, check=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    ready(PUZZLE, EnvConfig()).check_answers((f"r:{i}", r["answer"], r) for i, r in enumerate(rows))
    assert len(rows) == 20 and {len(row["grid"]) for row in rows} == {2, 3}
    for row in rows:
        game, state = ready(PUZZLE, EnvConfig()), None
        moves = shortest(row["grid"])
        assert 1 <= len(moves) <= 15 and sliding_puzzle.draw(row["grid"]) in row["messages"][0]["content"]
        for i, move in enumerate(moves):
            result = says(game, f"so <action>view</action> no: <action>{move.upper()} </action>", state=state, **row)
            is_last = i == len(moves) - 1
            assert (result.done, result.reward, result.outcome) == (is_last, is_last, "ok" if is_last else "wrong")
            state = result.state
        assert result.extracted == str(len(moves))


def test_puzzles_without_a_file():
    """As a config of NeMo RL with env.sliding_puzzle_game means them: sizes up to 3, up to 6 moves, made odd."""
    train, same, other = (sliding_puzzle.puzzles(DatasetConfig(subset="3 6", split=s)) for s in ("train", None, "val"))
    rows = [train[i] for i in range(100)]
    assert rows == [same[i] for i in range(100)] and rows[:20] != [other[i] for i in range(20)]
    assert len(train) == 2048 and len({json.dumps(row["grid"]) for row in rows}) > 12
    lengths = [len(shortest(row["grid"])) for row in rows]
    assert {len(row["grid"]) for row in rows} == {2, 3} and all(n % 2 == 1 and n <= 7 for n in lengths)
    for subset in ("3", "1 5", "10 5", "three 5"):
        with pytest.raises(ConfigError, match="expected a size from 2 to 9 and a number of moves"):
            sliding_puzzle.puzzles(DatasetConfig(subset=subset))


def test_moves_by_hand():
    grid = [[1, 2, 3], [4, 0, 6], [7, 5, 8]]
    expected = {
        "up": [[1, 2, 3], [4, 5, 6], [7, 0, 8]],
        "down": [[1, 0, 3], [4, 2, 6], [7, 5, 8]],
        "left": [[1, 2, 3], [4, 6, 0], [7, 5, 8]],
        "right": [[1, 2, 3], [0, 4, 6], [7, 5, 8]],
        "slide 3 2": [[1, 2, 3], [4, 5, 6], [7, 0, 8]],
        **dict.fromkeys(("slide 3 3", "slide 2 2", "slide 4 2", "slide 0 2", "slide 3", "jump", "", "9" * 99)),
    }
    assert {action: sliding_puzzle.move(grid, action) for action in expected} == expected
    assert sliding_puzzle.move([[1, 2], [3, 0]], "up") is sliding_puzzle.move([[0, 1], [3, 2]], "right") is None
    drawn = sliding_puzzle.draw([[1, 2, 3, 4], [5, 0, 11, 12], [9, 10, 7, 8], [13, 14, 15, 6]])
    assert drawn.splitlines()[1] == " 5  . 11 12"


def test_replies_that_are_no_move():
    game, row = ready(PUZZLE, EnvConfig(custom={PUZZLE: {"max_moves": 2}})), {"grid": [[0, 1], [3, 2]]}
    state = None
    for reply, outcome, part, moves in (
        ("left", "parse_fail", "No action found", 0),
        ("<action>left", "parse_fail", "No action found", 0),
        ("<action>view</action>", "wrong", ". 1\n3 2", 0),
        ("<action>right</action>", "wrong", "That is not possible.", 1),
    ):
        result = says(game, reply, state=state, **row)
        state = result.state
        assert not result.done and (result.outcome, state) == (outcome, {"grid": row["grid"], "moves": moves})
        assert part in result.observation[0]["content"] and result.observation[0]["role"] == "user"
    result = says(game, "<action>left</action>", state=state, **row)
    assert (result.done, result.outcome) == (True, "wrong")
    assert row["grid"] == [[0, 1], [3, 2]]  # rows stay as they were
    for grid in (None, [[1, 2]], [[1, 2], [3, 3]], [[1, 2], [3]], [[1, 2], [3, "0"]], "x"):
        with pytest.raises(ConfigError, match=r"r:5: grid=.* is not a square grid of 0"):
            game.check_answers([("r:5", "", {"grid": grid})])


# ------------------------------------------------------------------------------------------------ sums, second try


def test_the_second_try():
    path = "examples.arithmetic.second_try:SecondTry"
    game, problem = ready(path, EnvConfig()), {"role": "user", "content": "37+48="}
    sums = {second_try.wanted("37+48="), "75", "85"}
    assert sums == {"75", "85"}
    right = second_try.wanted("37+48=")
    (wrong,) = sums - {right}

    def results(*replies):
        messages = [problem]
        for reply in replies:
            messages += [{"role": "assistant", "content": reply}, problem]
        (result,) = game.step([Turn(messages[:-1], "85", "stop")])
        return result.reward, result.done, list(result.observation)

    assert results(right) == (1.0, True, [])
    assert results(wrong) == results("x") == (0.0, False, [problem])
    assert results(wrong, right) == (1.0, True, []) and results(wrong, wrong) == (0.0, True, [])
    with pytest.raises(ConfigError, match="r:1: answer '5 apples' is not a number of 2 or 3 digits"):
        game.check_answers([("r:1", "5 apples", {})])


# --------------------------------------------------------------------------------------------------- reasoning-gym

PACKAGE = """
class Squares(list):
    def score_answer(self, answer, entry):
        return {0: 1.0, 1: 0.25}.get(abs(int(answer) - int(entry["answer"])), 0.01)  # raises where it is no number


def create_dataset(task, size=5, seed=0, largest=9):
    assert task in ("squares", "leg_counting", "hopeless"), task
    numbers = [(seed + i) % (largest + 1) for i in range(size)]
    rows = [{"question": f"{n}*{n}=", "answer": n * n, "metadata": {"n": n}} for n in numbers]
    return Squares([row | {"answer": "none"} for row in rows] if task == "hopeless" else rows)
"""


def test_reasoning_gym_rows_and_scores(tmp_path, monkeypatch):
    """On a stand-in of the package, whose verifier gives partial credit and raises on text."""
    says_so = f"import os; print(os.getpid(), file=open({str(tmp_path / 'imported')!r}, 'a'))\n"
    (tmp_path / "reasoning_gym.py").write_text(says_so + PACKAGE)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # and as it was, after the test
    del sys.modules["reasoning_gym"]
    monkeypatch.syspath_prepend(tmp_path)
    rows = reasoning_gym.rows(
        DatasetConfig(subset="squares(size=12, largest=9) + squares(size=2, seed=30, largest=40)")
    )
    assert [row["problem"] for row in rows] == [*(f"{n}*{n}=" for n in (*range(2, 10), 0, 1)), "30*30=", "31*31="]
    environment = ready("examples.envs.reasoning_gym:ReasoningGym", EnvConfig())
    imported = {int(pid) for pid in (tmp_path / "imported").read_text().split()}
    assert imported - {os.getpid()}, "a worker has imported the package before any deadline runs"
    try:
        for reply, reward, outcome in (
            ("4", 1.0, "ok"),
            ("It is <answer>9</answer>, no: <answer> 4 </answer>.", 1.0, "ok"),
            ("5", 0.25, "wrong"),
            ("four", 0.0, "wrong"),
        ):
            result = says(environment, reply, **rows[0])
            assert (result.reward, result.outcome) == (reward, outcome), reply
        environment.check_answers([("rows:1", row["answer"], row) for row in rows])
        (hopeless,) = reasoning_gym.rows(DatasetConfig(subset="hopeless(size=1)"))
        with pytest.raises(ConfigError, match="hopeless"):
            environment.check_answers([("rows:1", hopeless["answer"], hopeless)])
    finally:
        environment.close()


@pytest.mark.long
def test_reasoning_gym_tasks():
    """Of the package's own tasks, all but those that need more than JSON, or that no reply can solve."""
    factory = pytest.importorskip("reasoning_gym.factory", reason="reasoning-gym is not installed (examples/envs)")
    environment, refused = ready("examples.envs.reasoning_gym:ReasoningGym", EnvConfig()), []
    for task in factory.DATASETS:
        try:
            rows = reasoning_gym.rows(DatasetConfig(subset=f"{task}(size=3)"))
            environment.check_answers([(f"{task}:1", row["answer"], row) for row in rows])
        except (ConfigError, AssertionError) as error:  # AssertionError: of `composite`, without its arguments
            assert isinstance(error, AssertionError) == (task == "composite"), error
            refused.append(task)
    environment.close()
    assert len(factory.DATASETS) - len(refused) >= 95, refused
