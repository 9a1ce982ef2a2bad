"""hh: a helpful and harmless assistant: context distillation, a pre-trained preference model, PPO without SFT, online
rounds (recipe.hh; Bai et al. 2022).

    posttrain run hh --preset demo                                  # the embedded world, minutes on two CPU cores
    posttrain run hh --set model=BASE --set data.pairs=hh_rlhf.jsonl --set data.prompts=prompts.jsonl --set
    data.pmp=votes.jsonl posttrain run hh ... --set labels=fresh --set rounds=4 --set gold.rewards='[{kind: judge}]'
    --set judge=MODEL --set final_judge=OTHER
    posttrain run overoptimisation --preset hh --set model=... --set data.pairs=... --set data.prompts=...     # robustness: RL against a model of one half, read off one of the other

1. `behind_prompt`: the pretrained model answers behind a prompt of conversations with a helpful, honest and harmless
   assistant (`hhh_prompt`; fourteen of ours by default). `distil`: the same model learns to answer so without it. That
   is the start of every policy; there is no SFT.
2. `pmp`: the preference model, from the pretrained model, first learns to tell good from bad answers (data.pmp: public
   votes and edits), where there are any.
3. `early`: a preference model on the given comparisons. labels=fresh: `best_of_n` of the start by it, of whose two best
   per prompt `gold.rewards` says which is better.
4. `preference_k` on all comparisons so far, from the pre-trained one, then `rl_k`, PPO from the start with a KL
   coefficient of 0.001. labels=fresh: the policy answers (`online_k`), `gold.rewards` compares, and the next round
   begins again from the start.

Win rates and Elo scores of all policies where `final_judge` or win_rate.endpoint says who decides. Not stated by the
paper and ours: learning rates and batches; the prompt goes in front as a system message. People's comparisons of the
rejection-sampled and online tranches come in with data.pairs.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Optional

from pydantic import Field, model_validator

from flows.config import PRESETS, load_yaml
from flows.published import (
    EVERYTHING,
    WORLDS_AND_JUDGES,
    Data,
    PublishedConfig,
    alignment_tax,
    held_out_text,
    scaled,
    with_benchmarks,
)
from flows.recipe import Run, recipe
from flows.start import accuracies, decided, evaluated, next_prompts, reward_inputs, rl_inputs, starting_policy
from flows.steps import HELD_OUT, Source, compared, ingest, judge_of
from stages.distill import Config as DistillConfig
from stages.evaluate import Config as EvaluateConfig
from stages.ingest import Config as IngestConfig
from stages.preferences import Config as PreferencesConfig
from stages.rejection import Config as RejectionConfig, selecting
from stages.reward_model import Config as RewardModelConfig, kept_head, reading
from stages.reward.components import RewardComponent
from stages.rl import Config as RLConfig
from stages.win_rate import Config as WinRateConfig

REWARD = [RewardComponent(name="reward", kind="model")]
#: How long answers are and where they end: a pretrained model goes on with the next person's turn.
ANSWER = dict(max_completion_length=512, stop_strings=["\n\nHuman:"])


class HHData(Data):
    pmp: Optional[str] = Field(
        None,
        title="Preference pre-training",
        description=(
            "Public judgements to pre-train the preference model on (votes, edits, ratings, pairs): ref, file or hub"
            " id; empty: none, and on the embedded world its comparisons."
        ),
    )


class Config(PublishedConfig):
    UNSCALED: ClassVar[tuple[str, ...]] = (*WORLDS_AND_JUDGES, "sft")  # the embedded world's start
    NOT_READ: ClassVar = {
        "reward_model": "the preference model is trained in the run",
        "train_reward_model": "write pmp and preference",
        "behind_prompt.system": "write hhh_prompt",
        "distil.context": "write hhh_prompt",
        "distil.method": "what is distilled is hhh_prompt",
    }
    model: Optional[str] = Field(
        None,
        title="Model",
        description=(
            "Pretrained model (ref, directory or hub id); empty: a small one is trained here on the embedded world,"
            " with SFT, since so small a model answers nothing that it has seen no answers to."
        ),
    )
    data: HHData = Field(
        HHData(),
        description=(
            "Your own data; empty: the embedded world. Published: 44k helpfulness and 42k harmlessness comparisons of"
            " the first tranche, more later."
        ),
    )
    hhh_prompt: Optional[str] = Field(
        None,
        title="Prompt",
        description=(
            "Text that context distillation bakes in; empty: fourteen conversations of ours"
            " (flows/presets/hhh_prompt.yaml)."
        ),
    )
    rounds: int = Field(
        1,
        ge=1,
        description=(
            "Rounds of comparisons, preference model and PPO; more than one needs labels=fresh (published: weekly)."
        ),
    )
    labels: Literal["given", "fresh"] = Field(
        "given",
        description=(
            "Comparisons: those given, or also fresh ones of the start's best of n and of each round's policy, by"
            " gold.rewards."
        ),
    )
    final_judge: Optional[str] = Field(
        None,
        title="Final judge",
        description=(
            "Who decides win rates and Elo scores at the end: a language model (ref); win_rate.endpoint asks a server;"
            " empty: nobody."
        ),
    )
    ingest_pmp: IngestConfig = Field(
        IngestConfig(kind="unpaired/1", **HELD_OUT),
        description="Checks and splits of data.pmp, as good and bad answers.",
    )
    behind_prompt: RejectionConfig = Field(
        RejectionConfig(
            num_generations=1,
            select="random_per_prompt",
            **ANSWER,
            max_prompt_length=8192,
            validation_fraction=0.05,
            rewards=[RewardComponent(name="ended", kind="truncation")],
        ),
        description="The pretrained model's answers behind the prompt.",
    )
    distil: DistillConfig = Field(DistillConfig(learning_rate=1e-5), description="Context distillation on them.")
    pmp: RewardModelConfig = Field(
        RewardModelConfig(objective="pointwise_bce", num_train_epochs=1),
        description="Pre-training of the preference model: good against bad.",
    )
    preference: RewardModelConfig = Field(
        RewardModelConfig(objective="bt", num_train_epochs=1),
        description="The preference model on comparisons, one pass.",
    )
    best_of_n: RejectionConfig = Field(
        RejectionConfig(num_generations=16, **ANSWER, max_prompts=1000, allow_empty=True, rewards=REWARD),
        description=(
            "labels=fresh: answers of the start, of which the best two by the early preference model are compared."
        ),
    )
    gold: RejectionConfig = Field(
        RejectionConfig(num_generations=2, **ANSWER, max_prompts=1000, allow_empty=True),
        description="labels=fresh: who compares, and how many answers of a policy.",
    )
    gold_pairs: PreferencesConfig = Field(
        PreferencesConfig(select="all"), description="Comparisons from the labelled answers."
    )
    rl: RLConfig = Field(
        RLConfig(
            preset="ppo",
            kl_coef=0.001,
            num_generations=1,
            num_iterations=1,
            num_minibatches=8,
            prompts_per_step=512,
            max_steps=2344,
            **ANSWER,
            rewards=REWARD,
        ),
        description=(
            "PPO against the preference model: 293 batches of 512, the 150k episodes up to which two preference models"
            " agreed."
        ),
    )
    evaluate: EvaluateConfig = Field(
        EvaluateConfig(**ANSWER), description="Evaluation on held-out prompts, the same for every round."
    )
    win_rate: WinRateConfig = Field(WinRateConfig(), description="Win rates and Elo scores among all policies.")

    @model_validator(mode="after")
    def _rounds_differ(self):
        if self.rounds > 1 and self.labels == "given":
            raise ValueError(
                "with labels=given every round would see the same comparisons; write labels=fresh (and gold.rewards,"
                " who compares), or rounds=1"
            )
        return self


@recipe(Config)
def hh(run: Run, config: Config) -> dict:
    """Helpful and harmless: context distillation, preference-model pre-training, PPO against a preference model, online
    rounds.
    """
    config = with_benchmarks(run, scaled(config))
    source = Source(run, config)
    prompts = ingest(run, "prompts", source("prompts"), config)
    pairs = ingest(run, "pairs", source("pairs"), config)
    votes = config.data.pmp or (source("pairs") if config.data.pairs is None else None)
    judgements = ingest(run, "pmp", votes, config) if votes else None
    base = starting_policy(run, source, config)
    text = held_out_text(run, source, config)

    context = config.hhh_prompt or our_prompt()
    shown = run(
        "rejection",
        "behind_prompt",
        model=base,
        prompts=prompts,
        config=config.behind_prompt.model_copy(update={"system": context}),
        **reward_inputs(source, config, config.behind_prompt.rewards, base),
    )["selected"]
    start = run(
        "distill",
        "distil",
        model=base,
        data=shown,
        config=config.distil.model_copy(update={"method": "context", "context": context}),
        name_as="hh-start",
    )["model"]

    scorer, settings = base, config.preference
    if judgements:
        scorer = run(
            "reward_model",
            "pmp",
            model=base,
            data=judgements,
            config=config.pmp,
            name_as="hh-pmp",
        )["model"]
        settings = kept_head(settings)

    judge, fresh, models, history = None, {}, {"start": start}, []
    if config.labels == "fresh":
        early = run(
            "reward_model",
            "early",
            model=scorer,
            data=pairs,
            config=reading(settings, replay=None, previous=None),
            name_as="hh-early",
        )["model"]
        many = run(
            "rejection",
            "best_of_n",
            model=start,
            prompts=prompts,
            reward_model=early,
            config=config.best_of_n,
            **reward_inputs(source, config, config.best_of_n.rewards, start),
        )
        two = selecting(config.gold, rescore=True, rescore_best=2)
        fresh["best_of_n"] = run(
            "rejection",
            "label_best",
            model=start,
            prompts=prompts,
            candidates=many["candidates"],
            config=two,
            **reward_inputs(source, config, config.gold.rewards, start),
        )["candidates"]
        judge = early
    for k in range(1, config.rounds + 1):
        seed = run.seed + k
        data, more = pairs, {}
        if fresh:
            data = run("preferences", f"fresh_pairs_{k}", candidates=fresh, config=config.gold_pairs, seed=seed)["data"]
            more = {"replay": {"given": pairs}}
        section = settings.model_copy(update={"replay_fraction": EVERYTHING}) if fresh else settings
        learned = run(
            "reward_model",
            f"preference_{k}",
            model=scorer,
            data=data,
            previous=judge,
            seed=seed,
            name_as=f"hh-preference-{k}",
            config=reading(section, replay=True, previous=judge),
            **more,
        )
        judge = learned["model"]
        history.append({"round": k, **accuracies(learned)})
        models[f"round_{k}"] = run(
            "rl",
            f"rl_{k}",
            model=start,
            data=prompts,
            config=config.rl,
            seed=seed,
            name_as=f"hh-rl-{k}",
            **rl_inputs(source, config, config.rl, start, judge),
        )["model"]
        if k < config.rounds:
            fresh[f"online_{k}"] = run(
                "rejection",
                f"online_{k}",
                model=models[f"round_{k}"],
                prompts=prompts,
                config=next_prompts(config.gold, k),
                seed=seed,
                **reward_inputs(source, config, config.gold.rewards, models[f"round_{k}"]),
            )["candidates"]

    evaluations, held_out = evaluated(run, source, config, models, prompts, judge)
    rates = []
    if config.final_judge or config.win_rate.endpoint:
        who, section = judge_of(
            config.final_judge,
            config.win_rate.model_copy(update={"baseline": "start"} if not config.win_rate.baseline else {}),
        )
        rates = compared(
            run, {name: outputs["samples"] for name, outputs in evaluations.items()}, who, section, prompts=prompts
        )
    tax = alignment_tax(run, config, models, evaluations, text)
    return {
        **decided(run, config, models, evaluations, held_out),
        "preference_model": judge,
        "rounds": history,
        "win_rates": rates,
        "alignment_tax": tax,
    }


def our_prompt() -> str:
    """The fourteen conversations as one text."""
    written = load_yaml(PRESETS / "hhh_prompt.yaml")
    return "\n\n-----\n\n".join(
        [
            written["preface"],
            *(
                "\n\n".join(f"{speaker}: {text}" for turn in conversation for speaker, text in turn.items())
                for conversation in written["conversations"]
            ),
        ]
    )
