"""``lora_dropout``: dropout on what a LoRA adapter reads (peft's meaning), with masks that are a function of (seed,
optimizer step, row, response, position, layer, feature).

So they do not depend on micro-batches, packing, ranks, resuming, or who computes the layers, and nothing is kept for
backward, which makes them again. A mask is there while a :class:`stages.training.Trainer` computes gradients and
nowhere else: references, old log-probs, validation and samplers have no dropout.

A prompt that several responses share is one row: its tokens have the same masks for all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from stages.running.randomness import seed_for

if TYPE_CHECKING:  # these read the layers' products, which read this
    from stages.batching import Batch, Padded

GAMMA = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64 (Steele, Lea and Flood 2014)


def _signed(n: int) -> int:
    n &= (1 << 64) - 1
    return n - (1 << 64) if n >> 63 else n


def mixed_numpy(z: np.ndarray) -> np.ndarray:
    """SplitMix64's mixing of uint64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND)
    return z ^ (z >> np.uint64(31))


def mixed_(z: torch.Tensor) -> torch.Tensor:
    """:func:`mixed_numpy` of an int64 tensor that is read as uint64, in place."""

    def shifted(bits: int) -> torch.Tensor:
        return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)

    z.bitwise_xor_(shifted(30)).mul_(_signed(FIRST))
    z.bitwise_xor_(shifted(27)).mul_(_signed(SECOND))
    return z.bitwise_xor_(shifted(31))


class Places:
    """Where the tokens stand that are computed: shared by the adapter's layers. ``step``: of the optimizer, None
    outside of training steps; ``keys``: a number for each token of the rows that a model's own code computes."""

    def __init__(self, seed: int):
        self.seed, self.step, self.keys = seed, None, None

    @contextlib.contextmanager
    def at_step(self, step: int) -> Iterator[None]:
        self.step = step
        try:
            yield
        finally:
            self.step = self.keys = None

    def of(self, batch: Batch) -> torch.Tensor:
        """The keys of a batch's tokens, int64 [U]."""
        parts = []
        for item in batch.items:
            start = np.uint64(seed_for(self.seed, "", "lora-dropout", self.step, item.row_id))
            parts.append(mixed_numpy(start + np.arange(len(item.prompt), dtype=np.uint64)))
            for k, response in zip(item.places or range(len(item.responses)), item.responses):
                with np.errstate(over="ignore"):
                    stream = mixed_numpy(np.array([start + np.uint64((k + 1) * GAMMA & (1 << 64) - 1)]))
                    parts.append(mixed_numpy(stream + np.arange(len(response), dtype=np.uint64)))
        return torch.as_tensor(np.concatenate(parts).view(np.int64)).to(batch.ids_U.device)

    def in_rows(self, batch: Batch, rows: Padded) -> None:
        """What follows computes these rows of the batch."""
        self.keys = self.of(batch)[rows.source_BT.flatten()]


class Dropped(nn.Module):
    """In the place of peft's dropout in one layer."""

    def __init__(self, p: float, key: int, places: Places):
        super().__init__()
        self.p, self.key, self.places = p, _signed(key), places

    def mask(self, keys_U: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        """0 or 1 / (1 - p), [U, width]."""
        features = torch.arange(width, device=keys_U.device).mul_(_signed(GAMMA))
        bits = mixed_((keys_U ^ self.key)[:, None] + features) >> 40 & (1 << 24) - 1
        return (bits >= round(self.p * (1 << 24))).to(dtype).mul_(1.0 / (1.0 - self.p))

    def forward(self, x):
        places = self.places
        if places.step is None or places.keys is None or not torch.is_grad_enabled():
            return x
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) != len(places.keys):
            raise RuntimeError(
                f"lora_dropout: a layer reads {len(flat)} tokens where {len(places.keys)} are computed; leave it out of"
                " lora_targets (lora_exclude), or write lora_dropout=0"
            )
        return (flat * self.mask(places.keys, flat.shape[1], x.dtype)).view_as(x)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def put_into(model, p: float, seed: int) -> None:
    """Replace the dropout of every layer that a LoRA adapter was put on."""
    places = Places(seed)
    for name, module in model.named_modules():
        held = getattr(module, "lora_dropout", None)
        for adapter in list(held) if isinstance(held, nn.ModuleDict) else ():
            if isinstance(held[adapter], nn.Dropout):
                held[adapter] = Dropped(p, seed_for(seed, "", "lora-dropout layer", name), places)
    _core(model)["_posttrain_places"] = places


def places_of(model) -> Places | None:
    """Of a model whose adapter has dropout."""
    return _core(model).get("_posttrain_places")


def active(model) -> Places | None:
    """:func:`places_of` in a training step."""
    places = places_of(model)
    return places if places is not None and places.step is not None and torch.is_grad_enabled() else None


def _core(model) -> dict:
    from stages.models.lean import core_of

    return core_of(model).__dict__
