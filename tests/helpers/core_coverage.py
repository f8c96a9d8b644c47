"""Which functions of the core a test session enters: `start` before anything of the core is imported, then `report`.

The files of the core are imported with a call at the head of each function that notes its name: no tracing, which
would make Triton's interpreter three times slower. What `inspect` reads of them stays the file.
"""

import ast
import sys
from collections import defaultdict
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import ClassVar

ROOT = Path(__file__).resolve().parents[2]
entered: set[str] = set()


def core_files() -> list[Path]:
    return sorted([*ROOT.glob("*.py"), *ROOT.glob("kernels/*.py")])


class Notes(ast.NodeTransformer):
    """Puts `__entered__("file: function")` into each function, behind its docstring."""

    def __init__(self, path: Path):
        self.file, self.scopes, self.functions = str(path.relative_to(ROOT)), [], []

    def visit_ClassDef(self, node):
        self.scopes.append(node.name)
        self.generic_visit(node)
        self.scopes.pop()
        return node

    def visit_FunctionDef(self, node):
        name = f"{self.file}: {'.'.join([*self.scopes, node.name])}"
        self.functions.append(name)
        self.visit_ClassDef(node)
        note = ast.parse(f"__entered__({name!r})").body[0]
        for part in ast.walk(note):
            ast.copy_location(part, node.body[0])
        node.body.insert(1 if ast.get_docstring(node) else 0, note)
        return node


class Loader(SourceFileLoader):
    def get_code(self, fullname):
        """Compiled anew: a cached file would carry the notes into other sessions."""
        tree = ast.parse(self.get_data(self.path))
        return compile(Notes(Path(self.path)).visit(tree), self.path, "exec")

    def exec_module(self, module):
        module.__entered__ = entered.add
        super().exec_module(module)


class Finder:
    files: ClassVar = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in core_files()}

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        file = cls.files.get(fullname) or cls.files.get(f"{fullname}.__init__")
        if file is None:
            return None
        folders = [str(file.parent)] if file.name == "__init__.py" else None
        loader = Loader(fullname, str(file))
        return spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=folders)


def start() -> None:
    assert not Finder.files.keys() & sys.modules.keys(), "something of the core is imported already"
    sys.meta_path.insert(0, Finder)
    import triton.runtime.interpreter as interpreter

    rewrite = interpreter.InterpretedFunction.rewrite

    def noted(self):
        """The interpreter runs what it reads from the file, not what was imported."""
        path = Path(self.fn.__code__.co_filename)
        if path in Finder.files.values():
            entered.add(f"{path.relative_to(ROOT)}: {self.fn.__qualname__}")
        return rewrite(self)

    interpreter.InterpretedFunction.rewrite = noted


def report() -> tuple[str, list[str]]:
    """(a line per core file, the functions that no test entered)."""
    counts, missing = defaultdict(list), []
    for path in core_files():
        notes = Notes(path)
        notes.visit(ast.parse(path.read_text(encoding="utf-8")))
        counts[notes.file] = [function in entered for function in notes.functions]
        missing += [function for function in notes.functions if function not in entered]
    lines = [f"{file:<24}{sum(flags):>4} of{len(flags):>4} functions" for file, flags in counts.items()]
    return "\n".join(lines) + "\n", missing
