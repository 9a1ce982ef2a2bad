"""instructgpt: demonstrations, rankings of several answers, a reward model on all pairs of a ranking, PPO with
pretraining text (recipe.instructgpt; Ouyang et al. 2022).

    posttrain run instructgpt --preset demo                         # the embedded world, minutes on two CPU cores
    posttrain run instructgpt --set model=BASE --set data.demonstrations=demos.jsonl --set data.prompts=prompts.jsonl
    --set data.text=corpus.jsonl --set data.rankings=rankings.jsonl
    posttrain run instructgpt ... --set rank.rewards='[{kind: judge}]' --set judge=MODEL      # a judge ranks; reward_model=MODEL: a given reward model does
    posttrain run instructgpt --preset 175b ...                     # the rates of the largest model, where they differ
    posttrain run instructgpt --preset sft_rm ...                   # SFT, selection and reward model, no RL (instructgpt_sft_rm)

Defaults are the published numbers (`scale` for smaller runs). Steps: `sft` for 16 epochs, each published; `answers_1`
and `rankings_1`, 4 to 9 answers to each prompt, ranked by `rank.rewards`, unless people's rankings are given
(data.rankings); `reward_model_1` on all pairs of each ranking, its mean over demonstrations being 0; `select_sft`, the
epoch with the best answers by that reward model (validation loss is best after one epoch, answers are not), which
becomes model:sft@selected; `rl_1`, PPO from it with KL to it, a critic that starts from the reward model, and
pretraining text.
With `rounds` above 1, answers of the last round's policy are ranked, too, and reward model and policy are trained again;
the reward model's drift on them is in its report.

Not stated by the paper in numbers that hold for every size, and ours: RL's learning rate (5e-6, texts 1e-6 to 1e-5).
Its residual dropout of 0.2 in SFT is not offered.
"""

from __future__ import annotations

from typing import ClassVar, Optional

from pydantic import Field, model_validator

from flows.published import (
    EVERYTHING,
    WORLDS_AND_JUDGES,
    Data,
    PublishedConfig,
    alignment_tax,
    begun,
    scaled,
    with_benchmarks,
)
from flows.recipe import Run, recipe
from flows.start import accuracies, decided, evaluated, next_prompts, reward_inputs, rl_inputs, scorer
from flows.steps import HELD_OUT, ingest
from stages.evaluate import Config as EvaluateConfig
from stages.ingest import Config as IngestConfig
from stages.preferences import Config as PreferencesConfig
from stages.rejection import Config as RejectionConfig
from stages.reward_model import Config as RewardModelConfig, reading
from stages.reward.components import RewardComponent
from stages.rl import Config as RLConfig
from stages.rl import row_of
from stages.select_checkpoint import Config as SelectConfig
from stages.select_checkpoint import as_trained
from stages.sft import Config as SFTConfig


class InstructData(Data):
    rankings: Optional[str] = Field(
        None,
        title="Rankings",
        description=(
            "Rankings (or pairs) by people: ref, file, directory or hub id; empty: rank.rewards ranks sampled answers."
        ),
    )


class Config(PublishedConfig):
    # the ranker that stands for people
    UNSCALED: ClassVar[tuple[str, ...]] = (*WORLDS_AND_JUDGES, "train_reward_model")
    data: InstructData = Field(
        InstructData(),
        description=(
            "Your own data; empty: the embedded world. Published: 13k demonstrations, 33k prompts with rankings, 31k"
            " prompts for RL."
        ),
    )
    reward_model: Optional[str] = Field(
        None,
        title="Ranker",
        description=(
            "Reward model that ranks answers in people's place (components of kind=model in rank.rewards); empty:"
            " trained on data.pairs."
        ),
    )
    backbone: Optional[str] = Field(
        None,
        title="Backbone",
        description="What the reward model starts from (InstructGPT 6B whatever the policy); empty: the SFT model.",
    )
    rounds: int = Field(
        1,
        ge=1,
        description=(
            "Rounds of rankings, reward model and RL; from the second on, the answers are those of the last"
            " round's policy."
        ),
    )
    choose_checkpoint: bool = Field(
        True,
        description=(
            "Go on from the SFT epoch whose answers the first reward model likes best, instead of the last: every epoch"
            " is published, and takes the disk of a model (sft.ckpt_select)."
        ),
    )
    selected_alias: str = Field(
        "selected", description="Alias in the registry of the chosen epoch, under the name sft (choose_checkpoint)."
    )
    optimise: bool = Field(
        True,
        description="RL against the reward model; false ends with SFT, selection and reward model (preset sft_rm).",
    )
    plain_ppo: bool = Field(
        False, description="Also PPO without pretraining text, for what it costs elsewhere (alignment_tax)."
    )
    ingest_rankings: IngestConfig = Field(
        IngestConfig(kind="rankings/1", **HELD_OUT), description="Checks and splits of data.rankings."
    )
    sft: SFTConfig = Field(
        SFTConfig(learning_rate=9.65e-6, batch_size=32, num_train_epochs=16, max_length=2048),
        description="Fine-tuning on demonstrations.",
    )
    select: SelectConfig = Field(
        SelectConfig(evaluate=EvaluateConfig(split="validation", num_samples=0, limit=64, max_completion_length=1000)),
        description="What the epochs of SFT are chosen by: answers to the prompts of held-out demonstrations.",
    )
    rank: RejectionConfig = Field(
        RejectionConfig(
            num_generations=9,
            min_generations=4,
            max_prompts=33_000,
            max_completion_length=1000,
            allow_empty=True,
            rewards=[RewardComponent(name="ranker", kind="model")],
        ),
        description="The answers that are ranked, and by whom.",
    )
    rankings: PreferencesConfig = Field(PreferencesConfig(kind="rankings/1"), description="One ranking per prompt.")
    kwise: RewardModelConfig = Field(
        RewardModelConfig(
            objective="kwise_pairs",
            learning_rate=9e-6,
            min_lr_ratio=0.1,
            batch_size=64,
            num_train_epochs=1,
            max_length=2048,
        ),
        description="Reward model on all pairs of each ranking; a batch counts prompts.",
    )
    rl: RLConfig = Field(
        RLConfig(
            preset="ppo_ptx",
            learning_rate=5e-6,
            warmup_ratio=0.02,
            kl_coef=0.02,
            epsilon=0.2,
            gamma=1.0,
            lam=0.95,
            ptx_coef=27.8,
            ptx_batch_ratio=8.0,
            critic_learning_rate=9e-6,
            ema_decay=0.992,
            prompts_per_step=512,
            num_generations=1,
            num_iterations=1,
            num_minibatches=8,
            max_steps=4000,
            max_completion_length=1000,
            temperature=1.0,
            rewards=[RewardComponent(name="reward", kind="model")],
        ),
        description="PPO with pretraining text: 500 batches of 512 episodes, 256k in all.",
    )

    @model_validator(mode="after")
    def _epochs_to_choose(self):
        if self.choose_checkpoint and (self.sft.curriculum != "none" or self.sft.num_train_epochs < 1):
            odd = "curriculum" if self.sft.curriculum != "none" else "num_train_epochs"
            raise ValueError(
                f"choose_checkpoint chooses among whole passes over the demonstrations, and with sft.{odd}="
                f"{getattr(self.sft, odd)} there are none; write choose_checkpoint=false, or leave sft.{odd} out"
            )
        return self

    @model_validator(mode="after")
    def _text_given(self):
        if not self.optimise and (self.rounds > 1 or self.plain_ppo):
            raise ValueError(
                f"optimise=false trains no policy by RL, which {'rounds' if self.rounds > 1 else 'plain_ppo'} is about;"
                " write rounds=1 plain_ppo=false, or optimise=true"
            )
        if self.optimise and self.model is not None and self.data.text is None and row_of(self.rl).ptx_coef:
            raise ValueError(
                "PPO-ptx mixes in text that the model was pretrained on; write data.text=REF_OR_PATH, or rl.preset=ppo"
                " rl.ptx_coef=0 for PPO without it"
            )
        return self


@recipe(Config)
def instructgpt(run: Run, config: Config) -> dict:
    """InstructGPT: SFT, rankings of sampled answers, K-wise reward model, PPO with pretraining text, and what alignment
    cost.
    """
    config = with_benchmarks(run, scaled(config))
    source, demonstrations, prompts, text, base = begun(run, config)
    given = ingest(run, "rankings", config.data.rankings, config) if config.data.rankings else None
    sampled = given is None or config.rounds > 1
    learns = sampled and config.reward_model is None and any(one.kind == "model" for one in config.rank.rewards)
    pairs = ingest(run, "pairs", source("pairs"), config) if learns else None
    section = config.sft.model_copy(update={"publish_epochs": config.choose_checkpoint or config.sft.publish_epochs})
    tuned = run("sft", model=base, data=demonstrations, config=section, name_as="sft")
    instructed = tuned["model"]
    ranker = scorer(run, source, config, config.rank.rewards, instructed, pairs) if sampled else None

    policy, judge, models, answers, history = instructed, None, {"start": base}, {}, []
    for k in range(1, config.rounds + 1):
        seed = run.seed + k
        if k > 1 or given is None:
            answers[f"round_{k}"] = run(
                "rejection",
                f"answers_{k}",
                model=policy,
                prompts=prompts,
                reward_model=ranker,
                config=next_prompts(config.rank, k),
                seed=seed,
                **reward_inputs(source, config, config.rank.rewards, policy),
            )["candidates"]
        ranked = (
            run("preferences", f"rankings_{k}", candidates=answers, config=config.rankings, seed=seed)["data"]
            if answers
            else given
        )
        section = config.kwise.model_copy(update={"replay_fraction": EVERYTHING}) if given and answers else config.kwise
        learned = run(
            "reward_model",
            f"reward_model_{k}",
            model=config.backbone or instructed,
            data=ranked,
            anchor=demonstrations,
            previous=judge,
            seed=seed,
            name_as=f"instruct-reward-{k}",
            replay={"given": given} if given and answers else None,
            config=reading(section, replay=True, previous=judge),
        )
        judge = learned["model"]
        history.append({"round": k, **accuracies(learned)})
        if k == 1:
            if config.choose_checkpoint:
                selected = run(
                    "select_checkpoint",
                    "select_sft",
                    candidates=tuned.many("epoch"),
                    data=demonstrations,
                    reward_model=judge,
                    config=as_trained(config.select, config.sft.model_dump()),
                    name_as="sft",
                )
                instructed = selected["model"]
                run.conclude(instructed, selected, "sft", config.selected_alias)
            models["sft"] = policy = instructed

        def optimised(label: str, settings: RLConfig) -> str:
            return run(
                "rl",
                label,
                model=instructed,
                data=prompts,
                ptx=text if row_of(settings).ptx_coef else None,
                config=settings,
                seed=seed,
                name_as=f"instruct-{label.replace('_', '-')}",
                **rl_inputs(source, config, settings, instructed, judge),
            )["model"]

        if config.optimise:
            policy = models[f"round_{k}"] = optimised(f"rl_{k}", config.rl)
    if config.plain_ppo:
        models["plain_ppo"] = optimised("rl_plain", without_text(config.rl))

    evaluations, held_out = evaluated(run, source, config, models, prompts, judge)
    tax = alignment_tax(run, config, models, evaluations, text)
    return {
        **decided(run, config, models, evaluations, held_out),
        "reward_model": judge,
        "rounds": history,
        "alignment_tax": tax,
    }


def without_text(settings: RLConfig) -> RLConfig:
    """The same PPO without the pretraining term."""
    plain = settings.model_dump(
        mode="json", exclude_unset=True, exclude={"ptx_coef", "ptx_batch_ratio", "ptx_agg", "ptx_max_length"}
    )
    return RLConfig.model_validate(
        {
            **plain,
            "preset": "ppo" if settings.preset == "ppo_ptx" else settings.preset,
            **({} if settings.preset == "ppo_ptx" else {"ptx_coef": 0.0}),
        }
    )
