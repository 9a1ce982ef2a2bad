"""Pairwise judgements (eval.win_rate, judge_bias, arena_hard, elo, bradley_terry, alpacaeval_lc).

Verdicts are "A", "B", "tie" or "error"; an outcome is A's score in [0, 1]. ``order2`` verdicts name *printed*
positions with the answers swapped, so "A" there is a win for answer B.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stages.measures import statistics

OUTCOME = {"A": 1.0, "B": 0.0, "tie": 0.5}
SWAPPED = {"A": "B", "B": "A"}
ELO_PER_NAT = 400.0 / math.log(10.0)
SEPARABLE_L2 = 2e-3
#: Logit at which a probability is 1 to float64: a fit that gets there has no gradient left, but is not at an optimum.
SATURATED = 36.0


def win_rate(verdicts: Sequence[str]) -> dict:
    """Mean outcome of A with ties as half, its standard error (ddof 1), and counts; errors are left out and counted."""
    outcomes = [OUTCOME[verdict] for verdict in verdicts if verdict != "error"]
    if not outcomes:
        raise ValueError("win rate needs at least one judged item; every verdict is an error")
    mean, se = statistics.mean_se(outcomes)
    return {
        "win_rate": mean,
        "se": se,
        "wins_only": outcomes.count(1.0) / len(outcomes),
        "tie_rate": outcomes.count(0.5) / len(outcomes),
        "n": len(outcomes),
        "errors": len(verdicts) - len(outcomes),
    }


def swap_combine(order1: Sequence[str], order2_as_printed: Sequence[str], inconsistent: str = "tie") -> list[str]:
    """One verdict per item from both orders: equal verdicts stand, unequal ones become ``inconsistent``,
    an error in either order is an error."""
    combined = []
    for first, printed in zip(order1, order2_as_printed, strict=True):
        second = SWAPPED.get(printed, printed)
        combined.append("error" if "error" in (first, second) else first if first == second else inconsistent)
    return combined


def judge_bias(order1: Sequence[str], order2_as_printed: Sequence[str]) -> dict:
    """Consistency over both orders, how often the first-listed answer wins, and both corrected win rates."""
    pairs = [(a, b) for a, b in zip(order1, order2_as_printed, strict=True) if "error" not in (a, b)]
    if not pairs:
        raise ValueError("judge bias needs items judged in both orders; every item has an error")
    second = [SWAPPED.get(b, b) for _, b in pairs]
    decided = [verdict for pair in pairs for verdict in pair if verdict != "tie"]
    combined = swap_combine([a for a, _ in pairs], [b for _, b in pairs])
    return {
        "consistency": float(np.mean([a == b for (a, _), b in zip(pairs, second)])),
        "first_position_rate": float(np.mean([verdict == "A" for verdict in decided])) if decided else None,
        "win_rate_consistent_else_tie": float(np.mean([OUTCOME[verdict] for verdict in combined])),
        "win_rate_average": float(np.mean([(OUTCOME[a] + OUTCOME[b]) / 2 for (a, _), b in zip(pairs, second)])),
        "n": len(pairs),
        "errors": len(order1) - len(pairs),
    }


def style_feature(count_a: Sequence[float], count_b: Sequence[float]) -> dict:
    """(a - b) / (a + b + 1) per battle and its z-score (ddof 0; zero spread gives zeros)."""
    a, b = np.asarray(count_a, dtype=float), np.asarray(count_b, dtype=float)
    raw = (a - b) / (a + b + 1.0)
    spread = raw.std()
    return {"raw": raw.tolist(), "standardised": ((raw - raw.mean()) / spread if spread else raw * 0.0).tolist()}


def arena_hard_wins(verdict: str, strong_weight: float = 3) -> tuple[float, float]:
    """(wins of A, wins of B) of one five-way verdict: >> counts ``strong_weight``, > one, = half each."""
    table = {"A>>B": (strong_weight, 0), "A>B": (1, 0), "A=B": (0.5, 0.5), "B>A": (0, 1), "B>>A": (0, strong_weight)}
    if verdict not in table:
        raise ValueError(f"unknown verdict {verdict!r}: write one of {', '.join(table)}")
    return table[verdict]


def elo(
    battles: Sequence[tuple[str, str, float]], *, k: float = 4, scale: float = 400, base: float = 10, init: float = 1000
) -> dict[str, float]:
    """Online Elo over (a, b, outcome of a) in the given order. Order dependent: see :func:`elo_median`."""
    ratings: dict[str, float] = {}
    for a, b, outcome in battles:
        left, right = ratings.setdefault(a, init), ratings.setdefault(b, init)
        expected = 1.0 / (1.0 + base ** ((right - left) / scale))
        ratings[a], ratings[b] = left + k * (outcome - expected), right - k * (outcome - expected)
    return ratings


def elo_median(
    battles: Sequence[tuple[str, str, float]], rng: np.random.Generator, rounds: int = 100, **settings
) -> dict[str, float]:
    """Median online Elo of each player over ``rounds`` random orders of the battles."""
    runs = [elo([battles[i] for i in rng.permutation(len(battles))], **settings) for _ in range(rounds)]
    return {name: float(np.median([run[name] for run in runs])) for name in sorted(runs[0])} if runs else {}


@dataclass(frozen=True)
class BradleyTerry:
    """Scores in nats (mean zero), whether the optimum was reached, and the ridge that was used."""

    scores: np.ndarray
    converged: bool
    l2: float

    @property
    def elo_scale(self) -> np.ndarray:
        """400/ln(10) * score + 1000."""
        return ELO_PER_NAT * self.scores + 1000.0

    def probability(self, i: int, j: int) -> float:
        """P(i beats j)."""
        return float(_sigmoid(self.scores[i] - self.scores[j]))


def _sigmoid(z):
    small = np.exp(-np.abs(z))
    return np.where(z >= 0, 1.0, small) / (1.0 + small)


def _strongly_connected(wins: np.ndarray) -> bool:
    """Ford's condition: an unregularised optimum exists iff every split has wins in both directions."""
    reach = (wins > 0) | np.eye(len(wins), dtype=bool)
    for _ in range(max(1, math.ceil(math.log2(len(wins) + 1)))):
        reach = reach @ reach
    return bool(reach.all())


def bradley_terry(win_matrix, *, l2: float | None = None, max_iterations: int = 200) -> BradleyTerry:
    """Maximum-likelihood strengths of ``wins[i][j]`` = wins of i over j (ties half to each side).

    Maximises sum W_ij log sigma(s_i - s_j) - (l2/2) sum s^2 by Newton steps; scores have mean zero.
    ``l2=None`` uses 0, or 2e-3 where the optimum would be infinite (an undefeated player, groups that never met).
    With ``l2=0`` such data returns ``converged=False``.
    """
    wins = np.array(win_matrix, dtype=float)
    if wins.ndim != 2 or wins.shape[0] != wins.shape[1]:
        raise ValueError(f"the win matrix must be square (players x players), got shape {wins.shape}")
    np.fill_diagonal(wins, 0.0)
    connected = _strongly_connected(wins)
    ridge = (0.0 if connected else SEPARABLE_L2) if l2 is None else float(l2)
    scores = np.zeros(len(wins))
    if not connected and ridge == 0.0:
        return BradleyTerry(scores, False, ridge)
    games = wins + wins.T

    def value(s):
        return float(-(wins * np.logaddexp(0.0, s[None, :] - s[:, None])).sum() - ridge / 2 * (s**2).sum())

    for _ in range(max_iterations):
        p = _sigmoid(scores[:, None] - scores[None, :])
        gradient = (wins - games * p).sum(1) - ridge * scores
        curvature = games * p * (1 - p)
        hessian = np.diag(curvature.sum(1) + ridge) - curvature
        # the all-ones direction is flat without a ridge: pin it, the mean stays zero
        step = np.linalg.solve(hessian + np.ones_like(hessian) / len(wins), gradient)
        size, start = 1.0, value(scores)
        while size > 1e-8 and value(scores + size * step) < start - 1e-12 * abs(start):
            size /= 2
        scores = scores + size * step
        scores -= scores.mean()
        if np.abs(size * step).max() < 1e-12:
            return BradleyTerry(scores, True, ridge)
    return BradleyTerry(scores, False, ridge)


def item_ranking(
    names: Sequence[str],
    wins_IKK: np.ndarray,
    rng: np.random.Generator,
    rounds: int = 1000,
    baseline: str | None = None,
) -> list[dict]:
    """Players by strength, best first, on the Elo scale, with 95% intervals by resampling items
    (``eval.bradley_terry``).

    wins_IKK: of each item, the wins of each player over each other, ties half to both. With a ``baseline`` also
    ``win_rate``, the probability that a player beats it, with its interval (``eval.arena_hard``). ``l2`` is the ridge
    of the fit: above 0 where an optimum is infinite.
    """
    fitted = bradley_terry(wins_IKK.sum(0))
    draws = np.empty((rounds, len(names)))
    for r in range(rounds):
        counts = np.bincount(rng.integers(0, len(wins_IKK), len(wins_IKK)), minlength=len(wins_IKK))
        draws[r] = bradley_terry(np.tensordot(counts, wins_IKK, 1)).scores
    low, high = np.percentile(ELO_PER_NAT * draws + 1000.0, [2.5, 97.5], axis=0)
    games = (wins_IKK + wins_IKK.transpose(0, 2, 1) > 0).sum((0, 2))
    rows = [
        {
            "player": name,
            "elo": float(fitted.elo_scale[i]),
            "low": float(low[i]),
            "high": float(high[i]),
            "games": int(games[i]),
            "l2": fitted.l2,
        }
        for i, name in enumerate(names)
    ]
    if baseline is not None:
        at = list(names).index(baseline)
        against = np.percentile(_sigmoid(draws - draws[:, [at]]), [2.5, 97.5], axis=0)
        for i, row in enumerate(rows):
            row |= {
                "win_rate": fitted.probability(i, at),
                "win_rate_low": float(against[0, i]),
                "win_rate_high": float(against[1, i]),
            }
    return sorted(rows, key=lambda row: -row["elo"])


def length_controlled_win_rate(
    len_model: Sequence[float],
    len_baseline: Sequence[float],
    preference: Sequence[float],
    difficulty: Sequence[float] | None = None,
    *,
    l2: float = 0.0,
    max_iterations: int = 200,
) -> dict:
    """AlpacaEval 2.0's length-controlled win rate (Dubois et al. 2024; eval.alpacaeval_lc).

    Fits logit p = theta + phi * tanh(dlen / std(dlen)) [+ psi * difficulty] to soft preferences of the model over the
    baseline by cross-entropy, then sets the length term to zero. Lengths in characters, std with ddof 1, rates in [0,
    1]. ``l2`` is a ridge on phi and psi for separable data. Equal lengths everywhere leave phi undetermined: it is 0.
    ``suspicious`` marks a control that moved the rate further than length can explain: LC < min(w - w/4, w - 10) or LC
    > max(w + (100-w)/4, w + 10), w = raw rate in percent.
    """
    y = np.asarray(preference, dtype=float)
    if y.min(initial=0.0) < 0 or y.max(initial=1.0) > 1:
        raise ValueError("preferences must lie in [0, 1]; AlpacaEval files store 1..2, so subtract 1")
    delta = np.asarray(len_model, dtype=float) - np.asarray(len_baseline, dtype=float)
    spread = float(delta.std(ddof=1)) if len(delta) > 1 else 0.0
    names, columns = ["theta"], [np.ones_like(y)]
    if spread > 0:
        names.append("phi")
        columns.append(np.tanh(delta / spread))
    hard = np.zeros_like(y) if difficulty is None else np.asarray(difficulty, dtype=float)
    if np.ptp(hard) > 0:
        names.append("psi")
        columns.append(hard)
    weights, converged = _soft_logistic(
        np.stack(columns, axis=1), y, np.array([0.0] + [l2] * (len(names) - 1)), max_iterations
    )
    fitted = {"phi": 0.0, "psi": 0.0, **dict(zip(names, weights.tolist()))}
    controlled = float(np.mean(_sigmoid(fitted["theta"] + fitted["psi"] * hard)))
    raw, percent = 100 * float(y.mean()), 100 * controlled
    return {
        "raw_win_rate": float(y.mean()),
        "lc_win_rate": controlled,
        "std_dlen": spread,
        "converged": converged,
        **fitted,
        "se": statistics.mean_se(y)[1],
        "n": len(y),
        "mean_len_model": float(np.mean(len_model)),
        "mean_len_baseline": float(np.mean(len_baseline)),
        "suspicious": bool(percent < min(raw - raw / 4, raw - 10) or percent > max(raw + (100 - raw) / 4, raw + 10)),
    }


def style_controlled_win_rate(
    counts_a: Sequence[dict[str, float]],
    counts_b: Sequence[dict[str, float]],
    preference: Sequence[float],
    *,
    l2: float = 0.0,
    max_iterations: int = 200,
) -> dict:
    """Win rate of A over B as if their answers had the same style: sigma(theta) of logit p = theta + sum_k w_k z_k, z_k
    the features of :func:`style_feature` of each count (``eval.judge_bias``). Every battle is taken from both sides, so
    that the features have mean zero and only differences between the answers count.

    ``coefficients``: what a standard deviation of each feature is worth, in nats; features that never differ have none.
    """
    y = np.asarray(preference, dtype=float)
    names, columns = [], []
    for name in counts_a[0] if len(counts_a) else ():
        a, b = [row[name] for row in counts_a], [row[name] for row in counts_b]
        z = np.array(style_feature([*a, *b], [*b, *a])["standardised"])
        if np.ptp(z) > 0:
            names.append(name)
            columns.append(z)
    sides = np.concatenate([np.ones_like(y), -np.ones_like(y)])
    weights, converged = _soft_logistic(
        np.stack([sides, *columns], axis=1),
        np.concatenate([y, 1 - y]),
        np.array([0.0] + [2 * l2] * len(names)),
        max_iterations,
    )
    return {
        "win_rate": float(_sigmoid(weights[0])),
        "coefficients": dict(zip(names, weights[1:].tolist())),
        "converged": converged,
        "n": len(y),
    }


def _soft_logistic(
    design: np.ndarray, y: np.ndarray, ridge: np.ndarray, max_iterations: int
) -> tuple[np.ndarray, bool]:
    """Newton fit of P = sigmoid(X w) to soft labels with a ridge per column; (weights, converged)."""
    weights = np.zeros(design.shape[1])

    def loss(w):
        z = design @ w
        return float((np.logaddexp(0.0, z) - y * z).sum() + 0.5 * (ridge * w * w).sum())

    for _ in range(max_iterations):
        p = _sigmoid(design @ weights)
        gradient = design.T @ (p - y) + ridge * weights
        hessian = (design * (p * (1 - p))[:, None]).T @ design + np.diag(ridge)
        step = np.linalg.lstsq(hessian, gradient, rcond=None)[0]
        size, start = 1.0, loss(weights)
        while size > 1e-10 and loss(weights - size * step) > start + 1e-12 * abs(start):
            size /= 2
        weights = weights - size * step
        # separable: the optimum is at infinity
        if np.abs(weights).max() > 1e3 or np.abs(design @ weights).max() > SATURATED:
            break
        if np.abs(size * step).max() < 1e-12:
            return weights, True
    return weights, False


def instruction_difficulty(
    preferences: dict[str, Sequence[float]],
    length_differences: dict[str, Sequence[float]],
    *,
    l2: float = 1.0,
    iterations: int = 50,
) -> np.ndarray:
    """Difficulty of each instruction from several models' judgements: gamma_i of
    logit p_mi = theta_m + phi_m tanh(dlen_mi / std) + gamma_i, with a ridge ``l2`` on gamma, fitted by alternating
    Newton steps.

    Rows are instructions in one common order for all models. Mean zero.
    """
    names = list(preferences)
    y = np.array([preferences[name] for name in names], dtype=float)
    terms = []
    for name in names:
        delta = np.asarray(length_differences[name], dtype=float)
        spread = delta.std(ddof=1)
        terms.append(
            np.stack([np.ones_like(delta), np.tanh(delta / spread) if spread > 0 else np.zeros_like(delta)], axis=1)
        )
    weights, gamma = np.zeros((len(names), 2)), np.zeros(y.shape[1])

    def probability(m: int) -> np.ndarray:
        return 1.0 / (1.0 + np.exp(-np.clip(terms[m] @ weights[m] + gamma, -50, 50)))

    for _ in range(iterations):
        before = gamma.copy()
        for m in range(len(names)):
            p = probability(m)
            curvature = (terms[m] * (p * (1 - p))[:, None]).T @ terms[m] + 1e-9 * np.eye(2)
            step = np.linalg.solve(curvature, terms[m].T @ (y[m] - p))
            weights[m] += step * min(1.0, 3.0 / max(np.abs(step).max(), 1e-12))
        p = np.array([probability(m) for m in range(len(names))])
        gamma += ((y - p).sum(0) - l2 * gamma) / ((p * (1 - p)).sum(0) + l2)
        gamma -= gamma.mean()
        if np.abs(gamma - before).max() < 1e-9:
            break
    return gamma
