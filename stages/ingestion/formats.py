"""Which format a file has, and the reading of its rows.

`detect` looks at the first rows of a file and names its format, an `Adapter` renames the columns of a row and reads it
as that format (`adapters.FORMATS`).
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from typing import Any, Callable

import orjson

from stages.ingestion import best_of as lists
from stages.ingestion import choices as mc
from stages.ingestion import programs as code
from stages.ingestion.adapters import FORMATS, TEXT_COLUMNS, harmful_list, is_qa
from stages.ingestion.fields import (
    HH_TURN,
    MESSAGE_COLUMNS,
    SHAREGPT_ROLES,
    calls_to_text,
    give_tools,
    literal_of,
    plain,
    to_number,
    to_time,
    tools_text,
)
from stages.ingestion.pairing import EVENT_MAP
from stages.ingestion.rules import Bad
from stages.ingestion.sources import canonical_bytes, split_named

# How the names of other tools are read. Keys: our names; values: synonyms, first match wins.
SYNONYMS = {
    "completion": ("response", "output"),
    "label_prob": ("p_chosen",),
    "score": ("rating", "overall_score"),
    "system": ("system_prompt",),
    "chosen_score": ("score_chosen", "chosen_rating", "chosen-rating"),
    "rejected_score": ("score_rejected", "rejected_rating", "rejected-rating"),
    "chosen_model": ("chosen-model",),
    "rejected_model": ("rejected-model",),
    "messages": ("conversations", "conversation"),
    "ranks": ("rank",),
}

#: Fields in which assistant messages keep their reasoning (DeepSeek and Qwen, OpenRouter and vLLM, gpt-oss).
_REASONING = ("reasoning_content", "reasoning", "thinking")

# Columns that ask the question in data of answers that names none `prompt`; the first that is there counts.
_ASKED = ("instruction", "question", "query", "problem", "input")

_COMMON = ("batch_id", "license", "group_id", "weight", "split", "collected_at")

# Columns that hold lists, written as JSON in CSV files.
_LISTS = frozenset(
    (
        "labels",
        "ranks",
        "scores",
        "completions",
        "votes",
        "turns",
        "train_turns",
        "tests",
        "constraints",
        "instruction_id_list",
        "kwargs",
        "facts",
        "reward_route",
        "choices",
        "options",
        "endings",
        "mc1_targets",
        "test_list",
        "test_imports",
        "chosen_segments",
        "rejected_segments",
        "aspects",
        "models",
        "soft_labels",
        "constraint_ids",
    )
)

_MESSAGE_KEYS = frozenset(
    (
        "role",
        "content",
        "from",
        "value",
        "name",
        "tool_call_id",
        "functions",
        "tools",
        "function_calls",
        "tool_calls",
        "function_call",
    )
)

ALIASES = {
    "trl": "auto",
    "likert": "comparisons",
    "sharegpt": "messages",
    "prompt_only": "prompts",
    "language_modeling": "text",
    "alpaca": "instruction",
    "implicit": "preference",
}

# Columns with answers, of which a file of prompts says nothing.
_ANSWERS = frozenset(("chosen", "rejected", "completion", "completions", "response_a", "messages"))
_ANSWERS_HOWEVER_NAMED = _ANSWERS.union(*(SYNONYMS.get(name, ()) for name in _ANSWERS))

# Columns that stay in extra_json and are read there (the gold answers of TPO's pairs).
_READ_LATER = frozenset(("reference",))

# Kind of the rows of a format, for files of which no sampled row can be read.
_KINDS = {
    "alpaca_eval": "comparisons/1",
    "best_of": "rankings/1",
    "segments": "segments/1",
    "hh": "pairs/1",
    "preference": "pairs/1",
    "comparisons": "comparisons/1",
    "stepwise": "stepwise/1",
    "rankings": "rankings/1",
    "unpaired": "unpaired/1",
    "events": "unpaired/1",
    "ratings": "ratings/1",
    "rlvr": "prompts/1",
    "messages": "demonstrations/1",
    "prompt_completion": "demonstrations/1",
    "programs": "prompts/1",
    "multiple_choice": "prompts/1",
    "harmful": "prompts/1",
    "gsm8k": "prompts/1",
    "math": "prompts/1",
    "qa": "demonstrations/1",
    "instruction": "demonstrations/1",
    "turns": "prompts/1",
    "prompts": "prompts/1",
    "text": "text/1",
}


def kind_of(name: str, wanted: str = "auto") -> str:
    """Kind of the rows of a format; questions with answers are what is wanted of them."""
    if name in ("gsm8k", "qa", "math", "rlvr") and wanted != "auto":
        return "prompts/1" if wanted == "prompts/1" else "demonstrations/1"
    return _KINDS[name]


def _has(keys: frozenset, name: str) -> bool:
    return name in keys or any(other in keys for other in SYNONYMS.get(name, ()))


def _format_of(row: dict) -> str | None:
    keys = frozenset(key for key, value in row.items() if value is not None)
    for name, (_, required, _) in FORMATS.items():
        if name == "best_of" and not lists.is_best_of(row):
            continue
        if name == "hh" and not (
            "prompt" not in keys and isinstance(row.get("chosen"), str) and HH_TURN.match(row["chosen"])
        ):
            continue
        if name == "events" and row.get("action") not in EVENT_MAP:
            continue
        if name == "gsm8k" and not (isinstance(row.get("answer"), str) and "####" in row["answer"]):
            continue
        if name == "programs":
            if code.is_program(row):
                return name
            continue
        if name == "harmful":
            if harmful_list(row):
                return name
            continue
        if name == "qa" and is_qa(row):
            return name
        if name == "multiple_choice":
            if mc.is_multiple_choice(row):
                return name
            continue
        if name == "math" and "problem" in keys and "solution" not in keys and "answer" in keys:  # AIME
            return name
        if (
            name == "math"
            and "answer" not in keys
            and not (isinstance(row.get("solution"), str) and "boxed" in row["solution"])
        ):
            continue
        if all(_has(keys, column) for column in required):
            return name
    return None


def detect(rows: list[dict]) -> str | None:
    """The format that most of the sample rows have; None if no row has a known one."""
    found = Counter(name for name in map(_format_of, rows) if name)
    if not found:
        return None
    order = list(FORMATS)
    return min(found, key=lambda name: (-found[name], order.index(name)))


def empty_answers(rows: list[dict]) -> list[str]:
    """The columns with answers that rows in our columns have and that none of them fills."""
    filled = {name for row in rows for name, value in row.items() if value is not None}
    return [name for name in dict.fromkeys(n for row in rows for n in row) if name in _ANSWERS_HOWEVER_NAMED - filled]


def rename(row: dict, column_map: dict[str, str]) -> dict:
    """The row with our names: column_map is {our name: source name}; dotted source names go inside structs."""
    taken = set(column_map.values())
    # all at once: two columns may change places
    out = {name: value for name, value in row.items() if name not in taken}
    for ours, theirs in column_map.items():
        if theirs in row:
            out[ours] = row[theirs]
        elif "." in theirs:
            value: Any = row
            for key in theirs.split("."):
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                out[ours] = value
    return out


def _opens_with(row: dict, text: Any) -> bool:
    """Whether a row's messages or prompt begin with a system message that says a text."""
    opening = next((row[name][0] for name in ("messages", "prompt") if row.get(name)), {})
    said = opening.get("content") or "" if opening.get("role") == "system" else ""
    return isinstance(text, str) and text in said


class Adapter:
    """Reads rows of one format. options: the stage's config (kind, scales, column_map ...). `published.adapter_of`
    makes the one of a file.
    """

    def __init__(self, name: str, options, records: Callable | None = None):
        self.name = name
        self.guessed = records is None and ALIASES.get(options.format, options.format) == "auto"
        #: records of the source -> those that this adapter reads; for published datasets in columns of their own
        #: (`published`)
        self.records = records or iter
        self._read, required, more = FORMATS[name]
        self._used = frozenset(required) | frozenset(more) | frozenset(_COMMON)
        self._options, self._map = options, options.columns()
        self._plain = {column: SYNONYMS[column] for column in self._used if column in SYNONYMS}
        self._lists = sorted(self._used & _LISTS)
        self._messages = [column for column in MESSAGE_COLUMNS if column in self._used]
        self.unknown_splits: set[str] = set()
        self._tools = name not in ("messages", "text")  # those of conversations are read with their turns
        if self._tools:
            self._used |= {"tools"}
        self._asks = name in (
            "best_of",
            "segments",
            "preference",
            "comparisons",
            "stepwise",
            "rankings",
            "unpaired",
            "ratings",
        )

    def __call__(self, row: dict) -> tuple[str, dict, set]:
        """(kind, row, codes). Raises Bad. What the schema has no column for goes to extra_json."""
        if self._map:
            row = rename(row, self._map)
        for ours, others in self._plain.items():
            if row.get(ours) is None:
                for other in others:
                    if row.get(other) is not None:
                        row = {key: value for key, value in row.items() if key != other} | {ours: row[other]}
                        break
        for name in self._lists:
            if isinstance(row.get(name), str) and row[name][:1] in ("[", "{"):
                try:
                    row = row | {name: orjson.loads(row[name])}
                except orjson.JSONDecodeError:
                    pass
        # a list that was written as text
        if isinstance(row.get("messages"), str) and "messages" in self._messages:
            row = row | {"messages": literal_of(row["messages"], "wrong_type")}
        if self._asks and row.get("prompt") is None and "prompt" not in self._map:
            row = _with_question(row)
        reasoning = {"written": 0, "left": 0}
        row = self._with_reasoning(row, reasoning)
        kind, out, codes = self._read(row, self._options)
        kept = {"true": True, "false": False}.get(str(row.get("kept")).lower()) if kind == "demonstrations/1" else None
        if kept is not None:  # what a filter left out stays out
            out["kept"] = kept
            row = {key: value for key, value in row.items() if key != "kept"}
        extra = out.pop("_extra", None) or {}
        tools = None
        if self._tools and row.get("tools"):
            tools = tools_text(row["tools"])
            if tools is not None and kind != "text/1":
                give_tools(out, tools)
        if self._options.tool_calls == "text":
            calls_to_text(out)
        if any(reasoning.values()):
            out["_reasoning"] = reasoning
        for key, value in row.items():
            if key not in self._used or (key == "tools" and self._tools and tools is None):
                if key == "source" and isinstance(value, str):
                    out.setdefault("source", value)
                elif value is not None:
                    extra[key] = value
            elif isinstance(value, (list, dict)) and key in TEXT_COLUMNS and key not in out:
                extra[key] = value
            elif key == "system" and value and not _opens_with(out, value):  # the messages have one of their own
                extra[key] = value
        for key in _COMMON:
            value = row.get(key)
            if value is None or value == "":
                continue
            if key == "weight":
                out[key] = to_number(value)
                if out[key] < 0:
                    raise Bad("bad_label")
            elif key == "split" or key == "collected_at":
                read = (
                    to_time(value) if key == "collected_at" else split_named(value) if isinstance(value, str) else None
                )
                if read is None:
                    extra[key] = value
                    if key == "split" and len(self.unknown_splits) < 8:
                        self.unknown_splits.add(str(value)[:40])
                else:
                    out[key] = read
            elif isinstance(value, float) and math.isnan(value):  # how pandas writes null
                continue
            elif isinstance(value, (str, int, float)) and not isinstance(value, bool):
                out[key] = plain(value)
            else:
                raise Bad("wrong_type")
        if unread := self._unread(row):
            extra["message_fields"] = unread
        if self.name == "prompts" and self.guessed and not _ANSWERS.isdisjoint(extra):
            alone = _format_of(row)
            if alone not in (None, "prompts"):
                out["_answers_left"] = alone
        if extra:
            out["extra_json"] = canonical_bytes(extra).decode("utf-8")
        return kind, out, codes

    def _with_reasoning(self, row: dict, counted: dict[str, int]) -> dict:
        """The row with the reasoning of assistant messages before their text, between <think> and </think>
        (`synth.cold_start`), as chat templates of models that reason read it.

        ``counted``: how many messages had some that was ``written``, and ``left`` beside the text.
        """

        def thinking(item):
            if isinstance(item, list):  # a completion of several messages
                return [thinking(part) for part in item]
            if (
                not isinstance(item, dict)
                or len(item) < 3
                or item.get("role", SHAREGPT_ROLES.get(str(item.get("from")))) != "assistant"
            ):
                return item
            name = next((name for name in _REASONING if item.get(name)), None)
            text = "content" if "role" in item else "value"
            said = item.get(text)
            if name is None or isinstance(said, str) and "</think>" in said:  # none, or it is there already
                return item
            if (
                self._options.reasoning == "drop"
                or not isinstance(item[name], str)
                or not isinstance(said, (str, type(None)))
            ):
                counted["left"] += 1
                return item
            counted["written"] += 1
            return {key: value for key, value in item.items() if key != name} | {
                text: f"<think>\n{item[name].strip()}\n</think>\n\n" + (said or "").lstrip("\n")
            }

        changes = {
            column: [thinking(item) for item in row[column]]
            for column in (*self._messages, "completions")
            if isinstance(row.get(column), list)
        }
        return {**row, **changes} if any(counted.values()) else row

    def _unread(self, row: dict) -> dict:
        """{column: {index: fields}} of what messages hold beyond our schema, such as `reasoning_content`."""
        found = {}
        for column in self._messages:
            messages = row.get(column)
            if isinstance(messages, list):
                fields = {
                    str(index): more
                    for index, item in enumerate(messages)
                    if isinstance(item, dict)
                    and len(item) > 2
                    and (
                        more := {
                            key: value for key, value in item.items() if key not in _MESSAGE_KEYS and value is not None
                        }
                    )
                }
                if fields:
                    found[column] = fields
        return found


def _with_question(row: dict) -> dict:
    """The row with its question as `prompt`, where a column of another name asks it: in the implicit form the answers
    begin with it themselves.
    """
    for side in ("chosen", "rejected"):
        answer = row.get(side)
        if (
            isinstance(answer, str)
            and HH_TURN.match(answer)
            or isinstance(answer, list)
            and answer
            and isinstance(answer[0], dict)
            and answer[0].get("role", answer[0].get("from")) in ("user", "system", "human")
        ):
            return row
    asked = next((name for name in _ASKED if row.get(name) is not None or (name in row and name != "input")), None)
    if asked is None:
        return row
    question, given = row[asked], row.get("input")
    used = {asked}
    if asked == "instruction" and isinstance(question, str) and isinstance(given, str):
        used.add("input")
        question = f"{question}\n\n{given}" if given.strip() else question
    return {key: value for key, value in row.items() if key not in used} | {"prompt": question}


def misspelt(columns: list[str]) -> dict[str, str]:
    """{column: known name} of columns that no format reads and whose names are nearly one that names a format."""
    required = {column for _, columns, _ in FORMATS.values() for column in columns}
    named = required.union(*(SYNONYMS.get(column, ()) for column in required))
    known = {*_ASKED, *_COMMON, *_READ_LATER}.union(
        *(further for _, _, further in FORMATS.values()), *SYNONYMS.values(), required
    )
    near = {
        name: difflib.get_close_matches(name, sorted(named), 1, 0.8)
        for name in columns
        if name not in known and not name.endswith("_id")
    }
    return {name: found[0] for name, found in near.items() if found and found[0] not in columns}


def known_columns() -> str:
    """One line per format for error messages: the columns that name it."""
    return "; ".join(f"{name}: {' + '.join(required)}" for name, (_, required, _) in FORMATS.items() if required)
