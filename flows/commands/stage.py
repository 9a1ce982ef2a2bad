"""The command `stage`."""

from __future__ import annotations

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
    parse_inputs,
    with_settings,
)
from flows.commands.describe import describe_stage


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
    from stages.registry import STAGES, get_stage

    env.prepare(quiet=True)
    if name not in STAGES and "." not in name and (written := method_as_stage(name)):
        raise ConfigError(f"there is no stage {name!r}; write {written}")
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
    for warning in value["warnings"]:  # they were said while it ran, perhaps hours ago
        print(f"warning {warning['code']}: {warning['text']}")
    for output, ref in value["outputs"].items():
        print(f"{output}: {ref}")
    numbers = {key: number for key, number in value["metrics"].items() if number is not None}
    display.table(display.metric_rows(display.telling(numbers)))


def method_as_stage(name: str) -> str | None:
    """The command of a method, such as dpo or grpo, that was taken for a stage; None where it is none."""
    from stages.algorithms import DIRECT_METHODS, RL_PRESETS

    for stage, setting, table in (("align", "method", DIRECT_METHODS), ("rl", "preset", RL_PRESETS)):
        if name.lower() in table:
            return f"posttrain stage {stage} --set {setting}={name.lower()}"
    return None


def dry_stage(name: str, inputs: dict[str, str], settings: Any, seed: int, force: bool, as_json: bool) -> None:
    """Print what a stage would do."""
    from flows import stage_plan
    from flows.config import ConfigError

    value = stage_plan.stage_plan(name, inputs, settings, seed, force)
    if not as_json:
        stage_plan.print_stage_plan(value, settings)
    if value["refused"]:
        raise ConfigError("\n  ".join(value["refused"]))
    if as_json:
        emit(value)


def run_one(
    name: str, inputs: dict[str, str], settings: Any, seed: int, name_as: str | None, force: bool, nodes: Any = None
) -> dict[str, Any]:
    """Run one stage with its progress on the screen, and tell a running server of what is new."""
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
    if connected and not result.cached and result.outputs:
        from tasks.stages import announce

        announce(value, by="stage")
    return value
