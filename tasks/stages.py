"""One Prefect task per stage, all thin over `tasks.run.run_stage`.

A task asks the stage records, not Prefect's cache, whether work is done: a verified record ends the task in a
state named *Cached* whose cache key is the stage key, and anything else runs. What the stage process says becomes
the task's log, its progress artifact and its summary. A cancelled task takes the stage's process tree down,
because `run_stage` does so on its way out and a stage task is always called directly, never submitted.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import StateDetails
from prefect.logging import get_run_logger
from prefect.states import Completed

from stages.registry import get_stage
from storage import outbox, records
from tasks.results import small
from tasks.run import prepare, run_stage
from tasks.stopping import killed_told

ARTIFACT_SECONDS = 5.0
GPU_SLOTS = "gpu"

_listeners: list[Callable[[str, dict], None]] = []


@contextmanager
def listening(listener: Callable[[str, dict], None]):
    """Call `listener(label, event)` for every event of stages that run in this process."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@functools.cache
def stage_task(name: str) -> Task:
    """The Prefect task of a stage; its run is named `stage · label`."""
    gpu = get_stage(name).SPEC.gpu

    def body(
        inputs: dict[str, str],
        config: dict[str, Any],
        seed: int,
        label: str,
        name_as: str | None,
        flow_run: dict[str, Any] | None,
        force: bool,
    ):
        return _run(name, gpu, inputs, config, seed, label, name_as, flow_run, force)

    body.__name__ = name
    body.__doc__ = (get_stage(name).__doc__ or "").strip()
    return task(
        body,
        name=name,
        task_run_name=name + " · {label}",
        cache_policy=NO_CACHE,
        persist_result=False,
        tags=["posttrain", "gpu"] if gpu else ["posttrain"],
    )


def _run(name, gpu, inputs, config, seed, label, name_as, flow_run, force):
    relay, flow_run = Relay(label, get_run_logger()), with_task_page(flow_run)
    with gpu_slot() if gpu and _computes(name, inputs, config, seed, flow_run, force, relay) else nullcontext():
        with killed_told():  # before the slot is given back, which asks a server that is gone for minutes
            result = run_stage(
                name, inputs, config, seed=seed, name_as=name_as, flow_run=flow_run, force=force, on_event=relay
            )
    value = small(result)
    relay.finish(value)
    if not result.cached:
        announce(value, by="stage" if str((flow_run or {}).get("recipe", "")).startswith("stage:") else "recipe")
    return Completed(
        name="Cached" if result.cached else "Completed",
        data=value,
        message=f"verified record {result.key[:12]}" if result.cached else None,
        state_details=StateDetails(cache_key=result.key),
    )


def with_task_page(flow_run: dict[str, Any] | None) -> dict[str, Any] | None:
    """What a stage is told of its flow run, with the page of its own task run beside that of the flow run, for MLflow."""
    from prefect.runtime import task_run

    prefect = (flow_run or {}).get("prefect") or {}
    if not prefect.get("url"):  # a server without a UI
        return flow_run
    page = f"{prefect['url'].partition('/runs/')[0]}/runs/task-run/{task_run.id}"
    return {**flow_run, "prefect": {**prefect, "task_url": page}}


def _computes(name, inputs, config, seed, flow_run, force, relay) -> bool:
    """Whether a slot is waited for: no verified record exists yet, and what is given is computed with on a GPU."""
    prepared = prepare(name, inputs, config, seed=seed, flow_run=flow_run, on_event=relay)
    return prepared.spec.gpu and (force or records.find(prepared.key) is None)


@contextmanager
def gpu_slot():
    """A slot of the server's `gpu` limit; a server that lives for one run has none. The file lease below it is what
    cannot be fooled.
    """
    if os.environ.get("POSTTRAIN_EMBEDDED"):
        yield
        return
    from prefect.concurrency.sync import concurrency

    with concurrency(GPU_SLOTS, occupy=1, lease_duration=60, strict=False, raise_on_lease_renewal_failure=False):
        yield


def close_lost(flow_runs: list[str], current: str) -> None:
    """End in Prefect what earlier attempts of a run left open when they were killed: nobody else would, and the UI
    would show them as running for ever. `flow_runs` are all Prefect runs of it, `current` the one that goes on now."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
    from prefect.states import Cancelled, Crashed

    mine, active = {"id": {"any_": flow_runs}}, {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}}
    try:
        with get_client(sync_client=True) as client:
            for lost in client.read_task_runs(
                flow_run_filter=FlowRunFilter.model_validate(mine), task_run_filter=TaskRunFilter.model_validate(active)
            ):
                client.set_task_run_state(
                    lost.id, Crashed(message="its process died; a later attempt goes on"), force=True
                )
            for lost in client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate({**mine, **active})):
                if str(lost.id) != current:  # not Crashed: that would have it rescheduled beside this one
                    client.set_flow_run_state(
                        lost.id, Cancelled(message=f"continued by flow run {current}"), force=True
                    )
    except Exception as error:  # for the eye only
        get_run_logger().warning("earlier attempts stay open in Prefect: %s", error)


class Relay:
    """Turns a stage's events into log lines, one progress artifact and report artifacts; never fails the stage."""

    def __init__(self, label: str, logger):
        self.label, self.logger = label, logger
        self.artifact = None
        self.last_artifact = self.last_metric = 0.0
        self.failed: set[str] = set()

    def __call__(self, event: dict) -> None:
        for listener in list(_listeners):
            listener(self.label, event)
        handler = getattr(self, "_" + str(event.get("event")), None)
        if handler is not None:
            handler(event)

    def _log(self, event):
        self.logger.info(event.get("text", ""))

    def _warning(self, event):
        self.logger.warning("%s: %s", event.get("code"), event.get("text"))

    def _metric(self, event):
        now = time.monotonic()
        if now - self.last_metric >= ARTIFACT_SECONDS:
            self.last_metric = now
            values = event.get("metrics") or {}
            self.logger.info(
                "step %s  %s",
                event.get("step"),
                "  ".join(
                    f"{key}={value:.4g}" for key, value in list(values.items())[:8] if isinstance(value, (int, float))
                ),
            )

    def _progress(self, event):
        now = time.monotonic()
        done, total = event.get("done") or 0, event.get("total") or 0
        if not total or (now - self.last_artifact < ARTIFACT_SECONDS and done < total):
            return
        self.last_artifact = now
        self._progress_artifact(min(100.0, 100.0 * done / total), event.get("message"))

    def _progress_artifact(self, percent: float, message: str | None) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        told = f"{self.label}: {message or 'progress'}"

        def write():
            if self.artifact is None:
                self.artifact = create_progress_artifact(
                    progress=percent, key=key_of("progress", self.label), description=told
                )
            else:
                update_progress_artifact(self.artifact, progress=percent, description=told)

        self._try("progress artifact", write)

    def _report(self, event):
        from prefect.artifacts import create_markdown_artifact

        if event.get("markdown"):  # the file that holds the page
            name = event.get("name", "report")
            self._try(
                "report artifact",
                lambda: create_markdown_artifact(
                    key=key_of(self.label, name),
                    markdown=Path(event["markdown"]).read_text("utf-8"),
                    description=f"{self.label}: {name.replace('-', ' ')}",
                ),
            )

    def _waiting(self, event):
        self.logger.info(event.get("text", ""))

    def finish(self, value: dict) -> None:
        """The stage's summary and its place in MLflow, as artifacts and in the log."""
        from prefect.artifacts import create_link_artifact, create_markdown_artifact

        how = "reused" if value["cached"] else f"done in {value['seconds']:.1f} s"
        made = "  ".join(f"{name}={ref}" for name, ref in value["outputs"].items())
        self.logger.info("%s %s: %s", self.label, how, made)
        if self.artifact is not None and not value["cached"]:
            self._progress_artifact(100.0, None)
        url = outbox.link(value["mlflow_run_id"]).get("url") if value["mlflow_run_id"] else None
        if str(url).startswith("http"):
            self.logger.info("MLflow: %s", url)
            self._try(
                "link artifact",
                lambda: create_link_artifact(
                    key=key_of("mlflow", self.label),
                    link=url,
                    link_text=f"{self.label} in MLflow",
                    description=f"{self.label}: curves, figures and parameters in MLflow",
                ),
            )
        self._try(
            "summary artifact",
            lambda: create_markdown_artifact(
                key=key_of("result", self.label),
                markdown=summary(self.label, value),
                description=f"{self.label}: outputs, numbers and warnings",
            ),
        )

    def _try(self, what: str, action: Callable[[], Any]) -> None:
        """Artifacts are for the eye: a server that is away is told once and never stops training."""
        if what in self.failed:
            return
        try:
            action()
        except Exception as error:  # the client raises httpx, prefect and validation errors alike
            self.failed.add(what)
            self.logger.warning("no %s: %s", what, error)


def key_of(*parts: str) -> str:
    """An artifact key: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


def summary(label: str, value: dict) -> str:
    """Markdown of one stage result."""
    lines = [
        f"## {label}",
        "",
        f"stage `{value['stage']}`, key `{value['key'][:16]}`, "
        + ("**cached**" if value["cached"] else f"{value['seconds']:.1f} s"),
        "",
    ]
    if value["outputs"]:
        lines += (
            ["| output | ref |", "| --- | --- |"] + [f"| {k} | `{v}` |" for k, v in value["outputs"].items()] + [""]
        )
    numbers = {k: v for k, v in value["metrics"].items() if isinstance(v, (int, float))}
    if numbers:
        lines += (
            ["| metric | value |", "| --- | --- |"] + [f"| {k} | {v:.6g} |" for k, v in sorted(numbers.items())] + [""]
        )
    lines += [f"- warning {one.get('code')}: {one.get('text')}" for one in value.get("warnings") or []]
    return "\n".join(lines)


def announce(value: dict, *, by: str) -> None:
    """Emit `posttrain.dataset.published` for every new dataset and `posttrain.model.published` for every new model, when
    a server is configured to hear it.

    by: `stage` for a stage run alone, else `recipe`; the automation of `flows.deploy` listens to the former only, so
    that a recipe's own datasets never start another recipe.
    """
    if not os.environ.get("PREFECT_API_URL"):
        return
    from prefect.events import emit_event

    from storage.datasets import open_dataset

    made = records.read(value["key"])["outputs"]
    for output, ref in value["outputs"].items():
        kind, name, digest = made[output]["kind"], made[output]["name"], made[output]["digest"]
        about, payload = {}, {"ref": ref, "name": name, "digest": digest}
        if kind == "dataset":
            manifest = open_dataset(value["paths"][output]).manifest
            about = {"posttrain.kind": manifest["kind"]}
            payload |= {"kind": manifest["kind"], "rows": manifest["rows"]}
        emit_event(
            f"posttrain.{kind}.published",
            resource={
                "prefect.resource.id": f"posttrain.{kind}.{name}",
                "prefect.resource.name": name,
                "posttrain.stage": value["stage"],
                "posttrain.output": output,
                "posttrain.published-by": by,
                **about,
            },
            payload=payload,
        )
