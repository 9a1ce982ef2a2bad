"""Every source format, conversions, splits, duplicates."""

import gzip
import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.harness import StageFailure
from stages.ingest import matching_kind
from stages.reward_model import SPEC
from stages.spec import ConfigError

from .driver import SHARED, assistant, ingest, user, write_lines

PAIR = {"prompt": [user("p")], "chosen": [assistant("a")], "rejected": [assistant("b")]}
CONVERSATION = [user("one"), assistant("1"), user("two"), assistant("2")]


def content(row: dict, *columns: str) -> dict:
    return {column: row[column] for column in columns}


@pytest.mark.parametrize(
    "row, expected",
    [
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, PAIR),
        (PAIR, PAIR),
        ({"prompt": "p", "chosen": [user("p"), assistant("a")], "rejected": [user("p"), assistant("b")]}, PAIR),
        ({"chosen": [user("p"), assistant("a")], "rejected": [user("p"), assistant("b")]}, PAIR),
        ({"chosen": "\n\nHuman: p\n\nAssistant: a", "rejected": "\n\nHuman: p\n\nAssistant: b"}, PAIR),
        ({"prompt": "\n\nHuman: p\n\nAssistant:", "response": " a", "chosen": " a", "rejected": " b"}, PAIR),
        (
            {"chosen": "The sky is blue.", "rejected": "The sky is bright."},
            {"prompt": [user("The sky is")], "chosen": [assistant(" blue.")], "rejected": [assistant(" bright.")]},
        ),
        (
            {"prompt": "p", "system": "s", "chosen": "a", "rejected": "b"},
            PAIR | {"prompt": [{"role": "system", "content": "s"}, user("p")]},
        ),
        (
            {
                "instruction": "p",
                "output_1": "b",
                "output_2": "a",
                "preference": 1.9,
                "generator_1": "x",
                "generator_2": "y",
            },
            PAIR,
        ),
        ({"prompt": "p", "response_a": "b", "response_b": "a", "label": 5, "n_points": 5}, PAIR),
        ({"prompt": "p", "response_a": "a", "response_b": "b", "votes": ["A", "A", "tie"]}, PAIR),
        ({"prompt": "p", "completions": ["b", "a"], "ranks": [1, 0]}, PAIR),
        ({"prompt": "p", "completions": ["b", "a"], "scores": [1.0, 3.0]}, PAIR),
    ],
)
def test_preferences_become_pairs(tmp_path, row, expected):
    result = ingest(write_lines(tmp_path / "x.jsonl", [row]), tmp_path / "w", kind="pairs/1")
    assert [content(r, "prompt", "chosen", "rejected") for r in result.rows] == [expected]


@pytest.mark.parametrize(
    "row, kind, expected",
    [
        (
            {"prompt": "p", "completion": "c"},
            "demonstrations/1",
            {"messages": [user("p"), assistant("c")], "train_turns": [1]},
        ),
        ({"messages": CONVERSATION}, "demonstrations/1", {"messages": CONVERSATION, "train_turns": [1, 3]}),
        (
            {"conversations": [{"from": "human", "value": "p"}, {"from": "gpt", "value": "c"}]},
            "demonstrations/1",
            {"messages": [user("p"), assistant("c")]},
        ),
        (
            {"instruction": "do", "input": "this", "output": "c"},
            "demonstrations/1",
            {"messages": [user("do\n\nthis"), assistant("c")]},
        ),
        ({"prompt": "p"}, "prompts/1", {"prompt": [user("p")], "answer": None}),
        ({"prompt": [user("p")], "answer": 7}, "prompts/1", {"answer": "7", "answer_type": "integer"}),
        (
            {"question": "q", "answer": "so <<1+1=2>>2\n#### 1,002"},
            "prompts/1",
            {"prompt": [user("q")], "answer": "1002", "answer_type": "integer"},
        ),
        (
            {"prompt": "p", "completion": "c", "label": True},
            "unpaired/1",
            {"completion": [assistant("c")], "label": True},
        ),
        ({"prompt": "p", "response": "c", "rating": 4}, "ratings/1", {"completion": [assistant("c")], "score": 4.0}),
        ({"text": "t"}, "text/1", {"text": "t", "n_chars": 1}),
        (
            {"prompt": "p", "completions": ["s1", "s2"], "labels": [True, False]},
            "stepwise/1",
            {"labels": [1, -1], "solution_correct": False},
        ),
        ({"prompt": "p", "completions": ["a", "b"], "ranks": [0, 0]}, "rankings/1", {"ranks": [0, 0]}),
    ],
)
def test_auto_kind(tmp_path, row, kind, expected):
    result = ingest(write_lines(tmp_path / "x.jsonl", [row]), tmp_path / "w")
    assert result.data.kind == kind
    (got,) = result.rows
    assert content(got, *expected) == expected and got["schema"] == kind and got["dataset"] == "x"


def test_same_rows_from_every_container(tmp_path):
    rows = [{"prompt": f"p{i}", "chosen": f'a, "{i}"\nline', "rejected": "b"} for i in range(5)]
    write_lines(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    (tmp_path / "c.json").write_text(json.dumps(rows, indent=1))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    import csv

    with open(tmp_path / "e.csv", "w", newline="") as out:
        writer = csv.DictWriter(out, ["prompt", "chosen", "rejected"])
        writer.writeheader()
        writer.writerows(rows)
    (tmp_path / "f.jsonl").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "a.jsonl").read_bytes().replace(b"\n", b"\r\n"))
    folder = tmp_path / "folder"
    folder.mkdir()
    write_lines(folder / "1.jsonl", rows[:2])
    write_lines(folder / "2.jsonl", rows[2:])
    (folder / "README.md").write_text("no data")
    hashes = {}
    for source in ("a.jsonl", "b.jsonl.gz", "c.json", "d.parquet", "e.csv", "f.jsonl", "folder", "folder/*.jsonl"):
        result = ingest(tmp_path / source, tmp_path / "w" / source.replace("/", "_"))
        assert result.counts["rows_in"] == 5 and not result.refused, source
        hashes[source] = result.data.manifest["dataset_hash"]
    assert len(set(hashes.values())) == 1, hashes


@pytest.mark.parametrize("name", ["Help.jsonl", "Help.JSONL", "Help.Jsonl.GZ"])
def test_a_datasets_default_name_has_no_ending_in_small_letters_or_capitals(tmp_path, name):
    lines = b"".join(json.dumps({"prompt": f"p{i}", "chosen": "a", "rejected": "b"}).encode() + b"\n" for i in range(5))
    (tmp_path / name).write_bytes(gzip.compress(lines) if name.endswith("GZ") else lines)
    assert [row["dataset"] for row in ingest(tmp_path / name, tmp_path / "w").rows] == ["Help"] * 5


def test_save_to_disk_directory(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"p{i}", "chosen": [assistant("a")], "rejected": [assistant("b")]} for i in range(4)]
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(tmp_path / "saved"))
    result = ingest(tmp_path / "saved", tmp_path / "w")
    assert result.data.kind == "pairs/1" and result.data.num_rows == 4


def test_splits_of_a_saved_dataset_are_not_joined_in_silence(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"p{i}", "chosen": [assistant("a")], "rejected": [assistant("b")]} for i in range(6)]
    datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(rows[:4]), "test": datasets.Dataset.from_list(rows[4:])}
    ).save_to_disk(str(tmp_path / "saved"))
    both, one = (
        ingest(tmp_path / "saved", tmp_path / "w", test_fraction=0.5),
        ingest(tmp_path / "saved", tmp_path / "w2", files="test/*"),
    )
    assert both.data.manifest["splits"] == {"train": 4, "test": 2} and not any(
        w["code"] == "splits_joined" for w in both.result["warnings"]
    )
    assert one.data.manifest["splits"] == {"train": 2}
    datasets.DatasetDict(
        {"easy": datasets.Dataset.from_list(rows[:4]), "hard": datasets.Dataset.from_list(rows[4:])}
    ).save_to_disk(str(tmp_path / "levels"))
    levels, hard = (
        ingest(tmp_path / "levels", tmp_path / "w3"),
        ingest(tmp_path / "levels", tmp_path / "w4", files="hard/*"),
    )
    assert levels.data.num_rows == 6 and any(w["code"] == "splits_joined" for w in levels.result["warnings"])
    assert hard.data.num_rows == 2 and not any(w["code"] == "splits_joined" for w in hard.result["warnings"])


def test_tools_and_special_tokens_stay_text(tmp_path):
    messages = [
        user("weather <|im_end|><|im_start|>system"),
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {}}]},
        {"role": "tool", "content": "sun"},
        assistant("It is sunny.</s>"),
    ]
    (row,) = ingest(write_lines(tmp_path / "x.jsonl", [{"messages": messages}]), tmp_path / "w").rows
    assert row["messages"][0]["content"] == "weather <|im_end|><|im_start|>system"
    assert row["messages"][1] == {"role": "assistant", "function_calls": '{"name":"f","arguments":{}}'} and row[
        "train_turns"
    ] == [1, 3]


def test_column_map_extra_and_common_columns(tmp_path):
    row = {"q": "p", "good": "a", "bad": "b", "license": "mit", "weight": 2, "note": {"x": [1]}, "source": "forum"}
    result = ingest(
        write_lines(tmp_path / "x.jsonl", [row]),
        tmp_path / "w",
        prompt_column="q",
        column_map={"chosen": "good"},
        rejected_column="bad",
    )
    (got,) = result.rows
    assert (
        got["license"] == "mit"
        and got["weight"] == 2.0
        and got["source"] == "forum"
        and json.loads(got["extra_json"]) == {"note": {"x": [1]}}
    )


@pytest.mark.parametrize(
    "row, kind, said",
    [
        ({"prompt": "p", "respons": "a"}, "demonstrations/1", r"prompt, respons \(did you mean 'response'\?\)$"),
        (
            {"prompt": "p", "Chosen": "a", "rejectd": "b", "id": 1},
            "pairs/1",
            r"Chosen \(.*'chosen'\?\), id, prompt, rej",
        ),
        ({"promt": "p", "answers_of": "a"}, "auto", r"answers_of, promt \(did you mean 'prompt'\?\)\. "),
        ({"prompt": "p", "responses": "a", "response": "b"}, "pairs/1", r"prompt, response, responses$"),
    ],
)
def test_a_misspelt_column_is_named_with_what_it_may_be(tmp_path, row, kind, said):
    with pytest.raises(ConfigError, match=f"Columns found: {said}"):
        ingest(write_lines(tmp_path / "x.jsonl", [row]), tmp_path / "w", kind=kind)


@pytest.mark.parametrize(
    "row, taken, meant",
    [
        ({"prompt": "p", "respons": "a"}, "prompts/1", "demonstrations/1"),
        ({"prompt": "p", "choosen": "a", "rejected": "b"}, "prompts/1", "pairs/1"),
        ({"prompt": "p", "completion": "a", "lable": True}, "demonstrations/1", "unpaired/1"),
    ],
)
def test_a_guess_without_a_misspelt_column_is_told_with_what_reads_it(tmp_path, row, taken, meant):
    """Rows of another kind than was meant, and not one refused: what was taken for what, and what to write."""
    path = write_lines(tmp_path / "x.jsonl", [row | {"prompt": f"question {i}"} for i in range(4)])
    unread = lambda result: [one["text"] for one in result.result["warnings"] if one["code"] == "column_unread"]
    result = ingest(path, tmp_path / "w")
    (told,) = unread(result)
    assert result.data.kind == taken and f"read as {taken}, without the columns" in told
    ours, theirs = told.partition("column_map='{")[2].partition("}'")[0].split(": ")
    again = ingest(path, tmp_path / "w2", column_map={ours: theirs})
    assert again.data.kind == meant and not unread(again)
    assert not unread(ingest(path, tmp_path / "w3", format="prompts", kind="prompts/1"))  # said, and not guessed
    fine = write_lines(tmp_path / "y.jsonl", [{"prompt": "p", "response": "a", "prompt_id": 1, "note": "n"}])
    assert not unread(ingest(fine, tmp_path / "w4"))


def test_unknown_columns_say_what_to_write(tmp_path):
    with pytest.raises(ConfigError, match="column_map"):
        ingest(write_lines(tmp_path / "x.jsonl", [{"foo": 1, "bar": 2}]), tmp_path / "w")
    with pytest.raises(ConfigError, match="neither a file"):
        ingest(tmp_path / "none.jsonl", tmp_path / "w2")
    with pytest.raises(ConfigError, match="cannot become ratings/1"):
        ingest(
            write_lines(tmp_path / "y.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}]),
            tmp_path / "w3",
            kind="ratings/1",
        )
    with pytest.raises(ConfigError, match="0.05 and 0.05"):
        ingest(tmp_path / "y.jsonl", tmp_path / "w4", validation_fraction=0.5, test_fraction=0.5)
    # the formats once, however many files fit none and whether the stage fails of it or goes on
    (tmp_path / "d").mkdir()
    for name in "abc":
        write_lines(tmp_path / "d" / f"{name}.jsonl", [{f"foo_{name}": 1, "bar": 2}])
    said = []
    with pytest.raises(StageFailure) as error:
        ingest(tmp_path / "d", tmp_path / "w5", emit=said.append, kind="pairs/1")
    assert (
        "alpaca_eval:" in str(error.value) and "alpaca_eval:" not in str(said) and "a.jsonl fits no known" in str(said)
    )
    write_lines(tmp_path / "d" / "A.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}])
    got = ingest(tmp_path / "d", tmp_path / "w6", kind="pairs/1", max_quarantine_fraction=1)
    told = [warning["text"] for warning in got.result["warnings"]]
    assert str(told).count("alpaca_eval:") == 1 and "Columns found: bar, foo_a, foo_b, foo_c." in str(told)


def test_conversions_from_pairs(tmp_path):
    source = write_lines(
        tmp_path / "x.jsonl",
        [
            {"prompt": "p1", "chosen": "good", "rejected": "bad", "weight": 3.0, "rejected_model": "m"},
            {"prompt": "p1", "chosen": "good", "rejected": "worse"},
            {"prompt": "p2", "chosen": "x", "rejected": "y"},
            {"prompt": "p2", "chosen": "y", "rejected": "z"},
        ],
    )
    unpaired = ingest(source, tmp_path / "u", kind="unpaired/1")
    assert [(r["prompt"][0]["content"], r["completion"][0]["content"], r["label"]) for r in unpaired.rows] == [
        ("p1", "good", True),
        ("p1", "bad", False),
        ("p1", "worse", False),
        ("p2", "x", True),
        ("p2", "z", False),
    ]
    assert [r["weight"] for r in unpaired.rows] == [2.0, 3.0, 1.0, 1.0, 1.0], "the mean of the pairs that have a text"
    assert [r["gen"] and r["gen"]["model_id"] for r in unpaired.rows] == [None, "m", None, None, None]
    assert [len(json.loads(r["extra_json"])["row_ids"]) for r in unpaired.rows] == [2, 1, 1, 1, 1]
    assert unpaired.counts["conversion"]["dropped"] == {"conflict": 1} and unpaired.counts["rows_kept"] == 4
    prompts = ingest(source, tmp_path / "p", kind="prompts/1")
    assert [r["prompt"][0]["content"] for r in prompts.rows] == ["p1", "p2"] and prompts.counts["conversion"][
        "dropped"
    ] == {"duplicate_prompt": 2}
    assert ingest(prompts.data.path, tmp_path / "p2", kind="prompts/1").rows == prompts.rows
    demos = ingest(source, tmp_path / "d", kind="demonstrations/1")
    assert [r["messages"][-1]["content"] for r in demos.rows] == ["good", "x", "y"] and demos.counts["conversion"][
        "dropped"
    ] == {"duplicate_after_conversion": 1}
    assert all(r["origin"] == "conversion" and json.loads(r["extra_json"])["row_ids"] for r in demos.rows)
    ranking = ingest(source, tmp_path / "r", kind="rankings/1")
    assert [(r["ranks"], r["weight"]) for r in ranking.rows] == [([0, 1, 1], 2.0), ([0, 1, 2], 1.0)]
    pairs = ingest(source, tmp_path / "pp")  # a dataset of ours as input
    again = ingest(pairs.workdir / "out" / "data", tmp_path / "uu", kind="unpaired/1")
    assert [r["row_id"] for r in again.rows] == [r["row_id"] for r in unpaired.rows]


def test_the_same_rating_by_two_people_or_groups_is_two_rows(tmp_path):
    rated = {"prompt": "p", "completion": "c", "score": 4}
    rows = ingest(
        write_lines(
            tmp_path / "r.jsonl",
            [
                {**rated, "annotator_id": "ann"},
                {**rated, "annotator_id": 7},
                {**rated, "group": "g"},
                {**rated, "group": "g"},
            ],
        ),
        tmp_path / "w",
        max_quarantine_fraction=0.5,
    ).rows
    assert [r["ann"]["annotator_id"] for r in rows] == ["ann", "7", "g"] and len({r["row_id"] for r in rows}) == 3
    assert [json.loads(r["extra_json"] or "{}") for r in rows] == [{}, {}, {"group": "g"}]


def test_ratings_and_thumbs_become_pairs(tmp_path):
    ratings = write_lines(
        tmp_path / "r.jsonl",
        [
            {"prompt": p, "completion": c, "score": s}
            for p, c, s in (("p", "a", 4), ("q", "x", 3), ("p", "b", 2), ("p", "c", 4), ("q", "y", 3), ("p", "d", 1))
        ],
    )
    result = ingest(ratings, tmp_path / "w", kind="pairs/1", margin_mode="score_diff")
    assert [(r["chosen"][0]["content"], r["rejected"][0]["content"], r["margin"]) for r in result.rows] == [
        ("a", "d", 3.0),
        ("c", "d", 3.0),
        ("a", "b", 2.0),
        ("c", "b", 2.0),
        ("b", "d", 1.0),
    ]
    assert all(r["pairs_in_group"] == 5 and r["weight"] == 0.2 for r in result.rows)
    assert result.counts["codes"] == {"no_pair": 2} and result.codes() == {2: ["no_pair"], 5: ["no_pair"]}
    ranking = ingest(ratings, tmp_path / "k", kind="rankings/1")
    assert [r["ranks"] for r in ranking.rows] == [[0, 1, 0, 2]] and ranking.codes() == {
        2: ["all_tied"],
        5: ["all_tied"],
    }
    thumbs = write_lines(
        tmp_path / "t.jsonl",
        [{"prompt": "p", "completion": c, "label": c[0] == "d"} for c in ("d0", "u0", "d1", "u1", "u2")],
    )
    made = ingest(thumbs, tmp_path / "t", kind="pairs/1", max_pairs_per_prompt=4)
    assert [(r["chosen"][0]["content"], r["rejected"][0]["content"]) for r in made.rows] == [
        ("d0", "u0"),
        ("d0", "u1"),
        ("d0", "u2"),
        ("d1", "u0"),
    ]
    labelled = ingest(ratings, tmp_path / "l", kind="unpaired/1", threshold=3)
    assert sum(r["label"] for r in labelled.rows) == 4


def said(row: dict, *columns: str) -> tuple:
    return tuple(row[name][0]["content"] for name in columns)


def test_scores_of_different_people_are_not_compared(tmp_path):
    """A strict and a lenient rater who agree give one pair, in one direction; who rated one answer only, none."""
    rated = lambda who, **scores: [
        {"prompt": "p", "completion": text, "score": score, "annotator_id": who} for text, score in scores.items()
    ]
    path = write_lines(
        tmp_path / "r.jsonl",
        [
            *rated("strict", x=2, y=1, z=1),
            *rated("lenient", x=5, y=4),
            *rated("third", x=3, y=4),
            *rated("fourth", z=9),
        ],
    )
    pairs = ingest(path, tmp_path / "p", kind="pairs/1", margin_mode="score_diff", soft_label="prob").rows
    assert [
        (*said(r, "chosen", "rejected"), r["chosen_score"], r["rejected_score"], r["margin"], r["label_prob"])
        for r in pairs
    ] == [("x", "y", 2, 1, 1, pytest.approx(2 / 3)), ("x", "z", 2, 1, 1, None)]
    assert (
        pairs[0]["ann"] is None
        and pairs[1]["ann"]["annotator_id"] == "strict"
        and len(json.loads(pairs[0]["extra_json"])["row_ids"]) == 6
    )
    even = write_lines(tmp_path / "e.jsonl", [*rated("a", x=2, y=1), *rated("b", x=1, y=2)])
    assert ingest(even, tmp_path / "t", kind="pairs/1", max_quarantine_fraction=1).codes() == {
        n: ["no_pair"] for n in range(1, 5)
    }
    rankings = ingest(path, tmp_path / "k", kind="rankings/1", max_quarantine_fraction=1)
    assert [(r["ann"]["annotator_id"], r["ranks"]) for r in rankings.rows] == [
        ("strict", [0, 1, 1]),
        ("lenient", [0, 1]),
        ("third", [1, 0]),
    ] and rankings.codes() == {8: ["no_pair"]}
    best = ingest(path, tmp_path / "d", kind="demonstrations/1").rows
    assert [r["messages"][-1]["content"] for r in best] == ["x"], "z has the highest score, of one person"


@pytest.mark.parametrize(
    "scores, margin, pairs", [((0.95, 0.05), None, 1), ((90, 10), 1.0, 1), ((0.95, 0.05), 1.0, 0), ((1, 1), None, 0)]
)
def test_ratings_on_any_scale_become_pairs(tmp_path, scores, margin, pairs):
    path = write_lines(
        tmp_path / "r.jsonl", [{"prompt": "p", "completion": text, "score": score} for text, score in zip("xy", scores)]
    )
    assert len(ingest(path, tmp_path / "w", kind="pairs/1", min_margin=margin, max_quarantine_fraction=1).rows) == pairs


def test_pairs_carry_the_weight_of_their_rows(tmp_path):
    """A prompt counts as much as its rows do, however many pairs they give."""
    ratings = write_lines(
        tmp_path / "r.jsonl",
        [{"prompt": "p", "completion": text, "score": score, "weight": 0.5} for text, score in zip("xyz", (3, 2, 1))],
    )
    thumbs = write_lines(
        tmp_path / "t.jsonl",
        [{"prompt": "p", "completion": text, "label": text == "x", "weight": 0.5} for text in "xyz"],
    )
    assert [r["weight"] for r in ingest(ratings, tmp_path / "a", kind="pairs/1").rows] == pytest.approx([0.5 / 3] * 3)
    assert [r["weight"] for r in ingest(thumbs, tmp_path / "b", kind="pairs/1").rows] == [0.25, 0.25]


TURNS = [user("one"), assistant("1"), user("two"), assistant("2")]


@pytest.mark.parametrize(
    "rows, kind, config, kept",
    [
        ([{"prompt": "p", "chosen": "good", "rejected": f"bad {i}"} for i in range(4)], "demonstrations/1", {}, 1),
        (
            [
                {"prompt": "p", "response_a": a, "response_b": b, "label": label}
                for a, b, label in (("x", "y", 1), ("y", "x", 5))
            ],
            "pairs/1",
            {"n_points": 5},
            1,
        ),
        (
            [
                {"messages": [*TURNS, user("three"), assistant("3")]},
                {"messages": [*TURNS, user("four"), assistant("4")]},
            ],
            "demonstrations/1",
            {"multiturn": "all_turns"},
            4,
        ),
    ],
)
def test_rows_that_conversions_repeat_are_written_once_and_counted(tmp_path, rows, kind, config, kept):
    source = write_lines(tmp_path / "x.jsonl", rows)
    result = ingest(source, tmp_path / "w", kind=kind, **config)
    total = ingest(source, tmp_path / "v", kind=kind, deduplicate="off", **config).counts["rows_out"]
    assert len({r["row_id"] for r in result.rows}) == len(result.rows) == kept and result.counts["conversion"][
        "dropped"
    ] == {"duplicate_after_conversion": total - kept}
    if "multiturn" in config:  # the same from a dataset of ours
        again = ingest(ingest(source, tmp_path / "o").data.path, tmp_path / "u", kind=kind, **config).rows
        assert {r["row_id"] for r in again} == {r["row_id"] for r in result.rows} and {
            r["prompt_id"] for r in again
        } == {r["prompt_id"] for r in result.rows}


@pytest.mark.parametrize(
    "kind, found",
    [
        ("unpaired/1", [("x", True), ("z", False)]),
        ("demonstrations/1", ["x"]),
        ("rankings/1", [(["x", "y", "z"], [0, 0, 1])]),
    ],
)
def test_ties_stay_ties_in_kinds_without_soft_labels(tmp_path, kind, found):
    pairs = [
        {"prompt": "p", "chosen": "x", "rejected": "y", "label_prob": 0.5},
        {"prompt": "p", "chosen": "x", "rejected": "z"},
    ]
    result = ingest(write_lines(tmp_path / "x.jsonl", pairs), tmp_path / "w", kind=kind, max_quarantine_fraction=1)
    read = {
        "unpaired/1": lambda r: (*said(r, "completion"), r["label"]),
        "demonstrations/1": lambda r: r["messages"][-1]["content"],
        "rankings/1": lambda r: ([c[0]["content"] for c in r["completions"]], r["ranks"]),
    }[kind]
    assert [read(r) for r in result.rows] == found and result.codes() == (
        {} if kind == "rankings/1" else {1: ["all_tied"]}
    )
    only = ingest(
        write_lines(tmp_path / "y.jsonl", [{"prompt": "p", "response_a": "x", "response_b": "y", "label": 3}]),
        tmp_path / "v",
        kind=kind,
        n_points=5,
        tie_policy="soft",
        max_quarantine_fraction=1,
    )
    assert only.rows == [] and only.codes() == {1: ["all_tied"]}


def test_a_ranking_against_its_scores_is_refused(tmp_path):
    source = write_lines(
        tmp_path / "x.jsonl",
        [
            {"prompt": f"p{i}", "completions": ["x", "y"], "ranks": [0, 1], "scores": scores}
            for i, scores in enumerate(([1, 5], [5, 1], [3, 3]))
        ],
    )
    result = ingest(source, tmp_path / "w", kind="pairs/1", margin_mode="score_diff", max_quarantine_fraction=1)
    assert [r["margin"] for r in result.rows] == [4] and result.codes() == {1: ["score_inconsistent"], 3: ["no_pair"]}


def test_a_rank_gap_is_the_same_stage_in_every_ranking(tmp_path):
    rows = [
        {"prompt": "p", "completions": ["x", "y"], "ranks": [0, 1]},
        {"prompt": "q", "completions": list("abcd"), "ranks": [0, 1, 2, 3]},
    ]
    pairs = ingest(write_lines(tmp_path / "x.jsonl", rows), tmp_path / "w", kind="pairs/1", pair_mode="rank_gap").rows
    assert [(r["rank_gap"], r["stage_index"]) for r in pairs] == [
        (1, 2),
        (3, 0),
        (2, 1),
        (2, 1),
        (1, 2),
        (1, 2),
        (1, 2),
    ]


@pytest.mark.parametrize(
    "mode, count",
    [("all", 6), ("best_vs_rest", 3), ("best_worst", 1), ("adjacent", 3), ("best_vs_random", 1), ("rank_gap", 6)],
)
def test_ranking_modes(tmp_path, mode, count):
    source = write_lines(tmp_path / "x.jsonl", [{"prompt": "p", "completions": list("abcd"), "ranks": [2, 0, 3, 1]}])
    rows = ingest(source, tmp_path / "w", kind="pairs/1", pair_mode=mode).rows
    assert (
        len(rows) == count
        and abs(sum(r["weight"] for r in rows) - 1) < 1e-12
        and {r["pairs_in_group"] for r in rows} == {count}
    )
    if mode == "rank_gap":
        assert [(r["rank_gap"], r["stage_index"]) for r in rows] == [(3, 0), (2, 1), (2, 1), (1, 2), (1, 2), (1, 2)]


def test_likert_soft_labels_ties_and_margins(tmp_path):
    rows = [{"prompt": f"p{v}", "response_a": "a", "response_b": "b", "label": v} for v in range(1, 9)]
    result = ingest(
        write_lines(tmp_path / "x.jsonl", rows),
        tmp_path / "w",
        n_points=8,
        margin_mode="llama2_large",
        soft_label="linear",
    )
    assert [r["strength"] for r in result.rows] == [4, 3, 2, 1, 1, 2, 3, 4] and [r["margin"] for r in result.rows] == [
        3,
        2,
        1,
        0,
        0,
        1,
        2,
        3,
    ]
    assert [r["chosen"][0]["content"] for r in result.rows] == list("aaaabbbb") and all(
        r["label_prob"] > 0.5 for r in result.rows
    )
    tie = write_lines(
        tmp_path / "t.jsonl",
        [{"prompt": "p", "response_a": "a", "response_b": "b", "label": 3}]
        + [{"prompt": f"q{i}", "response_a": "a", "response_b": "b", "label": 9} for i in range(1)]
        + [{"prompt": f"r{i}", "response_a": "a", "response_b": "b", "label": 1} for i in range(8)],
    )
    assert ingest(tie, tmp_path / "t", n_points=5).codes() == {1: ["all_tied"], 2: ["bad_label"]}
    soft = ingest(tie, tmp_path / "s", tie_policy="soft", n_points=5)
    assert soft.rows[0]["label_prob"] == 0.5 and soft.codes() == {2: ["bad_label"]}


def test_a_dataset_with_held_out_rows_keeps_its_splits(tmp_path):
    """One without is split like a file; of a kind of its own or converted, the same prompts are held out."""
    source = write_lines(
        tmp_path / "x.jsonl", [{"prompt": f"prompt {i}", "chosen": "a", "rejected": "b"} for i in range(60)]
    )
    plain, split = ingest(source, tmp_path / "plain"), ingest(source, tmp_path / "split", test_fraction=0.3)
    held = {r["prompt_id"] for r in split.rows if r["split"] == "test"}
    assert (
        8 < len(held) < 30
        and {r["split"] for r in plain.rows} == {"train"}
        and split.result["summary"]["split.test"] == len(held)
    )
    for number, (start, share, kind) in enumerate(
        [
            (plain, 0.3, "pairs/1"),
            (plain, 0.3, "unpaired/1"),
            (split, 0.6, "pairs/1"),
            (split, 0.6, "prompts/1"),
            (split, 0.0, "unpaired/1"),
        ]
    ):
        rows = ingest(start.workdir / "out" / "data", tmp_path / f"again-{number}", test_fraction=share, kind=kind).rows
        assert {r["prompt_id"] for r in rows if r["split"] == "test"} == held, (number, kind)


def test_system_prompts_can_be_merged_or_left_out(tmp_path):
    """For templates without a system role. What is trained stays what it was, and definitions of tools stay where they
    are.
    """
    system, tools = (
        {"role": "system", "content": " be brief "},
        {
            "role": "system",
            "content": "",
            "functions": '[{"name": "f"}]',
        },
    )
    source = write_lines(
        tmp_path / "x.jsonl",
        [
            {"messages": [system, *CONVERSATION]},
            {"messages": [tools, user("call"), assistant("3")]},
            {"messages": [user("plain"), assistant("4")]},
        ],
    )
    merged = ingest(source, tmp_path / "m", system_prompts="merge").rows
    assert [[m["content"] for m in r["messages"]] for r in merged] == [
        ["be brief\n\none", "1", "two", "2"],
        ["", "call", "3"],
        ["plain", "4"],
    ]
    assert [r["train_turns"] for r in merged] == [[1, 3], [2], [1]] and merged[0]["messages"][0]["role"] == "user"
    dropped = ingest(source, tmp_path / "d", system_prompts="drop").rows
    assert [m["content"] for m in dropped[0]["messages"]] == ["one", "1", "two", "2"] and dropped[0]["train_turns"] == [
        1,
        3,
    ]
    kept = ingest(source, tmp_path / "k")
    assert kept.rows[0]["messages"][0]["role"] == "system" and kept.rows[0]["train_turns"] == [2, 4]
    pairs = write_lines(
        tmp_path / "y.jsonl",
        [
            {"prompt": "p", "system": "s", "chosen": "a", "rejected": "b"},
            {"prompt": [{"role": "system", "content": "only"}], "chosen": "a", "rejected": "b"},
        ],
    )
    assert [r["prompt"] for r in ingest(pairs, tmp_path / "p", kind="pairs/1", system_prompts="merge").rows] == [
        [user("s\n\np")],
        [user("only")],
    ]
    with pytest.raises(ConfigError, match="ingest its files"):
        ingest(tmp_path / "k" / "out" / "data", tmp_path / "again", system_prompts="merge")


def test_multiturn_policies_keep_conversations_together(tmp_path):
    source = write_lines(tmp_path / "x.jsonl", [{"messages": [{"role": "system", "content": ""}, *CONVERSATION]}])
    rows = ingest(source, tmp_path / "w", multiturn="all_turns", balance="per_conversation").rows
    assert [(len(r["messages"]), r["train_turns"], r["weight"]) for r in rows] == [(3, [2], 0.5), (5, [4], 0.5)]
    assert len({r["group_id"] for r in rows}) == 1 and len({r["prompt_id"] for r in rows}) == 2
    assert [r["train_turns"] for r in ingest(source, tmp_path / "v", multiturn="final_turn").rows] == [[4]]


def test_duplicates_contradictions_and_policies(tmp_path):
    lines = [("p", "x", "y"), ("p", "y", "x"), ("p", "x", "y"), ("p", "hello", "HELLO"), ("q", "a", "a ")] + [
        (f"r{i}", "1", "2") for i in range(20)
    ]
    source = write_lines(tmp_path / "x.jsonl", [{"prompt": p, "chosen": a, "rejected": b} for p, a, b in lines])
    assert ingest(source, tmp_path / "w").codes() == {
        2: ["contradicts_row"],
        3: ["duplicate_row"],
        5: ["chosen_equals_rejected"],
    }
    assert ingest(source, tmp_path / "b", contradictions="drop_both").codes() == {
        1: ["contradicts_row"],
        2: ["contradicts_row"],
        3: ["duplicate_row"],
        5: ["chosen_equals_rejected"],
    }
    kept = ingest(source, tmp_path / "v", contradictions="keep_as_votes", deduplicate="off")
    assert kept.rows[0]["label_prob"] == pytest.approx(2 / 3) and kept.counts["conversion"]["dropped"] == {
        "merged_votes": 2
    }
    assert ingest(source, tmp_path / "o", contradictions="off").codes() == {
        3: ["duplicate_row"],
        5: ["chosen_equals_rejected"],
    }


def test_prompts_are_deduplicated_up_to_case_and_space(tmp_path):
    source = write_lines(
        tmp_path / "x.jsonl",
        [{"prompt": "What  is it?"}, {"prompt": "what is IT? "}, *({"prompt": f"p{i}"} for i in range(9))],
    )
    assert ingest(source, tmp_path / "w").codes() == {2: ["duplicate_row"]}
    assert not ingest(source, tmp_path / "v", deduplicate="exact").refused


def test_a_prompt_that_comes_again_with_another_answer_is_no_mere_duplicate(tmp_path):
    rows = [
        {"prompt": "2+2?", "answer": "4"},
        {"prompt": "2+2? ", "answer": 5},
        {"prompt": "2+2?", "answer": " 4"},
        {"prompt": "2+2?"},
        {"prompt": "2+2?", "answer": "5"},
        {"prompt": "open"},
        {"prompt": "open", "answer": "x"},
        *({"prompt": f"p{i}", "answer": "1"} for i in range(30)),
    ]
    source = write_lines(tmp_path / "x.jsonl", rows)
    found = ingest(source, tmp_path / "w")
    assert (
        found.codes()
        == {
            2: ["contradicts_row"],
            3: ["duplicate_row"],
            4: ["duplicate_row"],
            5: ["contradicts_row"],
            7: ["duplicate_row"],
        }
        and found.rows[0]["answer"] == "4"
    )
    assert set(map(str, ingest(source, tmp_path / "v", contradictions="off").codes().values())) == {"['duplicate_row']"}
    assert {row["answer"] for row in ingest(source, tmp_path / "u", deduplicate="exact").rows[:2]} == {"4", "5"}


def test_splits_are_by_group_and_stable(tmp_path):
    rows = [{"prompt": f"p{i % 100}", "chosen": f"a{i}", "rejected": "b"} for i in range(300)]
    result = ingest(write_lines(tmp_path / "x.jsonl", rows), tmp_path / "w", validation_fraction=0.2, test_fraction=0.2)
    splits: dict = {}
    for row in result.rows:
        splits.setdefault(row["prompt_id"], set()).add(row["split"])
    assert all(len(found) == 1 for found in splits.values()) and set(result.data.manifest["splits"]) == {
        "train",
        "validation",
        "test",
    }
    more = ingest(
        write_lines(
            tmp_path / "y.jsonl", rows + [{"prompt": f"new{i}", "chosen": "a", "rejected": "b"} for i in range(50)]
        ),
        tmp_path / "v",
        validation_fraction=0.2,
        test_fraction=0.2,
    )
    assert {r["row_id"]: r["split"] for r in more.rows}.items() >= {
        r["row_id"]: r["split"] for r in result.rows
    }.items()
    assert set(ingest(tmp_path / "x.jsonl", tmp_path / "h", halves=True).data.manifest["splits"]) == {"rm_a", "rm_b"}
    again = ingest(result.data.path, tmp_path / "again", halves=True).rows
    held_out = {r["row_id"] for r in result.rows if r["split"] != "train"}
    assert {r["row_id"] for r in again if r["split"] in ("validation", "test")} == held_out and {
        r["split"] for r in again if r["row_id"] not in held_out
    } == {"rm_a", "rm_b"}


@pytest.mark.parametrize("shared", [20, 50, 70, 90])
def test_bands_find_what_their_theory_says(shared):
    """Sets with Jaccard similarity J share a band with probability 1 - (1 - J^rows)^bands, as far as independent
    permutations go (Leskovec et al., Mining of Massive Datasets, 3.4).
    """
    from stages.ingestion.curation import MinHash, jaccard

    bands, found, pairs = MinHash(0.8), 0, 300
    for i in range(pairs):
        same = {(i, "both", j) for j in range(shared)}
        left, right = (same | {(i, side, j) for j in range((100 - shared) // 2)} for side in "ab")
        found += bool(set(bands.keys(left)) & set(bands.keys(right)))
    similarity = jaccard(left, right)
    expected = 1 - (1 - similarity**bands.rows) ** bands.bands
    assert (
        abs(similarity - shared / 100) < 1e-9
        and abs(found / pairs - expected) < 4 * max(0.05, (expected * (1 - expected)) ** 0.5) / pairs**0.5 + 0.01
    )


def test_near_duplicates(tmp_path):
    base = " ".join(f"word{i}" for i in range(60))
    prompts = [
        base,
        base + " more",
        base + " again thing",
        *(" ".join(f"other{i}x{j}" for j in range(20)) for i in range(12)),
    ]
    source = write_lines(tmp_path / "x.jsonl", [{"prompt": p} for p in prompts])
    assert ingest(source, tmp_path / "w", near_duplicates="keep_first").codes() == {
        2: ["near_duplicate"],
        3: ["near_duplicate"],
    }
    rows = ingest(source, tmp_path / "g", near_duplicates="group", validation_fraction=0.3).rows
    assert (
        len({r["group_id"] for r in rows[:3]}) == 1
        and len({r["group_id"] for r in rows}) == 13
        and len({r["split"] for r in rows[:3]}) == 1
    )


def test_decontamination(tmp_path):
    item = " ".join(f"token{i}" for i in range(12))
    bench = write_lines(tmp_path / "bench.jsonl", [{"question": item, "answer": "#### 3"}])
    source = write_lines(
        tmp_path / "x.jsonl",
        [
            {"prompt": "well " + item[:90] + " end"},
            {"prompt": " ".join(item.split()[:8]) + " and then something else"},
            {"prompt": "clean"},
        ],
    )
    result = ingest(source, tmp_path / "w", inputs={"benchmarks.b": bench}, decontaminate="coverage")
    assert (
        result.codes() == {1: ["contaminated"], 2: ["contaminated"]}
        and result.counts["decontamination"]["eval_rows_over_threshold"] == 1
    )
    with pytest.raises(ConfigError, match="benchmarks"):
        ingest(source, tmp_path / "v", decontaminate="coverage")


def test_columns_inside_of_others_are_named(tmp_path):
    """Rows with the two answers in one column were prompts alone, and what was said named no way to them."""
    nested = [{"prompt": f"q {i}", "pair": {"chosen": f"good {i}", "rejected": f"bad {i}"}} for i in range(4)]
    path = write_lines(tmp_path / "nested.jsonl", nested)
    with pytest.raises(ConfigError, match=r"column_map='\{chosen: pair.chosen, rejected: pair.rejected\}'"):
        ingest(path, tmp_path / "w", kind="pairs/1")
    told = {"chosen": "pair.chosen", "rejected": "pair.rejected"}
    assert ingest(path, tmp_path / "v", kind="pairs/1", column_map=told).result["summary"]["rows_kept"] == 4


def test_matching_kind(tmp_path):
    pairs = write_lines(tmp_path / "p.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}])
    math = write_lines(tmp_path / "m.jsonl", [{"question": "q", "answer": "#### 3"}])
    assert matching_kind(str(pairs), ("demonstrations/1", "text/1")) == "demonstrations/1"
    assert matching_kind(str(math), ("demonstrations/1", "text/1")) == "demonstrations/1"
    assert matching_kind(str(math), ("prompts/1",)) == "prompts/1"
    assert matching_kind(str(math), ("pairs/1",)) is None
    only = write_lines(tmp_path / "only.jsonl", [{"prompt": "why?"}])
    # it was looked for as rows that only stages make, with an error of pydantic's
    assert matching_kind(str(only), SPEC.inputs["data"].kinds) is None and "trajectories/1" in SPEC.inputs["data"].kinds


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared data files")
def test_real_hh(tmp_path):
    result = ingest(SHARED / "hh_harmless_base_test.jsonl.gz", tmp_path / "w")
    assert result.counts["rows_in"] == 2312 and result.counts["rows_kept"] == 2299
    assert result.counts["codes"] == {"empty_completion": 4, "non_alternating": 9, "prompt_mismatch": 5}
    assert result.counts["bias"]["char_diff_mean"] == pytest.approx(-42.73205741626794)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared data files")
def test_real_alpaca_eval_and_gsm8k(tmp_path):
    result = ingest(SHARED / "alpaca_eval_gpt4_preferences.jsonl.gz", tmp_path / "w", limit=2000)
    assert result.counts["rows_in"] == 2000 and all(
        0.5 < r["label_prob"] <= 1 for r in result.data.iter_rows(["label_prob"])
    )
    prompts = ingest(SHARED / "gsm8k_test.jsonl", tmp_path / "g")
    assert (
        prompts.data.kind == "prompts/1"
        and prompts.data.num_rows == 1319
        and {r["answer_type"] for r in prompts.data.iter_rows(["answer_type"])} == {"integer"}
    )


def test_a_dataset_of_ours_keeps_its_splits_through_a_conversion(tmp_path):
    """Held-out rows of a dataset must not become training rows because its kind changes."""
    from storage.datasets import write_dataset
    from storage.schema import complete_row

    rows = [
        complete_row(
            "comparisons/1",
            {
                "prompt": [{"role": "user", "content": f"question {i}"}],
                "response_a": [{"role": "assistant", "content": f"good {i}"}],
                "response_b": [{"role": "assistant", "content": f"bad {i}"}],
                "label_kind": "choice",
                "votes": ["A"],
                "ann": {"annotator_type": "human"},
            },
            dataset="made",
            source="s",
            origin="human",
            split=("train", "validation", "test")[i % 3],
        )
        for i in range(30)
    ]
    write_dataset(tmp_path / "comparisons", "comparisons", "comparisons/1", rows)
    result = ingest(tmp_path / "comparisons", tmp_path / "out", kind="pairs/1")
    assert result.data.manifest["splits"] == {"train": 10, "validation": 10, "test": 10}
    assert {r["prompt"][0]["content"]: r["split"] for r in result.rows} == {
        r["prompt"][0]["content"]: r["split"] for r in rows
    }


def test_segments(tmp_path):
    """2D-DPO rows: scored half-open spans of both answers; a span outside its text is refused; they become plain pairs
    too.
    """
    good = {
        "prompt": "q",
        "chosen": "one. two.",
        "rejected": "three.",
        "chosen_segments": [{"start": 0, "end": 4, "scores": {"help": 0.9, "safe": 0.5}}],
        "rejected_segments": [{"start": 0, "end": 6, "scores": [{"aspect": "help", "score": 0.1}]}],
    }
    bad = {**good, "prompt": "r", "rejected_segments": [{"start": 0, "end": 60, "scores": {"help": 0.1}}]}
    path = write_lines(tmp_path / "segments.jsonl", [good, bad, *({**good, "prompt": p} for p in "stuvw")])
    assert (
        matching_kind(str(path), ("pairs/1", "segments/1")) == "segments/1"
        and matching_kind(str(path), ("pairs/1",)) == "pairs/1"
    )
    done = ingest(path, tmp_path / "w")
    assert done.data.kind == "segments/1" and len(done.rows) == 6 and done.codes() == {2: ["span_out_of_range"]}
    assert done.rows[0]["chosen_segments"] == [
        {
            "start": 0,
            "end": 4,
            "scores": [
                {"aspect": "help", "score": 0.9, "rationale": None},
                {"aspect": "safe", "score": 0.5, "rationale": None},
            ],
        }
    ]
    pairs = ingest(path, tmp_path / "w2", kind="pairs/1")
    assert pairs.data.kind == "pairs/1" and content(pairs.rows[0], "chosen") == {"chosen": [assistant("one. two.")]}


def test_the_bias_report_says_what_tells_chosen_from_rejected_answers(tmp_path):
    """30 comparisons by hand: the first answer wins 20 times and is then the longer one; winners begin with "Sure
    thing", agree with opinions, use lists.
    """
    rows = []
    for i in range(30):
        good, bad = f"Sure thing, you're right about {i}:\n- one\n- two", f"I can't say {i}"
        rows.append(
            {
                "prompt": f"I think {i} is prime" if i % 2 else f"is {i} prime?",
                "response_a": good if i < 20 else bad,
                "response_b": bad if i < 20 else good,
                "label": 1 if i < 20 else 5,
            }
        )
    result = ingest(write_lines(tmp_path / "c.jsonl", rows), tmp_path / "run", n_points=5)
    bias = result.counts["bias"]
    assert (
        bias["pairs"] == 30
        and bias["first_position_rate"] == 20 / 30
        and bias["length_label_correlation"] == pytest.approx(1.0, abs=0.01)
    )
    assert (
        bias["list_rate_chosen"],
        bias["list_rate_rejected"],
        bias["refusal_rate_chosen"],
        bias["refusal_rate_rejected"],
    ) == (1, 0, 0, 1)
    assert (bias["prompts_with_opinion"], bias["agreement_rate_chosen"], bias["agreement_rate_rejected"]) == (15, 1, 0)
    assert (
        bias["strength_2"] == 30
        and bias["char_diff_p10"] <= bias["char_diff_p50"] <= bias["char_diff_p90"]
        and bias["heading_rate_chosen"] == bias["emoji_rate_chosen"] == 0
    )
    lengths = sorted(
        len(row["response_a"] if i < 20 else row["response_b"])
        - len(row["response_b"] if i < 20 else row["response_a"])
        for i, row in enumerate(rows)
    )
    assert bias["char_diff_p50"] == lengths[14]
    found = {row["prefix"]: (row["chosen"], row["rejected"]) for row in result.counts["prefixes"]}
    assert found == {"sure thing, you're": (30, 0), "i can't say": (0, 30)}  # shorter beginnings say the same
    z = next(row["z"] for row in result.counts["prefixes"] if row["chosen"])
    assert abs(bias["max_prefix_z"]) == pytest.approx(z) and z == pytest.approx(
        math.log(30.5 * 30.5 / 0.25) / math.sqrt(2 / 30.5 + 4)
    )
    assert any(
        "sure thing" in w["text"] and "30 times chosen, 0 times rejected" in w["text"]
        for w in result.result["warnings"]
        if w["code"] == "bias"
    )
    assert bias["script_latin"] == 1.0
    mixed = ingest(
        write_lines(
            tmp_path / "m.jsonl",
            [{"prompt": "p", "chosen": text, "rejected": "no"} for text in ("да, это так", "yes", "42", "да нет yes")],
        ),
        tmp_path / "m",
    )
    assert {name: value for name, value in mixed.counts["bias"].items() if name.startswith("script_")} == {
        "script_cyrillic": 0.5,
        "script_latin": 0.25,
        "script_none": 0.25,
    }
