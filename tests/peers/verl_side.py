"""verl's own formulas (``verl.trainer.ppo.core_algos`` and ``rollout_corr_helper``) in the loop of
:mod:`tests.peers.loop`.

Only these files run: nothing of Ray, Hydra or the engines is needed (``pip install --no-deps verl``). Settings have the
names and defaults of the configuration that verl ships.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import torch
import yaml

from tests.peers import loop

FOLDER = loop.folder_of("verl")


class ActorConfig(SimpleNamespace):
    def get(self, name, default=None):
        return getattr(self, name, default)


def leaves(tree, prefix: str = "") -> dict:
    """{dotted name: value} of a nested configuration."""
    if not isinstance(tree, dict):
        return {prefix[:-1]: tree}
    return {name: value for key, part in tree.items() for name, value in leaves(part, f"{prefix}{key}.").items()}


def shipped() -> dict:
    """Every setting of verl's PPO trainer with its default, by its full name."""
    return leaves(yaml.safe_load((FOLDER / "trainer" / "config" / "_generated_ppo_trainer.yaml").read_text()))


def modules():
    """(core_algos, rollout_corr_helper)."""
    packages = {
        "verl": FOLDER,
        "verl.utils": FOLDER / "utils",
        "verl.trainer": FOLDER / "trainer",
        "verl.trainer.ppo": FOLDER / "trainer" / "ppo",
        "verl.trainer.config": FOLDER / "trainer" / "config",
        "verl.workers": FOLDER / "workers",
        "verl.workers.config": FOLDER / "workers" / "config",
    }
    nothing = type("Nothing", (), {})
    proto = type("DataProto", (), {"from_dict": staticmethod(lambda tensors: SimpleNamespace(batch=tensors))})
    stubs = {
        "omegaconf": {"DictConfig": nothing},
        "tensordict": {"TensorDict": nothing},
        "verl.protocol": {"DataProto": proto},
        "verl.utils.device": {"get_device_name": lambda: "cpu", "get_torch_device": lambda: torch.cpu},
        "verl.trainer.config": {"AlgoConfig": nothing},
        "verl.workers.config": {"ActorConfig": ActorConfig},
        "verl.trainer.config.algorithm": {"RolloutCorrectionConfig": nothing},
        "verl.workers.config.actor": {"PolicyLossConfig": nothing},
    }
    with loop.bare(packages, stubs):
        groupwise = importlib.import_module("verl.utils.groupwise")
        import sys

        sys.modules["verl.utils"].__dict__.update(
            as_torch_index=groupwise.as_torch_index,
            group_mean_std=groupwise.group_mean_std,
            torch_functional=importlib.import_module("verl.utils.torch_functional"),
        )
        return importlib.import_module("verl.trainer.ppo.core_algos"), importlib.import_module(
            "verl.trainer.ppo.rollout_corr_helper"
        )


#: Where the settings of a row of the page lie: the first of these sections that has one of this name.
SECTIONS = (
    "actor_rollout_ref.actor.",
    "actor_rollout_ref.actor.policy_loss.",
    "algorithm.",
    "algorithm.kl_ctrl.",
    "algorithm.rollout_correction.",
    "actor_rollout_ref.rollout.",
)


def settings_of(given: dict) -> SimpleNamespace:
    """The settings that decide a result, by their last name, with those ``given`` in the place of the defaults;
    KeyError for a name that verl does not have.
    """
    known = shipped()
    found = {
        name[len(section) :]: value
        for section in reversed(SECTIONS)
        for name, value in known.items()
        if name.startswith(section) and "." not in name[len(section) :]
    }
    for name in given:
        if name not in found:
            raise KeyError(f"{name} is no setting of verl")
    return SimpleNamespace(**found | given)


def on_policy(path, reference, iterations, num_generations: int, learning_rate: float, sampler: bool = False, **given):
    """verl's advantages and policy loss on given completions; ``sampler``: their log-probs are those of another engine,
    and rollout_correction is applied.
    """
    core, correction = modules()
    s = settings_of(given)
    actor = ActorConfig(
        **{
            name: getattr(s, name)
            for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg")
        },
        policy_loss=SimpleNamespace(
            **{
                name: getattr(s, name)
                for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")
            }
        ),
    )
    algorithm = SimpleNamespace(gamma=s.gamma, get=lambda name, default=None: getattr(s, name, default))

    def credit(b):
        last = b.mask.sum(-1).long() - 1
        rewards = torch.zeros_like(b.mask)
        rewards[torch.arange(len(rewards)), last] = b.scores
        if s.use_kl_in_reward:
            rewards = rewards - s.kl_coef * core.kl_penalty(b.old, b.ref, s.kl_penalty) * b.mask
        mask, weights = b.mask, None
        if sampler and (s.rollout_is or s.rollout_rs):
            found, mask, _ = correction.compute_rollout_correction_and_rejection_mask(
                b.old,
                b.sampler,
                b.mask,
                s.rollout_is,
                s.rollout_is_threshold,
                s.rollout_is_batch_normalize,
                s.rollout_rs,
                s.rollout_rs_threshold,
            )
            weights = None if found is None else found.batch["rollout_is_weights"]
        more = {
            "grpo": {"norm_adv_by_std_in_grpo": s.norm_adv_by_std_in_grpo},
            "remax": {"reward_baselines": b.greedy},
            "optimal_token_baseline": {
                "old_log_probs": b.old,
                "sum_pi_squared": b.squares,
                "rollout_is_weights": weights,
            },
        }.get(s.adv_estimator, {})
        advantages, _ = core.get_adv_estimator_fn(s.adv_estimator)(
            token_level_rewards=rewards, response_mask=mask, index=b.group, config=algorithm, **more
        )
        found = {"advantages": advantages, "response_mask": mask, "old": b.old, "ref": b.ref}
        return found | ({} if weights is None else {"weights": weights})

    def loss(logps, entropies, part, whole):
        info = {
            "dp_size": 1,
            "batch_num_tokens": whole["response_mask"].sum(),
            "global_batch_size": len(whole["old"]),
            "loss_scale_factor": s.loss_scale_factor,
        }
        actor.global_batch_info = info
        value, _ = core.get_policy_loss_fn(s.loss_mode)(
            old_log_prob=part["old"],
            log_prob=logps,
            advantages=part["advantages"],
            response_mask=part["response_mask"],
            loss_agg_mode=s.loss_agg_mode,
            config=actor,
            rollout_is_weights=part.get("weights"),
        )
        if s.loss_mode == "geo_mean":  # a mean over the micro-batch's rows, which verl's engine takes as they come
            value = value * len(logps) / len(whole["old"])
        if s.entropy_coeff:
            value = value - s.entropy_coeff * core.agg_loss(entropies, part["response_mask"], s.loss_agg_mode, **info)
        if s.use_kl_loss:
            value = value + s.kl_loss_coef * core.agg_loss(
                core.kl_penalty(logps, part["ref"], s.kl_loss_type), part["response_mask"], s.loss_agg_mode, **info
            )
        return value

    prompts = len(iterations[0]["prompt_ids"]) // num_generations
    size = prompts if s.ppo_mini_batch_size == 256 else s.ppo_mini_batch_size
    return loop.train(
        path,
        reference,
        iterations,
        num_generations,
        credit,
        loss,
        learning_rate=learning_rate,
        epochs=s.ppo_epochs,
        minibatches=prompts // size,
        temperature=s.temperature,
    )
