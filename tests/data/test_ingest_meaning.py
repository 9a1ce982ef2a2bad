"""What data means is never guessed in silence: labels, prompts, numbers, splits and groups are what their source says,
or refused with what to write.
"""

import json
from collections import Counter

import pytest

from stages.harness import StageFailure
from stages.ingest import matching_kind, native_kind
from stages.reward_models.reward_data import Drop, step_items
from stages.spec import ConfigError

from .driver import assistant, ingest, user, write_lines

HELD = {"validation_fraction": 0.05, "test_fraction": 0.1}


def pair(prompt="p", chosen="x", rejected="y", **more):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


def ab(label, prompt="p", a="aa", b="bb", **more):
    return {"prompt": prompt, "response_a": a, "response_b": b, "label": label, **more}


def made(tmp_path, rows, name="x.jsonl", **config):
    """Ingest rows, whatever share is refused."""
    number = len(list(tmp_path.iterdir()))
    return ingest(
        write_lines(tmp_path / f"{number}-{name}", rows),
        tmp_path / f"w{number}",
        **{"max_quarantine_fraction": 1.0} | config,
    )


def said(row, *columns):
    return tuple(row[column][-1]["content"] for column in columns)


# -- labels ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "labels, config, expected",
    [
        ([[1, 0], [0]], {}, None),
        ([[1, 0]], {"step_labels": "zero_one"}, [[1, -1]]),
        ([[1, 0]], {"step_labels": "minus_one"}, [[1, 0]]),
        ([[1, 0], [-1, 1]], {}, [[1, 0], [-1, 1]]),
        ([[1, 1]], {}, [[1, 1]]),
        ([[True, False]], {"step_labels": "zero_one"}, [[1, -1]]),
    ],
)
def test_step_labels_of_zero_and_one_must_be_explained(tmp_path, labels, config, expected):
    rows = [
        {"prompt": f"q{i}", "completions": [f"step {j}" for j in range(len(found))], "labels": found}
        for i, found in enumerate(labels)
    ]
    if expected is None:
        with pytest.raises(StageFailure, match="step_labels=zero_one"):
            made(tmp_path, rows, **config)
        return
    got = made(tmp_path, rows, **config).rows
    assert [r["labels"] for r in got] == expected and [r["solution_correct"] for r in got] == [
        -1 not in found for found in expected
    ]


def test_columns_of_step_rows_are_read_and_quality_control_is_no_training_data(tmp_path):
    row = {
        "prompt": "q",
        "completions": ["a", "b"],
        "labels": [1, -1],
        "separator": "\n",
        "is_quality_control": True,
        "soft_labels": [0.9, 0.1],
        "solution_correct": True,
        "answer": 42,
    }
    (got,) = made(tmp_path, [row]).rows
    assert {
        name: got[name] for name in ("separator", "is_quality_control", "soft_labels", "solution_correct", "answer")
    } == {
        "separator": "\n",
        "is_quality_control": True,
        "soft_labels": [0.9, 0.1],
        "solution_correct": True,
        "answer": "42",
    }
    with pytest.raises(Drop, match="quality_control"):
        step_items(got, None, None, Counter())
    assert made(tmp_path, [row, row | {"prompt": "r", "is_quality_control": False}], kind="unpaired/1").codes() == {
        1: ["quality_control"]
    }
    assert made(tmp_path, [row | {"soft_labels": [0.5]}, row | {"soft_labels": [0.5, 2]}]).codes() == {
        1: ["step_label_length"],
        2: ["bad_label"],
    }


@pytest.mark.parametrize(
    "labels, config, expected",
    [
        ([1, 2], {}, None),
        ([0, 1, 1], {}, None),
        ([1, 2, "2"], {"label_map": {1: "A", "2": "B"}}, ["aa", "bb", "bb"]),
        (["model_a", "model_b"], {"label_map": {"model_a": "A", "model_b": "B"}}, ["aa", "bb"]),
        ([5, 7, 3], {"n_points": 7}, ["bb", "bb", "aa"]),
    ],
)
@pytest.mark.parametrize("column", ["label", "choice", "winner"])
def test_numbers_as_labels_need_their_scale(tmp_path, labels, config, expected, column):
    rows = [
        {**{k: v for k, v in ab(0, f"p{i}").items() if k != "label"}, column: label} for i, label in enumerate(labels)
    ]
    result = made(tmp_path, rows, **config)
    if expected is None:
        assert set(map(tuple, result.codes().values())) == {("scale_unknown",)}
        with pytest.raises(StageFailure, match=r"n_points=5 .*label_map="):
            made(tmp_path, rows, max_quarantine_fraction=0.2)
    else:
        assert [said(r, "chosen")[0] for r in result.rows] == expected


@pytest.mark.parametrize(
    "row, code",
    [
        (pair(label_prob=0.2), "bad_label"),
        (ab(5, n_points=5, orientation="high_is_A"), "bad_label"),
        (
            pair(
                chosen_segments=[{"start": 0, "end": 400, "scores": {"q": 1}}],
                rejected_segments=[{"start": 0, "end": 1, "scores": {"q": 1}}],
                offset_unit="chars",
            ),
            "wrong_type",
        ),
        ({"messages": [user("u"), assistant("a")], "train_turns": [0]}, "bad_label"),
        ({"messages": [user("u"), assistant("a")], "train_turns": "all"}, "wrong_type"),
    ],
)
def test_values_outside_their_meaning_are_refused(tmp_path, row, code):
    assert made(tmp_path, [row]).codes() == {1: [code]}


# -- votes -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "rows, config, expected",
    [
        ([pair()] * 3 + [pair(chosen="y", rejected="x")], {"contradictions": "keep_as_votes"}, [("x", 0.75)]),
        ([pair(), pair(chosen="y", rejected="x")], {"contradictions": "keep_as_votes"}, []),
        (
            [pair(), pair(chosen="y", rejected="x")],
            {"contradictions": "keep_as_votes", "tie_policy": "soft"},
            [("x", 0.5)],
        ),
        (
            [pair(label_prob=0.6), pair(chosen="y", rejected="x", label_prob=0.9)],
            {"contradictions": "keep_as_votes"},
            [("y", 0.65)],
        ),
        ([ab("A"), ab("A"), ab("B"), ab("tie")], {"contradictions": "keep_as_votes"}, [("aa", 0.625)]),
        ([ab(v, annotator_id=i) for i, v in enumerate(["A", "A", "A", "B", "tie"])], {}, [("aa", 0.7)]),
        ([ab("A", annotator_id=1), ab("A", annotator_id=2, a="bb", b="aa")], {}, []),
        ([ab("A", annotator_id=1), ab("B", annotator_id=2)], {"tie_policy": "soft"}, [("aa", 0.5)]),
        (
            [ab("A", annotator_id=1), ab("A", annotator_id=2), ab("B", annotator_id=3)],
            {"contradictions": "drop_both"},
            [],
        ),
        ([ab("A", annotator_id=1), ab("B", annotator_id=1, criteria="safe")], {}, [("aa", None), ("bb", None)]),
        ([ab("A", annotator_id=1), ab("B", annotator_id=2)], {"contradictions": "off"}, [("aa", None), ("bb", None)]),
    ],
)
def test_several_labels_of_the_same_answers_are_votes(tmp_path, rows, config, expected):
    result = made(tmp_path, rows, kind="pairs/1", **config)
    assert [(said(r, "chosen")[0], r["label_prob"] and pytest.approx(r["label_prob"])) for r in result.rows] == expected


def test_annotators_are_kept_in_comparisons_and_their_strengths_never_averaged(tmp_path):
    rows = [ab(label, annotator_id=i, n_points=8) for i, label in enumerate([1, 2, 4, 8])]
    (got,) = made(tmp_path, rows, margin_mode="llama2_large").rows
    assert (
        (got["strength"], got["margin"], got["label_prob"]) == (3, 2, 0.75)
        and got["ann"].get("annotator_id") is None
        and len(json.loads(got["extra_json"])["row_ids"]) == 4
    )
    assert len(made(tmp_path, rows, kind="comparisons/1").rows) == 4
    assert [(said(r, "completion"), r["label"]) for r in made(tmp_path, rows, kind="unpaired/1").rows] == [
        (("aa",), True),
        (("bb",), False),
    ]


@pytest.mark.parametrize(
    "labels, config, expected",
    [
        ([True, False], {}, []),
        ([True, True, False], {"on_conflict": "majority"}, [True]),
        ([True, False], {"on_conflict": "majority"}, []),
        ([True, True], {}, [True]),
    ],
)
def test_a_completion_with_both_labels_is_a_conflict(tmp_path, labels, config, expected):
    rows = [{"prompt": "p", "completion": "c" + "\n" * i, "label": label} for i, label in enumerate(labels)] + [
        {"prompt": "p", "completion": "d", "label": False}
    ]
    result = made(tmp_path, rows, **config)
    assert [r["label"] for r in result.rows] == [*expected, False]
    assert expected or set(map(tuple, result.codes().values())) == {("contradicts_row",)}


# -- prompts -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "more, prompt",
    [
        ({"question": "How?"}, "How?"),
        ({"instruction": "Do", "input": "this"}, "Do\n\nthis"),
        ({"query": "How?"}, "How?"),
        ({"problem": "How?"}, "How?"),
        ({"input": "How?"}, "How?"),
        ({}, "The answer is"),
    ],
)
def test_a_question_by_another_name_is_the_prompt(tmp_path, more, prompt):
    (got,) = made(tmp_path, [{"chosen": "The answer is 1", "rejected": "The answer is 2", **more}]).rows
    assert said(got, "prompt", "chosen") == (prompt, "The answer is 1" if more else " 1") and got["extra_json"] is None


def test_a_row_without_its_prompt_is_not_cut_from_its_answers(tmp_path):
    rows = [
        pair("p", "The answer is 1", "The answer is 2"),
        {"prompt": None, "chosen": "The answer is 1", "rejected": "The answer is 2"},
    ]
    assert made(tmp_path, rows).codes() == {2: ["missing_column"]}
    with pytest.raises(ConfigError, match="did you mean 'query'"):
        made(
            tmp_path,
            [{"query": "q", "chosen": "The answer is 1", "rejected": "The answer is 2"}],
            prompt_column="qeury",
        )


# -- numbers and verifiers ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    "written, answer",
    [
        ("1267650600228229401496703205376", "1267650600228229401496703205376"),
        ("18446744073709551616", "18446744073709551616"),
        ("0.00001", "0.00001"),
        ("1e16", "10000000000000000"),
        ("0.1234567890123456789012", "0.1234567890123456789012"),
        ("7", "7"),
        ("2.50", "2.5"),
    ],
)
@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_numbers_stay_what_was_written(tmp_path, written, answer, name):
    line = f'{{"prompt": "p", "answer": {written}, "score": {written}}}'
    (got,) = made(tmp_path, [f"[{line}]" if name == "x.json" else line], name).rows
    assert got["answer"] == answer and got["answer_type"] in ("integer", "number")


@pytest.mark.parametrize(
    "row",
    [
        {"answer": "1,2", "answer_type": "integer"},
        {"answer": ",", "answer_type": "integer"},
        {"answer": "\\frac{1}{", "answer_type": "latex"},
        {"answer": "7", "answer_type": "mc"},
        {"answer": "x", "verifier": "none_such"},
        {"constraints": [{"id": "nope:nope", "kwargs": {}}]},
        {"constraints": [{"id": "length_constraints:number_words", "kwargs": {"num_wrds": 3}}]},
        {"reward_route": ["no_such_source"]},
        {"tests": [{"input": "1", "timeout_s": -3}]},
    ],
    ids=str,
)
def test_what_no_verifier_can_use_is_refused(tmp_path, row):
    assert made(tmp_path, [{"prompt": "p", **row}], format="prompts").codes() == {1: ["verifier_spec_invalid"]}


@pytest.mark.parametrize(
    "row",
    [
        {"answer": "1,002"},
        {"answer": "50%"},
        {"answer": "3/4"},
        {"answer": "\\frac{1}{2}", "answer_type": "latex"},
        {"answer": "(b)", "answer_type": "mc"},
        {"answer": "so #### 18", "answer_type": "latex"},
        {"answer": "#### Steps\nfirst this", "answer_type": "text"},
        {"answer": "cat", "verifier": "world"},
        {"reward_route": ["verifier", "model"]},
        {"reward_route": ["majority", "length_group"]},
        {"answer": "1e3", "answer_type": "text"},
        {"constraints": [{"id": "length_constraints:number_words", "kwargs": {"num_words": 3}}]},
        {"constraints": [{"id": "language:response_language", "kwargs": {"language": "de"}}]},
    ],
    ids=str,
)
def test_what_its_verifier_accepts_is_kept(tmp_path, row):
    assert made(tmp_path, [{"prompt": "p", **row}], format="prompts").codes() == {}


def test_values_of_tests_are_written_as_json(tmp_path):
    (got,) = made(tmp_path, [{"prompt": "p", "tests": [{"input": [1, 2], "expected": {"a": True, "b": None}}]}]).rows
    assert got["tests"][0]["input"] == "[1,2]" and got["tests"][0]["expected"] == '{"a":true,"b":null}'


# -- splits and groups -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "files",
    [
        {"train.jsonl": (10, None), "test.jsonl": (10, None)},
        {"data/train-00000-of-00001.jsonl": (10, None), "data/dev-00000-of-00001.jsonl": (10, None)},
        {"all.jsonl": (20, ["train", "test"])},
        {"all.jsonl": (20, ["train", "valid"])},
    ],
)
def test_held_out_rows_stay_held_out(tmp_path, files):
    expected = {}
    for name, (n, splits) in files.items():
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [pair(f"{name} {i}") | ({"split": splits[i % 2]} if splits else {}) for i in range(n)]
        write_lines(path, rows)
        expected |= {row["prompt"]: row.get("split") or name.split("/")[-1].split("-")[0].split(".")[0] for row in rows}
    result = ingest(tmp_path / "in", tmp_path / "w", **HELD)
    named = {"dev": "validation", "valid": "validation"}
    assert {said(r, "prompt")[0]: r["split"] for r in result.rows} == {
        prompt: named.get(split, split) for prompt, split in expected.items()
    }
    halves = Counter(r["split"] for r in ingest(tmp_path / "in", tmp_path / "h", halves=True).rows)
    assert (
        set(halves) <= {"rm_a", "rm_b", "test", "validation"}
        and sum(n for split, n in halves.items() if split.startswith("rm")) == 10
    )


def test_files_that_say_no_split_are_split_as_asked(tmp_path):
    """One file called train is what there is to split, and so is one whose column only says train; a word that is no
    split is told.
    """
    rows = [pair(f"p{i}") for i in range(60)]
    for name, more in (("train.jsonl", {}), ("x.jsonl", {"split": "train"}), ("y.jsonl", {"split": "algebra"})):
        result = ingest(
            write_lines(tmp_path / name, [row | more for row in rows]), tmp_path / f"w-{name}", test_fraction=0.5
        )
        assert set(result.data.manifest["splits"]) == {"train", "test"}
    assert any(w["code"] == "unknown_split" for w in result.result["warnings"]) and json.loads(
        result.rows[0]["extra_json"]
    ) == {"split": "algebra"}


@pytest.mark.parametrize(
    "other",
    [
        lambda i: f"what is {i} PLUS one? ",
        lambda i: [{"role": "system", "content": "Be nice."}, user(f"What is {i} plus one?")],
        lambda i: [user(f"What is {i} plus one?"), assistant("hm"), user("so?")],
    ],
    ids=["case and space", "system", "longer"],
)
@pytest.mark.parametrize("config", [{}, {"near_duplicates": "group"}, {"system_prompts": "merge"}], ids=str)
def test_forms_of_one_question_are_in_one_split(tmp_path, other, config):
    rows = [row for i in range(60) for row in (pair(f"What is {i} plus one?"), pair(other(i), "c", "d"))]
    result = made(tmp_path, rows, test_fraction=0.4, **config)
    assert len({r["group_id"] for r in result.rows}) == 60 and all(
        a["split"] == b["split"] for a, b in zip(result.rows[::2], result.rows[1::2])
    )
    assert len({r["prompt_id"] for r in result.rows}) == 120


def test_a_near_duplicate_cluster_has_the_same_id_in_any_order(tmp_path):
    base = "Write a short story about a brave knight and his loyal horse in spring"
    rows = [pair(base + word) for word in ("", " today", " tonight")] + [
        pair(base.upper(), "c", "d"),
        pair("short", "c", "d"),
        pair("SHORT", "c", "d"),
    ]
    config = {"near_duplicates": "group", "near_threshold": 0.7, "test_fraction": 0.5}
    there, back = made(tmp_path, rows, **config), made(tmp_path, rows[::-1], **config)
    groups = [r["group_id"] for r in there.rows]
    assert len(set(groups[:4])) == len(set(groups[4:])) == 1 and groups == [r["group_id"] for r in back.rows][::-1]
    assert any(w["code"] == "near_groups" for w in there.result["warnings"])


def test_a_group_column_that_cuts_a_prompt_is_told(tmp_path):
    rows = [pair(chosen=f"a{i}", group_id=f"task{i}") for i in range(30)]
    cut = made(tmp_path, rows, test_fraction=0.3)
    assert len(cut.data.manifest["splits"]) == 2 and any(
        w["code"] == "prompt_in_two_splits" and "group_by=opening" in w["text"] for w in cut.result["warnings"]
    )
    assert len(made(tmp_path, rows, test_fraction=0.3, group_by="opening").data.manifest["splits"]) == 1
    empty = made(tmp_path, [pair(f"p{i}", group_id="", license="", weight="") for i in range(200)], **HELD)
    assert len(empty.data.manifest["splits"]) == 3 and {(r["license"], r["weight"]) for r in empty.rows} == {
        (None, 1.0)
    }
    assert {r["group_id"] for r in made(tmp_path, [pair(group_id=7)]).rows} == {"7"}


# -- decontamination ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "bench, asked",
    [
        (
            {
                "turns": [
                    "Compose a travel blog post about a recent trip to Hawaii.",
                    "Rewrite your previous response, starting every sentence with an A.",
                ]
            },
            ["Rewrite your previous response, starting every sentence with an A."],
        ),
        (
            {"turns": ["Compose a travel blog post about a recent trip to Hawaii.", "Now shorter, please."]},
            ["Now shorter, please."],
        ),
        (
            {"problem": "Compute the determinant of the identity matrix of size nine by nine."},
            ["Compute the determinant of the identity matrix of size nine by nine."],
        ),
        (
            {"question": "How many cents are in nine dollars and ten dimes?", "answer": "#### one thousand"},
            ["How many cents are in nine dollars and ten dimes?"],
        ),
        ({"prompt": "What is the capital of France?"}, ["Hi", "What is the capital of France?"]),
    ],
    ids=["turn", "short turn", "unknown column", "refused row", "short item as a turn"],
)
def test_every_turn_of_every_evaluation_item_is_looked_for(tmp_path, bench, asked):
    good = {"question": "What is the sum of three and four and of five and six?", "answer": "#### 18"}
    source = write_lines(tmp_path / "bench.jsonl", [bench] + ([good] if "question" in bench else []))
    rows = [
        {"messages": [m for text in turns for m in (user(text), assistant("ok"))]}
        for turns in (asked, ["Something else"], ["Hi", "Now shorter, please."])
    ]
    result = ingest(
        write_lines(tmp_path / "x.jsonl", rows),
        tmp_path / "w",
        inputs={"benchmarks.b": source},
        decontaminate="coverage",
    )
    assert result.codes() == {1: ["contaminated"]}


def test_an_evaluation_file_without_prompts_is_an_error_and_a_row_without_one_is_told(tmp_path):
    (tmp_path / "bench").mkdir()
    write_lines(tmp_path / "bench" / "a.jsonl", [{"prompt": "What is the capital of France?"}, {"prompt": 5}])
    source = write_lines(tmp_path / "x.jsonl", [{"prompt": "p", "completion": "c"}])
    told = ingest(source, tmp_path / "w", inputs={"benchmarks.b": tmp_path / "bench"}, decontaminate="coverage").result[
        "warnings"
    ]
    assert any(w["code"] == "benchmark_rows_skipped" and "1 of b/a.jsonl" in w["text"] for w in told)
    write_lines(tmp_path / "bench" / "b.jsonl", [{"foo": "bar"}])
    with pytest.raises(ConfigError, match="no readable prompt was found in b.jsonl"):
        ingest(source, tmp_path / "w2", inputs={"benchmarks.b": tmp_path / "bench"}, decontaminate="coverage")


# -- columns -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "row, expected",
    [
        (
            {"messages": [user("u"), assistant("a"), user("v"), assistant("b")], "train_turns": [3]},
            {"train_turns": [3]},
        ),
        (
            {"messages": [user("u"), assistant("a"), user("v"), assistant("b")], "train_turns": [3], "system": "s"},
            {"train_turns": [4]},
        ),
        (
            {"messages": [user("u"), assistant("a") | {"weight": 0}, user("v"), assistant("b") | {"weight": 1}]},
            {"train_turns": [3]},
        ),
        (
            {"messages": [user("u"), assistant("a") | {"refusal": "no"}]},
            {"extra_json": '{"message_fields":{"messages":{"1":{"refusal":"no"}}}}'},
        ),
        (
            {"messages": [user("u"), assistant("a") | {"function_call": {"name": "w", "arguments": "{}"}}]},
            {"messages": [user("u"), assistant("a") | {"function_calls": '{"name":"w","arguments":"{}"}'}]},
        ),
        ({"messages": [user("u"), assistant("a")], "category": 7}, {"category": "7"}),
        (
            {"messages": [user("u"), assistant("a")], "kept": False, "difficulty": 2},
            {"kept": False, "extra_json": '{"difficulty":2}'},
        ),
        ({"prompt": "u", "completion": "a", "kept": "False"}, {"kept": False, "extra_json": None}),
        ({"messages": [user("u"), assistant("a")], "kept": "maybe"}, {"kept": True, "extra_json": '{"kept":"maybe"}'}),
        (
            {"messages": [user("u"), assistant("a")], "category": ["x"]},
            {"category": None, "extra_json": '{"category":["x"]}'},
        ),
        (pair(p_chosen=0.8), {"label_prob": 0.8, "extra_json": None}),
        (
            pair(stage_index=1, turn_index=2, pairs_in_group=3, rank_gap="2", constraint_ids=["c"]),
            {
                "stage_index": 1,
                "turn_index": 2,
                "pairs_in_group": 3,
                "rank_gap": 2,
                "constraint_ids": ["c"],
                "extra_json": None,
            },
        ),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_columns_of_the_schema_are_read(tmp_path, row, expected):
    (got,) = made(tmp_path, [row]).rows
    assert {name: got[name] for name in expected} == expected


def test_criteria_annotators_and_dates_are_kept(tmp_path):
    rows = [
        ab("A", annotator_id="w", criteria="harmless", collected_at="2024-01-01T00:00:00Z"),
        ab("A", annotator_id="w", criteria="helpful", collected_at="last week"),
    ]
    got = made(tmp_path, rows, kind="comparisons/1").rows
    assert [r["criteria"] for r in got] == ["harmless", "helpful"] and len({r["row_id"] for r in got}) == 2
    assert got[0]["collected_at"].isoformat() == "2024-01-01T00:00:00+00:00" and json.loads(got[1]["extra_json"]) == {
        "collected_at": "last week"
    }
    assert made(tmp_path, rows, kind="pairs/1").rows[0]["collected_at"].year == 2024
    ranked = [{"prompt": "p", "completions": ["a", "b"], "ranks": [0, 1], "annotator_id": name} for name in "xy"]
    assert [r["ann"]["annotator_id"] for r in made(tmp_path, ranked, kind="rankings/1").rows] == ["x", "y"]


# -- files -------------------------------------------------------------------------------------------
def test_a_missing_value_of_pandas_is_an_empty_cell_of_a_csv(tmp_path):
    cells = "prompt,chosen,rejected,system\np1,good,bad,NaN\np2,NaN,bad,\np3,good,<NA>,\nnan,good,bad,\np5,nano,NaN?,\n"
    (tmp_path / "a.csv").write_text(cells)
    result = ingest(tmp_path / "a.csv", tmp_path / "w", max_quarantine_fraction=1)
    assert [(r["prompt"], r["chosen"], r["rejected"]) for r in result.rows] == [
        ([user("p1")], [assistant("good")], [assistant("bad")]),
        ([user("p5")], [assistant("nano")], [assistant("NaN?")]),
    ]
    assert result.codes() == {3: ["empty_completion"], 4: ["empty_completion"], 5: ["empty_prompt"]}


def test_csv_cells_stay_text_unless_their_column_holds_lists(tmp_path):
    (tmp_path / "a.csv").write_text(
        'prompt,completion,weight,group_id\nList three,"[1, 2, 3]",,\nJson,"{""a"": 1}",2,g\n'
    )
    assert [(r["messages"][1]["content"], r["weight"]) for r in ingest(tmp_path / "a.csv", tmp_path / "w").rows] == [
        ("[1, 2, 3]", 1.0),
        ('{"a": 1}', 2.0),
    ]
    (tmp_path / "b.csv").write_text('q,answers,ranks\np,"[""a"", ""b""]","[1, 0]"\n')
    (ranking,) = ingest(tmp_path / "b.csv", tmp_path / "w2", column_map={"prompt": "q", "completions": "answers"}).rows
    assert ranking["ranks"] == [1, 0] and ranking["completions"][0] == [assistant("a")]
    (tmp_path / "c.csv").write_text(
        'messages\n"[{""role"": ""user"", ""content"": ""u""}, {""role"": ""assistant"", ""content"": ""a""}]"\n'
    )
    assert ingest(tmp_path / "c.csv", tmp_path / "w3").rows[0]["messages"] == [user("u"), assistant("a")]
    (tmp_path / "d.csv").write_text("prompt,chosen,chosen,rejected\nq,real,other,bad\n")
    with pytest.raises(StageFailure, match="several columns are called chosen"):
        ingest(tmp_path / "d.csv", tmp_path / "w4")


def test_answers_in_a_file_that_is_taken_for_prompts_are_told(tmp_path):
    """A file of pairs most of which have lost their chosen answer is not passed on as prompts without a word."""
    rows = [pair(f"p{i}") | ({"chosen": None} if i % 3 else {}) for i in range(9)]
    source = write_lines(tmp_path / "x.jsonl", rows)
    guessed = ingest(source, tmp_path / "w")
    (told,) = (one["text"] for one in guessed.result["warnings"] if one["code"] == "answers_left")
    assert (
        guessed.data.kind == "prompts/1" and told.startswith("3 of 9 rows have answers") and "format=preference" in told
    )
    assert not ingest(source, tmp_path / "meant", format="prompts").result["warnings"]
    bare = write_lines(tmp_path / "y.jsonl", [{"prompt": "p", "messages_seen": 3, "note": "x"}])
    assert not ingest(bare, tmp_path / "bare").result["warnings"]
    columns = {"chosen_column": "better", "rejected_column": "worse"}
    for name, row, config in (
        ("chosen and rejected", {"chosen": None, "rejected": None}, {}),
        ("chosen and rejected", {"better": None, "worse": None}, columns),
        ("response", {"response": None}, {}),
    ):
        lost = write_lines(tmp_path / "z.jsonl", [{"prompt": f"p{i}", **row} for i in range(3)])
        guessed = ingest(lost, tmp_path / f"lost-{len(name)}-{len(config)}", **config)
        (told,) = (one["text"] for one in guessed.result["warnings"] if one["code"] == "empty_answers")
        assert guessed.data.kind == "prompts/1" and f"since there is nothing in {name} of the first 3 rows" in told
        meant = ingest(lost, tmp_path / f"meant-{len(name)}-{len(config)}", format="prompts", **config)
        assert not meant.result["warnings"]


def test_a_file_of_which_every_row_is_refused_says_why(tmp_path):
    source = write_lines(tmp_path / "x.jsonl", [{"prompt": "p", "completion": "c", "label": "maybe"}] * 3)
    with pytest.raises(StageFailure, match="3 bad_label"):
        ingest(source, tmp_path / "w")
    assert native_kind(str(source)) == "unpaired/1" and matching_kind(str(source), ("pairs/1",)) == "pairs/1"


@pytest.mark.parametrize(
    "rows, code",
    [
        ([pair(), pair(chosen="x\n")], "duplicate_row"),
        ([pair(), pair("p ")], "duplicate_row"),
        ([pair(), pair(chosen="y\n", rejected="x")], "contradicts_row"),
        ([ab("A"), ab("A", a="bb", b="aa\n")], "contradicts_row"),
    ],
)
def test_white_space_at_the_ends_is_no_difference(tmp_path, rows, code):
    assert made(tmp_path, rows, kind="pairs/1").codes() == {2: [code]}


def test_rows_that_share_an_id_are_told_of(tmp_path):
    """One that says the same is a duplicate; one that says something else is kept, counted and told of by its place."""
    rows = [
        pair(id="a"),
        pair(id="a"),
        pair("q", id="a"),
        pair("r", id="b"),
        pair("s", id="a"),
        pair("t", id=1),
        pair("u", id="1"),
    ]
    found = made(tmp_path, rows, kind="pairs/1")
    assert found.codes() == {2: ["duplicate_row"]} and found.counts["rows_kept"] == 6
    assert found.counts["ids_shared"] == found.result["summary"]["ids_shared"] == 2
    (told,) = (one["text"] for one in found.result["warnings"] if one["code"] == "ids_shared")
    assert told.startswith("2 rows have the id of an earlier row") and "x.jsonl:3, id 'a'" in told
    (report,) = (one for one in found.result["reports"] if one["name"] == "ingest")
    assert "2 rows were kept whose id" in (found.workdir / report["markdown"]).read_text()
    # ids of another file, and of several annotators of an item, are no copies
    folder = tmp_path / "two"
    folder.mkdir()
    for name, prompt in (("a", "p"), ("b", "q")):
        write_lines(folder / f"{name}.jsonl", [pair(prompt, id=0)])
    assert "ids_shared" not in ingest(folder, tmp_path / "files").counts
    judged = [ab("A", id=0, annotator_id=name) for name in "xyz"]
    assert "ids_shared" not in made(tmp_path, judged, kind="pairs/1").counts
    # nor are votes, and copies that are meant to stay
    for settings in ({"contradictions": "keep_as_votes"}, {"deduplicate": "off"}):
        kept = made(tmp_path, [pair(id="a"), pair(id="a")], kind="pairs/1", **settings)
        assert kept.counts["rows_kept"] == 2 and "ids_shared" not in kept.counts, settings


def test_two_labels_that_do_not_agree_are_asked_about(tmp_path):
    """A comparison whose columns name different winners says nothing until one of them is chosen; where they agree
    nothing is asked.
    """
    rows = [
        {"prompt": f"p{i}", "response_a": "a", "response_b": "b", "label": label, "winner": winner}
        for i, (label, winner) in enumerate(
            (
                ("A", "model_a"),
                ("A", "B"),
                ("tie", "model_b"),
                ("B", "B"),
                (1, "model_a"),
                (1, "model_b"),
                ("A", "human"),
                ("B", None),
            )
        )
    ]
    source = write_lines(tmp_path / "x.jsonl", rows)
    result = ingest(source, tmp_path / "w", kind="comparisons/1", n_points=2, max_quarantine_fraction=1)
    assert result.codes() == {2: ["label_unsaid"], 3: ["label_unsaid"], 6: ["label_unsaid"]}
    with pytest.raises(StageFailure, match="write label_column=NAME for the one that counts"):
        ingest(source, tmp_path / "w2", kind="comparisons/1", n_points=2)
    chosen = ingest(
        source, tmp_path / "w3", kind="comparisons/1", n_points=2, label_column="winner", max_quarantine_fraction=1
    )
    assert [row["votes"] for row in chosen.rows] == [["A"], ["B"], ["B"], ["B"], ["A"], ["B"]] and chosen.codes() == {
        7: ["bad_label"],
        8: ["missing_column"],
    }


def test_stored_completions_of_a_prompt_with_two_answers_are_not_scored(tmp_path):
    """They know their prompt by its text, so by which answer they were judged is not known: refused, where the last one
    counted. Prompts that nobody asked, and repeated ones, do no harm.
    """
    from types import SimpleNamespace

    from stages.generation import by_prompt_id

    source = write_lines(
        tmp_path / "x.jsonl",
        [{"prompt": "p", "answer": "4"}, {"prompt": "q", "answer": "1"}, {"prompt": "p", "answer": "5"}],
    )
    rows = ingest(source, tmp_path / "w", deduplicate="exact").rows
    assert len(rows) == 3 and rows[0]["prompt_id"] == rows[2]["prompt_id"]
    stage = SimpleNamespace(name="rescore")
    with pytest.raises(
        ConfigError,
        match=(
            "rescore: 1 prompts come twice with different answers, tests or constraints, for example"
            " 'p'.*deduplicate=auto"
        ),
    ):
        by_prompt_id(stage, rows, {row["prompt_id"] for row in rows})
    found = by_prompt_id(stage, [rows[0], rows[1], rows[0], dict(rows[1])], {row["prompt_id"] for row in rows})
    assert [row["answer"] for row in found.values()] == ["4", "1"]
    assert by_prompt_id(stage, rows, {rows[1]["prompt_id"]})[rows[1]["prompt_id"]]["answer"] == "1"
