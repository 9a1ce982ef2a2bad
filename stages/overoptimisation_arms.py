"""overoptimisation_arms: runs against one proxy reward model side by side: where each one's gold score stopped rising
(``recipe.overopt_study``).

Give the curve of each run, written by the stage ``overoptimisation``, as ``curves.ARM`` (best-of-n is an arm too), and
the evaluation of its policy as ``evaluations.ARM``; the evaluation of the common start as ``start``. Out come one
figure with proxy and gold of all arms against sqrt(KL), a table of where they began, peaked and ended, and the held-out
prompts with differences to the start, paired by prompt. The evaluations need the reward components ``proxy`` and
``gold`` (other names: settings) to show both.
"""

from __future__ import annotations

from pydantic import Field

from stages.spec import InputSpec, OutputSpec, StageConfig, StageSpec


class Config(StageConfig):
    proxy: str = Field("proxy", description="Reward component of the evaluations that was optimised.")
    gold: str = Field("gold", description="Reward component of the evaluations that was held out.")


SPEC = StageSpec(
    name="overoptimisation_arms",
    config=Config,
    inputs={
        "curves": InputSpec("dataset", kinds=("eval_scores/1",), many=True, doc="Curve of each run, as curves.ARM."),
        "evaluations": InputSpec(
            "dataset",
            kinds=("eval_samples/1",),
            many=True,
            required=False,
            doc="Evaluation samples of each run's policy, as evaluations.ARM.",
        ),
        "start": InputSpec(
            "dataset",
            kinds=("eval_samples/1",),
            required=False,
            doc="Evaluation samples of the model that all runs started from.",
        ),
    },
    outputs={
        "results": OutputSpec(
            "dataset", doc="eval_scores/1: ARM/METRIC on the held-out prompts, and ARM/METRIC/gain over the start."
        )
    },
)

SCORES = ("proxy", "gold", "verdict")


def run(stage):
    from stages.evaluation.protocol import require_same
    from stages.evaluation.scores import originals, records_of
    from stages.reporting.reports import document, markdown_table
    from stages.spec import ConfigError

    given, judged = stage.many("curves"), stage.many("evaluations")
    curves = {arm: read_curve(stage.dataset(f"curves.{arm}" if arm else "curves")) for arm in given}
    empty = [arm for arm, curve in curves.items() if not curve["points"]]
    if empty:
        raise ConfigError(
            f"overoptimisation_arms: curves.{empty[0]} has no points of proxy or gold; give the curve output of the"
            " stage overoptimisation"
        )
    names = {
        **({"start": "start"} if stage.has("start") else {}),
        **{arm: f"evaluations.{arm}" if arm else "evaluations" for arm in judged},
    }
    require_same(
        {name: (stage.dataset(path).manifest.get("meta") or {}).get("protocol") for name, path in names.items()}
    )
    records = {name: originals(records_of(stage.dataset(path).iter_rows())) for name, path in names.items()}
    figure(stage, curves)
    ends = [row_of(arm, curve) for arm, curve in curves.items()]
    held_out, shown = on_prompts(
        records,
        {
            "proxy": f"reward/{stage.config.proxy}",
            "gold": f"reward/{stage.config.gold}",
            "accuracy": "accuracy",
            "kl": "kl_reference",
            "length": "length_mean",
            "truncated": "truncation_rate",
        },
    )
    parted = {row["arm"]: row["diverged"] for row in ends if row["diverged"]}
    if parted:
        stage.warn(
            "overoptimised",
            "While the proxy did not fall, another score did:"
            f" {', '.join(f'{scores} in {arm}' for arm, scores in parted.items())}. Stop at the peak, raise the KL"
            " coefficient, or refresh the reward model.",
        )
    write(stage, held_out)
    stage.summary(
        {
            f"{row['arm']}/{key.replace(' ', '_').lower()}": value
            for row in ends
            for key, value in row.items()
            if key != "arm" and isinstance(value, (int, float))
        }
        | {
            f"{name}/held_out/{metric}": m["value"]
            for name, metrics in held_out.items()
            for metric, m in metrics.items()
        }
        | {
            f"{name}/held_out/{metric}_gain{part}": m["gain"][key]
            for name, metrics in held_out.items()
            for metric, m in metrics.items()
            if m["gain"]
            for part, key in (("", "difference"), ("_low", "low"), ("_high", "high"))
            if m["gain"][key] is not None
        }
        | {f"{arm}/diverged": int(arm in parted) for arm in curves}
        | {"arms": len(curves), "diverged": len(parted)}
    )
    if shown:
        stage.report("held-out", table=shown)
    stage.report(
        "arms",
        table=ends,
        markdown=document(
            "Over-optimisation of a reward model",
            "Proxy: the reward model that was optimised. Gold: one that was not. Scores along a run are means over"
            " ended samples; KL is in nats per response; a fall, and the gap by which the proxy rose more than another"
            " score, are in standard deviations of the score over the starting policy's samples.",
            ("Along the runs", markdown_table(ends)),
            (
                "Held-out prompts",
                shown
                and "Brackets are 95% intervals over prompts; gains over the start are paired by prompt.\n\n"
                + markdown_table(shown),
            ),
        ),
    )


def read_curve(dataset) -> dict:
    """{"points": {score: [(x, value, z)]} in the order written, "summary"} of one curve."""
    import json

    points: dict[str, list] = {}
    for row in dataset.iter_rows():
        name = row["metric"].rpartition("/")[2]
        x, z = json.loads(row["config_json"])["x"], json.loads(row["extra_json"] or "{}").get("z")
        if name in SCORES and z is not None:
            points.setdefault(name, []).append((x, row["value"], z))
    return {"points": points, "summary": (dataset.manifest.get("meta") or {}).get("summary") or {}}


def row_of(arm: str, curve: dict) -> dict:
    """Where an arm's scores began, peaked and ended. Of best-of-n, the last point is the largest n."""
    summary, points, row = curve["summary"], curve["points"], {"arm": arm}
    for name in SCORES:
        if name in points:
            values = [v for _, v, _ in points[name]]
            peak = max(range(len(values)), key=values.__getitem__)
            row |= {
                f"{name} first": values[0],
                **({f"{name} peak": values[peak]} if name != "proxy" else {}),
                f"{name} last": values[-1],
            }
            if name == "gold":
                row |= {
                    "fall from the peak": points[name][peak][2] - points[name][-1][2],
                    "KL at the peak": squared(points[name][peak][0]),
                }
    if len(points) > 1:  # proxy and another: how much more the proxy rose
        rose = {name: found[-1][2] - found[0][2] for name, found in points.items()}
        row |= {f"gap to {name}": rose["proxy"] - rose[name] for name in SCORES[1:] if name in rose and "proxy" in rose}
    row |= {
        "KL last": squared(points["proxy"][-1][0]),
        "length first": summary.get("rl/length_first"),
        "length last": summary.get("rl/length_last"),
        "diverged": ", ".join(name for name in SCORES[1:] if summary.get(f"rl/{name}_diverged")),
        "from iteration": summary.get("rl/detected_iteration"),
    }
    return row


def squared(x: float | None) -> float | None:
    return None if x is None else x * x


def on_prompts(records: dict[str, list[dict]], metrics: dict[str, str]) -> tuple[dict, list[dict]]:
    """({model: {metric: {value, low, high, n, gain}}}, table rows): each metric that every evaluation has; the gain
    over `start` paired by prompt.
    """
    from stages.evaluation.scores import average, item_values, paired
    from stages.reporting.reports import with_interval

    found: dict[str, dict] = {name: {} for name in records}
    for metric, source in metrics.items():
        values = {name: item_values(rows, source) for name, rows in records.items()}
        if not records or not all(values.values()):
            continue
        for name, items in values.items():
            m = average([v for v, _ in items.values()], [p for _, p in items.values()])
            gain = paired(records[name], records["start"], source) if "start" in records and name != "start" else None
            found[name][metric] = {"value": m.value, "low": m.low, "high": m.high, "se": m.se, "n": m.n, "gain": gain}
    rows = [
        {
            "model": name,
            **{metric: with_interval(m["value"], m["low"], m["high"]) for metric, m in part.items()},
            **{
                f"{metric} gain": (
                    with_interval(m["gain"]["difference"], m["gain"]["low"], m["gain"]["high"]) if m["gain"] else ""
                )
                for metric, m in part.items()
                if metric in ("proxy", "gold", "accuracy") and "start" in records
            },
        }
        for name, part in found.items()
        if part
    ]
    return found, rows


def figure(stage, curves: dict) -> None:
    """Proxy (dashed) and gold (solid) of every arm against sqrt(KL), as changes in standard deviations; a second one
    with the verdicts.
    """
    from stages.reporting.reports import line_chart

    for name in ("gold", "verdict"):
        series, dashed = {}, {}
        for arm, curve in curves.items():
            for score in (name, "proxy"):
                kept = [(x, z) for x, _, z in curve["points"].get(score, ()) if x is not None]
                if kept and name in curve["points"]:
                    series[f"{arm}: {score}"] = ([x for x, _ in kept], [z - kept[0][1] for _, z in kept])
                    if score == "proxy":
                        dashed[f"{arm}: proxy"] = f"{arm}: {name}"
        if series:
            stage.report(
                f"proxy-and-{name}",
                png=line_chart(
                    series,
                    title=f"Proxy (dashed) and {name} against KL",
                    xlabel="sqrt(KL), sqrt(nats)",
                    markers=True,
                    dashed=dashed,
                    ylabel="change, standard deviations of the start",
                ),
            )


def write(stage, held_out: dict) -> None:
    from stages.evaluation.scores import known, score_row

    rows = [
        (f"{name}/{metric}", m["value"], m["se"], m["n"], {"low": m["low"], "high": m["high"]})
        for name, part in held_out.items()
        for metric, m in part.items()
    ]
    rows += [
        (f"{name}/{metric}/gain", m["gain"]["difference"], m["gain"]["se"], m["gain"]["n"], m["gain"])
        for name, part in held_out.items()
        for metric, m in part.items()
        if m["gain"]
    ]
    writer = stage.writer("results", "eval_scores/1")
    writer.write(
        score_row(
            stage.key[:16],
            "overoptimisation",
            metric,
            value,
            se,
            n,
            config={},
            source="overoptimisation",
            detail=known(detail),
        )
        for metric, value, se, n, detail in rows
    )
    writer.close({"rows": len(rows)})
