"""reward: from labelled answers and a backbone to a judged reward model, or an ensemble of them.

    posttrain run reward --set data.path=pairs.jsonl --set model=path/or/hub-id
    posttrain run reward --set data.path=pairs.jsonl --set model=path/or/hub-id --set members=4 --set
    combine.combine=uwo

Members differ by seed: their head's initialisation and the order of their data. All of them, and their combination, are
judged on the same held-out pairs.
"""

from __future__ import annotations

from typing import Optional

from pydantic import Field

from flows.recipe import Outputs, RecipeConfig, Run, recipe
from flows.steps import HELD_OUT
from stages.ingest import Config as IngestConfig
from stages.reward_combine import Config as CombineConfig
from stages.reward_model import Config as RewardModelConfig
from stages.spec import StageConfig


class Data(StageConfig):
    path: str = Field(
        description="Pairs, rankings, ratings, labels or steps: a file, directory, dataset ref or hub id."
    )
    pairs: Optional[str] = Field(
        None,
        title="Pairs",
        description=(
            "Held-out pairs that judge the members and their combination; empty: the data, where it holds pairs."
        ),
    )


class Config(RecipeConfig):
    model: str = Field(description="The backbone: a ref, a model directory or a hub id; a decoder or an encoder.")
    data: Data = Field(description="The labelled answers.")
    members: int = Field(
        1, ge=1, le=16, description="Reward models trained; more than one become an ensemble (rm.ensemble)."
    )
    ingest: IngestConfig = Field(IngestConfig(**HELD_OUT), description="Checks, conversion and splits of the data.")
    reward_model: RewardModelConfig = Field(RewardModelConfig(), description="Every member's training.")
    combine: CombineConfig = Field(CombineConfig(), description="How the members become one score.")


@recipe(Config)
def reward(run: Run, config: Config) -> dict:
    """From labelled answers and a backbone to a judged reward model, or an ensemble of them."""
    data = run("ingest", data=config.data.path, config=config.ingest, name_as="labels")["data"]

    def member(k: int) -> Outputs:
        return run(
            "reward_model",
            f"reward_{k}",
            model=config.model,
            data=data,
            config=config.reward_model,
            seed=config.seed + k,
            name_as=f"reward-{k}",
        )

    found = {
        f"m{k}": outputs
        for k, outputs in enumerate(run.together([lambda k=k: member(k) for k in range(config.members)]))
    }
    models = {label: outputs["model"] for label, outputs in found.items()}
    final, metrics = models["m0"], found["m0"].metrics
    if config.members > 1:
        pairs = config.data.pairs or (data if "test/pairs" in metrics else None)
        combined = run("reward_combine", members=models, pairs=pairs, config=config.combine, name_as="reward")
        final, metrics = combined["model"], combined.metrics
    shown = ("accuracy", "accuracy_ci_low", "accuracy_ci_high", "ece", "disagreement")
    return {
        "models": {**models, "reward": final},
        "reward_model": {name: metrics[key] for name in shown for key in (name, f"test/{name}") if key in metrics},
    }
