"""specialists: one model per skill, trained side by side from the same base, and their weights averaged (recipe.merge;
Llama 3's averaging, model soups).

    posttrain run specialists --set model=BASE --set specialists='{maths: maths.jsonl, code: code.jsonl}' --set
    data.prompts=problems.jsonl
    posttrain run specialists --set model=BASE --set data.demonstrations=chats.jsonl --set copies=3     # a soup: the same data, three seeds
    posttrain run specialists --preset demo                                                            # the embedded world, in minutes on two CPU cores

Every specialist, their average and the base answer the same held-out prompts. `merge.method` is linear (average), slerp
of two, task_arithmetic or ties, which count from the base; `merge.coefficients` weighs the specialists. With their
differences apart, a merged model can know what each of them learned; with too much training, or too far from the base,
it knows nothing: read its row in the table before it is used.
"""

from __future__ import annotations

from typing import ClassVar, Optional

from pydantic import Field, model_validator

from flows.recipe import Run, recipe
from flows.start import WorldRecipeConfig, small_base_model
from flows.steps import HELD_OUT, Source, evaluate_all, ingest, promote
from stages.evaluate import Config as EvaluateConfig
from stages.ingest import Config as IngestConfig
from stages.merge import Config as MergeConfig
from stages.promote import Config as GateConfig
from stages.sft import Config as SFTConfig


class Config(WorldRecipeConfig):
    NOT_READ: ClassVar = {
        "data.pairs": "nothing here learns from pairs",
        "ingest_pairs": "nothing here learns from pairs",
    }
    model: Optional[str] = Field(
        None,
        title="Model",
        description=(
            "What every specialist starts from (ref, directory or hub id); empty: a small base model is trained here."
        ),
    )
    specialists: dict[str, str] = Field(
        default_factory=dict,
        description=(
            "Name -> demonstrations that this specialist is trained on; empty: copies of one model, on"
            " data.demonstrations."
        ),
    )
    copies: int = Field(
        3, ge=2, description="Without specialists: models that differ by their seed only, on the same demonstrations."
    )
    ingest_specialist: IngestConfig = Field(
        IngestConfig(kind="demonstrations/1", **HELD_OUT),
        description="Checks and splits of each specialist's demonstrations.",
    )
    sft: SFTConfig = Field(SFTConfig(), description="Fine-tuning of every specialist.")
    merge: MergeConfig = Field(MergeConfig(), description="How their weights become one model.")
    evaluate: EvaluateConfig = Field(
        EvaluateConfig(), description="Evaluation on held-out prompts, the same for every model."
    )
    promote: GateConfig = Field(
        GateConfig(prompts="confirmation"),
        description="The promotion gate; the best model is chosen on the other half of the prompts.",
    )
    promote_as: str = Field("policy", description="Registered name whose champion the best model challenges.")

    @model_validator(mode="after")
    def _possible(self):
        if self.specialists and self.data.demonstrations:
            raise ValueError(
                "each of the specialists has demonstrations of its own; leave data.demonstrations out, or specialists"
            )
        if self.merge.method == "adapter":
            raise ValueError(
                "merge.method=adapter puts one adapter into one model, and specialists are several; write"
                " merge.method=linear, slerp, task_arithmetic or ties"
            )
        if len(self.specialists) == 1:
            raise ValueError("one specialist alone is merged with nothing; write two or more, or none and copies=3")
        if taken := {"base", "merged", "champion", "prompts"} & set(self.specialists):
            raise ValueError(
                f"{', '.join(sorted(taken))} is the name of another model or step of this recipe; call the specialist"
                " otherwise"
            )
        return self


@recipe(Config)
def specialists(run: Run, config: Config) -> dict:
    """One model per skill from the same base, side by side; their weights become one model; all of them on the same
    held-out prompts.
    """
    source = Source(run, config)
    prompts = ingest(run, "prompts", source("prompts"), config)
    shared = ingest(run, "demonstrations", source("demonstrations"), config) if not config.specialists else None
    own = {
        name: run("ingest", f"ingest_{name}", data=path, config=config.ingest_specialist, name_as=name)["data"]
        for name, path in config.specialists.items()
    }
    base = config.model
    if base is None:
        base = small_base_model(run, source, config, shared or source("demonstrations"))

    def trained(number: int, name: str) -> str:
        return run(
            "sft",
            f"sft_{name}",
            model=base,
            data=shared or own[name],
            config=config.sft,
            seed=run.seed + (0 if config.specialists else number),
            name_as=name,
        )["model"]

    names = list(config.specialists) or [f"copy_{k}" for k in range(1, config.copies + 1)]
    experts = dict(
        zip(
            names,
            run.together([lambda number=number, name=name: trained(number, name) for number, name in enumerate(names)]),
        )
    )
    counts_from_base = config.merge.method in ("task_arithmetic", "ties")
    merged = run(
        "merge", models=experts, base=base if counts_from_base else None, config=config.merge, name_as="merged"
    )["model"]

    models = {"base": base, **experts, "merged": merged}
    evaluations = evaluate_all(
        run, models, config.evaluate, select_by=config.promote.metric, prompts=prompts, reference=base
    )
    decision = promote(
        run,
        models,
        evaluations,
        config.promote,
        config.evaluate,
        baseline="base",
        name=config.promote_as,
        prompts=prompts,
        reference=base,
    )
    return {"models": models, "scores": evaluations.table(), "best": evaluations.best, "decision": decision}
