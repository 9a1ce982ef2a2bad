"""The commands that run recipes: run, sweep, rerun, answer."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from flows.commands.app import (
    Devices,
    Files,
    Given,
    Json,
    NodeCount,
    NodeRank,
    Rendezvous,
    Seed,
    Sets,
    emit,
    insist,
    parse_inputs,
    recipe_name,
    with_settings,
)
from flows.commands.describe import describe_recipe
from flows.commands.stage import run_one


def run(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A recipe, for example post_training or preference; `posttrain ls recipes` describes them."
        ),
    ],
    given: Given = None,
    set_: Sets = None,
    config: Files = None,
    preset: Annotated[Optional[str], typer.Option(help="Start from a preset, e.g. demo.")] = None,
    seed: Seed = None,
    force: Annotated[
        Optional[list[str]], typer.Option(help="Execute this step again although nothing changed. Repeatable.")
    ] = None,
    devices: Devices = None,
    nodes: NodeCount = None,
    node_rank: NodeRank = None,
    rendezvous: Rendezvous = None,
    json_: Json = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and which steps would run.")
    ] = False,
    keys: Annotated[bool, typer.Option("--keys", help="List the recipe's settings, and stop.")] = False,
) -> None:
    """Run a recipe. Finished stages are reused, and a killed run continues when the same command is given again.

    Against the servers of `posttrain up` when they run, else with a Prefect server of its own that ends with it.

    Example: posttrain run preference --set data.path=pairs.jsonl --set model=path/to/model
    Example, on four machines: srun posttrain run post_training --set model=DIR --nodes 4 --rendezvous FIRST:29500
    """
    from flows import env
    from flows.config import load_preset
    from tasks.nodes import nodes_of

    env.prepare(quiet=True)
    if keys:
        return describe_recipe(recipe, json_)
    values: dict[str, Any] = load_preset(recipe_name(recipe), preset) if preset else {}
    values = with_settings(values, config, set_, given)
    if seed is not None:
        values["seed"] = seed
    execute(recipe, values, force or [], json_, dry_run, nodes_of(nodes, node_rank, rendezvous))


def sweep(
    what: Annotated[str, typer.Argument(help="A recipe or a stage (stage:NAME where both exist).")],
    over: Annotated[
        list[str],
        typer.Option(
            "--over",
            "-o",
            metavar="KEY=VALUE,VALUE",
            help="A setting (or inputs.NAME of a stage) and its values. Repeatable; every combination is a trial.",
        ),
    ],
    metric: Annotated[str, typer.Option(help="What ranks the trials: a metric of the stage; of a recipe STEP.METRIC.")],
    given: Given = None,
    input_: Annotated[
        Optional[list[str]],
        typer.Option("--input", "-i", metavar="NAME=REF_OR_PATH", help="An input of the stage. Repeatable."),
    ] = None,
    set_: Sets = None,
    config: Files = None,
    preset: Annotated[Optional[str], typer.Option(help="Preset of the recipe that all trials start from.")] = None,
    goal: Annotated[str, typer.Option(help="max or min.")] = "max",
    seeds: Annotated[Optional[str], typer.Option(help="Seeds of every trial, for example 0,1,2.")] = None,
    trials: Annotated[
        Optional[int], typer.Option(min=1, help="That many combinations, drawn at random; default all.")
    ] = None,
    seed: Seed = None,
    devices: Devices = None,
    nodes: NodeCount = None,
    node_rank: NodeRank = None,
    rendezvous: Rendezvous = None,
    json_: Json = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and which steps would run.")
    ] = False,
) -> None:
    """Run a recipe or a stage over a grid of settings and several seeds, and rank the trials by a metric.

    What trials share is computed once, and a killed sweep continues when the same command is given again.

    Example: posttrain sweep sft --input model=DIR --input data=FILE --over learning_rate=1e-5,1e-4 --seeds 0,1 --metric
    validation/nll --goal min
    """
    from flows import env
    from tasks.nodes import nodes_of

    env.prepare(quiet=True)
    from flows.recipe import load_config
    from flows.sweep import parse_over, planned

    values = {
        "what": what,
        "preset": preset,
        "inputs": parse_inputs(input_, "a stage: posttrain stage NAME --keys"),
        "settings": with_settings({}, config, set_, given),
        "over": parse_over(over),
        "metric": metric,
        "goal": goal,
        "trials": trials,
        "seeds": parse_over([f"seeds={seeds}"])["seeds"] if seeds else [],
        "seed": seed or 0,
    }
    planned(load_config("sweep", values))  # what is wrong with a trial is said before a server is asked for
    execute("sweep", values, [], json_, dry_run, nodes_of(nodes, node_rank, rendezvous))


def rerun(
    run_id: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Run id, the beginning of one, or `latest`; or a model or dataset, whose stage is then repeated.",
        ),
    ],
    more: Given = None,
    stage: Annotated[
        Optional[str],
        typer.Option(help="The step to repeat, or with --set the section of the recipe to change (e.g. rl)."),
    ] = None,
    set_: Sets = None,
    seed: Seed = None,
    devices: Devices = None,
    nodes: NodeCount = None,
    node_rank: NodeRank = None,
    rendezvous: Rendezvous = None,
    json_: Json = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print which steps would run.")] = False,
    recorded: Annotated[
        bool,
        typer.Option(
            "--recorded",
            help="Of a model of the rl stage: from its own rollouts, with only what they do not hold sampled, everything in them checked.",
        ),
    ] = False,
) -> None:
    """Repeat a run with one step changed; everything above it is reused.

    Keys of --set belong to the step named by --stage. Without --set the step is executed again as it was; a run that
    failed or was killed goes on when nothing is said.

    A model or dataset is made again from the same inputs and settings, by the one stage that made it, and compared: the
    exit code is 1 where its bytes are others although nothing was changed. With --recorded an RL run is computed again
    from its own rollouts: rewards, log-probs, advantages and every step, held against what it recorded.

    Example: posttrain rerun latest --stage rl --set kl_coef=0.02
    Example: posttrain rerun model:policy@champion
    Example: posttrain rerun model:policy@champion --recorded
    """
    from flows import env, report
    from flows.config import ConfigError, merge, parse_sets, section
    from flows.recipe import get_recipe, load_config, unread
    from storage import records, store
    from tasks.nodes import nodes_of

    env.prepare(quiet=True)
    machines, run_id = nodes_of(nodes, node_rank, rendezvous), store.pinned(run_id)
    if run_id.startswith(("model:", "dataset:")):
        if stage is not None or dry_run or machines is not None:
            raise ConfigError(
                f"{run_id} was made by one stage, which is what is repeated; leave out"
                f" {'--stage' if stage is not None else '--dry-run' if dry_run else '--nodes'}"
            )
        return remake(run_id, parse_sets([*(set_ or []), *(more or [])]), seed, json_, recorded)
    if recorded:
        raise ConfigError(
            f"--recorded computes one model again; write posttrain rerun model:NAME@latest --recorded (posttrain show {run_id}"
            " has the models of the run)"
        )
    run = records.get_run(run_id)
    record, recipe = run.data, run.data["recipe"]
    if recipe.startswith("stage:"):
        command = report.repeats(run) or f"posttrain stage {recipe[6:]} --input … --set …"
        forced = " --force" if run.status == "FINISHED" and set_ is None and not more and seed is None else ""
        raise ConfigError(f"run {run_id} ran one stage; repeat it with: {command}{forced}")
    recipe_flow = get_recipe(recipe)
    given = parse_sets([*(set_ or []), *(more or [])])
    again: list[str] = []
    if stage is not None and given:
        section(recipe_flow.config_type, stage)
        given = {stage: given}
    elif stage is not None:
        again = steps_of(run, recipe_flow.config_type, stage)
    elif not given and seed is None and run.status == "FINISHED":
        raise ConfigError(
            "that run finished, so say what to change: --stage NAME (repeat it), --stage NAME --set key=value, or"
            " --seed N"
        )
    values = merge(record["config"], given)
    if seed is not None:
        values["seed"] = seed
    for key in unread(recipe, recipe_flow.method, load_config(recipe, values)):  # of what the change switched off
        part, _, leaf = key.partition(".")
        if leaf and leaf not in given.get(part, {}):
            values[part] = {name: value for name, value in values[part].items() if name != leaf}
        elif not leaf and part not in given:
            del values[part]
    execute(recipe, values, again, json_, dry_run, machines)


def remake(ref: str, changes: dict[str, Any], seed: int | None, as_json: bool, recorded: bool = False) -> None:
    """Run the stage that made a model or dataset again, with ``changes`` to its settings, and say whether the same
    bytes came out; ``recorded``: an RL run, from its own rollouts.
    """
    from flows.config import ConfigError, build, merge
    from flows.display import table
    from flows.recipe import short
    from stages.registry import get_stage
    from storage import records

    record = records.origin_of(records.digest_of(ref))
    if record is None:
        raise ConfigError(
            f"{ref} was brought from outside, so there is nothing to repeat; what is known of it: posttrain show {ref}"
        )
    changed = bool(changes) or seed is not None
    spec, inputs = get_stage(record["module"]).SPEC, {name: one["ref"] for name, one in record["inputs"].items()}
    if recorded and "recorded" not in spec.inputs:
        raise ConfigError(
            f"{ref} was made by the stage {record['stage']}, which records no rollouts; leave out --recorded"
        )
    config = merge(record["config"], changes)
    if recorded:
        inputs |= {"recorded": record["outputs"]["rollouts"]["ref"]}
        if not changed:
            config, inputs = with_baselines(record, config, inputs)
    value = run_one(
        record["module"],
        inputs,
        build(spec.config, config),
        record["seed"] if seed is None else seed,
        record["name_as"],
        not changed and not recorded,
    )
    rows = [
        {
            "output": name,
            "then": short(one["ref"]),
            "now": short(value["outputs"].get(name, "")),
            "same": one["ref"] == value["outputs"].get(name),
        }
        for name, one in record["outputs"].items()
        if not recorded or name in value["outputs"]
    ]
    odd = value["metrics"].get("recorded/differing", 0)
    held = {"held": held_against(value["key"])} if recorded else {}
    other_code = record["code"] != records.read(value["key"])["code"]
    if as_json:
        emit({"status": "finished", **value, "compared": rows, "code_changed": other_code, **held})
    else:
        if recorded:
            table(held["held"], "held against the record")
        table(rows, "made again")
    if not changed and (odd or not all(row["same"] for row in rows)):
        why = (
            "the code has changed since"
            if other_code
            else f"libraries or the machine may be others (`versions` in {value['record_path']})"
        )
        what = f"{odd:.0f} things that were recorded are others now" if odd else "The bytes are not those of then"
        print(f"{what}; {why}.", file=sys.stderr)
        raise typer.Exit(1)


def with_baselines(
    record: dict[str, Any], config: dict[str, Any], inputs: dict[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Settings and inputs of an RL run that is computed again, with the baselines that it sampled before training, so
    that nothing is sampled, and nobody asked, for them. As they are where it left prompts out for want of one, which
    are refused where baselines are given.
    """
    from storage import records

    made = record["outputs"].get("baselines")
    left_out = any(warning["code"] == "baselines_unknown" for warning in record["warnings"])
    if made is None or left_out or not records.there(made):
        return config, inputs
    of_sampling = ("baseline_samples", "v_star_beta")
    return {name: value for name, value in config.items() if name not in of_sampling}, inputs | {
        "baselines": made["ref"]
    }


def held_against(key: str) -> list[dict[str, Any]]:
    """The table of a run that was computed again from its rollouts."""
    from storage import records
    from storage.files import read_json

    found = next((one for one in records.read(key)["reports"] if one["name"] == "recorded"), {})
    return read_json(found.get("table", ""), [])


def steps_of(run: Any, config_type: Any, name: str) -> list[str]:
    """The steps of a run that a name means: a step, or a section of the recipe that several steps take their settings
    from (`evaluate`: `evaluate_start`, `evaluate_dpo`). Empty where an unfinished run had not come to any, since it
    will run anyway."""
    from flows.config import ConfigError
    from flows.report import sections

    steps = [label for label in run.stages() if ".ingest-" not in label and ".merge-" not in label]
    others = set(sections(config_type)) - {name}
    found = [step for step in steps if step == name] or [
        step for step in steps if step.startswith(f"{name}_") and step not in others
    ]
    if not found and (run.status == "FINISHED" or name not in sections(config_type)):
        raise ConfigError(
            f"run {run.run_id} has no step {name!r} to repeat; its steps are: {', '.join(steps) or 'none'}"
        )
    return found


def execute(
    recipe: str, values: dict[str, Any], force: list[str], as_json: bool, dry_run: bool, nodes: Any = None
) -> None:
    """Run (or plan) a recipe on values that are not validated yet, and print what came of it; nodes: this machine among
    several.
    """
    from contextlib import nullcontext

    from flows.recipe import get_recipe, load_config, rehearse
    from tasks.nodes import leading

    method, config = get_recipe(recipe).method, load_config(recipe, values)
    if dry_run:
        rehearse(recipe, method, config)
        return print_plan(recipe, config, force, as_json, nodes.count if nodes else 1)
    if nodes is not None and nodes.rank > 0:
        return take_part(recipe, nodes, as_json)
    say = lambda text: print(text, file=sys.stderr, flush=True)
    with leading(nodes, f"run {recipe}", say) if nodes else nullcontext() as leader:
        rehearse(recipe, method, config)
        code = perform(recipe, values, force, as_json)
        if leader is not None:
            leader.code = code
    if code:
        raise typer.Exit(code)


def take_part(recipe: str, nodes: Any, as_json: bool) -> None:
    """Compute beside node 0 what its run shares, until that ends."""
    from flows import display
    from tasks.run import follow

    with display.Display() as screen:
        value = follow(nodes, f"run {recipe}", on_event=lambda event: screen(f"node {nodes.rank}", event))
    if as_json:
        emit(
            {"status": "finished", "node": nodes.rank, **value}
            | ({"exit_code": value["code"]} if value["code"] else {})
        )
    if value["code"]:
        raise typer.Exit(value["code"])


def perform(recipe: str, values: dict[str, Any], force: list[str], as_json: bool) -> int:
    """Run a recipe and print what came of it; the exit code."""
    from contextlib import ExitStack

    from flows import display, env, services
    from flows.recipe import get_recipe, load_config
    from tasks.stopping import KILLED

    state = env.state_dir()
    with ExitStack() as stack:
        in_time = lambda error: insist(130 if isinstance(error, KeyboardInterrupt) else 143)
        KILLED.append(in_time)
        stack.callback(KILLED.remove, in_time)
        wait = None
        if services.connect(state):
            services.reachable(os.environ["PREFECT_API_URL"])
        else:
            os.environ["POSTTRAIN_EMBEDDED"] = "1"
            wait = stack.enter_context(services.embedded(state))
        from tasks.stages import listening

        config = load_config(recipe, values)
        if wait is not None:
            wait()
        screen = stack.enter_context(display.Display())
        stack.enter_context(listening(screen))
        result = get_recipe(recipe)(config=config, force=force)
    result = result.result() if hasattr(result, "result") else result  # a Prefect state that has a name of its own
    if result.get("status") == "waiting":
        if as_json:
            emit({**result, "exit_code": 3})
        else:
            print(
                f"Step {result['step']} waits for people: fill in {result['file']} (what is asked stands beside it),"
                f" then\n  posttrain answer {result['task']} FILE\n  posttrain rerun {result['run']}"
            )
        return 3
    if as_json:
        emit({"status": "finished", **result})
    else:
        from flows.outcome import print_result

        print_result(result, state)
    return 0


def print_plan(recipe: str, config: Any, force: list[str], as_json: bool, machines: int = 1) -> None:
    """The resolved configuration and, step by step, what would run."""
    import yaml

    from flows import display
    from flows.config import ConfigError
    from flows.recipe import Plan, check_force, get_recipe

    plan = Plan(recipe, config.seed, force, machines)
    get_recipe(recipe).method(plan, config)
    check_force(force, [row["step"] for row in plan.table])
    resolved = config.model_dump(mode="json")
    if not as_json:
        print(
            yaml.safe_dump(chosen(config), sort_keys=False, allow_unicode=True)
            + f"(what stays at its default is left out; every setting: posttrain run {recipe} --keys, every value:"
            " --dry-run --json)\n"
        )
        for line in config.remarks():
            print(line)
        display.table(plan.table, "plan")
        for line in plan.advice:
            print(f"advice  {line}")
    if plan.refused:
        raise ConfigError("\n  ".join(plan.refused))
    if as_json:
        emit(
            {
                "recipe": recipe,
                "config": resolved,
                "remarks": config.remarks(),
                "plan": plan.table,
                "advice": plan.advice,
            }
        )


def chosen(config: Any) -> dict[str, Any]:
    """The settings of a recipe that differ from their stages' defaults, whoever chose them, and all that lie outside of
    the sections.
    """
    from pydantic import BaseModel

    values = {}
    for name in type(config).model_fields:
        section = getattr(config, name)
        value = (
            section.model_dump(mode="json", exclude_defaults=True)
            if isinstance(section, BaseModel)
            else config.model_dump(mode="json", include={name})[name]
        )
        if value or not isinstance(section, BaseModel):
            values[name] = value
    return values


def answer(
    task: Annotated[
        Optional[str], typer.Argument(help="Task id, or the beginning of one; without it the tasks are listed.")
    ] = None,
    file: Annotated[
        Optional[Path], typer.Argument(help="The filled copy of its task.csv (CSV, JSON Lines or Parquet).")
    ] = None,
    json_: Json = False,
) -> None:
    """Bring in what people filled in for a step that waits for them. A run that is suspended in Prefect goes on by
    itself; give others again.

    Example: posttrain answer 3f2a filled.csv && posttrain rerun latest
    """
    from flows import display, env, services
    from flows.config import ConfigError
    from tasks import people

    state = env.prepare(quiet=True)
    if task is None or file is None:
        if task is not None:
            raise ConfigError(f"give the filled file too: posttrain answer {task} FILE")
        rows = people.open_tasks()
        return emit({"tasks": rows}) if json_ else display.table(rows)
    value = people.answer(task, file)
    services.connect(state)
    value["resumed"] = people.resume(value["task"])
    if json_:
        return emit(value)
    for who, n in value["replaced"].items():
        print(
            f"{n} earlier answers of {who or 'a nameless annotator'} are not in this file and count no longer; to keep"
            " them, put their lines into it and bring it in again",
            file=sys.stderr,
        )
    print(
        f"{value['answered']} of {value['items']} items are answered"
        + (
            f"; resumed in Prefect: {', '.join(value['resumed'])}"
            if value["resumed"]
            else "; go on with: posttrain rerun latest"
        )
    )
