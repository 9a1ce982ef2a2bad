"""human_answers: a filled task file of `human_task`, checked and turned into rows (ops.human_gate).

The file has a line per answer (CSV, JSON Lines or Parquet) with ``item_id`` and ``choice``, and may name an
``annotator``. Lines that are not filled in, and skipped items, are counted; an unknown item, an entry that is not
allowed, or a second answer of one annotator is an error that names the line. Comparisons become ``pairs/1``: several
annotators of an item are one pair with their share as ``label_prob``, a tie of them is left out and counted. What is
kept comes back unchanged. ``labeler=stub`` fills the task in by drawing, for trying a pipeline out without people; its
rows say so.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import Field

from stages.human_task import CHOICES, KINDS
from stages.spec import ConfigError, InputSpec, OutputSpec, StageConfig, StageSpec
from storage.files import read_text


class Config(StageConfig):
    labeler: Literal["people", "stub"] = Field(
        "people",
        description="Who answers: people, in the file, or a stub that draws entries, for trying a pipeline out.",
    )
    min_answered: float = Field(
        1.0, gt=0, le=1, description="Share of the items that must have an answer (or be skipped)."
    )


SPEC = StageSpec(
    name="human_answers",
    config=Config,
    inputs={
        "tasks": InputSpec("dataset", kinds=("human_tasks/1",), doc="The task, from human_task."),
        "data": InputSpec("dataset", kinds=KINDS, doc="What the task was made from."),
        "answers": InputSpec("file", required=False, doc="The filled file; none with labeler=stub."),
    },
    outputs={"data": OutputSpec("dataset", doc="pairs/1 of comparisons; the kept rows of the data.")},
)


def read_answers(path: str | Path, tasks: dict[str, str]) -> list[tuple[str, str, str]]:
    """(item id, entry, annotator) of every filled line; ``tasks``: {item id: what is asked}.

    Raises:
        ConfigError: names the line, what stands there and what may.
    """
    path = Path(path)
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            rows = pyarrow.parquet.read_table(path).to_pylist()
        elif path.suffix in (".jsonl", ".json"):
            rows = [json.loads(line) for line in read_text(path).split("\n") if line.strip()]
        else:
            text = read_text(path, newline="")
            named = text.partition("\n")[0]  # where numbers have a comma, spreadsheets part columns by semicolons
            parted = next(
                (sign for sign in ",;\t" if {"item_id", "choice"} <= {c.strip('"') for c in named.strip().split(sign)}),
                ",",
            )
            rows = list(csv.DictReader(io.StringIO(text, newline=""), delimiter=parted))
    except (ValueError, csv.Error) as error:
        raise ConfigError(f"{path.name} cannot be read: {error}; save the filled task as it was given") from None
    if not rows or not all(isinstance(row, dict) for row in rows) or not {"item_id", "choice"} <= set(rows[0]):
        raise ConfigError(
            f"{path.name} is no filled task: it needs the columns item_id and choice; fill in the file that was"
            " written, as CSV, JSON Lines or Parquet"
        )
    found, seen = [], set()
    for number, row in enumerate(rows, 2 if path.suffix not in (".jsonl", ".json", ".parquet") else 1):
        item, entry, who = (
            str(row.get(name) if row.get(name) is not None else "").strip()
            for name in ("item_id", "choice", "annotator")
        )
        if not entry:
            continue
        if item not in tasks:
            raise ConfigError(
                f"{path.name}, line {number}: there is no item {item!r} in this task; fill in the file of this task and"
                " leave item_id as it is"
            )
        allowed = CHOICES[tasks[item]]
        if entry.lower() not in allowed:
            raise ConfigError(
                f"{path.name}, line {number}: {entry!r} is no answer; write one of {', '.join(allowed)}, or leave"
                " choice empty"
            )
        if (item, who) in seen:
            raise ConfigError(
                f"{path.name}, line {number}: {who or 'a nameless annotator'} has answered {item!r} before; leave one"
                " of the two out, or give annotators different names in the column annotator"
            )
        seen.add((item, who))
        found.append((item, entry.lower(), who))
    return found


def check_answered(answers: list[tuple[str, str, str]], tasks: dict[str, str], share: float) -> None:
    """Raise ConfigError where too few items have an answer."""
    open_items = [item for item in tasks if item not in {one for one, _, _ in answers}]
    if len(tasks) - len(open_items) < share * len(tasks) - 1e-9:
        raise ConfigError(
            f"{len(open_items)} of {len(tasks)} items have no answer"
            f" ({', '.join(open_items[:3])}{' ...' if len(open_items) > 3 else ''}); fill them in (skip is an answer),"
            f" or write min_answered={(len(tasks) - len(open_items)) / len(tasks):.2f} or less"
        )


def run(stage):
    from storage.schema import complete_row

    config, task = stage.config, stage.dataset("tasks")
    rows = list(task.iter_rows())
    asked = {row["item_id"]: row["ask"] for row in rows}
    if (config.labeler == "stub") == stage.has("answers"):
        raise ConfigError(
            "human_answers: give the filled file as --input answers=FILE, or write labeler=stub"
            + " and leave the file out" * stage.has("answers")
        )
    if (task.manifest.get("meta") or {}).get("data") != stage.dataset("data").digest:
        raise ConfigError("human_answers: the task was made from other data; give the input data that human_task had")
    if config.labeler == "stub":
        stage.warn(
            "stub_labels",
            "These labels were drawn, nobody has looked at the items: good for trying a pipeline out, and for nothing"
            " else. Write labeler=people.",
        )
        answers = [
            (item, CHOICES[ask][int(stage.rng("stub", item).integers(2))], "stub") for item, ask in asked.items()
        ]
    else:
        answers = read_answers(stage.path("answers"), asked)
    check_answered(answers, asked, config.min_answered)
    by_item: dict[str, list[tuple[str, str]]] = {}
    for item, entry, who in answers:
        by_item.setdefault(item, []).append((entry, who))
    counts = Counter(entry for _, entry, _ in answers)
    ask = next(iter(asked.values()))
    dropped: Counter = Counter(unanswered=len(asked) - len(by_item))
    if ask == "compare":
        kind, made = (
            "pairs/1",
            [
                row
                for row in (
                    pair(json.loads(row["shown_json"]), by_item[row["item_id"]], dropped, config.labeler)
                    for row in rows
                    if row["item_id"] in by_item
                )
                if row
            ],
        )
    else:
        kind, kept = (
            stage.dataset("data").kind,
            {
                item
                for item, given in by_item.items()
                if sum({"yes": 1, "no": -1}.get(entry, 0) for entry, _ in given) > 0
            },
        )
        dropped["not_kept"] = len(by_item) - len(kept)
        made = [row for row in stage.dataset("data").iter_rows() if row["row_id"] in kept]
    if not made:
        raise ConfigError(
            f"human_answers: nothing is left of {len(asked)} items"
            f" ({', '.join(f'{n} {name}' for name, n in counts.items())}), so the run cannot go on with them"
        )
    writer = stage.writer("data", kind)
    writer.write(
        [
            complete_row(
                kind, row, dataset="people", source=row.pop("source"), origin=row.pop("origin"), split=row.pop("split")
            )
            for row in made
        ]
        if ask == "compare"
        else made
    )
    writer.close({"items": len(asked), **{name: n for name, n in dropped.items() if n}})
    annotators = {who for _, _, who in answers}
    stage.summary(
        {
            "items": len(asked),
            "answers": len(answers),
            "annotators": len(annotators),
            "rows": len(made),
            **{f"dropped/{name}": n for name, n in dropped.items() if n},
            **{f"choice/{name}": n for name, n in sorted(counts.items())},
        }
    )


def pair(shown: dict, given: list[tuple[str, str]], dropped: Counter, labeler: str) -> dict | None:
    """The pair of one item by its votes (a tie counts half), None where they are even or all skipped it."""
    votes = [{"1": 1.0, "2": 0.0, "tie": 0.5}[entry] for entry, _ in given if entry != "skip"]
    if not votes:
        dropped["skipped"] += 1
        return None
    first = sum(votes) / len(votes)
    if first == 0.5:
        dropped["tie"] += 1
        return None
    order = (0, 1) if first > 0.5 else (1, 0)
    (chosen, rejected), (chosen_gen, rejected_gen) = ([shown[name][k] for k in order] for name in ("answers", "gens"))
    who = {name for entry, name in given if entry != "skip"}
    return {
        "prompt": shown["prompt"],
        "chosen": chosen,
        "rejected": rejected,
        "chosen_gen": chosen_gen,
        "rejected_gen": rejected_gen,
        **{name: shown.get(name) for name in ("prompt_id", "group_id", "batch_id", "license")},
        "collected_at": datetime.fromisoformat(shown["collected_at"]) if shown.get("collected_at") else None,
        "label_prob": max(first, 1 - first) if len(votes) > 1 else None,
        "ann": {
            "annotator_type": "human" if labeler == "people" else "stub",
            "annotator_id": next(iter(who)) or None if len(who) == 1 else None,
        },
        "source": shown["source"],
        "split": shown["split"],
        "weight": shown.get("weight", 1.0),
        "origin": "human" if labeler == "people" else "conversion",
    }
