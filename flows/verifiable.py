"""verifiable: problems whose answers can be checked, such as GSM8K: SFT on solutions, then RL against the verifier.

posttrain run verifiable --set data.demonstrations=gsm8k_train.jsonl --set model=path/or/hub-id
"""

from __future__ import annotations

from typing import ClassVar, Optional

from pydantic import Field

from flows.recipe import RecipeConfig, Run, recipe
from flows.start import RewardSources, reward_inputs
from flows.steps import (
    ALL_TEST,
    Evaluations,
    Source,
    beside_given,
    contamination,
    evaluate_all,
    graded,
    ingest,
    promote,
)
from stages.contamination import Config as ContaminationConfig
from stages.evaluate import Config as EvaluateConfig
from stages.ingest import Config as IngestConfig
from stages.promote import Config as GateConfig
from stages.rl import Config as RLConfig
from stages.sft import Config as SFTConfig
from stages.spec import StageConfig


class Data(StageConfig):
    demonstrations: str = Field(
        description="Worked solutions: a file, directory, dataset ref or hub id (GSM8K's form, or conversations)."
    )
    prompts: Optional[str] = Field(
        None, title="Prompts", description="Problems with answers to train RL on; empty: those of the demonstrations."
    )
    test: Optional[str] = Field(
        None, title="Test", description="Problems with answers to judge on; empty: the test split of the prompts."
    )
    answers: dict[str, str] = Field(
        {},
        description=(
            "What others answered to the problems that are judged on, {NAME: file of answers} (stage evaluate): graded"
            " likewise, and set beside the best model."
        ),
    )


class Config(RewardSources, RecipeConfig):
    NOT_READ: ClassVar = {"contamination.split": "the split is that of the evaluation, evaluate.split"}
    model: str = Field(description="The policy to improve: a ref, a model directory or a hub id.")
    data: Data = Field(description="The problems and their solutions.")
    ingest_demonstrations: IngestConfig = Field(
        IngestConfig(kind="demonstrations/1", validation_fraction=0.02, test_fraction=0.05, decontaminate="coverage"),
        description="Checks and splits of the solutions; those of test problems (data.test) are left out.",
    )
    ingest_prompts: IngestConfig = Field(
        IngestConfig(kind="prompts/1", validation_fraction=0.02, test_fraction=0.05, decontaminate="coverage"),
        description="Checks and splits of the problems; those among the test problems (data.test) are left out.",
    )
    ingest_test: IngestConfig = Field(
        IngestConfig(kind="prompts/1", **ALL_TEST), description="Checks and splits of the test problems."
    )
    sft: SFTConfig = Field(SFTConfig(), description="Fine-tuning on the solutions.")
    rl: RLConfig = Field(RLConfig(), description="Reinforcement learning against the verifier.")
    evaluate: EvaluateConfig = Field(EvaluateConfig(), description="Evaluation on held-out problems.")
    contamination: ContaminationConfig = Field(
        ContaminationConfig(),
        description="What of the held-out problems is in the training data of the last model and its ancestors.",
    )
    promote: GateConfig = Field(
        GateConfig(prompts="confirmation"),
        description="The promotion gate; the best model is chosen on the other half of the prompts.",
    )
    promote_as: str = Field("solver", description="Registered name whose champion the best model challenges.")


@recipe(Config)
def verifiable(run: Run, config: Config) -> dict:
    """From checkable problems and a model to a better solver: SFT on solutions, RL against the verifier."""
    source = Source(run, config)
    demonstrations = ingest(run, "demonstrations", source("demonstrations"), config)
    prompts = ingest(run, "prompts", config.data.prompts or config.data.demonstrations, config)
    test = ingest(run, "test", config.data.test, config) if config.data.test else prompts

    def grading(policy: str) -> dict:
        return {"prompts": test, **reward_inputs(source, config, config.evaluate.rewards, policy)}

    def grade(inputs: dict) -> Evaluations:
        return graded(run, config.data.answers, ("start", "sft", "rl"), config.evaluate, **inputs)

    # before what is trained, unless that judges them
    trained_judges = grading("instructed") != grading("reinforced")
    others = Evaluations() if trained_judges else grade(grading(config.model))

    instructed = run("sft", model=config.model, data=demonstrations, config=config.sft, name_as="sft")["model"]
    reinforced = run(
        "rl",
        model=instructed,
        data=prompts,
        config=config.rl,
        name_as="rl",
        **reward_inputs(source, config, config.rl.rewards, instructed),
    )["model"]

    models = {"start": config.model, "sft": instructed, "rl": reinforced}
    held_out = grading(instructed)
    if trained_judges:
        others = grade(held_out)
    evaluations = evaluate_all(run, models, config.evaluate, select_by=config.promote.metric, **held_out)
    beside = beside_given(run, others, evaluations)
    clean = contamination(run, models, evaluations, test, config)
    decision = promote(
        run, models, evaluations, config.promote, config.evaluate, baseline="start", name=config.promote_as, **held_out
    )
    return {
        "models": models,
        "scores": evaluations.table() + beside,
        "best": evaluations.best,
        "contamination": clean["scores"],
        "decision": decision,
    }
