"""Losses of every training stage, as plain functions of log-probabilities and scores.

Legend of shapes: B rows (sequences or pairs), T token positions, V vocabulary.
Every function returns elementwise values ([B, T] or [B]); nothing here averages over a batch.
`aggregate` turns them into a sum and its counts, and the optimizer step divides once, by the counts of the
whole step (row AGG of tests/methods.yaml), so micro-batching cannot change a result.

Masked positions may hold anything, NaN and infinities included: they are replaced by constants with
`torch.where` before any exp or sum, so neither values nor gradients can be polluted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F

LOG_RATIO_CLAMP = 20.0  # nats
LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def _choice(name: str, value: str, allowed) -> str:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known; write one of: {', '.join(allowed)}")
    return value


def masked(values, mask):
    """`values` where mask is 1, exactly 0 (with zero gradient) elsewhere. Any shapes that broadcast."""
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def log1mexp(x):
    """log(1 - e^x) for x < 0, stable on both ends (section 0, Numerics)."""
    near_zero = x > -math.log(2.0)
    near = torch.where(near_zero, x, torch.full_like(x, -math.log(2.0)))
    far = torch.where(near_zero, torch.full_like(x, -1.0), x)
    return torch.where(near_zero, torch.log(-torch.expm1(near)), torch.log1p(-torch.exp(far)))


# --- sequences and aggregation ------------------------------------------------------------------


def token_nll(logps):
    """Negative log-likelihood per token, nats; same shape as `logps` (sft.nll)."""
    return -logps


def dynamic_nll(logps):
    """-sg(p) log p per token, p the token's own probability (Dynamic Fine-Tuning, Wu et al. 2025); same shape as
    `logps`.
    """
    return -torch.exp(logps.detach()) * logps


def smoothed_nll(logps, mean_logps, label_smoothing_factor: float):
    """(1 - eps) of the target's NLL, eps of the mean NLL over the vocabulary, per token (label smoothing, Szegedy et
    al. 2016; Hugging Face's meaning).
    """
    return -(1 - label_smoothing_factor) * logps - label_smoothing_factor * mean_logps


def count_targets(mask_BT) -> dict[str, int]:
    """{"tokens": trained tokens, "sequences": rows with at least one of them}: the denominators of a batch."""
    mask = mask_BT.bool()
    return {"tokens": int(mask.sum()), "sequences": int(mask.any(-1).sum())}


def denominator_of(mode: str) -> str:
    """The count ("tokens" or "sequences") by which the step divides the sum of `aggregate(..., mode)`."""
    return "tokens" if _choice("loss_agg_mode", mode, LOSS_AGG_MODES) == "token-mean" else "sequences"


def aggregate(loss_BT, mask_BT, mode: str, loss_scale_factor: float | None = None, counted: bool = True):
    """Sum of a token loss [B, T] and its counts, for one micro-batch: (0-dim tensor, {"tokens", "sequences"}).

    Dividing the summed sums by the summed `denominator_of(mode)` counts of the optimizer step gives
    token-mean, seq-mean-token-sum, seq-mean-token-mean or seq-mean-token-sum-norm (which also divides by the
    constant `loss_scale_factor`, normally the maximum completion length). Fully masked rows are in no count.
    Not `counted`: None in place of the counts, for which a GPU would be waited for. Source: AGG, part.agg.
    """
    _choice("loss_agg_mode", mode, LOSS_AGG_MODES)
    per_row = masked(loss_BT, mask_BT).sum(-1)
    lengths = mask_BT.bool().sum(-1)
    if mode == "seq-mean-token-mean":
        per_row = per_row / lengths.clamp(min=1)
    elif mode == "seq-mean-token-sum-norm":
        if loss_scale_factor is None or not loss_scale_factor > 0:
            raise ValueError(
                "seq-mean-token-sum-norm needs a constant: write loss_scale_factor=<maximum completion length>"
            )
        per_row = per_row / loss_scale_factor
    return per_row.sum(), count_targets(mask_BT) if counted else None


# --- reward models --------------------------------------------------------------------------------


def soft_bce(logit, label_prob):
    """-p log sigma(z) - (1-p) log sigma(-z), elementwise (part.bce; rm.soft_label, rm.orm, da.soft_dpo)."""
    return label_prob * F.softplus(-logit) + (1 - label_prob) * F.softplus(logit)


def bradley_terry_loss(
    chosen_B,
    rejected_B,
    margin=None,
    label_prob=None,
    label_smoothing: float = 0.0,
    center_rewards_coefficient: float = 0.0,
):
    """Pairwise ranking loss per pair [B]: -log sigma(r_w - r_l - margin) (rm.bt, rm.margin, rm.soft_label).

    `label_prob` = P(chosen preferred) makes it the soft-label loss; `label_smoothing` flips that share of labels;
    `center_rewards_coefficient` adds c (r_w + r_l)^2. The margin is data: no gradient, training only.
    """
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing={label_smoothing} must be in [0, 0.5): it is the assumed share of flipped labels"
        )
    z = chosen_B - rejected_B
    if margin is not None:
        z = z - (margin.detach() if torch.is_tensor(margin) else margin)
    p = 1.0 if label_prob is None else label_prob
    loss = soft_bce(z, p * (1 - label_smoothing) + (1 - p) * label_smoothing)
    if center_rewards_coefficient:
        loss = loss + center_rewards_coefficient * (chosen_B + rejected_B) ** 2
    return loss


def kwise_pairs_loss(scores, pairs):
    """-log sigma(s_w - s_l) for (winner, loser) index pairs of one score vector -> [pairs] (rm.kwise_pairs)."""
    index = torch.as_tensor(pairs, dtype=torch.long, device=scores.device).reshape(-1, 2)
    return F.softplus(-(scores[index[:, 0]] - scores[index[:, 1]]))


def plackett_luce_loss(ordered_scores, top: int | None = None):
    """-log P of a ranking given best first: sum over k of logsumexp_{j>=k} s - s_k, last axis (rm.plackett_luce)."""
    K = ordered_scores.shape[-1]
    tail = torch.logcumsumexp(ordered_scores.flip(-1), -1).flip(-1)
    stop = K - 1 if top is None else min(top, K - 1)
    return (tail[..., :stop] - ordered_scores[..., :stop]).sum(-1)


# --- direct alignment: DPO (the rest of the family is in stages/direct/direct_losses.py) ---------------------


def implicit_rewards(policy_B, ref_B, beta: float):
    """beta (S_pi - S_ref) [B], the reward a tuned policy implies; sums of log-probs, not means (rm.implicit)."""
    return beta * (policy_B - ref_B)


def dpo_loss(
    policy_chosen,
    policy_rejected,
    ref_chosen,
    ref_rejected,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    label_prob=None,
    robust: bool = False,
):
    """-log sigma(beta [(S_pi - S_ref)(y_w) - (S_pi - S_ref)(y_l)]) per pair [B] (da.dpo, Rafailov et al. 2023 eq. 7).

    `label_smoothing` is cDPO (with `robust=True` the unbiased form of Chowdhury et al. 2024), `label_prob` the
    soft-label form (da.cdpo, da.soft_dpo). Inputs are sums of log-probs [B]; the reference carries no gradient.
    """
    if beta <= 0:
        raise ValueError(f"beta={beta} must be > 0: write 0.1 (larger stays closer to the reference)")
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing={label_smoothing} must be in [0, 0.5): it is the assumed share of flipped labels"
        )
    u = beta * ((policy_chosen - ref_chosen) - (policy_rejected - ref_rejected))
    if robust:
        return ((1 - label_smoothing) * F.softplus(-u) - label_smoothing * F.softplus(u)) / (1 - 2 * label_smoothing)
    p = 1.0 if label_prob is None else label_prob
    return soft_bce(u, p * (1 - label_smoothing) + (1 - p) * label_smoothing)


#: Roundings of a log-prob of a response within which a difference is none (ours): what micro-batches and kernels make
#: of the same weights differs by so much.
ROUNDINGS = 16


def sign_beyond_rounding(difference, magnitude):
    """-1, 0 or 1 [...]: 0 where ``difference`` is within ``ROUNDINGS`` machine epsilons of its type times
    ``magnitude``, the size of what was subtracted.

    At policy = reference every log-ratio is rounding; shares of such signs would be those of a coin that falls
    otherwise with every micro-batch.
    """
    return torch.where(
        difference.abs() <= ROUNDINGS * torch.finfo(difference.dtype).eps * magnitude.abs(),
        torch.zeros_like(difference),
        difference.sign(),
    )


def displacement_metrics(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta: float = 0.1) -> dict:
    """Sums over pairs that show both likelihoods falling (da.displacement); divide by "pairs".

    A fall is one beyond rounding, and of "accuracy" a tie within rounding counts one half
    (:func:`sign_beyond_rounding`).
    """
    h_w, h_l = (policy_chosen - ref_chosen).detach(), (policy_rejected - ref_rejected).detach()
    size_w, size_l = policy_chosen.detach(), policy_rejected.detach()
    fell_w, fell_l = sign_beyond_rounding(h_w, size_w) < 0, sign_beyond_rounding(h_l, size_l) < 0
    return {
        "pairs": h_w.numel(),
        "chosen_shift": h_w.sum(),
        "rejected_shift": h_l.sum(),
        "displaced": fell_w.sum(),
        "both_fell": (fell_w & fell_l).sum(),
        "margin": beta * (h_w - h_l).sum(),
        "accuracy": (0.5 + 0.5 * sign_beyond_rounding(h_w - h_l, size_w.abs() + size_l.abs())).sum(),
    }


# --- policy gradients -----------------------------------------------------------------------------

RATIO_LEVELS = ("token", "sequence", "sequence_mean")
SURROGATES = ("clip", "none", "logp", "stopgrad_ratio", "cispo", "sapo", "vespo", "geo_mean", "dppo_tv", "dppo_kl")
OWN_RATIO = ("vespo", "geo_mean", "dppo_tv", "dppo_kl")  # surrogates that read no ratio_level
REJECTION_LEVELS = ("token", "sequence_sum", "sequence_mean", "sequence_max")
REJECTION_STATISTICS = ("ratio", "k2", "k3", "binary_kl", "tv")


def log_ratios(logps_BT, old_logps_BT, mask_BT, ratio_level: str = "token", log_ratio_clamp: float = LOG_RATIO_CLAMP):
    """log pi/pi_old per token [B, T] (0 at masked positions), at the chosen level, and the share that was clamped.

    `sequence` is the product ratio of the row, `sequence_mean` its geometric mean (GSPO); both are repeated on
    every token of the row, so `seq-mean-token-mean` gives one term per sequence. Clamped to +-log_ratio_clamp.
    """
    mask = mask_BT.bool()
    zero = torch.zeros((), dtype=logps_BT.dtype, device=logps_BT.device)
    d = torch.where(mask, logps_BT, zero) - torch.where(mask, old_logps_BT, zero)
    if _choice("ratio_level", ratio_level, RATIO_LEVELS) != "token":
        total = d.sum(-1, keepdim=True)
        if ratio_level == "sequence_mean":
            total = total / mask.sum(-1, keepdim=True).clamp(min=1)
        d = torch.where(mask, total.expand_as(d), zero)
    clamped = (d.detach().abs() > log_ratio_clamp) & mask
    return d.clamp(-log_ratio_clamp, log_ratio_clamp), clamped


def policy_loss(
    logps_BT,
    old_logps_BT,
    advantages,
    mask_BT,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    ratio_level: str = "token",
    surrogate: str = "clip",
    clip_ratio_c: float | None = None,
    weights_BT=None,
    log_ratio_clamp: float = LOG_RATIO_CLAMP,
    options: Mapping[str, float] = MappingProxyType({}),
):
    """Per-token policy loss [B, T] (to minimise) and detached sums for the log.

    `advantages` [B] (repeated on every token) or [B, T]; detached here. `surrogate`:
    `clip` -min(rho A, clip(rho, 1-epsilon, 1+epsilon_high) A) (PPO-CLIP; `clip_ratio_c` adds the dual clip);
    `none` -rho A (CPI); `logp` -A log pi (REINFORCE, RLOO; old_logps unused);
    `stopgrad_ratio` -A pi/sg(pi) (ONE-STEP); `cispo` -sg(min(rho, 1+epsilon_high)) A log pi;
    `geo_mean` -A (prod_t rho_t)^(1/n) of the row, log rho_t clipped to [-epsilon, epsilon_high] on the side where the
    clip of `clip` acts (GMPO, Zhao et al. 2025, eq. 4); `dppo_tv`, `dppo_kl` -sg(min(rho, clip_ratio_c)) A log pi,
    without tokens that A pushes further away from pi_old than a divergence of epsilon (up: epsilon_high): total
    variation or KL of "this token or another one" (DPPO, 2026, section 5); `sapo` -A :func:`soft_gate`(rho); `vespo` -A
    :func:`gamma_weights` log pi (``options``: their constants, of algorithms.SURROGATE_OPTIONS). `weights_BT` are
    detached importance weights (TIS), which `vespo` takes into its ratio. epsilon_high defaults to epsilon. Metrics:
    {"tokens", "clip_low", "clip_high", "outside_range", "ratio", "ratio_sq", "k1", "k2", "k3", "log_ratio_clamped"},
    sums over trained tokens, k* of KL(old||new), and the maximum "ratio_max". "clip_*" count tokens whose gradient is
    zeroed: none unless the surrogate is `clip`, `geo_mean` or a `dppo`; the dual clip's are "clip_dual".
    "outside_range", of surrogates with a clip range, counts tokens beyond epsilon on either side, whatever their
    advantage: of the ratio (`cispo`: above 1+epsilon_high), of its log (`geo_mean`) or of the divergence (a `dppo`).
    "capped" are
    those whose weight `cispo` cut to 1+epsilon_high; "soft_weight" is what `sapo` and `vespo` leave of the gradient of
    rho A or A log pi.
    """
    _choice("surrogate", surrogate, SURROGATES)
    high = epsilon if epsilon_high is None else epsilon_high
    if not (0 < epsilon and 0 < high):
        raise ValueError(
            f"epsilon={epsilon}, epsilon_high={high}: clip ranges must be > 0; write surrogate='none' for no clipping"
        )
    # of a dppo it bounds weights, and epsilon is a divergence
    if clip_ratio_c is not None and not surrogate.startswith("dppo") and clip_ratio_c <= 1 + high:
        raise ValueError(f"clip_ratio_c={clip_ratio_c} must be above 1 + epsilon_high = {1 + high}; 3.0 is usual")
    mask = mask_BT.bool()
    logps = masked(logps_BT, mask)
    adv = advantages.detach().to(logps.dtype)
    adv = masked(adv.unsqueeze(-1).expand_as(logps) if adv.dim() == logps.dim() - 1 else adv, mask)
    old = logps.detach() if surrogate in ("logp", "stopgrad_ratio") else old_logps_BT.detach()
    log_ratio, clamped = log_ratios(
        logps, old, mask, "token" if surrogate in OWN_RATIO else ratio_level, log_ratio_clamp
    )
    ratio = torch.exp(log_ratio)
    hits = dict.fromkeys(("clip_low", "clip_high"), torch.zeros_like(mask))
    if surrogate == "clip":
        hits = {
            "clip_low": (adv < 0) & (ratio < 1 - epsilon) & mask,
            "clip_high": (adv > 0) & (ratio > 1 + high) & mask,
        }
        objective = torch.where(
            hits["clip_low"], (1 - epsilon) * adv, torch.where(hits["clip_high"], (1 + high) * adv, ratio * adv)
        )
        if clip_ratio_c is not None:
            hits["clip_dual"] = (adv < 0) & (ratio > clip_ratio_c) & mask
            objective = torch.where(hits["clip_dual"], clip_ratio_c * adv, objective)
    elif surrogate == "logp":
        objective = adv * logps
    elif surrogate == "cispo":
        hits["capped"] = (ratio > 1 + high) & mask
        objective = ratio.detach().clamp(max=1 + high) * adv * logps
    elif surrogate == "geo_mean":
        hits = {
            "clip_low": (adv < 0) & (log_ratio < -epsilon) & mask,
            "clip_high": (adv > 0) & (log_ratio > high) & mask,
        }
        kept = torch.where(hits["clip_low"], -epsilon, torch.where(hits["clip_high"], high, log_ratio))
        objective = torch.exp(kept.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)) * adv
    elif surrogate.startswith("dppo"):
        p, q = torch.exp(logps.detach()), torch.exp(masked(old, mask))
        far = (p - q).abs() if surrogate == "dppo_tv" else binary_kl(q, p)
        hits = {
            "clip_low": (adv < 0) & (p < q) & (far > epsilon) & mask,
            "clip_high": (adv > 0) & (p > q) & (far > high) & mask,
        }
        objective = (
            ratio.detach().clamp(max=math.inf if clip_ratio_c is None else clip_ratio_c)
            * adv
            * masked(logps, ~(hits["clip_low"] | hits["clip_high"]))
        )
    elif surrogate == "sapo":
        gate, hits["soft_weight"] = soft_gate(ratio, adv, **options)
        objective = gate * adv
    elif surrogate == "vespo":
        hits["soft_weight"] = gamma_weights(log_ratio, adv, mask, weights_BT, **options)
        objective, weights_BT = hits["soft_weight"] * adv * logps, None
    else:  # none, stopgrad_ratio
        objective = ratio * adv
    if weights_BT is not None:
        objective = objective * masked(weights_BT.detach().to(objective.dtype), mask)
    d, r = log_ratio.detach(), ratio.detach()
    if surrogate == "geo_mean":
        hits["outside_range"] = ((d < -epsilon) | (d > high)) & mask
    elif surrogate.startswith("dppo"):
        hits["outside_range"] = ((p < q) & (far > epsilon) | (p > q) & (far > high)) & mask
    elif surrogate == "cispo":
        hits["outside_range"] = hits["capped"]
    elif surrogate == "clip":
        hits["outside_range"] = ((r < 1 - epsilon) | (r > 1 + high)) & mask
    metrics = {
        "tokens": mask.sum(),
        **{name: masked(hit, mask).sum() if hit.is_floating_point() else hit.sum() for name, hit in hits.items()},
        "ratio": masked(r, mask).sum(),
        "ratio_sq": masked(r * r, mask).sum(),
        "k1": masked(-d, mask).sum(),
        "k2": masked(d * d / 2, mask).sum(),
        "k3": masked(torch.expm1(d) - d, mask).sum(),
        "log_ratio_clamped": clamped.sum(),
        "ratio_max": masked(r, mask).max() if r.numel() else r.sum(),
    }
    return masked(-objective, mask), metrics


def by_sign(positive, constant_pos: float, constant_neg: float, like):
    """One of two constants by a bool tensor, in the type and place of ``like``."""
    return torch.where(
        positive, *(torch.tensor(c, dtype=like.dtype, device=like.device) for c in (constant_pos, constant_neg))
    )


def soft_gate(ratio_BT, advantages_BT, tau_pos: float = 1.0, tau_neg: float = 1.05):
    """(4/tau) sigma(tau (rho - 1)) [B, T], tau by the sign of the advantage, and its derivative 4 sigma (1 - sigma),
    detached (SAPO, Gao et al. 2025).

    The derivative is 1 on-policy and falls to 0 on both sides of it, where a clip would cut at once.
    """
    tau = by_sign(advantages_BT > 0, tau_pos, tau_neg, ratio_BT)
    sigma = torch.sigmoid(tau * (ratio_BT - 1))
    return 4 * sigma / tau, (4 * sigma * (1 - sigma)).detach()


def gamma_weights(
    log_ratio_BT,
    advantages_BT,
    mask_BT,
    weights_BT=None,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
):
    """phi(w) = w^k exp(lambda (1 - w)) [B, T], detached: the weight of a sequence with product ratio w, by the sign of
    the advantage; 1 at w = 1 (VESPO, 2026).

    log_ratio_BT: log pi/pi_old by token, 0 outside the mask; weights_BT: importance weights pi_old/mu, which make w the
    ratio to whoever sampled. log w is held within [log 1e-8, 20], so that phi is a number between 0 and its maximum at
    w = k/lambda.
    """
    low = math.log(1e-8)
    log_w = log_ratio_BT.detach().sum(-1, keepdim=True)
    if weights_BT is not None:
        log_w = log_w + masked(weights_BT.detach().to(log_w.dtype).log().clamp(low, LOG_RATIO_CLAMP), mask_BT).sum(
            -1, keepdim=True
        )
    log_w, gains = log_w.clamp(low, LOG_RATIO_CLAMP), advantages_BT >= 0
    k, rate = by_sign(gains, k_pos, k_neg, log_w), by_sign(gains, lambda_pos, lambda_neg, log_w)
    return masked(torch.exp(k * log_w - rate * torch.expm1(log_w)), mask_BT)


def off_policy_keep(logps_BT, sampler_logps_BT, advantages_BT, mask_BT, threshold: float):
    """Which tokens [B, T] stay in the policy loss: all of non-negative advantage, and those of a sequence whose mean of
    log mu/pi is at most the threshold (off-policy sequence masking, DeepSeek-V3.2 2025, eq. 9). mu: whoever sampled;
    detached; rows without a token are kept.
    """
    mask = mask_BT.bool()
    drift = masked(sampler_logps_BT - logps_BT.detach(), mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(
        min=1
    )
    return (advantages_BT >= 0) | (drift <= threshold)


def truncated_importance_weights(
    old_logps_BT, rollout_logps_BT, mask_BT, mode: str = "token_truncate", clip_max: float = 2.0, clip_min: float = 0.0
):
    """Detached weights pi_old(trainer)/mu(engine): [B, T] for token modes, [B, 1] for sequence modes (TIS). Outside of
    [clip_min, clip_max] they are cut to it (truncate) or 0 (mask)."""
    _choice("mode", mode, ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"))
    held = LOG_RATIO_CLAMP if mode.startswith("token") else math.inf  # of a sequence it is the sum that is clamped
    log_ratio, _ = log_ratios(old_logps_BT.detach(), rollout_logps_BT.detach(), mask_BT, log_ratio_clamp=held)
    ratio = torch.exp(
        log_ratio
        if mode.startswith("token")
        else log_ratio.sum(-1, keepdim=True).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    )
    return (
        ratio.clamp(clip_min, clip_max)
        if mode.endswith("truncate")
        else torch.where((ratio > clip_max) | (ratio < clip_min), 0.0, ratio)
    )


def binary_kl(p, q):
    """KL between two coins that fall on "this token" with probabilities p and q, held within [1e-6, 1 - 1e-6];
    elementwise, nats.
    """
    p, q = p.clamp(1e-6, 1 - 1e-6), q.clamp(1e-6, 1 - 1e-6)
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def rejected_tokens(
    old_logps_BT,
    rollout_logps_BT,
    mask_BT,
    level: str = "sequence_mean",
    statistic: str = "ratio",
    low: float = 0.0,
    high: float = 2.0,
):
    """Which tokens of the mask [B, T] are thrown out because trainer and sampler disagree on them, or on their
    sequence: the statistic is outside of [low, high] (rejection sampling of rollouts: "When Speed Kills Stability", Liu
    et al. 2025; verl's rollout_rs, OpenRLHF's is_correction_gating).

    ``statistic`` of the token: `ratio` pi_old/mu; `k2` d^2/2 and `k3` rho - 1 - d, d = log rho = log pi_old/mu,
    estimators of KL(mu||pi_old); `binary_kl` and `tv`, KL and total variation of "this token or another one" under mu
    and pi_old (DPPO 2026, eq. 8 and 9). ``level``: of each token, or of the sequence the sum, mean or maximum; of
    ratios the product, geometric mean or largest. ``low`` bounds ratios only.
    """
    _choice("rejection", level, REJECTION_LEVELS)
    _choice("rejection_statistic", statistic, REJECTION_STATISTICS)
    mask = mask_BT.bool()
    held = math.inf if statistic == "ratio" else LOG_RATIO_CLAMP  # which is clamped once it is of the level
    d, _ = log_ratios(old_logps_BT.detach(), rollout_logps_BT.detach(), mask, log_ratio_clamp=held)
    if statistic == "ratio":
        values = d
    elif statistic == "k2":
        values = d * d / 2
    elif statistic == "k3":
        values = torch.expm1(d) - d
    else:
        p, q = (masked(x.detach(), mask).exp() for x in (rollout_logps_BT, old_logps_BT))
        values = (p - q).abs() if statistic == "tv" else binary_kl(p, q)
    values = masked(values, mask)
    if level == "sequence_max":
        values = values.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True)
    elif level != "token":
        values = values.sum(-1, keepdim=True) / (
            mask.sum(-1, keepdim=True).clamp(min=1) if level == "sequence_mean" else 1
        )
    if statistic == "ratio":
        values = values.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    return ((values > high) | (values < low) & (statistic == "ratio")) & mask


def tapered_weights(logps_B, behaviour_logps_B, rewards_B, clip_pos=(1.0, 1.0), clip_neg=(0.0, 1.0)):
    """Detached TOPR weights [B]: ratio clipped to clip_pos where reward > 0, to clip_neg elsewhere."""
    ratio = torch.exp((logps_B - behaviour_logps_B).detach().clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP))
    return torch.where(rewards_B > 0, ratio.clamp(*clip_pos), ratio.clamp(*clip_neg))


# --- KL, entropy, values ----------------------------------------------------------------------------

KL_ESTIMATORS = ("k1", "k2", "k3")


def kl_estimate(
    logps_BT, ref_logps_BT, kind: str, mask_BT, old_logps_BT=None, log_ratio_clamp: float = LOG_RATIO_CLAMP
):
    """Sampled KL(pi||ref) per token [B, T], samples from pi; 0 outside the mask (KL-EST, Schulman 2020).

    d = log pi - log ref: k1 = d; k2 = d^2/2 and k3 = exp(-d) - 1 + d with d clamped (linear term included).
    Differentiable through `logps_BT`. As a loss: k1 regularises nothing (refused by the presets), k2 gives the
    reverse-KL gradient, k3 the forward-KL gradient; with `old_logps_BT` the estimate is multiplied by the
    differentiable ratio pi/pi_old, which restores the reverse-KL gradient (kl_is_weighted).
    """
    _choice("kl_estimator", kind, KL_ESTIMATORS)
    mask = mask_BT.bool()
    d = masked(logps_BT, mask) - masked(ref_logps_BT, mask)
    held = d.clamp(-log_ratio_clamp, log_ratio_clamp)
    kl = d if kind == "k1" else held * held / 2 if kind == "k2" else torch.expm1(-held) + held
    if old_logps_BT is not None:
        log_ratio, _ = log_ratios(logps_BT, old_logps_BT.detach(), mask_BT, log_ratio_clamp=log_ratio_clamp)
        kl = kl * torch.exp(log_ratio)
    return masked(kl, mask)


def clipped_values(values_BT, old_values_BT, cliprange_value: float):
    """Values held within ``cliprange_value`` of what was predicted when the rollout was scored [B, T] (VALUE-CLIP)."""
    return old_values_BT + (values_BT - old_values_BT).clamp(-cliprange_value, cliprange_value)


def value_clips(values_BT, targets_BT, mask_BT, old_values_BT, cliprange_value: float):
    """Tokens [B, T] of the mask whose clipped error is the larger one, so that they have no gradient; bool, detached
    (VALUE-CLIP).
    """
    mask = mask_BT.bool()
    values, targets, old = (masked(x.detach(), mask) for x in (values_BT, targets_BT, old_values_BT))
    return (clipped_values(values, old, cliprange_value) - targets) ** 2 > (values - targets) ** 2


def value_loss(
    values_BT, targets_BT, mask_BT, old_values_BT=None, cliprange_value: float | None = None, half: bool = False
):
    """(V - target)^2 per token [B, T]; with a clip range the maximum of clipped and unclipped error (CRITIC-LOSS,
    VALUE-CLIP).
    """
    mask = mask_BT.bool()
    values, targets = masked(values_BT, mask), masked(targets_BT, mask).detach()
    loss = (values - targets) ** 2
    if cliprange_value is not None:
        if old_values_BT is None:
            raise ValueError("cliprange_value needs old_values_BT, the values predicted when the rollout was scored")
        clipped = clipped_values(values, masked(old_values_BT, mask).detach(), cliprange_value)
        clipped_loss = (clipped - targets) ** 2
        loss = torch.where(clipped_loss > loss, clipped_loss, loss)
    return masked(loss * (0.5 if half else 1.0), mask)
