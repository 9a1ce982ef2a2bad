"""One adapter per format: a source row -> (kind, row of that kind, codes), and the table of them.

An adapter raises Bad where nothing can be made of a row; codes that leave a row readable (a transcript whose prompts
differ) come back beside it, so that the rules can add theirs.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any, Callable

import orjson

from stages.ingestion import best_of as lists
from stages.ingestion import choices as mc
from stages.ingestion import programs as code
from stages.ingestion.fields import (
    HH_TURN,
    NUMBER,
    annotation_of,
    asks_in_transcript,
    check_answer,
    gsm8k_answer,
    hh_pair,
    implicit_messages,
    implicit_strings,
    json_text,
    listed,
    literal_of,
    one_of,
    optional_number,
    plain,
    plain_fields,
    required,
    strings_of,
    structs_of,
    text_of,
    to_completion,
    to_label,
    to_messages,
    to_number,
    to_prompt,
    whole_number,
)
from stages.ingestion.rules import Bad, segment_codes
from stages.ingestion.sources import canonical_bytes

# Labels of comparisons as Chatbot Arena and JudgeBench write them.
_WINNERS = {
    "model_a": "A",
    "model_b": "B",
    "tie (bothbad)": "tie",
    "both_bad": "tie",
    "bothbad": "tie",
    "a>b": "A",
    "b>a": "B",
    "a=b": "tie",
    "b=a": "tie",
}

# What NuminaMath writes where there is no answer to check: a proof is asked for, or none was found.
_NO_ANSWER = frozenset(("proof", "notfound", "not found"))


# -- adapters ---------------------------------------------------------------------------------------
def _pair(row: dict, options) -> tuple[str, dict, set]:
    prompt, chosen, rejected = row.get("prompt"), row.get("chosen"), row.get("rejected")
    if chosen is None or rejected is None:
        raise Bad("missing_column")
    if (
        prompt is None
        and isinstance(chosen, str)
        and not HH_TURN.match(chosen)
        and ("prompt" in row or "prompt" in options.columns())
    ):
        raise Bad("missing_column")  # it has a prompt, only not in this row: nothing to cut out of the answers
    codes: set[str] = set()
    if type(prompt) is str and type(chosen) is str and type(rejected) is str:  # the common case
        if asks_in_transcript(prompt):  # the space behind "Assistant:" is the transcript's
            chosen, rejected = chosen.strip(), rejected.strip()
        out = {
            "prompt": to_prompt(prompt, row.get("system")),
            "chosen": [{"role": "assistant", "content": chosen}],
            "rejected": [{"role": "assistant", "content": rejected}],
        }
    elif isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is not None:
            out = {
                "prompt": to_prompt(prompt, row.get("system")),
                "chosen": to_completion(chosen),
                "rejected": to_completion(rejected),
            }
        elif HH_TURN.search(chosen) and HH_TURN.search(rejected):
            out, codes = hh_pair(chosen, rejected)
        else:
            head, left, right = implicit_strings(chosen, rejected)
            out = {"prompt": to_prompt(head), "chosen": to_completion(left), "rejected": to_completion(right)}
            if chosen == rejected and head.strip():  # equal texts: nothing else to say about them
                raise Bad("chosen_equals_rejected")
    elif isinstance(chosen, str) or isinstance(rejected, str):
        raise Bad("wrong_type")
    else:
        left, right = to_completion(chosen), to_completion(rejected)
        if prompt is None:
            head, left, right = implicit_messages(left, right)
        elif isinstance(prompt, list):
            head = to_messages(prompt)
            if head and left[: len(head)] == head and right[: len(head)] == head:
                left, right = left[len(head) :], right[len(head) :]
        elif left and left[0]["role"] in ("user", "system"):  # full conversations beside a prompt string
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
            out[name] = optional_number(row[name])
    for name in ("strength", "pairs_in_group", "rank_gap", "stage_index", "turn_index"):
        if (value := whole_number(row.get(name))) is not None:
            out[name] = value
    if not 0 <= out.get("strength", 0) <= 127 or out.get("pairs_in_group") == 0:
        raise Bad("bad_label")
    if out.get("label_prob") is not None and not 0.5 <= out["label_prob"] <= 1:  # P(chosen preferred)
        raise Bad("bad_label")
    if row.get("constraint_ids") is not None:
        out["constraint_ids"] = strings_of(row["constraint_ids"])
    if isinstance(row.get("grade"), str):
        out["_grade"] = row["grade"]
    for side in ("chosen", "rejected"):
        if isinstance(row.get(f"{side}_model"), str):
            out[f"{side}_gen"] = {"model_id": row[f"{side}_model"]}
    return "pairs/1", out, codes


def _demonstration(row: dict, options) -> tuple[str, dict, set]:
    asked, said = row.get("prompt"), row.get("completion")
    if isinstance(asked, str) and isinstance(said, str) and asks_in_transcript(asked):
        said = said.strip()
    prompt, completion = to_prompt(asked, row.get("system")), to_completion(said)
    if len(completion) > len(prompt) and completion[: len(prompt)] == prompt:
        completion = completion[len(prompt) :]
    turns = [len(prompt) + index for index, message in enumerate(completion) if message["role"] == "assistant"]
    return (
        "demonstrations/1",
        {"messages": prompt + completion, "train_turns": turns, **plain_fields(row, "category")},
        set(),
    )


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
        messages = [
            {
                "role": "system",
                "content": "",
                "functions": tools if isinstance(tools, str) else canonical_bytes(tools).decode(),
            },
            *messages,
        ]
    added = len(messages) - len(row["messages"])  # a system message put before those that train_turns counts
    trained = row.get("train_turns")
    if trained is not None and (
        not isinstance(trained, list) or not trained or any(type(turn) is not int for turn in trained)
    ):
        raise Bad("wrong_type")
    turns = [
        index
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
        and (trained is None or index - added in trained)
        and (index < added or _trained(row["messages"][index - added]))
    ]
    if (
        trained is not None
        and len(turns) < len(set(trained))
        or not turns
        and any(message["role"] == "assistant" for message in messages)
    ):
        raise Bad("bad_label")
    return "demonstrations/1", {"messages": messages, "train_turns": turns, **plain_fields(row, "category")}, set()


def _trained(message: dict) -> bool:
    """False for a turn that OpenAI's fine-tuning format leaves out of the loss, `weight: 0`."""
    weight = message.get("weight")
    if weight is None:
        return True
    if isinstance(weight, bool) or weight not in (0, 1):
        raise Bad("wrong_type")
    return weight == 1


def _prompts(row: dict, options) -> tuple[str, dict, set]:
    out = {
        "prompt": to_prompt(row.get("prompt"), row.get("system")),
        **plain_fields(row, "domain", "category", "language"),
    }
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
            kind = (
                "integer"
                if re.fullmatch(r"[+-]?\d+", text)
                else "number"
                if NUMBER.fullmatch(text)
                else "latex"
                if re.search(r"[\\$^]|%$", text)
                else "text"
            )
        out["answer_type"] = kind
        check_answer(out["answer"], kind)
    if isinstance(row.get("instruction_id_list"), list):  # IFEval
        kwargs = structs_of(row.get("kwargs") or [{}] * len(row["instruction_id_list"]))
        if len(kwargs) != len(row["instruction_id_list"]):
            raise Bad("verifier_spec_invalid")
        out["constraints"] = [
            {
                "id": str(name),
                "kwargs_json": canonical_bytes({k: v for k, v in values.items() if v is not None}).decode(),
            }
            for name, values in zip(row["instruction_id_list"], kwargs)
        ]
    elif row.get("constraints") is not None:
        out["constraints"] = [
            {"id": text_of(item, "id"), "kwargs_json": json_text(item.get("kwargs_json", item.get("kwargs", {})))}
            for item in structs_of(row["constraints"])
        ]
    if isinstance(row.get("test"), str) and isinstance(row.get("entry_point"), str):  # HumanEval
        out["tests"] = [{"kind": "python", "code": f"{row['test']}\ncheck({row['entry_point']})\n"}]
    elif row.get("tests") is not None:
        out["tests"] = [
            {
                key: value if value is None or key == "timeout_s" else json_text(value)
                for key, value in item.items()
                if key in ("kind", "input", "expected", "code", "timeout_s")
            }
            for item in structs_of(row["tests"])
        ]
        for test in out["tests"]:
            if test.get("timeout_s") is not None:
                test["timeout_s"] = to_number(test["timeout_s"], "verifier_spec_invalid")
                if test["timeout_s"] <= 0:
                    raise Bad("verifier_spec_invalid")
    if out.get("tests") == [] or out.get("constraints") == []:
        raise Bad("verifier_spec_invalid")
    for name in ("facts", "reward_route"):
        if row.get(name) is not None:
            out[name] = strings_of(row[name])
    return "prompts/1", out, set()


def _text(row: dict, options) -> tuple[str, dict, set]:
    return "text/1", {"text": required(row, "text", str), **plain_fields(row, "domain")}, set()


def _unpaired(row: dict, options) -> tuple[str, dict, set]:
    kind = row.get("label_kind")
    return (
        "unpaired/1",
        {
            "prompt": to_prompt(row.get("prompt"), row.get("system")),
            "completion": to_completion(row.get("completion")),
            "label": to_label(row.get("label")),
            "label_kind": kind if isinstance(kind, str) else "thumbs",
        },
        set(),
    )


def _event(row: dict, options) -> tuple[str, dict, set]:
    """What somebody did with an answer (`data.implicit`): a labelled completion, or of an edit the edited text over the
    answer. `published` gives the edited text an `edited` of its own.
    """
    from stages.ingestion.pairing import event

    action = row.get("action")
    if not isinstance(action, str):
        raise Bad("missing_column" if action is None else "wrong_type")
    label, weight = (True, 1.0) if action == "edited" else event(action, options.event_map)
    if label == "pair" and options.kind == "pairs/1":
        return (
            "pairs/1",
            {
                "prompt": to_prompt(row.get("prompt"), row.get("system")),
                "chosen": to_completion(row.get("edited_text")),
                "rejected": to_completion(row.get("completion")),
                "weight": weight,
            },
            set(),
        )
    return (
        "unpaired/1",
        {
            "prompt": to_prompt(row.get("prompt"), row.get("system")),
            "completion": to_completion(row.get("completion")),
            "label": label is True,
            "weight": weight,
            "label_kind": f"event:{'edit' if action == 'edited' else action}",
        },
        set(),
    )


def _rating(row: dict, options) -> tuple[str, dict, set]:
    low = optional_number(row.get("scale_min")) if row.get("scale_min") is not None else options.scale_min
    high = optional_number(row.get("scale_max")) if row.get("scale_max") is not None else options.scale_max
    low, high = (-math.inf if low is None else low), (math.inf if high is None else high)
    out = {
        "prompt": to_prompt(row.get("prompt"), row.get("system")),
        "completion": to_completion(row.get("completion")),
        "scale_min": low,
        "scale_max": high,
        **plain_fields(row, "critique"),
    }
    aspects = row.get("aspects")
    if aspects is not None:
        if isinstance(aspects, dict):
            aspects = [{"aspect": name, "score": score} for name, score in aspects.items()]
        out["aspects"] = [
            {
                "aspect": str(item.get("aspect")),
                "score": to_number(item.get("score")),
                "rationale": item.get("rationale") if isinstance(item.get("rationale"), str) else None,
            }
            for item in structs_of(aspects)
        ]
    if options.aspect_weights:
        out["score"] = weighted(out.get("aspects"), options.aspect_weights)
    elif row.get("score") is None and out.get("aspects"):
        out["score"] = math.fsum(item["score"] for item in out["aspects"]) / len(out["aspects"])
    else:
        out["score"] = to_number(row.get("score"))
    if not low <= out["score"] <= high:
        raise Bad("bad_label")
    if (
        out.get("aspects")
        and not options.aspect_weights
        and out["score"] == 10
        and math.fsum(item["score"] for item in out["aspects"]) / len(out["aspects"]) <= 2
    ):
        raise Bad("score_inconsistent")  # UltraFeedback: an overall 10 that meant 1
    if isinstance(row.get("model"), str):
        out["gen"] = {"model_id": row["model"]}
    # The same rating by two people or groups is two rows.
    return (
        "ratings/1",
        out
        | annotation_of(
            {"annotator": row.get("group")}
            | {k: row[k] for k in ("annotator_id", "annotator", "criteria") if row.get(k) is not None}
        ),
        set(),
    )


def weighted(aspects: list[dict] | None, weights: dict[str, float]) -> float:
    """The overall score of a rating as the weighted sum of its aspects (`data.ratings`); Bad(missing_aspect) where it
    lacks one.
    """
    from stages.ingestion.pairing import overall_scores

    found = {item["aspect"]: item["score"] for item in aspects or ()}
    if any(name not in found for name in weights):
        raise Bad("missing_aspect")
    return overall_scores([[found[name] for name in weights]], list(weights.values()))[0]


def _ranking(row: dict, options) -> tuple[str, dict, set]:
    from stages.ingestion.pairing import check_ranks, ranks_from_scores

    completions = required(row, "completions", list)
    out = {
        "prompt": to_prompt(row.get("prompt"), row.get("system")),
        "completions": [to_completion(item) for item in completions],
    }
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
    return "rankings/1", out | annotation_of(row), set()


def _comparison(row: dict, options) -> tuple[str, dict, set]:
    from stages.ingestion.pairing import likert, votes

    out = {
        "prompt": to_prompt(row.get("prompt"), row.get("system")),
        "response_a": to_completion(row.get("response_a")),
        "response_b": to_completion(row.get("response_b")),
    }
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
            number, points = to_number(label), whole_number(row.get("n_points")) or options.n_points
            if points is None:
                raise Bad("scale_unknown")
            orientation = row.get("orientation") or options.orientation
            if orientation not in ("low_is_a", "high_is_a") or points > 127:
                raise Bad("bad_label")
            likert(number, points, orientation)
            out |= {"label_kind": "likert", "n_points": points, "label": int(number), "orientation": orientation}
        won = (
            votes(out["votes"])["winner"]
            if "votes" in out
            else likert(out["label"], out["n_points"], out["orientation"])[0]
        )
        for other in (
            {row.get(name) for name in ("preference", "choice", "winner") if isinstance(row.get(name), str)}
            if "label" not in options.columns()
            else ()
        ):
            other = options.label_map.get(_label_name(other), _WINNERS.get(other.strip().lower(), other.strip()))
            if other.lower() in ("a", "b", "tie") and other.lower() != won.lower():
                raise Bad("label_unsaid")
    if isinstance(row.get("criteria"), str) and row["criteria"]:
        out["criteria"] = row["criteria"]
    if (turn := whole_number(row.get("turn_index"))) is not None:
        out["turn_index"] = turn
    out |= annotation_of(row)
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
    out = {
        "prompt": to_prompt(row.get("instruction")),
        "response_a": to_completion(row.get("output_1")),
        "response_b": to_completion(row.get("output_2")),
        "label_kind": "prob",
        "p_a": p_a,
        "ann": {"annotator_type": "ai"},
    }
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
    return (
        "prompts/1",
        {
            "prompt": to_prompt(question),
            "domain": "math",
            "answer": value,
            "answer_type": kind,
            "_extra": {"solution": answer},
        },
        set(),
    )


def asked_about(question: Any, *given: Any) -> Any:
    """The question, and behind it what it is about (Alpaca's input, Dolly's context, a passage), where these are
    texts.
    """
    for text in given:
        if isinstance(question, str) and isinstance(text, str) and text.strip():
            question = f"{question}\n\n{text}"
    return question


def _qa(row: dict, options) -> tuple[str, dict, set]:
    """A question, behind its passage where it has one, and its answer; further ways to say it are aliases (TriviaQA,
    SQuAD, Natural Questions, PopQA). BIG-Bench Hard: input and target.
    """
    if row.get("question") is None and isinstance(row.get("target"), str):
        row = {
            "question": row.get("input"),
            "answer": row["target"],
            **({"answer_type": "mc"} if re.fullmatch(r"\([A-Z]\)", row["target"].strip()) else {}),
        }
    row = mc.behind_passage(row)
    answers = [one for one in _said_answers(row) if one is not None]
    answer = answers[0] if answers else row.get("answer")
    if options.kind == "prompts/1":
        kind, out, codes = _prompts(
            {"prompt": row.get("question"), "answer": answer, "answer_type": row.get("answer_type")}, options
        )
        more = list(dict.fromkeys(str(one) for one in answers[1:] if str(one) != out.get("answer")))
        return kind, {**out, **({"answer_type": "text", "_extra": {"aliases": more}} if more else {})}, codes
    return _demonstration({"prompt": row.get("question"), "completion": answer}, options)


def _said_answers(row: dict) -> list:
    """The answers of a question in the forms that open-domain sets have, the one to be shown first; [] of a plain
    answer. Raises Bad of another form.
    """
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


def is_qa(row: dict) -> bool:
    """Whether a source row is a question with answers in a form of their own, or one of BIG-Bench Hard, which has
    nothing but an input and a target.
    """
    keys = {key for key, value in row.items() if value is not None}
    if keys == {"input", "target"}:
        return True
    try:
        return (
            isinstance(row.get("question"), str)
            and bool(keys & {"answers", "possible_answers"})
            and bool(_said_answers(row))
        )
    except Bad:
        return False


def _math(row: dict, options) -> tuple[str, dict, set]:
    """MATH, MATH-500, AIME: the answer is that of the column, else the last box of the solution; level and subject are
    kept.
    """
    from stages.verification.extraction import extract_boxed

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
    kind, out, codes = _prompts(
        {
            "prompt": problem,
            "answer": answer,
            "answer_type": row.get("answer_type"),
            "category": row.get("subject") or row.get("type"),
        },
        options,
    )
    if out["answer_type"] == "text" and row.get("answer_type", options.answer_type) is None:
        out["answer_type"] = "latex"
    level = row.get("level")
    if isinstance(level, str) and (number := re.fullmatch(r"\s*(?:Level)?\s*(\d+)\s*", level)):
        level = int(number.group(1))
    return (
        kind,
        {
            **out,
            "domain": "math",
            "_extra": {key: value for key, value in (("solution", solution), ("level", level)) if value is not None},
        },
        codes,
    )


#: Verifiers that open-instruct's rows name and that are known here.
_RLVR = {"gsm8k": "gsm8k", "math": "math", "string_f1": "string_f1", "ifeval": "ifeval", "ifeval_old": "ifeval"}

#: Constraints of Tulu 3's prompts: function -> (IFEval's id, {its argument: theirs}), and the relation of those that
#: ask for an exact count.
_TULU: dict[str, tuple[str, dict[str, str], dict]] = {
    "verify_keywords": ("keywords:existence", {"keywords": "keyword_list"}, {}),
    "verify_keyword_frequency": ("keywords:frequency", {"keyword": "word", "frequency": "N"}, {"relation": "exactly"}),
    "validate_forbidden_words": ("keywords:forbidden_words", {"forbidden_words": "forbidden_words"}, {}),
    "verify_letter_frequency": (
        "keywords:letter_frequency",
        {"letter": "letter", "let_frequency": "N"},
        {"let_relation": "exactly"},
    ),
    "validate_response_language": ("language:response_language", {"language": "language"}, {}),
    "verify_paragraph_count": ("length_constraints:number_paragraphs", {"num_paragraphs": "N"}, {}),
    "validate_word_constraint": ("length_constraints:number_words", {"num_words": "N", "relation": "quantifier"}, {}),
    "verify_sentence_constraint": (
        "length_constraints:number_sentences",
        {"num_sentences": "N", "relation": "quantifier"},
        {},
    ),
    "validate_paragraphs": (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": "N", "nth_paragraph": "i", "first_word": "first_word"},
        {},
    ),
    "verify_postscript": ("detectable_content:postscript", {"postscript_marker": "postscript_marker"}, {}),
    "validate_placeholders": ("detectable_content:number_placeholders", {"num_placeholders": "N"}, {}),
    "verify_bullet_points": ("detectable_format:number_bullet_lists", {"num_bullets": "N"}, {}),
    "validate_title": ("detectable_format:title", {}, {}),
    "validate_highlighted_sections": ("detectable_format:number_highlighted_sections", {"num_highlights": "N"}, {}),
    "validate_sections": (
        "detectable_format:multiple_sections",
        {"section_spliter": "section_splitter", "num_sections": "N"},
        {},
    ),
    "validate_json_format": ("detectable_format:json_format", {}, {}),
    "validate_repeat_prompt": ("combination:repeat_prompt", {"prompt_to_repeat": "original_prompt"}, {}),
    "validate_two_responses": ("combination:two_responses", {}, {}),
    "validate_uppercase": ("change_case:english_capital", {}, {}),
    "validate_lowercase": ("change_case:english_lowercase", {}, {}),
    "validate_frequency_capital_words": (
        "change_case:capital_word_frequency",
        {"capital_frequency": "N", "capital_relation": "quantifier"},
        {},
    ),
    "validate_end": ("startend:end_checker", {"end_phrase": "end_phrase"}, {}),
    "validate_quotation": ("startend:quotation", {}, {}),
    "validate_no_commas": ("punctuation:no_comma", {}, {}),
}


def _asked_constraints(truth: Any) -> dict:
    """``instruction_id_list`` and ``kwargs`` of an ifeval ground truth: ``[{"instruction_id": [...], "kwargs":
    [...]}]``, or Tulu 3's ``{"func_name": ..., "N": ...}``.
    """
    while isinstance(truth, (str, list)):
        truth = one_of(truth) if isinstance(truth, list) else literal_of(truth)
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
    return {
        "instruction_id_list": [name],
        "kwargs": [fixed | {ours: truth.get(theirs) for ours, theirs in arguments.items()}],
    }


def _asked_tests(truth: Any) -> list[dict]:
    """Tests of a code ground truth: asserts, or inputs and outputs of a program, as a list or its JSON."""
    while (
        isinstance(truth, str)
        or isinstance(truth, list)
        and len(truth) == 1
        and isinstance(truth[0], str)
        and truth[0].lstrip()[:1] == "["
    ):
        truth = literal_of(truth if isinstance(truth, str) else truth[0])
    if isinstance(truth, list) and truth and all(isinstance(one, str) and one.strip() for one in truth):
        return [{"kind": "python", "code": one} for one in truth]
    if (
        isinstance(truth, list)
        and truth
        and all(isinstance(one, dict) and {"input", "output"} <= one.keys() for one in truth)
    ):
        return code.tests_of(
            code.listed_cases({"inputs": [one["input"] for one in truth], "outputs": [one["output"] for one in truth]})
        )
    raise Bad("verifier_spec_invalid")


def _rlvr(row: dict, options) -> tuple[str, dict, set]:
    """open-instruct's RLVR rows: messages, a ground truth, and in `dataset` the name of the row's own verifier, which
    stays with the row. An answer that is written out already is left out.
    """
    if options.kind in ("demonstrations/1", "text/1"):
        return _messages({key: value for key, value in row.items() if key not in ("ground_truth", "dataset")}, options)
    if row.get("messages") is None or row.get("ground_truth") is None:
        raise Bad("missing_column")
    messages, named = to_messages(row["messages"]), one_of(row.get("dataset"))
    asked = {
        "prompt": messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages,
        "system": row.get("system"),
        "category": row.get("category"),
        "language": row.get("language"),
    }
    if isinstance(named, str) and named.strip().lower() in ("code", "code_stdio"):
        kind, out, codes = _prompts(asked, options)
        return kind, {**out, "domain": "code", "tests": _asked_tests(row["ground_truth"])}, codes
    truth = one_of(row["ground_truth"])
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
        kind, out, codes = _prompts(
            asked
            | {
                "answer": truth.replace(",", "") if verifier == "gsm8k" else truth,
                "answer_type": types[verifier],
            },
            options,
        )
        if verifier == "gsm8k" and out["answer_type"] not in ("integer", "number"):
            raise Bad("verifier_spec_invalid")
    return (
        kind,
        {**out, **({"domain": "math"} if verifier in ("gsm8k", "math") else {}), "_extra": {"verifier": verifier}},
        codes,
    )


def _instruction(row: dict, options) -> tuple[str, dict, set]:
    return _demonstration(
        {
            "prompt": asked_about(row.get("instruction"), row.get("input"), row.get("context")),
            "completion": row.get("output", row.get("response", row.get("completion"))),
            "system": row.get("system"),
        },
        options,
    )


def _turns(row: dict, options) -> tuple[str, dict, set]:
    """MT-Bench questions: the first turn is the prompt, later turns stay in extra_json."""
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns:
        raise Bad("missing_column" if turns is None else "wrong_type")
    # Arena-Hard
    turns = [
        (
            turn["content"]
            if isinstance(turn, dict) and set(turn) <= {"role", "content"} and isinstance(turn.get("content"), str)
            else turn
        )
        for turn in turns
    ]
    return (
        "prompts/1",
        {"prompt": to_prompt(turns[0]), "_extra": {"turns": turns}, **plain_fields(row, "category")},
        set(),
    )


#: Lists of requests that a model should refuse, in their published columns: what asks, what a row has besides, and what
#: it is about (eval.over_refusal).
# HarmBench, StrongREJECT, AdvBench
_HARMFUL = (
    ("Behavior", "SemanticCategory", "SemanticCategory"),
    ("forbidden_prompt", "category", "category"),
    ("goal", "target", None),
)


def harmful_list(row: dict) -> tuple[str, str, str | None] | None:
    return next(
        (one for one in _HARMFUL if all(isinstance(row.get(name), str) and row[name] for name in one[:2])), None
    )


def _harmful(row: dict, options) -> tuple[str, dict, set]:
    """A request of HarmBench (behind its context, where it has one), StrongREJECT or AdvBench, labelled unsafe:
    refusing it is right.
    """
    found = harmful_list(row)
    if found is None:
        raise Bad("missing_column")
    asks, _, about = found
    before = row.get("ContextString")
    text = f"{before.rstrip()}\n\n---\n\n{row[asks]}" if isinstance(before, str) and before.strip() else row[asks]
    return (
        "prompts/1",
        {
            "prompt": to_prompt(text, row.get("system")),
            **({"category": row[about]} if about else {}),
            "_extra": {"label": "unsafe"},
        },
        set(),
    )


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
    if any(
        isinstance(value, (str, list, dict, type(None)))
        or value not in (-1, 0, 1)
        or (zero_one and value == -1 and not isinstance(label, bool))
        for value, label in zip(values, labels)
    ):
        raise Bad("bad_label")
    values = [-1 if zero_one and value == 0 else int(value) for value in values]
    out = {
        "prompt": to_prompt(row.get("prompt"), row.get("system")),
        "completions": steps,
        "labels": values,
        "solution_correct": -1 not in values,
        **plain_fields(row, "answer", "separator"),
        **annotation_of(row),
    }
    for name in ("solution_correct", "is_quality_control"):
        if row.get(name) not in (None, ""):
            out[name] = to_label(row[name])
    if (generation := whole_number(row.get("generation"))) is not None:
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
    """A pair whose responses are cut into scored half-open spans [start, end), in characters or tokens
    (`data.segments`).
    """
    _, pair, codes = _pair(row, options)
    out = {name: pair[name] for name in ("prompt", "chosen", "rejected")}
    unit = row.get("offset_unit") or "char"
    if unit not in ("char", "token"):
        raise Bad("wrong_type")
    for side in ("chosen", "rejected"):
        out[f"{side}_segments"] = [_segment(item) for item in listed(row.get(f"{side}_segments"))]
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
    if (
        not isinstance(scores, list)
        or not scores
        or not all(
            isinstance(s, dict) and isinstance(s.get("score"), (int, float)) and math.isfinite(s["score"])
            for s in scores
        )
    ):
        raise Bad("wrong_type")
    return {
        "start": item["start"],
        "end": item["end"],
        "scores": [
            {"aspect": str(s.get("aspect")), "score": float(s["score"]), "rationale": s.get("rationale")}
            for s in scores
        ],
    }


TEXT_COLUMNS = frozenset(("domain", "category", "language", "critique", "answer", "separator", "context"))

_ANSWER = (
    "answer",
    "answer_type",
    "tests",
    "constraints",
    "facts",
    "reward_route",
    "domain",
    "category",
    "language",
    "instruction_id_list",
    "kwargs",
    "test",
    "entry_point",
)

# format -> (adapter, required columns, further columns it reads, in order of precedence)
FORMATS: dict[str, tuple[Callable, tuple[str, ...], tuple[str, ...]]] = {
    "alpaca_eval": (
        _alpaca_eval,
        ("instruction", "output_1", "output_2", "preference"),
        ("generator_1", "generator_2", "dataset"),
    ),
    "best_of": (lists.best_of, ("chosen", "rejected"), ("prompt", *lists.USED)),
    "segments": (
        _segments,
        ("chosen", "rejected", "chosen_segments", "rejected_segments"),
        ("prompt", "system", "offset_unit"),
    ),
    "hh": (_pair, ("chosen", "rejected"), ("prompt",)),
    "preference": (
        _pair,
        ("chosen", "rejected"),
        (
            "prompt",
            "system",
            "chosen_score",
            "rejected_score",
            "margin",
            "strength",
            "label_prob",
            "grade",
            "chosen_model",
            "rejected_model",
            "pairs_in_group",
            "rank_gap",
            "stage_index",
            "turn_index",
            "constraint_ids",
        ),
    ),
    "comparisons": (
        _comparison,
        ("response_a", "response_b"),
        (
            "prompt",
            "system",
            "label",
            "preference",
            "choice",
            "winner",
            "votes",
            "p_a",
            "n_points",
            "orientation",
            "annotator_id",
            "annotator",
            "model_a",
            "model_b",
            "label_kind",
            "criteria",
            "turn_index",
        ),
    ),
    "stepwise": (
        _stepwise,
        ("prompt", "completions", "labels"),
        (
            "system",
            "answer",
            "soft_labels",
            "separator",
            "solution_correct",
            "generation",
            "is_quality_control",
            "annotator_id",
            "annotator",
        ),
    ),
    "rankings": (
        _ranking,
        ("completions",),
        ("prompt", "system", "ranks", "scores", "models", "annotator_id", "annotator", "criteria"),
    ),
    "unpaired": (_unpaired, ("completion", "label"), ("prompt", "system", "label_kind")),
    "events": (_event, ("prompt", "completion", "action"), ("system", "edited_text")),
    "ratings": (
        _rating,
        ("completion", "score"),
        (
            "prompt",
            "system",
            "aspects",
            "critique",
            "scale_min",
            "scale_max",
            "model",
            "annotator_id",
            "annotator",
            "criteria",
        ),
    ),
    "rlvr": (_rlvr, ("messages", "ground_truth", "dataset"), ("system", "category", "language")),
    "messages": (_messages, ("messages",), ("system", "tools", "category", "train_turns")),
    "prompt_completion": (_demonstration, ("prompt", "completion"), ("system", "category")),
    "programs": (code.programs, (), code.USED),
    "multiple_choice": (mc.multiple_choice, ("question", "choices", "answer"), mc.USED),
    "harmful": (
        _harmful,
        (),
        ("system", "Behavior", "SemanticCategory", "ContextString", "forbidden_prompt", "category", "goal"),
    ),
    "gsm8k": (_gsm8k, ("question", "answer"), ()),
    "math": (_math, ("problem", "solution"), ("answer", "answer_type", "level", "type", "subject")),
    "qa": (_qa, ("question", "answer"), ("answers", "possible_answers", "input", "target", *mc.PASSAGES)),
    "instruction": (_instruction, ("instruction",), ("input", "context", "output", "response", "completion", "system")),
    "turns": (_turns, ("turns",), ("category",)),
    "prompts": (_prompts, ("prompt",), ("system", *_ANSWER)),
    "text": (_text, ("text",), ("domain",)),
}
