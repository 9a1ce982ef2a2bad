"""Settings of the rl stage in combination: what a run leaves is computed again apart from it
(tests/training/rl_audit.py), and what is refused says what to write.

A seeded part of what ``python -m tests.training.rl_combinations`` draws; new presets and settings join by themselves.
"""

import copy
import json
import warnings

import pytest

from tests.evaluation.conftest import tiny_policy
from tests.training.rl_audit import Watch, audit
from tests.training.rl_combinations import (
    BASE,
    CASCADE,
    COST,
    ENVIRONMENT,
    EVEN,
    SPREAD,
    TALKING,
    Covering,
    axes,
    says_what_to_write,
    world_in,
)

#: What went wrong once, or what a pair would rarely hit.
CHOSEN = {
    "distillation, half": {
        "preset": "sdpo",
        "distillation_weight": 0.5,
        "num_minibatches": 2,
        "num_iterations": 2,
        "distillation_is_clip": 1.001,
        "rewards": [TALKING],
        "num_generations": 4,
    },
    "distillation of whole distributions, adapter": {
        "preset": "sdpo",
        "distillation_mode": "full_logits",
        "distillation_alpha": 0.3,
        "lora_rank": 4,
        "num_minibatches": 2,
        "minibatch_unit": "sequence",
        "rewards": [EVEN],
        "temperature": 1.3,
    },
    "adaptive entropy": {
        "preset": "grpo",
        "use_adaptive_entropy": True,
        "entropy_coef": 0.02,
        "entropy_coef_delta": 0.03,
        "entropy_target": 4.6,
        "max_steps": 5,
    },
    "KL-Cov's first step": {
        "preset": "grpo",
        "surrogate": "none",
        "covariance_kl": 0.3,
        "num_minibatches": 3,
        "beta": 0.0,
    },
    "thrown-out tokens, whitened": {
        "preset": "reinforce_pp",
        "rejection": "token",
        "rejection_min": 0.6,
        "top_k": 100,
        "importance_correction": "token_truncate",
        "importance_normalise": True,
    },
    "tools, masks, minibatches": {
        **ENVIRONMENT,
        "preset": "agent",
        "num_minibatches": 2,
        "minibatch_unit": "sequence",
        "truncation_policy": "mask",
        "kl_coef": 0.1,
        "entropy_coef": 0.05,
    },
    "single tokens, shared critic": {
        "preset": "ppo",
        "critic_mode": "shared",
        "num_minibatches": 2,
        "num_iterations": 2,
        "minibatch_unit": "token",
        "kl_controller": "adaptive_ppo",
        "target_kl": 1e-3,
    },
    "adapter, ahead, multipliers": {
        "preset": "dr_grpo",
        "lora_rank": 4,
        "async_rollouts": True,
        "beta": 0.2,
        "rewards": [SPREAD, {**EVEN, "at_least": 0.5, "multiplier_step": 0.3}],
    },
    "refill, from a step on": {
        "preset": "dapo",
        "soft_punish_cache": 4,
        "truncation_policy": "score",
        "filter_groups_metric": "reward_std",
        "rewards": [SPREAD, {**COST, "from_step": 1}],
        "ref_mode": "ema",
        "ref_decay": 0.5,
        "beta": 0.2,
    },
    "exact KL, moving average": {
        "preset": "grpo",
        "kl_estimator": "full",
        "beta": 0.5,
        "ref_mode": "ema",
        "ref_decay": 0.5,
        "num_minibatches": 2,
        "max_steps": 5,
    },
    "exact KL, refreshed, adapter": {
        "preset": "grpo",
        "kl_estimator": "full",
        "kl_direction": "forward",
        "beta": 0.5,
        "ref_mode": "refresh",
        "ref_sync_steps": 1,
        "ref_sync_alpha": 0.5,
        "num_iterations": 3,
        "max_steps": 7,
        "lora_rank": 4,
    },
    "running statistics, warmed critic": {
        "preset": "vapo",
        "critic_learning_rate": 1e-2,
        "critic_warmup_steps": 2,
        "reward_norm": "running",
        "dynamic_sampling": False,
    },
    "nothing left after rejection": {
        "preset": "nash_md",
        "rejection": "sequence_mean",
        "rejection_min": 1.0,
        "rejection_max": 1.0000001,
        "top_p": 0.8,
    },
    "greedy baseline, all rejected": {
        "preset": "rloo",
        "advantage": "reward_minus_baseline",
        "baseline": "greedy",
        "rejection": "sequence_mean",
        "rejection_min": 1.0,
        "rejection_max": 1.0000001,
        "top_p": 0.8,
    },
    "clipped against a mixture": {
        "preset": "nash_md",
        "opponent": "mixture",
        "advantage_clip": 0.6,
        "top_k": 20,
        "max_steps": 2,
    },
    "refill with a multiplier": {
        "preset": "grpo",
        "dynamic_sampling": True,
        "stop_strings": ["e"],
        "rewards": [SPREAD, {**EVEN, "at_least": 0.5, "multiplier_step": 0.3}],
    },
    "pretraining text, cooler sampler": {
        "preset": "ppo_ptx",
        "ptx_coef": 1.0,
        "temperature": 0.7,
        "critic_learning_rate": 1e-2,
        "num_minibatches": 2,
    },
    "replay, other sampler": {
        "preset": "topr",
        "replay_fraction": 0.34,
        "top_p": 0.8,
        "ref_mode": "refresh",
        "ref_sync_steps": 1,
        "beta": 0.2,
    },
    "penalties, banned words, biases": {
        "preset": "grpo",
        "frequency_penalty": 0.7,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.3,
        "bad_words": ["e", "an", "th"],
        "logit_bias": {40: 3.0, 41: -100.0},
        "min_tokens": 2,
        "num_iterations": 2,
    },
    "a cascade of tiers": {
        "preset": "grpo",
        "rewards": CASCADE,
        "num_generations": 6,
        "prompts_per_step": 4,
        "max_completion_length": 12,
        "stop_strings": list("aeiou"),
    },
}
DRAWN = 12


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return world_in(tmp_path_factory.mktemp("combinations"), tiny_policy)


@pytest.fixture(scope="module")
def kept():
    return {}


@pytest.fixture(scope="module")
def drawn():
    covering = Covering(seed=7)
    return [covering.next() for _ in range(DRAWN)], covering


def checked(world, config, more=False):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind, problems = world.audit({**BASE, **config}, more)
    assert not problems, (
        f"{kind} {json.dumps({name: value for name, value in config.items() if BASE.get(name) != value})}\n"
        + "\n".join(problems[:10])
    )
    return kind


@pytest.mark.parametrize("k", range(DRAWN))
def test_what_a_run_leaves_follows_from_its_settings(world, drawn, k):
    checked(world, drawn[0][k])


@pytest.mark.parametrize("name", list(CHOSEN))
def test_combinations_by_name(world, name):
    """The first ones also in other micro-batches, killed and gone on with, and from their own rollouts."""
    assert checked(world, CHOSEN[name], more=name in list(CHOSEN)[:6]) == "ran"


def test_stored_rollouts_of_another_run(world):
    """Sampled behind a filter, and trained on by a policy that ratios to whoever sampled, and by one whose iterate
    starts the iteration.
    """
    from pathlib import Path

    config = {**BASE, "preset": "topr", "top_p": 0.8, "num_generations": 2}
    _, _, spec = world.run(config, "source", world.inputs(config), Watch())
    for config in (
        {"preset": "offline_is", "beta": 0.3, "num_minibatches": 2, "truncation_policy": "mask"},
        {"preset": "mdpo", "reward_norm": "whiten"},
    ):
        kind, problems = world.audit(
            {**BASE, **config, "num_generations": 2}, stored=str(Path(spec["workdir"], "out", "rollouts"))
        )
        assert kind == "ran" and not problems, "\n".join(problems[:10])


def test_every_setting_is_tried_or_left_out_for_a_reason_and_refusals_say_what_to_write(drawn):
    from stages.rl import Config

    assert not set(axes()) - set(Config.model_fields) and len(axes()) > 90
    assert not drawn[1].refusals and len(drawn[1].seen) > 20 * DRAWN
    assert not says_what_to_write(ValueError("no"))


@pytest.mark.parametrize(
    "name, changes",
    [
        ("penalties, banned words, biases", {"frequency_penalty": 0.6}),
        ("penalties, banned words, biases", {"presence_penalty": 0.3}),
        ("penalties, banned words, biases", {"bad_words": ["an"]}),
        ("penalties, banned words, biases", {"logit_bias": {40: 2.9, 41: -100.0}}),
        ("a cascade of tiers", {"rewards": [CASCADE[0], {**CASCADE[1], "min_confidence": 0.99}, *CASCADE[2:]]}),
    ],
)
def test_the_audit_knows_samplers_and_tiers(world, kept, name, changes):
    """Of the same run, under a setting that it did not have."""
    config = {**BASE, **CHOSEN[name]}
    if name not in kept:
        watch, inputs = Watch(), world.inputs(config)
        kept[name] = (inputs, *world.run(config, f"kept-{len(kept)}", inputs, watch)[:2], watch)
    inputs, rows, metrics, watch = kept[name]
    if "rewards" in changes:
        assert {row["reward_tier"] for row in rows} == {"rule", "learned", "judge"}
    told = "\n".join(audit({**config, **changes}, inputs, rows, metrics, watch, world.tokenizer))
    assert ("tier of row" if "rewards" in changes else "logp_rollout of row") in told


def test_the_audit_finds_what_is_wrong(world):
    """One number changed in rollouts, curves or weights, and it says so."""
    config = {
        **BASE,
        "preset": "ppo",
        "critic_learning_rate": 1e-2,
        "num_iterations": 1,
        "truncation_policy": "score",
    }
    watch = Watch()
    inputs = world.inputs(config)
    rows, metrics, _ = world.run(config, "audited", inputs, watch)
    find = lambda rows=rows, metrics=metrics, **changes: "\n".join(
        audit({**config, **changes}, inputs, rows, metrics, watch, world.tokenizer)
    )
    assert not find()
    for column, change in (
        ("advantages", lambda v: [v[0] + 0.01, *v[1:]]),
        ("reward", lambda v: v + 0.1),
        ("logp_old", lambda v: [v[0] - 0.01, *v[1:]]),
        ("loss_mask", lambda v: [0, *v[1:]]),
        ("values", lambda v: [v[0] + 0.1, *v[1:]]),
        ("logp_ref", lambda v: [v[0] + 0.01, *v[1:]]),
        ("returns", lambda v: [v[0] + 0.1, *v[1:]]),
    ):
        assert column in find(rows=[{**rows[0], column: change(rows[0][column])}, *rows[1:]]), column
    for name in (
        "reward",
        "reward_std",
        "kl/sequence_sum",
        "completions/clipped_ratio",
        "critic/explained_variance",
        "advantage/std",
    ):
        assert name in find(metrics=[{**metrics[0], name: metrics[0][name] + 0.01}, *metrics[1:]]), name
    for changes, says in (
        ({"kl_coef": 0.05}, "shaped_reward"),
        ({"lam": 0.5}, "advantages"),
        ({"loss_agg_mode": "seq-mean-token-sum"}, "gradient"),
        ({"temperature": 0.9}, "logp_old"),
    ):
        assert says in find(**changes), changes
    noted = watch.policy[0]
    watch.policy[0] = other = copy.copy(noted)
    other.metrics = {
        **noted.metrics,
        "grad_norm": noted.metrics["grad_norm"] * 1.02,
        "loss": noted.metrics["loss"] + 1e-2,
    }
    assert "step 0, loss" in find() and "step 0, grad_norm" in find()
