"""Stage processes: how one is started, and how it is ended with everything below it.

A stage that trains or samples is forked from a parent that has imported torch and transformers already
(``stages/running/warm.py``): the first of a run waits for these imports, the others start at once. One parent serves
all stages of this process and ends with it. A stage that needs none of that, one whose environment differs from the
parent's, and any stage on a system without fork is started as ``python -m stages SPEC.json``; what a stage computes
does not depend on it. ``POSTTRAIN_FORK=0`` starts all of them so.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO, Any, Callable

from stages.running import warm
from stages.running.stopping import GRACE_SECONDS
from stages.spec import PROJECT_ROOT, library_versions
from storage.files import umask

# read when a stage runs, not when libraries are imported
PER_STAGE = ("POSTTRAIN_", "PREFECT", "MLFLOW_", "CUDA_VISIBLE_DEVICES", "PYTEST_")
THREADS = "OMP_NUM_THREADS"  # can be changed behind the imports


def environment(**more: str) -> dict[str, str]:
    """The environment of a stage process started by this process."""
    paths = [str(PROJECT_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # so that a device has the number that nvidia-smi gives it
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "DO_NOT_TRACK": "true",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
        **more,
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "POSTTRAIN_PARENT_PID": str(os.getpid()),
    }


def loaded(given: dict[str, str], *, wait: bool, on_poll: Callable[[], None] | None = None) -> Parent | None:
    """The parent to fork a stage of this :func:`environment` from; None if it is to be started by itself.

    wait: for the libraries to be loaded (the stage needs them anyway); else a parent is taken only where they are.
    on_poll: called while this waits; may raise.
    """
    parent = _parent(given) if wait else _running
    if parent is None or not parent.serves(given):
        return None
    try:
        while not parent.ready(0.5 if wait else 0.0):
            if not wait:
                return None
            if on_poll is not None:
                on_poll()
    except Gone:
        return None
    return parent


def start(spec: str, name: str, given: dict[str, str], log: IO[bytes], parent: Parent | None = None) -> Child:
    """Start the stage of a SPEC.json as the leader of a session of its own; its events are in ``stdout``, all else it
    says goes to ``log``.

    name: the stage's, shown by ``top``. given: its :func:`environment`. parent: what :func:`loaded` gave.
    """
    if parent is not None:
        with contextlib.suppress(Gone):
            return parent.start({"spec": spec, "name": name, "environment": given}, log)
    return subprocess.Popen(
        [sys.executable, "-m", "stages", spec],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        env=given,
        cwd=str(PROJECT_ROOT),
        start_new_session=True,
    )


def expect() -> None:
    """Several stages will be started by this process: begin to load the libraries now."""
    _parent(environment())


# ---------------------------------------------------------------------------------------------------------- forked stages


class Gone(RuntimeError):
    """The parent of forked stages has ended."""


class Parent:
    """The owner's side of one ``stages/running/warm.py`` (or of another module that calls its ``serve``). Threads may
    share it.
    """

    def __init__(self, given: dict[str, str], module: str = "stages.running.warm"):
        self._socket, theirs = socket.socketpair()
        self._lock, self._unread, self._ready = threading.Lock(), b"", False
        self._environment = _fixed(given)
        self._threads = given.get(THREADS)
        self.owner = os.getpid()
        self.versions = library_versions()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=given,
                cwd=str(PROJECT_ROOT),
                start_new_session=True,
            )
        with contextlib.suppress(OSError):
            warm.send(self._socket, {})

    def serves(self, given: dict[str, str]) -> bool:
        """Whether a process of this environment may be forked from it: what libraries read when they are imported is
        the same, but for a number of threads.
        """
        threads = given.get(THREADS)
        return self._environment == _fixed(given) and (threads == self._threads or (threads or "").isdigit())

    def ready(self, seconds: float) -> bool:
        """Whether its libraries are loaded, waiting at most so long. Raises Gone."""
        with self._lock:
            if not self._ready and select.select([self._socket], [], [], seconds)[0]:
                self._ready = bool(self._answer())
            return self._ready

    def start(self, request: dict[str, Any], log: IO[bytes], stdout: IO[bytes] | None = None) -> Forked:
        """Fork a process for ``request`` (``environment`` and what the module's ``run`` reads). stdout: a file for it,
        else a pipe. Raises Gone.
        """
        reads, writes = os.pipe() if stdout is None else (None, None)
        try:
            pid = self.ask({**request, "umask": umask()}, (writes if stdout is None else stdout.fileno(), log.fileno()))
            if pid is None:
                raise Gone("no further process can be forked")
        except BaseException:
            if reads is not None:
                os.close(reads)
            raise
        finally:
            if writes is not None:
                os.close(writes)
        return Forked(self, pid, None if reads is None else os.fdopen(reads, "rb"))

    def ask(self, request: dict[str, Any], descriptors: tuple[int, ...] = ()) -> Any:
        """The answer to one request."""
        with self._lock:
            try:
                while not self._ready:
                    self._ready = bool(self._answer())
                warm.send(self._socket, request, descriptors)
                return self._answer()
            except OSError as error:
                raise Gone(str(error)) from error

    def _answer(self) -> Any:
        while b"\n" not in self._unread:
            more = self._socket.recv(65536)
            if not more:
                raise Gone("the parent of the forked stages has ended")
            self._unread += more
        line, self._unread = self._unread.split(b"\n", 1)
        return json.loads(line)

    def close(self) -> None:
        """End it, and with it every process it forked."""
        self._socket.close()
        self.process.wait()


class Forked:
    """A forked process, spoken to as a ``subprocess.Popen``."""

    def __init__(self, parent: Parent, pid: int, stdout: IO[bytes] | None):
        self.parent, self.pid, self.stdout, self.returncode = parent, pid, stdout, None

    def poll(self) -> int | None:
        """Its exit code, None while it runs. One whose parent ended was ended with it."""
        if self.returncode is None:
            try:
                self.returncode = self.parent.ask({"ended": self.pid})
            except Gone:
                self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended; subprocess.TimeoutExpired after ``timeout`` seconds."""
        deadline, pause = None if timeout is None else time.monotonic() + timeout, 0.001
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return self.returncode


Child = subprocess.Popen | Forked

_running: Parent | None = None
_starting = threading.Lock()


def _parent(given: dict[str, str]) -> Parent | None:
    """This process's parent of stages, started if there is none (or it has ended, or holds libraries of which others
    were installed since: its stages go on, new ones are forked from a new one); None where stages cannot be forked."""
    global _running
    if not warm.forks():
        return None
    with _starting:
        if (
            _running is None
            or _running.owner != os.getpid()
            or _running.process.poll() is not None
            or _running.versions != library_versions()
        ):
            _running = Parent(given)
        return _running


def _fixed(given: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in given.items() if name != THREADS and not name.startswith(PER_STAGE)}


# ------------------------------------------------------------------------------------------------------------------- ending


def kill_tree(child: Child, grace: float | None = None) -> None:
    """End a stage process and everything below it: SIGTERM, a grace period to save, then SIGKILL. Processes that moved
    to another parent are found by their session. vLLM's get no SIGTERM: the step under way, which is to be finished,
    may still need them."""
    import psutil

    grace = float(os.environ.get("POSTTRAIN_GRACE_SECONDS", GRACE_SECONDS)) if grace is None else grace
    family = _family(child.pid)
    if child.poll() is None:
        for process in family:
            with contextlib.suppress(psutil.Error):
                if not process.name().startswith("VLLM::"):
                    process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=grace)
    for process in {*family, *_family(child.pid)}:
        with contextlib.suppress(psutil.Error):
            process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=5)


def _family(pid: int) -> set[Any]:
    import psutil

    found: set[Any] = set()
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        found = {root, *root.children(recursive=True)}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and os.getsid(process.pid) == pid:
                found.add(process)
    return found
