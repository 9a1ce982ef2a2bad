"""What a protocol holds of the code that grades: an edit that may change a verdict is another protocol, any other edit
leaves evaluations comparable."""

import json
import shutil

import pytest

from stages.evaluate import Config
from stages.evaluation import grader_code
from stages.evaluation.protocol import ProtocolError, grader_version, require_same
from stages.spec import PROJECT_ROOT

EVALUATIONS = {
    "gsm8k": (Config(), [{"answer": "4", "answer_type": "integer"}]),
    "text": (Config(), [{"answer": "Paris", "answer_type": "text"}]),
    "ifeval": (Config(rewards=[{"kind": "constraints"}]), [{"constraints": [{"id": "x"}]}]),
    "humaneval": (Config(rewards=[{"kind": "code"}]), [{"tests": "assert f()"}]),
    "majority": (Config(rewards=[{"kind": "majority"}]), [{"answer": None}]),
    "symbolic": (
        Config(rewards=[{"kind": "verifier", "symbolic": True}]),
        [{"answer": "4", "answer_type": "latex", "extra_json": json.dumps({"verifier": "math"})}],
    ),
    "judge": (Config(rewards=[{"kind": "judge", "endpoint": "http://h/v1", "endpoint_model": "m"}]), [{}]),
    "rubric": (Config(rewards=[{"kind": "rubric"}]), [{}]),  # whose items may be of any kind
    "refusals": (Config(), [{"category": "safe"}]),
    "refusal_judge": (
        Config(refusal_judge={"endpoint": "http://h/v1", "endpoint_model": "m"}),
        [{"category": "unsafe"}],
    ),
    "mt_bench": (Config(mt_bench={"endpoint": "http://h/v1", "endpoint_model": "m"}), [{}]),
}
ALL = set(EVALUATIONS) - {"mt_bench"}  # a judge's ratings pass through no reward component


def versions() -> dict:
    return {name: grader_version(*one) for name, one in EVALUATIONS.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkout's sources, and what they give."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(PROJECT_ROOT / "stages", root / "stages", ignore=shutil.ignore_patterns("__pycache__"))
    return root, versions()


@pytest.fixture
def edited(whole, monkeypatch):
    """``edited(file, old, new)``: the evaluations whose version the edit changes, and their versions."""
    root, before = whole
    undo = []

    def file_of(name):
        base = root.joinpath(*name.split("."))
        return next((one for one in (base.with_suffix(".py"), base / "__init__.py") if one.is_file()), None)

    def edit(file, old, new):
        path = root / "stages" / file
        text = path.read_text()
        undo.append((path, text))
        assert old in text, "the edit is of nothing"
        path.write_text(text.replace(old, new, 1))
        after = versions()
        return {name for name in EVALUATIONS if before[name] != after[name]}, after

    monkeypatch.setattr(grader_code, "module_file", file_of)
    yield edit
    for path, text in undo:
        path.write_text(text)


@pytest.mark.parametrize(
    "file, old, new, changes",
    [
        # what decides a verdict
        ("verification/plain_numbers.py", "NO_UNIT = re.compile(", "NO_UNIT = re.compile('x' or ", {"gsm8k", "symbolic", "majority", "rubric"}),
        ("verification/responses.py", "\ndef view(", "\nX = 1\n\n\ndef view(", set()),
        ("verification/responses.py", "    if which == \"full\":", "    if which in (\"full\", 0):", ALL | {"mt_bench"}),
        ("verification/ifeval.py", "def sentences_of(text: str) -> list[str]:", "def sentences_of(text, n=1):", {"ifeval", "rubric"}),
        ("running/sandbox.py", 'handlers = {"begin"', 'handlers = {"end": 0, "begin"', {"humaneval", "symbolic", "rubric"}),
        ("running/tested.py", "globals locals", "globals", {"humaneval", "symbolic", "rubric"}),
        ("verification/verifiers.py", 'extract_number(text, flexible, gold) if number', 'extract_number(text, True, gold) if number', {"gsm8k", "symbolic", "rubric"}),
        ("verification/verifiers.py", '    "text": verify_text,', '    "text": verify_math,', {"rubric"}),  # elsewhere the function itself is named
        ("reward/components.py", "CUT_REWARD = -1.0", "CUT_REWARD = -2.0", ALL),
        ("reward/rewards.py", "scale = (kept + dropped) / kept", "scale = kept / kept", ALL),
        ("reward/judge.py", "class Judge(", "class Judge(object, ", {"judge", "rubric"}),
        ("reward/judge.py", "def until_read(", "def until_read(*, ", {"judge", "mt_bench", "refusal_judge", "rubric"}),
        ("evaluation/refusals.py", "if not any(refusing):", "if not all(refusing):", {"refusals"}),
        ("evaluation/refusals.py", '"i must decline"', '"i do decline"', {"refusals"}),
        ("evaluation/refusals.py", "found.pop() if len(found) == 1", "found.pop() if len(found) == 2", {"refusal_judge"}),
        ("evaluation/refusals.py", "It refuses in full if", "It refuses if", {"refusal_judge"}),
        ("evaluation/refusals.py", '"harmful": "unsafe"', '"harmful": "safe"', {"refusals", "refusal_judge"}),
        ("reward/programs.py", "def score_regex(", "def score_regex(*, ", {"rubric"}),
        # what does not
        ("verification/extraction.py", '"""', '"""Another word. ', set()),
        ("running/sandbox.py", "import atexit", "import atexit  # a comment", set()),
        ("verification/verifiers.py", "is no number although its verifier is gsm8k", "is no number, but its verifier is gsm8k", set()),
        ("reward/components.py", 'description="', 'description="In other words: ', set()),
        ("reward/rewards.py", "rewards is empty; write", "there are no rewards; write", set()),
        ("reward/rewards.py", "def inputs_read(", "def inputs_that_are_read(", set()),
        ("decoding/sampler.py", "import", "import sys\nimport", set()),
    ],
)  # fmt: skip
def test_an_edit_changes_the_protocols_that_it_may_decide(edited, file, old, new, changes):
    assert edited(file, old, new)[0] == changes


def test_the_refusal_names_the_code_that_changed(whole, edited):
    _, after = edited("verification/extraction.py", "def extract_number(text", "def extract_number(TEXT")
    before, after = ({"prompts": "p", "grader_version": one["gsm8k"]} for one in (whole[1], after))
    with pytest.raises(ProtocolError, match=r"\(the code that grades, in stages\.verification\.extraction\)"):
        require_same({"old": before, "new": after})


def test_every_kind_of_component_has_a_beginning():
    """A definition that was renamed is told of, and no kind is graded by code that a protocol does not hold."""
    from stages.evaluation.protocol import GRADING, OF_KINDS
    from stages.reward.scorers import RULES

    for name in (*GRADING, *(one for several in OF_KINDS.values() for one in several)):
        assert grader_code.reached([name])
    for function in RULES.values():
        assert f"{function.__module__}:{function.__name__}" in grader_code.reached(["stages.reward.scorers:RULES"])
    with pytest.raises(ValueError, match="defined nowhere"):
        grader_code.reached(["stages.reward.scorers:_gone"])


def test_digests_are_those_of_every_python():
    """Fields of syntax trees that a version of Python adds do not count; names, constants and structure do."""
    import ast

    told = lambda text: grader_code._told(ast.parse(text))
    assert told("def f(a): return a") == told("def f(a):\n    return (a)  # same") and "type_params" not in told(
        "def f(): 0"
    )
    assert told("x = 1") != told("x = 1.0") != told("y = 1.0")
