"""What an ingest run counts, and the rows that it refuses."""

from __future__ import annotations

import contextlib
import json
from typing import Iterable

from stages.ingestion import rules
from stages.ingestion.sources import Record, canonical_bytes
from storage.schema import complete_row

SAMPLES_PER_CODE = 3

LONG_PROMPT = 50_000  # characters; a warning only

RAW_LIMIT = 1 << 20  # characters of a refused row that quarantine keeps


class Counts:
    """Everything that is counted; JSON-able, so that a checkpoint can hold it."""

    def __init__(self, state: dict | None = None):
        state = state or {}
        self.rows_in: int = state.get("rows_in", 0)
        self.rows_kept: int = state.get("rows_kept", 0)
        self.rows_quarantined: int = state.get("rows_quarantined", 0)
        self.rows_damaged: int = state.get("rows_damaged", 0)
        self.rows_out: int = state.get("rows_out", 0)
        self.rows_staged: int = state.get("rows_staged", 0)
        self.long_prompts: int = state.get("long_prompts", 0)
        self.codes: dict[str, int] = dict(state.get("codes", {}))
        self.samples: dict[str, list] = {key: list(value) for key, value in state.get("samples", {}).items()}
        # of each code what the first row with it says, in short
        self.first: dict[str, str] = dict(state.get("first", {}))
        self.dropped: dict[str, int] = dict(state.get("dropped", {}))
        self.formats: dict[str, str] = dict(state.get("formats", {}))
        self.damaged_files: dict[str, str] = dict(state.get("damaged_files", {}))
        self.native: dict[str, int] = dict(state.get("native", {}))
        self.labels: dict[str, int] = dict(state.get("labels", {}))
        # numbers seen as step labels, by file
        self.steps: dict[str, list[int]] = {key: list(value) for key, value in state.get("steps", {}).items()}
        self.scores_against: int = state.get("scores_against", 0)
        self.cut_prompts: int = state.get("cut_prompts", 0)
        # rows kept whose id an earlier row of their file has, and the first of them: [file, line, id]
        self.ids_shared: int = state.get("ids_shared", 0)
        self.id_shared: list = list(state.get("id_shared", ()))
        # rows with answers in files that were taken for prompts, by the format that these rows have
        self.answers_left: dict[str, int] = dict(state.get("answers_left", {}))
        self.reasoning: dict[str, int] = dict(state.get("reasoning", {}))

    def state(self) -> dict:
        """Plain values of all counts."""
        return dict(vars(self))

    def drop(self, reasons: dict[str, int]) -> None:
        """Rows that a conversion left out, by reason."""
        for reason, count in reasons.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + count

    def refused(self, source: str, record: Record, codes: list[str]) -> None:
        """A row that goes to quarantine; the first few places of each code are kept, and what the first row says."""
        self.rows_quarantined += 1
        self.rows_damaged += any(code not in rules.POLICY_CODES for code in codes)
        for code in codes:
            self.codes[code] = self.codes.get(code, 0) + 1
            if len(self.samples.setdefault(code, [])) < SAMPLES_PER_CODE:
                self.samples[code].append([source, record.line])
            if code not in self.first:
                self.first[code] = in_short(record)

    def told(self) -> str:
        """How far the run is, for its progress."""
        return f"{self.rows_in:,} rows, {self.rows_quarantined:,} in quarantine"


def in_short(record: Record) -> str:
    """What a refused row says on one line: its values, long texts cut, so that the last column is seen, too; at most 300
    characters.
    """
    row, raw = record.row, record.raw or b""
    if row is None:
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(raw)
    if isinstance(row, dict):
        cut = lambda value: value if len(text := _plain(value)) <= 40 else text[:40] + "…"
        raw = _plain({name: cut(value) for name, value in row.items()}).encode("utf-8", "backslashreplace")
    text = raw.decode("utf-8", "backslashreplace").strip()
    return text if len(text) <= 300 else text[:300] + "…"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def quarantine_row(source: str, record: Record, codes: Iterable[str], *, dataset: str, origin: str) -> dict:
    """A complete quarantine/1 row: where the refused one was, what it said (cut at RAW_LIMIT characters) and why it was
    refused.
    """
    raw = record.raw if record.raw is not None else canonical_bytes(record.row)
    text = raw.decode("utf-8", "backslashreplace")
    if len(text) > RAW_LIMIT:
        text = text[:RAW_LIMIT] + f"... ({len(text)} characters)"
    return complete_row(
        "quarantine/1",
        {"source_file": source, "line_no": record.line, "raw_json": text, "codes": list(codes), "stage": "ingest"},
        dataset=dataset,
        source=source,
        origin=origin,
    )
