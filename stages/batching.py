"""From rows to padded tensors: items, token-budget micro-batches, shared prompts.

An :class:`Item` is what must stay together in one micro-batch: a prompt and its responses (one for supervised tuning,
two for a preference pair, G for an RL group). :func:`plan` cuts the items of one optimizer step into micro-batches by a
token budget over length-sorted items; :func:`collate` lays one micro-batch out in one of two ways with equal results:

``rows``  every response is a right-padded row of its own behind a copy of the prompt; attention is plainly causal.
``tree``  an item is one row ``prompt | response 1 | response 2 ...``; the prompt is computed once, a mask keeps the
          responses apart and positions restart behind the prompt.

Legend: B rows, T padded length, S responses, L longest response, N trained positions (flat).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Item:
    """A prompt with its responses.

    Attributes:
        row_id: the dataset row, named in errors about non-finite losses.
        prompt: shared prompt ids, possibly empty.
        responses: ids of each response.
        masks: 1 where a response token is a target. A response at position 0 of an empty prompt has no predictor, so its
            first mask value must be 0.
        extra: per-item values the objective reads (margins, weights, advantages, cached log-probs ...).
    """

    row_id: str
    prompt: np.ndarray
    responses: tuple[np.ndarray, ...]
    masks: tuple[np.ndarray, ...]
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        """Real tokens as a user counts them: each response with its prompt."""
        return len(self.responses) * len(self.prompt) + sum(map(len, self.responses))

    @property
    def n_targets(self) -> int:
        return int(sum(m.sum() for m in self.masks))


def make_item(row_id: str, prompt: Sequence[int], responses, masks, **extra) -> Item:
    """Item from plain lists; with an empty prompt the first token of a response is never a target."""
    prompt = np.asarray(prompt, dtype=np.int32)
    arrays = tuple(np.asarray(r, dtype=np.int32) for r in responses)
    mask_arrays = tuple(np.asarray(m, dtype=np.int8) for m in masks)
    if not len(prompt):
        mask_arrays = tuple(np.concatenate([np.zeros(1, np.int8), m[1:]]) if len(m) else m for m in mask_arrays)
    return Item(row_id, prompt, arrays, mask_arrays, extra)


@dataclass
class Batch:
    """One micro-batch on the device.

    ``src_N`` indexes the flattened ``[B*T]`` hidden states that predict ``target_N``; ``(seq_N, col_N)`` say which response
    and which of its tokens that is; ``last_S`` is the flat index of each response's last token.
    """

    items: list[Item]
    input_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor
    attention_B1TT: torch.Tensor | None
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


def row_cost(item: Item, layout: str) -> tuple[int, int]:
    """(rows, width) an item takes in a layout."""
    if layout == "tree":
        return 1, len(item.prompt) + sum(map(len, item.responses))
    return len(item.responses), len(item.prompt) + max((len(r) for r in item.responses), default=0)


def choose_layout(items: Sequence[Item]) -> str:
    """``tree`` where computing each prompt once saves a fifth of the tokens or more, else ``rows``."""
    plain = sum(i.n_tokens for i in items)
    shared = sum((len(i.responses) - 1) * len(i.prompt) for i in items)
    return "tree" if plain and shared >= 0.2 * plain else "rows"


def plan(items: Sequence[Item], max_tokens: int, layout: str) -> list[list[Item]]:
    """Micro-batches of at most ``max_tokens`` padded tokens (an item longer than that stands alone), shortest first."""
    groups: list[list[Item]] = []
    rows_in_group = 0
    for item in sorted(items, key=lambda i: row_cost(i, layout)[1]):
        rows, width = row_cost(item, layout)
        if groups and width * (rows_in_group + rows) <= max_tokens:
            groups[-1].append(item)
            rows_in_group += rows
        else:
            groups.append([item])
            rows_in_group = rows
    return groups


def collate(items: list[Item], layout: str, device: str = "cpu") -> Batch:
    """Tensors of one micro-batch; see the module's legend."""
    widths = [row_cost(i, layout) for i in items]
    n_rows, width = sum(r for r, _ in widths), max(w for _, w in widths)
    n_seqs = sum(len(i.responses) for i in items)
    longest = max((len(r) for i in items for r in i.responses), default=0)
    ids = np.zeros((n_rows, width), np.int64)
    positions = np.tile(np.arange(width), (n_rows, 1))
    segments = np.full((n_rows, width), -1, np.int32) if layout == "tree" else None
    mask = np.zeros((n_seqs, longest), bool)
    last = np.zeros(n_seqs, np.int64)
    sources, targets, seqs, cols = [], [], [], []
    row = seq = 0
    for item in items:
        n_prompt = len(item.prompt)
        cursor = n_prompt
        ids[row, :n_prompt] = item.prompt
        if segments is not None:
            segments[row, :n_prompt] = 0
        for k, (response, response_mask) in enumerate(zip(item.responses, item.masks)):
            if layout == "rows":
                ids[row, :n_prompt] = item.prompt
                cursor = n_prompt
            end = cursor + len(response)
            ids[row, cursor:end] = response
            positions[row, cursor:end] = np.arange(n_prompt, n_prompt + len(response))
            if segments is not None:
                segments[row, cursor:end] = k + 1
            at = np.flatnonzero(response_mask)
            before = np.where(at == 0, n_prompt - 1, cursor + at - 1)  # the first response token is predicted by the prompt
            sources.append(row * width + before)
            targets.append(response[at].astype(np.int64))
            seqs.append(np.full(len(at), seq))
            cols.append(at)
            mask[seq, at] = True
            last[seq] = row * width + end - 1
            seq += 1
            cursor = end
            if layout == "rows":
                row += 1
        if layout == "tree":
            row += 1

    def tensor(parts, dtype=torch.long):
        array = np.concatenate(parts) if isinstance(parts, list) else parts
        return torch.as_tensor(array, dtype=dtype).to(device)

    attention = None
    if segments is not None:
        seg = torch.as_tensor(segments).to(device)
        causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        attention = ((seg[:, None, :] == 0) | (seg[:, None, :] == seg[:, :, None])) & causal
        attention = attention[:, None]
    return Batch(items, tensor(ids), tensor(positions), attention, tensor(sources), tensor(targets), tensor(seqs),
                 tensor(cols), torch.as_tensor(mask).to(device), tensor(last))


@torch.inference_mode()
def per_response(items: Sequence[Item], max_tokens: int, device: str, compute: Callable[[Batch], Sequence]) -> list[list]:
    """``compute(batch)`` gives one value per response of a micro-batch; returns them per item, in the items' order.

    Same micro-batches and layouts as training, without gradients.
    """
    found: dict[int, list] = {}
    layout = choose_layout(items)
    for group in plan(items, max_tokens, layout):
        values = iter(compute(collate(group, layout, device)))
        found.update((id(item), [next(values) for _ in item.responses]) for item in group)
    return [found[id(item)] for item in items]
