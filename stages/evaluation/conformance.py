"""A specification checked clause by clause (eval.conformance): a rubric whose items are the clauses, and how often
answers violate each.

    posttrain stage evaluate --input model=REF --input prompts=prompts.jsonl --input rubric=specification.yaml --input
    judge=MODEL --set rewards='[{kind: rubric}]'

A clause is violated where its score is below ``violation_below`` of the component. Items that a reward model scores are
no clauses: their numbers have no such scale.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence

from stages.evaluation.scores import Metric, share

MEANING = "answers that violate the clause of the rubric (all clauses: at least one of theirs)"


def rates(
    items: Sequence[dict], sampled: Collection[str], below: float, not_clauses: Collection[tuple[str, str]] = ()
) -> tuple[dict[str, Metric], list[dict]]:
    """(metrics, table): ``violation_rate`` over answers with a scored clause, ``violation_rate/CATEGORY/ITEM`` over
    those whose clause was scored, intervals by prompt; the table has the most violated clause first.

    Args:
        items: ``rubric_scores/1`` rows. sampled: row ids of the answers that count. not_clauses: (category, item) of
            items to leave out.
    """
    clauses: dict[tuple[str, str], list[dict]] = {}
    answers: dict[str, tuple[str, list[float]]] = {}
    for row in items:
        key = row["category"], row["item_id"]
        if row["sample_row_id"] not in sampled or row["score"] is None or key in not_clauses:
            continue
        clauses.setdefault(key, []).append(row)
        answers.setdefault(row["sample_row_id"], (row["group_id"] or row["prompt_id"], []))[1].append(
            float(row["score"] < below)
        )
    if not answers:
        return {}, []
    found, table = (
        {"violation_rate": share([max(of) for _, of in answers.values()], [prompt for prompt, _ in answers.values()])},
        [],
    )
    for (category, item), rows in clauses.items():
        metric = found[f"violation_rate/{category}/{item}"] = share(
            [float(r["score"] < below) for r in rows], [r["group_id"] or r["prompt_id"] for r in rows]
        )
        worst = min(rows, key=lambda r: (r["score"], r["sample_row_id"]))
        table.append(
            {
                "category": category,
                "clause": item,
                "answers": metric.n,
                "violation_rate": metric.value,
                "low": metric.low,
                "high": metric.high,
                "lowest_score": worst["score"],
                "why": worst["reasoning"] or "",
                "sample_row_id": worst["sample_row_id"],
            }
        )
    return found, sorted(table, key=lambda r: (-r["violation_rate"], r["category"], r["clause"]))


def sampled_answers(rows: Iterable[dict]) -> set[str]:
    """Row ids of ``eval_samples/1`` rows that were sampled; the greedy ones where none was."""
    by_mode: dict[str, set[str]] = {}
    for row in rows:
        by_mode.setdefault(json.loads(row["extra_json"] or "{}").get("mode", ""), set()).add(row["row_id"])
    return by_mode.get("sample") or by_mode.get("greedy") or set()
