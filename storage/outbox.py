"""What is to be told to MLflow: a document per stage run and flow run, and a cursor of how far MLflow knows it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from pathlib import Path
from typing import Any, Iterator
from urllib.parse import urlparse

from storage import home
from storage.files import atomic_write_json, read_json, rebased, sha256_text

Doc = dict[str, Any]


def enabled() -> bool:
    """Whether there is a projection at all."""
    return os.environ.get("POSTTRAIN_TRACKING", "on").lower() not in ("off", "0", "false", "no")


def tracking_uri() -> str:
    """Where MLflow keeps things: ``MLFLOW_TRACKING_URI`` or the local database."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home.mlflow_database()}"


def unit_of(flow_run: dict[str, Any] | None, label: str, key: str, fresh: str | None = None) -> str:
    """Name of the MLflow run of a stage: per flow run, label and key; a stage run on its own has one per key. ``fresh``
    sets a forced repetition apart."""
    base = (
        f"{flow_run['run_id']}.{label}.{key[:8]}"
        if flow_run and flow_run.get("run_id")
        else f"stage.{label}.{key[:16]}"
    )
    return re.sub(r"[^A-Za-z0-9_.-]", "-", base + (f".{fresh}" if fresh and not flow_run else ""))


def flow_unit(run_id: str) -> str:
    """Name of the parent run of a flow run."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", f"{run_id}.flow")


def flow_part(flow_run: dict[str, Any] | None) -> dict[str, Any]:
    """What a stage's document says about the flow it belongs to."""
    if not flow_run or not flow_run.get("run_id"):
        return {}
    return {
        "run_id": flow_run["run_id"],
        "recipe": flow_run.get("recipe") or "flow",
        "prefect": flow_run.get("prefect") or {},
    }


def here(d: Doc) -> Doc:
    """A stage's document with its paths in this state directory, which may have been moved or copied since."""
    was, now = Path(d["workdir"]).parent.parent, home.home()
    if was == now or Path(d["workdir"]).parent.name != "work":
        return d
    names = ("workdir", "metrics_file", "perf_file", "record_path", "reports", "inputs", "outputs")
    return d | rebased({name: d[name] for name in names if name in d}, str(was), str(now))


def files_of(unit: str) -> tuple[Path, Path]:
    return home.outbox_dir() / f"{unit}.json", home.outbox_dir() / f"{unit}.cursor.json"


def done_files_of(unit: str) -> tuple[Path, Path]:
    folder = home.subdir("outbox", "done")
    return folder / f"{unit}.json", folder / f"{unit}.cursor.json"


def status(unit: str) -> str | None:
    """How the unit of a stage stood when it was put last; None if it never was."""
    return next(
        (
            found["status"]
            for path in (files_of(unit)[0], done_files_of(unit)[0])
            if (found := read_json(path, None)) and "status" in found
        ),
        None,
    )


def cursor_of(unit: str) -> dict[str, Any]:
    """How far MLflow has been told about a unit: run_id, experiment_id, lines, ..."""
    for path in (files_of(unit)[1], done_files_of(unit)[1]):
        found = read_json(path, None)
        if found:
            return found
    return {}


def run_id_of(unit: str) -> str | None:
    """MLflow run id of a unit, None while MLflow has not been told."""
    return cursor_of(unit).get("run_id")


def link(run_id: str, experiment_id: str | None = None) -> dict[str, str]:
    """Where to look at a run: experiment id, tracking URI and, for a server, the page."""
    experiment_id = experiment_id or next(
        (c.get("experiment_id") for c in map(lambda p: read_json(p, {}), cursors()) if c.get("run_id") == run_id), None
    )
    found = {"tracking_uri": tracking_uri()}
    if experiment_id:
        found["experiment_id"] = str(experiment_id)
        base = os.environ.get("POSTTRAIN_MLFLOW_URL") or (tracking_uri() if tracking_uri().startswith("http") else "")
        if base:
            found["url"] = (
                f"{base.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}?workflowType=machine_learning"
            )
    return found


def cursors() -> list[Path]:
    return [*home.outbox_dir().glob("*.cursor.json"), *home.subdir("outbox", "done").glob("*.cursor.json")]


@contextlib.contextmanager
def unit_lock(unit: str, wait: bool) -> Iterator[bool]:
    folder = home.subdir("outbox", "locks")
    with open(folder / f"{sha256_text(unit)[:24]}.lock", "a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def document_lock(unit: str) -> Any:
    """Held for the moment in which a unit's files change; the lock of the unit itself is held for as long as MLflow
    takes.
    """
    return unit_lock("document " + unit, wait=True)


def pending() -> list[str]:
    """Units that MLflow does not fully know, oldest first."""
    found = {}
    for path in home.outbox_dir().glob("*.json"):
        if not path.name.endswith(".cursor.json") and path.name != "models.json":
            with contextlib.suppress(FileNotFoundError):  # another process has just told all of it
                found[path.stem] = path.stat().st_mtime
    return sorted(found, key=found.get)


def forget() -> int:
    """Have everything told again that was told to the home's own database, which is gone (at its file, or a server of
    this machine in front of it); how many units.
    """
    told, others = 0, set()
    for cursor_path in cursors():
        cursor = read_json(cursor_path, {})
        where = cursor.get("uri") or ""
        if not cursor.get("ours", _local(where)):
            others.add(where)
            continue
        unit = cursor_path.name.removesuffix(".cursor.json")
        (path, mine), (done, done_cursor) = files_of(unit), done_files_of(unit)
        with document_lock(unit):
            for one in (mine, done_cursor):
                one.unlink(missing_ok=True)
            if done.exists() and not path.exists():
                os.replace(done, path)
        told += 1
    models = home.outbox_dir() / "models.json"
    with unit_lock("models state", wait=True):
        if models.exists():
            known = read_json(models, {})
            atomic_write_json(
                models, {where: state for where, state in known.items() if where in others or not _local(where)}
            )
    return told


def is_ours(uri: str) -> bool:
    """Whether an address is that of the home's own database: its file, or the server of ``posttrain up`` before it."""
    if uri == f"sqlite:///{home.mlflow_database()}":
        return True
    server = (read_json(home.home() / "services.json", None) or {}).get("mlflow", {}).get("url") or ""
    there, asked = urlparse(server), urlparse(uri)
    alike = asked.hostname == there.hostname or _local(uri) and _local(server)
    return bool(server) and alike and asked.port == there.port


def _local(uri: str) -> bool:
    """Whether an address is that of a database file (also of where the home was before it was moved) or of a server of
    this machine; of what was told before cursors said whose it was.
    """
    return uri.startswith("sqlite:///") or urlparse(uri).hostname in ("127.0.0.1", "localhost", "::1")
