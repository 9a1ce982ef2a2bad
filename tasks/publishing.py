"""What a stage made becomes part of the store: its outputs under their names, and last of all its record."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages import sources
from stages.spec import PROJECT_ROOT, StageSpec, is_ours, library_versions
from storage import leases, records, store
from storage.files import atomic_write_json, read_json
from tasks.stopping import StageError

if TYPE_CHECKING:
    from tasks.run import Prepared


def names_of(spec: StageSpec, name_as: str | None) -> dict[str, str]:
    """Name under which each output is published: ``name_as`` for the first of its kind, ``name_as-<output>`` for others
    and for datasets declared after a model, which are notes on its making. :func:`name_of` is for outputs as a run has
    them.
    """
    found: dict[str, str] = {}
    taken: set[str] = set()
    models = [n for n, o in spec.outputs.items() if o.kind == "model" and not o.many]
    for name, output in spec.outputs.items():
        if output.many:
            found[name] = f"{name_as or spec.name}-{name}"
            continue
        if name_as:
            beside = output.kind in taken or "model" in taken
            found[name] = f"{name_as}-{name}" if beside else name_as
        elif output.kind == "model":
            found[name] = spec.name if len(models) == 1 else f"{spec.name}-{name}"
        else:
            found[name] = f"{spec.name}-{name}"
        taken.add(output.kind)
    return found


def name_of(names: dict[str, str], output: str) -> str:
    """Name under which an output of a run is published, by those of :func:`names_of`: output ``epoch.2`` of an ``epoch``
    that is many has its label behind the name.
    """
    base, _, label = output.partition(".")
    return f"{names[base]}-{label}" if label else names[output]


def publish(
    p: Prepared,
    workdir: Path,
    result: dict[str, Any],
    label: str,
    name_as: str | None,
    started: float,
    attempt: int,
    flow_run: dict[str, Any] | None,
) -> dict[str, Any]:
    """Verify the outputs, move them into the store (a plan on disk makes that repeatable) and write the record."""
    from storage.datasets import DatasetError, open_dataset

    plan = read_json(workdir / "publish.json", None)
    if plan is None:
        plan = {}
        for name, output in result["outputs"].items():
            path = Path(output["path"])
            digest = open_dataset(path).digest if output["kind"] == "dataset" else store.tree_digest(path)
            plan[name] = {"kind": output["kind"], "digest": digest}
        atomic_write_json(workdir / "publish.json", plan)
    names = names_of(p.spec, name_as)
    outputs: dict[str, dict[str, Any]] = {}
    for name, output in result["outputs"].items():
        source, digest = Path(output["path"]), plan[name]["digest"]
        if output["kind"] == "dataset":
            try:
                found = store.publish_dataset(source, name_of(names, name), digest)
            except DatasetError:
                raise StageError(
                    p.spec.name,
                    f"output {name} is neither in the store nor whole at {source}; remove {workdir} and run again",
                    key=p.key,
                ) from None
        else:
            found = (
                store.publish_model(source, digest) if source.exists() else store.resolve(f"model:m-{digest}", "model")
            )
        good, stat = store.check_output(found.kind, found.path, digest, None)
        if not good:
            raise StageError(
                p.spec.name,
                f"output {name} at {found.path} does not match its digest; remove {workdir} and run again",
                key=p.key,
            )
        outputs[name] = {
            "kind": found.kind,
            "name": name_of(names, name),
            "ref": found.ref,
            "digest": digest,
            "path": found.path,
            "stat": stat,
            "role": output.get("role") or p.spec.output_spec(name).role,
            "manifest": _manifest_summary(found.manifest),
        }
    finished = time.time()
    record = {
        "stage": p.spec.name,
        "module": p.module,
        "label": label,
        "key": p.key,
        "config": p.resolved,
        "effective": p.config.effective(),
        "seed": p.seed,
        "name_as": name_as,
        "inputs": {n: {**input_entry(i), "given": p.given[n]} for n, i in p.inputs.items()},
        "outputs": outputs,
        "metrics": result["summary"],
        "perf": result["perf"],
        "usage": result.get("usage") or {},
        "warnings": result["warnings"],
        "reports": result["reports"],
        "code": p.code,
        "git": records.git_commit(PROJECT_ROOT),
        "versions": {**records.versions(), **result.get("versions", {}), **_version_outside(p.module)},
        "started": started,
        "finished": finished,
        "attempts": attempt,
        "resumed_from": result.get("resumed_from"),
        "forced": read_json(workdir / "forced.json", {}).get("unit"),
        "host": leases.this_process()["host"],
        "user": records.user(),
        "workdir": str(workdir),
        "metrics_file": str(workdir / "metrics.jsonl"),
        "perf_file": str(workdir / "perf.jsonl"),
        "flow_run": (flow_run or {}).get("run_id"),
        "mlflow": {},
    }
    records.write(record)
    return record


def input_entry(found: store.ResolvedInput) -> dict[str, Any]:
    return {**found.to_dict(), "manifest": _manifest_summary(found.manifest)}


def _version_outside(module: str) -> dict[str, str]:
    """{package: version and commit} of the code of a stage that is none of this project's."""
    package = module.split(".", 1)[0]
    if is_ours(module):
        return {}
    found = sources.package(package)
    commit = "" if found is None or found.library else records.git_commit(found.folder)
    return {package: " ".join(filter(None, [library_versions([package])[package], commit])) or "without a version"}


def _manifest_summary(manifest: dict[str, Any]) -> dict[str, Any]:
    return {k: manifest[k] for k in ("name", "kind", "rows", "splits", "counts", "dataset_hash") if k in manifest}


def projected(record: dict[str, Any]) -> dict[str, Any]:
    """The part of a record that the MLflow projection shows."""
    keys = (
        "outputs",
        "metrics",
        "perf",
        "warnings",
        "reports",
        "versions",
        "metrics_file",
        "perf_file",
        "attempts",
        "resumed_from",
    )
    return {
        **{k: record[k] for k in keys},
        "record_path": str(records.record_path(record["key"])),
        "summary": record["metrics"],
    }
