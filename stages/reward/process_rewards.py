"""Rewards at the ends of reasoning steps: what a process reward model says of each step, as credits and as places among
the tokens of a completion.

``step_credits`` turns probabilities that steps are right into what each step earns. Whatever its form, the credits of a
solution add up to one number that the catalogue knows as a score of the whole solution (``reward.prm``), so that paying
by steps moves a reward in time and does not invent another one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Form of the credits -> what those of a solution add up to.
STEP_CREDITS = {
    "each": "the sum of the scores: more right steps earn more",
    "mean": "their mean",
    "difference": "the last score",
    "min": "the lowest score",
    "log": "the log of their product",
}
SMALLEST = 1e-6  # probability below which step_credit=log does not fall further


def step_credits(scores: Sequence[float], form: str, clip: float | None = None) -> list[float]:
    """What each step of a solution earns, from the scores p_1..p_K of its steps (REINFORCE, process rewards).

    ``each`` p_k; ``mean`` p_k / K; ``difference`` p_k - p_{k-1} with p_0 = 0; ``min`` the (first) lowest score on its
    own step and 0 elsewhere, so that every step up to the worst one is answerable for it and none behind it; ``log``
    log p_k. ``clip``: each credit is clipped to [-clip, clip]. No step gives [].

    Raises:
        ValueError: an unknown form.
    """
    if form not in STEP_CREDITS:
        raise ValueError(f"step_credit={form!r} is unknown; write {', '.join(STEP_CREDITS)}")
    p = np.asarray(scores, np.float64)
    if not p.size:
        return []
    found = {
        "each": lambda: p,
        "mean": lambda: p / p.size,
        "difference": lambda: np.diff(p, prepend=0.0),
        "min": lambda: np.where(np.arange(p.size) == p.argmin(), p, 0.0),
        "log": lambda: np.log(np.maximum(p, SMALLEST)),
    }[form]()
    return (found if clip is None else found.clip(-clip, clip)).tolist()


def finished_steps(text: str, separator: str) -> str:
    """The part of a cut text up to the end of its last finished step; "" without one."""
    return text[: text.rindex(separator) + len(separator)] if separator in text else ""


def token_pieces(renderer, ids: Sequence[int]) -> list[str]:
    """The text of each token by itself, "" of special ones."""
    return [renderer.tokenizer.decode([t], skip_special_tokens=True) for t in ids]


def step_ends(pieces: Sequence[str], separator: str) -> list[int]:
    """Index of the last token of each non-blank reasoning step: the token that completes its separator, or the last
    token (GRPO-PROCESS).
    """
    text, bounds = "".join(pieces), np.cumsum([len(p) for p in pieces])
    ends, start = [], 0
    for part in text.split(separator):
        stop = start + len(part) + len(separator)
        if part.strip():
            ends.append(int(min(np.searchsorted(bounds, stop), len(pieces) - 1)))
        start = stop
    return ends


def merged(
    parts: dict[str, Sequence[tuple[int, float]]], weights: dict[str, float], n: int
) -> tuple[list[int], list[float]]:
    """(last tokens, credits) of what components pay at single tokens of a completion of ``n`` tokens, weighted and
    added up; the last token is always one of them.
    """
    at: dict[int, float] = {n - 1: 0.0} if n else {}
    for name, credits in parts.items():
        for end, credit in credits:
            at[end] = at.get(end, 0.0) + weights.get(name, 0.0) * credit
    ends = sorted(at)
    return ends, [at[end] for end in ends]
