"""Checkpoints that are complete or absent, never partial.

Order of a save: temporary directory, files, fsync, ``manifest.json`` with the sha256 of every file
written last, fsync, rename, fsync of the parent. A loader accepts only a directory whose manifest
matches every byte; damaged ones are skipped in favour of the next older one.

Several processes can write one checkpoint together: one begins it, every one writes files of its own, and
when all have, one commits it (:meth:`Checkpoints.begin`, ``write``, ``commit``).
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from storage.files import atomic_write_json, fsync_dir, fsync_file, fsync_tree, read_json, sha256_file

RESERVED = ("state.json", "manifest.json")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: ``step`` (counter chosen by the stage), ``state`` (JSON), ``path`` (its directory)."""

    step: int
    state: dict[str, Any]
    path: Path

    def file(self, name: str) -> Path:
        """Path of a file saved under ``name``; KeyError names the ones there are."""
        path = self.path / name
        if not path.exists():
            there = ", ".join(sorted(p.name for p in self.path.iterdir() if p.name not in RESERVED)) or "none"
            raise KeyError(f"checkpoint {self.path.name} has no file {name!r}; it has: {there}")
        return path


class Sha256(str):
    """Returned by a function that wrote a file of a checkpoint: the file's sha256, taken while it was written, so that
    it is not read again.
    """


@dataclass(frozen=True)
class Files:
    """The files of a checkpoint whose names start with ``prefix``: ``read(name)`` gives one's bytes,
    ``read.path(name)`` its place.
    """

    checkpoint: Checkpoint
    prefix: str = ""

    def __call__(self, name: str) -> bytes:
        return self.path(name).read_bytes()

    def path(self, name: str) -> Path:
        return self.checkpoint.file(self.prefix + name)

    def under(self, prefix: str) -> "Files":
        return Files(self.checkpoint, self.prefix + prefix)


class Checkpoints:
    """The checkpoints of one directory, newest kept: ``keep`` complete ones (at least 1)."""

    def __init__(self, dir: str | os.PathLike, keep: int = 2):
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint must be kept, write 1 or more")
        self.dir = Path(dir)
        self.keep = keep
        self.dir.mkdir(parents=True, exist_ok=True)

    def save(
        self, step: int, state: dict[str, Any], files: dict[str, bytes | Callable[[Path], Any]] | None = None
    ) -> Checkpoint:
        """Write one checkpoint. ``state`` must be JSON-able; each file is bytes or a function that writes the path it
        is given (a file, or a directory of files) and may return its :class:`Sha256`."""
        folder = self.begin(step)
        try:
            return self.commit(step, folder, state, self.write(folder, files))
        finally:
            if folder.exists():
                shutil.rmtree(folder, ignore_errors=True)

    def begin(self, step: int) -> Path:
        """A directory for the files of a checkpoint; what is in it counts for nothing before :meth:`commit`."""
        folder = self.dir / f".tmp-{int(step):010d}-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        return folder

    @staticmethod
    def write(folder: Path, files: dict[str, bytes | Callable[[Path], Any]] | None) -> dict[str, dict[str, Any]]:
        """Put files into a begun checkpoint, durably; returns their entries of the manifest."""
        for name in files or {}:
            if name in RESERVED or "/" in name or name.startswith("."):
                raise ValueError(
                    f"checkpoint file name {name!r} is not allowed; use a plain name other than {', '.join(RESERVED)}"
                )
        listing = {}
        for name, content in (files or {}).items():
            path = folder / name
            if isinstance(content, (bytes, bytearray, memoryview)):
                path.write_bytes(content)
                known = None
            else:
                known = content(path)
                if not path.exists():
                    raise ValueError(
                        f"the function given for checkpoint file {name!r} wrote nothing at the path it was given"
                    )
            for file in _files(path) if path.is_dir() else [path]:
                fsync_file(file)
                listing[file.relative_to(folder).as_posix()] = {
                    "sha256": str(known) if isinstance(known, Sha256) and file == path else sha256_file(file),
                    "size": file.stat().st_size,
                }
        return listing

    def commit(self, step: int, folder: Path, state: dict[str, Any], listing: dict[str, dict[str, Any]]) -> Checkpoint:
        """Make a begun checkpoint the newest one: ``listing`` holds the entries of all that was written into it."""
        target = self.dir / f"step-{int(step):010d}"
        (folder / "state.json").write_text(json.dumps(state, sort_keys=True, ensure_ascii=False), encoding="utf-8")
        listing = {
            **listing,
            "state.json": {
                "sha256": sha256_file(folder / "state.json"),
                "size": (folder / "state.json").stat().st_size,
            },
        }
        fsync_tree(folder)
        atomic_write_json(folder / "manifest.json", {"step": int(step), "files": listing})
        if target.exists():
            aside = self.dir / f".old-{target.name}-{uuid.uuid4().hex[:8]}"
            os.rename(target, aside)
            os.rename(folder, target)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            os.rename(folder, target)
        fsync_dir(self.dir)
        self._prune()
        return Checkpoint(int(step), state, target)

    def latest(self, accept: Callable[[Checkpoint], bool] | None = None) -> Checkpoint | None:
        """The newest checkpoint whose every byte is as written (and which ``accept`` takes), or None. Leftovers of
        interrupted saves are removed."""
        for leftover in [p for p in self.dir.iterdir() if p.name.startswith((".tmp-", ".old-"))]:
            place = self.dir / leftover.name.removeprefix(".old-").rpartition("-")[0]
            if leftover.name.startswith(".old-") and not place.exists():  # nothing took its place
                os.rename(leftover, place)
            else:
                shutil.rmtree(leftover, ignore_errors=True)
        for path in self._all():
            checkpoint = self._load(path)
            if checkpoint is not None and (accept is None or accept(checkpoint)):
                return checkpoint
        return None

    def at(self, step: int) -> Checkpoint:
        """The checkpoint of a step that another process has verified."""
        path = self.dir / f"step-{int(step):010d}"
        return Checkpoint(int(step), read_json(path / "state.json"), path)

    def discard_after(self, step: int | None) -> None:
        """Remove checkpoints later than ``step`` (all when None): what follows a damaged one is written again."""
        for path in self._all():
            if step is None or int(path.name[5:]) > step:
                shutil.rmtree(path, ignore_errors=True)

    def _all(self) -> list[Path]:
        return sorted(
            (p for p in self.dir.iterdir() if p.name.startswith("step-") and p.name[5:].isdigit() and p.is_dir()),
            reverse=True,
        )

    def _prune(self) -> None:
        for path in self._all()[self.keep :]:
            shutil.rmtree(path, ignore_errors=True)

    @staticmethod
    def _load(path: Path) -> Checkpoint | None:
        try:
            manifest, state = read_json(path / "manifest.json", None), read_json(path / "state.json", None)
        except OSError:  # a disk that cannot read it
            return None
        if (
            not isinstance(manifest, dict)
            or not isinstance(manifest.get("files"), dict)
            or "state.json" not in manifest["files"]
        ):
            return None
        for name, entry in manifest["files"].items():
            file = path / name
            try:
                if file.stat().st_size != entry["size"] or sha256_file(file) != entry["sha256"]:
                    return None
            except (OSError, KeyError, TypeError):
                return None
        return Checkpoint(int(manifest["step"]), state, path) if isinstance(state, dict) else None


def _files(base: Path) -> list[Path]:
    return sorted(Path(root) / name for root, _, names in os.walk(base) for name in names)
