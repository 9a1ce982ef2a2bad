"""tulu3: the open recipe for many skills: SFT, length-normalised DPO on judged answers, RL with verifiable rewards
(recipe.tulu3; Lambert et al. 2024).

    posttrain run tulu3 --set model=BASE --set data.demonstrations=mix.jsonl --set data.preference_prompts=prompts.jsonl
    --set data.prompts=rlvr.jsonl \\
        --set data.test=benchmarks.jsonl --set judge=JUDGE --set others='{llama: REF, qwen: REF}'
    posttrain run tulu3 --preset 70b ...      # the settings of the 70B model
    posttrain run tulu3 --preset demo         # the embedded world, in minutes on two CPU cores

The defaults are the published settings of the 8B model. Steps:

    ingest_*                 checks; what overlaps with data.test is left out (8-gram coverage above one half)
    sft                      the base model on all skills
    sample, sample_NAME      answers of the SFT model (on-policy) and of `others` (off-policy) to the same prompts, each rated by `judge` on four aspects
    pairs                    the best-rated answer of a prompt against a random lower one
    dpo                      length-normalised DPO
    reward_model             on the same pairs: where the value function starts
    rl                       PPO: 10 for a verified answer (or a kept constraint), 0 for another, -10 without an end token, no reward model in the reward
    evaluate_*, contamination, promote

`data.prompts` are problems with answers or constraints (GSM8K, MATH, IFEval-like). The judge is a local model, or a
server: `sample.rewards` has an endpoint per aspect.
"""

from __future__ import annotations

from typing import ClassVar, Optional

from pydantic import Field, field_validator

from flows.recipe import Run, recipe
from flows.start import Data as WorldData
from flows.start import RewardSources, WorldRecipeConfig, pretrained, reward_inputs, rl_inputs
from flows.steps import ALL_TEST, HELD_OUT, Source, contamination, evaluate_all, ingest, promote
from stages.align import Config as AlignConfig
from stages.contamination import Config as ContaminationConfig
from stages.evaluate import Config as EvaluateConfig
from stages.ingest import Config as IngestConfig
from stages.preferences import Config as PreferencesConfig
from stages.promote import Config as GateConfig
from stages.rejection import Config as RejectionConfig
from stages.reward.components import RewardComponent
from stages.reward_model import Config as RewardModelConfig
from stages.rl import Config as RLConfig
from stages.sft import Config as SFTConfig

#: What UltraFeedback's judge, and Tulu 3's after it, rates an answer by; the wording is ours.
ASPECTS = {
    "instruction_following": "how fully it does what was asked, within all constraints that were given",
    "helpfulness": "how useful, relevant and clear it is to the person who asked",
    "truthfulness": "how free it is of false and invented statements",
    "honesty": "how well its confidence fits what it can know, doubts stated where there are any",
}
QUESTION = (
    "Rate the last answer of an assistant by one thing alone:"
    " {what}.\n\nConversation:\n{{context}}\n\nAnswer:\n{{a}}\n\nWrite a number from 1 (worst) to 10 (best).\nRating: "
)


def aspects() -> list[RewardComponent]:
    """A judge's rating per aspect; their mean is the reward."""
    return [
        RewardComponent(name=name, kind="judge", weight=1 / len(ASPECTS), judge_prompt=QUESTION.format(what=what))
        for name, what in ASPECTS.items()
    ]


def verified() -> list[RewardComponent]:
    """10 for a right answer; 10 for an answer that keeps all constraints of a prompt that has any. A prompt may have
    either.
    """
    return [
        RewardComponent(name="verifier", kind="verifier", correct_value=10.0, on_missing="skip"),
        RewardComponent(name="constraints", kind="constraints", weight=10.0),
    ]


class Data(WorldData):
    preference_prompts: Optional[str] = Field(
        None,
        title="Preference prompts",
        description=(
            "Prompts whose answers are compared (271k pairs for 8B): ref, file, directory or hub id; "
            "empty: data.prompts."
        ),
    )
    test: Optional[str] = Field(
        None,
        title="Test",
        description=(
            "Benchmark problems with answers: what overlaps with them is trained on nowhere, and models are judged on"
            " them; empty: the test split of data.prompts."
        ),
    )


class Config(RewardSources, WorldRecipeConfig):
    NOT_READ: ClassVar = {
        "data.pairs": "its pairs are made of rated answers to data.preference_prompts",
        "ingest_pairs": "its pairs are made of rated answers to data.preference_prompts",
        "contamination.split": "the split is that of the evaluation, evaluate.split",
    }
    data: Data = Field(Data(), description="Your own data; empty: the embedded world.")
    judge: str = Field(
        "self",
        description=(
            "Language model that rates the answers: a ref, or self = the SFT model; components with an endpoint ask a"
            " server instead."
        ),
    )
    others: dict[str, str] = Field(
        default_factory=dict,
        description=(
            "Models beside the SFT model whose answers are compared (off-policy): {name: ref, directory or hub id}."
        ),
    )
    ingest_demonstrations: IngestConfig = Field(
        IngestConfig(kind="demonstrations/1", decontaminate="coverage", **HELD_OUT),
        description="Checks and splits of the demonstrations; those of test problems (data.test) are left out.",
    )
    ingest_prompts: IngestConfig = Field(
        IngestConfig(kind="prompts/1", decontaminate="coverage", **HELD_OUT),
        description="Checks and splits of the problems, without those of data.test.",
    )
    ingest_preference_prompts: IngestConfig = Field(
        IngestConfig(kind="prompts/1", decontaminate="coverage", **HELD_OUT),
        description="Checks and splits of the prompts whose answers are compared, without those of data.test.",
    )
    ingest_test: IngestConfig = Field(
        IngestConfig(kind="prompts/1", **ALL_TEST), description="Checks and splits of the test problems."
    )
    sft: SFTConfig = Field(
        SFTConfig(
            learning_rate=5e-6,
            lr_schedule="linear",
            warmup_ratio=0.03,
            batch_size=128,
            max_length=4096,
            num_train_epochs=2,
            loss_agg_mode="seq-mean-token-sum-norm",
        ),
        description=(
            "Fine-tuning on all skills: sums over tokens, with a constant divisor (8B 5e-6, 70B 2e-6, 939k rows)."
        ),
    )
    sample: RejectionConfig = Field(
        RejectionConfig(
            num_generations=4, max_completion_length=2048, max_prompt_length=2048, allow_empty=True, rewards=aspects()
        ),
        description=(
            "Answers of every model to the preference prompts, and their ratings on four aspects (four answers per"
            " prompt and model: ours, after UltraFeedback)."
        ),
    )
    pairs: PreferencesConfig = Field(
        PreferencesConfig(select="best_vs_random"),
        description="Pairs from the rated answers: the best against a random lower one.",
    )
    dpo: AlignConfig = Field(
        AlignConfig(
            method="length_norm",
            beta=5.0,
            learning_rate=5e-7,
            lr_schedule="linear",
            warmup_ratio=0.1,
            batch_size=128,
            max_length=2048,
        ),
        description="Length-normalised DPO (8B 5e-7, 70B 2e-7).",
    )
    reward_model: RewardModelConfig = Field(
        RewardModelConfig(learning_rate=3e-6, lr_schedule="linear", batch_size=256, max_length=2048),
        description="Reward model on the same pairs, where the value function starts.",
    )
    rl: RLConfig = Field(
        RLConfig(
            preset="ppo",
            critic_init="reward_model",
            rewards=verified(),
            truncation_policy="penalty",
            missing_eos_penalty=10.0,
            kl_coef=0.05,
            learning_rate=3e-7,
            critic_learning_rate=3e-7,
            lr_schedule="linear",
            max_completion_length=2048,
            max_prompt_length=2048,
            prompts_per_step=224,
            num_generations=1,
            max_steps=1784,
        ),
        description=(
            "PPO against the verifiers (8B: KL 0.05, batch 224; 70B: 0.07, 640). max_steps: 100k completions, four"
            " passes over each batch."
        ),
    )
    evaluate: EvaluateConfig = Field(
        EvaluateConfig(
            max_completion_length=2048,
            rewards=[
                RewardComponent(name="verifier", kind="verifier", on_missing="skip"),
                RewardComponent(name="constraints", kind="constraints"),
            ],
        ),
        description="Evaluation on held-out problems, the same for every model.",
    )
    contamination: ContaminationConfig = Field(
        ContaminationConfig(),
        description="What of the held-out problems is in the training data of the last model and its ancestors.",
    )
    promote: GateConfig = Field(
        GateConfig(prompts="confirmation"),
        description="The promotion gate; the best model is chosen on the other half of the prompts.",
    )
    promote_as: str = Field("policy", description="Registered name whose champion the best model challenges.")

    @field_validator("others")
    @classmethod
    def _policy_is_ours(cls, others):
        if "policy" in others:
            raise ValueError(
                "policy is the name of the model that the recipe trains, whose answers it would take the place of; call"
                " the other model otherwise"
            )
        return others


@recipe(Config)
def tulu3(run: Run, config: Config) -> dict:
    """Tulu 3: SFT, length-normalised DPO on judged on- and off-policy answers, a reward model as the value function's
    start, PPO against verifiers.
    """
    source = Source(run, config)
    demonstrations = ingest(run, "demonstrations", source("demonstrations"), config)
    prompts = ingest(run, "prompts", source("prompts"), config)
    asked = (
        ingest(run, "preference_prompts", config.data.preference_prompts, config)
        if config.data.preference_prompts
        else prompts
    )
    test = ingest(run, "test", config.data.test, config) if config.data.test else prompts

    base = pretrained(run, source, config, demonstrations)
    instructed = run("sft", model=base, data=demonstrations, config=config.sft, name_as="sft")["model"]

    rating = reward_inputs(source, config, config.sample.rewards, instructed)
    samplers = {"policy": instructed, **config.others}

    def rated(name: str, model: str) -> str:
        return run(
            "rejection",
            "sample" if name == "policy" else f"sample_{name}",
            model=model,
            prompts=asked,
            config=config.sample,
            **rating,
        )["candidates"]

    answers = run.together([lambda name=name, model=model: rated(name, model) for name, model in samplers.items()])
    pairs = run("preferences", "pairs", candidates=dict(zip(samplers, answers)), config=config.pairs)["data"]

    aligned, valued = run.together(
        [
            lambda: run("align", "dpo", model=instructed, data=pairs, config=config.dpo, name_as="dpo")["model"],
            lambda: run("reward_model", model=instructed, data=pairs, config=config.reward_model, name_as="reward")[
                "model"
            ],
        ]
    )
    reinforced = run(
        "rl",
        model=aligned,
        data=prompts,
        config=config.rl,
        name_as="rl",
        **rl_inputs(source, config, config.rl, aligned, valued),
    )["model"]

    models = {"base": base, "sft": instructed, "dpo": aligned, "rl": reinforced}
    held_out = {"prompts": test, **reward_inputs(source, config, config.evaluate.rewards, instructed)}
    evaluations = evaluate_all(run, models, config.evaluate, select_by=config.promote.metric, **held_out)
    clean = contamination(run, models, evaluations, test, config)
    decision = promote(
        run, models, evaluations, config.promote, config.evaluate, baseline="base", name=config.promote_as, **held_out
    )
    return {
        "models": {**models, "reward": valued},
        "scores": evaluations.table(),
        "best": evaluations.best,
        "contamination": clean["scores"],
        "decision": decision,
    }
