"""Decoding through a Hugging Face model's own forward: with the keys and values of its rows, or without any.

Shapes as in ``stages.decoding.kv_cache``.
"""

from __future__ import annotations

import copy
import inspect

import torch
from torch import nn

from stages.decoding.decoders import CannotStep, DecoderError, rope_refusal
from stages.decoding.kv_cache import Past, Prefilled, SlotKV
from stages.models.frozen import arithmetic, released
from stages.models.layers import windows_of
from stages.models.quantised import dense


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
