"""Metrics have TRL's names: runs of before are read under them, and who writes a former name is told the new one."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from flows import compare, sweep
from stages.models.modeling import load_policy
from stages.reporting.former_names import FORMER, current_name, under_current_names
from stages.settings import OptimizerConfig
from stages.sft import NextToken
from stages.spec import ConfigError
from stages.training import Trainer, TrainingError
from tests.training.test_rl_parts import rl, rows_of  # noqa: F401


def test_names_of_before_are_those_of_now():
    assert [current_name(name) for name in ("train/loss", "last/reward/mean", "validation/train/correct")] == [
        "loss",
        "last/reward",
        "validation/completions/correct_fraction",
    ]
    assert current_name("train/final_loss") == "train/final_loss" and current_name("reward/mine") == "reward/mine"
    assert (current_name("train/kl", "rl"), current_name("train/kl", "distill")) == ("kl_loss", "kl")
    assert all(current_name(name) == name for name in FORMER.values()), "what has a name of now keeps it"
    assert under_current_names({"reward/mean": 0.5, "train/policy": 0.1}, "rl") == {"reward": 0.5, "policy_loss": 0.1}
    # a reward component of that name
    assert under_current_names({"reward/mean": 0.5, "reward": 0.1}, "rl") == {"reward/mean": 0.5, "reward": 0.1}
    assert under_current_names({"reward/mean": 0.5}, "evaluate") == {"reward/mean": 0.5}


def test_a_former_name_is_answered_with_the_new_one(tiny):
    def selected(name, found):
        trainer = Trainer(load_policy(tiny["policy"]), NextToken("token-mean"), OptimizerConfig(select_by=name), 3)
        trainer.consider(found)

    with pytest.raises(TrainingError, match="reward/mean is called reward here; write one of: entropy, reward"):
        selected("reward/mean", {"reward": 0.5, "entropy": 1.0})
    with pytest.raises(TrainingError, match="eval_loss is called loss here"):  # TRL's metric_for_best_model
        selected("eval_loss", {"loss": 0.5})
    with pytest.raises(TrainingError, match="no such metric; write one of: loss"):
        selected("quality", {"loss": 0.5})
    trial = SimpleNamespace(name="t", found={"sft.a": SimpleNamespace(metrics={"last/reward": 0.5, "loss": 1.0})})
    with pytest.raises(ConfigError, match="last/reward/mean is called last/reward here"):
        sweep.measured("stage", trial, "last/reward/mean")
    with pytest.raises(ConfigError, match="train/loss is called loss here"):
        sweep.measured("recipe", trial, "sft.a.train/loss")
    assert sweep.measured("recipe", trial, "sft.a.loss") == 1.0
    # a sweep's loss is that of training, which a validation loss is not
    trial.found["sft.a"].metrics["validation/nll"] = 2.0
    with pytest.raises(ConfigError, match=r"no metric 'validation/loss'; (?!.*is called)"):
        sweep.measured("stage", trial, "validation/loss")
    trial.found["sft.a"].metrics["validation/loss"] = 2.0
    with pytest.raises(ConfigError, match="eval_loss is called validation/loss here"):
        sweep.measured("stage", trial, "eval_loss")


def test_a_run_of_before_is_compared_with_one_of_now(tmp_path, monkeypatch):
    logged = {
        "old": {"train/loss": 2.0, "reward/mean": 0.25, "policy/clip_low": 0.5},
        "new": {"loss": 1.0, "reward": 0.5, "clip_ratio/low_mean": 0.25},
    }
    last = {"old": {"train/loss": 2.0, "last/reward/group_std": 0.5}, "new": {"loss": 1.0, "last/reward_std": 0.25}}
    records = {}
    for name, metrics in logged.items():
        file = tmp_path / name / "metrics.jsonl"
        file.parent.mkdir()
        file.write_text("".join(json.dumps({"step": step, "metrics": metrics}) + "\n" for step in (1, 2)))
        records[name] = {
            "rl": {
                "stage": "rl",
                "key": name * 8,
                "config": {},
                "inputs": {},
                "outputs": {},
                "metrics": last[name],
                "metrics_file": str(file),
            }
        }
    monkeypatch.setattr(compare, "load", records.get)
    found = compare.compare("old", "new", tmp_path / "figures")
    assert {row["metric"]: row["difference"] for row in found["metrics"]} == {"loss": -1.0, "last/reward_std": -0.25}
    assert found["figures"] == [str(tmp_path / "figures" / "rl-curves.png")]
    standing = {compare.UNFINISHED: {"status": "running", "step": 2}}
    for name in records:
        records[name]["rl"] |= standing
    found = compare.compare("old", "new", tmp_path / "figures")
    assert {row["metric"]: row["difference"] for row in found["metrics"]} == {
        "loss": -1.0,
        "reward": 0.25,
        "clip_ratio/low_mean": -0.25,
    }


def test_what_an_update_logs_is_what_its_rollouts_give(rl):  # noqa: F811
    """Section 7 of the catalogue: the KL that is only watched, ends that are no end of turn, the passes of a batch."""
    from stages.chat import renderer_for

    result, metrics = rl(
        "watched",
        {
            "preset": "dr_grpo",
            "beta": 0,
            "monitor_kl": True,
            "num_iterations": 2,
            "num_minibatches": 2,
            "max_steps": 4,
            "stop_strings": ["e", "a", "o"],
            "max_completion_length": 12,
        },
        reference=rl.tiny["other"],
    )
    rows = rows_of(result)
    stops = renderer_for(rl.tiny["policy"]).stop_ids
    ended = [r["length"] for r in rows if r["terminated"]]
    missing = [r["completion_ids"][-1] not in stops for r in rows]
    assert metrics[0]["completions/eos_missing_fraction"] == np.mean(missing) > metrics[0]["completions/clipped_ratio"]
    assert [metrics[0][f"completions/{name}_terminated_length"] for name in ("min", "mean", "max")] == pytest.approx(
        [min(ended), np.mean(ended), max(ended)]
    )
    assert [m["policy/epoch"] for m in metrics] == [1, 1, 2, 2]
    for step in metrics:
        assert step["policy_loss"] == step["loss"] and "entropy_coef" not in step
        assert step["clip_ratio/region_mean"] == pytest.approx(
            step["clip_ratio/low_mean"] + step["clip_ratio/high_mean"]
        )
    assert metrics[-1]["approx_kl/k3"] > 1e-6 > metrics[0]["approx_kl/k2"]
    # of all completions, before anything has moved
    result, whole = rl(
        "one-step",
        {"preset": "dr_grpo", "beta": 0, "monitor_kl": True, "max_steps": 1, "entropy_coef": 0.5},
        reference=rl.tiny["other"],
    )
    rows = rows_of(result)
    d = np.concatenate([np.subtract(r["logp_ref"], r["logp_old"])[np.array(r["loss_mask"]) == 1] for r in rows])
    assert whole[0]["kl"] == pytest.approx((np.expm1(d) - d).mean(), rel=1e-4) and whole[0]["kl"] > 1e-4
    assert whole[0]["entropy_coef"] == 0.5
    assert whole[0]["loss"] == pytest.approx(whole[0]["policy_loss"] + whole[0]["entropy_bonus"], rel=1e-5)


def test_what_judges_have_cost_so_far_is_logged_by_iteration(rl):  # noqa: F811
    from tests.chat_server import chat_server

    likely = {"token": "7", "top_logprobs": [{"token": "7", "logprob": -0.1}, {"token": "3", "logprob": -3.0}]}
    with chat_server(
        lambda body: {"message": {"content": "7"}, "finish_reason": "stop", "logprobs": {"content": [likely]}}
    ) as server:
        server.usage = {"prompt_tokens": 7, "completion_tokens": 2}
        judged = {"kind": "judge", "endpoint": server.url, "endpoint_model": "m"}
        config = {"preset": "grpo", "beta": 0, "reward_override": "none", "rewards": [judged], "eval_prompts": 4}
        config |= {"max_completion_length": 24, "learning_rate": 0.02}  # answers that end, and change with every step
        result, metrics = rl("judged", config)
        asked = len(server.seen)
    folder = Path(result["outputs"]["rollouts"]["path"]).parents[1]
    lines = [json.loads(line)["metrics"] for line in (folder / "perf.jsonl").read_text().splitlines()]
    seen = [line for line in lines if "judge_calls" in line]
    assert len(seen) == 2 and 0 < seen[0]["judge_calls"] <= seen[1]["judge_calls"] < asked
    # the validation at the end asks too
    assert result["perf"]["judge_calls"] == result["usage"]["judge_calls"] == asked
    assert result["perf"]["judge_tokens_in"] == 7 * asked
    assert all(
        m["judge_tokens_in"] == 7 * m["judge_calls"] and m["judge_tokens_out"] == 2 * m["judge_calls"] for m in seen
    )
