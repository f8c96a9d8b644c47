"""Which tests hold which file: tests mirror the product's tree, and what does not is named here with what it holds.

python tests/layout_table.py       writes the table of tests/README.md anew
"""

import functools
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("kernels", "graders", "dataset", "hf", "system", "check", "run")
BEGIN, END = "<!-- written by tests/layout_table.py -->\n", "<!-- end -->\n"

# Tests -> the files that they hold beside the one that they are named after.
ALSO = {
    "command/test_carry_over_kills.py": ["rollout.py", "run/setup.py", "run/checkpoint.py"],
    "command/test_check.py": ["grpo.py", "check/preflight.py", "check/rules.py", "hf/files.py"],
    "command/test_disk_full.py": ["run/checkpoint.py"],
    "command/test_health_runs.py": ["run/health.py", "run/log.py"],
    "command/test_kill.py": ["run/checkpoint.py", "check/resume.py"],
    "command/test_nodes.py": ["train.sh", "slurm.sh", "system/exits.py", "system/launch.py", "run/folder.py"],
    "command/test_numbers.py": ["grpo.py", "optim.py", "system/ranks.py"],
    "command/test_resumed_run.py": ["grpo.py", "run/setup.py", "run/checkpoint.py", "run/folder.py"],
    "command/test_scripts.py": ["train.sh", "setup.sh", "system/exits.py", "system/launch.py"],
    "command/test_signals.py": ["grpo.py", "system/exits.py"],
    "command/test_split.py": ["run/generators.py", "system/bridge.py"],
    "command/test_soak.py": ["grpo.py", "engine.py"],
    "core/test_carry_over.py": ["engine.py", "rollout.py", "run/setup.py", "system/watchdog.py"],
    "core/test_async_sim.py": ["bench/async_sim.py"],
    "core/test_compile.py": ["model.py", "run/build.py"],
    "core/test_countdown.py": ["examples/envs/countdown.py"],
    "core/test_cuda_branches.py": ["model.py", "optim.py", "kernels/linear_logp.py", "kernels/linear_loss.py"],
    "core/test_cuda_calls.py": [
        "model.py",
        "engine.py",
        "system/ranks.py",
        "kernels/linear_logp.py",
        "kernels/softmax.py",
    ],
    "core/test_engine_cuda.py": ["engine.py", "rollout.py"],
    "core/test_envs.py": ["graders/environments.py", "graders/reward_function.py"],
    "core/test_example_envs.py": ["examples/envs"],
    "core/test_families.py": ["model.py", "engine.py", "hf/model_config.py"],
    "core/test_fast_run.py": ["grpo.py", "eval.py", "engine.py", "run/setup.py"],
    "core/test_gap.py": ["bench/gap.py", "model.py"],
    "core/test_golden.py": ["bench/golden.py"],
    "core/test_judge.py": ["examples/envs/judge.py"],
    "core/test_loss_exact.py": ["loss.py"],
    "core/test_multiturn.py": ["rollout.py"],
    "core/test_off_policy.py": ["loss.py", "bench/off_policy.py"],
    "core/test_pictures.py": ["bench/pictures.py"],
    "core/test_reference.py": ["model.py", "run/build.py", "run/checkpoint.py"],
    "core/test_walkthrough.py": ["bench/walk.py", "docs/walkthrough.md", "grpo.py", "rollout.py", "batch.py"],
    "core/test_unfinished.py": ["engine.py", "rollout.py", "metrics.py"],
    "dataset/test_scan.py": ["dataset/problems.py", "check/preflight.py"],
    "examples/test_arithmetic.py": ["examples/arithmetic"],
    "examples/test_cluster.py": ["examples/cluster"],
    "examples/test_comparison.py": ["docs/comparison.md", "README.md", "CITATION.cff"],
    "examples/test_commands.py": ["README.md", "tests/commands.yaml"],
    "examples/test_forks.py": ["examples/forks"],
    "examples/test_get_model.py": ["examples/smollm2"],
    "examples/test_gsm8k.py": ["examples/gsm8k"],
    "examples/test_scale.py": ["bench/scale.py", "model.py"],
    "examples/test_smollm2.py": ["examples/smollm2"],
    "examples/test_three_tasks.py": ["examples/three_tasks", "dataset/mixing.py"],
    "graders/test_code_grader.py": ["graders/environments.py"],
    "graders/test_graded_step.py": ["graders/pool.py", "rollout.py"],
    "graders/test_math_grader.py": ["graders/environments.py", "graders/math_text.py"],
    "hf/test_real_tokenizers.py": ["hf/tokenizer.py"],
    "kernels/test_aot.py": ["kernels/linear_logp.py", "kernels/clipped_pg.py", "kernels/softmax.py"],
    "kernels/test_linear_loss.py": ["kernels/clipped_pg.py", "kernels/backend.py", "kernels/softmax.py"],
    "kernels/test_linear_logp.py": ["kernels/backend.py", "kernels/softmax.py"],
    "kernels/test_head_memory.py": ["kernels/backend.py", "kernels/linear_loss.py", "kernels/linear_logp.py"],
    "kernels/test_sampling_filter.py": ["kernels/softmax.py", "kernels/linear_logp.py", "kernels/linear_loss.py"],
    "kernels/test_vocabulary.py": ["kernels/softmax.py", "kernels/linear_loss.py", "kernels/linear_logp.py"],
    "red_team/test_hostile_data.py": ["hf/files.py", "system/imports.py"],
    "red_team/test_hostile_configs.py": ["check/config_yaml.py", "check/reader.py", "check/nemo.py", "check/rules.py"],
    "red_team/test_hostile_model.py": ["hf/model_config.py", "hf/tokenizer.py", "hf/weights.py", "check/preflight.py"],
    "red_team/test_hostile_run.py": ["run/folder.py", "check/rules.py", "check/resume.py", "system/exits.py"],
    "red_team/test_hostile_code.py": ["graders/code_grader.py", "graders/codec.py", "graders/sandbox.py"],
    "red_team/test_hostile_math.py": ["graders/math_grader.py", "graders/math_text.py"],
    "tools/test_convert.py": ["tools/convert.py"],
    "tools/test_coming_from.py": ["tools/convert.py", "check/nemo.py"],
    "check/test_config_data.py": ["config.py", "check/rules.py"],
    "run/test_log.py": ["metrics.py"],
    "core/test_metrics_page.py": ["metrics.py", "run/log.py", "loss.py", "rollout.py", "grpo.py"],
    "run/test_memory.py": ["system/exits.py", "grpo.py"],
    "check/test_memory_plan.py": ["check/memory_fit.py"],
    "tools/test_report.py": ["tools/report.py", "bench/report.py"],
    "check/test_nemo.py": ["config.py"],
    "system/test_exchange.py": ["run/rollouts.py"],
    "system/test_optimizer.py": ["model.py", "optim.py", "run/checkpoint.py"],
    "system/test_ranks.py": ["hf/weights.py"],
    "system/test_replicas.py": [
        "model.py",
        "optim.py",
        "grpo.py",
        "system/ranks.py",
        "hf/weights.py",
        "run/checkpoint.py",
        "check/memory_plan.py",
    ],
    "check/test_nemo_async.py": ["check/nemo.py", "check/rules.py"],
    "check/test_nemo_recipes.py": ["check/nemo.py", "check/reader.py", "examples/envs/sliding_puzzle.py"],
}
# Files without a test beside them -> why.
WITHOUT = {
    "graders/math_text.py": "what math_grader.py reads, held with it",
    "graders/environments.py": "each environment is held where its grading is",
    "kernels/backend.py": "a choice between two ops, held by the tests of both",
    "kernels/clipped_pg.py": "a fast path of linear_loss, held against it",
    "kernels/softmax.py": "what a row of logits needs, held by the two ops that are made of it",
    "hf/files.py": "held where a wrong file is answered",
    "run/build.py": "what a run is made of, held by whole runs",
    "check/memory_fit.py": "what the plan says to a user, held with it",
    "system/exits.py": "held by processes that end",
    "system/launch.py": "held by train.sh, which starts it",
}


@functools.cache
def tracked(root: Path = ROOT) -> set[str] | None:
    """What git tracks; None where the folder is no repository."""
    if not (root / ".git").exists():
        return None
    listed = subprocess.run(["git", "-C", root, "ls-files", "-z"], capture_output=True, text=True, check=True)
    return set(listed.stdout.split("\0"))


def of_the_house(paths: Iterable[Path], root: Path = ROOT) -> list[str]:
    """Names of the files that git tracks: what else lies there is the user's. All where there is no repository."""
    names, known = {str(path.relative_to(root)) for path in paths}, tracked(root)
    return sorted(names if known is None else names & known)


def product_files() -> list[str]:
    """All .py of the product, by their paths."""
    return of_the_house([*ROOT.glob("*.py"), *(path for room in ROOMS for path in ROOT.glob(f"{room}/*.py"))])


def mirror_of(name: str) -> str:
    room, _, file = f"core/{name}".rpartition("/") if "/" not in name else name.rpartition("/")
    return f"{room}/test_{file}"


def needs_test() -> list[str]:
    """A room's `__init__` says what the room is for, or names what it offers."""
    return [name for name in product_files() if not name.endswith("__init__.py")]


def test_files() -> set[str]:
    return {name.removeprefix("tests/") for name in of_the_house(ROOT.glob("tests/*/test_*.py"))}


def tests_of(name: str) -> list[str]:
    """What to run when the file was edited: its mirror first."""
    mirror = [mirror_of(name)] if mirror_of(name) in test_files() else []
    return mirror + [test for test, held in ALSO.items() if name in held]


def problems() -> list[str]:
    """What the lists above say wrongly, or do not say."""
    tests, mirrors = test_files(), {mirror_of(name) for name in needs_test()}
    found = [f"{name}: no tests/{mirror_of(name)}" for name in needs_test() if not tests_of(name)]
    found += [f"tests/{test} is in no list: say in ALSO what it holds" for test in sorted(tests - mirrors - set(ALSO))]
    for name in WITHOUT:
        if name not in needs_test():
            found.append(f"{name} is listed and is not there")
        elif mirror_of(name) in tests:
            found.append(f"{name}: tests/{mirror_of(name)} is there, so WITHOUT need not excuse it")
    alone = [name for name in needs_test() if mirror_of(name) not in tests and name not in WITHOUT]
    found += [f"{name}: no tests/{mirror_of(name)}, and WITHOUT does not say why" for name in alone]
    found += [f"tests/{test} is listed and is not there" for test in sorted(ALSO.keys() - tests)]
    held = sorted({name for listed in ALSO.values() for name in listed})
    return found + [f"{name} is listed in ALSO and is not there" for name in held if not (ROOT / name).exists()]


def table() -> str:
    scripts = sorted({name for listed in ALSO.values() for name in listed} - set(needs_test()))
    lines = ["| edited | run (`tests/run.sh` and these, under `tests/`) |", "|---|---|"]
    for name in needs_test() + scripts:
        lines.append(f"| {name} | {' '.join(tests_of(name))} |")
    return "\n".join(lines) + "\n"


def filled_in(readme: str) -> str:
    """The page with the table between its two marks."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    page = ROOT / "tests" / "README.md"
    page.write_text(filled_in(page.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit("\n".join(problems()) or 0)
