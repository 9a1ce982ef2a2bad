"""Rewards: a value or a reason, parts kept apart, and untrusted code that can neither hang nor kill a batch."""
from __future__ import annotations

import os
import time

import pytest

from stages.rewards import RewardComponent, Rewards, build_rewards, combine, extract_program
from stages.sandbox import Limits, run_jobs
from stages.verifiers import extract_world, math_equal, verifier_of


def row(text, *, answer="red", finish="eos", n=4, **extra):
    return {"prompt_row": {"prompt": [{"role": "user", "content": "?"}], "answer": answer, **extra}, "completion_text": text,
            "completion_ids": [1] * n, "finish_reason": finish}


def score(rows, *components, inputs=None):
    return build_rewards([RewardComponent(**c) for c in components], inputs or {}).score(rows)


def test_parts_are_stored_separately_and_weighted():
    scored = score([row("The color is red. Answer: red.", extra_json='{"verifier":"world"}'), row("x y. z", extra_json='{"verifier":"world"}', n=30)],
                   {"kind": "verifier"}, {"kind": "length", "weight": 0.5, "max_length": 20, "cache_length": 10})
    assert scored[0].parts == {"verifier": 1.0, "length": 0.0} and scored[0].total == 1.0 and scored[0].correct and scored[0].extracted == "red"
    assert scored[1].parts == {"verifier": 0.0, "length": -1.0} and scored[1].total == -0.5 and scored[1].correct is False


def test_unscorable_is_never_zero():
    scored = score([row("7", answer=None), row("7", answer="seven", answer_type="integer")], {"kind": "verifier"}, {"kind": "format"})
    for result in scored:
        assert result.total is None and result.correct is None and result.parts["verifier"] is None and result.reasons["verifier"]


def test_missing_policies():
    parts, weights = {"a": None, "b": 1.0}, {"a": 1.0, "b": 0.5}
    assert combine(parts, weights, "skip") == 0.5
    assert combine(parts, weights, "renormalise") == 1.5
    assert combine(parts, weights, "invalidate") is None
    assert combine({"a": None}, weights, "skip") is None


def test_a_cut_or_empty_response_never_reaches_the_reward_model():
    class Scorer:
        disagreement = None

        def reads_ids_of(self, renderer):
            return True

        def score(self, responses):
            assert [r.ids for r in responses] == [[9, 1, 1]]
            return [0.7]

    component = RewardComponent(kind="model")
    rows = [{**row("good", n=2), "prompt_ids": [9]}, {**row("cut", finish="length"), "prompt_ids": [9]}, {**row("  "), "prompt_ids": [9]}]
    assert [s.total for s in Rewards([component], {"model": Scorer()}, None).score(rows)] == [0.7, 0.0, -1.0]


HOSTILE = """
def score(prompt, completion, answer):
    import os
    if completion == "hang":
        while True: pass
    if completion == "memory":
        return len(bytearray(10 << 30))
    if completion == "raise":
        raise ValueError("no idea")
    if completion == "exit":
        os._exit(0)
    if completion == "network":
        import socket
        socket.create_connection(("127.0.0.1", 9))
    if completion == "children":
        import subprocess
        subprocess.Popen(["sleep", "54321"])
        while True: pass
    if completion == "nan":
        return float("nan")
    return completion == answer
"""


def test_a_hostile_verifier_costs_its_own_time_out_only():
    names = ["a", "hang", "memory", "raise", "exit", "network", "children", "nan", "a", "b"]
    started = time.monotonic()
    scored = score([row(n, answer="a") for n in names], {"kind": "python", "source": HOSTILE, "timeout_s": 1.0})
    assert time.monotonic() - started < 60
    totals = dict(zip(names, scored))
    assert [s.total for s in (scored[0], scored[8], scored[9])] == [1.0, 1.0, 0.0]
    reasons = {n: totals[n].reasons.get("python", "") for n in names}
    assert reasons["hang"] == reasons["children"] == "timeout"
    assert "memory" in reasons["memory"] and "no idea" in reasons["raise"] and "crashed" in reasons["exit"]
    assert "network" in reasons["network"] and "finite" in reasons["nan"]
    assert all(totals[n].total is None for n in ("hang", "memory", "raise", "exit", "network", "children", "nan"))
    time.sleep(0.2)
    assert not [p for p in os.listdir("/proc") if p.isdigit() and "54321" in _command(p)]


def _command(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as handle:
            return handle.read()
    except OSError:
        return ""


def test_a_pattern_that_never_ends_is_cut():
    scored = score([row("a" * 40 + "!"), row("aa")], {"kind": "regex", "pattern": "^(a+)+$", "timeout_s": 1.0})
    assert scored[0].total is None and scored[0].reasons["regex"] == "timeout" and scored[1].total == 1.0


def test_code_tests_cannot_be_passed_by_leaving_early():
    tests = [{"kind": "assert", "code": "assert double(3) == 6", "input": None, "expected": None, "timeout_s": None}]
    programs = ["def double(x):\n    return 2 * x", "import sys\nprint('OK')\nsys.exit(0)", "import os\nos._exit(0)", "def double(x):\n    return x"]
    scored = score([row(f"```python\n{p}\n```", tests=tests) for p in programs] + [row(programs[0], tests=tests), row("x", tests=[])],
                   {"kind": "code", "timeout_s": 3.0})
    assert [s.total for s in scored] == [1.0, 0.0, 0.0, 0.0, 0.0, None]
    assert extract_program("```python\nx\n``` then ```py\ny\n```") == "y\n"


def test_jobs_keep_their_order_and_do_not_leave_anything_behind():
    jobs = [{"kind": "program", "source": "import builtins\nprint(getattr(builtins, 'left', 0)); builtins.left = 1", "stdin": ""}] * 5
    assert [o.value["stdout"] for o in run_jobs(jobs, Limits(workers=2), fresh=True)] == ["0\n"] * 5


def test_settings_that_cannot_work_say_what_to_write():
    with pytest.raises(ValueError, match="give reward_model="):
        build_rewards([RewardComponent(kind="model")], {})
    with pytest.raises(ValueError, match="its own name"):
        build_rewards([RewardComponent(kind="format"), RewardComponent(kind="format")], {})
    with pytest.raises(ValueError, match="pattern"):
        RewardComponent(kind="regex")
    with pytest.raises(ValueError, match="at least one component"):
        build_rewards([], {})


@pytest.mark.parametrize("text, answer", [("Answer: red.", "red"), ("so. Answer: RED", "RED"), ("red", "red"), ("red.", "red"), ("It is red. Yes.", None),
                                          ("Answer: a. Answer: b.", "b"), ("", None), ("Answer: .", None), ("Answer: 1 2  3. I hope this helps.", "1 2 3")])
def test_world_extraction(text, answer):
    assert extract_world(text) == answer


def test_the_verifier_is_chosen_by_the_row():
    assert verifier_of({"answer_type": "integer"}) == "math" and verifier_of({"answer_type": "mc"}) == "mc"
    assert verifier_of({"answer": "x"}) == "text" and verifier_of({"extra_json": '{"verifier":"world"}'}) == "world"
    assert math_equal("\\dfrac{1}{2}", "0.5") and not math_equal("1/0", "1")
