"""Losses of direct alignment as their papers and the catalogue print them, on tensors of plain log-probs; nothing here
is the project's own.

Legend, one number per pair: w and l the policy's log-probs of chosen and rejected, h_w and h_l the same less the
reference's, h their difference, u = beta h; n_w and n_l trained tokens.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch.nn.functional import logsigmoid as log_sigmoid


def logistic(x):
    return -log_sigmoid(x)


def hinge(x):
    return (1 - x).clamp(min=0.0)


def kl(p, q):
    """Between two coins, by their logits."""
    return torch.sigmoid(p) * (log_sigmoid(p) - log_sigmoid(q)) + torch.sigmoid(-p) * (
        log_sigmoid(-p) - log_sigmoid(-q)
    )


def smoothed(u, eps):
    return (1 - eps) * logistic(u) + eps * logistic(-u)


def log_odds(mean):
    mean = mean.clamp(max=-1e-6)
    return mean - torch.log(-torch.expm1(mean))


def shaped(mean, beta, alpha):
    return beta * (1 - torch.exp(-alpha * mean)) / alpha


def quantile(s):
    """AQL; the mean is over all pairs of the step."""
    q = torch.sigmoid(-s.beta * (s.h - (0.5 + 0.01 * (torch.sigmoid(s.step_mean) - 0.5))))
    return q * logistic(s.u) + (1 - q) * hinge(s.u)


DISCOVERED = {
    "logistic": lambda s: logistic(s.u),
    "hinge": lambda s: hinge(s.u),
    "square": lambda s: (1 - s.u) ** 2,
    "exponential": lambda s: torch.exp(-s.u),
    "padll": lambda s: 0.9 * (1 - 0.5 * (s.h < 0).double()) * logistic(s.u),
    "cell": lambda s: 0.5 * logistic(s.u) + 0.5 * torch.exp(-s.u),
}

#: By method, of :func:`pair_losses`' namespace; o holds the options.
PAIRS = {
    "dpo": lambda s: smoothed(s.u, s.o.label_smoothing),
    "cdpo": lambda s: smoothed(s.u, s.o.label_smoothing),
    "robust_dpo": (
        lambda s: (
            ((1 - s.o.label_smoothing) * logistic(s.u) - s.o.label_smoothing * logistic(-s.u))
            / (1 - 2 * s.o.label_smoothing)
        )
    ),
    "soft_dpo": lambda s: s.label_prob * logistic(s.u) + (1 - s.label_prob) * logistic(-s.u),
    "ipo": lambda s: (s.h - 1 / (2 * s.beta)) ** 2,
    "soft_ipo": lambda s: (s.h - (s.label_prob - 0.5) / s.beta) ** 2,
    "hinge_norm": lambda s: hinge(s.u),
    "length_norm": lambda s: logistic(s.u),
    "dpo_nll": lambda s: logistic(s.u),
    "apo_zero": lambda s: 1 - torch.sigmoid(s.beta * s.h_w) + torch.sigmoid(s.beta * s.h_l),
    "apo_down": lambda s: torch.sigmoid(s.beta * s.h_w) + 1 - torch.sigmoid(s.u),
    "discopop": (
        lambda s: (
            (1 - torch.sigmoid(s.u / s.o.discopop_tau)) * logistic(s.u)
            + torch.sigmoid(s.u / s.o.discopop_tau) * torch.exp(-s.u)
        )
    ),
    "discovered": lambda s: DISCOVERED[s.o.member](s),
    "written": lambda s: logistic(s.u),
    "aql": quantile,
    "pfl": lambda s: torch.where(s.w > s.l, logistic(s.u) / 2, 2 * hinge(s.u)),
    "cal_dpo": (
        lambda s: (
            logistic(s.u if s.o.beta_in_contrast else s.h)
            + s.o.cal_weight * ((s.h_w - 1 / (2 * s.beta)) ** 2 + (s.h_l + 1 / (2 * s.beta)) ** 2)
        )
    ),
    "nca_pair": lambda s: logistic(s.beta * s.h_w) + logistic(-s.beta * s.h_w) / 2 + logistic(-s.beta * s.h_l) / 2,
    "exo_pair": lambda s: kl(s.u, torch.full_like(s.u, math.log((1 - s.o.label_smoothing) / s.o.label_smoothing))),
    "r_dpo": lambda s: logistic(s.u + s.o.alpha * s.n_w - s.o.alpha * s.n_l),
    "wpo": (
        lambda s: torch.exp(s.aligned_w + s.aligned_l if s.o.aligned else s.mean_w + s.mean_l).detach() * logistic(s.u)
    ),
    "mdpo": (
        lambda s: (
            logistic(s.u)
            + s.o.conditional_weight * logistic(s.beta * (s.h_w - s.h_corrupted))
            + s.o.anchor_weight * logistic(s.beta * s.h_w - s.o.delta)
        )
    ),
    "odpo": lambda s: logistic(s.u - s.o.alpha * (torch.log(s.score_gap) if s.o.offset_fn == "log" else s.score_gap)),
    "rpo": lambda s: kl(s.o.eta * s.score_gap, s.u),
    "rebel": lambda s: (s.u - s.score_gap) ** 2,
    "sppo_hard": lambda s: (s.h_w - 1 / (2 * s.beta)) ** 2 + (s.h_l + 1 / (2 * s.beta)) ** 2,
    "bco_pair": lambda s: logistic(s.beta * s.h_w - s.o.delta) + logistic(-(s.beta * s.h_l - s.o.delta)),
    "reference_free": lambda s: logistic(s.beta * (s.w - s.l)),
    "cpo": lambda s: logistic(s.beta * (s.w - s.l)),
    "simpo": lambda s: smoothed(s.beta * s.w - s.beta * s.l - s.o.simpo_gamma, s.o.label_smoothing),
    "tpo": lambda s: logistic(s.beta * s.w - s.beta * s.l),
    "tpo_l": lambda s: smoothed(s.beta * s.w - s.beta * s.l - s.o.simpo_gamma, s.o.label_smoothing),
    "alphapo": lambda s: logistic(shaped(s.w, s.beta, s.o.alpha) - shaped(s.l, s.beta, s.o.alpha) - s.o.simpo_gamma),
    "orpo": lambda s: s.beta * logistic(log_odds(s.w) - log_odds(s.l)),
    "slic": lambda s: (s.o.delta - s.w + s.l).clamp(min=0.0) - s.o.reg_coef * s.w,
    # of the whole step; every pair has the same weight
    "aot_unpaired": lambda s: smoothed(s.beta * (s.h_w.sort().values - s.h_l.sort().values), s.o.label_smoothing),
    "aot_paired": lambda s: smoothed(
        s.beta * ((s.w - s.l).sort().values - (s.ref_w - s.ref_l).sort().values), s.o.label_smoothing
    ),
}


def pair_losses(method: str, w, l, ref_w, ref_l, beta, options: dict, **more):
    """[pairs]; ref_w and ref_l None without a reference."""
    s = SimpleNamespace(w=w, l=l, ref_w=ref_w, ref_l=ref_l, beta=beta, o=SimpleNamespace(**options), **more)
    if ref_w is not None:
        s.h_w, s.h_l = w - ref_w, l - ref_l
        s.h = s.h_w - s.h_l
        s.u = beta * s.h
    return PAIRS[method](s)


def value_of_one(method: str, ratio, good: bool, beta: float, options: dict, z0: float = 0.0, delta: float = 0.0):
    """The loss of a single labelled response, ratio its log pi/ref."""
    if method == "kto":
        weight = options["desirable_weight" if good else "undesirable_weight"]
        return weight - weight * torch.sigmoid(beta * (ratio - z0) if good else beta * (z0 - ratio))
    if method == "bco":
        return logistic(beta * ratio - delta) if good else logistic(-(beta * ratio - delta))
    return 1 - torch.sigmoid(beta * ratio) if good else torch.sigmoid(beta * ratio)


def ranking_loss(
    method: str, policy, ref, lengths, rewards, ranks, beta, options: dict, win_probability: str = "ranks"
):
    """Of one prompt's K responses, best first; [K] each, ref None for rrhf."""
    n = len(policy)
    if method == "pl_dpo":
        h = [beta * (a - b) for a, b in zip(policy, ref)]
        return sum(torch.logsumexp(torch.stack(h[k:]), 0) - h[k] for k in range(n - 1))
    if method == "rrhf":
        means, best = [p / m for p, m in zip(policy, lengths)], max(range(n), key=lambda i: (rewards[i], -i))
        hinges = [(means[i] - means[j]).clamp(min=0.0) for i in range(n) for j in range(n) if rewards[i] < rewards[j]]
        if options["average"]:
            return sum(hinges) / len(hinges) - means[best]
        return sum(hinges) - policy[best]

    def beats(i, j):
        if win_probability == "ranks":
            return 0.5 + 0.5 * ((ranks[i] < ranks[j]) - (ranks[i] > ranks[j]))
        return 1 / (1 + math.exp(rewards[j] - rewards[i]))

    wins = (
        rewards
        if win_probability == "scores"
        else [sum(beats(i, j) for j in range(n) if j != i) / (n - 1) for i in range(n)]
    )
    return sum((a - b - (win - 0.5) / beta) ** 2 for a, b, win in zip(policy, ref, wins)) / n
