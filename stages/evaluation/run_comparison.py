"""Two training runs, or two evaluations, side by side: curves in one figure, held-out scores with paired intervals,
answers to the same prompts.

Functions of what runs leave behind (metric rows, the ``validation``, ``rollouts`` and ``samples`` datasets), for
``posttrain compare``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stages.settings import CHANGES_OF_LOGITS, OF_ENVIRONMENT

#: Panels, in this order, where both runs logged the metric; reward components follow.
PANELS = (
    "reward",
    "validation/reward",
    "completions/correct_fraction",
    "kl/sequence_sum",
    "entropy",
    "policy/outside_range",
    "completions/mean_length",
    "completions/clipped_ratio",
    "frac_reward_zero_std",
    "sampling/sampling_logp_difference/mean",
    "loss",
    "validation/loss",
    "accuracy",
    "validation/accuracy",
    "rewards/margins",
    "grad_norm",
)
#: Settings and inputs that change what a held-out score measures.
HELD_OUT_SETTINGS = (
    "rewards",
    "eval_prompts",
    "max_completion_length",
    "context_schedule",
    "max_prompt_length",
    "prompt_template",
    "chat_template_digest",
    "chat_template_kwargs",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop_strings",
    *CHANGES_OF_LOGITS,
    *OF_ENVIRONMENT,
)
SCORERS = ("rubric", "judge", "reward_model", "gold")


def curves(runs: Mapping[str, Sequence[dict]]) -> bytes | None:
    """One panel per metric that all runs ``{name: metric rows}`` logged, a line per run; None without any."""
    from stages.reporting.reports import small_multiples

    logged = [{key for row in rows for key, value in row.items() if value is not None} for rows in runs.values()]
    shared = set.intersection(*logged) - {"step"}
    names = [name for name in PANELS if name in shared]
    names += sorted(name for name in shared - {*names, "reward/unscorable_fraction"} if name.startswith("reward/"))
    panels = {
        name: {
            run: tuple(zip(*[(row["step"], row[name]) for row in rows if row.get(name) is not None]))
            for run, rows in runs.items()
        }
        for name in names
    }
    return small_multiples(panels, title=" against ".join(runs)) if panels else None


def last_pass(records: Sequence[dict]) -> list[dict]:
    newest = max((r["step"] for r in records), default=0)
    return [r for r in records if r["step"] == newest]


def held_out(
    a: Sequence[dict], b: Sequence[dict], configs: tuple[dict, dict], inputs: tuple[dict, dict] = ({}, {})
) -> tuple[list[dict], str | None]:
    """(rows {metric, a, b, difference b - a, low, high, p, prompts}, note) over the last validation pass of both runs,
    paired per prompt.

    inputs: what both runs were given, {name: {"digest"}}. The note says why there are no rows: settings or scorers that
    differ in what is measured (another version of a rubric: GRAPE-OPS), or no shared prompts.
    """
    from stages.evaluation.scores import paired

    changed = [name for name in HELD_OUT_SETTINGS if configs[0].get(name) != configs[1].get(name)]
    changed += [
        f"input {name}"
        for name in SCORERS
        if (inputs[0].get(name) or {}).get("digest") != (inputs[1].get(name) or {}).get("digest")
    ]
    if changed:
        return (
            [],
            f"held-out scores are not set side by side: the runs measured them with different {', '.join(changed)}",
        )
    found = []
    for metric in ("reward", "accuracy"):
        try:
            d = paired(last_pass(b), last_pass(a), metric)
        except ValueError:
            continue
        found.append(_row(f"held-out {metric}", d))
    return found, None if found else "the runs have no validation prompt in common"


def _row(metric: str, d: Mapping) -> dict:
    """A metric of two sides from their paired difference (``scores.paired``), b as the candidate."""
    return {
        "metric": metric,
        "a": d["champion"],
        "b": d["candidate"],
        "difference": d["difference"],
        "low": d["low"],
        "high": d["high"],
        "p": d["p_value"],
        "prompts": d["n"],
        "better": d["better"],
        "worse": d["worse"],
    }


#: What evaluations are also set side by side by, beside the shares and losses of ``evaluation.tax``.
ALSO = (
    "flexible_accuracy",
    "prompt_level_loose_acc",
    "reward",
    "mt_bench",
    "over_refusal_rate",
    "refusal_rate_unsafe",
    "length_mean",
    "truncation_rate",
    "format_error_rate",
)


def evaluated(a: Sequence[dict], b: Sequence[dict], apart: Mapping = {}) -> tuple[list[dict], str | None]:
    """(rows {metric, a, b, difference b - a, low, high, p, prompts, better, worse}, note) of two evaluations' samples,
    paired per item. ``apart``: metrics whose values do not compare; the note says of how many items only one of the two
    has a value."""
    from stages.evaluation.scores import counted, paired
    from stages.evaluation.tax import METRICS

    found, notes, answered = [], {}, any(r["mode"] in ("sample", "greedy") for r in a)
    in_characters = ["length_characters"] * (not all(map(counted, [*a, *b])))
    for metric in dict.fromkeys([*METRICS, *ALSO, *in_characters]):
        if metric in apart or metric == "pair_accuracy" and not answered:  # of pairs alone accuracy is the same
            continue
        try:
            d = paired(b, a, metric)
        except ValueError:  # one of them has no value of it, or their values do not compare
            continue
        found.append(_row(metric, d))
        if d["note"]:
            notes.setdefault(d["note"], []).append(metric)
    return found, "; ".join(f"{', '.join(names)}: {note}" for note, names in notes.items()) or None


def answers(a: Sequence[dict], b: Sequence[dict], count: int = 8) -> list[dict]:
    """Rows {prompt, a, reward_a, b, reward_b}: last answers to the same prompts, the largest changes of reward
    first.
    """
    left, right = ({r["item_id"]: r for r in last_pass(records)} for records in (a, b))
    both = [(left[item], right[item]) for item in left if item in right]
    both.sort(key=lambda pair: (-abs((pair[1]["reward"] or 0.0) - (pair[0]["reward"] or 0.0)), pair[0]["item_id"]))
    return [
        {"prompt": x["prompt"], "a": x["output"], "reward_a": x["reward"], "b": y["output"], "reward_b": y["reward"]}
        for x, y in both[:count]
    ]


def records_of_rollouts(rows, decode) -> list[dict]:
    """The last sampled answer to each training prompt, in the form of validation records, for runs without validation
    prompts.
    """
    newest: dict[str, dict] = {}
    for row in rows:
        if row["prompt_id"] not in newest or row["iteration"] > newest[row["prompt_id"]]["iteration"]:
            newest[row["prompt_id"]] = row
    return [
        {
            "item_id": prompt,
            "step": 0,
            "prompt": decode(row["prompt_ids"]),
            "output": decode(row["completion_ids"]),
            "reward": None if row["reward_tier"] == "unscorable" else row["reward"],
        }
        for prompt, row in newest.items()
    ]
