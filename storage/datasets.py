"""Datasets: a directory of Parquet parts plus `manifest.json`, written last.

A directory without a manifest is unfinished and `open_dataset` refuses it. Parts appear by rename,
so every `part-NNNNN.parquet` on disk is complete: a writer that was killed goes on after the last
one. The same rows flushed at the same places give the same bytes; no clock enters a part or a digest.

Paths may be local or any fsspec URL (`s3://bucket/name`, `memory://name`); a URL needs the fsspec
package of that store.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.files import atomic_write_bytes, canonical_json, fsync_dir, sha256_text
from storage.schema import MESSAGES, RowIdSorter, SchemaError, clean_message, complete_row, schema_of

__all__ = ["Dataset", "DatasetError", "DatasetWriter", "complete_row", "open_dataset", "write_dataset"]

_PART = re.compile(r"part-(\d{5,})\.parquet$")
MANIFEST = "manifest.json"
_BATCH_ROWS = 1_000  # rows turned into Arrow at a time
_GROUP_BYTES = 32 << 20  # a row group is closed at this size ...
_GROUP_ROWS = 10_000  # ... or at this number of rows
_FILE_BYTES = 1 << 30  # a file of an exported dataset is closed at this size, before compression


class DatasetError(Exception):
    """A dataset directory that is missing, unfinished, damaged or does not fit its schema."""


class _LocalDir:
    """The few file operations a dataset needs, on a local directory."""

    def __init__(self, path: str):
        self.path = Path(path)

    def make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        return sorted(entry.name for entry in self.path.iterdir()) if self.path.is_dir() else []

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def open(self, name: str):
        return pa.memory_map(str(self.path / name))

    def stream(self, name: str):
        return open(self.path / name, "rb")

    def write(self, name: str, data: bytes) -> None:
        atomic_write_bytes(self.path / name, data)

    def create(self, name: str):
        return open(self.path / f".{name}.tmp", "wb")

    def finish(self, name: str, handle) -> None:
        handle.flush()
        os.fsync(handle.fileno())
        handle.close()
        os.replace(self.path / f".{name}.tmp", self.path / name)
        fsync_dir(self.path)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def clear(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class _RemoteDir:
    """The same operations on an fsspec file system, whose objects appear when they are closed."""

    def __init__(self, url: str):
        try:
            import fsspec

            self.fs, self.root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise DatasetError(
                f"cannot open {url}: {error}; install the fsspec package of that store "
                "(for example s3fs for s3://) or give a local path"
            ) from None
        self.root = self.root.rstrip("/")

    def make(self) -> None:
        self.fs.makedirs(self.root, exist_ok=True)

    def names(self) -> list[str]:
        self.fs.invalidate_cache()
        if not self.fs.exists(self.root):
            return []
        return sorted(entry.rstrip("/").rsplit("/", 1)[-1] for entry in self.fs.ls(self.root, detail=False))

    def read(self, name: str) -> bytes:
        return self.fs.cat_file(f"{self.root}/{name}")

    def open(self, name: str):
        return self.fs.open(f"{self.root}/{name}", "rb")

    stream = open

    def write(self, name: str, data: bytes) -> None:
        self.fs.pipe_file(f"{self.root}/{name}", data)

    def create(self, name: str):
        return self.fs.open(f"{self.root}/{name}", "wb")

    def finish(self, name: str, handle) -> None:
        handle.close()

    def remove(self, name: str) -> None:
        if self.fs.exists(f"{self.root}/{name}"):
            self.fs.rm_file(f"{self.root}/{name}")

    def clear(self) -> None:
        if self.fs.exists(self.root):
            self.fs.rm(self.root, recursive=True)


def _directory(path: str | os.PathLike) -> _LocalDir | _RemoteDir:
    text = os.fspath(path)
    return (
        _RemoteDir(text)
        if "://" in text and not text.startswith("file://")
        else _LocalDir(text.removeprefix("file://"))
    )


def _part_name(index: int) -> str:
    return f"part-{index:05d}.parquet"


def _hash_stream(handle) -> str:
    digest = hashlib.sha256()
    with handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _digest_of(kind: str, parts: list[dict]) -> str:
    """Dataset digest: sha256 over the kind and the part list (file, rows, sha256)."""
    return sha256_text(
        canonical_json(
            {
                "kind": kind,
                "parts": [{"file": part["file"], "rows": part["rows"], "sha256": part["sha256"]} for part in parts],
            }
        )
    )


class DatasetWriter:
    """Writes a dataset directory part by part, exactly once.

    path: directory or fsspec URL. name, kind: written to the manifest; `schema` replaces the schema
    of `kind` (needed for kinds outside `SCHEMAS`). parents: refs or digests of what it was made from.
    rows_per_part: a part closes itself after that many rows; `flush()` closes it earlier.
    resume: keep the complete parts found on disk (default) or start empty.
    """

    def __init__(
        self,
        path,
        name: str,
        kind: str,
        *,
        schema: pa.Schema | None = None,
        parents: Iterable[str] = (),
        meta: dict | None = None,
        rows_per_part: int = 50_000,
        resume: bool = True,
    ):
        self.path, self.name, self.kind = os.fspath(path), name, kind
        self.schema = schema if schema is not None else schema_of(kind)
        self.parents, self.meta, self.rows_per_part = list(parents), dict(meta or {}), rows_per_part
        self._required = [field.name for field in self.schema if not field.nullable]
        self._dir = _directory(path)
        if not resume:
            self._dir.clear()
        self._dir.make()
        names = self._dir.names()
        self._dir.remove(MANIFEST)  # an open writer means: not finished
        for leftover in (item for item in names if item.endswith(".tmp")):
            self._dir.remove(leftover)
        present = {int(match.group(1)) for item in names if (match := _PART.match(item))}
        self.parts: list[str] = []
        while len(self.parts) in present:
            self.parts.append(_part_name(len(self.parts)))
        for index in sorted(present):
            if index >= len(self.parts):  # a gap: nothing after it can be trusted
                self._dir.remove(_part_name(index))
        self._rows: list[dict] = []
        self._batches: list[pa.RecordBatch] = []
        self._batch_rows = self._batch_bytes = self._part_rows = 0
        self._handle = self._parquet = None

    # -- rows -------------------------------------------------------------------------------------
    def write(self, rows: Iterable[dict]) -> None:
        """Add rows: dicts of column name -> value, missing nullable columns may stay away.

        Raises SchemaError if a value does not fit its column or a required column is null.
        """
        for row in rows:
            self._rows.append(row)
            if len(self._rows) >= _BATCH_ROWS or self._part_rows + len(self._rows) >= self.rows_per_part:
                self._convert()
                if self._part_rows >= self.rows_per_part:
                    self.flush()

    def write_table(self, table: pa.Table) -> None:
        """Add a table whose columns fit the schema (missing nullable columns become null)."""
        self._convert()
        columns = []
        for field in self.schema:
            if field.name in table.column_names:
                columns.append(table[field.name].cast(field.type))
            else:
                columns.append(pa.chunked_array([pa.nulls(table.num_rows, field.type)], type=field.type))
        table = pa.table(columns, schema=self.schema)
        start = 0
        while start < table.num_rows:
            take = min(self.rows_per_part - self._part_rows, table.num_rows - start)
            for batch in table.slice(start, take).combine_chunks().to_batches():
                self._add_batch(batch)
            start += take
            if self._part_rows >= self.rows_per_part:
                self.flush()

    def _convert(self) -> None:
        if not self._rows:
            return
        rows, self._rows = self._rows, []
        try:
            batch = pa.RecordBatch.from_pylist(rows, schema=self.schema)
        except (pa.ArrowException, UnicodeEncodeError, OverflowError, TypeError) as error:
            raise SchemaError(
                f"dataset {self.name!r} ({self.kind}): {self._culprit(rows) or error}; "
                "give every column a value of its declared type"
            ) from None
        self._add_batch(batch)

    def _culprit(self, rows: list[dict]) -> str | None:
        for index, row in enumerate(rows):
            for field in self.schema:
                try:
                    pa.array([row.get(field.name)], type=field.type)
                except Exception as error:  # any failure names the cell; the caller re-raises
                    return f"row {index} of the batch, column {field.name!r}: {error}"
        return None

    def _add_batch(self, batch: pa.RecordBatch) -> None:
        for name in self._required:
            if batch.column(batch.schema.get_field_index(name)).null_count:
                raise SchemaError(
                    f"dataset {self.name!r} ({self.kind}): column {name!r} is null in some "
                    "rows; give it a value (complete_row fills the common columns)"
                )
        self._batches.append(batch)
        self._batch_rows += batch.num_rows
        self._batch_bytes += batch.nbytes
        self._part_rows += batch.num_rows
        if self._batch_rows >= _GROUP_ROWS or self._batch_bytes >= _GROUP_BYTES:
            self._write_group()

    def _write_group(self) -> None:
        if not self._batches:
            return
        if self._parquet is None:
            self._handle = self._dir.create(_part_name(len(self.parts)))
            self._parquet = pq.ParquetWriter(self._handle, self.schema, compression="zstd", compression_level=1)
        self._parquet.write_table(pa.Table.from_batches(self._batches, schema=self.schema), row_group_size=1 << 30)
        self._batches, self._batch_rows, self._batch_bytes = [], 0, 0

    def flush(self) -> None:
        """Close the part in hand (if it has rows): afterwards it survives any crash."""
        self._convert()
        self._write_group()
        if self._parquet is None:
            return
        self._parquet.close()
        name = _part_name(len(self.parts))
        self._dir.finish(name, self._handle)
        self.parts.append(name)
        self._parquet = self._handle = None
        self._part_rows = 0

    def truncate(self, n_parts: int) -> None:
        """Forget the rows in hand and every part from index `n_parts` on (used on resume)."""
        if n_parts > len(self.parts):
            raise DatasetError(
                f"{self.path} has {len(self.parts)} complete parts but the checkpoint "
                f"knows {n_parts}; delete the working directory to start again"
            )
        self._abandon()
        for name in self.parts[n_parts:]:
            self._dir.remove(name)
        del self.parts[n_parts:]

    def _abandon(self) -> None:
        self._rows, self._batches = [], []
        self._batch_rows = self._batch_bytes = self._part_rows = 0
        if self._handle is not None:
            self._parquet.close()
            self._handle.close()
            self._dir.remove(f".{_part_name(len(self.parts))}.tmp")
            self._parquet = self._handle = None

    # -- end --------------------------------------------------------------------------------------
    def close(self, counts: dict | None = None) -> dict:
        """Flush, then write the manifest. counts: anything worth keeping (rows in, per-code counts).

        Returns the manifest. Memory does not grow with the number of rows.
        """
        self.flush()
        parts, splits, sorter = [], {}, RowIdSorter()
        wanted = [name for name in ("row_id", "split") if name in self.schema.names]
        for name in self.parts:
            with self._dir.open(name) as source:
                reader = pq.ParquetFile(source)
                rows = reader.metadata.num_rows
                if wanted:
                    for batch in reader.iter_batches(batch_size=10_000, columns=wanted):
                        if "row_id" in wanted:
                            sorter.add(batch.column("row_id").to_pylist())
                        if "split" in wanted:
                            for item in batch.column("split").value_counts().to_pylist():
                                splits[item["values"]] = splits.get(item["values"], 0) + item["counts"]
            parts.append({"file": name, "rows": rows, "sha256": _hash_stream(self._dir.stream(name))})
        manifest = {
            "name": self.name,
            "kind": self.kind,
            "schema": [
                {"name": field.name, "type": str(field.type), "nullable": field.nullable} for field in self.schema
            ],
            "rows": sum(part["rows"] for part in parts),
            "splits": dict(sorted(splits.items())),
            "parts": parts,
            "dataset_hash": sorter.digest() if "row_id" in wanted else None,
            "digest": _digest_of(self.kind, parts),
            "counts": counts or {},
            "parents": self.parents,
            "meta": self.meta,
        }
        text = json.dumps(manifest, sort_keys=True, indent=2, ensure_ascii=False) + "\n"
        self._dir.write(MANIFEST, text.encode("utf-8"))
        return manifest


def _message_columns(schema: pa.Schema) -> tuple[list[str], list[str]]:
    """Names of columns that hold messages, and of those that hold lists of message lists."""
    plain = [field.name for field in schema if field.type == MESSAGES]
    nested = [field.name for field in schema if pa.types.is_list(field.type) and field.type.value_type == MESSAGES]
    return plain, nested


class Dataset:
    """A finished dataset, read in place. Made by `open_dataset`."""

    def __init__(self, path: str, manifest: dict, directory):
        self.path, self.manifest, self._dir = path, manifest, directory
        self.name: str = manifest["name"]
        self.kind: str = manifest["kind"]
        self.digest: str = manifest["digest"]
        self.num_rows: int = manifest["rows"]

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}, {self.kind}, {self.num_rows} rows, {self.digest[:12]})"

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of the parts (of the kind where there is no part)."""
        for part in self.manifest["parts"]:
            with self._dir.open(part["file"]) as source:
                return pq.read_schema(source)
        return schema_of(self.kind)

    def rows_of(self, split: str | None) -> int:
        """Number of rows of one split, or of all."""
        return self.num_rows if split is None else int(self.manifest.get("splits", {}).get(split, 0))

    def iter_batches(
        self, columns: list[str] | None = None, split: str | None = None, batch_size: int = 1024
    ) -> Iterator[pa.RecordBatch]:
        """Record batches in row order, optionally only some columns and one split."""
        read = columns
        if columns is not None and split is not None and "split" not in columns:
            read = [*columns, "split"]
        for part in self.manifest["parts"]:
            with self._dir.open(part["file"]) as source:
                for batch in self._batches_of(part["file"], source, batch_size, read):
                    if split is not None:
                        batch = batch.filter(pc.equal(batch.column("split"), split))
                        if read is not columns:
                            batch = batch.select(columns)
                    if batch.num_rows:
                        yield batch

    def _batches_of(self, name: str, source, batch_size: int, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
        """Record batches of one part. Raises DatasetError where its bytes are no Parquet any more."""
        try:
            yield from pq.ParquetFile(source).iter_batches(batch_size=batch_size, columns=columns)
        except (pa.ArrowInvalid, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # the disk's word, not Parquet's
                raise
            raise DatasetError(
                f"{self.path}: {name} is damaged ({str(error).splitlines()[0]}); put a good copy there, or delete the"
                " directory and run the stage that made this dataset again"
            ) from None

    def iter_rows(
        self, columns: list[str] | None = None, split: str | None = None, batch_size: int = 1024
    ) -> Iterator[dict]:
        """Rows as dicts in row order; message dicts come without their null fields."""
        for batch in self.iter_batches(columns, split, batch_size):
            plain, nested = _message_columns(batch.schema)
            for row in batch.to_pylist():
                for name in plain:
                    if row[name]:
                        row[name] = [clean_message(message) for message in row[name]]
                for name in nested:
                    if row[name]:
                        row[name] = [[clean_message(message) for message in item or ()] for item in row[name]]
                yield row

    def table(self, columns: list[str] | None = None, split: str | None = None) -> pa.Table:
        """All rows as one Arrow table (in memory)."""
        batches = list(self.iter_batches(columns, split, batch_size=10_000))
        if batches:
            return pa.Table.from_batches(batches)
        schema = self.schema
        return schema.empty_table() if columns is None else schema.empty_table().select(columns)

    def to_pandas(self, columns: list[str] | None = None, split: str | None = None):
        """All rows as a pandas DataFrame (in memory)."""
        return self.table(columns, split).to_pandas()

    def export(self, directory: str | os.PathLike) -> list[Path]:
        """Write the rows as ``data/SPLIT-NNNNN.parquet`` below a local directory, as ``datasets.load_dataset`` and the
        Hub read them; "train" where rows have no split. Returns the files. Raises DatasetError for a damaged part."""
        made, schema = [], self.schema
        Path(directory, "data").mkdir(parents=True, exist_ok=True)
        for split in self.manifest["splits"] or {"train": self.num_rows}:
            batches = self.iter_batches(split=split if self.manifest["splits"] else None)
            batch = next(batches, None)
            while True:
                made.append(
                    Path(
                        directory,
                        "data",
                        f"{split}-{sum(path.name.startswith(split + '-') for path in made):05d}.parquet",
                    )
                )
                with pq.ParquetWriter(made[-1], schema, compression="zstd") as writer:
                    size = 0
                    while batch is not None and size < _FILE_BYTES:
                        writer.write_batch(batch)
                        size, batch = size + batch.nbytes, next(batches, None)
                if batch is None:
                    break
        return made

    def verify(self) -> None:
        """Raise DatasetError unless every part has the bytes and rows that the manifest names."""
        for part in self.manifest["parts"]:
            try:
                actual = _hash_stream(self._dir.stream(part["file"]))
            except (OSError, FileNotFoundError):
                raise DatasetError(
                    f"{self.path}: {part['file']} is missing; rerun the stage that made this dataset"
                ) from None
            if actual != part["sha256"]:
                raise DatasetError(
                    f"{self.path}: {part['file']} was changed after it was written (its "
                    "sha256 differs from the manifest); rerun the stage that made it"
                )
        if self.digest != _digest_of(self.kind, self.manifest["parts"]):
            raise DatasetError(
                f"{self.path}: the digest in {MANIFEST} does not fit its own part list; "
                "rerun the stage that made this dataset"
            )


def is_dataset(path) -> bool:
    """True if `path` is a finished dataset directory."""
    try:
        open_dataset(path)
    except (DatasetError, OSError):
        return False
    return True


def open_dataset(path) -> Dataset:
    """Open a finished dataset directory or URL. Raises DatasetError if it is missing or unfinished."""
    directory = _directory(path)
    try:
        manifest = json.loads(directory.read(MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        state = "is unfinished (it has no manifest.json)" if directory.names() else "does not exist"
        raise DatasetError(
            f"the dataset {os.fspath(path)} {state}; run the stage that makes it, or give raw files to `ingest`"
        ) from None
    except ValueError as error:
        raise DatasetError(
            f"{os.fspath(path)}/{MANIFEST} is damaged ({error}); rerun the stage that made this dataset"
        ) from None
    missing = (
        {"name", "kind", "parts", "rows", "digest"} - set(manifest) if isinstance(manifest, dict) else {"everything"}
    )
    if missing:
        raise DatasetError(
            f"{os.fspath(path)}/{MANIFEST} is not a dataset manifest (it lacks "
            f"{', '.join(sorted(missing))}); give a directory written by a stage, or raw "
            "files to `ingest`"
        )
    return Dataset(os.fspath(path), manifest, directory)


def write_dataset(path, name: str, kind: str, rows: Iterable[dict], **options: Any) -> dict:
    """Write rows (already completed) as a finished dataset; returns the manifest."""
    counts = options.pop("counts", None)
    writer = DatasetWriter(path, name, kind, resume=False, **options)
    writer.write(rows)
    return writer.close(counts)
