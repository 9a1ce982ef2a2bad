"""curriculum: preference data in stages, from easy to hard or in the order given.

Fills ``stage_index`` of ``pairs/1``; the align stage trains on one stage at a time (``stage_index``), each from the model of the one before
(sDPO, Curry-DPO; catalogue ``da.sdpo``, ``da.curry``). Validation and test rows belong to no stage.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stages.spec import InputSpec, OutputSpec, StageConfig, StageSpec


class Config(StageConfig):
    order: Literal["given", "margin", "rank_gap"] = Field(
        "margin", description="given: file order (sDPO); margin: largest score gap, margin or strength first; rank_gap: rankings, the largest rank gap first (Curry-DPO).")
    stages: int = Field(3, ge=1, description="Stages; for rank_gap the most there can be, later pairs join the last.")
    pairing: Literal["best_vs_k", "all_pairs_by_gap"] = Field("best_vs_k", description="rank_gap: (1,K), (1,K-1) ... (1,2), or all pairs by their gap.")


SPEC = StageSpec(
    name="curriculum", config=Config,
    inputs={"data": InputSpec("dataset", kinds=("pairs/1", "rankings/1"), doc="Pairs; rankings for order=rank_gap.")},
    outputs={"data": OutputSpec("dataset", doc="pairs/1 with stage_index.")})


def run(stage):
    from stages.reports import document, facts
    from storage.schema import complete_row

    data, config = stage.dataset("data"), stage.config
    if (data.kind == "rankings/1") != (config.order == "rank_gap"):
        wanted = "rankings/1; convert with the ingest stage (kind=rankings/1), or write order=margin" if config.order == "rank_gap" else \
            "pairs/1; convert with the ingest stage (kind=pairs/1), or write order=rank_gap"
        raise ValueError(f"order={config.order} does not fit rows of {data.kind}: give {wanted}.")
    rows = list(data.iter_rows())
    made, dropped = ranked(rows, config) if config.order == "rank_gap" else staged(rows, config)
    counts = {f"stage_{k}": sum(r["stage_index"] == k for r in made) for k in range(1 + max((r["stage_index"] or 0 for r in made), default=0))}
    writer = stage.writer("data", "pairs/1")
    writer.write(complete_row("pairs/1", row, dataset=row["dataset"], source=row["source"], origin=row["origin"], split=row["split"]) for row in made)
    writer.close({"rows": len(made), "dropped": dropped})
    summary = {"stages": len(counts), "rows": len(made), "dropped": dropped, **counts}
    stage.summary(summary)
    stage.report("summary", markdown=document("Curriculum", facts(summary)))


def staged(rows: list[dict], config) -> tuple[list[dict], int]:
    """Pairs in equal stages, the remainder to the first; pairs without score gap, margin or strength are dropped for order=margin."""
    from stages import selection
    from stages.preference_items import score_gap

    def ease(row):
        gap = score_gap(row)
        return row.get("strength") if gap is None else gap

    train = [r for r in rows if r["split"] == "train"]
    if config.order == "margin":
        kept = [r for r in train if ease(r) is not None]
        if not kept:
            raise ValueError("order=margin needs scores, margins or strengths and no pair has any; write order=given, or ingest with margin_mode=score_diff.")
        order, index = selection.order_by_difficulty([-ease(r) for r in kept], config.stages)
    else:
        kept, index, order = train, [k for k, n in enumerate(selection.chunk_sizes(len(train), config.stages)) for _ in range(n)], range(len(train))
    held_out = [{**r, "stage_index": None} for r in rows if r["split"] != "train"]
    return [{**kept[i], "stage_index": index[i]} for i in order] + held_out, len(train) - len(kept)


def ranked(rows: list[dict], config) -> tuple[list[dict], int]:
    """Pairs of rankings, the largest rank gap in stage 0; tied responses give no pair."""
    from stages import selection
    from stages.ingestion import pairing

    made, dropped = [], 0
    for row in rows:
        if config.pairing == "best_vs_k":
            found = [(k, i, j, gap) for k, (i, j, gap) in enumerate(selection.rank_gap_stages(row["ranks"]))]
        else:
            found = [(k, i, j, gap) for k, (gap, pairs) in enumerate(pairing.rank_gap_stages(row["ranks"])) for i, j in pairs]
        dropped += not found
        common = {name: row[name] for name in ("prompt", "prompt_id", "group_id", "dataset", "source", "split")}
        scores = row.get("scores")
        for k, i, j, gap in found:
            made.append({**common, "origin": "conversion", "chosen": row["completions"][i], "rejected": row["completions"][j], "rank_gap": gap,
                         "stage_index": min(k, config.stages - 1) if row["split"] == "train" else None, "pairs_in_group": len(found),
                         **({"chosen_score": scores[i], "rejected_score": scores[j], "margin": scores[i] - scores[j]} if scores else {})})
    return made, dropped
