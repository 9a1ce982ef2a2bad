"""How much alignment changed, token by token (eval.token_shift; Lin et al. 2023, URIAL).

Every token of the aligned model's greedy answer is ranked under the base model behind the same tokens; rank = 1 +
number of strictly larger logits. Unshifted: rank 1, the base model would have said the same; marginal: rank 2 or 3;
shifted: below. Their order (text): 77.7% unshifted, 92.2% in the top 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stages.evaluation.scores import Metric, cluster_of, share
from stages.measures import suites

CLASSES = {
    "unshifted": lambda rank: rank == 1,
    "marginal": lambda rank: 2 <= rank <= 3,
    "shifted": lambda rank: rank > 3,
    "top3": lambda rank: rank <= 3,
}
MEANINGS = {
    "unshifted": "tokens of greedy answers that are the base model's first choice",
    "marginal": "its second or third",
    "shifted": "below its third",
    "top3": "among its first three",
}
SHOWN = 20


def metrics(records: Sequence[dict]) -> dict[str, Metric]:
    """``token_shift/NAME``: shares of all tokens of greedy answers, their errors over prompts; {} without ranks."""
    ranked = [r for r in records if r.get("base_ranks")]
    if not ranked:
        return {}
    ranks = [rank for r in ranked for rank in r["base_ranks"]]
    clusters = [cluster_of(r) for r in ranked for _ in r["base_ranks"]]
    pooled = suites.token_shift(ranks)
    found = {}
    for name, inside in CLASSES.items():
        m = share([float(inside(rank)) for rank in ranks], clusters)
        found[f"token_shift/{name}"] = Metric(pooled[name], m.n, m.se, m.low, m.high)
    return found


def by_position(records: Sequence[dict]) -> list[dict]:
    """Rows {position, tokens, and the shares}; positions of the answer, 0-based, in bands that double: 0, 1, 2-3, 4-7,
    ...
    """
    bands: dict[int, list[int]] = {}
    for r in records:
        for at, rank in enumerate(r.get("base_ranks") or ()):
            bands.setdefault(at.bit_length(), []).append(rank)
    name = lambda band: str(band) if band < 2 else f"{2 ** (band - 1)}-{2**band - 1}"
    return [
        {"position": name(band), "tokens": len(ranks), **suites.token_shift(ranks)}
        for band, ranks in sorted(bands.items())
    ]


def most_shifted(records: Sequence[dict], text_of) -> list[dict]:
    """Rows {token, shifted, of, share}: tokens that are most often below the base model's third choice. ``text_of``: id
    -> text.
    """
    shifted, seen = Counter(), Counter()
    for r in records:
        for token, rank in zip(r.get("token_ids") or (), r.get("base_ranks") or ()):
            seen[token] += 1
            shifted[token] += rank > 3
    return [
        {"token": repr(text_of(token)), "shifted": n, "of": seen[token], "share": n / seen[token]}
        for token, n in sorted(shifted.items(), key=lambda one: (-one[1], one[0]))[:SHOWN]
        if n
    ]


def publish(stage, records: Sequence[dict], text_of) -> list[tuple[str, str]]:
    """Tables and the curve over positions; blocks for the page."""
    from stages.reporting import reports

    positions, tokens = by_position(records), most_shifted(records, text_of)
    if not positions:
        return []
    stage.report(
        "token-shift-by-position",
        table=positions,
        png=reports.line_chart(
            {
                name: (list(range(len(positions))), [row[name] for row in positions])
                for name in ("unshifted", "marginal", "shifted")
            },
            title="Tokens under the base model",
            xlabel="position in the answer (band " + ", ".join(row["position"] for row in positions[:3]) + " ...)",
            ylabel="share",
            markers=True,
        ),
    )
    blocks = [("Token shift by position in the answer", reports.markdown_table(positions))]
    if tokens:
        stage.report("most-shifted-tokens", table=tokens)
        blocks.append(("Tokens that the base model would not have said", reports.markdown_table(tokens)))
    return blocks
