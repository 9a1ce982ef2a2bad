"""Keys and values of the rows that are decoded: of a prefilled batch, of what rows begin with, of slots and of trunks.

Shapes: S slots, n live slots (always the first n), C columns of KV storage, K key/value heads, G query heads of each, D
head size, B prompts prefilled together, T their padded length, P columns of what they begin with, V vocabulary. A row's
token at position p lives in column p of its slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass
class Past:
    """KV of the tokens with which the B rows of a prefill begin and which are not computed again: keys[l], values[l]
    [B, K, P, D], of row j the first lengths[j] columns. One row stands for any number of rows that begin alike."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    lengths: list[int]

    def stacked(self) -> torch.Tensor:
        """Keys and then values of all layers, [2 layers, B, K, P, D]."""
        return _stacked(self)

    @classmethod
    def of(cls, rows: list[tuple[list[torch.Tensor], list[torch.Tensor], int]]) -> Past:
        """From (keys [K, at least n, D] per layer, values, n) of every row."""
        longest = max(n for _, _, n in rows)

        def stacked(which: int) -> list[torch.Tensor]:
            return [
                torch.stack([F.pad(row[which][layer][:, : row[2]], (0, 0, 0, longest - row[2])) for row in rows])
                for layer in range(len(rows[0][which]))
            ]

        return cls(stacked(0), stacked(1), [n for _, _, n in rows])

    def expanded(self, layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [count, K, P, D] of a layer."""
        return self.keys[layer].expand(count, -1, -1, -1), self.values[layer].expand(count, -1, -1, -1)

    def expanded_ids(self, count: int) -> torch.Tensor:
        """Token ids [count, P], where these are kept in the place of keys (``model_decoders.WholeDecoder``)."""
        return self.keys[0][:, 0, :, 0].long().expand(count, -1)

    def positions(self, width: int, device) -> torch.Tensor:
        """Of so many tokens that follow, [B, width]."""
        return torch.tensor(self.lengths, device=device)[:, None] + torch.arange(width, device=device)

    def seen(self, width: int, device, window: int | None = None) -> torch.Tensor:
        """Which of the P + width columns each of so many tokens that follow sees, bool [B, 1, width, P + width].
        window: how many at most.
        """
        columns = self.keys[0].shape[2]
        at = self.positions(width, device)
        old = torch.arange(columns, device=device).expand(len(self.lengths), -1)
        # position of every column, past all where it is padding
        held = torch.cat([old.masked_fill(old >= at[:, :1], columns + width), at], 1)[:, None, None]
        own = at[:, None, :, None]
        return held <= own if window is None else (held <= own) & (held > own - window)


@dataclass
class Prefilled:
    """KV of B prompts and the logits of their last token. keys[l], values[l]: [B, K, T, D]; logits [B, V] float32.
    past: what they begin with, which is not among the T columns."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    logits: torch.Tensor
    past: Past | None = None

    def stacked(self) -> torch.Tensor:
        """Keys and then values of all layers, [2 layers, B, K, T, D]."""
        return _stacked(self)


def _stacked(kept: Past | Prefilled) -> torch.Tensor:
    """Made once; what it was made of is a view of it from then on."""
    found = getattr(kept, "whole", None)
    if found is None:
        found = kept.whole = torch.stack([*kept.keys, *kept.values])
        kept.keys, kept.values = list(found[: len(kept.keys)]), list(found[len(kept.keys) :])
    return found


def _fill(into, prefilled: Prefilled, at: int, row: int, length: int, skip: int = 0, kept=lambda x: x.keys + x.values):
    """Put `length` tokens of a prefilled row, those after its first `skip`, into the first columns of place `at`. into:
    keys and values [..., places, K, C, D], in the form that ``kept`` gives of those that were prefilled.
    """
    past, known = prefilled.past, 0
    if past is not None:
        source_at = row if len(past.lengths) > 1 else 0
        known = past.lengths[source_at]
        for target, source in zip(into, kept(past)):
            target[..., at, :, : max(known - skip, 0), :].copy_(source[..., source_at, :, skip:known, :])
    for target, source in zip(into, kept(prefilled)):
        target[..., at, :, max(known - skip, 0) : length, :].copy_(
            source[..., row, :, max(skip - known, 0) : length + skip - known, :]
        )


class Trunks:
    """What several slots begin with, kept once and attended to together: a prompt of which several completions are
    sampled, or a beginning of all prompts.

    A trunk has a seat; a slot that begins with it has a lane of that seat, and its own columns hold what comes after.
    Only for engines with ``attends_in_trunks``. Shapes: A seats and R lanes in use, P columns in use, n slots; keys and
    values [seats, K, columns, D] per layer.
    """

    def __init__(self, like: Prefilled, seats: int, columns: int):
        self.keys = [x.new_zeros(seats, x.shape[1], columns, x.shape[3]) for x in like.keys]
        self.values = [x.new_zeros(seats, x.shape[1], columns, x.shape[3]) for x in like.values]
        self.length = torch.zeros(seats, dtype=torch.int64, device=like.keys[0].device)
        self.closed = torch.finfo(like.keys[0].dtype).min

    def load(self, seat: int, prefilled: Prefilled, row: int, length: int) -> None:
        """The first `length` tokens of a prefilled row."""
        _fill((*self.keys, *self.values), prefilled, seat, row, length)
        self.length[seat] = length

    def arrange(self, seats: torch.Tensor, lanes: torch.Tensor) -> None:
        """Seats and lanes [n] of the live slots, for the products that follow."""
        self.seats, self.rows = int(seats.max()) + 1, int(lanes.max()) + 1
        self.place = seats * self.rows + lanes
        self.in_order = len(seats) == self.seats * self.rows and bool((self.place[1:] > self.place[:-1]).all())
        self.known = self.length[seats]
        self.columns = int(self.known.max())
        self.mask = torch.zeros(
            len(seats), 1, 1, self.columns, dtype=self.keys[0].dtype, device=seats.device
        ).masked_fill_(
            (torch.arange(self.columns, device=seats.device) >= self.known[:, None])[:, None, None], self.closed
        )

    def scores(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q [n, K, G, D] against the slots' own trunks, [n, K, G, P]; what is past a trunk's end is closed."""
        found = torch.bmm(self._seated(q), self._used(self.keys[layer]).transpose(1, 2))
        return self._unseated(found, q).add_(self.mask)

    def mix(self, layer: int, weights: torch.Tensor) -> torch.Tensor:
        """weights [n, K, G, P] of the trunks' values, [n, K, G, D]."""
        return self._unseated(torch.bmm(self._seated(weights), self._used(self.values[layer])), weights)

    def _used(self, x: torch.Tensor) -> torch.Tensor:
        return x[: self.seats, :, : self.columns].flatten(0, 1)

    def _seated(self, x: torch.Tensor) -> torch.Tensor:
        """[n, K, G, X] -> [A * K, R * G, X]; empty lanes hold zeros."""
        _, heads, group, width = x.shape
        full = (
            x
            if self.in_order
            else x.new_zeros(self.seats * self.rows, heads, group, width).index_copy_(0, self.place, x)
        )
        return (
            full.view(self.seats, self.rows, heads, group, width)
            .transpose(1, 2)
            .reshape(self.seats * heads, self.rows * group, width)
        )

    def _unseated(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The reverse, [n, K, G, X]."""
        _, heads, group, _ = like.shape
        full = (
            x.view(self.seats, heads, self.rows, group, -1)
            .transpose(1, 2)
            .reshape(self.seats * self.rows, heads, group, -1)
        )
        return full if self.in_order else full[self.place]


class SlotKV:
    """Static KV of S slots: per layer keys and values [S, K, C, D], and the additive mask [S, C] of every slot."""

    def __init__(self, like: Prefilled, slots: int, columns: int):
        self.slots, self.columns = slots, columns
        self.keys = [x.new_zeros(slots, x.shape[1], columns, x.shape[3]) for x in like.keys]
        self.values = [x.new_zeros(slots, x.shape[1], columns, x.shape[3]) for x in like.values]
        self.closed = torch.finfo(like.keys[0].dtype).min
        self.mask = torch.full((slots, columns), self.closed, dtype=like.keys[0].dtype, device=like.keys[0].device)

    def grow(self, columns: int) -> None:
        """More columns, the contents kept."""
        extra = columns - self.columns
        self.keys = [F.pad(x, (0, 0, 0, extra)) for x in self.keys]
        self.values = [F.pad(x, (0, 0, 0, extra)) for x in self.values]
        self.mask = F.pad(self.mask, (0, extra), value=self.closed)
        self.columns = columns

    def load(self, slot: int, prefilled: Prefilled, row: int, length: int, skip: int = 0) -> None:
        """Put `length` tokens of a prefilled prompt, those after its first `skip`, into a slot."""
        _fill((*self.keys, *self.values), prefilled, slot, row, length, skip)
        self.mask[slot, :length] = 0
        self.mask[slot, length:] = self.closed

    def copy(self, slot: int, length: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values [K, length, D] of a row, per layer."""
        return [x[slot, :, :length].clone() for x in self.keys], [x[slot, :, :length].clone() for x in self.values]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row of `length` tokens to another slot."""
        for x in (*self.keys, *self.values):
            x[target, :, :length].copy_(x[source, :, :length])
        self.mask[target].copy_(self.mask[source])


class WholeKV(SlotKV):
    """The same in one piece, [2 layers, S, K, C, D], so that a row comes and moves in one copy; for engines whose
    layers are alike. It outlives a run of the sampler (:meth:`fits`).
    """

    def __init__(self, like: Prefilled, slots: int, columns: int):
        heads, d = like.keys[0].shape[1], like.keys[0].shape[3]
        self.slots, self.closed = slots, torch.finfo(like.keys[0].dtype).min
        self._over(like.keys[0].new_zeros(2 * len(like.keys), slots, heads, columns, d))
        self.mask = self.whole.new_full((slots, columns), self.closed)

    def _over(self, whole: torch.Tensor) -> None:
        self.whole, self.columns = whole, whole.shape[3]
        self.keys, self.values = list(whole[: len(whole) // 2]), list(whole[len(whole) // 2 :])

    def fits(self, like: Prefilled, slots: int, columns: int) -> bool:
        """Whether so many rows of so many columns, like these, have room."""
        one = like.keys[0]
        return (
            self.slots >= slots
            and self.columns >= columns
            and self.whole.shape[::2] == (2 * len(like.keys), one.shape[1], one.shape[3])
            and self.whole.dtype == one.dtype
            and self.whole.device == one.device
        )

    def grow(self, columns: int) -> None:
        extra = columns - self.columns
        self._over(F.pad(self.whole, (0, 0, 0, extra)))
        self.mask = F.pad(self.mask, (0, extra), value=self.closed)

    def load(self, slot: int, prefilled: Prefilled, row: int, length: int, skip: int = 0) -> None:
        _fill([self.whole], prefilled, slot, row, length, skip, kept=lambda x: [x.stacked()])
        self.mask[slot, :length] = 0
        self.mask[slot, length:] = self.closed

    def move(self, source: int, target: int, length: int) -> None:
        self.whole[:, target, :, :length].copy_(self.whole[:, source, :, :length])
        self.mask[target].copy_(self.mask[source])
