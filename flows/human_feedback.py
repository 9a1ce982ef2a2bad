"""human_feedback: the policy's own answers, compared by people, teach it by DPO.

    posttrain run human_feedback --set model=path/or/hub-id --set data.prompts=prompts.jsonl

Two answers or more are sampled for each prompt, and people say which of two is better: the run writes a task file and
ends as waiting. When the filled file was brought in (`posttrain answer TASK FILE`), the same run goes on: DPO on the
labels, and an evaluation of both policies. A run started in Prefect's UI is suspended meanwhile; its *Resume* asks for
the file. `answers.labeler=stub` draws the labels, for trying the pipeline out.
"""

from __future__ import annotations

from pydantic import Field

from flows.recipe import RecipeConfig, Run, recipe
from flows.steps import HELD_OUT, evaluate_all, ingest
from stages.align import Config as AlignConfig
from stages.evaluate import Config as EvaluateConfig
from stages.human_answers import Config as AnswersConfig
from stages.human_task import Config as TaskConfig
from stages.ingest import Config as IngestConfig
from stages.rejection import Config as RejectionConfig
from stages.spec import StageConfig


class Data(StageConfig):
    prompts: str = Field(description="Prompts: a file, directory, dataset ref or hub id.")


class Config(RecipeConfig):
    model: str = Field(description="The policy to improve: a ref, a model directory or a hub id.")
    data: Data = Field(description="The prompts.")
    ingest_prompts: IngestConfig = Field(
        IngestConfig(kind="prompts/1", **HELD_OUT), description="Checks and splits of the prompts."
    )
    sample: RejectionConfig = Field(
        RejectionConfig(num_generations=4, temperature=1.0, select="top_per_prompt", allow_empty=True),
        description="Answers that are compared.",
    )
    task: TaskConfig = Field(TaskConfig(limit=200), description="What people are asked, and about how many pairs.")
    answers: AnswersConfig = Field(AnswersConfig(), description="How the filled file is read.")
    dpo: AlignConfig = Field(AlignConfig(), description="Direct preference optimisation on their labels.")
    evaluate: EvaluateConfig = Field(
        EvaluateConfig(num_samples=1), description="Evaluation of the policy before and after."
    )


@recipe(Config)
def human_feedback(run: Run, config: Config) -> dict:
    """The policy's answers, compared by people in a task file, then DPO; the run waits for the file."""
    prompts = ingest(run, "prompts", config.data.prompts, config)
    candidates = run("rejection", "sample", model=config.model, prompts=prompts, config=config.sample)["candidates"]
    labels = run.people("labels", data=candidates, task=config.task, answers=config.answers, name_as="labels")
    aligned = run(
        "align", "dpo", model=config.model, data=labels["data"], config=config.dpo, name_as="policy-from-people"
    )["model"]
    models = {"start": config.model, "dpo": aligned}
    evaluations = evaluate_all(run, models, config.evaluate, prompts=prompts, reference=config.model)
    return {"models": models, "scores": evaluations.table(), "labels": labels.metrics}
