"""What `ls`, `show`, `status`, `lineage`, `promote` and `export` say, as plain JSON values and as text."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from flows.config import nearest, parse_sets, scalar
from flows.display import headline, number, table
from flows.recipe import RECIPES, short
from stages.spec import ConfigError, InputSpec
from storage import home, leases, records, registry, store, work
from storage.files import atomic_write_text

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
            {"name": name, "version": version, "aliases": aliases}
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
    from pydantic import ValidationError

    from stages.registry import get_stage
    from storage.lineage import flat

    if one["status"] != "stopped" or "module" not in one:  # its process had not started: nothing to go on with
        return None
    if one["run"] and not of_one_stage(one["run"]):
        return f"posttrain rerun {one['run'][:8]}"
    name = one["stage"] if one["module"].startswith("stages.") else one["module"]
    try:
        config = get_stage(name).SPEC.config.model_validate(one["config"])
    except (ConfigError, ValidationError):  # a newer or older version's
        return None
    chosen = config.model_dump(mode="json", exclude_defaults=True)
    words = ["posttrain", "stage", name]
    for key, given in one["inputs"].items():
        words += ["--input", f"{key}={given['ref'] if store.is_ref(given['ref']) else given['path']}"]
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
    error, started, seconds, progress, step, metrics, metric_steps, log, go_on}, next: the steps after those (None: not known), cost: {item:
    units}}.
    """
    from storage import costs

    begun = work.unfinished(run)
    shown = (
        *("stage", "key", "status", "error", "started", "seconds"),
        *("progress", "step", "metrics", "metric_steps", "log"),
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


# ---------------------------------------------------------------- what a stage would do


def stage_plan(name: str, inputs: dict[str, str], config: Any, seed: int, force: bool) -> dict[str, Any]:
    """What `posttrain stage NAME` would do, without doing it: {stage, config, seed, inputs: rows {input, ref, digest,
    kind, rows, splits}, plan: run, continue (what an earlier attempt left) or cached, key (None where raw data would be
    ingested first), outputs (of the record), unfinished, memory, advice, refused}.
    """
    from flows.recipe import Plan
    from stages.registry import get_stage
    from tasks.run import NotMadeYet, prepare

    spec = get_stage(name).SPEC
    plan = Plan(f"stage:{name}", seed, [name] if force else [])
    planned = plan.execute(name, name, inputs, config, None, seed)
    (row,), key = plan.table, None
    try:
        prepared = prepare(name, inputs, config, seed=seed, dry=True)
        given, key, config = prepared.inputs, prepared.key, prepared.config
    except NotMadeYet:
        given = {one: _as_given(text, spec.input_spec(one)) for one, text in inputs.items()}
    begun = work.standing(key) if key and not planned["cached"] and not force else None
    shown = ("status", "seconds", "progress", "step", "log")
    return {
        "stage": spec.name,
        "config": config.resolved(),
        "seed": seed,
        "inputs": [
            {
                "input": one,
                "ref": found.ref,
                "digest": found.digest,
                "kind": found.manifest.get("kind")
                or ("raw data, ingested first" if spec.input_spec(one).kind == "dataset" else found.kind),
                "rows": found.manifest.get("rows"),
                "splits": found.manifest.get("splits") or {},
            }
            for one, found in given.items()
        ],
        "plan": "continue" if begun else row["plan"],
        "key": key,
        "outputs": planned["outputs"] if planned["cached"] else {},
        "unfinished": begun and {one: begun[one] for one in shown},
        "memory": row.get("memory"),
        "advice": plan.advice,
        "refused": plan.refused,
    }


def _as_given(text: str, wanted: InputSpec) -> store.ResolvedInput:
    """What an input is before anything is made of it."""
    try:
        return store.resolve(text, wanted.kind, wanted.hub)
    except store.OnlyAdapter as adapter:
        digest = store.cached_digest(Path(adapter.path))
        return store.ResolvedInput(f"adapter, put into {adapter.base} first", adapter.path, text, digest)


def print_stage_plan(value: dict[str, Any], settings: Any) -> None:
    import yaml

    chosen = settings.model_dump(mode="json", exclude_defaults=True)
    print(f"stage {value['stage']}, seed {value['seed']}")
    print(yaml.safe_dump(chosen, sort_keys=False, allow_unicode=True) if chosen else "every setting at its default")
    print(
        f"(what stays at its default is left out; every setting: posttrain stage {value['stage']} --keys, every value:"
        " --dry-run --json)\n"
    )
    if value["inputs"]:
        table(
            [
                {
                    "input": one["input"],
                    "ref": short(one["ref"]),
                    "digest": one["digest"][:12],
                    "kind": one["kind"],
                    "rows": "" if one["rows"] is None else one["rows"],
                    "splits": " ".join(f"{split}:{count}" for split, count in one["splits"].items()),
                }
                for one in value["inputs"]
            ]
        )
        print()
    if value["plan"] == "cached":
        print("plan    nothing: a record exists and would be reused (--force executes it again)")
    elif begun := value["unfinished"]:
        what = "continue what was stopped" if begun["status"] == "stopped" else "wait for the process that runs it"
        print(f"plan    {what}, at {progress_of(begun) or 'its beginning'}")
    else:
        raw = any(one["kind"].startswith("raw data") for one in value["inputs"])
        first = ", once " + ("its raw data has been ingested" if raw else "its adapter has been put into the model")
        print("plan    run" + ("" if value["key"] else first))
    if value["key"]:
        print(f"key     {value['key'][:12]}")
    for name, ref in value["outputs"].items():
        print(f"output  {name}: {ref}")
    if value["memory"]:
        print(f"memory  {value['memory']}")
    for line in value["advice"]:
        print(f"advice  {line}")


# ---------------------------------------------------------------- lineage


def lineage(ref: str) -> dict[str, Any]:
    from storage.lineage import tree

    return tree(ref)


def print_lineage(node: dict[str, Any]) -> None:
    from storage.lineage import lines

    print("\n".join(lines(node)))


# ---------------------------------------------------------------- cost


def cost(what: str, prices_file: Path | None, against: str | None = None, metric: str = "accuracy") -> dict[str, Any]:
    """The ledger of a run (its own steps; those it found done had been paid for) or of a model or dataset (every stage
    behind it).
    """
    from storage import costs

    prices, run, unfinished, what = costs.prices_from(prices_file), None, [], store.pinned(what)
    if store.is_ref(what) or Path(what).exists():
        steps = [(record.get("label") or record["stage"], record, False) for record in costs.behind(what).values()]
        if not steps:
            raise ConfigError(f"{what} was brought from outside, so nothing here was paid for it")
    else:
        run = records.get_run(what)
        steps = costs.of_run(run)
        unfinished = [label for label, one in work.unfinished(run).items() if costs.so_far(one)]
    rows = (
        cost_rows(run, prices)
        if run
        else costs.ledger(costs.counted((label, record) for label, record, _ in steps), prices)
    )
    value = {
        "what": what,
        "ledger": rows,
        **costs.totals(rows),
        "reused": [label for label, _, reused in steps if reused],
        "unfinished": unfinished,
        "without_counts": [label for label, record, reused in steps if not reused and "usage" not in record],
    }
    if against is not None:
        if not what.startswith("model:"):
            raise ConfigError(
                f"--against compares two models by their evaluations, and {what} is none; write a model, such as"
                " model:policy@champion"
            )
        value["gain"] = costs.gain(what, against, metric, prices)
    return value


def cost_of_all(
    prices_file: Path | None, since: datetime | None, until: datetime | None, by: str = "user"
) -> dict[str, Any]:
    """The ledger of every stage that finished from ``since`` until before ``until`` (None: open), each once, whoever
    used it again: a row per item of what ``by`` says, user, recipe, stage or month.
    """
    from storage import costs

    of_runs, made = {run.run_id: run for run in records.all_runs()}, list(records.all_records())

    def group(record: dict[str, Any]) -> str:
        run = of_runs.get(record.get("flow_run") or "")
        return {
            "user": lambda: records.user_of(record, of_runs) or "unknown",
            "recipe": lambda: run.data["recipe"] if run else "single stages",
            "stage": lambda: record["stage"],
            "month": lambda: datetime.fromtimestamp(record["finished"]).strftime("%Y-%m"),
        }[by]()

    summed: dict[str, dict[str, float]] = {}
    # over all of them, so that a file's labels are paid for when they came
    for record, (name, counts) in zip(made, costs.counted((group(record), record) for record in made)):
        finished = datetime.fromtimestamp(record["finished"])
        if (since is None or finished >= since) and (until is None or finished < until):
            items = summed.setdefault(name, {})
            for item, n in counts.items():
                items[item] = items.get(item, 0.0) + n
    rows = costs.ledger(sorted(summed.items()), costs.prices_from(prices_file))
    return {"by": by, "ledger": rows, **costs.totals(rows), "reused": [], "unfinished": [], "without_counts": []}


def cost_rows(run: records.RunRecord, prices: dict[str, float]) -> list[dict[str, Any]]:
    """The ledger of a run: of the steps that it paid for, and of those that it has not finished until now."""
    from storage import costs

    counts = costs.counted((label, record) for label, record, reused in costs.of_run(run) if not reused)
    return costs.ledger(counts + [(label, costs.so_far(one)) for label, one in work.unfinished(run).items()], prices)


def totals_by(value: dict[str, Any]) -> dict[str, float]:
    """{user, recipe, stage or month: USD}; empty for the ledger of one run, model or dataset, and without prices."""
    found: dict[str, float] = {}
    for row in value["ledger"] if "by" in value else ():
        if row["total"] is not None:
            found[row["stage"]] = found.get(row["stage"], 0.0) + row["total"]
    return found


def print_cost(value: dict[str, Any]) -> None:
    from storage.costs import ITEMS

    if value["ledger"]:
        table(
            [
                {
                    value.get("by", "step"): row["stage"],
                    "item": row["item"],
                    "count": row["count"],
                    "unit": ITEMS[row["item"]][0],
                    "USD per unit": "" if row["unit_cost"] is None else row["unit_cost"],
                    "USD": "" if row["total"] is None else row["total"],
                }
                for row in value["ledger"]
            ]
        )
        print(
            "total   "
            + ", ".join(f"{number(n)} {item}" for item, n in value["items"].items())
            + ("" if value["total"] is None else f"; {number(value['total'])} USD")
        )
    else:
        print("nothing was paid for here" + (" yet" if value["unfinished"] else ""))
    for name, total in totals_by(value).items():
        print(f"{name}: {number(total)} USD")
    if value["unfinished"]:
        print(
            f"not finished, the hours of the last attempt until now: {', '.join(value['unfinished'])}; generated tokens"
            " and questions to judges are counted when a stage ends"
        )
    if value["unpriced"]:
        print(
            f"no price for {', '.join(value['unpriced'])}; give them with --prices FILE or in prices.yaml of the state"
            " directory"
        )
    if value["reused"]:
        print(f"found done, paid for by earlier runs: {', '.join(value['reused'])}")
    if value["without_counts"]:
        print(f"made by an older version, tokens and judge calls not counted: {', '.join(value['without_counts'])}")
    if "gain" in value:
        gain = value["gain"]
        print(
            f"{gain['metric']} {number(gain['model'])} against {number(gain['against'])}: gain {gain['gain']:+.4g}; per"
            " unit spent beyond the other model:"
        )
        table([{"item": item, "gain per unit": n} for item, n in gain["gain_per"].items()])


# ---------------------------------------------------------------- results of a run


def print_result(result: dict[str, Any], state: Path) -> None:
    """What a finished recipe run tells: models, their scores, the decision, and where to look."""
    from flows import services

    print()
    if result.get("scores"):
        table(result["scores"], "held-out prompts")
        print()
    for name, title in (
        ("ability", "what the models can do (data.ability)"),
        ("win_rates", "win rates, by a judge"),
        ("rounds", "rounds: the reward model of each, on its held-out rows"),
        ("alignment_tax", "what was lost against the first model (step alignment_tax)"),
    ):
        if result.get(name):
            table(result[name], title)
            print()
    if result.get("choice"):
        won = result["choice"]["won"]
        print(
            f"loss {result['choice']['method']}: {result['choice']['why']}"
            + (f" (revisions won {won:.0%})" if won is not None else "")
            + "\n"
        )
    if result.get("trials"):
        table(result["trials"], "trials, best first")
        for line in result["failures"]:
            print(f"failed  {line}")
        for seed, outputs in (result.get("best") or {}).get("outputs", {}).items():
            print("\n".join(f"best, seed {seed}: {name} {ref}" for name, ref in outputs.items()))
    for name, ref in (result.get("models") or {}).items():
        print(f"{name:<14} {ref}")
    if result.get("decision"):
        print_decision(result["decision"])
    print(f"\nrun {result['run']}")
    alive = services.running(state)
    if "prefect" in alive:
        print(
            "Prefect "
            f" {alive['prefect']['url']}/v2/runs/flow-run/{records.get_run(result['run']).data['prefect']['flow_run_id']}"
        )
        if "mlflow" in alive:
            print(f"MLflow   {mlflow_page(alive['mlflow']['url'], result['run'])}")
    else:
        print("see it in the browser: posttrain up      look closer: posttrain show " + result["run"][:8])


def mlflow_page(server: str, run_id: str) -> str:
    """The page of a flow's run on a server of ours; the server itself while MLflow has not been told of the run."""
    from storage import outbox

    cursor = outbox.cursor_of(outbox.flow_unit(run_id))
    if not cursor.get("run_id") or not cursor.get("ours"):
        return server
    return f"{server}/#/experiments/{cursor['experiment_id']}/runs/{cursor['run_id']}?workflowType=machine_learning"


# ---------------------------------------------------------------- promote, export


def promote(model: str, *, name: str, alias: str, inputs: list[str], sets: list[str]) -> dict[str, Any]:
    """Put a model through the gate of stage `promote` on its newest evaluation and the champion's like it; evidence
    given as inputs takes their place.
    """
    from flows.config import build
    from flows.display import Display
    from stages.registry import get_stage
    from tasks.promotion import conclude, evidence
    from tasks.run import run_stage

    spec = get_stage("promote").SPEC
    given = {}
    for pair in inputs:
        key, sign, ref = pair.partition("=")
        if not sign:
            raise ConfigError(f"--input {pair!r}: write NAME=REF; the inputs of the gate are: {', '.join(spec.inputs)}")
        given[key] = ref
    settings = build(spec.config, parse_sets(sets))
    with Display() as screen:
        listen = lambda event: screen("promote", event)
        given = evidence(given.get("candidate", model), name=name, alias=alias, given=given, on_event=listen)
        result = run_stage("promote", given, settings, on_event=listen)
    return conclude(given["candidate"], result.paths["decision"], name=name, alias=alias)


def select(
    given: list[str], *, name: str | None, alias: str, inputs: list[str], sets: list[str], seed: int
) -> dict[str, Any]:
    """Choose among checkpoints by stage `select_checkpoint`, and give the chosen one an alias in the registry."""
    from flows.config import build
    from flows.display import Display
    from stages.registry import get_stage
    from stages.select_checkpoint import as_trained
    from tasks.promotion import candidates, conclude
    from tasks.run import run_stage

    spec = get_stage("select_checkpoint").SPEC
    found, trained, known = candidates(given)
    for pair in inputs:
        key, sign, ref = pair.partition("=")
        if not sign:
            raise ConfigError(f"--input {pair!r}: write NAME=REF; the inputs are: {', '.join(spec.inputs)}")
        found[key] = ref
    name = name or known
    if name is None:
        raise ConfigError("models that are given one by one have no name in common; write --name NAME")
    config = as_trained(build(spec.config, parse_sets(sets)), trained)
    with Display() as screen:
        result = run_stage(
            "select_checkpoint",
            found,
            config,
            seed=seed,
            name_as=name,
            on_event=lambda event: screen("select_checkpoint", event),
        )
    decided = conclude(
        result.outputs["model"], result.paths["decision"], name=name, alias=alias, stage="select_checkpoint"
    )
    return decided | {"key": result.key, "selected": result.metrics["selected"], "scores": result.metrics}


def print_decision(value: dict[str, Any]) -> None:
    print(
        f"{value['model']} is {'now' if value['promoted'] else 'not'} model:{value['name']}@{value['alias']}"
        + (f" (version {value['version']})" if value["promoted"] else "")
    )
    for reason in value["reasons"]:
        print(f"  {reason}")


#: What transformers notes in a saved tokenizer_config.json of where its maker had loaded it from, which is nothing that
#: a reader of the exported model should take for a setting.
HOW_LOADED = ("is_local", "local_files_only")


def export(
    ref: str,
    directory: Path | None,
    adapter: bool = False,
    base: str | None = None,
    push: str | None = None,
    private: bool = False,
) -> dict[str, Any]:
    """Copy a model's files, or a dataset's rows as Parquet by split, to a new directory, with a card where it brings
    none, and to the Hub.

    Args:
        directory: None: only to the Hub.
        adapter: its LoRA adapter alone, as peft loads one, with the tokenizer. base: path or hub id of the model that
            it belongs on, for its config.
        push: repository OWNER/NAME; private: made for its owner only.
    """
    import tempfile

    from storage import hub

    kind = (
        "dataset"
        if ref.startswith("dataset:") or not ref.startswith("model:") and store.is_dataset_dir(ref)
        else "model"
    )
    found = store.resolve(ref, kind)
    if directory is None and push is None:
        raise ConfigError(f"where to? write posttrain export {ref} DIR, or --push OWNER/NAME, or both")
    if private and push is None:
        raise ConfigError("--private is about a repository; write --push OWNER/NAME too, or leave it out")
    if directory is not None and directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file; name a new directory")
    if directory is not None and directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty; name a new directory")
    if kind == "dataset" and (adapter or base):
        raise ConfigError(f"--adapter and --base are for models, and {ref} is a dataset; leave them out")
    if base and not adapter:
        raise ConfigError(
            f"--base {base} is the model that an adapter belongs on; write --adapter too, or leave it out"
        )
    if adapter and not Path(found.path, "adapter").is_dir():
        raise ConfigError(
            f"{ref} has no adapter beside its weights: it was not trained with lora_rank; leave --adapter out"
        )
    if push:
        hub.repository(push, kind, private)
    with contextlib.ExitStack() as stack:
        target = directory or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="export-", dir=home.home())), "files"
        )
        with home.outside(target):
            _write_out(found, target, adapter, base, linked=directory is None)
        value = {
            "ref": found.ref,
            "digest": found.digest,
            "directory": str(directory.resolve()) if directory else None,
            "files": sum(1 for path in target.rglob("*") if path.is_file()),
        }
        if push:
            value |= {"repository": push, "url": hub.push(target, push, kind, f"{found.ref} (digest {found.digest})")}
    return value


def _write_out(found, directory: Path, adapter: bool, base: str | None, linked: bool) -> None:
    """The files of :func:`export`; ``linked``: those of a whole model are no copies, since they are only read."""
    from storage.cards import dataset_card, model_card
    from storage.datasets import open_dataset
    from storage.files import link_tree

    if found.kind == "dataset":
        open_dataset(found.path).export(directory)
    elif linked and not adapter:
        link_tree(Path(found.path), directory)
    elif not adapter:
        shutil.copytree(found.path, directory, dirs_exist_ok=True)
    else:
        shutil.copytree(Path(found.path, "adapter"), directory, dirs_exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
            if Path(found.path, name).is_file():
                shutil.copy2(Path(found.path, name), directory / name)
        if base:
            settings = json.loads((directory / "adapter_config.json").read_text())
            atomic_write_text(
                directory / "adapter_config.json",
                json.dumps({**settings, "base_model_name_or_path": base}, sort_keys=True, indent=1) + "\n",
            )
    for file in directory.rglob("tokenizer_config.json"):
        settings = json.loads(file.read_text(encoding="utf-8"))
        if settings.keys() & set(HOW_LOADED):  # another file takes its place: it may be a link into the store
            left = {name: value for name, value in settings.items() if name not in HOW_LOADED}
            atomic_write_text(file, json.dumps(left, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    if not (directory / "README.md").exists():
        atomic_write_text(
            directory / "README.md", dataset_card(found.ref) if found.kind == "dataset" else model_card(found.ref)
        )


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
