"""llama2: two reward models from graded comparisons, rounds of rejection sampling and fine-tuning, PPO behind the last
one (recipe.llama2; Touvron et al. 2023).

    posttrain run llama2 --preset demo                              # the embedded world, minutes on two CPU cores
    posttrain run llama2 --set model=BASE --set data.demonstrations=demos.jsonl --set data.pairs=helpful.jsonl --set
    data.safety_pairs=safety.jsonl --set data.prompts=prompts.jsonl
    posttrain run llama2 ... --set labels=fresh --set gold.rewards='[{kind: judge}]' --set judge=MODEL     # the helpfulness model follows the policy
    posttrain run llama2 --preset 70b ...                           # the rates of the largest models, where they differ

Defaults are the published numbers (`scale` for smaller runs). The grades of comparisons (significantly better ...
negligibly better, or a strength of 1 to 4) become margins inside the loss. One reward model learns helpfulness, one
safety (data.safety_pairs); together (`reward`) the safety model decides on prompts whose column category or domain is
safety, and wherever it says less than 0.15 (safety.anchor=chosen makes an average safe answer 0.5, where comparisons
alone leave that open). Without data.safety_pairs, as on the embedded world, there is one reward model and it decides
alone.

Round k: `sample_k` of the current policy, `select_k` of each prompt's best answer of this and all earlier rounds,
scored by the reward model of now, `improve_k`, fine-tuning on them. Behind the last round `rl`, PPO with whitened
rewards. With labels=fresh, two answers to each prompt, of the last two policies, are compared by `gold.rewards` before
every round but the first, and the helpfulness model is trained again on all comparisons so far; people's weekly
comparisons come in with data.pairs.

Not stated by the paper, and ours: K (16; texts 10 to 30) and the temperatures.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Optional

from pydantic import Field

from flows.d2po import UNSEEN
from flows.published import EVERYTHING, Data, PublishedConfig, alignment_tax, begun, scaled, with_benchmarks
from flows.recipe import Run, recipe
from flows.start import decided, evaluated, next_prompts, reward_inputs, rl_inputs
from flows.steps import HELD_OUT, Source, ingest
from stages.ingest import Config as IngestConfig
from stages.preferences import Config as PreferencesConfig
from stages.rejection import Config as RejectionConfig, selecting
from stages.reward_combine import Config as CombineConfig
from stages.reward_model import Config as RewardModelConfig, reading
from stages.reward.components import RewardComponent
from stages.rl import Config as RLConfig
from stages.sft import Config as SFTConfig

REWARD = [RewardComponent(name="reward", kind="model")]
#: Both reward models: one pass, a warm-up of 3%, a rate that ends at a tenth.
REWARD_MODEL = dict(
    objective="margin",
    learning_rate=1e-5,
    warmup_ratio=0.03,
    min_lr_ratio=0.1,
    weight_decay=0.1,
    adam_beta2=0.95,
    batch_size=512,
    num_train_epochs=1,
    max_length=4096,
)


class LlamaData(Data):
    safety_pairs: Optional[str] = Field(
        None,
        title="Safety pairs",
        description="Comparisons by safety, as data.pairs are by helpfulness; empty: one reward model decides.",
    )


class Config(PublishedConfig):
    NOT_READ: ClassVar = {
        "reward_model": "the models of the sections helpful and safety are trained in the run",
        "train_reward_model": "write helpful and safety",
    }
    data: LlamaData = Field(
        LlamaData(),
        description=(
            "Your own data; empty: the embedded world. Published: 27,540 demonstrations, 1.4M comparisons in 14"
            " batches."
        ),
    )
    rounds: int = Field(
        5, ge=1, description="Rounds of rejection sampling and fine-tuning; the last one is followed by PPO."
    )
    labels: Literal["given", "fresh"] = Field(
        "given", description="Comparisons: those given, or also fresh ones of each round's policies, by gold.rewards."
    )
    improve_from: Literal["current", "sft"] = Field(
        "current", description="Model that each round's fine-tuning starts from: the current one, or the SFT model."
    )
    other_temperature: float = Field(
        0.7,
        gt=0,
        description=(
            "labels=fresh: temperature of the earlier policy's answers; gold.temperature is that of the current one"
            " (ours)."
        ),
    )
    ingest_pairs: IngestConfig = Field(
        IngestConfig(kind="pairs/1", margin_mode="llama2_small", **HELD_OUT),
        description="Checks, margins and splits of the helpfulness comparisons.",
    )
    ingest_safety_pairs: IngestConfig = Field(
        IngestConfig(kind="pairs/1", margin_mode="llama2_small", **HELD_OUT),
        description="The same of the safety comparisons.",
    )
    sft: SFTConfig = Field(
        SFTConfig(learning_rate=2e-5, weight_decay=0.1, batch_size=64, num_train_epochs=2, max_length=4096),
        description="Fine-tuning on demonstrations.",
    )
    helpful: RewardModelConfig = Field(RewardModelConfig(**REWARD_MODEL), description="The helpfulness model.")
    safety: RewardModelConfig = Field(RewardModelConfig(**REWARD_MODEL), description="The safety model.")
    combine: CombineConfig = Field(
        CombineConfig(combine="safety_gate", safety_threshold=0.15), description="Which of the two decides."
    )
    gold: RejectionConfig = Field(
        RejectionConfig(num_generations=1, max_prompts=1000, max_completion_length=1024, allow_empty=True),
        description="labels=fresh: the answers that are compared, one of each policy.",
    )
    gold_pairs: PreferencesConfig = Field(
        PreferencesConfig(select="all"), description="Comparisons of them; the margin is the difference in reward."
    )
    sample: RejectionConfig = Field(
        RejectionConfig(num_generations=16, max_completion_length=1024, allow_empty=True, rewards=REWARD),
        description="K answers to each prompt, of which the best is kept.",
    )
    improve: SFTConfig = Field(
        SFTConfig(learning_rate=2e-5, weight_decay=0.1, batch_size=64, num_train_epochs=1, max_length=4096),
        description="Fine-tuning on the best answers.",
    )
    rl: RLConfig = Field(
        RLConfig(
            preset="ppo",
            learning_rate=1e-6,
            weight_decay=0.1,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            epsilon=0.2,
            kl_coef=0.01,
            reward_norm="whiten",
            prompts_per_step=512,
            num_generations=1,
            num_iterations=1,
            num_minibatches=8,
            max_steps=3200,
            max_completion_length=1024,
            rewards=REWARD,
        ),
        description="PPO: 400 batches of 512 (published 200 to 400).",
    )


@recipe(Config)
def llama2(run: Run, config: Config) -> dict:
    """Llama 2-Chat: SFT, a helpfulness and a safety reward model with margins, rounds of rejection sampling, PPO."""
    config = with_benchmarks(run, scaled(config))
    source, demonstrations, prompts, text, base = begun(run, config)
    pairs = ingest(run, "pairs", source("pairs"), config)
    safety_pairs = ingest(run, "safety_pairs", config.data.safety_pairs, config) if config.data.safety_pairs else None
    instructed = run("sft", model=base, data=demonstrations, config=config.sft, name_as="sft")["model"]

    helpful, safety = [
        found["model"]
        for found in run.together(
            [
                lambda: run(
                    "reward_model",
                    "helpful",
                    model=instructed,
                    data=pairs,
                    config=reading(config.helpful, replay=True, previous=None),
                    name_as="llama2-helpful",
                ),
                *(
                    [
                        lambda: run(
                            "reward_model",
                            "safety",
                            model=instructed,
                            data=safety_pairs,
                            config=config.safety,
                            name_as="llama2-safety",
                        )
                    ]
                    if safety_pairs
                    else []
                ),
            ]
        )
    ] + [None] * (not safety_pairs)
    judge = gated(run, config, helpful, safety, "reward")
    policies, fresh, sampled, models = [instructed], {}, {}, {"start": base, "sft": instructed}
    for k in range(1, config.rounds + 1):
        seed = run.seed + k
        if config.labels == "fresh" and k > 1:
            fresh |= answered(run, source, config, k, policies, prompts)
            data = run("preferences", f"fresh_pairs_{k}", candidates=fresh, config=config.gold_pairs, seed=seed)["data"]
            helpful = run(
                "reward_model",
                f"helpful_{k}",
                model=instructed,
                data=data,
                replay={"given": pairs},
                previous=helpful,
                seed=seed,
                name_as=f"llama2-helpful-{k}",
                config=config.helpful.model_copy(update={"replay_fraction": EVERYTHING}),
            )["model"]
            judge = gated(run, config, helpful, safety, f"reward_{k}")
        scored = {
            "prompts": prompts,
            "reward_model": judge,
            **reward_inputs(source, config, config.sample.rewards, policies[-1]),
        }
        found = run(
            "rejection", f"sample_{k}", model=policies[-1], config=next_prompts(config.sample, k), seed=seed, **scored
        )
        sampled[f"round_{k}"] = found["candidates"]
        if k > 1:
            found = run(
                "rejection",
                f"select_{k}",
                model=policies[-1],
                candidates=sampled,
                config=selecting(config.sample, rescore=True),
                seed=seed,
                **scored,
            )
        start = policies[-1] if config.improve_from == "current" else instructed
        policies.append(
            run(
                "sft",
                f"improve_{k}",
                model=start,
                data=found["selected"],
                config=config.improve,
                seed=seed,
                name_as=f"llama2-rs-{k}",
            )["model"]
        )
        models[f"round_{k}"] = policies[-1]
    models["rl"] = run(
        "rl",
        model=policies[-1],
        data=prompts,
        config=config.rl,
        name_as="llama2-rl",
        **rl_inputs(source, config, config.rl, policies[-1], judge),
    )["model"]

    evaluations, held_out = evaluated(run, source, config, models, prompts, judge)
    tax = alignment_tax(run, config, models, evaluations, text)
    return {**decided(run, config, models, evaluations, held_out), "reward_model": judge, "alignment_tax": tax}


def gated(run: Run, config: Config, helpful: str, safety: str | None, label: str) -> str:
    """Both reward models as one; the helpfulness model alone where there is no other."""
    return (
        helpful
        if safety is None
        else run(
            "reward_combine",
            label,
            members={config.combine.helpful: helpful, config.combine.safety: safety},
            config=config.combine,
            name_as="llama2-reward",
        )["model"]
    )


def answered(run: Run, source: Source, config: Config, k: int, policies: list[str], prompts: str) -> dict[str, str]:
    """Gold-labelled answers of the last two policies to the round's prompts, sampled at different temperatures, and
    others than those that the round samples next.
    """
    gold = next_prompts(config.gold, k - 1)
    asked = {
        "current": (policies[-1], gold),
        "other": (policies[-2], gold.model_copy(update={"temperature": config.other_temperature})),
    }
    return {
        f"round_{k}_{name}": run(
            "rejection",
            f"gold_{k}_{name}",
            model=policy,
            prompts=prompts,
            config=settings,
            seed=run.seed + k + (2 * UNSEEN if name == "other" else UNSEEN),
            **reward_inputs(source, config, config.gold.rewards, policies[-1]),
        )["candidates"]
        for name, (policy, settings) in asked.items()
    }
