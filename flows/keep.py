"""Keeps one service running: `python -m flows.keep [--whole] NAME COMMAND…` starts the command and starts it again when
it ends.

`posttrain up` starts its servers and its worker through this; where a process manager does the same (Kubernetes,
compose, systemd), it is not needed. It gives up, with the command's status, after three ends in a row that each came
within a minute of their start. SIGTERM and SIGINT are passed on, and their end is the end; SIGUSR1 means that the
command is being stopped by someone else and is not to be started again. With `--whole` what the command has left behind
is ended before it starts again (a server's processes that hold its port; a worker's are runs, which go on).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

SOON_SECONDS = 60.0
TRIES = 3
MARK = "posttrain:"  # begins what is said of an end in the service's log


def keep(name: str, command: list[str], *, whole: bool = False, soon: float = SOON_SECONDS) -> int:
    """Run `command` until it is stopped or given up; returns its last exit status."""
    stopping = False
    process: subprocess.Popen | None = None

    def stop(number: int, frame) -> None:
        nonlocal stopping
        stopping = True
        if number != signal.SIGUSR1 and process is not None and process.poll() is None:
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, stop)
    short = status = 0
    while not stopping:
        started = time.monotonic()
        process = subprocess.Popen(command, preexec_fn=dies_with_parent())
        if stopping:  # asked while it started
            process.terminate()
        status = process.wait()
        if stopping:
            break
        short = short + 1 if time.monotonic() - started < soon else 0
        again = short < TRIES
        print(
            f"{MARK} {time.strftime('%Y-%m-%d %H:%M:%S')} {name} ended with status {status} after"
            f" {time.monotonic() - started:.0f} s and {'was started again' if again else 'was given up'}",
            flush=True,
        )
        if whole:
            end_session()
        if not again:
            break
        wait = time.monotonic() + 2.0 ** (1 + short)
        while not stopping and time.monotonic() < wait:
            time.sleep(0.2)
    return status


def last_end(log: str) -> str | None:
    """What the log of a kept service says of its last end, None when it never ended."""
    try:
        with open(log, "rb") as handle:
            lines = [line for line in handle if line.startswith(MARK.encode())]
    except OSError:
        return None
    return lines[-1].decode(errors="replace").removeprefix(MARK).strip() if lines else None


def end_session() -> None:
    """End all other processes of this process's session, of which it must be the leader."""
    import psutil

    if os.getsid(0) != os.getpid():
        return
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and os.getsid(process.pid) == os.getpid():
                process.kill()


def dies_with_parent():
    """What a child calls before its program starts: signals as usual, and (Linux) SIGTERM when this process is gone,
    even killed.
    """
    parent = os.getpid()

    def prepare() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)  # a shell's background job ignores SIGINT, its children inherit that
        if os.uname().sysname == "Linux":
            import ctypes

            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:
                os._exit(1)

    return prepare


if __name__ == "__main__":
    whole, given = sys.argv[1:2] == ["--whole"], sys.argv[1:]
    if len(given) < 2 + whole:
        sys.exit("usage: python -m flows.keep [--whole] NAME COMMAND…")
    sys.exit(keep(given[whole], given[whole + 1 :], whole=whole))
