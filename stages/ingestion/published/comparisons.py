"""Two answers and a judgement that may be a tie: HelpSteer 2 and 3, PKU-SafeRLHF, SHP, WebGPT, JudgeLM, Arena ..."""

from __future__ import annotations

from typing import Any

from stages.ingestion.published.forms import Form, are_dicts, is_number, json_value, utterance, side, without
from stages.ingestion.published.ratings import summarised
from stages.ingestion.rules import Bad


def _steerpref(row: dict, options) -> list[dict]:
    """-3 says that the first answer is much better, 3 that the second one is, 0 nothing."""
    strength = row.get("preference_strength", row.get("overall_preference"))
    if not is_number(strength) or strength != int(strength) or not -3 <= strength <= 3:
        raise Bad("bad_label")
    first, second = ("response_1", "response_2") if "response_1" in row else ("response1", "response2")
    return [
        without(
            row,
            first,
            second,
            "context",
            "preference_strength",
            "overall_preference",
            prompt=row.get("context", row.get("prompt")),
            response_a=row[first],
            response_b=row[second],
            label=int(strength) + 4,
            n_points=7,
            orientation="low_is_a",
            model_a=None,
        )
    ]


_PKU_SAFETY = {"is_response_0_safe", "safer_response_id"}


def _pku(row: dict, options) -> list[dict]:
    """Which of two answers is more helpful, and which is safer; in the single-dimension sets one of them alone."""
    alone = None if row.keys() & _PKU_SAFETY else row.get("better_response_id")
    label = row["label"] if row.get("label") is not None else alone
    if label is None:  # two labels that often contradict each other
        raise Bad("label_unsaid")
    return [
        without(
            row,
            "response_0",
            "response_1",
            "label",
            *(("better_response_id",) if alone is not None else ()),
            response_a=row["response_0"],
            response_b=row["response_1"],
            choice=side(label),
            model_a=row.get("response_0_source"),
            model_b=row.get("response_1_source"),
        )
    ]


def _shp(row: dict, options) -> list[dict]:
    """labels is 1 where the first answer has more votes."""
    if row["labels"] not in (0, 1):
        raise Bad("bad_label")
    return [
        without(
            row,
            "history",
            "human_ref_A",
            "human_ref_B",
            "labels",
            prompt=row["history"],
            response_a=row["human_ref_A"],
            response_b=row["human_ref_B"],
            choice="A" if row["labels"] == 1 else "B",
        )
    ]


def _higher(a: float, b: float) -> str:
    """The choice that two scores make."""
    return "tie" if a == b else "A" if a > b else "B"


def _webgpt(row: dict, options) -> list[dict]:
    question, scores = row["question"], (row["score_0"], row["score_1"])
    if not all(map(is_number, scores)):
        raise Bad("bad_label")
    return [
        without(
            row,
            "question",
            "answer_0",
            "answer_1",
            prompt=question.get("full_text"),
            response_a=row["answer_0"],
            response_b=row["answer_1"],
            choice=_higher(*scores),
        )
    ]


def _judgelm(row: dict, options) -> list[dict]:
    """Two answers with a score each, as a judge wrote them down; its review is no column of ours."""
    scores = row["score"]
    if not isinstance(scores, list) or len(scores) != 2 or not all(map(is_number, scores)):
        raise Bad("bad_label")
    return [
        without(
            row,
            "question_body",
            "answer1_body",
            "answer2_body",
            "score",
            "text",
            prompt=row["question_body"],
            response_a=row["answer1_body"],
            response_b=row["answer2_body"],
            choice=_higher(*scores),
            judge_scores=scores,
            review=row.get("text"),
        )
    ]


def _summaries(row: dict, options) -> list[dict]:
    if not are_dicts(row["summaries"], "text") or len(row["summaries"]) != 2:
        raise Bad("wrong_type")
    a, b = row["summaries"]
    return [
        summarised(
            row,
            "summaries",
            response_a=a["text"],
            response_b=b["text"],
            choice=side(row["choice"]),
            model_a=a.get("policy"),
            model_b=b.get("policy"),
        )
    ]


def _prometheus_pair(row: dict, options) -> list[dict]:
    return [
        without(
            row,
            "instruction",
            "input",
            "output",
            "orig_instruction",
            "orig_response_A",
            "orig_response_B",
            "orig_preference",
            "orig_criteria",
            prompt=row["orig_instruction"],
            response_a=row["orig_response_A"],
            response_b=row["orig_response_B"],
            label=str(row["orig_preference"]).strip(),
            criteria=row.get("orig_criteria"),
        )
    ]


def _arena(row: dict, options) -> list[dict]:
    """Two whole conversations, or as far as the judged `turn` (MT-Bench's judgements): what they begin with alike is
    the prompt.
    """
    same, a, b = 0, row["conversation_a"], row["conversation_b"]
    if not are_dicts(a, "role", "content") or not are_dicts(b, "role", "content"):
        raise Bad("wrong_type")
    a, b = (
        [{"role": item["role"], "content": item["content"]} for item in _until(side, row.get("turn"))]
        for side in (a, b)
    )
    while same < min(len(a), len(b)) - 1 and a[same] == b[same]:
        same += 1
    while same and a[same - 1]["role"] != "user":
        same -= 1
    return [without(row, "conversation_a", "conversation_b", prompt=a[:same], response_a=a[same:], response_b=b[same:])]


def _until(talk: list[dict], turn: Any) -> list[dict]:
    """A conversation up to the answer of a turn, counted from 1; all of it where there is no such turn."""
    answers = [index for index, item in enumerate(talk) if item["role"] == "assistant"]
    return talk[: answers[int(turn) - 1] + 1] if is_number(turn) and turn in range(1, len(answers) + 1) else talk


def _arena_kaggle(row: dict, options) -> list[dict]:
    """Chatbot Arena as tables: the turns of a side are a JSON list, and three columns say who won."""
    asked, a, b = (json_value(row[name]) for name in ("prompt", "response_a", "response_b"))
    won = [name for name in ("winner_model_a", "winner_model_b", "winner_tie") if row[name] in (1, "1", True)]
    if not all(
        isinstance(side, list) and all(isinstance(text, str) for text in side) and side for side in (asked, a, b)
    ) or not len(asked) == len(a) == len(b):
        raise Bad("wrong_type")
    if len(won) != 1:
        raise Bad("bad_label")
    sides = [
        [
            message
            for turn, (question, answer) in enumerate(zip(asked, side))
            for message in ([utterance("user", question)] if turn else []) + [utterance("assistant", answer)]
        ]
        for side in (a, b)
    ]
    return [
        without(
            row,
            "winner_model_a",
            "winner_model_b",
            "winner_tie",
            prompt=[utterance("user", asked[0])],
            response_a=sides[0],
            response_b=sides[1],
            choice={"winner_model_a": "A", "winner_model_b": "B", "winner_tie": "tie"}[won[0]],
        )
    ]


_SIDES = (
    ("response_1", "response_2"),
    ("response_0", "response_1"),
    ("response1", "response2"),
    ("response_A", "response_B"),
    ("output_1", "output_2"),
    ("output_a", "output_b"),
    ("answer_1", "answer_2"),
    ("answer_a", "answer_b"),
    ("completion_a", "completion_b"),
)
_CHOSEN = ("label", "preference", "choice", "winner")


def _sides(row: dict) -> tuple[str, str] | None:
    return next((pair for pair in _SIDES if all(row.get(name) is not None for name in pair)), None)


def _two_answers(row: dict, options) -> list[dict]:
    """Two answers in columns of other names, with a label that is read as those of any comparison; further columns that
    say who won stay, so that one that says otherwise is seen.
    """
    first, second = _sides(row)
    said = {name: row[name] for name in _CHOSEN if row.get(name) is not None}
    said = {k: {first: "A", second: "B"}.get(won, won) if isinstance(won, str) else won for k, won in said.items()}
    label = said.pop(next(iter(said)))
    return [without(row, first, second, *_CHOSEN, response_a=row[first], response_b=row[second], label=label, **said)]


HELPSTEER2 = Form(("prompt", "response_1", "response_2", "preference_strength"), _steerpref)
HELPSTEER3 = Form(("context", "response1", "response2", "overall_preference"), _steerpref)
PKU = Form(
    ("prompt", "response_0", "response_1"),
    _pku,
    lambda row, options: bool(row.keys() & {*_PKU_SAFETY, "better_response_id"}),
    format=lambda options: "comparisons",
)
SHP = Form(("history", "human_ref_A", "human_ref_B", "labels"), _shp)
WEBGPT = Form(
    ("question", "answer_0", "answer_1", "score_0", "score_1"),
    _webgpt,
    lambda row, options: isinstance(row["question"], dict),
)
JUDGELM = Form(("question_body", "answer1_body", "answer2_body", "score"), _judgelm)
SUMMARIES = Form(("info", "summaries", "choice"), _summaries, lambda row, options: isinstance(row["info"], dict))
ARENA = Form(("conversation_a", "conversation_b", "winner"), _arena)
ARENA_KAGGLE = Form(
    ("prompt", "response_a", "response_b", "winner_model_a", "winner_model_b", "winner_tie"), _arena_kaggle
)
PROMETHEUS = Form(
    ("orig_instruction", "orig_response_A", "orig_response_B", "orig_preference"),
    _prometheus_pair,
    lambda row, options: options.kind in ("comparisons/1", "pairs/1"),
)
TWO_ANSWERS = Form(
    (),
    _two_answers,
    lambda row, options: (
        _sides(row) is not None
        and row.get("response_a") is None
        and any(row.get(name) is not None for name in _CHOSEN)
        and not ("output_1" in row and row.get("preference") is not None)
    ),
)
