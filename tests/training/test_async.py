"""Sampling while training (ASYNC): who sampled what, the same result whatever is faster, and what is refused."""

import threading
import time

import numpy as np
import pytest

import stages.decoding.sampler
import stages.training
from stages.harness import execute
from stages.models.modeling import load_policy
from stages.rl import Config, resolve_preset
from storage.datasets import open_dataset
from tests.training.test_resume import outputs

SMALL = {
    "preset": "grpo",
    "max_steps": 4,
    "prompts_per_step": 2,
    "num_generations": 4,
    "max_completion_length": 6,
    "learning_rate": 3e-3,
    "reward_override": "random",
    "rewards": [{"name": "length", "kind": "length"}],
    "async_rollouts": True,
}


@pytest.fixture()
def rl(tiny, data, spec):
    """``rl(name, **config)`` -> (result, folder of the run)."""

    def build(name, **config):
        made = spec("rl", {**SMALL, **config}, {"model": tiny["policy"], "data": data["prompts"]}, name)
        return execute(made, lambda event: None), made["workdir"]

    return build


def rollouts(result):
    return list(open_dataset(result["outputs"]["rollouts"]["path"]).iter_rows())


def log_probs(path, rows):
    """Of each row's completion under the model in ``path``, by its own forward pass."""
    import torch

    model, found = load_policy(path), []
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        with torch.no_grad():
            logits = model(ids).logits[0].double().log_softmax(-1)
        start = len(row["prompt_ids"])
        found.append([float(logits[start + i - 1, token]) for i, token in enumerate(row["completion_ids"])])
    return found


def test_every_batch_is_sampled_by_the_policy_of_one_iteration_before_and_says_so(tiny, rl):
    """Ratios start from whoever sampled: log-probs stored with a batch are those of the weights that its policy_version
    names, computed here by the model itself.
    """
    whole, _ = rl("whole")
    weights = {
        0: tiny["policy"],
        **{steps: rl(f"{steps} steps", max_steps=steps)[0]["outputs"]["model"]["path"] for steps in (1, 2)},
    }
    rows = rollouts(whole)
    assert {(r["iteration"], r["policy_version"]) for r in rows} == {(0, 0), (1, 0), (2, 1), (3, 2)}
    for iteration, version in ((0, 0), (1, 0), (2, 1), (3, 2)):
        own = [r for r in rows if r["iteration"] == iteration]
        for other, path in weights.items():
            apart = max(np.abs(np.subtract(r["logp_old"], logps)).max() for r, logps in zip(own, log_probs(path, own)))
            assert apart < 1e-4 if other == version else apart > 1e-3, (iteration, other)


def test_staleness_is_logged_and_the_ratio_is_checked_where_it_must_be_one(rl):
    import json
    from pathlib import Path

    _, folder = rl("metrics", num_minibatches=2, max_steps=6)
    found = [json.loads(line)["metrics"] for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    assert [m["staleness/max"] for m in found if "staleness/max" in m] == [2, 2]  # steps; the first batch is fresh
    assert found[0]["policy/ratio_deviation"] < 1e-4 < found[2]["policy/ratio_deviation"]
    measured = [json.loads(line)["metrics"] for line in Path(folder, "perf.jsonl").read_text().splitlines()]
    waited = [m for m in measured if "async/waited_seconds" in m]
    assert len(waited) == 2 and all(0 <= m["async/idle_fraction"] <= 1 for m in waited)


def test_a_reward_begins_at_its_step_whoever_sampled(rl):
    """A batch that was sampled ahead was paid for the step at which it was sampled, an iteration before the first that
    it is trained at.
    """
    rewards = [{"kind": "length"}, {"kind": "length_penalty", "length_alpha": 0.1, "from_step": 4}]
    for ahead in (False, True):
        made, _ = rl(
            f"late-{ahead}",
            num_minibatches=2,
            max_steps=8,
            reward_override="none",
            rewards=rewards,
            async_rollouts=ahead,
        )
        weights = {
            (r["iteration"], c["weight"])
            for r in rollouts(made)
            for c in r["reward_components"]
            if c["name"] == "length_penalty"
        }
        assert weights == {(0, 0.0), (1, 0.0), (2, 1.0), (3, 1.0)}


def test_a_long_completion_is_punished_by_the_limit_that_it_was_drawn_under(rl):
    """OVERLONG under a context_schedule: by the limit of now, what had stopped at its own limit was punished as if it
    could have gone on.
    """
    settings = {
        "context_schedule": [[0, 4], [2, 8]],
        "soft_punish_cache": 2,
        "truncation_policy": "score",
        "reward_override": "none",
    }
    replay = {"preset": "topr", "replay_fraction": 0.5, "async_rollouts": False, "replay_window": 3}
    for name, more in {"ahead": {}, "again": replay}.items():
        rows = rollouts(rl(name, **settings, **more)[0])
        limits, late = {0: 4, 1: 4, 2: 8, 3: 8}, 0
        for r in rows:
            limit, length = limits[r["policy_version"]], r["length"]
            paid = sum(c["value"] for c in r["reward_components"] if c["name"] == "overlong")
            assert length <= limit and paid == pytest.approx(max(-1.0, min(0.0, (limit - 2 - length) / 2)))
            late += limits[r["iteration"]] != limit and length == limit
        assert late


@pytest.mark.parametrize("slow", ("sampling", "training"))
def test_the_result_does_not_depend_on_what_is_faster(rl, monkeypatch, slow):
    from pathlib import Path

    _, one = rl("one", eval_prompts=4, eval_every=2)
    owner, name = (
        (stages.decoding.sampler.Sampler, "generate") if slow == "sampling" else (stages.training.Trainer, "step")
    )
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *a, **k: (time.sleep(0.3), real(*a, **k))[1])
    _, other = rl("other", eval_prompts=4, eval_every=2)
    assert outputs(Path(one)) == outputs(Path(other))


def test_sampling_and_training_run_at_the_same_time(rl, monkeypatch):
    """Each waits inside for the other: neither would end if they took turns."""
    sampling, training, met = threading.Event(), threading.Event(), []
    sample, step = stages.decoding.sampler.Sampler.generate, stages.training.Trainer.step

    def generate(self, *args, **kwargs):
        if threading.current_thread() is not threading.main_thread():
            sampling.set()
            met.append(training.wait(60))
        return sample(self, *args, **kwargs)

    def train(self, items):
        if not training.is_set():
            met.append(sampling.wait(60))
            training.set()
        return step(self, items)

    monkeypatch.setattr(stages.decoding.sampler.Sampler, "generate", generate)
    monkeypatch.setattr(stages.training.Trainer, "step", train)
    rl("both", max_steps=2)
    assert met and all(met)


def test_what_fails_beside_training_ends_the_stage(rl, monkeypatch):
    sample = stages.decoding.sampler.Sampler.generate

    def broken(self, *args, **kwargs):
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("the engine is gone")
        return sample(self, *args, **kwargs)

    monkeypatch.setattr(stages.decoding.sampler.Sampler, "generate", broken)
    with pytest.raises(RuntimeError, match="the engine is gone"):
        rl("broken")


def test_an_adapter_is_sampled_from_as_it_was(tiny, rl):
    """The copy holds base and adapter as one: its log-probs are those of the published model."""
    rows = rollouts(rl("adapter", lora_rank=4, learning_rate=0.1, max_steps=3)[0])
    path = rl("one step of it", lora_rank=4, learning_rate=0.1, max_steps=1)[0]["outputs"]["model"]["path"]
    own = [r for r in rows if r["iteration"] == 2]
    assert {r["policy_version"] for r in own} == {1}
    apart = [
        max(np.abs(np.subtract(r["logp_old"], logps)).max() for r, logps in zip(own, log_probs(of, own)))
        for of in (path, tiny["policy"])
    ]
    assert apart[0] < 1e-4 and apart[1] > 1e-3


@pytest.mark.parametrize(
    "config, says",
    [
        ({"preset": "rloo"}, "importance_correction=token_truncate"),
        ({"preset": "sppo", "opponent": "self"}, "preset=grpo"),
        ({"preset": "trpo"}, "preset=ppo"),
        ({"preset": "topr", "replay_fraction": 0.25}, "replay_fraction=0"),
        ({"num_minibatches": 4, "max_staleness": 2}, "max_staleness=4"),
        ({"preset": "vineppo"}, "group_mean"),
        ({"ref_mode": "previous", "beta": 0.1}, "ref_mode=refresh"),
        ({"preset": "ppo_clip_kl", "kl_target": "old"}, "kl_target=ref"),
        (
            {"early_stop_kl": 0.1, "num_iterations": 2, "rewards": [{"kind": "length", "from_step": 3}]},
            "leave one of them out",
        ),
    ],
)
def test_what_would_be_wrong_is_refused(config, says):
    with pytest.raises(ValueError, match=f"async_rollouts=true.*{says}"):
        resolve_preset(Config(**{"prompts_per_step": 8, **config, "async_rollouts": True}))


def test_a_strictly_on_policy_loss_takes_importance_weights():
    resolve_preset(Config(preset="rloo", async_rollouts=True, importance_correction="token_truncate"))
    resolve_preset(Config(preset="topr", async_rollouts=True))
    resolve_preset(Config(preset="grpo", async_rollouts=True, max_staleness=1))


def test_filters_of_the_sampler_need_importance_weights(rl):
    with pytest.raises(ValueError, match="write importance_correction=token_truncate"):
        rl("filtered", top_p=0.9)
    result, _ = rl("corrected", top_p=0.9, importance_correction="token_truncate", max_steps=3)
    weighed = [r["is_weights"] for r in rollouts(result) if r["iteration"] == 2]
    assert any(w != 1.0 for row in weighed for w in row)
