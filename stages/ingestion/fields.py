"""Values of source rows as the schemas want them: messages, prompts, transcripts, numbers, times, labels, tools."""

from __future__ import annotations

import math
import re
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import Any

import orjson

from stages.ingestion.rules import Bad, role_codes
from stages.ingestion.sources import canonical_bytes

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "tool": "tool",
    "function_response": "tool",
    "observation": "tool",
    "function_call": "assistant",
}

MESSAGE_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected", "response_a", "response_b")

HH_TURN = re.compile(r"\n\n(Human|Assistant):")


# -- messages ---------------------------------------------------------------------------------------
def to_message(item: Any) -> dict:
    """One message from `{"role", "content"}` or ShareGPT's `{"from", "value"}`; Bad(wrong_type) else."""
    if not isinstance(item, dict):
        raise Bad("wrong_type")
    role, content = item.get("role"), item.get("content")
    if len(item) == 2 and type(role) is str and type(content) is str:
        return {"role": role, "content": content}
    if "role" not in item and "from" in item:
        speaker = item["from"]
        role = SHAREGPT_ROLES.get(speaker, speaker) if isinstance(speaker, str) else None
        content = item.get("value")
        if speaker == "function_call":  # the call stands in the value (LLaMA-Factory)
            item, content = {**item, "function_calls": content}, None
    if role == "function":  # what answers the older form of one call
        role = "tool"
    calls = item.get("function_calls")
    if calls is None and item.get("tool_calls"):
        calls = "\n".join(canonical_bytes(call).decode() for call in listed(item["tool_calls"]))
    if calls is None and item.get("function_call"):  # the older form of one call
        calls = canonical_bytes(item["function_call"]).decode()
    if isinstance(content, list):  # parts of multimodal APIs: only text can be kept
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise Bad("wrong_type")
        content = "".join(parts)
    if not isinstance(role, str) or not (isinstance(content, str) or (content is None and calls)):
        raise Bad("missing_column" if role is None or content is None else "wrong_type")
    message = {"role": role}
    if content is not None:
        message["content"] = content
    for key in ("name", "tool_call_id"):
        if isinstance(item.get(key), str):
            message[key] = item[key]
    functions = item.get("functions", item.get("tools"))
    if functions:
        message["functions"] = functions if isinstance(functions, str) else canonical_bytes(functions).decode()
    if calls:
        message["function_calls"] = calls if isinstance(calls, str) else canonical_bytes(calls).decode()
    return message


def listed(value: Any) -> list:
    return value if isinstance(value, list) else [value]


def to_messages(value: Any) -> list[dict]:
    """A message list; Bad(wrong_type) if it is none."""
    if not isinstance(value, list):
        raise Bad("wrong_type")
    return [to_message(item) for item in value]


def required(row: dict, name: str, kind: type) -> Any:
    """The column of that type; Bad(missing_column) where there is none, Bad(wrong_type) where it is of another."""
    value = row.get(name)
    if not isinstance(value, kind):
        raise Bad("missing_column" if value is None else "wrong_type")
    return value


def to_prompt(value: Any, system: Any = None) -> list[dict]:
    """A prompt: a string becomes one user message, a transcript that the assistant is to go on with its messages;
    `system` becomes a leading system message.
    """
    if isinstance(value, str):
        messages = hh_transcript(value)[:-1] if asks_in_transcript(value) else [{"role": "user", "content": value}]
    elif value is None:
        raise Bad("missing_column")
    else:
        messages = to_messages(value)
    if isinstance(system, str) and system and (not messages or messages[0]["role"] != "system"):
        messages = [{"role": "system", "content": system}, *messages]
    return messages


def fold_system(row: dict, how: str) -> None:
    """Put the system message that opens a row's `messages` or `prompt` before the first user message (``merge``), or
    leave it out (``drop``), in place.

    Where no user message follows, a merged one becomes a user message. One with tool definitions stays.
    """
    for column in ("messages", "prompt"):
        messages = row.get(column)
        if not messages or messages[0]["role"] != "system" or messages[0].get("functions"):
            continue
        told, rest = (messages[0].get("content") or "").strip(), messages[1:]
        if how == "merge" and told:
            if not rest or rest[0]["role"] != "user":
                row[column] = [{**messages[0], "role": "user"}, *rest]
                continue
            rest = [{**rest[0], "content": f"{told}\n\n{rest[0].get('content') or ''}"}, *rest[1:]]
        row[column] = rest
        if column == "messages":
            row["train_turns"] = [turn - 1 for turn in row["train_turns"]]


def tools_text(value: Any) -> str | None:
    """JSON text of a `tools` column: a list of tool definitions, or such a list as text; None for anything else."""
    listed = value
    if isinstance(value, str):
        try:
            listed = orjson.loads(value)
        except orjson.JSONDecodeError:
            return None
    if (
        not isinstance(listed, list)
        or not listed
        or not all(
            isinstance(tool, dict)
            and isinstance((tool.get("function") if isinstance(tool.get("function"), dict) else tool).get("name"), str)
            for tool in listed
        )
    ):
        return None
    return value if isinstance(value, str) else canonical_bytes(value).decode()


def give_tools(row: dict, tools: str) -> None:
    """Put tool definitions into the system message of a row's `messages` or `prompt`, in place; without one, an empty
    one is made.
    """
    for column in ("messages", "prompt"):
        messages = row.get(column)
        if not messages:
            continue
        if messages[0]["role"] == "system":
            row[column] = [{**messages[0], "functions": messages[0].get("functions") or tools}, *messages[1:]]
            continue
        row[column] = [{"role": "system", "content": "", "functions": tools}, *messages]
        if column == "messages":
            row["train_turns"] = [turn + 1 for turn in row["train_turns"]]


def calls_to_text(row: dict) -> None:
    """Write the tools and calls of all messages of a row into their texts, in place, for chat templates that show
    neither (`tools.in_text`).
    """
    from stages.acting.tools import BadCall, in_text

    try:
        for column, value in row.items():
            if column in MESSAGE_COLUMNS and value:
                row[column] = in_text(value)
            elif column == "completions" and value and isinstance(value[0], list):
                row[column] = [in_text(messages) for messages in value]
    except BadCall:
        raise Bad("wrong_type") from None


def to_completion(value: Any) -> list[dict]:
    """A completion: a string becomes one assistant message."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if value is None:
        raise Bad("missing_column")
    if isinstance(value, dict):
        value = [value]
    return to_messages(value)


def asks_in_transcript(text: str) -> bool:
    """Whether a prompt is an HH transcript up to the answer, as in Dahoas/rm-static and full-hh-rlhf."""
    return text.startswith("\n\nHuman:") and text.rstrip().endswith("\n\nAssistant:")


def hh_transcript(text: str) -> list[dict]:
    """Messages of an HH transcript, split on blank line + `Human:` / `Assistant:`, contents stripped."""
    parts = HH_TURN.split(text)
    if len(parts) < 3 or parts[0].strip():
        raise Bad("parse_error")
    return [
        {"role": "user" if parts[i] == "Human" else "assistant", "content": parts[i + 1].strip()}
        for i in range(1, len(parts), 2)
    ]


def hh_pair(chosen: str, rejected: str) -> tuple[dict, set[str]]:
    """(pair, codes) of two HH transcripts: all messages but the last are the prompt, and must agree."""
    left, right = hh_transcript(chosen), hh_transcript(rejected)
    codes = set()
    if left[:-1] != right[:-1]:
        codes.add("prompt_mismatch")
        codes.update(role_codes([message["role"] for message in right]))
    if left[-1]["role"] != "assistant" or right[-1]["role"] != "assistant":
        codes.add("last_not_assistant")
    return {"prompt": left[:-1], "chosen": left[-1:], "rejected": right[-1:]}, codes


def implicit_strings(chosen: str, rejected: str) -> tuple[str, str, str]:
    """(prompt, chosen, rejected) of two texts with a common beginning (`data.pair`).

    The longest common prefix is cut back to a word boundary; the whitespace there stays with the
    completions, so that "blue" and "bright" are never cut inside the word.
    """
    if chosen == rejected:
        return chosen, "", ""
    low, high = 0, min(len(chosen), len(rejected))
    while low < high:  # binary search: slices compare quickly
        middle = (low + high + 1) // 2
        if chosen[:middle] == rejected[:middle]:
            low = middle
        else:
            high = middle - 1
    cut = low
    while cut and not chosen[cut - 1].isspace():
        cut -= 1
    cut = len(chosen[:cut].rstrip())
    return chosen[:cut], chosen[cut:], rejected[cut:]


def implicit_messages(chosen: list[dict], rejected: list[dict]) -> tuple[list, list, list]:
    """(prompt, chosen, rejected): longest common message prefix; the rest must start with the assistant.

    Where one list is a prefix of the other the last common assistant turn belongs to the completions.
    """
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    if same and same == min(len(chosen), len(rejected)):
        while same and chosen[same - 1]["role"] != "user":
            same -= 1
    return chosen[:same], chosen[same:], rejected[same:]


# -- numbers ----------------------------------------------------------------------------------------
def to_number(value: Any, code: str = "bad_label") -> float:
    """A finite number, also from text such as a CSV cell; Bad(code) else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str, Decimal)):
        raise Bad("wrong_type" if value is not None else "missing_column")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise Bad(code) from None
    if not math.isfinite(number):
        raise Bad(code)
    return number


def optional_number(value: Any) -> float | None:
    return None if value is None or value == "" else to_number(value)


def whole_number(value: Any) -> int | None:
    """A count or index of 0 or more; None where there is none."""
    number = optional_number(value)
    if number is None:
        return None
    if number != int(number) or not 0 <= number < 2**31:
        raise Bad("bad_label")
    return int(number)


def plain(value: Any) -> str:
    """A number in plain decimals, as a verifier reads it (1e-05 is 0.00001); all else as text."""
    if isinstance(value, (float, Decimal)) and math.isfinite(value):
        text = format(value if isinstance(value, Decimal) else Decimal(repr(value)), "f")
        return text if len(text) <= 400 else str(value)
    return str(value)


def to_time(value: Any) -> str | None:
    """A point in time as ISO text with its zone (UTC where none is given); None where it cannot be read as one."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.strip())
        except ValueError:
            return None
    elif isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if not isinstance(value, datetime):
        return None
    return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).isoformat()


def annotation_of(row: dict) -> dict:
    """`ann` of a row that names its annotator or criteria, else nothing."""
    name = next(
        (
            row[column]
            for column in ("annotator_id", "annotator")
            if isinstance(row.get(column), (str, int)) and row[column] != ""
        ),
        None,
    )
    criteria = row.get("criteria") if isinstance(row.get("criteria"), str) and row["criteria"] else None
    if name is None and criteria is None:
        return {}
    return {
        "ann": (
            {"annotator_type": "human"}
            | ({} if name is None else {"annotator_id": str(name)})
            | ({} if criteria is None else {"criteria": criteria})
        )
    }


def to_label(value: Any) -> bool:
    """A thumbs label: bool, 0/1 or the words true/false; Bad(bad_label) else."""
    if isinstance(value, bool):
        return value
    if value is None:
        raise Bad("missing_column")
    if isinstance(value, str):
        value = {"true": 1, "1": 1, "1.0": 1, "yes": 1, "false": 0, "0": 0, "0.0": 0, "no": 0}.get(
            value.strip().lower(), value
        )
    if isinstance(value, (int, float)) and value in (0, 1):
        return bool(value)
    raise Bad("wrong_type" if isinstance(value, (list, dict)) else "bad_label")


def gsm8k_answer(text: str) -> tuple[str, str]:
    """(answer, answer_type) after `####`; Bad(verifier_spec_invalid) without a number there."""
    _, mark, tail = text.rpartition("####")
    answer = tail.strip().replace(",", "").lstrip("$").rstrip(".")
    if not mark or not re.fullmatch(r"[+-]?\d+(\.\d+)?", answer):
        raise Bad("verifier_spec_invalid")
    return answer, "integer" if "." not in answer else "number"


NUMBER = re.compile(r"[+-]?(\d[\d,]*(\.\d+)?|\.\d+)([eE][+-]?\d+)?(/\d+)?%?")


def check_answer(answer: str | None, answer_type: str | None) -> None:
    """Raise Bad(verifier_spec_invalid) unless the answer can be read by its own verifier."""
    if answer is None:
        return
    text = answer.strip()
    good = {
        "integer": lambda: re.fullmatch(r"[+-]?[\d,]+", text),
        "number": lambda: NUMBER.fullmatch(text),
        "mc": lambda: re.fullmatch(r"\(?[A-Za-z0-9]\)?", text),
    }.get(answer_type, lambda: text)
    if answer_type not in (None, "integer", "number", "latex", "text", "mc") or not good():
        raise Bad("verifier_spec_invalid")


def strings_of(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise Bad("wrong_type")
    return value


def structs_of(value: Any) -> list[dict]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Bad("wrong_type")
    return value


def text_of(item: dict, key: str) -> str:
    if not isinstance(item.get(key), str):
        raise Bad("verifier_spec_invalid")
    return item[key]


def json_text(value: Any) -> str:
    return value if isinstance(value, str) else canonical_bytes(value).decode()


def plain_fields(row: dict, *names: str) -> dict:
    """Texts of a row, numbers written out; anything else is kept in extra_json by the adapter."""
    return {name: plain(row[name]) for name in names if isinstance(row.get(name), (str, int, float, Decimal))}


def one_of(value: Any) -> Any:
    """The element of a list of one, as newer rows write verifiers and ground truths; Bad(verifier_spec_invalid) of
    more: a row has one verifier.
    """
    if isinstance(value, list) and len(value) != 1:
        raise Bad("verifier_spec_invalid")
    return value[0] if isinstance(value, list) else value


def literal_of(text: str, code: str = "verifier_spec_invalid") -> Any:
    """What a JSON text, or Python's way of writing it, holds; Bad(code) else."""
    import ast

    from stages.running.syntax import parse

    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:
        return ast.literal_eval(parse(text.strip(), "eval"))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise Bad(code) from None
