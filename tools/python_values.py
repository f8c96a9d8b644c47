"""The values of expressions in a Python file, as far as the file alone decides them: `Unread` stands for all others."""

import ast
import operator
from collections.abc import Callable
from typing import Any

from tools.python_names import Names

Values = dict[str, Any]  # key -> value

MAX_STEPS = 10_000  # nodes of the tree that one value may take
MAX_SIZE = 10_000  # characters or items of a value, and bits of a number

ARITHMETIC: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
CONVERSIONS: dict[str, Callable] = {"int": int, "float": float, "str": str, "round": round, "min": min, "max": max}


class Unread(str):
    """The text of a value that only the running script, a shell or hydra knows."""


class Computed(ValueError):
    """The file alone does not decide a value."""


NOT_DECIDED = (ArithmeticError, LookupError, TypeError, ValueError)  # what reading a value raises, Computed among them


def _decided(value: Any) -> Any:
    if isinstance(value, Unread):
        raise Computed(value)
    return value


class Literals:
    def __init__(self, names: Names):
        self.names = names
        self.steps = 0
        self.fields_of: dict[str, Values] = {}  # class -> its fields
        self.open_classes: set[str] = set()  # whose fields are being read

    def value(self, node: ast.expr) -> Any:
        """The value of an expression, or its text as Unread."""
        self.steps = 0
        try:
            return self._value(node)
        except (*NOT_DECIDED, RecursionError):
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
            parts = [str(self._value(part)) for part in node.values]
            return "".join(parts)
        if isinstance(node, ast.FormattedValue):
            return self._in_a_text(node)
        if isinstance(node, ast.UnaryOp):
            return self._with_one_operand(node)
        if isinstance(node, ast.BinOp):
            return self._with_two_operands(node)
        if isinstance(node, ast.IfExp):
            chosen = node.body if self._value(node.test) else node.orelse
            return self._value(chosen)
        if isinstance(node, ast.Name):
            return self._of_name(node)
        if isinstance(node, ast.Attribute):
            return self._field(node)
        if isinstance(node, ast.Subscript):
            return self._item(node)
        if isinstance(node, ast.Call):
            return self._of_call(node)
        raise Computed(type(node).__name__)

    def _in_a_text(self, node: ast.FormattedValue) -> Any:
        """The value of `{x}` in an f-string; not of `{x:.2f}` or `{x!r}`."""
        if node.format_spec is not None or node.conversion != -1:
            raise Computed("format")
        return self._value(node.value)

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
        except NOT_DECIDED:
            return Unread(ast.unparse(node))

    def _with_one_operand(self, node: ast.UnaryOp) -> Any:
        operand = self._value(node.operand)
        if isinstance(node.op, ast.Not):
            return not operand
        if isinstance(node.op, ast.USub):
            return -operand
        raise Computed("operator")

    def _with_two_operands(self, node: ast.BinOp) -> Any:
        left = self._value(node.left)
        right = self._value(node.right)
        if isinstance(node.op, ast.BitOr) and isinstance(left, dict) and isinstance(right, dict):
            return left | right
        if isinstance(node.op, ast.Add) and isinstance(left, (str, list)) and type(left) is type(right):
            return left + right
        for operand in (left, right):
            if not isinstance(operand, (int, float)):
                raise Computed("operator")
        if isinstance(node.op, ast.Pow) and (abs(right) > 64 or abs(left) > 1 << 64):
            raise Computed("too large")
        apply = ARITHMETIC.get(type(node.op))
        if apply is None:
            raise Computed("operator")
        return apply(left, right)

    def _of_name(self, node: ast.Name) -> Any:
        scope = self.names.scope(node)
        if node.id in self.names.classes and self.names.home(node.id, scope) is None:
            return self.fields(node.id)
        expression = self.names.only_value(node.id, scope)
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
            return self._only_reads_part(parent, above)
        if isinstance(parent, ast.keyword):
            assert isinstance(above, ast.Call)
            is_unpacked = parent.arg is None
            is_taken = self.names.makes(above.func, "Config") or self.names.makes(above.func, "GRPOTrainer")
            return is_unpacked or is_taken
        return isinstance(parent, (ast.Dict, ast.BinOp))

    def _only_reads_part(self, part: ast.Attribute | ast.Subscript, above: ast.AST) -> bool:
        """Whether x.part or x[part] is neither assigned to nor called, nor has a part that is."""
        if not isinstance(part.ctx, ast.Load):
            return False
        if isinstance(above, ast.Call):
            return above.func is not part
        if isinstance(above, (ast.Attribute, ast.Subscript)):
            return isinstance(above.ctx, ast.Load)
        return True

    def _field(self, node: ast.Attribute) -> Any:
        if isinstance(node.value, ast.Name) and node.value.id in self.names.classes:
            found = self.fields(node.value.id)[node.attr]
        else:
            found = self._value(node.value)[node.attr]
        return _decided(found)

    def _item(self, node: ast.Subscript) -> Any:
        container = self._value(node.value)
        index = self._value(node.slice)
        return _decided(container[index])

    def _of_call(self, node: ast.Call) -> Any:
        called = ast.unparse(node.func)
        name = self.names.last(node.func)
        if name.lower() == "field" and not node.args:
            return self._default_of_field(node)
        if called == "os.path.join" and not node.keywords:
            parts = [self._value(argument) for argument in node.args]
            return "/".join(parts)
        if called in CONVERSIONS and not node.keywords:
            arguments = [self._value(argument) for argument in node.args]
            return CONVERSIONS[called](*arguments)
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
            target = None
            if isinstance(statement, ast.AnnAssign):
                target = statement.target
            elif isinstance(statement, ast.Assign):
                target = statement.targets[0]
            if isinstance(target, ast.Name) and statement.value is not None:
                values[target.id] = self._part(statement.value)
        for name in self._changed_outside(cls):
            values[name] = Unread(f"{cls.name}.{name}")
        return values

    def _changed_outside(self, cls: ast.ClassDef) -> list[str]:
        """The fields that `self.field = ...` in a method, or `Class.field = ...` anywhere, sets."""
        uses = [use for use in self.names.uses.get("self", ()) if self._is_within(use, cls)]
        uses += self.names.uses.get(cls.name, ())
        fields = []
        for use in uses:
            place = self.names.parent[use]
            if isinstance(place, ast.Attribute) and not isinstance(place.ctx, ast.Load):
                fields.append(place.attr)
        return fields

    def _is_within(self, node: ast.AST, cls: ast.ClassDef) -> bool:
        while not isinstance(node, (ast.Module, ast.ClassDef)):
            node = self.names.parent[node]
        return node is cls
