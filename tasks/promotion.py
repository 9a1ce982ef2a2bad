"""The registry's side of promotion: who is champion, which evaluations compare, and moving the alias on a decision.

The `promote` stage decides and changes nothing; this module acts on its decision and keeps it, whatever it is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from stages.spec import ConfigError
from storage import records, registry, removal, store, tracking


def champion(name: str, alias: str = "champion") -> str | None:
    """Content ref of the model in office, None when the name has no such alias."""
    model = registry.models().get(name)
    if model is None or alias not in model.aliases:
        return None
    digest = model.versions[model.aliases[alias]]["digest"]
    return store.resolve(f"model:m-{digest}", "model").ref


def conclude(
    candidate: str, decision_path: str, *, name: str, alias: str = "champion", stage: str = "promote"
) -> dict[str, Any]:
    """Register the candidate, keep the decision with its evidence, move the alias on a positive one. Repeatable.

    A decision of stage ``promote`` that does not know who is in office by now, because another run promoted a model in
    between, moves nothing and says so; one of ``select_checkpoint`` is about its candidates, whoever has the alias. Nor
    does one about a version that a person has taken the alias from (:func:`point`).

    Returns {promoted, model, name, alias, version, reasons}.
    """
    from stages.promote import read_decision

    decision = read_decision(decision_path)
    found = store.resolve(candidate, "model")
    version = registry.register(name, found.digest, role="policy", stage=stage)
    model = registry.models()[name]
    promoted, reasons = bool(decision["promote"]), decision["reasons"]
    kept = [entry for entry in model.history if entry["event"] == "decision" and entry["version"] == version]
    in_office = model.aliases.get(alias) == version
    if not kept or kept[-1]["evidence"] != decision or promoted != in_office:
        kept = registry.record_decision(
            name,
            version,
            promoted=promoted,
            evidence=decision,
            alias=alias,
            over=(decision.get("champion") or "").removeprefix("model:m-") if stage == "promote" else None,
            user=records.user(),
        )
        if (taken := kept.get("taken")) is not None:
            promoted = False
            reasons = [
                (
                    f"model:{name}/{version} was {alias} {registry.told(taken, to=False)}. What a person has taken back a"
                    f" person gives again: posttrain alias model:{name}@{alias} {version}"
                ),
                *reasons,
            ]
        if (office := kept.get("office")) is not None:
            promoted = False
            reasons = [
                (
                    f"model:m-{office[:12]} holds model:{name}@{alias} by now, and this decision compared with"
                    f" {decision.get('champion') or 'no champion'}: promote again, so that it is compared with the one"
                    " in office."
                ),
                *reasons,
            ]
        elif promoted and not in_office:
            _announce(name, version, found, alias)
    tracking.flush_registry(timeout=10)
    return {
        "promoted": promoted,
        "model": found.ref,
        "name": name,
        "alias": alias,
        "version": version,
        "reasons": reasons,
    }


def _announce(name: str, version: int, model: store.ResolvedInput, alias: str) -> None:
    """Emit `posttrain.model.promoted`, when a server is configured to hear it."""
    if not os.environ.get("PREFECT_API_URL"):
        return
    from prefect.events import emit_event

    emit_event(
        "posttrain.model.promoted",
        resource={
            "prefect.resource.id": f"posttrain.model.{name}",
            "prefect.resource.name": name,
            "posttrain.alias": alias,
        },
        payload={"ref": model.ref, "name": name, "digest": model.digest, "version": version, "alias": alias},
    )


def point(name: str, alias: str, version: int | None, *, back: bool = False, reason: str = "") -> dict[str, Any]:
    """Move an alias by hand, to a version, or to none (it is taken away), or ``back`` to the one before, without the
    gate; the registry's log keeps who did, when and why. Repeatable, and so is what MLflow is told of it.

    Returns {name, alias, version, model (its ref), before, moved, reason, user}.

    Raises ConfigError where there is no version before, RegistryError where name or version are unknown, StoreError
    where the version's files are gone (with the command that makes them again).
    """
    model = registry.lookup(name)
    before = model.aliases.get(alias)
    if back and (version := registry.version_before(model, alias)) is None:
        raise ConfigError(
            f"model:{name}@{alias} has had no version before "
            + ("this" if before is None else f"version {before}")
            + f"; write the number of one ({', '.join(map(str, sorted(model.versions)))})"
            + (", or --remove" if before is not None else "")
        )
    if version is None and not registry.moves(model, alias):
        raise ConfigError(
            f"model {name} has no alias {alias!r} to take away; its aliases are:"
            f" {', '.join(sorted(model.aliases)) or 'none'}"
        )
    found = None
    with removal.alone():  # whose files are there now keeps them
        if version is not None:
            registry.lookup(name, version)
            found = store.resolve(f"model:{name}/{version}", "model")
        entry = registry.set_alias(
            name, alias, version, reason=reason, user=records.user(), how="back" if back else "hand", over=before
        )
    with contextlib.suppress(KeyboardInterrupt):  # it has moved: a step back that is given again would be another one
        if found is not None and "version" in entry:
            _announce(name, version, found, alias)
        tracking.flush_registry(timeout=10)
    return {
        "name": name,
        "alias": alias,
        "version": version,
        "model": found.ref if found is not None else None,
        "before": before,
        "moved": "version" in entry,
        "reason": reason,
        "user": records.user(),
    }


def evaluations_of(digest: str) -> list[dict[str, Any]]:
    """Stage records of evaluations that judged a model, newest first, whose outputs are whole."""
    return [record for record in records.evaluations_of(digest) if not records.problems(record)]


def evidence(
    candidate: str,
    *,
    name: str,
    alias: str,
    given: Mapping[str, str] = MappingProxyType({}),
    seed: int = 0,
    on_event=None,
) -> dict[str, str]:
    """Inputs of the `promote` stage for a model: its newest evaluation, and the champion's under the same protocol and
    by the same reward model, judge and reference (made now if there is none).

    given: inputs that are taken as they are, ``{input: ref}``; the rest is found for them, so that no champion is
    passed over because evidence was named.

    Raises ConfigError when the candidate was never evaluated on prompts, or nothing is known of the evaluation that was
    given and there is a champion.
    """
    from tasks.run import run_stage

    found = store.resolve(candidate, "model")
    if "candidate_samples" in given:
        judged = [
            record
            for record in records.makers_of(store.resolve(given["candidate_samples"], "dataset").digest)
            if record["stage"] == "evaluate"
        ]
    else:
        judged = [record for record in evaluations_of(found.digest) if "prompts" in record["inputs"]]
        if not judged:
            raise ConfigError(
                f"{candidate} has no evaluation yet, so there is no evidence; run: posttrain stage evaluate "
                f"--input model={candidate} --input prompts=REF_OR_PATH"
            )
    if judged and "model" not in judged[0]["inputs"]:
        raise ConfigError(
            f"{given['candidate_samples']} grades answers that were given, and nothing shows that {candidate} made them;"
            f" evaluate the model itself: posttrain stage evaluate --input model={candidate} --input prompts=REF_OR_PATH"
        )
    inputs = {"candidate": found.ref, **(outputs(judged[0], "candidate") if judged else {}), **given}
    office = champion(name, alias)
    if (
        office is None
        or store.resolve(office, "model").digest == found.digest
        or {"champion_samples", "champion_scores"} <= inputs.keys()
    ):
        return inputs
    if not judged:
        raise ConfigError(
            f"{given['candidate_samples']} was not made by stage evaluate of this store, so the champion cannot be"
            f" evaluated likewise; give champion={office}, champion_samples=REF and champion_scores=REF too, or another"
            f" --name or --alias than {name}@{alias}"
        )
    mine = judged[0]
    same = [
        record
        for record in evaluations_of(store.resolve(office, "model").digest)
        if _measured(record) == _measured(mine)
    ]
    if same:
        return {"champion": office, **outputs(same[0], "champion"), **inputs}
    others = {key: given["ref"] for key, given in mine["inputs"].items() if key != "model"}
    result = run_stage("evaluate", {**others, "model": office}, mine["config"], seed=mine["seed"], on_event=on_event)
    return {
        "champion": office,
        "champion_samples": result.outputs["samples"],
        "champion_scores": result.outputs["scores"],
        **inputs,
    }


def _measured(record: dict[str, Any]) -> tuple:
    """What an evaluation's numbers depend on besides the model: its protocol, and the inputs that scored the
    answers.
    """
    return record["metrics"].get("protocol_hash"), {
        name: given["digest"] for name, given in record["inputs"].items() if name != "model"
    }


def candidates(given: list[str]) -> tuple[dict[str, str], dict[str, Any], str | None]:
    """What stage ``select_checkpoint`` is to choose among: the epochs of a stage (``publish_epochs``), named by its key,
    by a run with one such stage, or by a model that it made; or the given models, in their order.

    Returns (inputs ``candidates.LABEL`` and, where the stage was fine-tuned on it or is a reward model's, ``data``; settings that stage was
    trained with; the name under which it published its model, None of models).

    Raises ConfigError for a stage or run without epochs, and a single model that none of them made.
    """
    if len(given) > 1:
        return {f"candidates.{place}": ref for place, ref in enumerate(given, 1)}, {}, None
    (text,) = given
    found = [record for record in _makers(text) if _epochs(record)]
    if len(found) != 1:
        several = ", ".join(f"{record['key'][:12]} ({record['label']})" for record in found)
        raise ConfigError(
            f"{text} "
            + (f"has several stages with epochs; write the key of one: {several}" if found else "published no epochs")
            + (
                ""
                if found
                else "; train with publish_epochs=true (posttrain stage sft ... --set publish_epochs=true), or write the"
                " candidates in their order: posttrain select REF REF --input data=DEMONSTRATIONS"
            )
        )
    record = found[0]
    inputs, settings = _epochs(record), {}
    if record["outputs"]["model"]["role"] == "reward":  # judged by other rows of what it learned from
        inputs["data"] = record["inputs"]["data"]["ref"]
    elif "max_length" in record["config"] and "train_on" in record["config"]:
        inputs["data"] = record["inputs"]["data"]["ref"]
        settings = {name: record["config"][name] for name in ("max_length", "train_on", "chat_template_kwargs")}
    return inputs, settings, record["outputs"]["model"]["name"]


def _epochs(record: Mapping[str, Any]) -> dict[str, str]:
    return {
        f"candidates.{name.removeprefix('epoch.')}": one["ref"]
        for name, one in record["outputs"].items()
        if name.startswith("epoch.")
    }


def _makers(text: str) -> list[dict[str, Any]]:
    """Records of the stages that a key, a run or a model names."""
    if store.is_ref(text):
        return records.makers_of(store.resolve(text, "model").digest)
    if store.STAGE_KEY.fullmatch(text) and (record := records.match(text)) is not None:
        return [record]
    run = records.get_run(text)
    return [record for one in run.stages().values() if (record := records.read(one["key"])) is not None]


def outputs(record: dict[str, Any], role: str) -> dict[str, str]:
    """An evaluation's outputs as inputs of the gate: {role}_samples and {role}_scores."""
    return {f"{role}_{key}": record["outputs"][key]["ref"] for key in ("samples", "scores")}
