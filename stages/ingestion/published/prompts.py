"""Prompts whose answers can be checked: verl and DAPO, DeepMath, Open-Reasoner-Zero, SYNTHETIC, MBPP, TruthfulQA ..."""

from __future__ import annotations

import re
from typing import Any

import orjson

from stages.ingestion import programs
from stages.ingestion.published.forms import Form, are_dicts, for_prompts, is_number, json_value, without
from stages.ingestion.rules import Bad


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
        without(
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
    info = json_value(row["verification_info"])
    if not isinstance(info, dict):
        raise Bad("wrong_type")
    new: dict[str, Any] = {}
    if info.get("test_cases") is not None:
        cases = info["test_cases"]
        if not are_dicts(cases, "input", "output") or str(info.get("language") or "python").lower() not in (
            "python",
            "python3",
        ):
            raise Bad("verifier_spec_invalid")
        name = next((case["fn_name"] for case in cases if case.get("fn_name")), None)
        given, wanted = (
            [json_value(case[key]) if name and isinstance(case[key], str) else case[key] for case in cases]
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
    return [without(row, "verification_info", **new) if new else row]


_TRUTHS = ("ground_truth", "solution", "final_answer")


def _short_answer(value: Any) -> Any:
    """The answer in a column that may hold a whole solution: its last box, what stands between dollars, or the text
    itself where it is one short line; None else.
    """
    from stages.verification.extraction import extract_boxed

    if is_number(value):
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
        for_prompts(row, options)
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
    if for_prompts(row, options):
        return [
            without(
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
        without(row, "question", prompt=row["question"], completion=row[name])
        for name in ("r1_solution_1", "r1_solution_2", "r1_solution_3")
        if row.get(name)
    ]


def _problem_only(row: dict, options) -> list[dict]:
    """NuminaMath and OpenR1-Math hold a conversation beside the problem: where prompts are wanted, the problem with its
    answer.
    """
    return [without(row, "messages")]


def _open_math(row: dict, options) -> list[dict]:
    """NVIDIA's OpenMathReasoning and OpenMathInstruct: a problem with a generated solution, the demonstration; where
    prompts are wanted, with its answer.
    """
    if options.kind != "prompts/1":
        return [
            without(row, "problem", "generated_solution", prompt=row["problem"], completion=row["generated_solution"])
        ]
    answer = row.get("expected_answer")
    if answer is None or not str(answer).strip():
        raise Bad("missing_column")
    return [
        without(
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
        without(
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
        without(
            row,
            "text",
            "code",
            "test_list",
            prompt=programs.with_asserts(asked, row["test_list"]),
            completion=f"```python\n{row['code'].strip()}\n```",
        )
    ]


VERL = Form(
    ("prompt", "reward_model"),
    _verl,
    lambda row, options: isinstance(row["reward_model"], dict) and for_prompts(row, options),
)
DEEPMATH = Form(
    ("question", "final_answer"),
    _deepmath,
    lambda row, options: "r1_solution_1" in row or for_prompts(row, options),
)
PROBLEM = Form(
    ("problem", "messages"),
    _problem_only,
    lambda row, options: (
        options.kind == "prompts/1" and (row.get("answer") is not None or row.get("solution") is not None)
    ),
)
MBPP = Form(
    ("test_list", "code"),
    _mbpp,
    lambda row, options: (
        not for_prompts(row, options)
        and isinstance(row["code"], str)
        and (isinstance(row.get("text"), str) or isinstance(row.get("prompt"), str))
    ),
)
ORZ = Form((), _orz, lambda row, options: for_prompts(row, options) and _orz_talk(row) is not None)
SYNTHETIC = Form(("prompt", "verification_info"), _synthetic, for_prompts)
OPEN_MATH = Form(("problem", "generated_solution"), _open_math)
TRUTHFUL = Form(("question", "best_answer", "correct_answers", "incorrect_answers"), _truthful, for_prompts)
WITH_TRUTH = Form(("prompt",), _with_truth, _only_asks)
