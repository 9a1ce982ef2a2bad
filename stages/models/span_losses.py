"""Distances of a student's distribution from that of a teacher with another vocabulary, span by span, chunk by chunk.

A span is where tokens of both say the same text (:mod:`stages.token_spans`). Its measure is the distribution at one of
its tokens times the probabilities of its other tokens, which sums to less than 1 where it has several (the joint
probability of what was said is one of its values):

``uld``   sum over ranks k of |q_(k) - p_(k)|, both sorted from the largest, the shorter one filled up with zeros
          (Universal Logit Distillation, Boizard et al. 2024)
``gold``  w_matched * D(p, q) over the entries that both vocabularies have, D the divergence that the direction names,
          + w_unmatched * ``uld`` over the others (GOLD's hybrid loss, Patino et al. 2025)

Legend: G spans, M shared entries, V and W the vocabularies of student and teacher; q the student's measure, p the
teacher's, both at temperature T. Values are times T^2, as in :mod:`stages.models.divergence`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from stages.models.divergence import values_of
from stages.models.modeling import Head, head_chunks, precise

#: On a GPU, sorting both vocabularies takes about this many times what log-probabilities take.
SORTING = 8


def uld(logq_GV, logp_GW):
    """Sum of absolute differences of sorted probabilities ``[G]``."""
    q, p = (logs.exp().sort(dim=-1, descending=True, stable=True).values for logs in (logq_GV, logp_GW))
    width = max(q.shape[-1], p.shape[-1])
    q, p = (torch.nn.functional.pad(part, (0, width - part.shape[-1])) for part in (q, p))
    return (q - p).abs().sum(-1)


@dataclass(frozen=True)
class Gold:
    """The hybrid distance of one pair of vocabularies.

    Args:
        pairs_M2: shared entries (the student's id, the teacher's).
        matched, unmatched: weights; None: the shared share of the teacher's vocabulary, and the rest.
    """

    pairs_M2: torch.Tensor
    direction: str = "forward"
    jsd_beta: float = 0.5
    matched: float | None = None
    unmatched: float | None = None

    def of(self, rows: int, their_rows: int, device) -> Gold:
        """On the device of two heads with so many rows, without entries behind them."""
        pairs = self.pairs_M2.to(device)
        pairs = pairs[(pairs[:, 0] < rows) & (pairs[:, 1] < their_rows)]
        share = len(pairs) / max(1, their_rows)
        if self.matched is not None:
            return replace(self, pairs_M2=pairs)
        return replace(self, pairs_M2=pairs, matched=share, unmatched=1.0 - share)

    def __call__(self, logq_GV, logp_GW):
        """``[G]``."""
        mine, theirs = self.pairs_M2.T
        matched = values_of(logq_GV[:, mine], logp_GW[:, theirs], self.direction, self.jsd_beta)
        others = (_without(logs, ids) for logs, ids in ((logq_GV, mine), (logp_GW, theirs)))
        return self.matched * matched + self.unmatched * uld(*others)


def _without(logs, ids):
    kept = torch.ones(logs.shape[-1], dtype=torch.bool, device=logs.device)
    kept[ids] = False
    return logs[:, kept]


def span_distances(
    student: Head,
    hidden_GH,
    others_G,
    teacher: Head,
    teacher_hidden_GK,
    teacher_others_G,
    distance: Callable,
    temperature: float = 1.0,
):
    """Distance of every span ``[G]``, float32 or better; differentiable in the student's hidden states, weight, bias and
    ``others_G``. Memory is bounded whatever the vocabularies are.

    Args:
        hidden_GH, teacher_hidden_GK: hidden states that predict the span's token with the distribution; no gradient
            flows to the teacher's.
        others_G, teacher_others_G: log-probability of the span's other tokens together, at ``temperature``, 0 where
            there are none.
        distance: (log q ``[G, V]``, log p ``[G, W]``) -> ``[G]``: :func:`uld` or a :class:`Gold`.
    """
    kind = hidden_GH.device.type
    low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    with torch.autocast(kind, enabled=False):
        return _SpanDistances.apply(
            hidden_GH,
            others_G,
            student.weight,
            student.bias,
            teacher_hidden_GK.detach(),
            teacher_others_G.detach(),
            (student.scale, student.softcap, low or student.low),
            replace(teacher, dtype=low or teacher.low),
            distance,
            float(temperature),
        )


class _SpanDistances(torch.autograd.Function):
    """Nothing of size V is kept: chunks are computed again in backward."""

    @staticmethod
    def forward(
        ctx, hidden, others, weight, bias, their_hidden, their_others, settings, teacher, distance, temperature
    ):
        scale, softcap, low = settings
        out = hidden.new_empty(len(hidden), dtype=precise(hidden).dtype)
        student, theirs = _lowered(Head(weight, bias, scale, softcap), low), _lowered(teacher, teacher.dtype)
        for rows in _chunks(len(hidden), student, theirs):
            logq, _ = _logs(student, hidden[rows], others[rows], temperature)
            logp, _ = _logs(theirs, their_hidden[rows], their_others[rows], temperature)
            out[rows] = distance(logq, logp.to(logq.dtype)) * temperature**2
        ctx.save_for_backward(hidden, others, weight, bias, their_hidden, their_others)
        ctx.settings = settings, teacher, distance, temperature
        return out

    @staticmethod
    def backward(ctx, grad):
        hidden, others, weight, bias, their_hidden, their_others = ctx.saved_tensors
        (scale, softcap, low), teacher, distance, temperature = ctx.settings
        grad_hidden, grad_others = torch.empty_like(hidden), torch.empty_like(others)
        grad_weight = torch.zeros_like(weight, dtype=grad.dtype) if ctx.needs_input_grad[2] else None
        grad_bias = torch.zeros_like(bias, dtype=grad.dtype) if bias is not None and ctx.needs_input_grad[3] else None
        student, theirs = _lowered(Head(weight, bias, scale, softcap), low), _lowered(teacher, teacher.dtype)
        for rows in _chunks(len(hidden), student, theirs):
            logq, z = _logs(student, hidden[rows], others[rows], temperature)
            logp, _ = _logs(theirs, their_hidden[rows], their_others[rows], temperature)
            with torch.enable_grad():
                logq.requires_grad_()
                value = distance(logq, logp.to(logq.dtype)) * temperature**2
                (g,) = torch.autograd.grad(value, logq, grad[rows])
            total = g.sum(-1, keepdim=True)
            grad_others[rows] = total[:, 0].to(others.dtype)
            # log q = log softmax(z / T) + others
            dz = g - (logq.detach() - others[rows, None]).exp() * total
            dz = dz * (scale / temperature)
            if softcap:
                dz = dz * (1.0 - (z / softcap) ** 2)
            if grad_bias is not None:
                grad_bias += dz.sum(0)
            dz = dz.to(low)
            grad_hidden[rows] = (dz @ student.weight).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += dz.t() @ hidden[rows].to(low)
        return (
            grad_hidden,
            grad_others,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 6,
        )


def _lowered(head: Head, low) -> Head:
    return Head(head.weight.to(low), None if head.bias is None else head.bias.to(low), head.scale, head.softcap)


def _chunks(n: int, student: Head, teacher: Head) -> list[slice]:
    wider = max(student.weight, teacher.weight, key=len)
    return head_chunks(n, wider, 1 if wider.device.type == "cpu" else SORTING)


def _logs(head: Head, hidden, others, temperature):
    """(log of the measure ``[n, V]``, logits after scale and softcap) of a chunk."""
    z = precise(head.logits(hidden.to(head.weight.dtype)))
    return torch.log_softmax(z / temperature, -1) + others[:, None], z
