"""MLflow's own database of a state directory: made whole, and moved with its directory."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import time
from pathlib import Path
from urllib.parse import unquote, urlparse

from storage import home
from storage.files import umask
from storage.outbox import forget, unit_lock


def database_file(uri: str) -> Path | None:
    """The file of a local SQLite store; None for any other address."""
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") and "?" not in uri else None


def identity(uri: str) -> tuple[int, int] | None:
    """Which file a local store is at present, whatever has had its name before; None where there is none."""
    file = database_file(uri)
    try:
        found = file.stat() if file is not None else None
    except OSError:
        return None
    return found and (found.st_dev, found.st_ino)


_opened: dict[str, tuple[int, int] | None] = {}  # address -> the file that MLflow has open in this process


def open_present(uri: str) -> tuple[int, int] | None:
    """Have MLflow close what it holds of a local database whose file is another one by now; :func:`identity`."""
    present = identity(uri)
    if _opened.setdefault(uri, present) != present:
        from mlflow.store.model_registry import sqlalchemy_store as models
        from mlflow.store.tracking import sqlalchemy_store as runs

        for store in (models.SqlAlchemyStore, runs.SqlAlchemyStore):
            if (engine := store._engine_map.get(uri)) is not None:
                engine.dispose()
        _opened[uri] = present
    return present


def make_database(uri: str) -> None:
    """The tables of a local database that is not there yet, made beside it and then given its name: MLflow's migrations
    do not go on where a process ended within them, and a short stage may end before they do. One that was cut off and
    holds nothing is set aside. Where one that was told of runs is gone (a damaged one, moved away), they are told
    again. Whoever opens a home's database comes through here first, so that one that looks cut off is not merely being
    made."""
    file = database_file(uri)
    if file is None:
        return
    with unit_lock("mlflow database", wait=True):
        if file.exists() and not _cut_off(file):
            return
        # one of the user's own is told what comes
        lost = not file.exists() and file.absolute() == home.mlflow_database()
        prepare_mlflow()
        from mlflow import MlflowClient

        file.parent.mkdir(parents=True, exist_ok=True)
        for left in file.parent.glob(f"{file.name}.new-*"):  # of processes that ended here
            left.unlink()
        # mlflow makes the tables of one address once in a process
        new = file.with_name(f"{file.name}.new-{time.time_ns()}")
        MlflowClient(tracking_uri=f"sqlite:///{new}", registry_uri=f"sqlite:///{new}").search_experiments(max_results=1)
        os.chmod(new, 0o666 & ~umask())  # SQLite leaves out the group
        if file.exists() and _cut_off(file):
            os.replace(file, file.with_name(file.name + ".cut-off"))
        try:
            os.link(new, file)
        except FileExistsError:  # a server of the user's own made it meanwhile
            pass
        except OSError:  # a file system without hard links
            os.replace(new, file)
        new.unlink(missing_ok=True)
        if lost:  # a first one has nothing to be told again
            forget()


ARTIFACT_COLUMNS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "storage_location"),
)


#: Which rows of these tables are of experiments of ours: others use the server, too.
OURS = "experiment_id IN (SELECT experiment_id FROM experiments WHERE name LIKE 'posttrain/%')"
ROWS_OF_OURS = {
    "experiments": OURS,
    "runs": OURS,
    "logged_models": OURS,
    "model_versions": f"run_id IN (SELECT run_uuid FROM runs WHERE {OURS})",
}
#: What stands for ``mlartifacts`` where a server hands artifacts out.
BEHIND_SERVER = "mlflow-artifacts:/"


def follow_home(uri: str) -> None:
    """MLflow keeps absolute places in its database. Where the home was moved or copied, artifacts below its
    ``mlartifacts`` are made to name the present one: else new artifacts would go to the old place, and old ones be lost
    to the UI; and so are its records and datasets. What experiments of earlier versions keep behind the server of
    ``posttrain up`` lies there, too, and can be written and read without it."""
    file = database_file(uri)
    if file is None or os.environ.get("MLFLOW_TRACKING_URI") or not file.exists():
        return
    new = home.subdir("mlartifacts")
    with (
        unit_lock("mlflow database", wait=True),
        contextlib.closing(sqlite3.connect(file, timeout=30)) as database,
        database,
    ):
        places = [
            local_path(location or "")
            for (location,) in database.execute(
                "SELECT artifact_location FROM experiments WHERE name LIKE 'posttrain/%'"
            )
        ]

        def move(prefix: str, ours: bool = False) -> None:
            for table, column in ARTIFACT_COLUMNS:
                database.execute(
                    f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?"
                    + f" AND {ROWS_OF_OURS[table]}" * ours,
                    (new.as_uri() + "/", len(prefix) + 1, len(prefix), prefix),
                )

        move(BEHIND_SERVER, ours=True)
        for old in {place.parent for place in places if place is not None and place.parent.name == new.name}:
            if old == new or (old.exists() and os.path.samefile(old, new)):
                continue
            move(old.as_uri() + "/")
            was, now = f"{old.parent}/", f"{new.parent}/"
            database.execute(
                "UPDATE tags SET value = ? || substr(value, ?) WHERE substr(value, 1, ?) = ?"
                " AND key IN ('posttrain.record', 'posttrain.workdir')",
                (now, len(was) + 1, len(was), was),
            )
            database.execute(
                "UPDATE datasets SET dataset_source = replace(dataset_source, ?, ?)",
                tuple(f'"uri": {json.dumps(place)[:-1]}' for place in (was, now)),
            )


def prepare_mlflow() -> None:
    """Switches and log levels; before mlflow is imported."""
    for name, value in {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
        "GIT_PYTHON_REFRESH": "quiet",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }.items():
        os.environ.setdefault(name, value)
    hush()


def hush() -> None:
    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # a traceback with the whole statement, of an error that it raises, too
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)


def _cut_off(file: Path) -> bool:
    """Whether MLflow's migrations stopped half-way in a database that no run was ever written to."""
    try:
        with contextlib.closing(
            sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=10)
        ) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            empty = "runs" not in tables or not database.execute("SELECT count(*) FROM runs").fetchone()[0]
            return empty and any(name.startswith("_alembic_tmp_") for name in tables)
    except sqlite3.Error:
        return False


def local_path(location: str) -> Path | None:
    parsed = urlparse(location or "")
    if parsed.scheme == "file":
        return Path(unquote(parsed.path))
    return Path(location) if location and parsed.scheme == "" else None
