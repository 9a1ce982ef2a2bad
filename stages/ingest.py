"""ingest: raw files -> a dataset of one kind, and a dataset of everything that was refused.

Reads JSON Lines, JSON, CSV/TSV, Parquet, Arrow (`save_to_disk`) and text, plain or gzip, in the
formats that people have: TRL's preference, unpaired, prompt-completion, prompt-only, stepwise and
language-modelling sets (strings or messages), HH transcripts, AlpacaEval judgements, GSM8K,
MATH, multiple choice (MMLU, ARC, HellaSwag, columns A B C D ...), Likert comparisons, ratings, rankings, and
published datasets in columns of their own (`ingestion/published`). Every input row is either kept or put into
`quarantine` with its file, line and codes; the counts add up. Runs in flat memory and resumes where it was killed.

Order per row: parse -> adapt to our schema -> rules -> duplicates and contradictions -> conversion
(catalogue A.1) -> split -> write.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from pydantic import Field, field_validator, model_validator

from stages.spec import InputSpec, OutputSpec, StageConfig, StageSpec, summing_to_1

CHECKPOINT_ROWS = 50_000


class Config(StageConfig):
    """How raw rows become rows of one kind."""

    kind: Literal[
        "auto",
        "demonstrations/1",
        "text/1",
        "pairs/1",
        "unpaired/1",
        "prompts/1",
        "rankings/1",
        "ratings/1",
        "comparisons/1",
        "stepwise/1",
        "segments/1",
        "rubric_items/1",
        "principles/1",
    ] = Field(
        "auto",
        description=(
            "kind of rows wanted; auto takes what the data is (comparisons become pairs). Source: catalogue A.0, A.1"
        ),
    )
    format: Literal[
        "auto",
        "trl",
        "hh",
        "preference",
        "implicit",
        "alpaca_eval",
        "comparisons",
        "likert",
        "multiple_choice",
        "gsm8k",
        "math",
        "qa",
        "rlvr",
        "messages",
        "sharegpt",
        "prompt_completion",
        "instruction",
        "alpaca",
        "unpaired",
        "events",
        "ratings",
        "rankings",
        "stepwise",
        "segments",
        "prompts",
        "prompt_only",
        "turns",
        "text",
        "language_modeling",
        "best_of",
        "programs",
        "harmful",
    ] = Field(
        "auto", description="format of the source rows; auto (and trl) look at the columns of each file's first rows"
    )
    files: str | None = Field(
        None, description="pattern of the files to read where the input is a directory, such as 'train*.jsonl'"
    )
    dataset: str | None = Field(
        None, description="name written to the `dataset` column; default is the input's file name"
    )
    origin: Literal["human", "ai", "verifier", "constraint", "revision", "implicit", "conversion"] = Field(
        "human", description="where the labels come from; AlpacaEval rows are always ai"
    )
    column_map: dict[str, str] = Field(
        default_factory=dict, description="{our column: source column}; a.b reaches into structs"
    )
    prompt_column: str | None = Field(None, description="source column of the prompt, short for column_map.prompt")
    chosen_column: str | None = Field(None, description="source column of the preferred answer")
    rejected_column: str | None = Field(None, description="source column of the other answer")
    completion_column: str | None = Field(None, description="source column of the completion")
    label_column: str | None = Field(None, description="source column of the label")
    score_column: str | None = Field(None, description="source column of the score")
    messages_column: str | None = Field(None, description="source column of the messages")
    text_column: str | None = Field(None, description="source column of the text")
    answer_column: str | None = Field(None, description="source column of the reference answer")
    answer_type: Literal["integer", "number", "latex", "text", "mc"] | None = Field(
        None,
        description=(
            "how reference answers are verified; default: integer or number where they look like it, latex with a \\,"
            " $, ^ or final %, else text. An answer that its own verifier does not mark right is refused (data.prompts)"
        ),
    )
    choice_base: Literal[0, 1] = Field(
        0,
        description=(
            "what the first choice of a multiple-choice question is called where the answer is a number and the source"
            " labels no choices: 0 as in MMLU and HellaSwag"
        ),
    )
    choice_instruction: bool = Field(
        False,
        description=(
            'write behind the options of multiple-choice prompts to end with "Therefore, the answer is (X)", the'
            " sentence that their verifier reads: for rl and rejection; evaluate asks so by itself (eval.mc_generation)"
        ),
    )
    step_labels: Literal["auto", "zero_one", "minus_one"] = Field(
        "auto",
        description=(
            "what numbers as step labels say: minus_one = -1 wrong, 0 neutral, 1 good; zero_one = 0 wrong, 1 good; auto"
            " is minus_one, and refuses a file that holds 0 and no -1. true and false need no saying (data.stepwise)"
        ),
    )
    label_map: dict[str, Literal["A", "B", "tie"]] = Field(
        default_factory=dict,
        description=(
            "what the labels of A/B comparisons say where they are neither A, B, tie nor points of a scale: {label: A,"
            " B or tie}, such as {1: A, 2: B}"
        ),
    )
    limit: int | None = Field(None, ge=1, description="read only so many rows [rows]")

    validation_fraction: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "share of groups in the validation split, in [0, 1); data with held-out rows (a column split, files or"
            " folders called train, validation, test) keeps its splits"
        ),
    )
    test_fraction: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of groups in the test split, in [0, 1); data with held-out rows keeps its splits",
    )
    salt: str = Field("split-v1", description="salt of the split hash; the same salt never moves a row (data.split)")
    halves: bool = Field(
        False,
        description=(
            "split into rm_a and rm_b instead (train-RM / test-RM studies); validation and test rows of a dataset stay"
            " held out from both"
        ),
    )
    group_by: Literal["auto", "prompt", "opening"] = Field(
        "auto",
        description=(
            "what a split never cuts: prompt, or opening = all conversations with the same first user turn, both up to"
            " case and white space and whatever the system message; auto is the column group_id where there is one,"
            " else opening. Source: data.split"
        ),
    )

    deduplicate: Literal["auto", "exact", "off"] = Field(
        "auto",
        description=(
            "exact: equal content; auto: prompts and demonstrations also up to case and whitespace (data.dedup)"
        ),
    )
    contradictions: Literal["flag_second", "drop_both", "keep_as_votes", "off"] = Field(
        "flag_second",
        description=(
            "pairs whose reverse was already seen (data.validate); keep_as_votes makes one pair of all, with the"
            " majority's share as label_prob. Several annotators of one comparison always are votes, except with"
            " drop_both (they must agree) and off (a pair each) (data.aggregate)"
        ),
    )
    near_duplicates: Literal["off", "keep_first", "group"] = Field(
        "off",
        description=(
            "prompts with Jaccard >= near_threshold: keep the first, or keep all in one split group (data.dedup)"
        ),
    )
    near_threshold: float = Field(
        0.8, gt=0, le=1, description="Jaccard of 5-word shingles that makes a near duplicate (data.dedup)"
    )
    decontaminate: Literal["off", "coverage", "any"] = Field(
        "off",
        description="drop rows that overlap with the `benchmarks` input: Tulu 3 coverage rule, or any shared n-gram",
    )
    decontaminate_n: int = Field(8, ge=1, description="n of the n-grams [words] (data.decontam, Tulu 3)")
    decontaminate_threshold: float = Field(
        0.5, gt=0, lt=1, description="coverage above which a row is contaminated (Tulu 3)"
    )

    min_chars: int = Field(0, ge=0, description="shorter completions are too_short [characters]")
    max_chars: int | None = Field(
        1_000_000, ge=1, description="rows with more text are too_long [characters]; null: no limit"
    )
    max_quarantine_fraction: float = Field(
        0.2, ge=0, le=1, description="the stage fails when more rows than this are damaged (data.validate)"
    )

    tie_policy: Literal["drop", "soft"] = Field(
        "drop", description="ties: dropped, or kept with label_prob 0.5 (data.binarise)"
    )
    soft_label: Literal["auto", "none", "prob", "linear"] = Field(
        "auto",
        description=(
            "label_prob of pairs: auto = where the source has a probability, prob = also vote shares, linear = from "
            "the Likert label, none = hard labels (data.binarise)"
        ),
    )
    soft_label_eps: float = Field(0.05, gt=0, lt=0.5, description="clip of linear soft labels (data.binarise)")
    n_points: int | None = Field(
        None,
        ge=2,
        le=127,
        description=(
            "points of the scale of A/B labels that are numbers, without an n_points column: 5 for 1 = A much "
            "better to 5 = B much better (data.likert); such labels are refused without it or label_map"
        ),
    )
    orientation: Literal["low_is_a", "high_is_a"] = Field(
        "low_is_a", description="low_is_a: label 1 = A much better (data.likert)"
    )
    margin_mode: Literal["none", "score_diff", "llama2_small", "llama2_large"] = Field(
        "none", description="margin column of pairs (data.margin)"
    )
    pair_mode: Literal["all", "best_vs_rest", "best_worst", "adjacent", "best_vs_random", "rank_gap"] = Field(
        "all", description="which pairs a ranking gives (data.ranking)"
    )
    min_margin: float | None = Field(
        None,
        gt=0,
        description=(
            "smallest score gap of a pair made of ratings; null: any difference, the smallest step of the scale "
            "(data.ratings)"
        ),
    )
    threshold: float | None = Field(
        None, description="ratings at or above it are desirable / good enough for demonstrations"
    )
    dead_band: float = Field(0.0, ge=0, description="ratings nearer to the threshold than this are dropped")
    aspect_weights: dict[str, float] = Field(
        default_factory=dict,
        description=(
            "the score of a rating as the weighted sum of its aspects, such as {helpfulness: 0.7, honesty: 0.3};"
            " weights sum to 1. Default: the score that the source gives, else the mean of the aspects (data.ratings)"
        ),
    )
    event_map: dict[str, float] = Field(
        default_factory=dict,
        description=(
            "what signals of a product say of an answer (rows with prompt, response, action): {action: weight}, below 0"
            " for a bad answer, 0 to leave it out; added to thumbs_up 1, thumbs_down -1, regenerate -0.5, close_tab"
            " -0.25, angry_followup -0.5, copy 0.5, and edit (the edited text over the answer) (data.implicit)"
        ),
    )
    scale_min: float | None = Field(None, description="lowest possible score; null: not checked")
    scale_max: float | None = Field(None, description="highest possible score; null: not checked")
    max_pairs_per_prompt: int | None = Field(
        None, ge=1, description="cap for pairs made of thumbs or ratings; null: all"
    )
    on_conflict: Literal["drop", "majority"] = Field(
        "drop",
        description=(
            "a completion that is both chosen and rejected, or labelled both ways: drop it, or let the majority decide"
            " (data.unpaired)"
        ),
    )
    multiturn: Literal["keep", "all_turns", "final_turn"] = Field(
        "keep",
        description=(
            "conversations: one row with all assistant turns trained, one row per turn, or the last turn"
            " (data.multiturn)"
        ),
    )
    system_prompts: Literal["keep", "merge", "drop"] = Field(
        "keep",
        description=(
            "system messages: kept; merge = written before the first user message, for chat templates without a system"
            " role (Gemma) or that lose it (Mistral); drop = left out. Those with tool definitions are kept. Give all"
            " data of a model the same"
        ),
    )
    reasoning: Literal["think", "drop"] = Field(
        "think",
        description=(
            "reasoning of assistant messages in a field of its own (reasoning_content, reasoning, thinking): written"
            " before their text between <think> and </think> (synth.cold_start), which templates of Qwen 3, DeepSeek-R1"
            " and GLM read; drop = not trained (it stays in extra_json)"
        ),
    )
    tool_calls: Literal["keep", "text"] = Field(
        "keep",
        description=(
            "tools and tool calls: kept, for chat templates that show them; text = written into the messages' texts,"
            ' calls as <tool_call>{"name": ..., "arguments": ...}</tool_call>, for templates that do not'
            " (synth.tool_data)"
        ),
    )
    balance: Literal["none", "per_conversation"] = Field(
        "none", description="per_conversation: weight 1/samples (data.multiturn)"
    )

    @field_validator("label_map", mode="before")
    @classmethod
    def _texts(cls, value):
        return {str(label): meaning for label, meaning in value.items()} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _possible(self):
        from stages.ingestion.adapters import FORMATS
        from stages.ingestion.formats import SYNONYMS, _COMMON

        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError(
                "validation_fraction + test_fraction must leave rows for training; write for example 0.05 and 0.05"
            )
        if self.halves and self.validation_fraction + self.test_fraction > 0:
            raise ValueError("halves replaces the other splits; set validation_fraction and test_fraction to 0")
        summing_to_1("aspect_weights", self.aspect_weights, "{helpfulness: 0.7, honesty: 0.3}")
        known = set(SYNONYMS) | set(_COMMON) | {"source"}
        for _, required, more in FORMATS.values():
            known |= set(required) | set(more)
        for name in self.column_map:
            if name not in known:
                raise ValueError(
                    f"column_map has {name!r}, which is no column of ours; write {{our column: source column}} with one"
                    f" of: {', '.join(sorted(known))}"
                )
        return self

    def columns(self) -> dict[str, str]:
        """{our column: source column} of all settings that name one."""
        named = {
            name: getattr(self, f"{name}_column")
            for name in ("prompt", "chosen", "rejected", "completion", "label", "score", "messages", "text", "answer")
        }
        return self.column_map | {name: column for name, column in named.items() if column}

    def fractions(self) -> dict[str, float]:
        """Split fractions in threshold order."""
        return {
            "train": 1.0 - self.validation_fraction - self.test_fraction,
            "validation": self.validation_fraction,
            "test": self.test_fraction,
        }


def behind(config: Config, paths: dict[str, Path]) -> str:
    """The rows of a rubric, which hold the functions and files that it only names; a rubric that is wrong is refused by
    the stage.
    """
    if config.kind != "rubric_items/1":
        return ""
    from stages.reward.rubrics import read_rubric
    from storage.files import canonical_json

    try:
        return canonical_json(read_rubric(str(paths["data"])))
    except (ValueError, OSError):
        return ""


SPEC = StageSpec(
    name="ingest",
    config=Config,
    behind=behind,
    inputs={
        "data": InputSpec(
            "file", named=True, doc="file, directory, pattern or hub id with raw rows; a dataset is converted to `kind`"
        ),
        "benchmarks": InputSpec("file", required=False, many=True, doc="evaluation sets for decontaminate"),
    },
    outputs={
        "data": OutputSpec("dataset", doc="the rows kept"),
        "quarantine": OutputSpec("dataset", doc="the rows refused, with codes (quarantine/1)"),
    },
    doc="raw files to a validated dataset",
)


def native_kind(path: str, config: Config | None = None) -> str | None:
    """Kind of the rows behind a path, from its first readable rows; None if no format fits."""
    from stages.ingestion.formats import kind_of
    from stages.ingestion.published import adapter_of
    from stages.ingestion.rules import Bad
    from stages.ingestion.sources import Record, SourceError, find_files, head_rows
    from storage.datasets import DatasetError, open_dataset

    config = config or Config()
    try:
        return open_dataset(path).kind
    except DatasetError:
        pass
    try:
        files = find_files(path, config.files)
    except SourceError:
        return None
    found = None
    for source in files:
        adapter = adapter_of(source, config)
        if adapter is None:
            continue
        if adapter.name == "events":
            return "pairs/1" if config.kind == "pairs/1" else "unpaired/1"  # whatever the first row is
        for record in adapter.records(Record(line, None, row, None) for line, row in enumerate(head_rows(source), 1)):
            try:
                if record.row is not None and record.code is None:
                    return adapter(record.row)[0]
            except Bad:
                continue
        found = found or kind_of(adapter.name, config.kind)  # nothing of it can be read: the quarantine will say why
    return found


def matching_kind(path: str, kinds: tuple[str, ...]) -> str | None:
    """The first of `kinds` that the data is, else the first that it can be converted to; None if none. Kinds that only
    stages make are no file's.
    """
    from stages.ingestion.conversions import route

    kinds = tuple(kind for kind in kinds if kind in get_args(Config.model_fields["kind"].annotation))

    have = native_kind(path)
    if have is None:
        return None
    if have in kinds:
        return have
    return next((kind for kind in kinds if native_kind(path, Config(kind=kind)) == kind or route(have, kind)), None)


def run(stage) -> None:
    """Read, check, convert and write; fail only after everything is accounted for."""
    if stage.config.kind == "rubric_items/1":
        from stages.reward.rubrics import ingest

        return ingest(stage)
    if stage.config.kind == "principles/1":
        from stages.reward.principles import ingest

        return ingest(stage)
    from stages.ingestion.pipeline import Ingestion

    Ingestion(stage, CHECKPOINT_ROWS).run()
