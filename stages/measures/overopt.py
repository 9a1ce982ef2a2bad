"""Over-optimisation: where raising the proxy stops raising the gold score (eval.over_optimisation, rm.overopt).

``d`` is sqrt(KL(policy || start)), KL in nats per response. Forms of Gao et al. 2023:
best-of-n gold(d) = d (alpha - beta d); RL gold(d) = d (alpha - beta log d).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def _column(d: np.ndarray, form: str) -> np.ndarray:
    if form == "bon":
        return d * d
    if form == "rl":
        return np.where(d > 0, d * np.log(np.where(d > 0, d, 1.0)), 0.0)
    raise ValueError(f"unknown over-optimisation form {form!r}: write 'bon' or 'rl'")


def curve(d: Sequence[float], alpha: float, beta: float, form: str = "bon") -> list[float]:
    """Gold score at each ``d`` under the chosen form."""
    points = np.asarray(d, dtype=float)
    return (alpha * points - beta * _column(points, form)).tolist()


def peak(alpha: float, beta: float, form: str = "bon") -> tuple[float, float]:
    """(d at the maximum, gold at the maximum): alpha/(2 beta) for best-of-n, exp(alpha/beta - 1) for RL."""
    if form == "bon":
        return alpha / (2 * beta), alpha * alpha / (4 * beta)
    if form == "rl":
        at = math.exp(alpha / beta - 1)
        return at, beta * at
    raise ValueError(f"unknown over-optimisation form {form!r}: write 'bon' or 'rl'")


def fit(d: Sequence[float], gold: Sequence[float], form: str = "bon") -> tuple[float, float]:
    """Least-squares (alpha, beta); needs at least two different positive distances."""
    points = np.asarray(d, dtype=float)
    if len({value for value in points.tolist() if value > 0}) < 2:
        raise ValueError(
            "fitting an over-optimisation curve needs two or more different distances d > 0; add checkpoints"
        )
    design = np.stack([points, -_column(points, form)], axis=1)
    alpha, beta = np.linalg.lstsq(design, np.asarray(gold, dtype=float), rcond=None)[0]
    return float(alpha), float(beta)


def divergence(train: Sequence[float], held_out: Sequence[float], *, min_drop: float = 0.05, patience: int = 3) -> dict:
    """First evaluation at which the held-out score has been ``min_drop`` or more below its running maximum ``patience``
    times in a row while the train score is at or above its value at that maximum.

    Returns {"peak_index", "detected_index" (None if never), "diverged"}; patience 0 or 1 means the first such point.
    """
    peak_index, run = 0, 0
    for index, score in enumerate(held_out):
        if score > held_out[peak_index]:
            peak_index, run = index, 0
            continue
        fallen = (
            index > peak_index
            and held_out[peak_index] - score >= min_drop - 1e-12
            and train[index] >= train[peak_index]
        )
        run = run + 1 if fallen else 0
        if fallen and run >= max(1, patience):
            return {"peak_index": peak_index, "detected_index": index, "diverged": True}
    return {"peak_index": peak_index, "detected_index": None, "diverged": False}
