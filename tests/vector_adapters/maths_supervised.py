"""Vectors of sft.*, kd.*, rm.*, rs.* -> stages/chat.py, losses.py, divergence.py, selection.py, estimators.py,
statistics.py, direct_losses.py.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import permutations
from types import SimpleNamespace

import numpy as np
import torch

from stages import estimators, in_context, losses, merge, rejection, selection
from stages.candidates import selecting
from stages.batching import collate, filled, make_item
from stages.chat import RenderError
from stages.direct import direct_losses as direct
from stages.ingestion import curation, pairing
from stages.measures import overopt, preference, statistics
from stages.models import adapters, lean
from stages.models.divergence import topk_divergence
from stages.models.modeling import Head, token_logps
from stages.reward.judge import soft_label
from stages.reward.judging import both_orders
from stages.reward_model import Config as RewardConfig
from stages.reward_models import preference_module, reward_data, reward_losses
from stages.reward_models.reward_heads import RewardCard, own_positions
from stages.reward_models.reward_scorers import ComparingScorer, OutcomeScorer, Response, ScalarScorer, drawn_by_text
from stages.select_checkpoint import choose
from stages.settings import OptimizerConfig
from stages.training import Sums, Trainer
from tests import production
from tests.production import distillation, logps_at, step_mean

MODES = losses.LOSS_AGG_MODES


def T(x, grad: bool = False):
    """float64 tensor (optionally a leaf with gradients)."""
    return torch.tensor(x, dtype=torch.float64, requires_grad=grad)


def grads(value, *leaves):
    value.backward()
    return [leaf.grad for leaf in leaves]


def ragged(rows):
    """(values [B, T] padded with NaN, mask)."""
    width = max(len(r) for r in rows)
    return (
        T([list(r) + [math.nan] * (width - len(r)) for r in rows]),
        torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in rows]),
    )


def all_modes(loss, mask, constant=None, mode=None):
    """Every aggregation, and `loss` for the mode a vector asks for."""
    out = {m: step_mean(loss, mask, m) for m in MODES[:3]}
    if constant:
        out[MODES[3]] = step_mean(loss, mask, MODES[3], constant)
    return {**out, "loss": out[mode]} if mode in out else out


# --- sft ---------------------------------------------------------------------------------------------


def nll_uniform(i, p):
    # one hidden unit: as many as words would take gigabytes
    n, head = i["num_tokens"], Head(torch.zeros(i["vocab_size"], 1, dtype=torch.float64), None)
    logp = token_logps(head, torch.ones(n, 1, dtype=torch.float64), torch.zeros(n, dtype=torch.long))[0][None]
    return {
        "loss": step_mean(losses.token_nll(logp), torch.ones_like(logp), p["loss_agg_mode"]),
        "log_prob_per_token": logp[0, 0],
    }


def nll_logps(i, p):
    return all_modes(
        losses.token_nll(T(i["token_logps"])),
        torch.tensor(i["loss_mask"]),
        p.get("norm_constant"),
        p.get("loss_agg_mode"),
    )


def nll_losses(i, p):
    if "loss_mask" in i:
        loss, mask = T(i["token_losses"]), torch.tensor(i["loss_mask"])
    else:
        loss, mask = ragged(i["token_losses"])
    counts = losses.count_targets(mask)
    out = all_modes(loss, mask, p.get("norm_constant"), p.get("loss_agg_mode"))
    return {**out, "num_valid_sequences": counts["sequences"]}


def nll_prompt_mask(i, p):
    logp = T(i["token_probs"]).log().unsqueeze(0)
    out = {}
    for name, key in (("all", "loss_mask_all"), ("masked", "loss_mask_first_is_prompt")):
        mask = torch.tensor([i[key]])
        out["sum_" + name] = step_mean(-logp, mask, "seq-mean-token-sum")
        out["mean_" + name] = step_mean(-logp, mask, "token-mean")
    return out


def nll_logits(i, p):
    logits, mask = T(i["logits"], True), torch.tensor(i["loss_mask"])
    nll = losses.token_nll(logps_at(logits, torch.tensor(i["targets"])))
    loss = step_mean(nll, mask, p.get("loss_agg_mode", "token-mean"), p.get("norm_constant"))
    (g,) = grads(loss, logits)
    return {"loss": loss, "token_losses": losses.masked(nll, mask), "grad_logits": g}


def shift(i, p):
    n = i["input_length"] - i["prompt_length"]
    batch = collate([make_item("row", [0] * i["prompt_length"], [[0] * n], [[1] * n])])
    return {"target_positions": own_positions(batch), "logit_positions": batch.src_N}


def role_masks(i, p):
    names = {
        "final_message": "final_message",
        "final_turn": "final_turn",
        "all_assistant_turns": "all_assistant",
        "all_assistant": "all_assistant",
        "full_sequence_no_bos": "full",
        "full": "full",
        "completion": "completion",
    }
    return {
        key: production.rendered_mask(i["roles_per_token"], i["turn_index"], policy) for key, policy in names.items()
    }


def chatml(bos=""):
    return production.renderer(production.CHATML, bos, "<|im_end|>", "<|im_start|>")


def template(i, p):
    renderer = chatml(i.get("bos_token", ""))
    ids = (
        renderer.prompt_ids(i["messages"])
        if p.get("add_generation_prompt")
        else renderer.conversation(i["messages"]).ids
    )
    return {"text": renderer.decode(ids, skip_special_tokens=False)}


def template_errors(i, p):
    renderer = chatml()

    def valid(roles):
        try:
            renderer.conversation([{"role": role, "content": "x"} for role in roles])
        except RenderError:
            return False
        return True

    return {"valid": [valid(roles) for roles in i["role_sequences"]]}


def pack(i, p):
    lengths = i["lengths"]
    bins = selection.pack_best_fit(lengths, p["capacity"])
    groups = [[make_item(str(r), [], [[0] * lengths[r]], [[0] * lengths[r]]) for r in b] for b in bins]
    rows = [collate(group) for group in groups]
    return {
        "bins": bins,
        "position_ids": [row.positions_U for row in rows],
        "cu_seqlens": [[0, *np.cumsum([lengths[r] for r in b]).tolist()] for b in bins],
        "fill": filled(groups, p["capacity"]),
    }


def unlikelihood(i, p):
    loss = direct.unlikelihood_loss(T(i["p_negative"]).log())[None]
    return {"loss": step_mean(loss, torch.ones_like(loss), "seq-mean-token-sum")}


# --- distillation --------------------------------------------------------------------------------------


def kd_probs(i, p):
    teacher = T(i.get("teacher_probs", i.get("teacher", i.get("teacher_with_context"))))
    student = T(i.get("student_probs", i.get("student", i.get("student_without_context"))))
    s = student.log().requires_grad_()
    kl = production.distilled(s[None], teacher.log()[None], {}).divided({"tokens": 1.0})
    entropy = production.entropy(teacher.log())
    (g,) = grads(kl, s)
    out = {
        "kl": kl,
        "kl_teacher_student": kl,
        "cross_entropy": kl + entropy,
        "teacher_entropy": entropy,
        "reverse_kl": distillation(student.log(), teacher.log(), direction="reverse"),
        "grad_wrt_student_logits": g,
    }
    if "betas" in p:
        out = {
            "jsd": [distillation(student.log(), teacher.log(), direction="jsd", jsd_beta=b) for b in p["betas"]],
            "beta0_forward_kl": distillation(student.log(), teacher.log(), direction="jsd", jsd_beta=0.0),
            "beta1_reverse_kl": distillation(student.log(), teacher.log(), direction="jsd", jsd_beta=1.0),
        }
    if "top_k" in p:
        top = torch.topk(teacher, p["top_k"]).indices
        kept = teacher[top] / teacher[top].sum()
        logp, logq = teacher[top].log()[None], student[top].log()[None]
        rest_p, rest_q = (torch.log1p(-x[top].sum())[None] for x in (teacher, student))
        # the student over its own top k as well
        both = topk_divergence(logq.log_softmax(-1), rest_q, logp, rest_p, tail="renormalise")
        out = {
            "full_kl": kl,
            "bucket_kl": topk_divergence(logq, rest_q, logp, rest_p)[0],
            "renormalised_kl": both[0],
            "teacher_topk": kept,
            # the student over its whole vocabulary
            "cross_entropy": (
                topk_divergence(logq, rest_q, logp, rest_p, tail="renormalise")[0] + production.entropy(kept.log())
            ),
        }
    return out


def kd_logits(i, p):
    t, w = p.get("temperature", 1.0), p.get("soft_weight", 1.0)
    student, teacher = T(i["student_logits"], True), T(i["teacher_logits"])
    config = {"distillation_temperature": t, "soft_weight": w}
    if "loss_mask" in i:
        kl, mask = distillation(student.detach(), teacher, t), torch.tensor(i["loss_mask"])
        on = mask.bool()
        sums = production.distilled(student[on], teacher[on], config)
        return {"per_token_kl": losses.masked(kl, mask), "loss": sums.divided({"tokens": float(on.sum())})}
    sums = production.distilled(student[None], teacher[None], config, [i.get("hard_label", 0)])
    loss = sums.divided({"tokens": 1.0})
    (g,) = grads(loss, student)
    out = {"loss": loss, "kl_without_T2": sums.metrics["kl"][0], "grad_student_logits": g}
    if w < 1:
        out |= {"soft": sums.loss["divergence"][0] / w, "hard": sums.loss["nll"][0] / (1 - w)}
    return out


# --- reward models ---------------------------------------------------------------------------------------


def rm_linear(i, p):
    h, mask = T(i["h"]).reshape(1, 1, -1), torch.ones(1, 1)
    return {"reward": production.response_scores(h, mask, T(i["w"]), i.get("b", 0.0))[0][0]}


def rm_head(i, p):
    hidden, mask, w = T(i["hidden"]), torch.tensor(i["attention_mask"]), T(i["w"])
    scores, last = production.response_scores(hidden, mask, w, i.get("b", 0.0))
    return {
        "last_index": last,
        "reward_last": scores,
        "reward_mean_pool": production.response_scores(hidden, mask, w, i.get("b", 0.0), "mean")[0],
    }


def rm_bt(i, p):
    w, l = T(i["r_chosen"], True), T(i["r_rejected"], True)
    bt = losses.bradley_terry_loss(w, l)
    loss = losses.bradley_terry_loss(
        w,
        l,
        center_rewards_coefficient=p.get("center_rewards_coefficient", 0.0),
        label_smoothing=p.get("label_smoothing", 0.0),
    )
    gw, gl = grads(loss.sum(), w, l)
    centred = {k: v for k, v in p.items() if k == "center_rewards_coefficient"}

    def mean(**settings):
        items = [
            make_item(str(k), [0], [[0], [0]], [[1], [1]], weight=1.0, ended=[True, True]) for k in range(w.numel())
        ]
        scores = torch.stack([w.detach(), l.detach()], -1).reshape(-1, 1)
        sums = reward_losses.bradley_terry(scores, collate(items), RewardConfig(objective="bt", **settings))
        return sums.divided({"weight": float(len(items))})

    return {
        "prob": torch.exp(-bt),
        "loss": mean(**centred) if centred else loss,
        "mean": loss.mean(),
        "bt": mean(),
        "grad_r_chosen": gw,
        "grad_r_rejected": gl,
    }


def rm_margin(i, p):
    """Each margin's loss, as the mean over one pair."""
    d = i["reward_diff"] if "reward_diff" in i else i["r_chosen"]
    margins = np.atleast_1d(i.get("margins", i.get("margin"))).tolist()
    gaps = np.broadcast_to(d, len(margins)).tolist()
    config = RewardConfig(objective="bt", use_margin=True)

    def loss(gap, margin):
        scores = T([[gap], [0.0]]) + i.get("r_rejected", 0.0)
        item = make_item("pair", [0], [[0], [0]], [[1], [1]], weight=1.0, margin=margin, ended=[True, True])
        return reward_losses.bradley_terry(scores, collate([item]), config).loss["ranking"][0]

    return {"loss": [loss(gap - i.get("r_rejected", 0.0), margin) for gap, margin in zip(gaps, margins)]}


def likert_map(i, p):
    eight = [pairing.likert(v, 8) for v in i.get("likert8", [])]
    five = [pairing.likert(v, 5) for v in i.get("likert5", [])]
    return {
        "preferred8": [w for w, _, _ in eight],
        "level8": [n for _, n, _ in eight],
        "margin8_small": [pairing.margin("llama2_small", strength=n) for _, n, _ in eight],
        "margin8_large": [pairing.margin("llama2_large", strength=n) for _, n, _ in eight],
        "preferred5": [w for w, _, _ in five],
        "level5": [n for _, n, _ in five],
    }


def pair_list(ranks):
    n = len(ranks)
    return [(a, b) for a in range(n) for b in range(n) if ranks[a] < ranks[b]]


def kwise(i, p):
    """One prompt (scores in rank order, or with ranks) or several named prompt_*_scores."""
    prompts = [v for k, v in sorted(i.items()) if k.startswith("prompt_")]
    if prompts:
        return {
            "per_prompt": production.ranked(prompts, lambda of: 1 / len(of)),
            "per_pair_pooled": production.ranked(prompts, lambda of: 1.0),
        }
    s = T(i.get("scores_best_to_worst", i.get("scores")), True)
    n, pairs = len(s), pair_list(i.get("ranks", range(len(s))))
    more = {"pairs": pairs, "pair_weight": 1 / len(pairs), "weight": 1.0, "ended": [True] * n}
    item = make_item("prompt", [0], [[0]] * n, [[1]] * n, **more)
    sums = reward_losses.kwise_pairs(s[:, None], collate([item]), RewardConfig(objective="kwise_pairs"))
    loss = sums.divided({"weight": 1.0})
    (g,) = grads(loss, s)
    return {
        "pairs": pairs,
        "pair_losses": losses.kwise_pairs_loss(s, pairs),
        "loss": loss,
        "grad_scores": g,
        "accuracy": production.logged(sums, {"weight": 1.0, "pairs": len(pairs), "responses": n})["accuracy"],
    }


def plackett_luce(i, p):
    s = T(i["scores"], True)
    K = len(s)
    nll = losses.plackett_luce_loss(s)
    (g,) = grads(nll, s)
    prob = {
        ",".join(map(str, o)): torch.exp(-losses.plackett_luce_loss(s.detach()[list(o)]))
        for o in permutations(range(K))
    }
    name = "_".join(map(str, range(K)))
    return {
        "nll": nll,
        f"nll_order_{name}": nll,
        f"grad_scores_order_{name}": g,
        "prob_by_order": prob,
        "sum_of_probs": sum(prob.values()),
    }


def rm_soft(i, p):
    a, b = T(i.get("r_A", i.get("reward_A")), True), T(i.get("r_B", i.get("reward_B")), True)
    loss = losses.bradley_terry_loss(a, b, label_prob=i["p_A"])
    ga, _ = grads(loss, a, b)
    return {"loss": loss, "grad_r_A": ga, "grad_wrt_diff": ga}


def position_debias(i, p):
    first = soft_label(i["logp_first_token_A_when_y0_first"], i["logp_token_B_when_y0_first"])
    swapped = soft_label(i["logp_token_A_when_y1_first"], i["logp_token_B_when_y1_first"])
    return {"p_y0_order1": first, "p_y0_order2": 1 - swapped, "p_y0": both_orders(first, swapped)}


def rm_pairwise(i, p):
    """Each pair by itself, as sure of either order."""

    def loss(probability, label):
        logit = torch.logit(T(probability))
        item = make_item("pair", [0], [[0], [0]], [[1], [1]], weight=1.0, label_prob=float(label))
        sums = reward_losses.pairwise(
            torch.stack([logit, -logit])[:, None], collate([item]), RewardConfig(objective="pairwise")
        )
        return sums.loss["bce"][0]

    return {"loss": [loss(*pair) for pair in zip(i["p_i"], i["hp"])]}


def rm_orm(i, p):
    """Completions of one token, each by itself."""

    def loss(probability, label):
        item = make_item("one", [0], [[0]], [[1]], target=float(label), weight=1.0, ended=[True])
        return reward_losses.outcome(torch.logit(T([[probability]])), collate([item]), None).loss["bce"][0]

    return {"loss": [loss(*one) for one in zip(i["p"], i["label"])]}


def rm_orm_gain_bias(i, p):
    z = p["gain"] * T(i["special_token_logits"]) + p["bias"]
    mask = torch.tensor(i["completion_mask"])
    batch = collate(
        [
            make_item(str(k), [0], [[0] * mask.shape[1]], [row.tolist()], target=label, weight=1.0, ended=[True])
            for k, (row, label) in enumerate(zip(mask, i["labels"]))
        ]
    )
    flat = z[mask.bool()]
    total, by = reward_losses.outcome(flat[:, None], batch, None).loss["bce"]
    mean = Sums(
        {
            "bce": (total, by),
            "language_model": (torch.tensor(p.get("lm_loss_weight", 0.0) * p.get("lm_loss", 0.0)), "rows"),
        }
    )
    alone = Sums({"bce": (total, by)}).divided({"tokens": len(flat)})
    scorer = type("Known", (OutcomeScorer,), {"load": lambda self: None})("", RewardCard("orm"))
    return {
        "token_mean_bce": alone,
        "joint_loss": mean.divided({"tokens": len(flat), "rows": 1.0}),
        "score_last_token": [scorer._one(z[k][m.bool()][:, None].numpy()) for k, m in enumerate(mask)],
    }


def rm_pmp(i, p):
    scores, labels = T(np.atleast_1d(i["score"]).tolist()), np.atleast_1d(i["label"])
    items = [
        make_item(str(k), [0], [[0]], [[1]], target=float(label), weight=1.0, ended=[True])
        for k, label in enumerate(labels)
    ]
    sums = reward_losses.pointwise_bce(scores[:, None], collate(items), None)
    return {"loss": Sums({"bce": sums.loss["bce"]}).divided({"weight": float(len(items))})}


def rm_pmp_control(i, p):
    """The scores by their names in the order in which the item of a pair holds its responses."""

    class Reader:
        """Text is its characters."""

        room = 100

        def parts(self, prompt, completions, ends):
            return [], [(self.plain(c), [1] * len(c)) for c in completions]

        def plain(self, text):
            return list(map(ord, text))

        def wrap(self, prompt, response, mask):
            return prompt, response, mask, len(prompt)

        def ended(self, ids):
            return True

    row = {"row_id": "r", "prompt": [], "chosen": "A", "rejected": "B"}
    items = reward_data.control_items(row, Reader(), RewardConfig(objective="control_tokens"), Counter())
    names = ["r_" + "".join(map(chr, r)).replace(":", "_") for item in items for r in item.responses]
    sums = reward_losses.control_tokens(T([i[name] for name in names])[:, None], collate(items), None)
    return {"loss": Sums({"ranking": sums.loss["ranking"]}).divided({"weight": items[0].extra["counts"]["weight"]})}


def rm_bias_anchor(i, p):
    bias = estimators.calibration_bias(i["anchor_scores"])

    class Known(ScalarScorer):
        """A model whose outputs are known."""

        def load(self):
            pass

        def _over_items(self, responses, read):
            return [float(response.text) for response in responses]

    scorer = Known("", RewardCard("bt", bias=bias))
    calibrated, anchors = (scorer.score([answer(repr(x)) for x in i[name]]) for name in ("scores", "anchor_scores"))
    return {"bias": bias, "calibrated": calibrated, "anchor_mean_after": float(np.mean(anchors))}


def rm_whiten(i, p):
    eps = p.get("eps", 1e-8)
    scores = i.get("scores", i.get("rewards"))
    white = estimators.whiten(scores, ddof=p.get("ddof", 0), eps=eps)
    return {
        "ddof0": estimators.whiten(scores, ddof=0, eps=eps),
        "ddof1": estimators.whiten(scores, ddof=1, eps=eps),
        "minmax_01": estimators.minmax(scores),
        "whitened": white,
        "normalised": white,
    }


def rm_accuracy(i, p):
    a = statistics.pairwise_accuracy(i.get("r_chosen", i.get("chosen")), i.get("r_rejected", i.get("rejected")))
    return {
        "accuracy_strict": a["strict"],
        "accuracy": a["strict"],
        "accuracy_half_ties": a["half_credit"],
        "accuracy_ties_half": a["half_credit"],
        "tie_rate": a["ties"],
        "log_loss": a["log_loss"],
        "mean_margin": a["mean_margin"],
    }


def rm_ece(i, p):
    low, high = p.get("range", (0.5, 1.0))
    c, y = i["confidence"], i["correct"]
    return {
        "ece": statistics.calibration_error(c, y, p.get("bins", 10), low, high),
        "brier": statistics.brier(c, y),
        "nll": log_loss(c, y),
    }


def log_loss(confidence, correct):
    """Through the margins that are as sure as the scorer was and went as its verdicts did."""
    confidence = np.asarray(confidence, float)
    logit = np.log(confidence) - np.log1p(-confidence)
    return statistics.pairwise_accuracy(np.where(np.asarray(correct) > 0, logit, -logit), np.zeros_like(logit))[
        "log_loss"
    ]


def rm_length(i, p):
    return {"pearson": statistics.pearson(i.get("reward", i.get("score")), i["length"])}


def bon_estimator(i, p):
    n = p["n"]
    return {
        "gold_of_best_of_n": [selection.best_of_n_estimate(i["proxy"], k, i["gold"]) for k in n],
        "gold_of_proxy_best": [selection.best_of_n_estimate(i["proxy"], k, i["gold"]) for k in n],
        "proxy_best": [selection.best_of_n_estimate(i["proxy"], k) for k in n],
    }


def gao_peak(i, p):
    a, b = p["alpha"], p["beta"]
    return {
        "bon": overopt.curve(i["d"], a, b, "bon"),
        "rl": overopt.curve(i["d"], a, b, "rl"),
        "bon_peak_d": overopt.peak(a, b, "bon")[0],
        "rl_peak_d": overopt.peak(a, b, "rl")[0],
    }


def divergence(i, p):
    found = overopt.divergence(i["train_rm"], i["test_rm"], min_drop=p["min_drop"], patience=p.get("patience", 0))
    step = i.get("step", list(range(len(i["test_rm"]))))
    flag = found["detected_index"]
    return {
        "peak_step": step[found["peak_index"]],
        "diverged": flag is not None,
        "first_flag_step": None if flag is None else step[flag],
    }


def bt_fit(i, p):
    fit = preference.bradley_terry(i["wins"], l2=0.0)
    s = np.asarray(fit.scores)
    return {"s": s, "s_diff": s[0] - s[1], "elo_diff": 400 / math.log(10) * (s[0] - s[1])}


def implicit(i, p):
    score = losses.implicit_rewards(T(i["logp_policy"]), T(i["logp_ref"]), p["beta"])
    return {"score": score, "difference": score[0] - score[1]}


# --- rejection sampling -----------------------------------------------------------------------------------


def best_of(rewards):
    """Best completion of each prompt, None without a valid score."""
    return [(best or [None])[0] for best in selection.top_k_per_prompt(rewards, 1)]


def right_ones(correct, texts=None, limit=None, dedupe=True):
    """What the rejection stage keeps of right and wrong answers to each prompt under select=all_correct: flat indices,
    prompt by prompt.
    """
    right = np.asarray(correct, dtype=float) > 0
    matrix = np.ones(right.shape)
    if texts is not None and dedupe:
        selecting.drop_duplicates(
            matrix,
            {(k, j): {"completion": [{"content": text}]} for k, row in enumerate(texts) for j, text in enumerate(row)},
        )
    return selecting.select(
        matrix, right, rejection.Config(select="all_correct", max_per_prompt=limit, dedupe=dedupe), None
    )


def rs_matrix(i, p):
    """Every quantity a score-matrix vector can ask for; keys with numbers are computed on request."""
    R = np.asarray(i["rewards"], dtype=float)
    N = R.shape[1]
    flat = R.ravel()
    top = best_of(R)
    out = {
        "top_per_prompt": top,
        "top_per_prompt_rewards": [None if j is None else R[m, j] for m, j in enumerate(top)],
        "skipped_prompts": [m for m, j in enumerate(top) if j is None],
        "local": top,
        "prompts_covered_by_k": {},
    }
    for k in range(1, R.size + 1):
        best = selection.top_k_overall(R, k)
        out[f"top_{k}_overall"] = best
        out[f"top_{k}_overall_rewards"] = [flat[b] for b in best]
        out[f"top_{k}_overall_prompt_completion"] = [[b // N, b % N] for b in best]
        out[f"top_{k}_per_prompt"] = selection.top_k_per_prompt(R, k)
        out["prompts_covered_by_k"][str(k)] = sorted({b // N for b in best})
    if "thresholds" in p:
        out["kept_flat_per_threshold"] = [selection.threshold(R, t) for t in p["thresholds"]]
    if "global_k" in p:
        out["global_flat"] = selection.top_k_overall(R, p["global_k"])
    if p.get("pairing") == "best_vs_worst":
        pairs = [selection.best_vs_worst(row) for row in R]
        out = {"pairs_chosen_rejected": pairs, "dropped_prompts": [m for m, pair in enumerate(pairs) if pair is None]}
    return out


def sppo_pairs(i, p):
    found = [selection.best_and_worst(row) for row in i["mean_win_prob"]]
    return {"winner": [f[0] for f in found], "loser": [f[1] for f in found], "skipped": [f[2] for f in found]}


def round_robin(i, p):
    mean, order = selection.round_robin(i.get("pref", i.get("win_prob", i.get("pairwise"))))
    return {"mean_win": mean, "order": order, "ranking": order}


def rso_trace(i, p):
    accepted, used, _ = selection.rso_select(i["rewards"], p["num_samples"], p["beta"], i["uniforms"])
    return {"accepted": accepted, "uniforms_used": used}


def rso_limits(i, p):
    return {
        "accepted_beta_small": selection.rso_select(i["rewards"], p["num_samples"], p["beta_small"], i["uniforms"])[0],
        "accepted_beta_large": selection.rso_select(i["rewards"], p["num_samples"], p["beta_large"], i["uniforms"])[0],
    }


def rso_accept(i, p):
    prob = np.array([selection.rso_accept_probability(r, max(i["rewards"]), p["beta"]) for r in i["rewards"]])
    out = {"p": prob, "p_accept": prob, "expected_rate": prob.mean()}
    if "uniforms" in i:
        accepted = first_pass(i["rewards"], p["beta"], i["uniforms"])
        out["accepted"] = [k in accepted for k in range(len(prob))]
    return out


def first_pass(rewards, beta, uniforms):
    """What is accepted by one uniform per candidate: as many as there are draws for."""
    for count in range(len(rewards), 0, -1):
        try:
            return selection.rso_select(rewards, count, beta, uniforms)[0]
        except StopIteration:  # a second pass
            continue
    return []


def rs_dpo(i, p):
    if "etas" in p:
        return {
            "pairs_chosen_rejected": [
                [list(x[:2]) for x in selection.gap_pairs(i["rewards"], p["tau"], e)] for e in p["etas"]
            ]
        }
    pairs = selection.gap_pairs(i["rewards"], p["tau"], p["eta"])
    return {"pairs": [list(x[:2]) for x in pairs], "p_gap": [x[2] for x in pairs]}


def rs_dpo_all_gaps(i, p):
    """The shipped vector lists the distinct probabilities of all ordered pairs above 1/2, kept or not."""
    every = sorted({round(x[2], 15) for x in selection.gap_pairs(i["rewards"], p["tau"], 0.5)})
    return {**rs_dpo(i, p), "p_gap": every}


def expert_iteration(i, p):
    total = [a + p["pm_weight"] * b for a, b in zip(i["env_reward"], i["pm_score"])]
    return {"hhh_order": selection.top_k_per_prompt([total], len(total))[0], "exploit_only": right_ones([i["success"]])}


def rest_em(i, p):
    limit, dedupe = p.get("max_per_problem"), p.get("dedupe", p.get("dedup", True))
    if "text_hash" in i:
        return {"kept": [right_ones([c], [t], limit, dedupe) for c, t in zip(i["correct"], i["text_hash"])]}
    return {"kept": right_ones([i["correct"]], [i["solution_text"]], limit, dedupe)}


def majority(i, p):
    plain, counts = selection.majority(i["answers"])
    weighted, weights = selection.majority(i["answers"], i["rm"])
    return {
        "majority": plain,
        "weighted": weighted,
        "counts": counts,
        "weights": weights,
        "best_of_n": i["answers"][best_of([i["rm"]])[0]],
    }


def triplet(i, p):
    names = i.get("candidates", list(range(len(i["scores"]))))
    found = selection.best_vs_worst(i["scores"])
    if found is None:
        return {"chosen": None, "rejected": None, "dropped": names}
    chosen, rejected = found
    middle = [k for k in range(len(names)) if k not in found]
    return {
        "chosen": names[chosen],
        "rejected": names[rejected],
        "dropped": [names[m] for m in middle],
        "discarded": [names[m] for m in middle],
    }


def band(i, p):
    n = i.get("n", p.get("num_samples", i.get("N")))
    counts = i.get("correct", i.get("correct_of_16", i.get("correct_counts")))
    keep = selection.difficulty_band(counts, n, p.get("low", p.get("lo", 0.2)), p.get("high", p.get("hi", 0.8)))
    return {"keep": keep, "kept_counts": [c for c, k in zip(counts, keep) if k]}


def icdpo(i, p):
    score = in_context.icdpo_score(T(i["logp_with_demos"]), T(i.get("logp_plain", i.get("logp_without_demos"))))
    return {"score": score, "best": best_of(score.unsqueeze(0).numpy())[0]}


def gpo_mask(i, p):
    context = torch.arange(i["num_total"])[None] < i["num_context"]
    return {"allowed": preference_module.attention_mask(context)[0].int()}


def gpo_nll(i, p):
    mean, target = T(i["mean"]), T(i["target"])
    return {
        "nll": preference_module.gaussian_nll(mean, target, 2 * math.log(p.get("sigma", 1.0))).sum(),
        "mse": ((mean - target) ** 2).mean(),
    }


def star(i, p):
    return {"kept": selection.star_filter(i["first_try_correct"], i["hinted_try_correct"], p.get("rationalise", True))}


def lora(i, p):
    """Of a model that is one linear layer: trained as peft's layer computes it, and as the fast forward does."""

    class OneLayer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.embedding = torch.nn.Linear(2, 2, bias=False), torch.nn.Embedding(1, 2)

        def get_input_embeddings(self):
            return self.embedding

        def get_output_embeddings(self):
            return None

        def forward(self, x):
            return self.layer(x)

    base = OneLayer().double()
    base.layer.weight.data = T(i["W0"])
    settings = OptimizerConfig(lora_rank=p["r"], lora_alpha=p["lora_alpha"], lora_targets="layer")
    layer = adapters.add_lora(base, settings, 0, task=None).base_model.model.layer
    x = T(i["x"])[None]

    def product():
        y = lean._linear(x, lean.product(layer), x.dtype)
        assert torch.allclose(y, layer(x))
        return y[0]

    out = {"y_at_init_B_zero": product()}
    layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data = T(i["A"]), T(i["B"])
    return {**out, "y_alpha_over_r": product(), "merged_W": adapters.merged(layer, layer.base_layer.weight)}


def lora_ensemble(i, p):
    """The merge stage's average of models whose weights are W0 + scaling B A, less W0."""
    deltas = [p.get("scaling", 1.0) * T(b) @ T(a) for a, b in zip(i["A"], i["B"])]
    return {"mean_delta": merge.combine(merge.Config(method="linear"), "w", deltas, [1 / len(deltas)] * len(deltas))}


def length_sort(i, p):
    order, inverse = selection.sorted_order(i["lengths"], p.get("order") == "longest_first")
    out = {"perm": order, "order": order, "inverse": inverse}
    if "scores_in_sorted_order" in i:
        out["scores_restored"] = [i["scores_in_sorted_order"][k] for k in inverse]
    return out


def tournament(i, p):
    s = i["scores"]
    pairs, winner = selection.tournament(len(s), lambda a, b: s[a] > s[b] or (s[a] == s[b] and a < b))
    return {
        "pairs_winner_loser": pairs,
        "winner": winner,
        "champion": winner,
        "calls": len(pairs),
        "calls_by_m": {str(m): len(selection.tournament(m, lambda a, b: True)[0]) for m in (1, 2, 3, 4, 5, 8)},
    }


def rest_normalise(i, p):
    x = estimators.minmax(i["rewards"])
    return {"normalised": x, "kept": selection.threshold([x], p["threshold"])}


def self_paced(i, p):
    x = np.asarray(i.get("sample_losses", i.get("losses")), float)
    limit = 1.0 / p["K"] if "K" in p else p["threshold"]
    v = curation.self_paced(x.tolist(), 1.0 / limit)
    return {"v": v, "objective": float((x * v).sum() - limit * sum(v))}


def ensemble(i, p):
    if "scores_member_by_sample" in i:
        return selection.combine_scores(i["scores_member_by_sample"], p.get("uwo_coef", 0.1))
    return selection.combine_scores(np.asarray(i["scores"]).T, p["lambda"])


def weighted(i, p):
    cut = [*i["scores"][:-1], None]
    return {
        "sum": selection.weighted_score(i["scores"], i["weights"]),
        "missing_third_renormalised": selection.weighted_score(cut, i["weights"]),
    }


def curriculum(i, p):
    order, stage = selection.order_by_difficulty([-g for g in i["score_gap"]], p["stages"])
    return {"easy_to_hard": order, "stage_of_pair": stage}


def curry(i, p):
    found = selection.rank_gap_stages(i["ranks"])
    return {"stages_chosen_rejected_index": [x[:2] for x in found], "rank_gap": [x[2] for x in found]}


def sdpo(i, p):
    sizes = selection.chunk_sizes(i["n"], p["num_chunks"])
    return {"sizes": sizes, "reference_of_chunk": ["sft"] + [f"chunk{k}" for k in range(len(sizes) - 1)]}


def rest_thresholds(i, p):
    N = len(i["scores"][0])
    return {"kept_per_tau": [[[f // N, f % N] for f in selection.threshold(i["scores"], t)] for t in p["taus"]]}


def regression(i, p):
    items = [
        make_item(str(k), [0], [[0]], [[1]], targets=[float(t)], weight=1.0, ended=[True])
        for k, t in enumerate(i["target"])
    ]
    config = SimpleNamespace(regression_loss="mse")
    sums = reward_losses.regression(T(i["pred"])[:, None], collate(items), config)
    reward_data.standardise(items, None)
    return {
        "mse": Sums({"mse": sums.loss["mse"]}).divided({"weight": float(len(items))}),
        "standardised_target": [target for (target,) in production.targets_of(items)],
    }


def prm_ce(i, p):
    logits = T(i["logits_neg_neu_pos"])
    targets = [reward_data.class_target(label, 3) for label in i["step_labels"]]
    assert all(target.index(1.0) == p["class_map"][str(k)] for k, target in zip(i["step_labels"], targets))
    n = len(targets)
    item = make_item("steps", [0], [[0] * n], [[1] * n], targets=targets, weight=1.0)
    sums = reward_losses.steps(logits, collate([item]), None)
    return {"loss": Sums({"ce": sums.loss["cross_entropy"]}).divided({"steps": float(n)})}


def answer(text: str) -> Response:
    return Response([], [{"role": "assistant", "content": text}])


def comparer(shown_first, ranking: str = "round_robin"):
    """A model that compares, of which P(first is better | shown first) is known by the two texts."""

    class Known(ComparingScorer):
        def load(self):
            self.ranking = ranking

        def one_order(self, pairs):
            return [shown_first(a.text, b.text) for a, b in pairs]

    return Known("", RewardCard("pairwise"))


def symmetrise(i, p):
    scorer = comparer(lambda a, b: i["p_ij"] if a == "i" else i["p_ji"])
    return {"p_i_sym": scorer.preferences([(answer("i"), answer("j"))])[0]}


def logit_reward(i, p):
    """The answer that is drawn by its text to compare with takes the baseline's place."""
    wins, n = i["p_win_vs_baseline"], len(i["p_win_vs_baseline"])
    texts = [str(k) for k in range(n + 1)]
    drawn = drawn_by_text([answer(text) for text in texts])
    known = {text: wins[k] for k, text in enumerate(text for at, text in enumerate(texts) if at != drawn)}
    scorer = comparer(lambda a, b: known[a] if b == texts[drawn] else 1 - known[b], "baseline")
    found = scorer.score([answer(text) for text in texts])
    assert found[drawn] == 0.0
    return {"reward": [value for at, value in enumerate(found) if at != drawn]}


def ckpt_select(i, p):
    """Passes in order through the trainer's own choice, and candidates through that of stage select_checkpoint."""

    def best(name, values):
        trainer = SimpleNamespace(
            config=SimpleNamespace(select_by=name, early_stopping_patience=0),
            best={},
            parameters={},
            bema=None,
            step_index=0,
        )
        for trainer.step_index, value in zip(i["epoch"], values):
            Trainer.consider(trainer, {name: value})
        return trainer.best["step"]

    later = {
        "by_rm_score": choose(dict(zip(i["epoch"], i["rm_score"]))),
        "by_val_loss": choose(dict(zip(i["epoch"], i["val_loss"])), less=True),
    }
    assert later == {"by_rm_score": best("reward", i["rm_score"]), "by_val_loss": best("loss", i["val_loss"])}
    return later


ADAPTERS = {
    "rm.ensemble/combine": ensemble,
    "rm_ensemble": ensemble,
    "rm.multi/weighted": weighted,
    "rm.curriculum/order": curriculum,
    "da.curry/stages": curry,
    "da.sdpo/chunks": sdpo,
    "rest_improve_thresholds": rest_thresholds,
    "rm.regression/mse": regression,
    "rm.prm/three_class_ce": prm_ce,
    "sft.ckpt_select/rm_score": ckpt_select,
    "rm.pairwise/symmetrise": symmetrise,
    "sft.nll/uniform": nll_uniform,
    "sft.nll/reductions": nll_logps,
    "sft.nll/nan_padding": nll_logps,
    "sft.nll/prompt_mask": nll_prompt_mask,
    "sft.nll/grad_accumulation": nll_losses,
    "sft.nll/logit_gradient": nll_logits,
    "sft.nll/empty_row": nll_losses,
    "sft.nll/one_token": nll_losses,
    "sft.nll/shift_alignment": shift,
    "sft.mask/roles": role_masks,
    "sft.template/chatml_generation_prompt": template,
    "sft.template/chatml_multi_turn": template,
    "sft.template/chatml_errors": template_errors,
    "sft.pack/best_fit_decreasing": pack,
    "sft.unlikelihood/tokens": unlikelihood,
    "kd.logit/forward_kl": kd_probs,
    "kd.logit/temperature": kd_logits,
    "kd.logit/masked_mean": kd_logits,
    "kd.context/topk_bucket": kd_probs,
    "kd.onpolicy/generalised_jsd": kd_probs,
    "kd.codistill/mix": kd_logits,
    "kd_full_vocab": kd_probs,
    "kd_top_k": kd_probs,
    "context_distill_kl": kd_probs,
    "rm.head/linear": rm_linear,
    "rm.head/last_token_padding": rm_head,
    "rm.bt/margins": rm_bt,
    "rm.bt/shift_invariance": rm_bt,
    "rm.bt/extreme": rm_bt,
    "rm.bt/centering": rm_bt,
    "rm.margin/diff_1.5": rm_margin,
    "rm.margin/likert_map": likert_map,
    "margin_loss_values": rm_margin,
    **{f"rm.kwise_pairs/{n}": kwise for n in ("k4", "two_prompts", "misordered", "ties", "k3")},
    "rm.plackett_luce/k3": plackett_luce,
    "rm.plackett_luce/k2_is_bt": plackett_luce,
    "rm.soft_label/cai": rm_soft,
    "ai_label_rm_soft_ce": rm_soft,
    "rm.soft_label/position_debias": position_debias,
    "rm.pairwise/bce": rm_pairwise,
    "rm.orm/bce": rm_orm,
    "rm.orm/gain_bias_token_labels": rm_orm_gain_bias,
    "rm.pmp/pointwise_bce": rm_pmp,
    "rm.pmp/control_token_pairs": rm_pmp_control,
    "rm.calibrate/bias_anchor": rm_bias_anchor,
    "rm_bias_anchor": rm_bias_anchor,
    "rm.calibrate/whiten": rm_whiten,
    "rm.calibrate/zero_variance": rm_whiten,
    "rm_minibatch_norm": rm_whiten,
    "rm.eval/accuracy_ties": rm_accuracy,
    "rm_pairwise_accuracy": rm_accuracy,
    "rm.eval/ece": rm_ece,
    "calibration_rm": rm_ece,
    "rm.eval/length_correlation": rm_length,
    "rm.overopt/bon_estimator": bon_estimator,
    "rm.overopt/gao_peak": gao_peak,
    "rm.overopt/divergence": divergence,
    "rm.bt_fit/two_items": bt_fit,
    "rm.bt_fit/three_items": bt_fit,
    "rm.implicit/score": implicit,
    "rs.select/matrix": rs_matrix,
    "rs.select/ties_and_nan": rs_matrix,
    "rs.select/threshold": rs_matrix,
    "rs.expert_iteration/top": expert_iteration,
    "rs.raft/local_global": rs_matrix,
    "da.online_dpo/best_vs_worst": rs_matrix,
    "rs.best_of_n/kl": lambda i, p: {"kl": [selection.best_of_n_kl(n) for n in i["n"]]},
    "rs.length_sort/permutation": length_sort,
    "length_sorted_scoring": length_sort,
    "sppo_pair_selection": sppo_pairs,
    "rs.rank/round_robin": round_robin,
    "round_robin_mean_win": round_robin,
    "rs.rso/trace": rso_trace,
    "rs.rso/accept_prob": rso_accept,
    "rs.rso/limits": rso_limits,
    "rso_accept_prob": rso_accept,
    "rso_sequence": rso_accept,
    "rs.rso/logit_reward": logit_reward,
    "rs.rs_dpo/pairs": rs_dpo,
    "rs_dpo_pairs": rs_dpo_all_gaps,
    "rs.rest_em/keep": rest_em,
    "rest_em_cap": rest_em,
    "rs.rest/normalise": rest_normalise,
    "rs.majority/weighted": majority,
    "rs.triplet/cpo": triplet,
    "cpo_triplet": triplet,
    "rs.difficulty_band/n16": band,
    "difficulty_filter": band,
    "rs.icdpo/score": icdpo,
    "icdpo_score": icdpo,
    "rm.gpo/attention_mask": gpo_mask,
    "rm.gpo/gaussian_nll": gpo_nll,
    "rs.star/filter": star,
    "peft.lora/forward": lora,
    "peft.lora/ensemble_merge": lora_ensemble,
    "rm.t2t_pair/tournament": tournament,
    "tournament": tournament,
    "rm.t2t_pair/call_counts": lambda i, p: {
        "calls": [len(selection.tournament(m, lambda a, b: True)[0]) for m in i["m"]]
    },
    "rs.mix/largest_remainder": lambda i, p: {"counts": selection.largest_remainder(i["total"], i["weights"])},
    "sft.self_paced/hard": self_paced,
    "self_paced_selection": self_paced,
}
