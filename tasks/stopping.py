"""How a stage ends early: what it failed of, and who asked it to stop."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Iterator

# a stage refused what it was given: its message says all, and trying again changes nothing
DELIBERATE = ("StageFailure", "TrainingError")


class StageError(RuntimeError):
    """A stage that failed: its own message, the last lines of its log, and where the rest is."""

    def __init__(self, stage: str, message: str, *, kind: str = "", tail: str = "", log_path: str = "", key: str = ""):
        self.stage = stage
        self.message = message
        self.kind = kind
        self.tail = tail
        self.log_path = log_path
        self.key = key
        text = f"stage {stage} failed: {self.told()}"
        if tail.strip():
            text += "\n  last lines of its log:\n    " + "\n    ".join(tail.strip().splitlines()[-15:])
        if log_path:
            text += f"\n  whole log: {log_path}" + (
                ""
                if kind in DELIBERATE
                else "\n  run the same command again, or retry the run in Prefect, to continue from the last checkpoint"
            )
        super().__init__(text)

    def told(self) -> str:
        """The message, and of what kind an error that nobody meant is."""
        return f"{self.kind}: {self.message}" if self.kind and self.kind not in DELIBERATE else self.message

    def __reduce__(self):
        return (_rebuild_error, (self.stage, self.message, self.kind, self.tail, self.log_path, self.key))


def _rebuild_error(stage: str, message: str, kind: str, tail: str, log_path: str, key: str) -> StageError:
    return StageError(stage, message, kind=kind, tail=tail, log_path=log_path, key=key)


class Cancelled(BaseException):
    """SIGTERM reached a process that runs a stage without Prefect, or the run that a stage is a part of was ended."""


#: Called with the exception when a run is ended from outside, after its stages have ended and before Prefect's server
#: is told; more than once where it unwinds through several.
KILLED: list[Callable[[BaseException], None]] = []


@contextlib.contextmanager
def killed_told() -> Iterator[None]:
    """Call :data:`KILLED` where the block is ended from outside."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception):
            for tell in KILLED:
                tell(error)
        raise


#: Set by `tasks.together` for the parts it runs at the same time: once it is set, their stages end.
STOPPED: ContextVar[threading.Event | None] = ContextVar("stopped", default=None)


def raise_if_stopped() -> None:
    stop = STOPPED.get()
    if stop is not None and stop.is_set():
        raise Cancelled("the run was ended")


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Keep SIGINT and SIGTERM until the end of the block: an exception raised while a process is being started would
    leave it without anybody who knows of it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {
        number: handler for number in (signal.SIGINT, signal.SIGTERM) if callable(handler := signal.getsignal(number))
    }
    came: list[int] = []
    for number in handlers:
        signal.signal(number, lambda signum, frame: came.append(signum))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)


_waking = False


def wake_main_thread() -> None:
    """From now on a signal interrupts the main thread whatever that waits for.

    Python's handlers run in the main thread, but the system may give a signal to any thread, and a main thread that
    waits for a lock without limit (Prefect's client does, for minutes where its server is gone) sleeps on. Such a
    signal is followed by SIGURG, which nobody uses, to the main thread itself until that has run its handlers. Does
    nothing outside of the main thread, and where an event loop of the main thread is woken already.
    """
    global _waking
    if (
        _waking
        or threading.current_thread() is not threading.main_thread()
        or not hasattr(signal, "pthread_kill")
        or signal.getsignal(signal.SIGURG) is not signal.SIG_DFL
    ):
        return
    told, noted = socket.socketpair()
    noted.setblocking(False)
    taken = signal.set_wakeup_fd(noted.fileno(), warn_on_full_buffer=False)
    if taken != -1:
        signal.set_wakeup_fd(taken)
        told.close()
        noted.close()
        return
    main, awake = threading.get_ident(), threading.Event()

    def wake(told: socket.socket, noted: socket.socket) -> None:  # which end with this thread, so with the process
        while numbers := told.recv(4096):
            if any(number != signal.SIGURG for number in numbers):
                awake.clear()
                # again: the main thread may have been on its way into its wait when the first one came
                while not awake.wait(0.2):
                    signal.pthread_kill(main, signal.SIGURG)

    signal.signal(signal.SIGURG, lambda *_: awake.set())
    threading.Thread(target=wake, args=(told, noted), name="wake", daemon=True).start()
    _waking = True


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into an exception while a stage runs, unless somebody (Prefect) already does."""
    wake_main_thread()
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return

    def raise_cancelled(signum: int, frame: Any) -> None:
        raise Cancelled("SIGTERM")

    signal.signal(signal.SIGTERM, raise_cancelled)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
