"""The literals of a Python file that makes a GRPOConfig and a GRPOTrainer -> TRL's keys. The file is parsed, never run.

What is read: arguments that are literals; names that are bound once, and arithmetic on them; items of dicts and fields
of classes that nothing else in the file touches. Any other value is `Unread`. Each later use of the config object,
except as the argument of the trainer, is named.
"""

import ast
import operator
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from config import ConfigError

Values = dict[str, Any]  # key -> value

MAX_STEPS = 10_000  # nodes of the tree that one value may take
MAX_SIZE = 10_000  # characters or items of a value, and bits of a number
MAX_HOPS = 20  # names and calls from an argument to what it stands for

ARITHMETIC: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
CONVERSIONS: dict[str, Callable] = {"int": int, "float": float, "str": str, "round": round, "min": min, "max": max}
OF_THE_TRAINER = ("tools", "environment_factory", "rollout_func", "optimizers", "callbacks")
FILE_KINDS = ("json", "csv", "parquet", "text")  # builders of load_dataset, which are no names of data sets
SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
BRANCHES = (ast.If, ast.For, ast.While, ast.Try, ast.With, ast.Match)


class Unread(str):
    """The text of a value that only the running script, a shell or hydra knows."""


class Computed(ValueError):
    """The file alone does not decide a value."""


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


class _Names:
    """The names of a file: what binds them, in which scope, and where they are used."""

    def __init__(self, tree: ast.Module):
        self.module = tree
        self.parent: dict[ast.AST, ast.AST] = {}
        self.calls: list[ast.Call] = []
        self.functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.imported: dict[str, str] = {}  # name -> dotted path
        self.bound: dict[tuple[ast.AST, str], list[ast.expr | None]] = {}  # None: not by one expression
        self.uses: dict[str, list[ast.Name]] = {}
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                self.parent[child] = node
        for node in ast.walk(tree):
            self._note(node)

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, ast.Call):
            self.calls.append(node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self.functions[node.name] = node
        elif isinstance(node, ast.ClassDef):
            self.classes[node.name] = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                self.imported[alias.asname or alias.name] = f"{module}{alias.name}"
        elif isinstance(node, ast.arg):
            self._bind(node, node.arg, None)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):  # a function may bind it again
            home = self.module if isinstance(node, ast.Global) else self.scope(self.scope(node))
            for name in node.names:
                self.bound.setdefault((home, name), []).append(None)
        elif isinstance(node, ast.Name):
            self.uses.setdefault(node.id, []).append(node)
            if not isinstance(node.ctx, ast.Load):
                self._bind(node, node.id, self._assigned(node))

    def _bind(self, node: ast.AST, name: str, expression: ast.expr | None) -> None:
        self.bound.setdefault((self.scope(node), name), []).append(expression)

    def _assigned(self, target: ast.expr) -> ast.expr | None:
        """What `target = ...` or `a, target = 1, ...` assigns."""
        statement = self.parent[target]
        if isinstance(statement, ast.Assign) and target in statement.targets:
            return statement.value
        if isinstance(statement, ast.AnnAssign):
            return statement.value
        if isinstance(statement, ast.Tuple) and isinstance(self.parent[statement], ast.Assign):
            value = self.parent[statement].value
            if isinstance(value, ast.Tuple) and len(value.elts) == len(statement.elts):
                return value.elts[statement.elts.index(target)]
        return None

    def scope(self, node: ast.AST) -> ast.AST:
        """The function, class or module that the node is in."""
        node = self.parent.get(node, node)
        while not isinstance(node, SCOPES):
            node = self.parent[node]
        return node

    def is_in_a_branch(self, node: ast.AST) -> bool:
        """Whether the node may run several times, or not at all, each time its scope runs."""
        while not isinstance(node, SCOPES):
            if isinstance(node, BRANCHES) and "__name__" not in ast.unparse(getattr(node, "test", ast.Pass())):
                return True
            node = self.parent[node]
        return False

    def home(self, name: str, scope: ast.AST) -> ast.AST | None:
        """The scope whose `name` is meant in `scope`; None if the file does not bind it."""
        while (scope, name) not in self.bound:
            if isinstance(scope, ast.Module):
                return None
            scope = self.scope(scope)
        return scope

    def only_value(self, name: str, scope: ast.AST) -> ast.expr | None:
        """The one expression that a name is bound to, if it is one."""
        home = self.home(name, scope)
        expressions = self.bound[home, name] if home else []
        return expressions[0] if len(expressions) == 1 else None

    def uses_of(self, name: str, home: ast.AST) -> list[ast.Name]:
        """Where the name of the scope `home` is read."""
        found = [node for node in self.uses.get(name, ()) if isinstance(node.ctx, ast.Load)]
        return [node for node in found if self.home(name, self.scope(node)) is home]

    def last(self, func: ast.expr) -> str:
        """The last part of the name of what is called, as its module calls it."""
        name = ast.unparse(func).rpartition(".")[2]
        return self.imported.get(name, name).rpartition(".")[2]

    def makes(self, func: ast.expr, name: str) -> bool:
        """Whether a call makes a `name`, or a class of the file that derives from one."""
        waiting = [self.last(func)]
        seen: set[str] = set()
        while waiting:
            last = waiting.pop()
            if last.endswith(name):
                return True
            if last in self.classes and last not in seen:
                seen.add(last)
                waiting += [self.last(base) for base in self.classes[last].bases]
        return False

    def statement(self, node: ast.AST) -> ast.AST:
        while not isinstance(node, ast.stmt):
            node = self.parent[node]
        return node


class _Literals:
    """The values of expressions, as far as the file alone decides them."""

    def __init__(self, names: _Names):
        self.names = names
        self.steps = 0
        self.fields_of: dict[str, Values] = {}  # class -> its fields
        self.open_classes: set[str] = set()  # whose fields are being read

    def value(self, node: ast.expr) -> Any:
        """The value of an expression, or its text as Unread."""
        self.steps = 0
        try:
            return self._value(node)
        except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError):
            return Unread(ast.unparse(node))

    def _value(self, node: ast.expr) -> Any:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise Computed("too many steps")
        value = self._of_kind(node)
        if isinstance(value, (str, list, dict)) and len(value) > MAX_SIZE:
            raise Computed("too long")
        if isinstance(value, int) and value.bit_length() > MAX_SIZE:
            raise Computed("too large")
        return value

    def _of_kind(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return [self._value(item) for item in node.elts]
        if isinstance(node, ast.Dict):
            return self._dict(node)
        if isinstance(node, ast.JoinedStr):
            return "".join(str(self._value(part)) for part in node.values)
        if isinstance(node, ast.FormattedValue) and node.format_spec is None and node.conversion == -1:
            return self._value(node.value)
        if isinstance(node, ast.UnaryOp):
            return self._with_one_operand(node)
        if isinstance(node, ast.BinOp):
            return self._with_two_operands(node)
        if isinstance(node, ast.IfExp):
            return self._value(node.body if self._value(node.test) else node.orelse)
        if isinstance(node, ast.Name):
            return self._of_name(node)
        if isinstance(node, ast.Attribute):
            return self._field(node)
        if isinstance(node, ast.Subscript):
            return self._item(node)
        if isinstance(node, ast.Call):
            return self._of_call(node)
        raise Computed(type(node).__name__)

    def _dict(self, node: ast.Dict) -> Values:
        values: Values = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                values |= self._value(value)
            else:
                values[self._value(key)] = self._part(value)
        return values

    def _part(self, node: ast.expr) -> Any:
        """The value of a part of a mapping: if only this part is computed, the others are read all the same."""
        try:
            return self._value(node)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            return Unread(ast.unparse(node))

    def _with_one_operand(self, node: ast.UnaryOp) -> Any:
        operand = self._value(node.operand)
        if isinstance(node.op, ast.Not):
            return not operand
        if isinstance(node.op, ast.USub):
            return -operand
        raise Computed("operator")

    def _with_two_operands(self, node: ast.BinOp) -> Any:
        left, right = self._value(node.left), self._value(node.right)
        are_numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        if isinstance(node.op, ast.BitOr) and isinstance(left, dict) and isinstance(right, dict):
            return left | right
        if isinstance(node.op, ast.Add) and type(left) is type(right) and isinstance(left, (str, list)):
            return left + right
        if not are_numbers or type(node.op) not in ARITHMETIC:
            raise Computed("operator")
        if isinstance(node.op, ast.Pow) and (abs(right) > 64 or abs(left) > 1 << 64):
            raise Computed("too large")
        return ARITHMETIC[type(node.op)](left, right)

    def _of_name(self, node: ast.Name) -> Any:
        if node.id in self.names.classes and self.names.home(node.id, self.names.scope(node)) is None:
            return self.fields(node.id)
        expression = self.names.only_value(node.id, self.names.scope(node))
        if expression is None:
            raise Computed(node.id)
        value = self._value(expression)
        if isinstance(value, (list, dict)) and not self._is_untouched(node):
            raise Computed(node.id)
        return value

    def _is_untouched(self, node: ast.Name) -> bool:
        """Whether nothing can change the list, dict or instance that a name is bound to: it is only unpacked, its parts
        are only read, and it is an argument only where a config takes it."""
        home = self.names.home(node.id, self.names.scope(node))
        assert home is not None, node.id
        return all(self._only_reads(use) for use in self.names.uses_of(node.id, home))

    def _only_reads(self, use: ast.Name) -> bool:
        parent = self.names.parent[use]
        above = self.names.parent[parent]
        if isinstance(parent, (ast.Attribute, ast.Subscript)) and parent.value is use:
            is_method = isinstance(above, ast.Call) and above.func is parent
            is_chain = isinstance(above, (ast.Attribute, ast.Subscript)) and not isinstance(above.ctx, ast.Load)
            return isinstance(parent.ctx, ast.Load) and not is_method and not is_chain
        if isinstance(parent, ast.keyword):
            assert isinstance(above, ast.Call)
            return parent.arg is None or any(self.names.makes(above.func, kind) for kind in ("Config", "GRPOTrainer"))
        return isinstance(parent, (ast.Dict, ast.BinOp))

    def _field(self, node: ast.Attribute) -> Any:
        if isinstance(node.value, ast.Name) and node.value.id in self.names.classes:
            found = self.fields(node.value.id)[node.attr]
        else:
            found = self._value(node.value)[node.attr]
        if isinstance(found, Unread):
            raise Computed(found)
        return found

    def _item(self, node: ast.Subscript) -> Any:
        found = self._value(node.value)[self._value(node.slice)]
        if isinstance(found, Unread):
            raise Computed(found)
        return found

    def _of_call(self, node: ast.Call) -> Any:
        called, name = ast.unparse(node.func), self.names.last(node.func)
        if name.lower() == "field" and not node.args:
            return self._default_of_field(node)
        if called == "os.path.join" and not node.keywords:
            return "/".join(self._value(argument) for argument in node.args)
        if called in CONVERSIONS and not node.keywords:
            return CONVERSIONS[called](*[self._value(argument) for argument in node.args])
        if called == "dict" and not node.args:
            return self.keywords(node)
        if name in self.names.classes and not node.args:
            return self.fields(name) | self.keywords(node)
        raise Computed(called)

    def _default_of_field(self, node: ast.Call) -> Any:
        for keyword in node.keywords:
            if keyword.arg == "default":
                return self._value(keyword.value)
            if keyword.arg == "default_factory" and isinstance(keyword.value, ast.Lambda):
                return self._value(keyword.value.body)
        raise Computed("field")

    def keywords(self, call: ast.Call) -> Values:
        """name -> value of the keywords of a call."""
        values: Values = {}
        for keyword in call.keywords:
            found = self._part(keyword.value)
            if keyword.arg is not None:
                values[keyword.arg] = found
            elif isinstance(found, dict):
                values |= found
            else:
                values[f"**{found}"] = Unread(found)
        return values

    def fields(self, name: str) -> Values:
        """name -> value of the fields of a class of the file, its bases first. What a method sets is Unread."""
        if name in self.open_classes:
            raise Computed(f"{name} derives from itself")
        if name not in self.fields_of:
            self.open_classes.add(name)
            try:
                self.fields_of[name] = self._fields(self.names.classes[name])
            finally:
                self.open_classes.remove(name)
        return dict(self.fields_of[name])

    def _fields(self, cls: ast.ClassDef) -> Values:
        values: Values = {}
        for base in reversed(cls.bases):
            of_base = self.names.last(base)
            if of_base in self.names.classes:
                values |= self.fields(of_base)
        for statement in cls.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
                values[statement.target.id] = self._part(statement.value)
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                values[statement.targets[0].id] = self._part(statement.value)
        for use in [*self.names.uses.get("self", ()), *self.names.uses.get(cls.name, ())]:
            place = self.names.parent[use]
            is_changed = isinstance(place, ast.Attribute) and not isinstance(place.ctx, ast.Load)
            if is_changed and (use.id == cls.name or self._is_within(use, cls)):
                values[place.attr] = Unread(f"{cls.name}.{place.attr}")
        return values

    def _is_within(self, node: ast.AST, cls: ast.ClassDef) -> bool:
        while not isinstance(node, (ast.Module, ast.ClassDef)):
            node = self.names.parent[node]
        return node is cls


class _Script:
    """A file whose GRPOConfig, trainer, adapters, model and data set are looked for."""

    def __init__(self, name: str, table: Mapping[str, Any], tree: ast.Module):
        self.name, self.table = name, table
        self.names = _Names(tree)
        self.literals = _Literals(self.names)
        self.known = {*table["keys"], *table["recorded"]}
        self.read: list[tuple[int, str]] = []  # line, what was read there
        self.left: list[str] = []  # what was not

    def config(self) -> tuple[Values, list[str]]:
        trainer = self._only("GRPOTrainer", self._calls_that_make("GRPOTrainer"))
        given = self._arguments(trainer, ["model", "reward_funcs", "args"]) if trainer else {}
        configs = self._calls_that_make("GRPOConfig")
        args = self._followed(given.get("args"))
        call = args if args in configs else self._only("GRPOConfig", configs)
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
        values = self._known_only(self._fields_of_class(call)) | self._made(call, ["output_dir"])
        for home, name in self.names.bound:
            expression = self.names.only_value(name, home)
            if expression is not None and self._followed(expression) is call:
                values |= self._changes(name, home)
        return values

    def _fields_of_class(self, call: ast.Call) -> Values:
        name = self.names.last(call.func)
        return self._class_fields(name) if name in self.names.classes else {}

    def _class_fields(self, name: str) -> Values:
        try:
            return self.literals.fields(name)
        except Computed:
            return {}

    def _known_only(self, fields: Values) -> Values:
        """The fields of a class that are keys of TRL's."""
        renamed = {self.table["aliases"].get(key, key): value for key, value in fields.items()}
        found = {key: value for key, value in renamed.items() if key in self.known}
        if found:
            self.left += [f"{key}: left out, because TRL has no such key" for key in renamed if key not in found]
        return found

    def _of_classes(self) -> Values:
        """The fields of the classes that have TRL's keys, in a file without a GRPOConfig. ConfigError without any."""
        values: Values = {}
        for name, node in self.names.classes.items():
            for key, value in self._known_only(self._class_fields(name)).items():
                values[key] = value if values.get(key, value) == value else Unread(name)
                self.read.append((node.lineno, f"class {name}"))
        self.read = sorted({*self.read})
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
            if isinstance(place, ast.Attribute):
                if isinstance(place.ctx, ast.Load):
                    is_read = not isinstance(above, (ast.Attribute, ast.Subscript)) or isinstance(above.ctx, ast.Load)
                    is_called = isinstance(above, ast.Call) and above.func is place
                    if not is_read or place.attr == "__dict__":
                        values[place.attr] = Unread(ast.unparse(above))
                    elif is_called or isinstance(above, ast.Attribute):
                        self._note_use(use)
                else:
                    values[place.attr] = self._stored(place, name, home)
            elif isinstance(place, ast.Call) and ast.unparse(place.func) == "setattr" and len(place.args) == 3:
                values[str(self.literals.value(place.args[1]))] = Unread(ast.unparse(place))
            elif not self._is_expected(place, above, use):
                self._note_use(use)
        return values

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
        if isinstance(place, (ast.Assign, ast.AnnAssign)):
            target = place.targets[0] if isinstance(place, ast.Assign) else place.target
            if not isinstance(target, ast.Name):
                return False
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
        loaded: Values = {}
        if isinstance(name, Unread):
            loads = self._calls_that_load_models()
            followed = self._followed(node)
            if followed in loads:
                loads = [followed]
            if len(loads) == 1:
                loaded = self._made(loads[0], ["model_name"])
        for key in ("model_name", "pretrained_model_name_or_path", "model_name_or_path"):
            name = loaded.get(key, name)
        bits = {key: loaded[key] for key in ("load_in_4bit", "load_in_8bit") if key in loaded}
        if isinstance(name, Unread) and "model_name_or_path" in values:
            return values | bits
        return values | bits | {"model_name_or_path": name}

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
        if node is not None and any(getattr(call.func, "attr", "") in ("map", "filter") for call in self.names.calls):
            values["train_dataset"] = "your_module:your_function"
        call, split = self._loaded(node, loads)
        if call is None:
            return values
        self._note_read(call)
        made = self._made(call, ["path", "name"])
        source = made.get("path")
        if source in FILE_KINDS:
            files = made.get("data_files")
            source = files.get("train", Unread(str(files))) if isinstance(files, dict) else files
        values["dataset_name"] = source
        if made.get("name") is not None:
            values["dataset_config"] = made["name"]
        if split or made.get("split") is not None:
            values["dataset_train_split"] = split or made["split"]
        return values

    def _loaded(self, node: ast.expr | None, loads: Sequence[ast.Call]) -> tuple[ast.Call | None, str]:
        """(the call that loads what the trainer gets, or the only one; the split in load_dataset(...)["train"])."""
        split = ""
        for _ in range(MAX_HOPS):
            node = self._followed(node)
            if node in loads:
                return node, split
            if isinstance(node, ast.Subscript):
                found = self.literals.value(node.slice)
                split = found if isinstance(found, str) and not isinstance(found, Unread) else split
                node = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):  # .map(...), .shuffle(...)
                node = node.func.value
        if len(loads) == 1:
            above = self.names.parent[loads[0]]
            found = self.literals.value(above.slice) if isinstance(above, ast.Subscript) else ""
            return loads[0], "" if isinstance(found, Unread) else str(found)
        for call in loads:
            self.left.append(f"line {call.lineno}: left out, the trainer may not get this load_dataset")
        return None, ""

    def _of_adapters(self, trainer: ast.Call | None, given: Mapping[str, ast.expr]) -> Values:
        """The keys of LoRA, if adapters are trained."""
        configs = self._calls_that_make("LoraConfig")
        wraps = self._calls_named("get_peft_model")
        of_unsloth = [call for call in wraps if isinstance(call.func, ast.Attribute) and len(call.keywords) > 1]
        wanted = self._followed(given.get("peft_config"))
        if isinstance(wanted, ast.Call) and self.names.last(wanted.func) == "get_peft_config":
            return {}  # of the ModelConfig, which is read
        if wanted is not None and wanted not in configs:
            return {} if self.literals.value(wanted) is None else {"use_peft": Unread(ast.unparse(wanted))}
        if wanted is None and trainer and not wraps:
            for call in configs:
                self.left.append(f"line {call.lineno}: left out, the trainer does not get this LoraConfig")
            return {}
        call = wanted or self._only("LoraConfig or get_peft_model", of_unsloth or configs)
        if call is None:
            return {}
        self._note_read(call)
        is_unsloth = call in of_unsloth
        values: Values = dict(self.table["lora"]["get_peft_model" if is_unsloth else "LoraConfig"])
        for key, value in self._made(call, ["model"] if is_unsloth else ["r"]).items():
            if key in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora"):
                values[key] = value
            elif key != "model":
                values[f"lora_{key}"] = value
        return values

    def _as_unsloth_does(self, values: Values) -> None:
        """Unsloth raises the batch of a process to a whole group."""
        if not any(name.startswith("unsloth") for name in self.names.imported.values()):
            return
        keys = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
        batch, accumulated, group = [values.get(key, self.table["keys"][key]["default"]) for key in keys]
        if all(type(size) is int and size > 0 for size in (batch, accumulated, group)) and batch * accumulated % group:
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
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in self.names.functions:
                function = self.names.functions[ast.unparse(node.func)]
                returned = [each.value for each in ast.walk(function) if isinstance(each, ast.Return)]
                found = returned[0] if len(returned) == 1 else None
            if found is None:
                return node
            node = found
        return node

    def _arguments(self, call: ast.Call, places: Sequence[str]) -> dict[str, ast.expr]:
        arguments = dict(zip(places, call.args, strict=False))
        for keyword in call.keywords:
            if keyword.arg is not None:
                arguments[keyword.arg] = keyword.value
        return arguments

    def _made(self, call: ast.Call, places: Sequence[str]) -> Values:
        """The arguments of a call, with its **kwargs. places: the names of its first arguments."""
        values = {name: self.literals.value(node) for name, node in zip(places, call.args, strict=False)}
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
