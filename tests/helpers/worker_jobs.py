"""What the workers of tests' environments do: answer, raise, or wait for a file."""

import os
import time


def run(job):
    kind, value = job
    if kind == "double":
        return value * 2
    if kind == "raise":
        raise ValueError(value)
    if kind == "await":
        while not os.path.exists(value):
            time.sleep(0.005)
    return value
