"""Where the platform keeps its state: one directory, ``POSTTRAIN_HOME`` (default ``./.posttrain``).

    records/<stage key>.json      what each stage did            runs/<run id>.json     what each flow run did
    datasets/<name>/<digest>/     published datasets             models/<digest>/       published models
    work/<stage key>/             a stage's scratch directory    leases/                locks and GPU slots
    registry/                     model names, versions, aliases outbox/                what MLflow has still to be told
    mlflow.db, mlartifacts/       the default MLflow store       cache/                 digests of files already read

A directory that its group may write to and that hands its group on (``chmod g+ws``) is that group's: what is made in it
can be read and written by all of them, whatever the umask of who made it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def home() -> Path:
    """The state directory, absolute; made on first use."""
    path = Path(os.environ.get("POSTTRAIN_HOME") or "./.posttrain").expanduser().absolute()
    path.mkdir(parents=True, exist_ok=True)
    _settle(path)
    return path


_settled: tuple[int, Path] | None = None  # (process, state directory) whose umask was looked at


def _settle(path: Path) -> None:
    """Where a state directory is a group's, let the group write what this process, and those that it starts, make from
    now on.
    """
    global _settled
    if _settled != (os.getpid(), path):
        _settled = os.getpid(), path
        if is_shared(path):
            os.umask(os.umask(0o007) & ~0o070)


def is_shared(path: Path) -> bool:
    """Whether a state directory is a group's. The right to write alone says nothing: a umask of 002 leaves it, and file
    systems without modes show it.
    """
    both = stat.S_IWGRP | stat.S_ISGID
    return path.stat().st_mode & both == both


def subdir(*names: str) -> Path:
    """A directory below home, made if missing."""
    path = home().joinpath(*names)
    path.mkdir(parents=True, exist_ok=True)
    return path


def mlflow_database() -> Path:
    """The default MLflow store's file."""
    return home() / "mlflow.db"


def records_dir() -> Path:
    """Stage records."""
    return subdir("records")


def runs_dir() -> Path:
    """Flow-run records."""
    return subdir("runs")


def datasets_dir() -> Path:
    """Published datasets, one directory per name and digest."""
    return subdir("datasets")


def models_dir() -> Path:
    """Published models, one directory per digest."""
    return subdir("models")


def work_dir(key: str) -> Path:
    """Scratch directory of one stage key; a killed stage finds its checkpoints here."""
    return subdir("work", key)


def leases_dir() -> Path:
    """Locks of running stages and GPU slots."""
    return subdir("leases")


def registry_dir() -> Path:
    """Model registry log."""
    return subdir("registry")


def outbox_dir() -> Path:
    """What the MLflow projection has still to send, and how far it is."""
    return subdir("outbox")


def cache_dir() -> Path:
    """Things that can be computed again."""
    return subdir("cache")
