"""Compares two formulas by sympy: `same_formula`.

A formula is read by latex2sympy, with decimals as exact fractions, and the two are compared at points: rational values
of the variables, drawn from a digest of both texts, so that nobody can write a formula that vanishes there, and no
verdict depends on what was graded before. Values are exact, or have up to 1,000 digits. Where a formula is too large at
a point, the point says nothing. math-verify compares sets and other objects without a value.
"""

import hashlib
import logging
import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .math_text import GROUPED, depth_of, split, squeeze

if TYPE_CHECKING:
    import sympy

MAX_CHARS = 500  # the parser takes 2 ms a character
MAX_DEPTH = 12  # of brackets in brackets; the parser takes exponential time
MAX_CELLS = 40  # of matrices
MAX_BARS = 25  # of absolute values
MAX_BITS = 2**20  # of a value
MAX_DIGITS = 1000
SCALES = ((1, 1), (-1, 3), (1, 100), (-1, 101))  # of the points: (-1: of both signs), size
WORD = re.compile(r"(?<![\\a-zA-Z_])(?<!begin\{)(?<!end\{)(?<!mathbb\{)[a-zA-Z]{3,}(?![a-zA-Z])")
NO_WORD = re.compile(r"[b-df-hj-np-tv-z]+[aei]?|[abcx]+")  # in a formula: a product of variables, as in kxe^x
# The parser drops these silently, or takes them for 0 (dy/dx): both sides must have the same ones.
DROPPED = re.compile(r"'|(?<=\^)T|(?<=\^{)T|\\dots|phantom|\\frac\s*{\s*d\w?\s*}\s*{[^}]*}")

Point = dict["sympy.Symbol", "sympy.Rational"]


class TooLargeError(Exception):
    """A value has more than MAX_BITS."""


def same_formula(gold: str, answer: str) -> bool:
    """Whether two clean texts are equal as mathematics. What cannot be read is equal to nothing."""
    if not (can_be_read(gold) and can_be_read(answer)):
        return False
    if sorted(DROPPED.findall(gold)) != sorted(DROPPED.findall(answer)):
        return False
    runs = {run for run in WORD.findall(f"{gold} {answer}") if not NO_WORD.fullmatch(run)}
    words = sorted(runs - {"degrees"})
    try:
        one = parse(gold, words)
        other = parse(answer, words)
        return one == other or same_objects(one, other, gold, answer)
    except Exception:  # of the parser or sympy, which are not ours: any text at all comes here
        return False


def can_be_read(text: str) -> bool:
    """Whether the parser ends in time."""
    is_short = len(squeeze(text)) <= MAX_CHARS and depth_of(text) <= MAX_DEPTH
    is_flat = text.count("&") < MAX_CELLS and text.count("|") < MAX_BARS
    return is_short and is_flat and text.isascii() and bool(split(text, "(?!)"))


def parse(text: str, words: Sequence[str]) -> "sympy.Basic":
    """A sympy object that is not evaluated, without floats and with words as symbols. Raises anything if the text is no
    mathematics."""
    import sympy  # 1 s with math-verify: only where it is needed
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy, normalize_latex
    from sympy.core.function import AppliedUndef

    for place, word in enumerate(words):
        text = re.sub(rf"(?<![\\a-zA-Z]){word}(?![a-zA-Z])", f" w_{{{1000 + place}}} ", text)
    text = re.sub(GROUPED, lambda match: match[0].replace(",", ""), text.replace("$", ""))
    text = re.sub(r"\bdegrees\b", "", text)
    text = re.sub(r"(?<![\w^{_.])(\d+)\s*(?=\()", r"\1\\cdot ", text)  # 2(3) is read as 2 + 3
    text = re.sub(r"\)\s*(?=[\d(])", r")\\cdot ", text)
    text = re.sub(r"\^\s*(\d*\.\d+)", r"^{\1}", text)
    text = re.sub(r"(\d*)\.(\d+)", lambda m: rf"\frac{{{m[1]}{m[2]}}}{{1{'0' * len(m[2])}}}", text)
    text = normalize_latex(text, NormalizationConfig(malformed_operators=True, nits=True, boxed="none"))
    config = ConversionConfig(lowercase_symbols=False)
    tree = latex2sympy(text, is_real=True, normalization_config=None, conversion_config=config)
    if getattr(tree, "is_Matrix", False):
        check_size(tree, {})
        return tree.doit()
    for function, inverse in ((sympy.sec, sympy.cos), (sympy.csc, sympy.sin), (sympy.cot, sympy.tan)):
        if tree.has(function):  # its values have no 1,000 digits
            tree = tree.replace(function, lambda argument, inverse=inverse: 1 / inverse(argument))
    functions = tree.atoms(AppliedUndef)  # f(2), a number that nobody knows
    if functions:
        tree = tree.xreplace({function: sympy.Symbol(str(function), real=True) for function in functions})
    return tree


def same_objects(one: "sympy.Basic", other: "sympy.Basic", gold: str, answer: str) -> bool:
    """Whether two objects of sympy are equal: matrices, sets, relations or expressions."""
    import sympy

    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    found = points(symbols, f"{gold}\0{answer}")
    at = [point for point in found if has_size(one, point) and has_size(other, point)]
    if not at:  # sympy would never end: it computes a factorial as soon as it stands in a sum
        return False
    units = {symbol: sympy.I for symbol in symbols if str(symbol) == "i"}
    if units:
        one = one.xreplace(units)
        other = other.xreplace(units)
    if isinstance(one, sympy.MatrixBase) and isinstance(other, sympy.MatrixBase):
        return one.shape == other.shape and all(is_zero(cell, at) for cell in one - other)
    sides = []
    for tree in (one, other):
        sides += tree.args if tree.is_Relational else [tree]
    if not all(isinstance(side, sympy.Expr) for side in sides):
        return same_sets(one, other)
    if one.is_Relational or other.is_Relational:
        return same_relations(one, other, at)
    difference = one - other
    if difference.has(sympy.factorial, sympy.binomial, sympy.gamma):
        difference = sympy.gammasimp(difference)
    if "|" in gold + answer:
        return is_zero(difference, at)
    return is_zero(difference, at, (one, other))


def same_sets(one: "sympy.Basic", other: "sympy.Basic") -> bool:
    """Objects without a value, by math-verify."""
    import sympy
    from math_verify import verify

    if isinstance(one, sympy.Eq) or isinstance(other, sympy.Eq):
        return False
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # no warning that its timeouts are off: on purpose
    says_nothing = {sympy.EmptySet, sympy.S.Reals, sympy.true, sympy.false}
    allow = one not in says_nothing and other not in says_nothing
    return verify(one, other, timeout_seconds=None, allow_set_relation_comp=allow)


def same_relations(one: "sympy.Basic", other: "sympy.Basic", at: Sequence[Point]) -> bool:
    """Whether one is a multiple of the other: by a positive number, if it is an inequality."""
    if one.func != other.func:
        other = other.reversed
    if one.func != other.func:
        return False
    left = one.lhs - one.rhs
    right = other.lhs - other.rhs
    if is_zero(right, at):  # x = x says nothing
        return False
    ratio = right / left
    if one.rel_op not in ("==", "!=") and value_at(ratio, at[0]) < 0:
        return False
    return is_zero(right - ratio.subs(at[0]) * left, at)


def is_zero(difference: "sympy.Expr", at: Sequence[Point], sides: Sequence = ()) -> bool:
    """Whether it vanishes at the points where it is defined: exactly, or to 1,000 digits. Variables are positive if a
    side has no real value where they are not: ln x^2 is 2 ln x, and |x| is not x."""
    from sympy import I

    num_defined = 0
    num_zero = 0
    for point in at:
        value = value_at(difference, point)
        if not value.is_number or not value.is_finite:
            continue
        num_defined += 1
        if is_null(value):
            num_zero += 1
            continue
        is_positive = not any(number.is_negative for number in point.values())
        if is_positive or not sides or difference.has(I):
            return False
        if all(is_null(value_at(side, point).as_real_imag()[1]) for side in sides):
            return False
    return num_zero > 0 and 2 * num_defined > len(at)


def value_at(tree: "sympy.Basic", point: Point) -> "sympy.Basic":
    return tree.doit().evalf(15, subs=point, maxn=MAX_DIGITS)


def is_null(value: "sympy.Expr") -> bool:
    """Whether a number is 0 to all digits that it has."""
    return all(part == 0 or part._prec == 1 for part in value.as_real_imag())


def points(symbols: Sequence, texts: str) -> list[Point]:
    """Values of the variables: rational, of both signs, small and large."""
    from sympy import Rational

    if not symbols:
        return [{}]
    rng = random.Random(hashlib.sha256(texts.encode()).digest())
    found = []
    for sign, scale in SCALES:
        point = {}
        for place, symbol in enumerate(symbols):
            value = scale * Rational(rng.randint(70_000, 99_999), rng.randint(100_000, 129_999))
            if sign < 0 and place % 2 == 0:
                value = -value
            point[symbol] = value
        found.append(point)
    return found


def has_size(tree: "sympy.Basic", point: Point) -> bool:
    try:
        check_size(tree, point)
    except (TooLargeError, OverflowError):
        return False
    return True


def check_size(tree: "sympy.Basic", point: Point) -> float:
    """Bits of the value of a tree at a point, roughly. TooLargeError if it, or a part of it, has too many."""
    if getattr(tree, "is_Integer", False):
        return int(tree).bit_length()
    parts = tree.flat() if hasattr(tree, "flat") else getattr(tree, "args", ())
    size = sum(check_size(part, point) for part in parts) or 40.0  # of a variable
    if type(tree).__name__ in ("Pow", "MatPow", "exp", "factorial", "binomial", "gamma"):
        power = tree.args[-1].evalf(5, subs=point)
        size = min(size, MAX_BITS) * max(1.0, abs(complex(power)))
    if not size <= MAX_BITS:
        raise TooLargeError(f"a value of {size:.0f} bits")
    return size
