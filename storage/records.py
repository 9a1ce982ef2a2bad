"""Stage records and flow-run records: what was done, by what code, from what, giving what.

A stage record, ``HOME/records/<key>.json``, is written last and atomically: it exists exactly when all its outputs do.
It is the truth behind every cache hit; a record whose outputs are gone or changed is a miss.

A flow-run record, ``HOME/runs/<run id>.json``, lists the stages of one run of a recipe as they finish; ``rerun``,
``status``, ``ls`` and ``lineage`` read it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

from storage import home, leases, registry, store
from storage.files import atomic_write_json, read_json, rebased


def record_path(key: str) -> Path:
    """File of a stage record."""
    return home.records_dir() / f"{key}.json"


def write(record: dict[str, Any]) -> Path:
    """Publish a stage record (atomically; the last act of a stage)."""
    path = record_path(record["key"])
    atomic_write_json(path, record)
    return path


def read(key: str) -> dict[str, Any] | None:
    """A stage record, unverified, with its paths where this state directory has them; None when there is none."""
    return _here(read_json(record_path(key), None))


def _here(record: dict[str, Any] | None) -> dict[str, Any] | None:
    """The record with the paths of its outputs and of its working directory in this state directory, which may have
    been moved or copied since it was written: references lead there, and nowhere else."""
    if not record:
        return record
    for output in record["outputs"].values():
        output["path"] = (
            str(store.model_path(output["digest"]))
            if output["kind"] == "model"
            else store.dataset_path(output["name"], output["digest"])
        )
    was = record.get("workdir")
    now = was and str(home.home() / "work" / Path(was).name)
    if was != now and not Path(was).exists() or was != now and Path(now).is_dir():
        names = ("workdir", "metrics_file", "perf_file", "reports")
        record |= rebased({name: record[name] for name in names if name in record}, was, now)
    return record


def find(key: str) -> dict[str, Any] | None:
    """The verified record of a key, or None. Sizes and times are compared first, contents only when those differ."""
    record = read(key)
    if record is None or problems(record):
        return None
    return record


def problems(record: dict[str, Any], *, full: bool = False) -> list[str]:
    """What is wrong with a record's outputs (empty: nothing). ``full`` reads every byte."""
    return list(damaged(record, full=full).values())


def damaged(record: dict[str, Any], *, full: bool = False, removed: bool = True) -> dict[str, str]:
    """As :func:`problems`, by the digest of the output. removed: also of what was removed on purpose."""
    found, changed = {}, False
    for name, output in record["outputs"].items():
        path = output["path"]
        if not removed and store.removed(output["kind"], output["name"], output["digest"]):
            continue
        good, stat = store.check_output(output["kind"], path, output["digest"], output.get("stat"), full=full)
        if not good:
            found[output["digest"]] = (
                f"output {name} ({output['ref']}) is missing or was changed at {path}; `posttrain rerun"
                f" {output['ref']}` makes it again"
            )
        elif stat != output.get("stat"):
            output["stat"], changed = stat, True
    if changed and not found:
        _note_stats(record)
    return found


def _note_stats(record: dict[str, Any]) -> None:
    """Write down the signatures that a record's outputs have now, if it is still the record (checking takes long)."""
    there = read(record["key"])
    if there and there.get("finished") == record.get("finished"):
        for name, output in there["outputs"].items():
            output["stat"] = record["outputs"][name]["stat"]
        with contextlib.suppress(OSError):  # a full disk, somebody else's home: contents are read again next time
            write(there)


def all_records() -> Iterator[dict[str, Any]]:
    """Every stage record, oldest first."""
    found = [_here(read_json(p, None)) for p in home.records_dir().glob("*.json")]
    return iter(sorted((r for r in found if r), key=lambda r: r.get("finished", 0)))


def match(prefix: str) -> dict[str, Any] | None:
    """The one record whose key starts with ``prefix`` (None for none; StoreError when several do)."""
    paths = [p for p in home.records_dir().glob("*.json") if p.stem.startswith(prefix)]
    if len(paths) > 1:
        raise store.StoreError(
            f"stage key {prefix} is ambiguous; write more digits: {', '.join(p.stem[:16] for p in paths[:5])}"
        )
    return _here(read_json(paths[0], None)) if paths else None


def makers_of(digest: str) -> list[dict[str, Any]]:
    """Records with an output of this digest, newest first."""
    return [r for r in reversed(list(all_records())) if any(o["digest"] == digest for o in r["outputs"].values())]


def origin_of(digest: str) -> dict[str, Any] | None:
    """The newest record with an output of this digest that it was not given as an input, nor computed from the rollouts
    of the run that made it (rl's input ``recorded``): a stage that hands a model on (``select_checkpoint``) could not
    make it again. None where no record knows it.
    """
    makers = makers_of(digest)
    made = [
        one
        for one in makers
        if "recorded" not in one["inputs"] and all(given["digest"] != digest for given in one["inputs"].values())
    ]
    return next(iter([*made, *makers]), None)


def makers_of_lost(ref: str) -> list[dict[str, Any]]:
    """:func:`makers_of` what a reference names, also where its files are gone; empty where no record knows it."""
    try:
        return makers_of(digest_of(ref)) if store.is_ref(ref) else []
    except store.StoreError:
        return []


def there(output: Mapping[str, Any]) -> bool:
    """Whether the files of an output of a record are still in the store."""
    return (store.is_dataset_dir if output["kind"] == "dataset" else store.is_model_dir)(output["path"])


def digest_of(ref: str) -> str:
    """Digest of a model or dataset, also of one whose files are gone or damaged while a record names them. Raises
    StoreError.
    """
    try:
        return store.resolve(ref).digest
    except store.StoreError:
        named = {o["digest"] for record in all_records() for o in record["outputs"].values() if _is(ref, o)}
        if len(named) != 1:
            raise
        return named.pop()


def _is(ref: str, output: dict[str, Any]) -> bool:
    if output["kind"] == "dataset":
        match = store.DATASET_REF.fullmatch(ref)
        if match is None or match["name"] != output["name"]:
            return False
        chosen = match["selector"] or "latest"
        if chosen == "latest":  # as it is written down: the version itself may be what is gone
            chosen = (read_json(home.datasets_dir() / match["name"] / "latest.json", None) or {}).get("digest", "")
        return output["digest"].startswith(chosen)
    match = store.MODEL_REF.fullmatch(ref)
    if match is None or match["digest"]:
        return match is not None and output["digest"].startswith(match["digest"])
    try:
        return registry.digest_of(match["name"], match["alias"] or match["version"] or "latest")[0] == output["digest"]
    except registry.RegistryError:
        return False


def users_of(digest: str) -> list[dict[str, Any]]:
    """Records with an input of this digest."""
    return [r for r in all_records() if any(i["digest"] == digest for i in r["inputs"].values())]


def evaluations_of(digest: str) -> list[dict[str, Any]]:
    """Records of stage evaluate that judged a model, newest first."""
    return [
        r
        for r in reversed(users_of(digest))
        if r["stage"] == "evaluate" and r["inputs"].get("model", {}).get("digest") == digest
    ]


def step_name(record: dict[str, Any], run_id: str | None = None) -> str:
    """What the flow run ``run_id`` calls the stage of a record, else the run that made it. Where that has several names
    for it, as trials of a sweep that share it do (``beta-0.1.sft``, ``beta-0.2.sft``), it is what they end in alike
    (``sft``)."""
    for run in dict.fromkeys((run_id, record.get("flow_run"))):
        stages = (read_json(home.runs_dir() / f"{run}.json", None) or {"stages": []})["stages"] if run else []
        names = [entry["label"].split(".") for entry in stages if entry.get("key") == record["key"]]
        if len(names) == 1:
            return ".".join(names[0])
        if names:
            alike: list[str] = []
            for parts in zip(*(name[::-1] for name in names)):
                if len(set(parts)) > 1:
                    break
                alike.insert(0, parts[0])
            while alike and alike[0].isdigit():  # of a number: beta-0.1 and lr-1.1
                alike.pop(0)
            return ".".join(alike) or record["stage"]
    return record.get("label", "")


# -------------------------------------------------------------------------------------------------------------- flow runs


@dataclass
class RunRecord:
    """One run of a recipe. ``data`` is the JSON on disk: run_id, recipe, config, status, stages (in order of
    finishing), begun (label -> {stage, key, started} of what its last attempt began and has not finished), parent,
    prefect, owner, started, user (who began it), git (commit of the code), order (its number among the runs of the
    state directory), finished, error."""

    data: dict[str, Any]

    @property
    def run_id(self) -> str:
        return self.data["run_id"]

    @property
    def path(self) -> Path:
        return home.runs_dir() / f"{self.run_id}.json"

    @property
    def status(self) -> str:
        """RUNNING, FINISHED, FAILED, KILLED, WAITING (for people to fill in a task); a run whose process is gone
        without saying so is KILLED.
        """
        if self.data["status"] == "RUNNING" and not leases.alive(self.data.get("owner")):
            return "KILLED"
        return self.data["status"]

    def stages(self) -> dict[str, dict[str, Any]]:
        """label -> {stage, key, cached, outputs, record, ...}; the last result of each label."""
        return {entry["label"]: entry for entry in self.data["stages"]}

    def as_flow_run(self, label: str | None = None) -> dict[str, Any]:
        """The small JSON that ``run_stage(flow_run=...)`` takes."""
        return {
            "run_id": self.run_id,
            "recipe": self.data["recipe"],
            "label": label,
            "prefect": self.data.get("prefect") or {},
        }


@contextlib.contextmanager
def _locked(run_id: str) -> Iterator[None]:
    with open(home.runs_dir() / f".{run_id}.lock", "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def start_run(
    recipe: str,
    config: dict[str, Any],
    *,
    run_id: str | None = None,
    parent: str | None = None,
    prefect: dict[str, Any] | None = None,
    identity: str | None = None,
    git: str = "",
) -> RunRecord:
    """Begin a flow run, or continue one: that of a known ``run_id``, else the last one of the same ``identity``
    (whatever makes two runs the same: recipe, config, seed, inputs) if it failed, was killed or waits for people.
    ``flow_runs`` lists the Prefect runs that worked on it; ``git``: the commit of the code."""
    with _locked("start"):
        run_id = run_id or time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + uuid.uuid4().hex[:6]
        known, runs = read_json(home.runs_dir() / f"{run_id}.json", None), []
        if not known:
            runs = all_runs()
            known = _unfinished(identity, runs)
        data = known or {
            "run_id": run_id,
            "recipe": recipe,
            "config": config,
            "identity": identity,
            "parent": parent,
            "stages": [],
            "started": time.time(),
            "user": user(),
            "attempts": 0,
            "order": 1 + (runs[0].data.get("order", 0) if runs else 0),
        }
        flow_runs = [
            *data.get("flow_runs", []),
            *([prefect["flow_run_id"]] if prefect and prefect.get("flow_run_id") else []),
        ]
        data.update(
            status="RUNNING",
            owner=leases.owner(),
            prefect=prefect or data.get("prefect") or {},
            flow_runs=list(dict.fromkeys(flow_runs)),
            finished=None,
            error=None,
            begun={},
            git=git,
            attempts=data["attempts"] + 1,
        )
        run = RunRecord(data)
        with _locked(data["run_id"]):
            atomic_write_json(run.path, data)
    return run


def _unfinished(identity: str | None, runs: list[RunRecord]) -> dict[str, Any] | None:
    """The newest run of an identity (``runs``: newest first), if it neither finished nor still runs."""
    newest = next((run for run in runs if identity and run.data.get("identity") == identity), None)
    return newest.data if newest is not None and newest.status in ("FAILED", "KILLED", "WAITING") else None


def begin_stage(run_id: str, label: str, stage: str, key: str) -> None:
    """Note in a flow run that it has come to a stage, until :func:`append_stage`."""
    with _locked(run_id):
        path = home.runs_dir() / f"{run_id}.json"
        data = read_json(path, None)
        if data is not None:
            data["begun"] = {**data.get("begun", {}), label: {"stage": stage, "key": key, "started": time.time()}}
            atomic_write_json(path, data)


def append_stage(run_id: str, entry: dict[str, Any]) -> None:
    """Add one finished stage to a flow run; an earlier entry of the same label is replaced. ``paid``: whether an
    attempt of this run executed it, also one that failed later.
    """
    with _locked(run_id):
        path = home.runs_dir() / f"{run_id}.json"
        data = read_json(path, None)
        if data is None:
            return
        before = next(
            (s for s in data["stages"] if s["label"] == entry["label"] and s.get("key") == entry.get("key")), None
        )
        paid = not entry["cached"] or before is not None and before.get("paid", not before["cached"])
        data["stages"] = [s for s in data["stages"] if s["label"] != entry["label"]] + [{**entry, "paid": paid}]
        data.get("begun", {}).pop(entry["label"], None)
        atomic_write_json(path, data)


def finish_run(run_id: str, status: str, error: str | None = None) -> None:
    """Close a flow run with FINISHED, FAILED, KILLED or WAITING."""
    if status not in ("FINISHED", "FAILED", "KILLED", "WAITING"):
        raise ValueError(f"status {status!r}: write FINISHED, FAILED, KILLED or WAITING")
    with _locked(run_id):
        path = home.runs_dir() / f"{run_id}.json"
        data = read_json(path, None)
        if data is not None:
            data.update(status=status, finished=time.time(), error=error)
            atomic_write_json(path, data)


def _run_files() -> list[Path]:
    return list((home.home() / "runs").glob("*.json"))  # not made by who only looks: the home may be read-only


def get_run(run_id: str) -> RunRecord:
    """A flow run by its id or that of a Prefect run that worked on it, a unique beginning of one, or ``latest``."""
    paths = sorted(_run_files(), key=lambda p: _begun(read_json(p, {}) or {}))
    if run_id == "latest" and paths:
        return RunRecord(read_json(paths[-1]))
    found = (
        [
            p
            for p in paths
            if p.stem.startswith(run_id) or any(one.startswith(run_id) for one in read_json(p, {}).get("flow_runs", []))
        ]
        if run_id
        else []
    )
    exact = [p for p in found if p.stem == run_id]
    found = exact or found
    if len(found) == 1:
        return RunRecord(read_json(found[0]))
    if found:
        raise store.StoreError(f"run {run_id} is ambiguous; write more of it: {', '.join(p.stem for p in found[:5])}")
    none = (
        "none yet (stages run by themselves are no runs: see one with `posttrain show KEY`, repeat it with `posttrain"
        " stage`)"
    )
    raise store.StoreError(
        f"there is no run {run_id!r}; the newest are: {', '.join(p.stem for p in reversed(paths[-5:])) or none}"
    )


def all_runs() -> list[RunRecord]:
    """Every flow run, newest first."""
    found = [read_json(p, None) for p in _run_files()]
    return [RunRecord(d) for d in sorted((d for d in found if d), key=_begun, reverse=True)]


def _begun(data: dict[str, Any]) -> tuple[int, float]:
    """What runs are in order of: how many began before (a clock that was set back does not make the newest run an old
    one), the clock where that is not known.
    """
    return data.get("order", 0), data.get("started", 0)


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that the platform stands on."""
    import platform
    from importlib import metadata

    found = {"python": platform.python_version()}
    for name in (
        "posttrain",
        "torch",
        "transformers",
        "tokenizers",
        "datasets",
        "pyarrow",
        "numpy",
        "prefect",
        "mlflow",
    ):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def user() -> str:
    """Who runs this: ``POSTTRAIN_USER``, with which the runs of somebody's schedule come to a worker of another's, else
    as MLflow would say it ``MLFLOW_TRACKING_USERNAME`` or the login name; empty for a user id without a name.
    """
    import getpass

    try:
        return os.environ.get("POSTTRAIN_USER") or os.environ.get("MLFLOW_TRACKING_USERNAME") or getpass.getuser()
    except (KeyError, OSError, ImportError):
        return ""


def user_of(record: Mapping[str, Any], runs: Mapping[str, RunRecord]) -> str:
    """Who made a stage record, by itself or by its run (``runs`` by their id); empty where neither says it."""
    run = runs.get(record.get("flow_run") or "")
    return record.get("user") or (run.data.get("user") if run else "") or ""


def git_commit(root: Path) -> str:
    """Commit of a checkout (with ``-dirty``), or the empty string."""
    import subprocess

    try:
        run = subprocess.run(
            ["git", "-C", os.fspath(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=5,
        )
        return run.stdout.strip() if run.returncode == 0 else ""
    except (OSError, subprocess.SubprocessError):
        return ""
