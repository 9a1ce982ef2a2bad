"""character: a manner of answering from a list of traits, without human data (character training,
``recipe.character``).

    posttrain run character --set model=path/or/ref --set data.traits=traits.yaml

    - {id: curious, kind: trait, text: Asks back where the person's situation matters, and takes an interest in it.}      # traits.yaml
    - {id: frank, kind: trait, text: "Says what it thinks and why, also where that is unwelcome."}

1. write_prompts: messages to which somebody with a trait would answer in a way of their own.  2. Four answers to each,
   sampled with the text of the trait in the
system message.  3. A judge ranks them by the trait, pair by pair.  4. DPO on the pairs, in which the text of the trait
does not stand.  5. On held-out messages, how often the trained model shows each trait better than the model it came
from; with `data.prompts`, what it can still do.

Look at each trait's answers before a model is used: `active: false` in the file puts a trait aside. The model writes
and ranks itself unless `writer` and `judge`, or the endpoints in the sections `write`, `rank` and `win_rate`, name
others.
"""

from __future__ import annotations

from typing import Any, Optional

from pydantic import Field

from flows.config import ConfigError
from flows.recipe import RecipeConfig, Run, recipe
from flows.steps import HELD_OUT, compared, evaluate, evaluate_all, ingest, judge_of
from stages.ai_labels import Config as JudgeConfig
from stages.align import Config as AlignConfig
from stages.evaluate import Config as EvaluateConfig
from stages.ingest import Config as IngestConfig
from stages.rejection import Config as RejectionConfig
from stages.reward.components import RewardComponent
from stages.spec import StageConfig
from stages.win_rate import Config as WinRateConfig
from stages.write_prompts import Config as WritePromptsConfig


class Data(StageConfig):
    traits: str = Field(
        description="The traits: YAML or JSON Lines with id and text, a text file with one per line, or a ref."
    )
    pool: Optional[str] = Field(
        None, title="Pool", description="Prompts as people write them, shown as examples where messages are written."
    )
    prompts: Optional[str] = Field(
        None, title="Prompts", description="Prompts with answers that show what the model can do, before and after."
    )


class Config(RecipeConfig):
    model: str = Field(description="The policy to train: a ref, a model directory or a hub id.")
    data: Data = Field(description="Traits, and what else is known.")
    writer: Optional[str] = Field(
        None, title="Writer", description="Who writes the messages; empty: the model, or write.endpoint."
    )
    judge: Optional[str] = Field(
        None, title="Judge", description="Who ranks answers by a trait; empty: the model, or rank.endpoint."
    )
    ingest_pool: IngestConfig = Field(IngestConfig(kind="prompts/1"), description="Checks of the pool.")
    ingest_prompts: IngestConfig = Field(
        IngestConfig(kind="prompts/1", **HELD_OUT), description="Checks and splits of data.prompts."
    )
    write: WritePromptsConfig = Field(
        WritePromptsConfig(num_prompts=50, test_fraction=0.2),
        description="Messages for each trait; a fifth of them is held out.",
    )
    answers: RejectionConfig = Field(
        RejectionConfig(
            num_generations=4,
            max_completion_length=512,
            select="random_per_prompt",
            allow_empty=True,
            rewards=[RewardComponent(name="complete", kind="truncation")],
        ),
        description="Answers behind the trait (four are ours).",
    )
    rank: JudgeConfig = Field(
        JudgeConfig(labels="hard", principle_of="row", validation_fraction=0.05),
        description="The judge's comparisons by the trait; with pairs_per_prompt=1 every two answers of a message.",
    )
    align: AlignConfig = Field(AlignConfig(), description="Direct alignment on the pairs.")
    evaluate: EvaluateConfig = Field(
        EvaluateConfig(num_samples=1, rewards=[RewardComponent(name="verifier", kind="verifier", on_missing="skip")]),
        description="Answers to held-out messages.",
    )
    win_rate: WinRateConfig = Field(
        WinRateConfig(principle_of="row", baseline="start"),
        description="Trained model against the start, by the trait of each message.",
    )
    evaluate_ability: EvaluateConfig = Field(EvaluateConfig(), description="What both can do on data.prompts.")


@recipe(Config)
def character(run: Run, config: Config) -> dict:
    """Character training: model-written messages for each trait, answers behind it, ranked by it, DPO without it, win
    rate of each trait.
    """
    traits = run(
        "ingest", "ingest_traits", data=config.data.traits, config=IngestConfig(kind="principles/1"), name_as="traits"
    )["data"]
    pool = ingest(run, "pool", config.data.pool, config) if config.data.pool else None
    tasks = ingest(run, "prompts", config.data.prompts, config) if config.data.prompts else None
    written = run(
        "write_prompts",
        model=None if config.write.endpoint else config.writer or config.model,
        principles=traits,
        pool=pool,
        config=config.write,
        name_as="messages",
    )
    if "prompts" in written.metrics and not all(
        written.metrics.get(f"split.{split}") for split in (config.answers.split, config.evaluate.split)
    ):
        raise ConfigError(
            f"of {written.metrics['prompts']} written messages none is in split {config.answers.split!r} to train on,"
            f" or none in {config.evaluate.split!r} to judge by; raise write.num_prompts, or write.test_fraction"
        )
    messages = written["prompts"]

    answers = run("rejection", "answers", model=config.model, prompts=messages, traits=traits, config=config.answers)[
        "candidates"
    ]
    ranked = run(
        "judge",
        "rank",
        data=answers,
        principles=traits,
        judge=judge_of(config.judge or config.model, config.rank)[0],
        config=every_pair(config),
        name_as="character-pairs",
    )
    policy = run("align", model=config.model, data=ranked["data"], config=config.align, name_as="character")["model"]

    models = {"start": config.model, "character": policy}
    samples = {
        name: outputs["samples"]
        for name, outputs in zip(
            models,
            run.together(
                [
                    lambda name=name, model=model: evaluate(
                        run, name, model, config.evaluate, prompts=messages, reference=config.model
                    )
                    for name, model in models.items()
                ]
            ),
        )
    }
    judge, section = judge_of(config.judge or config.model, config.win_rate, config.rank)
    result: dict[str, Any] = {
        "models": models,
        "win_rates": compared(run, samples, judge, section, prompts=messages, principles=traits),
    }
    if tasks:
        result["scores"] = evaluate_all(
            run,
            {f"ability_{name}": model for name, model in models.items()},
            config.evaluate_ability,
            prompts=tasks,
            reference=config.model,
        ).table()
    return result


def every_pair(config: Config) -> JudgeConfig:
    """All pairs of a message's answers, unless the section says how many: more than its default, which forms and
    records give, too.
    """
    n = config.answers.num_generations
    return (
        config.rank
        if config.rank.pairs_per_prompt != JudgeConfig.model_fields["pairs_per_prompt"].default
        else config.rank.model_copy(update={"pairs_per_prompt": max(1, n * (n - 1) // 2)})
    )
