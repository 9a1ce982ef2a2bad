"""Agreement of annotators in ingest's report: items whatever the order of their answers, slices, votes, undefined
statistics, what a killed run forgets.
"""

import json
from itertools import permutations
from pathlib import Path

import pytest

from stages.ingestion import curation
from stages.ingestion.agreement import Table, agreement, labels_of, slices_of
from stages.ingestion.seen import SeenRows
from tests.data.driver import ingest, write_lines


def ab(prompt, label, who, turned=False, **more):
    a, b = ("good", "bad")[::-1] if turned else ("good", "bad")
    return {
        "prompt": prompt,
        "response_a": a,
        "response_b": b,
        "label": 6 - label if turned else label,
        "n_points": 5,
        "annotator_id": who,
        **more,
    }


def table(result):
    return {
        (row["slice"], row["value"]): row
        for row in json.loads(Path(result.workdir, "reports", "agreement.json").read_text())
    }


def by_hand(units, distance):
    """Krippendorff's alpha as one minus observed over expected disagreement, over ordered pairs of labels: every pair
    within a unit against every pair of all labels.
    """
    units = [unit for unit in units if len(unit) > 1]
    everything = [label for unit in units for label in unit]
    within = sum(distance(a, b) / (len(unit) - 1) for unit in units for a, b in permutations(unit, 2)) / len(everything)
    overall = sum(distance(a, b) for a, b in permutations(everything, 2)) / (len(everything) * (len(everything) - 1))
    return 1 - within / overall if overall else None


def test_graded_comparisons_agree_whatever_the_order_of_their_answers(tmp_path):
    """Three annotators, one of whom sees the answers the other way round; a comparison by another criterion is another
    item; a lone label counts nowhere.
    """
    said = {"ann": [1, 2, 5, 3, 4, 1], "bob": [2, 2, 4, 3, 2, 1], "cem": [1, 4, None, 3, 5, None]}
    rows = [
        ab(f"p{i}", label, who, turned=who == "cem", batch_id="w1" if i < 3 else "w2")
        for who, labels in said.items()
        for i, label in enumerate(labels)
        if label
    ]
    rows += [ab("p0", 5, "dia", criteria="tone"), ab("alone", 1, "ann")]
    result = ingest(write_lines(tmp_path / "x.jsonl", rows), tmp_path / "w")
    found = table(result)
    whole = found["all", ""]
    assert (whole["items"], whole["labels"], whole["annotators"]) == (6, 16, 3)
    # 2 for A much better to -2
    units = [[6 - 3 - label for labels in said.values() if (label := labels[i])] for i in range(6)]
    sign = lambda value: (value > 0) - (value < 0)
    assert whole["alpha_interval"] == pytest.approx(by_hand(units, lambda a, b: (a - b) ** 2))
    assert whole["alpha_nominal"] == pytest.approx(
        by_hand([[sign(v) for v in unit] for unit in units], lambda a, b: float(a != b))
    )
    equal = [sign(a) == sign(b) for unit in units for i, a in enumerate(unit) for b in unit[:i]]
    assert whole["observed"] == pytest.approx(sum(equal) / len(equal))
    full = [[[sign(v) for v in unit].count(side) for side in (1, 0, -1)] for unit in units if len(unit) == 3]
    assert whole["fleiss_kappa"] == pytest.approx(curation.fleiss_kappa(full)["kappa"])
    assert (
        found["batch", "w1"]["items"] == found["batch", "w2"]["items"] == 3
        and found["annotator", "cem"]["labels"] == 12
        and ("criterion", "tone") not in found
        and ("language", "latin") in found
    )
    assert (
        result.result["summary"]["agreement.alpha_nominal"] == whole["alpha_nominal"]
        and {"slice": "all", "value": ""} | result.counts["agreement"] == whole
    )
    assert "Agreement of annotators" in Path(result.workdir, "reports", "ingest.md").read_text()


def test_an_annotators_slice_is_against_the_others():
    """Cohen's kappa of two annotators is that of their confusion matrix; of one against several, of his labels and
    theirs.
    """
    units = [("x", "x", "y"), ("y", "y", "y"), ("x", "y", "x"), ("x", "x", "x")]
    rows = [
        (bytes([i]), name, label, float(label == "x"), {})
        for i, unit in enumerate(units)
        for name, label in zip("abc", unit)
    ]
    found = agreement(rows)
    pairs = {
        (a, b): [(unit["abc".index(a)], unit["abc".index(b)]) for unit in units] for a in "abc" for b in "abc" if a != b
    }
    kappa = lambda said: curation.cohen_kappa([[said.count((a, b)) for b in "xy"] for a in "xy"])["kappa"]
    assert found["all", ""]["cohen_kappa"] == pytest.approx(sum(kappa(pairs[a, b]) for a, b in ("ab", "ac", "bc")) / 3)
    assert found["annotator", "a"]["cohen_kappa"] == pytest.approx(kappa(pairs["a", "b"] + pairs["a", "c"]))


def test_votes_ratings_thumbs_and_rankings(tmp_path):
    make = lambda name, rows: table(ingest(write_lines(tmp_path / f"{name}.jsonl", rows), tmp_path / name))
    votes = make(
        "votes",
        [
            {"prompt": f"p{i}", "response_a": "a", "response_b": "b", "votes": said}
            for i, said in enumerate((["A", "A", "B"], ["A", "tie", "A"], ["B", "B", "B"]))
        ],
    )
    assert (
        votes["all", ""]["fleiss_kappa"]
        == pytest.approx(curation.fleiss_kappa([[2, 1, 0], [2, 0, 1], [0, 3, 0]])["kappa"])
        and votes["all", ""]["items"] == 3
    )
    ratings = make(
        "ratings",
        [
            {"prompt": f"p{i}", "completion": "c", "score": score, "annotator_id": who}
            for who, scores in (("a", (1, 2, 5)), ("b", (2, 2, 4)))
            for i, score in enumerate(scores)
        ],
    )
    assert ratings["all", ""]["alpha_interval"] == pytest.approx(
        by_hand([(1, 2), (2, 2), (5, 4)], lambda a, b: (a - b) ** 2)
    )
    ranked = {
        "prompt": [{"role": "user", "content": "p"}],
        "completions": [[{"role": "assistant", "content": text}] for text in "abc"],
    }
    said = [
        labels_of("rankings/1", {**ranked, "ranks": ranks, "ann": {"annotator_id": who}})
        for who, ranks in (("x", [0, 1, 2]), ("y", [0, 2, 1]))
    ]
    found = agreement(sorted((*label, {}) for labels in said for label in labels))["all", ""]
    assert found["items"] == 3 and found["observed"] == pytest.approx(2 / 3), (
        "two of the three pairs of answers are in the same order"
    )
    pairs = [
        labels_of(
            "pairs/1",
            {
                "prompt": ranked["prompt"],
                "chosen": ranked["completions"][a],
                "rejected": ranked["completions"][b],
                "ann": {"annotator_id": "x"},
            },
        )[0]
        for a, b in ((0, 1), (1, 0))
    ]
    assert pairs[0][0] == pairs[1][0] and {one[2] for one in pairs} == {"first", "second"}
    thumbs = [
        labels_of(
            "unpaired/1",
            {
                "prompt": ranked["prompt"],
                "completion": ranked["completions"][0],
                "label": label,
                "ann": {"annotator_id": "x"},
            },
        )[0]
        for label in (True, False)
    ]
    assert [one[2:] for one in thumbs] == [("desirable", 1.0), ("undesirable", 0.0)]


def test_nothing_is_said_where_nobody_labels_twice(tmp_path):
    result = ingest(write_lines(tmp_path / "x.jsonl", [ab(f"p{i}", 1, "ann") for i in range(3)]), tmp_path / "w")
    assert "agreement" not in result.counts and not Path(result.workdir, "reports", "agreement.json").exists()
    assert slices_of(
        {"prompt": [{"role": "user", "content": "Привет"}], "batch_id": "w1", "extra_json": '{"language": "ru"}'}
    ) == {"batch": "w1", "language": "ru"}


def test_undefined_statistics_are_null():
    empty, same = Table(), Table()
    for _ in range(3):
        same.add([("a", "x", 1.0), ("b", "x", 1.0)])
    assert empty.statistics() == {
        "items": 0,
        "labels": 0,
        "annotators": 0,
        "observed": None,
        "cohen_kappa": None,
        "fleiss_kappa": None,
        "alpha_nominal": None,
        "alpha_interval": None,
    }
    assert same.statistics() == {
        "items": 3,
        "labels": 6,
        "annotators": 2,
        "observed": 1.0,
        "cohen_kappa": None,
        "fleiss_kappa": None,
        "alpha_nominal": None,
        "alpha_interval": None,
    }
    assert curation.fleiss_kappa([]) == curation.fleiss_kappa([[1, 0]]) == {"P_bar": None, "P_e": None, "kappa": None}
    with pytest.raises(ValueError, match="same number of labels"):
        curation.fleiss_kappa([[2, 0], [2, 1]])
    assert curation.fleiss_kappa([[2, 1], [0, 3]], [2, 1]) == curation.fleiss_kappa([[2, 1], [2, 1], [0, 3]])
    units = [(1, 2, 2), (3, 3), (1, 4)]
    assert curation.krippendorff_alpha(units, "interval", [2, 1, 3]) == pytest.approx(
        by_hand([units[0]] * 2 + [units[1]] + [units[2]] * 3, lambda a, b: (a - b) ** 2)
    )


def test_little_agreement_is_warned_of(tmp_path):
    rows = [ab(f"p{i}", label, who) for i in range(12) for who, label in (("a", 1 + i % 5), ("b", 5 - i % 5))]
    warned = [
        w["text"]
        for w in ingest(write_lines(tmp_path / "x.jsonl", rows), tmp_path / "w").result["warnings"]
        if w["code"] == "agreement"
    ]
    assert (
        warned and "alpha -" in warned[0] and "12 items" in warned[0] and any("annotator a" in text for text in warned)
    )


def test_a_killed_run_forgets_labels_behind_its_checkpoint(tmp_path):
    seen = SeenRows(tmp_path / "s.sqlite")
    seen.label(b"i", "a", "x", 1.0, {"batch": "w"}, 0)
    seen.commit(1)
    seen.label(b"i", "b", "y", 0.0, {}, 1)
    seen.label(b"i", "a", "z", 0.0, {}, 2)
    assert [row[1:3] for row in seen.labels()] == [("a", "x"), ("b", "y")], "the first label of an annotator counts"
    seen.commit(3)
    seen.close(remove=False)
    assert list(SeenRows(tmp_path / "s.sqlite", resume_at=1).labels()) == [(b"i", "a", "x", 1.0, {"batch": "w"})]
