"""Held-out text under a policy: loss per token, perplexity, bits per byte (eval.perplexity, and the loss of
eval.alignment_tax).

Every token of a text is predicted once, from those before it in its window; windows have ``max_length`` tokens, and
each begins with the last token of the one before. The first token is predicted from the begin token, or from the end
token (the border of documents) where the tokenizer has none; that token is not predicted itself. The sums are over the
whole set: sum nll / tokens, exp of it, and sum nll / (ln 2 * UTF-8 bytes), which alone compares different tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

# metric -> what its sum of nll is divided by
DENOMINATORS = {"lm_loss": "tokens", "perplexity": "tokens", "bits_per_byte": "bytes"}
HEADLINES = {
    "lm_loss": "-log p per token of held-out text, nats",
    "perplexity": "exp of that",
    "bits_per_byte": "-log2 p per UTF-8 byte of held-out text",
}


def windows(ids: Sequence[int], start: int, max_length: int) -> list[tuple[list[int], list[int]]]:
    """(one token of context, the tokens it precedes) of every window: all of ``ids`` in order, each once; context and
    tokens are at most ``max_length``.
    """
    size = max_length - 1
    return [([start] if at == 0 else [ids[at - 1]], list(ids[at : at + size])) for at in range(0, len(ids), size)]


def score(rows: Sequence[dict], renderer, logps_of, max_length: int) -> list[dict]:
    """{"nll": nats, "tokens", "bytes"} of each ``text/1`` row."""
    from stages.batching import make_item

    tokenizer, items, owners, found = renderer.tokenizer, [], [], []
    for index, row in enumerate(rows):
        ids = renderer.text_ids(row["text"], end=False)
        begun = tokenizer.bos_token_id is not None
        start, ids = (ids[0], ids[1:]) if begun else (tokenizer.eos_token_id, ids)
        found.append({"nll": 0.0, "tokens": len(ids), "bytes": len(row["text"].encode("utf-8"))})
        for context, part in windows(ids, start, max_length):
            items.append(make_item(row["row_id"], context, [part], [[1] * len(part)]))
            owners.append(index)
    for owner, (logps,) in zip(owners, logps_of(items)):
        found[owner]["nll"] -= math.fsum(logps)
    return found


def value_of(record: dict, metric: str) -> float | None:
    """A metric of one text alone."""
    if record.get("nll") is None or not record["tokens"]:
        return None
    return ratio(metric, record["nll"], record["tokens" if DENOMINATORS[metric] == "tokens" else "bytes"])


def ratio(metric: str, nll: float, count: int) -> float:
    """A metric from a sum of nll in nats and its count of tokens or bytes."""
    loss = nll / count
    return {"lm_loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": loss / math.log(2)}[metric]


def _influence(records: Sequence[dict], metric: str) -> tuple[float, np.ndarray]:
    """(metric over all records, how much each record moves it): the value of a ratio of sums and its residuals."""
    nll = np.array([r["nll"] for r in records])
    count = np.array([r[DENOMINATORS[metric]] for r in records], dtype=float)
    value = ratio(metric, math.fsum(nll), int(count.sum()))
    slope = {"lm_loss": 1.0, "perplexity": value, "bits_per_byte": 1 / math.log(2)}[metric]
    return value, slope * (nll - nll.sum() / count.sum() * count) / count.sum()


def _error(influence: np.ndarray, clusters: Sequence[str]) -> float | None:
    """Clustered error of a ratio from its residuals; None for a single cluster."""
    sums: dict[str, float] = {}
    for value, cluster in zip(influence.tolist(), clusters):
        sums[cluster] = sums.get(cluster, 0.0) + value
    n = len(sums)
    return math.sqrt(n / (n - 1) * math.fsum(value * value for value in sums.values())) if n > 1 else None


def metrics_of(records: Sequence[dict]) -> dict:
    """The three metrics over all texts, with errors over texts (or their groups)."""
    from stages.evaluation.scores import Metric, cluster_of

    texts = [r for r in records if r["mode"] == "text_loss" and r["tokens"]]
    found = {}
    for metric in DENOMINATORS if texts else ():
        value, influence = _influence(texts, metric)
        se = _error(influence, [cluster_of(r) for r in texts])
        low, high = (None, None) if se is None else (value - 1.959964 * se, value + 1.959964 * se)
        found[metric] = Metric(value, len(texts), se, low, high)
    return found


def paired(candidate: Sequence[dict], champion: Sequence[dict], metric: str, confidence: float) -> dict:
    """Difference candidate - champion on the texts that both scored, in the form of ``scores.paired``; the error is
    that of a difference of ratios of sums.

    Raises ValueError without a shared text, and for a metric per token where two tokenizers cut the texts differently.
    """
    from statistics import NormalDist

    from stages.evaluation.scores import cluster_of
    from stages.measures import statistics

    sides = [
        {r["item_id"]: r for r in records if r["mode"] == "text_loss" and r["tokens"]}
        for records in (candidate, champion)
    ]
    shared = [item for item in sides[0] if item in sides[1]]
    if not shared:
        raise ValueError(
            f"the two evaluations share no scored item for {metric!r}: evaluate both on the same texts and split"
        )
    a, b = ([side[item] for item in shared] for side in sides)
    if DENOMINATORS[metric] == "tokens" and any(x["tokens"] != y["tokens"] for x, y in zip(a, b)):
        raise ValueError(
            f"{metric} is per token, and the two models cut the texts into different tokens; compare bits_per_byte"
        )
    (left, moves_a), (right, moves_b) = _influence(a, metric), _influence(b, metric)
    clusters = [cluster_of(r) for r in a]
    difference, se, n = left - right, _error(moves_a - moves_b, clusters), len(set(clusters))
    half = None if se is None else NormalDist().inv_cdf(0.5 + confidence / 2) * se
    each = [value_of(x, metric) - value_of(y, metric) for x, y in zip(a, b)]
    apart = len(sides[0].keys() ^ sides[1].keys())
    return {
        "metric": metric,
        "candidate": left,
        "champion": right,
        "difference": difference,
        "se": se,
        "low": None if half is None else difference - half,
        "high": None if half is None else difference + half,
        "confidence": confidence,
        "n": n,
        "items": len(shared),
        "p_value": (
            None if se is None else statistics.normal_tail(difference / se) if se > 0 else float(difference == 0)
        ),
        "better": sum(value > 0 for value in each),
        "worse": sum(value < 0 for value in each),
        "candidate_missing": sum(item not in sides[0] for item in sides[1]) / len(sides[1]) or None,
        "champion_missing": sum(item not in sides[1] for item in sides[0]) / len(sides[0]) or None,
        "note": f"{apart} items are scored in only one of the two evaluations and are left out" if apart else None,
    }
