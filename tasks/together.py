"""Independent parts of a run at the same time: arms, trials, seeds, as many as this machine has slots for GPU stages.

Each part runs in a thread of its own, in a copy of the caller's context, so that its stages are tasks of the same
Prefect flow run. Leases decide which GPU a stage gets. Whatever ends the caller (a cancelled run, Ctrl-C) ends the
stage processes of all parts.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import TypeVar

from tasks.devices import gpu_slots, wanted_devices
from tasks.processes import GRACE_SECONDS
from tasks.stopping import STOPPED, sigterm_raises

T = TypeVar("T")


def at_once() -> int:
    """How many GPU stages fit this machine at a time: its slots by the devices of each; 1 where there is no GPU and
    POSTTRAIN_GPU_SLOTS is not set.
    """
    return max(1, gpu_slots() // wanted_devices())


def together(parts: Sequence[Callable[[], T]], limit: int | None = None) -> list[T]:
    """The parts' results in their order, `limit` parts at a time (default :func:`at_once`; inside a part: one).

    After a part has failed no further one starts, those that run go to their end, and the error of the first in order
    is raised.
    """
    limit = 1 if STOPPED.get() is not None else at_once() if limit is None else limit
    if limit <= 1 or len(parts) <= 1:
        return [part() for part in parts]
    stop, failed, turn = threading.Event(), threading.Event(), threading.Lock()
    results: list = [None] * len(parts)
    errors: list[BaseException | None] = [None] * len(parts)
    waiting = [(i, part, copy_context()) for i, part in enumerate(parts)]
    # not Thread.join: once interrupted it takes a running thread for ended
    ends = [threading.Event() for _ in range(min(limit, len(parts)))]

    def work(end: threading.Event) -> None:
        try:
            take()
        finally:
            end.set()

    def take() -> None:
        while True:
            with turn:
                if not waiting or stop.is_set() or failed.is_set():
                    return
                i, part, context = waiting.pop(0)
            context.run(STOPPED.set, stop)
            try:
                results[i] = context.run(part)
            except BaseException as error:  # a cancelled part's too: it is the caller's to raise
                errors[i] = error
                failed.set()

    started = []
    try:
        with sigterm_raises():
            for end in ends:
                threading.Thread(target=work, args=(end,), name="part", daemon=True).start()
                started.append(end)
            for end in ends:
                end.wait()
    except BaseException:
        stop.set()
        deadline = time.monotonic() + float(os.environ.get("POSTTRAIN_GRACE_SECONDS", GRACE_SECONDS)) + 10.0
        for end in started:  # a thread that waits for a slot of the server is left behind and ends with the process
            end.wait(max(0.0, deadline - time.monotonic()))
        raise
    for error in errors:
        if error is not None:
            raise error
    return results
