"""Evaluation statistics: intervals, paired tests, calibration, pass@k, win rates (eval.*, rm.eval). numpy only.

Nothing here draws from a global random state; the bootstrap takes a seed. Scores are per question; error bars are
over questions, and paired comparisons use the paired error.
"""
from __future__ import annotations

import math
from itertools import combinations

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
    return max(0.0, (centre - half) / (1 + z2 / n)), min(1.0, (centre + half) / (1 + z2 / n))


def mean_se(values) -> tuple[float, float]:
    """(mean, standard error with ddof 1); the error of a single value is NaN, of none both are."""
    x = _f64(values)
    if not x.size:
        return math.nan, math.nan
    return float(x.mean()), float(x.std(ddof=1) / math.sqrt(x.size)) if x.size > 1 else math.nan


def bootstrap_ci(values, n: int = 1000, seed: int = 0, level: float = 0.95, statistic=None, clusters=None) -> tuple[float, float]:
    """Percentile interval of the mean (or `statistic(values)`) over resampled questions, or clusters of them."""
    x = _f64(values)
    if not x.size:
        return math.nan, math.nan
    rng = np.random.Generator(np.random.Philox(key=seed))
    tails = [50 * (1 - level), 50 * (1 + level)]
    if clusters is None and statistic is None:
        means, chunk = np.empty(n), max(1, 4_000_000 // x.size)
        for start in range(0, n, chunk):
            stop = min(n, start + chunk)
            means[start:stop] = x[rng.integers(0, x.size, (stop - start, x.size))].mean(1)
        low, high = np.percentile(means, tails)
        return float(low), float(high)
    groups = [np.array([i]) for i in range(x.size)] if clusters is None else \
        [np.flatnonzero(np.asarray(clusters) == c) for c in dict.fromkeys(clusters)]
    statistic = statistic or np.mean
    draws = [statistic(x[np.concatenate([groups[i] for i in rng.integers(0, len(groups), len(groups))])]) for _ in range(n)]
    low, high = np.percentile(draws, tails)
    return float(low), float(high)


def paired_difference(a, b, z: float = Z95) -> dict:
    """mean(a - b) over the same questions with its paired error: diff, se, ci_low, ci_high, p, se_unpaired, n.

    p is two-sided normal; with no spread in the differences it is 1 (difference 0) or 0. One question gives NaN errors.
    """
    x, y = _f64(a), _f64(b)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"paired scores must be two equally long lists over the same questions; got {x.shape} and {y.shape}")
    diff, se = mean_se(x - y)
    unpaired = math.hypot(mean_se(x)[1], mean_se(y)[1])
    p = math.nan if math.isnan(se) else (1.0 if diff == 0 else 0.0) if se == 0 else normal_tail(diff / se)
    return {"diff": diff, "se": se, "ci_low": diff - z * se, "ci_high": diff + z * se, "p": p,
            "se_unpaired": unpaired, "n": int(x.size)}


def discordant(a, b) -> tuple[int, int]:
    """(questions only a has right, questions only b has right)."""
    x, y = _f64(a), _f64(b)
    return int((x > y).sum()), int((y > x).sum())


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Two-sided exact binomial p-value on discordant pairs, capped at 1."""
    n, k = only_a + only_b, min(only_a, only_b)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2 ** n) if n else 1.0


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
        return {"strict": math.nan, "half_credit": math.nan, "ties": math.nan, "log_loss": math.nan, "mean_margin": math.nan, "n": 0}
    return {"strict": float((d > 0).mean()), "half_credit": float((d > 0).mean() + 0.5 * (d == 0).mean()),
            "ties": float((d == 0).mean()), "log_loss": float(np.logaddexp(0.0, -d).mean()),
            "mean_margin": float(d.mean()), "n": int(d.size)}


def ece(confidence, correct, bins: int = 10, low: float = 0.5, high: float = 1.0) -> float:
    """Expected calibration error over equal-width bins on [low, high], the last one closed (rm.eval)."""
    return float(sum(b["weight"] * abs(b["confidence"] - b["accuracy"]) for b in calibration_table(confidence, correct, bins, low, high)))


def calibration_table(confidence, correct, bins: int = 10, low: float = 0.5, high: float = 1.0) -> list[dict]:
    """Non-empty bins: low, high, n, weight, mean confidence, accuracy."""
    c, y = _f64(confidence), _f64(correct)
    if c.size and (c.min() < low - 1e-12 or c.max() > high + 1e-12):
        raise ValueError(f"confidences must lie in [{low}, {high}]; max(sigma(d), 1 - sigma(d)) does for a reward difference d")
    width = (high - low) / bins
    index = np.clip(np.floor((c - low) / width + 1e-9).astype(int), 0, bins - 1)
    out = []
    for b in range(bins):
        at = index == b
        if at.any():
            out.append({"low": low + b * width, "high": low + (b + 1) * width, "n": int(at.sum()),
                        "weight": float(at.mean()), "confidence": float(c[at].mean()), "accuracy": float(y[at].mean())})
    return out


def preference_confidence(chosen, rejected) -> tuple[np.ndarray, np.ndarray]:
    """(confidence max(sigma(d), 1-sigma(d)), correct 1/0.5/0) of scored pairs, for `ece`."""
    d = _f64(chosen) - _f64(rejected)
    return 1 / (1 + np.exp(-np.abs(d))), (d > 0) + 0.5 * (d == 0)


def brier(confidence, correct) -> float:
    """Mean squared error of a probability."""
    return float(np.mean((_f64(confidence) - _f64(correct)) ** 2))


def binary_nll(confidence, correct) -> float:
    """Mean -log probability of what happened, nats."""
    c, y = _f64(confidence), _f64(correct)
    with np.errstate(divide="ignore"):
        return float(-np.mean(np.where(y > 0, y * np.log(np.where(y > 0, c, 1.0)), 0.0)
                              + np.where(y < 1, (1 - y) * np.log(np.where(y < 1, 1 - c, 1.0)), 0.0)))


def pearson(x, y) -> float:
    """Correlation; NaN when one side is constant or there are fewer than two values."""
    x, y = _f64(x), _f64(y)
    if x.size < 2:
        return math.nan
    dx, dy = x - x.mean(), y - y.mean()
    scale = math.sqrt(float(dx @ dx) * float(dy @ dy))
    return float(dx @ dy) / scale if scale > 0 else math.nan


def ranks(x) -> np.ndarray:
    """1-based ranks, ties averaged."""
    x = _f64(x)
    order = np.argsort(x, kind="stable")
    out = np.empty(x.size)
    i = 0
    while i < x.size:
        j = i
        while j + 1 < x.size and x[order[j + 1]] == x[order[i]]:
            j += 1
        out[order[i:j + 1]] = (i + j) / 2 + 1
        i = j + 1
    return out


def spearman(x, y) -> float:
    """Pearson correlation of the ranks."""
    return pearson(ranks(x), ranks(y))


def within_group_correlation(x, y, groups) -> float:
    """Pearson correlation after centring both inside their group (reward and length within a prompt)."""
    x, y, groups = _f64(x).copy(), _f64(y).copy(), np.asarray(groups)
    for g in np.unique(groups):
        at = groups == g
        x[at] -= x[at].mean()
        y[at] -= y[at].mean()
    return pearson(x, y)


def bradley_terry_scores(wins, l2: float = 0.0, iterations: int = 200) -> np.ndarray:
    """Scores with mean 0 that maximise the Bradley-Terry likelihood of wins[i][j] (ties: half each), minus (l2/2)|s|^2.

    Raises when the maximum does not exist (someone won or lost everything, or two groups never met) and l2 is 0.
    """
    W = _f64(wins)
    n = len(W)
    if l2 == 0 and not _strongly_connected(W > 0):
        raise ValueError("the Bradley-Terry fit has no maximum: a player or group won everything, or two groups never met; write l2=0.001")
    s = np.zeros(n)
    games = W + W.T
    for _ in range(iterations):
        p = 1 / (1 + np.exp(-(s[:, None] - s[None, :])))
        gradient = (W - games * p).sum(1) - l2 * s
        curvature = games * p * (1 - p)
        H = np.diag(curvature.sum(1) + l2) - curvature
        step = np.linalg.lstsq(H, gradient, rcond=None)[0] if l2 == 0 else np.linalg.solve(H, gradient)
        s = s + step * min(1.0, 2.0 / max(np.abs(step).max(), 1e-300))
        s -= s.mean()
        if np.abs(step).max() < 1e-13:
            break
    return s


def _strongly_connected(beats) -> bool:
    reach = np.asarray(beats) | np.eye(len(beats), dtype=bool)
    for k in range(len(beats)):
        reach = reach | (reach[:, k:k + 1] & reach[k:k + 1, :])
    return bool(reach.all())


def elo(battles, K: float = 4, scale: float = 400, init: float = 1000) -> dict:
    """Sequential Elo ratings of (a, b, score of a) battles; depends on the order."""
    rating: dict = {}
    for a, b, score in battles:
        ra, rb = rating.setdefault(a, init), rating.setdefault(b, init)
        expected = 1 / (1 + 10 ** ((rb - ra) / scale))
        rating[a], rating[b] = ra + K * (score - expected), rb - K * (score - expected)
    return rating


# --- repeated sampling ----------------------------------------------------------------------------------

def pass_at_k(n: int, c: int, k: int) -> float | None:
    """1 - C(n-c, k)/C(n, k): probability that k of n samples (c correct) contain a correct one; None when k > n."""
    if not 0 <= c <= n:
        raise ValueError(f"{c} correct of {n} samples: the count must be between 0 and n")
    if k > n or k < 1:
        return None
    return 1.0 if n - c < k else 1.0 - math.prod((n - c - i) / (n - i) for i in range(k))


def avg_at_k(correct) -> dict:
    """Mean correctness per problem and over problems, with the error bar over problems."""
    per_problem = [float(np.mean(row)) for row in correct]
    mean, se = mean_se(per_problem)
    return {"per_problem": per_problem, "mean": mean, "se": se}


def _vote(counts: dict, gold) -> float:
    if not counts:
        return 0.0
    top = max(counts.values())
    winners = [a for a, c in counts.items() if c == top]
    return (gold in winners) / len(winners)


def maj_at_k(answers, gold, k: int) -> float | None:
    """Expected correctness of a majority vote over all k-subsets; ties share, null answers do not vote; None when k > n."""
    n = len(answers)
    if k > n or k < 1:
        return None
    counts: dict = {}
    for a in answers:
        counts[a] = counts.get(a, 0) + 1
    kinds = list(counts)
    total, ways = 0.0, math.comb(n, k)
    if math.comb(k + len(kinds) - 1, len(kinds) - 1) <= 200_000:
        def walk(i, left, weight, chosen):
            nonlocal total
            if i == len(kinds):
                if left == 0:
                    total += weight / ways * _vote({a: c for a, c in chosen.items() if a is not None and c}, gold)
                return
            for take in range(min(left, counts[kinds[i]]) + 1):
                walk(i + 1, left - take, weight * math.comb(counts[kinds[i]], take), {**chosen, kinds[i]: take})
        walk(0, k, 1, {})
        return total
    for subset in combinations(range(n), k):
        picked: dict = {}
        for i in subset:
            if answers[i] is not None:
                picked[answers[i]] = picked.get(answers[i], 0) + 1
        total += _vote(picked, gold) / ways
    return total


# --- win rates --------------------------------------------------------------------------------------------

VERDICT_SCORE = {"A": 1.0, "B": 0.0, "tie": 0.5}


def win_rate(verdicts) -> dict:
    """Win rate of A with ties as half: win_rate, se (ddof 1), wins_only, tie_rate, n."""
    unknown = sorted({str(v) for v in verdicts if v not in VERDICT_SCORE})
    if unknown:
        raise ValueError(f"verdicts {unknown} are not A, B or tie; leave failed judgements out and count them")
    scores = [VERDICT_SCORE[v] for v in verdicts]
    mean, se = mean_se(scores)
    n = max(len(scores), 1)
    return {"win_rate": mean, "se": se, "wins_only": scores.count(1.0) / n, "tie_rate": scores.count(0.5) / n, "n": len(scores)}


SWAPPED = {"A": "B", "B": "A", "tie": "tie"}


def combine_orders(order1, order2_as_printed, inconsistent: str = "tie") -> list:
    """Winner per item from two presentation orders; the second one's labels are swapped back first. Disagreement gives
    `inconsistent`; a failed order gives "error"."""
    out = []
    for first, second in zip(order1, order2_as_printed):
        back = SWAPPED.get(second)
        out.append("error" if first not in SWAPPED or back is None else first if first == back else inconsistent)
    return out


def length_controlled_win_rate(preference, length_model, length_baseline, difficulty=None, l2: float = 0.0) -> dict:
    """logit p = theta + phi tanh(dlen/std(dlen)) (+ psi difficulty), fitted to soft preferences; the win rate with the
    length term set to 0 (eval.alpacaeval_lc). Lengths in characters; std with ddof 1."""
    y = _f64(preference)
    delta = _f64(length_model) - _f64(length_baseline)
    spread = float(delta.std(ddof=1)) if delta.size > 1 else 0.0
    columns = [np.ones_like(y), np.tanh(delta / spread) if spread > 0 else np.zeros_like(y)]
    if difficulty is not None:
        columns.append(_f64(difficulty))
    X = np.stack(columns, 1)
    w = logistic_fit(X, y, l2)
    keep = np.ones(X.shape[1])
    keep[1] = 0.0
    out = {"std_dlen": spread, "theta": float(w[0]), "phi": float(w[1]), "raw_win_rate": float(y.mean()),
           "lc_win_rate": float((1 / (1 + np.exp(-(X @ (w * keep))))).mean())}
    return out if difficulty is None else {**out, "psi": float(w[2])}


def logistic_fit(X, y, l2: float = 0.0, iterations: int = 100) -> np.ndarray:
    """Newton fit of logit P = X w to soft labels y in [0, 1]; constant columns with no information get 0."""
    X, y = _f64(X), _f64(y)
    w = np.zeros(X.shape[1])
    for _ in range(iterations):
        p = 1 / (1 + np.exp(-np.clip(X @ w, -500, 500)))
        gradient = X.T @ (y - p) - l2 * w
        step = np.linalg.lstsq(X.T @ (X * (p * (1 - p))[:, None]) + l2 * np.eye(len(w)), gradient, rcond=None)[0]
        w = w + step * min(1.0, 5.0 / max(np.abs(step).max(), 1e-300))
        if np.abs(step).max() < 1e-12:
            break
    return w


# --- over-optimisation ----------------------------------------------------------------------------------------

def overopt_curve(d, alpha: float, beta: float, form: str = "bon") -> np.ndarray:
    """Gao et al. 2023: gold reward at d = sqrt(KL): d (alpha - beta d) for `bon`, d (alpha - beta log d) for `rl`."""
    d = _f64(d)
    if form == "bon":
        return d * (alpha - beta * d)
    return d * (alpha - beta * np.log(np.where(d > 0, d, 1.0)))


def overopt_peak(alpha: float, beta: float, form: str = "bon") -> float:
    """d of the peak: alpha/(2 beta), or exp(alpha/beta - 1)."""
    return alpha / (2 * beta) if form == "bon" else math.exp(alpha / beta - 1)


def fit_overopt(d, gold, form: str = "bon") -> tuple[float, float]:
    """Least squares (alpha, beta) of the curve."""
    d = _f64(d)
    second = -d * d if form == "bon" else -d * np.log(np.where(d > 0, d, 1.0))
    return tuple(float(v) for v in np.linalg.lstsq(np.stack([d, second], 1), _f64(gold), rcond=None)[0])


def overopt_divergence(train, test, min_drop: float = 0.05, patience: int = 1) -> dict:
    """Peak of the held-out score and the evaluation at which it has been below its running maximum by >= min_drop for
    `patience` evaluations while the train score is above its value at that maximum (rm.overopt)."""
    train, test = _f64(train), _f64(test)
    best, streak = 0, 0
    for i in range(1, len(test)):
        if test[i] > test[best]:
            best, streak = i, 0
        elif test[best] - test[i] >= min_drop - 1e-12 and train[i] >= train[best]:
            streak += 1
            if streak >= max(patience, 1):
                return {"peak_index": best, "detected_index": i, "diverged": True}
        else:
            streak = 0
    return {"peak_index": int(np.argmax(test)), "detected_index": None, "diverged": False}
