"""objective_discovery: search for a preference loss. Propose, unit-test, train, evaluate, show the scores to the
proposer, again.

    posttrain run objective_discovery --set model=path/or/ref --set data.pairs=pairs.jsonl --set propose.proposer=server
    \\
        --set propose.endpoint=http://localhost:8000/v1 --set propose.endpoint_model=NAME

Every loss is one child step of each kind: `objective_N` (proposal and unit tests), `align_N`, `validate_N`. The
proposer sees the scores on validation prompts only; the best loss, DPO and the starting policy then answer the held-out
prompts. Losses are never executed as code (stages.direct.objective_code). Without a language model at hand,
propose.proposer=mutation recombines known shapes.
"""

from __future__ import annotations

from pydantic import Field

from flows.config import ConfigError
from flows.recipe import Run, recipe
from flows.start import IteratedConfig, conclusion, reward_inputs, scorer, starting_policy
from flows.steps import Source, ingest
from stages.align import Config as AlignConfig
from stages.objective import Config as ObjectiveConfig

KNOWN = {
    "dpo": "softplus(-beta * ((pc - pr) - (rc - rr)))",
    "hinge": "relu(1 - beta * ((pc - pr) - (rc - rr)))",
    "exponential": "exp(clamp(-beta * ((pc - pr) - (rc - rr)), -20, 20))",
}


class Config(IteratedConfig):
    proposals: int = Field(
        8, ge=1, description="Losses proposed, each trained and evaluated once it passes its unit tests."
    )
    propose: ObjectiveConfig = Field(ObjectiveConfig(), description="Who proposes, and the unit tests.")
    align: AlignConfig = Field(
        AlignConfig(method="written"), description="Training with each loss, from the same policy on the same pairs."
    )


@recipe(Config)
def objective_discovery(run: Run, config: Config) -> dict:
    """Search for a preference loss: a proposer reads the losses tried so far with their scores and writes the next
    one.
    """
    source = Source(run, config)
    prompts = ingest(run, "prompts", source("prompts"), config)
    pairs = ingest(run, "pairs", source("pairs"), config)
    start = starting_policy(run, source, config)
    judge = scorer(run, source, config, config.evaluate.rewards, start)
    asked = config.judge if config.judge != "self" else start
    validation = config.evaluate.model_copy(update={"split": "validation"})
    objectives, scores, models, values = {}, {}, {}, {}

    def attempt(label: str, propose: ObjectiveConfig, seed: int) -> None:
        proposal = run(
            "objective",
            f"objective_{label}",
            objectives=objectives,
            scores=scores,
            config=propose,
            seed=seed,
            model=asked if propose.proposer == "model" and not propose.code else None,
        )
        objectives[label] = proposal["objective"]
        if not propose.code and not proposal.metrics.get("valid", 1.0):  # a known loss that failed has ended the run
            return
        models[label] = run(
            "align",
            f"align_{label}",
            model=start,
            data=pairs,
            objective=proposal["objective"],
            config=config.align,
            name_as=f"discovered-{label}",
        )["model"]
        outcome = run(
            "evaluate",
            f"validate_{label}",
            model=models[label],
            prompts=prompts,
            reward_model=judge,
            config=validation,
            **reward_inputs(source, config, validation.rewards, start),
        )
        scores[label] = outcome["scores"]
        if outcome.metrics and config.propose.metric not in outcome.metrics:  # a plan has none
            raise ConfigError(
                f"propose.metric={config.propose.metric} is no metric of the evaluation; write one of"
                f" {', '.join(sorted(outcome.metrics))}"
            )
        values[label] = outcome.metrics.get(config.propose.metric, 0.0)

    for name, code in KNOWN.items():
        attempt(name, config.propose.model_copy(update={"code": code}), run.seed)
    for number in range(1, config.proposals + 1):
        attempt(str(number), config.propose, run.seed + number)
    best = max(values, key=lambda label: values[label])
    found = conclusion(
        run, source, config, {"start": start, "dpo": models["dpo"]} | {best: models[best]}, prompts, judge
    )
    return {
        **found,
        "validation": [{"objective": label, config.propose.metric: value} for label, value in values.items()],
        "best_objective": objectives[best],
    }
