"""Yaml files and `key.sub=value` overrides -> Config; Config -> yaml.

A value stays the text that was written until the type of its key reads it: 1e-6 is a number, `no` may be a name, and
007 keeps its zeros. Only values of the user's own keys, such as env.custom, are what yaml makes of them. A mistake is a
line of a ConfigError that names the place, the key, the value, and the fix. Mistakes of keys and values are told
together; what cannot be read at all, such as an override without `=`, is told alone. Whether values fit each other is
judged in base/check.
"""

import json
import math
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec
import yaml

from base.inputs import keys, nemo
from base.inputs.keys import FIELDS, FREE, LISTS, SECTIONS, numbered_name, plain_name
from base.inputs.yaml_text import Document, Plain, read_yaml, typed
from base.system.users_code import ROOT
from config import Config, ConfigError, DataError, Section, shortened

MOST_PROBLEMS = 20  # told at once
_COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


class Entry(NamedTuple):
    """A key that a file or an override sets, by its full name, where, and the number of the file or override."""

    name: str
    value: Plain
    place: str
    source: int = 0


class Reading:
    """What `read` finds: a config in which a key with a mistake has its default, and the mistakes."""

    cfg: Config

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.doubtful: set[str] = set()  # keys of whose values nothing can be said: they are wrong or misspelled
        self.verdicts: dict[str, str] = {}  # on each key that is set

    def refuse(self, entry: Entry, ours: str, problem: ConfigError) -> None:
        """Adds a mistake. ours: the key that the entry would have set."""
        text = f"{entry.place}: {problem}"
        self.problems.append(text)
        self.verdicts[entry.name] = f"refused: {text}"
        self.doubtful.update({plain_name(entry.name), plain_name(ours)} & FIELDS.keys())

    def check_known(self, name: str) -> None:
        """ConfigError if there is no such key. The key that is meant is looked for only where the problem is told, for
        that takes milliseconds."""
        plain = plain_name(name)
        if plain in FIELDS or keys.is_free(name):
            return
        if len(self.problems) >= MOST_PROBLEMS:
            raise ConfigError(f"unknown key '{plain:.200}'")
        from base.inputs import key_help  # of mistakes alone, here and below

        meant = key_help.meant_key(plain, FIELDS)
        if meant:
            self.doubtful.add(meant)
        raise ConfigError(key_help.unknown_key(plain, meant))

    def raise_problems(self, others: Sequence[str] = ()) -> None:
        """ConfigError if there are problems, here or among `others` that are about no doubtful key."""
        sound = [text for text in others if not any(name in text for name in self.doubtful)]
        problems = [*self.problems, *sound]
        if len(problems) > MOST_PROBLEMS:
            problems[MOST_PROBLEMS:] = [f"and {len(problems) - MOST_PROBLEMS:,} more"]
        if problems:
            raise ConfigError(*problems)


def load(path: str | Path, overrides: Sequence[str] = (), *, explain: bool = False) -> Config:
    """The config of a yaml file, over the files that its `defaults:` names and under `key.sub=value` overrides.

    The last one to set a key wins, by whatever spelling; a list is one value. Raises ConfigError, a line for each
    mistake. Of a config with NeMo RL's keys, rank 0 says that some keys do not matter; with `explain`, as --check has
    it, a verdict on every key is printed.
    """
    reading = read(path, overrides, explain=explain)
    reading.raise_problems()
    return reading.cfg


def read(path: str | Path, overrides: Sequence[str] = (), *, explain: bool = False) -> Reading:
    """As `load`, but mistakes of keys are returned, so that others can be told with them. Raises ConfigError where a
    file or an override cannot be read at all."""
    sources = _read_file(Path(path), ())
    num_files = len(sources)
    for override in overrides:
        sources.append([_read_override(override)])
    entries = _merge(sources)
    reading = Reading()
    ours = _translated(_Translation(entries, num_files), reading)
    reading.cfg = _Values(ours, reading).build(Config(), "")
    if explain:
        _print_verdicts(reading.verdicts, entries)
    elif not reading.problems and os.environ.get("RANK", "0") == "0":
        _print_idle_keys(reading.verdicts)
    return reading


def to_yaml(cfg: Config) -> str:
    """The whole config as yaml that `load` reads back as an equal one."""
    return yaml.safe_dump(asdict(cfg), sort_keys=False, allow_unicode=True)


# -------------------------------------------------------------------------------------------- files and overrides


def _read_file(path: Path, parents: tuple[Path, ...]) -> list[list[Entry]]:
    """The entries of the files that its defaults name, file by file, then its own. parents: the files whose defaults
    it is."""
    try:
        text = read_yaml(path)
    except DataError as error:
        named = f" (named by the defaults of {parents[-1]})" if parents else ""
        folder = path.parent
        if not os.path.isdir(folder) or not any(folder.glob("*.yaml")):
            folder = ROOT / "configs"
        files = ", ".join(sorted(file.name for file in folder.glob("*.yaml")))
        raise ConfigError(f"{error}{named}; yaml files in {folder}: {files or 'none'}") from None
    if path.resolve() in [parent.resolve() for parent in parents]:
        raise ConfigError(f"{path}: defaults form a cycle: {' -> '.join(map(str, (*parents, path)))}")
    document = Document(text, str(path), keys.is_free)
    tree = document.value
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected sections of keys, as in 'grpo: {{seed: 1}}', got {_shown(tree)}")
    below: list[list[Entry]] = []
    defaults = tree.pop("defaults", [])
    for name in defaults if isinstance(defaults, list) else [defaults]:
        if not isinstance(name, str) or not name:
            problem = f"defaults: expected a file or a list of files, got {_shown(name)}"
            raise ConfigError(f"{document.places['defaults']}: {problem}")
        file = path.parent / name
        if file.suffix != ".yaml" and not os.path.exists(file):  # NeMo RL's guides leave out the ending, too
            file = Path(f"{file}.yaml")
        below += _read_file(file, (*parents, path))
    own = list(_entries(tree, "", document.places))
    replacing = [entry for entry in own if entry.name.endswith("._override_")]  # a whole section: before its keys
    others = [entry for entry in own if not entry.name.endswith("._override_")]
    return [*below, replacing + others]


def _entries(tree: dict[str, Plain], prefix: str, places: dict[str, str]) -> Iterator[Entry]:
    """Everything in a tree that is not a section with keys; before the entries of a list an `_override_`, as it
    replaces all."""
    for key, value in tree.items():
        name = prefix + key
        is_section = plain_name(name) in SECTIONS or nemo.is_section(name)
        if isinstance(value, dict) and value and is_section:
            yield from _entries(value, f"{name}.", places)
        elif name in LISTS and isinstance(value, list) and value:
            yield Entry(f"{name}._override_", "true", places[name])
            for number, item in enumerate(value):
                if not isinstance(item, dict) or not item:
                    problem = f"entry {number + 1}: expected a mapping with keys, got {keys.text_of(item):.80}"
                    raise ConfigError(f"{places[name]}: {name}: {problem}")
                yield from _entries(item, f"{name}.{number}.", places)
        else:
            yield Entry(name, value, places[name])


def _read_override(override: str) -> Entry:
    """The entry of `key.sub=value`. The value is the text as typed; lists, null and the user's own keys are yaml."""
    place = f"command line {shortened(override)}"
    name, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"{place}: expected key.sub=value, as in grpo.seed=1")
    is_list = name in FIELDS and name not in LISTS and get_origin(keys.split_optional(FIELDS[name].type)[0]) is tuple
    if is_list or name in FREE:
        return Entry(name, Document(text, place, keys.is_free, name).value, place)
    value = typed(text)
    if value is None or keys.is_free(name):
        return Entry(name, value, place)
    return Entry(name, text, place)


def _replaced_section(name: str) -> str | None:
    """`grpo._override_` -> grpo."""
    section, _, last = name.rpartition(".")
    return section if section and section in SECTIONS and last == "_override_" else None


def _merge(sources: Sequence[Sequence[Entry]]) -> dict[str, Entry]:
    """Key -> the entry in force. A later value replaces all keys below it: `env: null` those of `env.math`. A later key
    replaces the null, {} or [] above it: `env.math.num_workers` an earlier `env: {}`."""
    merged: dict[str, Entry] = {}
    for number, source in enumerate(sources):
        for entry in source:
            _add(merged, entry._replace(source=number))
    return merged


def _add(merged: dict[str, Entry], entry: Entry) -> None:
    name = _replaced_section(entry.name) or entry.name
    below = [key for key in merged if key.startswith(f"{name}.")]
    if below and entry.value == {}:  # an empty section changes nothing
        return
    for key in below:
        del merged[key]
    if name != entry.name:  # `_override_: true`, or a wrong value of it
        if entry.value != "true":
            merged[entry.name] = entry
        return
    above = name.rpartition(".")[0]
    while above:
        if above in merged and merged[above].value in (None, {}, []):
            del merged[above]
        above = above.rpartition(".")[0]
    merged.pop(name, None)
    merged[name] = entry


# ------------------------------------------------------------------------------ pass one: their keys to ours


class _Translation:
    """Pass one: the keys that are set -> a verdict on each, with what it sets here, by NeMo RL's table. Values stay as
    they are written, with `${}` replaced."""

    def __init__(self, entries: dict[str, Entry], num_files: int):
        self.num_files = num_files
        self.entries = entries
        self.rows = nemo.rows_of(entries.keys())
        self.added = nemo.settings_beside(entries.keys())
        written = {name: entry.value for name, entry in entries.items()} | self.added
        self.written = {numbered_name(name): value for name, value in written.items()}  # what `${key}` reads

    def in_order(self) -> list[Entry]:
        """File by file, then override by override; within a file, renamed keys come after plain ones. Of several
        spellings of one key, the last one wins."""

        def order(entry: Entry) -> tuple[int, bool]:
            source = entry.source
            row = self.rows[entry.name]
            if row.decides and source < self.num_files:
                source = self.num_files - 1
            return source, bool(row.target)

        return sorted(self.entries.values(), key=order)

    def judged(self, entry: Entry) -> nemo.Verdict:
        """The verdict on a key. ConfigError, without the place, if it is refused."""
        name = entry.name
        row = self.rows[name]
        if _replaced_section(name):
            raise ConfigError(f"{name}: expected true, got {_shown(entry.value)}")
        value = entry.value
        if row.same or not row.why:  # the value matters
            value = self.resolved(name, value)
            if keys.is_free(name) and value != entry.value:
                value = typed(value)
        return nemo.judge(name, value, row, self._value_of)

    def _value_of(self, name: str) -> Plain:
        return typed(self.resolved(name, f"${{{name}}}"))

    def resolved(self, name: str, value: Plain) -> Plain:
        """The value of a key, with each `${}` in its text replaced."""
        if name in FREE or not isinstance(value, str) or "${" not in value:
            return value
        from base.inputs.references import resolved  # a config without references does without

        return resolved(name, value, self.written)


def _translated(translation: _Translation, reading: Reading) -> dict[str, Entry]:
    """Pass one: keys of ours -> the entries that set them, with values of ours. Adds a verdict on each key."""
    ours: dict[str, Entry] = {}
    for entry in translation.in_order():
        try:
            verdict = translation.judged(entry)
            for key in verdict.settings:
                reading.check_known(key)
        except ConfigError as problem:
            reading.refuse(entry, entry.name, problem)
            continue
        reading.verdicts[entry.name] = verdict.text
        for key, value in verdict.settings.items():
            earlier = ours.get(key)
            # Two spellings of one key, and two values.
            if earlier and key in (earlier.name, entry.name) and typed(earlier.value) != typed(value):
                reading.verdicts[earlier.name] = f"does not matter: {entry.name} decides"
            ours[key] = entry._replace(value=value)
    if not reading.problems:
        for key, value in translation.added.items():
            ours[key] = Entry(key, translation.resolved(key, value), "nemo.yaml")
    return ours


def _print_verdicts(verdicts: Mapping[str, str], entries: Mapping[str, Entry]) -> None:
    """Prints how many keys have which verdict, then a line for each key."""
    counts = []
    lines = []
    for kind in nemo.KINDS:
        names = [name for name, text in verdicts.items() if text.startswith(kind)]
        if names:
            counts.append(f"{len(names)} {kind}")
        lines += [f"{name}={keys.text_of(entries[name].value)}: {verdicts[name]}" for name in names]
    print(f"{len(verdicts)} keys: {', '.join(counts)}", *lines, "", sep="\n")


def _print_idle_keys(verdicts: Mapping[str, str]) -> None:
    """Prints that some keys do not matter here."""
    idle = [name for name, text in verdicts.items() if text.startswith("does not matter")]
    if idle:
        some = ", ".join(idle[:3])
        if len(idle) > 3:
            some += ", .."
        print(f"without effect here: {len(idle)} keys of the config ({some}); --check --explain says why")


# ------------------------------------------------------------------------- pass two: texts to values and a Config


class _Values:
    """Pass two: values of the types and within the bounds of config.py."""

    def __init__(self, ours: Mapping[str, Entry], reading: Reading):
        self.problems = reading.problems
        self.values: dict[str, Any] = {}  # by keys of ours
        for name, entry in ours.items():
            try:
                self._set(name, entry.value)
            except ConfigError as problem:
                reading.refuse(entry, name, problem)

    def _set(self, name: str, value: Plain) -> None:
        """Sets a key of ours. ConfigError if the value is wrong."""
        for free in FREE:
            if name.startswith(f"{free}."):
                self._set_free(free, name.removeprefix(f"{free}."), value)
                return
        plain = plain_name(name)
        if plain in SECTIONS:
            self._check_section(name, value)
        else:
            self.values[numbered_name(name)] = checked(name, value, FIELDS[plain].type)

    def _set_free(self, free: str, name: str, value: Plain) -> None:
        """Sets one of the user's own keys below `free`."""
        section = self.values.setdefault(free, {})
        kind = get_args(FIELDS[free].type)[1]
        above, _, last = name.rpartition(".")
        if free == "env.custom" and above:  # such as env.custom.my.envs:Class.argument
            section.setdefault(above, {})[last] = value
        else:
            section[name] = checked(f"{free}.{name}", value, kind)

    def _check_section(self, name: str, value: Plain) -> None:
        """A section without keys sets nothing, nor does null for a list of sections. ConfigError for another value."""
        plain = plain_name(name)
        if value in ({}, []) or (value is None and plain in LISTS):
            return
        from base.inputs.key_help import keys_of

        raise ConfigError(f"{name} is a section, got {_shown(value)}; set its keys: {keys_of(plain)}")

    def build(self, section: Section, prefix: str) -> Section:
        """A section with the values of its keys in place of its own. prefix: its full name and a dot."""
        changes = {}
        for key in fields(section):
            name = prefix + key.name
            if name in LISTS:
                changes[key.name] = self._build_list(section, name, prefix)
            elif is_dataclass(key.type):
                changes[key.name] = self.build(getattr(section, key.name), f"{name}.")
            elif name in self.values:
                changes[key.name] = self.values[name]
        return replace(section, **changes)

    def _build_list(self, section: Section, name: str, prefix: str) -> tuple[Section, ...]:
        """The sections of a list. A key that one of them does not set has the value of the key below `default`."""
        default = self.build(getattr(section, "default", SECTIONS[name]()), f"{prefix}default.")
        set_numbers = {int(key[len(name) + 1 :].partition(".")[0]) for key in self.values if key.startswith(f"{name}.")}
        for number in range(len(set_numbers)):
            if number not in set_numbers:
                self.problems.append(f"{name}.{max(set_numbers)} is set, but not {name}.{number}: leave no gaps")
                return ()
        return tuple(self.build(default, f"{name}.{number}.") for number in range(len(set_numbers)))


def checked(name: str, value: Plain, kind: keys.Kind) -> Any:
    """A text, null, list or mapping as the value of the key `name`, whose type is `kind`. ConfigError if it is none, or
    out of bounds."""
    if get_origin(kind) is Mapping and value is None:
        value = {}
    if get_origin(kind) is Mapping and isinstance(value, dict):
        of_each = get_args(kind)[1]
        return {key: checked(f"{name}.{key}", child, of_each) for key, child in value.items()}
    plain = plain_name(name)
    try:
        new = msgspec.convert(_read_numbers(value, kind), kind)
        floats = [item for item in _items(new) if isinstance(item, float)]
        if not all(map(math.isfinite, floats)):
            raise msgspec.ValidationError
    except msgspec.ValidationError:
        from base.inputs.key_help import default_text, meanings, type_name

        hint = f"; the default is {default_text(plain)}" if plain in FIELDS else ""
        if get_origin(kind) is Literal:
            hint += f" ({meanings()[plain]})"
        if name.startswith("env.custom."):
            hint = "; give an env_name, then its arguments: env.custom.my_module:MyClass.near=6"
        raise ConfigError(f"{name:.200}: expected {type_name(kind)}, got {_shown(value)}{hint}") from None
    if plain in FIELDS:
        _check_bounds(name, new)
    return new


def _items(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _check_bounds(name: str, value: Any) -> None:
    """ConfigError if a value, or an item of a list, is an empty text or a number out of the bounds of its key."""
    plain = plain_name(name)
    problem = "empty strings are not allowed" if "" in _items(value) else ""
    numbers = [item for item in _items(value) if isinstance(item, int | float)]
    for limit in filter(None, keys.bounds(plain).split(", ")):
        sign, bound = limit.split()
        if not all(_COMPARE[sign](number, float(bound)) for number in numbers):
            problem = f"must be {keys.bounds(plain)}"
    if problem:
        from base.inputs.key_help import meanings

        raise ConfigError(f"{name}={json.dumps(value):.80}: {problem} ({meanings()[plain]})")


def _read_numbers(value: Plain, kind: keys.Kind) -> Plain:
    """A text, or each text of a list, as true, false or a number, unless `kind` is a type of text."""
    if isinstance(value, list):
        items = [kind for kind in get_args(keys.split_optional(kind)[0]) if kind is not Ellipsis]
        return [_read_numbers(item, items[0] if items else str) for item in value]
    base = keys.split_optional(kind)[0]
    if not isinstance(value, str) or base is str or base is Any or get_origin(base) is Literal:
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for number in (int, float):
        try:
            return number(value)
        except ValueError:
            continue
    return value


def _shown(value: Plain) -> str:
    if value is None:
        return "null"
    return "a mapping" if isinstance(value, dict) else shortened(value)
