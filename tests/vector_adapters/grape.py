"""Rubric vectors (reward.rubric) against stages/reward/grape.py."""

from __future__ import annotations

import numpy as np

from stages.estimators import group_advantage
from stages.reward import grape


def advantages(values, questions):
    return group_advantage([np.nan if v is None else v for v in values], questions, "mean")[0].tolist()


def flagged(confidence, threshold):
    """(category, item) that the review flags, each item scored once with its mean confidence."""
    rows = [
        dict(category=c, item_id=k, item_version="", sample=0, question=0, score=0.0, confidence=phi, omega=1.0)
        for c, items in confidence.items()
        for k, phi in items.items()
    ]
    return [(r["category"], r["item_id"]) for r in grape.review(rows, threshold) if r["flagged"]]


def scored(i, p):
    """GRAPE-REWARD and -SCORE: confidences, rewards and advantages of one iteration, in every variant a vector asks
    for.
    """
    categories = i.get("category") or ["c"] * len(i["score"])
    questions = i.get("question") or list(range(len(i["score"])))
    weights, policy = p["weights"], p.get("invalid_policy", "drop_sample")

    def made(normalizer=p.get("normalizer", "paper"), policy=policy):
        return grape.rewards(i["score"], i["confidence"], categories, weights, normalizer, policy)

    reward, phibar, zero = made()
    dropped = made(policy="drop_item")[0]
    return {
        "category_confidence": phibar,
        "reward": reward,
        "advantages": advantages(reward, questions),
        "flag": "zero_confidence" if zero else None,
        "normalizer_weighted": made("weighted")[0],
        "plain_weighted_sum": made("plain")[0],
        "loss_mask_sample": [int(v is not None) for v in reward],
        "reward_drop_item": dropped,
        "advantages_drop_item": advantages(dropped, questions),
    }


def one_rubric(i, p):
    """reward.rubric: the same with one weight vector for all."""
    omega = {"c": p["omega"]}
    categories = ["c"] * len(i["tau"])
    reward, phibar, _ = grape.rewards(i["tau"], i["phi"], categories, omega)
    return {
        "phi_bar": phibar["c"],
        "reward": reward,
        "advantage": advantages(reward, i.get("question") or [0] * len(reward)),
        "bounded_option": grape.rewards(i["tau"], i["phi"], categories, omega, "weighted")[0],
        "plain_weighted": grape.rewards(i["tau"], i["phi"], categories, omega, "plain")[0],
    }


def variance(sigma2, omega, confident=True):
    """Variance of the reward of independent scores, confidence proportional to 1/variance."""
    sigma2 = np.asarray(sigma2, float)
    factor = grape.coefficients(omega, 1 / sigma2)[0] if confident else np.asarray(omega, float)
    return float(factor**2 @ sigma2)


def lemma(i, p):
    return {
        "rows": [
            {
                "variance": s,
                "plain": variance(s, [1 / len(s)] * len(s), False),
                "confidence_weighted": variance(s, [1 / len(s)] * len(s)),
            }
            for s in ([1, 4], [1, 4, 9], [2, 2, 2])
        ]
    }


def lemma_fails(i, p):
    return {
        "rows": [
            {"weights": w, "var_plain": variance(i["variance"], w, False), "var_grape": variance(i["variance"], w)}
            for w in ([0.9, 0.1], [0.7, 0.3], [0.5, 0.5], [0.3, 0.7], [0.1, 0.9])
        ]
    }


def atomised(i, p):
    subs, rest = grape.atomise_weights(i["parent_weight"], i["num_sub_items"], i["keep_residual"])
    return {"sub_weights": subs, "residual_weight": rest, "total": sum(subs) + rest}


def shares(i, p):
    found = [
        grape.num_improve(p["num_generations"], p["improve_share"], k, has)
        for k, has in zip(i["iteration"], i["has_prior"])
    ]
    return {"num_improve": found, "num_fresh": [p["num_generations"] - n for n in found]}


def mix(i, p):
    found = [grape.num_improve(i["G"], p["improve_share"], k, True) for k in i["iteration"]]
    return {"n_improve": found, "n_fresh": [i["G"] - n for n in found]}


def routed(i, p):
    found = [
        grape.route(
            s["rule"] if s["rule_valid"] else None,
            s["learned"],
            s["learned_confidence"],
            s["judge"],
            p["confidence_threshold"],
        )
        for s in i["samples"]
    ]
    return {"reward": [v for v, _ in found], "tier": [t for _, t in found]}


def parsed(i, p):
    found = [grape.parse_item(text)[0] for text in i["outputs"]]
    return {"parsed": [f and {k: f[k] for k in ("score", "confidence")} for f in found]}


def low(i, p):
    phibar = grape.category_confidence(i["phi"], ["c"] * len(i["phi"]))["c"]
    flags = flagged({"c": dict(enumerate(phibar))}, p["flag_below"])
    return {"phi_bar": phibar, "flagged": [("c", k) in flags for k in range(len(phibar))]}


ADAPTERS = {
    **{
        name: scored
        for name in (
            "grape_reward_end_to_end",
            "grape_two_categories",
            "grape_all_zero_confidence",
            "grape_invalid_item",
            "grape_special_case_grpo",
        )
    },
    "grape_reward": one_rubric,
    "grape_zero_confidence": one_rubric,
    "grape_special_case": one_rubric,
    "grape_reward_bound": lambda i, p: {
        "max_reward": [
            grape.rewards([[1.0] * len(w)], [i["category_confidence"]], ["c"], {"c": w})[0][0] for w in i["weights"]
        ]
    },
    "grape_unbounded": lambda i, p: {
        f"omega_{a}_{b}": grape.rewards([i["tau"]], [i["phi_bar"]], ["c"], {"c": [a, b]})[0][0]
        for a, b in ((0.9, 0.1), (0.1, 0.9))
    },
    "grape_lemma_variance": lemma,
    "grape_lemma_fails_unequal_weights": lemma_fails,
    "grape_variance": lambda i, p: {
        "var_confidence_weighted": [variance(i["sigma2"], w) for w in i["omegas"]],
        "var_plain": [variance(i["sigma2"], w, False) for w in i["omegas"]],
    },
    "grape_poor_item_flag": lambda i, p: {
        "flagged": [list(f) for f in flagged(i["category_confidence"], p["confidence_flag_threshold"])]
    },
    "grape_atomize_weights": atomised,
    "grape_generation_share": shares,
    "grape_generation_mix": mix,
    "reward_router": routed,
    "rubric_parse": parsed,
    "rubric_low_confidence_flag": low,
}
