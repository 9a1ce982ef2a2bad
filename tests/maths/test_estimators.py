"""Advantages, returns, shaping and controllers: loops written out, degenerate cases, presets as the papers print
them.
"""

import math

import numpy as np
import pytest
import torch

from stages import estimators, losses
from stages.policy import credit
from stages.algorithms import DIRECT_METHODS, RL_PRESETS, resolve, rl_preset
from stages.direct.combinations import validate_direct
from stages.policy.combinations import validate_rl
from tests.production import step_mean

# --- GAE against a loop -----------------------------------------------------------------


def gae_loop(rewards, values, mask, bootstrap, gamma, lam):
    """The definition on the stream of action tokens of one row."""
    at = [t for t in range(len(mask)) if mask[t]]
    v = [values[t] for t in at] + [bootstrap]
    out, running = [0.0] * len(mask), 0.0
    for k in range(len(at) - 1, -1, -1):
        running = rewards[at[k]] + gamma * v[k + 1] - v[k] + gamma * lam * running
        out[at[k]] = running
    return out


def test_gae_against_loop():
    rng = np.random.default_rng(0)
    for _ in range(50):
        B, T = int(rng.integers(1, 5)), int(rng.integers(1, 9))
        mask = rng.random((B, T)) < 0.6  # gaps are tool tokens, the end is padding
        r, v, boot = rng.normal(size=(B, T)), rng.normal(size=(B, T)), rng.normal(size=B)
        gamma, lam = rng.uniform(0.5, 1.0), rng.uniform(0, 1)
        adv, ret = estimators.gae(np.where(mask, r, np.nan), np.where(mask, v, np.nan), mask, boot, gamma, lam)
        expected = np.array([gae_loop(r[b], v[b], mask[b], boot[b], gamma, lam) for b in range(B)])
        assert np.allclose(adv, expected, atol=1e-12)
        assert np.allclose(ret, np.where(mask, expected + v, 0.0), atol=1e-12)


def test_lambda_one_is_return_minus_value():
    rng = np.random.default_rng(1)
    r, v, mask = rng.normal(size=(3, 5)), rng.normal(size=(3, 5)), np.ones((3, 5))
    adv, _ = estimators.gae(r, v, mask, 0.0, 0.9, 1.0)
    assert np.allclose(adv, estimators.reward_to_go(r, mask, 0.9) - v)


# --- groups -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["mean_std", "mean", "leave_one_out", "batch_std", "batch_centered_std"])
def test_groups_without_signal_get_exactly_zero(mode):
    """Equal rewards, float noise, one valid row, failed scorers."""
    for rewards in (
        [0.1, 0.1, 0.1],
        [1.0, 1.0, 1.0 + 1e-9],
        [0.1 + 0.2, 0.3, 0.3],
        [-1e-30, -1e-30],
        [math.nan, 2.0],
        [math.nan, math.nan],
    ):
        adv, informative = estimators.group_advantage(rewards, ["q"] * len(rewards), mode)
        assert adv.tolist() == [0.0] * len(rewards) and not informative.any()


def test_grouping_is_by_id_and_ignores_order():
    rng = np.random.default_rng(2)
    rewards, ids, lengths = rng.normal(size=12), [f"p{k % 3}" for k in range(12)], rng.integers(1, 9, size=12)
    for mode in estimators.GROUP_MODES:
        adv, info = estimators.group_advantage(rewards, ids, mode, lengths=lengths)
        order = rng.permutation(12)
        again, info2 = estimators.group_advantage(rewards[order], [ids[k] for k in order], mode, lengths=lengths[order])
        assert np.allclose(again, adv[order], atol=1e-12) and (info2 == info[order]).all()


def test_lengths_are_asked_for_where_they_weigh():
    with pytest.raises(ValueError, match="give lengths="):
        estimators.group_advantage([1.0, 0.0], ["a", "a"], "length_weighted")


def test_failed_scores_leave_the_statistics():
    adv, informative = estimators.group_advantage([1.0, math.nan, 0.0, math.inf], ["a"] * 4, "mean")
    assert adv.tolist() == [0.5, 0.0, -0.5, 0.0] and informative.tolist() == [True, False, True, False]
    adv, _ = estimators.group_advantage([1.0, 0.0, 9.0], ["a"] * 3, "mean", valid=[True, True, False])
    assert adv.tolist() == [0.5, -0.5, 0.0]


def test_a_batch_mean_is_that_of_what_counts():
    adv, counted = estimators.group_advantage(
        [1.0, math.nan, 4.0, 9.0], [*"aabb"], "batch_mean", valid=[True, True, True, False]
    )
    assert adv.tolist() == [-1.5, 0.0, 1.5, 0.0] and counted.tolist() == [True, False, True, False]
    assert estimators.group_advantage([math.nan], ["a"], "batch_mean")[0].tolist() == [0.0]


def test_shift_and_scale_of_rewards():
    rng = np.random.default_rng(3)
    r, ids = rng.normal(size=8), ["a"] * 4 + ["b"] * 4
    for mode in ("mean", "leave_one_out", "mean_std"):
        assert np.allclose(
            estimators.group_advantage(r + 100, ids, mode)[0], estimators.group_advantage(r, ids, mode)[0]
        )
    assert np.allclose(
        estimators.group_advantage(7 * r, ids, "mean_std", std_eps=0.0)[0],
        estimators.group_advantage(r, ids, "mean_std", std_eps=0.0)[0],
    )
    assert np.allclose(
        estimators.group_advantage(7 * r, ids, "mean")[0], 7 * estimators.group_advantage(r, ids, "mean")[0]
    )


def test_mismatched_ids_say_what_is_wrong():
    with pytest.raises(ValueError, match="one group id each"):
        estimators.group_advantage([1.0, 2.0], ["a"])


# --- presets equal the papers, written out in numpy -----------------------------------------


def data(seed=0, Q=2, G=3, T=4):
    rng = np.random.default_rng(seed)
    B = Q * G
    lengths = rng.integers(1, T + 1, B)
    new, old, ref = (rng.normal(-1, 0.3, (B, T)) for _ in range(3))
    return new, old, ref, lengths, rng.normal(size=B), [k // G for k in range(B)]


def step_loss(row, new, old, ref, lengths, rewards, ids, scale=10.0):
    mask = torch.tensor((np.arange(new.shape[1]) < lengths[:, None]).astype(int))
    adv, _ = estimators.group_advantage(rewards, ids, row.group_mode, row.std_ddof, row.std_eps)
    per, _ = losses.policy_loss(
        torch.tensor(new),
        torch.tensor(old),
        torch.tensor(adv),
        mask,
        epsilon=row.epsilon,
        epsilon_high=row.epsilon_high,
        ratio_level=row.ratio_level,
        surrogate=row.surrogate,
    )
    if row.kl_loss_coef:
        per = per + row.kl_loss_coef * losses.kl_estimate(
            torch.tensor(new), torch.tensor(ref), row.kl_loss_estimator, mask
        )
    return float(step_mean(per, mask, row.aggregation, scale))


def clipped(r, A, low=0.2, high=0.2):
    return min(r * A, min(max(r, 1 - low), 1 + high) * A)


def test_grpo_is_equation_3_of_shao_et_al():
    new, old, ref, n, R, ids = data()
    total = 0.0
    for i in range(len(R)):
        group = [R[j] for j in range(len(R)) if ids[j] == ids[i]]
        A = (R[i] - np.mean(group)) / (np.std(group, ddof=1) + 1e-4)
        inner = 0.0
        for t in range(n[i]):
            d = ref[i, t] - new[i, t]
            inner += clipped(math.exp(new[i, t] - old[i, t]), A) - 0.04 * (math.exp(d) - d - 1)
        total += inner / n[i]
    assert step_loss(RL_PRESETS["grpo"], new, old, ref, n, R, ids) == pytest.approx(-total / len(R), abs=1e-12)


def test_dr_grpo_has_no_std_and_no_length_division():
    new, old, ref, n, R, ids = data(1)
    total = sum(
        clipped(math.exp(new[i, t] - old[i, t]), R[i] - np.mean([R[j] for j in range(len(R)) if ids[j] == ids[i]]))
        for i in range(len(R))
        for t in range(n[i])
    )
    assert step_loss(RL_PRESETS["dr_grpo"], new, old, ref, n, R, ids) == pytest.approx(
        -total / len(R) / 10.0, abs=1e-12
    )


def test_rloo_is_leave_one_out_times_sequence_logp():
    new, old, ref, n, R, ids = data(2)
    total = 0.0
    for i in range(len(R)):
        others = [R[j] for j in range(len(R)) if ids[j] == ids[i] and j != i]
        total += (R[i] - np.mean(others)) * sum(new[i, : n[i]])
    assert step_loss(RL_PRESETS["rloo"], new, old, ref, n, R, ids) == pytest.approx(-total / len(R), abs=1e-12)


def test_reinforce_is_the_reward_weighted_nll():
    new, old, ref, n, R, ids = data(3)
    total = sum(R[i] * sum(new[i, : n[i]]) for i in range(len(R)))
    assert step_loss(RL_PRESETS["reinforce"], new, old, ref, n, R, ids) == pytest.approx(-total / len(R), abs=1e-12)


def test_gspo_clips_the_geometric_mean_once_per_sequence():
    new, old, ref, n, R, ids = data(4)
    row = rl_preset("gspo", epsilon=0.05, epsilon_high=0.08)
    total = 0.0
    for i in range(len(R)):
        group = [R[j] for j in range(len(R)) if ids[j] == ids[i]]
        A = (R[i] - np.mean(group)) / (np.std(group, ddof=1) + 1e-4)
        total += clipped(math.exp(np.mean(new[i, : n[i]] - old[i, : n[i]])), A, 0.05, 0.08)
    assert step_loss(row, new, old, ref, n, R, ids) == pytest.approx(-total / len(R), abs=1e-12)


def test_presets_agree_with_the_catalogues_table():
    table = {
        name: (r.advantage, r.scale, r.surrogate, r.aggregation, r.kl_reward_coef, r.kl_loss_coef, r.needs_reference)
        for name, r in RL_PRESETS.items()
    }
    assert table["reinforce"] == ("reward_minus_baseline", "none", "logp", "seq-mean-token-sum", 0.02, 0.0, True)
    assert table["rloo"] == ("leave_one_out", "none", "logp", "seq-mean-token-sum", 0.02, 0.0, True)
    assert table["grpo"] == ("group_mean", "group", "clip", "seq-mean-token-mean", 0.0, 0.04, True)
    assert table["dapo"] == ("group_mean", "group", "clip", "token-mean", 0.0, 0.0, False)
    assert table["grpo_plus"] == ("group_mean", "group", "clip", "seq-mean-token-mean", 0.0, 0.0, False)
    assert table["ppo"] == ("gae", "none", "clip", "token-mean", 0.02, 0.0, True)
    assert table["ppo_outcome"] == ("reward_minus_value", "none", "clip", "seq-mean-token-mean", 0.02, 0.0, True)
    assert table["reinforce_pp"] == ("reward_to_go", "none", "clip", "token-mean", 0.02, 0.0, True)
    assert table["trpo"] == ("gae", "none", "none", "seq-mean-token-sum", 0.0, 0.0, False)
    assert (
        RL_PRESETS["dapo"].epsilon_high,
        RL_PRESETS["grpo_plus"].epsilon_high,
        RL_PRESETS["ppo"].num_iterations,
    ) == (0.28, 0.4, 4)
    assert table["dr_grpo"] == ("group_mean", "none", "clip", "seq-mean-token-sum-norm", 0.0, 0.0, False)
    for row in RL_PRESETS.values():
        assert row.group_mode in estimators.GROUP_MODES and row.aggregation in losses.LOSS_AGG_MODES
        assert (
            row.surrogate in losses.SURROGATES
            and row.ratio_level in losses.RATIO_LEVELS
            and row.kl_loss_estimator in (*losses.KL_ESTIMATORS, "full")
        )
        assert row.advantage in credit.ADVANTAGES and (not row.objective or callable(resolve(row.objective)))
        validate_rl(row, 8)


@pytest.mark.parametrize(
    "changes, generations, word",
    [
        ({}, 1, "num_generations >= 2"),
        ({"kl_reward_coef": 0.1}, 8, "allow_double_kl"),
        ({"kl_loss_estimator": "k1"}, 8, "k3 or k2"),
        ({"advantage": "gae"}, 8, "critic"),
        ({"surrogate": "logp", "num_iterations": 2}, 8, "num_iterations=1"),
        ({"epsilon_high": 0.1}, 8, "epsilon_high >= epsilon"),
        ({"kl_loss_coef": -1.0}, 8, "negative"),
        ({"scale": "std"}, 8, "group"),
    ],
)
def test_impossible_presets_are_refused(changes, generations, word):
    with pytest.raises(ValueError, match=word):
        validate_rl(rl_preset("grpo", **changes), generations)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="dr_grpo"):
        rl_preset("gpro")


def test_questionable_presets_warn():
    assert validate_rl(rl_preset("gspo", aggregation="token-mean"), 8)
    assert validate_rl(rl_preset("grpo", num_iterations=5), 8)


def test_direct_methods_resolve_and_validate():
    for row in DIRECT_METHODS.values():
        assert callable(resolve(row.loss))
        validate_direct(row, row.default_beta, row.needs_reference)
        with pytest.raises(ValueError):
            validate_direct(row, row.default_beta, not row.needs_reference)
        with pytest.raises(ValueError, match="no beta" if row.default_beta is None else str(row.default_beta)):
            validate_direct(row, 0.0, row.needs_reference)


def test_algorithm_tables_import_without_torch():
    import subprocess
    import sys

    code = "import sys, stages.algorithms; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- ratios, shaping, normalisation, controllers -----------------------------------------------------------


def test_ratio_is_one_on_policy_and_gradient_is_the_policy_gradient():
    new = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    adv, mask = torch.randn(3, dtype=torch.float64), torch.ones(3, 4)
    clip, m = losses.policy_loss(new, new.detach(), adv, mask)
    plain, _ = losses.policy_loss(new, new.detach(), adv, mask, surrogate="logp")
    (a,) = torch.autograd.grad(clip.sum(), new)
    (b,) = torch.autograd.grad(plain.sum(), new)
    assert torch.allclose(a, b) and m["ratio"] == m["tokens"] and m["k3"] == 0.0


def test_shaped_rewards_agree_in_total():
    rng = np.random.default_rng(4)
    kl, mask, score = rng.normal(size=(3, 5)), (rng.random((3, 5)) < 0.7).astype(int), rng.normal(size=3)
    mask[:, 0] = 1
    noisy = np.where(mask > 0, kl, np.nan)
    tokens = estimators.shape_rewards(score, noisy, mask, 0.3, "token_terminal")
    assert np.allclose(tokens.sum(1), estimators.shape_rewards(score, noisy, mask, 0.3, "sequence_sum"))
    assert (tokens[mask == 0] == 0).all()
    with pytest.raises(ValueError, match="sequence_sum"):
        estimators.shape_rewards(score, kl, mask, 0.3, "sum")


def test_truncation_never_touches_finished_rows():
    for policy in estimators.TRUNCATION_POLICIES:
        reward, boot, keep = estimators.apply_truncation([0.8, 0.8], [True, False], policy, 1.0, "replace", [0.4, 0.4])
        assert (reward[0], boot[0], keep[0]) == (0.8, 0.0, True)
    reward, _, _ = estimators.apply_truncation([math.nan], [False], "penalty", 1.0)
    assert reward.tolist() == [-1.0]


def test_whitening_statistics():
    rng = np.random.default_rng(5)
    x, mask = rng.normal(3, 2, (4, 6)), rng.random((4, 6)) < 0.6
    w = estimators.whiten(np.where(mask, x, np.nan), mask)
    assert abs(w[mask].mean()) < 1e-9 and abs(w[mask].std() - 1) < 1e-6 and (w[~mask] == 0).all()
    assert (estimators.whiten([2.0, 2.0, 2.0]) == 0).all() and (estimators.whiten([5.0]) == 0).all()


def test_controllers_and_baseline_survive_a_resume():
    for name, kls in (("adaptive_ppo", [0.03, 0.001, 0.03]), ("adaptive_ziegler", [0.5, 0.01, 0.2])):
        straight, broken = (estimators.KLController(1.0, name, 0.01) for _ in range(2))
        for kl in kls:
            straight.update(kl)
            broken.update(kl)
            again = estimators.KLController(9.0, name, 0.01)
            again.load_state_dict(broken.state_dict())
            broken = again
        assert broken.coef == straight.coef != 1.0
    a, b = estimators.MovingAverageBaseline(0.9), estimators.MovingAverageBaseline(0.5)
    a.use([1.0, 3.0])
    b.load_state_dict(a.state_dict())
    assert a.use([math.nan, 4.0]) == b.use([4.0]) == 2.0 and a.value == b.value
    with pytest.raises(ValueError, match="target_kl"):
        estimators.KLController(0.1, "adaptive_ppo")


def test_dynamic_sampling_reports_shortfall():
    counts = [0, 4, 1, 4]

    def fill(wanted, batches, n=2):
        return estimators.fill_informative(
            lambda seen: counts[seen : seen + n] or None, lambda c: None if 0 < c < 4 else "equal", wanted, batches
        )

    with pytest.raises(
        estimators.DynamicSamplingExhausted, match="1 groups with a signal of 3 after 2 generation batches"
    ):
        fill(3, 5)
    with pytest.raises(estimators.DynamicSamplingExhausted, match="0 groups with a signal of 1 after 1"):
        fill(1, 1)
    assert fill(1, 0) == {
        "kept": [1],
        "surplus": [],
        "dropped": [(0, "equal"), (4, "equal"), (4, "equal")],
        "batches": 2,
        "filter_rate": 0.75,
    }


def test_a_sum_of_normalised_components_is_that_of_sample_stds():
    """Two groups of three; a component that failed on a row adds 0 there, one that is equal in a group adds 0 to it."""
    parts, weights = [[1.0, 2.0, 6.0, 5.0, 5.0, 5.0], [0.0, math.nan, 4.0, 1.0, 2.0, 3.0]], [[2.0] * 6, [-1.0] * 6]
    first, second = (v - 3 for v in (1.0, 2.0, 6.0)), (-2.0, None, 2.0)
    expected = [
        2 * a / (math.sqrt(7) + 1e-4) - (0.0 if b is None else b / (math.sqrt(8) + 1e-4)) for a, b in zip(first, second)
    ] + [1 / 1.0001, 0.0, -1 / 1.0001]
    assert np.allclose(estimators.normalized_sum(parts, weights, [0, 0, 0, 1, 1, 1]), expected, rtol=1e-12)


def test_a_penalty_without_a_ramp_begins_behind_the_last_length():
    assert estimators.overlong_penalty([9, 10, 11], 10, 0).tolist() == [0.0, 0.0, -1.0]
    assert estimators.overlong_penalty([6, 8, 10, 11], 10, 4).tolist() == [0.0, -0.5, -1.0, -1.0]
    assert estimators.overlong_penalty([0, 5, 10], 10, 10).tolist() == [0.0, -0.5, -1.0]
    with pytest.raises(ValueError, match="soft_punish_cache=11"):
        estimators.overlong_penalty([1], 10, 11)


def test_an_optimal_value_of_rewards_far_apart_is_finite():
    assert estimators.v_star([0.0, 100.0], 0.1) == pytest.approx(100 - 0.1 * math.log(2), rel=1e-12)
    assert estimators.v_star([0.0, -100.0], 0.1) == pytest.approx(-0.1 * math.log(2), rel=1e-12)
