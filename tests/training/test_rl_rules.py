"""Rules of the RL stage that formulas do not show: which coefficient a controller moves, what an empty step leaves
alone, what settings refuse each other.
"""

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch

from stages.running import randomness
from stages.algorithms import rl_preset
from stages.policy.presets import RL_AXES
from stages.policy.read_when import RL_ALARMS_WATCH, RL_INPUTS_READ_WHEN, RL_READ_OF_INPUTS, RL_READ_WHEN
from stages.batching import make_item
from stages.policy.credit import Batch, assign
from stages.estimators import RunningScale, normalise_rewards
from stages.generation import Sample
from stages.losses import policy_loss
from stages.models.modeling import load_policy
from stages.policy.policy_update import PolicyGradient
from stages.policy.settings import AlarmName, Preset
from stages.rl import SPEC, Config, not_read, reads_input, resolve_preset, roles, row_of
from stages.rollouts.groups import Group, override_reward
from stages.rollouts.metrics import credit_metrics, cut_gain, rollout_metrics
from stages.settings import AGENT_READ_WHEN, AgentConfig, ChatConfig, OptimizerConfig, SamplingConfig
from stages.rollouts.prompts import PromptOrder
from stages.spec import ConfigError
from stages.training import Trainer, TrainingError
from tests.common import random_value_head
from tests.training.test_rl_parts import rl, rows_of  # noqa: F401

#: A reference that every iteration of two steps starts at.
COPIED = {"num_iterations": 2, "ref_mode": "refresh", "ref_sync_steps": 2, "ref_sync_alpha": 1.0}

SPREAD = {
    "name": "spread",
    "kind": "python",
    "source": "def score(prompt, completion, answer):\n    return sum(map(ord, completion)) % 7 / 3 - 0.9",
}
MASK = np.array([[1, 1, 1], [1, 1, 0]], bool)


def batch(**changes):
    return Batch(
        **{
            "rewards_B": np.array([1.0, 0.0]),
            "group_of_B": np.array([0, 0]),
            "mask_BT": MASK,
            "kept_B": np.ones(2, bool),
            "counted_B": np.ones(2, bool),
            "values_BT": np.where(MASK, 0.25, 0.0),
            **changes,
        }
    )


# --- two KLs, two coefficients ----------------------------------------------------------------------------------------


def test_the_kl_in_the_reward_and_the_kl_in_the_loss_keep_their_own_coefficients(rl):
    """PPO-CLIPKL with an anchor: KL to the old policy in the loss (1.0), KL to the reference in the reward (0.02)."""
    result, metrics = rl(
        "two",
        {
            "preset": "ppo_clip_kl",
            "kl_coef": 0.02,
            "truncation_policy": "score",
            "max_steps": 5,
            "num_iterations": 1,
            "learning_rate": 1e-2,
        },
    )
    assert metrics[-1]["kl/coef"] == 1.0 and metrics[-1]["kl/reward_coef"] == 0.02
    seen = 0
    for row in rows_of(result):
        kl = sum(row["logp_old"]) - sum(row["logp_ref"])
        assert row["shaped_reward"] == pytest.approx(row["reward"] - 0.02 * kl, abs=1e-5)
        seen += abs(kl) > 1e-3
    assert seen


@pytest.mark.parametrize("moves", ["loss", "reward"])
def test_a_controller_moves_one_of_the_two_coefficients(rl, moves):
    preset = (
        {"preset": "ppo_penalty_adaptive", "kl_coef": 0.02}
        if moves == "loss"
        else {"preset": "ppo", "kl_controller": "adaptive_ppo", "target_kl": 1e6}
    )
    _, metrics = rl("moves", {**preset, "num_iterations": 1, "max_steps": 3, "learning_rate": 1e-5})
    seen = [(m.get("kl/coef"), m["kl/reward_coef"]) for m in metrics]
    if moves == "loss":
        assert seen == [(1.0, 0.02), (0.5, 0.02), (0.25, 0.02)]
    else:
        assert [r for _, r in seen] == [0.02, 0.01, 0.005]


# --- steps without a trained token ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "preset",
    [
        {"preset": "grpo"},
        {"preset": "topr"},
        {"preset": "ppo", "critic_mode": "shared"},
        {"preset": "grpo", "beta": 0.0, "entropy_coef": 0.1},
    ],
)
def test_a_step_without_trained_tokens_moves_no_weight(tiny, rl, preset):
    """All completions are cut and masked: neither Adam's momentum nor weight decay may act, whatever else the loss
    has.
    """
    result, metrics = rl(
        "masked", {**preset, "truncation_policy": "mask", "min_tokens": 6, "weight_decay": 0.5, "num_iterations": 1}
    )
    assert all(r["truncated"] for r in rows_of(result)) and all(
        m["empty_step"] == 1 and m["grad_norm"] == 0 for m in metrics
    )
    before, after = (load_policy(p).state_dict() for p in (tiny["policy"], result["outputs"]["model"]["path"]))
    assert all(torch.equal(p, after[n]) for n, p in before.items())
    assert "nothing_trained" in {one["code"] for one in result["warnings"]}
    trained, _ = rl("trained", {"preset": "grpo", "max_steps": 2, "num_iterations": 1})
    assert "nothing_trained" not in {one["code"] for one in trained["warnings"]}


# --- what goes into an advantage --------------------------------------------------------------------------------------


def test_reward_to_go_is_lowered_by_the_baseline():
    row = rl_preset("reinforce", advantage="reward_to_go", baseline="constant", gamma=0.5)
    found = assign(row, batch(baseline=0.5), 0.0).advantages_BT
    assert np.allclose(found, [[0.25 - 0.5, 0.5 - 0.5, 1 - 0.5], [-0.5, -0.5, 0.0]])


def test_a_completion_whose_baseline_is_unknown_teaches_nothing():
    row = rl_preset("remax")
    found = assign(row, batch(baseline=np.array([np.nan, 0.25])), 0.0)
    assert np.allclose(found.advantages_BT, [[0, 0, 0], [-0.25, -0.25, 0]]) and found.informative_B.tolist() == [
        False,
        True,
    ]


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
    assert found["frac_reward_zero_std"] == 1.0


def test_the_std_of_a_group_that_is_logged_is_the_one_that_advantages_are_divided_by():
    """GRPO divides by the sample std (std_ddof 1, as TRL, whose reward_std is it); a group of one has none to speak
    of.
    """
    samples = [Sample({}, [1], g, [2], [0.0], "eos", "x", r, {}, {}) for g, r in enumerate((1.0, 0.0, 0.5))]
    rewards, of = np.array([1.0, 0.0, 0.5]), np.array([0, 0, 1])
    row, shown = rl_preset("grpo", std_eps=0.0), MASK[[0, 0, 0]]
    advantages = assign(
        row,
        batch(rewards_B=rewards, group_of_B=of, mask_BT=shown, kept_B=np.ones(3, bool), counted_B=np.ones(3, bool)),
        0.0,
    ).advantages_BT[:, 0]
    assert (
        rollout_metrics(samples[:2], rewards[:2], of[:2])["reward_std"]
        == pytest.approx(0.5 / advantages[0])
        == pytest.approx(np.sqrt(0.5))
    )
    assert rollout_metrics(samples, rewards, of)["reward_std"] == pytest.approx(np.sqrt(0.5) / 2)
    assert rollout_metrics(samples, rewards, of, 0)["reward_std"] == pytest.approx(0.25)


def test_what_a_cut_completion_earns_beside_one_that_ends():
    """A no_eos_reward of 0 is more than what a reward model says of wrong answers; what is masked or cannot be scored
    counts on neither side.
    """
    samples = [
        Sample({}, [1], g, [2], [0.0], reason, "x", total, {}, {})
        for g, (reason, total) in enumerate((("eos", -4.0), ("eos", -5.0), ("length", 0.0), ("length", 0.0)))
    ]
    rewards, all_ = np.array([-4.0, -5.0, 0.0, np.nan]), np.ones(4, bool)
    assert cut_gain(samples, rewards, all_) == {"reward/cut_gain": 4.5}
    assert (
        cut_gain(samples, rewards, np.array([True, True, False, True]))
        == {}
        == cut_gain(samples[:2], rewards[:2], all_[:2])
    )


# --- settings that refuse each other ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, says",
    [
        ({"preset": "ppo", "kl_reward_mode": "token_broadcast"}, "token_broadcast"),
        (
            {"preset": "ppo_outcome", "kl_reward_mode": "token_broadcast", "critic_target": "lambda_return"},
            "token_broadcast",
        ),
        ({"preset": "ppo_outcome", "truncation_policy": "bootstrap"}, "truncation_policy=bootstrap"),
        ({"preset": "oreo", "truncation_policy": "bootstrap"}, "truncation_policy=bootstrap"),
        ({"preset": "oreo", "advantage": "group_mean"}, "rewards-to-go"),
        ({"preset": "oreo", "gamma": 0.9}, "write gamma=1, or preset=ppo"),
        ({"preset": "oreo", "critic_target": "td0"}, "leave critic_target out, or write preset=ppo"),
        ({"preset": "oreo", "advantage": "reward_minus_value"}, "rewards-to-go"),
        ({"preset": "grpo_process", "beta": 0.0, "kl_coef": 0.02}, "kl_coef"),
        ({"preset": "dapo", "kl_controller": "adaptive_ziegler", "target_kl": 6.0}, "kl_controller"),
        ({"preset": "grpo", "ref_mode": "previous", "kl_estimator": "full"}, "kl_target=old"),
        ({"preset": "grpo", "max_staleness": 2}, "max_staleness"),
        ({"preset": "p3o", "num_generations": 5}, "num_generations=4 or 6"),
        ({"preset": "copg", "num_generations": 3}, "num_generations=2 or 4"),
        ({"preset": "online_ipo", "num_generations": 7, "options": {"tau": 1.0}}, "num_generations=6 or 8"),
        (
            {"preset": "p3o", "num_generations": 4, "sft_member": "append", "sft_in_loss": True},
            "the answer of sft_member=append.*num_generations=3 or 5",
        ),
        ({"preset": "grpo", "max_completion_length": 64, "soft_punish_cache": 65}, "soft_punish_cache"),
        ({"preset": "grpo", "context_schedule": [(0, 32), (2, 48)], "soft_punish_cache": 40}, "soft_punish_cache"),
        (
            {"preset": "grpo", "context_schedule": [(0, 32), (2, 8)], "min_tokens": 9},
            "completion limit of 8 tokens that context_schedule sets",
        ),
        ({"preset": "grpo", "context_schedule": [(180, 32), (0, 16)]}, "context_schedule"),
        ({"preset": "grpo", "context_schedule": [(0, 0)]}, "context_schedule"),
        ({"preset": "grpo", "reward_override": "format_only"}, "format"),
        ({"preset": "ppo", "ref_mode": "previous"}, "kl_coef=0"),
        (
            {
                "preset": "grpo",
                "ref_mode": "previous",
                "num_iterations": 2,
                "kl_controller": "adaptive_ppo",
                "target_kl": 0.1,
            },
            "kl_controller=adaptive_ppo would lower.*write kl_target=old in its place",
        ),
        ({"preset": "grpo", "ref_mode": "previous", "num_iterations": 2, "target_kl": 0.1}, "would never be passed"),
        ({"preset": "ppo", **COPIED, "num_iterations": 1, "ref_sync_steps": 1}, "lower no reward.*ref_sync_steps=512"),
        ({"preset": "grpo", **COPIED, "target_kl": 0.1}, "ref_sync_steps=2 makes the reference.*never be passed"),
        ({"preset": "dapo", "rewards": [{"kind": "model", "normalise": "batch"}]}, "reward_norm=whiten"),
        ({"preset": "grpo_process", "truncation_policy": "penalty"}, "truncation_policy=penalty"),
        ({"preset": "grpo_process", "soft_punish_cache": 5}, "soft_punish_cache=0"),
        ({"preset": "grpo_process", "reward_override": "random"}, "reward_override=random"),
        ({"preset": "grpo", "reward_override": "random", "curriculum": "self_paced"}, "curriculum=self_paced"),
        ({"preset": "grpo", "reward_override": "random", "no_resampling_pass_rate": 0.5}, "no_resampling_pass_rate"),
        (
            {"preset": "nash_md", "opponent": "mixture", "stop_strings": ["a"]},
            "leave stop_strings out, or write opponent",
        ),
        ({"preset": "nash_md", "opponent": "mixture", "logit_bias": {5: 1.0}}, "leave logit_bias out"),
    ],
)
def test_settings_that_would_do_something_else_are_refused(config, says):
    with pytest.raises(ValueError, match=says):
        resolve_preset(Config(**config))


@pytest.mark.parametrize(
    "config",
    [
        {"curriculum": "pass_at_k"},
        {"curriculum": "self_paced"},
        {"difficulty_band": (0.2, 0.8)},
        {"no_resampling_pass_rate": 0.5},
    ],
)
def test_pass_rates_need_a_reward_that_says_what_is_right(config):
    """Told before every prompt is sampled passk_samples times for them."""
    given, rewards = ("model", "data", "reward_model"), [{"kind": "model"}, {"kind": "length_penalty", "name": "long"}]
    with pytest.raises(ValueError, match="which completions are right.*kind: verifier, weight: 0"):
        SPEC.check(Config(**config, rewards=rewards), given)
    SPEC.check(Config(**config, rewards=[*rewards, {"kind": "verifier", "name": "verdict", "weight": 0.0}]), given)
    if config.keys() == {"difficulty_band"}:
        SPEC.check(Config(**config, rewards=rewards), (*given, "prompt_stats"))


def test_pass_at_k_needs_k_samples_of_the_starting_policy_or_statistics_that_are_given():
    settings = {"curriculum": "pass_at_k", "passk_k": 16, "num_generations": 16, "rewards": [{"kind": "verifier"}]}
    with pytest.raises(ValueError, match="write passk_k <= 8, or raise passk_samples"):
        SPEC.check(Config(**settings), ("model", "data"))
    SPEC.check(Config(**settings), ("model", "data", "prompt_stats"))
    SPEC.check(Config(**settings, passk_samples=16), ("model", "data"))
    with pytest.raises(ValueError, match="write passk_k <= 8, or raise num_generations"):
        SPEC.check(Config(**{**settings, "num_generations": 8}), ("model", "data", "prompt_stats"))


@pytest.mark.parametrize("says, told", [("1.0", True), ("bool(completion)", False), ("CORRECT", False), ("cut", False)])
def test_a_function_that_says_of_nothing_whether_it_is_right_is_told_of_before_prompts_are_sampled(
    rl,  # noqa: F811
    monkeypatch,
    says,
    told,
):
    """By the completions tried; of cut ones alone nothing is concluded."""
    from stages.rollouts.source import Rollouts

    monkeypatch.setattr(Rollouts, "_measured_pass_rates", lambda *a: pytest.fail("every prompt was sampled"))
    value = {"CORRECT": "{'reward': 0.5, 'correct': True}", "cut": "1.0"}.get(says, says)
    config = {
        "preset": "grpo",
        "difficulty_band": [0.2, 0.8],
        "reward_override": "none",
        "rewards": [
            {"kind": "python", "name": "own", "source": f"def score(prompt, completion, answer):\n    return {value}"}
        ],
        **({"min_tokens": 6} if says == "cut" else {"stop_strings": list("abcdefghijklmnopqrstuvwxyz ")}),
    }
    with pytest.raises(ConfigError if told else pytest.fail.Exception) as found:
        rl("verdicts", config)
    assert not told or re.search(
        "difficulty_band goes by.*'own' gave numbers alone.*return True or False", str(found.value)
    )


def test_the_stage_reports_refused_settings_as_settings(rl):
    with pytest.raises(ConfigError, match="write kl_reward_mode=token_terminal"):
        rl("refused", {"preset": "ppo", "kl_reward_mode": "token_broadcast"})


def other_value(name):
    """A valid value of a setting that is not its default."""
    field = Config.model_fields[name]
    for value in (
        "k3",
        "logp",
        "sequence",
        "mean",
        *(v for a in get_args(field.annotation) for v in get_args(a) or (a,)),
        *get_args(field.annotation),
        True,
        False,
        2,
        0.5,
        1.5,
        3,
        [1.0, 0.5],
        (0.25, 1.5),
        ":",
    ):
        try:
            if getattr(Config(**{name: value}), name) != field.get_default(call_default_factory=True):
                return value
        except ValueError:
            continue
    raise AssertionError(f"no value for {name}")


#: Settings that every preset reads: whoever adds one says here or in RL_READ_WHEN when it is read.
ALWAYS = {
    "preset",
    "rewards",
    "max_steps",
    "prompts_per_step",
    "num_generations",
    "num_iterations",
    "num_minibatches",
    "options",
    "beta",
    "kl_coef",
    "kl_controller",
    "monitor_kl",
    "allow_double_kl",
    "entropy_coef",
    "log_entropy",
    "truncation_policy",
    "reward_norm",
    "reward_clip",
    "soft_punish_cache",
    "context_schedule",
    "dynamic_sampling",
    "reward_override",
    "async_rollouts",
    "engine_max_mismatch",
    "allow_reencoded_ids",
    "replay_fraction",
    "ptx_coef",
    "curriculum",
    "difficulty_band",
    "no_resampling_pass_rate",
    "mode_mix",
    "sft_member",
    "split",
    "prompt_template",
    "max_prompt_length",
    "max_prompts",
    "stop_on",
    "eval_prompts",
    "distillation_weight",
    "use_adaptive_entropy",
}

#: Settings that rl shares with other stages, which every run reads: how it computes, samples and publishes.
SHARED_ALWAYS = {
    "learning_rate",
    "max_nonfinite_steps",
    "max_tokens_per_micro_batch",
    "packing",
    "compute_dtype",
    "forward",
    "sharding",
    "activation_checkpointing",
    "lora_rank",
    "ema_decay",
    "bema",
    "select_by",
    "save_dtype",
    "device_memory_gib",
    "memory_check",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_completion_length",
    "stop_strings",
    "min_tokens",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "bad_words",
    "logit_bias",
    "generation_batch",
    "engine",
    "environment",
    "chat_template",
    "chat_template_kwargs",
}
#: Those that their own class refuses by a validator of its own (frozen_dtype: the memory plan, which knows what is
#: frozen), and two digests that fill themselves in.
REFUSED_BY_CLASS = {
    "frozen_dtype",
    "early_stopping_patience",
    "engine_url",
    "engine_model",
    "engine_api",
    "engine_key_variable",
    "engine_options",
    "sampling_dtype",
    "environment_digest",
    "chat_template_digest",
}


def test_every_setting_says_when_it_is_read():
    named = {name for names, _, _ in RL_READ_WHEN for name in names}
    shared = {
        *OptimizerConfig.model_fields,
        *SamplingConfig.model_fields,
        *AgentConfig.model_fields,
        *ChatConfig.model_fields,
    }
    assert (
        named <= set(Config.model_fields)
        and named & ALWAYS == set()
        and set(Config.model_fields) - shared - named == ALWAYS
    )
    conditional = {
        name for rules in (OptimizerConfig.READ_WHEN, AGENT_READ_WHEN) for names, _, _ in rules for name in names
    }
    assert shared - named - conditional == SHARED_ALWAYS | REFUSED_BY_CLASS and not SHARED_ALWAYS & REFUSED_BY_CLASS


def test_every_optional_input_and_alarm_says_when_it_is_read():
    named = {name for names, _, _ in RL_INPUTS_READ_WHEN for name in names}
    # check_stored and check_recorded refuse what they replace
    assert named == {name for name, spec in SPEC.inputs.items() if not spec.required} - {"stored", "recorded"}
    assert {name for names, _, _ in RL_READ_OF_INPUTS for name in names} <= set(Config.model_fields)
    assert set(get_args(AlarmName)) - set(RL_ALARMS_WATCH) == {
        "reward_collapse",
        "completions_truncated",
        "length_growth",
        "repetition",
        "special_characters",
        "stock_phrases",
        "refusals",
        "engine_mismatch",
    }


@pytest.mark.parametrize(
    "config, inputs, says",
    [
        ({}, ["reward_model"], "kind: model"),
        ({"preset": "ppo", "critic_init": "policy"}, ["reward_model"], "kind: model"),
        (
            {
                "preset": "ppo",
                "advantage": "group_mean",
                "kl_coef": 0.0,
                "truncation_policy": "score",
                "critic_learning_rate": 1e-5,
            },
            ["reward_model"],
            "kind: model",
        ),
        ({}, ["critic"], "preset=ppo"),
        ({"preset": "ppo", "critic_mode": "shared"}, ["critic"], "critic_mode=separate"),
        ({"preset": "ppo", "critic_init": "policy"}, ["critic"], "input critic"),
        ({}, ["ptx"], "ptx_coef"),
        ({"preset": "ppo_ptx", "ptx_coef": 0.0}, ["ptx"], "ptx_coef"),
        ({}, ["baselines"], "baseline=table"),
        ({}, ["prompt_stats"], "curriculum=pass_at_k"),
        ({}, ["sft"], "sft_member=append"),
        ({}, ["rubric"], "kind: rubric"),
        ({}, ["judge"], "kind: judge"),
        ({"rewards": [{"kind": "model"}]}, ["reward_model", "gold"], "input: gold"),
        ({}, ["context"], "group_preference"),
        ({}, ["demonstrations"], "icdpo"),
        ({"rewards": [{"kind": "judge"}]}, ["judge", "principles"], "{principle}"),
        ({"rewards": [{"kind": "judge"}]}, ["judge", "reward_model"], "kind: model"),
        ({"ref_mode": "previous"}, ["reference"], "ref_mode=frozen"),
        ({"preset": "a_lol", "baseline_samples": 3}, ["baselines"], "input baselines"),
        ({"rewards": [{"kind": "judge", "endpoint": "http://h", "endpoint_model": "m"}]}, ["judge"], "kind: judge"),
    ],
)
def test_an_input_that_nothing_reads_is_refused(tiny, rl, config, inputs, says):
    with pytest.raises(ConfigError, match=f"(?s)would change nothing.*{says}"):
        rl("unread", config, **dict.fromkeys(inputs, tiny["reward"]))


@pytest.mark.parametrize(
    "config, name",
    [
        ({"rewards": [{"kind": "model"}]}, "reward_model"),
        ({"preset": "ppo"}, "reward_model"),
        ({"preset": "grpo_process"}, "reward_model"),
        ({"rewards": [{"kind": "judge"}]}, "reward_model"),
        ({"rewards": [{"kind": "judge"}]}, "judge"),
        ({"rewards": [{"kind": "judge", "input": "gold"}]}, "gold"),
        ({"rewards": [{"kind": "rubric"}]}, "reward_model"),
        ({"rewards": [{"kind": "rubric"}]}, "judge"),
        ({"rewards": [{"kind": "verifier"}, {"kind": "model", "input": "gold", "weight": 0.0}]}, "gold"),
        ({"rewards": [{"kind": "group_preference", "group": "g"}]}, "group_preference"),
        ({"rewards": [{"kind": "group_preference", "group": "g"}]}, "context"),
        ({"rewards": [{"kind": "icdpo"}]}, "demonstrations"),
        ({"preset": "astar_po"}, "baselines"),
        ({"preset": "ppo"}, "critic"),
        ({"preset": "ppo_ptx"}, "ptx"),
        ({"difficulty_band": (0.2, 0.8)}, "prompt_stats"),
        ({"sft_member": "append"}, "sft"),
        ({"preset": "nash_md", "ref_mode": "previous", "kl_coef": 0.0}, "reference"),
        ({"rewards": [{"kind": "judge", "judge_prompt": "{a} {principle}"}]}, "principles"),
    ],
)
def test_every_reader_of_an_input_counts(config, name):
    assert reads_input(Config(**config), name)


def test_a_recipe_gives_rl_the_reward_model_only_where_something_asks_it():
    from flows.start import RewardSources, rl_inputs

    def given(**config):
        return rl_inputs(None, RewardSources(), Config(**config), "policy", "scorer")["reward_model"]

    assert (
        given() is None
        and given(preset="ppo") == "scorer"
        and given(rewards=[{"kind": "model"}]) == "scorer"
        and given(rewards=[{"kind": "judge"}]) is None
    )


@pytest.mark.parametrize(
    "config, says",
    [
        ({"stop_on": ["kl_over_target"]}, "target_kl"),
        ({"stop_on": ["over_optimisation"], "eval_prompts": 4}, "eval_every"),
        ({"stop_on": ["harmful_critic"]}, "preset=ppo"),
        ({"stop_on": ["tiers_disagree"]}, "audit_fraction: 0.05"),
        ({"stop_on": ["repetition", "entropy_collapse"], "log_entropy": False}, "log_entropy=true"),
        ({"preset": "reinforce", "stop_on": ["dead_groups"]}, "preset=grpo"),
        ({"preset": "reinforce", "stop_on": ["ratio_off"]}, "surrogate=clip"),
        ({"stop_on": ["format_invalid"]}, "kind: format"),
        ({"stop_on": ["nothing_distilled"]}, "preset=sdpo"),
        ({"stop_on": ["rubric_low_confidence"]}, "kind: rubric"),
        ({"preset": "topr", "stop_on": ["clip_fraction_high"]}, "surrogate=clip"),
        ({"preset": "sapo", "stop_on": ["clip_fraction_high"]}, "surrogate=clip"),
        ({"stop_on": ["td_error_stays"]}, "preset=ppo"),
        ({"stop_on": ["reward_model_drift"]}, "kind: verifier, weight: 0"),
        (
            {
                "rewards": [{"kind": "verifier"}, {"kind": "model", "input": "gold"}],
                "reward_override": "random",
                "stop_on": ["reward_model_drift"],
            },
            "input: gold",
        ),
        ({"preset": "grpo_process", "stop_on": ["unscorable_rewards"]}, "group_mean"),
        ({"preset": "ppo", "stop_on": ["cut_completions_earn_more"]}, "truncation_policy=score"),
    ],
)
def test_an_alarm_that_can_never_go_off_stops_nothing(config, says):
    with pytest.raises(ValueError, match=f"would never stop the run.*{says}"):
        resolve_preset(Config(**config))


def test_alarms_that_can_go_off_are_taken():
    resolve_preset(
        Config(
            target_kl=6.0,
            distillation_weight=0.5,
            eval_prompts=4,
            eval_every=2,
            rewards=[{"kind": "verifier"}, {"kind": "format"}, {"kind": "model"}],
            stop_on=[
                name
                for name in get_args(AlarmName)
                if name not in ("rubric_low_confidence", "harmful_critic", "td_error_stays", "tiers_disagree")
            ],
        )
    )
    resolve_preset(
        Config(
            preset="ppo",
            target_kl=6.0,
            stop_on=["harmful_critic", "td_error_stays", "kl_over_target", "ratio_off", "clip_fraction_high"],
        )
    )
    tiers = [{"kind": "verifier", "tier": "rule"}, {"kind": "judge", "tier": "judge", "audit_fraction": 0.1}]
    resolve_preset(Config(rewards=tiers, stop_on=["tiers_disagree"]))
    watched = [{"kind": "model", "name": "proxy"}, {"kind": "model", "name": "gold", "input": "gold", "weight": 0.0}]
    resolve_preset(Config(rewards=watched, reward_override="random", stop_on=["reward_model_drift"]))


@pytest.mark.parametrize(
    "config, says",
    (
        ({"preset": "grpo", "scale_rewards": "batch"}, "scale_rewards=batch"),
        ({"preset": "ppo", "truncation_policy": "score"}, "whiten=true"),
        ({"preset": "dr_grpo", "reward_norm": "minmax"}, "reward_norm=minmax"),
        ({"preset": "reinforce", "baseline": "moving_average"}, "baseline=moving_average"),
        ({"preset": "grpo"}, ""),
    ),
)
def test_rewards_of_single_domains_are_not_normalised_over_all_of_them_unsaid(config, says):
    """reward.domain_route: scales may differ between domains, since advantages are taken inside a prompt."""
    by_domain = [{"kind": "verifier", "domains": ["maths"]}, {"kind": "length_penalty", "domains": ["chat"]}]
    for rewards, told in ((by_domain, bool(says)), ([{"kind": "verifier"}], False)):
        found = [t for t in resolve_preset(Config(rewards=rewards, **config))[1] if "scales of their own" in t]
        assert len(found) == told and all(says in text for text in found)


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_turns", 3),
        ("max_turn_length", 5),
        ("environment_timeout_s", 1.0),
        ("environment_memory_mib", 256),
        ("environment_network", True),
        ("environment_workers", 2),
        ("observation_role", "user"),
        ("environment_options", {"turns": 2}),
    ],
)
def test_settings_of_an_environment_need_one(name, value):
    from stages.evaluate import Config as EvaluateConfig

    for made in (Config, EvaluateConfig):
        with pytest.raises(ValueError, match=f"{name}.* would change nothing.*environment=tools"):
            made(**{name: value})
        assert getattr(made(environment="tools", **{name: value}), name) == value
        if name.startswith("environment_") and name != "environment_options" or name == "observation_role":
            with pytest.raises(ValueError, match=f"{name}.* would change nothing.*debate"):
                made(environment="debate", **{name: value})
        elif name != "environment_options":
            made(environment="debate", **{name: value})


def test_a_critic_that_nothing_reads_is_not_made(rl):
    """PPO and TRPO with an advantage of rewards alone; and a shared critic has no warm-up, whatever the preset's."""
    for preset in ("ppo", "trpo", "vapo"):
        config = Config(
            preset=preset,
            advantage="group_mean",
            **({} if preset == "vapo" else {"kl_coef": 0.0}),
            truncation_policy="score",
        )
        row, _ = resolve_preset(config)
        assert (row.needs_critic, row.critic_warmup_steps) == (False, 0) and "critic" not in {
            role.name for role in roles(config, {"model"})
        }
    assert (
        "critic" in {role.name for role in roles(Config(preset="ppo"), {"model"})}
        and row_of(Config(preset="oreo")).needs_critic
    )
    result, metrics = rl(
        "none",
        {
            "preset": "ppo",
            "advantage": "group_mean",
            "kl_coef": 0.0,
            "truncation_policy": "score",
            "num_iterations": 1,
            "max_steps": 1,
            "critic_learning_rate": 1e-5,
        },
    )
    assert "critic" not in result["outputs"] and not any(name.startswith("critic/") for name in metrics[0])
    row, warnings = resolve_preset(Config(preset="vapo", critic_mode="shared", truncation_policy="score"))
    assert row.critic_warmup_steps == 0 and any("critic_mode=separate" in text for text in warnings)


def test_the_policy_that_started_the_iteration_needs_no_reference_model(rl):
    config = {"preset": "grpo", "beta": 0.04, "ref_mode": "previous", "max_steps": 2, "learning_rate": 1e-3}
    assert "reference" not in {role.name for role in roles(Config(**config), {"model"})}
    result, metrics = rl("previous", config)
    assert all(row["logp_ref"] == row["logp_old"] for row in rows_of(result)) and [
        m["kl/reference_version"] for m in metrics
    ] == [0.0, 1.0]


def test_an_override_of_the_advantage_drops_what_only_the_presets_own_reads(rl, monkeypatch):
    """astar_po samples no baselines and remax no greedy completion where the advantage does not read them."""
    from stages.rollouts.source import Rollouts

    monkeypatch.setattr(Rollouts, "_measure_baselines", lambda self: pytest.fail("baselines are sampled"))
    rl("star", {"preset": "astar_po", "advantage": "group_mean", "max_steps": 1})
    source = rl.source("remax", {"preset": "remax", "advantage": "group_mean"})
    assert all(group.greedy_sample is None for group in source.groups.sample(source.order.take(2, 0), 0, 0))


@pytest.mark.parametrize(
    "config, says",
    [
        ({"preset": "topr", "prompts_per_step": 16, "replay_fraction": 0.05}, "replay_fraction=0.0625"),
        ({"num_generations": 3, "mode_mix": "share", "rewards": [{"kind": "rubric"}]}, "mode_mix=probability"),
        ({"preset": "vapo", "rewards": [{"kind": "model"}]}, "kind: verifier"),
    ],
)
def test_a_share_of_nothing_is_told(config, says):
    assert any(says in text for text in resolve_preset(Config(**config))[1])
    assert not any(
        says in text
        for text in resolve_preset(
            Config(
                preset=config.get("preset", "grpo"),
                **({"replay_fraction": 0.25} if "replay_fraction" in config else {}),
            )
        )[1]
    )


def test_early_stopping_measures_from_the_start_of_the_iteration(rl):
    """TOPR's ratios are to whoever sampled; replayed completions are far from that at once, and no step of this
    iteration is.
    """
    source = rl.source(
        "drift",
        {
            "preset": "topr",
            "num_iterations": 2,
            "early_stop_kl": 0.1,
            "prompts_per_step": 2,
            "rewards": [SPREAD],
            "reward_override": "none",
        },
    )
    groups = source.groups.sample(source.order.take(2, 0), 0, 0)
    for group in groups:
        group.fresh = False
        for sample in group.samples:
            sample.logps = [v - 1.0 for v in sample.logps]
    items = source.crediting(groups, 1, 1).items
    assert source.crediting.logprobs.drift(items) == pytest.approx(
        np.e - 2, abs=1e-3
    ) and source.crediting.logprobs.drift(items, since_start=True) == pytest.approx(0.0, abs=1e-8)
    assert all("start_logps" in i.by_response for i in items)


def test_what_a_group_could_teach_by_hand():
    from stages.policy.schedules import learning_scores, pass_at_k_band, reference_due, self_paced_admitted

    rewards, logps = {"a": [1.0, 0.0, 0.0, 0.0], "b": [2.0, 2.0]}, {"a": [-1.0, -3.0], "b": [-1.0]}
    assert learning_scores(rewards) == {"a": 0.375, "b": 0.0} and learning_scores(rewards, "std") == {
        "a": pytest.approx(math.sqrt(3) / 4),
        "b": 0.0,
    }
    assert learning_scores(rewards, "confidence", logps) == {"a": pytest.approx(math.exp(2.0)), "b": 0.0}
    counts = {"none": (4, 0), "half": (4, 2), "most": (4, 3)}
    # of none below the threshold the easiest
    assert self_paced_admitted(counts, (0.1, 1.25), 0.0) == ["most"] and self_paced_admitted(
        counts, (0.1, 1.25), 1.0
    ) == list(counts)
    assert self_paced_admitted(counts, (0.4, 0.9), 0.5) == ["half", "most"]  # 1/K is their geometric mean, 0.6
    # a bound admits what is equal to it
    assert pass_at_k_band(counts, 1, [0.75, 0.5, 0.0], 0.0) == ["most"] and pass_at_k_band(
        counts, 1, [0.75, 0.5, 0.0], 0.34
    ) == ["half", "most"]
    assert pass_at_k_band(counts, 1, [0.9, 0.8], 0.0) == list(counts) and pass_at_k_band(
        counts, 1, [0.9, 0.75], 0.0
    ) == ["most"]
    assert (
        [reference_due("refresh", step, 2) for step in (1, 2, 3, 4)] == [False, True, False, True]
        and reference_due("ema", 1, 2)
        and not reference_due("frozen", 2, 2)
    )


def test_confidence_needs_log_probs(rl):
    order = rl.source("confident", {"curriculum": "rerank", "rerank_score": "confidence", "preset": "dr_grpo"}).order
    sample = SimpleNamespace(total=1.0, logps=None, action_mask=[1])
    with pytest.raises(ConfigError, match="rerank_score=mean_deviation"):
        order.learn([SimpleNamespace(prompt=order.prompts[0][0], samples=[sample])])


@pytest.mark.parametrize("preset", get_args(Preset))
def test_a_setting_that_the_preset_does_not_read_is_refused_and_a_default_never_is(preset):
    """Over every setting with a condition: it holds and the row or the config carries the value, or the setting is
    named and left out.
    """
    environment = {"environment": "tools"} if preset == "agent" else {}
    plain = Config(preset=preset, **environment)
    assert not not_read(plain) and not not_read(Config(**plain.model_dump())), "resolved settings come back as they are"
    own = {name: getattr(rl_preset(preset), axis) for name, axis in RL_AXES.items()}
    assert not not_read(
        Config(
            preset=preset,
            **environment,
            **{name: value for name, value in own.items() if value is not None and value != "soft_bellman"},
        )
    )
    for name in dict.fromkeys(name for names, _, _ in RL_READ_WHEN for name in names):
        config = Config(preset=preset, **environment, **{name: other_value(name)})
        row = row_of(config)
        reads = all(condition(row, config) for names, condition, _ in RL_READ_WHEN if name in names)
        assert reads or getattr(config, name) == own.get(name) or name in not_read(config)
        if name in not_read(config):
            with pytest.raises(ValueError, match=f"{name}|RL preset"):
                resolve_preset(config)


def test_the_record_says_what_a_preset_filled_in():
    """MLflow shows the numbers that a run was made with, not 'empty'; what was written stays as it is."""
    from stages.align import Config as AlignConfig

    dapo = Config(preset="dapo", epsilon=0.1)
    found = {**dapo.resolved(), **dapo.effective()}
    assert (
        found["epsilon"],
        found["epsilon_high"],
        found["beta"],
        found["loss_agg_mode"],
        found["dynamic_sampling"],
    ) == (0.1, 0.28, 0.0, "token-mean", True)
    assert (
        Config(preset="topr").effective()["options"] == {"clip_pos": (1.0, 1.0), "clip_neg": (0.0, 1.0)}
        and "epsilon" not in dapo.effective()
    )
    cdpo = AlignConfig(method="cdpo", beta=0.3)
    assert cdpo.effective() == {
        "options": {"label_smoothing": 0.1},
        "logp_reduction": "sum",
        "nll_coef": 0.0,
        "nll_reduction": "seq-mean",
    }
    assert AlignConfig(method="cpo").effective()["nll_reduction"] == "seq-sum"


@pytest.mark.parametrize(
    "config, says",
    [
        ({"preset": "rloo", "epsilon": 0.01}, "write surrogate=clip"),
        ({"preset": "grpo", "gamma": 0.5}, "advantage=reward_to_go"),
        ({"preset": "grpo", "lam": 0.1}, "preset=ppo"),
        ({"preset": "vapo", "lam": 0.5}, "lam_critic"),
        ({"preset": "grpo", "lam_alpha": 0.5}, "preset=ppo or vapo"),
        ({"preset": "grpo", "critic_learning_rate": 1.0}, "has no critic"),
        ({"beta": 0.0, "kl_estimator": "k2"}, "beta=0.04"),
        ({"beta": 0.0, "ref_mode": "ema"}, "no reference"),
        ({"ref_decay": 0.5}, "ref_mode=ema"),
        ({"eval_every": 1}, "eval_prompts"),
        ({"beta": 0.0, "target_kl": 1.0}, "kl_controller"),
        ({"kl_coef_max": 1.0}, "kl_controller"),
        ({"preset": "ppo", "critic_mode": "shared", "critic_init": "policy"}, "critic_mode=separate"),
        ({"cliprange_value": 0.2}, "preset=ppo"),
        ({"preset": "cispo", "clip_ratio_c": 3.0}, "surrogate=clip"),
        ({"missing_eos_penalty": 2.0}, "truncation_policy=penalty"),
        ({"filter_groups_metric": "reward_std"}, "dynamic_sampling"),
        ({"max_num_gen_batches": 3}, "dynamic_sampling"),
        ({"loss_scale_factor": 5.0}, "seq-mean-token-sum-norm"),
        ({"replay_window": 5}, "replay_fraction"),
        ({"max_kl": 0.1}, "preset=trpo"),
        ({"beta": 0.0, "kl_is_weighted": True}, "beta=0.04"),
        ({"vine_samples": 3}, "vineppo"),
        ({"preset": "sppo", "epsilon": 0.1}, "options"),
        ({"preset": "copg", "whiten": True}, "pairs"),
        ({"preset": "topr", "loss_agg_mode": "token-mean"}, "no token term"),
        ({"early_stop_kl": 0.1}, "num_iterations=2"),
        ({"lr_schedule": "constant", "min_lr_ratio": 0.1}, "does not decay"),
        ({"lora_alpha": 32}, "lora_rank=16"),
        ({"preset": "trpo", "advantage": "group_mean", "truncation_policy": "score", "weight_decay": 0.1}, "max_kl"),
        (
            {"preset": "trpo", "advantage": "group_mean", "truncation_policy": "score", "router_aux_loss_coef": 0.1},
            "preset=ppo",
        ),
        ({"preset": "p3o", "advantage": "group_mean"}, "pairs"),
        ({"preset": "copg", "zero_advantage": "mask"}, "group_mean"),
        ({"preset": "sppo", "zero_advantage": "mask"}, "group_mean"),
        ({"preset": "vapo", "truncation_policy": "mask", "truncated_in_stats": False}, "batch_mean"),
        ({"preset": "p3o", "truncation_policy": "mask", "truncated_in_stats": False}, "batch_mean"),
        ({"preset": "remax", "truncation_policy": "mask", "truncated_in_stats": False}, "batch_mean"),
        ({"engine_timeout_s": 5.0}, "engine=server"),
        (
            {"preset": "ppo", "advantage": "group_mean", "kl_coef": 0.0, "truncation_policy": "score", "vf_coef": 0.1},
            "no critic",
        ),
    ],
)
def test_a_setting_without_effect_says_what_to_write(config, says):
    with pytest.raises(ValueError, match=f"(?s)would change nothing.*{says}"):
        resolve_preset(Config(**config))


def test_settings_become_active_with_what_reads_them():
    for config in (
        {"preset": "rloo", "surrogate": "clip", "epsilon": 0.01},
        {"preset": "grpo", "advantage": "reward_to_go", "gamma": 0.5, "beta": 0.0},
        {"preset": "topr", "loss_agg_mode": "token-mean", "beta": 0.1},
        {"preset": "rloo", "target_kl": 6.0},
        {"preset": "oreo", "kl_coef": 0.1, "kl_reward_estimator": "k2"},
        {"monitor_kl": True, "beta": 0.0, "ref_mode": "ema", "ref_decay": 0.9},
        {"eval_prompts": 4, "eval_every": 2},
        {"preset": "nash_md", "mixture_coef": 0.5},
        {"preset": "grpo", "num_iterations": 2, "early_stop_kl": 0.1},
        {"preset": "rloo", "epsilon": 0.2, "surrogate": "logp"},
    ):
        resolve_preset(Config(**config))


def test_arms_share_settings_that_only_some_of_them_read():
    """rl_benchmark and overoptimisation: the critic's learning rate of all arms reaches those with a critic; an arm's
    own dead setting is refused.
    """
    from flows.rl_benchmark import arm_config

    shared = Config(critic_learning_rate=1e-3, epsilon=0.1, learning_rate=1e-4)
    assert (
        arm_config(shared, "ppo", {}, 3).critic_learning_rate == 1e-3
        and arm_config(shared, "grpo", {}, 3).epsilon == 0.1
    )
    bare = arm_config(shared, "rloo", {}, 3)
    assert (bare.critic_learning_rate, bare.epsilon, bare.learning_rate) == (1e-5, None, 1e-4) and resolve_preset(bare)
    with pytest.raises(ValueError, match="epsilon=0.3 would change nothing"):
        resolve_preset(arm_config(shared, "rloo", {"epsilon": 0.3}, 3))


def test_minibatches_of_different_size_are_told():
    assert any(
        "steps of different size (2 and 3 prompts)" in text and "1, 2, 4, 8" in text
        for text in resolve_preset(Config(preset="dr_grpo", prompts_per_step=8, num_minibatches=3))[1]
    )
    assert not any(
        "different size" in text
        for text in resolve_preset(Config(preset="dr_grpo", prompts_per_step=8, num_minibatches=4))[1]
    )


# --- rewards that cannot be had ---------------------------------------------------------------------------------------

TYPO = "def score(prompt, completion, answer):\n    return lenght(completion)\n"
SOME = (
    "def score(prompt, completion, answer):\n    if prompt[-1]['content'].count('1'):\n        raise KeyError('no"
    " ones')\n    return len(completion)\n"
)


def test_a_reward_that_fails_on_everything_stops_the_run_before_it_starts(rl):
    with pytest.raises(TrainingError, match="None of the .* could be scored.*mine: .*lenght"):
        rl(
            "typo",
            {
                "preset": "dr_grpo",
                "reward_override": "none",
                "max_steps": 1,
                "rewards": [{"name": "mine", "kind": "python", "source": TYPO}],
            },
        )


def test_the_reasons_of_unscorable_completions_are_stored_and_counted(rl):
    """extra_json says why; nothing that could not be scored has a 0 of its own where the column may be empty."""
    result, metrics = rl(
        "some",
        {
            "preset": "dr_grpo",
            "reward_override": "none",
            "max_steps": 3,
            "prompts_per_step": 6,
            "rewards": [{"name": "mine", "kind": "python", "source": SOME}, {"name": "length", "kind": "length"}],
        },
    )
    (told,) = [w["text"] for w in result["warnings"] if w["code"] == "completions_unscored"]
    assert re.match(
        r"\d+ of the \d+ completions tried before training could not be scored.*mine: KeyError: 'no ones'", told
    ), "before the first step, and not by an alarm after some"
    rows = rows_of(result)
    lost = [r for r in rows if r["reward_tier"] == "unscorable"]
    assert 0 < len(lost) < len(rows)
    assert all(
        "no ones" in json.loads(r["extra_json"])["unscorable"]["mine"] and r["shaped_reward"] is None for r in lost
    )
    assert {r["reward"] for r in lost} == {0.0}, "the column has to have a number"
    assert all(r["shaped_reward"] is not None and r["extra_json"] is None for r in rows if r not in lost)
    assert np.mean([m["reward/mine/unscorable_fraction"] for m in metrics]) == pytest.approx(
        len(lost) / len(rows)
    ) and {m["reward/length/unscorable_fraction"] for m in metrics} == {0.0}
    assert {s["mean_reward"] is None for s in rows_of(result, "prompt_stats")} == {True, False} and all(
        s["pass_at_1"] is None for s in rows_of(result, "prompt_stats")
    )


def test_the_alarm_quotes_the_commonest_reason_and_a_batch_without_any_reward_is_told_at_once(rl):
    source = rl.source("why", {"preset": "dr_grpo"})
    samples = [
        Sample({}, [1], g, [2], [0.0], "eos", "x", float("nan"), {"mine": None}, {"mine": "Boom" if g else "Bang"})
        for g in range(3)
    ]
    source._note_unscorable(samples)
    for step in range(1, 5):
        source.watch({"step": step, "reward/unscorable_fraction": 1.0})
    told = {w["code"]: w["text"] for w in source.stage.warnings}
    assert (
        len(source.stage.warnings) == 2
        and "mine: Boom (2 of 3)" in told["nothing_scored"]
        and "mine: Boom (2 of 3)" in told["unscorable_rewards"]
    )
    again = rl.source("why-again", {"preset": "dr_grpo"})
    again.restore(source.state()[0], lambda name: source.state()[1][name])
    assert again.why_unscorable == source.why_unscorable
    with pytest.raises(TrainingError, match=r"No completion of the run could be scored.*mine: Boom \(2 of 3\)"):
        again.check_scored()
    again.watch({"step": 5, "reward/unscorable_fraction": 0.5})
    again.check_scored()


def test_a_pass_rate_that_is_unknown_is_not_zero():
    from stages.rollouts.prompts import counts_of, verdict_counts, verdicts_of, verdicts_on

    assert verdict_counts([("a", [None, None], False)]) == {} and verdict_counts(
        [("a", [None], True), ("b", [True, None, False], True)]
    ) == {"b": (2, 1)}
    with pytest.raises(ValueError, match="kind verifier"):  # scored, and nobody says what is right
        verdict_counts([("a", [None, None], True)])
    samples = [Sample({}, [1], 0, [2], [0.0], "eos", "x", 1.0, {}, {}, right) for right in (True, False, None)]
    assert verdicts_on(samples[:2]) == (2, 1) and verdicts_on(samples) == (0, 0)
    stats = [
        {"prompt_id": "a", "iteration": 0, "n": 4, "pass_at_1": 0.5},
        {"prompt_id": "a", "iteration": 1, "n": 4, "pass_at_1": None},
    ]
    assert counts_of([({"row_id": "r", "prompt_id": "a"}, [1])], stats) == {"r": (4, 2)}
    # of a group: who was judged, and what the policy said itself
    from stages.rollouts.records import Records

    written = []
    samples = [*samples, samples[1], replace(samples[0], mode="sft")]
    numbers = ((1.0, [-1.0]), (0.0, [-2.0]), (math.nan, [-4.0]), (0.5, None), (1.0, None))
    samples = [replace(s, total=total, logps=logps) for s, (total, logps) in zip(samples, numbers)]
    row = {"prompt_id": "a", "group_id": "a", "dataset": "d"}
    Records.groups(
        SimpleNamespace(_write=lambda _, rows: written.extend(rows)),
        [(Group(row, [1], samples, 0), None), (Group(row, [1], samples[2:3], 0), "unscorable")],
        0,
    )
    assert (written[0]["n"], written[0]["pass_at_1"]) == (5, pytest.approx(1 / 3))
    # mean and population std of the scored ones, mean over the tokens
    assert [written[0][name] for name in ("mean_reward", "reward_std", "mean_logprob")] == pytest.approx(
        [0.625, 0.171875**0.5, -7 / 3]
    )
    assert [(r["kept"], r["drop_reason"], r["mean_reward"], r["reward_std"]) for r in written[1:]] == [
        (False, "unscorable", None, None)
    ] and (written[0]["kept"], written[0]["drop_reason"]) == (True, None)
    assert counts_of([({"row_id": "r", "prompt_id": "a"}, [1])], written[:1]) == {"r": (3, 1)}
    assert verdicts_of([("r", samples)]) == {"r": (3, 1)}


def test_an_evaluation_names_components_that_could_not_score():
    from stages.evaluation.report import warnings
    from stages.evaluation.scores import lower_is_better, policy_metrics
    from stages.reward.components import RewardComponent
    from stages.reward.verdicts import NOT_ASKED

    records = [
        {
            "mode": "sample",
            "item_id": str(i),
            "prompt_id": str(i),
            "correct": True,
            "extracted": None,
            "output": "a b",
            "tokens": 2,
            "finish": "eos",
            "format_error": False,
            "reward": None,
            "kl": None,
            "parts": {"verifier": 1.0, "mine": None, "later": None},
            "unscorable": {"mine": "NameError: lenght", "later": NOT_ASKED},
        }
        for i in range(3)
    ]
    found = policy_metrics(records)
    assert found["reward/mine/unscorable_fraction"].value == 1.0 and lower_is_better("reward/mine/unscorable_fraction")
    assert not {"reward/later/unscorable_fraction", "reward/verifier/unscorable_fraction"} & set(found)
    told = []
    stage = SimpleNamespace(
        config=SimpleNamespace(
            rewards=[
                RewardComponent(kind="verifier"),
                RewardComponent(name="mine", kind="python", source="def score(p, c, a): return x"),
            ]
        ),
        warn=lambda code, text: told.append((code, text)),
    )
    stage.config.target = "policy"
    warnings(stage, {}, records)
    assert (
        len(told) == 1
        and told[0][0] == "answers_unscorable"
        and "3 answers have no value of 'mine'" in told[0][1]
        and "NameError: lenght" in told[0][1]
    )


def test_a_selection_of_nothing_says_why_nothing_could_be_scored():
    from stages.candidates.selecting import write_selected

    writer = SimpleNamespace(write=lambda rows: None, close=lambda more: None)
    stage = SimpleNamespace(
        writer=lambda *names: writer,
        config=SimpleNamespace(validation_fraction=0.0, allow_empty=False, select="best", threshold=None),
    )
    rows = [
        {
            "drop_reason": "unscorable",
            "reward": None,
            "extra_json": json.dumps({"unscorable": {"mine": "NameError: lenght"}}),
        }
    ] * 2
    with pytest.raises(ValueError, match="mine: NameError: lenght .2 of 2.*Mend the reward"):
        write_selected(stage, [], rows)
    with pytest.raises(ValueError, match="Raise max_completion_length .*mine: NameError: lenght .2 of 2"):
        write_selected(stage, [], [*rows, {"drop_reason": "truncated", "reward": 0.5, "extra_json": "{}"}])


@pytest.mark.parametrize(
    "config, says",
    [
        ({"preset": "gspo", "loss_agg_mode": "seq-mean-token-sum"}, "weights sequences"),
        ({"preset": "rloo", "surrogate": "clip", "ratio_level": "sequence"}, "weights sequences"),
    ],
)
def test_a_sequence_ratio_that_counts_once_per_token_warns(config, says):
    assert any(says in text for text in resolve_preset(Config(**config))[1])


# --- options that the catalogue names ---------------------------------------------------------------------------------


def test_std_whitening_and_denominator_options_reach_the_numbers():
    rewards = np.array([1.0, 0.0])
    row = resolve_preset(Config(preset="grpo", std_ddof=0, std_eps=1e-8))[0]
    # ddof 1 gives +-.707
    assert np.allclose(assign(row, batch(rewards_B=rewards), 0.0).advantages_BT[:, 0], [1, -1], atol=1e-6)
    for ddof in (0, 1):
        row = resolve_preset(Config(preset="reinforce", baseline="none", kl_coef=0.0, whiten=True, adv_norm_ddof=ddof))[
            0
        ]
        values = np.array([1.0, 1, 1, 0, 0])
        assert np.allclose(
            assign(row, batch(rewards_B=rewards), 0.0).advantages_BT[MASK],
            (values - values.mean()) / (values.std(ddof=ddof) + 1e-8),
        )
    items = [make_item("a", [3], [[5, 6], [7]], [[1, 1], [0]])]
    for name, count in (("nonempty", 1.0), ("all", 2.0)):
        config = Config(preset="grpo", seq_denominator=name)
        assert PolicyGradient(resolve_preset(config)[0], config).counts(items)["sequences"] == count


def test_a_controller_stays_within_its_bounds(rl):
    _, metrics = rl(
        "bounds",
        {
            "preset": "grpo",
            "kl_controller": "adaptive_ppo",
            "target_kl": 1e6,
            "beta": 0.04,
            "kl_coef_min": 0.03,
            "max_steps": 3,
            "learning_rate": 1e-6,
        },
    )
    assert [m["kl/coef"] for m in metrics] == [0.04, 0.03, 0.03]


def test_nash_md_plays_the_mixture_unless_told_otherwise(rl):
    assert (
        resolve_preset(Config(preset="nash_md"))[0].opponent == "mixture"
        and resolve_preset(Config(preset="nash_md", opponent="self"))[0].opponent == "self"
    )
    assert resolve_preset(Config(preset="sppo"))[0].opponent == "self"
    source = rl.source("nash", {"preset": "nash_md"})
    assert type(source.opponent).__name__ == "MixtureSampler"
    groups = source.groups.sample(source.order.take(1, 0), 0, 0)
    assert len(groups[0].opponents) == 4


def test_the_format_alone_is_rewarded(rl):
    """reward_override=format_only: the control run of the catalogue; the task's own component is stored but does not
    count.
    """
    source = rl.source(
        "format", {"reward_override": "format_only", "rewards": [{"kind": "length"}, {"kind": "format", "weight": 2.0}]}
    )
    sample = Sample(
        {}, [1], 0, [2], [0.0], "eos", "x", 5.0, {"length": 1.0, "format": 1.0}, {}, turn_rewards=[1.0, 4.0]
    )
    override_reward(source.stage, sample, 0, "row", 0, 0)
    assert sample.total == 2.0 and sample.turn_rewards is None


def test_solved_prompts_are_not_sampled_again(rl):
    """no_resampling_pass_rate leaves out a prompt from its first group above the cap on; when all are solved they come
    again; it survives a resume.
    """
    config = {
        "no_resampling_pass_rate": 0.5,
        "reward_override": "none",
        "rewards": [{"name": "verdict", "kind": "verifier"}],
    }
    source = rl.source("solved", config)
    order = source.order
    everyone = [row["row_id"] for row, _ in order.prompts]
    first = order.take(3, 0)

    def group(prompt, verdicts):
        said = [SimpleNamespace(correct=v, total=float(v), mode="fresh") for v in verdicts]
        return SimpleNamespace(prompt=prompt, samples=said)

    order.learn(
        [group(first[0][0], [True, True, False]), group(first[1][0], [True, False]), group(first[2][0], [False, False])]
    )
    solved = first[0][0]["row_id"]
    assert order.solved == {solved} and order.metrics([])["curriculum/solved_prompts"] == 1
    again = rl.source("solved-again", config).order
    again.restore(order.state())
    taken = [[row["row_id"] for row, _ in o.take(2 * len(everyone), 0)] for o in (order, again)]
    assert taken[0] == taken[1] and solved not in taken[0] and set(taken[0]) == set(everyone) - {solved}
    order.learn([group(row, [True]) for row, _ in order.prompts])
    assert len(order.take(3, 0)) == 3


# --- what is logged ---------------------------------------------------------------------------------------------------

LOGGED = {
    "reward": [
        "reward",
        "reward/raw",
        "reward/length",
        "reward_std",
        "reward/unscorable_fraction",
        "frac_reward_zero_std",
    ],
    "groups": ["groups/informative_fraction", "groups/trained_sequences", "groups/trained_tokens"],
    "advantage": [
        f"advantage/{name}"
        for name in (
            "mean",
            "std",
            "min",
            "max",
            "mean_raw",
            "std_raw",
            "min_raw",
            "max_raw",
            "zero_fraction",
            "positive_fraction",
        )
    ],
    "update": [
        "loss",
        "grad_norm",
        "learning_rate",
        "skipped_steps",
        "entropy",
        "policy/ess_fraction",
        "policy_loss",
        *(f"clip_ratio/{name}_mean" for name in ("low", "high", "region")),
        *(f"policy/{name}" for name in ("outside_range", "ratio", "ratio_max", "log_ratio_clamped")),
        *(f"approx_kl/{k}" for k in ("k1", "k2", "k3")),
    ],
    "anchor": ["kl", "kl/sequence_sum", "kl/coef", "kl/reference_version"],
    "critic": [
        "critic/loss",
        "critic/explained_variance",
        "critic/td_error",
        "critic/value_mean_old",
        "critic/return_mean_old",
    ],
    "completions": [
        f"completions/{name}"
        for name in (
            "mean_length",
            "min_length",
            "max_length",
            "clipped_ratio",
            "empty_fraction",
            "repetition",
            "reflection",
            "special_characters",
            "language_switch",
            "generated_tokens",
        )
    ],
}


@pytest.mark.parametrize(
    "config, parts, more",
    [
        ({"preset": "grpo", "ref_mode": "ema"}, set(LOGGED) - {"critic"}, []),
        (
            {"preset": "ppo", "num_iterations": 2, "truncation_policy": "score"},
            set(LOGGED),
            ["kl/reward_coef", "reward/shaped"],
        ),
        (
            {"preset": "reinforce", "max_steps": 2},
            {"reward", "groups", "advantage", "completions"},
            ["reward/baseline"],
        ),
        ({"preset": "sppo"}, {"reward", "completions"}, ["preference/win_rate"]),
        (
            {
                "preset": "dapo",
                "filter_groups_metric": "reward_std",
                "soft_punish_cache": 2,
                "truncation_policy": "score",
                "reward_override": "none",
                "rewards": [SPREAD],
            },
            {"reward", "advantage"},
            [
                "groups/filter_rate",
                "groups/generation_batches",
                "groups/forwarded_fraction",
                "reward/overlong",
                "reward/sampled_mean",
            ],
        ),
        (
            {"preset": "grpo", "reward_override": "none", "rewards": [{"kind": "verifier"}]},
            {"reward"},
            [
                "completions/correct_fraction",
                "groups/all_correct_fraction",
                "groups/all_wrong_fraction",
                "completions/mean_incorrect_length",
            ],
        ),
    ],
)
def test_the_catalogues_metrics_are_logged(rl, config, parts, more):
    _, metrics = rl("logged", config)
    found = set().union(*metrics)
    wanted = {name for part in parts for name in LOGGED[part]} | set(more)
    if "rewards" in config:
        wanted = wanted - {"reward/length"} | {f"reward/{config['rewards'][0].get('name', 'verifier')}"}
    assert not sorted(wanted - found)
    assert all(np.isfinite(v) for m in metrics for v in m.values() if v is not None)
    if "advantage/min" in found:
        assert all(
            m["advantage/min"] <= m["advantage/mean"] <= m["advantage/max"] for m in metrics if "advantage/mean" in m
        )
    if config.get("ref_mode") == "ema":
        assert [m["kl/reference_version"] for m in metrics] == [1.0, 2.0]


def test_the_accuracy_of_a_reward_model_on_the_policys_answers_is_logged(rl, tiny):
    """F.2, drift: of right and wrong completions of a prompt, as the stored rollouts have them; validation draws one
    answer per prompt and has no pair.
    """
    odd = {
        "name": "odd",
        "kind": "python",
        "source": "def score(prompt, completion, answer):\n    return len(completion) % 2 == 1",
    }
    result, metrics = rl(
        "accuracy",
        {
            "preset": "grpo",
            "beta": 0.0,
            "num_generations": 12,
            "max_completion_length": 24,
            "reward_override": "none",
            "eval_prompts": 2,
            "rewards": [odd, {"name": "proxy", "kind": "model"}],
        },
        reward_model=tiny["reward"],
    )
    logged = [m["reward/proxy/pair_accuracy"] for m in metrics if "reward/proxy/pair_accuracy" in m]
    assert len(logged) == 2 and not [
        name for m in metrics for name in m if name.startswith("validation/") and "pair_accuracy" in name
    ]
    rows = [row for row in rows_of(result) if row["terminated"]]
    for iteration, value in enumerate(logged):
        own = [
            (
                row["prompt_id"],
                row["is_correct"],
                next(c["value"] for c in row["reward_components"] if c["name"] == "proxy"),
            )
            for row in rows
            if row["iteration"] == iteration
        ]
        wins = [
            0.5 * ((a > b) + (a >= b)) for p, right, a in own for q, wrong, b in own if p == q and right and not wrong
        ]
        assert wins and value == pytest.approx(np.mean(wins))


def test_the_largest_ratio_is_that_of_the_step_however_it_is_cut(tiny):
    model = load_policy(tiny["policy"])
    items = [
        make_item(str(k), [3, 4], [[5, 6, 7 + k]], [[1] * 3], old_logps=[[-5.0 - k] * 3], advantages=[1.0])
        for k in range(3)
    ]
    found = []
    for budget in (4096, 1):
        config = Config(preset="dr_grpo", max_tokens_per_micro_batch=budget)
        trainer = Trainer(model, PolicyGradient(resolve_preset(config)[0], config), config, 1)
        found.append(trainer.evaluate(items))
    with torch.no_grad():
        logps = torch.log_softmax(
            model(input_ids=torch.tensor([[3, 4, 5, 6, 7 + k] for k in range(3)])).logits[:, 1:-1].double(), -1
        )
    ratios = torch.stack([torch.exp(logps[k, [0, 1, 2], [5, 6, 7 + k]] + 5 + k) for k in range(3)])
    assert found[0]["policy/ratio_max"] == pytest.approx(float(ratios.max()), rel=1e-4) and found[1][
        "policy/ratio_max"
    ] == pytest.approx(found[0]["policy/ratio_max"], rel=1e-5)
    assert found[0]["policy/ratio"] == pytest.approx(float(ratios.mean()), rel=1e-4)


def test_signs_of_a_policy_that_comes_apart():
    from stages.measures.text import scripts, special_character_rate

    assert scripts("Die Lösung: π = 3 und ∑") == {"LATIN"} and scripts("ответ 答案 ok") == {"CYRILLIC", "CJK", "LATIN"}
    assert (
        special_character_rate("") == 0
        and special_character_rate("x² ≤ 3\n") == 0
        and special_character_rate("ab\ufffd\U0001f600") == 0.5
    )


# --- rewards before advantages (NORM) ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["whiten", "whiten_without_shift", "minmax", "running"])
def test_rewards_are_normalised_over_what_can_be_scored(kind):
    first, second = np.array([1.0, np.nan, 3.0, 5.0]), np.array([7.0, 2.0])
    running = RunningScale()
    found = [normalise_rewards(r, kind, running) for r in (first, second)]
    assert np.isnan(found[0][1])
    for r, out, seen in ((first, found[0], first), (second, found[1], np.concatenate([first, second]))):
        x, seen = r[np.isfinite(r)], seen[np.isfinite(seen)]
        whole = x if kind != "running" else seen
        expected = {
            "minmax": (x - x.min()) / (x.max() - x.min()),
            "whiten_without_shift": (x - x.mean()) / x.std() + x.mean(),
        }.get(kind, (x - whole.mean()) / whole.std())
        assert np.allclose(out[np.isfinite(r)], expected, atol=1e-6)
    again = RunningScale()
    again.load_state_dict(running.state_dict())
    assert np.allclose(normalise_rewards(second, "running", again), normalise_rewards(second, "running", running))
    same = normalise_rewards(np.array([0.1, 0.1, 0.1]), kind, RunningScale())
    assert np.allclose(same, {"minmax": 0.5, "whiten_without_shift": 0.1}.get(kind, 0.0))
    assert normalise_rewards(second, kind, RunningScale(), clip=0.25).max() <= 0.25


def test_the_stage_normalises_and_logs_the_scale(rl):
    result, metrics = rl(
        "norm", {"preset": "reinforce", "baseline": "none", "reward_norm": "running", "reward_clip": 1.0}
    )
    rows = rows_of(result)
    assert all(abs(r["reward"]) <= 1 for r in rows) and all(m["reward/norm_std"] > 0 for m in metrics)
    first = [r for r in rows if r["iteration"] == 0]
    # random 0 and 1, shifted and scaled alike
    assert {round(r["reward"], 6) for r in first} <= {-1.0, 0.0, 1.0} or len(
        {round(r["reward"], 6) for r in first}
    ) == 2
    with pytest.raises(ValueError, match="normalise=batch"):
        resolve_preset(Config(preset="sppo", reward_norm="whiten"))


# --- what moves and what does not -------------------------------------------------------------------------------------


def test_mirror_descent_forgets_the_optimizers_moments_at_every_round(rl, monkeypatch):
    seen = []
    step = Trainer.step

    def watched(self, items):
        seen.append(max([float(s["step"]) for s in self.optimizer.state.values() if s] or [0.0]))
        return step(self, items)

    monkeypatch.setattr(Trainer, "step", watched)
    rl("rounds", {"preset": "mdpo", "max_steps": 4, "num_iterations": 2})
    assert seen == [0, 1, 0, 1]


def test_prompts_that_the_reference_never_solves_are_left_out(rl):
    source = rl.source("hopeless", {"preset": "astar_po"})
    everyone = [row["row_id"] for row, _ in source.order.prompts]
    source.order.leave_out(set(everyone[1:]))
    again = rl.source("hopeless-again", {"preset": "astar_po"}).order
    again.restore(source.order.state())
    assert [[row["row_id"] for row, _ in o.take(3, 0)] for o in (source.order, again)] == [[everyone[0]] * 3] * 2
    with pytest.raises(ValueError, match="easier prompts"):
        source.order.leave_out(set(everyone))
    with pytest.raises(ValueError, match="easier prompts"):  # the tiny model never answers right
        rl(
            "never",
            {
                "preset": "astar_po",
                "reward_override": "none",
                "rewards": [{"kind": "verifier"}],
                "baseline_samples": 1,
                "num_generations": 1,
            },
        )


def test_a_reward_model_that_moved_is_an_error_and_an_unread_reference_a_warning(tiny, rl):
    source = rl.source(
        "judge", {"preset": "dr_grpo", "rewards": [{"name": "rm", "kind": "model"}]}, reward_model=tiny["reward"]
    )
    source.items(0)
    with torch.no_grad():
        next(source.rewards.scorers["rm"].model.parameters()).add_(0.1)
    with pytest.raises(TrainingError, match="scorer of rm changed"):
        source.close()
    result, _ = rl("unread", {"preset": "dr_grpo", "max_steps": 1}, reference=tiny["other"])
    assert "reference_unused" in json.dumps(result["warnings"])


def test_in_bfloat16_ratios_start_from_log_probs_of_the_same_products(rl):
    """PPO-CLIP: the ratio is 1 on the first minibatch. The sampler reads float32 weights, whose log-probs are not those
    of bfloat16 products.
    """
    result, metrics = rl(
        "half", {"preset": "grpo", "beta": 0.04, "compute_dtype": "bfloat16", "max_steps": 2, "learning_rate": 1e-12}
    )
    assert result["summary"]["old_logps"] == "trainer"
    assert [m["policy/ratio"] for m in metrics] == pytest.approx([1.0, 1.0], abs=1e-3)
    for row in rows_of(result):  # the policy is its own reference
        assert row["logp_old"] == pytest.approx(row["logp_ref"], abs=5e-3)
        assert row["logp_old"] != row["logp_rollout"]
    with pytest.raises(ConfigError, match="compute_dtype=float32"):
        rl("trust", {"preset": "trpo", "compute_dtype": "bfloat16"})


@pytest.mark.parametrize(
    "told, config",
    [
        (True, {"preset": "gspo", "num_minibatches": 2}),
        (True, {"preset": "grape_alt", "num_iterations": 2, "epsilon": 1e-3}),
        (False, {"preset": "gspo"}),
        (False, {"preset": "gspo", "num_minibatches": 2, "compute_dtype": "float32"}),
        (False, {"preset": "gspo", "num_minibatches": 2, "epsilon": 0.05, "epsilon_high": 0.05}),
        (False, {"preset": "grpo", "num_iterations": 2, "beta": 0.0}),
    ],
)
def test_a_clip_range_below_the_rounding_of_bfloat16_is_told_before_training(rl, told, config):
    """GSPO clips at 3e-4: measured on the completions tried, and only where a ratio can be another than 1."""
    result, _ = rl("narrow", {"compute_dtype": "bfloat16", "max_steps": 1, **config})
    texts = [w["text"] for w in result["warnings"] if w["code"] == "clip_below_rounding"]
    assert len(texts) == told and all(
        "compute_dtype=float32" in text and re.search(r"epsilon=\S+ and epsilon_high=", text) for text in texts
    )


def test_rounding_of_ratios_by_hand():
    """Completions of 2 and 1 own tokens whose log-probs are off by (0.03, -0.01) and 0.02; a tool's token does not
    count.
    """
    from stages.preflight import ratio_rounding

    low, full, masks = [[-1.0, -7.0, -2.0], [-3.0]], [[-1.03, -5.0, -1.99], [-3.02]], [[1, 0, 1], [1]]
    for level, expected in (("token", (9 + 1 + 4) / 3), ("sequence_mean", (1 + 4) / 2), ("sequence", (4 + 4) / 2)):
        assert ratio_rounding(low, full, masks, level) == pytest.approx(0.01 * expected**0.5)
    assert ratio_rounding([[]], [[]], [[]], "sequence_mean") == 0.0


def test_sampling_in_bfloat16_leaves_old_logps_to_the_trainer(rl):
    """The sampler's log-probs are of rounded weights: they are kept beside the trainer's, which ratios start from."""
    result, metrics = rl(
        "sampled_in_half", {"preset": "grpo", "sampling_dtype": "bfloat16", "max_steps": 2, "learning_rate": 1e-12}
    )
    assert result["summary"]["old_logps"] == "trainer" and result["summary"]["engine"] == "built-in in bfloat16"
    assert all(m["policy/ratio"] == pytest.approx(1.0, abs=1e-5) for m in metrics)
    assert all(0 < m["sampling/sampling_logp_difference/mean"] < 0.1 for m in metrics)
    with pytest.raises(ConfigError, match="engine_options"):
        rl("elsewhere", {"sampling_dtype": "bfloat16", "engine": "vllm"})


# --- control experiments ----------------------------------------------------------------------------------------------


def completions(source, rows, **changes):
    """One group of the first prompt: (total, finish reason) of every completion, three tokens long."""
    prompt, ids = source.order.prompts[0]
    samples = [
        Sample(prompt, ids, g, [50, 60, 70 + g], [-1.0, -2.0, -3.0], reason, "x", total, {"spread": total}, {})
        for g, (total, reason) in enumerate(rows)
    ]
    return Group(prompt, ids, samples, 0, **changes)


@pytest.mark.parametrize("preset", ["dapo", "vapo"])
def test_a_control_run_reads_nothing_of_the_task(rl, preset):
    """reward_override: neither verdicts (the filter of DAPO, the NLL of VAPO's right answers) nor penalties of length
    pay beside the control's rewards.
    """
    source = rl.source(
        f"control-{preset}",
        {
            "preset": preset,
            "reward_override": "random",
            "truncation_policy": "score",
            "critic_warmup_steps": 0,
            "rewards": [{"kind": "regex", "pattern": "."}, {"kind": "verifier"}],
        },
    )
    groups = source.groups.sample(source.order.take(2, 0), 0, 0)
    assert all(
        s.correct is None and s.total in (0.0, 1.0) and s.parts["verifier"] is not None
        for g in groups
        for s in g.samples
    )
    group = completions(source, [(1.0, "length"), (1.0, "eos")])
    for sample, right in zip(group.samples, (True, False)):
        sample.correct = right
        override_reward(source.stage, sample, 0)  # the same draw for both
    assert (
        source.groups.no_signal(group) == "equal_rewards"
        and source.crediting._overlong(group.samples, [0, 0])[1] is False
    )
    opponents = rl.source(
        "control-nash", {"preset": "nash_md", "reward_override": "inverted", "rewards": [SPREAD]}
    ).groups
    (group,) = opponents.sample(source.order.take(1, 0), 0, 0)
    assert all(s.total == -s.parts["spread"] for s in (*group.samples, *group.opponents))


def test_the_rewards_of_stored_rollouts_can_be_overridden_and_two_draws_of_a_prompt_stay_two_groups(rl):
    config = {
        "max_completion_length": 3,
        "num_generations": 2,
        "reward_override": "none",
        "rewards": [SPREAD],
        "max_steps": 1,
    }
    result, _ = rl("draws", {**config, "preset": "dr_grpo", "prompts_per_step": 44})
    path, found = result["outputs"]["rollouts"]["path"], {}
    for kind in ("none", "random", "inverted"):
        source = rl.source(f"stored-{kind}", {**config, "preset": "topr", "reward_override": kind}, stored=path)
        assert (
            len(source.stored.groups) == 44
            and {len(g.samples) for g in source.stored.groups} == {2}
            and "stored_rewards" not in json.dumps(source.stage.warnings)
        )
        found[kind] = [s.total for g in source.stored.groups for s in g.samples]
    assert (
        found["inverted"] == [-v for v in found["none"]]
        and set(found["random"]) == {0.0, 1.0}
        and len(set(found["none"])) > 2
    )
    other = rl.source("stored-other", {**config, "preset": "topr", "rewards": [{"kind": "verifier"}]}, stored=path)
    assert (
        "stored_rewards" in json.dumps(other.stage.warnings)
        and [s.total for g in other.stored.groups for s in g.samples] == found["none"]
    )
    with pytest.raises(ValueError, match="reward_override=random"):
        rl.source(
            "stored-format",
            {**config, "preset": "topr", "reward_override": "format_only", "rewards": [{"kind": "format"}]},
            stored=path,
        )


# --- what is compared with what ---------------------------------------------------------------------------------------


def test_rewards_that_compare_see_one_group_at_a_time(rl, monkeypatch):
    """LENGTH-CTRL, rs.majority: another draw of the prompt, the greedy completion and the opponents are not members of
    a group.
    """
    from stages.reward.components import RewardComponent
    from stages.reward.rewards import build_rewards
    from stages.rollouts import groups as module

    row = {
        "prompt_row": {"row_id": "p", "prompt_id": "p", "answer": "1", "answer_type": "integer"},
        "finish_reason": "eos",
    }
    rows = [
        {**row, "completion_text": text, "completion_ids": [1] * n, "group": g}
        for text, n, g in (
            ("\\boxed{1}", 2, 0),
            ("\\boxed{2}", 9, 1),
            ("\\boxed{1}", 4, 0),
            ("\\boxed{2}", 5, 1),
            ("\\boxed{1}", 3, 0),
        )
    ]
    for kind, expected in (("majority", [1, 1, 1, 1, 1]), ("length_group", [0.5, -0.5, -0.5, 0.0, 0.0])):
        assert [s.total for s in build_rewards([RewardComponent(kind=kind)], {}).score(rows)] == expected
    seen, real = [], module.score
    monkeypatch.setattr(
        module,
        "score",
        lambda rewards, samples, group_of=None: (
            seen.append(list(zip(group_of, samples))),
            real(rewards, samples, group_of),
        ),
    )
    source = rl.source("greedy", {"preset": "remax", "num_generations": 3})
    prompt = source.order.prompts[0]
    made = source.groups.sample([prompt, prompt], 0, 0)
    keys = {id(s): key for key, s in seen[0]}
    assert [len({keys[id(s)] for s in g.samples}) for g in made] == [1, 1] and len(
        {*(keys[id(g.samples[0])] for g in made), *(keys[id(g.greedy_sample)] for g in made)}
    ) == 4


def test_a_bootstrapped_completion_is_in_no_statistic_of_rewards(rl):
    """TERM: bootstrap adds no terminal score, so there is nothing to normalise: 0, not the mean of the others turned
    around.
    """
    source = rl.source(
        "norm",
        {"preset": "ppo", "reward_norm": "whiten", "reward_override": "none", "rewards": [SPREAD], "kl_coef": 0.0},
    )
    source.crediting.critic = SimpleNamespace(values=lambda items: ([[0.0] * 3] * 4, [0.5] * 4), trainer=None)
    scored = source.crediting(
        [completions(source, [(5.0, "eos"), (7.0, "eos"), (6.0, "length"), (float("nan"), "eos")])], 0, 0
    )
    assert (
        scored.batch.rewards_B[:3] == pytest.approx([-1.0, 1.0, 0.0])
        and np.isnan(scored.batch.rewards_B[3])
        and scored.metrics["reward/norm_mean"] == 6.0
    )
    assert scored.batch.bootstrap_B.tolist() == [0.0, 0.0, 0.5, 0.0]


def test_win_rates_compare_shaped_rewards(rl):
    config = {
        "preset": "sppo",
        "truncation_policy": "penalty",
        "missing_eos_penalty": 2.0,
        "reward_override": "none",
        "rewards": [SPREAD],
    }
    source = rl.source("win", config)
    group = completions(source, [(1.0, "eos"), (3.0, "length")])
    found = source.crediting([group], 0, 0).batch.preference_BO
    assert found == pytest.approx(np.array([[0.5, 1 / (1 + np.exp(-3))], [1 / (1 + np.exp(3)), 0.5]]))
    group.opponents = completions(source, [(1.0, "length")]).samples
    assert source.crediting([group], 0, 0).batch.preference_BO == pytest.approx(
        np.array([[1 / (1 + np.exp(-3))], [0.5]])
    )


def test_ratios_to_the_behaviour_policy_do_not_depend_on_what_else_is_in_the_batch(rl):
    """TOPR, OFFPOL-IS: mu is the distribution that was sampled from, filters included, with replayed groups beside it
    or not.
    """
    source = rl.source("behaviour", {"preset": "topr", "top_k": 3, "reward_override": "none", "rewards": [SPREAD]})
    groups = source.groups.sample(source.order.take(2, 0), 0, 0)
    alone = source.crediting(groups, 0, 0)
    groups[1].fresh = False
    assert alone.old == source.crediting(groups, 0, 0).old == [s.logps for g in groups for s in g.samples]
    trained = source.crediting.logprobs.of(source.policy.model, alone.items)
    assert max(abs(a - b) for new, old in zip(trained, alone.old) for a, b in zip(new, old)) > 0.1
    source._check_ratio(True, 0.5)
    with pytest.raises(TrainingError, match="sampler and trainer disagree"):
        rl.source("exact", {"preset": "topr"})._check_ratio(True, 0.5)


@pytest.mark.parametrize(
    "config, copied",
    [
        ({}, True),
        ({"ref_sync_steps": 1}, True),
        ({"ref_sync_steps": 4}, False),  # every other iteration
        ({"ref_sync_alpha": 0.9}, False),
        ({"early_stop_kl": 0.1}, False),  # an iteration may end before its second step
        ({"early_stop_kl": 0.1, "ref_sync_steps": 1}, True),
        ({"async_rollouts": True}, False),  # of the policy before
        ({"preset": "topr"}, False),
    ],
)
def test_a_reference_copied_in_every_iteration_is_told_to_be_the_previous_policy(rl, config, copied):  # noqa: F811
    """And is: the update of ref_mode=previous, to the last digit that is logged."""
    config = {"preset": "grpo", "beta": 0.3, **COPIED, **config}
    found = [text for text in resolve_preset(Config(**config))[1] if "write ref_mode=previous" in text]
    assert bool(found) is copied
    if config["ref_sync_steps"] == 2 and copied:
        run = {"max_steps": 4, "learning_rate": 1e-2}
        other = {name: value for name, value in config.items() if not name.startswith("ref_sync")}
        _, copies = rl("copies", {**config, **run})
        _, previous = rl("is-previous", {**other, **run, "ref_mode": "previous"})
        names = ("loss", "kl_loss", "grad_norm", "kl/sequence_sum")
        for one, two in zip(copies, previous, strict=True):
            assert {n: one[n] for n in names if n in one} == pytest.approx(
                {n: two[n] for n in names if n in two}, rel=1e-4, abs=1e-5
            )


@pytest.mark.parametrize(
    "config, flat",
    [
        ({"preset": "grpo", "ref_mode": "refresh", "ref_sync_steps": 1, "ref_sync_alpha": 1.0}, True),
        ({"preset": "trpo_penalty"}, True),
        ({"preset": "trpo_penalty", "num_minibatches": 2}, False),
        ({"preset": "ppo_clip_kl"}, False),
        ({"preset": "ppo_clip_kl", "num_iterations": 1}, True),
        ({"preset": "grpo", "ref_mode": "previous"}, True),
        ({"preset": "grpo", "ref_mode": "previous", "num_iterations": 2}, False),
        ({"preset": "grpo"}, False),
        ({"preset": "topr", "beta": 0.1, "kl_target": "old"}, False),  # to whoever sampled
        ({"preset": "mdpo", "beta": 0.1, "kl_target": "old", "num_iterations": 1}, True),
        ({"preset": "trpo", "beta": 0.1, "kl_target": "old"}, False),  # the line search reads it
    ],
)
def test_a_kl_to_the_policy_of_the_start_that_no_step_feels_is_told(config, flat):
    """KL(old||new) and its gradient are 0 where new is old, which the only step of a batch starts from."""
    found = [text for text in resolve_preset(Config(**config))[1] if "gradient is 0" in text]
    assert bool(found) is flat and all("num_iterations=4" in text for text in found)


def test_a_shared_critic_of_one_value_per_prompt_learns_at_the_first_token(tiny):
    from stages.batching import collate

    config = Config(preset="ppo", critic_mode="shared", critic_target="bandit", kl_coef=0.0)
    objective = PolicyGradient(resolve_preset(config)[0], config, value_head=random_value_head(32))
    values = [0.2, 0.2, 0.2]
    for mask, at in (([1, 1, 1], 0), ([0, 1, 1], 1)):
        item = make_item(
            "r",
            [20, 30],
            [[40, 50, 60]],
            [mask],
            advantages=[1.0],
            old_logps=[[-5.0] * 3],
            values=[values],
            returns=[[1.0 if t == at else 99.0 for t in range(3)]],
        )
        value, unit = objective(load_policy(tiny["policy"]), collate([item])).loss["value_loss"]
        assert unit == "sequences" and 0 < value.item() < 0.5 * 2**2


def test_start_up_and_validation_completions_are_as_long_as_the_run_allows(rl):
    source = rl.source(
        "long",
        {"preset": "dr_grpo", "max_completion_length": 2, "context_schedule": [[0, 9], [5, 12]], "eval_prompts": 4},
    )
    prompts = source.order.prompts[:4]
    assert max(len(s.ids) for g in source.groups.of_every_prompt(prompts, "baseline", 2) for s in g) == 9
    assert source.evaluate(prompts, 0)["completions/max_length"] == 12


# --- metrics that say what happened -----------------------------------------------------------------------------------


def test_a_group_of_one_is_not_dead(rl):
    samples = [Sample({}, [1], g, [2], [0.0], "eos", "x", 0.1, {}, {}) for g in range(3)]
    assert "frac_reward_zero_std" not in rollout_metrics(samples, np.array([0.1, 0.2, 0.3]), np.arange(3))
    assert rollout_metrics(samples, np.array([0.1, 0.1, 0.3]), np.array([0, 0, 1]))["frac_reward_zero_std"] == 1.0
    for preset, watched in (("reinforce", False), ("dr_grpo", True)):
        source = rl.source(f"dead-{preset}", {"preset": preset})
        for step in range(4):
            source.watch({"step": step, "frac_reward_zero_std": 1.0})
        assert all(("frac_reward_zero_std" in row) == watched for row in source.history) and (
            not source.stage.warnings
        ) == (not watched)


@pytest.mark.parametrize(
    "surrogate, changes, expected, outside",
    [
        ("clip", {}, {"clip_low": 1, "clip_high": 1}, 3),
        ("clip", {"clip_ratio_c": 3.0}, {"clip_low": 1, "clip_high": 1, "clip_dual": 1}, 3),
        ("none", {}, {"clip_low": 0, "clip_high": 0}, None),
        ("sapo", {}, {"clip_low": 0, "clip_high": 0}, None),
        ("vespo", {}, {"clip_low": 0, "clip_high": 0}, None),
        ("cispo", {}, {"clip_low": 0, "clip_high": 0, "capped": 2}, 2),
    ],
)
def test_clip_metrics_count_the_tokens_that_lose_their_gradient(surrogate, changes, expected, outside):
    """And outside_range those beyond a clip range, which sapo, vespo and none do not have and cispo has on one side."""
    ratio, advantages = torch.tensor([[2.0, 0.5, 4.0, 1.0]]), torch.tensor([[1.0, -1.0, -1.0, 1.0]])
    logps = ratio.log().requires_grad_()
    losses, sums = policy_loss(logps, torch.zeros(1, 4), advantages, torch.ones(1, 4), surrogate=surrogate, **changes)
    assert {name: int(v) for name, v in sums.items() if name.startswith("clip_") or name == "capped"} == expected
    assert sums.get("outside_range") == outside
    (gradient,) = torch.autograd.grad(losses.sum(), logps)
    assert int((gradient == 0).sum()) == sum(v for name, v in expected.items() if name.startswith("clip_"))


def test_metrics_of_advantages_and_of_the_update_say_which_tokens_they_are_of(rl):
    row = rl_preset("dr_grpo")
    cut = batch(kept_B=np.array([True, False]), values_BT=None)
    credit = assign(row, cut, 0.0)
    assert credit_metrics(cut, credit, cut.kept_B, 0.0, 0.0)["advantage/std"] == 0.0  # one completion, one advantage
    source = rl.source("share", {"preset": "dr_grpo", "reward_override": "none", "rewards": [SPREAD]})
    alive, dead = completions(source, [(1.0, "eos"), (0.0, "eos")]), completions(source, [(1.0, "eos")] * 4)
    assert source.crediting([alive, dead], 0, 0).metrics["groups/forwarded_fraction"] == pytest.approx(2 / 6)


def test_every_admitted_prompt_comes_once_in_a_pass():
    """pass_at_k, self_paced: shuffled passes over those admitted, judged anew for every batch, also behind a resume."""
    prompts = [({"row_id": str(i), "prompt_id": str(i)}, [i]) for i in range(12)]

    def ordered():
        order = PromptOrder(
            Config(curriculum="self_paced", self_paced_thresholds=(1.5, 1.5), prompts_per_step=3),
            prompts,
            lambda *purpose: randomness.rng(3, "rl", *purpose),
            10,
        )
        order.start_from({str(i): (2, 1) for i in range(12)})
        return order

    order, again = ordered(), ordered()
    first = [row["row_id"] for row, _ in order.take(4, 0)]
    again.restore(json.loads(json.dumps(order.state())))
    rest, same = ([row["row_id"] for row, _ in o.take(8, 0)] for o in (order, again))
    assert rest == same and sorted(first + rest, key=int) == [str(i) for i in range(12)]
    second = [row["row_id"] for row, _ in order.take(12, 0)]
    assert len(set(second)) == 12 and second != first + rest


def test_pretraining_rows_count_the_documents_they_hold(tiny, tmp_path):
    """PPO-PTX: seq-mean-token-sum is a sum per document, however texts are cut into rows."""
    from stages.chat import renderer_for
    from stages.rollouts.source import pretraining_items
    from storage.datasets import open_dataset, write_dataset
    from storage.schema import complete_row

    path = str(tmp_path / "text")
    write_dataset(
        path,
        "text",
        "text/1",
        [
            complete_row(
                "text/1", {"text": f"two plus {i} is a sum. " * (1 + i)}, dataset="t", source="s", origin="human"
            )
            for i in range(6)
        ],
    )
    config, found = Config(preset="ppo_ptx", ptx_agg="seq-mean-token-sum"), []
    for length in (8, 64):
        items = pretraining_items(open_dataset(path), renderer_for(tiny["policy"]), length)
        assert sum(i.extra["documents"] for i in items) == pytest.approx(6.0) and len(items) != 6
        found.append(PolicyGradient(resolve_preset(config)[0], config).counts(items)["ptx_documents"])
    assert found == pytest.approx([6.0, 6.0])


# --- several rewards --------------------------------------------------------------------------------------------------


def test_components_are_normalised_before_they_are_weighted(rl):
    """reward.composite: normalize_then_sum does not depend on a component's scale, the sum's comparison does; a missing
    part leaves the statistics; equal parts add nothing.
    """
    letter = {
        "name": "letter",
        "kind": "python",
        "source": (
            "def score(prompt, completion, answer):\n    return None if len(completion) % 5 == 4 else"
            " float(len(completion) % 3)"
        ),
        "on_missing": "skip",
    }
    flat = {"name": "flat", "kind": "python", "source": "def score(prompt, completion, answer):\n    return 7.0"}
    wide = {**SPREAD, "source": SPREAD["source"].replace("return ", "return 1000 * (") + ")"}
    config = {
        "preset": "grpo",
        "beta": 0.0,
        "multi_objective_aggregation": "normalize_then_sum",
        "std_ddof": 0,
        "std_eps": 0.0,
        "max_steps": 1,
        "reward_override": "none",
    }

    def advantages(name, rewards, **more):
        result, metrics = rl(name, {**config, **more, "rewards": rewards})
        rows = rows_of(result)
        return [row["advantages"][0] for row in rows], rows, metrics

    found, rows, metrics = advantages("then", [{**SPREAD, "weight": 2.0}, letter, flat])
    groups = {}
    for i, row in enumerate(rows):
        groups.setdefault(row["prompt_id"], []).append(i)
    for members in groups.values():
        total = np.zeros(len(members))
        for name, weight in (("spread", 2.0), ("letter", 1.0), ("flat", 1.0)):
            # None -> nan
            value = np.array(
                [next(c["value"] for c in rows[i]["reward_components"] if c["name"] == name) for i in members], float
            )
            there = np.isfinite(value)
            if there.sum() > 1 and np.ptp(value[there]) > 0:
                total[there] += weight * (value[there] - value[there].mean()) / value[there].std()
        np.testing.assert_allclose([found[i] for i in members], total - total.mean(), atol=1e-9)
    assert any(c["value"] is None for row in rows for c in row["reward_components"])
    assert (
        "reward/spread/std" in metrics[0]
        and metrics[0]["reward/flat/std"] == 0.0
        and 0 < metrics[0]["reward/letter/unscorable_fraction"] < 1
    )
    np.testing.assert_allclose(advantages("scaled", [{**wide, "weight": 2.0}, letter, flat])[0], found, atol=1e-9)
    single, batch = (
        advantages(name, [{**SPREAD, "weight": 2.0}, flat], **more)[0]
        for name, more in (("whole", {}), ("batch", {"scale_rewards": "batch"}))
    )
    # GDPO: the sums by their std over the batch
    np.testing.assert_allclose(batch, np.array(single) / np.std(single), atol=1e-9)
    plain = {**config, "multi_objective_aggregation": "sum_then_normalize"}
    assert not np.allclose(
        advantages("sum", [{**wide, "weight": 2.0}, letter, flat], **plain)[0],
        advantages("sum2", [{**SPREAD, "weight": 2.0}, letter, flat], **plain)[0],
        atol=1e-3,
    )


def test_every_components_spread_and_its_correlation_with_length_are_logged():
    samples = [
        Sample({}, [1], g, [2] * n, [0.0] * n, "eos", "x", 1.0, {"a": a, "flat": 1.0, "gone": None}, {})
        for g, (n, a) in enumerate([(1, 0.0), (2, 1.0), (3, 0.5), (5, None)])
    ]
    found = rollout_metrics(samples, np.ones(4), np.arange(4))
    assert found["reward/a/length_correlation"] == pytest.approx(np.corrcoef([0, 1, 0.5], [1, 2, 3])[0, 1]) and found[
        "reward/a/std"
    ] == pytest.approx(np.std([0, 1, 0.5]))
    assert (
        "reward/flat/length_correlation" not in found
        and found["reward/flat/std"] == 0.0
        and "reward/gone/std" not in found
    )


@pytest.mark.parametrize(
    "config,message",
    [
        ({"preset": "rloo"}, "advantage=group_mean compares in"),
        ({"scale_rewards": "group"}, "leave it out"),
        ({"reward_override": "random"}, "leave one of them out"),
        ({"truncation_policy": "penalty"}, "truncation_policy=score or mask"),
    ],
)
def test_where_components_cannot_be_normalised(config, message):
    with pytest.raises(Exception, match=message):
        resolve_preset(Config(**{"preset": "grpo", **config, "multi_objective_aggregation": "normalize_then_sum"}))


@pytest.mark.parametrize("said, write", [(True, "group"), ("true", "group"), (False, "none"), ("False", "none")])
def test_a_scale_of_yes_or_no_is_told_what_it_is_called_here(said, write):
    with pytest.raises(ValueError, match=f"write scale_rewards={write}, "):
        Config(scale_rewards=said)


def test_batch_size_and_max_length_say_what_rl_calls_otherwise():
    """The keys of the other stages: prompts_per_step * num_generations = batch_size * num_minibatches, and the same
    stage key however it is said.
    """
    from stages.rl import Config

    said = lambda **given: (lambda c: (c.prompts_per_step, c.num_minibatches, c.minibatch_unit, c.max_prompt_length))(
        Config(**given)
    )
    assert said(batch_size=16) == (2, 1, "prompt", 1024) and said(
        batch_size=16, num_minibatches=4, num_generations=4
    ) == (16, 4, "prompt", 1024)
    assert said(batch_size=16, prompts_per_step=16, num_generations=8) == (16, 8, "prompt", 1024) and said(
        batch_size=4, prompts_per_step=2
    ) == (2, 4, "sequence", 1024)
    assert (
        said(max_length=512, max_completion_length=256)[3] == 256
        and said(max_length=4096)[3] == 1024
        and said(max_length=512, max_prompt_length=100)[3] == 100
    )
    assert (
        Config(batch_size=64, num_minibatches=2).identity() == Config(prompts_per_step=16, num_minibatches=2).identity()
    )
    for given in ({"batch_size": 16}, {"batch_size": 4, "prompts_per_step": 2}, {"max_length": 300}):
        assert Config(**Config(**given).model_dump()) == Config(**given)
    for given, message in (
        ({"batch_size": 12}, "multiple of 8"),
        ({"batch_size": 7, "prompts_per_step": 2}, "divisor"),
        ({"batch_size": 8, "prompts_per_step": 2, "num_minibatches": 1}, "divisor"),
        ({"max_length": 256}, "smaller max_completion_length"),
        ({"batch_size": 0}, "whole number above 0"),
        ({"batch_size": "many"}, "whole number above 0"),
        ({"batch_size": 2.5}, "whole number above 0"),
        ({"max_length": -1}, "whole number above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Config(**given)
