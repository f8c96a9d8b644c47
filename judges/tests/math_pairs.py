"""Pairs of answers whose verdict is known from how they are made: (kind, gold, answer, whether they are equal).

Values are exact rationals, integers under roots, or drawn from tables of units and words; the verdict never comes from
the grader, nor from sympy. A wrong answer is always near the right one: another digit, sign, bracket, unit or order.
"""

import random
from collections.abc import Iterator
from decimal import Decimal, localcontext
from fractions import Fraction

WORDS = """listen silent enlist|even neve|left felt|cat act|tea eat ate|stop pots spot tops|night thing|Alice Celia
no on|angel glean angle|below elbow|study dusty|triangle integral|state taste|heart earth|odd dod|north thorn
Monday dynamo|three there ether|evil vile live|real earl|true rute|none neon|circle cleric|square suqare"""
UNITS = "m km cm mm|seconds minutes hours days|dollars cents|inches feet|grams kg|years months|pounds ounces"
NOUNS = ["apples", "balls", "students", "marbles", "people", "tickets", "pages", "red balls", "children", "ways"]
DIGITS = "0123456789ABCDEF"


def decimal(value: Fraction, digits: int) -> str:
    """To so many significant digits, half up."""
    with localcontext() as context:
        context.prec = 60
        exact = Decimal(abs(value.numerator)) / Decimal(value.denominator)
        places = digits - 1 - exact.adjusted()
        rounded = exact.quantize(Decimal(1).scaleb(-max(places, 0)))
    return ("-" if value < 0 else "") + f"{rounded:f}"


def terminating(value: Fraction) -> str | None:
    """The exact decimal, if there is one of at most 12 places."""
    places = next((k for k in range(13) if value * 10**k % 1 == 0), None)
    if places is None:
        return None
    digits = str(abs(int(value * 10**places))).rjust(places + 1, "0")
    text = f"{digits[:-places]}.{digits[-places:]}" if places else digits
    return ("-" if value < 0 else "") + text


def written(rng: random.Random, value: Fraction) -> str:
    """One of the ways to write a rational, at random."""
    sign = "-" if value < 0 else ""
    n, d = abs(value.numerator), value.denominator
    k = rng.randint(2, 5)
    forms = [
        f"{sign}{n}/{d}",
        rf"{sign}\frac{{{n}}}{{{d}}}",
        rf"\dfrac{{{sign}{n}}}{{{d}}}",
        f"${sign}{n * k}/{d * k}$",
    ]
    if d == 1:
        forms = [f"{sign}{n}", f"{sign}{n}.0", f"{sign}{n:,}", rf"\text{{{sign}{n}}}", f"{sign}{n}."]
    elif n > d:
        forms += [f"{sign}{n // d} {n % d}/{d}", rf"{sign}{n // d}\frac{{{n % d}}}{{{d}}}"]
    exact = terminating(value)
    if exact:
        forms += [exact, exact]
    if value and exact and len(exact) < 12:
        power = rng.choice([-4, -2, 2, 5])
        mantissa = terminating(value / Fraction(10) ** power)
        forms += [f"{mantissa}e{power}", rf"{mantissa} \times 10^{{{power}}}"] if mantissa else []
    return rng.choice(forms)


def element(rng: random.Random, value: Fraction) -> str:
    """The same, where a comma would be a separator."""
    return written(rng, value).strip("$.").replace(",", "")


def rational(rng: random.Random) -> Fraction:
    size = rng.choice([9, 30, 1000, 10**6])
    return Fraction(rng.choice([-1, 1, 1]) * rng.randint(1, size), rng.choice([1, 1, rng.randint(2, 60)]))


def near(rng: random.Random, value: Fraction) -> Fraction:
    """Another value, by a common mistake."""
    n, d = value.numerator, value.denominator
    others = [-value, value + 1, Fraction(n + 1, d), Fraction(n, d + 1), value * 10, 1 / value, value / 7]
    return rng.choice([other for other in others if other != value and value not in (100 * other, other / 100)])


def rationals(rng):
    value = rational(rng)
    right = rng.random() < 0.5
    other = value if right else near(rng, value)
    yield "rational", written(rng, value), written(rng, other), right


def decimals(rng):
    """A decimal that is rounded is not the fraction."""
    value = Fraction(rng.choice([-1, 1]) * rng.randint(1, 10 ** rng.randint(1, 8)), rng.choice([3, 7, 11, 13, 17, 101]))
    value = value / 9 if terminating(value) else value
    text = decimal(value, rng.randint(7, 14))
    pair = [rf"\frac{{{value.numerator}}}{{{value.denominator}}}", text]
    yield "decimal", *rng.sample(pair, 2), Fraction(text) == value


def surds(rng):
    root = rng.choice([2, 3, 5, 6, 7, 10, 11, 13])
    a, b, c, k = rng.randint(-9, 9), rng.randint(1, 9), rng.randint(1, 9), rng.randint(2, 6)
    whole = f"{a}" if a else ""
    plus = "+" if a else ""
    gold = rf"{whole}{plus}{b if b > 1 else ''}\sqrt{{{root}}}"
    forms = [
        rf"{whole}{plus}\sqrt{{{b * b * root}}}",
        rf"{b if b > 1 else ''}\sqrt{{{root}}}{f'+{a}' if a > 0 else a or ''}",
        rf"{whole}{plus}\frac{{{b * root}}}{{\sqrt{{{root}}}}}",
        rf"\frac{{{a * k}+{b * k}\sqrt{{{root}}}}}{{{k}}}",
        rf"{whole}{plus}{b} \sqrt{root if root < 10 else f'{{{root}}}'}",
    ]
    yield "surd", gold, rng.choice(forms), True
    wrong = [
        rf"{whole}{plus}{b + 1}\sqrt{{{root}}}",
        rf"{whole}-{b}\sqrt{{{root}}}",
        rf"{whole}{plus}{b}\sqrt{{{root + 1}}}",
        rf"{whole}{plus}{b}\cdot {root}",
        rf"\frac{{{a}+{b}\sqrt{{{root}}}}}{{{k}}}",
    ]
    yield "surd", gold, rng.choice(wrong), False
    tiny = rng.randint(16, 40)
    yield "surd", rf"\frac{{\sqrt{{{root}}}}}{{10^{{{tiny}}}}}", rng.choice(["0", "0." + "0" * 9]), False
    yield "surd", rf"{c}\sqrt{{{root}}}", rf"{c}\sqrt{{{root}}}+10^{{-{tiny}}}", False


def intervals(rng):
    low, high = sorted({rational(rng) for _ in range(8)})[:2]
    left, right = rng.choice("(["), rng.choice(")]")
    gold = f"{left}{element(rng, low)}, {element(rng, high)}{right}"
    other = f"{left}{element(rng, low)},{element(rng, high)}{right}"
    below, above = ("<" if left == "(" else r"\le ", "<" if right == ")" else r" \leq ")
    chain = f"{low.numerator}/{low.denominator} {below} x {above} {high.numerator}/{high.denominator}"
    yield "interval", gold, rng.choice([other, rf"x \in {other}", rf"\left{other[:-1]}\right{right}"]), True
    if rng.random() < 0.2:
        yield "interval", *rng.choice([(gold, chain), (chain, gold)]), True
        half, ray = rng.choice(
            [("x < {}", r"(-\infty, {})"), (r"x \ge {}", r"[{}, \infty)"), ("{} < x", r"({}, \infty)")]
        )
        pair = (half.format(low.numerator), ray.format(low.numerator))
        yield "interval", *rng.choice([pair, pair[::-1]]), True
        yield "interval", pair[1], half.format(low.numerator + 1), False
    swapped = {"(": "[", "[": "(", ")": "]", "]": ")"}
    wrong = [
        swapped[left] + other[1:],
        other[:-1] + swapped[right],
        f"{left}{high.numerator}/{high.denominator}, {low.numerator}/{low.denominator}{right}",
        f"{left}{element(rng, near(rng, low))}, {high.numerator}/{high.denominator}{right}",
        f"{left}{low.numerator}/{low.denominator}, {element(rng, near(rng, high))}{right}",
        f"{high.numerator}/{high.denominator}",
        rf"{other} \cup [{abs(high.numerator) + 5}, {abs(high.numerator) + 6}]",
    ]
    yield "interval", gold, rng.choice(wrong), False


def lists(rng):
    values = [Fraction(v) for v in rng.sample(range(-40, 90), rng.randint(2, 5))]
    values[0] = values[0] + Fraction(1, rng.choice([2, 3, 4, 7]))
    mixed = rng.sample(values, len(values))
    one, other = ([element(rng, value) for value in values_of_side] for values_of_side in (values, mixed))
    same = [element(rng, value) for value in values]
    braces = r"\{{{}\}}".format
    yield "set", braces(", ".join(one)), rng.choice([braces(",".join(other)), ", ".join(other)]), True
    lists = [", ".join(other), " and ".join(other), ", ".join(other[:-1]) + " and " + other[-1]]
    yield "list", ", ".join(one), rng.choice(lists), True
    yield "tuple", f"({', '.join(one)})", f"({','.join(same)})", True
    if mixed != values:
        yield "tuple", f"({', '.join(one)})", f"({', '.join(other)})", False
    changed = [*same[:-1], element(rng, near(rng, values[-1] or Fraction(1)))]
    wrongs = [same[:-1], [*same, same[0]], [*same, "91"], changed]
    wrong = rng.choice(wrongs)
    yield "list", ", ".join(one), ", ".join(wrong), False
    if wrong is not wrongs[1]:
        yield "set", braces(", ".join(one)), braces(", ".join(wrong)), False
    yield "tuple", f"({', '.join(one)})", f"({', '.join(wrong)})", False


def in_base(value: int, base: int) -> str:
    text = ""
    while value:
        value, digit = divmod(value, base)
        text = DIGITS[digit] + text
    return text or "0"


def bases(rng):
    base, value = rng.randint(2, 9), rng.randint(2, 5000)
    digits = in_base(value, base)
    right = [f"{digits}_{{{base}}}", f"{digits}_{base}", digits, rf"{digits}_{{\text{{{base}}}}}"]
    right += [f"${digits}_{base}$", f"({digits})_{base}"]
    gold = rng.choice([right[0], right[1]])
    yield "base", gold, rng.choice(right), True
    other_base = rng.choice([b for b in range(2, 11) if b != base])
    wrong = [
        f"{digits}_{{{other_base}}}",
        f"{digits}_{other_base}",
        f"{in_base(value + 1, base)}_{base}",
        in_base(value + base, base),
        f"{digits}{base}_{base}",  # a digit that the base has not
        f"{digits[::-1]}_{base}" if digits != digits[::-1] else f"{digits}1_{base}",
    ]
    yield "base", gold, rng.choice(wrong), False
    yield "base", digits, f"{digits}_{base}", False


def words(rng):
    group = rng.choice([line.split() for line in WORDS.replace("\n", "|").split("|")])
    one, other = rng.sample(group, 2)
    dress = [str, str.upper, str.capitalize]
    dress += [form.format for form in (r"\text{{{}}}", r"\mathrm{{{}}}", r"\textbf{{{}}}", "{}.", "${}$")]
    yield "word", rng.choice(dress[3:] + dress[:1])(one), rng.choice(dress)(one), True
    yield "word", rng.choice(dress[3:] + dress[:1])(one), rng.choice(dress)(other), False
    number = rng.randint(2, 99)
    yield "word", f"{number} {one}", rng.choice([f"{number} {other}", f"{number + 1} {one}"]), False
    a, b = rng.sample(["no solution", "red", "Tuesday", "impossible", "isosceles", "even", "increasing"], 2)
    yield "word", a, rng.choice([b, f"not {a}", f"{a} or {b}", f"{a}, {b}", "x", "5"]), False


def units(rng):
    row = rng.choice([units.split() for units in UNITS.split("|")])
    one, other = rng.sample(row, 2)
    value = Fraction(rng.randint(2, 900))
    spaced = rng.choice(["{} {}", r"{} \text{{ {}}}", r"{}\ \mathrm{{{}}}", "{}  {}"]).format
    gold = spaced(value, one)
    yield "unit", *rng.choice([(gold, f"{value}"), (f"{value}", gold), (gold, f"{value}.0 {one}")]), True
    power = rng.choice(["^2", "^3"])
    wrong = [f"{value} {other}", f"{value} {one} per {other}", f"{value + 1} {one}", f"{value} {rng.choice(NOUNS)}"]
    wrong.append(f"{value * 10} {other}")
    yield "unit", gold, rng.choice(wrong), False
    if row[0] == "m":
        wrong = [rf"{value}\text{{ {one}}}{power}", f"{value} {one}{power}", f"{value} square {one}"]
        yield "unit", gold, rng.choice(wrong), False
    noun = rng.choice(NOUNS)
    yield "unit", f"{value}", f"{value} {noun}", True
    yield "unit", f"{value} {noun}", f"{value} {rng.choice([n for n in NOUNS if n != noun])}", False
    money = rng.choice([rf"\${value}", f"${value}", f"{value} USD", f"{value} dollars", f"{value}$"])
    yield "unit", money, rng.choice([rf"\${value}.00", f"{value}", f"{value} dollars"]), True
    wrong = [f"{value} cents", f"{value} euros", f"€{value}", f"{value}€", f"£{value}", f"{value + 1}"]
    yield "unit", money, rng.choice(wrong), False


def names(rng):
    letters = rng.choice(
        [("x", "y"), ("a", "b", "c"), ("x_1", "x_2"), (r"\alpha", r"\beta"), ("length", "width"), ("AB", "CD")]
    )
    values = rng.sample(range(-20, 60), len(letters))
    pairs = list(zip(letters, values, strict=True))
    mixed = rng.sample(pairs, len(pairs))

    def write(named_values):
        return rng.choice([", ", ",", " and "]).join(f"{n}{rng.choice(['=', ' = '])}{v}" for n, v in named_values)

    bare = ", ".join(map(str, values))
    gold = write(pairs)
    yield "name", gold, rng.choice([write(mixed), write(pairs), bare]), True
    yield "name", bare, write(pairs), True
    turned = [*values[1:], values[0]]
    swapped = write(list(zip(letters, turned, strict=True)))
    wrong = [swapped, ", ".join(map(str, turned)), write(pairs[:1]), f"{letters[0]}={values[1]}"]
    yield "name", gold, rng.choice(wrong), False
    yield "name", bare, swapped, False
    wrong = [f"{letters[1]}={values[0]}", f"{letters[0]}={values[1]}"]
    yield "name", f"{letters[0]}={values[0]}", rng.choice(wrong), False


def dates(rng):
    year, month, day = rng.randint(1900, 2030), rng.randint(1, 12), rng.randint(1, 28)
    hour, minute = rng.randint(1, 12), rng.randint(10, 59)
    iso, slashed, clock = f"{year}-{month:02}-{day:02}", f"{month}/{day}/{year}", f"{hour}:{minute}"
    yield "date", iso, rng.choice([rf"\text{{{iso}}}", f"{iso}."]), True
    yield "date", iso, rng.choice([str(year - month - day), f"{year}-{month:02}-{day + 1:02}", str(year)]), False
    yield "date", slashed, rng.choice([f"{month}/{day * year}", f"{month}/{day}/{year + 1}"]), False
    yield "date", clock, rng.choice([f"{hour}/{minute}", f"{Fraction(hour, minute)}", f"{hour}.{minute}"]), False
    yield "date", f"{clock} am", f"{clock} pm", False


def polynomials(rng):
    a, b, c, d = (rng.choice([v for v in range(-9, 10) if v]) for _ in range(4))
    x = rng.choice("xnty")
    term = lambda k, power: f"{k:+}{power}" if k else ""  # noqa: E731
    product = f"({a}{x}{b:+})({c}{x}{d:+})"
    expanded = f"{a * c}{x}^2{term(a * d + b * c, x)}{b * d:+}"
    forms = [product, f"{b * d}{term(a * d + b * c, x)}{a * c:+}{x}^{{2}}"]
    forms.append(rf"{a * c}{x}\cdot {x}{term(a * d + b * c, x)}{b * d:+}")
    yield "polynomial", expanded, rng.choice(forms), True
    wrong = [
        f"{a * c}{x}^2{term(a * d + b * c + 1, x)}{b * d:+}",
        f"{product}+10^{{-20}}",
        product.replace(x, "z"),
        f"{a * c}{x}^2",
        f"({product})^2",
        f"{a * c}{x}^3{term(a * d + b * c, x)}{b * d:+}",
    ]
    yield "polynomial", expanded, rng.choice(wrong), False
    yield "polynomial", f"{x}={abs(a)}{rng.choice('pq')}+{abs(b)}", f"{abs(a)}p+{abs(b) + 1}", False


def forms(rng):
    value = rng.randint(1000, 9_999_999)
    small = rng.randint(2, 99)
    groups = f"{value:,}"
    sign = rng.choice(["\u2013", "\u2212", "\u2010", "- "])
    right = [
        (f"{value}", groups.replace(",", rng.choice([" ", "\u2009", "\u202f", r"\,", "{,}", "\xa0"]))),
        (f"-{small}", f"{sign}{small}"),
        (f"{small}", rng.choice(["{}€", "{} EUR", "€{}", "{} USD", "{}$", "£{}", "USD {}"]).format(small)),
        (f"{value}", f"{value / 1000}e3" if value % 1000 else f"{value // 1000}e3"),
        ("i^2", "-1"),
        (f"{small}\\pi", f"{small}π"),
        (rf"\frac{{{small}}}{{{small + 1}}}", f"{small}÷{small + 1}"),
    ]
    yield "form", *rng.choice(right), True
    letter, other = rng.sample("ABCDE", 2)
    marked = rng.choice(["{})", "({})", "{}.", r"\text{{({})}}", r"\textbf{{({})}}"])
    yield "form", letter, marked.format(letter), True
    both = [f"{letter}) 5 or {other}) 6", f"{letter} and {other}", f"{letter}, {other}", f"{letter}) or {other})"]
    yield "form", letter, rng.choice([marked.format(other), *both]), False
    wrong = [
        (f"{small}", f"{small} million"),
        (f"{value}", groups.replace(",", ", ")),
        (groups.replace(",", ", "), f"{value}"),
        (f"{value}", f"{value}e1"),
        ("x", "X"),
        (rf"\log_2 {small}", rf"\log_3 {small}"),
        (f"{small}x", f"{small}"),
        (f"{small}", f"{small} squared"),
        (f"x_{small}", f"x_{small + 1}"),
    ]
    yield "form", *rng.choice(wrong), False


def hedges(rng):
    value = rng.randint(2, 500)
    other = value + rng.choice([-1, 1, 7])
    gold = rng.choice([f"{value}", f"x = {value}", rf"\frac{{{value}}}{{7}}", rf"{value}\sqrt{{2}}"])
    a, b = gold, gold.replace(str(value), str(other))
    texts = ["{} or {}", "{}, {}", r"{} \text{{ or }} {}", r"\{{{}, {}\}}", "({}, {})", "[{}, {}]", r"{} \pm {}"]
    texts += ["{} and {}", "{}; {}", r"{} \lor {}", "either {} or {}", r"{} \to {}", "{} / {}", "not {} but {}"]
    text = rng.choice(texts)
    pair = rng.choice([(a, b), (b, a)])
    if text == "{} / {}" and "=" in gold:
        return
    yield "hedge", gold, text.format(*pair), False


KINDS = (rationals, decimals, surds, intervals, lists, bases, words, units, names, dates, polynomials, forms, hedges)


def reals(rng):
    """Forms that are equal wherever both are real, and near ones that are not."""
    x, y = rng.sample("xytuvw", 2)
    n, m = rng.sample((2, 4, 6, 8), 2)
    sqrt, frac, exponent = r"\sqrt{{{}}}".format, r"\frac{{{}}}{{{}}}".format, "{}^{{{}/{}}}".format
    root = r"\sqrt[{}]{{{}^{}}}".format
    rows = [
        (f"e^{{{n}{x}}}", [rf"\exp({n}{x})", f"exp({n}{x})"], [f"exp({m}{x})", f"{n}exp({x})", rf"\exp({x}^{n})"]),
        (f"|{x}-{n}|", [f"abs({x}-{n})", rf"\lvert {n}-{x} \rvert"], [f"{x}-{n}", f"abs({x}+{n})", f"|{x}|-{n}"]),
        (
            frac(1, sqrt(x)),
            [sqrt(f"1/{x}"), exponent(x, -1, 2)],
            [f"-{sqrt(f'1/{x}')}", sqrt(x), f"1/{x}", exponent(x, -2, 1)],
        ),
        (sqrt(frac(x, y)), [frac(sqrt(x), sqrt(y)), frac(sqrt(x + y), y)], [sqrt(frac(y, x)), frac(sqrt(x), y)]),
        (frac(sqrt(f"{n}{x}{y}"), y), [sqrt(frac(f"{n}{x}", y))], [sqrt(frac(f"{n}{y}", x)), sqrt(frac(f"{m}{x}", y))]),
        (exponent(x, n, 2 * m + 1), [root(2 * m + 1, x, n)], [root(n, x, 2 * m + 1), exponent(x, 2 * m + 1, n)]),
        (rf"\ln {x}^{n}", [rf"{n}\ln {x}"], [rf"(\ln {x})^{n}", rf"\ln {n}{x}", rf"{m}\ln {x}"]),
        (rf"\ln({x}{y})", [rf"\ln {x}+\ln {y}"], [rf"\ln {x}\ln {y}", rf"\ln({x}+{y})", rf"\ln {x}-\ln {y}"]),
        (sqrt(f"{n * n}{x}^2"), [f"{n}|{x}|"], [f"{n}{x}", f"-{n}{x}", f"{n * n}|{x}|"]),
    ]
    gold, rights, wrongs = rng.choice(rows)
    yield "real", gold, rng.choice(rights), True
    yield "real", gold, rng.choice(wrongs), False


DOMAIN_FORMS = [
    r"{e}, {v} \in \mathbb{{{s}}}",
    r"{e} \text{{ where }} {v} \in \mathbb{{{s}}}",
    r"{e} \quad ({v}\in\mathbb{{{s}}})",
    r"{e} \text{{ for all }} {v} \in \mathbb{{{s}}}",
    r"{e} \ \forall {v} \in \mathbb {s}",
    r"{e} \text{{ with }} {v}\in\mathbb{{{s}}}",
]
BOXES = [r"\boxed{{{0}}} and \boxed{{{1}}}", r"$\boxed{{{0}}}$, $\boxed{{{1}}}$", r"\(\boxed{{{0}}},\ \boxed{{{1}}}\)"]
BOXES += [
    r"so \boxed{{{0}}}\text{{ and }}\boxed{{{1}}}.",
    r"\boxed{{{0}}} or \boxed{{{1}}}",
    r"\boxed{{{0}}}; \boxed{{{1}}}",
]
DRAFTS = [
    r"\boxed{{{0}}}. No, it is \boxed{{{1}}}",
    r"\boxed{{{0}}} is wrong: \boxed{{{1}}}",
    "\\boxed{{{0}}}\n\n\\boxed{{{1}}}",
]
STATED = [
    "Answer: {}",
    "#### {}",
    "The final answer is **{}**.",
    "**Answer:** {}",
    "So the answer is {}.",
    "Final Answer: {} ###",
]
MARKED = ["Answer: {} ###", "#### {} ####", "#### `{}`", "The answer is `x = {}`.", "Answer: *{}*", "Answer: __{}__"]
MARKED += [
    "The answer is a + b = **{}**.",
    "## Answer\n{}",
    "**Answer**\n\n{}",
    "### Final Answer\n\n**{}**",
    "Answer: \u200b{}",
]
ABBREVIATED = ["hours hrs minutes mins", "pounds lbs ounces oz", "seconds secs hours hrs", "years yrs months weeks"]
ABBREVIATED += [
    "miles per hour|mph|km/h|kilometers per second",
    "km/h|kph|mph|m/s",
    "m/s|m\\cdot s^{-1}|m\\cdot s|km/s",
]
TRIGONOMETRY = [  # equal | another form | not
    (r"\sec {0}", r"\frac{{1}}{{\cos {0}}}", r"\frac{{1}}{{\sin {0}}}"),
    (r"\csc {0}", r"\frac{{1}}{{\sin {0}}}", r"\sec {0}"),
    (r"\cot {0}", r"\frac{{\cos {0}}}{{\sin {0}}}", r"\tan {0}"),
    (r"\cot {0}", r"\frac{{1}}{{\tan {0}}}", r"-\frac{{1}}{{\tan {0}}}"),
    (r"\sec^2 {0}", r"1+\tan^2 {0}", r"1+\cot^2 {0}"),
    (r"\sin^2 {0}", r"1-\cos^2 {0}", r"1-\cos {0}"),
]
LARGE = ["city", "house", "blue one", "new world", "triangle", "longer line", "smaller angle"]


def reports(rng):
    """Kinds that users of other graders, and red teams, have reported."""
    a, b, n = rng.randint(2, 9), rng.randint(2, 5), rng.randint(2, 3)
    x, k = rng.choice("xytuv"), rng.choice("kmnp")

    part = Fraction(rng.randint(1, 8), rng.choice([2, 3, 4, 5, 7, 9]))
    above, below = part.numerator, part.denominator
    total = -a + part
    gold = rng.choice([written(rng, total), written(rng, total), rf"-{a}+\frac{{{above}}}{{{below}}}"])
    yield (
        "sum",
        gold,
        rng.choice([rf"-{a}+\frac{{{above}}}{{{below}}}", f"-{a}+{above}/{below}", f"-{a} + {above}/{below}"]),
        True,
    )
    yield (
        "sum",
        written(rng, -a - part),
        rng.choice([rf"-{a}+\frac{{{above}}}{{{below}}}", f"-{a} + {above}/{below}"]),
        False,
    )

    power, chain = f"{b**n}^{x}", f"({b}^{x})^{n}"
    yield "power", power, rng.choice([chain, f"({b}^{n})^{x}", f"{b}^{{{n}{x}}}"]), True
    yield "power", chain, rng.choice([power, f"{b}^{{{n}{x}}}"]), True
    yield (
        "power",
        power,
        rng.choice([f"({b}^{x})^{n + 1}", f"{b}^{{{x}^{n}}}", f"({b}^{x})^{n}+1", f"{b}^{{{x}+{n}}}"]),
        False,
    )
    yield "power", f"{x}^{{{n}{k}}}", f"({x}^{k})^{n}", True
    yield "power", f"{x}^{{{n}{k}}}", rng.choice([f"({x}^{k})^{n + 1}", f"{x}^{{{k}^{n}}}", f"{x}^{{{n}+{k}}}"]), False
    yield "power", f"e^{{2{x}}}+{2 * a}e^{x}+{a * a}", f"(e^{x}+{a})^2", True
    yield "power", f"e^{{2{x}}}+{2 * a}e^{x}+{a * a}", f"(e^{x}+{a + 1})^2", False

    one, other, wrong = rng.choice(TRIGONOMETRY)
    argument = rng.choice([x, f"({a}{x})", r"\theta"])
    forms = [form.format(argument) for form in (one, other, wrong)]
    yield "trigonometry", *rng.sample(forms[:2], 2), True
    yield "trigonometry", forms[0], forms[2], False

    angle, function, value = rng.choice(
        [(30, "sin", 1), (60, "cos", 1), (45, "tan", 2), (45, "cot", 2), (150, "sin", 1)]
    )
    inside = rng.choice([rf"{2 * a}\{function} {angle}^\circ", rf"{2 * a}\{function}({angle}^{{\circ}})"])
    yield "degrees", *rng.sample([str(a * value), inside], 2), True
    yield (
        "degrees",
        str(a * value),
        rng.choice([rf"{2 * a}\{function} {angle}", rf"{2 * a + 1}\{function} {angle}^\circ"]),
        False,
    )

    names = rng.choice(ABBREVIATED)
    long, short, *others = names.split("|") if "|" in names else names.split()
    yield "unit", *rng.sample([f"{a} {long}", f"{a} {short}"], 2), True
    yield "unit", f"{a} {long}", f"{a} {rng.choice(others)}", False
    many = rng.choice(["elevens", "twelves", "reams", "grosses", "nonets", "pentads", "dozens", "grands"])
    yield "unit", str(a), f"{a} {many}", False

    formula = rng.choice([f"{a}{k}+{b}", f"{b}^{k}", rf"\frac{{{k}}}{{{a}}}", f"{x} = {a}{k}+{b}", rf"{a}{k}\pi"])
    off = formula.replace(f"{k}", f"{k}^2")
    form = rng.choice(DOMAIN_FORMS)
    space, another = rng.sample("ZNRQ", 2)
    whole = form.format(e=formula, v=k, s=space)
    yield "domain", *rng.sample([formula, whole], 2), True
    yield "domain", rng.choice(DOMAIN_FORMS).format(e=formula, v=k, s=space), whole, True
    yield "domain", formula, form.format(e=off, v=k, s=space), False
    yield "domain", whole, rng.choice(DOMAIN_FORMS).format(e=formula, v=k, s=another), False
    yield "domain", str(a), rf"{a} \text{{ at }} {x} = {b}", True
    yield "domain", str(a), rng.choice([rf"{a} \text{{ if }} {x} = {b}", rf"{a + 1} \text{{ at }} {x} = {b}"]), False

    low, high, third = rng.sample(range(10, 99), 3)
    boxes = rng.choice(BOXES)
    yield "reply", f"{low}, {high}", boxes.format(*rng.sample([low, high], 2)), True
    yield "reply", str(high), boxes.format(low, high), False
    yield "reply", f"{low}, {high}", boxes.format(low, third), False
    yield "reply", f"{low}, {high}", rng.choice(DRAFTS).format(low, high), False
    yield "reply", str(high), rng.choice(DRAFTS).format(low, high), True
    yield "reply", str(high), rng.choice(MARKED).format(high), True
    yield "reply", str(high), rng.choice(MARKED).format(low), False
    stated = f"It has \\boxed{{{low}}} parts.\n{rng.choice(STATED).format(high)}"
    yield "reply", str(high), stated, True
    yield "reply", str(low), stated, False

    right, wrong = rng.sample("BCDEFGH", 2)
    option = rng.choice(["{}: A {}", "({}) A {}", "{}. A {}", "The answer is {}: A {}", r"\text{{{}: A {}}}"])
    kind = "reply" if "answer" in option else "option"
    yield kind, right, option.format(right, rng.choice(LARGE)), True
    yield kind, right, option.format(wrong, rng.choice(LARGE)), False
    yield "option", right, rng.choice([f"{right}: A or {wrong}", f"{right}: A, {wrong}", f"{right} or {wrong}"]), False


def pairs(count: int, seed: int, kinds: tuple = KINDS) -> Iterator[tuple[str, str, str, bool]]:
    """`count` of them, all kinds in turn."""
    rng = random.Random(seed)
    made = 0
    while True:
        for kind in kinds:
            for pair in kind(rng):
                yield pair
                made += 1
                if made == count:
                    return
