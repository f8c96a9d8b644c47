"""What the text of a final answer says: its typography, numbers, units and words. Exact, and without sympy."""

import re
from collections import Counter
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple
from unicodedata import normalize

MAX_DEPTH = 50  # of brackets in brackets
GROUPED = r"(?<![\w.,^/(\[{}])\d{1,3}(?:,\d{3})+(?!,?\d)"  # 1,234
_TEX = r"\times \cdot \cdot / \infty \le \ge \ne \cup \cap \in ^\circ \pm \pi \approx".split()
_SIGNS = str.maketrans({sign: f"{tex} " for sign, tex in zip("\u00d7·⋅÷∞≤≥≠\u222a∩\u2208°±π≈", _TEX, strict=True)})
_WRAPPED = (
    r"\\(?:text(?:bf|it|rm|sf|normal)?|math(?:rm|bf|sf|it)|boldsymbol|mbox|fbox|boxed|underline|operatorname"
    r"|(?:text)?color\s*\{\w+\})\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_TRIGONOMETRIC = r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])(?:\s*\^\s*(?:\{\s*\d\s*\}|\d))?"
_REWRITES = [  # what changes no meaning, in this order
    (re.compile(pattern), new)
    for pattern, new in (
        (r"[\u00ad\u200b-\u200f\u2060\ufeff]", ""),  # without width
        (r'^\s*(\*\*|"|`)(.*)\1\s*$', r"\2"),  # bold type and code of markdown
        (r"\*\*", "^"),
        (r"[⁰¹²³⁴-⁹⁻ⁿ]+", lambda match: f"^{{{normalize('NFKC', match[0])}}}"),
        (r"√\s*(\d+|[a-z])", r"\\sqrt{\1} "),
        (r"[^\x00-\x7f]+", lambda match: match[0].translate(_SIGNS)),
        (r"[\u2010-\u2015\u2212]", "-"),
        (r"\\[,;:!]", " "),
        (r"\\(?:left|right)\s*\.", ""),
        (r"\\(?:left|right|displaystyle|limits|[bB]igg?[lrm]?|bf|rm|it|large|Large|huge)(?![a-zA-Z])", ""),
        (r"\\q?quad(?![a-zA-Z])|(?<!\\)\\(?= )|~", " "),
        (r"\{,\}", ","),
        (r"\\([$%])", r"\1"),
        (rf"(?<=,){_WRAPPED}", r"\1 "),  # no blank behind a separator: that would be another style of list
        (_WRAPPED, r" \1 "),
        (r"\^\s*\{?\\circ\}?(?:\{\})?|\\degree(?![a-zA-Z])", " degrees "),
        (r"(?i:\bdegrees?)\s*([CF])(?:elsius|ahrenheit)?\b", r"degrees\1 "),
        (r"\\(?:[dtcs]|nice)frac", r"\\frac"),
        (r"\\frac\s*(\\pi|\w)\s*(\\pi|\w)", r"\\frac{\1}{\2}"),
        (r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"\\binom\s*(\w)\s*(\w)", r"\\binom{\1}{\2}"),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
        (r"(?:[(\[]\s*)?\\begin\{array\}\s*\{[clr|]*\}", r"\\begin{pmatrix}"),
        (r"\\end\{array\}(?:\s*[)\]])?", r"\\end{pmatrix}"),
        (r"[<>]=", lambda match: r"\le " if match[0] == "<=" else r"\ge "),
        (r"\\([lgn]e)q(?:slant)?(?![a-zA-Z])", r"\\\1"),
        (r"\\not\s*=", r"\\ne "),
        (r"\\(?:vee|lor)(?![a-zA-Z])", " or "),
        (r"^\s*\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid|\||:)(.*)\\\}\s*$", r"\1"),
        (r"\\[()\[\]]|(?i:^\s*(?:the )?(?:final )?answer(?: is)?\b:?)", " "),
        (r"(?<![\\a-zA-Z])(pi|sqrt|sin|cos|tan|ln|log|exp)(?![a-zA-Z])", r"\\\1"),
        (r"\\lg(?![a-zA-Z])", r"\\log_{10}"),
        (rf"({_TRIGONOMETRIC}\s*[({{]?\s*)(\d+(?:\.\d+)?)\s*degrees", r"\1\\frac{\2\\pi}{180}"),
        (r"(?<![a-zA-Z])\\?abs\s*[({]((?:[^(){}]|\([^()]*\))*)[)}]", r"|\1|"),
        (r"^\s*\\approx(?![a-z])", ""),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?i)(?<=\d)\s*(?:percentage|percent|pct)\b", "%"),
        (r"\s+\^", "^"),
        (r"(?i)^\s*([-+]?)\s*infinity\s*$", r"\1\\infty"),
        (r"(?i)^\s*all real(?: number)?s\s*$", r"\\mathbb{R}"),
        (r"(?i)^\s*(?:(?:there (?:is|are) )?no (?:real )?solutions?|(?:the )?empty set)\s*$", r"\\emptyset"),
        (r"\.\.\.|\\[lc]dots", r"\\dots "),
        (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
    )
]
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?:\.\d*)?|\.\d+"
_POWER = r"(?:e(?P<e>[-+]?\d{1,3})|\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{?\s*(?P<ten>[-+]?\d{1,3})\s*\}?)?"
_PLAIN = re.compile(
    rf"(?i)(?P<sign>[-+]?)\s*(?:(?P<whole>\d+) +(?=\d+\s*/))?(?P<above>{_DECIMAL}){_POWER}"
    r"(?:\s*/\s*(?P<below>\d+))?\s*(?P<percent>%?)"
)
_FRACTION = re.compile(r"\\frac\s*(?:\{\s*([-+]?[\d.,]+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")
_NAMES = """m meter metre|cm cms centimeter centimetre|mm millimeter millimetre|km kms kilometer kilometre|in inch
ft foot feet|yd yds yard|mi mile|hectare|acre|L l liter litre|mL ml milliliter|s sec secs second|min mins minute
h hr hrs hour|day|week|month|yr yrs year|kg kgs kilogram|g gram|lb lbs pound £ GBP|oz ounce|N newton|J joule|W watt|kW
kWh|Hz hertz|Pa pascal|kPa|volt|ohm|ampere amp|$ USD dollar buck|¢ cent|€ EUR euro|¥ yen|₹ Rs rupee|am|pm
degrees degree|degreesC|degreesF|rad radian"""
_SPEEDS = {"mph": ("mi", "h"), "kph": ("km", "h"), "kmh": ("km", "h"), "kmph": ("km", "h")}
_UNITS = {name: names.split()[0] for names in re.split(r"[|\n]", _NAMES) for name in names.split()}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_NO_NOUN = re.compile(  # words that qualify a number, or stand for several: 5 pairs are 10
    r"(?i)(?:or|and|but|if|is|mod|modulo|plus|minus|times|over|choose|divided|by|than|least|most|more|less|about|to|maybe|"
    r"squared|cubed|doubled|tripled|perhaps|possibly|undefined|none|never|wrong|false|(?:not?|factorial|inverse|reciprocal|"
    r"negative|opposite|percent|hal(?:f|ve)|dozen|score|couple|pair|trio|duo|twin|double|triple|fold|lakh|lac|crore|googol|"
    r"myriad|decade|hundred|thousand|[a-z]*illion|alway|sometime|beside|doe|[a-z]+(?:plet|tet|ward)|[dty][a-z]*ad|"
    r"(?:twent|thirt|fort|fift|sixt|sevent|eight|ninet|centur)ie|eleven|twelve|grand|ream|gross|permille|nonet|monad|pentad|hexad|heptad|octad|ennead|decad|quarter|third|fourth|fifth|sixth|seventh|eighth|ninth|"
    r"tenth|eleventh|twelfth|\w*(?:teen|tie|hundred|thousand|illion)th|one|two|three|four|five|six|seven|eight|nine|ten)(?:e?s)?)"
)
_COUNTED = re.compile(  # plural nouns
    r"(?i)[a-z]{2,}[^\Wsui]s|people|persons?|children|men|women|feet|teeth|mice|geese|sheep|fish|deer|dice|unit|way|solution"
)
_HARMLESS = re.compile(  # words that may stand before or after a noun
    "(?i)red|blue|green|white|black|yellow|orange|pink|big|small|large|long|tall|wide|high|deep|old|young|new|different|"
    "distinct|unique|of|possible|real|complex|positive|whole|prime|odd|even|total|away|such"
)
_MEASURED = re.compile(
    r"(.*?(?:[\d.})%]|\\pi))(\s*)((?:[$€£¢¥₹]|[^\W\d_])(?:[\s(){}/.-]|\\cdot|\^\{?-?\d\}?|[^\W\d_])*)"
)
_MONEY = re.compile(rf"([-+]?)\s*([$€£¥₹]|USD|EUR|GBP|INR|JPY|Rs\b\.?)\s*([-+]?\s*(?:{_DECIMAL}))")
_DIGITS = re.compile(r"-?[\d,]+(?:\.\d*)?")
_WORDS = re.compile(r"[^\W\d_]+(?:[ .'-]+[^\W\d_]+)*")
# Letters that are a product of variables: no English word is without a vowel or y.
_PRODUCT = re.compile(r"[b-df-hj-np-tv-xz]+|[xyz]+|[abcx]+|[a-z]")


LESS = re.compile(r"(<|>|\\[lg]e(?![a-z]))")
NAME = (  # x  x_1  f(x)  \alpha  width, and what geometry names: AB  |AB|  S_1:S_2  \frac{AB}{CD}
    r"(?:(?!\\emptyset)\\?[a-zA-Z]+(?:_(?:\w|\{\w+\}))?'*(?:\(\w\))?"
    r"|(?:[A-Z'|:/{} ]|\\(?:frac|angle|triangle|overline)(?![a-z])|_(?:[A-Za-z\d]|\{\w++\}))+)"
)


_OPENING = re.compile(r"\\begin|\\?[{(\[]")
_CLOSING = re.compile(r"\\end|\\?[})\]]")


_LISTED = re.compile(r"[,;\[]|(?<![a-zA-Z\\])(?:or|and|if|for|when)(?![a-zA-Z])|\\(?:\{|to|implies|in)(?![a-z])")
_BEHIND = r"(?P<rest>.*?\S)\s*[,;]?\s*(?:\(\s*)?"  # what stands before a domain, which may have brackets
_VARIABLE = r"(?P<name>\\?[a-zA-Z]+)"
_PLACE = re.compile(rf"{_BEHIND}(?:at|when)\s+{_VARIABLE}\s*(?P<domain>=\s*-?[\w./]+)\s*\)?")
_DOMAINS = [
    re.compile(
        rf"{_BEHIND}(?:where|with|for(?: (?:all|any|every|each|some))?|\\forall)?\s*{_VARIABLE}\s*{domain}\s*\)?"
    )
    for domain in (
        r"(?P<domain>\\in\s*\\mathbb\s*\{[A-Z]\}(?:[\^_]\{?[+*\d]\}?)?)",
        r"(?P<domain>\\ge\s*[01])",
        r"(?P<domain>> ?0)",
        r"(?P<domain>is (?:an?|any) (?:arbitrary |real |positive |non-?negative |whole )*(?:constant|integer|number))",
    )
] + [
    re.compile(
        rf"{_BEHIND}(?:for (?:all|any|every|each)|\\forall)"
        rf"(?P<domain>(?: (?:real|integers?|positive|natural|numbers?|values of|constants?))*)\s*{_VARIABLE}\s*\)?"
    ),
    _PLACE,
]


class Number(NamedTuple):
    value: Fraction
    is_percent: bool


class Quantity(NamedTuple):
    value: str
    unit: tuple[tuple[str, int], ...]  # the power of each name
    is_plain: bool  # whether the unit may be forgiven: neither dozens nor `incorrect`


@lru_cache(maxsize=64)
def clean(text: str) -> str:
    """The text with one sign for one meaning, without what has none: $, \\left, \\text{}, spaces, a last period."""
    if _DIGITS.fullmatch(text):  # most answers
        return text.removesuffix(".")
    text = re.sub(r"(?<!\.)\.$", "", text.strip()).strip()
    while len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    return " ".join(text.split()).removesuffix(" .")


def without_domain(text: str) -> tuple[str, str]:
    """A formula without the domain of a variable that it holds, and that domain, "" if it has none: 3k+1, k \\in
    \\mathbb{Z}; x+1 for all real x; x^2+C where C is a constant. So the place of a number: 12 at x = 2."""
    for pattern in _DOMAINS:
        match = pattern.fullmatch(text)
        if match is None or LESS.search(match["rest"]) or _LISTED.search(match["rest"]):
            continue
        variable = re.escape(match["name"])
        is_held = re.search(rf"(?<![a-zA-Z\\]){variable}(?![a-zA-Z])", match["rest"]) is not None
        is_place = pattern is _PLACE
        if is_held != is_place:
            return match["rest"].strip(), squeeze(f"{match['name']} {match['domain']}")
    return text, ""


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
    below = int(match["below"] or 0)
    if below:
        value = value / below + int(match["whole"] or 0) * Fraction(10) ** power
    return Number(-value if match["sign"] == "-" else value, bool(match["percent"]))


def quantity(text: str) -> Quantity:
    """The value of a text and its unit: $5, 5 dollars, 5 km/h, 5 square feet, 5 red balls."""
    written = _MONEY.sub(r"\1\3 \2 ", text, count=1) if _MONEY.match(text) else text
    match = _MEASURED.fullmatch(written)
    if match and all(match[1].count(opened) == match[1].count(closed) for opened, closed in ("{}", "()")):
        value, gap, name = match.groups()
        unit = _unit(name)  # a letter right after a digit is a variable: 5m
        is_known = _known(name) or name.lower() in _SPEEDS
        if unit and (gap or not name[:2].isalpha() or (is_known and len(name) > 1)):
            return Quantity(value, *unit)
    return Quantity(text, (), True)


def _known(name: str) -> str | None:
    """The unit of this name, if it is one."""
    lower = name.lower()
    forms = (name, lower, lower.removesuffix("s"), lower.removesuffix("es"))
    return next((_UNITS[form] for form in forms if form in _UNITS and (form == name or len(form) > 2)), None)


def _unit(text: str) -> tuple[tuple[tuple[str, int], ...], bool] | None:
    """The power of each name, and whether they may be forgiven; None if the text is no unit."""
    text = re.sub(r"([a-zA-Z]) (?:(squar)|cub)ed\b", lambda match: f"{match[1]}^{2 if match[2] else 3}", text)
    unit = Counter()
    side = 1
    power = 1
    is_plain = True
    has_noun = False
    before = ""
    text = text.replace(r"\cdot", " ")
    tokens = re.findall(r"(/|[^\W\d_]+|[$€£¢¥₹])(?:\^\{?(-?\d)\}?)?", text)
    for name, exponent in tokens:
        if name in ("/", "per"):
            side = -1
        elif name.lower() in _SPEEDS:
            above, below = _SPEEDS[name.lower()]
            unit[above] += side
            unit[below] -= side
            has_noun = True
        elif name.lower() in _POWERS:
            power = _POWERS[name.lower()]
        elif (known := _known(name)) is None and (_NO_NOUN.fullmatch(name) or not is_word(name)):
            return None
        else:
            is_counted = bool(known or _COUNTED.fullmatch(name))
            is_named = before in ("/", "per", "of") and name[-1] != "s"
            has_noun |= is_counted
            is_plain &= bool(is_counted or is_named or _HARMLESS.fullmatch(name))
            unit[known or name.lower().removesuffix("s").removesuffix("e")] += side * power * int(exponent or 1)
            power = 1
        before = name
    if power != 1 or not 0 < len(tokens) <= 5:
        return None
    factors = sorted((name, exponent) for name, exponent in unit.items() if exponent)
    if not factors:  # all cancel
        factors = [("", 1)]
    return tuple(factors), is_plain and has_noun


def as_interval(text: str) -> str:
    """`1 < x \\le 2` as `(1, 2]`; any other text as it is."""
    sides = [side.strip() for side in LESS.split(text)]
    rising = {sign in ("<", r"\le") for sign in sides[1::2]}
    if rising == {False}:
        sides.reverse()
    if len(sides) == 3:
        sides = [r"-\infty", "<", *sides] if re.fullmatch(NAME, sides[0]) else [*sides, "<", r"\infty"]
    if len(sides) != 5 or len(rising) > 1 or not re.fullmatch(NAME, sides[2]):
        return text
    low, first, _, second, high = sides
    return f"{'(' if first in '<>' else '['}{low}, {high}{')' if second in '<>' else ']'}"


def is_word(text: str) -> bool:
    """Whether to compare a text as words, not as mathematics. One letter is a variable, and so is each letter of a run
    that is no English word: xy, abc, mn; not no, cat, even, AB."""
    words = re.split("[ .'-]+", text.lower())
    return bool(_WORDS.fullmatch(text)) and not all(map(_PRODUCT.fullmatch, words))


def split(text: str, separator: str) -> list[str]:
    """The parts between separators that stand in no bracket; [] if brackets do not close, or are MAX_DEPTH deep."""
    parts = []
    start = 0
    depth = 0
    for token in re.finditer(rf"\\begin|\\end|\\?[{{}}()\[\]]|{separator}", text):
        if _OPENING.fullmatch(token[0]):
            depth += 1
        elif _CLOSING.fullmatch(token[0]):
            depth -= 1
        elif depth == 0 and not token[0][0].isdigit():
            parts.append(text[start : token.start()].strip())
            start = token.end()
        if not 0 <= depth <= MAX_DEPTH:
            return []
    if depth:
        return []
    return [*parts, text[start:].strip()]


def depth_of(text: str) -> int:
    """How many brackets stand in each other at most."""
    depth = 0
    deepest = 0
    for token in re.finditer(r"\\begin|\\end|\\?[{}()\[\]]", text):
        if _OPENING.fullmatch(token[0]):
            depth += 1
        else:
            depth -= 1
        deepest = max(deepest, depth)
    return deepest
