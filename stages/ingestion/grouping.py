"""The second pass of an ingest run: what becomes of the rows of one prompt, or of one item, once they have met."""

from __future__ import annotations

from typing import Any, Callable

from stages.ingestion import conversions, rules, votes
from stages.ingestion.rules import Bad

Settled = tuple[list[dict], dict[str, int], dict[int, str]]


def settle(kinds: list[str], rows: list[dict], want: str, config, draw: Callable[[int], int], signals: bool) -> Settled:
    """(rows out, dropped by reason, {index of an input row: why nothing came of it}) of the rows of one group, each of
    its kind in ``kinds``.

    want: kind of the rows out. draw: a random number below n. signals: labelled completions may be signals of a
    product, of which one per answer counts.
    """
    kept, gone = votes.settle_events(rows) if signals and kinds[0] == "unpaired/1" else (range(len(rows)), {})
    out, reasons, lost = _settle([kinds[index] for index in kept], [rows[index] for index in kept], want, config, draw)
    return out, reasons, gone | {kept[index]: code for index, code in lost.items()}


def _settle(kinds: list[str], rows: list[dict], want: str, config, draw: Callable[[int], int]) -> Settled:
    """See :func:`settle`; beside comparisons there may be pairs that were made of others."""
    have = "comparisons/1" if "comparisons/1" in kinds else kinds[0] if kinds else want
    if have == "comparisons/1":
        return _settle_comparisons(kinds, rows, want, config, draw)
    if have == want == "unpaired/1":
        out, lost = votes.settle_labels(rows, config.on_conflict)
    elif have == want == "pairs/1" and config.contradictions == "keep_as_votes":
        out, lost = votes.settle_pairs(rows, config.tie_policy)
    elif have == want == "pairs/1":
        same = all(rules.same_completion(row["chosen"], rows[0]["chosen"]) for row in rows)
        out, lost = (rows, {}) if same else ([], dict.fromkeys(range(len(rows)), "contradicts_row"))
    else:
        return conversions.grouped(have, want, rows, config, draw)
    return out, {"merged_votes": len(rows) - len(out) - len(lost)}, lost


def _settle_comparisons(kinds: list[str], rows: list[dict], want: str, config, draw: Callable[[int], int]) -> Settled:
    items: dict[Any, list[int]] = {}
    for index, (kind, row) in enumerate(zip(kinds, rows)):
        items.setdefault(votes.item_key(row) if kind == "comparisons/1" else index, []).append(index)
    pairs, owners, lost, merged = [], [], {}, 0
    for indices in items.values():
        made, gone = (
            votes.settle_comparisons([rows[index] for index in indices], config)
            if kinds[indices[0]] == "comparisons/1"
            else ([rows[indices[0]]], {})
        )
        pairs += made
        owners += [indices] * len(made)
        lost |= {indices[index]: code for index, code in gone.items()}
        merged += len(indices) - len(made) - len(gone)
    reasons = {"merged_votes": merged}
    if want == "pairs/1" or not pairs:
        return pairs, reasons, lost
    if ("pairs/1", want) in conversions.ROWWISE:
        out: list[dict] = []
        for pair, indices in zip(pairs, owners):
            try:
                out += conversions.rowwise("pairs/1", want, pair, config, draw)
            except Bad as bad:
                lost |= dict.fromkeys(indices, bad.codes[0])
        return out, reasons, lost
    out, more, none = conversions.grouped("pairs/1", want, pairs, config, draw)
    return out, reasons | more, lost | {index: code for at, code in none.items() for index in owners[at]}
