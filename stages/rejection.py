"""rejection: sample N completions per prompt, score them, keep the best (rejection sampling, best-of-N).

Writes the whole M x N reward matrix in long form (``candidates/1``) and the selected rows as demonstrations for an
``sft`` stage (catalogue ``rs.sft``, ``rs.select``, ``rs.best_of_n``). Given ``candidates`` of an earlier run, only the
selection is repeated, with ``rescore`` behind other rewards: those of a newer reward model, or of whoever labels the
best of many. Completions cut by the length limit, empty and unscorable ones are never selected. A killed run continues
at the last complete block of prompts and ends with the same bytes.

``rationalise`` asks again, with the answer as a hint, where no completion was right, and keeps right ones without the
hint (``rs.star``). ``in_context`` samples behind the demonstrations that a component with kind=icdpo retrieves,
``system`` and the input ``traits`` behind a system message (``synth.character``); rows are kept without them
(``rs.icdpo``).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from stages.candidates.contexts import OTHER_CONTEXTS
from stages.reward.components import JUDGE_INPUTS, REWARD_INPUTS, WITHOUT_VERDICT, FixedComponent, RewardComponent
from stages.reward.rewards import check_inputs
from stages.settings import (
    PARTED_TRAINING,
    CHANGES_OF_LOGITS,
    PROMPT_TEMPLATE,
    ChatConfig,
    PromptTemplate,
    ReadWhen,
    SamplingConfig,
    refuse_unread,
    refuse_unread_in,
)
from stages.spec import ConfigError, InputSpec, OutputSpec, StageSpec


class Config(SamplingConfig, ChatConfig):
    READ_WHEN: ClassVar[ReadWhen] = (
        (
            ("k",),
            lambda c: c.select in ("top_k_per_prompt", "top_k_overall", "random_k_overall"),
            "this select takes no number of rows; write select=top_k_per_prompt or top_k_overall",
        ),
        (
            ("max_per_prompt",),
            lambda c: c.select in ("top_per_prompt", "top_k_overall", "threshold", "all_correct"),
            (
                "this select has no such cap; write k with select=top_k_per_prompt, or select=top_k_overall, threshold"
                " or all_correct"
            ),
        ),
        (
            ("hint",),
            lambda c: c.rationalise > 0,
            "no prompt is asked again with a hint (rationalise=0); write rationalise=4",
        ),
    )

    num_generations: int = Field(16, ge=1, description="Completions per prompt, N (texts 10-30; ours 16).")
    min_generations: int | None = Field(
        None,
        ge=1,
        title="Min generations",
        description=(
            "Completions per prompt are drawn, prompt by prompt, between this and num_generations (InstructGPT "
            "ranks 4 to 9 answers); empty: num_generations of each."
        ),
    )
    rewards: list[FixedComponent] = Field(
        default_factory=lambda: [RewardComponent(name="verifier", kind="verifier")],
        description="Named, weighted reward components.",
    )
    rescore: bool = Field(
        False,
        description="candidates: score them with these rewards instead of keeping the rewards that they came with.",
    )
    rescore_best: int | None = Field(
        None,
        ge=1,
        title="Rescore best",
        description=(
            "rescore: of each prompt only so many candidates, the best by the rewards that they came with; empty: all."
        ),
    )
    select: Literal[
        "top_per_prompt",
        "top_k_per_prompt",
        "top_k_overall",
        "threshold",
        "all_correct",
        "random_per_prompt",
        "random_k_overall",
    ] = Field("top_per_prompt", description="Selector on the reward matrix (rs.select).")
    k: int = Field(
        1, ge=1, description="Rows kept per prompt (top_k_per_prompt) or in all (top_k_overall, random_k_overall)."
    )
    threshold: float | None = Field(
        None,
        title="Threshold",
        description="Keep rewards strictly above this (select=threshold; as a floor otherwise).",
    )
    threshold_mode: Literal["absolute", "quantile"] = Field(
        "absolute", description="What threshold is: a reward, or the share of valid candidates at or below it."
    )
    max_per_prompt: int | None = Field(
        None,
        ge=1,
        title="Max per prompt",
        description=(
            "Rows kept per prompt at most (ReST-EM 10): with "
            "select=all_correct and threshold the first, with top_k_overall the best."
        ),
    )
    allow_empty: bool = Field(False, description="Selecting nothing is a result and no error (ReST stops there).")
    dedupe: bool = Field(True, description="Drop identical texts of one prompt before selecting (the first is kept).")
    mixture_coef: float = Field(
        0.0,
        ge=0,
        le=1,
        title="Mixture coefficient",
        description="Sample from policy^(1-c) reference^c, token by token (IPO-MD 0.25); 0 = the policy alone.",
    )
    difficulty_band: list[float] | None = Field(
        None,
        title="Difficulty band",
        description=(
            "Also write the prompts whose share of right completions is in "
            "this range, bounds "
            "included, as output `banded` (rs.difficulty_band: 0.2, 0.8); empty: not."
        ),
    )
    rationalise: int = Field(
        0,
        ge=0,
        description=(
            "Completions sampled with the answer as a hint for each prompt that no completion solved; right ones join "
            "the candidates (STaR); 0 = off."
        ),
    )
    hint: str = Field(
        "{question}\n\nHint: the answer is {answer}. Explain how to get there, as if you did not know it, and end"
        " with it.",
        description=(
            "rationalise: what the last message says then, with {question} and {answer}. Training rows do not have it."
        ),
    )
    in_context: bool = Field(
        False, description="Sample with the demonstrations of the component kind=icdpo in the prompt (rs.icdpo)."
    )
    system: str = Field(
        "",
        description=(
            "System message in front of every prompt while sampling; rows are kept without it. With the input traits,"
            " {trait} in it is the text of the prompt's trait; empty: a sentence that asks for answers of this"
            " character."
        ),
    )
    trait_of: Literal["category", "drawn"] = Field(
        "category",
        description=(
            "traits: a prompt's is the one that its column category names, or one drawn for it (of those of kind trait,"
            " or of all where none is), a principle in the system message that varies the answers (UltraFeedback)."
        ),
    )
    prompt_template: PromptTemplate = Field("chat", description=PROMPT_TEMPLATE)
    split: str = Field("train", description="Prompt split to sample from; candidates and selected rows stay in it.")
    validation_fraction: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "Share of the selected training prompts whose rows become the validation split, for sft to judge itself by."
        ),
    )
    max_prompts: int | None = Field(None, ge=1, title="Max prompts", description="Prompts used at most.")
    prompt_part: tuple[int, int] | None = Field(
        None,
        title="Prompt part",
        description=(
            "[k, n]: of n equal parts of the prompts, every n-th one each, only the k-th, counted from 1 (SPPO: one "
            "part per round); empty: all."
        ),
    )
    prompt_offset: int = Field(
        0, ge=0, description="Prompts passed over before the first one used, in a circle: other prompts in each round."
    )
    max_prompt_length: int = Field(
        1024, ge=1, description="Prompt tokens at most; longer prompts are left out and counted."
    )
    block: int = Field(64, ge=1, description="Prompts generated and scored as one resumable unit.")

    @model_validator(mode="after")
    def _possible(self):
        refuse_unread(self, (*self.READ_WHEN, *PARTED_TRAINING))
        if self.min_generations is not None and self.min_generations > self.num_generations:
            raise ValueError(
                f"min_generations={self.min_generations} is above num_generations={self.num_generations}; write the"
                " smaller number of completions there"
            )
        if self.rescore_best is not None and not self.rescore:
            raise ValueError("rescore_best says which candidates are scored anew; write rescore=true with it")
        if self.difficulty_band is not None and not (
            len(self.difficulty_band) == 2 and 0 <= self.difficulty_band[0] <= self.difficulty_band[1] <= 1
        ):
            raise ValueError(
                f"difficulty_band={self.difficulty_band} is no range of pass rates; write for example"
                " difficulty_band=[0.2,0.8]"
            )
        if self.prompt_part is not None and not 1 <= self.prompt_part[0] <= self.prompt_part[1]:
            raise ValueError(
                f"prompt_part={list(self.prompt_part)} is no part of a whole; write for example prompt_part=[1,3], the"
                " first of three"
            )
        if self.rationalise and not any(c.kind in ("verifier", "code", "python") for c in self.rewards):
            raise ValueError(
                "rationalise asks again where no completion was right, which nothing here can say; add a reward"
                " component of kind verifier, code or python"
            )
        if self.rationalise and not ("{question}" in self.hint and "{answer}" in self.hint):
            raise ValueError("hint shows question and answer; write both {question} and {answer} in it")
        if self.prompt_template != "chat" and (
            other := next((name for name in ("system", "in_context", "rationalise") if getattr(self, name)), None)
        ):
            raise ValueError(
                f"{other} shows prompts by the chat template; write prompt_template=chat, or leave {other} out"
            )
        if self.system and (other := next((name for name in OTHER_CONTEXTS if getattr(self, name)), None)):
            raise ValueError(f"system and {other} both say what answers are sampled from; write one of them")
        if self.in_context and not any(c.kind == "icdpo" for c in self.rewards):
            raise ValueError(
                "in_context samples behind the demonstrations of a component of kind icdpo; add one (weight=0 if it"
                " should not count), or write in_context=false"
            )
        return self


#: What is read while sampling, and what while scoring: not where the answers, or their rewards too, are those of the
#: input `candidates`.
SAMPLING = (
    *SamplingConfig.model_fields,
    "num_generations",
    "min_generations",
    "mixture_coef",
    "rationalise",
    "hint",
    "in_context",
    "system",
    "trait_of",
    "split",
    "max_prompts",
    "prompt_part",
    "prompt_offset",
    "max_prompt_length",
)
SCORING = ("prompt_template", "block")

#: Settings that are read with some inputs only, as ``Config.READ_WHEN``: of the stage.
READ_OF_INPUTS: ReadWhen = (
    (
        SAMPLING,
        lambda s: not s.many("candidates"),
        "the answers of the input candidates are taken as they are; leave candidates out to sample",
    ),
    (
        SCORING,
        lambda s: not s.many("candidates") or s.config.rescore,
        "the rewards of the input candidates are taken as they are; write rescore=true",
    ),
    (("trait_of",), lambda s: s.has("traits"), "no prompt has a trait without the input traits; give it"),
    (("threshold_mode",), lambda s: s.config.threshold is not None, "there is no threshold; write threshold=0.9"),
    (
        ("max_per_prompt",),
        lambda s: s.config.select != "top_per_prompt",
        "select=top_per_prompt keeps one; write select=threshold, all_correct or top_k_overall",
    ),
)


def selecting(config: Config, **update) -> Config:
    """The settings, changed by ``update``, for answers that are there (the input `candidates`): what sampling and,
    without ``rescore``, scoring would read is as in a fresh configuration.
    """
    changed = config.model_copy(update=update)
    unread = (*SAMPLING, *(() if changed.rescore else SCORING))
    return changed.model_copy(
        update={
            name: field.get_default(call_default_factory=True)
            for name in unread
            if (field := Config.model_fields[name])
        }
    )


def check(config: Config, given: Collection[str]) -> None:
    """Refuse settings that need inputs which are not there, or have no use for those that are."""
    stored = any(name.split(".")[0] == "candidates" for name in given)
    if config.rescore and not stored:
        raise ConfigError(
            "rejection: rescore scores candidates of earlier runs; give them as candidates.LABEL=REF, or write"
            " rescore=false"
        )
    if config.rescore and any(component.kind == "rubric" for component in config.rewards):
        raise ConfigError(
            "rejection: a rubric is scored anew by stage rescore; give its output as candidates, or leave"
            " kind=rubric out"
        )
    if config.chat_template_given and stored and not config.rescore:
        raise ConfigError(
            "rejection: candidates are selected as they are, and no prompt is shown; leave chat_template and"
            " chat_template_kwargs out"
        )
    if config.select == "threshold" and config.threshold is None:
        raise ConfigError("rejection: select=threshold needs threshold; write for example threshold=0.5")
    if config.threshold is not None and config.threshold_mode == "quantile" and not 0.0 <= config.threshold < 1.0:
        raise ConfigError(
            f"rejection: threshold={config.threshold} is no share; with threshold_mode=quantile write a value in [0,"
            " 1), for example 0.9"
        )
    asks = "select=all_correct" if config.select == "all_correct" else "difficulty_band" * bool(config.difficulty_band)
    if asks and (config.rescore or not stored) and all(c.kind in WITHOUT_VERDICT for c in config.rewards):
        raise ConfigError(
            f"rejection: {asks} goes by which completions are right, which no reward here says; add a component of kind"
            f" verifier, code or python (weight=0 if it should not count), or leave {asks} out"
        )
    if config.temperature == 0 and config.num_generations > 1 and not stored:
        raise ConfigError(
            f"rejection: temperature=0 makes all num_generations={config.num_generations} completions of a prompt equal;"
            " write num_generations=1, or a temperature such as 1.0"
        )
    if config.mixture_coef and not stored:
        if config.engine != "builtin":
            raise ConfigError(
                f"rejection: mixture_coef={config.mixture_coef} mixes the distributions of two models token by token,"
                f" which engine={config.engine} cannot do; write engine=builtin, or mixture_coef=0"
            )
        for name in ("stop_strings", *CHANGES_OF_LOGITS):
            if getattr(config, name) != Config.model_fields[name].get_default(call_default_factory=True):
                raise ConfigError(
                    f"rejection: mixture_coef={config.mixture_coef} samples without penalties, bans and stop strings;"
                    f" leave {name} out, or write mixture_coef=0"
                )
    if config.rescore or not stored:
        check_inputs(config.rewards, given)


SPEC = StageSpec(
    name="rejection",
    config=Config,
    gpu=True,
    check=check,
    inputs={
        "model": InputSpec("model", use="words", doc="Policy that samples."),
        "prompts": InputSpec("dataset", kinds=("prompts/1",), doc="Prompts, with answers for verifiers."),
        "reference": InputSpec(
            "model", required=False, use="words", doc="The other part of the mixture (mixture_coef)."
        ),
        "reward_model": InputSpec("model", required=False, use="scores", doc="Scorer of components with kind=model."),
        **JUDGE_INPUTS,
        **REWARD_INPUTS,
        "traits": InputSpec(
            "dataset",
            kinds=("principles/1",),
            required=False,
            doc=(
                "Traits of a character: each prompt is answered behind the text of the one that its column category"
                " names, which stage write_prompts writes, or of one that is drawn (trait_of)."
            ),
        ),
        "candidates": InputSpec(
            "dataset",
            kinds=("candidates/1",),
            required=False,
            many=True,
            doc=(
                "Scored candidates of earlier runs: select again without generating. Those of several models,"
                " checkpoints or settings (candidates.LABEL) are joined by prompt (rs.mix)."
            ),
        ),
    },
    outputs={
        "candidates": OutputSpec("dataset"),
        "selected": OutputSpec("dataset"),
        "banded": OutputSpec(
            "dataset", required=False, doc="prompts/1: the prompts whose pass rate is in difficulty_band."
        ),
        "rubric_scores": OutputSpec(
            "dataset",
            required=False,
            doc="rubric_scores/1: every item of every candidate, with critique and reasoning.",
        ),
        "rubric_confidence": OutputSpec(
            "dataset", required=False, doc="rubric_confidence/1: mean confidence per rubric item."
        ),
    },
)


def run(stage):
    import numpy as np

    from stages.candidates.report import report
    from stages.candidates.sampling import generate
    from stages.candidates.selecting import drop_duplicates, select, write_banded, write_selected
    from stages.candidates.stored import joined, rescore, warn_of_rewards
    from storage.datasets import open_dataset

    config = stage.config
    refuse_unread_in(stage, READ_OF_INPUTS)
    if config.rescore:
        rescore(stage)
    elif stage.many("candidates"):
        writer = stage.writer("candidates", "candidates/1")
        writer.write(joined(stage))
        writer.close(
            {
                "copied": sum(
                    len(stage.dataset(f"candidates.{label}" if label else "candidates"))
                    for label in stage.many("candidates")
                )
            }
        )
    else:
        generate(stage)
    rows = list(open_dataset(str(stage.workdir / "out" / "candidates")).iter_rows())
    if stage.many("candidates") and not config.rescore:
        warn_of_rewards(stage, rows)
    n_prompts = 1 + max((r["prompt_idx"] for r in rows), default=-1)
    width = 1 + max((r["completion_idx"] for r in rows), default=-1)
    scored = np.full((n_prompts, width), np.nan)
    correct = np.zeros((n_prompts, width), bool)
    where = {}
    for row in rows:
        cell = row["prompt_idx"], row["completion_idx"]
        where[cell] = row
        if row["kept"] is not False and row["reward"] is not None:
            scored[cell] = row["reward"]
            correct[cell] = bool(row["correct"])
    distinct = scored.copy()
    duplicates = drop_duplicates(distinct, where)
    matrix = distinct if config.dedupe else scored
    chosen = select(matrix, correct, config, stage)
    write_selected(stage, [where[divmod(int(i), width)] for i in chosen], rows)
    if config.difficulty_band is not None:
        write_banded(stage, rows)
    report(stage, rows, scored, matrix, correct, chosen, duplicates)
