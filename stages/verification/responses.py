"""Parts of a response, thought and answer, told apart by their tags (reward.view, reward.format)."""

from __future__ import annotations

import re

#: Tags of a response's parts. Where they are special tokens, a completion's text keeps them
#: (stages/decoding/sampler.py).
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def view(
    text: str, which: str, *, open_tag: str = "<think>", close_tag: str = "</think>", missing: str = "full"
) -> str:
    """The part of a response that a source sees: `full`, `answer_only` or `think_only` (reward.view).

    A thought that is opened and not closed has an empty answer. Text without any tag is all answer
    (`missing="full"`) or none (`missing="empty"`).
    """
    if which == "full":
        return text
    if which not in ("answer_only", "think_only"):
        raise ValueError(f"unknown view {which!r}; write full, answer_only or think_only")
    if close_tag in text:
        head, _, tail = text.rpartition(close_tag)
        return tail if which == "answer_only" else head.partition(open_tag)[2] if open_tag in head else head
    if open_tag in text:
        return "" if which == "answer_only" else text.partition(open_tag)[2]
    return text if (which == "answer_only") == (missing == "full") else ""


def format_reward(text: str, preset: str, *, prefilled: str = "") -> float:
    """1.0 if the text has the structure of `preset`, else 0.0 (reward.format).

    `think_answer`: exactly one thought and one answer, in this order, nothing else, neither empty. `think_only`: one
    thought at the start and something after it. `answer_mark`: exactly one "Answer:", followed by text. Case-sensitive.
    """
    text = prefilled + text
    if preset == "answer_mark":
        return float(text.count("Answer:") == 1 and bool(text.rpartition("Answer:")[2].strip(" .\n")))
    once = all(text.count(tag) == 1 for tag in ("<think>", "</think>"))
    if preset == "think_only":
        match = re.fullmatch(r"\s*<think>(.*)</think>(.*)", text, re.DOTALL)
    elif preset == "think_answer":
        once = once and all(text.count(tag) == 1 for tag in ("<answer>", "</answer>"))
        match = re.fullmatch(r"\s*<think>(.*)</think>\s*<answer>(.*)</answer>\s*", text, re.DOTALL)
    else:
        raise ValueError(f"unknown format {preset!r}; write think_answer, think_only or answer_mark")
    return float(once and match is not None and all(part.strip() for part in match.groups()))
