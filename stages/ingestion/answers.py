"""Answers that somebody else made, in the forms that files have them (``stages.evaluation.given`` says whose they are).

| form | answer | prompt |
|---|---|---|
| samples of HumanEval, MBPP and others | completion, output, response, generation, prediction, answer ... (``ANSWERS``): a text, messages, or a list of these | task_id, question_id, key, id ..., else its text |
| AlpacaEval's model_outputs | output | instruction |
| a conversation | the last assistant message of ``messages`` | the messages before |
| MT-Bench's model_answer | choices, each with turns | question_id |
| the output of a batch API | response.body.choices, or result.message.content | custom_id |
| lm-evaluation-harness --log_samples | resps | doc |
| datasets of ours: eval_samples/1, candidates/1, demonstrations/1 | as stored | their ids, else the text |
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from stages.evaluation.given import IDS, Answer
from stages.ingestion.sources import Reading, SourceError, find_files, parse_json
from stages.spec import ConfigError

#: Columns with the answer, the first that a row has; the names of lists beside those of one.
ANSWERS = (
    *("completion", "completions", "output", "outputs", "response", "responses", "generation", "generations"),
    *("generated_text", "model_output", "model_answer", "prediction", "predictions", "resps", "answer", "answers"),
)
#: Those of them that hold the right answer where a row has what somebody said elsewhere.
GOLD = ("answer", "answers")
ENDS = {"length": "length", "max_tokens": "length", "stop": "stop", "end_turn": "stop", "stop_sequence": "stop"}


class Read(NamedTuple):
    """A row of answers. where: its place, for people. answers: [] where it holds none, None where whoever was asked gave
    none. code: why the row could not be read, else None."""

    where: str
    row: dict
    answers: list[Answer] | None
    code: str | None = None


def read(stage, name: str = "answers", column: str = "") -> Iterator[Read]:
    """The rows of a dataset, file or directory behind a stage input.

    Args:
        column: that holds the answer; empty: the first of ``ANSWERS``.

    Raises:
        ConfigError: no such file, or a dataset of other rows.
    """
    from storage.datasets import DatasetError, open_dataset

    path = stage.path(name)
    try:
        data = open_dataset(path)
    except DatasetError:
        data = None
    if data is not None:
        if data.kind not in STORED:
            raise ConfigError(
                f"stage {stage.name}: input {name!r} holds rows of kind {data.kind}, in which there are no answers; give"
                f" {', '.join(STORED)}, or a file of answers"
            )
        found = False
        for number, row in enumerate(data.iter_rows(), 1):
            row, answers = STORED[data.kind](row)
            if row is not None:
                found = True
                yield Read(f"row {number}", row, answers)
        if len(data) and not found:
            raise ConfigError(
                f"stage {stage.name}: input {name!r} holds no sampled or greedy answers (its rows are turns of MT-Bench,"
                " or were read by likelihood); give MT-Bench's model_answer file, or samples of an evaluation of prompts"
            )
        return
    try:
        files = find_files(path)
    except SourceError as error:
        raise ConfigError(f"stage {stage.name}: input {name!r}: {error}") from None
    for source in files:
        reading = Reading(source)
        for record in reading:
            row, code = record.row, record.code
            if code is None and row is None:
                row, code = parse_json(record.raw)
            where = f"{source.name}, {'line' if source.format in ('jsonl', 'csv', 'tsv') else 'row'} {record.line}"
            if code is None:
                row = _unpacked(row)
                yield Read(where, row, _in(row, column))
            else:
                yield Read(where, {}, [], code)
        if reading.damage:
            stage.warn(
                "damaged_file",
                f"{source.name}: {reading.damage}; the readable part was graded. Repair the file, and grade it again",
            )


def _unpacked(row: dict) -> dict:
    """A row with the columns of what it holds beside its own: of a conversation, the line of a batch API or of
    lm-evaluation-harness."""
    messages = row.get("messages", row.get("conversation", row.get("conversations")))
    if isinstance(messages, list) and messages and all(isinstance(one, dict) and "role" in one for one in messages):
        at = max((i for i, one in enumerate(messages) if one["role"] == "assistant"), default=None)
        if at is not None and not any(row.get(name) is not None for name in ANSWERS if name not in GOLD):
            return {**row, "prompt": messages[:at], "completion": messages[at : at + 1]}
        return {"prompt": messages, **row}
    response, result = row.get("response"), row.get("result")
    if isinstance(response, dict) and "body" in response:
        body = response["body"] if isinstance(response["body"], dict) else {}
        return {**row, "response": None, "choices": body.get("choices") or []}
    if "custom_id" in row and isinstance(result, dict):
        message = result.get("message") or {}
        said = [part.get("text", "") for part in message.get("content") or [] if part.get("type", "text") == "text"]
        choice = {"text": "".join(said), "finish_reason": message.get("stop_reason")}
        return {**row, "choices": [choice] if said else []}
    if isinstance(row.get("doc"), dict) and "resps" in row:
        return {**row["doc"], **dict.fromkeys((*ANSWERS, "choices", "error")), "resps": row["resps"]}
    return row


def _in(row: dict, column: str) -> list[Answer] | None:
    """The answers of one row of a file, [] where there is none; None where a batch says that it has none."""
    finish = ENDS.get(str(row.get("finish_reason") or row.get("stop_reason")))
    choices = row.get("choices")
    if not column and isinstance(choices, list) and all(isinstance(one, dict) for one in choices):
        if not choices:
            return None
        found = [one for choice in choices for one in _of_choice(choice)]
        if found:
            return found
    if not column and row.get("error") and not any(row.get(name) for name in ANSWERS):
        return None
    for name in (column,) if column else ANSWERS:
        if row.get(name) is not None:
            return [Answer(text, finish) for text in _written(row[name])]
    return []


def _of_choice(choice: dict) -> list[Answer]:
    """An element of ``choices``: MT-Bench's, with an answer to each turn, or that of an API."""
    turns = choice.get("turns")
    if isinstance(turns, list) and turns and all(isinstance(one, str) for one in turns):
        return [Answer(turns[0], turns=tuple(turns))]
    message = choice.get("message") if isinstance(choice.get("message"), dict) else choice
    text = message.get("content", choice.get("text"))
    return [Answer(text, ENDS.get(str(choice.get("finish_reason"))))] if isinstance(text, str) else []


def _written(value: Any) -> list[str]:
    """The texts of a value: one, several, or those of the last of its messages."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [value["content"]] if isinstance(value.get("content"), str) else []
    if not isinstance(value, list):
        return []
    if value and all(isinstance(one, dict) and "role" in one for one in value):
        return _written(value[-1])
    return [text for one in value for text in _written(one)]


def _of_evaluation(row: dict) -> tuple[dict | None, list[Answer] | None]:
    extra = json.loads(row["extra_json"] or "{}")
    if extra.get("mode") not in ("sample", "greedy"):
        return None, None
    known = {name: row[name] for name in ("item_id", "prompt_id", "sample_idx")} | {"prompt": extra.get("prompt")}
    if extra.get("error"):
        return known, None
    counted = None if "characters" in extra else row["tokens"]
    opened = bool(extra.get("opened"))
    return known, [Answer(row["output"], extra.get("finish"), extra["mode"], counted, opened)]


def _of_candidate(row: dict) -> tuple[dict, list[Answer] | None]:
    from stages.generation import UNANSWERED

    known = {name: row[name] for name in ("prompt_id", "prompt", "completion_idx")}
    if row["drop_reason"] in UNANSWERED:
        return known, None
    finish = json.loads(row["extra_json"] or "{}").get("finish_reason")
    return known, [Answer(text, finish) for text in _written(row["completion"])]


def _of_demonstration(row: dict) -> tuple[dict, list[Answer]]:
    last = max(row["train_turns"] or [], default=len(row["messages"]) - 1)
    extra = json.loads(row["extra_json"]) if row.get("extra_json") else {}
    named = {name: extra[name] for name in IDS if isinstance(extra, dict) and name in extra}
    asked = {**named, "prompt": row["messages"][:last]}
    return asked, [Answer(text) for text in _written(row["messages"][last : last + 1])]


#: Kinds of datasets that answers are read from.
STORED = {
    "eval_samples/1": _of_evaluation,
    "candidates/1": _of_candidate,
    "demonstrations/1": _of_demonstration,
}
