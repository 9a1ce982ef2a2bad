"""Multiple-choice files as people have them -> ``prompts/1`` rows with ``choices`` (eval.mc_letter).

| source | question | choices | answer |
|---|---|---|---|
| MMLU, MMLU-Pro | question | choices or options: list of texts | answer: index from 0, or letter |
| ARC, OpenBookQA, CommonsenseQA | question or question_stem | choices: {text: [...], label: [...]} or [{text, label}] | answerKey: a label |
| HellaSwag | ctx | endings: list of texts that continue it | label: index from 0 |
| PIQA, WinoGrande, BoolQ-like tables | goal, sentence, question | sol1 sol2; option1 option2; A B C D ... | label or answer |
| TruthfulQA | question | mc1_targets: {choices, labels}, in an order drawn from the question; mc2_targets stay beside the row | the label that is 1 |
| GPQA | Question | Correct Answer, Incorrect Answer 1 to 3, in an order drawn from the question | Correct Answer |
| BBQ | context and question | ans0 ans1 ans2 | label: index from 0; categories are those of context_condition beside its own |
| BoolQ | passage and question | no, yes | answer: true or false |

What a question is about, a passage, article or context in a column of its own (RACE, SIQA, BoolQ), stands before it.

An answer is a label of its choice, a letter, a number (``choice_base`` says what the first choice is called), or the
text of one choice. One that names no choice, or could mean two, is refused (``choice_unknown``).
"""

from __future__ import annotations

import math
import re
from typing import Any

from stages.ingestion.rules import Bad
from stages.verification.choices import INSTRUCTION, LETTERS, with_options

QUESTIONS = ("question", "question_stem", "ctx", "goal", "sentence", "query", "prompt")
ANSWERS = (
    "answerKey",
    "answer_key",
    "answer",
    "label",
    "gold",
    "answer_index",
    "answer_idx",
    "correct_answer",
    "target",
    "correct",
)
# choices in columns of their own: sol1 sol2 ...
SPREAD = (("sol", 1), ("option", 1), ("option_", 1), ("choice", 1), ("ending", 0), ("ans", 0))
GPQA = ("Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3)))
PASSAGES = ("passage", "article", "context")
USED = (
    "category",
    "subject",
    "system",
    "Question",
    *GPQA,
    *PASSAGES,
    "answerA",
    "answerB",
    "answerC",
    "choices",
    "options",
    "endings",
    "mc1_targets",
    *QUESTIONS,
    *ANSWERS,
    *LETTERS[:10],
    *LETTERS[:10].lower(),
)


def plainly(row: dict) -> dict:
    """A row of GPQA or BBQ in the columns of the others; any other row as it is.

    GPQA's choices are put in an order that depends on the question and the answers only, so that the right one stands
    anywhere and every run asks the same.
    """
    if isinstance(row.get("Question"), str) and all(_filled(row.get(name)) for name in GPQA):
        texts = [str(row[name]).strip() for name in GPQA]
        order = _drawn(row["Question"], texts)
        named = next((row[name] for name in ("High-level domain", "Subdomain") if _filled(row.get(name))), None)
        return {key: value for key, value in row.items() if key not in ("Question", *GPQA)} | {
            "question": row["Question"].strip(),
            "choices": [texts[i] for i in order],
            "answer": LETTERS[order.index(0)],
            **({} if named is None else {"category": str(named)}),
        }
    if (
        all(_filled(row.get(name)) for name in ("context", "question", "ans0", "ans1", "ans2"))
        and row.get("label") is not None
    ):
        from stages.evaluation.bbq import sides_of

        about = "/".join(str(row[name]) for name in ("category", "context_condition") if _filled(row.get(name)))
        sides = sides_of(row)
        return {key: value for key, value in row.items() if key != "context"} | {
            "question": f"{row['context'].rstrip()} {row['question'].strip()}",
            **({"category": about} if about else {}),
            **({"bbq": sides} if sides else {}),
        }
    if isinstance(row.get("answer"), bool) and _filled(row.get("question")):
        row = row | {"choices": ["no", "yes"], "answer": int(row["answer"])}
    # SIQA, whose labels begin with 1
    if isinstance(row.get("question"), str) and all(_filled(row.get(f"answer{letter}")) for letter in "ABC"):
        row = {key: value for key, value in row.items() if key not in ("answerA", "answerB", "answerC", "label")} | {
            "choices": {"text": [row[f"answer{letter}"] for letter in "ABC"], "label": ["1", "2", "3"]},
            "answer": row.get("label"),
        }
    return behind_passage(row)


def _drawn(question: Any, texts: list[str]) -> list[int]:
    """An order of choices that depends on the question and on them only."""
    from storage.files import sha256_text

    return sorted(range(len(texts)), key=lambda i: sha256_text(f"{question}\n{texts[i]}\n{i}"))


def behind_passage(row: dict) -> dict:
    """The row with its question behind the passage that it is about, where a column of its own holds one."""
    name = next((name for name in PASSAGES if isinstance(row.get(name), str) and row[name].strip()), None)
    if name is None or not isinstance(row.get("question"), str):
        return row
    return {key: value for key, value in row.items() if key != name} | {
        "question": f"{row[name].rstrip()}\n\n{row['question'].lstrip()}"
    }


def choices_of(row: dict) -> tuple[list[str], list[str] | None, tuple[str, ...]] | None:
    """(texts, their labels where the source gives some, columns they were read from), or None where a row has no
    choices.
    """
    for name in ("choices", "options", "endings", "mc1_targets"):
        found = row.get(name)
        if isinstance(found, str) and found and (name == "choices" or found[0] in "[{"):
            raise Bad("wrong_type")  # a list that was written as text and is no JSON
        if name == "mc1_targets" and isinstance(found, dict):
            return (*_texts(found.get("choices")), (name,))
        if isinstance(found, dict) and "text" in found:
            texts, _ = _texts(found["text"])
            labels = found.get("label")
            return (
                texts,
                [str(label) for label in labels] if isinstance(labels, list) and len(labels) == len(texts) else None,
                (name,),
            )
        # {"A": ..., "B": ...}; in a table what a question lacks is null
        if isinstance(found, dict) and found and all(key in LETTERS for key in found):
            letters = sorted(key for key in found if found[key] is not None)
            return _texts([found[key] for key in letters])[0], letters, (name,)
        if isinstance(found, list) and found:
            return (*_texts(found), (name,))
    for letters in (LETTERS, LETTERS.lower()):
        columns = [letter for letter in letters[:10] if _filled(row.get(letter))]
        if len(columns) > (1 if _question(row) != "prompt" else 2) and columns == list(letters[: len(columns)]):
            return _texts([row[letter] for letter in columns])[0], None, tuple(columns)
    for stem, first in SPREAD:
        columns = []
        while _filled(row.get(f"{stem}{first + len(columns)}")):
            columns.append(f"{stem}{first + len(columns)}")
        if len(columns) > 1:
            return (
                _texts([row[name] for name in columns])[0],
                [name.removeprefix(stem) for name in columns] if first == 1 and stem.startswith("option") else None,
                tuple(columns),
            )
    return None


def is_multiple_choice(row: dict) -> bool:
    """Whether a source row asks a question with choices and says which one is right, or how groups of people answer
    it.
    """
    row = plainly(row)
    if _question(row) is None or (
        _answer(row) is None
        and not isinstance(row.get("mc1_targets"), dict)
        and not isinstance(row.get("groups"), dict)
    ):
        return False
    try:
        return choices_of(row) is not None
    except Bad:  # its quarantine code will say what is wrong with them
        return True


def multiple_choice(row: dict, options) -> tuple[str, dict, set]:
    """A ``prompts/1`` row of one source row. Raises Bad."""
    from stages.ingestion.fields import to_prompt

    row = plainly(row)
    found, name, answered = choices_of(row), _question(row), _answer(row)
    name = "prompt" if "prompt" in options.columns() else name  # named by the user: not what else looks like it
    answered = "answer" if "answer" in options.columns() else answered
    if found is None or name is None:
        raise Bad("missing_column")
    texts, labels, columns = found
    if not 2 <= len(texts) <= len(LETTERS) or not all(text.strip() for text in texts):
        raise Bad("choice_unknown")
    prompt = to_prompt(row[name], row.get("system"))
    if not (prompt and prompt[-1].get("content") or "").strip():
        raise Bad("empty_prompt")
    if row.get("mc1_targets") is not None:
        right = [index for index, mark in enumerate(row["mc1_targets"].get("labels") or ()) if mark == 1]
        if len(right) != 1 or right[0] >= len(texts):
            raise Bad("choice_unknown")
        gold = right[0]
        if gold == 0 and len(set(texts)) == len(texts):  # as in the published file, where it would always be A
            order = _drawn(row[name], texts)
            texts, gold = [texts[i] for i in order], order.index(gold)
    elif answered is None and isinstance(row.get("groups"), dict):  # an opinion: nothing is right
        from stages.evaluation.opinions import wrong

        if wrong(row["groups"], len(texts)):
            raise Bad("choice_unknown")
        gold = None
    else:
        gold = chosen(row.get(answered), texts, labels, options.choice_base)
    group = next(
        (column for column in ("category", "subject") if isinstance(row.get(column), (str, int)) and row[column] != ""),
        None,
    )
    prompt = [
        *prompt[:-1],
        {
            **prompt[-1],
            "content": (
                with_options(prompt[-1]["content"], texts)
                + (f"\n\n{INSTRUCTION}" if options.choice_instruction else "")
            ),
        },
    ]
    read = {name, answered, group, "system", *columns}
    # what only looks like a part of the question
    extra = {key: row[key] for key in USED if key not in read and row.get(key) is not None}
    extra |= {"choices_are": "continuations"} if "endings" in columns or "ending0" in columns else {}
    extra |= {"bbq": row["bbq"]} if isinstance(row.get("bbq"), dict) else {}
    return (
        "prompts/1",
        {
            "prompt": prompt,
            "answer": None if gold is None else LETTERS[gold],
            "answer_type": None if gold is None else "mc",
            "choices": texts,
            "_extra": extra,
            **({"category": str(row[group])} if group else {}),
        },
        set(),
    )


def chosen(answer: Any, texts: list[str], labels: list[str] | None, base: int = 0) -> int:
    """Index of the choice that an answer names. Raises Bad(missing_column) without one, Bad(choice_unknown) where it
    names none, or two.

    Labels of the source count first, and a number or letter that is none of its numbers or letters names nothing.
    Without labels of its form a number is an index from ``base``, a letter the choice at its place, anything else the
    text of a choice.
    """
    if answer is None:
        raise Bad("missing_column")
    if (
        isinstance(answer, bool)
        or not isinstance(answer, (int, float, str))
        or (isinstance(answer, float) and not math.isfinite(answer))
    ):
        raise Bad("wrong_type")
    said = str(int(answer)) if isinstance(answer, float) and answer == int(answer) else str(answer).strip()
    meant = {index for index, text in enumerate(texts) if text.strip() == said} if isinstance(answer, str) else set()
    plain = said.strip("().").upper()
    named = [label.strip("().").upper() for label in labels or ()]
    if labels is not None and said in labels:
        meant = {labels.index(said)}
    elif plain in named:
        meant |= {index for index, label in enumerate(named) if label == plain}
    elif re.fullmatch(r"\d+", said) and not any(label.isdigit() for label in named):
        # a source that counts has no other numbers
        index = int(said) - base
        meant |= {index} if 0 <= index < len(texts) else set()
    elif len(plain) == 1 and plain in LETTERS[: len(texts)] and not any(label in LETTERS for label in named):
        meant |= {LETTERS.index(plain)}
    if len(meant) != 1:
        raise Bad("choice_unknown")
    return meant.pop()


def _filled(value: Any) -> bool:
    return (
        isinstance(value, (str, int, float))
        and not isinstance(value, bool)
        and str(value).strip() != ""
        and value == value
    )


def _question(row: dict) -> str | None:
    return next((name for name in QUESTIONS if isinstance(row.get(name), (str, list)) and row[name]), None)


def _answer(row: dict) -> str | None:
    return next((name for name in ANSWERS if row.get(name) is not None and row[name] != ""), None)


def _texts(found: Any) -> tuple[list[str], list[str] | None]:
    """(texts, labels) of a list of texts, numbers or {text, label}."""
    if not isinstance(found, list):
        raise Bad("wrong_type")
    # AQuA: "A)21"
    if len(found) > 1 and all(
        isinstance(item, str) and re.match(rf"\(?{letter}\)", item) for letter, item in zip(LETTERS, found)
    ):
        found = [item[item.index(")") + 1 :].strip() for item in found]
    if found and all(isinstance(item, dict) for item in found):
        if not all(isinstance(item.get("text"), str) for item in found):
            raise Bad("wrong_type")
        labels = [item.get("label") for item in found]
        return [item["text"] for item in found], [str(label) for label in labels] if None not in labels else None
    if not all(isinstance(item, (str, int, float)) and not isinstance(item, bool) for item in found):
        raise Bad("wrong_type")
    from stages.ingestion.fields import plain

    return [plain(item).strip() for item in found], None
