"""Processes for code that nobody trusts: what it may and may not, in namespaces and without."""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from code_jobs import children

from judges import sandbox
from judges.sandbox import CRASHED, ENDED, TIMED_OUT, Limits, run

HEADERS = (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm-generic/unistd.h"))


@pytest.fixture(scope="module", params=["required", "none"])
def limits(request):
    found = Limits(seconds=10, memory_mib=256, isolation=request.param)
    try:
        run("", "", found)
    except sandbox.Unavailable as error:
        pytest.skip(f"this machine has no isolation={request.param}: {error}")
    return found


def test_a_program_gets_its_input_and_its_output_comes_back(limits):
    program = "import sys\nfor line in sys.stdin: print(line.upper(), end='')\nprint('höh', __name__)"
    assert run(program, "a\nb\n", limits) == (ENDED, "A\nB\nhöh __main__\n")
    in_a_thread = "import threading\nthreading.Thread(target=lambda: print(input() * 2)).start()"
    assert run(in_a_thread, "x", limits) == (ENDED, "xx\n")
    assert run("print(1)\nexit()", "", limits) == (ENDED, "1\n")
    assert run("import asyncio\nasync def f(): print(1)\nasyncio.run(f())", "", limits) == (ENDED, "1\n")
    assert run(STREAMS, "", limits) == (ENDED, "1000000 False 3\n")
    files = "print(open('/dev/stdin').read(), input(), [line for line in open('/dev/stdin')])"
    assert run(files, "é\nb", limits) == (ENDED, "é\nb é ['é\\n', 'b']\n")
    assert run("print(len(str(int(input()) + 1)))", "9" * 20_000, limits) == (ENDED, "20001\n")
    assert run("no Python", "", limits, ["x =", "print(1)", "print(2)"]) == (ENDED, "1\n")
    long = "x" * 300_000  # more than a pipe takes at once
    assert run("print(input(), end='')", long, limits) == (ENDED, long)


STREAMS = """
import array, asyncio, fcntl, socket, sys
async def f():
    one, other = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=one)
    reader, _ = await asyncio.open_connection(sock=other)
    writer.write(b"x" * 1_000_000)
    writer.write_eof()
    print(len(await reader.read()), sys.stdout.isatty(), end=" ")
asyncio.run(f())
one, other = socket.socketpair()
one.send(b"abc")
waiting = array.array("i", [0])
fcntl.ioctl(other, 0x541B, waiting)  # FIONREAD
print(waiting[0])
"""


@pytest.mark.parametrize(
    ("program", "output"),
    [
        ("print(1)\n1/0", "1\n"),
        ("print(1)\nraise SystemExit(3)", "1\n"),
        ("import os\nprint(1, flush=True)\nos.abort()", "1\n"),
        ("def f(: pass", ""),
        ("x = bytearray(1 << 28)", ""),
        ("print('x' * (5 << 20))", "x" * (sandbox.MAX_ANSWER_BYTES + 1)),
        ("import os\nos._exit(124)", ""),  # which is the keeper's word for a deadline
        ("import os\nos._exit(125)", ""),
    ],
)
def test_a_program_that_fails_is_a_crash(limits, program, output):
    assert run(program, "", limits) == (CRASHED, output)


DEAF = "import signal, threading, time\nfor n in (1, 2, 3, 15, 17, 24): signal.signal(n, signal.SIG_IGN)\n"


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time\ntime.sleep(1000)",
        DEAF + "threading.Thread(target=time.sleep, args=(1000,)).start()",
        DEAF + "import os\nos.closerange(0, 64)\nwhile True: time.sleep(1)",
        DEAF + "import os\nos.setsid()\nwhile True: time.sleep(1)",
    ],
)
def test_a_deadline_holds(limits, program):
    before = children()
    assert run(program, "", limits._replace(seconds=0.3))[0] == TIMED_OUT
    assert children() == before


FORBIDDEN = {  # each prints what it got hold of; PARENT is its keeper, or itself where that cannot be named
    "fork": "print(os.fork())",
    "fork by number": "print(libc.syscall(57 if os.uname().machine == 'x86_64' else -1) + 1 or 1/0)",
    "start": "print(subprocess.run([sys.executable, '-c', '']))",
    "exec": "os.execv(sys.executable, [sys.executable, '-c', 'print(1)'])",
    "socket": "print(socket.socket(socket.AF_UNIX))",
    "datagrams": "print(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))",
    "packets": "print(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC))",
    "another family": "print(libc.socketpair(30, 1, 0, (ctypes.c_int * 2)()) + 1 or 1/0)",
    "bind": "print(socket.socketpair()[0].bind('FOLDER/new'))",
    "bind to no file": "print(socket.socketpair()[0].bind('\\0new'))",
    "connect": "refused(lambda: socket.socketpair()[0].connect('FOLDER/kept'))",
    "send to an address": "refused(lambda: socket.socketpair()[0].sendto(b'x', 'FOLDER/kept'))",
    "send a message to one": "print(socket.socketpair()[0].sendmsg([b'x'], [], 0, 'FOLDER/kept'))",
    "change a file's flags": "refused(lambda: fcntl.ioctl(os.open(os.__file__, 0), 0x40086602, bytes(8)))",
    "change a file's project": "refused(lambda: fcntl.ioctl(os.open('/', 0), 0x401C5820, bytes(28)))",
    "make a volume": "refused(lambda: fcntl.ioctl(os.open('/', 0), 0x5000940E, bytes(4096)))",
    "own a file's signals": "refused(lambda: fcntl.ioctl(socket.socketpair()[0], 0x8901, bytes(4)))",
    "lease a file": "refused(lambda: fcntl.fcntl(os.open(os.__file__, 0), 1024, 0))",
    "end a queue": "print(libc.mq_unlink(b'/x') + 1 or refuse())",
    "kill": "print(os.kill(PARENT, 0))",
    "signal by descriptor": "r, w = os.pipe()\nprint(fcntl.fcntl(r, 10, 9), fcntl.fcntl(r, fcntl.F_SETOWN, PARENT))",
    "limit another": "print(resource.prlimit(PARENT + 1, resource.RLIMIT_CORE, (0, 0)))",
    "outlive the keeper": "print(libc.prctl(1, 0) + 1 or 1/0)",
    "another's memory": "print(open(f'/proc/{os.getppid()}/mem', 'rb'))",
    "another's descriptors": "print(os.open(f'/proc/{os.getppid()}/fd/1', os.O_RDONLY))",
    "trace": "print(libc.ptrace(16, PARENT, 0, 0) + 1 or 1/0)",
    "create": "print(open('FOLDER/new', 'w'))",
    "append": "print(open('FOLDER/kept', 'a'))",
    "delete": "print(os.unlink('FOLDER/kept'))",
    "rename": "print(os.rename('FOLDER/kept', 'FOLDER/new'))",
    "change mode": "print(os.chmod('FOLDER', 0o700))",
    "spoil python": "print(open(os.__file__, 'r+'))",
    "uncounted memory": "print(os.memfd_create('x'))",
    "more memory as a file": "print(os.write(0, b'x'))",
    "own namespaces": "print(libc.unshare(0x10000000) + 1 or 1/0)",
    "another user": "print(os.setuid(1 if os.getuid() == 0 else 0))",
    "more memory": "print(resource.setrlimit(resource.RLIMIT_AS, (-1, -1)))",
}


REFUSED = """
libc = ctypes.CDLL(None, use_errno=True)
def refuse(): return ctypes.get_errno() in (1, 13) and 1 / 0
def refused(call):
    try: print(call())
    except PermissionError: raise
    except OSError as error: print(error)
"""


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_is_forbidden_fails(limits, tmp_path, name):
    (tmp_path / "kept").write_text("kept")
    body = FORBIDDEN[name].replace("FOLDER", str(tmp_path)).replace("PARENT", "(os.getppid() or 1)")
    program = "import ctypes, fcntl, os, resource, socket, subprocess, sys\nlibc = ctypes.CDLL(None)\nprint('here')\n"
    assert run(program + REFUSED + body, "", limits) == (CRASHED, "here\n")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and (tmp_path / "kept").read_text() == "kept"


def test_isolated_code_sees_python_and_nothing_else(limits, tmp_path):
    if limits.isolation == "none":
        pytest.skip("it sees what its user sees, as README.md says")
    program = f"""
import os, ssl, sqlite3
def is_open(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False
print(os.getpid(), os.getuid(), "PATH" in os.environ, [number for number in range(64) if is_open(number)])
print([os.path.exists(path) for path in {[str(tmp_path), sandbox.__file__, "/etc", "/proc", "/old"]}])
print(os.listdir("/dev"))
"""
    assert run(program, "", limits) == (ENDED, f"1 65534 False [0, 1, 2]\n{[False] * 5}\n['stdin']\n")


def test_unavailable_says_what_the_machine_refused(limits, monkeypatch, tmp_path):
    """The script with one thing in it that no kernel does."""
    refused = {"required": ('"unshare", 0x', '"unshare", 1 + 0x', "unshare: Invalid argument")}.get(
        limits.isolation, ('"prctl", PR_SET_SECCOMP, 2', '"prctl", PR_SET_SECCOMP, 9', "prctl: Invalid argument")
    )
    text = Path(sandbox.__file__).read_text(encoding="utf-8")
    assert text.count(refused[0]) == 1
    shutil.copytree(Path(sandbox.__file__).parent, tmp_path / "graders")
    (tmp_path / "graders" / "sandbox.py").write_text(text.replace(*refused[:2]), encoding="utf-8")
    monkeypatch.setattr(sandbox, "__file__", str(tmp_path / "graders" / "sandbox.py"))
    with pytest.raises(sandbox.Unavailable, match=refused[2]):
        run("print(1)", "", limits)


def test_what_runs_dies_with_who_started_it(limits):
    before = children()
    starter = (
        f"import sys, time\nsys.path.insert(0, {str(Path(sandbox.__file__).parents[1])!r})\n"
        "from judges import sandbox\n"
        f"sandbox.start('program', sandbox.Limits(*{tuple(limits._replace(seconds=1000))!r}), stdout=1, "
        "code='print(1, flush=True)\\nwhile True: pass')\ntime.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"1\n"
        started = children() - before - {str(process.pid)}
        assert len(started) == 2  # keeper and program
        process.kill()
    end = time.monotonic() + 10
    while any(map(runs, started)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(map(runs, started))


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(("machine", "header"), [("x86_64", HEADERS[0]), ("aarch64", HEADERS[1])])
def test_numbers_of_system_calls_are_the_kernels(machine, header):
    if not header.exists():
        pytest.skip(f"{header} is not there")
    text, column = header.read_text(), sandbox.MACHINES[machine][0]
    kernels = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text))
    listed = " ".join([sandbox.REFUSED, sandbox.UNKNOWN, *(rule[0] for rule in sandbox.GUARDED)])
    found = {row[0]: row[column + 1] for row in re.findall(r"(\w+) (\d+|-) (\d+|-)", listed)}
    newer = {"fchmodat2", "setxattrat", "removexattrat", "file_setattr"} - kernels.keys()  # than these headers
    assert len(found) > 80
    assert {name: kernels.get(name, "-") for name in found if name not in newer} == {
        name: number for name, number in found.items() if name not in newer
    }
