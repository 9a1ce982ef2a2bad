"""A recipe of two trainings that do not need each other and a stage of one device after them."""

from __future__ import annotations

from pydantic import Field

from flows.recipe import RecipeConfig, Run, recipe
from stages.merge import Config as MergeConfig
from stages.sft import Config as SFTConfig


class Config(RecipeConfig):
    model: str = Field(description="What both start from.")
    demonstrations: str = Field(description="A file.")
    sft: SFTConfig = Field(SFTConfig(), description="Both trainings.")


@recipe(Config)
def two_and_merged(run: Run, config: Config) -> dict:
    """Train twice, and merge."""

    def part(i: int) -> str:
        return run("sft", f"sft_{i}", model=config.model, data=config.demonstrations, config=config.sft, seed=i)[
            "model"
        ]

    models = run.together([lambda i=i: part(i) for i in (0, 1)])
    return {"models": {"merged": run("merge", models=dict(zip("ab", models)), config=MergeConfig())["model"]}}
