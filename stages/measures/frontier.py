"""Reward against KL: which models no other beats at equal or lower KL (eval.kl_frontier)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stages.measures import suites


def of(points: Mapping[str, tuple[float, float]]) -> set[str]:
    """Names of the points (KL, reward) that are on the frontier; of equal ones the first."""
    wanted = [tuple(point) for point in suites.kl_frontier(list(points.values()))]
    found = {}
    for name, point in points.items():
        if tuple(map(float, point)) in wanted:
            found.setdefault(tuple(map(float, point)), name)
    return set(found.values())


def reward_at(points: Sequence[tuple[float, float]], budget: float) -> float | None:
    """The best reward of a point with at most this KL; None where there is none."""
    return max((reward for kl, reward in points if kl <= budget), default=None)


def area(points: Sequence[tuple[float, float]], end: float) -> float | None:
    """Mean over KL from the least of these points to ``end`` of the best reward within that KL: the frontier as stairs.
    None for a single KL.
    """
    frontier = [(kl, reward) for kl, reward in suites.kl_frontier(points) if kl <= end]
    if not frontier or end <= frontier[0][0]:
        return None
    ends = [kl for kl, _ in frontier[1:]] + [end]
    return sum((stop - kl) * reward for (kl, reward), stop in zip(frontier, ends)) / (end - frontier[0][0])


def table(points: Mapping[str, tuple[float, float]], metric: str) -> list[dict]:
    """Rows by KL: {model, KL, metric, on the frontier, best at this KL or less}."""
    best = of(points)
    return [
        {
            "model": name or "model",
            "kl": kl,
            metric: reward,
            "on the frontier": name in best,
            f"best {metric} at this KL or less": reward_at(list(points.values()), kl),
        }
        for name, (kl, reward) in sorted(points.items(), key=lambda one: one[1])
    ]
