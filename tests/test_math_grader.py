"""Final answers: found in a stated order and compared right, over a corpus, over GSM8K, and whatever a reply holds."""

import json
from pathlib import Path

import pytest
from math_corpus import cases

from grader import GraderPool
from math_grader import equal, extract, gold_answer, grade

GSM8K = Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k_test.jsonl"
DEADLINE = 2.0


@pytest.fixture(scope="module")
def pool():
    pool = GraderPool("math_grader:grade", num_workers=2, deadline_s=DEADLINE, memory_mib=2048)
    yield pool
    pool.close()


def test_corpus(pool):
    corpus = list(cases())
    assert len(corpus) >= 150
    graded = pool.grade([{"answer": answer, "reply": reply, "strict": False} for answer, reply, _ in corpus])
    unexpected = []
    for (answer, reply, expected), result in zip(corpus, graded, strict=True):
        outcome = result.value["outcome"] if result.outcome == "ok" else result.outcome
        fine = outcome != "ok" if expected == "hostile" else outcome == expected
        unexpected += [] if fine else [(answer, reply[:80], expected, outcome, result.message)]
    assert not unexpected, "\n".join(map(str, unexpected))


@pytest.mark.skipif(not GSM8K.exists(), reason=f"real data is not there: {GSM8K}")
def test_gsm8k_gold_solutions(pool):
    rows = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    answers = [row["answer"] for row in rows]
    finals = [gold_answer(answer) for answer in answers]
    others = [next(f for f in finals[i + 1 :] + finals[:i] if f != final) for i, final in enumerate(finals)]
    own = pool.grade([{"answer": a, "reply": a, "strict": False} for a in answers])
    other = pool.grade([{"answer": o, "reply": a, "strict": False} for o, a in zip(others, answers, strict=True)])
    assert len(rows) == 1319
    assert [r.value["outcome"] for r in own] == ["ok"] * 1319
    assert [r.value["outcome"] for r in other] == ["wrong"] * 1319


def test_equal_answers_have_equal_texts_for_votes():
    texts = ["0.5", ".50", "1/2", r"\frac{1}{2}", "$0.5$", "50%"]
    assert {grade({"answer": "1", "reply": rf"\boxed{{{text}}}", "strict": False})["extracted"] for text in texts} == {
        "1/2"
    }
    assert extract("no answer here") is None


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        ("Answer: 5", "ok"),
        ("Answer: 5.0", "wrong"),  # a text comparison, as strict says
        ("Answer: 4\nAnswer: 5", "ok"),
        (r"\boxed{5}", "parse_fail"),
        ("Answer: 5" + " filler" * 60, "parse_fail"),
    ],
)
def test_strict(reply, outcome):
    assert grade({"answer": "5", "reply": reply, "strict": True})["outcome"] == outcome


def test_gold_goes_first():
    assert equal("1/3", "0.333333") and not equal("0.33", "1/3")
    assert equal("50%", "50") and not equal("50", "50%")
