"""instruction_following: prompts get constraints that a program can check; SFT on answers that meet them, DPO on pairs,
RL on the checker itself (``synth.constraint``).

    posttrain run instruction_following --set model=path/or/ref --set data.prompts=prompts.jsonl --set
    data.test=ifeval_input_data.jsonl

The model answers each prompt with and without its constraints (`writer`, or constrain.endpoint: somebody else does).
Answers that meet all of them are demonstrations, and chosen over those that were not told. `steps` says which of sft,
dpo and rl follow, each from the model before; one for which nothing was found is passed over. Judged on `data.test`,
whose prompts are kept out of training, or on held-out prompts with constraints of their own.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Optional

from pydantic import Field

from flows.recipe import RecipeConfig, Run, recipe
from flows.steps import ALL_TEST, HELD_OUT, contamination, evaluate_all, ingest, promote
from stages.align import Config as AlignConfig
from stages.constrain import Config as ConstrainConfig
from stages.contamination import Config as ContaminationConfig
from stages.evaluate import Config as EvaluateConfig
from stages.ingest import Config as IngestConfig
from stages.promote import Config as GateConfig
from stages.reward.components import RewardComponent
from stages.rl import Config as RLConfig
from stages.sft import Config as SFTConfig
from stages.spec import StageConfig

FOLLOWED = [RewardComponent(name="constraints", kind="constraints")]


class Data(StageConfig):
    prompts: str = Field(description="Prompts in English that get constraints: ref, file, directory or hub id.")
    test: Optional[str] = Field(
        None,
        title="Test",
        description=(
            "Prompts with constraints to judge on, such as IFEval's file; empty: held-out prompts with drawn ones."
        ),
    )


class Config(RecipeConfig):
    NOT_READ: ClassVar = {"contamination.split": "the split is that of the evaluation, evaluate.split"}
    model: str = Field(description="The policy to improve: a ref, a model directory or a hub id.")
    data: Data = Field(description="The prompts.")
    writer: Optional[str] = Field(
        None, title="Writer", description="Model that answers (or constrain.endpoint); empty: the policy itself."
    )
    steps: list[Literal["sft", "dpo", "rl"]] = Field(
        ["sft", "dpo", "rl"], min_length=1, description="What is done with the constraints, in this order."
    )
    ingest_prompts: IngestConfig = Field(
        IngestConfig(kind="prompts/1", decontaminate="coverage", **HELD_OUT),
        description="Checks and splits of the prompts; those of data.test are left out.",
    )
    ingest_test: IngestConfig = Field(
        IngestConfig(kind="prompts/1", **ALL_TEST), description="Checks and splits of the test prompts."
    )
    constrain: ConstrainConfig = Field(ConstrainConfig(), description="Constraints, answers and pairs.")
    sft: SFTConfig = Field(SFTConfig(), description="Fine-tuning on answers that meet their constraints.")
    dpo: AlignConfig = Field(
        AlignConfig(method="dpo"), description="Direct alignment on answers that meet them over answers that do not."
    )
    rl: RLConfig = Field(RLConfig(rewards=FOLLOWED), description="Reinforcement learning on the checker.")
    evaluate: EvaluateConfig = Field(
        EvaluateConfig(rewards=FOLLOWED), description="Evaluation on held-out prompts with constraints."
    )
    contamination: ContaminationConfig = Field(
        ContaminationConfig(),
        description="What of the held-out prompts is in the training data of the last model and its ancestors.",
    )
    promote: GateConfig = Field(
        GateConfig(prompts="confirmation"),
        description="The promotion gate; the best model is chosen on the other half of the prompts.",
    )
    promote_as: str = Field("follower", description="Registered name whose champion the best model challenges.")


@recipe(Config)
def instruction_following(run: Run, config: Config) -> dict:
    """Verifiable instruction following: constraints drawn for prompts, answers checked, then SFT, DPO and RL on what
    the checker says.
    """
    prompts = ingest(run, "prompts", config.data.prompts, config)
    test = ingest(run, "test", config.data.test, config) if config.data.test else None
    writer = None if config.constrain.endpoint else config.writer or config.model
    made = run("constrain", prompts=prompts, model=writer, config=config.constrain, name_as="constraints")
    test = test or made["prompts"]

    models, policy = {"start": config.model}, config.model
    for step in dict.fromkeys(config.steps):
        stage, data, count = {
            "sft": ("sft", "data", "demonstrations"),
            "dpo": ("align", "pairs", "pairs"),
            "rl": ("rl", "prompts", "prompts"),
        }[step]
        if made.metrics.get(count) != 0:
            policy = models[step] = run(
                stage, step, model=policy, data=made[data], config=getattr(config, step), name_as=f"constraints-{step}"
            )["model"]
    evaluations = evaluate_all(run, models, config.evaluate, select_by=config.promote.metric, prompts=test)
    clean = contamination(run, models, evaluations, test, config)
    decision = promote(
        run,
        models,
        evaluations,
        config.promote,
        config.evaluate,
        baseline="start",
        name=config.promote_as,
        prompts=test,
    )
    return {
        "models": models,
        "scores": evaluations.table(),
        "best": evaluations.best,
        "contamination": clean["scores"],
        "decision": decision,
    }
