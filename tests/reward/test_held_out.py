"""What a reward model is worth on held-out rows: the numbers of each kind of rows by hand, and which rows they are of."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from stages.measures.reward_model import transforms
from stages.reward_models.reward_eval import (
    anchor_responses,
    held_out_of_all,
    judge_labels,
    judge_pairs,
    judge_rankings,
    judge_ratings,
    judge_steps,
    stronger_model_share,
)
from tests.common import assistant, user
from tests.reward.test_scorers import CountsWords, Told

NAN = math.nan


class Given:
    """Scores by text."""

    relative, disagreement, bias, card = False, None, 0.0, SimpleNamespace(objective="bt", options={})

    def __init__(self, scores, lengths=None, **more):
        self.scores, self.known = scores, lengths or {}
        vars(self).update(more)

    def score(self, responses):
        return [self.scores[r.text] for r in responses]

    def lengths(self, responses):
        return [self.known.get(r.text, len(r.text)) for r in responses]


def data(kind, **splits):
    """A dataset of rows by split."""
    return SimpleNamespace(
        kind=kind,
        iter_rows=lambda split=None: iter([r for s, rows in splits.items() if split in (None, s) for r in rows]),
    )


def pair(chosen, rejected, **more):
    return {
        "row_id": chosen + rejected,
        "prompt_id": chosen + rejected,
        "prompt": user("q"),
        "chosen": assistant(chosen),
        "rejected": assistant(rejected),
        **more,
    }


def test_rankings_are_judged_by_the_pairs_that_their_ranks_decide():
    """Equal ranks decide nothing, equal scores are no right decision, an answer without a score is in no pair, and the
    best is found where any of the best ranks scores highest.
    """
    scorer = Given({"a": 3.0, "b": 1.0, "c": 1.0, "d": NAN, "e": 2.0, "f": 5.0})
    rows = [
        {"row_id": texts, "prompt": user("q"), "completions": [assistant(t) for t in texts], "ranks": ranks}
        for texts, ranks in (
            ("abc", [2, 1, 3]),  # b over a: wrong; b over c: equal; a over c: right
            ("efd", [1, 1, 2]),  # d has no score: nothing is decided
            ("dfea", [4, 1, 1, 3]),  # f and e over a: right, wrong
            ("ab", [1, 1]),
        )
    ]
    found = judge_rankings(Told(), scorer, rows, "test")
    assert found["rankings"] == 2 and found["accuracy"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert found["kendall_tau"] == pytest.approx((0 / 3 + 0 / 2) / 2) and found["best_found"] == 0.5
    gaps = np.array([-2.0, 0.0, 2.0, 2.0, -1.0])
    assert found["log_loss"] == pytest.approx(np.log1p(np.exp(-gaps)).mean())
    # the second of two equally good ones is the best, too
    one = [rows[0] | {"completions": [assistant("e"), assistant("f"), assistant("b")], "ranks": [1, 1, 2]}]
    assert judge_rankings(Told(), scorer, one, "test")["best_found"] == 1.0
    assert judge_rankings(Told(), scorer, rows[1:2], "test") == {}


def test_pairs_without_a_better_answer_or_a_score_are_in_no_number():
    """Equal scores are not right and half right for half_credit; answers of one length are half longer."""
    scores = {"good": 2.0, "bad": 1.0, "same": 1.0, "lost": NAN, "worse": 0.5}
    rows = [
        pair("good", "bad"),
        pair("bad", "same"),
        pair("worse", "good"),
        pair("good", "lost"),
        pair("bad", "good", label_prob=0.5),
    ]
    lengths = {"good": 4, "bad": 2, "same": 2, "worse": 9, "lost": 1}
    found = judge_pairs(Told(), Given(scores, lengths), rows, "test")
    assert found["pairs"] == 3 and found["accuracy"] == pytest.approx(1 / 3)
    assert found["tie_rate"] == pytest.approx(1 / 3) and found["half_credit_accuracy"] == pytest.approx(0.5)
    assert found["mean_margin"] == pytest.approx((1.0 + 0.0 - 1.5) / 3)
    assert found["chosen_longer_share"] == pytest.approx((1 + 0.5 + 1) / 3)
    assert found["mean_length_difference"] == pytest.approx((2 + 0 + 5) / 3)
    x, r = np.array([4, 2, 2, 2, 9, 4.0]), np.array([2, 1, 1, 1, 0.5, 2.0])
    left = r - np.polyval(np.polyfit(x, r, 1), x)
    assert found["length_residual_accuracy"] == pytest.approx((left[0::2] > left[1::2] + 1e-12).mean())
    # rightly ordered or not, for its length a chosen answer here scores low
    turned = {"bad": 1.0, "same": 1.0, "good": 2.0, "worse": 6.0}
    found = judge_pairs(Told(), Given(turned, lengths), [pair("good", "bad"), pair("good", "worse")], "test")
    x, r = np.array([4, 2, 4, 9.0]), np.array([2, 1, 2, 6.0])
    left = r - np.polyval(np.polyfit(x, r, 1), x)
    assert found["length_residual_accuracy"] == (left[0::2] > left[1::2]).mean() == 0.0
    assert judge_pairs(Told(), Given(scores), rows[3:], "test") == {}


def test_an_anchor_does_not_move_the_odds_of_two_probabilities():
    """rm.t2t_point: scores are P(good) plus the calibration bias, which is in no odds."""
    rows = [pair("good", "bad", prompt_id=str(i)) for i in range(4)]
    found = [
        judge_pairs(
            Told(),
            Given({"good": 0.8 + bias, "bad": 0.5 + bias}, bias=bias, card=SimpleNamespace(objective="t2t_point")),
            rows,
            "test",
        )
        for bias in (0.0, -0.6)
    ]
    assert found[0]["log_loss"] == pytest.approx(-math.log(0.8)) == found[1]["log_loss"]
    assert found[0]["ece"] == pytest.approx(0.2) == found[1]["ece"]


def test_probes_that_score_as_high_fool_the_model_and_surface_changes_flip_it():
    rows = [pair("one two three", "one two"), pair("four five six seven", "four five six eight nine")]
    found = judge_pairs(Told(), CountsWords(), rows, "test", probe_pairs=2)
    # the same words in another order count alike
    assert found["probe/shuffled_words"] == 1.0 and found["probe/one_word"] == 0.0 and found["probe/repeated"] == 1.0
    capitals = CountsWords()
    capitals.score = lambda responses: [float(sum(c.isupper() for c in r.text)) for r in responses]
    found = judge_pairs(Told(), capitals, [pair("One Two", "three four"), pair("five", "Six")], "test", probe_pairs=2)
    flips = {name.removeprefix("flips/"): share for name, share in found.items() if name.startswith("flips/")}
    # without capitals the first answer is no longer better, and the second is as little as before
    assert flips == {name: 0.5 if name == "lower_case" else 0.0 for name in transforms("a b", np.random.default_rng(0))}


def two_classes(right):
    return [[[1 - p, p] for p in row] for row in right]


def test_each_of_three_classes_has_its_auc():
    """rm.prm, log: AUC per class, each against the others, by hand."""
    rows = [
        {"prompt": user("q"), "completions": ["s"] * 3, "labels": labels, "solution_correct": None}
        for labels in ([1, 0, -1], [1, 1, 0])
    ]
    said = [
        [[0.1, 0.2, 0.7], [0.3, 0.3, 0.4], [0.2, 0.5, 0.3]],
        [[0.2, 0.2, 0.6], [0.5, 0.2, 0.3], [0.1, 0.6, 0.3]],
    ]
    scorer = SimpleNamespace(
        card=SimpleNamespace(options={"separator": "\n"}), step_classes=lambda rs: said, score=lambda rs: [0.5, 0.5]
    )
    found = judge_steps(Told(), scorer, rows, "test")
    # wrong .2 against .1 .3 .2 .5 .1; neutral .3 .6 against .2 .5 .2 .2; right .7 .6 .3 against .4 .3 .3
    assert found["step_auc_wrong"] == pytest.approx(2.5 / 5) and found["step_auc_neutral"] == pytest.approx(7 / 8)
    assert found["step_auc_right"] == pytest.approx(7 / 9)
    assert found["accuracy"] == pytest.approx(4 / 6)


def test_the_first_wrong_step_is_where_the_probability_falls_to_a_half():
    options = {"separator": "\n", "neutral_as": "positive"}
    texts = [[1, 1, -1], [1, -1, -1], [-1, 1], [1, 1]]
    said = [[0.9, 0.8, 0.5], [0.4, 0.2, 0.1], [0.6, 0.7], [0.9, 0.3]]
    rows = [
        {"prompt": user("q"), "completions": ["s"] * len(labels), "labels": labels, "solution_correct": right}
        for labels, right in zip(texts, (False, True, None, True))
    ]
    scorer = SimpleNamespace(
        card=SimpleNamespace(options=options),
        step_classes=lambda rs: two_classes(said),
        score=lambda rs: [0.4, 0.2, 0.9, 0.6],
    )
    found = judge_steps(Told(), scorer, rows, "test")
    assert found["first_error_accuracy"] == pytest.approx(1 / 3)
    right = [[q > 0.5 for q in row] for row in said]
    hits = [a == (b > 0) for row, labels in zip(right, texts) for a, b in zip(row, labels)]
    assert found["accuracy"] == pytest.approx(np.mean(hits)) and found["steps"] == 10
    assert found["solution_auc"] == pytest.approx(0.5)  # .6 above .4 above .2; the third has no verdict


def test_a_step_that_holds_the_separator_is_judged_where_it_ends():
    """label_steps joins a step that cannot be labelled to the next one; the model reads the text of both in parts, and
    nothing of an empty step.
    """
    row = {
        "prompt": user("q"),
        "completions": ["a", "b\n\nc", " ", "d"],
        "labels": [1, -1, 1, 1],
        "solution_correct": None,
    }
    scorer = SimpleNamespace(
        card=SimpleNamespace(options={"separator": "\n\n"}),
        step_classes=lambda responses: two_classes([[0.9, 0.8, 0.2, 0.7]]),
        score=lambda responses: [0.5],
    )
    found = judge_steps(Told(), scorer, [row], "test")
    assert (found["steps"], found["accuracy"], found["step_auc"], found["first_error_accuracy"]) == (3, 1.0, 1.0, 1.0)


def test_equal_predictions_and_equal_models_are_no_better(monkeypatch):
    """Two answers rated apart that score alike are not told apart; a model that wins half of its pairs is not the
    stronger one.
    """
    monkeypatch.setattr("stages.reporting.reports.scatter", lambda *a, **k: b"")
    scorer = Given({"a": 3.0, "b": 3.0, "c": 1.0})
    rows = [
        {"row_id": t, "prompt_id": "p", "prompt": user("q"), "completion": assistant(t), "score": score}
        for t, score in (("a", 5.0), ("b", 4.0), ("c", 1.0))
    ]
    assert judge_ratings(Told(), scorer, rows, "test")["accuracy"] == pytest.approx(2 / 3)
    named = lambda a, b: {"chosen_gen": {"model_id": a}, "rejected_gen": {"model_id": b}}
    assert stronger_model_share([named("x", "y"), named("y", "x")]) == {"chosen_from_stronger_model": 0.0}


def test_labels_are_judged_by_probabilities(monkeypatch):
    """Of a logit those of its sigmoid; the calibration is of the decision, whichever it is."""
    monkeypatch.setattr("stages.reporting.reports.calibration_diagram", lambda *a, **k: b"")
    p = {"a": 0.9, "b": 0.3, "c": 0.6, "d": NAN}
    rows = [
        {"row_id": t, "prompt": user("q"), "completion": assistant(t), "label": label}
        for t, label in (("a", True), ("b", True), ("c", False), ("d", True))
    ]
    logits = Given({t: math.log(q / (1 - q)) + 2.0 if q == q else NAN for t, q in p.items()}, bias=2.0)
    logits.card = SimpleNamespace(objective="pmp")
    found = judge_labels(Told(), logits, rows, "test")
    assert (
        found["rows"] == 3 and found["accuracy"] == pytest.approx(1 / 3) and found["base_rate"] == pytest.approx(2 / 3)
    )
    assert found["brier"] == pytest.approx((0.1**2 + 0.7**2 + 0.6**2) / 3) and found["auc"] == pytest.approx(0.5)
    # sure by .9 and right; by .7 and .6 and wrong
    assert found["ece"] == pytest.approx((0.1 + 0.7 + 0.6) / 3)


def test_the_test_split_judges_several_datasets_where_any_has_one(monkeypatch):
    from stages.reward_models import reward_eval

    seen = []
    monkeypatch.setattr(reward_eval, "judged", lambda stage, scorer, kind, rows, split: seen.append(rows) or {"n": 1.0})
    first = data("pairs/1", train=[{"n": 0}], validation=[{"n": 1}, {"n": 2}], test=[])
    second = data("pairs/1", train=[], validation=[{"n": 3}], test=[{"n": 4}, {"n": 5}])
    assert held_out_of_all(Told(), None, [first, second], "all") == {"n": 1.0}
    held_out_of_all(Told(), None, [first], "all")
    held_out_of_all(Told(), None, [first, second], "all", limit=1)
    assert seen == [[{"n": 4}, {"n": 5}], [{"n": 1}, {"n": 2}], [{"n": 4}]]
    assert held_out_of_all(Told(), None, [data("pairs/1", train=[{"n": 0}])], "all") == {}


def test_the_zero_point_is_of_good_and_whole_answers():
    """rm.calibrate: chosen ones, the best of a ranking, the last answer of a demonstration, right ones of labelled
    answers, none that was cut or that an engine never gave.
    """
    texts = lambda kind, rows: [r.text for r in anchor_responses(data(kind, train=rows), "train", 10)]
    assert texts("pairs/1", [pair("x", "y")]) == ["x"]
    ranked = {"prompt": user("q"), "completions": [assistant(t) for t in "abc"], "ranks": [3, 1, 2]}
    assert texts("rankings/1", [ranked]) == ["b"]
    (last,) = anchor_responses(
        data("demonstrations/1", train=[{"messages": user("p") + assistant("a") + user("q") + assistant("b")}]),
        "train",
        10,
    )
    assert last.text == "b" and last.prompt == user("p") + assistant("a") + user("q")
    labelled = [{"prompt": user("q"), "completion": assistant(t), "label": t == "right"} for t in ("right", "wrong")]
    assert texts("unpaired/1", labelled) == ["right"]
    drawn = [
        {"prompt": user("q"), "completion": assistant(t), "drop_reason": why}
        for t, why in (("whole", None), ("cut", "truncated"), ("unscored", "unscorable"), ("", "engine_error"))
    ]
    assert texts("candidates/1", drawn) == ["whole", "unscored"]


def test_the_samples_are_what_it_is_most_wrong_surest_and_least_sure_about():
    """By hand: of every sort three at most; prompts and answers in full in the table, whatever the kind of rows."""

    def shown(judge, scorer, rows):
        told = Told()
        judge(told, scorer, rows, "test")
        return [table for name, table in told.tables if name == "samples-test"][0]

    margins = {"a": 4.0, "b": -0.5, "c": 0.1, "d": -3.0, "e": 2.0, "f": 1.0, "g": -2.0, "h": -0.2, "i": 0.05}
    scorer = Given({f"{side}{name}": m * (side == "+") for name, m in margins.items() for side in "+-"})
    found = shown(judge_pairs, scorer, [pair(f"+{name}", f"-{name}") for name in margins])
    assert [(r["which"], r["chosen"], r["margin"]) for r in found] == [
        *(("most confident mistake", f"+{n}", margins[n]) for n in "dgb"),
        *(("surest and right", f"+{n}", margins[n]) for n in "aef"),
        *(("least sure", f"+{n}", margins[n]) for n in "ich"),
    ]
    assert found[0]["prompt"] == "q" and (found[0]["chosen score"], found[0]["rejected score"]) == (-3.0, 0.0)

    rated = [
        {"row_id": t, "prompt_id": t, "prompt": user("q"), "completion": assistant(t), "score": s}
        for t, s in (("high", 1.0), ("low", 3.0), ("right", 2.0))
    ]
    found = shown(judge_ratings, Given({"high": 4.0, "low": 1.0, "right": 2.0}), rated)
    assert [(r["which"], r["answer"], r["score"], r["rating"]) for r in found] == [
        ("scored too high", "high", 4.0, 1.0),
        ("scored too low", "low", 1.0, 3.0),
        ("scored right", "right", 2.0, 2.0),
    ]

    labelled = [
        {"row_id": t, "prompt_id": t, "prompt": user("q"), "completion": assistant(t), "label": label}
        for t, label in (("wrong", False), ("right", True))
    ]
    found = shown(judge_labels, Given({"wrong": 3.0, "right": 1.0}), labelled)
    assert [(r["which"], r["answer"], r["good"]) for r in found] == [
        ("most confident mistake", "wrong", False),
        ("surest and right", "right", True),
    ]

    ranked = [{"row_id": "r", "prompt": user("q"), "completions": [assistant(t) for t in "abc"], "ranks": [2, 1, 3]}]
    found = shown(judge_rankings, Given({"a": 2.0, "b": 1.0, "c": 0.0}), ranked)
    assert [(r["which"], r["best answer"], r["scored highest"], r["pairs ordered right"]) for r in found] == [
        ("most confident mistake", "b", "a", pytest.approx(2 / 3))
    ]
