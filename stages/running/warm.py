"""``python -m stages.running.warm FD``: a process that has imported what stages import, and forks one for every stage
it is asked for.

A new interpreter needs several seconds until torch and transformers are there, a fork of this one needs milliseconds.
It imports libraries only, none of the project's modules, so that every stage runs the code that lies on disk when it
starts; and it computes nothing, so that a forked stage differs from a started one in nothing but the time it takes to
start.

It speaks through the Unix socket ``FD``: every request is a JSON document with its length before it (4 bytes, big
endian) and file descriptors beside it, every answer a JSON line.

    {}                                          -> true, once everything is imported
    {"environment": {...}, "umask": 18, ...} with stdout and stderr -> the process id of the forked stage, a session of its own; null
    if the system refuses
    {"ended": pid}                              -> its exit code (-N: ended by signal N), null while it runs

Until it was asked for, an ended stage stays a zombie, so its process id is nobody else's. When the other end of the
socket is closed (its owner has ended, however), this process ends, and the stages with it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import Any, Callable, Iterator, NoReturn

#: What nearly every stage that trains or samples imports. None of it starts a thread that a fork would lose.
LIBRARIES = (
    "numpy",
    "psutil",
    "torch",
    "torch.distributed",
    "pydantic",
    "pyarrow.parquet",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "jinja2",
    "pandas",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
)


def main(descriptor: int) -> int:
    """Import the libraries, then serve; the exit code."""
    channel = socket.socket(fileno=descriptor)

    def alone() -> bool:
        return bool(select.select([channel], [], [], 0)[0]) and not channel.recv(1, socket.MSG_PEEK)

    with closed_devices():
        load(alone)
    return 0 if alone() else serve(channel, run_stage)


def forks() -> bool:
    """Whether stages and ranks are forked here; else each is a new interpreter."""
    return sys.platform == "linux" and os.environ.get("POSTTRAIN_FORK") != "0"


def load(stop: Callable[[], bool] = lambda: False) -> None:
    """Import the libraries, until ``stop()``."""
    collecting = gc.isenabled()
    gc.disable()  # a quarter of the time: what an import makes stays, and every collection looks at all of it
    try:
        for name in LIBRARIES:
            if stop():
                return
            with contextlib.suppress(Exception):  # the stage that needs it will say what is wrong with it
                importlib.import_module(name)
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def closed_devices() -> Iterator[None]:
    """Around imports: asking whether there is a GPU must not open one, since a fork could not use it."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = before or "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


def run_stage(request: dict[str, Any]) -> int:
    """In the forked process: the stage whose SPEC.json is ``request["spec"]``."""
    if unusable_devices():
        os.execv(sys.executable, [sys.executable, "-m", "stages", request["spec"]])
    call_it(f"stage {request.get('name', '')}")
    from stages.running.process import main

    return main(request["spec"])


def call_it(name: str) -> None:
    """What ``top`` and ``ps -o comm`` show for this process."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(15, name.encode()[:15], 0, 0, 0)  # PR_SET_NAME


def unusable_devices() -> bool:
    """Whether an import has opened CUDA, which forked processes cannot use: a new interpreter must take this one's
    place.
    """
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda._is_in_bad_fork()


def serve(channel: socket.socket, run: Callable[[dict[str, Any]], int]) -> int:
    """Answer requests until the other end is closed, and return 0 then. Every forked process ends with what
    ``run(request)`` returns there.
    """
    gc.collect()
    gc.freeze()  # what is here stays: collections in forked processes need not touch (and so copy) it
    while True:
        request, descriptors = receive(channel)
        if request is None:
            return 0
        if "ended" in request:
            pid, status = os.waitpid(request["ended"], os.WNOHANG)
            answer: Any = os.waitstatus_to_exitcode(status) if pid else None
        elif descriptors:
            try:
                answer = os.fork()
            except OSError:  # as many processes as the system allows, or no memory
                answer = None
            if answer == 0:
                channel.close()
                become(request["environment"], request["umask"], descriptors)
                leave(run(request))
            for descriptor in descriptors:
                os.close(descriptor)
            wait_for_session(answer)
        else:
            answer = True
        with contextlib.suppress(BrokenPipeError):
            channel.sendall(json.dumps(answer).encode() + b"\n")


def wait_for_session(pid: int | None) -> None:
    """Until a forked process leads its session: who is told of it may signal that at once."""
    until = time.monotonic() + 5.0
    while pid is not None and time.monotonic() < until:
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == pid:
                return
        time.sleep(0.0002)


def leave(code: int) -> NoReturn:
    """End this process as an interpreter ends, by its threads, exit handlers and buffers, but without taking apart all
    that was imported: behind torch and transformers that takes half a second and more.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # the interpreter's own end says so, and has another exit code
        sys.exit(code)
    os._exit(code)


def become(environment: dict[str, str], umask: int, descriptors: list[int]) -> None:
    """In the forked process: what a newly started one has of its own, or of whoever asked for it."""
    os.setsid()
    os.umask(umask)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, *descriptors)):
        os.dup2(descriptor, number)
    for descriptor in (nothing, *descriptors):
        if descriptor > 2:
            os.close(descriptor)
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(environment)
    if environment.get("OMP_NUM_THREADS", threads) != threads:  # its parent read another number
        limit_threads(int(environment["OMP_NUM_THREADS"]))
    draw_anew()


def draw_anew() -> None:
    """In a forked process: random numbers of its own, where nothing seeds them (torch's start at a constant)."""
    import random

    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def limit_threads(count: int) -> None:
    """Compute with so many threads, as a process that is started with this OMP_NUM_THREADS does."""
    import threadpoolctl

    threadpoolctl.threadpool_limits(count)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(count)


# ------------------------------------------------------------------------------------------------------------ the channel


def send(channel: socket.socket, request: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
    """Send a request (the owner's side)."""
    body = json.dumps(request).encode("utf-8", "surrogateescape")
    socket.send_fds(channel, [len(body).to_bytes(4, "big")], list(descriptors))
    channel.sendall(body)


def receive(channel: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next request and its file descriptors; None once the other end is closed."""
    head, descriptors, _, _ = socket.recv_fds(channel, 4, 2)
    size = int.from_bytes(head, "big")
    body = bytearray()
    while head and len(body) < size:
        more = channel.recv(size - len(body))
        if not more:
            return None, []
        body += more
    return (json.loads(body.decode("utf-8", "surrogateescape")) if head else None), descriptors


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].isdigit():
        print("usage: python -m stages.running.warm FD (started by tasks/processes.py)", file=sys.stderr)
        sys.exit(2)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    leave(main(int(sys.argv[1])))
