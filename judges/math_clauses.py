"""What a line says: a value, and behind it clauses, each of them a remark or an offer of another value.

`stated` returns the value or, where others are offered, all of them as a list: 5, but 6 works too. A clause offers a
value with "or" before it, or with two of three signs: the value comes first, only what says that it is right follows,
and a word says that it is possible. Behind a reason, and in another sentence, it must be said to be possible.
"""

import re
from collections.abc import Iterator

from .math_text import known_unit, squeeze

_STOP = r"(?<![.\s])(?<![ap]\.m)(?<!i\.e)\.(?=\s|$)|(?<=[ap]\.m\.)(?= +[A-Z])|\u3002"  # of a sentence; 9 p.m. goes on
_OR = "or|maybe|perhaps|possibly|alternatively|otherwise|else|if not|no,? wait|wait|sorry|I mean"
_BUT = r"but|though|although|however|while|whereas|yet|unless|plus|as well as|along with|together with|that is|i\.e"
_REASON = r"because|since|(?<!well )as(?! well)|so|thus|hence|therefore"
_LIGHT = re.compile(  # words that may stand before a value which comes first
    rf"(?i)(?:[^\w\\=<>]|(?:{_OR}|{_BUT}|and|also|even|then|to|either|just|sometimes|equally|the|answers?|"
    r"values?|option|choice|its?|is|be|"
    r"may|might|could|can|would|should|well|about|approximately|roughly|equivalently|another|other|"
    r"second|possible|there|solution|one|in (?:which|some) cases?)\b)*"
)
_RIGHT = re.compile(  # what may follow the value
    r"(?i)\s*(?:$|[,.!)]|(?:too|also|and|or|as|(?:is|being)(?! (?:the|what|even|odd|prime|\w+er)\b)"
    r"|if|when|may|might|could|would|works?|fits?|holds?|does|\w+n't|"
    r"satisf\w+|possible|instead|otherwise|assuming|for(?! (?:each|the|a)\b))\b)"
)
_POSSIBLE = re.compile(
    r"(?i)\b(?:too|also|may|might|could|would|can|another|possible|arguable|plausible|accept\w*|valid|right|"
    r"correct|works?|fits?|satisf\w+|alternativ\w+|says?|argue|sometimes|otherwise)\b"
)
_NOT = re.compile(
    r"(?i)(?<!if )\bnot\b|n't\b|\b(?:cannot|never|neither|nor|no|rather|extraneous|too [a-z]+|ruled? out|fails?|"
    r"at first.*?think|at first|think\w*|(?:if|without)\b.*\bwould|(?:reject|exclud|discard)\w*|"
    r"(?:impossib|inval|wrong|incorrect|false)\w*)\b"
)
_DASH = r"(?:-+|\u2013|\u2014)"
_ABOUT = re.compile(r"(?i)\b(?:about|approximately|roughly)\b")
_FORMULA = re.compile(r"\$(?!\s)([^$]+)(?<![\s$])\$(?!\d)|\\\((.+?)\\\)")
_FUNCTIONS = "sqrt|sin|cos|tan|log|ln|exp|pi"
_COMPOUND = re.compile(  # $4$ feet $3$ inches
    r"\s*(?:\\(?:cdot|times)\s*|(?!(?:for|at|by|when|where|because|since|as|if|in|of|with|from|on|or|per|is|to|than|"
    r"about|and|after|before|over|within)\b)[a-z]+ (?:and )?)?\$?\d"
)
_WORD = r"[A-Za-z]{2,}\b(?! ?=)"
_CLAUSE = rf"(?:{_WORD}|[aI] [a-z]{{2}}|[a-z] (?:is|are|an?|being|any|some) |[a-z]\.[a-z])"
_REST = re.compile(  # of a line behind its value
    rf"{_STOP}|(?<!and)(?<!or), (?=[a-z]|I )(?={_CLAUSE})(?!and {_WORD} ?[=<>])|; (?=[^;]*[a-z]{{3}})"
    rf"|(?<=[^a-z] )(?:{_BUT}|{_REASON}|which|not|rather|and (?=[a-z]{{2}}\w*(?! ?=)))\b|\s?\u2014"
    rf"| {_DASH} (?={_OR}|(?!{_FUNCTIONS})[a-z]{{2}})|(?<=\d): (?=[a-z]{{2}}|\d+ ?[-+*/])"
    r"|(?<=\S )\((?!mod|base|if|when|for|[^()]*(?:sqrt|sin|cos|tan)\b)(?=[^()]*(?<![\\a-z])[a-z]{2})"
    r"|(?<=\d )\((?=[^a-zA-Z\\]*\))|(?<=^[A-J])(?:, (?=\d)| [-\u2013] | \()"
    r"|(?<=[\ds] )(?:each|every|only|exactly|altogether|in total|in all|(?:when )?rounded|after)\b"
    r"|[\uff0c\uff1b](?=[\u4e00-\u9fff])|(?<=[\dA-J$})])(?= ?[或和])"
)
_PIECE = re.compile(rf"(?i)(?=; |{_DASH} |\([^()]*[a-z]{{2}}|(?<!\w)(?:(?<![\dA-J)}}] )(?:{_OR})|{_BUT}|{_REASON})\b)")
_MARKS = re.compile(r"(?<!\\)\$|\\[()\[\],;:! ]|\\q?quad(?![a-z])|\\text(?:bf|it|rm)?\s*\{([^{}]*)\}")
_IN_ENGLISH = str.maketrans({"或": " or ", "和": " and ", "但": " but ", "也": " also ", "可": " may ", "是": " is "})
_IN_ENGLISH |= str.maketrans("\uff0c\uff1b\u3002", ",;.")
_OPTION = re.compile(r"(?i:option |choice )?\(?[A-J](?![\w']| ?[-=+*/^(])")
_START = r"(?:(?<!\w)[a-zA-Z]\w? ?= ?)?(?:- ?)?"
_LETTER = r"(?<![\w'.])[a-zA-Z](?= ?[-+*/^_]\W*\w\b)"
_COMMAND = r"\\(?!q?quad|approx|blacksquare|square|Box|mathrm|therefore)[a-zA-Z{]"
_DIGIT = r"[.|]?\d|(?:two|three|four|five|six|seven|eight|nine|ten)\b"
_BRACKETS = r"[(\[](?![^()]*(?<![\\a-z])[a-z]{2})[^()\[\]]*[)\]]"
_VALUES = {
    "letter": re.compile(r"(?<![\w'.])[b-zB-Z](?![\w'-]|\.[a-z])"),
    "option": re.compile(r"\b[A-J]\b(?!')"),
    "formula": re.compile(
        rf"{_START}(?:{_BRACKETS}|{_DIGIT}|{_COMMAND}|{_LETTER})(?:{_BRACKETS}|(?! [a-zA-Z]{{2,}}\b|, )[^)])*"
    ),
    "text": re.compile(r"\b(?!(?:or|maybe|perhaps|possibly|alternatively|otherwise|else)\b)\w.*"),
}


def stated(line: str) -> str:
    """The value at the beginning of a line, or the list of the values that the line offers."""
    if re.search("other way around|vice versa", line):
        return line
    formula = _FORMULA.match(line)
    if formula and _COMPOUND.match(line, formula.end()):
        line = " ".join(_MARKS.sub(r" \1 ", line).split())
    elif formula:
        return with_offers(formula[1] or formula[2], line[formula.end() :])
    line = re.sub(r"^(?:(?:either|both) |(?:an?|the) (?!and|or)(?=[a-z]{3}))", "", line)
    for rest in _REST.finditer(line):
        value = line[: rest.start()]
        if len(re.findall(r"[(\[{]", value)) <= len(re.findall(r"[)\]}]", value)):
            return with_offers(value.rstrip(" ,;"), line[rest.start() :])
    return line.rstrip(" ,;")


def with_offers(value: str, rest: str, *, is_boxed: bool = False) -> str:
    """A value with those that the rest of its line offers, as a list."""
    found = value
    rest = _MARKS.sub(r" \1 ", rest.translate(_IN_ENGLISH))
    rest = re.sub(r"(\d+) (?:in|out of) (\d+)", r"\1/\2", rest)
    if _kind(value) == "option":
        rest = re.sub(r"\((?![^()]*\b[A-J]\b)[^()]*\)", " ", rest)  # B (12) or C (13)
    rest = re.sub(r" +(percent\b)?", lambda match: "%" if match[1] else " ", rest)
    own_units = _units(f"{value} {rest[:30].partition(' or ')[0]}")
    for count, sentence in enumerate(re.split(_STOP, rest)):
        is_reason = False
        for piece in _PIECE.split(sentence):
            is_reason = is_reason or bool(re.match(rf"(?:{_REASON})\b", piece))
            is_or = not is_reason and bool(re.match(rf"(?i)(?:{_OR})\b|\([^a-z]*\)\W*$", piece))
            must_be_possible = is_reason or count > 0 or piece.startswith("(") or (is_boxed and "=" in piece)
            if is_or and own_units and _units(piece) - own_units:  # 90 minutes, or 1.5 hours
                continue
            for offer in _offers(value, piece, is_or=is_or, is_sentence=count > 0, must_be_possible=must_be_possible):
                found += offer
    return found


def _offers(value: str, piece: str, *, is_or: bool, is_sentence: bool, must_be_possible: bool) -> Iterator[str]:
    """Each value that a piece of a sentence offers beside the first one, with the separator before it."""
    kind = _kind(value)
    unit = re.search(r"(?: [a-z]+)?$", value)[0]
    start = 0  # of what stands between two values
    is_list = True  # so far there were only offers
    for match in _VALUES[kind].finditer(piece):
        before = piece[start : match.start()]
        if start == 0:
            before = re.sub(r"^.*(?=,|\b(?:it is|then)\b)", "", before)
            if re.match(r"\W*(?:if|when|for)\b", piece[match.end() :]):  # 4 if n is even and 3 if n is odd
                before = re.sub(r"^.*(?=\band\b)", "", before)
        clause = piece[start:]
        start = match.end()
        if _says_the_same(value, match[0]) or (_ABOUT.search(before) and not value.strip().isdigit()):
            is_list = False
            continue
        is_first = is_list and bool((before.strip() or is_sentence) and _LIGHT.fullmatch(before))
        is_possible = bool(_POSSIBLE.search(clause))
        if kind == "formula" and match[0].isalpha() and not (is_or or is_possible):  # 8, i.e. eight
            continue
        is_offered = is_first
        if not is_or:
            signs = [is_first, is_possible, bool(_RIGHT.match(piece[start:].removeprefix(unit)))]
            is_offered = signs.count(True) >= 2
            if must_be_possible:
                is_offered = is_first and is_possible
            is_offered = is_offered and kind != "text" and len(_NOT.findall(clause)) % 2 == 0
        is_list = is_offered
        if is_offered:
            yield f"{_separator(piece, before)}{match[0]}"


def _units(text: str) -> set[str]:
    """The units that a text names."""
    words = re.findall(r"(?<![\\a-z])[a-z]{2,}|(?<=\d )[mgsl](?![a-z])", re.sub(r"\^\{?\\circ", " degrees", text))
    return {known_unit(word) for word in words if word not in ("in", "am", "pm")} - {None}


def _separator(piece: str, before: str) -> str:
    if before.strip(", ") == "and":
        return " and "
    return " or " if re.match(r"[a-zA-Z(]", piece) else ", "


def _kind(value: str) -> str:
    value = _MARKS.sub(r"\1", value)
    if _OPTION.match(value):
        return "option"
    if re.fullmatch(r"\W*[a-zA-Z]\W*", value):
        return "letter"
    return "formula" if re.search(r"[\d\\]", value) else "text"


def _says_the_same(value: str, other: str) -> bool:
    """Whether one side of an equation is the value, whose unit may be left out: 5, as 2+3=5."""
    sides = {squeeze(side).strip("(). ") for side in re.split("[=<>]", other)}
    number = re.match(r"[\d.,/]*\d", value)
    own = squeeze(value.rpartition("=")[2]).strip("(). ")
    return own in sides or bool(number and number[0] in sides)
