"""Sampling while training: the next iteration's groups come from a thread beside the optimizer steps of this one
(ASYNC, ops.async).

What is sampled ahead is decided before training goes on: the weights are those at the start of the iteration, the
prompts are taken and the seeds are counted as ever. So results do not depend on which of the two is faster, and every
batch but the first lags by exactly one iteration. Checkpoints wait for the thread and hold what it made.

It pays where sampling and training do not wait for the same thing: an engine on devices of its own (``engine=server``),
or rewards that take their time (programs, judges, environments). The built-in engine samples from a copy of the weights
then, on the device that trains.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from stages.running import cuda, ranks


class Ahead:
    """A thread that does one piece of work at a time and keeps its result.

    It lives as long as the stage, for the processes that sandboxes and environments start are ended with the thread
    that started them.
    """

    def __init__(self, device: str):
        self._device, self._queue, self._future, self._group = torch.device(device), queue.SimpleQueue(), None, None
        # seconds, of the result that was taken last: waited for it, worked on it, from its beginning until it was taken
        self.waited = self.worked = self.took = self._began = 0.0
        if self._device.type == "cuda":
            cuda.share()
        threading.Thread(target=self._work, name="rollouts-ahead", daemon=True).start()

    def _work(self) -> None:
        while True:
            future, call, group = self._queue.get()
            started = time.monotonic()
            # whatever goes wrong here must reach the future: nobody else would hear of it, and take() would wait for
            # ever
            try:
                # a thread starts at device 0, which a plain "cuda" means
                if self._device.type == "cuda" and self._device.index is not None:
                    torch.cuda.set_device(self._device)
                ranks.speak_in(group)
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                self.worked = time.monotonic() - started
                future.set_result(result)

    def submit(self, call: Callable[[], Any]) -> None:
        """Begin ``call()``; there must be none at work, and no result that was not taken. Every rank must call."""
        assert self._future is None, "one piece of work at a time"
        self._group = self._group or ranks.beside()
        self._future, self._began = Future(), time.monotonic()
        self._queue.put((self._future, call, self._group))

    def take(self) -> Any:
        """The result, waited for; None where nothing was submitted. What the call raised is raised here."""
        if self._future is None:
            return None
        started, future, self._future = time.monotonic(), self._future, None
        try:
            return future.result()
        finally:
            now = time.monotonic()
            self.waited, self.took = now - started, now - self._began
