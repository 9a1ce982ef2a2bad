"""The input of an ingest run: a dataset of ours, or files, each read through the adapter of its format."""

from __future__ import annotations

import difflib
import itertools
import json
import re
from pathlib import Path
from typing import Iterator

from stages.ingest import native_kind
from stages.ingestion.counts import Counts
from stages.ingestion.formats import Adapter, empty_answers, known_columns, misspelt, rename
from stages.ingestion.published import adapter_of
from stages.ingestion.rules import Bad
from stages.ingestion.sources import (
    EXTENSIONS,
    PACKED_ENDINGS,
    Reading,
    Record,
    SourceError,
    SourceFile,
    find_files,
    head_rows,
    parse_json,
    split_named,
)
from stages.spec import ConfigError
from storage.datasets import Dataset, DatasetError, open_dataset

HELD_OUT = ("validation", "test")  # splits of a dataset of ours that halves leaves as they are

# Columns beside demonstrations that say how good the answer is, and beside prompts that hold one.
_JUDGED = (
    "label",
    "labels",
    "score",
    "scores",
    "rating",
    "reward",
    "rank",
    "preference",
    "is_safe",
    "safe",
    "is_correct",
    "correct",
    "correctness",
    "helpfulness",
    "quality",
    "overall_score",
    "thumbs",
    "feedback",
    "upvotes",
)

_ANSWERS = (
    "answers",
    "correct_answer",
    "ground_truth",
    "solution",
    "final_answer",
    "expected_answer",
    "reference_answer",
    "reference",
    "target",
    "gold",
    "label",
    "output",
    "response",
    "completion",
)

# Columns that a question is about.
_ABOUT = (
    "context",
    "contexts",
    "passage",
    "passages",
    "document",
    "documents",
    "article",
    "story",
    "paragraph",
    "paragraphs",
    "table",
    "history",
)

# Columns of pictures and sounds.
_SHOWN = ("image", "images", "video", "videos", "audio", "audios")

# Columns that hold several answers, by their whole name or by its beginning and a number or letter.
_SEVERAL = re.compile(
    r"(?:responses|completions|candidates|generations|outputs)|(?:response|completion|candidate|generation|output|answer)_?(?:[0-9]|[a-d])",
    re.IGNORECASE,
)

_PREFERRED = {"comparisons/1": "pairs/1"}  # what `kind: auto` makes of a kind


def _columns(files: list[SourceFile]) -> list[str]:
    """The columns of their first rows."""
    return sorted({key for file in files for row in head_rows(file, 8) for key in row})[:40]


def _listed(columns: list[str]) -> str:
    near = misspelt(columns)
    return ", ".join(f"{name} (did you mean {near[name]!r}?)" if name in near else name for name in columns) or "none"


class InputData:
    """What is read. Either ``dataset`` or ``files`` is given; ``name`` is what the rows' column `dataset` says,
    ``kind`` the kind of rows that is wanted.
    """

    def __init__(self, stage):
        self.stage, self.config, self.path = stage, stage.config, stage.path("data")
        self.dataset: Dataset | None = None
        self.files: list[SourceFile] = []
        try:
            self.dataset = open_dataset(self.path)
        except DatasetError:
            try:
                self.files = find_files(self.path, self.config.files)
            except SourceError as error:
                raise ConfigError(f"stage ingest, input data: {error}") from None
        for name, default in (("system_prompts", "keep"), ("reasoning", "think"), ("tool_calls", "keep")):
            if self.dataset is not None and getattr(self.config, name) != default:
                raise ConfigError(
                    f"stage ingest: {name} changes rows as they are read from files, and the input is a dataset"
                    " already; ingest its files with it"
                )
        self.name = self.config.dataset or (self.dataset.name if self.dataset else _stem(self.path))
        self._check_mapped()
        self.kind = self._wanted_kind()
        if (
            self.config.aspect_weights
            and (native := self.dataset.kind if self.dataset else native_kind(self.path, self.config)) != "ratings/1"
        ):
            raise ConfigError(
                "stage ingest: aspect_weights makes scores of the aspects of ratings, and the data holds"
                f" {native or 'no known rows'}; leave it out"
            )
        self.file_splits = {file.name: file.split for file in self.files if file.split}

    # -- what it is -----------------------------------------------------------------------------------
    def _check_mapped(self) -> None:
        """Refuse a setting that names a column which is in no row: what it was for would be read from elsewhere, or not
        at all.
        """
        missing, seen = dict(self.config.columns()) if self.files else {}, set()
        for count in (64, 2_000):  # few rows nearly always do
            for source in self.files if missing else ():
                for row in head_rows(source, count):
                    seen.update(row)
                    missing = {
                        ours: theirs
                        for ours, theirs in missing.items()
                        if theirs not in row
                        and (
                            "." not in theirs
                            or ours
                            not in rename({key: value for key, value in row.items() if key != ours}, {ours: theirs})
                        )
                    }
        if missing and seen:
            ours, theirs = next(iter(missing.items()))
            near = difflib.get_close_matches(theirs, sorted(seen), 1)
            raise ConfigError(
                f"stage ingest: {ours} is to be read from the column {theirs!r} (column_map or {ours}_column), which is"
                f" in no row{f'; did you mean {near[0]!r}?' if near else '.'} Columns found:"
                f" {', '.join(sorted(seen)[:40])}"
            )

    def _wanted_kind(self) -> str:
        if self.config.kind != "auto":
            return self.config.kind
        if self.dataset is not None:
            return self.dataset.kind
        found = native_kind(self.path, self.config)
        if found is None:
            if all(source.size == 0 or not head_rows(source, 1) for source in self.files):
                return "text/1"  # nothing readable: all of it goes to quarantine
            raise ConfigError("stage ingest: the columns of the data fit no known format. " + self.columns_hint())
        return _PREFERRED.get(found, found)

    def empty_hint(self) -> str:
        """Names the columns that are null or empty in all of the first rows, so that nothing is read from them."""
        rows = [row for source in self.files[:3] for row in head_rows(source)]
        found = [
            name
            for name in dict.fromkeys(key for row in rows for key in row)
            if all(row.get(name) in (None, "", []) for row in rows)
        ]
        if not found:
            return ""
        return (
            f"Empty (null) in {'every row' if len(rows) < 64 else f'each of the first {len(rows)} rows'}, and read as if"
            f" not there: {', '.join(found[:10])}; fill them in, or name the columns that have the values. "
        )

    def columns_of(self, name: str) -> str:
        """``Columns found: a, b`` of the file of that name, with what a misspelt one may be, and how those inside of
        others are named; empty for a dataset.
        """
        files = [file for file in self.files if file.name == name]
        inside = {
            key: f"{column}.{key}"
            for file in files
            for row in head_rows(file, 8)
            for column, value in row.items()
            if isinstance(value, dict)
            for key in ("prompt", "chosen", "rejected", "completion")
            if key in value and key not in row
        }
        named = ", ".join(f"{ours}: {theirs}" for ours, theirs in inside.items())
        return (
            f"Columns found: {_listed(_columns(files))}"
            + f"; inside of others: column_map='{{{named}}}'" * bool(inside)
            if files
            else ""
        )

    def misread(self) -> dict[str, str]:
        """{column: the known name that it nearly has} of what the guessed formats of files leave unread, so that their
        rows may be taken for rows of another kind."""
        found = {}
        for file in self.files[:100]:
            adapter = adapter_of(file, self.config)
            if adapter is not None and adapter.guessed:
                found |= misspelt([name for name in _columns([file]) if name not in self.config.columns().values()])
        return found

    def columns_hint(self) -> str:
        """The columns that files have, those of no known format first, and how to say which is which."""
        unknown = itertools.islice(
            (file for file in self.files if any(head_rows(file)) and adapter_of(file, self.config) is None), 3
        )
        seen = _columns(list(unknown) or self.files[:3])
        inside = next(
            (
                name
                for source in self.files[:3]
                for row in head_rows(source, 2)
                for name, value in row.items()
                if isinstance(value, list) and value and isinstance(value[0], dict)
            ),
            None,
        )
        inside = (
            f"If the rows are those in {inside}: jq -c '.{inside}[]' FILE > NEW.jsonl. "
            if inside and len(seen) < 4
            else ""
        )
        if any("\0" in name for name in seen):
            inside = "The file looks like UTF-16 without its mark: iconv -f utf-16le -t utf-8 FILE > NEW. "
        elif any(r.code == "invalid_utf8" for source in self.files[:3] for r in itertools.islice(Reading(source), 64)):
            inside = "The file is not in UTF-8: iconv -f latin1 -t utf-8 FILE > NEW. "
        if {"problem", "solution"} <= set(seen) and "answer" not in seen:
            inside += (
                "Solutions of format math have their answer in \\boxed{}; to learn to write others:"
                " prompt_column=problem completion_column=solution. "
            )
        return (
            f"Columns found: {_listed(seen)}. {self.empty_hint()}{inside}Name them with column_map={{our column: source"
            " column} (or prompt_column, chosen_column ...) or set format. Formats and their columns:"
            f" {known_columns()}"
        )

    def named(self, *columns: str) -> list[SourceFile]:
        """Files whose first rows have one of these columns of ours."""
        named = {column: self.config.column_map.get(column, column) for column in columns}
        return [
            source
            for source in self.files
            if any(rename(row, named).get(column) not in (None, "") for row in head_rows(source) for column in columns)
        ]

    def holds_out(self) -> bool:
        """Whether the input has held-out rows of its own: then it keeps its splits."""
        if self.dataset is not None:
            return any(n for split, n in self.dataset.manifest["splits"].items() if split != "train")
        if any(split in HELD_OUT for split in self.file_splits.values()):
            return True
        named = {"split": self.config.column_map.get("split", "split")}
        for source in self.named("split"):
            for record in Reading(source):
                row = parsed(record)
                value = rename(row, named).get("split") if row else None
                if isinstance(value, str) and split_named(value) in HELD_OUT:
                    return True
        return False

    # -- reading it -----------------------------------------------------------------------------------
    def records(self, counts: Counts) -> Iterator[tuple[str, Adapter | None, Record]]:
        """(source name, adapter, record) over the whole input; notes formats and damage in ``counts``, warns of what is
        not read, and tells the progress.
        """
        if self.dataset is not None:
            total = self.dataset.num_rows
            for number, row in enumerate(self.dataset.iter_rows(), 1):
                yield self.dataset.name, None, Record(number, None, row, None)
                if number % 1_000 == 0:
                    self.stage.progress(number, total, counts.told())
            return
        total = sum(source.size for source in self.files) or 1
        done = 0
        for source in self.files:
            adapter = self._adapter(source, counts)
            reading = Reading(source)
            for index, record in enumerate(adapter.records(reading) if adapter else reading):
                yield source.name, adapter, record
                if index % 1_000 == 0:
                    self.stage.progress(done + reading.done, total, counts.told())
            if reading.damage:
                counts.damaged_files[source.name] = reading.damage
                self.stage.warn(
                    "damaged_file",
                    f"{source.name}: {reading.damage}; the readable part was kept. Repair the file, and ingest it again",
                )
            if adapter is not None and adapter.unknown_splits:
                self.stage.warn(
                    "unknown_split",
                    f"{source.name}: the column split says {', '.join(sorted(adapter.unknown_splits))}, which names no"
                    " split (train, validation, test); those rows were placed like rows without one."
                    " Write column_map.split=COLUMN where another column names it, or rename these values",
                )
            done += source.size
        self.stage.progress(total, total, counts.told())

    def readable_rows(self) -> Iterator[tuple[int, str, dict]]:
        """(input position, kind, native row) of the readable rows, in a pass of its own that counts nothing."""
        limit = self.config.limit
        for seq, (_, adapter, record) in enumerate(self.records(Counts())):
            if limit is not None and seq >= limit:
                break
            row = parsed(record)
            if row is None or (adapter is None and self.dataset is None):
                continue
            try:
                kind, native = (self.dataset.kind, row) if self.dataset is not None else adapter(row)[:2]
            except (Bad, RecursionError, OverflowError):
                continue
            yield seq, kind, native

    def _adapter(self, source: SourceFile, counts: Counts) -> Adapter | None:
        adapter = adapter_of(source, self.config)
        if adapter is None:
            if any(head_rows(source)):  # else nothing in it could be read, which is told of the rows
                self.stage.warn(
                    "unknown_format",
                    f"{source.name} fits no known format, so its rows are refused; its columns are"
                    f" {', '.join(_columns([source]))}. Write format=NAME, or column_map='{{...}}' to say what they are",
                )
            return None
        counts.formats[source.name] = adapter.name
        self._tell_unread(source, adapter)
        if self.config.event_map and adapter.name != "events":
            raise ConfigError(
                f"stage ingest: event_map says what the signals of a product mean, and {source.name} is read as"
                f" {adapter.name}; rows with prompt, response and action are signals (format=events), else leave"
                " event_map out"
            )
        return adapter

    def _tell_unread(self, source: SourceFile, adapter: Adapter) -> None:
        """Warn of columns that say which answers are good, or what the answer is, where the rows are read as something
        that has no place for it.
        """
        kinds, beside, answered, rows = set(), {}, False, head_rows(source)
        if (
            adapter.guessed
            and adapter.name == "prompts"
            and (found := empty_answers([rename(row, self.config.columns()) for row in rows]))
        ):
            self.stage.warn(
                "empty_answers",
                f"{source.name} is read as prompts alone, since there is nothing in {' and '.join(found)} of the first"
                f" {len(rows)} rows: where answers are meant to be there, mend the file (with their format, such as"
                " format=preference or prompt_completion, such rows are quarantined); where they are not, write"
                " format=prompts",
            )
        for record in adapter.records(Record(line, None, row, None) for line, row in enumerate(rows, 1)):
            try:
                kind, row, _ = (
                    adapter(record.row) if record.row is not None and record.code is None else (None, {}, None)
                )
                extra = json.loads(row.get("extra_json") or "{}")
            except (Bad, RecursionError, OverflowError):
                continue
            kinds.add(kind)
            answered = answered or any(row.get(name) for name in ("answer", "tests", "constraints"))
            beside.update((name, value) for name, value in extra.items() if value not in (None, "", []))
        if (
            kinds <= {"demonstrations/1", "prompts/1"}
            and self.kind in kinds
            and (found := [name for name in beside if name in _ABOUT])
        ):
            self.stage.warn(
                "unread_context",
                f"the questions of {source.name} are read without {' and '.join(found)}, which may be what they are"
                " about; write it into the question, or pay no attention where it is not",
            )
        if found := [name for name in beside if name in _SHOWN]:
            self.stage.warn(
                "unread_images",
                f"{source.name} has {' and '.join(found)}, and every stage works on texts alone: the model will answer"
                " without seeing them. Leave out the rows that need them; where the texts stand alone, drop the"
                " column",
            )
        if kinds == {"prompts/1"} and (found := [name for name in beside if _SEVERAL.fullmatch(name)]):
            self.stage.warn(
                "unread_answers",
                f"{source.name} is read as prompts alone, but has {' and '.join(found[:4])}: where these are a model's"
                " answers, name them as a format has them: response_a, response_b and preference"
                " (column_map={response_a: ...}, comparisons), completions and scores (rankings), or chosen and"
                " rejected (pairs)",
            )
        if kinds == {"demonstrations/1"} and (
            found := [name for name, value in beside.items() if name in _JUDGED and not isinstance(value, (list, dict))]
        ):
            self.stage.warn(
                "unread_label",
                f"{source.name} is read as demonstrations, of which every answer is trained on alike, but has"
                f" {' and '.join(found)}: write score_column={found[0]} to read it as a rating, label_column={found[0]}"
                " as right or wrong; if it is neither, all is well",
            )
        elif (
            kinds == {"prompts/1"}
            and self.kind == "prompts/1"
            and not answered
            and (
                found := [
                    name for name, value in beside.items() if name in _ANSWERS and not isinstance(value, (list, dict))
                ]
            )
        ):
            self.stage.warn(
                "unread_answer",
                f"the prompts of {source.name} have no answer that a verifier could check, but the file has"
                f" {' and '.join(found)}: write answer_column={found[0]} to read it",
            )


def parsed(record: Record) -> dict | None:
    """The row of a record, or None where it cannot be read."""
    return record.row if record.row is not None or record.code else parse_json(record.raw)[0]


def _stem(path: str) -> str:
    name = Path(path.rstrip("/")).name
    for suffix in (*PACKED_ENDINGS, *EXTENSIONS):
        if name.lower().endswith(suffix):
            name = name[: -len(suffix)]
    return name.strip("*?[]") or "data"
