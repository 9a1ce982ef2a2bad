"""How a stage's process ends when it is asked to by SIGTERM (a cancelled run, a node that Kubernetes or Slurm takes
back): at once, but while it trains after the step it is in and a checkpoint, so that no step is done twice. A step that
outlasts half of the grace period is cut off."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL (POSTTRAIN_GRACE_SECONDS)


class Terminated(BaseException):
    """SIGTERM arrived: unwind, so that ``finally`` blocks end what the stage started."""


class Stopping:
    """The handler of SIGTERM of one process, and what its training loop asks after every step."""

    def __init__(self) -> None:
        self.pid: int | None = None  # whose training steps are awaited; a forked child is another process
        self.since: float | None = None
        self.timer: threading.Timer | None = None
        self.saving = False

    def begin_steps(self) -> None:
        self.pid = os.getpid()

    def end_steps(self) -> None:
        """Raises Terminated where SIGTERM came meanwhile."""
        asked, self.pid = self.asked, None
        if self.timer is not None:
            self.timer.cancel()
        self.since, self.timer, self.saving = None, None, False
        if asked:
            raise Terminated()

    @property
    def asked(self) -> bool:
        """Whether to save and end now that a step is done."""
        return self.since is not None

    def heed(self, signum: int, frame: Any) -> None:
        """The handler. Raises Terminated where nothing is awaited (any longer)."""
        patience = float(os.environ.get("POSTTRAIN_GRACE_SECONDS", GRACE_SECONDS)) / 2
        if self.pid != os.getpid() or (self.asked and not self.saving and time.monotonic() - self.since >= patience):
            raise Terminated()
        if not self.asked:
            self.since = time.monotonic()
            self.timer = threading.Timer(patience, os.kill, (self.pid, signal.SIGTERM))
            self.timer.daemon = True
            self.timer.start()


stopping = Stopping()
