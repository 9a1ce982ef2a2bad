"""The commands of the servers: up, down, status, deploy, doctor."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Optional

import typer

from flows.commands.app import Files, Given, Json, Sets, emit, recipe_name, with_settings


def up(
    prefect_port: Annotated[Optional[int], typer.Option(help="Port of Prefect (default 4200, or a free one).")] = None,
    mlflow_port: Annotated[Optional[int], typer.Option(help="Port of MLflow (default 5000, or a free one).")] = None,
    host: Annotated[
        Optional[str],
        typer.Option(
            help="Address to listen on (default 127.0.0.1; 0.0.0.0 for all networks); there is no login, so keep it local"
            " unless the network is trusted."
        ),
    ] = None,
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
    print(f"MLflow   {services.models_page(alive['mlflow']['url'])}")
    print("         (choose Model training at the top left for the runs; GenAI, where it opens, is about traces)")
    there = [found for name in ("prefect", "mlflow") if (found := services.from_other_machines(alive[name]))]
    if there:
        print(f"From other machines, by the name of this one or an address of it: {' and '.join(there)}")
        print(
            "(links in logs and descriptions lead to 127.0.0.1 unless PREFECT_UI_URL and POSTTRAIN_MLFLOW_URL are set)"
        )
    print("Next: `posttrain deploy` registers the recipes and stages; `posttrain down` stops everything.")


def down(json_: Json = False) -> None:
    """Stop the servers, the worker and the flows it runs. A stopped run continues when it is started again."""
    from flows import env, services

    stopped = services.down(env.prepare(quiet=True), say=lambda text: print(text, file=sys.stderr))
    if json_:
        return emit({"stopped": stopped})
    print("stopped: " + (", ".join(stopped) or "nothing was running"))


def status(json_: Json = False) -> None:
    """Show the servers, the running runs and who holds the GPU."""
    from flows import env, report

    value = report.status(env.prepare(quiet=True))
    if json_:
        return emit(value)
    report.print_status(value)


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
    nightly: Annotated[
        Optional[str],
        typer.Option(
            metavar="CRON",
            help="When the nightly demo runs (default: as registered before, at first '0 3 * * *').",
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Register every recipe and stage with the server, a nightly schedule, crash recovery and event-triggered runs.

    Uses the server of `posttrain up`, or the one PREFECT_API_URL names. Deploying again updates in place and
    leaves what was paused or scheduled in Prefect's UI.
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
    titles = {
        "deployments": "deployments",
        "paused": "paused in Prefect's UI and left so; to make one active, switch it on there",
        "automations": "automations",
    }
    for kind in (kind for kind in titles if kind != "paused" or result[kind]):
        print(titles[kind])
        for name in result[kind]:
            print(f"  {name}")


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
