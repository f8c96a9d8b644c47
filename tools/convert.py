"""A config of TRL or verl -> one of ours, and a line on what became of each key.

    .venv/bin/python -m tools.convert trl|verl FILE [their.key=value ...] --write CONFIG.yaml

from_trl.yaml and from_verl.yaml hold the facts: each of their keys with its default, and what it means here. theirs.py
reads their files. This one applies a table, and computes what several of their keys make together.
"""

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from config import ConfigError, shortened
from support.check import rules
from support.inputs import reader
from support.inputs.files import read_text
from support.inputs.keys import FIELDS, default_text, hint
from support.inputs.nemo import text_of
from tools.theirs import Unread, Values, assigned, read, resolved

NAMES = {"trl": "TRL", "verl": "verl"}
CONVERTED = "converted:"
SAME = "no effect here:"
NONE = "NO COUNTERPART, and not in the config:"
REFUSED = "these keys affect training and have no counterpart here"
DIFFER = "set here, not in your config (their defaults that differ from ours, and what your keys imply):"
COMPUTED = "known only while your script runs, and so not in the config:"
UNKNOWN = "(unknown)"  # the row of keys that only a wildcard matches
GRADED_BY = "data.default.env_name"
YOURS = "your_module:"  # what --check cannot import: the user is to name a function of theirs in its place
READ = "read:"
LEFT = "still to be set or changed:"


def convert(system: str, name: str, words: Sequence[str], out: str) -> str:
    """Writes `out` from the config file `name` and overrides in the words of `system`, and returns what to print.
    ConfigError for a file of another form, a key that they do not have, what the table refuses, and an `out` that is
    there already."""
    if os.path.lexists(out):
        raise ConfigError(f"--write {out}: it already exists; name a new file")
    table = yaml.safe_load(read_text(Path(__file__).parent / f"from_{system}.yaml"))
    values, notes = read(system, name, table)
    defaults = {key: row["default"] for key, row in table["keys"].items() if "default" in row}
    values = {_current(key, table): value for key, value in (values | assigned(words)).items()}
    for mapping in [key for key, row in table["keys"].items() if row.get("default") == {}]:
        parts = {key.removeprefix(f"{mapping}."): values.pop(key) for key in [*values] if key.startswith(f"{mapping}.")}
        values |= {mapping: (values.get(mapping) or {}) | parts} if parts else {}
    ours, report = _translate(system, table, resolved(values, defaults if system == "verl" else {}), name)
    first = f"{name} ({table['source']})"
    lost = [line for heading in (NONE, COMPUTED) if report[heading] for line in (heading, *report[heading])]
    comments = "".join(f"# {line}\n" for line in (f"from {first}", *lost))
    try:
        Path(out).write_text(comments + _as_yaml(ours), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {out}: cannot be written ({error.strerror})") from None
    report[LEFT] = [
        f"  {key}={value}: --check refuses it until it names a function of yours: {table['yours'][key]}"
        for key, value in ours.items()
        if str(value).startswith(YOURS)
    ]
    try:
        cfg = reader.load(out)
        rules.check_config(cfg, rules.fewest_ranks(cfg))
    except ConfigError as error:
        report[LEFT] += [f"  {line}" for line in str(error).splitlines()]
    lines = [line for heading, lines in ({READ: notes} | report).items() if lines for line in (heading, *lines)]
    return "\n".join([f"{first} -> {out}", *lines])


def _current(key: str, table: Mapping) -> str:
    """The key, of a section that newer versions moved, as the table has it."""
    moved = next((old for old in table.get("moved", ()) if key.startswith(f"{old}.")), "")
    return key.replace(moved, table["moved"][moved], 1) if moved else key


def _translate(system: str, table: dict, theirs: Values, name: str) -> tuple[Values, dict[str, list[str]]]:
    """(our keys whose values differ from our defaults, heading -> lines of the report). A key that they leave out has
    their default. ConfigError for values whose loss would change what is trained."""
    rows = table["keys"]
    defaults = {key: row["default"] for key, row in rows.items() if "default" in row}
    rows_of = {key: _row_of(key, table, f"{name}: {NAMES[system]}") for key in theirs}
    unread = {key: value for key, value in theirs.items() if isinstance(value, Unread)}
    for key in [key for key in unread if GRADED_BY in rows[rows_of[key]].get("sizes", ())]:
        del unread[key]  # its text stays, which --check refuses
    theirs = {key: value for key, value in theirs.items() if key not in unread}
    for key, value in theirs.items():
        row, known = rows[rows_of[key]], defaults.get(rows_of[key], "")
        named = {text_of(each): each for each in (*row.get("values", ()), known)}
        is_number = type(known) in (int, float)
        value = theirs[key] = known if value is None and is_number and "null" not in named else value
        is_counted = is_number or (known is None and row.keys() & {"sizes", "updates"})
        if is_counted and type(value) not in (int, float) and not (type(value) is dict and "none" in row):
            if text_of(value) not in named:
                raise ConfigError(f"{name}: {key}={text_of(value):.80}: expected a number, or {' or '.join(named)}")
            theirs[key] = named[text_of(value)]  # a quoted default is one
    values = defaults | theirs
    sizes, num_updates = _sizes(system, values)
    ours = table["always"] | {key: value for key, value in sizes.items() if value is not None}
    asked: set[str] = set()  # our keys that they write
    report: dict[str, list[str]] = {CONVERTED: [], SAME: [], NONE: [], COMPUTED: [], DIFFER: []}
    refused = []
    for key in sorted(defaults | rows_of, key=lambda key: [*rows].index(rows_of.get(key, key))):
        row = rows[rows_of.get(key, key)]
        off = text_of(next(iter(row.get("values", ())), None))
        if key in unread and "refused" in row:
            why = "only running your script gives its value" if row.get("default") else row["refused"]
            refused.append(f"{key}={shortened(unread[key])}: {why}; to convert without it, add {key}={off}")
        elif key in unread and "same" not in row:
            instead = (
                f": {text_of(row['default'])}, {NAMES[system]}'s default, is in its place" if "default" in row else ""
            )
            report[COMPUTED].append(f"  {key}={shortened(unread[key])}{instead}")
        if key not in values:
            continue
        keys, heading, text = _meaning(row, values, values[key], sizes, num_updates, defaults)
        ours |= keys
        if heading == REFUSED and key in theirs:
            refused.append(f"{key}={text_of(values[key])}: {text}; to convert without it, add {key}={off}")
        elif key in theirs:
            asked |= keys.keys()
            report[heading].append(f"  {key}={text_of(values[key])}: {text}")
        elif heading in (NONE, REFUSED):
            report[NONE].append(f"  {key}={text_of(values[key])}, {NAMES[system]}'s default: {text}")
    made, problems = _loss_of_trl(values, num_updates) if system == "trl" else _loss_of_verl(values)
    ours |= made
    for key, why in problems.items():
        refused.append(f"{key}={text_of(values[key])}: {why}")
    if refused:
        raise ConfigError(f"{name}: {REFUSED}:", *refused)
    report[COMPUTED] += [f"  {table['way_out']}; or add key=value to this command"] * bool(report[COMPUTED])
    ours["loss_fn.ratio_clip_min"] = min(ours["loss_fn.ratio_clip_min"], 1.0)  # a ratio is never below 0
    if values.get("loss_type") == "cispo":  # TRL bounds the weight at epsilon_high itself, and not below
        ours |= {"loss_fn.ratio_clip_min": 1.0, "loss_fn.ratio_clip_max": ours["loss_fn.ratio_clip_max"] - 1}
    ours = {key: value for key, value in ours.items() if key not in FIELDS or json.dumps(value) != default_text(key)}
    for key in [key for key in ours if key not in asked]:
        why = f"; {table['assumed'][key]}" if key in table["assumed"] else ""
        report[DIFFER].append(f"  {key}={text_of(ours[key])} (ours {default_text(key)}){why}")
    return ours, report


def _loss_of_trl(v: Values, num_updates: int) -> tuple[Values, dict[str, str]]:
    """(keys of loss_fn that several of TRL's make, their key -> why its loss is not here)."""
    keys: Values = {}
    problems: dict[str, str] = {}
    by_sequence = v["importance_sampling_level"] == "sequence"
    if v["beta"] and v["use_bias_correction_kl"]:
        instead = "the gradient without the ratio, which was TRL's before 1.10, is use_bias_correction_kl=false"
        if num_updates > 1:
            steps = f"a rollout has {num_updates} optimizer steps"
            problems["use_bias_correction_kl"] = f"{steps}, and the KL here has no ratio to the old policy; {instead}"
        elif by_sequence:
            problems["use_bias_correction_kl"] = f"TRL multiplies the KL by the ratio of the sequence; {instead}"
    if by_sequence and v["use_vllm"] and v["vllm_importance_sampling_correction"]:
        mode = v["vllm_importance_sampling_mode"]
        if mode in ("token_truncate", "token_mask"):
            keys["loss_fn.importance_sampling_correction_level"] = "token"
        elif mode == "sequence_truncate":
            keys["loss_fn.truncated_importance_sampling_type"] = "tis"
        elif mode == "sequence_mask":
            keys["loss_fn.truncated_importance_sampling_type"] = "icepop"
            if v["vllm_importance_sampling_clip_min"] is None:
                keys["loss_fn.truncated_importance_sampling_ratio_min"] = 0.0
    return keys, problems


def _loss_of_verl(v: Values) -> tuple[Values, dict[str, str]]:
    """(keys of loss_fn that several of verl's make, their key -> why its loss is not here)."""
    keys: Values = {}
    problems: dict[str, str] = {}
    if v["actor_rollout_ref.actor.policy_loss.loss_mode"] != "gspo":
        return keys, problems
    if v["actor_rollout_ref.actor.loss_agg_mode"] == "token-mean":
        problems["actor_rollout_ref.actor.loss_agg_mode"] = (
            "GSPO here averages over sequences, as verl's did up to 0.9.0 whatever this key said: "
            "add actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"
        )
    weights = "algorithm.rollout_correction.rollout_is"
    if v[weights] == "token":
        problems[weights] = (
            "verl's GSPO gives each token's weight to its own gradient, ours to the sequence's; "
            f"add {weights}=sequence, or {weights}=null"
        )
    elif v[weights] == "sequence":
        keys["loss_fn.truncated_importance_sampling_type"] = "tis"
    return keys, problems


def _row_of(key: str, table: dict, place: str) -> str:
    """The row of a key of theirs: its own; that of a wildcard, if they have such a key; else UNKNOWN. ConfigError for a
    key that is like another one, which no row has: a mistake in writing."""
    rows, (section, dot, last) = table["keys"], key.rpartition(".")
    known = [name for part, names in table["known"].items() if fnmatchcase(section, part) for name in names.split()]
    row = key if key in rows else next((pattern for pattern in rows if fnmatchcase(key, pattern)), "")
    if key == row or (row and any(fnmatchcase(last, name) for name in known)):
        return row
    sections = {row.partition(".")[0] for row in rows}
    names = [*(each for each in rows if "*" not in each), *(section + dot + each for each in known)]
    is_other = section and not get_close_matches(section.partition(".")[0], sections, cutoff=0.75)
    if near := key not in names and not is_other and hint(key, names, cutoff=0.8):
        raise ConfigError(f"{place} has no key '{key:.100}'.{near}")
    return UNKNOWN


def _meaning(
    row: Mapping[str, Any], theirs: Values, value: Any, sizes: Values, num_updates: int, defaults: Values
) -> tuple[Values, str, str]:
    """(our keys, the heading to report it under, what to report) of a value of theirs."""
    values = {text_of(known): keys for known, keys in row.get("values", {}).items()}
    if any(theirs[key] in (None, False, 0, "no") for key in row.get("when", ())):
        return {}, SAME, f"has an effect only with {' and '.join(row['when'])}"
    for key, reason in row.get("unless", {}).items():
        if theirs[key] == reason or (reason == "set" and theirs[key] not in (None, defaults[key])):
            return {}, SAME, f"has no effect with {key}={text_of(theirs[key])}"
    but = row.get("but", "")
    if "share" in row and isinstance(value, float) and 0 < value < 1:  # of the steps of the run
        total = theirs[row["share"]]
        if not total or total < 0:
            return {}, NONE, f"a share of {row['share']}, which is not set"
        but = f"{value} x {row['share']}={total}"
        value = math.ceil(value * total) if row.get("updates") else int(value * total)
    named = [
        values[text_of(each)]
        for each in [value, *(value if isinstance(value, list) else ())]
        if text_of(each) in values
    ]
    if named:
        keys = {
            key: theirs.get(new, new) if isinstance(new, str) else new for each in named for key, new in each.items()
        }
    elif "to" in row:
        value = math.ceil(value / num_updates) if row.get("updates") else value
        keys = dict.fromkeys([row["to"]] if isinstance(row["to"], str) else row["to"], value) | row.get("with", {})
    elif "sizes" in row and None not in (sizes.get(key) for key in row["sizes"]):
        keys = {key: sizes[key] for key in row["sizes"]}
    elif "refused" in row:
        return {}, REFUSED, row["refused"]
    else:
        return {}, SAME if "same" in row else NONE, row.get("same") or row.get("none") or f"only {', '.join(values)}"
    text = ", ".join(f"{key}={text_of(new)}" for key, new in keys.items()) or "as here"
    return keys, CONVERTED, f"{text}; {but}" if keys and but else text


def _sizes(system: str, v: Values) -> tuple[Values, int]:
    """(our keys that several of theirs make, None where they do not; optimizer steps of a rollout where they count
    those). Batch sizes are prompts in verl, samples in TRL; a step is a rollout in verl, an optimizer step in TRL."""
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
        keys["grpo.batch_multiplier"] = (v.get("data.gen_batch_size") or num_prompts) / (num_prompts or 1)
        keys[GRADED_BY] = "reward_model" if v["reward_model.enable"] else "math"
        if path := v.get("custom_reward_function.path"):
            file = Path(str(path))
            parts = file.with_suffix("").parts if not file.is_absolute() and ".." not in file.parts else (file.stem,)
            keys[GRADED_BY] = f"{'.'.join(parts)}:{v['custom_reward_function.name']}"
    else:
        steps, num_processes = v["steps_per_generation"], v["num_processes"]
        if steps and v["generation_batch_size"] and num_processes == 1:  # a dump has both
            num_processes = max(1, v["generation_batch_size"] // (v["per_device_train_batch_size"] * steps))
        batch = v["per_device_train_batch_size"] * num_processes
        train = batch * v["gradient_accumulation_steps"]
        rollout = v["generation_batch_size"] or batch * (steps or v["gradient_accumulation_steps"])
        rollout = max(rollout, train)  # several rollouts of one optimizer step have the same weights
        num_prompts, rest = divmod(rollout, v["num_generations"] or 1)
        if rest:
            groups = f"whole groups of num_generations={v['num_generations']}"
            fix = "raise gradient_accumulation_steps, or add num_processes=8 if eight processes train"
            raise ConfigError(f"{rollout} samples of a rollout do not divide into {groups}: {fix}")
        num_updates = max(1, rollout // (train or 1)) * max(1, v["num_iterations"])
        total = v["vllm_max_model_length"] or v["max_completion_length"] + (v["max_prompt_length"] or 512)
        betas, curve = [v["adam_beta1"], v["adam_beta2"]], v["lr_scheduler_kwargs"]
        curve = curve if isinstance(curve, dict) else {}
        least = curve.get("min_lr_rate", curve["min_lr"] / v["learning_rate"] if "min_lr" in curve else None)
        epochs = max(math.ceil(v["num_train_epochs"]), v["max_steps"])  # which alone ends a run if it is set
        keys = {"policy.optimizer.kwargs.betas": betas, "grpo.max_num_epochs": epochs}
        keys |= {"policy.scheduler.min_factor": least, "cluster.gpus_per_node": num_processes}
        keys |= _graded_by(v.get("reward_funcs"), v.get("reward_model_name_or_path"))
    return keys | {
        "grpo.num_prompts_per_step": num_prompts,
        "policy.train_global_batch_size": train,
        "policy.max_total_sequence_length": total,
    }, num_updates


def _graded_by(functions: Any, model: str | None) -> Values:
    """Our keys for TRL's reward functions (names, dotted paths, in a script also models) and its reward model."""
    names = [*(functions if isinstance(functions, list) else [functions] if functions else []), *filter(None, [model])]
    name = str(names[0]) if len(names) == 1 else ""
    if name and (name == model or "/" in name):
        return {GRADED_BY: "reward_model", "env.reward_model.model_name": name}
    if re.fullmatch(r"(trl\.(\w+\.)*)?accuracy_reward", name):
        return {GRADED_BY: "math", "data.default.output_key": "solution"}
    module, _, function = name.rpartition(".") if re.fullmatch(r"\w+(\.\w+)*", name) else ("", "", "your_function")
    return {GRADED_BY: f"{YOURS}{function}" if module in ("", "__main__") else f"{module}:{function}"}


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
    parser = argparse.ArgumentParser(
        prog=".venv/bin/python -m tools.convert", description="Converts a config of TRL or verl to one of grpo.py"
    )
    parser.add_argument("system", choices=NAMES)
    parser.add_argument("file")
    parser.add_argument("overrides", nargs="*", metavar="their.key=value")
    parser.add_argument("--write", required=True, metavar="CONFIG.yaml")
    args = parser.parse_intermixed_args()
    try:
        print(convert(args.system, args.file, args.overrides, args.write))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
