"""Direct-alignment losses beyond DPO, per pair [B], on sequence log-probs.

Common form on pairs: f(policy_chosen, policy_rejected, ref_chosen, ref_rejected, *, beta, ...) with S (sums) or M
(means) of token log-probs as the method's row in stages/algorithms.py says; reference values are None for
reference-free methods. h_w = policy - reference of the chosen response, h_l of the rejected one, u = beta (h_w - h_l).
On single responses: f(logratio, label, *, beta, ...) [B]. On the K responses of one prompt, best first: f(policy, ref,
lengths, *, beta, ...) of [K] tensors, one value per prompt.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from stages.losses import LOG_RATIO_CLAMP, log1mexp, plackett_luce_loss, sign_beyond_rounding, soft_bce


def _h(policy_chosen, policy_rejected, ref_chosen, ref_rejected):
    return policy_chosen - ref_chosen, policy_rejected - ref_rejected


def _h_difference(policy_chosen, policy_rejected, ref_chosen, ref_rejected):
    return (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)


def f_divergence_score(log_ratio, kind: str = "reverse_kl", alpha: float = 0.5):
    """f'(pi/ref) of a response up to a constant, from its log pi/ref (f-DPO, Wang et al. 2023): what takes the place of
    the log-ratio where a loss reads differences of implicit rewards. Same shape; 0 at policy = reference.

    reverse_kl log t; forward_kl 1 - 1/t; js_divergence log(2t / (1 + t)); alpha_divergence (t^(alpha-1) - 1) / (alpha -
    1), which is forward_kl at alpha 0 and reverse_kl at 1. Powers are continued by their tangent where the exponent
    passes LOG_RATIO_CLAMP nats, so that neither values nor gradients overflow and a response far off still gets one.

    Raises:
        ValueError: another name.
    """
    if kind == "js_divergence":
        return math.log(2.0) + F.logsigmoid(log_ratio)
    if kind not in ("reverse_kl", "forward_kl", "alpha_divergence"):
        raise ValueError(
            f"f_divergence_type={kind!r} is not known; write reverse_kl, forward_kl, js_divergence or alpha_divergence"
        )
    power = {"reverse_kl": 0.0, "forward_kl": -1.0}.get(kind, alpha - 1.0)
    if abs(power) < 1e-6:
        return log_ratio
    exponent = power * log_ratio
    tangent = math.expm1(LOG_RATIO_CLAMP) + math.exp(LOG_RATIO_CLAMP) * (exponent - LOG_RATIO_CLAMP)
    # a sum of both would lose float32's digits
    return torch.where(exponent > LOG_RATIO_CLAMP, tangent, torch.expm1(exponent.clamp(max=LOG_RATIO_CLAMP))) / power


def ipo_loss(pc, pr, rc, rr, *, beta: float = 0.1, label_prob=None):
    """(h - 1/(2 tau))^2, tau = beta; with a preference probability p the target is (p - 1/2)/tau (da.ipo)."""
    h_w, h_l = _h(pc, pr, rc, rr)
    p = 1.0 if label_prob is None else label_prob
    return (h_w - h_l - (p - 0.5) / beta) ** 2


def hinge_norm_loss(pc, pr, rc, rr, *, beta: float = 0.05):
    """max(0, 1 - gamma h), gamma = beta (da.slic hinge_norm, RSO)."""
    h_w, h_l = _h(pc, pr, rc, rr)
    return F.relu(1 - beta * (h_w - h_l))


def apo_zero_loss(pc, pr, rc, rr, *, beta: float = 0.1):
    """1 - sigma(beta h_w) + sigma(beta h_l) (da.apo_zero)."""
    h_w, h_l = _h(pc, pr, rc, rr)
    return 1 - torch.sigmoid(beta * h_w) + torch.sigmoid(beta * h_l)


def apo_down_loss(pc, pr, rc, rr, *, beta: float = 0.1):
    """sigma(beta h_w) + 1 - sigma(beta (h_w - h_l)) (da.apo_down)."""
    h_w, h_l = _h(pc, pr, rc, rr)
    return torch.sigmoid(beta * h_w) + 1 - torch.sigmoid(beta * (h_w - h_l))


def discopop_gate(u, discopop_tau: float = 0.05):
    """Share g = sigma(u / tau) of the exponential loss (da.discopop)."""
    return torch.sigmoid(u / discopop_tau)


def discopop_loss(pc, pr, rc, rr, *, beta: float = 0.05, discopop_tau: float = 0.05):
    """(1-g) logistic + g exponential with gate g = sigma(u / tau), not detached (da.discopop)."""
    h_w, h_l = _h(pc, pr, rc, rr)
    u = beta * (h_w - h_l)
    gate = discopop_gate(u, discopop_tau)
    return (1 - gate) * F.softplus(-u) + gate * torch.exp((-u).clamp(max=80.0))


def discovered_losses(h, *, beta: float = 0.05, below=None) -> dict:
    """The family E[f(beta rho)], rho = h: logistic, hinge, square, exponential, padll, cell (da.discopop). below: where
    h counts as under 0; default h < 0."""
    u = beta * h
    logistic, exponential = F.softplus(-u), torch.exp((-u).clamp(max=80.0))
    return {
        "logistic": logistic,
        "hinge": F.relu(1 - u),
        "square": (1 - u) ** 2,
        "exponential": exponential,
        "padll": torch.where(h < 0 if below is None else below, 0.45 * logistic, 0.9 * logistic),
        "cell": 0.5 * logistic + 0.5 * exponential,
    }


def discovered_loss(pc, pr, rc, rr, *, beta: float = 0.05, member: str = "padll"):
    """A member of :func:`discovered_losses` by name (da.discopop). An h of rounding alone, as at policy = reference, is
    0: the weight that padll gives a pair would else be decided by how the batch was cut."""
    h = _h_difference(pc, pr, rc, rr)
    size = sum(x.detach().abs() for x in (pc, pr, rc, rr))
    family = discovered_losses(h, beta=beta, below=sign_beyond_rounding(h.detach(), size) < 0)
    if member not in family:
        raise ValueError(f"discovered loss {member!r} is not known; write one of: {', '.join(family)}")
    return family[member]


def policy_focused_loss(pc, pr, rc, rr, *, beta: float = 0.05):
    """PFL: half the logistic loss of u where the policy by itself ranks chosen above rejected, S_w > S_l, else twice
    the hinge loss (da.discopop; Lu et al. 2024).
    """
    u = beta * _h_difference(pc, pr, rc, rr)
    return torch.where(pc > pr, 0.5 * F.softplus(-u), 2.0 * F.relu(1 - u))


def adaptive_quantile_loss(pc, pr, rc, rr, *, beta: float = 0.05, mean_h):
    """AQL: q logistic + (1 - q) hinge of u, q = sigma(-beta (h - m)), m = 0.5 + 0.01 (sigma(mean h) - 0.5), the mean
    over the whole step, detached (da.discopop; Lu et al. 2024).
    """
    h = _h_difference(pc, pr, rc, rr)
    q = torch.sigmoid(-beta * (h - (0.5 + 0.01 * (torch.sigmoid(mean_h) - 0.5))))
    return q * F.softplus(-beta * h) + (1 - q) * F.relu(1 - beta * h)


def cal_dpo_loss(pc, pr, rc, rr, *, beta: float = 0.1, cal_weight: float = 0.5, beta_in_contrast: bool = False):
    """-log sigma(h) + w [(h_w - 1/(2 beta))^2 + (h_l + 1/(2 beta))^2] (da.cal_dpo)."""
    h_w, h_l = _h(pc, pr, rc, rr)
    contrast = F.softplus(-(h_w - h_l) * (beta if beta_in_contrast else 1.0))
    return contrast + cal_weight * ((h_w - 0.5 / beta) ** 2 + (h_l + 0.5 / beta) ** 2)


def sppo_hard_loss(pc, pr, rc, rr, *, beta: float = 1e-3):
    """(h_w - 1/(2 beta))^2 + (h_l + 1/(2 beta))^2, reference = previous iterate (da.sppo)."""
    h_w, h_l = _h(pc, pr, rc, rr)
    return (h_w - 0.5 / beta) ** 2 + (h_l + 0.5 / beta) ** 2


def sppo_soft_loss(policy, previous, win_prob, *, eta: float):
    """(log pi/pi_t - eta (P(y > pi_t) - 1/2))^2 per response (da.sppo, SPPO)."""
    return (policy - previous - eta * (win_prob - 0.5)) ** 2


def sppo_loss(policy, ref, lengths, *, beta: float = 1e-3, win_prob):
    """Mean over one prompt's responses of the soft SPPO regression, eta = 1/beta, ref = previous iterate (da.sppo)."""
    return sppo_soft_loss(policy, ref, win_prob, eta=1.0 / beta).mean()


def nca_pair_loss(pc, pr, rc, rr, *, beta: float = 0.1):
    """-log sigma(r_w) - 1/2 log sigma(-r_w) - 1/2 log sigma(-r_l), r = beta h (da.relatives)."""
    h_w, h_l = _h(pc, pr, rc, rr)
    return F.softplus(-beta * h_w) + 0.5 * F.softplus(beta * h_w) + 0.5 * F.softplus(beta * h_l)


def bco_pair_loss(pc, pr, rc, rr, *, beta: float = 0.1, delta: float = 0.0):
    """-log sigma(r_w - delta) - log sigma(-(r_l - delta)), r = beta h, delta detached (da.bco)."""
    h_w, h_l = _h(pc, pr, rc, rr)
    return F.softplus(-(beta * h_w - delta)) + F.softplus(beta * h_l - delta)


def exo_pair_loss(pc, pr, rc, rr, *, beta: float = 0.1, label_smoothing: float = 1e-3):
    """KL([sigma(u), sigma(-u)] || [1-eps, eps]) (da.relatives)."""
    if not 0 < label_smoothing < 1:
        raise ValueError("exo_pair needs label_smoothing in (0, 1): write 0.001")
    h_w, h_l = _h(pc, pr, rc, rr)
    u = beta * (h_w - h_l)
    eps = torch.as_tensor(label_smoothing, dtype=u.dtype)
    return torch.sigmoid(u) * (F.logsigmoid(u) - torch.log1p(-eps)) + torch.sigmoid(-u) * (
        F.logsigmoid(-u) - torch.log(eps)
    )


def r_dpo_loss(pc, pr, rc, rr, *, beta: float = 0.1, length_chosen, length_rejected, alpha: float = 0.05):
    """-log sigma(u + a|y_w| - a|y_l|): length-regularised DPO in the catalogue's sign (da.relatives)."""
    h_w, h_l = _h(pc, pr, rc, rr)
    return F.softplus(-(beta * (h_w - h_l) + alpha * (length_chosen - length_rejected)))


def aot_matches(h_chosen, h_rejected):
    """(rejected log-ratio of equal rank for each chosen one, chosen log-ratio of equal rank for each rejected one)
    [B].
    """
    order_w, order_l = torch.argsort(h_chosen, stable=True), torch.argsort(h_rejected, stable=True)
    for_chosen, for_rejected = torch.empty_like(h_chosen), torch.empty_like(h_rejected)
    for_chosen[order_w], for_rejected[order_l] = h_rejected[order_l], h_chosen[order_w]
    return for_chosen, for_rejected


def aot_matched_loss(
    pc, pr, rc, rr, *, beta: float = 0.1, label_smoothing: float = 0.0, matched_rejected, matched_chosen
):
    """Logistic on the sorted log-ratios of the whole step (da.relatives; Melnyk et al. 2024, unpaired) taken apart by
    rows: each side against the detached value it is matched with.

    A matched pair occurs in two rows, so values are halved; gradients are those of the whole, since each side moves in
    one of the two only.
    """
    h_w, h_l = _h(pc, pr, rc, rr)
    both = soft_bce(beta * (h_w - matched_rejected), 1 - label_smoothing) + soft_bce(
        beta * (matched_chosen - h_l), 1 - label_smoothing
    )
    return both - 0.5 * both.detach()


def equal_ranks(values, others):
    """The one of ``others`` [B] that has the rank of each of ``values`` [B], both counted from the smallest."""
    found = torch.empty_like(others)
    found[torch.argsort(values, stable=True)] = torch.sort(others).values
    return found


def aot_paired_loss(pc, pr, rc, rr, *, beta: float = 0.1, label_smoothing: float = 0.0, matched_margin):
    """Logistic on S_pi(y_w) - S_pi(y_l) less the reference's difference of equal rank over the whole step (AOT, Melnyk
    et al. 2024, paired).

    The reference's values of the row itself are not read: ``matched_margin`` is another row's, as :func:`equal_ranks`
    says.
    """
    return soft_bce(beta * (pc - pr - matched_margin), 1 - label_smoothing)


def wpo_loss(pc, pr, rc, rr, *, beta: float = 0.1, mean_chosen, mean_rejected):
    """DPO weighted by the detached length-normalised probability of both responses, exp(M_w + M_l) (da.relatives, WPO).

    Option ``aligned``: M is less the mean of log sum_v pi(v)^2, so that a response as likely as one the policy would
    draw weighs 1 (Zhou et al. 2024).
    """
    weight = torch.exp(mean_chosen + mean_rejected).detach()
    return weight * F.softplus(-beta * _h_difference(pc, pr, rc, rr))


def mdpo_loss(
    pc,
    pr,
    rc,
    rr,
    *,
    beta: float = 0.1,
    h_corrupted,
    delta: float = 0.0,
    conditional_weight: float = 1.0,
    anchor_weight: float = 1.0,
):
    """DPO + conditional + anchor (da.mdpo): h_corrupted is the chosen response's log-ratio under the corrupted
    prompt.
    """
    h_w, h_l = _h(pc, pr, rc, rr)
    return (
        F.softplus(-beta * (h_w - h_l))
        + conditional_weight * F.softplus(-beta * (h_w - h_corrupted))
        + anchor_weight * F.softplus(-(beta * h_w - delta))
    )


def reference_free_loss(pc, pr, rc=None, rr=None, *, beta: float = 0.1):
    """-log sigma(beta (S_w - S_l)) (da.reference_free; the preference term of CPO)."""
    return F.softplus(-beta * (pc - pr))


def simpo_loss(pc, pr, rc=None, rr=None, *, beta: float = 2.0, simpo_gamma: float = 0.5, label_smoothing: float = 0.0):
    """-log sigma(beta M_w - beta M_l - gamma), means of token log-probs (da.simpo)."""
    return soft_bce(beta * (pc - pr) - simpo_gamma, 1 - label_smoothing)


def alphapo_reward(mean_logp, *, beta: float = 2.0, alpha: float = 0.25):
    """beta (1 - exp(-alpha M)) / alpha; alpha -> 0 is beta M (da.alphapo)."""
    if abs(alpha) < 1e-6:
        return beta * mean_logp
    return -beta * torch.expm1((-alpha * mean_logp).clamp(max=80.0)) / alpha


def alphapo_loss(pc, pr, rc=None, rr=None, *, beta: float = 2.0, simpo_gamma: float = 0.5, alpha: float = 0.25):
    """-log sigma(r_w - r_l - gamma) with the shaped reward (da.alphapo)."""
    return F.softplus(
        -(alphapo_reward(pc, beta=beta, alpha=alpha) - alphapo_reward(pr, beta=beta, alpha=alpha) - simpo_gamma)
    )


def log_odds(mean_logp, clamp_max: float = -1e-6):
    """log P/(1-P), P = exp(M), M clamped to <= clamp_max (da.orpo)."""
    m = mean_logp.clamp(max=clamp_max)
    return m - log1mexp(m)


def orpo_loss(pc, pr, rc=None, rr=None, *, beta: float = 0.1):
    """lambda * -log sigma(log odds_w - log odds_l), lambda = beta; the NLL of the chosen response is added outside
    (da.orpo).
    """
    return beta * F.softplus(-(log_odds(pc) - log_odds(pr)))


def kto_loss(logratio, z0, label, *, beta: float = 0.1, desirable_weight=1.0, undesirable_weight=1.0):
    """lambda_y - v per row: v = lambda sigma(beta (r - z0)) if desirable else lambda sigma(beta (z0 - r)) (da.kto).

    `logratio` has no beta in it; `z0` is the detached reference point.
    """
    z0 = z0.detach() if torch.is_tensor(z0) else z0
    good = label.bool()
    one = torch.ones_like(logratio)
    weight = torch.where(good, desirable_weight * one, undesirable_weight * one)
    return weight * torch.sigmoid(torch.where(good, -1.0, 1.0) * beta * (logratio - z0))


def bco_loss(logratio, label, *, beta: float = 0.1, delta: float = 0.0):
    """-log sigma(r - delta) of a desirable row, -log sigma(-(r - delta)) of another, r = beta logratio (da.bco,
    unpaired).
    """
    r = beta * logratio - delta
    return F.softplus(torch.where(label.bool(), -r, r))


def apo_zero_unpaired_loss(logratio, label, *, beta: float = 0.1):
    """1 - sigma(beta r) of a desirable row, sigma(beta r) of another (da.apo_zero, unpaired)."""
    return torch.sigmoid(torch.where(label.bool(), -beta, beta) * logratio)


def weighted_mean(values, weights):
    """Mean of values [B] by the weights of their rows; a row of weight 0 counts nothing, and the mean of such rows
    alone is 0 (section 0).
    """
    return (values * weights).sum() / weights.sum().clamp(min=1e-12)


def kto_reference_point(mismatched_logratios, weights=None):
    """z0 = max(0, mean over the batch), detached: mean first, clamp after (da.kto). ``weights`` [B] of the rows; by
    default all count alike.
    """
    ratios = mismatched_logratios.detach()
    return (ratios.mean() if weights is None else weighted_mean(ratios, weights)).clamp(min=0.0)


def kto_weight_range(n_desirable: int, n_undesirable: int, undesirable_weight: float = 1.0, ratio=(1.0, 1.5)):
    """Desirable weights for which lambda_D n_D / (lambda_U n_U) is inside `ratio` (da.kto)."""
    base = undesirable_weight * n_undesirable / n_desirable
    return [ratio[0] * base, ratio[1] * base]


def slic_loss(pc, pr, rc=None, rr=None, *, delta: float = 1.0, reg_coef: float = 0.1, target=None):
    """max(0, delta - S_w + S_l) - lambda S_target (da.slic); target defaults to the chosen response."""
    return F.relu(delta - pc + pr) - reg_coef * (pc if target is None else target)


def odpo_offset(score_chosen, score_rejected, alpha: float = 1.0, offset_fn: str = "log"):
    """Detached offset alpha f(score gap); pairs with a gap <= 0 must have been dropped (da.odpo)."""
    gap = (score_chosen - score_rejected).detach()
    if bool((gap <= 0).any()):
        raise ValueError("odpo: a pair's chosen score is not above its rejected score; drop such pairs at ingestion")
    return alpha * (torch.log(gap) if offset_fn == "log" else gap)


def odpo_loss(
    pc, pr, rc, rr, *, beta: float = 0.1, offset=0.0, score_gap=None, alpha: float = 1.0, offset_fn: str = "log"
):
    """-log sigma(u - offset), the offset given or alpha f(score gap) (da.odpo, Amini et al. 2024)."""
    if score_gap is not None:
        offset = odpo_offset(score_gap, torch.zeros_like(score_gap), alpha, offset_fn)
    return F.softplus(-(beta * _h_difference(pc, pr, rc, rr) - offset))


def rpo_loss(pc, pr, rc, rr, *, beta: float = 0.1, score_gap, eta: float = 1.0):
    """KL(Bernoulli(sigma(eta gap)) || Bernoulli(sigma(u))) (da.rpo, Nemotron-4)."""
    h_w, h_l = _h(pc, pr, rc, rr)
    u, b = beta * (h_w - h_l), (eta * score_gap).detach()
    p = torch.sigmoid(b)
    return p * (F.logsigmoid(b) - F.logsigmoid(u)) + (1 - p) * (F.logsigmoid(-b) - F.logsigmoid(-u))


def rebel_pair_loss(pc, pr, rc, rr, *, beta: float = 1.0, score_gap):
    """(beta (h_w - h_l) - reward gap)^2, beta = 1/eta, reference = the current iterate (da.rebel)."""
    return (beta * _h_difference(pc, pr, rc, rr) - score_gap.detach()) ** 2


def rrhf_loss(policy, ref, lengths, *, rewards, average: bool = False):
    """Ranked hinge on mean log-probs minus the best response's log-prob, over one prompt (da.rrhf).

    `average` divides the pairs by their number and the best response's term by its length.
    """
    mean_logps = policy / lengths
    best = torch.argmax(rewards)  # first of equals
    pairs = int((rewards.unsqueeze(1) < rewards.unsqueeze(0)).sum()) if average else 1
    return rrhf_rank_loss(mean_logps, rewards) / max(pairs, 1) - (mean_logps if average else policy)[best]


def pl_dpo_loss(policy, ref, lengths, *, beta: float = 0.1):
    """-log Plackett-Luce probability of one prompt's ranking, best first, under the implicit rewards (da.pl_dpo)."""
    return plackett_luce_loss(beta * (policy - ref))


def rrhf_rank_loss(mean_logps, rewards):
    """Sum over pairs with r_i < r_j of max(0, p_i - p_j) for one prompt (da.rrhf)."""
    worse = rewards.unsqueeze(1) < rewards.unsqueeze(0)
    return torch.where(worse, F.relu(mean_logps.unsqueeze(1) - mean_logps.unsqueeze(0)), 0.0).sum()


def two_d_dpo_arguments(segments_chosen, segments_rejected, weight_chosen, weight_rejected, *, beta: float = 0.1):
    """beta (w_c sum delta_c - w_r sum delta_r) per paired segment (da.2d_dpo)."""
    return beta * (weight_chosen * segments_chosen - weight_rejected * segments_rejected)


def two_d_dpo_loss(segments_chosen, segments_rejected, weight_chosen, weight_rejected, *, beta: float = 0.1):
    """-sum over paired segments of log sigma of :func:`two_d_dpo_arguments`, one pair of responses (da.2d_dpo)."""
    return F.softplus(
        -two_d_dpo_arguments(segments_chosen, segments_rejected, weight_chosen, weight_rejected, beta=beta)
    ).sum()


def segment_sums(token_values, starts, lengths):
    """Sums over half-open spans [start, start+length) (da.2d_dpo)."""
    return torch.stack([token_values[s : s + n].sum() for s, n in zip(starts, lengths)])


def unlikelihood_loss(logps):
    """-log(1 - p) per negative token, nats, from its log-probability (sft.unlikelihood; Welleck et al. 2020).

    A probability that rounds to 1 counts as 1 - eps: the value stays finite and keeps a gradient.
    """
    return -log1mexp(logps - (logps + torch.finfo(logps.dtype).eps).relu().detach())
