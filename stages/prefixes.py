"""Prompts that begin alike: the examples of a few-shot evaluation, a long system message, the tools of an agent, a judge's rubric.

What several prompts begin with has the same keys and values in all of them, so the sampler computes it once
(`shared_beginnings` says for which prompts) and each prompt's own rest attends to it.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np

MIN_SHARED = 64  # tokens; a shorter beginning (a chat template's head) is not worth a forward pass of its own
MIN_SAVED = 256  # tokens that a group's prompts need not compute


def shared_beginnings(prompts: Sequence[Sequence[int]], order: Sequence[int]) -> list[tuple[list[int], int]]:
    """Groups of prompts and how many first tokens each group shares, 0 where that is not worth it.

    order: indices of prompts; each group keeps it, and groups come by their first member. Every prompt has at least one token after
    what it shares. One level: a group's beginning is computed whole, also where another group begins in part like it.
    """
    arrays = {i: np.asarray(prompts[i]) for i in order}
    groups: list[tuple[list[int], int]] = []
    for i in sorted(order, key=prompts.__getitem__):  # prompts that begin alike are neighbours
        if groups:
            members, shared = groups[-1]
            now = min(shared, len(prompts[i]) - 1, alike(arrays[members[-1]], arrays[i]))
            if now >= MIN_SHARED and len(members) * now >= (len(members) - 1) * shared:
                members.append(i)
                groups[-1] = members, now
                continue
        groups.append(([i], len(prompts[i]) - 1))
    place = {i: at for at, i in enumerate(order)}
    worth = [(sorted(members, key=place.get), shared) for members, shared in groups if (len(members) - 1) * shared >= MIN_SAVED]
    grouped = {i for members, _ in worth for i in members}
    alone = [i for i in order if i not in grouped]
    return sorted(worth + ([(alone, 0)] if alone else []), key=lambda group: place[group[0][0]])


def alike(a: np.ndarray, b: np.ndarray) -> int:
    """How many first entries are the same."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
