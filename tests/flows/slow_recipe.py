"""A recipe of one slow stage, deployed by the tests of cancellation."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field

from flows.recipe import RecipeConfig, Run, recipe
from tests.flows.slow_stage import Config as SlowConfig


class Config(RecipeConfig):
    slow: SlowConfig = Field(SlowConfig(), description="The stage.")


@recipe(Config)
def slow_recipe(run: Run, config: Config) -> dict:
    """Wait."""
    run("tests.flows.slow_stage", "slow", config=config.slow)
    return {}


@slow_recipe.on_cancellation
def note(flow, flow_run, state) -> None:
    """Leaves a file; Prefect runs this in a process of its own, which must find the project's packages."""
    Path(os.environ["POSTTRAIN_HOME"], f"cancelled-{flow_run.id}").touch()
