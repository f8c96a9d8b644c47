"""Seconds that grading takes: GSM8K's 1,319 solutions at once, and the slowest answers of the tests' corpus.

`python -m bench.graders [--workers 2] [--deadline 2] [--gsm8k gsm8k_test.jsonl]`; neither a GPU nor a model is needed.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

from graders.math_grader import FIRST_JOB, gold_answer
from graders.pool import GraderPool

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "helpers"))
from math_corpus import cases


def job(answer: str, reply: str) -> dict:
    return {"answer": answer, "reply": reply, "strict": False}


def outcomes(graded) -> dict[str, int]:
    return dict(Counter(each.value["outcome"] if each.outcome == "ok" else each.outcome for each in graded))


def gsm8k(pool: GraderPool, path: Path) -> None:
    """Every gold solution against its own answer, then against the next one that differs."""
    solutions = [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]
    finals = [gold_answer(solution) for solution in solutions]
    others = [next(each for each in finals[i:] + finals[:i] if each != final) for i, final in enumerate(finals)]
    for name, answers in (("own", solutions), ("another row's", others)):
        start = time.monotonic()
        graded = pool.grade([job(answer, reply) for answer, reply in zip(answers, solutions, strict=True)])
        print(f"GSM8K, {name} answer: {outcomes(graded)} in {time.monotonic() - start:.2f} s")


def corpus(pool: GraderPool) -> None:
    """One at a time: what each takes, deadline and the start of the next worker's process included."""
    rows = []
    for answer, reply, expected in cases():
        start = time.monotonic()
        graded = pool.grade([job(answer, reply)])
        rows.append((time.monotonic() - start, *outcomes(graded), expected, reply))
        pool.grade([FIRST_JOB] * (2 * len(pool.workers)))  # every worker is there again
    print(f"corpus: {len(rows)} answers, {sum(row[0] for row in rows):.1f} s one by one; the slowest:")
    for seconds, outcome, expected, reply in sorted(rows, reverse=True)[:20]:
        print(f"  {seconds:6.3f} s  {outcome:10} expected {expected:10} {reply[:60]!a}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--deadline", type=float, default=2.0)
    parser.add_argument("--gsm8k", type=Path, help="GSM8K's test set as JSON lines {question, answer}")
    args = parser.parse_args()
    start = time.monotonic()
    pool = GraderPool(
        "graders.math_grader:grade",
        num_workers=args.workers,
        deadline_s=args.deadline,
        memory_mib=2048,
        first=FIRST_JOB,
    )
    print(f"{args.workers} workers started in {time.monotonic() - start:.2f} s, deadline {args.deadline:g} s")
    if args.gsm8k:
        gsm8k(pool, args.gsm8k)
    corpus(pool)
    pool.close()


if __name__ == "__main__":
    main()
