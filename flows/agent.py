"""agent: a policy that uses tools: SFT on demonstrations of tool use, RL over turns in an environment, success on
held-out tasks.

    posttrain run agent --preset demo                                                     # the embedded world's shops and sums
    posttrain run agent --set model=path/or/hub-id --set data.demonstrations=calls.jsonl --set data.prompts=tasks.jsonl
    posttrain run agent ... --set environment.environment=my_package.shop:Shop            # an environment of your own

The environment of the section ``environment`` is the one of RL and of the evaluation; every other setting of both
stands in their sections.
"""

from __future__ import annotations

from typing import ClassVar, Optional

from pydantic import Field

from flows.recipe import Run, recipe
from flows.start import RewardSources, WorldRecipeConfig, pretrained, reward_inputs
from flows.steps import Source, evaluate_all, ingest, promote
from stages.evaluate import Config as EvaluateConfig
from stages.promote import Config as GateConfig
from stages.reward.components import RewardComponent
from stages.rl import Config as RLConfig
from stages.settings import AgentConfig
from stages.sft import Config as SFTConfig
from stages.world import Config as WorldConfig
from stages.world import ToolSizes


#: The environment's own rewards; written here and not left to RL and evaluation, which take them where none are given,
#: since forms and records give everything.
ITS_OWN = [RewardComponent(kind="environment")]


class Config(RewardSources, WorldRecipeConfig):
    NOT_READ: ClassVar = {
        "data.pairs": "nothing here learns from pairs",
        "ingest_pairs": "nothing here learns from pairs",
        **{
            f"{section}.{name}": f"RL and evaluation act in one environment; write environment.{name}"
            for section in ("rl", "evaluate")
            for name in AgentConfig.model_fields
        },
    }
    model: Optional[str] = Field(
        None,
        title="Model",
        description="Policy to start from (ref, directory or hub id); empty: pre-train a small one here.",
    )
    world: WorldConfig = Field(
        WorldConfig(tools=ToolSizes()), description="The embedded world, with questions that need a tool."
    )
    environment: AgentConfig = Field(
        AgentConfig(environment="tools", max_turns=6),
        description="What the policy acts in, the same for RL and evaluation.",
    )
    sft: SFTConfig = Field(SFTConfig(), description="Fine-tuning on demonstrations of tool use.")
    rl: RLConfig = Field(RLConfig(preset="agent", rewards=ITS_OWN), description="Reinforcement learning over turns.")
    evaluate: EvaluateConfig = Field(
        EvaluateConfig(rewards=ITS_OWN), description="Evaluation in the same environment, on held-out tasks."
    )
    promote: GateConfig = Field(
        GateConfig(prompts="confirmation"),
        description="The promotion gate; the best model is chosen on the other half of the tasks.",
    )
    promote_as: str = Field("agent", description="Registered name whose champion the best model challenges.")


class ToolSource(Source):
    """The world's tool tasks in place of its prompts and demonstrations."""

    def generated(self, output: str) -> str:
        return super().generated({"demonstrations": "tool_demonstrations", "prompts": "tool_tasks"}.get(output, output))


def acting(section, environment: AgentConfig):
    """A stage's settings with the recipe's environment in them."""
    values = section.model_dump(exclude_unset=True)
    if section.rewards == ITS_OWN:  # which are of another kind in a debate
        del values["rewards"]
    return type(section).model_validate({**values, **environment.model_dump(exclude_unset=True)})


@recipe(Config)
def agent(run: Run, config: Config) -> dict:
    """From demonstrations of tool use to a better agent: SFT, RL over turns in an environment, success on held-out
    tasks.
    """
    source = ToolSource(run, config)
    demonstrations = ingest(run, "demonstrations", source("demonstrations"), config)
    tasks = ingest(run, "prompts", source("prompts"), config)
    base = pretrained(run, source, config, demonstrations)

    instructed = run("sft", model=base, data=demonstrations, config=config.sft, name_as="sft")["model"]
    trained = run(
        "rl",
        model=instructed,
        data=tasks,
        config=acting(config.rl, config.environment),
        name_as="agent",
        **reward_inputs(source, config, config.rl.rewards, instructed),
    )["model"]

    models = {"sft": instructed, "agent": trained}
    judged = acting(config.evaluate, config.environment)
    held_out = {"prompts": tasks, **reward_inputs(source, config, judged.rewards, instructed)}
    evaluations = evaluate_all(run, models, judged, select_by=config.promote.metric, **held_out)
    decision = promote(
        run, models, evaluations, config.promote, judged, baseline="sft", name=config.promote_as, **held_out
    )
    return {"models": models, "scores": evaluations.table(), "best": evaluations.best, "decision": decision}
