"""Validation rules: every reason a row is put into quarantine (`data.validate`).

A rule returns codes, never raises; several codes of one row are sorted alphabetically. Texts are
compared exactly after strip: no case folding, because case can be the very thing that was labelled.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import get_args

ROLES = frozenset(("system", "user", "assistant", "tool"))

CODES = {
    "parse_error": "the row cannot be read (broken JSON or CSV, a key twice in one object, truncated file)",
    "missing_column": "a required column is absent or null",
    "wrong_type": (
        "a column has a value of another type, such as a text where messages or a list are expected, or bytes"
        " (offset_unit is char or token); what stands inside a column is named by its path:"
        " column_map='{prompt: conversation.question}'"
    ),
    "bad_label": (
        "a label outside its scale (the label of an answer is true or false, 1 or 0, yes or no; label_prob is"
        " P(chosen preferred), 0.5 to 1: swap the answers below that; orientation is low_is_a or high_is_a; train_turns and weight must leave an assistant turn to train; signals"
        " of a product that are not known have a weight in event_map)"
    ),
    "scale_unknown": (
        "a number as the label of A or B whose meaning is not said: write n_points=5 for a scale where 1 = A much"
        ' better, or label_map=\'{"1": "A", "2": "B"}\''
    ),
    "label_unsaid": (
        "two labels that need not agree: write label_column=NAME for the one that counts, for PKU-SafeRLHF"
        " label_column=better_response_id (more helpful) or label_column=safer_response_id (safer)"
    ),
    "no_final_answer": "a question without an answer to check: a proof is asked for, or no answer was found",
    "orphan_message": (
        "a message whose parent is not in its tree or dialogue (its messages must follow each other: sort the file by"
        " message_tree_id, or by dialogue_id and response_id)"
    ),
    "left_out_message": "a message that was deleted or failed its review, or that follows such a one",
    "ignored_event": "a product signal that event_map gives the weight 0",
    "superseded_event": (
        "another signal about the same answer counts: explicit ones (thumbs, edits) before behaviour, then the last one"
    ),
    "missing_aspect": "a rating without an aspect that aspect_weights weighs",
    "bad_rank": "ranks are not non-negative integers, one per completion",
    "empty_prompt": "nothing is left of the prompt after strip",
    "empty_completion": "nothing is left of a completion after strip",
    "chosen_equals_rejected": "both completions are equal after strip",
    "prompt_mismatch": "the two transcripts have different prompts",
    "last_not_assistant": "the transcript does not end with the assistant",
    "bad_role": "a role other than system, user, assistant, tool",
    "first_not_user": "the first turn after the system message is not the user's",
    "non_alternating": "two turns of the same role follow each other",
    "system_not_first": "a system message that is not the first message",
    "orphan_tool": "a tool message that does not follow the assistant or another tool message",
    "tool_not_answered": "a tool message that the assistant does not answer",
    "empty_conversation": "a conversation without messages",
    "invalid_utf8": "bytes or escapes that are no Unicode text",
    "control_chars": "NUL or other control characters",
    "too_long": "more characters than max_chars",
    "too_short": "a completion with fewer characters than min_chars",
    "no_pair": "a ranking or rating group that yields no pair",
    "all_tied": "a tie, which tie_policy drops",
    "cut_answer": "a pair whose rejected answer was cut when it was sampled, which a ranking would prefer to others",
    "verifier_spec_invalid": (
        "its own verifier does not mark the answer right (write answer_type=text, or repair it), tests or constraints"
        " are empty, a constraint has an unknown id or wrong arguments, reward_route names no reward component, or a"
        " timeout_s is not positive"
    ),
    "choice_unknown": (
        "the answer names none of the choices, or could mean two of them (write a letter; choice_base=1 where numbers"
        " count from 1), or there are not 2 to 26 choices with text"
    ),
    "score_inconsistent": "the overall score contradicts its aspects or scale",
    "weight_sum": "weights that do not sum to 1",
    "span_out_of_range": "a span outside its text",
    "segments_overlap": "segments that overlap or are not sorted",
    "step_label_length": "not one label per step",
    "duplicate_row": "the same content was already seen (the first row is kept)",
    "contradicts_row": (
        "an earlier row has the same answers with the labels reversed; for labelled completions, another row has the"
        " other label (on_conflict=majority lets them vote); for prompts, an earlier row has another answer, which is"
        " kept (deduplicate=exact keeps both)"
    ),
    "quality_control": "a row that screens annotators and is no training data; kind=stepwise/1 keeps it, marked",
    "contaminated": "the prompt overlaps with an evaluation set",
    "near_duplicate": "a near copy of an earlier row (only if near_duplicates is keep_first)",
}
# Columns that are a row's content: what two rows have alike where they are the same.
CONTENT = {
    "pairs/1": ("prompt", "chosen", "rejected"),
    "comparisons/1": ("prompt", "response_a", "response_b"),
    "demonstrations/1": ("messages",),
    "prompts/1": ("prompt", "answer"),
    "rankings/1": ("prompt", "completions"),
    "ratings/1": ("prompt", "completion"),
    "unpaired/1": ("prompt", "completion"),
    "stepwise/1": ("prompt", "completions"),
    "segments/1": ("prompt", "chosen", "rejected"),
    "text/1": ("text",),
}
# Left out by a policy or a conversion rather than damaged: they do not count towards
# max_quarantine_fraction.
POLICY_CODES = frozenset(
    (
        "all_tied",
        "cut_answer",
        "no_pair",
        "contaminated",
        "near_duplicate",
        "quality_control",
        "no_final_answer",
        "ignored_event",
        "superseded_event",
        "left_out_message",
    )
)
# Answers that every verifier of their type reads as themselves, the usual ones: short texts without marks, and numbers.
_PLAIN = {True: re.compile(r"[+-]?\d{1,300}(\.\d{1,50})?"), False: re.compile(r"\w[\w ]{0,200}")}
# Of IFEval, but without a checker here: such prompts are kept, and their constraints cannot be scored.
_UNCHECKED = frozenset(("language:response_language",))

# C0 controls except tab, newline and carriage return, and DEL.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class Bad(Exception):
    """A row that goes to quarantine; `codes` says why."""

    def __init__(self, *codes: str):
        super().__init__(", ".join(codes))
        self.codes = codes


@lru_cache(maxsize=4096)
def _role_codes(roles: tuple[str, ...]) -> tuple[str, ...]:
    if not roles:
        return ("empty_conversation",)
    codes = set()
    if any(role not in ROLES for role in roles):
        codes.add("bad_role")
    if "system" in roles[1:]:
        codes.add("system_not_first")
    turns = [role for role in roles if role != "system"]
    if not turns or turns[0] in ("assistant", "tool"):
        codes.add("first_not_user")
    for index, role in enumerate(turns):
        before = turns[index - 1] if index else None
        after = turns[index + 1] if index + 1 < len(turns) else None
        if role == "tool":
            if before not in ("assistant", "tool"):
                codes.add("orphan_tool")
            elif after not in ("assistant", "tool"):
                codes.add("tool_not_answered")
        elif role == before:
            codes.add("non_alternating")
    return tuple(sorted(codes))


def role_codes(roles) -> list[str]:
    """Codes of a conversation's role sequence, for example `["user", "user"]` -> `["non_alternating"]`.

    A tool message may only follow the assistant or another tool message, and the assistant must
    answer it. System messages are looked through when neighbours are compared.
    """
    return list(_role_codes(tuple(roles)))


def has_text(message: dict) -> bool:
    """True if something is left of the message after strip, or if it calls a tool."""
    return bool((message.get("content") or "").strip() or message.get("function_calls"))


def same_completion(left: list[dict], right: list[dict]) -> bool:
    """Exact equality of two message lists after strip of each content."""
    if len(left) != len(right):
        return False
    for a, b in zip(left, right):
        if (a.get("content") or "").strip() != (b.get("content") or "").strip():
            return False
        if a.get("role") != b.get("role") or a.get("function_calls") != b.get("function_calls"):
            return False
    return True


def stripped(messages: list[dict]) -> list[dict]:
    """The messages with each content stripped, as equality sees them; the same list where there is nothing to strip."""
    if all((text := message.get("content") or "") == text.strip() for message in messages):
        return messages
    return [
        {**message, "content": message["content"].strip()} if message.get("content") else message
        for message in messages
    ]


def prompt_codes(prompt: list[dict]) -> set[str]:
    """`empty_prompt` if there is no message, no text at all, or the last turn says nothing."""
    turns = [message for message in prompt if message.get("role") != "system"]
    if not turns or not has_text(turns[-1]):
        return {"empty_prompt"}
    return set()


def completion_codes(prompt: list[dict], completion: list[dict]) -> set[str]:
    """Codes of one completion as the continuation of its prompt (roles, emptiness)."""
    codes = set()
    if not any(has_text(message) for message in completion):
        codes.add("empty_completion")
    if completion and completion[-1].get("role") != "assistant":
        codes.add("last_not_assistant")
    if prompt:
        codes.update(_role_codes(tuple(m.get("role") for m in prompt) + tuple(m.get("role") for m in completion)))
    return codes


def pair_codes(prompt: list[dict], chosen: list[dict], rejected: list[dict]) -> list[str]:
    """All codes of a preference pair, sorted.

    Equal answers are reported as such; that they may also be empty is then beside the point unless
    the text itself is missing.
    """
    if (
        len(prompt) == len(chosen) == len(rejected) == 1
        and prompt[0]["role"] == "user"
        and chosen[0]["role"] == rejected[0]["role"] == "assistant"
    ):  # the common case
        said, a, b = ((side[0].get("content") or "").strip() for side in (prompt, chosen, rejected))
        if said and a and b and a != b:
            return []
    codes = prompt_codes(prompt)
    codes |= completion_codes(prompt, chosen) | completion_codes(prompt, rejected)
    if same_completion(chosen, rejected):
        codes.add("chosen_equals_rejected")
    return sorted(codes)


def verifiable_codes(row: dict) -> set[str]:
    """`verifier_spec_invalid` unless the row's verifier marks its own answer right, its constraints run, and its reward
    routes exist (`data.prompts`).
    """
    answer, named = row.get("answer"), row.get("extra_json") if '"verifier"' in (row.get("extra_json") or "") else None
    good = (
        answer is None
        or (
            named is None
            and _PLAIN[row.get("answer_type") in ("integer", "number")].fullmatch(answer) is not None
            and row.get("answer_type") != "mc"
        )
        or _answer_holds(answer, row.get("answer_type"), named)
    )
    good = good and all(_constraint_runs(item["id"], item["kwargs_json"]) for item in row.get("constraints") or ())
    if good and row.get("reward_route"):
        from stages.reward.components import RewardComponent

        known = get_args(RewardComponent.model_fields["kind"].annotation)
        good = all(name in known for name in row["reward_route"])
    return set() if good else {"verifier_spec_invalid"}


@lru_cache(maxsize=4096)
def _answer_holds(answer: str, answer_type: str | None, extra_json: str | None) -> bool:
    from stages.verification.extraction import extract
    from stages.verification.golds import BadGold
    from stages.verification.verifiers import VERIFIERS, verifier_of

    row = {"answer": answer, "answer_type": answer_type, "extra_json": extra_json}
    letter = answer.strip().strip("().").upper()
    said = [answer, f"\\boxed{{{answer}}}", f"Therefore, the answer is ({letter})", f"Answer: {answer}"]
    try:
        name = verifier_of(row)
        if name == "math":
            said = [answer if extract(answer, ("boxed", "hash")) is not None else said[1]]
        return any(VERIFIERS[name](row, text)[0] for text in said)
    except BadGold:
        return False


@lru_cache(maxsize=4096)
def _constraint_runs(constraint_id: str, kwargs_json: str) -> bool:
    from stages.verification.constraints import check_constraint
    from stages.verification.golds import BadGold

    try:
        kwargs = json.loads(kwargs_json)
        if constraint_id not in _UNCHECKED:
            check_constraint(constraint_id, kwargs, "A word. Another one.\n\nAnd a third.")
    except (BadGold, ValueError, TypeError, AttributeError):
        return False
    return isinstance(kwargs, dict)


def conversation_codes(messages: list[dict], turns=None) -> list[str]:
    """Codes of a demonstration: role order, last turn by the assistant, no empty trained turn.

    turns: indices of the trained messages; None means every assistant turn.
    """
    codes = set(_role_codes(tuple(message.get("role") for message in messages)))
    if not messages:
        return sorted(codes)
    if messages[-1].get("role") != "assistant":
        codes.add("last_not_assistant")
    if turns is None:
        turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if any(not has_text(messages[index]) for index in turns if index < len(messages)):
        codes.add("empty_completion")
    users = [message for message in messages if message.get("role") == "user"]
    if users and not has_text(users[-1]):
        codes.add("empty_prompt")
    return sorted(codes)


def texts_of(value) -> list[str]:
    """All strings of a row value (messages, lists, structs), in order."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.values() for text in texts_of(item)]
    if isinstance(value, (list, tuple)):
        return [text for item in value for text in texts_of(item)]
    return []


def has_control_chars(value) -> bool:
    """True if any string in `value` holds NUL, another C0 control (tab and newlines are fine) or DEL."""
    return any(_CONTROL.search(text) for text in texts_of(value))


def messages_chars(messages) -> int:
    """Characters (Unicode code points) of the contents of a message list."""
    return sum(len(message.get("content") or "") for message in messages)


def segment_codes(text: str, segments: list[dict]) -> list[str]:
    """Codes of half-open character segments `[start, end)` of one text (`data.segments`)."""
    codes, end = set(), 0
    for segment in segments:
        if not 0 <= segment["start"] < segment["end"] <= len(text):
            codes.add("span_out_of_range")
        if segment["start"] < end:
            codes.add("segments_overlap")
        end = max(end, segment["end"])
    return sorted(codes)


def row_codes(kind: str, row: dict, raw: bytes | None, *, min_chars: int, max_chars: int | None) -> set[str]:
    """Codes of all rules for one row of our schema. raw: the line that it was read from, where there is one."""
    codes: set[str] = set()
    fields = [row[name] for name in CONTENT[kind] if row.get(name) is not None]
    # In JSON a control character can only come as an escape; most lines have none to look for.
    if raw is None or b"\\u00" in raw or b"\\b" in raw or b"\\f" in raw or b"\x7f" in raw:
        if has_control_chars(fields):
            codes.add("control_chars")
    if max_chars is not None and (raw is None or len(raw) > max_chars) and sum(map(len, texts_of(fields))) > max_chars:
        codes.add("too_long")
    prompt, sides = row.get("prompt"), []
    if kind in ("pairs/1", "segments/1"):
        sides = [row["chosen"], row["rejected"]]
        codes.update(pair_codes(prompt, *sides))
    elif kind == "comparisons/1":
        sides = [row["response_a"], row["response_b"]]
        codes.update(pair_codes(prompt, *sides))
    elif kind == "demonstrations/1":
        codes.update(conversation_codes(row["messages"], row["train_turns"]))
        sides = [[row["messages"][turn]] for turn in row["train_turns"]]
    elif kind == "prompts/1":
        codes |= prompt_codes(prompt) | verifiable_codes(row)
        codes.update(role_codes([message["role"] for message in prompt] + ["assistant"]))
    elif kind == "rankings/1":
        sides = row["completions"]
        codes |= prompt_codes(prompt)
        for side in sides:
            codes |= completion_codes(prompt, side)
        if len(sides) < 2:
            codes.add("no_pair")
    elif kind in ("ratings/1", "unpaired/1"):
        sides = [row["completion"]]
        codes |= prompt_codes(prompt) | completion_codes(prompt, row["completion"])
    elif kind == "stepwise/1":
        codes |= prompt_codes(prompt)
        if not all(step.strip() for step in row["completions"]):
            codes.add("empty_completion")
    elif kind == "text/1" and not row["text"].strip():
        codes.add("empty_completion")
    if min_chars:
        if kind == "text/1":
            sides = [[{"content": row["text"]}]]
        if any(messages_chars(side) < min_chars for side in sides):
            codes.add("too_short")
    return codes


def user_turns(messages: list[dict]) -> list[str]:
    """The texts of the user's messages."""
    return [message.get("content") or "" for message in messages if message.get("role") == "user"]


def asked(kind: str, row: dict) -> list[str]:
    """User turns of a row's prompt, or of its whole conversation (the text itself of text rows)."""
    return (
        [row["text"]]
        if kind == "text/1"
        else user_turns(row["messages"] if kind == "demonstrations/1" else row["prompt"])
    )
