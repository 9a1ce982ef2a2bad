"""Demonstrations: Capybara, LIMA, OpenOrca, s1K, xLAM, Glaive, ProsocialDialog ..."""

from __future__ import annotations

import json
import re
from typing import Iterator

from stages.ingestion.adapters import asked_about
from stages.ingestion.published.forms import ANSWERS, Form, are_dicts, json_value, utterance, without
from stages.ingestion.rules import Bad
from stages.ingestion.sources import Record, canonical_bytes


def _capybara(row: dict, options) -> list[dict]:
    return [
        without(
            row,
            "conversation",
            messages=[
                message
                for turn in row["conversation"]
                for message in (utterance("user", turn["input"]), utterance("assistant", turn["output"]))
            ],
        )
    ]


def _lima(row: dict, options) -> list[dict]:
    return [
        without(
            row,
            "conversations",
            messages=[
                utterance("user" if index % 2 == 0 else "assistant", text)
                for index, text in enumerate(row["conversations"])
            ],
        )
    ]


def _history(row: dict, options) -> list[dict]:
    """Alpaca's rows with earlier turns, [[question, answer], ...]."""
    history = json_value(row["history"])
    if not isinstance(history, list) or not all(isinstance(turn, (list, tuple)) and len(turn) == 2 for turn in history):
        raise Bad("wrong_type")
    before = [
        message
        for question, answer in history
        for message in (utterance("user", question), utterance("assistant", answer))
    ]
    return [
        without(
            row,
            "instruction",
            "input",
            "output",
            "history",
            prompt=[*before, utterance("user", asked_about(row["instruction"], row.get("input")))],
            completion=row["output"],
        )
    ]


def _s1k(row: dict, options) -> list[dict]:
    thought = row.get("deepseek_thinking_trajectory") or row.get("thinking_trajectories")
    answer = row.get("deepseek_attempt") or row.get("attempt")
    thought = thought[0] if isinstance(thought, list) and thought else thought
    return [
        without(
            row,
            "question",
            "thinking_trajectories",
            "deepseek_thinking_trajectory",
            "attempt",
            "deepseek_attempt",
            prompt=row["question"],
            completion=[{"role": "assistant", "content": answer, "reasoning_content": thought}],
        )
    ]


def _xlam(row: dict, options) -> list[dict]:
    """A question, tools and the calls that answer it, both as JSON."""
    calls = json_value(row["answers"])
    if not are_dicts(calls, "name"):
        raise Bad("wrong_type")
    calls = [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments") or {}}}
        for call in calls
    ]
    return [
        without(
            row,
            "query",
            "answers",
            messages=[utterance("user", row["query"]), {"role": "assistant", "content": None, "tool_calls": calls}],
        )
    ]


_GLAIVE_TURN = re.compile(r"(?:\A|\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE): ?")
_GLAIVE_CALL = re.compile(
    r'<functioncall>\s*\{\s*"name"\s*:\s*"([^"]+)"\s*(?:,\s*"arguments"\s*:\s*(.*?)\s*)?\}\s*\Z', re.DOTALL
)


def _glaive(row: dict, options) -> list[dict]:
    """A conversation as one text, calls and what they return in it, and the tools in the system text."""
    messages = []
    _, *turns = _GLAIVE_TURN.split(row["chat"])
    for speaker, said in zip(turns[::2], turns[1::2]):
        said = said.replace("<|endoftext|>", "").strip()
        before, mark, _ = said.partition("<functioncall>")
        if speaker != "ASSISTANT" or not mark:
            messages.append(
                utterance({"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}[speaker], said)
            )
            continue
        call = _GLAIVE_CALL.fullmatch(said[len(before) :])
        if call is None:
            raise Bad("wrong_type")
        arguments = call[2] or "{}"
        arguments = json_value(arguments[1:-1] if arguments[0] == arguments[-1] == "'" else arguments)
        arguments = json_value(arguments)  # a text that holds JSON
        if not isinstance(arguments, dict):
            raise Bad("wrong_type")
        messages.append(
            {
                "role": "assistant",
                "content": before.strip() or None,
                "tool_calls": [{"type": "function", "function": {"name": call[1], "arguments": arguments}}],
            }
        )
    system = row["system"].strip().removeprefix("SYSTEM:").strip()
    tools, at = [], system.find("{")
    while at >= 0:
        try:
            tool, end = json.JSONDecoder().raw_decode(system, at)
        except ValueError:
            raise Bad("wrong_type") from None
        tools.append(tool)
        at = system.find("{", end)
    return [without(row, "system", "chat", messages=messages, **({"tools": tools} if tools else {"system": system}))]


_QUESTIONS = ("question", "query", "problem", "input")


def _answered(row: dict, options) -> list[dict]:
    """A question and what was answered, in columns of these names (OpenOrca, Nemotron)."""
    asked = next(name for name in _QUESTIONS if row.get(name) is not None)
    said = next(name for name in ANSWERS if row.get(name) is not None)
    used = (asked, said, *(["context"] if isinstance(row.get("context"), str) else []))
    return [without(row, *used, prompt=asked_about(row[asked], row.get("context")), completion=row[said])]


def _is_answered(row: dict, options) -> bool:
    """Nothing else in the row may be an answer, a label or a conversation, which would say that it is something
    else.
    """
    others = (
        "prompt",
        "instruction",
        "messages",
        "conversations",
        "conversation",
        "answer",
        "chosen",
        "completions",
        "choices",
        "options",
        "solution",
        "score",
        "rating",
        "label",
        "text",
    )
    return (
        sum(row.get(name) is not None for name in ANSWERS) == 1
        and sum(row.get(name) is not None for name in _QUESTIONS) == 1
        and all(row.get(name) is None for name in others)
    )


_CAPITALS = ("Problem", "Question", "Answer", "Solution", "Prompt", "Response", "Instruction", "Output")


def _small_letters(row: dict, options) -> list[dict]:
    return [
        {
            name.lower() if name in _CAPITALS and row.get(name.lower()) is None else name: value
            for name, value in row.items()
        }
    ]


def _prosocial(records: Iterator[Record], options) -> Iterator[Record]:
    """ProsocialDialog (Kim et al. 2022): a row is an utterance (context) and the answer to it (response), those of a
    dialogue one after the other. Every answer becomes a demonstration behind the turns before it.

    A turn whose dialogue does not lead up to it is `orphan_message`.
    """
    dialogue, turn, path = None, 0, []
    for record in records:
        row = record.row
        if record.code is not None:
            yield record
            continue
        if row.get("dialogue_id") != dialogue or row.get("response_id") == 0:
            dialogue, turn, path = row.get("dialogue_id"), 0, []
        if row.get("response_id") != turn:
            yield record._replace(code="orphan_message")
            continue
        path, turn = (
            [*path, utterance("user", row.get("context")), utterance("assistant", row.get("response"))],
            turn + 1,
        )
        made = without(row, "context", "response", messages=path, train_turns=[len(path) - 1])
        raw = record.raw if record.raw is not None else canonical_bytes(row)
        yield Record(record.line, raw, made, None)


PROSOCIAL = Form(
    ("context", "response", "safety_label", "dialogue_id", "response_id"),
    stream=_prosocial,
    format=lambda options: "messages",
)
S1K = Form(
    ("question",),
    _s1k,
    lambda row, options: (
        any(row.get(name) for name in ("thinking_trajectories", "deepseek_thinking_trajectory"))
        and any(row.get(name) for name in ("attempt", "deepseek_attempt"))
    ),
)
XLAM = Form(("query", "answers", "tools"), _xlam)
GLAIVE = Form(
    ("system", "chat"),
    _glaive,
    lambda row, options: (
        isinstance(row["system"], str) and isinstance(row["chat"], str) and _GLAIVE_TURN.match(row["chat"]) is not None
    ),
)
CAPYBARA = Form(("conversation",), _capybara, lambda row, options: are_dicts(row["conversation"], "input", "output"))
LIMA = Form(
    ("conversations",),
    _lima,
    lambda row, options: (
        isinstance(row["conversations"], list)
        and bool(row["conversations"])
        and all(isinstance(text, str) for text in row["conversations"])
    ),
)
HISTORY = Form(
    ("instruction", "output", "history"), _history, lambda row, options: isinstance(row["history"], (str, list))
)
ANSWERED = Form((), _answered, _is_answered)
CAPITALS = Form(
    (),
    _small_letters,
    lambda row, options: (
        any(
            row.get(name) is not None and row.get(name.lower()) is None
            for name in ("Problem", "Question", "Prompt", "Instruction")
        )
        and any(row.get(name) is not None for name in ("Answer", "Solution", "Response", "Output"))
    ),
)
