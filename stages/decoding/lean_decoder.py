"""The sampler's own forward over a model's weights, with as few operations per step as torch allows.

Shapes: m tokens, H query heads, K key/value heads, D head size, n live slots, V vocabulary; the rest as in
``stages.decoding.kv_cache``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from stages.decoding import kernels
from stages.decoding.decoders import bare, rope_refusal
from stages.decoding.kv_cache import Past, Prefilled, SlotKV, Trunks
from stages.decoding.lean_weights import EndWeights, KeptWeights, LayerWeights, Product, linear_weight
from stages.models import banded, fused
from stages.models.experts import mixed
from stages.models.frozen import LOW, arithmetic, is_kept
from stages.models.layers import (
    ACTIVATIONS,
    FAMILIES,
    family_of,
    layers_of,
    logit_scaling,
    odd_layers,
    rotary_tables,
    turned_rows,
    turns,
)

_LEAN = {family.stack.removesuffix("Model").removesuffix("Text") + "ForCausalLM" for family in FAMILIES.values()}


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


class LeanDecoder:
    """The forward of a family of ``stages.models.layers`` over the model's own weights, with as few operations per step
    as torch allows.
    """

    def __init__(self, model, dtype: torch.dtype | None = None):
        self.model, self.asked = model, dtype
        config = model.config
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = model.model.layers[0].self_attn.head_dim
        self.layers: list[LayerWeights] = []
        self.kept: KeptWeights | None = None
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
            yield EndWeights(self.model, family, self.dtype)
            for layer in layers_of(core):
                one = LayerWeights(
                    layer, family, act, self.heads, self.groups, self.head_dim, turned_rows(core), self.dtype, wide
                )
                one.window = self._window(one.window)
                yield one

        if self.replayable:
            self.kept = self.kept or KeptWeights()
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

    def _project(self, layer: LayerWeights, x: torch.Tensor, rotations: dict[str, torch.Tensor]):
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

    def _finish(self, layer: LayerWeights, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output projection and MLP with their residuals; x [m, hidden], attended [m, H * D]."""
        x = self._added(x, layer.out, attended, layer.after1, layer.residual)
        normed = x if layer.norm2 is None else self._norm(x, layer.norm2, self.eps)
        if layer.mixture is not None:
            return x + mixed(normed, layer.mixture, self.dtype)
        gate, up = layer.gate_up(normed).chunk(2, -1)
        return self._added(x, layer.down, layer.activate(gate).mul_(up), layer.after2, layer.residual)

    def _added(
        self, x: torch.Tensor, product: Product, given: torch.Tensor, after: torch.Tensor | None, residual: float
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
