"""What test_pool.py has graded: functions that answer, hang, crash, fork, or say too much."""

import ctypes
import os
import signal
import subprocess
import sys
import time


def run(job):
    kind, value = job
    if kind == "double":
        return value * 2
    if kind == "touch and hang":
        open(value, "w").close()
    if kind in ("hang", "touch and hang"):
        time.sleep(1000)
    if kind == "busy":
        while True:
            pass
    if kind == "locked":  # C code that keeps the interpreter's lock
        ctypes.PyDLL(None).sleep(1000)
    if kind == "deaf":  # no signal but SIGKILL ends it
        for number in range(1, 32):
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_IGN)
        time.sleep(1000)
    if kind == "raise":
        raise ValueError(value)
    if kind == "exit":
        sys.exit(0)
    if kind == "os exit":
        os._exit(0)
    if kind == "segfault":
        ctypes.string_at(0)
    if kind == "print":
        os.write(1, b'{"outcome": "ok", "value": 0}\n')
        os.write(2, b"noise" * 100_000)
        return "printed"
    if kind == "memory":
        return len(bytearray(2 << 30))  # twice the worker's limit
    if kind == "long value":
        return "x" * (16 << 20)
    if kind == "gigabyte":
        return "x" * value
    if kind == "no json":
        return {1, 2}
    if kind == "pid":
        return os.getpid()
    if kind.startswith("daemon"):  # a session of its own, its parent gone
        script = f"setsid sh -c 'echo $$ > {value}.tmp; mv {value}.tmp {value}; exec sleep 1000' &"
        subprocess.Popen(["sh", "-c", script])
        while not os.path.exists(value):
            time.sleep(0.01)
        return "started" if kind == "daemon" else time.sleep(1000)
    if kind == "await":
        while not os.path.exists(value):
            time.sleep(0.005)
        return value
    if kind == "starts":  # a first job that ends the process at these starts
        path, killed = value
        with open(path, "a") as file:
            file.write("x")
        if os.path.getsize(path) in killed:
            os._exit(0)
        return None
    if kind == "close all":
        os.closerange(0, 4096)  # its socket has the number that it had in the test's process
        time.sleep(1000)
    if kind == "echo":
        return value
    raise AssertionError(kind)
