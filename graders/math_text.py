"""What the text of a final answer says: its typography, numbers, units and words. Exact, and without sympy."""

import re
from collections import Counter
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple
from unicodedata import normalize

MIN_DIGITS = 6  # significant digits of a decimal that may stand for a fraction or a root, as in math-verify

_TEX = r"\times \cdot / \pi \infty \le \ge \ne \cup \cap \in ^\circ \emptyset".split()
_SIGNS = str.maketrans(
    dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe63\uff0d", "-")
    | dict.fromkeys("\xa0\u2007\u2009\u202f~", " ")
    | {sign: f"{tex} " for sign, tex in zip("\u00d7·÷π∞≤≥≠\u222a∩∈°∅", _TEX, strict=True)}
)
_WRAPPED = (
    r"\\(?:text(?:bf|it|rm|sf|normal)?|math(?:rm|bf|sf|it)|boldsymbol|mbox|fbox|boxed|underline|operatorname"
    r"|(?:text)?color\s*\{\w+\})\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_ANGLE = r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{?-?\d\}?)?\s*)[({]?\s*(\d+) degrees\s*[)}]?"
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")


def _repeating(match: re.Match) -> str:
    """0.1\\overline{6} as 15/90."""
    whole, once, repeated = match.groups()
    value = int(f"{whole}{once}{repeated}") - int(f"{whole}{once}" or 0)
    return f" {value}/{(10 ** len(repeated) - 1) * 10 ** len(once)} "


_REWRITES = [  # what changes no meaning, in this order
    (re.compile(pattern), new)
    for pattern, new in (
        (r'^\s*(\*\*|")(.*)\1\s*$', r"\2"),  # bold type of markdown
        (r"\*\*", "^"),
        (r"[⁰¹²³⁴-⁹⁻]+", lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}"),
        (r"[¼-¾⅐-⅞]", lambda match: f" {normalize('NFKC', match[0])} ".replace("\u2044", "/")),
        (r"√\s*(\d*)", lambda match: f"\\sqrt{{{match[1]}}}" if match[1] else r"\sqrt "),
        (r"\\[,!](?=\d)|\\!", ""),
        (r"\\[,;:]", " "),
        (r"\\(?:left|right|displaystyle|limits|[bB]igg?[lrm]?|bf|rm|it|large|Large|huge)(?![a-zA-Z])", ""),
        (r"\\[lr]brace(?![a-zA-Z])", lambda match: r"\{" if match[0][1] == "l" else r"\}"),
        (r"\\q?quad(?![a-zA-Z])|(?<!\\)\\(?= )", " "),
        (r"\{,\}", ","),
        (r"(?<!\\)\$([^$]*[^$\\ ])\s*\$", r" \1 "),
        (r"\\([$%])", r"\1"),
        (r"\^\s*\{?\\circ\}?\s*(?:([CF])\b)?|\\degree(?![a-zA-Z])|(?<=\d)\s*deg\b", r" degrees\1 "),
        (_WRAPPED, r" \1 "),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\frac\s*(\\pi|\w)\s*(\\pi|\w)", r"\\frac{\1}{\2}"),
        (r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"(\\sqrt\s*\[[^]]*\])\s*(\w)", r"\1{\2}"),
        (r"\\var(theta|phi|epsilon)(?![a-zA-Z])", r"\\\1"),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
        (
            r"(?:[(\[]\s*)?\\begin\{array\}\s*\{[clr|]*\}(.*)\\end\{array\}(?:\s*[)\]])?",
            r"\\begin{pmatrix}\1\\end{pmatrix}",
        ),
        (r"(?<=[)\]])\s*U\s*(?=[(\[])", r"\\cup "),
        (r"[<>]=", lambda match: r"\le " if match[0] == "<=" else r"\ge "),
        (r"\\([lgn]e)q(?:slant)?(?![a-zA-Z])", r"\\\1"),
        (r"^\s*\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid|\||:)(.*)\\\}\s*$", r"\1"),
        (r"\\(?:lor|vee)(?![a-zA-Z])", " or "),
        (r"\\[()\[\]]|(?i:^\s*(?:the )?(?:final )?answer(?: is)?\b:?)", " "),
        (r"(?<![\\a-zA-Z])(pi|sqrt|sin|cos|tan|ln|log)(?![a-zA-Z])", r"\\\1"),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (_ANGLE, r"\1{(\\frac{\2\\pi}{180})}"),
        (r"(?<![\\a-zA-Z])(?:infinity|oo)(?![a-zA-Z])", r"\\infty"),
        (r"\\log_(?:e|\{e\})(?![a-zA-Z])", r"\\ln "),
        (r"(?i)(?<=\d)\s*(?:percentage|percent|pct)\b", "%"),
        (r"(?i)\b([ap])\.\s?m\b\.?", r"\1m"),
        (r"\s+\^", "^"),
        (r"(?i)^\s*(?:negative|minus)\s+(?=[\d\\])", "-"),
        (r"(?<!\d)(\d*)\.(\d*)\\(?:overline|bar)\s*\{?(\d+)\}?", _repeating),
        (r"(?<!\d)(\d*)\.(\d{0,9}?)(\d{1,9}?)\3\3+\s*(?:\.\.\.|\\l?dots)(?!\s*\d)", _repeating),
        (r"\.\.\.|\\[lc]dots", r"\\dots "),
        (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
        (r"(?<=\d) (thousand|million|billion)\b", lambda match: {"t": "e3", "m": "e6", "b": "e9"}[match[1][0]]),
    )
]
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?:\.\d*)?|\.\d+"
_POWER = r"(?:e(?P<e>[-+]?\d{1,3})|\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{?\s*(?P<ten>[-+]?\d{1,3})\s*\}?)?"
_PLAIN = re.compile(
    rf"(?i)(?P<sign>[-+]?)\s*(?:(?P<whole>\d+)[ +]+(?=\d+\s*/))?(?P<above>{_DECIMAL}){_POWER}"
    r"(?:\s*/\s*(?P<below>\d+))?\s*(?P<percent>%?)"
)
_FRACTION = re.compile(r"\\frac\s*(?:\{\s*([-+]?[\d.,]+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")

_ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
SPELLED = {word: value for value, word in enumerate(f"{_ONES} seventeen eighteen nineteen".split())}
_TENS = zip("twenty thirty forty fifty sixty seventy eighty ninety".split(), range(20, 100, 10), strict=True)
SPELLED |= {f"{ten}-{one}": size + value for ten, size in _TENS for one, value in [*SPELLED.items()][:10]}
SPELLED |= {word.removesuffix("-zero"): value for word, value in SPELLED.items()}
_SPELLED_OUT = re.compile(
    rf"(?i)^(?:{'|'.join(sorted(SPELLED, key=len, reverse=True))})(?![a-z-])".replace("y-", "y[- ]")
)
_UNITS = {  # name: (size, dimension)
    name: (Fraction(size), dimension)
    for dimension, row in {
        "m": "m,meter,metre=1 km,kilometer,kilometre=1000 cm,centimeter,centimetre=1/100 mm,millimeter=1/1000 "
        "in,inch=127/5000 ft,foot,feet=381/1250 yd,yard=1143/1250 mi,mile=201168/125",
        "s": "s,sec,second=1 min,minute=60 h,hr,hour=3600 day=86400 week=604800",
        "year": "yr,year=1 month=1/12",
        "g": "g,gram=1 kg,kilogram,kilo=1000 mg,milligram=1/1000",
        "lb": "lb,pound,£,GBP=1 oz,ounce=1/16",
        "L": "l,L,liter,litre=1 mL,ml,milliliter,millilitre=1/1000",
        "gallon": "gal,gallon=1 qt,quart=1/4",
        "dollar": "$,USD,dollar,buck=1 ¢,cent=1/100",
        "euro": "€,EUR,euro=1",
        "am": "am=1",
        "pm": "pm=1",
    }.items()
    for entry in row.split()
    for names, size in [entry.split("=")]
    for name in names.split(",")
}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_NO_NOUN = re.compile(  # words that qualify a number instead of naming what it counts
    r"(?i)(?:not?|or|and|but|if|is|mod|modulo|plus|minus|times|over|choose|divided|by|than|least|most|more|less|about|to|"
    r"factorial|squared|cubed|doubled|tripled|inverse|reciprocal|hal(?:f|ves)|"
    r"(?:quarter|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth|\w*(?:teen|tie|hundred|thousand|illion)th)s?|"
    r"negative|positive|maybe|perhaps|possibly|undefined|none|never|wrong|false|hundred|thousand|[mbtr]+illion|dozen|"
    rf"{'|'.join(SPELLED)})"
)
_MEASURED = re.compile(r"(.*?(?:[\d.})%]|\\pi))(\s*)((?:[$€£¢]|[^\W\d_])(?:[\s^{}/.-]|\\cdot|(?<=[\^{-])\d|[^\W\d_])*)")
_MONEY = re.compile(rf"([-+]?)\s*([$€£]|USD|EUR|GBP)\s*([-+]?\s*(?:{_DECIMAL}))")
_PARTS = re.compile(rf"({_DECIMAL})\s*([a-zA-Z]+)(?:\s*,)?(?:\s+and)?(?:\s+|$)")
_DIGITS = re.compile(r"-?[\d,]+(?:\.\d*)?")
_WORDS = re.compile(r"[^\W\d_]+(?:[ .'-]+[^\W\d_]+)*")
# Letters that are a product of variables: no English word is without a vowel or y.
_PRODUCT = re.compile(r"[b-df-hj-np-tv-xz]+|[xyz]+|[abcx]+|[a-z]")


LESS = re.compile(r"(<|>|\\[lg]e(?![a-z]))")
_IS_LESS = ("<", r"\le")
NAME = (  # x  x_1  f(x)  \alpha  width, and what geometry names: AB  |AB|  S_1:S_2  \frac{AB}{CD}
    r"(?:(?!\\emptyset)\\?[a-zA-Z]+(?:_(?:\w|\{\w+\}))?'*(?:\(\w\))?"
    r"|(?:[A-Z'|:/{} ]|\\(?:frac|angle|triangle|overline)(?![a-z])|_(?:[A-Za-z\d]|\{\w++\}))+)"
)


class Number(NamedTuple):
    value: Fraction
    rounding: Fraction | None  # half a unit of the last digit, of a decimal with MIN_DIGITS significant digits
    is_fraction: bool
    is_percent: bool


class Quantity(NamedTuple):
    value: str
    size: Fraction  # of the unit, in base units
    dimensions: tuple[tuple[str, int], ...]
    is_glued: bool  # a letter right after a digit, which may be a variable: 5m


@lru_cache(maxsize=64)
def clean(text: str) -> str:
    """The text with one sign for one meaning, without what has none: $, \\left, \\text{}, spaces, a last period."""
    if _DIGITS.fullmatch(text):  # most answers
        return text.removesuffix(".")
    text = re.sub(r"(?<!\.)\.$", "", text.translate(_SIGNS).strip()).strip()
    while len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    return " ".join(text.split()).removesuffix(" .")


def squeeze(text: str) -> str:
    """The text without spaces, unless they part two digits or words, or follow a comma: 1, 234 is not 1,234."""
    return re.sub(r"(?<![\d,\w]) +| +(?!\w)|(?<=[a-zA-Z]) +(?=\d)|(?<=\d) +(?=[a-zA-Z])", "", text)


def number(text: str) -> Number | None:
    """The exact value of a plain number (1,234.5  -3/4  1 1/2  50%  1.5e3); None if the text is something else."""
    if "\\frac" in text:
        text = _FRACTION.sub(lambda m: f" {m[1] or m[2]}/{m[3] or m[4]}", text)
    match = _PLAIN.fullmatch(text.strip())
    if match is None or (match["below"] and int(match["below"]) == 0):
        return None
    written = re.sub("[, ]", "", match["above"])
    power = int(match["e"] or match["ten"] or 0) - (2 if match["percent"] else 0)
    value = Fraction(f"{written}e{power}")
    if below := int(match["below"] or 0):
        value = value / below + int(match["whole"] or 0) * Fraction(10) ** power
    whole, _, decimals = written.partition(".")
    rounding = None
    if decimals and not match["below"] and len((whole + decimals).lstrip("0")) >= MIN_DIGITS:
        rounding = Fraction(10) ** (power - len(decimals)) / 2
    return Number(-value if match["sign"] == "-" else value, rounding, bool(match["below"]), bool(match["percent"]))


def quantity(text: str) -> Quantity:
    """The value of a text and its unit: $5, 5 dollars, 5 km/h, 5 square feet, 5 red balls, 5 feet 6 inches."""
    text = _SPELLED_OUT.sub(lambda match: str(SPELLED[match[0].lower().replace(" ", "-")]), text)
    plain = Quantity(text, Fraction(1), (), False)
    parts = _PARTS.findall(text + " ")
    if len(parts) > 1 and not _PARTS.sub("", text + " "):
        return _summed(parts) or plain
    if not (match := _MEASURED.fullmatch(_MONEY.sub(r"\1\3 \2 ", text, count=1) if _MONEY.match(text) else text)):
        return plain
    value, gap, unit = match.groups()
    measure = _unit(unit)
    if measure is None or not (gap or _known(unit) or not unit.isalpha()):
        return plain
    size, dimensions = measure
    return Quantity(value, size, dimensions, not gap and len(unit) == 1 and unit.isalpha())


def _summed(parts: list[tuple[str, str]]) -> Quantity | None:
    """`5 feet 6 inches` in feet: known units of one dimension, each smaller than the one before."""
    units = [_known(name) for _, name in parts]
    if None in units or len({dimension for _, dimension in units}) > 1:
        return None
    sizes = [size for size, _ in units]
    if any(size <= smaller for size, smaller in pairwise(sizes)):
        return None
    total = sum(number(value).value * size for (value, _), size in zip(parts, sizes, strict=True))
    return Quantity(str(total / sizes[0]), sizes[0], ((units[0][1], 1),), False)


def _known(name: str) -> tuple[Fraction, str] | None:
    forms = (name, name.lower(), name.lower().removesuffix("s"), name.lower().removesuffix("es"))
    return next((_UNITS[form] for form in forms if form in _UNITS and (form == name or len(form) > 1)), None)


def _unit(text: str) -> tuple[Fraction, tuple[tuple[str, int], ...]] | None:
    """Size in base units, and the power of each dimension; None if the text is no unit."""
    text = re.sub(r"\bmph\b", "mi/h", re.sub(r"\bkm?ph\b|\bkmh\b", "km/h", text.replace(r"\cdot", " ")))
    size = Fraction(1)
    dimensions: Counter[str] = Counter()
    side = power = 1
    tokens = re.findall(r"(/|[^\W\d_]+|[$€£¢])(?:\^\{?(-?\d)\}?)?", text)
    for name, exponent in tokens:
        if name in ("/", "per"):
            side = -1
            continue
        if name.lower() in _POWERS:
            power = _POWERS[name.lower()]
            continue
        known = _known(name)
        if known is None and (_NO_NOUN.fullmatch(name) or not is_word(name)):
            return None
        one, dimension = known or (Fraction(1), name.lower().removesuffix("s").removesuffix("e"))
        exponent, power = side * power * int(exponent or 1), 1
        size *= one**exponent
        dimensions[dimension] += exponent
    if power != 1 or len(tokens) > 5:
        return None
    return size, tuple(sorted(dimensions.items()))


def as_interval(text: str) -> str:
    """`1 < x \\le 2` as `(1, 2]`; any other text as it is."""
    sides = [side.strip() for side in LESS.split(text)]
    if len(sides) == 3 and re.fullmatch(NAME, sides[0]):
        sides = [r"-\infty", "<", *sides] if sides[1] in _IS_LESS else [r"\infty", ">", *sides]
    elif len(sides) == 3:
        sides += ["<", r"\infty"] if sides[1] in _IS_LESS else [">", r"-\infty"]
    if len(sides) != 5 or not re.fullmatch(NAME, sides[2]) or (sides[1] in _IS_LESS) != (sides[3] in _IS_LESS):
        return text
    low, first, _, second, high = sides if sides[1] in _IS_LESS else sides[::-1]
    return f"{'(' if first in '<>' else '['}{low}, {high}{')' if second in '<>' else ']'}"


def is_word(text: str) -> bool:
    """Whether to compare a text as words, not as mathematics. One letter is a variable, and so is each letter of a run
    that is no English word: xy, abc, mn; not no, cat, even, AB."""
    words = re.split("[ .'-]+", text.lower())
    return bool(_WORDS.fullmatch(text)) and not all(map(_PRODUCT.fullmatch, words))
