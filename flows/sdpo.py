"""sdpo: direct alignment in stages, each from the model of the stage before, which is also its reference.

    posttrain run sdpo --set model=path/or/ref --set data.pairs=pairs.jsonl --set curriculum.order=given

Stepwise DPO takes the pairs in the order given, or from easy to hard by their score gap (curriculum.order=margin) or by
how sure a judge was of them (curriculum.order=confidence). Curry-DPO is the same on rankings, from the largest rank gap
to the smallest: curriculum.order=rank_gap with ingest_pairs.kind=rankings/1.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from flows.recipe import Run, recipe
from flows.start import IteratedConfig, conclusion, scorer, starting_policy
from flows.steps import Source, ingest
from stages.align import Config as AlignConfig
from stages.curriculum import Config as CurriculumConfig


class Config(IteratedConfig):
    NOT_READ: ClassVar = {"align.stage_index": "every stage takes its own pairs; write curriculum.stages"}
    curriculum: CurriculumConfig = Field(CurriculumConfig(), description="How the pairs are cut into stages.")
    align: AlignConfig = Field(AlignConfig(), description="Direct alignment of each stage.")


@recipe(Config)
def sdpo(run: Run, config: Config) -> dict:
    """Stepwise direct alignment (sDPO, Curry-DPO): stages of pairs, the model of each the start and reference of the
    next.
    """
    source = Source(run, config)
    prompts = ingest(run, "prompts", source("prompts"), config)
    pairs = ingest(run, "pairs", source("pairs"), config)
    start = starting_policy(run, source, config)
    judge = scorer(run, source, config, config.evaluate.rewards, start)

    staged = run("curriculum", data=pairs, config=config.curriculum)
    models = {"start": start}
    policy = start
    for index in range(int(staged.metrics.get("stages", config.curriculum.stages))):
        policy = run(
            "align",
            f"align_{index}",
            model=policy,
            data=staged["data"],
            config=config.align.model_copy(update={"stage_index": index}),
            name_as=f"sdpo-{index}",
        )["model"]
        models[f"stage_{index}"] = policy
    return conclusion(run, source, config, models, prompts, judge)
