"""The keys of TRL or verl with their defaults, read out of a wheel: what tools/trl_*.yaml and tools/verl_*.yaml hold.

    python tests/helpers/their_defaults.py trl-1.16.0-py3-none-any.whl > tools/trl_1.16.0.yaml
    python tests/helpers/their_defaults.py verl-0.9.1-py3-none-any.whl > tools/verl_0.9.1.yaml

Nothing of a wheel is run. TRL's GRPOConfig adds to TrainingArguments, which are those of the transformers beside it.
"""

import ast
import sys
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from zipfile import ZipFile

import yaml

CLASSES = {  # of TRL: file -> classes, the later ones of which win
    "trl/trainer/base_config.py": ["_BaseConfig"],
    "trl/scripts/utils.py": ["ScriptArguments"],
    "trl/scripts/grpo.py": ["GRPOScriptArguments"],
    "trl/trainer/model_config.py": ["ModelConfig"],
    "trl/trainer/grpo_config.py": ["GRPOConfig"],
}
OF_VERL = "verl/trainer/config/_generated_ppo_{}.yaml"
TRAINERS = ("trainer", "megatron_trainer", "torchtitan_trainer", "veomni_trainer")  # the first of which wins


def fields_of_class(text: str, name: str) -> dict:
    """Field -> default of a dataclass, where it is a literal."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef) or node.name != name:
            continue
        for line in node.body:
            if not isinstance(line, ast.AnnAssign) or not isinstance(line.value, ast.Call):
                continue
            for keyword in line.value.keywords:
                if keyword.arg == "default":
                    found[line.target.id] = ast.literal_eval(keyword.value)
                elif keyword.arg == "default_factory":
                    literal = isinstance(keyword.value, ast.Lambda)
                    found[line.target.id] = ast.literal_eval(keyword.value.body) if literal else None
    return found


def of_training_arguments() -> dict:
    from transformers import TrainingArguments

    found = {}
    for field in fields(TrainingArguments):
        default = None if field.default is MISSING else field.default
        found[field.name] = default.value if isinstance(default, Enum) else default
    return found


def of_trl(wheel: ZipFile) -> dict:
    found = {}
    for file, classes in CLASSES.items():
        for name in classes:
            found |= fields_of_class(wheel.read(file).decode(), name)
    return found


def of_verl(wheel: ZipFile) -> dict:
    found = {}
    for trainer in TRAINERS:
        tree = yaml.safe_load(wheel.read(OF_VERL.format(trainer)))
        for key, value in flat(tree).items():
            found.setdefault(key, value)
    return found


def flat(tree: dict, prefix: str = "") -> dict:
    found = {}
    for key, value in tree.items():
        if key == "_target_":
            continue
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def main() -> None:
    path = Path(sys.argv[1])
    with ZipFile(path) as wheel:
        if path.name.startswith("trl"):
            found = of_training_arguments() | of_trl(wheel)
        else:
            found = of_verl(wheel)
    name = "-".join(path.name.split("-")[:2])
    print(f"# The defaults of {name}, by tests/helpers/their_defaults.py")
    print(yaml.safe_dump(found, sort_keys=False, width=120), end="")


if __name__ == "__main__":
    main()
