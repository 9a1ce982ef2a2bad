"""How things are called and described in MLflow: keys, titles, notes, tables. Text of documents, nothing is sent."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from storage import records
from storage.files import read_json
from storage.outbox import Doc


def numbers_of(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Flat ``a/b`` -> float of everything numeric in a nested mapping."""
    found: dict[str, float] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found.update(numbers_of(value, name + "/"))
        elif isinstance(value, (bool, int, float)):
            found[name] = float(value)
        elif value in ("nan", "inf", "-inf"):
            found[name] = float(value)
    return found


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found.update(flatten(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def safe_key(key: str) -> str:
    """A key that MLflow takes: letters, digits, ``_ - . : / `` and spaces, at most 250 characters."""
    return re.sub(r"[^\w\-. :/]", "_", str(key), flags=re.ASCII).strip("/")[:250] or "_"


def curve_name(key: str) -> str:
    """``train/loss`` of a curve ``loss``: without a group the UI would draw it among the numbers of the end."""
    return key if "/" in key else "train/" + key


def final_name(key: str) -> str:
    """``final:validation:nll`` of the summary's ``validation/nll``."""
    return "final:" + key.replace("/", ":")


def milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def origin_tags(user: str | None, recipe: str) -> dict[str, str]:
    """The tags of a run from which MLflow's UI has its columns "Created by" and "Source"."""
    command = f"stage {recipe[6:]}" if recipe.startswith("stage:") else f"run {recipe}"
    source = {"mlflow.source.name": f"posttrain {command}", "mlflow.source.type": "LOCAL"}
    return source | ({"mlflow.user": user} if user else {})


def dataset_name(given: dict[str, Any]) -> str:
    """What a dataset input is called: the name it is published under, which its ref says (its manifest keeps the first
    one, of the stage that made it).
    """
    kind, _, rest = given["ref"].partition(":")
    return (
        (rest.partition("@")[0] if kind == "dataset" else "")
        or (given.get("manifest") or {}).get("name")
        or Path(given["path"]).name
    )


_COLUMN_TYPES = {
    "string": "string",
    "double": "double",
    "float": "float",
    "bool": "boolean",
    "int8": "integer",
    "int32": "integer",
    "int64": "long",
}


def schema_of(path: str) -> str | None:
    """Columns of a dataset as MLflow shows them (nested ones by name only, as strings)."""
    manifest = read_json(Path(path) / "manifest.json", None) if "://" not in path else None
    if not manifest or not isinstance(manifest.get("schema"), list):
        return None
    columns = [
        {
            "name": c["name"],
            "type": _COLUMN_TYPES.get(c["type"], "datetime" if c["type"].startswith("timestamp") else "string"),
            "required": not c.get("nullable", True),
        }
        for c in manifest["schema"]
    ]
    return json.dumps({"mlflow_colspec": columns})


def split_table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows as the column/data form that the UI draws as a table."""
    columns = list(dict.fromkeys(k for row in rows for k in row))
    return {"columns": columns, "data": [[row.get(c) for c in columns] for row in rows]}


def stage_title(d: Doc) -> str:
    """The MLflow run of a stage that ran by itself, apart from others of its kind: `sft · tiny-llama · 199a895c`, which
    `posttrain show` knows.
    """
    given = [
        str(one.get("given") or one["ref"]) for name in ("model", "data", "prompts") if (one := d["inputs"].get(name))
    ]
    name = [given[0].rstrip("/").rpartition("/")[2].partition("@")[0][:40]] if given else []
    return " · ".join([d["label"], *name, d["key"][:8]])


def short_ref(ref: str) -> str:
    """A ref with as much of its digest as every command takes."""
    return re.sub("(@[0-9a-f]{12})[0-9a-f]+$", r"\1", ref)


def version_note(entry: dict[str, Any]) -> str:
    """Markdown on a registered version: what it was made of, and its numbers when it was made."""
    record = records.read(entry.get("key") or "") or {}
    numbers = {
        k: v for k, v in numbers_of(record.get("metrics") or {}).items() if not k.startswith(("dropped/", "dropped."))
    }
    return "\n".join(
        [
            f"`model:{entry['name']}/{entry['version']}`"
            + (f", made by stage **{entry['stage']}**" if entry.get("stage") else "")
            + (f" in run `{entry['run'][:8]}`" if entry.get("run") else ""),
            *([""] + [f"- {n}: `{i['ref']}`" for n, i in record["inputs"].items()] if record.get("inputs") else []),
            *([""] + [f"- {k} {v:.4g}" for k, v in sorted(numbers.items())[:30]] if numbers else []),
            "",
            f"`posttrain show model:{entry['name']}/{entry['version']}` says all of it.",
        ]
    )


def experiment_note(recipe: str) -> str:
    """What the runs of an experiment are, for the list of experiments."""
    if recipe == "stages":
        return "Stages that were run by themselves: `posttrain stage NAME`."
    what = f"stage `{recipe[6:]}` from its deployment" if recipe.startswith("stage:") else f"recipe `{recipe}`"
    return f"Runs of {what}; the + before a run shows its stages, which have the curves, datasets, models and reports."


def by_code(warnings: list[dict[str, str]]) -> dict[str, str]:
    """All texts of each code, one a line."""
    found: dict[str, list[str]] = {}
    for one in warnings:
        found.setdefault(one["code"], []).append(one["text"])
    return {code: "\n".join(texts) for code, texts in found.items()}


def stage_note(d: Doc, prefect: dict[str, Any]) -> str:
    inputs = [f"- {n}: `{i['ref']}` (digest `{i['digest'][:12]}`)" for n, i in d["inputs"].items()]
    outputs = [f"- {n}: `{o['ref']}`" for n, o in (d.get("outputs") or {}).items()]
    warnings = [f"- **{w['code']}** {w['text']}" for w in d.get("warnings") or []]
    return "\n".join(
        [
            *([f"**Error:** {d['error']}", ""] if d.get("error") else []),  # the UI shows the first lines only
            f"Stage **{d['stage']}** as `{d['label']}`, key `{d['key'][:16]}`"
            + (", result of an earlier identical run" if d.get("cached") else ""),
            *([f"[Prefect task run]({prefect['task_url']})"] if prefect.get("task_url") else []),
            *([f"[Prefect flow run]({prefect['url']})"] if prefect.get("url") else []),
            *(["", "Inputs", *inputs] if inputs else []),
            *(["", "Outputs", *outputs] if outputs else []),
            *(["", "Warnings", *warnings] if warnings else []),
        ]
    )


def flow_title(run: dict[str, Any]) -> str:
    """The MLflow run of a flow run: its recipe, Prefect's name of it, the start of its id. A stage from its deployment is
    in that name already, and the list of runs shows the first words only.
    """
    recipe, named = run["recipe"], (run.get("prefect") or {}).get("flow_run_name") or ""
    said = named.startswith(recipe.removeprefix("stage:") + " · ")
    return " · ".join([*([] if said else [recipe]), *([named] if named else []), run["run_id"][:8]])


def flow_note(run: dict[str, Any]) -> str:
    """Markdown on a flow run: its error, where Prefect shows it, its stages."""
    prefect = run.get("prefect") or {}
    stage_lines = [
        f"| {s['label']} | {s['stage']} | {'cached' if s['cached'] else 'ran'} | {s.get('seconds', 0):.1f} |"
        f" {', '.join(short_ref(ref) for ref in s['outputs'].values())} |"
        for s in run["stages"]
    ]
    return "\n".join(
        [
            *([f"**Error:** {run['error']}", ""] if run.get("error") else []),
            f"**{run['recipe']}**, run `{run['run_id']}`"
            + (f", continues `{run['parent']}`" if run.get("parent") else ""),
            *([f"[Prefect flow run]({prefect['url']})"] if prefect.get("url") else []),
            "",
            "| stage | kind | how | seconds | outputs |",
            "|---|---|---|---|---|",
            *stage_lines,
        ]
    )
