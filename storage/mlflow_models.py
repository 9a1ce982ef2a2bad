"""Models in MLflow: those that stages made as logged models, the registry with its versions and aliases, and which model
a number is about.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from storage import home, registry
from storage.files import atomic_write_json, link_tree, read_json, sha256_text
from storage.mlflow_client import Connection
from storage.mlflow_database import local_path
from storage.mlflow_text import dataset_name, flatten, numbers_of, safe_key, text_of, version_note
from storage.outbox import Doc, tracking_uri, unit_lock
from storage.store import removed

if TYPE_CHECKING:
    from storage.mlflow_run import MlflowRun


def models_state() -> dict[str, Any]:
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
        whole, before = read_json(home.outbox_dir() / "models.json", {}), models_state()
        whole[tracking_uri()] = {
            "models": {**before["models"], **state["models"]},
            "versions": {**before["versions"], **state["versions"]},
            **{name: (state if waiting else before)[name] for name in ("log", "told", "waiting")},
        }
        atomic_write_json(home.outbox_dir() / "models.json", whole)


def model_id_of(digest: str) -> str | None:
    """MLflow's logged-model id of a stored model."""
    return models_state()["models"].get(digest)


def judged(d: Doc, models: dict[str, str]) -> dict[str, tuple[str, str, str]]:
    """Which model (and dataset) each final metric is about: metric key -> (model id, dataset name, digest); "" is the
    default.

    A stage that makes a model reports on that model; an evaluating stage on its model inputs: a metric ``LABEL/...`` or
    ``LABEL.metric`` belongs to the input ``....LABEL``."""
    given = {n: i for n, i in d["inputs"].items() if i["kind"] == "model"}
    data = next((i for n, i in d["inputs"].items() if i["kind"] == "dataset"), None)
    about = (dataset_name(data), data["digest"]) if data else ("", "")
    found: dict[str, tuple[str, str, str]] = {}
    if models:
        found[""] = (next(iter(models.values())), *about)
        return found
    labelled = {n.split(".", 1)[-1]: model_id_of(i["digest"]) for n, i in given.items()}
    for key in numbers_of(d.get("summary") or {}):
        label = re.split(r"[/.]", key, maxsplit=1)[0]
        if labelled.get(label):
            found[key] = (labelled[label], *about)
    main = given.get(d.get("judges") or "model")
    if main is None and not d.get("judges"):  # of an evaluation without a model, the other models only score
        main = next(iter(given.values())) if len(given) == 1 else None
    if main and model_id_of(main["digest"]):
        found[""] = (model_id_of(main["digest"]) or "", *about)
    return found


def log_models(connection: Connection, run: MlflowRun, d: Doc) -> dict[str, str]:
    """Logged models of a stage's outputs (digest -> model id), output ``model`` first, made where missing; their files are
    hard-linked into a local artifact root and uploaded otherwise.
    """
    from mlflow.entities import LoggedModelOutput

    client, cursor, found = connection.client(), run.cursor, {}
    # the model first: the numbers are about it, and one that is also that of an epoch is called after it
    for name, output in sorted((d.get("outputs") or {}).items(), key=lambda item: item[0] != "model"):
        if output["kind"] != "model":
            continue
        digest = output["digest"]
        with unit_lock("model " + digest, wait=True):
            model_id = models_state()["models"].get(digest)
            known = connection.logged_model(model_id) if model_id else None
            if known is not None and Path(output["path"]).is_dir():
                # behind a server that it was removed from (`posttrain rm`)
                if not _put_files(known, output) and not client.list_logged_model_artifacts(model_id):
                    client.log_model_artifacts(model_id, output["path"])
            elif known is None and model_id:  # deleted there, to make room
                model_id = None
                cursor["models"] = [one for one in cursor.get("models", ()) if one != digest]
            if model_id is None:
                model_id = _logged_model(client, run, d, output)
                state = models_state()
                state["models"][digest] = model_id
                _save_models_state(state, connection.check)
        found[digest] = model_id
        if digest not in cursor.setdefault("models", []):
            # a process may have ended between the call and the cursor, and MLflow refuses the same output twice
            there = client.get_run(run.run_id).outputs
            if model_id not in [one.model_id for one in (there.model_outputs if there else ())]:
                client.log_outputs(run.run_id, models=[LoggedModelOutput(model_id, 0)])
            cursor["models"].append(digest)
    return found


def _logged_model(client: Any, run: MlflowRun, d: Doc, output: dict[str, Any]) -> str:
    """Id of the logged model of an output, made or completed."""
    digest, experiment = output["digest"], run.cursor["experiment_id"]
    known_models = client.search_logged_models(
        [experiment], filter_string=f"tags.`posttrain.digest` = '{digest}'", max_results=1
    )
    model = (
        known_models[0]
        if known_models
        else client.create_logged_model(
            experiment,
            name=safe_key(output["name"]).replace("/", "-").replace(".", "-"),
            source_run_id=run.run_id,
            model_type=output.get("role") or None,
            tags={
                "posttrain.digest": digest,
                "posttrain.ref": output["ref"],
                "posttrain.stage": d["stage"],
                "posttrain.key": d["key"],
                "posttrain.role": output.get("role") or "",
            },
            params={safe_key(k): text_of(v)[:250] for k, v in list(flatten(d["config"]).items())[:90]},
        )
    )
    if str(model.status) not in ("READY", "LoggedModelStatus.READY"):
        if not _put_files(model, output) and not removed("model", "", digest):
            client.log_model_artifacts(model.model_id, output["path"])
        client.finalize_logged_model(model.model_id, "READY")
    return model.model_id


def _put_files(model: Any, output: dict[str, Any]) -> bool:
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


def _writable(path: Path) -> bool:
    """A local artifact root is written in place; one that belongs to another machine cannot be made here."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(path.parent, os.W_OK)


def registry_is_told(entries: list[dict[str, Any]]) -> bool:
    """Whether MLflow's registry has heard of all entries of the registry log; its lock is held."""
    state = models_state()
    return _told(entries, state) and not state["waiting"]


def tell_registry(connection: Connection, entries: list[dict[str, Any]]) -> None:
    """Bring MLflow's model registry up to the registry log, whose lock is held.

    Entries about a model that this store has not got (its stage is yet to be projected, or was told to another store)
    wait, with all later ones of that name; other names go on. Of an alias the last entry counts, and those about a
    version whose own line is damaged say nothing.
    """
    connection.connect()
    state = models_state()
    if not _told(entries[: state["log"]], state):  # a line was damaged, or brought back: others moved up
        state |= {"log": 0, "waiting": []}
    client, waiting = connection.client(), []
    held: set[str] = set()
    last = {(e["name"], e["alias"]): position for position, e in enumerate(entries) if e["event"] == "alias"}
    for position in [*state["waiting"], *range(state["log"], len(entries))]:
        entry = entries[position]
        name = entry["name"]
        model_id = (
            _model_in_store(client, entry["digest"], state)
            if entry["event"] == "version" and name not in held
            else None
        )
        if name in held or (entry["event"] == "version" and model_id is None):
            held.add(name)
            waiting.append(position)
            continue
        if entry["event"] == "version":
            state["versions"][f"{name}/{entry['version']}"] = str(_version(client, entry, model_id))
        elif entry["event"] == "alias" and position == last[name, entry["alias"]]:
            _move_alias(client, entry, state["versions"])
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
        _save_models_state(state, connection.check, waiting=True)
    state |= {"waiting": waiting, "log": len(entries), "told": _names_of(entries)}
    _save_models_state(state, connection.check, waiting=True)


def _move_alias(client, entry: dict[str, Any], versions: dict[str, str]) -> None:
    """Where an alias is now, and on the versions of a move by hand who made it and why, until the next move; nothing of
    an alias of before they were checked, which MLflow does not take.
    """
    name, alias = entry["name"], entry["alias"]
    if not registry.is_alias(alias):
        return
    before, now = (versions.get(f"{name}/{entry.get(place)}") for place in ("before", "version"))
    if now is not None:
        client.set_registered_model_alias(name, alias, now)
    elif entry["version"] is None and any(known.startswith(f"{name}/") for known in versions):
        client.delete_registered_model_alias(name, alias)
    for version, to in ((before, False), (now, True)):
        if version is None:
            continue
        if entry.get("how"):
            client.set_model_version_tag(name, version, f"posttrain.{alias}", registry.told(entry, to))
        else:
            client.delete_model_version_tag(name, version, f"posttrain.{alias}")


def _version(client: Any, entry: dict[str, Any], model_id: str) -> Any:
    """MLflow's version of a logged model under the name of a registry entry, made where missing."""
    from mlflow.exceptions import MlflowException

    name = entry["name"]
    try:
        client.get_registered_model(name)
    except MlflowException:
        client.create_registered_model(
            name,
            tags={"posttrain": "true"},
            description=(
                f"`model:{name}`. The newest version is `candidate`; `champion` passed the promotion gate, or a person"
                " gave it the alias: then its tag `posttrain.champion` says who, when and why."
            ),
        )
    there = {m.tags.get("posttrain.digest"): m.version for m in client.search_model_versions(f"name = '{name}'")}
    version = there.get(entry["digest"])
    if version is not None:
        return version
    return client.create_model_version(
        name,
        source=f"models:/{model_id}",
        run_id=client.get_logged_model(model_id).source_run_id,
        model_id=model_id,
        tags={
            "posttrain.digest": entry["digest"],
            "posttrain.version": str(entry["version"]),
            "posttrain.stage": entry.get("stage", ""),
            "posttrain.role": entry.get("role", ""),
            "posttrain.key": entry.get("key", ""),
            "posttrain.run": entry.get("run", ""),
        },
        description=version_note(entry),
    ).version


def _model_in_store(client: Any, digest: str, state: dict[str, Any]) -> str | None:
    """Id of the logged model of a digest, also when it was logged under another address of the same store."""
    if digest not in state["models"]:
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        found = (
            client.search_logged_models(
                experiments, filter_string=f"tags.`posttrain.digest` = '{digest}'", max_results=1
            )
            if experiments
            else []
        )
        if not found or str(found[0].status) not in ("READY", "LoggedModelStatus.READY"):
            return None
        state["models"][digest] = found[0].model_id
    return state["models"][digest]
