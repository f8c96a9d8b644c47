"""The literals of a Python file that makes a GRPOConfig and a GRPOTrainer -> TRL's keys. The file is parsed, never run.

What is read: arguments that are literals; names that are bound once, and arithmetic on them; items of dicts and fields
of classes that nothing else in the file touches (python_values.py). Any other value is `Unread`. Each later use of the
config object, except as the argument of the trainer, is named.
"""

import ast
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from config import ConfigError
from tools.python_names import Names
from tools.python_values import Computed, Literals, Unread, Values

MAX_HOPS = 20  # names and calls from an argument to what it stands for

OF_THE_TRAINER = ("tools", "environment_factory", "rollout_func", "optimizers", "callbacks")
FILE_KINDS = ("json", "csv", "parquet", "text")  # builders of load_dataset, which are no names of data sets


def read(text: str, name: str, table: Mapping[str, Any]) -> tuple[Values, list[str]]:
    """(TRL's keys, where they were read and what was left out). ConfigError, which names the file `name`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python, on the style of the file
            tree = ast.parse(text)
        return _Script(name, table, tree).config()
    except SyntaxError as error:
        raise ConfigError(f"{name}: line {error.lineno}: not Python: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise ConfigError(f"{name}: its expressions are too deep to be read; {table['way_out']}") from None
    except ValueError as error:  # such as a null character
        raise ConfigError(f"{name}: not Python: {error}") from None


class _Script:
    """A file whose GRPOConfig, trainer, adapters, model and data set are looked for."""

    def __init__(self, name: str, table: Mapping[str, Any], tree: ast.Module):
        self.name = name
        self.table = table
        self.names = Names(tree)
        self.literals = Literals(self.names)
        self.known = {*table["keys"], *table["recorded"]}
        self.read: list[tuple[int, str]] = []  # line, what was read there
        self.left: list[str] = []  # what was not

    def config(self) -> tuple[Values, list[str]]:
        trainer = self._only("GRPOTrainer", self._calls_that_make("GRPOTrainer"))
        given: dict[str, ast.expr] = {}
        if trainer:
            given = self._arguments(trainer, ["model", "reward_funcs", "args"])
        configs = self._calls_that_make("GRPOConfig")
        args = self._followed(given.get("args"))
        call = args
        if args not in configs:
            call = self._only("GRPOConfig", configs)
        if call is None:
            values = self._of_classes()
        else:
            values = self._of_config(call)
        for model in self._calls_named("ModelConfig"):
            self._note_read(model)
            values |= self._made(model, ["model_name_or_path"])
        if trainer:
            self._note_read(trainer)
            values |= self._of_trainer(trainer, given)
            if "args" in given and call is not args:
                values["args"] = Unread(ast.unparse(given["args"]))
            if "model" in given:
                values = self._of_model(given["model"], values)
        values |= self._of_data(given.get("train_dataset"))
        values |= self._of_adapters(trainer, given)
        self._as_unsloth_does(values)
        read = [f"  line {line}: {what}" for line, what in sorted(self.read)]
        return values, read + [f"  {line}" for line in self.left]

    # ------------------------------------------------------------------------------------------------- the config

    def _of_config(self, call: ast.Call) -> Values:
        self._note_read(call)
        values: Values = {}
        name = self.names.last(call.func)
        if name in self.names.classes:
            values |= self._known_only(self._class_fields(name))
        values |= self._made(call, ["output_dir"])
        for home, name in self.names.bound:
            expression = self.names.only_value(name, home)
            if expression is not None and self._followed(expression) is call:
                values |= self._changes(name, home)
        return values

    def _class_fields(self, name: str) -> Values:
        try:
            return self.literals.fields(name)
        except Computed:
            return {}

    def _known_only(self, fields: Values) -> Values:
        """The fields of a class that are keys of TRL's."""
        found: Values = {}
        unknown = []
        for name, value in fields.items():
            key = self.table["aliases"].get(name, name)
            if key in self.known:
                found[key] = value
            else:
                unknown.append(key)
        if found:
            self.left += [f"{key}: left out, because TRL has no such key" for key in unknown]
        return found

    def _of_classes(self) -> Values:
        """The fields of the classes that have TRL's keys, in a file without a GRPOConfig. ConfigError without any."""
        values: Values = {}
        for name, node in self.names.classes.items():
            fields = self._known_only(self._class_fields(name))
            for key, value in fields.items():
                is_other = key in values and values[key] != value
                values[key] = Unread(name) if is_other else value
            if fields:
                self.read.append((node.lineno, f"class {name}"))
        if not values:
            problem = "no GRPOConfig(...) in it, and no class with TRL's keys; a yaml that TrlParser reads will do"
            raise ConfigError(f"{self.name}: {problem}; {self.table['way_out']}")
        return values

    def _changes(self, name: str, home: ast.AST) -> Values:
        """What `name.key = value` sets, where `name` is the config. Each use that may change more is noted."""
        values: Values = {}
        for use in self.names.uses_of(name, home):
            place = self.names.parent[use]
            above = self.names.parent[place]
            if isinstance(place, ast.Attribute) and isinstance(place.ctx, ast.Load):
                if self._changes_part(place, above):
                    values[place.attr] = Unread(ast.unparse(above))
                elif isinstance(above, ast.Attribute) or self._is_method(place, above):
                    self._note_use(use)
            elif isinstance(place, ast.Attribute):
                values[place.attr] = self._stored(place, name, home)
            elif isinstance(place, ast.Call) and ast.unparse(place.func) == "setattr" and len(place.args) == 3:
                key = self.literals.value(place.args[1])
                values[str(key)] = Unread(ast.unparse(place))
            elif not self._is_expected(place, above, use):
                self._note_use(use)
        return values

    def _changes_part(self, place: ast.Attribute, above: ast.AST) -> bool:
        """Whether `config.key.part = ...` or `config.key[part] = ...` changes a key, or `config.__dict__` any."""
        if place.attr == "__dict__":
            return True
        return isinstance(above, (ast.Attribute, ast.Subscript)) and not isinstance(above.ctx, ast.Load)

    def _is_method(self, place: ast.Attribute, above: ast.AST) -> bool:
        return isinstance(above, ast.Call) and above.func is place

    def _stored(self, place: ast.Attribute, name: str, home: ast.AST) -> Any:
        statement = self.names.parent[place]
        is_plain = isinstance(statement, ast.Assign) and self.names.scope(place) is home
        if not is_plain or self.names.is_in_a_branch(place):
            return Unread(f"{name}.{place.attr}")
        return self.literals.value(statement.value)

    def _is_expected(self, place: ast.AST, above: ast.AST, use: ast.Name) -> bool:
        """Whether a use is the trainer's argument, or gives the config another name, which is looked at too."""
        if isinstance(place, ast.keyword):
            place = above
        if isinstance(place, ast.Call):
            return self.names.makes(place.func, "GRPOTrainer")
        target = None
        if isinstance(place, ast.Assign):
            target = place.targets[0]
        elif isinstance(place, ast.AnnAssign):
            target = place.target
        if isinstance(target, ast.Name):
            return self.names.only_value(target.id, self.names.scope(place)) is use
        return isinstance(place, ast.Return)

    def _note_use(self, use: ast.Name) -> None:
        text = ast.unparse(self.names.statement(use)).partition("\n")[0]
        self.left.append(f"line {use.lineno}: {text:.100}: what this changes in the config is not read")

    # ------------------------------------------------------------------------------------------------ the trainer

    def _of_trainer(self, trainer: ast.Call, given: Mapping[str, ast.expr]) -> Values:
        values: Values = {}
        for name in ("reward_funcs", *OF_THE_TRAINER):
            if name in given:
                values[name] = self._dotted(given[name])
        made_by = self._dotted(trainer.func)
        if not re.fullmatch(r"((trl|unsloth)\.(.+\.)?)?GRPOTrainer", str(made_by)):
            values["trainer"] = made_by
        return values

    def _of_model(self, node: ast.expr, values: Values) -> Values:
        """The values with the name of the model: a text, or what the one from_pretrained of the file loads."""
        name = self.literals.value(node)
        found = dict(values)
        if isinstance(name, Unread):
            loaded = self._loaded_model(node)
            for key in ("model_name", "pretrained_model_name_or_path", "model_name_or_path"):
                name = loaded.get(key, name)
            for key in ("load_in_4bit", "load_in_8bit"):
                if key in loaded:
                    found[key] = loaded[key]
        if not isinstance(name, Unread) or "model_name_or_path" not in found:
            found["model_name_or_path"] = name
        return found

    def _loaded_model(self, node: ast.expr) -> Values:
        """The arguments of the from_pretrained that gives the model, or of the only one."""
        loads = self._calls_that_load_models()
        followed = self._followed(node)
        if followed in loads:
            loads = [followed]
        if len(loads) != 1:
            return {}
        return self._made(loads[0], ["model_name"])

    def _calls_that_load_models(self) -> list[ast.Call]:
        found = []
        for call in self.names.calls:
            called = ast.unparse(call.func)
            if re.search(r"Model\w*\.from_pretrained$", called) and not re.search("Peft|Classification", called):
                found.append(call)
        return found

    def _of_data(self, node: ast.expr | None) -> Values:
        """The data set of `load_dataset("name", "subset", split="train")`, and its processor if the file maps it."""
        loads = self._calls_named("load_dataset")
        values: Values = {}
        methods = [call.func.attr for call in self.names.calls if isinstance(call.func, ast.Attribute)]
        if node is not None and ("map" in methods or "filter" in methods):
            values["train_dataset"] = "your_module:your_function"
        call, split = self._loaded(node, loads)
        if call is None:
            return values
        self._note_read(call)
        made = self._made(call, ["path", "name"])
        source = made.get("path")
        if source in FILE_KINDS:
            source = made.get("data_files")
            if isinstance(source, dict):
                source = source.get("train", Unread(str(source)))
        values["dataset_name"] = source
        if made.get("name") is not None:
            values["dataset_config"] = made["name"]
        split = split or made.get("split")
        if split is not None:
            values["dataset_train_split"] = split
        return values

    def _loaded(self, node: ast.expr | None, loads: Sequence[ast.Call]) -> tuple[ast.Call | None, str | None]:
        """(the call that loads what the trainer gets, or the only one; the split in load_dataset(...)["train"])."""
        split = None
        for _ in range(MAX_HOPS):
            node = self._followed(node)
            if node in loads:
                return node, split
            if isinstance(node, ast.Subscript):
                split = self._split(node) or split
                node = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):  # .map(...), .shuffle(...)
                node = node.func.value
        if len(loads) == 1:
            return loads[0], self._split(self.names.parent[loads[0]])
        for call in loads:
            self.left.append(f"line {call.lineno}: left out, the trainer may not get this load_dataset")
        return None, None

    def _split(self, node: ast.AST) -> str | None:
        """ "train" of `...["train"]`."""
        if not isinstance(node, ast.Subscript):
            return None
        found = self.literals.value(node.slice)
        if isinstance(found, Unread) or not isinstance(found, str):
            return None
        return found

    def _of_adapters(self, trainer: ast.Call | None, given: Mapping[str, ast.expr]) -> Values:
        """The keys of LoRA, if adapters are trained."""
        configs = self._calls_that_make("LoraConfig")
        wraps = self._calls_named("get_peft_model")
        of_unsloth = [call for call in wraps if isinstance(call.func, ast.Attribute) and len(call.keywords) > 1]
        wanted = self._followed(given.get("peft_config"))
        if isinstance(wanted, ast.Call) and self.names.last(wanted.func) == "get_peft_config":
            return {}  # of the ModelConfig, which is read
        if wanted in configs:
            return self._lora(wanted, "LoraConfig", ["r"])
        if wanted is not None:
            if self.literals.value(wanted) is None:
                return {}
            return {"use_peft": Unread(ast.unparse(wanted))}
        if trainer and not wraps:
            for call in configs:
                self.left.append(f"line {call.lineno}: left out, the trainer does not get this LoraConfig")
            return {}
        call = self._only("LoraConfig or get_peft_model", of_unsloth or configs)
        if call is None:
            return {}
        if of_unsloth:
            return self._lora(call, "get_peft_model", ["model"])
        return self._lora(call, "LoraConfig", ["r"])

    def _lora(self, call: ast.Call, kind: str, places: Sequence[str]) -> Values:
        """The keys of LoRA in a call. kind: whose defaults count. places: the names of its first arguments."""
        self._note_read(call)
        values: Values = dict(self.table["lora"][kind])
        for key, value in self._made(call, places).items():
            if key in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora"):
                values[key] = value
            elif key != "model":
                values[f"lora_{key}"] = value
        return values

    def _as_unsloth_does(self, values: Values) -> None:
        """Unsloth raises the batch of a process to a whole group."""
        if not any(name.startswith("unsloth") for name in self.names.imported.values()):
            return
        sizes = []
        for key in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations"):
            size = values.get(key, self.table["keys"][key]["default"])
            if type(size) is not int or size <= 0:
                return
            sizes.append(size)
        batch, accumulated, group = sizes
        if batch * accumulated % group:
            values["per_device_train_batch_size"] = group
            self.left.append(f"per_device_train_batch_size={batch}: Unsloth makes it num_generations={group}")

    # ---------------------------------------------------------------------------------------------- calls and names

    def _calls_that_make(self, name: str) -> list[ast.Call]:
        return [call for call in self.names.calls if self.names.makes(call.func, name)]

    def _calls_named(self, name: str) -> list[ast.Call]:
        return [call for call in self.names.calls if self.names.last(call.func) == name]

    def _only(self, name: str, calls: Sequence[ast.Call]) -> ast.Call | None:
        if len(calls) > 1:
            lines = ", ".join(str(call.lineno) for call in calls)
            problem = f"{name}(...) occurs in lines {lines}, but only one can be read: convert a copy that keeps one"
            raise ConfigError(f"{self.name}: {problem}, or {self.table['way_out']}")
        return calls[0] if calls else None

    def _followed(self, node: ast.expr | None) -> ast.expr | None:
        """What a name is bound to, or a function of the file returns, if it is one expression; another node itself."""
        for _ in range(MAX_HOPS):
            found: ast.expr | None = None
            if isinstance(node, ast.Name):
                found = self.names.only_value(node.id, self.names.scope(node))
            elif isinstance(node, ast.Call):
                found = self._returned_by(ast.unparse(node.func))
            if found is None:
                return node
            node = found
        return node

    def _returned_by(self, name: str) -> ast.expr | None:
        """What the function of the file returns, if it is one expression."""
        if name not in self.names.functions:
            return None
        returns = [node for node in ast.walk(self.names.functions[name]) if isinstance(node, ast.Return)]
        if len(returns) != 1:
            return None
        return returns[0].value

    def _arguments(self, call: ast.Call, places: Sequence[str]) -> dict[str, ast.expr]:
        arguments = dict(zip(places, call.args, strict=False))
        for keyword in call.keywords:
            if keyword.arg is not None:
                arguments[keyword.arg] = keyword.value
        return arguments

    def _made(self, call: ast.Call, places: Sequence[str]) -> Values:
        """The arguments of a call, with its **kwargs. places: the names of its first arguments."""
        values: Values = {}
        for name, node in zip(places, call.args, strict=False):
            values[name] = self.literals.value(node)
        return values | self.literals.keywords(call)

    def _dotted(self, node: ast.expr) -> Any:
        """The names of functions with their modules, `__main__` if they are of the file; or a text."""
        node = self._followed(node) or node
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self._dotted(item) for item in node.elts]
        if isinstance(node, ast.Constant):
            return node.value
        first, dot, rest = ast.unparse(node).partition(".")
        is_own = first in self.names.functions or first in self.names.classes
        path = f"__main__.{first}" if is_own else self.names.imported.get(first, first)
        return path + dot + rest

    def _note_read(self, call: ast.Call) -> None:
        self.read.append((call.lineno, ast.unparse(call.func)))
