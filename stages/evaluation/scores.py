"""From stored samples to metrics with intervals: the numbers of an evaluation, its table of categories, and the
per-item values that paired tests need. Pure functions of sample records.

A *record* is one row of ``eval_samples/1`` with its ``extra_json`` unpacked (:func:`records_of`):
item_id, prompt_id, group_id, sample_idx, mode ("sample" | "greedy" | "chosen" | "rejected" | "probe:..." |
"transform:..."), output, extracted, correct, format_error, tokens, finish, reward, kl, category, difficulty, prompt
(text), unscorable.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stages import selection
from stages.evaluation import bbq, held_out_text, multiple_choice, opinions
from stages.measures import reward_model, sampling, statistics, suites, text
from stages.reward.components import CUT_REWARD
from stages.reward.verdicts import failures
from stages.verification.equality import classes

BOOTSTRAP_SEED = 0  # one for all stages, so that a number has the same interval wherever it is shown
LOWER_IS_BETTER = (
    "truncation_rate",
    "format_error_rate",
    "unscorable_rate",
    "kl_reference",
    "length_mean",
    "length_characters",
    "repetition_3",
    "log_loss",
    "ece",
    "tie_rate",
    "stock_phrase_rate",
    "tool_errors",
    "environment_failure_rate",
    "fooled_rate",
    "changed_rate",
    "mc_letter_brier",
    "lm_loss",
    "perplexity",
    "bits_per_byte",
    "over_refusal_rate",
    "refusal_unequal_pairs",
    "mt_bench_missing_rate",
    "constraints_unscorable_rate",
    "refusal_unclassified_rate",
)


@dataclass(frozen=True)
class Metric:
    """One number with its standard error, 95% interval and the count of items behind it."""

    value: float
    n: int
    se: float | None = None
    low: float | None = None
    high: float | None = None


def score_row(
    run_id: str,
    benchmark: str,
    metric: str,
    value: float,
    se: float | None,
    n: int,
    *,
    config: dict,
    source: str,
    origin: str = "conversion",
    detail: dict | None = None,
) -> dict:
    """A finished ``eval_scores/1`` row. ``config``, how it was measured, is its ``config_json``; ``detail`` its
    ``extra_json``.
    """
    from storage.files import canonical_json
    from storage.schema import complete_row

    row = {
        "run_id": run_id,
        "benchmark": benchmark,
        "metric": metric,
        "value": float(value),
        "se": se,
        "n": int(n),
        "config_json": canonical_json(config),
    }
    return complete_row(
        "eval_scores/1",
        row if detail is None else {**row, "extra_json": canonical_json(detail)},
        dataset=benchmark,
        source=source,
        origin=origin,
        split="test",
    )


def known(detail: dict) -> dict:
    """The entries that are not None."""
    return {name: value for name, value in detail.items() if value is not None}


def lower_is_better(name: str) -> bool:
    """Direction of a metric: True where less is better (name up to the first '/', whoever scored: ``pair_log_loss`` as
    ``log_loss``).
    """
    return (
        name.split("/")[0].removeprefix("pair_") in LOWER_IS_BETTER
        or name.endswith("/unscorable_fraction")
        or name.startswith("perturbed/")
        and "/gap" in name
    )


def records_of(rows: Iterable[dict]) -> list[dict]:
    """Sample rows with the fields of ``extra_json`` beside the columns."""
    records = []
    for row in rows:
        extra = json.loads(row["extra_json"]) if row.get("extra_json") else {}
        records.append(
            {
                **{
                    name: extra.get(name)
                    for name in ("mode", "finish", "reward", "kl", "category", "difficulty", "prompt", "unscorable")
                },
                **extra,
                **{key: value for key, value in row.items() if key != "extra_json"},
            }
        )
    return records


# -- values per item ---------------------------------------------------------------------------------------------------


def _flag(value) -> float | None:
    return None if value is None else float(value)


def _all_met(record: dict, reading: str) -> float | None:
    met = (record.get("constraints") or {}).get(reading)
    return None if met is None else float(all(met))


def refused(record: dict) -> float | None:
    """1 for a refusal in full or in part, 0 for none, None without a class (``stages.evaluation.refusals``)."""
    return None if record.get("refusal") is None else float(record["refusal"] != "none")


def cut(record: dict) -> bool:
    """Whether an answer was cut at its length or turn limit."""
    return record["finish"] in ("length", "turn_limit")


def counted(record: dict) -> bool:
    """Whether the tokens of an answer are known; of one that was given its characters may be all that is."""
    return record.get("characters") is None


def lengths_of(records: Sequence[dict]) -> tuple[list[int], str]:
    """(lengths of answers, their unit): tokens, or characters where the tokens of some are not known."""
    if all(map(counted, records)):
        return [r["tokens"] for r in records], "tokens"
    return [len(r["output"]) for r in records], "characters"


_SAMPLED, _GREEDY, _PAIRS = ("sample", "greedy"), ("greedy",), ("chosen",)
_VALUES: dict[str, tuple[tuple[str, ...], Callable[[dict], float | None]]] = {
    # metric: (modes, the first one present is used; value of a record)
    "accuracy": ((*_SAMPLED, "chosen"), lambda r: _flag(r["correct"])),
    "accuracy_cut_wrong": (_SAMPLED, lambda r: None if r["correct"] is None else float(r["correct"] and not cut(r))),
    "flexible_accuracy": (_SAMPLED, lambda r: _flag(r.get("flexible_correct"))),
    "greedy_accuracy": (_GREEDY, lambda r: _flag(r["correct"])),
    "prompt_level_strict_acc": (_SAMPLED, lambda r: _all_met(r, "strict")),  # of prompts with constraints, as the next
    "prompt_level_loose_acc": (_SAMPLED, lambda r: _all_met(r, "loose")),
    "pair_accuracy": (_PAIRS, lambda r: _flag(r["correct"])),
    "mean_margin": (_PAIRS, lambda r: _flag(r.get("margin"))),
    "reward": (_SAMPLED, lambda r: _flag(r["reward"])),
    "reward_cut_penalised": (
        _SAMPLED,
        lambda r: None if r["reward"] is None else CUT_REWARD if cut(r) else float(r["reward"]),
    ),
    "greedy_reward": (_GREEDY, lambda r: _flag(r["reward"])),
    "length_mean": (_SAMPLED, lambda r: float(r["tokens"]) if counted(r) else None),
    "length_characters": (_SAMPLED, lambda r: float(len(r["output"]))),
    # of a given answer nobody may know how it ended
    "truncation_rate": (_SAMPLED, lambda r: None if r["finish"] is None else float(cut(r))),
    "stop_rate": (
        _SAMPLED,
        lambda r: None if r["finish"] is None else float(r["finish"] in ("eos", "stop", "goal")),
    ),
    "format_error_rate": (_SAMPLED, lambda r: float(bool(r["format_error"]))),
    "kl_reference": (_SAMPLED, lambda r: _flag(r["kl"])),
    # of trajectories in an environment, as the next three
    "turns": (_SAMPLED, lambda r: _flag(r.get("turns"))),
    "tool_calls": (_SAMPLED, lambda r: _flag(r.get("tool_calls"))),
    "tool_errors": (_SAMPLED, lambda r: _flag(r.get("tool_errors"))),
    "environment_failure_rate": (
        _SAMPLED,
        lambda r: None if r.get("turns") is None else float(r["finish"] == "failure"),
    ),
    # of debates, as the next two
    "judge_accuracy": (_SAMPLED, lambda r: _flag(r.get("won")) if r.get("right") else None),
    "judge_accuracy_without": (_SAMPLED, lambda r: _flag(r.get("won_without")) if r.get("right") else None),
    "first_side_win_rate": (_SAMPLED, lambda r: _flag(r.get("won")) if r.get("seat") == 0 else None),
    **multiple_choice.values(),
    # of each text alone
    **{
        name: (("text_loss",), lambda r, name=name: held_out_text.value_of(r, name))
        for name in held_out_text.DENOMINATORS
    },
    "over_refusal_rate": (_SAMPLED, lambda r: refused(r) if r.get("safety") == "safe" else None),
    "refusal_rate_unsafe": (_SAMPLED, lambda r: refused(r) if r.get("safety") == "unsafe" else None),
    "mt_bench": (("turn",), lambda r: _flag(r.get("rating"))),
}


def item_values(records: Sequence[dict], metric: str) -> dict[str, tuple[float, str]]:
    """{item_id: (mean over the item's samples, cluster)} of a metric; items without a value are absent. Items of one
    cluster (:func:`cluster_of`) are not independent.

    ``accuracy`` is avg@k (of a reward model: the pair is ordered right); ``pass_at_4`` etc. are estimated per item;
    ``reward/gold`` is the value of the reward component named gold. Greedy samples stand in where nothing was sampled.
    """
    if metric.startswith("pass_at_"):
        k = int(metric.removeprefix("pass_at_"))
        grouped = _values(records, "accuracy")
        found = {
            item: (sampling.pass_at_k(len(v), round(sum(v)), k), cluster) for item, (v, cluster) in grouped.items()
        }
        return {item: pair for item, pair in found.items() if pair[0] is not None}
    if metric not in _VALUES and not metric.startswith("reward/"):
        raise ValueError(
            f"no per-item values for metric {metric!r}: write one of {', '.join(_VALUES)}, reward/NAME with a reward"
            " component, or pass_at_K with a number"
        )
    return {item: (float(np.mean(values)), cluster) for item, (values, cluster) in _values(records, metric).items()}


def cluster_of(record: dict) -> str:
    """What an item belongs to and is not independent of: the passage or near-duplicates of its group, else its prompt
    (eval.statistics).
    """
    return record.get("group_id") or record.get("prompt_id") or record["item_id"]


def _values(records: Sequence[dict], metric: str) -> dict[str, tuple[list[float], str]]:
    component = metric.partition("/")[2]
    modes, read = (_SAMPLED, lambda r: _flag((r.get("parts") or {}).get(component))) if component else _VALUES[metric]
    present = {r["mode"] for r in records}
    mode = next((name for name in modes if name in present), None)
    grouped: dict[str, tuple[list[float], str]] = {}
    for record in records:
        # of a request that failed there is no answer
        if (
            record["mode"] == mode
            and not record.get("error")
            and (value := read(record)) is not None
            and math.isfinite(value)
        ):
            grouped.setdefault(record["item_id"], ([], cluster_of(record)))[0].append(value)
    return grouped


# -- intervals ---------------------------------------------------------------------------------------------------------


def standard_error(values: Sequence[float], clusters: Sequence[str]) -> float | None:
    """Over items (ddof 1); where a cluster has several items, the clustered error. ``None`` for a single cluster."""
    if len(set(clusters)) < 2:
        return None
    if len(set(clusters)) < len(clusters):
        return float(statistics.clustered_se(list(values), list(clusters)))
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


def share(values: Sequence[float], clusters: Sequence[str] | None = None) -> Metric:
    """A rate in [0, 1] with a Wilson interval at the effective sample size p(1-p)/se^2.

    That is the plain Wilson interval for one sample per prompt; with several samples per prompt or items per cluster
    their correlation counts, and the interval never leaves [0, 1].
    """
    names = list(clusters) if clusters is not None else [str(i) for i in range(len(values))]
    mean, se = float(np.mean(values)), standard_error(values, names)
    count = len(set(names))
    effective = mean * (1 - mean) / se**2 if se and se > 1e-12 else float(count)
    if se and count == len(names):
        effective *= count / (count - 1)  # the error divides by n - 1, Wilson's by n
    effective = max(1.0, effective)
    low, high = statistics.wilson(mean * effective, effective)
    return Metric(mean, len(values), se, float(low), float(high))


def average(values: Sequence[float], clusters: Sequence[str], seed: int = BOOTSTRAP_SEED) -> Metric:
    """A mean of unbounded values over items, with a percentile bootstrap interval over clusters of them."""
    low, high = (
        statistics.bootstrap_ci(values, n=1000, seed=seed, clusters=clusters)
        if len(set(clusters)) > 1
        else (None, None)
    )
    return Metric(float(np.mean(values)), len(values), standard_error(values, clusters), _maybe(low), _maybe(high))


def weighted(parts: Sequence[tuple[float, Metric]], value: float | None = None, constant: float = 0.0) -> Metric:
    """sum of weight * rate + ``constant`` of independent rates, with the interval that theirs give (MOVER, Zou and
    Donner 2008): like theirs it is never empty and, for weights that sum to 1, never leaves [0, 1]. ``value``: the sum,
    where it is known more exactly."""
    middle = constant + sum(w * m.value for w, m in parts) if value is None else value
    down = math.sqrt(sum((w * (m.value - (m.low if w > 0 else m.high))) ** 2 for w, m in parts))
    up = math.sqrt(sum((w * ((m.high if w > 0 else m.low) - m.value)) ** 2 for w, m in parts))
    errors = [None if m.se is None else w * m.se for w, m in parts]
    se = None if None in errors else math.sqrt(sum(e * e for e in errors))
    return Metric(float(middle), sum(m.n for _, m in parts), se, float(middle - down), float(middle + up))


def _maybe(value) -> float | None:
    return None if value is None else float(value)


# -- a policy's metrics ------------------------------------------------------------------------------------------------


def policy_metrics(records: Sequence[dict], seed: int = BOOTSTRAP_SEED) -> dict[str, Metric]:
    """Every metric of a policy evaluation that its samples support (eval.avg_at_k, pass_at_k, best_of_n, diversity,
    ...).
    """
    metrics: dict[str, Metric] = {}
    # where none is, the two figures about cut answers are those without them
    any_cut = any(cut(r) for r in records if r["mode"] in _SAMPLED)
    for name in (
        "accuracy",
        *["accuracy_cut_wrong"] * any_cut,
        "greedy_accuracy",
        "flexible_accuracy",
        "stop_rate",
        "truncation_rate",
        "format_error_rate",
        "judge_accuracy",
        "judge_accuracy_without",
        "first_side_win_rate",
        "environment_failure_rate",
    ):
        found = item_values(records, name)
        if found:
            metrics[name] = share(*map(list, zip(*found.values())))
    for name in (
        "reward",
        *["reward_cut_penalised"] * any_cut,
        "greedy_reward",
        "length_mean",
        "kl_reference",
        "turns",
        "tool_calls",
        "tool_errors",
        *_components(records),
    ):
        found = item_values(records, name)
        if found:
            metrics[name] = average(*map(list, zip(*found.values())), seed)
    if not all(map(counted, records)):
        metrics |= in_characters(records, seed)
    sampled = [r for r in records if r["mode"] == "sample"] or [r for r in records if r["mode"] == "greedy"]
    if not sampled:
        return metrics
    graded = _values(records, "accuracy")
    if graded:
        k_max = min(len(values) for values, _ in graded.values())
        for k in powers(k_max):
            if k > 1:
                found = item_values(records, f"pass_at_{k}")
                metrics[f"pass_at_{k}"] = share(*map(list, zip(*found.values())))
        voted = by_votes(sampled, k_max, seed) if k_max > 1 else []
        if voted:
            metrics[f"maj_at_{k_max}"] = share(*map(list, zip(*voted)))
        if k_max > 1:  # how much more k samples know than one does: by the best of them, and by their vote
            plain, clusters = zip(*item_values(records, "accuracy").values())
            for name, better in (
                (f"pass_at_{k_max}", [value for value, _ in item_values(records, f"pass_at_{k_max}").values()]),
                (f"maj_at_{k_max}", [value for value, _ in voted]),
            ):
                if better:
                    metrics[f"self_consistency_gap/{name}"] = average(
                        [b - a for a, b in zip(plain, better, strict=True)], list(clusters), seed
                    )
        unscorable = [float(r["correct"] is None) for r in sampled]
        if any(unscorable):
            metrics["unscorable_rate"] = Metric(float(np.mean(unscorable)), len(unscorable))
    failed = [failures(r.get("parts") or {}, r.get("unscorable")) for r in sampled]
    for name in sorted({name for one in failed for name in one}):
        metrics[f"reward/{name}/unscorable_fraction"] = Metric(
            float(np.mean([name in one for one in failed])), len(failed)
        )
    sampled = [r for r in sampled if not r.get("error")]
    if not sampled:
        return metrics
    by_item: dict[str, list[dict]] = defaultdict(list)
    for record in sampled:
        by_item[record["item_id"]].append(record)
    for n in (1, 2):
        values = [
            v
            for group in by_item.values()
            if (v := text.distinct_n([text.words_of(r["output"]) for r in group], n)) is not None
        ]
        if values:
            metrics[f"distinct_{n}"] = Metric(float(np.mean(values)), len(values))
    repeats = [v for r in sampled if (v := text.repetition_n(text.words_of(r["output"]), 3)) is not None]
    if repeats:
        metrics["repetition_3"] = Metric(float(np.mean(repeats)), len(repeats))
    metrics["stock_phrase_rate"] = Metric(text.phrase_rates([r["output"] for r in sampled])["rate"], len(sampled))
    return metrics | best_of_n_metrics(by_item.values()) | ifeval_metrics(sampled)


def in_characters(records: Sequence[dict], seed: int = BOOTSTRAP_SEED) -> dict[str, Metric]:
    """``length_characters``, in the place of tokens where nobody counted these."""
    found = item_values(records, "length_characters")
    return {"length_characters": average(*map(list, zip(*found.values())), seed)} if found else {}


def _components(records: Sequence[dict]) -> list[str]:
    """``reward/NAME`` of every reward component that says more than the verdict does."""
    names = sorted({name for r in records for name in r.get("parts") or ()})
    value = lambda r, name: (r.get("parts") or {}).get(name)
    return [
        f"reward/{name}"
        for name in names
        if any(value(r, name) is not None and value(r, name) != _flag(r["correct"]) for r in records)
    ]


def powers(limit: int) -> list[int]:
    """1, 2, 4, ... and ``limit`` itself."""
    return sorted({2**i for i in range(limit.bit_length()) if 2**i <= limit} | {limit}) if limit else []


def by_votes(sampled: Sequence[dict], k: int, seed: int = BOOTSTRAP_SEED) -> list[tuple[float, str]]:
    """(is the most frequent answer of ``k`` right, over all k-subsets of an item's answers; cluster) per item. All
    right answers are one class, and so are wrong ones that are equal (reward.math); ties are shared, no vote is wrong.
    Empty without extraction (eval.maj_at_k)."""
    groups: dict[str, list[dict]] = defaultdict(list)
    for record in sampled:
        if record["correct"] is not None:
            groups[record["item_id"]].append(record)
    if not any(r["extracted"] is not None for group in groups.values() for r in group):
        return []
    right, rng = ("right",), np.random.Generator(np.random.Philox(key=seed))

    def votes(group: list[dict]) -> list[Hashable]:
        wrong = iter(classes([r["extracted"] for r in group if not r["correct"]]))
        return [(None if r["extracted"] is None else right) if r["correct"] else next(wrong) for r in group]

    return [(sampling.maj_at_k(votes(group), right, k, rng=rng), cluster_of(group[0])) for group in groups.values()]


def best_of_n_metrics(groups: Iterable[Sequence[dict]]) -> dict[str, Metric]:
    """Verifier accuracy of the sample that the reward model ranks first, n = 2, 4, ... (rm.overopt), one that was cut
    by no_eos_reward, as ``rejection`` chooses.
    """
    usable = [g for g in groups if len(g) > 1 and all(r["reward"] is not None and r["correct"] is not None for r in g)]
    if not usable:
        return {}
    metrics, rank = {}, _VALUES["reward_cut_penalised"][1]
    for n in powers(min(map(len, usable))):
        if n > 1:
            gold = [
                selection.best_of_n_estimate([rank(r) for r in g], n, [float(r["correct"]) for r in g]) for g in usable
            ]
            metrics[f"best_of_{n}_accuracy"] = share(gold, [cluster_of(g[0]) for g in usable])
    return metrics


def ifeval_metrics(sampled: Sequence[dict]) -> dict[str, Metric]:
    """The four accuracies on prompts with constraints: all of a prompt's, or each for itself, strict and loose
    (eval.ifeval), and the share that cannot be checked.
    """
    asked = [r for r in sampled if r.get("constraints")]
    checked = [r for r in asked if "strict" in r["constraints"]]
    metrics = (
        {}
        if len(checked) == len(asked)
        else {"constraints_unscorable_rate": Metric((len(asked) - len(checked)) / len(asked), len(asked))}
    )
    if not checked:
        return metrics
    values = suites.ifeval_accuracies(
        *([r["constraints"][reading] for r in checked] for reading in ("strict", "loose"))
    )
    for reading in ("strict", "loose"):
        name, found = f"prompt_level_{reading}_acc", item_values(checked, f"prompt_level_{reading}_acc")
        metrics[name] = replace(share(*map(list, zip(*found.values()))), value=values[name])
        each = [(float(met), cluster_of(r)) for r in checked for met in r["constraints"][reading]]
        metrics[f"inst_level_{reading}_acc"] = replace(
            share(*map(list, zip(*each))), value=values[f"inst_level_{reading}_acc"]
        )
    return metrics


def by_group(records: Sequence[dict], field: str) -> list[dict]:
    """Table of accuracies (of answers and of choices read by likelihood), reward and length per value of ``category``
    or ``difficulty``.
    """
    groups: dict[str, list[dict]] = defaultdict(list)
    for record in records:
        if record.get(field) is not None:
            groups[str(record[field])].append(record)
    rows = []
    for name in sorted(groups, key=_natural):
        part, row = groups[name], {field: name, "prompts": len({r["item_id"] for r in groups[name]})}
        for metric in ("accuracy", "greedy_accuracy", *multiple_choice.RATES):
            found = item_values(part, metric)
            if found:
                result = share(*map(list, zip(*found.values())))
                row |= {metric: result.value, f"{metric}_low": result.low, f"{metric}_high": result.high}
        for metric in ("reward", "length_mean", "truncation_rate"):
            found = item_values(part, metric)
            if found:
                row[metric] = float(np.mean([value for value, _ in found.values()]))
        rows.append(row)
    return rows


def _natural(name: str):
    try:
        return (0, float(name), name)
    except ValueError:
        return (1, 0.0, name)


def flatten(metrics: dict[str, Metric]) -> dict[str, float]:
    """Summary form: name, and name_low / name_high / name_se where known."""
    flat: dict[str, float] = {}
    for name, metric in metrics.items():
        flat[name] = metric.value
        for suffix, value in (("low", metric.low), ("high", metric.high), ("se", metric.se)):
            if value is not None:
                flat[f"{name}_{suffix}"] = value
    return flat


def all_metrics(records: Sequence[dict], seed: int = BOOTSTRAP_SEED) -> dict[str, Metric]:
    """Every metric of an evaluation's samples: answers to prompts, pairs (``pair_`` where a policy scored them),
    probes.
    """
    every, records = records, originals(records)
    answered = [r for r in records if r["mode"] in ("sample", "greedy")]
    implicit = any(r["mode"] == "chosen" and r.get("logp") is not None for r in records)
    metrics = policy_metrics(answered, seed) if answered else {}
    prefix = "pair_" if implicit else ""
    metrics |= (
        pair_metrics(records, seed, prefix)
        | probe_metrics(records)[0]
        | _suites(records, seed, prefix)
        | _changed(every)
    )
    metrics |= (
        multiple_choice.metrics_of(records, seed)
        | opinions.metrics(records, seed)
        | bbq.metrics(records, seed)
        | held_out_text.metrics_of(records)
    )
    return metrics | multiple_choice.macro(records, ("accuracy", "greedy_accuracy", *multiple_choice.RATES))


def _suites(records: Sequence[dict], seed: int, prefix: str) -> dict[str, Metric]:
    """Metrics of the suites that have a module of their own; each is empty where the samples are none of its
    business.
    """
    from stages.evaluation import best_of, compute, mt_bench, refusals, rewardbench, shift, signs

    return (
        rewardbench.metrics(records, prefix)
        | best_of.metrics(records, seed, prefix)
        | refusals.metrics(records)
        | mt_bench.metrics(records, seed)
        | signs.metrics(records)
        | shift.metrics(records)
        | compute.metrics(records)
    )


def originals(records: Sequence[dict]) -> list[dict]:
    """The records without those of perturbed forms, which are in no number but their own
    (``stages.evaluation.perturbed``).
    """
    return [r for r in records if not r.get("perturbation")]


def _changed(records: Sequence[dict]) -> dict[str, Metric]:
    from stages.evaluation import perturbed

    return perturbed.metrics(records)


# -- pairs: reward models, and policies as implicit scorers ------------------------------------------------------------


def odds_of(record: dict) -> float:
    """Log odds that the chosen answer of a pair is the better one, by its record: the margin, where scores are no
    probabilities.
    """
    return record["margin"] if record.get("log_odds") is None else record["log_odds"]


def pair_metrics(records: Sequence[dict], seed: int = BOOTSTRAP_SEED, prefix: str = "") -> dict[str, Metric]:
    """Metrics of a scorer on held-out pairs (rm.eval): ``chosen`` records carry the margin d = r_chosen - r_rejected.

    accuracy is strict (ties wrong); intervals by bootstrap over prompts (or their groups), Wilson's where all are right
    or all wrong; log loss, and ECE of max(sigmoid(d), 1 - sigmoid(d)) in 10 bins, d the log odds where scores are
    probabilities (:func:`odds_of`). ``prefix`` names the metrics of a policy's implicit scores (``pair_``).
    """
    chosen = [r for r in records if r["mode"] == "chosen"]
    if not chosen:
        return {}
    rejected = {r["item_id"]: r for r in records if r["mode"] == "rejected"}
    margins, odds = np.array([r["margin"] for r in chosen]), np.array([odds_of(r) for r in chosen])
    prompts, clusters = [r.get("prompt_id") or r["item_id"] for r in chosen], [cluster_of(r) for r in chosen]
    correct = [float(d > 0) for d in margins]
    found = {
        "accuracy": (
            average(correct, clusters, seed)
            if (bounds := statistics.certain(correct, clusters)) is None
            else Metric(correct[0], len(correct), 0.0 if len(set(clusters)) > 1 else None, *bounds)
        ),
        "tie_rate": Metric(float((margins == 0).mean()), len(chosen)),
        "accuracy_ties_half": Metric(float(((margins > 0) + 0.5 * (margins == 0)).mean()), len(chosen)),
        "mean_margin": average(margins.tolist(), clusters, seed),
        "log_loss": average(np.logaddexp(0.0, -odds).tolist(), clusters, seed),
    }
    lengths = np.array([[r["tokens"], rejected[r["item_id"]]["tokens"]] for r in chosen], dtype=float)
    scores = np.array([[r["reward"], rejected[r["item_id"]]["reward"]] for r in chosen], dtype=float)
    found["chosen_longer_share"] = Metric(float((lengths[:, 0] > lengths[:, 1]).mean()), len(chosen))
    found["length_difference"] = Metric(float((lengths[:, 0] - lengths[:, 1]).mean()), len(chosen))
    flat = scores.ravel(), lengths.ravel()
    correlations = {
        "score_length_pearson": statistics.pearson(*flat),
        "score_length_spearman": reward_model.spearman(*flat),
        "score_length_within_prompt": statistics.within_group_correlation(*flat, np.repeat(prompts, 2)),
    }
    found |= {name: Metric(value, scores.size) for name, value in correlations.items() if not math.isnan(value)}
    matched = reward_model.length_matched(margins, lengths[:, 0], lengths[:, 1])
    if matched["n"]:
        found["length_matched_accuracy"] = Metric(matched["accuracy"], matched["n"])
    for field in ("source", "strength"):
        names = {str(r[field]) for r in chosen if r.get(field) is not None}
        if len(names) > 1:
            for name in sorted(names, key=_natural):
                part = [(c, cluster) for c, cluster, r in zip(correct, clusters, chosen) if str(r.get(field)) == name]
                found[f"accuracy/{field}={name}"] = share(*map(list, zip(*part)))
    if not prefix:
        found["ece"] = Metric(float(statistics.ece(odds)), len(chosen))
    return {(prefix + name): metric for name, metric in found.items()}


def probe_metrics(records: Sequence[dict]) -> tuple[dict[str, Metric], list[dict]]:
    """Fooled rate per probe and changed decisions per transform, with the table for the report.

    ``probe:NAME`` records are compared with their pair's chosen answer; ``transform:NAME:chosen`` / ``:rejected`` with
    its decision. Where one of the two has no score, the comparison is left out and counted in the table.
    """
    score = lambda r: r["reward"] if r is not None and r["reward"] is not None and math.isfinite(r["reward"]) else None
    clean = {r["item_id"]: r for r in records if r["mode"] == "chosen"}
    probes: dict[str, list[tuple]] = defaultdict(list)
    changed: dict[str, dict[str, dict]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        kind, _, name = record["mode"].partition(":")
        if kind == "probe":
            probes[name].append((score(clean.get(record["item_id"])), score(record)))
        elif kind == "transform":
            which, _, side = name.rpartition(":")
            changed[which][record["item_id"]][side] = score(record)
    checks = [(f"probe: {name}", pairs) for name, pairs in sorted(probes.items())]
    checks += [
        (
            f"transform: {name}",
            [
                (clean[item]["margin"] if item in clean else None, sides.get("chosen"), sides.get("rejected"))
                for item, sides in items.items()
            ],
        )
        for name, items in sorted(changed.items())
    ]
    metrics, table = {}, []
    for check, every in checks:
        found = [values for values in every if None not in values]
        row = {"check": check, "n": len(found)} | (
            {"without a score": len(every) - len(found)} if len(found) < len(every) else {}
        )
        kind, _, name = check.partition(": ")
        if found and kind == "probe":
            result = reward_model.fooled_rate(found)
            metrics[f"fooled_rate/{name}"] = Metric(result["fooled_rate"], len(found))
            row |= {"fooled or changed": result["fooled_rate"], "mean gap": result["mean_gap"]}
        elif found:
            result = reward_model.transform_robustness(
                [float(margin > 0) for margin, _, _ in found], [float(a > b) for _, a, b in found]
            )
            metrics[f"changed_rate/{name}"] = Metric(result["changed"], len(found))
            row |= {
                "fooled or changed": result["changed"],
                "accuracy before": result["acc_original"],
                "accuracy after": result["acc_transformed"],
            }
        table.append(row)
    return metrics, table


# -- paired comparison -------------------------------------------------------------------------------------------------


class NoValues(ValueError):
    """One of two evaluations has no value of a metric. Which metrics both have is looked up when the text is read: who
    goes through all metrics only passes over it.
    """

    def __init__(self, metric: str, candidate: Sequence[dict], champion: Sequence[dict], without: Sequence[str]):
        self.metric, self.sides, self.without = metric, (candidate, champion), without

    def __str__(self) -> str:
        both = [one for one in _VALUES if all(item_values(side, one) for side in self.sides)]
        return (
            f"no item has a value for {self.metric!r} in the evaluation of the {' and of the '.join(self.without)}, as"
            " where prompts have no answer to check: evaluate on prompts that have one"
            + (f", or write as metric what both have: {', '.join(both)}" if both else "")
        )


def paired(
    candidate: Sequence[dict],
    champion: Sequence[dict],
    metric: str,
    confidence: float = 0.95,
    seed: int = BOOTSTRAP_SEED,
    by_item: bool = False,
) -> dict:
    """Difference candidate - champion on the same items.

    Returns {"difference", "se", "low", "high", "p_value", "n", "items", "better", "worse", "candidate", "champion",
    "candidate_missing", "champion_missing"}: means over the ``items`` that both have a value of, in ``n`` independent
    clusters (prompts, or groups of them); interval by bootstrap over clusters, p-value two-sided normal on the paired
    (clustered) error, or, where all clusters differ by the same and leave no error, that of the exact sign test;
    McNemar's exact test added for one yes/no answer per cluster. ``*_missing``: share of the other's values that this
    side lacks, None where it lacks none; ``by_item``: of its items, where one side was given fewer answers to each.
    """
    candidate, champion = originals(candidate), originals(champion)
    if metric in held_out_text.DENOMINATORS:
        return held_out_text.paired(candidate, champion, metric, confidence)
    a, b = item_values(candidate, metric), item_values(champion, metric)
    shared = [item for item in a if item in b]
    if not shared and not (a and b):
        sides = {"candidate": a, "champion": b}
        raise NoValues(metric, candidate, champion, [name for name, found in sides.items() if not found])
    if not shared:
        raise ValueError(
            f"the two evaluations share no scored item for {metric!r}: evaluate both on the same prompts and split"
        )
    apart = len(a.keys() ^ b.keys())
    left, right = (np.array([found[item][0] for item in shared]) for found in (a, b))
    clusters = [a[item][1] for item in shared]
    differences, n = left - right, len(set(clusters))
    mean, se = float(differences.mean()), standard_error(differences, clusters)
    low, high = (
        statistics.bootstrap_ci(differences, n=2000, seed=seed, level=confidence, clusters=clusters)
        if n > 1
        else (None, None)
    )
    result = {
        "metric": metric,
        "candidate": float(left.mean()),
        "champion": float(right.mean()),
        "difference": mean,
        "se": se,
        "low": low,
        "high": high,
        "confidence": confidence,
        "n": n,
        "items": len(shared),
        "p_value": (
            None
            if se is None
            else (
                statistics.normal_tail(mean / se)
                if se > 1e-12
                else 1.0
                if mean == 0
                else statistics.mcnemar_exact(n, 0)
            )
        ),
        "better": int((differences > 0).sum()),
        "worse": int((differences < 0).sum()),
        **_missing(candidate, champion, metric, by_item),
        "note": f"{apart} items are scored in only one of the two evaluations and are left out" if apart else None,
    }
    if n == len(shared) and set(left) | set(right) <= {0.0, 1.0}:
        result["mcnemar_p_value"] = float(statistics.mcnemar_exact(result["better"], result["worse"]))
    return result


def _missing(
    candidate: Sequence[dict], champion: Sequence[dict], metric: str, by_item: bool
) -> dict[str, float | None]:
    """Share of the other side's values (one per answer, or per item) that a side has none of."""
    counts = [
        {
            item: 1 if by_item else len(values)
            for item, (values, _) in _values(records, "accuracy" if metric.startswith("pass_at_") else metric).items()
        }
        for records in (candidate, champion)
    ]
    lacking = lambda own, other: (
        sum(max(0, n - own.get(item, 0)) for item, n in other.items()) / sum(other.values()) or None
    )
    return {"candidate_missing": lacking(*counts), "champion_missing": lacking(*counts[::-1])}
