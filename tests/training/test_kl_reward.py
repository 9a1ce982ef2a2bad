"""The KL in the reward: exact over the vocabulary, beside a loss that reads log-ratios, and the horizon of its
controller.
"""

import json

import numpy as np
import pytest
import torch

from stages.estimators import KLController
from stages.models.modeling import load_policy
from stages.rl import Config, resolve_preset
from storage.datasets import open_dataset
from tests.training.test_rl_parts import rl, rows_of  # noqa: F401


@pytest.mark.parametrize("preset, temperature", [("rloo", 1.0), ("ppo", 0.7)])
def test_the_exact_kl_is_taken_off_the_reward(tiny, rl, preset, temperature):  # noqa: F811
    """Shaped reward (rloo) or token rewards (ppo) = the reward less kl_coef times the KL of whole distributions, from
    the models' own logits in float64.
    """
    result, metrics = rl(
        f"exact-{preset}",
        {
            "preset": preset,
            "kl_coef": 0.5,
            "kl_reward_estimator": "full",
            "max_steps": 1,
            "num_iterations": 1,
            "temperature": temperature,
        },
        reference=tiny["other"],
    )
    policy, other = load_policy(tiny["policy"]).double(), load_policy(tiny["other"]).double()
    sums = []
    for r in rows_of(result):
        ids, n = torch.tensor([[*r["prompt_ids"], *r["completion_ids"]]]), r["length"]
        with torch.no_grad():
            p, q = (m(input_ids=ids).logits[0, -n - 1 : -1].div(temperature).log_softmax(-1) for m in (policy, other))
        kl = (p.exp() * (p - q)).sum(-1).numpy()
        sums.append(kl.sum())
        assert r["shaped_reward"] == pytest.approx(r["reward"] - 0.5 * kl.sum(), abs=1e-4)
        if preset == "ppo":
            paid = np.zeros(n)
            paid[-1] = r["reward"]
            assert r["token_rewards"] == pytest.approx(paid - 0.5 * kl, abs=1e-4)
    assert (
        metrics[0]["kl/full_sequence_sum"] == pytest.approx(np.mean(sums), abs=1e-4)
        and abs(metrics[0]["kl/full_sequence_sum"] - metrics[0]["kl/sequence_sum"]) > 1e-3
    )
    assert "at its own step it is a baseline" in json.dumps(result["warnings"])


def test_what_is_gone_cannot_be_compared():
    for config in ({"preset": "rloo", "surrogate": "clip", "async_rollouts": True}, {"preset": "topr", "kl_coef": 0.1}):
        with pytest.raises(ValueError, match="write kl_reward_estimator=k1"):
            resolve_preset(Config(**{"kl_reward_estimator": "full", **config}))


def test_oreo_regresses_on_log_ratios_whatever_estimates_the_kl_of_the_reward(rl):  # noqa: F811
    """The critic's target is the reward to come less beta times the log-ratios to come (OREO), also where a KL in the
    reward is estimated by k3.
    """
    made = {}
    for kind in ("k1", "k3"):
        result, _ = rl(
            f"oreo-{kind}",
            {
                "preset": "oreo",
                "kl_coef": 0.1,
                "kl_reward_mode": "sequence_sum",
                "kl_reward_estimator": kind,
                "max_steps": 2,
                "learning_rate": 1e-2,
                "truncation_policy": "score",
            },
        )
        for r in (r for r in rows_of(result) if r["iteration"] == 1):
            ratio = np.subtract(r["logp_old"], r["logp_ref"])
            ahead = np.cumsum(np.array(r["token_rewards"])[::-1])[::-1] - 0.1 * np.cumsum(ratio[::-1])[::-1]
            assert r["returns"] == pytest.approx(ahead, abs=1e-5)
            made[kind] = max(made.get(kind, 0.0), np.abs(ratio).max())
    assert min(made.values()) > 0.05


def test_a_horizon_counts_completions(rl):  # noqa: F811
    """TRL's form: e n / horizon, n the completions of a batch; Ziegler's own: k_beta a batch."""
    for config, gain in (({"kl_horizon": 80.0}, 8 / 80), ({"k_beta": 0.5}, 0.5)):
        result, metrics = rl(
            f"horizon-{gain}",
            {
                "preset": "rloo",
                "max_steps": 3,
                "kl_controller": "adaptive_ziegler",
                "target_kl": 1e-6,
                "learning_rate": 1e-2,
                **config,
            },
        )
        assert len(list(open_dataset(result["outputs"]["rollouts"]["path"]).iter_rows())) == 24
        coefs = [m["kl/coef"] for m in metrics]
        moved = [b / a for a, b in zip(coefs, coefs[1:])]
        assert moved == pytest.approx(
            [1 + gain * np.clip(m["kl/sequence_sum"] / 1e-6 - 1, -0.2, 0.2) for m in metrics[:2]]
        )
    assert KLController(1.0, "adaptive_ziegler", 1.0, horizon=10_000).update(9.0, 512) == pytest.approx(
        1 + 0.2 * 512 / 10_000
    )


@pytest.mark.parametrize(
    "config, says",
    [
        ({"kl_horizon": 10.0}, "kl_controller=adaptive_ziegler"),
        ({"k_beta": 0.2, "kl_controller": "adaptive_ppo", "target_kl": 1.0}, "kl_controller=adaptive_ziegler"),
        (
            {"k_beta": 0.2, "kl_horizon": 10.0, "kl_controller": "adaptive_ziegler", "target_kl": 1.0},
            "leave one of them out",
        ),
    ],
)
def test_a_gain_that_nothing_reads_is_refused(config, says):
    with pytest.raises(ValueError, match=says):
        resolve_preset(Config(preset="rloo", **config))


@pytest.mark.parametrize("unit", ["sequence_sum", "sequence_mean", "token_mean"])
def test_the_controllers_target_has_a_unit(rl, unit):  # noqa: F811
    """KL-CTRL: the KL is measured in the unit that the target is given in; the alarm compares the same number."""
    config = {
        "preset": "rloo",
        "max_steps": 4,
        "learning_rate": 2e-2,
        "kl_controller": "adaptive_ziegler",
        "target_kl": 1e-3,
        "kl_unit": unit,
    }
    result, metrics = rl(f"unit-{unit}", config)
    by_iteration = {}
    for r in rows_of(result):
        by_iteration.setdefault(r["iteration"], []).append(np.subtract(r["logp_old"], r["logp_ref"]))
    measure = {
        "sequence_sum": lambda d: np.mean([x.sum() for x in d]),
        "sequence_mean": lambda d: np.mean([x.mean() for x in d]),
        "token_mean": lambda d: np.concatenate(d).mean(),
    }[unit]
    for k, m in enumerate(metrics):
        assert m[f"kl/{unit}"] == pytest.approx(measure(by_iteration[k]), abs=1e-5)
    coefs = [m["kl/coef"] for m in metrics]
    assert [b / a for a, b in zip(coefs, coefs[1:])] == pytest.approx(
        [1 + 0.1 * np.clip(m[f"kl/{unit}"] / 1e-3 - 1, -0.2, 0.2) for m in metrics[:3]]
    )
    from stages.policy.alarms import alarms

    rows = [{"step": k, f"kl/{unit}": 4.0} for k in range(4)]
    assert "kl_over_target" in alarms(rows, 2.0, unit) and "kl_over_target" not in alarms(rows, 3.0, unit)
    if unit != "sequence_sum":
        with pytest.raises(ValueError, match="write target_kl"):
            resolve_preset(Config(preset="rloo", kl_unit=unit))
