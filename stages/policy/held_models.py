"""The models that a run of `rl` holds beside the policy: which they are, for the memory plan, and each as it is loaded."""

from __future__ import annotations

from collections.abc import Collection

from stages.models.memory import SAMPLING, Role
from stages.policy.presets import exact_in_reward, resolve_preset


def roles(config, given: Collection[str]) -> list[Role]:
    """The models that a run with these settings and inputs holds (section F.0): policy, sampling copy, reference,
    behaviour policy, critic, opponent, and those that give rewards.
    """
    row, _ = resolve_preset(config)
    found = [Role("policy", "model", trained=True, sharded=True)]
    if loads_reference(row, config) and not _is_policy_without_adapter(config, given):
        found.append(
            Role(
                "reference",
                _reference_input(given),
                moves=follows_policy(config),
                sharded=reference_in_shards(row, config),
            )
        )
    if config.async_rollouts:
        found.append(Role(SAMPLING, "model"))
    if loads_old_policy(row):
        found.append(Role("old policy", "model", moves=True))
    if loads_start(config) and not config.lora_rank:
        found.append(Role("starting policy", "model"))
    if row.advantage == "win_rate" and row.opponent == "ema":
        found.append(Role("opponent", "model", moves=True))
    if row.needs_critic and config.critic_mode == "separate":
        found.append(
            Role("critic", _critic_input(config, given), trained=True, whole=True, sharded=True, headless=True)
        )
    asked = {c.input for c in config.rewards if c.kind == "model"}
    return found + [
        Role(name, name)
        for name in ("reward_model", "gold", "judge", "group_preference")
        if name in given and (name != "reward_model" or name in asked)
    ]


def follows_policy(config) -> bool:
    """Whether the reference moves with the policy during the run."""
    return config.ref_mode in ("ema", "refresh")


def loads_reference(row, config) -> bool:
    """Whether a reference model is held; that of ref_mode=previous is in the log-probs of the samples already."""
    return (
        row.opponent == "mixture"
        or row.distillation_weight > 0
        or (row.needs_reference or config.monitor_kl)
        and config.ref_mode != "previous"
    )


def reference_in_shards(row, config) -> bool:
    """Whether a sharded run may split the reference too: not where it follows the policy, nor where whole distributions
    of both are read together.
    """
    return (
        not follows_policy(config)
        and row.kl_loss_estimator != "full"
        and not row.distillation_weight
        and row.opponent != "mixture"
        and not exact_in_reward(row, config)
    )


def loads_old_policy(row) -> bool:
    """Whether the policy that sampled is held beside the one that is trained: where whole distributions of both are
    compared.
    """
    return bool(row.kl_loss_coef) and row.kl_target == "old" and row.kl_loss_estimator == "full"


def loads_start(config) -> bool:
    """Whether validation passes log the KL to the policy that training started from, beside that to a reference that
    moves.
    """
    return config.monitor_kl and config.ref_mode != "frozen" and config.eval_prompts > 0


def _reference_input(given: Collection[str]) -> str:
    return "reference" if "reference" in given else "model"


def _is_policy_without_adapter(config, given: Collection[str]) -> bool:
    """Whether the reference needs no weights of its own."""
    return bool(config.lora_rank) and not follows_policy(config) and _reference_input(given) == "model"


def _critic_input(config, given: Collection[str]) -> str:
    """The input that a separate critic starts from, where it can: the critic, else the reward model (critic_init), else
    the policy.
    """
    if "critic" in given:
        return "critic"
    return "reward_model" if "reward_model" in given and config.critic_init != "policy" else "model"


def load_reference(stage, row, renderer, model):
    """(the reference policy or None, whether it is in shards of its own): a frozen model, one that will follow the
    policy, or the policy without its adapter.
    """
    from stages.models import sharding
    from stages.models.adapters import AdapterOff
    from stages.models.modeling import follower, load_frozen

    config = stage.config
    if not loads_reference(row, config):
        if stage.has("reference"):
            stage.warn(
                "reference_unused",
                f"The input reference is not read: {config.preset} has no KL to it. Write beta=0.04 or kl_coef=0.02, or"
                " monitor_kl=true to log the KL, or leave the input out.",
            )
        return None, False
    if stage.has("reference"):
        _same_vocabulary(renderer, stage.path("reference"), "reference")
    if _is_policy_without_adapter(config, stage.inputs):
        return AdapterOff(model), False
    apart = sharding.asked(config) and reference_in_shards(row, config)
    path = stage.path(_reference_input(stage.inputs))
    return (
        follower(path, stage.device, model, config, not stage.has("reference"))
        if follows_policy(config)
        else load_frozen(path, stage.device, config.frozen_dtype, in_shards=apart)
    ), apart


def load_old_policy(stage, row):
    """The policy that samples, frozen as it is now, where :func:`loads_old_policy`; else None."""
    from stages.models.modeling import freeze, load_policy

    return freeze(load_policy(stage.path("model"), stage.device)) if loads_old_policy(row) else None


def load_start(stage, model):
    """The policy that training starts from, where :func:`loads_start`; else None."""
    from stages.models.adapters import AdapterOff
    from stages.models.modeling import load_frozen

    config = stage.config
    if not loads_start(config):
        return None
    if config.lora_rank:
        return AdapterOff(model)
    return load_frozen(stage.path("model"), stage.device, config.frozen_dtype)


def load_critic(stage, row, renderer, model):
    """The value function: from the input critic, else the reward model (critic_init), else the policy. None where the
    preset has none.
    """
    from stages.policy.critics import Critic, is_language_model, why_no_start

    if not row.needs_critic:
        return None
    config = stage.config
    start = _critic_input(config, stage.inputs)
    if start == "model" and config.critic_init == "reward_model":
        raise ValueError(
            "critic_init=reward_model needs the input reward_model; give reward_model=MODEL_REF, or write"
            " critic_init=policy."
        )
    if start == "critic" and config.critic_mode == "separate" and is_language_model(stage.path(start)):
        _same_vocabulary(renderer, stage.path(start), start)
        return Critic(stage, row, stage.path(start), False, model)
    reason = (
        why_no_start(stage.path(start), renderer) if start != "model" and config.critic_mode == "separate" else None
    )
    if reason and (start == "critic" or config.critic_init == "reward_model"):
        raise ValueError(
            f"the critic cannot start from the input {start}: {reason}. Give a scalar reward model on a decoder,"
            + (" a language model, or leave the input out." if start == "critic" else " or write critic_init=policy.")
        )
    if reason:
        stage.warn(
            "critic_start",
            f"The critic starts from the policy, not from the reward model: {reason}. Give a scalar reward model on a"
            " decoder for a better start, or write critic_init=policy.",
        )
        start = "model"
    return Critic(stage, row, stage.path(start), start != "model", model)


def _same_vocabulary(renderer, path: str, name: str) -> None:
    from stages.chat import load_tokenizer

    if load_tokenizer(path).get_vocab() != renderer.tokenizer.get_vocab():
        raise ValueError(
            f"the input {name} in {path} has another tokenizer than the policy; give a model with the policy's"
            " vocabulary."
        )
