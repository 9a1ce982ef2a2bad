"""promote: should the candidate replace the champion? A decision with its evidence, whatever it is.

The candidate is promoted only if all of these hold, each a row of the evidence table:

* same protocol: both were evaluated on the same prompts, template, sampling and graders (else the stage refuses to
  run);
* improvement: the paired difference per prompt in ``metric`` is above ``min_improvement`` with the whole interval;
* gates: every declared metric of the candidate is within its bounds;
* non-regression: for every declared metric the interval of the paired difference stays above minus the tolerance;
* both are scored on the same answers: at most ``max_missing`` of one side's have no value on the other.

All of it on all prompts of the evaluations, or with ``prompts=confirmation`` on the half on which `compare` did not
choose the candidate: the best of several models is partly the luckiest one, and must show its lead where it was not
picked for it (``stages/evaluation/halves.py``).

Without a champion the gates decide, together with a paired test against ``baseline`` (for example the base model) if
one is given; nothing is promoted on no evidence at all.

The stage changes no alias. Its ``decision`` dataset holds the decision in ``manifest.json`` under ``meta.decision``
(:func:`read_decision`) and in the first row's ``config_json``::

    {"promote": true, "candidate": "model:m-4f0c…", "champion": "model:m-81ab…" | null, "metric": "accuracy", "prompts": "all",
     "protocol_hash": "…", "reasons": ["…"], "evidence": [{"check": "improvement", "metric": "accuracy", "candidate": 0.71,
     "compared_to": 0.64, "difference": 0.07, "low": 0.03, "high": 0.11, "p_value": 0.001, "n": 200, "required": "…",
     "passed": true}, …]}

Whoever keeps the registry moves ``champion`` when ``promote`` is true, and records the decision either way.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from stages.spec import InputSpec, OutputSpec, StageConfig, StageSpec

SCORES, SAMPLES = ("eval_scores/1",), ("eval_samples/1",)


class Gate(StageConfig):
    """A bound on one metric of the candidate's evaluation."""

    metric: str = Field(
        description=(
            "Metric name as in the evaluation's scores, for example accuracy, truncation_rate, accuracy/category=add."
        )
    )
    min: float | None = Field(None, title="Min", description="Lowest value that passes.")
    max: float | None = Field(None, title="Max", description="Highest value that passes.")
    use_interval: bool = Field(
        False, description="Hold the bound against the unfavourable end of the 95% interval instead of the value."
    )

    @model_validator(mode="after")
    def _bounded(self):
        if self.min is None and self.max is None:
            raise ValueError(f"gate on {self.metric!r} has no bound; write min=NUMBER or max=NUMBER")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"gate on {self.metric!r}: min {self.min} is above max {self.max}; swap them")
        return self


class NonRegression(StageConfig):
    """A metric that must not get worse than the champion's by more than a tolerance."""

    metric: str = Field(
        description=(
            "Metric with a value per prompt: accuracy, greedy_accuracy, reward, length_mean, truncation_rate,"
            " kl_reference, pass_at_K, ..."
        )
    )
    tolerance: float = Field(
        0.02,
        ge=0,
        description="Largest loss that is accepted, in the metric's unit; the whole interval must stay inside.",
    )


class Config(StageConfig):
    metric: str = Field("accuracy", description="Metric of the improvement test, with a value per prompt.")
    min_improvement: float = Field(0.0, ge=0, description="The interval of the paired difference must lie above this.")
    confidence: float = Field(0.95, gt=0.5, lt=1, description="Level of the bootstrap intervals over prompts.")
    min_prompts: int = Field(
        30,
        ge=2,
        description="Fewer paired prompts (groups of prompts that belong together count once) than this never promote.",
    )
    max_missing: float = Field(
        0.02,
        ge=0,
        le=1,
        description=(
            "Share of the answers scored on one side that may lack a value on the other; above it nothing is promoted"
            " (0.02 is ours)."
        ),
    )
    prompts: Literal["all", "confirmation"] = Field(
        "all",
        description="Prompts that decide: all, or only the half on which `compare` does not choose the best model.",
    )
    gates: list[Gate] = Field(
        default_factory=list,
        description="Bounds on the candidate's own metrics, for example [{metric: truncation_rate, max: 0.05}].",
    )
    non_regression: list[NonRegression] = Field(
        default_factory=list, description="Metrics that must not fall behind the champion's."
    )


SPEC = StageSpec(
    name="promote",
    config=Config,
    inputs={
        "candidate": InputSpec("model", doc="The model that asks for promotion."),
        "candidate_samples": InputSpec("dataset", kinds=SAMPLES, doc="Its evaluation's answers."),
        "candidate_scores": InputSpec("dataset", kinds=SCORES, doc="Its evaluation's metrics."),
        "champion": InputSpec("model", required=False, doc="The model in office."),
        "champion_samples": InputSpec(
            "dataset", kinds=SAMPLES, required=False, doc="The champion's evaluation under the same protocol."
        ),
        "champion_scores": InputSpec("dataset", kinds=SCORES, required=False, doc="Metrics of that evaluation."),
        "baseline_samples": InputSpec(
            "dataset",
            kinds=SAMPLES,
            required=False,
            doc="Without a champion: an evaluation to beat, for example the base model's.",
        ),
    },
    outputs={"decision": OutputSpec("dataset", doc="eval_scores/1: the decision and its evidence.")},
)


def read_decision(path: str) -> dict:
    """The decision stored in a ``decision`` output directory."""
    from storage.datasets import open_dataset

    return open_dataset(path).manifest["meta"]["decision"]


def run(stage):
    from stages.evaluation import scores
    from stages.spec import ConfigError

    candidate = Evaluation.read(stage, "candidate")
    other = Evaluation.read(stage, "champion") if stage.has("champion_samples") else None
    if stage.has("champion") and other is None:
        raise ConfigError(
            "promote: a champion without its evaluation cannot be compared; run the evaluate stage on it with the"
            " candidate's settings and give champion_samples=REF"
        )
    baseline = Evaluation.read(stage, "baseline") if stage.has("baseline_samples") and other is None else None
    candidate, other, baseline = (e and e.on(stage.config.prompts) for e in (candidate, other, baseline))
    decision = decide(stage.config, candidate, champion=other, baseline=baseline)
    decision |= {"candidate": model_ref(candidate.model), "champion": model_ref(other.model) if other else None}
    if unread := [item.metric for item in stage.config.non_regression if other is None]:
        stage.warn(
            "non_regression_unread",
            f"There is no champion that {', '.join(unread)} could fall behind, so non_regression decided nothing."
            " For a bound that holds for the first model, too, write a gate (gates=[{metric: ..., max: ...}]).",
        )
    write_decision(stage, decision, candidate)
    numbers = {
        name: value
        for name, value in scores.flatten(candidate.metrics).items()
        if "/" not in name and not name.endswith("_se")
    }
    stage.summary(
        {
            "promote": int(decision["promote"]),
            "candidate": decision["candidate"],
            "champion": decision["champion"] or "none",
            "protocol_hash": decision["protocol_hash"],
            "checks_failed": sum(not row["passed"] for row in decision["evidence"]),
            "reason": " ".join(decision["reasons"])[:250],
            **{f"candidate/{name}": value for name, value in numbers.items()},
        }
    )
    publish(stage, decision, candidate, other or baseline)
    stage.log(f"{'promote' if decision['promote'] else 'keep'}: {' '.join(decision['reasons'])}")


def model_ref(digest: str) -> str:
    """Content reference of a model: the same whatever name or alias it was given under."""
    return f"model:m-{digest[:12]}"


class Evaluation:
    """One model's evaluation: records, metrics, protocol, and which model it judged."""

    def __init__(self, name: str, records: list[dict], metrics: dict, meta: dict):
        self.name, self.records, self.metrics, self.meta = name, records, metrics, meta
        self.model: str = meta.get("model") or ""

    @classmethod
    def read(cls, stage, name: str) -> "Evaluation":
        """Read ``NAME_samples`` and ``NAME_scores`` and check that both, and the model input, belong together."""
        from stages.evaluation.protocol import is_given
        from stages.spec import ConfigError

        samples = stage.dataset(f"{name}_samples")
        meta = samples.manifest.get("meta") or {}
        if "protocol" not in meta:
            raise ConfigError(
                f"promote: {name}_samples was not written by the evaluate stage (its manifest holds no protocol); run"
                " evaluate on the model and give its samples output"
            )
        if is_given(meta["protocol"]):
            raise ConfigError(
                f"promote: {name}_samples grade answers that were given, and nothing shows which model made them, or how;"
                " evaluate the model itself (posttrain stage evaluate --input model=MODEL --input prompts=REF_OR_PATH)."
                " What given answers are worth beside a model's says stage compare"
            )
        if stage.has(f"{name}_scores") and stage.dataset(f"{name}_scores").manifest.get("meta") != meta:
            raise ConfigError(
                f"promote: {name}_scores and {name}_samples come from different evaluations; give both outputs of one"
                " evaluate run"
            )
        given = stage.inputs[name].digest if stage.has(name) else ""
        if given and meta.get("model") and given != meta["model"]:
            raise ConfigError(
                f"promote: {name}_samples judge model m-{meta['model'][:12]}, but {name} is m-{given[:12]}; evaluate"
                " that model, or give the model that was evaluated"
            )
        if name == "candidate" and given:
            meta = {**meta, "model": given}
        return cls(
            name,
            *load_records(stage, f"{name}_samples", f"{name}_scores" if stage.has(f"{name}_scores") else None),
            meta,
        )

    def on(self, prompts: str) -> "Evaluation":
        """The same evaluation seen on `confirmation` prompts only (`all`: itself): metrics are computed again from
        those records.
        """
        from stages.evaluation.halves import part
        from stages.evaluation.scores import all_metrics

        if prompts == "all":
            return self
        records = part(self.records, prompts)
        return Evaluation(self.name, records, {**all_metrics(records), **group_metrics(records)}, self.meta)


def group_metrics(records: list[dict]) -> dict:
    """Metrics per category and difficulty under the names that the evaluate stage gives them
    (accuracy/category=add).
    """
    from stages.evaluation.scores import Metric, by_group, originals

    answered = [r for r in originals(records) if r["mode"] in ("sample", "greedy")]
    return {
        f"{metric}/{field}={row[field]}": Metric(
            row[metric], row["prompts"], None, row.get(f"{metric}_low"), row.get(f"{metric}_high")
        )
        for field in ("category", "difficulty")
        for row in by_group(answered, field)
        for metric in ("accuracy", "greedy_accuracy", "reward")
        if row.get(metric) is not None
    }


def load_records(stage, samples: str, scores_input: str | None = None) -> tuple[list[dict], dict]:
    """(sample records, metrics by name): from the scores dataset if there is one, else computed from the samples."""
    import json

    from stages.evaluation.scores import Metric, all_metrics, records_of

    records = records_of(stage.dataset(samples).iter_rows())
    if scores_input is None:
        return records, all_metrics(records)
    metrics = {}
    for row in stage.dataset(scores_input).iter_rows():
        interval = json.loads(row["extra_json"] or "{}")
        metrics[row["metric"]] = Metric(row["value"], row["n"], row["se"], interval.get("low"), interval.get("high"))
    return records, metrics


def decide(
    config: Config, candidate: Evaluation, *, champion: Evaluation | None = None, baseline: Evaluation | None = None
) -> dict:
    """The decision without the model references: promote, metric, protocol_hash, reasons, evidence.

    Raises:
        ProtocolError: the evaluations were made under different protocols.
        ConfigError: a metric that the evaluation does not have, or nothing to decide on.
    """
    from stages.evaluation.protocol import protocol_hash, require_same
    from stages.spec import ConfigError

    other = champion or baseline
    if other is None and not config.gates:
        raise ConfigError(
            "promote: without a champion there is nothing to compare with, so declare at least one gate, for example"
            ' gates=[{"metric": "accuracy", "min": 0.5}], or give baseline_samples=REF; nothing is promoted without'
            " evidence"
        )
    evidence = [gate_row(gate, candidate) for gate in config.gates]
    if other is not None:
        require_same({candidate.name: candidate.meta["protocol"], other.name: other.meta["protocol"]})
        evidence.insert(0, improvement_row(config, candidate, other))
        if champion is not None:
            evidence += [non_regression_row(item, config, candidate, champion) for item in config.non_regression]
    failed = [row for row in evidence if not row["passed"]]
    reasons = [row["reason"] for row in failed] or [row["reason"] for row in evidence]
    if champion is not None and champion.model and champion.model == candidate.model:
        reasons = ["The candidate is the champion, byte for byte."]
        failed = evidence
    return {
        "promote": not failed,
        "metric": config.metric,
        "prompts": config.prompts,
        "protocol_hash": protocol_hash(candidate.meta["protocol"]),
        "reasons": reasons,
        "evidence": evidence,
    }


def _paired(metric: str, candidate: Evaluation, other: Evaluation, config: Config) -> dict:
    from stages.evaluation.protocol import require_same_scorers
    from stages.evaluation.scores import paired
    from stages.spec import ConfigError

    require_same_scorers(metric, {e.name: e.meta for e in (candidate, other)})
    try:
        return paired(candidate.records, other.records, metric, config.confidence)
    except ValueError as error:
        raise ConfigError(f"promote: {error}") from None


def _one_sided(result: dict, config: Config, other: Evaluation) -> str:
    """Why a comparison is void: one side was not scored where the other was, and that part is seldom like the rest.
    Empty: it is not.
    """
    for side, name in (("candidate", "candidate"), ("champion", other.name)):
        if (result[f"{side}_missing"] or 0.0) > config.max_missing:
            return (
                f"The {name} has no {result['metric']} for {result[f'{side}_missing']:.1%} of the answers that were"
                f" scored on the other side, more than max_missing={config.max_missing:g}; why is under unscorable in"
                " its samples, or the model has no room for these prompts (warning prompts_too_long)."
            )
    return ""


def improvement_row(config: Config, candidate: Evaluation, other: Evaluation) -> dict:
    """Paired test of the main metric; a gain counts in the metric's good direction."""
    from stages.evaluation.scores import lower_is_better

    result = _paired(config.metric, candidate, other, config)
    sign = -1.0 if lower_is_better(config.metric) else 1.0
    enough = result["n"] >= config.min_prompts
    bound = None if result["low"] is None else min(sign * result["low"], sign * result["high"])
    void = _one_sided(result, config, other)
    passed = enough and not void and bound is not None and bound > config.min_improvement
    grouped = (
        ""
        if result["n"] == result["items"]
        else f" (groups of the {result['items']} items that belong together count once)"
    )
    if not enough:
        where = "" if config.prompts == "all" else " of the confirmation half"
        reason = (
            f"Only {result['n']} prompts{where} are scored in both evaluations{grouped}; at least"
            f" min_prompts={config.min_prompts} are needed."
        )
    elif void:
        reason = void
    else:
        reason = (
            f"{config.metric} {result['candidate']:.4f} against {result['champion']:.4f} of the {other.name}:"
            f" difference {result['difference']:+.4f} [{result['low']:+.4f}, {result['high']:+.4f}] on {result['n']}"
            f" prompts{grouped}{'' if config.prompts == 'all' else ' that took no part in choosing it'},"
            f" {'above' if passed else 'not clearly above'}"
            f" {config.min_improvement:g}{' (lower is better)' if sign < 0 else ''}."
        )
    return _row(
        f"improvement over {other.name}",
        config.metric,
        result,
        f"{config.confidence:.0%} interval of the gain above {config.min_improvement:g}",
        passed,
        reason,
    )


def non_regression_row(item: NonRegression, config: Config, candidate: Evaluation, champion: Evaluation) -> dict:
    """The interval of the paired difference must stay above minus the tolerance (in the metric's good direction)."""
    from stages.evaluation.scores import lower_is_better

    result = _paired(item.metric, candidate, champion, config)
    sign = -1.0 if lower_is_better(item.metric) else 1.0
    bound = None if result["low"] is None else min(sign * result["low"], sign * result["high"])
    void = _one_sided(result, config, champion)
    passed = not void and bound is not None and bound >= -item.tolerance
    reason = void or (
        f"{item.metric} {result['candidate']:.4f} against {result['champion']:.4f}: the interval of the difference "
        f"{'stays within' if passed else 'reaches beyond'} the tolerance of {item.tolerance:g}."
    )
    return _row("non-regression", item.metric, result, f"loss at most {item.tolerance:g}", passed, reason)


def _row(check: str, metric: str, result: dict, required: str, passed: bool, reason: str) -> dict:
    keys = (
        "difference",
        "low",
        "high",
        "se",
        "p_value",
        "mcnemar_p_value",
        "n",
        "better",
        "worse",
        "candidate_missing",
        "champion_missing",
        "note",
    )
    return {
        "check": check,
        "metric": metric,
        "candidate": result["candidate"],
        "compared_to": result["champion"],
        **{key: result[key] for key in keys if result.get(key) is not None},
        "required": required,
        "passed": bool(passed),
        "reason": reason,
    }


def gate_row(gate: Gate, candidate: Evaluation) -> dict:
    """One bound against the candidate's metric, or against the unfavourable end of its interval."""
    from stages.spec import ConfigError, did_you_mean

    metric = candidate.metrics.get(gate.metric)
    if metric is None:
        names = sorted(candidate.metrics)
        raise ConfigError(
            f"promote: the gate's metric {gate.metric!r} is not in the candidate's evaluation;"
            f" {did_you_mean(gate.metric, names)}its metrics are:"
            f" {', '.join(name for name in names if '/' not in name)}"
        )
    low, high = (metric.low, metric.high) if gate.use_interval else (metric.value, metric.value)
    if low is None or high is None:
        raise ConfigError(f"promote: metric {gate.metric!r} has no interval; write use_interval=false for its gate")
    required = " and ".join(
        part
        for part in (
            f">= {gate.min:g}" if gate.min is not None else "",
            f"<= {gate.max:g}" if gate.max is not None else "",
        )
        if part
    )
    passed = (gate.min is None or low >= gate.min) and (gate.max is None or high <= gate.max)
    interval = "" if metric.low is None else f" [{metric.low:.4f}, {metric.high:.4f}]"
    reason = (
        f"{gate.metric} {metric.value:.4f}{interval} {'meets' if passed else 'misses'} the gate"
        f" {required}{' with its interval' if gate.use_interval else ''}."
    )
    row = {
        "check": "gate",
        "metric": gate.metric,
        "candidate": metric.value,
        "n": metric.n,
        "required": required,
        "passed": bool(passed),
        "reason": reason,
    }
    return row if metric.low is None else {**row, "candidate_low": metric.low, "candidate_high": metric.high}


def write_decision(stage, decision: dict, candidate: Evaluation) -> None:
    """``eval_scores/1``: row 0 is the decision (value 1 or 0), then one row per check."""
    from stages.evaluation.scores import score_row

    rows = [("promote", float(decision["promote"]), None, len(decision["evidence"]), decision)]
    rows += [
        (
            f"{index}:{row['check']}:{row['metric']}",
            row.get("difference", row["candidate"]),
            row.get("se"),
            row["n"],
            row,
        )
        for index, row in enumerate(decision["evidence"])
    ]
    writer = stage.writer("decision", "eval_scores/1", meta={"decision": decision})
    writer.write(
        score_row(stage.key[:16], "promotion", metric, value, se, n, config=content, source=decision["candidate"])
        for metric, value, se, n, content in rows
    )
    writer.close({"checks": len(decision["evidence"]), "promote": int(decision["promote"])})


def publish(stage, decision: dict, candidate: Evaluation, other: Evaluation | None) -> None:
    """The evidence as a table, a page and a bar figure."""
    from stages.reporting import reports

    rows = [
        {
            "check": r["check"],
            "metric": r["metric"],
            "candidate": r["candidate"],
            "compared to": r.get("compared_to"),
            "difference": r.get("difference"),
            "low": r.get("low"),
            "high": r.get("high"),
            "p": r.get("p_value"),
            "n": r["n"],
            "required": r["required"],
            "passed": r["passed"],
        }
        for r in decision["evidence"]
    ]
    bars = [
        {"model": name, "value": m.value, "low": m.low, "high": m.high}
        for name, e in (("candidate", candidate), (other.name if other else "", other))
        if e and (m := e.metrics.get(decision["metric"]))
    ]
    if bars:
        stage.report(
            "candidate-and-champion",
            png=reports.bar_chart(bars, title=f"{decision['metric']} (95% interval)", ylabel=decision["metric"]),
        )
    verdict = "**Promote** the candidate." if decision["promote"] else "**Keep** what is in office."
    stage.report(
        "decision",
        table=rows,
        markdown=reports.document(
            "Promotion decision",
            verdict,
            reports.facts(
                {
                    "candidate": decision["candidate"],
                    "champion": decision["champion"] or "none",
                    "prompts": decision["prompts"],
                    "protocol": decision["protocol_hash"],
                }
            ),
            ("Why", "\n".join(f"- {reason}" for reason in decision["reasons"])),
            ("Evidence", reports.markdown_table(rows)),
        ),
    )
