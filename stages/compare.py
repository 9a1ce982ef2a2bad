"""compare: several models on the same prompts in one table, with intervals and paired differences from model to model.

Give the ``samples`` output of each evaluation as ``evaluations.NAME`` (``evaluations.base``, ``evaluations.sft`` ...). Evaluations made
under different protocols are refused; reward columns appear only where the same reward model scored all of them.

With ``select_by`` the summary names the ``best`` model, chosen on half of the prompts only, so that the promotion gate can test that choice on
the other half (``stages/evaluation/halves.py``).
"""

from __future__ import annotations

from pydantic import Field

from stages.spec import InputSpec, OutputSpec, StageConfig, StageSpec


class Config(StageConfig):
    metric: str = Field("accuracy", description="Metric of the paired differences and the figure, with a value per prompt.")
    order: list[str] = Field(default_factory=list, description="Names in the order of the table; each model is compared with the one before. Empty: as given.")
    confidence: float = Field(0.95, gt=0.5, lt=1, description="Level of the bootstrap intervals over prompts.")
    select_by: str | None = Field(None, title="Select by", description="Metric that chooses the best model on the selection half of the prompts; empty: none is named.")


SPEC = StageSpec(
    name="compare", config=Config,
    inputs={"evaluations": InputSpec("dataset", kinds=("eval_samples/1",), many=True, doc="Samples of each model's evaluation, as evaluations.NAME.")},
    outputs={"comparison": OutputSpec("dataset", doc="eval_scores/1: metrics per model and paired differences.")})

COLUMNS = ("accuracy", "greedy_accuracy", "prompt_level_strict_acc", "reward", "kl_reference", "length_mean", "truncation_rate")


def run(stage):
    from stages.evaluation import scores
    from stages.evaluation.protocol import differing_inputs, protocol_hash, require_same, require_same_scorers
    from stages.spec import ConfigError, did_you_mean

    config = stage.config
    given = stage.many("evaluations")
    names = list(config.order) or list(given)
    unknown = [name for name in names if name not in given]
    if unknown:
        raise ConfigError(f"compare: order names {unknown[0]!r}, which is not given; {did_you_mean(unknown[0], list(given))}the evaluations are: {', '.join(given)}")
    names += [name for name in given if name not in names]
    inputs = {name: f"evaluations.{name}" if name else "evaluations" for name in names}
    metas = {name: stage.dataset(inputs[name]).manifest.get("meta") or {} for name in names}
    missing = [name for name in names if "protocol" not in metas[name]]
    if missing:
        raise ConfigError(f"compare: {inputs[missing[0]]} was not written by the evaluate stage; give its samples output")
    require_same({name: metas[name]["protocol"] for name in names})
    for metric in (config.metric, config.select_by):
        require_same_scorers(metric, metas)
    records, metrics = {}, {}
    for index, name in enumerate(names):
        records[name] = scores.records_of(stage.dataset(inputs[name]).iter_rows())
        metrics[name] = scores.all_metrics(records[name])
        stage.progress(index + 1, len(names), name)
    columns = [column for column in COLUMNS if not differing_inputs(column, metas) and all(column in m for m in metrics.values())]
    if len({(meta.get("scorers") or {}).get("reward_model") for meta in metas.values()}) > 1:
        stage.warn("different_reward_models", "The evaluations were scored by different reward models, so rewards are left out of the comparison. Evaluate all "
                   "models with the same reward_model.")
    differences = paired_differences(names, records, columns, config)
    rows = table(names, metrics, columns, differences, config.metric)
    summary = {"models": len(names), "protocol_hash": protocol_hash(metas[names[0]]["protocol"])}
    for name in names:
        flat = scores.flatten({column: metrics[name][column] for column in columns})
        summary |= {f"{name or 'model'}/{key}": value for key, value in flat.items() if not key.endswith("_se")}
        if (name, config.metric) in differences:
            d = differences[name, config.metric]
            summary |= {f"{name}/{config.metric}_gain": d["difference"], f"{name}/{config.metric}_gain_low": d["low"], f"{name}/{config.metric}_gain_high": d["high"]}
    best = select(stage, config, records) if config.select_by else {}
    stage.summary({key: value for key, value in {**summary, **best}.items() if value is not None})
    write(stage, names, metrics, columns, differences, metas)
    publish(stage, names, metrics, columns, rows, records, best)


def select(stage, config: Config, records: dict) -> dict:
    """Summary entries of the choice: best, best_by, best_value and best_prompts (of the selection half)."""
    from stages.evaluation.halves import choose
    from stages.spec import ConfigError

    try:
        best, means, prompts = choose(records, config.select_by)
    except ValueError as error:
        raise ConfigError(f"compare: select_by: {error}") from None
    if best is None:
        stage.warn("nothing_to_select_by", f"No model has a value of {config.select_by!r} on the selection half of the prompts, so none is named best. "
                   "Write another metric that the evaluations have, for example reward.")
        return {}
    return {"best": best, "best_by": config.select_by, "best_value": means[best], "best_prompts": prompts}


def paired_differences(names: list[str], records: dict, columns: list[str], config: Config) -> dict[tuple[str, str], dict]:
    """{(name, metric): paired result against the model before it}."""
    from stages.evaluation.scores import paired
    from stages.spec import ConfigError

    metrics = list(dict.fromkeys([config.metric, *columns])) if columns else []
    found = {}
    for before, name in zip(names, names[1:]):
        for metric in metrics:
            try:
                found[name, metric] = paired(records[name], records[before], metric, config.confidence)
            except ValueError as error:
                if metric == config.metric:
                    raise ConfigError(f"compare: {error}") from None
    return found


def table(names: list[str], metrics: dict, columns: list[str], differences: dict, metric: str) -> list[dict]:
    """Rows of the report: one per model, intervals in brackets, the paired gain over the row above."""
    from stages.reports import with_interval

    rows = []
    for name in names:
        row = {"model": name or "model"} | {column: with_interval(m.value, m.low, m.high) for column in columns for m in [metrics[name][column]]}
        if (name, metric) in differences:
            d = differences[name, metric]
            row |= {f"{metric} gain over the row above": with_interval(d["difference"], d["low"], d["high"]), "p": d["p_value"], "better / worse": f"{d['better']} / {d['worse']}"}
        rows.append(row)
    return rows


def write(stage, names: list[str], metrics: dict, columns: list[str], differences: dict, metas: dict) -> None:
    """``eval_scores/1`` rows: NAME/METRIC and NAME-BEFORE/METRIC differences."""
    from storage.files import canonical_json
    from storage.schema import complete_row

    rows = [(f"{name}/{column}", m.value, m.se, m.n, {"low": m.low, "high": m.high}, metas[name]) for name in names for column in columns for m in [metrics[name][column]]]
    rows += [(f"{name}/{metric}/gain", d["difference"], d["se"], d["n"], d, metas[name]) for (name, metric), d in differences.items()]
    writer = stage.writer("comparison", "eval_scores/1", meta={"names": names, "protocol_hash": metas[names[0]]["protocol_hash"]})
    writer.write(complete_row("eval_scores/1", {
        "run_id": stage.key[:16], "benchmark": "comparison", "metric": metric, "value": float(value), "se": se, "n": int(n),
        "config_json": canonical_json({"protocol_hash": meta["protocol_hash"], "model": meta["model"]}),
        "extra_json": canonical_json({key: item for key, item in detail.items() if item is not None})},
        dataset="comparison", source=f"model:m-{meta['model'][:12]}", origin="conversion", split="test") for metric, value, se, n, detail, meta in rows)
    writer.close({"models": len(names)})


def publish(stage, names: list[str], metrics: dict, columns: list[str], rows: list[dict], records: dict, best: dict) -> None:
    """The table as a page, bars per metric, and answers of all models to the same prompts side by side."""
    from stages import reports
    from stages.evaluation.scores import by_group

    for column in columns:
        stage.report(f"compare-{column}", png=reports.bar_chart(
            [{"model": name or "model", "value": metrics[name][column].value, "low": metrics[name][column].low, "high": metrics[name][column].high} for name in names],
            title=f"{column} (95% interval)", ylabel=column))
    rewarded = {name: [r["reward"] for r in records[name] if r["mode"] == "sample" and r["reward"] is not None] for name in names}
    if "reward" in columns and all(rewarded.values()):
        ends = {name or "model": rewarded[name] for name in dict.fromkeys([names[0], names[-1]])}
        stage.report("reward-before-after", png=reports.histogram(ends, title="Reward of sampled answers, first and last model", xlabel="reward"))
    lengths = {name or "model": [r["tokens"] for r in records[name] if r["mode"] == "sample"] for name in dict.fromkeys([names[0], names[-1]])}
    if all(lengths.values()):
        stage.report("length-before-after", png=reports.histogram(lengths, title="Answer length, first and last model", xlabel="tokens"))
    blocks = []
    for field in ("category", "difficulty"):
        groups = {name: {row[field]: row for row in by_group([r for r in records[name] if r["mode"] in ("sample", "greedy")], field)} for name in names}
        kinds = list(groups[names[0]])
        grid = [{field: kind, **{name or "model": groups[name].get(kind, {}).get("accuracy") for name in names}} for kind in kinds]
        if grid and any(value is not None for row in grid for key, value in row.items() if key != field):
            stage.report(f"compare-by-{field}", table=grid)
            blocks.append((f"Accuracy by {field}", reports.markdown_table(grid)))
    answers = side_by_side(names, records)
    if answers:
        stage.report("answers", table=answers)
        blocks.append(("The same prompts, greedy answers", reports.sample_table(answers[:8], limit=120)))
    stage.report("comparison", table=rows, markdown=reports.document("Models on the same prompts", "Brackets are 95% intervals over prompts; gains are paired per prompt.",
        f"Best by {best['best_by']} on the {best['best_prompts']} prompts of the selection half: **{best['best']}** ({best['best_value']:.4f})." if best else "", ("Results", reports.markdown_table(rows)), *blocks))


def side_by_side(names: list[str], records: dict, count: int = 24) -> list[dict]:
    """Greedy answers of every model to the first prompts, with a mark for right ones."""
    found = {name: {r["item_id"]: r for r in records[name] if r["mode"] == "greedy"} for name in names}
    rows = []
    for item, first in list(found[names[0]].items())[:count]:
        row = {"prompt": first["prompt"], "expected": first.get("answer")}
        for name in names:
            answer = found[name].get(item)
            mark = "" if answer is None or answer["correct"] is None else "✓ " if answer["correct"] else "✗ "
            row[name or "model"] = None if answer is None else mark + answer["output"]
        rows.append(row)
    return rows
