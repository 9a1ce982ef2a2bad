"""Untrusted code in killable processes: verifiers written by users, generated programs, and patterns that may never
end.

A worker is a child process in its own process group, with limits on memory, file size and open files, an empty
environment, a temporary directory that is all it can write to, and no network. It dies with its parent. What it must
not do is refused three times over, so that each is a net under the others: by the kernel's system-call filter (no new
processes, sockets, signals to or memory of others, privileges: :func:`forbid_calls`), by its file rules (Landlock:
Python's own files to read, nothing else: :func:`forbid_files`) and by the interpreter's audit hook
(:func:`forbid_events`), which is alone where a kernel has neither. A job that exceeds its wall time is killed and costs
its own time-out only: the next job gets a new worker. Every job ends as a value or as an error with a reason.

A ``tested`` program and the test that judges it run in two workers (:mod:`stages.running.tested`). Only a test that
needs the program's interpreter, because it patches it or reads its output, shares it, as in every harness of asserts:
there a program written to cheat can. Tests of input and output cannot be cheated; prefer them to such tests.
"""

from __future__ import annotations

import atexit
import inspect
import json
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from stages.running import tested

_START_S = 60.0  # a loaded machine may need this long to start an interpreter
LONGEST_S = 600.0  # a job may ask for no more wall time
_ON_THE_WAY_S = 0.01  # of a question that a test asks a program in another process, on a machine that is busy
IMPORTS = re.compile(r"^[ \t]*(?:import|from)[ \t]", re.MULTILINE)
# what its children run of stages.running.tested
_CHILDREN = inspect.getsource(tested).partition("# ---")[2].partition("\n")[2]


def end_with_parent() -> None:
    """Have the kernel end this process when its parent ends."""
    import ctypes
    import signal

    try:
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
    except Exception:
        pass


def no_network(said: str) -> None:
    """Leave the network (a namespace of its own where the kernel allows it), and have everything that opens a socket
    raise OSError(said).
    """
    import ctypes
    import socket

    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(0x40000000) != 0:
            libc.unshare(0x10000000 | 0x40000000)
    except Exception:
        pass

    def refuse(*args, **kwargs):
        raise OSError(said)

    class Refused(socket.socket):  # a class, because modules such as ssl and asyncio derive theirs from it
        def __new__(cls, *args, **kwargs):
            refuse()

    socket.socket = Refused
    for name in ("create_connection", "socketpair", "fromfd", "create_server"):
        setattr(socket, name, refuse)


def limit_resources(memory: int) -> None:
    """At most ``memory`` bytes of address space, files of 16 MiB, 64 open files, no core dump."""
    import resource

    for what, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 16 << 20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (value, value))


def refused_calls() -> list[tuple[int, int | None]]:
    """(number on x86-64, number on arm64 or None) of the system calls that :func:`forbid_calls` refuses whatever their
    arguments.
    """
    themes = {
        "new processes and programs": "fork 57 -, vfork 58 -, execve 59 221, execveat 322 281",
        "sockets": "socket 41 198, connect 42 203, socketpair 53 199, bind 49 200, accept 43 202, accept4 288 242",
        "other processes: their memory, descriptors, signals": (
            "ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272, "
            "pidfd_open 434 434, pidfd_getfd 438 438, pidfd_send_signal 424 424, tkill 200 130, "
            "rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240"
        ),
        "sessions, priorities, limits": (
            "setsid 112 157, setpgid 109 154, setpriority 141 140, ioprio_set 251 30, setrlimit 160 164"
        ),
        "memory and messages shared with others": (
            "shmget 29 194, semget 64 190, msgget 68 186, mq_open 240 180, userfaultfd 323 282"
        ),
        "owners, modes, times and attributes of files": (
            "chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, chmod 90 -, fchmod 91 52, "
            "fchmodat 268 53, fchmodat2 452 452, mknod 133 -, mknodat 259 33, utime 132 -, utimes 235 -, "
            "futimesat 261 -, utimensat 280 88, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, "
            "removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, open_by_handle_at 304 265"
        ),
        "mounts and namespaces": (
            "mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, move_mount 429 429, "
            "open_tree 428 428, fsopen 430 430, fsconfig 431 431, fsmount 432 432, mount_setattr 442 442, "
            "unshare 272 97, setns 308 268"
        ),
        "keys, programs in the kernel, io_uring": (
            "add_key 248 217, request_key 249 218, keyctl 250 219, bpf 321 280, perf_event_open 298 241, "
            "io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427"
        ),
        "the machine: modules, swap, clocks, names, accounts": (
            "init_module 175 105, finit_module 313 273, delete_module 176 106, kexec_load 246 104, "
            "kexec_file_load 320 294, reboot 169 142, swapon 167 224, swapoff 168 225, settimeofday 164 170, "
            "clock_settime 227 112, clock_adjtime 305 266, adjtimex 159 171, sethostname 170 161, "
            "setdomainname 171 162, acct 163 89"
        ),
    }
    calls = [call.split() for theme in themes.values() for call in theme.split(", ")]
    return [(int(x86), None if arm == "-" else int(arm)) for _, x86, arm in calls]


def forbid_calls() -> bool:
    """Have the kernel refuse what no verifier and no program under test needs, with EPERM, for good; whether it could
    (Linux on x86-64 or arm64).

    Refused: new processes and programs (threads are fine), sockets, signals to and memory, limits or schedules of other
    processes, changes of owners and modes, mounts, namespaces, keys, modules, io_uring. Signals to itself pass.
    """
    import ctypes
    import os
    import platform
    import struct

    x86 = platform.machine() in ("x86_64", "AMD64")
    if platform.system() != "Linux" or not (x86 or platform.machine() == "aarch64") or struct.calcsize("P") != 8:
        return False
    # kill, tgkill, prlimit64, sched_setaffinity, sched_setscheduler, sched_setparam, sched_setattr: the first argument
    # may be this process; 0 too, but for signals
    own = ((62, 129), (234, 131), (302, 261), (203, 122), (144, 119), (142, 118), (314, 274))
    me, which = os.getpid(), 0 if x86 else 1
    code = []

    def put(op, value, yes=0, no=0):
        code.append(struct.pack("=HBBI", op, yes, no, value))

    load, equal, answer = 0x20, 0x15, 0x06
    refuse, allow, missing = 0x00050000 | 1, 0x7FFF0000, 0x00050000 | 38
    put(load, 4)  # architecture
    put(equal, 0xC000003E if x86 else 0xC00000B7, 1, 0)
    put(answer, refuse)
    put(load, 0)  # system call
    if x86:
        put(0x35, 0x40000000, 0, 1)  # the x32 interface has numbers of its own
        put(answer, refuse)
    put(equal, 435, 0, 1)  # clone3 passes a pointer, which cannot be looked into: the C library then uses clone
    put(answer, missing)
    put(equal, (56, 220)[which], 0, 4)
    put(load, 16)
    put(0x45, 0x10000, 1, 0)  # CLONE_THREAD
    put(answer, refuse)
    put(answer, allow)
    for number in sorted(n[which] for n in refused_calls() if n[which] is not None):
        put(equal, number, 0, 1)
        put(answer, refuse)
    for pair in own:
        put(equal, pair[which], 0, 5)
        put(load, 16)
        put(equal, me, 2, 0)
        put(equal, 0 if pair[0] not in (62, 234) else me, 1, 0)
        put(answer, refuse)
        put(answer, allow)
    put(answer, allow)

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)
    return libc.prctl(22, 2, ctypes.byref(Program(len(code), b"".join(code))), 0, 0) == 0


def readable() -> list[str]:
    """Folders that hold Python, its packages, the libraries they load and time zones."""
    import sys
    import sysconfig

    found = {
        sys.prefix,
        sys.base_prefix,
        sys.exec_prefix,
        sys.base_exec_prefix,
        *(p for p in sys.path if p),
        *sysconfig.get_paths().values(),
    }
    return [
        *sorted(found - {"/", "/usr"}),
        "/usr/lib",
        "/usr/lib64",
        "/usr/local/lib",
        "/lib",
        "/lib64",
        "/etc/ld.so.cache",
        "/etc/localtime",
        "/usr/share/zoneinfo",
        "/dev/null",
        "/dev/zero",
        "/dev/urandom",
        "/dev/random",
    ]


def forbid_files(own: str, more: list[str]) -> bool:
    """Have the kernel (Landlock, Linux 5.13) refuse every file outside :func:`readable`, ``more`` and ``own``, the one
    folder that can be written; whether it could.
    """
    import ctypes
    import os
    import struct
    import sys

    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    abi = libc.syscall(444, None, ctypes.c_size_t(0), 1)
    if abi < 1:
        return False
    every = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    attributes = struct.pack("=QQQ", every, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)[
        : 24 if abi >= 6 else 16 if abi >= 4 else 8
    ]
    rules = libc.syscall(444, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        return False
    for path, rights in [(p, 1 | 4 | 8) for p in [*readable(), *more]] + [("/dev/null", 2 | 4), (own, every & ~1)]:
        try:
            opened = os.open(path, getattr(os, "O_PATH", 0) | os.O_CLOEXEC)
        except OSError:
            continue
        if not os.path.isdir(path):
            rights &= 1 | 2 | 4
        libc.syscall(445, rules, 1, struct.pack("=Qi", rights & every, opened), 0)
        os.close(opened)
    libc.prctl(38, 1, 0, 0, 0)
    done = libc.syscall(446, rules, 0) == 0
    os.close(rules)
    return done


def forbid_events(own: str, more: list[str], native: bool) -> None:
    """Have the interpreter refuse, for good: processes, sockets, signals to others, files outside :func:`readable`,
    ``more`` and ``own``; ``native``: also ctypes.
    """
    import os
    import sys

    folders, me, own = [os.path.realpath(p) for p in [*readable(), *more]], os.getpid(), os.path.realpath(own)
    starts = (
        *(("ctypes.",) if native else ()),
        "socket.",
        "subprocess.",
        "os.fork",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "os.startfile",
        "pty.",
        "os.setxattr",
        "os.chmod",
        "os.chown",
        "os.lchown",
        "os.chflags",
        "os.link",
        "os.symlink",
    )
    paths = (
        "os.listdir",
        "os.scandir",
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.mkdir",
        "os.truncate",
        "os.utime",
        "os.chdir",
        "os.walk",
        "os.mkfifo",
        "shutil.rmtree",
    )
    real, inside = os.path.realpath, str.startswith

    def allowed(path, write):
        if isinstance(path, int) or path is None:
            return True
        path = real(os.fsdecode(path))
        return (
            path in (own, "/dev/null")
            or inside(path, own + "/")
            or not write
            and any(path == f or inside(path, f + "/") for f in folders)
        )

    busy = []

    def hook(event, args):
        if busy:
            return
        if event == "os.kill" or event == "os.killpg":
            if args[0] != me or event == "os.killpg":
                raise PermissionError("the sandbox refuses signals to other processes")
        elif inside(event, starts):
            raise PermissionError("the sandbox refuses " + event)
        elif event == "open" or event in paths:
            write = event != "open" and event not in ("os.listdir", "os.scandir", "os.chdir", "os.walk")
            if event == "open":
                mode, flags = args[1], args[2]
                write = (
                    isinstance(flags, int)
                    and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
                    or isinstance(mode, str)
                    and any(c in mode for c in "wax+")
                )
            busy.append(1)
            try:
                fine = all(allowed(a, write) for a in (args[:2] if event == "os.rename" else args[:1]))
            finally:
                busy.pop()
            if not fine:
                raise PermissionError(
                    "the sandbox refuses %s %r: it may read Python's own files, those that a reward names in"
                    " files=[...], and write into its working directory" % ("writing" if write else "reading", args[0])
                )

    sys.addaudithook(hook)


def lock_down(own: str, more: list[str] = ()) -> None:
    """All three, for this process and for good. ``own``: the folder it may write to; ``more``: files and folders it may
    read beside Python's own.
    """
    kernel = forbid_files(own, more)
    kernel = forbid_calls() and kernel
    forbid_events(own, more, native=not kernel)


def nets() -> dict[str, bool]:
    """Whether this machine's kernel has each net, tried in an interpreter of its own: {"system-call filter", "file
    rules"}.
    """
    code = (
        "\n".join(map(inspect.getsource, (refused_calls, forbid_calls, readable, forbid_files)))
        + "\nimport sys\nprint(int(forbid_files(sys.argv[1], [])), int(forbid_calls()))"
    )
    with tempfile.TemporaryDirectory() as folder:
        tried = subprocess.run(
            [sys.executable, "-I", "-c", code, folder], capture_output=True, text=True, timeout=_START_S
        )
    files, calls = (tried.stdout.split() + ["0", "0"])[:2]
    return {"system-call filter": calls == "1", "file rules": files == "1"}


#: What a reward function of one's own is given by place where its parameters have names of their own, and the other
#: names of it (verl, TRL).
PLACES = ("prompt", "completion", "answer")
OTHER_NAMES = {"messages": "prompt", "solution_str": "completion", "ground_truth": "answer"}


def arguments(function, given: dict, columns: dict, places, other_names: dict, many: bool):
    """(positional, named) arguments that a function of one's own asks for by its signature.

    Parameters are filled by name: of ``given``, then of ``columns``; a ``**`` parameter gets all that are left. Where
    one of the first three has a name that is neither, and none that is stands at another's place, the first two are
    prompt and completion whatever they are called, and the third is the answer if its name says so (``gold``,
    ``reference_solution``) or nothing (``a``, ``_unused``): a ``difficulty`` that no row has is asked for by name and
    not given the answer. A function that hides its parameters (``*args``) gets the three. many: the values are lists,
    and plural names mean the same.

    Raises TypeError that names a parameter there is nothing for.
    """
    import inspect
    import re

    known = {
        name: values for single, values in given.items() for name in ((single, single + "s") if many else (single,))
    }
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return [given[name] for name in places], {}
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return [given[name] for name in places], {}
    first = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:3]
    at = {
        name: places.index(other_names.get(single, single))
        for single in (*places, *other_names)
        for name in ((single, single + "s") if many else (single,))
    }
    by_place = (
        len(first) == 3
        and any(p.name not in known and p.name not in columns for p in first)
        and all(p.name not in known or at.get(p.name) == i for i, p in enumerate(first))
    )
    third = first[2].name if by_place else ""
    is_answer = (
        third in known
        or third not in columns
        and (
            len(third) < 3
            or third[0] == "_"
            or re.search(
                r"(?:^|_)(?:answer|ans|gold|golden|truth|gt|target|label|reference|ref|solution|sol|key|expected|correct)s?\d*(?:_(?:text|value|output|result|string|str|response|completion))?$",
                third.lower(),
            )
        )
    )
    taken = (3 if is_answer else 2) if by_place else 0
    positional, named = [given[name] for name in places[:taken]], {}
    rest = {**columns, **known}
    for p in parameters[taken:]:
        if p.kind is p.VAR_KEYWORD:
            named.update(
                {
                    name: value
                    for name, value in {**(known if many else {}), **columns, **given}.items()
                    if name not in named and not any(name == q.name for q in parameters)
                }
            )
        elif p.name in rest:
            if p.kind is p.POSITIONAL_ONLY:
                positional.append(rest[p.name])
            else:
                named[p.name] = rest[p.name]
        elif p.default is p.empty:
            if not many and p.name[:-1] in given and p.name.endswith("s"):
                raise TypeError(
                    "the function asks for %r of all answers to a prompt, as TRL's reward functions do; write scope:"
                    " group, and %r for one answer" % (p.name, p.name[:-1])
                )
            raise TypeError(
                "the function asks for %r, which the row has no column of%s; write some of %s, or a column (%s)"
                % (
                    p.name,
                    " (the answer to the prompt is called answer)" if p.name == third else "",
                    ", ".join(given),
                    ", ".join(name for name in columns if name not in given),
                )
            )
    return positional, named


def advice(error: BaseException) -> str:
    """What to write instead, for an import that failed in code of one's own; else the empty string."""
    if not isinstance(error, ImportError):
        return ""
    if "relative import" in str(error):
        return "; the source is read as one file without its package: write what it imports into the same file"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return (
            "; install %s in the environment that runs the stage, or write what is used of it into the source"
            % error.name.split(".")[0]
        )
    return ""


def finished(result):
    """A function's result; what an ``async`` function returns is awaited, in a loop that needs no socket."""
    import inspect

    if not inspect.isawaitable(result):
        return result
    import asyncio
    import os

    class End:
        """One end of a pipe, as a loop uses a socket to wake itself."""

        def __init__(self, number):
            self.number = number
            os.set_blocking(number, False)

        def fileno(self):
            return self.number

        def recv(self, size):
            return os.read(self.number, size)

        def send(self, data):
            return os.write(self.number, data)

        def close(self):
            os.close(self.number)

    class Loop(asyncio.SelectorEventLoop):
        def _make_self_pipe(self):
            self._ssock, self._csock = map(End, os.pipe())
            self._internal_fds += 1
            self._add_reader(self._ssock.fileno(), self._read_from_self)

    async def whole():
        return await result

    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(whole())


#: The child side, an isolated interpreter that imports nothing of this package. It speaks JSON lines on two private
#: descriptors; the standard streams belong to the untrusted code.
_CHILD = (
    "\n".join(
        map(
            inspect.getsource,
            (
                end_with_parent,
                no_network,
                limit_resources,
                refused_calls,
                forbid_calls,
                readable,
                forbid_files,
                forbid_events,
                lock_down,
                arguments,
                advice,
                finished,
            ),
        )
    )
    + "\n"
    + _CHILDREN
    + r"""
import json, os, sys
read_fd, write_fd, memory = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
end_with_parent()
no_network("no network in the sandbox")
import contextlib, re, tempfile
limit_resources(memory)
jobs = os.fdopen(read_fd, "r", encoding="utf-8")
@contextlib.contextmanager
def streams(given):  # files as descriptors 0 and 1 and as sys.stdin and sys.stdout, so that every way to read and write them works; yields what reads the output
    took, gave, before = tempfile.TemporaryFile(), tempfile.TemporaryFile(), (sys.stdin, sys.stdout)
    took.write(given.encode("utf-8", "replace"))
    took.seek(0)
    os.dup2(took.fileno(), 0)
    os.dup2(gave.fileno(), 1)
    sys.stdin, sys.stdout = open(0, encoding="utf-8", errors="replace", closefd=False), (own := open(1, "w", encoding="utf-8", errors="replace", closefd=False))
    def written():
        with contextlib.suppress(ValueError):
            own.flush()
        gave.seek(0)
        said = gave.read(1_000_001)
        if len(said) > 1_000_000:
            raise MemoryError("more than 1,000,000 bytes of output")
        return said.decode("utf-8", "replace")
    try:
        yield written
    finally:
        sys.stdin, sys.stdout = before
def call(job):
    return own[job["function"]](*job["args"])
def score(job):
    space = {"__name__": "sandbox"}
    exec(compile(job["source"], "<verifier>", "exec"), space)
    function = space.get("score") or space.get("compute_score")
    if function is None:
        raise NameError("define a function score(prompt, completion, answer)")
    positional, named = arguments(function, job["given"], job["columns"], job["places"], job["other_names"], job["many"])
    return finished(function(*positional, **named))
def load(job):  # what a source imports is imported once, apart from the time that a call may take
    exec(compile(job["source"], "<verifier>", "exec"), {"__name__": "sandbox"})
def program(job):
    code = 0
    with streams(job["stdin"]) as written:
        try:
            exec(compile(job["source"], "<program>", "exec"), {"__name__": "__main__"})
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        return {"stdout": written(), "exit": code}
def tested(job):
    space = {"__name__": "__main__"}
    with streams(""):
        exec(compile(job["source"], "<program>", "exec"), space)
        exec(compile(job["test"], "<test>", "exec"), space)
    return True
def pattern(job):
    return re.search(job["pattern"], job["text"], re.DOTALL) is not None
def plain(value):  # numbers of numpy, torch and fractions
    return value.tolist() if hasattr(value, "tolist") else float(value)
def begin(job):
    running["program"] = Program(job["source"])
    return running["program"].names(job["names"])
def answer(job):
    return running["program"].answer(job["number"], job["what"], job["args"], job["named"])
def judge(job):
    def ask(question):
        os.write(write_fd, (json.dumps({"token": token, "ask": question}) + "\n").encode())
        return json.loads(jobs.readline())
    return judged(job["test"], job["values"], ask)
running = {}
handlers = {"begin": begin, "answer": answer, "judge": judge, "call": call, "load": load, "score": score, "program": program, "tested": tested, "pattern": pattern}
lock_down(os.getcwd(), json.loads(sys.argv[4]))
own = {"__name__": "sandbox"}
exec(compile(sys.argv[5], "<setup>", "exec"), own)
os.write(write_fd, b'{"token": "ready"}\n')
for line in jobs:
    job = json.loads(line)
    token = job.pop("token")
    try:
        reply = json.loads(json.dumps({"value": handlers[job["kind"]](job)}, default=plain))
    except MemoryError as error:
        reply = {"error": "memory limit: %s" % (str(error) or "out of memory")}
    except BaseException as error:
        reply = {"error": "%s: %s" % (type(error).__name__, str(error)[:300]) + advice(error)}
    os.write(write_fd, (json.dumps({"token": token, **reply}) + "\n").encode())
"""
)


@dataclass(frozen=True)
class Limits:
    """timeout_s: wall seconds per job. memory_mib: address space of a worker. workers: processes at a time (0 = one per
    core). files: what may be read beside Python's own files."""

    timeout_s: float = 5.0
    memory_mib: int = 1024
    workers: int = 0
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """`value` of a job, or `error`: "timeout", "crashed (...)" or "ExceptionName: text"."""

    value: Any = None
    error: str | None = None


class _Worker:
    """One child process; restarted after a time-out, a crash, or (`fresh`) every job."""

    def __init__(self, limits: Limits, setup: str = ""):
        self.limits, self.setup, self.process, self.buffer = limits, setup, None, b""
        self.loaded: set[str] = set()  # sources whose imports this process has made
        self.unloadable: dict[str, Outcome] = {}  # and why others cannot be
        self.directory = tempfile.mkdtemp(prefix="sandbox-")
        self.judge: _Worker | None = None  # where the tests of its programs run

    def _start(self) -> None:
        self._empty()
        job_read, self.job_write = os.pipe()
        self.reply_read, reply_write = os.pipe()
        self.buffer = b""
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": self.directory,
            "TMPDIR": self.directory,
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-c",
                _CHILD,
                str(job_read),
                str(reply_write),
                str(self.limits.memory_mib << 20),
                json.dumps(self.limits.files),
                self.setup,
            ],
            pass_fds=(job_read, reply_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self.directory,
            env=environment,
            start_new_session=True,
        )
        os.close(job_read)
        os.close(reply_write)
        try:
            self._receive("ready", time.monotonic() + _START_S)
        except (TimeoutError, EOFError):
            self.stop()
            raise RuntimeError(
                "the sandbox cannot start a Python process; raise memory_mib, or free memory on this machine"
            ) from None

    def _empty(self) -> None:
        """A new interpreter finds nothing that one before it has written: neither another program's, nor its own of an
        earlier test or of a first attempt."""
        for entry in os.scandir(self.directory):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry, ignore_errors=True)
            else:
                os.unlink(entry)

    def stop(self) -> None:
        """Kill the child and everything in its process group."""
        if self.process is None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        for fd in (self.job_write, self.reply_read):
            os.close(fd)
        self.process = None

    def close(self) -> None:
        self.stop()
        if self.judge is not None:
            self.judge.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def run(self, job: dict, fresh: bool) -> Outcome:
        """Run one job; never raises for anything the job does."""
        if job["kind"] == "score" and IMPORTS.search(job["source"]):
            if self.process is None:
                self.loaded.clear()
            if job["source"] not in self.loaded and job["source"] not in self.unloadable:
                found = self._ask(
                    {"kind": "load", "source": job["source"], "timeout_s": max(_START_S, self.limits.timeout_s)}, False
                )
                if found.error:
                    self.unloadable[job["source"]] = Outcome(
                        error=(
                            f"its imports took more than {_START_S:.0f} s" if found.error == "timeout" else found.error
                        )
                    )
                else:
                    self.loaded.add(job["source"])
            if job["source"] in self.unloadable:
                return self.unloadable[job["source"]]
        if job["kind"] == "tested" and (names := tested.names_asked(job["test"])) is not None:
            found = self._judged(job, names)
            self.stop()  # the program may have left threads behind
            if found is not None:
                return found
        return self._ask(job, fresh)

    def _judged(self, job: dict, names: list[str]) -> Outcome | None:
        """A program in this worker, its test in another one; what the test asks is passed on. None where the test needs
        the program's interpreter, which the test's own process alone can say: what the program's says is the program's.

        A question takes some time on its way, which is not the program's: each adds ``_ON_THE_WAY_S`` to the time
        limit, up to three times it."""
        self.judge = self.judge or _Worker(self.limits)
        deadline = self._deadline(job)
        latest = deadline + 2 * (deadline - time.monotonic())
        begun = self._ask({"kind": "begin", "source": job["source"], "names": names}, False, deadline)
        if begun.error:
            return begun
        if self.judge.process is None:
            self.judge._start()
        token = secrets.token_hex(16)
        try:
            self.judge._send(
                json.dumps({"kind": "judge", "test": job["test"], "values": begun.value, "token": token}).encode()
                + b"\n",
                deadline,
            )
            while "ask" in (reply := self.judge._receive(token, deadline)):
                deadline = min(deadline + _ON_THE_WAY_S, latest)
                answer = self._ask({"kind": "answer", **reply["ask"]}, False, deadline)
                if answer.error:
                    self.judge.stop()  # it still waits
                    return answer
                self.judge._send(json.dumps(answer.value).encode() + b"\n", deadline)
        except TimeoutError:
            self.judge.stop()
            return Outcome(error="timeout")
        except (EOFError, BrokenPipeError):
            self.judge.stop()
            return Outcome(error="crashed (the test)")
        if (reply.get("error") or "").startswith("Unsendable:"):
            return None
        return Outcome(reply.get("value"), reply.get("error"))

    def _deadline(self, job: dict) -> float:
        own = job.get("timeout_s")
        return time.monotonic() + (min(own, LONGEST_S) if own and own > 0 else self.limits.timeout_s)

    def _ask(self, job: dict, fresh: bool, deadline: float | None = None) -> Outcome:
        if self.process is None:
            self._start()
        token = secrets.token_hex(16)
        deadline = deadline or self._deadline(job)
        try:
            self._send(json.dumps({**job, "token": token}).encode() + b"\n", deadline)
            reply = self._receive(token, deadline)
        except TimeoutError:
            self.stop()
            return Outcome(error="timeout")
        except (EOFError, BrokenPipeError):
            code = self.process.wait()
            self.stop()
            return Outcome(error=f"crashed (exit status {code})")
        if fresh or "error" in reply:
            self.stop()
        return Outcome(reply.get("value"), reply.get("error"))

    def _send(self, data: bytes, deadline: float) -> None:
        os.set_blocking(self.job_write, False)
        while data:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([], [self.job_write], [], left)[1]:
                raise TimeoutError
            data = data[os.write(self.job_write, data[:65536]) :]

    def _receive(self, token: str, deadline: float) -> dict:
        while True:
            while b"\n" in self.buffer:
                line, self.buffer = self.buffer.split(b"\n", 1)
                try:
                    reply = json.loads(line)
                except ValueError:
                    continue
                if isinstance(reply, dict) and reply.get("token") == token:
                    return reply
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.reply_read], [], [], left)[0]:
                raise TimeoutError
            chunk = os.read(self.reply_read, 65536)
            if not chunk:
                raise EOFError
            self.buffer += chunk
            if len(self.buffer) > 64 << 20:
                raise EOFError


def scoring(source: str, given: dict, columns: dict, many: bool = False) -> dict:
    """The job that calls the function ``score`` (or verl's ``compute_score``) of a source with what its signature asks
    for of ``given`` and ``columns`` (:func:`arguments`).
    """
    return {
        "kind": "score",
        "source": source,
        "given": given,
        "columns": columns,
        "places": PLACES,
        "other_names": OTHER_NAMES,
        "many": many,
    }


#: Jobs that leave nothing behind in their worker: it serves the next ones too, and with it what it has imported.
_KEEPS = {"call", "pattern"}
KEPT = 16  # workers at most that wait for more
PATTERNS = 64  # looking for one takes microseconds, and starting a process for it tens of milliseconds
_idle: dict[tuple[Limits, str], list[_Worker]] = {}
_idle_lock = threading.Lock()
#: Threads that stay: the kernel ends a worker with the thread that started it (:func:`end_with_parent`).
_starters: ThreadPoolExecutor | None = None


def close_idle() -> None:
    """End the workers that wait for more jobs."""
    with _idle_lock:
        waiting = [worker for workers in _idle.values() for worker in workers]
        _idle.clear()
    for worker in waiting:
        worker.close()


def _forget() -> None:
    """In a forked process: the workers are its parent's."""
    global _idle_lock, _starters
    for worker in (worker for workers in _idle.values() for worker in workers if worker.process is not None):
        os.close(worker.job_write)
        os.close(worker.reply_read)
        worker.process.returncode = 0  # nothing to wait for
        worker.process = None
    _idle.clear()
    _idle_lock, _starters = threading.Lock(), None


atexit.register(close_idle)
os.register_at_fork(after_in_child=_forget)


def run_jobs(jobs: list[dict], limits: Limits = Limits(), *, fresh: bool = False, setup: str = "") -> list[Outcome]:
    """Outcomes of `jobs` in order, on a pool of workers.

    Jobs: {"kind": "call", "function", "args"} of what ``setup`` defines, our own source that a worker runs before its
    first job, :func:`scoring`, {"kind": "program", "source", "stdin"} -> {"stdout", "exit"}, {"kind": "tested",
    "source", "test"} -> True, {"kind": "pattern", "pattern", "text"} -> bool. A job's own "timeout_s", up to
    `LONGEST_S`, counts instead of that of the limits. `fresh` gives each job an interpreter of its own, so that one
    cannot leave anything behind for the next; workers of our own functions and of patterns stay for the calls to come.
    """
    global _starters
    if not jobs:
        return []
    width = min(len(jobs), limits.workers or os.cpu_count() or 1)
    outcomes: list[Outcome | None] = [None] * len(jobs)

    def serve(worker: _Worker, first: int) -> None:
        for index in range(first, len(jobs), width):
            outcomes[index] = worker.run(jobs[index], fresh)

    def serve_alone(first: int) -> None:
        worker = _Worker(limits, setup)
        try:
            serve(worker, first)
        finally:
            worker.close()

    kinds = {job["kind"] for job in jobs}
    if fresh or not kinds <= _KEEPS:
        with ThreadPoolExecutor(width) as pool:
            list(pool.map(serve_alone, range(width)))
        return outcomes
    width = min(width, KEPT, -(-len(jobs) // PATTERNS) if kinds == {"pattern"} else width)
    with _idle_lock:
        _starters = _starters or ThreadPoolExecutor(KEPT, "sandbox")
        waiting = _idle.setdefault((limits, setup), [])
        workers = [waiting.pop() if waiting else _Worker(limits, setup) for _ in range(width)]
    done = [_starters.submit(serve, worker, first) for first, worker in enumerate(workers)]
    wait(done)
    with _idle_lock:
        _idle[limits, setup] = [*workers, *_idle.pop((limits, setup), ())]  # the last to be given up
        many = sum(map(len, _idle.values())) - KEPT
        given_up = [worker for waiting in _idle.values() for worker in waiting][: max(0, many)]
        for waiting in _idle.values():
            waiting[:] = [worker for worker in waiting if worker not in given_up]
    for worker in given_up:
        worker.close()
    for one in done:
        one.result()
    return outcomes
