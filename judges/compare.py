"""Compares math.py with math-verify on pairs of answers whose verdict is known: `python -m judges.compare [FILE]`.

A line of FILE is {kind, gold, answer, is_right}. The default is tests/near_misses.jsonl: pairs of tests/math_pairs.py,
whose wrong answers are near the right ones. math-verify is called as NeMo RL's worker does: the gold answer in a box as
LaTeX; the answer in a box as LaTeX or an expression.
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

from .math import equal

PAIRS = Path(__file__).with_name("tests") / "near_misses.jsonl"


def by_math_verify(gold: str, answer: str) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    golds = parse(rf"\boxed{{{gold}}}", [LatexExtractionConfig()])
    answers = parse(rf"\boxed{{{answer}}}", [ExprExtractionConfig(), LatexExtractionConfig()])
    return verify(golds, answers)


def count(judge: Callable[[str, str], bool], pairs: list[dict]) -> tuple[int, int, float]:
    """(wrong answers accepted, right ones refused, seconds)."""
    accepted = 0
    refused = 0
    start = time.perf_counter()
    for pair in pairs:
        verdict = judge(pair["gold"], pair["answer"])
        if verdict and not pair["is_right"]:
            accepted += 1
        if pair["is_right"] and not verdict:
            refused += 1
    return accepted, refused, time.perf_counter() - start


def main(path: Path) -> None:
    logging.disable(logging.WARNING)  # math-verify tells of each answer that it cannot read
    pairs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    num_right = sum(pair["is_right"] for pair in pairs)
    num_wrong = len(pairs) - num_right
    equal("x", "x+1")  # imports sympy and math-verify
    print("| judge | wrong accepted | right refused | seconds |\n|---|---|---|---|")
    for name, judge in (("judges.math", equal), ("math-verify", by_math_verify)):
        accepted, refused, seconds = count(judge, pairs)
        print(f"| {name} | {accepted} of {num_wrong} | {refused} of {num_right} | {seconds:.1f} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PAIRS)
