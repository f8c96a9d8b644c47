"""One way to write for one meaning: `clean`, before an answer is read.

First signs beyond ASCII become what LaTeX has for them, then commands of LaTeX that mean the same become one, without
fonts and spaces.
"""

import re
from functools import lru_cache
from unicodedata import name, normalize

FORMULA = re.compile(r"(?<!\\)\$(?![\s$])([^$]+)(?<![\s\\])\$(?!\d)")  # not of $5 and $6
_DIGITS = re.compile(r"-?[0-9,]+(?:\.[0-9]*)?")

# Signs beyond ASCII, and what they mean.
_MEANING = {
    "\u00d7": r"\times ",
    "·⋅∙•": r"\cdot ",
    "÷\u2044\u2215": "/ ",
    "∞": r"\infty ",
    "≤⩽≦": r"\le ",
    "≥⩾≧": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "\u222a": r"\cup ",
    "∩": r"\cap ",
    "\u2216": r"\setminus ",
    "\u2208": r"\in ",
    "∅⌀Ø": r"\emptyset ",
    "°": r"^\circ ",
    "±": r"\pm ",
    "∧": r"\land ",
    "\u2228": r"\lor ",
    "\u2010\u2011\u2012\u2013\u2014\u2015\u2212": "-",
    "\u211d": r"\mathbb{R}",
    "\u2124": r"\mathbb{Z}",
    "\u2115": r"\mathbb{N}",
    "\u211a": r"\mathbb{Q}",
    "\u2102": r"\mathbb{C}",
    "\u201c\u201d": '"',
    "\u2018\u2019": "'",
    "\u2032": "'",
    "\u2033": "''",
    "\u3000": " ",
    "\u3002\uff61": ".",
    "\uff0c\u3001": ", ",
    "\uff1b": "; ",
    "\u3010": "[",
    "\u3011": "]",
    "\uffe5": "¥",
    "或": " or ",
    "和且": " and ",
}
# alpha to omega, in their order; U+03C2, the final sigma, is one more sigma
GREEK = [name(chr(code)).rpartition(" ")[2].lower().replace("lamda", "lambda") for code in range(0x3B1, 0x3CA)]
_SIGNS = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5E)}  # the wide forms of ASCII
_SIGNS |= {ord(sign): tex for signs, tex in _MEANING.items() for sign in signs}
for _place, _letter in enumerate(GREEK):
    _SIGNS[0x3B1 + _place] = rf"\{_letter} "
    _SIGNS[0x391 + _place] = rf"\{_letter.capitalize()} "

_SWITCH = (
    r"\\(?:(?:rm|bf|it|sf|tt|sl|sc|(?:bf|md)series|(?:it|up|sl|sc)shape|(?:rm|sf|tt)family|boldmath)(?![a-zA-Z])"
    r"|color\s*\{\w+\})"
)
_FONT = (
    r"\\(?:text(?:bf|it|rm|sf|tt|sl|sc|up|md|normal)?|math(?:rm|bf|sf|it|tt|normal)|boldsymbol|bm|pmb|bold|emph|[fhm]box"
    r"|boxed|underline|operatorname|rm|bf|it|sf|tt|(?:text)?color\s*\{\w+\})\s*"
)
_IN_BRACES = r"((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)"
_WRAPPED = rf"{_FONT}\{{{_IN_BRACES}\}}"
_NO_ARGUMENT = r"(?<![}\]^_a-zA-Z])"  # a brace that no command takes
_UNITS = rf"((?:{_FONT}\{{[a-zA-Z. ]+\}}(?:\^(?:\d|\{{-?\d\}}))?(?:\\cdot|\\?[,;: ])*)+)"  # \text{kg}\cdot\text{m}^2
_TRIGONOMETRIC = r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])(?:\s*\^\s*(?:\{\s*\d\s*\}|\d))?"

_BRACKETS = {"lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]", "lparen": "(", "rparen": ")"}
_MATRICES = {"array", "matrix", "smallmatrix", "psmallmatrix", "bsmallmatrix"}
_SYSTEMS = {"array", "matrix", "cases", "dcases", "rcases", "align", "aligned", "alignedat", "gathered", "split"}
_ENVIRONMENT = (
    r"(?P<open>\\\{|[(\[|])?\s*\\begin\{(?P<name>[a-z]+)\*?\}(?:(?<=array\})\s*\{[clr|\s]*\}|(?<=at\})\s*\{\d\})?"
    r"(?P<rows>(?s:.*?))\\end\{(?P=name)\*?\}(?:\s*(?P<close>[)\]|]))?"
)
_CASE = re.compile(r"&|(?<![a-z])(?:if|for|when|otherwise)(?![a-z])")


_OF_X = r"(?:[a-z] *(?:is|can be|may be|=|\\in(?![a-z])) *)?"


def _as_fraction(match: re.Match) -> str:
    above, below = normalize("NFKC", match[0]).split("\u2044")
    return rf"\frac{{{above}}}{{{below}}}"


def _environment(match: re.Match) -> str:
    """A system of equations side by side, and any matrix as one of two kinds."""
    name = match["name"]
    opening = match["open"] or ""
    closing = match["close"] or ""
    rows = re.sub(r"(?:\\\\\s*)+$", "", match["rows"])
    system = _system(rows) if name in _SYSTEMS and opening in ("", r"\{") else None
    if system:
        return system + closing
    if name not in _MATRICES:
        return match[0].replace(match["rows"], rows)
    kind = "vmatrix" if opening + closing == "||" else "pmatrix"
    matrix = rf"\begin{{{kind}}}{rows}\end{{{kind}}}"
    return matrix if opening + closing in ("()", "[]", "||") else f"{opening}{matrix}{closing}"


def _system(text: str) -> str | None:
    """Rows that are all equations or inequalities, as a list; None for others, such as the cases of a function."""
    rows = [re.sub(r"&\s*(?=[=<>\\])|(?<==)\s*&|^\s*&", "", row).strip(" ,;.\n") for row in text.split(r"\\")]
    rows = [row for row in rows if row]
    if not rows or any(_CASE.search(row) or not re.search(r"[=<>]|\\[lg]e", row) for row in rows):
        return None
    joined = (", " if all("=" in row for row in rows) else " and ").join(rows)
    return joined.replace(", =", " =")  # a step of the same equation


def _reals(match: re.Match) -> str:
    """All real numbers, or all except those of a list."""
    if match["out"] is None:
        return r"\mathbb{R}"
    out = re.sub(r",? (?:and|or) (?:[a-z] ?= ?)?", ", ", match["out"].rstrip(" ."))
    return rf"\mathbb{{R}} \setminus \{{{out}\}}"


def _exceptions(match: re.Match) -> str:
    """x is neither 1 nor 2, as a set."""
    out = re.sub(rf"(?:,|,? and) ?{match['x']} ?\\ne ?", ", ", match["out"])
    return rf"\mathbb{{R}} \setminus \{{{out}\}}"


def _compiled(rewrites: tuple) -> list[tuple]:
    return [(re.compile(pattern), new) for pattern, new in rewrites]


_BEYOND_ASCII = _compiled(
    (
        (r"[\u00ad\u200b-\u200f\u2060\ufeff\u2700-\u2757\ufe0f\U0001f300-\U0001faff]", ""),  # without width or meaning
        (r"[⁰¹²³⁴-⁹]+\s*\u2044\s*[₀-₉]+|[¼-¾⅐-⅞]", _as_fraction),
        (r"[⁰¹²³⁴-⁹⁻ⁱⁿ]+", lambda match: f"^{{{normalize('NFKC', match[0])}}}"),
        (r"[₀-₉ₐ-ₜᵢ-ᵥⱼ]+", lambda match: f"_{{{normalize('NFKC', match[0])}}}"),
        (r"(?<=\d)(\s*)[\u03bc\u00b5](?=[mgsL]\b)", r"\1micro"),
        (r"(?<=\d)\s*[\u03a9\u2126](?!\w)", " ohms"),
        (r"[\u00b5\u03d0-\u03d5\u03f0-\u03f5\u2126\U0001d400-\U0001d7ff]", lambda match: normalize("NFKC", match[0])),
        (r"∛\s*(?:\(([^()]*)\)|(\d+|[a-z]))", r"\\sqrt[3]{\1\2} "),
        (r"√\s*(?:\(([^()]*)\)|(\d+|[a-z]))", r"\\sqrt{\1\2} "),
    )
)
_REWRITES = _compiled(  # what changes no meaning, in this order
    (
        (r'^\s*(\*\*|"|`)(.*)\1\s*$', r"\2"),  # bold type and code of markdown
        (r"\*\*", "^"),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\([lr](?:brace|brack|paren))(?![a-zA-Z])", lambda match: _BRACKETS[match[1]]),
        (r"\\\\\s*\[\s*-?[\d.]+\s*(?:pt|ex|em|mm|cm|in)\s*\]|\\(?:cr|tabularnewline)(?![a-zA-Z])", r"\\\\"),  # rows
        (rf"\{{\s*{_SWITCH}{_IN_BRACES}\}}", r"{\\text{\1}}"),
        (r"\{\s*\{([^{}]*)\}\s*\}", r"{\1}"),
        (rf"{_NO_ARGUMENT}\{{\s*({_FONT}\{{){_IN_BRACES}\}}\s*\}}", r"\1\2}"),
        (rf"\\[dtc]?frac\s*\{{\s*{_UNITS}\}}\s*\{{\s*{_UNITS}\}}(?!\s*\^)", r" \1/\2 "),
        (r",\s*\\!\s*(?=\d)", ","),  # 1,\!234
        (r"\\[,;:!]", " "),
        (r"\\(?:left|right)\s*\.", ""),
        (r"\\(?:left|right|displaystyle|textstyle|limits|hline|[bB]igg?[lrm]?|large|Large|huge)(?![a-zA-Z])", ""),
        (r"\\var(?=(?:epsilon|theta|kappa|rho|sigma|phi)(?![a-zA-Z]))", r"\\"),
        (r"\\q?quad(?![a-zA-Z])|(?<!\\)\\(?= )|~", " "),
        (r"\{,\}", ","),
        (r"\\([$%])", r"\1"),
        (rf"(?<=,){_WRAPPED}", r"\1 "),  # no blank behind a separator: that would be another style of list
        (_WRAPPED, r" \1 "),
        (_WRAPPED, r" \1 "),  # one in another
        (r"\s{2,}", " "),
        (r"(?<=[a-zA-Z])(?<!log)\s*_\s*(?:([a-zA-Z\d])|\{\s*(\w+)\s*\})", r"_{\1\2}"),
        (r"\^\s*(?:\\prime(?![a-z])|\{\s*\\prime\s*\})", "'"),
        (r"\s*(?:\\colon(?![a-z])|(?<=\d)(?:\\math\w+)?(?:\{:\}| :|:(?= )))\s*", ":"),
        (rf"{_SWITCH}|\\(?:bm|boldsymbol|math(?:rm|bf|it))(?![a-zA-Z])", ""),
        (r"\^\s*\{?\\circ\}?(?:\{\})?|\\degree(?![a-zA-Z])", " degrees "),
        (r"(?i:\bdegrees?)\s*([CF])(?:elsius|ahrenheit)?\b", r"degrees\1 "),
        (r"\\(?:[dtcs]|nice)frac", r"\\frac"),
        (r"\\frac\s*(\\pi|\w)\s*(\\pi|\w)", r"\\frac{\1}{\2}"),
        (r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"\\binom\s*(\w)\s*(\w)", r"\\binom{\1}{\2}"),
        (r"\\(?:varnothing|empty)(?![a-zA-Z])", r"\\emptyset"),
        (rf"\\([pb]?matrix)\s*\{{{_IN_BRACES}\}}", r"\\begin{\1}\2\\end{\1}"),  # of plain TeX
        (_ENVIRONMENT, _environment),
        (r"[<>]=", lambda match: r"\le " if match[0] == "<=" else r"\ge "),
        (r"\\([lgn]e)q(?:slant)?(?![a-zA-Z])", r"\\\1"),
        (r"\\not\s*=", r"\\ne "),
        (r"\\(?:vee|lor)(?![a-zA-Z])", " or "),
        (r"^\s*\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid|\||:)(.*)\\\}\s*$", r"\1"),
        (r"(?<!\\)\\[()\[\]]|(?i:^\s*(?:the )?(?:final )?answer(?: is)?\b:?)|^\s*(?:最终)?答案[是为:]*", " "),
        (r"(?<![\\a-zA-Z])(pi|sqrt|sin|cos|tan|ln|log|exp)(?![a-zA-Z])", r"\\\1"),
        (r"\\lg(?![a-zA-Z])", r"\\log_{10}"),
        (r"\\log_(?:e|\{e\})", r"\\ln "),
        (rf"({_TRIGONOMETRIC}\s*[({{]?\s*)(\d+(?:\.\d+)?)\s*degrees", r"\1\\frac{\2\\pi}{180}"),
        (r"(?<![a-zA-Z])\\?abs\s*[({]((?:[^(){}]|\([^()]*\))*)[)}]", r"|\1|"),
        (r"^\s*\\approx(?![a-z])", ""),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?i)(?<=\d)\s*(?:percentage|percent|pct)\b", "%"),
        (r"(?i)(?<=:\d\d)\s*([ap])\.? ?m\b\.?", lambda match: f" {match[1].lower()}m"),  # 3:45 PM
        (r"\s+\^", "^"),
        (r"(?i)^\s*([-+]?)\s*infinity\s*$", r"\1\\infty"),
        (
            rf"(?i)^\s*{_OF_X}(?:the set of )?(?:all|any) real(?: number)?s?\b"
            r"(?:,? except (?:for )?(?:[a-z] ?= ?)?(?P<out>.+))?\s*$",
            _reals,
        ),
        (r"(?i)^\s*(?:(?:there (?:is|are) )?no (?:real )?solutions?|(?:the )?empty set)\s*$", r"\\emptyset"),
        (r"\\tag\*?\s*\{[^{}]*\}|\\(?:checkmark|blacksquare|square|Box)(?![a-zA-Z])\s*$", ""),
        (r"(?<=\d) ?\( ?([a-z]{3,}s) ?\)\s*$", r" \1"),
        (r"^\s*(?P<x>[a-z]) ?\\ne ?(?P<out>[^,;]+?(?:(?:,|,? and) ?(?P=x) ?\\ne ?[^,;]+?)+)$", _exceptions),
        (r"\.\.\.|\\[lc]dots", r"\\dots "),
        (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
    )
)


@lru_cache(maxsize=64)
def clean(text: str) -> str:
    """The text with one sign for one meaning, without what has none: $, \\left, \\text{}, spaces, a last period."""
    if _DIGITS.fullmatch(text):  # most answers
        return text.rstrip(".,")
    if not text.isascii():
        for pattern, new in _BEYOND_ASCII:
            text = pattern.sub(new, text)
        text = text.translate(_SIGNS)
    text = re.sub(r"(?<!\.)\.$", "", text.strip())
    text = re.sub(r"(?<![\\ ,;])[ ,;]+$|(?<!\\)\\$", "", text).strip()  # not the end of 7\,
    text = FORMULA.sub(r" \1 ", text).strip()
    while len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    return re.sub(r"(?<!\.) ?\.$", "", " ".join(text.split()))
