"""Adapters: a parsed source row -> (kind, row of that kind, codes).

`detect` looks at the first rows of a file and names its format, `adapt` reads one row of that
format. An adapter raises Bad where nothing can be made of a row; codes that leave a row readable
(a transcript whose prompts differ) come back beside it, so that the rules can add theirs.
"""
from __future__ import annotations

import math
import re
from collections import Counter
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import Any, Callable

import orjson

from stages.ingestion import best_of as lists
from stages.ingestion import choices as mc
from stages.ingestion import programs as code
from stages.ingestion.pairing import EVENT_MAP
from stages.ingestion.rules import Bad, role_codes, segment_codes
from stages.ingestion.sources import canonical_bytes, split_named

# How the names of other tools are read. Keys: our names; values: synonyms, first match wins.
SYNONYMS = {
    "completion": ("response", "output"),
    "score": ("rating", "overall_score"),
    "system": ("system_prompt",),
    "chosen_score": ("score_chosen", "chosen_rating", "chosen-rating"),
    "rejected_score": ("score_rejected", "rejected_rating", "rejected-rating"),
    "chosen_model": ("chosen-model",),
    "rejected_model": ("rejected-model",),
    "messages": ("conversations", "conversation"),
    "ranks": ("rank",),
}
_SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
             "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "system": "system",
             "tool": "tool", "function_response": "tool", "observation": "tool", "function_call": "assistant"}
#: Fields in which assistant messages keep their reasoning (DeepSeek and Qwen, OpenRouter and vLLM, gpt-oss).
_REASONING = ("reasoning_content", "reasoning", "thinking")
# Columns that ask the question in data of answers that names none `prompt`; the first that is there counts.
_ASKED = ("instruction", "question", "query", "problem", "input")
_COMMON = ("batch_id", "license", "group_id", "weight", "split", "collected_at")
# Columns that hold lists, written as JSON in CSV files.
_LISTS = frozenset(("labels", "ranks", "scores", "completions", "votes", "turns", "train_turns", "tests", "constraints", "instruction_id_list", "kwargs", "facts",
                    "reward_route", "choices", "options", "endings", "mc1_targets", "test_list", "test_imports", "chosen_segments", "rejected_segments", "aspects", "models", "soft_labels", "constraint_ids"))
_MESSAGES = ("messages", "prompt", "completion", "chosen", "rejected", "response_a", "response_b")
_MESSAGE_KEYS = frozenset(("role", "content", "from", "value", "name", "tool_call_id", "functions", "tools", "function_calls", "tool_calls", "function_call"))
# Labels of comparisons as Chatbot Arena and JudgeBench write them.
_WINNERS = {"model_a": "A", "model_b": "B", "tie (bothbad)": "tie", "both_bad": "tie", "bothbad": "tie", "a>b": "A", "b>a": "B", "a=b": "tie", "b=a": "tie"}
# What NuminaMath writes where there is no answer to check: a proof is asked for, or none was found.
_NO_ANSWER = frozenset(("proof", "notfound", "not found"))
_HH_TURN = re.compile(r"\n\n(Human|Assistant):")


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
        role = _SHAREGPT.get(speaker, speaker) if isinstance(speaker, str) else None
        content = item.get("value")
        if speaker == "function_call":      # the call stands in the value (LLaMA-Factory)
            item, content = {**item, "function_calls": content}, None
    if role == "function":                  # what answers the older form of one call
        role = "tool"
    calls = item.get("function_calls")
    if calls is None and item.get("tool_calls"):
        calls = "\n".join(canonical_bytes(call).decode() for call in _listed(item["tool_calls"]))
    if calls is None and item.get("function_call"):         # the older form of one call
        calls = canonical_bytes(item["function_call"]).decode()
    if isinstance(content, list):           # parts of multimodal APIs: only text can be kept
        parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
                 for part in content]
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


def _listed(value: Any) -> list:
    return value if isinstance(value, list) else [value]


def to_messages(value: Any) -> list[dict]:
    """A message list; Bad(wrong_type) if it is none."""
    if not isinstance(value, list):
        raise Bad("wrong_type")
    return [to_message(item) for item in value]


def to_prompt(value: Any, system: Any = None) -> list[dict]:
    """A prompt: a string becomes one user message; `system` becomes a leading system message."""
    if isinstance(value, str):
        messages = [{"role": "user", "content": value}]
    elif value is None:
        raise Bad("missing_column")
    else:
        messages = to_messages(value)
    if isinstance(system, str) and system and (not messages or messages[0]["role"] != "system"):
        messages = [{"role": "system", "content": system}, *messages]
    return messages


def fold_system(row: dict, how: str) -> None:
    """Put the system message that opens a row's `messages` or `prompt` before the first user message (``merge``), or leave it out (``drop``), in place.

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
    if not isinstance(listed, list) or not listed or not all(isinstance(tool, dict) and isinstance((tool.get("function") if isinstance(tool.get("function"), dict) else tool).get("name"), str)
                                                             for tool in listed):
        return None
    return value if isinstance(value, str) else canonical_bytes(value).decode()


def give_tools(row: dict, tools: str) -> None:
    """Put tool definitions into the system message of a row's `messages` or `prompt`, in place; without one, an empty one is made."""
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
    """Write the tools and calls of all messages of a row into their texts, in place, for chat templates that show neither (`tools.in_text`)."""
    from stages.acting.tools import BadCall, in_text

    try:
        for column, value in row.items():
            if column in _MESSAGES and value:
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


def hh_transcript(text: str) -> list[dict]:
    """Messages of an HH transcript, split on blank line + `Human:` / `Assistant:`, contents stripped."""
    parts = _HH_TURN.split(text)
    if len(parts) < 3 or parts[0].strip():
        raise Bad("parse_error")
    return [{"role": "user" if parts[i] == "Human" else "assistant", "content": parts[i + 1].strip()}
            for i in range(1, len(parts), 2)]


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
    while low < high:                       # binary search: slices compare quickly
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


def _optional_number(value: Any) -> float | None:
    return None if value is None or value == "" else to_number(value)


def _whole(value: Any) -> int | None:
    """A count or index of 0 or more; None where there is none."""
    number = _optional_number(value)
    if number is None:
        return None
    if number != int(number) or not 0 <= number < 2 ** 31:
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


def _annotated(row: dict) -> dict:
    """`ann` of a row that names its annotator or criteria, else nothing."""
    name = next((row[column] for column in ("annotator_id", "annotator") if isinstance(row.get(column), (str, int)) and row[column] != ""), None)
    criteria = row.get("criteria") if isinstance(row.get("criteria"), str) and row["criteria"] else None
    if name is None and criteria is None:
        return {}
    return {"ann": {"annotator_type": "human"} | ({} if name is None else {"annotator_id": str(name)}) | ({} if criteria is None else {"criteria": criteria})}


def to_label(value: Any) -> bool:
    """A thumbs label: bool, 0/1 or the words true/false; Bad(bad_label) else."""
    if isinstance(value, bool):
        return value
    if value is None:
        raise Bad("missing_column")
    if isinstance(value, str):
        value = {"true": 1, "1": 1, "1.0": 1, "yes": 1, "false": 0, "0": 0, "0.0": 0, "no": 0}.get(value.strip().lower(), value)
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


_NUMBER = re.compile(r"[+-]?(\d[\d,]*(\.\d+)?|\.\d+)([eE][+-]?\d+)?(/\d+)?%?")


def check_answer(answer: str | None, answer_type: str | None) -> None:
    """Raise Bad(verifier_spec_invalid) unless the answer can be read by its own verifier."""
    if answer is None:
        return
    text = answer.strip()
    good = {"integer": lambda: re.fullmatch(r"[+-]?[\d,]+", text), "number": lambda: _NUMBER.fullmatch(text),
            "mc": lambda: re.fullmatch(r"\(?[A-Za-z0-9]\)?", text)}.get(answer_type, lambda: text)
    if answer_type not in (None, "integer", "number", "latex", "text", "mc") or not good():
        raise Bad("verifier_spec_invalid")


# -- adapters ---------------------------------------------------------------------------------------
def _pair(row: dict, options) -> tuple[str, dict, set]:
    prompt, chosen, rejected = row.get("prompt"), row.get("chosen"), row.get("rejected")
    if chosen is None or rejected is None:
        raise Bad("missing_column")
    if prompt is None and isinstance(chosen, str) and not _HH_TURN.match(chosen) and ("prompt" in row or "prompt" in options.columns()):
        raise Bad("missing_column")         # it has a prompt, only not in this row: nothing to cut out of the answers
    codes: set[str] = set()
    if type(prompt) is str and type(chosen) is str and type(rejected) is str:      # the common case
        out = {"prompt": to_prompt(prompt, row.get("system")),
               "chosen": [{"role": "assistant", "content": chosen}],
               "rejected": [{"role": "assistant", "content": rejected}]}
    elif isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is not None:
            out = {"prompt": to_prompt(prompt, row.get("system")), "chosen": to_completion(chosen),
                   "rejected": to_completion(rejected)}
        elif _HH_TURN.search(chosen) and _HH_TURN.search(rejected):
            out, codes = hh_pair(chosen, rejected)
        else:
            head, left, right = implicit_strings(chosen, rejected)
            out = {"prompt": to_prompt(head), "chosen": to_completion(left), "rejected": to_completion(right)}
            if chosen == rejected and head.strip():      # equal texts: nothing else to say about them
                raise Bad("chosen_equals_rejected")
    elif isinstance(chosen, str) or isinstance(rejected, str):
        raise Bad("wrong_type")
    else:
        left, right = to_completion(chosen), to_completion(rejected)
        if prompt is None:
            head, left, right = implicit_messages(left, right)
        elif isinstance(prompt, list):
            head = to_messages(prompt)
            if head and left[:len(head)] == head and right[:len(head)] == head:
                left, right = left[len(head):], right[len(head):]
        elif left and left[0]["role"] in ("user", "system"):   # full conversations beside a prompt string
            said = prompt if isinstance(prompt, str) else None
            head, left, right = implicit_messages(left, right)
            if said is None:
                raise Bad("wrong_type")
            if not any((m.get("content") or "").strip() == said.strip() for m in head):
                codes.add("prompt_mismatch")
        else:
            head = to_prompt(prompt)
        if row.get("system"):
            head = to_prompt(head, row["system"])
        out = {"prompt": head, "chosen": left, "rejected": right}
        if any(side and side[0]["role"] in ("user", "system") for side in (left, right)):
            codes.add("prompt_mismatch")
    for name in ("chosen_score", "rejected_score", "margin", "label_prob"):
        if row.get(name) is not None:
            out[name] = _optional_number(row[name])
    for name in ("strength", "pairs_in_group", "rank_gap", "stage_index", "turn_index"):
        if (value := _whole(row.get(name))) is not None:
            out[name] = value
    if not 0 <= out.get("strength", 0) <= 127 or out.get("pairs_in_group") == 0:
        raise Bad("bad_label")
    if out.get("label_prob") is not None and not 0.5 <= out["label_prob"] <= 1:     # P(chosen preferred)
        raise Bad("bad_label")
    if row.get("constraint_ids") is not None:
        out["constraint_ids"] = _strings(row["constraint_ids"])
    if isinstance(row.get("grade"), str):
        out["_grade"] = row["grade"]
    for side in ("chosen", "rejected"):
        if isinstance(row.get(f"{side}_model"), str):
            out[f"{side}_gen"] = {"model_id": row[f"{side}_model"]}
    return "pairs/1", out, codes


def _demonstration(row: dict, options) -> tuple[str, dict, set]:
    prompt, completion = to_prompt(row.get("prompt"), row.get("system")), to_completion(row.get("completion"))
    if len(completion) > len(prompt) and completion[:len(prompt)] == prompt:
        completion = completion[len(prompt):]
    turns = [len(prompt) + index for index, message in enumerate(completion) if message["role"] == "assistant"]
    return "demonstrations/1", {"messages": prompt + completion, "train_turns": turns, **_texts(row, "category")}, set()


def _messages(row: dict, options) -> tuple[str, dict, set]:
    if row.get("messages") is None:
        raise Bad("missing_column")
    messages = to_messages(row["messages"])
    if isinstance(row.get("system"), str) and row["system"]:
        messages = to_prompt(messages, row["system"])
    tools = row.get("tools")
    if tools and messages and messages[0]["role"] == "system":
        messages[0].setdefault("functions", tools if isinstance(tools, str) else canonical_bytes(tools).decode())
    elif tools and messages:
        messages = [{"role": "system", "content": "", "functions": tools if isinstance(tools, str)
                     else canonical_bytes(tools).decode()}, *messages]
    added = len(messages) - len(row["messages"])        # a system message put before those that train_turns counts
    trained = row.get("train_turns")
    if trained is not None and (not isinstance(trained, list) or not trained or any(type(turn) is not int for turn in trained)):
        raise Bad("wrong_type")
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"
             and (trained is None or index - added in trained) and (index < added or _trained(row["messages"][index - added]))]
    if trained is not None and len(turns) < len(set(trained)) or not turns and any(message["role"] == "assistant" for message in messages):
        raise Bad("bad_label")
    return "demonstrations/1", {"messages": messages, "train_turns": turns, **_texts(row, "category")}, set()


def _trained(message: dict) -> bool:
    """False for a turn that OpenAI's fine-tuning format leaves out of the loss, `weight: 0`."""
    weight = message.get("weight")
    if weight is None:
        return True
    if isinstance(weight, bool) or weight not in (0, 1):
        raise Bad("wrong_type")
    return weight == 1


def _prompts(row: dict, options) -> tuple[str, dict, set]:
    out = {"prompt": to_prompt(row.get("prompt"), row.get("system")), **_texts(row, "domain", "category", "language")}
    answer = row.get("answer")
    if answer is not None:
        if isinstance(answer, (list, dict)):
            raise Bad("wrong_type")
        if isinstance(answer, float) and not math.isfinite(answer):
            raise Bad("verifier_spec_invalid")
        out["answer"] = answer if isinstance(answer, str) else plain(answer)
        kind = row.get("answer_type") or options.answer_type
        if not isinstance(kind, (str, type(None))):
            raise Bad("wrong_type")
        if kind is None:
            text = out["answer"].strip()
            kind = "integer" if re.fullmatch(r"[+-]?\d+", text) else "number" if _NUMBER.fullmatch(text) else "latex" if re.search(r"[\\$^]|%$", text) else "text"
        out["answer_type"] = kind
        check_answer(out["answer"], kind)
    if isinstance(row.get("instruction_id_list"), list):        # IFEval
        kwargs = _structs(row.get("kwargs") or [{}] * len(row["instruction_id_list"]))
        if len(kwargs) != len(row["instruction_id_list"]):
            raise Bad("verifier_spec_invalid")
        out["constraints"] = [{"id": str(name), "kwargs_json": canonical_bytes(
            {k: v for k, v in values.items() if v is not None}).decode()}
            for name, values in zip(row["instruction_id_list"], kwargs)]
    elif row.get("constraints") is not None:
        out["constraints"] = [{"id": _text_of(item, "id"), "kwargs_json": _json_text(item.get("kwargs_json", item.get("kwargs", {})))}
                              for item in _structs(row["constraints"])]
    if isinstance(row.get("test"), str) and isinstance(row.get("entry_point"), str):    # HumanEval
        out["tests"] = [{"kind": "python", "code": f"{row['test']}\ncheck({row['entry_point']})\n"}]
    elif row.get("tests") is not None:
        out["tests"] = [{key: value if value is None or key == "timeout_s" else _json_text(value) for key, value in item.items()
                         if key in ("kind", "input", "expected", "code", "timeout_s")} for item in _structs(row["tests"])]
        for test in out["tests"]:
            if test.get("timeout_s") is not None:
                test["timeout_s"] = to_number(test["timeout_s"], "verifier_spec_invalid")
                if test["timeout_s"] <= 0:
                    raise Bad("verifier_spec_invalid")
    if out.get("tests") == [] or out.get("constraints") == []:
        raise Bad("verifier_spec_invalid")
    for name in ("facts", "reward_route"):
        if row.get(name) is not None:
            out[name] = _strings(row[name])
    return "prompts/1", out, set()


def _strings(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise Bad("wrong_type")
    return value


def _structs(value: Any) -> list[dict]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Bad("wrong_type")
    return value


def _text_of(item: dict, key: str) -> str:
    if not isinstance(item.get(key), str):
        raise Bad("verifier_spec_invalid")
    return item[key]


def _json_text(value: Any) -> str:
    return value if isinstance(value, str) else canonical_bytes(value).decode()


def _texts(row: dict, *names: str) -> dict:
    """Texts of a row, numbers written out; anything else is kept in extra_json by the adapter."""
    return {name: plain(row[name]) for name in names if isinstance(row.get(name), (str, int, float, Decimal))}


def _text(row: dict, options) -> tuple[str, dict, set]:
    text = row.get("text")
    if text is None:
        raise Bad("missing_column")
    if not isinstance(text, str):
        raise Bad("wrong_type")
    return "text/1", {"text": text, **_texts(row, "domain")}, set()


def _unpaired(row: dict, options) -> tuple[str, dict, set]:
    kind = row.get("label_kind")
    return "unpaired/1", {"prompt": to_prompt(row.get("prompt"), row.get("system")),
                          "completion": to_completion(row.get("completion")), "label": to_label(row.get("label")),
                          "label_kind": kind if isinstance(kind, str) else "thumbs"}, set()


def _event(row: dict, options) -> tuple[str, dict, set]:
    """What somebody did with an answer (`data.implicit`): a labelled completion, or of an edit the edited text over the answer. `published.py` gives the edited text an `edited` of its own."""
    from stages.ingestion.pairing import event

    action = row.get("action")
    if not isinstance(action, str):
        raise Bad("missing_column" if action is None else "wrong_type")
    label, weight = (True, 1.0) if action == "edited" else event(action, options.event_map)
    if label == "pair" and options.kind == "pairs/1":
        return "pairs/1", {"prompt": to_prompt(row.get("prompt"), row.get("system")), "chosen": to_completion(row.get("edited_text")), "rejected": to_completion(row.get("completion")),
                           "weight": weight}, set()
    return "unpaired/1", {"prompt": to_prompt(row.get("prompt"), row.get("system")), "completion": to_completion(row.get("completion")), "label": label is True, "weight": weight,
                          "label_kind": f"event:{'edit' if action == 'edited' else action}"}, set()


def _rating(row: dict, options) -> tuple[str, dict, set]:
    low = _optional_number(row.get("scale_min")) if row.get("scale_min") is not None else options.scale_min
    high = _optional_number(row.get("scale_max")) if row.get("scale_max") is not None else options.scale_max
    low, high = (-math.inf if low is None else low), (math.inf if high is None else high)
    out = {"prompt": to_prompt(row.get("prompt"), row.get("system")), "completion": to_completion(row.get("completion")),
           "scale_min": low, "scale_max": high, **_texts(row, "critique")}
    aspects = row.get("aspects")
    if aspects is not None:
        if isinstance(aspects, dict):
            aspects = [{"aspect": name, "score": score} for name, score in aspects.items()]
        out["aspects"] = [{"aspect": str(item.get("aspect")), "score": to_number(item.get("score")),
                           "rationale": item.get("rationale") if isinstance(item.get("rationale"), str) else None}
                          for item in _structs(aspects)]
    if options.aspect_weights:
        out["score"] = weighted(out.get("aspects"), options.aspect_weights)
    elif row.get("score") is None and out.get("aspects"):
        out["score"] = math.fsum(item["score"] for item in out["aspects"]) / len(out["aspects"])
    else:
        out["score"] = to_number(row.get("score"))
    if not low <= out["score"] <= high:
        raise Bad("bad_label")
    if out.get("aspects") and not options.aspect_weights and out["score"] == 10 and \
            math.fsum(item["score"] for item in out["aspects"]) / len(out["aspects"]) <= 2:
        raise Bad("score_inconsistent")         # UltraFeedback: an overall 10 that meant 1
    if isinstance(row.get("model"), str):
        out["gen"] = {"model_id": row["model"]}
    # The same rating by two people or groups is two rows.
    return "ratings/1", out | _annotated({"annotator": row.get("group")} | {k: row[k] for k in ("annotator_id", "annotator", "criteria") if row.get(k) is not None}), set()


def weighted(aspects: list[dict] | None, weights: dict[str, float]) -> float:
    """The overall score of a rating as the weighted sum of its aspects (`data.ratings`); Bad(missing_aspect) where it lacks one."""
    from stages.ingestion.pairing import overall_scores

    found = {item["aspect"]: item["score"] for item in aspects or ()}
    if any(name not in found for name in weights):
        raise Bad("missing_aspect")
    return overall_scores([[found[name] for name in weights]], list(weights.values()))[0]


def _ranking(row: dict, options) -> tuple[str, dict, set]:
    from stages.ingestion.pairing import check_ranks, ranks_from_scores

    completions = row.get("completions")
    if completions is None:
        raise Bad("missing_column")
    if not isinstance(completions, list):
        raise Bad("wrong_type")
    out = {"prompt": to_prompt(row.get("prompt"), row.get("system")),
           "completions": [to_completion(item) for item in completions]}
    if row.get("scores") is not None:
        if not isinstance(row["scores"], list):
            raise Bad("wrong_type")
        out["scores"] = [to_number(score) for score in row["scores"]]
        if len(out["scores"]) != len(completions):
            raise Bad("bad_rank")
    if row.get("ranks") is not None:
        out["ranks"] = check_ranks(row["ranks"], len(completions))
    elif out.get("scores"):
        out["ranks"] = ranks_from_scores(out["scores"])
    else:
        raise Bad("missing_column")
    if isinstance(row.get("models"), list) and len(row["models"]) == len(completions):
        out["gens"] = [{"model_id": str(name)} for name in row["models"]]
    return "rankings/1", out | _annotated(row), set()


def _comparison(row: dict, options) -> tuple[str, dict, set]:
    from stages.ingestion.pairing import likert, votes

    out = {"prompt": to_prompt(row.get("prompt"), row.get("system")), "response_a": to_completion(row.get("response_a")),
           "response_b": to_completion(row.get("response_b"))}
    if row.get("p_a") is not None:
        out |= {"label_kind": "prob", "p_a": to_number(row["p_a"])}
        if not 0 <= out["p_a"] <= 1:
            raise Bad("bad_label")
    elif row.get("votes") is not None:
        if not isinstance(row["votes"], list):
            raise Bad("wrong_type")
        votes(row["votes"])
        out |= {"label_kind": "votes", "votes": [str(vote) for vote in row["votes"]]}
    else:
        label = row.get("label", row.get("preference", row.get("choice", row.get("winner"))))
        if label is None:
            raise Bad("missing_column")
        named = options.label_map.get(_label_name(label), label)
        named = _WINNERS.get(named.strip().lower(), named) if isinstance(named, str) else named
        if isinstance(named, str) and not re.fullmatch(r"\s*[+-]?\d+(\.\d*)?\s*", named):
            votes([named])
            out |= {"label_kind": "choice", "votes": [named]}
        else:
            number, points = to_number(label), _whole(row.get("n_points")) or options.n_points
            if points is None:
                raise Bad("scale_unknown")
            orientation = row.get("orientation") or options.orientation
            if orientation not in ("low_is_a", "high_is_a") or points > 127:
                raise Bad("bad_label")
            likert(number, points, orientation)
            out |= {"label_kind": "likert", "n_points": points, "label": int(number), "orientation": orientation}
        won = votes(out["votes"])["winner"] if "votes" in out else likert(out["label"], out["n_points"], out["orientation"])[0]
        for other in {row.get(name) for name in ("preference", "choice", "winner") if isinstance(row.get(name), str)} if "label" not in options.columns() else ():
            other = options.label_map.get(_label_name(other), _WINNERS.get(other.strip().lower(), other.strip()))
            if other.lower() in ("a", "b", "tie") and other.lower() != won.lower():
                raise Bad("label_unsaid")
    if isinstance(row.get("criteria"), str) and row["criteria"]:
        out["criteria"] = row["criteria"]
    if (turn := _whole(row.get("turn_index"))) is not None:
        out["turn_index"] = turn
    out |= _annotated(row)
    for side in "ab":
        if isinstance(row.get(f"model_{side}"), str):
            out[f"gen_{side}"] = {"model_id": row[f"model_{side}"]}
    return "comparisons/1", out, set()


def _label_name(label: Any) -> str:
    """A label as `label_map` writes it: 2 and 2.0 are "2"."""
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label).strip()


def _alpaca_eval(row: dict, options) -> tuple[str, dict, set]:
    """AlpacaEval judgements: preference in [1, 2], 1 = output_1 is better, 1.5 = tie."""
    if row.get("preference") is None:
        raise Bad("missing_column")
    p_a = 2 - to_number(row["preference"])
    if not 0 <= p_a <= 1:
        raise Bad("bad_label")
    out = {"prompt": to_prompt(row.get("instruction")), "response_a": to_completion(row.get("output_1")),
           "response_b": to_completion(row.get("output_2")), "label_kind": "prob", "p_a": p_a,
           "ann": {"annotator_type": "ai"}}
    for side, key in (("a", "generator_1"), ("b", "generator_2")):
        if isinstance(row.get(key), str):
            out[f"gen_{side}"] = {"model_id": row[key]}
    if isinstance(row.get("dataset"), str):
        out["source"] = row["dataset"]
    return "comparisons/1", out, set()


def _gsm8k(row: dict, options) -> tuple[str, dict, set]:
    question, answer = row.get("question"), row.get("answer")
    if question is None or answer is None:
        raise Bad("missing_column")
    if not isinstance(question, str) or not isinstance(answer, str):
        raise Bad("wrong_type")
    value, kind = gsm8k_answer(answer)
    if options.kind in ("demonstrations/1", "text/1"):
        return "demonstrations/1", {"messages": to_prompt(question) + to_completion(answer), "train_turns": [1]}, set()
    return "prompts/1", {"prompt": to_prompt(question), "domain": "math", "answer": value, "answer_type": kind,
                         "_extra": {"solution": answer}}, set()


def asked_about(question: Any, *given: Any) -> Any:
    """The question, and behind it what it is about (Alpaca's input, Dolly's context, a passage), where these are texts."""
    for text in given:
        if isinstance(question, str) and isinstance(text, str) and text.strip():
            question = f"{question}\n\n{text}"
    return question


def _qa(row: dict, options) -> tuple[str, dict, set]:
    """A question, behind its passage where it has one, and its answer; further ways to say it are aliases (TriviaQA, SQuAD, Natural Questions, PopQA). BIG-Bench Hard: input and target."""
    if row.get("question") is None and isinstance(row.get("target"), str):
        row = {"question": row.get("input"), "answer": row["target"], **({"answer_type": "mc"} if re.fullmatch(r"\([A-Z]\)", row["target"].strip()) else {})}
    row = mc.behind_passage(row)
    answers = [one for one in _said_answers(row) if one is not None]
    answer = answers[0] if answers else row.get("answer")
    if options.kind == "prompts/1":
        kind, out, codes = _prompts({"prompt": row.get("question"), "answer": answer, "answer_type": row.get("answer_type")}, options)
        more = list(dict.fromkeys(str(one) for one in answers[1:] if str(one) != out.get("answer")))
        return kind, {**out, **({"answer_type": "text", "_extra": {"aliases": more}} if more else {})}, codes
    return _demonstration({"prompt": row.get("question"), "completion": answer}, options)


def _said_answers(row: dict) -> list:
    """The answers of a question in the forms that open-domain sets have, the one to be shown first; [] of a plain answer. Raises Bad of another form."""
    found = next((row[name] for name in ("answer", "answers", "possible_answers") if row.get(name) is not None), None)
    if isinstance(found, str) and found[:1] == "[" and row.get("possible_answers") is found:
        try:
            found = orjson.loads(found)
        except orjson.JSONDecodeError:
            raise Bad("wrong_type") from None
    if isinstance(found, dict):
        found = [found.get("value"), *(found.get("aliases") or ())] if "aliases" in found else found.get("text")
    if not isinstance(found, list):
        return []
    if not found or not all(isinstance(one, (str, int, float, type(None))) for one in found):
        raise Bad("wrong_type")
    return found


def _is_qa(row: dict) -> bool:
    """Whether a source row is a question with answers in a form of their own, or one of BIG-Bench Hard, which has nothing but an input and a target."""
    keys = {key for key, value in row.items() if value is not None}
    if keys == {"input", "target"}:
        return True
    try:
        return isinstance(row.get("question"), str) and bool(keys & {"answers", "possible_answers"}) and bool(_said_answers(row))
    except Bad:
        return False


def _math(row: dict, options) -> tuple[str, dict, set]:
    """MATH, MATH-500, AIME: the answer is that of the column, else the last box of the solution; level and subject are kept."""
    from stages.verification.verifiers import extract_boxed

    problem, solution, answer = row.get("problem"), row.get("solution"), row.get("answer")
    if options.kind in ("demonstrations/1", "text/1"):
        return _demonstration({"prompt": problem, "completion": solution}, options)
    if not isinstance(solution, (str, type(None))):
        raise Bad("wrong_type")
    if answer is None or answer == "":
        answer = extract_boxed(solution or "")
    if answer is None:
        raise Bad("verifier_spec_invalid")
    if isinstance(answer, str) and answer.strip().lower() in _NO_ANSWER:
        raise Bad("no_final_answer")
    kind, out, codes = _prompts({"prompt": problem, "answer": answer, "answer_type": row.get("answer_type"), "category": row.get("subject") or row.get("type")}, options)
    if out["answer_type"] == "text" and row.get("answer_type", options.answer_type) is None:
        out["answer_type"] = "latex"
    level = row.get("level")
    if isinstance(level, str) and (number := re.fullmatch(r"\s*(?:Level)?\s*(\d+)\s*", level)):
        level = int(number.group(1))
    return kind, {**out, "domain": "math", "_extra": {key: value for key, value in (("solution", solution), ("level", level)) if value is not None}}, codes


#: Verifiers that open-instruct's rows name and that are known here.
_RLVR = {"gsm8k": "gsm8k", "math": "math", "string_f1": "string_f1", "ifeval": "ifeval", "ifeval_old": "ifeval"}
#: Constraints of Tulu 3's prompts: function -> (IFEval's id, {its argument: theirs}), and the relation of those that ask for an exact count.
_TULU: dict[str, tuple[str, dict[str, str], dict]] = {
    "verify_keywords": ("keywords:existence", {"keywords": "keyword_list"}, {}),
    "verify_keyword_frequency": ("keywords:frequency", {"keyword": "word", "frequency": "N"}, {"relation": "exactly"}),
    "validate_forbidden_words": ("keywords:forbidden_words", {"forbidden_words": "forbidden_words"}, {}),
    "verify_letter_frequency": ("keywords:letter_frequency", {"letter": "letter", "let_frequency": "N"}, {"let_relation": "exactly"}),
    "validate_response_language": ("language:response_language", {"language": "language"}, {}),
    "verify_paragraph_count": ("length_constraints:number_paragraphs", {"num_paragraphs": "N"}, {}),
    "validate_word_constraint": ("length_constraints:number_words", {"num_words": "N", "relation": "quantifier"}, {}),
    "verify_sentence_constraint": ("length_constraints:number_sentences", {"num_sentences": "N", "relation": "quantifier"}, {}),
    "validate_paragraphs": ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": "N", "nth_paragraph": "i", "first_word": "first_word"}, {}),
    "verify_postscript": ("detectable_content:postscript", {"postscript_marker": "postscript_marker"}, {}),
    "validate_placeholders": ("detectable_content:number_placeholders", {"num_placeholders": "N"}, {}),
    "verify_bullet_points": ("detectable_format:number_bullet_lists", {"num_bullets": "N"}, {}),
    "validate_title": ("detectable_format:title", {}, {}),
    "validate_highlighted_sections": ("detectable_format:number_highlighted_sections", {"num_highlights": "N"}, {}),
    "validate_sections": ("detectable_format:multiple_sections", {"section_spliter": "section_splitter", "num_sections": "N"}, {}),
    "validate_json_format": ("detectable_format:json_format", {}, {}),
    "validate_repeat_prompt": ("combination:repeat_prompt", {"prompt_to_repeat": "original_prompt"}, {}),
    "validate_two_responses": ("combination:two_responses", {}, {}),
    "validate_uppercase": ("change_case:english_capital", {}, {}),
    "validate_lowercase": ("change_case:english_lowercase", {}, {}),
    "validate_frequency_capital_words": ("change_case:capital_word_frequency", {"capital_frequency": "N", "capital_relation": "quantifier"}, {}),
    "validate_end": ("startend:end_checker", {"end_phrase": "end_phrase"}, {}),
    "validate_quotation": ("startend:quotation", {}, {}),
    "validate_no_commas": ("punctuation:no_comma", {}, {})}


def _one_of(value: Any) -> Any:
    """The element of a list of one, as newer rows write verifiers and ground truths; Bad(verifier_spec_invalid) of more: a row has one verifier."""
    if isinstance(value, list) and len(value) != 1:
        raise Bad("verifier_spec_invalid")
    return value[0] if isinstance(value, list) else value


def _literal(text: str, code: str = "verifier_spec_invalid") -> Any:
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


def _asked_constraints(truth: Any) -> dict:
    """``instruction_id_list`` and ``kwargs`` of an ifeval ground truth: ``[{"instruction_id": [...], "kwargs": [...]}]``, or Tulu 3's ``{"func_name": ..., "N": ...}``."""
    while isinstance(truth, (str, list)):
        truth = _one_of(truth) if isinstance(truth, list) else _literal(truth)
    if not isinstance(truth, dict):
        raise Bad("verifier_spec_invalid")
    ids = truth.get("instruction_id", truth.get("instruction_id_list"))
    if ids is not None:
        ids = ids if isinstance(ids, list) else [ids]
        kwargs = truth.get("kwargs") or [None] * len(ids)
        if not ids or not isinstance(kwargs, list) or not all(isinstance(one, (dict, type(None))) for one in kwargs):
            raise Bad("verifier_spec_invalid")
        return {"instruction_id_list": ids, "kwargs": [one or {} for one in kwargs]}
    if not isinstance(truth.get("func_name"), str) or truth["func_name"] not in _TULU:
        raise Bad("verifier_spec_invalid")
    name, arguments, fixed = _TULU[truth["func_name"]]
    return {"instruction_id_list": [name], "kwargs": [fixed | {ours: truth.get(theirs) for ours, theirs in arguments.items()}]}


def _asked_tests(truth: Any) -> list[dict]:
    """Tests of a code ground truth: asserts, or inputs and outputs of a program, as a list or its JSON."""
    while isinstance(truth, str) or isinstance(truth, list) and len(truth) == 1 and isinstance(truth[0], str) and truth[0].lstrip()[:1] == "[":
        truth = _literal(truth if isinstance(truth, str) else truth[0])
    if isinstance(truth, list) and truth and all(isinstance(one, str) and one.strip() for one in truth):
        return [{"kind": "python", "code": one} for one in truth]
    if isinstance(truth, list) and truth and all(isinstance(one, dict) and {"input", "output"} <= one.keys() for one in truth):
        return code.tests_of(code.listed_cases({"inputs": [one["input"] for one in truth], "outputs": [one["output"] for one in truth]}))
    raise Bad("verifier_spec_invalid")


def _rlvr(row: dict, options) -> tuple[str, dict, set]:
    """open-instruct's RLVR rows: messages, a ground truth, and in `dataset` the name of the row's own verifier, which stays with the row. An answer that is written out already is left out."""
    if options.kind in ("demonstrations/1", "text/1"):
        return _messages({key: value for key, value in row.items() if key not in ("ground_truth", "dataset")}, options)
    if row.get("messages") is None or row.get("ground_truth") is None:
        raise Bad("missing_column")
    messages, named = to_messages(row["messages"]), _one_of(row.get("dataset"))
    asked = {"prompt": messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages, "system": row.get("system"), "category": row.get("category"), "language": row.get("language")}
    if isinstance(named, str) and named.strip().lower() in ("code", "code_stdio"):
        kind, out, codes = _prompts(asked, options)
        return kind, {**out, "domain": "code", "tests": _asked_tests(row["ground_truth"])}, codes
    truth = _one_of(row["ground_truth"])
    if not isinstance(named, str) or named.strip().lower() not in _RLVR:
        raise Bad("verifier_spec_invalid")
    verifier = _RLVR[named.strip().lower()]
    if verifier == "ifeval":
        kind, out, codes = _prompts(asked | _asked_constraints(truth), options)
    else:
        if not isinstance(truth, (str, int, float, Decimal)) or isinstance(truth, bool):
            raise Bad("wrong_type")
        truth = plain(truth)
        types = {"gsm8k": None, "math": "latex", "string_f1": "text"}
        kind, out, codes = _prompts(asked | {"answer": truth.replace(",", "") if verifier == "gsm8k" else truth, "answer_type": types[verifier]}, options)
        if verifier == "gsm8k" and out["answer_type"] not in ("integer", "number"):
            raise Bad("verifier_spec_invalid")
    return kind, {**out, **({"domain": "math"} if verifier in ("gsm8k", "math") else {}), "_extra": {"verifier": verifier}}, codes


def _instruction(row: dict, options) -> tuple[str, dict, set]:
    return _demonstration({"prompt": asked_about(row.get("instruction"), row.get("input"), row.get("context")), "completion": row.get("output", row.get("response", row.get("completion"))),
                           "system": row.get("system")}, options)


def _turns(row: dict, options) -> tuple[str, dict, set]:
    """MT-Bench questions: the first turn is the prompt, later turns stay in extra_json."""
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns:
        raise Bad("missing_column" if turns is None else "wrong_type")
    turns = [turn["content"] if isinstance(turn, dict) and set(turn) <= {"role", "content"} and isinstance(turn.get("content"), str) else turn for turn in turns]  # Arena-Hard
    return "prompts/1", {"prompt": to_prompt(turns[0]), "_extra": {"turns": turns}, **_texts(row, "category")}, set()


#: Lists of requests that a model should refuse, in their published columns: what asks, what a row has besides, and what it is about (eval.over_refusal).
_HARMFUL = (("Behavior", "SemanticCategory", "SemanticCategory"), ("forbidden_prompt", "category", "category"), ("goal", "target", None))  # HarmBench, StrongREJECT, AdvBench


def _harmful_list(row: dict) -> tuple[str, str, str | None] | None:
    return next((one for one in _HARMFUL if all(isinstance(row.get(name), str) and row[name] for name in one[:2])), None)


def _harmful(row: dict, options) -> tuple[str, dict, set]:
    """A request of HarmBench (behind its context, where it has one), StrongREJECT or AdvBench, labelled unsafe: refusing it is right."""
    found = _harmful_list(row)
    if found is None:
        raise Bad("missing_column")
    asks, _, about = found
    before = row.get("ContextString")
    text = f"{before.rstrip()}\n\n---\n\n{row[asks]}" if isinstance(before, str) and before.strip() else row[asks]
    return "prompts/1", {"prompt": to_prompt(text, row.get("system")), **({"category": row[about]} if about else {}), "_extra": {"label": "unsafe"}}, set()


def _stepwise(row: dict, options) -> tuple[str, dict, set]:
    steps, labels = row.get("completions"), row.get("labels")
    if steps is None or labels is None:
        raise Bad("missing_column")
    if not isinstance(steps, list) or not isinstance(labels, list) or not all(isinstance(s, str) for s in steps):
        raise Bad("wrong_type")
    if len(steps) != len(labels) or not steps:
        raise Bad("step_label_length")
    zero_one = options.step_labels == "zero_one"
    values = [(1 if label else -1) if isinstance(label, bool) else label for label in labels]
    if any(isinstance(value, (str, list, dict, type(None))) or value not in (-1, 0, 1) or
           (zero_one and value == -1 and not isinstance(label, bool)) for value, label in zip(values, labels)):
        raise Bad("bad_label")
    values = [-1 if zero_one and value == 0 else int(value) for value in values]
    out = {"prompt": to_prompt(row.get("prompt"), row.get("system")), "completions": steps, "labels": values, "solution_correct": -1 not in values,
           **_texts(row, "answer", "separator"), **_annotated(row)}
    for name in ("solution_correct", "is_quality_control"):
        if row.get(name) not in (None, ""):
            out[name] = to_label(row[name])
    if (generation := _whole(row.get("generation"))) is not None:
        out["generation"] = generation
    if row.get("soft_labels") is not None:
        if not isinstance(row["soft_labels"], list):
            raise Bad("wrong_type")
        out["soft_labels"] = [to_number(value) for value in row["soft_labels"]]
        if len(out["soft_labels"]) != len(steps):
            raise Bad("step_label_length")
        if not all(0 <= value <= 1 for value in out["soft_labels"]):
            raise Bad("bad_label")
    return "stepwise/1", out, set()


def _segments(row: dict, options) -> tuple[str, dict, set]:
    """A pair whose responses are cut into scored half-open spans [start, end), in characters or tokens (`data.segments`)."""
    _, pair, codes = _pair(row, options)
    out = {name: pair[name] for name in ("prompt", "chosen", "rejected")}
    unit = row.get("offset_unit") or "char"
    if unit not in ("char", "token"):
        raise Bad("wrong_type")
    for side in ("chosen", "rejected"):
        out[f"{side}_segments"] = [_segment(item) for item in _listed(row.get(f"{side}_segments"))]
        if unit == "char":
            codes.update(segment_codes(out[side][0].get("content") or "", out[f"{side}_segments"]))
    return "segments/1", {**out, "offset_unit": unit}, codes


def _segment(item: Any) -> dict:
    """{"start", "end", "scores"}; scores are {aspect: number} or a list of {"aspect", "score"}."""
    if not isinstance(item, dict) or any(type(item.get(key)) is not int for key in ("start", "end")):
        raise Bad("wrong_type")
    scores = item.get("scores")
    if isinstance(scores, dict):
        scores = [{"aspect": aspect, "score": score} for aspect, score in scores.items()]
    if not isinstance(scores, list) or not scores or not all(
            isinstance(s, dict) and isinstance(s.get("score"), (int, float)) and math.isfinite(s["score"]) for s in scores):
        raise Bad("wrong_type")
    return {"start": item["start"], "end": item["end"], "scores": [
        {"aspect": str(s.get("aspect")), "score": float(s["score"]), "rationale": s.get("rationale")} for s in scores]}


_TEXTS = frozenset(("domain", "category", "language", "critique", "answer", "separator", "context"))
_ANSWER = ("answer", "answer_type", "tests", "constraints", "facts", "reward_route", "domain", "category", "language",
           "instruction_id_list", "kwargs", "test", "entry_point")
# format -> (adapter, required columns, further columns it reads, in order of precedence)
FORMATS: dict[str, tuple[Callable, tuple[str, ...], tuple[str, ...]]] = {
    "alpaca_eval": (_alpaca_eval, ("instruction", "output_1", "output_2", "preference"),
                    ("generator_1", "generator_2", "dataset")),
    "best_of": (lists.best_of, ("chosen", "rejected"), ("prompt", *lists.USED)),
    "segments": (_segments, ("chosen", "rejected", "chosen_segments", "rejected_segments"), ("prompt", "system", "offset_unit")),
    "hh": (_pair, ("chosen", "rejected"), ("prompt",)),
    "preference": (_pair, ("chosen", "rejected"), ("prompt", "system", "chosen_score", "rejected_score", "margin", "strength",
                                                   "label_prob", "grade", "chosen_model", "rejected_model", "pairs_in_group", "rank_gap",
                                                   "stage_index", "turn_index", "constraint_ids")),
    "comparisons": (_comparison, ("response_a", "response_b"), (
        "prompt", "system", "label", "preference", "choice", "winner", "votes", "p_a", "n_points", "orientation", "annotator_id",
        "annotator", "model_a", "model_b", "label_kind", "criteria", "turn_index")),
    "stepwise": (_stepwise, ("prompt", "completions", "labels"), ("system", "answer", "soft_labels", "separator", "solution_correct", "generation",
                                                                 "is_quality_control", "annotator_id", "annotator")),
    "rankings": (_ranking, ("completions",), ("prompt", "system", "ranks", "scores", "models", "annotator_id", "annotator", "criteria")),
    "unpaired": (_unpaired, ("completion", "label"), ("prompt", "system", "label_kind")),
    "events": (_event, ("prompt", "completion", "action"), ("system", "edited_text")),
    "ratings": (_rating, ("completion", "score"), ("prompt", "system", "aspects", "critique", "scale_min", "scale_max", "model", "annotator_id",
                                                "annotator", "criteria")),
    "rlvr": (_rlvr, ("messages", "ground_truth", "dataset"), ("system", "category", "language")),
    "messages": (_messages, ("messages",), ("system", "tools", "category", "train_turns")),
    "prompt_completion": (_demonstration, ("prompt", "completion"), ("system", "category")),
    "programs": (code.programs, (), code.USED),
    "multiple_choice": (mc.multiple_choice, ("question", "choices", "answer"), mc.USED),
    "harmful": (_harmful, (), ("system", "Behavior", "SemanticCategory", "ContextString", "forbidden_prompt", "category", "goal")),
    "gsm8k": (_gsm8k, ("question", "answer"), ()),
    "math": (_math, ("problem", "solution"), ("answer", "answer_type", "level", "type", "subject")),
    "qa": (_qa, ("question", "answer"), ("answers", "possible_answers", "input", "target", *mc.PASSAGES)),
    "instruction": (_instruction, ("instruction",), ("input", "context", "output", "response", "completion", "system")),
    "turns": (_turns, ("turns",), ("category",)),
    "prompts": (_prompts, ("prompt",), ("system", *_ANSWER)),
    "text": (_text, ("text",), ("domain",)),
}
ALIASES = {"trl": "auto", "likert": "comparisons", "sharegpt": "messages", "prompt_only": "prompts",
           "language_modeling": "text", "alpaca": "instruction", "implicit": "preference"}


# Kind of the rows of a format, for files of which no sampled row can be read.
_KINDS = {"alpaca_eval": "comparisons/1", "best_of": "rankings/1", "segments": "segments/1", "hh": "pairs/1", "preference": "pairs/1", "comparisons": "comparisons/1", "stepwise": "stepwise/1",
          "rankings": "rankings/1", "unpaired": "unpaired/1", "events": "unpaired/1", "ratings": "ratings/1", "rlvr": "prompts/1", "messages": "demonstrations/1", "prompt_completion": "demonstrations/1",
          "programs": "prompts/1", "multiple_choice": "prompts/1", "harmful": "prompts/1", "gsm8k": "prompts/1", "math": "prompts/1", "qa": "demonstrations/1", "instruction": "demonstrations/1", "turns": "prompts/1", "prompts": "prompts/1", "text": "text/1"}


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
        if name == "hh" and not ("prompt" not in keys and isinstance(row.get("chosen"), str) and _HH_TURN.match(row["chosen"])):
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
            if _harmful_list(row):
                return name
            continue
        if name == "qa" and _is_qa(row):
            return name
        if name == "multiple_choice":
            if mc.is_multiple_choice(row):
                return name
            continue
        if name == "math" and "problem" in keys and "solution" not in keys and "answer" in keys:  # AIME
            return name
        if name == "math" and "answer" not in keys and not (isinstance(row.get("solution"), str) and "boxed" in row["solution"]):
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


def rename(row: dict, column_map: dict[str, str]) -> dict:
    """The row with our names: column_map is {our name: source name}; dotted source names go inside structs."""
    taken = set(column_map.values())
    out = {name: value for name, value in row.items() if name not in taken}        # all at once: two columns may change places
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


class Adapter:
    """Reads rows of one format. options: the stage's config (kind, scales, column_map ...). `published.adapter_of` makes the one of a file."""

    def __init__(self, name: str, options, records: Callable | None = None):
        self.name = name
        #: records of the source -> those that this adapter reads; for published datasets in columns of their own (`published.py`)
        self.records = records or iter
        self._read, required, more = FORMATS[name]
        self._used = frozenset(required) | frozenset(more) | frozenset(_COMMON)
        self._options, self._map = options, options.columns()
        self._plain = {column: SYNONYMS[column] for column in self._used if column in SYNONYMS}
        self._lists = sorted(self._used & _LISTS)
        self._messages = [column for column in _MESSAGES if column in self._used]
        self.unknown_splits: set[str] = set()
        self._tools = name not in ("messages", "text")      # those of conversations are read with their turns
        if self._tools:
            self._used |= {"tools"}
        self._asks = name in ("best_of", "segments", "preference", "comparisons", "stepwise", "rankings", "unpaired", "ratings")

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
        if isinstance(row.get("messages"), str) and "messages" in self._messages:       # a list that was written as text
            row = row | {"messages": _literal(row["messages"], "wrong_type")}
        if self._asks and row.get("prompt") is None and "prompt" not in self._map:
            row = _with_question(row)
        reasoning = {"written": 0, "left": 0}
        row = self._with_reasoning(row, reasoning)
        kind, out, codes = self._read(row, self._options)
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
            elif isinstance(value, (list, dict)) and key in _TEXTS and key not in out:
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
                read = to_time(value) if key == "collected_at" else split_named(value) if isinstance(value, str) else None
                if read is None:
                    extra[key] = value
                    if key == "split" and len(self.unknown_splits) < 8:
                        self.unknown_splits.add(str(value)[:40])
                else:
                    out[key] = read
            elif isinstance(value, float) and math.isnan(value):        # how pandas writes null
                continue
            elif isinstance(value, (str, int, float)) and not isinstance(value, bool):
                out[key] = plain(value)
            else:
                raise Bad("wrong_type")
        if unread := self._unread(row):
            extra["message_fields"] = unread
        if extra:
            out["extra_json"] = canonical_bytes(extra).decode("utf-8")
        return kind, out, codes


    def _with_reasoning(self, row: dict, counted: dict[str, int]) -> dict:
        """The row with the reasoning of assistant messages before their text, between <think> and </think> (`synth.cold_start`), as chat templates of models that reason read it.

        ``counted``: how many messages had some that was ``written``, and ``left`` beside the text.
        """
        def thinking(item):
            if isinstance(item, list):              # a completion of several messages
                return [thinking(part) for part in item]
            if not isinstance(item, dict) or len(item) < 3 or item.get("role", _SHAREGPT.get(str(item.get("from")))) != "assistant":
                return item
            name = next((name for name in _REASONING if item.get(name)), None)
            text = "content" if "role" in item else "value"
            said = item.get(text)
            if name is None or isinstance(said, str) and "</think>" in said:    # none, or it is there already
                return item
            if self._options.reasoning == "drop" or not isinstance(item[name], str) or not isinstance(said, (str, type(None))):
                counted["left"] += 1
                return item
            counted["written"] += 1
            return {key: value for key, value in item.items() if key != name} | {text: f"<think>\n{item[name].strip()}\n</think>\n\n" + (said or "").lstrip("\n")}

        changes = {column: [thinking(item) for item in row[column]] for column in (*self._messages, "completions") if isinstance(row.get(column), list)}
        return {**row, **changes} if any(counted.values()) else row

    def _unread(self, row: dict) -> dict:
        """{column: {index: fields}} of what messages hold beyond our schema, such as `reasoning_content`."""
        found = {}
        for column in self._messages:
            messages = row.get(column)
            if isinstance(messages, list):
                fields = {str(index): more for index, item in enumerate(messages) if isinstance(item, dict) and len(item) > 2
                          and (more := {key: value for key, value in item.items() if key not in _MESSAGE_KEYS and value is not None})}
                if fields:
                    found[column] = fields
        return found


def _with_question(row: dict) -> dict:
    """The row with its question as `prompt`, where a column of another name asks it: in the implicit form the answers begin with it themselves."""
    for side in ("chosen", "rejected"):
        answer = row.get(side)
        if isinstance(answer, str) and _HH_TURN.match(answer) or isinstance(answer, list) and answer and isinstance(answer[0], dict) \
                and answer[0].get("role", answer[0].get("from")) in ("user", "system", "human"):
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


def known_columns() -> str:
    """One line per format for error messages: the columns that name it."""
    return "; ".join(f"{name}: {' + '.join(required)}" for name, (_, required, _) in FORMATS.items() if required)


