"""rlaif: RL from AI feedback: a judge labels pairs of the policy's own answers, a reward model learns from them, and RL
follows it (recipe.rlaif).

    posttrain run rlaif --set model=path/or/ref --set data.prompts=prompts.jsonl --set judge=path/or/ref
    posttrain run rlaif --set model=... --set data.prompts=... --set label.endpoint=http://localhost:8000/v1 --set
    label.endpoint_model=NAME

Two answers per prompt (`sample`), the judge's opinion in both orders as soft labels (`label`), a reward model on them
(`train_reward_model`), RL (`rl`); then every model on the same held-out prompts, and its win rate against the start by
a judge. Arms beside or instead of this, all from the same start:

    direct=true        d-RLAIF: the judge's score of 1 to 10 is the reward, without a reward model   (labels=false: this one alone)
    human=true         RLHF: the same with a reward model on the pairs that people labelled (data.pairs)
    teacher_sft=true   the control of every AI-feedback pipeline: SFT on the judge's own answers

    principles=constitution.txt                   each pair is judged by one principle, drawn at random (Constitutional AI)
    objectives='{kind: kind.txt, honest: honest.txt}'  a reward model per set of principles, added up by combine.weights
    (multi-objective RLAIF)

The judge that labels is not the one to believe about the result: `final_judge` names another for the win rates.
"""

from __future__ import annotations

from typing import ClassVar, Optional

from pydantic import Field, model_validator

from flows.recipe import Run, recipe
from flows.start import IteratedConfig, decided, evaluated, reward_inputs, starting_policy, trained_scorer
from flows.steps import Source, compared, ingest, judge_of
from stages.ai_labels import Config as LabelConfig
from stages.rejection import Config as RejectionConfig
from stages.reward.components import RewardComponent
from stages.reward_combine import Config as CombineConfig
from stages.reward_model import Config as RewardModelConfig
from stages.rl import Config as RLConfig
from stages.running.http_json import SERVER_SETTINGS
from stages.sft import Config as SFTConfig
from stages.win_rate import Config as WinRateConfig


class Config(IteratedConfig):
    NOT_READ: ClassVar = {"reward_model": "every arm trains its own on the labels that it is about"}
    judge: str = Field(
        "self",
        description=(
            "Who labels, and scores in the arm direct: a language model (ref), or self = the starting policy;"
            " label.endpoint asks a server instead."
        ),
    )
    final_judge: Optional[str] = Field(
        None,
        title="Final judge",
        description=(
            "Who decides the win rates: a language model (ref); win_rate.endpoint asks a server; empty: the judge that"
            " labels."
        ),
    )
    principles: Optional[str] = Field(
        None, title="Principles", description="Principles that pairs are judged by: ref or file."
    )
    objectives: dict[str, str] = Field(
        default_factory=dict,
        description=(
            "Several objectives instead of one: {name: its principles, ref or file}. Each gets a reward model of its"
            " own, and combine adds them up."
        ),
    )
    labels: bool = Field(True, description="The arm rlaif: labels, a reward model on them, and RL against it.")
    direct: bool = Field(
        False, description="The arm direct: RL against the judge's score, without a reward model (d-RLAIF)."
    )
    human: bool = Field(False, description="The arm human: RL against a reward model on the pairs of people (RLHF).")
    teacher_sft: bool = Field(
        False, description="The arm teacher_sft: fine-tuning on the judge's own answers to the prompts."
    )
    sample: RejectionConfig = Field(
        RejectionConfig(num_generations=2, allow_empty=True),
        description="The answers that are compared, two per prompt.",
    )
    label: LabelConfig = Field(LabelConfig(validation_fraction=0.05), description="The judge's labels.")
    train_reward_model: RewardModelConfig = Field(
        RewardModelConfig(objective="soft_label"), description="Reward model on the judge's soft labels."
    )
    combine: CombineConfig = Field(CombineConfig(), description="objectives: how their reward models become one.")
    rl: RLConfig = Field(
        RLConfig(preset="rloo", rewards=[RewardComponent(name="reward", kind="model")]),
        description="RL; in the arm direct the component of kind model is the judge.",
    )
    teach: RejectionConfig = Field(
        RejectionConfig(
            num_generations=1,
            select="random_per_prompt",
            temperature=0.7,
            rewards=[RewardComponent(name="ended", kind="truncation")],
        ),
        description="teacher_sft: the judge's answers, of which those that end are imitated.",
    )
    imitate: SFTConfig = Field(SFTConfig(), description="teacher_sft: fine-tuning on them.")
    win_rate: WinRateConfig = Field(
        WinRateConfig(baseline="start"), description="Win rates of every arm against the start."
    )

    @model_validator(mode="after")
    def _possible(self):
        if not (self.labels or self.direct or self.human or self.teacher_sft):
            raise ValueError("there is no arm to run; write one of labels, direct, human, teacher_sft as true")
        if (self.labels or self.direct or self.human) and not any(c.kind == "model" for c in self.rl.rewards):
            raise ValueError(
                "rl.rewards has no component of kind model, which stands for the judge's opinion; write for example"
                " rl.rewards='[{name: reward, kind: model}]'"
            )
        if self.teacher_sft and (self.judge == "self" or self.label.endpoint):
            raise ValueError(
                "teacher_sft imitates the judge's own answers; write judge=MODEL_REF, a model of this machine other"
                " than the start, or teacher_sft=false"
            )
        if self.label.endpoint and self.judge != "self":
            raise ValueError(
                "label.endpoint asks a server, so that `judge` would not be asked; leave one of them out (final_judge"
                " decides the win rates)"
            )
        if self.objectives and self.principles:
            raise ValueError("each of the objectives has principles of its own; leave `principles` out, or objectives")
        if (
            self.train_reward_model.objective in ("bt", "margin")
            and self.label.labels == "soft"
            and not self.train_reward_model.use_soft_labels
        ):
            raise ValueError(
                "train_reward_model would not read the judge's probabilities; write"
                " train_reward_model.objective=soft_label, or label.labels=hard"
            )
        return self


@recipe(Config)
def rlaif(run: Run, config: Config) -> dict:
    """RL from AI feedback: pairs labelled by a judge, a reward model on them, RL, and win rates against the start; with
    the arms d-RLAIF, RLHF and teacher-SFT.
    """
    source = Source(run, config)
    prompts = ingest(run, "prompts", source("prompts"), config)
    pairs = ingest(run, "pairs", source("pairs"), config) if config.human else None
    start = starting_policy(run, source, config)
    judge = None if config.label.endpoint else start if config.judge == "self" else config.judge
    models, scorer = {"start": start}, None

    if config.labels:
        scorer = ai_reward_model(run, source, config, start, judge, prompts)
        models["rlaif"] = optimised(run, source, config, "rlaif", start, prompts, scorer, config.rl)
    if config.direct:
        models["direct"] = optimised(run, source, config, "direct", start, prompts, judge, directly(config))
    if config.human:
        human, _ = trained_scorer(
            run,
            source,
            config.model_copy(
                update={"train_reward_model": config.train_reward_model.model_copy(update={"objective": "auto"})}
            ),
            start,
            pairs,
        )
        models["human"] = optimised(run, source, config, "human", start, prompts, human, config.rl)
        scorer = scorer or human
    if config.teacher_sft:
        taught = run("rejection", "teach", model=judge, prompts=prompts, config=config.teach)["selected"]
        models["teacher_sft"] = run(
            "sft", "imitate", model=start, data=taught, config=config.imitate, name_as="teacher-sft"
        )["model"]

    evaluations, given = evaluated(run, source, config, models, prompts, scorer)
    final, section = judge_of(
        config.final_judge or judge, config.win_rate, None if config.final_judge else config.label
    )
    rates = compared(
        run, {name: outputs["samples"] for name, outputs in evaluations.items()}, final, section, prompts=prompts
    )
    return {**decided(run, config, models, evaluations, given), "win_rates": rates}


def ai_reward_model(run: Run, source: Source, config: Config, start: str, judge: str | None, prompts: str) -> str:
    """A reward model on the judge's labels of two answers per prompt; with objectives, one of each, combined."""
    sampled = run(
        "rejection",
        "sample",
        model=start,
        prompts=prompts,
        config=config.sample,
        **reward_inputs(source, config, config.sample.rewards, start),
    )["candidates"]

    def learned(suffix: str, principles: str | None) -> str:
        labelled = run(
            "judge", f"label{suffix}", data=sampled, judge=judge, principles=principles, config=config.label
        )["data"]
        return run(
            "reward_model",
            f"reward_model{suffix}",
            model=start,
            data=labelled,
            config=config.train_reward_model,
            name_as=f"ai-reward{suffix.replace('_', '-')}",
        )["model"]

    if not config.objectives:
        return learned("", config.principles)
    names = list(config.objectives)
    members = dict(
        zip(names, run.together([lambda name=name: learned(f"_{name}", config.objectives[name]) for name in names]))
    )
    return run(
        "reward_combine",
        "combine",
        members=members,
        anchor=sampled if config.combine.combine == "weighted" else None,
        config=config.combine,
        name_as="ai-reward",
    )["model"]


def directly(config: Config) -> RLConfig:
    """RL's settings with the judge's score in the place of the reward model's."""
    asked = {name: getattr(config.label, name) for name in SERVER_SETTINGS}
    rewards = [
        (
            RewardComponent(name=c.name, kind="judge", weight=c.weight, judge_mode="score", **asked)
            if c.kind == "model"
            else c
        )
        for c in config.rl.rewards
    ]
    return config.rl.model_copy(update={"rewards": rewards})


def optimised(
    run: Run, source: Source, config: Config, arm: str, start: str, prompts: str, scorer: str | None, settings: RLConfig
) -> str:
    """The policy of an arm: RL from the start, against a reward model or (in the arm direct) the judge."""
    given = {
        name: ref for name, ref in reward_inputs(source, config, settings.rewards, start).items() if name != "judge"
    }
    role = "judge" if arm == "direct" else "reward_model"
    return run(
        "rl",
        f"rl_{arm}",
        model=start,
        data=prompts,
        **{role: scorer},
        **given,
        config=settings,
        name_as=arm.replace("_", "-"),
    )["model"]
