"""What `stage NAME --dry-run` says: what a stage would do, as plain JSON values and as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flows.display import table
from flows.recipe import short
from flows.report import progress_of
from stages.spec import InputSpec
from storage import store, work


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
        "config": spec.settings(config, given),
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
