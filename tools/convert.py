"""A config of TRL or verl -> one of ours, and a line on what became of each key.

    .venv/bin/python -m tools.convert trl|verl FILE [their.key=value ...] --write CONFIG.yaml

The facts are in from_trl.yaml and from_verl.yaml, a row for each of their keys, and in from_trl.py and from_verl.py,
where several of their keys decide one of ours. trl_*.yaml and verl_*.yaml record the defaults of the version that is
read. theirs.py reads their files. This one applies the rows, and writes the config and the report.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from base.check import rules
from base.inputs import yaml_text
from base.inputs.keys import FIELDS, default_text, hint, text_of
from base.system.files import read_text
from config import ConfigError, shortened
from tools import from_trl, from_verl, theirs
from tools.made import GRADED_BY, YOURS, Made
from tools.theirs import Unread, Values

NAMES = {"trl": "TRL", "verl": "verl"}
MADE_OF = {"trl": from_trl.made_of, "verl": from_verl.made_of}
READ = "read:"
CONVERTED = "converted:"
SAME = "no effect here:"
NOT_QUITE = "trained here, but not quite alike:"
NONE = "NO COUNTERPART, and not in the config:"
OLDER = "their defaults, which older versions had otherwise:"
COMPUTED = "known only while your script runs, and so not in the config:"
DIFFER = "set here, not in your config (their defaults that differ from ours, and what your keys imply):"
LEFT = "still to be set or changed:"
REFUSED = "these keys affect training and have no counterpart here"
UNKNOWN = "(unknown)"  # the row of keys that only a wildcard matches
OFF = (None, False, 0, "no")  # values with which the keys of `when` have no effect


@dataclass
class Report:
    lines: dict[str, list[str]] = field(default_factory=dict)  # heading -> lines
    refused: list[str] = field(default_factory=list)

    def add(self, heading: str, line: str) -> None:
        self.lines.setdefault(heading, []).append(line)

    def text(self, headings: Sequence[str]) -> list[str]:
        """The lines under these headings; a text of theirs cannot break a line."""
        lines = []
        for heading in headings:
            if self.lines.get(heading):
                lines.append(heading)
                lines += [f"  {_printable(line)}" for line in self.lines[heading]]
        return lines


def convert(system: str, name: str, words: Sequence[str], out: str) -> str:
    """Writes `out` from the config file `name` and overrides in the words of `system`, and returns what to print.
    ConfigError for a file of another form, a key that they do not have, what the table refuses, and an `out` that is
    there already."""
    if os.path.lexists(out):
        raise ConfigError(f"--write {out}: it already exists; name a new file")
    table = load_table(system)
    found, notes = theirs.read(system, name, table)
    values = _named_as_now(found, table) | _named_as_now(theirs.assigned(words), table)
    values = _with_whole_mappings(values, table)
    values = theirs.resolved(values, table["recorded"] | _defaults(table) if system == "verl" else {})
    report = Report()
    report.lines[READ] = [note.strip() for note in notes]
    ours = _translated(system, table, values, report, name)
    first = f"{name} (keys and defaults of {table['source']})"
    comments = [_printable(f"from {first}"), *report.text([NOT_QUITE, NONE, COMPUTED])]
    text = "".join(f"# {line}\n" for line in comments) + _as_yaml(ours)
    try:
        Path(out).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"--write {out}: cannot be written ({error.strerror})") from None
    _add_what_is_left(report, ours, table, out)
    headings = [READ, CONVERTED, SAME, NOT_QUITE, NONE, COMPUTED, OLDER, DIFFER, LEFT]
    return "\n".join([_printable(f"{first} -> {out}"), *report.text(headings)])


@cache
def load_table(system: str) -> dict[str, Any]:
    """The rows of a system, and `recorded`: each key of the version that is read, with its default."""
    folder = Path(__file__).parent
    table = yaml.safe_load(read_text(folder / f"from_{system}.yaml"))
    recorded = yaml.safe_load(read_text(folder / f"{system}_{table['version']}.yaml"))
    table["recorded"] = _named_as_now(recorded, table)
    return table


def _defaults(table: Mapping[str, Any]) -> Values:
    return {key: row["default"] for key, row in table["keys"].items() if "default" in row}


def _named_as_now(values: Values, table: Mapping[str, Any]) -> Values:
    """The values under the names that keys and sections have in the version that is read. A null under an old name does
    not replace a value under the new one."""
    named: Values = {}
    for key, value in values.items():
        now = key
        for old, new in table["moved"].items():
            if key == old or key.startswith(f"{old}."):
                now = new + key.removeprefix(old)
                break
        if now == key or value is not None or now not in named:
            named[now] = value
    return named


def _with_whole_mappings(values: Values, table: Mapping[str, Any]) -> Values:
    """The values, with `a.b.c: 1` as a part of `a.b: {c: 1}` where the mapping a.b is one value."""
    whole = dict(values)
    for mapping, default in _defaults(table).items():
        if default != {}:
            continue
        parts = {key: value for key, value in values.items() if key.startswith(f"{mapping}.")}
        if parts:
            whole[mapping] = dict(values.get(mapping) or {})
        for key, value in parts.items():
            del whole[key]
            whole[mapping][key.removeprefix(f"{mapping}.")] = value
    return whole


def _printable(line: str) -> str:
    """The line with control characters and lone surrogates escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in line)


def _as_yaml(ours: Values) -> str:
    tree: dict[str, Any] = {}
    for name, value in ours.items():
        *sections, last = name.split(".")
        section = tree
        for part in sections:
            section = section.setdefault(part, {})
        section[last] = value
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _add_what_is_left(report: Report, ours: Values, table: Mapping[str, Any], out: str) -> None:
    """Notes what `--check` refuses in the config that was written, by its keys alone."""
    for key, value in ours.items():
        if str(value).startswith(YOURS):
            what = table["yours"][key]
            report.add(LEFT, f"{key}={value}: --check refuses it until it names a function of yours: {what}")
    try:
        rules.load_checked(out)
    except ConfigError as error:
        for line in str(error).splitlines():
            report.add(LEFT, line)


# ----------------------------------------------------------------------------------------------- their keys to ours


def _translated(system: str, table: Mapping[str, Any], given: Values, report: Report, name: str) -> Values:
    """Our keys whose values differ from our defaults. A key that they leave out has their default. ConfigError for
    values whose loss would change what is trained."""
    rows = table["keys"]
    row_of = {key: _row_of(key, table, f"{name}: {NAMES[system]}") for key in given}
    read: Values = {}
    unread: Values = {}
    for key, value in given.items():
        row = rows[row_of[key]]
        if not isinstance(value, Unread):
            read[key] = _typed(key, value, row, name)
        elif GRADED_BY in row.get("made", ()):
            read[key] = str(value)  # which --check refuses
        else:
            unread[key] = value
    values = _defaults(table) | read
    try:
        made = MADE_OF[system](values)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    ours: Values = dict(table["always"])
    asked: set[str] = set()  # our keys that they write
    order = [*rows]
    for key in sorted({**values, **unread}, key=lambda key: order.index(row_of.get(key, key))):
        row = rows[row_of.get(key, key)]
        if key in unread:
            _report_unread(system, report, key, unread[key], row)
        if key in values:
            heading, text, keys = _meaning(row, values, values[key], made, table)
            ours |= keys
            line = f"{key}={text_of(values[key])}"
            if key in read:
                asked |= keys.keys()
                _report_read(report, heading, f"{line}: {text}", key, row)
            else:
                _report_default(system, report, heading, line, text, row)
    _report_made(report, made, values)
    if report.refused:
        raise ConfigError(f"{name}: {REFUSED}:", *map(_printable, report.refused))
    if COMPUTED in report.lines:
        report.add(COMPUTED, f"{table['way_out']}; or add key=value to this command")
    for key, value in made.keys.items():
        if value is not None or key in ours:
            ours[key] = value
    return _differing(ours, asked, table, report)


def _report_read(report: Report, heading: str, line: str, key: str, row: Mapping[str, Any]) -> None:
    """A key that they write."""
    if heading == REFUSED:
        report.refused.append(f"{line}; to convert without it, add {key}={_off(row)}")
    else:
        report.add(heading, line)


def _report_default(system: str, report: Report, heading: str, line: str, text: str, row: Mapping[str, Any]) -> None:
    """A key that they leave out, where its default is not here, or is another one in older versions."""
    if heading in (NONE, REFUSED):
        report.add(NONE, f"{line}, {NAMES[system]}'s default: {text}")
    if heading != SAME and "before" in row:
        report.add(OLDER, f"{line}: {row['before']}")


def _report_unread(system: str, report: Report, key: str, value: Unread, row: Mapping[str, Any]) -> None:
    """A key whose value must be computed."""
    line = f"{key}={shortened(str(value))}"
    if "refused" in row:
        why = "only running your script gives its value" if row.get("default") else row["refused"]
        report.refused.append(f"{line}: {why}; to convert without it, add {key}={_off(row)}")
    elif "default" in row:
        default = text_of(row["default"])
        report.add(COMPUTED, f"{line}: {default}, {NAMES[system]}'s default, is in its place")
    elif "same" in row:
        report.add(SAME, f"{line}: {row['same']}")
    else:
        report.add(COMPUTED, line)


def _report_made(report: Report, made: Made, values: Values) -> None:
    """What is refused, and what differs, because of several keys."""
    for key, why in made.refused.items():
        report.refused.append(f"{key}={text_of(values[key])}: {why}")
    for key, note in made.notes.items():
        report.add(NOT_QUITE, f"{key}={text_of(values[key])}: {note}")


def _differing(ours: Values, asked: set[str], table: Mapping[str, Any], report: Report) -> Values:
    """The values that are not our defaults; those that no key of theirs asked for are reported."""
    differing: Values = {}
    for key, value in ours.items():
        if key in FIELDS and json.dumps(value) == default_text(key):
            continue
        differing[key] = value
        if key not in asked:
            why = f"; {table['assumed'][key]}" if key in table["assumed"] else ""
            report.add(DIFFER, f"{key}={text_of(value)} (ours {default_text(key)}){why}")
    return differing


def _off(row: Mapping[str, Any]) -> str:
    """The value with which a refused key changes nothing."""
    return text_of(next(iter(row.get("values", ())), None))


def _row_of(key: str, table: Mapping[str, Any], place: str) -> str:
    """The row of a key of theirs: its own; that of a wildcard, if they have such a key; else UNKNOWN. ConfigError for a
    key that is like another one, which no row has: a mistake in writing."""
    rows = table["keys"]
    if key in rows:
        return key
    section, dot, last = key.rpartition(".")
    older: list[str] = []
    for pattern, names in table["older"].items():
        if fnmatchcase(section, pattern):
            older += names.split()
    is_known = key in table["recorded"] or any(fnmatchcase(last, name) for name in older)
    wildcard = next((pattern for pattern in rows if fnmatchcase(key, pattern)), UNKNOWN)
    if is_known:
        return wildcard
    sections = {row.partition(".")[0] for row in rows}
    if section and not get_close_matches(section.partition(".")[0], sections, cutoff=0.75):
        return UNKNOWN  # of another program
    names = [row for row in rows if "*" not in row]
    names += [*table["recorded"], *(section + dot + name for name in older)]
    near = hint(key[:200], names, cutoff=0.8)
    if near:
        raise ConfigError(f"{place} has no key '{_printable(key):.100}'.{near}")
    return UNKNOWN


def _typed(key: str, value: Any, row: Mapping[str, Any], name: str) -> Any:
    """The value of a key, where a number may be quoted. ConfigError for a number that is none."""
    default = row.get("default")
    kind = row.get("kind", "number" if type(default) in (int, float) else "text")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}: {key}={text_of(value)}: expected a finite number")
    if kind == "text" or type(value) in (int, float):
        return value
    text = text_of(value)
    quoted = yaml_text.typed(text)
    if type(quoted) in (int, float) and math.isfinite(quoted):
        return quoted
    others = list(dict.fromkeys([*row.get("values", ()), text_of(default)]))
    if text in others:
        return quoted
    raise ConfigError(f"{name}: {key}={text:.80}: expected a number, or {' or '.join(others)}")


def _meaning(
    row: Mapping[str, Any], theirs: Values, value: Any, made: Made, table: Mapping[str, Any]
) -> tuple[str, str, Values]:
    """(the heading to report a value of theirs under, what to report, our keys)."""
    for key in row.get("when", ()):
        if theirs[key] in OFF:
            return SAME, f"has an effect only with {' and '.join(row['when'])}", {}
    for key, reason in row.get("unless", {}).items():
        is_set = theirs[key] not in (None, table["keys"][key]["default"])
        if theirs[key] == reason or (reason == "set" and is_set):
            return SAME, f"has no effect with {key}={text_of(theirs[key])}", {}
    but = row.get("but", "")
    if "share" in row and isinstance(value, float) and 0 < value < 1:
        total = theirs[row["share"]]
        if total is None or total <= 0:
            return NONE, f"a share of {row['share']}, which is not set", {}
        but = f"{value} x {row['share']}={total}"
        value = math.ceil(value * total) if row.get("updates") else int(value * total)
    keys = _keys_of_value(row, theirs, value, made)
    if keys is None:
        if "refused" in row:
            return REFUSED, row["refused"], {}
        if "same" in row:
            return SAME, row["same"], {}
        return NONE, row.get("none") or f"only {', '.join(map(text_of, row.get('values', ())))}", {}
    keys = {key: made.keys.get(key, new) for key, new in keys.items()}
    text = ", ".join(f"{key}={text_of(new)}" for key, new in keys.items()) or "as here"
    return CONVERTED, f"{text}; {but}" if keys and but else text, keys


def _keys_of_value(row: Mapping[str, Any], theirs: Values, value: Any, made: Made) -> Values | None:
    """Our keys for a value of theirs; None if there are none."""
    named = {text_of(known): keys for known, keys in row.get("values", {}).items()}
    items = [value, *value] if isinstance(value, list) else [value]
    matching = [named[text_of(item)] for item in items if text_of(item) in named]
    if matching:
        keys = {}
        for meant in matching:
            for key, new in meant.items():
                keys[key] = theirs.get(new, new) if isinstance(new, str) else new
        return keys
    if "to" in row:
        if row.get("updates"):
            value = math.ceil(value / made.num_updates)
        names = [row["to"]] if isinstance(row["to"], str) else row["to"]
        return {**dict.fromkeys(names, value), **row.get("with", {})}
    if "made" in row and all(made.keys.get(key) is not None for key in row["made"]):
        return {key: made.keys[key] for key in row["made"]}
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        prog=".venv/bin/python -m tools.convert", description="Converts a config of TRL or verl to one of grpo.py"
    )
    parser.add_argument("system", choices=NAMES)
    parser.add_argument("file")
    parser.add_argument("overrides", nargs="*", metavar="their.key=value")
    parser.add_argument("--write", required=True, metavar="CONFIG.yaml")
    args = parser.parse_intermixed_args()
    try:
        report = convert(args.system, args.file, args.overrides, args.write)
    except ConfigError as error:
        print(f"error: {error}".encode(errors="backslashreplace").decode(), file=sys.stderr)
        return 2
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
