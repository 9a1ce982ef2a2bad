"""Reward functions as people write them: arguments by signature (TRL, verl), dicts with metrics, groups, async; all in
the sandbox.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from stages.generation import Sample
from stages.reward.components import RewardComponent
from stages.reward.rewards import Rewards
from stages.rollouts.metrics import rollout_metrics

PROMPT = [{"role": "user", "content": "2 + 2?"}]


def row(text="4", *, answer="4", prompt="a", finish="eos", extra=None, **columns):
    return {
        "prompt_row": {
            "row_id": prompt,
            "prompt": PROMPT,
            "answer": answer,
            "source": "quiz",
            "category": "sums",
            **columns,
            "extra_json": None if extra is None else json.dumps(extra),
        },
        "completion_text": text,
        "completion_ids": [5, 6, 7],
        "finish_reason": finish,
    }


def scored(source, *rows, **settings):
    return Rewards([RewardComponent(kind="python", name="mine", source=source, **settings)], {}, None).score(list(rows))


@pytest.mark.parametrize(
    "head, value",
    [
        ("score(prompt, completion, answer)", "[prompt[0]['content'], completion, answer]"),
        ("score(p, c, a)", "[p[0]['content'], c, a]"),
        ("score(p, c, a, more=7)", "[p[0]['content'], c, a] if more == 7 else []"),
        ("score(*given)", "[given[0][0]['content'], *given[1:]]"),
        ("score(question, completion, gold, /)", "[question[0]['content'], completion, gold]"),
        ("score(answer, messages, completion)", "[messages[0]['content'], completion, answer]"),
        ("score(completion, row)", "[row['prompt'][0]['content'], completion, row['answer']]"),
        (
            "score(completion, *, level, prompt, answer)",
            "[prompt[0]['content'], completion, answer] if level == 3 else []",
        ),
        (
            "score(p, c, a, row)",
            "[p[0]['content'], c, a] if row['metadata']['level'] == 3 and row['category'] == 'sums' else []",
        ),
        (
            "score(completion, **columns)",
            (
                "[columns['prompt'][0]['content'], completion, columns['answer']] if columns['level'] == 3 and"
                " columns['category'] == 'sums' else []"
            ),
        ),
        (
            "score(completion_ids, finish_reason, prompt, answer)",
            "[prompt[0]['content'], '4', answer] if (completion_ids, finish_reason) == ([5, 6, 7], 'eos') else []",
        ),
        (
            "compute_score(data_source, solution_str, ground_truth, extra_info)",
            "['2 + 2?', solution_str, ground_truth] if (data_source, extra_info) == ('quiz', {'level': 3}) else []",
        ),
        (
            "compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)",
            "['2 + 2?', solution_str, ground_truth] if extra_info['level'] == 3 else []",
        ),
        ("score(question, solution_str, ground_truth)", "[question[0]['content'], solution_str, ground_truth]"),
    ],
)
def test_a_function_gets_what_its_signature_asks_for(head, value):
    """By name where it uses the names, in TRL's and verl's way too; by place where it has names of its own, as ever."""
    (one,) = scored(f"def {head}:\n    return ({value}) == ['2 + 2?', '4', '4']", row(extra={"level": 3}))
    assert one.reasons == {} and one.total == 1.0 and one.correct is True


def test_what_cannot_be_given_is_said():
    (one,) = scored("def score(completion, difficulty): return 1", row())
    assert (
        one.total is None and "asks for 'difficulty'" in one.reasons["mine"] and "completion_ids" in one.reasons["mine"]
    )
    (one,) = scored("def score(completion, *, row, missing=2): return missing", row())
    assert one.total == 2.0
    (wrapped,) = scored(
        "def timed(f):\n    def inner(*a, **k):\n        return f(*a, **k)\n    return inner\n@timed\ndef score(prompt,"
        " completion, answer):\n    return completion == answer",
        row(),
    )
    assert wrapped.total == 1.0, "a wrapper that hides the parameters gets the three by place"
    for wrong in ("def evaluate(a): return 1", "scores = 1"):
        with pytest.raises(ValueError, match="with a function score"):
            RewardComponent(kind="python", source=wrong)


@pytest.mark.parametrize(
    "value, total, correct, metrics",
    [
        (
            "{'reward': 0.5, 'steps': 3, 'tidy': True, 'said': 'x', 'none': None}",
            0.5,
            None,
            {"steps": 3.0, "tidy": 1.0},
        ),
        ("{'score': 1.0, 'acc': True, 'pred': '4'}", 1.0, True, {"acc": 1.0}),
        ("{'reward': True}", 1.0, True, {}),
        ("{'reward': None, 'steps': 3}", None, None, {}),
        ("{'reward': 1, 'gap': float('inf')}", 1.0, None, {}),
        ("__import__('numpy').float32(0.25)", 0.25, None, {}),
        (
            "{'reward': __import__('numpy').int64(2), 'x': __import__('fractions').Fraction(1, 4)}",
            2.0,
            None,
            {"x": 0.25},
        ),
    ],
)
def test_a_dict_is_a_reward_and_its_metrics(value, total, correct, metrics):
    (one,) = scored(f"def score(prompt, completion, answer): return {value}", row())
    assert (
        one.total == total
        and one.correct is correct
        and one.parts == {"mine": total, **{f"mine/{name}": number for name, number in metrics.items()}}
    )


@pytest.mark.parametrize(
    "value, why",
    [
        ("{'steps': 1}", "has no reward"),
        ("{'reward': 1, 'std': 2}", "called 'std'"),
        ("{'reward': 1, 'a/b': 2}", "slash"),
        ("{'reward': float('nan')}", "no finite number"),
    ],
)
def test_a_dict_that_cannot_be_read_is_unscorable(value, why):
    (one,) = scored(f"def score(prompt, completion, answer): return {value}", row())
    assert one.total is None and why in one.reasons["mine"] and one.parts == {"mine": None}


def test_metrics_are_means_over_the_rows_that_have_them():
    """The denominator is the number of scored answers that say it: not the unscorable ones, and not those that are
    silent about it.
    """
    source = (
        "def score(prompt, completion, answer):\n    n = len(completion)\n    return None if n == 1 else {'reward': n,"
        " 'steps': 10 * n} | ({'odd': n} if n % 2 else {})"
    )
    samples = []
    for i, text in enumerate(("a", "bb", "ccc", "dddd", "eeeee")):
        (one,) = scored(source, row(text))
        samples.append(
            Sample(
                prompt=row()["prompt_row"],
                prompt_ids=[1],
                index=i,
                ids=[5] * len(text),
                logps=[0.0] * len(text),
                finish_reason="eos",
                text=text,
            )
        )
        samples[-1].parts, samples[-1].reasons, samples[-1].total = (
            one.parts,
            one.reasons,
            math.nan if one.total is None else one.total,
        )
    found = rollout_metrics(samples, np.array([s.total for s in samples]), np.zeros(5, int))
    assert (
        found["reward/mine"] == 3.5
        and found["reward/mine/steps"] == 35.0
        and found["reward/mine/odd"] == 4.0
        and found["reward/mine/unscorable_fraction"] == 0.2
    )
    together = scored(source, *(row(text) for text in ("bb", "ccc", "a")))
    assert [one.parts for one in together] == [
        {"mine": 2.0, "mine/steps": 20.0, "mine/odd": None},
        {"mine": 3.0, "mine/steps": 30.0, "mine/odd": 3.0},
        {"mine": None, "mine/steps": None, "mine/odd": None},
    ]


GROUP = """
def score(prompts, completions, answer, level, rows):
    if "hang" in completions:
        while True: pass
    if "few" in completions:
        return [1.0]
    assert len(prompts) == len(answer) == len(level) == len(rows) == len(completions) and rows[0]["answer"] == answer[0]
    best = max(map(len, completions))
    return [{"reward": float(len(c) == best), "size": len(completions), "level": l} if c else None for c, l in zip(completions, level)]
"""


def test_a_group_is_scored_at_once_and_a_hang_costs_its_own():
    rows = [
        row("aa", prompt="a", extra={"level": 1}),
        row("b", prompt="b", extra={"level": 2}),
        row("a", prompt="a", extra={"level": 1}),
        row("", prompt="b", extra={"level": 2}),
        row("hang", prompt="c"),
        row("x", prompt="c"),
        row("few", prompt="d"),
        row("y", prompt="d"),
    ]
    found = scored(GROUP, *rows, scope="group", timeout_s=2.0)
    assert [one.total for one in found] == [1.0, 1.0, 0.0, None, None, None, None, None]
    assert (
        found[0].parts == {"mine": 1.0, "mine/size": 2.0, "mine/level": 1.0}
        and found[3].reasons["mine"] == "no value (None)"
    )
    assert "asks for 'level'" in found[4].reasons["mine"], "rows without the column"
    found = scored(
        GROUP, *(dict(one, prompt_row={**one["prompt_row"], "level": 1}) for one in rows), scope="group", timeout_s=2.0
    )
    assert [one.total for one in found] == [1.0, 1.0, 0.0, None, None, None, None, None]
    assert [one.reasons["mine"][:7] for one in found[4:]] == [
        "timeout",
        "timeout",
        "score()",
        "score()",
    ] and "1 values" in found[6].reasons["mine"]
    by_draw = scored(
        "def score(prompt, completion, answer): return [len(completion)] * len(completion)",
        *({**row(), "group": g} for g in (0, 0, 1)),
        scope="group",
    )
    assert [one.total for one in by_draw] == [2.0, 2.0, 1.0], "two draws of a prompt are two groups"
    for wrong, text in (
        ({"kind": "verifier", "scope": "group"}, "scope is for kind python"),
        ({"kind": "python", "source": GROUP, "scope": "group", "tier": "judge"}, "write scope=row"),
    ):
        with pytest.raises(ValueError, match=text):
            RewardComponent(**wrong)


ASYNC = """
import asyncio
async def one(text):
    await asyncio.sleep(0.01)
    return len(text)
async def score(completions, answers):
    found = await asyncio.gather(*map(one, completions))
    more = await asyncio.to_thread(sum, found)
    if "raise" in completions:
        raise ValueError("no idea")
    if "hang" in completions:
        await asyncio.sleep(1000)
    return [n / more for n in found]
"""


def test_an_async_function_is_awaited_in_the_sandbox():
    found = scored(
        ASYNC,
        row("a"),
        row("bbb"),
        row("raise", prompt="b"),
        row("hang", prompt="c"),
        row("c", prompt="d"),
        scope="group",
        timeout_s=3.0,
    )
    assert [one.total for one in found] == [0.25, 0.75, None, None, 1.0]
    assert "no idea" in found[2].reasons["mine"] and found[3].reasons["mine"].startswith("timeout")
    (one,) = scored("async def score(prompt, completion, answer): return {'reward': 1, 'x': 2}", row())
    assert one.parts == {"mine": 1.0, "mine/x": 2.0}
    (one,) = scored(
        "import asyncio, socket\nasync def score(prompt, completion, answer):\n    await"
        " asyncio.open_connection('127.0.0.1', 9)",
        row(),
    )
    assert one.total is None and "network" in one.reasons["mine"] or "refuses" in one.reasons["mine"]


def test_imports_take_no_time_from_the_first_answer(tmp_path):
    """A library that takes longer to import than one call may take (torch, in its time) is imported once, and not begun
    again after every time-out.
    """
    (tmp_path / "slow_library.py").write_text("import time\ntime.sleep(2)\nVALUE = 0.5\n")
    source = (
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport slow_library\ndef score(prompt, completion,"
        " answer):\n    return slow_library.VALUE\n"
    )
    from stages.running.sandbox import Limits, run_jobs, scoring

    given = {"prompt": "p", "completion": "c", "answer": "a"}
    found = run_jobs([scoring(source, given, {})] * 3, Limits(timeout_s=1.0, workers=1, files=(str(tmp_path),)))
    assert [one.value for one in found] == [0.5] * 3
    wrong = run_jobs(
        [scoring("import no_such_library\ndef score(p, c, a):\n    return 1\n", given, {})] * 2, Limits(workers=1)
    )
    assert all("no_such_library" in one.error for one in wrong)


def test_a_function_that_is_none_is_told_before_anything_runs(tmp_path):
    from pydantic import ValidationError

    from stages.reward.components import RewardComponent

    (tmp_path / "trl.py").write_text("def reward_len(completions, **kwargs):\n    return [1.0 for _ in completions]\n")
    with pytest.raises(
        ValidationError, match="this one defines reward_len. Write function: reward_len; one of TRL's.*scope: group"
    ):
        RewardComponent(kind="python", source=str(tmp_path / "trl.py"))
    with pytest.raises(ValidationError, match=r"no Python: expected ':', line 1"):
        RewardComponent(kind="python", source="def score(prompt, completion, answer)\n    return 1\n")


def test_a_file_may_define_several_functions_that_score(tmp_path):
    from pydantic import ValidationError

    (tmp_path / "rewards.py").write_text(
        "def right(completions, answer, **kwargs):\n    return [2.0 * (c == a) for c, a in zip(completions, answer)]\n"
        "def short(completions, **kwargs):\n    return [float(len(c)) for c in completions]\n"
        "def score(completion):\n    return 7.0\n"
    )
    source = str(tmp_path / "rewards.py")
    several = [
        RewardComponent(kind="python", source=source, function="right", scope="group"),
        RewardComponent(kind="python", source=source, function="short", scope="group", weight=0.1),
        RewardComponent(kind="python", source=source),
    ]
    again = [RewardComponent.model_validate(one.model_dump()) for one in several]  # as a record keeps them
    assert again == several and [one.name for one in several] == ["right", "short", "python"]
    found = Rewards(again, {}, None).score([row("4"), row("55")])
    assert [list(one.parts.values()) for one in found] == [[2, 1, 7], [0, 2, 7]]
    with pytest.raises(
        ValidationError, match=r"with a function wrong\(.*this one defines right, short, score. Write fun"
    ):
        RewardComponent(kind="python", source=source, function="wrong")


def test_a_function_for_groups_is_told_how_it_is_called():
    from stages.running.sandbox import run_jobs, scoring

    (found,) = run_jobs(
        [
            scoring(
                "def score(completions, **kwargs):\n    return [1.0]\n",
                {"prompt": "p", "completion": "c", "answer": "a"},
                {},
            )
        ]
    )
    assert "scope: group" in found.error


@pytest.mark.parametrize(
    "source, settings",
    [
        (
            (
                "def score(completions, **kwargs):\n    return [1.0 if '4' in c[0]['content'] else 0.0 for c in"
                " completions]"
            ),
            {"scope": "group"},
        ),
        ("def score(completion):\n    return len(completion[0]['content'])", {}),
        (
            "def score(completions, **kwargs):\n    return [len(c[-1].get('content')) for c in completions]",
            {"scope": "group"},
        ),
    ],
)
def test_a_completion_read_as_messages_is_told_that_it_is_a_text(source, settings):
    """TRL gives conversational data's completions as lists of messages."""
    (one,) = scored(source, row(), **settings)
    assert (
        one.total is None
        and "a completion is its text here" in one.reasons["mine"]
        and "as_messages: true" in one.reasons["mine"]
    )
    (told,) = scored(source.replace("{}", "text"), row(), as_messages=True, **settings)
    assert told.total == 1.0, told.reasons
    (other,) = scored("def score(completion):\n    return {}['content']", row())
    assert "its text" not in other.reasons["mine"], "another mistake has its own message"


def test_what_a_group_function_catches_has_the_plural_names_too():
    (one,) = scored(
        "def score(completions, **kwargs):\n    return [len(kwargs['prompts']) + len(kwargs['prompts'][0]) + 10 *"
        " (kwargs['completion_ids'][0] == [5, 6, 7])]",
        row(),
        scope="group",
    )
    assert one.total == 12.0, one.reasons


@pytest.mark.parametrize(
    "head",
    [
        "score(prompt, completion, difficulty)",
        "score(question, reply, target_length)",
        "score(prompts, completions, difficulty)",
    ],
)
def test_a_column_that_the_data_lacks_is_not_given_the_answer(head):
    """A third parameter is the answer where its name says so or says nothing; otherwise it is a column, and one that is
    missing is named.
    """
    group = {"scope": "group"} if "prompts" in head else {}
    (one,) = scored(f"def {head}: return [1.0]" if group else f"def {head}: return 1.0", row(), **group)
    third = head.rstrip(")").rsplit(" ", 1)[1]
    assert (
        one.total is None and f"asks for {third!r}" in one.reasons["mine"] and "is called answer" in one.reasons["mine"]
    )
    (there,) = scored(f"def score(question, reply, {third}): return {third}", row(extra={third: 0.25}))
    assert there.total == 0.25, "a column beside two names of one's own is taken by name"
    (default,) = scored(f"def score(question, reply, {third}=0.5): return {third}", row())
    assert default.total == 0.5


@pytest.mark.parametrize(
    "third", ["a", "gold", "gold_answer", "expected_output", "reference_solution", "_unused", "answer_key", "labels"]
)
def test_names_that_say_answer_or_nothing_get_it_by_place(third):
    (one,) = scored(f"def score(question, reply, {third}): return {third} == '4'", row())
    assert one.total == 1.0
