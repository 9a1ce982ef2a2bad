"""Work directories: what is left of a stage in ``HOME/work/<stage key>``.

While it runs: checkpoints, rollouts, half-written outputs. Once it has finished: its log, curves and reports, which
MLflow shows for every run that reuses the result. An unfinished stage keeps everything, since the same command
continues there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

from storage import home, leases, records

KEPT = ("SPEC.json", "stage.log", "metrics.jsonl", "perf.jsonl", "reports")


def tidy(directory: Path) -> None:
    """Remove what a finished stage needs no more."""
    for entry in directory.iterdir():
        if entry.name in KEPT:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def usage() -> list[dict[str, Any]]:
    """Every work directory: {key, path, finished, busy, bytes, touched (time of the last write), spare (has more than
    KEPT)}.
    """
    found = []
    for directory in sorted(home.subdir("work").iterdir()):
        if not directory.is_dir():
            continue
        key = directory.name
        found.append(
            {
                "key": key,
                "path": directory,
                "finished": records.read(key) is not None,
                "busy": leases.holder(home.leases_dir() / f"stage-{key}.json") is not None,
                "bytes": size_of(directory),
                "touched": _touched(directory),
                "spare": any(entry.name not in KEPT for entry in directory.iterdir()),
            }
        )
    return found


def clean(days: float) -> tuple[int, int]:
    """Remove the work directories of unfinished stages that nobody wrote to for ``days``: (directories, bytes)
    removed.
    """
    removed = 0, 0
    for one in usage():
        if one["finished"] or one["busy"] or time.time() - one["touched"] <= days * 86400:
            continue
        with contextlib.suppress(leases.LeaseBusy):  # one that has been started meanwhile
            with leases.acquire(f"stage-{one['key']}", wait=False):
                if records.read(one["key"]) is None and time.time() - _touched(one["path"]) > days * 86400:
                    shutil.rmtree(one["path"], ignore_errors=True)
                    removed = removed[0] + 1, removed[1] + one["bytes"]
    return removed


def _touched(directory: Path) -> float:
    return max((stat.st_mtime for stat in _stats(directory)), default=directory.stat().st_mtime)


def size_of(directory: Path) -> int:
    """Bytes of all files below a directory; files that are linked several times count once."""
    return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in _stats(directory)}.values())


def _stats(directory: Path) -> list[os.stat_result]:
    found = []
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                found.append(os.lstat(os.path.join(folder, name)))
            except OSError:  # a running stage removes files meanwhile
                continue
    return found
