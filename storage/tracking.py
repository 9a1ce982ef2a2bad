"""The MLflow projection: what a person sees in the MLflow UI, derived from what lies on disk.

Nothing here is the truth. A stage run is described by a small document in ``HOME/outbox`` beside the stage's own
``metrics.jsonl``; a *cursor* file says how far MLflow has been told. Projecting a document again sends only what is
missing, so a killed run, a resumed run and a server that was away for a while all end in the same state:

* one experiment per recipe (``posttrain/<recipe>``), one parent run per flow run, one child run per stage;
* params = resolved config, dataset inputs with digest and source, step metrics once per (metric, step), those without
  a group as ``train/NAME``, wall-clock metrics under ``perf/``, final metrics as ``final:NAME`` linked to the model they judge;
* models as logged models, registered under their names, aliases as in ``storage/registry.py``;
* reports, the stage record and the log as artifacts; status FINISHED, FAILED or KILLED as it really was.

MLflow is imported on first use, in a background thread, so that nobody waits for it. Default store:
``sqlite:///HOME/mlflow.db`` with artifacts in ``HOME/mlartifacts``; ``MLFLOW_TRACKING_URI`` wins;
``POSTTRAIN_TRACKING=off`` turns the projection off. If MLflow cannot be reached the work goes on and :func:`sync`
catches up later.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from storage import home
from storage.files import atomic_write_json, refusal
from storage.mlflow_database import database_file, make_database
from storage.outbox import (
    Doc,
    cursors,
    document_lock,
    done_files_of,
    enabled,
    files_of,
    pending,
    run_id_of,
    tracking_uri,
)
from storage.mlflow_client import Connection
from storage.projector import Projector, REGISTRY

POLL_SECONDS = 2.0

RETRY_SECONDS = 20.0

FIRST_SECONDS = 60.0  # how long to wait where the database has to be made first


def put(document: Doc) -> None:
    """Say how things stand with one stage or flow (``unit``); what MLflow lacks of it is sent in the background. Never
    waits for MLflow: a stage that is being ended has no time for that."""
    if not enabled():
        return
    path, cursor = files_of(document["unit"])
    done, done_cursor = done_files_of(document["unit"])
    with document_lock(document["unit"]):
        if done_cursor.exists() and not cursor.exists():
            os.replace(done_cursor, cursor)
        atomic_write_json(path, document)
        done.unlink(missing_ok=True)
    poke(document["unit"])


class _Background:
    """One daemon thread that projects the units it is poked with: at most every POLL_SECONDS each, after an error every
    RETRY_SECONDS, at once when somebody waits in :meth:`flush`."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.due: dict[str, float] = {}  # unit -> when to project it
        self.ended: dict[str, tuple[float, bool]] = {}  # unit -> (start of its last pass, whether it went well)
        self.home = str(home.home())
        self.projector = Projector()
        self.warned = False
        self.thread = threading.Thread(target=self._loop, name="mlflow-projection", daemon=True)
        self.thread.start()

    def poke(self, unit: str, at_once: bool = False) -> None:
        with self.condition:
            now = time.monotonic()
            started, well = self.ended.get(unit, (float("-inf"), True))
            when = now if at_once else max(now, started + (POLL_SECONDS if well else RETRY_SECONDS))
            self.due[unit] = min(when, self.due.get(unit, when))
            self.condition.notify_all()

    def _loop(self) -> None:
        while True:
            with self.condition:
                while True:
                    unit = min(self.due, key=self.due.get, default=None)
                    pause = None if unit is None else self.due[unit] - time.monotonic()
                    if pause is not None and pause <= 0:
                        break
                    self.condition.wait(timeout=pause)
                del self.due[unit]
            if str(home.home()) != self.home:  # what is pending there is not told from here
                return
            started = time.monotonic()
            _, error = self.projector.project(unit)
            with self.condition:
                self.ended[unit] = (started, error is None)
                if error and not self.warned:
                    self.warned = True
                    print(
                        f"MLflow ({tracking_uri()}) could not be told: {error}\nThe work goes on; `posttrain doctor` or"
                        " the next run sends what is missing.",
                        file=sys.stderr,
                    )
                self.condition.notify_all()

    def flush(self, unit: str, timeout: float) -> None:
        """Wait for a pass over ``unit`` that starts after now, at most ``timeout`` seconds."""
        asked = time.monotonic()
        self.poke(unit, at_once=True)
        with self.condition:
            while self.ended.get(unit, (float("-inf"), True))[0] < asked:
                left = asked + timeout - time.monotonic()
                if left <= 0:
                    return
                self.condition.wait(timeout=left)


_background: _Background | None = None

_background_lock = threading.Lock()


def _thread() -> _Background:
    global _background
    with _background_lock:
        if _background is None or not _background.thread.is_alive() or _background.home != str(home.home()):
            _background = _Background()
        return _background


def poke(unit: str) -> None:
    """There may be something new to send for this unit."""
    if enabled():
        _thread().poke(unit)


def flush(unit: str, timeout: float = 30.0, first: bool = True) -> str | None:
    """Wait until MLflow knows what there is of a unit (at most ``timeout`` seconds; ``first``: where its database has to
    be made first, at most FIRST_SECONDS); its MLflow run id, None if there is none yet.
    """
    if not enabled():
        return None
    if files_of(unit)[0].exists():
        file = database_file(tracking_uri())
        # a home's first database takes longer than a short stage: without this wait, no run of a few seconds would ever
        # get one made
        made = file is None or file.exists()
        _thread().flush(unit, timeout if made or not first else max(timeout, FIRST_SECONDS))
    return run_id_of(unit)


def flush_registry(timeout: float = 30.0) -> None:
    """Wait, at most ``timeout`` seconds, until MLflow's model registry shows the versions, aliases and decisions of
    ours.
    """
    if enabled():
        _thread().flush(REGISTRY, timeout)


def compare() -> tuple[int, str | None]:
    """Compare what MLflow was told with what its database has, which may have been brought back from a backup;
    :func:`sync` then sends what it lacks. (how many runs that is of, an error text).
    """
    from storage.restored import tell_again

    if not enabled() or not cursors():
        return 0, None
    try:
        return tell_again(Connection()), None
    except Exception as error:
        return 0, refusal(error) or f"{type(error).__name__}: {error}"


def sync(timeout: float = 120.0) -> dict[str, Any]:
    """Send everything that is still pending, and close the runs of processes that died. Returns {sent, pending,
    error}.
    """
    if not enabled():
        return {"sent": 0, "pending": 0, "error": None}
    file = database_file(tracking_uri())
    if file == home.mlflow_database() and not file.exists() and cursors():  # of what a lost one was told
        try:
            make_database(tracking_uri())
        except Exception as error:
            return {"sent": 0, "pending": len(pending()), "error": refusal(error) or f"{type(error).__name__}: {error}"}
    projector, sent, first_error = Projector(), 0, None
    deadline = time.monotonic() + timeout
    for unit in pending():
        if time.monotonic() > deadline:
            break
        complete, error = projector.project(unit)
        sent += complete
        first_error = first_error or error
        if error and projector.unreachable:
            break
    if first_error is None:
        first_error = projector.registry()
    return {"sent": sent, "pending": len(pending()), "error": first_error}
