"""Finds the final answer of a worked solution and compares it with the expected one. Pure; runs in a pool.py worker.

`extract` looks for the answer in this order: the last complete \\boxed{} or \\fbox{}; the text after the last "####"
(GSM8K); the text after the last "answer is" or "answer:". `equal` reads from the outside in: lists and brackets, names
(x = 5), units, then numbers and words as math_text.py reads them. Everything else goes to sympy, with decimals
as exact fractions. Values are compared at rational points, to 1,000 digits if irrational, so no verdict depends on what
was graded before; math-verify compares sets and other objects without a value. Nothing here uses SIGALRM: the
deadline of the pool always holds. Arguments are (gold, answer): the order matters for names, units and bases.
"""

import logging
import math
import re
import sys
from collections.abc import Iterator
from typing import Any

from .math_text import LESS, NAME, Number, as_interval, clean, is_word, number, quantity, squeeze

MAX_ANSWER_CHARS = 2_000  # a longer one is no answer (parse_fail)
MAX_FORMULA_CHARS = 500  # for sympy, whose parser takes 2 ms a character
MAX_DEPTH = 50  # of brackets in brackets
MAX_BITS = 2**20  # of a power in a formula
MAX_EXPONENT_BITS = 2**44  # of an exponent with a variable
MAX_REPLY_CHARS = 200_000  # only the end of a longer reply is read
SELF_TESTS = (  # (reply, answer, outcome): what this file must say before a run may start
    (r"so \boxed{\frac{1}{2}}", "0.5", "ok"),
    (r"\boxed{(x+1)^2}", "x^2+2x+1", "ok"),
    (r"\boxed{2}", "0.5", "wrong"),
    ("half", "0.5", "parse_fail"),
)
# A worker does this job before deadlines count: it imports sympy, and the modules that sympy imports to simplify.
FIRST_JOB = {"reply": r"\boxed{(x+1)^2}", "answer": "x^2+2x+1", "strict": False}
STRICT_SELF_TESTS = (("Answer: 5", "5", "ok"), ("Answer: 4", "5", "wrong"), (r"\boxed{5}", "5", "parse_fail"))

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:(\{)|(-?\d[\d.,]*(?<=\d)))|\\.", re.DOTALL)
_ANSWER_IS = re.compile(
    r"(?i)\banswer\**\s*(?:(?:is|equals|(?:should|must|will|would) be|(?:comes|turns) out to be)\b"
    r"(?:,?\s+(?:therefore|thus|hence|then|so|now|just|simply|exactly|approximately|about|equal to|given by)\b,?)*"
    r"\s*:?|:|=)[\s*]*"
)
_CHOICE = re.compile(  # B, (B), option B. and (B) 12, whose text may not name another option
    r"(?:(?i:option|choice) )?[(\[]?([A-J])(?:[)\]]?[.:)]?|(?:[)\]][.:]?|[.:]) ((?!.*\b[A-J](?![a-zA-Z])).+))"
)
_SEPARATOR = r"[,;]|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])"
_GROUPS = re.compile(r"(?<=\d),(?=\d{3}(?![\dA-Za-z]))")
_GROUPED = r"(?<![\w.,^/(\[{}])\d{1,3}(?:,\d{3})+(?!,?\d)"
_LETTER = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]")
_SET = re.compile(r"\\\{|\\emptyset")
_BRACKETS = re.compile(r"(\\?[{(\[])(.*?)(\\?[})\]])", re.DOTALL)
_NAMED = re.compile(
    rf"({NAME}|\((?:\s*{NAME}\s*,)+\s*{NAME}\s*\))\s*(?:=|\\in(?![a-z])|(?<=[a-zA-Z]{{2}}):)\s*(.+)", re.DOTALL
)
_SETS = re.compile(r"\\(?:cup|cap|setminus|mathbb|emptyset|varnothing|le|ge|ne|in)(?![a-z])|[<>]|\\\{")
_STEPS = re.compile(r"\\(?:to|implies|iff|land|wedge|\w*arrow)(?![a-z])")
_UNORDERED = {"", "{}", "cup"}  # kinds of lists, by their brackets
_ALIKE = ({"", "{}"}, {"", "()"})
_BASE = re.compile(r"\(?(-?[\dA-Za-z]*\d[\dA-Za-z]*)\)?_\{?\s*(\d+|[a-z]+)\s*\}?")
# Compared as text: ratios, times, congruences, approximations, repeating decimals, sums, dates, scores, marked options.
_OPAQUE = re.compile(
    r":| mod |\\(?:approx|overline|bar|d?dot|sum|prod|int)(?![a-z])|\d+([-/])\d+\1\d+|^\d+-\d+$|^\([A-J]\)"
)
_ANGLE = re.compile(r"\\(?:pi|sin|cos|tan|cot|sec|csc)(?![a-z])")
_WORD_RUN = re.compile(r"(?<![\\a-zA-Z_])(?<!begin\{)(?<!end\{)(?<!mathbb\{)[a-zA-Z]{3,}(?![a-zA-Z])")
# The parser drops these silently, or takes them for 0 (dy/dx): both sides must have the same ones.
_DROPPED = re.compile(r"'|(?<=\^)T|(?<=\^{)T|\\dots|phantom|\\frac\s*{\s*d\w?\s*}\s*{[^}]*}")
_NO_WORD = re.compile(r"[b-df-hj-np-tv-z]+[aei]?|[abcx]+")  # in a formula: a product of variables, as in kxe^x


def grade(job: dict) -> dict:
    """Grades a job {reply, answer, strict}: returns {outcome, extracted}.

    strict is DAPO's rule (Yu et al. 2025): the text after the last "Answer:" within the last 300 characters must be the
    gold answer, apart from typography, a name and a unit: DAPO drops them too.
    """
    gold = gold_answer(job["answer"])
    if job["strict"]:
        answer = gold_answer((re.findall(r"(?i)Answer\s*:\s*([^\n]+)", job["reply"][-300:]) or [""])[-1])
    else:
        answer = extract(job["reply"])
    if not answer:
        return {"outcome": "parse_fail", "extracted": None}
    right = _bare(answer) == _bare(gold) if job["strict"] else equal(gold, answer)
    return {"outcome": "ok" if right else "wrong", "extracted": canonical(answer)}


def extract(reply: str) -> str | None:
    """The final answer; None if there is none, its box is empty, or it has more than MAX_ANSWER_CHARS."""
    reply = reply[-MAX_REPLY_CHARS:]
    head, tag, _ = reply.rpartition("</answer>")
    answer = _last_box(reply)
    if answer is None and tag and "<answer>" in head:
        answer = head.rpartition("<answer>")[2]
    elif answer is None and "####" in reply:
        answer = reply.rsplit("####", 1)[1].strip().partition("\n")[0]
    elif answer is None:
        answer = _after_words(reply)
    return answer.strip() if 0 < len(answer.strip()) <= MAX_ANSWER_CHARS else None


def gold_answer(answer: str) -> str:
    """The final answer in the answer of a dataset: a box, the text after "####" (GSM8K), or the whole text."""
    box = _last_box(answer)
    return box if box is not None else answer.rsplit("####", 1)[-1].strip()


def _last_box(text: str) -> str | None:
    """The content of the last box; "" if it does not close: what stood before was given up. Braces of a set, which are
    escaped, do not count."""
    boxes = [token for token in _BOX.finditer(text) if token.lastindex]
    if not boxes or boxes[-1][2]:  # \boxed 5
        return boxes[-1][2] if boxes else None
    start, depth = boxes[-1].end(), 1
    for token in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += (token[0] == "{") - (token[0] == "}")
        if depth == 0:
            return text[start : token.start()]
    return ""


def _after_words(text: str) -> str:
    parts = _ANSWER_IS.split(text)
    line = parts[-1].strip().partition("\n")[0] if len(parts) > 1 else ""
    line = re.sub(r"\*\*(?=[.\s]|$)", "", line)  # ends of bold type
    if formula := re.match(r"\$([^$]+)\$|\\\((.+?)\\\)", line):
        return formula[1] or formula[2]
    return re.split(r"(?<=[^.\s])\.(?=\s|$)|, (?=[a-z])|; | because | since ", line, maxsplit=1)[0]


def equal(gold: str, answer: str) -> bool:
    """Whether the answer is the gold one: 1/2 = 0.5 = \\frac12 = 50%; 2 hours = 2, and not 2 minutes.
    Lists are equal in any order, each element as often; tuples, intervals and matrices element by element.

    A missing % is forgiven (gold 50%, answer 50), and so is an extra one after an integer (gold 9, answer 9%), as in
    math-verify. A unit or a name that one side lacks is forgiven, and the base that the answer lacks.
    """
    one, other = clean(gold), clean(answer)
    return one == other or (max(len(one), len(other)) <= MAX_ANSWER_CHARS and _same(one, other))


def canonical(answer: str) -> str:
    """A text for majority votes: the same one for equal numbers, whatever their unit, and for equal words."""
    text = _bare(answer)
    exact = number(text)
    return str(exact.value) if exact else text.casefold() if is_word(text) else text.replace(", ", ",")


def _bare(answer: str) -> str:
    """The answer without typography, name and unit."""
    text = clean(answer)
    if number(text):
        return text
    kind, pairs, (_, value) = _read(text)
    measured = quantity(value) if not kind and len(pairs) == 1 else None
    return squeeze(measured.value if measured and measured.is_plain else text)


def _same(one: str, other: str) -> bool:
    """Whether two clean texts, which may be lists, are equal."""
    numbers = number(one), number(other)
    if None not in numbers:
        return _same_numbers(*numbers)
    if squeeze(one) == squeeze(other) or (numbers[0] and one == other.replace(", ", ",") and ",0" not in one):
        return True
    choices = _CHOICE.fullmatch(one), _CHOICE.fullmatch(other)
    if all(choices):
        texts = choices[0][2], choices[1][2]
        return choices[0][1] == choices[1][1] and (None in texts or squeeze(texts[0]) == squeeze(texts[1]))
    is_chain = LESS.search(one) is not None
    intervals = as_interval(one), as_interval(other)
    if is_chain != bool(LESS.search(other)):
        one, other = intervals
    elif is_chain and not any(map(LESS.search, intervals)) and {*_LETTER.findall(one)} == {*_LETTER.findall(other)}:
        return _same(*intervals)
    kind, pairs, (name, value) = _read(one)
    is_grouped = pairs[1:] and numbers[1] and ",0" not in other  # 1,234 is a list, too, if a list is asked for
    other_kind, other_pairs, (other_name, other_value) = _read(other, other.split(",") if is_grouped else None)
    if len(pairs) == len(other_pairs) == 1 and _sides(one)[1:]:
        if _sides(other)[1:] and (name != other_name or not name):
            is_solved = re.search("[a-zA-Z]", value) or name in map(squeeze, _sides(other))
            return bool(is_solved) and " mod " not in one and _by_sympy(one, other)  # x = 3 is not 2x = 6, the question
        if not name and re.search("[a-zA-Z]", one):  # an equation is not its right side
            return False
    if (value, other_value) != (one, other):
        return _same(value, other_value)
    if kind != other_kind and pairs and other_pairs and any(_SET.match(each) for _, each in pairs + other_pairs):
        return False  # a set of sets
    if len(pairs) != len(other_pairs) or (kind != other_kind and (is_chain or {kind, other_kind} not in _ALIKE)):
        is_list = (pairs[1:] and not kind) or (other_pairs[1:] and not other_kind) or number(one)
        is_set = {kind, other_kind} & {"", "cup"} and _SETS.search(one + other)
        return bool(is_set and not is_list) and _by_sympy(one, other)
    if len(pairs) > 1 or kind or other_kind:
        return _same_lists(pairs, other_pairs, not {kind, other_kind} <= _UNORDERED)
    return _same_value(one, other)


def _read(text: str, parts: list[str] | None = None) -> tuple[str, list[tuple[str, str]], tuple[str, str]]:
    """The brackets around a text, (name, value) of each part, and of the text itself."""
    kind, parts = ("", parts) if parts else _items(text)
    pairs = _named(parts)
    return kind, pairs, pairs[0] if len(pairs) == 1 and not kind else ("", text)


def _same_lists(pairs: list, other_pairs: list, is_ordered: bool) -> bool:
    """Whether lists of (name, value) are equal. Different names that one side lacks bind the values in their order."""
    names, other_names = ({name for name, _ in each} for each in (pairs, other_pairs))
    if {""} in (names, other_names):
        is_ordered = is_ordered or len(names | other_names) > 2
        pairs, rest = ([("", value) for _, value in each] for each in (pairs, other_pairs))
    else:
        rest = list(other_pairs)
    for name, value in pairs:
        for other in rest[:1] if is_ordered else rest:
            is_alike = other[0] == name and bool(_SET.match(value)) == bool(_SET.match(other[1]))
            if is_alike and _same(value, other[1]):
                rest.remove(other)
                break
        else:
            return False
    return True


def _items(text: str) -> tuple[str, list[str]]:
    """The brackets around a text, and its parts: `1, 2` is ("", ["1", "2"]); `[1, 2)` is ("[)", ["1", "2"])."""
    if ", " in text and not re.search(",(?! )", _GROUPS.sub("", text)):  # a writer who puts spaces after separators
        text = _GROUPS.sub("", text)
    parts = [part for part in _split(text, ";") if part]
    if len(parts) < 2:
        separator = _SEPARATOR if re.search(r"[\d\\<>=]", text) else "[,;]|(?<![a-zA-Z])and(?![a-zA-Z])"
        separator = f"{_GROUPED}|{separator}"
        parts = [sign for part in _split(text, separator) if part for sign in _signs(part)] or [text]
    if len(parts) > 1 and quantity(text).value == text:  # not 5 feet, 6 inches
        is_union = all(map(LESS.search, parts)) and not re.search("[,;]|and", text)
        return "cup" if is_union else "", parts
    if len(union := _split(text, r"\\cup(?![a-z])")) > 1:
        return "cup", union
    brackets = _BRACKETS.fullmatch(text)
    inner = _split(brackets[2], "[,;]") if brackets else []
    if not inner:
        return "", [text]
    kind = brackets[1][-1] + brackets[3][-1]
    if brackets[1] == "{":  # a group, not a set
        return _items(brackets[2])
    if len(inner) == 1 and kind == "()":
        return _items(inner[0])
    if kind == "{}":
        inner = list(dict.fromkeys(sign for part in inner if part for sign in _signs(part)))
    return kind, inner


def _signs(text: str) -> list[str]:
    """Both values of `1 \\pm 2`."""
    if text.count(r"\pm") != 1 or _BRACKETS.fullmatch(text):
        return [text]
    return [text.replace(r"\pm", a).replace(r"\mp", b) for a, b in ("+-", "-+")]


def _split(text: str, separator: str) -> list[str]:
    """The parts between separators that stand in no bracket; [] if brackets do not close, or are MAX_DEPTH deep."""
    parts = []
    start = depth = 0
    for token in re.finditer(rf"\\begin|\\end|\\?[{{}}()\[\]]|{separator}", text):
        if re.fullmatch(r"\\begin|\\?[{(\[]", token[0]):
            depth += 1
        elif re.fullmatch(r"\\end|\\?[})\]]", token[0]):
            depth -= 1
        elif depth == 0 and not token[0][0].isdigit():
            parts.append(text[start : token.start()].strip())
            start = token.end()
        if not 0 <= depth <= MAX_DEPTH:
            return []
    return [] if depth else [*parts, text[start:].strip()]


def _sides(text: str) -> list[str]:
    """Of an equation; any other text is one side."""
    return _split(text, r"(?<![<>!\\])=") or [text]


def _named(parts: list[str]) -> list[tuple[str, str]]:
    """(name, value) of each part; a part without a name has the name of the part before it: x = 1, 2. The value of
    2 + 3 = 5 is 5. An equation is its own value, and so is one that says nothing: x = x, 5 = 5, 2 = 3."""
    pairs = []
    name = ""
    for part in parts:
        part = part.lstrip("= ")
        sides, match = _sides(part), _NAMED.fullmatch(part)
        if _STEPS.search(part) or len(_split(part, f"{_GROUPED}|,")) > 1:
            sides, match = [], None
        if match and (is_word(match[1]) or not re.fullmatch("[a-z]{2,}", match[1])):  # xy = 1 is an equation
            name, part = squeeze(match[1]), match[2]
            if _is_circular(name, part):
                name, part, sides = "", f"{name} = {part}", []
            elif len(parts) == 1 and name[0] + part[0] == "((":
                names, values = _split(match[1][1:-1], ","), _split(part[1:-1], ",")
                return [*zip(names, values, strict=True)] if len(names) == len(values) else [(name, part)]
        elif sides[1:] and (_LETTER.search(part) or "\\{" in part or len({*map(_content, sides)}) == 1):
            sides = []
        elif sides[1:] and not all(_same(sides[-1], side) for side in sides):
            sides = []
        pairs.append((name if sides else "", sides[-1] if sides[1:] else part))
    return pairs


def _is_circular(name: str, value: str) -> bool:
    """Whether a value is said by itself, x = x + 1, xy = yx, x in {x}, or an option by another."""
    pattern = rf"(?<![a-zA-Z\\]){re.escape(name)}(?![a-zA-Z_'(])"
    is_said = _content(name) == _content(value) or re.search(pattern, squeeze(value))
    return bool(is_said or re.fullmatch("[A-J]{2}", name + value))


def _content(text: str) -> str:
    return "".join(sorted(re.findall(r"\w", text)))


def _same_value(one: str, other: str) -> bool:
    """Whether two texts without lists and names, not both of them plain numbers, are equal."""
    gold, answer = quantity(one), quantity(other)
    if gold.unit != answer.unit and (gold.unit and answer.unit):
        return False
    if gold.unit != answer.unit and "degrees" in dict(gold.unit + answer.unit) and _ANGLE.search(one + other):
        return False  # 30 degrees are neither 30 nor \pi/6 here
    if (gold.unit and other.endswith("%")) or not (gold.unit or answer.is_plain):
        return False
    if (gold.value, answer.value) != (one, other):
        return _same(gold.value, answer.value)
    if based := _BASE.fullmatch(one):  # the answer may leave out the base that was asked for, but not choose another
        return based[1] == other or based.groups() == getattr(_BASE.fullmatch(other), "groups", tuple)()
    if _BASE.fullmatch(other) or _OPAQUE.search(one) or _OPAQUE.search(other):
        return False
    if is_word(one) or is_word(other) or re.fullmatch("[A-Z]{2,}", one):  # BAC is an order, not a product
        return is_word(one) and one.casefold() == other.casefold()
    return _by_sympy(one, other)


def _same_numbers(gold: Number, answer: Number) -> bool:
    percents = [each.value * (100 if each.is_percent else 1) for each in (gold, answer)]
    is_forgiven = gold.is_percent or (answer.is_percent and gold.value.denominator == 1)
    return gold.value == answer.value or (is_forgiven and percents[0] == percents[1])


def _by_sympy(gold: str, answer: str) -> bool:
    is_long = max(len(squeeze(gold)), len(squeeze(answer))) > MAX_FORMULA_CHARS
    if is_long or not (gold + answer).isascii() or sorted(_DROPPED.findall(gold)) != sorted(_DROPPED.findall(answer)):
        return False
    import sympy  # 1 s with math-verify: only where it is needed
    from math_verify import verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # no warning that its timeouts are off: on purpose
    runs = {run for run in _WORD_RUN.findall(f"{gold} {answer}") if not _NO_WORD.fullmatch(run)} - {"degrees"}
    try:
        one, other = (_expression(text, sorted(runs)) for text in (gold, answer))
        if one == other:
            return True
        if isinstance(one, sympy.MatrixBase) and isinstance(other, sympy.MatrixBase):
            return one.shape == other.shape and all(_is_zero(each) for each in one - other)
        sides = [side for each in (one, other) for side in (each.args if each.is_Relational else (each,))]
        if not all(isinstance(side, sympy.Expr) for side in sides):
            if isinstance(one, sympy.Eq) or isinstance(other, sympy.Eq):
                return False
            is_trivial = bool({one, other} & {sympy.EmptySet, sympy.S.Reals, sympy.true, sympy.false})
            return verify(one, other, timeout_seconds=None, allow_set_relation_comp=not is_trivial)
        if one.is_Relational or other.is_Relational:
            return _same_relations(one, other)
        difference = one - other
        if difference.has(sympy.factorial, sympy.binomial, sympy.gamma):
            difference = sympy.gammasimp(difference)
        return _is_zero(difference, () if "|" in gold + answer else (one, other))
    except Exception:  # of the parser or sympy, which are not ours: any text at all comes here
        return False


def _expression(text: str, words: list[str]) -> Any:
    """A sympy object, without floats and with words as symbols. Raises anything if the text is no mathematics."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy, normalize_latex

    assert _split(text, "(?!)") and text.count("|") < MAX_DEPTH // 2, "brackets that do not close, or too many of them"
    for place, word in enumerate(words):
        text = re.sub(rf"(?<![\\a-zA-Z]){word}(?![a-zA-Z])", f" w_{{{1000 + place}}} ", text)
    text = re.sub(_GROUPED, lambda match: match[0].replace(",", ""), text.replace("$", ""))
    text = re.sub(r"\bdegrees\b", "", text)
    text = re.sub(r"(?<![\w^{_.])(\d+)\s*(?=\()", r"\1\\cdot ", text)  # 2(3) is read as 2 + 3
    text = re.sub(r"\)\s*(?=[\d(])", r")\\cdot ", text)
    text = re.sub(r"\^\s*(\d*\.\d+)", r"^{\1}", text)
    text = re.sub(r"(\d*)\.(\d+)", lambda m: rf"\frac{{{m[1]}{m[2]}}}{{1{'0' * len(m[2])}}}", text)
    text = normalize_latex(text, NormalizationConfig(malformed_operators=True, nits=True, boxed="none"))
    config = ConversionConfig(lowercase_symbols=False)
    tree = latex2sympy(text, is_real=True, normalization_config=None, conversion_config=config)
    _size(tree)
    return tree.doit() if getattr(tree, "is_Matrix", False) else tree


def _size(tree: Any) -> float:
    """Bits of the value of a tree that is not evaluated yet, roughly. Raises OverflowError if a power has too many."""
    if getattr(tree, "is_Integer", False):
        return int(tree).bit_length()
    sizes = [_size(arg) for arg in (tree.flat() if hasattr(tree, "flat") else getattr(tree, "args", ()))]
    kind = type(tree).__name__
    size = sum(sizes) or 40.0  # of a variable, at a point
    if kind not in ("Pow", "MatPow", "exp", "factorial", "binomial", "gamma"):
        return size
    power = tree.args[-1]
    if power.free_symbols and sizes[-1] < MAX_EXPONENT_BITS:
        return 2.0 ** min(sizes[-1], 1000)
    size = math.inf if power.free_symbols else min(size, MAX_BITS) * max(1.0, abs(complex(power.evalf(5))))
    if size > MAX_BITS:
        raise OverflowError(f"a value of {size:.0f} bits")
    return size


def _points(expression: Any) -> Iterator[dict]:
    """Values of the variables: rational, of both signs, small and large, none that people write."""
    from sympy import I, Rational
    from sympy.core.function import AppliedUndef

    symbols = sorted(expression.free_symbols | expression.atoms(AppliedUndef), key=str)
    for sign, scale in ((1, 1), (-1, 3), (1, 100), (-1, 101)) if symbols else ((1, 1),):
        values = (Rational(sign * scale * (7919 + 104 * k), sign**k * (10007 + scale * k**2)) for k in range(10**6))
        yield {symbol: I if str(symbol) == "i" else value for symbol, value in zip(symbols, values, strict=False)}


def _is_zero(difference: Any, sides: tuple = ()) -> bool:
    """Whether it vanishes wherever it is defined: exactly, or to 1,000 digits. Variables are positive if a side has no
    real value where they are not: ln x^2 is 2 ln x, and |x| is not x."""
    from sympy import I

    def at(expression: Any, point: dict) -> Any:
        return expression.subs(point).doit().evalf(15, maxn=1000)

    def is_zero(part: Any) -> bool:
        return part == 0 or part._prec == 1

    points = [*_points(difference)]
    values = [(point, value) for point in points if (value := at(difference, point)).is_number and value.is_finite]
    wrong = [point for point, value in values if not all(is_zero(part) for part in value.as_real_imag())]
    for point in wrong:
        is_positive = not any(value.is_negative for value in point.values())
        if is_positive or not sides or difference.has(I) or I in point.values():
            return False
        if all(is_zero(at(side, point).as_real_imag()[1]) for side in sides):
            return False
    return len(values) > len(points) // 2 and len(wrong) < len(values)


def _same_relations(one: Any, other: Any) -> bool:
    """Whether one is a multiple of the other: by a positive number, if it is an inequality."""
    if one.func != other.func:
        other = other.reversed
    left, right = (relation.lhs - relation.rhs for relation in (one, other))
    if one.func != other.func or _is_zero(right):  # x = x says nothing
        return False
    ratio = right / left
    ratio = ratio.subs(next(_points(ratio))).doit()
    return (one.rel_op in ("==", "!=") or not ratio.evalf() < 0) and _is_zero(right - ratio * left)


def main(gold: str, answer: str) -> int:
    """Prints how the answer is judged and what was read, in a worker with a deadline. ANSWER is a whole reply or, if no
    answer is found in it, the answer itself."""
    from .pool import GraderPool

    reply = answer if extract(answer) else rf"\boxed{{{answer}}}"
    pool = GraderPool(".math:grade", num_workers=1, deadline_s=10.0, memory_mib=4096, first=FIRST_JOB)
    [graded] = pool.grade([{"reply": reply, "answer": gold, "strict": False}])
    pool.close()
    if graded.outcome != "ok":
        print(f"{graded.outcome}: {graded.message}")
        return 1
    print(f"{graded.value['outcome']}: {graded.value['extracted']}")
    return int(graded.value["outcome"] != "ok")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m judges.math GOLD ANSWER")
    sys.exit(main(*sys.argv[1:]))
