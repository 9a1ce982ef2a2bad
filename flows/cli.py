"""The command line. Every command imports what it needs itself, so that `--help` stays instant."""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import typer

EXIT_CODES = (
    "Exit codes: 0 done, 1 a stage or a gate failed, 2 wrong usage or configuration, 3 waits for people, 130"
    " interrupted."
)

app = typer.Typer(
    name="posttrain",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help=(
        "Turns preference data and a base model into a better model, stage by stage.\n\nState lives under"
        " POSTTRAIN_HOME (default ./.posttrain). Refs name things in it: dataset:NAME@latest, dataset:NAME@DIGEST,"
        " model:NAME@champion, model:NAME/3, model:m-DIGEST. Where a ref is taken, a path or a hub id is too."
    ),
    epilog=EXIT_CODES,
)

Devices = Annotated[
    Optional[int],
    typer.Option(
        "--devices",
        min=1,
        help=(
            "GPUs (processes on a machine without) that each training stage runs on; default POSTTRAIN_DEVICES, else 1."
        ),
        callback=lambda n: os.environ.update(POSTTRAIN_DEVICES=str(n)) if n else None,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object as the last line of stdout, everything else on stderr.")
]
Sets = Annotated[
    Optional[list[str]],
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a setting; values are YAML. Repeatable."),
]
Given = Annotated[
    Optional[list[str]],
    typer.Argument(metavar="KEY=VALUE", help="Settings, the same as with --set.", show_default=False),
]
Files = Annotated[
    Optional[list[Path]], typer.Option("--config", "-c", help="YAML file with settings; later files win. Repeatable.")
]
Seed = Annotated[
    Optional[int],
    typer.Option(min=0, help="Seed of every random choice (default 0, or what the configuration says)."),
]
NodeCount = Annotated[
    Optional[int],
    typer.Option(
        "--nodes",
        min=1,
        help=(
            "Machines that share the stages that train, each on --devices; give the same command on all of them, which"
            " share POSTTRAIN_HOME. Of a recipe, all other stages run on node 0."
        ),
    ),
]
NodeRank = Annotated[
    Optional[int],
    typer.Option(
        "--node-rank",
        min=0,
        help=(
            "Which of them this is, from 0; by default what SLURM_NODEID, NODE_RANK, JOB_COMPLETION_INDEX or RANK says."
        ),
    ),
]
Rendezvous = Annotated[
    Optional[str],
    typer.Option(
        "--rendezvous", metavar="HOST:PORT", help="Where node 0 listens; by default MASTER_ADDR and MASTER_PORT."
    ),
]


# ------------------------------------------------------------------------------------------------ run


@app.command(rich_help_panel="Pipelines", epilog=EXIT_CODES)
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


def with_settings(
    values: dict[str, Any], files: list[Path] | None, sets: list[str] | None, given: list[str] | None
) -> dict[str, Any]:
    """`values` with the files' settings laid over them, and the command line's over those."""
    from flows.config import load_yaml, merge, parse_sets

    for path in files or []:
        values = merge(values, load_yaml(path))
    return merge(values, parse_sets([*(sets or []), *(given or [])]))


@app.command(rich_help_panel="Pipelines", epilog=EXIT_CODES)
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


def parse_inputs(pairs: list[str] | None, whose: str) -> dict[str, str]:
    """['model=DIR'] -> {'model': 'DIR'}; `whose` ends the message about one that is none."""
    from flows.config import ConfigError

    inputs = {}
    for pair in pairs or []:
        key, sign, ref = pair.partition("=")
        if not sign or not ref:
            raise ConfigError(f"--input {pair!r}: write NAME=REF_OR_PATH; the inputs of {whose}")
        inputs[key] = ref
    return inputs


@app.command(rich_help_panel="Pipelines", epilog=EXIT_CODES)
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
            help="Of a model of the rl stage: from its own rollouts, without sampling, everything in them checked.",
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
    from flows import env
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
        raise ConfigError(f"run {run_id} ran one stage; repeat it with: posttrain stage {recipe[6:]} --input … --set …")
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
    from flows.report import short
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
    if recorded:
        inputs |= {"recorded": record["outputs"]["rollouts"]["ref"]}
    value = run_one(
        record["module"],
        inputs,
        build(spec.config, merge(record["config"], changes)),
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


def recipe_name(name: str) -> str:
    from flows.recipe import get_recipe

    get_recipe(name)
    return name


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
        from flows.report import print_result

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


@app.command(rich_help_panel="Pipelines", epilog=EXIT_CODES)
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


# ------------------------------------------------------------------------------------------------ stage


@app.command(rich_help_panel="Pipelines", epilog=EXIT_CODES)
def stage(
    name: Annotated[str, typer.Argument(help="Stage name; `posttrain ls stages` lists them.")],
    given: Given = None,
    input_: Annotated[
        Optional[list[str]],
        typer.Option(
            "--input",
            "-i",
            metavar="NAME=REF_OR_PATH",
            help="An input: a ref, a model directory, a data file, a hub id or the key of the stage that made it."
            " Repeatable.",
        ),
    ] = None,
    set_: Sets = None,
    config: Files = None,
    name_as: Annotated[Optional[str], typer.Option(help="Name to publish the outputs under.")] = None,
    seed: Seed = None,
    force: Annotated[bool, typer.Option("--force", help="Execute although a verified record exists.")] = False,
    devices: Devices = None,
    nodes: NodeCount = None,
    node_rank: NodeRank = None,
    rendezvous: Rendezvous = None,
    json_: Json = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help=(
                "Print the settings, the inputs with digests and rows, and whether it would run, continue or reuse a"
                " record; nothing runs."
            ),
        ),
    ] = False,
    keys: Annotated[bool, typer.Option("--keys", help="List the stage's inputs and settings, and stop.")] = False,
) -> None:
    """Run one stage on refs, model directories and data files, without a recipe or a server.

    Data files given where a dataset is wanted are ingested first.

    Example: posttrain stage sft --input model=path/to/model --input data=demos.jsonl --set num_train_epochs=2 --json
    """
    from flows import display, env
    from flows.config import ConfigError, build
    from stages.registry import get_stage

    env.prepare(quiet=True)
    spec = get_stage(name).SPEC
    if keys:
        return describe_stage(name, json_)
    inputs = parse_inputs(input_, f"{name} are: {', '.join(spec.inputs) or 'none'}")
    values = with_settings({}, config, set_, given)
    # as in recipes
    if isinstance(values.get("seed"), int) and values["seed"] >= 0 and "seed" not in spec.config.model_fields:
        said = values.pop("seed")
        seed = said if seed is None else seed
    if named := [key for key in values if key in spec.inputs and key not in spec.config.model_fields]:
        raise ConfigError(
            f"{named[0]} is an input of stage {name} and no setting; write --input {named[0]}=REF_OR_PATH"
        )
    settings = build(spec.config, values)  # a mistyped setting is told of before an input that is still to come
    spec.check_inputs(inputs, settings)
    if dry_run:
        return dry_stage(name, inputs, settings, seed or 0, force, json_)
    from tasks.nodes import nodes_of

    value = run_one(name, inputs, settings, seed or 0, name_as, force, nodes_of(nodes, node_rank, rendezvous))
    if json_:
        return emit({"status": "finished", **value})
    for output, ref in value["outputs"].items():
        print(f"{output}: {ref}")
    display.table(display.metric_rows({key: number for key, number in value["metrics"].items() if number is not None}))


def dry_stage(name: str, inputs: dict[str, str], settings: Any, seed: int, force: bool, as_json: bool) -> None:
    """Print what a stage would do."""
    from flows import report
    from flows.config import ConfigError

    value = report.stage_plan(name, inputs, settings, seed, force)
    if not as_json:
        report.print_stage_plan(value, settings)
    if value["refused"]:
        raise ConfigError("\n  ".join(value["refused"]))
    if as_json:
        emit(value)


def run_one(
    name: str, inputs: dict[str, str], settings: Any, seed: int, name_as: str | None, force: bool, nodes: Any = None
) -> dict[str, Any]:
    """Run one stage with its progress on the screen, and tell a running server of new datasets."""
    from flows import display, env, services

    connected = services.connect(env.state_dir())
    from tasks.results import small
    from tasks.run import run_stage

    with display.Display() as screen:
        result = run_stage(
            name,
            inputs,
            settings,
            seed=seed,
            name_as=name_as,
            force=force,
            nodes=nodes,
            on_event=lambda event: screen(name.rpartition(".")[2], event),
        )
    value = small(result)
    if connected and not result.cached and any(ref.startswith("dataset:") for ref in result.outputs.values()):
        from tasks.stages import announce

        announce(value, by="stage")
    return value


def describe_stage(name: str, as_json: bool) -> None:
    """Inputs, outputs and every setting of a stage, on stdout."""
    from flows.display import table
    from stages.registry import get_stage

    module = get_stage(name)
    what, inputs = (module.__doc__ or "").strip(), module.SPEC.inputs
    if as_json:
        given = [
            {
                "input": key,
                "kind": one.kind,
                "rows": one.kinds,
                "many": one.many,
                "required": one.required,
                "doc": one.doc,
            }
            for key, one in inputs.items()
        ]
        return emit({"stage": name, "what": what, "inputs": given, "settings": settings_of(module.SPEC.config)})
    print(what + "\n")
    table(
        [
            {
                "input": key + (".LABEL" if one.many else ""),
                "takes": one.kind + (f" {'|'.join(one.kinds)}" if one.kinds else ""),
                "required": "yes" if one.required else "no",
                "": one.doc,
            }
            for key, one in inputs.items()
        ]
        or [{"input": "none"}]
    )
    print()
    describe_settings(module.SPEC.config)


def describe_recipe(name: str, as_json: bool) -> None:
    """What a recipe does and every setting of it, on stdout."""
    from flows.recipe import get_recipe

    recipe_name(name)
    what, config_type = (get_recipe(name).method.__doc__ or "").strip(), get_recipe(name).config_type
    if as_json:
        return emit({"recipe": name, "what": what, "settings": settings_of(config_type)})
    print(what + "\n")
    describe_settings(config_type)


def settings_of(config_type: Any) -> list[dict[str, Any]]:
    """Rows {setting, default, doc}; a default that is a model of its own as the mapping that sets it."""
    from pydantic_core import to_jsonable_python

    from flows.config import field_at
    from flows.config import keys as config_keys

    return [
        {"setting": key, "default": to_jsonable_python(default, fallback=str), "doc": doc}
        for key, default, doc in ((key, *field_at(config_type, key)) for key in config_keys(config_type))
    ]


def describe_settings(config_type: Any) -> None:
    """Key, default and description of every setting."""
    from flows.config import field_at
    from flows.config import keys as config_keys
    from flows.display import setting, table

    table(
        [
            {"setting": key, "default": setting(default), "": doc}
            for key, default, doc in ((key, *field_at(config_type, key)) for key in config_keys(config_type))
        ]
    )


# ------------------------------------------------------------------------------------------------ servers


@app.command(rich_help_panel="Servers", epilog=EXIT_CODES)
def up(
    prefect_port: Annotated[Optional[int], typer.Option(help="Port of Prefect (default 4200, or a free one).")] = None,
    mlflow_port: Annotated[Optional[int], typer.Option(help="Port of MLflow (default 5000, or a free one).")] = None,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; there is no login, so keep it local unless the network is trusted."),
    ] = "127.0.0.1",
    gpu_slots: Annotated[
        Optional[int], typer.Option(min=1, help="GPU stages at a time (default: the number of GPUs, at least 1).")
    ] = None,
    worker: Annotated[bool, typer.Option(help="Also start a worker.")] = True,
    json_: Json = False,
) -> None:
    """Start a Prefect server, an MLflow server and a worker on this machine, and print their URLs."""
    from flows import env, services

    state = env.prepare()
    alive = services.up(
        state,
        prefect_port=prefect_port,
        mlflow_port=mlflow_port,
        host=host,
        gpu_slots=gpu_slots,
        worker=worker,
        say=lambda text: print(text, file=sys.stderr),
    )
    if json_:
        return emit({name: entry["url"] for name, entry in alive.items()})
    print(f"Prefect  {alive['prefect']['url']}")
    print(
        f"MLflow   {alive['mlflow']['url']}   (choose Model training at the top left; GenAI, where it opens, is about"
        " traces)"
    )
    print("Next: `posttrain deploy` registers the recipes and stages; `posttrain down` stops everything.")


@app.command(rich_help_panel="Servers", epilog=EXIT_CODES)
def down(json_: Json = False) -> None:
    """Stop the servers, the worker and the flows it runs. A stopped run continues when it is started again."""
    from flows import env, services

    stopped = services.down(env.prepare(quiet=True), say=lambda text: print(text, file=sys.stderr))
    if json_:
        return emit({"stopped": stopped})
    print("stopped: " + (", ".join(stopped) or "nothing was running"))


@app.command(rich_help_panel="Servers", epilog=EXIT_CODES)
def status(json_: Json = False) -> None:
    """Show the servers, the running runs and who holds the GPU."""
    from flows import env, report

    value = report.status(env.prepare(quiet=True))
    if json_:
        return emit(value)
    report.print_status(value)


@app.command(rich_help_panel="Servers", epilog=EXIT_CODES)
def deploy(
    recipe: Annotated[Optional[str], typer.Argument(help="With --cron: the recipe to run by the clock.")] = None,
    given: Given = None,
    cron: Annotated[
        Optional[str],
        typer.Option(help="When RECIPE runs: minute, hour, day, month and weekday, for example '0 2 * * *'."),
    ] = None,
    timezone: Annotated[
        str, typer.Option(help="Time zone of --cron and --nightly, for example Europe/Berlin.")
    ] = "UTC",
    preset: Annotated[Optional[str], typer.Option(help="With --cron: preset of the recipe to start from.")] = None,
    set_: Sets = None,
    config: Files = None,
    gpu_slots: Annotated[Optional[int], typer.Option(min=1, help="GPU stages at a time.")] = None,
    trigger_model: Annotated[
        str, typer.Option(help="Model that new preference data improves (the event-triggered recipe).")
    ] = "model:policy@champion",
    nightly: Annotated[str, typer.Option(metavar="CRON", help="When the nightly demo runs.")] = "0 3 * * *",
    json_: Json = False,
) -> None:
    """Register every recipe and stage with the server, a nightly schedule, crash recovery and event-triggered runs.

    Uses the server of `posttrain up`, or the one PREFECT_API_URL names. Deploying again updates in place.
    With a recipe and --cron, registers only a deployment RECIPE-scheduled that runs with the settings given here; the
    same command with another time moves it, pausing or deleting it in Prefect's UI ends it; what is paused there stays
    so until it is switched on there.

    Example: posttrain deploy preference --set data.path=pairs.jsonl --set model=DIR --cron "0 2 * * *" --timezone
    Europe/Berlin
    """
    from flows import display, env, services
    from flows.config import ConfigError, load_preset

    if (recipe is None) != (cron is None) or recipe is None and (given or preset or set_ or config):
        raise ConfigError(
            "a schedule of your own names a recipe and its time: posttrain deploy RECIPE --cron '0 2 * * *' --timezone"
            " Europe/Berlin; without them `posttrain deploy` registers everything"
        )
    if not services.connect(env.prepare(quiet=True)):
        raise ConfigError(
            "there is no Prefect server to deploy to; start one with `posttrain up`, or set PREFECT_API_URL"
        )
    from flows.deploy import deploy as register
    from flows.deploy import scheduled

    if recipe is not None:
        values = with_settings(load_preset(recipe_name(recipe), preset) if preset else {}, config, set_, given)
        name, paused = scheduled(recipe_name(recipe), values, cron=cron, timezone=timezone, preset=preset)
        if json_:
            return emit({"deployments": [name], "paused": [name] if paused else []})
        if paused:
            return print(
                f"{name} would run at '{cron}' {timezone}, but its schedule was paused in Prefect's UI and stays so; to"
                f" make it active, switch it on there, under Deployments, {name.partition('/')[2]}"
            )
        return print(f"{name} runs at '{cron}' {timezone}")
    options = {"gpu_slots": gpu_slots, "trigger_model": trigger_model, "nightly": nightly, "timezone": timezone}
    if json_:
        return emit(register(**options))
    print("registering with", os.environ["PREFECT_API_URL"].removesuffix("/api"), file=sys.stderr)
    with display.Display() as screen:
        screen("deploy", {"event": "started"})
        tell = lambda done, total, message: screen(
            "deploy", {"event": "progress", "done": done, "total": total, "message": message}
        )
        result = register(**options, on_progress=tell)
    for kind in ("deployments", "automations"):
        print(kind)
        for name in result[kind]:
            print(f"  {name}")


@app.command(rich_help_panel="Servers", epilog=EXIT_CODES)
def doctor(
    fix: Annotated[
        bool,
        typer.Option(
            help="Repair what can be repaired: send what MLflow has not got, close dead runs, tidy up finished stages."
        ),
    ] = True,
    clean_after: Annotated[
        Optional[float],
        typer.Option(
            metavar="DAYS",
            min=0,
            help="Remove checkpoints of stages that never finished and were not touched for so long.",
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Check versions, disk, servers, schedules and stale runs; exit 1 when something is wrong."""
    from flows import env
    from flows.doctor import examine

    findings = examine(env.prepare(quiet=True), fix=fix, clean_after=clean_after)
    if json_:
        emit({"ok": all(one["ok"] for one in findings), "checks": findings})
    else:
        for one in findings:
            print(f"{'ok  ' if one['ok'] else 'FAIL'}  {one['check']}: {one['text']}")
    if not all(one["ok"] for one in findings):
        raise typer.Exit(1)


# ------------------------------------------------------------------------------------------------ look


@app.command(rich_help_panel="Results", epilog=EXIT_CODES)
def ls(
    what: Annotated[
        str, typer.Argument(help="runs, results (of every stage, newest first), datasets, models, stages or recipes")
    ] = "runs",
    json_: Json = False,
) -> None:
    """List runs, results of stages, datasets, models, stages or recipes."""
    from flows import display, env, report

    env.prepare(quiet=True)
    rows = report.listing(what)
    if json_:
        return emit({what: rows})
    if what == "runs" and not rows and report.listing("results"):
        return print("no recipe was run yet; what single stages gave: posttrain ls results")
    display.table(rows)


@app.command(rich_help_panel="Results", epilog=EXIT_CODES)
def show(
    ref: Annotated[str, typer.Argument(help="A ref, a path, a stage key, a run id or `latest`.")],
    rows: Annotated[
        Optional[int], typer.Option(metavar="N", min=1, help="Of a dataset: its first rows; of rollouts every token.")
    ] = None,
    where: Annotated[
        Optional[list[str]],
        typer.Option(
            metavar="COLUMN=VALUE", help="Of a dataset: the first rows (3, or --rows) with this value. Repeatable."
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Show a dataset, a model, a run or a stage: where it is, what made it, its numbers.

    Of a run or stage that is underway or stopped: what is done, how far it is, what comes next.

    Example: posttrain show latest
    Example: posttrain show dataset:policy-rollouts@latest --where iteration=7 --rows 1
    """
    from flows import env, report

    env.prepare(quiet=True)
    if rows is not None or where:
        from flows.rows import find, print_rows

        value = find(ref, where or [], rows or 3)
        return emit(value) if json_ else print_rows(value)
    value = report.describe(ref)
    if json_:
        return emit(value)
    report.print_description(value)


@app.command(rich_help_panel="Results", epilog=EXIT_CODES)
def rm(
    what: Annotated[
        Optional[list[str]],
        typer.Argument(metavar="REF|RUN|KEY", help="Models and datasets, or runs and stages: what those gave."),
    ] = None,
    before: Annotated[
        Optional[str],
        typer.Option(
            metavar="AGE",
            help="Everything that was made, and last used, before this: 30d, 2w, 12h or a date. What has an alias stays.",
        ),
    ] = None,
    unalias: Annotated[
        bool, typer.Option("--unalias", help="Also a model that has aliases (candidate, champion), which it loses.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would go, and how much room that makes.")
    ] = False,
    json_: Json = False,
) -> None:
    """Remove the files of models and datasets; the records of what made them stay, and a rerun makes them again.

    Refused is what an alias points at, what a running or waiting run or stage reads, and what a schedule names. Of a
    run, and by age, such results stay and the others go, as do results that another run has, too.

    Example: posttrain rm 20261001-1203 --dry-run
    Example: posttrain rm model:policy/3 dataset:rollouts@latest
    """
    from flows import env

    env.prepare(quiet=True)
    from flows.remove import print_removed, remove

    value = remove(what or [], before=before, unalias=unalias, dry_run=dry_run)
    return emit(value) if json_ else print_removed(value)


@app.command(rich_help_panel="Results", epilog=EXIT_CODES)
def cost(
    what: Annotated[
        Optional[str],
        typer.Argument(
            metavar="[RUN|REF]",
            help=(
                "A run id, or a model or dataset: then everything that it was made by counts. Without it, everything in"
                " the state directory."
            ),
        ),
    ] = None,
    prices: Annotated[
        Optional[Path],
        typer.Option(
            metavar="FILE",
            help=(
                "YAML file of prices in USD, e.g. {gpu_hours: 2.5, judge_mtokens_in: 3, human_labels: 1}; default:"
                " prices.yaml in the state directory."
            ),
        ),
    ] = None,
    against: Annotated[
        Optional[str],
        typer.Option(metavar="MODEL", help="Also what the gain over this model cost, by their evaluations."),
    ] = None,
    metric: Annotated[str, typer.Option(help="With --against: the metric that gained.")] = "accuracy",
    by: Annotated[
        Optional[Literal["user", "recipe", "stage", "month"]],
        typer.Option(help="Without RUN or REF: what the rows are of.", show_default="user"),
    ] = None,
    since: Annotated[
        Optional[datetime],
        typer.Option(metavar="DATE", formats=["%Y-%m-%d"], help="Without RUN or REF: what finished from this day on."),
    ] = None,
    until: Annotated[
        Optional[datetime],
        typer.Option(metavar="DATE", formats=["%Y-%m-%d"], help="Without RUN or REF: what finished before this day."),
    ] = None,
    json_: Json = False,
) -> None:
    """The cost ledger of a run, model or dataset: hours, generated tokens, judge calls and labels by people, with their
    prices; or of everybody: posttrain cost --by user --since 2026-11-01

    Example: posttrain cost model:policy@champion --against model:sft/1 --prices prices.yaml
    """
    from flows import env, report
    from stages.spec import ConfigError

    env.prepare(quiet=True)
    if what is None:
        if against is not None:
            raise ConfigError(
                "--against compares a model with another; write both: posttrain cost MODEL --against MODEL"
            )
        value = report.cost_of_all(prices, since, until, by or "user")
    elif by or since or until:
        raise ConfigError(f"--by, --since and --until are of everything that was run; leave {what} or them out")
    else:
        value = report.cost(what, prices, against, metric)
    if json_:
        return emit(value)
    report.print_cost(value)


@app.command(rich_help_panel="Results", epilog=EXIT_CODES)
def lineage(ref: Annotated[str, typer.Argument(help="A dataset or model ref.")], json_: Json = False) -> None:
    """Show everything a dataset or model was made from: stages, configs, data files."""
    from flows import env, report

    env.prepare(quiet=True)
    tree = report.lineage(ref)
    if json_:
        return emit(tree)
    report.print_lineage(tree)


@app.command(rich_help_panel="Results", epilog=EXIT_CODES)
def compare(
    a: Annotated[
        str,
        typer.Argument(
            help=(
                "A run id, a model (the training that made it; beside one of another stage its newest evaluation), or an"
                " evaluation (the ref of its samples or a stage key)."
            )
        ),
    ],
    b: Annotated[str, typer.Argument(help="The one to compare with.")],
    out: Annotated[
        Optional[Path],
        typer.Option(metavar="DIR", help="Where the figure of the curves goes; default: below the state directory."),
    ] = None,
    json_: Json = False,
) -> None:
    """Put two runs or two evaluations side by side: numbers, settings, curves, held-out scores, answers; different
    protocols are refused.
    """
    from flows import display, env
    from flows.compare import compare as side_by_side

    env.prepare(quiet=True)
    value = side_by_side(a, b, out)
    if json_:
        return emit(value)
    known = {(row["step"], row["metric"]) for row in value["metrics"]}
    display.table(
        [
            row
            for row in value["metrics"]
            if not display.is_beside(row["metric"], {metric for step, metric in known if step == row["step"]})
        ]
    )
    for name, title in (
        ("held_out", "held-out prompts, difference b - a with its 95% interval"),
        ("answers", "the same prompts, largest changes first"),
    ):
        if value[name]:
            print()
            display.table(value[name], title)
    print()
    for line in (*value["config"], *value["notes"], *(f"curves: {path}" for path in value["figures"])):
        print(line)


@app.command(rich_help_panel="Results", epilog=EXIT_CODES)
def promote(
    model: Annotated[str, typer.Argument(help="The candidate: a model ref or directory.")],
    input_: Annotated[
        Optional[list[str]],
        typer.Option(
            "--input",
            "-i",
            metavar="NAME=REF",
            help=(
                "Evidence for the gate in the place of the model's newest evaluation, e.g."
                " candidate_samples=dataset:NAME@latest; the inputs: posttrain stage promote --keys. Repeatable."
            ),
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Registered name.")] = "policy",
    alias: Annotated[str, typer.Option(help="Alias the winner gets.")] = "champion",
    set_: Sets = None,
    json_: Json = False,
) -> None:
    """Put a model through the promotion gate; the decision and its evidence are recorded whatever it is.

    Its newest evaluation is held against the champion's under the same protocol, which is made now where there is none.

    Exit code 1 when the gate refuses.
    """
    from flows import env, report

    env.prepare(quiet=True)
    decision = report.promote(model, name=name, alias=alias, inputs=input_ or [], sets=set_ or [])
    if json_:
        emit(decision)
    else:
        report.print_decision(decision)
    if not decision["promoted"]:
        raise typer.Exit(1)


@app.command(rich_help_panel="Results", epilog=EXIT_CODES)
def select(
    candidates: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY|RUN|MODEL…",
            help=(
                "A stage that was run with publish_epochs=true: its key, a run with one such stage, or a model that it"
                " made. Or models, in the order in which ties go."
            ),
        ),
    ],
    input_: Annotated[
        Optional[list[str]],
        typer.Option(
            "--input",
            "-i",
            metavar="NAME=REF",
            help=(
                "prompts, reward_model, judge; data is that of the stage; the inputs: posttrain stage select_checkpoint"
                " --keys. Repeatable."
            ),
        ),
    ] = None,
    name: Annotated[Optional[str], typer.Option(help="Registered name; default: that of the stage's model.")] = None,
    alias: Annotated[str, typer.Option(help="Alias that the chosen model gets.")] = "selected",
    set_: Sets = None,
    seed: Seed = None,
    json_: Json = False,
) -> None:
    """Choose among the checkpoints of a finished training by reward, win rate, a metric or validation loss, and give the
    chosen one an alias.

    Example: posttrain select 4be1f0a2c3d4 --input reward_model=model:reward@candidate --alias selected
    """
    from flows import display, env, report

    env.prepare(quiet=True)
    value = report.select(
        candidates, name=name, alias=alias, inputs=input_ or [], sets=set_ or [], seed=seed if seed is not None else 0
    )
    if json_:
        return emit(value)
    report.print_decision(value)
    display.table(display.metric_rows({key: number for key, number in value["scores"].items() if number is not None}))


@app.command(rich_help_panel="Results", epilog=EXIT_CODES)
def export(
    what: Annotated[str, typer.Argument(metavar="REF", help="A model or dataset ref.")],
    directory: Annotated[
        Optional[Path],
        typer.Argument(
            help=(
                "New directory; a model loads with from_pretrained anywhere, a dataset with datasets.load_dataset. May"
                " be left out with --push."
            )
        ),
    ] = None,
    adapter: Annotated[
        bool,
        typer.Option(
            "--adapter",
            help=(
                "Only the LoRA adapter, as peft loads one (adapter_model.safetensors, adapter_config.json), with the"
                " tokenizer."
            ),
        ),
    ] = False,
    base: Annotated[
        Optional[str],
        typer.Option(
            help="With --adapter: path or hub id of the model it belongs on, written into adapter_config.json."
        ),
    ] = None,
    push: Annotated[
        Optional[str],
        typer.Option(
            metavar="OWNER/NAME",
            help=(
                "Commit it to this repository of the Hugging Face Hub (or of HF_ENDPOINT), which is made where there is"
                " none; the token is HF_TOKEN's or that of `hf auth login`."
            ),
        ),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="With --push: a repository that only its owner sees.")
    ] = False,
    json_: Json = False,
) -> None:
    """Copy a model out of the store as a plain Hugging Face directory, or a dataset as Parquet files by split; with
    --push to the Hub.

    Example: posttrain export model:policy@champion --push me/policy --private
    """
    from flows import env, report

    env.prepare(quiet=True)
    value = report.export(what, directory, adapter, base, push, private)
    if json_:
        return emit(value)
    if value["directory"]:
        print(f"{value['ref']} -> {value['directory']} ({value['files']} files)")
    if push:
        print(f"{value['ref']} -> {value['url']}")


@app.command(rich_help_panel="Results", epilog=EXIT_CODES)
def chat(
    model: Annotated[str, typer.Argument(help="A model ref, directory or hub id.")],
    prompt: Annotated[Optional[str], typer.Option(help="Answer this one and stop.")] = None,
    system: Annotated[Optional[str], typer.Option(help="System message.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus mass.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of an answer at most.")] = 512,
    seed: Seed = None,
    json_: Json = False,
) -> None:
    """Talk to a model with the platform's own sampler; answers are printed as they are drawn. Empty line or Ctrl-D ends;
    /reset forgets the conversation.
    """
    from flows import env
    from flows.chat import converse

    env.prepare(quiet=True)
    converse(
        model,
        prompt=prompt,
        system=system,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        seed=seed or 0,
        as_json=json_,
    )


# ------------------------------------------------------------------------------------------------ ends


def emit(value: Any) -> None:
    """One JSON object on one line, the last of stdout."""
    sys.stdout.flush()
    text = json.dumps(value, ensure_ascii=False, default=str)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        # a terminal of another encoding, or half of a surrogate pair in an error of somebody's code
        text = json.dumps(value, default=str)
    print(text, flush=True)


def main() -> None:
    """Entry point: runs the command and turns errors into messages and exit codes."""
    import shlex
    import signal

    from tasks.stopping import wake_main_thread

    signal.signal(signal.SIGTERM, terminate)
    wake_main_thread()
    try:
        app()
    except BaseException as error:
        # typer keeps the interrupt to itself and exits
        if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code == 130):
            fail(f"interrupted; this goes on where it stopped: {shlex.join(['posttrain', *sys.argv[1:]])}", 130)
        if isinstance(error, SystemExit):
            if isinstance(error.__context__, BrokenPipeError):  # who read this has gone (`posttrain ls runs | head`)
                sys.exit(128 + signal.SIGPIPE)
            raise
        from storage.files import refusal

        code, refused = classify(error), refusal(error)
        if code is None and refused is None:
            raise
        fail(refused if code is None else str(error) or type(error).__name__, code or 1)


def program() -> None:
    """:func:`main` in a process of its own, which ends with it."""
    from stages.running.warm import leave

    try:
        main()
    except SystemExit as error:
        if not isinstance(error.code, int):
            raise
        leave(error.code)
    leave(0)


class TerminationSignal(BaseException):
    """SIGTERM arrived: unwind, so that whatever runs is ended on the way out."""


def terminate(signum: int, frame: Any) -> None:
    """Unwind on SIGTERM; and since an exception raised by a signal can be lost where Python ignores exceptions (a
    finalizer, a callback), end everything from the outside when that has not happened in time."""
    insist(143)
    raise TerminationSignal("terminated; the same command continues where it stopped")


def insist(code: int) -> None:
    """End this process and all below it in time, whatever it waits for: Prefect's client asks a server that does not
    answer again for minutes.
    """
    import contextlib
    import threading
    import time

    def end() -> None:
        import psutil

        time.sleep(float(os.environ.get("POSTTRAIN_GRACE_SECONDS", "10")) + 15)
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        print(
            "error: ended while waiting, probably for a Prefect server that does not answer; the same command goes on"
            " where this stopped",
            file=sys.stderr,
            flush=True,
        )
        os._exit(code)

    threading.Thread(target=end, name="terminate", daemon=True).start()


def classify(error: BaseException) -> int | None:
    """Exit code of an error that has a message for the user; None for a defect, whose traceback is wanted."""
    names = {cls.__name__ for cls in type(error).__mro__}
    of_chat = {"RenderError", "ModelError", "SamplerError", "DecoderError"}  # the one command that samples
    if names & {"ConfigError", "UnhashableError", "StoreError", "RegistryError", "PriceError", *of_chat}:
        return 2
    if names & {"StageError", "ServiceError", "DatasetError", "LeaseBusy", "NodeError"}:
        return 1
    if names & {"TerminationSignal", "Cancelled"}:
        return 143
    return None


def fail(text: str, code: int) -> None:
    print(f"error: {text}", file=sys.stderr)
    if "--json" in sys.argv:
        emit({"status": "failed", "exit_code": code, "error": text})
    sys.stdout.flush()
    raise SystemExit(code)


if __name__ == "__main__":
    program()
