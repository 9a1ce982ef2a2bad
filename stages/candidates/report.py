"""What a selection took, against what there was to choose from."""

from __future__ import annotations

import json

import numpy as np

from stages import selection
from stages.candidates.rows import rationalised_row
from stages.measures.text import distinct_n, words_of
from stages.policy.alarms import AGREE, ALARMS
from stages.reward.rewards import agreement


def component_means(rows, valid, is_picked) -> dict[str, float]:
    """Means of what several components, or an ensemble's members, say of the valid candidates, and of the selected ones
    (``rm.multi``, ``rm.ensemble``): of a component of weight 0 how far what is selected by another pleases it. One
    called as a number of the total (``reward/best``, ``reward/selected``) is ``reward/component=NAME``.
    """
    found: dict[str, list[tuple[float, bool]]] = {}
    for row, picked in zip(rows, is_picked):
        if valid[row["prompt_idx"], row["completion_idx"]]:
            for part in row["scores"] or ():
                if part["value"] is not None:
                    found.setdefault(part["source"], []).append((part["value"], bool(picked)))
    if len(found) < 2:
        return {}
    found = {f"component={name}" if name in ("best", "selected") else name: own for name, own in found.items()}
    means = {f"reward/{name}": float(np.mean([v for v, _ in own])) for name, own in found.items()}
    return means | {
        f"reward/{name}/selected": float(np.mean([v for v, picked in own if picked]))
        for name, own in found.items()
        if any(picked for _, picked in own)
    }


#: Pairs of answers below which a low agreement of tiers is no reason to warn (ours).
FEW = 20


def tier_agreement(stage, rows) -> dict[str, float]:
    """How far the tiers of a cascade agree (:func:`stages.reward.rewards.agreement`), warned of as ``rl`` does."""
    if not any(component.audit_fraction for component in stage.config.rewards):
        return {}
    decided = ((row["prompt_idx"], json.loads(row["extra_json"] or "{}").get("tier"), values_of(row)) for row in rows)
    found = agreement(decided, stage.config.rewards)
    if any(value < AGREE and pairs >= FEW for value, pairs in found.values()):
        stage.warn("tiers_disagree", ALARMS["tiers_disagree"].text)
    return {f"reward/tier_agreement/{name}": value for name, (value, _) in found.items()}


def values_of(row: dict) -> dict[str, float | None]:
    """What the components said of a candidate."""
    return {part["source"]: part["value"] for part in row["scores"] or ()}


def report(stage, rows, scored, matrix, correct, chosen, duplicates: int) -> None:
    """Selection against the pool, and best-of-n curves with the unbiased estimator (``rm.overopt``), of the direct
    completions.

    scored: rewards ``[M, N]`` of the valid completions; matrix: the same without those that no selector could take, the
    duplicates. Means and curves are of what was sampled, duplicates included: without them they would be of a policy
    that never repeats itself.
    """
    from stages.reporting.reports import document, facts, histogram, line_chart, sample_table

    valid = ~np.isnan(scored)
    flat = scored.ravel()
    lengths = np.array([len(r["completion"][0].get("content") or "") for r in rows], float)
    picked = set(chosen)
    width = matrix.shape[1]
    is_picked = np.array([r["prompt_idx"] * width + r["completion_idx"] in picked for r in rows])
    summary = {
        "prompts": matrix.shape[0],
        "completions": len(rows),
        "valid": int((~np.isnan(matrix)).sum()),
        "selected": len(chosen),
        "truncated": sum(r["drop_reason"] == "truncated" for r in rows),
        "unscorable": sum(r["drop_reason"] == "unscorable" for r in rows),
        "failed": sum(r["drop_reason"] == "engine_error" for r in rows),
        "empty": sum(r["drop_reason"] == "empty" for r in rows),
        "duplicates": duplicates,
        "prompts_covered": len({i // width for i in chosen}),
        "reward": float(np.nanmean(flat)) if valid.any() else None,
        "reward/best": float(np.nanmax(scored[valid.any(axis=1)], axis=1).mean()) if valid.any() else None,
        "reward/selected": float(np.mean([flat[i] for i in chosen])) if chosen else None,
        "characters/mean": float(lengths.mean()),
        "characters/selected": float(lengths[is_picked].mean()) if chosen else None,
    }
    texts: dict[int, list[list[str]]] = {}
    for row in rows:
        texts.setdefault(row["prompt_idx"], []).append(words_of(row["completion"][0].get("content") or ""))
    distinct = [value for group in texts.values() if (value := distinct_n(group, 2)) is not None]
    # different word pairs per prompt: falls over rounds that narrow the policy (rs.sft)
    summary["distinct_2"] = float(np.mean(distinct)) if distinct else None
    summary = component_means(rows, valid, is_picked) | summary | tier_agreement(stage, rows)
    hinted = np.array([rationalised_row(r) for r in rows], bool)
    if any(r["correct"] is not None for r in rows):
        # no verdict is no wrong answer. As in `evaluate`, an answer that was cut has the verdict of what there is of it
        # (reward.truncation: score, the verifiers' default), though no selector takes it
        right = [r["correct"] for r, taken in zip(rows, is_picked) if taken and r["correct"] is not None]
        summary |= {
            "correct/mean": float(
                np.mean(
                    [r["correct"] for r, with_hint in zip(rows, hinted) if not with_hint and r["correct"] is not None]
                    or [0.0]
                )
            ),
            "correct/selected": float(np.mean(right)) if right else None,
        }
        if cut := sum(bool(r["correct"]) for r in rows if r["drop_reason"] == "truncated"):
            summary["truncated/correct"] = cut
    if hinted.any():  # per prompt, what training can take from it (rs.star)
        first, second = ({r["prompt_idx"]: False for r in rows if r["correct"] is not None} for _ in range(2))
        for row, with_hint in zip(rows, hinted):
            if row["correct"] and row["kept"]:
                (second if with_hint else first)[row["prompt_idx"]] = True
        kept = selection.star_filter([first[i] for i in first], [second[i] for i in first])
        summary |= {
            "prompts/direct": kept.count("direct"),
            "prompts/rationalised": kept.count("rationalised"),
            "prompts/unsolved": kept.count(None),
        }
        direct = 1 + max(r["completion_idx"] for r, with_hint in zip(rows, hinted) if not with_hint)
        scored, correct = scored[:, :direct], correct[:, :direct]
    sources = [(r["gen"] or {}).get("model_id") or "unknown" for r in rows]
    if len(set(sources)) > 1:  # a source that always wins teaches its style (rs.mix)
        summary |= {
            f"win_share/{name}": sum(s == name for s, taken in zip(sources, is_picked) if taken) / max(1, len(chosen))
            for name in sorted(set(sources))
        }
    stage.summary({k: v for k, v in summary.items() if v is not None})
    stage.report(
        "rewards",
        png=histogram(
            {"all": flat[valid.ravel()].tolist(), "selected": [float(flat[i]) for i in chosen]},
            title="Reward before and after selection",
            xlabel="reward",
        ),
    )
    full, sizes = (~np.isnan(scored)).all(axis=1), range(1, scored.shape[1] + 1)
    if full.any() and len(sizes) > 1:
        series = {
            "scorer": (
                list(sizes),
                [float(np.mean([selection.best_of_n_estimate(row, n) for row in scored[full]])) for n in sizes],
            )
        }
        judged = full.copy()
        judged[[r["prompt_idx"] for r, hint in zip(rows, hinted) if r["correct"] is None and not hint]] = False
        if judged.any():
            verdicts = correct[judged].astype(float)
            series["correct"] = (
                list(sizes),
                [
                    float(np.mean([selection.best_of_n_estimate(r, n, c) for r, c in zip(scored[judged], verdicts)]))
                    for n in sizes
                ],
            )
        stage.report("best-of-n", png=line_chart(series, title="Best of n", xlabel="n", ylabel="mean"))
    table = [
        {
            "prompt": r["prompt"][-1]["content"],
            "completion": r["completion"][0].get("content"),
            "reward": r["reward"],
            "correct": r["correct"],
        }
        for r, taken in zip(rows, is_picked)
        if taken
    ][:20]
    stage.report(
        "summary", markdown=document("Rejection sampling", facts(summary), ("Selected samples", sample_table(table)))
    )
