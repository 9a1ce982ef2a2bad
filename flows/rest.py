"""rest: Grow and Improve rounds of self-training on the policy's own best answers (ReST, ReST-EM, expert iteration,
RAFT).

    posttrain run rest --set model=path/or/ref --set data.prompts=problems.jsonl

Grow samples and scores the current policy once; Improve fine-tunes on the answers above a threshold that rises from
step to step, at a falling learning rate, each time on the same samples. With other settings it is

    ReST-EM           sample.select=all_correct  sample.max_per_prompt=10  improve_from=start  thresholds=[]
    STaR              the same with sample.rationalise=4: answers given away as a hint where no sample was right, trained on without it
    expert iteration  sample.select=top_per_prompt  thresholds=[]
    RAFT              expert iteration with small sample.max_prompts and many rounds; stop_when_flat=true ends them once a round gains nothing on the validation prompts
    distillation      --preset distill_small --set teacher=MODEL: a larger model's right answers, learned by a small one; rl_after=true goes on with RL
"""

from __future__ import annotations

from typing import Literal, Optional

from pydantic import Field, model_validator

from flows.recipe import Run, recipe
from flows.start import IteratedConfig, conclusion, next_prompts, reward_inputs, rl_inputs, scorer, starting_policy
from flows.steps import Source, ingest
from stages.evaluation.scores import lower_is_better
from stages.rejection import Config as RejectionConfig, selecting
from stages.rl import Config as RLConfig
from stages.sft import Config as SFTConfig
from stages.spec import ConfigError


class Config(IteratedConfig):
    rounds: int = Field(2, ge=1, description="Grow rounds: the policy is sampled anew in each.")
    thresholds: list[float] = Field(
        [0.5],
        description=(
            "Rising thresholds of the Improve steps of a round, as sample.threshold_mode says (paper: rewards in [0,"
            " 1], 0.7, 0.8, 0.9, 0.95, 0.99); empty: one step on what sample.select takes."
        ),
    )
    teacher: Optional[str] = Field(
        None,
        title="Teacher",
        description=(
            "Model whose answers are learned from, with any tokenizer (distillation): a ref, directory or hub id;"
            " empty: the policy of each round."
        ),
    )
    improve_from: Literal["current", "start"] = Field(
        "current", description="Model each Improve step starts from: the last one, or the starting policy (ReST-EM)."
    )
    learning_rate_decay: float = Field(
        0.5, gt=0, le=1, description="Factor on the learning rate from one Improve step of a round to the next."
    )
    sample: RejectionConfig = Field(RejectionConfig(allow_empty=True), description="Sampling, scoring and selection.")
    fresh_prompts: bool = Field(
        True, description="With sample.max_prompts, every round takes the next prompts instead of the same ones."
    )
    improve: SFTConfig = Field(SFTConfig(), description="Fine-tuning of each Improve step.")
    stop_when_flat: bool = Field(
        False,
        description=(
            "End after the first round that gains less than a standard error on the validation prompts over the round"
            " before (ours; ReST-EM: gains diminish after a few rounds), by promote.metric; rounds is then the most."
        ),
    )
    rl_after: bool = Field(False, description="RL from the last policy, with the settings of rl, as one more model.")
    rl: RLConfig = Field(RLConfig(), description="rl_after: reinforcement learning at the end.")

    @model_validator(mode="after")
    def _rising(self):
        if any(later <= earlier for earlier, later in zip(self.thresholds, self.thresholds[1:])):
            raise ValueError(
                f"thresholds={self.thresholds} do not rise: a step that selects nothing ends its round; write"
                f" thresholds={sorted(set(self.thresholds))}"
            )
        return self


def grow(config: Config, sampling: RejectionConfig) -> RejectionConfig:
    """The settings of a Grow step: what only the selection at the thresholds of the Improve steps reads is left to
    these.
    """
    if config.thresholds and sampling.select == "threshold" and sampling.threshold is None:
        return sampling.model_copy(update={"threshold": config.thresholds[0]})
    unread = {"threshold_mode": sampling.threshold is None, "max_per_prompt": sampling.select == "top_per_prompt"}
    return sampling.model_copy(
        update={
            name: RejectionConfig.model_fields[name].default for name, so in unread.items() if so and config.thresholds
        }
    )


@recipe(Config)
def rest(run: Run, config: Config) -> dict:
    """Reinforced self-training: sample and score (Grow), then fine-tune on answers above rising thresholds (Improve),
    in rounds.
    """
    source = Source(run, config)
    prompts = ingest(run, "prompts", source("prompts"), config)
    start = starting_policy(run, source, config)
    judge = scorer(
        run, source, config, [*config.sample.rewards, *(config.rl.rewards if config.rl_after else ())], start
    )

    models, held_out = {"start": start}, []

    def gains(number: int) -> bool:
        """Whether the policy of a round is a standard error better on the validation prompts than that of the round
        before; 0 is the start.
        """
        validation = config.evaluate.model_copy(update={"split": "validation"})
        found = run(
            "evaluate",
            f"validate_{number}",
            model=policy,
            prompts=prompts,
            reward_model=judge,
            reference=start,
            config=validation,
            **reward_inputs(source, config, validation.rewards, start),
        ).metrics
        metric = config.promote.metric
        if found and f"{metric}_se" not in found:  # a plan has none
            raise ConfigError(
                f"stop_when_flat=true goes by promote.metric={metric}, which the evaluation does not have with a"
                " standard error; write promote.metric=accuracy and give at least two validation prompts with answers, or"
                " write stop_when_flat=false"
            )
        held_out.append({"round": number, metric: found.get(metric)})
        if len(held_out) < 2 or not found:
            return True
        gain = (found[metric] - held_out[-2][metric]) * (-1.0 if lower_is_better(metric) else 1.0)
        return gain > 0 and gain >= found[f"{metric}_se"]

    policy = start
    if config.stop_when_flat:
        gains(0)
    for number in range(1, config.rounds + 1):
        sampling = next_prompts(config.sample, number if config.fresh_prompts else 1).model_copy(
            update={"allow_empty": True}
        )
        sampler = config.teacher or policy
        grown = run(
            "rejection",
            f"grow_{number}",
            model=sampler,
            prompts=prompts,
            reward_model=judge,
            **reward_inputs(source, config, config.sample.rewards, policy),
            config=grow(config, sampling),
            seed=run.seed + number,
        )
        for step, threshold in enumerate(config.thresholds or [None], 1):
            label = f"{number}_{step}"
            kept = grown
            if threshold is not None:
                kept = run(
                    "rejection",
                    f"filter_{label}",
                    model=sampler,
                    prompts=prompts,
                    reward_model=judge,
                    candidates=grown["candidates"],
                    seed=run.seed + number,
                    config=selecting(
                        sampling,
                        threshold=threshold,
                        **({"select": "threshold"} if config.sample.select == "top_per_prompt" else {}),
                    ),
                )
            if kept.metrics.get("selected") == 0:  # nothing above this threshold, so nothing above a higher one
                break
            slower = config.improve.model_copy(
                update={"learning_rate": config.improve.learning_rate * config.learning_rate_decay ** (step - 1)}
            )
            policy = run(
                "sft",
                f"improve_{label}",
                model=policy if config.improve_from == "current" else start,
                data=kept["selected"],
                config=slower,
                name_as=f"rest-{label.replace('_', '-')}",
                seed=run.seed + number,
            )["model"]
            models[f"round_{label}"] = policy
        if config.stop_when_flat and not gains(number):
            break
    if config.rl_after:
        models["rl"] = run(
            "rl",
            model=policy,
            data=prompts,
            config=config.rl,
            name_as="rest-rl",
            **rl_inputs(source, config, config.rl, policy, judge),
        )["model"]
    found = conclusion(run, source, config, models, prompts, judge)
    return {**found, "validation": held_out} if held_out else found
