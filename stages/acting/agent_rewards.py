"""Rewards of trajectories: what the environment paid, milestones, weighted step indicators, and blends of sources.

Every function turns the events of an episode into one number per turn; nothing else is read, so stored trajectories can
be scored again. An event is a string; ``NAME:2/4`` says that two of four were done.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

#: Milestones of computer use: category -> reward of each, in the order of the catalogue's table (``reward.milestone``).
CATALOGUE = {
    "web": (0.25, 0.25, 0.5),
    "form": (0.2, 0.3, 0.5),
    "file": (1.0, 0.5, 0.25),
    "email": (0.25, 0.5, 1.0),
    "settings": (0.25, 0.25, 0.5),
    "search": (0.25, 0.5, 0.5),
}
#: Example weights of the step reward; they break their own ordering goal >= file >= ui, which is a warning
#: (``reward.step_weighted``).
STEP_WEIGHTS = {"nav": 0.1, "ui": 0.2, "form": 0.2, "file": 0.3, "goal": 0.2}
#: Events behind the indicators of the step reward.
STEP_EVENTS = {
    "nav": "url_changed",
    "ui": "ui_match",
    "form": "fields",
    "file": "file_created",
    "goal": "goal_verified",
}


def category_sums(catalogue: Mapping[str, Sequence[float]] = CATALOGUE) -> dict[str, float]:
    """Sum of each category's milestone rewards; they are not 1 (``MILESTONE``)."""
    return {category: float(sum(rewards)) for category, rewards in catalogue.items()}


def milestones_of(catalogue: Mapping[str, Sequence[float]] = CATALOGUE, normalise: str = "none") -> dict[str, float]:
    """``{"web.0": 0.25, ...}``: milestone -> reward; ``normalise=category_sum`` divides by the category's sum."""
    sums = category_sums(catalogue)
    return {
        f"{category}.{k}": reward / (sums[category] if normalise == "category_sum" and sums[category] else 1.0)
        for category, rewards in catalogue.items()
        for k, reward in enumerate(rewards)
    }


def milestones_by_turn(turns: Sequence[Sequence[str]], milestones: Iterable[str], once: bool = True) -> list[list[str]]:
    """The milestones that each turn's events reach, each at most ``once`` per episode (MILESTONE).

    A milestone is an event's name, or a regular expression that has to match the whole event.
    """
    reached: set[str] = set()
    found = []
    for events in turns:
        found.append([m for m in milestones if m not in reached and any(e == m or re.fullmatch(m, e) for e in events)])
        if once:
            reached.update(found[-1])
    return found


def milestone_rewards(
    turns: Sequence[Sequence[str]], milestones: Mapping[str, float], once: bool = True
) -> list[float]:
    """Reward of each turn: the milestones that it reaches, each paid once per episode (MILESTONE)."""
    return [float(sum(milestones[m] for m in now)) for now in milestones_by_turn(turns, milestones, once)]


def check_step_weights(weights: Mapping[str, float]) -> list[str]:
    """Refuse weights that do not sum to 1; warn where goal >= file >= ui does not hold (STEP-REWARD)."""
    total = sum(weights.values())
    if abs(total - 1.0) > 1e-9 or any(w < 0 for w in weights.values()):
        raise ValueError(
            f"the weights of a step reward must not be negative and sum to 1, and {dict(weights)} sum to {total:g}; "
            f"write for example {STEP_WEIGHTS}"
        )
    ordered = [weights[k] for k in ("goal", "file", "ui") if k in weights]
    return (
        []
        if ordered == sorted(ordered, reverse=True)
        else [
            "the step weights break the order goal >= file >= ui that their source asks for; write them in that order"
        ]
    )


def indicator(events: Sequence[str], name: str) -> float:
    """1 when an event of that name happened, the share of a ``NAME:done/expected`` event (0 where nothing was
    expected), else 0.
    """
    best = 0.0
    for event in events:
        if event == name:
            return 1.0
        head, _, share = event.rpartition(":")
        if head == name and (match := re.fullmatch(r"(\d+)/(\d+)", share)):
            done, expected = map(int, match.groups())
            best = max(best, done / expected if expected else 0.0)
    return best


def step_rewards(
    turns: Sequence[Sequence[str]], weights: Mapping[str, float] = STEP_WEIGHTS, events: Mapping[str, str] = STEP_EVENTS
) -> list[float]:
    """Reward of each turn: the weighted sum of its indicators (STEP-REWARD). ``events``: indicator -> name of its
    event.
    """
    return [
        float(sum(w * indicator(happened, events.get(name, name)) for name, w in weights.items())) for happened in turns
    ]


def check_blend(weights: Mapping[str, float]) -> None:
    """Weights of a blend lie in [0, 1] and sum to 1 (REWARD-BLEND)."""
    total = sum(weights.values())
    if any(not 0 <= w <= 1 for w in weights.values()) or abs(total - 1.0) > 1e-9:
        raise ValueError(
            f"the weights of a blend must lie in [0, 1] and sum to 1, and {dict(weights)} sum to {total:g}; rescale"
            " them, or write blend=false for a plain sum"
        )


def per_turn(total: float, values: Mapping[str, Sequence[float]], weights: Mapping[str, float], n: int) -> list[float]:
    """What each of ``n`` turns earned of a trajectory's ``total``: the weighted turn values; all that has no turn of
    its own goes to the last one.
    """
    rewards = [float(sum(weights[name] * column[k] for name, column in values.items())) for k in range(n)]
    if n:
        rewards[-1] += total - sum(rewards)
    return rewards
