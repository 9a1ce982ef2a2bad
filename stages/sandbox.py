"""Untrusted code in killable processes: verifiers written by users, generated programs, and patterns that may never end.

A worker is a child process in its own process group, with limits on memory, file size and open files, an empty environment, a
temporary directory and no network (its own network namespace where the kernel allows it, blocked sockets everywhere). It
dies with its parent. A job that exceeds its wall time is killed with everything it started and costs its own time-out
only: the next job gets a new worker. Every job ends as a value or as an error with a reason.
"""

from __future__ import annotations

import inspect
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

_START_S = 60.0  # a loaded machine may need this long to start an interpreter

def end_with_parent() -> None:
    """Have the kernel end this process when its parent ends."""
    import ctypes
    import signal

    try:
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
    except Exception:
        pass


def no_network(said: str) -> None:
    """Leave the network (a namespace of its own where the kernel allows it), and have everything that opens a socket raise OSError(said)."""
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

    for name in ("socket", "create_connection", "socketpair", "fromfd", "create_server"):
        setattr(socket, name, refuse)


def limit_resources(memory: int) -> None:
    """At most ``memory`` bytes of address space, files of 16 MiB, 64 open files, no core dump."""
    import resource

    for what, value in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 16 << 20), (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (value, value))


#: The child side, an isolated interpreter that imports nothing of this package. It speaks JSON lines on two private descriptors; the standard
#: streams belong to the untrusted code.
_CHILD = "\n".join(map(inspect.getsource, (end_with_parent, no_network, limit_resources))) + r"""
import json, os, sys
read_fd, write_fd, memory = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
end_with_parent()
no_network("no network in the sandbox")
import io, contextlib, traceback, re
limit_resources(memory)
jobs = os.fdopen(read_fd, "r", encoding="utf-8")
class Capped(io.StringIO):
    def write(self, text):
        if self.tell() + len(text) > 1_000_000:
            raise MemoryError("more than 1,000,000 characters of output")
        return super().write(text)
def call(job):
    space = {"__name__": "sandbox"}
    exec(compile(job["source"], "<verifier>", "exec"), space)
    if job["function"] not in space:
        raise NameError("define a function %s(prompt, completion, answer)" % job["function"])
    return space[job["function"]](*job["args"])
def program(job):
    out, code = Capped(), 0
    sys.stdin = io.StringIO(job["stdin"])
    with contextlib.redirect_stdout(out):
        try:
            exec(compile(job["source"], "<program>", "exec"), {"__name__": "__main__"})
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return {"stdout": out.getvalue(), "exit": code}
def tested(job):
    space = {"__name__": "__main__"}
    sys.stdin = io.StringIO("")
    with contextlib.redirect_stdout(Capped()):
        exec(compile(job["source"], "<program>", "exec"), space)
        exec(compile(job["test"], "<test>", "exec"), space)
    return True
def pattern(job):
    return re.search(job["pattern"], job["text"], re.DOTALL) is not None
handlers = {"call": call, "program": program, "tested": tested, "pattern": pattern}
os.write(write_fd, b'{"token": "ready"}\n')
for line in jobs:
    job = json.loads(line)
    token = job.pop("token")
    try:
        reply = {"value": handlers[job["kind"]](job)}
        json.dumps(reply)
    except MemoryError as error:
        reply = {"error": "memory limit: %s" % (str(error) or "out of memory")}
    except BaseException as error:
        reply = {"error": "%s: %s" % (type(error).__name__, str(error)[:300])}
    os.write(write_fd, (json.dumps({"token": token, **reply}) + "\n").encode())
"""


@dataclass(frozen=True)
class Limits:
    """timeout_s: wall seconds per job. memory_mib: address space of a worker. workers: processes at a time (0 = one per core)."""

    timeout_s: float = 5.0
    memory_mib: int = 1024
    workers: int = 0


@dataclass(frozen=True)
class Outcome:
    """`value` of a job, or `error`: "timeout", "crashed (...)" or "ExceptionName: text"."""

    value: Any = None
    error: str | None = None


class _Worker:
    """One child process; restarted after a time-out, a crash, or (`fresh`) every job."""

    def __init__(self, limits: Limits):
        self.limits, self.process, self.buffer = limits, None, b""
        self.directory = tempfile.mkdtemp(prefix="sandbox-")

    def _start(self) -> None:
        job_read, self.job_write = os.pipe()
        self.reply_read, reply_write = os.pipe()
        self.buffer = b""
        environment = {"PATH": "/usr/bin:/bin", "HOME": self.directory, "TMPDIR": self.directory, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", _CHILD, str(job_read), str(reply_write), str(self.limits.memory_mib << 20)],
            pass_fds=(job_read, reply_write), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            cwd=self.directory, env=environment, start_new_session=True)
        os.close(job_read)
        os.close(reply_write)
        try:
            self._receive("ready", time.monotonic() + _START_S)
        except (TimeoutError, EOFError):
            self.stop()
            raise RuntimeError("the sandbox cannot start a Python process; raise memory_mib, or free memory on this machine") from None

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
        shutil.rmtree(self.directory, ignore_errors=True)

    def run(self, job: dict, fresh: bool) -> Outcome:
        """Run one job; never raises for anything the job does."""
        if self.process is None:
            self._start()
        token = secrets.token_hex(16)
        deadline = time.monotonic() + self.limits.timeout_s
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
            data = data[os.write(self.job_write, data[:65536]):]

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


def run_jobs(jobs: list[dict], limits: Limits = Limits(), *, fresh: bool = False) -> list[Outcome]:
    """Outcomes of `jobs` in order, on a pool of workers.

    Jobs: {"kind": "call", "source", "function", "args"}, {"kind": "program", "source", "stdin"} -> {"stdout", "exit"},
    {"kind": "tested", "source", "test"} -> True, {"kind": "pattern", "pattern", "text"} -> bool. `fresh` gives each job an
    interpreter of its own, so that one cannot leave anything behind for the next.
    """
    if not jobs:
        return []
    width = min(len(jobs), limits.workers or os.cpu_count() or 1)
    outcomes: list[Outcome | None] = [None] * len(jobs)

    def serve(first: int) -> None:
        worker = _Worker(limits)
        try:
            for index in range(first, len(jobs), width):
                outcomes[index] = worker.run(jobs[index], fresh)
        finally:
            worker.close()

    with ThreadPoolExecutor(width) as pool:
        list(pool.map(serve, range(width)))
    return outcomes
