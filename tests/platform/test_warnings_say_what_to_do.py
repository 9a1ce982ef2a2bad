"""Every warning of a stage ends with what to do: read off the code, so that one that no test sets off is held to it, too.

A text is every way in which its conditional parts can come out; what is put in while it runs stands as ``…``. One of its
last two sentences has to hold a clause that begins with an imperative of :data:`DO`, at the clause's very start or
behind a condition (``Where ..., write``). Where there is nothing to do, a stage logs a line and does not warn.
"""

import ast
import itertools
import re

import pytest

from stages.policy.alarms import ALARMS
from stages.spec import PROJECT_ROOT

DO = (
    "add allow ask balance call check choose clip compare decide drop evaluate export give group hold ingest install keep leave"
    " look lower make mend merge mix name put raise read rename repair restore revise run sample say set show start stop"
    " store take train update use watch widen write"
).split()
#: Clauses end with these; a condition before the imperative ends with a comma.
ACTION = re.compile(
    r"(?:^|[.:;?]\s+)(?:(?:where|if|when|unless|for|to)\b[^.:;]*,\s+)?(?:then\s+)?(" + "|".join(DO) + r")\b",
    re.IGNORECASE,
)
#: Warnings whose text another function makes: (file, function, whether it appends or returns them).
MADE_BY = {
    "align_settings": [
        ("stages/align.py", "data_warnings", "append"),
        ("stages/direct/combinations.py", "validate_direct", "return"),
    ],
    "rl_settings": [
        ("stages/policy/presets.py", "warned", "append"),
        ("stages/policy/combinations.py", "_warnings", "append"),
    ],
    "step_weights": [("stages/acting/agent_rewards.py", "check_step_weights", "return")],
    "agreement": [("stages/ingestion/agreement.py", "warnings", "return")],
    "bias": [("stages/ingestion/curation.py", "warnings", "append")],
    "answers_given": [("stages/evaluation/protocol.py", "told_of_given", "return")],
    "memory": [("stages/models/memory.py", "refusal", "return")],
    "gpu_unusable": [("stages/running/cuda.py", "unusable", "return")],
}
#: Warnings that are texts of ALARMS, of stages.validation_alarms or told again from a file.
ELSEWHERE = {
    ("stages/rollouts/source.py", "watch"),
    ("stages/validation_alarms.py", "told"),
    ("stages/candidates/report.py", "tier_agreement"),
    ("stages/running/blocks.py", "in_blocks"),
}


def says_what_to_do(text: str) -> bool:
    return bool(ACTION.search(" ".join(re.split(r"(?<=[.?!])\s+", text.strip())[-2:])))


def variants(node, known: dict[str, str]) -> list[str]:
    """The texts that an expression can be; ``…`` for what is not written in it or in a constant of its module."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.Name) and node.id in known:
        return [known[node.id]]
    if isinstance(node, ast.JoinedStr):
        return ["".join(parts) for parts in itertools.product(*(variants(part, known) for part in node.values))]
    if isinstance(node, ast.FormattedValue):
        return variants(node.value, known)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [a + b for a in variants(node.left, known) for b in variants(node.right, known)]
    if isinstance(node, ast.IfExp):
        return [*variants(node.body, known), *variants(node.orelse, known)]
    return ["…"]


def read(path: str) -> tuple[ast.Module, dict[str, str]]:
    """(module, its constants that are texts)."""
    tree = ast.parse((PROJECT_ROOT / path).read_text(encoding="utf-8"))
    return tree, {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def functions(tree):
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def warned():
    """(file, function, code, texts) of every ``stage.warn(code, text)``."""
    for path in sorted(str(p.relative_to(PROJECT_ROOT)) for p in PROJECT_ROOT.glob("stages/**/*.py")):
        tree, known = read(path)
        owner = {}
        for function in functions(tree):  # outer ones come first
            owner |= {id(node): function.name for node in ast.walk(function)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "warn":
                if ast.unparse(node.func.value) in ("stage", "self.stage", "self._stage", "self"):
                    code = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
                    yield path, owner[id(node)], code, variants(node.args[1], known) if len(node.args) > 1 else ["…"]


def made(path: str, function: str, how: str) -> list[str]:
    """The texts that a function appends (``append``) or returns."""
    tree, known = read(path)
    found = []
    for node in (n for f in functions(tree) if f.name == function for n in ast.walk(f)):
        if how == "append" and isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "append":
            found.append(node.args[0])
        elif how == "return" and isinstance(node, ast.Return):
            found.append(node.value)
    texts = []
    while found:
        node = found.pop()
        if isinstance(node, ast.List):
            found += node.elts
        elif isinstance(node, ast.ListComp):
            found.append(node.elt)
        elif isinstance(node, ast.IfExp) and isinstance(node.body, ast.List):
            found += [node.body, node.orelse]
        else:
            texts += variants(node, known)
    return [text for text in texts if text not in ("", "…")]


SITES = list(warned())


def test_the_warnings_are_found():
    assert len(SITES) > 150 and len({code for _, _, code, _ in SITES}) > 130


@pytest.mark.parametrize("path", sorted({path for path, *_ in SITES}))
def test_every_warning_says_what_to_do(path):
    silent = []
    for place, function, code, texts in SITES:
        if place != path or (place, function) in ELSEWHERE:
            continue
        if code in MADE_BY and all(text.endswith("…") for text in texts):
            texts = [text for source in MADE_BY[code] for text in made(*source)]
            assert texts, f"{code}: nothing is made by {MADE_BY[code]}"
        silent += [f"{function} [{code}] {text}" for text in texts if not says_what_to_do(text)]
    assert not silent, "end these with a sentence such as 'Write ...', or log a line instead:\n" + "\n".join(silent)


def test_alarms_say_what_to_do():
    from stages import align, validation_alarms

    texts = {name: alarm.text for name, alarm in ALARMS.items()}
    texts |= dict([align.DISPLACED, align.OVERFIT, validation_alarms.RISING])
    assert not [f"{name}: {text}" for name, text in texts.items() if not says_what_to_do(text)]


def test_what_counts_as_saying_it():
    for text in (
        "It is bad. Write x=1.",
        "It is bad: raise beta.",
        "It is bad; where memory allows, write x=1, or x=2. Rewards are not changed by this.",
    ):
        assert says_what_to_do(text), text
    for text in (
        "It is bad.",
        "Write x=1. It is bad. It is so.",
        "They take x and read y.",
        "The first reason: …",
        "…",
    ):
        assert not says_what_to_do(text), text
