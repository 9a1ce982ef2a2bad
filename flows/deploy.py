"""What `posttrain deploy` registers with a Prefect server: recipes, stages, a schedule, slots and automations.

Everything here is idempotent: deploying again updates in place what differs, leaves no copies, and makes nothing active
that somebody paused. One deployment exists per preset, since Prefect replaces a whole parameter when a run overrides
part of it, and a schedule's own parameters are lost whenever it is paused and resumed.
"""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from flows.config import ConfigError, given_in_form, load_preset, presets
from flows.recipe import RECIPES, get_recipe
from flows.services import POOL
from stages.registry import STAGES, get_stage

NIGHTLY = "0 3 * * *"
LOST_AFTER = timedelta(minutes=5)  # more than nine heartbeats: also a server restart must not look like a crash
# a killed process is reported as crashed twice, by Prefect's runner and, seconds later, by its worker
RESTART_AFTER = timedelta(seconds=30)
RECOVER = "auto-recover"
ATTEMPTS = 3  # starts of a run, the first one included
AUTOMATIONS = ("posttrain: heartbeat lost", "posttrain: recover crashed runs", "posttrain: new preference data")


def deploy(
    *,
    gpu_slots: int | None = None,
    trigger_model: str = "model:policy@champion",
    nightly: str | None = None,
    timezone: str = "UTC",
    on_progress: Callable[[int, int, str], None] = lambda done, total, message: None,
) -> dict[str, Any]:
    """Register everything with the server of PREFECT_API_URL; returns the names by kind.

    trigger_model: the policy that the recipe started by new preference data improves.
    nightly: when the nightly demo runs, a cron expression in ``timezone``; None: as it does already, at first at
    :data:`NIGHTLY`.
    on_progress: called with (deployments registered so far, of how many, what is done now).

    What somebody paused in the UI stays so, and is listed under ``paused``; schedules that were made or changed there stay,
    too, apart from that of a ``nightly``.
    """
    from prefect.client.orchestration import get_client

    install_pool(gpu_slots=gpu_slots)
    with get_client(sync_client=True) as client:
        specs = [*recipe_deployments(nightly, timezone), *stage_deployments()]
        made, there = forms(dict.fromkeys(flow for flow, _, _ in specs)), registered(client)
        names = []
        for done, (flow, name, options) in enumerate(specs):
            on_progress(done, len(specs), f"deployments registered, now {name}")
            names.append(apply(flow, name, options, client=client, there=there, form=made[flow]))
        on_progress(len(specs), len(specs), "deployments registered, now older ones and automations")
        retire(specs, there, client)
    paused = sorted(name for name in names if name in there and is_paused(there[name]))
    if paused:
        on_progress(
            len(specs),
            len(specs),
            f"deployments registered; paused in Prefect's UI and left so: {', '.join(paused)}; to make one active,"
            " switch it on there",
        )
    return {
        "pool": POOL,
        "deployments": names,
        "paused": paused,
        "automations": install_automations(trigger_model),
    }


# ---------------------------------------------------------------- deployments


def recipe_deployments(nightly: str | None = None, timezone: str = "UTC"):
    """(flow, name, options) for every recipe: `RECIPE` with the class defaults, `RECIPE-PRESET` (all but small tries of
    another preset, NAME_demo), and the nightly demo. The UI lists deployments by their own names, so each says what it
    is."""
    given = "schedule" if nightly or timezone != "UTC" else "first_schedule"
    schedule = cron_schedule(nightly or NIGHTLY, timezone, "nightly")
    for name in RECIPES:
        flow = get_recipe(name)
        yield flow, name, {"queue": "cpu", "tag": "recipe"}
        for preset in (one for one in presets(name) if not one.endswith("_demo")):
            parameters = {"config": full(flow.config_type, load_preset(name, preset))}
            yield flow, f"{name}-{preset}", {"queue": "cpu", "tag": "recipe", "parameters": parameters}
            if (name, preset) == ("post_training", "demo"):
                yield (
                    flow,
                    f"{name}-nightly",
                    {"queue": "cpu", "tag": "recipe", "parameters": parameters, given: schedule},
                )


def scheduled(
    recipe: str, values: dict[str, Any], *, cron: str, timezone: str = "UTC", preset: str | None = None
) -> tuple[str, bool]:
    """Register `RECIPE-scheduled` (of a preset `RECIPE-PRESET-scheduled`), which runs with these settings whenever cron
    says so; again, with other settings or another time, replaces it, and :func:`deploy` leaves it alone. What was paused
    stays so. Returns its full name and whether it is paused; ConfigError where settings, cron expression or time zone
    are wrong, or the run would not start now (files and models that are not there), which at night nobody sees. Its runs
    are recorded as those of who registers it, whoever's worker runs them."""
    from prefect.client.orchestration import get_client

    from flows.recipe import load_config, rehearse
    from storage.records import user

    flow, schedule = get_recipe(recipe), cron_schedule(cron, timezone, "cron")
    config = load_config(recipe, found_anywhere(values))
    parameters = {"config": config.model_dump(mode="json")}
    refuse_what_forms_lose(config, parameters["config"])
    rehearse(recipe, flow.method, config)
    install_pool()
    name = "-".join([recipe, *([preset] if preset else []), "scheduled"])
    options = {"queue": "cpu", "tag": "recipe", "parameters": parameters, "schedule": schedule}
    if name_here := user():
        options["job_variables"] = {"env": {"POSTTRAIN_USER": name_here}}
    with get_client(sync_client=True) as client:
        full_name = apply(flow, name, options, client=client)
        return full_name, is_paused(client.read_deployment_by_name(full_name))


def refuse_what_forms_lose(config, form: dict[str, Any]) -> None:
    """Raise a ConfigError where a deployment's run would not take the settings as they are
    (:func:`flows.config.given_in_form`): one that is written as its default stands besides one that changes it.
    """
    from storage.lineage import flat

    taken = type(config).model_validate(given_in_form(type(config), form, sections=True))
    would = dict(flat(taken.model_dump(mode="json")))
    for key, value in flat(form):
        if would.get(key) != value:
            raise ConfigError(
                f"{key}={value} is the usual value, which the form of a deployment takes as not given, so that the run"
                f" would have {key}={would.get(key)}; write another one that is near"
            )


def found_anywhere(values: Any, under: str = "") -> Any:
    """Settings whose relative paths of files and of models here are absolute, since a worker runs elsewhere; below
    `data` those of all directories.
    """
    if isinstance(values, dict):
        return {key: found_anywhere(value, "data" if "data" in (key, under) else key) for key, value in values.items()}
    if not isinstance(values, str) or not values:
        return values
    path = Path(values)
    return (
        str(path.absolute())
        if path.is_file() or path.is_dir() and (under == "data" or (path / "config.json").is_file())
        else values
    )


def cron_schedule(cron: str, timezone: str, option: str):
    """Prefect's schedule of a cron expression (minute, hour, day, month, weekday) by the clocks of a time zone, summer
    time included.
    """
    from zoneinfo import ZoneInfo

    from prefect.client.schemas.schedules import CronSchedule

    try:
        ZoneInfo(timezone)
    except (ValueError, OSError, LookupError):  # a path, a directory of zones, a name that there is not
        raise ConfigError(
            f"timezone={timezone!r} is no time zone; write a name of the IANA database, such as --timezone"
            " Europe/Berlin or --timezone UTC"
        ) from None
    try:
        return CronSchedule(cron=cron, timezone=timezone)
    except ValueError:
        raise ConfigError(
            f"{option}={cron!r} is no cron expression; write minute, hour, day, month and weekday, such as --{option}"
            f" '{NIGHTLY}' for 3:00 every day"
        ) from None


def full(config_type, values: dict[str, Any]) -> dict[str, Any]:
    """The preset with every default filled in, where it is complete; a form shows what will run."""
    if any(field.is_required() and key not in values for key, field in config_type.model_fields.items()):
        return values
    return config_type.model_validate(values).model_dump(mode="json")


def stage_deployments():
    """(flow, name, options) for every stage; the deployment is called as its flow, `stage-NAME`."""
    from flows.single import stage_flow

    for name in STAGES:
        yield (
            stage_flow(name),
            stage_flow(name).name,
            {"queue": "gpu" if get_stage(name).SPEC.gpu else "cpu", "tag": "stage"},
        )


def registered(client) -> dict[str, Any]:
    """What the server has of ours, by full name. Asked for one by one they take it twice as long."""
    from prefect.client.schemas.filters import DeploymentFilter, FlowFilter

    ours, found = DeploymentFilter.model_validate({"tags": {"all_": ["posttrain"]}}), []
    while page := client.read_deployments(deployment_filter=ours, limit=200, offset=len(found)):
        found += page
    flows = sorted({one.flow_id for one in found})
    names = {}
    for first in range(0, len(flows), 200):
        chosen = FlowFilter.model_validate({"id": {"any_": flows[first : first + 200]}})
        names |= {one.id: one.name for one in client.read_flows(flow_filter=chosen, limit=200)}
    return {f"{names[one.flow_id]}/{one.name}": one for one in found if one.flow_id in names}


def is_paused(deployment) -> bool:
    """Whether somebody paused a deployment, or all that it has of schedules."""
    schedules = deployment.schedules
    return deployment.paused or bool(schedules) and not any(one.active for one in schedules)


def retire(specs, there: dict[str, Any], client) -> None:
    """Remove what older versions registered: the same deployments under names without the recipe (`form`, `demo`,
    `stage`), and those of flows that are gone.
    """
    known: dict[str, set[str]] = {}
    for flow, name, _ in specs:
        known.setdefault(entrypoint(flow), {"form", "stage"}).add(name.partition("-")[2])
    for one in there.values():
        if (one.entrypoint or "").startswith("flows.") and one.name in known.get(one.entrypoint, {one.name}):
            client.delete_deployment(one.id)


def entrypoint(flow) -> str:
    return f"{flow.fn.__module__}.{flow.fn.__name__}"


def apply(
    flow,
    name: str,
    options: dict[str, Any],
    client=None,
    there: dict[str, Any] | None = None,
    form: dict[str, Any] | None = None,
) -> str:
    """Register one deployment unless the server has it as it is; returns its full name. What was paused in the UI stays
    so, and so do the schedules that it has, unless ``options`` say its `schedule`; of a new one it is `first_schedule`.

    there: what :func:`registered` has found; form: the flow's of :func:`forms`.

    Enforcing the form is left to the server's default: where a request states it, the server checks the whole schema,
    answers nobody meanwhile, and needs most of a minute for all deployments on a small machine.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
    from prefect.exceptions import ObjectNotFound

    full_name = f"{flow.name}/{name}"
    wanted = {
        "description": (flow.description or "").partition("\n\nArgs:")[0],  # the form describes each of them
        "tags": ["posttrain", RECOVER, *([options["tag"]] if options.get("tag") else [])],
        "parameters": options.get("parameters") or {},
        "entrypoint": entrypoint(flow),
        "work_pool_name": POOL,
        "work_queue_name": options["queue"],
        "concurrency_limit": options.get("concurrency_limit"),
        "paused": False,
        "job_variables": options.get("job_variables") or {},
        "parameter_openapi_schema": form or forms([flow])[flow],
    }
    planned = options.get("schedule") or options.get("first_schedule")
    schedules = [DeploymentScheduleCreate(schedule=planned)] if planned else []
    with nullcontext(client) if client else get_client(sync_client=True) as client:
        existing = (there or {}).get(full_name)
        if existing is None:  # also one whose tags were edited in the UI
            with suppress(ObjectNotFound):
                existing = client.read_deployment_by_name(full_name)
        if existing:
            wanted["paused"] = existing.paused
            if options.get("schedule"):
                for one in schedules:
                    one.active = not existing.schedules or any(row.active for row in existing.schedules)
            else:  # registering it again would remove them
                schedules = [
                    DeploymentScheduleCreate(**row.model_dump(include={*DeploymentScheduleCreate.model_fields}))
                    for row in existing.schedules
                ]
        if existing and registered_as(existing, wanted, schedules):
            return full_name
        deployment = client.create_deployment(  # or updates
            client.create_flow_from_name(flow.name),
            name,
            version=flow.version,
            schedules=schedules,
            pull_steps=[],
            **wanted,
        )
        if existing and not existing.enforce_parameter_schema:
            client.update_deployment(deployment, DeploymentUpdate(enforce_parameter_schema=True))
    return full_name


def registered_as(existing, wanted: dict[str, Any], schedules: list) -> bool:
    """Whether a deployment of the server is what :func:`apply` makes of it: what was edited in the UI is not.

    Its version is the commit from which it was registered last and may be older than the code.
    """
    there = existing.model_dump(mode="json", include={*wanted, "schedules"})
    return (
        existing.enforce_parameter_schema
        and all((there[field] or None) == (value or None) for field, value in wanted.items())
        and [(row["schedule"], row["active"]) for row in there["schedules"]]
        == [(row.schedule.model_dump(mode="json"), row.active) for row in schedules]
    )


def forms(flows: Iterable) -> dict[Any, dict[str, Any]]:
    """Of each flow the JSON schema of its parameters, from which the UI makes its form.

    Prefect would make the schemas of all models anew for every flow and parameter, ten times the work; here pydantic
    makes them once, and a flow's schema holds those it uses.
    """
    from prefect.utilities.callables import generate_parameter_schema, parameter_docstrings
    from pydantic import BaseModel
    from pydantic.json_schema import models_json_schema

    signatures = {flow: inspect.signature(flow.fn) for flow in flows}
    models: dict[tuple[Any, str], type[BaseModel]] = {}
    for flow, signature in signatures.items():
        for one in signature.parameters.values():
            model = (typing.get_args(one.annotation) or (one.annotation,))[0]  # of Annotated[MODEL, ...]
            if isinstance(model, type) and issubclass(model, BaseModel):
                models[flow, one.name] = model
    refs, schemas = models_json_schema(
        [(model, "validation") for model in dict.fromkeys(models.values())], ref_template="#/definitions/{model}"
    )
    found = {}
    for flow, signature in signatures.items():
        plain = [
            one.replace(annotation=Any) if (flow, one.name) in models else one for one in signature.parameters.values()
        ]
        schema = generate_parameter_schema(
            signature.replace(parameters=plain), parameter_docstrings(inspect.getdoc(flow.fn))
        ).model_dump(mode="json", exclude_unset=True)
        properties = {
            name: {**one, **refs[models[flow, name], "validation"]} if (flow, name) in models else one
            for name, one in schema["properties"].items()
        }
        properties, definitions = titled(properties, schemas["$defs"])
        # additional: else a parameter that the flow does not have is let in and the run's process ends with a traceback
        # in the worker's log alone
        found[flow] = {**schema, "properties": properties, "definitions": definitions, "additionalProperties": False}
    return found


ACRONYMS = {"sft": "SFT", "rl": "RL", "dpo": "DPO"}


def titled(properties: dict[str, Any], definitions: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A form schema whose sections are called after their steps, and the definitions that it uses: the UI shows a
    nested model by its title, and every stage's model is called Config. A section has its title beside its reference,
    which both of Prefect's UIs put over that of the definition; of a list's entries and of alternatives they read the
    definition's alone, so that each such use of a model becomes a definition of its own."""
    named: dict[str, Any] = {}

    def use(name: str, own: str, title: dict[str, str]) -> str:
        if own not in named:
            named[own] = None
            plain = {key: value for key, value in definitions[name].items() if key != "title"}
            named[own] = {**visit(plain, title.get("title", "")), **title}
        return f"#/definitions/{own}"

    def visit(node: Any, title: str) -> Any:
        if isinstance(node, list):
            return [visit(one, title) for one in node]
        if not isinstance(node, dict):
            return node
        found = {}
        for key, value in node.items():
            if key == "$ref":
                name = value.rpartition("/")[2]
                found[key] = use(name, f"{name}.{title.replace(' ', '')}", {"title": title})
            elif key == "properties":
                found[key] = {field: section(field, one) for field, one in value.items()}
            elif key in ("default", "enum", "const", "examples"):
                found[key] = value
            else:
                found[key] = visit(value, title)
        return found

    def section(field: str, node: dict[str, Any]) -> dict[str, Any]:
        if "$ref" not in node:
            return visit(node, human(field))
        name = node["$ref"].rpartition("/")[2]
        return {"title": human(field), **node, "$ref": use(name, name, {})}

    return {field: section(field, one) for field, one in properties.items()}, named


def human(field: str) -> str:
    """rejection_sft -> Rejection SFT."""
    words = " ".join(ACRONYMS.get(word, word) for word in field.split("_"))
    return words[:1].upper() + words[1:]


# ---------------------------------------------------------------- pool, queues, slots


def install_pool(*, gpu_slots: int | None = None) -> None:
    """The process work pool, its queues and the `gpu` concurrency limit."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import (
        GlobalConcurrencyLimitCreate,
        GlobalConcurrencyLimitUpdate,
        WorkPoolCreate,
    )
    from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

    from tasks.devices import gpu_slots as slots_here

    slots = gpu_slots or max(1, slots_here())  # without a GPU the CPU is the single training slot
    with get_client(sync_client=True) as client:
        try:
            client.create_work_pool(
                WorkPoolCreate(
                    name=POOL,
                    type="process",
                    description="post-training runs on this machine",
                    base_job_template=process_template(),
                )
            )
        except ObjectAlreadyExists:
            pass
        try:
            existing = client.read_global_concurrency_limit_by_name("gpu")
        except ObjectNotFound:
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name="gpu", limit=slots))
        else:
            if gpu_slots is None:
                slots = existing.limit  # as given before
            elif existing.limit != slots:
                client.update_global_concurrency_limit("gpu", GlobalConcurrencyLimitUpdate(limit=slots))
    asyncio.run(_install_queues(queues(slots)))


def queues(slots: int) -> dict[str, dict[str, int]]:
    """The pool's queues and how many of their runs go at a time: of single GPU stages as many as there are slots.

    Not the worker's --limit: Prefect 3.8's worker dies where a limited one meets a run that it still holds, as after a
    crash recovery (its issue 10632).
    """
    return {"gpu": {"priority": 1, "concurrency_limit": slots}, "cpu": {"priority": 2, "concurrency_limit": 4}}


def process_template() -> dict[str, Any]:
    from prefect.workers.process import ProcessWorker

    return ProcessWorker.get_default_base_job_template()


async def _install_queues(wanted: dict[str, dict[str, int]]) -> None:
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    async with get_client() as client:
        for name, options in wanted.items():
            try:
                queue = await client.read_work_queue_by_name(name, work_pool_name=POOL)
            except ObjectNotFound:
                await client.create_work_queue(name=name, work_pool_name=POOL, **options)
            else:
                await client.update_work_queue(queue.id, **options)


# ---------------------------------------------------------------- automations


def install_automations(trigger_model: str) -> list[str]:
    """Crash recovery and event-triggered runs; returns the automations' names."""
    from prefect.automations import Automation
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        target = client.read_deployment_by_name("preference/preference")
    for automation in automations(target.id, trigger_model):
        try:
            existing = Automation.read(name=automation.name)
        except ValueError:
            pass
        else:
            if installed_as(existing) == installed_as(automation):
                # a new one would not know the heartbeats so far: a run that is dead by now would be taken for running
                # for ever
                continue
            existing.delete()
        automation.create()
    return list(AUTOMATIONS)


def installed_as(automation) -> dict[str, Any]:
    """What an automation does, without what the server adds."""
    found = automation.model_dump(
        mode="json", include={"name", "description", "enabled", "trigger", "actions"}, exclude={"trigger": {"id"}}
    )
    # in another order in every process
    sets = {name: sorted(found["trigger"][name]) for name in ("after", "expect", "for_each")}
    return {**found, "trigger": {**found["trigger"], **sets}}


def automations(preference_id, trigger_model: str):
    """The three automations.

    A run whose heartbeats stop without an ending is declared Crashed; a crashed run of a deployment that is left so for
    half a minute is scheduled again (twice at most) and continues from its checkpoints; a dataset of pairs published by
    a run of stage `ingest` alone starts the preference recipe.
    """
    from prefect.automations import Automation
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState, RunDeployment
    from prefect.events.schemas.automations import EventTrigger, Posture

    ours = {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{RECOVER}"}
    yield Automation(
        name=AUTOMATIONS[0],
        description="No heartbeat for five minutes and no end: the process is gone.",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            after={"prefect.flow-run.heartbeat"},
            expect={
                "prefect.flow-run.heartbeat",
                "prefect.flow-run.Completed",
                "prefect.flow-run.Failed",
                "prefect.flow-run.Cancelled",
                "prefect.flow-run.Crashed",
            },
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related=ours,
            for_each={"prefect.resource.id"},
            threshold=1,
            within=LOST_AFTER,
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message="no heartbeat for five minutes")],
    )
    yield Automation(
        name=AUTOMATIONS[1],
        description="A crashed run starts again and continues from its stage records and checkpoints.",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            after={"prefect.flow-run.Crashed"},
            expect={
                f"prefect.flow-run.{state}"
                for state in (
                    "Scheduled",
                    "AwaitingRetry",
                    "Pending",
                    "Running",
                    "Completed",
                    "Failed",
                    "Cancelling",
                    "Cancelled",
                )
            },
            match={
                "prefect.resource.id": "prefect.flow-run.*",
                "prefect.run-count": [str(n) for n in range(1, ATTEMPTS)],
            },
            match_related=ours,
            for_each={"prefect.resource.id"},
            threshold=1,
            within=RESTART_AFTER,
        ),
        actions=[
            ChangeFlowRunState(state=StateType.SCHEDULED, name="AwaitingRetry", message="continuing after a crash")
        ],
    )
    yield Automation(
        name=AUTOMATIONS[2],
        description="New preference pairs, ingested by a stage run of their own, start the preference recipe.",
        trigger=EventTrigger(
            posture=Posture.Reactive,
            expect={"posttrain.dataset.published"},
            match={
                "prefect.resource.id": "posttrain.dataset.*",
                "posttrain.published-by": "stage",
                "posttrain.stage": "ingest",
                "posttrain.kind": "pairs/1",
            },
            for_each={"prefect.resource.id"},
            threshold=1,
            within=timedelta(0),
        ),
        actions=[
            RunDeployment(
                source="selected",
                deployment_id=preference_id,
                parameters={
                    "config": {
                        "model": trigger_model,
                        "data": {"path": {"__prefect_kind": "jinja", "template": "{{ event.payload.ref }}"}},
                    }
                },
            )
        ],
    )
