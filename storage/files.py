"""Small file primitives every other module leans on: canonical JSON, digests, atomic writes.

A digest here is always a lower-case hexadecimal sha256. A write here is always
"temporary file in the same directory, fsync, rename, fsync of the directory", so a
reader sees the old content or the new content and never a part of it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import resource
import shutil
import sqlite3
import stat
import uuid
from pathlib import Path
from typing import Any, Iterator

CHUNK = 1 << 20


FULL = (errno.ENOSPC, errno.EDQUOT)
# of libraries with errors of their own
FULL_TEXTS = (
    "no space left on device",
    "disk quota exceeded",
    "database or disk is full",
    "pytorchstreamwriter failed writing",
)
FEW_FILES = 16  # inodes: what is being written and was taken back may be free again


def refusal(error: BaseException) -> str | None:
    """What the file system refused (a full disk or quota, a file size limit, a read-only place, missing rights), as one
    sentence with what to do; None where neither ``error`` nor what it was raised from is such a refusal."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        if (found := _refusal(error)) is not None:
            return found
        error = error.__cause__ or error.__context__
    return None


def _refusal(error: BaseException) -> str | None:
    number = error.errno if isinstance(error, OSError) else None
    free, files, writable, place = _room(error)
    text, again = str(error).lower(), "then give the same command again: it goes on where it stopped"
    sqlite = "disk i/o error" in text or "unable to open database file" in text  # of its shared files, of its journal
    if number in FULL or any(one in text for one in FULL_TEXTS) or (sqlite and (free < 2**20 or files < FEW_FILES)):
        if files < FEW_FILES and free >= 2**20:
            return (
                f"the file system of {place} can hold no more files ({files:.0f} inodes free, though {free / 2**20:.1f}"
                f" MiB); remove files (`posttrain doctor` says what there is), {again}"
            )
        return (
            f"the disk is full ({free / 2**20:.1f} MiB free at {place}); make room (`posttrain doctor` says what takes"
            f" it), {again}"
        )
    if (
        number == errno.EFBIG
        or "file too large" in text
        or ("disk i/o error" in text and resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY)
    ):
        return (
            f"a file grew beyond the size that this process may write; raise the limit (`ulimit -f unlimited`), {again}"
        )
    where = error.filename if isinstance(error, OSError) else None
    if number == errno.EROFS or "read-only file system" in text or ("readonly database" in text and not writable):
        return (
            f"{where or place} lies on a read-only file system; make it writable (after an error of the disk: check it"
            f" first, fsck), {again}; or set POSTTRAIN_HOME to a directory that is"
        )
    # without a file it may be a signal or a socket that was refused
    if number in (errno.EACCES, errno.EPERM) and where or "readonly database" in text:
        return (
            f"{where or f'a database in {place}'} may not be read or written by this user; change its owner or mode"
            " (`chmod -R u+rwX`; for users of one group, its owner, with the state directory for HOME: `chgrp -R GROUP"
            " HOME; chmod -R g+rwX HOME; find HOME -type d -exec chmod g+s {} +`), or set POSTTRAIN_HOME to a directory"
            " of your own"
        )
    return None


def _room(error: BaseException) -> tuple[float, float, bool, Path]:
    """(free bytes, free inodes, whether it may be written to, directory) of where the error came from: of the file that
    it names, else the state directory.
    """
    path = Path(getattr(error, "filename", None) or os.environ.get("POSTTRAIN_HOME") or ".posttrain").absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    try:
        found = os.statvfs(path)
        # no number of files: they are not limited
        return (
            found.f_bavail * found.f_frsize,
            found.f_favail if found.f_files else math.inf,
            not found.f_flag & os.ST_RDONLY,
            path,
        )
    except OSError:
        return math.inf, math.inf, True, path


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
        return json.dumps(
            obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_refuse
        )
    except ValueError as error:
        if "Out of range float" in str(error):
            raise ValueError("NaN and infinity cannot be hashed; write a finite number or null instead") from None
        raise


def _check_keys(obj: Any) -> None:
    if isinstance(obj, dict):
        for key, value in obj.items():
            if not isinstance(key, str):
                raise TypeError(
                    f"mapping key {key!r} is a {type(key).__name__}; only string keys can be hashed, write {str(key)!r}"
                )
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


def umask() -> int:
    """The bits that this process's new files lack."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))
    except (OSError, StopIteration):  # not Linux: there is no other way than to set it for a moment
        found = os.umask(0o077)
        os.umask(found)
        return found


def fsync_file(path: str | os.PathLike) -> None:
    """Flush one file's content to the device. One that its library made for its owner alone (safetensors does) gets the
    mode that files of this process have.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        mode, usual = stat.S_IMODE(os.fstat(fd).st_mode), 0o666 & ~umask()
        if mode == 0o600 != usual:
            with contextlib.suppress(OSError):  # another user's
                os.fchmod(fd, usual)
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


def read_text(path: str | os.PathLike, newline: str | None = None) -> str:
    """A text file that a person wrote, in UTF-8 with or without its mark at the start; ``newline`` as of `open`. Raises
    ValueError for any other encoding.
    """
    with open(path, encoding="utf-8-sig", newline=newline) as handle:
        try:
            return handle.read()
        except UnicodeDecodeError as error:
            byte = f"byte 0x{error.object[error.start]:02x} at position {error.start}"
            raise ValueError(f"it is not in UTF-8 ({byte}); save it in that encoding") from None


def rebased(value: Any, was: str, now: str) -> Any:
    """A JSON value whose texts that are the directory ``was``, or lie in it, name ``now`` in its place."""
    if isinstance(value, dict):
        return {key: rebased(one, was, now) for key, one in value.items()}
    if isinstance(value, list):
        return [rebased(one, was, now) for one in value]
    inside = isinstance(value, str) and (value + "/").startswith(was + "/")
    return now + value[len(was) :] if inside else value


def database_damage(path: str | os.PathLike) -> str | None:
    """What SQLite finds wrong with a database file, read in full and not changed; None where it is whole, missing, or
    locked.
    """
    if not Path(path).is_file():
        return None
    try:
        with contextlib.closing(
            sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro", uri=True, timeout=10)
        ) as database:
            (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
            return None if found == "ok" else found.splitlines()[-1]
    except sqlite3.OperationalError:  # locked, or a directory that may not be written to
        return None
    except sqlite3.DatabaseError as error:  # not a database, a malformed image
        return str(error)


def walk_files(path: str | os.PathLike) -> Iterator[tuple[str, Path]]:
    """(relative posix path, path) of every regular file below a directory, sorted; hidden names are left out.

    Hidden files are bookkeeping of tools (``.git``, ``.cache``, ``.gitattributes``), never content of a model or
    dataset.
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


def link_tree(source: Path, target: Path) -> None:
    """Copy a directory by hard links (by bytes across file systems); ``target`` may be there already."""

    def copy(a: str, b: str) -> None:
        try:
            os.link(os.path.realpath(a), b)  # a hub's cache is made of symbolic links
        except OSError:
            shutil.copy2(a, b)

    shutil.copytree(source, target, copy_function=copy, dirs_exist_ok=True)


def tree_digest(path: str | os.PathLike) -> str:
    """Digest of a directory: sha256 over the sorted lines ``sha256 relpath``. Names and contents count, times and modes
    do not.
    """
    lines = [f"{sha256_file(full)} {rel}\n" for rel, full in walk_files(path)]
    return sha256_text("".join(lines))


def stat_signature(path: str | os.PathLike, *, changes: bool = False) -> str:
    """Cheap fingerprint of a file or directory: names, sizes and modification times, no content read. changes: also
    which files they are and when they last changed in any way, which copies that keep modification times (``cp -p``,
    ``rsync -a``, archives) cannot hide."""
    path = Path(path)
    entries = [(path.name, path)] if path.is_file() else walk_files(path)
    lines = []
    for rel, full in entries:
        info = full.stat()
        lines.append(
            f"{rel} {info.st_size} {info.st_mtime_ns}"
            + (f" {info.st_ino} {info.st_ctime_ns}" if changes else "")
            + "\n"
        )
    return sha256_text("".join(lines))
