"""d2po: rounds of direct alignment with a reward model that is kept up to date by few gold labels (D2PO; catalogue
da.d2po, rm.refresh).

    posttrain run d2po --set model=path/or/ref --set data.prompts=prompts.jsonl --set gold.max_prompts=100

A preference that costs something (a person, a strong judge, a verifier) is asked about few fresh answers of each round;
they update the reward model, which then labels many fresh answers for DPO. Steps of round k: `gold_k` and
`gold_pairs_k` (the bought labels), `discriminator_k` (the reward model; its accuracy on these fresh rows before and
after is in its report), `sample_k`, `pairs_k`, `align_k`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import Field

from flows.published import EVERYTHING
from flows.recipe import Run, recipe
from flows.start import IteratedConfig, accuracies, conclusion, next_prompts, reward_inputs, starting_policy
from flows.steps import Source, ingest
from stages.align import Config as AlignConfig
from stages.preferences import Config as PreferencesConfig
from stages.rejection import Config as RejectionConfig
from stages.reward.components import RewardComponent
from stages.reward_model import kept_head, reading

#: What the seed of a round's answers that a reward model labels differs by from that of the answers it learned from:
#: answers follow from policy, prompt and seed, so it would be asked about the very ones that it was trained on.
UNSEEN = 1000


class GoldConfig(IteratedConfig):
    """Labels that cost something, bought for fresh answers in every round, and the reward model they keep up to
    date.
    """

    gold: RejectionConfig = Field(
        RejectionConfig(num_generations=4, max_prompts=100, temperature=0.9, allow_empty=True),
        description=(
            "Answers that get gold labels in each round: gold.rewards gives them, gold.max_prompts is the budget in"
            " prompts."
        ),
    )
    gold_pairs: PreferencesConfig = Field(
        PreferencesConfig(select="all"), description="Pairs from the gold-labelled answers."
    )
    gold_memory: Literal["all", "round", "replay"] = Field(
        "all",
        description=(
            "The reward model learns from the gold labels of all rounds so far, of this round only, or of "
            "this round and a share of the earlier ones (train_reward_model.replay_fraction)."
        ),
    )
    discriminator: Literal["continue", "restart"] = Field(
        "continue", description="Each round's reward model goes on from the last one, or starts anew from the policy."
    )


class Config(GoldConfig):
    NOT_READ: ClassVar = {
        "data.pairs": "every round's labels are those that gold.rewards gives (or write reward_model=REF to begin with)",
        "ingest_pairs": "every round's labels are those that gold.rewards gives",
    }
    rounds: int = Field(
        3, ge=1, description="Rounds of buying labels, updating the reward model, sampling and alignment."
    )
    sample: RejectionConfig = Field(
        RejectionConfig(
            num_generations=8, temperature=0.9, allow_empty=True, rewards=[RewardComponent(name="reward", kind="model")]
        ),
        description="Answers labelled by the reward model.",
    )
    pairs: PreferencesConfig = Field(PreferencesConfig(), description="Preferences from these.")
    align: AlignConfig = Field(AlignConfig(), description="Direct alignment of each round.")


@dataclass
class Labels:
    """Gold labels so far, by round: the labelled answers and the pairs from them (``pairs`` may also hold those that
    the first reward model saw); ``given``: comparisons from elsewhere, which every round's reward model learns from.
    """

    candidates: dict[str, str] = field(default_factory=dict)
    pairs: dict[str, str] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)


def refreshed(
    run: Run,
    source: Source,
    config: GoldConfig,
    k: int,
    policy: str,
    start: str,
    prompts: str,
    judge: str | None,
    labels: Labels,
) -> tuple[str, dict]:
    """(reward model, what happened) after round k's labels of the policy's fresh answers, which are added to ``labels``
    (rm.refresh).
    """
    labelled = run(
        "rejection",
        f"gold_{k}",
        model=policy,
        prompts=prompts,
        **reward_inputs(source, config, config.gold.rewards, policy),
        config=next_prompts(config.gold, k),
        seed=run.seed + k,
    )
    name = f"round_{k}"
    labels.candidates[name] = labelled["candidates"]
    known = labels.candidates if config.gold_memory == "all" else {name: labelled["candidates"]}
    fresh = run("preferences", f"gold_pairs_{k}", candidates=known, config=config.gold_pairs, seed=run.seed + k)["data"]
    goes_on = judge is not None and config.discriminator == "continue"
    by_share = config.gold_memory == "replay"
    replay = {**labels.given, **(labels.pairs if by_share else {})}
    # where nothing is replayed by share no round reads replay_fraction, and the stage says so
    section = reading(config.train_reward_model, replay=replay or not by_share, previous=judge)
    if labels.given and not by_share:
        section = section.model_copy(update={"replay_fraction": EVERYTHING})
    learned = run(
        "reward_model",
        f"discriminator_{k}",
        model=judge if goes_on else start,
        data=fresh,
        previous=judge,
        seed=run.seed + k,
        replay=replay or None,
        name_as=f"discriminator-{k}",
        config=kept_head(section) if goes_on else section,
    )
    labels.pairs[name] = fresh
    return learned["model"], {"round": k, "gold_labels": labelled.metrics.get("completions"), **accuracies(learned)}


@recipe(Config)
def d2po(run: Run, config: Config) -> dict:
    """Online direct alignment with a reward model refreshed by a small budget of gold labels in every round (D2PO)."""
    source = Source(run, config)
    prompts = ingest(run, "prompts", source("prompts"), config)
    start = starting_policy(run, source, config)
    policy, judge, models, labels, history = start, config.reward_model, {"start": start}, Labels(), []
    for k in range(1, config.rounds + 1):
        seed = run.seed + k
        judge, happened = refreshed(run, source, config, k, policy, start, prompts, judge, labels)
        sampled = run(
            "rejection",
            f"sample_{k}",
            model=policy,
            prompts=prompts,
            reward_model=judge,
            config=next_prompts(config.sample, k),
            seed=seed + UNSEEN,
            **reward_inputs(source, config, config.sample.rewards, policy),
        )
        pairs = run("preferences", f"pairs_{k}", candidates=sampled["candidates"], config=config.pairs, seed=seed)[
            "data"
        ]
        policy = run(
            "align",
            f"align_{k}",
            model=policy,
            data=pairs,
            reference=start if k > 1 else None,
            config=config.align,
            seed=seed,
            name_as=f"d2po-{k}",
        )["model"]
        models[f"round_{k}"] = policy
        history.append({**happened, "silver_labels": sampled.metrics.get("completions")})
    return {**conclusion(run, source, config, models, prompts, judge), "rounds": history}
