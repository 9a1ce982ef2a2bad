"""GRAPE: rewards from rubrics (row ``reward.rubric`` of ``tests/methods.yaml``), the arithmetic only.

A prompt belongs to a category, a category has a rubric: items with weights omega (sum 1). Every sample gets a score tau
and a confidence phi per item. Confidence is averaged over the whole *category* (phibar), the baseline over the
*question*::

    R_i = rho * sum_j omega_j tau_ij phibar_j / sum_j phibar_j        rho = number of items

Everything is float64 numpy on ragged lists ``[samples][items of the sample's category]``; None is an item that could
not be scored.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from stages.settings import whole_part
from stages.spec import ConfigError

NORMALIZERS = ("paper", "weighted", "plain")
INVALID_POLICIES = ("drop_sample", "drop_item", "zero_score", "error")


class RubricError(ConfigError):
    """A rubric, or what a judge made of it, cannot be used; the text says what to write instead."""


# -- rubrics (GRAPE-RUBRIC) --------------------------------------------------------------------------------------------


def atomise_weights(parent_weight: float, num_sub_items: int, keep_residual: bool = True) -> tuple[list[float], float]:
    """(weights of the sub-items, weight of the residual): the parent's weight in equal parts, so that the category
    still sums to 1.
    """
    parts = num_sub_items + bool(keep_residual)
    if num_sub_items < 1:
        raise RubricError("an item is split into at least one sub-item; write sub_items, or leave the item whole")
    return [parent_weight / parts] * num_sub_items, parent_weight / parts if keep_residual else 0.0


def check_weights(weights: Sequence[float]) -> str | None:
    """What is wrong with a category's weights, None when they are >= 0 and sum to 1 within 1e-6."""
    if any(not math.isfinite(w) or w < 0 for w in weights):
        return f"weights {list(weights)} must be finite and >= 0"
    total = math.fsum(weights)
    if abs(total - 1.0) <= 1e-6:
        return None
    shares = "; write each of them > 0" if total <= 0 else "; write " + ", ".join(f"{w / total:.6g}" for w in weights)
    return f"weights sum to {total:.6g} and must sum to 1{shares}"


# -- what a judge says (GRAPE-SCORE) -----------------------------------------------------------------------------------

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
_FIELD = re.compile(r"^[ \t]*(reasoning|score|confidence):", re.IGNORECASE | re.MULTILINE)


def parse_item(text: str) -> tuple[dict | None, str | None]:
    """({"reasoning", "score", "confidence"}, None), or (None, why not).

    Reads ``Reasoning: .. Score: .. Confidence: ..`` on lines of their own, or a JSON object with these keys in this
    order: reasoning that comes after the score did not lead to it, and a second score contradicts the first. Score and
    confidence outside [0, 1] are refused, never clipped.
    """
    text = text.strip()
    fenced = re.fullmatch(r"```(?:json)?\s*(.*?)\s*```", text, re.DOTALL)
    text = fenced[1] if fenced else text
    if not text:
        return None, "the answer is empty"
    if text.startswith("{"):
        said: list[str] = []  # keys of the outermost object, which is read last; json would keep the last of two values

        def read(pairs):
            said[:] = [key for key, _ in pairs]
            return dict(pairs)

        try:
            found = json.loads(text, object_pairs_hook=read)
        except ValueError as error:
            return None, f"the JSON object cannot be read ({error})"
        if [k for k in said if k in ("reasoning", "score", "confidence")] != ["reasoning", "score", "confidence"]:
            return None, "the keys must be reasoning, score, confidence, each once and in this order"
        numbers = found["score"], found["confidence"]
        if any(isinstance(v, bool) or not isinstance(v, (int, float)) for v in numbers):
            return None, "score and confidence must be numbers"
        if not isinstance(found["reasoning"], str):
            return None, "reasoning must be a text"
        reasoning = found["reasoning"]
    else:
        marks = list(_FIELD.finditer(text))
        if [m[1].lower() for m in marks] != ["reasoning", "score", "confidence"] or marks[0].start():
            return (
                None,
                "it must consist of Reasoning:, Score: and Confidence:, each once and on its own line, in this order",
            )
        reasoning, *values = [
            text[m.end() : end].strip() for m, end in zip(marks, [m.start() for m in marks[1:]] + [len(text)])
        ]
        if not all(map(_NUMBER.fullmatch, values)):
            return None, "score and confidence must be numbers, with nothing behind them"
        numbers = [float(v) for v in values]
    for name, value in zip(("score", "confidence"), numbers):
        if not 0.0 <= value <= 1.0:
            return None, f"{name} {value} is outside [0, 1]"
    return {"reasoning": reasoning, "score": float(numbers[0]), "confidence": float(numbers[1])}, None


def squash(values: Sequence[float], mode: str, alone: bool) -> list[float]:
    """Scores of a reward-model item: ``auto`` is raw where it is the category's only item (then GRAPE is mean-centred
    GRPO), else ``sigmoid``; ``minmax`` over the values given, 0.5 where all are equal."""
    x = np.asarray(values, float)
    mode = ("raw" if alone else "sigmoid") if mode == "auto" else mode
    if mode == "raw" or not x.size:
        return x.tolist()
    if mode == "sigmoid":
        return (1.0 / (1.0 + np.exp(-x.clip(-700, 700)))).tolist()
    span = x.max() - x.min()
    return ((x - x.min()) / span).tolist() if span > 0 else [0.5] * len(x)


# -- rewards (GRAPE-REWARD) --------------------------------------------------------------------------------------------


def category_confidence(
    confidences: Sequence[Sequence[float | None]], categories: Sequence[str]
) -> dict[str, list[float]]:
    """phibar: mean confidence of every item over all samples of its category in which it was scored; 0 where it never
    was.
    """
    out = {}
    for category in dict.fromkeys(categories):
        rows = [c for c, own in zip(confidences, categories) if own == category]
        columns = [[v for v in column if v is not None] for column in zip(*rows)]
        out[category] = [math.fsum(column) / len(column) if column else 0.0 for column in columns]
    return out


def coefficients(
    weights: Sequence[float], confidence: Sequence[float], normalizer: str = "paper"
) -> tuple[np.ndarray, bool]:
    """(factor of every item's score, whether no item has confidence). ``paper``: rho omega phibar / sum phibar, which
    can sum to more than 1 for unequal weights; ``weighted``: omega phibar / sum omega phibar; ``plain``: omega. Without
    any confidence: omega (the limit of equal ones)."""
    if normalizer not in NORMALIZERS:
        raise RubricError(f"normalizer={normalizer!r} is unknown; write one of: {', '.join(NORMALIZERS)}")
    w, phi = np.asarray(weights, float), np.asarray(confidence, float)
    zero = not phi.sum() > 0
    divisor = phi.sum() if normalizer == "paper" else (w * phi).sum()
    if zero or normalizer == "plain" or not divisor > 0:
        return w, zero
    return (len(w) if normalizer == "paper" else 1.0) * w * phi / divisor, False


def rewards(
    scores: Sequence[Sequence[float | None]],
    confidences: Sequence[Sequence[float | None]],
    categories: Sequence[str],
    weights: Mapping[str, Sequence[float]],
    normalizer: str = "paper",
    invalid_policy: str = "drop_sample",
) -> tuple[list[float | None], dict, set]:
    """(reward of every sample, None where it has none; phibar by category; categories without any confidence).

    invalid_policy, for a sample with an item that could not be scored: ``drop_sample`` no reward; ``drop_item`` omega
    and rho over its other items; ``zero_score`` the item counts 0; ``error`` raises RubricError. Its items that were
    scored count in phibar either way.
    """
    if invalid_policy not in INVALID_POLICIES:
        raise RubricError(f"invalid_policy={invalid_policy!r} is unknown; write one of: {', '.join(INVALID_POLICIES)}")
    known = [[None if s is None else c for s, c in zip(*row)] for row in zip(scores, confidences)]
    phibar, out, zero = category_confidence(known, categories), [], set()
    for tau, category in zip(scores, categories):
        w, phi = np.asarray(weights[category], float), np.asarray(phibar[category])
        ok = np.array([v is not None for v in tau])
        if not ok.all() and invalid_policy == "error":
            raise RubricError(
                f"an item of category {category!r} could not be scored; look at the item's error, or write"
                " invalid_policy=drop_sample"
            )
        value = np.array([0.0 if v is None else v for v in tau], float)
        if not ok.all() and invalid_policy == "drop_sample":
            out.append(None)
            continue
        if not ok.all() and invalid_policy == "drop_item":
            left = w[ok].sum()
            if not left > 0:
                out.append(None)
                continue
            w, phi, value = w[ok] / left, phi[ok], value[ok]
        factor, none = coefficients(w, phi, normalizer)
        if none:
            zero.add(category)
        out.append(float(factor @ value))
    return out, phibar, zero


# -- generation (GRAPE-GEN) --------------------------------------------------------------------------------------------


def num_improve(
    num_generations: int, share: float, iteration: int, has_prior: bool, draws: Sequence[float] | None = None
) -> int:
    """How many of the G responses of a question improve an earlier one: a fixed share, rounded down, or as many of the
    uniform ``draws`` as are below it. None in iteration 0 and without an earlier response."""
    if iteration == 0 or not has_prior:
        return 0
    if draws is not None:
        return sum(u < share for u in draws[:num_generations])
    return whole_part(share, num_generations)


# -- rubric review (GRAPE-OPS) -----------------------------------------------------------------------------------------


def review(rows: Sequence[Mapping], threshold: float = 0.6) -> list[dict]:
    """What each rubric item is worth, one dict per item, from scored items: dicts with category, item_id, item_version,
    sample, question, score, confidence (None = not scored) and omega.

    mean, variance: of the scores (ddof 0). ties: share of pairs of answers to one question that it scores alike.
    agreement: share of the other pairs that it orders as the rest of the rubric does (a tie there counts half), None
    with nothing to compare. discriminates: whether it ever tells two answers to a question apart. phi_bar, flagged:
    mean confidence, and whether it is below the threshold.

    Raises RubricError for two versions of one item: their scores do not compare.
    """
    items: dict[tuple[str, str], list[Mapping]] = {}
    for row in rows:
        items.setdefault((row["category"], row["item_id"]), []).append(row)
    per_sample: dict[tuple, dict] = {}
    for row in rows:
        if row["score"] is not None:
            per_sample.setdefault((row["category"], row["sample"]), {})[row["item_id"]] = (row["omega"], row["score"])
    out = []
    for (category, item), own in items.items():
        versions = sorted({row["item_version"] for row in own})
        if len(versions) > 1:
            raise RubricError(
                f"item {item!r} of category {category!r} was scored in the versions {', '.join(versions)}, which do not"
                " compare; score all samples with one rubric first (stage rescore)"
            )
        valid = [row for row in own if row["score"] is not None]
        tau = np.array([row["score"] for row in valid], float)
        pairs = same = agree = compared = 0.0
        by_question: dict = {}
        for row in valid:
            rest = [v for name, v in per_sample[category, row["sample"]].items() if name != item]
            total = sum(w for w, _ in rest)
            by_question.setdefault(row["question"], []).append(
                (row["score"], sum(w * s for w, s in rest) / total if total > 0 else None)
            )
        for answers in by_question.values():
            for (a, rest_a), (b, rest_b) in itertools.combinations(answers, 2):
                pairs += 1
                if a == b:
                    same += 1
                elif rest_a is not None and rest_b is not None:
                    compared += 1
                    agree += 0.5 if rest_a == rest_b else float((a > b) == (rest_a > rest_b))
        phi = [row["confidence"] for row in valid]
        phibar = math.fsum(phi) / len(phi) if phi else 0.0
        out.append(
            {
                "category": category,
                "item_id": item,
                "item_version": versions[0],
                "n": len(own),
                "mean": float(tau.mean()) if tau.size else None,
                "variance": float(tau.var()) if tau.size else None,
                "unscorable": 1.0 - len(valid) / len(own),
                "ties": same / pairs if pairs else None,
                "agreement": agree / compared if compared else None,
                "discriminates": bool(pairs > same),
                "phi_bar": phibar,
                "flagged": phibar < threshold,
            }
        )
    return out


# -- routing (REWARD-ROUTER) -------------------------------------------------------------------------------------------


def route(
    rule: float | None,
    learned: float | None,
    learned_confidence: float | None,
    judge: float | None,
    threshold: float = 0.7,
) -> tuple[float | None, str | None]:
    """(reward, tier): the rule where it applies, else the reward model where it is sure enough, else the judge; (None,
    None) without any.
    """
    if rule is not None:
        return rule, "rule"
    if learned is not None and (learned_confidence or 0.0) >= threshold:
        return learned, "learned"
    return (judge, "judge") if judge is not None else (None, None)
