"""Metrics for a tracker of the user's own beside MLflow: ``POSTTRAIN_MIRROR=module:function`` names what is called with
every metric of every stage that runs.

``function(run, step, metrics)``: ``run`` is {stage, label, key, run_id, config} (``run_id``: of the recipe's run, None
without one), ``metrics`` {name: number}, ``step`` None for the final numbers. It is called in the process that started
the stage, by a thread of its own, one call at a time: what trains never waits for it. What it raises is told of once on
stderr and changes nothing. After a killed stage goes on, steps behind its last checkpoint come once more.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

#: Calls that wait at most, beyond which further ones are left out; seconds that a stage that has ended waits for those
#: that are left.
WAITING, LAST_SECONDS = 10_000, 10.0


@contextlib.contextmanager
def beside(
    tell: Callable[[dict[str, Any]], None], flow_run: dict[str, Any] | None
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """``tell``, and what it is told of metrics goes to the user's function, too, until the end of the block."""
    target = os.environ.get("POSTTRAIN_MIRROR")
    if not target:
        yield tell
        return
    calls: queue.Queue = queue.Queue(WAITING)
    run: dict[str, Any] = {"run_id": (flow_run or {}).get("run_id")}
    complained: set[str] = set()

    def complain(text: str) -> None:
        if not complained:
            print(f"POSTTRAIN_MIRROR={target}: {text}; the stage goes on, and MLflow has all metrics", file=sys.stderr)
        complained.add(text)

    def work() -> None:
        function = None
        while (call := calls.get()) is not None:
            try:
                if function is None:
                    module, _, name = target.partition(":")
                    function = getattr(importlib.import_module(module), name)
                function(*call)
            except Exception as error:
                complain(f"{type(error).__name__}: {error}")

    def put(step: int | None, metrics: dict[str, Any]) -> None:
        numbers = {
            name: value
            for name, value in metrics.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        try:
            calls.put_nowait((dict(run), step, numbers))
        except queue.Full:
            complain("it is slower than the stage, and some metrics are left out")

    def told(event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind == "prepared":
            run.update({name: event[name] for name in ("stage", "label", "key", "config")})
        elif kind == "metric":
            put(event.get("step"), event.get("metrics") or {})
        elif kind == "finished":
            put(None, event["metrics"])
        tell(event)

    worker = threading.Thread(target=work, name="mirror", daemon=True)
    worker.start()
    try:
        yield told
    finally:
        with contextlib.suppress(queue.Full):
            calls.put(None, timeout=LAST_SECONDS)
        worker.join(LAST_SECONDS)
        if worker.is_alive():
            complain("it has not come to its end, and is not waited for")
