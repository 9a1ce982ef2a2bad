"""Attention where a token sees a window of what stands before it (Mistral, Gemma, OLMo 3 ...), or where scores are
capped (Gemma 2).

The queries go in bands: a band's keys are those its window reaches, so a long conversation costs length x window, and
no mask is larger than a band's. Capped scores have no fused product in torch; a band of them is computed again in
backward, so nothing of size length x length is kept. Masks are made once.

Shapes: T queries are the last of U keys; H heads, K key/value heads, D head size.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

BAND = 512  # queries at a time at least; a quarter of the window where that is more, so that few keys are read in vain


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)  # whoever asks first, others may need it for backward
def seen(queries: int, keys: int, window: int | None, device) -> torch.Tensor | None:
    """Which of ``keys`` the last ``queries`` of them see, bool [queries, keys]: themselves and what stands before,
    ``window`` tokens at most. None: all keys.
    """
    if queries == 1 and (window is None or keys <= window):
        return None
    open_ = torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)
    return open_ if window is None else open_.triu_(keys - queries - window + 1)


def scores_to_values(q, k, v, mask, scale: float, cap: float | None):
    """softmax(capped scores) v: q [..., H, T, D], k and v [..., H, U, D]; mask: bool or additive, broadcast to [..., H,
    T, U], None: all is seen.
    """
    if cap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = torch.matmul(q * scale, k.transpose(-1, -2)).div_(cap).tanh().mul(cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.matmul(torch.softmax(scores, -1, dtype=wide).to(v.dtype), v)


def attended(q, k, v, window: int | None, scale: float, cap: float | None):
    """The last T of U tokens over what they see: q [..., H, T, D], k and v [..., H, U, D] -> [..., H, T, D];
    differentiable.
    """
    queries, keys = q.shape[-2], k.shape[-2]
    band = max(BAND, (window or 0) // 4)
    if queries <= band and (window is None or keys <= queries + window):
        return _band(q, k, v, window, scale, cap)
    outs = []
    for start in range(0, queries, band):
        end = min(queries, start + band)
        last = keys - queries + end
        first = 0 if window is None else max(0, last - (end - start) - window + 1)
        outs.append(_band(q[..., start:end, :], k[..., first:last, :], v[..., first:last, :], window, scale, cap))
    return torch.cat(outs, -2)


def _band(q, k, v, window, scale, cap):
    def computed(q, k, v):
        return scores_to_values(q, k, v, seen(q.shape[-2], k.shape[-2], window, q.device), scale, cap)

    if cap is not None and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return checkpoint(computed, q, k, v, use_reentrant=False, preserve_rng_state=False)
    return computed(q, k, v)
