"""checkpoint_selection: which checkpoint of a training that has ended is the best, and an alias for it (sft.ckpt_select).

    posttrain run checkpoint_selection --set candidates=[KEY] --set reward_model=MODEL
    posttrain run checkpoint_selection --set candidates='[model:a@latest, model:b@latest]' --set name=best --set data.demonstrations=demos.jsonl

`posttrain select` is the same without Prefect. `instructgpt` has it between its reward model and RL.
"""

from __future__ import annotations

from typing import Optional

from pydantic import Field

from flows.recipe import RecipeConfig, Run, recipe
from stages.select_checkpoint import Config as SelectConfig
from stages.select_checkpoint import as_trained
from stages.spec import ConfigError, StageConfig


class Data(StageConfig):
    demonstrations: Optional[str] = Field(
        None,
        title="Demonstrations",
        description=(
            "What the candidates were fine-tuned on, with validation rows (of reward models: labelled answers); empty:"
            " what the stage was."
        ),
    )
    prompts: Optional[str] = Field(
        None,
        title="Prompts",
        description="Held-out prompts; empty: those of the validation rows of the demonstrations.",
    )


class Config(RecipeConfig):
    candidates: list[str] = Field(
        min_length=1,
        description=(
            "A stage that was run with publish_epochs=true: its key, a run with one such stage, or a model that it made."
            " Or several models, in the order in which ties go."
        ),
    )
    data: Data = Field(Data(), description="Held-out data.")
    reward_model: Optional[str] = Field(None, title="Reward model", description="Scores the answers (rm_score).")
    judge: Optional[str] = Field(
        None, title="Judge", description="Language model that compares answers (select.select_on=win_rate)."
    )
    name: Optional[str] = Field(
        None, title="Name", description="Registered name; empty: that of the stage's model. Several models need one."
    )
    alias: str = Field("selected", description="Alias that the chosen model gets.")
    select: SelectConfig = Field(SelectConfig(), description="What decides.")


@recipe(Config)
def checkpoint_selection(run: Run, config: Config) -> dict:
    """Choose among checkpoints by reward, win rate, a metric or validation loss; the chosen one gets an alias."""
    from tasks.promotion import candidates

    found, trained, known = candidates(config.candidates)
    name = config.name or known
    if name is None:
        raise ConfigError("candidates that are given one by one have no name in common; write name=NAME")
    inputs = found | {
        key: ref
        for key, ref in (
            ("data", config.data.demonstrations),
            ("prompts", config.data.prompts),
            ("reward_model", config.reward_model),
            ("judge", config.judge),
        )
        if ref is not None
    }
    outputs = run("select_checkpoint", config=as_trained(config.select, trained), name_as=name, **inputs)
    rows: dict[str, dict] = {}
    for key, value in outputs.metrics.items():
        label, slash, metric = key.partition("/")
        if slash:
            rows.setdefault(label, {"candidate": label})[metric] = value
    return {
        "models": {"selected": outputs["model"]},
        "scores": list(rows.values()),
        "decision": run.conclude(outputs["model"], outputs, name, config.alias),
    }
