"""llama3: six rounds of fresh preferences, a reward model, rejection sampling, SFT and DPO, with averaged weights
(recipe.llama3; Dubey et al. 2024).

    posttrain run llama3 --set model=BASE --set data.demonstrations=skills.jsonl --set data.prompts=prompts.jsonl --set
    gold.rewards='[{kind: judge, endpoint: URL, endpoint_model: NAME}]'
    posttrain run llama3 --preset demo         # the embedded world, two rounds, in minutes on two CPU cores

The defaults are the published settings of the 405B model. Steps of round k:

    gold_k, gold_pairs_k, discriminator_k   answers of the current policy are compared (by gold.rewards, in the place of people) and a reward model without
                                            margin learns from the comparisons of all rounds
    sample_k                                10 to 30 answers per prompt, the best by the reward model
    mix_k, sft_k                            these and data.demonstrations (human and synthetic skills), learned by the BASE again
    pairs_k, dpo_k                          this round's comparisons with a clear preference; DPO with an NLL term on the chosen answer, formatting tokens masked
    average_sft_k, average_dpo_k            `average` > 1: so many trainings that differ by their seed, averaged

The first round's policy is fine-tuned on data.demonstrations (step `sft`), or `start` where one is given. People who
rank three answers, one of them edited, are data: turn them into pairs (edited > chosen > rejected is a ranking of
three) and give them as data.pairs: every round's reward model learns from all of them and of the rounds so far
(gold_memory=replay: from this round's and a share of the others, train_reward_model.replay_fraction).
"""

from __future__ import annotations

from typing import Literal, Optional

from pydantic import Field, model_validator

from flows.d2po import UNSEEN, GoldConfig, Labels, refreshed
from flows.recipe import Run, recipe
from flows.start import averaged, conclusion, next_prompts, pretrained, reward_inputs
from flows.steps import Source, ingest
from stages.align import Config as AlignConfig
from stages.mix import Config as MixConfig
from stages.preferences import Config as PreferencesConfig
from stages.rejection import Config as RejectionConfig
from stages.reward.components import RewardComponent
from stages.reward_model import Config as RewardModelConfig
from stages.sft import Config as SFTConfig


class Config(GoldConfig):
    model: Optional[str] = Field(
        None,
        title="Model",
        description=(
            "Base model that every SFT starts from (ref, directory or hub id); empty: a small one is trained here on"
            " the embedded world."
        ),
    )
    start: Optional[str] = Field(
        None,
        title="Start",
        description="Policy of the first round's answers; empty: the base, fine-tuned on the demonstrations.",
    )
    rounds: int = Field(6, ge=1, description="Rounds.")
    average: int = Field(
        1,
        ge=1,
        description=(
            "Trainings of every SFT and DPO that differ by their seed and are averaged (the paper averages over data"
            " and settings, how many is not published)."
        ),
    )
    discriminator: Literal["continue", "restart"] = Field(
        "restart",
        description="Each round's reward model goes on from the last one, or starts anew from the first policy.",
    )
    train_reward_model: RewardModelConfig = Field(
        RewardModelConfig(objective="bt"),
        description="Reward model on the comparisons of all rounds, without the margin of Llama 2.",
    )
    sample: RejectionConfig = Field(
        RejectionConfig(num_generations=16, allow_empty=False, rewards=[RewardComponent(name="reward", kind="model")]),
        description="Answers of the current policy (K 10 to 30), the best by the reward model.",
    )
    mix: MixConfig = Field(
        MixConfig(), description="Shares of `sampled` and `skills` (data.demonstrations); empty: all of both."
    )
    sft: SFTConfig = Field(
        SFTConfig(learning_rate=1e-5, max_steps=8500),
        description="Fine-tuning of the base in every round (8.5k to 9k steps), and of the first policy.",
    )
    pairs: PreferencesConfig = Field(
        PreferencesConfig(select="gap"),
        description="Comparisons with a clear preference (a gap by RS-DPO's rule, whose numbers they are).",
    )
    dpo: AlignConfig = Field(
        AlignConfig(method="dpo_nll", beta=0.1, nll_coef=0.2, learning_rate=1e-5, mask_formatting=True),
        description="DPO with an NLL term.",
    )

    @model_validator(mode="after")
    def _share_is_read(self):
        share = self.train_reward_model.replay_fraction
        if (
            self.data.pairs
            and self.gold_memory != "replay"
            and share != RewardModelConfig.model_fields["replay_fraction"].default
        ):
            raise ValueError(
                f"train_reward_model.replay_fraction={share} is not read: every round's reward model learns from all of"
                " data.pairs; write gold_memory=replay for a share of them and of earlier rounds, or leave it out"
            )
        return self


@recipe(Config)
def llama3(run: Run, config: Config) -> dict:
    """Llama 3: rounds of preferences, reward model, rejection sampling, SFT of the base and DPO, with averaged
    weights.
    """
    source = Source(run, config)
    demonstrations = ingest(run, "demonstrations", source("demonstrations"), config)
    prompts = ingest(run, "prompts", source("prompts"), config)
    people = ingest(run, "pairs", config.data.pairs, config) if config.data.pairs else None
    base = pretrained(run, source, config, demonstrations)
    start = config.start or run("sft", model=base, data=demonstrations, config=config.sft, name_as="sft")["model"]
    labels = Labels()
    if people:
        labels.given["people"] = people

    policy, judge, models, history = start, config.reward_model, {"start": start}, []
    for k in range(1, config.rounds + 1):
        judge, happened = refreshed(run, source, config, k, policy, start, prompts, judge, labels)
        best = run(
            "rejection",
            f"sample_{k}",
            model=policy,
            prompts=prompts,
            reward_model=judge,
            config=next_prompts(config.sample, k),
            seed=run.seed + k + UNSEEN,
            **reward_inputs(source, config, config.sample.rewards, policy),
        )["selected"]
        data = run(
            "mix", f"mix_{k}", data={"sampled": best, "skills": demonstrations}, config=config.mix, seed=run.seed + k
        )["data"]
        instructed = averaged(
            run,
            config.average,
            f"sft_{k}",
            run.seed + k,
            f"llama3-sft-{k}",
            lambda label, seed, name: run(
                "sft", label, model=base, data=data, config=config.sft, seed=seed, name_as=name
            )["model"],
        )
        clear = run(
            "preferences",
            f"pairs_{k}",
            candidates={f"round_{k}": labels.candidates[f"round_{k}"]},
            config=config.pairs,
            seed=run.seed + k,
        )["data"]
        policy = averaged(
            run,
            config.average,
            f"dpo_{k}",
            run.seed + k,
            f"llama3-dpo-{k}",
            lambda label, seed, name: run(
                "align", label, model=instructed, data=clear, config=config.dpo, seed=seed, name_as=name
            )["model"],
        )
        models |= {f"sft_{k}": instructed, f"round_{k}": policy}
        history.append(happened)
    return {**conclusion(run, source, config, models, prompts, judge), "rounds": history}
