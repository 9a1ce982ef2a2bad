"""A stage's curves as it left them on disk, and as the points that MLflow is told of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Iterator

from storage.mlflow_text import curve_name, numbers_of, safe_key
from storage.outbox import Doc, here


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Complete, readable lines of a JSON-lines file (a line that is just being written is left for later)."""
    try:
        raw = path.read_bytes()
    except OSError:
        return [], 0
    lines = []
    for line in raw[: raw.rfind(b"\n") + 1].splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            lines.append({"step": 0, "metrics": {}})
    return lines, len(lines)


def curve_files(d: Doc) -> tuple[Path, Path]:
    """Where a stage's curves are: those of what it computes, and of the clock."""
    folder = Path(d["workdir"])
    return Path(d.get("metrics_file") or folder / "metrics.jsonl"), Path(d.get("perf_file") or folder / "perf.jsonl")


def rows_of(d: Doc, lines: int) -> Iterator[tuple[str, float, int]]:
    """(name in MLflow, value, step) of a stage's curves: the first ``lines`` of what it computed, all of the clock."""
    metrics, perf = curve_files(here(d))
    for path, named, most in ((metrics, curve_name, lines), (perf, "perf/{}".format, None)):
        for line in read_lines(path)[0][:most]:
            for name, value in numbers_of(line["metrics"]).items():
                yield safe_key(named(name)), value, int(line["step"])


def batches(path: Path, start: int, sending: dict[str, Any] | None, size: int = 300) -> Iterator[list[dict[str, Any]]]:
    lines, count = read_lines(path)
    at = start
    if sending and at < sending["upto"] <= count:
        yield lines[at : sending["upto"]]
        at = sending["upto"]
    elif sending:
        return  # the announced lines were undone with their checkpoint; they come again, the same
    while at < count:
        yield lines[at : at + size]
        at += size
