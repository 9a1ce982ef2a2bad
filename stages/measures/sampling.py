"""Metrics from several samples per problem (eval.pass_at_k, eval.avg_at_k, eval.maj_at_k). Best-of-n is in
``stages.selection``.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

MAX_SUBSETS = 20_000


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """Unbiased probability that at least one of ``k`` of the ``n`` samples is right, ``c`` being right.

    1 - C(n-c, k) / C(n, k) as a product, so nothing overflows (Chen et al. 2021, eq. 1). ``None`` when k > n: the value
    is undefined, not 1. The plug-in 1 - (1 - c/n)^k is biased low and never used.
    """
    if not 0 <= c <= n:
        raise ValueError(f"pass@k needs 0 <= correct <= samples, got correct={c}, samples={n}; count each sample once")
    if k < 1:
        raise ValueError(f"pass@k needs k >= 1, got {k}")
    if k > n:
        return None
    return 1.0 - math.prod(max(0.0, 1.0 - k / i) for i in range(n - c + 1, n + 1))


def _vote_value(answers: Sequence[Hashable | None], gold: Hashable) -> float:
    """Expected correctness of one plain vote, ties broken uniformly; nulls do not vote; no vote is wrong."""
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    top = max(votes.values())
    leaders = [answer for answer, count in votes.items() if count == top]
    return (gold in leaders) / len(leaders)


def maj_at_k(
    answers: Sequence[Hashable | None], gold: Hashable, k: int, *, rng: np.random.Generator | None = None
) -> float | None:
    """Expected accuracy of the majority of ``k`` of the given answers, over all k-subsets.

    Beyond 20,000 subsets, 1,000 of them are drawn from ``rng`` (which is then required). ``None`` when k > n.
    """
    n = len(answers)
    if k > n:
        return None
    if math.comb(n, k) <= MAX_SUBSETS:
        return float(np.mean([_vote_value(subset, gold) for subset in itertools.combinations(answers, k)]))
    if rng is None:
        raise ValueError(f"maj@{k} of {n} answers has too many subsets to enumerate: pass rng= to draw 1,000 of them")
    draws = (rng.choice(n, size=k, replace=False) for _ in range(1000))
    return float(np.mean([_vote_value([answers[i] for i in draw], gold) for draw in draws]))
