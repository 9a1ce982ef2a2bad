"""What more tokens and more samples buy at inference (eval.test_time_compute).

By tokens, every sample counts as right only if it is right and not longer than the budget. By samples, pass@k, the vote
of k and the best of k by the reward model, next to the tokens that k samples cost. Length that does not go with right
answers is wasted: their correlation says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from stages.evaluation.scores import Metric, by_votes, cluster_of, counted, lengths_of, powers, share
from stages.measures import statistics, suites

BUDGETS = 8  # token budgets shown at most, halving from the longest answer


def _graded(records: Sequence[dict]) -> dict[str, list[dict]]:
    """{item: its samples with a verdict}; greedy answers where nothing was sampled."""
    answered = [r for r in records if r["mode"] in ("sample", "greedy") and r["correct"] is not None]
    mode = "sample" if any(r["mode"] == "sample" for r in answered) else "greedy"
    found: dict[str, list[dict]] = {}
    for r in answered:
        if r["mode"] == mode:
            found.setdefault(r["item_id"], []).append(r)
    return found


def metrics(records: Sequence[dict]) -> dict[str, Metric]:
    """``forced/closed_rate`` and ``forced/waits`` of forced thoughts; ``length_correct_correlation``: Pearson, over all
    samples with a verdict; absent where all are right, wrong or equally long.
    """
    flat = [r for group in _graded(records).values() for r in group]
    forced = [r for r in records if r.get("forced")]
    found = (
        {}
        if not forced
        else {
            f"forced/{name}": Metric(sum(float(r["forced"][key]) for r in forced) / len(forced), len(forced))
            for name, key in (("closed_rate", "closed"), ("waits", "waits"))
        }
    )
    lengths, right = [float(length) for length in lengths_of(flat)[0]], [float(r["correct"]) for r in flat]
    if len(set(lengths)) < 2 or len(set(right)) < 2:
        return found
    return found | {"length_correct_correlation": Metric(float(statistics.pearson(lengths, right)), len(flat))}


def halves(longest: int) -> list[int]:
    """Token budgets up to the longest answer, each half of the next."""
    return sorted({max(1, -(-longest // 2**i)) for i in range(BUDGETS)})


def by_tokens(records: Sequence[dict], budgets: Sequence[int] | None = None) -> list[dict]:
    """Rows {tokens, accuracy, low, high}: share right and within the budget, over items; by default the longest answer
    and its halves.
    """
    groups = list(_graded(records).values())
    longest = max((r["tokens"] for group in groups for r in group), default=0)
    if longest == 0:
        return []
    budgets = halves(longest) if budgets is None else budgets
    each = [
        suites.accuracy_vs_budget([[r["tokens"] for r in group]], [[r["correct"] for r in group]], budgets)
        for group in groups
    ]
    clusters = [cluster_of(group[0]) for group in groups]
    return [
        {"tokens": budget, "accuracy": m.value, "low": m.low, "high": m.high}
        for budget, column in zip(budgets, zip(*each))
        for m in [share(list(column), clusters)]
    ]


def by_samples(records: Sequence[dict], metrics: dict[str, Metric]) -> list[dict]:
    """Rows {samples, tokens, pass, vote, best}: what k = 1, 2, 4, ... samples of a prompt reach, and their tokens per
    prompt, where these are known.
    """
    groups = list(_graded(records).values())
    k_max = min(map(len, groups), default=0)
    if k_max < 2 or "accuracy" not in metrics:
        return []
    known = all(counted(r) for group in groups for r in group)
    tokens = sum(sum(r["tokens"] for r in group) / len(group) for group in groups) / len(groups)
    rows = []
    for k in powers(k_max):
        voted = by_votes([r for group in groups for r in group], k)
        found = {
            "at least one right (pass@k)": metrics["accuracy" if k == 1 else f"pass_at_{k}"].value,
            "vote (maj@k)": share(*map(list, zip(*voted))).value if voted else None,
            "best by the reward model": (
                metrics[f"best_of_{k}_accuracy"].value
                if f"best_of_{k}_accuracy" in metrics
                else metrics["accuracy"].value
                if k == 1 and f"best_of_{k_max}_accuracy" in metrics
                else None
            ),
        }
        rows.append(
            {"samples": k}
            | ({"tokens": k * tokens} if known else {})
            | {name: value for name, value in found.items() if value is not None}
        )
    return rows


def publish(stage, records: Sequence[dict], metrics: dict[str, Metric]) -> list[tuple[str, str]]:
    """Tables and curves of both; blocks for the page."""
    from stages.reporting import reports

    tokens, samples, blocks = by_tokens(records), by_samples(records, metrics), []
    if len(tokens) > 1:
        xs = [row["tokens"] for row in tokens]
        stage.report(
            "accuracy-by-tokens",
            table=tokens,
            png=reports.line_chart(
                {"accuracy": (xs, [row["accuracy"] for row in tokens])},
                bands={"accuracy": ([row["low"] for row in tokens], [row["high"] for row in tokens])},
                title="Right and within the token budget",
                xlabel="tokens per answer",
                ylabel="accuracy",
                markers=True,
                log_x=True,
            ),
        )
        blocks.append(
            (
                "Accuracy by tokens per answer",
                reports.markdown_table(
                    [
                        {
                            "tokens at most": row["tokens"],
                            "accuracy": reports.with_interval(row["accuracy"], row["low"], row["high"]),
                        }
                        for row in tokens
                    ]
                ),
            )
        )
    if samples:
        names = [
            name for name in dict.fromkeys(key for row in samples for key in row) if name not in ("samples", "tokens")
        ]
        by = "tokens" if "tokens" in samples[0] else "samples"
        stage.report(
            "accuracy-by-samples",
            table=samples,
            png=reports.line_chart(
                {name: ([row[by] for row in samples], [row.get(name) for row in samples]) for name in names},
                title="What more samples of a prompt buy",
                xlabel=f"{by} per prompt",
                ylabel="accuracy",
                markers=True,
                log_x=True,
            ),
        )
        blocks.append(("Accuracy by samples per prompt", reports.markdown_table(samples)))
    return blocks
