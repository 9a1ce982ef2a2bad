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

from stages.reward.components import REWARD_INPUTS, WITHOUT_VERDICT, FixedComponent, RewardComponent
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

#: Settings beside ``system`` that change what answers are sampled from.
OTHER_CONTEXTS = ("in_context", "mixture_coef", "rationalise")


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
        "judge": InputSpec(
            "model",
            required=False,
            use="words",
            doc="Causal LM of components with kind=judge, and of a rubric's judged items.",
        ),
        "rubric": InputSpec(
            "dataset",
            kinds=("rubric_items/1",),
            required=False,
            doc="Rubric of the component with kind=rubric: a file or a dataset.",
        ),
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


def warn_of_rewards(stage, rows) -> None:
    """Say so where other rewards are configured than those that the candidates came with, which are the ones that
    select.
    """
    if "rewards" not in stage.config.model_fields_set or stage.config.rewards == Config.model_fields[
        "rewards"
    ].get_default(call_default_factory=True):
        return
    asked, stored = (
        {c.name for c in stage.config.rewards},
        {part["source"].split("/")[0] for row in rows for part in row["scores"] or ()},
    )
    if asked != stored:
        stage.warn(
            "rewards_not_read",
            f"rewards names {', '.join(sorted(asked))}, and the candidates are selected by the rewards that they came"
            f" with ({', '.join(sorted(stored)) or 'without names'}). Write rescore=true to score them anew.",
        )


def joined(stage):
    """Rows of all candidate sets; several sets are numbered anew, prompt by prompt in order of first appearance, sets
    in the order of their labels.
    """
    from storage.schema import complete_row

    labels = sorted(stage.many("candidates"))
    datasets = [stage.dataset(f"candidates.{label}" if label else "candidates") for label in labels]
    prompts, counts, cells = {}, {}, set()
    if len(datasets) == 1:
        for row in datasets[0].iter_rows():
            cell = row["prompt_idx"], row["completion_idx"]
            if cell in cells or prompts.setdefault(cell[0], row["prompt_id"]) != row["prompt_id"]:
                what = (
                    f"two rows for completion_idx={cell[1]} of prompt_idx={cell[0]}"
                    if cell in cells
                    else f"two prompts with prompt_idx={cell[0]}"
                )
                raise ConfigError(
                    f"rejection: the candidates have {what}, as files of several runs one behind the other have; give"
                    " each as a dataset of its own (candidates.A=..., candidates.B=...), or number them through"
                )
            cells.add(cell)
            yield row
        return
    for dataset in datasets:
        for row in dataset.iter_rows():
            at = prompts.setdefault(row["prompt_id"], len(prompts))
            counts[at] = counts.get(at, -1) + 1
            yield complete_row(
                "candidates/1",
                {**row, "prompt_idx": at, "completion_idx": counts[at]},
                dataset="candidates",
                source=row["source"],
                origin=row["origin"],
            )


def rescore(stage) -> None:
    """Score candidates of earlier runs with the configured rewards, one Parquet part per block of prompts; what was
    sampled does not change.
    """
    import json
    from itertools import groupby

    from stages.chat import stage_renderer
    from stages.generation import Sample, by_prompt_id, opens_thought, prompt_ids, score, stored_completion
    from stages.reward.rewards import build_rewards
    from stages.selection import top_k_per_prompt
    from storage.schema import complete_row

    config = stage.config
    groups = [
        list(rows)
        for _, rows in groupby(
            sorted(joined(stage), key=lambda row: (row["prompt_idx"], row["completion_idx"])),
            key=lambda row: row["prompt_idx"],
        )
    ]
    prompts = by_prompt_id(stage, stage.dataset("prompts").iter_rows(), {rows[0]["prompt_id"] for rows in groups})
    lost = [rows[0]["prompt_id"] for rows in groups if rows[0]["prompt_id"] not in prompts]
    if lost:
        raise ConfigError(
            f"rejection: the input prompts lacks {len(lost)} prompts of the candidates (first {lost[0]}); give the"
            " prompts that they were sampled for"
        )
    if config.rescore_best is not None:
        best = lambda rows: top_k_per_prompt(
            [
                [
                    row["reward"] if row["kept"] is not False and row["reward"] is not None else float("nan")
                    for row in rows
                ]
            ],
            config.rescore_best,
        )[0]
        groups = [[rows[i] for i in sorted(best(rows))] for rows in groups]
    writer = stage.writer("candidates", "candidates/1")
    renderer, done = stage_renderer(stage), stage.units_done
    opened = opens_thought(renderer.tokenizer)
    if done * config.block < len(groups):
        rewards = build_rewards(config.rewards, stage.inputs, renderer=renderer, device=stage.device)
        rewards.check([prompts[rows[0]["prompt_id"]] for rows in groups if rows])
    for start in range(done * config.block, len(groups), config.block):
        rows = [row for group in groups[start : start + config.block] for row in group]
        extras = [json.loads(row["extra_json"] or "{}") for row in rows]
        stored = [stored_completion(renderer, row) for row in rows]
        shown = [prompt_ids(renderer, row["prompt"], config.prompt_template) for row in rows]
        samples = [
            Sample(
                prompts[row["prompt_id"]],
                before,
                row["completion_idx"],
                ids,
                None,
                finish,
                row["completion"][-1].get("content") or "",
                error=error,
                opened=opened(before),
            )
            for row, before, (ids, finish, error) in zip(rows, shown, stored)
        ]
        score(rewards, samples)
        writer.write(
            [
                complete_row(
                    "candidates/1",
                    {
                        **row,
                        **verdict(sample, extra),
                        "extra_json": json.dumps(
                            extra | {"unscorable": sample.reasons, "tier": sample.tier}, sort_keys=True
                        ),
                    },
                    dataset="candidates",
                    source=row["source"],
                    origin=row["origin"],
                )
                for row, extra, sample in zip(rows, extras, samples)
            ]
        )
        writer.flush()
        stage.save_checkpoint(start // config.block + 1, {}, {})
        stage.progress(min(start + config.block, len(groups)), len(groups), "prompts")
    writer.close({"prompts": len(groups), "completions": sum(map(len, groups))})


def write_banded(stage, rows) -> None:
    """The prompts whose pass rate over their direct completions with a verdict is in ``difficulty_band``, with the
    counts (``rs.difficulty_band``).
    """
    import json

    from stages import selection
    from storage.schema import complete_row

    low, high = stage.config.difficulty_band
    verdicts: dict[str, list[bool]] = {}
    for row in rows:
        if row["correct"] is not None and not rationalised_row(row):
            verdicts.setdefault(row["prompt_id"], []).append(row["correct"])
    kept = {
        name for name, found in verdicts.items() if selection.difficulty_band([sum(found)], len(found), low, high)[0]
    }
    writer = stage.writer("banded", "prompts/1")
    for row in stage.dataset("prompts").iter_rows():
        found = verdicts.get(row["prompt_id"])
        if row["prompt_id"] in kept:
            extra = json.loads(row["extra_json"] or "{}") | {
                "pass_rate": sum(found) / len(found),
                "passed": sum(found),
                "sampled": len(found),
            }
            writer.write(
                [
                    complete_row(
                        "prompts/1",
                        {**row, "extra_json": json.dumps(extra, sort_keys=True)},
                        dataset="banded",
                        source=row["source"],
                        origin=row["origin"],
                        split=row["split"],
                    )
                ]
            )
    rates = [sum(found) / len(found) for found in verdicts.values()]
    writer.close(
        {
            "prompts": len(rates),
            "kept": len(kept),
            "too_hard": sum(rate < low for rate in rates),
            "too_easy": sum(rate > high for rate in rates),
        }
    )
    stage.summary({"banded": len(kept), "banded/of": len(verdicts)})
    if not kept:
        stage.warn(
            "band_is_empty",
            f"No prompt has a pass rate in {stage.config.difficulty_band}: sample more completions, or widen"
            " difficulty_band.",
        )


def rationalised_row(row: dict) -> bool:
    """Whether a candidate was sampled with the answer as a hint."""
    import json

    return json.loads(row["extra_json"] or "{}").get("mode") == "rationalised"


def generate(stage) -> None:
    """Sample and score every prompt, one Parquet part per block of prompts."""
    from stages.chat import stage_renderer
    from stages.generation import sampling_params, score, warn_of_failures
    from stages.reward.rewards import build_rewards
    from stages.reward.rubric_reward import score_rows, write_review

    config = stage.config
    if bool(config.mixture_coef) != stage.has("reference"):
        raise ValueError(
            "mixture_coef and the input `reference` go together; write for example mixture_coef=0.25 with --input"
            " reference=MODEL, or neither."
        )
    renderer = stage_renderer(stage)
    rows = chosen_prompts(stage, renderer)
    counts = [completions_of(stage, row) for row, _ in rows]
    writer = stage.writer("candidates", "candidates/1")
    rubric = any(component.kind == "rubric" for component in config.rewards)
    items = stage.writer("rubric_scores", "rubric_scores/1") if rubric else None
    done = stage.units_done
    total = len(rows)
    if rubric and total > config.block:
        stage.warn(
            "rubric_blocks",
            f"Confidences of rubric items are averaged over blocks of {config.block} prompts; run stage rescore on the"
            " candidates for averages over all of them, or raise block.",
        )
    context = Context(stage, renderer, rows)
    if config.rationalise:
        warn_of_long_hints(stage, renderer, rows)
    if done * config.block < total:
        sampler = sampler_of(stage, renderer)
        rewards = build_rewards(config.rewards, stage.inputs, renderer=renderer, device=stage.device)
        rewards.check([row for row, _ in rows])
        rewards.check_company(config.num_generations, "write num_generations=4")
        params = sampling_params(config, renderer)
    for start in range(done * config.block, total, config.block):
        block = rows[start : start + config.block]
        seeds = [
            [stage.seed_for("rejection", row["row_id"], k) for k in range(n)]
            for (row, _), n in zip(block, counts[start:])
        ]
        groups, notes = sample_block(stage, rewards, sampler, block, params, seeds, context)
        warn_of_failures(stage, sampler, [s for group in groups for s in group])
        score(rewards, [s for group in groups for s in group])
        hinted = rationalised(stage, renderer, rewards, sampler, block, params, groups)
        made = [
            row
            for i, ((row, _), group, note) in enumerate(zip(block, groups, notes))
            for row in candidates_of(stage, renderer, sampler, row, start + i, seeds[i], group, hinted.get(i, []), note)
        ]
        writer.write(made)
        writer.flush()
        if rubric:
            everyone = [s for i, group in enumerate(groups) for s in [*group, *hinted.get(i, [])]]
            items.write([row for one, s in zip(made, everyone) for row in score_rows(one, s.items)])
            items.flush()
        stage.save_checkpoint(start // config.block + 1, {}, {})
        stage.progress(min(start + config.block, total), total, "prompts")
    writer.close({"prompts": total, "completions": sum(counts)})
    if rubric:
        items.close({})
        write_review(stage)


def chosen_prompts(stage, renderer) -> list:
    """The prompts that are sampled for, each with its ids: a part of them, or as many as are asked for from an offset
    on.
    """
    from stages.generation import prompt_rows
    from stages.spec import ConfigError

    config = stage.config
    rows = prompt_rows(
        stage,
        stage.dataset("prompts"),
        config.split,
        renderer,
        config.max_prompt_length,
        None if config.prompt_offset or config.prompt_part else config.max_prompts,
        config.prompt_template,
    )
    if config.prompt_part is not None:
        part, parts = config.prompt_part
        if parts > len(rows):
            raise ConfigError(
                f"rejection: prompt_part={list(config.prompt_part)} cuts {len(rows)} prompts into empty parts; write"
                " fewer parts"
            )
        rows = rows[part - 1 :: parts]
    first = config.prompt_offset % len(rows)
    return (rows[first:] + rows[:first])[: config.max_prompts]


def completions_of(stage, row: dict) -> int:
    """How many completions of a prompt are sampled; where a range is asked for, drawn by the row's own seed."""
    least, most = stage.config.min_generations, stage.config.num_generations
    if least is None:
        return most
    return int(stage.rng("generations", row["row_id"]).integers(least, most + 1))


def sampler_of(stage, renderer):
    """The engine that is asked for, or the mixture of policy and reference in every token."""
    import torch

    from stages.decoding.engines import make_engine
    from stages.generation import MixtureSampler
    from stages.models.modeling import freeze, load_policy

    config = stage.config
    if not config.mixture_coef:
        return make_engine(stage, renderer)
    policy, reference = (
        freeze(load_policy(stage.path(role), stage.device, getattr(torch, config.sampling_dtype)))
        for role in ("model", "reference")
    )
    return MixtureSampler(policy, reference, renderer.tokenizer, config.mixture_coef)


def candidates_of(stage, renderer, sampler, row: dict, prompt_idx: int, seeds, group, hinted, note: dict) -> list[dict]:
    """Rows of a prompt's completions, then of those that were sampled with its answer as a hint."""
    from stages.generation import gen_record
    from storage.schema import complete_row

    made = []
    for sample, mode in [*((s, {}) for s in group), *((s, {"mode": "rationalised"}) for s in hinted)]:
        seed = (
            seeds[sample.index]
            if not mode
            else stage.seed_for("rationalise", row["row_id"], sample.index - stage.config.num_generations)
        )
        gen = gen_record(stage, stage.config, renderer, seed, engine=sampler.name)
        made.append(
            complete_row(
                "candidates/1",
                candidate(sample, prompt_idx, gen, {**note, **mode}),
                dataset="candidates",
                source=row["dataset"],
                origin="ai",
            )
        )
    return made


#: System message of a prompt that has a trait, where ``system`` is empty.
CHARACTER = (
    "You are an assistant of this character: {trait}\nAnswer as somebody of this character does, and do not speak"
    " of it."
)


class Context:
    """System messages that prompts are answered behind: one for all (``system``), or that of each prompt's trait
    (``synth.character`` step 3).

    Raises ConfigError for prompts without a trait, and for prompts that are too long behind their message.
    """

    def __init__(self, stage, renderer, rows):
        config, self.renderer, self.traits = stage.config, renderer, {}
        self.system = config.system
        if stage.has("traits"):
            from stages.reward.principles import draw, load
            from stages.write_prompts import traits_of

            if config.prompt_template != "chat":
                raise ConfigError(
                    "rejection: traits are shown as system messages of the chat template; write prompt_template=chat"
                )
            if other := next((name for name in OTHER_CONTEXTS if getattr(config, name)), None):
                raise ConfigError(
                    f"rejection: traits and {other} both say what answers are sampled from; leave one of them out"
                )
            self.system = config.system or CHARACTER
            self.traits = {row["principle_id"]: row for row in load(stage, "traits")}
            if "{trait}" not in self.system:
                raise ConfigError("rejection: system does not show the trait; write {trait} in it, or leave it out")
            self.drawn = (
                {row["row_id"]: draw(stage, traits_of(list(self.traits.values())), row["row_id"]) for row, _ in rows}
                if config.trait_of == "drawn"
                else {}
            )
            lost = [row for row, _ in rows if not self.drawn and row["category"] not in self.traits]
            if lost:
                raise ConfigError(
                    f"rejection: {len(lost)} of {len(rows)} prompts have no trait (the first one's category is"
                    f" {lost[0]['category']!r}); write the id of a trait into the column category, one of"
                    f" {', '.join(list(self.traits)[:10])}, or trait_of=drawn"
                )
        long = [n for row, _ in rows if self.system and (n := len(self.ids(row))) > config.max_prompt_length]
        if long:
            raise ConfigError(
                f"rejection: behind their system message {len(long)} of {len(rows)} prompts have more than"
                f" max_prompt_length={config.max_prompt_length} tokens; shorten it, or write"
                f" max_prompt_length={max(long)} (lower max_completion_length where the model has no more positions)"
            )

    def trait(self, row: dict) -> dict:
        """The trait of a prompt."""
        return self.drawn[row["row_id"]] if self.drawn else self.traits[row["category"]]

    def messages(self, row: dict) -> list[dict]:
        from stages.policy.members import with_system

        return with_system(
            row["prompt"], self.system.replace("{trait}", self.trait(row)["text"]) if self.traits else self.system
        )

    def ids(self, row: dict) -> list[int]:
        return self.renderer.prompt_ids(self.messages(row))

    def note(self, row: dict) -> dict:
        """What a candidate says about it."""
        from storage.schema import prompt_id

        trait = (
            {"trait": self.trait(row)["principle_id"], "trait_version": self.trait(row)["version"]}
            if self.traits
            else {}
        )
        return {"sampling_prompt_id": prompt_id(self.messages(row)), **trait}


def sample_block(stage, rewards, sampler, block, params, seeds, context):
    """(groups of samples, what to note about each group's candidates) of a block; with ``in_context`` sampled behind
    demonstrations, with ``system`` or ``traits`` behind a system message."""
    from dataclasses import replace

    from stages.generation import sample_groups

    if context.system:
        groups = sample_groups(sampler, [(row, context.ids(row)) for row, _ in block], params, seeds)
        return [[replace(s, prompt_ids=ids) for s in group] for (_, ids), group in zip(block, groups)], [
            context.note(row) for row, _ in block
        ]
    retriever = next((rewards.scorers[c.name] for c in rewards.components if c.kind == "icdpo"), None)
    found = [retriever.retrieve(row) if retriever is not None else ([], None) for row, _ in block]
    notes = [{"demonstrations": names} if retriever is not None else {} for names, _ in found]
    if not stage.config.in_context:
        return sample_groups(sampler, block, params, seeds), notes
    groups = sample_groups(
        sampler, [(row, behind or ids) for (row, ids), (_, behind) in zip(block, found)], params, seeds
    )
    notes = [{**note, "in_context": behind is not None} for note, (_, behind) in zip(notes, found)]
    return [[replace(s, prompt_ids=ids) for s in group] for (_, ids), group in zip(block, groups)], notes


def hinted_ids(renderer, config, row: dict) -> list[int]:
    """Ids of a prompt whose last message holds its answer as a hint."""
    *before, last = row["prompt"]
    told = config.hint.replace("{question}", last.get("content") or "").replace("{answer}", row["answer"])
    return renderer.prompt_ids([*before, {**last, "content": told}])


def warn_of_long_hints(stage, renderer, rows) -> None:
    """Say how many prompts are too long with the hint to be asked again."""
    config = stage.config
    known = [row for row, _ in rows if row.get("answer") is not None]
    lost = [row for row in known if len(hinted_ids(renderer, config, row)) > config.max_prompt_length]
    if lost:
        stage.warn(
            "hints_too_long",
            f"{len(lost)} of {len(known)} prompts with an answer are longer than"
            f" max_prompt_length={config.max_prompt_length} once they hold the hint (the first is {lost[0]['row_id']}),"
            " and are not asked again where no completion is right; raise max_prompt_length, or write a shorter hint.",
        )


def rationalised(stage, renderer, rewards, sampler, block, params, groups) -> dict[int, list]:
    """Scored samples, by place in the block, of prompts that no completion solved, drawn with the answer as a hint
    (``rs.star``, Zelikman et al. 2022).

    They belong to the prompt without the hint; their indices follow those of the direct ones.
    """
    from dataclasses import replace

    from stages.generation import sample_groups, score

    config = stage.config
    asked = []
    for i, ((row, _), group) in enumerate(zip(block, groups)):
        if config.rationalise and row.get("answer") is not None and not any(s.correct and s.terminated for s in group):
            ids = hinted_ids(renderer, config, row)
            if len(ids) <= config.max_prompt_length:
                asked.append((i, row, ids))
    if not asked:
        return {}
    seeds = [
        [stage.seed_for("rationalise", row["row_id"], k) for k in range(config.rationalise)] for _, row, _ in asked
    ]
    found = sample_groups(sampler, [(row, ids) for _, row, ids in asked], params, seeds)
    out = {
        i: [replace(s, prompt_ids=block[i][1], index=config.num_generations + s.index) for s in group]
        for (i, _, _), group in zip(asked, found)
    }
    score(rewards, [s for group in out.values() for s in group])
    return out


def verdict(sample, note: dict) -> dict:
    """What scoring says of a candidate; an answer that is empty, or rationalised and not right, is never kept."""
    import math

    reason = None if sample.terminated else "engine_error" if sample.error is not None else "truncated"
    if reason is None and not sample.text.strip():
        reason = "empty"
    if reason is None and math.isnan(sample.total):
        reason = "unscorable"
    if reason is None and note.get("mode") == "rationalised" and not sample.correct:
        reason = "hint_did_not_help"
    return {
        "scores": [{"source": k, "value": v} for k, v in sample.parts.items()],
        "reward": None if math.isnan(sample.total) else sample.total,
        "correct": sample.correct,
        "kept": reason is None,
        "drop_reason": reason,
    }


def candidate(sample, prompt_idx: int, gen: dict, note: dict) -> dict:
    """One ``candidates/1`` row."""
    import json

    from storage.schema import provenance

    return {
        "prompt": sample.prompt["prompt"],
        **provenance(sample.prompt),
        "prompt_idx": prompt_idx,
        "completion_idx": sample.index,
        "completion": [{"role": "assistant", "content": sample.text}],
        **verdict(sample, note),
        "gen": gen,
        "split": sample.prompt["split"],
        "extra_json": json.dumps(
            {
                "completion_ids": sample.ids,
                "finish_reason": sample.finish_reason,
                "logp_sum": None if sample.logps is None else sum(sample.logps),
                "unscorable": sample.reasons,
                "category": sample.prompt.get("category"),
                "tier": sample.tier,
                **note,
                **({"reencoded": True} if sample.reencoded else {}),
                **({"error": sample.error} if sample.error else {}),
            },
            sort_keys=True,
        ),
    }


def drop_duplicates(matrix, where) -> int:
    """Later copies of a valid answer within one prompt lose their score, so that no selector takes them; returns how
    many.
    """
    import json

    seen, before = set(), int((matrix == matrix).sum())
    for (i, j), row in sorted(where.items()):
        key = i, json.dumps(row["completion"], sort_keys=True)
        if key in seen:
            matrix[i, j] = float("nan")
        elif matrix[i, j] == matrix[i, j]:
            seen.add(key)
    return before - int((matrix == matrix).sum())


def select(matrix, correct, config, stage) -> list[int]:
    """Flat indices (prompt-major) kept by the configured selector."""
    import numpy as np

    from stages import selection

    width = matrix.shape[1]
    floor = None if config.threshold is None else level(matrix, config)
    # drawn among those that may be kept, as many as a selector of the best would keep
    if floor is not None and config.select.startswith("random"):
        matrix = np.where(matrix > floor, matrix, np.nan)
    if config.select in ("top_per_prompt", "top_k_per_prompt"):
        best = selection.top_k_per_prompt(matrix, config.k if config.select == "top_k_per_prompt" else 1)
        flat = [i * width + j for i, row in enumerate(best) for j in row]
    elif config.select == "top_k_overall":
        flat = selection.top_k_overall(matrix, config.k, config.max_per_prompt)
    elif config.select == "random_k_overall":
        flat = selection.random_k_overall(matrix, config.k, stage.rng("random_k_overall"))
    elif config.select == "threshold":
        flat = selection.threshold(matrix, floor)
    elif config.select == "all_correct":
        flat = np.flatnonzero(correct & ~np.isnan(matrix))
    else:
        picks = selection.random_per_prompt(matrix, stage.rng("random_per_prompt"))
        flat = [i * width + j for i, j in enumerate(picks) if j is not None]
    flat = sorted(int(i) for i in flat)
    if floor is not None and config.select != "threshold":
        flat = [i for i in flat if matrix.flat[i] > floor]
    if config.max_per_prompt is not None and config.select in ("threshold", "all_correct"):
        flat = [
            i
            for at, i in enumerate(flat)
            if at < config.max_per_prompt or flat[at - config.max_per_prompt] // width != i // width
        ]
    return flat


def level(matrix, config) -> float:
    """The threshold as a reward: itself, or the quantile of the valid rewards."""
    import numpy as np

    if config.threshold_mode == "absolute":
        return config.threshold
    return float(np.nanquantile(matrix, config.threshold)) if (~np.isnan(matrix)).any() else 0.0


def write_selected(stage, rows, candidates=()) -> None:
    """The selected rows as demonstrations, in the split of their prompt. candidates: what they were selected from, for
    saying why nothing was.
    """
    import json

    from stages.ingestion.curation import generated_splits
    from stages.reward.verdicts import commonest_failure, failures
    from storage.schema import complete_row, provenance

    splits = generated_splits(rows, stage.config.validation_fraction)
    writer = stage.writer("selected", "demonstrations/1")
    writer.write(
        [
            complete_row(
                "demonstrations/1",
                {
                    "messages": row["prompt"] + row["completion"],
                    "train_turns": [len(row["prompt"])],
                    "kept": True,
                    "gen": row["gen"],
                    "category": json.loads(row["extra_json"] or "{}").get("category"),
                    **provenance(row),
                },
                dataset="selected",
                source=row["source"],
                origin="ai",
                split=splits[row["prompt_id"]],
            )
            for row in rows
        ]
    )
    writer.close({"selected": len(rows)})
    asked = stage.config.select == "all_correct" or stage.config.threshold is not None
    if not rows and stage.config.allow_empty and asked:  # elsewhere the candidates alone may be what is wanted
        stage.warn(
            "nothing_selected",
            "No completion is "
            + ("right" if stage.config.threshold is None else f"above threshold={stage.config.threshold:g}")
            + ", so there is nothing to train on. "
            + ("Sample" if stage.config.threshold is None else "Lower the threshold, or sample")
            + " more (num_generations); the candidates dataset shows each row's reward and drop_reason.",
        )
    if not rows and not stage.config.allow_empty:
        lost = [
            failures(dict.fromkeys(why), why)
            for row in candidates
            if row["drop_reason"] == "unscorable"
            for why in [json.loads(row["extra_json"])["unscorable"]]
        ]
        if lost and not any(row["reward"] is not None for row in candidates):
            raise ValueError(
                f"Nothing was selected: {len(lost)} completions ended by themselves but could not be scored. Most"
                f" often: {commonest_failure(lost)}. Mend the reward component, or give it more time."
            )
        why = f" {len(lost)} completions could not be scored, most often: {commonest_failure(lost)}." if lost else ""
        raise ValueError(
            "Nothing was selected: no completion ended by itself and could be scored above the threshold. Raise"
            " max_completion_length or num_generations, or lower threshold; the candidates dataset shows each row's"
            f" drop_reason.{why}"
        )


def component_means(rows, valid, is_picked) -> dict[str, float]:
    """Means of what several components, or an ensemble's members, say of the valid candidates, and of the selected ones
    (``rm.multi``, ``rm.ensemble``): of a component of weight 0 how far what is selected by another pleases it. One
    called as a number of the total (``reward/best``, ``reward/selected``) is ``reward/component=NAME``.
    """
    import numpy as np

    found: dict[str, list[tuple[float, bool]]] = {}
    for row, picked in zip(rows, is_picked):
        if valid[row["prompt_idx"], row["completion_idx"]]:
            for part in row["scores"] or ():
                if part["value"] is not None:
                    found.setdefault(part["source"], []).append((part["value"], bool(picked)))
    if len(found) < 2:
        return {}
    found = {f"component={name}" if name in ("best", "selected") else name: own for name, own in found.items()}
    means = {f"reward/{name}": float(np.mean([v for v, _ in own])) for name, own in found.items()}
    return means | {
        f"reward/{name}/selected": float(np.mean([v for v, picked in own if picked]))
        for name, own in found.items()
        if any(picked for _, picked in own)
    }


def report(stage, rows, scored, matrix, correct, chosen, duplicates: int) -> None:
    """Selection against the pool, and best-of-n curves with the unbiased estimator (``rm.overopt``), of the direct
    completions.

    scored: rewards ``[M, N]`` of the valid completions; matrix: the same without those that no selector could take, the
    duplicates. Means and curves are of what was sampled, duplicates included: without them they would be of a policy
    that never repeats itself.
    """
    import numpy as np

    from stages import selection
    from stages.measures.text import distinct_n, words_of
    from stages.reporting.reports import document, facts, histogram, line_chart, sample_table

    valid = ~np.isnan(scored)
    flat = scored.ravel()
    lengths = np.array([len(r["completion"][0].get("content") or "") for r in rows], float)
    picked = set(chosen)
    width = matrix.shape[1]
    is_picked = np.array([r["prompt_idx"] * width + r["completion_idx"] in picked for r in rows])
    summary = {
        "prompts": matrix.shape[0],
        "completions": len(rows),
        "valid": int((~np.isnan(matrix)).sum()),
        "selected": len(chosen),
        "truncated": sum(r["drop_reason"] == "truncated" for r in rows),
        "unscorable": sum(r["drop_reason"] == "unscorable" for r in rows),
        "failed": sum(r["drop_reason"] == "engine_error" for r in rows),
        "empty": sum(r["drop_reason"] == "empty" for r in rows),
        "duplicates": duplicates,
        "prompts_covered": len({i // width for i in chosen}),
        "reward": float(np.nanmean(flat)) if valid.any() else None,
        "reward/best": float(np.nanmax(scored[valid.any(axis=1)], axis=1).mean()) if valid.any() else None,
        "reward/selected": float(np.mean([flat[i] for i in chosen])) if chosen else None,
        "characters/mean": float(lengths.mean()),
        "characters/selected": float(lengths[is_picked].mean()) if chosen else None,
    }
    texts: dict[int, list[list[str]]] = {}
    for row in rows:
        texts.setdefault(row["prompt_idx"], []).append(words_of(row["completion"][0].get("content") or ""))
    distinct = [value for group in texts.values() if (value := distinct_n(group, 2)) is not None]
    # different word pairs per prompt: falls over rounds that narrow the policy (rs.sft)
    summary["distinct_2"] = float(np.mean(distinct)) if distinct else None
    summary = component_means(rows, valid, is_picked) | summary
    hinted = np.array([rationalised_row(r) for r in rows], bool)
    if any(r["correct"] is not None for r in rows):
        # no verdict is no wrong answer. As in `evaluate`, an answer that was cut has the verdict of what there is of it
        # (reward.truncation: score, the verifiers' default), though no selector takes it
        right = [r["correct"] for r, taken in zip(rows, is_picked) if taken and r["correct"] is not None]
        summary |= {
            "correct/mean": float(
                np.mean(
                    [r["correct"] for r, with_hint in zip(rows, hinted) if not with_hint and r["correct"] is not None]
                    or [0.0]
                )
            ),
            "correct/selected": float(np.mean(right)) if right else None,
        }
        if cut := sum(bool(r["correct"]) for r in rows if r["drop_reason"] == "truncated"):
            summary["truncated/correct"] = cut
    if hinted.any():  # per prompt, what training can take from it (rs.star)
        first, second = ({r["prompt_idx"]: False for r in rows if r["correct"] is not None} for _ in range(2))
        for row, with_hint in zip(rows, hinted):
            if row["correct"] and row["kept"]:
                (second if with_hint else first)[row["prompt_idx"]] = True
        kept = selection.star_filter([first[i] for i in first], [second[i] for i in first])
        summary |= {
            "prompts/direct": kept.count("direct"),
            "prompts/rationalised": kept.count("rationalised"),
            "prompts/unsolved": kept.count(None),
        }
        direct = 1 + max(r["completion_idx"] for r, with_hint in zip(rows, hinted) if not with_hint)
        scored, correct = scored[:, :direct], correct[:, :direct]
    sources = [(r["gen"] or {}).get("model_id") or "unknown" for r in rows]
    if len(set(sources)) > 1:  # a source that always wins teaches its style (rs.mix)
        summary |= {
            f"win_share/{name}": sum(s == name for s, taken in zip(sources, is_picked) if taken) / max(1, len(chosen))
            for name in sorted(set(sources))
        }
    stage.summary({k: v for k, v in summary.items() if v is not None})
    stage.report(
        "rewards",
        png=histogram(
            {"all": flat[valid.ravel()].tolist(), "selected": [float(flat[i]) for i in chosen]},
            title="Reward before and after selection",
            xlabel="reward",
        ),
    )
    full, sizes = (~np.isnan(scored)).all(axis=1), range(1, scored.shape[1] + 1)
    if full.any() and len(sizes) > 1:
        series = {
            "scorer": (
                list(sizes),
                [float(np.mean([selection.best_of_n_estimate(row, n) for row in scored[full]])) for n in sizes],
            )
        }
        judged = full.copy()
        judged[[r["prompt_idx"] for r, hint in zip(rows, hinted) if r["correct"] is None and not hint]] = False
        if judged.any():
            verdicts = correct[judged].astype(float)
            series["correct"] = (
                list(sizes),
                [
                    float(np.mean([selection.best_of_n_estimate(r, n, c) for r, c in zip(scored[judged], verdicts)]))
                    for n in sizes
                ],
            )
        stage.report("best-of-n", png=line_chart(series, title="Best of n", xlabel="n", ylabel="mean"))
    table = [
        {
            "prompt": r["prompt"][-1]["content"],
            "completion": r["completion"][0].get("content"),
            "reward": r["reward"],
            "correct": r["correct"],
        }
        for r, taken in zip(rows, is_picked)
        if taken
    ][:20]
    stage.report(
        "summary", markdown=document("Rejection sampling", facts(summary), ("Selected samples", sample_table(table)))
    )
