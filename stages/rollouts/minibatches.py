"""How one pass over a rollout batch is cut into optimizer steps (OFFPOL-LOOP)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stages.batching import Item


def minibatch(items: Sequence[Item], unit: str, n: int, k: int, rng: np.random.Generator) -> list[Item]:
    """Part ``k`` of ``n`` of the items, shuffled by ``rng`` (the same one for all parts of a pass) and dealt out.

    unit: ``prompt``: whole groups. ``sequence``: trained completions, whatever their group. ``token``: trained tokens;
    a token keeps its context, and those of its completion that belong to other parts are masked. A part without
    anything is one item that trains nothing.
    """
    if unit == "prompt":
        return [items[i] for i in rng.permutation(len(items))[k::n]]
    masks = [[np.zeros_like(m) for m in item.masks] for item in items]
    if unit == "sequence":
        live = [(i, r, slice(None)) for i, item in enumerate(items) for r, m in enumerate(item.masks) if m.any()]
    else:
        live = [(i, r, t) for i, item in enumerate(items) for r, m in enumerate(item.masks) for t in np.flatnonzero(m)]
    for j in rng.permutation(len(live))[k::n]:
        i, r, t = live[j]
        masks[i][r][t] = items[i].masks[r][t]
    out = []
    for item, own in zip(items, masks):
        if at := [r for r, m in enumerate(own) if m.any()]:
            out.append(replace(item.part(at), masks=tuple(own[r] for r in at), whole=None))
    return out or [replace(items[0], masks=tuple(masks[0]), extra={**items[0].extra, "skip_forward": True})]
