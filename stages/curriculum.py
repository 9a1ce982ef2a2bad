"""curriculum: preference data in stages, from easy to hard or in the order given.

Fills ``stage_index`` of ``pairs/1``; the align stage trains on one stage at a time (``stage_index``), each from the
model of the one before (sDPO, Curry-DPO; catalogue ``da.sdpo``, ``da.curry``). Validation and test rows belong to no
stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from stages.settings import ReadWhen, refuse_unread
from stages.spec import InputSpec, OutputSpec, StageConfig, StageSpec


class Config(StageConfig):
    READ_WHEN: ClassVar[ReadWhen] = (
        (("pairing",), lambda c: c.order == "rank_gap", "only rankings are made into pairs; write order=rank_gap"),
    )

    order: Literal["given", "margin", "confidence", "rank_gap"] = Field(
        "margin",
        description=(
            "given: file order (sDPO); margin: largest score gap, margin or strength first; confidence: largest"
            " |2 label_prob - 1| first (Curriculum-RLAIF); rank_gap: rankings, the largest rank gap first (Curry-DPO)."
        ),
    )
    stages: int = Field(3, ge=1, description="Stages; for rank_gap the most there can be, later pairs join the last.")
    pairing: Literal["best_vs_k", "all_pairs_by_gap"] = Field(
        "best_vs_k", description="rank_gap: (1,K), (1,K-1) ... (1,2), or all pairs by their gap."
    )

    @model_validator(mode="after")
    def _read(self):
        refuse_unread(self, self.READ_WHEN)
        return self


#: What the pairs of a ranking have of it.
CARRIED = (
    "prompt",
    "prompt_id",
    "group_id",
    "dataset",
    "source",
    "split",
    "batch_id",
    "license",
    "collected_at",
    "weight",
    "ann",
)
SPEC = StageSpec(
    name="curriculum",
    config=Config,
    inputs={"data": InputSpec("dataset", kinds=("pairs/1", "rankings/1"), doc="Pairs; rankings for order=rank_gap.")},
    outputs={"data": OutputSpec("dataset", doc="pairs/1 with stage_index.")},
)


def run(stage):
    from stages.reporting.reports import document, facts
    from storage.schema import complete_row

    data, config = stage.dataset("data"), stage.config
    if (data.kind == "rankings/1") != (config.order == "rank_gap"):
        wanted = (
            "rankings/1; convert with the ingest stage (kind=rankings/1), or write order=margin"
            if config.order == "rank_gap"
            else "pairs/1; convert with the ingest stage (kind=pairs/1), or write order=rank_gap"
        )
        raise ValueError(f"order={config.order} does not fit rows of {data.kind}: give {wanted}.")
    counts, dropped = Counter({0: 0}), Counter()
    made = ranked(data, config, dropped) if config.order == "rank_gap" else staged(stage, data, dropped)

    def told(rows):
        for row in rows:
            counts[row["stage_index"]] += 1
            yield complete_row(
                "pairs/1", row, dataset=row["dataset"], source=row["source"], origin=row["origin"], split=row["split"]
            )

    writer = stage.writer("data", "pairs/1")
    writer.write(told(made))
    if not any(n for stage_index, n in counts.items() if stage_index is not None):
        there = ", ".join(f"{name} ({n})" for name, n in (data.manifest.get("splits") or {}).items()) or "none"
        raise ValueError(
            "No pair is in any stage: these are made of the training split, where "
            + (f"all {dropped['rows']} rankings are ties" if dropped["rows"] else "no row is")
            + f" (splits: {there}); give other data."
        )
    writer.close({"rows": sum(counts.values()), "dropped": dropped["rows"]})
    last = max(k for k in counts if k is not None)
    summary = {
        "stages": last + 1,
        "rows": sum(counts.values()),
        "dropped": dropped["rows"],
        **{f"stage_{k}": counts[k] for k in range(last + 1)},
    }
    stage.summary(summary)
    stage.report("summary", markdown=document("Curriculum", facts(summary)))


def staged(stage, data, dropped: Counter) -> Iterator[dict]:
    """Pairs in equal stages, the remainder to the first; pairs without score gap, margin or strength (order=margin), or
    without a label's probability (order=confidence), are dropped. One stage is in memory at a time.
    """
    from stages import selection

    config, found, measures = stage.config, [], Counter()
    columns = ["chosen_score", "rejected_score", "margin", "strength", "label_prob"]
    for row in data.iter_rows(columns=columns, split="train"):
        name, value = ease(row, config.order)
        found.append(value)
        measures[name] += value is not None
    if len(+measures) > 1:
        stage.warn(
            "measures_mixed",
            f"{', '.join(f'{n} pairs are ordered by {name}' for name, n in sorted((+measures).items()))}: numbers of"
            " different scales. Make a curriculum of each, or write order=given.",
        )
    if config.order != "given":
        kept = [i for i, value in enumerate(found) if value is not None]
        if found and not kept:
            raise ValueError(
                "order=margin needs scores, margins or strengths and no pair has any; write order=confidence where"
                " labels are probabilities (of the stage judge), order=given, or ingest with margin_mode=score_diff."
                if config.order == "margin"
                else "order=confidence needs pairs with label_prob, as the stage judge makes them, and none has any;"
                " write order=margin or order=given."
            )
        order, index = selection.order_by_difficulty([-found[i] for i in kept], config.stages)
    else:
        kept = order = range(len(found))
        index = [k for k, n in enumerate(selection.chunk_sizes(len(found), config.stages)) for _ in range(n)]
    dropped["rows"] = len(found) - len(kept)
    for part in range(config.stages):
        places = [j for j in order if index[j] == part]
        wanted = {kept[j] for j in places}
        rows = {i: row for i, row in enumerate(data.iter_rows(split="train")) if i in wanted}
        yield from ({**rows[kept[j]], "stage_index": part} for j in places)
    yield from ({**row, "stage_index": None} for row in data.iter_rows() if row["split"] != "train")


def ease(row: dict, order: str) -> tuple[str, float | None]:
    """(what a pair is ordered by, how much it has of that: much is easy; None without)."""
    from stages.direct.preference_items import score_gap

    if order != "margin":
        p = row["label_prob"] if order == "confidence" else None
        return "confidence", None if p is None else abs(2 * p - 1)
    gap, scored = score_gap(row), row["chosen_score"] is not None and row["rejected_score"] is not None
    if gap is None:
        return "a strength", row["strength"]
    return "scores" if scored else "a margin", gap


def ranked(data, config, dropped: Counter) -> Iterator[dict]:
    """Pairs of rankings, the largest rank gap in stage 0, whatever else a ranking holds (``data.curriculum``); tied
    responses give no pair. Each weighs as much as its ranking: stages are trained one by one.
    """
    from stages import selection
    from stages.ingestion import pairing
    from storage.files import canonical_json

    def pairs_of(ranks) -> list[tuple[int, int, int]]:
        if config.pairing == "best_vs_k":
            return selection.rank_gap_stages(ranks)
        return [(i, j, gap) for gap, pairs in pairing.rank_gap_stages(ranks) for i, j in pairs]

    train = data.iter_rows(columns=["ranks"], split="train")
    gaps = sorted({gap for row in train for _, _, gap in pairs_of(row["ranks"])}, reverse=True)
    stage_of = {gap: min(k, config.stages - 1) for k, gap in enumerate(gaps)}
    for row in data.iter_rows():
        found = pairs_of(row["ranks"])
        dropped["rows"] += not found
        common = {name: row[name] for name in CARRIED}
        common["extra_json"] = canonical_json({"from": "rankings/1", "row_ids": [row["row_id"]]})
        scores, gens = row.get("scores"), row.get("gens")
        for i, j, gap in found:
            yield {
                **common,
                "origin": "conversion",
                "chosen": row["completions"][i],
                "rejected": row["completions"][j],
                "rank_gap": gap,
                "stage_index": stage_of[gap] if row["split"] == "train" else None,
                "pairs_in_group": len(found),
                **({"chosen_gen": gens[i], "rejected_gen": gens[j]} if gens else {}),
                **(
                    {"chosen_score": scores[i], "rejected_score": scores[j], "margin": scores[i] - scores[j]}
                    if scores
                    else {}
                ),
            }
