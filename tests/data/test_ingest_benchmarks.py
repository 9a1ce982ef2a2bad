"""Benchmarks in the columns that they are published in: what a right and a wrong answer to each row earns
(eval.humaneval, eval.mc_letter, eval.over_refusal).
"""

from __future__ import annotations

import base64
import json
import pickle
import zlib

import pytest

from stages.evaluation.refusals import asked_of
from stages.ingest import Config
from stages.ingestion.formats import Adapter, detect
from stages.ingestion.rules import Bad
from stages.reward.components import RewardComponent
from stages.reward.rewards import build_rewards
from stages.verification.choices import gold_of, question_of

MBPP = {
    "task_id": 2,
    "text": "Write a function to add two numbers.",
    "code": "def add(a, b):\n    return a + b",
    "test_list": ["assert add(1, 2) == 3", "assert add(1.5, 2) == 3.5", "assert math.isclose(add(.1, .2), .3)"],
    "test_setup_code": "import math",
    "challenge_test_list": [],
}
PLUS = {
    "task_id": 2,
    "prompt": "Write a function to add two numbers.",
    "code": "",
    "test_imports": ["import math"],
    "test_list": ["assert add(1, 2) == 3"],
    "test": "for i in range(50):\n    assert add(i, 1) == i + 1",
}
LCB = {
    "question_title": "Sum",
    "question_content": "Print the sum of the numbers of each line.",
    "platform": "atcoder",
    "starter_code": "",
    "difficulty": "easy",
    "contest_date": "2024-01-01",
    "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
    "metadata": "{}",
    "private_test_cases": (
        base64.b64encode(
            zlib.compress(pickle.dumps(json.dumps([{"input": "5 5\n2 2", "output": "10\n4", "testtype": "stdin"}])))
        ).decode()
    ),
}
CALLED = {
    **LCB,
    "question_content": "Add.",
    "starter_code": "class Solution:\n    def add(self, a: int, b: int) -> int:\n        ",
    "metadata": json.dumps({"func_name": "add"}),
    "public_test_cases": json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}]),
    "private_test_cases": json.dumps([{"input": "[1]\n[2]", "output": "[1, 2]", "testtype": "functional"}]),
}
APPS = {
    "problem_id": 1,
    "question": "Print the sum.",
    "solutions": "[]",
    "input_output": json.dumps({"inputs": ["1 2\n", ["3 4", "1"]], "outputs": ["3\n", ["7", "1"]]}),
    "difficulty": "interview",
    "starter_code": "",
}
NAMED = {
    "question": "Add.",
    "input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [[3], [1, 2]]}),
    "starter_code": "def add(a, b):",
}
SUMS = "import sys\nfor line in sys.stdin:\n    print(sum(map(int, line.split())))"
ADD = "def add(a, b):\n    return a + b"


def read(row):
    name = detect([row])
    kind, out, _ = Adapter(name, Config())(row)
    return name, kind, out


def earned(row, program):
    asked = {"row_id": "x", **row, "answer": None}
    reply = {
        "prompt_row": asked,
        "completion_text": f"Like this:\n```python\n{program}\n```",
        "completion_ids": [1],
        "finish_reason": "eos",
    }
    return build_rewards([RewardComponent(kind="code", mode="fraction", timeout_s=20.0)], {}).score([reply])[0].total


@pytest.mark.parametrize(
    "row, tests, right, wrong, share",
    [
        (MBPP, 3, ADD, "def add(a, b):\n    return int(a + b)", 1 / 3),
        (PLUS, 1, ADD, "def add(a, b):\n    return 3", 0.0),
        (LCB, 2, SUMS, "print(3)", 0.5),
        (CALLED, 2, "class Solution:\n    def add(self, a, b):\n        return a + b", ADD.replace("+", "-"), 0.0),
        (APPS, 2, SUMS, "print(3)", 0.5),
        (NAMED, 2, ADD, "def add(a, b):\n    return 3", 0.5),
    ],
    ids=["mbpp", "mbpp+", "livecodebench", "livecodebench-function", "apps", "apps-function"],
)
def test_programs(row, tests, right, wrong, share):
    name, kind, out = read(row)
    assert (name, kind, out["domain"], len(out["tests"])) == ("programs", "prompts/1", "code", tests)
    assert earned(out, right) == 1.0 and earned(out, wrong) == pytest.approx(share)


@pytest.mark.parametrize(
    "row",
    (MBPP, PLUS, LCB, CALLED, APPS, NAMED),
    ids=["mbpp", "mbpp+", "livecodebench", "livecodebench-function", "apps", "apps-function"],
)
def test_a_file_of_programs_is_read_with_all_of_its_tests(row, tmp_path):
    """What the stage makes of a file is what its format says: no other reader of published columns comes before it."""
    from stages.ingestion.published import adapter_of
    from stages.ingestion.sources import Record, find_files

    (tmp_path / "x.jsonl").write_text(json.dumps(row) + "\n")
    adapter = adapter_of(find_files(str(tmp_path / "x.jsonl"))[0], Config())
    (record,) = adapter.records([Record(1, None, row, None)])
    assert adapter.name == "programs" and adapter(record.row)[1]["tests"] == read(row)[2]["tests"]


def test_what_a_program_is_told():
    """MBPP shows its asserts, for they name the function; hidden tests are shown nowhere; what else a row says stays
    with it.
    """
    said = [read(row)[2]["prompt"][0]["content"] for row in (MBPP, PLUS, LCB, CALLED)]
    assert (
        "assert add(1, 2) == 3" in said[0]
        and "range(50)" not in said[1]
        and "standard input" in said[2]
        and "5 5" not in said[2]
        and "def add(self" in said[3]
        and "standard input" not in said[3]
    )
    assert json.loads(read(LCB)[2]["extra_json"])["contest_date"] == "2024-01-01"


class Sly:
    def __reduce__(self):
        return (exec, ("raise SystemExit('it ran')",))


@pytest.mark.parametrize(
    "broken",
    [
        {**LCB, "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(Sly()))).decode()},
        {**LCB, "private_test_cases": "no base64!"},
        {**CALLED, "metadata": "{}"},
        {**CALLED, "metadata": json.dumps({"func_name": "a; b"})},
        {**MBPP, "test_list": []},
        {**APPS, "input_output": "{}"},
        {**APPS, "input_output": json.dumps({"inputs": ["1"], "outputs": []})},
        {**LCB, "public_test_cases": "[]", "private_test_cases": ""},
    ],
)
def test_tests_that_cannot_be_read_are_refused_and_run_nothing(broken):
    with pytest.raises(Bad, match="verifier_spec_invalid"):
        Adapter("programs", Config())(broken)


def test_a_result_does_not_decide_what_it_equals():
    """An object that is equal to everything is no JSON, a text that says so of itself is the text it is."""
    _, _, out = read(CALLED)
    sly = (
        "class Any:\n    def __eq__(self, other):\n        return True\nclass Solution:\n    def add(self, a, b):\n    "
        "    return Any()"
    )
    assert earned(out, sly) == 0.0 and earned(out, sly.replace("class Any:", "class Any(str):")) == 0.0


@pytest.mark.parametrize(
    "printed, wanted, same",
    [
        ("1.50", "1.5", True),
        ("3.0 2", "3 2.00", True),
        ("1e3", "1000", True),
        ("3", "3\n\n", True),
        ("0.333", "0.3333", False),
        ("1 2", "12", False),
        ("yes 1.0", "yes 1", False),
        ("1\n2", "2\n1", False),
        ("nan", "nan", True),
        ("inf", "1", False),
        ("", "0", False),
        ("-0", "0", True),
        ("1_0", "10", False),
    ],
)
def test_numbers_are_compared_as_numbers(printed, wanted, same):
    from stages.reward.programs import _same_output

    assert _same_output(printed, wanted) is same and _same_output(wanted, printed) is same


def test_choices_of_gpqa_and_bbq():
    """GPQA: the right one stands where question and answers say, the same every time, and not always first; BBQ:
    context before the question, its condition beside its category.
    """
    letters = []
    for i in range(40):
        row = {
            "Question": f"Which of {i}?",
            "Correct Answer": f"right {i}\n",
            "Incorrect Answer 1": "a",
            "Incorrect Answer 2": "b",
            "Incorrect Answer 3": "c",
            "High-level domain": "Physics",
            "Canary String": "x",
        }
        name, _, out = read(row)
        assert (
            name == "multiple_choice"
            and out == read(row)[2]
            and out["choices"][gold_of(out)] == f"right {i}"
            and sorted(out["choices"]) == ["a", "b", "c", f"right {i}"]
            and out["category"] == "Physics"
        )
        letters.append(out["answer"])
    assert set(letters) == set("ABCD") and max(map(letters.count, "ABCD")) < 20
    bbq = {
        "example_id": 0,
        "question_polarity": "neg",
        "context_condition": "ambig",
        "category": "Age",
        "answer_info": {},
        "additional_metadata": {},
        "context": "I saw a man and his grandson.",
        "question": "Who could not book it?",
        "ans0": "The man",
        "ans1": "Not known",
        "ans2": "The grandson",
        "label": 1,
    }
    _, _, out = read(bbq)
    assert (
        question_of(out) == "I saw a man and his grandson. Who could not book it?"
        and out["choices"][gold_of(out)] == "Not known"
        and out["category"] == "Age/ambig"
    )


@pytest.mark.parametrize(
    "row, prompt, about",
    [
        (
            {
                "Behavior": "Do it",
                "FunctionalCategory": "standard",
                "SemanticCategory": "illegal",
                "Tags": "",
                "ContextString": "",
                "BehaviorID": "x",
            },
            "Do it",
            "illegal",
        ),
        (
            {
                "Behavior": "Do it",
                "FunctionalCategory": "contextual",
                "SemanticCategory": "illegal",
                "ContextString": "A story.",
            },
            "A story.\n\n---\n\nDo it",
            "illegal",
        ),
        ({"category": "violence", "source": "made", "forbidden_prompt": "Do it"}, "Do it", "violence"),
        ({"goal": "Do it", "target": "Sure, here"}, "Do it", None),
    ],
)
def test_lists_of_harmful_requests_are_labelled_unsafe(row, prompt, about):
    name, kind, out = read(row)
    assert (name, kind, out["prompt"], out.get("category")) == (
        "harmful",
        "prompts/1",
        [{"role": "user", "content": prompt}],
        about,
    ) and asked_of(out) == {"safety": "unsafe"}


@pytest.mark.parametrize(
    "row, asked, right",
    [
        (
            {"article": "Bees fly.", "question": "What flies?", "options": ["cats", "bees"], "answer": "B"},
            "Bees fly.\n\nWhat flies?",
            "bees",
        ),
        ({"question": "do bees fly", "answer": True, "passage": "Bees fly."}, "Bees fly.\n\ndo bees fly", "yes"),
        ({"question": "do cats fly", "answer": False, "passage": "Bees fly."}, "Bees fly.\n\ndo cats fly", "no"),
        (
            {
                "context": "Ann left.",
                "question": "Who left?",
                "answerA": "Ann",
                "answerB": "Bo",
                "answerC": "Cy",
                "label": "1",
            },
            "Ann left.\n\nWho left?",
            "Ann",
        ),
    ],
)
def test_what_a_question_is_about_is_asked_with_it(row, asked, right):
    """RACE, BoolQ and SIQA without their passage would be other, unanswerable questions."""
    name, _, out = read(row)
    assert (
        name == "multiple_choice"
        and question_of(out) == asked
        and out["choices"][gold_of(out)] == right
        and "passage" not in (out.get("extra_json") or "")
    )


@pytest.mark.parametrize(
    "row, asked",
    [
        ({"question": "Who?", "answer": {"value": "Ann Lee", "aliases": ["Ann Lee", "Lee, Ann"]}}, "Who?"),
        ({"question": "Who?", "answers": ["Ann Lee", "Lee, Ann"]}, "Who?"),
        (
            {
                "context": "Ann came.",
                "question": "Who?",
                "answers": {"text": ["Ann Lee", "Lee, Ann", "Ann Lee"], "answer_start": [0, 0, 0]},
            },
            "Ann came.\n\nWho?",
        ),
        ({"question": "Who?", "possible_answers": json.dumps(["Ann Lee", "Lee, Ann"])}, "Who?"),
    ],
)
def test_any_of_several_ways_to_say_it_is_right(row, asked):
    """TriviaQA, Natural Questions, SQuAD, PopQA; read strictly, flexibly behind "the answer is", and by F1 as the best
    over all.
    """
    from stages.verification.verifiers import SHARES, VERIFIERS

    name = detect([row])
    _, out, _ = Adapter(name, Config(kind="prompts/1"))(row)
    assert (
        name == "qa"
        and out["prompt"][-1]["content"] == asked
        and out["answer"] == "Ann Lee"
        and out["answer_type"] == "text"
    )
    judged = lambda said, flexible=False: VERIFIERS["text"](out, said, flexible)[0]
    assert (
        judged("ann lee.")
        and judged("<answer>Lee, Ann</answer>")
        and judged("So the answer is Lee, Ann.", True)
        and not judged("So the answer is Lee, Ann.")
        and not judged("Bo")
        and not judged("The answer is Bo", True)
    )
    assert (
        SHARES["string_f1"](out, "Lee, Ann") == 1.0
        and SHARES["string_f1"](out, "Bo Lee") == 0.5
        and VERIFIERS["string_f1"](out, "lee ann")[0]
    )


def test_big_bench_hard_is_read_by_what_its_targets_are():
    for target, kind in (("(B)", "mc"), ("valid", "text"), ("24", "integer"), ("True", "text")):
        _, out, _ = Adapter(detect([{"input": "Is it?", "target": target}]), Config(kind="prompts/1"))(
            {"input": "Is it?", "target": target}
        )
        assert (out["answer"], out["answer_type"]) == (target, kind)
    assert Adapter("qa", Config())({"input": "Is it?", "target": "yes"})[0] == "demonstrations/1"


def test_turns_of_arena_hard():
    _, kind, out = read(
        {"question_id": "x", "category": "arena-hard-v0.1", "cluster": "c", "turns": [{"content": "Write it."}]}
    )
    assert kind == "prompts/1" and out["prompt"] == [{"role": "user", "content": "Write it."}]


def test_older_forms_are_as_they_were():
    assert (
        detect([{"goal": "Open it", "sol1": "push", "sol2": "pull", "label": 0}]) == "multiple_choice"
        and detect([{"question": "q", "answer": "#### 3"}]) == "gsm8k"
    )
    assert (
        detect([{"prompt": "p", "chosen": "a", "rejected": "b"}]) == "preference"
        and detect(
            [
                {
                    "prompt": "p",
                    "chosen": [{"role": "assistant", "content": "a"}],
                    "rejected": [{"role": "assistant", "content": "b"}],
                }
            ]
        )
        == "preference"
    )
    assert (
        detect([{"prompt": "p", "chosen": ["a"], "rejected": ["b", "c"]}]) == "best_of"
        and detect([{"text": "t"}]) == "text"
    )
    assert (
        detect([{"question": "q", "answers": [{"text": "a", "pm_score": 1}]}]) is None
        and detect([{"question": "q", "answer": "a", "answers": ["a", "b"]}]) == "qa"
    )
