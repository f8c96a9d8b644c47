"""The exact-answer environment against a table made by hand."""

import pytest

import envs
from config import ConfigError


def grade(reply, answer="1234", finish_reason="stop"):
    turn = envs.Turn([{"role": "user", "content": "?"}, {"role": "assistant", "content": reply}], answer, finish_reason)
    (verdict,) = envs.make_environment("exact").step([turn])
    assert verdict.done and not verdict.observation and verdict.reward == (verdict.outcome == "ok")
    return verdict.outcome


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


def test_verdicts_are_in_the_order_of_the_turns():
    turns = [envs.Turn([{"role": "assistant", "content": text}], "5", "stop") for text in ("6", "x", "5")]
    verdicts = envs.make_environment("exact").step(turns)
    assert [verdict.outcome for verdict in verdicts] == ["wrong", "parse_fail", "ok"]


def test_only_the_last_message_is_graded():
    messages = [
        {"role": role, "content": text} for role, text in (("user", "5"), ("assistant", "5"), ("assistant", "6"))
    ]
    assert envs.make_environment("exact").step([envs.Turn(messages, "5", "stop")])[0].outcome == "wrong"


def test_answers_that_are_no_number_are_found_before_training():
    environment = envs.make_environment("exact")
    environment.check_answers([("rows.jsonl:1", "5"), ("rows.jsonl:2", "1,000"), ("rows.jsonl:3", "it is #### -2.5")])
    for answer in ("x = 5", "", "None", "5 apples"):
        with pytest.raises(ConfigError, match=r"^rows\.jsonl:7: answer .* is not one plain number.*'exact'") as error:
            environment.check_answers([("rows.jsonl:3", "5"), ("rows.jsonl:7", answer)])
        assert repr(answer) in str(error.value)


def test_unknown_environment():
    with pytest.raises(ConfigError, match="env_name 'exakt' is unknown; known: exact"):
        envs.make_environment("exakt")
