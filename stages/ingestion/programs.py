"""Benchmarks of programs in their published columns -> ``prompts/1`` rows with ``tests`` (eval.humaneval); HumanEval
itself needs none of this.

| source | question | tests |
|---|---|---|
| MBPP, MBPP+ | text or prompt | test_list (asserts, shown in the prompt, as the paper does), behind test_imports and test_setup_code; MBPP+: the script test |
| LiveCodeBench | question_content, starter_code | public_test_cases and private_test_cases: input and output on the standard streams, or of a function (metadata.func_name) |
| APPS, TACO, CodeContests-like | question, starter_code | input_output: {inputs, outputs, fn_name} |

Everything else of a row, such as difficulty and contest_date, stays in ``extra_json``.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import zlib
from typing import Any

from stages.ingestion.rules import Bad

USED = (
    "text",
    "prompt",
    "question",
    "question_content",
    "starter_code",
    "test_list",
    "test_imports",
    "test_setup_code",
    "test",
    "public_test_cases",
    "private_test_cases",
    "input_output",
    "system",
    "solutions",
    "code",
    "challenge_test_list",
)
STREAMS = (
    "\n\nRead the input from standard input and print the answer to standard output. Write the whole program in a"
    " ```python block."
)
FUNCTION = "\n\nWrite the code in a ```python block."
#: How a function is called with arguments that a line of JSON holds each; the result goes through JSON, so that tuples
#: are lists and no object of the program's decides what it equals.
CALL = (
    "import json as _json\ntry:\n    _called = Solution().{name}\nexcept NameError:\n    _called = {name}\n_said ="
    ' _called(*[_json.loads(_line) for _line in {given!r}.split("\\n") if _line.strip()])\n_said, _wanted ='
    " _json.loads(_json.dumps(_said)), _json.loads({expected!r})\nassert _said == _wanted{more}\n"
)


def is_program(row: dict) -> bool:
    """Whether a source row asks for a program and brings tests in one of these forms."""
    text = lambda *names: any(isinstance(row.get(name), str) and row[name] for name in names)
    return (
        isinstance(row.get("test_list"), list)
        and text("text", "prompt")
        or text("question_content")
        and row.get("public_test_cases") is not None
        or text("question")
        and text("input_output")
    )


def programs(row: dict, options) -> tuple[str, dict, set]:
    """A ``prompts/1`` row of one source row. Raises Bad."""
    from stages.ingestion.fields import to_prompt

    if isinstance(row.get("test_list"), list):
        asked, tests = _mbpp(row)
    elif row.get("question_content") is not None:
        asked, tests = _on_streams_or_function(
            row["question_content"],
            row,
            [*_cases(row.get("public_test_cases")), *_cases(row.get("private_test_cases"))],
        )
    else:
        asked, tests = _on_streams_or_function(row.get("question"), row, listed_cases(row.get("input_output")))
    if not tests:
        raise Bad("verifier_spec_invalid")
    return "prompts/1", {"prompt": to_prompt(asked, row.get("system")), "domain": "code", "tests": tests}, set()


def _mbpp(row: dict) -> tuple[str, list[dict]]:
    asserts = row["test_list"]
    question = next((row[name] for name in ("text", "prompt") if isinstance(row.get(name), str)), None)
    if question is None:
        raise Bad("missing_column")
    shown = with_asserts(question, asserts)
    imports = row.get("test_imports")
    before = "\n".join([*(imports if isinstance(imports, list) else []), row.get("test_setup_code") or ""]).strip()
    scripts = [row["test"]] if isinstance(row.get("test"), str) and row["test"].strip() else asserts
    return shown, [{"kind": "python", "code": f"{before}\n{script}\n".lstrip("\n")} for script in scripts]


def with_asserts(question: str, asserts: Any) -> str:
    """MBPP's question, as the paper asks it; its asserts name the function. Raises Bad."""
    if not isinstance(asserts, list) or not asserts or not all(isinstance(one, str) and one.strip() for one in asserts):
        raise Bad("verifier_spec_invalid")
    return f"{question.rstrip()}\nYour code should pass these tests:\n\n" + "\n".join(asserts)


def _on_streams_or_function(question: Any, row: dict, cases: list[dict]) -> tuple[str, list[dict]]:
    if not isinstance(question, str) or not question.strip():
        raise Bad("missing_column" if question is None else "wrong_type")
    tests = tests_of(cases, _function_of(row))
    starter = row.get("starter_code")
    begun = (
        f"\n\nBegin with this code:\n```python\n{starter.rstrip()}\n```"
        if isinstance(starter, str) and starter.strip()
        else ""
    )
    return question.rstrip() + begun + (FUNCTION if any(case["called"] for case in cases) else STREAMS), tests


def tests_of(cases: list[dict], name: str | None = None) -> list[dict]:
    """Tests of cases (:func:`listed_cases`): programs that read and print, or calls of the function that a case, or
    ``name``, names. Raises Bad.
    """
    name = next((case["function"] for case in cases if case.get("function")), None) or name
    tests = []
    for case in cases:
        if case["called"]:
            if not name or not str(name).isidentifier():
                raise Bad("verifier_spec_invalid")
            tests.append(
                {
                    "kind": "python",
                    "code": CALL.format(
                        name=name, given=case["input"], expected=case["output"], more=case.get("more", "")
                    ),
                }
            )
        else:
            tests.append({"kind": "io", "input": case["input"], "expected": case["output"]})
    return tests


def _function_of(row: dict) -> str | None:
    metadata = row.get("metadata")
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError:
            return None
    return metadata.get("func_name") if isinstance(metadata, dict) else None


class _Plain(pickle.Unpickler):
    """Of texts and lists only: nothing that a file names is imported or called."""

    def find_class(self, module, name):
        raise Bad("verifier_spec_invalid")


def _cases(value: Any) -> list[dict]:
    """LiveCodeBench's tests: a list, its JSON, or that compressed as the release does (pickle, zlib, base64)."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            try:
                value = _Plain(io.BytesIO(zlib.decompress(base64.b64decode(value, validate=True)))).load()
                value = json.loads(value) if isinstance(value, (str, bytes)) else value
            except (
                binascii.Error,
                zlib.error,
                pickle.UnpicklingError,
                ValueError,
                EOFError,
                IndexError,
                KeyError,
                AttributeError,
            ):
                raise Bad("verifier_spec_invalid") from None
    if not isinstance(value, list) or not all(
        isinstance(one, dict) and isinstance(one.get("input"), str) and isinstance(one.get("output"), str)
        for one in value
    ):
        raise Bad("verifier_spec_invalid")
    return [
        {"input": one["input"], "output": one["output"], "called": one.get("testtype") == "functional"} for one in value
    ]


def listed_cases(value: Any) -> list[dict]:
    """Cases of {inputs, outputs, fn_name}, or its JSON (APPS, TACO, verl's code rows): of a function its arguments as a
    list, and its result, alone or in a list of one; else texts, or lists of lines.
    """
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise Bad("verifier_spec_invalid") from None
    if (
        not isinstance(value, dict)
        or not isinstance(value.get("inputs"), list)
        or not isinstance(value.get("outputs"), list)
        or len(value["inputs"]) != len(value["outputs"])
    ):
        raise Bad("verifier_spec_invalid")
    name = value.get("fn_name")
    if name:
        if not all(isinstance(given, list) for given in value["inputs"]):
            raise Bad("verifier_spec_invalid")
        return [
            {
                "input": "\n".join(map(json.dumps, given)),
                "output": json.dumps(wanted),
                "called": True,
                "function": name,
                "more": " or isinstance(_wanted, list) and [_said] == _wanted",
            }
            for given, wanted in zip(value["inputs"], value["outputs"])
        ]
    text = lambda said: "\n".join(map(str, said)) if isinstance(said, list) else str(said)
    return [
        {"input": text(given), "output": text(wanted), "called": False}
        for given, wanted in zip(value["inputs"], value["outputs"])
    ]
