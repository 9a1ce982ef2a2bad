"""What MLflow's database lacks of what it was told: one that was brought back from a backup knows nothing of what came
after, while the cursors say that it does.
"""

from __future__ import annotations

import os
from typing import Any

from storage import home, registry
from storage.files import atomic_write_json, read_json, sha256_text
from storage.mlflow_client import Connection
from storage.mlflow_curves import rows_of
from storage.outbox import cursors, document_lock, done_files_of, files_of, is_ours, tracking_uri, unit_lock

PAGE = 1000
OURS = "name LIKE 'posttrain/%'"  # of a server that others use, too


def tell_again(connection: Connection) -> int:
    """Have what the present store was told and has not got sent by the next pass over each unit: how many units.

    Of a run that is there in part its curves are compared point by point. Runs that somebody deleted in MLflow stay
    deleted, also after ``mlflow gc``, which removes their artifacts with them.
    """
    if not any(_here(read_json(path, {})) for path in cursors()):
        return 0
    connection.connect()
    client = connection.client()
    runs = _runs(client)
    lacking, removed = [], []
    for path in cursors():
        unit, cursor = path.name.removesuffix(".cursor.json"), read_json(path, {})
        if _here(cursor) and _behind(unit, cursor, runs.get(cursor["run_id"])):
            (removed if _removed(cursor, runs) else lacking).append(unit)
    for unit in [one for one in lacking if one.endswith(".flow")]:  # it has no artifacts: as its stages
        stages = unit.removesuffix("flow")
        if any(one.startswith(stages) for one in removed) and not any(
            one.startswith(stages) for one in lacking if one != unit
        ):
            lacking.remove(unit)
    again = [unit for unit in lacking if _rewind(client, unit)]
    if again or _names_lacking(client):
        _rewind_models(client)
    return len(again)


def _here(cursor: dict[str, Any]) -> bool:
    """Whether a cursor is about the store that is spoken to."""
    uri = cursor.get("uri")
    return bool(cursor.get("run_id")) and (
        uri == tracking_uri() or bool(cursor.get("ours")) and is_ours(tracking_uri())
    )


def _runs(client: Any) -> dict[str, Any]:
    """Every run of ours in the store by its id, deleted ones too."""
    from mlflow.entities import ViewType

    found: dict[str, Any] = {}
    for experiment in client.search_experiments(view_type=ViewType.ALL, filter_string=OURS):
        token = None
        while True:
            page = client.search_runs(
                [experiment.experiment_id], run_view_type=ViewType.ALL, max_results=PAGE, page_token=token
            )
            found.update({run.info.run_id: run for run in page})
            if not (token := page.token):
                break
    return found


def _document(unit: str) -> dict[str, Any]:
    return read_json(files_of(unit)[0], None) or read_json(done_files_of(unit)[0], None) or {}


def _behind(unit: str, cursor: dict[str, Any], run: Any) -> bool:
    """Whether a run lacks something that its cursor says it was told. What ends a run is told last."""
    if run is None:
        return True
    if run.info.lifecycle_stage == "deleted":
        return False
    if cursor.get("status", "RUNNING") != run.info.status:
        return True
    if not set(cursor.get("params", ())) <= run.data.params.keys():
        return True
    if not set(cursor.get("finals", ())) <= run.data.metrics.keys():
        return True
    if run.info.status == "FINISHED" or not cursor.get("lines"):
        return False
    # it goes on, or stopped, perhaps for the second time: what it said last
    document = _document(unit)
    told = [row for row in rows_of(document, cursor["lines"]) if not row[0].startswith("perf/")] if document else []
    last = max((step for _, _, step in told), default=None)
    known = {metric.key: metric.step for metric in run.data._metric_objs}
    earlier = lambda key: known.get(key.removeprefix("train/"), -1)  # earlier versions gave it no group
    return any(step == last and max(known.get(key, -1), earlier(key)) < step for key, _, step in told)


def _removed(cursor: dict[str, Any], runs: dict[str, Any]) -> bool:
    """Whether a run is gone because somebody removed it for good: the files that were sent with it are gone, too."""
    return (
        cursor["run_id"] not in runs
        and bool(cursor.get("ours") and cursor.get("artifacts"))
        and not any(home.subdir("mlartifacts").glob(f"*/{cursor['run_id']}/artifacts"))
    )


def _rewind(client: Any, unit: str) -> bool:
    """Make the cursor of a unit say what the store has; False where a process tells it something now."""
    from mlflow.exceptions import MlflowException

    (path, mine), (done, done_cursor) = files_of(unit), done_files_of(unit)
    with unit_lock(unit, wait=False) as free:
        if not free:
            return False
        with document_lock(unit):
            cursor = read_json(mine, None) or read_json(done_cursor, {})
            if not _here(cursor) or not (path.exists() or done.exists()):
                return False
            try:
                run = client.get_run(cursor["run_id"])
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                run = None
            if not _behind(unit, cursor, run):
                return False
            if run is None:
                mine.unlink(missing_ok=True)
            else:
                atomic_write_json(mine, _as_it_is(cursor, run))
            if not path.exists():
                os.replace(done, path)
            done_cursor.unlink(missing_ok=True)
    return True


def _as_it_is(cursor: dict[str, Any], run: Any) -> dict[str, Any]:
    kept = {name: cursor[name] for name in ("uri", "ours", "run_id", "artifacts", "final_time") if name in cursor}
    return kept | {
        "experiment_id": run.info.experiment_id,
        "status": run.info.status,
        "params": list(run.data.params),
        "tags": {key: sha256_text(value)[:16] for key, value in run.data.tags.items()},
        "finals": {key: told for key, told in cursor.get("finals", {}).items() if key in run.data.metrics},
        "compare": True,
    }


def _names_lacking(client: Any) -> bool:
    """Whether MLflow's registry lacks a version or an alias of ours, apart from those that wait for their model."""
    state = read_json(home.outbox_dir() / "models.json", {}).get(tracking_uri())
    if state is None:
        return False
    entries = registry.log()
    waiting = {entries[at]["name"] for at in state.get("waiting", ()) if at < len(entries)}
    untold = {entry["name"] for entry in entries[state["log"] :]}
    there = {one.name: one for one in client.search_registered_models(max_results=PAGE)}
    for name, ours in registry.models().items():
        if name in waiting | untold:
            continue
        versions = client.search_model_versions(f"name = '{name}'") if name in there else []
        digests = {str(one.version): one.tags.get("posttrain.digest") for one in versions}
        aliases = {alias: digests.get(str(at)) for alias, at in there[name].aliases.items()} if name in there else {}
        known = {version: entry["digest"] for version, entry in ours.versions.items()}
        if not set(known.values()) <= set(digests.values()):
            return True
        if any(aliases.get(alias) != known.get(version) for alias, version in ours.aliases.items()):
            return True
    return False


def _rewind_models(client: Any) -> None:
    """Have the registry told from its beginning, and know the models that the store has."""
    ids = [experiment.experiment_id for experiment in client.search_experiments(filter_string=OURS)]
    models: dict[str, str] = {}
    token = None
    while ids:
        page = client.search_logged_models(ids, max_results=50, page_token=token)
        for one in page:
            if one.tags.get("posttrain.digest") and str(one.status) in ("READY", "LoggedModelStatus.READY"):
                models[one.tags["posttrain.digest"]] = one.model_id
        if not (token := page.token):
            break
    path = home.outbox_dir() / "models.json"
    with unit_lock("registry", wait=True), unit_lock("models state", wait=True):
        known = read_json(path, {})
        present = is_ours(tracking_uri())
        atomic_write_json(
            path,
            {uri: state for uri, state in known.items() if not (uri == tracking_uri() or present and is_ours(uri))}
            | {tracking_uri(): {"models": models}},
        )
