"""Documents of the outbox -> runs, metrics, models and artifacts in MLflow; sends only what is missing.

The connection is :mod:`storage.mlflow_client`'s; a run is written by :mod:`storage.mlflow_run`, its curves read by
:mod:`storage.mlflow_curves`, models and the registry by :mod:`storage.mlflow_models`, names and notes made by
:mod:`storage.mlflow_text`. Here is which unit becomes which run, and how far MLflow knows it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from storage import home, leases, registry
from storage.files import atomic_write_json, read_json, refusal
from storage.mlflow_client import Connection, Replaced
from storage.mlflow_models import judged, log_models, registry_is_told, tell_registry
from storage.mlflow_run import MlflowRun
from storage.mlflow_text import (
    by_code,
    final_name,
    flatten,
    flow_note,
    flow_title,
    milliseconds,
    numbers_of,
    origin_tags,
    stage_note,
    stage_title,
)
from storage.outbox import (
    Doc,
    cursor_of,
    document_lock,
    done_files_of,
    files_of,
    flow_unit,
    here,
    is_ours,
    link,
    tracking_uri,
    unit_lock,
)

REGISTRY = "registry"  # what to poke for the model registry, which is no unit of its own


class Deleted(Exception):
    """Somebody has deleted a run in MLflow. ``over``: it has ended, and nothing will be told of it."""

    def __init__(self, over: bool):
        self.over = over
        super().__init__("its run was deleted in MLflow")


#: What MLflow answers where it understood and will not: of one run, which says nothing of the others.
REFUSED = (
    "BAD_REQUEST",
    "INVALID_PARAMETER_VALUE",
    "INVALID_STATE",
    "RESOURCE_ALREADY_EXISTS",
    "RESOURCE_DOES_NOT_EXIST",
)


class Projector:
    """Sends documents to MLflow. Every method may be repeated at any time."""

    def __init__(self) -> None:
        self.connection = Connection()
        self.unreachable = False

    def project(self, unit: str) -> tuple[bool, str | None]:
        """(whether MLflow now knows all of a finished unit, an error text). Never raises."""
        try:
            try:
                return self._project(unit)
            except Replaced:
                return self._project(unit)
        except (OSError, Replaced) as error:  # the outbox itself cannot be written: a full disk
            self.unreachable = True
            return False, _brief(error)

    def _project(self, unit: str) -> tuple[bool, str | None]:
        if unit == REGISTRY:
            error = self.registry()
            return error is None, error
        if files_of(unit)[0].exists():
            try:
                # before the cursor is read: a database that is gone is made anew, and what it was told is forgotten
                self.connection.connect()
            except Exception as error:
                self.unreachable = True
                return False, _brief(error)
        with unit_lock(unit, wait=False) as mine:
            if not mine:
                return False, None
            path, cursor_path = files_of(unit)
            with document_lock(unit):
                document, cursor = read_json(path, None), read_json(cursor_path, {})
            if document is None:
                return True, None
            try:
                if cursor.get("uri") not in (None, tracking_uri()) and not self._same_store(unit, cursor):
                    cursor = {}
                cursor |= _address()
                complete = self._flow(document, cursor) if document["type"] == "flow" else self._stage(document, cursor)
                self.unreachable = False
            except Deleted as deleted:
                complete = deleted.over
            except Exception as error:
                if self.connection.replaced():
                    raise Replaced from error
                self.unreachable = getattr(error, "error_code", None) not in REFUSED
                self.connection.keep(unit, cursor)
                return False, _brief(error)
            self.connection.keep(unit, cursor)
            if complete:
                done, done_cursor = done_files_of(unit)
                with document_lock(unit):
                    self.connection.check()
                    complete = read_json(path, None) == document  # else there is more to say meanwhile
                    if complete:
                        os.replace(cursor_path, done_cursor)
                        os.replace(path, done)
        if complete and document["type"] == "stage":
            _note_in_record(here(document), cursor)
        return complete, (
            self.registry() if complete and (document["type"] == "flow" or document.get("outputs")) else None
        )

    def _same_store(self, unit: str, cursor: dict[str, Any]) -> bool:
        """Whether the present address leads to the store that a cursor of another address is about (the database behind
        a server that was started meanwhile): then what was sent is there."""
        from mlflow.exceptions import MlflowException, RestException

        try:
            run = self.connection.client().get_run(cursor.get("run_id") or "none")
        except RestException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            return False
        except MlflowException:
            return False
        return run.data.tags.get("posttrain.unit") == unit

    def _run(
        self,
        unit: str,
        cursor: dict[str, Any],
        experiment: str,
        name: str,
        started: float,
        tags: dict[str, str],
        status: str,
    ) -> MlflowRun:
        """The run of a unit, found by its tag or made; one that had ended goes on."""
        client = self.connection.client()
        run_id = cursor.get("run_id")
        if run_id is not None and client.get_run(run_id).info.lifecycle_stage == "deleted":
            if status != "RUNNING" or cursor.get("status") in (None, "RUNNING"):
                raise Deleted(status != "RUNNING")
            client.restore_run(run_id)  # it had ended, and goes on
        if run_id is None:
            found = client.search_runs([experiment], filter_string=f"tags.`posttrain.unit` = '{unit}'", max_results=1)
            if found:
                run_id = found[0].info.run_id
            else:
                run_id = client.create_run(
                    experiment, start_time=milliseconds(started), run_name=name, tags={**tags, "posttrain.unit": unit}
                ).info.run_id
            cursor.update(run_id=run_id, experiment_id=experiment)
            self.connection.keep(unit, cursor)
        if status == "RUNNING" and cursor.get("status") not in (None, "RUNNING"):
            client.update_run(run_id, status="RUNNING")  # the same run goes on
        cursor["status"] = "RUNNING" if status == "RUNNING" else cursor.get("status", "RUNNING")
        return MlflowRun(self.connection, unit, run_id, cursor)

    def _parent(self, flow: dict[str, Any]) -> str | None:
        """MLflow run id of a stage's flow run (made if MLflow does not know it yet)."""
        if not flow:
            return None
        unit = flow_unit(flow["run_id"])
        with unit_lock(unit, wait=True):
            path, cursor_path = files_of(unit)
            cursor = cursor_of(unit)
            if cursor.get("run_id") and cursor.get("uri") == tracking_uri():
                return cursor["run_id"]
            cursor = _address()
            document = read_json(path, None) or {
                "unit": unit,
                "type": "flow",
                "run_id": flow["run_id"],
                "recipe": flow["recipe"],
            }
            self._flow(document, cursor)
            with document_lock(unit):
                self.connection.check()
                if not path.exists():
                    atomic_write_json(path, document)
                atomic_write_json(cursor_path, cursor)
            return cursor["run_id"]

    def _flow(self, document: Doc, cursor: dict[str, Any]) -> bool:
        """Tell of a flow run; whether it has ended."""
        run = read_json(home.runs_dir() / f"{document['run_id']}.json", None) or {
            "run_id": document["run_id"],
            "recipe": document["recipe"],
            "config": {},
            "status": "FINISHED",
            "stages": [],
            "started": time.time(),
        }
        status = run["status"]
        if status == "RUNNING" and not leases.alive(run.get("owner")):
            status = "KILLED"
        told, status = status, {"WAITING": "SCHEDULED"}.get(status, status)  # MLflow's word for a run that is to go on
        prefect = run.get("prefect") or {}
        shown = self._run(
            document["unit"],
            cursor,
            self.connection.experiment(run["recipe"]),
            flow_title(run),
            run["started"],
            {
                "posttrain.run": run["run_id"],
                "posttrain.recipe": run["recipe"],
                "posttrain.kind": "flow",
                **origin_tags(run.get("user"), run["recipe"]),
            },
            status,
        )
        shown.params(flatten(run.get("config") or {}))
        shown.tags(
            {
                "mlflow.note.content": flow_note(run),
                "posttrain.status": told,
                "mlflow.source.git.commit": (run.get("git") or "").removesuffix("-dirty"),
                "posttrain.git": run.get("git") or "",
                "posttrain.record": str(home.runs_dir() / f"{run['run_id']}.json"),
                **{f"prefect.{k}": str(v) for k, v in prefect.items() if v},
            }
        )
        shown.finals(
            {f"{s['label']}/{k}": v for s in run["stages"] for k, v in numbers_of(s.get("metrics") or {}).items()}
        )
        if status != "RUNNING":
            shown.end(status, run.get("finished") or time.time())
        return status != "RUNNING"

    def _stage(self, d: Doc, cursor: dict[str, Any]) -> bool:
        """Tell of a stage; whether it has ended."""
        d = here(d)
        status = d["status"]
        if status == "RUNNING" and not leases.alive(d.get("owner")):
            status = "KILLED"  # its process died without a word
        flow = d.get("flow") or {}
        parent = self._parent(flow)
        prefect = flow.get("prefect") or {}
        shown = self._run(
            d["unit"],
            cursor,
            self.connection.experiment(flow.get("recipe") or "stages"),
            d["label"] if flow else stage_title(d),
            d["started"],
            {
                "posttrain.kind": "stage",
                "posttrain.stage": d["stage"],
                "posttrain.label": d["label"],
                "posttrain.key": d["key"],
                **({"mlflow.parentRunId": parent} if parent else {}),
                **origin_tags(d.get("user"), flow.get("recipe") or f"stage:{d['stage']}"),
            },
            status,
        )
        shown.params(
            {**flatten(d["config"]), "seed": d["seed"], **{f"input.{n}": i["ref"] for n, i in d["inputs"].items()}}
        )
        shown.inputs(d)
        shown.tags(
            {
                "posttrain.cached": str(bool(d.get("cached"))).lower(),
                "posttrain.code": d.get("code", ""),
                "mlflow.source.git.commit": d.get("git", "").removesuffix("-dirty"),
                "posttrain.git": d.get("git", ""),
                "posttrain.run": flow.get("run_id", ""),
                "posttrain.record": d.get("record_path", ""),
                "posttrain.workdir": d["workdir"],
                "posttrain.attempts": str(d.get("attempts", "")),
                **{f"prefect.{k}": str(v) for k, v in prefect.items() if v},
                **{f"posttrain.output.{n}": o["ref"] for n, o in (d.get("outputs") or {}).items()},
                **{f"posttrain.warning.{code}": text for code, text in by_code(d.get("warnings") or []).items()},
                **{f"posttrain.version.{n}": v for n, v in (d.get("versions") or {}).items()},
                "posttrain.error": d.get("error") or "",
                "mlflow.note.content": stage_note(d, prefect),
            }
        )
        if not d.get("cached"):
            if cursor.get("compare"):
                shown.lacking(d)
            shown.metrics(d)
            shown.perf(d)
        if status == "RUNNING":
            return False
        about = judged(d, log_models(self.connection, shown, d))
        # The UI sorts groups (before the last slash) by name; what has no group comes last, after all curves.
        shown.finals(
            {final_name(key): value for key, value in numbers_of(d.get("summary") or {}).items()},
            {final_name(key) if key else "": one for key, one in about.items()},
        )
        shown.finals(
            {
                f"perf/{k}": v
                for k, v in numbers_of(d.get("perf") or {}).items()
                if k in ("seconds", "peak_memory_mib", "peak_gpu_memory_mib") or d.get("cached")
            }
        )
        shown.artifacts(d)
        shown.end(status, d.get("ended") or _last_sign(d))
        return True

    def registry(self) -> str | None:
        """Bring MLflow's model registry up to the registry log; an error text or None."""
        entries = registry.log()
        with unit_lock("registry", wait=True):
            if registry_is_told(entries):
                return None
            try:
                tell_registry(self.connection, entries)
            except Exception as error:
                self.unreachable = True
                return _brief(error)
        return None


def _brief(error: Exception) -> str:
    if told := refusal(error):
        return told.partition(";")[0]
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300] if text else ''}"


def _address() -> dict[str, Any]:
    """What a cursor says of where it holds."""
    return {"uri": tracking_uri(), "ours": is_ours(tracking_uri())}


def _note_in_record(document: Doc, cursor: dict[str, Any]) -> None:
    path = Path(document["record_path"]) if document.get("record_path") else None
    record = read_json(path, None) if path and not document.get("cached") else None
    if record and record.get("mlflow", {}).get("run_id") != cursor["run_id"]:
        atomic_write_json(
            path, {**record, "mlflow": {"run_id": cursor["run_id"], **link(cursor["run_id"], cursor["experiment_id"])}}
        )


def _last_sign(d: Doc) -> float:
    """When a process that died was last seen doing something."""
    paths = [Path(d["workdir"]) / name for name in ("metrics.jsonl", "stage.log", "perf.jsonl")]
    return max((p.stat().st_mtime for p in paths if p.exists()), default=d["started"])
