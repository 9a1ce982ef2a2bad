"""Where the platform keeps its state: one directory, ``POSTTRAIN_HOME`` (default ``./.posttrain``).

    records/<stage key>.json      what each stage did            runs/<run id>.json     what each flow run did
    datasets/<name>/<digest>/     published datasets             models/<digest>/       published models
    work/<stage key>/             a stage's scratch directory    leases/                locks and GPU slots
    registry/                     model names, versions, aliases outbox/                what MLflow has still to be told
    mlflow.db, mlartifacts/       the default MLflow store       cache/                 digests of files already read
    nodes/<rendezvous>/           machines that run one recipe   removed/               which results were removed on purpose

A directory that its group may write to and that hands its group on (``chmod g+ws``) is that group's: what is made in it
can be read and written by all of them, whatever the umask of who made it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path


def home() -> Path:
    """The state directory, absolute; made on first use."""
    path = Path(os.environ.get("POSTTRAIN_HOME") or "./.posttrain").expanduser().absolute()
    path.mkdir(parents=True, exist_ok=True)
    _settle(path)
    return path


# (process, state directory, bits that its files lacked before) of the last one whose umask was looked at
_settled: tuple[int, Path, int] | None = None


def _settle(path: Path) -> None:
    """Where a state directory is a group's, let the group write what this process, and those that it starts, make from
    now on.
    """
    global _settled
    if _settled is None or _settled[:2] != (os.getpid(), path):
        given = 0
        if is_shared(path):
            given = os.umask(0o007)
            os.umask(given & ~0o070)
        forked = _settled is not None and _settled[1] == path  # its parent's was changed already
        _settled = os.getpid(), path, _settled[2] if forked else given


@contextlib.contextmanager
def outside(directory: Path) -> Iterator[None]:
    """Around writing a new directory, or into one, outside of a group's state directory: what is made in it, and above
    it, has the mode that the umask of who asked for it leaves. The group's are only files in the state directory.
    """
    base, given = home(), _settled[2]
    if not given or base in (directory.absolute(), *directory.absolute().parents):
        yield
        return
    before = _files(directory)
    yield
    for path, file in _files(directory).items():
        if before.get(path) != file and not path.is_symlink():
            inherited = path.parent.stat().st_mode & stat.S_ISGID if path.is_dir() else 0
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~given & ~stat.S_ISGID | inherited)


def _files(directory: Path) -> dict[Path, int]:
    """Which file each path in a directory, and above it, is."""
    there = (*directory.rglob("*"), directory, *directory.absolute().parents)
    return {path: path.lstat().st_ino for path in there if path.exists()}


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
