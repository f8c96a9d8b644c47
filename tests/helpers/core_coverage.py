"""Which functions of the core a test session enters: `start` before anything of the core is imported, then `report`."""

import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parents[2]
IS_FUNCTION = 0x1  # CO_OPTIMIZED: what bodies of modules and classes are not
codes: dict[int, CodeType] = {}  # by id: code objects are slow to hash


def core_files() -> list[Path]:
    return sorted([*ROOT.glob("*.py"), *ROOT.glob("kernels/*.py")])


def start() -> None:
    threading.setprofile(_on_event)
    sys.setprofile(_on_event)


def stop() -> None:
    threading.setprofile(None)
    sys.setprofile(None)


def _on_event(frame, event, argument) -> None:
    if event == "call":
        codes[id(frame.f_code)] = frame.f_code


def functions_of(code: CodeType) -> set[str]:
    """Qualified names of the functions in it; comprehensions and lambdas count as what holds them."""
    names = set()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= functions_of(constant)
            if constant.co_flags & IS_FUNCTION and not constant.co_name.startswith("<"):
                names.add(constant.co_qualname)
    return names


def report() -> tuple[str, list[str]]:
    """(a line per core file, the functions that no test entered)."""
    entered = defaultdict(set)
    for code in codes.values():
        entered[code.co_filename].add(code.co_qualname)
    lines, missing = [], []
    for path in core_files():
        name = str(path.relative_to(ROOT))
        functions = functions_of(compile(path.read_text(encoding="utf-8"), str(path), "exec"))
        absent = sorted(functions - entered[str(path)])
        lines.append(f"{name:<28} {len(functions) - len(absent):>3} of {len(functions):>3} functions")
        missing += [f"{name}: {function}" for function in absent]
    return "\n".join(lines) + "\n", missing
