"""The gold answers of a prompt row."""

from __future__ import annotations

import json

from stages.verification.extraction import extract_boxed, extract_hash


class BadGold(ValueError):
    """The gold answer of a row is missing or not of its own type; the text says what to write."""


def gold_of(row: dict) -> str:
    """The row's gold answer. Raises BadGold when it has none."""
    gold = row.get("answer")
    if gold is None or not str(gold).strip():
        raise BadGold(
            "the prompt row has no answer; give prompts with an `answer` column or use a reward that needs none"
        )
    return str(gold)


def math_gold(row: dict) -> str:
    """The gold answer of a row of mathematics, without the solution that leads to it. Raises BadGold when there is
    none.
    """
    gold = gold_of(row)
    return extract_hash(gold) or extract_boxed(gold) or gold


def golds_of(row: dict) -> list[str]:
    """The row's gold answer and what `extra_json` names as other ways to say it, ``{"aliases": [...]}``. Raises BadGold
    when it has none.
    """
    extra = row.get("extra_json")
    aliases = json.loads(extra).get("aliases") if extra and '"aliases"' in extra else None
    return (
        [gold_of(row), *(str(one) for one in aliases if str(one).strip())]
        if isinstance(aliases, list)
        else [gold_of(row)]
    )
