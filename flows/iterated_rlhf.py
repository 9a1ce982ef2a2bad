"""iterated_rlhf: rounds of fresh preferences, a reward model trained on them, and RL against it (ITER-RLHF, RLP; Llama 2, Anthropic's online RLHF).

    posttrain run iterated_rlhf --set model=path/or/ref --set data.prompts=prompts.jsonl --set rounds=3

The reward model of every round goes on from the last one on preferences between answers of the *current* policy, so that it stays right
where the policy now is; its accuracy on these answers before and after is in its report. `offline` puts direct alignment on the same pairs in
front of the first RL round, or after each one. Steps of round k: `gold_k`, `gold_pairs_k`, `discriminator_k`, `rl_k` (and `align_k`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from flows.d2po import GoldConfig, refreshed
from flows.recipe import Run, recipe
from flows.start import conclusion, reward_inputs, starting_policy
from flows.steps import Source, ingest
from stages.align import Config as AlignConfig
from stages.preferences import Config as PreferencesConfig
from stages.rewards import RewardComponent
from stages.rl import Config as RLConfig


class Config(GoldConfig):
    rounds: int = Field(3, ge=1, description="Rounds of preferences, reward model and RL.")
    rl: RLConfig = Field(RLConfig(preset="rloo", rewards=[RewardComponent(name="reward", kind="model")]), description="RL against the round's reward model.")
    kl_to: Literal["start", "previous"] = Field("start", description="Reference of RL's KL: the first policy, or the one that the round starts from.")
    offline: Literal["none", "first", "after"] = Field("none", description="Direct alignment on the gold pairs: none, before the first RL round (offline, then online), or a "
                                                                           "light one after each.")
    pairs: PreferencesConfig = Field(PreferencesConfig(), description="Preferences of the offline alignment, from the round's gold-labelled answers.")
    align: AlignConfig = Field(AlignConfig(), description="Offline alignment.")


@recipe(Config)
def iterated_rlhf(run: Run, config: Config) -> dict:
    """Iterated RLHF: preferences on the current policy, a reward model kept up to date, RL against it, in rounds."""
    source = Source(run, config)
    prompts = ingest(run, "prompts", source("prompts"), config)
    start = starting_policy(run, source, config)
    policy, judge, models, bought, history = start, config.reward_model, {"start": start}, {}, []

    def aligned(k: int, policy: str) -> str:
        pairs = run("preferences", f"pairs_{k}", candidates={f"round_{k}": bought[f"round_{k}"]}, config=config.pairs, seed=run.seed + k)["data"]
        return run("align", f"align_{k}", model=policy, data=pairs, config=config.align, seed=run.seed + k, name_as=f"iterated-dpo-{k}")["model"]

    for k in range(1, config.rounds + 1):
        judge, bought, happened = refreshed(run, source, config, k, policy, start, prompts, judge, bought)
        if config.offline == "first" and k == 1:
            policy = models["offline"] = aligned(k, policy)
        policy = run("rl", f"rl_{k}", model=policy, data=prompts, reward_model=judge, reference=start if config.kl_to == "start" and k > 1 else None, config=config.rl,
                     seed=run.seed + k, name_as=f"iterated-rl-{k}", **reward_inputs(source, config, config.rl.rewards, policy))["model"]
        if config.offline == "after":
            policy = aligned(k, policy)
        models[f"round_{k}"] = policy
        history.append(happened)
    return {**conclusion(run, source, config, models, prompts, judge), "rounds": history}
