"""The exact-answer environment against a table made by hand; users' classes and functions; self-tests."""

import math
import re
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from environments import ready

import envs
from base.graders import environments
from base.graders.reward_function import RewardFunction
from base.system.users_code import describe
from config import CodeEnvConfig, ConfigError, EnvConfig, MathEnvConfig
from envs import StepResult
from judges.pool import Graded


def grade(reply, answer="1234", finish_reason="stop"):
    turn = envs.Turn([{"role": "user", "content": "?"}, {"role": "assistant", "content": reply}], answer, finish_reason)
    (result,) = ready("exact", EnvConfig()).step([turn])
    assert result.done and not result.observation and result.reward == (result.outcome == "ok")
    return result.outcome


@pytest.mark.parametrize(
    ("reply", "answer", "outcome"),
    [
        ("85", "85", "ok"),
        (" 85\n", "85", "ok"),
        ("86", "85", "wrong"),
        ("8", "85", "wrong"),
        ("0085", "85", "ok"),
        ("+85", "85", "ok"),
        ("-85", "85", "wrong"),
        ("-85", "-85", "ok"),
        ("5.0", "5", "ok"),
        ("5", "5.00", "ok"),
        ("0.1", "0.10", "ok"),
        ("0.1", "0.1000000000000000055511151231257827", "wrong"),  # equal as floats, not as decimals
        ("9007199254740993", "9007199254740992", "wrong"),
        ("1,234", "1234", "ok"),
        ("$1,234.50", "1234.5", "ok"),
        ("-$5", "-5", "ok"),
        ("1234", "reasoning, 7 of it #### 1,234", "ok"),
        ("7 + 8 = 15 #### 15", "15", "ok"),
        ("#### 3 no, #### 4", "4", "ok"),
        ("#### 4 no, #### 3", "4", "wrong"),
        ("#### 4 ####", "4", "parse_fail"),
        ("85 extra", "85", "parse_fail"),
        ("= 85", "85", "parse_fail"),
        ("The answer is 85.", "85", "parse_fail"),
        ("85.", "85", "parse_fail"),
        (".5", "0.5", "parse_fail"),
        ("8 5", "85", "parse_fail"),
        ("12,34", "1234", "parse_fail"),
        ("1,2345", "12345", "parse_fail"),
        ("1e3", "1000", "parse_fail"),
        ("85%", "85", "parse_fail"),
        ("5/1", "5", "parse_fail"),
        ("--5", "5", "parse_fail"),
        ("NaN", "5", "parse_fail"),
        ("Infinity", "5", "parse_fail"),
        ("", "5", "parse_fail"),
        ("\\boxed{5}", "5", "parse_fail"),
    ],
)
def test_grading(reply, answer, outcome):
    assert grade(reply, answer) == outcome


def test_reply_cut_off_never_scores():
    assert grade("1234", finish_reason="length") == "parse_fail"
    assert grade("#### 1234", finish_reason="length") == "parse_fail"


@pytest.mark.parametrize("piece", ["9", "1,111,", "#### ", "-$", " ", "1.", "é", "\n"])
def test_long_replies_are_graded(piece):
    """100 kB and more of what a slow pattern would choke on; the suite's time limit is the check of speed."""
    reply = piece * (300_000 // len(piece))
    assert grade(reply) in ("wrong", "parse_fail")
    assert grade(f"{reply}#### 1234") == "ok"


def test_results_are_in_the_order_of_the_turns():
    turns = [envs.Turn([{"role": "assistant", "content": text}], "5", "stop") for text in ("6", "x", "5")]
    results = ready("exact", EnvConfig()).step(turns)
    assert [result.outcome for result in results] == ["wrong", "parse_fail", "ok"]


def test_only_the_last_message_is_graded():
    messages = [
        {"role": role, "content": text} for role, text in (("user", "5"), ("assistant", "5"), ("assistant", "6"))
    ]
    (result,) = ready("exact", EnvConfig()).step([envs.Turn(messages, "5", "stop")])
    assert result.outcome == "wrong"


def test_answers_that_are_no_number_are_found_before_training():
    environment = ready("exact", EnvConfig())
    environment.check_answers(
        [("rows.jsonl:1", "5", {}), ("rows.jsonl:2", "1,000", {}), ("r:3", "it is #### -2.5", {})]
    )
    for answer in ("x = 5", "", "None", "5 apples"):
        with pytest.raises(ConfigError, match=r"^rows\.jsonl:7: answer .* is not one plain number.*'exact'") as error:
            environment.check_answers([("rows.jsonl:3", "5", {}), ("rows.jsonl:7", answer, {})])
        assert repr(answer) in str(error.value)


# ------------------------------------------------------------------------------------------ classes and functions


def results_of(name, environment, turns):
    return environments.read_results(name, environment.step(turns), turns)


class Mine(envs.Environment):
    """A user's: right when the reply has `word`."""

    self_tests = (("a b", "", "ok"),)

    def __init__(self, word="b", *, size=1):
        self.word, self.size = word, size

    def step(self, turns):
        return [StepResult(1.0, "ok" if self.word in turn.messages[-1]["content"] else "wrong") for turn in turns]


class NeedsFields(envs.Environment):
    self_tests = (("6", "5", "ok", {"near": 1}), ["7", "5", "wrong", {"near": 1}])

    def step(self, turns):
        gaps = [abs(int(turn.whole_reply) - int(turn.answer)) - turn.fields["near"] for turn in turns]
        return [StepResult(1.0, "wrong" if gap > 0 else "ok") for gap in gaps]


class Plain(envs.Environment):
    def step(self, turns):
        return []


class NoClose:
    def step(self, turns):
        return []

    def check_answers(self, answers):
        pass


def make(name, **custom):
    return ready(f"{__name__}:{name}", EnvConfig(custom={f"{__name__}:{name}": custom} if custom else {}))


def test_classes_by_dotted_path_get_their_arguments():
    assert (make("Mine").word, make("Mine", word="a", size=3).size) == ("b", 3)
    made = make("Mine", word="a")
    made.check_answers([("here", "", {})])
    assert made.close() is None
    for name, custom, problem in (
        ("Mine", {"word": "z"}, "is broken: reply 'a b' with answer '' must get 'ok', but gets 'wrong'"),
        (
            "Mine",
            {"wrod": "a"},
            r"^env.custom\['test_envs:Mine'\]: its class raised TypeError: .*unexpected keyword argument 'wrod'",
        ),
        ("Plain", {"x": 1}, r"^env.custom\['test_envs:Plain'\]: .* TypeError: Plain\(\) takes no arguments"),
        ("NoClose", {}, r"^env_name 'test_envs:NoClose': no method close\(\); derive the class from envs.Environment"),
        ("OUTCOMES", {}, r"cannot be imported .*AttributeError: module 'test_envs' has no attribute 'OUTCOMES'"),
        ("GRADES", {}, "not a callable object"),
        ("length", {"x": 1}, "takes no env.custom arguments"),
        ("no_completions", {}, "a reward function must take `completions`"),
    ):
        with pytest.raises(ConfigError, match=problem):
            make(name, **custom)
    for path in ("no_such_module:X", ":X", "test_envs:"):
        with pytest.raises(ConfigError, match=f"^env_name '{path}': cannot be imported"):
            ready(path, EnvConfig())


def test_self_tests_may_give_the_fields_of_a_row(monkeypatch):
    make("NeedsFields")
    monkeypatch.setattr(NeedsFields, "self_tests", (("6", "5", "ok", {"near": 0}),))
    with pytest.raises(ConfigError, match="is broken: reply '6' with answer '5' must get 'ok', but gets 'wrong'"):
        make("NeedsFields")
    for self_test, problem in ((("6", "5", "ok"), "KeyError: 'near'"), (("6", "5", "ok", {}, 1), "ValueError")):
        monkeypatch.setattr(NeedsFields, "self_tests", (self_test,))
        with pytest.raises(ConfigError, match=f"in its self_tests, raised {problem}"):
            make("NeedsFields")


GRADES = 5
CALLS = []


def length(completions, prompts, level, missing="none", **others):
    """TRL's signature: columns by name, what it does not name in **kwargs."""
    CALLS.append((completions, prompts, level, missing, others))
    return [len(text) - 3 for text in completions]


def only_completions(completions):
    return [None if c == "none" else float(c) for c in completions]


def chats(*, completions, answer):
    return [float(c[0]["content"] == a) for c, a in zip(completions, answer, strict=True)]


def fails(completions):
    return [score(text) for text in completions]


def score(text):
    return len(text) / (len(text) - 1)  # the line that fails


def fails_elsewhere(completions):
    return [Decimal(text) for text in completions]


def too_few(completions, **kwargs):
    return [1.0]


def no_completions(prompts):
    return [1.0 for _ in prompts]


def turn(reply, **columns):
    return envs.Turn(
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": reply}], "7", "stop", {}, columns
    )


def graded(name, *turns):
    return [(result.reward, result.outcome) for result in make(name).step(turns)]


def test_reward_functions_with_trls_signature():
    assert graded("length", turn("abcd", level=1, note="x"), turn("ab", level=2, extra=3)) == [
        (1.0, "ok"),
        (-1.0, "wrong"),
    ]
    others = {"answer": ["7", "7"], "note": ["x", None], "extra": [None, 3]}
    others |= {"prompt_ids": [[], []], "completion_ids": [[], []]}
    assert CALLS[0][-1].pop("trainer_state").global_step == 0
    assert CALLS == [(["abcd", "ab"], ["?", "?"], [1, 2], "none", others)]
    replies = ("0.5", "0", "none", "nan", "inf", "-inf")
    results = graded("only_completions", *(turn(reply, level=1) for reply in replies))
    assert results == [(0.5, "ok"), (0.0, "wrong"), *[(0.0, "error")] * 4]
    messages = [{"role": "user", "content": "?"}]
    assert graded("chats", turn("7", messages=messages), turn("8", messages=messages)) == [(1.0, "ok"), (0.0, "wrong")]
    assert graded("chats") == []
    with pytest.raises(ValueError, match=r"test_envs:too_few returned 1 rewards for 2 completions"):
        graded("too_few", turn("1"), turn("2"))
    make("length").check_answers([("rows.jsonl:1", "7", {"level": 1})])
    with pytest.raises(
        ConfigError, match=r"^rows.jsonl:2: no field 'level', which the reward function test_envs:length"
    ):
        make("length").check_answers([("rows.jsonl:1", "7", {"level": 1}), ("rows.jsonl:2", "7", {"missing": 1})])


def test_a_reward_function_that_raises_is_named_with_file_and_line():
    lines = Path(__file__).read_text().splitlines()
    for name, problem, marker in (
        ("fails", "ZeroDivisionError: division by zero", "# the line that fails"),
        ("fails_elsewhere", "InvalidOperation: .*", "return [Decimal(text)"),
    ):
        line = next(number for number, text in enumerate(lines, 1) if marker in text)
        with pytest.raises(ArithmeticError) as raised:
            make(name).step([turn("x")])
        assert re.fullmatch(rf"{problem} \({re.escape(__file__)}:{line}\)", describe(raised.value))
    builtin = RewardFunction(fails, "f")
    builtin.function = math.sqrt  # not written in Python
    with pytest.raises(TypeError) as raised:
        builtin.step([turn("x")])
    assert re.match("TypeError: .*keyword arguments", describe(raised.value))


ASK = {"role": "user", "content": "again"}
RIGHT = StepResult(1.0, "ok")
MORE = StepResult(0.0, "wrong", done=False, observation=(ASK,))
ONE_LEFT_OUT = object()


class Answers(envs.Environment):
    """Gives RIGHT for each turn but the last, and `last` for that one."""

    def __init__(self, last):
        self.last = last

    def step(self, turns):
        return [RIGHT] * (len(turns) - 1) + [self.last] * (self.last is not ONE_LEFT_OUT)


def of_form(**changes):
    return replace(MORE, **changes)


@pytest.mark.parametrize(
    ("result", "named"),
    [
        *(
            (of_form(observation=x), "observation=")
            for x in ("hello", ("again",), ["a", ASK], None, 5, ASK, {ASK["role"]})
        ),
        *(
            (of_form(observation=(ASK | x,)), "observation=")
            for x in ({"content": None}, {"role": 1}, {"content": [ASK]})
        ),
        *((of_form(observation=({k: ASK[k]},)), "observation=") for k in ASK),
        *(
            (of_form(reward=x), "reward=")
            for x in ("1", b"1", None, [1.0], 1j, np.array([1.0, 2.0]), np.ones(1), RIGHT)
        ),
        *(
            (of_form(rewards=x), "rewards=")
            for x in (None, [0.5], 0.5, "a", {"a": "x"}, {"a": None}, {"a": [1]}, {"a"})
        ),
        *((of_form(outcome=x), "outcome=") for x in ("right", "", None, True, 1, ["ok"])),
        *((of_form(done=x), "done=") for x in ("no", None, [])),
        *((x, "expected a StepResult") for x in (1.0, None, "ok", (1.0, "ok"), {"reward": 1.0}, StepResult, [RIGHT])),
        (ONE_LEFT_OUT, "2 results for 3 turns"),
    ],
)
def test_a_result_of_another_form_names_the_environment_and_the_form(result, named):
    with pytest.raises(ConfigError, match=r"^env_name 'mine:E': step\(\) returned ") as error:
        results_of("mine:E", Answers(result), [turn("a"), turn("b"), turn("c")])
    assert named in str(error.value)


@pytest.mark.parametrize("results", [None, 5, "ab", RIGHT, {}, {"a": RIGHT, "b": RIGHT}, [[RIGHT], [RIGHT]]])
def test_no_list_of_results_names_the_environment(results, monkeypatch):
    monkeypatch.setattr(Mine, "step", lambda self, turns: results)
    with pytest.raises(ConfigError, match="'mine:E'"):
        results_of("mine:E", Mine(), [turn("a"), turn("b")])
    with pytest.raises(ConfigError, match="'test_envs:Mine'"):
        make("Mine")  # its self-tests go the same way


def test_results_of_a_right_form_are_read():
    for reward in (1, True, 0.5, np.float32(0.5), np.bool_(True), np.array(2.0), torch.tensor(0.5), Fraction(1, 2)):
        found = results_of("e", Answers(of_form(reward=reward, rewards={"a": reward})), [turn("a")] * 2)
        assert found == [RIGHT, of_form(reward=float(reward), rewards={"a": float(reward)})]
        assert {type(x) for x in (found[1].reward, found[1].rewards["a"])} == {float}
    for observation in ((), [], [ASK], (ASK | {"name": "x"}, {"role": "tool", "content": ""})):
        result = of_form(observation=observation)
        assert results_of("e", Answers(result), [turn("a")]) == [result]
    unused = of_form(done=True, observation=None)  # what nobody reads may be anything
    assert results_of("e", Answers(unused), (turn("a"),)) == [unused]
    assert results_of("e", Answers(ONE_LEFT_OUT), [turn("a")] * 0) == []
    for bad in (math.nan, math.inf, -math.inf, 10**400, np.float64("nan"), Decimal("Infinity")):
        for field in ({"reward": bad}, {"rewards": {"a": bad, "b": 1.0}}):
            (found,) = results_of("e", Answers(of_form(**field)), [turn("a")])
            assert (found.reward, found.outcome, found.done) == (0.0, "error", True) and not any(found.rewards.values())


def test_a_reply_that_was_cut_off_is_empty():
    assert turn("5").whole_reply == "5" and replace(turn("5"), finish_reason="length").whole_reply == ""


def test_self_tests_of_built_in_environments_run(monkeypatch):
    monkeypatch.setattr(envs, "exact_number", lambda text: None)
    with pytest.raises(
        ConfigError, match="env_name 'exact' is broken: reply '#### 1,234' with answer '1234' must get 'ok'"
    ):
        ready("exact", EnvConfig())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["math", "code"])
def test_a_grader_that_overran_its_own_deadline_or_failed_has_no_verdict(name, monkeypatch):
    """NeMo-RL#431. A program that ran into its limit has one: the judge says so."""
    code_cfg = CodeEnvConfig(num_workers=1, isolation="none")
    made = ready(name, EnvConfig(math=MathEnvConfig(num_workers=1), code=code_cfg))
    row = {"tests": [{"input": "1", "output": "1"}]}
    verdict = {"outcome": "timeout", "boxed": True, "extracted": None} if name == "math" else "timeout"
    graded = [Graded("timeout"), Graded("error", message="died"), Graded("ok", verdict)]
    monkeypatch.setattr(made.pool, "grade", lambda jobs: graded)
    outcomes = [result.outcome for result in results_of(name, made, [turn("5", **row)] * 3)]
    made.close()
    assert outcomes == ["error", "error", "timeout"]


def test_the_reward_model_environment_accepts_every_reply():
    made = ready("reward_model", EnvConfig())
    assert [(v.reward, v.outcome, v.done) for v in made.step([turn("a"), turn("b")])] == [(0.0, "ok", True)] * 2


FORM = "<think>\n1 + 1\n</think>\n<answer>{}</answer>"


@pytest.mark.parametrize(
    ("reply", "answer", "correctness", "integer", "form"),
    [
        (FORM.format("2"), "2", 1, 1, 1),
        (FORM.format("\n 2 \n"), "2", 1, 1, 1),
        (FORM.format("2.0"), "2", 0, 0, 1),  # texts are compared, not numbers
        (FORM.format("1,000"), "1,000", 1, 0, 1),
        (FORM.format("-3"), "-3", 1, 0, 1),
        (FORM.format("3"), "2", 0, 1, 1),
        ("2", "2", 1, 1, 0),
        ("so it is 2", "2", 0, 0, 0),
        ("Well: " + FORM.format("2"), "2", 1, 1, 0),
        (FORM.format("2") + "\n", "2", 1, 1, 1),  # `$` stands before a last new line
        (FORM.format("2") + " done", "2", 1, 1, 0),
        (FORM.format("2").replace("\n<answer>", "<answer>"), "2", 1, 1, 0),
        (FORM.format("1") + FORM.format("2"), "2", 1, 1, 0),
        ("<answer>2", "2", 1, 1, 0),
        ("<answer></answer>", "", 1, 0, 0),
        ("<think>\n2*3\n</think>\n\n<answer>6</answer>", "6", 1, 1, 1),  # Qwen3 writes an empty line
        ("<think>\n2*3\n</think>\n\n\n<answer>6</answer>", "6", 1, 1, 0),
        ("</answer>" * 50_000 + "<think>" * 10_000, "2", 0, 0, 0),
        ("<think></think>\n<answer>6</answer>", "6", 1, 1, 0),  # R13: no thought
        ("<think> \n\t</think>\n\n<answer>6</answer>", "6", 1, 1, 0),
        ("<think></think></think>\n<answer>6</answer>", "6", 1, 1, 0),
        ("<think>" + "\n" * 200_000 + "<answer>6</answer>", "6", 1, 1, 0),
    ],
)
def test_three_rewards_as_in_nemo_rl(reply, answer, correctness, integer, form):
    """By the rules of HFMultiRewardVerifyWorker (nemo_rl/environments/math_environment.py, 7ea279a), but for R13."""
    environment = ready("math_multi_reward", EnvConfig())
    turn = envs.Turn([{"role": "user", "content": ""}, {"role": "assistant", "content": reply}], answer, "stop")
    (result,) = environment.step([turn])
    assert result.rewards == {"correctness": correctness, "integer": integer, "format": form}
    assert (result.reward, result.outcome) == (correctness + integer + form, "ok" if correctness else "wrong")
    (cut,) = environment.step([envs.Turn(turn.messages, answer or "x", "length")])
    assert cut.reward == 0
