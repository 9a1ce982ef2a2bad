"""Runs the real ingest stage in this process, without Prefect or MLflow."""

from __future__ import annotations

import json
from pathlib import Path

from stages.harness import execute
from storage.datasets import open_dataset

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"


class Result:
    """Outputs of one ingest: rows, quarantine rows, counts, warnings, reports."""

    def __init__(self, workdir: Path, result: dict | None = None):
        self.workdir, self.result = workdir, result or {}
        self.data = open_dataset(workdir / "out" / "data")
        self.quarantine = open_dataset(workdir / "out" / "quarantine")
        self.counts = self.data.manifest["counts"]

    @property
    def rows(self) -> list[dict]:
        return list(self.data.iter_rows())

    @property
    def refused(self) -> list[dict]:
        return list(self.quarantine.iter_rows())

    def codes(self) -> dict[int, list[str]]:
        """Line number -> codes."""
        return {row["line_no"]: row["codes"] for row in self.refused}

    def check(self) -> "Result":
        """The account adds up and the parts are what the manifest says."""
        self.data.verify()
        self.quarantine.verify()
        assert self.counts["rows_in"] == self.counts["rows_kept"] + self.counts["rows_quarantined"]
        assert self.quarantine.num_rows == self.counts["rows_quarantined"]
        assert self.data.num_rows == self.counts["rows_out"]
        return self


def ingest(path, workdir: Path, inputs: dict | None = None, emit=None, **config) -> Result:
    """Run the stage on `path`; config as keyword arguments."""
    given = {"data": {"kind": "file", "path": str(path)}}
    given |= {name: {"kind": "file", "path": str(item)} for name, item in (inputs or {}).items()}
    spec = {
        "stage": "ingest",
        "key": "test",
        "config": config,
        "seed": 0,
        "device": "cpu",
        "inputs": given,
        "workdir": str(workdir),
    }
    return Result(workdir, execute(spec, emit)).check()


def write_lines(path: Path, rows) -> Path:
    """JSON Lines file of dicts, or of raw strings and bytes."""
    with open(path, "wb") as out:
        for row in rows:
            line = (
                row
                if isinstance(row, bytes)
                else row.encode("utf-8", "surrogatepass")
                if isinstance(row, str)
                else json.dumps(row).encode()
            )
            out.write(line + b"\n")
    return path


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}
