"""Small moves that the recipes share: where data comes from, ingestion, evaluation of several models, promotion."""

from __future__ import annotations

from typing import Any

from flows.config import ConfigError
from flows.recipe import Outputs, Run
from stages.compare import Config as CompareConfig
from stages.evaluate import Config as EvaluateConfig
from stages.running.http_json import SERVER_SETTINGS

#: Shares of files that have no splits; a prompt is in the same split of all of them. Datasets with held-out rows, the
#: embedded world's too, keep theirs.
HELD_OUT = {"validation_fraction": 0.05, "test_fraction": 0.1}
#: Of a file of test problems: every row is one (the share of training rows cannot be 0, but no file is so long that one
#: falls into it).
ALL_TEST = {"test_fraction": 1 - 1e-9}


class Source:
    """Where each kind of data comes from: the user's path, else the embedded world (generated once, on first need)."""

    def __init__(self, run: Run, config: Any):
        self.run, self.config, self.world = run, config, None

    def __call__(self, kind: str) -> str:
        given = getattr(self.config.data, kind)
        return given if given is not None else self.generated("comparisons" if kind == "pairs" else kind)

    def generated(self, output: str) -> str:
        """An output of the embedded world."""
        if self.world is None:
            self.world = self.run("world", config=self.config.world)
        return self.world[output]


def ingest(run: Run, what: str, path: str, config: Any) -> str:
    """Check, convert and split data; the section `ingest_WHAT` says how. Returns the dataset's ref.

    Test problems of a source of their own (`data.test`) are looked for in what is trained on, by the section's
    `decontaminate`; without them that is off.

    Raises:
        ConfigError: the evaluation at the recipe's end would find no prompts; said here, before anything is trained.
    """
    section, test = getattr(config, f"ingest_{what}"), getattr(config.data, "test", None) if what != "test" else None
    if not test and section.decontaminate != "off":
        if section.decontaminate != type(config).model_fields[f"ingest_{what}"].default.decontaminate:
            raise ConfigError(
                f"ingest_{what}.decontaminate={section.decontaminate} has no test problems to compare with; "
                + (
                    "write data.test=REF_OR_PATH"
                    if hasattr(config.data, "test")
                    else "prepare the data by itself: posttrain stage ingest --input data=FILE --input"
                    " benchmarks.test=FILE"
                )
                + ", or leave it out"
            )
        section = section.model_copy(update={"decontaminate": "off"})
    against = {"test": test} if section.decontaminate != "off" else None
    outputs = run("ingest", f"ingest_{what}", data=path, benchmarks=against, config=section, name_as=what)
    judged = (
        config.evaluate.split
        if what == "prompts" and hasattr(config, "evaluate") and getattr(config.data, "test", None) is None
        else None
    )
    if judged and "rows_out" in outputs.metrics and not outputs.metrics.get(f"split.{judged}"):
        there = {name.removeprefix("split."): n for name, n in outputs.metrics.items() if name.startswith("split.")}
        raise ConfigError(
            f"{path}: no prompt is in split {judged!r}, on which the models are to be evaluated; it has"
            f" {', '.join(f'{name} ({n})' for name, n in there.items()) or 'no prompts'}. Write"
            f" ingest_prompts.{judged}_fraction=0.5 to hold out more of a file, give more prompts, or write"
            f" evaluate.split={next(iter(there), 'train')}"
        )
    return outputs["data"]


def judge_of(model: str | None, section: Any, like: Any = None) -> tuple[str | None, Any]:
    """(model that judges, None where a server does; the section): one that names no server asks the one of the section
    ``like``.
    """
    if like is not None and like.endpoint and not section.endpoint:
        section = section.model_copy(update={name: getattr(like, name) for name in SERVER_SETTINGS})
    return (None if section.endpoint else model), section


def compared(run: Run, answers: dict[str, str], judge: str | None, config: Any, **inputs: str | None) -> list[dict]:
    """Win rates of models by their answers, as :func:`win_rates`, by stage win_rate."""
    found = run("win_rate", answers=answers, judge=judge, config=config, **inputs).metrics
    return win_rates(found, [name for name in answers if name != config.baseline], config.baseline)


def win_rates(metrics: dict, names: list[str], baseline: str) -> list[dict]:
    """One row per model with its win rate against the baseline, and one per trait where it was judged by traits."""
    rows = []
    for name in names:
        traits = [
            key.removesuffix("/win_rate")
            for key in metrics
            if key.startswith(f"{name}/trait/") and key.endswith("/win_rate")
        ]
        for part in (name, *traits):
            rate, low, high = (metrics.get(f"{part}/win_rate{suffix}") for suffix in ("", "_low", "_high"))
            if rate is None:
                continue
            more = {"length-controlled": "lc_win_rate", "ties": "tie_rate"}
            rows.append(
                {
                    "model": name,
                    "against": baseline,
                    **({"trait": part.removeprefix(f"{name}/trait/")} if part != name else {}),
                    "win rate": round(rate, 4),
                    "win rate 95%": f"[{low:.3f}, {high:.3f}]",
                    **{
                        shown: round(value, 4)
                        for shown, key in more.items()
                        if (value := metrics.get(f"{part}/{key}")) is not None
                    },
                }
            )
    return rows


class Evaluations(dict):
    """model name -> outputs of its evaluation; `best` is the name that `compare` chose on the selection half of the
    prompts.
    """

    best: str = ""

    METRICS = ("accuracy", "greedy_accuracy", "reward", "pair_accuracy", "kl_reference", "length_mean")

    def table(self) -> list[dict[str, Any]]:
        """One row per model: the main metrics with their 95% intervals."""
        rows = []
        for name, outputs in self.items():
            row: dict[str, Any] = {"model": name}
            for metric in self.METRICS:
                value = outputs.metrics.get(metric)
                if not isinstance(value, (int, float)) or (
                    metric == "pair_accuracy" and outputs.metrics.get("pair_tie_rate") == 1
                ):
                    continue  # the reference itself prefers nothing over itself
                low, high = outputs.metrics.get(f"{metric}_low"), outputs.metrics.get(f"{metric}_high")
                row[metric] = round(value, 4)
                if isinstance(low, (int, float)) and isinstance(high, (int, float)):
                    row[f"{metric} 95%"] = f"[{low:.3f}, {high:.3f}]"
            rows.append(row)
        return rows


def evaluate_all(
    run: Run,
    models: dict[str, str],
    config: Any,
    select_by: str | None = None,
    step: str = "compare",
    metric: str | None = None,
    **inputs: str | None,
) -> Evaluations:
    """Evaluate every model on the same inputs with the same settings, and set them side by side (the step named).

    select_by: metric by which the best one is chosen, on half of the prompts; the gate tests the choice on the other
    half. metric: what they are compared by and shown first; empty: the first main metric that all of them have.
    """
    outputs = run.together(
        [lambda name=name, model=model: evaluate(run, name, model, config, **inputs) for name, model in models.items()]
    )
    found = Evaluations(zip(models, outputs))
    if metric is not None:
        found.METRICS = (metric, *Evaluations.METRICS)
    chosen_by = select_by if select_by and has(found, select_by) else None
    compared = run(
        "compare",
        step,
        evaluations={name: outputs["samples"] for name, outputs in found.items()},
        config=CompareConfig(metric=metric or shared_metric(found), order=list(found), select_by=chosen_by),
    )
    found.best = compared.metrics.get("best") or list(found)[-1]  # nothing to choose by: the last, most trained one
    return found


def graded(
    run: Run, answers: dict[str, str], models: tuple[str, ...], config: Any, **inputs: str | None
) -> Evaluations:
    """Grade what others answered to the prompts that ``models`` will be evaluated on (steps evaluate_given_NAME). It
    needs none of these, so it stands before what trains them: answers that do not fit end the run in seconds.
    """
    if taken := [name for name in answers if name in models or "/" in name]:
        raise ConfigError(
            f"data.answers: {taken[0]!r} is the name of a model of this run, or has a slash; call the answers otherwise"
        )
    if not answers:
        return Evaluations()
    for name in ("environment", "mt_bench"):
        if getattr(config, name):
            raise ConfigError(
                f"data.answers: under evaluate.{name} the models are asked otherwise than given texts answer, so they do"
                f" not compare; leave data.answers or evaluate.{name} out"
            )
    grading = {name: getattr(config, name) for name in ("split", "limit", "rewards", "refusal_judge", "chunk")}
    graders = EvaluateConfig(**grading, multiple_choice=["generation"])
    outputs = run.together(
        [
            lambda name=name, ref=ref: run("evaluate", f"evaluate_given_{name}", answers=ref, config=graders, **inputs)
            for name, ref in answers.items()
        ]
    )
    return Evaluations(zip(answers, outputs))


def beside_given(run: Run, given: Evaluations, evaluations: Evaluations) -> list[dict[str, Any]]:
    """Set the best model beside answers that others gave (step compare_given); one row per set of these."""
    if not given:
        return []
    every = Evaluations({evaluations.best: evaluations[evaluations.best], **given})
    run(
        "compare",
        "compare_given",
        evaluations={name: outputs["samples"] for name, outputs in every.items()},
        config=CompareConfig(metric=shared_metric(every), order=list(every)),
    )
    return given.table()


def contamination(run: Run, models: dict[str, str], evaluations: Evaluations, prompts: str, config: Any) -> Outputs:
    """How much of the prompts the last, most trained model and its ancestors were trained on, and its scores on the
    rest (step `contamination`).
    """
    last = list(models)[-1]
    return run(
        "contamination",
        model=models[last],
        prompts=prompts,
        samples=evaluations[last]["samples"],
        config=config.contamination.model_copy(update={"split": config.evaluate.split}),
    )


def has(evaluations: Evaluations, metric: str) -> bool:
    """Whether every evaluation has the metric; True under a plan, where there are no numbers yet."""
    return all(
        not outputs.metrics or isinstance(outputs.metrics.get(metric), (int, float)) for outputs in evaluations.values()
    )


def shared_metric(evaluations: Evaluations) -> str:
    """The first main metric that every evaluation has (prompts without checkable answers have no accuracy)."""
    return next((metric for metric in Evaluations.METRICS if has(evaluations, metric)), "accuracy")


def evaluate(run: Run, name: str, model: str, config: Any, **inputs: str | None) -> Outputs:
    """Evaluate one model; the step is called evaluate_NAME."""
    return run("evaluate", f"evaluate_{name}", model=model, config=config, **inputs)


def promote(
    run: Run,
    models: dict[str, str],
    evaluations: Evaluations,
    config: Any,
    evaluation: Any,
    *,
    baseline: str,
    name: str,
    **inputs: str | None,
) -> dict[str, Any]:
    """Put the best model through the gate: against the champion of `name`, or against the baseline while there is none.

    The champion is evaluated on the same inputs, and the decision is recorded whatever it is. Evaluations without the
    gate's metric are no evidence: nothing is promoted, and the answer says what to write.
    """
    winner = evaluations.best
    if not has(evaluations, config.metric):
        return {
            "promoted": False,
            "model": models[winner],
            "name": name,
            "alias": "champion",
            "version": None,
            "reasons": [
                f"The evaluations have no {config.metric}, so there is no evidence; give prompts with checkable"
                f" answers, or write promote.metric={shared_metric(evaluations)}."
            ],
        }

    given = {
        "candidate": models[winner],
        "candidate_samples": evaluations[winner]["samples"],
        "candidate_scores": evaluations[winner]["scores"],
    }
    office = run.champion(name)
    if office is not None and office != models[winner]:
        judged = evaluate(run, "champion", office, evaluation, **inputs)
        given |= {"champion": office, "champion_samples": judged["samples"], "champion_scores": judged["scores"]}
    else:
        given |= {"baseline_samples": evaluations[baseline]["samples"]}
    return run.conclude(models[winner], run("promote", config=config, **given), name)
