"""What prompts begin with and need not compute: beginnings that they share, and rows that they continue.

* `shared_beginnings`: the examples of a few-shot evaluation, a long system message, the tools of an agent, a judge's
  rubric have the same keys and values in all prompts that begin with them; they are computed once.
* `KeptRows`: the turn of an agent or a debater continues a row whose keys and values were computed in the turns before.

`prefilled_groups` and `prefilled_continuing` prefill prompts so, batch by batch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Callable, Iterator, Sequence

import numpy as np
import torch

from stages.decoding.kv_cache import Past, Prefilled
from stages.decoding.replay import bucket
from stages.models.memory import KEPT_BYTES

PREFILL_TOKENS = 4096  # padded tokens of one prefill batch (a longer prompt goes alone)
# KV columns that one prefill batch attends to, a beginning that its rows share counted for each
PREFILL_COLUMNS = 16384
WIDTHS = 32  # on CUDA a batch is as wide as a multiple of this, and has as many rows as a decoding step may have
MIN_SHARED = 64  # tokens; a shorter beginning (a chat template's head) is not worth a forward pass of its own
MIN_SAVED = 256  # tokens that a group's prompts need not compute


def shared_beginnings(prompts: Sequence[Sequence[int]], order: Sequence[int]) -> list[tuple[list[int], int]]:
    """Groups of prompts and how many first tokens each group shares, 0 where that is not worth it.

    order: indices of prompts; each group keeps it, and groups come by their first member. Every prompt has at least one
    token after what it shares. One level: a group's beginning is computed whole, also where another group begins in
    part like it.
    """
    arrays = {i: np.asarray(prompts[i]) for i in order}
    groups: list[tuple[list[int], int]] = []
    for i in sorted(order, key=lambda i: list(prompts[i])):  # prompts that begin alike are neighbours
        if groups:
            members, shared = groups[-1]
            now = min(shared, len(prompts[i]) - 1, alike(arrays[members[-1]], arrays[i]))
            if now >= MIN_SHARED and len(members) * now >= (len(members) - 1) * shared:
                members.append(i)
                groups[-1] = members, now
                continue
        groups.append(([i], len(prompts[i]) - 1))
    place = {i: at for at, i in enumerate(order)}
    worth = [
        (sorted(members, key=place.get), shared)
        for members, shared in groups
        if (len(members) - 1) * shared >= MIN_SAVED
    ]
    grouped = {i for members, _ in worth for i in members}
    alone = [i for i in order if i not in grouped]
    return sorted(worth + ([(alone, 0)] if alone else []), key=lambda group: place[group[0][0]])


def alike(a: np.ndarray, b: np.ndarray) -> int:
    """How many first entries are the same."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


@dataclass(frozen=True, eq=False)
class Kept:
    """A finished row: its token ids, and per layer their keys and values [K, tokens, D]."""

    ids: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (*self.keys, *self.values))


class KeptRows:
    """Finished rows of one policy whose weights do not change meanwhile, the newest ones up to a number of bytes."""

    def __init__(self, limit: int | None = None):
        self.limit = KEPT_BYTES if limit is None else limit
        self.rows: list[Kept] = []  # by their ids, so that a prompt's neighbours are those that begin most like it
        self.age: dict[Kept, None] = {}  # the same, the oldest first
        self.bytes = 0

    def add(self, row: Kept) -> None:
        insort(self.rows, row, key=lambda one: one.ids)
        self.age[row] = None
        self.bytes += row.bytes
        while self.bytes > self.limit:
            self.drop(next(iter(self.age)))

    def drop(self, row: Kept) -> None:
        """Forget a row; one that is forgotten already is left alone."""
        if row in self.age:
            del self.age[row]
            self.bytes -= row.bytes
            at = bisect_left(self.rows, row.ids, key=lambda one: one.ids)
            while self.rows[at] is not row:
                at += 1
            del self.rows[at]

    def longest(self, prompt: Sequence[int]) -> tuple[Kept, int] | None:
        """The row that has most of a prompt's first tokens, and how many of them (not the last, whose logits are
        wanted); None where too few.
        """
        prompt = list(prompt)
        at = bisect_left(self.rows, prompt, key=lambda one: one.ids)
        own = np.asarray(prompt[:-1])
        found = [(alike(own, np.asarray(row.ids)), row) for row in self.rows[max(at - 1, 0) : at + 1]]
        known, row = max(found, key=lambda pair: pair[0], default=(0, None))
        return (row, known) if known >= MIN_SHARED else None


# ------------------------------------------------------------------------------------------------ prefill


def prefilled_groups(
    decoder, prompts, groups: Sequence[tuple[list[int], int]], most: int, send: Callable
) -> Iterator[tuple[list[int], Prefilled]]:
    """(indices, their prefill) of the prompts of :func:`shared_beginnings`' groups, computed as asked for.

    most: rows of a batch. send: numpy array -> tensor on the decoder's device.
    """
    for members, shared in groups:
        past = None
        if shared:
            first = _prefill(decoder, [prompts[members[0]][:shared]], None, send)
            past = Past(first.keys, first.values, [shared])
        while members:
            width = _width(decoder, max(len(prompts[i]) for i in members) - shared)
            room = max(1, min(PREFILL_TOKENS // width, PREFILL_COLUMNS // (width + shared)))
            rows = min(room, most)
            yield members[:rows], _prefill(decoder, [prompts[i][shared:] for i in members[:rows]], past, send, room)
            members = members[rows:]


def prefilled_continuing(
    decoder, prompts, continued: dict[int, tuple[Kept, int]], most: int, send: Callable
) -> Iterator[tuple[list[int], Prefilled]]:
    """The same of prompts that continue kept rows. continued: prompt -> its row, and for how many tokens."""
    left = list(continued)
    while left:
        take, width = [], 0
        longest = max(len(prompts[i]) for i in left)
        for i in left[:most]:
            width = max(width, len(prompts[i]) - continued[i][1])
            if take and ((len(take) + 1) * width > PREFILL_TOKENS or (len(take) + 1) * longest > PREFILL_COLUMNS):
                break
            take.append(i)
        left = left[len(take) :]
        past = Past.of([(row.keys, row.values, n) for row, n in map(continued.__getitem__, take)])
        yield take, _prefill(decoder, [prompts[i][n:] for i, n in zip(take, past.lengths)], past, send)


def _width(decoder, longest: int) -> int:
    """Columns of a prefill batch whose longest row has so many tokens: each new shape has cuBLAS look for products
    anew, for milliseconds.
    """
    return -(-longest // WIDTHS) * WIDTHS if decoder.replayable else longest


def _prefill(decoder, rows: Sequence[Sequence[int]], past: Past | None, send: Callable, room: int = 1) -> Prefilled:
    """Of these rows, behind which there may be others that are nobody's. room: for how many rows there is."""
    count = max(len(rows), bucket(len(rows), room) if decoder.replayable else 0)
    ids, lengths = np.zeros((count, _width(decoder, max(map(len, rows)))), np.int64), np.ones(count, np.int64)
    for j, row in enumerate(rows):
        ids[j, : len(row)], lengths[j] = row, len(row)
    return decoder.prefill(send(ids), send(lengths), past)
