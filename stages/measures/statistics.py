"""Evaluation statistics: intervals, paired tests, calibration, reward-model accuracy (eval.statistics, rm.eval). numpy
only.

Nothing here draws from a global random state; the bootstrap takes a seed. Scores are per question; error bars are
over questions, and paired comparisons use the paired error. Win rates, pass@k and ratings are in stages/evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Z95 = 1.959963984540054


def _f64(x):
    return np.asarray(x, dtype=np.float64)


def normal_tail(z: float) -> float:
    """Two-sided p-value of a standard normal z."""
    return math.erfc(abs(z) / math.sqrt(2))


# --- intervals and tests ----------------------------------------------------------------------------


def wilson(k, n: int, z: float = Z95) -> tuple[float, float]:
    """Wilson score interval of k successes in n, clipped to [0, 1]. n = 0 gives (0, 1): nothing is known."""
    if n == 0:
        return 0.0, 1.0
    if not 0 <= k <= n:
        raise ValueError(f"{k} successes of {n}: the count must be between 0 and the number of questions")
    p, z2 = k / n, z * z
    centre = p + z2 / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    low, high = max(0.0, (centre - half) / (1 + z2 / n)), min(1.0, (centre + half) / (1 + z2 / n))
    return 0.0 if k == 0 else low, 1.0 if k == n else high  # which rounding misses by 1e-18


def chance_of_more(k_a: int, n_a: int, k_b: int, n_b: int) -> float:
    """Fisher's exact one-sided p: how often a share as far above the other as k_a of n_a is above k_b of n_b comes from
    equal ones.
    """
    right, all_ = k_a + k_b, n_a + n_b
    return sum(math.comb(n_a, i) * math.comb(n_b, right - i) for i in range(k_a, min(n_a, right) + 1)) / math.comb(
        all_, right
    )


def mean_se(values) -> tuple[float, float]:
    """(mean, standard error with ddof 1); the error of a single value is NaN, of none both are."""
    x = _f64(values)
    if not x.size:
        return math.nan, math.nan
    return float(x.mean()), float(x.std(ddof=1) / math.sqrt(x.size)) if x.size > 1 else math.nan


def bootstrap_ci(
    values, n: int = 1000, seed: int = 0, level: float = 0.95, statistic=None, clusters=None
) -> tuple[float, float]:
    """Percentile interval of the mean (or `statistic(values)`) over resampled questions, or clusters of them."""
    x = _f64(values)
    if not x.size:
        return math.nan, math.nan
    rng = np.random.Generator(np.random.Philox(key=seed))
    tails = [50 * (1 - level), 50 * (1 + level)]
    number = {c: i for i, c in enumerate(dict.fromkeys(clusters))} if clusters is not None else None
    members = np.arange(x.size) if number is None else np.array([number[c] for c in clusters])
    if statistic is None:
        sums, sizes = np.bincount(members, x), np.bincount(members)
        means, chunk = np.empty(n), max(1, 4_000_000 // sums.size)
        for start in range(0, n, chunk):
            stop = min(n, start + chunk)
            drawn = rng.integers(0, sums.size, (stop - start, sums.size))
            means[start:stop] = sums[drawn].sum(1) / (x.size if number is None else sizes[drawn].sum(1))
        low, high = np.percentile(means, tails)
        return float(low), float(high)
    groups = [np.flatnonzero(members == i) for i in range(members.max() + 1)]
    draws = [
        statistic(x[np.concatenate([groups[i] for i in rng.integers(0, len(groups), len(groups))])]) for _ in range(n)
    ]
    low, high = np.percentile(draws, tails)
    return float(low), float(high)


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Two-sided exact binomial p-value on discordant pairs, capped at 1."""
    n, k = only_a + only_b, min(only_a, only_b)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n) if n else 1.0


def holm(p_values) -> list[float]:
    """p-values of several tests, each raised so that the chance of any false alarm among them stays at its level (Holm
    1979), in the order given.
    """
    out, worst = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[i]))
        out[i] = worst
    return out


def clustered_se(scores, clusters) -> float:
    """Sandwich standard error of the mean over clusters, no small-sample factor."""
    x = _f64(scores)
    residual, sums = x - x.mean(), {}
    for c, r in zip(clusters, residual):
        sums[c] = sums.get(c, 0.0) + r
    return float(math.sqrt(sum(s * s for s in sums.values())) / x.size)


def power_two_proportions(p1: float, p2: float, alpha: float = 0.05, power: float = 0.8) -> int:
    """Questions per arm that an unpaired two-sided test needs to see p1 against p2."""
    from statistics import NormalDist

    za, zb = NormalDist().inv_cdf(1 - alpha / 2), NormalDist().inv_cdf(power)
    return math.ceil((za + zb) ** 2 * (p1 * (1 - p1) + p2 * (1 - p2)) / (p1 - p2) ** 2)


# --- reward models ------------------------------------------------------------------------------------


def pairwise_accuracy(chosen, rejected) -> dict:
    """strict, half_credit, ties (rate), log_loss, mean_margin, n of scores on held-out pairs (rm.eval)."""
    d = _f64(chosen) - _f64(rejected)
    if not d.size:
        return {
            "strict": math.nan,
            "half_credit": math.nan,
            "ties": math.nan,
            "log_loss": math.nan,
            "mean_margin": math.nan,
            "n": 0,
        }
    return {
        "strict": float((d > 0).mean()),
        "half_credit": float((d > 0).mean() + 0.5 * (d == 0).mean()),
        "ties": float((d == 0).mean()),
        "log_loss": float(np.logaddexp(0.0, -d).mean()),
        "mean_margin": float(d.mean()),
        "n": int(d.size),
    }


def ece(values, correct=None, bins: int = 10) -> float:
    """Expected calibration error of scored pairs over equal-width bins on [0.5, 1]; NaN without pairs (rm.eval).

    `values` are margins (chosen - rejected score), or with `correct` the confidences of `preference_confidence`.
    """
    x = _f64(values)
    if not x.size:
        return math.nan
    confidence, right = preference_confidence(x, np.zeros_like(x)) if correct is None else (x, correct)
    return calibration_error(confidence, right, bins=bins)


def calibration_error(confidence, correct, bins: int = 10, low: float = 0.5, high: float = 1.0) -> float:
    """Weighted mean |accuracy - confidence| over equal-width bins on [low, high], the last one closed
    (eval.calibration).
    """
    return float(
        sum(
            b["weight"] * abs(b["confidence"] - b["accuracy"])
            for b in calibration_table(confidence, correct, bins, low, high)
        )
    )


def calibration_table(confidence, correct, bins: int = 10, low: float = 0.5, high: float = 1.0) -> list[dict]:
    """Non-empty bins: low, high, n, weight, mean confidence, accuracy."""
    c, y = _f64(confidence), _f64(correct)
    if c.size and (c.min() < low - 1e-12 or c.max() > high + 1e-12):
        raise ValueError(
            f"confidences must lie in [{low}, {high}]; max(sigma(d), 1 - sigma(d)) does for a reward difference d"
        )
    width = (high - low) / bins
    index = np.clip(np.floor((c - low) / width + 1e-9).astype(int), 0, bins - 1)
    out = []
    for b in range(bins):
        at = index == b
        if at.any():
            out.append(
                {
                    "low": low + b * width,
                    "high": low + (b + 1) * width,
                    "n": int(at.sum()),
                    "weight": float(at.mean()),
                    "confidence": float(c[at].mean()),
                    "accuracy": float(y[at].mean()),
                }
            )
    return out


def preference_confidence(chosen, rejected) -> tuple[np.ndarray, np.ndarray]:
    """(confidence max(sigma(d), 1-sigma(d)), correct 1/0.5/0) of scored pairs."""
    d = _f64(chosen) - _f64(rejected)
    return 1 / (1 + np.exp(-np.abs(d))), (d > 0) + 0.5 * (d == 0)


def brier(confidence, correct) -> float:
    """Mean squared error of a probability."""
    return float(np.mean((_f64(confidence) - _f64(correct)) ** 2))


def pearson(x, y) -> float:
    """Correlation; NaN when one side is constant or there are fewer than two values."""
    x, y = _f64(x), _f64(y)
    if x.size < 2:
        return math.nan
    dx, dy = x - x.mean(), y - y.mean()
    scale = math.sqrt(float(dx @ dx) * float(dy @ dy))
    return float(dx @ dy) / scale if scale > 0 else math.nan


def within_group_correlation(x, y, groups) -> float:
    """Pearson correlation after centring both inside their group (reward and length within a prompt)."""
    x, y, groups = _f64(x).copy(), _f64(y).copy(), np.asarray(groups)
    for g in np.unique(groups):
        at = groups == g
        x[at] -= x[at].mean()
        y[at] -= y[at].mean()
    return pearson(x, y)


def certain(values: Sequence[float], clusters: Sequence[str]) -> tuple[float, float] | None:
    """Wilson's interval at one count per cluster, of values that are all 0 or all 1: resampling them tells nothing, and
    would call the rate certain. None of other values.
    """
    if len(set(values)) != 1 or values[0] not in (0.0, 1.0):
        return None
    n = len(set(clusters))
    return wilson(n * values[0], n)
