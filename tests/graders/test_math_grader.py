"""Final answers: found in a stated order and compared right, over a corpus, over GSM8K, and whatever a reply holds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from math_corpus import cases

from config import ConfigError, EnvConfig, MathEnvConfig
from envs import Turn
from judges.math_grader import equal, extract, gold_answer, grade
from judges.pool import GraderPool
from support.graders.environments import make_environment

GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k_test.jsonl"


def job(answer, reply, strict=False):
    return {"answer": answer, "reply": reply, "strict": strict}


@pytest.fixture(scope="module")
def pool():
    pool = GraderPool(
        "judges.math_grader:grade", num_workers=2, deadline_s=60, memory_mib=2048, first=job("x", r"\boxed{y}")
    )
    yield pool
    pool.close()


def outcomes(pool, jobs):
    return [each.value["outcome"] if each.outcome == "ok" else each.outcome for each in pool.grade(jobs)]


def test_corpus(pool):
    corpus = [case for case in cases() if case[2] != "hostile"]
    assert len(corpus) >= 150
    found = outcomes(pool, [job(answer, reply) for answer, reply, _ in corpus])
    wrong = [(*case[:2], outcome) for case, outcome in zip(corpus, found, strict=True) if outcome != case[2]]
    assert not wrong, "\n".join(f"{answer} | {reply[:80]} is {outcome}" for answer, reply, outcome in wrong)


def test_hostile_answers_score_nothing_and_end():
    hostile = [case for case in cases() if case[2] == "hostile"]
    pool = GraderPool(
        "judges.math_grader:grade", num_workers=2, deadline_s=0.3, memory_mib=2048, first=job("x", r"\boxed{y}")
    )
    found = outcomes(pool, [job(answer, reply) for answer, reply, _ in hostile])
    pool.close()
    assert len(found) >= 15 and not {"ok", "error"} & set(found) and "timeout" in found


WHAT_COMES_LATE = """
import sys
from judges import math_grader
math_grader.grade(math_grader.FIRST_JOB)
before = set(sys.modules)
for reply, answer, outcome in math_grader.SELF_TESTS:
    assert math_grader.grade({"reply": reply, "answer": answer, "strict": False})["outcome"] == outcome
print(sorted(set(sys.modules) - before))
"""


def test_the_first_job_imports_what_the_self_tests_need():
    """An import counts against the deadline of its job: on a busy machine a self-test came back as `timeout`."""
    command = [sys.executable, "-c", WHAT_COMES_LATE]
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.skipif(not GSM8K.exists(), reason=f"real data is not there: {GSM8K}")
def test_gsm8k_gold_solutions(pool):
    answers = [json.loads(line)["answer"] for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    finals = [gold_answer(answer) for answer in answers]
    others = [next(f for f in finals[i + 1 :] + finals[:i] if f != final) for i, final in enumerate(finals)]
    assert len(answers) == 1319
    assert outcomes(pool, [job(a, a) for a in answers]) == ["ok"] * 1319
    assert outcomes(pool, [job(o, a) for o, a in zip(others, answers, strict=True)]) == ["wrong"] * 1319


@pytest.mark.parametrize(
    ("texts", "extracted"),
    [
        (["0.5", ".50", "1/2", r"\frac{1}{2}", "$0.5$", "50%"], "1/2"),
        (["1{,}234", "1,234.0", r"\$1234", "x = 1234", "1 234", "1.234e3", "1234 dollars", "1234€"], "1234"),
        (["Blue", r"\text{blue}", "blue."], "blue"),
        ([r"\sqrt{2}", r"\sqrt {2}"], r"\sqrt{2}"),
        (["(1, 2)", "(1,2)", r"\left(1, 2\right)"], "(1,2)"),
        (["\u20135", "-5", "- 5"], "-5"),
    ],
)
def test_equal_answers_have_equal_texts_for_votes(texts, extracted):
    assert {grade(job("1", rf"\boxed{{{text}}}"))["extracted"] for text in texts} == {extracted}


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        (r"answer: 3 #### 2 \boxed{1}", "1"),
        (r"\boxed{1} #### 2 answer: 3", "1"),
        ("answer: 3 #### 2", "2"),
        ("#### 2\nThe answer is 3", "2"),
        ("The answer is 3", "3"),
        (r"\boxed{1", None),
        ("no answer here", None),
        (r"so $\boxed 5$. \boxed{6", None),
        (r"\boxed{6} no: \boxed5.", "5"),
        ("<answer>4</answer> <answer>5</answer> #### 6", "5"),
        ("The answer is therefore 5.", "5"),
        ("The answer is, hence, equal to 5.", "5"),
        ("Its answer should be $5$", "5"),
        ("The answer must be 5.", "5"),
        ("The answer comes out to be approximately 5", "5"),
        ("The answer is therefore not 5.", "not 5"),
        ("The answer cannot be 5", None),
    ],
)
def test_where_an_answer_is_looked_for(reply, found):
    assert extract(reply) == found


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        ("Answer: 5", "ok"),
        ("Answer: $5$", "ok"),
        (r"Answer: \boxed{5}", "ok"),
        ("Answer: 5.0", "wrong"),  # a text comparison, as strict says
        ("Answer: 4\nAnswer: 5", "ok"),
        ("Answer: 5\nAnswer: 4", "wrong"),
        (r"\boxed{5}", "parse_fail"),
        ("Answer: 5" + " filler" * 20, "wrong"),
        ("Answer: 5\n" + " filler" * 60, "parse_fail"),
    ],
)
def test_strict(reply, outcome):
    assert grade(job("5", reply, strict=True))["outcome"] == outcome


def test_strict_drops_names_and_units():
    """As DAPO's normalisation does."""
    for gold, answer in (
        ("5", "$x = 5$"),
        ("5", "5 dollars"),
        ("60 mph", "60"),
        ("5", r"5\text{ inches}"),
        ("12", "12 units"),
    ):
        assert grade(job(gold, f"Answer: {answer}", strict=True))["outcome"] == "ok", answer
    for gold, answer in (("5", "x = 6"), ("5", "5, 6"), ("x=1,y=2", "1,2"), ("[5]", "5"), ("5", "5 or 6 dollars")):
        assert grade(job(gold, f"Answer: {answer}", strict=True))["outcome"] == "wrong", answer


def test_gold_goes_first():
    assert equal("x=5", "5") and equal("50%", "50") and not equal("50.5", "50.5%")
    assert equal("50.5%", "50.5") and equal("2", "1 + 1 = 2") and not equal("2", "2 = 1 + 1 + 0.5")
    assert not equal("2", "1 = 2") and not equal("2", "2 = 1")


# ---------------------------------------------------------------------------------------------------- the environment


@pytest.fixture(scope="module")
def environment():
    environment = make_environment("math", EnvConfig(math=MathEnvConfig(num_workers=1)))
    yield environment
    environment.close()


@pytest.mark.parametrize(
    ("reply", "finish_reason", "reward", "outcome"),
    [
        (r"\boxed{5.0}", "stop", 1.0, "ok"),
        ("#### 5", "stop", 1.0, "ok"),
        (r"\boxed{4}", "stop", 0.0, "wrong"),
        ("#### 4", "stop", 0.0, "wrong"),
        ("five", "stop", 0.0, "parse_fail"),
        (r"\boxed{}", "stop", 0.0, "parse_fail"),
        (r"\boxed{5}", "length", 0.0, "parse_fail"),
    ],
)
def test_rewards(environment, reply, finish_reason, reward, outcome):
    messages = [{"role": "user", "content": r"\boxed{5}"}, {"role": "assistant", "content": reply}]
    (result,) = environment.step([Turn(messages, "5", finish_reason)])
    assert (result.reward, result.outcome, result.done) == (reward, outcome, True)
    assert result.extracted == {"ok": "5", "wrong": "4"}.get(outcome)


def test_answers_that_cannot_be_graded_are_found_before_training(environment):
    environment.check_answers([("r:1", "5", {}), ("r:2", r"\frac{1}{2}", {}), ("r:3", "so 5\n#### 5", {})])
    for answer in ("", " ", "because ####", r"\boxed{}", "9" * 3000):
        with pytest.raises(ConfigError, match=r"^r:7: answer .* is not a final answer, .*'math'"):
            environment.check_answers([("r:1", "5", {}), ("r:7", answer, {})])


def test_strict_environment():
    cfg = EnvConfig(math=MathEnvConfig(num_workers=1, math_verify_impl="dapo_math_verify"))
    environment = make_environment("math", cfg)
    turns = [Turn([{"role": "assistant", "content": text}], "5", "stop") for text in ("Answer: 5", r"\boxed{5}")]
    assert [result.outcome for result in environment.step(turns)] == ["ok", "parse_fail"]
    environment.close()
