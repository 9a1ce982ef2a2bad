"""Attention of a flat micro-batch on a GPU: one call of a fused kernel for all of its conversations.

Every part that attends by itself is a sequence: a conversation with one response; of one with several its prompt, and
each response behind the prompt, whose keys and values are copied for it (the prompt's queries are not). No mask is made
and nothing is computed between conversations or between responses. bfloat16 and float16 take FlashAttention 2, which
torch carries, float32 the memory-efficient kernel; backward is deterministic where torch is told so
(:mod:`stages.running.cuda`).

Shapes: U tokens of the micro-batch, S sequences, N keys of all of them (N = U where nothing is copied), H query heads,
K key/value heads, D head size.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass

import torch
from torch.autograd import Function

from stages.models import fused

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Copies:
    """Which tokens' keys the sequences hold: ``rows`` [N]; and where each token stands there: ``places[starts[u] :
    starts[u + 1]]``."""

    rows: torch.Tensor
    starts: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True)
class Sequences:
    """``queries`` and ``keys`` [S + 1] int32: where each sequence begins and ends; a sequence's queries are the last of
    its keys. ``longest``: (queries, keys). ``copies``: None where queries and keys are the same tokens."""

    queries: torch.Tensor
    keys: torch.Tensor
    longest: tuple[int, int]
    copies: Copies | None


def takes(device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None, cap: float | None) -> bool:
    """Whether there is a kernel that does it: on a GPU, without capped scores; for windows in half types only."""
    if device.type != "cuda" or cap is not None or head_dim > 256:
        return False
    if dtype in _HALF:
        there = head_dim % 8 == 0 and torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        there = dtype == torch.float32 and head_dim % 4 == 0 and window is None
    return there and holds(device, dtype, window is not None)


@functools.cache
def holds(device: torch.device, dtype: torch.dtype, windowed: bool) -> bool:
    """Whether the kernel gives values and gradients of attention as it is defined, tried once on a few tokens: torch
    promises nothing about functions whose names begin with an underscore.
    """
    window = 3 if windowed else None
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # that backward may be another one each time, where torch is told so
            plan = sequences([(3, (4, 2)), (0, (5,)), (6, ())], device)
            made = torch.sin(torch.arange(20 * 4 * 16, device=device) * 0.7).view(20, 4, 16).to(dtype)
            leaves = [made[:, :2].clone(), *(made[plan.copies.rows, k : k + 1].clone() for k in (2, 3))]
            for leaf in leaves:
                leaf.requires_grad_()
            pulls = torch.cos(torch.arange(20 * 2 * 16, device=device) * 0.3).view(20, 2, 16)
            found = [
                (out, *torch.autograd.grad((out.float() * pulls).sum(), leaves))
                for out in (attended(*leaves, plan, 0.5, window), _defined(*leaves, plan, 0.5, window))
            ]
            near = 2e-2 if dtype in _HALF else 1e-4
            good = all(torch.allclose(a.float(), b.float(), atol=near, rtol=near) for a, b in zip(*found))
            why = "it gives other numbers than attention's definition"
    except torch.OutOfMemoryError:  # says nothing of the kernel
        raise
    except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
        good, why = False, str(error).strip()[:200]
    if not good:
        warnings.warn(
            f"torch {torch.__version__} has no attention over sequences of uneven length for {dtype} on this GPU"
            f" ({why}), so conversations attend one by one, which takes longer.",
            stacklevel=2,
        )
    return good


def _defined(q, k, v, plan: Sequences, scale: float, window: int | None):
    """:func:`attended` by its definition, in float32."""
    outs = []
    for a, b, c, d in zip(*(x.tolist()[i:] for x in (plan.queries, plan.keys) for i in (0, 1))):
        asked, own, values = (x.float().transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        at = torch.arange(d - c, device=q.device)
        far = at[d - c - (b - a) :, None] - at
        open_ = (far >= 0) & (far < (d - c if window is None else window))
        outs.append(((asked @ own.mT * scale).masked_fill(~open_, float("-inf")).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(outs)


def sequences(segments, device) -> Sequences:
    """Of a micro-batch's (prompt length, response lengths), in the tokens' order."""
    queries, keys, rows, copied, at = [], [], [], False, 0
    for prompt, responses in segments:
        responses = [r for r in responses if r]
        if len(responses) < 2:
            length = prompt + sum(responses)
            if length:
                queries.append(length)
                keys.append(length)
                rows.append(range(at, at + length))
            at += length
            continue
        start, copied = at, copied or prompt > 0
        if prompt:
            queries.append(prompt)
            keys.append(prompt)
            rows.append(range(at, at + prompt))
            at += prompt
        for length in responses:
            queries.append(length)
            keys.append(prompt + length)
            rows += [range(start, start + prompt), range(at, at + length)]
            at += length
    bounds = [torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32) for lengths in (queries, keys)]
    copies = None
    if copied:
        every = torch.cat([torch.arange(part.start, part.stop) for part in rows])
        counts = torch.bincount(every, minlength=at)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        copies = Copies(*(t.to(device) for t in (every, starts, torch.argsort(every, stable=True))))
    return Sequences(*bounds, (max(queries, default=0), max(keys, default=0)), copies)


def attended(q, k, v, plan: Sequences, scale: float, window: int | None = None):
    """Causal attention within each sequence: q [U, H, D], k and v [N, K, D] -> [U, H, D]; ``window`` tokens at most
    (half types only). Differentiable.
    """
    if q.dtype in _HALF:
        return torch.ops.aten._flash_attention_forward(
            q, k, v, plan.queries, plan.keys, *plan.longest, 0.0, True, False, scale=scale,
            window_size_left=None if window is None else window - 1, window_size_right=None if window is None else 0,
        )[0]  # fmt: skip
    if q.shape[1] != k.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    grads = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    last = 2  # the last query sees all keys, the one before all but one ...
    return torch.ops.aten._efficient_attention_forward(
        q[None], k[None], v[None], None, plan.queries, plan.keys, *plan.longest, 0.0, last, grads, scale=scale
    )[0][0]  # fmt: skip


class Copied(Function):
    """x [U, n] -> its rows in the order of the sequences' keys, [N, n]; backward adds up a row's copies."""

    @staticmethod
    def forward(ctx, x, copies: Copies):
        ctx.copies = copies
        return x.index_select(0, copies.rows)

    @staticmethod
    def backward(ctx, grad):
        copies = ctx.copies
        if fused.on(grad):
            return fused.gathered(grad, copies.starts, copies.places), None
        return grad.new_zeros(len(copies.starts) - 1, grad.shape[1]).index_add_(0, copies.rows, grad), None
