"""What `ls`, `show`, `lineage` and `status` say, as plain JSON values and as text."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flows.config import nearest, scalar
from flows.display import headline, number, table
from flows.recipe import RECIPES, short
from stages.spec import ConfigError
from storage import leases, records, registry, store, work

KINDS = ("runs", "results", "datasets", "models", "stages", "recipes")


# ---------------------------------------------------------------- ls


def listing(what: str) -> list[dict[str, Any]]:
    """Rows of one kind, newest first where they have a time."""
    if what not in KINDS:
        near = nearest(what, list(KINDS))
        raise ConfigError(
            f"there is no list of {what!r}; "
            + (f"did you mean {near!r}? " if near else "")
            + f"write one of: {', '.join(KINDS)}"
        )
    return {
        "runs": runs,
        "results": results,
        "datasets": datasets,
        "models": models,
        "stages": stages,
        "recipes": recipes,
    }[what]()


def runs() -> list[dict[str, Any]]:
    rows = []
    for run in records.all_runs():
        data = run.data
        ended = data.get("finished") or time.time()
        rows.append(
            {
                "run": run.run_id,
                "recipe": data["recipe"],
                "status": run.status,
                "user": data.get("user") or "",
                "started": when(data["started"]),
                "minutes": (
                    round((ended - data["started"]) / 60, 1) if data.get("finished") or run.status == "RUNNING" else ""
                ),
                "steps": len(data["stages"]),
                "cached": sum(1 for entry in data["stages"] if entry["cached"]),
                "seed": data["config"].get("seed", ""),
                "now": (
                    "  ".join(f"{label} {progress_of(one)}".rstrip() for label, one in work.unfinished(run).items())
                    if run.status == "RUNNING"
                    else ""
                ),
            }
        )
    return rows


def results() -> list[dict[str, Any]]:
    """What every stage gave, of runs and by itself, and of what it failed, newest first; `show` takes the key."""
    of_runs = {run.run_id: run for run in records.all_runs()}
    rows = [
        (
            one.get("finished", 0),
            {
                "key": one["key"][:12],
                "stage": one["stage"],
                "label": one.get("label") or "",
                "user": records.user_of(one, of_runs),
                "status": "finished",
                "finished": when(one.get("finished")),
                "seconds": round(one["perf"].get("seconds", 0.0), 1),
                "outputs": " ".join(short(output["ref"]) for output in one["outputs"].values()),
                "numbers": headline(one["metrics"], 3),
            },
        )
        for one in records.all_records()
    ] + [
        (
            one["started"] + one["seconds"],
            {
                "key": one["key"][:12],
                "stage": one["stage"],
                "label": "",
                "user": records.user_of({"flow_run": one["run"], "user": one["user"]}, of_runs),
                "status": "failed" if one["error"] else one["status"],
                "finished": "",
                "seconds": round(one["seconds"], 1),
                "outputs": "",
                "numbers": (one["error"] or progress_of(one)).partition("\n")[0],
            },
        )
        for one in work.without_result()
    ]
    return [row for _, row in sorted(rows, key=lambda row: -row[0])]


def datasets() -> list[dict[str, Any]]:
    from storage.datasets import open_dataset

    rows = []
    for name in store.dataset_names():
        latest = store.latest_of(name)
        for digest in store.dataset_versions(name):
            if store.removed("dataset", name, digest):  # by a process that was killed before it had finished
                continue
            manifest = open_dataset(store.dataset_path(name, digest)).manifest
            rows.append(
                {
                    "ref": f"dataset:{name}@{digest[:12]}",
                    "latest": "latest" if digest == latest else "",
                    "kind": manifest["kind"],
                    "rows": manifest["rows"],
                    "splits": " ".join(f"{split}:{count}" for split, count in (manifest.get("splits") or {}).items()),
                }
            )
    return rows


def models() -> list[dict[str, Any]]:
    return [
        {
            "ref": f"model:{name.name}/{version}",
            "aliases": " ".join(sorted(a for a, v in name.aliases.items() if v == version)),
            "role": entry.get("role", ""),
            "stage": entry.get("stage", ""),
            "digest": "m-" + entry["digest"][:12],
            "registered": when(entry.get("time")),
            "files": "" if store.model_path(entry["digest"]).is_dir() else "gone",
        }
        for name in registry.models().values()
        for version, entry in sorted(name.versions.items(), reverse=True)
    ]


def stages() -> list[dict[str, Any]]:
    from stages.registry import STAGES, get_stage

    rows = []
    for name in STAGES:
        spec = get_stage(name).SPEC
        rows.append(
            {
                "stage": name,
                "gpu": "gpu" if spec.gpu else "",
                "what": first_line(get_stage(name).__doc__),
                "outputs": " ".join(f"{name}.LABEL" if one.many else name for name, one in spec.outputs.items()),
                "inputs": " ".join(
                    (key + ("…" if one.many else "")) if one.required else f"[{key}]"
                    for key, one in spec.inputs.items()
                ),
            }
        )
    return rows


def recipes() -> list[dict[str, Any]]:
    from flows.config import presets
    from flows.recipe import get_recipe

    return [
        {
            "recipe": name,
            "what": first_line(get_recipe(name).description),
            "presets": " ".join(presets(name)),
            "sections": " ".join(sections(get_recipe(name).config_type)),
        }
        for name in RECIPES
    ]


def sections(config_type) -> list[str]:
    from pydantic import BaseModel

    return [
        key
        for key, field in config_type.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    ]


def first_line(text: str | None) -> str:
    """The first paragraph of a docstring as one line, without the module's own name before it and catalogue IDs in
    brackets.
    """
    line = " ".join((text or "").strip().partition("\n\n")[0].split())
    head, sign, rest = line.partition(": ")
    return re.sub(r" \((``|[a-z]+\.[a-z_]+)[^)]*\)", "", rest if sign and head.islower() and " " not in head else line)


def when(seconds: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else ""


# ---------------------------------------------------------------- show


def describe(text: str) -> dict[str, Any]:
    """A run (its id), a stage (its key), finished or not, or a dataset or model (ref, KEY:OUTPUT or path)."""
    text = store.pinned(text)
    if not store.is_ref(text) and not Path(text).exists():
        try:
            run = records.get_run(text)
        except store.StoreError as error:
            found = records.match(text) if len(text) >= 6 else None
            if found:
                return {"what": "stage", **found}
            if len(text) >= 6 and (found := work.match(text)):
                return {"what": "unfinished stage", **found, "go_on": go_on(found)}
            raise ConfigError(str(error)) from None
        return {"what": "run", **run.data, "status": run.status, **so_far(run)}
    if Path(text).is_dir() and not (store.is_dataset_dir(text) or store.is_model_dir(text)):
        raise ConfigError(
            f"{text} is a directory without the manifest.json of a dataset and without the config.json of a model; write"
            " a ref (`posttrain ls datasets`, `posttrain ls models`), a run, or the directory of one of them"
        )
    try:
        found, gone = store.resolve(text), False
        makers = records.makers_of(found.digest)
    except store.StoreError:
        if not (makers := records.makers_of_lost(text)):
            raise
        digest, gone = records.digest_of(text), True
        output = next(one for one in makers[0]["outputs"].values() if one["digest"] == digest)
        found = store.ResolvedInput(output["kind"], output["path"], output["ref"], digest, output["manifest"] or {})
    value = {
        "what": found.kind,
        **found.to_dict(),
        "gone": gone,
        "manifest": found.manifest,
        "made_by": maker(makers[0]) if makers else None,
        "used_by": [
            {"stage": one["stage"], "key": one["key"], "label": one.get("label")}
            for one in records.users_of(found.digest)
        ],
    }
    if found.manifest.get("kind") == "quarantine/1" and not gone:
        value["quarantined"] = quarantined(found.path)
    if found.kind == "model":
        value["names"] = [
            {
                "name": name,
                "version": version,
                "aliases": aliases,
                "history": registry.history_of(name, version),
            }
            for name, version, aliases in registry.names_of(found.digest)
        ]
        value["judged_by"] = [
            {"stage": one["stage"], "key": one["key"], "metrics": one["metrics"]}
            for one in records.users_of(found.digest)
            if one["stage"] == "evaluate"
        ]
    return value


def go_on(one: dict[str, Any]) -> str | None:
    """The command that goes on with what was stopped (:func:`storage.work.standing`); None of what is not, and of what
    no command of this checkout makes.
    """
    if one["status"] != "stopped" or "module" not in one:  # its process had not started: nothing to go on with
        return None
    if one["run"] and not of_one_stage(one["run"]):
        return f"posttrain rerun {one['run'][:8]}"
    inputs = {
        name: given["ref"] if store.is_ref(given["ref"]) else given["path"] for name, given in one["inputs"].items()
    }
    return stage_command(one, inputs)


def repeats(run: records.RunRecord) -> str | None:
    """The command that repeats, or goes on with, a run of one stage from its deployment; None where no command of this
    checkout does, and where it had not begun.
    """
    for one in run.data["stages"]:
        if not one["label"].partition(".")[2]:  # not what was ingested or merged for it
            return stage_command(one, one["inputs"])
    return next((command for one in work.unfinished(run).values() if (command := go_on(one))), None)


def stage_command(one: dict[str, Any], inputs: dict[str, str]) -> str | None:
    """`posttrain stage` with what a stage was run with, of ``one`` {stage, module, config, seed, name_as}; None where
    no stage of this checkout takes these settings.
    """
    from pydantic import ValidationError

    from stages.registry import get_stage
    from storage.lineage import flat

    name = one["stage"] if one["module"].startswith("stages.") else one["module"]
    try:
        config = get_stage(name).SPEC.config.model_validate(one["config"])
    except (ConfigError, ValidationError):  # a newer or older version's
        return None
    chosen = config.model_dump(mode="json", exclude_defaults=True)
    words = ["posttrain", "stage", name]
    for key, given in inputs.items():
        words += ["--input", f"{key}={given}"]
    for key, value in flat(chosen):
        plain = isinstance(value, str) and scalar(value) == value
        words += ["--set", f"{key}={value if plain else json.dumps(value, ensure_ascii=False)}"]
    words += ["--seed", str(one["seed"])] if one["seed"] else []
    words += ["--name-as", one["name_as"]] if one["name_as"] else []
    return shlex.join(words)


def of_one_stage(run_id: str) -> bool:
    """Whether a run is that of one stage, from its deployment: `posttrain rerun` repeats recipes."""
    try:
        return str(records.get_run(run_id).data["recipe"]).startswith("stage:")
    except store.StoreError:
        return False


def so_far(run: records.RunRecord) -> dict[str, Any]:
    """What is known of a run beside the stages that it has finished: {unfinished: rows {label, stage, key, status,
    error, started, seconds, progress, answers, step, metrics, metric_steps, log, go_on}, next: the steps after those (None:
    not known), cost: {item: units}}.
    """
    from flows.ledger import cost_rows
    from storage import costs

    begun = work.unfinished(run)
    shown = (
        *("stage", "key", "status", "error", "started", "seconds"),
        *("progress", "answers", "step", "metrics", "metric_steps", "log"),
    )
    return {
        "unfinished": [
            {"label": label, **{name: one[name] for name in shown if name in one}, "go_on": go_on(one)}
            for label, one in begun.items()
        ],
        "next": [] if run.status == "FINISHED" else steps_left(run, begun),
        "cost": costs.totals(cost_rows(run, {}))["items"],
    }


def steps_left(run: records.RunRecord, begun: dict[str, Any]) -> list[str] | None:
    """The steps that a run has not come to, in their order; None where its recipe does not say (a newer or older
    version's, or one whose path depends on numbers that are not there yet).
    """
    from flows.recipe import Outline, get_recipe, load_config

    if run.data["recipe"].startswith("stage:"):
        return []
    try:
        outline = Outline(run)
        get_recipe(run.data["recipe"]).method(outline, load_config(run.data["recipe"], run.data["config"]))
    except Exception:  # for the eye only
        return None
    return [label for label in outline.left if label not in begun]


def progress_of(one: dict[str, Any]) -> str:
    """How far an unfinished stage is, as `120/400`; empty where it has not said."""
    progress = one.get("progress") or {}
    if one["status"] == "waiting":
        return "waits"
    if progress.get("total"):
        return f"{number(progress['done'])}/{number(progress['total'])}"
    return f"step {one['step']}" if one.get("step") is not None else ""


def quarantined(path: str, samples: int = 3) -> list[dict[str, Any]]:
    """Why rows were refused, most frequent reason first: {code, rows, samples: [{source_file, line_no, codes,
    raw_json}]}. A row that was refused for several reasons counts under each."""
    from storage.datasets import open_dataset

    found: dict[str, dict[str, Any]] = {}
    for row in open_dataset(path).iter_rows(columns=["source_file", "line_no", "codes", "raw_json"]):
        for code in row["codes"]:
            entry = found.setdefault(code, {"code": code, "rows": 0, "samples": []})
            entry["rows"] += 1
            if len(entry["samples"]) < samples:
                entry["samples"].append(dict(row))
    return sorted(found.values(), key=lambda entry: -entry["rows"])


def maker(record: dict[str, Any]) -> dict[str, Any]:
    return {
        key: record.get(key)
        for key in (
            "stage",
            "label",
            "key",
            "config",
            "effective",
            "seed",
            "inputs",
            "warnings",
            "metrics",
            "perf",
            "git",
            "user",
            "host",
            "versions",
            "mlflow",
            "finished",
        )
    }


def print_description(value: dict[str, Any]) -> None:
    what = value["what"]
    if what == "run":
        ended = value.get("finished") or (time.time() if value["status"] == "RUNNING" else None)
        print(
            f"run {value['run_id']}  {value['recipe']}  {value['status']}  begun {when(value['started'])}"
            + (f" by {value['user']}" if value.get("user") else "")
            + (", whose worker ran it for a deployment" if (value.get("prefect") or {}).get("worker_of") else "")
            + (f", {(ended - value['started']) / 60:.1f} minutes" if ended else "")
            + (f"\n{value['error']}" if value.get("error") else "")
        )
        if (value.get("prefect") or {}).get("url"):
            print(value["prefect"]["url"])
        rows = [
            {
                "step": one["label"],
                "stage": one["stage"],
                "how": "cached" if one["cached"] else f"{one['seconds']:.1f} s",
                "key": one["key"][:12],
                "outputs": " ".join(short(ref) for ref in one["outputs"].values()),
                "numbers": headline(one["metrics"], 3),
            }
            for one in value["stages"]
        ]
        if rows or not value["unfinished"]:
            table(rows)
        return _print_so_far(value)
    if what == "unfinished stage":
        print(f"stage {value['stage']}  key {value['key']}")
        _print_unfinished(value)
        return print(f"  go on   {value['go_on']}") if value["go_on"] else None
    if what == "stage":
        print(f"stage {value['stage']}  key {value['key']}")
        return _print_maker(value)
    print(f"{what} {value['ref']}\n  at      {value['path']}\n  digest  {value['digest']}")
    if value["gone"]:
        print(f"  gone    its files; from what is known of it: posttrain rerun {value['ref']}")
    for one in value.get("names") or []:
        print(
            f"  named   model:{one['name']}/{one['version']}"
            + (f" ({', '.join(one['aliases'])})" if one["aliases"] else "")
        )
        for line in one["history"]:
            print(f"  alias   {line}")
    manifest = value.get("manifest") or {}
    if manifest:
        print(
            f"  kind    {manifest['kind']}, {manifest['rows']:,} rows  "
            + "  ".join(f"{k} {v:,}" for k, v in (manifest.get("splits") or {}).items())
        )
        for key, count in (manifest.get("counts") or {}).items():
            if isinstance(count, (int, float)):
                print(f"  count   {key}: {number(count)}")
    for reason in value.get("quarantined") or []:
        print(f"  refused {reason['code']}: {reason['rows']:,} rows, for example")
        for row in reason["samples"]:
            raw = row["raw_json"] if len(row["raw_json"]) <= 120 else row["raw_json"][:117] + "..."
            print(f"          {row['source_file']}:{row['line_no']}  {raw}")
    if value["made_by"]:
        print(f"made by stage {value['made_by']['stage']} ({value['made_by']['key'][:12]})")
        _print_maker(value["made_by"])
    for one in value.get("used_by") or []:
        print(f"used by {one['stage']} ({one['key'][:12]})")


def _print_so_far(value: dict[str, Any]) -> None:
    """What a run does now or where it stopped, what comes next and what it has cost."""
    for one in value["unfinished"]:
        print(f"\nstep {one['label']}" + (f"  stage {one['stage']}" if one["stage"] != one["label"] else ""))
        _print_unfinished(one)
    if value["status"] == "FINISHED":
        return
    print()
    if value["next"] is None:
        print("next      not known before this is done")
    elif value["next"]:
        print(f"next      {', '.join(value['next'])}")
    if value["cost"]:
        print(
            "so far    "
            + ", ".join(f"{number(n)} {item}" for item, n in value["cost"].items())
            + f"; in full: posttrain cost {value['run_id'][:8]}"
        )
    if value["status"] not in ("KILLED", "FAILED"):
        return
    if not value["recipe"].startswith("stage:"):
        print(f"go on     posttrain rerun {value['run_id'][:8]}")
    for one in value["unfinished"] if value["recipe"].startswith("stage:") else ():
        if one["go_on"]:
            print(f"go on     {one['go_on']}")


def _print_unfinished(one: dict[str, Any]) -> None:
    how = {"running": "runs", "waiting": "waits for its turn", "stopped": "stopped"}[one["status"]]
    print(
        f"  {how:<7} since {when(one['started'])}, {one['seconds'] / 60:.1f} minutes"
        if one["status"] != "stopped"
        else f"  stopped after {one['seconds'] / 60:.1f} minutes, begun {when(one['started'])}"
    )
    if one.get("error"):
        print("  error   " + one["error"].replace("\n", "\n          "))
    progress = one.get("progress") or {}
    if progress.get("total"):
        print(f"  at      {progress_of(one)} {progress.get('message') or ''}".rstrip())
    if one.get("answers"):
        print(f"  answers {one['answers']:,} of servers are kept and not asked for again")
    if one.get("step") is not None:
        print(f"  step    {one['step']}")
        for name, value in sorted(one["metrics"].items()):
            at = one["metric_steps"][name]
            print(f"  number  {name} = {number(value)}" + (f" (of step {at})" if at != one["step"] else ""))
    if one.get("user"):
        print(f"  user    {one['user']}")
    print(f"  key     {one['key'][:12]}")
    if one.get("log"):
        print(f"  log     {one['log']}")


def _print_maker(record: dict[str, Any]) -> None:
    for name, one in (record.get("inputs") or {}).items():
        print(f"  from    {name} = {short(one.get('given') or one['ref'])}")
    for warning in record.get("warnings") or []:
        print(f"  warning {warning['code']}: {warning['text']}")
    settings = {**(record.get("config") or {}), **(record.get("effective") or {})}
    rows = list(settings_of(record["stage"], settings))
    for default in (False, True):  # what was chosen, or follows from a preset that was, comes first
        for key, value, is_default in rows:
            if is_default is default:
                print(f"  {'default' if default else 'config '} {key} = {value}")
    for key, metric in sorted((record.get("metrics") or {}).items()):
        print(f"  number  {key} = {number(metric)}")
    if (record.get("mlflow") or {}).get("url"):
        print(f"  mlflow  {record['mlflow']['url']}")
    if record.get("git"):
        print(f"  code    {record['git']}")
    if record.get("user"):
        print(f"  by      {record['user']} on {record['host']}, {when(record.get('finished'))}")


def settings_of(stage: str, settings: dict[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """(name, value, whether it is the default) of a record's settings: `section.key`, `rewards[0].weight`. Of a stage
    that is not in the table all count as chosen.
    """
    from pydantic import ValidationError

    from stages.registry import STAGES, get_spec

    config = get_spec(stage).config if stage in STAGES else None
    defaults = dict(_leaves(config.model_construct().model_dump(mode="json"))) if config else {}
    try:  # elements of lists have defaults of their own
        known = {name: value for name, value in settings.items() if config and name in config.model_fields}
        whole = config.model_validate(known) if config else None
    except (ConfigError, ValidationError):  # of another version
        whole = None
    chosen = dict(_leaves(whole.model_dump(mode="json", exclude_defaults=True))) if whole else None
    for name, value in _leaves(settings):
        inside = "[" in name and chosen is not None and name not in chosen
        yield name, value, inside or name in defaults and defaults[name] == value


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _leaves(one, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
        for at, one in enumerate(value):
            yield from _leaves(one, f"{name}[{at}]")
    else:
        yield name, value


# ---------------------------------------------------------------- lineage


def lineage(ref: str) -> dict[str, Any]:
    from storage.lineage import tree

    return tree(ref)


def print_lineage(node: dict[str, Any]) -> None:
    from storage.lineage import lines

    print("\n".join(lines(node)))


# ---------------------------------------------------------------- status


def status(state: Path) -> dict[str, Any]:
    """Servers with their health, running runs, stages that run by themselves, holders of GPU slots."""
    from flows import services

    alive = services.running(state)
    health = {"prefect": "/api/health", "mlflow": "/health"}
    servers = {}
    for name in ("prefect", "mlflow", "worker"):
        entry = alive.get(name)
        servers[name] = {
            "running": entry is not None,
            "url": (entry or {}).get("url"),
            "pid": (entry or {}).get("pid"),
            "answers": services.answers(entry["url"] + health[name]) if entry and name in health else None,
        }
    return {
        "home": str(state),
        "servers": servers,
        "runs": [row for row in runs() if row["status"] == "RUNNING"],
        "stages": alone(),
        "gpu": [{"slot": one["slot"], "pid": one["pid"], "host": one["host"]} for one in leases.gpu_holders()],
    }


def alone() -> list[dict[str, Any]]:
    """The stages that run now and belong to no run."""
    of_runs = {
        one["key"]
        for run in records.all_runs()
        if run.status == "RUNNING"
        for one in run.data.get("begun", {}).values()
    }
    return [
        {
            "key": one["key"][:12],
            "stage": one["stage"],
            "user": one["user"],
            "started": when(one["started"]),
            "now": progress_of(one),
        }
        for one in work.running()
        if one["key"] not in of_runs
    ]


def print_status(value: dict[str, Any]) -> None:
    print(f"state in {value['home']}")
    for name, one in value["servers"].items():
        if not one["running"]:
            print(f"{name:<8} not running")
        else:
            print(
                f"{name:<8} {one['url'] or 'running'} (process {one['pid']})"
                + ("" if one["answers"] in (True, None) else "  DOES NOT ANSWER")
            )
    if value["runs"]:
        table(value["runs"], "running")
    if value["stages"]:
        table(value["stages"], "running by themselves")
    for one in value["gpu"]:
        print(f"GPU slot {one['slot']} held by process {one['pid']}")
