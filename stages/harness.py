"""The child side of a stage: all that a stage's ``run(stage)`` knows about the world.

A stage process (``stages.running.process``) reads SPEC.json::

    {"stage", "key", "config", "seed", "device", "inputs": {name: {"kind", "path", "ref", "digest"}}, "workdir"}

speaks JSON lines on stdout ({"event": "progress" | "metric" | "perf" | "log" | "warning" | "output" | "report" |
"summary" | "done" | "error", ...}) and leaves in its work directory

    metrics.jsonl   step metrics, deterministic: byte-identical however often the process was killed
    perf.jsonl      wall-clock measurements, never part of an output
    checkpoints/    complete checkpoints only (storage/checkpoints.py)
    answers/        what servers answered that no checkpoint holds yet (stages/running/journal.py)
    out/<name>/     finished outputs        reports/  figures, tables, texts
    result.json     written last: outputs, summary, warnings, peak memory

Everything that was announced before the last complete checkpoint is restored on resume; everything after it is
undone first, so a resumed run repeats it exactly.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import shutil
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Iterator

from stages import advise
from stages.models import memory
from stages.registry import get_stage
from stages.running import journal, parallel, randomness, remembered, usage
from stages.spec import ConfigError, StageConfig, StageSpec, parse_config
from storage.checkpoints import Checkpoint, Checkpoints
from storage.files import atomic_write_bytes, atomic_write_json, atomic_write_text, fsync_tree, link_tree, read_json

PROGRESS_SECONDS = 0.5


class StageFailure(RuntimeError):
    """A stage's own, deliberate failure: the text alone is what the user needs, no traceback."""


@dataclass(frozen=True)
class Input:
    """One input as the stage sees it: ``path`` is local (or an fsspec URL for a dataset), ``digest`` its content."""

    name: str
    kind: str
    path: str
    ref: str = ""
    digest: str = ""


@dataclass
class _State:
    """What the harness itself must restore on resume."""

    summary: dict[str, Any] = field(default_factory=dict)
    warnings: list[dict[str, str]] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)


class Stage:
    """Given to ``run(stage)``: inputs, config, seeded randomness, progress, metrics, checkpoints, outputs."""

    def __init__(self, module: ModuleType, spec: dict[str, Any], emit: Callable[[dict[str, Any]], None]):
        self._module = module
        self._emit_event = emit
        self.spec: StageSpec = module.SPEC
        self.name = self.spec.name
        self.key: str = spec.get("key") or "by-hand"
        self.config: StageConfig = parse_config(self.spec, spec.get("config"))
        self.seed = int(spec.get("seed") or 0)
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._device, self._settled = spec.get("device") or "auto", False
        self.workdir = Path(spec["workdir"]).absolute()
        self.workdir.mkdir(parents=True, exist_ok=True)
        self.inputs: dict[str, Input] = {}
        for name, given in (spec.get("inputs") or {}).items():
            declared = self.spec.input_spec(name)
            values = {"path": given} if isinstance(given, str) else given
            self.inputs[name] = Input(
                name,
                values.get("kind") or declared.kind,
                str(values["path"]),
                values.get("ref") or "",
                values.get("digest") or "",
            )
        self.spec.check_inputs(self.inputs, self.config)
        self.checkpoints = _ResumableCheckpoints(self)
        self._writers: dict[str, Any] = {}
        self._state = _State()
        self._last_progress = 0.0
        self._perf: dict[str, list[float]] = {}
        self._used: dict[str, float] = {}
        self._ranks: list[tuple[dict, dict]] | None = (
            None  # what each used and remembers, for the checkpoint that follows
        )
        self._metrics_path = self.workdir / "metrics.jsonl"
        self._perf_path = self.workdir / "perf.jsonl"
        self._restored = self.checkpoints._find() if self.rank == 0 else None
        self._restore(self._restored)

    # -- inputs ------------------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether an (optional) input was given."""
        return name in self.inputs

    def path(self, name: str) -> str:
        """Local path (or URL) of an input; ConfigError when it was not given."""
        if name not in self.inputs:
            raise ConfigError(
                f"stage {self.name}: input {name!r} is needed with these settings; give it as --input"
                f" {name}=REF_OR_PATH"
            )
        return self.inputs[name].path

    def dataset(self, name: str) -> Any:
        """An input opened as ``storage.datasets.Dataset``; its row kind is checked against the declaration."""
        from storage.datasets import open_dataset

        data = open_dataset(self.path(name))
        kinds = self.spec.input_spec(name).kinds
        if kinds and data.kind not in kinds:
            raise ConfigError(
                f"stage {self.name}: input {name!r} holds rows of kind {data.kind}, but {' or '.join(kinds)} is needed;"
                f" convert it with the ingest stage (kind={kinds[0]}) or give another dataset"
            )
        return data

    def many(self, name: str) -> dict[str, Input]:
        """Inputs of a ``many`` declaration: label -> Input (label ``""`` when given without one)."""
        return {n[len(name) + 1 :]: i for n, i in self.inputs.items() if n == name or n.startswith(name + ".")}

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda[:i]``; ``auto`` in the spec means CUDA when torch can use a device. On several devices,
        ``cuda`` with or without a number is each rank's own.

        Raises:
            ConfigError: several devices were given, and torch cannot use them (with one: a warning, and the CPU).
        """
        own = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        if self._device == "auto":
            import torch

            self._device = own if torch.cuda.is_available() else "cpu"
            if self._device == "cpu" and (cards := os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()) not in (
                "",
                "-1",
            ):
                from stages.running import cuda

                if self.world_size > 1:
                    raise ConfigError(
                        f"devices={self.world_size}: {cuda.unusable(cards)} CUDA_VISIBLE_DEVICES= (empty) trains on the"
                        " CPU."
                    )
                self.warn("gpu_unusable", f"This stage runs on the CPU: {cuda.unusable(cards)}")
        if self._device.startswith("cuda") and not self._settled:
            from stages.running import cuda

            if self.world_size > 1:  # two ranks on one GPU are an error of NCCL
                self._device = own
            cuda.settle(self._device)
            self._settled = True
        return self._device

    # -- randomness --------------------------------------------------------------------------------------------------

    def rng(self, purpose: str, *counters: Any) -> Any:
        """A ``numpy.random.Generator`` that depends only on (seed, stage, purpose, counters)."""
        return randomness.rng(self.seed, self.name, purpose, *counters)

    def seed_for(self, purpose: str, *counters: Any) -> int:
        """A 63-bit integer that depends only on (seed, stage, purpose, counters)."""
        return randomness.seed_for(self.seed, self.name, purpose, *counters)

    # -- telling -----------------------------------------------------------------------------------------------------

    def emit(self, event: str, **fields: Any) -> None:
        """Send one event line (rank 0 only)."""
        if self.rank == 0:
            self._emit_event({"event": event, **fields})

    def progress(self, done: float, total: float | None, message: str = "") -> None:
        """How far the stage is, in any unit; at most two events per second, the last one always."""
        now = time.monotonic()
        if now - self._last_progress >= PROGRESS_SECONDS or (total is not None and done >= total):
            self._last_progress = now
            self.emit("progress", done=done, total=total, message=message)

    def metric(self, step: int, values: dict[str, float]) -> None:
        """Deterministic step metrics: the same numbers whenever this run is repeated. Wall-clock numbers go to
        :meth:`perf`.
        """
        self._append(self._metrics_path, "metric", step, values)

    def perf(self, step: int, values: dict[str, float]) -> None:
        """Measurements of speed and memory (``tokens_per_second``, ``steps_per_second``): kept apart from the
        metrics.
        """
        for name, value in values.items():
            self._perf.setdefault(name, []).append(float(value))
        self._append(self._perf_path, "perf", step, values)

    def summary(self, values: dict[str, Any]) -> None:
        """Final, deterministic metrics of the stage (merged over calls); they go into the record."""
        for name, value in values.items():
            self._state.summary[name] = _number(value)
        self.emit("summary", values=self._state.summary)

    def log(self, text: str) -> None:
        """A line for the run's log."""
        self.emit("log", text=str(text))

    def warn(self, code: str, text: str) -> None:
        """A named warning: shown in the log, kept in the record, tagged in MLflow. The same code and text counts
        once.
        """
        warning = {"code": code, "text": text}
        if warning not in self._state.warnings:
            self._state.warnings.append(warning)
            self.emit("warning", code=code, text=text)

    @property
    def warnings(self) -> list[dict[str, str]]:
        """The warnings so far, ``{"code", "text"}``, also those before a resume."""
        return list(self._state.warnings)

    def report(
        self,
        name: str,
        markdown: str | None = None,
        table: list[dict[str, Any]] | None = None,
        png: bytes | None = None,
    ) -> None:
        """Publish a text, a table (list of rows) and/or a figure (PNG bytes) under one name."""
        if self.rank != 0:
            return
        safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in name).strip(".-") or "report"
        folder = self.workdir / "reports"
        files: dict[str, str] = {}
        if markdown is not None:
            atomic_write_text(folder / f"{safe}.md", markdown)
            files["markdown"] = str(folder / f"{safe}.md")
        if table is not None:
            atomic_write_text(
                folder / f"{safe}.json",
                json.dumps([{k: _number(v) for k, v in row.items()} for row in table], ensure_ascii=False, indent=1)
                + "\n",
            )
            files["table"] = str(folder / f"{safe}.json")
        if png is not None:
            atomic_write_bytes(folder / f"{safe}.png", png)
            files["png"] = str(folder / f"{safe}.png")
        if not files:
            raise ValueError(f"report {name!r} is empty; give markdown=, table= or png=")
        entry = {"name": name, **files}
        self._state.reports = [r for r in self._state.reports if r["name"] != name] + [entry]
        self.emit("report", **entry)

    def _append(self, path: Path, event: str, step: int, values: dict[str, float]) -> None:
        if self.rank != 0:
            return
        clean = {str(k): _number(v) for k, v in values.items()}
        with open(path, "a", encoding="utf-8") as handle:
            handle.write(
                json.dumps({"step": int(step), "metrics": clean}, sort_keys=True, separators=(",", ":")) + "\n"
            )
        self.emit(event, step=int(step), metrics=clean)

    def total_usage(self) -> None:
        """Add up over the ranks what was used; every rank must call."""
        if self.world_size > 1:
            from stages.running import ranks

            ranks.connect(self.device)
            self._used = usage.total(ranks.gather(usage.so_far()))

    # -- outputs -----------------------------------------------------------------------------------------------------

    def _declared(self, name: str, kind: str) -> None:
        output = self.spec.output_spec(name)
        if output is None or output.kind != kind:
            names = [n + (".LABEL" if o.many else "") for n, o in self.spec.outputs.items() if o.kind == kind]
            raise ValueError(
                f"stage {self.name} declares no {kind} output {name!r}; its {kind} outputs are:"
                f" {', '.join(names) or 'none'}"
            )

    def writer(self, name: str, kind: str, **options: Any) -> Any:
        """An exactly-once Parquet writer (``storage.datasets.DatasetWriter``) for the declared dataset output ``name``.

        After a resume it continues behind the rows that the last checkpoint covers. ``close(counts)`` finishes it. Rank
        0 writes; what other ranks write is dropped.
        """
        from storage.datasets import DatasetWriter

        self._declared(name, "dataset")
        if self.rank != 0:
            return _Unwritten()
        path = self.workdir / "out" / name
        covered = self._checkpointed_writers().get(name)
        if covered is None and path.exists() and name not in self._writers:
            shutil.rmtree(path)
        options.setdefault("parents", [f"{i.name}:{i.digest}" for i in self.inputs.values() if i.digest])
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = DatasetWriter(str(path), options.pop("dataset_name", f"{self.name}-{name}"), kind, **options)
        if covered is not None:
            writer.truncate(covered["parts"])
        self._writers[name] = writer
        return writer

    @contextlib.contextmanager
    def output_model(self, name: str, role: str | None = None) -> Iterator[Path]:
        """A directory to save the declared model output into; it becomes visible when the block ends without an error.

        Rank 0 writes; other ranks get a path that does not exist.
        """
        self._declared(name, "model")
        if self.rank != 0:
            yield self.workdir / "out" / f".{name}.rank{self.rank}"
            return
        target = self.workdir / "out" / name
        tmp = self.workdir / "out" / f".{name}.tmp"
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)
        yield tmp
        if not any(tmp.iterdir()):
            raise ValueError(
                f"output model {name!r}: nothing was saved; call model.save_pretrained(directory) inside the block"
            )
        fsync_tree(tmp)
        if target.exists():
            shutil.rmtree(target)
        os.rename(tmp, target)
        self._state.outputs[name] = {
            "kind": "model",
            "path": str(target),
            "role": role or self.spec.output_spec(name).role,
        }
        self.emit("output", name=name, **self._state.outputs[name])

    def link_model(self, name: str, source: str | Path, role: str = "") -> None:
        """Give the declared model output ``name`` the files of a model directory, or of another output of this run: as
        hard links where they are the store's or this run's, whose files never change, else as copies.
        """
        found = Path(self._state.outputs.get(str(source), {}).get("path", source)).resolve()
        work = self.workdir.resolve()  # home/work/KEY, beside home/models
        ours = any(found.is_relative_to(place) for place in (work, work.parent.parent / "models"))
        with self.output_model(name, role) as directory:
            if self.rank == 0:
                link_tree(found, directory) if ours else shutil.copytree(found, directory, dirs_exist_ok=True)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def hear_ranks(self) -> None:
        """Have the checkpoint that follows hold what all ranks used and remember; every rank must call."""
        if self.world_size > 1:
            from stages.running import ranks

            ranks.gather(None)  # the first one has waited for what is sampled ahead, by all of them
            self._ranks = ranks.gather((usage.so_far(), remembered.so_far()))

    def save_checkpoint(
        self,
        step: int,
        state: dict[str, Any],
        files: dict[str, bytes | Callable[[Path], Any]] | None = None,
        together: bool = False,
    ) -> None:
        """Make everything so far permanent. ``step`` must not depend on the clock: open writers close their part here,
        and a resumed run must close the same parts.

        together: every rank calls and writes files of its own at the same time (a name that several give is written by
        the first of them); else only rank 0 writes. ``state`` is rank 0's.
        """
        if not together or self.world_size == 1:
            if self.rank == 0:
                self.checkpoints.save(step, state, files)
            return
        from stages.running import ranks

        files = files or {}
        given = ranks.gather((str(self.checkpoints.begin(step)) if self.rank == 0 else None, sorted(files)))
        folder, taken = Path(given[0][0]), {name for _, names in given[: self.rank] for name in names}
        written = ranks.gather(
            self.checkpoints.write(folder, {n: content for n, content in files.items() if n not in taken})
        )
        if self.rank == 0:
            self.checkpoints.commit(
                step, folder, state, {n: entry for listing in written for n, entry in listing.items()}
            )

    @property
    def units_done(self) -> int:
        """Units of work that the checkpoint of this start holds (the step of :meth:`save_checkpoint`); 0 where there is
        none. Parts of an output do not count them: a unit may leave no row, or more than one part."""
        return self._restored.step if self._restored else 0

    def _checkpointed_writers(self) -> dict[str, dict[str, Any]]:
        return dict(self._restored.state["harness"]["writers"]) if self._restored else {}

    def _harness_state(self) -> dict[str, Any]:
        writers = {name: dict(entry) for name, entry in self._checkpointed_writers().items()}
        for name, writer in self._writers.items():
            closed = (self.workdir / "out" / name / "manifest.json").exists()
            if not closed:
                writer.flush()
            writers[name] = {"parts": len(writer.parts), "closed": closed}
        used, known = zip(*(self._ranks or [(usage.so_far(), remembered.so_far())]))
        self._ranks, sizes = None, {}
        for path in (self._metrics_path, self._perf_path):
            sizes[path.name] = path.stat().st_size if path.exists() else 0
            if path.exists():
                with open(path, "rb") as handle:
                    os.fsync(handle.fileno())
        return {
            "writers": writers,
            "sizes": sizes,
            "summary": self._state.summary,
            "warnings": self._state.warnings,
            "reports": self._state.reports,
            "outputs": self._state.outputs,
            "usage": usage.total(used),
            "remembered": known,
        }

    def _restore(self, checkpoint: Checkpoint | None) -> None:
        """Undo everything that the checkpoint does not cover."""
        if self.rank != 0:
            return
        harness = checkpoint.state["harness"] if checkpoint else {}
        for path in (self._metrics_path, self._perf_path):
            size = harness.get("sizes", {}).get(path.name, 0)
            if path.exists():
                os.truncate(path, size)
        usage.begin(harness.get("usage"))
        remembered.begin(next(iter(harness.get("remembered", ())), None))
        self._state = _State(
            dict(harness.get("summary", {})),
            list(harness.get("warnings", [])),
            list(harness.get("reports", [])),
            dict(harness.get("outputs", {})),
        )
        (self.workdir / "result.json").unlink(missing_ok=True)
        out = self.workdir / "out"
        if out.is_dir():
            kept = set(self._state.outputs) | set(harness.get("writers", {}))
            for path in out.iterdir():
                if path.name not in kept:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        if checkpoint:
            self.log(f"resuming from the checkpoint of step {checkpoint.step}")
        if self.checkpoints.damaged:
            self.warn(
                "checkpoint_damaged",
                f"The checkpoint of step {max(self.checkpoints.damaged)} is not as it was written and was left out; "
                + (
                    f"work goes on from that of step {checkpoint.step}."
                    if checkpoint
                    else "work begins again from the start."
                )
                + " Check the disk where this happens again.",
            )

    def _accepts(self, checkpoint: Checkpoint) -> bool:
        """Whether the files beside a checkpoint still hold what it refers to."""
        harness = checkpoint.state.get("harness")
        if not isinstance(harness, dict):
            return False
        for name, size in harness["sizes"].items():
            path = self.workdir / name
            if size and (not path.exists() or path.stat().st_size < size):
                return False
        for name, entry in harness["writers"].items():
            folder = self.workdir / "out" / name
            if entry["closed"] and not (folder / "manifest.json").exists():
                return False
            if len(list(folder.glob("part-*.parquet"))) < entry["parts"]:
                return False
        return all(Path(entry["path"]).is_dir() for entry in harness["outputs"].values())

    # -- end ---------------------------------------------------------------------------------------------------------

    def finish(self, seconds: float) -> dict[str, Any]:
        """Check that every declared output is there and write ``result.json`` (the stage's last act)."""
        for name, declared in self.spec.outputs.items():
            if declared.kind != "dataset":
                continue
            path = self.workdir / "out" / name
            manifest = read_json(path / "manifest.json", None)
            if manifest is not None:
                self._state.outputs[name] = {
                    "kind": "dataset",
                    "path": str(path),
                    "role": "",
                    "digest": manifest.get("digest", ""),
                }
                self.emit("output", name=name, **self._state.outputs[name])
            elif name in self._writers:
                raise ValueError(
                    f"stage {self.name}: the writer of output {name!r} was never closed; call close() before run()"
                    " returns"
                )
        for name, declared in self.spec.outputs.items():
            if declared.required and name not in self._state.outputs:
                raise ValueError(
                    f"stage {self.name} ended without its output {name!r}; save it before run() returns, or declare it"
                    " with required=False"
                )
        used = self._used or usage.so_far()
        perf = {
            name: statistics.median(v) if name.endswith("_per_second") else v[-1] for name, v in self._perf.items() if v
        }
        # what a stage noted of its use was so far: validation at its end and other ranks ask judges too
        perf |= {name: used[name] for name in perf if name in used}
        perf["seconds"] = round(seconds, 3)
        perf |= {"devices": self.world_size} if self.world_size > 1 else {}
        perf["peak_memory_mib"] = peak_memory_mib()
        cuda = _cuda_peak_mib()
        if cuda is not None:
            perf["peak_gpu_memory_mib"] = cuda
        result = {
            "stage": self.name,
            "key": self.key,
            "outputs": {n: {k: v for k, v in e.items()} for n, e in sorted(self._state.outputs.items())},
            "summary": self._state.summary,
            "warnings": self._state.warnings,
            "reports": self._state.reports,
            "perf": perf,
            "usage": used,
            "resumed_from": self._restored.step if self._restored else None,
            "versions": _versions(),
        }
        atomic_write_json(self.workdir / "result.json", result)
        self.emit("done", **result)
        return result


class _Unwritten:
    """The writer of a rank that does not write."""

    parts: tuple = ()

    def write(self, rows: Any) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self, counts: dict[str, Any] | None = None) -> None:
        pass


class _ResumableCheckpoints(Checkpoints):
    """``stage.checkpoints``: as :class:`Checkpoints`, with the harness's own state saved and restored beside the
    stage's.
    """

    def __init__(self, stage: Stage):
        super().__init__(stage.workdir / "checkpoints", keep=2)
        self._stage, self._agreed = stage, False
        self.damaged: list[int] = []  # steps of checkpoints that were found and could not be used

    def _find(self) -> Checkpoint | None:
        found = super().latest(self._stage._accepts)
        self.damaged = [step for path in self._all() if (step := int(path.name[5:])) > (found.step if found else -1)]
        self.discard_after(found.step if found else None)
        return found

    def latest(self, accept: Callable[[Checkpoint], bool] | None = None) -> Checkpoint | None:
        """The checkpoint to continue from, its ``state`` as the stage gave it; None on a fresh start. Rank 0 has
        verified it; several ranks must ask together the first time."""
        stage = self._stage
        if stage.world_size > 1 and not self._agreed:
            from stages.running import ranks

            ranks.connect(stage.device)
            step = ranks.gather(stage._restored.step if stage._restored else None)[0]
            if stage.rank != 0:
                stage._restored = None if step is None else self.at(step)
                known = stage._restored.state["harness"].get("remembered", ()) if stage._restored else ()
                remembered.learn(dict(*known[stage.rank : stage.rank + 1]))
            self._agreed = True
        found = stage._restored
        return Checkpoint(found.step, found.state["stage"], found.path) if found else None

    def commit(self, step: int, folder: Path, state: dict[str, Any], listing: dict[str, dict[str, Any]]) -> Checkpoint:
        made = super().commit(step, folder, {"stage": state, "harness": self._stage._harness_state()}, listing)
        journal.settled(step, min(int(path.name[5:]) for path in self._all()))
        return made


# ------------------------------------------------------------------------------------------------------------- processes


def execute(spec: dict[str, Any], emit: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
    """Run a stage in this process (a debugger, a test, a notebook) and return its result. ``emit`` receives the
    events.
    """
    started = time.monotonic()
    # read at cuBLAS's first product: without it products may differ in their last bits
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    stage = Stage(get_stage(spec["stage"]), spec, emit or (lambda event: None))
    memory.size_micro_batches(stage)
    memory.check(stage)
    advise.tell(stage)
    before = parallel.telling.set(stage.progress)
    journal.begin(stage.workdir / "answers", stage.rank, stage.units_done, stage.config.model_dump(mode="json"))
    try:
        stage._module.run(stage)
    finally:
        journal.end()
        remembered.begin()
        parallel.telling.reset(before)
    stage.total_usage()
    return stage.finish(time.monotonic() - started) if stage.rank == 0 else {}


def peak_memory_mib() -> float:
    """Peak resident memory of this process or of its largest finished child, MiB."""
    unit = 1024 if sys.platform != "darwin" else 1024 * 1024
    return round(
        max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / unit, 1
    )


def _cuda_peak_mib() -> float | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return round(torch.cuda.max_memory_allocated() / 2**20, 1)


def _versions() -> dict[str, str]:
    from importlib import metadata

    found = {"python": sys.version.split()[0]}
    for name in ("torch", "transformers", "tokenizers", "numpy", "pyarrow", "datasets", "posttrain"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _number(value: Any) -> Any:
    """Plain JSON value of a number from numpy, torch or Python; texts and containers pass through."""
    if hasattr(value, "item") and not isinstance(value, (list, tuple, dict, str)):
        value = value.item()
    if isinstance(value, dict):
        return {str(k): _number(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_number(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # "nan", "inf": JSON has no form for them, and hiding them would be worse
    return value
