"""Vectors of reward models at work: judges, label words, process rewards, combinations -> stages/reward/judge.py,
reward_scorers.py, reward_data.py.
"""

from __future__ import annotations

import numpy as np

from stages import ai_labels, estimators, selection
from stages.label_steps import estimates
from stages.reward import judge, judging
from stages.reward_models.reward_eval import length_residual
from stages.reward_models.reward_scorers import aggregate_steps, label_probability, positive, safety_gate
from tests.vector_adapters.data import packaged


def prob_good(i, p):
    if "logits" in i:
        good, bad = i["logits"]["Good"], i["logits"]["Bad"]
        total = float(np.logaddexp.reduce(list(i["logits"].values())))
    else:
        good, bad, total = i["logit_Good"], i["logit_Bad"], i["logsumexp_all"]
    rows = [[good - total, bad - total]]
    full, two = label_probability(rows, False)[0], label_probability(rows, True)[0]
    return {"p_good_full_vocab": full, "p_good_normalised": two, "p_good_two_way": two}


def packaging(i, p):
    ids, labels = packaged(i["prompt_ids"], i["steps"], i["separator_ids"], i["labels"], p["ignore_index"])
    return {"input_ids": ids, "labels": labels}


def aggregation(i, p):
    classes = [[1 - a - b, b, a] for a, b in zip(i["p_positive"], i["p_neutral"])]
    with_neutral = positive(classes)
    return {
        "prod_positive_only": aggregate_steps(positive(classes, "negative"), "prod"),
        "prod_neutral_as_positive": aggregate_steps(with_neutral, "prod"),
        **{how: aggregate_steps(with_neutral, how) for how in ("min", "mean", "last")},
    }


def rollouts(i, p):
    soft, hard = estimates(i["rollout_correct"])
    return {"soft": soft, "hard": hard}


def verdicts(i, p):
    found = [judge.parse_verdict(t) for t in i.get("outputs", i.get("judgements"))]
    return {"verdict": found, "verdicts": ["error" if v is None else v for v in found]}


def two_orders(i, p):
    scores = [judge.two_orders(a, b) for a, b in zip(i["order1"], i["order2_swapped"])]
    return {
        "score_y0": scores,
        "winner": [None if s is None else "y0" if s > 0.5 else "y1" if s < 0.5 else "tie" for s in scores],
    }


def expected_score(i, p):
    with np.errstate(divide="ignore"):
        logps = i["logits_for_1_to_10"] if "logits_for_1_to_10" in i else np.log(i["score_token_probs"])
    expected, rescaled = judge.expected_score(logps)
    return {"expected": expected, "rescaled_minus1_1": rescaled, "reward": rescaled}


def ratings(i, p):
    low, high = p["range"]
    found = [judge.parse_rating(t, low, high) for t in i["judgements"]]
    return {"ratings": found, "normalised": [None if r is None else (r - low) / (high - low) for r in found]}


def two_token(i, p):
    p_a = judge.soft_label(i["logprob_A"], i["logprob_B"])
    return {"p_A": p_a, "p_B": 1 - p_a}


def ai_label_orders(i, p):
    first = i.get("p_first_order_AB", i.get("p_A_order1"))
    second = i.get("p_first_order_BA", 1 - i["p_A_order2"] if "p_A_order2" in i else None)
    found = judging.Opinion(judging.both_orders(first, second), shown_first=(first, second))
    item = ai_labels.item_of(
        {
            "row_id": "r",
            "prompt": [],
            "prompt_id": "p",
            "group_id": "p",
            "split": "train",
            "weight": 1.0,
            "source": "s",
            "row_ids": [],
            "origin": "human",
            "ann": None,
            "answers": [[{"role": "assistant", "content": c}] for c in "ab"],
            "gens": [None, None],
            "votes": [],
        }
    )
    row, _ = ai_labels.label(item, found, ai_labels.Config(labels="hard", **p), "judge")
    return {"p_A": found.p_a, "position_bias": judging.position_bias([found]), "kept_hard": row is not None}


def gate(i, p):
    helpful, safety = i.get("r_helpful_prob", i.get("helpfulness")), i.get("r_safety_prob", i.get("safety"))
    combined = safety_gate(helpful, safety, i["is_safety_prompt"], p.get("safety_threshold", p.get("threshold")))
    logit = np.log(combined / (1 - combined))
    # the vector has no eps
    return {"combined": combined, "logit": logit, "whitened": estimators.whiten(logit, ddof=p["ddof"], eps=0.0)}


def debias(i, p):
    scores, slope = length_residual(i["reward"], i["length"])
    return {"slope": slope, "debiased": scores, "corr_after": round(float(np.corrcoef(scores, i["length"])[0, 1]), 12)}


ADAPTERS = {
    "rm.t2t_point/prob_good": prob_good,
    "t2t_pointwise_score": prob_good,
    "rm.prm/packaging": packaging,
    "rm.prm/aggregation": aggregation,
    "rm.prm_rollout/estimates": rollouts,
    "rm.judge/parse": verdicts,
    "judge_parse_verdict": verdicts,
    "rm.judge/two_orders": two_orders,
    "rm.judge/expected_score": expected_score,
    "direct_score_expected": expected_score,
    "direct_score_renormalise": expected_score,
    "judge_parse_rating": ratings,
    "ai_label_two_token": two_token,
    "ai_label_swap_average": ai_label_orders,
    "ai_label_hard_threshold": ai_label_orders,
    "ai_label_clamp_cot": lambda i, p: {
        "p_A": [judge.soft_label(np.log(x), np.log1p(-x), tuple(p["clamp"])) for x in i["p_A"]]
    },
    "rm.multi/safety_gate": gate,
    "llama2_combine": gate,
    "length_debias_linear": debias,
    "multi_objective_rm": lambda i, p: {
        "reward": selection.weighted_score([i["scores"][k] for k in p["weights"]], list(p["weights"].values()))
    },
    "rm.active/convincing_wrong": lambda i, p: {
        "selected": selection.convincing_wrong(i["prm_score"], i["final_correct"], p["k"])
    },
}
