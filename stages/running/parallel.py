"""Rows to training items on all cores: order, counts and errors are those of one process.

Rendering and tokenising a conversation takes a few tenths of a millisecond, so a million of them keep one core busy for
minutes before the first step, and again after every resume.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from itertools import islice
from typing import Any

PART = 512  # rows given to a process at a time
WORTH = 4 * PART  # fewer rows are done sooner than processes are started

#: What is told how far many rows are, ``(done, total, what)``: the running stage's ``progress``.
telling: ContextVar[Callable[[float, float | None, str], None]] = ContextVar(
    "telling", default=lambda done, total, what: None
)
# what forked processes do; inherited, since closures cannot be sent
_of: Callable[[list[dict]], tuple[list, dict[str, int]]]


def items_of(
    rows: Iterable[dict],
    of: Callable[[list[dict]], tuple[list, dict[str, int]]],
    *,
    expected: int,
    limit: int | None = None,
) -> tuple[list, Counter]:
    """(items, counts of what was dropped by reason), in the order of ``rows``.

    of: rows -> (items, counts); what it does to one row must not depend on the others, and it may neither use a GPU nor
    start threads. expected: about how many rows there are. limit: stop once there are so many items; 0: read none.
    """
    items: list = []
    dropped: Counter = Counter()
    if limit == 0:
        return items, dropped
    many = limit is None and expected >= WORTH
    workers, tell, done = processes() if many else 1, telling.get(), 0
    parts = iter(lambda source=iter(rows): list(islice(source, 1 if limit is not None else PART)), [])
    for made, counts in map(of, parts) if workers == 1 else _ahead(of, parts, workers):
        items += made
        dropped.update(counts)
        if many:
            done = min(done + PART, expected)
            tell(done, expected, "rows read")
        if limit is not None and len(items) >= limit:
            break
    return items, dropped


def processes() -> int:
    """Processes worth having beside the other ranks on this machine."""
    if sys.platform != "linux":
        return 1
    return max(
        1,
        min(
            32,
            len(os.sched_getaffinity(0))
            // int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1),
        ),
    )


def _ahead(of: Callable, parts: Iterator[list[dict]], workers: int) -> Iterator[tuple[list, dict[str, int]]]:
    """Results in order; two parts for each process are under way, so that memory does not grow with the dataset.

    What a process could not do is done here: an error then is raised where it arises, and a process that the system has
    killed costs time only.
    """
    global _of
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    _of = of
    pool = ProcessPoolExecutor(workers, mp_context=get_context("fork"), initializer=_begin, initargs=(os.getpid(),))
    waiting: deque = deque()

    def first():
        part, future = waiting.popleft()
        if future is not None:
            with contextlib.suppress(Exception):
                return future.result()
        return of(part)

    try:
        for part in parts:
            try:
                waiting.append((part, pool.submit(_work, part)))
            except BrokenProcessPool:
                waiting.append((part, None))
            if len(waiting) > 2 * workers:
                yield first()
        while waiting:
            yield first()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(parent: int) -> None:
    """In a forked process: end when the stage ends, and leave signals to it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _work(part: list[dict]) -> tuple[list, dict[str, Any]]:
    return _of(part)
