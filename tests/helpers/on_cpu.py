"""Data of an `env_name` of this module are for models that vLLM does not compute on a CPU: imported by a rank with an
engine, it has operators_on_cpu.py compute them, and the run start."""

import sys

from sick import distinct_characters

if "engine" in sys.modules:  # not in --check, nor in a process that grades
    import operators_on_cpu

    import run.build

    operators_on_cpu.install()
    run.build.check_cpu_operators = lambda model, cfg: None

__all__ = ["distinct_characters"]
