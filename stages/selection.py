"""Selecting completions by their scores: best-of-N, rejection sampling, pair building (rs.*, rm.t2t_pair).

A score matrix is [prompts, completions]; NaN means a failed or absent score and is never selected. A flat index is
prompt * N + completion. Ties go to the lowest flat index, so a selection is a function of its input alone.
"""

from __future__ import annotations

import math

import numpy as np


def is_better(value: float, best: float) -> bool:
    """Whether a value takes the place of the best so far: of equal ones the first stays, and what is not finite is
    never the best. Equal counts add up to other last digits, by micro-batch.
    """
    return math.isfinite(value) and value > best and not math.isclose(value, best, rel_tol=1e-9)


def _matrix(rewards) -> np.ndarray:
    out = np.asarray(rewards, dtype=np.float64)
    if out.ndim != 2:
        raise ValueError(f"give scores as rows of prompts by columns of completions; got shape {out.shape}")
    return out


def _ordered(flat) -> list[int]:
    """Indices of valid entries, best first, ties by index."""
    flat = np.asarray(flat, dtype=np.float64).ravel()
    valid = np.flatnonzero(~np.isnan(flat))
    return [int(i) for i in valid[np.argsort(-flat[valid], kind="stable")]]


def top_k_per_prompt(rewards, k: int) -> list[list[int]]:
    """The k best completions of each prompt, best first; fewer when fewer are valid."""
    return [_ordered(row)[:k] for row in _matrix(rewards)]


def top_k_overall(rewards, k: int, per_prompt_cap: int | None = None) -> list[int]:
    """Flat indices of the k best scores of the whole matrix, best first; may leave prompts out (rs.select)."""
    matrix = _matrix(rewards)
    out, taken = [], {}
    for i in _ordered(matrix):
        prompt = i // matrix.shape[1]
        if per_prompt_cap is None or taken.get(prompt, 0) < per_prompt_cap:
            taken[prompt] = taken.get(prompt, 0) + 1
            out.append(i)
        if len(out) == k:
            break
    return out[:k]


def threshold(rewards, tau: float) -> list[int]:
    """Flat indices with score strictly above tau, in input order (rs.select, rs.rest)."""
    return [int(i) for i in np.flatnonzero(_matrix(rewards).ravel() > tau)]


def random_per_prompt(rewards, rng: np.random.Generator) -> list[int | None]:
    """A size-matched control: one valid completion per prompt at random, None where there is none."""
    valid = [np.flatnonzero(~np.isnan(row)) for row in _matrix(rewards)]
    return [int(rng.choice(v)) if len(v) else None for v in valid]


def random_k_overall(rewards, k: int, rng: np.random.Generator) -> list[int]:
    """A size-matched control of top_k_overall: k valid flat indices at random, sorted."""
    valid = np.flatnonzero(~np.isnan(_matrix(rewards).ravel()))
    return sorted(int(i) for i in rng.choice(valid, size=min(k, len(valid)), replace=False))


def star_filter(first_correct, hinted_correct, rationalise: bool = True) -> list[str | None]:
    """What is kept of each problem: ``direct`` where a first try was right, ``rationalised`` where only a try with the
    answer as a hint was (trained on without the hint), else None (rs.star)."""
    return [
        "direct" if first else "rationalised" if rationalise and hinted else None
        for first, hinted in zip(first_correct, hinted_correct)
    ]


# --- best of N ------------------------------------------------------------------------------------


def best_of_n_kl(n) -> float:
    """log N - (N-1)/N nats: KL(best-of-N || base), an upper bound with ties (rs.best_of_n)."""
    if n < 1:
        raise ValueError(f"n={n}: best-of-N needs at least one sample")
    return math.log(n) - (n - 1) / n


def best_of_n_estimate(proxy, n: int, gold=None) -> float | None:
    """Unbiased mean, over all n-subsets of the samples, of the gold score of the proxy's best (rm.overopt).

    With `gold=None` it is the expected best proxy score. Equal proxies keep their order (the later one wins).
    None when n exceeds the number of samples: the estimate does not exist.
    """
    proxy = np.asarray(proxy, dtype=np.float64)
    gold = proxy if gold is None else np.asarray(gold, dtype=np.float64)
    N = len(proxy)
    if n < 1:
        raise ValueError(f"n={n}: best-of-N needs at least one sample")
    if n > N:
        return None
    order = np.argsort(proxy, kind="stable")
    total = math.comb(N, n)
    return float(sum(math.comb(i, n - 1) / total * gold[order[i]] for i in range(n - 1, N)))


# --- pairs from scores ------------------------------------------------------------------------------


def best_and_worst(rewards) -> tuple[int, int, bool] | None:
    """(best, worst, whether all valid scores are equal) of one prompt, ties to the lowest index that is not the best;
    None with fewer than two valid scores (recipe.sppo).
    """
    order = _ordered(rewards)
    flat = np.asarray(rewards, dtype=np.float64)
    if len(order) < 2:
        return None
    return order[0], min(i for i in order[1:] if flat[i] == flat[order[-1]]), bool(flat[order[0]] == flat[order[-1]])


def best_vs_worst(rewards) -> tuple[int, int] | None:
    """(chosen, rejected) of one prompt; ties to the lowest index; None when all valid scores are equal
    (da.online_dpo).
    """
    found = best_and_worst(rewards)
    return None if found is None or found[2] else found[:2]


def best_vs_random(rewards, draw) -> tuple[int, int] | None:
    """(chosen, rejected) of one prompt: the best, and by ``draw(n)`` -> index one of those with a lower score; None
    when all valid scores are equal (synth.onpolicy_pairs).
    """
    order = _ordered(rewards)
    flat = np.asarray(rewards, dtype=np.float64)
    lower = sorted(i for i in order if flat[i] < flat[order[0]])
    return (order[0], lower[draw(len(lower))]) if lower else None


def gap_pairs(rewards, tau: float = 1.0, eta: float = 0.85):
    """Every ordered pair with sigma((r_i - r_j)/tau) > eta, strict: [(i, j, probability)] in index order
    (rs.rs_dpo).
    """
    r = np.asarray(rewards, dtype=np.float64)
    out = []
    for i in range(len(r)):
        for j in range(len(r)):
            if i != j and np.isfinite(r[i]) and np.isfinite(r[j]):
                p = 1.0 / (1.0 + math.exp(-min(max((r[i] - r[j]) / tau, -700.0), 700.0)))
                if p > eta:
                    out.append((i, j, p))
    return out


def rso_accept_probability(reward: float, best: float, beta: float) -> float:
    """exp((r - r_max)/beta), r_max the best of the remaining candidates (rs.rso)."""
    return math.exp((reward - best) / beta)


def rso_select(rewards, num_samples: int, beta: float, uniforms) -> tuple[list[int], int, int]:
    """Statistical rejection sampling: (accepted indices in order, uniforms used, passes begun) (rs.rso, Liu et al. 2024
    alg. 1).

    Passes over the remaining candidates with r_max of the pass; `uniforms` is an iterable of U[0,1) draws.
    """
    r = np.asarray(rewards, dtype=np.float64)
    if num_samples > len(r):
        raise ValueError(
            f"num_samples={num_samples} is more than the {len(r)} candidates; write a smaller number or sample more"
        )
    if not np.isfinite(r).all():
        raise ValueError("rejection sampling needs finite rewards; drop candidates whose scorer failed")
    if beta <= 0:
        raise ValueError("beta must be > 0; a small one such as 1e-6 takes the best")
    remaining, accepted, draws, used, passes = list(range(len(r))), [], iter(uniforms), 0, 0
    while len(accepted) < num_samples:
        passes += 1
        top, taken = max(r[i] for i in remaining), set()
        for i in remaining:
            used += 1
            if next(draws) < rso_accept_probability(r[i], top, beta):
                taken.add(i)
                accepted.append(i)
                if len(accepted) == num_samples:
                    break
        remaining = [i for i in remaining if i not in taken]
    return accepted, used, passes


def tournament(num_candidates: int, first_wins) -> tuple[list[tuple[int, int]], int | None]:
    """Knock-out over candidates: (winner, loser) pairs in order of play and the champion (rm.t2t_pair).

    Neighbours play, the odd one gets a bye and stays last; `first_wins(i, j)` says whether i beats j (ties: i).
    """
    field, pairs = list(range(num_candidates)), []
    while len(field) > 1:
        winners = []
        for a, b in zip(field[::2], field[1::2]):
            winner, loser = (a, b) if first_wins(a, b) else (b, a)
            pairs.append((winner, loser))
            winners.append(winner)
        field = winners + (field[-1:] if len(field) % 2 else [])
    return pairs, (field[0] if field else None)


def combine_scores(members, uncertainty_coef: float = 0.1) -> dict:
    """Ensemble of calibrated scores [members, samples]: mean, min, population std and uwo = mean - coef variance
    (rm.ensemble).
    """
    m = np.asarray(members, dtype=np.float64)
    return {"mean": m.mean(0), "min": m.min(0), "std": m.std(0), "uwo": m.mean(0) - uncertainty_coef * m.var(0)}


def weighted_score(scores, weights) -> float:
    """Weighted sum; weights must sum to 1, a missing (None or NaN) score renormalises the rest (rm.multi)."""
    if abs(sum(weights) - 1) > 1e-6:
        raise ValueError(f"weights sum to {sum(weights):g}; write weights that sum to 1")
    present = [(s, w) for s, w in zip(scores, weights) if s is not None and not math.isnan(s)]
    if not present:
        return math.nan
    return sum(s * w for s, w in present) / sum(w for _, w in present)


def order_by_difficulty(difficulty, stages: int = 1) -> tuple[list[int], list[int]]:
    """(easy-to-hard order with ties by index, stage of each row) in `stages` equal parts, the remainder to the first
    (rm.curriculum).
    """
    order = [int(i) for i in np.argsort(np.asarray(difficulty, dtype=np.float64), kind="stable")]
    base, extra = divmod(len(order), stages)
    stage, at = [0] * len(order), 0
    for k in range(stages):
        size = base + (k < extra)
        for i in order[at : at + size]:
            stage[i] = k
        at += size
    return order, stage


def chunk_sizes(n: int, chunks: int) -> list[int]:
    """n // chunks each, the remainder to the first chunks (da.sdpo)."""
    return [n // chunks + (k < n % chunks) for k in range(chunks)]


def refresh_intervals(total_steps: int, refreshes: int) -> list[int]:
    """Optimizer steps of each interval between refreshes of the behaviour policy: T // F, the last one longer
    (da.bpo).
    """
    if not 1 <= refreshes <= total_steps:
        raise ValueError(f"{refreshes} intervals do not fit {total_steps} steps; write at most one interval per step")
    base = total_steps // refreshes
    return [base] * (refreshes - 1) + [total_steps - base * (refreshes - 1)]


def rank_gap_stages(ranks) -> list[tuple[int, int, int]]:
    """(chosen, rejected, rank gap) of best against every other response, largest gap first; ties in rank give no pair
    (da.curry).
    """
    best = min(range(len(ranks)), key=lambda i: (ranks[i], i))
    rest = sorted((i for i in range(len(ranks)) if ranks[i] > ranks[best]), key=lambda i: (-ranks[i], i))
    return [(best, i, ranks[i] - ranks[best]) for i in rest]


def round_robin(win_probabilities) -> tuple[np.ndarray, list[int]]:
    """(mean win probability against the others, ranking with ties by index) (rs.rank)."""
    p = np.asarray(win_probabilities, dtype=np.float64)
    n = len(p)
    mean = (p.sum(1) - np.diag(p)) / max(n - 1, 1)
    return mean, [int(i) for i in np.argsort(-np.round(mean, 12), kind="stable")]


def intransitive(win_probabilities) -> float | None:
    """Share of triples in which each beats one and loses to another (``reward.pairwise_rank``); triples with a missing
    probability count for nothing, None without any.
    """
    p = np.array(win_probabilities, dtype=np.float64)
    np.fill_diagonal(p, np.nan)
    beats, known = (matrix.astype(np.float64) for matrix in (p > 0.5, ~np.isnan(p)))
    triples = np.trace(known @ known @ known) / 6  # each is walked around from three places in two directions
    return float(np.trace(beats @ beats @ beats) / 3 / triples) if triples else None


def majority(answers, weights=None):
    """(winning answer, score per answer); None answers do not vote, ties go to the first occurrence (rs.majority)."""
    scores: dict = {}
    for answer, weight in zip(answers, [1] * len(answers) if weights is None else weights):
        if answer is not None:
            scores[answer] = scores.get(answer, 0) + weight
    return (max(scores, key=scores.get) if scores else None), scores


def difficulty_band(correct, n: int, low: float = 0.2, high: float = 0.8) -> list[bool]:
    """Which prompts have a pass rate in [low, high], bounds included, compared as exact decimals
    (rs.difficulty_band).
    """
    from fractions import Fraction

    lo, hi = Fraction(str(low)), Fraction(str(high))
    return [lo <= Fraction(int(c), n) <= hi for c in correct]


def largest_remainder(total: int, weights) -> list[int]:
    """Split `total` by weights; leftovers to the largest remainders, ties to the first (rs.mix)."""
    quotas = [total * w / sum(weights) for w in weights]
    counts = [math.floor(q + 1e-12) for q in quotas]
    order = sorted(range(len(weights)), key=lambda i: (-round(quotas[i] - counts[i], 12), i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def sorted_order(lengths, longest_first: bool = False) -> tuple[list[int], list[int]]:
    """(order, inverse) of a stable sort by length; scores[inverse] restores the input order (rs.length_sort)."""
    lengths = np.asarray(lengths)
    order = np.argsort(-lengths if longest_first else lengths, kind="stable")
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return [int(i) for i in order], [int(i) for i in inverse]


def pack_best_fit(lengths, capacity: int) -> list[list[int]]:
    """Best-fit decreasing bins of row indices: longest first, into the fullest bin that fits, ties earliest
    (sft.pack).
    """
    bins, room = [], []
    for i in sorted_order(lengths, longest_first=True)[0]:
        if lengths[i] > capacity:
            raise ValueError(
                f"row {i} has {lengths[i]} tokens, more than the capacity {capacity}; truncate it first or raise the"
                " capacity"
            )
        fits = [b for b in range(len(bins)) if room[b] >= lengths[i]]
        if fits:
            best = min(fits, key=lambda b: (room[b], b))
        else:
            best = len(bins)
            bins.append([])
            room.append(capacity)
        bins[best].append(i)
        room[best] -= lengths[i]
    return bins


def convincing_wrong(scores, correct, k: int) -> list[int]:
    """Indices of the k highest-scored samples whose final answer is wrong, best first: what a process reward model must
    learn from (rm.active, Lightman et al. 2023). Unknown verdicts and scores are never taken."""
    wrong = [
        i
        for i, (s, c) in enumerate(zip(scores, correct))
        if c is not None and not c and s is not None and not math.isnan(s)
    ]
    return sorted(wrong, key=lambda i: (-scores[i], i))[:k]


def uncertain(scores, k: int, centre: float = 0.5) -> list[int]:
    """Indices of the k scores nearest to ``centre``, the nearest first (rm.active)."""
    known = [i for i, s in enumerate(scores) if s is not None and not math.isnan(s)]
    return sorted(known, key=lambda i: (abs(scores[i] - centre), i))[:k]
