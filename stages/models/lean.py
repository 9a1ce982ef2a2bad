"""The training forward of the families of `stages.models.layers` (Llama, Mistral, Qwen, Gemma, OLMo, Phi-3, Granite,
SmolLM3, Mixtral ...), over the Hugging Face model's own parameters.

`why_not` says whether it computes exactly a given model; `states` gives the last hidden states of a flat micro-batch.
Compared with the model's own forward:

* tokens are flat, without padding; a prompt shared by several responses is computed once, and in long groups responses
  are not multiplied with each other; attention runs over blocks of whole items, on a GPU in one call that knows where
  each begins (`stages.models.varlen`), so what else is in the micro-batch cannot change a number beyond the rounding of
  one dot product;
* each layer saves its input, q/k/v, the attention's output and gate/up, and recomputes norms and activations in
  backward, on the CPU chunk by chunk in the processor's cache, on a GPU in a kernel each (`stages.models.fused`);
* the last layer's MLP and the final norm run only on positions that are read;
* float64 is float64 throughout (the model's own norms round to float32), so invariance can be tested to 1e-12;
* LoRA products (peft) are taken apart: frozen weights get no gradient product;
* windows and capped scores go band by band (`stages.models.banded`), tokens of a mixture expert by expert
  (`stages.models.experts`).

Shapes: U tokens of the micro-batch, N positions read, M hidden size, H query heads, K key/value heads, D head size,
I intermediate size. Every function here has its backward written out and is checked against autograd by the tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from stages.models import banded, fused, varlen
from stages.models.dropout import Dropped
from stages.models.experts import Mixture, logits, mixed, routed
from stages.models.layers import (
    ACTIVATIONS,
    Family,
    Layer,
    embedding_scales,
    epsilon_of,
    family_of,
    gain_of,
    interleave,
    layers_of,
    odd_layers,
    rotary_tables,
    turned_rows,
    turns,
)
from stages.models.quantised import dense, is_quantised
from stages.models.quantised import product as multiplied

#: Tokens that go through a layer at a time on the CPU: few, so that elementwise work finds them in cache, but enough
#: for fast matrix products.
CHUNK = 1024
#: Tokens of short items that attend in one call, behind a mask, instead of one call each.
BLOCK = 256


def core_of(model) -> nn.Module:
    """The decoder stack (embedding, layers, norm) inside a causal LM, a sequence classifier or a peft wrapper of
    one.
    """
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    named = (getattr(model, name, None) for name in (getattr(model, "base_model_prefix", ""), "model") if name)
    return next((core for core in named if isinstance(core, nn.Module)), model)


def why_not(model) -> str | None:
    """None when `states` computes exactly this model's forward, else the reason it does not."""

    def refuses(linear) -> str | None:
        try:
            product(linear)
        except TypeError as error:
            return str(error)

    return odd_layers(core_of(model), refuses)


# -- linear layers, plain or with LoRA ---------------------------------------------------------------------------------

Product = tuple  # (weight [out, in], bias [out] | None, lora_A [r, in] | None, lora_B [out, r] | None, LoRA's scale)


def product(linear) -> Product:
    """What a linear layer computes: x W^T + b, and scale * (x A^T) B^T of its one active LoRA adapter.

    Raises:
        TypeError: another kind of layer, or an adapter this forward does not know (several at once, DoRA, dropout of
            another kind, bias in B).
    """
    if type(linear) is nn.Linear:
        return linear.weight, linear.bias, None, None, 1.0
    base = getattr(linear, "base_layer", None)
    if type(base) is not nn.Linear or not hasattr(linear, "lora_A"):
        raise TypeError(f"a {type(linear).__name__} in place of a linear layer")
    active = [a for a in linear.active_adapters if a in linear.lora_A]
    if linear.merged:
        raise TypeError("a merged adapter; unmerge it, or load the merged model")
    if not active:
        return base.weight, base.bias, None, None, 1.0
    # looked at where it is switched off, too: a model is computed by the same code with and without its adapter
    name = active[0]
    if len(active) > 1 or name in (getattr(linear, "lora_variant", None) or {}) or linear.lora_B[name].bias is not None:
        raise TypeError("several adapters at once, or a LoRA variant")
    if not isinstance(linear.lora_dropout[name], nn.Identity | Dropped) and linear.lora_dropout[name].p > 0:
        raise TypeError("LoRA dropout of another kind")
    if linear.disable_adapters:
        return base.weight, base.bias, None, None, 1.0
    return base.weight, base.bias, linear.lora_A[name].weight, linear.lora_B[name].weight, float(linear.scaling[name])


def parted(linears, sizes) -> list[Product]:
    """The products of linear layers that belong together (q, k and v; gate and up), also where one layer holds all of
    them, ``sizes`` rows each.
    """
    if len(linears) == len(sizes):
        return [product(linear) for linear in linears]
    weight, bias, a, b, scale = product(linears[0])
    rows = [(None,) * len(sizes) if t is None else t.split(sizes) for t in (weight, bias, b)]
    return [(w, add, a, up, scale) for w, add, up in zip(*rows)]


def dropped(linears, count: int, keys_U) -> tuple | None:
    """(keys_U, the dropout of each of ``count`` products of these layers); None outside of training steps or without
    dropout.
    """
    if keys_U is None:
        return None
    found = [
        (
            linear.lora_dropout[linear.active_adapters[0]]
            if hasattr(linear, "lora_dropout") and not linear.disable_adapters
            else None
        )
        for linear in linears
    ]
    found = [d if isinstance(d, Dropped) else None for d in found]
    return keys_U, found if len(found) == count else found * count


def _mask(drops: tuple | None, k: int, rows, x):
    """What the adapter of product k reads of x [u, in] is multiplied with; None: nothing."""
    return None if drops is None or drops[1][k] is None else drops[1][k].mask(drops[0][rows], x.shape[1], x.dtype)


def _flat(products) -> list:
    """The products' tensors as arguments of a Function, four each."""
    return [t for p in products for t in p[:4]]


def _cast(tensors, dtype) -> list[tuple]:
    """Flat tensors back to one (W, b, A, B) per product, in the type the matrix products run in."""
    cast = [None if t is None else dense(t).to(dtype) for t in tensors]
    return [tuple(cast[i : i + 4]) for i in range(0, len(cast), 4)]


def _multiply(x, part, scale: float, out=None, mask=None):
    """x [u, in] through one product -> [u, out]; ``mask`` [u, in] is the adapter's dropout."""
    weight, bias, a, b = part
    y = torch.addmm(bias, x, weight.t(), out=out) if bias is not None else torch.mm(x, weight.t(), out=out)
    return y if a is None else y.addmm_(torch.mm(x if mask is None else x * mask, a.t()), b.t(), alpha=scale)


class _Gradients:
    """Sums of weight gradients over chunks, for the tensors of some products that want one."""

    def __init__(self, tensors, wanted):
        self.like, self.wanted, self.sums = tensors, wanted, [None] * len(tensors)

    def add(self, i: int, left, right, alpha: float = 1.0) -> None:
        """sums[i] += alpha * left^T right."""
        if not self.wanted[i]:
            return
        if self.sums[i] is None:
            self.sums[i] = torch.mm(left.t(), right)
            if alpha != 1.0:
                self.sums[i].mul_(alpha)
        else:
            self.sums[i].addmm_(left.t(), right, alpha=alpha)

    def back(self, k: int, grad, x, part, scale: float, into=None, mask=None):
        """Backward of product k at chunk x: adds its weight gradients, returns (into +) the gradient of x."""
        weight, bias, a, b = part
        i = 4 * k
        self.add(i, grad, x)
        if bias is not None and self.wanted[i + 1]:
            total = grad.sum(0)
            self.sums[i + 1] = total if self.sums[i + 1] is None else self.sums[i + 1] + total
        dx = torch.mm(grad, weight) if into is None else into.addmm_(grad, weight)
        if a is not None:
            inner, seen = torch.mm(grad, b), x if mask is None else x * mask
            self.add(i + 2, inner, seen, scale)
            if self.wanted[i + 3]:
                self.add(i + 3, grad, torch.mm(seen, a.t()), scale)
            if mask is None:
                dx.addmm_(inner, a, alpha=scale)
            else:
                dx.addcmul_(torch.mm(inner, a), mask, value=scale)
        return dx

    def done(self) -> list:
        return [None if s is None else s.to(t.dtype) for s, t in zip(self.sums, self.like)]


def _inverse_rms(x, eps: float):
    """1 / rms of x [..., M], [..., 1]."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()


def _normalised(x, gain, eps: float):
    """RMS norm of x [..., M] in x's own precision: (x / rms * gain, 1 / rms [..., 1])."""
    rstd = _inverse_rms(x, eps)
    return (x * rstd).mul_(gain), rstd


def _normalised_back(grad, hat, rstd, gain, grad_gain):
    """Gradient of `_normalised` with respect to x, where hat = x * rstd; adds the gain's gradient to `grad_gain` when
    it is not None.
    """
    both = grad * hat
    if grad_gain is not None:
        grad_gain += both.sum(0)
    shared = (
        (both @ gain).mul_(1.0 / hat.shape[-1])[..., None] if gain.ndim == 1 else both.mul_(gain).mean(-1, keepdim=True)
    )
    return (grad * gain).addcmul_(hat, shared, value=-1).mul_(rstd)


def _normed(x, gain, shape: Shape):
    """RMS norm of x [u, M] in the type of the products, and 1 / rms [u, 1]; without a gain x itself, and None."""
    if gain is None:
        return x.to(shape.low), None
    if fused.on(x):
        out = torch.empty_like(x, dtype=shape.low)
        return out, fused.norm(x, gain, shape.eps, out)
    normed, rstd = _normalised(x, gain, shape.eps)
    return normed.to(shape.low), rstd


def _normed_again(x, rstd, gain, shape: Shape):
    """(what :func:`_normed` gave, x / rms where backward reads it) from 1 / rms."""
    if gain is None:
        return x.to(shape.low), x
    if fused.on(x):
        out = torch.empty_like(x, dtype=shape.low)
        fused.norm(x, gain, shape.eps, out, rstd=rstd)
        return out, None
    hat = x * rstd
    return (hat * gain).to(shape.low), hat


def _normed_back(grad, x, hat, rstd, gain, grad_gain, out, add=None):
    """Gradient of :func:`_normed` with respect to x, plus ``add``, into ``out``; the gain's is added to ``grad_gain``
    where that is not None."""
    if gain is not None and fused.on(x):
        fused.norm_back(grad, x, rstd, gain, out, sums=grad_gain, add=add)
        return out
    if gain is not None:
        grad = _normalised_back(grad.to(x.dtype), hat, rstd, gain, grad_gain)
    return out.copy_(grad) if add is None else torch.add(add, grad, out=out)


def _chunks(n: int, device) -> list[slice]:
    size = CHUNK if device.type == "cpu" else max(n, 1)
    return [slice(i, min(n, i + size)) for i in range(0, n, size)]


@dataclass(frozen=True)
class Shape:
    """What the layers share: head counts, type of the matrix products, their epsilon; r and the MLP's activation
    (``stages.models.layers``), whether q and k are normalised over their whole projections, and how many rows of a head
    are put in pairs (``layers.turned_rows``)."""

    heads: int
    groups: int
    head_dim: int
    eps: float
    low: torch.dtype
    residual: float = 1.0
    act: str = "silu"
    whole: bool = False
    turned: int | None = None

    def paired(self, weight, heads: int, back: bool = False):
        return interleave(weight, heads, back, self.turned)

    def activate(self, gate):
        return F.silu(gate) if self.act == "silu" else F.gelu(gate, approximate="tanh")

    def activate_back(self, grad, gate):
        return (
            torch.ops.aten.silu_backward(grad, gate)
            if self.act == "silu"
            else torch.ops.aten.gelu_backward(grad, gate, approximate="tanh")
        )

    def head_norms(self, q_gain, k_gain) -> list[tuple[slice, tuple, torch.Tensor]]:
        """What is normalised together of q and k [u, (H + K) D]: (columns, their shape, gains in pair order)."""
        a, b = self.heads * self.head_dim, (self.heads + self.groups) * self.head_dim
        if self.whole:
            return [
                (slice(0, a), (a,), self.paired(q_gain, self.heads)),
                (slice(a, b), (b - a,), self.paired(k_gain, self.groups)),
            ]
        return [(slice(0, b), (self.heads + self.groups, self.head_dim), _head_gains(q_gain, k_gain, self))]


class _Project(Function):
    """x [U, M] -> rotated q, k and plain v, [U, (H + 2K) D]: norm (None: there is none), three products, norms of q and
    k, rotation (None: there is none).
    """

    @staticmethod
    def forward(ctx, x, gain, q_gain, k_gain, turn, shape, scales, drops, *tensors):
        parts = _cast(tensors, shape.low)
        parts[0], parts[1] = _turned(parts[0], shape.heads, shape), _turned(parts[1], shape.groups, shape)
        a, b = shape.heads * shape.head_dim, (shape.heads + shape.groups) * shape.head_dim
        out = x.new_empty(x.shape[0], b + shape.groups * shape.head_dim, dtype=shape.low)
        head_norm = q_gain is not None
        raw = x.new_empty(x.shape[0], b, dtype=shape.low) if head_norm else None
        norms = shape.head_norms(q_gain, k_gain) if head_norm else ()
        rstd = x.new_empty(x.shape[0], 1) if gain is not None else None
        for rows in _chunks(x.shape[0], x.device):
            normed, found = _normed(x[rows], gain, shape)
            if gain is not None:
                rstd[rows] = found
            for k, (part, scale, to) in enumerate(zip(parts, scales, (slice(0, a), slice(a, b), slice(b, None)))):
                target = raw if head_norm and to.stop is not None else out
                _multiply(normed, part, scale, out=target[rows, to], mask=_mask(drops, k, rows, normed))
            for columns, parts_of, gains in norms:
                if fused.on(raw, x):
                    fused.norm(raw[rows, columns], gains, shape.eps, out[rows, columns])
                    continue
                heads = raw[rows, columns].unflatten(1, parts_of)
                out[rows, columns] = _normalised(heads.to(x.dtype), gains, shape.eps)[0].flatten(1).to(shape.low)
            if turn is not None:
                _rotate(out[rows, :b], turn[rows], x.dtype, out[rows, :b])
        ctx.save_for_backward(x, rstd, gain, q_gain, k_gain, turn, raw, *tensors)
        ctx.settings = shape, scales, drops
        return out

    @staticmethod
    def backward(ctx, grad):
        x, rstd, gain, q_gain, k_gain, turn, raw, *tensors = ctx.saved_tensors
        shape, scales, drops = ctx.settings
        parts = _cast(tensors, shape.low)
        parts[0], parts[1] = _turned(parts[0], shape.heads, shape), _turned(parts[1], shape.groups, shape)
        a, b = shape.heads * shape.head_dim, (shape.heads + shape.groups) * shape.head_dim
        wants = ctx.needs_input_grad
        sums = _Gradients(tensors, wants[8:])
        grad_x = torch.empty_like(x)
        grad_gain = torch.zeros_like(gain) if wants[1] else None
        norms = shape.head_norms(q_gain, k_gain) if raw is not None else ()
        grad_gains = [torch.zeros_like(gains) for _, _, gains in norms]
        for rows in _chunks(x.shape[0], x.device):
            normed, hat = _normed_again(x[rows], None if gain is None else rstd[rows], gain, shape)
            qk = grad[rows, :b] if turn is None else _rotated_back(grad[rows, :b], turn[rows], x.dtype)
            if raw is not None:
                parts_of_qk = []
                for (columns, parts_of, gains), grads in zip(norms, grad_gains):
                    if fused.on(raw, x):
                        given = raw[rows, columns]
                        known = fused.norm(given, gains, shape.eps, torch.empty_like(given))
                        found = torch.empty_like(given, memory_format=torch.contiguous_format)
                        fused.norm_back(qk[:, columns], given, known, gains, found, sums=grads)
                        parts_of_qk.append(found)
                        continue
                    heads = raw[rows, columns].unflatten(1, parts_of).to(x.dtype)
                    incoming = qk[:, columns].reshape(heads.shape).to(x.dtype)
                    head_rstd = _inverse_rms(heads, shape.eps)
                    parts_of_qk.append(
                        _normalised_back(incoming, heads * head_rstd, head_rstd, gains, grads).flatten(1).to(shape.low)
                    )
                qk = parts_of_qk[0] if len(parts_of_qk) == 1 else torch.cat(parts_of_qk, 1)
            dx = None
            for k, incoming in enumerate((qk[:, :a], qk[:, a:], grad[rows, b:])):
                dx = sums.back(k, incoming, normed, parts[k], scales[k], into=dx, mask=_mask(drops, k, rows, normed))
            _normed_back(dx, x[rows], hat, None if gain is None else rstd[rows], gain, grad_gain, grad_x[rows])
        for k, count in ((0, shape.heads), (1, shape.groups)):  # back to the model's own order of rows
            for i in (4 * k, 4 * k + 1, 4 * k + 3):
                if sums.sums[i] is not None:
                    sums.sums[i] = shape.paired(sums.sums[i], count, back=True)
        q_grad = k_grad = None
        if raw is not None and shape.whole:
            q_grad, k_grad = (
                shape.paired(grads, count, back=True) for grads, count in zip(grad_gains, (shape.heads, shape.groups))
            )
        elif raw is not None:
            q_grad = shape.paired(grad_gains[0][: shape.heads].sum(0), 1, back=True) if wants[2] else None
            k_grad = shape.paired(grad_gains[0][shape.heads :].sum(0), 1, back=True) if wants[3] else None
        return (grad_x, grad_gain, q_grad, k_grad, None, None, None, None, *sums.done())


def _turned(part, heads: int, shape: Shape):
    """A q or k product with the rows of each head in pairs, so that the rotation is one complex product."""
    weight, bias, a, b = part
    return (
        shape.paired(weight, heads),
        None if bias is None else shape.paired(bias, heads),
        a,
        None if b is None else shape.paired(b, heads),
    )


def _head_gains(q_gain, k_gain, shape):
    """[H + K, D]: the head norms' gains in pair order."""
    return torch.cat(
        [shape.paired(q_gain, 1).expand(shape.heads, -1), shape.paired(k_gain, 1).expand(shape.groups, -1)]
    )


def _rotated(qk, turn, wide: torch.dtype):
    """q and k [u, (H + K) D] in pairs, times turn [u, 1, D / 2] complex, in their own type: a new tensor."""
    pairs = torch.view_as_complex(qk.to(wide).unflatten(1, (-1, turn.shape[-1], 2)))
    return torch.view_as_real(pairs * turn).flatten(1).to(qk.dtype)


def _rotate(qk, turn, wide: torch.dtype, out) -> None:
    """:func:`_rotated` into ``out``, which may be qk."""
    if fused.on(qk) and wide == torch.float32:
        fused.rotated(qk, turn, out)
    else:
        out.copy_(_rotated(qk, turn, wide))


def _rotated_back(grad, turn, wide: torch.dtype):
    """Gradient of :func:`_rotated` with respect to q and k."""
    if fused.on(grad) and wide == torch.float32:
        return fused.rotated(grad, turn, torch.empty_like(grad, memory_format=torch.contiguous_format), back=True)
    return _rotated(grad, turn.conj(), wide)


class _Finish(Function):
    """x [N, M], attended [N, H D] -> x + attended W_o, and on top of that the gated MLP of its norm; with the norms
    that follow each where there are any.
    """

    @staticmethod
    def forward(ctx, x, attended, after_gain, gain, last_gain, shape, scales, drops, *tensors):
        out_part, gate_part, up_part, down_part = _cast(tensors, shape.low)
        wide = gate_part[0].shape[0]
        middle, out = torch.empty_like(x), torch.empty_like(x)
        gate_up = x.new_empty(x.shape[0], 2 * wide, dtype=shape.low)
        rstd = x.new_empty(x.shape[0], 1) if gain is not None else None
        joined = _Kept.of(x, after_gain, shape)
        finished = _Kept.of(x, last_gain, shape)
        for rows in _chunks(x.shape[0], x.device):
            product = joined.normed(
                _multiply(attended[rows], out_part, scales[0], mask=_mask(drops, 0, rows, attended)), rows
            )
            h = _added(x[rows], product, shape.residual, middle[rows])
            normed, found = _normed(h, gain, shape)
            if gain is not None:
                rstd[rows] = found
            gate = _multiply(normed, gate_part, scales[1], out=gate_up[rows, :wide], mask=_mask(drops, 1, rows, normed))
            up = _multiply(normed, up_part, scales[2], out=gate_up[rows, wide:], mask=_mask(drops, 2, rows, normed))
            if fused.on(gate_up):
                inner = fused.activated(gate_up[rows], shape.act, shape.low)
            else:
                inner = shape.activate(gate).mul_(up)
            product = finished.normed(_multiply(inner, down_part, scales[3], mask=_mask(drops, 3, rows, inner)), rows)
            _added(h, product, shape.residual, out[rows])
        ctx.save_for_backward(attended, middle, rstd, gate_up, gain, *joined.tensors, *finished.tensors, *tensors)
        ctx.settings = shape, scales, drops
        return out

    @staticmethod
    def backward(ctx, grad):
        attended, middle, rstd, gate_up, gain, *more = ctx.saved_tensors
        shape, scales, drops = ctx.settings
        joined, finished, tensors = _Kept(shape, *more[:3]), _Kept(shape, *more[3:6]), more[6:]
        parts = _cast(tensors, shape.low)
        wide = gate_up.shape[1] // 2
        wants = ctx.needs_input_grad
        sums = _Gradients(tensors, wants[8:])
        grad_x, grad_attended = torch.empty_like(middle), torch.empty_like(attended)
        grad_after, grad_gain, grad_last = (
            torch.zeros_like(g) if wanted else None for g, wanted in zip((joined.gain, gain, finished.gain), wants[2:5])
        )
        for rows in _chunks(middle.shape[0], middle.device):
            upper = grad[rows]
            gate, up = gate_up[rows, :wide], gate_up[rows, wide:]
            alone = fused.on(gate_up)
            active = fused.activated(gate_up[rows], shape.act, shape.low) if alone else shape.activate(gate)
            inner = sums.back(
                3,
                finished.back(upper, rows, grad_last).to(shape.low),
                active if alone else active * up,
                parts[3],
                scales[3],
                mask=_mask(drops, 3, rows, active),
            )
            if alone:
                grad_gate, grad_up = fused.activated_back(inner, gate_up[rows], shape.act).chunk(2, 1)
            else:
                grad_up = active.mul_(inner)
                grad_gate = shape.activate_back(inner.mul_(up), gate)
            normed, hat = _normed_again(middle[rows], None if gain is None else rstd[rows], gain, shape)
            dx = sums.back(1, grad_gate, normed, parts[1], scales[1], mask=_mask(drops, 1, rows, normed))
            dx = sums.back(2, grad_up, normed, parts[2], scales[2], into=dx, mask=_mask(drops, 2, rows, normed))
            h = _normed_back(
                dx, middle[rows], hat, None if gain is None else rstd[rows], gain, grad_gain, grad_x[rows], add=upper
            )
            grad_attended[rows] = sums.back(
                0,
                joined.back(h, rows, grad_after).to(shape.low),
                attended[rows],
                parts[0],
                scales[0],
                mask=_mask(drops, 0, rows, attended),
            )
        return (grad_x, grad_attended, grad_after, grad_gain, grad_last, None, None, None, *sums.done())


def _added(x, y, scale: float, out):
    """x + scale * y [u, M] into ``out``, in x's type."""
    return fused.added(x, y, scale, out) if fused.on(x, y) else torch.add(x, y, alpha=scale, out=out)


class _Kept:
    """What a norm behind a product keeps for backward: the product [N, M] and its 1 / rms [N, 1]. Without a gain it
    does nothing.
    """

    def __init__(self, shape: Shape, gain, product, rstd):
        self.shape, self.gain, self.product, self.rstd = shape, gain, product, rstd

    @classmethod
    def of(cls, x, gain, shape: Shape) -> _Kept:
        return cls(
            shape,
            gain,
            *((None, None) if gain is None else (torch.empty_like(x, dtype=shape.low), x.new_empty(x.shape[0], 1))),
        )

    @property
    def tensors(self) -> tuple:
        return self.gain, self.product, self.rstd

    def normed(self, product, rows):
        if self.gain is None:
            return product
        self.product[rows] = product
        if fused.on(product, self.rstd):
            normed = torch.empty_like(product, dtype=self.rstd.dtype)
            self.rstd[rows] = fused.norm(product, self.gain, self.shape.eps, normed)
            return normed
        normed, self.rstd[rows] = _normalised(product.to(self.rstd.dtype), self.gain, self.shape.eps)
        return normed

    def back(self, grad, rows, grad_gain):
        """Gradient of r times the normed product with respect to the product."""
        if self.shape.residual != 1.0:
            grad = grad * self.shape.residual
        if self.gain is None:
            return grad
        if fused.on(grad, self.product):
            out = torch.empty_like(grad)
            fused.norm_back(grad, self.product[rows], self.rstd[rows], self.gain, out, sums=grad_gain)
            return out
        return _normalised_back(
            grad, self.product[rows].to(self.rstd.dtype) * self.rstd[rows], self.rstd[rows], self.gain, grad_gain
        )


# -- the stack ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Consecutive tokens that attend among themselves: causally, behind an additive mask [T, T], or as one prompt and
    its responses, where (almost) nothing is computed between responses: ``tree`` (prompt length, response lengths) on
    the CPU, ``bands`` (prompt length, response lengths) where a token sees a window only or scores are capped; on a GPU
    all tokens as ``sequences``, each of which sees ``window`` tokens at most."""

    length: int
    mask: torch.Tensor | None = None
    tree: tuple[int, tuple[int, ...]] | None = None
    bands: tuple[int, tuple[int, ...]] | None = None
    sequences: varlen.Sequences | None = None
    window: int | None = None


def blocks(
    segments,
    device,
    dtype,
    head_dim: int,
    window: int | None = None,
    cap: float | None = None,
    sequences: Callable[[], varlen.Sequences] | None = None,
) -> list[Block]:
    """Attention blocks of a flat micro-batch.

    segments: per item (prompt length, response lengths), in the tokens' order; a response sees its prompt and itself,
    ``window`` tokens at most; scores are capped at ``cap``. sequences: gives these segments' plan on a GPU.
    """
    if varlen.takes(device, dtype, head_dim, window, cap):
        total = sum(prompt + sum(responses) for prompt, responses in segments)
        plan = sequences or (lambda: varlen.sequences(segments, device))
        return [Block(total, sequences=plan(), window=window)] if total else []
    in_bands = window is not None or cap is not None
    groups: list[list] = []
    size = 0
    for item in segments:
        length = item[0] + sum(item[1])
        if groups and size + length <= BLOCK:
            groups[-1].append(item)
            size += length
        elif length:
            groups.append([item])
            size = length
    found = []
    for group in groups:
        length = sum(p + sum(r) for p, r in group)
        if in_bands and len(group) == 1:
            found.append(Block(length, bands=(group[0][0], tuple(group[0][1]))))
            continue
        if len(group) == 1 and (len(group[0][1]) == 1 or length == group[0][0]):
            found.append(Block(length))
            continue
        if len(group) == 1 and length > BLOCK and device.type != "cpu":
            found.append(Block(length, bands=(group[0][0], tuple(group[0][1]))))
            continue
        if (
            len(group) == 1
            and length > BLOCK
            and group[0][0]
            and 2 * _tree_size(*group[0]) < length * length
            and _keeps_sums()
        ):
            found.append(Block(length, tree=(group[0][0], tuple(r for r in group[0][1] if r))))
            continue
        owner, branch = [], []
        for i, (p, responses) in enumerate(group):
            owner += [i] * (p + sum(responses))
            branch += [0] * p + [k + 1 for k, r in enumerate(responses) for _ in range(r)]
        item, k = torch.tensor(owner, device=device), torch.tensor(branch, device=device)
        open_ = (item[:, None] == item) & ((k == 0) | (k[:, None] == k))
        if window is not None:
            at = torch.tensor(
                [i for p, responses in group for i in (*range(p), *(p + j for r in responses for j in range(r)))],
                device=device,
            )
            open_ &= at[:, None] - at < window
        found.append(
            Block(
                length,
                torch.zeros(length, length, dtype=dtype, device=device).masked_fill_(~open_.tril_(), float("-inf")),
            )
        )
    return found


def _tree_size(prompt: int, responses) -> int:
    """Pairs of tokens that attention over a prompt and its responses takes."""
    return prompt * (prompt + sum(responses)) + sum(r * r for r in responses)


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@functools.cache
# the first to ask may be computing without gradients, and everyone must get the same answer
@torch.inference_mode(False)
def _keeps_sums() -> bool:
    """Whether torch's CPU attention gives its log-sums and takes those of a larger sum in backward, as :class:`_Tree`
    needs (tried once).
    """
    try:
        q, k, v = (torch.sin(torch.arange(12.0) * f).view(1, 1, 6, 2) for f in (1, 2, 3))
        parts = [_flash(q, k[:, :, at], v[:, :, at], 0.0, False, scale=0.5) for at in (slice(0, 2), slice(2, 6))]
        out, sums = _joined(*parts)
        grads = [
            _flash_back(q, q, k[:, :, at], v[:, :, at], out, sums, 0.0, False, scale=0.5)
            for at in (slice(0, 2), slice(2, 6))
        ]
        with torch.enable_grad():
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]
            whole = torch.softmax(leaves[0] @ leaves[1].mT * 0.5, -1) @ leaves[2]
            wanted = torch.autograd.grad(whole, leaves, q)
        got = (grads[0][0] + grads[1][0], *(torch.cat([a, b], 2) for a, b in zip(grads[0][1:], grads[1][1:])))
        return torch.allclose(out, whole, atol=1e-5) and all(
            torch.allclose(a, b, atol=1e-5) for a, b in zip(got, wanted)
        )
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False


def _joined(one, other):
    """Attention over two sets of keys from that over each: outputs [..., T, D] with their log-sums [..., T] -> the same
    of both.
    """
    (a, la), (b, lb) = one, other
    both = torch.logaddexp(la, lb)
    return (
        torch.addcmul(a * (la - both).exp()[..., None].to(a.dtype), b, (lb - both).exp()[..., None].to(b.dtype)),
        both,
    )


class _Tree(Function):
    """Attention of one prompt and its responses: qkv [U, (H + 2K) D] -> [U, H D].

    A response's attention over the prompt and over itself are two sums joined by their log-sums, so the prompt is read
    once for all responses and no response is multiplied with another. Backward is that of each sum, given the joined
    output and log-sum.
    """

    @staticmethod
    def _parts(tree):
        """Runs of responses of equal length, which attend in one call: (first token, responses, length)."""
        at, runs = tree[0], []
        for length in tree[1]:
            if runs and runs[-1][2] == length:
                runs[-1][1] += 1
            else:
                runs.append([at, 1, length])
            at += length
        return runs

    @staticmethod
    def _heads(qkv, shape):
        """q, k, v as [1, H, U, D], keys and values repeated for their queries."""
        q, k, v = (
            t.transpose(0, 1)[None]
            for t in qkv.view(qkv.shape[0], -1, shape.head_dim).split([shape.heads, shape.groups, shape.groups], 1)
        )
        return (
            q,
            *(
                t if shape.heads == shape.groups else t.repeat_interleave(shape.heads // shape.groups, 1)
                for t in (k, v)
            ),
        )

    @staticmethod
    def _run(x, run):
        """[1, H, U, ...] -> [responses, H, length, ...] of one run, a view."""
        at, n, length = run
        return x[0, :, at : at + n * length].unflatten(1, (n, length)).transpose(0, 1)

    @staticmethod
    def forward(ctx, qkv, tree, shape, scale):
        p = tree[0]
        q, k, v = _Tree._heads(qkv, shape)
        out = qkv.new_empty(qkv.shape[0], shape.heads, shape.head_dim)
        view = out.transpose(0, 1)[None]
        sums = torch.empty(
            1, shape.heads, qkv.shape[0], dtype=torch.float64 if qkv.dtype == torch.float64 else torch.float32
        )
        view[:, :, :p], sums[:, :, :p] = _flash(q[:, :, :p], k[:, :, :p], v[:, :, :p], 0.0, True, scale=scale)
        over_prompt = _flash(q[:, :, p:], k[:, :, :p], v[:, :, :p], 0.0, False, scale=scale)
        for run in _Tree._parts(tree):
            own = _flash(*(_Tree._run(t, run) for t in (q, k, v)), 0.0, True, scale=scale)
            shifted = (run[0] - p, *run[1:])
            joined = _joined([_Tree._run(t, shifted) for t in over_prompt], own)
            _Tree._run(view, run).copy_(joined[0])
            _Tree._run(sums, run).copy_(joined[1])
        ctx.save_for_backward(qkv, out, sums)
        ctx.settings = tree, shape, scale
        return out.flatten(1)

    @staticmethod
    def backward(ctx, grad):
        qkv, out, sums = ctx.saved_tensors
        tree, shape, scale = ctx.settings
        p = tree[0]
        q, k, v = _Tree._heads(qkv, shape)
        grad, out = (
            t.view(len(qkv), shape.heads, shape.head_dim).transpose(0, 1)[None] for t in (grad.contiguous(), out)
        )
        gq, gk, gv = (torch.empty_like(q) for _ in range(3))
        prompt = slice(0, p)

        def back(queries, causal):
            return _flash_back(
                *(t[:, :, queries] for t in (grad, q)),
                k[:, :, prompt],
                v[:, :, prompt],
                out[:, :, queries],
                sums[:, :, queries],
                0.0,
                causal,
                scale=scale,
            )

        gq[:, :, :p], own_k, own_v = back(prompt, True)
        gq[:, :, p:], their_k, their_v = back(slice(p, None), False)
        torch.add(own_k, their_k, out=gk[:, :, :p])
        torch.add(own_v, their_v, out=gv[:, :, :p])
        for run in _Tree._parts(tree):
            more = _flash_back(*(_Tree._run(t, run) for t in (grad, q, k, v, out, sums)), 0.0, True, scale=scale)
            _Tree._run(gq, run).add_(more[0])
            _Tree._run(gk, run).copy_(more[1])
            _Tree._run(gv, run).copy_(more[2])
        if shape.heads != shape.groups:
            gk, gv = (t.unflatten(1, (shape.groups, -1)).sum(2) for t in (gk, gv))
        return torch.cat([t[0].transpose(0, 1) for t in (gq, gk, gv)], 1).flatten(1), None, None, None


def _attend(qkv, plan: list[Block], shape: Shape, layer: Layer):
    """qkv [U, (H + 2K) D] -> [U, H D]."""
    outs, scale = [], layer.scale
    for part, block in zip(qkv.split([b.length for b in plan]), plan):
        if block.tree is not None:
            outs.append(_Tree.apply(part, block.tree, shape, scale))
        elif block.sequences is not None:
            outs.append(_by_sequences(part, block, shape, scale))
        elif block.bands is not None:
            outs += _by_bands(part, *block.bands, shape, layer)
        else:
            outs.append(_sdpa(part, part, block.mask, shape, scale, layer.cap))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _split(queries, keys, shape: Shape):
    """q [1, H, t, D] of qkv [t, (H + 2K) D], k and v [1, H, T, D] of qkv [T, (H + 2K) D], repeated for their
    queries.
    """
    sizes = [shape.heads, shape.groups, shape.groups]
    q, k, v = (t.transpose(0, 1)[None] for t in keys.view(len(keys), -1, shape.head_dim).split(sizes, 1))
    if queries is not keys:
        q = queries.view(len(queries), -1, shape.head_dim).split(sizes, 1)[0].transpose(0, 1)[None]
    if shape.heads != shape.groups:
        k, v = (t.repeat_interleave(shape.heads // shape.groups, 1) for t in (k, v))
    return q, k, v


def _sdpa(queries, keys, mask, shape: Shape, scale: float, cap: float | None = None):
    """The queries of qkv [t, (H + 2K) D] over the keys and values of qkv [T, (H + 2K) D]: [t, H D], causally without a
    mask.
    """
    q, k, v = _split(queries, keys, shape)
    if cap is not None:
        out = banded.scores_to_values(q, k, v, mask, scale, cap)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out[0].transpose(0, 1).reshape(len(queries), -1)


def _by_bands(qkv, prompt: int, responses: tuple[int, ...], shape: Shape, layer: Layer) -> list:
    """Attention of one prompt and its responses, qkv [U, (H + 2K) D] -> parts of [U, H D]: each over what it sees of
    the prompt and of itself.
    """
    before, *parts = qkv.split([prompt, *responses])
    reach = before if layer.window is None else before[max(0, prompt - layer.window + 1) :]
    pairs = ([(before, before)] if prompt else []) + [
        (part, torch.cat([reach, part]) if len(reach) else part) for part in parts if len(part)
    ]
    return [
        banded.attended(*_split(queries, keys, shape), layer.window, layer.scale, layer.cap)[0]
        .transpose(0, 1)
        .reshape(len(queries), -1)
        for queries, keys in pairs
    ]


def _by_sequences(qkv, block: Block, shape: Shape, scale: float):
    """qkv [U, (H + 2K) D] -> [U, H D]. Copies of keys and values are made again for backward: kept, they would be as
    many prompts as there are responses, in every layer.
    """
    q, kv = qkv.split([shape.heads * shape.head_dim, 2 * shape.groups * shape.head_dim], 1)
    copies = block.sequences.copies

    def attended(q, kv):
        if copies is not None:
            kv = varlen.Copied.apply(kv, copies)
        k, v = kv.unflatten(1, (2 * shape.groups, shape.head_dim)).chunk(2, 1)
        q = q.unflatten(1, (shape.heads, shape.head_dim))
        return varlen.attended(q, k, v, block.sequences, scale, block.window).flatten(1)

    if copies is None or not (qkv.requires_grad and torch.is_grad_enabled()):
        return attended(q, kv)
    return checkpoint(attended, q, kv, use_reentrant=False, preserve_rng_state=False)


def states(
    model,
    ids_U,
    positions_U,
    segments,
    at_N=None,
    dtype: torch.dtype | None = None,
    recompute: bool = False,
    noise_UH=None,
    watch=None,
    weights_U=None,
    keys_U=None,
):
    """Last hidden states after the final norm, [N, M] at the flat positions `at_N` (all of them without it).

    Args:
        segments: see :func:`blocks`.
        dtype: type of the matrix products (bfloat16: residuals, norms and their gradients stay in the weights' type).
        recompute: keep only each layer's input and compute the rest again in backward.
        noise_UH: added to the tokens' embeddings (NEFTune).
        watch, weights_U: who is told what the routers choose (``stages.models.balance.Watch``), and how often each
            token counts there.
        keys_U: of the tokens' dropout masks (``stages.models.dropout``), None: there is none.
    """
    core, count = core_of(model), len(ids_U) if at_N is None else len(at_N)
    family, layers = family_of(core), layers_of(core)
    longest = max((prompt + max(responses, default=0) for prompt, responses in segments), default=0)
    if ids_U.device.type == "cuda":
        per_token = ids_U, positions_U, noise_UH, weights_U, keys_U
        ids_U, positions_U, noise_UH, weights_U, keys_U = (filled(t) for t in per_token)
        segments, at_N = [*segments, (len(ids_U) - sum(p + sum(r) for p, r in segments), ())], filled(at_N)
    # like all matrices the weight may be kept in a narrower type than the model's own, which is that of the norms
    # (stages.models.frozen)
    weight, config = core.embed_tokens.weight, core.config
    shape = Shape(
        config.num_attention_heads,
        config.num_key_value_heads,
        core.layers[0].self_attn.head_dim,
        epsilon_of(core.norm),
        dtype or core.norm.weight.dtype,
        layers[0].residual,
        ACTIVATIONS[getattr(config, family.activation)],
        family.head_norm == "whole",
        turned_rows(core),
    )
    turned = {
        name: _turns(
            positions_U, frequencies.to(weight.device, torch.float32), scale, shape.head_dim, core.norm.weight.dtype
        )
        for name, (frequencies, scale) in rotary_tables(core).items()
    }
    plans, sequences = {}, functools.cache(lambda: varlen.sequences(segments, weight.device))
    for layer in layers:
        key = _reach(layer, longest)
        if key not in plans:
            plans[key] = blocks(segments, weight.device, shape.low, shape.head_dim, *key, sequences)
    x = F.embedding(ids_U, weight)
    if x.dtype != torch.float64:
        x = x.float()
    inner, outer = embedding_scales(core)
    if inner is not None:
        x = x * inner.to(core.norm.weight.dtype)
    if noise_UH is not None:
        x = x + noise_UH.to(x.dtype)
    if outer != 1.0:
        x = x * outer
    last, loads = len(layers) - 1, []

    for i, (layer, module) in enumerate(zip(layers, core.layers)):
        at = at_N if i == last else None
        given = (layer, family, x, turned.get(layer.turn), plans[_reach(layer, longest)], shape, at)
        counted = weights_U if watch is not None and layer.experts is not None else None
        if recompute and torch.is_grad_enabled():
            x = checkpoint(_layer, *given, counted, keys_U, use_reentrant=False)
        else:
            x = _layer(*given, counted, keys_U)
        if counted is not None:
            x, *load = x
            loads.append(load)
    if watch is not None:
        watch.tell(loads)
    return F.rms_norm(x, x.shape[-1:], gain_of(core.norm, family).to(x.dtype), shape.eps)[:count]


def filled(x, rows: int | None = None):
    """x [n, ...] with zeros behind it up to ``rows``, else to one of 32 lengths between two powers of two; None stays.

    cuBLAS looks for the best product whenever it meets a new shape, which takes milliseconds each time, and without
    padding every micro-batch is a new shape.
    """
    if x is None:
        return None
    if rows is None:
        step = max(8, 1 << max(0, len(x).bit_length() - 6))
        rows = -(-len(x) // step) * step
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, rows - len(x))) if rows > len(x) else x


def _turns(positions_U, frequencies, scale: float, head_dim: int, dtype):
    """exp(i * position * frequency) * scale, [U, 1, D / 2] complex (angles in float32 as the models')."""
    turn = turns(positions_U.to(torch.float32)[:, None] * frequencies, scale, head_dim)[:, None]
    return turn.to(torch.complex128) if dtype == torch.float64 else turn


def _reach(layer: Layer, longest: int) -> tuple[int | None, float | None]:
    """(window, cap) of a layer, without a window that the longest conversation fits into."""
    return None if layer.window is None or layer.window >= longest else layer.window, layer.cap


def _layer(layer: Layer, family: Family, x, turn, plan, shape: Shape, at, weights_U=None, keys_U=None):
    """A layer's output; with weights_U, what :func:`stages.models.experts.routed` gives of all its tokens behind it."""
    into = parted(layer.qkv, [n * shape.head_dim for n in (shape.heads, shape.groups, shape.groups)])
    qkv = _Project.apply(
        x,
        *(gain_of(norm, family) for norm in (layer.before_attention, layer.q_norm, layer.k_norm)),
        turn,
        shape,
        [p[4] for p in into],
        dropped(layer.qkv, 3, keys_U),
        *_flat(into),
    )
    attended = _attend(qkv, plan, shape, layer)
    every = x, attended, keys_U
    if at is not None:
        x, attended, keys_U = x[at], attended[at], None if keys_U is None else keys_U[at]
    gains = [gain_of(norm, family) for norm in (layer.after_attention, layer.before_mlp, layer.after_mlp)]
    if layer.experts is not None:

        def routed_from(h):
            return F.rms_norm(h, h.shape[-1:], gains[1].to(x.dtype), shape.eps)

        mixture = Mixture.of(layer.router, layer.experts)

        def joined(x, attended, keys_U):
            drops = dropped((layer.out,), 1, keys_U)
            return x + _linear(attended, product(layer.out), shape.low, _mask(drops, 0, slice(None), attended)).to(
                x.dtype
            )

        h = joined(x, attended, keys_U)
        out = h + mixed(routed_from(h), mixture, shape.low)
        if weights_U is None:
            return out
        if at is not None:  # the router of the last layer sees all tokens, too
            h = joined(*every)
        return out, *routed(logits(routed_from(h).to(shape.low), mixture), mixture.k, weights_U)
    outof = [product(layer.out), *parted(layer.gate_up, [layer.down.in_features] * 2), product(layer.down)]
    drops = [
        dropped(linears, count, keys_U)
        for linears, count in (((layer.out,), 1), (layer.gate_up, 2), ((layer.down,), 1))
    ]
    drops = None if keys_U is None else (keys_U, [own for _, part in drops for own in part])
    return _Finish.apply(x, attended, *gains, shape, [p[4] for p in outof], drops, *_flat(outof))


def _linear(x, part: Product, low: torch.dtype, mask=None):
    """x [u, in] through a product -> [u, out], differentiable by autograd; ``mask`` [u, in] is the adapter's
    dropout.
    """
    bias, a, b = (None if t is None else t.to(low) for t in part[1:4])
    y = multiplied(x, part[0], bias) if is_quantised(part[0]) else F.linear(x, part[0].to(low), bias)
    return y if a is None else y + part[4] * F.linear(F.linear(x if mask is None else x * mask, a), b)
