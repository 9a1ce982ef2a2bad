"""The learning table: means over seeds, intervals over prompts, curves read from rollouts, stated values that are
missed.
"""

from math import nan as NAN

import numpy as np
import pytest

from stages.harness import execute
from stages.learning import by_method, ends, over_seeds, signal_curves, summarise
from storage.datasets import open_dataset, write_dataset
from storage.schema import complete_row
from tests.common import written


def rollouts(path, rewards, cut=(), lengths=()):
    """rewards[iteration][prompt] = rewards of the group, 1 right, 0 wrong, others without a verdict; lengths are 1 +
    iteration, or as given.
    """
    rows = [
        {
            "iteration": t,
            "policy_version": t,
            "sample_idx": k,
            "prompt_ids": [1],
            "completion_ids": [2] * (1 + t),
            "loss_mask": [1] * (1 + t),
            "logp_old": [0.0] * (1 + t),
            "reward": r,
            "reward_components": [],
            "truncated": (t, p, k) in cut,
            "terminated": (t, p, k) not in cut,
            "length": dict(lengths).get((t, p, k), 1 + t),
            "is_correct": {0.0: False, 1.0: True}.get(r),
            "prompt_id": f"p{p}",
            "group_id": f"p{p}",
        }
        for t, groups in enumerate(rewards)
        for p, group in enumerate(groups)
        for k, r in enumerate(group)
    ]
    written(str(path), "r", "rollouts/1", [row for row in rows], origin="ai")
    return str(path)


def samples(path, correct, protocol):
    rows = [
        complete_row(
            "eval_samples/1",
            {
                "run_id": "r",
                "item_id": f"i{i}",
                "sample_idx": 0,
                "output": "",
                "correct": bool(c),
                "format_error": False,
                "tokens": 3,
                "prompt_id": f"p{i}",
                "group_id": f"p{i}",
                "extra_json": '{"mode": "sample", "finish": "eos"}',
            },
            dataset="e",
            source="s",
            origin="ai",
            split="test",
        )
        for i, c in enumerate(correct)
    ]
    write_dataset(str(path), "e", "eval_samples/1", rows, meta={"protocol": protocol})
    return str(path)


def test_curves_say_what_was_trained_on(tmp_path):
    """Means per iteration by hand; a group of equal rewards is dead; unscored completions count in lengths only."""
    path = rollouts(tmp_path / "r", [[[0.0, 1.0], [1.0, 1.0]], [[0.5, 0.5], [float("nan"), 1.0]]], cut={(1, 0, 0)})
    found = signal_curves(open_dataset(path))
    assert found == {
        "reward": [0.75, pytest.approx(2 / 3)],
        "length": [1.0, 2.0],
        "length_right": [1.0, 2.0],
        "length_wrong": [1.0, NAN],
        "dead_groups": [0.5, 1.0],
        "truncated": [0.0, 0.25],
    }
    long = {(0, 0, 0): 9, (1, 1, 0): 5}
    found = signal_curves(
        open_dataset(rollouts(tmp_path / "long", [[[0.0, 1.0], [1.0, 1.0]], [[1.0, 0.0], [NAN, 1.0]]], lengths=long))
    )
    assert (
        found["length_right"] == [1.0, 2.0] and found["length_wrong"] == [9.0, 2.0] and found["length"] == [3.0, 2.75]
    ), "a completion without a verdict is in neither"
    assert over_seeds([[1.0, NAN], [3.0, NAN]])[0] == pytest.approx([2.0, NAN], nan_ok=True) and over_seeds(
        [[NAN], [3.0]]
    ) == ([3.0], [3.0], [3.0])
    assert ends([1.0, NAN]) == (1.0, pytest.approx(NAN, nan_ok=True)) and ends([NAN] * 5 + [2.0] * 5)[1] == 2.0
    assert over_seeds([[1.0, 2.0, 3.0], [3.0, 4.0]]) == ([2.0, 3.0], [1.0, 2.0], [3.0, 4.0])
    assert ends([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]) == (0.5, 8.5) and ends([2.0]) == (2.0, 2.0)


def test_a_methods_number_is_the_mean_over_seeds_paired_with_the_start():
    rng = np.random.default_rng(0)
    seeds = {str(s): {f"i{i}": (float(v), f"p{i}") for i, v in enumerate(rng.integers(0, 2, 40))} for s in range(3)}
    start = {f"i{i}": (0.0, f"p{i}") for i in range(40)}
    row = summarise(seeds, start)
    means = [np.mean([v for v, _ in s.values()]) for s in seeds.values()]
    assert row["value"] == pytest.approx(np.mean(means)) and (row["worst_seed"], row["best_seed"]) == (
        pytest.approx(min(means)),
        pytest.approx(max(means)),
    )
    assert (
        row["gain"] == pytest.approx(row["value"])
        and row["low"] < row["value"] < row["high"]
        and (row["gain_low"], row["gain_high"]) == (row["low"], row["high"])
    )
    with pytest.raises(ValueError, match="in common"):
        summarise({"0": {"a": (1.0, "a")}, "1": {"b": (1.0, "b")}}, None)
    with pytest.raises(ValueError, match="METHOD.SEED"):
        by_method(["grpo"], "rollouts")


def test_the_stage_ranks_methods_and_names_those_below_their_stated_value(tmp_path):
    inputs = {"start": samples(tmp_path / "start", [0] * 20, {"p": 1})}
    for method, hits in (("strong", (15, 17)), ("weak", (2, 4))):
        for seed, n in enumerate(hits):
            inputs[f"evaluations.{method}.{seed}"] = samples(
                tmp_path / f"e-{method}-{seed}", [i < n for i in range(20)], {"p": 1}
            )
            inputs[f"rollouts.{method}.{seed}"] = rollouts(
                tmp_path / f"r-{method}-{seed}", [[[0.0, 1.0]], [[1.0, 1.0]]]
            )

    def stage(name, inputs, at_least):
        return execute(
            {
                "stage": "learning",
                "key": name,
                "config": {"at_least": at_least},
                "seed": 0,
                "device": "cpu",
                "workdir": str(tmp_path / name),
                "inputs": {k: {"kind": "dataset", "path": v, "ref": k, "digest": k} for k, v in inputs.items()},
            },
            lambda event: None,
        )

    made = stage("ranked", inputs, {"*": 0.5, "strong": 0.7})
    assert (
        made["summary"]["strong/value"] == pytest.approx(0.8)
        and made["summary"]["weak/best_seed"] == pytest.approx(0.2)
        and made["summary"]["below_expectation"] == 1
    )
    assert (
        [w["code"] for w in made["warnings"]] == ["below_expectation"]
        and "weak" in made["warnings"][0]["text"]
        and "strong" not in made["warnings"][0]["text"]
    )
    assert [r["metric"] for r in open_dataset(made["outputs"]["results"]["path"]).iter_rows()] == [
        "strong/accuracy",
        "weak/accuracy",
    ]
    assert made["summary"]["weak/length_mean"] == 3.0 and "weak/reward" not in made["summary"]
    figures = {p.name for p in (tmp_path / "ranked" / "reports").glob("*.png")}
    assert {"reward-1.png", "length-1.png", "dead_groups-1.png", "truncated-1.png"} <= figures
    inputs["evaluations.weak.1"] = samples(tmp_path / "other", [1] * 20, {"p": 2})
    with pytest.raises(Exception, match="protocol|differ"):
        stage("refused", inputs, {})
