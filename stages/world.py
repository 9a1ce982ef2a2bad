"""world: the embedded default, an honest miniature of post-training data, generated from a seed.

A small language of animals, words and numbers with fourteen kinds of task of graded difficulty (see
stages/worldgen). Out come plain text to pre-train on, demonstrations of mixed quality, noisy human-like comparisons
(ties, strengths, a length bias) and prompts with verifiable answers. Train, validation and test prompts are disjoint,
across all of the data sets. The same seed gives the same bytes.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from stages.spec import OutputSpec, StageConfig, StageSpec


class Sizes(StageConfig):
    """Rows of one data set per split."""

    train: int = Field(ge=1, description="rows in the train split")
    validation: int = Field(ge=0, description="rows in the validation split")
    test: int = Field(0, ge=0, description="rows in the test split")


def rest_as_usual(cls: type[StageConfig], value: Any, info: ValidationInfo) -> Any:
    """Sizes that are given in part (``{train: 100}``) keep the rest of the setting's default."""
    return {**cls.model_fields[info.field_name].default.model_dump(), **value} if isinstance(value, dict) else value


class StyleWeights(StageConfig):
    """Relative frequencies of the ways an answer is written."""

    short: float = Field(0.35, ge=0, description="the answer alone")
    worked: float = Field(0.35, ge=0, description="the steps, then the answer")
    chatty: float = Field(0.15, ge=0, description="steps and answer between pleasantries")
    sloppy: float = Field(0.15, ge=0, description="the answer without its marker")
    rambling: float = Field(
        0.0,
        ge=0,
        description=(
            "the answer, with its marker or without, then remarks that say nothing, as many as chance has it: a length"
            " that is free"
        ),
    )


class ToolSizes(StageConfig):
    """Questions that need a tool, and demonstrations of tool use (``stages/worldgen/tool_tasks.py``)."""

    demonstrations: Sizes = Field(
        Sizes(train=4000, validation=100), description="Demonstrations of tool use, of mixed quality."
    )
    tasks: Sizes = Field(Sizes(train=2000, validation=100, test=300), description="Tasks for the environment `tools`.")
    wrong_share: float = Field(0.3, ge=0, lt=1, description="Share of demonstrations that guess or are careless.")

    _part = field_validator("demonstrations", "tasks", mode="before")(classmethod(rest_as_usual))


class Config(StageConfig):
    facts_seed: int | None = Field(
        None, ge=0, title="Facts seed", description="Seed of the fact base; unset = the run's seed."
    )
    text: Sizes = Field(Sizes(train=5500, validation=100), description="Passages of plain text for pre-training.")
    statements_per_text: tuple[int, int] = Field((6, 10), description="Statements per passage, lowest and highest.")
    dialogue_share: float = Field(
        0.4, ge=0, le=1, description="Share of sentences written as a reported question and its answer."
    )
    demonstrations: Sizes = Field(Sizes(train=4000, validation=100), description="Demonstrations of mixed quality.")
    comparisons: Sizes = Field(Sizes(train=5000, validation=200, test=500), description="Labelled A/B comparisons.")
    prompts: Sizes = Field(Sizes(train=3000, validation=100, test=400), description="Prompts with a verifiable answer.")
    wrong_share: float = Field(
        0.3, ge=0, lt=1, description="Share of wrong demonstrations at medium difficulty (x0.8 easy, x1.2 hard)."
    )
    comparison_wrong_share: float = Field(
        0.45, ge=0, lt=1, description="Share of wrong answers among compared responses."
    )
    styles: StyleWeights = Field(StyleWeights(), description="How answers are written.")
    annotator_correctness: float = Field(
        4.0, ge=0, description="Utility of a correct answer to the simulated annotator."
    )
    annotator_length_bias: float = Field(
        0.25, description="Utility per ten words: the annotator likes long answers too much."
    )
    annotator_noise: float = Field(
        1.0, ge=0, description="Scale of the logistic noise (1 = Bradley-Terry on the utility)."
    )
    annotator_tie_band: float = Field(0.35, ge=0, description="Perceived differences below this are labelled as ties.")
    tools: ToolSizes | None = Field(
        None,
        title="Tools",
        description="Also make questions that need a tool, with demonstrations of tool use; unset = none.",
    )

    _part = field_validator("text", "demonstrations", "comparisons", "prompts", mode="before")(
        classmethod(rest_as_usual)
    )


SPEC = StageSpec(
    name="world",
    config=Config,
    outputs={
        "text": OutputSpec("dataset", doc="text/1: plain text for pre-training."),
        "demonstrations": OutputSpec("dataset", doc="demonstrations/1 of mixed quality."),
        "comparisons": OutputSpec("dataset", doc="comparisons/1: raw five-point labels, ties included."),
        "pairs": OutputSpec("dataset", doc="pairs/1: the decided comparisons, ties dropped."),
        "prompts": OutputSpec("dataset", doc="prompts/1 with gold answers."),
        "tool_demonstrations": OutputSpec(
            "dataset", required=False, doc="demonstrations/1 of tool use, where `tools` is set."
        ),
        "tool_tasks": OutputSpec(
            "dataset", required=False, doc="prompts/1 for the environment tools, where `tools` is set."
        ),
    },
    doc="Generates the embedded default data from a seed.",
)

#: Shared with base_model: what a conversation looks like in this project's own models.
SPLITS = ("train", "validation", "test")


def rng_maker(stage, seed: int):
    """`rng_of(*purpose)`: an independent counter-based generator per purpose, the same wherever it is called."""
    return lambda *purpose: stage.rng("world", seed, *purpose)


def run(stage) -> None:
    from stages.worldgen import generate
    from stages.worldgen.annotator import Annotator
    from stages.worldgen.lexicon import draw_facts

    config = stage.config
    rng_of = rng_maker(stage, stage.seed if config.facts_seed is None else config.facts_seed)
    facts = draw_facts(rng_of("facts"))
    styles = config.styles.model_dump()
    annotator = Annotator(
        correctness=config.annotator_correctness,
        length_bias=config.annotator_length_bias,
        noise=config.annotator_noise,
        tie_band=config.annotator_tie_band,
    )
    makers = {
        "text": (
            "text/1",
            config.text,
            lambda split, n: generate.text_rows(
                rng_of,
                facts,
                split=split,
                n=n,
                statements=config.statements_per_text,
                dialogue_share=config.dialogue_share,
            ),
        ),
        "demonstrations": (
            "demonstrations/1",
            config.demonstrations,
            lambda split, n: generate.demonstration_rows(
                rng_of, facts, split=split, n=n, wrong_share=config.wrong_share, style_weights=styles
            ),
        ),
        "comparisons": (
            "comparisons/1",
            config.comparisons,
            lambda split, n: generate.comparison_rows(
                rng_of,
                facts,
                annotator,
                split=split,
                n=n,
                wrong_share=config.comparison_wrong_share,
                style_weights=styles,
            ),
        ),
        "prompts": (
            "prompts/1",
            config.prompts,
            lambda split, n: generate.prompt_rows(rng_of, facts, split=split, n=n),
        ),
    }
    if config.tools is not None:
        from stages.worldgen import tool_tasks

        makers |= {
            "tool_demonstrations": (
                "demonstrations/1",
                config.tools.demonstrations,
                lambda split, n: tool_tasks.tool_demonstration_rows(
                    rng_of, split=split, n=n, wrong_share=config.tools.wrong_share
                ),
            ),
            "tool_tasks": (
                "prompts/1",
                config.tools.tasks,
                lambda split, n: tool_tasks.tool_task_rows(rng_of, split=split, n=n),
            ),
        }
    held_out, trained, summary = set(), set(), {}
    done, total = 0, sum(getattr(sizes, s) for _, sizes, _ in makers.values() for s in SPLITS)
    for name, (kind, sizes, make) in makers.items():
        rows = []
        for split in SPLITS:
            for row in make(split, getattr(sizes, split)):
                rows.append(_complete(kind, row, split))
                prompt = _prompt_text(row)
                if prompt is not None:
                    (trained if split == "train" else held_out).add(prompt)
                done += 1
                if done % 500 == 0:
                    stage.progress(done, total, name)
        writer = stage.writer(name, kind)
        writer.write(rows)
        writer.close()
        summary[f"{name}_rows"] = len(rows)
        if name == "comparisons":
            pairs = [pair for row in rows if (pair := _pair(row)) is not None]
            summary["pairs_rows"], summary["tie_share"] = len(pairs), 1 - len(pairs) / len(rows)
            writer = stage.writer("pairs", "pairs/1")
            writer.write(pairs)
            writer.close()
    if held_out & trained:
        raise RuntimeError(
            f"{len(held_out & trained)} held-out prompts are also in training data, for example "
            f"{sorted(held_out & trained)[0]!r}; this is a defect of stages/worldgen/generate.py:split_of"
        )
    summary["held_out_prompts"], summary["train_prompts"] = len(held_out), len(trained)
    stage.summary(summary)
    stage.progress(total, total, "done")
    stage.report("samples", markdown=_samples(rows_of=makers))


def _complete(kind: str, row: dict, split: str) -> dict:
    from storage.files import canonical_json
    from storage.schema import complete_row

    extra = row.pop("extra", None)
    origin = "human" if kind in ("comparisons/1", "demonstrations/1", "text/1") else "verifier"
    if extra is not None:
        row["extra_json"] = canonical_json(extra)
    return complete_row(kind, row, dataset="world", source="world", origin=origin, split=split)


def _prompt_text(row: dict) -> str | None:
    messages = row.get("prompt") or row.get("messages")
    return next(m["content"] for m in messages if m["role"] == "user") if messages else None


def _pair(row: dict) -> dict | None:
    """The `pairs/1` row of one labelled comparison (`data.likert`), or None for a tie."""
    from stages.ingestion.pairing import likert
    from storage.schema import complete_row

    winner, strength, signed = likert(row["label"], row["n_points"], row["orientation"])
    if winner == "tie":
        return None
    a, b = row["response_a"], row["response_b"]
    chosen, rejected = (a, b) if winner == "A" else (b, a)
    return complete_row(
        "pairs/1",
        {
            "prompt": row["prompt"],
            "chosen": chosen,
            "rejected": rejected,
            "strength": strength,
            "margin": abs(signed),
            "ann": row["ann"],
            "extra_json": row["extra_json"],
        },
        dataset="world",
        source="world",
        origin="human",
        split=row["split"],
    )


def _samples(rows_of: dict) -> str:
    """A few rows of every data set, as a reader would want to see them."""
    lines = ["# The world in samples", ""]
    for name, (_, sizes, make) in rows_of.items():
        lines += [f"## {name}", ""]
        for row in make("train", min(4, sizes.train)):
            if name == "text":
                lines.append(f"- {row['text']}")
            elif name == "tool_demonstrations":
                lines.append(
                    "- "
                    + " / ".join(f"{m['role']}: {m['content']}" for m in row["messages"][1:])
                    + f" _({row['extra']['manner']})_"
                )
            elif name == "demonstrations":
                lines.append(
                    f"- **{row['messages'][0]['content']}** {row['messages'][1]['content']} "
                    f"_(quality {row['extra']['quality']})_"
                )
            elif name == "comparisons":
                lines.append(
                    f"- **{row['prompt'][0]['content']}** A: {row['response_a'][0]['content']} / "
                    f"B: {row['response_b'][0]['content']} _(label {row['label']} of 5, low is A)_"
                )
            else:
                lines.append(
                    f"- **{row['prompt'][0]['content']}** gold `{row['answer']}` _(difficulty"
                    f" {row['extra']['difficulty']})_"
                )
        lines.append("")
    return "\n".join(lines)
