"""Several labels of the same answers as votes (`data.aggregate`, `data.unpaired`): pure functions on the rows of one
item.
"""

from __future__ import annotations

import hashlib
import math
from datetime import datetime

from stages.ingestion import pairing
from stages.ingestion.conversions import _derived, comparison_to_pair
from stages.ingestion.rules import Bad, same_completion, stripped
from storage.schema import prompt_id


def item_key(row: dict) -> bytes:
    """Key of a pair or comparison whatever the order of its answers, of a labelled completion whatever its label.
    Equality is after strip; a comparison by another criterion is another item."""
    sides = [
        prompt_id(stripped(row[name]))
        for name in ("chosen", "rejected", "response_a", "response_b", "completion")
        if row.get(name) is not None
    ]
    return hashlib.sha256(
        "|".join([prompt_id(stripped(row["prompt"])), *sorted(sides), row.get("criteria") or ""]).encode()
    ).digest()[:16]


def settle_pairs(rows: list[dict], tie_policy: str = "drop") -> tuple[list[dict], dict[int, str]]:
    """Pairs with the same two answers (`contradictions: keep_as_votes`): (rows out, {index of an input row: why nothing
    came of it}).

    A vote counts with its label_prob (1 where null), and label_prob of the pair that is left is the mean for its side.
    """
    first, forward = rows[0], [same_completion(row["chosen"], rows[0]["chosen"]) for row in rows]
    if all(forward) and all(row.get("label_prob") is None for row in rows):
        return [first], {}
    chances = [1.0 if row.get("label_prob") is None else row["label_prob"] for row in rows]
    share = math.fsum(p if ahead else 1 - p for p, ahead in zip(chances, forward)) / len(rows)
    if share == 0.5 and len(rows) > 1 and tie_policy != "soft":
        return [], dict.fromkeys(range(len(rows)), "contradicts_row")
    keep = next((index for index, ahead in enumerate(forward) if ahead == (share >= 0.5)), 0)
    return [{**rows[keep], "label_prob": share if forward[keep] else 1 - share}], {}


def settle_comparisons(rows: list[dict], options) -> tuple[list[dict], dict[int, str]]:
    """All labels of one comparison, whoever gave them, as at most one pair: (pairs/1 rows, {index of an input row: why
    nothing came of it}).

    label_prob is the mean P(chosen preferred) over the labels, strength the median of those that agree with the winner;
    magnitudes are never averaged over annotators. Under contradictions=drop_both annotators that disagree lose the
    comparison.
    """
    lost = range(len(rows))
    if len(rows) == 1:
        try:
            return [_derived("comparisons/1", rows[0], comparison_to_pair(rows[0], options))], {}
        except Bad as bad:
            return [], {0: bad.codes[0]}
    pairs = [
        comparison_to_pair(
            row,
            options.model_copy(
                update={
                    "tie_policy": "soft",
                    "soft_label": (
                        "linear" if options.soft_label == "linear" and row["label_kind"] == "likert" else "prob"
                    ),
                }
            ),
        )
        for row in rows
    ]
    forward = [same_completion(pair["chosen"], rows[0]["response_a"]) for pair in pairs]
    votes = ["tie" if pair["label_prob"] == 0.5 else "A" if ahead else "B" for pair, ahead in zip(pairs, forward)]
    if options.contradictions == "drop_both" and {"A", "B"} <= set(votes):
        return [], dict.fromkeys(lost, "contradicts_row")
    winner, probability, kept = pairing.binarise(
        math.fsum(pair["label_prob"] if ahead else 1 - pair["label_prob"] for pair, ahead in zip(pairs, forward))
        / len(rows),
        options.tie_policy,
    )
    if not kept:
        return [], dict.fromkeys(lost, "all_tied")
    keep = next((index for index, ahead in enumerate(forward) if ahead == (winner != "B") and votes[index] != "tie"), 0)
    strengths = [pair["strength"] for pair, vote in zip(pairs, votes) if vote == winner and pair.get("strength")]
    strength = math.floor(pairing.median(strengths) + 0.5) if strengths else None
    new = {
        **pairs[keep],
        "strength": strength,
        "label_prob": None if options.soft_label == "none" and winner != "tie" else probability,
        "ann": {**(pairs[keep].get("ann") or {}), "annotator_id": None},
    }
    if options.margin_mode.startswith("llama2"):
        new["margin"] = pairing.margin(options.margin_mode, strength=strength)
    return [_derived("comparisons/1", rows[keep], new, [("comparisons/1", row) for row in rows])], {}


def settle_labels(rows: list[dict], on_conflict: str) -> tuple[list[dict], dict[int, str]]:
    """unpaired/1 rows of one completion: the first with its label, or with the majority's (`on_conflict`); none where
    the labels conflict.
    """
    good = sum(row["label"] for row in rows)
    if 0 < good < len(rows) and (on_conflict != "majority" or 2 * good == len(rows)):
        return [], dict.fromkeys(range(len(rows)), "contradicts_row")
    return [next(row for row in rows if row["label"] == (2 * good > len(rows)))], {}


def is_event(row: dict) -> bool:
    """Whether a labelled completion says what somebody did with it (`data.implicit`)."""
    return (row.get("label_kind") or "").startswith("event:")


def settle_events(rows: list[dict]) -> tuple[list[int], dict[int, str]]:
    """(indices of the rows that count, {index: why not}) of product signals: one for each completion, the last explicit
    one, else the last.
    """
    items: dict[bytes, list[int]] = {}
    for index, row in enumerate(rows):
        if is_event(row):
            items.setdefault(item_key(row), []).append(index)
    lost: dict[int, str] = {}
    for indices in items.values():
        times = [
            (
                None
                if rows[index].get("collected_at") is None
                else datetime.fromisoformat(str(rows[index]["collected_at"]))
            )
            for index in indices
        ]
        keep = indices[
            pairing.last_event(
                [rows[index]["label_kind"].removeprefix("event:") in pairing.EXPLICIT for index in indices], times
            )
        ]
        lost |= {index: "superseded_event" for index in indices if index != keep}
    return [index for index in range(len(rows)) if index not in lost], lost
