"""Row keys and row groups on disk: memory stays flat whatever the number of rows.

One SQLite file in the stage's work directory. It commits together with the stage's checkpoints; on
resume everything at or after the checkpoint's input position is forgotten, so a killed ingest
repeats exactly what it had not finished.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Iterator

import orjson

ROWS_PER_SEQ = 4096  # room for the rows that one input row expands to


def of_group(rows: int, gid: int) -> int:
    """Position of a group's keys: behind all `rows` input rows, in the order of groups."""
    return rows + 1 + gid


class SeenRows:
    """First-seen keys (16 bytes each) and staged rows by group.

    path: the file, removed first unless `resume_at` (the input position of the checkpoint) is given
    and the file covers it; `self.valid` is False where a wanted resume was impossible. after_group:
    the last group that was done, where the checkpoint is one of the second pass over groups, whose
    keys come at :func:`of_group`.
    """

    def __init__(self, path: Path, resume_at: int | None = None, after_group: int | None = None):
        self.path, self.valid = Path(path), True
        if resume_at is None:
            self._remove()
        self.db = self._connect()
        if resume_at is not None:
            covered = self._covered()
            if covered is None or covered < resume_at:
                self.db.close()
                self._remove()
                self.valid, self.db = False, self._connect()
            else:
                keys = resume_at if after_group is None else of_group(resume_at, after_group + 1)
                for table, first in (
                    ("seen", keys),
                    ("splits", keys),
                    ("labels", resume_at),
                    ("groups", resume_at * ROWS_PER_SEQ),
                    ("staged", resume_at * ROWS_PER_SEQ),
                ):
                    self.db.execute(f"DELETE FROM {table} WHERE seq >= ?", (first,))
        self._insert = "INSERT OR IGNORE INTO seen VALUES (?, ?)"

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, isolation_level=None)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.execute("PRAGMA cache_size=-32768")  # 32 MiB, whatever the number of rows
        db.execute("CREATE TABLE IF NOT EXISTS seen (key BLOB PRIMARY KEY, seq INTEGER) WITHOUT ROWID")
        db.execute("CREATE TABLE IF NOT EXISTS groups (key BLOB PRIMARY KEY, gid INTEGER, seq INTEGER) WITHOUT ROWID")
        db.execute(
            "CREATE TABLE IF NOT EXISTS staged (gid INTEGER, seq INTEGER, row BLOB, "
            "PRIMARY KEY (gid, seq)) WITHOUT ROWID"
        )
        db.execute("CREATE TABLE IF NOT EXISTS splits (key BLOB PRIMARY KEY, split TEXT, seq INTEGER) WITHOUT ROWID")
        db.execute(
            "CREATE TABLE IF NOT EXISTS labels (item BLOB, annotator TEXT, category TEXT, number REAL, slices BLOB, seq"
            " INTEGER, PRIMARY KEY (item, annotator)) WITHOUT ROWID"
        )
        db.execute("CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value INTEGER)")
        db.execute("BEGIN")
        return db

    def _covered(self) -> int | None:
        found = self.db.execute("SELECT value FROM meta WHERE name = 'position'").fetchone()
        return found[0] if found else None

    def _remove(self) -> None:
        for suffix in ("", "-wal", "-shm", "-journal"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)

    def add(self, key: bytes, seq: int) -> bool:
        """Remember `key` (16 bytes) for input position `seq`; False if it was there already."""
        return self.db.execute(self._insert, (key, seq)).rowcount == 1

    def has(self, key: bytes) -> bool:
        """True if `key` was added."""
        return self.db.execute("SELECT 1 FROM seen WHERE key = ?", (key,)).fetchone() is not None

    def any_of(self, key: bytes, other: bytes) -> bytes | None:
        """`key` if it was added, else `other` if that was, else None: one look-up for both."""
        found = self.db.execute("SELECT key FROM seen WHERE key IN (?, ?)", (key, other)).fetchall()
        return None if not found else key if (key,) in found else other

    def split_of(self, key: bytes, split: str, seq: int) -> str:
        """The split in which `key` was first put; `split` itself the first time."""
        self.db.execute("INSERT OR IGNORE INTO splits VALUES (?, ?, ?)", (key, split, seq))
        return self.db.execute("SELECT split FROM splits WHERE key = ?", (key,)).fetchone()[0]

    def stage(self, group: bytes, position: int, index: int, row: dict) -> None:
        """Put row `index` made of the input row at `position` aside; groups keep the order of their first row."""
        seq = position * ROWS_PER_SEQ + index
        self.db.execute("INSERT OR IGNORE INTO groups VALUES (?, ?, ?)", (group, seq, seq))
        gid = self.db.execute("SELECT gid FROM groups WHERE key = ?", (group,)).fetchone()[0]
        self.db.execute("INSERT OR REPLACE INTO staged VALUES (?, ?, ?)", (gid, seq, orjson.dumps(row)))

    def groups(self, after: int = -1) -> Iterator[tuple[int, list[tuple[int, dict]]]]:
        """(group number, [(input position, row)]) in order of first appearance, from `after` on."""
        current, rows = None, []
        cursor = self.db.execute("SELECT gid, seq, row FROM staged WHERE gid > ? ORDER BY gid, seq", (after,))
        for gid, seq, blob in cursor:
            if gid != current and rows:
                yield current, rows
                rows = []
            current = gid
            rows.append((seq, orjson.loads(blob)))
        if rows:
            yield current, rows

    def label(self, item: bytes, annotator: str, category: str, number: float, slices: dict, seq: int) -> None:
        """Remember what an annotator said of an item; the first time counts."""
        self.db.execute(
            "INSERT OR IGNORE INTO labels VALUES (?, ?, ?, ?, ?, ?)",
            (item, annotator, category, number, orjson.dumps(slices), seq),
        )

    def labels(self) -> Iterator[tuple[bytes, str, str, float, dict]]:
        """(item, annotator, category, number, slices) of all labels, those of an item together."""
        for *label, slices in self.db.execute(
            "SELECT item, annotator, category, number, slices FROM labels ORDER BY item, annotator"
        ):
            yield *label, orjson.loads(slices)

    def count_groups(self) -> int:
        """Number of groups staged."""
        return self.db.execute("SELECT count(*) FROM groups").fetchone()[0]

    def commit(self, position: int) -> None:
        """Make everything below input position `position` permanent."""
        self.db.execute("INSERT OR REPLACE INTO meta VALUES ('position', ?)", (position,))
        self.db.execute("COMMIT")
        self.db.execute("BEGIN")

    def close(self, remove: bool = True) -> None:
        """Close, and delete the file (the default: it is scratch)."""
        self.db.close()
        if remove:
            self._remove()
