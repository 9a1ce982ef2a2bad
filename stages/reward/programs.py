"""Components that run what others wrote, in the sandbox: unit tests of generated programs, reward functions,
patterns.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from decimal import Decimal

from stages.reward.components import MEASURED, RewardComponent
from stages.reward.verdicts import Unscorable, Verdict, finite, text_read, value_of


def in_groups(rows, otherwise) -> list[list[int]]:
    """Positions of the rows that are compared with each other: of one ``group`` where rows have it (two draws of a
    prompt are two), else of one ``otherwise(row)``.
    """
    groups: dict = {}
    for i, row in enumerate(rows):
        groups.setdefault(otherwise(row) if row.get("group") is None else row["group"], []).append(i)
    return list(groups.values())


def limits_of(component: RewardComponent):
    from stages.running.sandbox import Limits

    return Limits(timeout_s=component.timeout_s, memory_mib=component.memory_mib, files=tuple(component.files))


def score_regex(rewards, component, rows) -> list:
    from stages.running.sandbox import run_jobs

    jobs = [{"kind": "pattern", "pattern": component.pattern, "text": text_read(component, row)} for row in rows]
    return [Unscorable(o.error) if o.error else Verdict(float(o.value)) for o in run_jobs(jobs, limits_of(component))]


def columns_of(prompt_row: dict) -> dict:
    """A prompt row for people's own code, in plain JSON: its columns, and what extra_json holds as ``metadata``."""
    plain = json.loads(
        json.dumps({name: value for name, value in prompt_row.items() if name != "extra_json"}, default=str)
    )
    return {**plain, "metadata": json.loads(prompt_row.get("extra_json") or "{}")}


def _given(component: RewardComponent, row: dict) -> tuple[dict, dict]:
    """(arguments by name, columns by name) that a function of one's own can ask for about one answer
    (:func:`stages.running.sandbox.arguments`).
    """
    columns, text = columns_of(row["prompt_row"]), text_read(component, row)
    prompt, answer, metadata = columns.get("prompt"), columns.get("answer"), columns["metadata"]
    own = metadata if isinstance(metadata, dict) else {}
    # verl's: what no verifier reads, such as a table of numbers, stands only there
    judged = own.get("reward_model") if isinstance(own.get("reward_model"), dict) else {}
    truth = own.get("ground_truth", judged.get("ground_truth")) if answer is None else answer
    return (
        {
            "prompt": prompt,
            "completion": [{"role": "assistant", "content": text}] if component.as_messages else text,
            "answer": answer,
            "messages": prompt,
            "row": columns,
            "completion_ids": list(row["completion_ids"]),
            "finish_reason": row.get("finish_reason"),
            "data_source": own.get("data_source", columns.get("source")),
            "solution_str": text,
            "ground_truth": truth,
            "extra_info": own.get("extra_info", metadata),
        },
        {**own, **columns},
    )


def _returned(value) -> Verdict | Unscorable:
    """What a function of one's own says of one answer: a number, or a dict with ``reward`` (verl: ``score``), of which
    other numbers are metrics, a bool called ``correct`` or ``acc`` (verl) is the verdict, and a text called ``feedback``
    says what is wrong with it; what is nothing of this counts as nothing."""
    if not isinstance(value, dict):
        return value_of(value)
    key = next((name for name in ("reward", "score") if name in value), None)
    if key is None:
        return Unscorable("the dict that score() returned has no reward; return {'reward': NUMBER, ...}")
    metrics = {name: float(one) for name, one in value.items() if name != key and finite(one)}
    if wrong := [name for name in metrics if name in MEASURED or not name.strip() or "/" in name]:
        return Unscorable(
            f"score() returned a metric called {wrong[0]!r}; call it otherwise, without a slash and not"
            f" {', '.join(MEASURED)}"
        )
    found = value_of(value[key])
    right = next((value[name] for name in ("correct", "acc") if isinstance(value.get(name), bool)), None)
    said = value["feedback"].strip() if isinstance(value.get("feedback"), str) else None
    return (
        found
        if isinstance(found, Unscorable)
        else replace(
            found, correct=found.correct if right is None else right, metrics=metrics, feedback=without_addresses(said)
        )
    )


#: Characters of one part of a feedback.
SHOWN = 500


def without_addresses(said: str | None) -> str | None:
    """A text of a program without the places of its objects in memory, which are others in every run; None of none."""
    return re.sub(r"\b0x[0-9a-fA-F]{6,}\b", "0x...", said) if said else None


def failed_test(test: dict, outcome) -> str:
    """What a programmer is told of a test that his program did not pass: what was asked, what was expected, what came."""
    cut = lambda text: text if len(text := str(text).strip()) <= SHOWN else text[:SHOWN] + " ..."
    came = outcome.error or ""
    if outcome.error is None and not test.get("code"):
        came = outcome.value["stdout"] if outcome.value["exit"] == 0 else f"exit code {outcome.value['exit']}"
    asked = (
        {"Test": test["code"]}
        if test.get("code")
        else {"Input": test.get("input") or "", "Expected output": test.get("expected") or ""}
    )
    came_as = "Error" if test.get("code") or outcome.error else "Output"
    parts = {**asked, came_as: came or ("it is not passed" if test.get("code") else "nothing")}
    return without_addresses("\n".join(["A test failed.", *(f"{name}:\n{cut(text)}" for name, text in parts.items())]))


def failure_of(component, error: str) -> Unscorable:
    if (
        not component.as_messages
        and re.search(r"string ind(?:ices|ex) must be integers|'str' object has no attribute 'get'", error)
        and re.search(r"""["']content["']|\btrl\b""", component.source)
    ):
        error += (
            "; a completion is its text here and no list of messages: write as_messages: true, or completion for"
            " completion[0]['content']"
        )
    return Unscorable(
        f"timeout: score() took more than {component.timeout_s:g} s; raise timeout_s where it needs longer"
        if error == "timeout"
        else error
    )


def score_python(rewards, component, rows) -> list:
    """A function of one's own, for one answer at a time or for all answers to a prompt at once."""
    from stages.running.sandbox import run_jobs, scoring

    given = [_given(component, row) for row in rows]
    if component.scope == "row":
        return [
            failure_of(component, o.error) if o.error else _returned(o.value)
            for o in run_jobs([scoring(component.called, *one) for one in given], limits_of(component))
        ]
    groups = in_groups(
        rows, lambda row: row["prompt_row"].get("row_id") or json.dumps(row["prompt_row"].get("prompt"), sort_keys=True)
    )
    listed = lambda of: {
        name: [one.get(name) for one in of] for name in dict.fromkeys(name for one in of for name in one)
    }
    jobs = [
        scoring(component.called, *(listed([given[i][part] for i in members]) for part in (0, 1)), many=True)
        for members in groups
    ]
    out: list = [None] * len(rows)
    for members, outcome in zip(groups, run_jobs(jobs, limits_of(component))):
        values, why = outcome.value, outcome.error
        if not why and (not isinstance(values, list) or len(values) != len(members)):
            why = (
                "score() of a group returned"
                f" {f'{len(values)} values' if isinstance(values, list) else f'{values!r:.60}'}; return a list with one"
                f" for each of its {len(members)} answers"
            )
        for k, i in enumerate(members):
            out[i] = failure_of(component, why) if why else _returned(values[k])
    return out


_FENCE = re.compile(r"(?<![`~])(`{3,}|~{3,})[ \t]*([\w+#.-]*)$")


def extract_program(text: str) -> str | None:
    """Content of the last fenced block that is marked as Python, else of the last without a language; None without one
    (reward.code: badly formatted).

    A fence is closed by a line that begins with one at least as long, indented by at most three spaces more, or by one
    at the end of a line of code; a language behind it opens the next block. Lines lose the indentation of their fence.
    """
    found: dict[bool, str] = {}
    fence, language, indent, lines = "", "", 0, []
    for line in text.replace("\r\n", "\n").split("\n"):
        starts, ends = re.match(r"([ \t]*)(`{3,}|~{3,})", line), _FENCE.search(line.rstrip())
        if fence:
            closes = starts and starts[2].startswith(fence) and len(starts[1]) <= indent + 3
            if not closes and (starts or not ends or ends[2] or not ends[1].startswith(fence)):
                lines.append(line)
                continue
            lines += [] if closes else [line[: ends.start()]]
            if language in ("python", "python3", "py", ""):
                found[bool(language)] = "".join(re.sub(rf"^[ \t]{{0,{indent}}}", "", own) + "\n" for own in lines)
            fence = ""
            if not closes or not ends or not ends[2]:
                continue
        if ends and (ends[2] or ends[1] not in line[: ends.start()]):
            fence, language, indent, lines = ends[1], ends[2].lower(), len(line) - len(line.lstrip(" \t")), []
    return found.get(True, found.get(False))


#: Where a completion of a function ends: at the first line that belongs to something else (eval.humaneval).
_STOPS = re.compile(r"\n(?:class|def|#|if|print)")


def program_of(prompt_row: dict, text: str) -> str | None:
    """The program that an answer gives; None where there is none (reward.code).

    For a prompt that is the beginning of a function and tests that end in ``check(FUNCTION)`` (eval.humaneval), an
    answer without a fence is the program or its completion, and a program without the function's header is put behind
    the prompt.
    """
    from textwrap import indent

    program = extract_program(text)
    calls = [
        found[1]
        for test in prompt_row.get("tests") or []
        if (found := re.search(r"^check\((\w+)\)\s*\Z", test.get("code") or "", re.MULTILINE))
    ]
    start = (prompt_row.get("prompt") or [{}])[-1].get("content") or "" if calls else ""
    start = extract_program(start) or start
    header = re.compile(rf"^[ \t]*(?:async[ \t]+)?def[ \t]+{calls[-1]}\b", re.MULTILINE) if calls else None
    if header is None or not header.search(start) or not text.strip():
        return program
    if program is None:
        body = text.replace("\r\n", "\n")
        if not body.lstrip("\n")[:1].isspace() and header.search(body):
            return body
        program = body[: stop.start()] if (stop := _STOPS.search(body)) else body
    elif header.search(program):
        return program
    body = re.sub(r"^ {1,3}(?! )", "    ", program.lstrip("\n"))  # some tokenizers drop the first space of a text
    return start.rstrip() + "\n" + (body if body[:1].isspace() else indent(body, "    "))


def _hardest(tests: list[dict], limit: int | None) -> list[dict]:
    """The tests with the longest inputs (of asserts: the longest ones), in their order; the first ones of equals."""
    if limit is None or len(tests) <= limit:
        return tests
    longest = sorted(range(len(tests)), key=lambda i: -len(tests[i].get("code") or tests[i].get("input") or ""))[:limit]
    return [tests[i] for i in sorted(longest)]


def score_code(rewards, component, rows) -> list:
    """Unit tests: a test passes if its code runs to the end after the program, or if the program prints what is
    expected.
    """
    from stages.running.sandbox import run_jobs
    from stages.verification.rule_rewards import code_reward

    jobs, owners = [], []
    programs = [program_of(row["prompt_row"], text_read(component, row)) for row in rows]
    asked = [_hardest(row["prompt_row"].get("tests") or [], component.max_tests) for row in rows]
    for i, (tests, program) in enumerate(zip(asked, programs)):
        for test in tests if program is not None else []:
            job = (
                {"kind": "tested", "test": test["code"]}
                if test.get("code")
                else {"kind": "program", "stdin": test.get("input") or ""}
            )
            jobs.append({**job, "source": program, "timeout_s": test.get("timeout_s")})
            owners.append((i, test))
    passed, failed = [0] * len(rows), [None] * len(rows)
    for (i, test), outcome in zip(owners, run_jobs(jobs, limits_of(component), fresh=True)):
        passes = outcome.error is None and (
            outcome.value is True
            if test.get("code")
            else outcome.value["exit"] == 0 and _same_output(outcome.value["stdout"], test.get("expected") or "")
        )
        passed[i] += passes
        if not passes and failed[i] is None:
            failed[i] = failed_test(test, outcome)
    out = []
    for tests, program, count, told in zip(asked, programs, passed, failed):
        total = len(tests)
        value = code_reward(
            count, total, component.mode, well_formatted=program is not None, threshold=component.threshold
        )
        out.append(
            Unscorable("the prompt row has no tests")
            if value is None
            else Verdict(
                value,
                program is not None and count == total,
                feedback="The answer has no program in a fenced block." if program is None else told,
            )
        )
    return out


def _same_output(got: str, expected: str) -> bool:
    """Equal line by line, trailing white space and trailing empty lines aside; lines of numbers as decimal numbers, so
    that 1.50 is 1.5 (LiveCodeBench).
    """
    clean = lambda text: [line.rstrip() for line in text.rstrip().splitlines()]
    found, wanted = clean(got), clean(expected)
    return (
        found == wanted
        or len(found) == len(wanted)
        and all(a == b or (x := _decimals(a)) is not None and x == _decimals(b) for a, b in zip(found, wanted))
    )


def _decimals(line: str) -> list[Decimal] | None:
    """The finite numbers that a line consists of; None where it holds anything else."""
    words = line.split()
    return (
        [Decimal(word) for word in words]
        if words and all(re.fullmatch(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?", word) for word in words)
        else None
    )
