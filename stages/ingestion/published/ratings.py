"""Ratings: HelpSteer, UltraFeedback, summarize_from_feedback by axis, Prometheus."""

from __future__ import annotations

import re

from stages.ingestion.published.forms import Form, are_dicts, is_number, utterance, without
from stages.ingestion.rules import Bad

_HELPSTEER = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
_EXTRA_ID = re.compile(r"\s*<extra_id_1>(User|Assistant)\n")


def _helpsteer(row: dict, options) -> list[dict]:
    """Five aspects from 0 to 4, of which helpfulness is the score; turns of a prompt are set apart by <extra_id_1>."""
    prompt = row["prompt"]
    if isinstance(prompt, str) and "<extra_id_1>" in prompt:
        first, *rest = _EXTRA_ID.split(prompt)
        prompt = [utterance("user", first)] + [
            utterance(role.lower(), text) for role, text in zip(rest[::2], rest[1::2])
        ]
    return [
        without(
            row,
            *_HELPSTEER,
            "response",
            prompt=prompt,
            completion=row["response"],
            score=row["helpfulness"],
            aspects={name: row[name] for name in _HELPSTEER},
            scale_min=0,
            scale_max=4,
        )
    ]


def _ultrafeedback(row: dict, options) -> list[dict]:
    """A rating per answer: the overall score, and the aspects with their rationales. What the model was told before it
    answered (custom_system_prompt) is not part of the prompt.
    """
    out = []
    for item in row["completions"]:
        aspects = []
        for name, found in (item.get("annotations") or {}).items():
            found = found[0] if isinstance(found, list) and found else found
            rating = found.get("Rating") if isinstance(found, dict) else None
            if isinstance(rating, (str, int, float)) and str(rating).strip() not in ("", "N/A"):
                aspects.append({"aspect": name, "score": rating, "rationale": found.get("Rationale")})
        scored = item.get("overall_score") if item.get("overall_score") is not None else item.get("fine-grained_score")
        more = {
            key: item[key]
            for key in ("principle", "custom_system_prompt", "fine-grained_score")
            if item.get(key) is not None
        }
        out.append(
            without(
                row,
                "completions",
                "models",
                "instruction",
                prompt=row["instruction"],
                completion=item["response"],
                score=scored,
                aspects=aspects or None,
                critique=item.get("critique"),
                model=item.get("model"),
                **more,
            )
        )
    return out


def _summary_axes(row: dict, options) -> list[dict]:
    summary = row["summary"]
    axes = {name: score for name, score in (summary.get("axes") or {}).items() if is_number(score)}
    if "overall" not in axes:
        raise Bad("missing_column")
    return [
        summarised(
            row,
            "summary",
            completion=summary.get("text"),
            score=axes["overall"],
            aspects={name: score for name, score in axes.items() if name != "overall"} or None,
            model=summary.get("policy"),
            scale_min=1,
            scale_max=7,
        )
    ]


def summarised(row: dict, *names: str, **new) -> dict:
    """A row of summarize_from_feedback: its post or article as OpenAI's prompt; valid1 and valid2 are validation."""
    info = row["info"]
    if isinstance(info.get("post"), str):
        prompt = (
            f"SUBREDDIT: r/{info.get('subreddit') or ''}\n\nTITLE: {info.get('title') or ''}\n\nPOST:"
            f" {info['post']}\n\nTL;DR:"
        )
    elif isinstance(info.get("article"), str):
        prompt = f"TITLE: {info.get('title') or ''}\n\n{info['article']}\n\nTL;DR:"
    else:
        raise Bad("missing_column")
    split = row.get("split")
    return without(
        row,
        "info",
        "worker",
        "batch",
        *names,
        prompt=prompt,
        annotator_id=row.get("worker"),
        batch_id=row.get("batch"),
        split=split.rstrip("12") if isinstance(split, str) and split.startswith("valid") else split,
        **new,
    )


def _prometheus(row: dict, options) -> list[dict]:
    """An answer, its score from 1 to 5 and the feedback on it; the prompts and outputs of the judge are what
    demonstrations are read from.
    """
    if not re.fullmatch(r"\s*[1-5]\s*", str(row["orig_score"])):
        raise Bad("bad_label")
    return [
        without(
            row,
            "instruction",
            "input",
            "output",
            "orig_instruction",
            "orig_response",
            "orig_score",
            "orig_feedback",
            "orig_criteria",
            prompt=row["orig_instruction"],
            completion=row["orig_response"],
            score=int(row["orig_score"]),
            scale_min=1,
            scale_max=5,
            critique=row.get("orig_feedback"),
            criteria=row.get("orig_criteria"),
        )
    ]


HELPSTEER = Form(("prompt", "response", *_HELPSTEER), _helpsteer)
ULTRAFEEDBACK = Form(
    ("instruction", "completions"),
    _ultrafeedback,
    lambda row, options: are_dicts(row["completions"], "response", "annotations"),
)
SUMMARY_AXES = Form(
    ("info", "summary"),
    _summary_axes,
    lambda row, options: isinstance(row["info"], dict) and isinstance(row["summary"], dict),
)
PROMETHEUS = Form(
    ("orig_instruction", "orig_response", "orig_score"),
    _prometheus,
    lambda row, options: options.kind in ("ratings/1", "rankings/1", "unpaired/1"),
)
