"""Rules of the RL stage that formulas do not show: which coefficient a controller moves, what an empty step leaves alone, what settings refuse each other."""

import numpy as np
import pytest
import torch

from stages.algorithms import rl_preset
from stages.credit import Batch, assign
from stages.generation import Sample
from stages.modeling import load_policy
from stages.rl import Config, resolve_preset
from stages.rollouts.metrics import rollout_metrics
from tests.training.test_rl_parts import rl, rows_of  # noqa: F401

MASK = np.array([[1, 1, 1], [1, 1, 0]], bool)


def batch(**changes):
    return Batch(**{"rewards_B": np.array([1.0, 0.0]), "group_of_B": np.array([0, 0]), "mask_BT": MASK, "kept_B": np.ones(2, bool), "counted_B": np.ones(2, bool),
                    "values_BT": np.where(MASK, 0.25, 0.0), **changes})


# --- two KLs, two coefficients -------------------------------------------------------------------------------------------

def test_the_kl_in_the_reward_and_the_kl_in_the_loss_keep_their_own_coefficients(rl):
    """PPO-CLIPKL with an anchor: KL to the old policy in the loss (1.0), KL to the reference in the reward (0.02)."""
    result, metrics = rl("two", {"preset": "ppo_clip_kl", "kl_coef": 0.02, "truncation_policy": "score", "max_steps": 5, "num_iterations": 1, "learning_rate": 1e-2})
    assert metrics[-1]["kl/coef"] == 1.0 and metrics[-1]["kl/reward_coef"] == 0.02
    seen = 0
    for row in rows_of(result):
        kl = sum(row["logp_old"]) - sum(row["logp_ref"])
        assert row["shaped_reward"] == pytest.approx(row["reward"] - 0.02 * kl, abs=1e-5)
        seen += abs(kl) > 1e-3
    assert seen


@pytest.mark.parametrize("moves", ["loss", "reward"])
def test_a_controller_moves_one_of_the_two_coefficients(rl, moves):
    preset = {"preset": "ppo_penalty_adaptive", "kl_coef": 0.02} if moves == "loss" else {"preset": "ppo", "kl_controller": "adaptive_ppo", "target_kl": 1e6}
    _, metrics = rl("moves", {**preset, "num_iterations": 1, "max_steps": 3, "learning_rate": 1e-5})
    seen = [(m.get("kl/coef"), m["kl/reward_coef"]) for m in metrics]
    if moves == "loss":
        assert seen == [(1.0, 0.02), (0.5, 0.02), (0.25, 0.02)]
    else:
        assert [r for _, r in seen] == [0.02, 0.01, 0.005]


# --- steps without a trained token -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("preset", [{"preset": "grpo"}, {"preset": "topr"}, {"preset": "ppo", "critic_mode": "shared"}, {"preset": "grpo", "beta": 0.0, "entropy_coef": 0.1}])
def test_a_step_without_trained_tokens_moves_no_weight(tiny, rl, preset):
    """All completions are cut and masked: neither Adam's momentum nor weight decay may act, whatever else the loss has (rl.md 1.2)."""
    result, metrics = rl("masked", {**preset, "truncation_policy": "mask", "min_tokens": 6, "weight_decay": 0.5, "num_iterations": 1})
    assert all(r["truncated"] for r in rows_of(result)) and all(m["train/empty_step"] == 1 and m["train/grad_norm"] == 0 for m in metrics)
    before, after = (load_policy(p).state_dict() for p in (tiny["policy"], result["outputs"]["model"]["path"]))
    assert all(torch.equal(p, after[n]) for n, p in before.items())


# --- what goes into an advantage --------------------------------------------------------------------------------------------

def test_reward_to_go_is_lowered_by_the_baseline():
    row = rl_preset("reinforce", advantage="reward_to_go", baseline="constant", gamma=0.5)
    found = assign(row, batch(baseline=0.5), 0.0).advantages_BT
    assert np.allclose(found, [[0.25 - 0.5, 0.5 - 0.5, 1 - 0.5], [-0.5, -0.5, 0.0]])


def test_a_completion_whose_baseline_is_unknown_teaches_nothing():
    row = rl_preset("remax")
    found = assign(row, batch(baseline=np.array([np.nan, 0.25])), 0.0)
    assert np.allclose(found.advantages_BT, [[0, 0, 0], [-0.25, -0.25, 0]]) and found.informative_B.tolist() == [False, True]


@pytest.mark.parametrize("target", ["terminal", "bandit", "mc_return"])
def test_the_critics_target_of_a_cut_completion_is_the_value_of_its_end(target):
    """bootstrap adds no terminal reward, so a target of 0 would teach that long answers are worth nothing."""
    row = rl_preset("ppo", critic_target=target)
    found = assign(row, batch(rewards_B=np.array([1.0, 0.0]), bootstrap_B=np.array([0.0, 0.75])), 0.0).returns_BT
    assert np.allclose(found, [[1, 1, 1], [0.75, 0.75, 0]])


def test_groups_of_equal_rewards_are_counted_although_their_mean_rounds():
    samples = [Sample({}, [1], g, [2], [0.0], "eos", "x", 0.1, {}, {}) for g in range(3)]
    assert np.std([0.1] * 3) > 0
    found = rollout_metrics(samples, np.array([0.1] * 3), np.zeros(3, int))
    assert found["reward/frac_zero_std"] == 1.0


# --- settings that refuse each other ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("config, says", [
    ({"preset": "ppo", "kl_reward_mode": "token_broadcast"}, "token_broadcast"),
    ({"preset": "ppo_outcome", "kl_reward_mode": "token_broadcast", "critic_target": "lambda_return"}, "token_broadcast"),
    ({"preset": "ppo_outcome", "truncation_policy": "bootstrap"}, "truncation_policy=bootstrap"),
    ({"preset": "oreo", "truncation_policy": "bootstrap"}, "truncation_policy=bootstrap"),
    ({"preset": "grpo_process", "beta": 0.0, "kl_coef": 0.02}, "kl_coef"),
    ({"preset": "dapo", "kl_controller": "adaptive_ziegler", "target_kl": 6.0}, "kl_controller"),
    ({"preset": "grpo", "ref_mode": "previous", "kl_estimator": "full"}, "kl_target=old"),
    ({"preset": "grpo", "max_staleness": 2}, "max_staleness"),
    ({"preset": "grpo", "soft_punish_cache": 65}, "soft_punish_cache"),
    ({"preset": "grpo", "context_schedule": [(0, 32), (2, 48)], "soft_punish_cache": 40}, "soft_punish_cache"),
    ({"preset": "grpo", "context_schedule": [(180, 32), (0, 16)]}, "context_schedule"),
    ({"preset": "grpo", "context_schedule": [(0, 0)]}, "context_schedule"),
    ({"preset": "grpo", "reward_override": "format_only"}, "format")])
def test_settings_that_would_do_something_else_are_refused(config, says):
    with pytest.raises(ValueError, match=says):
        resolve_preset(Config(**config))
