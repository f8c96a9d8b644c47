r"""Pairs of answers, their verdicts known from how they are made, of the kinds in which a fourth red team found faults:
powers of I, bars and even roots, names in any order, equations in general form, and usual ways to write. A kind is a
function of a random generator that yields (kind, gold, answer, whether they are equal)."""

import random
from collections.abc import Iterator
from fractions import Fraction

Pair = tuple[str, str, str, bool]

FONTS = [r"\bm{{{}}}", r"\texttt{{{}}}", r"{{\bf {}}}", r"\mathbf{{{}}}", r"{{\rm {}}}", r"\boldsymbol{{{}}}"]
VULGAR = {"¼": "1/4", "½": "1/2", "¾": "3/4", "⅓": "1/3", "⅔": "2/3", "⅕": "1/5", "⅗": "3/5", "⅚": "5/6", "⅞": "7/8"}
POINTS = r"P({}) Q({}) A({}) M\left({}\right) P_1({}) B'({})".split()
ROWS = [
    r"\begin{{pmatrix}}{}\\{}\end{{pmatrix}}",
    r"\begin{{bmatrix}}{}\\[4pt]{}\end{{bmatrix}}",
    r"\begin{{pmatrix}}{}\cr {}\end{{pmatrix}}",
    r"\left(\begin{{array}}{{c c}}{}\\{}\end{{array}}\right)",
    r"\left[\begin{{array}}{{rr}}{}\\ {}\\ \end{{array}}\right]",
    r"\left(\begin{{smallmatrix}}{}\\{}\end{{smallmatrix}}\right)",
    r"\left[\begin{{matrix}}{}\\[2mm] {}\end{{matrix}}\right]",
    r"\pmatrix{{{}\cr{}}}",
]
SYSTEMS = [
    r"\begin{{cases}}{}\\{}\end{{cases}}",
    r"\left\{{\begin{{array}}{{l}}{}\\{}\end{{array}}\right.",
    r"\begin{{cases}}{},\\{}.\end{{cases}}",
    r"\left\{{\begin{{aligned}}&{}\\&{}\end{{aligned}}\right.",
]
UNIONS = [r"\{{{}\}}\cup\{{{}\}}", r"\lbrace {}\rbrace \cup \lbrace {}\rbrace", "\\{{{}\\}}\u222a\\{{{}\\}}"]
UNITS = ["km h", "m s", "mi h", "kg m^3", "g cm^3", "m s^2", "dollars hour", "pages day"]
UNIT_FORMS = [r"{}\frac{{{}}}{{{}}}", r"{}\,\frac{{{}}}{{{}}}", r"{} \dfrac{{{}}}{{{}}}"]
UNIT_FORMS += [r"{}\frac{{\rm {}}}{{\rm {}}}"]
UNIT_FORMS += [r"{}\mathrm{{\frac{{{}}}{{{}}}}}", r"{}\ \frac{{\text{{{}}}}}{{\text{{{}}}}}"]
CONDITIONS = [
    r"{e} \text{{ for all }} {v} \ge {k}",
    r"{e}, {v} \geq {k}",
    r"{e} \text{{ for all integers }} {v} \ge {k}",
    r"{e} \text{{ where }} {v} > {k}",
    r"{e}\ ({v} \ne {k})",
    r"{e} \text{{ for some constant }} {v}",
    r"{e} \quad \forall {v} ⩾ {k}",
]


def wide(text: str) -> str:
    """The same in wide characters."""
    return "".join(chr(ord(char) + 0xFEE0) if char in "()[],;:%=+0123456789" else char for char in text)


def signed(value, name="") -> str:
    """+3x: a term of a sum."""
    value = Fraction(value)
    size = str(abs(value)) if value.denominator == 1 else rf"\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
    if name and size == "1":
        size = ""
    return f"{'-' if value < 0 else '+'}{size}{name}" if value else ""


def imaginary(rng: random.Random) -> Iterator[Pair]:
    a, b, k = rng.randint(-9, 9), rng.choice([-5, -4, -3, -2, 2, 3, 4, 5]), rng.randint(2, 9)
    real, imaginary = [(a + b, 0), (a, b), (a - b, 0), (a, -b)][k % 4]
    power = rng.choice([f"I^{k}", f"I^{{{k}}}"])
    gold = f"{real}{signed(imaginary, rng.choice('iI'))}"
    yield "I", gold, f"{a}{signed(b, power)}", True
    yield "I", f"{a}{signed(b, 'i')}", f"{a}{signed(b, power)}", k % 4 == 1
    letter = rng.choice("RLZ")
    yield "I", f"{k}I^2{letter}", rng.choice([f"{k}I{letter}", f"{k}I^3{letter}", f"-{k}{letter}"]), False
    yield "I", f"I_{k}", f"I_{k + 1}", False


def bars(rng: random.Random) -> Iterator[Pair]:
    x = rng.choice("xtns")
    a = rng.choice([-1, 1]) * rng.choice([rng.randint(2, 9), rng.randint(10, 99), rng.randint(100, 900)])
    b = a + rng.choice([1, 1, 2, 5, rng.randint(1, 400)])
    c = rng.randint(1, 30)
    polynomial = f"{x}^2{signed(-a - b, x)}{signed(a * b)}"
    one, other = f"{x}{signed(-a)}", f"{x}{signed(-b)}"
    same = [f"|{polynomial}|", f"|{one}||{other}|", rf"\sqrt{{({one})^2({other})^2}}"]
    same += [rf"\left|({other})({one})\right|"]
    same += [rf"\sqrt{{({polynomial})^2}}", rf"\sqrt[4]{{({polynomial})^4}}", f"|{one}|·|{other}|"]
    without = [polynomial, f"({one})({other})", f"-({polynomial})", f"({one})|{other}|", f"|{one}|({other})"]
    yield "bars", rng.choice(same), rng.choice(same), True
    yield "bars", rng.choice(same), rng.choice(without), False
    yield "bars", rng.choice(without), rng.choice(same), False
    yield "bars", f"|{one}|", rng.choice([one, f"-({one})", f"{a}-{x}", f"|{one}|{signed(1)}"]), False
    yield "bars", f"||{x}|-{abs(a)}|", rng.choice([f"|{x}|-{abs(a)}", f"{abs(a)}-|{x}|", f"|{one}|"]), False
    yield "bars", f"||{one}|-{c}|", f"|{one}|-{c}", False
    yield "bars", f"||{one}|-{c}|", rf"\sqrt{{(|{a}-{x}|-{c})^2}}".replace("--", "+"), True
    y = rng.choice("pqy")
    yield "bars", f"|{one}-{y}|", rng.choice([f"{one}-{y}", f"{y}{signed(a)}-{x}"]), False
    yield "bars", f"|{one}-{y}|", f"|{y}{signed(a)}-{x}|", True
    yield "bars", rf"\ln|{one}|", rng.choice([rf"\ln({one})", rf"\ln({a}-{x})"]), False


def names(rng: random.Random) -> Iterator[Pair]:
    letters = rng.choice(["xy", "xyz", "ab", "abc", "pq", "mn", "uv", "rst", "xz"])
    values = rng.sample(range(-20, 60), len(letters))
    turned = [*values[1:], values[0]]
    order = rng.sample(range(len(letters)), len(letters))

    def written(numbers):
        return rng.choice([", ", r" \text{ and } ", r",\ "]).join(f"{letters[i]}={numbers[i]}" for i in order)

    bare = "({})".format(", ".join(map(str, values)))
    yield "names", bare, written(values), True
    yield "names", bare, written(turned), False
    yield "names", written(values), bare, True
    yield "names", written(turned), bare, False
    other = "({})".format(",".join(map(str, turned)))
    name, another = rng.sample(POINTS, 2)
    yield "names", bare, name.format(bare[1:-1]), True
    yield "names", bare, name.format(other[1:-1]), False
    yield "names", name.format(bare[1:-1]), another.format(bare[1:-1]), False
    if len(letters) == 2:
        system = rng.choice(SYSTEMS)
        yield "names", bare, system.format(*(f"{letters[i]}={values[i]}" for i in order)), True
        yield "names", bare, system.format(*(f"{letters[i]}={turned[i]}" for i in order)), False


def equations(rng: random.Random) -> Iterator[Pair]:
    """Circles, spheres and ellipses in general form."""
    letters = rng.choice(["xy", "xyz"])
    center = [Fraction(rng.randint(-12, 12), rng.choice([1, 1, 2])) for _ in letters]
    scale = [rng.choice([1, 1, 2, 4, 9]) for _ in letters] if rng.random() < 0.3 else [1] * len(letters)
    square = rng.randint(1, 90)
    one = "+".join(f"{s if s > 1 else ''}({v}{signed(-c)})^2" for v, c, s in zip(letters, center, scale, strict=True))
    terms = [f"+{s if s > 1 else ''}{v}^2" for v, s in zip(letters, scale, strict=True)]
    terms += [signed(-2 * c * s, v) for v, c, s in zip(letters, center, scale, strict=True) if c]
    rest = sum(c * c * s for c, s in zip(center, scale, strict=True)) - square

    def general(number):
        return "".join(rng.sample([*terms, signed(number)], len(terms) + 1)).removeprefix("+") + "=0"

    pair = [f"{one}={square}", general(rest)]
    yield "equations", *rng.sample(pair, 2), True
    yield "equations", *rng.sample([pair[0], general(rest + rng.choice([-1, 1, Fraction(1, 2)]))], 2), False


def typography(rng: random.Random) -> Iterator[Pair]:
    n, m, d = rng.randint(2, 999), rng.randint(2, 99), rng.randint(2, 30)
    gold, other = f"{n}, -{m}", f"{n}, -{m + 1}"
    form = rng.choice(["({})", "[{})", "{}", r"\{{{}\}}"])
    end = rng.choice(["", "。", ".", "\uff0e"])
    yield "wide", form.format(gold), wide(form.format(gold)).replace(" ", "") + end, True
    yield "wide", form.format(gold), wide(form.format(other)) + end, False
    yield "wide", str(n), wide(str(n)) + end, True
    yield "wide", str(n), wide(str(n + 1)) + end, False
    sign, value = rng.choice([*VULGAR.items()])
    another = rng.choice([text for text in VULGAR if text != sign])
    total = Fraction(value) + m
    gold = rng.choice([str(total), rf"{m}\frac{{{value[0]}}}{{{value[2]}}}"])
    yield "vulgar", gold, rng.choice([f"{m}{sign}", f"{m} {sign}", f"{m}{sign}."]), True
    yield "vulgar", gold, rng.choice([f"{m}{another}", f"{m + 1}{sign}", f"{m}·{sign}", sign]), False
    font = rng.choice(FONTS)
    gold = rng.choice([str(n), f"x+{n}", rf"\frac{{{n}}}{{{d}}}", f"{n}x^{{{d}}}"])
    yield "fonts", gold, font.format(gold), True
    yield "fonts", gold, font.format(gold.replace(str(n), str(n + 1))), False
    yield "fonts", f"{n} cm", rng.choice([r"{}{{\rm cm}}", r"{}\,{{\rm cm}}", r"{}\ {{\rm cm}}"]).format(n), True
    yield "fonts", f"{n} cm", rng.choice([r"{}{{\rm mm}}", r"{}{{\rm cm}}^2"]).format(n), False
    above, below = rng.choice(UNITS).split()
    unit = rng.choice(UNIT_FORMS)
    yield "ratio", f"{n} {above}/{below}", unit.format(n, above, below), True
    wrong = [(n, below, above), (n + 1, above, below), (n, above, "K"), (n, "ft", below)]
    yield "ratio", f"{n} {above}/{below}", unit.format(*rng.choice(wrong)), False
    cells = [[a, rng.randint(-9, 30)] for a in rng.sample(range(-9, 30), 2)]
    one, another = rng.sample(ROWS, 2)
    rows = [f"{a}&{b}" for a, b in cells]
    yield "rows", one.format(*rows), another.format(*rows), True
    yield "rows", one.format(*rows), another.format(*rows[::-1]), False
    numbers = rng.sample(range(-30, 60), rng.randint(2, 5))
    cut = rng.randint(1, len(numbers) - 1)
    mixed = rng.sample(numbers, len(numbers))
    gold = rng.choice(["{}", r"\{{{}\}}"]).format(", ".join(map(str, numbers)))
    halves = [",".join(map(str, mixed[:cut])), ",".join(map(str, mixed[cut:]))]
    yield "union", gold, rng.choice(UNIONS).format(*halves), True
    yield "union", gold, rng.choice(UNIONS).format(halves[0], f"{halves[1]},77"), False


def relations(rng: random.Random) -> Iterator[Pair]:
    x = rng.choice("xtyk")
    low = rng.randint(-30, 30)
    high = low + rng.randint(1, 30)
    left, right = rng.choice("(["), rng.choice(")]")
    less = rng.choice(["<", r"\lt "]), rng.choice([r"\le ", r"\leq ", "⩽", r"\leqslant "])
    more = rng.choice([">", r"\gt "]), rng.choice([r"\ge ", "⩾", r"\geq "])
    below = rng.choice([f"{x}{more[left == '[']}{low}", f"{low}{less[left == '[']}{x}"])
    above = rng.choice([f"{x}{less[right == ']']}{high}", f"{high}{more[right == ']']}{x}"])
    bounds = rng.sample([below, above], 2)
    both = rng.choice([r"{} \text{{ and }} {}", r"{} \land {}", r"\begin{{cases}}{}\\{}\end{{cases}}"]).format(*bounds)
    gold = rng.choice([f"{left}{low}, {high}{right}", rf"{low} {less[left == '[']} {x} {less[right == ']']} {high}"])
    yield "interval", gold, both, True
    changed = rng.choice([f"{left}{low}, {high + 1}{right}", f"{left}{low - 1}, {high}{right}"])
    swapped = f"{'(['[left == '(']}{low}, {high}{right}"
    yield "interval", rng.choice([changed, swapped]), both, False
    yield "interval", gold, r"{} \text{{ or }} {}".format(*bounds), False
    outside = f"{x}{less[0]}{low}", f"{x}{more[0]}{high}"
    gold = rf"(-\infty, {low}) \cup ({high}, \infty)"
    yield "interval", gold, r"{} \text{{ or }} {}".format(*outside), True
    yield "interval", gold, r"{} \text{{ and }} {}".format(*outside), False
    a, b, k = rng.randint(2, 9), rng.randint(1, 30), rng.randint(0, 30)
    line, off = f"{a}x{signed(b)}", f"{a}x{signed(b + 1)}"
    f = rng.choice("fgh")
    pair = f"y={line}", rng.choice([f"{f}(x)={line}", f"{f}(x) = {b}+{a}x"])
    yield "graph", *rng.sample(pair, 2), True
    yield "graph", pair[0], rng.choice([f"{f}(x)={off}", f"{f}(t)={line.replace('x', 't')}", f"{f}'(x)={line}"]), False
    v = rng.choice("nkmc")
    formula, near = f"{a}{v}{signed(b)}", f"{a}{v}{signed(b + 1)}"
    form = rng.choice(CONDITIONS)
    yield "condition", formula, form.format(e=formula, v=v, k=k), True
    yield "condition", formula, form.format(e=near, v=v, k=k), False
    yield "condition", rf"{formula}, {v} \ge {k}", rf"{formula} \text{{ for all }} {v} \ge {k + 1}", False


KINDS = (imaginary, bars, names, equations, typography, relations)
