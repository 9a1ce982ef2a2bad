"""Rewards held at a bound by a Lagrange multiplier (reward.constrained)."""

import numpy as np
import pytest

from stages.estimators import Multipliers
from stages.reward.components import RewardComponent
from stages.reward.rewards import build_rewards
from stages.rl import Config, resolve_preset
from stages.spec import ConfigError
from tests import oracles
from tests.training.test_rl_parts import rl, rows_of  # noqa: F401

PAID = [
    {"name": "short", "kind": "length_penalty", "length_alpha": 0.1},
    {"name": "ended", "kind": "truncation", "at_least": -0.2, "multiplier_step": 0.5, "weight": 0.3},
]


def test_the_multiplier_ends_where_the_constrained_optimum_is():
    """Three answers; the exact KL-regularised optimum under the multiplier, batch after batch: E[R_2] ends at its bound
    and the multiplier at the one that bisection finds.
    """
    ref = np.array([0.5, 0.3, 0.2])
    first = np.array([1.0, 0.2, -0.5])
    second = np.array([-1.0, 0.5, 1.0])
    beta = 0.5
    bound = 0.4
    best = lambda multiplier: oracles.kl_optimum(ref, first + multiplier * second, beta)["pi"]
    low, high = 0.0, 50.0
    for _ in range(200):
        low, high = (low, (low + high) / 2) if best((low + high) / 2) @ second >= bound else ((low + high) / 2, high)
    held = Multipliers({"second": (0.0, bound, 0.5)})
    for _ in range(3000):
        held.update("second", float(best(held.values["second"]) @ second))
    assert best(0.0) @ second < bound - 0.5  # which the reward alone does not meet
    assert held.values["second"] == pytest.approx(high, abs=1e-9) and best(
        held.values["second"]
    ) @ second == pytest.approx(bound, abs=1e-9)
    met = Multipliers({"second": (0.7, -0.9, 0.5)})
    for _ in range(200):
        met.update("second", float(best(met.values["second"]) @ second))
    assert met.values["second"] == 0.0  # a constraint that holds by itself costs nothing


@pytest.mark.parametrize("ahead", [False, True])
def test_rollouts_say_the_multiplier_they_were_paid_by_and_it_follows_the_mean(rl, ahead):  # noqa: F811
    result, metrics = rl(
        "held",
        {
            "preset": "grpo",
            "beta": 0.0,
            "max_steps": 5,
            "reward_override": "none",
            "rewards": PAID,
            "async_rollouts": ahead,
            "eval_prompts": 3,
            "eval_every": 2,
        },
    )
    rows, metrics = rows_of(result), [one for one in metrics if "reward" in one]
    lambdas, means = [], []
    for k in range(5):
        own = [{c["name"]: c for c in row["reward_components"]} for row in rows if row["iteration"] == k]
        weights = {c["ended"]["weight"] for c in own}
        assert len(weights) == 1 and {c["short"]["weight"] for c in own} == {1.0}
        lambdas.append(weights.pop())
        means.append(np.mean([c["ended"]["value"] for c in own]))
        assert metrics[k]["reward/ended/multiplier"] == lambdas[k] and metrics[k][
            "reward/ended/shortfall"
        ] == pytest.approx(-0.2 - means[k])
    for row in rows:
        assert row["reward"] == pytest.approx(sum(c["weight"] * c["value"] for c in row["reward_components"]))
    # a batch that is sampled ahead too: the batch before it is scored when its sampling begins
    expected = [0.3]
    for mean in means:
        expected.append(max(0.0, expected[-1] + 0.5 * (-0.2 - mean)))
    assert lambdas == pytest.approx(expected[:5]) and len(set(lambdas)) > 2
    import json

    for row in rows_of(result, "validation"):  # passes are compared: the first multiplier in all of them
        extra = json.loads(row["extra_json"])
        assert extra["reward"] == pytest.approx(extra["parts"]["short"] + 0.3 * extra["parts"]["ended"])


def test_dropped_groups_count_in_the_mean_and_what_nobody_sampled_does_not(rl):  # noqa: F811
    from stages.generation import Sample

    source = rl.source("means", {"preset": "grpo", "reward_override": "none", "rewards": PAID})
    samples = [
        Sample(
            {},
            [1],
            k,
            [2],
            [0.0],
            "eos",
            "x",
            0.0,
            {"short": 0.0, "ended": value},
            {},
            mode=mode,
            weights={"ended": 0.3},
        )
        for k, (value, mode) in enumerate(((0.0, "fresh"), (-1.0, "fresh"), (None, "fresh"), (-1.0, "sft")))
    ]
    assert source._hold_constraints(samples) == {
        "reward/ended/multiplier": 0.3,
        "reward/ended/shortfall": pytest.approx(0.3),
    }
    assert source.multipliers.values == {"ended": pytest.approx(0.45)}
    assert source._hold_constraints(samples[2:3]) == {"reward/ended/multiplier": 0.3} and source.multipliers.values == {
        "ended": pytest.approx(0.45)
    }
    again = rl.source("again", {"preset": "grpo", "reward_override": "none", "rewards": PAID})
    state, _ = source.state()
    again.multipliers.restore(state["multipliers"])
    assert again.multipliers.values == source.multipliers.values


def test_a_multiplier_starts_at_zero_and_counts_from_there():
    one = RewardComponent(kind="format", at_least=0.9)
    assert one.weight == 0.0 and one.counts and not RewardComponent(kind="format", weight=0.0).counts
    rewards = build_rewards(
        [RewardComponent(kind="length_penalty", length_alpha=0.1), RewardComponent(kind="truncation", at_least=-0.1)],
        {},
    )
    row = {"prompt_row": {}, "completion_text": "x", "completion_ids": [1, 2], "finish_reason": "length"}
    assert rewards.score([row])[0].total == pytest.approx(-0.2)
    rewards.multipliers = {"truncation": 2.0}
    found = rewards.score([row])[0]
    assert found.total == pytest.approx(-2.2) and found.weights == {"length_penalty": 1.0, "truncation": 2.0}


HELD = [{"kind": "verifier"}, {"kind": "format", "at_least": 0.9}]


@pytest.mark.parametrize(
    "config, says",
    [
        ({"rewards": HELD[1:]}, "nothing is maximised"),
        ({"rewards": [{"kind": "verifier", "weight": 0.0}, HELD[1]]}, "nothing is maximised"),
        ({"preset": "grpo_process", "rewards": HELD}, "advantage=group_mean"),
        ({"preset": "astar_po", "num_generations": 1, "rewards": HELD}, "baseline=moving_average"),
        ({"preset": "topr", "replay_fraction": 0.5, "rewards": HELD}, "replay_fraction=0"),
        ({"reward_override": "inverted", "rewards": HELD}, "reward_override"),
        ({"multi_objective_aggregation": "normalize_then_sum", "rewards": HELD}, "sum_then_normalize"),
    ],
)
def test_where_a_constraint_would_hold_nothing(config, says):
    with pytest.raises(ValueError, match=f"has at_least=0.9: .*{says}"):
        resolve_preset(Config(**config))


@pytest.mark.parametrize(
    "component, says",
    [
        ({"kind": "format", "at_least": 0.9, "weight": -0.5}, "never below 0"),
        ({"kind": "format", "multiplier_step": 0.5}, "write at_least"),
        ({"kind": "verifier", "tier": "rule", "at_least": 0.9}, "leave tier out"),
        ({"kind": "verifier", "weight": 0.5, "blend": True, "at_least": 0.9}, "leave blend out"),
        ({"kind": "format", "from_step": 3, "at_least": 0.9}, "leave from_step out"),
        ({"kind": "model", "normalise": "batch", "at_least": 0.0}, "leave normalise out"),
    ],
)
def test_settings_of_a_component_that_a_multiplier_does_not_go_with(component, says):
    with pytest.raises(ValueError, match=says):
        RewardComponent(**component)


def test_stages_that_do_not_train_on_rewards_and_rewards_of_the_past_have_no_multiplier(rl, tmp_path):  # noqa: F811
    from stages import evaluate, label_steps, rejection, rescore

    for stage in (evaluate, label_steps, rejection, rescore):
        with pytest.raises(ValueError, match="'format': at_least moves a multiplier .* write a weight instead"):
            stage.Config(rewards=HELD)
    stored, _ = rl("stored", {"preset": "grpo", "beta": 0.0})
    with pytest.raises(ConfigError, match="write a weight instead of at_least"):
        rl(
            "again",
            {"preset": "topr", "reward_override": "none", "rewards": HELD},
            stored=stored["outputs"]["rollouts"]["path"],
        )


def test_a_reward_that_compares_cannot_be_held():
    from types import SimpleNamespace

    from stages.rollouts.comparisons import check_constraints

    rewards = build_rewards([RewardComponent(**c) for c in HELD], {})
    check_constraints(rewards)
    one = RewardComponent(kind="model", name="wins", at_least=0.5)
    rewards.components.append(one)
    rewards.scorers["wins"] = SimpleNamespace(relative=True)
    with pytest.raises(ConfigError, match="'wins' compares the answers of a group"):
        check_constraints(rewards)
