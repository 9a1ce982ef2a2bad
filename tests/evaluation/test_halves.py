"""The best model is chosen on one half of the prompts and tested on the other."""

import numpy as np
import pytest

from stages.evaluation.halves import choose, half_of, part
from stages.promote import Config, Evaluation, decide
from tests.evaluation.test_metrics import record
from tests.evaluation.test_promotion import PROTOCOL, evaluation


def records(rate, seed, n=120, **fields):
    draws = np.random.default_rng(seed).random((n, 2))
    return [record(i, k, bool(draws[i, k] < rate), **fields) for i in range(n) for k in range(2)]


def test_halves_are_disjoint_complete_and_keep_groups_together():
    rows = [{**row, "group_id": f"g{index // 6}"} for index, row in enumerate(records(0.5, 0))]
    first, second = part(rows, "selection"), part(rows, "confirmation")
    assert len(first) + len(second) == len(rows) and part(rows, "all") == rows
    assert not {row["group_id"] for row in first} & {row["group_id"] for row in second}
    shares = [half_of(f"group {i}") == "selection" for i in range(4000)]
    assert abs(np.mean(shares) - 0.5) < 0.04


def test_the_choice_sees_the_selection_half_only():
    good, bad = records(0.9, 1), records(0.3, 2)
    assert choose({"bad": bad, "good": good}, "accuracy")[0] == "good"
    # perfect where it must not matter
    turned = [{**row, "correct": half_of(row["prompt_id"]) == "confirmation"} for row in good]
    best, means, prompts = choose({"bad": bad, "turned": turned}, "accuracy")
    assert best == "bad" and means["turned"] == 0.0
    assert prompts == len({row["prompt_id"] for row in part(bad, "selection")})


def test_ties_take_the_earlier_less_is_better_and_missing_values():
    short, long = records(0.5, 3, tokens=5), records(0.5, 3, tokens=50)
    assert choose({"a": long, "b": long}, "accuracy")[0] == "a"
    assert choose({"long": long, "short": short}, "length_mean")[0] == "short"
    ungraded = [{**row, "correct": None} for row in short]
    assert choose({"none": ungraded, "some": long}, "accuracy")[0] == "some"
    assert choose({"none": ungraded}, "accuracy") == (None, {}, 0)
    with pytest.raises(ValueError, match="write one of"):
        choose({"a": long}, "niceness")


def test_the_gate_counts_and_words_the_confirmation_half():
    candidate, champion = (
        evaluation(name, rate).on("confirmation") for name, rate in (("candidate", 0.8), ("champion", 0.4))
    )
    decision = decide(
        Config(prompts="confirmation", gates=[{"metric": "accuracy", "min": 0.5}]), candidate, champion=champion
    )
    expected = len({row["prompt_id"] for row in candidate.records})
    assert decision["promote"] and decision["prompts"] == "confirmation" and 0 < expected < 150
    assert [row["n"] for row in decision["evidence"]] == [expected, expected]
    assert "took no part in choosing it" in decision["reasons"][0]
    few = decide(Config(prompts="confirmation", min_prompts=149), candidate, champion=champion)
    assert not few["promote"] and "of the confirmation half" in few["reasons"][0]


def test_metrics_of_a_half_keep_the_names_of_the_whole():
    whole = Evaluation("candidate", records(0.6, 4, category="add"), {}, {"protocol": PROTOCOL})
    half = whole.on("confirmation")
    assert whole.on("all") is whole
    assert {"accuracy", "accuracy/category=add"} <= set(half.metrics)
    assert half.metrics["accuracy"].value == pytest.approx(
        np.mean([row["correct"] for row in part(whole.records, "confirmation")])
    )


def test_the_luckiest_of_equal_models_is_promoted_no_more_often_than_chance_allows():
    """Eight models exactly as good as the champion: choosing and testing on the same prompts promotes a lucky one far
    too often.
    """

    def promoted(prompts, trial):
        models = {f"m{k}": records(0.5, (trial, k)) for k in range(8)}
        best = (
            max(models, key=lambda name: np.mean([row["correct"] for row in models[name]]))
            if prompts == "all"
            else choose(models, "accuracy")[0]
        )
        candidate, champion = (
            Evaluation(name, part(rows, prompts), {}, {"protocol": PROTOCOL})
            for name, rows in (("candidate", models[best]), ("champion", records(0.5, (trial, 99))))
        )
        return decide(Config(prompts=prompts), candidate, champion=champion)["promote"]

    trials = 80
    naive = sum(promoted("all", trial) for trial in range(trials)) / trials
    honest = sum(promoted("confirmation", trial) for trial in range(trials)) / trials
    assert naive > 0.12 and honest <= 0.075  # one-sided level of a 95% interval: 0.025
