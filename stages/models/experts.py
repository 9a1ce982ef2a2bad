"""Mixtures of experts as their models compute them (Mixtral, Qwen3-MoE, OLMoE): every token by its k experts, no token
dropped.

Tokens are put in the order of their experts, so that each expert is one product of all its tokens, and back into their
own; a token's k results are added in the order of its router's choice. So what else is in the micro-batch cannot change
a number beyond the rounding of a product, and nothing is padded.

Shapes: N tokens, M hidden size, E experts, k of them per token, I intermediate size of one; gate_up [E, 2 I, M] (gate
above up), down [E, M, I].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.autograd import Function


@dataclass(frozen=True)
class Mixture:
    """A router's and its experts' weights: router [E, M]; ``together``: the k weights of a token are made to add up to
    1.
    """

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    k: int
    together: bool

    @classmethod
    def of(cls, router, experts) -> Mixture:
        # Mixtral's always does
        return cls(
            router.weight,
            experts.gate_up_proj,
            experts.down_proj,
            router.top_k,
            getattr(router, "norm_topk_prob", True),
        )

    def to(self, dtype: torch.dtype) -> Mixture:
        return replace(self, router=self.router.to(dtype), gate_up=self.gate_up.to(dtype), down=self.down.to(dtype))


def logits(x, mixture: Mixture) -> torch.Tensor:
    """What the router says of tokens x [N, M]: [N, E]."""
    return F.linear(x, mixture.router.to(x.dtype))


def chosen(x, mixture: Mixture) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights [N, k] in float32 or better, experts [N, k]) of tokens x [N, M]: the k likeliest of a softmax over all
    experts. Differentiable in x and the router.
    """
    probabilities = torch.softmax(
        scores := logits(x, mixture), -1, dtype=torch.float64 if scores.dtype == torch.float64 else torch.float32
    )
    weights, experts = torch.topk(probabilities, mixture.k, -1)
    return (weights / weights.sum(-1, keepdim=True) if mixture.together else weights), experts


def routed(logits_NE, k: int, weights_N):
    """(sums over tokens of the softmax's probabilities [E], tokens per expert [E], both weighted with weights_N) of
    router logits [N, E]; float32 or better. Differentiable in the first.
    """
    wide = torch.promote_types(logits_NE.dtype, torch.float32)
    probabilities = torch.softmax(logits_NE, -1, dtype=wide)
    weights = weights_N.to(wide)
    chosen = torch.topk(probabilities.detach(), k, -1).indices
    counts = torch.zeros(logits_NE.shape[1], dtype=wide, device=logits_NE.device)
    return weights @ probabilities, counts.index_add_(0, chosen.flatten(), weights.repeat_interleave(k))


class _Order:
    """Tokens by expert: ``places`` [N k] of a token and choice in expert order, ``spans``: (expert, slice of that
    order) of the experts that have any.
    """

    def __init__(self, experts, count: int):
        flat = experts.reshape(-1)
        self.k, self.places = experts.shape[1], torch.argsort(flat, stable=True)
        self.tokens = self.places // self.k
        self.spans, start = [], 0
        for expert, length in enumerate(torch.bincount(flat, minlength=count).tolist()):
            if length:
                self.spans.append((expert, slice(start, start + length)))
            start += length

    def back(self, x):
        """x [N k, ...] in expert order -> [N, k, ...]."""
        return torch.empty_like(x).index_copy_(0, self.places, x).unflatten(0, (-1, self.k))


class Mix(Function):
    """x [N, M] in the type of the products, weights [N, k] in that of the result -> [N, M], the experts' results by
    their weights. All experts are gated by SiLU.
    """

    @staticmethod
    def forward(ctx, x, weights, experts, gate_up, down):
        order = _Order(experts, gate_up.shape[0])
        sorted_x, half = x[order.tokens], gate_up.shape[1] // 2
        pre, out = x.new_empty(len(sorted_x), 2 * half), torch.empty_like(sorted_x)
        for expert, rows in order.spans:
            both = torch.mm(sorted_x[rows], gate_up[expert].to(x.dtype).t(), out=pre[rows])
            torch.mm(F.silu(both[:, :half]).mul_(both[:, half:]), down[expert].to(x.dtype).t(), out=out[rows])
        ctx.save_for_backward(x, weights, pre, gate_up, down)
        ctx.order = order
        return (order.back(out).to(weights.dtype) * weights[..., None]).sum(1)

    @staticmethod
    def backward(ctx, grad):
        x, weights, pre, gate_up, down = ctx.saved_tensors
        order, low, half = ctx.order, x.dtype, gate_up.shape[1] // 2
        sorted_x = x[order.tokens]
        upper = grad.to(low)[order.tokens]
        share = weights.reshape(-1)[order.places, None].to(low)
        wanted = ctx.needs_input_grad
        grad_gate_up = torch.zeros_like(gate_up) if wanted[3] else None
        grad_down = torch.zeros_like(down) if wanted[4] else None
        grad_x, grad_weight = torch.empty_like(sorted_x), weights.new_empty(len(sorted_x))
        for expert, rows in order.spans:
            gate, up = pre[rows, :half], pre[rows, half:]
            silu = F.silu(gate)
            inner = silu * up
            reached = torch.mm(upper[rows], down[expert].to(low))  # d (result . grad) / d inner
            grad_weight[rows] = (reached.to(grad_weight.dtype) * inner).sum(-1)
            reached = reached * share[rows]
            if grad_down is not None:
                grad_down[expert] = torch.mm((upper[rows] * share[rows]).t(), inner)
            both = torch.cat([torch.ops.aten.silu_backward(reached * up, gate), reached.mul_(silu)], 1)
            torch.mm(both, gate_up[expert].to(low), out=grad_x[rows])
            if grad_gate_up is not None:
                grad_gate_up[expert] = torch.mm(both.t(), sorted_x[rows])
        return order.back(grad_x).sum(1), order.back(grad_weight), None, grad_gate_up, grad_down


def mixed(x, mixture: Mixture, dtype: torch.dtype):
    """The mixture's result [N, M] for normed tokens x [N, M], in x's type; products in ``dtype``."""
    low = x.to(dtype)
    weights, experts = chosen(low, mixture)
    return Mix.apply(low, weights.to(x.dtype), experts, mixture.gate_up, mixture.down)
