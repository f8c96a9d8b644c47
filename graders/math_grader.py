"""The final answer of a worked solution, and whether it equals the expected one. Pure; runs in a worker of pool.py.

`extract` looks for the answer in this order: the last complete \\boxed{} or \\fbox{}; the text after the last "####"
(GSM8K); the text after the last "answer is" or "answer:". `equal` compares first as texts without typography, then as
exact numbers if both are plain numbers, else by math-verify and sympy. Their own timeouts are off, since they use
SIGALRM; the deadline of the pool holds always. Arguments are (gold, answer), because math-verify's result depends on
the order.
"""

import logging
import re
from fractions import Fraction
from functools import lru_cache

MAX_ANSWER_CHARS = 2_000  # a longer one is no answer (parse_fail)
MAX_REPLY_CHARS = 200_000  # only the end of a longer reply is read
SELF_TESTS = (  # (reply, answer, outcome): what this file must say before a run may start
    (r"so \boxed{\frac{1}{2}}", "0.5", "ok"),
    (r"\boxed{(x+1)^2}", "x^2+2x+1", "ok"),
    (r"\boxed{2}", "0.5", "wrong"),
    ("half", "0.5", "parse_fail"),
)
# A worker does it before its deadlines count: it imports sympy, and what sympy itself imports when it simplifies.
FIRST_JOB = {"reply": r"\boxed{(x+1)^2}", "answer": "x^2+2x+1", "strict": False}
STRICT_SELF_TESTS = (("Answer: 5", "5", "ok"), ("Answer: 4", "5", "wrong"), (r"\boxed{5}", "5", "parse_fail"))

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_ANSWER_IS = re.compile(r"(?i)\banswer\**\s*(?:is\s*:?|:|=)[\s*]*")
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_PLAIN = re.compile(rf"(?P<sign>[-+]?)(?P<whole>{_NUMBER})(?:(?P<over>/)(?P<below>\d+))?(?P<percent>%?)")
_MIXED = re.compile(r"(?P<sign>[-+]?)(?P<whole>\d+)[ +](?P<above>\d+)/(?P<below>\d+)")
_FRACTION = re.compile(r"\\[dtc]?frac\{?([^{}\\/ ]+?)\}?\{([^{}]+)\}|\\[dtc]?frac(\d)(\d)")
_WRAPPERS = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox|textit|operatorname)\s*\{([^{}]*)\}")
_UNITS = re.compile(
    r"(?i)(?<=[\d}.)])\s*(?:dollars?|cents?|euros?|degrees?|°|units?|(?:square|cubic|sq\.?) ?\w+|[kcm]?m(?:\^?[23])?"
    r"|(?:kilo|centi|milli)?met(?:er|re)s?|inch(?:es)?|feet|foot|ft|yards?|miles?|mph|k?g|kilograms?|grams?|pounds?|lbs?"
    r"|ounces?|oz|lit(?:er|re)s?|gallons?|seconds?|secs?|minutes?|mins?|hours?|hrs?|days?|weeks?|months?|years?"
    r"(?: old)?|people|students?|apples?|hours per \w+)\s*$"
)
_ASSIGNED = re.compile(r"(?<![a-zA-Z\\])([a-zA-Z])\s*=")
_WORDS = re.compile(r"[^\W\d_]+(?:[ ,.'-]+[^\W\d_]+)*")


def grade(job: dict) -> dict:
    """Grades a job {reply, answer, strict}: returns {outcome, extracted, boxed}.

    strict is DAPO's rule (Yu et al. 2025): the text after the last "Answer:" within the last 300 characters must be the
    gold answer, apart from typography. boxed: whether the reply has a complete box.
    """
    gold = gold_answer(job["answer"])
    boxed = _last_box(job["reply"][-MAX_REPLY_CHARS:]) is not None
    answer = strict_answer(job["reply"]) if job["strict"] else extract(job["reply"])
    if answer is None:
        return {"outcome": "parse_fail", "extracted": None, "boxed": boxed}
    right = _typography(answer) == _typography(gold) if job["strict"] else equal(gold, answer)
    return {"outcome": "ok" if right else "wrong", "extracted": canonical(answer), "boxed": boxed}


def extract(reply: str) -> str | None:
    """The final answer; None if there is none, its box is empty, or it has more than MAX_ANSWER_CHARS."""
    reply = reply[-MAX_REPLY_CHARS:]
    candidates = (_last_box(reply), _after_marks(reply), _after_words(reply))
    answer = next((candidate for candidate in candidates if candidate is not None), "").strip()
    return answer if 0 < len(answer) <= MAX_ANSWER_CHARS else None


def strict_answer(reply: str) -> str | None:
    answers = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", reply[-300:])
    return gold_answer(answers[-1]) or None if answers else None


def gold_answer(answer: str) -> str:
    """The final answer in the answer of a dataset: a box, the text after "####" (GSM8K), or the whole text."""
    box = _last_box(answer)
    return box if box is not None else answer.rsplit("####", 1)[-1].strip()


def _last_box(text: str) -> str | None:
    """The content of the last-opened box whose braces close. Escaped braces, as of a set, do not count."""
    opened: list[int | None] = []  # for each open brace, where the content of its box begins; None if it has no box
    best: tuple[int, int] | None = None
    for token in _BRACES.finditer(text):
        if token[0] == "}":
            start = opened.pop() if opened else None
            if start is not None and (best is None or start > best[0]):
                best = start, token.start()
        elif token[0][-1] == "{" and token[0] != "\\{":
            opened.append(token.end() if len(token[0]) > 1 else None)
    return None if best is None else text[best[0] : best[1]]


def _after_marks(text: str) -> str | None:
    return text.rsplit("####", 1)[1].strip().split("\n", 1)[0] if "####" in text else None


def _after_words(text: str) -> str | None:
    parts = _ANSWER_IS.split(text)
    if len(parts) == 1:
        return None
    line = re.sub(r"\*\*(?=[.\s]|$)", "", parts[-1].strip().split("\n", 1)[0])  # ends of bold type
    math = re.match(r"\$([^$]+)\$|\\\((.+?)\\\)", line)
    if math:
        return math[1] or math[2]
    return re.split(r"(?<=[^.\s])\.(?=\s|$)|, (?=[a-z])|; | because | since ", line, maxsplit=1)[0]


def equal(gold: str, answer: str) -> bool:
    """Whether the answer is the gold one: 1/2 = 0.5 = \\frac12 = 50%; units, \\text and spacing do not count. Sets are
    equal in any order; tuples, intervals and matrices element by element; equations side by side; sympy does the rest.

    A missing % is forgiven (gold 50%, answer 50), and so is an extra one after an integer (gold 9, answer 9%), as in
    math-verify.
    """
    one, other = _typography(gold), _typography(answer)
    if one == other or (_WORDS.fullmatch(one) and one.casefold() == other.casefold()):
        return True
    if len(one) > MAX_ANSWER_CHARS or re.fullmatch("[A-Z]{2,}", one):  # BAC is an order, not a product
        return False
    if "\\" in one and one.casefold() == other.casefold():  # Omega is not omega
        return False
    numbers = number(one), number(other)
    if None not in numbers:
        bare = one.rstrip("%"), other.rstrip("%")
        return (
            numbers[0] == numbers[1]
            or (bare != (one, other) and number(bare[0]) == number(bare[1]) and ("%" in one or bare[0].isdigit()))
            or _close(*numbers, one, other)
        )
    return _by_sympy(one, other)


def _close(gold: Fraction, answer: Fraction, one: str, other: str) -> bool:
    """Whether one is a fraction and the other its decimal, rounded to at least the 6 digits that math-verify wants."""
    digits = [len(text.partition(".")[2].rstrip("%")) for text in (one, other)]
    return ("/" in one) != ("/" in other) and max(digits) >= 6 and abs(gold - answer) <= Fraction(1, 10**6) / 2


def number(text: str) -> Fraction | None:
    """The exact value of a plain number (1,234.5  -3/4  1 1/2  50%); None if the text is something else."""
    if match := _MIXED.fullmatch(text):
        below = int(match["below"])
        value = None if below == 0 else int(match["whole"]) + Fraction(int(match["above"]), below)
    elif match := _PLAIN.fullmatch(text):
        below = int(match["below"] or 1)
        value = None if below == 0 else Fraction(match["whole"].replace(",", "")) / below
        value = value / 100 if match["percent"] and value is not None else value
    else:
        return None
    return -value if value is not None and match["sign"] == "-" else value


def canonical(answer: str) -> str:
    """Equal plain numbers as equal texts, words in lower case; anything else without typography: for majority votes."""
    text = _typography(answer)
    value = number(text)
    return str(value) if value is not None else text.casefold() if _WORDS.fullmatch(text) else text


@lru_cache(maxsize=64)
def _typography(text: str) -> str:
    """Without what changes no meaning: $, \\left, \\text{}, thin spaces, a trailing period, units behind a number."""
    text = text.strip().removesuffix(".").strip()
    while len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    text = re.sub(r"\\(?:left|right|,|!|;|:|quad|qquad|displaystyle|limits)(?![a-zA-Z])|~", "", text)
    text = text.replace("{,}", ",").replace("\\$", "").replace("\\%", "%").replace("\u2212", "-")
    text = re.sub(r"\^\s*\{?\\circ\}?|°", "", text)
    text = re.sub(r"(?<!\\)\\(?= )", "", text)
    text = re.sub(r"\s+\^", "^", _WRAPPERS.sub(r" \1 ", text)).strip()
    text = re.sub(r"^[a-zA-Z]\s*=\s*(?=[-+\d\\.(])(?!(?s:.)*([=<>]|(?<![\\a-zA-Z])[a-zA-Z]))", "", text)  # x = 5
    text = re.sub(r"^[$€£]\s*(?=[\d.])|^([-+])\$", r"\1", text)
    text = re.sub(r"(?i)(?<=\d)\s*percent\b", "%", text)
    text = _UNITS.sub("", text)
    text = re.sub(r"(\d)\s*(\\[dtc]?frac)", r"\1 \2", text)
    if not re.search(r"[a-zA-Z]", re.sub(r"\\[dtc]?frac", "", text)):
        text = _FRACTION.sub(lambda m: f"{m[1] or m[3]}/{m[2] or m[4]}", text)
    parts = _ASSIGNED.split(text)  # x = 1 or x = 2: both values count, not the last
    if len(parts) > 3 and not parts[0].strip() and len(set(parts[1::2])) == 1:
        text = ",".join(re.sub(r"(?i)[,;\s]*(?:\b(?:or|and))?\s*$", "", part) for part in parts[2::2])
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text) if re.search(r"\d", text) else " ".join(text.split())


def _by_sympy(gold: str, answer: str) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify  # 1 s: only where it is needed

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # no warning that its timeouts are off: on purpose
    configs = [LatexExtractionConfig(), ExprExtractionConfig()]
    sides = [parse(f"\\boxed{{{text}}}", configs, parsing_timeout=None) for text in (gold, answer)]
    return all(sides) and verify(*sides, timeout_seconds=None)
