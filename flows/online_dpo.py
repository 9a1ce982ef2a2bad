"""online_dpo: rounds of sampling, scoring, pairing and direct alignment, each from the model of the round before.

    posttrain run online_dpo --set model=path/or/ref --set data.prompts=prompts.jsonl

Each round samples the current policy, scores the answers (verifier, reward model, any reward components), builds pairs
from them and aligns on the pairs. With other settings it is

    RS-DPO            pairs.select=gap                      every pair with a large enough reward gap
    RSO               pairs.select=rso  sample.num_generations=64  align.beta=0.05   pairs among statistically accepted answers (align.beta is RSO's gamma); with a
                      pairwise ranker sample.rewards=[{kind: model, ranking: baseline}]
    iterative reasoning (IRPO)   pairs.select=correct_vs_incorrect  align.method=dpo_nll  reference=previous
    BPO               --preset bpo: the reference is the policy that sampled the round, a round's policy the average of several LoRA adapters trained on its pairs
                      (members=5); rounds=F  total_steps=T; control=true: the rounds once more, under the last policy as fixed reference
    Online IPO        align.method=ipo
    IPO-MD            align.method=ipo  sample.mixture_coef=0.25   answers from the mixture of policy and starting policy
    self-rewarding    --preset self_rewarding: the policy of each round reviews its own answers by the additive 5-point prompt (judge=REF: another model does);
                      sample.rewards=[{kind: judge}] rates 1 to 10 without a review
    online KTO        pairs.kind=unpaired/1  align.method=kto
    SPPO              --preset sppo: win probabilities among five answers by a preference model, best and worst of them, an equal part of the prompts per round
    SLiC-HF           --preset slic: one round, answers of the SFT model ranked in a knock-out, calibrated with a hinge
"""

from __future__ import annotations

from typing import Literal, Optional

from pydantic import Field, model_validator

from flows.recipe import Run, recipe
from flows.start import (
    IteratedConfig,
    averaged,
    conclusion,
    next_prompts,
    reward_inputs,
    scorer,
    starting_policy,
)
from flows.steps import Source, ingest
from stages.algorithms import DIRECT_METHODS
from stages.align import Config as AlignConfig
from stages.preferences import Config as PreferencesConfig, uses_rso
from stages.rejection import Config as RejectionConfig
from stages.selection import refresh_intervals


class Config(IteratedConfig):
    rounds: int = Field(3, ge=1, description="Rounds of sampling and alignment.")
    total_steps: Optional[int] = Field(
        None,
        ge=1,
        title="Total steps",
        description=(
            "Optimizer steps of all rounds together: an equal share each, the last one longer "
            "(BPO: rounds=F, K = T/F); empty: what align says, per round."
        ),
    )
    reference: Literal["sft", "previous"] = Field(
        "sft", description="Reference of every round: the starting policy, or the policy that sampled the round."
    )
    members: int = Field(
        1,
        ge=1,
        le=16,
        description=(
            "Trainings of a round on its pairs, which differ by their seed; their average is the round's policy (BPO: an"
            " ensemble of LoRA adapters, with align.lora_rank)."
        ),
    )
    control: bool = Field(
        False,
        description=(
            "The rounds once more, under the last policy as fixed reference: whether it was this better reference, and"
            " not its being the policy that sampled (BPO's control)."
        ),
    )
    sample: RejectionConfig = Field(
        RejectionConfig(num_generations=4, temperature=0.9, allow_empty=True),
        description="Sampling and scoring of each round (TRL online: temperature 0.9).",
    )
    fresh_prompts: bool = Field(
        True, description="With sample.max_prompts, every round takes the next prompts instead of the same ones."
    )
    split_prompts: bool = Field(
        False, description="Every round takes a part of its own of the prompts, all equally large (SPPO: three)."
    )
    pairs: PreferencesConfig = Field(PreferencesConfig(), description="Preferences from the scored answers.")
    align: AlignConfig = Field(AlignConfig(), description="Direct alignment of each round.")

    @model_validator(mode="after")
    def _possible(self):
        if uses_rso(self.pairs) and self.pairs.rso_accept > self.sample.num_generations:
            raise ValueError(
                f"pairs.select=rso accepts pairs.rso_accept={self.pairs.rso_accept} of a prompt's answers, and"
                f" sample.num_generations={self.sample.num_generations} are sampled, so no prompt would give a pair;"
                " write sample.num_generations=64 (RSO), or a smaller pairs.rso_accept"
            )
        if self.control and not DIRECT_METHODS[self.align.method].needs_reference:
            raise ValueError(
                f"control=true compares references, and align.method={self.align.method} has none; write control=false,"
                " or a method with a reference such as align.method=dpo"
            )
        return self


def round_prompts(config: Config, number: int) -> RejectionConfig:
    """The sampling of round ``number`` (1-based), with the prompts that it takes."""
    if config.split_prompts:
        return config.sample.model_copy(update={"prompt_part": (number, config.rounds)})
    return next_prompts(config.sample, number if config.fresh_prompts else 1)


@recipe(Config)
def online_dpo(run: Run, config: Config) -> dict:
    """Online direct alignment: rounds of sampling, scoring, pairing and training on the policy's own answers."""
    source = Source(run, config)
    prompts = ingest(run, "prompts", source("prompts"), config)
    start = starting_policy(run, source, config)
    judge = scorer(run, source, config, config.sample.rewards, start)
    fixed = config.reference == "sft" and DIRECT_METHODS[config.align.method].needs_reference
    found, first = aligned(run, source, config, prompts, start, judge, reference=start if fixed else None)
    models = {"start": start} | {f"round_{number}": policy for number, policy in enumerate(found, 1)}
    if config.control:
        found, _ = aligned(run, source, config, prompts, start, judge, reference=found[-1], first=first, arm="control_")
        models |= {f"control_{number}": policy for number, policy in enumerate(found, 1)}
    return conclusion(run, source, config, models, prompts, judge)


def aligned(
    run: Run,
    source: Source,
    config: Config,
    prompts: str,
    start: str,
    judge: str | None,
    reference: str | None,
    first: str | None = None,
    arm: str = "",
) -> tuple[list[str], str]:
    """(the policy of every round, the pairs of the first one).

    reference: of every round; None: the policy that sampled it. first: pairs of ``start``'s answers that are there
    already; arm: what the steps' names begin with.
    """
    steps = (
        refresh_intervals(config.total_steps, config.rounds)
        if config.total_steps is not None
        else [config.align.max_steps] * config.rounds
    )
    policy, found = start, []
    for number in range(1, config.rounds + 1):
        if number > 1 or first is None:
            sampled = run(
                "rejection",
                f"{arm}sample_{number}",
                model=policy,
                prompts=prompts,
                reward_model=judge,
                **reward_inputs(source, config, config.sample.rewards, policy),
                reference=start if config.sample.mixture_coef else None,
                seed=run.seed + number,
                config=round_prompts(config, number),
            )
            pairs = run(
                "preferences",
                f"{arm}pairs_{number}",
                candidates=sampled["candidates"],
                config=config.pairs,
                seed=run.seed + number,
            )["data"]
            first = first or pairs
        else:
            pairs = first
        policy = averaged(
            run,
            config.members,
            f"{arm}align_{number}",
            run.seed + number,
            f"online-{arm.replace('_', '-')}{config.align.method.replace('_', '-')}-{number}",
            lambda label, seed, name, policy=policy, pairs=pairs, number=number: run(
                "align",
                label,
                model=policy,
                data=pairs,
                reference=reference if reference != policy else None,
                config=config.align.model_copy(update={"max_steps": steps[number - 1]}),
                seed=seed,
                name_as=name,
            )["model"],
        )
        found.append(policy)
    return found, first
