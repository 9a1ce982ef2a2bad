"""compare: several models on the same prompts in one table, with intervals and paired differences from model to model.

Give the ``samples`` output of each evaluation as ``evaluations.NAME`` (``evaluations.base``, ``evaluations.sft`` ...),
on several benchmarks as ``evaluations.NAME/BENCHMARK`` (``evaluations.base/gsm8k``, ``evaluations.sft/gsm8k``,
``evaluations.base/text`` ...). Evaluations made under different protocols are refused; reward columns appear only where
the same reward model scored all of them.

Every model after the first is also set against the first: the *alignment tax*, what each benchmark and the loss of
held-out text gained or lost, with paired errors and a warning of what fell by more than two of them
(``stages/evaluation/tax.py``).

Models whose KL to one reference was measured are drawn as reward (or right answers) against KL: which no other beats at
equal or lower KL, and the best reward within a KL (``stages/measures/frontier.py``); right answers are also drawn
against the tokens that they may take.

With ``select_by`` the summary names the ``best`` model, chosen on half of the prompts only, so that the promotion gate
can test that choice on the other half (``stages/evaluation/halves.py``).
"""

from __future__ import annotations

from pydantic import Field

from stages.spec import InputSpec, OutputSpec, StageConfig, StageSpec


class Config(StageConfig):
    metric: str = Field(
        "accuracy",
        description=(
            "Metric of the paired differences and the figure, with a value per prompt; of several benchmarks, one"
            " without it shows its first."
        ),
    )
    order: list[str] = Field(
        default_factory=list,
        description="Names in the order of the table; each model is compared with the one before. Empty: as given.",
    )
    confidence: float = Field(0.95, gt=0.5, lt=1, description="Level of the bootstrap intervals over prompts.")
    prompted: bool = Field(
        False,
        description=(
            "The evaluations may differ in system message and examples, which then belong to the model: arms that are"
            " aligned by a prompt (eval.urial, eval.hhh_prompt)."
        ),
    )
    kl_budgets: list[float] = Field(
        default_factory=list,
        description=(
            "KL to the reference, nats per answer, at which the best reward within it is reported (eval.kl_frontier)."
        ),
    )
    select_by: str | None = Field(
        None,
        title="Select by",
        description="Metric that chooses the best model on the selection half of the prompts; empty: none is named.",
    )


SPEC = StageSpec(
    name="compare",
    config=Config,
    inputs={
        "evaluations": InputSpec(
            "dataset",
            kinds=("eval_samples/1",),
            many=True,
            doc="Samples of each model's evaluation, as evaluations.NAME or evaluations.NAME/BENCHMARK.",
        )
    },
    outputs={"comparison": OutputSpec("dataset", doc="eval_scores/1: metrics per model and paired differences.")},
)

#: What a protocol says of the prompt around a question.
PROMPT = ("system", "few_shot")

COLUMNS = (
    "accuracy",
    "greedy_accuracy",
    "prompt_level_strict_acc",
    "mc_letter_acc",
    "mc_text_acc",
    "mc_text_acc_norm",
    "perplexity",
    "bits_per_byte",
    "mt_bench",
    "over_refusal_rate",
    "refusal_rate_unsafe",
    "refusal_balanced",
    "rewardbench",
    "rewardbench2",
    "rm_bench",
    "reward",
    "kl_reference",
    "length_mean",
    "length_characters",
    "truncation_rate",
)


#: By how much longer answers have to be than those of the model before for a warning (section H, alarms).
GREW = 0.3


def run(stage):
    from stages.evaluation import scores
    from stages.evaluation.tax import told
    from stages.spec import ConfigError

    config = stage.config
    suites = by_benchmark(stage, config)
    if config.select_by and len(suites) > 1:
        raise ConfigError(
            "compare: select_by chooses on one set of prompts, and several benchmarks are given; leave it out, or"
            " compare the benchmark that decides by itself"
        )
    done, total = 0, sum(map(len, suites.values()))
    parts = []
    for benchmark, inputs in suites.items():
        parts.append(Part(stage, benchmark, inputs))
        done += len(inputs)
        stage.progress(done, total, benchmark)
    best = select(stage, config, parts[0].records) if config.select_by else {}
    taxes = alignment_taxes(parts)
    summary = {"models": len(parts[0].names), "protocol_hash": parts[0].protocol_hash}
    for part in parts:
        summary |= part.summary()
    leaderboard = suites_of_h4(parts)
    for suite, found in leaderboard.items():
        if len(found) > 1 and all(leaderboard.values()):
            stage.warn(
                "h4_ambiguous",
                f"Several benchmarks begin with {suite} ({', '.join(part.benchmark for part in found)}), so there is no"
                " h4 average: which of them belongs to it cannot be told. Call the others otherwise, or leave them"
                " out.",
            )
    summary |= {
        f"{name or 'model'}/{key}": value
        for name, m in h4(parts).items()
        for key, value in scores.flatten({"h4": m}).items()
    }
    for name, tax in taxes.items():
        summary |= {
            f"{name}/regressed": len(tax["regressed"]),
            f"{name}/mean_delta": tax["mean_delta"],
            f"{name}/worst_delta": tax["worst"],
        }
    stage.summary({key: value for key, value in {**summary, **best}.items() if value is not None})
    for name, tax in taxes.items():
        if tax["regressed"]:
            stage.warn(
                "alignment_tax",
                f"{name} is below {parts[0].names[0]} by more than 2 standard errors:"
                f" {'; '.join(told(row) for row in tax['regressed'])}. Look at what was trained since; pretraining text"
                " mixed in (ptx_coef), a higher KL penalty or an average of both models (merge) give some of it back.",
            )
    write(stage, parts, taxes)
    for part in parts:
        publish(stage, part, best)
    if taxes:
        publish_taxes(stage, parts[0].names[0], taxes)


def by_benchmark(stage, config: Config) -> dict[str, dict[str, str]]:
    """{benchmark: {model: name of its input}}, models in order; the benchmark is "" where labels name models only.
    Raises ConfigError where a model lacks a benchmark.
    """
    from stages.spec import ConfigError, did_you_mean

    found: dict[str, dict[str, str]] = {}
    for label in stage.many("evaluations"):
        name, _, benchmark = label.partition("/")
        found.setdefault(benchmark, {})[name] = f"evaluations.{label}" if label else "evaluations"
    given = list(dict.fromkeys(name for inputs in found.values() for name in inputs))
    unknown = [name for name in config.order if name not in given]
    if unknown:
        raise ConfigError(
            f"compare: order names {unknown[0]!r}, which is not given; {did_you_mean(unknown[0], given)}the evaluations"
            f" are: {', '.join(given)}"
        )
    names = [*config.order, *(name for name in given if name not in config.order)]
    for benchmark, inputs in found.items():
        missing = [name for name in names if name not in inputs]
        if missing:
            raise ConfigError(
                f"compare: {missing[0]!r} has no evaluation on {benchmark or 'the benchmark without a name'!r}; give"
                f" evaluations.{missing[0]}{'/' + benchmark if benchmark else ''}=REF, or leave that benchmark out for"
                f" {', '.join(inputs)} too"
            )
    return {benchmark: {name: inputs[name] for name in names} for benchmark, inputs in found.items()}


class Part:
    """The models on one benchmark: their records and metrics, and the differences from model to model."""

    def __init__(self, stage, benchmark: str, inputs: dict[str, str]):
        from stages.evaluation import scores
        from stages.evaluation.protocol import (
            comparable,
            differing_inputs,
            protocol_hash,
            require_same,
            require_same_scorers,
            told_of_given,
        )
        from stages.evaluation.scores import lower_is_better
        from stages.spec import ConfigError

        config = stage.config
        self.benchmark = benchmark
        self.names = list(inputs)
        self.kl_budgets = stage.config.kl_budgets
        self.metas = {name: stage.dataset(inputs[name]).manifest.get("meta") or {} for name in inputs}
        missing = [name for name in inputs if "protocol" not in self.metas[name]]
        if missing:
            raise ConfigError(
                f"compare: {inputs[missing[0]]} was not written by the evaluate stage; give its samples output"
            )
        protocols = {
            name: {
                field: value
                for field, value in self.metas[name]["protocol"].items()
                if not (config.prompted and field in PROMPT)
            }
            for name in inputs
        }
        if told := told_of_given(protocols):
            stage.warn("answers_given", told)
        protocols = comparable(protocols)
        require_same(protocols)
        self.protocol_hash = protocol_hash(protocols[self.names[0]])
        for metric in (config.metric, config.select_by):
            require_same_scorers(metric, self.metas)
        self.records = {name: scores.records_of(stage.dataset(inputs[name]).iter_rows()) for name in inputs}
        self.metrics = {name: scores.all_metrics(records) for name, records in self.records.items()}
        self.records = {name: scores.originals(records) for name, records in self.records.items()}
        if told:  # the tokens of given answers are not known
            self.metrics = {name: m | scores.in_characters(self.records[name]) for name, m in self.metrics.items()}
        self.comparable = lambda metric: not differing_inputs(metric, self.metas)
        self.columns = [
            column for column in COLUMNS if self.comparable(column) and all(column in m for m in self.metrics.values())
        ]
        self.metric = (
            config.metric
            if not benchmark or all(config.metric in m for m in self.metrics.values())
            else next(iter(self.columns), config.metric)
        )
        if len({(meta.get("scorers") or {}).get("reward_model") for meta in self.metas.values()}) > 1:
            stage.warn(
                "different_reward_models",
                "The evaluations were scored by different reward models, so rewards are left out of the comparison."
                " Evaluate all models with the same reward_model.",
            )
        gain = next(
            (name for name in ("reward", self.metric) if name in self.columns and not lower_is_better(name)), None
        )
        self.frontier_of = gain if gain and "kl_reference" in self.columns and len(self.names) > 1 else None
        self.differences = paired_differences(
            self.names, self.records, self.columns, self.metric, config.confidence, by_item=bool(told)
        )
        for name, before in zip(self.names[1:], self.names):
            for side, missing in ((name, "candidate_missing"), (before, "champion_missing")):
                if lacking := (self.differences.get((name, self.metric)) or {}).get(missing):
                    stage.warn(
                        "answers_missing",
                        f"{side} has no {self.metric} for {lacking:.1%} of the answers that were scored for"
                        f" {before if side == name else name}{f' on {benchmark}' if benchmark else ''}: their gain is"
                        " over the items that both have, and each column over the model's own. Why is under unscorable"
                        " in its samples, or the model has no room for these prompts (prompts_too_long); evaluate it"
                        " again where a server or grader failed.",
                    )
        for name, before in zip(self.names[1:], self.names):
            length = self.differences.get((name, "length_mean"))
            if length and (length["low"] or 0.0) > 0 and length["candidate"] > (1 + GREW) * length["champion"]:
                stage.warn(
                    "answers_longer",
                    f"The answers of {name} are {length['candidate'] / length['champion'] - 1:.0%} longer than those of"
                    f" {before}{f' on {benchmark}' if benchmark else ''} ({length['champion']:.0f} to"
                    f" {length['candidate']:.0f} tokens): judges and reward models like length for its own sake. Compare"
                    " win rates that control for it (stage win_rate), or train with align method=simpo or length_norm,"
                    " or with a length reward.",
                )

    def summary(self) -> dict[str, float]:
        """Its numbers, under the benchmark's name where there is one."""
        from stages.evaluation import scores
        from stages.measures import frontier

        found, before = {}, f"{self.benchmark}/" if self.benchmark else ""
        for name in self.names:
            flat = scores.flatten({column: self.metrics[name][column] for column in self.columns})
            found |= {
                f"{before}{name or 'model'}/{key}": value for key, value in flat.items() if not key.endswith("_se")
            }
            if (name, self.metric) in self.differences:
                d, stem = self.differences[name, self.metric], f"{before}{name}/{self.metric}_gain"
                found |= {stem: d["difference"], f"{stem}_low": d["low"], f"{stem}_high": d["high"]}
        if points := self.points():
            best, spread = frontier.of(points), list(points.values())
            found |= {f"{before}{name or 'model'}/on_kl_frontier": float(name in best) for name in self.names}
            found |= {
                f"{before}kl_frontier/{self.frontier_of}_mean_over_kl": frontier.area(
                    spread, max(kl for kl, _ in spread)
                )
            }
            found |= {
                f"{before}kl_frontier/{self.frontier_of}_at_kl={budget:g}": frontier.reward_at(spread, budget)
                for budget in self.kl_budgets
            }
        return found

    def points(self) -> dict[str, tuple[float, float]]:
        """{model: (KL to the reference, reward or right answers)}; {} where these were not measured for all."""
        return (
            {
                name: (self.metrics[name]["kl_reference"].value, self.metrics[name][self.frontier_of].value)
                for name in self.names
            }
            if self.frontier_of
            else {}
        )


def alignment_taxes(parts: list[Part]) -> dict[str, dict]:
    """{model: {"rows", "regressed", "mean_delta", "worst"}} of every model after the first, against the first, over all
    benchmarks.
    """
    from stages.evaluation.tax import judged, rows_of

    found = {}
    for name in parts[0].names[1:]:
        rows = [
            row
            for part in parts
            for row in rows_of(part.records[part.names[0]], part.records[name], part.benchmark, part.comparable)
        ]
        if rows:
            found[name] = {"rows": rows, **judged(rows)}
    return found


#: The suites of the H4 average, by how their benchmark's name begins, and the metric that each is known by; else its
#: share of right answers.
H4 = {"arc": "mc_text_acc_norm", "hellaswag": "mc_text_acc_norm", "mmlu": "mc_letter_acc", "truthfulqa": "mc_text_acc"}


def suites_of_h4(parts: list[Part]) -> dict[str, list[Part]]:
    """{suite: the benchmarks whose names begin with it}; of ARC's two sets the challenge."""
    plain = lambda part: part.benchmark.lower().replace("-", "").replace("_", "")
    found = {suite: [part for part in parts if plain(part).startswith(suite)] for suite in H4}
    if len(found["arc"]) > 1:
        found["arc"] = [part for part in found["arc"] if "challenge" in plain(part)] or found["arc"]
    return found


def h4(parts: list[Part]) -> dict:
    """{model: mean of ARC, HellaSwag, MMLU and TruthfulQA} where benchmarks of these names are compared (eval.h4), with
    the interval of independent suites; else {}.
    """
    from dataclasses import replace

    from stages.evaluation.scores import weighted
    from stages.measures.suites import h4_mean

    found, given = {}, suites_of_h4(parts)
    for suite, metric in H4.items():
        part = given[suite][0] if len(given[suite]) == 1 else None
        name = next(
            (
                name
                for name in (metric, "accuracy")
                if part is not None and all(name in m for m in part.metrics.values())
            ),
            None,
        )
        if name is None:
            return {}
        found[suite] = {model: part.metrics[model][name] for model in part.names}
    return {
        model: replace(
            weighted([(0.25, found[suite][model]) for suite in H4]),
            value=h4_mean(*(found[suite][model].value for suite in H4)),
        )
        for model in parts[0].names
    }


def select(stage, config: Config, records: dict) -> dict:
    """Summary entries of the choice: best, best_by, best_value and best_prompts (of the selection half)."""
    from stages.evaluation.halves import choose
    from stages.spec import ConfigError

    try:
        best, means, prompts = choose(records, config.select_by)
    except ValueError as error:
        raise ConfigError(f"compare: select_by: {error}") from None
    if best is None:
        stage.warn(
            "nothing_to_select_by",
            f"No model has a value of {config.select_by!r} on the selection half of the prompts, so none is named best."
            " Write another metric that the evaluations have, for example reward.",
        )
        return {}
    return {"best": best, "best_by": config.select_by, "best_value": means[best], "best_prompts": prompts}


def paired_differences(
    names: list[str], records: dict, columns: list[str], main: str, confidence: float, by_item: bool = False
) -> dict[tuple[str, str], dict]:
    """{(name, metric): paired result against the model before it}; ``by_item``: see ``scores.paired``."""
    from stages.evaluation.scores import paired
    from stages.spec import ConfigError

    metrics = list(dict.fromkeys([main, *columns])) if columns else []
    found = {}
    for before, name in zip(names, names[1:]):
        for metric in metrics:
            try:
                found[name, metric] = paired(records[name], records[before], metric, confidence, by_item=by_item)
            except ValueError as error:
                if metric == main:
                    raise ConfigError(f"compare: {error}") from None
    return found


def table(names: list[str], metrics: dict, columns: list[str], differences: dict, metric: str) -> list[dict]:
    """Rows of the report: one per model, intervals in brackets, the paired gain over the row above; where that may be
    chance, how many prompts a test of shares that large would need (two-sided 5%, power 80%, not paired, which needs
    the most; eval.statistics). ``items``: those that the model's own ``metric`` is over. Where several gains are
    tested, ``p of all`` is Holm's, which counts them all."""
    from stages.reporting.reports import with_interval
    from stages.measures.statistics import holm, power_two_proportions

    tested = [
        name for name in names if (name, metric) in differences and differences[name, metric]["p_value"] is not None
    ]
    together = (
        dict(zip(tested, holm([differences[name, metric]["p_value"] for name in tested]))) if len(tested) > 1 else {}
    )
    rows = []
    for name in names:
        row = {"model": name or "model", **({"items": metrics[name][metric].n} if metric in metrics[name] else {})} | {
            column: with_interval(m.value, m.low, m.high) for column in columns for m in [metrics[name][column]]
        }
        if (name, metric) in differences:
            d = differences[name, metric]
            row |= {
                f"{metric} gain over the row above": with_interval(d["difference"], d["low"], d["high"]),
                "p": d["p_value"],
                **({"p of all": together[name]} if name in together else {}),
                "better / worse": f"{d['better']} / {d['worse']}",
            }
            shares = [metrics[one][metric].value for one in (names[names.index(name) - 1], name)]
            if (
                d["low"] is not None
                and d["low"] <= 0 <= d["high"]
                and all(0 <= share <= 1 for share in shares)
                and shares[0] != shares[1]
            ):
                row["prompts to tell"] = power_two_proportions(*shares)
        rows.append(row)
    return rows


def write(stage, parts: list[Part], taxes: dict[str, dict]) -> None:
    """``eval_scores/1`` rows: NAME/METRIC, NAME/METRIC/gain over the model before, and NAME/METRIC/tax against the
    first.
    """
    from stages.evaluation.protocol import judged
    from stages.evaluation.scores import known, score_row

    rows = []
    for part in parts:
        title, metas = part.benchmark or "comparison", part.metas
        rows += [
            (title, f"{name}/{column}", m.value, m.se, m.n, {"low": m.low, "high": m.high}, metas[name])
            for name in part.names
            for column in part.columns
            for m in [part.metrics[name][column]]
        ]
        rows += [
            (title, f"{name}/{metric}/gain", d["difference"], d["se"], d["n"], d, metas[name])
            for (name, metric), d in part.differences.items()
        ]
    rows += [
        (
            row["benchmark"],
            f"{name}/{row['metric']}/tax",
            row["delta"],
            row["se"],
            row["items"],
            row,
            parts[0].metas[name],
        )
        for name, tax in taxes.items()
        for row in tax["rows"]
    ]
    names = parts[0].names
    writer = stage.writer("comparison", "eval_scores/1", meta={"names": names, "protocol_hash": parts[0].protocol_hash})
    writer.write(
        score_row(
            stage.key[:16],
            benchmark,
            metric,
            value,
            se,
            n,
            config={
                "protocol_hash": meta["protocol_hash"],
                **{name: meta[name] for name in ("model", "answers") if meta.get(name)},
            },
            source=judged(meta),
            detail=known(detail),
        )
        for benchmark, metric, value, se, n, detail, meta in rows
    )
    writer.close({"models": len(names)})


def publish_taxes(stage, first: str, taxes: dict[str, dict]) -> None:
    """The table of every model against the first, over all benchmarks."""
    from stages.reporting import reports

    table = [{"model": name, **row} for name, tax in taxes.items() for row in tax["rows"]]
    shown = [
        {
            "model": row["model"],
            "benchmark": row["benchmark"],
            "metric": row["metric"],
            "before": row["before"],
            "after": row["after"],
            "change": reports.with_interval(row["delta"], row["low"], row["high"]),
            "se": row["se"],
            "items": row["items"],
            "verdict": row["verdict"],
        }
        for row in table
    ]
    means = [
        f"{name}: mean change of the benchmarks' share of right answers {tax['mean_delta']:+.4f}, worst"
        f" {tax['worst']:+.4f}."
        for name, tax in taxes.items()
        if tax["mean_delta"] is not None
    ]
    stage.report(
        "alignment-tax",
        table=table,
        markdown=reports.document(
            f"Against {first or 'the first model'}",
            "Paired on the items that both have; better and worse are beyond 2 standard errors. Of a loss, less is"
            f" better. If nothing had changed, {0.0455 * sum(row['se'] is not None for row in table):.1f} of the"
            f" {len(table)} rows would be called so by chance.",
            reports.markdown_table(shown),
            "\n".join(means),
        ),
    )


def publish(stage, part: Part, best: dict) -> None:
    """The table as a page, bars per metric, and answers of all models to the same prompts side by side."""
    from stages.reporting import reports
    from stages.evaluation import signs
    from stages.measures import frontier
    from stages.evaluation.scores import by_group

    names, metrics, columns, records = part.names, part.metrics, part.columns, part.records
    rows = table(names, metrics, columns, part.differences, part.metric)
    before = f"{part.benchmark}-" if part.benchmark else ""
    _draw_values(stage, part, before)
    blocks = []
    for field in ("category", "difficulty"):
        groups = {
            name: {
                row[field]: row
                for row in by_group([r for r in records[name] if r["mode"] in ("sample", "greedy")], field)
            }
            for name in names
        }
        kinds = list(groups[names[0]])
        grid = [
            {field: kind, **{name or "model": groups[name].get(kind, {}).get("accuracy") for name in names}}
            for kind in kinds
        ]
        if grid and any(value is not None for row in grid for key, value in row.items() if key != field):
            stage.report(f"{before}compare-by-{field}", table=grid)
            blocks.append((f"Accuracy by {field}", reports.markdown_table(grid)))
    if points := part.points():
        rows_of = frontier.table(points, part.frontier_of)
        stairs = [row for row in rows_of if row["on the frontier"]]
        stage.report(
            f"{before}kl-frontier",
            table=rows_of,
            png=reports.line_chart(
                {
                    "frontier": ([row["kl"] for row in stairs], [row[part.frontier_of] for row in stairs]),
                    **{row["model"]: ([row["kl"]], [row[part.frontier_of]]) for row in rows_of},
                },
                title=f"{part.frontier_of} against KL to the reference",
                xlabel="KL, nats per answer",
                ylabel=part.frontier_of,
                markers=True,
            ),
        )
        blocks.append(("Reward against KL", reports.markdown_table(rows_of)))
    _draw_by_tokens(stage, part, before)
    changed = signs.side_by_side({name: metrics[name] for name in names})
    if changed:
        stage.report(f"{before}signs", table=changed)
        blocks.append(("Style, reasoning, diversity", reports.markdown_table(changed)))
    answers = side_by_side(names, records)
    if answers:
        stage.report(f"{before}answers", table=answers)
        blocks.append(("The same prompts, greedy answers", reports.sample_table(answers[:8], limit=120)))
    stage.report(
        f"{before}comparison",
        table=rows,
        markdown=reports.document(
            f"Models on {part.benchmark or 'the same prompts'}",
            "Brackets are 95% intervals over prompts; gains are paired per prompt.",
            (
                f"Best by {best['best_by']} on the {best['best_prompts']} prompts of the selection half:"
                f" **{best['best']}** ({best['best_value']:.4f})."
                if best
                else ""
            ),
            ("Results", reports.markdown_table(rows)),
            *blocks,
        ),
    )


def _draw_values(stage, part: Part, before: str) -> None:
    """Bars per metric; rewards and lengths of the first and the last model's samples."""
    from stages.evaluation.scores import lengths_of
    from stages.reporting import reports

    names, metrics, columns, records = part.names, part.metrics, part.columns, part.records
    for column in columns:
        stage.report(
            f"{before}compare-{column}",
            png=reports.bar_chart(
                [
                    {
                        "model": name or "model",
                        "value": metrics[name][column].value,
                        "low": metrics[name][column].low,
                        "high": metrics[name][column].high,
                    }
                    for name in names
                ],
                title=f"{column} (95% interval)",
                ylabel=column,
            ),
        )
    rewarded = {
        name: [r["reward"] for r in records[name] if r["mode"] == "sample" and r["reward"] is not None]
        for name in names
    }
    if "reward" in columns and all(rewarded.values()):
        ends = {name or "model": rewarded[name] for name in dict.fromkeys([names[0], names[-1]])}
        stage.report(
            f"{before}reward-before-after",
            png=reports.histogram(ends, title="Reward of sampled answers, first and last model", xlabel="reward"),
        )
    ends = {
        name or "model": [r for r in records[name] if r["mode"] == "sample"]
        for name in dict.fromkeys([names[0], names[-1]])
    }
    if all(ends.values()):
        every, unit = lengths_of([r for answers in ends.values() for r in answers])
        measured = iter(every)
        lengths = {name: [next(measured) for _ in answers] for name, answers in ends.items()}
        stage.report(
            f"{before}length-before-after",
            png=reports.histogram(lengths, title="Answer length, first and last model", xlabel=unit),
        )


def _draw_by_tokens(stage, part: Part, before: str) -> None:
    """What is right within ever longer budgets of tokens."""
    from stages.evaluation import compute
    from stages.reporting import reports

    names, records = part.names, part.records
    longest = max(
        (r["tokens"] for name in names for r in records[name] if r["mode"] in ("sample", "greedy")), default=0
    )
    budgets = compute.halves(longest)
    spent = {name: compute.by_tokens(records[name], budgets) for name in names} if longest else {}
    if spent and all(spent.values()):
        stage.report(
            f"{before}accuracy-by-tokens",
            table=[
                {"tokens": budget, **{name or "model": spent[name][i]["accuracy"] for name in names}}
                for i, budget in enumerate(budgets)
            ],
            png=reports.line_chart(
                {name or "model": (budgets, [row["accuracy"] for row in spent[name]]) for name in names},
                title="Right and within the token budget",
                xlabel="tokens per answer",
                ylabel="accuracy",
                markers=True,
                log_x=True,
            ),
        )


def side_by_side(names: list[str], records: dict, count: int = 24, changes_first: bool = False) -> list[dict]:
    """Greedy answers of every model to the first prompts, with a mark for right ones; ``changes_first``: prompts whose
    verdicts differ, then those whose answers do, come first.
    """
    from stages.evaluation.scores import counted

    found = {
        name: {r["item_id"]: r for r in records[name] if r["mode"] == "greedy"}
        or {r["item_id"]: r for r in records[name] if not counted(r) and r["sample_idx"] == 0}  # that were given
        for name in names
    }
    rows, items = [], list(found[names[0]].items())
    if changes_first:
        same = {
            item: [
                len({one.get(item, {}).get(column) for one in found.values()}) == 1 for column in ("correct", "output")
            ]
            for item, _ in items
        }
        items.sort(key=lambda pair: same[pair[0]])
    for item, first in items[:count]:
        row = {"prompt": first["prompt"], "expected": first.get("answer")}
        for name in names:
            answer = found[name].get(item)
            mark = "" if answer is None or answer["correct"] is None else "✓ " if answer["correct"] else "✗ "
            row[name or "model"] = None if answer is None else mark + answer["output"]
        rows.append(row)
    return rows
