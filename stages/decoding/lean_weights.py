"""The weights that :class:`stages.decoding.lean_decoder.LeanDecoder` computes from: fused, in the type that it computes
in, and read again where training has changed them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from stages.models.adapters import merged
from stages.models.experts import Mixture
from stages.models.layers import Family, Layer, embedding_scales, epsilon_of, gain_of, interleave
from stages.models.products import Packed, prefers_onednn
from stages.models.quantised import dense, is_quantised

#: Weights above this many bytes are not fused (fusing copies them); they run as separate products instead.
FUSE_LIMIT_BYTES = 2 << 30


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


class Product:
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


class LayerWeights:
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
        self.qkv = Product([pair(q, heads), pair(k, groups), v], dtype)
        self.out = Product([linear_weight(layer.out)], dtype)
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
        self.gate_up = Product(_parted(layer.gate_up, [layer.down.in_features] * 2), dtype)
        self.down = Product([linear_weight(layer.down)], dtype)

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


class EndWeights:
    """Embedding, last norm and output layer, as :class:`LayerWeights`."""

    def __init__(self, model, family: Family, dtype: torch.dtype):
        core = model.model
        weight, head = core.embed_tokens.weight, linear_weight(model.lm_head)
        self.embedding = weight.to(dtype)
        self.norm, self.eps = gain_of(core.norm, family).to(dtype), epsilon_of(core.norm)
        inner, outer = embedding_scales(core)
        self.scales = ([] if inner is None else [inner.to(dtype)]) + ([] if outer == 1.0 else [outer])
        self.head = Product([(self.embedding if head[0] is weight else head[0], head[1])], dtype)

    def tensors(self) -> list[torch.Tensor | None]:
        return [self.embedding, self.norm, *self.head.tensors(), *(x for x in self.scales if torch.is_tensor(x))]

    @property
    def settings(self) -> tuple:
        return self.eps, *(x for x in self.scales if not torch.is_tensor(x))


class KeptWeights:
    """What is computed from, part by part (:class:`EndWeights` and every :class:`LayerWeights`), where it is brought up to date:
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
