"""What must be equal before two evaluation results may be compared.

A protocol is a flat dict: dataset digest and split, template hash, few-shot ids, sampling, stop set, engine, verifier
version, seed. Its hash is stored with every sample set and every score. Two sets with different hashes are not
compared: the error names the fields that differ and what to run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from stages.evaluation.grader_code import digests
from stages.spec import ConfigError
from storage.files import canonical_json, sha256_text

#: Where an answer's verdict begins, whatever the graders: how components are asked and put together.
GRADING = (
    "stages.generation:score",
    "stages.reward.rewards:Rewards",
    *(f"stages.reward.components:RewardComponent.{name}" for name in ("missing_policy", "counts", "cut_reward")),
)
#: Further definitions that decide what a component of a kind says.
OF_KINDS = {
    **dict.fromkeys(("model", "group_preference"), ("stages.reward.rewards:_scorer",)),
    **dict.fromkeys(("judge", "debate"), ("stages.reward.rewards:_scorer", "stages.reward.judge:Judge")),
    "rubric": ("stages.reward.rewards:_rubric_scorer", "stages.reward.judge:Judge"),
    "icdpo": ("stages.in_context:InContextScorer",),
}
#: How a judge is asked in words (``mt_bench``, ``refusal_judge``).
ASKED = ("stages.evaluation.asked:AskedJudge.ask", "stages.reward.rewards:load_asked")
#: Tables of all graders: those that are asked are entered by themselves.
TABLES = (
    "stages.reward.scorers:RULES",
    "stages.verification.verifiers:VERIFIERS",
    "stages.verification.verifiers:SHARES",
)


class ProtocolError(ConfigError):
    """Two evaluations were made under different protocols, so their numbers do not compare."""


def protocol_hash(protocol: Mapping) -> str:
    """16 hex digits over the canonical JSON of the protocol."""
    return sha256_text(canonical_json(dict(protocol)))[:16]


def of(plan) -> dict:
    """The protocol of an evaluation: everything that a score depends on besides the weights.

    Args:
        plan: a ``stages.evaluation.plan.Plan``.
    """
    return _of_given(plan) if plan.given else _of_model(plan)


def _of_given(plan) -> dict:
    """Of answers that somebody else made, nobody knows more than what they answer and how they are graded."""
    from stages.evaluation import mt_bench, refusals

    stage, config = plan.stage, plan.config
    return {
        "target": config.target,
        "split": config.split,
        "limit": config.limit,
        "prompts": stage.dataset("prompts").digest,
        "graders": [component.identity() for component in config.rewards],
        "grader_version": grader_version(config, [row for row, _ in plan.prompts]),
        **plan.given.facts(),
        **refusals.protocol(plan),
        **mt_bench.protocol(plan),
    }


def _of_model(plan) -> dict:
    """Of a model that answers, orders pairs or reads texts: all that decides what it says, too."""
    from stages.decoding.engines import engine_label
    from stages.settings import CHANGES_OF_LOGITS, OF_ENVIRONMENT

    stage, config = plan.stage, plan.config
    plain = config.model_dump(mode="json")
    changed = {
        name: plain[name]
        for name in CHANGES_OF_LOGITS
        if getattr(config, name) != type(config).model_fields[name].get_default(call_default_factory=True)
    }
    protocol = {
        "target": config.target,
        "split": config.split,
        "limit": config.limit,
        "template": plan.renderer.template_hash if plan.renderer else "own",
        "few_shot": "none",
        "engine": engine_label(config),
        "dtype": config.sampling_dtype if config.engine == "builtin" else "the engine's",
    }
    if config.target == "judge":
        from stages.reward.judge import PROMPTS

        protocol |= {"judge_mode": config.judge_mode, "template": sha256_text(PROMPTS[config.judge_mode])[:12]}
    if plan.prompts:
        from stages.evaluation import forcing, mt_bench, refusals

        protocol |= {
            "prompts": stage.dataset("prompts").digest,
            "num_samples": config.num_samples,
            "greedy": config.greedy,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "min_p": config.min_p,
            "max_completion_length": config.max_completion_length,
            "max_prompt_length": config.max_prompt_length,
            "stop_tokens": sorted(plan.renderer.tokenizer.convert_ids_to_tokens(sorted(plan.renderer.stop_ids))),
            "stop_strings": list(config.stop_strings),
            "seed": stage.seed,
            "graders": [component.identity() for component in config.rewards],
            "grader_version": grader_version(config, [row for row, _ in plan.prompts]),
        } | ({"logits": canonical_json(changed)} if changed else {})
        if config.prompt_template != "chat":
            protocol["prompt_template"] = config.prompt_template
        protocol["few_shot"] = plan.shots.facts
        protocol |= {"system": config.system} if config.system else {}
        protocol |= (
            {name: getattr(config, name) for name in ("think_max", "think_min", "think_waits")}
            if forcing.asked(config)
            else {}
        )
        protocol |= refusals.protocol(plan) | mt_bench.protocol(plan)
        if config.environment:
            protocol |= {name: getattr(config, name) for name in OF_ENVIRONMENT}
    if plan.with_choices:
        if config.limit is not None and not plan.prompts:
            protocol["limit"] = f"the first {config.limit}"  # it used to count those that the model has room for
        protocol |= ({"perturb_options": True} if config.perturb_options else {}) | (
            {"system": config.system} if config.system else {}
        )
        protocol |= {
            "prompts": stage.dataset("prompts").digest,
            "prompt_template": config.prompt_template,
            "few_shot": plan.shots.facts,
            "multiple_choice": {
                "readings": config.multiple_choice,
                "forms": source_of("stages.evaluation.few_shot:Shots", "stages.evaluation.multiple_choice:read"),
            },
        }
    if plan.plain:
        protocol |= {"texts": stage.dataset("texts").digest, "max_length": config.max_length}
        if not (plan.prompts or plan.choices or plan.pairs):
            protocol["template"] = "unused"  # plain text: models of different templates compare
    if plan.pairs:
        protocol |= {"pairs": stage.dataset("pairs").digest} | (
            {"max_length": config.max_length} if plan.renderer else {}
        )
        protocol |= {"ties": "left out"} if plan.dropped.get("pairs_ties") else {}
    return protocol


def grader_version(config, rows: Sequence[Mapping]) -> dict[str, str]:
    """What turns an answer to one of these prompts into a verdict, {module: digest of its definitions that are reached}
    (``grader_code``): a changed parser is another protocol, a changed message or another verifier is not.

    Args:
        config: of stage evaluate, its reward components, ``mt_bench`` and ``refusal_judge``.
    """
    from stages.acting.environments import path_of
    from stages.evaluation.refusals import asked_of
    from stages.reward.scorers import RULES

    if config.mt_bench:
        return digests(["stages.evaluation.mt_bench:answers", *ASKED])
    kinds = {component.kind for component in config.rewards}
    entries = [*GRADING, *(one for kind in sorted(kinds) for one in OF_KINDS.get(kind, ()))]
    entries += [_place(RULES[kind]) for kind in sorted(kinds) if kind in RULES]
    if any(row.get("answer") is not None for row in rows):
        entries += ["stages.evaluation.grading:parse_all"]
    if any(row.get("constraints") for row in rows):
        entries += ["stages.evaluation.grading:constraint_verdicts"]
    if any(asked_of(row) for row in rows):  # a judge classifies the answers, or a list of phrases
        entries += ["stages.evaluation.refusals:answered", *(ASKED if config.refusal_judge else ())]
    asked = {
        "stages.evaluation.refusals:classify": config.refusal_judge is None,
        **{f"stages.evaluation.refusals:{name}": bool(config.refusal_judge) for name in ("read", "JUDGE", "AGAIN")},
        "stages.reward.scorers:vote": "majority" in kinds,
        "stages.reward.scorers:symbolically": any(component.symbolic for component in config.rewards),
        "stages.reward.process_rewards:merged": any(component.step_credit != "none" for component in config.rewards),
        "stages.reward.debate:answers_of": "debate" in kinds,
        "stages.acting.agent_rewards:per_turn": bool(config.environment),
    }
    if config.environment and config.environment != "debate" and ":" not in config.environment:
        entries.append(path_of(config.environment))
    # the items of a rubric may be of any kind
    left = [] if "rubric" in kinds else [*TABLES, *(name for name, read in asked.items() if not read)]
    return digests(entries + _verifiers(config, rows), left)


def _verifiers(config, rows: Sequence[Mapping]) -> list[str]:
    """Places of the verifiers that read answers to these prompts."""
    from stages.reward.components import RIGHT
    from stages.verification.golds import BadGold
    from stages.verification.verifiers import SHARES, VERIFIERS, verifier_of

    chosen = {component.verifier for component in config.rewards if component.kind in RIGHT}
    if not any(component.kind == "verifier" for component in config.rewards):  # answers are read by their own type
        chosen.add("auto")
    names = chosen - {"auto"}
    for row in rows if "auto" in chosen else ():
        if row.get("answer") is not None:
            with contextlib.suppress(BadGold):
                names.add(verifier_of(row))
    shares = [f"{verifier_of.__module__}:SHARES"] if names & {*SHARES} else []
    return sorted({_place(VERIFIERS[name]) for name in names}) + shares


def _place(function) -> str:
    return f"{function.__module__}:{function.__name__}"


def source_of(*definitions: str) -> str:
    """12 hex digits over what definitions (``module:name``) that a score depends on reach."""
    return sha256_text(canonical_json(digests(definitions)))[:12]


#: What the protocol of given answers says of the answers.
OF_ANSWERS = {"answers", "num_samples", "greedy", "unanswered"}
#: What makes answers of another kind, which a protocol names where it is so.
OF_KIND = {"mt_bench", "refusal_judge", "environment"}


def is_given(protocol: Mapping) -> bool:
    """Whether answers were given, so that nothing is known of how they were sampled."""
    return protocol.get("answers") == "given"


def judged(meta: Mapping) -> str:
    """What an evaluation is of, as the source of its scores: a model, or answers that were given. ``meta``: its."""
    return f"model:m-{meta['model'][:12]}" if meta.get("model") else f"answers:{meta['answers'][:12]}"


def comparable(protocols: Mapping[str, Mapping]) -> dict[str, dict]:
    """The protocols of evaluations as far as they have to be equal: where answers were given to one, what was asked and
    how it is graded; all of them else.
    """
    of_given = [set(protocol) for protocol in protocols.values() if is_given(protocol)]
    if not of_given:
        return {name: dict(protocol) for name, protocol in protocols.items()}
    fields = set().union(*of_given, OF_KIND) - OF_ANSWERS
    return {
        name: {field: value for field, value in protocol.items() if field in fields}
        for name, protocol in protocols.items()
    }


def told_of_given(protocols: Mapping[str, Mapping]) -> str:
    """What must be known of a comparison with answers that were given; empty where none were."""
    found = {name or "the first": protocol for name, protocol in protocols.items() if is_given(protocol)}
    if not found:
        return ""
    lacking = [f"{protocol['unanswered']} of {name}" for name, protocol in found.items() if protocol.get("unanswered")]
    told = ", ".join(f"{name or 'the first'} {protocol.get('num_samples')}" for name, protocol in protocols.items())
    return (
        f"The answers of {', '.join(found)} were given, and nothing is known of their template, examples and sampling:"
        " what compares is what the same graders say of answers to the same prompts, not the models under one way of"
        f" asking. Answers per prompt: {told}."
        + (f" Prompts without an answer count as wrong: {', '.join(lacking)}." if lacking else "")
        + " Compare models that were asked in different ways with care, or evaluate them here."
    )


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
                (
                    f"the code that grades, in stages.{', stages.'.join(differences(a, b))}"
                    if field == "grader_version" and isinstance(a, Mapping) and isinstance(b, Mapping)
                    else f"{field}: {a!r} for {items[0][0]}, {b!r} for {name}"
                )
                for field, (a, b) in differing.items()
            )
            raise ProtocolError(
                f"{items[0][0]} and {name} were evaluated under different protocols ({fields}). Scores are only compared"
                " on the same prompts, template and sampling: run the evaluate stage again for one of them with the"
                " other's prompts and settings."
            )
