"""r1: a reasoning model in four stages, and smaller ones distilled from it (recipe.r1; DeepSeek-R1, Guo et al. 2025).

    posttrain run r1 --set model=BASE --set data.demonstrations=cold_start.jsonl --set data.prompts=problems.jsonl --set
    data.pairs=helpful.jsonl \\
        --set data.safety_pairs=harmless.jsonl --set data.general=chats.jsonl --set students='{small: BASE}'
    posttrain run r1 --preset demo         # the embedded world, in minutes on two CPU cores

The defaults are the published settings. Steps:

    zero, sample_zero        zero_branch=true: RL from the base without SFT (R1-Zero), whose right and readable answers join the cold start
    cold_start               SFT of the base on few, long, readable solutions
    reason_1 .. reason_n     RL on problems with verifiers: right, and in one language; in consecutive parts, each of which leaves a checkpoint
    sample_1 .. sample_n     answers of every checkpoint; `select` keeps right ones, `readable` those without mixed languages, code blocks and long paragraphs
    mix, sft                 three of these to one of general data, learned by the BASE again
    rl                       RL on reasoning and general prompts: verifiers for the one, for the other a helpfulness model that sees the final answer only and a
                             harmlessness model that sees all of the output
    distil_NAME              SFT of smaller bases on the same mixture; student_rl=true: beside it RL of that base, the control
    evaluate_*, promote

What is not given is left out: without data.pairs and data.general the mixture is reasoning alone. `data.general` and
`data.general_prompts` default to the chosen answers and the prompts of data.pairs. A judge may decide where no rule
can: write sample.rewards with `tier: rule` and, judge_mode: reference, `tier: judge`. The embedded world knows no harm:
there both models learn from the same comparisons.
"""

from __future__ import annotations

from typing import Optional

from pydantic import Field, model_validator

from flows.recipe import Run, recipe
from flows.start import Data as WorldData
from flows.start import RewardSources, WorldRecipeConfig, pretrained, reward_inputs
from flows.steps import HELD_OUT, Source, evaluate_all, ingest, promote
from stages.base_model import Config as BaseModelConfig
from stages.evaluate import Config as EvaluateConfig
from stages.ingest import Config as IngestConfig
from stages.mix import Config as MixConfig
from stages.promote import Config as GateConfig
from stages.rejection import Config as RejectionConfig, selecting
from stages.reward_model import Config as RewardModelConfig
from stages.reward.components import RewardComponent
from stages.rl import Config as RLConfig
from stages.sft import Config as SFTConfig

#: Reward components that a model of this recipe stands behind, by the stage input that holds it.
HELPFUL, HARMLESS = "reward_model", "gold"
#: G, temperature, KL and length of R1-Zero, whose reference follows every 400 steps; batches of 512 problems, 16 steps
#: on each.
GRPO = {
    "preset": "grpo",
    "learning_rate": 3e-6,
    "beta": 0.001,
    "num_generations": 16,
    "temperature": 1.0,
    "max_completion_length": 32768,
    "prompts_per_step": 512,
    "num_minibatches": 16,
    "ref_mode": "refresh",
    "ref_sync_steps": 400,
    "ref_sync_alpha": 1.0,
}


def accurate(*more: RewardComponent) -> list[RewardComponent]:
    return [RewardComponent(name="accuracy", kind="verifier"), *more]


def of_all_scenarios() -> list[RewardComponent]:
    """Rules for reasoning; for general prompts helpfulness of the final answer and harmlessness of the whole output
    (reward.domain_route, reward.view).
    """
    return [
        RewardComponent(name="accuracy", kind="verifier", domains=["reasoning"]),
        RewardComponent(name="helpful", kind="model", input=HELPFUL, view="answer_only", domains=["general"]),
        RewardComponent(name="harmless", kind="model", input=HARMLESS, view="full", domains=["general"]),
    ]


class Data(WorldData):
    demonstrations: Optional[str] = Field(
        None,
        title="Cold start",
        description="Long, readable solutions for the cold start (thousands): ref, file, directory or hub id.",
    )
    prompts: Optional[str] = Field(
        None,
        title="Problems",
        description="Problems of maths, code and logic with answers or tests: ref, file, directory or hub id.",
    )
    pairs: Optional[str] = Field(
        None,
        title="Helpfulness pairs",
        description="Preference pairs of the helpfulness model: ref, file, directory or hub id.",
    )
    safety_pairs: Optional[str] = Field(
        None,
        title="Harmlessness pairs",
        description="Preference pairs of the harmlessness model; empty: no such model.",
    )
    general: Optional[str] = Field(
        None,
        title="General data",
        description=(
            "Demonstrations of writing, questions, translation and the like (200k); empty: the chosen answers of the"
            " pairs."
        ),
    )
    general_prompts: Optional[str] = Field(
        None,
        title="General prompts",
        description="Prompts of all other scenarios for the last RL; empty: those of the pairs.",
    )


class Config(RewardSources, WorldRecipeConfig):
    data: Data = Field(Data(), description="Your own data; empty: the embedded world.")
    helpful_model: Optional[str] = Field(
        None,
        title="Helpfulness model",
        description="Reward model of the final answer (ref); empty: trained on data.pairs.",
    )
    harmless_model: Optional[str] = Field(
        None,
        title="Harmlessness model",
        description="Reward model of the whole output (ref); empty: trained on data.safety_pairs.",
    )
    students: dict[str, str] = Field(
        default_factory=dict,
        description=(
            "Smaller base models that learn from the same mixture, with any tokenizer: {name: ref, directory or hub"
            " id}; empty, on the embedded world: one of the section `student`."
        ),
    )
    zero_branch: bool = Field(
        False, description="RL from the base first (R1-Zero); its right and readable answers join the cold start."
    )
    checkpoints: int = Field(
        3,
        ge=1,
        description=(
            "Parts of the reasoning RL, each of which leaves a checkpoint that is sampled (the report: several; ours"
            " 3). Each starts with a new optimizer and reference."
        ),
    )
    student_rl: bool = Field(
        False, description="Control of the distillation: RL of every student's own base, with the settings of `reason`."
    )
    ingest_general: IngestConfig = Field(
        IngestConfig(kind="demonstrations/1", **HELD_OUT),
        description="Checks and splits of the general demonstrations.",
    )
    ingest_general_prompts: IngestConfig = Field(
        IngestConfig(kind="prompts/1", **HELD_OUT), description="Checks and splits of the general prompts."
    )
    ingest_safety_pairs: IngestConfig = Field(
        IngestConfig(kind="pairs/1", **HELD_OUT), description="Checks and splits of the harmlessness pairs."
    )
    zero: RLConfig = Field(
        RLConfig(
            **GRPO,
            prompt_template="think_answer",
            max_steps=10_400,
            context_schedule=[(0, 32768), (8200, 65536)],
            rewards=accurate(RewardComponent(name="format", kind="format", weight=1.0)),
        ),
        description="zero_branch: RL from the base, right answers in the asked form.",
    )
    sample_zero: RejectionConfig = Field(
        RejectionConfig(
            prompt_template="think_answer",
            select="all_correct",
            max_per_prompt=1,
            num_generations=4,
            max_completion_length=65536,
            allow_empty=True,
            rewards=accurate(),
        ),
        description="zero_branch: its right answers.",
    )
    cold_start: SFTConfig = Field(
        SFTConfig(num_train_epochs=2, max_length=32768), description="Fine-tuning of the base on the cold start."
    )
    reason: RLConfig = Field(
        RLConfig(
            **GRPO,
            max_steps=1000,
            rewards=accurate(RewardComponent(name="language", kind="language", weight=1.0, view="think_only")),
        ),
        description=(
            "RL on problems: accuracy plus language consistency of the thought, a plain sum; add {kind: format} for the"
            " form. max_steps: of all parts together (the report: near convergence; ours 1000)."
        ),
    )
    sample: RejectionConfig = Field(
        RejectionConfig(select="all_correct", num_generations=16, max_completion_length=32768, rewards=accurate()),
        description="Answers of every checkpoint, and which of all of them are kept: right ones.",
    )
    readable: MixConfig = Field(
        MixConfig(drop_mixed_languages=True, drop_code_blocks=True, max_paragraph_chars=2000),
        description="What is dropped as unreadable from the sampled answers (the length of a long paragraph is ours).",
    )
    mix: MixConfig = Field(
        MixConfig(weights={"reasoning": 3, "general": 1}), description="Shares of the mixture (600k and 200k)."
    )
    sft: SFTConfig = Field(
        SFTConfig(num_train_epochs=2, max_length=32768), description="Fine-tuning of the base, again, on the mixture."
    )
    train_reward_model: RewardModelConfig = Field(
        RewardModelConfig(), description="Helpfulness and harmlessness model."
    )
    rl: RLConfig = Field(
        RLConfig(**{**GRPO, "max_steps": 1700}, rewards=of_all_scenarios()),
        description=(
            "RL of all scenarios (1700 steps are the report's); components whose model is not there are left out."
        ),
    )
    distil: SFTConfig = Field(
        SFTConfig(num_train_epochs=2, max_length=32768), description="Fine-tuning of the students on the mixture."
    )
    student: BaseModelConfig = Field(
        BaseModelConfig(hidden_size=128, num_attention_heads=4, num_key_value_heads=4, intermediate_size=352),
        description="On the embedded world: shape of the smaller base model.",
    )
    evaluate: EvaluateConfig = Field(
        EvaluateConfig(max_completion_length=32768),
        description="Evaluation on held-out problems, the same for every model.",
    )
    promote: GateConfig = Field(
        GateConfig(prompts="confirmation"),
        description="The promotion gate; the best model is chosen on the other half of the prompts.",
    )
    promote_as: str = Field("reasoner", description="Registered name whose champion the best model challenges.")

    @model_validator(mode="after")
    def _possible(self):
        if self.reason.max_steps < self.checkpoints:
            raise ValueError(
                f"reason.max_steps={self.reason.max_steps} cannot be cut into checkpoints={self.checkpoints} parts;"
                " write fewer checkpoints"
            )
        if self.data.general_prompts and not (
            self.data.pairs or self.helpful_model or self.harmless_model or self.data.safety_pairs
        ):
            raise ValueError(
                "data.general_prompts are scored by reward models; give data.pairs or helpful_model=REF"
                " (data.safety_pairs or harmless_model=REF), or leave them out"
            )
        return self

    @property
    def world_only(self) -> bool:
        """Whether all data come from the embedded world."""
        return not any(self.data.model_dump().values())


@recipe(Config)
def r1(run: Run, config: Config) -> dict:
    """DeepSeek-R1: cold start, reasoning RL, rejection sampling, SFT of the base again, RL of all scenarios,
    distillation into smaller bases.
    """
    source = Source(run, config)
    demonstrations = ingest(run, "demonstrations", source("demonstrations"), config)
    prompts = ingest(run, "prompts", source("prompts"), config)
    data = ingested(run, source, config)
    base = pretrained(run, source, config, demonstrations)

    cold = run(
        "sft",
        "cold_start",
        model=base,
        data=with_zero(run, source, config, base, demonstrations, prompts),
        config=config.cold_start,
        name_as="cold-start",
    )["model"]
    checkpoints = reasoning(run, source, config, cold, prompts)
    mixture = learnable(run, source, config, checkpoints, prompts, data.get("general"))
    instructed = run("sft", model=base, data=mixture, config=config.sft, name_as="sft")["model"]
    reinforced, judge = all_scenarios(run, source, config, instructed, prompts, data)

    models = {
        "base": base,
        "cold_start": cold,
        "reason": checkpoints[-1],
        "sft": instructed,
        "rl": reinforced,
        **distilled(run, source, config, demonstrations, mixture, prompts),
    }
    held_out = {
        "prompts": prompts,
        "reward_model": judge,
        **reward_inputs(source, config, config.evaluate.rewards, instructed),
    }
    evaluations = evaluate_all(run, models, config.evaluate, select_by=config.promote.metric, **held_out)
    decision = promote(
        run, models, evaluations, config.promote, config.evaluate, baseline="base", name=config.promote_as, **held_out
    )
    return {"models": models, "scores": evaluations.table(), "best": evaluations.best, "decision": decision}


def with_zero(run: Run, source: Source, config: Config, base: str, demonstrations: str, prompts: str) -> str:
    """The cold start, with the readable right answers of the zero branch where there is one."""
    if not config.zero_branch:
        return demonstrations
    zero = run(
        "rl",
        "zero",
        model=base,
        data=prompts,
        config=config.zero,
        name_as="zero",
        **reward_inputs(source, config, config.zero.rewards, base),
    )["model"]
    found = run(
        "rejection",
        "sample_zero",
        model=zero,
        prompts=prompts,
        config=config.sample_zero,
        **reward_inputs(source, config, config.sample_zero.rewards, zero),
    )
    return run(
        "mix", "cold_start_data", data={"given": demonstrations, "zero": found["selected"]}, config=config.readable
    )["data"]


def reasoning(run: Run, source: Source, config: Config, policy: str, prompts: str) -> list[str]:
    """Checkpoints of the reasoning RL: consecutive parts of it, equally long, the last one longer."""
    from stages.selection import refresh_intervals

    found = []
    for number, steps in enumerate(refresh_intervals(config.reason.max_steps, config.checkpoints), 1):
        policy = run(
            "rl",
            f"reason_{number}",
            model=policy,
            data=prompts,
            config=config.reason.model_copy(update={"max_steps": steps}),
            seed=run.seed + number,
            name_as=f"reason-{number}",
            **reward_inputs(source, config, config.reason.rewards, policy),
        )["model"]
        found.append(policy)
    return found


def learnable(
    run: Run, source: Source, config: Config, checkpoints: list[str], prompts: str, general: str | None
) -> str:
    """Right and readable answers of all checkpoints, mixed with general data."""

    def sampled(number: int, policy: str) -> str:
        return run(
            "rejection",
            f"sample_{number}",
            model=policy,
            prompts=prompts,
            config=config.sample.model_copy(update={"allow_empty": True}),
            seed=run.seed + number,
            **reward_inputs(source, config, config.sample.rewards, policy),
        )["candidates"]

    numbered = list(enumerate(checkpoints, 1))
    candidates = run.together(
        [lambda number=number, policy=policy: sampled(number, policy) for number, policy in numbered]
    )
    right = run(
        "rejection",
        "select",
        model=checkpoints[-1],
        prompts=prompts,
        candidates={f"checkpoint_{number}": found for (number, _), found in zip(numbered, candidates)},
        config=selecting(config.sample),
    )["selected"]
    readable = run("mix", "readable", data={"reasoning": right}, config=config.readable)["data"]
    if general is None:
        return readable
    return run("mix", data={"reasoning": readable, "general": general}, config=config.mix)["data"]


def pairs_of(source: Source, config: Config) -> str | None:
    """The helpfulness pairs; None where data of your own has none."""
    return config.data.pairs or (source("pairs") if config.world_only else None)


def ingested(run: Run, source: Source, config: Config) -> dict[str, str]:
    """All data that later stages learn from, by name, checked before anything is trained: general data and prompts, and
    the pairs of reward models that the last RL asks and that are not given.
    """
    pairs = pairs_of(source, config)
    unsafe = config.data.safety_pairs or (pairs if config.world_only else None)
    asked = {component.input for component in config.rl.rewards if component.kind == "model"}
    scored = (HELPFUL in asked and (config.helpful_model or pairs)) or (
        HARMLESS in asked and (config.harmless_model or unsafe)
    )
    wanted = {
        "general": config.data.general or pairs,
        "pairs": pairs if HELPFUL in asked and not config.helpful_model else None,
        "safety_pairs": unsafe if HARMLESS in asked and not config.harmless_model else None,
        "general_prompts": (config.data.general_prompts or pairs) if scored else None,
    }
    return {name: ingest(run, name, path, config) for name, path in wanted.items() if path}


def all_scenarios(
    run: Run, source: Source, config: Config, policy: str, prompts: str, data: dict[str, str]
) -> tuple[str, str | None]:
    """(policy after RL on reasoning and general prompts, the helpfulness model): rewards are routed by domain; those
    whose model is not there are left out.
    """
    asked = {component.input for component in config.rl.rewards if component.kind == "model"}
    scorers = run.together(
        [
            lambda: scorer_of(
                run, config, "helpful", HELPFUL in asked and config.helpful_model, data.get("pairs"), policy
            ),
            lambda: scorer_of(
                run,
                config,
                "harmless",
                HARMLESS in asked and config.harmless_model,
                data.get("safety_pairs"),
                policy,
            ),
        ]
    )
    given = {name: ref for name, ref in zip((HELPFUL, HARMLESS), scorers) if ref}
    rewards = [component for component in config.rl.rewards if component.kind != "model" or component.input in given]
    general = data.get("general_prompts")
    sources = {"reasoning": prompts} | ({"general": general} if general else {})
    scenarios = run("mix", "scenarios", data=sources, config=MixConfig(label_domains=True))["data"]
    reinforced = run(
        "rl",
        model=policy,
        data=scenarios,
        config=config.rl.model_copy(update={"rewards": rewards}),
        name_as="r1",
        **given,
        **reward_inputs(source, config, rewards, policy),
    )["model"]
    return reinforced, given.get(HELPFUL)


def scorer_of(run: Run, config: Config, name: str, given: str | None, pairs: str | None, policy: str) -> str | None:
    """A reward model: the given one, or trained on the pairs; None where there is neither."""
    if given or not pairs:
        return given or None
    return run(
        "reward_model",
        f"{name}_model",
        model=policy,
        data=pairs,
        config=config.train_reward_model,
        seed=run.seed + (name == "harmless"),
        name_as=name,
    )["model"]


def distilled(
    run: Run, source: Source, config: Config, demonstrations: str, mixture: str, prompts: str
) -> dict[str, str]:
    """{name: model} of the students, and of their controls."""
    students = config.students
    if not students and config.model is None:
        blank = run(
            "base_model", "student_blank", text=source("text"), conversations=demonstrations, config=config.student
        )["model"]
        students = {
            "student": run(
                "sft",
                "student_pretraining",
                model=blank,
                data=source("text"),
                config=config.pretraining,
                name_as="student-base",
            )["model"]
        }

    def taught(name: str, small: str) -> dict[str, str]:
        found = {
            f"distilled_{name}": run(
                "sft", f"distil_{name}", model=small, data=mixture, config=config.distil, name_as=f"distilled-{name}"
            )["model"]
        }
        if config.student_rl:
            found[f"rl_{name}"] = run(
                "rl",
                f"rl_{name}",
                model=small,
                data=prompts,
                config=config.reason,
                name_as=f"rl-{name}",
                **reward_inputs(source, config, config.reason.rewards, small),
            )["model"]
        return found

    parts = run.together([lambda name=name, small=small: taught(name, small) for name, small in students.items()])
    return {name: model for part in parts for name, model in part.items()}
