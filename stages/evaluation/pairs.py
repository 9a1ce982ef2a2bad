"""Held-out pairs as an evaluation scores them: by a policy's own likelihood, a reward model or a judge, with the probes that
a reward model should score low.
"""

from __future__ import annotations

import math


def score(plan, items) -> list[dict]:
    """Score one chunk of pairs: a ``chosen`` and a ``rejected`` row each, and the probes of a reward model."""
    if plan.config.target == "policy":
        return [
            row
            for item, score in zip(items, _likelihoods(plan, items))
            for row in _pair_rows(plan, plan.texts[item.row_id], score, [len(r) for r in item.responses])
        ]
    from stages.reward_models.reward_eval import answers_of, log_odds, margins_of

    scorer = plan.scorer("model")
    pairs = [answers_of(row) for row in items]
    margins, scores = margins_of(scorer, pairs)
    compared = scores is None
    odds = margins if compared else log_odds(scorer, margins, scores)
    scores = scores if scores is not None else [[1 / (1 + math.exp(-m)), 1 / (1 + math.exp(m))] for m in margins]
    rows = [
        made
        for row, pair, margin, odd, (a, b) in zip(items, pairs, margins.tolist(), odds.tolist(), scores)
        if not math.isnan(margin)
        for made in _pair_rows(
            plan,
            row,
            {"chosen": {"reward": float(a)}, "rejected": {"reward": float(b)}, "margin": margin}
            | ({"compared": True} if compared else {})
            | ({"log_odds": odd} if odds is not margins else {}),
            scorer.lengths(pair),
        )
    ]
    return rows + ([] if scorer.relative else _probe_rows(plan, items))


def _likelihoods(plan, items) -> list[dict]:
    """Sequence log-probabilities of both sides; with a reference the implicit reward decides, else the log-prob
    sum.
    """
    from stages.decoding.likelihood import response_logps

    budget, device = plan.config.max_tokens_per_micro_batch, plan.stage.device
    mine = response_logps(plan.policy(), items, budget, device)
    theirs = response_logps(plan.policy("reference"), items, budget, device) if plan.stage.has("reference") else None
    scored = []
    for i, sides in enumerate(mine):
        values = [
            {"reward": sum(side), "logp": sum(side), "logp_mean": sum(side) / max(1, len(side))} for side in sides
        ]
        if theirs is not None:
            for value, other in zip(values, theirs[i]):
                value["reward"] = plan.config.beta * (value["logp"] - sum(other))
        chosen, rejected = values
        scored.append({"chosen": chosen, "rejected": rejected, "margin": chosen["reward"] - rejected["reward"]})
    return scored


def _pair_rows(plan, source: dict, score: dict, lengths: list[int]) -> list[dict]:
    from stages.evaluation import best_of, rewardbench

    lists = best_of.asked_of(source)
    shared = {
        "prompt": source["prompt"][-1]["content"] if source["prompt"] else "",
        "source": source.get("source"),
        "strength": source.get("strength"),
        "subset": None if lists else rewardbench.subset_of(source),
        "compared": score.get("compared"),
        **lists,
    }
    rows = []
    for index, side in enumerate(("chosen", "rejected")):
        extra = {**shared, **score[side], "mode": side}
        if side == "chosen":
            extra |= {name: score[name] for name in ("margin", "log_odds") if name in score}
        rows.append(
            plan._row(
                source,
                side,
                index,
                source[side][-1].get("content") or "",
                lengths[index],
                extra,
                correct=score["margin"] > 0 if side == "chosen" else None,
            )
        )
    return rows


def _probe_rows(plan, items) -> list[dict]:
    from stages.measures.reward_model import paraphrases_of, probes, transforms
    from stages.reward_models.reward_scorers import Response

    probed = {row["row_id"] for row in plan.pairs[: plan.config.probe_pairs]}
    asked = []
    for source in items:
        if source["row_id"] not in probed:
            continue
        answers = {side: source[side][-1].get("content") or "" for side in ("chosen", "rejected")}
        paraphrases = paraphrases_of(source)
        made = {
            f"probe:{name}": text
            for name, text in probes(
                answers["chosen"],
                plan.stage.rng("probe", source["row_id"]),
                source["prompt"][-1]["content"] or "" if source["prompt"] else "",
            ).items()
        }
        for side, answer in answers.items():
            for name, text in (
                transforms(answer, plan.stage.rng("transform", source["row_id"], side)) | paraphrases.get(side, {})
            ).items():
                made[f"transform:{name}:{side}"] = text
        asked += [(source, mode, index, text) for index, (mode, text) in enumerate(sorted(made.items()))]
    responses = [
        Response(source["prompt"], [*source["chosen"][:-1], {"role": "assistant", "content": text}], row=source)
        for source, _, _, text in asked
    ]
    scorer = plan.scorer("model")
    return [
        plan._row(source, mode, index, text, length, {"mode": mode, "reward": value if math.isfinite(value) else None})
        for (source, mode, index, text), length, value in zip(asked, scorer.lengths(responses), scorer.score(responses))
    ]
