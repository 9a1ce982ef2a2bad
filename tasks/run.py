"""The body of every stage task, without Prefect: identity, cache, leases, the stage process, publishing.

    resolve references -> resolve config -> stage key -> a verified record exists? then it is the answer
    -> lock of the key -> GPU slot (GPU stages only: `tasks/devices.py`) -> its process (`tasks/processes.py`) -> relay
    its events -> verify and publish outputs -> stage record, written last and atomically (`tasks/publishing.py`) ->
    release

Killed at any instant (this process, the stage process, the machine), the next call with the same key continues in the
same work directory from the last complete checkpoint. ``tasks/stages.py`` wraps this in Prefect tasks;
:func:`run_stage` itself needs neither Prefect nor a server, and tells everything it has to say through ``on_event``.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shutil
import signal
import sys
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator, get_args

from stages import sources
from stages.registry import get_stage, stage_module_name
from stages.spec import (
    PROJECT_ROOT,
    ConfigError,
    StageConfig,
    StageSpec,
    closure_digest,
    import_closure,
    library_versions,
    parse_config,
    stage_key,
)
from storage import home, leases, outbox, records, registry, store, tracking, work
from storage.files import atomic_write_json, read_json, refusal, sha256_text
from tasks import mirror, processes
from tasks.devices import devices_of, engine_cards, take_devices
from tasks.nodes import RANK_VARIABLES, Follower, Nodes, following, shared
from tasks.publishing import input_entry, name_of, names_of, projected, publish
from tasks.stopping import DELIBERATE, StageError, raise_if_stopped, signals_held, sigterm_raises

Event = dict[str, Any]
REPORT_FILES = ("markdown", "table", "png")


@dataclass
class StageResult:
    """What a stage gave. outputs: name -> pinned reference; paths: name -> directory; metrics: final numbers; perf:
    ``tokens_per_second``, ``seconds``, ``peak_memory_mib`` where measured (of the run that did the work, also when
    cached)."""

    stage: str
    key: str
    cached: bool
    outputs: dict[str, str]
    paths: dict[str, str]
    metrics: dict[str, Any]
    seconds: float
    warnings: list[dict[str, str]]
    record_path: str
    mlflow_run_id: str | None = None
    perf: dict[str, float] = field(default_factory=dict)
    label: str = ""
    reports: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, small enough for a task result."""
        return asdict(self)


class NotMadeYet(Exception):
    """A plan came to raw data of which there is no dataset yet, or to an adapter that is in no whole model yet."""


@dataclass
class Prepared:
    """A stage run before it runs: everything that its key is made of."""

    spec: StageSpec
    module: str
    key: str
    config: StageConfig
    resolved: dict[str, Any]
    inputs: dict[str, store.ResolvedInput]
    given: dict[str, str]
    code: str
    seed: int


# ---------------------------------------------------------------------------------------------------------------- public


def run_stage(
    name: str,
    inputs: dict[str, str] | None = None,
    config: dict[str, Any] | StageConfig | None = None,
    *,
    seed: int = 0,
    name_as: str | None = None,
    flow_run: dict[str, Any] | None = None,
    force: bool = False,
    on_event: Callable[[Event], Any] | None = None,
    devices: int | None = None,
    wait: bool = True,
    nodes: Nodes | None = None,
) -> StageResult:
    """Run one stage, or return what an identical run already gave.

    name: a stage of ``stages/registry.py`` or the module path of one of your own. inputs: name -> reference, path, URL
    or hub id; raw data files given for a dataset are ingested first. config: settings that differ from the defaults.
    name_as: name under which outputs are published (default ``<stage>-<output>``). flow_run:
    ``RunRecord.as_flow_run(label)`` of the run it belongs to. force: run again although a record exists. wait: wait for
    another process that runs the same key (False: raise LeaseBusy). devices: number of GPUs, or of processes where
    there is none (each has a rank of its own; default ``POSTTRAIN_DEVICES``, else 1; stages that cannot share their
    work take one). nodes: this machine among several (``tasks/nodes.py``), each of which has so many.

    Raises ConfigError (settings or inputs), StoreError (a reference), StageError (the stage itself), LeaseBusy.
    """
    with sigterm_raises(), _refusals_told(name), mirror.beside(_teller(on_event), flow_run) as tell:
        _check_names(name, name_as)
        prepared = prepare(name, inputs, config, seed=seed, flow_run=flow_run, on_event=on_event)
        label = (flow_run or {}).get("label") or prepared.spec.name
        tell(
            {
                "event": "prepared",
                "stage": prepared.spec.name,
                "label": label,
                "key": prepared.key,
                "config": prepared.resolved,
            }
        )
        if nodes is not None and not prepared.spec.parallel:
            raise ConfigError(
                f"--nodes {nodes.count}: stage {prepared.spec.name} runs on one device; leave --nodes out"
            )
        if nodes is not None and nodes.rank > 0:
            return _take_part(prepared, nodes, label, force, tell, devices, wait)
        record = None if force else records.find(prepared.key)
        cached, unit = record is not None, outbox.unit_of(flow_run, label, prepared.key)
        if record is None:
            if flow_run and flow_run.get("run_id"):
                records.begin_stage(flow_run["run_id"], label, prepared.spec.name, prepared.key)
            with leases.acquire(
                f"stage-{prepared.key}",
                wait=wait,
                on_wait=lambda text: tell({"event": "waiting", "text": text}),
                on_poll=raise_if_stopped,
            ) as lock:
                record = None if force else records.find(prepared.key)  # another process may just have finished it
                cached = record is not None
                if record is None:
                    record, unit = _run(prepared, lock, label, name_as, flow_run, force, tell, devices, wait, nodes)
        return _conclude(prepared, record, cached, unit, label, name_as, flow_run, tell)


def follow(nodes: Nodes, what: str, *, on_event: Callable[[Event], Any] | None = None) -> dict[str, Any]:
    """On node 1 and further of a recipe: take part in every stage that node 0 shares (``tasks.nodes``) until its run
    has finished; {"code": node 0's exit code, "took_part_in": labels of stages}. A stage that fails is node 0's to
    judge: it may go on with others.

    Raises ConfigError, NodeError (node 0's run failed or its process died).
    """
    tell, labels = _teller(on_event), []
    with sigterm_raises(), following(nodes, what, lambda text: tell({"event": "waiting", "text": text})) as follower:
        processes.expect()
        for turn in follower.turns():
            told = lambda event, label=turn["label"]: tell({"label": label, **event})
            try:
                with _refusals_told(turn["label"]):
                    _take_turn(turn, follower, told)
            except (StageError, ConfigError, store.StoreError) as error:
                follower.error = str(error).splitlines()[0]
            failed = follower.error or follower.failed(turn)
            told({"event": "took_part", "error": failed})
            labels += [] if failed else [turn["label"]]
    return {"code": follower.code, "took_part_in": labels}


def _check_names(name: str, name_as: str | None) -> None:
    """Raise ConfigError where outputs cannot be called as they are to be: they get their names last."""
    for output in names_of(get_stage(name).SPEC, name_as).values():
        try:
            registry.check_name(output)
        except ValueError as error:
            raise ConfigError(f"name_as={name_as!r}: {error}") from None


def prepare(
    name: str,
    inputs: dict[str, str] | None = None,
    config: dict[str, Any] | StageConfig | None = None,
    *,
    seed: int = 0,
    flow_run: dict[str, Any] | None = None,
    on_event: Callable[[Event], Any] | None = None,
    dry: bool = False,
) -> Prepared:
    """Resolve inputs and config and compute the stage key. Raw data files are ingested here, and adapters put into
    their models (cached stages themselves).

    dry: run nothing; raises NotMadeYet for what would be made first.
    """
    module = get_stage(name)
    spec: StageSpec = module.SPEC
    given = {k: str(v) for k, v in (inputs or {}).items() if v is not None}
    spec.check_inputs(given)
    parsed = parse_config(spec, config)
    given, parsed = _from_lineage(spec, given, parsed)
    spec.check_inputs(given, parsed)
    resolved_inputs = {}
    for input_name, text in given.items():
        declared = spec.input_spec(input_name)
        try:
            found = store.resolve(text, declared.kind, declared.hub)
        except store.OnlyAdapter as adapter:
            found = whole_model(
                adapter, text, f"input {input_name} of stage {spec.name}", flow_run, on_event, dry, input_name
            )
        except store.StoreError as error:
            raise store.StoreError(f"input {input_name} of stage {spec.name}: {error}") from None
        if declared.use and (wrong := store.wrong_use(found.path, declared.use)):
            raise ConfigError(f"input {input_name} of stage {spec.name}: {text} {wrong}")
        if declared.kind == "dataset" and found.kind == "file":
            found = _ingest(spec, input_name, text, declared.kinds, seed, flow_run, on_event, dry)
        kind = found.manifest.get("kind")
        if declared.kind == "dataset" and declared.kinds and kind not in declared.kinds:
            raise ConfigError(
                f"input {input_name} of stage {spec.name}: {text} holds rows of kind {kind}, but"
                f" {' or '.join(declared.kinds)} is needed; {_way(text, kind, declared.kinds)}"
            )
        resolved_inputs[input_name] = found
    module_name = stage_module_name(name)
    code = closure_digest(module_name, spec.resources)
    digests = {n: i.digest + _read_as(i, spec.input_spec(n).named) for n, i in resolved_inputs.items()}
    if spec.behind is not None and (named := spec.behind(parsed, {n: i.path for n, i in resolved_inputs.items()})):
        digests["behind"] = sha256_text(named)
    if getattr(parsed, "engine", "") == "vllm":  # no import of every stage's, so not part of its code
        digests["engine"] = sha256_text(f"vllm {library_versions(['vllm'])['vllm']}")
    key = stage_key(spec.name, code, parsed, digests, seed)
    settings = spec.settings(parsed, given)
    spec = replace(spec, gpu=spec.takes_gpu(given))
    return Prepared(spec, module_name, key, parsed, settings, resolved_inputs, given, code, int(seed))


def _read_as(found: store.ResolvedInput, named: bool) -> str:
    """What a raw file's name adds to its content. The ending, that of its compression aside, says how the bytes are
    read, as lines of text or as CSV, and so is part of what was given; the whole name is where the stage writes it into
    its rows (``named``). Names in a directory are in its digest."""
    if found.kind == "file" and named:
        return f"/{Path(found.path).name}"
    if found.kind != "file" or not os.path.isfile(found.path):
        return ""
    from stages.ingestion.sources import plain_name

    return os.path.splitext(plain_name(Path(found.path)))[1]


def _from_lineage(spec: StageSpec, given: dict[str, str], config: StageConfig) -> tuple[dict[str, str], StageConfig]:
    """Inputs and settings with what the lineage says: the training data of a model, and the ancestors of which nothing
    is known.
    """
    from tasks.training_data import training_data

    for name, declared in spec.inputs.items():
        model = given.get(declared.lineage_of) if declared.lineage_of else None
        if model is not None and not any(
            given_name == name or given_name.startswith(name + ".") for given_name in given
        ):
            found, outside = training_data(model)
            given = given | {f"{name}.{label}": ref for label, ref in sorted(found.items())}
            config = config.model_copy(update={"outside": outside})
    return given, config


def _way(text: str, have: str | None, kinds: tuple[str, ...]) -> str:
    """How rows of kind ``have`` become one of ``kinds``, if they can."""
    from stages.ingestion.conversions import route

    want = next((kind for kind in kinds if route(have, kind)), None)
    if want is None:
        return (
            f"{have} cannot be converted to that, so give another dataset (`posttrain ls datasets` shows the kind of"
            " each) or raw data"
        )
    return f"convert it first: posttrain stage ingest --input data={text} --set kind={want}"


def start_flow(
    recipe: str,
    config: dict[str, Any],
    *,
    run_id: str | None = None,
    parent: str | None = None,
    prefect: dict[str, Any] | None = None,
    identity: str | None = None,
) -> records.RunRecord:
    """Begin a flow run (a known ``run_id``, or the ``identity`` of one that did not finish, continues it): its record
    on disk and its parent run in MLflow. What earlier runs left unsent is sent now, and MLflow runs of processes that
    died are closed."""
    git = records.git_commit(PROJECT_ROOT)
    run = records.start_run(recipe, config, run_id=run_id, parent=parent, prefect=prefect, identity=identity, git=git)
    for unit in outbox.pending():
        tracking.poke(unit)
    tracking.put({"unit": outbox.flow_unit(run.run_id), "type": "flow", "run_id": run.run_id, "recipe": recipe})
    return run


def finish_flow(run_id: str, status: str, error: str | None = None, *, timeout: float = 60.0) -> str | None:
    """Close a flow run (FINISHED, FAILED, KILLED or WAITING) and wait, at most ``timeout`` seconds, until MLflow knows;
    its MLflow run id.
    """
    records.finish_run(run_id, status, error)
    run = records.get_run(run_id)
    deadline = time.monotonic() + timeout
    unit = outbox.flow_unit(run_id)
    tracking.put({"unit": unit, "type": "flow", "run_id": run_id, "recipe": run.data["recipe"]})
    left = lambda: max(0.1, deadline - time.monotonic())
    first = status != "KILLED"  # who ends a run does not wait for a database
    for waiting in outbox.pending():
        if waiting.startswith(run_id) and waiting != unit:
            tracking.flush(waiting, left(), first)
    return tracking.flush(unit, left(), first)


# ---------------------------------------------------------------------------------------------------------------- inputs


def whole_model(
    adapter: store.OnlyAdapter,
    text: str,
    where: str,
    flow_run: dict[str, Any] | None = None,
    on_event: Any = None,
    dry: bool = False,
    name: str = "adapter",
) -> store.ResolvedInput:
    """The model that stage `merge` makes of an adapter and the base that it names; ``dry``: find what that gave;
    ``name``: of the input, by which the step is called.

    Raises StoreError where it names none that can be found.
    """
    inputs, settings = {"adapter": adapter.ref, "base": adapter.base}, {"method": "adapter"}
    try:
        if not adapter.base:
            raise store.StoreError("its adapter_config.json has no base_model_name_or_path")
        store.resolve(adapter.base, "model")
    except store.StoreError as error:
        raise store.StoreError(f"{where}: {adapter} (base={adapter.base or 'MODEL'}: {error})") from None
    if dry:
        record = records.find(prepare("merge", inputs, settings).key)
        if record is None:
            raise NotMadeYet(f"{text} would be put into {adapter.base} first")
        return store.resolve(record["outputs"]["model"]["ref"], "model")
    flow, told = _step_before("merge", name, "model", flow_run, on_event)
    result = run_stage("merge", inputs, settings, name_as=_stem(adapter.ref), flow_run=flow, on_event=told)
    return store.resolve(result.outputs["model"], "model")


def _step_before(
    stage: str, name: str, label: str, flow_run: dict[str, Any] | None, on_event: Any
) -> tuple[dict[str, Any] | None, Any]:
    """(``flow_run``, ``on_event``) of the stage that makes an input called ``name``: a step of the flow behind the one
    that asks for it, or behind ``label`` where that has no name."""
    flow = {**flow_run, "label": f"{flow_run.get('label') or label}.{stage}-{name}"} if flow_run else None
    told = (lambda event: on_event({"label": flow["label"] if flow else stage, **event})) if on_event else None
    return flow, told


def _stem(path: str) -> str:
    """What is made of a file or directory is called as it is."""
    name = Path(path.split("@")[0].rstrip("/")).name.split(".")[0]
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:100].strip("-.") or "data"


def _ingest(
    spec: StageSpec,
    name: str,
    text: str,
    kinds: tuple[str, ...],
    seed: int,
    flow_run: dict[str, Any] | None,
    on_event: Any,
    dry: bool,
) -> store.ResolvedInput:
    """Run raw data through the ingest stage, asking for the kind that the input wants; ``dry``: find what that gave."""
    ingest = get_stage("ingest")
    chosen = _matching_kind(ingest, text, kinds)
    if chosen and chosen not in get_args(ingest.Config.model_fields["kind"].annotation):
        raise ConfigError(
            f"input {name} of stage {spec.name}: {text} is raw data, and rows of kind {' or '.join(kinds)} are what a"
            " stage makes; give its output as dataset:NAME@latest (`posttrain ls datasets` shows the kind of each)"
        )
    settings = {"kind": chosen} if chosen and "kind" in ingest.Config.model_fields else {}
    stem = _stem(text)
    suffix = f"-{chosen.split('/')[0]}" if chosen else ""
    if dry:
        record = records.find(prepare("ingest", {"data": text}, settings, seed=seed).key)
        if record is None or "data" not in record["outputs"]:
            raise NotMadeYet(f"{text} would be ingested first{f', as {chosen}' if chosen else ''}")
        return store.resolve(record["outputs"]["data"]["ref"], "dataset")
    flow, told = _step_before("ingest", name, spec.name, flow_run, on_event)
    try:
        result = run_stage(
            "ingest", {"data": text}, settings, seed=seed, name_as=f"{stem}{suffix}", flow_run=flow, on_event=told
        )
    except StageError as error:
        if error.kind != "StageFailure":
            raise
        kind = f" --set kind={chosen}" if chosen else ""
        raise StageError(
            "ingest",
            f"{error.message.rstrip('.')}. Settings of ingest are given to it alone: posttrain stage ingest --input"
            f" data={text}{kind} --name-as {stem}{suffix} --set KEY=VALUE, then --input"
            f" {name}=dataset:{stem}{suffix}@latest.",
            kind=error.kind,
            log_path=error.log_path,
            key=error.key,
        ) from None
    if "data" not in result.outputs:
        raise ConfigError(
            f"input {name} of stage {spec.name}: {text} held no row of kind {' or '.join(kinds) or 'any'}; what was"
            f" quarantined and why: posttrain show {result.outputs.get('quarantine') or result.key}"
        )
    return store.resolve(result.outputs["data"], "dataset")


def _matching_kind(ingest: Any, text: str, kinds: tuple[str, ...]) -> str | None:
    """The first kind of ``kinds`` that the data can become (the ingest stage knows how to look), else the first."""
    choose = getattr(ingest, "matching_kind", None)
    if choose is not None and len(kinds) > 1:
        found = choose(store.resolve(text, "file").path, kinds)
        if found:
            return found
    return kinds[0] if kinds else None


# ------------------------------------------------------------------------------------------------------------ the process


def _run(
    p: Prepared,
    lock: leases.Lease,
    label: str,
    name_as: str | None,
    flow_run: dict[str, Any] | None,
    force: bool,
    tell: Callable[[Event], None],
    devices: int | None,
    wait: bool,
    nodes: Nodes | None,
) -> tuple[dict[str, Any], str]:
    """Run the stage process to its end and publish; returns the new record and the name of its MLflow run."""
    workdir = home.work_dir(p.key)
    old, forced = records.read(p.key), read_json(workdir / "forced.json", {}).get("unit")
    if (force and old and forced in (None, old.get("forced"))) or (old and not force):
        shutil.rmtree(workdir)  # a forced or a damaged result starts afresh; an interrupted forced run continues
        workdir.mkdir(parents=True)
    if force:
        atomic_write_json(
            workdir / "forced.json", {"unit": uuid.uuid4().hex[:8]} | read_json(workdir / "forced.json", {})
        )
    attempt = work.begin(workdir, (flow_run or {}).get("run_id"), name_as)
    started = time.time()
    unit = outbox.unit_of(flow_run, label, p.key, read_json(workdir / "forced.json", {}).get("unit"))
    document = {
        "unit": unit,
        "type": "stage",
        "label": label,
        "stage": p.spec.name,
        "key": p.key,
        "seed": p.seed,
        "config": {**p.resolved, **p.config.effective()},
        "code": p.code,
        "git": records.git_commit(PROJECT_ROOT),
        "judges": p.spec.judges,
        "inputs": {n: input_entry(i) for n, i in p.inputs.items()},
        "workdir": str(workdir),
        "status": "RUNNING",
        "started": started,
        "cached": False,
        "owner": leases.owner(),
        "user": records.user(),
        "flow": outbox.flow_part(flow_run),
        "forced": force,
    }
    tracking.put(document)
    slots: list[leases.Lease] = []
    # a recipe, whose next steps will run, too
    if flow_run and not str(flow_run.get("recipe", "")).startswith("stage:"):
        processes.expect()
    try:
        try:
            result = _finished_result(workdir, p)
            if result is None:
                devices = devices_of(p.spec, devices)
                # before the devices: who has the group must not wait for those of who waits for it
                with shared(p.spec.parallel, partial(_for_others, p, label, devices)) as turn:
                    if turn is not None and (told := turn.leader.lost()):
                        raise _ended_with(p, told)
                    slots, device, environment = take_devices(p.spec, devices, wait, tell, engine_cards(p.config))
                    _refuse_changes(p, code=True)
                    group = turn or nodes
                    with _shown_to(group, p, workdir):
                        result = _process(p, workdir, lock, device, devices, environment, unit, tell, group)
            _refuse_changes(p)
            record = publish(p, workdir, result, label, name_as, started, attempt, flow_run)
        finally:  # before MLflow is waited for
            for slot in slots:
                slot.release()
    except BaseException as error:
        status = "FAILED" if isinstance(error, Exception) else "KILLED"
        with contextlib.suppress(OSError):  # on a full disk the error itself is what must be told
            if status == "FAILED":
                work.failed(workdir, error.told() if isinstance(error, StageError) else str(error))
            tracking.put(
                {**document, "status": status, "ended": time.time(), "error": str(error)[:4000] or type(error).__name__}
            )
            # else MLflow shows it as running until the next command
            tracking.flush(unit, _tracking_wait(), first=status == "FAILED")
        tell({"event": "ended", "status": status, "label": label, "key": p.key})
        raise
    tracking.put({**document, **projected(record), "status": "FINISHED", "ended": record["finished"]})
    work.tidy(workdir)
    return record, unit


def _refuse_changes(p: Prepared, code: bool = False) -> None:
    """Raise StageError where an input that lies outside the state directory is another one than the key says, since
    somebody wrote to it meanwhile; ``code``: or the stage's code (before it is started: while it waited for its turn),
    which is then what will run.
    """
    changed = [f"input {name} at {found.path}" for name, found in p.inputs.items() if not store.unchanged(found)]
    if code:
        sources.drop_stale_bytecode(import_closure(p.module)[0].values())
        if closure_digest(p.module, p.spec.resources) != p.code:
            changed.append("its code")
    if changed:
        raise StageError(
            p.spec.name,
            f"{' and '.join(changed)} changed while it {'waited' if code else 'ran'}, so its result would be known by"
            " what it was not made of. Give the same command again, which takes what is there"
            f" now{'' if code else '; or put the old content back first, and it goes on from what this run has done'}.",
            kind="StageFailure",
            key=p.key,
        )


def _finished_result(workdir: Path, p: Prepared) -> dict[str, Any] | None:
    """The result of a stage process that ended well while nobody was left to publish it."""
    result = _result_in(workdir)
    if not result or result.get("key") != p.key:
        return None
    plan = read_json(workdir / "publish.json", {})
    for name, output in result["outputs"].items():
        digest = plan.get(name, {}).get("digest")
        if not Path(output["path"]).is_dir() and not digest:
            return None
    return result


def _result_in(workdir: Path) -> dict[str, Any] | None:
    """What a stage process has left, its paths in this work directory: the state directory may have been moved or copied
    since the result, or the checkpoint that it went on from, was written.
    """
    if result := read_json(workdir / "result.json", None):
        for name, output in result["outputs"].items():
            output["path"] = str(workdir / "out" / name)
        for report in result["reports"]:
            report |= {k: str(workdir / "reports" / Path(report[k]).name) for k in REPORT_FILES if report.get(k)}
    return result


@contextlib.contextmanager
def _shown_to(nodes: Nodes | None, p: Prepared, workdir: Path) -> Iterator[None]:
    """Tell the other nodes that this one begins with a stage, and how it ended; what a lost node is to blame for is
    raised as that. Nothing without ``nodes``."""
    if nodes is None:
        yield
        return
    nodes.begin(workdir)
    failed: str | None = "it was stopped"
    try:
        yield
        failed = None
    except StageError as error:
        failed = nodes.blamed(workdir, error.message) or error.message
        if failed == error.message:
            raise
        raise _ended_with(p, failed) from error
    except ConfigError as error:
        failed = str(error)
        raise
    except _Published:
        failed = None
        raise
    finally:
        nodes.end(workdir, failed)


def _process(
    p: Prepared,
    workdir: Path,
    lock: leases.Lease | None,
    device: str,
    devices: int,
    environment: dict[str, str],
    unit: str,
    tell: Callable[[Event], None],
    nodes: Nodes | None = None,
    on_poll: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Start the stage's process and listen until it ends. Whatever ends this function ends everything it started."""
    if nodes is None or nodes.rank == 0:
        for name in ("publish.json", "result.json", work.PROGRESS):
            (workdir / name).unlink(missing_ok=True)
    spec = {
        "stage": p.module,
        "key": p.key,
        "config": p.resolved,
        "seed": p.seed,
        "device": (os.environ.get("POSTTRAIN_DEVICE") or device) if p.spec.gpu else device,
        "devices": devices,
        "inputs": {n: i.to_dict() for n, i in p.inputs.items()},
        "workdir": str(workdir),
    } | ({"nodes": nodes.spec()} if nodes else {})
    own = nodes.file if nodes else str
    spec_path, log_path = workdir / own("SPEC.json"), workdir / own("stage.log")
    atomic_write_json(spec_path, spec)
    given = {name: value for name, value in processes.environment(**environment).items() if name not in RANK_VARIABLES}
    error: Event | None = None
    done: Event | None = None
    with open(log_path, "ab") as log:
        begin = log.tell()
        child = None
        try:
            parent = processes.loaded(given, wait=p.spec.gpu, on_poll=raise_if_stopped)
            with signals_held():
                child = processes.start(str(spec_path), p.spec.name, given, log, parent)
            if lock is not None:
                lock.set_child(child.pid)
            tell({"event": "started", "pid": child.pid, "workdir": str(workdir), "log": str(log_path), "key": p.key})
            for event in _events(child, partial(_watch, p, workdir, nodes, on_poll) if nodes else lambda: None):
                kind = event.get("event")
                if kind == "error":
                    error = event
                elif kind == "done":
                    done = event
                else:
                    if kind in ("log", "warning"):
                        log.write(
                            f"[{kind}] {event.get('code', '')} {event.get('text', '')}\n".encode(
                                "utf-8", "backslashreplace"
                            )
                        )
                        log.flush()
                    if kind == "progress":
                        work.note_progress(workdir, event)
                    tell(event)
                    if unit:
                        tracking.poke(unit)
            code = child.wait()
        finally:
            if child is not None:
                processes.kill_tree(child)
                with contextlib.suppress(OSError):
                    if lock is not None:
                        lock.set_child(None)
    if code == 0 and nodes is not None and nodes.rank > 0:
        return {}
    result = _result_in(workdir)
    if code == 0 and done and result:
        return result
    tail = log_path.read_bytes()[begin:][-6000:].decode("utf-8", "replace")
    if error and error.get("type") == "ConfigError":
        raise ConfigError(error["message"])
    if error:
        raise StageError(
            p.spec.name,
            error["message"],
            kind=error["type"],
            tail="" if error["type"] in DELIBERATE else error.get("traceback") or tail,
            log_path=str(log_path),
            key=p.key,
        )
    raise StageError(p.spec.name, _how_it_ended(code), tail=tail, log_path=str(log_path), key=p.key)


def _watch(p: Prepared, workdir: Path, nodes: Nodes, more: Callable[[], None]) -> None:
    """Called while a node's ranks run: StageError where another node is gone."""
    more()
    if told := nodes.lost(workdir):
        raise _ended_with(p, told)


def _ended_with(p: Prepared, told: str) -> StageError:
    return StageError(
        p.spec.name,
        f"{told}; this node ended with it, and the same command on every node goes on from the last checkpoint",
        kind="StageFailure",
        key=p.key,
    )


class _Published(Exception):
    """Node 0 has the result that another node was about to help with."""


def _take_part(
    p: Prepared, nodes: Nodes, label: str, force: bool, tell: Callable[[Event], None], devices: int | None, wait: bool
) -> StageResult:
    """Node 1 and further: compute beside node 0 (wait for it where it has not begun), and give what it publishes."""
    workdir, before = home.work_dir(p.key), (records.read(p.key) or {}).get("finished") if force else None

    def published() -> dict[str, Any] | None:
        record = records.read(p.key)
        return records.find(p.key) if record is not None and record["finished"] != before else None

    def poll() -> None:
        if published() is not None:
            raise _Published

    if published() is None:
        _beside(p, nodes, devices_of(p.spec, devices), wait, tell, poll)
        while (record := published()) is None:
            raise_if_stopped()
            _watch(p, workdir, nodes, lambda: None)
            if (told := nodes.unpublished(workdir)) and published() is None:
                raise _ended_with(p, told)
            time.sleep(0.2)
    record = published()
    refs, paths = ({name: output[what] for name, output in record["outputs"].items()} for what in ("ref", "path"))
    return _told(_result(p, record, refs, paths, label, cached=False), tell)


def _beside(
    p: Prepared,
    nodes: Nodes,
    devices: int,
    wait: bool,
    tell: Callable[[Event], None],
    poll: Callable[[], None],
) -> None:
    """Run the ranks of node 1 or further to their end, or until ``poll`` raises :class:`_Published`."""
    slots, device, environment = take_devices(
        p.spec, devices, wait, tell, engine_cards(p.config), group=f"gpu-node{nodes.rank}"
    )
    try:
        tell(
            {
                "event": "log",
                "text": f"node {nodes.rank} of {nodes.count}: joins node 0 at {nodes.address}:{nodes.port}",
            }
        )
        workdir = home.work_dir(p.key)
        with contextlib.suppress(_Published), _shown_to(nodes, p, workdir):
            _process(p, workdir, None, device, devices, environment, "", tell, nodes, poll)
    finally:
        for slot in slots:
            slot.release()


def _for_others(p: Prepared, label: str, devices: int) -> dict[str, Any]:
    """What the nodes that take part in a stage of a recipe are told of it."""
    return {
        "label": label,
        "module": p.module,
        "key": p.key,
        "code": p.code,
        "config": p.resolved,
        "inputs": {name: one.to_dict() for name, one in p.inputs.items()},
        "seed": p.seed,
        "devices": devices,
    }


def _take_turn(turn: dict[str, Any], follower: Follower, tell: Callable[[Event], None]) -> None:
    """Compute beside node 0 what it tells of (:func:`_for_others`).

    Raises ConfigError where this machine would compute something else; and as :func:`run_stage`.
    """
    p = prepare(
        turn["module"], {name: one["ref"] for name, one in turn["inputs"].items()}, turn["config"], seed=turn["seed"]
    )
    if p.key != turn["key"]:
        other = [
            f"input {name} ({one['ref']})"
            for name, one in turn["inputs"].items()
            if name not in p.inputs or p.inputs[name].digest != one["digest"]
        ] + (["its code or a library (install the same version)"] if p.code != turn["code"] else [])
        raise ConfigError(
            f"stage {p.spec.name} is another one on this machine than on node 0:"
            f" {' and '.join(other) or 'its settings'} differ; give all nodes the same"
        )

    def poll() -> None:
        if follower.over(turn):
            raise _Published

    _beside(p, follower.nodes.anew(), turn["devices"], True, tell, poll)


def _result(
    p: Prepared, record: dict[str, Any], refs: dict[str, str], paths: dict[str, str], label: str, cached: bool
) -> StageResult:
    """What a record says, its outputs at these references and paths."""
    return StageResult(
        stage=p.spec.name,
        key=p.key,
        cached=cached,
        outputs=refs,
        paths=paths,
        metrics=record["metrics"],
        seconds=record["perf"].get("seconds", 0.0),
        warnings=record["warnings"],
        record_path=str(records.record_path(p.key)),
        perf=record["perf"],
        label=label,
        reports=record["reports"],
        versions=record["versions"],
    )


def _told(result: StageResult, tell: Callable[[Event], None]) -> StageResult:
    """The result, once its end is told."""
    tell(
        {
            "event": "cached" if result.cached else "finished",
            "stage": result.stage,
            "label": result.label,
            "key": result.key,
            "outputs": result.outputs,
            "metrics": result.metrics,
            "seconds": result.seconds,
            "mlflow_run_id": result.mlflow_run_id,
        }
    )
    return result


def _how_it_ended(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        more = (
            "; the kernel does that when memory runs out: use a smaller batch, or close other programs"
            if code == -signal.SIGKILL
            else ""
        )
        return f"its process was ended by {name}{more}"
    return f"its process ended with status {code} and no error message"


def _events(child: processes.Child, on_poll: Callable[[], None]) -> Iterator[Event]:
    """Events of a stage process as they come; ends when the process has closed its channel."""
    lines: queue.Queue[bytes | None] = queue.Queue()

    def read() -> None:
        for line in child.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, name="stage-events", daemon=True).start()
    while True:
        raise_if_stopped()
        on_poll()
        try:
            line = lines.get(timeout=1.0)
        except queue.Empty:
            if child.poll() is not None and lines.empty():
                line = _last_line(lines)
                if line is None:
                    return
            else:
                continue
        if line is None:
            return
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        # else it was printed, by what does not know that this is the stage's channel
        known = isinstance(event, dict) and "event" in event
        yield event if known else {"event": "log", "text": line.decode("utf-8", "replace").rstrip()}


def _last_line(lines: queue.Queue) -> bytes | None:
    """A process has ended but something it started may hold its channel open: give the reader a moment, then stop."""
    with contextlib.suppress(queue.Empty):
        return lines.get(timeout=2.0)
    return None


def _conclude(
    p: Prepared,
    record: dict[str, Any],
    cached: bool,
    unit: str,
    label: str,
    name_as: str | None,
    flow_run: dict[str, Any] | None,
    tell: Callable[[Event], None],
) -> StageResult:
    """Register models, note the stage in its flow run, bring MLflow up to date, and build the result."""
    names = names_of(p.spec, name_as)
    refs, paths, told = {}, {}, []
    for name, output in record["outputs"].items():
        refs[name], paths[name] = output["ref"], output["path"]
        published = name_of(names, name)
        if output["kind"] == "model":
            before = registry.models().get(published)
            registry.register(
                published,
                output["digest"],
                role=output["role"],
                stage=p.spec.name,
                key=p.key,
                run=(flow_run or {}).get("run_id") or "",
                user=records.user(),
                # models on the way to the one that the stage is for
                candidate=not p.spec.output_spec(name).many,
            )
            told += _taken_over(published, before)
        elif published != output["name"]:
            again = store.also_as(output["path"], output["digest"], published)
            refs[name], paths[name] = again.ref, again.path
        elif cached:
            store.set_latest(published, output["digest"])
    known = outbox.status(unit)
    if cached and (flow_run or known != "FINISHED"):
        entry = {
            "unit": unit,
            "type": "stage",
            "label": label,
            "stage": p.spec.name,
            "key": p.key,
            "seed": p.seed,
            "config": {**p.resolved, **p.config.effective()},
            "code": p.code,
            "git": record.get("git", ""),
            "judges": p.spec.judges,
            "inputs": {n: input_entry(i) for n, i in p.inputs.items()},
            "workdir": record["workdir"],
            "status": "FINISHED",
            "started": time.time(),
            "ended": time.time(),
            "cached": known in (None, "FINISHED"),
            "owner": leases.owner(),
            "user": records.user(),
            "flow": outbox.flow_part(flow_run),
            **projected(record),
        }
        tracking.put(entry)
    result = _result(p, record, refs, paths, label, cached)
    for warning in (told := told + (_asked_elsewhere(p, record) if cached else [])):
        tell({"event": "warning", **warning})
    result.warnings = [*result.warnings, *told]
    if flow_run and flow_run.get("run_id"):
        records.append_stage(
            flow_run["run_id"],
            {
                "label": label,
                "stage": p.spec.name,
                "module": p.module,
                "key": p.key,
                "cached": cached,
                "outputs": refs,
                "inputs": p.given,
                "config": p.resolved,
                "seed": p.seed,
                "name_as": name_as,
                "record": result.record_path,
                "metrics": record["metrics"],
                "seconds": result.seconds,
                "finished": time.time(),
            },
        )
    result.mlflow_run_id = tracking.flush(unit, timeout=_tracking_wait())
    return _told(result, tell)


def _taken_over(name: str, before: registry.ModelName | None) -> list[dict[str, str]]:
    """The warning of a name whose newest version was another user's: whoever asks for its candidate gets this one."""
    version = registry.models()[name].aliases.get("candidate")
    old = before.aliases.get("candidate") if before is not None else None
    if old is None or old == version:
        return []
    entry = before.versions[old]
    whose = entry.get("user") or (records.read(entry["key"]) or {}).get("user")
    if not whose or whose == records.user():
        return []
    return [
        {
            "code": "alias_taken_over",
            "text": (
                f"model:{name}@candidate was version {old}, which {whose} made, and is version {version} now, this one:"
                f" candidate is the newest version of a name. What is meant to read {whose}'s writes model:{name}/{old};"
                " to publish under a name of your own, run the stage with --name-as NAME."
            ),
        }
    ]


def _asked_elsewhere(p: Prepared, record: dict[str, Any]) -> list[dict[str, str]]:
    """The warning of a result that is reused and was made with servers at other addresses than are given now."""
    before = p.config.addresses(record["config"])
    moved = [
        f"{name}={url}, now {after}" for name, url in before.items() if url != (after := p.config.addresses().get(name))
    ]
    if not moved:
        return []
    return [
        {
            "code": "server_elsewhere",
            "text": (
                f"This result is reused and was made with {'; '.join(moved)}. What a server serves is known by the name"
                " of its model and not by its address: if another model answers there now, write its name"
                " (engine_model, endpoint_model), or run the stage again (--force)."
            ),
        }
    ]


# ------------------------------------------------------------------------------------------------------------------ small


def _tracking_wait() -> float:
    """Seconds that a stage that has ended waits for MLflow to know; what is not sent by then is sent later."""
    return float(os.environ.get("POSTTRAIN_TRACKING_WAIT_SECONDS", "5"))


def _teller(on_event: Callable[[Event], Any] | None) -> Callable[[Event], None]:
    """A listener that fails must not fail the stage: it is told of once and the stage goes on."""
    complained: list[str] = []

    def tell(event: Event) -> None:
        if on_event is None:
            return
        try:
            on_event(event)
        except Exception as error:
            if not complained:
                complained.append(str(error))
                print(
                    f"a listener of stage events failed ({type(error).__name__}: {error}); the stage goes on",
                    file=sys.stderr,
                )

    return tell


@contextlib.contextmanager
def _refusals_told(stage: str) -> Iterator[None]:
    """A full disk or missing rights are no defect of the stage: one sentence that says what to do, in place of a
    traceback.
    """
    try:
        yield
    except (StageError, ConfigError):
        raise
    except Exception as error:
        told = refusal(error)
        if told is None:
            raise
        raise StageError(stage, told, kind="StageFailure") from error
