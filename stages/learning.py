"""learning: what RL runs learned from the same start with the same budget: one table over methods and seeds, and their
curves.

Give the rollouts of each run as ``rollouts.METHOD.SEED`` and the evaluation of its policy as
``evaluations.METHOD.SEED``; the evaluation of the common start as ``start``. A method's number is the mean over its
seeds, its interval a bootstrap over prompts of the per-prompt means over seeds, its gain over the start paired by
prompt; the lowest and the highest seed stand beside it. Reward, length (of all, of right and of wrong completions: the
length bias of a sequence mean is wrong answers that grow), dead groups and truncation over the run come from the
rollouts: what was trained on, not what was logged.
"""

from __future__ import annotations

from pydantic import Field

from stages.spec import InputSpec, OutputSpec, StageConfig, StageSpec


class Config(StageConfig):
    metric: str = Field("accuracy", description="Metric of the evaluations that ranks the methods.")
    also: list[str] = Field(
        default_factory=lambda: ["reward", "length_mean", "truncation_rate"],
        description=(
            "Further metrics of the evaluations shown beside it, where they have them; "
            "reward is the reward model's, so that a proxy that rises while the metric falls is seen."
        ),
    )
    at_least: dict[str, float] = Field(
        default_factory=dict,
        description="Value of the metric that a method must reach in the mean over its seeds; `*` is for all others.",
    )
    curves_per_figure: int = Field(8, ge=1, description="Methods in one figure.")


SPEC = StageSpec(
    name="learning",
    config=Config,
    inputs={
        "rollouts": InputSpec(
            "dataset", kinds=("rollouts/1",), many=True, doc="Rollouts of each run, as rollouts.METHOD.SEED."
        ),
        "evaluations": InputSpec(
            "dataset",
            kinds=("eval_samples/1",),
            many=True,
            doc="Evaluation samples of each run's policy, as evaluations.METHOD.SEED.",
        ),
        "start": InputSpec(
            "dataset",
            kinds=("eval_samples/1",),
            required=False,
            doc="Evaluation samples of the model that all runs started from.",
        ),
    },
    outputs={
        "results": OutputSpec("dataset", doc="eval_scores/1: METHOD/METRIC with interval, lowest and highest seed.")
    },
)

SIGNALS = ("reward", "length", "length_right", "length_wrong", "dead_groups", "truncated")


def run(stage):
    from stages.evaluation import scores
    from stages.evaluation.protocol import require_same, require_same_scorers
    from stages.reporting.reports import document, markdown_table, with_interval

    config = stage.config
    runs = by_method(stage.many("rollouts"), "rollouts")
    judged = by_method(stage.many("evaluations"), "evaluations")
    names = [f"evaluations.{m}.{s}" for m, seeds in judged.items() for s in seeds] + (
        ["start"] if stage.has("start") else []
    )
    metas = {name: stage.dataset(name).manifest.get("meta") or {} for name in names}
    require_same({name: meta.get("protocol") for name, meta in metas.items()})
    require_same_scorers(config.metric, metas)
    start = (
        scores.item_values(scores.originals(scores.records_of(stage.dataset("start").iter_rows())), config.metric)
        if stage.has("start")
        else None
    )
    table, curves = [], {}
    for method, seeds in judged.items():
        records = {
            seed: scores.originals(scores.records_of(stage.dataset(f"evaluations.{method}.{seed}").iter_rows()))
            for seed in seeds
        }
        table.append(
            {
                "method": method,
                **summarise({seed: scores.item_values(r, config.metric) for seed, r in records.items()}, start),
            }
        )
        for name in config.also:
            found = [v for r in records.values() for v, _ in scores.item_values(r, name).values()]
            if found and name != config.metric:
                table[-1][name] = sum(found) / len(found)
        signals = [signal_curves(stage.dataset(f"rollouts.{method}.{seed}")) for seed in runs.get(method, ())]
        if signals:
            curves[method] = {name: over_seeds([one[name] for one in signals]) for name in SIGNALS}
            table[-1] |= {
                f"{name} {when}": value
                for name in SIGNALS
                for when, value in zip(("first", "last"), ends(curves[method][name][0]))
                if value == value
            }
        stage.progress(len(table), len(judged), "methods")
    table.sort(key=lambda row: -row["value"])
    wanted = {row["method"]: config.at_least.get(row["method"], config.at_least.get("*")) for row in table}
    below = [
        row["method"] for row in table if wanted[row["method"]] is not None and row["value"] < wanted[row["method"]]
    ]
    if below:
        stage.warn(
            "below_expectation",
            f"{', '.join(below)} did not reach the stated {config.metric} (at_least): look at their curves and at"
            " learning rate, KL coefficient and clip range, or raise the budget.",
        )
    write(stage, table)
    stage.summary(
        {
            f"{row['method']}/{key}": row[key]
            for row in table
            for key in ("value", "low", "high", "worst_seed", "best_seed", "gain", *config.also)
            if row.get(key) is not None
        }
        | {
            f"{row['method']}/length_{which}_{when}": row[f"length_{which} {when}"]
            for row in table
            for which in ("right", "wrong")
            for when in ("first", "last")
            if f"length_{which} {when}" in row
        }
        | {"methods": len(table), "below_expectation": len(below)}
    )
    shown = [
        {
            "method": row["method"],
            config.metric: with_interval(row["value"], row["low"], row["high"]),
            "seeds": f"{row['worst_seed']:.3f} to {row['best_seed']:.3f}",
            **({"gain over the start": with_interval(row["gain"], row["gain_low"], row["gain_high"])} if start else {}),
            "wanted": wanted[row["method"]],
            **{name: row.get(name) for name in config.also},
            **{key: row.get(key) for key in row if key.endswith((" first", " last"))},
        }
        for row in table
    ]
    figures(stage, curves, [row["method"] for row in table])
    stage.report(
        "learning",
        table=shown,
        markdown=document(
            "RL methods from the same start",
            "Mean over seeds; brackets are 95% intervals over prompts. First and last: mean of the "
            "first and last fifth of the iterations.",
            ("Held-out prompts", markdown_table(shown)),
        ),
    )


def by_method(given, what: str) -> dict[str, list[str]]:
    """``METHOD.SEED`` labels -> {method: [seed]}, in the order given."""
    from stages.spec import ConfigError

    found: dict[str, list[str]] = {}
    for label in given:
        method, dot, seed = label.rpartition(".")
        if not dot:
            raise ConfigError(
                f"learning: {what}.{label} names no seed; write {what}.METHOD.SEED, for example {what}.grpo.0"
            )
        found.setdefault(method, []).append(seed)
    return found


def summarise(values: dict[str, dict], start: dict | None) -> dict:
    """{value, low, high, worst_seed, best_seed, seeds, prompts, gain...} of one method: {seed: {item: (value,
    prompt)}}.
    """
    import numpy as np

    from stages.evaluation.scores import BOOTSTRAP_SEED
    from stages.measures.statistics import bootstrap_ci

    items = sorted(set.intersection(*({*v} for v in values.values())))
    if not items:
        raise ValueError(
            "the seeds' evaluations have no prompt with a value of the metric in common; evaluate all of them on the"
            " same prompts with checkable answers"
        )
    per_seed = np.array([[v[item][0] for item in items] for v in values.values()])
    prompts = [next(iter(values.values()))[item][1] for item in items]
    mean = per_seed.mean(0)
    low, high = bootstrap_ci(mean, seed=BOOTSTRAP_SEED, clusters=prompts)
    row = {
        "value": float(mean.mean()),
        "low": low,
        "high": high,
        "worst_seed": float(per_seed.mean(1).min()),
        "best_seed": float(per_seed.mean(1).max()),
        "seeds": len(values),
        "prompts": len(items),
    }
    if start is not None:
        shared = [k for k, item in enumerate(items) if item in start]
        gain = np.array([mean[k] - start[items[k]][0] for k in shared])
        row |= dict(
            zip(
                ("gain_low", "gain_high"),
                bootstrap_ci(gain, seed=BOOTSTRAP_SEED, clusters=[prompts[k] for k in shared]),
            ),
            gain=float(gain.mean()),
        )
    return row


def signal_curves(rollouts) -> dict[str, list[float]]:
    """Per iteration: mean reward and length, the latter also of right and of wrong completions, share of groups whose
    rewards are all equal, share of completions cut by the limit. NaN where there is none."""
    import math
    from collections import defaultdict

    parts = defaultdict(
        lambda: {"rewards": [], "lengths": [], True: [], False: [], "cut": [], "groups": defaultdict(list)}
    )
    for row in rollouts.iter_rows():
        part = parts[row["iteration"]]
        part["lengths"].append(row["length"])
        part["cut"].append(row["truncated"])
        if row["is_correct"] is not None:
            part[row["is_correct"]].append(row["length"])
        if row["reward"] is not None and math.isfinite(row["reward"]):
            part["rewards"].append(row["reward"])
            part["groups"][row["prompt_id"]].append(row["reward"])
    curves = {name: [] for name in SIGNALS}
    for iteration in sorted(parts):
        part = parts[iteration]
        dead = [len(set(g)) == 1 for g in part["groups"].values()]
        for name, values in zip(
            SIGNALS, (part["rewards"], part["lengths"], part[True], part[False], dead, part["cut"])
        ):
            curves[name].append(sum(values) / len(values) if values else math.nan)
    return curves


def over_seeds(curves: list[list[float]]) -> tuple[list[float], list[float], list[float]]:
    """(mean, lowest, highest) per iteration, as far as every seed went; NaN only where no seed has a value."""
    steps = [[v for v in s if v == v] or [float("nan")] for s in zip(*curves)]
    return [sum(s) / len(s) for s in steps], [min(s) for s in steps], [max(s) for s in steps]


def ends(curve: list[float]) -> tuple[float, float]:
    """Mean of the first and of the last fifth; NaN where it has no value."""
    n = max(1, len(curve) // 5)
    return tuple(
        sum(part) / len(part) if (part := [v for v in values if v == v]) else float("nan")
        for values in (curve[:n], curve[-n:])
    )


def write(stage, table) -> None:
    from stages.evaluation.scores import score_row

    writer = stage.writer("results", "eval_scores/1")
    writer.write(
        score_row(
            stage.key[:16],
            "learning",
            f"{row['method']}/{stage.config.metric}",
            row["value"],
            None,
            row["prompts"],
            config={},
            source="learning",
            detail={k: v for k, v in row.items() if k not in ("method", "value") and v == v},
        )
        for row in table
    )
    writer.close({"methods": len(table)})


def figures(stage, curves: dict, order: list[str]) -> None:
    """Each signal over the iterations, the best methods first, the band from the lowest to the highest seed."""
    from stages.reporting.reports import line_chart

    shown = [method for method in order if method in curves]
    size = stage.config.curves_per_figure
    for k in range(0, len(shown), size):
        part = shown[k : k + size]
        for name in SIGNALS:
            known = [m for m in part if any(v == v for v in curves[m][name][0])]
            if known:
                stage.report(
                    f"{name}-{k // size + 1}",
                    png=line_chart(
                        {m: (range(1, len(curves[m][name][0]) + 1), curves[m][name][0]) for m in known},
                        title=f"{name.replace('_', ' ')} (band: seeds)",
                        xlabel="iteration",
                        ylabel=name,
                        bands={m: curves[m][name][1:] for m in known},
                    ),
                )
