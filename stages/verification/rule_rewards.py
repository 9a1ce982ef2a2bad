"""What counts and lengths are worth: tests passed, constraints met, tokens used (reward.code, reward.if_constraints,
reward.length_soft_overlong, reward.length_kimi, reward.length_target).
"""

from __future__ import annotations

from collections.abc import Sequence


def code_reward(
    passed: int, total: int, mode: str = "all", *, well_formatted: bool = True, threshold: float = 1.0
) -> float | None:
    """Reward of `passed` of `total` tests (reward.code): `all`, `fraction` or `threshold`; None without tests."""
    if total == 0:
        return None
    if not well_formatted:
        return 0.0
    fraction = passed / total
    if mode == "fraction":
        return fraction
    return float(fraction >= (1.0 if mode == "all" else threshold))


def constraint_reward(satisfied: Sequence[bool], mode: str = "all", threshold: float = 1.0) -> float | None:
    """1 iff all constraints hold (`all`), their share (`fraction`), or 1 iff that is at least `threshold`; None without
    constraints.
    """
    return code_reward(sum(map(bool, satisfied)), len(satisfied), mode, threshold=threshold)


def soft_overlong(length: int, max_length: int, cache_length: int) -> float:
    """R_len of DAPO: 0 up to max_length - cache_length, then linearly down to -1 at max_length
    (reward.length_soft_overlong).

    `length` counts completion tokens including the end token. cache_length 0 is a hard cut.
    """
    if length > max_length:
        return -1.0
    start = max_length - cache_length
    return 0.0 if length <= start else (start - length) / cache_length


def kimi_length(lengths: Sequence[int], correct: Sequence[bool]) -> list[float]:
    """Length reward of one prompt's answers: lambda = 0.5 - (len - min)/(max - min) for right ones, min(0, lambda) for
    wrong ones; 0 for all when they are equally long (reward.length_kimi, Kimi k1.5)."""
    low, high = min(lengths), max(lengths)
    if high == low:
        return [0.0] * len(lengths)
    shares = [0.5 - (n - low) / (high - low) for n in lengths]
    return [s if right else min(0.0, s) for s, right in zip(shares, correct)]


def target_length(
    length: int, target: int, correct: bool, mode: str = "exact", alpha: float = 3e-4, delta: float = 0.5
) -> float:
    """Reward of an answer that was asked for ``target`` tokens: 1[correct] - alpha |target - n|, or (``max``)
    1[correct] clip(alpha (target - n) + delta, 0, 1) (reward.length_target, L1, Aggarwal & Welleck 2025)."""
    if mode == "exact":
        return float(correct) - alpha * abs(target - length)
    return float(correct) * min(max(alpha * (target - length) + delta, 0.0), 1.0)
