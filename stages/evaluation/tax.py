"""What alignment cost: every benchmark before and after, with paired errors (eval.alignment_tax)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from stages.evaluation import scores
from stages.evaluation.multiple_choice import RATES
from stages.measures import suites

#: What is set side by side where both evaluations have it: right answers, then the loss of held-out text. The first
#: share of a benchmark stands for it in the mean.
SHARES = (
    "accuracy",
    "greedy_accuracy",
    "prompt_level_strict_acc",
    "mc_letter_acc",
    "mc_text_acc",
    "mc_text_acc_norm",
    "pair_accuracy",
    "judge_accuracy",
)
METRICS = (*SHARES, *(name for name in RATES if name not in SHARES), "lm_loss", "bits_per_byte")


def rows_of(before: Sequence[dict], after: Sequence[dict], benchmark: str, allowed=lambda metric: True) -> list[dict]:
    """Rows {benchmark, metric, before, after, delta, se, low, high, p, items} of every metric that both evaluations
    have on shared items.

    Without a name, a benchmark is called as the dataset that its items are from; items of several datasets are
    benchmarks of their own. ``allowed``: whether a metric's values compare.
    """
    names = list(dict.fromkeys(r["dataset"] for r in before))
    found = []
    for dataset in names:
        sides = [[r for r in records if r["dataset"] == dataset] for records in (before, after)]
        if any(is_reference(side) for side in sides):
            sides = [[r for r in side if r["mode"] not in ("chosen", "rejected")] for side in sides]
        title = dataset if not benchmark else benchmark if len(names) == 1 else f"{benchmark}: {dataset}"
        for metric in filter(allowed, METRICS):
            try:
                result = scores.paired(sides[1], sides[0], metric)
            except ValueError:  # one of them has no value of it, or their values do not compare
                continue
            found.append(
                {
                    "benchmark": title,
                    "metric": metric,
                    "before": result["champion"],
                    "after": result["candidate"],
                    "delta": result["difference"],
                    "se": result["se"],
                    "low": result["low"],
                    "high": result["high"],
                    "p": result["p_value"],
                    "items": result["items"],
                }
            )
    return found


def is_reference(records: Sequence[dict]) -> bool:
    """Whether these are of the very model that log-probs of pairs are taken against: all its margins are 0, which is no
    share of right answers.
    """
    margins = [r["margin"] for r in records if r["mode"] == "chosen" and r.get("margin") is not None]
    return bool(margins) and not any(margins)


def judged(rows: Sequence[dict]) -> dict:
    """Marks every row (``verdict``: worse, better or within 2 se) and sums up: {"regressed": rows that are worse,
    "mean_delta", "worst": over the benchmarks' main shares of right answers, None without one}. Without an error
    nothing is said to have moved, nor where items that all differ by the same leave none and are too few for the sign
    test."""
    sign = lambda row: -1.0 if scores.lower_is_better(row["metric"]) else 1.0
    key = lambda row: f"{row['benchmark']}/{row['metric']}"
    gains = [{key(row): sign(row) * row[side] for row in rows} for side in ("before", "after")]
    errors = {
        key(row): math.inf if row["se"] is None or row["se"] < 1e-12 and row["p"] > 0.05 else row["se"] for row in rows
    }
    worse, better = (
        set(suites.alignment_tax(*pair, errors)["regressed"]) if rows else set() for pair in (gains, gains[::-1])
    )
    for row in rows:
        row["verdict"] = "worse" if key(row) in worse else "better" if key(row) in better else "within 2 se"
    main: dict[str, dict] = {}
    for row in rows:
        if row["metric"] in SHARES:
            main.setdefault(row["benchmark"], row)
    total = (
        suites.alignment_tax(*({name: row[side] for name, row in main.items()} for side in ("before", "after")))
        if main
        else {}
    )
    return {
        "regressed": [row for row in rows if row["verdict"] == "worse"],
        "mean_delta": total.get("mean_delta"),
        "worst": total.get("worst"),
    }


def told(row: Mapping) -> str:
    """A row in words."""
    return (
        f"{row['benchmark']} {row['metric']} {row['before']:.4g} -> {row['after']:.4g} (by {row['delta']:+.3g}, se"
        f" {row['se']:.2g})"
    )
