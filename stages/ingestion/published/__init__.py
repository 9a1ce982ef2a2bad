"""Published datasets in columns of their own -> rows in columns that `formats.py` reads.

A :class:`Form` knows a dataset by its columns and says in ours what its row says: which answer was preferred, what a
score is of, where the question stands. One row may hold several of ours (the four rated answers of UltraFeedback), and
several rows one (the messages of an OpenAssistant tree). What a row says twice, and differently (PKU-SafeRLHF: which
answer is better, which is safer), has to be chosen by a setting.

| datasets | become |
|---|---|
| HelpSteer, HelpSteer2 (helpfulness is the score, `aspect_weights` another), UltraFeedback, Prometheus' feedback collection (kind=ratings/1) | ratings |
| HelpSteer2-Preference, HelpSteer3, PKU-SafeRLHF (`label_column=better_response_id` or `safer_response_id`), SHP, WebGPT, JudgeLM, summarize_from_feedback, Chatbot Arena, JudgeBench, Prometheus' preference collection (kind=pairs/1) | comparisons |
| HelpSteer3's edits (the edited answer is preferred), HHH alignment | pairs |
| Nectar, OpenAssistant (messages or trees), Stack Exchange preferences | rankings |
| BeaverTails, conversations with a label (LLaMA-Factory's kto_tag), signals of a product (prompt, response, action) | unpaired; edits as pairs |
| verl and DAPO, DeepMath, Open-Reasoner-Zero, SYNTHETIC-1 and 2, NuminaMath, OpenR1 and OpenMathReasoning (kind=prompts/1), prompts with `solution` or `ground_truth` | prompts with answers or tests |
| TruthfulQA's questions with correct and incorrect answers | multiple choice |
| PRM800K, Math-Shepherd | stepwise |
| Capybara, LIMA, OpenOrca, s1K, xLAM, Glaive's function calls, OpenMathReasoning and OpenMathInstruct, ProsocialDialog, Alpaca with `history`, MBPP (kind=demonstrations/1) | demonstrations |
"""

from __future__ import annotations

from stages.ingestion.formats import ALIASES, Adapter, detect, rename
from stages.ingestion.published import (
    comparisons,
    demonstrations,
    pairs,
    prompts,
    rankings,
    ratings,
    stepwise,
    unpaired,
)
from stages.ingestion.published.forms import Form, records_of
from stages.ingestion.sources import Record, SourceFile, head_rows


def adapter_of(source: SourceFile, options) -> Adapter | None:
    """The reader of a file's rows, from the first of them, by `options.format`; None where no format fits."""
    wanted, columns = ALIASES.get(options.format, options.format), options.columns()
    rows = [rename(row, columns) if columns else row for row in head_rows(source)]
    form = form_of(rows, options)
    if form is not None:
        read = [
            record.row
            for record in records_of(form, (Record(index, None, row, None) for index, row in enumerate(rows)), options)
            if record.row is not None
        ]
        # where all of them are refused, their codes say why
        name = form.format(options) if form.format else detect(read) or detect(rows) or "prompts"
        if wanted in ("auto", name):
            return Adapter(name, options, lambda records: records_of(form, records, options, columns))
    name = detect(rows) if wanted == "auto" else wanted
    return None if name is None else Adapter(name, options)


def form_of(rows: list[dict], options) -> Form | None:
    """The published form that most of the rows have, None where most have none."""
    for form in FORMS:
        if 2 * sum(form.of(row, options) for row in rows) > len(rows):
            return form
    return None


#: In order of precedence: forms with columns that nothing else has first.
FORMS: tuple[Form, ...] = (
    ratings.HELPSTEER,
    comparisons.HELPSTEER2,
    comparisons.HELPSTEER3,
    ratings.ULTRAFEEDBACK,
    comparisons.PKU,
    unpaired.BEAVERTAILS,
    demonstrations.PROSOCIAL,
    rankings.NECTAR,
    rankings.STACK_EXCHANGE,
    rankings.OASST_MESSAGES,
    rankings.OASST_TREES,
    unpaired.EVENTS,
    comparisons.SHP,
    comparisons.WEBGPT,
    comparisons.JUDGELM,
    pairs.HHH,
    comparisons.SUMMARIES,
    ratings.SUMMARY_AXES,
    comparisons.ARENA,
    comparisons.ARENA_KAGGLE,
    stepwise.PRM800K,
    stepwise.MATH_SHEPHERD,
    prompts.VERL,
    prompts.DEEPMATH,
    prompts.PROBLEM,
    prompts.MBPP,
    demonstrations.S1K,
    demonstrations.XLAM,
    demonstrations.GLAIVE,
    ratings.PROMETHEUS,
    comparisons.PROMETHEUS,
    pairs.EDITED,
    prompts.ORZ,
    prompts.SYNTHETIC,
    prompts.OPEN_MATH,
    prompts.TRUTHFUL,
    rankings.RANKED,
    stepwise.LABELLED_STEPS,
    pairs.CONVERSATION,
    pairs.IN_TWO_COLUMNS,
    unpaired.LABELLED_TALK,
    demonstrations.CAPYBARA,
    demonstrations.LIMA,
    demonstrations.HISTORY,
    comparisons.TWO_ANSWERS,
    prompts.WITH_TRUTH,
    demonstrations.ANSWERED,
    demonstrations.CAPITALS,
)
