"""The ingest run: one pass over the input, and a second one over groups where rows of one prompt
must meet (ratings -> pairs, thumbs -> pairs, contradicting votes ...).

Everything that must survive a kill lives in the checkpoint (counts, position), in complete dataset
parts, or in one SQLite file that commits with the checkpoint. Checkpoints come at fixed input
positions, so that a killed run closes the same parts as an undisturbed one.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any, Iterator

from stages.harness import StageFailure
from stages.ingestion import agreement, conversions, curation, rules, votes
from stages.ingestion.adapters import weighted
from stages.ingestion.fields import fold_system
from stages.ingestion.formats import _ASKED, Adapter, known_columns, rename
from stages.ingestion.near_duplicates import NearDuplicates, group_id
from stages.ingestion.published import adapter_of
from stages.ingestion.rules import Bad
from stages.ingestion.seen import SeenRows, of_group
from stages.ingestion.sources import EXTENSIONS, PACKED_ENDINGS, Reading, Record, SourceError, SourceFile, canonical_bytes, find_files, head_rows, parse_json, split_named
from stages.spec import ConfigError
from stages.verification.choices import question_of
from storage.datasets import Dataset, DatasetError, open_dataset
from storage.schema import complete_row, normalise_text, prompt_id, prompt_of, row_id

SAMPLES_PER_CODE = 3

RAW_LIMIT = 1 << 20                 # characters of a refused row that quarantine keeps

LONG_PROMPT = 50_000                # characters; a warning only

HELD_OUT = ("validation", "test")    # splits of a dataset of ours that halves leaves as they are

_CONTENT = {"pairs/1": ("prompt", "chosen", "rejected"), "comparisons/1": ("prompt", "response_a", "response_b"),
            "demonstrations/1": ("messages",), "prompts/1": ("prompt", "answer"), "rankings/1": ("prompt", "completions"),
            "ratings/1": ("prompt", "completion"), "unpaired/1": ("prompt", "completion"), "stepwise/1": ("prompt", "completions"),
            "segments/1": ("prompt", "chosen", "rejected"), "text/1": ("text",)}

# Columns beside demonstrations that say how good the answer is, and beside prompts that hold one.
_JUDGED = ("label", "labels", "score", "scores", "rating", "reward", "rank", "preference", "is_safe", "safe", "is_correct", "correct", "correctness", "helpfulness", "quality", "overall_score",
           "thumbs", "feedback", "upvotes")

_ANSWERS = ("answers", "correct_answer", "ground_truth", "solution", "final_answer", "expected_answer", "reference_answer", "reference", "target", "gold", "label", "output", "response", "completion")

# Columns that a question is about.
_ABOUT = ("context", "contexts", "passage", "passages", "document", "documents", "article", "story", "paragraph", "paragraphs", "table", "history")

# Columns of pictures and sounds.
_SHOWN = ("image", "images", "video", "videos", "audio", "audios")

# Columns that hold several answers, by their whole name or by its beginning and a number or letter.
_SEVERAL = re.compile(r"(?:responses|completions|candidates|generations|outputs)|(?:response|completion|candidate|generation|output|answer)_?(?:[0-9]|[a-d])", re.IGNORECASE)

_PREFERRED = {"comparisons/1": "pairs/1"}       # what `kind: auto` makes of a kind


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
        self.dropped: dict[str, int] = dict(state.get("dropped", {}))
        self.formats: dict[str, str] = dict(state.get("formats", {}))
        self.damaged_files: dict[str, str] = dict(state.get("damaged_files", {}))
        self.native: dict[str, int] = dict(state.get("native", {}))
        self.labels: dict[str, int] = dict(state.get("labels", {}))
        self.steps: dict[str, list[int]] = {key: list(value) for key, value in state.get("steps", {}).items()}     # numbers seen as step labels, by file
        self.scores_against: int = state.get("scores_against", 0)
        self.cut_prompts: int = state.get("cut_prompts", 0)
        self.reasoning: dict[str, int] = dict(state.get("reasoning", {}))

    def state(self) -> dict:
        """Plain values of all counts."""
        return dict(vars(self))

    def drop(self, reasons: dict[str, int]) -> None:
        """Rows that a conversion left out, by reason."""
        for reason, count in reasons.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + count


class Ingestion:
    """One run of the ingest stage."""

    def __init__(self, stage, checkpoint_rows: int):
        self.stage, self.config, self.every = stage, stage.config, checkpoint_rows
        self.path = stage.path("data")
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
                raise ConfigError(f"stage ingest: {name} changes rows as they are read from files, and the input is a dataset already; ingest its files with it")
        self.name = self.config.dataset or (self.dataset.name if self.dataset else _stem(self.path))
        self._check_mapped()
        self.kind = self._wanted_kind()
        if self.config.aspect_weights and (native := self.dataset.kind if self.dataset else _native(self.path, self.config)) != "ratings/1":
            raise ConfigError(f"stage ingest: aspect_weights makes scores of the aspects of ratings, and the data holds {native or 'no known rows'}; leave it out")
        self._benchmark_skips: dict[str, int] = {}
        self.benchmarks = self._benchmark_index()
        self._fractions = self.config.fractions()
        self._file_splits = {file.name: file.split for file in self.files if file.split}
        self._split_all = None if self.config.halves or (self._fractions["train"] < 1 and not self._holds_out()) else "train"
        # Only where the data itself says what belongs together or where it goes can a prompt come to lie in two splits.
        self._watch = bool(self._file_splits or self._named("group_id", "split"))
        self._raw_name: tuple[str, Record] | None = None

    # -- what to do -----------------------------------------------------------------------------------
    def _wanted_kind(self) -> str:
        if self.config.kind != "auto":
            return self.config.kind
        if self.dataset is not None:
            return self.dataset.kind
        found = _native(self.path, self.config)
        if found is None:
            if all(source.size == 0 or not head_rows(source, 1) for source in self.files):
                return "text/1"         # nothing readable: all of it goes to quarantine
            raise ConfigError("stage ingest: the columns of the data fit no known format. " + self._columns_hint())
        return _PREFERRED.get(found, found)

    def _named(self, *columns: str) -> list[SourceFile]:
        """Files whose first rows have one of these columns of ours."""
        named = {column: self.config.column_map.get(column, column) for column in columns}
        return [source for source in self.files if any(rename(row, named).get(column) not in (None, "") for row in head_rows(source) for column in columns)]

    def _holds_out(self) -> bool:
        """Whether the input has held-out rows of its own: then it keeps its splits."""
        if self.dataset is not None:
            return any(n for split, n in self.dataset.manifest["splits"].items() if split != "train")
        if any(split in HELD_OUT for split in self._file_splits.values()):
            return True
        named = {"split": self.config.column_map.get("split", "split")}
        for source in self._named("split"):
            for record in Reading(source):
                row = record.row if record.row is not None or record.code else parse_json(record.raw)[0]
                value = rename(row, named).get("split") if row else None
                if isinstance(value, str) and split_named(value) in HELD_OUT:
                    return True
        return False

    def _check_mapped(self) -> None:
        """Refuse a setting that names a column which is in no row: what it was for would be read from elsewhere, or not at all."""
        missing, seen = dict(self.config.columns()) if self.files else {}, set()
        for count in (64, 2_000):       # few rows nearly always do
            for source in self.files if missing else ():
                for row in head_rows(source, count):
                    seen.update(row)
                    missing = {ours: theirs for ours, theirs in missing.items() if theirs not in row and ("." not in theirs or ours not in rename(
                        {key: value for key, value in row.items() if key != ours}, {ours: theirs}))}
        if missing and seen:
            ours, theirs = next(iter(missing.items()))
            near = difflib.get_close_matches(theirs, sorted(seen), 1)
            raise ConfigError(f"stage ingest: {ours} is to be read from the column {theirs!r} (column_map or {ours}_column), which is in no row{f'; did you mean {near[0]!r}?' if near else '.'} "
                              f"Columns found: {', '.join(sorted(seen)[:40])}")

    def _columns_hint(self) -> str:
        seen = sorted({key for source in self.files[:3] for row in head_rows(source, 8) for key in row})[:40]
        inside = next((name for source in self.files[:3] for row in head_rows(source, 2) for name, value in row.items() if isinstance(value, list) and value and isinstance(value[0], dict)), None)
        inside = f"If the rows are those in {inside}: jq -c '.{inside}[]' FILE > NEW.jsonl. " if inside and len(seen) < 4 else ""
        if any("\0" in name for name in seen):
            inside = "The file looks like UTF-16 without its mark: iconv -f utf-16le -t utf-8 FILE > NEW. "
        return (f"Columns found: {', '.join(seen) or 'none'}. {inside}Name them with column_map={{our column: source column}} (or prompt_column, "
                f"chosen_column ...) or set format. Formats and their columns: {known_columns()}")

    def _benchmark_index(self) -> curation.DecontaminationIndex | None:
        given = self.stage.many("benchmarks")
        if self.config.decontaminate == "off":
            return None
        if not given:
            raise ConfigError("stage ingest: decontaminate needs evaluation sets; give benchmarks.NAME=PATH for each, or set decontaminate=off")
        index = curation.DecontaminationIndex(self.config.decontaminate_n, self.config.decontaminate, self.config.decontaminate_threshold)
        from stages.ingest import Config

        for label, item in given.items():
            try:
                files = find_files(item.path)
            except SourceError as error:
                raise ConfigError(f"stage ingest, input benchmarks.{label}: {error}") from None
            for source in files:
                adapter = adapter_of(source, Config(kind="prompts/1"))
                before, skipped = len(index), 0
                for record in adapter.records(Reading(source)) if adapter else Reading(source):
                    row = record.row if record.row is not None or record.code else parse_json(record.raw)[0]
                    texts = _asked_of(row, adapter) if row is not None else []
                    for turn, text in enumerate(texts):
                        index.add(text, later=turn > 0)
                    skipped += not texts
                if len(index) == before:
                    raise ConfigError(f"stage ingest, input benchmarks.{label}: no readable prompt was found in {source.name}; give files with a prompt, question, "
                                      "instruction, problem or text column (a pattern such as DIR/*.jsonl picks some of a directory)")
                if skipped:
                    self._benchmark_skips[f"{label}/{source.name}"] = skipped
        return index

    # -- the run --------------------------------------------------------------------------------------
    def run(self) -> None:
        """Phase `read` over the input, phase `group` over staged groups, then the account."""
        stage = self.stage
        found = stage.checkpoints.latest()
        state = found.state if found else {}
        database = stage.workdir / "ingest.sqlite"
        self.data = stage.writer("data", self.kind)
        self.quarantine = stage.writer("quarantine", "quarantine/1")
        self.seen = SeenRows(database, state.get("position") if found else None, state.get("group") if state.get("phase") == "group" else None)
        if not self.seen.valid:                 # the scratch file is behind: start again
            state = {}
            self.data.truncate(0)
            self.quarantine.truncate(0)
        self.counts = Counts(state.get("counts"))
        self.bias = curation.BiasAudit(state.get("bias"))
        self.step = state.get("step", 0)
        self.position = state.get("position", 0)
        if self.benchmarks is not None and state.get("decontam"):
            self.benchmarks.any_hit = set(state["decontam"]["any_hit"])
            self.benchmarks.best = {int(k): curation.Fraction(v) for k, v in state["decontam"]["best"].items()}
        if self.config.near_duplicates != "off":
            self.near = NearDuplicates(self.config.near_threshold, stage.workdir / "near.sqlite",
                                       group=self.config.near_duplicates == "group",
                                       keep_below=self.position if state else None)
            if self.config.near_duplicates == "group" and not self.near.complete:
                self._cluster()
        else:
            self.near = None
        self.gaps = self._rank_gaps() if self.config.pair_mode == "rank_gap" and self.kind == "pairs/1" else None
        if state.get("phase") != "group":
            self._read(self.position)
            if self.counts.rows_staged:
                self._checkpoint("group", group=-1)
                state = {"group": -1}
        if self.counts.rows_staged:
            self._regroup(state.get("group", -1))
        self._account()
        self.seen.close()
        if self.near:
            self.near.close()

    def _checkpoint(self, phase: str, group: int | None = None) -> None:
        self.step += 1
        self.seen.commit(self.position)
        if self.near:
            self.near.commit()
        state: dict[str, Any] = {"phase": phase, "position": self.position, "group": group, "step": self.step, "counts": self.counts.state(),
                                 "bias": self.bias.state()}
        if self.benchmarks is not None:
            state["decontam"] = {"any_hit": sorted(self.benchmarks.any_hit), "best": {str(k): str(v) for k, v in self.benchmarks.best.items()}}
        self.stage.save_checkpoint(self.step, state)

    # -- phase 1 --------------------------------------------------------------------------------------
    def _records(self) -> Iterator[tuple[str, Any, Record]]:
        """(source name, adapter, record) over the whole input; also tells the progress."""
        if self.dataset is not None:
            total = self.dataset.num_rows
            for number, row in enumerate(self.dataset.iter_rows(), 1):
                yield self.dataset.name, None, Record(number, None, row, None)
                if number % 1_000 == 0:
                    self.stage.progress(number, total, self._told())
            return
        total = sum(source.size for source in self.files) or 1
        done = 0
        for source in self.files:
            adapter = self._adapter(source)
            reading = Reading(source)
            for index, record in enumerate(adapter.records(reading) if adapter else reading):
                yield source.name, adapter, record
                if index % 1_000 == 0:
                    self.stage.progress(done + reading.done, total, self._told())
            if reading.damage:
                self.counts.damaged_files[source.name] = reading.damage
                self.stage.warn("damaged_file", f"{source.name}: {reading.damage}; the readable part was kept")
            if adapter is not None and adapter.unknown_splits:
                self.stage.warn("unknown_split", f"{source.name}: the column split says {', '.join(sorted(adapter.unknown_splits))}, which names no split (train, validation, test); "
                                "those rows were placed like rows without one. column_map.split=COLUMN names another column")
            done += source.size
        self.stage.progress(total, total, self._told())

    def _told(self) -> str:
        return f"{self.counts.rows_in:,} rows, {self.counts.rows_quarantined:,} in quarantine"

    def _adapter(self, source: SourceFile) -> Adapter | None:
        adapter = adapter_of(source, self.config)
        if adapter is None:
            if any(head_rows(source)):  # else nothing in it could be read, which is told of the rows
                self.stage.warn("unknown_format", f"{source.name} fits no known format. {self._columns_hint()}")
            return None
        self.counts.formats[source.name] = adapter.name
        self._tell_unread(source, adapter)
        if self.config.event_map and adapter.name != "events":
            raise ConfigError(f"stage ingest: event_map says what the signals of a product mean, and {source.name} is read as {adapter.name}; rows with prompt, response and action are signals "
                              "(format=events), else leave event_map out")
        return adapter

    def _tell_unread(self, source: SourceFile, adapter: Adapter) -> None:
        """Warn of columns that say which answers are good, or what the answer is, where the rows are read as something that has no place for it."""
        kinds, beside, answered = set(), {}, False
        for record in adapter.records(Record(line, None, row, None) for line, row in enumerate(head_rows(source), 1)):
            try:
                kind, row, _ = adapter(record.row) if record.row is not None and record.code is None else (None, {}, None)
                extra = json.loads(row.get("extra_json") or "{}")
            except (Bad, RecursionError, OverflowError):
                continue
            kinds.add(kind)
            answered = answered or any(row.get(name) for name in ("answer", "tests", "constraints"))
            beside.update((name, value) for name, value in extra.items() if value not in (None, "", []))
        if kinds <= {"demonstrations/1", "prompts/1"} and self.kind in kinds and (found := [name for name in beside if name in _ABOUT]):
            self.stage.warn("unread_context", f"the questions of {source.name} are read without {' and '.join(found)}, which may be what they are about; write it into the question, or pay no "
                            "attention where it is not")
        if found := [name for name in beside if name in _SHOWN]:
            self.stage.warn("unread_images", f"{source.name} has {' and '.join(found)}, and every stage works on texts alone: the model will answer without seeing them. Leave out the rows that need them; "
                            "where the texts stand alone, drop the column")
        if kinds == {"prompts/1"} and (found := [name for name in beside if _SEVERAL.fullmatch(name)]):
            self.stage.warn("unread_answers", f"{source.name} is read as prompts alone, but has {' and '.join(found[:4])}: where these are a model's answers, name them as a format has them: response_a, "
                            "response_b and preference (column_map={response_a: ...}, comparisons), completions and scores (rankings), or chosen and rejected (pairs)")
        if kinds == {"demonstrations/1"} and (found := [name for name, value in beside.items() if name in _JUDGED and not isinstance(value, (list, dict))]):
            self.stage.warn("unread_label", f"{source.name} is read as demonstrations, of which every answer is trained on alike, but has {' and '.join(found)}: score_column={found[0]} reads it as "
                            f"a rating, label_column={found[0]} as right or wrong; if it is neither, all is well")
        elif kinds == {"prompts/1"} and self.kind == "prompts/1" and not answered and (found := [name for name, value in beside.items() if name in _ANSWERS and not isinstance(value, (list, dict))]):
            self.stage.warn("unread_answer", f"the prompts of {source.name} have no answer that a verifier could check, but the file has {' and '.join(found)}: answer_column={found[0]} reads it")

    def _read(self, start: int) -> None:
        limit, seq = self.config.limit, 0
        for source, adapter, record in self._records():
            if limit is not None and seq >= limit:
                break
            if seq >= start:
                self._take(seq, source, adapter, record)
                if (seq + 1) % self.every == 0:
                    self.position = seq + 1
                    self._checkpoint("read")
            seq += 1
        self.position = seq

    def _take(self, seq: int, source: str, adapter: Adapter | None, record: Record) -> None:
        counts = self.counts
        counts.rows_in += 1
        self._raw_name = (source, record)
        row, code = record.row, record.code
        if code is None and row is None:
            row, code = parse_json(record.raw)
        if code is not None:
            return self._refuse((code,))
        try:
            if self.dataset is not None:
                kind, native, codes = self.dataset.kind, row, set()
                if self.config.aspect_weights:      # another score makes another row
                    native = {key: value for key, value in row.items() if key != "row_id"} | {"score": weighted(row.get("aspects"), self.config.aspect_weights)}
            elif adapter is None:
                raise Bad("missing_column")
            else:
                kind, native, codes = adapter(row)
                for name, count in native.pop("_reasoning", {}).items():
                    counts.reasoning[name] = counts.reasoning.get(name, 0) + count
                self._place_in_groups(source, kind, native)
                if self.config.system_prompts != "keep":
                    fold_system(native, self.config.system_prompts)
            if self.near is not None and self.near.group and self.dataset is not None:
                native["group_id"] = self.near.cluster_of(self._group_text(kind, native)) or native.get("group_id")
            path = conversions.route(kind, self.kind)
            if path is None:
                raise self._impossible(kind)
            if self.dataset is None:
                codes |= self._check(kind, native, record.raw)
                if codes:
                    return self._refuse(codes)
            self._place(seq, source, kind, native, path)
        except Bad as bad:
            self._refuse(bad.codes)
        except (RecursionError, OverflowError):         # absurdly nested or large values
            self._refuse(("wrong_type",))

    def _place_in_groups(self, source: str, kind: str, row: dict) -> None:
        """Split and group that are known before the system message is folded: groups leave it out."""
        if row.get("split") is None and source in self._file_splits:
            row["split"] = self._file_splits[source]
        if self.config.group_by != "auto":
            row.pop("group_id", None)
        if self.near is not None and self.near.group:
            row["group_id"] = self.near.cluster_of(self._group_text(kind, row)) or row.get("group_id")
        if row.get("group_id") is None and self.config.system_prompts == "merge" and kind != "text/1":
            row["group_id"] = group_id(self._group_text(kind, row))
        if kind == "stepwise/1":
            self.counts.steps[source] = sorted({*self.counts.steps.get(source, ()), *row["labels"]})

    def _group_text(self, kind: str, row: dict) -> str:
        return row["text"] if kind == "text/1" else _asked_text(prompt_of(kind, row), self.config.group_by)

    def _impossible(self, kind: str) -> ConfigError:
        name = self._raw_name[0] if self._raw_name and len(self.files) > 1 else None
        return ConfigError(f"stage ingest: {name or 'the data'} holds {kind} rows, which cannot become {self.kind}; set kind to one of "
                           f"{', '.join(conversions.reachable(kind))}, or give other data"
                           + (f" (files='...' reads some of the files, without {name})" if name else ""))

    def _check(self, kind: str, row: dict, raw: bytes | None) -> set[str]:
        """Codes of the rules for one row of our schema."""
        codes: set[str] = set()
        fields = [row[name] for name in _CONTENT[kind] if row.get(name) is not None]
        # In JSON a control character can only come as an escape; most lines have none to look for.
        if raw is None or b"\\u00" in raw or b"\\b" in raw or b"\\f" in raw or b"\x7f" in raw:
            if rules.has_control_chars(fields):
                codes.add("control_chars")
        limit = self.config.max_chars
        if limit is not None and (raw is None or len(raw) > limit) and sum(map(len, rules.texts_of(fields))) > limit:
            codes.add("too_long")
        prompt, sides = row.get("prompt"), []
        if kind in ("pairs/1", "segments/1"):
            sides = [row["chosen"], row["rejected"]]
            codes.update(rules.pair_codes(prompt, *sides))
        elif kind == "comparisons/1":
            sides = [row["response_a"], row["response_b"]]
            codes.update(rules.pair_codes(prompt, *sides))
        elif kind == "demonstrations/1":
            codes.update(rules.conversation_codes(row["messages"], row["train_turns"]))
            sides = [[row["messages"][turn]] for turn in row["train_turns"]]
        elif kind == "prompts/1":
            codes |= rules.prompt_codes(prompt) | rules.verifiable_codes(row)
            codes.update(rules.role_codes([message["role"] for message in prompt] + ["assistant"]))
        elif kind == "rankings/1":
            sides = row["completions"]
            codes |= rules.prompt_codes(prompt)
            for side in sides:
                codes |= rules.completion_codes(prompt, side)
            if len(sides) < 2:
                codes.add("no_pair")
        elif kind in ("ratings/1", "unpaired/1"):
            sides = [row["completion"]]
            codes |= rules.prompt_codes(prompt) | rules.completion_codes(prompt, row["completion"])
        elif kind == "stepwise/1":
            codes |= rules.prompt_codes(prompt)
            if not all(step.strip() for step in row["completions"]):
                codes.add("empty_completion")
        elif kind == "text/1" and not row["text"].strip():
            codes.add("empty_completion")
        if self.config.min_chars:
            if kind == "text/1":
                sides = [[{"content": row["text"]}]]
            if any(rules.messages_chars(side) < self.config.min_chars for side in sides):
                codes.add("too_short")
        if prompt and rules.messages_chars(prompt) > LONG_PROMPT:
            self.counts.long_prompts += 1
        return codes

    def _place(self, seq: int, source: str, kind: str, row: dict, path: list[str]) -> None:
        """Duplicates, contamination, then conversion of one good row. Raises Bad."""
        if self.benchmarks is not None and self.benchmarks.check(*([row["text"]] if kind == "text/1" else _user_turns(
                row["messages"] if kind == "demonstrations/1" else row["prompt"]))):
            raise Bad("contaminated")
        if kind == "stepwise/1" and row.get("is_quality_control") and self.kind != kind:
            raise Bad("quality_control")
        if labels := agreement.labels_of(kind, row):
            slices = agreement.slices_of(row)
            for label in labels:
                self.seen.label(*label, slices, seq)
        key, exact, golden = None, False, None
        flagging = self.config.contradictions == "flag_second"
        annotated = kind == "comparisons/1" and bool((row.get("ann") or {}).get("annotator_id"))
        # Equal labels of an item are votes too, where votes are counted.
        signal = kind == "unpaired/1" and self.dataset is None and votes.is_event(row)      # of several the last counts
        counted = signal or (self.config.contradictions == "keep_as_votes" and (kind == "pairs/1" == self.kind or (kind == "comparisons/1" and "pairs/1" in path and not annotated))) or (
            self.config.on_conflict == "majority" and kind == "unpaired/1" == self.kind)
        if self.config.deduplicate != "off" and not counted:
            key, exact = self._identity(kind, row)
            answered, golden = _gold(key, row) if kind == "prompts/1" and flagging and self.config.deduplicate == "auto" else (None, None)
            if flagging and kind == "pairs/1":
                found = self.seen.any_of(key, bytes.fromhex(_reversed_id(row)))
                if found is not None:
                    raise Bad("duplicate_row" if found == key else "contradicts_row")
            elif self.seen.has(key):
                raise Bad("contradicts_row" if golden is not None and self.seen.has(answered) and not self.seen.has(golden) else "duplicate_row")
        if self.near is not None and not self.near.group and not self.near.first(seq, _prompt_text(kind, row)):
            raise Bad("near_duplicate")
        rows = [row]
        if kind == "comparisons/1":
            self.counts.labels[_label(row)] = self.counts.labels.get(_label(row), 0) + 1
        hops, have = path[1:] or [kind], kind
        staged_to = None
        if kind == "comparisons/1" and "pairs/1" in path and self.config.contradictions != "off" and (annotated or not flagging):
            staged_to, hops = hops, []          # the labels of an item meet in phase 2
        for position, want in enumerate(hops):
            if (have, want) in conversions.GROUPED:
                staged_to = hops[position:]
                break
            rows = [new for item in rows for new in conversions.rowwise(have, want, item, self.config, self._draw(seq), self.gaps)]
            have = want
        voting = (self.config.contradictions in ("drop_both", "keep_as_votes") and kind == have == "pairs/1") or (
            have == self.kind == "unpaired/1" and not staged_to and (signal or self.config.deduplicate != "off"))
        if voting and staged_to:
            raise ConfigError(f"stage ingest: contradictions={self.config.contradictions} cannot be combined with the conversion to "
                              f"{self.kind}; make pairs first (kind=pairs/1), then convert that dataset")
        if flagging and have == "pairs/1" and ((kind == "pairs/1" and key is None) or (kind == "comparisons/1" and not annotated)):
            # Comparisons, and runs without deduplication, have no key of the pair yet.
            if self.seen.has(_tagged(_reversed_id(rows[0]))):
                raise Bad("contradicts_row")
            self.seen.add(_tagged(row_id("pairs/1", _stripped("pairs/1", rows[0]))), seq)
        if key is not None:
            self.seen.add(key, seq)
            if golden is not None:
                self.seen.add(answered, seq)
                self.seen.add(golden, seq)
        self.counts.native[kind] = self.counts.native.get(kind, 0) + 1
        if staged_to or voting:
            for index, item in enumerate(rows):
                by_prompt = not voting and ("pairs/1" if have == "comparisons/1" else have, self.kind) in conversions.GROUPED
                group = hashlib.sha256(prompt_id(item["prompt"]).encode()).digest()[:16] if by_prompt else votes.item_key(item)
                self.seen.stage(group, seq, index, {
                    "row": item, "kind": have, "source": source, "line": self._raw_name[1].line, "seq": seq})
            self.counts.rows_staged += 1
            return
        self.counts.rows_kept += 1
        # One row of the wanted kind that came as such: its key is its row id.
        plain = len(rows) == 1 and rows[0] is row
        self._write(rows, source, seq, key.hex() if exact and plain and kind == self.kind else None, once=not plain)

    def _identity(self, kind: str, row: dict) -> tuple[bytes, bool]:
        """(key of a row for duplicates, whether it is the row id): the content after strip, or the normalised text of prompts and demonstrations."""
        if self.config.deduplicate == "auto" and kind == "prompts/1":
            text = "\x1f".join(f"{m['role']}:{normalise_text(m.get('content') or '')}{m.get('functions') or ''}" for m in row["prompt"])
            return hashlib.blake2b(b"prompt\x1f" + text.encode(), digest_size=16).digest(), False
        if self.config.deduplicate == "auto" and kind == "demonstrations/1":
            text = "\x1f".join(f"{m['role']}:{normalise_text(m.get('content') or '')}:{m.get('function_calls') or ''}{m.get('functions') or ''}" for m in row["messages"])
            return hashlib.blake2b(f"demonstration\x1f{row['train_turns']}".encode() + text.encode(), digest_size=16).digest(), False
        same = _stripped(kind, row)
        return bytes.fromhex(row_id(kind, same)), same is row

    def _draw(self, seq: int):
        return lambda n: int(self.stage.rng("best_vs_random", seq).integers(n))

    # -- phase 2 --------------------------------------------------------------------------------------
    def _regroup(self, after: int) -> None:
        total = self.seen.count_groups()
        done = 0
        for gid, staged in self.seen.groups(after):
            rows, kinds = [item["row"] for _, item in staged], [item["kind"] for _, item in staged]
            kept, gone = votes.settle_events(rows) if kinds[0] == "unpaired/1" and self.dataset is None else (range(len(rows)), {})
            rows_out, reasons, lost = self._settle([kinds[index] for index in kept], [rows[index] for index in kept], gid)
            lost = gone | {kept[index]: code for index, code in lost.items()}
            self.counts.drop({reason: count for reason, count in reasons.items() if count})
            refused = {staged[index][1]["seq"] for index in lost}
            seqs = {item["seq"] for _, item in staged} - refused
            for index, code in lost.items():
                item = staged[index][1]
                if item["seq"] in seqs:
                    continue
                self._raw_name = (item["source"], Record(item["line"], None, item["row"], None))
                self._refuse((code,))
            self.counts.rows_kept += len(seqs)
            self._write(rows_out, staged[0][1]["source"], of_group(self.position, gid), once=self.kind not in kinds)
            done += 1
            if done % 1_000 == 0:
                self.stage.progress(done, total, f"{done:,} of {total:,} groups")
            if done % self.every == 0:
                self._checkpoint("group", group=gid)
        self.stage.progress(total, total, f"{total:,} groups")

    def _settle(self, kinds: list[str], rows: list[dict], gid: int) -> tuple[list[dict], dict[str, int], dict[int, str]]:
        """(rows out, dropped by reason, {index of an input row: why nothing came of it}) of the rows of one group; beside comparisons there may be pairs that were made of others."""
        config, have = self.config, "comparisons/1" if "comparisons/1" in kinds else kinds[0] if kinds else self.kind
        if have == "comparisons/1":
            items: dict[Any, list[int]] = {}
            for index, (kind, row) in enumerate(zip(kinds, rows)):
                items.setdefault(votes.item_key(row) if kind == have else index, []).append(index)
            pairs, owners, lost, merged = [], [], {}, 0
            for indices in items.values():
                made, gone = votes.settle_comparisons([rows[index] for index in indices], config) if kinds[indices[0]] == have else ([rows[indices[0]]], {})
                pairs += made
                owners += [indices] * len(made)
                lost |= {indices[index]: code for index, code in gone.items()}
                merged += len(indices) - len(made) - len(gone)
            reasons = {"merged_votes": merged}
            if self.kind == "pairs/1" or not pairs:
                return pairs, reasons, lost
            if ("pairs/1", self.kind) in conversions.ROWWISE:
                out: list[dict] = []
                for pair, indices in zip(pairs, owners):
                    try:
                        out += conversions.rowwise("pairs/1", self.kind, pair, config, self._draw(gid))
                    except Bad as bad:
                        lost |= dict.fromkeys(indices, bad.codes[0])
                return out, reasons, lost
            out, more, none = conversions.grouped("pairs/1", self.kind, pairs, config, self._draw(gid))
            return out, reasons | more, lost | {index: code for at, code in none.items() for index in owners[at]}
        if have == self.kind == "unpaired/1":
            out, lost = votes.settle_labels(rows, config.on_conflict)
        elif have == self.kind == "pairs/1" and config.contradictions == "keep_as_votes":
            out, lost = votes.settle_pairs(rows, config.tie_policy)
        elif have == self.kind == "pairs/1":
            same = all(rules.same_completion(row["chosen"], rows[0]["chosen"]) for row in rows)
            out, lost = (rows, {}) if same else ([], dict.fromkeys(range(len(rows)), "contradicts_row"))
        else:
            return conversions.grouped(have, self.kind, rows, config, self._draw(gid))
        return out, {"merged_votes": len(rows) - len(out) - len(lost)}, lost

    # -- writing --------------------------------------------------------------------------------------
    def _write(self, rows: list[dict], source: str, seq: int, identity: str | None = None, once: bool = False) -> None:
        """Complete rows and write them. seq: their input position, or their group's number. once: converted rows, which another input row may become, too."""
        out, made = [], set()
        for row in rows:
            if self.kind == "prompts/1" and once and self.config.deduplicate != "off":
                if not self.seen.add(self._identity("prompts/1", row)[0], seq):
                    self.counts.drop({"duplicate_prompt": 1})
                    continue
            row.pop("_grade", None)
            first_won = row.pop("_first_won", None)
            for holder, name in ((row, "collected_at"), (row.get("ann") or {}, "annotated_at")):
                if isinstance(holder.get(name), str):           # as text it can be put aside
                    holder[name] = datetime.fromisoformat(holder[name])
            if self.dataset is not None and self.dataset.kind == self.kind and "row_id" in row:
                done = row if self._settled(row["split"]) else {**row, "split": self._split(row)}  # a dataset of ours keeps its other columns
            else:
                done = self._complete(row, source, identity)
                if self._watch and (messages := prompt_of(self.kind, done)) is not None and \
                        self.seen.split_of(bytes.fromhex(group_id(_asked_text(messages, self.config.group_by)) or done["prompt_id"]), done["split"], seq) != done["split"]:
                    self.counts.cut_prompts += 1
            if identity is None and self.config.deduplicate != "off":
                key = _tagged(done["row_id"], b"converted")
                if key in made or (once and not self.seen.add(key, seq)):
                    self.counts.drop({"duplicate_after_conversion": 1})
                    continue
                made.add(key)
            out.append(done)
            if self.kind == "pairs/1":
                if row.get("chosen_score") is not None and row.get("rejected_score") is not None:
                    self.counts.scores_against += row["chosen_score"] < row["rejected_score"]
                gens = [(row.get(f"{side}_gen") or {}).get("model_id") for side in ("chosen", "rejected")]
                self.bias.add(_said(row["chosen"]), _said(row["rejected"]), (gens[0], gens[1]), prompt=_said(row["prompt"]) if row["prompt"] else "",
                              first_won=first_won, strength=row.get("strength"))
            elif self.kind == "unpaired/1":
                key = "desirable" if row["label"] else "undesirable"
                self.counts.labels[key] = self.counts.labels.get(key, 0) + 1
        self.counts.rows_out += len(out)
        self.data.write(out)

    def _complete(self, row: dict, source: str, identity: str | None) -> dict:
        origin = row.get("origin") or ("ai" if (row.get("ann") or {}).get("annotator_type") == "ai" else self.config.origin)
        messages = prompt_of(self.kind, row)
        if messages is not None:
            row["prompt_id"] = prompt_id(messages)
            if row.get("group_id") is None:
                row["group_id"] = group_id(_asked_text(messages, self.config.group_by))
        assigned = row.get("split")
        row = complete_row(self.kind, row, dataset=self.name, source=source, origin=origin, identity=identity)
        row["split"] = assigned if assigned is not None and self._settled(assigned) else self._split(row)
        return row

    def _settled(self, split: str) -> bool:
        """Whether a row stays in the split that it came with: all do where the input has held-out rows, and the held-out ones do always."""
        return self._split_all is not None or split in HELD_OUT or (split != "train" and not self.config.halves)

    def _split(self, row: dict) -> str:
        if self._split_all is not None:
            return self._split_all
        return curation.half_of(row["group_id"]) if self.config.halves else curation.split_of(row["group_id"], self.config.salt, self._fractions)

    def _refuse(self, codes) -> None:
        source, record = self._raw_name
        codes, counts = sorted(set(codes)), self.counts
        counts.rows_quarantined += 1
        counts.rows_damaged += any(code not in rules.POLICY_CODES for code in codes)
        for code in codes:
            counts.codes[code] = counts.codes.get(code, 0) + 1
            if len(counts.samples.setdefault(code, [])) < SAMPLES_PER_CODE:
                counts.samples[code].append([source, record.line])
        raw = record.raw if record.raw is not None else canonical_bytes(record.row)
        text = raw.decode("utf-8", "backslashreplace")
        if len(text) > RAW_LIMIT:
            text = text[:RAW_LIMIT] + f"... ({len(text)} characters)"
        self.quarantine.write([complete_row("quarantine/1", {
            "source_file": source, "line_no": record.line, "raw_json": text, "codes": codes, "stage": "ingest"},
            dataset=self.name, source=source, origin=self.config.origin)])

    # -- passes before the first row is placed --------------------------------------------------------
    def _pass(self) -> Iterator[tuple[int, str, dict]]:
        """(input position, kind, native row) of the readable rows, in a pass of its own that counts nothing."""
        limit, counts = self.config.limit, self.counts
        self.counts = Counts()
        for seq, (_, adapter, record) in enumerate(self._records()):
            if limit is not None and seq >= limit:
                break
            row = record.row if record.row is not None or record.code else parse_json(record.raw)[0]
            if row is None or (adapter is None and self.dataset is None):
                continue
            try:
                kind, native = (self.dataset.kind, row) if self.dataset is not None else adapter(row)[:2]
            except (Bad, RecursionError, OverflowError):
                continue
            yield seq, kind, native
        self.counts = counts

    def _cluster(self) -> None:
        """Find the clusters of near duplicates: a later row may join two of them."""
        for seq, kind, native in self._pass():
            self.near.join(seq, self._group_text(kind, native))
        self.near.finish()

    def _rank_gaps(self) -> set[int]:
        """The rank gaps of all rankings: a gap is the same stage in every one of them (`data.curriculum`)."""
        return {gap for _, kind, native in self._pass() if kind == "rankings/1" for gap in conversions.rank_gaps(native["ranks"])}

    # -- the account ----------------------------------------------------------------------------------
    def _account(self) -> None:
        stage, counts, config = self.stage, self.counts, self.config
        if counts.rows_in != counts.rows_kept + counts.rows_quarantined:
            raise AssertionError(f"rows do not add up: {counts.rows_in} in, {counts.rows_kept} kept, {counts.rows_quarantined} quarantined")
        account: dict[str, Any] = {
            "rows_in": counts.rows_in, "rows_kept": counts.rows_kept, "rows_quarantined": counts.rows_quarantined,
            "rows_out": counts.rows_out, "codes": dict(sorted(counts.codes.items())), "formats": counts.formats,
            "damaged_files": counts.damaged_files, **({"splits_of_files": self._file_splits} if self._file_splits else {}),
            "conversion": {"from": dict(sorted(counts.native.items())), "to": self.kind, "rows_in": counts.rows_kept,
                           "rows_out": counts.rows_out, "dropped": dict(sorted(counts.dropped.items()))}}
        if counts.labels:
            account["labels"] = dict(sorted(counts.labels.items()))
        if counts.reasoning:
            account["reasoning"] = dict(sorted(counts.reasoning.items()))
        bias = self.bias.report()
        if bias:
            account["bias"] = bias
            account["prefixes"] = self.bias.prefix_bias()
        if self.benchmarks is not None:
            account["decontamination"] = self.benchmarks.report()
        agreed = agreement.agreement(self.seen.labels())
        if agreed:
            account["agreement"] = agreed["all", ""]
            stage.report("agreement", table=[{"slice": part, "value": value, **found} for (part, value), found in agreed.items()])
        splits = self.data.close(account)["splits"]
        self.quarantine.close({"rows": counts.rows_quarantined, "codes": account["codes"]})
        stage.summary({"rows_in": counts.rows_in, "rows_kept": counts.rows_kept, "rows_quarantined": counts.rows_quarantined,
                       "rows_out": counts.rows_out} | {f"split.{name}": n for name, n in splits.items()} | {f"quarantine.{code}": n for code, n in account["codes"].items()}
                      | {f"dropped.{reason}": n for reason, n in sorted(counts.dropped.items())}
                      | {f"reasoning.{name}": n for name, n in sorted(counts.reasoning.items())}
                      | {f"bias.{name}": value for name, value in bias.items()}
                      | {f"decontamination.{name}": value for name, value in account.get("decontamination", {}).items()}
                      | {f"agreement.{name}": value for name, value in account.get("agreement", {}).items() if value is not None})
        for text in agreement.warnings(agreed):
            stage.warn("agreement", text)
        self._warnings(account)
        stage.report("ingest", markdown=self._markdown(account),
                     table=[{"code": code, "rows": n, "meaning": rules.CODES.get(code, ""), "first": _places(counts.samples.get(code, []))}
                            for code, n in account["codes"].items()] or [{"code": "", "rows": 0, "meaning": "nothing was refused", "first": ""}])
        if not counts.rows_in and self.files:
            raise StageFailure(f"{', '.join(Path(file.path).name for file in self.files[:3])} {'hold' if len(self.files) > 1 else 'holds'} no rows; give a file with data")
        unclear = [source for source, found in counts.steps.items() if 0 in found and -1 not in found]
        if unclear and config.step_labels == "auto":
            raise StageFailure(f"the step labels of {', '.join(unclear[:3])} are 0 and 1 and never -1: write step_labels=zero_one if 0 is a wrong step, or step_labels=minus_one if 0 is a "
                               "neutral one")
        if counts.rows_in and counts.rows_damaged / counts.rows_in > config.max_quarantine_fraction:
            worst = sorted(account["codes"].items(), key=lambda item: (-item[1], item[0]))[:5]
            hint = " " + self._columns_hint() if "missing_column" in account["codes"] and self.files else ""
            if worst[0][0] == "invalid_utf8":
                hint += " A file in another encoding can be rewritten: iconv -f latin1 -t utf-8 FILE > NEW (or -f utf-16)."
            if worst[0][0] == "parse_error" and any(file.format == "jsonl" for file in self.files):
                hint += " Every line has to be one JSON object; JSON over several lines, or several objects in one, can be rewritten: jq -c . FILE > NEW.jsonl."
            if worst[0][0] == "duplicate_row":
                hint += " max_quarantine_fraction=1 takes the first of each; deduplicate=off keeps all."
            hint += "".join(f" {code}: {rules.CODES[code]}." for code, _ in worst if code in ("scale_unknown", "label_unsaid", "orphan_message", "verifier_spec_invalid", "bad_label", "wrong_type", "contradicts_row"))
            hint += "".join(f" {name}: {damage}." for name, damage in list(counts.damaged_files.items())[:3])
            raise StageFailure(
                f"{counts.rows_damaged} of {counts.rows_in} rows ({counts.rows_damaged / counts.rows_in:.1%}) were refused, more than "
                f"max_quarantine_fraction={config.max_quarantine_fraction}: "
                + ", ".join(f"{n} {code} (first at {_places(counts.samples[code][:1])})" for code, n in worst)
                + f". See them: posttrain show {self.quarantine.path}. Repair the data, choose another format or column_map, or raise "
                f"max_quarantine_fraction.{hint}")

    def _warnings(self, account: dict) -> None:
        stage, counts = self.stage, self.counts
        if not counts.rows_in:
            stage.warn("no_rows", "the input holds no rows; the dataset is empty")
        elif not counts.rows_out:
            stage.warn("no_rows", "no row was left; the dataset is empty (see the quarantine codes and dropped reasons)")
        if counts.rows_quarantined:
            stage.warn("quarantined", f"{counts.rows_quarantined} of {counts.rows_in} rows were refused: "
                       + ", ".join(f"{n} {code}" for code, n in account["codes"].items()))
        if counts.cut_prompts:
            stage.warn("prompt_in_two_splits", f"{counts.cut_prompts} rows have a prompt that is also in another split, because the data's own column group_id or its own splits say so. "
                       "group_by=opening splits by prompt whatever that column says; rows of training files that are also in the test files are taken out with decontaminate=coverage "
                       "and benchmarks.NAME=FILE")
        if self.near is not None and self.near.group and self.near.clusters() and (self._split_all is None):
            stage.warn("near_groups", f"{self.near.clusters()} groups of near-duplicate prompts were kept together in this input only: another file with one of these prompts may have it in "
                       "another split; ingest them as one input")
        if self._benchmark_skips:
            stage.warn("benchmark_rows_skipped", "rows of evaluation sets in which no prompt could be read, and which are not looked for: "
                       + ", ".join(f"{n} of {name}" for name, n in self._benchmark_skips.items()))
        splits = sorted({source.name.split("/")[0] for source in self.files if "/" in source.name}) if (Path(self.path) / "dataset_dict.json").exists() else []
        if len(splits) > 1 and not self._file_splits:
            stage.warn("splits_joined", f"the splits {', '.join(splits)} of the saved dataset were read as one set of rows; files='{splits[-1]}/*' reads one of them")
        for text in self.bias.warnings():
            stage.warn("bias", text)
        if counts.reasoning.get("left"):
            stage.warn("reasoning_left_out", f"{counts.reasoning['left']} assistant messages have reasoning in a field of its own that is not trained: it stays in extra_json. "
                       + ("Ingest with reasoning=think to write it before their text." if self.config.reasoning == "drop" else "It, or their content, is no text."))
        if counts.scores_against:
            stage.warn("scores_against", f"{counts.scores_against} pairs have a higher score for the rejected answer: are these costs, or are chosen and rejected swapped? "
                       "(chosen_column=rejected rejected_column=chosen swaps them)")
        if counts.long_prompts:
            stage.warn("very_long_prompt", f"{counts.long_prompts} prompts have more than {LONG_PROMPT} characters")
        if self.kind == "demonstrations/1" and counts.native.get("pairs/1"):
            stage.warn("chosen_only", "demonstrations were made of chosen answers only: training on them also raises the likelihood of "
                       "rejected answers, which resemble them")
        if self.kind == "unpaired/1" and counts.labels:
            from stages.ingestion.pairing import lambda_band

            band = lambda_band(counts.labels.get("desirable", 0), counts.labels.get("undesirable", 0))
            if band is None or not band[1]:
                stage.warn("one_class", "all labels are the same; KTO and BCO need both")
            elif not band[0] <= 1 <= band[1]:
                stage.warn("class_balance", f"with lambda_U = 1, lambda_D should lie in [{band[0]:.3g}, {band[1]:.3g}]; suggested: {band[0]:.3g}")
        rate = account.get("decontamination", {}).get("contamination_rate", 0)
        if rate > 0.02:
            stage.warn("contamination", f"{rate:.1%} of the evaluation items overlap with this data (more than 2%): decide whether to use it")

    def _markdown(self, account: dict) -> str:
        lines = [f"# Ingest: {self.name} as {self.kind}", "",
                 f"{account['rows_in']} rows read = {account['rows_kept']} kept + {account['rows_quarantined']} quarantined; "
                 f"{account['rows_out']} rows written.", ""]
        if account["codes"]:
            lines += ["| code | rows | first at | meaning |", "|---|---|---|---|"]
            lines += [f"| {code} | {n} | {_places(self.counts.samples.get(code, []))} | {rules.CODES.get(code, '')} |"
                      for code, n in account["codes"].items()] + [""]
        if self._file_splits:
            lines += ["Splits that files say: " + ", ".join(f"{name} = {split}" for name, split in self._file_splits.items()), ""]
        if account["conversion"]["dropped"]:
            lines += ["Dropped by the conversion: " + ", ".join(f"{n} {reason}" for reason, n in account["conversion"]["dropped"].items()), ""]
        for title, values in (("Preference bias", account.get("bias")), ("Decontamination", account.get("decontamination")),
                              ("Agreement of annotators", account.get("agreement"))):
            if values:
                lines += [f"## {title}", "", "| | |", "|---|---|", *(f"| {k} | {v:.4g} |" if isinstance(v, float) else f"| {k} | {v} |"
                                                                      for k, v in values.items()), ""]
        if account.get("prefixes"):
            lines += ["Beginnings of answers that tell chosen from rejected ones:", "", "| beginning | chosen | rejected | log-odds | z |", "|---|---|---|---|---|",
                      *(f"| {row['prefix'].replace('|', chr(92) + '|')} | {row['chosen']} | {row['rejected']} | {row['log_odds_ratio']:.3g} | {row['z']:.3g} |" for row in account["prefixes"]), ""]
        return "\n".join(lines)


def _native(path: str, config) -> str | None:
    from stages.ingest import native_kind

    return native_kind(path, config)


# -- small things -----------------------------------------------------------------------------------
def _stem(path: str) -> str:
    name = Path(path.rstrip("/")).name
    for suffix in (*PACKED_ENDINGS, *EXTENSIONS):
        if name.lower().endswith(suffix):
            name = name[:-len(suffix)]
    return name.strip("*?[]") or "data"


def _places(samples: list) -> str:
    return ", ".join(f"{source}:{line}" for source, line in samples)


def _said(messages: list[dict]) -> str:
    return messages[-1].get("content") or ""


def _user_turns(messages: list[dict]) -> list[str]:
    return [message.get("content") or "" for message in messages if message.get("role") == "user"]


def _asked_of(row: dict, adapter: Adapter | None) -> list[str]:
    """What a row of an evaluation set asks, turn by turn: its turns, what the adapter makes of it, or the text of the column that looks like it."""
    turns = row.get("turns")
    if isinstance(turns, list) and (texts := [text for text in turns if isinstance(text, str) and text.strip()]):
        return texts
    texts: list[str] = []
    try:
        kind, native, _ = adapter(row) if adapter is not None else ("text/1", {"text": ""}, None)
        texts = [native["text"]] if kind == "text/1" else _user_turns(conversions.prompt_row(kind, native)["prompt"])
        texts = [*texts[:-1], question_of(native)] if native.get("choices") else texts  # asked with other options, it is the same question
    except (Bad, RecursionError, OverflowError):
        pass
    for name in ("prompt", *_ASKED, "text", "messages"):
        if any(text.strip() for text in texts):
            break
        value = row.get(name)
        texts = [value] if isinstance(value, str) else [text for item in value if isinstance(item, dict) and item.get("role") in ("user", None) for text in
                                                        rules.texts_of(item.get("content"))] if isinstance(value, list) else []
    return [text for text in texts if text.strip()]


def _prompt_text(kind: str, row: dict) -> str:
    """User turns of a row's prompt (the text itself for text rows)."""
    if kind == "text/1":
        return row["text"]
    return "\n".join(_user_turns(row["messages"] if kind == "demonstrations/1" else row["prompt"]))


def _asked_text(messages: list[dict], group_by: str) -> str:
    """The text that a split never cuts, normalised: the first user turn, or the whole prompt; the system message left out."""
    said = [normalise_text(message.get("content") or "") for message in messages if message["role"] == "user" or (group_by == "prompt" and message["role"] != "system")]
    return "\n".join(said if group_by == "prompt" else said[:1])


def _stripped(kind: str, row: dict) -> dict:
    """The row with its messages as equality sees them; the row itself where there is nothing to strip."""
    changed = {name: clean for name in _CONTENT[kind] if isinstance(value := row.get(name), list) and value and isinstance(value[0], dict)
               and (clean := rules.stripped(value)) is not value}
    return {**row, **changed} if changed else row


def _label(row: dict) -> str:
    if row["label_kind"] == "likert":
        return f"likert_{row['label']}"
    if row["label_kind"] == "prob":
        return "A" if row["p_a"] > 0.5 else "B" if row["p_a"] < 0.5 else "tie"
    return "votes"


def _reversed_id(pair: dict) -> str:
    pair = _stripped("pairs/1", pair)
    return row_id("pairs/1", {"prompt": pair["prompt"], "chosen": pair["rejected"], "rejected": pair["chosen"]})


def _gold(key: bytes, row: dict) -> tuple[bytes, bytes | None]:
    """(key of a prompt that has an answer, key of the prompt with this one): None without an answer."""
    answer = normalise_text(str(row.get("answer") or ""))
    return _tagged(key.hex(), b"answered"), _tagged(key.hex(), b"answer\x1f" + answer.encode()) if answer else None


def _tagged(identity: str, tag: bytes = b"pair") -> bytes:
    return hashlib.blake2b(tag + b"\x1f" + bytes.fromhex(identity), digest_size=16).digest()
