"""Where two formulas differ though they agree at a few points: `differing_points`.

A formula with bars, roots, logarithms and the like may be one function here and another there: |x-200| is 200-x below
200. It changes only where what is inside such a part is 0. So floats are compared on both sides of each zero that is
that of a polynomial, and from -10^6 to 10^6 for all other parts. A value is real if each part of it is.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sympy

MAX_DEGREE = 24  # of a polynomial whose zeros are computed
MAX_INNER_BARS = 3  # inside others
BENT = ("Abs", "log", "Max", "Min", "sign", "floor", "ceiling", "asin", "acos", "atan")
TOLERANCE = 1e-6  # relative
SIZES = [0.37 * step for step in range(1, 81)]
SIZES += [30 * 1.1**step for step in range(110)]
DISTANCES = (1e-3, 0.01, 0.1, 0.4, 1.2, 4.0, 15.0)  # from a zero
OPERATIONS = {"Add": math.fsum, "Mul": math.prod}  # of all parts at once
FUNCTIONS: dict[str, Callable[..., float]] = {
    "Pow": math.pow,
    "Abs": abs,
    "Max": max,
    "Min": min,
    "sign": lambda value: math.copysign(1.0, value) if value else 0.0,
    "ceiling": math.ceil,
}
ANALYTIC = ("exp", "log", "sin", "cos", "tan", "asin", "acos", "atan", "floor")
FUNCTIONS |= {name: getattr(math, name) for name in ANALYTIC}

Function = Callable[[Sequence[float]], float]


class NoPolynomialError(Exception):
    """Or one whose degree is too high."""


def differing_points(one: "sympy.Expr", other: "sympy.Expr", seed: str, forgives_signs: bool) -> Iterator[dict]:
    """Rational points where the sides, as floats, differ, or one is real and one is not; none if they have no bends.

    A variable is positive if a side is real for no negative value of it: sqrt(xy) is sqrt(x) sqrt(y). With
    `forgives_signs` points with a negative value do not count where a side is not real."""
    import sympy

    inner = insides(one) | insides(other)
    if not inner:
        return
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    rng = random.Random(seed)
    try:
        sides = [compiled(side, symbols) for side in (one, other)]
    except (KeyError, TypeError, ValueError, ArithmeticError):  # functions without floats, complex numbers
        return
    signs = []
    for place in range(len(symbols)):
        signs.append(signs_of(place, len(symbols), sides, rng))
    for values in samples(sorted(inner, key=str), symbols, signs, rng):
        try:
            left, right = (real_value(side, values) for side in sides)
        except ArithmeticError:  # division by 0, or too large
            continue
        if left is None or right is None:
            is_equal = left is right or (forgives_signs and min(values) < 0)
        else:
            is_equal = abs(left - right) <= TOLERANCE * max(abs(left), abs(right))
        if not is_equal:
            yield dict(zip(symbols, map(sympy.Rational, values), strict=True))


def insides(tree: "sympy.Expr") -> set:
    """What stands in its bent parts: where none of these is 0, the formula is analytic."""
    import sympy

    found = set()
    for part in sympy.preorder_traversal(tree):
        if part.is_Pow and not part.exp.is_Integer and not part.exp.free_symbols:
            found.add(part.base)
        elif type(part).__name__ in ("Max", "Min"):
            found.update(a - b for a, b in itertools.combinations(part.args, 2))
        elif type(part).__name__ in BENT:
            found.update(part.args)
    return {part for part in found if part.free_symbols}


def compiled(tree: "sympy.Expr", symbols: Sequence) -> Function:
    """The formula as a function of floats, which raises ValueError or an ArithmeticError where a part is not real.
    KeyError or TypeError if it has no such function."""
    if not tree.free_symbols:
        constant = float(tree.evalf(15, maxn=100))
        return lambda values: constant
    if tree.is_Symbol:
        place = symbols.index(tree)
        return lambda values: values[place]
    parts = [compiled(part, symbols) for part in tree.args]
    name = type(tree).__name__
    if name in OPERATIONS:
        combine = OPERATIONS[name]
        return lambda values: combine([part(values) for part in parts])
    function = FUNCTIONS[name]
    return lambda values: function(*[part(values) for part in parts])


def real_value(side: Function, values: Sequence[float]) -> float | None:
    try:
        return side(values)
    except ValueError:
        return None


def signs_of(place: int, num_variables: int, sides: Sequence[Function], rng: random.Random) -> tuple[int, ...]:
    """The signs that a variable may have while the others are positive."""
    for exponent in range(-3, 5):
        values = [rng.uniform(0.1, 9) for _ in range(num_variables)]
        values[place] = -rng.uniform(1, 9) * 10.0**exponent
        with suppress(ArithmeticError):
            if None not in [real_value(side, values) for side in sides]:
                return (1, -1)
    return (1,)


def samples(inner: Sequence, symbols: Sequence, signs: Sequence[tuple], rng: random.Random) -> Iterator[list[float]]:
    """Values of the variables: along each axis in turn through random places, and, of several variables, at random."""
    is_single = len(symbols) == 1
    num_places, num_random = (1, 0) if is_single else (3, 60)
    for _ in range(num_places):
        base = [rng.choice(sign) * round(rng.uniform(0.1, 9), 2) for sign in signs]
        value_of = dict(zip(symbols, base, strict=True))
        for place, symbol in enumerate(symbols):
            for value in along(inner, symbol, value_of, is_single, rng):
                if value > 0 or -1 in signs[place]:
                    yield [*base[:place], value, *base[place + 1 :]]
    for _ in range(num_random):
        yield [rng.choice(sign) * 10 ** rng.uniform(-2, 3) for sign in signs]


def along(inner: Sequence, symbol: "sympy.Symbol", base: dict, is_single: bool, rng: random.Random) -> list[float]:
    """Values of one variable: between its zeros, at several distances from each, and of all sizes."""
    import sympy

    fixed = {other: sympy.Rational(str(value)) for other, value in base.items() if other != symbol}
    found: set[float] = set()
    for part in inner:
        found.update(zeros(part.xreplace(fixed), symbol))
    bends = sorted(found)
    values = [(low + high) / 2 for low, high in itertools.pairwise(bends)]
    for distance in DISTANCES:
        for bend, sign in itertools.product(bends, (1, -1)):
            values.append(bend + sign * distance * rng.uniform(0.7, 1.3))
    sizes = SIZES if is_single else SIZES[::4]
    for size, sign in itertools.product(sizes, (1, -1)):
        values.append(sign * size * rng.uniform(0.995, 1.005))
    return values


def zeros(part: "sympy.Expr", symbol: "sympy.Symbol") -> list[float]:
    """The real zeros and poles of a part, if it is a polynomial or a fraction of some, with bars or without."""
    import sympy
    from mpmath.libmp import NoConvergence

    found = []
    try:
        for form in without_bars(part):
            if degree(form, symbol) == 0:
                continue
            for polynomial in sympy.fraction(sympy.together(form)):
                if polynomial.free_symbols:
                    polynomial = sympy.Poly(polynomial, symbol)
                    if polynomial.domain.is_QQ or polynomial.domain.is_ZZ:  # each zero once
                        polynomial = polynomial.sqf_part()
                    roots = map(complex, polynomial.nroots(maxsteps=100))
                    found += [root.real for root in roots if abs(root.imag) <= 1e-6 * abs(root)]
    except (NoPolynomialError, NoConvergence, sympy.PolynomialError, TypeError, ValueError):
        pass
    return found


def without_bars(part: "sympy.Expr") -> list["sympy.Expr"]:
    """Both signs of each absolute value that it holds."""
    import sympy

    forms = [part]
    for _ in range(MAX_INNER_BARS):
        bars = sorted(forms[0].atoms(sympy.Abs), key=str)  # Abs(Abs(x) - 1) before Abs(x)
        if not bars:
            break
        bar = bars[0]
        (inside,) = bar.args
        forms = [form.xreplace({bar: sign * inside}) for form in forms for sign in (1, -1)]
    return forms


def degree(part: "sympy.Expr", symbol: "sympy.Symbol") -> int:
    """At least the degree of a polynomial or a fraction of some."""
    if symbol not in part.free_symbols:
        return 0
    if part.is_Symbol:
        return 1
    if part.is_Add or part.is_Mul:
        found = sum(degree(inner, symbol) for inner in part.args)
    elif part.is_Pow and part.exp.is_Integer:
        found = degree(part.base, symbol) * abs(int(part.exp))
    else:
        raise NoPolynomialError
    if found > MAX_DEGREE:
        raise NoPolynomialError
    return found
