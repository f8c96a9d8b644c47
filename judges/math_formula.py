"""Compares two formulas by sympy: `same_formula`.

A formula is read by latex2sympy, with decimals as exact fractions, and the two are compared at points: rational values
of the variables, drawn from a digest of both texts, so that nobody can write a formula that vanishes there, and no
verdict depends on what was graded before. Values of rational functions are exact; others have up to 1,000 digits. Where
a formula is too large at a point, the point says nothing. Formulas with bars or roots are also compared on all sides of
their bends (math_bends.py). math-verify compares sets and other objects without a value.
"""

import hashlib
import itertools
import logging
import math
import random
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from .math_bends import differing_points
from .math_text import GROUPED, depth_of, split, squeeze

if TYPE_CHECKING:
    import sympy

MAX_CHARS = 500  # the parser takes 2 ms a character
MAX_DEPTH = 12  # of brackets in brackets; the parser takes exponential time
MAX_CELLS = 40  # of matrices
MAX_BARS = 25  # of absolute values
MAX_BITS = 2**20  # of a value
MAX_EXACT_BITS = 2**14  # of a value that is computed exactly: a longer one takes too long to reduce
MAX_DIGITS = 1000
MIN_PRECISION = 20  # bits: a value with fewer is below the last of its MAX_DIGITS
MAX_CONFIRMED = 8  # of the points where floats differ
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
    if "I" in gold + answer:
        gold, answer = without_capital_i(gold, answer)
    runs = {run for run in WORD.findall(f"{gold} {answer}") if not NO_WORD.fullmatch(run)}
    words = sorted(runs - {"degrees"})
    try:
        one = parse(gold, words)
        other = parse(answer, words)
        return one == other or same_objects(one, other, gold, answer)
    except Exception:  # of the parser or sympy, which are not ours: any text at all comes here
        return False


def without_capital_i(*texts: str) -> list[str]:
    """The texts with i for I, the imaginary unit, whose powers and indices the parser drops. With an index, or beside
    another capital as in I^2R, it is a variable: \\iota, which no answer has."""
    is_variable = any(re.search("[A-HJ-Z]", re.sub(r"\\[a-zA-Z]+", " ", text)) for text in texts)
    unit = r"\iota " if is_variable else " i "
    found = []
    for text in texts:
        text = re.sub(r"(\\[a-zA-Z]+)|I(?=\s*_)", lambda match: match[1] or r"\iota", text)
        found.append(re.sub(r"(\\[a-zA-Z]+)|I", lambda match: match[1] or unit, text))
    return found


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
    text = re.sub(r"\\gamma(?![a-zA-Z])", r"\\vartheta", text)  # is read as a function, and as Euler's constant
    text = re.sub(r"\\Gamma(?![a-zA-Z]|\s*\()", r"\\varsigma", text)
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
        return one.shape == other.shape and all(map(same_values, one.flat(), other.flat(), [at] * len(one)))
    sides = []
    for tree in (one, other):
        sides += tree.args if tree.is_Relational else [tree]
    if not all(isinstance(side, sympy.Expr) for side in sides):
        return same_sets(one, other)
    if one.is_Relational or other.is_Relational:
        return same_relations(one, other, at)
    return same_values(one, other, at, forgives_signs="|" not in gold + answer)


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
    import sympy

    if one.func != other.func:
        other = other.reversed
    if one.func != other.func:
        return False
    left = one.lhs - one.rhs
    right = other.lhs - other.rhs
    if same_values(right, sympy.Integer(0), at):  # x = x says nothing
        return False
    ratio = right / left
    if one.rel_op not in ("==", "!=") and value_at(ratio, at[0]) < 0:
        return False
    return same_values(right, ratio.subs(at[0]) * left, at)


def same_values(one: "sympy.Expr", other: "sympy.Expr", at: Sequence[Point], *, forgives_signs: bool = False) -> bool:
    """Whether two expressions are equal at the points where they are defined, exactly or to 1,000 digits, and nowhere
    else differ as real numbers. With `forgives_signs` variables are positive if a side has no real value where they are
    not: ln x^2 is 2 ln x, and |x| is not x."""
    import sympy

    difference = one - other
    if difference.has(sympy.factorial, sympy.binomial, sympy.gamma):
        difference = sympy.gammasimp(difference)
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
        if is_positive or not forgives_signs or difference.has(sympy.I):
            return False
        if all(is_null(value_at(side, point).as_real_imag()[1]) for side in (one, other)):
            return False
    if num_zero == 0 or 2 * num_defined <= len(at):
        return False
    suspects = itertools.islice(differing_points(one, other, str(at[0]), forgives_signs), MAX_CONFIRMED)
    values = [value_at(difference, point) for point in suspects]
    return all(is_null(value) for value in values if value.is_number and value.is_finite)


def value_at(tree: "sympy.Basic", point: Point) -> "sympy.Basic":
    """The value at a point: exact for a rational function, else to 15 digits; `zoo` where it divides by 0."""
    import sympy

    try:
        value = exact_value(tree, point)
    except ZeroDivisionError:
        return sympy.zoo
    if value is None:
        return tree.doit().evalf(15, subs=point, maxn=MAX_DIGITS)
    return sympy.Rational(value.numerator, value.denominator)


def exact_value(tree: "sympy.Basic", point: Point) -> Fraction | None:
    """None if it is no rational function, or its value is too long."""
    if tree.is_Symbol:
        tree = point[tree]
    if tree.is_Rational:
        return Fraction(tree.p, tree.q)
    if tree.is_Pow:
        base = exact_value(tree.base, point)
        if base is None or not tree.exp.is_Integer:
            return None
        num_bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        return base ** int(tree.exp) if num_bits * abs(tree.exp) <= MAX_EXACT_BITS else None
    if not (tree.is_Add or tree.is_Mul):
        return None
    parts = [exact_value(part, point) for part in tree.args]
    if None in parts:
        return None
    return sum(parts) if tree.is_Add else math.prod(parts)


def is_null(value: "sympy.Expr") -> bool:
    """Whether a number is 0, or below the last of its digits."""
    return all(part == 0 or (part.is_Float and part._prec < MIN_PRECISION) for part in value.as_real_imag())


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
