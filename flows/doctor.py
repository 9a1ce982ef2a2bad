"""`posttrain doctor`: checks of the machine and of the state directory, each with what to do about it."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

# name -> (first version that works, first that does not, what happens outside)
PINS = {
    "prefect": ("3.8.8", "3.9", "the only version this was tried with"),
    "mlflow": ("3.17.2", "4", "the only version this was tried with"),
    "fastapi": ("0.139", "0.151", "Prefect's server refuses null fields, and with the newest does not start"),
    "sqlalchemy": ("2.0", "2.1", "Prefect's schedules silently create no runs"),
    "starlette": ("0.40", "2", "MLflow's server does not start"),
}
DISK_GIB = 5.0


def examine(state: Path, *, fix: bool, clean_after: float | None = None) -> list[dict[str, Any]]:
    """Run every check: [{"check", "ok", "text"}]; a check that breaks is itself a finding.

    fix: repair what can be repaired; clean_after: also remove what unfinished stages left that many days ago.
    """
    from storage.files import refusal

    findings = []
    if clean_after is not None:
        from storage import work

        count, size = work.clean(clean_after)
        findings.append(
            {
                "check": "clean",
                "ok": True,
                "text": f"removed {count} unfinished stage(s), {mib(size)}, untouched for {clean_after:g} days",
            }
        )
    for check in (
        python,
        pins,
        disk,
        sizes,
        contents,
        bookkeeping,
        work_directories,
        torch_device,
        sandbox,
        server_app,
        services,
        outbox,
        stale_runs,
        leases,
    ):
        try:
            findings += [
                {"check": check.__name__.replace("_", " "), "ok": ok, "text": text} for ok, text in check(state, fix)
            ]
        except Exception as error:  # a doctor that dies of the illness is no use
            findings.append(
                {
                    "check": check.__name__.replace("_", " "),
                    "ok": False,
                    "text": refusal(error) or f"{type(error).__name__}: {error}",
                }
            )
    return findings


Finding = Iterator[tuple[bool, str]]


def python(state: Path, fix: bool) -> Finding:
    yield sys.version_info >= (3, 11), sys.version.split()[0]


def pins(state: Path, fix: bool) -> Finding:
    from packaging.version import Version

    for name, (low, high, why) in PINS.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield False, f"{name} is not installed; run infra/setup"
            continue
        ok = Version(low) <= Version(found) < Version(high)
        yield (
            ok,
            f"{name} {found}"
            + ("" if ok else f" (needs >={low},<{high}: {why}); pip install -c infra/constraints.txt {name}"),
        )


def disk(state: Path, fix: bool) -> Finding:
    free = shutil.disk_usage(state).free / 2**30
    yield (
        free >= DISK_GIB,
        f"{free:.1f} GiB free at {state}"
        + ("" if free >= DISK_GIB else f"; training wants at least {DISK_GIB:.0f} GiB"),
    )


def sizes(state: Path, fix: bool) -> Finding:
    from storage.work import size_of

    found = {entry.name: size_of(entry) if entry.is_dir() else entry.stat().st_size for entry in state.iterdir()}
    largest = sorted(found.items(), key=lambda item: -item[1])
    yield (
        True,
        f"{mib(sum(found.values()))} in {state}: "
        + ", ".join(f"{name} {mib(size)}" for name, size in largest if size >= 2**20),
    )


def mib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def contents(state: Path, fix: bool) -> Finding:
    """Whether what has a name, or a record, still has its files as they were published. Contents are read where sizes
    or times are others.
    """
    from storage import records, registry, removal, store

    if fix and (left := removal.finish()):
        yield True, f"deleted what `posttrain rm` had left of {left} model(s) or dataset(s) when it was killed"
    named = [
        (f"model:{name.name}/{version}", "model", entry["digest"])
        for name in registry.models().values()
        for version, entry in name.versions.items()
    ]
    named += [
        (f"dataset:{name}@{digest}", "dataset", digest)
        for name in store.dataset_names()
        for digest in store.dataset_versions(name)
    ]
    lost: dict[str, str] = {}  # digest -> what is wrong
    for ref, kind, digest in named:
        if store.removed(kind, ref[8:].partition("@")[0], digest):
            continue
        try:
            found = store.resolve(ref, kind)
            for part in found.manifest.get("parts", ()):
                if not whole(Path(found.path, part["file"]), part["rows"]):
                    lost[digest] = f"{part['file']} of {ref} is damaged; `posttrain rerun {ref}` makes it again"
        except (store.StoreError, OSError, ValueError) as error:
            lost.setdefault(digest, str(error))
    made = list(records.all_records())
    lost = {digest: text for record in made for digest, text in records.damaged(record, removed=False).items()} | lost
    places = {(one["kind"], one["name"], one["digest"]) for record in made for one in record["outputs"].values()}
    gone = {digest for kind, name, digest in places if store.removed(kind, name, digest)}
    for text in [*lost.values()][:10]:
        yield False, text
    if len(lost) > 10:
        yield False, f"{len(lost) - 10} more models and datasets lack files"
    if not lost:
        count = len({digest for *_, digest in [*places, *named]} - gone)
        yield (
            True,
            f"the files of {count} models and datasets are there"
            + (f"; those of {len(gone)} were removed with `posttrain rm`" if gone else ""),
        )


def bookkeeping(state: Path, fix: bool) -> Finding:
    """Whether records, the registry and the databases can be read. What is damaged counts as not there, without a word,
    for all that reads it.
    """
    from storage import registry
    from storage.files import database_damage, read_json

    for folder, again in (
        ("records", "the same command executes that stage again"),
        ("runs", "the same command makes another, from the results that are there"),
    ):
        for path in sorted((state / folder).glob("*.json")):
            if not isinstance(read_json(path, None), dict):
                yield False, f"{path} is damaged and counts as none; remove it: {again}"
    if bad := registry.damaged_lines():
        yield (
            False,
            (
                f"line{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad[:5]))} of {state / 'registry' / 'models.jsonl'}"
                f" {'are' if len(bad) > 1 else 'is'} damaged: versions and aliases of models that stood there are"
                " forgotten; bring the file back from a copy, or run the stages again (their models are registered"
                " again) and remove the lines"
            ),
        )
    for name, path, again in (
        ("mlflow", state / "mlflow.db", "`posttrain doctor` then makes a new one and sends it everything again"),
        (
            "prefect",
            state / "prefect" / "prefect.db",
            (
                "the next run, or `posttrain up`, makes a new one (results are not in it; its runs and schedules are:"
                " `posttrain deploy` again)"
            ),
        ),
    ):
        if (wrong := database_damage(path)) is not None:
            yield (
                False,
                (
                    f"{path} is damaged ({wrong}); stop what uses it (`posttrain down`), move it away (mv {path}"
                    f" {path}.damaged; rm -f {path}-wal {path}-shm), and {again}"
                ),
            )


def whole(part: Path, rows: int) -> bool:
    """Whether a Parquet file has the end it was written with, which holds its number of rows."""
    from pyarrow import parquet

    try:
        return parquet.read_metadata(part).num_rows == rows
    except (OSError, ValueError):
        return False


def work_directories(state: Path, fix: bool) -> Finding:
    """Finished stages keep logs, curves and reports; what unfinished ones keep is for the command that continues
    them.
    """
    from storage import work

    found = work.usage()
    # killed between publishing and tidying
    left = [one for one in found if one["finished"] and one["spare"] and not one["busy"]]
    parts = work.parts()
    if fix:
        for one in left:
            work.tidy(one["path"])
        for path in parts:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    idle = [one for one in found if not one["finished"] and not one["busy"]]
    yield (
        True,
        f"{sum(one['finished'] for one in found)} finished stage(s) keep"
        f" {mib(sum(one['bytes'] for one in found if one['finished']))} of logs, curves and reports"
        + (f"; {len(left)} tidied up" if left and fix else ""),
    )
    if parts:
        which = ", ".join(str(path) for path in parts[:5]) + (" ..." if len(parts) > 5 else "")
        done = "removed" if fix else "run doctor --fix to remove"
        yield True, f"{done} what killed processes were writing: {which}"
    if idle:
        age = (time.time() - min(one["touched"] for one in idle)) / 86400
        yield (
            True,
            (
                f"{len(idle)} unfinished stage(s) keep {mib(sum(one['bytes'] for one in idle))} to continue from, the"
                f" oldest untouched for {age:.1f} days; `posttrain doctor --clean-after DAYS` removes those untouched"
                " for longer"
            ),
        )


def torch_device(state: Path, fix: bool) -> Finding:
    import torch

    from stages.running.cuda import unusable
    from tasks.devices import cuda_devices

    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        yield True, f"torch {torch.__version__} with {names}"
        yield from gpu_kernels()
    elif cards := cuda_devices():
        yield False, unusable(", ".join(cards)) + " Until then stages train on the CPU"
    else:
        yield True, f"torch {torch.__version__} on the CPU"


def gpu_kernels() -> Finding:
    import warnings

    import torch

    from stages.models import fused

    if torch.cuda.get_device_capability() < (8, 0):
        yield True, "this GPU is older than Ampere, so layers are computed by torch's operations alone"
        return
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = fused.triton is not None and fused.compiles()
    yield (
        made,
        "Triton makes kernels for it"
        if made
        else str(said[0].message)
        if said
        else "there is no Triton, without which a training step takes up to twice its time; pip install triton",
    )


def sandbox(state: Path, fix: bool) -> Finding:
    """What holds generated code and rewards of one's own beside Python's audit hook."""
    from stages.running.sandbox import nets

    found = nets()
    missing = [name for name, there in found.items() if not there]
    yield (
        len(missing) < len(found),
        "generated code is held by "
        + ", ".join([*(name for name, there in found.items() if there), "Python's audit hook"])
        + (
            f"; this kernel has no {' and no '.join(missing)}: train on generated code in a container, or with Linux 5.13"
            " or newer with seccomp and Landlock"
            if missing
            else ""
        ),
    )


def server_app(state: Path, fix: bool) -> Finding:
    """The import that fails when fastapi does not fit."""
    from prefect.server.api.server import create_app

    yield callable(create_app), "Prefect's server can be built"


def services(state: Path, fix: bool) -> Finding:
    from flows import services as servers
    from flows.keep import last_end

    alive, known = servers.running(state), servers.recorded(state)
    if not known:
        yield True, "no servers are running (runs bring their own; `posttrain up` starts them)"
    for name, health in (("prefect", "/api/health"), ("mlflow", "/health")):
        if name in alive:
            ok = servers.answers(alive[name]["url"] + health, timeout=5)
            yield ok, f"{name} at {alive[name]['url']}" + ("" if ok else f" does not answer; see {alive[name]['log']}")
    if "prefect" in alive:
        servers.connect(state)
        yield from schedules()
        yield (
            "worker" in alive,
            ("worker is running" if "worker" in alive else "no worker is running; `posttrain up` starts one"),
        )
    for name, entry in known.items():
        if name not in alive:
            yield False, f"{name} has died; see {entry['log']}; `posttrain up` starts it again"
        elif (ended := last_end(entry["log"])) is not None:
            yield True, f"{name}: {ended}; see {entry['log']}"


def schedules() -> Finding:
    """Active schedules must have runs in the future: with a wrong SQLAlchemy they have none."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter

    with get_client(sync_client=True) as client:
        deployments = client.read_deployments(limit=200)
        for deployment in deployments:
            if deployment.paused or not any(schedule.active for schedule in deployment.schedules):
                continue
            runs = client.read_flow_runs(
                deployment_filter=DeploymentFilter.model_validate({"id": {"any_": [deployment.id]}}),
                flow_run_filter=FlowRunFilter.model_validate(
                    {"state": {"type": {"any_": ["SCHEDULED", "RUNNING", "PENDING"]}}}
                ),
                limit=1,
            )
            yield (
                bool(runs),
                f"schedule of {deployment.name}"
                + (
                    " creates runs"
                    if runs
                    else " has created no run; check the SQLAlchemy version, then restart the server"
                ),
            )


def outbox(state: Path, fix: bool) -> Finding:
    from storage import outbox, tracking

    again, error = tracking.compare() if fix else (0, None)
    left = tracking.sync() if fix else {"pending": len(outbox.pending()), "error": None}
    error, pending = left["error"] or error, left["pending"]
    if error:
        lacks = f"{pending} run(s) are not complete in MLflow" if pending else "MLflow was not told everything"
        yield False, f"{lacks}: {error}; start it with `posttrain up`"
    elif pending:
        yield True, f"{pending} run(s) are not complete in MLflow (still running)"
    elif again:
        yield (
            True,
            f"MLflow has everything; what it lacked of {again} run(s), as a restored backup does, was sent again",
        )
    else:
        yield True, "MLflow has everything"


def stale_runs(state: Path, fix: bool) -> Finding:
    from storage import records

    dead = [run for run in records.all_runs() if run.data["status"] == "RUNNING" and run.status == "KILLED"]
    if fix:
        for run in dead:
            records.finish_run(run.run_id, "KILLED", "its process is gone")
    yield (
        True,
        (
            "no run is stale"
            if not dead
            else (
                f"{len(dead)} run(s) whose process is gone"
                + (" closed as KILLED" if fix else "; run doctor --fix")
                + "; `posttrain rerun RUN` continues one"
            )
        ),
    )


def leases(state: Path, fix: bool) -> Finding:
    from storage import leases as locks

    held = locks.gpu_holders()
    yield (
        True,
        (
            "no GPU slot is held"
            if not held
            else ", ".join(f"GPU slot {one['slot']} is held by process {one['pid']}" for one in held)
        ),
    )
