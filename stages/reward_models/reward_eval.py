"""What a reward model is worth on held-out rows (``rm.eval``): accuracy, calibration, length bias, probes - and
warnings.

Everything goes through ``Scorer.score``, the way the model is used later. Intervals are bootstraps over prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from stages.generation import UNANSWERED
from stages.measures import statistics
from stages.measures.reward_model import FOOLED
from stages.pairs import ended_of, is_tie
from stages.reward_models.reward_data import attribute_scores, transition
from stages.reward_models.reward_objectives import READ_BY
from stages.reward_models.reward_scorers import Response, Scorer, positive, split_steps


def rows_of(data, split: str | None, limit: int | None) -> list[dict]:
    rows = []
    for row in data.iter_rows(split=split) if split is not None else data.iter_rows():
        if limit is not None and len(rows) >= limit:
            break
        rows.append(transition(row))
    return rows


def anchor_responses(data, split: str | None, limit: int) -> list[Response]:
    """The answers whose mean score becomes 0: chosen or best-ranked ones, demonstrations that are trained on, or a
    policy's complete samples.
    """
    found = []
    for row in rows_of(data, split, limit):
        if data.kind == "demonstrations/1":
            turns = [i for i, m in enumerate(row["messages"]) if m["role"] == "assistant"]
            if turns and row.get("kept") is not False:
                found.append(Response(row["messages"][: turns[-1]], [row["messages"][turns[-1]]], row=row))
        elif data.kind == "pairs/1":
            found.append(Response(row["prompt"], row["chosen"], row=row))
        elif data.kind == "rankings/1":
            best = min(range(len(row["ranks"])), key=lambda i: (row["ranks"][i], i))
            found.append(Response(row["prompt"], row["completions"][best], row=row))
        elif row.get("drop_reason") not in ("truncated", *UNANSWERED) and (data.kind != "unpaired/1" or row["label"]):
            found.append(Response(row["prompt"], row["completion"], row=row))
    return found


def answers_of(row: dict) -> tuple[Response, Response]:
    """The chosen and the rejected answer of a ``pairs/1`` row; one that was cut has no end."""
    chosen, rejected = ended_of(row, "chosen", "rejected")
    return (
        Response(row["prompt"], row["chosen"], row=row, ended=chosen),
        Response(row["prompt"], row["rejected"], row=row, ended=rejected),
    )


#: Held-out rows below which accuracies, correlations and calibration are noise, and no reason to warn of the model
#: (ours).
FEW = 20
#: Held-out accuracy that is usual for comparisons of people (F.2), and above which a leak is likely (ours).
EXPECTED, LEAK = (0.65, 0.8), 0.98


class Unreported:
    """A stage whose figures and warnings of held-out rows nobody sees: of a model that is one of several."""

    def __init__(self, stage):
        self._stage = stage

    def __getattr__(self, name):
        return getattr(self._stage, name)

    def report(self, *args, **more) -> None:
        pass

    warn = report


def held_out(
    stage,
    scorer: Scorer,
    data,
    split: str,
    limit: int | None = None,
    probe_pairs: int = 0,
    label: str | None = None,
) -> dict[str, float]:
    """Metrics of one split, by the kind of its rows; ``{}`` without rows. Figures and samples go to the stage's reports,
    under the name of the split or ``label``, of another model than the stage's own.
    """
    return judged(stage, scorer, data.kind, rows_of(data, split, limit), label or split, probe_pairs)


def held_out_of_all(
    stage, scorer: Scorer, datasets: Sequence, label: str, limit: int | None = None
) -> dict[str, float]:
    """Metrics of the held-out rows of several datasets of one kind together, the test split's where there are any, else
    the validation split's.
    """
    for split in ("test", "validation"):
        if rows := [row for data in datasets for row in rows_of(data, split, limit)]:
            return judged(stage, scorer, datasets[0].kind, rows[:limit], label)
    return {}


def count_of(found: dict[str, float]) -> int:
    """Rows that the metrics of :func:`held_out` are of, as far as they say."""
    return int(next((found[name] for name in ("pairs", "rankings", "rows", "steps") if name in found), 0))


def judged(stage, scorer: Scorer, kind: str, rows: list[dict], split: str, probe_pairs: int = 0) -> dict[str, float]:
    """Metrics of held-out rows of one kind; ``split`` names them in reports."""
    judge = {
        "pairs/1": judge_pairs,
        "rankings/1": judge_rankings,
        "ratings/1": judge_ratings,
        "trajectories/1": judge_ratings,
        "unpaired/1": judge_labels,
        "stepwise/1": judge_steps,
    }
    return judge[kind](stage, scorer, rows, split, probe_pairs) if rows else {}


def interval(stage, values, clusters, name: str, split: str) -> dict[str, float]:
    from stages.measures.statistics import certain

    low, high = certain(list(map(float, values)), clusters) or statistics.bootstrap_ci(
        values, n=1000, seed=stage.seed_for("bootstrap", split) % 2**32, clusters=clusters
    )
    return {name: float(np.mean(values)), f"{name}_ci_low": low, f"{name}_ci_high": high}


def margins_of(scorer: Scorer, pairs: Sequence[tuple[Response, Response]]) -> tuple[np.ndarray, np.ndarray | None]:
    """(margin of every pair, scores ``[n, 2]``); a comparing model's margin is the logit of its preference and has no
    scores.
    """
    if scorer.relative and hasattr(scorer, "preferences"):
        p = np.clip(scorer.preferences(pairs), 1e-12, 1 - 1e-12)
        return np.log(p / (1 - p)), None
    scores = np.array(scorer.score([r for pair in pairs for r in pair]), float).reshape(-1, 2)
    return scores[:, 0] - scores[:, 1], scores


def log_odds(scorer: Scorer, margin: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """What is squashed to the probability that the first of two answers is the better one, of pairs with these margins
    and scores ``[n, 2]``: the margin, but where scores are P(good), of two answers, one of them good, the logit of its
    being the first.
    """
    if getattr(getattr(scorer, "card", None), "objective", "") != "t2t_point":
        return margin
    p = np.clip(scores - scorer.bias, 1e-12, 1 - 1e-12)
    return -np.diff(np.log(p / (1 - p)), axis=1)[:, 0]


def judge_pairs(stage, scorer, rows, split, probe_pairs=0) -> dict[str, float]:
    """Accuracy (strict, ties, by strength and source), log loss, calibration, length bias, probes on ``pairs/1``."""
    from stages.measures.reward_model import length_matched, length_terciles

    rows = [r for r in rows if not is_tie(r)]  # nobody can be right about them
    if not rows:
        return {}
    pairs = [answers_of(r) for r in rows]
    margin, scores = margins_of(scorer, pairs)
    keep = ~np.isnan(margin)
    rows, pairs, margin = [r for r, k in zip(rows, keep) if k], [p for p, k in zip(pairs, keep) if k], margin[keep]
    if not rows:
        return {}
    prompts = [r.get("prompt_id") or r["row_id"] for r in rows]
    lengths = np.array(scorer.lengths([r for pair in pairs for r in pair]), float).reshape(-1, 2)
    correct = (margin > 0).astype(float)
    found = interval(stage, correct, prompts, "accuracy", split)
    plain = statistics.pairwise_accuracy(margin, np.zeros_like(margin))
    odds = margin if scores is None else log_odds(scorer, margin, scores[keep])
    confidence = statistics.preference_confidence(odds, np.zeros_like(odds))
    found |= {
        "pairs": float(len(rows)),
        "tie_rate": plain["ties"],
        "half_credit_accuracy": plain["half_credit"],
        "log_loss": plain["log_loss"] if odds is margin else float(np.logaddexp(0.0, -odds).mean()),
        "mean_margin": plain["mean_margin"],
        "ece": statistics.ece(*confidence),
    }
    longer = (lengths[:, 0] > lengths[:, 1]) + 0.5 * (lengths[:, 0] == lengths[:, 1])
    found |= {
        "chosen_longer_share": float(longer.mean()),
        "mean_length_difference": float((lengths[:, 0] - lengths[:, 1]).mean()),
        "margin_length_correlation": statistics.pearson(margin, lengths[:, 0] - lengths[:, 1]),
    }
    if scores is not None:
        scores = scores[keep]
        found["score_length_correlation"] = statistics.pearson(scores.ravel(), lengths.ravel())
        found["score_length_correlation_within_prompt"] = statistics.within_group_correlation(
            scores.ravel(), lengths.ravel(), np.repeat(prompts, 2)
        )
        residual, _ = length_residual(scores.ravel(), lengths.ravel())
        found["length_residual_accuracy"] = float((np.diff(-residual.reshape(-1, 2), axis=1) > 0).mean())
        found |= {"mean_reward": float(scores.mean()), "std_reward": float(scores.std())}
    matched = length_matched(margin, lengths[:, 0], lengths[:, 1])
    if matched["n"] >= 20:
        found["length_matched_accuracy"] = matched["accuracy"]
    for field, prefix in (("strength", "strength"), ("source", "source")):
        values = [r.get(field) for r in rows]
        for value in sorted({v for v in values if v is not None}, key=str):
            at = np.array([v == value for v in values])
            if not at.all() and at.sum() >= 5:
                found[f"accuracy_{prefix}_{value}"] = float(correct[at].mean())
    found |= stronger_model_share(rows)
    if getattr(scorer, "inconsistency", None) and scores is None:
        found["order_inconsistency"] = float(np.mean(scorer.inconsistency))
    if scorer.disagreement:
        found["disagreement"] = float(np.mean(scorer.disagreement))
    if probe_pairs:
        found |= probe(stage, scorer, rows[:probe_pairs], pairs[:probe_pairs], margin[:probe_pairs])
    show(
        stage,
        split,
        rows,
        odds,
        lambda i: {
            "chosen": pairs[i][0].text,
            "rejected": pairs[i][1].text,
            **({} if scores is None else {"chosen score": scores[i, 0], "rejected score": scores[i, 1]}),
            "margin": margin[i],
        },
    )
    report_pairs(
        stage, split, margin, scores, lengths, confidence, length_terciles(margin, lengths[:, 0] - lengths[:, 1])
    )
    return {k: v for k, v in found.items() if v is not None and not math.isnan(v)}


def length_residual(scores, lengths) -> tuple[np.ndarray, float]:
    """(scores without their linear dependence on length, mean kept; the slope) by least squares: a diagnostic
    (``rm.mentions``).
    """
    r, x = np.asarray(scores, float), np.asarray(lengths, float)
    spread = x - x.mean()
    slope = float(spread @ (r - r.mean()) / (spread @ spread)) if (spread @ spread) > 0 else 0.0
    return r - slope * spread, slope


def stronger_model_share(rows) -> dict[str, float]:
    """Share of decided pairs whose chosen answer comes from the model that wins more often overall: near 1 means that
    the data labels the model, not the answer."""
    named = [((r.get("chosen_gen") or {}).get("model_id"), (r.get("rejected_gen") or {}).get("model_id")) for r in rows]
    named = [(a, b) for a, b in named if a and b and a != b]
    if not named:
        return {}
    wins = {m: np.mean([a == m for a, b in named if m in (a, b)]) for pair in named for m in pair}
    return {"chosen_from_stronger_model": float(np.mean([wins[a] > wins[b] for a, b in named]))}


def probe(stage, scorer, rows, pairs, margin) -> dict[str, float]:
    """Probes that must score below the chosen answer (share fooled) and surface changes that must not flip a
    decision.
    """
    from stages.measures.reward_model import probes, transforms

    found: dict[str, list] = {}
    for row, (chosen, rejected), before in zip(rows, pairs, margin):

        def changed(response, text):
            return Response(
                response.prompt, [*response.completion[:-1], {"role": "assistant", "content": text}], row=response.row
            )

        bad = probes(
            chosen.text, stage.rng("probe", row["row_id"]), row["prompt"][-1]["content"] or "" if row["prompt"] else ""
        )
        sides = [
            transforms(r.text, stage.rng("transform", row["row_id"], side))
            for side, r in (("chosen", chosen), ("rejected", rejected))
        ]
        asked = [(chosen, changed(chosen, text)) for text in bad.values()]
        asked += [(changed(chosen, sides[0][name]), changed(rejected, sides[1][name])) for name in sides[0]]
        gaps, _ = margins_of(scorer, asked)
        for name, gap in zip([f"probe/{n}" for n in bad], gaps):
            found.setdefault(name, []).append(None if math.isnan(gap) else gap <= 0)
        for name, gap in zip([f"flips/{n}" for n in sides[0]], gaps[len(bad) :]):
            found.setdefault(name, []).append(None if math.isnan(gap) else (gap > 0) != (before > 0))
    # a probe without a score, for example one that is too long, says nothing
    scored = {name: [value for value in values if value is not None] for name, values in found.items()}
    table = [
        {
            "probe": name,
            "share": float(np.mean(values)),
            "n": len(values),
            "without a score": len(found[name]) - len(values),
        }
        for name, values in sorted(scored.items())
        if values
    ]
    if table:
        stage.report("probes", table=table)
    return {row["probe"]: row["share"] for row in table}


def judge_rankings(stage, scorer, rows, split, probe_pairs=0) -> dict[str, float]:
    """Pairwise accuracy inside each prompt, whether the best is found, and Kendall's tau. Of a model trained on the
    first ``top_ranks`` alone, pairs below these count nowhere: nobody knows which of the two is better.
    """
    certain = getattr(getattr(stage, "config", None), "top_ranks", None)
    responses = [Response(r["prompt"], c, row=r) for r in rows for c in r["completions"]]
    scores, start = np.array(scorer.score(responses), float), 0
    prompts, accuracy, top, taus, margins, judged_rows = [], [], [], [], [], []
    for row in rows:
        part, ranks = scores[start : start + len(row["ranks"])], np.array(row["ranks"])
        start += len(ranks)
        decided = [
            (i, j)
            for i in range(len(ranks))
            if certain is None or (ranks < ranks[i]).sum() < certain
            for j in range(len(ranks))
            if ranks[i] < ranks[j] and not math.isnan(part[i] + part[j])
        ]
        if not decided:
            continue
        gaps = np.array([part[i] - part[j] for i, j in decided])
        judged_rows.append((row, part, gaps))
        prompts.append(row.get("prompt_id") or row["row_id"])
        accuracy.append(float((gaps > 0).mean()))
        taus.append(float(np.sign(gaps).mean()))
        top.append(float(ranks[int(np.nanargmax(part))] == ranks.min()))
        margins += gaps.tolist()
    if not accuracy:
        return {}
    stage.report(f"margins-{split}", png=_histogram({"pairs": margins}, "Score difference better - worse", "margin"))

    def answers(i: int) -> dict:
        row, part, gaps = judged_rows[i]
        best, highest = row["ranks"].index(min(row["ranks"])), int(np.nanargmax(part))
        return {
            "best answer": said(row["completions"][best]),
            "scored highest": said(row["completions"][highest]),
            "score of the best": part[best],
            "highest score": part[highest],
            "pairs ordered right": float((gaps > 0).mean()),
        }

    # by the pair that it gets most wrong; a ranking without a wrong one by its narrowest
    show(stage, split, [row for row, _, _ in judged_rows], [float(gaps.min()) for _, _, gaps in judged_rows], answers)
    return {
        **interval(stage, accuracy, prompts, "accuracy", split),
        "kendall_tau": float(np.mean(taus)),
        "best_found": float(np.mean(top)),
        "rankings": float(len(accuracy)),
        "log_loss": float(np.logaddexp(0.0, -np.array(margins)).mean()),
        "ece": statistics.ece(margins),
    }


def rating_of(row: dict, scorer) -> float:
    """What a model of ratings predicts of a row: its score, or the weighted sum of the attributes that it was trained
    on, NaN where the row lacks one of them.
    """
    options = getattr(getattr(scorer, "card", None), "options", {})
    if not options.get("attributes"):
        return float(row["score"])
    return sum(w * v for w, v in zip(options["weights"], attribute_scores(row, options["attributes"])) if w)


def judge_ratings(stage, scorer, rows, split, probe_pairs=0) -> dict[str, float]:
    """Error and correlation against the ratings, and pairwise accuracy between differently rated answers of one
    prompt.
    """
    from stages.measures.reward_model import spearman
    from stages.reporting.reports import scatter

    scores = np.array(scorer.score([Response(r["prompt"], r["completion"], row=r) for r in rows]), float) - scorer.bias
    targets = np.array([rating_of(r, scorer) for r in rows], float)
    keep = ~np.isnan(scores) & ~np.isnan(targets)
    if not keep.any():
        return {}
    rows, scores, ratings = [r for r, k in zip(rows, keep) if k], scores[keep], targets[keep]
    found = {
        "mse": float(((scores - ratings) ** 2).mean()),
        "mae": float(np.abs(scores - ratings).mean()),
        "rows": float(len(rows)),
        "baseline_mse": float(ratings.var()),
        "pearson": statistics.pearson(scores, ratings),
        "spearman": spearman(scores, ratings),
    }
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.get("prompt_id") or row["row_id"], []).append(i)
    compared = [
        (prompt, float(scores[i] > scores[j]))
        for prompt, members in groups.items()
        for i in members
        for j in members
        if ratings[i] > ratings[j]
    ]
    if compared:
        found |= interval(
            stage, [right for _, right in compared], [prompt for prompt, _ in compared], "accuracy", split
        )
    stage.report(
        f"ratings-{split}",
        png=scatter(
            ratings.tolist(), scores.tolist(), title="Predicted against given ratings", xlabel="rating", ylabel="score"
        ),
    )
    show_errors(stage, split, rows, scores, ratings)
    return {k: v for k, v in found.items() if not math.isnan(v)}


def show_errors(stage, split: str, rows: Sequence[dict], scores: np.ndarray, ratings: np.ndarray) -> None:
    """``samples-SPLIT`` of ratings: where the prediction is farthest above and below, and where it is nearest."""
    error = scores - ratings
    order = sorted(range(len(rows)), key=lambda i: error[i])
    low, high = [i for i in order if error[i] < 0][:SHOWN], [i for i in reversed(order) if error[i] > 0][:SHOWN]
    near = sorted((i for i in order if i not in (*low, *high)), key=lambda i: abs(error[i]))
    parts = {"scored too high": high, "scored too low": low, "scored right": near[:SHOWN]}
    table = [
        {
            "which": which,
            "prompt": said(rows[i]["prompt"]),
            "answer": said(rows[i]["completion"]),
            "score": scores[i],
            "rating": ratings[i],
        }
        for which, part in parts.items()
        for i in part
    ]
    stage.report(f"samples-{split}", table=table)


def auc(scores, positive) -> float:
    """Probability that a positive scores above a negative, ties half; NaN with one class only."""
    from stages.measures.reward_model import mid_ranks

    positive = np.asarray(positive, bool)
    n, m = int(positive.sum()), int((~positive).sum())
    return float((mid_ranks(scores)[positive].sum() - n * (n + 1) / 2) / (n * m)) if n and m else math.nan


def judge_labels(stage, scorer, rows, split, probe_pairs=0) -> dict[str, float]:
    """Accuracy, AUC and calibration against good / bad labels; a logit is read through the sigmoid, a probability as it
    is.
    """
    from stages.reporting.reports import calibration_diagram

    scores = np.array(scorer.score([Response(r["prompt"], r["completion"], row=r) for r in rows]), float)
    keep = ~np.isnan(scores)
    rows, scores = [r for r, k in zip(rows, keep) if k], scores[keep]
    label = np.array([bool(r["label"]) for r in rows])
    raw = scores - scorer.bias
    p = np.clip(raw if scorer.card.objective in ("orm", "value", "t2t_point") else 1 / (1 + np.exp(-raw)), 0.0, 1.0)
    found = {
        **interval(
            stage,
            ((p > 0.5) == label).astype(float),
            [r.get("prompt_id") or r["row_id"] for r in rows],
            "accuracy",
            split,
        ),
        "auc": auc(scores, label),
        "base_rate": float(label.mean()),
        "brier": statistics.brier(p, label),
        "rows": float(len(rows)),
        "ece": statistics.calibration_error(np.where(p > 0.5, p, 1 - p), (p > 0.5) == label),
    }
    stage.report(
        f"calibration-{split}",
        png=calibration_diagram(
            np.where(p > 0.5, p, 1 - p).tolist(),
            ((p > 0.5) == label).astype(float).tolist(),
            title=f"Reward model calibration ({split})",
        ),
    )
    show(
        stage,
        split,
        rows,
        (p - 0.5) * np.where(label, 1.0, -1.0),
        lambda i: {"answer": said(rows[i]["completion"]), "good": bool(label[i]), "P(good)": p[i]},
    )
    return {k: v for k, v in found.items() if not math.isnan(v)}


def judge_steps(stage, scorer, rows, split, probe_pairs=0) -> dict[str, float]:
    """Step accuracy and AUC (of three classes also that of each against the others), whether the first wrong step is
    found, and the solution score against the final answer. A neutral step is right or wrong as the score counts it
    (``neutral_as``)."""
    separator, neutral_as = scorer.card.options["separator"], scorer.card.options.get("neutral_as", "positive")
    least = 1 if neutral_as == "negative" else 0
    responses = [
        Response(r["prompt"], [{"role": "assistant", "content": separator.join(r["completions"])}], row=r) for r in rows
    ]
    p, right, first, solution, final, of_class, given, texts = [], [], [], [], [], [], [], []
    for row, classes, score in zip(rows, scorer.step_classes(responses), scorer.score(responses)):
        read = positive(classes, neutral_as).tolist() if classes else []
        parts = [len(split_steps(step, separator)) for step in row["completions"]]
        ends = np.cumsum(parts) - 1  # a step may hold the separator (label_steps), and is read in parts
        known = [
            (end, label, step)
            for n, end, label, step in zip(parts, ends, row["labels"], row["completions"])
            if n and end < len(read)
        ]
        steps, labels = [read[end] for end, _, _ in known], [label >= least for _, label, _ in known]
        of_class += [classes[end] for end, _, _ in known]
        given += [label for _, label, _ in known]
        texts += [{"prompt": row["prompt"], "step": step} for _, _, step in known]
        p += steps
        right += labels
        if not all(labels):
            first.append(float(labels.index(False) == next((i for i, q in enumerate(steps) if q <= 0.5), -1)))
        if row.get("solution_correct") is not None and not math.isnan(score):
            solution.append(score)
            final.append(row["solution_correct"])
    if not p:
        return {}
    p, right = np.array(p), np.array(right)
    found = {
        "accuracy": float(((p > 0.5) == right).mean()),
        "step_auc": auc(p, right),
        "step_base_rate": float(right.mean()),
        "steps": float(len(p)),
        "ece": statistics.calibration_error(np.where(p > 0.5, p, 1 - p), (p > 0.5) == right),
        "solution_auc": auc(solution, final) if solution else math.nan,
    }
    if first:
        found["first_error_accuracy"] = float(np.mean(first))
    if len(of_class[0]) == 3:
        for k, name in enumerate(("wrong", "neutral", "right")):
            found[f"step_auc_{name}"] = auc([c[k] for c in of_class], np.array(given) == k - 1)
    show(
        stage,
        split,
        texts,
        (p - 0.5) * np.where(right, 1.0, -1.0),
        lambda i: {"step": texts[i]["step"], "right": bool(right[i]), "P(right)": p[i]},
    )
    return {k: v for k, v in found.items() if not math.isnan(v)}


#: Rows of each sort on the report.
SHOWN = 3


def show(stage, split: str, rows: Sequence[dict], certainty: Sequence[float], shown: Callable[[int], dict]) -> None:
    """The table ``samples-SPLIT`` of the report: the rows that the model is most wrong about, those that it is surest
    of and right, and those that it is least sure of.

    Args:
        certainty: of each row how sure the model is of what the row says, below 0 where it says the opposite; of
            ratings minus the error.
        shown: the columns of the row at a place.
    """
    order = sorted(range(len(rows)), key=lambda i: certainty[i])
    wrong = [i for i in order if certainty[i] < 0][:SHOWN]
    right = [i for i in reversed(order) if certainty[i] > 0][:SHOWN]
    near = sorted((i for i in order if i not in (*wrong, *right)), key=lambda i: abs(certainty[i]))
    parts = {"most confident mistake": wrong, "surest and right": right, "least sure": near[:SHOWN]}
    table = [
        {"which": which, "prompt": said(rows[i]["prompt"]), **shown(i)} for which, part in parts.items() for i in part
    ]
    if table:
        stage.report(f"samples-{split}", table=table)


def said(messages: Sequence[dict] | None) -> str:
    """The last message of a prompt or an answer."""
    return (messages[-1].get("content") or "") if messages else ""


def sample_blocks(stage, splits: Iterable[str]) -> list[tuple[str, str]]:
    """The parts of a report page with what :func:`show` published of these splits."""
    from stages.reporting.reports import sample_table
    from storage.files import read_json

    tables = {split: read_json(stage.workdir / "reports" / f"samples-{split}.json", None) for split in splits}
    return [
        (f"Held-out rows that it is wrong about, sure of and unsure of ({split})", sample_table(table, limit=160))
        for split, table in tables.items()
        if table
    ]


def report_pairs(stage, split, margin, scores, lengths, confidence, terciles) -> None:
    if stage.rank != 0:  # one rank draws
        return
    from stages.reporting.reports import calibration_diagram, scatter

    stage.report(
        f"calibration-{split}", png=calibration_diagram(*confidence, title=f"Reward model calibration ({split})")
    )
    stage.report(
        f"margins-{split}", png=_histogram({"pairs": margin.tolist()}, "Score difference chosen - rejected", "margin")
    )
    stage.report(f"length-terciles-{split}", table=terciles)
    if scores is not None:
        stage.report(
            f"score-against-length-{split}",
            png=scatter(
                lengths.ravel().tolist(),
                scores.ravel().tolist(),
                title="Score against length",
                xlabel="tokens",
                ylabel="score",
            ),
        )


def _histogram(groups, title, xlabel):
    from stages.reporting.reports import histogram

    return histogram(groups, title=title, xlabel=xlabel)


def fooled_by(found: dict[str, float]) -> dict[str, float]:
    """Probe -> share of held-out pairs in which it scored at least as high as the chosen answer, where that is more than
    ``FOOLED`` (reward.hack_probes).
    """
    probes = {name.removeprefix("probe/"): share for name, share in found.items() if name.startswith("probe/")}
    return {name: share for name, share in probes.items() if share > FOOLED}


def warn_of_fooled(stage, components, scorers) -> None:
    """What the cards of the reward models that count say of probes that fooled them when they were trained."""
    for component in components:
        card = getattr(scorers.get(component.name), "card", None)
        fooled = card.options.get("held_out", {}).get("fooled_by") if card is not None and component.counts else None
        if fooled:
            listed = ", ".join(
                f"{name} {share:.0%}" for name, share in sorted(fooled.items(), key=lambda one: -one[1])[:3]
            )
            stage.warn(
                "reward_model_fooled",
                f"The reward model of {component.name!r} scores spoiled answers at least as high as chosen ones ({listed}),"
                " which a policy may find. Train it again with spoiled_fraction=0.1 (stage reward_model), hold the policy"
                " near its start (beta, kl_coef), or watch held-out answers (eval_prompts=64 eval_every=10).",
            )


def warn_about(stage, found: dict[str, float], train_accuracy: float | None = None, objective: str = "bt") -> None:
    """Named warnings from held-out metrics; each says what to do, with settings that the objective reads. Of fewer than
    :data:`FEW` rows only that they are few.
    """
    if (n := count_of(found)) < FEW:
        stage.warn(
            "few_held_out_rows",
            f"Only {n} held-out rows judge this reward model, too few for its accuracy, calibration or dependence on"
            " length to mean anything. Hold out more (validation_fraction of the step that made the data), or evaluate"
            " it on other pairs (posttrain stage evaluate).",
        )
        return
    accuracy = found.get("accuracy")
    if accuracy is not None and accuracy <= 0.55 and "steps" not in found:
        stage.warn(
            "reward_model_near_chance",
            f"Held-out accuracy is {accuracy:.3f} (texts expect 0.65-0.80). Raise learning_rate or "
            "num_train_epochs, add rows, or look at the data's bias report.",
        )
    elif "pairs" in found and found.get("accuracy_ci_high", 1.0) < EXPECTED[0]:
        stage.warn(
            "reward_model_accuracy_low",
            f"Held-out accuracy is {accuracy:.3f}, and {EXPECTED[0]:.2f} to {EXPECTED[1]:.2f} is usual for people's"
            " comparisons: the labels are noisy, or too little was learned. Look at the agreement of annotators in the"
            " ingest report, train longer, or add rows.",
        )
    elif "pairs" in found and EXPECTED[1] < found.get("accuracy_ci_low", 0.0) and accuracy <= LEAK:
        stage.warn(
            "reward_model_accuracy_high",
            f"Held-out accuracy is {accuracy:.3f}, and {EXPECTED[0]:.2f} to {EXPECTED[1]:.2f} is usual for people's"
            " comparisons: these pairs are easier, or something beside the answer's quality tells them apart. Look at"
            " length, source and format of chosen against rejected in the ingest report.",
        )
    base = found.get("base_rate", 0.5)
    common = max(base, 1 - base) if "base_rate" in found else 0.0
    if accuracy is not None and accuracy <= common and found.get("auc", 0.5) < 0.65:  # no auc: one label only
        stage.warn(
            "labels_hardly_differ",
            f"{common:.0%} of the held-out rows are labelled {'good' if base >= 0.5 else 'bad'}: always saying so is as"
            f" right as the model ({accuracy:.3f}), which is not known to tell good from bad. Give rows of both labels:"
            " prompts of medium difficulty, answers of an earlier policy, or a greater replay_fraction.",
        )
    elif accuracy is not None and accuracy > max(LEAK, common):
        stage.warn(
            "reward_model_too_good",
            "Held-out accuracy above 0.98 suggests a leak: check length and source-model shares of chosen against "
            "rejected in the ingest report.",
        )
    if train_accuracy is not None and accuracy is not None and train_accuracy > 0.99 and accuracy < 0.9:
        stage.warn(
            "reward_model_overfits",
            f"Training accuracy is {train_accuracy:.3f}, held-out {accuracy:.3f}: train for fewer epochs, lower "
            "learning_rate, or add prompts.",
        )
    if abs(found.get("score_length_correlation_within_prompt", 0.0)) > 0.5:
        stage.warn(
            "reward_follows_length",
            f"Within a prompt, scores correlate {found['score_length_correlation_within_prompt']:+.2f} with length."
            " Balance lengths in the data, or add a length component to the reward.",
        )
    longer = found.get("chosen_longer_share", 0.0)
    if accuracy is not None and max(longer, 1 - longer) >= accuracy and "pairs" in found:
        stage.warn(
            "length_does_as_well",
            f"Always choosing the {'longer' if longer >= 0.5 else 'shorter'} answer is right in"
            f" {max(longer, 1 - longer):.3f} of the held-out pairs, the model in {accuracy:.3f}; look at"
            " length_matched_accuracy.",
        )
    if found.get("ece", 0.0) > 0.15:
        stage.warn(
            "reward_model_miscalibrated",
            f"Expected calibration error is {found['ece']:.3f}: its probabilities are not to be taken literally. Train"
            " for fewer steps"
            + (
                ", or use label_smoothing or soft labels."
                if objective in READ_BY["label_smoothing"]
                else ", or on more rows."
            ),
        )
    if fooled := fooled_by(found):
        worst = max(fooled, key=fooled.get)
        stage.warn(
            "reward_model_fooled",
            f"The probe {worst} scores at least as high as the chosen answer in"
            f" {fooled[worst]:.0%} of cases"
            + (f", and {len(fooled) - 1} more in more than {FOOLED:.0%}. " if len(fooled) > 1 else ". ")
            + (
                "Train it with spoiled_fraction=0.1 (pairs), or add"
                if objective in READ_BY["spoiled_fraction"]
                else "Add"
            )
            + " such answers as rejected ones, before optimising against this model.",
        )
    if found.get("chosen_from_stronger_model", 0.0) > 0.9:
        stage.warn(
            "labels_name_the_model",
            f"In {found['chosen_from_stronger_model']:.0%} of the pairs the chosen answer comes from the stronger"
            " model: the reward model can learn who wrote it. Mix answers of equal models.",
        )
