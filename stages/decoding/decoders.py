"""Decoding engines under the sampler: slots of static KV, batched prefill, one-token steps.

Three engines behind one interface (`prefill`, `decode`), chosen by `make_decoder`:

* `LeanDecoder`: its own forward over the model's weights for the families of `stages.models.layers` with plain or
  fixed-table rotary embeddings. Fused qkv and gate/up weights, rotation as one complex product, in-place KV writes, KV
  views bounded by the longest live row; on a GPU kernels of its own (``stages.decoding.kernels``). Weights are read again
  at every `refresh()` (RL changes them).
* `GenericDecoder`: any Hugging Face decoder-only model with full and window attention, through its own forward with a
  slot cache and a 4D mask.
* `WholeDecoder`: any other (state-space, linear and chunked attention, convolutions, ALiBi): every token costs a
  forward of the whole rows.

Either computes in the model's own type, or in another (`dtype`): then from its own copy of the weights, which `refresh`
brings up to date.

Shapes: S slots, n live slots (always the first n), C columns of KV storage, L <= C columns in use, H query heads,
K key/value heads, G = H / K, D head size, B prompts prefilled together, T their padded length, V vocabulary.
A row's token at position p lives in column p of its slot.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from stages.decoding import kernels
from stages.models import banded, fused
from stages.models.adapters import merged
from stages.models.experts import Mixture, mixed
from stages.models.frozen import LOW, arithmetic, is_kept, released
from stages.models.layers import (
    ACTIVATIONS,
    FAMILIES,
    Family,
    Layer,
    embedding_scales,
    epsilon_of,
    family_of,
    gain_of,
    interleave,
    layers_of,
    logit_scaling,
    odd_layers,
    rope_limit,
    rotary_tables,
    turned_rows,
    turns,
    windows_of,
)
from stages.models.products import Packed, prefers_onednn
from stages.models.quantised import dense, is_quantised

#: Weights above this many bytes are not fused (fusing copies them); they run as separate products instead.
FUSE_LIMIT_BYTES = 2 << 30
_LEAN = {family.stack.removesuffix("Model").removesuffix("Text") + "ForCausalLM" for family in FAMILIES.values()}


class DecoderError(ValueError):
    """A model this sampler cannot decode; the message says what to use instead."""


class CannotStep(DecoderError):
    """A model that cannot be decoded token by token from kept keys and values; the message says why."""


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
        """Token ids [count, P], where these are kept in the place of keys (:class:`WholeDecoder`)."""
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


def max_positions(model) -> int | None:
    """Longest sequence the model has positions for, None when its config states none."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None)


def make_decoder(model, lean: bool | None = None, dtype: torch.dtype | None = None):
    """The engine for a model. lean: None picks, True insists (error with the reason), False takes the generic one.
    dtype: what it computes in, None for the weights' own type."""
    reason = why_not_lean(model) if lean is not False else "asked for the generic engine"
    if reason is None:
        return LeanDecoder(bare(model), dtype)
    if lean:
        raise DecoderError(
            f"the lean engine does not take this model ({reason}): write lean=None to let the sampler choose"
        )
    try:
        return GenericDecoder(bare(model), dtype)
    except CannotStep as error:
        return WholeDecoder(bare(model), dtype, str(error))


def bare(model):
    """The Hugging Face model inside a peft wrapper (its adapter layers stay in place)."""
    return model.get_base_model() if hasattr(model, "get_base_model") and hasattr(model, "peft_config") else model


# ------------------------------------------------------------------------------------------------ generic engine


class GenericDecoder:
    """Any Hugging Face decoder-only model through its own forward, with per-row columns and a 4D mask."""

    wants_blocks = attends_in_trunks = replayable = False

    def __init__(self, model, dtype: torch.dtype | None = None):
        self.source = self.model = model
        self.dtype = dtype
        config = model.config.get_text_config(decoder=True)
        self.window = None
        if getattr(model.config, "is_encoder_decoder", False):
            raise DecoderError(f"{type(model).__name__} is an encoder-decoder: the sampler needs a decoder-only model")
        accepted = inspect.signature(model.forward).parameters
        for name in ("position_ids", "past_key_values"):
            if name not in accepted:
                raise CannotStep(f"{type(model).__name__}.forward takes no {name}")
        self.refuse_length = rope_refusal(model)
        types = set(getattr(config, "layer_types", None) or ())
        if types - {"full_attention", "sliding_attention"}:
            raise CannotStep(
                f"{type(model).__name__} has layers {sorted(types)}, of which only full and sliding attention keep keys"
                " and values"
            )
        window = getattr(config, "sliding_window", None)
        if window is not None and (not types or "sliding_attention" in types):
            self.window = int(window)
        self.types = types if self.window is not None else set()
        others = [n for name, n in windows_of(config).items() if name != "sliding_window"]
        self.limit = min(others, default=None)
        self.keep_logits = "logits_to_keep" in accepted
        if not vars(model).get("_posttrain_decodes"):
            self._try()
            model._posttrain_decodes = True

    def refresh(self) -> None:
        """The model's own forward reads its parameters; in another type it is that of a copy as they are now."""
        if self.dtype not in (None, arithmetic(self.source)):
            self.model = copied_as(self.source, self.dtype)

    def check_length(self, total: int) -> None:
        self.refuse_length(total)
        if self.limit is not None and total > self.limit:
            raise DecoderError(
                f"{type(self.model).__name__} has windows of its own kind ({self.limit} tokens) and rows reach {total}"
                f" tokens: keep prompt + max_new_tokens <= {self.limit} or use the vLLM engine"
            )

    @torch.inference_mode()
    def _try(self) -> None:
        """Two rows of different length, two steps further, against the model's own forward of each by itself."""
        device, vocabulary = (
            self.source.get_input_embeddings().weight.device,
            self.source.get_input_embeddings().weight.shape[0],
        )
        rows = [[(7 * i + 3) % vocabulary for i in range(n)] for n in (5, 3)]
        ids = torch.tensor([row + [0] * (5 - len(row)) for row in rows], device=device)
        training = self.source.training
        self.source.eval()
        try:
            alone = torch.stack(
                [
                    self.source(input_ids=torch.tensor([row + [1, 2]], device=device), use_cache=False).logits[0, -1]
                    for row in rows
                ]
            ).float()
            prefilled = self.prefill(ids, torch.tensor([5, 3], device=device))
            kv = SlotKV(prefilled, 2, 7)
            for slot, row in enumerate(rows):
                kv.load(slot, prefilled, slot, len(row))
            for step, token in enumerate((1, 2)):
                found = self.decode(
                    kv,
                    torch.full((2,), token, device=device),
                    torch.tensor([5, 3], device=device) + step,
                    [(0, 2, 6 + step)],
                )
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise CannotStep(
                f"{type(self.source).__name__} takes no keys and values of rows of different length"
                f" ({str(error)[:200]})"
            ) from error
        finally:
            self.source.train(training)
        if (found - alone).norm() > (1e-3 if alone.dtype == self.source.dtype else 5e-2) * alone.norm():
            raise CannotStep(
                f"{type(self.source).__name__} gives rows of different length that are decoded together other log-probs"
                " than each by itself"
            )

    def _masks(self, full, sliding):
        """The attention mask as the model takes it: one, or one per kind of layer. sliding: within the window, None:
        there is none.
        """
        if sliding is None:
            return full
        return {"full_attention": full, "sliding_attention": sliding} if self.types else sliding

    def prefill(self, ids: torch.Tensor, lengths: torch.Tensor, past: Past | None = None) -> Prefilled:
        """ids [B, T] int64 right-padded, lengths [B] int64 -> their KV and last-token logits. past: what the rows begin
        with, neither in ids nor in the KV returned."""
        from transformers.cache_utils import DynamicCache

        (count, width), cache, known = ids.shape, DynamicCache(), 0
        positions, extra = torch.arange(width, device=ids.device).expand_as(ids), {}
        if past is not None:
            known = past.keys[0].shape[2]
            for layer in range(len(past.keys)):
                cache.update(*past.expanded(layer, count), layer)
            positions = past.positions(width, ids.device).expand(count, -1)

            def mask(window):
                seen = past.seen(width, ids.device, window).expand(count, -1, -1, -1)
                return torch.zeros(seen.shape, dtype=past.keys[0].dtype, device=ids.device).masked_fill_(
                    ~seen, torch.finfo(past.keys[0].dtype).min
                )

            extra["attention_mask"] = self._masks(mask(None), None if self.window is None else mask(self.window))
        last = lengths - 1
        if self.keep_logits:
            extra["logits_to_keep"], last = torch.unique(last, return_inverse=True)
        out = self.model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, **extra)
        logits = out.logits[torch.arange(count, device=ids.device), last].float()
        own = (lambda kv: kv[:, :, known:].clone()) if known else (lambda kv: kv)
        return Prefilled(
            [own(layer.keys) for layer in cache.layers], [own(layer.values) for layer in cache.layers], logits, past
        )

    def decode(self, kv: SlotKV, tokens: torch.Tensor, columns: torch.Tensor, bounds) -> torch.Tensor:
        """Append tokens [n] at columns [n] of slots 0..n-1; next-token logits [n, V] float32.

        bounds: runs of slots (first, end, columns in use); this engine takes their maximum."""
        n, longest = tokens.shape[0], max(width for _, _, width in bounds)
        rows = torch.arange(n, device=tokens.device)
        kv.mask[rows, columns] = 0
        mask, sliding = kv.mask[:n, None, None, :longest], None
        if self.window is not None:
            old = torch.arange(longest, device=tokens.device) <= (columns - self.window)[:, None]
            sliding = mask.masked_fill(old[:, None, None], kv.closed)
        out = self.model(
            input_ids=tokens[:, None],
            position_ids=columns[:, None],
            use_cache=True,
            past_key_values=_slot_cache(kv, rows, columns, longest),
            attention_mask=self._masks(mask, sliding),
        )
        return out.logits[:, -1].float()


class WholeDecoder:
    """Any causal model, without keys and values: what is kept of a row are its token ids, and every step computes the
    live rows whole, padded at their ends.

    A token's cost grows with its row's length; the log-probs are those of the model's own forward. ``reason``: why
    there is no faster engine.
    """

    wants_blocks = attends_in_trunks = replayable = False

    def __init__(self, model, dtype: torch.dtype | None, reason: str):
        self.source = self.model = model
        self.dtype, self.reason = dtype, reason
        accepted = inspect.signature(model.forward).parameters
        self.takes_positions, self.keep_logits = "position_ids" in accepted, "logits_to_keep" in accepted
        self.refuse_length = rope_refusal(model)

    def refresh(self) -> None:
        """As :meth:`GenericDecoder.refresh`."""
        if self.dtype not in (None, self.source.dtype):
            self.model = copied_as(self.source, self.dtype)

    def check_length(self, total: int) -> None:
        self.refuse_length(total)

    def _logits(self, ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] float32 at positions last [B] of rows ids [B, T]."""
        more = (
            {"position_ids": torch.arange(ids.shape[1], device=ids.device).expand_as(ids)}
            if self.takes_positions
            else {}
        )
        if self.keep_logits:
            more["logits_to_keep"], last = torch.unique(last, return_inverse=True)
        out = self.model(input_ids=ids, use_cache=False, **more)
        return out.logits[torch.arange(len(ids), device=ids.device), last].float()

    def prefill(self, ids: torch.Tensor, lengths: torch.Tensor, past: Past | None = None) -> Prefilled:
        """As :meth:`GenericDecoder.prefill`; the "keys" of its one layer are ids, [B, 1, T, 1] in float64, which holds
        them exactly.
        """
        whole, last = ids, lengths - 1
        if past is not None:
            known = torch.tensor(past.lengths, device=ids.device).expand(len(ids))
            before = past.expanded_ids(len(ids))
            at = torch.arange(before.shape[1] + ids.shape[1], device=ids.device)[None]
            own = ids.gather(1, (at - known[:, None]).clamp(0, ids.shape[1] - 1))
            whole = torch.where(
                at < known[:, None], before.gather(1, at.clamp(max=before.shape[1] - 1).expand(len(ids), -1)), own
            )
            last = known + lengths - 1
        return Prefilled([ids[:, None, :, None].double()], [], self._logits(whole, last), past)

    def decode(self, kv: SlotKV, tokens: torch.Tensor, columns: torch.Tensor, bounds) -> torch.Tensor:
        """As :meth:`GenericDecoder.decode`."""
        n, longest = tokens.shape[0], max(width for _, _, width in bounds)
        kv.keys[0][torch.arange(n, device=tokens.device), 0, columns, 0] = tokens.double()
        held = torch.arange(longest, device=tokens.device) <= columns[:, None]
        return self._logits(torch.where(held, kv.keys[0][:n, 0, :longest, 0].long(), 0), columns)


def rope_refusal(model) -> Callable[[int], None]:
    """What raises DecoderError for rows past the length up to which a model has one rotary table."""
    limit = rope_limit(model.config.get_text_config(decoder=True))

    def check(total: int) -> None:
        if limit is not None and total > limit[1]:
            raise DecoderError(
                f"{type(model).__name__} has {limit[0]} rotary embeddings, which past {limit[1]} tokens differ with the"
                f" longest row of a batch, and rows reach {total}: keep prompt + max_new_tokens <= {limit[1]}, or give"
                " the model's config a fixed rope_type such as yarn"
            )

    return check


def copied_as(model, dtype: torch.dtype):
    """The model with parameters of another type, each copied once; buffers (rotary frequencies) keep theirs."""
    memo = {id(p): nn.Parameter(dense(p.detach()).to(dtype), requires_grad=False) for p in model.parameters()}
    return released(copy.deepcopy(model, memo))


def _slot_cache(kv: SlotKV, rows: torch.Tensor, columns: torch.Tensor, longest: int):
    """A transformers cache whose update writes one token per row at its own column and returns the live view."""
    from transformers.cache_utils import Cache, CacheLayerMixin

    n = rows.shape[0]

    class SlotLayer(CacheLayerMixin):
        is_sliding = False

        def __init__(self, keys, values):
            super().__init__()
            self.keys, self.values, self.is_initialized = keys, values, True

        def lazy_initialization(self, key_states, value_states):
            return None

        def update(self, key_states, value_states, *args, **kwargs):
            self.keys[rows, :, columns] = key_states[:, :, 0]
            self.values[rows, :, columns] = value_states[:, :, 0]
            return self.keys[:n, :, :longest], self.values[:n, :, :longest]

        def get_mask_sizes(self, query_length):
            return longest, 0

        def get_seq_length(self):
            return longest - 1

        def get_max_length(self):
            return -1

    return Cache(layers=[SlotLayer(k, v) for k, v in zip(kv.keys, kv.values)])


# --------------------------------------------------------------------------------------------------- lean engine


def why_not_lean(model) -> str | None:
    """None when the lean engine computes exactly this model's forward, else the reason it does not."""
    model = bare(model)
    if type(model).__name__ not in _LEAN or not type(model).__module__.startswith("transformers."):
        return f"{type(model).__name__} is not one of {', '.join(sorted(_LEAN))}"
    if (
        len({p.dtype for p in model.parameters()} - ({LOW} if is_kept(model) else set())) != 1
        or len({p.device for p in model.parameters()}) != 1
    ):
        return "parameters of several dtypes or devices"
    if any(module._forward_hooks or module._forward_pre_hooks for module in (model, *model.lm_head.modules())):
        return "forward hooks"

    def refuses(linear) -> str | None:
        return None if linear_weight(linear) is not None else f"a {type(linear).__name__} in place of a linear layer"

    return odd_layers(model.model, refuses) or refuses(model.lm_head)


def linear_weight(linear) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """(weight [out, in], bias) of a linear layer, with active LoRA updates merged into a copy; None if it is
    neither.
    """
    if type(linear) is nn.Linear:
        return dense(linear.weight), linear.bias
    base = getattr(linear, "base_layer", None)
    if type(base) is not nn.Linear or not hasattr(linear, "get_delta_weight") or not hasattr(linear, "lora_A"):
        return None
    # than DoRA
    others = set(getattr(linear, "lora_variant", None) or {}) - set(
        getattr(linear, "lora_magnitude_vector", None) or {}
    )
    if any(a in others for a in linear.active_adapters) or any(
        getattr(b, "bias", None) is not None for b in linear.lora_B.values()
    ):
        return None
    if linear.disable_adapters or linear.merged:
        return (dense(base.weight), base.bias) if linear.disable_adapters != linear.merged else None
    return merged(linear, base.weight), base.bias


class _Product:
    """x -> x W^T + b for one or several stacked weights (concatenated outputs).

    On the CPU the stacked weight is kept as [in, out], with few rows the faster one of MKL's products, or laid out for
    oneDNN where that is faster still.
    """

    def __init__(self, parts, dtype: torch.dtype):
        weights = [w.to(dtype) for w, _ in parts]
        size = sum(w.numel() * w.element_size() for w in weights)
        biases = [b.to(dtype) if b is not None else w.new_zeros(w.shape[0]) for w, (_, b) in zip(weights, parts)]
        self.bias = torch.cat(biases) if any(b is not None for _, b in parts) else None
        self.turned = self.packed = None
        if size > FUSE_LIMIT_BYTES:
            self.weights, self.biases = weights, (biases if self.bias is not None else [None] * len(weights))
            return
        if weights[0].device.type == "cpu" and dtype == torch.float32 and prefers_onednn():
            self.packed = Packed(torch.cat(weights), self.bias)
            return
        if weights[0].device.type == "cpu" and dtype in (torch.float32, torch.float64):
            self.turned = torch.cat([w.detach().t() for w in weights], 1).contiguous()
            return
        self.weights, self.biases = [torch.cat(weights) if len(weights) > 1 else weights[0]], [self.bias]

    def tensors(self) -> list[torch.Tensor | None]:
        """What it computes from."""
        return [self.turned, self.bias] if self.turned is not None else [*self.weights, *self.biases]

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """The product, plus ``add`` (a residual, in the same pass on the CPU)."""
        if self.packed is not None:
            return self.packed(x, add)
        if self.turned is not None:
            bias = self.bias if add is None else add if self.bias is None else add + self.bias
            return torch.mm(x, self.turned) if bias is None else torch.addmm(bias, x, self.turned)
        if add is not None:
            return add + self(x)
        if len(self.weights) == 1:
            return F.linear(x, self.weights[0], self.biases[0])
        return torch.cat([F.linear(x, w, b) for w, b in zip(self.weights, self.biases)], -1)


class _Layer:
    """Fused weights of one decoder layer (``layers.Layer``) in the type that is computed in."""

    def __init__(
        self,
        layer: Layer,
        family: Family,
        act: str,
        heads: int,
        groups: int,
        head_dim: int,
        turned: int | None,
        dtype: torch.dtype,
        wide: torch.dtype,
    ):
        """wide: type that weights are changed in (scaled) before they are rounded to dtype."""
        paired = lambda x, count: interleave(x, count, turned=turned)
        self.act, self.window, self.cap, self.turn, self.residual = (
            act,
            layer.window,
            layer.cap,
            layer.turn,
            layer.residual,
        )
        q, k, v = _parted(layer.qkv, [heads * head_dim, groups * head_dim, groups * head_dim])
        pair = lambda wb, count: tuple(None if x is None else paired(x, count) for x in wb)
        # the scale of the scores is folded into the queries: their norm weight, or their projection
        if layer.q_norm is None:
            q = tuple(None if x is None else x.to(wide) * layer.scale for x in q)
        self.qkv = _Product([pair(q, heads), pair(k, groups), v], dtype)
        self.out = _Product([linear_weight(layer.out)], dtype)
        gain = lambda norm: None if norm is None else gain_of(norm, family).to(dtype)
        self.norm1, self.after1, self.norm2, self.after2 = map(
            gain, (layer.before_attention, layer.after_attention, layer.before_mlp, layer.after_mlp)
        )
        self.qk_norm = self.q_norm = self.k_norm = None
        if family.head_norm == "head":
            q_norm, k_norm = (
                paired(gain_of(layer.q_norm, family), 1) * layer.scale,
                paired(gain_of(layer.k_norm, family), 1),
            )
            self.qk_norm = torch.cat([q_norm.expand(heads, -1), k_norm.expand(groups, -1)]).to(dtype)
        elif family.head_norm == "whole":
            self.q_norm = (paired(gain_of(layer.q_norm, family), heads) * layer.scale).to(dtype)
            self.k_norm = paired(gain_of(layer.k_norm, family), groups).to(dtype)
        self.mixture = None
        if layer.experts is not None:
            self.mixture = Mixture.of(layer.router, layer.experts).to(dtype)
            return
        self.gate_up = _Product(_parted(layer.gate_up, [layer.down.in_features] * 2), dtype)
        self.down = _Product([linear_weight(layer.down)], dtype)

    def tensors(self) -> list[torch.Tensor | None]:
        """What it computes from."""
        products = (one for one in (self.qkv, self.out, self.gate_up, self.down) for one in one.tensors())
        norms = (self.norm1, self.after1, self.norm2, self.after2, self.qk_norm, self.q_norm, self.k_norm)
        return [*products, *norms]

    @property
    def settings(self) -> tuple:
        """What it computes besides."""
        return self.act, self.window, self.cap, self.turn, self.residual

    def activate(self, gate: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) if self.act == "silu" else F.gelu(gate, approximate="tanh")


def _parted(linears, sizes) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """:func:`linear_weight` of linear layers that belong together, also where one layer holds all of them, ``sizes``
    rows each.
    """
    if len(linears) == len(sizes):
        return [linear_weight(linear) for linear in linears]
    weight, bias = linear_weight(linears[0])
    return list(zip(weight.split(sizes), bias.split(sizes) if bias is not None else [None] * len(sizes)))


class _Ends:
    """Embedding, last norm and output layer, as :class:`_Layer`."""

    def __init__(self, model, family: Family, dtype: torch.dtype):
        core = model.model
        weight, head = core.embed_tokens.weight, linear_weight(model.lm_head)
        self.embedding = weight.to(dtype)
        self.norm, self.eps = gain_of(core.norm, family).to(dtype), epsilon_of(core.norm)
        inner, outer = embedding_scales(core)
        self.scales = ([] if inner is None else [inner.to(dtype)]) + ([] if outer == 1.0 else [outer])
        self.head = _Product([(self.embedding if head[0] is weight else head[0], head[1])], dtype)

    def tensors(self) -> list[torch.Tensor | None]:
        return [self.embedding, self.norm, *self.head.tensors(), *(x for x in self.scales if torch.is_tensor(x))]

    @property
    def settings(self) -> tuple:
        return self.eps, *(x for x in self.scales if not torch.is_tensor(x))


class _Weights:
    """What is computed from, part by part (:class:`_Ends` and every :class:`_Layer`), where it is brought up to date:
    in the tensors it has, as long as these are of the same shapes.
    """

    def __init__(self):
        self.parts: list = []
        self.borrowed: list[list[bool]] = []  # of each tensor whether its memory is the model's own
        self.renewed = True  # whether all tensors stayed where they were

    def renew(self, parts, model) -> list:
        """The parts to compute with. parts: iterable of parts as the model's weights are now."""
        # what is kept in 4 bits has no memory of its type, and is widened into new tensors
        own = {p.untyped_storage().data_ptr() for p in model.parameters() if not is_quantised(p)}
        old, was, self.parts, self.borrowed, self.renewed = self.parts, self.borrowed, [], [], True
        for at, new in enumerate(parts):
            borrowed = [x is not None and x.untyped_storage().data_ptr() in own for x in new.tensors()]
            if at < len(old) and self._copied(old[at], was[at], new, borrowed):
                new = old[at]
            else:
                self.renewed = False
            self.parts.append(new)
            self.borrowed.append(borrowed)
        self.renewed &= len(old) == len(self.parts)
        return self.parts

    @staticmethod
    def _copied(old, was: list[bool], new, borrowed: list[bool]) -> bool:
        """Whether the numbers of `new` are in the tensors of `old` now."""
        pairs = list(zip(old.tensors(), new.tensors()))
        same = (
            old.settings == new.settings
            and was == borrowed
            and all(
                (a is None) == (b is None)
                and (
                    a is None
                    or (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
                    # what is the model's is not written to: it has to be where it was
                    and (not lent or a.data_ptr() == b.data_ptr())
                )
                for (a, b), lent in zip(pairs, borrowed)
            )
        )
        if same:
            # an output layer may be the embedding
            for a, b in {id(a): (a, b) for (a, b), lent in zip(pairs, borrowed) if a is not None and not lent}.values():
                a.copy_(b)
        return same


class LeanDecoder:
    """The forward of a family of ``stages.models.layers`` over the model's own weights, with as few operations per step
    as torch allows.
    """

    def __init__(self, model, dtype: torch.dtype | None = None):
        self.model, self.asked = model, dtype
        config = model.config
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = model.model.layers[0].self_attn.head_dim
        self.layers: list[_Layer] = []
        self.kept: _Weights | None = None
        self.version = 0  # another one, when what is computed from lies elsewhere
        self.frequencies: dict[str, tuple[torch.Tensor, float]] = {}
        self.tables: dict[str, torch.Tensor] = {}
        self.positions = 0
        self.reach = {(layer.window, layer.cap) for layer in layers_of(model.model)}
        self.has_experts = any(hasattr(layer.mlp, "experts") for layer in model.model.layers)
        self.logit_scale, self.logit_cap = logit_scaling(config)
        self.longest: int | None = None  # of the rows to come
        self.floor: dict[float, torch.Tensor] = {}  # eps of a norm as a tensor

    fuses = True  # whether kernels of stages.decoding.kernels compute a step where they can (tests compare both)

    @property
    def fusible(self) -> bool:
        """Whether :meth:`decode_fused` computes this model, once it was refreshed."""
        return (
            self.fuses
            and not self.has_experts
            and fused.on(self.embedding)
            and not any(layer.cap is not None for layer in self.layers)
        )

    def continues(self, other) -> bool:
        """Whether it decodes what another decoder would, once its weights are refreshed."""
        return type(other) is LeanDecoder and (self.model, self.asked) == (other.model, other.asked)

    def check_length(self, total: int) -> None:
        """Any length up to the model's positions is fine; a window that all rows fit into is none."""
        rope_refusal(self.model)(total)
        self.longest = total

    def _window(self, window: int | None) -> int | None:
        return None if window is None or self.longest is not None and window >= self.longest else window

    def held_bytes(self) -> int:
        """Memory of the weights as they are kept here, without that of the model's own."""
        if self.kept is None:
            return 0
        parts = zip(self.kept.parts, self.kept.borrowed)
        own = {id(x): x for part, lent in parts for x, one in zip(part.tensors(), lent) if x is not None and not one}
        return sum(x.numel() * x.element_size() for x in own.values())

    @property
    def wants_blocks(self) -> bool:
        """On the CPU in full precision attention runs block by block, each over its own length; elsewhere in one
        call.
        """
        return self.device.type == "cpu" and self.dtype == self.wide

    @property
    def attends_in_trunks(self) -> bool:
        """Whether what several slots begin with need not be in each of them: where attention is composed here, and over
        all that stands before, as it is.
        """
        return self.wants_blocks and all(self._window(window) is None and cap is None for window, cap in self.reach)

    @property
    def replayable(self) -> bool:
        """Whether a step of fixed shapes may be captured and replayed (``stages.decoding.replay``): on CUDA, where
        launching a step's kernels takes longer than what they compute. How many tokens an expert gets is no fixed
        shape."""
        return self.device.type == "cuda" and not self.has_experts

    @torch.inference_mode()
    def refresh(self) -> None:
        """Read (and fuse) the weights as they are now. Where steps may be captured, what was read before is written
        over, so that they stay what they are; ``version`` says whether that went.
        """
        core = self.model.model
        wide = arithmetic(self.model)
        self.dtype, self.device = self.asked or wide, core.embed_tokens.weight.device
        family = family_of(core)
        act = ACTIVATIONS[getattr(core.config, family.activation)]

        def parts():
            yield _Ends(self.model, family, self.dtype)
            for layer in layers_of(core):
                one = _Layer(
                    layer, family, act, self.heads, self.groups, self.head_dim, turned_rows(core), self.dtype, wide
                )
                one.window = self._window(one.window)
                yield one

        if self.replayable:
            self.kept = self.kept or _Weights()
            (ends, *self.layers), renewed = self.kept.renew(parts(), self.model), self.kept.renewed
        else:
            (ends, *self.layers), self.kept, renewed = parts(), None, False
        self.windows = {layer.window for layer in self.layers}
        self.embedding, self.norm, self.eps = ends.embedding, ends.norm, ends.eps
        self.scales, self.head = ends.scales, ends.head
        self.wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        frequencies = {
            name: (frequencies.to(self.device, torch.float32), scale)
            for name, (frequencies, scale) in rotary_tables(core).items()
        }
        if not renewed or any(
            scale != self.frequencies[name][1] or not torch.equal(one, self.frequencies[name][0])
            for name, (one, scale) in frequencies.items()
        ):
            self.frequencies, self.tables, self.positions = frequencies, {}, 0
            self.version += 1

    def rotations(self, longest: int) -> dict[str, torch.Tensor]:
        """exp(i * position * frequency) * attention scaling, [>= longest, D / 2] complex (angles in float32 as HF), by
        the layers' kinds.
        """
        if self.positions < longest:
            self.positions = max(longest, 2 * self.positions)
            self.tables = {}
            for name, (frequencies, scale) in self.frequencies.items():
                angles = torch.arange(self.positions, device=self.device).float()[:, None] * frequencies
                table = turns(angles, scale, self.head_dim)
                self.tables[name] = table.to(torch.complex128) if self.wide == torch.float64 else table
        return self.tables

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        x = F.embedding(ids, self.embedding)
        for scale in self.scales:
            x = x * scale
        return x

    def _norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMS norm over the last dimension. torch composes it of many operations on the CPU; a norm, an addcmul and two
        products do.
        """
        if not self.wants_blocks:
            return (
                F.rms_norm(x, weight.shape[-1:], None, eps).mul_(weight)
                if weight.dim() > 1
                else F.rms_norm(x, weight.shape, weight, eps)
            )
        if eps not in self.floor:
            self.floor[eps] = torch.full((), eps, dtype=self.dtype)
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x.mul(torch.addcmul(self.floor[eps], size, size, value=1.0 / x.shape[-1]).rsqrt_()).mul_(weight)

    def _project(self, layer: _Layer, x: torch.Tensor, rotations: dict[str, torch.Tensor]):
        """x [m, hidden], rotations: [m, 1, D / 2] complex each -> q [m, H, D], k [m, K, D] (rotated), v [m, K, D]."""
        both = self.heads + self.groups
        qkv = layer.qkv(x if layer.norm1 is None else self._norm(x, layer.norm1, self.eps)).view(
            x.shape[0], -1, self.head_dim
        )
        qk, v = qkv[:, :both], qkv[:, both:]
        if layer.qk_norm is not None:
            qk = self._norm(qk, layer.qk_norm, self.eps)
        elif layer.q_norm is not None:
            parts = (
                self._norm(part.flatten(1), gain, self.eps)
                for part, gain in ((qk[:, : self.heads], layer.q_norm), (qk[:, self.heads :], layer.k_norm))
            )
            qk = torch.cat(list(parts), 1).view(x.shape[0], both, self.head_dim)
        rotation = rotations.get(layer.turn)
        if rotation is None:
            return qk[:, : self.heads], qk[:, self.heads :], v
        if self.dtype != self.wide:
            qk = qk.to(self.wide)
        turned = torch.view_as_complex(qk.unflatten(-1, (-1, 2))) * rotation
        qk = torch.view_as_real(turned).flatten(-2)
        if self.dtype != self.wide:
            qk = qk.to(self.dtype)
        return qk[:, : self.heads], qk[:, self.heads :], v

    def _finish(self, layer: _Layer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output projection and MLP with their residuals; x [m, hidden], attended [m, H * D]."""
        x = self._added(x, layer.out, attended, layer.after1, layer.residual)
        normed = x if layer.norm2 is None else self._norm(x, layer.norm2, self.eps)
        if layer.mixture is not None:
            return x + mixed(normed, layer.mixture, self.dtype)
        gate, up = layer.gate_up(normed).chunk(2, -1)
        return self._added(x, layer.down, layer.activate(gate).mul_(up), layer.after2, layer.residual)

    def _added(
        self, x: torch.Tensor, product: _Product, given: torch.Tensor, after: torch.Tensor | None, residual: float
    ) -> torch.Tensor:
        """x + residual * norm(product(given))."""
        if after is None and residual == 1.0:
            return product(given, x)
        found = product(given)
        return torch.add(x, found if after is None else self._norm(found, after, self.eps), alpha=residual)

    def prefill(self, ids: torch.Tensor, lengths: torch.Tensor, past: Past | None = None) -> Prefilled:
        """ids [B, T] int64 right-padded, lengths [B] int64 -> their KV and last-token logits. past: what the rows begin
        with, neither in ids nor in the KV returned."""
        count, width = ids.shape
        if past is None:
            masks, rotation = (
                {},
                {name: table[:width].repeat(count, 1)[:, None] for name, table in self.rotations(width).items()},
            )
        else:
            masks, positions = {}, past.positions(width, ids.device).expand(count, -1).reshape(-1)
            rotation = {
                name: table[positions][:, None] for name, table in self.rotations(max(past.lengths) + width).items()
            }
        x = self._embedded(ids.reshape(-1))
        keys, values = [], []
        for index, layer in enumerate(self.layers):
            q, k, v = (
                t.reshape(count, width, -1, self.head_dim).transpose(1, 2) for t in self._project(layer, x, rotation)
            )
            keys.append(k)
            values.append(v)
            if past is not None:
                k, v = (torch.cat([before, own], 2) for before, own in zip(past.expanded(index, count), (k, v)))
            if self.heads != self.groups:
                k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
            window = layer.window
            if past is not None:
                if window not in masks:
                    masks[window] = past.seen(width, ids.device, window)
                attended = banded.scores_to_values(q, k, v, masks[window], 1.0, layer.cap)
            elif layer.cap is not None or window is not None and window < width:
                attended = banded.attended(q, k, v, window, 1.0, layer.cap)
            else:
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
            x = self._finish(layer, x, attended.transpose(1, 2).reshape(count * width, -1))
        last = x.view(count, width, -1)[torch.arange(count, device=ids.device), lengths - 1]
        return Prefilled(keys, values, self._logits(last), past)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.headed(self._norm(x, self.norm, self.eps))

    def headed(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [m, V] float32."""
        logits = self.head(normed).float()
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return logits if not self.logit_cap else self.logit_cap * torch.tanh(logits / self.logit_cap)

    def decode(
        self,
        kv: SlotKV,
        tokens: torch.Tensor,
        columns: torch.Tensor,
        bounds,
        trunks: Trunks | None = None,
        table: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Append tokens [n] at columns [n] of slots 0..n-1; next-token logits [n, V] float32.

        bounds: runs of slots (first, end, columns in use) that attend together, each over its own columns. trunks:
        arranged for these slots. table: :meth:`rotations` to use, at least as long as the rows."""
        n, k_heads, d = tokens.shape[0], self.groups, self.head_dim
        longest = max(width for _, _, width in bounds)
        rows = torch.arange(n, device=tokens.device)
        kv.mask.view(-1).index_fill_(0, rows * kv.columns + columns, 0)
        open_ = [kv.mask[first:end, None, None, :width] for first, end, width in bounds]
        masks_of = {}
        for window in self.windows:
            masks_of[window] = (
                open_
                if window is None or window >= longest
                else [
                    mask.masked_fill(
                        torch.arange(mask.shape[-1], device=tokens.device)
                        <= (columns[first:end] - window)[:, None, None, None],
                        kv.closed,
                    )
                    for mask, (first, end, _) in zip(open_, bounds)
                ]
            )
        cells = (
            (rows * (k_heads * kv.columns) + columns)[:, None]
            + torch.arange(k_heads, device=tokens.device) * kv.columns
        ).view(-1)
        positions = columns if trunks is None else columns + trunks.known
        if table is None:
            table = self.rotations(longest if trunks is None else longest + trunks.columns)
        rotation = {name: one[positions][:, None] for name, one in table.items()}
        x = self._embedded(tokens)
        for index, (layer, keys, values) in enumerate(zip(self.layers, kv.keys, kv.values)):
            q, k, v = self._project(layer, x, rotation)
            keys.view(-1, d).index_copy_(0, cells, k.reshape(-1, d))
            values.view(-1, d).index_copy_(0, cells, v.reshape(-1, d))
            masks = masks_of[layer.window]
            if self.wants_blocks:
                q = q.reshape(n * k_heads, -1, d)
                keys, values = keys.view(-1, kv.columns, d), values.view(-1, kv.columns, d)
                before = None if trunks is None else trunks.scores(index, q.view(n, k_heads, -1, d))
                parts, far = [], []
                for (first, end, width), mask in zip(bounds, masks):
                    span = slice(first * k_heads, end * k_heads)
                    scores = torch.bmm(q[span], keys[span, :width].transpose(1, 2)).view(
                        end - first, k_heads, -1, width
                    )
                    scores = (scores if layer.cap is None else scores.div_(layer.cap).tanh_().mul_(layer.cap)).add_(
                        mask
                    )
                    weights = torch.softmax(
                        scores if before is None else torch.cat([before[first:end], scores], -1), -1
                    )
                    if before is not None:
                        far.append(weights[..., :-width])
                        weights = weights[..., -width:]
                    parts.append(torch.bmm(weights.reshape((end - first) * k_heads, -1, width), values[span, :width]))
                attended = torch.cat(parts) if len(parts) > 1 else parts[0]
                if before is not None:
                    attended = attended.view(n, k_heads, -1, d) + trunks.mix(
                        index, torch.cat(far) if len(far) > 1 else far[0]
                    )
            else:
                attended = banded.scores_to_values(
                    q.reshape(n, k_heads, -1, d),
                    keys[:n, :, :longest],
                    values[:n, :, :longest],
                    masks[0],
                    1.0,
                    layer.cap,
                )
            x = self._finish(layer, x, attended.reshape(n, -1))
        return self._logits(x)

    def decode_fused(
        self, kv: SlotKV, tokens: torch.Tensor, columns: torch.Tensor, table: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """What :meth:`decode` computes, by the kernels of ``stages.decoding.kernels``, up to the output layer, which
        :meth:`headed` is: [n, hidden]. Every slot attends to its own columns, whatever the others have, and the mask is
        neither read nor written. table: :meth:`rotations`.
        """
        x = self._embedded(tokens)
        norms = [layer.norm1 for layer in self.layers[1:]] + [self.norm]
        normed = x if self.layers[0].norm1 is None else self._norm(x, self.layers[0].norm1, self.eps)
        for layer, keys, values, norm in zip(self.layers, kv.keys, kv.values, norms):
            qkv = layer.qkv(normed)
            if layer.q_norm is not None:
                q, k, _ = qkv.split([layer.q_norm.shape[0], layer.k_norm.shape[0], layer.k_norm.shape[0]], -1)
                for part, gain in ((q, layer.q_norm), (k, layer.k_norm)):
                    part.copy_(self._norm(part, gain, self.eps))
            turn = table.get(layer.turn)
            kernels.turn_and_keep(qkv, layer.qk_norm, turn, columns, keys, values, self.heads, self.eps)
            attended = kernels.attend(qkv, keys, values, columns, self.heads, layer.window)
            x, normed = self._joined(x, layer.out(attended), layer.after1, layer.residual, layer.norm2)
            mixed_in = layer.down(fused.activated(layer.gate_up(normed), layer.act, normed.dtype))
            x, normed = self._joined(x, mixed_in, layer.after2, layer.residual, norm)
        return normed

    def _joined(self, x, more, after: torch.Tensor | None, residual: float, norm: torch.Tensor | None):
        """(x + residual * norm(more), its norm for what follows)."""
        if after is not None:
            more = self._norm(more, after, self.eps)
        return kernels.add_and_norm(x, more, norm, residual, self.eps)
