"""Recipes of slow stages: one alone (deployed by the tests of cancellation), and several that do not need each
other.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field

from flows.recipe import RecipeConfig, Run, recipe
from tests.flows.slow_stage import Config as SlowConfig

# it needs none of the libraries that forked stages have, which take a process seconds to load
os.environ.setdefault("POSTTRAIN_FORK", "0")


class Config(RecipeConfig):
    slow: SlowConfig = Field(SlowConfig(), description="The stage.")


@recipe(Config)
def slow_recipe(run: Run, config: Config) -> dict:
    """Wait."""
    run("tests.flows.slow_stage", "slow", config=config.slow)
    return {"scores": [{"model": "slow", "accuracy": 0.25}], "models": {"slow": "model:slow/1"}}


class SideBySideConfig(RecipeConfig):
    seconds: list[float] = Field(description="One part per entry, of so many seconds.")
    fails: list[int] = Field([], description="Parts that fail at their end.")


@recipe(SideBySideConfig)
def side_by_side(run: Run, config: SideBySideConfig) -> dict:
    """Several waits that do not need each other, each with one that follows it."""

    def part(i: int) -> str:
        run(
            "tests.flows.slow_stage",
            f"first_{i}",
            config=SlowConfig(seconds=config.seconds[i], fail=i in config.fails),
            seed=i,
        )
        return run("tests.flows.slow_stage", f"then_{i}", config=SlowConfig(seconds=0.1), seed=100 + i).label

    return {"found": run.together([lambda i=i: part(i) for i in range(len(config.seconds))])}


@slow_recipe.on_cancellation
def note(flow, flow_run, state) -> None:
    """Leaves a file; Prefect runs this in a process of its own, which must find the project's packages."""
    Path(os.environ["POSTTRAIN_HOME"], f"cancelled-{flow_run.id}").touch()
