"""What the clean text of a final answer says: its numbers, units and words. Exact, and without sympy."""

import itertools
import re
from collections import Counter
from fractions import Fraction
from typing import NamedTuple

from .math_typography import GREEK

MAX_DEPTH = 50  # of brackets in brackets
GROUPED = r"(?<![\w.,^/(\[{}])\d{1,3}(?:,\d{3})+(?!,?\d)"  # 1,234
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
    r"(?:thir|four|fif|six|seven|eigh|nine|ump)teen|brace|deuce|duet|quad|quin|yoke|(?:two|three|four|five|six)some|"
    r"(?:quadr|quint|sext|sept|oct|non|dec|cent)uple|thou|millennium|millennia|chiliad|moietie|"
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
_UNIT_TOKEN = re.compile(r"(/|[^\W\d_]+|[$€£¢¥₹])(?:\^\{?(-?\d)\}?)?")
_LONG_NAME = re.compile(r"\\frac\s*\{[^{}]*(?:\{-?\d\}[^{}]*)?(?:\}\s*\{\s*)?(?<![\\a-zA-Z])[a-zA-Z]{2}")
_MEASURED = re.compile(
    r"(.*?(?:[\d.})%]|\\pi))(\s*)((?:[$€£¢¥₹]|[^\W\d_])(?:[\s(){}/.-]|\\cdot|\^\{?-?\d\}?|[^\W\d_])*)"
)
_UNIT = r"\{\s*([a-zA-Z][^{}]*(?:\{-?\d\}[^{}]*)*)\}"
_RATIO = re.compile(rf"(.*[\d.}})%])\s*\\frac\s*{_UNIT}\s*{_UNIT}")
_MONEY = re.compile(rf"([-+]?)\s*([$€£¥₹]|USD|EUR|GBP|INR|JPY|Rs\b\.?)\s*([-+]?\s*(?:{_DECIMAL}))")
_WORDS = re.compile(r"[^\W\d_]+(?:[ .'-]+[^\W\d_]+)*")
# Letters that are a product of variables: no English word is without a vowel or y.
_PRODUCT = re.compile(r"[b-df-hj-np-tv-xz]+|[xyz]+|[abcx]+|[a-z]")


_AND = r",|(?<![a-zA-Z\\])and(?![a-zA-Z])|\\(?:land|wedge)(?![a-zA-Z])"
INDEX = r"(?:_\{\w+\})"  # of a name
LESS = re.compile(r"(<|>|\\[lg]e(?![a-z]))")
NAME = (  # x  x_{1}  f(x)  \alpha  width, and what geometry names: AB  |AB|  S_1:S_2  \frac{AB}{CD}
    rf"(?:(?!\\emptyset)(?:\\(?:vec|overrightarrow) ?\{{\w+\}}|\\?[a-zA-Z]+){INDEX}?'*(?:\(\w\))?"
    r"|(?:[A-Z'|:/{} ]|\\(?:frac|angle|triangle|overline)(?![a-z])|_(?:[A-Za-z\d]|\{\w++\}))+)"
)


_OPENING = re.compile(r"\\begin|\\?[{(\[]")
_CLOSING = re.compile(r"\\end|\\?[})\]]")


_LISTED = re.compile(r"[,;\[]|(?<![a-zA-Z\\])(?:or|and|if|for|when)(?![a-zA-Z])|\\(?:\{|to|implies|in)(?![a-z])")
_BEHIND = r"(?P<rest>.*?\S)\s*[,;]?\s*(?:\(\s*)?"  # what stands before a domain, which may have brackets
_LETTERS = rf"\\?[a-zA-Z]++{INDEX}?"
_VARIABLE = rf"(?P<name>{_LETTERS})"
_PLACE = re.compile(rf"{_BEHIND}(?:at|when)\s+{_VARIABLE}\s*(?P<domain>=\s*-?[\w./]+)\s*\)?")
_KINDS = r"(?:real|complex|whole|positive|non-?negative|non-?zero|natural|integers?|numbers?|values of|constants?)"
_FOR = rf"(?:for|where|with|provided(?: that)?|\\forall)(?: (?:all|any|every|each|some))?(?: {_KINDS})*"
_FOR_ALL = r"(?:for (?:all|any|every|each|some)|\\forall)"
_CONSTANT = rf"is (?:an?|any) (?:arbitrary |{_KINDS} )*(?:constant|integer|number)"
_EVERYWHERE = re.compile(rf"{_BEHIND}for (?:all|any|every|each)(?P<domain>(?: {_KINDS})*)\s*{_VARIABLE}\s*\)?")
_SEVERAL = rf"(?P<name>{_LETTERS}(?:(?:\s*,\s*(?:and )?| and ){_LETTERS})+)"
_DOMAINS = [
    re.compile(rf"{_BEHIND}(?:{_FOR})?\s*{_VARIABLE}\s*(?P<domain>{domain})\s*\)?")
    for domain in (r"\\in\s*\\mathbb\s*\{[A-Z]\}(?:[\^_]\{?[+*\d]\}?)?", r"(?:\\ge|\\ne|>)\s*-?\d{1,3}", _CONSTANT)
] + [
    re.compile(rf"{_BEHIND}(?:{_FOR_ALL}|for(?= {_KINDS}))(?P<domain>(?: {_KINDS})*)\s*{_VARIABLE}\s*\)?"),
    _EVERYWHERE,
    re.compile(rf"{_BEHIND}where {_SEVERAL}\s*(?P<domain>are(?: any| arbitrary| {_KINDS})+)\s*\)?"),
    _PLACE,
]


class Number(NamedTuple):
    value: Fraction
    is_percent: bool


class Quantity(NamedTuple):
    value: str
    unit: tuple[tuple[str, int], ...]  # the power of each name
    is_plain: bool  # whether the unit may be forgiven: neither dozens nor `incorrect`


def without_domain(text: str) -> tuple[str, str]:
    """A formula without the domain of a variable that it holds, and that domain, "" if it has none: 3k+1, k \\in
    \\mathbb{Z}; x+1 for all real x; x^2+C where C is a constant. So the place of a number: 12 at x = 2, 12 for
    all n."""
    for pattern in _DOMAINS:
        match = pattern.fullmatch(text)
        if match is None or LESS.search(match["rest"]) or _LISTED.search(match["rest"]):
            continue
        names = re.split(r",\s*(?:and )?| and ", match["name"])
        is_held = all(_holds(match["rest"], name.strip()) for name in names)
        is_of_number = pattern in (_PLACE, _EVERYWHERE)
        if is_held != is_of_number:
            return match["rest"].strip(), squeeze(f"{match['name']} {match['domain']}")
    return text, ""


def _holds(formula: str, name: str) -> bool:
    """Whether a formula has a variable of this name, alone or in a product: Ce^x has a C."""
    runs = re.findall(rf"\\?[a-zA-Z]+?(?=e\^)|{_LETTERS}", formula)
    letters = [
        letter for run in runs if not is_word(run) for letter in re.findall(rf"\\[a-zA-Z]+|[a-zA-Z]{INDEX}?", run)
    ]
    return name in runs or name in letters


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
    if r"\frac" in text and _LONG_NAME.search(text):
        written = with_slash(text)
    match = _MEASURED.fullmatch(written)
    if match and all(match[1].count(opened) == match[1].count(closed) for opened, closed in ("{}", "()")):
        value, gap, name = match.groups()
        unit = _unit(name)  # a letter right after a digit is a variable: 5m
        is_known = known_unit(name) or name.lower() in _SPEEDS
        if unit and (gap or not name[:2].isalpha() or (is_known and len(name) > 1)):
            return Quantity(value, *unit)
    return Quantity(text, (), True)


def with_slash(text: str) -> str:
    """60 \\frac{km}{h} as 60 km/h; any other text as it is."""
    match = _RATIO.fullmatch(text)
    if match is None or _unit(f"{match[2]}/{match[3]}") is None:
        return text
    return f"{match[1]} {match[2]}/{match[3]}"


def known_unit(name: str) -> str | None:
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
    tokens = _UNIT_TOKEN.findall(text)
    if re.search(r"[\d^]", _UNIT_TOKEN.sub("", text)):
        return None
    for name, exponent in tokens:
        known = known_unit(name)
        if name in ("/", "per"):
            side = -1
        elif name.lower() in _SPEEDS:
            above, below = _SPEEDS[name.lower()]
            unit[above] += side * power * int(exponent or 1)
            unit[below] -= side * power * int(exponent or 1)
            power = 1
            has_noun = True
        elif name.lower() in _POWERS:
            power = _POWERS[name.lower()]
        elif known is None and (_NO_NOUN.fullmatch(name) or not is_word(name)):
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
    """`1 < x \\le 2` as `(1, 2]`, and so `x > 1 and x \\le 2`; any other text as it is."""
    if not LESS.search(text):
        return text
    bounds = split(text, _AND)
    if len(bounds) == 2:
        return _between(*bounds) or text
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


def _between(bound: str, other: str) -> str | None:
    """The interval of a variable with a bound below and one above; None if it has none."""
    rays = {}
    for text in (bound, other):
        ends = re.fullmatch(r"([(\[])(.*), (.*)([)\]])", as_interval(text))
        name = re.fullmatch(rf"({NAME}) ?(?:<|>|\\[lg]e).*|.*(?:<|>|\\[lg]e) ?({NAME})", text)
        if ends is None or name is None:
            return None
        rays["above" if ends[2] == r"-\infty" else "below"] = ends, name[1] or name[2]
    if len(rays) < 2 or rays["below"][1].strip() != rays["above"][1].strip():
        return None
    low, high = rays["below"][0], rays["above"][0]
    lowest = number(low[2])
    highest = number(high[3])
    if lowest and highest and lowest.value >= highest.value:
        return None
    return f"{low[1]}{low[2]}, {high[3]}{high[4]}"


def in_order(pairs: list[tuple[str, str]]) -> list[tuple[str, str]] | None:
    """(name, value) in the order of the names if they are x, y, z, or letters or indices that follow each other. Other
    names have no order but that of the alphabet, in which they must stand already: None if they do not."""
    names = {name for name, _ in pairs}
    if len(names) < 2 or "" in names:
        return pairs
    keys = [_place_of(name) for name, _ in pairs]
    if keys == sorted(keys):
        return pairs
    letters = sorted({letter for letter, _, _ in keys})
    is_row = all(high - low == 1 for low, high in itertools.pairwise(letters))
    if any(len(word) > 1 for _, word, _ in keys) or not (is_row or {*letters} <= {*map(ord, "xyz")}):
        return None
    return [pair for _, pair in sorted(zip(keys, pairs, strict=True))]


def _place_of(name: str) -> tuple[int, str, int]:
    """The place of a name in its alphabet, the name without index, and its index."""
    word, _, index = name.replace("{", "").replace("}", "").partition("_")
    if word.startswith("\\") and word[1:] in GREEK:
        return 1000 + GREEK.index(word[1:]), "g", int(index) if index.isdecimal() else 0
    return ord(word[0]), word, int(index) if index.isdecimal() else 0


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
