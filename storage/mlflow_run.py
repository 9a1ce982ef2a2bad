"""One run in MLflow: its parameters, tags, inputs, curves, numbers of the end and artifacts, each sent where it is
missing.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Callable

from storage.files import read_json, sha256_text
from storage.mlflow_client import Connection
from storage.mlflow_curves import batches, curve_files, read_lines, rows_of
from storage.mlflow_models import models_state
from storage.mlflow_text import (
    curve_name,
    dataset_name,
    milliseconds,
    numbers_of,
    safe_key,
    schema_of,
    split_table,
    text_of,
)
from storage.outbox import Doc

BATCH = 900  # MLflow takes at most 1000 metrics in one call

LOG_LIMIT = 5 << 20  # bytes of a log or record that is sent along


class MlflowRun:
    """A run and the cursor that says how far it was told. Every method may be repeated: it sends what is missing.

    Args:
        unit: the unit of the outbox that the run shows.
        cursor: read before and written down by whoever makes this; what must be known in time is written here.
    """

    def __init__(self, connection: Connection, unit: str, run_id: str, cursor: dict[str, Any]):
        self.connection, self.unit, self.run_id, self.cursor = connection, unit, run_id, cursor

    def _keep(self) -> None:
        self.connection.keep(self.unit, self.cursor)

    def params(self, values: dict[str, Any]) -> None:
        from mlflow.entities import Param

        sent = set(self.cursor.setdefault("params", []))
        new = [Param(safe_key(k), text_of(v)[:6000]) for k, v in values.items() if safe_key(k) not in sent]
        for start in range(0, len(new), 100):
            self.connection.client().log_batch(self.run_id, params=new[start : start + 100])
            self.cursor["params"] += [p.key for p in new[start : start + 100]]

    def tags(self, values: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        client, sent = self.connection.client(), self.cursor.setdefault("tags", {})
        new = {safe_key(k): v[:7900] for k, v in values.items() if v and sent.get(safe_key(k)) != sha256_text(v)[:16]}
        items = list(new.items())
        for start in range(0, len(items), 90):
            client.log_batch(self.run_id, tags=[RunTag(k, v) for k, v in items[start : start + 90]])
        for key, value in values.items():
            if value:
                sent[safe_key(key)] = sha256_text(value)[:16]
            elif safe_key(key) in sent:  # of an attempt before this one
                if safe_key(key) in client.get_run(self.run_id).data.tags:  # nobody took it away by hand
                    client.delete_tag(self.run_id, safe_key(key))
                del sent[safe_key(key)]

    def inputs(self, d: Doc) -> None:
        sent = self.cursor.setdefault("inputs", [])
        todo = {n: i for n, i in d["inputs"].items() if n not in sent}
        if not todo:
            return
        from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelInput

        datasets, models = [], []
        state = models_state()
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
                        name=dataset_name(given)[:500],
                        digest=given["digest"][:36],
                        source_type=source,
                        source=json.dumps({"uri": given["path"]}),
                        schema=schema_of(given["path"]),
                        profile=profile,
                    ),
                    tags,
                )
            )
            sent.append(name)
        if datasets or models:
            self.connection.client().log_inputs(self.run_id, datasets=datasets or None, models=models or None)

    def metrics(self, d: Doc) -> None:
        """Send the lines that MLflow has not seen. The file is deterministic, so line i is line i whatever was killed;
        a batch that was announced but maybe not sent is sent again with the same time stamp, which MLflow takes as the
        same points."""
        from mlflow.entities import Metric

        cursor = self.cursor
        for lines in batches(curve_files(d)[0], cursor.get("lines", 0), cursor.get("sending")):
            start = cursor.get("lines", 0)
            sending = cursor.get("sending")
            if not sending:
                sending = cursor["sending"] = {"upto": start + len(lines), "time": milliseconds(time.time())}
                self._keep()
            self._log(
                [
                    Metric(safe_key(curve_name(k)), v, sending["time"], int(line["step"]))
                    for line in lines
                    for k, v in numbers_of(line["metrics"]).items()
                ]
            )
            cursor["lines"] = start + len(lines)
            cursor.pop("sending")
            self._keep()

    def lacking(self, d: Doc) -> None:
        """Send the points of curves of which MLflow has nobody knows how many: it is asked for each curve."""
        from mlflow.entities import Metric

        lines = read_lines(curve_files(d)[0])[1]
        rows = list(dict.fromkeys(rows_of(d, lines)))
        history = self.connection.client().get_metric_history
        there = {key: {one.step for one in history(self.run_id, key)} for key, _, _ in rows}
        now, new, last = milliseconds(time.time()), [], {}
        for key, value, step in rows:
            if step not in there[key]:
                new.append(Metric(key, value, now, step))
                there[key].add(step)
            last[key] = max(step, last.get(key, -1))
        self._log(new)
        self.cursor |= {"lines": lines, "perf": {key: step for key, step in last.items() if key.startswith("perf/")}}
        del self.cursor["compare"]
        self._keep()

    def perf(self, d: Doc) -> None:
        """Wall-clock points: repeated steps of a resumed run were measured already and are left out."""
        from mlflow.entities import Metric

        cursor = self.cursor
        last: dict[str, int] = cursor.setdefault("perf", {})
        lines, _ = read_lines(curve_files(d)[1])
        sending = cursor.get("sending_perf")
        fresh = [
            (safe_key("perf/" + k), v, int(line["step"]))
            for line in lines
            for k, v in numbers_of(line["metrics"]).items()
            if int(line["step"]) > last.get(safe_key("perf/" + k), -1)
            and (not sending or int(line["step"]) <= sending["upto"].get(safe_key("perf/" + k), -1))
        ]
        if not fresh:
            cursor.pop("sending_perf", None)
            return
        if not sending:
            upto = dict(last)
            for key, _, step in fresh:
                upto[key] = max(step, upto.get(key, -1))
            sending = cursor["sending_perf"] = {"upto": upto, "time": milliseconds(time.time())}
            self._keep()
        seen: set[tuple[str, int]] = set()
        self._log(
            [Metric(k, v, sending["time"], s) for k, v, s in fresh if (k, s) not in seen and not seen.add((k, s))]
        )
        last.update(sending["upto"])
        cursor.pop("sending_perf")
        self._keep()

    def finals(self, values: dict[str, float], judged: dict[str, tuple[str, str, str]] | None = None) -> None:
        """Numbers of the end. judged: which model and dataset each is about (:func:`storage.mlflow_models.judged`)."""
        from mlflow.entities import Metric

        sent = self.cursor.setdefault("finals", {})
        stamp = self.cursor.setdefault("final_time", milliseconds(time.time()))
        metrics = []
        deleted = {model for model in {about[0] for about in (judged or {}).values()} if model}
        deleted = {model for model in deleted if self.connection.logged_model(model) is None}
        for key, value in values.items():
            name = safe_key(key)
            if sent.get(name) in (True, repr(value)):  # a run that is continued with other code may say something else
                continue
            model, dataset, digest = (judged or {}).get(key, (judged or {}).get("", ("", "", "")))
            metrics.append(
                Metric(
                    name,
                    value,
                    milliseconds(time.time()) if name in sent else stamp,
                    0,
                    model_id=None if model in deleted else model or None,
                    dataset_name=dataset or None,
                    dataset_digest=digest[:36] or None,
                )
            )
        self._log(metrics, lambda batch: sent.update({m.key: repr(m.value) for m in batch}))

    def _log(self, metrics: list[Any], sent: Callable[[list[Any]], None] | None = None) -> None:
        """Send as many at a time as MLflow takes; ``sent`` is told of those that it has."""
        for at in range(0, len(metrics), BATCH):
            batch = metrics[at : at + BATCH]
            self.connection.client().log_batch(self.run_id, metrics=batch)
            if sent is not None:
                sent(batch)

    def artifacts(self, d: Doc) -> None:
        client, sent = self.connection.client(), self.cursor.setdefault("artifacts", [])
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
                    client.log_dict(self.run_id, split_table(read_json(path, [])), f"reports/{path.name}")
                else:
                    client.log_artifact(self.run_id, str(path), "reports")
                sent.append(str(path))
        if tables:
            self.tags({"mlflow.loggedArtifacts": json.dumps(tables)})
        for path in (Path(d["record_path"]) if d.get("record_path") else None, Path(d["workdir"]) / "stage.log"):
            if (
                path is not None
                and path.is_file()
                and 0 < path.stat().st_size < LOG_LIMIT
                and str(path) not in sent
                and not (d.get("cached") and path.name == "stage.log")
            ):
                if path.suffix == ".log":
                    client.log_text(self.run_id, path.read_text("utf-8", "replace"), "stage.log.txt")
                else:
                    client.log_dict(self.run_id, read_json(path, {}), "record.json")
                sent.append(str(path))

    def end(self, status: str, ended: float) -> None:
        if self.cursor.get("status") != status:
            self.connection.client().set_terminated(self.run_id, status=status, end_time=milliseconds(ended))
            self.cursor["status"] = status
