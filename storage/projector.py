"""Documents of the outbox -> runs, metrics, models and artifacts in MLflow; sends only what is missing."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any, Callable, Iterator

from storage import home, leases, records, registry
from storage.files import atomic_write_json, link_tree, read_json, rebased, refusal, sha256_text
from storage.mlflow_database import (
    _hush,
    follow_home,
    identity,
    local_path,
    make_database,
    open_present,
    prepare_mlflow,
)
from storage.outbox import (
    Doc,
    cursor_of,
    document_lock,
    done_files_of,
    files_of,
    flow_unit,
    is_ours,
    link,
    tracking_uri,
    unit_lock,
)
from storage.store import removed

REGISTRY = "registry"  # what to poke for the model registry, which is no unit of its own

BATCH = 900  # MLflow takes at most 1000 metrics in one call

LOG_LIMIT = 5 << 20


class Replaced(RuntimeError):
    """The database is another file than the one that was spoken to: nothing that this one said may be noted."""

    def __init__(self):
        super().__init__("MLflow's database was replaced by another file")


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
        self._client: Any = None
        self._uri: str | None = None
        self._database: tuple[int, int] | None = None
        self._experiments: dict[str, str] = {}
        self.unreachable = False

    # -- connection --------------------------------------------------------------------------------------------------

    def client(self) -> Any:
        """An MlflowClient for the present tracking URI."""
        uri = tracking_uri()
        if self._client is None or uri != self._uri:
            prepare_mlflow()
            import mlflow
            from mlflow import MlflowClient

            given = {name: os.environ.get(name) for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")}
            mlflow.set_tracking_uri(uri)  # `models:/...` sources are looked up through the global address
            mlflow.set_registry_uri(uri)
            for name, value in given.items():  # mlflow exports what it is told; these variables stay what the user set
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
            make_database(uri)
            follow_home(uri)
            with unit_lock("mlflow database", wait=True):  # two processes must not create the tables at once
                database = open_present(uri)
                client = MlflowClient(tracking_uri=uri, registry_uri=uri)
                client.search_experiments(max_results=1)
            _hush()  # mlflow sets its own level when imported
            self._client, self._uri, self._database, self._experiments = client, uri, database, {}
        return self._client

    def connect(self) -> None:
        """Speak to the database that is there now: a damaged one is moved away while runs go on, and another process
        may have made the next.
        """
        if self._replaced():
            self._client = None
        self.client()

    def _replaced(self) -> bool:
        return self._database is not None and identity(tracking_uri()) != self._database

    def _check(self) -> None:
        """Called while what :func:`storage.outbox.forget` removes is locked."""
        if self._replaced():
            raise Replaced

    def _keep(self, unit: str, cursor: dict[str, Any]) -> None:
        """Write down how far MLflow knows a unit."""
        with document_lock(unit):
            self._check()
            atomic_write_json(files_of(unit)[1], cursor)

    def experiment(self, recipe: str) -> str:
        """Id of the experiment of a recipe; made if missing."""
        name = f"posttrain/{recipe}"
        if name not in self._experiments:
            client = self.client()
            with unit_lock("experiment " + name, wait=True):
                found = client.get_experiment_by_name(name)
                if found is None:
                    # not behind the server, through which they are copied and without which they cannot be written
                    where = (home.subdir("mlartifacts") / recipe).as_uri() if is_ours(tracking_uri()) else None
                    self._experiments[name] = client.create_experiment(
                        name,
                        artifact_location=where,
                        tags={
                            "mlflow.experimentKind": "custom_model_development",
                            "mlflow.note.content": _experiment_note(recipe),
                        },
                    )
                else:
                    if found.lifecycle_stage == "deleted":
                        client.restore_experiment(found.experiment_id)
                    place = local_path(found.artifact_location)
                    if place is not None and not is_ours(tracking_uri()) and not place.parent.is_dir():
                        raise RuntimeError(
                            f"the experiment {name} at {tracking_uri()} keeps its files at {place}, which is not on this"
                            " machine; share that POSTTRAIN_HOME, or give MLFLOW_TRACKING_URI a server that is not"
                            " another home's"
                        )
                    self._experiments[name] = found.experiment_id
        return self._experiments[name]

    # -- one unit ----------------------------------------------------------------------------------------------------

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
                self.connect()
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
                if self._replaced():
                    raise Replaced from error
                self.unreachable = getattr(error, "error_code", None) not in REFUSED
                self._keep(unit, cursor)
                return False, _brief(error)
            self._keep(unit, cursor)
            if complete:
                done, done_cursor = done_files_of(unit)
                with document_lock(unit):
                    self._check()
                    complete = read_json(path, None) == document  # else there is more to say meanwhile
                    if complete:
                        os.replace(cursor_path, done_cursor)
                        os.replace(path, done)
        if complete and document["type"] == "stage":
            _note_in_record(_here(document), cursor)
        return complete, (
            self.registry() if complete and (document["type"] == "flow" or document.get("outputs")) else None
        )

    def _same_store(self, unit: str, cursor: dict[str, Any]) -> bool:
        """Whether the present address leads to the store that a cursor of another address is about (the database behind
        a server that was started meanwhile): then what was sent is there."""
        from mlflow.exceptions import MlflowException, RestException

        try:
            run = self.client().get_run(cursor.get("run_id") or "none")
        except RestException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            return False
        except MlflowException:
            return False
        return run.data.tags.get("posttrain.unit") == unit

    def _ensure_run(
        self,
        unit: str,
        cursor: dict[str, Any],
        experiment: str,
        name: str,
        started: float,
        tags: dict[str, str],
        status: str,
    ) -> str:
        client = self.client()
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
                    experiment, start_time=_ms(started), run_name=name, tags={**tags, "posttrain.unit": unit}
                ).info.run_id
            cursor.update(run_id=run_id, experiment_id=experiment)
            self._keep(unit, cursor)
        if status == "RUNNING" and cursor.get("status") not in (None, "RUNNING"):
            client.update_run(run_id, status="RUNNING")  # the same run goes on
        cursor["status"] = "RUNNING" if status == "RUNNING" else cursor.get("status", "RUNNING")
        return run_id

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
                self._check()
                if not path.exists():
                    atomic_write_json(path, document)
                atomic_write_json(cursor_path, cursor)
            return cursor["run_id"]

    def _flow(self, document: Doc, cursor: dict[str, Any]) -> bool:
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
        tags = {
            "posttrain.run": run["run_id"],
            "posttrain.recipe": run["recipe"],
            "posttrain.kind": "flow",
            **_origin(run.get("user"), run["recipe"]),
        }
        run_id = self._ensure_run(
            document["unit"],
            cursor,
            self.experiment(run["recipe"]),
            " · ".join(
                [
                    run["recipe"],
                    *([prefect["flow_run_name"]] if prefect.get("flow_run_name") else []),
                    run["run_id"][:8],
                ]
            ),
            run["started"],
            tags,
            status,
        )
        self._params(run_id, cursor, _flatten(run.get("config") or {}))
        stage_lines = [
            f"| {s['label']} | {s['stage']} | {'cached' if s['cached'] else 'ran'} | {s.get('seconds', 0):.1f} |"
            f" {', '.join(_short(ref) for ref in s['outputs'].values())} |"
            for s in run["stages"]
        ]
        note = "\n".join(
            [
                *([f"**Error:** {run['error']}", ""] if run.get("error") else []),
                f"**{run['recipe']}**, run `{run['run_id']}`"
                + (f", continues `{run['parent']}`" if run.get("parent") else ""),
                *([f"[Prefect flow run]({prefect['url']})"] if prefect.get("url") else []),
                "",
                "| stage | kind | how | seconds | outputs |",
                "|---|---|---|---|---|",
                *stage_lines,
            ]
        )
        self._tags(
            run_id,
            cursor,
            {
                "mlflow.note.content": note,
                "posttrain.status": told,
                "mlflow.source.git.commit": (run.get("git") or "").removesuffix("-dirty"),
                "posttrain.git": run.get("git") or "",
                "posttrain.record": str(home.runs_dir() / f"{run['run_id']}.json"),
                **{f"prefect.{k}": str(v) for k, v in prefect.items() if v},
            },
        )
        finals = {f"{s['label']}/{k}": v for s in run["stages"] for k, v in _numbers(s.get("metrics") or {}).items()}
        self._final(run_id, cursor, finals, prefix="")
        if status != "RUNNING":
            self._end(run_id, cursor, status, run.get("finished") or time.time())
        return status != "RUNNING"

    def _stage(self, d: Doc, cursor: dict[str, Any]) -> bool:
        d = _here(d)
        status = d["status"]
        if status == "RUNNING" and not leases.alive(d.get("owner")):
            status = "KILLED"  # its process died without a word
        flow = d.get("flow") or {}
        parent = self._parent(flow)
        prefect = flow.get("prefect") or {}
        tags = {
            "posttrain.kind": "stage",
            "posttrain.stage": d["stage"],
            "posttrain.label": d["label"],
            "posttrain.key": d["key"],
            **({"mlflow.parentRunId": parent} if parent else {}),
            **_origin(d.get("user"), flow.get("recipe") or f"stage:{d['stage']}"),
        }
        run_id = self._ensure_run(
            d["unit"],
            cursor,
            self.experiment(flow.get("recipe") or "stages"),
            d["label"] if flow else _title(d),
            d["started"],
            tags,
            status,
        )
        self._params(
            run_id,
            cursor,
            {**_flatten(d["config"]), "seed": d["seed"], **{f"input.{n}": i["ref"] for n, i in d["inputs"].items()}},
        )
        self._inputs(run_id, cursor, d)
        self._tags(
            run_id,
            cursor,
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
                **{f"posttrain.warning.{w['code']}": w["text"] for w in d.get("warnings") or []},
                **{f"posttrain.version.{n}": v for n, v in (d.get("versions") or {}).items()},
                "posttrain.error": d.get("error") or "",
                "mlflow.note.content": _stage_note(d, prefect),
            },
        )
        if not d.get("cached"):
            if cursor.get("compare"):
                self._lacking(run_id, d, cursor)
            self._metrics(run_id, d, cursor)
            self._perf(run_id, d, cursor)
        if status == "RUNNING":
            return False
        models = self._models(run_id, cursor, d)
        # The UI sorts groups (before the last slash) by name; what has no group comes last, after all curves.
        numbers, judged = _numbers(d.get("summary") or {}), _judged(d, models)
        self._final(
            run_id,
            cursor,
            {_final_name(key): value for key, value in numbers.items()},
            prefix="",
            judged={_final_name(key) if key else "": about for key, about in judged.items()},
        )
        self._final(
            run_id,
            cursor,
            {
                f"perf/{k}": v
                for k, v in _numbers(d.get("perf") or {}).items()
                if k in ("seconds", "peak_memory_mib", "peak_gpu_memory_mib") or d.get("cached")
            },
            prefix="",
        )
        self._artifacts(run_id, cursor, d)
        self._end(run_id, cursor, status, d.get("ended") or _last_sign(d))
        return True

    # -- the pieces --------------------------------------------------------------------------------------------------

    def _params(self, run_id: str, cursor: dict[str, Any], values: dict[str, Any]) -> None:
        from mlflow.entities import Param

        sent = set(cursor.setdefault("params", []))
        new = [Param(_safe(k), _text(v)[:6000]) for k, v in values.items() if _safe(k) not in sent]
        for start in range(0, len(new), 100):
            self.client().log_batch(run_id, params=new[start : start + 100])
            cursor["params"] += [p.key for p in new[start : start + 100]]

    def _tags(self, run_id: str, cursor: dict[str, Any], values: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        sent = cursor.setdefault("tags", {})
        new = {_safe(k): v[:7900] for k, v in values.items() if v and sent.get(_safe(k)) != sha256_text(v)[:16]}
        items = list(new.items())
        for start in range(0, len(items), 90):
            self.client().log_batch(run_id, tags=[RunTag(k, v) for k, v in items[start : start + 90]])
        for key, value in values.items():
            if value:
                sent[_safe(key)] = sha256_text(value)[:16]
            elif _safe(key) in sent:  # of an attempt before this one
                if _safe(key) in self.client().get_run(run_id).data.tags:  # nobody took it away by hand
                    self.client().delete_tag(run_id, _safe(key))
                del sent[_safe(key)]

    def _inputs(self, run_id: str, cursor: dict[str, Any], d: Doc) -> None:
        sent = cursor.setdefault("inputs", [])
        todo = {n: i for n, i in d["inputs"].items() if n not in sent}
        if not todo:
            return
        from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelInput

        datasets, models = [], []
        state = _models_state()
        for name, given in todo.items():
            tags = [
                InputTag("mlflow.data.context", name),
                InputTag("posttrain.digest", given["digest"]),
                InputTag("posttrain.ref", given["ref"]),
            ]
            if given["kind"] == "model":
                model_id = state["models"].get(given["digest"])
                if model_id:  # else its own stage has not been projected yet, or it came from outside
                    models.append(LoggedModelInput(model_id))
                    sent.append(name)
                continue
            manifest = given.get("manifest") or {}
            profile = (
                json.dumps({"num_rows": manifest["rows"], "splits": manifest.get("splits", {})})
                if "rows" in manifest
                else None
            )
            source = "local" if "://" not in given["path"] else "http"
            datasets.append(
                DatasetInput(
                    Dataset(
                        name=_dataset_name(given)[:500],
                        digest=given["digest"][:36],
                        source_type=source,
                        source=json.dumps({"uri": given["path"]}),
                        schema=_schema_of(given["path"]),
                        profile=profile,
                    ),
                    tags,
                )
            )
            sent.append(name)
        if datasets or models:
            self.client().log_inputs(run_id, datasets=datasets or None, models=models or None)

    def _metrics(self, run_id: str, d: Doc, cursor: dict[str, Any]) -> None:
        """Send the lines that MLflow has not seen. The file is deterministic, so line i is line i whatever was killed;
        a batch that was announced but maybe not sent is sent again with the same time stamp, which MLflow takes as the
        same points."""
        from mlflow.entities import Metric

        path = _curve_files(d)[0]
        for lines in _batches(path, cursor.get("lines", 0), cursor.get("sending")):
            start = cursor.get("lines", 0)
            sending = cursor.get("sending")
            if not sending:
                sending = cursor["sending"] = {"upto": start + len(lines), "time": _ms(time.time())}
                self._keep(d["unit"], cursor)
            metrics = [
                Metric(_safe(_curve_name(k)), v, sending["time"], int(line["step"]))
                for line in lines
                for k, v in _numbers(line["metrics"]).items()
            ]
            for at in range(0, len(metrics), BATCH):
                self.client().log_batch(run_id, metrics=metrics[at : at + BATCH])
            cursor["lines"] = start + len(lines)
            cursor.pop("sending")
            self._keep(d["unit"], cursor)

    def _lacking(self, run_id: str, d: Doc, cursor: dict[str, Any]) -> None:
        """Send the points of curves of which MLflow has nobody knows how many: it is asked for each curve."""
        from mlflow.entities import Metric

        lines = _read_lines(_curve_files(d)[0])[1]
        rows = list(dict.fromkeys(rows_of(d, lines)))
        there = {key: {one.step for one in self.client().get_metric_history(run_id, key)} for key, _, _ in rows}
        now, new, last = _ms(time.time()), [], {}
        for key, value, step in rows:
            if step not in there[key]:
                new.append(Metric(key, value, now, step))
                there[key].add(step)
            last[key] = max(step, last.get(key, -1))
        for at in range(0, len(new), BATCH):
            self.client().log_batch(run_id, metrics=new[at : at + BATCH])
        cursor |= {"lines": lines, "perf": {key: step for key, step in last.items() if key.startswith("perf/")}}
        del cursor["compare"]
        self._keep(d["unit"], cursor)

    def _perf(self, run_id: str, d: Doc, cursor: dict[str, Any]) -> None:
        """Wall-clock points: repeated steps of a resumed run were measured already and are left out."""
        from mlflow.entities import Metric

        path = _curve_files(d)[1]
        last: dict[str, int] = cursor.setdefault("perf", {})
        lines, _ = _read_lines(path)
        sending = cursor.get("sending_perf")
        fresh = [
            (_safe("perf/" + k), v, int(line["step"]))
            for line in lines
            for k, v in _numbers(line["metrics"]).items()
            if int(line["step"]) > last.get(_safe("perf/" + k), -1)
            and (not sending or int(line["step"]) <= sending["upto"].get(_safe("perf/" + k), -1))
        ]
        if not fresh:
            cursor.pop("sending_perf", None)
            return
        if not sending:
            upto = dict(last)
            for key, _, step in fresh:
                upto[key] = max(step, upto.get(key, -1))
            sending = cursor["sending_perf"] = {"upto": upto, "time": _ms(time.time())}
            self._keep(d["unit"], cursor)
        seen: set[tuple[str, int]] = set()
        points = [Metric(k, v, sending["time"], s) for k, v, s in fresh if (k, s) not in seen and not seen.add((k, s))]
        for at in range(0, len(points), BATCH):
            self.client().log_batch(run_id, metrics=points[at : at + BATCH])
        last.update(sending["upto"])
        cursor.pop("sending_perf")
        self._keep(d["unit"], cursor)

    def _final(
        self,
        run_id: str,
        cursor: dict[str, Any],
        values: dict[str, float],
        prefix: str,
        judged: dict[str, tuple[str, str, str]] | None = None,
    ) -> None:
        from mlflow.entities import Metric

        sent = cursor.setdefault("finals", {})
        stamp = cursor.setdefault("final_time", _ms(time.time()))
        metrics = []
        deleted = {model for model in {about[0] for about in (judged or {}).values()} if model}
        deleted = {model for model in deleted if self._known_model(model) is None}
        for key, value in values.items():
            name = _safe(prefix + key)
            if sent.get(name) in (True, repr(value)):  # a run that is continued with other code may say something else
                continue
            model, dataset, digest = (judged or {}).get(key, (judged or {}).get("", ("", "", "")))
            metrics.append(
                Metric(
                    name,
                    value,
                    _ms(time.time()) if name in sent else stamp,
                    0,
                    model_id=None if model in deleted else model or None,
                    dataset_name=dataset or None,
                    dataset_digest=digest[:36] or None,
                )
            )
        for at in range(0, len(metrics), BATCH):
            self.client().log_batch(run_id, metrics=metrics[at : at + BATCH])
            sent.update({m.key: repr(m.value) for m in metrics[at : at + BATCH]})

    def _models(self, run_id: str, cursor: dict[str, Any], d: Doc) -> dict[str, str]:
        """Logged models of the outputs (digest -> model id), output ``model`` first, made where missing; their files are hard-linked into a
        local artifact root and uploaded otherwise."""
        from mlflow.entities import LoggedModelOutput

        client, found = self.client(), {}
        experiment = cursor["experiment_id"]
        # the model first: the numbers are about it, and one that is also that of an epoch is called after it
        for name, output in sorted((d.get("outputs") or {}).items(), key=lambda item: item[0] != "model"):
            if output["kind"] != "model":
                continue
            digest = output["digest"]
            with unit_lock("model " + digest, wait=True):
                model_id = _models_state()["models"].get(digest)
                known = self._known_model(model_id) if model_id else None
                if known is not None and Path(output["path"]).is_dir():
                    # behind a server that it was removed from (`posttrain rm`)
                    if not self._put_files(known, output) and not client.list_logged_model_artifacts(model_id):
                        client.log_model_artifacts(model_id, output["path"])
                elif known is None and model_id:  # deleted there, to make room
                    model_id = None
                    cursor["models"] = [one for one in cursor.get("models", ()) if one != digest]
                if model_id is None:
                    model_id = self._logged_model(client, experiment, run_id, d, output)
                    state = _models_state()
                    state["models"][digest] = model_id
                    _save_models_state(state, self._check)
            found[digest] = model_id
            if digest not in cursor.setdefault("models", []):
                # a process may have ended between the call and the cursor, and MLflow refuses the same output twice
                there = client.get_run(run_id).outputs
                if model_id not in [one.model_id for one in (there.model_outputs if there else ())]:
                    client.log_outputs(run_id, models=[LoggedModelOutput(model_id, 0)])
                cursor["models"].append(digest)
        return found

    def _known_model(self, model_id: str) -> Any | None:
        """MLflow's logged model; None where it was deleted there."""
        from mlflow.exceptions import MlflowException

        try:
            return self.client().get_logged_model(model_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None

    def _logged_model(self, client: Any, experiment: str, run_id: str, d: Doc, output: dict[str, Any]) -> str:
        digest = output["digest"]
        known_models = client.search_logged_models(
            [experiment], filter_string=f"tags.`posttrain.digest` = '{digest}'", max_results=1
        )
        model = (
            known_models[0]
            if known_models
            else client.create_logged_model(
                experiment,
                name=_safe(output["name"]).replace("/", "-").replace(".", "-"),
                source_run_id=run_id,
                model_type=output.get("role") or None,
                tags={
                    "posttrain.digest": digest,
                    "posttrain.ref": output["ref"],
                    "posttrain.stage": d["stage"],
                    "posttrain.key": d["key"],
                    "posttrain.role": output.get("role") or "",
                },
                params={_safe(k): _text(v)[:250] for k, v in list(_flatten(d["config"]).items())[:90]},
            )
        )
        if str(model.status) not in ("READY", "LoggedModelStatus.READY"):
            if not self._put_files(model, output) and not removed("model", "", digest):
                client.log_model_artifacts(model.model_id, output["path"])
            client.finalize_logged_model(model.model_id, "READY")
        return model.model_id

    def _put_files(self, model: Any, output: dict[str, Any]) -> bool:
        """Link a model's files to where MLflow shows them from, unless they are there, or were removed (`posttrain rm`,
        which takes them away there too: a model that was made again has them again). False where that place is not on
        this machine.
        """
        target = local_path(model.artifact_location)
        if target is None or not _writable(target):
            return False
        if removed("model", "", output["digest"]) or target.exists() and any(target.iterdir()):
            return True
        if target.exists():
            target.rmdir()
        # a copy that was cut off must not count as one
        part = target.with_name(f".{target.name}.{time.time_ns()}.tmp")
        try:
            link_tree(Path(output["path"]), part)
            os.rename(part, target)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return True

    def _artifacts(self, run_id: str, cursor: dict[str, Any], d: Doc) -> None:
        client, sent = self.client(), cursor.setdefault("artifacts", [])
        tables = []
        for report in d.get("reports") or []:
            for kind in ("markdown", "table", "png"):
                path = Path(report[kind]) if report.get(kind) else None
                if path is None or not path.exists():
                    continue
                if kind == "table":
                    tables.append({"path": f"reports/{path.name}", "type": "table"})
                if str(path) in sent:
                    continue
                if kind == "table":
                    client.log_dict(run_id, _split_table(read_json(path, [])), f"reports/{path.name}")
                else:
                    client.log_artifact(run_id, str(path), "reports")
                sent.append(str(path))
        if tables:
            self._tags(run_id, cursor, {"mlflow.loggedArtifacts": json.dumps(tables)})
        for path in (Path(d["record_path"]) if d.get("record_path") else None, Path(d["workdir"]) / "stage.log"):
            if (
                path is not None
                and path.is_file()
                and 0 < path.stat().st_size < LOG_LIMIT
                and str(path) not in sent
                and not (d.get("cached") and path.name == "stage.log")
            ):
                if path.suffix == ".log":
                    client.log_text(run_id, path.read_text("utf-8", "replace"), "stage.log.txt")
                else:
                    client.log_dict(run_id, read_json(path, {}), "record.json")
                sent.append(str(path))

    def _end(self, run_id: str, cursor: dict[str, Any], status: str, ended: float) -> None:
        if cursor.get("status") != status:
            self.client().set_terminated(run_id, status=status, end_time=_ms(ended))
            cursor["status"] = status

    # -- registry ----------------------------------------------------------------------------------------------------

    def registry(self) -> str | None:
        """Bring MLflow's model registry up to the registry log; an error text or None."""
        entries = registry.log()
        with unit_lock("registry", wait=True):
            state = _models_state()
            if _told(entries, state) and not state["waiting"]:
                return None
            try:
                self.connect()
                state = _models_state()
                if not _told(entries[: state["log"]], state):  # a line was damaged, or brought back: others moved up
                    state |= {"log": 0, "waiting": []}
                self._registry(entries, state)
            except Exception as error:
                self.unreachable = True
                return _brief(error)
        return None

    def _registry(self, entries: list[dict[str, Any]], state: dict[str, Any]) -> None:
        """Entries about a model that this store has not got (its stage is yet to be projected, or was told to another
        store) wait, with all later ones of that name; other names go on. Of an alias the last entry counts, and those
        about a version whose own line is damaged say nothing.
        """
        from mlflow.exceptions import MlflowException

        client, waiting = self.client(), []
        held: set[str] = set()
        last = {(e["name"], e["alias"]): position for position, e in enumerate(entries) if e["event"] == "alias"}
        for position in [*state["waiting"], *range(state["log"], len(entries))]:
            entry = entries[position]
            name = entry["name"]
            model_id = (
                self._model_in_store(entry["digest"], state)
                if entry["event"] == "version" and name not in held
                else None
            )
            if name in held or (entry["event"] == "version" and model_id is None):
                held.add(name)
                waiting.append(position)
                continue
            if entry["event"] == "version":
                try:
                    client.get_registered_model(name)
                except MlflowException:
                    client.create_registered_model(
                        name,
                        tags={"posttrain": "true"},
                        description=(
                            f"`model:{name}`. The newest version is `candidate`; `champion` passed the promotion gate."
                        ),
                    )
                there = {
                    m.tags.get("posttrain.digest"): m.version for m in client.search_model_versions(f"name = '{name}'")
                }
                version = there.get(entry["digest"])
                if version is None:
                    tags = {
                        "posttrain.digest": entry["digest"],
                        "posttrain.version": str(entry["version"]),
                        "posttrain.stage": entry.get("stage", ""),
                        "posttrain.role": entry.get("role", ""),
                        "posttrain.key": entry.get("key", ""),
                        "posttrain.run": entry.get("run", ""),
                    }
                    model = client.get_logged_model(model_id)
                    version = client.create_model_version(
                        name,
                        source=f"models:/{model_id}",
                        run_id=model.source_run_id,
                        model_id=model_id,
                        tags=tags,
                        description=_version_note(entry),
                    ).version
                state["versions"][f"{name}/{entry['version']}"] = str(version)
            elif entry["event"] == "alias" and position == last[name, entry["alias"]]:
                if (version := state["versions"].get(f"{name}/{entry['version']}")) is not None:
                    client.set_registered_model_alias(name, entry["alias"], version)
                elif entry["version"] is None and any(known.startswith(f"{name}/") for known in state["versions"]):
                    client.delete_registered_model_alias(name, entry["alias"])
                for place, to in (("before", False), ("version", True)) if entry.get("how") else ():
                    if (version := state["versions"].get(f"{name}/{entry[place]}")) is not None:
                        word = f"posttrain.{entry['alias']}"
                        client.set_model_version_tag(name, version, word, registry.told(entry, to))
            elif (
                entry["event"] == "decision"
                and (version := state["versions"].get(f"{name}/{entry['version']}")) is not None
            ):
                client.set_model_version_tag(name, version, "posttrain.promoted", str(entry["promoted"]).lower())
                client.set_model_version_tag(
                    name, version, "posttrain.evidence", json.dumps(entry["evidence"], sort_keys=True)[:4900]
                )
            state["waiting"] = waiting + [p for p in state["waiting"] if p > position]
            state["log"] = max(state["log"], position + 1)
            state["told"] = _names_of(entries[: state["log"]])
            _save_models_state(state, self._check, waiting=True)
        state |= {"waiting": waiting, "log": len(entries), "told": _names_of(entries)}
        _save_models_state(state, self._check, waiting=True)

    def _model_in_store(self, digest: str, state: dict[str, Any]) -> str | None:
        """Id of the logged model of a digest, also when it was logged under another address of the same store."""
        if digest not in state["models"]:
            experiments = [experiment.experiment_id for experiment in self.client().search_experiments()]
            found = (
                self.client().search_logged_models(
                    experiments, filter_string=f"tags.`posttrain.digest` = '{digest}'", max_results=1
                )
                if experiments
                else []
            )
            if not found or str(found[0].status) not in ("READY", "LoggedModelStatus.READY"):
                return None
            state["models"][digest] = found[0].model_id
        return state["models"][digest]


def _here(d: Doc) -> Doc:
    """A stage's document with its paths in this state directory, which may have been moved or copied since."""
    was, now = Path(d["workdir"]).parent.parent, home.home()
    if was == now or Path(d["workdir"]).parent.name != "work":
        return d
    names = ("workdir", "metrics_file", "perf_file", "record_path", "reports", "inputs", "outputs")
    return d | rebased({name: d[name] for name in names if name in d}, str(was), str(now))


def _address() -> dict[str, Any]:
    """What a cursor says of where it holds."""
    return {"uri": tracking_uri(), "ours": is_ours(tracking_uri())}


def _models_state() -> dict[str, Any]:
    """What the present tracking server knows of models: digest -> logged model id, name/version -> MLflow version; how
    many entries of the registry log it was told, and which.
    """
    state = read_json(home.outbox_dir() / "models.json", {}).get(tracking_uri())
    return {"models": {}, "versions": {}, "log": 0, "told": _names_of([]), "waiting": [], **(state or {})}


def _names_of(entries: list[dict[str, Any]]) -> str:
    """Which entries of the registry log these are."""
    return sha256_text("\n".join(f"{entry['name']} {entry['event']} {entry.get('time')}" for entry in entries))[:16]


def _told(entries: list[dict[str, Any]], state: dict[str, Any]) -> bool:
    """Whether just these are what the store was told."""
    return state["log"] == len(entries) and state["told"] == _names_of(entries)


def _save_models_state(state: dict[str, Any], check: Callable[[], None], waiting: bool = False) -> None:
    """Add what is new, unless ``check`` raises; ``waiting``: and how far the registry log was told, which its lock is
    held for.
    """
    with unit_lock("models state", wait=True):
        check()
        whole, before = read_json(home.outbox_dir() / "models.json", {}), _models_state()
        whole[tracking_uri()] = {
            "models": {**before["models"], **state["models"]},
            "versions": {**before["versions"], **state["versions"]},
            **{name: (state if waiting else before)[name] for name in ("log", "told", "waiting")},
        }
        atomic_write_json(home.outbox_dir() / "models.json", whole)


def model_id_of(digest: str) -> str | None:
    """MLflow's logged-model id of a stored model."""
    return _models_state()["models"].get(digest)


def _judged(d: Doc, models: dict[str, str]) -> dict[str, tuple[str, str, str]]:
    """Which model (and dataset) each final metric is about: metric key -> (model id, dataset name, digest); "" is the
    default.

    A stage that makes a model reports on that model; an evaluating stage on its model inputs: a metric ``LABEL/...`` or
    ``LABEL.metric`` belongs to the input ``....LABEL``."""
    given = {n: i for n, i in d["inputs"].items() if i["kind"] == "model"}
    data = next((i for n, i in d["inputs"].items() if i["kind"] == "dataset"), None)
    about = (_dataset_name(data), data["digest"]) if data else ("", "")
    found: dict[str, tuple[str, str, str]] = {}
    if models:
        found[""] = (next(iter(models.values())), *about)
        return found
    labelled = {n.split(".", 1)[-1]: model_id_of(i["digest"]) for n, i in given.items()}
    for key in _numbers(d.get("summary") or {}):
        label = re.split(r"[/.]", key, maxsplit=1)[0]
        if labelled.get(label):
            found[key] = (labelled[label], *about)
    main = given.get(d.get("judges") or "model") or (next(iter(given.values())) if len(given) == 1 else None)
    if main and model_id_of(main["digest"]):
        found[""] = (model_id_of(main["digest"]) or "", *about)
    return found


def _dataset_name(given: dict[str, Any]) -> str:
    """What a dataset input is called: the name it is published under, which its ref says (its manifest keeps the first
    one, of the stage that made it).
    """
    kind, _, rest = given["ref"].partition(":")
    return (
        (rest.partition("@")[0] if kind == "dataset" else "")
        or (given.get("manifest") or {}).get("name")
        or Path(given["path"]).name
    )


def _note_in_record(document: Doc, cursor: dict[str, Any]) -> None:
    path = Path(document["record_path"]) if document.get("record_path") else None
    record = read_json(path, None) if path and not document.get("cached") else None
    if record and record.get("mlflow", {}).get("run_id") != cursor["run_id"]:
        atomic_write_json(
            path, {**record, "mlflow": {"run_id": cursor["run_id"], **link(cursor["run_id"], cursor["experiment_id"])}}
        )


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Complete, readable lines of a JSON-lines file (a line that is just being written is left for later)."""
    try:
        raw = path.read_bytes()
    except OSError:
        return [], 0
    lines = []
    for line in raw[: raw.rfind(b"\n") + 1].splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            lines.append({"step": 0, "metrics": {}})
    return lines, len(lines)


def _curve_files(d: Doc) -> tuple[Path, Path]:
    """Where a stage's curves are: those of what it computes, and of the clock."""
    folder = Path(d["workdir"])
    return Path(d.get("metrics_file") or folder / "metrics.jsonl"), Path(d.get("perf_file") or folder / "perf.jsonl")


def rows_of(d: Doc, lines: int) -> Iterator[tuple[str, float, int]]:
    """(name in MLflow, value, step) of a stage's curves: the first ``lines`` of what it computed, all of the clock."""
    metrics, perf = _curve_files(_here(d))
    for path, named, most in ((metrics, _curve_name, lines), (perf, "perf/{}".format, None)):
        for line in _read_lines(path)[0][:most]:
            for name, value in _numbers(line["metrics"]).items():
                yield _safe(named(name)), value, int(line["step"])


def _batches(path: Path, start: int, sending: dict[str, Any] | None, size: int = 300) -> Iterator[list[dict[str, Any]]]:
    lines, count = _read_lines(path)
    at = start
    if sending and at < sending["upto"] <= count:
        yield lines[at : sending["upto"]]
        at = sending["upto"]
    elif sending:
        return  # the announced lines were undone with their checkpoint; they come again, the same
    while at < count:
        yield lines[at : at + size]
        at += size


def _numbers(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Flat ``a/b`` -> float of everything numeric in a nested mapping."""
    found: dict[str, float] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found.update(_numbers(value, name + "/"))
        elif isinstance(value, (bool, int, float)):
            found[name] = float(value)
        elif value in ("nan", "inf", "-inf"):
            found[name] = float(value)
    return found


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found.update(_flatten(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def _safe(key: str) -> str:
    """A key that MLflow takes: letters, digits, ``_ - . : / `` and spaces, at most 250 characters."""
    return re.sub(r"[^\w\-. :/]", "_", str(key), flags=re.ASCII).strip("/")[:250] or "_"


def _curve_name(key: str) -> str:
    """``train/loss`` of a curve ``loss``: without a group the UI would draw it among the numbers of the end."""
    return key if "/" in key else "train/" + key


def _final_name(key: str) -> str:
    """``final:validation:nll`` of the summary's ``validation/nll``."""
    return "final:" + key.replace("/", ":")


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def _brief(error: Exception) -> str:
    if told := refusal(error):
        return told.partition(";")[0]
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300] if text else ''}"


def _origin(user: str | None, recipe: str) -> dict[str, str]:
    """The tags of a run from which MLflow's UI has its columns "Created by" and "Source"."""
    command = f"stage {recipe[6:]}" if recipe.startswith("stage:") else f"run {recipe}"
    source = {"mlflow.source.name": f"posttrain {command}", "mlflow.source.type": "LOCAL"}
    return source | ({"mlflow.user": user} if user else {})


def _last_sign(d: Doc) -> float:
    """When a process that died was last seen doing something."""
    paths = [Path(d["workdir"]) / name for name in ("metrics.jsonl", "stage.log", "perf.jsonl")]
    return max((p.stat().st_mtime for p in paths if p.exists()), default=d["started"])


def _writable(path: Path) -> bool:
    """A local artifact root is written in place; one that belongs to another machine cannot be made here."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(path.parent, os.W_OK)


_COLUMN_TYPES = {
    "string": "string",
    "double": "double",
    "float": "float",
    "bool": "boolean",
    "int8": "integer",
    "int32": "integer",
    "int64": "long",
}


def _schema_of(path: str) -> str | None:
    """Columns of a dataset as MLflow shows them (nested ones by name only, as strings)."""
    manifest = read_json(Path(path) / "manifest.json", None) if "://" not in path else None
    if not manifest or not isinstance(manifest.get("schema"), list):
        return None
    columns = [
        {
            "name": c["name"],
            "type": _COLUMN_TYPES.get(c["type"], "datetime" if c["type"].startswith("timestamp") else "string"),
            "required": not c.get("nullable", True),
        }
        for c in manifest["schema"]
    ]
    return json.dumps({"mlflow_colspec": columns})


def _split_table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows as the column/data form that the UI draws as a table."""
    columns = list(dict.fromkeys(k for row in rows for k in row))
    return {"columns": columns, "data": [[row.get(c) for c in columns] for row in rows]}


def _title(d: Doc) -> str:
    """The MLflow run of a stage that ran by itself, apart from others of its kind: `sft · tiny-llama · 199a895c`, which
    `posttrain show` knows.
    """
    given = [
        str(one.get("given") or one["ref"]) for name in ("model", "data", "prompts") if (one := d["inputs"].get(name))
    ]
    name = [given[0].rstrip("/").rpartition("/")[2].partition("@")[0][:40]] if given else []
    return " · ".join([d["label"], *name, d["key"][:8]])


def _short(ref: str) -> str:
    """A ref with as much of its digest as every command takes."""
    return re.sub("(@[0-9a-f]{12})[0-9a-f]+$", r"\1", ref)


def _version_note(entry: dict[str, Any]) -> str:
    """Markdown on a registered version: what it was made of, and its numbers when it was made."""
    record = records.read(entry.get("key") or "") or {}
    numbers = {
        k: v for k, v in _numbers(record.get("metrics") or {}).items() if not k.startswith(("dropped/", "dropped."))
    }
    return "\n".join(
        [
            f"`model:{entry['name']}/{entry['version']}`"
            + (f", made by stage **{entry['stage']}**" if entry.get("stage") else "")
            + (f" in run `{entry['run'][:8]}`" if entry.get("run") else ""),
            *([""] + [f"- {n}: `{i['ref']}`" for n, i in record["inputs"].items()] if record.get("inputs") else []),
            *([""] + [f"- {k} {v:.4g}" for k, v in sorted(numbers.items())[:30]] if numbers else []),
            "",
            f"`posttrain show model:{entry['name']}/{entry['version']}` says all of it.",
        ]
    )


def _experiment_note(recipe: str) -> str:
    """What the runs of an experiment are, for the list of experiments."""
    if recipe == "stages":
        return "Stages that were run by themselves: `posttrain stage NAME`."
    what = f"stage `{recipe[6:]}` from its deployment" if recipe.startswith("stage:") else f"recipe `{recipe}`"
    return f"Runs of {what}; the + before a run shows its stages, which have the curves, datasets, models and reports."


def _stage_note(d: Doc, prefect: dict[str, Any]) -> str:
    inputs = [f"- {n}: `{i['ref']}` (digest `{i['digest'][:12]}`)" for n, i in d["inputs"].items()]
    outputs = [f"- {n}: `{o['ref']}`" for n, o in (d.get("outputs") or {}).items()]
    warnings = [f"- **{w['code']}** {w['text']}" for w in d.get("warnings") or []]
    return "\n".join(
        [
            *([f"**Error:** {d['error']}", ""] if d.get("error") else []),  # the UI shows the first lines only
            f"Stage **{d['stage']}** as `{d['label']}`, key `{d['key'][:16]}`"
            + (", result of an earlier identical run" if d.get("cached") else ""),
            *([f"[Prefect task run]({prefect['task_url']})"] if prefect.get("task_url") else []),
            *([f"[Prefect flow run]({prefect['url']})"] if prefect.get("url") else []),
            *(["", "Inputs", *inputs] if inputs else []),
            *(["", "Outputs", *outputs] if outputs else []),
            *(["", "Warnings", *warnings] if warnings else []),
        ]
    )
