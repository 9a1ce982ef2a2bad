"""Two halves of the held-out prompts: one to choose a model on, one to test the choice on.

The best of several models on some prompts is partly the luckiest one there, so a test on the same prompts is too kind
to it. `compare` names the best model on the *selection* half; the promotion gate tests it on the *confirmation* half. A
prompt's half is a hash of its group, the same in every evaluation and every run, so that nothing that belongs together
is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from stages.evaluation.scores import cluster_of, item_values, lower_is_better
from storage.files import sha256_text

SALT = "halves-v1"


def half_of(group: str) -> str:
    """`selection` or `confirmation`, each with probability 1/2 over groups."""
    return "selection" if sha256_text(f"{SALT}:{group}")[0] < "8" else "confirmation"


def part(records: Sequence[dict], which: str) -> list[dict]:
    """The records of one half (by group_id, else prompt_id, else item_id), or of `all`."""
    return [r for r in records if which == "all" or half_of(cluster_of(r)) == which]


def choose(records: Mapping[str, Sequence[dict]], metric: str) -> tuple[str | None, dict[str, float], int]:
    """(best model, value of each model, number of items) of a metric on the items of the selection half that all models
    have scored.

    The first of equals wins; a model without any value takes no part; None when no model has one. Less is better for
    the metrics of ``scores.LOWER_IS_BETTER``. Raises ValueError for a metric that has no value per item.
    """
    values = {name: found for name, rows in records.items() if (found := item_values(part(rows, "selection"), metric))}
    if not values:
        return None, {}, 0
    items = [item for item in next(iter(values.values())) if all(item in found for found in values.values())]
    if not items:
        return None, {}, 0
    means = {name: float(np.mean([found[item][0] for item in items])) for name, found in values.items()}
    sign = -1.0 if lower_is_better(metric) else 1.0
    return max(means, key=lambda name: sign * means[name]), means, len(items)
