"""Programs that want to pass the tests of `add`, or to do harm, without adding: read by test_code.py.

PORT is a server's on this machine, FOLDER a folder with a file `kept`. Between the lines of dashes: name, then program.
"""

import re

PROGRAMS = r"""
--- leaves
raise SystemExit(0)
--- leaves in the call
def add(a, b): raise SystemExit(0)
--- leaves hard
import os
def add(a, b): os._exit(0)
--- leaves hard at once
import os
os._exit(0)
--- patches builtins
import builtins, sys
builtins.type = lambda x: int
builtins.AssertionError = ValueError
builtins.isinstance = lambda *_: True
sys.modules['json'].dumps = lambda x: '["value", true]'
def add(a, b): return 0
--- patches its own runner
import sys
vars(sys.modules['_judges.sandbox'])['encode'] = lambda x: {'tuple': [{'int': '0x3'}]}
def add(a, b): return 0
--- raises what asserts raise
def add(a, b): raise AssertionError
--- raises always
def add(a, b): raise StopIteration
--- says it passed
import os
for fd in range(64):
    try: os.write(fd, b'["ok", ""]\n' * 9)
    except OSError: pass
def add(a, b): return 0
--- says it passed and leaves
import os
for fd in range(64):
    try: os.write(fd, b'["ok", ""]\n' * 9)
    except OSError: pass
os._exit(0)
--- sends garbage
import os
for fd in range(64):
    try: os.write(fd, b'\xff{["\n' * 99)
    except OSError: pass
def add(a, b): return 3
--- closes everything
import os
os.closerange(0, 64)
def add(a, b): return a + b
--- kills its parent
import os
os.kill(os.getppid(), 9)
def add(a, b): return 0
--- kills its group
import os
os.kill(0, 9)
def add(a, b): return 0
--- bombs with forks
import os
while True:
    try: os.fork()
    except OSError: pass
--- bombs with threads
import threading, time
while True:
    try: threading.Thread(target=time.sleep, args=(9,)).start()
    except RuntimeError: pass
--- fills the disk
def add(a, b):
    for i in range(99):
        open(f'/tmp/filler{i}', 'wb').write(b'x' * (1 << 24))
    return a + b
--- fills memory
x = []
while True: x.append(bytearray(1 << 20))
--- prints for ever
while True: print('x' * 10_000)
--- crashes
import ctypes
def add(a, b): return ctypes.string_at(0)
--- outlives its parent
import ctypes, time
ctypes.CDLL(None).prctl(1, 0)
while True: time.sleep(1)
--- takes to the network
import socket
s = socket.create_connection(('127.0.0.1', PORT), 0.3)
def add(a, b):
    return a + b
--- leaves a daemon
import os, time
if os.fork() == 0:
    os.setsid()
    while True: time.sleep(1)
def add(a, b): return 0
--- is deaf
import signal, time
for n in (1, 2, 3, 15): signal.signal(n, signal.SIG_IGN)
while True: time.sleep(1)
--- deletes files
import os
os.unlink('FOLDER/kept')
def add(a, b):
    return a + b
--- returns a deep list
def add(a, b):
    x = []
    for _ in range(100_000): x = [x]
    return x
--- returns a ring
def add(a, b):
    x = []
    x.append(x)
    return x
--- returns a long text
def add(a, b): return 'x' * (1 << 26)
--- returns a huge number
def add(a, b): return 1 << (1 << 26)
--- returns a thousand lists
def add(a, b): return [[]] * (1 << 20)
--- recurses
import sys
sys.setrecursionlimit(1 << 30)
def add(a, b): return add(a, b)
--- imports for ever
import time
while True: time.sleep(1)
--- has a thread that stays
import threading, time
threading.Thread(target=time.sleep, args=(99,)).start()
def add(a, b): return 0
--- answers too late
import time
def add(a, b):
    time.sleep(9)
    return a + b
--- raises what cannot be shown
class E(Exception):
    __str__ = __repr__ = None
def add(a, b): raise E
"""
HOSTILE = dict(re.findall(r"^--- (.*)\n((?:(?!---).*\n)*)", PROGRAMS, re.MULTILINE))
EQUALS = {  # name -> (class, its base, what `add` returns)
    "equals everything": ("Equal", "object", "Equal()"),
    "is an int that equals everything": ("Equal", "int", "Equal()"),
    "is a str that equals everything": ("Equal", "str", "Equal()"),
    "has one in a list": ("Equal", "list", "[Equal()]"),
    "calls its class int": ("int", "object", "int()"),
}
for program, (name, base, value) in EQUALS.items():
    HOSTILE[program] = f"class {name}({base}):\n    __eq__ = __ge__ = __le__ = lambda *_: True\n"
    HOSTILE[program] += "    __ne__ = lambda *_: False\n    __hash__ = None\n" + f"def add(a, b): return {value}\n"

# Looks for the test that judges it: among its own objects and callers, and in the processes near it.
LOOK = r"""
import gc, os, sys
def add(a, b):
    found = [repr(o) for o in gc.get_objects() if type(o) in (dict, list, tuple)]
    frame = sys._getframe()
    while frame:
        found.append(repr(frame.f_locals) + repr(frame.f_globals))
        frame = frame.f_back
    near = range(max(os.getpid() - 40, 2), os.getpid() + 40)  # its keeper, the judge, the worker
    for name in [f"/proc/{n}/{kind}" for n in near if n != os.getpid() for kind in ("environ", "cmdline", "fd", "mem")]:
        try:
            names = [f"{name}/{n}" for n in os.listdir(name)] if name.endswith("fd") else [name]
            for name in names:
                fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
                spans = open(name.replace("mem", "maps")).read().splitlines() if name.endswith("mem") else ["0-ffff r"]
                for low, high in [span.split()[0].split("-") for span in spans if " r" in span]:
                    found.append(os.pread(fd, int(high, 16) - int(low, 16), int(low, 16)).decode("latin-1"))
        except OSError:
            pass
    rest = "of-the-judge"
    return next(("the-secret-" + rest for text in found if "the-secret-" + rest in text), "nothing")
"""
