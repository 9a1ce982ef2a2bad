"""Vectors of da.* -> stages/losses.py, direct_losses.py, oracles.py."""

from __future__ import annotations

import math

import numpy as np
import torch

from stages import estimators, losses, selection
from stages.align import Config
from stages.direct import direct_losses as direct
from stages.direct.direct_alignment import DirectAlignment
from stages.generation import geometric_mixture
from tests import oracles, production
from tests.vector_adapters.maths_supervised import T, grads

SIDES = ("logp_chosen", "logp_rejected", "ref_logp_chosen", "ref_logp_rejected")
ZERO = torch.zeros((), dtype=torch.float64)


def dpo_step(pairs, ref, beta: float, method: str = "dpo") -> dict:
    """What a step of align logs, of pairs whose responses are given as their token log-probs."""
    return production.aligned_step(Config(method=method, beta=beta), pairs, ref=ref)


def dpo_pair(i, p):
    """Everything a DPO vector on four log-probs can ask for."""
    values = [T(i[k], True) for k in SIDES]
    pc, pr, rc, rr = values
    beta = p["beta"]
    loss = losses.dpo_loss(*values, beta=beta, label_smoothing=p.get("label_smoothing", 0.0))
    grads(loss.sum(), *values)
    pair = [[pc.detach().reshape(1), pr.detach().reshape(1)]], [[rc.item(), rr.item()]]
    step = dpo_step(*pair, beta)
    assert math.isclose(step["gradient_weight"], float(-pc.grad / beta)) or p.get("label_smoothing")
    out = {
        "h": dpo_step(*pair, 1.0)["rewards/margins"],
        "u": step["rewards/margins"],
        "loss": loss,
        "loss_masked": loss,
        "grad_logp_chosen": pc.grad,
        "grad_logp_rejected": pr.grad,
        "weight": step["gradient_weight"],
        "reward_chosen": losses.implicit_rewards(pc, rc, beta).detach(),
        "reward_rejected": losses.implicit_rewards(pr, rr, beta).detach(),
    }
    if "prompt_logp_policy" in i:
        a, b = i["prompt_logp_policy"], i["prompt_logp_ref"]
        out["loss_prompt_included"] = losses.dpo_loss(pc + a, pr + a, rc + b, rr + b, beta=beta).detach()
    return out


def token_batch(i, p, method="dpo"):
    masks = [torch.tensor(i["mask_" + side]).bool() for side in ("chosen", "rejected")]
    policy, ref = (
        [[row[m] for row, m in zip(T(i[f"{who}_{side}"]), mask)] for side, mask in zip(("chosen", "rejected"), masks)]
        for who in ("policy", "ref")
    )
    pairs = [list(pair) for pair in zip(*policy)]
    objective = DirectAlignment(Config(method="dpo"))
    of = [
        [float(x) for x in production.response_values(objective, pair, [[1] * len(r) for r in pair])]
        for pair in zip(*ref)
    ]
    step = dpo_step(pairs, of, p["beta"], method)
    h = [dpo_step([pair], [r], 1.0, method)["rewards/margins"] for pair, r in zip(pairs, of)]
    return {
        "seq_logp_chosen": [dpo_step([pair], [r], 1.0)["logps/chosen"] for pair, r in zip(pairs, of)],
        "seq_logp_rejected": [dpo_step([pair], [r], 1.0)["logps/rejected"] for pair, r in zip(pairs, of)],
        "h": h if len(h) > 1 else h[0],
        "h_norm": h,
        "loss": step["loss"],
        "accuracy": step["rewards/accuracies"],
        "chosen_shift": step["displacement/chosen_shift"],
        "rejected_shift": step["displacement/rejected_shift"],
    }


def displacement(i, p):
    sides = [[[T([c]), T([r])] for c, r in zip(i[a], i[b])] for a, b in (SIDES[:2], SIDES[2:])]
    step = dpo_step(sides[0], [[float(x) for x in pair] for pair in sides[1]], p.get("beta", 0.1))
    return {
        "chosen_shift": step["displacement/chosen_shift"],
        "rejected_shift": step["displacement/rejected_shift"],
        "margin_mean": step["rewards/margins"],
        "displaced_fraction": step["displacement/displaced_fraction"],
        "both_fell_fraction": step["displacement/both_fell_fraction"],
    }


def on_u(u, **kw):
    """DPO as a function of u = beta h."""
    return losses.dpo_loss(u, ZERO, ZERO, ZERO, beta=1.0, **kw)


def still_at(u, **kw):
    """``u``, at which DPO moves nothing."""
    leaf = torch.as_tensor(u, dtype=torch.float64).clone().requires_grad_()
    (g,) = torch.autograd.grad(on_u(leaf, **kw).sum(), leaf)
    assert g.abs().max() < 1e-12
    return u


def cdpo(i, p):
    eps, u = p["label_smoothing"], T(i["u"], True)
    plain = on_u(u, label_smoothing=eps)
    (ga,) = torch.autograd.grad(plain, u)
    robust = on_u(u, label_smoothing=eps, robust=True)
    (gb,) = torch.autograd.grad(robust, u)
    return {
        "cdpo": plain,
        "robust": robust,
        "grad_u_cdpo": ga,
        "grad_u_robust": gb,
        "cdpo_minimum_u": still_at(math.log((1 - eps) / eps), label_smoothing=eps),
    }


def soft_dpo(i, p):
    u = T(i["u"], True)
    loss = on_u(u, label_prob=i["p"])
    (g,) = grads(loss, u)
    return {"loss": loss, "grad_u": g, "minimum_u": still_at(torch.logit(T(i["p"])), label_prob=i["p"])}


def reference_free(i, p):
    c, r = T([i["logp_chosen"]]), T([i["logp_rejected"]])
    step = production.aligned_step(Config(method="reference_free", beta=p["beta"]), [[c, r]])
    return {"u": step["rewards/margins"], "loss": step["loss"]}


def ipo_pair(i, p):
    values = [T(i[k]) for k in SIDES]
    h = (values[0] - values[2]) - (values[1] - values[3])
    final = [direct.ipo_loss(*values, beta=t) for t in p["taus"]]
    leaf = h.clone().requires_grad_()
    gradient = [torch.autograd.grad(direct.ipo_loss(leaf, ZERO, ZERO, ZERO, beta=t), leaf)[0] for t in p["taus"]]
    # both orders of the pair, label 1 for one and 0 for the other: target 1/tau or 0
    symmetric = [((h - 1 / t) ** 2 + h**2) / 2 for t in p["taus"]]
    return {
        "h": h,
        "loss": final,
        "grad_h": gradient,
        "symmetric_form": symmetric,
        "symmetric_minus_final": [s - f for s, f in zip(symmetric, final)],
    }


def ipo_targets(i, p):
    return {"loss": direct.ipo_loss(T(i["h"]), ZERO, ZERO, ZERO, beta=p["tau"])}


def ipo_soft(i, p):
    h, tau = T(i["h"]), p["tau"]
    soft = direct.ipo_loss(h, ZERO, ZERO, ZERO, beta=tau, label_prob=T(i["p"]))
    q = T(i["p"])

    def symmetric(x):
        return ((x - 1 / tau) ** 2 + x**2) / 2

    averaged = q * symmetric(h) + (1 - q) * symmetric(-h)
    return {"loss": soft, "expected_symmetric_minus_soft": averaged - soft}


def still(pi, ref, reward, beta: float) -> None:
    """RL with the KL in the loss, and with it in the reward, moves nothing at the optimum: an exact policy, on all its
    actions.
    """
    logits, ref = T(pi).log().requires_grad_(), T(ref).log()
    (pull,) = torch.autograd.grad(production.full_kl(logits, ref), logits)
    push = production.expected_gradient(logits, reward)
    kl = losses.kl_estimate(logits.detach(), ref, "k1", torch.ones_like(ref))
    shaped = estimators.shape_rewards(reward, kl[:, None], np.ones((len(pi), 1)), beta)
    assert (push - beta * pull).abs().max() < 1e-9
    assert production.expected_gradient(logits, shaped).abs().max() < 1e-9


def kl_optimum(i, p):
    rows = []
    ref, reward = i.get("pi_ref", i.get("ref")), i.get("rewards", i.get("reward"))
    betas = p.get("betas", p.get("beta"))
    for beta in betas if isinstance(betas, list) else [betas]:
        found = oracles.kl_optimum(ref, reward, beta)
        still(found["pi"].tolist(), ref, reward, beta)
        rows.append({**found, "beta": beta, "pi_star": found["pi"]})
    return {
        "results": rows,
        "rows": rows,
        "pi_star": [r["pi"] for r in rows] if isinstance(betas, list) else rows[0]["pi"],
    }


def population(i, p):
    """Gradient descent on the soft-label DPO loss over all ordered pairs; must end at the KL-regularised optimum."""
    ref, r = T(i["pi_ref"]), T(i["rewards"])
    pref = torch.sigmoid(r.unsqueeze(1) - r.unsqueeze(0))
    out = []
    for beta in p["betas"]:
        theta = ref.log().clone().requires_grad_()
        optimiser = torch.optim.LBFGS(
            [theta], lr=1.0, max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
        )

        def closure():
            optimiser.zero_grad()
            logp = torch.log_softmax(theta, 0)
            n = len(ref)
            a, b = logp.repeat_interleave(n), logp.repeat(n)
            ra, rb = ref.log().repeat_interleave(n), ref.log().repeat(n)
            loss = losses.dpo_loss(a, b, ra, rb, beta=beta, label_prob=pref.flatten()).mean()
            loss.backward()
            return loss

        optimiser.step(closure)
        out.append(torch.softmax(theta.detach(), 0))
    return {"pi_star": out}


def of_all_pairs(loss, pi, ref, preference, beta: float):
    """Largest gradient by the policy's log-probs of a loss with preference probabilities, the mean over all ordered
    pairs of actions.
    """
    n, logits = len(pi), T(pi).log().requires_grad_()
    logp, ref = torch.log_softmax(logits, 0), T(ref).log()
    first, second = (x.flatten() for x in torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij"))
    of = T(preference)[first, second]
    each = loss(logp[first], logp[second], ref[first], ref[second], beta=beta, label_prob=of)
    (g,) = grads(each.mean(), logits)
    return float(g.abs().max())


def psipo_identity(i, p):
    """IPO with preference probabilities moves nothing at the optimum."""
    rows = [oracles.psi_po_optimum(i["pi_ref"], i["pref"], tau) for tau in p["taus"]]
    for row, tau in zip(rows, p["taus"]):
        assert of_all_pairs(direct.ipo_loss, row["pi"].tolist(), i["pi_ref"], i["pref"], tau) < 1e-9
    return {
        "p_beats_mu": rows[0]["psi_mean"],
        "pi_star": [r["pi"] for r in rows],
        "h01": [math.log(r["pi"][0] / i["pi_ref"][0]) - math.log(r["pi"][1] / i["pi_ref"][1]) for r in rows],
    }


def psipo_logit(i, p):
    """DPO with the preference probabilities of Bradley-Terry moves nothing at the optimum."""
    r = np.asarray(i["rewards"])
    preference = (1 / (1 + np.exp(-(r[:, None] - r[None, :])))).tolist()
    found = oracles.psi_po_optimum(i["pi_ref"], preference, p["tau"], psi="logit")
    assert of_all_pairs(losses.dpo_loss, found["pi"].tolist(), i["pi_ref"], preference, p["tau"]) < 1e-9
    return {"psi_mean": found["psi_mean"], "pi_star": found["pi"]}


def kto_cases(i, p):
    label, w = torch.tensor(i["label"]), T(p["weight"])
    loss = direct.kto_loss(
        T(i["logratio"]), T(i["z0"]), label, beta=T(p["beta"]), desirable_weight=w, undesirable_weight=w
    )
    return {"loss": loss, "v": w - loss}


def kto_batch(i, p):
    out, gradients = [], []
    config = Config(method="kto", beta=p["beta"], options={k: p[k] for k in ("desirable_weight", "undesirable_weight")})
    for z0 in i["z0"]:
        r = T(i["logratio"], True)
        rows = [[one[None]] for one in r]
        _, loss = production.aligned(config, rows, {"z0": z0}, label=i["label"], ref=[[0.0]] * len(rows))
        gradients += grads(loss, r)
        out.append(loss.detach())
    return {"mean_loss_per_z0": out, "grad_logratio_z0_0": gradients[0]}


def kto_balance(i, p):
    n = (i["n_desirable"], i["n_undesirable"], i["undesirable_weight"])
    return {
        "desirable_weight_range_1_to_1.5": direct.kto_weight_range(*n),
        "desirable_weight_range_1_to_1.333": direct.kto_weight_range(*n, ratio=(1.0, 4 / 3)),
    }


def orpo(i, p):
    """Responses of one token, whose NLL is what their mean says."""
    c, r = T([i["mean_logp_chosen"]], True), T([i["mean_logp_rejected"]], True)
    assert i.get("nll_chosen", -i["mean_logp_chosen"]) == -i["mean_logp_chosen"]

    def step(beta):
        sums, loss = production.aligned(Config(method="orpo", beta=beta), [[c, r]])
        return sums.loss["preference"][0], loss

    unit, loss = step(1.0)[0], step(p["lambda"])[1]
    gc, gr = torch.autograd.grad(unit, (c, r))
    return {
        "log_odds_ratio": (direct.log_odds(c) - direct.log_odds(r))[0],
        "loss_or": unit,
        "log_odds_chosen": direct.log_odds(c)[0],
        "loss": loss,
        "grad_or_mean_logp_chosen": gc[0],
        "grad_or_mean_logp_rejected": gr[0],
        "finite": bool(torch.isfinite(loss) & torch.isfinite(gc[0])),
    }


def simpo(i, p):
    if "len_chosen" in i:
        pair = [T(i["logp_" + side]).expand(i["len_" + side]) / i["len_" + side] for side in ("chosen", "rejected")]

        def step(method, **settings):
            return production.aligned_step(Config(method=method, beta=1.0, **settings), [pair])["rewards/margins"]

        config = Config(method="simpo", beta=p["beta"], options={"simpo_gamma": p["gamma"]})
        return {
            "loss": production.aligned(config, [pair])[1],
            "sum_margin": step("reference_free"),
            "mean_margin": step("simpo"),
        }
    c, r = T(i["mean_logp_chosen"]), T(i["mean_logp_rejected"])
    return {"loss": [direct.simpo_loss(c, r, beta=b, simpo_gamma=g) for b, g in p["beta_gamma"]]}


def cpo(i, p):
    n = i.get("len_chosen", 1)
    pair = [T(i["logp_chosen"]).expand(n) / n, T([i["logp_rejected"]])]

    def step(reduction):
        config = Config(method="cpo", beta=p["beta"], nll_coef=p["cpo_alpha"], nll_reduction=reduction)
        return production.aligned(config, [pair])

    sums, loss = step("seq-sum")
    return {
        "prefer": sums.loss["preference"][0],
        "loss_nll_seq_sum": loss,
        "loss_nll_seq_mean": step("seq-mean")[1],
    }


def cpo_bound(i, p):
    b, w, l, ref_l = T(i["beta"]), T(i["pi_w"]).log(), T(i["pi_l"]).log(), T(i["piw_l"]).log()
    u = torch.stack([losses.dpo_loss(x, y, ZERO, z, beta=float(s)) for s, x, y, z in zip(b, w, l, ref_l)])
    return {
        "lhs": u + b * ref_l,
        "rhs": torch.stack([direct.reference_free_loss(x, y, beta=float(s)) for s, x, y in zip(b, w, l)]),
    }


def slic(i, p):
    c, r, t = T(i["logp_chosen"], True), T(i["logp_rejected"], True), T(i["logp_target"], True)
    loss = direct.slic_loss(c, r, delta=p["delta"], reg_coef=p["lambda"], target=t)
    g = grads(loss, c, r, t)
    return {
        "rank": direct.slic_loss(c, r, delta=p["delta"], reg_coef=0.0),
        "loss": loss,
        "grad_logp_chosen": g[0],
        "grad_logp_rejected": g[1],
        "grad_logp_target": g[2],
    }


def rrhf(i, p):
    """The responses of one prompt; the best one is as long as its sum and its mean say, the others have one token."""
    mean, rewards = T(i["mean_logp"]), T(i["rewards"])
    lengths = [1] * len(mean)
    best = int(torch.argmax(rewards))
    lengths[best] = round(i["seq_logp_best"] / i["mean_logp"][best])
    leaf = mean.clone().requires_grad_()
    responses = [leaf[k].expand(n) for k, n in enumerate(lengths)]
    _, loss = production.aligned(Config(method="rrhf"), [responses], rewards=[i["rewards"]])
    rank = direct.rrhf_rank_loss(leaf, rewards)
    (g,) = grads(loss - rank, leaf)  # of the best response's likelihood alone
    return {"rank": rank, "ft": loss - rank, "loss": loss, "best": int(g.abs().argmax())}


def odpo(i, p):
    if "offsets" in p:
        return {"loss": [direct.odpo_loss(T(i["u"]), ZERO, ZERO, ZERO, beta=1.0, offset=o) for o in p["offsets"]]}
    offset = direct.odpo_offset(T(i["score_chosen"]), T(i["score_rejected"]), p["alpha"], p["offset_fn"])
    return {"offset": offset, "loss": direct.odpo_loss(T(i["u"]), ZERO, ZERO, ZERO, beta=1.0, offset=offset)}


def on_ratios(fn):
    """A loss of (h_w, h_l) with gradients, from logratio_* or h_* inputs."""

    def adapter(i, p):
        w = T(i.get("logratio_chosen", i.get("h_chosen")), True)
        l = T(i.get("logratio_rejected", i.get("h_rejected")), True)
        loss = fn(
            w,
            l,
            torch.zeros_like(w),
            torch.zeros_like(l),
            **{k: v for k, v in p.items() if k in ("beta", "cal_weight", "delta")},
        )
        gw, gl = grads(loss.sum(), w, l)
        return {"loss": loss, "grad_chosen": gw, "grad_rejected": gl}

    return adapter


def discopop(i, p):
    rho = T(i["rho"])
    beta, tau = p["beta"], p.get("discopop_tau", 0.05)
    return {
        "loss": direct.discopop_loss(rho, ZERO, ZERO, ZERO, beta=beta, discopop_tau=tau),
        "gate": direct.discopop_gate(beta * rho, tau),
        **direct.discovered_losses(rho, beta=beta),
        "squared_ipo_tau_0.1": direct.ipo_loss(rho, ZERO, ZERO, ZERO, beta=0.1),
    }


def segments(i, p):
    """A pair whose segments are one token each."""
    sides = (i["segment_logratio_chosen"], i["segment_logratio_rejected"])
    weights = (i["weight_chosen"], i["weight_rejected"])
    _, loss = production.aligned(
        Config(method="2d_dpo", beta=p["beta"]),
        [[T(side) for side in sides]],
        segments=[[[(k, k + 1) for k in range(len(side))] for side in sides]],
        segment_weights=[weights],
        ref=[[[0.0] * len(side) for side in sides]],
    )
    return {"arguments": direct.two_d_dpo_arguments(*map(T, sides), *map(T, weights), beta=p["beta"]), "loss": loss}


def spans(i, p):
    """Of one response, as align sums them."""
    logps = T(i["token_logratios"])
    objective = DirectAlignment(Config(method="2d_dpo"))
    of = [[(start, start + length) for start, length in zip(i["start"], i["length"])], [(0, 1)]]
    return {"segment_sums": production.response_values(objective, [logps, logps[:1]], segments=of)[0]}


def mdpo(i, p):
    w, l, c = T(i["h_chosen"]), T(i["h_rejected"]), T(i["h_chosen_corrupted_condition"])
    dpo, conditional = (losses.dpo_loss(w, x, ZERO, ZERO, beta=p["beta"]) for x in (l, c))
    anchor = on_u(p["beta"] * w - p["delta"])
    return {
        "dpo": dpo,
        "conditional": conditional,
        "anchor": anchor,
        "loss": direct.mdpo_loss(w, l, ZERO, ZERO, beta=p["beta"], h_corrupted=c, delta=p["delta"]),
    }


def diffusion_dpo(i, p):
    """DPO on squared denoising errors in place of negative log-probs (images are out of scope; the link is the
    same).
    """
    return {
        "loss": losses.dpo_loss(
            *(-T(i[k]) for k in ("err_w", "err_l", "err_w_ref", "err_l_ref")), beta=p["beta_T_omega"]
        )
    }


def dpo_nll(i, p):
    c, n = T(i["logp_chosen"], True), i["len_chosen"]
    sums, loss = production.aligned(
        Config(method="dpo_nll", beta=p["beta"], nll_coef=p["nll_coef"]),
        [[c.expand(n) / n, T([i["logp_rejected"]])]],
        ref=[[i["ref_logp_chosen"], i["ref_logp_rejected"]]],
    )
    (g,) = grads(loss, c)
    return {
        "dpo": sums.loss["preference"][0],
        "nll": sums.loss["nll"][0] / p["nll_coef"],
        "loss": loss,
        "grad_logp_chosen": g,
    }


def aot(i, p):
    """The rows of one optimizer step, each matched with the response of equal rank."""
    chosen, rejected = T(i["logratio_chosen"]), T(i["logratio_rejected"])
    for_chosen, for_rejected = direct.aot_matches(chosen, rejected)
    _, loss = production.aligned(
        Config(method="aot_unpaired", beta=p["beta"]),
        [[c[None], r[None]] for c, r in zip(chosen, rejected)],
        ref=[[0.0, 0.0]] * len(chosen),
        matched_rejected=for_chosen.tolist(),
        matched_chosen=for_rejected.tolist(),
    )
    return {"aot_unpaired": loss}


def rebel(i, p):
    a = T(i["logratio_y"], True)
    loss = direct.rebel_pair_loss(
        a, T(i["logratio_y2"]), ZERO, ZERO, beta=1 / p["eta"], score_gap=T(i["reward_y"]) - T(i["reward_y2"])
    )
    (g,) = grads(loss, a)
    return {"loss": loss, "grad_logratio_y": g}


def rpo(i, p):
    u = T(i["u"], True)
    loss = direct.rpo_loss(u, ZERO, ZERO, ZERO, beta=1.0, score_gap=T(i["score_gap"]), eta=p["eta"])
    (g,) = grads(loss, u)
    return {"loss": loss, "grad_u": g}


def cal_dpo(i, p):
    w, l = T(i["h_chosen"]), T(i["h_rejected"])
    kw = {"beta": p["beta"]}
    contrast = direct.cal_dpo_loss(w, l, ZERO, ZERO, **kw, cal_weight=0.0)
    return {
        "contrast": contrast,
        "calibration": direct.sppo_hard_loss(w, l, ZERO, ZERO, **kw),
        "loss": direct.cal_dpo_loss(w, l, ZERO, ZERO, **kw, cal_weight=p["cal_weight"]),
        "loss_weight_1_beta_in_contrast": direct.cal_dpo_loss(
            w, l, ZERO, ZERO, **kw, cal_weight=1.0, beta_in_contrast=True
        ),
    }


def alphapo(i, p):
    c, r = T(i["mean_logp_chosen"]), T(i["mean_logp_rejected"])
    return {
        "reward_chosen": [direct.alphapo_reward(c, beta=p["beta"], alpha=a) for a in p["alphas"]],
        "reward_rejected": [direct.alphapo_reward(r, beta=p["beta"], alpha=a) for a in p["alphas"]],
        "loss": [direct.alphapo_loss(c, r, beta=p["beta"], simpo_gamma=p["gamma"], alpha=a) for a in p["alphas"]],
    }


def bco(i, p):
    r = T([i["reward_chosen"], i["reward_rejected"]])
    unpaired = direct.bco_loss(r, torch.tensor([True, False]), beta=1.0, delta=p["delta"]).sum()
    assert torch.allclose(unpaired, direct.bco_pair_loss(r[0], r[1], ZERO, ZERO, beta=1.0, delta=p["delta"]))
    return {"loss": unpaired}


def pl_dpo(i, p):
    h = i["logratios_best_to_worst"]

    def loss(n):
        return production.aligned(Config(method="pl_dpo", beta=p["beta"]), [[T([x]) for x in h[:n]]], ref=[[0.0] * n])[
            1
        ]

    return {
        "loss": loss(len(h)),
        "loss_k2": loss(2),
        "dpo_k2": losses.dpo_loss(T(h)[0], T(h)[1], ZERO, ZERO, beta=p["beta"]),
    }


def sppo_hard(i, p):
    w, l = T([i["h_chosen"]], True), T([i["h_rejected"]], True)
    _, loss = production.aligned(Config(method="sppo_hard", beta=p["beta"]), [[w, l]], ref=[[0.0, 0.0]])
    gw, gl = grads(loss, w, l)
    # the loss is the square of what each side misses
    return {
        "loss": loss,
        "target_chosen": (w.detach() - gw / 2)[0],
        "target_rejected": (l.detach() - gl / 2)[0],
    }


def sppo_soft(i, p):
    _, loss = production.aligned(
        Config(method="sppo", beta=1 / p["eta"]), [[T([i["h"]])]], ref=[[0.0]], win_prob=[[i["p_win"]]]
    )
    return {"loss": loss}


def ipo_md(i, p):
    policy, ref = T(i.get("policy_logits", i.get("logits"))), T(i["ref_logits"])
    mixes = p.get("mix", p.get("mixture_coef"))
    probs = [
        torch.softmax(geometric_mixture(policy, ref, m), -1) for m in (mixes if isinstance(mixes, list) else [mixes])
    ]
    return {"probs": probs, "sampling_probs": probs[0]}


def reference(i, p):
    follow = lambda **settings: production.reference_after_steps(i["ref"], i["policy"], 1, **settings)[0]  # noqa: E731
    return {
        "ema": follow(reference_update="ema", reference_decay=p["ema_decay"]),
        "tr_dpo_soft": follow(
            reference_update="tr_soft", reference_alpha=p["ref_model_mixup_alpha"], reference_interval=1
        ),
    }


def relatives(i, p):
    w, l, b = T(i["h_chosen"]), T(i["h_rejected"]), p["beta"]
    args = (w, l, ZERO, ZERO)
    return {
        "r_dpo": direct.r_dpo_loss(
            *args, beta=b, length_chosen=i["len_chosen"], length_rejected=i["len_rejected"], alpha=p["rdpo_alpha"]
        ),
        "nca_pair": direct.nca_pair_loss(*args, beta=b),
        "bco_pair": direct.bco_pair_loss(*args, beta=b),
        "exo_pair": direct.exo_pair_loss(*args, beta=b, label_smoothing=p["exo_eps"]),
        "dpo": losses.dpo_loss(*args, beta=b),
    }


def descend(i, p):
    """Plain gradient descent on the two logits of one always-preferred pair, uniform reference, for all betas at once:
    with logits in units of 1/beta the loss has none.
    """
    beta, out = T(p["betas"]), []
    theta = (beta * T([[i["init_h"]], [0.0]])).requires_grad_()
    for step in range(1, max(p["steps"]) + 1):
        # both log-probs have the same normaliser
        (g,) = torch.autograd.grad(losses.dpo_loss(theta[0], theta[1], ZERO, ZERO, beta=1.0).sum(), theta)
        with torch.no_grad():
            theta -= i["lr"] * beta**2 * g
        if step in p["steps"]:
            out.append(((theta[0] - theta[1]) / beta).detach())
    return {"h": torch.stack(out, 1)}


def ipo_limit(i, p):
    ref, out, pi = T(i["pi_ref"]), [], []
    for tau in p["taus"]:
        theta = torch.zeros(i["num_actions"], dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.LBFGS(
            [theta], max_iter=200, tolerance_grad=1e-13, tolerance_change=1e-16, line_search_fn="strong_wolfe"
        )

        def closure():
            optimiser.zero_grad()
            logp = torch.log_softmax(theta, 0)
            loss = direct.ipo_loss(logp[0], logp[1], ref[0].log(), ref[1].log(), beta=tau)
            loss.backward()
            return loss

        optimiser.step(closure)
        logp = torch.log_softmax(theta.detach(), 0)
        out.append(logp[0] - logp[1] - ref[0].log() + ref[1].log())
        pi.append(logp[0].exp())
    return {"h": out, "pi_preferred": pi}


ADAPTERS = {
    **{
        f"da.dpo/{n}": dpo_pair
        for n in ("basic", "well_ordered", "wrongly_ordered", "init", "displacement", "prompt_cancels")
    },
    "da.dpo/token_batch": token_batch,
    "da.dpo/nan_padding": lambda i, p: token_batch(i, p),
    "da.length_norm/token_batch": lambda i, p: token_batch(i, p, "length_norm"),
    "da.dpo/extreme": lambda i, p: {"loss": on_u(T(i["u"]))},
    "da.dpo/deterministic_divergence": descend,
    "da.cdpo/eps": cdpo,
    "da.soft_dpo/p": soft_dpo,
    "da.soft_dpo/population_optimum": population,
    "da.reference_free/basic": reference_free,
    "da.reference_free/beta1": reference_free,
    "da.ipo/pair": ipo_pair,
    "da.ipo/targets": ipo_targets,
    "da.ipo/soft": ipo_soft,
    "da.ipo/deterministic_limit": ipo_limit,
    "da.psipo/identity_tabular": psipo_identity,
    "da.psipo/logit_equals_rlhf": psipo_logit,
    "da.kl_optimum/r_1_0_m1": kl_optimum,
    "da.kl_optimum/r_1_0_2": kl_optimum,
    "da.kl_optimum/two_arm": kl_optimum,
    "kl_regularised_optimum": kl_optimum,
    "da.kto/cases": kto_cases,
    "da.kto/batch": kto_batch,
    "da.kto/balance": kto_balance,
    "da.kto/z0": lambda i, p: {"z0": [direct.kto_reference_point(T(r)) for r in i["mismatched_logratios"]]},
    "da.halo/prospect": lambda i, p: {"v": oracles.prospect_value(i["x"], p["alpha"], p["beta"], p["lambda"])},
    "da.orpo/half_quarter": orpo,
    "da.orpo/means_1_2": orpo,
    "da.orpo/near_one": orpo,
    "da.simpo/cases": simpo,
    "da.simpo/length_reversal": simpo,
    "da.cpo/sum_nll": cpo,
    "da.cpo/gap5": cpo,
    "da.cpo/upper_bound": cpo_bound,
    "da.slic/active": slic,
    "da.slic/inactive": slic,
    "da.slic/hinge_norm": lambda i, p: {"loss": direct.hinge_norm_loss(T(i["h"]), ZERO, ZERO, ZERO, beta=p["gamma"])},
    "da.rrhf/three": rrhf,
    "da.odpo/offset": odpo,
    "da.odpo/log_scores": odpo,
    "da.apo_zero/cases": on_ratios(direct.apo_zero_loss),
    "da.apo_down/cases": on_ratios(direct.apo_down_loss),
    "da.discopop/lrml": discopop,
    "da.discopop/family": discopop,
    "da.2d_dpo/two_segments": segments,
    "da.2d_dpo/reduces_to_dpo": segments,
    "da.2d_dpo/half_open_span": spans,
    "da.mdpo/three_terms": mdpo,
    "da.dpo_nll/irpo": dpo_nll,
    "da.rebel/pair": rebel,
    "da.rpo/bernoulli_kl": rpo,
    "da.cal_dpo/pair": cal_dpo,
    "da.alphapo/pair": alphapo,
    "da.bco/pair": bco,
    "da.pl_dpo/k3": pl_dpo,
    "da.sppo/hard": sppo_hard,
    "da.sppo/soft": sppo_soft,
    "da.ipo_md/mixture": ipo_md,
    "ipo_md_mixture_logits": ipo_md,
    "da.reference/ema": reference,
    "da.diffusion_dpo/pair": diffusion_dpo,
    "da.bpo/interval": lambda i, p: {"K": [selection.refresh_intervals(i["total_steps"], f)[0] for f in i["F"]]},
    "da.displacement/metrics": displacement,
    "da.relatives/formulas": relatives,
    "da.relatives/aot": aot,
}
