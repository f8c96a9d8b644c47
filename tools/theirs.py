"""The files that hold a config of TRL or verl -> {their key: value}. Python is read by `ast`: nothing is run.

A value that only Python, a shell or hydra can compute is `Unread`: its text.
"""

import ast
import operator
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml

from config import ConfigError, shortened
from support.inputs import reader
from support.inputs.files import read_text

Values = dict[str, Any]  # key -> value
OPERATORS: dict[type, Callable] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
OPERATORS |= {ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow}
OPERATORS |= {ast.BitOr: operator.or_, ast.USub: operator.neg, ast.Not: operator.not_}
CALLS = {"int": int, "float": float, "str": str, "round": round, "min": min, "max": max, "os.path.join": os.path.join}
ROLLOUTS = ("tools", "environment_factory", "rollout_func", "optimizers", "callbacks")  # arguments of the trainer
CONFIGURES = r"GRPO|Config|from_pretrained|\b(self|global|setattr|vars)\b"
MUTATES = ("update", "setdefault", "pop", "append", "extend", "clear")
COMPUTED = (
    ValueError,
    LookupError,
    TypeError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)  # what reading such a value raises


MAX_LENGTH = 100_000  # characters of a word of a shell script
MAX_DEPTH = 9  # variables in the default of a variable


class Unread(str):
    """The text of a value that must be computed."""


def read(system: str, name: str, table: Mapping[str, Any]) -> tuple[Values, list[str]]:
    """(the values in a file, where they were read and what was left out). table: from_<system>.yaml. ConfigError."""
    text, known = read_text(name), table["keys"]
    if name.endswith(".py"):
        if system == "verl":
            raise ConfigError(f"{name}: verl's config is hydra's, not Python's: {table['way_out']}")
        return _Script(name, table, text).config()
    try:
        values = parse_yaml(text, name)
    except ConfigError:
        if system == "trl":
            raise
        values = None
    if system == "trl":
        sections = [each for each in values.values() if isinstance(each, dict)] if isinstance(values, dict) else []
        sections = [each for each in sections if any(key in known for key in each)]
        if not isinstance(values, dict) or "cells" in values or sections:
            problem = "expected a mapping of TRL's keys, in yaml or json and not in sections, or a Python file (.py)"
            raise ConfigError(f"{name}: {problem}; {table['way_out']}")
        return values, []
    if not isinstance(values, dict) or not all(re.fullmatch(r"\w+", str(key)) for key in values):
        return assigned([str(word) for word in values] if isinstance(values, list) else _words(text, name, table)), []
    notes = [f"  {key}: left out, because hydra reads it" for key in ("hydra", "defaults") if values.pop(key, None)]
    if not values.keys() & {key.partition(".")[0] for key in (*known, *table["moved"])}:
        raise ConfigError(f"{name}: it has no key of verl's; {table['way_out']}")
    return dict(_flat(values, "", known)), notes


def parse_yaml(text: str, where: str) -> Any:
    try:
        return reader.Loader(text).get_single_data()
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not yaml: {' '.join(str(error).split())}") from None


def _flat(tree: Mapping, prefix: str, known: Mapping) -> list[tuple[str, Any]]:
    """(full key, value) of everything in a tree that is no section."""
    pairs = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        is_empty = value in (None, {}) and any(each.startswith(f"{name}.") for each in known)
        if is_empty or str(key).startswith("_"):  # _target_ and its like are hydra's
            continue
        is_section = isinstance(value, dict) and value and name not in known
        pairs += _flat(value, f"{name}.", known) if is_section else [(name, value)]
    return pairs


def _words(text: str, name: str, table: Mapping[str, Any]) -> list[str]:
    """verl's overrides in a shell script, with its own variables and those of the environment put in."""
    arithmetic = r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)"
    text = re.sub(arithmetic, lambda match: f"${{={''.join(match[1].split())}}}", text)  # one word
    text = re.sub(r"^\s*#.*$|(?<=\s)#[^'\"\n]*$", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    text = text.replace("--config-name ", "--config-name=")
    text = re.sub(r"\b\w+\+?=\(|^\s*\)", lambda match: f" {match[0][-1]} ", text, flags=re.MULTILINE)  # arrays of words
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|\n")
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    try:
        words = list(lexer)
    except ValueError as error:
        raise ConfigError(f"{name}: not a shell command ({error})") from None
    variables, overrides = dict(os.environ), {}

    def value_of(match: re.Match) -> str:
        if match[4] is None:
            return variables.get(match[1] or match[3]) or (match[0] if match[2] is None else match[2])
        term = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match[4]).replace("/", "//")
        try:
            return str(_Script(name, table).constant(ast.parse(term, mode="eval").body))
        except (SyntaxError, *COMPUTED):
            return match[0]

    def take(word: str, is_sure: bool, is_one_command: bool) -> None:
        start = word
        for _ in range(MAX_DEPTH):  # the innermost first: ${A:-${B:-8}}
            word = re.sub(r"\$\{(\w+)(?::?[-=]([^${}]*))?\}|\$(\w+)|\$\{=([^${}]*)\}", value_of, word)
            if len(word) > MAX_LENGTH:
                raise ConfigError(f"{name}: {shortened(start)} has more than {MAX_LENGTH} characters when expanded")
        if start.startswith("$") and word.split() != [word]:  # a variable that holds several words
            either = [re.sub(r"^[$(]+|\)+$", "", each) for each in word.split(" or ")] if " or " in word else [word]
            either = [each.split() for each in either]
            for part in dict.fromkeys(part for each in either for part in each):
                take(part, is_sure, is_one_command and all(part in each for each in either))
            return
        key, equals, value = word.partition("=")
        if key.isidentifier():
            value = re.sub(rf"\$({key}\b|{{{key}}})", "", value)  # it is not set yet, so it is empty
            old = variables.get(key, "nothing").removeprefix("$(").removesuffix(")")
            variables[key] = value if is_sure else f"$({old} or {value})"
        elif equals and re.fullmatch(r"\+*\w+(\.\w+)+|--config-name", key) and not key.startswith("hydra."):
            value = value if "(" in value else value.rstrip(")")
            old = overrides.get(key, value if is_one_command else "nothing")
            overrides[key] = value if old == value else f"$({old} or {value})"

    before, depth, in_array = "\n", 0, False
    for word in words:
        if not before.strip(";&|\n") or before in ("then", "else", "do"):  # a command begins
            depth += (word in ("if", "case", "for", "while", "until")) - (word in ("fi", "esac", "done"))
        in_array = word == "(" or (in_array and not before.endswith(")"))
        is_sure = depth == 0 and before not in ("&&", "||")
        take(word, is_sure, is_sure or not in_array)
        before = word
    if not overrides:
        example = "such as algorithm.adv_estimator=grpo"
        raise ConfigError(f"{name}: it has no override of verl's, {example}; {table['way_out']}")
    return [f"{key}={value}" for key, value in overrides.items()]


def assigned(words: Sequence[str]) -> Values:
    """The values of words key=value, each as yaml reads it, and ${...} for `resolved`."""
    values: Values = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{shortened(word)}: expected key=value")
        text = re.sub(r"(?<=[{,])(\w+):(?=\S)", r"\1: ", text) if text.startswith("{") else text  # hydra's {a:1}
        is_computed = "`" in text or re.search(r"\$(?!\{[\w.]*[.:])", text)
        values[name.lstrip("+")] = Unread(text) if is_computed else text if "${" in text else parse_yaml(text, word)
    return values


def resolved(values: Values, defaults: Mapping[str, Any]) -> Values:
    """The values, with OmegaConf's ${key}, ${.sibling}, ${oc.env:NAME,default} and ${oc.select:key,default} put in."""

    def look_up(key: str, inner: str) -> Any:
        kind, colon, argument = inner.rpartition(":")
        name, comma, default = argument.partition(",")
        places: Mapping[str, Any] = os.environ if kind == "oc.env" else values if comma else defaults | values
        if colon and kind not in ("oc.env", "oc.select"):
            raise LookupError(inner)
        if dots := len(name) - len(name.lstrip(".")):
            name = ".".join([*key.split(".")[:-dots], name[dots:]])
        if comma and name not in places:
            return reader.typed(default.strip())
        return value_of(name, places[name])

    def value_of(key: str, value: Any) -> Any:
        if isinstance(value, list):
            return [value_of(key, each) for each in value]
        is_text = isinstance(value, str) and "${" in value
        while isinstance(value, str) and (match := re.search(r"\$\{([^${}]*)\}", value)):
            new = look_up(key, match[1].strip())
            value = new if match[0] == value else f"{value[: match.start()]}{new}{value[match.end() :]}"
        return reader.typed(value) if is_text else value

    def value_or_text(key: str, value: Any) -> Any:
        try:
            return value if isinstance(value, Unread) else value_of(key, value)
        except (LookupError, RecursionError):
            return Unread(value)

    return {key: value_or_text(key, value) for key, value in values.items()}


def _changed(node: ast.AST) -> set[str]:
    """The attributes, items and mutated objects that code binds or changes: args.beta, kw['beta'], kw.update."""
    places = [each for each in ast.walk(node) if isinstance(each, (ast.Attribute, ast.Subscript))]
    changed = [each for each in places if not isinstance(each.ctx, ast.Load) or getattr(each, "attr", "") in MUTATES]
    return {ast.unparse(each) for each in changed}


def _is_alone(function: ast.AST) -> bool:
    """Whether a function, such as a reward, says nothing of the config and changes only names of its own."""
    own = {each.id for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    return (
        not re.search(CONFIGURES, ast.unparse(function)) and {re.split(r"\W", x)[0] for x in _changed(function)} <= own
    )


class _Script:
    """What a Python file says of GRPO's config: literals, names that it binds once, their items and attributes, and
    operators on these."""

    def __init__(self, name: str, table: Mapping[str, Any], text: str = ""):
        self.name, self.table = name, table
        try:
            nodes = list(ast.walk(ast.parse(text)))
        except SyntaxError as error:
            raise ConfigError(f"{name}: line {error.lineno}: not Python: {error.msg}") from None
        self.is_unsloth = any("unsloth" in ast.unparse(node) for node in nodes if isinstance(node, ast.ImportFrom))
        self.calls = [node for node in nodes if isinstance(node, ast.Call)]
        self.classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
        self.imported = {node.asname: node.name for node in nodes if isinstance(node, ast.alias)}
        functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        self.returns = {each.name: [n.value for n in ast.walk(each) if isinstance(n, ast.Return)] for each in functions}
        self.paths = {name: f"__main__.{name}" for name in (*self.returns, *self.classes)}  # of what reward_funcs names
        self.paths |= {
            each.asname or each.name: f"{node.module}.{each.name}" if isinstance(node, ast.ImportFrom) else each.name
            for node in nodes
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for each in node.names
        }
        owner = {id(stmt): f"{node.name}." for node in self.classes.values() for stmt in node.body}
        self.bound: dict[str, list[ast.expr | None]] = defaultdict(list)  # a name -> what it is bound to; None: unknown
        for name, node in self.classes.items():  # self.beta = 0.1 in __post_init__
            self.bound |= {f"{name}.{place[5:]}": [None] for place in _changed(node) if place.startswith("self.")}
        plain = set()
        branches = [node for node in nodes if isinstance(node, (ast.If, ast.For, ast.While))]
        branches = [node for node in branches if "__name__" not in ast.unparse(getattr(node, "test", node.body[0]))]
        perhaps = {id(inner) for node in branches for inner in ast.walk(node)}
        alone = {id(inner) for each in functions if _is_alone(each) for inner in ast.walk(each)}
        nodes = [node for node in nodes if id(node) not in alone]
        for node in nodes:
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    pairs = [(target, node.value)]
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):  # lr, beta = 1e-6, 0.1
                        pairs = list(zip(target.elts, node.value.elts, strict=False))
                    for place, value in pairs if node.value else ():
                        plain |= set() if isinstance(place, ast.Subscript) else {id(place)}
                        unsure = id(node) in perhaps and not isinstance(place, ast.Name)  # a name has no other value
                        self.bound[owner.get(id(node), "") + ast.unparse(place)] += [value, None][: 1 + unsure]
        for node in nodes:
            if isinstance(node, ast.arg):
                self.bound[node.arg].append(None)
            elif isinstance(node, ast.Attribute) and node.attr in MUTATES:
                self.bound[ast.unparse(node.value)].append(None)
            elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in ("setattr", "vars"):
                self.bound[f"{ast.unparse(node.args[0])}.__dict__"].append(None)
            elif isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)) and id(node) not in plain:
                self.bound[ast.unparse(node.value if isinstance(node, ast.Subscript) else node)].append(None)

    def config(self) -> tuple[Values, list[str]]:
        """(TRL's keys, where they were read and what was left out)."""
        trainer = self._only("GRPOTrainer", [call for call in self.calls if self._makes(call.func, "GRPOTrainer")])
        given = self._arguments(trainer, ["model", "reward_funcs", "args"]) if trainer else {}
        configs = [call for call in self.calls if self._makes(call.func, "GRPOConfig")]
        chosen = self._follow(given.get("args"))
        call = chosen if chosen in configs else self._only("GRPOConfig", configs)
        read: list[tuple[int, str]] = [(call.lineno, ast.unparse(call.func))] if call else []
        left: list[str] = []
        if call:
            values = self._known(self._fields(self._last(call.func)), left) | self._made(call, ["output_dir"])
            for name in [name for name, expressions in self.bound.items() if call in expressions]:
                values |= self._fields(name)  # args.learning_rate = 1e-6
        else:
            values = {}
            for name, node in self.classes.items():
                if found := self._known(self._fields(name), notes := []):
                    values |= {
                        key: found[key] if values.get(key, found[key]) == found[key] else Unread(name) for key in found
                    }
                    read.append((node.lineno, f"class {name}"))
                    left += notes
            if not values:
                problem = "no GRPOConfig(...) in it, and no class with TRL's keys; a yaml that TrlParser reads will do"
                raise ConfigError(f"{self.name}: {problem}; {self.table['way_out']}")
        for model in [call for call in self.calls if self._last(call.func) == "ModelConfig"]:
            read.append((model.lineno, "ModelConfig"))
            values |= self._made(model, ["model_name_or_path"])
        if trainer:
            read.append((trainer.lineno, ast.unparse(trainer.func)))
            values |= {"reward_funcs": self._names(given["reward_funcs"])} if "reward_funcs" in given else {}
            values |= {name: self._names(given[name]) for name in ROLLOUTS if name in given}
            values |= {"args": Unread(ast.unparse(given["args"]))} if "args" in given and call is not chosen else {}
            if not re.fullmatch(r"((trl|unsloth)\.(.+\.)?)?GRPOTrainer", name := self._names(trainer.func)):
                values["trainer"] = name
            is_mapped = any(getattr(call.func, "attr", "") in ("map", "filter") for call in self.calls)
            if "train_dataset" in given and is_mapped:
                values["train_dataset"] = "your_module:your_function"
            found = self._model(given["model"]) if "model" in given else {}
            values |= {key: value for key, value in found.items() if not (isinstance(value, Unread) and key in values)}
        values |= self._lora(trainer, given, read, left)
        sizes = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
        batch, parts, group = (values.get(key, self.table["keys"][key]["default"]) for key in sizes)
        if self.is_unsloth and all(type(size) is int for size in (batch, parts, group)) and batch * parts % group:
            values["per_device_train_batch_size"] = group
            left.append(f"per_device_train_batch_size={batch}: Unsloth makes it num_generations={group}")
        return values, [f"  line {line}: {what}" for line, what in sorted(read)] + [f"  {line}" for line in left]

    def _known(self, fields: Values, left: list[str]) -> Values:
        """The fields of a class that are keys of TRL's."""
        known = {*self.table["keys"], *self.table["known"][""].split()}
        named = {self.table["aliases"].get(key, key): value for key, value in fields.items()}
        if found := {key: value for key, value in named.items() if key in known}:
            left += [f"{key}: left out, because TRL has no such key" for key in named if key not in found]
        return found

    def _model(self, node: ast.expr) -> Values:
        """The name of the model that the trainer gets: a text, or what the one from_pretrained of the file loads."""
        name = self._value(node)
        loads = [call for call in self.calls if re.search(r"Model\w*\.from_pretrained$", ast.unparse(call.func))]
        loads = [call for call in loads if not re.search("Peft|Classification", ast.unparse(call.func))]
        word = re.compile(rf"\b{re.escape(ast.unparse(node))}\b")
        bound = [each for text, found in self.bound.items() if word.search(text) for each in found if each]
        loads = [call for call in loads if any(call in ast.walk(each) for each in bound)] or loads
        given = [self._made(call, ["model_name"]) for call in loads] if isinstance(name, Unread) else []
        places = ("model_name", "pretrained_model_name_or_path", "model_name_or_path")
        names = [values[place] for values in given for place in places if place in values]
        bits = {key: values[key] for values in given for key in ("load_in_4bit", "load_in_8bit") if key in values}
        return bits | {"model_name_or_path": names[0] if len({*map(str, names)}) == 1 else name}

    def _lora(self, trainer: ast.Call | None, given: Mapping[str, ast.expr], read: list, left: list[str]) -> Values:
        """The keys of the adapters, if any are trained."""
        configs = [call for call in self.calls if self._makes(call.func, "LoraConfig")]
        wraps = [call for call in self.calls if ast.unparse(call.func).endswith("get_peft_model")]
        fast = [call for call in wraps if isinstance(call.func, ast.Attribute) and len(call.keywords) > 1]
        wanted = self._follow(given.get("peft_config"))
        if isinstance(wanted, ast.Call) and self._last(wanted.func) == "get_peft_config":
            return {}  # of ModelConfig, which is read
        if wanted not in configs and wanted and self._value(wanted) is not None:
            return {"use_peft": Unread(ast.unparse(wanted))}
        if wanted not in configs and trainer and not wraps:
            left += [f"line {call.lineno}: left out, the trainer does not get this LoraConfig" for call in configs]
            return {}
        call = wanted if wanted in configs else self._only("LoraConfig or get_peft_model", fast or configs)
        if call is None:
            return {}
        read.append((call.lineno, ast.unparse(call.func)))
        theirs = self.table["lora"]["get_peft_model" if call in fast else "LoraConfig"]
        values = {key: value for key, value in self._made(call, ["model"] if fast else ["r"]).items() if key != "model"}
        own = ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")
        return theirs | {key if key in own else f"lora_{key}": value for key, value in values.items()}

    def _only(self, name: str, calls: Sequence[ast.Call]) -> ast.Call | None:
        if len(calls) > 1:
            lines = ", ".join(str(call.lineno) for call in calls)
            problem = f"{name}(...) occurs in lines {lines}, but only one can be read: convert a copy that keeps one"
            raise ConfigError(f"{self.name}: {problem}, or {self.table['way_out']}")
        return calls[0] if calls else None

    def _last(self, func: ast.expr) -> str:
        name = ast.unparse(func).rpartition(".")[2]
        return self.imported.get(name, name)

    def _makes(self, func: ast.expr, name: str) -> bool:
        """Whether a call makes a `name`, or a class of the file that is one."""
        last = self._last(func)
        bases = self.classes[last].bases if last in self.classes else ()
        return last.endswith(name) or any(self._last(base) != last and self._makes(base, name) for base in bases)

    def _follow(self, node: ast.expr | None) -> ast.expr | None:
        """What a name is bound to, or a function of the file returns, if it is one expression; another one itself."""
        for _ in range(9):  # a function may return what it calls
            bound = self.bound.get(ast.unparse(node), ()) if isinstance(node, (ast.Name, ast.Attribute)) else ()
            bound = self.returns.get(ast.unparse(node.func), ()) if isinstance(node, ast.Call) else bound
            node = bound[0] if len(bound) == 1 and bound[0] else node
        return node

    def _arguments(self, call: ast.Call, places: Sequence[str]) -> dict[str, ast.expr]:
        named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        return dict(zip(places, call.args, strict=False)) | named

    def _made(self, call: ast.Call, places: Sequence[str] = ()) -> Values:
        """The fields of what a call makes: defaults of its class, **kwargs, arguments."""
        values = {} if self._makes(call.func, "GRPOConfig") else self._fields(self._last(call.func))
        for found in [self._value(keyword.value) for keyword in call.keywords if keyword.arg is None]:
            values |= found if isinstance(found, dict) else {f"**{found}": Unread(found)}
        return values | {key: self._value(node) for key, node in self._arguments(call, places).items()}

    def _fields(self, name: str) -> Values:
        """What is bound as an attribute of a name, such as the fields of a class; first those of its bases."""
        bases = [self._last(base) for base in self.classes[name].bases] if name in self.classes else []
        values = {key: value for base in reversed(bases) if base != name for key, value in self._fields(base).items()}
        own = [each for each in self.bound if each.rpartition(".")[0] == name]
        return values | {each.rpartition(".")[2]: self._value(ast.parse(each, mode="eval").body) for each in own}

    def _names(self, node: ast.expr) -> Any:
        """The names of functions, with their modules, or a text."""
        node = self._follow(node)
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self._names(each) for each in node.elts]
        first, dot, rest = ast.unparse(node).partition(".")
        return node.value if isinstance(node, ast.Constant) else self.paths.get(first, first) + dot + rest

    def _value(self, node: ast.expr) -> Any:
        try:
            return self.constant(node)
        except COMPUTED:
            return Unread(ast.unparse(node))

    def constant(self, node: ast.expr) -> Any:
        """The value of an expression; one of COMPUTED if the file alone does not decide it."""
        match node:
            case ast.Constant():
                return node.value
            case ast.List() | ast.Tuple() | ast.Set():
                return [self.constant(each) for each in node.elts]
            case ast.Dict():
                values: Values = {}
                for key, value in zip(node.keys, node.values, strict=True):
                    values |= {self.constant(key): self._value(value)} if key else self.constant(value)
                return values
            case ast.JoinedStr():
                return "".join(str(self.constant(each)) for each in node.values)
            case ast.FormattedValue(format_spec=None, conversion=-1):
                return self.constant(node.value)
            case ast.UnaryOp():
                return OPERATORS[type(node.op)](self.constant(node.operand))
            case ast.BinOp():
                left, right = self.constant(node.left), self.constant(node.right)
                if isinstance(node.op, ast.Pow) and not -64 <= right <= 64:
                    raise ValueError(node)
                return OPERATORS[type(node.op)](left, right)
            case ast.IfExp():
                return self.constant(node.body if self.constant(node.test) else node.orelse)
            case ast.Name() | ast.Attribute() | ast.Subscript() if bound := self.bound.get(ast.unparse(node)):
                (expression,) = bound
                return self.constant(expression)
            case ast.Name() if node.id in self.classes:
                return self._fields(node.id)
            case ast.Subscript() | ast.Attribute():
                place = node.attr if isinstance(node, ast.Attribute) else self.constant(node.slice)
                found = self.constant(node.value)[place]
                if not isinstance(found, Unread):
                    return found
            case ast.Call() if not node.keywords and ast.unparse(node.func) in CALLS:
                return CALLS[ast.unparse(node.func)](*map(self.constant, node.args))
            case ast.Call() if not node.args and self._last(node.func) in {*self.classes, "dict"}:
                return self._made(node)
            case ast.Call() if self._last(node.func).lower() == "field" and not node.args:
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                return self.constant(given["default"] if "default" in given else given["default_factory"].body)
        raise ValueError(node)
