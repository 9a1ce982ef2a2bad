"""Divergence of a student's next-token distribution from a teacher's over the whole vocabulary, chunk by chunk.

Legend: N positions, V vocabulary, p the teacher's distribution, q the student's, both at temperature T. Values are nats
per position, times T^2 so that the gradient's size does not depend on T (Hinton et al. 2015). Directions:

``forward``  KL(p || q)                               gradient in the student's logits: T (q - p)
``reverse``  KL(q || p)
``jsd``      b KL(p || M) + (1 - b) KL(q || M), M = b p + (1 - b) q   (Agarwal et al. 2024; b -> 0 is forward / b, b -> 1 reverse)

Catalogue ``kd.logit``, ``kd.context``, ``kd.onpolicy``; the exact KL of RL (KL-FULL) is :func:`exact_kl`. Of a teacher
that is only known by its K most likely tokens, :func:`topk_divergence`.
"""

from __future__ import annotations

import torch

from stages.models.modeling import Head, head_chunks, precise

DIRECTIONS = ("forward", "reverse", "jsd")


def divergence(
    student: Head,
    hidden_NH,
    teacher: Head,
    teacher_hidden_NK,
    direction: str = "forward",
    temperature: float = 1.0,
    jsd_beta: float = 0.5,
):
    """Per-position divergence ``[N]``, float32 or better; differentiable in the student's hidden states, weight and
    bias.

    Args:
        teacher_hidden_NK: hidden states of the teacher at the same targets; no gradient flows there.

    Raises:
        ValueError: unknown direction, ``jsd_beta`` outside (0, 1), or vocabularies of different size.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction={direction!r}; write one of {', '.join(DIRECTIONS)}")
    if direction == "jsd" and not 0 < jsd_beta < 1:
        raise ValueError(
            f"jsd_beta={jsd_beta}; write a number between 0 and 1, or direction=forward (0) or reverse (1)"
        )
    if student.weight.shape[0] != teacher.weight.shape[0]:
        raise ValueError(
            f"the student's vocabulary has {student.weight.shape[0]} entries, the teacher's {teacher.weight.shape[0]};"
            " distillation on logits needs the same tokenizer and vocabulary (sequence-level distillation does not:"
            " run sft on the teacher's answers)"
        )
    return _Divergence.apply(
        hidden_NH,
        student.weight,
        student.bias,
        teacher_hidden_NK.detach(),
        student,
        teacher,
        direction,
        float(temperature),
        float(jsd_beta),
    )


def exact_kl(head: Head, hidden_NH, other: Head, other_hidden_NK, temperature: float = 1.0, direction: str = "reverse"):
    """Exact KL over the vocabulary per position ``[N]``, nats: ``reverse`` KL(model||other), ``forward``
    KL(other||model) (KL-FULL).

    :func:`divergence` without its factor T^2.
    """
    return divergence(head, hidden_NH, other, other_hidden_NK, direction, temperature) / temperature**2


TAILS = ("bucket", "renormalise", "drop")


def topk_divergence(
    logq_NK,
    rest_q_N,
    logp_NK,
    rest_p_N,
    direction: str = "forward",
    temperature: float = 1.0,
    jsd_beta: float = 0.5,
    tail: str = "bucket",
):
    """Per-position divergence ``[N]`` from a teacher known by its K most likely tokens (``kd.logit`` topk,
    ``kd.context``).

    Args:
        logq_NK, rest_q_N: the student's log-probabilities of the teacher's K tokens and log of the mass of all others,
            both at ``temperature`` (:func:`stages.models.modeling.column_logps`). logp_NK, rest_p_N: the same of the
            teacher; no gradient flows there.
        tail: ``bucket``: the others are one class of both, never more than the divergence over the whole vocabulary;
            ``renormalise``: the teacher over its K tokens, the student over the whole vocabulary; ``drop``: the K terms
            alone.

    Raises:
        ValueError: unknown direction or tail, or a direction that needs the bucket.
    """
    if direction not in DIRECTIONS or tail not in TAILS:
        raise ValueError(
            f"direction={direction!r} tail={tail!r}; write one of {', '.join(DIRECTIONS)} and one of {', '.join(TAILS)}"
        )
    if tail != "bucket" and direction != "forward":
        raise ValueError(
            f"direction={direction} weighs tokens by the student, whose mass outside of the teacher's"
            f" {logp_NK.shape[-1]} counts too; write tail=bucket, or direction=forward"
        )
    logp_NK, rest_p_N = logp_NK.detach(), rest_p_N.detach()
    # a rest without mass (K = V) is far below every number: exp gives 0, and the clamp no gradient
    if tail == "bucket":
        logq, logp = (
            torch.cat([logs, rest.clamp(min=-1e4)[:, None]], -1)
            for logs, rest in ((logq_NK, rest_q_N), (logp_NK, rest_p_N))
        )
    else:
        logq, logp = logq_NK, logp_NK - (logp_NK.logsumexp(-1, keepdim=True) if tail == "renormalise" else 0.0)
    return values_of(logq, logp, direction, jsd_beta) * temperature**2


#: The least sum of distances that IW-OPD divides by.
LEAST = 1e-8


def iw_opd_advantages(logp_SL, logq_SL, gamma: float = 0.5):
    """Advantages ``[S, L]`` of sampled tokens, constants: log p - log q times 1 + gamma (1 - share of the row's summed
    distances |log p - log q| that lies before the token), so that tokens behind a prefix that the teacher would not
    have written count less (IW-OPD, Xie et al. 2026, arXiv:2606.22600; ``gamma`` 0: on-policy distillation by the
    reverse KL's policy gradient).

    Args:
        logp_SL, logq_SL: log-probabilities of the row's tokens by teacher and student, equal (0) where there is none.
    """
    gained = (logp_SL - logq_SL).detach()
    far = gained.abs()
    before = far.cumsum(-1) - far
    return gained * (1.0 + gamma * (1.0 - before / far.sum(-1, keepdim=True).clamp(min=LEAST)))


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, teacher_hidden, student, teacher, direction, temperature, beta):
        out = hidden.new_empty(hidden.shape[0], dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32)
        wide, theirs = student.widened(), teacher.widened()
        for rows in head_chunks(hidden.shape[0], weight):
            out[rows] = (
                values_of(*_logs(wide, hidden[rows], theirs, teacher_hidden[rows], temperature), direction, beta)
                * temperature**2
            )
        ctx.save_for_backward(hidden, weight, bias, teacher_hidden)
        ctx.settings = student, teacher, direction, temperature, beta
        return out

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, bias, teacher_hidden = ctx.saved_tensors
        student, teacher, direction, temperature, beta = ctx.settings
        student, teacher = student.widened(), teacher.widened()
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=grad.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=grad.dtype) if bias is not None and ctx.needs_input_grad[2] else None
        for rows in head_chunks(hidden.shape[0], weight):
            logq, logp = _logs(student, hidden[rows], teacher, teacher_hidden[rows], temperature)
            # d(value)/d(logit / T) = q (g - sum q g) with g = d(value)/dq up to a constant
            if direction == "forward":
                dz = logq.exp() - logp.exp()
            else:
                g = logq - (logp if direction == "reverse" else _mixture(logp, logq, beta))
                if direction == "jsd":
                    g = (1 - beta) * g
                q = logq.exp()
                dz = q * (g - (q * g).sum(-1, keepdim=True))
            dz = dz * (grad[rows, None] * temperature * student.scale)
            if student.softcap:
                cap = student.logits(hidden[rows]) / student.softcap
                dz = dz * (1 - cap * cap)
            dz = dz.to(student.weight.dtype)
            grad_hidden[rows] = (dz @ student.weight).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += dz.t() @ hidden[rows].to(dz.dtype)
            if grad_bias is not None:
                grad_bias += dz.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None


def _logs(student, hidden, teacher, teacher_hidden, temperature):
    """(log q, log p) [n, V]."""
    return (
        torch.log_softmax(precise(student.logits(hidden)) / temperature, -1),
        torch.log_softmax(precise(teacher.logits(teacher_hidden)).to(precise(hidden).dtype) / temperature, -1),
    )


def _mixture(logp, logq, beta):
    """log(b p + (1 - b) q)."""
    import math

    return torch.logaddexp(logp + math.log(beta), logq + math.log1p(-beta))


def values_of(logq, logp, direction, beta):
    """Divergence over the last axis, in one of :data:`DIRECTIONS`, of two distributions or of their parts."""

    def kl(a, b):
        return (a.exp() * (a - b)).sum(-1)

    if direction == "forward":
        return kl(logp, logq)
    if direction == "reverse":
        return kl(logq, logp)
    middle = _mixture(logp, logq, beta)
    return beta * kl(logp, middle) + (1 - beta) * kl(logq, middle)
