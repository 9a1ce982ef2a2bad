"""contamination: how much of a benchmark is in what a model was trained on, and its score on the rest
(eval.contamination).

Every dataset that the model or one of its ancestors (the models it started from, teachers, reward models) learned from
is found through the lineage: give ``model`` and the benchmark's ``prompts``. Each item of the benchmark is matched
against the training prompts of each of them by the rule of ``data.decontam``: 8-grams of words, contaminated where more
than half of the item's words lie in n-grams of one training row. Models that were brought from outside have a past that
nobody here knows; they are named. With ``samples``, the answers of an evaluation, every score stands beside that on the
clean items.

``training.NAME=REF`` replaces the lineage; a name that ends in a split (``training.maths.test``) says which split was
trained on, else all but the held-out ones count.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from pydantic import Field

from stages.spec import InputSpec, OutputSpec, StageConfig, StageSpec

TRAINED = ("train", "rm_a", "rm_b")  # splits that are trained on, where nothing says which
FLAGGED = 0.02  # share of a benchmark in one dataset that needs a decision (Tulu 3)


class Config(StageConfig):
    split: str = Field(
        "test", description="Split of the benchmark's prompts; with samples, only the items that were evaluated count."
    )
    mode: Literal["coverage", "any"] = Field(
        "coverage",
        description=(
            "coverage: more than `threshold` of an item's tokens lie in n-grams of one training row (Tulu 3); any: one"
            " n-gram is shared."
        ),
    )
    n: int = Field(8, ge=1, description="n of the n-grams (data.decontam, Tulu 3).")
    threshold: float = Field(0.5, gt=0, lt=1, description="Coverage above which an item is contaminated (Tulu 3).")
    unit: Literal["word", "char"] = Field(
        "word", description="What n-grams are made of: words, or characters for languages without spaces."
    )
    completions: bool = Field(False, description="Also look into answers that were trained on, not only into prompts.")
    outside: list[str] = Field(
        default_factory=list, description="Ancestors whose training data nobody here knows; filled in from the lineage."
    )


SPEC = StageSpec(
    name="contamination",
    config=Config,
    judges="model",
    inputs={
        "prompts": InputSpec("dataset", kinds=("prompts/1",), doc="The benchmark."),
        "samples": InputSpec(
            "dataset",
            kinds=("eval_samples/1",),
            required=False,
            doc="Answers of the model to it, from the evaluate stage: scores on all and on the clean items.",
        ),
        "model": InputSpec("model", required=False, doc="The model whose lineage is looked through."),
        "training": InputSpec(
            "dataset",
            required=False,
            many=True,
            lineage_of="model",
            doc="What was trained on, as training.NAME; default: all of the model's lineage.",
        ),
    },
    outputs={
        "scores": OutputSpec(
            "dataset", doc="eval_scores/1: rates per benchmark and dataset, scores on all and on clean items."
        ),
        "items": OutputSpec(
            "dataset", doc="eval_items/1: the contaminated items, tagged with the datasets that hold them."
        ),
    },
)


def run(stage):
    from stages.spec import ConfigError

    given = stage.many("training")
    if not given and not stage.has("model"):
        raise ConfigError(
            "contamination: give --input model=REF, whose lineage says what it was trained on, or --input"
            " training.NAME=REF for each dataset"
        )
    rows = benchmark(stage)
    index, owner = indexed(rows, stage.config)
    checkpoint = stage.checkpoints.latest()
    state = checkpoint.state if checkpoint else {"hits": {}, "rows": {}, "unread": []}
    names = list(given)
    for done in range(checkpoint.step if checkpoint else 0, len(names)):
        name = names[done]
        found = matched(stage, name, index)
        if found is None:
            state["unread"].append(name)
        else:
            items, state["rows"][name] = found
            state["hits"][name] = sorted({owner[item] for item in items})
        stage.save_checkpoint(done + 1, state)
        stage.progress(done + 1, len(names), "training datasets")
    conclude(stage, rows, state)


def benchmark(stage) -> list[dict]:
    """The items that count: those that were evaluated, or the whole split."""
    from stages.spec import ConfigError

    data, config = stage.dataset("prompts"), stage.config
    rows = list(data.iter_rows(split=config.split))
    if not rows:
        raise ConfigError(
            f"contamination: the prompts have no row in split {config.split!r} (splits:"
            f" {', '.join(data.manifest.get('splits') or {}) or 'none'}); write split=NAME"
        )
    if not stage.has("samples"):
        return rows
    evaluated = {row["item_id"] for row in stage.dataset("samples").iter_rows()}
    rows = [row for row in rows if row["row_id"] in evaluated]
    if not rows:
        raise ConfigError(
            f"contamination: the samples are not answers to split {config.split!r} of these prompts; give the prompts"
            " that were evaluated and write split=NAME"
        )
    return rows


def indexed(rows: list[dict], config: Config):
    """(n-gram index of the items' user turns, entry -> position in ``rows``). A question with choices is looked for
    with and without its options.
    """
    from stages.ingestion.curation import DecontaminationIndex
    from stages.verification.choices import is_choice, question_of, with_options

    index, owner = DecontaminationIndex(config.n, config.mode, config.threshold, config.unit), []
    for position, row in enumerate(rows):
        turns = [message.get("content") or "" for message in row["prompt"] if message["role"] == "user"]
        turns = [*turns[:-1], with_options(question_of(row), row["choices"])] if is_choice(row) else turns
        for turn, text in [*enumerate(turns), *([(len(turns) - 1, question_of(row))] if is_choice(row) else [])]:
            index.add(text, later=turn > 0)
            owner.append(position)
    return index, owner


def matched(stage, name: str, index) -> tuple[set[int], int] | None:
    """(contaminated entries of the index, training rows that contaminate) of one training dataset; None where its rows
    hold no text.
    """
    from storage.datasets import open_dataset
    from storage.schema import SPLITS

    data, config = open_dataset(stage.inputs[f"training.{name}" if name else "training"].path), stage.config
    last = name.rpartition(".")[2]
    splits = (last,) if last in SPLITS else TRAINED
    index.any_hit, index.best = set(), {}
    read = hits = 0
    for row in data.iter_rows():
        if row.get("split") not in splits:
            continue
        turns = [text for text in trained_texts(data.kind, row, config.completions) if text.strip()]
        read += bool(turns)
        if data.kind == "demonstrations/1" and row["kept"] is False:  # which training leaves out
            continue
        hits += bool(turns) and index.check(*turns)
    if not read and any((data.manifest.get("splits") or {}).get(split) for split in splits):
        return None
    items = (
        index.any_hit
        if config.mode == "any"
        else {item for item, score in index.best.items() if score > index.threshold}
    )
    return set(items), hits


def trained_texts(kind: str, row: dict, completions: bool) -> list[str]:
    """User turns of a training row (all of a plain text), and with ``completions`` what was answered."""
    from storage.schema import prompt_of

    if kind == "text/1":
        return [row["text"]]
    messages = row["messages"] if kind == "demonstrations/1" else prompt_of(kind, row) or []
    texts = [message.get("content") or "" for message in messages if message["role"] == "user"]
    if completions:
        sides = (
            [row.get(name) for name in ("chosen", "rejected", "completion", "response_a", "response_b")]
            + [messages]
            + list(row.get("completions") or ())
        )
        texts += [
            side if isinstance(side, str) else message.get("content") or ""
            for side in sides
            if side
            for message in ([{}] if isinstance(side, str) else side)
            if isinstance(side, str) or message["role"] == "assistant"
        ]
    return texts


# -- results -----------------------------------------------------------------------------------------------------------


def conclude(stage, rows: list[dict], state: dict) -> None:
    """Rates per benchmark and dataset, scores on all and on clean items, warnings, the report."""
    names, total = list(state["hits"]), Counter(row["dataset"] for row in rows)
    dirty = {position for hits in state["hits"].values() for position in hits}
    table = []
    for bench in total if names else ():  # of nothing known, nothing can be said
        for name in names:
            count = sum(rows[position]["dataset"] == bench for position in state["hits"][name])
            table.append(
                {
                    "benchmark": bench,
                    "training data": name,
                    "items": total[bench],
                    "contaminated": count,
                    "rate": count / total[bench],
                }
            )
        count = sum(rows[position]["dataset"] == bench for position in dirty)
        table.append(
            {
                "benchmark": bench,
                "training data": "all of them",
                "items": total[bench],
                "contaminated": count,
                "rate": count / total[bench],
            }
        )
    scores = clean_scores(stage, rows, dirty) if stage.has("samples") and names else []
    stage.summary(
        {
            "items": len(rows),
            **({"contaminated": len(dirty), "contamination_rate": len(dirty) / len(rows)} if names else {}),
            "training_datasets": len(names),
            "unread_datasets": len(state["unread"]),
            "unknown_ancestors": len(stage.config.outside),
            **{f"contamination_rate/{name}": len(hits) / len(rows) for name, hits in state["hits"].items()},
            **{
                row["metric"] + suffix: row[column]
                for row in scores
                for suffix, column in (("", "all"), ("_clean", "clean"), ("_contaminated", "contaminated"))
                if row[column] is not None
            },
        }
    )
    warnings(stage, table, state)
    write(stage, rows, state, table, scores)
    publish(stage, rows, state, dirty, table, scores)


def clean_scores(stage, rows: list[dict], dirty: set[int]) -> list[dict]:
    """Every accuracy over all items, the clean ones and the contaminated ones, with intervals and counts; None without
    an item.
    """
    from stages.evaluation.multiple_choice import RATES
    from stages.evaluation.scores import item_values, originals, records_of, share

    records = originals(records_of(stage.dataset("samples").iter_rows()))
    where = {row["row_id"]: position for position, row in enumerate(rows)}
    records = [r for r in records if r["item_id"] in where]
    found = []
    for metric in ("accuracy", "greedy_accuracy", *RATES, "prompt_level_strict_acc"):
        row = {"metric": metric}
        for column, wanted in (("all", None), ("clean", False), ("contaminated", True)):
            values = item_values(
                [r for r in records if wanted is None or (where[r["item_id"]] in dirty) == wanted], metric
            )
            result = share(*map(list, zip(*values.values()))) if values else None
            row |= {
                column: result and result.value,
                f"{column}_n": result.n if result else 0,
                f"{column}_low": result and result.low,
                f"{column}_high": result and result.high,
            }
        if row["all"] is not None:
            found.append(row)
    return found


def warnings(stage, table: list[dict], state: dict) -> None:
    for row in table:
        if row["training data"] != "all of them" and row["rate"] > FLAGGED:
            stage.warn(
                "contamination",
                f"{row['rate']:.1%} of {row['benchmark']} ({row['contaminated']} items) are in {row['training data']},"
                " which the model or an ancestor was trained on. Read its score on the clean items; ingest that data"
                " with decontaminate=coverage and this benchmark as an input to train without them.",
            )
    if stage.config.outside:
        stage.warn(
            "lineage_unknown",
            f"What {', '.join(stage.config.outside)} learned from is not known here, so a rate of 0 does not mean that"
            " the benchmark is new to the model. Read its scores on a benchmark that is newer than it.",
        )
    if state["unread"]:
        stage.warn(
            "training_data_unread",
            f"{', '.join(state['unread'])} hold no text of prompts and were not compared. Give the data they were made"
            " of as training.NAME=REF.",
        )


def write(stage, rows: list[dict], state: dict, table: list[dict], scores: list[dict]) -> None:
    """The two outputs."""
    from stages.evaluation.scores import score_row
    from storage.files import canonical_json
    from storage.schema import complete_row

    config = stage.config
    verdict = {
        "mode": config.mode,
        "n": config.n,
        "threshold": config.threshold,
        "unit": config.unit,
        "completions": config.completions,
        "outside": config.outside,
        "unread": state["unread"],
        "training": {
            name: stage.inputs[f"training.{name}" if name else "training"].digest for name in stage.many("training")
        },
    }
    benchmark_ = stage.dataset("prompts").name
    measured = [
        (
            (
                f"contamination_rate/{row['training data']}"
                if row["training data"] != "all of them"
                else "contamination_rate"
            ),
            row["benchmark"],
            row["rate"],
            row["items"],
            {},
        )
        for row in table
    ]
    measured += [
        (
            row["metric"] + suffix,
            benchmark_,
            row[column],
            row[f"{column}_n"],
            {side: row[f"{column}_{side}"] for side in ("low", "high") if row[f"{column}_{side}"] is not None},
        )
        for row in scores
        for suffix, column in (("", "all"), ("_clean", "clean"), ("_contaminated", "contaminated"))
        if row[column] is not None
    ]
    model = stage.inputs["model"].digest[:12] if stage.has("model") else "unknown"
    writer = stage.writer("scores", "eval_scores/1", meta={"verdict": verdict})
    writer.write(
        score_row(
            stage.key[:16],
            bench,
            metric,
            value,
            None,
            n,
            config=verdict,
            source=f"model:m-{model}",
            origin="ai",
            detail=extra,
        )
        for metric, bench, value, n, extra in measured
    )
    writer.close({"metrics": len(measured)})
    tags: dict[int, list[str]] = {}
    for name, hits in state["hits"].items():
        for position in hits:
            tags.setdefault(position, []).append(name)
    items = stage.writer("items", "eval_items/1")
    items.write(
        complete_row(
            "eval_items/1",
            {
                "benchmark": rows[position]["dataset"],
                "item_id": rows[position]["row_id"],
                "prompt": rows[position]["prompt"],
                "target_json": canonical_json(rows[position].get("answer")),
                "tags": tags[position],
                "eval_split": "heldout",
                "group_id": rows[position]["group_id"],
                "prompt_id": rows[position]["prompt_id"],
            },
            dataset=rows[position]["dataset"],
            source=rows[position]["source"],
            origin=rows[position]["origin"],
            split=rows[position]["split"],
        )
        for position in sorted(tags)
    )
    items.close({"items": len(tags)})


def publish(stage, rows: list[dict], state: dict, dirty: set[int], table: list[dict], scores: list[dict]) -> None:
    """The page that a person reads."""
    from stages.reporting import reports

    stage.report("rates", table=table)
    shown = [
        {
            "metric": row["metric"],
            **{
                f"{column} ({row[f'{column}_n']})": (
                    reports.with_interval(row[column], row[f"{column}_low"], row[f"{column}_high"])
                    if row[column] is not None
                    else "-"
                )
                for column in ("all", "clean", "contaminated")
            },
        }
        for row in scores
    ]
    if scores:
        stage.report("clean-scores", table=scores)
    examples = [
        {
            "prompt": rows[position]["prompt"][-1]["content"],
            "in": ", ".join(name for name, hits in state["hits"].items() if position in hits),
        }
        for position in sorted(dirty)[:8]
    ]
    known = f"{len(state['hits'])} training datasets" + (
        f"; unknown: what {', '.join(stage.config.outside)} learned from" if stage.config.outside else ""
    )
    stage.report(
        "summary",
        markdown=reports.document(
            f"Contamination of {stage.dataset('prompts').name}/{stage.config.split}",
            (
                f"{len(dirty)} of {len(rows)} items are in what was trained on ({known})."
                if state["hits"]
                else f"No training data to compare with ({known})."
            ),
            ("Rates", reports.markdown_table(table)),
            ("Scores on all, clean and contaminated items", reports.markdown_table(shown) if shown else ""),
            ("Contaminated items", reports.sample_table(examples) if examples else ""),
        ),
    )
