"""The ingest run: one pass over the input, and a second one over groups where rows of one prompt
must meet (ratings -> pairs, thumbs -> pairs, contradicting votes ...).

What it is made of, in the order in which a row meets it::

    input_data      the files or the dataset that are read, row by row, each file through the adapter of its format
    rules           what is wrong with a row (quarantine codes)
    benchmarks      what evaluation sets ask, which training data must not hold
    duplicates      when two rows are the same          near_duplicates   ... nearly the same
    conversions     rows of one kind to rows of another, one by one or all of a prompt together
    grouping        the second pass: rows of one prompt or one item that have met
    splits          train, validation, test
    counts          what is counted, and the rows refused
    account         the end: report, warnings, whether the data is any good

Everything that must survive a kill lives in the checkpoint (counts, position), in complete dataset
parts, or in one SQLite file that commits with the checkpoint. Checkpoints come at fixed input
positions, so that a killed run closes the same parts as an undisturbed one.
"""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Any, Callable, Iterable

from stages.ingestion import account, agreement, conversions, curation, grouping, rules, votes
from stages.ingestion.adapters import weighted
from stages.ingestion.benchmarks import benchmark_index
from stages.ingestion.counts import LONG_PROMPT, Counts, quarantine_row
from stages.ingestion.duplicates import gold_keys, id_key, identity, reversed_id, stripped, tagged
from stages.ingestion.fields import fold_system
from stages.ingestion.formats import Adapter
from stages.ingestion.input_data import InputData
from stages.ingestion.near_duplicates import NearDuplicates, group_id
from stages.ingestion.rules import Bad
from stages.ingestion.seen import SeenRows, of_group
from stages.ingestion.sources import Record, parse_json
from stages.ingestion.splits import Splits, asked_text, group_text
from stages.spec import ConfigError
from storage.schema import complete_row, prompt_id, prompt_of, row_id


class Ingestion:
    """One run of the ingest stage."""

    def __init__(self, stage, checkpoint_rows: int):
        self.stage, self.config, self.every = stage, stage.config, checkpoint_rows
        self.input = InputData(stage)
        self.kind = self.input.kind
        self.benchmarks, self.benchmark_skips = benchmark_index(stage)
        self.splits = Splits(self.input)
        self.flagging = self.config.contradictions == "flag_second"

    def run(self) -> None:
        """Phase `read` over the input, phase `group` over staged groups, then the account."""
        state = self._resume()
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

    # -- what survives a kill -------------------------------------------------------------------------
    def _resume(self) -> dict[str, Any]:
        """Open outputs, scratch files and counts as the last checkpoint left them; its state, empty where the run
        starts.
        """
        stage = self.stage
        found = stage.checkpoints.latest()
        state = found.state if found else {}
        self.data = stage.writer("data", self.kind)
        self.quarantine = stage.writer("quarantine", "quarantine/1")
        self.seen = SeenRows(
            stage.workdir / "ingest.sqlite",
            state.get("position") if found else None,
            state.get("group") if state.get("phase") == "group" else None,
        )
        if not self.seen.valid:  # the scratch file is behind: start again
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
        self.near = self._near_duplicates(resumed=bool(state))
        self.gaps = self._rank_gaps() if self.config.pair_mode == "rank_gap" and self.kind == "pairs/1" else None
        return state

    def _checkpoint(self, phase: str, group: int | None = None) -> None:
        self.step += 1
        self.seen.commit(self.position)
        if self.near:
            self.near.commit()
        state: dict[str, Any] = {
            "phase": phase,
            "position": self.position,
            "group": group,
            "step": self.step,
            "counts": self.counts.state(),
            "bias": self.bias.state(),
        }
        if self.benchmarks is not None:
            state["decontam"] = {
                "any_hit": sorted(self.benchmarks.any_hit),
                "best": {str(k): str(v) for k, v in self.benchmarks.best.items()},
            }
        self.stage.save_checkpoint(self.step, state)

    # -- passes before the first row is placed --------------------------------------------------------
    def _near_duplicates(self, resumed: bool) -> NearDuplicates | None:
        """Near duplicates as far as they are known. Their groups are found in a pass of its own: a later row may join
        two of them.
        """
        if self.config.near_duplicates == "off":
            return None
        near = NearDuplicates(
            self.config.near_threshold,
            self.stage.workdir / "near.sqlite",
            group=self.config.near_duplicates == "group",
            keep_below=self.position if resumed else None,
        )
        if near.group and not near.complete:
            for seq, kind, native in self.input.readable_rows():
                near.join(seq, self._group_text(kind, native))
            near.finish()
        return near

    def _rank_gaps(self) -> set[int]:
        """The rank gaps of all rankings: a gap is the same stage in every one of them (`data.curriculum`)."""
        return {
            gap
            for _, kind, native in self.input.readable_rows()
            if kind == "rankings/1"
            for gap in conversions.rank_gaps(native["ranks"])
        }

    # -- phase 1: one row after the other -------------------------------------------------------------
    def _read(self, start: int) -> None:
        limit, seq = self.config.limit, 0
        for source, adapter, record in self.input.records(self.counts):
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
        """One record of the input: refused, put aside for phase 2, or written."""
        self.counts.rows_in += 1
        row, code = record.row, record.code
        if code is None and row is None:
            row, code = parse_json(record.raw)
        if code is not None:
            return self._refuse(source, record, (code,))
        try:
            kind, native, codes = self._adapted(source, adapter, row)
            path = conversions.route(kind, self.kind)
            if path is None:
                raise self._impossible(source, kind)
            if self.input.dataset is None:
                codes |= rules.row_codes(
                    kind, native, record.raw, min_chars=self.config.min_chars, max_chars=self.config.max_chars
                )
                self.counts.long_prompts += rules.messages_chars(native.get("prompt") or ()) > LONG_PROMPT
                if codes:
                    return self._refuse(source, record, codes)
            self._place(seq, source, record.line, kind, native, path)
            if adapter is not None and adapter.records is iter and self._has_own_id(kind, path, native):
                self._note_id(seq, source, record.line, row)
        except Bad as bad:
            self._refuse(source, record, bad.codes)
        except (RecursionError, OverflowError):  # absurdly nested or large values
            self._refuse(source, record, ("wrong_type",))

    def _adapted(self, source: str, adapter: Adapter | None, row: dict) -> tuple[str, dict, set[str]]:
        """(kind, row of our schema, codes) of a row as it was read. Raises Bad."""
        dataset, counts = self.input.dataset, self.counts
        if dataset is not None:
            kind, native, codes = dataset.kind, row, set()
            if self.config.aspect_weights:  # another score makes another row
                native = {key: value for key, value in row.items() if key != "row_id"} | {
                    "score": weighted(row.get("aspects"), self.config.aspect_weights)
                }
            if self.near is not None and self.near.group:
                native["group_id"] = self.near.cluster_of(self._group_text(kind, native)) or native.get("group_id")
            return kind, native, codes
        if adapter is None:
            raise Bad("missing_column")
        kind, native, codes = adapter(row)
        for name, count in native.pop("_reasoning", {}).items():
            counts.reasoning[name] = counts.reasoning.get(name, 0) + count
        if form := native.pop("_answers_left", None):
            counts.answers_left[form] = counts.answers_left.get(form, 0) + 1
        self._place_in_groups(source, kind, native)
        if self.config.system_prompts != "keep":
            fold_system(native, self.config.system_prompts)
        return kind, native, codes

    def _note_id(self, seq: int, source: str, line: int, row: dict) -> None:
        """Count a row that was kept and has the id of an earlier one of its file, which therefore says something else."""
        key = id_key(source, row)
        if key is not None and not self.seen.add(key, seq):
            self.counts.ids_shared += 1
            self.counts.id_shared = self.counts.id_shared or [source, line, row["id"]]

    def _place_in_groups(self, source: str, kind: str, row: dict) -> None:
        """Split and group that are known before the system message is folded: groups leave it out."""
        if row.get("split") is None and source in self.splits.of_files:
            row["split"] = self.splits.of_files[source]
        if self.config.group_by != "auto":
            row.pop("group_id", None)
        if self.near is not None and self.near.group:
            row["group_id"] = self.near.cluster_of(self._group_text(kind, row)) or row.get("group_id")
        if row.get("group_id") is None and self.config.system_prompts == "merge" and kind != "text/1":
            row["group_id"] = group_id(self._group_text(kind, row))
        if kind == "stepwise/1":
            self.counts.steps[source] = sorted({*self.counts.steps.get(source, ()), *row["labels"]})

    def _group_text(self, kind: str, row: dict) -> str:
        return group_text(kind, row, self.config.group_by)

    def _impossible(self, source: str, kind: str) -> ConfigError:
        name = source if len(self.input.files) > 1 else None
        return ConfigError(
            f"stage ingest: {name or 'the data'} holds {kind} rows, which cannot become {self.kind}; set kind to one of"
            f" {', '.join(conversions.reachable(kind))}, or give other data"
            + (f" (files='...' reads some of the files, without {name})" if name else "")
            + "".join(f". {hint}" for hint in (self.input.columns_of(source), self.input.empty_hint().strip()) if hint)
        )

    def _place(self, seq: int, source: str, line: int, kind: str, row: dict, path: list[str]) -> None:
        """Contamination and duplicates, then conversion of one good row. Raises Bad."""
        if self.benchmarks is not None and self.benchmarks.check(*rules.asked(kind, row)):
            raise Bad("contaminated")
        if kind == "stepwise/1" and row.get("is_quality_control") and self.kind != kind:
            raise Bad("quality_control")
        if labels := agreement.labels_of(kind, row):
            slices = agreement.slices_of(row)
            for label in labels:
                self.seen.label(*label, slices, seq)
        annotated = kind == "comparisons/1" and bool((row.get("ann") or {}).get("annotator_id"))
        # of several the last counts
        signal = kind == "unpaired/1" and self.input.dataset is None and votes.is_event(row)
        key, is_row_id, answers = None, False, ()
        if self.config.deduplicate != "off" and not (signal or self._votes(kind, path, annotated)):
            key, is_row_id, answers = self._first_of_its_key(kind, row)
        if (
            self.near is not None
            and not self.near.group
            and not self.near.first(seq, "\n".join(rules.asked(kind, row)))
        ):
            raise Bad("near_duplicate")
        if kind == "comparisons/1":
            self.counts.labels[_label(row)] = self.counts.labels.get(_label(row), 0) + 1
        rows, have, meets = self._converted(seq, kind, row, path, annotated)
        voting = (self.config.contradictions in ("drop_both", "keep_as_votes") and kind == have == "pairs/1") or (
            have == self.kind == "unpaired/1" and not meets and (signal or self.config.deduplicate != "off")
        )
        if voting and meets:
            raise ConfigError(
                f"stage ingest: contradictions={self.config.contradictions} cannot be combined with the conversion to "
                f"{self.kind}; make pairs first (kind=pairs/1), then convert that dataset"
            )
        if (
            self.flagging
            and have == "pairs/1"
            and ((kind == "pairs/1" and key is None) or (kind == "comparisons/1" and not annotated))
        ):
            # Comparisons, and runs without deduplication, have no key of the pair yet.
            if self.seen.has(tagged(reversed_id(rows[0]))):
                raise Bad("contradicts_row")
            self.seen.add(tagged(row_id("pairs/1", stripped("pairs/1", rows[0]))), seq)
        if key is not None:
            for one in (key, *answers):
                self.seen.add(one, seq)
        self.counts.native[kind] = self.counts.native.get(kind, 0) + 1
        if meets or voting:
            by_prompt = (
                not voting and ("pairs/1" if have == "comparisons/1" else have, self.kind) in conversions.GROUPED
            )
            for index, item in enumerate(rows):
                group = (
                    hashlib.sha256(prompt_id(item["prompt"]).encode()).digest()[:16]
                    if by_prompt
                    else votes.item_key(item)
                )
                self.seen.stage(
                    group, seq, index, {"row": item, "kind": have, "source": source, "line": line, "seq": seq}
                )
            self.counts.rows_staged += 1
            return
        self.counts.rows_kept += 1
        # One row of the wanted kind that came as such: its key is its row id.
        plain = len(rows) == 1 and rows[0] is row
        self._write(rows, source, seq, key.hex() if is_row_id and plain and kind == self.kind else None, once=not plain)

    def _has_own_id(self, kind: str, path: list[str], native: dict) -> bool:
        """Whether no other row that is kept should have a row's id: several annotators of an item may well have one,
        and so have votes and copies that are meant to stay.
        """
        annotated = bool((native.get("ann") or {}).get("annotator_id"))
        return not annotated and self.config.deduplicate != "off" and not self._votes(kind, path, annotated)

    def _votes(self, kind: str, path: list[str], annotated: bool) -> bool:
        """Whether equal labels of an item are votes, which are counted, and no duplicates."""
        if self.config.contradictions == "keep_as_votes" and (
            kind == "pairs/1" == self.kind or (kind == "comparisons/1" and "pairs/1" in path and not annotated)
        ):
            return True
        return self.config.on_conflict == "majority" and kind == "unpaired/1" == self.kind

    def _first_of_its_key(self, kind: str, row: dict) -> tuple[bytes, bool, tuple[bytes, ...]]:
        """:func:`identity` of a row that was not seen before, nor a pair's reverse where that is flagged, and the keys
        of its gold answer. Raises Bad.
        """
        key, is_row_id = identity(kind, row, self.config.deduplicate)
        answers = (
            gold_keys(key, row) if kind == "prompts/1" and self.flagging and self.config.deduplicate == "auto" else ()
        )
        if self.flagging and kind == "pairs/1":
            found = self.seen.any_of(key, bytes.fromhex(reversed_id(row)))
            if found is not None:
                raise Bad("duplicate_row" if found == key else "contradicts_row")
        elif self.seen.has(key):
            other = answers and self.seen.has(answers[0]) and not self.seen.has(answers[1])
            raise Bad("contradicts_row" if other else "duplicate_row")
        return key, is_row_id, answers

    def _converted(
        self, seq: int, kind: str, row: dict, path: list[str], annotated: bool
    ) -> tuple[list[dict], str, bool]:
        """(rows, their kind, whether they are to meet others in phase 2): one row, as far on its way to the wanted kind
        as it goes by itself. Raises Bad.
        """
        if (
            kind == "comparisons/1"
            and "pairs/1" in path
            and self.config.contradictions != "off"
            and (annotated or not self.flagging)
        ):
            return [row], kind, True  # the labels of an item meet in phase 2
        rows, have = [row], kind
        for want in path[1:] or [kind]:
            if (have, want) in conversions.GROUPED:
                return rows, have, True
            rows = [
                new
                for item in rows
                for new in conversions.rowwise(have, want, item, self.config, self._draw(seq), self.gaps)
            ]
            have = want
        return rows, have, False

    def _draw(self, seq: int) -> Callable[[int], int]:
        return lambda n: int(self.stage.rng("best_vs_random", seq).integers(n))

    # -- phase 2: the rows that meet ------------------------------------------------------------------
    def _regroup(self, after: int) -> None:
        total = self.seen.count_groups()
        done = 0
        for gid, staged in self.seen.groups(after):
            items = [item for _, item in staged]
            kinds = [item["kind"] for item in items]
            rows_out, reasons, lost = grouping.settle(
                kinds,
                [item["row"] for item in items],
                self.kind,
                self.config,
                self._draw(gid),
                signals=self.input.dataset is None,
            )
            self.counts.drop({reason: count for reason, count in reasons.items() if count})
            kept = {item["seq"] for item in items} - {items[index]["seq"] for index in lost}
            for index, code in lost.items():
                item = items[index]
                if item["seq"] not in kept:
                    self._refuse(item["source"], Record(item["line"], None, item["row"], None), (code,))
            self.counts.rows_kept += len(kept)
            self._write(rows_out, items[0]["source"], of_group(self.position, gid), once=self.kind not in kinds)
            done += 1
            if done % 1_000 == 0:
                self.stage.progress(done, total, f"{done:,} of {total:,} groups")
            if done % self.every == 0:
                self._checkpoint("group", group=gid)
        self.stage.progress(total, total, f"{total:,} groups")

    # -- writing --------------------------------------------------------------------------------------
    def _write(
        self, rows: list[dict], source: str, seq: int, row_identity: str | None = None, once: bool = False
    ) -> None:
        """Complete rows and write them. seq: their input position, or their group's number. once: converted rows, which
        another input row may become, too.
        """
        out, made = [], set()
        for row in rows:
            if self.kind == "prompts/1" and once and self.config.deduplicate != "off":
                if not self.seen.add(identity("prompts/1", row, self.config.deduplicate)[0], seq):
                    self.counts.drop({"duplicate_prompt": 1})
                    continue
            row.pop("_grade", None)
            first_won = row.pop("_first_won", None)
            done = self._complete(row, source, seq, row_identity)
            if row_identity is None and self.config.deduplicate != "off":
                key = tagged(done["row_id"], b"converted")
                if key in made or (once and not self.seen.add(key, seq)):
                    self.counts.drop({"duplicate_after_conversion": 1})
                    continue
                made.add(key)
            out.append(done)
            self._audit(row, first_won)
        self.counts.rows_out += len(out)
        self.data.write(out)

    def _complete(self, row: dict, source: str, seq: int, row_identity: str | None) -> dict:
        """The row with ids, split and origin; a dataset of ours keeps its other columns."""
        for holder, name in ((row, "collected_at"), (row.get("ann") or {}, "annotated_at")):
            if isinstance(holder.get(name), str):  # as text it can be put aside
                holder[name] = datetime.fromisoformat(holder[name])
        if self.input.dataset is not None and self.input.dataset.kind == self.kind and "row_id" in row:
            return row if self.splits.stays(row["split"]) else {**row, "split": self.splits.of(row)}
        origin = row.get("origin") or (
            "ai" if (row.get("ann") or {}).get("annotator_type") == "ai" else self.config.origin
        )
        messages = prompt_of(self.kind, row)
        if messages is not None:
            row["prompt_id"] = prompt_id(messages)
            if row.get("group_id") is None:
                row["group_id"] = group_id(asked_text(messages, self.config.group_by))
        assigned = row.get("split")
        row = complete_row(self.kind, row, dataset=self.input.name, source=source, origin=origin, identity=row_identity)
        row["split"] = assigned if assigned is not None and self.splits.stays(assigned) else self.splits.of(row)
        if self.splits.watched and (messages := prompt_of(self.kind, row)) is not None:
            group = bytes.fromhex(group_id(asked_text(messages, self.config.group_by)) or row["prompt_id"])
            self.counts.cut_prompts += self.seen.split_of(group, row["split"], seq) != row["split"]
        return row

    def _audit(self, row: dict, first_won: bool | None) -> None:
        """Count what a written row says of the labels."""
        if self.kind == "pairs/1":
            if row.get("chosen_score") is not None and row.get("rejected_score") is not None:
                self.counts.scores_against += row["chosen_score"] < row["rejected_score"]
            gens = [(row.get(f"{side}_gen") or {}).get("model_id") for side in ("chosen", "rejected")]
            self.bias.add(
                _said(row["chosen"]),
                _said(row["rejected"]),
                (gens[0], gens[1]),
                prompt=_said(row["prompt"]) if row["prompt"] else "",
                first_won=first_won,
                strength=row.get("strength"),
            )
        elif self.kind == "unpaired/1":
            key = "desirable" if row["label"] else "undesirable"
            self.counts.labels[key] = self.counts.labels.get(key, 0) + 1

    def _refuse(self, source: str, record: Record, codes: Iterable[str]) -> None:
        codes = sorted(set(codes))
        self.counts.refused(source, record, codes)
        self.quarantine.write(
            [quarantine_row(source, record, codes, dataset=self.input.name, origin=self.config.origin)]
        )

    def _account(self) -> None:
        account.conclude(self)


def _said(messages: list[dict]) -> str:
    return messages[-1].get("content") or ""


def _label(row: dict) -> str:
    """What the label of a comparison is counted as."""
    if row["label_kind"] == "likert":
        return f"likert_{row['label']}"
    if row["label_kind"] == "prob":
        return "A" if row["p_a"] > 0.5 else "B" if row["p_a"] < 0.5 else "tie"
    return "votes"
