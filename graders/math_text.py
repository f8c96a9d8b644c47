"""What the text of a final answer says: its typography, numbers, units and words. Exact, and without sympy."""

import re
from collections import Counter
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple
from unicodedata import name as character_name
from unicodedata import normalize

MIN_DIGITS = 6  # significant digits of a decimal that may stand for a fraction or a root, as in math-verify

_TEX = r"\times \cdot \cdot / / \infty \le \ge \ne \cup \cap \in ^\circ \emptyset \pm \approx \equiv \sqrt"
_GREEK = {chr(code): character_name(chr(code)).split()[-1].replace("LAMDA", "LAMBDA") for code in range(0x3B1, 0x3CA)}
_SIGNS = str.maketrans(
    {sign: f"{tex} " for sign, tex in zip("\u00d7·⋅÷\u2044∞≤≥≠\u222a∩\u2208°∅±≈≡√", _TEX.split(), strict=True)}
    | {"∛": r"\sqrt[3] ", "∜": r"\sqrt[4] "}
    | {letter: f"\\{word.lower()} " for letter, word in _GREEK.items()}
    | {letter.upper(): f"\\{word.title()} " for letter, word in _GREEK.items()}
)
_WRAPPED = (
    r"\\(?:text(?:bf|it|rm|sf|normal)?|math(?:rm|bf|sf|it)|boldsymbol|mbox|fbox|boxed|underline|operatorname"
    r"|(?:text)?color\s*\{\w+\})\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_ANGLE = r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{?-?\d\}?)?\s*)[({]?\s*(\d+) degrees\s*[)}]?"
_MONTH = "(January|February|March|April|May|June|July|August|September|October|November|December)"
_ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
SPELLED = {word: value for value, word in enumerate(f"{_ONES} seventeen eighteen nineteen".split())}
_TENS = zip("twenty thirty forty fifty sixty seventy eighty ninety".split(), range(20, 100, 10), strict=True)
SPELLED |= {f"{ten}-{one}": size + value for ten, size in _TENS for one, value in [*SPELLED.items()][:10]}
SPELLED |= {word.removesuffix("-zero"): value for word, value in SPELLED.items()}
_NUMERAL = "|".join(sorted(SPELLED, key=len, reverse=True)).replace("y-", "y[- ]")
_SPELLED_OUT = re.compile(rf"(?i)^(-?)({_NUMERAL})(?![a-z-])")
_SHARES = {"halve": 2, "quarter": 4}
_SHARES |= dict(zip("half third fourth fifth sixth seventh eighth ninth tenth".split(), range(2, 11), strict=True))


def _spelled(word: str) -> int:
    return SPELLED[word.lower().replace(" ", "-")]


def _repeating(match: re.Match) -> str:
    """0.1\\overline{6} as 15/90."""
    whole, once, repeated = match.groups()
    value = int(f"{whole}{once}{repeated}") - int(f"{whole}{once}" or 0)
    return f" {value}/{(10 ** len(repeated) - 1) * 10 ** len(once)} "


def _brackets(match: re.Match) -> str:
    """]1, 2[ as (1, 2)."""
    return f"{match[1]} {'(' if match[2] == ']' else '['}{match[3]}{')' if match[4] == '[' else ']'}"


_REWRITES = [  # what changes no meaning, in this order
    (re.compile(pattern), new)
    for pattern, new in (
        (r'^\s*(\*\*|")(.*)\1\s*$', r"\2"),  # bold type of markdown
        (r"\*\*", "^"),
        (r"[⁰¹²³⁴-⁹⁻ⁿ]+", lambda match: f"^{{{normalize('NFKC', match[0])}}}"),
        (r"[₀-₉ₙ]+", lambda match: f"_{{{normalize('NFKC', match[0])}}}"),
        (r"[\u2102\u2115\u211a\u211d\u2124]", lambda match: rf"\mathbb{{{normalize('NFKC', match[0])}}}"),
        (r"[¼-¾⅐-⅞]", lambda match: rf"\frac{{{normalize('NFKC', match[0])}}}".replace("\u2044", "}{")),
        (r"([√∛∜])\s*(\d+|[a-z])", r"\1{\2} "),
        (r"[\xa0\xb5\u2000-\u202f\u2103\u2109\u2126\uff01-\uff5e]", lambda match: normalize("NFKC", match[0])),
        (r"[^\x00-\x7f]+", lambda match: match[0].translate(_SIGNS)),
        (r"[\u2010-\u2015\u2212]", "-"),
        (r"_\{(\w)\}", r"_\1"),
        (r"\\[,!](?=\d)|\\!", ""),
        (r"(?<![\d'])(\d{1,3}(?:'\d{3})+)(?![\d'])", lambda match: match[0].replace("'", "")),
        (r"\\[,;:]", " "),
        (r"\\(?:left|right|displaystyle|limits|[bB]igg?[lrm]?|bf|rm|it|large|Large|huge)(?![a-zA-Z])", ""),
        (r"\\[lr]brace(?![a-zA-Z])", lambda match: r"\{" if match[0][1] == "l" else r"\}"),
        (r"\\q?quad(?![a-zA-Z])|(?<!\\)\\(?= )|~", " "),
        (r"\{,\}", ","),
        (r"(?<!\\)\$([^$]*[^$\\ ])\s*\$", r" \1 "),
        (r"\\([$%])", r"\1"),
        (_WRAPPED, r" \1 "),
        (r"\^\s*\{?\\circ\}?(?:\{\})?|\\degree(?![a-zA-Z])|(?<=\d)\s*deg\b", " degrees "),
        (r"(?i:\bdegrees?)\s*([CF])(?:elsius|ahrenheit)?\b", r"degrees\1 "),
        (r"\\(?:[dtcs]|nice)frac", r"\\frac"),
        (r"\\frac\s*(\\pi|\w)\s*(\\pi|\w)", r"\\frac{\1}{\2}"),
        (r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"(\\sqrt\s*\[[^]]*\])\s*(\w)", r"\1{\2}"),
        (r"\\var(theta|phi|epsilon)(?![a-zA-Z])", r"\\\1"),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
        (r"(?:[(\[]\s*)?\\begin\{array\}\s*\{[clr|]*\}", r"\\begin{pmatrix}"),
        (r"\\end\{array\}(?:\s*[)\]])?", r"\\end{pmatrix}"),
        (r"(?<=[)\]])\s*U\s*(?=[(\[])", r"\\cup "),
        (r"[<>]=", lambda match: r"\le " if match[0] == "<=" else r"\ge "),
        (r"\\([lgn]e)q(?:slant)?(?![a-zA-Z])", r"\\\1"),
        (r"^\s*\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid|\||:)(.*)\\\}\s*$", r"\1"),
        (r"\\(?:lor|vee)(?![a-zA-Z])", " or "),
        (r"\\[()\[\]]|(?i:^\s*(?:the )?(?:final )?answer(?: is)?\b:?)", " "),
        (r"(?<![\\a-zA-Z])(pi|sqrt|sin|cos|tan|ln|log|exp)(?![a-zA-Z])", r"\\\1"),
        (r"(?<![a-zA-Z])\\?abs\s*[({]((?:[^(){}]|\([^()]*\))*)[)}]", r"|\1|"),
        (r"\\[lr]?vert(?![a-zA-Z])", "|"),
        (r"^\s*\\(?:approx|simeq|doteq)(?![a-z])", ""),
        (r"^\s*([a-zA-Z]\w*)\s*\\approx(?![a-z])", r"\1 ="),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (_ANGLE, r"\1{(\\frac{\2\\pi}{180})}"),
        (r"(?<![\\a-zA-Z])(?:infinity|oo)(?![a-zA-Z])", r"\\infty"),
        (r"\\log_(?:e|\{e\})(?![a-zA-Z])", r"\\ln "),
        (r"(?i)(?<=\d)\s*(?:percentage|percent|pct)\b", "%"),
        (r"(?i)\b([ap])\.\s?m\b\.?", r"\1m"),
        (r"\s+\^", "^"),
        (rf"(?i)^\s*(?:negative|minus)\s+(?=[\d\\]|(?:{_NUMERAL})\b)", "-"),
        (
            rf"(?i)(?<![^\s-])({_NUMERAL})[ -]({'|'.join(_SHARES)})s?\s*$",
            lambda match: f"{_spelled(match[1])}/{_SHARES[match[2].lower()]}",
        ),
        (rf"\b(\d{{1,2}})(?:st|nd|rd|th)?(?: of)? {_MONTH}\b,?", r"\2 \1"),
        (rf"\b{_MONTH} (\d{{1,2}})(?:st|nd|rd|th)?\b,?", r"\1 \2"),
        (r"^\s*(\d+) to (\d+)\s*$", r"\1:\2"),
        (r"(?i)^\s*all real(?: number)?s\s*$", r"\\mathbb{R}"),
        (r"(?i)^\s*(?:(?:there (?:is|are) )?no (?:real )?solutions?|(?:the )?empty set)\s*$", r"\\emptyset"),
        (r"\(?\s*(?<![a-zA-Z])\\?[pb]?mod(?:ulo)?(?![a-zA-Z])\s*\{?\s*(\w+)\s*\}?\s*\)?", r" mod \1 "),
        (r"\\equiv(?=.* mod )", "="),
        (r"\\lg(?![a-zA-Z])", r"\\log_{10}"),
        (r"(?<![\\\w])C\s*\(\s*(\d+)\s*,\s*(\d+)\s*\)", r"\\binom{\1}{\2}"),
        (r"(?<![\w})\]])(?:\{\s*\})?[_^]\{?(\d+)\}?\s*C_\{?(\d+)\}?", r"\\binom{\1}{\2}"),
        (r"(^|\\cup|\\in|=)\s*([][])([^][()]*[,;][^][()]*)([][])", _brackets),
        (r"\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?|(?<=\.)\((\d+)\)", r"\\overline{\1\2\3\4}"),
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

_PREFIXES = "p pico n nano μ micro m milli c centi d deci h hecto k kilo M mega G giga T tera".split()
_POWERS_OF_10 = [power for power in (-12, -9, -6, -3, -2, -1, 2, 3, 6, 9, 12) for _ in range(2)]
_TABLE = """*m,meter,metre=1:m in,inch=.0254:m ft,foot,feet=.3048:m yd,yard=.9144:m mi,mile=1609.344:m
mph=.44704:m.s-1 kph,kmph,kmh=5/18:m.s-1 hectare,ha=10000:m2 acre=4046.8564224:m2 *L,l,liter,litre=.001:m3 cc=.000001:m3
gal,gallon=1:gal qt,quart=1/4:gal pt,pint=1/8:gal cup=1/16:gal
*s,sec,second=1:s min,minute=60:s h,hr,hour=3600:s day=86400:s week=604800:s yr,year=1:year month=1/12:year
*g,gram=1:g kilo=1000:g tonne=1000000:g lb,pound,£,GBP=1:lb oz,ounce=1/16:lb
*N,newton=1000:g.m.s-2 *J,joule=1000:g.m2.s-2 *Wh=3600000:g.m2.s-2 *W,watt=1000:g.m2.s-3 *Pa,pascal=1000:g.m-1.s-2
*bar=100000000:g.m-1.s-2 *Hz,hertz=1:s-1 *A,amp,ampere=1:A *C,coulomb=1:A.s *V,volt=1000:g.m2.s-3.A-1
*Ω,ohm=1000:g.m2.s-3.A-2 *F,farad=.001:g-1.m-2.s4.A2 *H,henry=1000:g.m2.s-2.A-2 *T,tesla=1000:g.s-2.A-1
*K,kelvin=1:K *mol,mole=1:mol *eV,electronvolt=1:eV *cal,calorie=4184:g.m2.s-2 *B,byte=1:B *b,bit=1/8:B
$,USD,dollar,buck=1:$ ¢,cent=1/100:$ €,EUR,euro=1:€ ¥,JPY,yen=1:¥ ₹,Rs,INR,rupee=1:₹
am=1:am pm=1:pm degrees,degree=1:deg degreesC=1:degC degreesF=1:degF rad,radian=1:rad"""
Dimensions = tuple[tuple[str, int], ...]
_UNITS: dict[str, tuple[Fraction, Dimensions]] = {}  # name: (size in base units, dimensions)
for _entry in _TABLE.split():
    _names, _size, _bases = re.split("[=:]", _entry.strip("*"))
    _dimensions = tuple((base, int(power or 1)) for base, power in re.findall(r"([^\W\d]+|[$€¥₹])(-?\d*)", _bases))
    for _name in _names.split(","):
        _UNITS[_name] = Fraction(_size), _dimensions
        for _prefix, _power in zip(_PREFIXES, _POWERS_OF_10, strict=True):
            if _entry[0] == "*":
                _UNITS.setdefault(_prefix + _name, (Fraction(_size) * Fraction(10) ** _power, _dimensions))
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_NO_NOUN = re.compile(  # words that qualify a number, or stand for several: 5 pairs are 10
    r"(?i)(?:or|and|but|if|is|mod|modulo|plus|minus|times|over|choose|divided|by|than|least|most|more|less|about|to|maybe|"
    r"squared|cubed|doubled|tripled|perhaps|possibly|undefined|none|never|wrong|false|(?:not?|factorial|inverse|reciprocal|"
    r"negative|opposite|percent|hal(?:f|ve)|dozen|score|couple|pair|trio|duo|twin|double|triple|fold|lakh|lac|crore|googol|"
    r"myriad|decade|hundred|thousand|[a-z]*illion|alway|sometime|beside|doe|[a-z]+(?:plet|tet|ward)|[dty][a-z]*ad|"
    r"(?:twent|thirt|fort|fift|sixt|sevent|eight|ninet|centur)ie|quarter|third|fourth|fifth|sixth|seventh|eighth|ninth|"
    rf"tenth|eleventh|twelfth|\w*(?:teen|tie|hundred|thousand|illion)th|{'|'.join(SPELLED)})(?:e?s)?)"
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
_PARTS = re.compile(rf"({_DECIMAL})\s*([a-zA-Z]+)(?:\s*,)?(?:\s+and)?(?:\s+|$)")
_DIGITS = re.compile(r"-?[\d,]+(?:\.\d*)?")
_WORDS = re.compile(r"[^\W\d_]+(?:[ .'-]+[^\W\d_]+)*")
# Letters that are a product of variables: no English word is without a vowel or y.
_PRODUCT = re.compile(r"[b-df-hj-np-tv-xz]+|[xyz]+|[abcx]+|[a-z]")


LESS = re.compile(r"(<|>|\\[lg]e(?![a-z]))")
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
    dimensions: Dimensions
    is_glued: bool  # a letter right after a digit, which may be a variable: 5m
    is_plain: bool = True  # whether the unit may be forgiven: neither dozens nor `incorrect`


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
    if match := re.fullmatch(r"([^,;]+) mod (\w+)", text):  # a congruence
        modulus = Fraction(match[2] if match[2].isdecimal() else 1)
        return Quantity(match[1], modulus, ((f"mod {match[2]}", 1),), is_glued=False, is_plain=False)
    text = _SPELLED_OUT.sub(lambda match: f"{match[1]}{_spelled(match[2])}", text)
    plain = Quantity(text, Fraction(1), (), False)
    parts = [(number(value).value, _known(name)) for value, name in _PARTS.findall(text + " ")]
    if len(parts) > 1 and not _PARTS.sub("", text + " ") and all(unit for _, unit in parts):
        sizes, dimensions = zip(*(unit for _, unit in parts), strict=True)
        if len({*dimensions}) == 1 and all(size > smaller for size, smaller in pairwise(sizes)):
            total = sum(value * size for (value, _), size in zip(parts, sizes, strict=True))
            return Quantity(str(total / sizes[0]), sizes[0], dimensions[0], False)
    sign = {"mu": "μ", "Omega": "Ω"}
    written = re.sub(r"(?<=[\d .])([kM]?) ?\\(mu|Omega)(?: |$)", lambda match: match[1] + sign[match[2]], text)
    written = _MONEY.sub(r"\1\3 \2 ", written, count=1) if _MONEY.match(text) else written
    match = _MEASURED.fullmatch(written)
    if not match or any(match[1].count(opened) != match[1].count(closed) for opened, closed in ("{}", "()")):
        return plain
    value, gap, unit = match.groups()
    measure = _unit(unit)
    if measure is None or not (gap or _known(unit) or not unit.isalpha()):
        return plain
    is_glued = (not gap or "frac" in value) and re.fullmatch(r"[^\W\d_]|[a-zμ][A-KM-Z]", unit) is not None
    return Quantity(value, *measure[:2], is_glued, measure[2] and not (is_glued and unit.isupper()))


def _known(name: str) -> tuple[Fraction, Dimensions] | None:
    lower = name.lower()
    forms = (name, name[0].lower() + name[1:], lower, lower.removesuffix("s"), lower.removesuffix("es"))
    return next((_UNITS[form] for form in forms if form in _UNITS and (form == name or len(form) > 1)), None)


def _unit(text: str) -> tuple[Fraction, Dimensions, bool] | None:
    """Size in base units, the power of each dimension, and whether it may be forgiven; None if the text is no unit."""
    text = re.sub(r"([a-zA-Z]) (?:(squar)|cub)ed\b", lambda match: f"{match[1]}^{2 if match[2] else 3}", text)
    size, dimensions, side, power = Fraction(1), Counter(), 1, 1
    is_plain, has_noun = text not in ("K", "B", "T", "b"), False  # 5 K may be 5,000
    before = ""
    tokens = re.findall(r"(/|[^\W\d_]+|[$€£¢¥₹])(?:\^\{?(-?\d)\}?)?", text)
    for name, exponent in tokens:
        if name in ("/", "per"):
            side = -1
        elif name.lower() in _POWERS:
            power = _POWERS[name.lower()]
        elif (known := _known(name)) is None and (_NO_NOUN.fullmatch(name) or not is_word(name)):
            return None
        else:
            is_counted = bool(known or _COUNTED.fullmatch(name))
            is_named = before in ("/", "per", "of") and name[-1] != "s"
            has_noun |= is_counted
            is_plain &= bool(is_counted or is_named or _HARMLESS.fullmatch(name))
            one, bases = known or (Fraction(1), ((name.lower().removesuffix("s").removesuffix("e"), 1),))
            exponent, power = side * power * int(exponent or 1), 1
            size *= one**exponent
            for base, each in bases:
                dimensions[base] += each * exponent
        before = name
    if power != 1 or len(tokens) > 5:
        return None
    powers = tuple(sorted((base, each) for base, each in dimensions.items() if each))
    return size, powers or (("", 1),), is_plain and has_noun


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
