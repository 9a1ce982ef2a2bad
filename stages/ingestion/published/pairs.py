"""A better and a worse answer: edits of HelpSteer3, HHH alignment, columns that come in twos."""

from __future__ import annotations

from stages.ingestion.published.forms import TALKS, Form, are_dicts, without
from stages.ingestion.rules import Bad


def _paired(row: dict, options) -> list[dict]:
    names = next((a, b) for a, b in _PAIRED if row.get(a) is not None and row.get(b) is not None)
    return [without(row, *names, chosen=row[names[0]], rejected=row[names[1]])]


def _edited(row: dict, options) -> list[dict]:
    """An answer before and behind the edit that feedback on it asked for (HelpSteer3)."""
    return [
        without(
            row,
            "context",
            "original_response",
            "edited_response",
            prompt=row["context"],
            chosen=row["edited_response"],
            rejected=row["original_response"],
        )
    ]


def _hhh(row: dict, options) -> list[dict]:
    """A question with two answers, of which the one with the label 1 is better (HHH alignment)."""
    choices, labels = row["targets"]["choices"], row["targets"]["labels"]
    if not isinstance(choices, list) or len(choices) != 2 or labels not in ([0, 1], [1, 0]):
        raise Bad("bad_label")
    better = labels.index(1)
    return [without(row, "input", "targets", prompt=row["input"], chosen=choices[better], rejected=choices[1 - better])]


_PAIRED = (("response_j", "response_k"), ("chosen_response", "rejected_response"))


def _pair_of_conversation(row: dict, options) -> list[dict]:
    """A conversation up to the last question, and two answers to it (LLaMA-Factory, UltraInteract)."""
    name = next(name for name in TALKS if isinstance(row.get(name), list))
    return [without(row, name, prompt=row[name])]


def _asks_last(row: dict, options) -> bool:
    talk = next((row[name] for name in TALKS if isinstance(row.get(name), list)), None)
    opens = [side[0] if isinstance(side, list) and side else side for side in (row["chosen"], row["rejected"])]
    return (
        row.get("prompt") is None
        and are_dicts(talk)
        and talk[-1].get("role", talk[-1].get("from")) in ("user", "human")
        and not any(
            isinstance(first, dict) and first.get("role", first.get("from")) in ("user", "human", "system")
            for first in opens
        )
    )


HHH = Form(
    ("input", "targets"),
    _hhh,
    lambda row, options: isinstance(row["targets"], dict) and {"choices", "labels"} <= row["targets"].keys(),
)
EDITED = Form(("context", "original_response", "edited_response"), _edited)
CONVERSATION = Form(("chosen", "rejected"), _pair_of_conversation, _asks_last)
IN_TWO_COLUMNS = Form(
    (),
    _paired,
    lambda row, options: (
        row.get("chosen") is None and any(row.get(a) is not None and row.get(b) is not None for a, b in _PAIRED)
    ),
)
