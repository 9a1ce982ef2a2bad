"""What must be equal before two evaluation results may be compared.

A protocol is a flat dict: dataset digest and split, template hash, few-shot ids, sampling, stop set, engine, verifier
version, seed. Its hash is stored with every sample set and every score. Two sets with different hashes are not
compared: the error names the fields that differ and what to run.
"""

from __future__ import annotations

from collections.abc import Mapping

from stages.spec import ConfigError, module_file
from storage.files import canonical_json, sha256_text

GRADERS = (
    "stages.reward.rewards",
    "stages.reward.scorers",
    "stages.reward.programs",
    "stages.reward.components",
    "stages.reward.verdicts",
    "stages.verification.verifiers",
    "stages.verification.golds",
    "stages.verification.responses",
    "stages.verification.languages",
    "stages.verification.extraction",
    "stages.verification.equality",
    "stages.verification.normalisation",
    "stages.verification.plain_numbers",
    "stages.verification.constraints",
    "stages.verification.ifeval",
    "stages.verification.rule_rewards",
    "stages.running.sandbox",
    "stages.running.tested",
    "stages.verification.more_constraints",
    "stages.reward.remote_rewards",
    "stages.verification.symbolic",
    "stages.verification.units",
    "stages.measures.text",
)


class ProtocolError(ConfigError):
    """Two evaluations were made under different protocols, so their numbers do not compare."""


def protocol_hash(protocol: Mapping) -> str:
    """16 hex digits over the canonical JSON of the protocol."""
    return sha256_text(canonical_json(dict(protocol)))[:16]


def grader_version() -> str:
    """Digest of the sources that turn an answer into a verdict: a changed parser is another protocol."""
    return source_of(*GRADERS)


def source_of(*modules: str) -> str:
    """12 hex digits over the sources of modules that a score depends on."""
    files = [file for name in modules if (file := module_file(name)) is not None]
    return sha256_text("\n".join(file.read_text(encoding="utf-8") for file in files))[:12]


def differences(a: Mapping, b: Mapping) -> dict[str, tuple]:
    """{field: (value in a, value in b)} of the fields that differ."""
    return {name: (a.get(name), b.get(name)) for name in sorted(set(a) | set(b)) if a.get(name) != b.get(name)}


def scored_with(metric: str, meta: Mapping) -> set[str]:
    """Names of the inputs that measured a metric of an evaluation: with other ones its values do not compare. ``meta``:
    its protocol and scorers.

    Each reward component names its own; `reward` and `best_of_*` stand for the input reward_model, `kl_*` for the
    reference, `mt_bench` and refusals for the judge that was asked.
    """
    protocol, given = meta.get("protocol") or {}, meta.get("scorers") or {}
    graders = {grader["name"]: grader for grader in protocol.get("graders") or ()}
    stem, _, name = metric.partition("/")
    if stem == "token_shift":
        return {"reference"}
    if stem == "reward" and name:  # reward/NAME, reward/NAME/disagreement ...
        return _inputs_of(graders.get(name) or graders.get(name.rpartition("/")[0]) or {}, graders, given)
    if stem in ("reward", "greedy_reward") or stem.startswith("best_of_"):
        return {"reward_model"}
    if stem.startswith("judge_accuracy") or stem == "first_side_win_rate":
        return set().union(
            *(_inputs_of(grader, graders, given) for grader in graders.values() if grader["kind"] == "debate")
        )
    asked = {"mt_bench": ("mt_bench",), "over_refusal_rate": ("refusal_judge",)}.get(
        stem, ("refusal_judge",) if stem.startswith("refusal_") else ()
    )
    if settings := next((protocol[name] for name in asked if protocol.get(name)), None):
        return set() if settings.get("endpoint") else {settings.get("input", "judge")}
    # of pairs, by a policy
    by_likelihood = (
        stem.startswith("pair_") or stem == "mean_margin" or (stem == "accuracy" and "prompts" not in protocol)
    )
    return {"reference"} if stem.startswith("kl_") or (by_likelihood and protocol.get("target") == "policy") else set()


def _inputs_of(grader: Mapping, graders: Mapping[str, Mapping], given: Mapping) -> set[str]:
    """Inputs that a reward component's value depends on (``stages.reward.rewards.model_input``)."""
    kind, named = grader.get("kind"), grader.get("input") or "reward_model"
    if grader.get("tier"):  # what an earlier tier settles, a later one never sees
        return set().union(
            *(_inputs_of({**other, "tier": ""}, graders, given) for other in graders.values() if other.get("tier"))
        )
    if kind in ("judge", "debate"):
        return set() if grader.get("endpoint") else {"judge" if named == "reward_model" and "judge" in given else named}
    if kind == "majority" and grader.get("votes_of") in graders:
        return _inputs_of(graders[grader["votes_of"]], graders, given)
    own = {"group_preference": "group_preference", "icdpo": "model"}.get(kind, "") if named == "reward_model" else named
    return {
        "model": {named},
        "rubric": {"rubric", "judge", "reward_model", "gold"},
        "group_preference": {own, "context"},
        "icdpo": {own, "demonstrations"},
    }.get(kind, set())


def differing_inputs(metric: str, metas: Mapping[str, Mapping]) -> list[str]:
    """Inputs of ``scored_with`` that are not the same in all evaluations."""
    digests = [{**(meta.get("scorers") or {}), "model": meta.get("model")} for meta in metas.values()]
    return sorted(
        name
        for name in set().union(*(scored_with(metric, meta) for meta in metas.values()))
        if len({found.get(name) for found in digests}) > 1
    )


def require_same_scorers(metric: str | None, metas: Mapping[str, Mapping]) -> None:
    """Raise :class:`ProtocolError` where a metric was measured by another reward model, judge, rubric (GRAPE-OPS) or
    reference in some evaluations.
    """
    if apart := differing_inputs(metric or "", metas):
        raise ProtocolError(
            f"{metric} was measured with different inputs {', '.join(apart)} for"
            f" {' and '.join(name or 'the first' for name in metas)}, so its values do not compare; "
            + (
                "its component reads the answers with the very model that is judged; "
                if "model" in apart
                else "evaluate all models with the same ones, or "
            )
            + "write another metric"
        )


def require_same(evaluations: Mapping[str, Mapping]) -> None:
    """Raise :class:`ProtocolError` unless all named protocols are equal."""
    items = list(evaluations.items())
    for name, protocol in items[1:]:
        differing = differences(items[0][1], protocol)
        if differing:
            fields = "; ".join(
                f"{field}: {a!r} for {items[0][0]}, {b!r} for {name}" for field, (a, b) in differing.items()
            )
            raise ProtocolError(
                f"{items[0][0]} and {name} were evaluated under different protocols ({fields}). Scores are only compared"
                " on the same prompts, template and sampling: run the evaluate stage again for one of them with the"
                " other's prompts and settings."
            )
