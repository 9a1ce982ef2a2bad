"""What `promote`, `select` and `alias` do and say: which version of a name is in office, why, and on what numbers."""

from __future__ import annotations

from typing import Any

from flows import env, services
from flows.config import parse_sets
from stages.spec import ConfigError
from storage import records, registry, store


def promote(model: str, *, name: str, alias: str, inputs: list[str], sets: list[str]) -> dict[str, Any]:
    """Put a model through the gate of stage `promote` on its newest evaluation and the champion's like it; evidence
    given as inputs takes their place.
    """
    from flows.config import build
    from flows.display import Display
    from stages.registry import get_stage
    from tasks.promotion import conclude, evidence
    from tasks.run import run_stage

    services.connect(env.state_dir())
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

    services.connect(env.state_dir())
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


# ---------------------------------------------------------------- aliases by hand


def parse_alias(text: str) -> tuple[str, str]:
    """(name, alias) of ``model:NAME@ALIAS``."""
    match = store.MODEL_REF.fullmatch(text)
    if match is None or not match["alias"]:
        name = (match and match["name"]) or "NAME"
        raise ConfigError(f"{text!r} is no alias; write model:{name}@ALIAS, for example model:{name}@champion")
    return match["name"], match["alias"]


def parse_version(name: str, text: str) -> int:
    """The version of ``name`` that a number, or a reference to its model, names."""
    if text.isdigit():
        return int(text)
    if not text.startswith("model:"):
        raise ConfigError(f"{text!r} is no version; write its number, for example 3 of model:{name}/3, or --previous")
    digest = records.digest_of(text)
    known = registry.lookup(name).versions
    if (found := next((number for number, entry in known.items() if entry["digest"] == digest), None)) is None:
        raise ConfigError(
            f"{text} is no version of {name}, which has {', '.join(map(str, sorted(known)))}; to make it one, put it"
            f" through the gate: posttrain promote {text} --name {name}"
        )
    return found


def point(text: str, version: str | None, *, previous: bool, remove: bool, reason: str) -> dict[str, Any]:
    """Move an alias by hand (:func:`tasks.promotion.point`), in MLflow's registry too."""
    from tasks import promotion

    name, alias = parse_alias(text)
    if (version is not None) + previous + remove > 1:
        raise ConfigError(f"write one of: posttrain alias {text} VERSION, --previous, --remove")
    to = None if version is None else parse_version(name, version)
    services.connect(env.state_dir())
    return promotion.point(name, alias, to, back=previous, reason=reason)


def moves(text: str) -> dict[str, Any]:
    """Who has an alias, and how it moved: {name, alias, version, model, previous, moves: rows, newest first}."""
    name, alias = parse_alias(text)
    model = registry.lookup(name)
    version, entries = model.aliases.get(alias), registry.moves(model, alias)
    if not entries:
        raise ConfigError(
            f"model {name} has no alias {alias!r}; its aliases are: {', '.join(sorted(model.aliases)) or 'none'}; to make"
            f" it one: posttrain alias {text} VERSION"
        )
    return {
        "name": name,
        "alias": alias,
        "version": version,
        "model": "m-" + model.versions[version]["digest"][:12] if version in model.versions else None,
        "previous": registry.version_before(model, alias),
        "moves": [
            {name: entry.get(name) for name in ("time", "user", "version", "before", "how", "reason")}
            for entry in reversed(entries)
        ],
    }


def print_moves(value: dict[str, Any]) -> None:
    from flows.display import table
    from flows.report import when

    called = f"model:{value['name']}@{value['alias']}"
    print(f"{called} is " + ("no version" if value["version"] is None else f"version {value['version']}"))
    if value["previous"] is not None:
        print(f"before it was version {value['previous']}: posttrain alias {called} --previous")
    table(
        [
            {
                "when": when(one["time"]),
                "by": one["user"] or "",
                "from": "" if one["before"] is None else one["before"],
                "to": "taken away" if one["version"] is None else one["version"],
                "how": {"back": "a step back", "hand": "by hand"}.get(one["how"], ""),
                "why": one["reason"],
            }
            for one in value["moves"]
        ]
    )


def print_point(value: dict[str, Any]) -> None:
    called, was = f"model:{value['name']}@{value['alias']}", value["before"]
    before = "none" if was is None else f"version {was}"
    if not value["moved"]:
        print(f"{called} is {'taken away' if was is None else before} already")
    elif value["version"] is None:
        print(f"{called} is no version any more (it was {before})")
    else:
        print(f"{called} is now version {value['version']}, {value['model']} (it was {before})")
