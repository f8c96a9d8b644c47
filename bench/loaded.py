"""What a smoke run of two steps loads of this repository: the lines of each file, and of its functions that the run
never calls.

    .venv/bin/python bench/loaded.py [key.sub=value ...]
"""

import ast
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

SETTINGS = ("grpo.max_num_steps=2", "grpo.val_at_end=false")
called: set[tuple[str, int]] = set()  # file, first line of a function


def note(frame, event, _) -> None:
    if event == "call" and frame.f_code.co_filename.startswith(f"{ROOT}/"):
        called.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))


def run_smoke(words: list[str]) -> None:
    """With the real engine, on one rank."""
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["grpo.py", "configs/smoke.yaml", *SETTINGS, f"logger.log_dir={folder}", *words]
        sys.setprofile(note)
        import grpo

        code = grpo.main()
        sys.setprofile(None)
    assert code == 0, code


def lines_never_called(file: Path) -> int:
    """Lines of functions on top of a file or of a class. A function's first line is that of its decorators."""
    num_lines = 0
    todo = list(ast.parse(file.read_text(encoding="utf-8")).body)
    for node in todo:
        if isinstance(node, ast.ClassDef):
            todo += node.body
        elif isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if (str(file), first) not in called:
                num_lines += node.end_lineno - first + 1
    return num_lines


def table() -> str:
    """The longest file first."""
    own = {Path(module.__file__) for module in list(sys.modules.values()) if getattr(module, "__file__", None)}
    rows = []
    for file in own:
        is_own = file.is_relative_to(ROOT) and ".venv" not in file.parts and file != Path(__file__).resolve()
        if is_own:
            num_lines = len(file.read_text(encoding="utf-8").splitlines())
            rows.append((num_lines, lines_never_called(file), str(file.relative_to(ROOT))))
    rows.sort(reverse=True)
    lines = [f"{num_lines:6,} {never:6,}  {name}" for num_lines, never, name in rows]
    total = sum(num_lines for num_lines, _, _ in rows)
    never = sum(never for _, never, _ in rows)
    return "\n".join([" lines  never called", *lines, f"{total:6,} {never:6,}  in {len(rows)} files"])


if __name__ == "__main__":
    os.chdir(ROOT)
    run_smoke(sys.argv[1:])
    print(table(), flush=True)
    from base.system.exits import exit_process

    exit_process(0)
