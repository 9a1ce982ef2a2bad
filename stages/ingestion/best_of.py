"""Files that hold several good and several bad answers to each prompt, as lists in the columns ``chosen`` and
``rejected``: RewardBench 2 and RM-Bench.

A row becomes a ranking of two ranks, of which the usual conversion makes a pair of each good answer and each bad one.
What a pair is of stays with it in ``extra_json``: ``best_of`` {item, chosen, rejected: which of the lists' answers,
right, wrong: how long the lists are} and the subset (``stages.evaluation.best_of``).
"""

from __future__ import annotations

from typing import Any

from stages.ingestion.rules import Bad

USED = ("system", "models")


def is_best_of(row: dict) -> bool:
    """Whether a source row has lists of texts as chosen and rejected answers."""
    return all(
        isinstance(row.get(side), list) and row[side] and all(isinstance(text, str) for text in row[side])
        for side in ("chosen", "rejected")
    )


def best_of(row: dict, options) -> tuple[str, dict, set]:
    """A ``rankings/1`` row of one source row. Raises Bad."""
    from stages.ingestion.fields import to_completion, to_prompt

    if not is_best_of(row):
        raise Bad("wrong_type")
    texts = [*row["chosen"], *row["rejected"]]
    out = {
        "prompt": to_prompt(row.get("prompt"), row.get("system")),
        "completions": [to_completion(text) for text in texts],
        "ranks": [0] * len(row["chosen"]) + [1] * len(row["rejected"]),
    }
    if isinstance(row.get("models"), list) and len(row["models"]) == len(texts):
        out["gens"] = [{"model_id": str(name)} for name in row["models"]]
    return (
        "rankings/1",
        {**out, "_extra": {"best_of": {"right": len(row["chosen"]), "wrong": len(row["rejected"])}}},
        set(),
    )


def of_pair(extra: dict, chosen: int, rejected: int) -> dict:
    """What a pair of such a row keeps of the row's ``extra_json``; {} of other rankings."""
    known = extra.get("best_of")
    if not isinstance(known, dict):
        return {}
    kept: dict[str, Any] = {
        name: extra[name] for name in ("subset", "domain", "category") if extra.get(name) not in (None, "")
    }
    item = extra.get("id")
    return kept | {
        "best_of": {
            **known,
            **({} if item is None else {"item": str(item)}),
            "chosen": chosen,
            "rejected": rejected - known["right"],
        }
    }
