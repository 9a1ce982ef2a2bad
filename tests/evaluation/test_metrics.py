"""From sample records to metrics: intervals, groups, pairs, probes, paired differences."""

import itertools
import math

import numpy as np
import pytest

from stages.evaluation import overopt, preference, reward_model, sampling, scores, text
from stages.evaluation.protocol import ProtocolError, protocol_hash, require_same


def record(item, index=0, correct=None, mode="sample", **fields):
    base = {"item_id": f"i{item}", "prompt_id": f"p{item}", "sample_idx": index, "mode": mode, "output": f"answer {item} {index}", "extracted": None,
            "correct": correct, "format_error": False, "tokens": 5, "finish": "eos", "reward": None, "kl": None, "category": None, "difficulty": None, "prompt": "q"}
    return {**base, **fields}


def answers(matrix, **fields):
    return [record(i, k, bool(c), **fields) for i, row in enumerate(matrix) for k, c in enumerate(row)]


def test_accuracy_is_avg_at_k_with_the_error_over_problems():
    metrics = scores.policy_metrics(answers([[1, 0, 1, 1], [0, 0, 0, 1]]), seed=0)
    assert metrics["accuracy"].value == 0.5 and metrics["accuracy"].se == pytest.approx(0.25)
    assert metrics["accuracy"].n == 2  # problems, not samples
    assert metrics["pass_at_4"].value == 1.0
    assert metrics["pass_at_2"].value == pytest.approx((1 + 0.5) / 2)


def test_pass_at_k_by_enumeration():
    for n, c, k in itertools.product(range(1, 7), range(7), range(1, 7)):
        if c > n:
            continue
        subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
        expected = np.mean([max(s) for s in subsets]) if subsets else None
        got = sampling.pass_at_k(n, c, k)
        assert got is None if expected is None else got == pytest.approx(expected)


def test_one_sample_per_prompt_gives_nearly_the_wilson_interval():
    from stages.statistics import wilson

    outcomes = [1.0] * 30 + [0.0] * 70
    metric = scores.share(outcomes)
    low, high = wilson(30, 100)
    assert metric.low == pytest.approx(low, abs=2e-3) and metric.high == pytest.approx(high, abs=2e-3)


def test_intervals_stay_in_the_unit_interval_and_are_never_empty():
    for outcomes in ([1.0] * 20, [0.0] * 20, [1.0], [0.5] * 4):
        metric = scores.share(outcomes)
        assert 0 <= metric.low < metric.high <= 1


def test_samples_of_one_prompt_are_not_independent():
    """Twenty equal answers to each of five prompts carry the information of five answers."""
    rows = answers([[1] * 20, [0] * 20, [1] * 20, [0] * 20, [1] * 20])
    metric = scores.policy_metrics(rows, 0)["accuracy"]
    assert metric.high - metric.low > 0.6


def test_several_items_of_one_prompt_are_clustered():
    rows = [record(i, 0, correct, prompt_id=f"p{i // 2}") for i, correct in enumerate([1, 1, 0, 0, 1, 1])]
    from stages.statistics import clustered_se

    assert scores.policy_metrics(rows, 0)["accuracy"].se == pytest.approx(clustered_se([1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 2, 2]))


def test_ungraded_prompts_have_no_accuracy_and_are_counted():
    rows = answers([[1, 1]]) + [record(9, k, None) for k in range(2)]
    metrics = scores.policy_metrics(rows, 0)
    assert metrics["accuracy"].n == 1 and metrics["accuracy"].value == 1.0
    assert metrics["unscorable_rate"].value == 0.5
    assert "accuracy" not in scores.policy_metrics([record(0, 0, None)], 0)


def test_greedy_stands_in_where_nothing_was_sampled():
    metrics = scores.policy_metrics([record(i, 0, i % 2 == 0, mode="greedy") for i in range(4)], 0)
    assert metrics["accuracy"].value == metrics["greedy_accuracy"].value == 0.5


def test_majority_and_best_of_n():
    rows = []
    for i in range(3):  # two of three samples say the right thing, the reward model prefers the wrong one
        rows += [record(i, 0, True, extracted="7", reward=0.0), record(i, 1, True, extracted="7", reward=0.1), record(i, 2, False, extracted="8", reward=9.0)]
    metrics = scores.policy_metrics(rows, 0)
    assert metrics["maj_at_3"].value == 1.0
    assert metrics["best_of_3_accuracy"].value == 0.0
    assert metrics["best_of_2_accuracy"].value == pytest.approx(1 / 3)


def test_groups():
    rows = [record(i, 0, i < 3, category="add" if i % 2 else "sort", difficulty=str(i % 3)) for i in range(6)]
    table = scores.by_group(rows, "category")
    assert [row["category"] for row in table] == ["add", "sort"] and sum(row["prompts"] for row in table) == 6
    assert [row["difficulty"] for row in scores.by_group(rows, "difficulty")] == ["0", "1", "2"]


def pair(item, margin, chosen_tokens=5, rejected_tokens=5, **fields):
    return [record(item, 0, margin > 0, mode="chosen", margin=margin, reward=margin, tokens=chosen_tokens, **fields),
            record(item, 1, None, mode="rejected", reward=0.0, tokens=rejected_tokens, **fields)]


def test_pair_metrics():
    rows = [row for i, d in enumerate([1.0, 0.0, -0.2, 1.0, 3.0]) for row in pair(i, d, chosen_tokens=5 + i, strength=i % 2)]
    metrics = scores.pair_metrics(rows, seed=0)
    assert metrics["accuracy"].value == 0.6 and metrics["tie_rate"].value == 0.2 and metrics["accuracy_ties_half"].value == 0.7
    assert metrics["log_loss"].value == pytest.approx(0.433279355310345)
    assert metrics["mean_margin"].value == pytest.approx(0.96)
    assert metrics["accuracy"].low < 0.6 < metrics["accuracy"].high
    assert {"accuracy/strength=0", "accuracy/strength=1", "ece", "score_length_pearson"} <= set(metrics)


def test_probes_and_transforms():
    rng = np.random.default_rng(0)
    made = reward_model.probes("The capital is Paris and it is large.", rng)
    assert set(made) == {"repeated", "incoherent_formatted", "shuffled_words", "sycophantic", "padded"}
    assert all(value != "The capital is Paris and it is large." for value in made.values())
    assert reward_model.probes("42", rng).keys() == {"repeated", "incoherent_formatted", "sycophantic", "padded"}  # a shuffle of one word is the answer
    rows = pair(0, 1.0) + [record(0, 0, mode="probe:padded", reward=2.0), record(0, 1, mode="transform:typo:chosen", reward=-1.0),
                           record(0, 2, mode="transform:typo:rejected", reward=0.0)]
    metrics, table = scores.probe_metrics(rows)
    assert metrics["fooled_rate/padded"].value == 1.0 and metrics["changed_rate/typo"].value == 1.0 and len(table) == 2


def test_paired_difference_uses_the_pairing():
    rng = np.random.default_rng(1)
    hard = rng.random(200)
    a = [record(i, 0, bool(hard[i] < 0.6)) for i in range(200)]
    b = [record(i, 0, bool(hard[i] < 0.5)) for i in range(200)]
    result = scores.paired(a, b, "accuracy")
    assert result["difference"] == pytest.approx(np.mean((hard >= 0.5) & (hard < 0.6)))
    assert result["low"] > 0 and result["p_value"] < 0.01 and result["mcnemar_p_value"] < 0.01 and result["worse"] == 0
    flipped = scores.paired(b, a, "accuracy")
    assert flipped["difference"] == pytest.approx(-result["difference"])


def test_paired_difference_of_nothing_shared_says_what_to_do():
    with pytest.raises(ValueError, match="same prompts and split"):
        scores.paired(answers([[1]]), [record(77, 0, True)], "accuracy")


def test_protocols():
    a = {"prompts": "abc", "temperature": 1.0}
    assert protocol_hash(a) == protocol_hash(dict(reversed(a.items())))
    require_same({"x": a, "y": dict(a)})
    with pytest.raises(ProtocolError, match="temperature: 1.0 for x, 0.7 for y"):
        require_same({"x": a, "y": {**a, "temperature": 0.7}})


def test_bradley_terry_recovers_strengths_and_flags_separable_data():
    truth = np.array([1.0, 0.2, -1.2])
    wins = 1000 / (1 + np.exp(-(truth[:, None] - truth[None, :])))
    np.fill_diagonal(wins, 0)
    fit = preference.bradley_terry(wins)
    assert fit.converged and np.allclose(fit.scores, truth - truth.mean(), atol=1e-9)
    lone = preference.bradley_terry([[0, 5], [0, 0]])
    assert lone.converged and lone.l2 == preference.SEPARABLE_L2
    ranking = preference.bradley_terry_ranking([("a", "b", 1.0)] * 8 + [("a", "b", 0.0)] * 2, np.random.default_rng(0), rounds=50)
    assert ranking[0]["player"] == "a" and ranking[0]["low"] <= ranking[0]["elo"] <= ranking[0]["high"]


def test_length_control_takes_the_length_effect_out():
    rng = np.random.default_rng(2)
    delta = rng.normal(0, 300, 4000)
    quality, effect = 0.3, 1.5
    p = 1 / (1 + np.exp(-(quality + effect * np.tanh((delta + 400) / (delta + 400).std(ddof=1)))))
    fit = preference.length_controlled_win_rate(1000 + delta + 400, np.full(4000, 1000.0), p)
    assert fit["raw_win_rate"] > 0.7
    assert fit["lc_win_rate"] == pytest.approx(1 / (1 + math.exp(-quality)), abs=1e-6)


def test_overoptimisation_fit_and_peak():
    d = np.linspace(0.2, 4, 9)
    for form in ("bon", "rl"):
        alpha, beta = overopt.fit(d, overopt.curve(d, 1.3, 0.4, form), form)
        assert (alpha, beta) == (pytest.approx(1.3), pytest.approx(0.4))
        at, height = overopt.peak(alpha, beta, form)
        assert height == pytest.approx(overopt.curve([at], alpha, beta, form)[0])
        assert height >= max(overopt.curve(np.linspace(0.1, 10, 400), alpha, beta, form)) - 1e-3


def test_diversity():
    assert text.distinct_n([["a", "b"], ["a", "b"]], 1) == 0.5 and text.distinct_n([["a"]], 2) is None
    assert text.levenshtein("kitten", "sitting") == 3 and text.levenshtein("", "abc") == 3
