"""Signals of a product as labels and pairs (data.implicit); scores as weighted aspects (data.ratings)."""

import itertools

import pytest

from stages.harness import StageFailure
from stages.ingestion.pairing import last_event
from stages.spec import ConfigError

from .driver import ingest, write_lines


def said(messages) -> list[str]:
    return [message.get("content") for message in messages]


def event(action, response="a", prompt="p", **more) -> dict:
    return {"prompt": prompt, "response": response, "action": action, **more}


def labels(result) -> list[tuple]:
    return [(said(row["completion"])[0], row["label"], row["weight"], row["label_kind"]) for row in result.rows]


def test_signals_become_weighted_labels(tmp_path):
    rows = [
        event(action, f"a{index}")
        for index, action in enumerate(
            ("thumbs_up", "thumbs_down", "regenerate", "close_tab", "angry_followup", "copy")
        )
    ]
    result = ingest(write_lines(tmp_path / "x.jsonl", rows), tmp_path / "w")
    assert result.data.kind == "unpaired/1" and labels(result) == [
        (f"a{index}", label, weight, f"event:{row['action']}")
        for index, (row, label, weight) in enumerate(
            zip(rows, (True, False, False, False, False, True), (1.0, 1.0, 0.5, 0.25, 0.5, 0.5))
        )
    ]


def test_explicit_beats_implicit_then_the_last_counts(tmp_path):
    rows = [
        event("thumbs_down", ts="2026-01-02T00:00:00"),
        event("copy", ts="2026-01-05T00:00:00"),
        event("thumbs_up", ts="2026-01-01T00:00:00"),
        event("copy", "b"),
        event("regenerate", "b"),
        event("thumbs_down", "c"),
        event("thumbs_down", "c"),
    ]
    result = ingest(write_lines(tmp_path / "x.jsonl", rows), tmp_path / "w")
    assert labels(result) == [
        ("a", False, 1.0, "event:thumbs_down"),
        ("b", False, 0.5, "event:regenerate"),
        ("c", False, 1.0, "event:thumbs_down"),
    ]
    # no damage
    assert {line: codes for line, codes in result.codes().items()} == {
        line: ["superseded_event"] for line in (2, 3, 4, 6)
    }
    assert (
        last_event([False, False, False], [1, 5, 2]) == 1
        and last_event([True, False, True], [3, 9, 3]) == 2
        and last_event([False, False], [7, None]) == 1
    )


def test_an_edit_is_a_pair_and_thumbs_pair_up(tmp_path):
    rows = [
        event("edit", edited="better"),
        event("thumbs_up", "good", "q"),
        event("close_tab", "bad", "q"),
        event("thumbs_down", "good", "r"),
        event("thumbs_up", "good", "r"),
    ]
    path = write_lines(tmp_path / "x.jsonl", rows)
    pairs = ingest(path, tmp_path / "w", kind="pairs/1")
    assert [(said(row["prompt"]), said(row["chosen"]), said(row["rejected"])) for row in pairs.rows] == [
        (["p"], ["better"], ["a"]),
        (["q"], ["good"], ["bad"]),
    ]
    assert labels(ingest(path, tmp_path / "w2"))[:2] == [
        ("a", False, 1.0, "event:edit"),
        ("better", True, 1.0, "event:edit"),
    ]
    with pytest.raises(StageFailure, match="missing_column"):
        ingest(write_lines(tmp_path / "y.jsonl", [event("edit")]), tmp_path / "w3")


def test_own_signals_have_signed_weights(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", [event("star"), event("bounce", "b"), event("copy", "c")])
    assert labels(ingest(path, tmp_path / "w", event_map={"star": 0.7, "bounce": -0.2, "copy": 0})) == [
        ("a", True, 0.7, "event:star"),
        ("b", False, 0.2, "event:bounce"),
    ]
    with pytest.raises(StageFailure, match="bad_label.*event_map"):
        ingest(path, tmp_path / "w2", format="events")
    with pytest.raises(ConfigError, match="event_map says what the signals"):
        ingest(
            write_lines(tmp_path / "y.jsonl", [{"prompt": "p", "completion": "c", "label": True}]),
            tmp_path / "w3",
            event_map={"star": 1},
        )


def rating(completion, **aspects) -> dict:
    return {"prompt": "p", "completion": completion, "score": 3, "aspects": aspects}


def test_aspects_are_weighed(tmp_path):
    path = write_lines(
        tmp_path / "x.jsonl", [rating("a", helpfulness=5, honesty=1), rating("b", helpfulness=1, honesty=4)]
    )
    weights = {"helpfulness": 0.25, "honesty": 0.75}
    given = ingest(path, tmp_path / "w", kind="ratings/1")
    weighed = ingest(path, tmp_path / "w2", kind="ratings/1", aspect_weights=weights)
    assert [row["score"] for row in given.rows] == [3.0, 3.0] and [row["score"] for row in weighed.rows] == [2.0, 3.25]
    (pair,) = ingest(path, tmp_path / "w3", kind="pairs/1", aspect_weights=weights).rows
    assert (said(pair["chosen"]), pair["chosen_score"], pair["rejected_score"]) == (["b"], 3.25, 2.0)
    # of a dataset, such as that of stage rate
    again = ingest(given.data.path, tmp_path / "w4", kind="ratings/1", aspect_weights=weights)
    assert [row["score"] for row in again.rows] == [2.0, 3.25] and [row["row_id"] for row in again.rows] == [
        row["row_id"] for row in weighed.rows
    ]


def test_weights_that_cannot_be_are_refused(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", [rating("a", helpfulness=5)])
    with pytest.raises(ConfigError, match="sum to 0.5; write weights that sum to 1"):
        ingest(path, tmp_path / "w", aspect_weights={"helpfulness": 0.5})
    with pytest.raises(StageFailure, match="missing_aspect"):
        ingest(path, tmp_path / "w1", aspect_weights={"honesty": 1})
    with pytest.raises(ConfigError, match="holds pairs/1; leave it out"):
        ingest(
            write_lines(tmp_path / "y.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}]),
            tmp_path / "w2",
            aspect_weights={"honesty": 1},
        )


def test_equal_scores_are_ties_and_gaps_are_those_of_the_decimals(tmp_path):
    """Neither the order in which weighted aspects are added up nor the binary fractions of scores decide a pair."""
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    rated = [
        rating(f"answer {i}", **dict(zip("abc", given)))
        for i, given in enumerate(itertools.product(range(1, 6), repeat=3))
    ]
    path = write_lines(tmp_path / "aspects.jsonl", rated)
    rows = ingest(path, tmp_path / "scores", kind="ratings/1", aspect_weights=weights).rows
    tenths = {sum(w * int(one["score"]) for w, one in zip((5, 3, 2), row["aspects"])) for row in rows}
    assert len({row["score"] for row in rows}) == len(tenths)
    path = write_lines(
        tmp_path / "scores.jsonl",
        [{"prompt": "p", "completion": str(score), "score": score} for score in (4.1, 3.1)],
    )
    assert len(ingest(path, tmp_path / "pairs", kind="pairs/1", min_margin=1).rows) == 1
    kept = ingest(path, tmp_path / "thumbs", kind="unpaired/1", threshold=3.1, dead_band=1).rows
    assert [row["completion"][0]["content"] for row in kept] == ["4.1"]
