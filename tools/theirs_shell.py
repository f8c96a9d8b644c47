"""The words `section.key=value` of a shell script, with the script's own variables put in. Nothing is run.

A variable is expanded once, where it stands. What only a shell can know stays as it is written, with its `$`: a
variable that nobody sets, an argument `$1`, a command `$(...)`, a variable that a branch may change. A key that gets
several values has the value `$(one or other)`.
"""

import ast
import operator
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from config import ConfigError, shortened

MAX_LENGTH = 1_000_000  # characters of a script, and of all that its variables put in
MAX_DEPTH = 20  # quotes and expansions within each other
MAX_CHOICES = 32  # of a variable that branches set; beyond, each of its items may be there or not
MAX_NUMBER = 10**18  # in $((...))

NAME = r"[A-Za-z_]\w*"
KEY = r"\+*[A-Za-z_]\w*(?:\.[\w-]+)+"
BRANCHES = {"if": "fi", "case": "esac", "for": "done", "while": "done", "until": "done", "select": "done"}
PREFIXES = ("then", "do", "{", "!", "time", "export", "local", "declare", "readonly", "env")
ARITHMETIC: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


class NotShell(ValueError):
    """The text is no shell script that this file can read."""


class Word(NamedTuple):
    text: str
    is_sure: bool = True  # false if a branch gives it that may not be taken


class Command(NamedTuple):
    operator: str  # what stands before it: a line end, ; & | && || ( )
    words: list[str]  # as they are written, with quotes; NAME=(...) is one word


HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")
NOTHING = "nothing"
PLAIN_VARIABLE = re.compile(rf"\$({NAME}|[0-9@*#?$!-])")


def overrides(text: str, name: str) -> tuple[list[str], list[str]]:
    """(the words `section.key=value` of the commands of a script, lines on those that no command gets). ConfigError,
    which names the file `name`, if it cannot be read."""
    if len(text) > MAX_LENGTH:
        raise ConfigError(f"{name}: it has more than {MAX_LENGTH:,} characters")
    script = _Script()
    try:
        for command in _commands(text):
            script.read(command)
    except NotShell as error:
        raise ConfigError(f"{name}: not a shell command ({error})") from None
    return script.overrides(), script.unused()


# ------------------------------------------------------------------------------------------------------ text to words


def _commands(text: str) -> Iterator[Command]:
    place = 0
    before = "\n"
    words: list[str] = []
    ends: list[str] = []  # of the texts <<END that begin on the next line
    while place < len(text):
        here = text[place]
        if here in " \t":
            place += 1
        elif text.startswith("\\\n", place):
            place += 2
        elif here == "#":
            place = _find(text, "\n", place)
        elif heredoc := HEREDOC.match(text, place):
            ends.append(heredoc[1])
            place = heredoc.end()
        elif here in ";&|\n()":
            mark = here
            if text[place : place + 2] in ("&&", "||", ";;"):
                mark = text[place : place + 2]
            yield Command(before, words)
            before = mark
            words = []
            place += len(mark)
            if here == "\n":
                for end in ends:
                    place = _after_heredoc(text, place, end)
                ends = []
        else:
            start = place
            place = _end_of_word(text, place)
            words.append(text[start:place].replace("\\\n", ""))
    yield Command(before, words)


def _find(text: str, wanted: str, start: int) -> int:
    """The place of `wanted` at or after `start`, or the end of the text."""
    place = text.find(wanted, start)
    return len(text) if place < 0 else place


def _after_heredoc(text: str, start: int, end: str) -> int:
    found = re.compile(rf"^[ \t]*{re.escape(end)}[ \t]*$", re.MULTILINE).search(text, start)
    return found.end() if found else len(text)


def _end_of_word(text: str, start: int) -> int:
    place = start
    while place < len(text) and text[place] not in " \t\n;&|()":
        place = _end_of_part(text, place, 0)
        if text.startswith("(", place) and re.fullmatch(rf"{NAME}\+?=", text[start:place]):
            return _end_of_group(text, place, place + 1, ")", 0)
    return place


def _end_of_part(text: str, start: int, depth: int) -> int:
    """The end of the quote, the expansion or the character that begins at `start`."""
    if text[start] == "\\":
        return min(start + 2, len(text))
    if text[start] in "'`":
        end = text.find(text[start], start + 1)
        if end < 0:
            raise NotShell(f"No closing quotation: {shortened(text[start:])}")
        return end + 1
    if text[start] == '"':
        return _end_of_group(text, start, start + 1, '"', depth)
    if text.startswith("$(", start):
        return _end_of_group(text, start, start + 2, ")", depth)
    if text.startswith("${", start):
        return _end_of_group(text, start, start + 2, "}", depth)
    variable = PLAIN_VARIABLE.match(text, start)
    return variable.end() if variable else start + 1


def _end_of_group(text: str, start: int, inside: int, closing: str, depth: int) -> int:
    """The end of the group that begins at `start`, whose content begins at `inside`."""
    if depth > MAX_DEPTH:
        raise NotShell(f"more than {MAX_DEPTH} groups within each other: {shortened(text[start:])}")
    place = inside
    while place < len(text):
        if text[place] == closing:
            return place + 1
        if closing == '"' and text[place] == "'":  # a plain character there
            place += 1
        elif closing == ")" and text[place] == "(":
            place = _end_of_group(text, place, place + 1, ")", depth + 1)
        elif closing == ")" and text[place] == "#" and text[place - 1].isspace():  # a comment in an array
            place = _find(text, "\n", place)
        else:
            place = _end_of_part(text, place, depth + 1)
    quotation = "quotation" if closing == '"' else closing
    raise NotShell(f"No closing {quotation}: {shortened(text[start:])}")


# ---------------------------------------------------------------------------------------------------- words to values


Variables = dict[str, list[list[str]]]  # name -> what it may be, each a list of items; one item where it is no array


class Branch(NamedTuple):
    end: str  # the word that ends it
    before: Variables
    ends: list[Variables]  # of its parts that are over, such as that of `then`


class _Script:
    """The variables and the overrides of a script, up to the command that was read last."""

    def __init__(self):
        self.variables: Variables = {name: [[text]] for name, text in os.environ.items()}
        self.values: dict[str, list[Word]] = {}  # key -> what the commands give it
        self.branches: list[Branch] = []  # those that are open
        self.used: set[str] = set()  # names of variables that were put in
        self.length = 0  # of all that was put in

    def overrides(self) -> list[str]:
        found = []
        for key, values in self.values.items():
            texts = list(dict.fromkeys(word.text for word in values))
            if not all(word.is_sure for word in values):
                texts = [NOTHING, *texts]
            found.append(f"{key}={_one_of(texts)}")
        return found

    def unused(self) -> list[str]:
        lines = set()
        for name in self.variables.keys() - self.used - os.environ.keys():
            for items in self.variables[name]:
                for key in re.findall(rf"(?:^|\s)({KEY})=", "\n".join(items)):
                    lines.add(f"{key}: left out, because no command gets ${name}")
        return sorted(lines)

    def read(self, command: Command) -> None:
        if command.operator == ";;" and self.branches:
            self._end_part()
        before = dict(self.variables)
        words = self._without_prefixes(command.words)
        while words:
            assignment = re.match(rf"({NAME})(\+?)=", words[0])
            if assignment is None:
                break
            self._assign(assignment[1], words[0][assignment.end() :], appends=assignment[2] == "+")
            words = words[1:]
        if command.operator in ("&&", "||"):
            self.variables = _merged([before, self.variables])
        previous = ""
        for word in words:
            for field in self._fields(word):
                if previous == "--config-name":
                    field = Word(f"--config-name={field.text}", field.is_sure)
                self._note(field)
                previous = field.text

    def _without_prefixes(self, words: Sequence[str]) -> Sequence[str]:
        """The words from the command on, after those that open and close branches."""
        while words:
            first = words[0]
            if first in BRANCHES:
                self.branches.append(Branch(BRANCHES[first], dict(self.variables), [self.variables]))
                self.variables = dict(self.variables)
                if first == "for" and len(words) > 2 and words[2] == "in":
                    items = [field.text for item in words[3:] for field in self._fields(item)]
                    self.variables[words[1]] = [[item] for item in items]
                    return []
            elif self.branches and first == self.branches[-1].end:
                branch = self.branches.pop()
                self.variables = _merged([*branch.ends, self.variables])
            elif self.branches and first in ("else", "elif"):
                self._end_part()
                if first == "else":
                    del self.branches[-1].ends[0]  # one of the parts is taken
            elif first not in PREFIXES:
                return words
            words = words[1:]
        return words

    def _end_part(self) -> None:
        branch = self.branches[-1]
        branch.ends.append(self.variables)
        self.variables = dict(branch.before)

    def _assign(self, name: str, value: str, *, appends: bool) -> None:
        old = self.variables.get(name, [[]])
        if value.startswith("("):
            words = [word for command in _commands(value[1:-1]) for word in command.words]
            items = [field.text for word in words for field in self._fields(word)]
            self.variables[name] = [[*items_before, *items] for items_before in old] if appends else [items]
            return
        if appends:
            value = f"${{{name}}}{value}" if name in self.variables else value
        self.variables[name] = [[text] for text in self._texts(value)]

    def _texts(self, word: str) -> list[str]:
        """What the text of a word may be: where one of its variables is open, its text for each choice."""
        names = {name for name in re.findall(rf"\$\{{?({NAME})", word) if len(self.variables.get(name, ())) > 1}
        if len(names) != 1:
            return [self._text(word, 0)]
        (name,) = names
        choices = self.variables[name]
        texts = []
        for items in choices:
            self.variables[name] = [items]
            texts.append(self._text(word, 0))
        self.variables[name] = choices
        return list(dict.fromkeys(texts))

    def _note(self, field: Word) -> None:
        """Keeps the field if it is an override, or those in a `$(one or other)`."""
        if field.text.startswith("$("):
            for key, value in re.findall(rf"(?:^\$\(|\s)({KEY})=(\S*)", field.text):
                self.values.setdefault(key, []).append(Word(value.rstrip(")"), is_sure=False))
            return
        key, equals, value = field.text.partition("=")
        if equals and re.fullmatch(rf"{KEY}|--config-name", key) and not key.startswith("hydra."):
            self.values.setdefault(key, []).append(Word(value, field.is_sure))

    def _fields(self, word: str) -> list[Word]:
        """A word as it is written -> the words that a shell makes of it."""
        variable = re.fullmatch(rf'\$({NAME})|"?\$\{{({NAME})(\[[@*]\])?\}}"?', word)
        if variable is None:
            return [Word(self._text(word, 0))]
        name = variable[1] or variable[2]
        self.used.add(name)
        if name not in self.variables:
            return [Word(word)]
        choices = self.variables[name]
        if not variable[3] and not word.startswith('"'):
            choices = [[part for item in items for part in _split(item)] for items in choices]
        self._count(sum(len(item) for items in choices for item in items))
        return [Word(item, all(item in other for other in choices)) for items in choices for item in items]

    def _text(self, word: str, depth: int) -> str:
        """The text of a word, with its variables put in and without its quotes."""
        if depth > MAX_DEPTH:
            raise NotShell(f"more than {MAX_DEPTH} expansions within each other: {shortened(word)}")
        parts = []
        place = 0
        while place < len(word):
            end = _end_of_part(word, place, 0)
            part = word[place:end]
            if part[0] == "\\":
                parts.append(part[1:])
            elif part[0] == "'":
                parts.append(part[1:-1])
            elif part[0] == '"':
                parts.append(self._quoted(part[1:-1], depth))
            else:
                parts.append(self._expanded(part, depth))
            place = end
        return "".join(parts)

    def _quoted(self, text: str, depth: int) -> str:
        parts = []
        place = 0
        while place < len(text):
            if text[place] == "'":
                end = place + 1
            else:
                end = _end_of_part(text, place, 0)
            part = text[place:end]
            if part[0] == "\\" and part[1:] in ("$", "`", '"', "\\"):
                part = part[1:]
            parts.append(self._expanded(part, depth))
            place = end
        return "".join(parts)

    def _expanded(self, part: str, depth: int) -> str:
        """What stands for `$NAME`, `${NAME}`, `${NAME:-default}` or `$((...))`; other text as it is."""
        arithmetic = re.fullmatch(r"\$\(\((.*)\)\)", part, re.DOTALL)
        if arithmetic:
            return self._calculated(arithmetic[1], part, depth)
        variable = re.fullmatch(rf"\$({NAME})|\$\{{({NAME}|[0-9])(?:\[[@*]\])?(?::?[-=](.*))?\}}", part, re.DOTALL)
        if variable is None:
            return part
        name, default = variable[1] or variable[2], variable[3]
        if default is None or self.variables.get(name, [[]]) not in ([[]], [[""]]):
            return self._value_of(name, part)
        return self._text(default, depth + 1)

    def _value_of(self, name: str, written: str) -> str:
        """The text of a variable; as it is written, if nobody sets it."""
        self.used.add(name)
        if name not in self.variables:
            return written
        text = _one_of([" ".join(items) or NOTHING for items in self.variables[name]])
        text = "" if text == NOTHING else text
        self._count(len(text))
        return text

    def _count(self, length: int) -> None:
        self.length += length
        if self.length > MAX_LENGTH:
            raise NotShell(f"its variables put in more than {MAX_LENGTH:,} characters")

    def _calculated(self, expression: str, written: str, depth: int) -> str:
        text = self._text(expression, depth + 1)
        text = re.sub(NAME, lambda name: self._value_of(name[0], name[0]), text)
        try:
            return str(_whole_number(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
            return written


def _one_of(texts: Sequence[str]) -> str:
    """The text, or `$(one or other)`."""
    return texts[0] if len(texts) == 1 else f"$({' or '.join(texts)})"


def _merged(ends: Sequence[Variables]) -> Variables:
    """The variables after a branch with these ends."""
    merged: Variables = {}
    for name in dict.fromkeys(name for end in ends for name in end):
        found: list[list[str]] = []
        for end in ends:
            found += [items for items in end.get(name, [[]]) if items not in found]
        if len(found) > MAX_CHOICES:
            found = [[], list(dict.fromkeys(item for items in found for item in items))]
        merged[name] = found
    return merged


def _split(text: str) -> list[str]:
    """The words of a text at its blanks; a `$(...)` is one word."""
    if "$(" not in text:
        return text.split()
    try:
        return [word for command in _commands(text) for word in command.words]
    except NotShell:
        return text.split()


def _whole_number(node: ast.expr) -> int:
    """The value of `2 * (3 + 4)`. ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_whole_number(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        value = ARITHMETIC[type(node.op)](_whole_number(node.left), _whole_number(node.right))
    else:
        raise ValueError("no whole number")
    if abs(value) > MAX_NUMBER:
        raise ValueError("too large")
    return value
