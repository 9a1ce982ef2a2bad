"""Work directories: what is left of a stage in ``HOME/work/<stage key>``.

While it runs: checkpoints, rollouts, half-written outputs. Once it has finished: its log, curves and reports, which
MLflow shows for every run that reuses the result. An unfinished stage keeps everything, since the same command
continues there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from storage import home, leases, records, store
from storage.files import atomic_write_json, read_json

KEPT = ("SPEC.json", "stage.log", "metrics.jsonl", "perf.jsonl", "reports")
PROGRESS = "progress.json"  # the last progress event of a stage that has not finished
ATTEMPTS = "attempts.json"  # how often it was begun, for whom last, and of what that attempt failed


def tidy(directory: Path) -> None:
    """Remove what a finished stage needs no more."""
    for entry in directory.iterdir():
        if entry.name in KEPT:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------- while a stage runs


def begin(directory: Path, run: str | None, name_as: str | None) -> int:
    """Note an attempt, of the flow run ``run`` or of a stage by itself; how many there were with it."""
    count = int(read_json(directory / ATTEMPTS, {"count": 0})["count"]) + 1
    noted = {"count": count, "run": run, "name_as": name_as, "user": records.user()}
    atomic_write_json(directory / ATTEMPTS, noted)
    return count


def failed(directory: Path, error: str) -> None:
    """Note of what the present attempt failed."""
    atomic_write_json(directory / ATTEMPTS, read_json(directory / ATTEMPTS, {"count": 1}) | {"error": error[:4000]})


def note_progress(directory: Path, event: dict[str, Any]) -> None:
    """Keep a stage's last progress event for whoever looks (no fsync: it is for the eye only)."""
    with contextlib.suppress(OSError):
        new = directory / f".{PROGRESS}.tmp"
        new.write_text(json.dumps({name: event.get(name) for name in ("done", "total", "message")}))
        os.replace(new, directory / PROGRESS)


def standing(key: str) -> dict[str, Any] | None:
    """How a stage stands that has no result: {stage, module, key, status, error, run, name_as, user, started, seconds,
    progress, answers, step, metrics, metric_steps, config, seed, inputs, device, devices, workdir, log}; None where no
    process of it was ever started.

    status: ``running``; ``waiting`` (for a GPU slot, or until it is published); ``stopped`` (killed or failed). error: of
    what the last attempt failed, None where it was killed. run: the flow run that began it last, None of a stage by
    itself; user: whose attempt that was.
    started, seconds: of its last attempt, until now or until it was last seen doing something. progress: {done, total,
    message} in the stage's own unit, {} before the first. answers: of servers, which it will not ask for again. step, metrics, metric_steps: the last step that it logged, the
    newest value of every metric and the step of that.
    """
    directory = home.home() / "work" / key
    spec = read_json(directory / "SPEC.json", None)
    if spec is None:
        return None
    lease = home.home() / "leases" / f"stage-{key}.json"
    held = read_json(lease, None)
    status = "stopped" if not leases.alive(held, lease) else "running" if held.get("child") else "waiting"
    signs = [directory / name for name in ("SPEC.json", *KEPT[1:4], PROGRESS)]
    times = [path.stat().st_mtime for path in signs if path.exists()]
    rows = metric_rows(directory / "metrics.jsonl")
    attempt = read_json(directory / ATTEMPTS, {})
    return {
        "stage": spec["stage"].rpartition(".")[2],
        "module": spec["stage"],
        "key": key,
        "status": status,
        "error": attempt.get("error") if status == "stopped" else None,
        "run": attempt.get("run"),
        "name_as": attempt.get("name_as"),
        "user": attempt.get("user") or "",
        "started": times[0],
        "seconds": max(0.0, (max(times) if status == "stopped" else time.time()) - times[0]),
        "progress": read_json(directory / PROGRESS, {}),
        "answers": answers_kept(directory),
        "step": rows[-1]["step"] if rows else None,
        "metrics": {name: value for row in rows for name, value in row["metrics"].items()},
        "metric_steps": {name: row["step"] for row in rows for name in row["metrics"]},
        **{name: spec.get(name) for name in ("config", "seed", "inputs", "device", "devices")},
        "workdir": str(directory),
        "log": str(directory / "stage.log"),
    }


def answers_kept(directory: Path) -> int:
    """How many answers of servers a stage has kept: those that no checkpoint of it holds (files ``STEP-RANK.jsonl``),
    and those of stages that keep all.
    """
    done = max((int(path.name[5:]) for path in (directory / "checkpoints").glob("step-*")), default=0)
    count = 0
    for path in (directory / "answers").glob("*.jsonl"):
        step = path.stem.partition("-")[0]
        if not step.isdigit() or int(step) >= done:
            with contextlib.suppress(OSError), open(path, "rb") as file:
                # a line without one is of a request that got none, and is asked again
                count += sum(line.endswith(b"}\n") and b'"answer": ' in line for line in file)
    return count


def metric_rows(file: Path) -> list[dict[str, Any]]:
    """Rows {step, metrics} of a metrics file, without a last line that is being written or was cut."""
    rows = []
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text(encoding="utf-8").splitlines():
            rows.append(json.loads(line))
    return rows


def unfinished(run: records.RunRecord) -> dict[str, dict[str, Any]]:
    """label -> :func:`standing` of what a flow run has begun and not finished. Of a stage whose process was not started
    only {stage, key, status, started, seconds} are there: it waits for its turn, or was stopped before it came.
    """
    found = {}
    for label, begun in run.data.get("begun", {}).items():
        seconds = max(0.0, (run.data.get("finished") or time.time()) - begun["started"])
        status = "waiting" if run.status == "RUNNING" else "stopped"
        found[label] = {**begun, "status": status, "seconds": seconds} | (standing(begun["key"]) or {})
        found[label]["stage"] = begun["stage"]
        if status == "waiting" and found[label]["status"] == "stopped":  # its last attempt; this one waits for its turn
            found[label] |= {"status": "waiting", "started": begun["started"], "seconds": seconds}
    return found


def match(prefix: str) -> dict[str, Any] | None:
    """The one unfinished stage whose key starts with ``prefix``, as :func:`standing`; None for none, StoreError when
    several do.
    """
    found = [key for key in _begun() if key.startswith(prefix)]
    if len(found) > 1:
        raise store.StoreError(
            f"stage key {prefix} is ambiguous; write more digits: {', '.join(key[:16] for key in found[:5])}"
        )
    return standing(found[0]) if found else None


def _begun() -> list[str]:
    """Keys of the stages of which a process was started and that have no result."""
    keys = (path.parent.name for path in (home.home() / "work").glob("*/SPEC.json"))
    return [key for key in keys if not records.record_path(key).exists()]


def without_result() -> list[dict[str, Any]]:
    """Every stage that runs, waits, failed or was killed, as :func:`standing`, the newest first."""
    found = [one for key in _begun() if (one := standing(key))]
    return sorted(found, key=lambda one: -one["started"])


def running() -> list[dict[str, Any]]:
    """Every stage that runs or waits now, as :func:`standing`."""
    found = [standing(path.stem.removeprefix("stage-")) for path in (home.home() / "leases").glob("stage-*.json")]
    return sorted((one for one in found if one and one["status"] != "stopped"), key=lambda one: one["started"])


# ------------------------------------------------------------------------------------------------------------- tidying up


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


#: What is written beside its place before it gets its name.
PARTS = (
    *(
        f"{folder}/.*.tmp"
        for folder in ("leases", "outbox", "outbox/done", "records", "registry", "runs", "datasets/*")
    ),
    *("models/.tmp-*", "datasets/*/.tmp-*", "mlartifacts/*/models/*/.*.tmp"),
)


def parts(days: float = 1.0) -> list[Path]:
    """What processes that were killed while they published it, or copied a model, have left, so long ago that nobody
    writes to it.
    """
    found = []
    for path in (path for pattern in PARTS for path in home.home().glob(pattern)):
        with contextlib.suppress(FileNotFoundError):  # it has just got its name
            if time.time() - max(path.lstat().st_mtime, _touched(path)) > days * 86400:
                found.append(path)
    return found


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
