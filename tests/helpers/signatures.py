"""Names, parameters and defaults of a package's functions and classes, read out of its sources, and no code of theirs.

    python tests/helpers/signatures.py torch-2.11.0-*.whl triton-3.6.0-*.whl vllm-0.24.0-*.whl

writes tests/helpers/old_versions/<package>-<version>.json: what our code calls (their_calls.py), as the wheel has it,
and which operators the wheel lacks that the installed torch has. (`pip download --no-deps torch==2.11.0`: 190 to 530 MB
each; nothing is installed or imported.)
"""

import ast
import hashlib
import json
import re
import sys
import zipfile
from collections import defaultdict
from functools import cache
from pathlib import Path

RECORDS = Path(__file__).parent / "old_versions"
# Where the stubs of torch's compiled functions lie, for names that their .py files do not define.
OPERATORS, OPERATOR_LIST = "torch.ops.aten.", "torchgen/packaged/ATen/native/native_functions.yaml"
COMPILED = ("torch._C._VariableFunctions", "torch._C", "torch._C._nn")


class Sources:
    """The .py and .pyi files of a wheel, or of a folder such as site-packages. Names are dotted: torch.nn.Linear."""

    def __init__(self, path: Path):
        self.path = path
        self.wheel = zipfile.ZipFile(path) if path.is_file() else None
        self.files = set(self.wheel.namelist()) if self.wheel else None

    def has_file(self, file: str) -> bool:
        return file in self.files if self.wheel else (self.path / file).is_file()

    def text(self, file: str) -> str:
        return (self.wheel.read(file) if self.wheel else (self.path / file).read_bytes()).decode()

    @cache  # noqa: B019  (there are as many as packages)
    def module(self, name: str) -> tuple[dict, list[ast.ImportFrom], bool] | None:
        """What a module defines at its top, ifs and trys entered: name -> [(file, module, node)]; what it imports from
        others; whether it is a folder. None if there is no such module."""
        base = name.replace(".", "/")
        files = [base + end for end in ("/__init__.py", ".py", "/__init__.pyi", ".pyi") if self.has_file(base + end)]
        defined, imported = defaultdict(list), []
        for file in files:
            todo = ast.parse(self.text(file)).body
            while todo:
                node = todo.pop(0)
                if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
                    todo = [s for block in ("body", "handlers", "orelse") for s in getattr(node, block, [])] + todo
                elif isinstance(node, ast.ImportFrom):
                    imported.append(node)
                for defines in _names(node):
                    defined[defines].append((file, name, node))
        return (defined, imported, any("/__init__." in file for file in files)) if files else None

    def find(self, name: str, visited: set[str] | None = None) -> list[tuple[str, str, ast.stmt]]:
        """(file, module, node) of what defines a function, a class, a method or a field: several where it is overloaded
        or depends on the platform. `visited`: modules import each other in circles."""
        visited = set() if visited is None else visited
        parts = name.split(".")
        for length in range(len(parts) - 1, 0, -1):
            module = ".".join(parts[:length])
            if self.module(module) is not None:
                nodes = self._in_module(module, parts[length], visited)
                for member in parts[length + 1 :]:
                    nodes = self._in_class(nodes, member)
                return nodes
        return []

    def _in_module(self, module: str, name: str, visited: set[str]) -> list[tuple[str, str, ast.stmt]]:
        if f"{module}.{name}" in visited:
            return []
        visited.add(f"{module}.{name}")
        defined, imported, is_folder = self.module(module)
        nodes = [entry for entry in defined.get(name, []) if not isinstance(entry[2], ast.Assign)]
        if nodes:
            return [entry for entry in nodes if entry[0] == nodes[0][0]]  # not of the .py and of its .pyi
        for node in imported:
            above = module.split(".")[: len(module.split(".")) + is_folder - node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                if alias.name == "*" or name == (alias.asname or alias.name):
                    target = f"{source}.{name if alias.name == '*' else alias.name}"
                    if nodes := self.find(target, visited):
                        return nodes
        if module in ("torch", "torch.nn.functional"):
            return next((nodes for stub in COMPILED if (nodes := self._in_module(stub, name, visited))), [])
        return defined.get(name, [])

    def _in_class(self, nodes: list, member: str) -> list[tuple[str, str, ast.stmt]]:
        for file, module, node in nodes:
            if isinstance(node, ast.ClassDef):
                members = [(file, module, part) for part in node.body if member in _names(part)]
                if members and not isinstance(members[0][2], ast.Assign):
                    return members
                for base in map(ast.unparse, node.bases):
                    if inherited := self._in_class(self.find(base) or self.find(f"{module}.{base}"), member):
                        return inherited
                return members
        return []

    def has(self, name: str) -> bool:
        """Whether it can be imported: a module, or what one defines."""
        return self.module(name) is not None or bool(self.find(name))

    def forms(self, name: str) -> list[str]:
        """[file, a form, ...]: "(input, mat2, *, out=None)". What a default is computed from is written as `...`."""
        if name.startswith(OPERATORS):
            return self._operator(name.removeprefix(OPERATORS))
        nodes = self.find(name)
        bound = bool(nodes) and isinstance(nodes[0][2], ast.ClassDef)
        if bound:
            file, module, owner = nodes[0]
            fields = [part for part in owner.body if isinstance(part, ast.AnnAssign)]
            defined = {name for part in owner.body for name in _names(part)}
            own = [name for name in ("__init__", "__new__") if name in defined]
            if fields and not own:  # a dataclass, or like one
                return [file, f"({', '.join(self._field(module, field) for field in fields)})"]
            nodes = self._in_class(nodes[:1], (own or ["__init__"])[0]) or self._in_class(nodes[:1], "__new__")
        elif nodes and (parent := self.find(name.rpartition(".")[0])):
            bound = isinstance(parent[0][2], ast.ClassDef)
        functions = [(file, node) for file, _, node in nodes if isinstance(node, ast.FunctionDef)]
        whole = [item for item in functions if not any("overload" in ast.unparse(d) for d in item[1].decorator_list)]
        forms = [_form(node, bound) for _, node in whole or functions]
        return [functions[0][0], *dict.fromkeys(forms)] if forms else []

    def _operator(self, name: str) -> list[str]:
        """Of a compiled operator: "- func: mm.dtype_out(Tensor self, ..., *, Tensor(a!) out) -> Tensor(a!)"."""
        forms = re.findall(rf"^- func: {name}(?:\.\w+)?\((.*)\) ->", self.text(OPERATOR_LIST), re.MULTILINE)
        parameters = [
            re.sub(r"[\w\[\]?!()]+ (\w+)(=[^,]+)?", lambda m: m[1] + "=..." * bool(m[2]), form) for form in forms
        ]
        return [OPERATOR_LIST, *(f"({text})" for text in parameters)] if forms else []

    def _field(self, module: str, field: ast.AnnAssign) -> str:
        value = field.value
        if isinstance(value, ast.Attribute):  # EngineArgs has the defaults of other classes
            origin = [n for _, _, n in self.find(f"{module}.{ast.unparse(value)}") if isinstance(n, ast.AnnAssign)]
            value = origin[0].value if origin else value
        return ast.unparse(field.target) + (f"={_default(value)}" if value else "")

    def attributes(self, name: str) -> list[str]:
        """Of a class what it defines or sets on itself; of a Literal or a dict its strings."""
        names = set()
        for _, module, node in self.find(name):
            if not isinstance(node, ast.ClassDef):
                keys = node.value.keys if isinstance(node.value, ast.Dict) else ast.walk(node.value)
                names |= {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
                continue
            for base in map(ast.unparse, node.bases):
                names |= {*(self.attributes(base) or self.attributes(f"{module}.{base}"))}
            for part in node.body:
                names |= {part.name} if isinstance(part, ast.FunctionDef) else set()
            for part in ast.walk(node):
                if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self":
                    names |= {part.attr} if isinstance(part.ctx, ast.Store) else set()
                elif isinstance(part, ast.AnnAssign | ast.Assign) and part in node.body:
                    names |= {*_names(part)}
                elif isinstance(part, ast.Compare) and ast.unparse(part.left) == "name":  # in a __getattr__
                    names |= {c.value for c in part.comparators if isinstance(c, ast.Constant)}
        return sorted(name for name in names if not name.startswith("_"))


def _names(node: ast.stmt) -> list[str]:
    """What a statement defines."""
    if isinstance(node, ast.AnnAssign | ast.Assign):
        return [t.id for t in getattr(node, "targets", None) or [node.target] if isinstance(t, ast.Name)]
    return [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []


def _default(value: ast.expr) -> str:
    for keyword in getattr(value, "keywords", []):  # Field(default=0, ge=0)
        value = keyword.value if keyword.arg == "default" else value
    try:
        return ast.unparse(value) if ast.literal_eval(value) is ... else repr(ast.literal_eval(value))
    except ValueError:
        return "..."


def _form(function: ast.FunctionDef, bound: bool) -> str:
    args = ast.parse(ast.unparse(function)).body[0].args
    for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]:
        if arg:
            arg.annotation = None
    args.defaults = [ast.parse(_default(value)).body[0].value for value in args.defaults]
    args.kw_defaults = [value and ast.parse(_default(value)).body[0].value for value in args.kw_defaults]
    if bound and "staticmethod" not in map(ast.unparse, function.decorator_list):
        (args.posonlyargs or args.args).pop(0)
    return f"({ast.unparse(args)})"


def write_record(wheel: Path) -> None:
    """One entry a line."""
    import their_calls  # which knows our code; Sources knows theirs

    package, version, *_ = wheel.name.split("-")
    sources = Sources(wheel)
    with wheel.open("rb") as file:
        head = {"wheel": wheel.name, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    there = [name for name in sorted(their_calls.imported()) if name.split(".")[0] == package and sources.has(name)]
    absent = [name for name in their_calls.plain() if name.split(".")[0] == package and not sources.has(name)]
    head |= {"imports": there, "absent": absent}
    lines = [f'"{key}": {json.dumps(value)}' for key, value in head.items()]
    wanted = {"forms": (their_calls.all_names(), sources.forms), "attributes": (their_calls.OWNERS, sources.attributes)}
    for key, (names, of) in wanted.items():
        entries = {name: of(name) for name in names if name.split(".")[0] == package}
        text = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items() if entry)
        lines.append(f'"{key}": {{\n{text}\n}}')
    RECORDS.mkdir(exist_ok=True)
    (RECORDS / f"{package}-{version}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    for argument in sys.argv[1:]:
        write_record(Path(argument))
