"""constitutional: harmlessness without human labels of it (Constitutional AI, ``recipe.cai``; Bai et al. 2022).

    posttrain run constitutional --set model=path/or/ref --set data.prompts=red_team.jsonl --set
    data.helpful=demonstrations.jsonl --set data.helpful_pairs=pairs.jsonl

1. revise: the model answers the prompts, criticises its answers under principles and rewrites them.  2. sft on the
   revisions and the helpful demonstrations.
3. Two answers of the SFT model to each prompt; a judge says which agrees better with a principle, as a probability.  4.
   A reward model from these soft labels
and the helpful pairs.  5. rl against it.  6. Every model on the held-out prompts: reward, and how often its answers
agree better with a principle than the start's. How often answers refuse before and after they are revised is in the
report of `revise`.

Without `data.principles` the constitution is that of `flows/presets/constitution.yaml`. Who revises and who judges is
the model itself unless `reviser` and `judge`, or the endpoints in the sections `revise` and `feedback`, name others.
"""

from __future__ import annotations

from typing import Optional

from pydantic import Field

from flows.config import CONSTITUTION
from flows.recipe import RecipeConfig, Run, recipe
from flows.steps import HELD_OUT, compared, evaluate_all, ingest, judge_of
from stages.ai_labels import Config as JudgeConfig
from stages.evaluate import Config as EvaluateConfig
from stages.ingest import Config as IngestConfig
from stages.mix import Config as MixConfig
from stages.rejection import Config as RejectionConfig
from stages.reward_model import Config as RewardModelConfig, reading
from stages.reward.components import RewardComponent
from stages.revise import Config as ReviseConfig
from stages.rl import Config as RLConfig
from stages.sft import Config as SFTConfig
from stages.spec import StageConfig
from stages.win_rate import Config as WinRateConfig

#: Human helpfulness comparisons among all of Constitutional AI's: 135,296 beside 182,831 labelled by a constitution.
HELPFUL_SHARE = 0.425


class Data(StageConfig):
    prompts: str = Field(
        description="Prompts that tempt a model to do harm, and others: ref, file, directory or hub id."
    )
    principles: Optional[str] = Field(
        None,
        title="Principles",
        description=(
            "The constitution: a text file with one principle per line, YAML, JSON Lines or a ref; empty: sixteen of"
            " ours."
        ),
    )
    helpful: Optional[str] = Field(
        None, title="Helpful", description="Helpful demonstrations, mixed with the revisions for SFT (section mix)."
    )
    helpful_pairs: Optional[str] = Field(
        None,
        title="Helpful pairs",
        description="Helpfulness comparisons by people, mixed with the judge's (reward_model.replay_fraction).",
    )
    rl_prompts: Optional[str] = Field(
        None, title="RL prompts", description="Prompts of RL, helpful ones too; empty: data.prompts."
    )


class Config(RecipeConfig):
    model: str = Field(description="A helpful model that answers and revises: a ref, a model directory or a hub id.")
    data: Data = Field(description="Prompts, principles and helpfulness data.")
    pretrained: Optional[str] = Field(
        None,
        title="Pretrained",
        description="What SFT starts from (Constitutional AI: the pretrained model); empty: the model.",
    )
    reviser: Optional[str] = Field(
        None, title="Reviser", description="Who criticises and revises; empty: the model itself, or revise.endpoint."
    )
    judge: Optional[str] = Field(
        None,
        title="Judge",
        description="Who compares answers under a principle; empty: the model, or feedback.endpoint.",
    )
    ingest_prompts: IngestConfig = Field(
        IngestConfig(kind="prompts/1", **HELD_OUT), description="Checks and splits of the prompts."
    )
    ingest_rl_prompts: IngestConfig = Field(
        IngestConfig(kind="prompts/1", **HELD_OUT), description="Checks and splits of data.rl_prompts."
    )
    ingest_helpful: IngestConfig = Field(
        IngestConfig(kind="demonstrations/1", **HELD_OUT),
        description="Checks and splits of the helpful demonstrations.",
    )
    ingest_helpful_pairs: IngestConfig = Field(
        IngestConfig(kind="pairs/1", **HELD_OUT), description="Checks and splits of the helpful pairs."
    )
    revise: ReviseConfig = Field(
        ReviseConfig(validation_fraction=0.05), description="Answers, critiques and revisions."
    )
    mix: MixConfig = Field(
        MixConfig(), description="Shares of revised and helpful demonstrations; empty weights: their sizes."
    )
    sft: SFTConfig = Field(
        SFTConfig(num_train_epochs=1), description="Fine-tuning on them (Constitutional AI one epoch)."
    )
    sample: RejectionConfig = Field(
        RejectionConfig(
            num_generations=2,
            max_completion_length=512,
            select="random_per_prompt",
            allow_empty=True,
            rewards=[RewardComponent(name="complete", kind="truncation")],
        ),
        description="Two answers of the SFT model to each prompt.",
    )
    feedback: JudgeConfig = Field(
        JudgeConfig(validation_fraction=0.05),
        description="The judge's soft labels under a drawn principle, both orders averaged.",
    )
    reward_model: RewardModelConfig = Field(
        RewardModelConfig(objective="soft_label", replay_fraction=HELPFUL_SHARE),
        description="Reward model from the soft labels.",
    )
    rl: RLConfig = Field(
        RLConfig(preset="ppo", rewards=[RewardComponent(name="reward", kind="model")]),
        description="RL against the reward model.",
    )
    evaluate: EvaluateConfig = Field(
        EvaluateConfig(num_samples=1, rewards=[RewardComponent(name="reward", kind="model")]),
        description="Evaluation of the start, the SFT and the RL model.",
    )
    win_rate: WinRateConfig = Field(
        WinRateConfig(baseline="start"),
        description=(
            "How often their held-out answers agree better with a principle than the start's, by the judge or a server"
            " of its own."
        ),
    )


@recipe(Config)
def constitutional(run: Run, config: Config) -> dict:
    """Constitutional AI: critique and revise, SFT, AI preferences under principles, reward model with soft labels,
    RL.
    """
    prompts = ingest(run, "prompts", config.data.prompts, config)
    principles = run(
        "ingest",
        "ingest_principles",
        data=config.data.principles or str(CONSTITUTION),
        config=IngestConfig(kind="principles/1"),
        name_as="principles",
    )["data"]
    helpful, pairs, rl_prompts = (
        ingest(run, name, path, config) if (path := getattr(config.data, name)) else None
        for name in ("helpful", "helpful_pairs", "rl_prompts")
    )

    revised = run(
        "revise",
        model=config.model,
        prompts=prompts,
        principles=principles,
        reviser=config.reviser,
        config=config.revise,
    )
    demonstrations = (
        run(
            "mix",
            data={"revised": revised["data"], "helpful": helpful},
            config=config.mix,
            name_as="constitutional-sft",
        )["data"]
        if helpful
        else revised["data"]
    )
    tuned = run(
        "sft",
        model=config.pretrained or config.model,
        data=demonstrations,
        config=config.sft,
        name_as="constitutional-sl",
    )["model"]

    answers = run("rejection", "answers", model=tuned, prompts=prompts, config=config.sample)["candidates"]
    judge, _ = judge_of(config.judge or config.model, config.feedback)
    labelled = run(
        "judge",
        "feedback",
        data=answers,
        principles=principles,
        judge=judge,
        config=config.feedback,
        name_as="constitutional-pairs",
    )
    reward = run(
        "reward_model",
        model=tuned,
        data=labelled["data"],
        replay={"helpful": pairs} if pairs else None,
        config=reading(config.reward_model, replay=pairs, previous=True),
        name_as="constitutional-reward",
    )["model"]
    policy = run(
        "rl", model=tuned, data=rl_prompts or prompts, reward_model=reward, config=config.rl, name_as="constitutional"
    )["model"]

    models = {"start": config.model, "sl": tuned, "rl": policy}
    evaluations = evaluate_all(run, models, config.evaluate, prompts=prompts, reward_model=reward, reference=tuned)
    judge, section = judge_of(config.judge or config.model, config.win_rate, config.feedback)
    won = compared(
        run,
        {name: outputs["samples"] for name, outputs in evaluations.items()},
        judge,
        section,
        prompts=prompts,
        principles=principles,
    )
    shown = ("kept", "answers", "refusal_rate/original", "refusal_rate/revised", "refusals_added")
    return {
        "models": {**models, "reward": reward},
        "scores": evaluations.table(),
        "win_rates": won,
        "revisions": {name: revised.metrics[name] for name in shown if name in revised.metrics},
    }
