"""Selectors, pair builders, masks and statistics."""

import math
from itertools import combinations

import numpy as np
import pytest

from stages import selection
from stages.candidates import selecting
from stages.chat import RenderError
from stages.ingestion import pairing
from stages.measures import statistics
from tests.production import CHATML, rendered_mask, renderer

NAN = math.nan


def test_nan_is_never_selected_and_ties_go_to_the_first():
    R = [[NAN, 1.0, 1.0], [NAN, NAN, NAN], [3.0, NAN, 2.0]]
    assert selection.top_k_overall(R, 10) == [6, 8, 1, 2]
    assert selection.top_k_per_prompt(R, 2) == [[1, 2], [], [0, 2]]
    assert selection.threshold(R, 1.0) == [6, 8]
    assert selection.top_k_overall(R, 3, per_prompt_cap=1) == [6, 1]
    rng = np.random.default_rng(0)
    assert all(not np.isnan(np.ravel(R)[k]) for k in selection.random_k_overall(R, 4, rng))
    picks = selection.random_per_prompt(R, rng)
    assert picks[1] is None and picks[0] in (1, 2) and picks[2] in (0, 2)


def test_selection_is_equivariant_to_the_order_of_prompts():
    rng = np.random.default_rng(1)
    R = rng.normal(size=(6, 4))
    order = rng.permutation(6)
    assert [selection.top_k_per_prompt(R, 1)[k] for k in order] == selection.top_k_per_prompt(R[order], 1)


def test_duplicates_keep_the_first():
    R = np.array([[1.0, 2.0, 3.0]])
    assert (
        selecting.drop_duplicates(R, {(0, j): {"completion": [{"content": text}]} for j, text in enumerate("aab")}) == 1
    )
    assert selection.top_k_per_prompt(R, 3) == [[2, 0]]


def test_best_of_n_estimate_is_the_mean_over_subsets():
    rng = np.random.default_rng(2)
    proxy, gold = rng.normal(size=6), rng.normal(size=6)
    for n in range(1, 7):
        brute = np.mean([gold[max(s, key=lambda k: proxy[k])] for s in combinations(range(6), n)])
        assert selection.best_of_n_estimate(proxy, n, gold) == pytest.approx(brute)
    assert selection.best_of_n_estimate(proxy, 7) is None
    assert selection.best_of_n_kl(1) == 0.0


def test_rso_acceptance_frequencies():
    """On three items, each asked where those before it refused, the accepted one of a single-sample run follows exp((r
    - r_max)/beta).
    """
    rewards, beta = [0.0, 0.5, 1.0], 0.5
    rng = np.random.default_rng(3)
    p = np.exp((np.array(rewards) - 1.0) / beta)
    hits = (
        np.bincount([selection.rso_select(rewards, 1, beta, rng.random(3))[0][0] for _ in range(20_000)], minlength=3)
        / 20_000
    )
    assert np.abs(hits - p * np.append(1.0, np.cumprod(1 - p)[:-1])).max() < 0.02
    with pytest.raises(ValueError, match="num_samples=4"):
        selection.rso_select(rewards, 4, beta, rng.random(100))
    assert selection.rso_select(rewards[::-1], 2, 1e-9, [0.5] * 9) == (
        [0, 1],
        4,
        2,
    ), "one pass of three draws, and a second that ends with its first"


def test_pairs_from_scores():
    assert selection.best_vs_worst([0.5, 0.5]) is None and selection.best_vs_worst([NAN, 0.1]) is None
    assert selection.best_vs_worst([0.1, 0.9, 0.9, 0.1]) == (1, 0)
    assert all(p > 0.8 for _, _, p in selection.gap_pairs([3.0, 0.0, NAN, 1.0], eta=0.8))
    assert len(selection.tournament(9, lambda a, b: a < b)[0]) == 8


def test_packing_holds_every_row_once_within_capacity():
    lengths = np.random.default_rng(4).integers(1, 9, 40).tolist()
    bins = selection.pack_best_fit(lengths, 10)
    assert sorted(r for b in bins for r in b) == list(range(40)) and all(sum(lengths[r] for r in b) <= 10 for b in bins)


# --- masks --------------------------------------------------------------------------------------------

ROLES = [
    "bos",
    "header",
    "system",
    "eot",
    "header",
    "user",
    "eot",
    "header",
    "assistant",
    "eot",
    "header",
    "tool",
    "eot",
    "header",
    "assistant",
    "eot",
]
TURNS = [-1, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]


def test_headers_user_and_tool_tokens_are_not_trained():
    assert rendered_mask(ROLES, TURNS, "all_assistant") == [0] * 8 + [1, 1] + [0] * 4 + [1, 1]
    assert rendered_mask(ROLES, TURNS, "final_message") == [0] * 14 + [1, 1]
    assert rendered_mask(ROLES, TURNS, "final_turn") == rendered_mask(ROLES, TURNS, "all_assistant")
    assert rendered_mask(ROLES, TURNS, "full") == [0] + [1] * 15
    with pytest.raises(RenderError, match="final_turn"):
        rendered_mask(ROLES, TURNS, "last")


def test_all_assistant_is_the_sum_of_unrolled_final_turns():
    said = [("user", "a"), ("assistant", "bb"), ("user", "c"), ("assistant", "ddd")]
    roles, turns = [[role for role, text in said for _ in text], [k for k, (_, text) in enumerate(said) for _ in text]]
    rows = pairing.unroll([role for role, _ in said])
    parts = [
        rendered_mask(roles[:end], turns[:end], "final_turn")
        for end in (turns.index(at) + len(said[at][1]) for at, _ in rows)
    ]
    assert [at for at, _ in rows] == [1, 3] and np.sum(
        [part + [0] * (len(roles) - len(part)) for part in parts], 0
    ).tolist() == rendered_mask(roles, turns, "all_assistant")
    assert [weight for _, weight in pairing.unroll([role for role, _ in said], balance="per_conversation")] == [
        0.5,
        0.5,
    ]


def test_chatml_rejects_what_it_cannot_say():
    for roles in (["assistant"], ["user", "user"], ["user", "tool"], ["system", "system"]):
        with pytest.raises(RenderError, match="must alternate user/assistant"):
            renderer(CHATML, None, "<|im_end|>", "<|im_start|>").conversation(
                [{"role": r, "content": "x"} for r in roles]
            )


# --- statistics ----------------------------------------------------------------------------------------


def test_intervals_cover():
    rng = np.random.default_rng(5)
    wilson, bootstrap = 0, 0
    for trial in range(300):
        x = rng.random(60) < 0.3
        low, high = statistics.wilson(int(x.sum()), 60)
        wilson += low <= 0.3 <= high
        low, high = statistics.bootstrap_ci(x.astype(float), n=200, seed=trial)
        bootstrap += low <= 0.3 <= high
    assert wilson >= 0.9 * 300 and bootstrap >= 0.88 * 300
    assert statistics.wilson(0, 0) == (0.0, 1.0)


def test_bootstrap_is_a_function_of_its_seed():
    x = np.arange(10.0)
    assert (
        statistics.bootstrap_ci(x, seed=1) == statistics.bootstrap_ci(x, seed=1) != statistics.bootstrap_ci(x, seed=2)
    )
    low, high = statistics.bootstrap_ci(x, clusters=[0] * 5 + [1] * 5, seed=1)
    assert low == 2.0 and high == 7.0


def test_a_resampled_cluster_brings_all_its_items():
    values, clusters = [1.0] * 9 + [0.0], ["a"] * 9 + ["b"]
    assert statistics.bootstrap_ci(values, clusters=clusters) == (0.0, 1.0)  # both a: 1, a and b: 0.9, both b: 0
    assert statistics.bootstrap_ci(values, clusters=clusters, statistic=np.mean) == (0.0, 1.0)
    assert statistics.bootstrap_ci(values, level=0.4, clusters=clusters) == (0.9, 0.9)


def test_calibrated_margins_have_small_calibration_error():
    rng = np.random.default_rng(7)
    d = rng.normal(0, 2, 20_000)
    flipped = rng.random(20_000) < 1 / (1 + np.exp(np.abs(d)))
    margins = np.where(flipped, -np.abs(d), np.abs(d))
    assert statistics.ece(margins) < 0.02 < statistics.ece(5 * margins)
    assert statistics.ece(*statistics.preference_confidence(margins, np.zeros_like(margins))) == statistics.ece(margins)
    assert math.isnan(statistics.ece([]))


def test_accuracy_counts_ties_apart():
    found = statistics.pairwise_accuracy([1, 0, 0], [0, 0, 1])
    assert (found["strict"], found["ties"], found["n"]) == (1 / 3, 1 / 3, 3) and found["half_credit"] == 0.5


def test_mcnemar_and_clusters():
    assert statistics.mcnemar_exact(0, 0) == 1.0 and statistics.mcnemar_exact(8, 0) == 2 / 2**8
    x = [1.0, 0.0, 1.0, 1.0]
    assert statistics.clustered_se(x, [0, 1, 2, 3]) == pytest.approx(np.std(x) / 2)
    assert math.isnan(statistics.pearson([1, 1], [0, 1]))
