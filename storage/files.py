"""Small file primitives every other module leans on: canonical JSON, digests, atomic writes.

A digest here is always a lower-case hexadecimal sha256. A write here is always
"temporary file in the same directory, fsync, rename, fsync of the directory", so a
reader sees the old content or the new content and never a part of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from pathlib import Path
from typing import Any, Iterator

CHUNK = 1 << 20


def _refuse(value: Any) -> Any:
    raise TypeError(
        f"a value of type {type(value).__module__}.{type(value).__qualname__} cannot be hashed: {value!r:.80}; "
        "use only null, true/false, numbers, strings, lists and mappings with string keys"
    )


def canonical_json(obj: Any) -> str:
    """One text per value: sorted keys, separators ``,`` and ``:``, no ASCII escapes.

    Raises TypeError for values JSON has no form for and ValueError for NaN and infinities,
    both naming what to use instead.
    """
    _check_keys(obj)
    try:
        return json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_refuse)
    except ValueError as error:
        if "Out of range float" in str(error):
            raise ValueError("NaN and infinity cannot be hashed; write a finite number or null instead") from None
        raise


def _check_keys(obj: Any) -> None:
    if isinstance(obj, dict):
        for key, value in obj.items():
            if not isinstance(key, str):
                raise TypeError(f"mapping key {key!r} is a {type(key).__name__}; only string keys can be hashed, write {str(key)!r}")
            _check_keys(value)
    elif isinstance(obj, (list, tuple)):
        for value in obj:
            _check_keys(value)


def sha256_bytes(data: bytes) -> str:
    """sha256 of bytes, as hex."""
    return hashlib.sha256(data).hexdigest()


def sha256_text(text: str) -> str:
    """sha256 of the UTF-8 form of a text, as hex (lone surrogates are kept distinct, never an error)."""
    return sha256_bytes(text.encode("utf-8", "surrogatepass"))


def sha256_file(path: str | os.PathLike) -> str:
    """sha256 of a file's content, read in 1 MiB pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while piece := handle.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def sha256_json(obj: Any) -> str:
    """sha256 of :func:`canonical_json`."""
    return sha256_text(canonical_json(obj))


def fsync_dir(path: str | os.PathLike) -> None:
    """Make renames inside a directory survive a power cut (a no-op where directories cannot be opened)."""
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)


def fsync_file(path: str | os.PathLike) -> None:
    """Flush one file's content to the device."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(path: str | os.PathLike) -> None:
    """Flush every file and directory below ``path``."""
    for root, _, files in os.walk(path):
        for name in files:
            fsync_file(os.path.join(root, name))
        fsync_dir(root)


def atomic_write_bytes(path: str | os.PathLike, data: bytes) -> None:
    """Replace ``path`` by ``data`` in one step; parent directories are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.parent / f".{path.name}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        with open(tmp, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)
    fsync_dir(path.parent)


def atomic_write_text(path: str | os.PathLike, text: str) -> None:
    """UTF-8 form of :func:`atomic_write_bytes`."""
    atomic_write_bytes(path, text.encode("utf-8", "surrogatepass"))


def atomic_write_json(path: str | os.PathLike, obj: Any) -> None:
    """Readable JSON (sorted keys, two spaces) in one step."""
    atomic_write_text(path, json.dumps(obj, sort_keys=True, indent=2, ensure_ascii=False, default=_refuse) + "\n")


def read_json(path: str | os.PathLike, default: Any = ...) -> Any:
    """Parse a JSON file. With ``default``, a missing or damaged file gives that value instead of an error."""
    try:
        with open(path, encoding="utf-8") as handle:
            return json.load(handle)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        if default is ...:
            raise
        return default


def walk_files(path: str | os.PathLike) -> Iterator[tuple[str, Path]]:
    """(relative posix path, path) of every regular file below a directory, sorted; hidden names are left out.

    Hidden files are bookkeeping of tools (``.git``, ``.cache``, ``.gitattributes``), never content of a model or dataset.
    """
    base = Path(path)
    found = []
    for root, dirs, files in os.walk(base, followlinks=True):
        dirs[:] = sorted(d for d in dirs if not d.startswith("."))
        for name in files:
            if not name.startswith("."):
                full = Path(root) / name
                found.append((full.relative_to(base).as_posix(), full))
    return iter(sorted(found))


def tree_digest(path: str | os.PathLike) -> str:
    """Digest of a directory: sha256 over the sorted lines ``sha256 relpath``. Names and contents count, times and modes do not."""
    lines = [f"{sha256_file(full)} {rel}\n" for rel, full in walk_files(path)]
    return sha256_text("".join(lines))


def stat_signature(path: str | os.PathLike) -> str:
    """Cheap fingerprint of a file or directory: names, sizes and modification times, no content read."""
    path = Path(path)
    entries = [(path.name, path)] if path.is_file() else walk_files(path)
    lines = []
    for rel, full in entries:
        info = full.stat()
        lines.append(f"{rel} {info.st_size} {info.st_mtime_ns}\n")
    return sha256_text("".join(lines))
