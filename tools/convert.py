"""A config of TRL or verl -> one of ours, and a line on what became of each key.

    .venv/bin/python -m tools.convert trl|verl FILE [their.key=value ...] --write CONFIG.yaml

The facts are in from_trl.yaml and from_verl.yaml, a row for each of their keys, and in from_trl.py and from_verl.py,
where several of their keys decide one of ours. trl_*.yaml and verl_*.yaml record the defaults of the version that is
read. config_files.py reads their files. This one applies the rows, and writes the config and the report.
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
from base.inputs.key_help import default_text, hint
from base.inputs.keys import FIELDS, text_of
from base.system.files import read_text
from config import ConfigError, printable
from tools import config_files, from_trl, from_verl
from tools.config_files import Table
from tools.translation import GRADED_BY, LARGEST, YOURS, Translation, Values, is_number

Row = dict[str, Any]  # of a table: what from_trl.yaml and from_verl.yaml say of a key
NAMES = {"trl": "TRL", "verl": "verl"}
TRANSLATE = {"trl": from_trl.translate, "verl": from_verl.translate}
CONVERTED = "converted:"
SAME = "no effect here:"
NOT_QUITE = "trained here, but not quite alike:"
NONE = "NO COUNTERPART, and not in the config:"
OLDER = "their defaults, which older versions had otherwise:"
DIFFER = "set here, not in your config (their defaults that differ from ours, and what your keys imply):"
LEFT = "still to be set or changed:"
REFUSED = "these keys affect training and have no counterpart here"
UNKNOWN = "(unknown)"  # the row of a key that they do not have
UNKNOWN_IN_TRAINING = "(unknown in what trains)"
WHOLE = 100  # keys: people write fewer, and a system, even in its first versions, more
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
            if heading in self.lines:
                lines.append(heading)
                for line in self.lines[heading]:
                    lines.append(f"  {printable(line)}")
        return lines


@dataclass
class Meaning:
    """What a key of theirs is here."""

    heading: str  # of the report
    text: str
    keys: Values = field(default_factory=dict)  # ours


def convert(system: str, name: str, words: Sequence[str], out: str) -> str:
    """Writes `out` from the config file `name` and overrides in the words of `system`, and returns what to print.
    ConfigError for a file of another form, a key that they do not have, what the table refuses, and an `out` that is
    there already."""
    if os.path.lexists(out):
        raise ConfigError(f"--write {out}: it already exists; name a new file")
    table = load_table(system)
    written = _named_as_now(config_files.read(system, name, table), table)
    written |= _named_as_now(config_files.assigned(words), table)
    written = _with_whole_mappings(written, table)
    if system == "verl":
        written = config_files.resolved(written)
    report = Report()
    ours = _translated(system, name, table, written, report)
    first = f"{name} (keys and defaults of {table['source']})"
    comments = [printable(f"from {first}"), *report.text([NOT_QUITE, NONE])]
    text = "".join(f"# {line}\n" for line in comments) + _as_yaml(ours)
    try:
        Path(out).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"--write {out}: cannot be written ({error.strerror})") from None
    for key, what in table["beside"].items():
        if key not in written:
            report.add(LEFT, f"{key} is not in the file: {what}")
    _report_what_is_left(report, ours, table, out)
    headings = [CONVERTED, SAME, NOT_QUITE, NONE, OLDER, DIFFER, LEFT]
    return "\n".join([printable(f"{first} -> {out}"), *report.text(headings)])


@cache
def load_table(system: str) -> Table:
    """The rows of a system, and `recorded`: each key of the version that is read, with its default."""
    folder = Path(__file__).parent
    table = yaml.safe_load(read_text(folder / f"from_{system}.yaml"))
    recorded = yaml.safe_load(read_text(folder / f"{system}_{table['version']}.yaml"))
    table["recorded"] = _named_as_now(recorded, table)
    return table


def _defaults(table: Table) -> Values:
    return {key: row["default"] for key, row in table["keys"].items() if "default" in row}


def _named_as_now(values: Values, table: Table) -> Values:
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


def _with_whole_mappings(values: Values, table: Table) -> Values:
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


def _as_yaml(ours: Values) -> str:
    tree: dict[str, Any] = {}
    for name, value in ours.items():
        *sections, last = name.split(".")
        section = tree
        for part in sections:
            section = section.setdefault(part, {})
        section[last] = value
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _report_what_is_left(report: Report, ours: Values, table: Table, out: str) -> None:
    """What --check refuses in the config that was written, by its keys alone."""
    grader = ours.get(GRADED_BY)
    if str(grader).startswith(YOURS):
        line = f"{GRADED_BY}={grader}: --check refuses it until it names a function of yours: {table['yours']}"
        report.add(LEFT, line)
    try:
        rules.load_checked(out)
    except ConfigError as error:
        for line in str(error).splitlines():
            report.add(LEFT, line)


# ----------------------------------------------------------------------------------------------- their keys to ours


def _translated(system: str, name: str, table: Table, written: Values, report: Report) -> Values:
    """Our keys whose values differ from our defaults. A key that they leave out has their default; a whole config, as
    they write it, leaves none out. ConfigError for values whose loss would change what is trained."""
    defaults = _defaults(table)
    rows = {key: _row_of(key, table) for key in (*defaults, *written)}
    read = _read_values(system, name, table, written, rows)
    values = defaults | read
    try:
        translation = TRANSLATE[system](values)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    ours: Values = dict(table["always"])
    asked: set[str] = set()  # our keys that they write
    order = list(table["keys"])
    for key in sorted(values, key=lambda key: order.index(rows[key])):
        row = table["keys"][rows[key]]
        meaning = _meaning(key, row, values, translation, table)
        ours |= meaning.keys
        line = f"{key}={text_of(values[key])}"
        is_default = key not in read or (_is_whole(written) and _has_default(key, read[key], table))
        if is_default:
            line += f", {NAMES[system]}'s default"
        else:
            asked |= meaning.keys.keys()
        line += f": {meaning.text}"
        if meaning.heading == REFUSED:
            report.refused.append(f"{line}; to convert without it, add {key}={_off(row)}")
        elif meaning.heading == NONE or not is_default:  # a default that is here is not named
            report.add(meaning.heading, line)
        if key not in read and "before" in row and meaning.heading != SAME:
            report.add(OLDER, f"{key}={text_of(values[key])}: {row['before']}")
    for key, why in translation.refused.items():
        report.refused.append(f"{key}={text_of(values[key])}: {why}")
    for key, note in translation.notes.items():
        report.add(NOT_QUITE, f"{key}={text_of(values[key])}: {note}")
    if report.refused:
        raise ConfigError(f"{name}: {REFUSED}:", *report.refused)
    for key, value in translation.keys.items():
        if value is not None or key in ours:
            ours[key] = value
    return _differing(ours, asked, table, report)


def _is_whole(written: Values) -> bool:
    """Whether a system wrote the file, with every key that it has."""
    return len(written) >= WHOLE


def _read_values(system: str, name: str, table: Table, written: Values, rows: Mapping[str, str]) -> Values:
    """What they write, with numbers that are numbers. rows: key -> its row. ConfigError for a value that is none, or
    that only hydra knows, and for a key that is like another one."""
    read: Values = {}
    for key, value in written.items():
        row = table["keys"][rows[key]]
        if rows[key] in (UNKNOWN, UNKNOWN_IN_TRAINING) and not _is_whole(written):
            _check_spelling(key, table, f"{name}: {NAMES[system]}")
        counts = row.keys() - {"same", "none"}
        if system == "verl" and counts and config_files.has_reference(value):
            problem = f"{key}={text_of(value):.80}: only hydra knows what this reference is"
            raise ConfigError(f"{name}: {problem}: {table['way_out']}, or add {key}=VALUE to this command")
        read[key] = _typed(key, value, row, name)
    return read


def _differing(ours: Values, asked: set[str], table: Table, report: Report) -> Values:
    """The values that are not our defaults; those that no key of theirs asked for are reported."""
    differing: Values = {}
    for key, value in ours.items():
        if key in FIELDS and json.dumps(value) == default_text(key):
            continue
        differing[key] = value
        if key in asked:
            continue
        line = f"{key}={text_of(value)} (ours {default_text(key)})"
        if key in table["assumed"]:
            line += f"; {table['assumed'][key]}"
        report.add(DIFFER, line)
    return differing


def _off(row: Row) -> str:
    """The value with which a refused key changes nothing."""
    harmless = list(row.get("values", ()))
    if harmless:
        return harmless[0]
    return "null"


def _row_of(key: str, table: Table) -> str:
    """The row of a key of theirs: its own; that of a wildcard, if they have such a key; else one of UNKNOWN."""
    rows = table["keys"]
    if key in rows:
        return key
    last = key.rpartition(".")[2]
    is_older = any(fnmatchcase(last, name) for name in _older_names(key, table))
    if is_older or key in table["recorded"] or _is_put_in(key, table):
        for pattern in rows:
            if fnmatchcase(key, pattern):
                return pattern
    for section in table["trains"]:
        if key.startswith(f"{section}."):
            return UNKNOWN_IN_TRAINING
    return UNKNOWN


def _older_names(key: str, table: Table) -> list[str]:
    """The names, or patterns of names, that other versions have in the key's section."""
    section = key.rpartition(".")[0]
    older: list[str] = []
    for pattern, names in table["older"].items():
        if fnmatchcase(section, pattern):
            older += names.split()
    return older


def _is_put_in(key: str, table: Table) -> bool:
    """Whether the key, or a section that it is in, is one in whose place hydra puts another one."""
    while key:
        if config_files.has_reference(table["recorded"].get(key)):
            return True
        key = key.rpartition(".")[0]
    return False


def _has_default(key: str, value: Any, table: Table) -> bool:
    """Whether a key of a whole config has what it has where nobody sets it."""
    if _is_put_in(key, table):
        return True
    return key in table["recorded"] and table["recorded"][key] == value


def _check_spelling(key: str, table: Table, place: str) -> None:
    """ConfigError for an unknown key that is like one of theirs: a mistake in writing."""
    section = key.rpartition(".")[0]
    top_sections = {row.partition(".")[0] for row in table["keys"]}
    if section and not get_close_matches(section.partition(".")[0], top_sections, cutoff=0.75):
        return  # of another program
    names = [row for row in table["keys"] if "*" not in row]
    names += table["recorded"]
    names += [f"{section}.{name}".lstrip(".") for name in _older_names(key, table)]
    near = hint(key[:200], names, cutoff=0.8)
    if near:
        raise ConfigError(f"{place} has no key '{key:.100}'.{near}")


def _typed(key: str, value: Any, row: Row, name: str) -> Any:
    """The value of a key, where a number may be quoted. ConfigError for a number that is none."""
    if type(value) in (int, float) and not is_number(value):
        raise ConfigError(f"{name}: {key}={text_of(value):.80}: expected a finite number, below {LARGEST:.0e}")
    default = row.get("default")
    kind = "text"
    if type(default) in (int, float):
        kind = "number"
    kind = row.get("kind", kind)
    if kind == "text" or type(value) in (int, float):
        return value
    text = text_of(value)
    quoted = yaml_text.typed(text)
    if is_number(quoted):
        return quoted
    others = [*row.get("values", ())]
    if text_of(default) not in others:
        others.append(text_of(default))
    if text in others:
        return quoted
    raise ConfigError(f"{name}: {key}={text:.80}: expected a number, or {' or '.join(others)}")


def _meaning(key: str, row: Row, values: Values, translation: Translation, table: Table) -> Meaning:
    """values: of all keys of theirs."""
    idle = _why_without_effect(row, values, table)
    if idle:
        return Meaning(SAME, idle)
    value = values[key]
    but = row.get("but", "")
    if "share" in row and isinstance(value, float) and 0 < value < 1:
        total = values[row["share"]]
        if total is None or total <= 0:
            return Meaning(NONE, f"a share of {row['share']}, which is not set")
        but = f"{value} x {row['share']}={total}"
        value *= total
        if row.get("updates"):
            value = math.ceil(value)
        value = int(value)
    ours = _keys_of_value(row, value, values, translation)
    if ours is None:
        return _without_counterpart(row)
    for name in ours:
        ours[name] = translation.keys.get(name, ours[name])
    if not ours:
        return Meaning(CONVERTED, "as here")
    text = ", ".join(f"{name}={text_of(new)}" for name, new in ours.items())
    if but:
        text += f"; {but}"
    return Meaning(CONVERTED, text, ours)


def _why_without_effect(row: Row, values: Values, table: Table) -> str:
    """Why the other keys leave a key no effect; "" if they do not."""
    for other in row.get("when", ()):
        if values[other] in OFF:
            return f"has an effect only with {' and '.join(row['when'])}"
    for other, excluding in row.get("unless", {}).items():
        excludes = values[other] == excluding
        if excluding == "set":
            excludes = values[other] not in (None, table["keys"][other]["default"])
        if excludes:
            return f"has no effect with {other}={text_of(values[other])}"
    return ""


def _without_counterpart(row: Row) -> Meaning:
    if "refused" in row:
        return Meaning(REFUSED, row["refused"])
    if "same" in row:
        return Meaning(SAME, row["same"])
    if "none" in row:
        return Meaning(NONE, row["none"])
    return Meaning(NONE, f"only {', '.join(row.get('values', ()))}")


def _keys_of_value(row: Row, value: Any, values: Values, translation: Translation) -> Values | None:
    """Our keys for a value of theirs; None if it has no counterpart."""
    ours = _keys_in_table(row, value, values)
    if ours is not None:
        return ours
    if "to" in row:
        if row.get("updates"):
            value = math.ceil(value / translation.updates_per_rollout)
        return {row["to"]: value, **row.get("with", {})}
    if "computed" in row:
        ours = {key: translation.keys.get(key) for key in row["computed"]}
        if None not in ours.values():
            return ours
    return None


def _keys_in_table(row: Row, value: Any, values: Values) -> Values | None:
    """Our keys that the row has for this value, or for an item of this list; None if it has none."""
    items = [value]
    if isinstance(value, list):
        items += value
    ours: Values | None = None
    for item in map(text_of, items):
        keys = row.get("values", {}).get(item)
        if keys is None:
            continue
        ours = ours or {}
        for key, new in keys.items():
            if isinstance(new, str):  # the name of a key of theirs stands for its value
                new = values.get(new, new)
            ours[key] = new
    return ours


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
