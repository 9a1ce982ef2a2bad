"""A toy language small enough to enumerate: vocabulary 3, sequences of exactly 3 tokens or ended early by token 0.

A policy is a table of logits, one row per prefix. Exact expectations and gradients come from summing over all
completions, so estimators and losses can be compared with the truth.
"""

from __future__ import annotations

import math
from itertools import product

import torch

VOCAB, HORIZON, EOS = 3, 3, 0


def prefixes():
    """Every prefix that still has a next token, in a fixed order."""
    out = [()]
    for length in range(1, HORIZON):
        out += [p for p in product(range(VOCAB), repeat=length) if EOS not in p]
    return out


STATES = {p: i for i, p in enumerate(prefixes())}


def completions():
    """Every complete sequence: ended by EOS, or HORIZON tokens long."""
    out = []
    for length in range(1, HORIZON + 1):
        for y in product(range(VOCAB), repeat=length):
            if EOS in y[:-1] or (y[-1] != EOS and length < HORIZON):
                continue
            out.append(y)
    return out


COMPLETIONS = completions()
MASK = torch.tensor([[int(t < len(y)) for t in range(HORIZON)] for y in COMPLETIONS])


def random_policy(seed: int) -> torch.Tensor:
    """Logits [states, VOCAB]."""
    return torch.randn(len(STATES), VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def token_logps(logits) -> torch.Tensor:
    """log pi(y_t | y_<t) of every completion, [completions, HORIZON]; NaN where there is no token."""
    logp = torch.log_softmax(logits, -1)
    rows = [
        [
            logp[STATES[y[:t]], y[t]] if t < len(y) else torch.full((), math.nan, dtype=torch.float64)
            for t in range(HORIZON)
        ]
        for y in COMPLETIONS
    ]
    return torch.stack([torch.stack(r) for r in rows])


def sequence_logps(logits) -> torch.Tensor:
    return torch.where(MASK.bool(), token_logps(logits), 0.0).sum(1)


def probabilities(logits) -> torch.Tensor:
    """P(y) of every completion; sums to 1."""
    return sequence_logps(logits).exp()


def kl(logits, other) -> torch.Tensor:
    """Exact KL between the sequence distributions."""
    a, b = sequence_logps(logits), sequence_logps(other)
    return (a.exp() * (a - b)).sum()


def gradient(value, logits) -> torch.Tensor:
    return torch.autograd.grad(value, logits)[0]
