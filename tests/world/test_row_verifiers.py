"""Verifiers of open-instruct's RLVR rows: each row names its own, from the file to the reward."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from stages.reward.components import RewardComponent
from stages.reward.rewards import build_rewards
from stages.verification.constraints import check_constraint
from stages.verification.golds import BadGold
from stages.verification.verifiers import string_f1, verifier_of
from tests.data.driver import assistant, ingest, user, write_lines

NEW = (
    "[{'instruction_id': ['punctuation:no_comma', 'keywords:existence'], 'kwargs': [None, {'keywords': ['cat'], 'N':"
    " None}]}]"
)
OLD = json.dumps({"func_name": "validate_word_constraint", "N": 3, "quantifier": "at most", "end_phrase": None})
ROWS = [
    {"messages": [user("2 + 2?")], "ground_truth": "1,004", "dataset": "gsm8k"},
    {"messages": [user("root of 8?"), assistant("$2\\sqrt2$")], "ground_truth": ["2\\sqrt{2}"], "dataset": ["MATH"]},
    {"messages": [user("write")], "ground_truth": NEW, "dataset": "ifeval", "constraint_type": "multi"},
    {"messages": [user("write three words")], "ground_truth": OLD, "dataset": "ifeval"},
    {"messages": [user("who?")], "ground_truth": "The Cat, of London", "dataset": "string_f1", "constraint": ""},
]


def scored(rows, texts, **settings):
    asked = [
        {"prompt_row": row, "completion_text": text, "completion_ids": [1], "finish_reason": "eos"}
        for row, text in zip(rows, texts)
    ]
    return build_rewards([RewardComponent(**{"kind": "verifier", **settings})], {}).score(asked)


def test_rows_of_open_instruct_become_prompts_with_their_verifier(tmp_path):
    rows = ingest(write_lines(tmp_path / "x.jsonl", ROWS), tmp_path / "w").rows
    assert [verifier_of(row) for row in rows] == ["gsm8k", "math", "ifeval", "ifeval", "string_f1"]
    assert [row["answer"] for row in rows] == ["1004", "2\\sqrt{2}", None, None, "The Cat, of London"] and [
        row["domain"] for row in rows
    ] == ["math", "math", None, None, None]
    assert rows[1]["prompt"] == [user("root of 8?")], "the answer that is written out already is no part of the prompt"
    assert [[(c["id"], json.loads(c["kwargs_json"])) for c in row["constraints"]] for row in rows[2:4]] == [
        [("punctuation:no_comma", {}), ("keywords:existence", {"keywords": ["cat"]})],
        [("length_constraints:number_words", {"num_words": 3, "relation": "at most"})],
    ]
    assert json.loads(rows[2]["extra_json"])["constraint_type"] == "multi"
    right = [
        "so 1004 it is",
        r"\boxed{2\sqrt{2}}",
        "a cat",
        "one two three",
        "<think>who</think><answer>cat of London</answer>",
    ]
    half = ["1004 or 5", r"\boxed{3}", "a cat, too", "one two three four", "the cat"]
    assert [one.total for one in scored(rows, right)] == [1.0] * 5 and all(one.correct for one in scored(rows, right))
    assert [one.total for one in scored(rows, half)] == [0.0, 0.0, 0.5, 0.0, 0.5] and not any(
        one.correct for one in scored(rows, half)
    )
    assert [one.total for one in scored(rows[2:], half[2:], correct_value=10.0, incorrect_value=-10.0)] == [
        0.0,
        -10.0,
        0.0,
    ], "a share lies between the two values"
    assert (
        ingest(write_lines(tmp_path / "y.jsonl", ROWS[1:2]), tmp_path / "d", kind="demonstrations/1").rows[0][
            "messages"
        ]
        == ROWS[1]["messages"]
    )


@pytest.mark.parametrize(
    "row",
    [
        {"ground_truth": "4", "dataset": "code"},
        {"ground_truth": "four", "dataset": "gsm8k"},
        {"ground_truth": ["1", "2"], "dataset": "gsm8k"},
        {"ground_truth": "4", "dataset": ["gsm8k", "max_length"]},
        {"ground_truth": "[{'instruction_id': ['keywords:word_once'], 'kwargs': [{}]}]", "dataset": "ifeval"},
        {"ground_truth": "__import__('os').getcwd()", "dataset": "ifeval"},
        {"ground_truth": "[{'instruction_id': ['punctuation:no_comma'], 'kwargs': [1]}]", "dataset": "ifeval"},
        {"ground_truth": '{"func_name": "validate_choice", "options": ["a"]}', "dataset": "ifeval"},
        {"ground_truth": '{"func_name": "verify_keywords"}', "dataset": "ifeval"},
        {"ground_truth": "[" * 5000, "dataset": "ifeval"},
        {"ground_truth": "", "dataset": "math"},
    ],
)
def test_rows_that_no_verifier_here_can_score_are_quarantined(tmp_path, row):
    result = ingest(
        write_lines(tmp_path / "x.jsonl", [*ROWS, {"messages": [user("p")], **row}]),
        tmp_path / "w",
        max_quarantine_fraction=1.0,
    )
    assert result.codes() == {6: ["verifier_spec_invalid"]} and len(result.rows) == 5


def test_string_f1_is_squads():
    """Against the definition, counted word by word; articles and punctuation say nothing."""
    assert (
        string_f1("The cat!", "a CAT") == 1.0
        and string_f1("", "cat") == string_f1("dog", "cat") == string_f1("the", "a") == 0.0
    )
    assert string_f1("cat cat dog", "cat dog dog") == pytest.approx(2 * (2 / 3) * (2 / 3) / (4 / 3))
    rng = random.Random(3)
    for _ in range(50):
        a, b = ([rng.choice("uvwxyz") for _ in range(rng.randint(1, 9))] for _ in range(2))
        common = sum(min(Counter(a)[w], Counter(b)[w]) for w in set(a))
        p, r = common / len(a), common / len(b)
        assert string_f1(" ".join(a), " ".join(b)) == pytest.approx(2 * p * r / (p + r) if common else 0.0)


def test_relations_of_tulus_prompts():
    words = lambda relation, n, text: check_constraint(
        "length_constraints:number_words", {"num_words": n, "relation": relation}, text
    )
    assert (
        words("exactly", 2, "a b")
        and not words("exactly", 2, "a b c")
        and words("at most", 2, "a b")
        and not words("at most", 2, "a b c")
    )
    assert (
        words("around", 20, "a " * 22)
        and not words("around", 20, "a " * 23)
        and words("around", 3, "a b")
        and words("around", 3, "a b c d")
        and not words("around", 3, "a")
    )
    with pytest.raises(ValueError, match="'around'"):
        words("about", 2, "a b")


def test_what_a_verifier_cannot_read_is_unscorable():
    found = scored(
        [
            {"answer": "x", "extra_json": '{"verifier": "gsm8k"}'},
            {"extra_json": '{"verifier": "ifeval"}'},
            {"extra_json": '{"verifier": "string_f1"}'},
            {"extra_json": '{"verifier": "ifeval"}', "constraints": [{"id": "no:such", "kwargs_json": "{}"}]},
        ],
        ["1"] * 4,
    )
    assert [one.total for one in found] == [None] * 4
    assert [
        key in one.reasons["verifier"]
        for key, one in zip(("no number", "no constraints", "no answer", "unknown constraint"), found)
    ] == [True] * 4
    with pytest.raises(BadGold):
        verifier_of({"extra_json": '{"verifier": "magic"}'})


def test_evaluation_reads_them(tmp_path):
    from stages.evaluation.grading import parse

    rows = ingest(write_lines(tmp_path / "x.jsonl", ROWS), tmp_path / "w").rows
    assert (
        parse(rows[0], "it is 1004") == (True, True, "1004")
        and parse(rows[4], "cat of london")[:2] == (True, True)
        and parse(rows[4], "cat")[0] is False
    )
    assert parse(rows[2], "a cat") == (None, None, None), "constraints have readings of their own"
