"""Multiple choice read by likelihood: one forward over a prompt and its choices (eval.mc_letter, eval.mc_answer_text).

``letter``  the prompt shows the options and ends with "Answer:"; the choice whose letter is most probable there. A
letter's probability is that of both its
            spellings, "A" and " A", each the sum of the log-probs of its tokens where it is more than one.
``text``    the log-likelihood ll of each choice behind the question alone, under five normalisations: acc (ll), acc_norm (ll / characters), acc_bytes
            (ll / UTF-8 bytes), acc_per_token (ll / tokens), acc_mutual_info (ll - ll behind "Answer:" alone). Where a
            row names several true answers beside false ones (TruthfulQA's mc2_targets), mc2 is the share of the true
            ones of the probability of all of them.

Prompt and choice are tokenised together and split at the prompt's token count. Behind plain text a choice follows a
space; in a chat it opens the assistant's turn. The third reading, by a generated answer, is the evaluation's usual one,
with :data:`stages.verification.choices.INSTRUCTION` behind the options.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from stages.evaluation import opinions
from stages.verification.choices import LETTERS, NEUTRAL, gold_of

NORMALISATIONS = {
    "acc": "acc",
    "acc_per_char": "acc_norm",
    "acc_bytes": "acc_bytes",
    "acc_per_token": "acc_per_token",
    "acc_mutual_info": "acc_mutual_info",
}
# right answers by each reading; a value per item
RATES = ("mc_letter_acc", *(f"mc_text_{name}" for name in NORMALISATIONS.values()))
HEADLINES = {
    "mc_letter_acc": "right choices, by the probability of their letter",
    "mc_letter_brier": "squared error of the probabilities over the letters, 0 to 2",
    "mc_letter_mass": "probability on any of the letters; where it is small the model does not answer by letter",
    "mc_text_acc": "right choices, by log-likelihood of their text",
    "mc_text_acc_norm": "the same per character",
    "mc_text_acc_bytes": "the same per UTF-8 byte",
    "mc_text_mc2": "probability of the true answers, of that of the true and the false ones (TruthfulQA)",
    "mc_text_acc_per_token": "the same per token",
    "mc_text_acc_mutual_info": "the same minus the text's own log-likelihood",
}


def read(
    rows: Sequence[dict], readings: Sequence[str], shots, renderer, logps_of, room: int | None
) -> list[tuple[dict, str, dict]]:
    """(row, reading, result) of every row and reading; a result is {"unscorable": why} or {"choice", "correct",
    "tokens", and what was measured}.

    ``shots``: shows a row under a reading (``few_shot.Shots``). ``logps_of``: items -> per item, per response,
    log-probs of its tokens. ``room``: positions of the model, None = any number.
    """
    asked: list[tuple[list[int], list[int]]] = []  # (prompt ids, ids behind them)
    plans = []
    for row in rows:
        for reading in (name for name in readings if name == "letter" or not opinions.of(row)):
            prompt = shots.show(row, reading)
            plain = isinstance(prompt, str)
            space = " " if plain else ""
            texts = row["choices"]
            if reading == "letter":
                said = [
                    [
                        renderer.continuation_ids(prompt, spelling)
                        for spelling in spellings(prompt, LETTERS[i], renderer)
                    ]
                    for i in range(len(texts))
                ]
            else:
                neutral = NEUTRAL if plain else [{"role": "user", "content": NEUTRAL}]
                said = [
                    [renderer.continuation_ids(before, space + text) for before in (prompt, neutral)] for text in texts
                ]
                said += [[renderer.continuation_ids(prompt, space + text)] for text in truths_of(row)[0]]
            longest = max(len(before) + len(behind) for each in said for before, behind in each)
            fits = room is None or longest <= room
            plans.append((row, reading, said, longest, len(asked) if fits else None))
            asked += [pair for each in said for pair in each] if fits else []
    sums = _sums(asked, logps_of)
    found = []
    for row, reading, said, longest, start in plans:
        if start is None:
            found.append(
                (
                    row,
                    reading,
                    {"unscorable": f"prompt and choice have {longest} tokens, the model has {room} positions"},
                )
            )
            continue
        values, at = [], start
        for each in said:
            values.append(sums[at : at + len(each)])
            at += len(each)
        found.append((row, reading, (_letter if reading == "letter" else _text)(row, values, said)))
    return found


def truths_of(row: dict) -> tuple[list[str], list[bool]]:
    """(answers, which of them are true) of ``mc2_targets`` in a row's extra_json; none where it has none, or not both
    true and false ones.
    """
    extra = json.loads(row["extra_json"]) if row.get("extra_json") and '"mc2_targets"' in row["extra_json"] else {}
    found = extra.get("mc2_targets") if isinstance(extra.get("mc2_targets"), dict) else {}
    texts, labels = found.get("choices") or [], found.get("labels") or []
    fits = (
        len(texts) == len(labels)
        and all(isinstance(text, str) and text.strip() for text in texts)
        and {*labels} == {0, 1}
    )
    return (texts, [label == 1 for label in labels]) if fits else ([], [])


def spellings(prompt, letter: str, renderer) -> tuple[str, ...]:
    """How a letter may be written behind a prompt: with a space and without, once where both are the same tokens. One
    that merges with the prompt's last token is none, unless both do."""
    forms = {}
    for form in (" " + letter, letter):
        alone, whole = renderer.joint_ids(prompt, form)
        if len(whole) > len(alone) and whole[: len(alone)] == alone:
            forms.setdefault(tuple(whole), form)
    return tuple(forms.values()) or ((" " if isinstance(prompt, str) else "") + letter,)


def _sums(asked: Sequence[tuple[list[int], list[int]]], logps_of) -> list[float]:
    """Log-likelihood of the ids behind each prompt; equal prompts are computed once, and equal continuations of
    them.
    """
    from stages.batching import make_item

    shared: dict[tuple[int, ...], dict[tuple[int, ...], None]] = defaultdict(dict)
    for before, behind in asked:
        shared[tuple(before)][tuple(behind)] = None
    items = [
        make_item(str(i), before, list(map(list, behinds)), [[1] * len(behind) for behind in behinds], by_response=())
        for i, (before, behinds) in enumerate(shared.items())
    ]
    values = {
        before: {behind: math.fsum(logps) for behind, logps in zip(behinds, each)}
        for (before, behinds), each in zip(shared.items(), logps_of(items))
    }
    return [values[tuple(before)][tuple(behind)] for before, behind in asked]


def _gold(row: dict) -> tuple[int | None, str | None]:
    from stages.verification.golds import BadGold

    try:
        return gold_of(row), None
    except BadGold as error:
        return None, str(error)


def _letter(row: dict, values: list[list[float]], said) -> dict:
    from stages.measures.suites import mc_letter

    asked = opinions.of(row)
    gold, reason = (0, None) if asked else _gold(row)
    if gold is None:
        return {"unscorable": reason}
    logliks = [float(np.logaddexp.reduce(each)) for each in values]
    result = mc_letter(logliks, gold)
    if asked:
        if reason := opinions.wrong(asked["groups"], len(row["choices"])):
            return {"unscorable": reason}
        return {
            "choice": result["argmax"],
            "loglik": logliks,
            "probabilities": result["prob_over_letters"],
            "mass": float(np.exp(np.logaddexp.reduce(logliks))),
            **asked,
        }
    best = result["argmax"]
    return {
        "choice": best,
        "correct": best == gold,
        "tokens": max(len(behind) for _, behind in said[best]),
        "loglik": logliks,
        "probabilities": result["prob_over_letters"],
        "brier": result["brier"],
        "mass": float(np.exp(np.logaddexp.reduce(logliks))),
        "several_tokens": any(len(each[0][1]) > 1 for each in said),
    }


def _text(row: dict, values: list[list[float]], said) -> dict:
    from stages.measures.suites import mc_answer_text

    gold, reason = _gold(row)
    if gold is None:
        return {"unscorable": reason}
    own, true = len(row["choices"]), truths_of(row)[1]
    more = [each[0] for each in values[own:]]
    values, said = values[:own], said[:own]
    logliks, counts = [each[0] for each in values], [len(each[0][1]) for each in said]
    result = mc_answer_text(logliks, row["choices"], counts, gold, [each[1] for each in values])
    best = result["acc"]["argmax"]
    mc2 = (
        {
            "mc2": float(
                np.exp(
                    np.logaddexp.reduce([ll for ll, is_true in zip(more, true) if is_true]) - np.logaddexp.reduce(more)
                )
            )
        }
        if more
        else {}
    )
    return {
        "choice": best,
        "correct": best == gold,
        "tokens": counts[best],
        "loglik": logliks,
        "normalised": {name: bool(result[key]["correct"]) for key, name in NORMALISATIONS.items()},
        **mc2,
    }


# -- metrics -----------------------------------------------------------------------------------------------------------


def values() -> dict[str, tuple]:
    """{metric: (modes, value of a record)} in the form of ``scores``."""
    table = {"mc_letter_acc": (("letter",), lambda r: None if r["correct"] is None else float(r["correct"]))}
    for name in ("brier", "mass"):
        table[f"mc_letter_{name}"] = (("letter",), lambda r, name=name: r.get(name))
    table["mc_text_mc2"] = (("text",), lambda r: r.get("mc2"))
    for name in NORMALISATIONS.values():
        table[f"mc_text_{name}"] = (
            ("text",),
            lambda r, name=name: None if not r.get("normalised") else float(r["normalised"][name]),
        )
    return table


def metrics_of(records: Sequence[dict], seed: int) -> dict:
    """Accuracy over the items (micro) by each reading, Brier score and mass of the letters."""
    from stages.evaluation.scores import average, item_values, share

    found = {}
    for name in values():
        measured = item_values(records, name)
        if measured:
            columns = list(map(list, zip(*measured.values())))
            found[name] = share(*columns) if name in RATES else average(*columns, seed)
    return found


def macro(records: Sequence[dict], metrics: Sequence[str]) -> dict:
    """``METRIC_macro``: the plain mean over categories of their accuracies, whatever their sizes, for records of two
    categories or more (MMLU).

    Its error is that of independent categories, sqrt(sum se^2) / categories; none where a category has a single item.
    """
    from stages.evaluation.scores import Metric, item_values, standard_error
    from stages.measures import statistics

    groups = defaultdict(list)
    for record in records:
        if record.get("category") is not None:
            groups[record["category"]].append(record)
    found = {}
    for metric in metrics:
        parts = [measured for part in groups.values() if (measured := item_values(part, metric))]
        if len(parts) < 2:
            continue
        means = [float(np.mean([value for value, _ in part.values()])) for part in parts]
        errors = [standard_error(*map(list, zip(*part.values()))) for part in parts]
        value = float(np.mean(means))
        se = None if None in errors else math.sqrt(math.fsum(error * error for error in errors)) / len(parts)
        # Wilson's interval at the effective sample size, as in scores.share
        n = value * (1 - value) / se**2 if se and se > 1e-12 else sum(map(len, parts))
        low, high = (None, None) if se is None else statistics.wilson(value * max(1.0, n), max(1.0, n))
        found[f"{metric}_macro"] = Metric(value, len(parts), se, low and float(low), high and float(high))
    return found


def warnings(stage, records: Sequence[dict], metrics: dict) -> None:
    """Named warnings about readings that say little."""
    read_ = [r for r in records if r["mode"] in ("letter", "text")]
    lost = [r for r in read_ if r["correct"] is None and not r.get("groups")]
    if lost:
        stage.warn(
            "choices_unscorable",
            f"{len(lost)} of {len(read_)} readings of choices have no verdict and are in no mean. Look at"
            f" unscorable in the samples and mend these prompts; the first reason: {lost[0]['unscorable']['choices']}",
        )
    mass = metrics.get("mc_letter_mass")
    if mass is not None and mass.value < 0.1:
        stage.warn(
            "letters_improbable",
            f"The model puts {mass.value:.2g} of its probability on the letters of the choices, so mc_letter_acc says"
            " little. Show examples (few_shot=5), or read mc_text_acc_norm or the generated answers instead.",
        )
    if any(r.get("several_tokens") for r in read_):
        stage.warn(
            "letters_of_several_tokens",
            'The tokenizer writes some letters as several tokens behind "Answer:"; their log-probs were summed. Read'
            " mc_text_acc_norm beside mc_letter_acc.",
        )
