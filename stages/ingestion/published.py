"""Published datasets in columns of their own -> rows in columns that `formats.py` reads.

A :class:`Form` knows a dataset by its columns and says in ours what its row says: which answer was preferred, what a
score is of, where the question stands. One row may hold several of ours (the four rated answers of UltraFeedback), and
several rows one (the messages of an OpenAssistant tree). What a row says twice, and differently (PKU-SafeRLHF: which
answer is better, which is safer), has to be chosen by a setting.

| datasets | become |
|---|---|
| HelpSteer, HelpSteer2 (helpfulness is the score, `aspect_weights` another), UltraFeedback, Prometheus' feedback collection (kind=ratings/1) | ratings |
| HelpSteer2-Preference, HelpSteer3, PKU-SafeRLHF (`label_column=better_response_id` or `safer_response_id`), SHP, WebGPT, JudgeLM, summarize_from_feedback, Chatbot Arena, JudgeBench, Prometheus' preference collection (kind=pairs/1) | comparisons |
| HelpSteer3's edits (the edited answer is preferred), HHH alignment | pairs |
| Nectar, OpenAssistant (messages or trees), Stack Exchange preferences | rankings |
| BeaverTails, conversations with a label (LLaMA-Factory's kto_tag), signals of a product (prompt, response, action) | unpaired; edits as pairs |
| verl and DAPO, DeepMath, Open-Reasoner-Zero, SYNTHETIC-1 and 2, NuminaMath, OpenR1 and OpenMathReasoning (kind=prompts/1), prompts with `solution` or `ground_truth` | prompts with answers or tests |
| TruthfulQA's questions with correct and incorrect answers | multiple choice |
| PRM800K, Math-Shepherd | stepwise |
| Capybara, LIMA, OpenOrca, s1K, xLAM, Glaive's function calls, OpenMathReasoning and OpenMathInstruct, ProsocialDialog, Alpaca with `history`, MBPP (kind=demonstrations/1) | demonstrations |
"""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from typing import Any, Callable, Iterator, NamedTuple

import orjson

from stages.ingestion import programs
from stages.ingestion.adapters import asked_about
from stages.ingestion.fields import hh_transcript
from stages.ingestion.formats import ALIASES, Adapter, detect, rename
from stages.ingestion.pairing import EVENT_MAP
from stages.ingestion.rules import Bad
from stages.ingestion.sources import Record, SourceFile, canonical_bytes, head_rows, parse_json


class Form(NamedTuple):
    """columns: all are in a row of this form and not null. read(row, options) -> its rows in our columns; raises Bad.
    fits(row, options): what more a row of this form has.

    stream, instead of read: records -> records, where a row of ours takes several; format: what they then are, by the
    kind that is wanted.
    """

    columns: tuple[str, ...]
    read: Callable[[dict, Any], list[dict]] | None = None
    fits: Callable[[dict, Any], bool] = lambda row, options: True
    stream: Callable[[Iterator[Record], Any], Iterator[Record]] | None = None
    format: Callable[[Any], str] | None = None

    def of(self, row: dict, options) -> bool:
        """Whether a row is of this form."""
        return all(row.get(name) is not None for name in self.columns) and self.fits(row, options)


def adapter_of(source: SourceFile, options) -> Adapter | None:
    """The reader of a file's rows, from the first of them, by `options.format`; None where no format fits."""
    wanted, columns = ALIASES.get(options.format, options.format), options.columns()
    rows = [rename(row, columns) if columns else row for row in head_rows(source)]
    form = form_of(rows, options)
    if form is not None:
        read = [
            record.row
            for record in _records(form, (Record(index, None, row, None) for index, row in enumerate(rows)), options)
            if record.row is not None
        ]
        # where all of them are refused, their codes say why
        name = form.format(options) if form.format else detect(read) or detect(rows) or "prompts"
        if wanted in ("auto", name):
            return Adapter(name, options, lambda records: _records(form, records, options, columns))
    name = detect(rows) if wanted == "auto" else wanted
    return None if name is None else Adapter(name, options)


def form_of(rows: list[dict], options) -> Form | None:
    """The published form that most of the rows have, None where most have none."""
    for form in FORMS:
        if 2 * sum(form.of(row, options) for row in rows) > len(rows):
            return form
    return None


def _records(form: Form, records: Iterator[Record], options, columns: dict | None = None) -> Iterator[Record]:
    """Records of a form with rows in our columns; the line, and the raw row for the quarantine, stay those of the
    source.
    """

    def parsed() -> Iterator[Record]:
        for record in records:
            row, code = record.row, record.code
            if code is None and row is None:
                row, code = parse_json(record.raw)
            yield record._replace(row=rename(row, columns) if columns and row else row, code=code)

    if form.stream is not None:
        yield from form.stream(parsed(), options)
        return
    for record in parsed():
        if record.code is not None or not form.of(record.row, options):
            yield record
            continue
        raw = record.raw if record.raw is not None else canonical_bytes(record.row)
        try:
            rows = form.read(record.row, options)
        except Bad as bad:
            yield Record(record.line, raw, None, bad.codes[0])
            continue
        if not rows:  # nothing vanishes
            yield Record(record.line, raw, None, "missing_column")
        for row in rows:
            yield Record(record.line, raw, row, None)


# -- parts --------------------------------------------------------------------------------------------
def _without(row: dict, *names: str, **new) -> dict:
    """The row without the columns that were read, with what they say in ours."""
    return {key: value for key, value in row.items() if key not in names and key not in new} | {
        key: value for key, value in new.items() if value is not None
    }


def _said(role: str, text: Any) -> dict:
    return {"role": role, "content": text}


def _json(value: Any) -> Any:
    """A JSON text as what it holds, all else as it is; Bad(wrong_type) for a broken one."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        raise Bad("wrong_type") from None


def _dicts(value: Any, *names: str) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(isinstance(item, dict) and all(name in item for name in names) for item in value)
    )


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _side(number: Any) -> str:
    """ "A" for 0, "B" for 1; Bad(bad_label) else."""
    if not _number(number) or number not in (0, 1):
        raise Bad("bad_label")
    return "B" if number else "A"


# -- ratings --------------------------------------------------------------------------------------------
_HELPSTEER = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
_EXTRA_ID = re.compile(r"\s*<extra_id_1>(User|Assistant)\n")


def _helpsteer(row: dict, options) -> list[dict]:
    """Five aspects from 0 to 4, of which helpfulness is the score; turns of a prompt are set apart by <extra_id_1>."""
    prompt = row["prompt"]
    if isinstance(prompt, str) and "<extra_id_1>" in prompt:
        first, *rest = _EXTRA_ID.split(prompt)
        prompt = [_said("user", first)] + [_said(role.lower(), text) for role, text in zip(rest[::2], rest[1::2])]
    return [
        _without(
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
            _without(
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
    axes = {name: score for name, score in (summary.get("axes") or {}).items() if _number(score)}
    if "overall" not in axes:
        raise Bad("missing_column")
    return [
        _summarised(
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


def _summarised(row: dict, *names: str, **new) -> dict:
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
    return _without(
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
        _without(
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


# -- comparisons ------------------------------------------------------------------------------------------
def _steerpref(row: dict, options) -> list[dict]:
    """-3 says that the first answer is much better, 3 that the second one is, 0 nothing."""
    strength = row.get("preference_strength", row.get("overall_preference"))
    if not _number(strength) or strength != int(strength) or not -3 <= strength <= 3:
        raise Bad("bad_label")
    first, second = ("response_1", "response_2") if "response_1" in row else ("response1", "response2")
    return [
        _without(
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
        _without(
            row,
            "response_0",
            "response_1",
            "label",
            *(("better_response_id",) if alone is not None else ()),
            response_a=row["response_0"],
            response_b=row["response_1"],
            choice=_side(label),
            model_a=row.get("response_0_source"),
            model_b=row.get("response_1_source"),
        )
    ]


def _shp(row: dict, options) -> list[dict]:
    """labels is 1 where the first answer has more votes."""
    if row["labels"] not in (0, 1):
        raise Bad("bad_label")
    return [
        _without(
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
    if not all(map(_number, scores)):
        raise Bad("bad_label")
    return [
        _without(
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
    if not isinstance(scores, list) or len(scores) != 2 or not all(map(_number, scores)):
        raise Bad("bad_label")
    return [
        _without(
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
    if not _dicts(row["summaries"], "text") or len(row["summaries"]) != 2:
        raise Bad("wrong_type")
    a, b = row["summaries"]
    return [
        _summarised(
            row,
            "summaries",
            response_a=a["text"],
            response_b=b["text"],
            choice=_side(row["choice"]),
            model_a=a.get("policy"),
            model_b=b.get("policy"),
        )
    ]


def _prometheus_pair(row: dict, options) -> list[dict]:
    return [
        _without(
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
    if not _dicts(a, "role", "content") or not _dicts(b, "role", "content"):
        raise Bad("wrong_type")
    a, b = (
        [{"role": item["role"], "content": item["content"]} for item in _until(side, row.get("turn"))]
        for side in (a, b)
    )
    while same < min(len(a), len(b)) - 1 and a[same] == b[same]:
        same += 1
    while same and a[same - 1]["role"] != "user":
        same -= 1
    return [
        _without(row, "conversation_a", "conversation_b", prompt=a[:same], response_a=a[same:], response_b=b[same:])
    ]


def _until(talk: list[dict], turn: Any) -> list[dict]:
    """A conversation up to the answer of a turn, counted from 1; all of it where there is no such turn."""
    answers = [index for index, item in enumerate(talk) if item["role"] == "assistant"]
    return talk[: answers[int(turn) - 1] + 1] if _number(turn) and turn in range(1, len(answers) + 1) else talk


def _arena_kaggle(row: dict, options) -> list[dict]:
    """Chatbot Arena as tables: the turns of a side are a JSON list, and three columns say who won."""
    asked, a, b = (_json(row[name]) for name in ("prompt", "response_a", "response_b"))
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
            for message in ([_said("user", question)] if turn else []) + [_said("assistant", answer)]
        ]
        for side in (a, b)
    ]
    return [
        _without(
            row,
            "winner_model_a",
            "winner_model_b",
            "winner_tie",
            prompt=[_said("user", asked[0])],
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
    return [_without(row, first, second, *_CHOSEN, response_a=row[first], response_b=row[second], label=label, **said)]


# -- pairs -------------------------------------------------------------------------------------------------
def _paired(row: dict, options) -> list[dict]:
    names = next((a, b) for a, b in _PAIRED if row.get(a) is not None and row.get(b) is not None)
    return [_without(row, *names, chosen=row[names[0]], rejected=row[names[1]])]


def _edited(row: dict, options) -> list[dict]:
    """An answer before and behind the edit that feedback on it asked for (HelpSteer3)."""
    return [
        _without(
            row,
            "context",
            "original_response",
            "edited_response",
            prompt=row["context"],
            chosen=row["edited_response"],
            rejected=row["original_response"],
        )
    ]


def _hhh(row: dict, options) -> list[dict]:
    """A question with two answers, of which the one with the label 1 is better (HHH alignment)."""
    choices, labels = row["targets"]["choices"], row["targets"]["labels"]
    if not isinstance(choices, list) or len(choices) != 2 or labels not in ([0, 1], [1, 0]):
        raise Bad("bad_label")
    better = labels.index(1)
    return [
        _without(row, "input", "targets", prompt=row["input"], chosen=choices[better], rejected=choices[1 - better])
    ]


_PAIRED = (("response_j", "response_k"), ("chosen_response", "rejected_response"))


def _pair_of_conversation(row: dict, options) -> list[dict]:
    """A conversation up to the last question, and two answers to it (LLaMA-Factory, UltraInteract)."""
    name = next(name for name in _TALKS if isinstance(row.get(name), list))
    return [_without(row, name, prompt=row[name])]


_TALKS = ("conversations", "messages", "trajectory", "conversation")


def _asks_last(row: dict, options) -> bool:
    talk = next((row[name] for name in _TALKS if isinstance(row.get(name), list)), None)
    opens = [side[0] if isinstance(side, list) and side else side for side in (row["chosen"], row["rejected"])]
    return (
        row.get("prompt") is None
        and _dicts(talk)
        and talk[-1].get("role", talk[-1].get("from")) in ("user", "human")
        and not any(
            isinstance(first, dict) and first.get("role", first.get("from")) in ("user", "human", "system")
            for first in opens
        )
    )


# -- rankings ----------------------------------------------------------------------------------------------
def _nectar(row: dict, options) -> list[dict]:
    prompt = row["prompt"]
    if isinstance(prompt, str) and prompt.startswith("\n\nHuman:"):
        prompt = hh_transcript(prompt)
        prompt = prompt[:-1] if prompt[-1]["role"] == "assistant" and not prompt[-1]["content"] else prompt
    return [
        _without(
            row,
            "answers",
            prompt=prompt,
            completions=[item["answer"] for item in row["answers"]],
            ranks=[item["rank"] for item in row["answers"]],
            models=[str(item.get("model")) for item in row["answers"]],
        )
    ]


def _votes(row: dict, options) -> list[dict]:
    """Answers with the score that votes gave them (Askell et al. 2021)."""
    return [
        _without(
            row,
            "question",
            "answers",
            prompt=row["question"],
            completions=[item["text"] for item in row["answers"]],
            scores=[item["pm_score"] for item in row["answers"]],
        )
    ]


def _oasst(records: Iterator[Record], options) -> Iterator[Record]:
    """Messages of OpenAssistant, those of a tree one after the other, or whole trees: the replies to each path of
    messages.

    Ranked replies become a ranking, fewer than two of them `no_pair`; where demonstrations are wanted, the best reply.
    Messages that are deleted or failed their review are left out with what follows them (`left_out_message`).
    """
    tree, nodes = None, []
    for record in records:
        row = record.row
        if record.code is not None:
            yield record
        elif isinstance(row.get("prompt"), dict):
            yield from _replies(_flat(row["prompt"], None, record.line), options)
        else:
            if row.get("message_tree_id") != tree:
                yield from _replies(nodes, options)
                tree, nodes = row.get("message_tree_id"), []
            nodes.append((record.line, row))
    yield from _replies(nodes, options)


def _flat(node: dict, parent: str | None, line: int) -> list[tuple[int, dict]]:
    """The messages of a nested tree."""
    out, waiting = [], [(node, parent)]
    while waiting:
        item, above = waiting.pop()
        if not isinstance(item, dict):
            continue
        out.append((line, {**{key: value for key, value in item.items() if key != "replies"}, "parent_id": above}))
        waiting += [(reply, item.get("message_id")) for reply in reversed(item.get("replies") or [])]
    return out


def _replies(nodes: list[tuple[int, dict]], options) -> Iterator[Record]:
    known = {row.get("message_id"): row for _, row in nodes}
    children: dict[Any, list[tuple[int, dict]]] = {}
    for line, row in nodes:
        parent = row.get("parent_id")
        if parent is not None and parent not in known:
            yield Record(line, canonical_bytes(row), row, "orphan_message")
        elif not _left_out(row):
            children.setdefault(parent, []).append((line, row))
    waiting: list[tuple[int, dict, list[dict]]] = [(*node, []) for node in reversed(children.get(None, []))]
    reached: set[int] = set()
    while waiting:
        line, row, path = waiting.pop()
        reached.add(id(row))
        role = {"prompter": "user", "assistant": "assistant"}.get(row.get("role"))
        if role is None or not isinstance(row.get("text"), str):
            yield Record(line, canonical_bytes(row), None, "bad_role" if role is None else "wrong_type")
            continue
        path, replies = [*path, _said(role, row["text"])], children.get(row.get("message_id"), [])
        waiting += [(*reply, path) for reply in reversed(replies)]
        answers = sorted(
            (reply for reply in replies if reply[1].get("role") == "assistant"),
            key=lambda reply: (not _number(reply[1].get("rank")), reply[1].get("rank") or 0),
        )
        about = {
            "language": row.get("lang"),
            "message_tree_id": row.get("message_tree_id"),
            "message_id": row.get("message_id"),
        }
        if role != "user" or not answers:
            continue
        if options.kind in ("demonstrations/1", "text/1"):
            best = answers[0][1]
            made = {"messages": [*path, _said("assistant", best.get("text"))], "train_turns": [len(path)], **about}
        else:
            ranked = [reply for _, reply in answers if _number(reply.get("rank"))]
            if len(ranked) < 2:
                yield Record(line, canonical_bytes(row), None, "no_pair")
                continue
            made = {
                "prompt": path,
                "completions": [reply.get("text") for reply in ranked],
                "ranks": [reply["rank"] for reply in ranked],
                **about,
            }
        yield Record(line, canonical_bytes(made), made, None)
    for line, row in nodes:
        if id(row) not in reached and (row.get("parent_id") is None or row["parent_id"] in known):
            above, seen = row, {id(row)}
            while (
                not _left_out(above)
                and (above := known.get(above.get("parent_id"))) is not None
                and id(above) not in seen
            ):
                seen.add(id(above))
            yield Record(
                line,
                canonical_bytes(row),
                None,
                "orphan_message" if above is None or not _left_out(above) else "left_out_message",
            )


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
        path, turn = [*path, _said("user", row.get("context")), _said("assistant", row.get("response"))], turn + 1
        made = _without(row, "context", "response", messages=path, train_turns=[len(path) - 1])
        raw = record.raw if record.raw is not None else canonical_bytes(row)
        yield Record(record.line, raw, made, None)


def _left_out(row: dict) -> bool:
    return row.get("deleted") is True or row.get("review_result") is False


# -- steps -------------------------------------------------------------------------------------------------
def _prm800k(row: dict, options) -> list[dict]:
    """The path that was chosen, and for every step the rated alternatives to it, each a row that ends with it."""
    question, steps = row["question"], row["label"].get("steps")
    if not _dicts(steps):
        raise Bad("wrong_type")
    texts: list[str] = []
    labels: list[int] = []
    out = []
    finished = row["label"].get("finish_reason") == "solution"

    def solution(texts: list[str], labels: list[int], whole: bool) -> dict:
        return _without(
            row,
            "question",
            "label",
            "labeler",
            "is_quality_control_question",
            "pre_generated_steps",
            prompt=question.get("problem"),
            answer=question.get("ground_truth_answer"),
            completions=texts,
            labels=labels,
            annotator_id=row.get("labeler"),
            is_quality_control=row.get("is_quality_control_question"),
            solution_correct=whole and finished and -1 not in labels,
        )

    for step in steps:
        alternatives, chosen = step.get("completions") or [], step.get("chosen_completion")
        rated = [
            (index, item)
            for index, item in enumerate(alternatives)
            if item.get("rating") in (-1, 0, 1) and item.get("rating") is not None
        ]
        taken = (
            chosen
            if chosen is not None
            else rated[0][0]
            if len(rated) == 1 and step.get("human_completion") is None
            else None
        )
        if options.kind in ("auto", "stepwise/1"):
            out += [
                solution([*texts, item["text"]], [*labels, item["rating"]], False)
                for index, item in rated
                if index != taken
            ]
        if taken is not None and any(index == taken for index, _ in rated):
            texts, labels = [*texts, alternatives[taken]["text"]], [*labels, alternatives[taken]["rating"]]
        elif isinstance(step.get("human_completion"), dict) and isinstance(step["human_completion"].get("text"), str):
            texts, labels = [*texts, step["human_completion"]["text"]], [*labels, 1]
        else:
            break
    if not texts and not out:
        raise Bad("step_label_length")
    return out + ([solution(texts, labels, True)] if texts else [])


_STEP_MARK = "\u043a\u0438"  # Math-Shepherd's: stands in `input` where `label` has + or -


def _math_shepherd(row: dict, options) -> list[dict]:
    """A question and its steps, each closed by a mark that in `label` is + (right) or - (wrong)."""
    steps, label, marks = row["input"].split(_STEP_MARK), row["label"], []
    if steps[-1].strip():
        raise Bad("step_label_length")
    at = 0
    for step in steps[:-1]:
        at += len(step)
        marks.append(label[at : at + 1])
        at += 1
    if not marks or any(mark not in ("+", "-") for mark in marks):
        raise Bad("step_label_length")
    first = steps[0].find("Step 1:")
    if first < 0:
        raise Bad("missing_column")
    texts = [steps[0][first:].strip(), *(step.strip() for step in steps[1:-1])]
    return [
        _without(
            row,
            "input",
            "label",
            prompt=steps[0][:first].strip(),
            completions=texts,
            labels=[mark == "+" for mark in marks],
            separator="\n",
        )
    ]


def _listed(name: str, said: str) -> Form:
    """Answers or steps in a list called ``name``, beside what is ``said`` of each (catalogue section 0)."""
    return Form(
        ("prompt", name, said),
        lambda row, options: [_without(row, name, completions=row[name])],
        lambda row, options: row.get("completions") is None and isinstance(row[name], list),
    )


# -- labelled ----------------------------------------------------------------------------------------------
def _beavertails(row: dict, options) -> list[dict]:
    return [_without(row, "response", "is_safe", completion=row["response"], label=row["is_safe"], label_kind="safety")]


def _labelled_talk(row: dict, options) -> list[dict]:
    """A conversation and whether its last answer is wanted."""
    name, label = next(name for name in _TALKS if _dicts(row.get(name))), row.get("kto_tag", row.get("label"))
    return [_without(row, name, "kto_tag", prompt=row[name][:-1], completion=row[name][-1:], label=label)]


def _is_labelled_talk(row: dict, options) -> bool:
    talk = next((row[name] for name in _TALKS if _dicts(row.get(name))), None)
    label = row.get("kto_tag", row.get("label"))
    return (
        talk is not None
        and isinstance(label, bool)
        and len(talk) > 1
        and talk[-1].get("role", talk[-1].get("from")) in ("assistant", "gpt")
    )


_TIMES = ("collected_at", "ts", "timestamp", "created_at")


def _events(row: dict, options) -> list[dict]:
    """A product signal about an answer; of an edit, where no pairs are wanted, also the edited text as an answer that
    is wanted.
    """
    at = next((row[name] for name in _TIMES if row.get(name) is not None), None)
    text = next((row[name] for name in _EDITED if row.get(name) is not None), None)
    if _number(at):  # seconds or milliseconds since 1970
        at = datetime.fromtimestamp(at / 1000 if at > 1e11 else at, timezone.utc).isoformat()
    name = next(name for name in _ANSWERS if row.get(name) is not None)
    if row["action"] == "edit" and text is None:
        raise Bad("missing_column")
    new = _without(row, *_TIMES, *_EDITED, name, completion=row[name], collected_at=at)
    if row["action"] != "edit" or options.kind == "pairs/1":
        return [new | ({"edited_text": text} if text is not None else {})]
    return [new, {**new, "completion": text, "action": "edited"}]


_EDITED = ("edited", "edited_text", "edited_response")
_ANSWERS = ("response", "output", "completion")


def _is_event(row: dict, options) -> bool:
    return (
        any(row.get(name) is not None for name in _ANSWERS)
        and (row["action"] in EVENT_MAP or row["action"] in options.event_map or options.format == "events")
        and row.get("label") is None
    )


# -- prompts that can be checked ------------------------------------------------------------------------------
def _for_prompts(row: dict, options) -> bool:
    return options.kind in ("auto", "prompts/1")


def _verl(row: dict, options) -> list[dict]:
    """verl's rows (DAPO-Math, Skywork-OR1, Eurus): reward_model.ground_truth is the answer, or tests as JSON; what only
    a reward function can read (another object) stays where it is.
    """
    truth, ability = row["reward_model"].get("ground_truth"), str(row.get("ability") or "").lower()
    listed = None
    if isinstance(truth, str) and truth.lstrip()[:1] in ("[", "{"):
        try:
            listed = orjson.loads(truth)
        except orjson.JSONDecodeError:
            pass
    if isinstance(listed, list) and len(listed) == 1 and isinstance(listed[0], (str, int, float)):
        truth = listed[0]
    elif isinstance(listed, list) and len(listed) > 1 and all(isinstance(one, str) for one in listed):
        raise Bad("verifier_spec_invalid")  # several answers, of which an answer cannot be all; [0, 1] is one
    elif isinstance(listed, dict) or isinstance(listed, list) and any(isinstance(one, dict) for one in listed):
        truth = None
    found = listed if listed is not None else truth
    tests = (
        programs.tests_of(programs.listed_cases(found))
        if isinstance(found, dict) and isinstance(found.get("inputs"), list) and isinstance(found.get("outputs"), list)
        else None
    )
    if tests == []:
        raise Bad("verifier_spec_invalid")
    domain = (
        "math"
        if ability.startswith("math")
        or "math" in str(row.get("data_source")).lower()
        or "gsm8k" in str(row.get("data_source")).lower()
        else "code"
        if tests or "cod" in ability
        else None
    )
    new = (
        {"tests": tests}
        if tests
        else (
            {"answer": truth}
            if isinstance(truth, (str, int, float)) and not isinstance(truth, bool) and str(truth) != ""
            else {}
        )
    )
    return [
        {
            **row,
            **new,
            **({"domain": domain} if domain and row.get("domain") is None else {}),
            **_math_type(new.get("answer"), domain, options),
        }
    ]


def _math_type(answer: Any, domain: str | None, options) -> dict:
    """{"answer_type": "latex"} for answers of mathematics that would be read as plain text."""
    return (
        {"answer_type": "latex"}
        if domain == "math"
        and options.answer_type is None
        and isinstance(answer, str)
        and not re.fullmatch(r"\s*[+-]?[\d.,/]+%?\s*", answer)
        else {}
    )


def _orz(row: dict, options) -> list[dict]:
    """Open-Reasoner-Zero: the assistant's turn holds the answer, {"ground_truth": {"value": ...}}."""
    talk = _orz_talk(row)
    answer = talk[-1]["ground_truth"]["value"]
    return [
        _without(
            row,
            "messages",
            "0",
            "1",
            prompt=talk[:-1],
            answer=answer,
            domain="math",
            **_math_type(answer, "math", options),
        )
    ]


def _orz_talk(row: dict) -> list[dict] | None:
    talk = row.get("messages") or [row.get("0"), row.get("1")]
    last = talk[-1] if isinstance(talk, list) and len(talk) > 1 and all(isinstance(item, dict) for item in talk) else {}
    return (
        talk if isinstance(last.get("ground_truth"), dict) and last["ground_truth"].get("value") is not None else None
    )


def _synthetic(row: dict, options) -> list[dict]:
    """SYNTHETIC-1 and 2: verification_info, an object or its JSON, has the answer or the tests; what only a judge can
    decide stays a prompt without either.
    """
    info = _json(row["verification_info"])
    if not isinstance(info, dict):
        raise Bad("wrong_type")
    new: dict[str, Any] = {}
    if info.get("test_cases") is not None:
        cases = info["test_cases"]
        if not _dicts(cases, "input", "output") or str(info.get("language") or "python").lower() not in (
            "python",
            "python3",
        ):
            raise Bad("verifier_spec_invalid")
        name = next((case["fn_name"] for case in cases if case.get("fn_name")), None)
        given, wanted = (
            [_json(case[key]) if name and isinstance(case[key], str) else case[key] for case in cases]
            for key in ("input", "output")
        )
        new = {
            "tests": programs.tests_of(programs.listed_cases({"inputs": given, "outputs": wanted, "fn_name": name})),
            "domain": "code",
        }
    elif (
        isinstance(info.get("ground_truth"), (str, int, float))
        and str(info["ground_truth"]).strip()
        and "math" in str(row.get("task_type"))
    ):
        new = {"answer": info["ground_truth"], "domain": "math", **_math_type(info["ground_truth"], "math", options)}
    return [_without(row, "verification_info", **new) if new else row]


_TRUTHS = ("ground_truth", "solution", "final_answer")


def _short_answer(value: Any) -> Any:
    """The answer in a column that may hold a whole solution: its last box, what stands between dollars, or the text
    itself where it is one short line; None else.
    """
    from stages.verification.extraction import extract_boxed

    if _number(value):
        return value
    if not isinstance(value, str) or not value.strip():
        return None
    if (boxed := extract_boxed(value)) is not None:
        return boxed
    text = value.strip()
    if len(text) > 2 and text[0] == text[-1] == "$" and "$" not in text[1:-1]:
        return text[1:-1].strip()
    return text if "\n" not in text and len(text) <= 60 else None


def _with_truth(row: dict, options) -> list[dict]:
    """A prompt beside `ground_truth`, `solution` or `final_answer`, as TRL's and open-r1's reward functions are given:
    the answer; the column stays for rewards that ask for it by name.
    """
    answer = next((found for name in _TRUTHS if (found := _short_answer(row.get(name))) is not None), None)
    if answer is None:
        return [row]
    return [
        {
            **row,
            "answer": answer,
            **_math_type(answer, "math" if isinstance(answer, str) and re.search(r"[\\^]", answer) else None, options),
        }
    ]


def _only_asks(row: dict, options) -> bool:
    return (
        _for_prompts(row, options)
        and any(row.get(name) is not None for name in _TRUTHS)
        and all(
            row.get(name) is None
            for name in (
                "answer",
                "tests",
                "constraints",
                "completion",
                "response",
                "output",
                "chosen",
                "completions",
                "messages",
                "choices",
                "options",
                "endings",
            )
        )
    )


def _deepmath(row: dict, options) -> list[dict]:
    """A question with its final answer, and up to three solutions of DeepSeek-R1, which are the demonstrations."""
    if _for_prompts(row, options):
        return [
            _without(
                row,
                "question",
                "final_answer",
                prompt=row["question"],
                answer=row["final_answer"],
                domain="math",
                **_math_type(row["final_answer"], "math", options),
            )
        ]
    return [
        _without(row, "question", prompt=row["question"], completion=row[name])
        for name in ("r1_solution_1", "r1_solution_2", "r1_solution_3")
        if row.get(name)
    ]


def _problem_only(row: dict, options) -> list[dict]:
    """NuminaMath and OpenR1-Math hold a conversation beside the problem: where prompts are wanted, the problem with its
    answer.
    """
    return [_without(row, "messages")]


def _open_math(row: dict, options) -> list[dict]:
    """NVIDIA's OpenMathReasoning and OpenMathInstruct: a problem with a generated solution, the demonstration; where
    prompts are wanted, with its answer.
    """
    if options.kind != "prompts/1":
        return [
            _without(row, "problem", "generated_solution", prompt=row["problem"], completion=row["generated_solution"])
        ]
    answer = row.get("expected_answer")
    if answer is None or not str(answer).strip():
        raise Bad("missing_column")
    return [
        _without(
            row,
            "problem",
            "generated_solution",
            "expected_answer",
            prompt=row["problem"],
            answer=answer,
            domain="math",
            **_math_type(answer, "math", options),
        )
    ]


def _truthful(row: dict, options) -> list[dict]:
    """TruthfulQA as its authors publish it: the best answer among the false ones (MC1), and all true ones among the
    false ones (MC2); lists, or texts with "; " between.
    """
    best, right, wrong = (
        [
            value.strip()
            for value in (found.split(";") if isinstance(found, str) else found or ())
            if isinstance(value, str) and value.strip()
        ]
        for found in ([row["best_answer"]], row["correct_answers"], row["incorrect_answers"])
    )
    if len(best) != 1 or not right or not wrong:
        raise Bad("choice_unknown")
    return [
        _without(
            row,
            "best_answer",
            "correct_answers",
            "incorrect_answers",
            "type",
            mc1_targets={"choices": [*best, *wrong], "labels": [1] + [0] * len(wrong)},
            mc2_targets={"choices": [*right, *wrong], "labels": [1] * len(right) + [0] * len(wrong)},
        )
    ]


def _mbpp(row: dict, options) -> list[dict]:
    """MBPP's program as a demonstration; where prompts are wanted, ``programs`` reads its tests."""
    asked = row["text"] if isinstance(row.get("text"), str) else row["prompt"]
    return [
        _without(
            row,
            "text",
            "code",
            "test_list",
            prompt=programs.with_asserts(asked, row["test_list"]),
            completion=f"```python\n{row['code'].strip()}\n```",
        )
    ]


# -- demonstrations ---------------------------------------------------------------------------------------------
def _capybara(row: dict, options) -> list[dict]:
    return [
        _without(
            row,
            "conversation",
            messages=[
                message
                for turn in row["conversation"]
                for message in (_said("user", turn["input"]), _said("assistant", turn["output"]))
            ],
        )
    ]


def _lima(row: dict, options) -> list[dict]:
    return [
        _without(
            row,
            "conversations",
            messages=[
                _said("user" if index % 2 == 0 else "assistant", text)
                for index, text in enumerate(row["conversations"])
            ],
        )
    ]


def _history(row: dict, options) -> list[dict]:
    """Alpaca's rows with earlier turns, [[question, answer], ...]."""
    history = _json(row["history"])
    if not isinstance(history, list) or not all(isinstance(turn, (list, tuple)) and len(turn) == 2 for turn in history):
        raise Bad("wrong_type")
    before = [
        message for question, answer in history for message in (_said("user", question), _said("assistant", answer))
    ]
    return [
        _without(
            row,
            "instruction",
            "input",
            "output",
            "history",
            prompt=[*before, _said("user", asked_about(row["instruction"], row.get("input")))],
            completion=row["output"],
        )
    ]


def _s1k(row: dict, options) -> list[dict]:
    thought = row.get("deepseek_thinking_trajectory") or row.get("thinking_trajectories")
    answer = row.get("deepseek_attempt") or row.get("attempt")
    thought = thought[0] if isinstance(thought, list) and thought else thought
    return [
        _without(
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
    calls = _json(row["answers"])
    if not _dicts(calls, "name"):
        raise Bad("wrong_type")
    calls = [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments") or {}}}
        for call in calls
    ]
    return [
        _without(
            row,
            "query",
            "answers",
            messages=[_said("user", row["query"]), {"role": "assistant", "content": None, "tool_calls": calls}],
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
                _said({"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}[speaker], said)
            )
            continue
        call = _GLAIVE_CALL.fullmatch(said[len(before) :])
        if call is None:
            raise Bad("wrong_type")
        arguments = call[2] or "{}"
        arguments = _json(arguments[1:-1] if arguments[0] == arguments[-1] == "'" else arguments)
        arguments = _json(arguments)  # a text that holds JSON
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
    return [_without(row, "system", "chat", messages=messages, **({"tools": tools} if tools else {"system": system}))]


_QUESTIONS = ("question", "query", "problem", "input")


def _answered(row: dict, options) -> list[dict]:
    """A question and what was answered, in columns of these names (OpenOrca, Nemotron)."""
    asked = next(name for name in _QUESTIONS if row.get(name) is not None)
    said = next(name for name in _ANSWERS if row.get(name) is not None)
    used = (asked, said, *(["context"] if isinstance(row.get("context"), str) else []))
    return [_without(row, *used, prompt=asked_about(row[asked], row.get("context")), completion=row[said])]


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
        sum(row.get(name) is not None for name in _ANSWERS) == 1
        and sum(row.get(name) is not None for name in _QUESTIONS) == 1
        and all(row.get(name) is None for name in others)
    )


# what is wanted of a row that also is a demonstration
_RATED, _COMPARED = ("ratings/1", "rankings/1", "unpaired/1"), ("comparisons/1", "pairs/1")

_CAPITALS = ("Problem", "Question", "Answer", "Solution", "Prompt", "Response", "Instruction", "Output")


def _small_letters(row: dict, options) -> list[dict]:
    return [
        {
            name.lower() if name in _CAPITALS and row.get(name.lower()) is None else name: value
            for name, value in row.items()
        }
    ]


#: In order of precedence: forms with columns that nothing else has first.
FORMS: tuple[Form, ...] = (
    Form(("prompt", "response", *_HELPSTEER), _helpsteer),
    Form(("prompt", "response_1", "response_2", "preference_strength"), _steerpref),
    Form(("context", "response1", "response2", "overall_preference"), _steerpref),
    Form(
        ("instruction", "completions"),
        _ultrafeedback,
        lambda row, options: _dicts(row["completions"], "response", "annotations"),
    ),
    Form(
        ("prompt", "response_0", "response_1"),
        _pku,
        lambda row, options: bool(row.keys() & {*_PKU_SAFETY, "better_response_id"}),
        format=lambda options: "comparisons",
    ),
    Form(("prompt", "response", "is_safe"), _beavertails),
    Form(
        ("context", "response", "safety_label", "dialogue_id", "response_id"),
        stream=_prosocial,
        format=lambda options: "messages",
    ),
    Form(("prompt", "answers"), _nectar, lambda row, options: _dicts(row["answers"], "answer", "rank")),
    Form(("question", "answers"), _votes, lambda row, options: _dicts(row["answers"], "text", "pm_score")),
    Form(
        ("message_id", "message_tree_id", "text", "role"),
        stream=_oasst,
        format=lambda options: "messages" if options.kind in ("demonstrations/1", "text/1") else "rankings",
    ),
    Form(
        ("message_tree_id", "prompt"),
        None,
        lambda row, options: isinstance(row["prompt"], dict) and "replies" in row["prompt"],
        _oasst,
        lambda options: "messages" if options.kind in ("demonstrations/1", "text/1") else "rankings",
    ),
    Form(("prompt", "action"), _events, _is_event, format=lambda options: "events"),
    Form(("history", "human_ref_A", "human_ref_B", "labels"), _shp),
    Form(
        ("question", "answer_0", "answer_1", "score_0", "score_1"),
        _webgpt,
        lambda row, options: isinstance(row["question"], dict),
    ),
    Form(("question_body", "answer1_body", "answer2_body", "score"), _judgelm),
    Form(
        ("input", "targets"),
        _hhh,
        lambda row, options: isinstance(row["targets"], dict) and {"choices", "labels"} <= row["targets"].keys(),
    ),
    Form(("info", "summaries", "choice"), _summaries, lambda row, options: isinstance(row["info"], dict)),
    Form(
        ("info", "summary"),
        _summary_axes,
        lambda row, options: isinstance(row["info"], dict) and isinstance(row["summary"], dict),
    ),
    Form(("conversation_a", "conversation_b", "winner"), _arena),
    Form(("prompt", "response_a", "response_b", "winner_model_a", "winner_model_b", "winner_tie"), _arena_kaggle),
    Form(
        ("question", "label"),
        _prm800k,
        lambda row, options: (
            isinstance(row["question"], dict) and isinstance(row["label"], dict) and "steps" in row["label"]
        ),
    ),
    Form(
        ("input", "label"),
        _math_shepherd,
        lambda row, options: (
            isinstance(row["input"], str) and isinstance(row["label"], str) and _STEP_MARK in row["input"]
        ),
    ),
    Form(
        ("prompt", "reward_model"),
        _verl,
        lambda row, options: isinstance(row["reward_model"], dict) and _for_prompts(row, options),
    ),
    Form(
        ("question", "final_answer"),
        _deepmath,
        lambda row, options: "r1_solution_1" in row or _for_prompts(row, options),
    ),
    Form(
        ("problem", "messages"),
        _problem_only,
        lambda row, options: (
            options.kind == "prompts/1" and (row.get("answer") is not None or row.get("solution") is not None)
        ),
    ),
    Form(
        ("test_list", "code"),
        _mbpp,
        lambda row, options: (
            not _for_prompts(row, options)
            and isinstance(row["code"], str)
            and (isinstance(row.get("text"), str) or isinstance(row.get("prompt"), str))
        ),
    ),
    Form(
        ("question",),
        _s1k,
        lambda row, options: (
            any(row.get(name) for name in ("thinking_trajectories", "deepseek_thinking_trajectory"))
            and any(row.get(name) for name in ("attempt", "deepseek_attempt"))
        ),
    ),
    Form(("query", "answers", "tools"), _xlam),
    Form(
        ("system", "chat"),
        _glaive,
        lambda row, options: (
            isinstance(row["system"], str)
            and isinstance(row["chat"], str)
            and _GLAIVE_TURN.match(row["chat"]) is not None
        ),
    ),
    Form(("orig_instruction", "orig_response", "orig_score"), _prometheus, lambda row, options: options.kind in _RATED),
    Form(
        ("orig_instruction", "orig_response_A", "orig_response_B", "orig_preference"),
        _prometheus_pair,
        lambda row, options: options.kind in _COMPARED,
    ),
    Form(("context", "original_response", "edited_response"), _edited),
    Form((), _orz, lambda row, options: _for_prompts(row, options) and _orz_talk(row) is not None),
    Form(("prompt", "verification_info"), _synthetic, _for_prompts),
    Form(("problem", "generated_solution"), _open_math),
    Form(("question", "best_answer", "correct_answers", "incorrect_answers"), _truthful, _for_prompts),
    _listed("responses", "ranks"),
    _listed("steps", "labels"),
    Form(("chosen", "rejected"), _pair_of_conversation, _asks_last),
    Form(
        (),
        _paired,
        lambda row, options: (
            row.get("chosen") is None and any(row.get(a) is not None and row.get(b) is not None for a, b in _PAIRED)
        ),
    ),
    Form((), _labelled_talk, _is_labelled_talk),
    Form(("conversation",), _capybara, lambda row, options: _dicts(row["conversation"], "input", "output")),
    Form(
        ("conversations",),
        _lima,
        lambda row, options: (
            isinstance(row["conversations"], list)
            and bool(row["conversations"])
            and all(isinstance(text, str) for text in row["conversations"])
        ),
    ),
    Form(("instruction", "output", "history"), _history, lambda row, options: isinstance(row["history"], (str, list))),
    Form(
        (),
        _two_answers,
        lambda row, options: (
            _sides(row) is not None
            and row.get("response_a") is None
            and any(row.get(name) is not None for name in _CHOSEN)
            and not ("output_1" in row and row.get("preference") is not None)
        ),
    ),
    Form(("prompt",), _with_truth, _only_asks),
    Form((), _answered, _is_answered),
    Form(
        (),
        _small_letters,
        lambda row, options: (
            any(
                row.get(name) is not None and row.get(name.lower()) is None
                for name in ("Problem", "Question", "Prompt", "Instruction")
            )
            and any(row.get(name) is not None for name in ("Answer", "Solution", "Response", "Output"))
        ),
    ),
)
