"""A task for people and what comes back of it: blind order, votes, and what is no answer."""

import csv
import json
from pathlib import Path

import pytest

from stages.harness import execute
from stages.human_answers import read_answers
from stages.human_task import as_row
from stages.spec import ConfigError
from storage.datasets import open_dataset, write_dataset
from storage.schema import complete_row
from tests.common import BESIDE, assistant, beside, user
from tests.evaluation.test_stages import spec


@pytest.fixture()
def pairs(tmp_path):
    rows = [
        complete_row(
            "pairs/1",
            {"prompt": user(f"question {i}"), "chosen": assistant(f"good {i}"), "rejected": assistant(f"bad {i}")},
            dataset="made",
            source="s",
            origin="ai",
            split=("train", "test")[i % 4 == 0],
        )
        for i in range(12)
    ]
    write_dataset(str(tmp_path / "pairs"), "made", "pairs/1", rows)
    return str(tmp_path / "pairs")


def asked(tmp_path, data, **config):
    execute(spec("human_task", tmp_path / "task", {"data": data}, config))
    return str(tmp_path / "task" / "out" / "tasks")


def fill(path, tasks, choose, columns=("item_id", "choice", "annotator")):
    """Writes the filled file: ``choose(item, shown)`` gives the lines' (entry, annotator)."""
    with open(path, "w", encoding="utf-8", newline="") as handle:
        out = csv.writer(handle)
        out.writerow(columns)
        for row in open_dataset(tasks).iter_rows():
            out.writerows(
                [row["item_id"], entry, who] for entry, who in choose(row["item_id"], json.loads(row["shown_json"]))
            )
    return str(path)


def answered(tmp_path, data, tasks, file=None, name="answers", **config):
    made = spec("human_answers", tmp_path / name, {"tasks": tasks, "data": data}, config)
    if file:
        made["inputs"]["answers"] = {"path": file, "kind": "file", "digest": "d"}
    result = execute(made)
    return result, list(open_dataset(tmp_path / name / "out" / "data").iter_rows())


def place(shown, word):
    return str(1 + next(k for k, answer in enumerate(shown["answers"]) if answer[0]["content"].startswith(word)))


def test_nobody_can_tell_the_chosen_answer_from_its_place(tmp_path, pairs):
    tasks = asked(tmp_path, pairs)
    rows = [json.loads(row["shown_json"]) for row in open_dataset(tasks).iter_rows()]
    places = [place(shown, "good") for shown in rows]
    assert len(rows) == 12 and {"1", "2"} == set(places)
    line = as_row("compare", "i", rows[0])
    assert (
        list(line) == ["item_id", "prompt", "answer_1", "answer_2", "choice", "annotator", "comment"]
        and line["choice"] == ""
        and line["prompt"].startswith("question")
    )
    assert len(list(open_dataset(asked(tmp_path / "few", pairs, limit=5, split="train")).iter_rows())) == 5


def test_people_are_not_asked_about_a_cut_answer(tmp_path, pairs):
    """As of candidates: they could prefer it, and it has no end that could be trained."""
    rows = [
        {**row, "extra_json": '{"cut_answers":["rejected"]}' if i < 2 else None}
        for i, row in enumerate(open_dataset(pairs).iter_rows())
    ]
    write_dataset(pairs + "-cut", "made", "pairs/1", rows)
    tasks = list(open_dataset(asked(tmp_path, pairs + "-cut")).iter_rows())
    assert {row["item_id"] for row in tasks} == {row["row_id"] for row in rows[2:]}


def test_people_turn_labels_around_and_votes_are_shares(tmp_path, pairs):
    """Two of three want the bad answer of every item; ties and skips are counted and no label."""
    tasks = asked(tmp_path, pairs)
    items = [row["item_id"] for row in open_dataset(tasks).iter_rows()]

    def choose(item, shown):
        if item == items[0]:
            return [("tie", "ann")]
        if item == items[1]:
            return [("skip", "ann"), ("skip", "bob")]
        bad, good = place(shown, "bad"), place(shown, "good")
        return [(bad, "ann"), (bad, "bob"), (good, "eve")] if item != items[2] else [(good, "ann"), ("skip", "bob")]

    result, made = answered(tmp_path, pairs, tasks, fill(tmp_path / "f.csv", tasks, choose))
    summary = result["summary"]
    assert (
        summary["items"],
        summary["rows"],
        summary["dropped/tie"],
        summary["dropped/skipped"],
        summary["annotators"],
    ) == (12, 10, 1, 1, 3)
    assert sum(row["chosen"][0]["content"].startswith("bad") for row in made) == 9
    for row in made:
        many = row["chosen"][0]["content"].startswith("bad")
        assert row["label_prob"] == (pytest.approx(2 / 3) if many else None) and row["origin"] == "human"
        assert row["ann"]["annotator_type"] == "human" and row["ann"]["annotator_id"] == (None if many else "ann")
    assert {row["split"] for row in made} == {"train", "test"}


def test_what_is_no_answer_is_an_error_that_says_what_to_write(tmp_path, pairs):
    tasks = asked(tmp_path, pairs)
    items = {row["item_id"]: "compare" for row in open_dataset(tasks).iter_rows()}
    one, two = list(items)[:2]
    for lines, says in (
        ([(one, "3", "")], r"line 2: '3' is no answer; write one of 1, 2, tie, skip"),
        ([("nobody", "1", "")], "line 2: there is no item 'nobody'"),
        ([(one, "1", "a"), (two, "", ""), (one, "2", "a")], "line 4: a has answered"),
    ):
        file = tmp_path / "wrong.csv"
        file.write_text("item_id,choice,annotator\n" + "\n".join(",".join(line) for line in lines))
        with pytest.raises(ConfigError, match=says):
            read_answers(file, items)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="needs the columns item_id and choice"):
        read_answers(tmp_path / "other.csv", items)
    for name, text, says in (
        ("cut.jsonl", b'{"item_id": "a", "choi', "cut.jsonl cannot be read: Unterminated"),
        ("list.jsonl", b"[1, 2]", "needs the columns"),
        (
            "saved.csv",
            "item_id,choice,comment\na,1,für".encode("cp1252"),
            "saved.csv cannot be read: it is not in UTF-8",
        ),
        ("no.parquet", b"PK", "no.parquet cannot be read"),
    ):
        (tmp_path / name).write_bytes(text)
        with pytest.raises(ConfigError, match=says):
            read_answers(tmp_path / name, items)
    # as spreadsheets save it: with a mark at the start, columns parted by semicolons, names in quotes
    saved = '"item_id";"choice";"comment"\r\n' + f'"{one}";"1";"a;b"\r\n"{two}";"";""\r\n'
    (tmp_path / "sheet.csv").write_bytes(saved.encode("utf-8-sig"))
    assert [answer[:2] for answer in read_answers(tmp_path / "sheet.csv", items)] == [(one, "1")]
    lines = [{"item_id": item, "choice": 1 if k else None} for k, item in enumerate(items)]
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert len(read_answers(tmp_path / "all.jsonl", items)) == 11
    with pytest.raises(ConfigError, match="1 of 12 items have no answer"):
        answered(tmp_path, pairs, tasks, str(tmp_path / "all.jsonl"))
    result, made = answered(tmp_path, pairs, tasks, str(tmp_path / "all.jsonl"), "most", min_answered=0.9)
    assert len(made) == 11 and result["summary"]["dropped/unanswered"] == 1


def test_rows_are_kept_as_they_are_and_a_stub_says_that_it_is_one(tmp_path, pairs):
    tasks = asked(tmp_path, pairs, ask="keep", instructions="Is the chosen answer polite?")
    before = {row["row_id"]: row for row in open_dataset(pairs).iter_rows()}
    keep = set(list(before)[:3])
    result, made = answered(
        tmp_path,
        pairs,
        tasks,
        fill(tmp_path / "k.csv", tasks, lambda item, shown: [("yes" if item in keep else "no", "ann")]),
    )
    assert made == [before[item] for item in before if item in keep] and result["summary"]["dropped/not_kept"] == 9
    other = asked(tmp_path / "other", pairs)
    result, made = answered(tmp_path, pairs, other, name="stub", labeler="stub")
    assert (
        [w["code"] for w in result["warnings"]] == ["stub_labels"]
        and {row["ann"]["annotator_type"] for row in made} == {"stub"}
        and {row["origin"] for row in made} == {"conversion"}
    )
    with pytest.raises(ConfigError, match="write labeler=stub"):
        answered(tmp_path, pairs, other, name="none")
    version = [open_dataset(path).manifest["meta"]["version"] for path in (tasks, other)]
    assert version[0] != version[1] and Path(tasks).name == "tasks"


def test_a_second_file_says_whose_answers_it_takes_away(tmp_path, pairs, monkeypatch):
    """Files of two people, one after the other: the second takes the place of the first, and says so; a corrected file
    takes nothing away.
    """
    from storage import store
    from tasks import people

    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "home"))
    tasks = asked(tmp_path, pairs)
    ref = store.resolve(tasks, "dataset")
    people.export(tasks)
    files = {
        who: fill(tmp_path / f"{who}.csv", tasks, lambda item, shown, who=who: [("1", who)]) for who in ("ann", "bob")
    }
    assert people.answer(ref.digest[:8], files["ann"])["replaced"] == {}
    corrected = fill(tmp_path / "again.csv", tasks, lambda item, shown: [("2", "ann")])
    assert people.answer(ref.digest[:8], corrected)["replaced"] == {} and people.answer(ref.digest[:8], files["bob"])[
        "replaced"
    ] == {"ann": 12}
    assert {
        who
        for _, _, who in read_answers(
            people.answers_of(ref.digest), {row["item_id"]: "compare" for row in open_dataset(tasks).iter_rows()}
        )
    } == {"bob"}


def test_people_see_tools_and_calls_and_a_pair_keeps_its_weight(tmp_path):
    """Answers that only call, and differ in what they call, are not two empty cells."""
    tools = json.dumps([{"name": "weather", "description": "now", "parameters": {"type": "object", "properties": {}}}])
    prompt = [{"role": "system", "content": "Be brief.", "functions": tools}] + user("Is it raining?")
    calls = [
        [{"role": "assistant", "content": None, "function_calls": f"weather(place={place!r})"}]
        for place in ("Rome", "Oslo")
    ]
    common = {"dataset": "d", "source": "s", "origin": "ai", "split": "train"}
    sides = {"chosen": calls[0], "rejected": calls[1]}
    pair = complete_row("pairs/1", {"prompt": prompt, **sides, "weight": 3.0, **BESIDE}, **common)
    rest = {"prompt_idx": 0, "scores": [], "reward": 0.0, "kept": True, **BESIDE}
    candidates = [
        complete_row("candidates/1", {"prompt": prompt, "completion_idx": k, "completion": call, **rest}, **common)
        for k, call in enumerate(calls)
    ]
    for kind, rows in (("pairs", [pair]), ("candidates", candidates)):
        write_dataset(str(tmp_path / kind), kind, f"{kind}/1", rows)
        tasks = asked(tmp_path / f"of-{kind}", str(tmp_path / kind))
        (row,) = open_dataset(tasks).iter_rows()
        line = as_row("compare", row["item_id"], json.loads(row["shown_json"]))
        assert {line["answer_1"], line["answer_2"]} == {"weather(place='Rome')", "weather(place='Oslo')"}
        assert line["prompt"] == f"system: Be brief.\n{tools}\n\nuser: Is it raining?"
        _, made = answered(
            tmp_path / f"of-{kind}",
            str(tmp_path / kind),
            tasks,
            fill(tmp_path / "f.csv", tasks, lambda *_: [("1", "a")]),
        )
        assert [row["weight"] for row in made] == [3.0 if kind == "pairs" else 1.0]
        assert beside(made) == [BESIDE]


def test_candidates_are_compared_where_two_differ(tmp_path):
    rows = [
        complete_row(
            "candidates/1",
            {
                "prompt": user(f"q {i}"),
                "prompt_idx": i,
                "completion_idx": k,
                "completion": assistant("same" if i == 0 else f"answer {min(k, 1)}"),
                "scores": [],
                "reward": 0.0,
                "kept": True,
            },
            dataset="c",
            source="s",
            origin="ai",
            split="train",
        )
        for i in range(3)
        for k in range(3)
    ]
    write_dataset(str(tmp_path / "c"), "c", "candidates/1", rows)
    shown = [json.loads(row["shown_json"]) for row in open_dataset(asked(tmp_path, str(tmp_path / "c"))).iter_rows()]
    assert len(shown) == 2 and all(
        {answer[0]["content"] for answer in one["answers"]} == {"answer 0", "answer 1"} for one in shown
    )
    for row in rows:
        # cut answers, failed ones and empty ones teach nobody anything; unscorable ones are what people are there for
        if row["completion_idx"] == 0 and row["prompt_idx"]:
            row |= {"kept": False, "drop_reason": ("truncated", "engine_error")[row["prompt_idx"] - 1]}
        elif row["prompt_idx"] == 1:
            row |= {
                "kept": False,
                "drop_reason": "unscorable",
                "completion": assistant(f"ended {row['completion_idx']}"),
            }
    write_dataset(str(tmp_path / "cut"), "c", "candidates/1", rows)
    (task,) = open_dataset(asked(tmp_path / "y", str(tmp_path / "cut"))).iter_rows()
    assert {answer[0]["content"] for answer in json.loads(task["shown_json"])["answers"]} == {"ended 1", "ended 2"}
    # of stages that keep the reason
    asked_too_much = [
        {**row, "kept": False, "drop_reason": "request_too_long"} if row["completion_idx"] == 0 else row
        for row in rows[3:6]
    ]
    asked_too_much[0]["completion"] = assistant("")
    write_dataset(str(tmp_path / "long"), "c", "candidates/1", asked_too_much)
    (task,) = open_dataset(asked(tmp_path / "z", str(tmp_path / "long"))).iter_rows()
    assert {answer[0]["content"] for answer in json.loads(task["shown_json"])["answers"]} == {"ended 1", "ended 2"}
    write_dataset(str(tmp_path / "same"), "c", "candidates/1", rows[:3])
    with pytest.raises(ConfigError, match="no prompt has two different candidates that ended"):
        asked(tmp_path / "x", str(tmp_path / "same"))
