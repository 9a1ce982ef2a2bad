"""post_training: from a base model to a better one, the whole way.

Data: the embedded world (nothing to download), or your own files in its place, any of them. The base model is
pre-trained here on plain text, or is yours. From it:

    SFT                  on demonstrations
    reward model         on preference pairs
    rejection sampling   best answers of the SFT model, and SFT on them
    RL                   from the rejection-sampled model, against the reward model or a verifier
    DPO                  a second branch, from the SFT model, on the same pairs

Every model then answers the same held-out prompts. The best one on half of them goes through the promotion gate on the
other half.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from flows.recipe import Run, recipe
from flows.start import RewardSources, WorldRecipeConfig, pretrained, reward_inputs, rl_inputs
from flows.steps import Source, evaluate_all, ingest, promote
from stages.align import Config as AlignConfig
from stages.evaluate import Config as EvaluateConfig
from stages.promote import Config as GateConfig
from stages.rejection import Config as RejectionConfig
from stages.reward_model import Config as RewardModelConfig
from stages.reward_models.reward_objectives import COMPARING
from stages.rl import Config as RLConfig
from stages.sft import Config as SFTConfig


class Config(RewardSources, WorldRecipeConfig):
    sft: SFTConfig = Field(SFTConfig(), description="Supervised fine-tuning on demonstrations.")
    reward_model: RewardModelConfig = Field(RewardModelConfig(), description="Reward model from pairs.")
    rejection: RejectionConfig = Field(
        RejectionConfig(), description="Sampling and selection of the SFT model's answers."
    )
    rejection_sft: SFTConfig = Field(SFTConfig(), description="Fine-tuning on the selected answers.")
    rejection_sft_from: Literal["sft", "base"] = Field(
        "sft", description="Model that is fine-tuned on the selected answers."
    )
    rl: RLConfig = Field(RLConfig(), description="Reinforcement learning from the rejection-sampled model.")
    dpo: AlignConfig = Field(AlignConfig(), description="Direct preference optimisation from the SFT model.")
    evaluate: EvaluateConfig = Field(
        EvaluateConfig(), description="Evaluation on held-out prompts, the same for every model."
    )
    promote: GateConfig = Field(
        GateConfig(prompts="confirmation"),
        description="The promotion gate; the best model is chosen on the other half of the prompts.",
    )
    promote_as: str = Field("policy", description="Registered name whose champion the best model challenges.")


@recipe(Config)
def post_training(run: Run, config: Config) -> dict:
    """From a base model to a better one: SFT, reward model, rejection sampling, RL and DPO, judged on held-out
    prompts.
    """
    source = Source(run, config)

    demonstrations = ingest(run, "demonstrations", source("demonstrations"), config)
    pairs = ingest(run, "pairs", source("pairs"), config)
    prompts = ingest(run, "prompts", source("prompts"), config)

    base = pretrained(run, source, config, demonstrations)

    instructed = run("sft", model=base, data=demonstrations, config=config.sft, name_as="sft")["model"]

    def with_a_reward_model() -> tuple[str, str, str]:
        # a score of 0 is that of an average demonstration
        anchored = (
            config.reward_model.anchor in ("auto", "demonstrations") and config.reward_model.objective not in COMPARING
        )
        judge = run(
            "reward_model",
            model=instructed,
            data=pairs,
            anchor=demonstrations if anchored else None,
            config=config.reward_model,
            name_as="reward",
        )["model"]
        answers = run(
            "rejection",
            model=instructed,
            prompts=prompts,
            reward_model=judge,
            config=config.rejection,
            **reward_inputs(source, config, config.rejection.rewards, instructed),
        )
        start = instructed if config.rejection_sft_from == "sft" else base
        selected = run(
            "sft",
            "rejection_sft",
            model=start,
            data=answers["selected"],
            config=config.rejection_sft,
            name_as="rejection-sft",
        )["model"]
        reinforced = run(
            "rl",
            model=selected,
            data=prompts,
            config=config.rl,
            name_as="rl",
            **rl_inputs(source, config, config.rl, selected, judge),
        )["model"]
        return judge, selected, reinforced

    def directly() -> str:
        return run("align", "dpo", model=instructed, data=pairs, config=config.dpo, name_as="dpo")["model"]

    (judge, selected, reinforced), aligned = run.together([with_a_reward_model, directly])

    models = {"base": base, "sft": instructed, "rejection_sft": selected, "rl": reinforced, "dpo": aligned}
    held_out = {
        "prompts": prompts,
        "reward_model": judge,
        **reward_inputs(source, config, config.evaluate.rewards, instructed),
    }
    evaluations = evaluate_all(run, models, config.evaluate, select_by=config.promote.metric, **held_out)
    decision = promote(
        run, models, evaluations, config.promote, config.evaluate, baseline="base", name=config.promote_as, **held_out
    )
    return {
        "models": {**models, "reward": judge},
        "scores": evaluations.table(),
        "best": evaluations.best,
        "decision": decision,
    }
