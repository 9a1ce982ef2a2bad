"""sweep: a recipe or a stage over a grid of settings and several seeds, ranked by one metric.

    posttrain sweep sft --input model=DIR --input data=FILE --over learning_rate=1e-5,3e-5,1e-4 --seeds 0,1 --metric
    validation/nll --goal min posttrain sweep preference --set data.path=pairs.jsonl --set model=DIR --over
    dpo.beta=0.05,0.1,0.3 --metric evaluate_dpo.pair_accuracy posttrain sweep rl --input model=REF --input data=REF
    --over kl_coef=0,0.02,0.1 --over preset=grpo,rloo --trials 4 --metric last/reward

A trial is one combination of the settings, run once per seed; what trials share (ingestion, or a whole recipe above the
setting that differs) is computed once, and a finished trial is reused by any later sweep, recipe or stage run that asks
for the same. A trial whose stage fails is listed as failed and the others go on. Where there are several GPUs, trials
run side by side, one per slot. Nothing is promoted by a sweep. The steps are called TRIAL.STEP, so Prefect and MLflow
show what belongs together.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import statistics
from typing import Any, Literal, Optional

from pydantic import Field, field_validator

from flows.config import ConfigError, build, field_at, load_preset, merge, nearest, scalar
from flows.recipe import RECIPES, Outputs, RecipeConfig, Run, get_recipe, recipe, ui_url, unread, value_at
from stages.registry import STAGES, get_stage
from stages.reporting.former_names import renamed


class Config(RecipeConfig):
    what: str = Field(description="A recipe or a stage; write stage:NAME where both exist.")
    preset: Optional[str] = Field(None, title="Preset", description="Preset of the recipe that all trials start from.")
    inputs: dict[str, str] = Field({}, description="Inputs of the stage: name -> ref, path or hub id.")
    settings: dict[str, Any] = Field({}, description="Settings that all trials share, nested or with dotted keys.")
    over: dict[str, list[Any]] = Field(
        description="Dotted setting (or inputs.NAME of a stage) -> its values; every combination is a trial.",
        min_length=1,
    )
    seeds: list[int] = Field([], description="Seeds of every trial; empty: the sweep's own.")
    trials: Optional[int] = Field(
        None,
        ge=1,
        title="Trials",
        description="That many combinations, drawn at random with the sweep's seed; empty: all.",
    )
    metric: str = Field(description="What ranks the trials: a metric of the stage; of a recipe STEP.METRIC.")
    goal: Literal["max", "min"] = Field("max", description="Whether more or less of the metric is better.")

    @field_validator("over")
    @classmethod
    def _some_values(cls, over: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for key, values in over.items():
            if not values:
                raise ValueError(f"{key} has no values; write for example {key}: [1e-5, 1e-4]")
        return over


class Trial(Run):
    """The run as one trial sees it: its steps carry the trial's name, its seed is its own, and it promotes nothing."""

    def __init__(self, run: Run, name: str, seed: int):
        super().__init__(run.recipe, seed, [], run.record)
        self.whole, self.name = run, name
        self.found: dict[str, Outputs] = {}

    def __call__(self, stage, label=None, *, config=None, name_as=None, seed=None, **inputs) -> Outputs:
        label = label or stage
        self.found[label] = self.whole(
            stage,
            f"{self.name}.{label}",
            config=config,
            name_as=name_as,
            seed=self.seed if seed is None else seed,
            **inputs,
        )
        return self.found[label]

    def together(self, parts):
        return self.whole.together(parts)

    def champion(self, name):
        return self.whole.champion(name)

    def conclude(self, candidate, outputs, name):
        return {}


@recipe(Config)
def sweep(run: Run, config: Config) -> dict:
    """A recipe or a stage over a grid of settings and several seeds, ranked by one metric."""
    from tasks.run import StageError

    kind, name = target(config.what)
    rows, failures, tries = [], [], []
    for title, values, seeds in planned(config):
        rows.append({"values": values, "seeds": len(seeds), "scores": [], "outputs": {}, "failed": 0})
        tries += [
            (rows[-1], Trial(run, f"{title}.s{seed}" if len(seeds) > 1 else title, seed), settings, inputs)
            for seed, settings, inputs in seeds
        ]

    def tried(trial: Trial, settings: Any, inputs: dict[str, str]) -> tuple[Any, float | None] | StageError:
        try:
            return attempt(kind, name, trial, settings, inputs), measured(kind, trial, config.metric)
        except StageError as error:
            return error

    outcomes = run.together([lambda rest=rest: tried(*rest) for _, *rest in tries])
    for (row, trial, *_), outcome in zip(tries, outcomes):
        if isinstance(outcome, StageError):
            row["failed"] += 1
            failures.append(f"{trial.name}: {str(outcome).splitlines()[0]}")
        elif outcome[1] is not None:
            row["outputs"][str(trial.seed)], score = outcome
            row["scores"].append(score)
    if failures and not any(row["scores"] for row in rows):
        raise ConfigError("every trial failed; the first: " + failures[0])
    rows.sort(key=lambda row: order(row, config.goal))
    table, best = shown(rows, config.metric), rows[0]
    if run.record is not None:
        report(config, table, failures)
    return {
        "trials": table,
        "failures": failures,
        **(
            {"best": {"settings": best["values"], config.metric: table[0][config.metric], "outputs": best["outputs"]}}
            if best["scores"]
            else {}
        ),
    }


def target(what: str) -> tuple[str, str]:
    """('recipe' | 'stage', its name)."""
    name = what.removeprefix("stage:")
    if what in RECIPES and what != "sweep":
        return "recipe", what
    if name in STAGES:
        return "stage", name
    near = nearest(name, [*RECIPES, *STAGES])
    raise ConfigError(
        f"a sweep runs a recipe or a stage, and {what!r} is neither; "
        + (f"did you mean {near!r}? " if near and near != "sweep" else "")
        + f"recipes: {', '.join(r for r in RECIPES if r != 'sweep')}; stages: {', '.join(STAGES)}"
    )


def planned(config: Config) -> list[tuple[str, dict[str, Any], list[tuple[int, Any, dict[str, str]]]]]:
    """(name, values, (seed, configuration, inputs) per seed) of every trial.

    Raises:
        ConfigError: a setting or an input of some trial is wrong.
    """
    kind, name = target(config.what)
    chosen = combinations(config)
    trials = [
        (
            title,
            values,
            [(seed, *configured(kind, name, config, values, seed)) for seed in config.seeds or [config.seed]],
        )
        for title, values in zip(titles(chosen), chosen)
    ]
    if kind == "recipe" and (idle := never_read(name, [seeds[0][1] for _, _, seeds in trials])):
        raise ConfigError("\n".join(idle))
    return trials


def never_read(name: str, settings: list[Any]) -> list[str]:
    """What is to be said of settings that no step of any trial reads: trials that differ in one would all be the
    same.
    """
    flow, read = get_recipe(name), set()  # what one trial reads need not be tried in the others
    found = [unread(name, flow.method, one, read) for one in settings]
    usual = lambda one, key: value_at(one, key) == field_at(flow.config_type, key)[0]
    return [
        said
        for key, said in {key: said for told in found for key, said in told.items()}.items()
        if all(key in told or usual(one, key) for told, one in zip(found, settings))
    ]


def combinations(config: Config) -> list[dict[str, Any]]:
    """The trials: dotted setting -> value, in the grid's order."""
    grid = [dict(zip(config.over, values)) for values in itertools.product(*config.over.values())]
    if config.trials is None or config.trials >= len(grid):
        return grid
    return [grid[i] for i in sorted(random.Random(config.seed).sample(range(len(grid)), config.trials))]


def titles(chosen: list[dict[str, Any]]) -> list[str]:
    """A name per trial that can stand in a step's: the last part of each setting that differs with its value, else a
    number.
    """
    moving = [key for key in chosen[0] if len({str(values[key]) for values in chosen}) > 1] or list(chosen[0])
    plain = all(
        isinstance(values[key], (str, int, float, bool)) and re.fullmatch(r"[A-Za-z0-9_.+-]{1,16}", str(values[key]))
        for values in chosen
        for key in moving
    )
    names = (
        ["_".join(f"{key.rpartition('.')[2]}-{values[key]}" for key in moving) for values in chosen] if plain else []
    )
    if not names or max(map(len, names)) > 60 or len({*names}) < len(names):
        return [f"trial-{number}" for number in range(1, len(chosen) + 1)]
    return names


def configured(kind: str, name: str, config: Config, values: dict[str, Any], seed: int) -> tuple[Any, dict[str, str]]:
    """(validated configuration, inputs) of one trial and seed.

    Raises:
        ConfigError: a setting or an input that the recipe or stage does not have.
    """
    inputs = {
        **config.inputs,
        **{
            key.removeprefix("inputs."): str(value)
            for key, value in values.items()
            if kind == "stage" and key.startswith("inputs.")
        },
    }
    moved = {key: value for key, value in values.items() if not (kind == "stage" and key.startswith("inputs."))}
    given = merge(
        load_preset(name, config.preset) if kind == "recipe" and config.preset else {}, nested(config.settings)
    )
    given = merge(given, nested(moved))
    if kind == "recipe":
        if config.inputs:
            raise ConfigError(
                f"{name} is a recipe and takes its data as settings, not as inputs; write for example settings: {{data:"
                f" {{…}}}}; `posttrain run {name} --dry-run` lists them"
            )
        if "seed" in moved:
            raise ConfigError(
                "seeds are not a setting to sweep over; write --seeds 0,1,2, and the table has their mean and range"
            )
        return build(get_recipe(name).config_type, {**given, "seed": seed}), {}
    if config.preset:
        raise ConfigError(f"{name} is a stage and has no presets of the command line; write its settings with --set")
    spec = get_stage(name).SPEC
    settings = build(spec.config, given)
    spec.check_inputs(inputs, settings)
    return settings, inputs


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """{'align.beta': 1} -> {'align': {'beta': 1}}; values that are mappings already are merged."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        found = merge(found, value)
    return found


def attempt(kind: str, name: str, trial: Trial, settings: Any, inputs: dict[str, str]) -> dict[str, Any]:
    """Run one trial; the refs of what it made."""
    if kind == "recipe":
        result = get_recipe(name).method(trial, settings) or {}
        return result.get("models") or (trial.found[list(trial.found)[-1]].refs if trial.found else {})
    return trial(name, config=settings, **inputs).refs


def measured(kind: str, trial: Trial, metric: str) -> float | None:
    """The trial's value of the metric; None where it has none yet (a plan) or it is no finite number.

    Raises:
        ConfigError: no step of the trial has such a metric.
    """
    numbers = {
        (f"{label}.{key}" if kind == "recipe" else key): value
        for label, outputs in trial.found.items()
        for key, value in outputs.metrics.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    if not numbers:
        return None
    if metric not in numbers:
        step, dot, name = metric.rpartition(".")
        of_step = {key.removeprefix(step + dot) for key in numbers if key.startswith(step + dot)}
        near = nearest(metric, list(numbers))
        raise ConfigError(
            f"trial {trial.name} has no metric {metric!r}; "
            + (renamed(name, of_step) or (f"did you mean {near!r}? " if near else ""))
            + "it has: "
            + ", ".join(sorted(numbers))
        )
    return float(numbers[metric]) if math.isfinite(numbers[metric]) else None


def order(row: dict[str, Any], goal: str) -> tuple:
    """Sort key: best mean first, trials of which seeds failed or gave no finite number after those that are whole,
    those without any last.
    """
    if not row["scores"]:
        return (2, 0.0)
    mean = statistics.fmean(row["scores"])
    return (len(row["scores"]) < row["seeds"], -mean if goal == "max" else mean)


def shown(rows: list[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """The table's row of each trial: its settings, mean of the metric over seeds, the lowest and the highest seed."""
    table, failed = [], any(row["failed"] for row in rows)
    for row in rows:
        scores = row["scores"]
        found = {metric: statistics.fmean(scores) if scores else None}
        if len(scores) > 1:
            found |= {
                "seeds": f"{min(scores):.4g} to {max(scores):.4g}",
                "standard error": statistics.stdev(scores) / math.sqrt(len(scores)),
            }
        table.append({**row["values"], **found, **({"failed": row["failed"]} if failed else {})})
    return table


def report(config: Config, table: list[dict[str, Any]], failures: list[str]) -> None:
    """The table as an artifact of the flow run."""
    from prefect.artifacts import create_markdown_artifact
    from prefect.logging import get_run_logger

    from stages.reporting.reports import document, markdown_table

    sections = [("Trials, best first", markdown_table(table))] + (
        [("Failed", "\n".join(f"- {line}" for line in failures))] if failures else []
    )
    try:
        page = create_markdown_artifact(
            key="sweep",
            markdown=document(
                f"Sweep of {config.what}", f"Ranked by {config.metric} ({config.goal}), mean over seeds.", *sections
            ),
        )
        if url := ui_url("artifacts/artifact", page):
            get_run_logger().info("results: %s", url)
    except Exception as error:  # for the eye only
        get_run_logger().warning("no sweep artifact: %s", error)


def parse_over(pairs: list[str]) -> dict[str, list[Any]]:
    """['learning_rate=1e-5,1e-4', 'rewards=[[a], [b]]'] -> setting -> values; a value in brackets is a YAML list of
    values.
    """
    found: dict[str, list[Any]] = {}
    for pair in pairs:
        key, sign, text = (part.strip() for part in pair.partition("="))
        if not sign or not key or not text:
            raise ConfigError(f"--over {pair!r}: write SETTING=VALUE,VALUE, for example --over learning_rate=1e-5,1e-4")
        if key in found:
            raise ConfigError(f"--over {key} is given twice; write all its values in one: --over {key}=VALUE,VALUE")
        listed = scalar(text) if text.startswith("[") else None
        found[key] = (
            listed
            if isinstance(listed, list)
            else [scalar(part.strip()) for part in ([text] if text.startswith("[") else text.split(","))]
        )
    return found
