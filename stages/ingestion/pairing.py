"""Turning labels into pairs: Likert scales, votes, rankings, ratings, thumbs, verifier results.

Pure functions on numbers and indices; the rows around them are made in conversions.py. Pairs are
(chosen index, rejected index). Catalogue: data.likert, data.binarise, data.aggregate, data.ranking,
data.margin, data.ratings, data.unpaired, data.correctness_pairs, data.curriculum, data.multiturn.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Callable, Hashable, Sequence

from stages.ingestion.rules import Bad

LLAMA2_GRADES = ("significantly_better", "better", "slightly_better", "negligibly_better")
# Touvron et al. 2023, table 27; "unsure" counts as negligibly better.
MARGIN_TABLES = {"llama2_small": (1.0, 2 / 3, 1 / 3, 0.0), "llama2_large": (3.0, 2.0, 1.0, 0.0)}
LAMBDA_BAND = (1.0, 1.5)


# -- graded and voted comparisons -------------------------------------------------------------------
def likert(label, n_points: int, orientation: str = "low_is_a") -> tuple[str, int, float]:
    """(winner `A`|`B`|`tie`, strength, signed) of a label on a 1..N scale (`data.likert`).

    1 means A is much better (`low_is_a`); `high_is_a` reverses the scale first.
    signed = (N+1)/2 - v, strength = ceil(|signed|). Raises Bad(bad_label) off the scale.
    """
    if isinstance(label, bool) or not isinstance(label, (int, float)) or label != label:
        raise Bad("bad_label")
    if label != int(label) if math.isfinite(label) else True:
        raise Bad("bad_label")
    value = int(label)
    if not 1 <= value <= n_points:
        raise Bad("bad_label")
    if orientation == "high_is_a":
        value = n_points + 1 - value
    signed = (n_points + 1) / 2 - value
    winner = "A" if signed > 0 else "B" if signed < 0 else "tie"
    return winner, math.ceil(abs(signed)), signed


def likert_probability(label, n_points: int, orientation: str = "low_is_a", eps: float = 0.05) -> float:
    """P(A preferred) = clip((N-v)/(N-1), eps, 1-eps) (`data.binarise`, soft_label=linear)."""
    likert(label, n_points, orientation)
    value = n_points + 1 - int(label) if orientation == "high_is_a" else int(label)
    return min(max((n_points - value) / (n_points - 1), eps), 1 - eps)


def votes(labels: Sequence[str], strengths: Sequence[float] | None = None) -> dict:
    """Majority of `A`/`B`/`tie` votes (`data.aggregate`): winner, p_a = (n_A + n_tie/2)/n, strength.

    Exactly 0.5 is a tie. strength = median strength of the annotators who agree with the winner.
    Raises Bad(bad_label) for an empty list or another vote.
    """
    named = {"a": "A", "b": "B", "tie": "tie", "t": "tie", "c": "tie", "c (tie)": "tie"}
    clean = [named.get(str(label).strip().lower()) for label in labels or ()]
    if not clean or None in clean:
        raise Bad("bad_label")
    twice = 2 * clean.count("A") + clean.count("tie")
    winner = "tie" if twice == len(clean) else "A" if twice > len(clean) else "B"
    agreeing = [s for vote, s in zip(clean, strengths or ()) if vote == winner]
    return {"winner": winner, "p_a": twice / (2 * len(clean)), "strength": median(agreeing) if agreeing else None}


def binarise(p_a: float, tie_policy: str = "drop") -> tuple[str, float | None, bool]:
    """(winner, label_prob, kept) from P(A preferred) (`data.binarise`).

    label_prob is P(chosen preferred) and so at least 0.5. A tie (exactly 0.5) is not kept under
    `drop`; under `soft` it is kept with label_prob 0.5 and A as chosen. Raises Bad(bad_label)
    outside [0, 1].
    """
    if not 0 <= p_a <= 1:
        raise Bad("bad_label")
    if p_a == 0.5:
        return ("tie", 0.5, True) if tie_policy == "soft" else ("tie", None, False)
    return ("A", p_a, True) if p_a > 0.5 else ("B", 1 - p_a, True)


def margin(
    mode: str,
    *,
    strength: int | None = None,
    grade: str | None = None,
    chosen_score: float | None = None,
    rejected_score: float | None = None,
) -> float | None:
    """Margin of a pair, or None where the mode has nothing to go by (`data.margin`).

    score_diff: chosen - rejected (0 is a tie, which the caller drops). llama2_small / llama2_large:
    by grade name, or by a 1..4 strength with 4 = significantly better.
    """
    if mode == "none":
        return None
    if mode == "score_diff":
        return None if chosen_score is None or rejected_score is None else chosen_score - rejected_score
    table = MARGIN_TABLES[mode]
    if grade is not None:
        name = grade.strip().lower().replace(" ", "_").replace("-", "_")
        if name in ("unsure", "negligibly_better_or_unsure", "negligibly_better/unsure"):
            name = "negligibly_better"
        if name not in LLAMA2_GRADES:
            raise Bad("bad_label")
        return table[LLAMA2_GRADES.index(name)]
    if strength is None:
        return None
    return table[4 - min(max(int(strength), 1), 4)]


# -- rankings ---------------------------------------------------------------------------------------
def check_ranks(ranks, n: int) -> list[int]:
    """Ranks as integers; raises Bad(bad_rank) unless they are n non-negative integers."""
    if not isinstance(ranks, (list, tuple)) or len(ranks) != n:
        raise Bad("bad_rank")
    for rank in ranks:
        if (
            isinstance(rank, bool)
            or not isinstance(rank, (int, float))
            or rank != rank
            or rank < 0
            or rank in (math.inf,)
            or rank != int(rank)
            or rank >= 2**31
        ):
            raise Bad("bad_rank")
    return [int(rank) for rank in ranks]


def ranks_from_scores(scores: Sequence[float]) -> list[int]:
    """Dense ranks, 0 = highest score, equal scores tie."""
    levels = {score: level for level, score in enumerate(sorted(set(scores), reverse=True))}
    return [levels[score] for score in scores]


def ranking_pairs(
    ranks: Sequence[int], mode: str = "all", draw: Callable[[int], int] | None = None
) -> list[tuple[int, int]]:
    """Pairs (chosen, rejected) of one ranking, 0 = best, ties give no pair (`data.ranking`).

    Order: by rank of chosen, then rank of rejected, then index. Modes: all, best_vs_rest,
    best_worst, adjacent (neighbouring rank levels), best_vs_random (`draw(n)` -> index), rank_gap
    (same pairs as all; stages come from `rank_gap_stages`).
    """
    order = sorted(range(len(ranks)), key=lambda index: (ranks[index], index))
    pairs = [(i, j) for i in order for j in order if ranks[i] < ranks[j]]
    if mode in ("all", "rank_gap") or not pairs:
        return pairs
    best, worst = ranks[order[0]], ranks[order[-1]]
    if mode == "best_vs_rest":
        return [pair for pair in pairs if ranks[pair[0]] == best]
    if mode == "best_worst":
        return [pair for pair in pairs if ranks[pair[0]] == best and ranks[pair[1]] == worst]
    if mode == "adjacent":
        levels = sorted(set(ranks))
        following = dict(zip(levels, levels[1:]))
        return [pair for pair in pairs if ranks[pair[1]] == following.get(ranks[pair[0]])]
    if mode == "best_vs_random":
        if draw is None:
            raise ValueError("pair_mode best_vs_random needs a random draw")
        rest = [j for j in order if ranks[j] > best]
        return [(order[0], rest[draw(len(rest))])]
    raise ValueError(
        f"unknown pair_mode {mode!r}; write all, best_vs_rest, best_worst, adjacent, best_vs_random or rank_gap"
    )


def rank_gap_stages(
    ranks: Sequence[int], anchor: str | None = None, order: str = "large_gap_first"
) -> list[tuple[int, list[tuple[int, int]]]]:
    """[(rank gap, pairs)] in curriculum order, largest gap (easiest) first (`data.curriculum`).

    anchor="best": only pairs with the best response.
    """
    groups: dict[int, list[tuple[int, int]]] = {}
    best = min(ranks, default=0)
    for i, j in ranking_pairs(ranks):
        if anchor != "best" or ranks[i] == best:
            groups.setdefault(ranks[j] - ranks[i], []).append((i, j))
    return [(gap, groups[gap]) for gap in sorted(groups, reverse=order == "large_gap_first")]


# -- ratings ----------------------------------------------------------------------------------------
def ratings_pairs(scores: Sequence[float], min_margin: float) -> list[tuple[int, int, float]]:
    """(chosen, rejected, margin) with score gap >= min_margin > 0 inside one prompt (`data.ratings`).

    Sorted by margin descending, then indices.
    """
    if not min_margin > 0:
        raise ValueError("min_margin must be positive; write the smallest step of the scale, such as 1")
    found = [(i, j, a - b) for i, a in enumerate(scores) for j, b in enumerate(scores) if a > b and a - b >= min_margin]
    return sorted(found, key=lambda item: (-item[2], item[0], item[1]))


def overall_scores(aspects: Sequence[Sequence[float]], weights: Sequence[float] | None = None) -> list[float]:
    """Weighted mean of the aspects of each completion; weights sum to 1 (default equal). Rounded to 12 decimals, so that
    equal means are equal numbers whatever they are made of: two answers of one score are a tie.
    """
    if weights is not None and abs(sum(weights) - 1) > 1e-9:
        raise Bad("weight_sum")
    return [
        round(math.fsum(w * s for w, s in zip(weights, row)), 12) if weights is not None else math.fsum(row) / len(row)
        for row in aspects
    ]


# -- unpaired ---------------------------------------------------------------------------------------
def pairs_to_unpaired(pairs: Sequence[tuple[Hashable, Hashable, Hashable]], on_conflict: str = "drop"):
    """(rows, conflicts) of (prompt, chosen, rejected) triples (`data.unpaired`).

    Each completion (stripped if text) once per prompt; one with both labels is a conflict: dropped,
    or decided by `majority` (an even split is dropped).
    """
    tally: dict[tuple, list[int]] = {}
    for prompt, chosen, rejected in pairs:
        for completion, index in ((chosen, 0), (rejected, 1)):
            key = (prompt, completion.strip() if isinstance(completion, str) else completion)
            tally.setdefault(key, [0, 0])[index] += 1
    rows, conflicts = [], []
    for (prompt, completion), (good, bad) in tally.items():
        if good and bad:
            conflicts.append((prompt, completion))
            if on_conflict != "majority" or good == bad:
                continue
        rows.append((prompt, completion, good > bad))
    return rows, conflicts


def unpaired_to_pairs(desirable: Sequence, undesirable: Sequence, limit: int | None = None) -> list[tuple]:
    """Desirable x undesirable of one prompt, desirable-major, cut at `limit` (`data.unpaired`)."""
    pairs = []
    for good in desirable:
        for bad in undesirable:
            if limit is not None and len(pairs) >= limit:
                return pairs
            pairs.append((good, bad))
    return pairs


def lambda_band(
    n_desirable: int, n_undesirable: int, lambda_u: float = 1.0, band: Sequence[float] = LAMBDA_BAND
) -> tuple[float, float] | None:
    """Range of lambda_D that keeps lambda_D n_D / (lambda_U n_U) inside the band (KTO); None if n_D = 0."""
    if not n_desirable:
        return None
    return tuple(edge * lambda_u * n_undesirable / n_desirable for edge in band)


def correctness_pairs(correct: Sequence[bool | int | None], limit: int | None = None):
    """(pairs, reason) correct x incorrect of one prompt, i-major (`data.correctness_pairs`).

    None marks a verifier failure and is left out. reason: all_correct, none_correct or None.
    """
    good = [index for index, value in enumerate(correct) if value is not None and value]
    bad = [index for index, value in enumerate(correct) if value is not None and not value]
    if not good:
        return [], "none_correct"
    if not bad:
        return [], "all_correct"
    return unpaired_to_pairs(good, bad, limit), None


def constraint_contrast(with_passes: bool, without_passes: bool) -> str | None:
    """Why a constraint pair is not kept, or None if it is (`data.constraint_pairs`)."""
    if not with_passes:
        return "chosen_fails"
    return "rejected_also_passes" if without_passes else None


# -- conversations ----------------------------------------------------------------------------------
def unroll(roles: Sequence[str], policy: str = "all_turns", balance: str = "none") -> list[tuple[int, float]]:
    """(target message index, weight) of each sample of a conversation (`data.multiturn`).

    Sample i has messages[:target] as prompt and messages[target] as completion; later turns are
    dropped. policy: all_turns, final_turn. balance per_conversation: weight 1/n_samples.
    """
    targets = [index for index, role in enumerate(roles) if role == "assistant"]
    if policy == "final_turn":
        targets = targets[-1:]
    elif policy != "all_turns":
        raise ValueError(f"unknown multi-turn policy {policy!r}; write all_turns or final_turn")
    weight = 1.0 / len(targets) if targets and balance == "per_conversation" else 1.0
    return [(target, weight) for target in targets]


# -- product signals ----------------------------------------------------------------------------------
# Shipped map of product signals: label or "pair", and weight (`data.implicit`).
EVENT_MAP: dict[str, tuple[bool | str, float]] = {
    "thumbs_up": (True, 1.0),
    "thumbs_down": (False, 1.0),
    "regenerate": (False, 0.5),
    "close_tab": (False, 0.25),
    "angry_followup": (False, 0.5),
    "copy": (True, 0.5),
    "edit": ("pair", 1.0),
}
EXPLICIT = frozenset(("thumbs_up", "thumbs_down", "edit"))  # said on purpose; all others are behaviour


def event(action: str, more: dict[str, float] | None = None) -> tuple[bool | str, float]:
    """(label or "pair", weight) of a product signal (`data.implicit`). more: signed weights of other signals, below 0
    for a bad answer; 0 leaves a signal out.

    Raises Bad(bad_label) for an unknown one, Bad(ignored_event) for one with weight 0.
    """
    if more and action in more:
        if more[action] == 0:
            raise Bad("ignored_event")
        return more[action] > 0, abs(more[action])
    if action not in EVENT_MAP:
        raise Bad("bad_label")
    return EVENT_MAP[action]


def last_event(explicit: Sequence[bool], times: Sequence) -> int:
    """Index of the signal that counts among all of one response: explicit beats implicit, then the last one
    (`data.implicit`). times: comparable, or None where unknown (then input order).
    """
    among = [index for index, said in enumerate(explicit) if said] or range(len(explicit))
    if any(times[index] is None for index in among):
        return among[-1]
    return max(among, key=lambda index: (times[index], index))
