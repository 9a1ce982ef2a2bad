"""Multiple choice as text: how a question and its options stand in a prompt, and the forms under which it is read
(eval.mc_letter, eval.mc_answer_text, eval.mc_generation).

A ``prompts/1`` row with ``choices`` has answer_type mc, the letter of the right choice as ``answer``, and a last
message that ends with its options::

    What do bees make?
    A. milk
    B. honey

and, where it is to be answered by text, with :data:`INSTRUCTION` behind them (``ingest choice_instruction=true``, for
RL and rejection sampling: the verifier reads the sentence that it asks for). What is asked without all that
(:func:`question_of`) is the text before. Where the choices continue the text rather than answer it (HellaSwag),
``extra_json`` says ``{"choices_are": "continuations"}``.
"""

from __future__ import annotations

import json
import string
from collections.abc import Sequence

LETTERS = string.ascii_uppercase
READINGS = ("letter", "text", "generation")
INSTRUCTION = 'Reason concisely and end with "Therefore, the answer is (ANSWER_LETTER)".'
# what stands before a choice whose own likelihood is taken (acc_mutual_info; Brown et al. 2020, section 2.4)
NEUTRAL = "Answer:"


def options_of(choices: Sequence[str]) -> str:
    """The lines "A. ...", "B. ..." of up to 26 choices."""
    return "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices))


def with_options(question: str, choices: Sequence[str]) -> str:
    """A question and its options; one that ends with them already stays as it is."""
    options = options_of(choices)
    return question if question.endswith("\n" + options) else f"{question.rstrip()}\n{options}"


def question_of(row: dict) -> str:
    """What a row asks, without its options and the instruction."""
    return (
        (row["prompt"][-1].get("content") or "")
        .removesuffix("\n\n" + INSTRUCTION)
        .removesuffix("\n" + options_of(row["choices"]))
        .rstrip()
    )


def is_choice(row: dict) -> bool:
    """Whether a row has choices that it can be read by."""
    return bool(row.get("choices"))


def gold_of(row: dict) -> int:
    """Index of the right choice. Raises BadGold where the answer is no letter of one."""
    from stages.verification.golds import BadGold

    letter = (row.get("answer") or "").strip().strip("().").upper()
    index = LETTERS.find(letter) if len(letter) == 1 else -1
    if not 0 <= index < len(row["choices"]):
        raise BadGold(
            f"answer {letter[:40]!r} is no letter of its {len(row['choices'])} choices; write one of"
            f" {LETTERS[: len(row['choices'])]}"
        )
    return index


def asked(row: dict, reading: str, chat: bool) -> str:
    """The text that asks a row under a reading: as the user's message (``chat``), or as plain text that the answer
    continues after a space.
    """
    question = question_of(row)
    if reading == "letter":
        return f"{with_options(question, row['choices'])}\nAnswer:"
    if reading == "generation":
        return f"{with_options(question, row['choices'])}\n\n{INSTRUCTION}"
    if reading != "text":
        raise ValueError(f"unknown reading {reading!r} of multiple choice; write one of {', '.join(READINGS)}")
    return question if chat or continued(row) else f"Question: {question}\nAnswer:"


def continued(row: dict) -> bool:
    """Whether the choices continue the text instead of answering it."""
    return bool(row.get("extra_json")) and json.loads(row["extra_json"]).get("choices_are") == "continuations"


def stated(row: dict, reading: str) -> str:
    """The right answer of a row as it is given under a reading (in few-shot examples)."""
    gold = gold_of(row)
    return {
        "letter": LETTERS[gold],
        "text": row["choices"][gold],
        "generation": f"Therefore, the answer is ({LETTERS[gold]}).",
    }[reading]
