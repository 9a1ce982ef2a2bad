"""What scoring gives: a component's verdict on a row, why there is none, and a row's total."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from stages.reward.components import RewardComponent


@dataclass(frozen=True)
class Unscorable:
    """No value, and why. Never 0. items: what a rubric did score of it."""

    reason: str
    items: tuple[dict, ...] = ()


@dataclass
class Scored:
    """Reward of one row. total: weighted sum, None if unscorable. parts: raw value of each component, None if
    unscorable. reasons: why, by component. correct: the verdict of the first verifier or code component, None without a
    verdict. extracted: the answer that verdict was about. items: the rubric's items, where there is one. tier: of the
    router, the one that decided. weights: the factor of each counted component in the total, what absent ones left to
    it included. turn_rewards: of a trajectory, what each turn earned of the total, and turn_parts the values that
    components give its turns. step_rewards: (last tokens, rewards) of what single steps of an answer earned of the
    total, where a component pays them (``step_credit``). feedback: what components said of the answer in words."""

    total: float | None
    parts: dict[str, float | None] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    correct: bool | None = None
    extracted: str | None = None
    items: list[dict] = field(default_factory=list)
    tier: str | None = None
    weights: dict[str, float] = field(default_factory=dict)
    turn_rewards: list[float] | None = None
    turn_parts: dict[str, list[float]] = field(default_factory=dict)
    step_rewards: tuple[list[int], list[float]] | None = None
    feedback: str | None = None


@dataclass(frozen=True)
class Verdict:
    """What a component says about one row: its value, whether the answer is right where it knows, how much an
    ensemble's members differ, a rubric's items, the value's parts by turn, what it would have been without the debate,
    numbers beside the value, by name, (last token, part of the value) of steps that are paid, and what is wrong with the
    answer in words."""

    value: float
    correct: bool | None = None
    extracted: str | None = None
    spread: float | None = None
    items: tuple[dict, ...] = ()
    turns: tuple[float, ...] | None = None
    without: float | None = None
    metrics: dict[str, float] | None = None
    steps: tuple[tuple[int, float], ...] | None = None
    feedback: str | None = None


#: Reasons of a component that is not asked about a row, because an earlier tier left nothing to say or the prompt is
#: another's business: no failure.
NOT_ASKED = "an earlier tier decided"

ANOTHERS = "the prompt is routed to other components"

#: Reason of a component that compares, of an answer that is the only one of its group: 1/2, or the majority of one,
#: would say nothing of it.
ALONE = "there is no other answer to the prompt to compare it with"


def failures(parts: dict[str, float | None], reasons: dict[str, str] | None) -> dict[str, str]:
    """Why components could not score a row, by component."""
    found = {
        name: why
        for name, why in (reasons or {}).items()
        if parts.get(name) is None and why not in (NOT_ASKED, ANOTHERS)
    }
    return found or (
        {}
        if any(value is not None for value in parts.values())
        else {name: why for name, why in (reasons or {}).items() if why == ANOTHERS}
    )


def commonest_failure(found: Iterable[dict[str, str]]) -> str:
    """``mine: NameError ... (12 of 16)`` of the :func:`failures` of many rows, or what stands for a row without any."""
    found = list(found)
    counts = Counter(f"{name}: {why}" for one in found for name, why in one.items())
    return "{} ({} of {})".format(*counts.most_common(1)[0], len(found)) if counts else "no component gave a reason"


def text_read(component: RewardComponent, row: dict) -> str:
    from stages.generation import seen
    from stages.verification.responses import view

    return (
        view(seen(row["completion_text"], True), component.view)
        if row.get("opened") and component.view != "full"
        else view(row["completion_text"], component.view)
    )


def finite(value) -> bool:
    """Whether a value is a finite number; an int beyond the floats is none."""
    try:
        return isinstance(value, (bool, int, float)) and math.isfinite(value)
    except OverflowError:
        return False


def value_of(value) -> Verdict | Unscorable:
    """A finite number as a verdict, anything else as unscorable."""
    if isinstance(value, bool):
        return Verdict(float(value), value)
    if finite(value):
        return Verdict(float(value))
    return Unscorable("no value (None)" if value is None else f"{value!r:.60} is no finite number{_instead(value)}")


def _instead(value) -> str:
    """What to return instead of a value that is no number, where that is plain."""
    if isinstance(value, str):
        return "; return a number, for example float(...) of the text"
    return (
        "; return one number for one answer; a function of all answers to a prompt needs scope: group"
        if isinstance(value, list)
        else ""
    )
