"""Vectors of rl.json -> stages/policy/policy_update.py, losses.py, divergence.py, estimators.py, selection.py; optima
of small games by tests/oracles.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from itertools import product

import numpy as np
import torch

from stages import estimators, losses, selection
from stages.algorithms import RL_PRESETS, rl_preset
from stages.batching import make_item
from stages.generation import Sample, geometric_mixture
from stages.measures import sampling
from stages.policy import credit, schedules, sequence_losses
from stages.policy.trust_region import backtrack, conjugate_gradient, full_step, head_fisher
from stages.rollouts.metrics import off_policy_metrics, weight_metrics
from stages.verification.rule_rewards import code_reward
from tests import oracles, production
from tests.production import rl_update, rows_of, step_mean, updated
from tests.vector_adapters.maths_supervised import T, grads, ragged
from tests.vector_adapters.rewards import summed

MODES = losses.LOSS_AGG_MODES


def M(x):
    return torch.tensor(x)


def arr(x):
    return np.asarray(x, dtype=float)


def rows(i, *names):
    """Single rows as batches of one, with a full mask: returns (batch dict, was a single row)."""
    single = np.ndim(i[names[0]]) == 1
    out = {k: [i[k]] if single else i[k] for k in names if k in i}
    out["mask"] = i.get("mask", np.ones(np.shape(out[names[0]])).tolist())
    return out, single


# --- returns, GAE ---------------------------------------------------------------------------------------


def returns(i, p):
    b, single = rows(i, "rewards")
    g = estimators.reward_to_go(b["rewards"], b["mask"], p["gamma"])
    return {"returns": g[0] if single else g}


def gae(i, p):
    b, single = rows(i, "rewards", "values")
    boot = i.get("bootstrap_value", p.get("bootstrap_value", 0.0))
    adv, ret = estimators.gae(b["rewards"], b["values"], b["mask"], boot, p["gamma"], p["lam"])
    delta = estimators.td_errors(b["rewards"], b["values"], b["mask"], boot, p["gamma"])
    out = {"delta": delta, "advantages": adv, "returns": ret, "correct": adv}
    return {k: v[0] for k, v in out.items()} if single else out


def td(i, p):
    r, v, g = i["rewards"], i["values"], p["gamma"]
    boot, t, lam = p.get("bootstrap_value", 0.0), p.get("t", 0), p.get("lam", 0.0)
    mask = np.ones((1, len(r)))
    delta = estimators.td_errors([r], [v], mask, boot, g)[0]
    adv, ret = estimators.gae([r], [v], mask, boot, g, lam)
    out = {"td_error": delta, "td_target": delta + arr(v), "lambda_return": ret[0], "gae_plus_value": adv[0] + arr(v)}
    for n in range(1, 10):
        out[f"G_{n}"] = estimators.nstep_returns([r], [v], mask, n, boot, g)[0, t]
        out[f"A_{n}"] = out[f"G_{n}"] - v[t]
    return out


def psi(i, p):
    r, v, ones = [i["rewards"]], [i["values"]], np.ones((1, len(i["rewards"])))
    go = estimators.reward_to_go(r, ones, p["gamma"])[0]
    return {
        "total_return": [go[0]] * len(go),
        "reward_to_go": go,
        "reward_to_go_minus_value": go - arr(i["values"]),
        "td_residual": estimators.td_errors(r, v, ones, 0.0, p["gamma"])[0],
        "gae_lam_half": estimators.gae(r, v, ones, 0.0, p["gamma"], p["lam"])[0][0],
    }


def value_oracle(i, p):
    """All sequences of two tokens: values are means of returns, advantages TD errors of exact values."""
    first, second, R = arr(i["pi_first"]), arr(i["pi_second_given_first"]), arr(i["reward_of_sequence"])
    ones, gamma = np.ones((R.size, 2)), p["gamma"]
    tokens = estimators.place_terminal(R.ravel(), ones)
    returns = estimators.reward_to_go(tokens, ones, gamma).reshape(*R.shape, 2)
    v1 = (second * returns[..., 1]).sum(1)
    v0 = (first[:, None] * second * returns[..., 0]).sum()
    values = np.stack([np.full(R.size, v0), np.repeat(v1, R.shape[1])], 1)
    delta = estimators.td_errors(tokens, values, ones, 0.0, gamma).reshape(*R.shape, 2)
    return {
        "V_s1": v1 * gamma,
        "V_s0": v0,
        "A_first": delta[:, 0, 0],
        "A_second": delta[..., 1],
        "grad_logits_first": production.expected_gradient(T(first.tolist()).log(), delta[:, 0, 0]),
        "grad_logits_second": [
            share * production.expected_gradient(T(row.tolist()).log(), adv)
            for share, row, adv in zip(first, second, delta[..., 1])
        ],
    }


def bandit(i, p):
    return {
        "J": float(arr(i["pi"]) @ arr(i["reward"])),
        "grad_logits": production.expected_gradient(T(i["pi"]).log(), i["reward"]),
    }


def moments(pi, reward, b):
    """Mean and variance of each coordinate of a single sample's gradient under a constant baseline."""
    rewards, n = arr(reward), len(reward)
    row = rl_preset("reinforce", baseline="constant", kl_reward_coef=0.0)
    g = production.sampled_gradients(T(pi).log(), credited(row, n, rewards=rewards, baseline=b)).numpy()
    mean = arr(pi) @ g
    return mean, arr(pi) @ (g - mean) ** 2


def baseline_variance(i, p):
    pi, r, k = i["pi"], arr(i["reward"]), p["coordinate"]
    shifted = r + p["reward_shift"]
    return {
        "mean_b0": moments(pi, r, 0.0)[0][k],
        "var_b0": moments(pi, r, 0.0)[1][k],
        "var_b_mean": moments(pi, r, arr(pi) @ r)[1][k],
        "shifted_var_b0": moments(pi, shifted, 0.0)[1][k],
        "shifted_var_b_mean": moments(pi, shifted, arr(pi) @ shifted)[1][k],
    }


def total_variance(i, p):
    return {
        "grad_logits": moments(i["pi"], i["reward"], 0.0)[0],
        "total_variance": [float(moments(i["pi"], i["reward"], b)[1].sum()) for b in p["b"]],
    }


@lru_cache(maxsize=64)
def all_groups(reward, k, mode):
    """(groups of k actions, their advantages) over the whole action set."""
    groups = list(product(range(len(reward)), repeat=k))
    advantages = [estimators.group_advantage(np.asarray(reward)[list(g)], ["q"] * k, mode)[0] for g in groups]
    return np.array(groups), np.array(advantages)


def expected_group_gradient(pi, reward, k, mode):
    """Exact expectation of the REINFORCE gradient over all groups of k actions, with group advantages of `mode`."""
    pi = arr(pi)
    groups, adv = all_groups(tuple(float(r) for r in reward), k, mode)
    score = production.sampled_gradients(T(pi.tolist()).log(), np.ones(len(pi))).numpy()[groups]
    return (pi[groups].prod(1)[:, None] * (adv[:, :, None] * score).mean(1)).sum(0)


def inbatch_bias(i, p):
    return {
        "exact": production.expected_gradient(T(i["pi"]).log(), i["reward"]),
        "expected_grad_group_mean": [expected_group_gradient(i["pi"], i["reward"], k, "mean") for k in p["k"]],
        "expected_grad_leave_one_out": [
            expected_group_gradient(i["pi"], i["reward"], k, "leave_one_out") for k in p["k"]
        ],
    }


def moving_average(i, p):
    b, used, after = estimators.MovingAverageBaseline(p["decay"]), [], []
    for mean in i["batch_mean_rewards"]:
        used.append(b.use([mean]))
        after.append(b.state_dict()["value"])
    return {"baseline_used": used, "baseline_after": after}


def v_star_baseline(i, p):
    b = [estimators.v_star(r, p["beta"]) for r in i["reference_rewards"]]
    row = rl_preset("reinforce", baseline="v_star", kl_reward_coef=0.0)
    return {"baseline": b, "advantages": credited(row, len(b), rewards=i["reward"], baseline=arr(b))}


# --- policy losses -----------------------------------------------------------------------------------------


def reinforce(i, p):
    logp, mask = T(i["logp"], True), M(i["mask"])
    out = {}
    if "rewards" in i:
        adv = estimators.reward_to_go(i["rewards"], i["mask"], p["gamma"])
        out["returns"] = adv
    else:
        adv = np.repeat(arr(i["reward"])[:, None], logp.shape[1], 1)
        if "values" in i:
            adv = np.where(np.asarray(i["mask"]) > 0, adv - arr(i["values"]), 0.0)
    per_token, _ = losses.policy_loss(logp, logp, T(adv.tolist()), mask, surrogate="logp")
    for mode in MODES[:3]:
        out[mode] = step_mean(per_token, mask, mode)
    out["loss"] = step_mean(per_token, mask, p.get("loss_agg_mode", "seq-mean-token-sum"))
    (out["grad_logp"],) = grads(out["loss"], logp)
    return out


def process_reward(i, p):
    """Every token a step that is paid; a step's reward alone is what it is worth where nothing later counts."""
    mask = arr(i["mask"]) > 0
    values, paid = np.where(mask, arr(i["values"]), 0.0), np.where(mask, arr(i["token_rewards"]), 0.0)
    ends = [np.flatnonzero(row).tolist() for row in mask]
    ones = np.ones(len(mask), bool)
    batch = credit.Batch(
        paid.sum(1),
        np.arange(len(mask)),
        mask,
        ones,
        ones,
        kl_BT=arr(i["kl_per_token"]),
        values_BT=values,
        turns=[(at, paid[k, at].tolist()) for k, at in enumerate(ends)],
        steps_paid=True,
    )

    def assigned(gamma):
        row = rl_preset("ppo", gamma=gamma, lam=1.0, whiten=False, kl_reward_mode="token_terminal")
        return credit.assign(row, batch, p["kl_coef"])

    found = assigned(p.get("gamma", 1.0))
    return {
        "adjusted": found.token_rewards_BT,
        "advantage_immediate": assigned(0.0).advantages_BT,
        "advantage_reward_to_go": found.advantages_BT,
    }


def shares(sums, tokens: float):
    """What an update logs of its ratios, per trained token."""
    share = production.logged(
        sums, dict.fromkeys({by for _, by in (*sums.loss.values(), *sums.metrics.values())}, tokens)
    )
    low, high = share["clip_ratio/low_mean"], share["clip_ratio/high_mean"]
    return {
        "clip_fraction": share["clip_ratio/region_mean"] + share.get("policy/clip_dual", 0.0),
        "clip_fraction_low": low,
        "clip_fraction_high": high,
        "outside_range_fraction": share.get("policy/outside_range"),
        "approx_kl_k1": share["approx_kl/k1"],
        "approx_kl_k2": share["approx_kl/k2"],
        "approx_kl_k3": share["approx_kl/k3"],
        "ratio_mean": share["policy/ratio"],
        "log_ratio_clamped_fraction": share["policy/log_ratio_clamped"],
        "ratio_max": share["policy/ratio_max"],
    }


def preset_of(preset: str, p, **axes):
    """The preset with the clip range that the vector states; its KL in the reward is no matter of the loss."""
    stated = {k: p[k] for k in ("epsilon", "epsilon_high", "ratio_level", "clip_ratio_c") if p.get(k) is not None}
    return rl_preset(preset, **{"kl_reward_coef": 0.0, "kl_loss_coef": 0.0, **stated, **axes})


def clip_grid(preset: str):
    """Objective and its slope at single (ratio, A) points."""

    def adapter(i, p):
        out, row = [], preset_of(preset, p)
        for A in i["A"]:
            for ratio in i["ratios"]:
                logp = T([[math.log(ratio)]], True)
                _, loss = updated(row, logp, T([[0.0]]), M([[1]]), advantages=[float(A)])
                (g,) = grads(loss, logp)
                slope = -float(g) / ratio
                out.append(
                    {
                        "ratio": ratio,
                        "A": float(A),
                        "objective": -float(loss.detach()),
                        "d_objective_d_ratio": slope,
                        "clipped": slope == 0.0,
                    }
                )
        return {"rows": out}

    return adapter


def policy(preset: str, **axes):
    """Losses, gradients and diagnostics of an update of a preset on a batch of token log-probs, under every
    aggregation.
    """

    def adapter(i, p):
        new, old, mask, out = i["logp_new"], T(i["logp_old"]), M(i["mask"]), {}
        more = {} if "beta" not in p else {"kl_loss_coef": p["beta"]}
        more |= {} if "kl_estimator" not in p else {"kl_loss_estimator": p["kl_estimator"]}
        row = preset_of(preset, p, **more, **axes)
        if "rewards" in i and "advantages" not in i:
            n = len(i["rewards"])
            out["advantages"], _ = estimators.group_advantage(
                i["rewards"], ["q"] * n, row.group_mode, row.std_ddof, row.std_eps
            )
        advantages = out.get("advantages", i.get("advantages", i.get("reward_or_advantage")))
        if "truncated" in i and p.get("mask_truncated_completions"):
            kept = estimators.apply_truncation([0.0] * len(mask), [not cut for cut in i["truncated"]], "mask")[2]
            mask = mask * torch.as_tensor(kept).int()[:, None]
            out["effective_mask"] = mask
        columns = {"advantages": advantages, **({"ref_logps": i["logp_ref"]} if row.needs_reference else {})}
        config = {k: p[k] for k in ("loss_scale_factor", "seq_denominator") if k in p}

        def run(mode):
            logp = T(new, True)
            sums, loss = updated(replace(row, aggregation=mode), logp, old, mask, config=config, **columns)
            (g,) = grads(loss, logp) if loss.requires_grad else (torch.zeros_like(logp),)
            return {"loss": loss.detach(), "grad_logp_new": g}, sums

        for mode in MODES[:3]:
            out[mode], _ = run(mode)
        main, sums = run(p.get("loss_agg_mode", "seq-mean-token-mean"))
        log_ratio, _ = losses.log_ratios(T(new), old, mask, row.ratio_level)
        ratio = log_ratio.exp()
        return {
            **out,
            **main,
            **shares(sums, float(mask.sum())),
            "ratio": ratio,
            "sequence_ratio": ratio[:, 0],
            "ratio_is_one": bool((ratio == 1).all()),
            "skip_optimizer_step": not bool(mask.any()),
        }

    return adapter


def grape_alt(i, p):
    """With each sequence's term by itself."""
    terms = []
    for k, mask in enumerate(i["mask"]):
        new, old = T([i["logp_new"][k]]), T([i["logp_old"][k]])
        _, loss = updated(preset_of("grape_alt", p), new, old, M([mask]), advantages=[i["advantages"][k]])
        terms.append(-loss)
    return {**policy("grape_alt")(i, p), "terms": terms}


def cispo(i, p):
    out = policy("cispo")(i, p)
    # what is left of -A log pi: the weight of the gradient per token
    weights = -out["grad_logp_new"] * M(i["mask"]).sum() / T(i["advantages"])[:, None]
    return {**out, "weights": torch.where(M(i["mask"]).bool(), weights, 1.0)}


def cpi(i, p):
    out = policy("ppo", surrogate="none")(i, p)
    return {"ratio": out["ratio"], **out[p["loss_agg_mode"]]}


def ppo_sequence(i, p):
    out = policy("grape_alt")(i, p)
    out["scalar_cases"] = [
        {k: row[k] for k in ("ratio", "A", "objective")}
        for row in clip_grid("grape_alt")({"ratios": [1.5, 0.5], "A": [1.0, -1.0]}, p)["rows"]
    ]
    out["scalar_cases"] = [out["scalar_cases"][k] for k in (0, 2, 1, 3)]
    return out


def ratio_inputs(i, p):
    """Ratios given directly, ragged lists (objective to maximise)."""
    ratio, mask = ragged(i["ratio"])
    ref, _ = ragged(i["ref_over_pi"])
    logp, row = ratio.log(), preset_of("grpo", p, kl_loss_coef=p["beta"])

    def objective(mode, leaf, rows):
        return -updated(
            replace(row, aggregation=mode),
            leaf[rows],
            torch.zeros_like(leaf[rows]),
            mask[rows],
            advantages=[i["advantages"][k] for k in rows],
            ref_logps=(logp + ref.log())[rows],
        )[1]

    every = list(range(len(ratio)))
    per_token = []
    for k in every:  # a token alone is a sequence by itself
        of = []
        for t in range(int(mask[k].sum())):
            one = torch.zeros_like(mask[[k]])
            one[0, t] = 1
            _, loss = updated(
                row,
                logp[[k]],
                torch.zeros_like(logp[[k]]),
                one,
                advantages=[i["advantages"][k]],
                ref_logps=(logp + ref.log())[[k]],
            )
            of.append(-loss)
        per_token.append(of)
    return {
        "per_token": per_token,
        "objective": objective("seq-mean-token-mean", logp, every),
        "objective_token_mean": objective("token-mean", logp, every),
    }


def clamp_cases(i, p):
    def objective(d, A, c=None):
        loss, _ = losses.policy_loss(
            T([[d]]),
            T([[0.0]]),
            T([A]),
            M([[1]]),
            epsilon=p["epsilon"],
            clip_ratio_c=c,
            log_ratio_clamp=p["log_ratio_clamp"],
        )
        return -loss[0, 0]

    c = p["clip_ratio_c"]
    return {
        "objective_log_ratio_50_A1": objective(50.0, 1.0),
        "objective_log_ratio_50_Aminus1_no_dual": objective(50.0, -1.0),
        "objective_log_ratio_50_Aminus1_dual": objective(50.0, -1.0, c),
        "objective_log_ratio_minus50_A1": objective(-50.0, 1.0),
        "objective_log_ratio_minus50_Aminus1": objective(-50.0, -1.0),
    }


def one_step(i, p):
    logp, row = T(i["logp"], True), preset_of("ppo", p, surrogate="stopgrad_ratio")
    _, loss = updated(row, logp, logp.detach(), M(i["mask"]), advantages=i["advantages"])
    (g,) = grads(loss, logp)
    return {"objective": -loss.detach(), "d_objective_d_logp": -g}


def rollout_loop(i, p):
    mask = M(i["mask"])
    kl = losses.kl_estimate(T(i["logp_old"]), T(i["logp_ref"]), "k1", mask)
    on, n = mask.bool().numpy(), len(mask)
    batch = credit.Batch(
        arr(i["score"]),
        np.arange(n),
        on,
        np.ones(n, bool),
        np.ones(n, bool),
        kl_BT=kl.numpy(),
        values_BT=np.where(on, arr(i["values_old"]), 0.0),
    )
    assert p["adv_norm"]["eps"] == 1e-8  # that of credit.assign
    found = credit.assign(
        rl_preset("ppo_outcome", kl_reward_mode=p["kl_reward_mode"], adv_norm_ddof=p["adv_norm"]["ddof"], whiten=True),
        batch,
        p["kl_coef"],
    )
    reward, adv, picked = found.rewards_B, found.advantages_BT, found.raw_BT[on]

    def run(new, mode):
        logp = T(new, True)
        per, _ = losses.policy_loss(logp, T(i["logp_old"]), T(adv.tolist()), mask, epsilon=p["epsilon"])
        loss = step_mean(per, mask, mode)
        (g,) = grads(loss, logp)
        return loss.detach(), g

    mode = p["loss_agg_mode"]
    policy_, g = run(i["logp_new"], mode)
    target = T(np.repeat(reward[:, None], mask.shape[1], 1).tolist())
    value = step_mean(losses.value_loss(T(i["values_new"]), target, mask), mask, mode)
    items, _ = rows_of(
        mask, advantages=adv.tolist(), old_logps=i["logp_old"], returns=target.tolist(), values=i["values_old"]
    )
    trained = mask.bool()
    _, total = rl_update(
        rl_preset("grpo", aggregation=mode, epsilon=p["epsilon"], kl_loss_coef=0.0),
        {"vf_coef": p["vf_coef"], "entropy_coef": p["entropy_coef"]},
        items,
        T(i["logp_new"])[trained],
        T(p["entropy_value"]).expand(int(trained.sum())),
        T(i["values_new"])[trained],
    )
    return {
        "kl_per_token": kl,
        "kl_seq_mean": [step_mean(kl[[k]], mask[[k]], "token-mean") for k in range(len(mask))],
        "reward": reward,
        "advantage_mean": picked.mean(),
        "advantage_var": picked.var(),
        "advantages": adv,
        "policy_loss_at_ratio_1": run(i["logp_old"], mode)[0],
        "policy_loss_at_ratio_1_token_mean": run(i["logp_old"], "token-mean")[0],
        "policy_loss": policy_,
        "policy_loss_token_mean": run(i["logp_new"], "token-mean")[0],
        "value_loss": value,
        "grad_logp_new": g,
        "total_loss": total,
    }


def early_stop(i, p):
    assert schedules.EARLY_STOP_FACTOR == p["factor"]
    stop = next(
        (k for k, kl in enumerate(i["approx_kl_per_minibatch"]) if schedules.stops_early(kl, p["early_stop_kl"])), None
    )
    return {
        "stop_after_index": stop,
        "minibatches_applied": len(i["approx_kl_per_minibatch"]) if stop is None else stop,
    }


def offline_weights(i, p):
    return topr(i, {"baseline": 0.0, "clip_pos": (0.0, p["clip_max"]), "clip_neg": (0.0, p["clip_max"])})


def topr(i, p):
    """Responses of one token each; what a gradient is of -A log pi, over their number, is its weight."""
    logp, mu, n = T(i["logp_seq"], True), T(i["logp_behaviour_seq"]), len(i["reward"])
    row = rl_preset("topr", baseline="constant")
    clips = {k: p[k] for k in ("clip_pos", "clip_neg") if k in p}
    r = credited(row, n, rewards=i["reward"], baseline=p["baseline"])
    _, loss = updated(
        replace(row, options={**row.options, **clips}),
        logp[:, None],
        mu[:, None],
        torch.ones(n, 1, dtype=torch.int),
        advantages=r,
    )
    (g,) = grads(loss, logp)
    return {
        "ratio": torch.exp(logp.detach() - mu),
        "weights": -g * n / T(r.tolist()),
        "loss": loss,
        "grad_logp_seq": g,
        "effective_reward": r,
    }


def tis(i, p):
    old, mu, mask = T(i["logp_old_trainer"]), T(i["logp_rollout"]), M(i["mask"])
    c = p["clip_max"]

    def weight(mode, cap=c):
        return losses.truncated_importance_weights(old, mu, mask, mode, cap)

    out = {
        "raw_ratio": weight("token_truncate", math.inf),
        "weights": weight("token_truncate"),
        "sequence_ratio": weight("sequence_truncate", math.inf)[:, 0],
        "sequence_truncate_weight": weight("sequence_truncate")[:, 0],
        "sequence_mask_weight": weight("sequence_mask")[:, 0],
        "token_mask_weight": weight("token_mask"),
    }
    if "logp_new" in i:
        logp = T(i["logp_new"], True)
        per, _ = losses.policy_loss(
            logp, old, T(i["advantages"]), mask, epsilon=p["epsilon"], weights_BT=weight("token_truncate")
        )
        out["loss"] = step_mean(per, mask, p["loss_agg_mode"])
        (out["grad_logp_new"],) = grads(out["loss"], logp)
    return out


def objective_scalars(i, p):
    """Scalars given as objectives and coefficients: an update of one token at ratio 1 whose terms are these."""
    clip = i.get("objective_clip", i.get("clip_objective"))
    h = T(i["entropy"]) if "entropy" in i else production.entropy(T(i["pi_new"]).log())
    items, _ = rows_of(
        torch.ones(1, 1),
        advantages=[clip],
        old_logps=[[0.0]],
        ref_logps=[[-math.sqrt(2 * i.get("kl", 0.0))]],
        returns=[[0.0]],
        values=[[0.0]],
    )
    row = rl_preset("grpo", aggregation="token-mean", kl_loss_coef=p.get("beta", 0.0), kl_loss_estimator="k2")
    _, loss = rl_update(
        row,
        {"vf_coef": p.get("vf_coef", 0.0), "entropy_coef": p["entropy_coef"]},
        items,
        T([0.0]),
        h.reshape(1),
        T([math.sqrt(i.get("value_loss", 0.0))]),
    )
    return {"loss": loss, "objective": -loss, "entropy": h}


# --- critic, KL, entropy ---------------------------------------------------------------------------------------


def critic(i, p):
    """A step of the separate critic on given values; targets that are no returns come from the rewards."""
    if "values_prompt" in i:
        values, mask = T([[x] for x in i["values_prompt"]], True), torch.ones(len(i["reward"]), 1, dtype=torch.int)
    else:
        values, mask = T(i.get("values", i.get("values_new")), True), M(i["mask"])
    old, clip = T(i["values_old"]) if "values_old" in i else values.detach(), p.get("cliprange_value")
    target, n = p.get("target", "terminal" if "reward" in i else "lambda_return"), len(values)
    row = rl_preset("ppo_outcome", critic_target=target, kl_reward_coef=0.0, whiten=False, aggregation="token-mean")
    out = {}
    if "returns" in i:
        returns = T(i["returns"])
    else:
        on = mask.bool().numpy()
        batch = credit.Batch(
            arr(i["reward"]), np.arange(n), on, np.ones(n, bool), np.ones(n, bool), values_BT=old.numpy()
        )
        found = credit.assign(row, batch, 0.0)
        returns, out["advantages"] = T(found.returns_BT.tolist()), found.advantages_BT[:, 0]

    def step(mode, **config):
        return production.critic_update(
            replace(row, aggregation=mode), values, returns, old, mask, {"cliprange_value": clip, **config}
        )

    sums, mean = step("token-mean")
    (g,) = torch.autograd.grad(mean, values)
    each = []
    for at in mask.nonzero().tolist():
        one = torch.zeros_like(mask)
        one[tuple(at)] = 1
        each.append(production.critic_update(row, values, returns, old, one, {"cliprange_value": clip})[1].detach())
    per_token = torch.zeros_like(values.detach()).masked_scatter(mask.bool(), torch.stack(each))
    out |= {
        "per_token": per_token,
        "loss": step(p.get("loss_agg_mode", "token-mean"))[1].detach(),
        "loss_sum": sums.loss["value"][0].detach(),
        "loss_token_mean": mean.detach(),
        "loss_half_token_mean": step("token-mean", value_loss_half=True)[1].detach(),
        "grad_values": g,
        "grad_values_token_mean": g,
    }
    if clip is not None:
        out |= {
            "values_clipped": losses.clipped_values(values.detach(), old, clip),
            "clip_fraction": sums.metrics["clip_fraction"][0] / mask.sum(),
        }
    return out


def kl_table(i, p):
    pi, ref = T(i["pi"]), T(i["ref"])
    one = torch.ones_like(pi)
    out = {"kl_pi_ref": production.full_kl(pi.log(), ref.log())}
    for k in ("k1", "k2", "k3"):
        x = losses.kl_estimate(pi.log(), ref.log(), k, one)
        out |= {k: x, "E_" + k: (pi * x).sum(), "var_" + k: (pi * (x - (pi * x).sum()) ** 2).sum()}
    return out


def kl_sequence(i, p):
    mask = M(i["mask"])
    k = {n: losses.kl_estimate(T(i["logp"]), T(i["logp_ref"]), n, mask) for n in ("k1", "k2", "k3")}
    return {
        "k1_tokens": k["k1"],
        "k1_sum": production.sequence_sums(k["k1"], mask),
        "k1_mean": [step_mean(k["k1"][[n]], mask[[n]], "token-mean") for n in range(len(mask))],
        "k2_sum": production.sequence_sums(k["k2"], mask),
        "k3_sum": production.sequence_sums(k["k3"], mask),
    }


def kl_gradients(i, p):
    pi, ref = T(i["pi"]), T(i["ref"])
    one = torch.ones_like(pi)

    def expected(kind, weighted=False):
        """E over fixed samples of the gradient wrt logits of the estimate used as a loss."""
        theta = pi.log().clone().requires_grad_()
        logp = torch.log_softmax(theta, 0)
        x = losses.kl_estimate(logp, ref.log(), kind, one, pi.log() if weighted else None)
        return torch.autograd.grad((pi * x).sum(), theta)[0]

    def exact(direction):
        theta = pi.log().clone().requires_grad_()
        return torch.autograd.grad(production.full_kl(theta, ref.log(), direction=direction), theta)[0]

    return {
        "grad_exact_kl_pi_ref": exact("reverse"),
        "grad_exact_kl_ref_pi": exact("forward"),
        **{f"expected_grad_{k}_in_loss": expected(k) for k in ("k1", "k2", "k3")},
        "expected_grad_ratio_weighted_k1": expected("k1", True),
        "expected_grad_ratio_weighted_k3": expected("k3", True),
    }


def kl_in_reward(i, p):
    pi, ref = T(i["pi"]), T(i["ref"])
    one = torch.ones_like(pi)
    theta = pi.log().clone().requires_grad_()
    (exact,) = torch.autograd.grad(production.full_kl(theta, ref.log()), theta)

    def gradient(penalty):
        """Of the penalty alone, as a reward of single actions."""
        rewards = estimators.shape_rewards(np.zeros(len(pi)), arr(penalty)[:, None], arr(one)[:, None], p["kl_coef"])
        return -production.expected_gradient(pi.log(), rewards)

    return {
        "minus_policy_gradient_of_minus_log_ratio": gradient(losses.kl_estimate(pi.log(), ref.log(), "k1", one)),
        "gradient_from_k3_as_detached_penalty": gradient(losses.kl_estimate(pi.log(), ref.log(), "k3", one)),
        "gradient_from_full_kl_as_detached_penalty": gradient(production.full_kl(pi.log(), ref.log()).expand(len(pi))),
        "exact_reverse_kl_gradient": exact,
    }


def k3_clamp(i, p):
    d = T(i["log_pi_minus_log_ref"])
    one = torch.ones_like(d)
    return {
        "k3": losses.kl_estimate(d, torch.zeros_like(d), "k3", one, log_ratio_clamp=p["log_ratio_clamp"]),
        "clamped": losses.log_ratios(d, torch.zeros_like(d), one, log_ratio_clamp=p["log_ratio_clamp"])[1],
    }


def kl_reward(i, p):
    if "logp_sum" in i:
        kl, mask = (arr(i["logp_sum"]) - arr(i["logp_ref_sum"]))[:, None], np.ones((len(i["score"]), 1))
    elif "kl_per_token" in i:
        kl, mask = i["kl_per_token"], i["mask"]
    else:
        mask = i["mask"]
        kl = losses.kl_estimate(T(i.get("logp", i.get("logp_old"))), T(i["logp_ref"]), "k1", M(mask))
    shaped = {m: estimators.shape_rewards(i["score"], kl, mask, p["kl_coef"], m) for m in estimators.KL_REWARD_MODES}
    gamma = p.get("gamma", 1.0)
    tokens = shaped["token_terminal"]
    back = estimators.reward_to_go(tokens, mask, gamma)
    out = {
        "token_rewards": tokens,
        "sum": tokens.sum(1),
        "shaped": shaped["sequence_sum"],
        "reward": shaped["sequence_sum"],
        "token_terminal": {"token_rewards": tokens, "returns": back},
        "token_broadcast": {"token_rewards_as_psi": shaped["token_broadcast"]},
        "sequence_sum": {"reward": shaped["sequence_sum"]},
        "sequence_mean": {"reward": shaped["sequence_mean"]},
        "returns": back,
    }
    if "values_old" in i:
        out["advantages"], out["returns"] = estimators.gae(tokens, i["values_old"], mask, 0.0, gamma, p["lam"])
        out["advantages_lam1"] = estimators.gae(tokens, i["values_old"], mask, 0.0, gamma, 1.0)[0]
    return out


def reinforce_pp(i, p):
    mask, n = arr(i["mask"]) > 0, len(i["score"])
    row = rl_preset("reinforce_pp", gamma=p["gamma"], adv_norm_ddof=p["ddof"])
    batch = credit.Batch(
        arr(i["score"]), np.arange(n), mask, np.ones(n, bool), np.ones(n, bool), kl_BT=arr(i["kl_per_token"])
    )
    found = credit.assign(row, batch, p["kl_coef"])
    return {
        "token_rewards": found.token_rewards_BT,
        "returns": found.raw_BT,
        "advantages": found.advantages_BT,
    }


def kl_full(i, p):
    if "logits" in i:
        mask = M(i["mask"])
        kl = production.full_kl(T(i["logits"]), T(i["ref_logits"]), mask)
        return {"kl_per_token": kl, "kl_sequence_sum": kl.sum(1), "kl_token_mean": step_mean(kl, mask, "token-mean")}
    pi, ref = T(i["pi"]).log(), T(i["ref"]).log()
    kl, h = production.full_kl(pi, ref), production.entropy(pi)
    return {
        "kl_pi_ref": kl,
        "kl_ref_pi": production.full_kl(pi, ref, direction="forward"),
        "entropy_pi": h,
        "cross_entropy_pi_ref": kl + h,
    }


def kl_kd(i, p):
    pi, base = T(i["pi"]).log().requires_grad_(), T(i["base"]).log()
    kl = production.full_kl(pi, base, direction="forward")
    ce = kl + production.entropy(base)
    (g,) = grads(ce, pi)
    return {"cross_entropy_base_pi": ce, "kl_base_pi": kl, "grad_logits_loss": g}


def kl_direction(i, p):
    old, new = T(i["pi_old"]).log(), T(i["pi_new"]).log()
    return {"kl_old_new": production.full_kl(old, new), "kl_new_old": production.full_kl(new, old)}


def klpen(preset: str):
    """Objectives at a state: surrogate of an action minus coef KL(old||new), plus entropy."""

    def adapter(i, p):
        old, new = T(i["pi_old"]).log(), T(i["pi_new"]).log()

        def objective(action, **clip):
            row = preset_of(preset, {**p, **clip}, kl_loss_coef=p["kl_coef"])
            return -production.update_at(row, new, old, action, i["A"], {"entropy_coef": p.get("entropy_coef", 0.0)})

        out = {"kl_old_new": production.full_kl(old, new), "entropy": production.entropy(new)}
        out |= {f"objective_action{a}": objective(a) for a in range(len(old))}
        if "action" in i:
            out["objective"] = objective(i["action"])
            out["objective_eps_0.1"] = objective(i["action"], epsilon=0.1)
        return out

    return adapter


def trpo_penalty(i, p):
    mask = M(i["mask"])
    logp = T(i["ratio"]).log()
    row = preset_of("trpo_penalty", p, kl_loss_coef=p["kl_coef"], aggregation=p["loss_agg_mode"])
    _, loss = updated(row, logp, torch.zeros_like(logp), mask, advantages=i["advantages"], kl=T(i["kl_old_new"]))
    return {"loss": loss}


def trust_region(i, p):
    """A step on a table of logits, which is the hidden state under a head that changes nothing."""
    logits, adv = T(i["logits"]), T(i.get("advantages", i.get("advantages_centred")))
    g = production.expected_gradient(logits, adv)
    head = production.head(logits)

    def fisher(v):
        return head_fisher(head, logits[None], v[None], None, None, 1.0, 1)[0][0]

    def damped(v):
        return fisher(v) + p["cg_damping"] * v

    x, _ = conjugate_gradient(damped, g, 10, 1e-30)
    step, tried = full_step(x, float(x @ damped(x)), p["max_kl"]), []

    def try_step(fraction):
        new = logits + fraction * step
        tried.append(
            {
                "fraction": fraction,
                "kl_old_new": float(production.full_kl(logits, new)),
                "surrogate_gain": float((torch.softmax(new, -1) - torch.softmax(logits, -1)) @ adv),
            }
        )
        return tried[-1]["kl_old_new"], tried[-1]["surrogate_gain"]

    accepted = (
        backtrack(try_step, p["max_kl"], p["backtrack_coeff"], p["backtrack_iters"])
        if "backtrack_coeff" in p
        else (1.0,)
    )
    new = logits + (accepted[0] if accepted else 0.0) * step
    return {
        "grad": g,
        "fisher": torch.stack([fisher(v) for v in torch.eye(len(g), dtype=g.dtype)]),
        "x": x,
        "natural_step": step,
        "full_step": step,
        "line_search": tried,
        "accepted_index": len(tried) - 1 if accepted else None,
        "pi_new": torch.softmax(new, -1),
        "kl_old_new": production.full_kl(logits, new),
        "kl_new_old": production.full_kl(new, logits),
    }


def bonus(entropy_BT, mask, coef: float) -> float:
    """The entropy term of an update of these tokens."""
    zeros, n = torch.zeros(mask.shape).tolist(), int(mask.sum())
    items, _ = rows_of(mask, advantages=zeros, old_logps=zeros)
    row = rl_preset("grpo", aggregation="token-mean", kl_loss_coef=0.0)
    return rl_update(row, {"entropy_coef": coef}, items, torch.zeros(n), entropy_BT[mask.bool()])[1]


def entropy(i, p):
    c = p.get("entropy_coef", 0.0)
    if "entropy_per_token" in i:
        h, mask = T(i["entropy_per_token"]), M(i["mask"])
        mean = step_mean(h, mask, "token-mean")
        return {
            "token_mean": mean,
            "seq_mean_token_mean": step_mean(h, mask, "seq-mean-token-mean"),
            "loss_term_token_mean": bonus(h, mask, c),
        }
    logits = T(i["pi"]).log().requires_grad_()
    h = production.entropy(logits)
    (g,) = grads(h, logits)
    return {
        "entropy": h,
        "loss_term": bonus(h.detach()[None, None], torch.ones(1, 1, dtype=torch.int), c),
        "grad_logits_of_entropy": g,
        "uniform_entropy": production.entropy(torch.zeros_like(logits)),
    }


def controller(i, p):
    name = p.get("controller", "adaptive_ppo")
    options = {"k_beta": p["k_beta"]} if "k_beta" in p else {}

    def step(beta, kl, **extra):
        c = estimators.KLController(beta, name, p["target_kl"], **{**options, **extra})
        return c.update(kl, 1000)

    if "kl_after_each_update" in i:
        c, after = estimators.KLController(i["beta"], name, p["target_kl"]), []
        for kl in i["kl_after_each_update"]:
            after.append(c.update(kl))
            resumed = estimators.KLController(0.0, name, p["target_kl"])
            resumed.load_state_dict(c.state_dict())
            c = resumed
        return {"beta_after": after}
    out = {"beta_new": [step(i["beta"], kl) for kl in i["kl"]]}
    if name == "adaptive_ziegler":
        out["beta_new_horizon_10000_steps_1000"] = [step(i["beta"], kl, horizon=10000) for kl in i["kl"]]
    return out


def kl_units(i, p):
    kl, mask = T(i["kl_per_token"]), M(i["mask"])
    return {
        "kl_token_mean": step_mean(kl, mask, "token-mean"),
        "kl_sequence_sum_mean": step_mean(kl, mask, "seq-mean-token-sum"),
        "kl_sequence_mean_mean": step_mean(kl, mask, "seq-mean-token-mean"),
    }


def ptx(i, p):
    """An update of one token at ratio 1, whose loss is the given one, and of the pretraining rows."""
    logp, mask = (
        (T(i["logp_pretrain"], True), M(i["mask"]))
        if "mask" in i
        else (T([[-i["ptx_nll"]]], True), torch.ones(1, 1, dtype=torch.int))
    )

    def update(how, coef=p["ptx_coef"]):
        items = rows_of(torch.ones(1, 1), advantages=[-i["policy_loss"]], old_logps=[[0.0]])[0]
        items += [
            make_item(f"ptx {k}", [0], [[0] * mask.shape[1]], [row.tolist()], ptx=True) for k, row in enumerate(mask)
        ]
        return (
            rl_preset("grpo", aggregation="token-mean", kl_loss_coef=0.0, ptx_coef=coef),
            {"ptx_agg": how},
            items,
            torch.cat([T([0.0]), logp[mask.bool()]]),
        )

    loss = rl_update(*update("token-mean"))[1]
    (g,) = grads(loss, logp)
    nll = {how: production.rl_logged(*update(how, 1.0))["ptx_loss"] for how in ("token-mean", "seq-mean-token-sum")}
    return {
        "loss": loss,
        "ptx_nll_token_mean": nll["token-mean"],
        "ptx_nll_seq_mean_token_sum": nll["seq-mean-token-sum"],
        "loss_token_mean": loss,
        "grad_logp_pretrain_token_mean": g,
    }


# --- normalisation, aggregation, groups ------------------------------------------------------------------------


def whiten(i, p):
    if "advantage_clip" in p:
        # completions of one token, their rewards the advantages: no group, no baseline
        every = np.ones(len(i["advantages"]), bool)
        batch = credit.Batch(arr(i["advantages"]), np.zeros(len(every), int), every[:, None], every, every)
        return {
            "clipped": (
                credit.assign(rl_preset("reinforce"), batch, 0.0, advantage_clip=p["advantage_clip"]).advantages_BT[
                    :, 0
                ]
            )
        }
    if "rewards" in i:
        r = i["rewards"]
        return {
            "whitened": estimators.whiten(r, ddof=p["ddof"], eps=p["eps"]),
            "minmax_0_1": estimators.minmax(r),
            "whiten_without_shift": estimators.whiten(r, ddof=p["ddof"], eps=p["eps"], shift_mean=False),
            "clip_to_2.5": estimators.normalise_rewards(r, "none", clip=2.5),
        }
    picked = arr(i["advantages"])[arr(i["mask"]) > 0]
    return {
        "whitened": estimators.whiten(i["advantages"], i["mask"], p["ddof"], p["eps"]),
        "mean": picked.mean(),
        "std": picked.std(ddof=p["ddof"]),
    }


def aggregation(i, p):
    if "lengths" in i:
        mask = torch.tensor([[1] * n + [0] * (max(i["lengths"]) - n) for n in i["lengths"]])
        loss = (i["ratio"] * T(i["advantages"])).unsqueeze(1).expand(mask.shape)
    else:
        loss, mask = T(i["loss"]), M(i.get("mask", i.get("response_mask")))
    if "tool_mask" in i:
        mask = mask * (1 - M(i["tool_mask"]))
    keep = p["seq_denominator"] if isinstance(p.get("seq_denominator"), str) else "nonempty"
    out = {m: step_mean(loss, mask, m, seq_denominator=keep) for m in MODES[:3]}
    if "loss_scale_factor" in p:
        out[MODES[3]] = step_mean(loss, mask, MODES[3], p["loss_scale_factor"], keep)
    if p.get("loss_agg_mode") in out:
        out["loss"] = out[p["loss_agg_mode"]]
    if isinstance(p.get("seq_denominator"), list):
        out |= {m: {d: step_mean(loss, mask, m, seq_denominator=d) for d in p["seq_denominator"]} for m in MODES[1:3]}
    if "prompt_ids" in i:
        out |= {
            "token-mean scope=batch": out["token-mean"],
            "token-mean scope=group": step_mean(loss, mask, "token-mean", scope="group", prompts=i["prompt_ids"]),
        }
    if "tool_mask" in i:
        out |= {
            "loss_mask": mask,
            "length_for_overlong": int(M(i["response_mask"]).sum()),
            "length_for_loss": int(mask.sum()),
        }
    if "micro_batch_size" in p:
        parts = [losses.aggregate(loss[k : k + 1], mask[k : k + 1], "token-mean") for k in range(len(loss))]
        tokens = sum(c["tokens"] for _, c in parts)
        out |= {
            "global_token_mean": sum(s for s, _ in parts) / tokens,
            "micro_batch_1_mean_of_token_means": sum(s / c["tokens"] for s, c in parts) / len(parts),
            "micro_numerators": [s for s, _ in parts],
            "global_denominator": tokens,
        }
    return out


def aggregation_gradients(i, p):
    mask = M(i["mask"])
    out = {}
    for mode in MODES:
        ratio = torch.ones(mask.shape, dtype=torch.float64, requires_grad=True)
        value = step_mean(ratio * i["advantages"], mask, mode, p["loss_scale_factor"])
        (g,) = grads(value, ratio)
        out[mode] = {"value": value, "grad_row0_valid": g[0, 0], "grad_row1": g[1, 0], "grad_masked": g[0, -1]}
    return out


GROUP_NAMES = {
    "ddof0_eps0": ("mean_std", 0, 0.0),
    "ddof1_eps0": ("mean_std", 1, 0.0),
    "ddof1_eps1e-4": ("mean_std", 1, 1e-4),
    "ddof0_eps1e-8": ("mean_std", 0, 1e-8),
    "no_std": ("mean", 1, 0.0),
}


def group_names(p):
    ddof, eps = p.get("ddof", 1), p.get("eps", 1e-4)
    return {
        **GROUP_NAMES,
        "scale_rewards=batch": ("batch_std", ddof, eps),
        "scale_rewards=batch_centered": ("batch_centered_std", ddof, eps),
        "scale_rewards=none": ("mean", ddof, eps),
    }


def grouped(i, p, mode="mean_std"):
    r = i.get("rewards", i.get("rewards_flat", i.get("reward")))
    ids = i.get("prompt_ids", i.get("prompt_id", ["q"] * len(r)))
    mode = {"group": "mean_std", "none": "mean", "batch": "batch_std", "batch_centered": "batch_centered_std"}.get(
        p.get("scale_rewards"), mode
    )
    adv, informative = estimators.group_advantage(
        r, ids, mode, p.get("ddof", p.get("std_ddof", 1)), p.get("eps", p.get("std_eps", 1e-4))
    )
    out = {name: estimators.group_advantage(r, ids, *how)[0] for name, how in group_names(p).items()}
    loo, _ = estimators.group_advantage(r, ids, "mean")
    G = p.get("num_generations", len(r))
    return {
        **out,
        "advantages": adv,
        "group_is_uninformative": not informative.any(),
        "loss_mask_sample": [int(math.isfinite(x)) for x in r],
        "dr_grpo_times_k_over_k_minus_1": loo * G / max(G - 1, 1),
    }


def std_difficulty(i, p):
    G, out = i["num_generations"], []
    for c in (1, 2, 3, 4, 7):
        r, ids = [1.0] * c + [0.0] * (G - c), ["q"] * G
        a, _ = estimators.group_advantage(r, ids, "mean_std", p["ddof"], p["eps"])
        d, _ = estimators.group_advantage(r, ids, "mean")
        out.append({"correct": c, "A_correct": a[0], "A_wrong": a[-1], "dr_grpo_correct": d[0], "dr_grpo_wrong": d[-1]})
    return {"rows": out}


def dapo_groups(i, p):
    G, out = i["num_generations"], []
    for c in (1, 4, 8, 15):
        r = [1.0] * c + [-1.0] * (G - c)
        row = {"correct": c}
        for ddof in (0, 1):
            a, _ = estimators.group_advantage(r, ["q"] * G, "mean_std", ddof, p["eps"])
            row[f"ddof{ddof}"] = [a[0], a[-1]]
        out.append(row)
    return {"rows": out}


def process(i, p):
    ends = [[e - 1 for e in row] for row in i["step_end_token_1based"]]
    lengths = i.get("lengths", [row[-1] + 1 for row in ends])
    flat = [r for row in i["step_rewards"] for r in row]
    return {
        "ddof0": estimators.process_advantage(i["step_rewards"], ends, lengths, 0, p["eps"]),
        "ddof1": estimators.process_advantage(i["step_rewards"], ends, lengths, 1, p["eps"]),
        "mean": float(np.mean(flat)),
        "advantages": estimators.process_advantage(i["step_rewards"], ends, lengths, p.get("ddof", 1), p["eps"]),
    }


def overlong_stats(i, p):
    ids, cut = ["q"] * len(i["rewards"]), np.asarray(i["truncated"]) > 0
    keep, _ = estimators.group_advantage(i["rewards"], ids, "mean_std", p["ddof"], p["eps"])
    drop, _ = estimators.group_advantage(i["rewards"], ids, "mean_std", p["ddof"], p["eps"], valid=~cut)
    return {"keep_in_stats": keep, "drop_from_stats": drop}


def dapo_reward(i, p):
    correctness = np.where(np.asarray(i["correct"]) > 0, 1.0, -1.0)
    length = estimators.overlong_penalty(i["length"], p["max_completion_length"], p["soft_punish_cache"])
    return {
        "correctness_reward": correctness,
        "length_reward": length,
        "reward": summed(correctness=correctness.tolist(), length=length.tolist()),
    }


def overlong(i, p):
    length = i.get("length", i.get("lengths"))
    out = estimators.overlong_penalty(
        length, p.get("max_completion_length", p.get("L_max")), p.get("soft_punish_cache", p.get("L_cache"))
    )
    return {"penalty": out, "reward": out}


def filter_correctness(i, p):
    reward = summed(correctness=i["correct"], length=i["overlong_penalty"])
    adv, _ = estimators.group_advantage(reward, ["q"] * len(reward))
    return {
        "reward": reward,
        "reward_std_nonzero": not estimators.is_constant(reward),
        "keep_group": bool(estimators.informative_groups([sum(i["correct"])], p["num_generations"])[0]),
        "advantages_if_wrongly_kept": adv,
    }


def dynamic(i, p):
    stream = list(enumerate(i["correct_counts_stream"]))
    found = estimators.fill_informative(
        lambda seen: stream[seen : seen + p["gen_batch_size"]] or None,
        lambda group: None if estimators.informative_groups([group[1]], p["num_generations"])[0] else "equal",
        p["train_batch_size"],
        p["max_num_gen_batches"],
    )
    return {
        "kept_indices": [at for at, _ in found["kept"]],
        "surplus_indices": [at for at, _ in found["surplus"]],
        "gen_batches_used": found["batches"],
        "filter_rate": found["filter_rate"],
    }


def plus_advantage(i, p):
    r = [code_reward(sum(t), len(t), well_formatted=bool(ok)) for t, ok in zip(i["tests_passed"], i["parsable"])]
    ids = ["q"] * len(r)
    return {
        "rewards": r,
        "advantages_ddof0": estimators.group_advantage(r, ids, "mean_std", 0, 0.0)[0],
        "advantages_ddof1": estimators.group_advantage(r, ids, "mean_std", 1, 0.0)[0],
    }


def termination(i, p):
    r, done, v = [i["reward"]], [i["terminated"]], [i["V_next"]]
    out = {}
    for name, policy_, mode in (
        ("score", "score", "replace"),
        ("zero", "zero", "replace"),
        ("penalty_replace", "penalty", "replace"),
        ("penalty_subtract", "penalty", "subtract"),
        ("bootstrap", "bootstrap", "replace"),
        ("mask", "mask", "replace"),
    ):
        reward, boot, keep = estimators.apply_truncation(r, done, policy_, p["missing_eos_penalty"], mode, v)
        out[name] = (
            {"last_token_reward": reward[0], "bootstrap_value": boot[0]}
            if name != "mask"
            else {"loss_mask_row": int(keep[0])}
        )
    return out


def group_mean_optimum(i, p):
    """Stationary point of the group-mean gradient (k samples) plus the exact KL gradient; leave-one-out for
    comparison.
    """

    def stationary(mode, k):
        ref, theta = T(i["ref"]).log(), T(i["ref"]).log().clone()
        for _ in range(4000):
            pi = torch.softmax(theta, 0)
            push = T(expected_group_gradient(pi, i["reward"], k, mode).tolist())
            leaf = theta.clone().requires_grad_()
            (pull,) = torch.autograd.grad(production.full_kl(leaf, ref), leaf)
            step = push - p["beta"] * pull
            theta = theta + 12.0 * step
            if step.abs().max() < 1e-12:
                break
        return torch.softmax(theta, 0)

    out = []
    for k in (2, 4):
        out.append(
            {"num_generations": k, "effective_beta": p["beta"] * k / (k - 1), "stationary_pi": stationary("mean", k)}
        )
    return {"rows": out, "leave_one_out_pi": stationary("leave_one_out", 2)}


def ref_ema(i, p):
    return {
        f"ref_after_{n}": ref
        for n, ref in enumerate(production.followed(i["ref"], i["policy"], p["decay"], p["updates"]), 1)
    }


def opponent(i, p):
    return {"opponent_after": production.followed(i["opponent"], i["policy"], p["decay"], p["updates"])}


def mask_composition(i, p):
    """Rows as padded sequences; production knows a completion's own tokens, which of them a tool wrote, and whether it
    is trained.
    """
    response = [
        [int(a and not prompt and not pad) for a, prompt, pad in zip(*row)]
        for row in zip(i["attention"], i["is_prompt"], i["is_pad"])
    ]

    def trained(truncated):
        policy = "mask" if p["mask_truncated_completions"] else "score"
        kept = estimators.apply_truncation([0.0] * len(response), [not cut for cut in truncated], policy)[2]
        out = []
        for own, tool, keep in zip(response, i["is_tool"], kept):
            given = iter(
                Sample(
                    {}, [], 0, [0] * sum(own), None, "eos", "", tool_mask=[t for t, o in zip(tool, own) if o]
                ).action_mask
            )
            out.append([next(given) * int(keep) if o else 0 for o in own])
        return out

    return {
        "response_mask": response,
        "loss_mask": trained(i["truncated"]),
        "loss_mask_if_truncated": trained([1] * len(response)),
    }


def ess(i, p):
    w = arr(i["weights"]) if "weights" in i else np.exp(arr(i["log_ratio"]))
    logged = weight_metrics(w, np.ones(len(w), bool), "token_truncate", math.inf)
    fraction, mean = logged["sampling/importance_weight/ess_fraction"], logged["sampling/importance_weight/mean"]
    out = {
        "ess": fraction * len(w),
        "ess_fraction": fraction,
        "max_ratio": w.max(),
        "ratio_max": w.max(),
        "ratio_mean": mean,
    }
    r = np.array([1.0, 0.0] * (len(w) // 2) + [1.0] * (len(w) % 2))
    return {**out, "self_normalised_mean_of_R_1_0_1_0": float(w @ r / w.sum())}


def clip_fractions(i, p):
    logp, n = T([i["ratio"]]).log(), len(i["ratio"])
    mask = torch.ones(1, n, dtype=torch.int)
    sums, _ = updated(preset_of("ppo", p), logp, torch.zeros_like(logp), mask, advantages=[i["advantage"]])
    s = shares(sums, float(n))
    return {
        "ratio_outside": s["outside_range_fraction"],
        "gradient_zeroed": s["clip_fraction"],
        "gradient_zeroed_high": s["clip_fraction_high"],
        "gradient_zeroed_low": s["clip_fraction_low"],
    }


def astar(i, p):
    if "logp_seq" not in i:
        return {
            "v_star": [estimators.v_star(r, p["beta1"]) for r in i["reference_rewards"]],
            "all_incorrect": [not any(r) for r in i["reference_rewards"]],
        }
    v = estimators.v_star(i["reference_rewards"], p["beta1"])
    n, logp, ref = len(i["reward"]), T(i["logp_seq"], True), T(i["logp_ref_seq"])
    row = rl_preset("astar_po", options={"beta": p["beta2"]}, kl_reward_coef=0.0)
    worth = credited(row, n, rewards=i["reward"], baseline=v)
    _, loss = updated(
        row,
        logp[:, None],
        ref[:, None],
        torch.ones(n, 1, dtype=torch.int),
        advantages=worth,
        ref_logps=ref[:, None],
    )
    (g,) = grads(loss, logp)
    # of the square of what a sequence misses, over their number
    return {"v_star": v, "residual": g * n / (2 * p["beta2"]), "loss": loss, "grad_logp_seq": g}


def credited(preset, n: int, kl_coef: float = 0.0, **batch):
    """Advantages [n] that a preset's row gives one-token completions of prompts of their own."""
    one = credit.Batch(
        arr(batch.pop("rewards")), np.arange(n), np.ones((n, 1), bool), np.ones(n, bool), np.ones(n, bool), **batch
    )
    return credit.assign(preset, one, kl_coef).advantages_BT[:, 0]


def reward_minus(i, p):
    b = i["greedy_reward"] if "greedy_reward" in i else estimators.table_baseline(i["prompt_id"], i["table"])
    row = rl_preset("remax", kl_reward_coef=0.0, baseline="greedy" if "greedy_reward" in i else "table")
    return {"advantages": credited(row, len(i["reward"]), rewards=i["reward"], baseline=arr(b))}


def win_rates(i, p):
    """The rates whose distance from 1/2 is the advantage of SPPO."""
    won, n = arr(i["pairwise"]), len(i["pairwise"])
    return {"win_rate": credited(rl_preset("sppo"), n, rewards=np.zeros(n), preference_BO=won) + 0.5}


def sppo(i, p):
    """The update of responses that are one token each; a pair with a label is two that win for sure and never."""
    if "win_prob" in i:
        h, win, eta = T(i["log_ratio_to_prev"], True), arr(i["win_prob"]), p["eta"]
    else:
        h, win, eta = T([i["log_ratio_chosen"], i["log_ratio_rejected"]], True), arr([1.0, 0.0]), 1 / p["beta"]
    row, n = rl_preset("sppo", options={"eta": eta}), len(win)
    wins = credited(row, n, rewards=np.zeros(n), preference_BO=win[:, None])
    _, loss = updated(row, h[:, None], torch.zeros(n, 1), torch.ones(n, 1, dtype=torch.int), advantages=wins)
    loss = loss if "win_prob" in i else n * loss  # the vector's pair is a sum
    (g,) = grads(loss, h)
    return {
        "targets": eta * wins,
        "loss": loss,
        "grad_log_ratio_chosen": g[0],
        "grad_log_ratio_rejected": g[1],
    }


def online_ipo(i, p):
    """Pairs of one prompt each, whose second response is as likely as under the reference."""
    row, n = rl_preset("online_ipo", options={"tau": p["tau"]}), len(i["h"])

    def update(k, prefers):
        h = T(i["h"][k], True)
        logp, zeros = torch.stack([h, T(0.0)])[:, None], torch.zeros(2, 1)
        _, loss = updated(
            row,
            logp,
            zeros,
            torch.ones(2, 1, dtype=torch.int),
            ["q", "q"],
            advantages=[0.0, 0.0],
            ref_logps=zeros,
            preferences=[prefers, 1 - prefers],
        )
        return loss.detach(), *grads(loss, h)

    soft = [update(k, q) for k, q in enumerate(i["p_first_preferred"])]
    hard = [[update(k, label)[0] for label in (1.0, 0.0)] for k in range(n)]
    q = i["p_first_preferred"][1]
    return {
        "loss_hard": [hard[k][0] for k in range(n) if i["p_first_preferred"][k] == 1.0],
        "soft_target": [h - g / 2 for h, (_, g) in zip(i["h"], soft)],  # the loss is the square of what h misses
        "loss_soft": [loss for loss, _ in soft],
        "expected_hard_loss_second": q * hard[1][0] + (1 - q) * hard[1][1],
        "grad_h_second": soft[1][1],
    }


def agent(i, p):
    turn = estimators.turn_returns(i["turn_rewards"], p["gamma"])
    of, mask = np.asarray(i["turn_of_token"]), M(i["mask"])
    adv = np.where(of >= 0, turn[np.maximum(of, 0)] - p["baseline"], 0.0)
    logp = T(i["logp"], True)
    per, _ = losses.policy_loss(logp, logp, T(adv.tolist()), mask, surrogate="logp")
    loss = step_mean(per, mask, p["loss_agg_mode"])
    (g,) = grads(loss, logp)
    return {"turn_returns": turn, "advantages": adv, "loss": loss, "grad_logp": g}


def of_pairs(preset, logp_P2, old_P2, p, rewards, ref_logps=None, **options):
    """Loss of an update of a preset on pairs of responses of one token each."""
    n = logp_P2.numel()
    columns = {"rewards": rewards, "advantages": [0.0] * n, **({} if ref_logps is None else {"ref_logps": ref_logps})}
    return updated(
        rl_preset(preset, options=options, kl_reward_coef=0.0),
        logp_P2.reshape(n, 1),
        T(old_P2).reshape(n, 1),
        torch.ones(n, 1, dtype=torch.int),
        [k // 2 for k in range(n)],
        **columns,
    )[1]


def p3o(i, p):
    def run(form, shift=0.0):
        logp = T(i["logp_seq"], True)
        rewards = (arr(i["reward"]) + shift).ravel().tolist()
        loss = of_pairs("p3o", logp, i["logp_old_seq"], p, rewards=rewards, epsilon=p["epsilon"], form=form)
        (g,) = grads(loss, logp)
        return {"loss": loss.detach(), "grad_logp_seq": g}

    out = {form: run(form) for form in ("separate", "joint")}
    return {
        **out,
        **{f"grad_{k}": v["grad_logp_seq"] for k, v in out.items()},
        "grad_after_reward_shift_7": run("separate", 7.0)["grad_logp_seq"],
    }


def copg(i, p):
    logp, ref = T(i["logp_seq"], True), [[x] for x in i["logp_ref_seq"]]
    loss = of_pairs("copg", logp[None], [i["logp_ref_seq"]], p, rewards=i["reward"], ref_logps=ref, beta=p["beta"])
    (g,) = grads(loss, logp)
    return {"loss": loss, "grad_logp_seq": g, "residual": -g[0]}


def mirror_descent(i, p):
    adv, _ = estimators.group_advantage(i["reward"], ["q"] * len(i["reward"]), "mean")
    logp, ones = T(i["logp_seq"], True), torch.ones(len(adv), 1, dtype=torch.int)
    row = rl_preset("mdpo", options={"tau": p["tau"]})
    _, loss = updated(row, logp[:, None], T(i["logp_iter_seq"])[:, None], ones, advantages=adv)
    (g,) = grads(loss, logp)
    return {"advantages": adv, "loss": loss, "grad_logp_seq": g}


def oreo(i, p):
    l, v, mask = T(i["log_ratio"], True), T(i["values"], True), M(i["mask"])
    back = T(estimators.reward_to_go(estimators.place_terminal(i["reward"], i["mask"]), i["mask"]).tolist())
    value, policy_ = (
        step_mean(x, mask, "token-mean") for x in sequence_losses.oreo_losses(l, v, back, mask, p["beta"])
    )
    (gv,), (gl,) = torch.autograd.grad(value, v), torch.autograd.grad(policy_, l)
    return {"value_loss": value, "policy_loss": policy_, "grad_values": gv, "grad_log_ratio": gl}


def positive_lm(i, p):
    nll, mask = T(i["nll"]), M(i["mask"])
    zeros = torch.zeros(mask.shape).tolist()
    items, _ = rows_of(mask, advantages=zeros, old_logps=zeros, correct=[bool(c) for c in i["correct"]])
    sums, loss = rl_update(
        rl_preset("grpo", kl_loss_coef=0.0, positive_nll_coef=p["positive_lm_coef"]), {}, items, -nll[mask.bool()]
    )
    return {"positive_nll_token_mean": loss / p["positive_lm_coef"], "loss_term": loss}


def nash(i, p):
    ref, P = i["ref"], i["preference"]
    if "eta" in p:
        pi, steps = arr(ref), []
        for _ in range(3):
            mixture, pi = oracles.nash_md_step(pi, ref, P, p["tau"], p["eta"])
            steps.append({"mixture": mixture, "pi_next": pi})
        return {"steps": steps}
    if "pi" in i:
        logp, log_ref, n = T(i["pi"]).log(), T(ref).log(), len(ref)
        mixture = torch.softmax(geometric_mixture(logp, log_ref, p["mixture_coef"]), -1).double()
        wins = (T(P) @ mixture).numpy()[:, None]
        kl = losses.kl_estimate(logp, log_ref, "k1", torch.ones(n)).numpy()[:, None]
        signal = credited(rl_preset("nash_md"), n, p["tau"], rewards=np.zeros(n), preference_BO=wins, kl_BT=kl)
        return {
            "mixture": mixture,
            "per_action_signal": signal,
            "grad_logits": production.expected_gradient(logp, signal),
        }
    star, pi = oracles.nash_equilibrium(ref, P, p["tau"]), arr(ref)
    for k in range(20_000):
        _, pi = oracles.nash_md_step(pi, ref, P, p["tau"], 2 / (p["tau"] * (k + 2)))
    return {"pi_star": star, "value": float(star @ arr(P) @ star), "nash_md_decaying_eta_limit": pi}


def importance(i, p):
    """Weights that no clip of the preset cuts, on single actions."""

    def weights(pi, mu):
        return losses.tapered_weights(T(pi).log(), T(mu).log(), torch.ones(len(pi)), *[(0.0, math.inf)] * 2).numpy()

    if "counts" in i:
        w, n = weights(i["P"], i["Q"]), arr(i["counts"])
        return {
            "weights": w,
            "estimate": float((n * w * arr(i["value"])).sum() / n.sum()),
            "naive_mean": float((n * arr(i["value"])).sum() / n.sum()),
        }
    mu, pi, r, w = arr(i["behaviour"]), arr(i["pi"]), arr(i["reward"]), weights(i["pi"], i["behaviour"])
    return {"E_behaviour_ratio_R": float(mu @ (w * r)), "E_pi_R": float(pi @ r), "E_behaviour_ratio": float(mu @ w)}


def refresh(i, p):
    after = production.reference_after_steps(
        i["ref"],
        i["policy"],
        p["steps"],
        reference_update="tr_soft",
        reference_alpha=p["ref_model_mixup_alpha"],
        reference_interval=p["ref_model_sync_steps"],
    )
    moved = [step for step, (old, new) in enumerate(zip([T(i["ref"]), *after], after), 1) if not torch.equal(old, new)]
    return {**{f"ref_after_step_{step}": ref for step, ref in enumerate(after, 1)}, "sync_at_steps": moved}


# --- schedules, replay, freshness -----------------------------------------------------------------------


def context_schedule(i, p):
    """The filter of cut completions switches with the same kind of schedule as the length."""
    filtered = [[0, 0], [p["overlong_filter_from_step"], 1]]
    return {
        "max_completion_length": [schedules.step_function(p["schedule"], s, 0) for s in i["step"]],
        "mask_truncated_completions": [bool(schedules.step_function(filtered, s, 0)) for s in i["step"]],
    }


def context_steps(i, p):
    """The same of a schedule whose rows say both."""
    return {
        "max_len": [schedules.step_function([row[:2] for row in p["schedule"]], s, 0) for s in i["steps"]],
        "overlong_filter": [
            bool(schedules.step_function([[row[0], int(row[2])] for row in p["schedule"]], s, 0)) for s in i["steps"]
        ],
    }


def freshness(i, p):
    out = {"staleness": schedules.staleness(i["current_version"], i["rollout_versions"])}
    return out | {
        f"accept_at_{m}": schedules.freshness_guard(i["current_version"], i["rollout_versions"], m)
        for m in p["max_staleness"]
    }


def stale_samples(i, p):
    late = schedules.staleness(i["policy_version_now"], i["sample_versions"])
    ok = schedules.freshness_guard(i["policy_version_now"], i["sample_versions"], p["max_staleness"])
    kept = [version for version, fresh in zip(i["sample_versions"], ok) if fresh]
    logged = off_policy_metrics(kept, i["policy_version_now"], None, None, None)
    return {"staleness": late, "dropped": [not k for k in ok], "mean_kept": logged["staleness/mean"]}


def allowed_presets(i, p):
    """Everything that is no on-policy preset is exempt."""

    def one(name):
        exempt = name not in RL_PRESETS or RL_PRESETS[name].off_policy_ok
        return exempt or schedules.freshness_guard(i["policy_old_version"], [i["rollout_version"]], 0)[0]

    return {"allowed": [one(name) for name in i["algorithm"]]}


def e2h(i, p):
    kind = "gaussian" if "sigma" in p else "cosine"
    shape = {k: p[k] for k in ("beta", "sigma") if k in p}
    return {
        "probabilities": [
            schedules.e2h_probabilities(kind, t, p["total_steps"], p["num_levels"], **shape) for t in i["t"]
        ]
    }


def reranked(i, p):
    score = schedules.learning_scores(i["rewards_by_prompt"])
    order, dropped = schedules.rerank(score)
    return {"score": score, "order": order, "dropped": dropped}


def frozen_roles(i, p):
    ok, changed = schedules.changed_roles({k: tuple(v) for k, v in i["roles"].items()}, p["frozen"])
    return {"ok": ok, "changed": changed}


def iterative_grpo(i, p):
    """Order of events: between stages from the recipe's plan, within them from real `rl` stages, each on the policy of
    the one before.
    """
    import tempfile
    from pathlib import Path

    import pytest

    from stages.harness import execute
    from stages.models.modeling import weights_digest
    from stages.rollouts.groups import GroupSampler
    from stages.rollouts.source import Rollouts
    from stages.training import Trainer
    from storage.datasets import write_dataset
    from storage.schema import complete_row
    from tests.evaluation.conftest import tiny_policy
    from tests.flows.test_iterated import planned

    updates, events = p["num_iterations"], []
    rl = {
        "preset": "grpo",
        "beta": 0.04,
        "num_iterations": updates,
        "max_steps": p["steps_per_iteration"] * updates,
        "prompts_per_step": 2,
        "num_generations": 4,
        "max_completion_length": 4,
        "learning_rate": 1e-3,
        "rewards": [{"name": "reward", "kind": "model"}],
    }
    built = Rollouts.__init__

    def building(self, *args, **more):
        built(self, *args, **more)
        if weights_digest(self.reference) == weights_digest(self.policy.model):
            events.append("ref<-policy")

    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:

        def before(owner, name, event):
            method = getattr(owner, name)
            patch.setattr(
                owner, name, lambda self, *args, **more: (events.append(event), method(self, *args, **more))[1]
            )

        steps = planned(
            "iterated_rlhf",
            patch,
            reward_model="(given.reward)",
            rounds=p["iterations"],
            rl=rl,
            refresh="after" if p["rm_refresh"] else "never",
            kl_to="previous" if p["ref_refresh"] else "start",
            gold_memory="replay",
            train_reward_model={"replay_fraction": p["rm_replay_fraction"]},
        )
        trained = [(inputs, config) for stage, inputs, config, _ in steps.values() if stage == "reward_model"]
        assert all(config.replay_fraction == p["rm_replay_fraction"] for _, config in trained)
        assert [sorted(n for n in inputs if n.startswith("replay.")) for inputs, _ in trained] == [
            [f"replay.round_{j}" for j in range(1, k + 1)] for k in range(p["iterations"])
        ]
        patch.setattr(Rollouts, "__init__", building)
        before(Rollouts, "_next_iteration", "old<-policy")
        before(GroupSampler, "fill", "sample")
        before(Trainer, "step", "update")
        made = {"(given.model)": str(Path(scratch, "start"))}
        tiny_policy(made["(given.model)"], 0)
        prompts = [
            complete_row(
                "prompts/1",
                {"prompt": [{"role": "user", "content": f"say {k}"}]},
                dataset="d",
                source="s",
                origin="human",
                split="train",
            )
            for k in range(8)
        ]
        write_dataset(str(Path(scratch, "prompts")), "prompts", "prompts/1", prompts)
        for label, (stage, inputs, config, _) in steps.items():
            if stage == "reward_model":
                events.append("train_rm")
            elif stage == "rl":
                given = {
                    n: {"kind": "model", "path": made[inputs[n]], "ref": n, "digest": n}
                    for n in ("model", "reference")
                    if n in inputs
                }
                given["data"] = {
                    "kind": "dataset",
                    "path": str(Path(scratch, "prompts")),
                    "ref": "data",
                    "digest": "data",
                }
                settings = config.model_dump(mode="json") | {
                    "rewards": [{"name": "length", "kind": "length"}],
                    "reward_override": "random",
                }
                done = execute(
                    {
                        "stage": "rl",
                        "key": label,
                        "config": settings,
                        "seed": 0,
                        "device": "cpu",
                        "inputs": given,
                        "workdir": str(Path(scratch, label)),
                    },
                    lambda event: None,
                )
                made[f"({label}.model)"] = done["outputs"]["model"]["path"]
    return {"events": events}


ADAPTERS = {
    "grpo_iterative_events": iterative_grpo,
    "context_schedule": context_steps,
    "bpo_interval": lambda i, p: {"K": [selection.refresh_intervals(i["T"], f)[0] for f in i["F"]]},
    "grpo_plus_context_schedule": context_schedule,
    "async_freshness_guard": freshness,
    "staleness": stale_samples,
    "freshness_guard": allowed_presets,
    "e2h_cosine": e2h,
    "e2h_gaussian": e2h,
    "prompt_rerank": reranked,
    "hash_frozen_roles": frozen_roles,
    "curriculum_sort": lambda i, p: {
        "order": [i["prompt_id"][k] for k in selection.order_by_difficulty(1 - arr(i["pass_rate"]))[0]]
    },
    "vapo_length_adaptive_lambda": lambda i, p: {"lam_policy": credit.length_adaptive_lambda(i["length"], p["alpha"])},
    "replay_sliding_window": lambda i, p: schedules.replay_plan(
        i["iteration"], i["stored_iterations"], i["batch_size"], p["window"], p["replay_fraction"]
    ),
    "p3o_on_policy_gradient": p3o,
    "p3o_clipped": p3o,
    "copg_pair": copg,
    "mirror_descent_kimi": mirror_descent,
    "oreo_losses": oreo,
    "vapo_positive_lm_loss": positive_lm,
    "nash_md_tabular": nash,
    "nash_regularised_equilibrium": nash,
    "nash_md_pg_gradient": nash,
    "is_pro_players": importance,
    "is_offline_bandit": importance,
    "ref_mixup_refresh": refresh,
    "weight_ema": lambda i, p: {"ema_new": production.averaged(i["ema"], i["theta"], p["decay"])},
    "sppo_win_rates": win_rates,
    "sppo_loss": sppo,
    "sppo_pair_hard_labels": sppo,
    "online_ipo_loss": online_ipo,
    "pass_at_k_curriculum": lambda i, p: {"pass_at_k": [sampling.pass_at_k(*c) for c in i["cases_n_c_k"]]},
    **{f"return_rtg_{n}": returns for n in ("gamma09", "gamma05", "padded")},
    "value_oracle_two_step": value_oracle,
    **{n: td for n in ("td_error", "nstep_return", "td_lambda_return", "nstep_advantage")},
    **{
        f"gae_{n}": gae
        for n in (
            "terminated",
            "lambda1_is_mc",
            "lambda0_is_td",
            "discounted",
            "truncated_bootstrap",
            "discount_099",
            "one_token",
            "kl_shaped",
            "padded_batch",
            "tool_tokens_skipped",
            "wrong_forms_must_differ",
            "wrong_exponent_must_differ",
        )
    },
    "term_modes": termination,
    "pg_exact_bandit": bandit,
    "pg_psi_choices": psi,
    "pg_baseline_variance": baseline_variance,
    "pg_baseline_total_variance": total_variance,
    "baseline_inbatch_mean_bias": inbatch_bias,
    "baseline_moving_average": moving_average,
    "baseline_table": reward_minus,
    "baseline_v_star": v_star_baseline,
    "remax_greedy_baseline": reward_minus,
    **{
        f"reinforce_{n}": reinforce
        for n in ("value_baseline", "reward_weighted_nll", "aggregation_matters", "reward_to_go")
    },
    "process_reward_advantage": process_reward,
    **{
        f"rloo_{n}": lambda i, p: grouped(i, p, "leave_one_out")
        for n in ("binary_half", "binary_one", "real", "equal", "layout_prompt_major")
    },
    "rloo_kl_in_sequence_reward": kl_reward,
    **{f"critic_{n}": critic for n in ("terminal", "lambda_return", "padded", "value_clip", "bandit_prompt")},
    "is_effective_sample_size": ess,
    "effective_sample_size": ess,
    "is_truncated_offline_pg": offline_weights,
    "cpi_surrogate": cpi,
    "trpo_penalty": trpo_penalty,
    "trpo_kl_direction": kl_direction,
    "npg_two_arm": trust_region,
    "trpo_damped_three_arm": trust_region,
    "trpo_backtracking": trust_region,
    "ppo_clip_grid": clip_grid("ppo"),
    "dual_clip_grid": clip_grid("ppo"),
    "ppo_clip_higher_grid": clip_grid("dapo"),
    "grpo_plus_clip_grid": clip_grid("grpo_plus"),
    **{
        f"ppo_{n}": policy("ppo")
        for n in ("clip_batch", "first_minibatch_is_pg", "one_token", "all_masked", "diagnostics")
    },
    "grpo_loss_with_kl": policy("grpo"),
    "dr_grpo_loss": policy("dr_grpo"),
    "grpo_empty_completion": policy("dr_grpo"),
    "dapo_loss": policy("dapo"),
    "overlong_filter_loss": policy("dapo"),
    "gspo_loss": policy("gspo"),
    "gspo_loss_paper_eps": policy("gspo"),
    "grape_alt_loss": grape_alt,
    "cispo_loss": cispo,
    "ppo_sequence_level": ppo_sequence,
    "grpo_objective_ratios": ratio_inputs,
    "ppo_log_ratio_clamp": clamp_cases,
    "one_step_stopgrad_ratio": one_step,
    "ppo_rollout_loop": rollout_loop,
    "ppo_kl_early_stop": early_stop,
    "clip_fraction_two_definitions": clip_fractions,
    "ppo_kl_penalty": klpen("ppo_penalty_adaptive"),
    "ppo_clip_plus_kl": klpen("ppo_clip_kl"),
    "ppo_full_objective": klpen("ppo_clip_kl"),
    "ppo_ptx_total": ptx,
    "ppo_ptx_nll": ptx,
    "grpo_sequence_form_entropy_sign": objective_scalars,
    "ppo_unified_scalar": objective_scalars,
    "kl_ctrl_ppo": controller,
    "kl_ctrl_ziegler": controller,
    "kl_ctrl_ppo_sequence": controller,
    "kl_units": kl_units,
    "ppo_terminal_reward_gae": kl_reward,
    "kl_reward_tokens": kl_reward,
    "kl_reward_modes": kl_reward,
    "kl_reward_two_samples": kl_reward,
    "kl_reward_sequence_ref": kl_reward,
    "kl_in_reward_gradient": kl_in_reward,
    "kl_k3_in_reward_is_biased": kl_in_reward,
    "kl_full_vocabulary": kl_full,
    "kl_full_masked_logits": kl_full,
    "kl_estimators_table": kl_table,
    "kl_sampled_sequence": kl_sequence,
    "kl_estimator_gradients": kl_gradients,
    "kl_k3_clamp": k3_clamp,
    "kl_kd_direction": kl_kd,
    "kl_optimum_with_group_mean": group_mean_optimum,
    "ref_ema": ref_ema,
    "nash_ema_opponent": opponent,
    "entropy_full": entropy,
    "entropy_masked": entropy,
    **{
        n: whiten
        for n in ("adv_whiten_ddof0", "adv_whiten_ddof1", "adv_whiten_constant", "reward_batch_norm", "adv_clip")
    },
    **{
        n: aggregation
        for n in (
            "agg_length_toy",
            "agg_gradient_accumulation",
            "agg_empty_sequence",
            "agg_length_bias_toy",
            "agg_token_mean_scope",
            "tool_mask_denominator",
        )
    },
    "agg_gradients": aggregation_gradients,
    **{
        f"grpo_adv_{n}": grouped
        for n in (
            "half",
            "one_of_four",
            "graded",
            "1234",
            "zero_variance",
            "two_prompts",
            "batch_std",
            "singleton_group",
            "failed_scorer",
        )
    },
    "dr_grpo_adv": lambda i, p: grouped(i, p, "mean"),
    "grpo_std_difficulty_effect": std_difficulty,
    "dapo_group_advantage": dapo_groups,
    "grpo_process_advantage": process,
    "grpo_process_tail_tokens": process,
    "reinforce_pp_advantage": reinforce_pp,
    "dapo_soft_overlong": overlong,
    "dapo_total_reward": dapo_reward,
    "overlong_filter_group_stats": overlong_stats,
    "dapo_filter_on_correctness": filter_correctness,
    "dapo_dynamic_sampling": dynamic,
    "dapo_dynamic_sampling_exhausted": dynamic,
    "grpo_plus_adv": plus_advantage,
    "topr_weights": topr,
    "topr_baseline_shift": topr,
    "tis_token_weights": tis,
    "tis_sequence_modes": tis,
    "tis_ppo_loss": tis,
    "astar_po": astar,
    "astar_po_extremes": astar,
    "mask_composition": mask_composition,
    "agent_turn_returns": agent,
}
