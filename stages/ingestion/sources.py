"""Readers: files and directories -> records, whatever state they are in.

A record is (line, raw, row, code): the 1-based line (or row) number in its file, the bytes of a
JSON line still to be parsed or None, the parsed row or None, and a quarantine code or None. What
cannot be read becomes one record with a code; what can be read around it is kept. Readers hold one
line (or one Arrow batch) at a time.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import fnmatch
import glob
import io
import json
import lzma
import re
import zlib
from decimal import Decimal
from pathlib import Path
from typing import Any, Iterator, NamedTuple

import orjson

MAX_LINE_BYTES = 64 << 20  # a longer line is no row
MAX_CSV_RECORD_LINES = 2_000  # an unclosed quote is given up after so many lines
EXTENSIONS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
_PACKED = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"BZh", "bzip2"), (b"\xfd7zXZ\x00", "xz"))
PACKED_ENDINGS = (".gz", ".zst", ".bz2", ".xz")
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_NOT_DATA = {"dataset_info.json", "state.json", "dataset_dict.json", "manifest.json", "dataset_infos.json"}
_SPLIT = re.compile(r"(?:^|[/_.-])(train|validation|valid|val|dev|test|rm_a|rm_b)(?=[-_./]|$)")
_SPLIT_NAMES = {"valid": "validation", "val": "validation", "dev": "validation"}
_DIGITS = bytes.maketrans(b"123456789.", b"0000000000")
_LONG_NUMBER = b"0" * 20  # more digits than a 64-bit integer or a float holds, with or without a point


class Record(NamedTuple):
    line: int
    raw: bytes | None
    row: dict | None
    code: str | None


class SourceFile(NamedTuple):
    """One file of the input. name: how it is called in quarantine rows; format: jsonl, json, csv ...; packed: gzip,
    zstd, bzip2, xz or nothing; split: the one that its name says, where the files of an input are of several."""

    path: Path
    name: str
    format: str
    packed: str
    size: int
    split: str | None = None


class SourceError(Exception):
    """An input that is not there or of no known kind; the message says what to give instead."""


# -- finding files ----------------------------------------------------------------------------------
def find_files(path: str, only: str | None = None) -> list[SourceFile]:
    """The data files behind a path: one file, a glob, or a directory (also one of `save_to_disk`, or
    the snapshot of a hub set). only: pattern for the relative names, such as `train*`.

    Raises SourceError where there is nothing to read.
    """
    root = Path(path)
    if root.is_file():
        return [_describe(root, root.name)]
    if root.is_dir():
        if (root / "dataset_dict.json").exists() or (root / "state.json").exists():
            found = [item for item in _saved_dataset(root) if only is None or fnmatch.fnmatch(item.name, only)]
            if not found:
                raise SourceError(
                    f"the saved dataset {path} holds no Arrow file that matches {only!r}; write for example"
                    " files='train/*'"
                )
            return _with_splits(found)
        found = [
            item
            for item in sorted(root.rglob("*"))
            if item.is_file()
            and _is_data(item)
            and not any(part.startswith(".") for part in item.relative_to(root).parts)
            and (only is None or fnmatch.fnmatch(item.relative_to(root).as_posix(), only))
        ]
        if not found:
            raise SourceError(
                f"the directory {path} holds no data file{f' that matches {only!r}' if only else ''}; put files ending"
                f" in {', '.join(EXTENSIONS)} (also .gz, .zst, .bz2, .xz) there, or give a file"
            )
        return _with_splits([_describe(item, item.relative_to(root).as_posix()) for item in found])
    if any(mark in path for mark in "*?["):
        found = [Path(item) for item in sorted(glob.glob(path, recursive=True)) if Path(item).is_file()]
        if not found:
            raise SourceError(f"no file matches {path}; check the pattern (quote it in the shell)")
        return _with_splits([_describe(item, item.name) for item in found])
    raise SourceError(
        f"{path} is neither a file, a directory nor a pattern; give the path of a JSON "
        "Lines, CSV or Parquet file, of a directory of such files, or a hub id such as owner/name"
    )


def split_named(text: str) -> str | None:
    """The split that a value or a file name says (`test`, `dev`, `data/train-00000-of-00001.parquet`), or None."""
    found = _SPLIT.findall(text.strip().lower())
    return _SPLIT_NAMES.get(found[-1], found[-1]) if found else None


def _with_splits(files: list[SourceFile]) -> list[SourceFile]:
    """The files with the splits that their names or folders say; none where all say the same: there is nothing to keep
    apart.
    """
    splits = [split_named(Path(file.name).name) or split_named(file.name) for file in files]
    return [file._replace(split=split) for file, split in zip(files, splits)] if len(set(splits)) > 1 else files


def _is_data(path: Path) -> bool:
    name = plain_name(path)
    return name.endswith(EXTENSIONS) and name not in _NOT_DATA


def _describe(path: Path, name: str) -> SourceFile:
    with open(path, "rb") as handle:
        head = handle.read(4096)
    packed = next((kind for mark, kind in _PACKED if head.startswith(mark)), "")
    if head.startswith(b"PK\x03\x04"):
        raise SourceError(f"{name} is a zip archive or a spreadsheet; unpack it, or save the sheet as CSV")
    suffix = Path(plain_name(path)).suffix
    kind = {".csv": "csv", ".tsv": "tsv", ".txt": "txt", ".arrow": "arrow", ".parquet": "parquet"}.get(suffix, "jsonl")
    if head[:4] == b"PAR1":
        kind = "parquet"
    elif kind == "jsonl":
        start = next(iter(_Blocks(SourceFile(path, name, kind, packed, 0))), b"")
        if start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
            kind = "json"
        elif (
            suffix == ".json"
            and start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"
            and start.removeprefix(b"\xef\xbb\xbf").lstrip()[1:2] in (b"\n", b"\r")
        ):
            kind = "json"  # one indented object
    return SourceFile(path, name, kind, packed, path.stat().st_size)


def plain_name(path: Path) -> str:
    """The name without the ending of its compression, in small letters."""
    name = path.name.lower()
    return name.removesuffix(next((ending for ending in PACKED_ENDINGS if name.endswith(ending)), ""))


def _opened(handle, packed: str):
    """A stream of the unpacked bytes of an open file."""
    if packed == "zstd":
        import pyarrow as pa

        return pa.CompressedInputStream(pa.PythonFile(handle, "r"), "zstd")
    return bz2.open(handle) if packed == "bzip2" else lzma.open(handle) if packed == "xz" else handle


def _saved_dataset(root: Path) -> list[SourceFile]:
    """Arrow files of a `datasets` save_to_disk directory (a Dataset or a DatasetDict)."""
    folders = [root]
    if (root / "dataset_dict.json").exists():
        splits = json.loads((root / "dataset_dict.json").read_text("utf-8")).get("splits", [])
        folders = [root / name for name in splits]
    files = []
    for folder in folders:
        state = json.loads((folder / "state.json").read_text("utf-8")) if (folder / "state.json").exists() else {}
        if state.get("_indices_data_files"):
            raise SourceError(
                f"{folder} was saved with an index mapping (after select, shuffle or filter); "
                "call .flatten_indices() before save_to_disk"
            )
        names = [item["filename"] for item in state.get("_data_files", [])] or [
            item.name for item in sorted(folder.glob("*.arrow"))
        ]
        files += [_describe(folder / name, (folder / name).relative_to(root).as_posix()) for name in names]
    if not files:
        raise SourceError(f"{root} looks like a save_to_disk directory but names no Arrow file; save it again")
    return files


# -- bytes and lines --------------------------------------------------------------------------------
class _Blocks:
    """Blocks of a plain or gzip file; `damage` says why the end could not be read, `done` how many
    bytes of the file were consumed (for progress)."""

    def __init__(self, source: SourceFile):
        self.source, self.damage, self.done = source, None, 0

    def __iter__(self) -> Iterator[bytes]:
        """Blocks of the unpacked file as UTF-8; a file that begins with the byte order mark of UTF-16 or UTF-32 is
        decoded.
        """
        decoder = None
        for index, block in enumerate(self._unpacked()):
            if index == 0 and (coding := next((name for mark, name in _MARKS if block.startswith(mark)), None)):
                decoder = codecs.getincrementaldecoder(coding)()
            if decoder is None:
                yield block
                continue
            try:
                yield decoder.decode(block).encode("utf-8")
            except UnicodeError as error:
                self.damage = f"the text is broken ({error})"
                return

    def _unpacked(self) -> Iterator[bytes]:
        if self.source.packed == "gzip":
            yield from self._gunzipped()
            return
        with open(self.source.path, "rb") as handle:
            stream = _opened(handle, self.source.packed)
            while True:
                try:
                    block = stream.read(1 << 18)
                except (OSError, EOFError, lzma.LZMAError) as error:
                    self.damage = f"{self.source.packed} data is damaged or truncated ({error})"
                    return
                self.done = handle.tell()
                if not block:
                    return
                yield block

    def _gunzipped(self) -> Iterator[bytes]:
        with open(self.source.path, "rb") as handle:
            unpacker = zlib.decompressobj(31)
            while block := handle.read(1 << 15):
                self.done += len(block)
                while block:
                    if unpacker.eof:  # members may follow each other
                        if not block.strip(b"\0"):
                            break
                        unpacker = zlib.decompressobj(31)
                    before = unpacker.copy()
                    try:
                        out = unpacker.decompress(block)
                    except zlib.error as error:
                        yield self._salvage(before, block)
                        self.damage = f"gzip data is damaged ({error})"
                        return
                    if out:
                        yield out
                    block = unpacker.unused_data if unpacker.eof else b""
            if not unpacker.eof and self.done:
                tail = unpacker.flush()
                if tail:
                    yield tail
                self.damage = "gzip file is truncated"

    @staticmethod
    def _salvage(unpacker, block: bytes) -> bytes:
        """What can still be unpacked of a damaged block, byte by byte."""
        out = bytearray()
        try:
            for index in range(len(block)):
                out += unpacker.decompress(block[index : index + 1])
        except zlib.error:
            pass
        return bytes(out)


def _lines(blocks: _Blocks) -> Iterator[tuple[int, bytes, bool]]:
    """(line number, line without its end, complete) of a file; over-long lines come cut, incomplete."""
    number, rest, dropping, first = 0, b"", False, True
    for block in blocks:
        if first:
            first, block = False, block.removeprefix(b"\xef\xbb\xbf")
        pieces = (rest + block).split(b"\n") if rest else block.split(b"\n")
        rest = pieces.pop()
        for piece in pieces:
            number += 1
            if dropping:
                dropping = False
                continue
            yield number, piece, True
        if len(rest) > MAX_LINE_BYTES:
            if not dropping:
                yield number + 1, rest[:MAX_LINE_BYTES], False
            rest, dropping = b"", True
    if (rest or blocks.damage) and not dropping:
        yield number + 1, rest, blocks.damage is None


# -- formats ----------------------------------------------------------------------------------------
def parse_json(raw: bytes) -> tuple[dict | None, str | None]:
    """(row, code) of one JSON line. Python's parser has the second word: it knows NaN and lone
    surrogates, which orjson refuses, so that they get the right code; it reads numbers exactly of which orjson makes
    floats; and it sees a key that comes twice in an object, of whose values every parser keeps one and says nothing:
    such a row is no row."""
    value, again = None, _LONG_NUMBER in raw.translate(_DIGITS)
    if not again:
        try:
            value = orjson.loads(raw)
            again = raw.count(b'":') - raw.count(b'\\":') != _keys(value)
        except (orjson.JSONDecodeError, RecursionError):
            again = True
    if again:
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            return None, "invalid_utf8"
        try:
            value = json.loads(text, parse_float=_exact, object_pairs_hook=_once)
        except (ValueError, RecursionError):
            return None, "parse_error"
        try:
            json.dumps(value, ensure_ascii=False, default=str).encode("utf-8")
        except (UnicodeEncodeError, RecursionError, ValueError):
            return None, "invalid_utf8" if "\\u" in text else "parse_error"
    return _object(value)


def _keys(value: Any) -> int:
    """How many keys all objects in a parsed value have together."""
    if type(value) is dict:
        return len(value) + sum(_keys(item) for item in value.values() if type(item) in (dict, list))
    return sum(map(_keys, value)) if type(value) is list else 0


def _once(pairs: list[tuple[str, Any]]) -> dict:
    """An object as a dict. Raises ValueError for a key that comes twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice in one object")
    return found


def _object(value: Any) -> tuple[dict | None, str | None]:
    """A row: an object, or a conversation that is written as the list of its messages alone."""
    if (
        isinstance(value, list)
        and value
        and all(isinstance(item, dict) and ("from" in item or "role" in item) for item in value)
    ):
        value = {"messages": value}
    return (value, None) if isinstance(value, dict) else (None, "wrong_type")


def _exact(text: str) -> float | Decimal:
    """A JSON number with a point or exponent: a float where a float is as exact."""
    value = float(text)
    try:
        return value if len(text) < 18 or Decimal(repr(value)) == Decimal(text) else Decimal(text)
    except ArithmeticError:  # an exponent beyond all numbers
        return value


def _read_jsonl(source: SourceFile, blocks: _Blocks) -> Iterator[Record]:
    for number, line, complete in _lines(blocks):
        if not complete:
            yield Record(number, line, None, "parse_error")
        elif line and not line.isspace():
            yield Record(number, line, None, None)


def _read_txt(source: SourceFile, blocks: _Blocks) -> Iterator[Record]:
    for number, line, complete in _lines(blocks):
        if not complete:
            yield Record(number, line, None, "parse_error")
            continue
        try:
            text = line.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError:
            yield Record(number, line, None, "invalid_utf8")
            continue
        if text.strip():
            yield Record(number, None, {"text": text}, None)


def _read_json(source: SourceFile, blocks: _Blocks) -> Iterator[Record]:
    """A JSON array of objects (or one object), element by element; numbers count elements."""
    twice: list[int] = []  # an error in the middle of an element would look like one that may go on

    def counted(pairs: list[tuple[str, Any]]) -> dict:
        found = dict(pairs)
        twice.extend([1] * (len(found) != len(pairs)))
        return found

    decoder, buffer, number, opened = json.JSONDecoder(parse_float=_exact, object_pairs_hook=counted), "", 0, False
    utf8 = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
    stream, exhausted, tried = iter(blocks), False, 0
    while True:
        buffer = buffer.lstrip("\ufeff \t\r\n" if opened is False else " \t\r\n,")
        if not opened and buffer:
            opened = True
            if buffer[0] == "[":
                buffer = buffer[1:]
                continue
        if opened and buffer[:1] == "]":
            return
        if buffer and (exhausted or len(buffer) >= 2 * tried):
            try:
                twice.clear()
                value, end = decoder.raw_decode(buffer)
                if not exhausted and end == len(buffer):
                    raise ValueError("may go on")
            except (ValueError, RecursionError) as error:
                tried = len(buffer)
                if exhausted or tried > MAX_LINE_BYTES or isinstance(error, RecursionError):
                    yield Record(number + 1, buffer[:4096].encode("utf-8", "backslashreplace"), None, "parse_error")
                    return
            else:
                row, code = (None, "parse_error") if twice else _checked(value)
                raw = (
                    None
                    if row
                    else buffer[:end].encode("utf-8", "backslashreplace")
                    if twice
                    else canonical_bytes(value)
                )
                number, buffer, tried = number + 1, buffer[end:], 0
                yield Record(number, raw, row, code)
                continue
        if exhausted:
            if blocks.damage:
                yield Record(number + 1, buffer[:4096].encode("utf-8", "backslashreplace"), None, "parse_error")
            return
        block = next(stream, None)
        if block is None:
            exhausted = True
            buffer += utf8.decode(b"", True)
        else:
            buffer += utf8.decode(block)


def _checked(value: Any) -> tuple[dict | None, str | None]:
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode("utf-8")
    except (UnicodeEncodeError, RecursionError):
        return None, "invalid_utf8"
    return _object(value)


def canonical_bytes(value: Any) -> bytes:
    """JSON bytes of any parsed value, for quarantine rows; what JSON has no form for becomes text."""
    try:
        return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS)
    except (TypeError, RecursionError):
        try:
            return json.dumps(value, ensure_ascii=True, default=str, skipkeys=True).encode("utf-8")
        except (ValueError, RecursionError):
            return repr(type(value)).encode("utf-8")


def _read_csv(source: SourceFile, blocks: _Blocks) -> Iterator[Record]:
    """CSV/TSV with a header. A record may span lines inside quotes; where a quote is never closed
    only the line that opened it is lost."""
    delimiter = "\t" if source.format == "tsv" else ","
    csv.field_size_limit(MAX_LINE_BYTES)
    header: list[str] | None = None
    lines = _lines(blocks)
    waiting: list[tuple[int, bytes, bool]] = []  # lines given back by an unclosed quote

    def fields_of(text: str) -> list[str] | str:
        try:
            rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
        except csv.Error:
            return "parse_error"
        return rows[0] if len(rows) == 1 else "parse_error"

    def parse(group: list[tuple[int, bytes, bool]]) -> list[str] | str:
        record = b"\n".join(line for _, line, _ in group).removesuffix(b"\r")
        try:
            return fields_of(record.decode("utf-8"))
        except UnicodeDecodeError:  # of several lines only where they are one record
            fields = fields_of(record.decode("latin-1"))
            whole = len(group) == 1 or (isinstance(fields, list) and len(fields) == len(header or fields))
            return "invalid_utf8" if whole else "parse_error"

    while True:
        item = waiting.pop(0) if waiting else next(lines, None)
        if item is None:
            return
        group, fields = [item], None
        if not item[2]:
            yield Record(item[0], item[1], None, "parse_error")
            continue
        if item[1].count(b'"') % 2:  # a quote is open: look for its end
            odd = True
            while odd and len(group) < MAX_CSV_RECORD_LINES:
                more = waiting.pop(0) if waiting else next(lines, None)
                if more is None or not more[2]:
                    if more is not None:
                        waiting.insert(0, more)
                    break
                group.append(more)
                odd = more[1].count(b'"') % 2 == 0
            fields = parse(group) if not odd else "parse_error"
            if fields != "invalid_utf8" and (
                isinstance(fields, str) or (header is not None and len(fields) != len(header))
            ):
                waiting, group, fields = group[1:] + waiting, group[:1], "parse_error"
        elif not item[1] or item[1].isspace():
            continue
        else:
            # as spreadsheets of some languages write them
            if header is None and delimiter == "," and b"," not in item[1]:
                delimiter = ";" if b";" in item[1] else "\t" if b"\t" in item[1] else ","
            fields = parse(group)
        raw = b"\n".join(line for _, line, _ in group)
        if isinstance(fields, str):
            yield Record(item[0], raw, None, fields)
        elif header is None:
            header = [name.strip() for name in fields]
            if twice := _named_twice(header):
                blocks.damage = f"several columns are called {twice}; give each its own name in the first line"
                yield Record(item[0], raw, None, "parse_error")
                return
        elif len(fields) > len(header):
            yield Record(item[0], raw, None, "parse_error")
        else:
            yield Record(item[0], None, {name: _cell(value) for name, value in zip(header, fields)}, None)


_MISSING = frozenset(("NaN", "nan", "<NA>"))


def _cell(value: str) -> Any:
    """A CSV cell: JSON lists of messages are parsed, all else stays text (an answer may be JSON); the adapter parses
    the columns that hold lists. What pandas writes for a missing value is an empty cell, as its reader takes it.
    """
    if value in _MISSING:
        return ""
    if value[:1] == "[" and value[-1:] == "]" and "{" in value:
        try:
            found = orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
        if all(isinstance(item, dict) and ("role" in item or "from" in item) for item in found):
            return found
    return value


def _named_twice(names: list[str]) -> str:
    """Names of columns that another column has, too: a row would hold the last one only."""
    return ", ".join(sorted({name for name in names if name and names.count(name) > 1}))


def _rows_of_batches(batches, start: int) -> Iterator[Record]:
    number = start
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield Record(number, None, row, None)


def _read_parquet(source: SourceFile, blocks: _Blocks) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        reader = pq.ParquetFile(source.path)
        sizes = [reader.metadata.row_group(i).num_rows for i in range(reader.num_row_groups)]
    except (pa.ArrowException, OSError) as error:
        blocks.damage = f"not a readable Parquet file ({str(error).splitlines()[0][:200]})"
        yield Record(1, b"", None, "parse_error")
        return
    if twice := _named_twice(reader.schema_arrow.names):
        blocks.damage = f"several columns are called {twice}; give each its own name"
        yield Record(1, b"", None, "parse_error")
        return
    start = 0
    for index, size in enumerate(sizes):
        read = 0
        try:
            for batch in reader.iter_batches(batch_size=500, row_groups=[index]):
                yield from _rows_of_batches([batch], start + read)
                read += batch.num_rows
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            blocks.damage = f"row group {index} is damaged ({str(error).splitlines()[0][:200]})"
            for lost in range(start + read, start + size):
                yield Record(lost + 1, b"", None, "parse_error")
        start += size
        blocks.done = int(source.size * start / max(sum(sizes), 1))


def _read_arrow(source: SourceFile, blocks: _Blocks) -> Iterator[Record]:
    import pyarrow as pa

    number = 0
    try:
        with pa.memory_map(str(source.path)) as memory:
            try:
                reader = pa.ipc.open_stream(memory)
            except pa.ArrowInvalid:
                memory.seek(0)
                file = pa.ipc.open_file(memory)
                reader = (file.get_batch(index) for index in range(file.num_record_batches))
            for batch in reader:
                if twice := _named_twice(batch.schema.names):
                    blocks.damage = f"several columns are called {twice}; give each its own name"
                    yield Record(1, b"", None, "parse_error")
                    return
                for offset in range(0, batch.num_rows, 500):
                    piece = batch.slice(offset, 500)
                    yield from _rows_of_batches([piece], number)
                    number += piece.num_rows
                blocks.done = min(source.size, memory.tell())
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        blocks.damage = f"not a readable Arrow file ({str(error).splitlines()[0][:200]})"
        yield Record(number + 1, b"", None, "parse_error")


_READERS = {
    "jsonl": _read_jsonl,
    "json": _read_json,
    "csv": _read_csv,
    "tsv": _read_csv,
    "txt": _read_txt,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}


class Reading:
    """Records of one file. After iteration `damage` is None or says what was wrong with the file;
    `done` counts the bytes consumed of `source.size`."""

    def __init__(self, source: SourceFile):
        self.source, self._blocks = source, _Blocks(source)

    def __iter__(self) -> Iterator[Record]:
        try:
            yield from _READERS[self.source.format](self.source, self._blocks)
        finally:
            self.damage = self._blocks.damage

    damage: str | None = None

    @property
    def done(self) -> int:
        return self._blocks.done


def head_rows(source: SourceFile, count: int = 64, look: int = 2_000) -> list[dict]:
    """The first parseable rows of a file (at most `count`, among the first `look` records)."""
    rows: list[dict] = []
    for index, record in enumerate(Reading(source)):
        row = record.row
        if row is None and record.code is None and record.raw is not None:
            row, _ = parse_json(record.raw)
        if row is not None:
            rows.append(row)
        if len(rows) >= count or index >= look:
            break
    return rows


__all__ = [
    "Reading",
    "Record",
    "SourceError",
    "SourceFile",
    "canonical_bytes",
    "find_files",
    "head_rows",
    "parse_json",
    "split_named",
]
