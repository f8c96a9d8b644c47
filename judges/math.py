"""Finds the final answer of a worked solution and compares it with the expected one. Pure; runs in a pool.py worker.

`extract` looks for the answer behind a closed thought (reply.py), in this order: a last line that states the answer
below a box ("Answer: 5", "#### 5"); the last complete \\boxed{} or \\fbox{}, with those right beside it; <answer>; the
text after the last "####" (GSM8K); the text after the last "answer is" or "answer:". `equal` reads from the outside in:
lists and brackets, names (x = 5), units, then numbers and words as math_text.py reads them, after math_typography.py.
Everything else goes to sympy (math_formula.py). Nothing here uses SIGALRM: the deadline of the pool always holds.
Arguments are (gold, answer): the order matters for names, units and bases.
"""

import re
import sys
from fractions import Fraction
from typing import NamedTuple

from .math_clauses import stated, with_offers
from .math_formula import same_formula
from .math_text import (
    GROUPED,
    LESS,
    NAME,
    Number,
    as_interval,
    in_order,
    is_word,
    number,
    quantity,
    split,
    squeeze,
    with_slash,
    without_domain,
)
from .math_typography import clean
from .reply import behind_thought

MAX_ANSWER_CHARS = 2_000  # a longer one is no answer (parse_fail)
MAX_LINE_CHARS = 2_100  # of a line that has an answer; so it is too long if it has no end
MAX_LINE_WORDS = 3  # of an answer in a last line; with more it is a sentence
MAX_REPLY_CHARS = 200_000  # only the end of a longer reply is read
SELF_TESTS = (  # (reply, answer, outcome): what this file must say before a run may start
    (r"so \boxed{\frac{1}{2}}", "0.5", "ok"),
    (r"\boxed{(x+1)^2}", "x^2+2x+1", "ok"),
    (r"\boxed{2}", "0.5", "wrong"),
    ("half", "0.5", "parse_fail"),
)
# A worker does this job before deadlines count: it imports sympy, and the modules that sympy imports to simplify.
FIRST_JOB = {"reply": r"\boxed{(x+1)^2}", "answer": "x^2+2x+1", "strict": False}
STRICT_SELF_TESTS = (("Answer: 5", "5", "ok"), ("Answer: 4", "5", "wrong"), (r"\boxed{5}", "5", "parse_fail"))

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?:(\{)|(-?\d[\d.,]*(?<=\d)))|\\.", re.DOTALL)
_BOX_NAME = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-z])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_MARKS = r"(?:[ \t$~]|\\[,;:! ()\[\]]|\\q?quad)*"  # blanks and the ends of formulas
_AND = r"(?:[,;\uff0c\u3001]|(?:,\s*)?(?:and|or|[和及或]|\\text\s*\{\s*,?\s*(?:and|or)\s*\}))"
_BOX_OF = r"(?P<name>(?:\\[a-zA-Z]+|[^\W\d_])(?:_\w|_\{\w+\}|[₀-₉]+)?) ?="  # x = \boxed{3}
_BESIDE = re.compile(rf"{_MARKS}{_AND}{_MARKS}(?:{_BOX_OF}{_MARKS})?")  # between two boxes of one answer
_MINUS = re.compile(r"(?<![\w)}\]\s]) ?-$")  # -\boxed{5}
_TIMES_TEN = re.compile(r"\s*\\(?:cdot|times)\s*10\^(?:\d|\{-?\d+\})")
_BEFORE_BOX = re.compile(rf"(?<![a-zA-Z_\\]){_BOX_OF}[ $]{{0,2}}$")
_OR_BEFORE = re.compile(  # 6 or \boxed{5}
    rf"(?<![^\s$(])(?P<value>[^\s${{]*(?:\{{[^{{}}]*\}}[^\s${{]*)*[\d}}]|[A-J]){_MARKS},?\s*"
    rf"(?:\\text\s*\{{\s*)?or\s*\}}?{_MARKS}(?:[a-z] ?= ?)?$"
)
_ANSWER = (
    r"(?:answers?(?: to (?:the|this|our) [a-z]+)?|solutions?(?= (?:is|are) \$?(?:[a-z] ?=|\d))"
    r"|(?:correct|right) (?:option|choice))"
)
_ANSWER_ZH = r"(?:答案|正确选项|故选|答(?=[:\uff1a]))"
_ANSWER_IS = re.compile(
    rf"(?i)\b{_ANSWER}\**\s*(?:(?:is|are|equals|(?:should|must|will|would) be|(?:comes|turns) out to be)\b"
    r"(?:,?\s+(?:of course|therefore|thus|hence|then|so|now|just|indeed|also|still|always|[a-z]+ly|about|equal to"
    r"|given by)\b,?)*\s*:?|[:=\uff1a])[\s*]*"
    rf"|{_ANSWER_ZH}\**(?:\u3011|\s*[是为為选選]?\**\s*[:=\uff1a\uff1d]|\s*[是为為选選]|(?<=选))[\s*:\uff1a]*"
)
_OR_THE_ANSWER = re.compile(r"(?i)\bor(?:,? (?:maybe|perhaps|possibly))?,? +(?:(?:the|my|final|correct|other) +)*$")
_HEADING = re.compile(  # ## Answer
    r"(?im)^[ \t]*(?:#{1,6}[ \t]*(?:\*\*|__)?|\*\*|__)(?:(?:(?:the|my|your) )?(?:final )?answer|(?:最终)?答案)"
    r"[ \t]*[:\uff1a]?(?:\*\*|__)?[ \t]*[:\uff1a]?[ \t]*\n\s*"
)
_SECTION = re.compile(r"\s*[A-Za-z]{3,}[ :]")  # #### Step 4
_DISPLAYED = re.compile(r"(?<!\\)\$\$([^$]+)\$\$|\\\[((?:[^\\]|\\[^\[\]])+)\\\]")
_GOES_ON = re.compile(r"(?<!\s)\s+(?=or\b)|(?<=\bor)\s+")  # with the line before
_OR_ZH = re.compile(r"(?<!\s)(?P<start>[\uff08(])?[\uff0c,]?\s*(?:也?可能是|也可以是|或者?是?)\s*(?=[\d\\$A-J])")
_RIGHT_OPTION = re.compile(  # option B is correct
    r"(?:[Oo]ption |[Cc]hoice |(?P<bracket>\())?\b(?P<letter>[A-J])(?(bracket)\)) is"
    r" (?:(?:the )?(?:correct|right) (?:answer|option|choice)|(?:correct|right)(?= ?[.,]|\s*$))"
)
_LAST_LINE = re.compile(  # one that states the answer
    r"(?i)(?:.*[.!?] )?[ \t>*_#]*"
    r"(?:####|(?:(?:so|thus|therefore|hence),? )?(?:the |my )?(?:final )?answer\**[ \t]*(?:is\b|:)"
    r"|(?:(?:所以|因此|故)[\uff0c,]?)?(?:最终)?答案\**[ \t]*[是为為:\uff1a]).+"
)
# A number, a formula, an option or a variable.
_STATED = re.compile(r"(?![a-z]{3,}[ :]).*[\d\\].*|\W*[A-J]\W*|\W*[a-z]\W*", re.DOTALL)
_VERB = r"(?:are|were|had|have|(?!minus|plus|times|less|perhaps|versus|always|across)[a-z]+s)"
_BEFORE_VALUE = re.compile(  # a + b = **7**; There are **7** ways; It is 7
    r"^.*?=\s*(?=\*\*[^*]+\*\*)|^(?!\D*(?:\b(?:not?|never|than|least|most|if)\b|n't))[A-Z][a-z]* [^*\d\\$]*"
    rf"(?:(?=\*\*[^*]*\d[^*]*\*\*)|\b{_VERB} (?=[\d$\\-]))"
)
_BOLD = re.compile(r"\*\*(?![\w({\\$-])|(?<![\w)\]}])\*\*")  # not a power
_PAIRS_OF_MARKS = [  # bold, italics: not a product or an index
    re.compile(r"(?<![\w)\]}\\])(__)(?=\S)(.+?)(?<=\S)\1(?!\w)"),
    re.compile(r"(?<![\w)\]}\\*])(\*)(?=[^\s*])(.+?)(?<=[^\s*])\1(?![\w*])"),
    re.compile(r"(?<![\w)\]}\\])(_)(?=[^\s_])(.+?)(?<=[^\s_])\1(?!\w)"),
]
_ARTICLE = r"A (?!(?:or|and|nor|but|is|was|if|as|because|since|not|would|cannot|can|with)\b)[a-z]{2,}"
_CHOICE = re.compile(  # B, (B), option B. and (B) 12, whose text may not name another option
    rf"(?:(?i:option|choice) |选项)?[(\[]?([A-J])"
    rf"(?:[)\]]?[.:)]?|(?:[)\]][.:]?|[.:]) ((?!.*\b(?!{_ARTICLE})[A-J](?![a-zA-Z])).+))"
)
_SEPARATOR = r"[,;]|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])"
_OR = re.compile(r"\s*,?\s*(?<![a-zA-Z\\])or(?![a-zA-Z])\s*")
_GROUPS = re.compile(r"(?<=\d),(?=\d{3}(?![\dA-Za-z]))")
_LETTER = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]")
_SET = re.compile(r"\\\{|\\emptyset")
_BRACKETS = re.compile(r"(\\?[{(\[])(.*?)(\\?[})\]])", re.DOTALL)
_NAMED = re.compile(
    rf"({NAME}|[A-Za-z]{{2,}}(?: [A-Za-z]+)+|\((?:\s*{NAME}\s*,)+\s*{NAME}\s*\))\s*"
    r"(?:=|\\in(?![a-z])|(?<=[a-zA-Z]{2}):)\s*(.+)",
    re.DOTALL,
)
_POINT = re.compile(r"(?i:point )?(?P<name>[A-Z](?:_\{\w+\})?'*) ?(?P<value>\([^,]+,.+\))")
_GRAPH = re.compile(r"(?P<y>y)(?P<primes>'*)|[a-zA-Z](?P<primes_of_f>'*)\(x\)")
_MEMBER = re.compile(rf"{NAME}\s*\\in(?![a-z])\s*")
_SETS = re.compile(r"\\(?:cup|cap|setminus|mathbb|emptyset|varnothing|le|ge|ne|in)(?![a-z])|[<>]|\\\{")
_STEPS = re.compile(r"\\(?:to|implies|iff|land|wedge|(?!over)\w*arrow)(?![a-z])")
_UNORDERED = {"", "{}", "cup"}  # kinds of lists, by their brackets
_ALIKE = ({"", "{}"}, {"", "()"})
_BASE = re.compile(  # 2516_8, 1A_{16}, not 2x_1
    r"\(?(-?(?:\d+|(?:\d*[A-Z]+\d[\dA-Z]*|\d+[\dA-Z]+)(?=\)?_\{?\s*[1-9]\d)))\)?_\{?\s*(\d+|[a-z]+)\s*\}?"
)
# Compared as text: ratios, times, congruences, approximations, repeating decimals, sums, dates, scores, marked options.
_OPAQUE = re.compile(
    r":| mod |\\(?:approx|overline|bar|d?dot|sum|prod|int)(?![a-z])|\d+([-/])\d+\1\d+|^\d+-\d+$|^\([A-J]\)"
)
_ANGLE = re.compile(r"\\(?:pi|sin|cos|tan|cot|sec|csc)(?![a-z])")


def grade(job: dict) -> dict:
    """Grades a job {reply, answer, strict}: returns {outcome, extracted}.

    strict is DAPO's rule (Yu et al. 2025): the text after the last "Answer:" within the last 300 characters must be the
    gold answer, apart from typography, a name and a unit: DAPO drops them too.
    """
    gold = gold_answer(job["answer"])
    if job["strict"]:
        last = behind_thought(job["reply"])[-300:]
        answer = gold_answer((re.findall(r"(?i)Answer\s*:\s*([^\n]+)", last) or [""])[-1])
    else:
        answer = extract(job["reply"])
    if not answer:
        return {"outcome": "parse_fail", "extracted": None}
    right = _bare(answer) == _bare(gold) if job["strict"] else equal(gold, answer)
    return {"outcome": "ok" if right else "wrong", "extracted": canonical(answer)}


def extract(reply: str) -> str | None:
    """The final answer; None if there is none, its box is empty, or it has more than MAX_ANSWER_CHARS."""
    reply = _in_lines(behind_thought(reply)[-MAX_REPLY_CHARS:])
    head, tag, _ = reply.rpartition("</answer>")
    answer = _last_line(reply) or _last_box(reply)
    if answer is None and tag and "<answer>" in head:
        answer = head.rpartition("<answer>")[2]
    elif answer is None:
        behind_hashes = reply.rpartition("####")[2]
        is_section = _SECTION.match(behind_hashes) and _ANSWER_IS.search(behind_hashes)
        if "####" in reply and not is_section:
            answer = _after_hashes(reply)
        else:
            answer = _after_words(reply)
    answer = answer.strip()
    return answer if 0 < len(answer) <= MAX_ANSWER_CHARS else None


def gold_answer(answer: str) -> str:
    """The final answer in the answer of a dataset: a box, the text after "####" (GSM8K), or the whole text."""
    box = _last_box(answer)
    return box if box is not None else answer.rsplit("####", 1)[-1].strip()


def _in_lines(reply: str) -> str:
    """The reply with each answer in the line that states it: below a heading, displayed, or behind "or"."""
    reply = _DISPLAYED.sub(lambda match: f"${' '.join((match[1] or match[2]).split())}$", reply)
    reply = _HEADING.sub("Answer: ", reply)
    reply = _RIGHT_OPTION.sub(r"Answer: \g<letter>", reply)
    reply = _OR_ZH.sub(r"\g<start> or ", reply)
    return _GOES_ON.sub(" ", reply)


def _last_line(reply: str) -> str | None:
    """What the last of the lines below the last box says that begins as one that states the answer."""
    *boxed, below = _BOX_NAME.split(reply)
    lines = [line for line in below.split("\n")[1:] if _LAST_LINE.fullmatch(line)]
    if not boxed or not lines:
        return None
    line = lines[-1]
    answer = _after_hashes(line) if "####" in line else _after_words(line)
    if re.search(r"(?i)answer\**\s*is\b|答案", line) and not _STATED.fullmatch(answer):  # The answer is the larger one.
        return None
    words = re.findall("[a-zA-Z]{2,}", re.sub(r"\\[a-z]+", "", answer))
    return answer if answer.strip() and len(words) <= MAX_LINE_WORDS else None


def _last_box(text: str) -> str | None:
    """The content of the last box, and of those right beside it, as a list; None if there is none, and "" if the last
    one does not close: what stood before was given up. A list has the names that stand before its boxes: x = 3, y = 5.
    """
    found = [token for token in _BOX.finditer(text) if token.lastindex]
    if not found:
        return None
    contents: list[str] = []
    named: list[str] = []
    next_start = len(text)
    separator = ", "
    for token in reversed(found):
        content, end = _content_of_box(text, token)
        if content is None:
            break
        if contents and not _BESIDE.fullmatch(text, end, next_start):
            break
        if contents and re.search(r"\bor\b", text[end:next_start]):
            separator = " or "
        if not contents:
            rest = text[end:].partition("\n")[0][:MAX_LINE_CHARS]
        if _MINUS.search(text, max(0, token.start() - 3), token.start()):
            content = f"-{content}"
        power = _TIMES_TEN.match(text, end)
        if power:
            content += power[0]
        name = _BEFORE_BOX.search(text[max(0, token.start() - 30) : token.start()])
        contents.insert(0, content)
        if name:
            content = f"{name['name']}={content}"
        named.insert(0, content)
        next_start = token.start()
    if len(contents) > 1:
        contents = named
    if not contents:
        return ""
    before = _OR_BEFORE.search(text[max(0, next_start - 80) : next_start])
    if before:
        contents.insert(0, before["value"])
        separator = " or "
    return with_offers(separator.join(contents), rest, is_boxed=True)


def _content_of_box(text: str, token: re.Match) -> tuple[str | None, int]:
    """What is in a box, and where it ends; None if it does not close. Braces of a set are escaped, and do not count."""
    if token[2]:  # \boxed 5
        return token[2], token.end()
    depth = 1
    for brace in _BRACE.finditer(text, token.end()):
        if brace[0] == "{":
            depth += 1
        elif brace[0] == "}":
            depth -= 1
        if depth == 0:
            return text[token.end() : brace.start()], brace.end()
    return None, len(text)


def _after_hashes(text: str) -> str:
    """What stands behind the last ####, in its line or below; #### behind it, in the same line, ends it."""
    head, _, tail = text.rpartition("####")
    line_before = head.rpartition("\n")[2]
    is_end = not tail.partition("\n")[0].strip() and "####" in line_before
    if is_end:
        answer = line_before.rstrip("#").rpartition("####")[2]
    else:
        answer = tail.strip().partition("\n")[0]
    return _unmarked(answer[:MAX_LINE_CHARS])


def _after_words(text: str) -> str:
    """What stands behind the last "answer is" or "answer:", or below a heading, in its line."""
    parts = _ANSWER_IS.split(_HEADING.sub("Answer: ", text))
    if len(parts) < 2:
        return ""
    line = parts[-1].strip().partition("\n")[0][:MAX_LINE_CHARS]
    if _OR_THE_ANSWER.search(parts[-2][-MAX_LINE_CHARS:]):
        line = f"{parts[-2]}{line}"
    return stated(_unmarked(_BEFORE_VALUE.sub("", line, count=1)))


def _unmarked(line: str) -> str:
    """The line without marks of markdown: bold type, which may have begun before, italics, code, #s at its end."""
    line = re.sub(r"[ \t]+#+\s*$|</?(?:b|i|em|strong)>", "", line).replace("`", "")
    line = _BOLD.sub("", re.sub(r"(?<=\S)\*\*[!:](?=\s|$)", ".", line))
    for marks in _PAIRS_OF_MARKS:
        line = marks.sub(r"\2", line)
    return re.sub(r"(?<=\w)\*(?=[.,;]?(?:\s|$))", "", line)


def equal(gold: str, answer: str) -> bool:
    """Whether the answer is the gold one: 1/2 = 0.5 = \\frac12 = 50%; 2 hours = 2, and not 2 minutes.
    Lists are equal in any order, each element as often; tuples, intervals and matrices element by element.

    A missing % is forgiven (gold 50%, answer 50), and so is an extra one after an integer (gold 9, answer 9%), as in
    math-verify. A unit or a name that one side lacks is forgiven, and the base that the answer lacks.
    """
    one = clean(gold)
    other = clean(answer)
    if one == other:
        return True
    if max(len(one), len(other)) > MAX_ANSWER_CHARS:
        return False
    if _same(one, other) or _same_within_domain(one, other):
        return True
    first_form = _first_form(other)
    return first_form is not None and _same(one, first_form)


def _first_form(text: str) -> str | None:
    """The first form of a value that a text gives in several, as 1/2 or 0.5; None if the text is something else."""
    approximation = re.fullmatch(r"(.+?)\\approx(?![a-z])(.+)", text)
    if approximation and number(approximation[2]) and not re.fullmatch(rf"{NAME}\s*", approximation[1]):
        return approximation[1] if not number(approximation[1]) else None
    about = re.fullmatch(r"(.+?)\s*\((?:about|approximately|roughly)\b[^()]*\)", text)
    if about:
        return about[1]
    forms = _OR.split(re.sub(r"\(\s*or\b(.*)\)$", r"or\1", text))
    if len(forms) > 1 and all(_is_another_form(forms[0], form) for form in forms[1:]):
        return forms[0]
    return None


def _is_another_form(one: str, other: str) -> bool:
    exact = number(one)
    other_exact = number(other)
    if exact and other_exact:
        return exact.value == other_exact.value
    return _same(one, other)


def _same_within_domain(one: str, other: str) -> bool:
    """Whether the texts are equal where at least one of them ends with the domain of a variable. One that a side lacks
    is forgiven."""
    rest, domain = without_domain(one)
    other_rest, other_domain = without_domain(other)
    if not domain and not other_domain:
        return False
    if domain and other_domain and domain != other_domain:
        return False
    return _same(rest, other_rest)


def canonical(answer: str) -> str:
    """A text for majority votes: the same one for equal numbers, whatever their unit, and for equal words."""
    text = _bare(answer)
    exact = number(text)
    if exact:
        return str(exact.value)
    if is_word(text):
        return text.casefold()
    return text.replace(", ", ",")


def _bare(answer: str) -> str:
    """The answer without typography, name and unit."""
    text = clean(answer)
    if number(text):
        return text
    read = _read(text)
    if read.kind or len(read.pairs) != 1:
        return squeeze(text)
    measured = quantity(read.value)
    return squeeze(measured.value if measured.is_plain else text)


class Reading(NamedTuple):
    """A text as a list: its brackets, (name, value) of each part, and name and value of the text itself."""

    kind: str
    pairs: list[tuple[str, str]]
    name: str
    value: str


def _read(text: str, parts: list[str] | None = None) -> Reading:
    """parts: those of the text, if they are known."""
    kind = ""
    if not parts:
        kind, parts = _items(text)
    pairs = _named(parts)
    if len(pairs) == 1 and not kind:
        return Reading(kind, pairs, *pairs[0])
    return Reading(kind, pairs, "", text)


def _same(one: str, other: str) -> bool:
    """Whether two clean texts, which may be lists, are equal."""
    exact = number(one)
    other_exact = number(other)
    if exact and other_exact:
        return _same_numbers(exact, other_exact)
    if squeeze(one) == squeeze(other):
        return True
    if exact and one == other.replace(", ", ",") and ",0" not in one:  # 1,234 is a list, too
        return True
    choice = _CHOICE.fullmatch(one)
    other_choice = _CHOICE.fullmatch(other)
    if choice and other_choice:
        return _same_choices(choice, other_choice)
    if _POINT.fullmatch(one) or _POINT.fullmatch(other):
        point = _named_point(one)
        other_point = _named_point(other)
        if point and other_point:
            return _same_points(one, point, other_point)
    is_chain = LESS.search(one) is not None
    interval = as_interval(one)
    other_interval = as_interval(other)
    if is_chain != bool(LESS.search(other)):
        kind, parts = _items(other if is_chain else one)
        if not kind and len(parts) > 1:  # 2 < x < 3 is not 2, 3
            return False
        one = interval
        other = other_interval
    elif is_chain and ("|" in one) != ("|" in other) and _letters(one) == _letters(other):
        return same_formula(_as_union(one), _as_union(other))
    elif is_chain and not LESS.search(interval) and not LESS.search(other_interval):
        if _letters(one) == _letters(other):
            return _same(interval, other_interval)
    read = _read(one)
    is_grouped = len(read.pairs) > 1 and other_exact and ",0" not in other  # a list, if a list is asked for
    other_read = _read(other, other.split(",") if is_grouped else None)
    if len(read.pairs) == len(other_read.pairs) == 1 and len(_sides(one)) > 1:
        if _is_same_graph(read, other_read):
            return _same(read.value, other_read.value)
        if len(_sides(other)) > 1 and (read.name != other_read.name or not read.name):
            is_solved = re.search("[a-zA-Z]", read.value) or read.name in map(squeeze, _sides(other))
            # x = 3 is not 2x = 6, the question.
            return bool(is_solved) and " mod " not in one and same_formula(one, other)
        if not read.name and re.search("[a-zA-Z]", one):  # an equation is not its right side
            return False
    if (read.value, other_read.value) != (one, other):
        return _same(read.value, other_read.value)
    return _same_readings(read, other_read, is_chain)


def _is_same_graph(read: Reading, other: Reading) -> bool:
    """Whether one side says y = ... and the other f(x) = ..., of an x."""
    graph = _GRAPH.fullmatch(read.name)
    other_graph = _GRAPH.fullmatch(other.name)
    if not graph or not other_graph or bool(graph["y"]) == bool(other_graph["y"]):
        return False
    primes = {match["primes"] or match["primes_of_f"] or "" for match in (graph, other_graph)}
    return len(primes) == 1 and "x" in _letters(read.value) & _letters(other.value)


def _as_union(text: str) -> str:
    """`x < 1 or x > 2` as intervals; an inequality with bars as it is."""
    return r"\cup ".join(map(as_interval, _OR.split(text)))


def _letters(text: str) -> set[str]:
    return {*_LETTER.findall(re.sub("(?<![a-zA-Z])(?:and|or)(?![a-zA-Z])", " ", text))}


def _same_choices(choice: re.Match, other: re.Match) -> bool:
    """Whether two options are the same letter, with the same text if both have one."""
    if choice[1] != other[1]:
        return False
    return choice[2] is None or other[2] is None or squeeze(choice[2]) == squeeze(other[2])


def _named_point(text: str) -> tuple[str, str] | None:
    """Name and value of a point, P(3, -4) or (3, -4) without a name; None if the text is no tuple."""
    match = _POINT.fullmatch(text)
    name, value = (match["name"], match["value"]) if match else ("", text)
    return (squeeze(name), value) if _items(value)[0] == "()" else None


def _same_points(gold: str, point: tuple[str, str], other: tuple[str, str]) -> bool:
    """A name that one side lacks is forgiven, but a gold C(6, 3) or P(6, 3) may be a number of choices."""
    names = {point[0], other[0]}
    is_number = re.fullmatch(r"[CP] ?\(\s*\d+\s*,\s*\d+\s*\)", gold)
    if len(names) > 1 and ("" not in names or is_number):
        return False
    return _same(point[1], other[1])


def _same_readings(read: Reading, other: Reading, is_chain: bool) -> bool:
    """Whether two texts that are their own values are equal: as lists, as sets by sympy, or as single values."""
    kinds = {read.kind, other.kind}
    if len(kinds) > 1 and read.pairs and other.pairs:
        if any(_SET.match(value) for _, value in read.pairs + other.pairs):  # a set of sets
            return False
    if len(read.pairs) != len(other.pairs) or (len(kinds) > 1 and (is_chain or kinds not in _ALIKE)):
        is_list = (len(read.pairs) > 1 and not read.kind) or (len(other.pairs) > 1 and not other.kind)
        is_set = kinds & {"", "cup"} and _SETS.search(read.value + other.value)
        if not is_set or is_list or number(read.value):
            return False
        return same_formula(read.value, other.value)
    if len(read.pairs) > 1 or read.kind or other.kind:
        return _same_lists(read.pairs, other.pairs, is_ordered=not kinds <= _UNORDERED)
    return _same_value(read.value, other.value)


def _same_lists(pairs: list[tuple[str, str]], other_pairs: list[tuple[str, str]], is_ordered: bool) -> bool:
    """Whether lists of (name, value) are equal. Different names that one side lacks bind the values in the order of the
    names: the gold side's own, if its names have none."""
    names = {name for name, _ in pairs}
    other_names = {name for name, _ in other_pairs}
    rest = list(other_pairs)
    bases = {name.partition("_")[0] for name in names | other_names}
    if names != other_names and len(bases) == 1 and bases in (names, other_names):  # x = 2 or x = 3, for x_1 and x_2
        pairs = [("", value) for _, value in pairs]
        rest = [("", value) for _, value in rest]
    elif names == {""} or other_names == {""}:
        is_ordered = is_ordered or len(names | other_names) > 2
        pairs = in_order(pairs) or pairs
        rest = in_order(other_pairs)
        if rest is None:
            return False
        pairs = [("", value) for _, value in pairs]
        rest = [("", value) for _, value in rest]
    for name, value in pairs:
        for other in rest[:1] if is_ordered else rest:
            is_alike = other[0] == name and bool(_SET.match(value)) == bool(_SET.match(other[1]))
            if is_alike and _same(value, other[1]):
                rest.remove(other)
                break
        else:
            return False
    return True


def _items(text: str) -> tuple[str, list[str]]:
    """The brackets around a text, and its parts: `1, 2` is ("", ["1", "2"]); `[1, 2)` is ("[)", ["1", "2"])."""
    if ", " in text and not re.search(",(?! )", _GROUPS.sub("", text)):  # a writer who puts spaces after separators
        text = _GROUPS.sub("", text)
    parts = [part for part in split(text, ";") if part]
    if len(parts) < 2:
        separator = _SEPARATOR if re.search(r"[\d\\<>=]", text) else "[,;]|(?<![a-zA-Z])and(?![a-zA-Z])"
        separator = f"{GROUPED}|{separator}"
        parts = [sign for part in split(text, separator) if part for sign in _signs(part)] or [text]
    if len(parts) > 1 and (quantity(text).value == text or len({quantity(part).unit for part in parts}) == 1):
        # not 5 feet, 6 inches
        is_union = all(map(LESS.search, parts)) and not re.search("[,;]|and", text)
        return "cup" if is_union else "", parts
    union = split(text, r"\\cup(?![a-z])")
    if len(union) > 1:
        sets = [_MEMBER.sub("", union[0]), *union[1:]]
        if all(re.match(r"\\?\{", part) for part in sets):  # {1, 2} and {3} are {1, 2, 3}
            return "{}", list(dict.fromkeys(item for part in sets for item in _items(part)[1]))
        return "cup", union
    brackets = _BRACKETS.fullmatch(text)
    inner = split(brackets[2], "[,;]") if brackets else []
    if not inner:
        return "", [text]
    kind = brackets[1][-1] + brackets[3][-1]
    if brackets[1] == "{":  # a group, not a set
        return _items(brackets[2])
    if len(inner) == 1 and kind == "()":
        return _items(inner[0])
    if kind == "{}":
        inner = list(dict.fromkeys(sign for part in inner if part for sign in _signs(part)))
    return kind, inner


def _signs(text: str) -> list[str]:
    """Both values of `1 \\pm 2`."""
    if text.count(r"\pm") != 1 or _BRACKETS.fullmatch(text):
        return [text]
    return [text.replace(r"\pm", a).replace(r"\mp", b) for a, b in ("+-", "-+")]


def _sides(text: str) -> list[str]:
    """Of an equation; any other text is one side."""
    return split(text, r"(?<![<>!\\])=") or [text]


def _named(parts: list[str]) -> list[tuple[str, str]]:
    """(name, value) of each part; a part without a name has the name of the part before it: x = 1, 2. The value of
    2 + 3 = 5 is 5. An equation is its own value, and so is one that says nothing: x = x, 5 = 5, 2 = 3."""
    pairs = []
    name = ""
    for part in parts:
        part = part.lstrip("= ")
        sides = _sides(part)
        match = _NAMED.fullmatch(part)
        if _STEPS.search(part) or len(split(part, f"{GROUPED}|,")) > 1:
            sides = []
            match = None
        if match and (is_word(match[1]) or not re.fullmatch("[a-z]{2,}", match[1])):  # xy = 1 is an equation
            name = squeeze(match[1])
            part = match[2]
            if _is_circular(name, part):
                name, part, sides = "", f"{name} = {part}", []
            elif len(parts) == 1 and name[0] + part[0] == "((":
                names = split(match[1][1:-1], ",")
                values = split(part[1:-1], ",")
                return [*zip(names, values, strict=True)] if len(names) == len(values) else [(name, part)]
        elif sides[1:] and (_LETTER.search(part) or "\\{" in part or len({*map(_content, sides)}) == 1):
            sides = []
        elif sides[1:] and not all(_same(sides[-1], side) for side in sides):
            sides = []
        pairs.append((name if sides else "", sides[-1] if sides[1:] else part))
    return pairs


def _is_circular(name: str, value: str) -> bool:
    """Whether a value is said by itself, x = x + 1, xy = yx, x in {x}, or an option by another."""
    pattern = rf"(?<![a-zA-Z\\]){re.escape(name)}(?![a-zA-Z_'(])"
    is_said = _content(name) == _content(value) or re.search(pattern, squeeze(value))
    return bool(is_said or re.fullmatch("[A-J]{2}", name + value))


def _content(text: str) -> str:
    return "".join(sorted(re.findall(r"\w", text)))


def _same_value(one: str, other: str) -> bool:
    """Whether two texts without lists and names, not both of them plain numbers, are equal."""
    gold = quantity(one)
    answer = quantity(other)
    if bool(gold.unit) != bool(answer.unit):  # \\frac{m}{s} may be variables: it is a unit if the other side has it
        slashed = quantity(with_slash(one)), quantity(with_slash(other))
        if slashed[0].unit == slashed[1].unit:
            gold, answer = slashed
    if gold.unit != answer.unit and (gold.unit and answer.unit):
        return False
    if gold.unit != answer.unit and "degrees" in dict(gold.unit + answer.unit) and _ANGLE.search(one + other):
        return False  # 30 degrees are neither 30 nor \pi/6 here
    if (gold.unit and other.endswith("%")) or not (gold.unit or answer.is_plain):
        return False
    if (gold.value, answer.value) != (one, other):
        return _same(gold.value, answer.value)
    based = _BASE.fullmatch(one)
    if based:  # the answer may leave out the base that was asked for, but not choose another
        return based[1] == other or based.groups() == getattr(_BASE.fullmatch(other), "groups", tuple)()
    if _BASE.fullmatch(other) or _OPAQUE.search(one) or _OPAQUE.search(other):
        return False
    if is_word(one) or is_word(other) or re.fullmatch("[A-Z]{2,}", one):  # BAC is an order, not a product
        one, other = (re.sub(r"^(?:an?|the) (?=[a-z]{3})", "", text.casefold()) for text in (one, other))
        return one == other and is_word(one)
    return same_formula(_fraction(one), _fraction(other))


def _fraction(text: str) -> str:
    """A plain number as a fraction in LaTeX, for sympy does not read 1 1/2 and 1.5e3; any other text as it is."""
    exact = number(text)
    if exact is None or exact.is_percent:
        return text
    sign = "-" if exact.value < 0 else ""
    return rf"{sign}\frac{{{abs(exact.value.numerator)}}}{{{exact.value.denominator}}}"


def _same_numbers(gold: Number, answer: Number) -> bool:
    is_forgiven = gold.is_percent or (answer.is_percent and gold.value.denominator == 1)
    return gold.value == answer.value or (is_forgiven and _without_percent(gold) == _without_percent(answer))


def _without_percent(number: Number) -> Fraction:
    """The value if its percent sign, where it has one, is left out."""
    if number.is_percent:
        return 100 * number.value
    return number.value


def main(gold: str, answer: str) -> int:
    """Prints how the answer is judged and what was read, in a worker with a deadline. ANSWER is a whole reply or, if no
    answer is found in it, the answer itself."""
    from .pool import GraderPool

    reply = answer if extract(answer) else rf"\boxed{{{answer}}}"
    pool = GraderPool(".math:grade", num_workers=1, deadline_s=10.0, memory_mib=4096, first=FIRST_JOB)
    [graded] = pool.grade([{"reply": reply, "answer": gold, "strict": False}])
    pool.close()
    if graded.outcome != "ok":
        print(f"{graded.outcome}: {graded.message}")
        return 1
    print(f"{graded.value['outcome']}: {graded.value['extracted']}")
    return int(graded.value["outcome"] != "ok")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m judges.math GOLD ANSWER")
    sys.exit(main(*sys.argv[1:]))
