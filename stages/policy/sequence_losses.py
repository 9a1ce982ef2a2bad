"""Pairwise and offline policy losses on sequence log-probs: P3O, CoPG, mirror descent, A*-PO, OREO.

Elementwise values, to be averaged by the optimizer step; rewards, values of other models and weights are detached.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stages.losses import LOG_RATIO_CLAMP, masked, sign_beyond_rounding, tapered_weights


def p3o_loss(logps_P2, old_logps_P2, rewards_P2, epsilon: float = 0.2, form: str = "separate"):
    """Pairwise PPO per pair [P] from two completions per prompt [P, 2] (P3O, Wu et al. 2023; clipped forms are ours).

    D = r1 - r2, h_i = log pi/pi_old, rho_i = exp(h_i). `separate` clips each ratio under the other's detached one;
    `joint` clips h_1 - h_2. On-policy both give -(r1 - r2)/2 grad(log pi(y1) - log pi(y2)).
    """
    D = (rewards_P2[:, 0] - rewards_P2[:, 1]).detach()
    h = (logps_P2 - old_logps_P2.detach()).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    rho = torch.exp(h)
    if form == "joint":
        z = h[:, 0] - h[:, 1]
        return -(rho[:, 0] * rho[:, 1]).detach() * torch.minimum(D * z, D * z.clamp(-epsilon, epsilon)) / 2
    if form != "separate":
        raise ValueError(f"form={form!r} is not known; write 'separate' or 'joint'")

    def clipped(c, r):
        return torch.minimum(r * c, r.clamp(1 - epsilon, 1 + epsilon) * c)

    return -(clipped(rho[:, 1].detach() * D, rho[:, 0]) + clipped(-rho[:, 0].detach() * D, rho[:, 1])) / 2


def copg_loss(logps_P2, ref_logps_P2, rewards_P2, beta: float):
    """(dr - beta dh)^2 / (2 beta) per pair, dh the difference of log-ratios to the reference (COPG; scale is ours)."""
    h = logps_P2 - ref_logps_P2
    residual = (rewards_P2[:, 0] - rewards_P2[:, 1]).detach() - beta * (h[:, 0] - h[:, 1])
    return residual**2 / (2 * beta)


def mirror_descent_loss(logps_B, iterate_logps_B, advantages_B, tau: float):
    """-(A log pi - tau/2 (log pi/pi_i)^2) per sequence, pi_i the previous iterate, A group-centred (MDPO, Kimi
    k1.5).
    """
    return -(advantages_B.detach() * logps_B - tau / 2 * (logps_B - iterate_logps_B) ** 2)


def astar_loss(logps_B, ref_logps_B, rewards_B, v_star_B, beta: float):
    """(beta log pi/ref - (r - V*))^2 per sequence, V* from reference samples (ASTAR-PO)."""
    return (beta * (logps_B - ref_logps_B) - (rewards_B - v_star_B).detach()) ** 2


def oreo_losses(log_ratios_BT, values_BT, returns_BT, mask_BT, beta: float):
    """(value loss, policy loss) per token [B, T] of the soft-Bellman regression (OREO, Wang et al. 2024).

    log_ratios = log pi/ref, returns = undiscounted reward-to-go. Each loss detaches the other model; in the policy
    loss later log-ratios are constants.
    """
    l, v, G = masked(log_ratios_BT, mask_BT), masked(values_BT, mask_BT), masked(returns_BT, mask_BT)
    future = l.detach().flip(-1).cumsum(-1).flip(-1)
    value = (v - G + beta * future) ** 2
    policy = (v.detach() - G + beta * l + beta * (future - l.detach())) ** 2
    return masked(value, mask_BT), masked(policy, mask_BT)


# --- the same losses as objectives of RL presets (the `objective` column of stages.algorithms.RL_PRESETS) -----------


@dataclass
class Responses:
    """What an objective on whole responses reads: token log-probs and values ``[S, L]`` (0 outside the mask), sequence
    rewards and advantages ``[S]``, and ``pairs_P2``, indices of two valid responses to one prompt; ``preferences_S`` is
    P(a response beats the other of its pair) by a model that compares, None where rewards are scores. ``old`` is the
    policy that sampled (or, where the preset says so, the iterate that started the round); everything but ``logps_SL``
    is constant."""

    logps_SL: torch.Tensor
    old_SL: torch.Tensor
    ref_SL: torch.Tensor | None
    mask_SL: torch.Tensor
    rewards_S: torch.Tensor
    advantages_SL: torch.Tensor
    values_SL: torch.Tensor | None
    pairs_P2: torch.Tensor
    preferences_S: torch.Tensor | None = None

    def sums(self, values_SL: torch.Tensor) -> torch.Tensor:
        return masked(values_SL, self.mask_SL).sum(-1)

    @property
    def advantages_S(self) -> torch.Tensor:
        """The (equal) advantage of each response's trained tokens."""
        return self.advantages_SL.gather(1, self.mask_SL.int().argmax(-1, keepdim=True))[:, 0]


def tapered(r: Responses, clip_pos, clip_neg):
    """-sg(w) A log pi per response, w = pi/mu clipped to clip_pos where A > 0, to clip_neg elsewhere (TOPR,
    OFFPOL-IS).
    """
    logps = r.sums(r.logps_SL)
    return -tapered_weights(logps, r.sums(r.old_SL), r.advantages_S, clip_pos, clip_neg) * r.advantages_S * logps


def tapered_log(r: Responses, clip_pos, clip_neg) -> dict:
    """Sums over trained responses: the weight, its square, and how many have a positive advantage or a weight that was
    clipped by more than rounding (TOPR), which makes a ratio that is held at 1 differ from 1 where nothing has moved.
    """
    live, logps, old = r.mask_SL.any(-1), r.sums(r.logps_SL).detach(), r.sums(r.old_SL)
    weights = masked(tapered_weights(logps, old, r.advantages_S, clip_pos, clip_neg), live)
    ratio = tapered_weights(logps, old, r.advantages_S, (0.0, float("inf")), (0.0, float("inf")))
    moved = sign_beyond_rounding((weights / ratio).log(), logps.abs() + old.abs())
    return {
        "importance_weight": weights.sum(),
        "importance_weight_sq": (weights * weights).sum(),
        "importance_clipped": masked(moved.abs(), live).float().sum(),
        "positive_responses": (masked(r.advantages_S, live) > 0).float().sum(),
    }


def pairwise_ppo(r: Responses, epsilon: float, form: str):
    """:func:`p3o_loss` per pair; rewards already hold the KL penalty."""
    return p3o_loss(
        r.sums(r.logps_SL)[r.pairs_P2], r.sums(r.old_SL)[r.pairs_P2], r.rewards_S[r.pairs_P2], epsilon, form
    )


def contrastive(r: Responses, beta: float):
    """:func:`copg_loss` per pair."""
    return copg_loss(r.sums(r.logps_SL)[r.pairs_P2], r.sums(r.ref_SL)[r.pairs_P2], r.rewards_S[r.pairs_P2], beta)


def mirror_descent(r: Responses, tau: float):
    """:func:`mirror_descent_loss` per response, around the policy that started the round."""
    return mirror_descent_loss(r.sums(r.logps_SL), r.sums(r.old_SL), r.advantages_S, tau)


def optimal_advantage(r: Responses, beta: float):
    """:func:`astar_loss` per response; the advantage is r - V*."""
    return astar_loss(r.sums(r.logps_SL), r.sums(r.ref_SL), r.advantages_S, 0.0 * r.rewards_S, beta)


def soft_bellman(r: Responses, beta: float):
    """Policy half of :func:`oreo_losses` per token; the advantages are rewards-to-go. The value half is the critic's
    regression.
    """
    return oreo_losses(r.logps_SL - r.ref_SL, r.values_SL, r.advantages_SL, r.mask_SL, beta)[1]


def win_rate_regression(r: Responses, eta: float):
    """(log pi/pi_t - eta (P - 1/2))^2 per response; the advantage is P - 1/2 (SPPO, Wu et al. 2024)."""
    return (r.sums(r.logps_SL) - r.sums(r.old_SL) - eta * r.advantages_S) ** 2


def on_policy_ipo(r: Responses, tau: float):
    """(h - (p - 1/2)/tau)^2 per pair, h the difference of log-ratios to the reference and p = P(y1 > y2) of a model
    that compares, or sigmoid(r1 - r2) of scores (ONLINE-IPO)."""
    h = (r.sums(r.logps_SL) - r.sums(r.ref_SL))[r.pairs_P2]
    first, second = r.pairs_P2.unbind(1)
    p = torch.sigmoid(r.rewards_S[first] - r.rewards_S[second]) if r.preferences_S is None else r.preferences_S[first]
    return (h[:, 0] - h[:, 1] - (p - 0.5) / tau) ** 2
