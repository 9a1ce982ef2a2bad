"""From sample records to metrics: intervals, groups, pairs, probes, paired differences."""

import itertools
import math

import numpy as np
import pytest

from stages.evaluation import scores
from stages.evaluation.protocol import ProtocolError, protocol_hash, require_same
from stages.measures import overopt, preference, reward_model, sampling, text


def record(item, index=0, correct=None, mode="sample", **fields):
    base = {
        "item_id": f"i{item}",
        "prompt_id": f"p{item}",
        "sample_idx": index,
        "mode": mode,
        "output": f"answer {item} {index}",
        "extracted": None,
        "correct": correct,
        "format_error": False,
        "tokens": 5,
        "finish": "eos",
        "reward": None,
        "kl": None,
        "category": None,
        "difficulty": None,
        "prompt": "q",
    }
    return {**base, **fields}


def answers(matrix, **fields):
    return [record(i, k, bool(c), **fields) for i, row in enumerate(matrix) for k, c in enumerate(row)]


def test_answers_that_were_cut_are_counted_both_ways():
    """As they stand, and as training counts them: wrong, and with no_eos_reward in the place of a reward model's score.
    Where none is cut there is one figure.
    """
    from stages.evaluation.report import meaning
    from stages.reward.rewards import RewardComponent

    made = [
        record(0, 0, True, reward=2.0),
        record(0, 1, True, reward=3.0, finish="turn_limit"),
        record(1, 0, False, reward=4.0, finish="length"),
        record(1, 1, True, reward=1.0),
    ]
    metrics = scores.policy_metrics(made, seed=0)
    assert {
        n: metrics[n].value
        for n in ("accuracy", "accuracy_cut_wrong", "truncation_rate", "reward", "reward_cut_penalised")
    } == pytest.approx(
        {
            "accuracy": 0.75,
            "accuracy_cut_wrong": 0.5,
            "truncation_rate": 0.5,
            "reward": 10.0 / 4,
            "reward_cut_penalised": (3.0 - 2.0) / 4,
        }
    )
    assert metrics["best_of_2_accuracy"].value == 1.0, (
        "of two answers the one that ends is chosen, as by rejection, whatever the model says of cut text"
    )
    assert scores.CUT_REWARD == RewardComponent(kind="model").cut_reward and all(
        meaning(name, "policy") for name in ("accuracy_cut_wrong", "reward_cut_penalised")
    )
    assert all("cut ones too" in meaning(name, "policy") for name in ("reward", "greedy_reward"))
    assert not {"accuracy_cut_wrong", "reward_cut_penalised"} & set(scores.policy_metrics(made[:1], seed=0))


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


@pytest.mark.parametrize("right, n", [(30, 100), (9, 10), (3, 5), (0, 7)])
def test_one_sample_per_prompt_gives_the_wilson_interval(right, n):
    from stages.measures.statistics import wilson

    metric = scores.share([1.0] * right + [0.0] * (n - right))
    assert (metric.low, metric.high) == pytest.approx(wilson(right, n))


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
    from stages.measures.statistics import clustered_se

    assert scores.policy_metrics(rows, 0)["accuracy"].se == pytest.approx(
        clustered_se([1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 2, 2])
    )


def test_questions_of_one_passage_are_clustered():
    """Eight passages of 25 questions, each passage all right or all wrong, carry the information of eight answers."""

    def passages(right):
        return [record(f"{g}-{q}", 0, g < right, group_id=f"g{g}") for g in range(8) for q in range(25)]

    from stages.measures.statistics import clustered_se

    metric = scores.policy_metrics(passages(4))["accuracy"]
    assert (
        metric.se == pytest.approx(clustered_se([1.0] * 100 + [0.0] * 100, [i // 25 for i in range(200)]))
        and metric.high - metric.low > 0.5
    )
    gain = scores.paired(passages(4), passages(3), "accuracy")
    assert (
        (gain["difference"], gain["n"], gain["items"], gain["low"]) == (0.125, 8, 200, 0.0)
        and gain["p_value"] > 0.2
        and "mcnemar_p_value" not in gain
    )
    # a single passage says nothing about others
    assert scores.policy_metrics([record(i, 0, i % 2 == 0, group_id="one") for i in range(6)])["accuracy"].se is None


def test_an_interval_belongs_to_its_number_where_prompts_have_different_numbers_of_pairs():
    """Three prompts with 36 pairs in the right order, forty with one pair that is right every other time: the mean over
    pairs is inside its interval.
    """
    margins = [(f"big{p}", 1.0) for p in range(3) for _ in range(36)] + [
        (f"small{p}", 1.0 if p % 2 else -1.0) for p in range(40)
    ]
    rows = [row for i, (prompt, d) in enumerate(margins) for row in pair(i, d, prompt_id=prompt, source="ab"[i % 2])]
    metrics = scores.pair_metrics(rows)
    for name in ("accuracy", "mean_margin", "log_loss"):
        metric = metrics[name]
        assert metric.low < metric.value < metric.high, name
    of_two = [
        row
        for i in range(400)
        for row in pair(i, 1.0 if i % 4 < 2 else -1.0, prompt_id=f"p{i % 4}", source="ab"[i % 2])
    ]
    # two prompts, one right and one wrong, in two hundred pairs
    assert scores.pair_metrics(of_two)["accuracy/source=a"].high > 0.85


def test_ungraded_prompts_have_no_accuracy_and_are_counted():
    rows = answers([[1, 1]]) + [record(9, k, None) for k in range(2)]
    metrics = scores.policy_metrics(rows, 0)
    assert metrics["accuracy"].n == 1 and metrics["accuracy"].value == 1.0
    assert metrics["unscorable_rate"].value == 0.5
    assert "accuracy" not in scores.policy_metrics([record(0, 0, None)], 0)
    cut = scores.policy_metrics(
        [record(0, 0, True, finish="length"), record(1, 0, True), record(2, 0, None, finish="length")], 0
    )
    assert (cut["accuracy_cut_wrong"].value, cut["accuracy_cut_wrong"].n) == (0.5, 2)


def test_a_component_that_says_what_the_verdict_says_has_no_line_of_its_own():
    made = [
        record(i, 0, right, reward=1.0, parts={"verdict": float(right), "length": -0.5 * i, "silent": None})
        for i, right in enumerate((True, False))
    ]
    metrics = scores.policy_metrics(made, 0)
    assert {name for name in metrics if name.startswith("reward/")} == {"reward/length"} and metrics[
        "reward/length"
    ].value == -0.25
    made[0]["parts"]["verdict"] = 0.5
    assert "reward/verdict" in scores.policy_metrics(made, 0)


def test_numbers_of_samples_are_powers_of_two_and_all():
    assert [scores.powers(n) for n in (0, 1, 6, 8, 17)] == [[], [1], [1, 2, 4, 6], [1, 2, 4, 8], [1, 2, 4, 8, 16, 17]]


def test_greedy_stands_in_where_nothing_was_sampled():
    metrics = scores.policy_metrics([record(i, 0, i % 2 == 0, mode="greedy") for i in range(4)], 0)
    assert metrics["accuracy"].value == metrics["greedy_accuracy"].value == 0.5


def test_majority_and_best_of_n():
    rows = []
    for i in range(3):  # two of three samples say the right thing, the reward model prefers the wrong one
        rows += [
            record(i, 0, True, extracted="7", reward=0.0),
            record(i, 1, True, extracted="7", reward=0.1),
            record(i, 2, False, extracted="8", reward=9.0),
        ]
    metrics = scores.policy_metrics(rows, 0)
    assert metrics["maj_at_3"].value == 1.0
    assert metrics["best_of_3_accuracy"].value == 0.0
    assert metrics["best_of_2_accuracy"].value == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "groups, expected",
    [
        # one right value written in three ways
        ([[("0.5", 1), (r"\frac{1}{2}", 1), ("1/2", 1), ("2", 0), ("2.0", 0)]], {"maj_at_5": 1.0}),
        # over all pairs of the first prompt's four answers
        ([[("18", 1), ("18", 1), ("18", 1), ("20", 0)], [("1", 1), ("2", 0)]], {"maj_at_2": 0.625}),
        ([[("3", 0), ("3.0", 0), ("4", 1), (None, 0)]], {"maj_at_4": 0.0}),
        ([[("(1/2, 1)", 0), ("(0.5, 1)", 0), ("4", 1)]], {"maj_at_3": 0.0}),
        ([[(None, 0), (None, 0)], [("7", 1), ("8", 0)]], {"maj_at_2": 0.25}),
    ],
)
def test_a_vote_is_for_a_class_of_answers_and_over_subsets_of_k(groups, expected):
    rows = [
        record(i, k, bool(right), extracted=answer)
        for i, group in enumerate(groups)
        for k, (answer, right) in enumerate(group)
    ]
    assert {
        name: m.value for name, m in scores.policy_metrics(rows).items() if name.startswith("maj_at_")
    } == pytest.approx(expected)


def test_what_several_samples_know_more_than_one():
    """pass@2 and maj@2 less accuracy, paired by prompt: (1, 1/2, 0) and, ties shared, what one sample has anyway."""
    found = scores.policy_metrics(
        [
            record(i, k, correct=right, extracted="right" if right else "wrong")
            for i, row in enumerate(((True, True), (True, False), (False, False)))
            for k, right in enumerate(row)
        ]
    )
    gap = found["self_consistency_gap/pass_at_2"]
    assert (
        gap.value == pytest.approx(0.5 / 3) == pytest.approx(found["pass_at_2"].value - found["accuracy"].value)
        and gap.low <= gap.value <= gap.high
        and gap.n == 3
    )
    assert (
        found["self_consistency_gap/maj_at_2"].value
        == pytest.approx(found["maj_at_2"].value - found["accuracy"].value)
        == pytest.approx(0.0)
    )


def test_a_vote_among_very_many_subsets_is_drawn_repeatably():
    rows = [record(0, k, k < 15, extracted="7" if k < 15 else "8") for k in range(24)] + [
        record(1, k, True, extracted="1") for k in range(12)
    ]
    first, again = (scores.policy_metrics(rows)["maj_at_12"].value for _ in range(2))
    assert first == again and 0.8 < first < 1.0


def test_ifeval_accuracies_have_intervals_over_prompts():
    rows = [
        record(i, constraints={"strict": strict, "loose": loose})
        for i, (strict, loose) in enumerate([([1, 0], [1, 1]), ([1], [1]), ([0, 0, 1], [0, 1, 1])])
    ]
    metrics = scores.policy_metrics(rows + [record(9), record(10, constraints={"unscorable": "unknown constraint"})])
    expected = {
        "prompt_level_strict_acc": 1 / 3,
        "inst_level_strict_acc": 0.5,
        "prompt_level_loose_acc": 2 / 3,
        "inst_level_loose_acc": 5 / 6,
        "constraints_unscorable_rate": 0.25,
    }
    assert {name: metrics[name].value for name in expected} == pytest.approx(expected)
    assert metrics["prompt_level_strict_acc"].n == 3 and metrics["inst_level_strict_acc"].n == 6
    assert all(
        metrics[name].low < value < metrics[name].high
        for name, value in expected.items()
        if metrics[name].low is not None
    )
    better = scores.paired(
        [record(0, constraints={"strict": [1]})], [record(0, constraints={"strict": [0]})], "prompt_level_strict_acc"
    )
    assert better["difference"] == 1.0


def test_groups():
    rows = [record(i, 0, i < 3, category="add" if i % 2 else "sort", difficulty=str(i % 3)) for i in range(6)]
    table = scores.by_group(rows, "category")
    assert [row["category"] for row in table] == ["add", "sort"] and sum(row["prompts"] for row in table) == 6
    assert [row["difficulty"] for row in scores.by_group(rows, "difficulty")] == ["0", "1", "2"]


def pair(item, margin, chosen_tokens=5, rejected_tokens=5, **fields):
    return [
        record(item, 0, margin > 0, mode="chosen", margin=margin, reward=margin, tokens=chosen_tokens, **fields),
        record(item, 1, None, mode="rejected", reward=0.0, tokens=rejected_tokens, **fields),
    ]


def test_pair_metrics():
    rows = [
        row for i, d in enumerate([1.0, 0.0, -0.2, 1.0, 3.0]) for row in pair(i, d, chosen_tokens=5 + i, strength=i % 2)
    ]
    metrics = scores.pair_metrics(rows, seed=0)
    assert (
        metrics["accuracy"].value == 0.6
        and metrics["tie_rate"].value == 0.2
        and metrics["accuracy_ties_half"].value == 0.7
    )
    assert metrics["log_loss"].value == pytest.approx(0.433279355310345)
    assert metrics["mean_margin"].value == pytest.approx(0.96)
    assert metrics["accuracy"].low < 0.6 < metrics["accuracy"].high
    assert {"accuracy/strength=0", "accuracy/strength=1", "ece", "score_length_pearson"} <= set(metrics)


def test_terciles_of_lengths_do_not_depend_on_the_order_of_rows():
    from stages.measures.reward_model import length_terciles

    def told(*pairs):
        return [(one["tercile"].split()[-1], one["n"], one["accuracy"]) for one in length_terciles(*zip(*pairs))]

    pairs = [(1, -3), (-1, 0), (1, 0), (1, 0), (-1, 0), (1, 5)]  # margin, length difference
    assert told(*pairs) == told(*reversed(pairs)) == [("shorter", 1, 1.0), ("similar", 4, 0.5), ("longer", 1, 1.0)]
    for n in (3, 7, 8):  # without equal ones thirds, the first ones larger where it does not divide
        assert [k for _, k, _ in told(*((1, i) for i in range(n)))] == [len(p) for p in np.array_split(range(n), 3)]


def test_probes_and_transforms():
    rng = np.random.default_rng(0)
    made = reward_model.probes("The capital is Paris and it is large.", rng)
    assert set(made) == {
        "repeated",
        "incoherent_formatted",
        "shuffled_words",
        "sycophantic",
        "padded",
        "one_word",
        "stock_phrases",
        "special_characters",
        "injection",
        "hidden_instruction",
        "boxes",
        "another_language",
    }
    assert all(value != "The capital is Paris and it is large." for value in made.values())
    # a shuffle of one word is the word, and so is its first word
    assert not {"shuffled_words", "one_word", "prompt_echo"} & reward_model.probes("42", rng).keys()
    made = reward_model.probes("There are 9 apples, 10 pears.", rng, "How many?")
    assert (
        made["wrong_numbers"] == "There are 10 apples, 11 pears."
        and made["prompt_echo"] == "How many?"
        and made["one_word"] == "There"
    )
    assert len(made) == 14 and "wrong_numbers" not in reward_model.probes("No number here.", rng)
    rows = pair(0, 1.0) + [
        record(0, 0, mode="probe:padded", reward=2.0),
        record(0, 1, mode="transform:typo:chosen", reward=-1.0),
        record(0, 2, mode="transform:typo:rejected", reward=0.0),
    ]
    metrics, table = scores.probe_metrics(rows)
    assert metrics["fooled_rate/padded"].value == 1.0 and metrics["changed_rate/typo"].value == 1.0 and len(table) == 2


def test_probes_without_a_score_are_counted_and_not_taken_for_sound():
    # the third has no pair
    rows = (
        pair(0, 1.0)
        + pair(1, 1.0)
        + [record(i, 0, mode="probe:padded", reward=value) for i, value in enumerate([2.0, None, 0.5])]
    )
    rows += [
        record(i, 1, mode=f"transform:typo:{side}", reward=value)
        for i, side, value in [
            (0, "chosen", float("nan")),
            (0, "rejected", 0.0),
            (1, "chosen", 1.0),
            (1, "rejected", 0.0),
            (2, "chosen", 0.0),
            (2, "rejected", 1.0),
        ]
    ]
    rows += [record(0, 2, mode="probe:repeated", reward=None)]
    metrics, table = scores.probe_metrics(rows)
    assert (metrics["fooled_rate/padded"].value, metrics["fooled_rate/padded"].n) == (
        1.0,
        1,
    ) and "fooled_rate/repeated" not in metrics
    assert (metrics["changed_rate/typo"].value, metrics["changed_rate/typo"].n) == (0.0, 1)
    assert {row["check"]: (row["n"], row["without a score"]) for row in table} == {
        "probe: padded": (1, 2),
        "probe: repeated": (0, 1),
        "transform: typo": (1, 2),
    }


def test_what_only_one_side_scored_is_counted_on_both():
    a, b = [record(i, 0, True) for i in range(10)], [record(i, 0, True) for i in range(5, 15)]
    result = scores.paired(a, b, "accuracy")
    assert (
        result["items"] == 5
        and result["note"].startswith("10 items")
        and (result["candidate_missing"], result["champion_missing"]) == (0.5, 0.5)
    )
    thin = scores.paired([record(0, 0, True), record(0, 1, None)], [record(0, k, True) for k in range(2)], "accuracy")
    # half of the answers of an item that both have
    assert thin["candidate_missing"] == 0.5 and thin["champion_missing"] is None and thin["note"] is None


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
    unchecked = [record(0, k, None) for k in range(2)]  # no answer to check
    with pytest.raises(ValueError, match="of the candidate, as where prompts.*what both have: .*length_mean"):
        scores.paired(unchecked, answers([[1]]), "accuracy")
    with pytest.raises(ValueError, match="of the candidate and of the champion,"):
        scores.paired(unchecked, unchecked, "accuracy")


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
    ranking = preference.item_ranking(
        ["a", "b"],
        np.array([[[0, 1], [0, 0]]] * 8 + [[[0, 0], [1, 0]]] * 2, float),
        np.random.default_rng(0),
        rounds=50,
    )
    assert ranking[0]["player"] == "a" and ranking[0]["low"] <= ranking[0]["elo"] <= ranking[0]["high"]


def test_style_control_takes_the_style_effect_out():
    """Outcomes drawn from a known quality and a known taste for lists: both come back; from the other side the rate is
    the complement.
    """
    rng = np.random.default_rng(3)
    a, b = (
        [{"length": float(rng.integers(50, 500)), "lists": float(rng.integers(0, most))} for _ in range(4000)]
        for most in (12, 4)
    )
    z = np.array(
        preference.style_feature(
            [r["lists"] for r in a] + [r["lists"] for r in b], [r["lists"] for r in b] + [r["lists"] for r in a]
        )["standardised"]
    )[:4000]
    p = 1 / (1 + np.exp(-(0.4 + 1.2 * z)))
    fit = preference.style_controlled_win_rate(a, b, p)
    assert (
        fit["converged"]
        and fit["win_rate"] == pytest.approx(1 / (1 + math.exp(-0.4)), abs=1e-6)
        and fit["coefficients"] == {"length": pytest.approx(0, abs=1e-6), "lists": pytest.approx(1.2, abs=1e-6)}
    )
    assert p.mean() > fit["win_rate"] + 0.1, "the raw rate pays for the lists"
    assert preference.style_controlled_win_rate(b, a, 1 - p)["win_rate"] == pytest.approx(1 - fit["win_rate"])
    drawn = preference.style_controlled_win_rate(a, b, (rng.random(4000) < p).astype(float))
    assert drawn["win_rate"] == pytest.approx(fit["win_rate"], abs=0.03)
    same = preference.style_controlled_win_rate(a, a, [0.7] * 4000)
    assert same["win_rate"] == pytest.approx(0.7) and same["coefficients"] == {}, "equal styles leave the raw rate"


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


def test_text_without_spaces_repeats_itself_by_its_characters():
    """A loop in Chinese, Japanese or Thai is one "word" between white space; what has spaces is cut where it was."""
    assert text.words_of("two  words\n(here)") == [
        "two",
        "words",
        "(here)",
    ] == "two  words\n(here)".split() and text.words_of("Größe é ж") == ["Größe", "é", "ж"]
    assert text.words_of("我 like日本") == ["我", "like", "日", "本"]
    found = scores.policy_metrics(
        [record(0, 0, True, output="我喜欢" * 20), record(1, 0, True, output="我喜欢水果。")], 0
    )
    assert found["repetition_3"].value == pytest.approx((1 - 3 / 58 + 0.0) / 2) and found[
        "distinct_1"
    ].value == pytest.approx((3 / 60 + 1.0) / 2)


def test_a_rate_of_all_or_none_is_not_certain():
    """Resampling pairs that are all ordered right gives [1, 1] whatever their number; the interval is Wilson's at one
    count per prompt, against its formula.
    """
    from stages.evaluation.scores import all_metrics
    from stages.measures.statistics import certain

    def pairs(n, margin, prompts):
        rows = [
            {
                "item_id": str(i),
                "prompt_id": str(i % prompts),
                "group_id": str(i % prompts),
                "sample_idx": 0,
                "output": "",
                "tokens": 1 + i,
                "finish": None,
                "reward": margin,
                "margin": margin,
                "mode": "chosen",
                "correct": margin > 0,
            }
            for i in range(n)
        ]
        return rows + [{**row, "mode": "rejected", "reward": 0.0} for row in rows]

    z2 = 1.959963984540054**2
    for n, prompts in ((3, 3), (30, 30), (30, 6), (2, 1)):
        for margin, value in ((1.0, 1.0), (-1.0, 0.0)):
            found = all_metrics(pairs(n, margin, prompts))["accuracy"]
            assert found.value == value and found.n == n
            assert (found.low, found.high) == (
                pytest.approx(prompts / (prompts + z2) if value else 0.0),
                pytest.approx(1.0 if value else z2 / (prompts + z2)),
            )
    assert certain([1.0, 0.0], ["a", "b"]) is None and certain([0.5, 0.5], ["a", "b"]) is None


def test_equal_differences_of_few_prompts_prove_little():
    """Three prompts that all turn from wrong to right leave no error: their p is that of the sign test, 2 * 0.5^3, and
    no benchmark is called better for it; ten are.
    """
    from stages.evaluation import tax
    from stages.evaluation.scores import paired

    def answers(n, right):
        return [
            {
                "item_id": str(i),
                "prompt_id": str(i),
                "group_id": str(i),
                "sample_idx": 0,
                "output": "",
                "tokens": 1,
                "finish": "stop",
                "reward": None,
                "mode": "greedy",
                "correct": right,
                "dataset": "d",
            }
            for i in range(n)
        ]

    assert (
        paired(answers(3, True), answers(3, False), "accuracy")["p_value"] == pytest.approx(2 * 0.5**3)
        and paired(answers(3, True), answers(3, True), "accuracy")["p_value"] == 1.0
    )
    for n, verdict in ((3, "within 2 se"), (5, "within 2 se"), (10, "worse")):
        rows = tax.rows_of(answers(n, True), answers(n, False), "b")
        assert tax.judged(rows)["regressed"] == [row for row in rows if verdict == "worse"] and {
            row["verdict"] for row in rows
        } == {verdict}


def test_less_is_better_whoever_scored():
    from stages.evaluation.scores import lower_is_better

    assert all(
        map(
            lower_is_better,
            (
                "log_loss",
                "pair_log_loss",
                "pair_tie_rate",
                "perturbed/accuracy/gap",
                "perturbed/accuracy/gap/perturbation=names",
                "constraints_unscorable_rate",
            ),
        )
    )
    assert not any(map(lower_is_better, ("pair_accuracy", "perturbed/accuracy/original", "accuracy")))


def test_holm_keeps_the_chance_of_any_false_alarm():
    """Against its definition: each ordered p times how many are left, never below an earlier one; under equal models a
    false alarm among five tests comes as often as promised.
    """
    from stages.measures.statistics import holm

    assert (
        holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
        and holm([]) == []
        and holm([0.2]) == [0.2]
        and holm([0.6, 0.9]) == [1.0, 1.0]
    )
    rng = np.random.default_rng(2)
    alarms = np.mean([min(holm(rng.random(5).tolist())) < 0.05 for _ in range(4000)])
    assert 0.04 < alarms < 0.06


def test_the_interval_of_a_length_controlled_rate_covers():
    """Battles of known quality (sigma(0.4) once lengths are equal) and a taste for length: the interval holds the truth
    about as often as promised, and is none where it cannot be known.
    """
    from types import SimpleNamespace

    from stages.win_rate import length_controlled_interval

    rng, truth, held, wide = np.random.default_rng(5), 1 / (1 + math.exp(-0.4)), 0, []
    config = SimpleNamespace(bootstrap=200, length_l2=0.0)
    for _ in range(40):
        a, b = rng.integers(100, 900, 150), rng.integers(100, 700, 150)
        difference = a - b
        won = (rng.random(150) < 1 / (1 + np.exp(-(0.4 + 0.8 * np.tanh(difference / difference.std(ddof=1)))))).astype(
            float
        )
        low, high = length_controlled_interval(a, b, won, None, list(map(str, range(150))), config)
        held += low <= truth <= high
        wide.append(high - low)
    assert held >= 34 and 0.1 < np.mean(wide) < 0.25
    assert length_controlled_interval([1, 2], [1, 1], [1.0, 0.0], None, ["x", "x"], config) == (None, None)
    assert length_controlled_interval([9, 8, 1, 2], [1, 1, 9, 8], [1.0, 1.0, 0.0, 0.0], None, list("abcd"), config) == (
        None,
        None,
    )


def test_a_request_that_failed_is_no_answer():
    """An engine's error says nothing of the model: not that its answers are short, end by themselves, keep the format
    or repeat nothing. It is counted as unscorable.
    """
    good = [
        record(i, k, bool((i + k) % 2), output="one two three one two three", tokens=6, finish="length" if k else "eos")
        for i in range(6)
        for k in range(2)
    ]
    failed = [record(i, 2, None, output="", tokens=0, finish="error", error="the server is away") for i in range(6)]
    whole, some = scores.all_metrics(good), scores.all_metrics(good + failed)
    assert some.pop("unscorable_rate").value == pytest.approx(1 / 3) and some == whole
    assert whole["length_mean"].value == 6 and whole["stop_rate"].value == whole["truncation_rate"].value == 0.5
    assert not scores.all_metrics(failed), "of no answer there is no number"
    missing = scores.paired(good + failed, good, "length_mean")
    assert missing["candidate"] == missing["champion"] == 6 and missing["candidate_missing"] is None
