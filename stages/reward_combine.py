"""reward_combine: several reward models as one, usable wherever a reward model is.

``mean``, ``min``, ``uwo``     an ensemble: members trained from different seeds (``--seed``); uwo subtracts uncertainty_coef times the
                          members' variance, and their spread is logged as an out-of-distribution signal
                          (``rm.ensemble``)
``weighted``              one model per principle or objective, fixed weights (``rm.multi``); given ``anchor``, of scores that have mean 0
                          and standard deviation 1 on its answers (``reward.multi_objective``)
``safety_gate``           the safety model decides on safety prompts and where it is alarmed, else the helpfulness model (``rm.multi``, Llama 2)
``implicit``              a tuned policy against its reference (``rm.implicit``)

Members must be calibrated (their own ``anchor``): scores of unrelated scales cannot be added. Given held-out pairs, the
result is judged like any reward model, and so is each member.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from stages.settings import ReadWhen, refuse_own_variables, refuse_unread, refuse_unread_in
from stages.spec import InputSpec, OutputSpec, StageConfig, StageSpec


class Config(StageConfig):
    READ_WHEN: ClassVar[ReadWhen] = (
        (
            ("weights",),
            lambda c: c.combine == "weighted",
            "only combine=weighted weighs members; write combine=weighted",
        ),
        (
            ("uncertainty_coef",),
            lambda c: c.combine == "uwo",
            "only combine=uwo subtracts the members' variance; write combine=uwo",
        ),
        (
            ("helpful", "safety", "safety_threshold"),
            lambda c: c.combine == "safety_gate",
            "only combine=safety_gate has a helpfulness and a safety model; write combine=safety_gate",
        ),
        (
            ("beta", "max_length", "chat_template_kwargs"),
            lambda c: c.combine == "implicit",
            "only combine=implicit reads a policy's log-probs; write combine=implicit",
        ),
    )

    combine: Literal["mean", "min", "uwo", "weighted", "safety_gate", "implicit"] = Field(
        "mean", description="How the members become one score."
    )
    uncertainty_coef: float = Field(
        0.1,
        ge=0,
        description="uwo: lambda of mean - lambda * variance (no default in texts, ours 0.1; Coste et al. 2023).",
    )
    weights: dict[str, float] = Field(default_factory=dict, description="weighted: {member label: weight}, sum 1.")
    helpful: str = Field("helpful", description="safety_gate: label of the helpfulness model.")
    safety: str = Field("safety", description="safety_gate: label of the safety model.")
    safety_threshold: float = Field(
        0.15,
        gt=0,
        lt=1,
        description="safety_gate: the safety model decides where its probability is below this (Llama 2).",
    )
    beta: float = Field(0.1, gt=0, description="implicit: beta (log pi - log ref); the beta the policy was tuned with.")
    max_length: int = Field(1024, ge=8, description="implicit: tokens of prompt and response.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="implicit: variables of the chat template, those that the policy was tuned with.",
    )
    split: str = Field("test", description="Split of the pairs that judge the result.")
    limit: int | None = Field(2000, ge=1, title="Limit", description="Pairs used at most.")
    probe_pairs: int = Field(64, ge=0, description="Pairs on which probes are tried; 0 = none.")
    max_tokens_per_micro_batch: int = Field(8192, ge=1, description="Padded tokens per scoring forward; bounds memory.")

    @model_validator(mode="after")
    def _possible(self):
        refuse_unread(self, self.READ_WHEN)
        refuse_own_variables(self.chat_template_kwargs)
        if self.combine == "weighted" and abs(sum(self.weights.values()) - 1) > 1e-6:
            raise ValueError(
                "weights must have sum 1; write one per member label, for example weights={helpful: 0.7, safe: 0.3}"
            )
        return self


SPEC = StageSpec(
    name="reward_combine",
    config=Config,
    gpu=True,
    inputs={
        "members": InputSpec("model", many=True, required=False, doc="Reward models, members.LABEL=REF each."),
        "policy": InputSpec("model", required=False, doc="implicit: the tuned policy."),
        "reference": InputSpec("model", required=False, doc="implicit: its reference."),
        "pairs": InputSpec(
            "dataset", kinds=("pairs/1",), required=False, held_out=True, doc="Held-out pairs that judge the result."
        ),
        "anchor": InputSpec(
            "dataset",
            kinds=("demonstrations/1", "candidates/1"),
            required=False,
            doc="weighted: answers on which every member's scores get mean 0 and standard deviation 1 before they are weighed.",
        ),
    },
    outputs={"model": OutputSpec("model", role="reward")},
)


#: Settings that are read where pairs judge the result, as ``READ_WHEN``: of the stage.
READ_OF_INPUTS: ReadWhen = (
    (
        ("split", "limit", "probe_pairs"),
        lambda stage: stage.has("pairs"),
        "no pairs judge the result; give pairs=REF",
    ),
    (
        ("max_tokens_per_micro_batch",),
        lambda stage: stage.has("pairs") or stage.has("anchor"),
        "nothing is scored here; give pairs=REF",
    ),
)


def members_of(stage) -> dict[str, str]:
    """{folder name: path} of what the configured combination needs.

    Raises:
        ConfigError: something is missing, or given although nothing reads it; the text says which input to give.
    """
    from stages.spec import ConfigError

    config = stage.config
    if config.combine == "implicit":
        if stage.many("members"):
            raise ConfigError(
                "reward_combine: combine=implicit reads the inputs policy and reference and no members; leave members"
                " out, or write combine=mean"
            )
        return {"policy": stage.path("policy"), "reference": stage.path("reference")}
    if unread := [name for name in ("policy", "reference") if stage.has(name)]:
        raise ConfigError(
            f"reward_combine: combine={config.combine} does not read the input {' and '.join(unread)}; write"
            f" combine=implicit, or leave {'it' if len(unread) == 1 else 'them'} out"
        )
    given = {label or "0": entry.path for label, entry in stage.many("members").items()}
    needed = {"weighted": list(config.weights), "safety_gate": [config.helpful, config.safety]}.get(config.combine, [])
    missing = [label for label in needed if label not in given]
    if missing or not given:
        raise ConfigError(
            f"reward_combine: combine={config.combine} needs"
            f" {', '.join(f'members.{m}=REF' for m in missing) or 'members.LABEL=REF, one per reward model'}; given:"
            f" {', '.join(given) or 'none'}"
        )
    if config.combine == "safety_gate" and (unread := sorted(set(given) - set(needed))):
        raise ConfigError(
            f"reward_combine: combine=safety_gate reads {config.helpful} and {config.safety} alone; leave"
            f" {', '.join(f'members.{label}' for label in unread)} out, or write helpful={unread[0]} or"
            f" safety={unread[0]}"
        )
    if config.combine == "weighted" and set(given) != set(needed):
        raise ConfigError(
            f"reward_combine: weights name {', '.join(needed)}, the members are {', '.join(given)}; give every member a"
            " weight"
        )
    return given


def run(stage):
    import shutil
    from pathlib import Path

    from stages.chat import renderer_for
    from stages.reporting.reports import document, facts
    from stages.reward_models.reward_eval import held_out, sample_blocks, warn_about
    from stages.reward_models.reward_heads import RewardCard, write_card
    from stages.reward_models.reward_scorers import load_scorer
    from stages.spec import ConfigError

    refuse_unread_in(stage, READ_OF_INPUTS)
    config, members = stage.config, members_of(stage)
    if stage.has("anchor") and config.combine != "weighted":
        raise ConfigError(
            f"reward_combine: combine={config.combine} does not read the input anchor, whose answers are for the scales"
            " of weighed members; leave anchor out, or write combine=weighted"
        )
    implicit = config.combine == "implicit"
    options = (
        {"beta": config.beta}
        | ({"chat_template_kwargs": config.chat_template_kwargs} if config.chat_template_kwargs else {})
        if implicit
        else {
            "members": sorted(members),
            "combine": config.combine,
            "uncertainty_coef": config.uncertainty_coef,
            "weights": config.weights,
            "helpful": config.helpful,
            "safety": config.safety,
            "safety_threshold": config.safety_threshold,
        }
        | ({"standard": standards(stage, members)} if stage.has("anchor") else {})
    )
    card = RewardCard(
        "implicit" if implicit else "combined", max_length=config.max_length if implicit else None, options=options
    )
    if implicit:
        renderer_for(members["policy"], *card.template())  # says which of the variables its template does not read
    with stage.output_model("model", role="reward") as directory:
        for name, path in members.items():
            shutil.copytree(path, Path(directory, name) if implicit else Path(directory, "members", name))
        write_card(directory, card)
    if not implicit and len(members) < 2:
        stage.warn(
            "one_member",
            "A combination of one reward model is that model; give more members, trained from other seeds or data.",
        )
    summary = {"members": len(members)}
    for name, (mean, deviation) in options.get("standard", {}).items():
        summary |= {f"member/{name}/anchor_mean": mean, f"member/{name}/anchor_std": deviation}
    if stage.has("pairs"):
        scorer = load_scorer(str(stage.workdir / "out" / "model"), stage.device, config.max_tokens_per_micro_batch)
        found = held_out(stage, scorer, stage.dataset("pairs"), config.split, config.limit, config.probe_pairs)
        summary |= found
        if found:
            warn_about(stage, found, objective=card.objective)
        if not implicit:
            for name, member in scorer.members.items():
                alone = held_out(
                    stage, member, stage.dataset("pairs"), config.split, config.limit, label=f"member-{name}"
                )
                summary |= {
                    f"member/{name}/{k}": alone[k]
                    for k in ("accuracy", "log_loss", "ece", "mean_reward", "std_reward")
                    if k in alone
                }
        scales = [summary[f"member/{n}/std_reward"] for n in members if f"member/{n}/std_reward" in summary]
        if (
            config.combine in ("mean", "min", "uwo", "weighted")
            and not stage.has("anchor")
            and scales
            and max(scales) > 10 * max(min(scales), 1e-12)
        ):
            stage.warn(
                "scales_differ",
                "The members' scores have standard deviations that differ more than tenfold, so the widest decides"
                " alone. Train them alike, or give the narrow one a larger weight; combine=weighted with the input anchor"
                " puts all on one scale.",
            )
    stage.summary(summary)
    stage.report(
        "summary",
        markdown=document(
            f"Combined reward model ({config.combine})",
            facts(summary),
            *(sample_blocks(stage, [config.split]) if stage.has("pairs") else []),
        ),
    )


def standards(stage, members: dict[str, str]) -> dict[str, list[float]]:
    """{member: [mean, standard deviation]} of its scores of the anchor's answers (population).

    Raises:
        ConfigError: a member gives them one score.
    """
    import numpy as np

    from stages.reward_model import ANCHOR_ROWS
    from stages.reward_models.reward_eval import anchor_responses
    from stages.reward_models.reward_scorers import load_scorer
    from stages.spec import ConfigError

    answers, found = anchor_responses(stage.dataset("anchor"), None, ANCHOR_ROWS), {}
    for name, path in members.items():
        scores = np.array(
            load_scorer(path, stage.device, stage.config.max_tokens_per_micro_batch).score(answers), float
        )
        scores = scores[~np.isnan(scores)]
        if not len(scores) or scores.std() <= 1e-9 * max(1.0, abs(scores.mean())):
            raise ConfigError(
                f"reward_combine: member {name} gives the {len(answers)} answers of the anchor one score or none, so that"
                " they say nothing of its scale; give other answers as anchor, or leave anchor out"
            )
        found[name] = [float(scores.mean()), float(scores.std())]
    return found
