"""Near duplicates of an ingest run, on disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

from stages.ingestion import curation
from storage.schema import normalise_text, prompt_id


class NearDuplicates:
    """Near duplicates of prompts in flat memory: MinHash bands find candidates, exact Jaccard decides.

    group=False: `first(seq, text)` is False for a near copy of an earlier text. group=True: `join`
    every text, `finish`, then `cluster_of` gives the shared group id of a cluster.
    """

    def __init__(self, threshold: float, path: Path, *, group: bool, keep_below: int | None = None):
        import sqlite3

        self.threshold, self.group, self.path = threshold, group, path
        self.minhash = curation.MinHash(threshold)
        if keep_below is None and not group:
            path.unlink(missing_ok=True)
        self.db = sqlite3.connect(path, isolation_level=None)
        self.db.execute("PRAGMA synchronous=FULL")
        self.db.execute("PRAGMA cache_size=-32768")
        self.db.execute("CREATE TABLE IF NOT EXISTS done (x INTEGER)")
        self.complete = group and self.db.execute("SELECT count(*) FROM done").fetchone()[0] > 0
        if group and not self.complete:
            for table in ("bands", "texts"):
                self.db.execute(f"DROP TABLE IF EXISTS {table}")
        self.db.execute(
            "CREATE TABLE IF NOT EXISTS bands (key BLOB, seq INTEGER, PRIMARY KEY (key, seq)) WITHOUT ROWID"
        )
        # count: how often the text came; name: the smallest group id of the cluster that it is the root of
        self.db.execute(
            "CREATE TABLE IF NOT EXISTS texts (seq INTEGER PRIMARY KEY, digest BLOB, text TEXT, parent INTEGER, count"
            " INTEGER, name TEXT)"
        )
        self.db.execute("CREATE INDEX IF NOT EXISTS by_digest ON texts (digest)")
        if keep_below is not None and not group:
            self.db.execute("DELETE FROM bands WHERE seq >= ?", (keep_below,))
            self.db.execute("DELETE FROM texts WHERE seq >= ?", (keep_below,))
        self.db.execute("BEGIN")

    @staticmethod
    def _digest(text: str) -> bytes:
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def _matches(self, text: str, items: set, keys: list[bytes]) -> list[int]:
        known = {}
        for key in keys:
            for (seq,) in self.db.execute("SELECT seq FROM bands WHERE key = ? LIMIT 50", (key,)):
                known[seq] = None
        out = []
        for seq in sorted(known):
            other = self.db.execute("SELECT text FROM texts WHERE seq = ?", (seq,)).fetchone()[0]
            if curation.jaccard(items, curation.shingles(other)) >= self.threshold:
                out.append(seq)
        return out

    def _add(self, seq: int, text: str, keys: list[bytes]) -> None:
        self.db.execute(
            "INSERT OR REPLACE INTO texts VALUES (?, ?, ?, ?, 1, ?)",
            (seq, self._digest(text), text, seq, group_id(text)),
        )
        self.db.executemany("INSERT OR IGNORE INTO bands VALUES (?, ?)", [(key, seq) for key in keys])

    def first(self, seq: int, text: str) -> bool:
        """Remember a text; False if it is a near copy of one that was remembered before.

        Texts that are equal after normalisation are the same prompt, not near copies of it.
        """
        text = normalise_text(text)
        items = curation.shingles(text)
        if not items or self.db.execute("SELECT 1 FROM texts WHERE digest = ?", (self._digest(text),)).fetchone():
            return True
        keys = self.minhash.keys(items)
        if self._matches(text, items, keys):
            return False
        self._add(seq, text, keys)
        return True

    def _root(self, seq: int) -> int:
        while (parent := self.db.execute("SELECT parent FROM texts WHERE seq = ?", (seq,)).fetchone()[0]) != seq:
            seq = parent
        return seq

    def join(self, seq: int, text: str) -> None:
        """Add a text to the clusters (connected components); texts that are equal after normalisation are one."""
        text = normalise_text(text)
        if (
            not text
            or self.db.execute("UPDATE texts SET count = count + 1 WHERE digest = ?", (self._digest(text),)).rowcount
        ):
            return
        items = curation.shingles(text)
        keys = self.minhash.keys(items) if items else []
        roots = (
            sorted({self._root(match) for match in self._matches(text, items, keys)} | {seq})
            if self._add(seq, text, keys) is None
            else []
        )
        for root in roots[1:]:
            self.db.execute("UPDATE texts SET parent = ? WHERE seq = ?", (roots[0], root))
        if len(roots) > 1:
            name = min(self.db.execute("SELECT name FROM texts WHERE seq = ?", (root,)).fetchone()[0] for root in roots)
            self.db.execute("UPDATE texts SET name = ? WHERE seq = ?", (name, roots[0]))

    def finish(self) -> None:
        """The clusters are complete."""
        self.db.execute("INSERT INTO done VALUES (1)")
        self.commit()

    def cluster_of(self, text: str) -> str | None:
        """Group id of a text's cluster, or None if it is alone."""
        found = self.db.execute(
            "SELECT seq FROM texts WHERE digest = ?", (self._digest(normalise_text(text)),)
        ).fetchone()
        if found is None:
            return None
        root = self._root(found[0])
        count, name = self.db.execute("SELECT count, name FROM texts WHERE seq = ?", (root,)).fetchone()
        alone = (
            root == found[0]
            and count == 1
            and self.db.execute("SELECT count(*) FROM texts WHERE parent = ?", (root,)).fetchone()[0] == 1
        )
        return None if alone else name

    def clusters(self) -> int:
        """Number of clusters of texts that differ."""
        return self.db.execute("SELECT count(DISTINCT parent) FROM texts WHERE parent != seq").fetchone()[0]

    def commit(self) -> None:
        """Make everything permanent."""
        self.db.execute("COMMIT")
        self.db.execute("BEGIN")

    def close(self) -> None:
        """Close and delete the scratch file."""
        self.db.close()
        self.path.unlink(missing_ok=True)


def group_id(text: str) -> str | None:
    """Id of the rows with this normalised text: the prompt id of a prompt that says just this; None (the row's own
    prompt id) without text.
    """
    return prompt_id([{"role": "user", "content": text}]) if text else None
