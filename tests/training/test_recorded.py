"""An RL run that is computed again from its own rollouts: the same bytes, and every change to the record is found."""

import json
from pathlib import Path

import pytest

from stages.harness import execute
from stages.rl import Config, check
from stages.rollouts.recorded import difference
from stages.training import TrainingError
from storage.datasets import open_dataset, write_dataset
from tests.training.test_rl_parts import LONG, rl, rows_of  # noqa: F401
from tests.training.test_rl_rules import SPREAD

PAID = {
    "max_steps": 4,
    "reward_override": "none",
    "rewards": [SPREAD, {"name": "short", "kind": "length", "weight": -0.3}],
    "learning_rate": 1e-2,
}

#: What an update reads of the completions and of the iterations before.
CASES = {
    "grpo": {"preset": "grpo", "beta": 0.1, "num_minibatches": 2, "num_iterations": 2, "max_steps": 8},
    "dapo, batches drawn again": {"preset": "dapo", "filter_groups_metric": "reward_std", "max_num_gen_batches": 0},
    "ppo": {"preset": "ppo", "critic_learning_rate": 1e-2, "kl_controller": "adaptive_ziegler", "target_kl": 0.01},
    "moving baseline, running scale": {"preset": "reinforce", "baseline": "moving_average", "reward_norm": "whiten"},
    "replayed": {"preset": "topr", "replay_fraction": 0.5, "replay_window": 2, "max_steps": 5},
    "sampled ahead": {"preset": "topr", "async_rollouts": True},
    "filters, so that log-probs are the trainer's": {"preset": "rloo", "top_k": 5},
    "a control experiment": {"preset": "grpo", "reward_override": "random"},
    "moving reference": {"preset": "grpo", "beta": 0.1, "ref_mode": "ema"},
    "components in the group, long ones pay": {
        "preset": "grpo",
        "multi_objective_aggregation": "normalize_then_sum",
        "soft_punish_cache": 3,
    },
    "table of baselines": {"preset": "a_lol", "rewards": [{"name": "r", "kind": "python", "source": LONG}]},
}


def again(rl, config, result, name="again", **inputs):  # noqa: F811
    return rl(name, config, recorded=inputs.pop("recorded", None) or result["outputs"]["rollouts"]["path"], **inputs)


def weights(result):
    return Path(result["outputs"]["model"]["path"], "model.safetensors").read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_computed_again_from_its_rollouts(rl, tiny, case):  # noqa: F811
    config = {**PAID, **CASES[case]}
    first, then = rl("first", config)
    result, now = again(rl, config, first)
    assert weights(result) == weights(first) != Path(tiny["policy"], "model.safetensors").read_bytes()
    assert rows_of(result) == rows_of(first)
    assert result["summary"]["recorded/differing"] == 0 and result["summary"]["recorded/held"] > 100
    trained = [{k: v for k, v in one.items() if k.startswith(("loss", "policy", "reward"))} for one in then]
    # what dropped groups say is not in the rollouts
    for one, other in zip(trained, now):
        assert {k: other[k] for k in one if k in other} == {k: v for k, v in one.items() if k in other}
        assert {"loss", "reward"} <= one.keys() & other.keys() or "reward" not in one
    assert not [w for w in result["warnings"] if w["code"] == "recorded_differs"]


def changed(path, to, change):
    """The rollouts at ``path`` with ``change(row)`` made to their first row of the second iteration, at ``to``."""
    rows = list(open_dataset(path).iter_rows())
    change(next(r for r in rows if r["iteration"] == 1))
    write_dataset(str(to), "rollouts", "rollouts/1", rows)
    return str(to)


def other_token(row):
    row["completion_ids"][0] = row["completion_ids"][0] % 7 + 10


@pytest.mark.parametrize(
    "change, what",
    [
        (lambda r: r["reward_components"][0].update(value=9.0), "reward spread, scored again"),
        (lambda r: r.update(advantages=[0.5] * len(r["advantages"])), "advantages"),
        (lambda r: r.update(logp_ref=[v - 0.25 for v in r["logp_ref"]]), "logp_ref"),
        (lambda r: r.update(loss_mask=[0] * len(r["loss_mask"])), "loss_mask"),
        (lambda r: r.update(reward=r["reward"] + 1e-9), "reward"),
    ],
)
def test_what_was_changed_in_the_record_is_named(rl, tmp_path, change, what):  # noqa: F811
    config = {**PAID, "preset": "grpo", "beta": 0.1, "max_steps": 2}
    first, _ = rl("first", config)
    path = changed(first["outputs"]["rollouts"]["path"], tmp_path / "changed", change)
    result, _ = again(rl, config, first, recorded=path)
    (told,) = [w["text"] for w in result["warnings"] if w["code"] == "recorded_differs"]
    assert what in told and result["summary"]["recorded/differing"] >= 1
    table = json.loads(Path(next(r["table"] for r in result["reports"] if r["name"] == "recorded")).read_text())
    row = next(one for one in table if one["what"] == what)
    assert row["differ"] == 1 and row["largest"] > 0 and row["first"]


def test_rollouts_of_other_weights_are_refused_where_they_begin(rl, tmp_path):  # noqa: F811
    config = {**PAID, "preset": "grpo", "max_steps": 3}
    first, _ = rl("first", config)
    with pytest.raises(TrainingError, match="Iteration 1 .* not sampled from these weights"):
        again(rl, {**config, "learning_rate": 2e-2}, first, "faster")
    path = changed(first["outputs"]["rollouts"]["path"], tmp_path / "changed", other_token)
    with pytest.raises(TrainingError, match="Iteration 1 .* not sampled from these weights"):
        again(rl, config, first, "other token", recorded=path)
    with pytest.raises(TrainingError, match="ends before iteration 3"):
        again(rl, {**config, "max_steps": 4}, first, "longer")
    result, _ = again(rl, {**config, "max_steps": 2}, first, "shorter")
    assert result["summary"]["recorded/differing"] == 0


def test_it_goes_on_where_it_was_stopped(rl, monkeypatch):  # noqa: F811
    config = {**PAID, **CASES["replayed"]}
    first, _ = rl("first", config)
    monkeypatch.setenv("POSTTRAIN_CHECKPOINT_SECONDS", "0")
    one = rl.made("again", config, {"recorded": first["outputs"]["rollouts"]["path"]})

    class Stopped(Exception):
        pass

    def stop(event):
        if event.get("event") == "metric" and event.get("step", 0) >= 3:
            raise Stopped

    with pytest.raises(Stopped):
        execute(one, stop)
    result = execute(one, lambda event: None)
    assert result["resumed_from"] and weights(result) == weights(first) and rows_of(result) == rows_of(first)
    whole, _ = again(rl, config, first, "whole")
    assert result["summary"]["recorded/held"] == whole["summary"]["recorded/held"]


@pytest.mark.parametrize(
    "config, says",
    [
        ({"preset": "remax", "kl_coef": 0.0}, "baseline=greedy"),
        ({"preset": "vineppo"}, "advantage=vine"),
        ({"preset": "nash_md"}, "opponent=mixture"),
        ({"mode_mix": "share", "rewards": [{"kind": "rubric", "name": "r"}]}, "mode_mix=share.*texts of other rows"),
    ],
)
def test_what_rollouts_do_not_hold_is_refused(config, says):
    with pytest.raises(ValueError, match=f"(?s){says}.*leave recorded out"):
        check(
            Config.model_validate({**PAID, **config}),
            ["model", "data", "recorded", *(["rubric"] * ("mode_mix" in says))],
        )


def test_differences_of_columns():
    inf = float("inf")
    assert difference(None, None) == difference([1.0, float("nan")], [1.0, float("nan")]) == difference([], []) == 0.0
    assert difference(float("nan"), float("nan")) == difference({"a": 1}, {"a": 1.0}) == 0.0
    assert difference(None, 1.0) == difference([1.0], [1.0, 2.0]) == difference("a", "b") == inf
    assert difference([1.0, 2.0], [1.0, 2.5]) == difference([{"v": 2.0}], [{"v": 1.5}]) == 0.5
    assert difference([1.0], [float("nan")]) == inf
