"""Data of an `env_name` of this module are for models that vLLM does not compute on a CPU: imported by a rank with an
engine, it has operators_on_cpu.py compute them, and the run start."""

import sys

if "engine" in sys.modules:  # not in --check, nor in a process that grades
    import operators_on_cpu

    import run.build

    operators_on_cpu.install()
    run.build.check_cpu_operators = lambda model, cfg: None


def plain_characters(completions, **columns):
    """The share of ASCII, which a random model of bytes has by half, and learns in some steps."""
    texts = [messages[-1]["content"] for messages in completions]
    return [sum(map(str.isascii, text)) / max(1, len(text)) for text in texts]
