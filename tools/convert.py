"""A config of TRL or verl -> one of ours, and a line on what became of each key.

    python -m tools.convert trl|verl FILE [their.key=value ...] --write CONFIG.yaml

from_trl.yaml and from_verl.yaml hold the facts: each of their keys with its default, and what it means here. This file
reads their configs, applies a table, and computes the sizes of a step from several keys.
"""

import argparse
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from string import Template
from typing import Any

import yaml

from check import reader, rules
from check.keys import FIELDS, default_text, hint
from check.nemo import text_of
from config import ConfigError, shortened
from hf.files import read_text

NAMES = {"trl": "TRL", "verl": "verl"}
TAKEN = "taken:"
SAME = "no effect here:"
NONE = "NO COUNTERPART, and not in the config:"
DIFFER = "their defaults that differ from ours, and are in the config:"
UNKNOWN = "(unknown)"  # the row of keys that only a wildcard matches
LEFT = "still to be set or changed:"
Values = dict[str, Any]  # key -> value


def convert(system: str, name: str, words: Sequence[str], out: str) -> str:
    """Writes `out` from the config file `name` and overrides in the words of `system`, and returns what to print.
    ConfigError for a file of another form, a key that they do not have, and an `out` that is there already."""
    if os.path.lexists(out):
        raise ConfigError(f"--write {out}: it is there already; name a new file")
    table = yaml.safe_load(read_text(Path(__file__).parent / f"from_{system}.yaml"))
    theirs = _read(system, name) | _assigned(words)
    ours, lines = _translate(system, table, theirs, name)
    first = f"{name} ({table['source']})"
    try:
        Path(out).write_text(f"# from {first}\n{_as_yaml(ours)}", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {out}: cannot be written ({error.strerror})") from None
    try:
        cfg = reader.load(out)
        rules.check_config(cfg, rules.fewest_ranks(cfg))
    except ConfigError as error:
        lines += [LEFT, *(f"  {line}" for line in str(error).splitlines())]
    return "\n".join([f"{first} -> {out}", *lines])


def _read(system: str, name: str) -> Values:
    """The values of TRL's keys in a yaml or json file, or of verl's overrides in a text or shell script, with the
    script's own variables and those of the environment put in."""
    text = read_text(name)
    if system == "trl":
        values = _yaml(text, name)
        if not isinstance(values, dict):
            raise ConfigError(f"{name}: expected a mapping of TRL's keys, in yaml or json")
        return values
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise ConfigError(f"{name}: not the words of a shell ({error})") from None
    variables = dict(os.environ)
    overrides = []
    for word in words:
        key, equals, value = Template(word).safe_substitute(variables).partition("=")
        if key.isidentifier():
            variables[key] = value
        elif equals and re.fullmatch(r"\+*\w+(\.\w+)+", key):
            overrides.append(f"{key}={value}")
    if not overrides:
        raise ConfigError(f"{name}: no override of verl's in it, such as algorithm.adv_estimator=grpo")
    return _assigned(overrides)


def _yaml(text: str, where: str) -> Any:
    try:
        return reader.Loader(text).get_single_data()
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not yaml: {' '.join(str(error).split())}") from None


def _assigned(words: Sequence[str]) -> Values:
    """The values of words key=value, each as yaml reads it."""
    values: Values = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or "$" in text:
            reason = "this value is for a shell to compute: write it out" if equals else "expected key=value"
            raise ConfigError(f"{shortened(word)}: {reason}")
        values[name.lstrip("+")] = _yaml(text, word)
    return values


def _translate(system: str, table: dict, theirs: Values, name: str) -> tuple[Values, list[str]]:
    """(our keys whose values differ from our defaults, the report). A key that they leave out has their default."""
    rows = table["keys"]
    rows_of = {key: key for key, row in rows.items() if "default" in row}
    for key in theirs:
        row = rows_of[key] = _row_of(key, table, f"{name}: {NAMES[system]}")
        value, known = theirs[key], rows[row].get("default", "")
        is_counted = type(known) in (int, float) or (known is None and rows[row].keys() & {"sizes", "updates"})
        named = {text_of(each): each for each in (*rows[row].get("values", ()), known)}
        if is_counted and type(value) not in (int, float):
            if text_of(value) not in named:
                raise ConfigError(f"{name}: {key}={text_of(value):.80}: expected a number, or {' or '.join(named)}")
            theirs[key] = named[text_of(value)]  # a quoted default is one
    values = {key: rows[row].get("default") for key, row in rows_of.items()} | theirs
    sizes, num_updates = _sizes(system, values)
    ours = table["always"] | sizes
    implied = set(table["always"])  # of our keys: those that they do not write
    report: dict[str, list[str]] = {TAKEN: [], SAME: [], NONE: [], DIFFER: []}
    for key in sorted(rows_of, key=lambda key: [*rows].index(rows_of[key])):
        keys, heading, text = _meaning(rows[rows_of[key]], values, values[key], num_updates)
        ours |= keys
        implied = implied - keys.keys() if key in theirs else implied | keys.keys()
        if key in theirs:
            report[heading].append(f"  {key}={text_of(values[key])}: {text}")
    ours["loss_fn.ratio_clip_min"] = min(ours["loss_fn.ratio_clip_min"], 1.0)  # a ratio is never below 0
    if values.get("loss_type") == "cispo":  # TRL bounds the weight at epsilon_high itself, and not below
        ours |= {"loss_fn.ratio_clip_min": 1.0, "loss_fn.ratio_clip_max": ours["loss_fn.ratio_clip_max"] - 1}
    ours = {key: value for key, value in ours.items() if key not in FIELDS or json.dumps(value) != default_text(key)}
    report[DIFFER] = [f"  {key}={text_of(ours[key])} (ours {default_text(key)})" for key in ours if key in implied]
    return ours, [line for heading, lines in report.items() if lines for line in (heading, *lines)]


def _row_of(key: str, table: dict, place: str) -> str:
    """The row of a key of theirs: its own; that of a wildcard, if they have such a key; else UNKNOWN. ConfigError for a
    key that no row has, and under a wildcard for one that is like another key: a mistake in writing."""
    rows, (section, dot, last) = table["keys"], key.rpartition(".")
    known = [name for part, names in table["known"].items() if fnmatchcase(section, part) for name in names.split()]
    row = key if key in rows else next((pattern for pattern in rows if fnmatchcase(key, pattern)), "")
    if key == row or (row and any(fnmatchcase(last, name) for name in known)):
        return row
    names = [*(each for each in rows if "*" not in each), *(section + dot + each for each in known)]
    near = hint(key, names, cutoff=0.75 if row else 0.6)
    if near or not row:
        raise ConfigError(f"{place} has no key '{key:.100}'.{near}")
    return UNKNOWN


def _meaning(row: Mapping[str, Any], theirs: Values, value: Any, num_updates: int) -> tuple[Values, str, str]:
    """(our keys, the heading to report it under, what to report) of a value of theirs."""
    values = {text_of(known): keys for known, keys in row.get("values", {}).items()}
    if any(theirs[key] in (None, False, 0, "no") for key in row.get("when", ())):
        return {}, SAME, f"counts with {' and '.join(row['when'])}"
    if text_of(value) in values:
        keys = {
            key: theirs.get(new, new) if isinstance(new, str) else new for key, new in values[text_of(value)].items()
        }
    elif "to" in row:
        value = math.ceil(value / num_updates) if row.get("updates") else value
        keys = dict.fromkeys([row["to"]] if isinstance(row["to"], str) else row["to"], value) | row.get("with", {})
    elif "sizes" in row:
        return {}, TAKEN, row["sizes"]
    else:
        return {}, SAME if "same" in row else NONE, row.get("same") or row.get("none") or f"only {', '.join(values)}"
    text = ", ".join(f"{key}={text_of(new)}" for key, new in keys.items()) or "as here"
    return keys, TAKEN, f"{text}; {row['but']}" if keys and "but" in row else text


def _sizes(system: str, v: Values) -> tuple[Values, int]:
    """(our keys that several of theirs make, optimizer steps of a rollout where they count those). verl's batch sizes
    are prompts, TRL's are samples; a step of verl is a rollout, a step of TRL is one of the optimizer."""
    if system == "verl":
        num_prompts, num_samples = v["data.train_batch_size"], v["actor_rollout_ref.rollout.n"]
        train, num_updates = v["actor_rollout_ref.actor.ppo_mini_batch_size"] * num_samples, 1
        total = v["data.max_prompt_length"] + v["data.max_response_length"]
        files = {"data.train": v.get("data.train_files"), "data.validation": v.get("data.val_files")}
        lists = {key: paths if isinstance(paths, list) else [paths] for key, paths in files.items() if paths}
        keys: Values = {key: [{"data_path": path} for path in paths] for key, paths in lists.items()}
        for sections in keys.values():  # files of several sets are often called alike
            for section in sections if len(sections) > 1 else ():
                section["name"] = Path(str(section["data_path"])).parent.name or None
        num_ranks = v["trainer.nnodes"] * v["trainer.n_gpus_per_node"]
        shards = v["actor_rollout_ref.actor.fsdp_config.fsdp_size"]
        keys["policy.dtensor_cfg.dp_replicate_size"] = max(1, num_ranks // shards) if shards > 0 else 1
    else:
        batch = v["per_device_train_batch_size"] * v["num_processes"]
        train = batch * v["gradient_accumulation_steps"]
        rollout = v["generation_batch_size"] or batch * (v["steps_per_generation"] or v["gradient_accumulation_steps"])
        rollout = max(rollout, train)  # several rollouts of one optimizer step have the same weights
        num_prompts, rest = divmod(rollout, v["num_generations"] or 1)
        if rest:
            groups = f"whole groups of num_generations={v['num_generations']}"
            raise ConfigError(f"{rollout} samples of a rollout are no {groups}")
        num_updates = max(1, rollout // (train or 1)) * max(1, v["num_iterations"])
        total = v["vllm_max_model_length"] or v["max_completion_length"] + (v["max_prompt_length"] or 512)
        betas = [v["adam_beta1"], v["adam_beta2"]]
        keys = {"policy.optimizer.kwargs.betas": betas, "grpo.max_num_epochs": math.ceil(v["num_train_epochs"])}
    return keys | {
        "grpo.num_prompts_per_step": num_prompts,
        "policy.train_global_batch_size": train,
        "policy.max_total_sequence_length": total,
        "policy.sequence_packing.train_mb_tokens": max(2048, total),
    }, num_updates


def _as_yaml(ours: Values) -> str:
    tree: dict[str, Any] = {}
    for name, value in ours.items():
        *sections, last = name.split(".")
        section = tree
        for part in sections:
            section = section.setdefault(part, {})
        section[last] = value
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.convert", description="A config of TRL or verl as ours.")
    parser.add_argument("system", choices=NAMES)
    parser.add_argument("file")
    parser.add_argument("overrides", nargs="*", metavar="their.key=value")
    parser.add_argument("--write", required=True, metavar="CONFIG.yaml")
    args = parser.parse_args()
    try:
        print(convert(args.system, args.file, args.overrides, args.write))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
