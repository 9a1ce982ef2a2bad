"""iterated_rlhf: rounds of fresh preferences, a reward model trained on them, and RL against it (ITER-RLHF, RLP; Llama
2, Anthropic's online RLHF).

    posttrain run iterated_rlhf --set model=path/or/ref --set data.prompts=prompts.jsonl --set rounds=3
    posttrain run iterated_rlhf --preset iterative_grpo      # iterative GRPO (GRPO-ITER, DeepSeekMath): KL to the round's start, reward model refreshed
                                                             # at the end of the round with a tenth of earlier
                                                             comparisons

The reward model of every round goes on from the last one on preferences between answers of the *current* policy, so
that it stays right where the policy now is; its accuracy on these answers before and after is in its report. `offline`
puts direct alignment on the same pairs in front of the first RL round, or after each one. Steps of round k: `gold_k`,
`gold_pairs_k`, `discriminator_k`, `rl_k` (and `align_k`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from flows.d2po import GoldConfig, Labels, refreshed
from flows.recipe import Run, recipe
from flows.start import conclusion, rl_inputs, starting_policy, trained_scorer
from flows.steps import Source, ingest
from stages.align import Config as AlignConfig
from stages.preferences import Config as PreferencesConfig
from stages.reward.components import RewardComponent
from stages.reward_model import reading
from stages.rl import Config as RLConfig


class Config(GoldConfig):
    rounds: int = Field(3, ge=1, description="Rounds of preferences, reward model and RL.")
    rl: RLConfig = Field(
        RLConfig(preset="rloo", rewards=[RewardComponent(name="reward", kind="model")]),
        description="RL against the round's reward model.",
    )
    refresh: Literal["before", "after", "never"] = Field(
        "before",
        description=(
            "When a round buys labels and updates the reward model: before its RL, after it (the first round "
            "then needs reward_model or pairs to train one), or never."
        ),
    )
    kl_to: Literal["start", "previous"] = Field(
        "start", description="Reference of RL's KL: the first policy, or the one that the round starts from."
    )
    offline: Literal["none", "first", "after"] = Field(
        "none",
        description=(
            "Direct alignment on the gold pairs: none, before the first RL round (offline, then online), or a "
            "light one after each."
        ),
    )
    pairs: PreferencesConfig = Field(
        PreferencesConfig(), description="Preferences of the offline alignment, from the round's gold-labelled answers."
    )
    align: AlignConfig = Field(AlignConfig(), description="Offline alignment.")

    @model_validator(mode="after")
    def _labels_for_alignment(self):
        if self.offline != "none" and self.refresh != "before":
            raise ValueError(
                f"offline={self.offline} aligns on the labels that a round buys before its RL; write refresh=before, or"
                " offline=none"
            )
        return self


@recipe(Config)
def iterated_rlhf(run: Run, config: Config) -> dict:
    """Iterated RLHF: preferences on the current policy, a reward model kept up to date, RL against it, in rounds."""
    source = Source(run, config)
    prompts = ingest(run, "prompts", source("prompts"), config)
    start = starting_policy(run, source, config)
    policy, judge, models, labels, history = start, config.reward_model, {"start": start}, Labels(), []
    if (
        config.refresh != "before"
        and judge is None
        and any(component.kind == "model" for component in config.rl.rewards)
    ):
        section = (
            reading(config.train_reward_model, replay=config.gold_memory != "replay", previous=None)
            if config.refresh == "after"
            else config.train_reward_model
        )
        judge, labels.pairs["start"] = trained_scorer(
            run, source, config.model_copy(update={"train_reward_model": section}), start
        )

    def aligned(k: int, policy: str) -> str:
        pairs = run(
            "preferences",
            f"pairs_{k}",
            candidates={f"round_{k}": labels.candidates[f"round_{k}"]},
            config=config.pairs,
            seed=run.seed + k,
        )["data"]
        return run(
            "align",
            f"align_{k}",
            model=policy,
            data=pairs,
            config=config.align,
            seed=run.seed + k,
            name_as=f"iterated-dpo-{k}",
        )["model"]

    def refresh(k: int) -> None:
        nonlocal judge
        judge, happened = refreshed(run, source, config, k, policy, start, prompts, judge, labels)
        history.append(happened)

    for k in range(1, config.rounds + 1):
        if config.refresh == "before":
            refresh(k)
        if config.offline == "first" and k == 1:
            policy = models["offline"] = aligned(k, policy)
        policy = run(
            "rl",
            f"rl_{k}",
            model=policy,
            data=prompts,
            reference=start if config.kl_to == "start" and policy != start else None,
            config=config.rl,
            seed=run.seed + k,
            name_as=f"iterated-rl-{k}",
            **rl_inputs(source, config, config.rl, policy, judge),
        )["model"]
        if config.offline == "after":
            policy = aligned(k, policy)
        models[f"round_{k}"] = policy
        if config.refresh == "after":
            refresh(k)
    return {**conclusion(run, source, config, models, prompts, judge), "rounds": history}
