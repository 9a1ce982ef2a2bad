"""Do right answers survive a change that should not matter? (eval.perturbed: changed numbers with a recomputed answer,
renamed entities, reordered options)

Prompts name the original and its perturbed forms by one ``pair_id``, and each perturbed form its ``perturbation``
(numbers, names, ...; the original has none, or "original"). With ``perturb_options=true`` every prompt with choices is
also asked with its options in another order. A model that knows the items rather than the matter loses accuracy from
original to perturbed.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from stages.evaluation.scores import Metric, average, item_values, share
from stages.measures import statistics, suites

#: What is compared where both forms have it.
METRICS = ("accuracy", "greedy_accuracy", "mc_letter_acc", "mc_text_acc_norm")


def asked_of(row: dict) -> dict:
    """{"pair", "perturbation"} of a prompt row that has a pair_id and is no side of a mirrored pair; perturbation "" is
    the original.
    """
    extra = json.loads(row["extra_json"]) if row.get("extra_json") else {}
    if not isinstance(extra, dict) or extra.get("pair_id") is None or "side" in extra or "perturbation" not in extra:
        return {}
    name = str(extra["perturbation"] or "")
    return {"pair": str(extra["pair_id"]), "perturbation": "" if name == "original" else name}


def check(rows: Sequence[dict]) -> None:
    """Refuse pairs with two originals, or two prompts of one perturbation."""
    from stages.spec import ConfigError

    seen = set()
    for row in rows:
        found = asked_of(row)
        one = (found.get("pair"), found.get("perturbation"), row.get("order"))
        if found and one in seen:
            raise ConfigError(
                f"evaluate: pair_id {one[0]!r} has two prompts"
                f" {f'with the perturbation {one[1]!r}' if one[1] else 'without a perturbation, so two originals'};"
                " give every original and its perturbed forms a pair_id of their own, and each form another name in"
                " the column perturbation"
            )
        seen.add(one)


def with_reordered(row: dict, rng) -> tuple[dict, ...]:
    """A prompt with choices, and the same with its options in another order (the letter of the answer moves along),
    paired by the original's row id. The prompt alone where its answer cannot be read or it has one option."""
    from stages.verification.choices import LETTERS, gold_of, question_of, with_options
    from stages.verification.golds import BadGold
    from storage.schema import row_id

    n = len(row["choices"])
    try:
        gold = gold_of(row)
    except BadGold:
        return (row,)
    if n < 2:
        return (row,)
    order = [int(i) for i in rng.permutation(n)]
    if order == list(range(n)):
        order = order[1:] + order[:1]
    choices = [row["choices"][i] for i in order]
    last, shown = row["prompt"][-1], with_options(question_of(row), row["choices"])
    text = last.get("content") or ""
    behind = text[len(shown) :] if text.startswith(shown) else ""  # an instruction to answer by text
    changed = {
        **row,
        "prompt": [*row["prompt"][:-1], {**last, "content": with_options(question_of(row), choices) + behind}],
        "choices": choices,
        "answer": LETTERS[order.index(gold)],
    }
    marked = lambda one, name: {
        **one,
        "extra_json": json.dumps(
            json.loads(one.get("extra_json") or "{}") | {"pair_id": row["row_id"], "perturbation": name}, sort_keys=True
        ),
    }
    return marked(row, "original"), marked(changed | {"row_id": row_id("prompts/1", changed)}, "options")


def _pairs(records: Sequence[dict], metric: str) -> dict[str, list[tuple[float, float, str]]]:
    """{perturbation: [(original, perturbed, pair)]} of the pairs whose two forms both have a value."""
    at = {r["item_id"]: (r["pair"], r["perturbation"]) for r in records if "pair" in r}
    values: dict[str, dict[str, float]] = defaultdict(dict)
    for item, (value, _) in item_values([r for r in records if "pair" in r], metric).items():
        pair, name = at[item]
        values[pair][name] = value
    found = defaultdict(list)
    for pair, forms in values.items():
        for name, value in forms.items():
            if name and "" in forms:
                found[name].append((forms[""], value, pair))
    return found


def metrics(records: Sequence[dict]) -> dict[str, Metric]:
    """``perturbed/METRIC/original``, ``/perturbed`` and ``/gap`` (original minus perturbed, paired), over all
    perturbations and by each where there are several.
    """
    found: dict[str, Metric] = {}
    if not any("pair" in r for r in records):
        return found
    for metric in METRICS:
        kinds = _pairs(records, metric)
        for suffix, rows in {
            "": [row for rows in kinds.values() for row in rows],
            **({f"/perturbation={name}": rows for name, rows in sorted(kinds.items())} if len(kinds) > 1 else {}),
        }.items():
            if rows:
                before, after, pairs = map(list, zip(*rows))
                found[f"perturbed/{metric}/original{suffix}"], found[f"perturbed/{metric}/perturbed{suffix}"] = (
                    share(before, pairs),
                    share(after, pairs),
                )
                found[f"perturbed/{metric}/gap{suffix}"] = average([a - b for a, b in zip(before, after)], pairs)
    return found


def table(records: Sequence[dict]) -> list[dict]:
    """Rows of the report: {metric, perturbation, pairs, original, perturbed, gap, and of one yes or no per form flips
    both ways and McNemar's p}.
    """
    rows = []
    for metric in METRICS if any("pair" in r for r in records) else ():
        for name, pairs in sorted(_pairs(records, metric).items()):
            before, after, clusters = map(list, zip(*pairs))
            row = {
                "metric": metric,
                "perturbation": name,
                "pairs": len(pairs),
                "original": float(np.mean(before)),
                "perturbed": float(np.mean(after)),
            }
            gap = average([a - b for a, b in zip(before, after)], clusters)
            row |= {"gap": gap.value, "low": gap.low, "high": gap.high}
            if set(before) | set(after) <= {0.0, 1.0}:
                flips = suites.perturbed_gap(before, after)
                row |= {
                    "right to wrong": flips["flip_down"],
                    "wrong to right": flips["flip_up"],
                    "McNemar p": float(statistics.mcnemar_exact(flips["flip_down"], flips["flip_up"])),
                }
            rows.append(row)
    return rows


def warn(stage, records: Sequence[dict], metrics: dict[str, Metric]) -> None:
    """Say which perturbed prompts have no original, and of a loss beyond its interval."""
    forms: dict[str, set] = defaultdict(set)
    for r in records:
        if "pair" in r:
            forms[r["pair"]].add(r["perturbation"])
    alone = sorted(pair for pair, names in forms.items() if "" not in names or len(names) < 2)
    if alone:
        stage.warn(
            "perturbed_prompts_alone",
            f"{len(alone)} pair_ids have no original or no perturbed form in this split"
            f" ({', '.join(alone[:5])}{' ...' if len(alone) > 5 else ''}) and are in no comparison. Give both in the"
            " same split, the original without a perturbation.",
        )
    for name, m in metrics.items():
        if name.startswith("perturbed/") and name.endswith("/gap") and m.low is not None and m.low > 0:
            stage.warn(
                "memorised",
                f"{name.split('/')[1]} falls by {m.value:.3f} [{m.low:.3f}, {m.high:.3f}] from the original items to"
                " their perturbed forms: look for them in the training data (stage contamination).",
            )
