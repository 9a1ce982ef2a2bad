"""deepseekmath: continued pre-training on a mined corpus, SFT on worked solutions, GRPO against a reward model
(recipe.deepseekmath, recipe.midtrain; Shao et al. 2024).

    posttrain run deepseekmath --preset demo                        # the embedded world, minutes on two CPU cores
    posttrain run deepseekmath --set model=BASE --set data.text=corpus.jsonl --set data.demonstrations=solutions.jsonl
    --set data.prompts=gsm8k_train.jsonl
    posttrain run deepseekmath ... --set supervision=process        # a process reward model and GRPO on the rewards of steps
    posttrain run deepseekmath --preset iterative ...               # two iterations: reward model and reference follow the policy, a tenth of earlier labels stays
    posttrain run deepseekmath ... --set supervision=rule           # RL on the verifier's verdicts: continued pre-training before SFT and RL (mid-training)

Defaults are the published numbers (`scale` for smaller runs). `midtrain` on data.text, by all tokens (left out where a
model comes without text); `sft`; then in iteration k `solutions_k` of the policy with the verifier's verdicts, from
which the reward model learns (`reward_model_k`): whether a solution is right (outcome), or each of its steps, labelled
by how often rollouts from it end right (process, `steps_k`); `rl_k` with KL to the policy that the iteration starts
from.

Corpora in given shares are mixed before: posttrain stage mix (56% mined mathematics, 20% code, 10% papers, 10% web, 4%
algebra). The paper's batches of 10M tokens are 2441 rows of 4096. Ours: one pass over the text, cosine decay, and one
pass over 144k prompts.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Optional

from pydantic import Field, model_validator

from flows.published import Data, PublishedConfig, alignment_tax, begun, scaled, with_benchmarks
from flows.recipe import Run, recipe
from flows.start import accuracies, decided, evaluated, next_prompts, reward_inputs, rl_inputs
from flows.steps import Source
from stages.label_steps import Config as LabelStepsConfig
from stages.preferences import Config as PreferencesConfig
from stages.rejection import Config as RejectionConfig
from stages.reward_model import Config as RewardModelConfig, kept_head, reading
from stages.reward.components import RewardComponent
from stages.rl import Config as RLConfig
from stages.sft import Config as SFTConfig


class Config(PublishedConfig):
    NOT_READ: ClassVar = {
        "data.pairs": "its reward models learn from the policy's own solutions (or write reward_model=REF)",
        "ingest_pairs": "its reward models learn from the policy's own solutions",
    }
    data: Data = Field(
        Data(),
        description=(
            "Your own data; empty: the embedded world. Published: 500B tokens of text, 776k worked solutions, 144k"
            " problems."
        ),
    )
    reward_model: Optional[str] = Field(
        None,
        title="Reward model",
        description="The first iteration's reward model; empty: trained on the SFT model's solutions.",
    )
    supervision: Literal["outcome", "process", "rule"] = Field(
        "outcome",
        description="What RL optimises: a reward model of whole solutions, one of steps, or the verifier's verdicts.",
    )
    rounds: int = Field(1, ge=1, description="Iterations of reward model and GRPO (iterative GRPO: 2).")
    midtrain: SFTConfig = Field(
        SFTConfig(
            train_on="full",
            learning_rate=4.2e-4,
            batch_size=2441,
            num_train_epochs=1,
            max_length=4096,
            weight_decay=0.1,
            adam_beta2=0.95,
        ),
        description="Continued pre-training on data.text.",
    )
    sft: SFTConfig = Field(
        SFTConfig(learning_rate=5e-5, lr_schedule="constant", batch_size=256, max_steps=500, max_length=4096),
        description="Fine-tuning on worked solutions.",
    )
    solutions: RejectionConfig = Field(
        RejectionConfig(num_generations=8, max_completion_length=1024, allow_empty=True),
        description="Solutions of each iteration's policy that the reward model learns from.",
    )
    labels: PreferencesConfig = Field(
        PreferencesConfig(kind="unpaired/1"), description="outcome: right and wrong solutions."
    )
    steps: LabelStepsConfig = Field(
        LabelStepsConfig(max_completion_length=1024), description="process: labels of steps by rollouts."
    )
    train_reward_model: RewardModelConfig = Field(
        RewardModelConfig(learning_rate=2e-5, replay_fraction=0.1, max_length=2048),
        description="Reward model on the solutions, or on their steps.",
    )
    rl: RLConfig = Field(
        RLConfig(
            preset="grpo",
            learning_rate=1e-6,
            beta=0.04,
            epsilon=0.2,
            num_generations=64,
            prompts_per_step=16,
            num_iterations=1,
            max_steps=9000,
            max_completion_length=1024,
            rewards=[RewardComponent(name="reward", kind="model", squash="sigmoid")],
        ),
        description=(
            "GRPO: batches of 1024 solutions, one update each; supervision says the preset and the reward: the"
            " probability that a solution is right, 0 for one that is cut."
        ),
    )

    @model_validator(mode="after")
    def _preset_follows(self):
        if self.rl.preset == "grpo_process":
            raise ValueError(
                "supervision=process takes rl.preset=grpo_process by itself; write supervision=process and leave"
                " rl.preset out"
            )
        if self.supervision == "rule" and self.reward_model is not None:
            raise ValueError(
                "supervision=rule asks no reward model; leave reward_model out, or write supervision=outcome"
            )
        return self


@recipe(Config)
def deepseekmath(run: Run, config: Config) -> dict:
    """DeepSeekMath: continued pre-training, SFT, GRPO with outcome or process supervision, also iterative."""
    config = with_benchmarks(run, scaled(config))
    source, demonstrations, prompts, text, base = begun(run, config)
    models = {"start": base}
    if text is not None:
        models["midtrain"] = run("sft", "midtrain", model=base, data=text, config=config.midtrain, name_as="midtrain")[
            "model"
        ]
    adapted = models.get("midtrain", base)
    policy = models["sft"] = run("sft", model=adapted, data=demonstrations, config=config.sft, name_as="sft")["model"]

    judge, labelled, history, settings = config.reward_model, {}, [], optimiser(config)
    for k in range(1, config.rounds + 1):
        seed = run.seed + k
        if config.supervision != "rule" and (k > 1 or judge is None):
            fresh = labels(run, source, config, k, policy, prompts)
            section = reading(config.train_reward_model, replay=labelled, previous=judge)
            learned = run(
                "reward_model",
                f"reward_model_{k}",
                model=judge or adapted,
                data=fresh,
                previous=judge,
                replay=labelled or None,
                seed=seed,
                name_as=f"math-reward-{k}",
                config=kept_head(section) if judge else section,
            )
            judge, labelled[f"round_{k}"] = learned["model"], fresh
            history.append({"round": k, **accuracies(learned)})
        policy = models[f"round_{k}"] = run(
            "rl",
            f"rl_{k}",
            model=policy,
            data=prompts,
            config=settings,
            seed=seed,
            name_as=f"grpo-{k}",
            **rl_inputs(source, config, settings, policy, judge),
        )["model"]

    evaluations, held_out = evaluated(run, source, config, models, prompts, judge)
    tax = alignment_tax(run, config, models, evaluations, text)
    return {
        **decided(run, config, models, evaluations, held_out),
        "reward_model": judge,
        "rounds": history,
        "alignment_tax": tax,
    }


def labels(run: Run, source: Source, config: Config, k: int, policy: str, prompts: str) -> str:
    """What the reward model of iteration k learns from: the policy's solutions with their verdicts, or with a label for
    every step.
    """
    candidates = run(
        "rejection",
        f"solutions_{k}",
        model=policy,
        prompts=prompts,
        config=next_prompts(config.solutions, k),
        seed=run.seed + k,
        **reward_inputs(source, config, config.solutions.rewards, policy),
    )["candidates"]
    if config.supervision == "process":
        return run(
            "label_steps",
            f"steps_{k}",
            model=policy,
            candidates=candidates,
            prompts=prompts,
            config=config.steps,
            seed=run.seed + k,
        )["steps"]
    return run("preferences", f"labels_{k}", candidates=candidates, config=config.labels, seed=run.seed + k)["data"]


def optimiser(config: Config) -> RLConfig:
    """RL's settings under the supervision: on steps, with their separator, or against the verifier."""
    if config.supervision == "process":
        # a model of steps gives probabilities
        rewards = [c.model_copy(update={"squash": "none"}) for c in config.rl.rewards]
        return config.rl.model_copy(
            update={"preset": "grpo_process", "step_separator": config.steps.separator, "rewards": rewards}
        )
    if config.supervision == "rule":
        return config.rl.model_copy(
            update={
                "rewards": [
                    RewardComponent(name="verifier", kind="verifier") if c.kind == "model" else c
                    for c in config.rl.rewards
                ]
            }
        )
    return config.rl
