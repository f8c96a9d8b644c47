"""The tables of docs/coming_from.md, made of what the program itself reads: check/nemo.yaml, from_{trl,verl}.yaml.

python tests/coming_from_page.py       writes them anew
"""

import io
import json
import sys
from collections.abc import Iterable
from contextlib import redirect_stderr
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import yaml

from check import keys, reader
from check.keys import FIELDS, SECTIONS
from check.nemo import TABLE, text_of

PAGE = ROOT / "docs" / "coming_from.md"
NEMO_DEFAULTS = ROOT / "tests" / "helpers" / "nemo_yaml" / "math_1b.yaml"
BEGIN, END = "<!-- {}: written by tests/coming_from_page.py -->\n", "<!-- end -->\n"


def code(text: Any) -> str:
    return f"`{text}`".replace("|", "\\|")


def settings(keys: dict[str, Any], theirs: Iterable[str] = ()) -> str:
    """Our keys with values, as a command line has them; a value that is a key of theirs stands for its value."""
    shown = {
        key: f"<{value}>" if isinstance(value, str) and value in theirs else text_of(value)
        for key, value in keys.items()
    }
    return " ".join(code(f"{key}={value}") for key, value in shown.items())


def markdown(head: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> str:
    rows = [head, ("---",) * len(head), *lines]
    return "\n".join(f"| {' | '.join(cell or '-' for cell in row)} |" for row in rows) + "\n"


# ------------------------------------------------------------------------------------------------------ TRL and verl


def counterpart(row: dict, rows: dict) -> tuple[str, list[str]]:
    """(what a key of theirs is here, what is to be known of it)."""
    ours = [row["to"]] if isinstance(row.get("to"), str) else list(row.get("to", ()))
    parts = [" and ".join(map(code, ours))] * bool(ours)
    if "sizes" in row:
        parts.append(" ".join(code(word) if word in FIELDS else word for word in row["sizes"].split()))
    notes = []
    by_meaning: dict[str, list[str]] = {}
    for value, named in row.get("values", {}).items():
        by_meaning.setdefault(settings(named, rows), []).append(text_of(value))
    for meaning, values in by_meaning.items():
        if meaning:
            parts.append(f"{', '.join(values)}: {meaning}")
        else:
            notes.append(f"as here with {', '.join(values)}")
    if "with" in row:
        notes.append(f"with {settings(row['with'])}")
    if row.get("updates"):
        notes.append("counts optimizer steps, ours rollouts: it is divided")
    if "when" in row:
        notes.append(f"counts with {' and '.join(map(code, row['when']))}")
    if "but" in row:
        notes.append(row["but"])
    if "none" in row or (parts and "same" in row):
        notes.append(f"else: {row.get('none') or row['same']}")
    return "; ".join(parts), notes


def default_here(row: dict) -> str:
    """Of the only key of ours that takes the value as it is."""
    ours = row.get("to")
    return code(ours_by_default(ours)) if isinstance(ours, str) and ours not in SECTIONS else ""


def ours_by_default(key: str) -> str:
    return text_of(json.loads(keys.default_text(key)))


def tables_of(system: str) -> str:
    """What there is here, what changes nothing, and what there is not."""
    table = yaml.safe_load((ROOT / "tools" / f"from_{system}.yaml").read_text(encoding="utf-8"))
    rows = table["keys"]
    taken, nowhere = [], []
    same: dict[str, list[str]] = {}
    for key, row in rows.items():
        here, notes = counterpart(row, rows)
        default = code(text_of(row["default"])) if "default" in row else ""
        if not here and not row.keys() & {"same", "none"}:
            here = "the keys that count with it"
        if here:
            taken.append((code(key), default, here, default_here(row), "; ".join(notes)))
        elif "same" in row:
            same.setdefault(row["same"], []).append(code(key))
        else:
            nowhere.append((code(key), default, "; ".join(notes).replace("else: ", "")))
    always = ", ".join(code(f"{key}={text_of(value)}") for key, value in table["always"].items())
    parts = [
        f"From {table['source']}. Their configs always mean {always}, unless a key below says otherwise.\n",
        "**Keys with a counterpart**\n",
        markdown(("there", "default", "here", "default", "note"), taken),
        "**Keys of which only the named values can be kept**\n",
        markdown(("there", "default", "what there is here"), nowhere),
        "**Keys that change nothing here**\n",
        markdown(("there", "why"), ((", ".join(keys), why) for why, keys in same.items())),
    ]
    return "\n".join(parts)


# ------------------------------------------------------------------------------------------------------------ NeMo RL


def flat(tree: dict, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return found


@cache
def nemo_config() -> dict[str, str]:
    """Our key -> what NeMo RL's grpo_math_1B.yaml means by it, as json."""
    with redirect_stderr(io.StringIO()):  # the warning of keys that do not matter
        cfg = reader.load(NEMO_DEFAULTS)
    found = dict(keys.settings(cfg))
    # The tests' copy has another warm-up than theirs, so that reading it can be told from our default.
    found |= {"policy.scheduler.warmup_steps": 50, "policy.scheduler.warmup_start_factor": 0.1}
    return {key: json.dumps(value) for key, value in found.items()}


def nemo_defaults() -> Iterable[tuple[str, str, str]]:
    """(key, default there, default here) where a config that does not say it would mean two things."""
    taken = nemo_config()
    for key in flat(yaml.safe_load(NEMO_DEFAULTS.read_text(encoding="utf-8"))):
        if key in taken and taken[key] != keys.default_text(key):
            yield code(key), code(text_of(json.loads(taken[key]))), code(ours_by_default(key))


def names_of(row: dict) -> str:
    return ", ".join(code(".".join(filter(None, (row.get("in"), key)))) for key in row["keys"].split())


def tables_of_nemo() -> str:
    renamed, refused = [], []
    ignored: dict[str, list[str]] = {}
    for row in TABLE:
        same = ", ".join(map(text_of, row.get("same", ())))
        if "refused" in row or "never" in row:
            never = "; ".join(f"{value}: {why}" for value, why in row.get("never", {}).items())
            refused.append((names_of(row), code(same) if same else "", row.get("refused") or f"not {never}"))
        elif "why" in row:
            condition = f" (with {code(row['when'])})" if "when" in row else ""
            ignored.setdefault(row["why"], []).append(names_of(row) + condition)
        elif "as" in row or "values" in row:
            values = ", ".join(f"{code(text_of(a))} is {code(text_of(b))}" for a, b in row.get("values", {}).items())
            renamed.append((names_of(row), code(row["as"]) if "as" in row else "the same key", values))
    parts = [
        "**Defaults that differ**, as `examples/configs/grpo_math_1B.yaml` has them; a recipe brings its own.\n",
        markdown(("key", "there", "here"), nemo_defaults()),
        "**Keys and values with another name.** `$` is the last part of their key.\n",
        markdown(("there", "here", "values"), renamed),
        "**Keys of which only some values can be kept**; another one ends the run with exit code 2.\n",
        markdown(("there", "kept", "why not another"), refused),
        "**Keys that change nothing here**\n",
        markdown(("there", "why"), ((", ".join(names), why) for why, names in ignored.items())),
    ]
    return "\n".join(parts)


# What bites who does not look: ours, TRL's key, verl's.
BITING = (
    ("policy.optimizer.kwargs.lr", "learning_rate", "actor_rollout_ref.actor.optim.lr"),
    ("policy.optimizer.kwargs.weight_decay", "weight_decay", "actor_rollout_ref.actor.optim.weight_decay"),
    ("policy.scheduler.name", "lr_scheduler_type", "actor_rollout_ref.actor.optim.lr_scheduler_type"),
    ("policy.scheduler.warmup_steps", "warmup_steps", "actor_rollout_ref.actor.optim.lr_warmup_steps"),
    ("grpo.num_generations_per_prompt", "num_generations", "actor_rollout_ref.rollout.n"),
    ("loss_fn.reference_policy_kl_penalty", "beta", "actor_rollout_ref.actor.use_kl_loss"),
    ("loss_fn.ratio_clip_c", "delta", "actor_rollout_ref.actor.clip_ratio_c"),
    ("grpo.reward_std", "scale_rewards", "algorithm.norm_adv_by_std_in_grpo"),
    ("policy.generation.max_new_tokens", "max_completion_length", "data.max_response_length"),
    ("grpo.max_num_epochs", "num_train_epochs", "trainer.total_epochs"),
)


def biting() -> str:
    trl, verl = (yaml.safe_load((ROOT / "tools" / f"from_{name}.yaml").read_text())["keys"] for name in ("trl", "verl"))
    lines = []
    for ours, *theirs in BITING:
        others = [
            f"`{key}` {code(text_of(rows[key]['default']))}" for key, rows in zip(theirs, (trl, verl), strict=True)
        ]
        lines.append((code(ours), code(ours_by_default(ours)), code(text_of(json.loads(nemo_config()[ours]))), *others))
    return markdown(("here", "default", "NeMo RL", "TRL", "verl"), lines)


TABLES = {
    "defaults": biting,
    "NeMo RL": tables_of_nemo,
    "TRL": lambda: tables_of("trl"),
    "verl": lambda: tables_of("verl"),
}


def filled_in(page: str) -> str:
    """The page with the tables between their marks."""
    for name, make in TABLES.items():
        before, _, rest = page.partition(BEGIN.format(name))
        _, _, after = rest.partition(END)
        page = before + BEGIN.format(name) + "\n" + make() + "\n" + END + after
    return page


if __name__ == "__main__":
    PAGE.write_text(filled_in(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
