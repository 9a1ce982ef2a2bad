"""From rows to tensors: items, token-budget micro-batches, shared prompts, no padding.

An :class:`Item` is a prompt and its responses (one for supervised tuning, two for a preference pair, G for an RL
group). :func:`cut` parts those that exceed a token budget, where their responses need not stay together; :func:`plan`
makes micro-batches of the items of one optimizer step by that budget; :func:`collate` lays one micro-batch out flat:
``prompt | response 1 | response 2 ...`` item after item, the prompt once, positions restarting behind it. Models that
need rows of equal length get them from :func:`pad`, in one of two forms with equal results:

``rows``  every response is a right-padded row of its own behind a copy of the prompt; attention is plainly causal.
``tree``  an item is one row; a mask keeps its responses apart.

Legend: U tokens, S responses, L longest response, N trained positions; padded: B rows, T their length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from stages.models import sharding
from stages.running import cuda, ranks
from stages.selection import pack_best_fit


class RowTooLarge(RuntimeError):
    """A row that does not fit into memory by itself; the text says what to change."""


@dataclass(frozen=True)
class Item:
    """A prompt with its responses.

    Attributes:
        row_id: the dataset row, named in errors about non-finite losses.
        prompt: shared prompt ids, possibly empty.
        responses: ids of each response.
        masks: 1 where a response token is a target. A response at position 0 of an empty prompt has no predictor, so
            its first mask value must be 0.
        extra: per-item values the objective reads (margins, weights, advantages, cached log-probs ...).
        by_response: names of the entries of ``extra`` that hold one value per response, which lets :func:`cut` part the
            responses of a long item; None: they stay together wherever the item goes (pairs, rankings).
        whole: the item that this one is a part of, None where it is whole.
        places: of the responses in that item.
    """

    row_id: str
    prompt: np.ndarray
    responses: tuple[np.ndarray, ...]
    masks: tuple[np.ndarray, ...]
    extra: dict[str, Any] = field(default_factory=dict)
    by_response: tuple[str, ...] | None = None
    whole: Item | None = field(default=None, repr=False)
    places: tuple[int, ...] | None = None

    def part(self, at: Sequence[int]) -> Item:
        """The same prompt with the responses at these places, and what of ``extra`` belongs to them."""
        extra = {
            name: [value[k] for k in at] if name in self.by_response else value for name, value in self.extra.items()
        }
        return replace(
            self,
            responses=tuple(self.responses[k] for k in at),
            masks=tuple(self.masks[k] for k in at),
            extra=extra,
            whole=self.whole or self,
            places=tuple(at) if self.places is None else tuple(self.places[k] for k in at),
        )

    @property
    def n_tokens(self) -> int:
        """Real tokens as a user counts them: each response with its prompt."""
        return len(self.responses) * len(self.prompt) + sum(map(len, self.responses))

    @property
    def n_targets(self) -> int:
        return int(sum(m.sum() for m in self.masks))


def make_item(
    row_id: str, prompt: Sequence[int], responses, masks, *, by_response: Sequence[str] | None = None, **extra
) -> Item:
    """Item from plain lists; with an empty prompt the first token of a response is never a target."""
    prompt = np.asarray(prompt, dtype=np.int32)
    arrays = tuple(np.asarray(r, dtype=np.int32) for r in responses)
    mask_arrays = tuple(np.asarray(m, dtype=np.int8) for m in masks)
    if not len(prompt):
        mask_arrays = tuple(np.concatenate([np.zeros(1, np.int8), m[1:]]) if len(m) else m for m in mask_arrays)
    return Item(row_id, prompt, arrays, mask_arrays, extra, None if by_response is None else tuple(by_response))


def row_weight(row: dict) -> float:
    """``weight`` of a dataset row, 1 where it has none; a weight of 0 counts nothing.

    Raises:
        ValueError: it is below 0 or no number, and would train the row away from its labels.
    """
    weight = 1.0 if row.get("weight") is None else float(row["weight"])
    if not 0.0 <= weight < math.inf:
        raise ValueError(
            f"row {row.get('row_id')} has the weight {weight:g}, and a weight is how much a row counts: write 0 or"
            " more, or leave the column out"
        )
    return weight


@dataclass
class Batch:
    """One micro-batch on the device.

    ``segments`` holds (prompt length, response lengths) of every item in the order of the U tokens. ``src_N`` are the
    tokens whose hidden states predict ``target_N``; ``(seq_N, col_N)`` say which response and which of its tokens that
    is; ``last_S`` is each response's last token.
    """

    items: list[Item]
    ids_U: torch.Tensor
    positions_U: torch.Tensor
    segments: list[tuple[int, list[int]]]
    src_N: torch.Tensor
    target_N: torch.Tensor
    seq_N: torch.Tensor
    col_N: torch.Tensor
    mask_SL: torch.Tensor
    last_S: torch.Tensor

    def padded(self, values_N: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """Scatter flat per-target values to ``[S, L]``; differentiable; positions outside the mask hold ``fill``."""
        out = values_N.new_full(self.mask_SL.shape, fill)
        return out.index_put((self.seq_N, self.col_N), values_N)

    def pad_lists(self, rows: Sequence[Sequence[float]], dtype=torch.float32) -> torch.Tensor:
        """Per-token lists (one per response) to ``[S, L]`` on the batch's device."""
        out = torch.zeros(self.mask_SL.shape, dtype=dtype)
        for s, row in enumerate(rows):
            if len(row):
                out[s, : len(row)] = torch.as_tensor(np.asarray(row), dtype=dtype)
        return out.to(self.mask_SL.device)


def size(item: Item) -> int:
    """Tokens an item takes in a micro-batch: its prompt once, its responses."""
    return len(item.prompt) + sum(map(len, item.responses))


#: Tokens that items take together as a model computes them: see :func:`together` and ``modeling.tokens_together``.
Cost = Callable[[Sequence[Item]], int]


def together(items: Sequence[Item]) -> int:
    """Tokens that items take together without padding."""
    return sum(map(size, items))


def padded_size(segments, form: str) -> int:
    """Tokens of the rows that :func:`pad` makes of items with these segments, padding counted."""
    if form == "tree":
        rows = [prompt + sum(responses) for prompt, responses in segments]
    else:
        rows = [prompt + response for prompt, responses in segments for response in responses or [0]]
    return len(rows) * max(rows, default=0)


def segments_of(items: Sequence[Item]) -> list[tuple[int, list[int]]]:
    """(prompt length, response lengths) of every item."""
    return [(len(item.prompt), [len(r) for r in item.responses]) for item in items]


def parts_of(
    item: Item, max_tokens: int, units: Sequence[tuple[int, ...]] | None = None, cost: Cost = together
) -> list[tuple[int, ...]]:
    """The places of the responses that go through a model together: all of them where the item takes ``max_tokens``
    tokens at most or must not be parted, else as few sets as first fit, longest first, makes of them, of about equal
    length.

    Args:
        units: sets of places that stay together, by default every response by itself; what is in none is left out where
            the item is parted. A unit that does not fit even alone stands alone.
        cost: of items with padding, where a model's rows have it: the sets are then those that first fit makes, longest
            first.
    """
    everyone = tuple(range(len(item.responses)))
    if item.by_response is None or cost([item]) <= max_tokens:
        return [everyone]
    units = [(k,) for k in everyone] if units is None else units
    if cost is not together:
        parts: list[tuple[int, ...]] = []
        for unit in sorted(units, key=lambda unit: max(len(item.responses[k]) for k in unit), reverse=True):
            at = next((n for n, part in enumerate(parts) if cost([item.part(part + unit)]) <= max_tokens), None)
            if at is None:
                parts.append(unit)
            else:
                parts[at] += unit
        return [tuple(sorted(part)) for part in parts]
    room = max(0, max_tokens - len(item.prompt))
    lengths = {unit: sum(len(item.responses[k]) for k in unit) for unit in units}
    order = sorted(units, key=lengths.get, reverse=True)
    short = [unit for unit in order if lengths[unit] <= room]

    def filled(count: int | None) -> list[list]:
        """[tokens, units] of every set: each unit into the emptiest of ``count`` sets, or without a count into the
        first with room for it.
        """
        sets = [[0, []] for _ in range(count or 0)]
        for unit in short:
            found = (
                min(sets, key=lambda one: one[0])
                if count
                else next((one for one in sets if one[0] + lengths[unit] <= room), None)
            )
            if found is None:
                sets.append(found := [0, []])
            found[0] += lengths[unit]
            found[1].append(unit)
        return sets

    packed = filled(None)
    even = filled(len(packed))
    if any(tokens > room for tokens, _ in even):
        even = packed
    return [
        tuple(sorted(k for unit in together for k in unit))
        for together in [[u] for u in order if lengths[u] > room] + [units for _, units in even]
    ]


def cut(
    items: Sequence[Item],
    max_tokens: int,
    units: Callable[[Item], Sequence[tuple[int, ...]]] | None = None,
    cost: Cost = together,
) -> list[Item]:
    """The items, those that take more than ``max_tokens`` tokens in parts that repeat their prompt (:func:`parts_of`)
    where their responses may be parted. What is summed over responses and divided by counts of the uncut items is the
    same."""
    found = []
    for item in items:
        parts = parts_of(
            item, max_tokens, units(item) if units is not None and cost([item]) > max_tokens else None, cost
        )
        found += [item if len(at) == len(item.responses) else item.part(at) for at in parts]
    return found


def plan(items: Sequence[Item], max_tokens: int, packing: str = "sorted", cost: Cost = together) -> list[list[Item]]:
    """Micro-batches of at most ``max_tokens`` tokens; an item longer than that, which :func:`cut` could not part,
    stands alone.

    ``sorted``: shortest items first, next to those of like length. ``best_fit``: longest first, each into the fullest
    micro-batch that has room, which makes fewer of them (``sft.pack``); where padding counts (``cost``, see
    :data:`Cost`) rows of like length belong together, and both are ``sorted``.
    """
    if packing == "best_fit" and cost is together:
        fitting = [item for item in items if size(item) <= max_tokens]
        return [[item] for item in items if size(item) > max_tokens] + [
            [fitting[i] for i in found] for found in pack_best_fit([size(item) for item in fitting], max_tokens)
        ]
    groups: list[list[Item]] = []
    used = 0
    for item in sorted(items, key=size):
        if groups and (used + size(item) if cost is together else cost([*groups[-1], item])) <= max_tokens:
            groups[-1].append(item)
            used += size(item)
        else:
            groups.append([item])
            used = size(item)
    return groups


def filled(groups: Sequence[Sequence[Item]], max_tokens: int) -> float:
    """How full micro-batches are: their real tokens over the room that they have, ``max_tokens`` each, or its own size
    where an item is longer (``sft.pack``).
    """
    sizes = [sum(map(size, group)) for group in groups]
    return sum(sizes) / max(sum(max(one, max_tokens) for one in sizes), 1)


def collate(items: list[Item], device: str = "cpu") -> Batch:
    """Tensors of one micro-batch; see the module's legend."""
    n_seqs = sum(len(i.responses) for i in items)
    longest = max((len(r) for i in items for r in i.responses), default=0)
    mask = np.zeros((n_seqs, longest), bool)
    last = np.zeros(n_seqs, np.int64)
    ids, positions, segments, sources, targets, seqs, cols = [], [], [], [], [], [], []
    cursor = seq = 0
    for item in items:
        n_prompt = len(item.prompt)
        ids.append(item.prompt)
        positions.append(np.arange(n_prompt))
        segments.append((n_prompt, [len(r) for r in item.responses]))
        prompt_end = cursor = cursor + n_prompt
        for response, response_mask in zip(item.responses, item.masks):
            ids.append(response)
            positions.append(np.arange(n_prompt, n_prompt + len(response)))
            at = np.flatnonzero(response_mask)
            # the first response token is predicted by the prompt
            sources.append(np.where(at == 0, prompt_end - 1, cursor + at - 1))
            targets.append(response[at])
            seqs.append(np.full(len(at), seq))
            cols.append(at)
            mask[seq, at] = True
            cursor += len(response)
            last[seq] = cursor - 1
            seq += 1

    def tensor(parts):
        array = np.concatenate(parts) if isinstance(parts, list) else parts
        return torch.as_tensor(array.astype(np.int64)).to(device)

    return Batch(
        items,
        tensor(ids),
        tensor(positions),
        segments,
        tensor(sources),
        tensor(targets),
        tensor(seqs),
        tensor(cols),
        torch.as_tensor(mask).to(device),
        tensor(last),
    )


@dataclass
class Padded:
    """A micro-batch as rows of equal length; ``where_U`` says at which flat ``[B*T]`` position each of its U tokens
    stands, ``source_BT`` which of the U a position holds (padding: any).

    ``attention_B1TT`` (bool, True = may attend) is None where attention is plainly causal.
    """

    ids_BT: torch.Tensor
    positions_BT: torch.Tensor
    attention_B1TT: torch.Tensor | None
    where_U: torch.Tensor
    source_BT: torch.Tensor


def choose_form(segments) -> str:
    """``tree`` where computing each prompt once saves a fifth of the tokens or more, else ``rows``."""
    plain = sum(len(responses) * prompt + sum(responses) for prompt, responses in segments)
    shared = sum((len(responses) - 1) * prompt for prompt, responses in segments)
    return "tree" if plain and shared >= 0.2 * plain else "rows"


def pad(batch: Batch, form: str | None = None) -> Padded:
    """Rows of equal length; ``form``: ``rows`` or ``tree``, by default the cheaper one."""
    form = form or choose_form(batch.segments)
    rows: list[list[tuple[int, int, int]]] = []  # per row: (first flat token, length, branch; 0 is the prompt)
    cursor = 0
    for prompt, responses in batch.segments:
        shared = [(cursor, prompt, 0)]
        cursor += prompt
        branches = []
        for k, length in enumerate(responses):
            branches.append((cursor, length, k + 1))
            cursor += length
        rows += [shared + branches] if form == "tree" else [shared + [branch] for branch in branches] or [shared]
    width = max(sum(n for _, n, _ in row) for row in rows)
    source = np.zeros((len(rows), width), np.int64)
    branch = np.full((len(rows), width), -1, np.int32)
    where = np.zeros(cursor, np.int64)
    for r, row in reversed(list(enumerate(rows))):  # of a prompt's copies the first row's counts
        at = 0
        for start, length, k in row:
            source[r, at : at + length] = np.arange(start, start + length)
            branch[r, at : at + length] = k
            where[start : start + length] = r * width + np.arange(at, at + length)
            at += length
    device = batch.ids_U.device
    source = torch.as_tensor(source).to(device)
    real = torch.as_tensor(branch >= 0).to(device)
    attention = None
    if form == "tree":
        k = torch.as_tensor(branch).to(device)
        causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        attention = (((k[:, None, :] == 0) | (k[:, None, :] == k[:, :, None])) & causal)[:, None]
    positions = torch.where(real, batch.positions_U[source], torch.arange(width, device=device))
    return Padded(
        torch.where(real, batch.ids_U[source], 0), positions, attention, torch.as_tensor(where).to(device), source
    )


def per_response(
    items: Sequence[Item], max_tokens: int, device: str, compute: Callable[[Batch], Sequence], model=None
) -> list[list]:
    """``compute(batch)`` gives one value per response of a micro-batch; returns them per item, in the items' order.

    Micro-batches as in training, without gradients. ``model`` is what compute reads: where it pads, padding counts;
    where it is sharded, every rank must call with the same items; each computes its share, and all get all values. A
    micro-batch that does not fit into memory is computed in halves.

    Raises:
        RowTooLarge: a single item does not fit, or one micro-batch of a sharded model.
    """
    from stages.models.modeling import tokens_together

    cost = together if model is None else tokens_together(model)
    parts = [parts_of(item, max_tokens, cost=cost) for item in items]
    pieces = [
        [item if len(at) == len(item.responses) else item.part(at) for at in places]
        for item, places in zip(items, parts)
    ]
    groups = plan([piece for own in pieces for piece in own], max_tokens, cost=cost)
    if sharding.root_of(model) is None:
        with torch.inference_mode():
            found = [_in_halves(group, device, compute) for group in groups]
    else:
        shares = ranks.shares(list(enumerate(groups)), lambda numbered: sum(map(size, numbered[1])))
        mine = shares[ranks.rank()]
        # every rank must gather the layers as often as the others
        company = [(None, groups[0])] * (max(map(len, shares)) - len(mine))
        known = {}
        for k, group in mine + company:
            try:
                known[k] = sharding.run(model, lambda: compute(collate(group, device)))
            except (MemoryError, RuntimeError) as error:  # the others wait inside a layer: nothing can be done again
                if not cuda.out_of_memory(error):
                    raise
                raise too_large(group, sharded=True) from error
        everyone = {k: values for part in ranks.gather(known) for k, values in part.items()}
        found = [everyone[k] for k in range(len(groups))]
    values_of: dict[int, list] = {}
    for group, given in zip(groups, found):
        values = iter(given)
        values_of.update((id(piece), [next(values) for _ in piece.responses]) for piece in group)
    return [_in_order(places, [values_of[id(piece)] for piece in own]) for places, own in zip(parts, pieces)]


def _in_halves(group: list[Item], device: str, compute: Callable[[Batch], Sequence]) -> list:
    """``compute`` of a micro-batch; of its halves, and theirs, where memory does not suffice."""
    try:
        return list(compute(collate(group, device)))
    except (MemoryError, RuntimeError) as error:
        if not cuda.out_of_memory(error):
            raise
        if len(group) == 1:
            raise too_large(group) from error
    cuda.release(device)
    half = len(group) // 2
    return [*_in_halves(group[:half], device, compute), *_in_halves(group[half:], device, compute)]


def too_large(group: Sequence[Item], sharded: bool = False) -> RowTooLarge:
    """What to do about items that a model cannot read together, without gradients."""
    tokens, rows = together(group), ", ".join(dict.fromkeys(item.row_id for item in group[:8]))
    return RowTooLarge(
        f"Memory does not suffice for a forward pass over {tokens:,} tokens (rows {rows}). "
        + (
            f"Write max_tokens_per_micro_batch={max(1, tokens // 2)}"
            if sharded and len(group) > 1
            else "A lower max_tokens_per_micro_batch cannot help, since this is one row. Write a lower max_length"
            " (max_prompt_length or max_completion_length where completions are sampled)"
        )
        + ", or leave other work off this device."
    )


def _in_order(places, values) -> list:
    """The values of an item's parts, response by response."""
    found = {k: value for at, given in zip(places, values) for k, value in zip(at, given)}
    return [found[k] for k in sorted(found)]
