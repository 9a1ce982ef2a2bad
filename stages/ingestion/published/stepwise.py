"""Solutions with a label on each step: PRM800K, Math-Shepherd."""

from __future__ import annotations

from stages.ingestion.published.forms import Form, are_dicts, listed, without
from stages.ingestion.rules import Bad


def _prm800k(row: dict, options) -> list[dict]:
    """The path that was chosen, and for every step the rated alternatives to it, each a row that ends with it."""
    question, steps = row["question"], row["label"].get("steps")
    if not are_dicts(steps):
        raise Bad("wrong_type")
    texts: list[str] = []
    labels: list[int] = []
    out = []
    finished = row["label"].get("finish_reason") == "solution"

    def solution(texts: list[str], labels: list[int], whole: bool) -> dict:
        return without(
            row,
            "question",
            "label",
            "labeler",
            "is_quality_control_question",
            "pre_generated_steps",
            prompt=question.get("problem"),
            answer=question.get("ground_truth_answer"),
            completions=texts,
            labels=labels,
            annotator_id=row.get("labeler"),
            is_quality_control=row.get("is_quality_control_question"),
            solution_correct=whole and finished and -1 not in labels,
        )

    for step in steps:
        alternatives, chosen = step.get("completions") or [], step.get("chosen_completion")
        rated = [
            (index, item)
            for index, item in enumerate(alternatives)
            if item.get("rating") in (-1, 0, 1) and item.get("rating") is not None
        ]
        taken = (
            chosen
            if chosen is not None
            else rated[0][0]
            if len(rated) == 1 and step.get("human_completion") is None
            else None
        )
        if options.kind in ("auto", "stepwise/1"):
            out += [
                solution([*texts, item["text"]], [*labels, item["rating"]], False)
                for index, item in rated
                if index != taken
            ]
        if taken is not None and any(index == taken for index, _ in rated):
            texts, labels = [*texts, alternatives[taken]["text"]], [*labels, alternatives[taken]["rating"]]
        elif isinstance(step.get("human_completion"), dict) and isinstance(step["human_completion"].get("text"), str):
            texts, labels = [*texts, step["human_completion"]["text"]], [*labels, 1]
        else:
            break
    if not texts and not out:
        raise Bad("step_label_length")
    return out + ([solution(texts, labels, True)] if texts else [])


_STEP_MARK = "\u043a\u0438"  # Math-Shepherd's: stands in `input` where `label` has + or -


def _math_shepherd(row: dict, options) -> list[dict]:
    """A question and its steps, each closed by a mark that in `label` is + (right) or - (wrong)."""
    steps, label, marks = row["input"].split(_STEP_MARK), row["label"], []
    if steps[-1].strip():
        raise Bad("step_label_length")
    at = 0
    for step in steps[:-1]:
        at += len(step)
        marks.append(label[at : at + 1])
        at += 1
    if not marks or any(mark not in ("+", "-") for mark in marks):
        raise Bad("step_label_length")
    first = steps[0].find("Step 1:")
    if first < 0:
        raise Bad("missing_column")
    texts = [steps[0][first:].strip(), *(step.strip() for step in steps[1:-1])]
    return [
        without(
            row,
            "input",
            "label",
            prompt=steps[0][:first].strip(),
            completions=texts,
            labels=[mark == "+" for mark in marks],
            separator="\n",
        )
    ]


PRM800K = Form(
    ("question", "label"),
    _prm800k,
    lambda row, options: (
        isinstance(row["question"], dict) and isinstance(row["label"], dict) and "steps" in row["label"]
    ),
)
MATH_SHEPHERD = Form(
    ("input", "label"),
    _math_shepherd,
    lambda row, options: isinstance(row["input"], str) and isinstance(row["label"], str) and _STEP_MARK in row["input"],
)
LABELLED_STEPS = listed("steps", "labels")
