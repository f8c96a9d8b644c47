"""Throw-away processes for untrusted code: what a policy writes, and the tests that come with a dataset.

Each piece of code gets a process of its own: a fresh interpreter with the standard library, limits on CPU, memory and
files, no capabilities, and a system call filter (seccomp) under which it cannot start a process, signal or look into
another one, open a socket, or write to any file. With isolation "required" it also lives in namespaces of its own: no
network at all, no other process, and a read-only file system that holds Python's library and nothing else. A keeper,
the parent of that process, enforces the deadline with SIGKILL; both die with whoever started them.

Top: the parent side. Bottom: what runs inside. Two interpreters start for each answer, so imports are few. Standard
library only, Linux on x86-64 and ARM64; the only file that may call exec().
"""

import builtins
import ctypes
import errno
import json
import os
import re
import resource
import signal
import struct
import sys
import types
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from .codec import MAX_ANSWER_BYTES, Json, Printed, Proxy, respond

if TYPE_CHECKING:
    import subprocess

# Exit codes of a keeper, which the code inside cannot choose. Any other means that the keeper itself has failed.
ENDED = 121
CRASHED = 122
TIMED_OUT = 123
MAX_TASKS = 34  # keeper, process, and the 32 threads that concurrent.futures and asyncio start at most
# What a process calls this package, as a worker does (worker.py): its folder is not searched for modules.
PACKAGE = "_judges"
SCRIPT = f"""
import sys, types
package = sys.modules["{PACKAGE}"] = types.ModuleType("{PACKAGE}")
package.__path__ = [sys.argv[1]]
from {PACKAGE} import sandbox
sandbox.main(int(sys.argv[2]))
"""
LIBC = ctypes.CDLL(None, use_errno=True)

# Refused system calls, with their numbers on x86-64 and ARM64: those that start processes, reach others or gain
# privilege; whose memory no limit counts; that write. What needs capabilities is refused already.
REFUSED = """
fork 57 - vfork 58 - execve 59 221 execveat 322 281 kill 62 129 tkill 200 130 tgkill 234 131 rt_sigqueueinfo 129 138
rt_tgsigqueueinfo 297 240 pidfd_open 434 434 pidfd_getfd 438 438 pidfd_send_signal 424 424 prctl 157 167
setpriority 141 140 sched_setparam 142 118 sched_setscheduler 144 119 sched_setaffinity 203 122 sched_setattr 314 274
ioprio_set 251 30 ptrace 101 117 process_vm_readv 310 270 process_vm_writev 311 271 process_madvise 440 440
kcmp 312 272 migrate_pages 256 238 move_pages 279 239 unshare 272 97 setns 308 268 mount 165 40 umount2 166 39
chroot 161 51 bpf 321 280 perf_event_open 298 241 userfaultfd 323 282 add_key 248 217 request_key 249 218
keyctl 250 219 setuid 105 146 setreuid 113 145 setresuid 117 147 personality 135 92 io_uring_setup 425 425
io_uring_enter 426 426 io_uring_register 427 427 socket 41 198 bind 49 200 connect 42 203 memfd_create 319 279
memfd_secret 447 447 shmget 29 194 shmat 30 196 shmctl 31 195 msgget 68 186 msgsnd 69 189 msgrcv 70 188 msgctl 71 187
semget 64 190 semop 65 193 semctl 66 191 semtimedop 220 192 mq_open 240 180 mq_unlink 241 181 creat 85 - truncate 76 45
rename 82 - renameat 264 38 renameat2 316 276 mkdir 83 - mkdirat 258 34 rmdir 84 - link 86 - linkat 265 37 unlink 87 -
unlinkat 263 35 symlink 88 - symlinkat 266 36 mknod 133 - mknodat 259 33 chmod 90 - fchmod 91 52 fchmodat 268 53
fchmodat2 452 452 chown 92 - fchown 93 55 lchown 94 - fchownat 260 54 utime 132 - utimes 235 - futimesat 261 -
utimensat 280 88 setxattr 188 5 lsetxattr 189 6 fsetxattr 190 7 setxattrat 463 463 removexattr 197 14
lremovexattr 198 15 fremovexattr 199 16 removexattrat 466 466 fallocate 285 47 file_setattr 469 469
"""
UNKNOWN = "clone3 435 435 openat2 437 437"  # "no such call": the filter cannot read their arguments, libc has others
BITS, EQUAL = 0x45, 0x15  # BPF_JSET, BPF_JEQ
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
STREAMS = (1, 0x801, 0x80001, 0x80801)  # SOCK_STREAM, perhaps with SOCK_NONBLOCK and SOCK_CLOEXEC
QUESTIONS = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, .., FIONREAD, FIONBIO, FIO(N)CLEX
GUARDED = (  # by one argument: (call and numbers, which, comparison, values, refused if one holds, or unless one does)
    ("clone 56 220", 0, BITS, (0x10000,), False),  # CLONE_THREAD: threads are fine
    ("prlimit64 302 261", 0, EQUAL, (0,), False),  # one's own
    ("open 2 -", 1, BITS, (WRITING,), True),
    ("openat 257 56", 2, BITS, (WRITING,), True),
    ("fcntl 72 25", 1, EQUAL, (8, 10, 15, 1024), True),  # F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE: reach others
    ("ioctl 16 29", 1, EQUAL, QUESTIONS, False),  # what Python asks of any file; others signal, or change a file
    ("socketpair 53 199", 0, EQUAL, (1,), False),  # AF_UNIX
    ("socketpair 53 199", 1, EQUAL, STREAMS, False),  # asyncio has one; the kernel lets a datagram's reach any other
    ("sendto 44 206", 5, EQUAL, (0,), False),  # without an address, whose length this is
)
# Options of prctl(2).
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of numbers, AUDIT_ARCH_*


class Limits(NamedTuple):
    """Limits of one process: wall seconds, address space, and "required" or "none", as in env.code.isolation."""

    seconds: float
    memory_mib: int = 1024
    isolation: str = "required"


class Unavailable(OSError):
    """This machine cannot make such a process; the text says which call it refused."""


def start(
    mode: str,
    limits: Limits,
    *,
    stdin: BinaryIO | int | None = None,
    stdout: BinaryIO | int | None = None,
    fds: Sequence[int] = (),
    **job: Json,
) -> "subprocess.Popen[bytes]":
    """The keeper of a new process that runs `mode` (a key of MODES) with the arguments `job`.

    stdin, stdout: files or descriptors; None = empty, and a pipe. fds: other descriptors that the process inherits.
    """
    import subprocess  # 15 ms, which the processes themselves need not spend

    order = {"mode": mode, "parent": os.getpid(), "limits": limits._asdict(), "job": job}
    with memory_file(json.dumps(order).encode()) as file:
        flags = ("-I", "-S", "-B", "-X", "utf8")  # no environment, no site-packages, no .pyc written
        folder = os.path.dirname(os.path.abspath(__file__))
        return subprocess.Popen(
            [sys.executable, *flags, "-c", SCRIPT, folder, str(file.fileno())],
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=subprocess.PIPE if stdout is None else stdout,
            stderr=subprocess.DEVNULL,
            env={"MALLOC_ARENA_MAX": "1"},  # or each thread takes 64 MiB of its address space
            cwd="/",
            pass_fds=(file.fileno(), *fds),
        )


def end(keeper: "subprocess.Popen[bytes]") -> int:
    """Ends the process if it still runs; returns the exit code of its keeper."""
    import subprocess

    keeper.terminate()
    try:
        return keeper.wait(5)
    except subprocess.TimeoutExpired:  # SIGTERM came before the keeper could wait for it
        keeper.kill()
        return keeper.wait()


def run(code: str, text: str, limits: Limits, others: Sequence[str] = ()) -> tuple[int, str]:
    """Runs a program with `text` on stdin: (ENDED | CRASHED | TIMED_OUT, its output). Unavailable if a keeper failed.
    If `code` is not Python, it runs the first of `others` that is.

    Output beyond MAX_ANSWER_BYTES is a crash. Trust only the output: a program chooses how it exits.
    """
    with memory_file(text.encode("utf-8", "replace")) as stdin:
        keeper = start("program", limits, stdin=stdin, code=code, others=others)
    with keeper.stdout:
        output = keeper.stdout.read(MAX_ANSWER_BYTES + 1)
        if len(output) <= MAX_ANSWER_BYTES:
            keeper.wait()
        exited = end(keeper)
    if len(output) > MAX_ANSWER_BYTES:
        exited = CRASHED
    text = output.decode("utf-8", "replace")
    check_keeper(exited, text)
    return exited, text


def check_keeper(exited: int, text: str = "") -> None:
    """Unavailable if a keeper with this exit code has failed; `text` is what it wrote."""
    if exited not in (ENDED, CRASHED, TIMED_OUT, -signal.SIGTERM):  # SIGTERM: `end` came before it could wait for one
        raise Unavailable(text[:1000] or f"the sandbox's supervisor process failed: exit code {exited}")


def memory_file(data: bytes) -> BinaryIO:
    file = os.fdopen(os.memfd_create("sandbox"), "w+b")
    file.write(data)
    file.seek(0)
    return file


# ---------------------------------------------------------------------------------------- inside, as a script


def main(descriptor: int) -> None:
    """The keeper: starts the process, waits for its end, its deadline or a SIGTERM, and kills it."""
    with os.fdopen(descriptor, "rb") as file:
        order = json.load(file)
    limits = Limits(**order["limits"])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    try:
        leave_roots_count()
        if limits.isolation == "required":
            enter_namespaces()
        libc("prctl", PR_SET_DUMPABLE, 0)  # no process can look into this one, nor into its child
        libc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != order["parent"]:
            raise OSError("the parent ended before PDEATHSIG was set")
        status_out, status_in = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(status_out)
            confine(limits)
            os.write(status_in, b"ready")  # fails if the keeper is gone: PDEATHSIG came too late for that
    except OSError as error:
        os.write(1, str(error).encode())
        os._exit(1)
    os.close(status_in)
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, signal.SIGTERM})
        sys.argv = ["program"]
        sys.set_int_max_str_digits(0)  # the deadline bounds what long integers cost
        return MODES[order["mode"]](**order["job"])
    if os.read(status_out, 5) != b"ready":
        os._exit(1)  # the child has written why
    ended = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, limits.seconds)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    os._exit(TIMED_OUT if ended is None else ENDED if status == 0 else CRASHED)


def libc(name: str, *args: int | bytes | None) -> None:
    """A call of the C library; OSError if it gives -1."""
    if getattr(LIBC, name)(*(ctypes.c_long(a) if isinstance(a, int) else a for a in args)) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def leave_roots_count() -> None:
    """Makes the real user, by whom RLIMIT_NPROC counts, one that has nothing else: of root's it counts none.

    Files, signals and namespaces go by the effective user, which stays. Others than root get a count of their own with
    their user namespace (Linux 5.14). Without that all that they run counts, so that no thread can start.
    """
    try:
        if os.geteuid() == 0:
            libc("setresuid", 0x70000000 | int.from_bytes(os.urandom(3), "little"), -1, -1)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a container's root, which is another user outside
            raise


def enter_namespaces(readable: Sequence[str] = ()) -> None:
    """Enters new user, mount, process, network and IPC namespaces, whose root holds Python's library, read-only.
    readable: what an agent sees besides, if it exists. An agent keeps the network, and may write to /tmp."""
    library = os.path.dirname(os.path.dirname(os.__file__))
    shown = {library, "/lib", "/lib64", "/usr/lib", "/usr/lib64", *readable}
    shown = sorted(path for path in shown if os.path.exists(path))
    sources = [os.path.realpath(path) for path in shown]
    user = os.geteuid()
    group = os.getegid()
    network = 0 if readable else 0x40000000
    libc("unshare", 0x10000000 | 0x20000 | 0x20000000 | network | 0x08000000)  # CLONE_NEW USER, NS, PID, NET, IPC
    for name, text in (("setgroups", "deny"), ("uid_map", f"65534 {user} 1"), ("gid_map", f"65534 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    nosuid_nodev = 2 | 4  # MS_NOSUID, MS_NODEV
    rebind = 32 | 4096  # MS_REMOUNT, MS_BIND
    recursive = 16384  # MS_REC
    libc("mount", None, b"/", None, recursive | 1 << 18, None)  # MS_PRIVATE
    num_bytes = os.fstat(0).st_size  # of a program's input, which is a file
    libc("mount", b"tmpfs", b"/tmp", b"tmpfs", nosuid_nodev, b"size=%d,mode=755" % (num_bytes + (64 << 10)))
    os.chdir("/tmp")
    os.mkdir("old")
    libc("pivot_root", b".", b"old")
    if readable:
        os.mkdir("/tmp")
        libc("mount", b"tmpfs", b"/tmp", b"tmpfs", nosuid_nodev, b"size=256m")
    for path, source in zip(shown, sources, strict=True):
        is_folder = os.path.isdir("/old" + source)
        os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
        if not is_folder:
            os.close(os.open(path, os.O_CREAT))
        libc("mount", os.fsencode("/old" + source), os.fsencode(path), None, 4096 | recursive, None)
        # The kernel refuses to drop flags that the mount has: nosuid, nodev, noexec, noatime, nodiratime, relatime.
        flags = os.statvfs(path).f_flag
        kept = flags & (2 | 4 | 8 | 1024 | 2048)
        if flags & 4096:  # relatime, which mount(2) calls 1 << 21
            kept |= 1 << 21
        libc("mount", None, os.fsencode(path), None, rebind | kept | 1, None)  # MS_RDONLY
    libc("umount2", b"/old", 2)  # MNT_DETACH
    os.rmdir("/old")
    os.makedirs("/dev", exist_ok=True)
    with open("/dev/stdin", "wb") as file:
        if num_bytes:
            os.sendfile(file.fileno(), 0, 0, num_bytes)
    libc("mount", None, b"/", None, rebind | nosuid_nodev | 1, None)


def confine(limits: Limits) -> None:
    """Sets what the code cannot undo: limits, no capabilities, death with the parent, the system call filter."""
    os.chdir("/")
    rlimits = {
        resource.RLIMIT_AS: limits.memory_mib << 20,
        resource.RLIMIT_CPU: int(limits.seconds) + 2,  # ends the process if the keeper is killed and PDEATHSIG fails
        resource.RLIMIT_NPROC: MAX_TASKS,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
    }
    for which, value in rlimits.items():
        _, hard = resource.getrlimit(which)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(which, (value, value))
    libc("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    libc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    libc("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    lines = call_filter(os.uname().machine)
    program = b"".join(struct.pack("HBBI", *line) for line in lines)
    buffer = ctypes.create_string_buffer(program, len(program))
    filter_program = struct.pack("HP", len(lines), ctypes.addressof(buffer))
    libc("prctl", PR_SET_SECCOMP, 2, filter_program)  # 2: a filter


def call_filter(machine: str) -> list[tuple[int, int, int, int]]:
    """The BPF program (code, jump if true, jump if false, value) that REFUSED, UNKNOWN and GUARDED make."""
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"no system call filter for {machine}")
    column, architecture = MACHINES[machine]

    def numbers(text: str) -> list[int]:
        pairs = re.findall(r"\w+ (\d+|-) (\d+|-)", text)
        return [int(pair[column]) for pair in pairs if pair[column] != "-"]

    load = 0x20  # BPF_LD
    jump = 0x05  # BPF_JA
    leave = 0x06  # BPF_RET
    at_least = 0x35  # BPF_JGE
    allow = (leave, 0, 0, 0x7FFF0000)  # SECCOMP_RET_ALLOW
    refuse = (leave, 0, 0, 0x50000 | errno.EPERM)  # SECCOMP_RET_ERRNO
    unknown = (leave, 0, 0, 0x50000 | errno.ENOSYS)
    kill = (leave, 0, 0, 1 << 31)  # SECCOMP_RET_KILL_PROCESS
    load_number = (load, 0, 0, 0)
    load_architecture = (load, 0, 0, 4)
    program = [load_architecture, (EQUAL, 1, 0, architecture), kill, load_number]
    program += [(at_least, 0, 1, 0x40000000), refuse]  # x86-64's second set of numbers
    for number in numbers(REFUSED):
        program += [(EQUAL, 0, 1, number), refuse]
    for number in numbers(UNKNOWN):
        program += [(EQUAL, 0, 1, number), unknown]
    for text, argument, comparison, values, refused in GUARDED:
        body = [(load, 0, 0, 16 + 8 * argument)]
        for place, value in enumerate(values):
            num_skipped = len(values) - place  # the comparisons that are left, and the line after them
            body.append((comparison, num_skipped, 0, value))
        if refused:
            body.append((jump, 0, 0, 1))  # none holds: past the refusal
        body += [refuse, load_number]
        for number in numbers(text):
            program += [(EQUAL, 0, len(body), number), *body]
    return [*program, allow]


def load(codes: Sequence[str], name: str, names: dict | None = None) -> dict:
    """Runs the first of `codes` that is Python as the module `name`, or within `names` of another; returns the names
    that it leaves."""
    if names is None:
        module = sys.modules[name] = types.ModuleType(name)
        names = module.__dict__
    builtins.exit = builtins.quit = sys.exit  # as without -S
    exec(first_python(codes, f"<{name}>"), names)
    return names


def first_python(codes: Sequence[str], file: str) -> types.CodeType:
    for code in codes[:-1]:
        with suppress(SyntaxError, ValueError):  # ValueError: it holds what no file can
            return compile(code, file, "exec")
    return compile(codes[-1], file, "exec")


def take_over(descriptor: int) -> int:
    """A copy of the descriptor, so that the code finds only stderr in its place."""
    copy = os.dup(descriptor)
    os.dup2(2, descriptor)
    return copy


def serve(codes: Sequence[str], name: str) -> None:
    """Answers the calls that `Proxy` sends, with the code's function `name`, or LeetCode's form of it: the method of a
    class Solution, on a new object for each call. What the code prints before the first call is lost."""
    requests = os.fdopen(take_over(0), "rb")
    responses = os.fdopen(take_over(1), "w")
    sys.stdout = printed = Printed()
    names = load(codes, "candidate")
    if name in names:
        function = names[name]
    else:
        solution = names["Solution"]

        def function(*args: object, **kwargs: object) -> object:
            return getattr(solution(), name)(*args, **kwargs)

    for line in requests:
        responses.write(json.dumps(respond(function, json.loads(line), printed)) + "\n")
        responses.flush()


def judge(prompt: str, test: str, entry_point: str, requests: int, responses: int) -> None:
    """Runs test code of a dataset on the candidate, then writes the outcome.

    "ok": the test called the candidate, each answer was a value or an exception, and the test, with the function
    check(candidate) if it defines one, came to its end, or left with exit code 0. "error": it called nothing, or with
    what cannot cross.
    """
    result = take_over(1)
    candidate = Proxy(requests, responses)
    os.write(result, b"ready\n")
    try:
        names = load([prompt], "tests")
        names |= {entry_point: candidate, "__name__": "__main__"}
        sys.modules["__main__"] = sys.modules["tests"]  # where unittest.main() looks for tests
        if "unittest" in test:  # whose runners, and main(exit=False), only print that a test failed
            from unittest import TestResult

            succeeded = TestResult.wasSuccessful
            TestResult.wasSuccessful = lambda result: succeeded(result) or bool(setattr(candidate, "lost", True))
        load([test], "tests", names)
        if names.get("check", candidate) is not candidate:
            names["check"](candidate)
        passed = True
    except BaseException as error:  # a test may raise anything; unittest.main() ends so, and the candidate with Left
        passed = type(error) is SystemExit and error.code in (None, 0)
    outcome = "ok" if passed and not candidate.lost else "wrong"
    if candidate.unsendable or not candidate.calls:
        outcome = "error"
    os.write(result, f"{outcome}\n".encode())


MODES = {"program": lambda code, others=(): load([code, *others], "__main__"), "serve": serve, "judge": judge}
