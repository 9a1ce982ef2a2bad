"""Every conversion of the matrix on random rows: nothing crashes, nothing vanishes without a count, nothing comes
twice, and the same rows give the same bytes.
"""

from __future__ import annotations

import json
import random

import pytest

from stages.harness import StageFailure
from stages.ingestion import conversions
from stages.spec import ConfigError

from .driver import ingest, write_lines

PROMPTS, ANSWERS = ["p one", "P  one", "p two", "q"], ["good", "bad", "ok", " good", "GOOD", "same"]


def made(kind: str, n: int, rng: random.Random) -> list[dict]:
    rows = []
    for i in range(n):
        p, a, b, c = rng.choice(PROMPTS), *(rng.choice(ANSWERS) for _ in range(3))
        mark = f" u{i:03d}" if rng.random() < 0.5 else ""
        rows.append(
            {
                "pairs/1": lambda: {"prompt": p, "chosen": a + mark, "rejected": b},
                "unpaired/1": lambda: {"prompt": p, "completion": a + mark, "label": rng.random() < 0.5},
                "ratings/1": lambda: {"prompt": p, "completion": a + mark, "score": rng.choice([1, 2, 2, 3])},
                "rankings/1": lambda: {
                    "prompt": p + mark,
                    "completions": [a, b, c],
                    "ranks": [rng.choice([0, 1, 2]) for _ in range(3)],
                },
                "comparisons/1": lambda: {
                    "prompt": p + mark,
                    "response_a": a,
                    "response_b": b,
                    "label": rng.choice(["A", "B", "tie"]),
                    **rng.choice([{}, {"annotator_id": "x"}, {"annotator_id": "y"}]),
                },
                "stepwise/1": lambda: {
                    "prompt": p + mark,
                    "completions": [a, b],
                    "labels": [rng.choice([-1, 0, 1]), -1],
                },
                "demonstrations/1": lambda: {
                    "messages": [
                        {"role": "user", "content": p},
                        {"role": "assistant", "content": a + mark},
                        {"role": "user", "content": "go"},
                        {"role": "assistant", "content": b},
                    ]
                },
            }[kind]()
        )
    return rows


@pytest.mark.parametrize(
    "kind", ["pairs/1", "unpaired/1", "ratings/1", "rankings/1", "comparisons/1", "stepwise/1", "demonstrations/1"]
)
def test_rows_add_up(tmp_path, kind):
    rng, runs = random.Random(kind), 0
    for turn in range(40):
        config = {
            "kind": rng.choice(conversions.reachable(kind)),
            "deduplicate": rng.choice(["auto", "exact", "off"]),
            "contradictions": rng.choice(["flag_second", "drop_both", "keep_as_votes", "off"]),
            "tie_policy": rng.choice(["drop", "soft"]),
            "on_conflict": rng.choice(["drop", "majority"]),
            "max_quarantine_fraction": 1,
            "dataset": "x",
        }
        config |= (
            {"threshold": 2} if kind == "ratings/1" and config["kind"] in ("unpaired/1", "demonstrations/1") else {}
        )
        config |= {"step_labels": "minus_one"} if kind == "stepwise/1" else {}
        rows = made(kind, rng.randint(3, 25), rng)
        source = write_lines(tmp_path / "x.jsonl", rows)
        try:
            result = ingest(source, tmp_path / f"w{turn}", **config)
        except (ConfigError, StageFailure):
            continue
        runs += 1
        refused = set(result.codes())
        assert len(refused) == result.counts["rows_quarantined"]
        out = [row["row_id"] for row in result.rows]
        assert config["deduplicate"] == "off" or len(set(out)) == len(out), config
        if config["kind"] != "prompts/1":
            text = json.dumps(result.rows, default=str)
            marks = [
                next(
                    (
                        word
                        for word in json.dumps(row).replace('"', " ").split()
                        if word[:1] == "u" and word[1:].isdigit()
                    ),
                    None,
                )
                for row in rows
            ]
            gone = [mark for line, mark in enumerate(marks, 1) if mark and line not in refused and mark not in text]
            assert len(gone) <= sum(result.counts["conversion"]["dropped"].values()), (config, gone)
        if turn % 8 == 0:
            again = ingest(source, tmp_path / f"again{turn}", **config)
            assert (again.data.digest, again.quarantine.digest) == (result.data.digest, result.quarantine.digest)
    assert runs > 15


def test_labels_with_and_without_an_annotator_meet(tmp_path):
    """One file of both: the pairs of a prompt are settled together, whoever named himself."""
    rows = [
        {"prompt": "p", "response_a": "good", "response_b": "bad", "label": "A", "annotator_id": "x"},
        {"prompt": "p", "response_a": "good", "response_b": "worse", "label": "A"},
        {"prompt": "p", "response_a": "fine", "response_b": "bad", "label": "tie", "annotator_id": "x"},
    ]
    source = write_lines(tmp_path / "x.jsonl", rows)
    found = {
        row["completion"][0]["content"]: row["label"]
        for row in ingest(source, tmp_path / "u", kind="unpaired/1", max_quarantine_fraction=1).rows
    }
    assert found == {"good": True, "bad": False, "worse": False}
    ranking = ingest(source, tmp_path / "r", kind="rankings/1", tie_policy="soft", max_quarantine_fraction=1).rows
    assert [[c[0]["content"] for c in row["completions"]] for row in ranking] == [
        ["good", "bad", "worse", "fine"]
    ] and ranking[0]["ranks"] == [0, 1, 1, 1]
    told = ingest(source, tmp_path / "d", kind="demonstrations/1", tie_policy="soft", max_quarantine_fraction=1)
    assert [row["messages"][-1]["content"] for row in told.rows] == ["good"] and told.codes() == {3: ["all_tied"]}


def test_answers_that_are_not_the_best_are_counted(tmp_path):
    rows = [{"prompt": "p", "completion": text, "score": score} for text, score in (("a", 3), ("b", 2), ("c", 1))]
    counts = ingest(write_lines(tmp_path / "x.jsonl", rows), tmp_path / "w", kind="demonstrations/1").counts
    assert counts["rows_out"] == 1 and counts["conversion"]["dropped"] == {"not_best": 2}
