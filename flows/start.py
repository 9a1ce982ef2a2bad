"""What recipes on the embedded world share: their data and base model, where the iterated ones start, and how these
end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

from pydantic import Field, model_validator

from flows.recipe import Outputs, RecipeConfig, Run
from flows.steps import HELD_OUT, Evaluations, Source, evaluate_all, ingest, promote
from stages.base_model import Config as BaseModelConfig
from stages.evaluate import Config as EvaluateConfig
from stages.ingest import Config as IngestConfig
from stages.merge import Config as MergeConfig
from stages.promote import Config as GateConfig
from stages.reward_model import Config as RewardModelConfig
from stages.rl import Config as RLConfig, reads_input
from stages.sft import Config as SFTConfig
from stages.spec import StageConfig
from stages.world import Config as WorldConfig


class Data(StageConfig):
    """Your own data, kind by kind; what is left out comes from the embedded world."""

    demonstrations: Optional[str] = Field(
        None, title="Demonstrations", description="Ref, file, directory or hub id of conversations to imitate."
    )
    pairs: Optional[str] = Field(
        None, title="Pairs", description="Ref, file, directory or hub id of preference pairs, ratings or rankings."
    )
    prompts: Optional[str] = Field(
        None,
        title="Prompts",
        description="Ref, file, directory or hub id of prompts, with answers where a verifier is to check them.",
    )
    text: Optional[str] = Field(None, title="Text", description="Ref, file or directory of plain text to pre-train on.")


#: Kind of reward component -> what a recipe must be given for it.
GIVEN_TO = {"group_preference": ("group_preference", "context"), "rubric": ("rubric",)}


class RewardSources(StageConfig):
    """What reward components read beside the policy's answers; each is asked for only where a section's rewards have
    the kind that it names.
    """

    judge: str = Field(
        "self",
        description=(
            "Language model of reward components with kind=judge: a ref, or self = the policy of the round"
            " (self-rewarding)."
        ),
    )
    group_preference: Optional[str] = Field(
        None,
        title="Group preference",
        description="Model of reward components with kind=group_preference, from the stage of that name.",
    )
    context: Optional[str] = Field(
        None, title="Context", description="Rated responses of the groups of kind=group_preference: ref or file."
    )
    rubric: Optional[str] = Field(
        None, title="Rubric", description="Rubric of reward components with kind=rubric: ref or file."
    )

    @model_validator(mode="after")
    def _sources_given(self):
        for section in type(self).model_fields:
            for component in getattr(getattr(self, section), "rewards", ()):
                for name in GIVEN_TO.get(component.kind, ()):
                    if getattr(self, name) is None:
                        raise ValueError(
                            f"{section}.rewards has a component of kind {component.kind}, which needs {name}; write"
                            f" {name}=REF_OR_PATH"
                        )
        return self


class WorldRecipeConfig(RecipeConfig):
    """A model and data of your own, or the embedded world and a small base model pre-trained on it."""

    model: Optional[str] = Field(
        None, title="Model", description="Base model (ref, directory or hub id); empty: pre-train a small one here."
    )
    data: Data = Field(Data(), description="Your own data; empty: the embedded world.")
    world: WorldConfig = Field(WorldConfig(), description="The embedded world.")
    base_model: BaseModelConfig = Field(BaseModelConfig(), description="Shape and tokenizer of the small base model.")
    pretraining: SFTConfig = Field(
        SFTConfig(train_on="full"), description="Pre-training of the small base model on plain text."
    )
    ingest_demonstrations: IngestConfig = Field(
        IngestConfig(kind="demonstrations/1", **HELD_OUT), description="Checks and splits of the demonstrations."
    )
    ingest_pairs: IngestConfig = Field(
        IngestConfig(kind="pairs/1", **HELD_OUT), description="Checks and splits of the preference pairs."
    )
    ingest_prompts: IngestConfig = Field(
        IngestConfig(kind="prompts/1", **HELD_OUT), description="Checks and splits of the prompts."
    )


def small_base_model(run: Run, source: Source, config: Any, demonstrations: str) -> str:
    """A blank model with a tokenizer trained on the spot, pre-trained on plain text."""
    blank = run("base_model", text=source("text"), conversations=demonstrations, config=config.base_model)
    return run(
        "sft", "pretraining", model=blank["model"], data=source("text"), config=config.pretraining, name_as="base"
    )["model"]


def pretrained(run: Run, source: Source, config: Any, demonstrations: str) -> str:
    """The given base model, else a small one trained here."""
    return config.model if config.model is not None else small_base_model(run, source, config, demonstrations)


class IteratedConfig(RewardSources, WorldRecipeConfig):
    """What every iterated recipe has: the policy to start from, data, a reward model where one is asked for, and the
    judgement.
    """

    model: Optional[str] = Field(
        None,
        title="Model",
        description=(
            "Policy to improve, normally an SFT model (ref, directory or hub id); empty: a small one is "
            "trained here on the embedded world."
        ),
    )
    reward_model: Optional[str] = Field(
        None,
        title="Reward model",
        description="Scorer of reward components with kind=model; empty: trained on the pairs when needed.",
    )
    sft: SFTConfig = Field(SFTConfig(), description="Fine-tuning of the small base model on demonstrations.")
    train_reward_model: RewardModelConfig = Field(
        RewardModelConfig(), description="Reward model from pairs, where one is asked for and none is given."
    )
    evaluate: EvaluateConfig = Field(
        EvaluateConfig(), description="Evaluation on held-out prompts, the same for every round."
    )
    promote: GateConfig = Field(
        GateConfig(prompts="confirmation"),
        description="The promotion gate; the best model is chosen on the other half of the prompts.",
    )
    promote_as: str = Field("policy", description="Registered name whose champion the best model challenges.")


def next_prompts(sample: Any, number: int) -> Any:
    """The settings of a rejection step for round ``number`` (1-based): with ``max_prompts``, each round takes the next
    prompts.
    """
    return sample.model_copy(update={"prompt_offset": sample.prompt_offset + (number - 1) * (sample.max_prompts or 0)})


def starting_policy(run: Run, source: Source, config: Any) -> str:
    """The given policy, else a small base model pre-trained and fine-tuned here."""
    if config.model is not None:
        return config.model
    demonstrations = ingest(run, "demonstrations", source("demonstrations"), config)
    base = small_base_model(run, source, config, demonstrations)
    return run("sft", model=base, data=demonstrations, config=config.sft, name_as="sft")["model"]


def scorer(run: Run, source: Source, config: Any, components: list, start: str, pairs: str | None = None) -> str | None:
    """The reward model that the components ask for: the given one, else one trained on the pairs; None when none
    asks.
    """
    if not any(component.kind == "model" for component in components):
        return None
    if config.reward_model is not None:
        return config.reward_model
    return trained_scorer(run, source, config, start, pairs)[0]


def trained_scorer(run: Run, source: Source, config: Any, start: str, pairs: str | None = None) -> tuple[str, str]:
    """(reward model trained on the pairs, the pairs); ``pairs``: these, where they are ingested already."""
    pairs = pairs or ingest(run, "pairs", source("pairs"), config)
    return (
        run(
            "reward_model",
            "train_reward_model",
            model=start,
            data=pairs,
            config=config.train_reward_model,
            name_as="reward",
        )["model"],
        pairs,
    )


def averaged(run: Run, members: int, label: str, seed: int, name: str, train: Callable[[str, int, str], str]) -> str:
    """One training, or the average of several that differ by their seed (``ops.merge``; of LoRA adapters the average of
    their products, ``peft.lora``): ``train(label, seed, name)`` -> model; ``name``: what it is published as.
    """
    if members == 1:
        return train(label, seed, name)
    found = run.together(
        [lambda i=i: train(f"{label}_{i}", seed + 1000 * (i - 1), name) for i in range(1, members + 1)]
    )
    return run(
        "merge",
        f"average_{label}",
        models={f"seed_{i}": model for i, model in enumerate(found, 1)},
        config=MergeConfig(),
        name_as=name,
    )["model"]


def accuracies(learned: Outputs) -> dict[str, float]:
    """What a round's reward model is worth: that of the round before and itself on the round's held-out rows, and
    itself on those of earlier rows; without those that are not known.
    """
    found = {
        name: learned.metrics.get(key)
        for name, key in (
            ("accuracy_before", "previous/accuracy"),
            ("accuracy", "validation/accuracy"),
            ("accuracy_earlier", "earlier/accuracy"),
        )
    }
    return {name: round(value, 4) for name, value in found.items() if value is not None}


def reward_inputs(source: Source, config: Any, components: list, policy: str) -> dict[str, str]:
    """The stage inputs that reward components ask for beside the reward model, those only: judge, rubric,
    group_preference, context, demonstrations.
    """
    wanted = {name: getattr(config, name) for component in components for name in GIVEN_TO.get(component.kind, ())}
    if any(component.kind in ("judge", "debate", "rubric") and not component.endpoint for component in components):
        wanted["judge"] = policy if config.judge == "self" else config.judge
    if any(component.kind == "icdpo" for component in components):
        wanted["demonstrations"] = source("demonstrations")
    return wanted


def rl_inputs(source: Source, config: Any, settings: RLConfig, policy: str, judge: str | None) -> dict[str, str | None]:
    """What the rewards and the critic of RL with these settings read: :func:`reward_inputs`, and the reward model
    ``judge`` where something asks it.
    """
    given = reward_inputs(source, config, settings.rewards, policy)
    return {
        **given,
        "reward_model": (
            judge if reads_input(settings, "reward_model", [name for name, ref in given.items() if ref]) else None
        ),
    }


def conclusion(run: Run, source: Source, config: Any, models: dict[str, str], prompts: str, judge: str | None) -> dict:
    """Every model on the same held-out prompts; the best one on half of them through the promotion gate on the other
    half.
    """
    evaluations, given = evaluated(run, source, config, models, prompts, judge)
    return decided(run, config, models, evaluations, given)


def evaluated(
    run: Run, source: Source, config: Any, models: dict[str, str], prompts: str, judge: str | None
) -> tuple[Evaluations, dict[str, str | None]]:
    """(every model's evaluation on the held-out prompts, what they were given)."""
    given = {
        "prompts": prompts,
        "reward_model": judge,
        "reference": models["start"],
        **reward_inputs(source, config, config.evaluate.rewards, models["start"]),
    }
    return evaluate_all(run, models, config.evaluate, select_by=config.promote.metric, **given), given


def decided(
    run: Run, config: Any, models: dict[str, str], evaluations: Evaluations, given: dict[str, str | None]
) -> dict:
    """The best model through the promotion gate, and all of them in one table."""
    decision = promote(
        run, models, evaluations, config.promote, config.evaluate, baseline="start", name=config.promote_as, **given
    )
    return {"models": models, "scores": evaluations.table(), "best": evaluations.best, "decision": decision}
