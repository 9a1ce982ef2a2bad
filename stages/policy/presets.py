"""From the settings of `rl` to the row of ``stages.algorithms.RL_PRESETS`` that they ask for, and what is refused on
the way because it does not go together.

:func:`row_of` applies the settings to the preset's row; :func:`resolve_preset` also checks them, theme by theme. Every
refusal says what to write instead.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stages.reward.components import RewardComponent
from stages.settings import CHANGES_OF_LOGITS, unread, whole_part
from stages.spec import ConfigError

if TYPE_CHECKING:
    from stages.rl import Config


#: Settings of the rl stage that take the place of an axis of the preset's row: setting -> field of the row.
RL_AXES = {
    "beta": "kl_loss_coef",
    "kl_estimator": "kl_loss_estimator",
    "kl_coef": "kl_reward_coef",
    "scale_rewards": "scale",
    "loss_agg_mode": "aggregation",
    **{
        name: name
        for name in (
            "advantage",
            "baseline",
            "std_ddof",
            "std_eps",
            "whiten",
            "adv_norm_ddof",
            "gamma",
            "lam",
            "lam_critic",
            "lam_alpha",
            "opponent",
            "surrogate",
            "ratio_level",
            "epsilon",
            "epsilon_high",
            "clip_ratio_c",
            "num_iterations",
            "kl_reward_mode",
            "kl_direction",
            "kl_target",
            "kl_controller",
            "target_kl",
            "critic_target",
            "n_steps",
            "critic_warmup_steps",
            "truncation_policy",
            "dynamic_sampling",
            "ptx_coef",
            "distillation_weight",
        )
    },
}


def row_of(config: Config):
    """The preset's row with the config's overrides applied, not checked against each other."""
    from stages.algorithms import VALUE_ADVANTAGES, rl_preset
    from stages.policy.combinations import preset_options

    changes = {axis: getattr(config, name) for name, axis in RL_AXES.items()}
    row = rl_preset(config.preset, **{k: v for k, v in changes.items() if v is not None})
    try:
        row = replace(row, options=preset_options(row, config.options))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if row.needs_critic and row.advantage not in VALUE_ADVANTAGES and row.unit != "tokens":
        row = replace(row, needs_critic=False)  # nothing would read its values
    if config.critic_mode == "shared" or not row.needs_critic:
        row = replace(row, critic_warmup_steps=0)  # a head on the policy's trunk learns with the policy
    if (
        config.multi_objective_aggregation == "normalize_then_sum"
        and config.scale_rewards is None
        and row.advantage == "group_mean"
    ):
        return replace(row, scale="none")  # the components are divided by their std, their sum is not again
    return row


def exact_in_reward(row, config: Config) -> bool:
    """Whether the exact KL to the reference is taken off rewards, for which both distributions are needed."""
    return row.kl_reward_coef > 0 and config.kl_reward_estimator == "full"


def not_read(config: Config) -> dict[str, str]:
    """{setting: error text} of the settings in which a config differs from the defaults and from its preset, and which
    nothing would read.
    """
    from stages.algorithms import rl_preset
    from stages.policy.read_when import RL_READ_WHEN

    start = rl_preset(config.preset)
    return unread(
        config, RL_READ_WHEN, row_of(config), config, own={name: getattr(start, axis) for name, axis in RL_AXES.items()}
    )


def resolve_preset(config: Config):
    """The preset row with the config's overrides applied and checked; (row, warnings).

    Raises:
        ValueError: settings that do not go together, and what to write instead.
    """
    from stages.policy.combinations import validate_rl
    from stages.policy.read_when import RL_ALARMS_WATCH

    row = row_of(config)
    warnings = validate_rl(
        row,
        config.num_generations,
        updates_per_generation=row.num_iterations * config.num_minibatches,
        max_staleness=config.max_staleness,
        async_rollouts=config.async_rollouts,
        allow_double_kl=config.allow_double_kl,
        loss_scale_factor=config.loss_scale_factor,
    )
    for refuse in (
        refuse_batch,
        refuse_rewards,
        refuse_off_policy,
        refuse_kl,
        refuse_prompts,
        refuse_update,
        refuse_distillation,
    ):
        refuse(row, config)
    dead = not_read(config)
    if dead:
        raise ValueError(f"preset={config.preset}: " + "\n  ".join(dead.values()))
    for name in (n for n in config.stop_on if n in RL_ALARMS_WATCH):
        condition, text = RL_ALARMS_WATCH[name]
        if not condition(row, config):
            raise ValueError(f"stop_on={name} would never stop the run: {text}, or leave {name} out of stop_on.")
    row, more = warned(row, config)
    return row, warnings + more


def refuse_batch(row, config: Config) -> None:
    """What a rollout batch cannot be cut into, and members of a group that it cannot have."""
    units = {"prompt": config.prompts_per_step, "sequence": config.prompts_per_step * config.num_generations}.get(
        config.minibatch_unit
    )
    if units is not None and config.num_minibatches > units:
        raise ValueError(
            f"num_minibatches={config.num_minibatches} cuts {units} {config.minibatch_unit}s into empty steps; write"
            f" num_minibatches <= {units}."
        )
    if config.minibatch_unit != "prompt":
        refuse_parts(row, config)
    if config.sft_member == "replace" and config.num_generations < 2:
        raise ValueError(
            "sft_member=replace leaves no sample in groups of one; write sft_member=append or num_generations >= 2"
        )
    if row.unit == "pairs":
        joins = config.sft_member == "append" and config.sft_in_loss
        if (config.num_generations + joins) % 2:
            fits = [n for n in (config.num_generations - 1, config.num_generations + 1) if n + joins >= 2]
            raise ValueError(
                f"the loss of preset={config.preset} compares the completions of a prompt two by two, and of"
                f" num_generations={config.num_generations}"
                f"{' with the answer of sft_member=append' if joins else ''} one would be sampled and left out; write"
                f" num_generations={' or '.join(map(str, fits))}."
            )
    if config.conditioning == "sampling" and (
        row.objective or row.advantage == "vine" or config.token_norm_scope == "group"
    ):
        raise ValueError(
            "conditioning=sampling trains the answers of a group behind different contexts, which"
            f" {'token_norm_scope=group' if config.token_norm_scope == 'group' else config.preset} does not allow;"
            " write conditioning=plain, or preset=grape"
        )


def refuse_parts(row, config: Config) -> None:
    """Refuse ``minibatch_unit`` sequence or token where the loss needs what would be in another step (OFFPOL-LOOP).

    Raises:
        ValueError: what to write instead.
    """
    refused = {
        f"the loss of preset={config.preset} compares two completions of a prompt; write minibatch_unit=prompt": (
            row.unit == "pairs"
        ),
        "token_norm_scope=group divides by the tokens of a whole group; write token_norm_scope=batch": (
            row.aggregation == "token-mean" and config.token_norm_scope == "group"
        ),
        "seq_denominator=all counts completions that are in no step; write seq_denominator=nonempty": (
            config.seq_denominator == "all"
        ),
    }
    if config.minibatch_unit == "token":
        refused |= {
            f"the loss of preset={config.preset} reads whole completions; write minibatch_unit=sequence": bool(
                row.objective
            ),
            f"loss_agg_mode={row.aggregation} weighs completions, of which a step sees some tokens; write loss_agg_mode=token-mean": (
                not row.objective and row.aggregation != "token-mean"
            ),
            f"ratio_level={row.ratio_level} is a ratio of whole completions; write ratio_level=token": (
                row.ratio_level != "token"
            ),
            f"surrogate={row.surrogate} weighs whole completions; write surrogate=clip": (
                not row.objective and row.surrogate in ("vespo", "geo_mean")
            ),
            "off_policy_mask_threshold looks at whole completions; leave it out": (
                config.off_policy_mask_threshold is not None
            ),
            "critic_target=bandit learns at the first token of each completion; write critic_target=lambda_return": (
                row.needs_critic and row.critic_target == "bandit"
            ),
        }
    for text in (text for text, on in refused.items() if on):
        raise ValueError(f"minibatch_unit={config.minibatch_unit}: {text}.")


def refuse_rewards(row, config: Config) -> None:
    """Rewards, baselines and their normalisation that do not go together."""
    from stages.algorithms import BASELINE_ADVANTAGES

    if (config.reward_norm != "none" or config.reward_clip) and (
        config.environment or row.advantage in ("process", "win_rate", "vine")
    ):
        raise ValueError(
            "reward_norm and reward_clip change the reward of whole completions, which"
            f" {'turns' if config.environment else f'advantage={row.advantage}'} do not read; leave them out, or"
            " normalise the component (kind=model, normalise=batch)."
        )
    measured = row.read_baseline in ("greedy", "table", "v_star")
    if measured and (config.reward_norm != "none" or config.reward_clip):
        raise ValueError(
            f"baseline={row.baseline} is a reward as it was earned, which reward_norm and reward_clip would take off"
            " rewards on another scale; leave them out, or write baseline=moving_average."
        )
    late = [c for c in config.rewards if c.from_step and c.counts]
    if late and row.read_baseline in ("table", "v_star"):
        raise ValueError(
            f"reward {late[0].name!r} counts from step {late[0].from_step} on, and baseline={row.baseline} is measured"
            " before training, without it; write from_step: 0, or baseline=moving_average."
        )
    if any(c.normalise == "batch" for c in config.rewards) and (
        row.read_baseline in ("table", "v_star") or row.advantage == "vine"
    ):
        what = "advantage=vine" if row.advantage == "vine" else f"baseline={row.baseline}"
        raise ValueError(
            f"normalise=batch whitens what is scored together, and {what} compares with completions that are scored"
            " apart; leave normalise out of the reward, or write baseline=moving_average (vineppo: preset=grpo)."
        )
    if config.multi_objective_aggregation == "normalize_then_sum":
        refused = {
            "reward_override replaces what the components say; leave one of them out": config.reward_override != "none",
            f"scale_rewards={config.scale_rewards} would divide the sum by a group's std once more; leave it out, or write scale_rewards=batch": (
                row.scale not in ("none", "batch")
            ),
            f"truncation_policy={row.truncation_policy} sets rewards on the scale of the plain sum; write truncation_policy=score or mask": (
                row.truncation_policy not in ("score", "mask")
            ),
        }
        for text in (text for text, on in refused.items() if on):
            raise ValueError(f"multi_objective_aggregation=normalize_then_sum: {text}.")
    if row.advantage == "process":
        unread = [f"reward_override={config.reward_override}"] * (config.reward_override != "none") + [
            f"truncation_policy={row.truncation_policy}"
        ] * (row.truncation_policy in ("zero", "penalty"))
        unread += ["the soft overlong penalty (write soft_punish_cache=0)"] * bool(
            row.soft_punish_share if config.soft_punish_cache is None else config.soft_punish_cache
        )
        if unread:
            raise ValueError(
                f"advantage=process reads the rewards of steps, which {' and '.join(unread)} would not change; leave it"
                " out, or write advantage=group_mean."
            )
    if row.dynamic_sampling and any(c.normalise == "batch" for c in config.rewards):
        raise ValueError(
            "normalise=batch would whiten every refill round of dynamic_sampling by its own mean and std, so rewards of"
            " one batch would not compare; write reward_norm=whiten (over the whole batch) instead of it, or"
            " dynamic_sampling=false."
        )
    if config.baseline not in (None, "none") and row.advantage not in BASELINE_ADVANTAGES:
        raise ValueError(
            f"baseline={config.baseline} is not read by advantage={row.advantage}; write"
            " advantage=reward_minus_baseline, or leave baseline out."
        )
    if config.reward_override == "format_only" and not any(c.kind == "format" for c in config.rewards):
        raise ValueError(
            "reward_override=format_only leaves only rewards of kind format, and there is none; add one, for example"
            " rewards=[..., {kind: format}]."
        )
    if any(c.at_least is not None for c in config.rewards):
        refuse_constraints(row, config)
    by_steps = [c for c in config.rewards if c.step_credit != "none" and c.counts]
    if by_steps:
        refuse_step_credit(by_steps[0], row, config)
    if row.advantage == "turn_returns" and not (config.environment or by_steps):
        raise ValueError(
            "advantage=turn_returns credits the turns of trajectories, or steps that a reward pays; write"
            " environment=tools (or module:Class of your own), rewards=[{kind: model, step_credit: each}] with the"
            " input reward_model of objective=prm, or advantage=group_mean."
        )


def refuse_constraints(row, config: Config) -> None:
    """Refuse rewards with ``at_least`` where what is learned from is not R_1 + sum lambda_k R_k, or was earned under
    multipliers of another time (reward.constrained).

    Raises:
        ValueError: what to write instead.
    """
    held = [c for c in config.rewards if c.at_least is not None]
    refused = {
        "nothing is maximised under the constraint, every reward that counts has at_least; add one without, for example {kind: verifier}": all(
            c.at_least is not None for c in config.rewards if c.counts
        ),
        f"advantage={row.advantage} reads the rewards of steps, which no multiplier weighs; write advantage=group_mean": (
            row.advantage == "process"
        ),
        f"baseline={row.read_baseline} is measured once, under the first multiplier; write baseline=moving_average or batch_mean": (
            row.read_baseline in ("table", "v_star")
        ),
        f"replay_fraction={config.replay_fraction} pays older completions by older multipliers; write replay_fraction=0": (
            config.replay_fraction > 0
        ),
        f"reward_override={config.reward_override} replaces what the components say; leave one of them out": (
            config.reward_override != "none"
        ),
        "multi_objective_aggregation=normalize_then_sum would multiply a normalised reward, whose mean is 0 in every group; write sum_then_normalize": (
            config.multi_objective_aggregation == "normalize_then_sum"
        ),
    }
    for text in (text for text, on in refused.items() if on):
        raise ValueError(f"reward {held[0].name!r} has at_least={held[0].at_least:g}: {text}.")


def refuse_step_credit(component: RewardComponent, row, config: Config) -> None:
    """Refuse a reward that pays reasoning steps where the advantage would only read their sum, or where something else
    changes rewards of whole completions.

    Raises:
        ValueError: what to write instead.
    """
    who = f"reward {component.name!r} pays steps (step_credit={component.step_credit})"
    instead = {
        "reward_minus_baseline": "advantage=reward_to_go",
        "group_mean": "advantage=turn_returns (the group's mean, step by step), or preset=rloo",
        "length_weighted": "preset=rloo",
        "token_baseline": "preset=rloo",
        "leave_one_out_max": "preset=rloo",
        "reward_minus_value": "preset=ppo",
        "vine": "preset=ppo",
        "win_rate": "preset=rloo",
        "process": "preset=rloo; advantage=process pays the steps of the input reward_model by itself and no rewards",
    }
    refused = {
        f"the loss of preset={config.preset} reads what a whole completion earned; write preset=ppo, reinforce_pp or rloo, or step_credit: none": (
            bool(row.objective) and row.unit != "tokens"
        ),
        f"advantage={row.advantage} reads what a whole completion earned; write {instead.get(row.advantage)}, or step_credit: none": (
            row.advantage in instead
        ),
        f"environment={config.environment} pays by turns; leave one of them out": bool(config.environment),
        "reward_norm and reward_clip change the reward of whole completions; leave them out, or write clip in the component": (
            config.reward_norm != "none" or config.reward_clip is not None
        ),
        f"critic_target={row.critic_target} regresses on the reward of a whole completion at every token, whose steps are partly paid by then; write critic_target=lambda_return": (
            row.needs_critic and row.critic_target in ("terminal", "bandit", "kl_adjusted_outcome")
        ),
    }
    for text in (text for text, on in refused.items() if on):
        raise ValueError(f"{who}: {text}.")


def refuse_off_policy(row, config: Config) -> None:
    """Completions of another policy than the one that trains: an opponent's, replayed, a batch ahead, weighed or thrown
    out.
    """
    updates = row.num_iterations * config.num_minibatches
    if config.replay_fraction and row.advantage == "win_rate" and row.opponent != "self":
        raise ValueError(
            f"replay_fraction={config.replay_fraction}: replayed groups have no opponents, so they alone would be"
            " compared with themselves; write replay_fraction=0, or opponent=self."
        )
    if row.advantage == "win_rate" and row.opponent == "mixture":
        for name in ("stop_strings", *CHANGES_OF_LOGITS):
            if getattr(config, name) != type(config).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(
                    f"opponent=mixture samples without penalties, bans and stop strings; leave {name} out, or write"
                    " opponent=ema or opponent=self."
                )
    if config.async_rollouts:
        corrected = row.off_policy_ok or (
            not row.objective and (config.importance_correction != "none" or not row.strictly_on_policy)
        )
        refused = {
            "update=trust_region measures from the policy that sampled; write preset=ppo": row.update == "trust_region",
            f"preset={config.preset} trains as if the policy had sampled what it learns from; write importance_correction=token_truncate, or preset=grpo": (
                not corrected and not row.objective
            ),
            f"preset={config.preset} regresses on samples of the policy itself; write preset=grpo, topr or mdpo": (
                not corrected and row.objective
            ),
            f"opponent={row.opponent} moves with the policy; write opponent=self": (
                row.advantage == "win_rate" and row.opponent != "self"
            ),
            "advantage=vine continues completions by the policy of today; write advantage=group_mean": (
                row.advantage == "vine"
            ),
            "replay_fraction trains on more than the last batch; write replay_fraction=0": config.replay_fraction > 0,
            "engine_sleep=true lets the engine sleep while it is to sample; write engine_sleep=false": (
                config.engine_sleep
            ),
            "ref_mode=previous is whoever sampled, an iteration ago; write ref_mode=refresh": (
                config.ref_mode == "previous"
            ),
            "kl_target=old is the policy that started the iteration, which did not sample it; write kl_target=ref": (
                row.kl_loss_coef > 0 and row.kl_target == "old"
            ),
            "early_stop_kl decides when the next batch is trained on, and a reward with from_step has to know when it is sampled; leave one of them out": (
                config.early_stop_kl is not None and any(c.from_step for c in config.rewards)
            ),
            f"max_staleness={config.max_staleness} is less than the {updates} optimizer steps of an iteration, by which every batch lags; write max_staleness={updates}, or 0": (
                0 < config.max_staleness < updates
            ),
        }
        for text in (text for text, on in refused.items() if on):
            raise ValueError(f"async_rollouts=true: {text}.")
    if config.replay_fraction and not row.off_policy_ok:
        raise ValueError(
            f"replay_fraction={config.replay_fraction} gives rollouts of older policies to {config.preset}, which is"
            " on-policy; write replay_fraction=0, or preset=topr, offline_is, copg, mdpo or oreo."
        )
    if config.importance_clip_min > config.importance_clip_max:
        raise ValueError(
            f"importance_clip_min={config.importance_clip_min:g} is above"
            f" importance_clip_max={config.importance_clip_max:g}; write for example importance_clip_min=0.5"
            " importance_clip_max=2."
        )
    masks = config.importance_correction.endswith("mask")
    if masks and not config.importance_clip_min <= 1 <= config.importance_clip_max:
        raise ValueError(
            f"importance_correction={config.importance_correction} would give weight 0 to what trainer and sampler agree"
            f" on, whose ratio of 1 is not within importance_clip_min={config.importance_clip_min:g} and"
            f" importance_clip_max={config.importance_clip_max:g}; write for example importance_clip_min=0.5"
            " importance_clip_max=2."
        )
    if config.covariance_band[0] >= config.covariance_band[1]:
        raise ValueError(
            f"covariance_band={list(config.covariance_band)} has nothing between its bounds; write the smaller one"
            " first, for example [1.0, 5.0]."
        )
    if config.rejection_min > config.rejection_max:
        raise ValueError(
            f"rejection_min={config.rejection_min:g} is above rejection_max={config.rejection_max:g}; write for example"
            " rejection_min=0.5 rejection_max=2."
        )
    ratios = config.rejection != "none" and config.rejection_statistic == "ratio"
    if ratios and not config.rejection_min <= 1 <= config.rejection_max:
        raise ValueError(
            f"rejection={config.rejection} would throw out what trainer and sampler agree on, whose ratio of 1 is not"
            f" within rejection_min={config.rejection_min:g} and rejection_max={config.rejection_max:g}; write for"
            " example rejection_min=0.5 rejection_max=2, or rejection_statistic=k3 for bounds in nats."
        )
    if config.rejection != "none" and config.rejection_scope == "zero" and row.surrogate == "vespo":
        raise ValueError(
            "surrogate=vespo takes weights into its own ratio of the sequence, where 0 would take the whole sequence;"
            " write rejection_scope=drop."
        )
    if row.surrogate == "vespo" and not row.objective and config.importance_correction.startswith("sequence"):
        raise ValueError(
            "surrogate=vespo takes importance weights into its own ratio of the sequence, token by token; write"
            f" importance_correction=token_truncate or token_mask in the place of {config.importance_correction}."
        )


def starts_at_reference(row, config: Config) -> bool:
    """Whether every iteration starts at its reference, so that the KL of its own samples is 0: under ``ref_mode=previous``,
    and where ``refresh`` copies the policy behind the last step of each iteration (the first has what it is given).
    """
    updates = row.num_iterations * config.num_minibatches
    copied = config.ref_sync_alpha == 1 and (
        config.ref_sync_steps == 1 or config.early_stop_kl is None and updates % config.ref_sync_steps == 0
    )
    older = config.async_rollouts or row.behaviour_ratio  # samples, or ratios, of another policy than that at the start
    return config.ref_mode == "previous" or config.ref_mode == "refresh" and copied and not older


def refuse_kl(row, config: Config) -> None:
    """KL terms that the reference, or what is kept of it, cannot give."""
    if config.kl_coef_min is not None and config.kl_coef_max is not None and config.kl_coef_min > config.kl_coef_max:
        raise ValueError(
            f"kl_coef_min={config.kl_coef_min:g} is above kl_coef_max={config.kl_coef_max:g}; write kl_coef_min <="
            " kl_coef_max, or leave one of them out."
        )
    reference, other = (
        ("ref_mode=previous is", "ref_mode=refresh")
        if config.ref_mode == "previous"
        else (
            f"ref_mode=refresh with ref_sync_alpha=1 and ref_sync_steps={config.ref_sync_steps} makes the reference",
            "ref_sync_steps=512",
        )
    )
    if starts_at_reference(row, config) and row.kl_reward_coef:
        raise ValueError(
            f"{reference} the policy that started the iteration, to which the KL of its own samples is 0, so kl_coef"
            f" would lower no reward; write kl_coef=0 and beta=0.04 (the KL in the loss), or {other}."
        )
    if starts_at_reference(row, config) and row.kl_loss_coef and row.kl_target == "ref":
        held = {
            f"kl_controller={row.kl_controller} would lower the coefficient after every iteration": (
                row.kl_controller != "fixed"
            ),
            f"target_kl={config.target_kl} would never be passed": config.target_kl is not None,
        }
        for text in (text for text, on in held.items() if on):
            raise ValueError(
                f"{reference} the policy that started the iteration, and the KL that is compared with target_kl is that"
                f" of its own samples to it, which is 0, so {text}; write kl_target=old in its place, whose KL is"
                " measured after the steps of an iteration, or leave it out."
            )
    if exact_in_reward(row, config) and (config.async_rollouts or row.off_policy_ok):
        raise ValueError(
            "kl_reward_estimator=full compares the whole distributions of the policy that sampled, and that of older"
            " completions is gone; write kl_reward_estimator=k1"
            + (", or async_rollouts=false." if config.async_rollouts else ".")
        )
    if (
        config.ref_mode == "previous"
        and row.kl_loss_coef
        and row.kl_loss_estimator == "full"
        and row.kl_target == "ref"
    ):
        raise ValueError(
            "ref_mode=previous keeps the log-probs of the sampled tokens, not whole distributions; for the exact KL to"
            " the policy that started the iteration write kl_target=old, or kl_estimator=k3."
        )


def refuse_prompts(row, config: Config) -> None:
    """Which prompts come next, and how long answers to them may be."""
    judged = config.curriculum in ("pass_at_k", "self_paced")
    if config.reward_override != "none" and (judged or config.no_resampling_pass_rate is not None):
        name = f"curriculum={config.curriculum}" if judged else "no_resampling_pass_rate"
        raise ValueError(
            f"reward_override={config.reward_override} is a control in which nobody says what is right, and {name}"
            " reads that of every group; leave it out (difficulty_band chooses prompts before training)."
        )
    steps, lengths = [at for at, _ in config.context_schedule], [length for _, length in config.context_schedule]
    if steps != sorted(set(steps)) or any(v < 0 for v in steps) or any(v < 1 for v in lengths):
        raise ValueError(
            f"context_schedule={config.context_schedule} must list rising steps from 0 on with lengths of 1 or more;"
            " write for example [[0, 16384], [180, 32768]]."
        )
    shortest = min([*lengths, *([] if 0 in steps else [config.max_completion_length])])
    if config.min_tokens > shortest:
        raise ValueError(
            f"min_tokens={config.min_tokens} is over the completion limit of {shortest} tokens that context_schedule"
            " sets; write a smaller min_tokens, or longer limits."
        )
    if (config.soft_punish_cache or 0) > shortest:
        raise ValueError(
            f"soft_punish_cache={config.soft_punish_cache} is over the completion limit of {shortest} tokens; write a"
            " smaller one (DAPO: a fifth of the limit)."
        )
    if config.temperature == 0:
        raise ValueError(
            "temperature=0 samples G equal completions, so no group carries a signal; write temperature=1.0."
        )
    falling = sorted(config.passk_bands, reverse=True) == config.passk_bands and all(
        0 <= b <= 1 for b in config.passk_bands
    )
    if config.curriculum == "pass_at_k" and not falling:
        raise ValueError(
            f"passk_bands={config.passk_bands} must fall from at most 1 to at least 0; write for example [0.75, 0.5,"
            " 0.25, 0.0]."
        )
    if config.curriculum == "self_paced" and not 0 < config.self_paced_thresholds[0] <= config.self_paced_thresholds[1]:
        raise ValueError(
            f"self_paced_thresholds={list(config.self_paced_thresholds)} must be above 0 and not fall, so that more"
            " prompts come in; write for example [0.5, 1.25]."
        )
    if config.curriculum == "pass_at_k" and config.passk_k > config.num_generations:
        raise ValueError(
            f"pass@{config.passk_k} needs as many samples of a prompt; write passk_k <= {config.num_generations}, or"
            " raise num_generations."
        )
    if config.difficulty_band is not None and not 0 <= config.difficulty_band[0] <= config.difficulty_band[1] <= 1:
        raise ValueError(
            f"difficulty_band={list(config.difficulty_band)}: write two pass rates between 0 and 1, the lower one"
            " first, for example [0.2, 0.8]."
        )


def refuse_update(row, config: Config) -> None:
    """Optimizer steps and engines that cannot do what is asked of them."""
    if config.lora_dropout and (not row.strictly_on_policy or row.update == "trust_region"):
        raise ValueError(
            f"lora_dropout={config.lora_dropout} is there in training and not in old log-probs, so that their ratio"
            " would not be 1 where nothing has moved yet; leave it out, or write a preset that takes no ratio to them,"
            " such as preset=rloo or reinforce."
        )
    if row.update == "trust_region" and row.needs_critic and config.critic_mode == "shared":
        raise ValueError(
            "critic_mode=shared would move the value head by the policy's trust region; write critic_mode=separate, or"
            " preset=ppo."
        )
    if row.update == "trust_region" and config.compute_dtype != "float32":
        raise ValueError(
            f"update=trust_region measures KL far below the rounding of {config.compute_dtype}; write"
            " compute_dtype=float32."
        )
    if row.update == "trust_region" and config.forward == "compiled":
        raise ValueError(
            "forward=compiled has no forward-mode derivative, which TRPO needs; write forward=auto, or preset=ppo."
        )
    if config.engine_sleep and config.engine != "vllm":
        raise ValueError(
            f"engine_sleep=true puts vLLM to sleep, but engine={config.engine}; write engine=vllm, or leave"
            " engine_sleep out"
        )


def refuse_distillation(row, config: Config) -> None:
    """Distillation from the reference behind another prompt, where there is none, or where nothing fits behind it."""
    if config.use_adaptive_entropy and not config.entropy_coef_min <= config.entropy_coef <= config.entropy_coef_max:
        raise ValueError(
            f"entropy_coef={config.entropy_coef:g} is what the coefficient starts at, outside of"
            f" entropy_coef_min={config.entropy_coef_min:g} and entropy_coef_max={config.entropy_coef_max:g}; write a"
            " number between them."
        )
    if not row.distillation_weight:
        return
    refused = {
        f"the loss of preset={config.preset} on whole responses has no share to give away; write preset=sdpo or grpo": (
            bool(row.objective)
        ),
        "update=trust_region takes its step from the surrogate alone; write preset=sdpo or grpo": (
            row.update == "trust_region"
        ),
        "the teacher is a model that reads, and ref_mode=previous keeps log-probs alone; write ref_mode=refresh"
        " ref_sync_steps=1 ref_sync_alpha=1 for the policy of the step itself": config.ref_mode == "previous",
        "a teacher that reads no more than the policy teaches nothing; write use_successful_as_teacher=true or"
        " include_environment_feedback=true": (
            not config.use_successful_as_teacher and not config.include_environment_feedback
        ),
        "in groups of one there is no other answer to show, and no feedback is shown; write num_generations=8 or"
        " include_environment_feedback=true": (
            config.num_generations < 2
            and config.dont_reprompt_on_self_success
            and not config.include_environment_feedback
        ),
        f"environment={config.environment} has several turns, behind whose first question the teacher would read a whole"
        " trajectory; write environment='' and rewards that judge one answer": bool(config.environment),
        f"mode_mix={config.mode_mix} samples answers behind earlier ones; write mode_mix=fresh": (
            config.mode_mix != "fresh"
        ),
        f"sft_member={config.sft_member} puts answers into the group that nobody sampled; write sft_member=none": (
            config.sft_member != "none"
        ),
        f"kl_coef={row.kl_reward_coef:g} lowers rewards, which distillation alone does not read; write kl_coef=0 and beta"
        " for a KL in the loss, or distillation_weight=0.5": row.distillation_weight == 1 and row.kl_reward_coef > 0,
        "zero_advantage=mask leaves out groups of equal rewards, from whose right answers the policy would learn; write"
        " zero_advantage=keep": config.zero_advantage == "mask",
        "async_rollouts=true learns from answers of an older policy; write async_rollouts=false": config.async_rollouts,
    }
    for text in (text for text, on in refused.items() if on):
        raise ValueError(f"distillation_weight={row.distillation_weight:g}: {text}.")
    templates = {
        "reprompt_template": ("{prompt}", *(("{solution}",) * config.use_successful_as_teacher)),
        "solution_template": ("{successful_previous_attempt}",),
        "feedback_template": ("{feedback_raw}",),
    }
    if config.include_environment_feedback:
        templates["reprompt_template"] += ("{feedback}",)
    for name, parts in templates.items():
        for part in (part for part in parts if part not in getattr(config, name)):
            raise ValueError(f"{name} has no place for {part}; write it where that is to stand.")


def warned(row, config: Config) -> tuple[Any, list[str]]:
    """(the row, warnings) of settings that can be run and are seldom meant; where rewards are a control experiment the
    row pays nothing for cut completions.
    """
    from stages.algorithms import rl_preset

    warnings: list[str] = []
    if config.critic_mode == "shared" and rl_preset(config.preset).critic_warmup_steps:
        warnings.append(
            "critic_mode=shared: a head on the policy's trunk learns with the policy, so the critic steps of"
            f" preset={config.preset} before it are left out; write critic_mode=separate for them"
        )
    if config.replay_fraction and whole_part(config.replay_fraction, config.prompts_per_step) == 0:
        warnings.append(
            f"replay_fraction={config.replay_fraction} of prompts_per_step={config.prompts_per_step} is less than one"
            f" prompt, so nothing is replayed; write replay_fraction={1 / config.prompts_per_step:.4g} or more"
        )
    if (
        config.mode_mix == "share"
        and 0 < config.improve_share
        and whole_part(config.improve_share, config.num_generations) == 0
    ):
        warnings.append(
            f"improve_share={config.improve_share} of num_generations={config.num_generations} is less than one answer,"
            f" so none is improved; write mode_mix=probability, or improve_share={1 / config.num_generations:.4g}"
        )
    if row.positive_nll_coef and not any(
        c.kind in ("verifier", "code", "python", "remote", "rubric", "environment", "debate") for c in config.rewards
    ):
        warnings.append(
            f"preset={config.preset} adds the NLL of right completions, and no reward says which are right, so it is 0;"
            " add {name: verdict, kind: verifier, weight: 0} to rewards"
        )
    if config.reward_norm.startswith("whiten") and row.scale != "none":
        warnings.append(
            f"reward_norm={config.reward_norm} on top of scale_rewards={row.scale}: the second cancels the first's"
            " scale; write reward_norm=none"
        )
    mixing = {
        "scale_rewards=batch": row.scale == "batch",
        f"reward_norm={config.reward_norm}": config.reward_norm != "none",
        f"baseline={row.read_baseline}": row.read_baseline in ("batch_mean", "moving_average"),
        "whiten=true": row.whiten,
    }
    single = [c.name for c in config.rewards if c.domains and c.counts]
    if single and (mixed := [name for name, on in mixing.items() if on]):
        warnings.append(
            f"{' and '.join(mixed)}: one mean or std over the prompts of all domains, and rewards of single domains"
            f" ({', '.join(map(str, single))}) have scales of their own, so the domain with the widest rewards decides;"
            " leave that out and write preset=grpo, which compares inside a prompt"
        )
    if config.minibatch_unit == "prompt" and config.prompts_per_step % config.num_minibatches:
        fits = [n for n in range(1, config.prompts_per_step + 1) if config.prompts_per_step % n == 0]
        warnings.append(
            f"num_minibatches={config.num_minibatches} cuts prompts_per_step={config.prompts_per_step} into steps of"
            f" different size ({config.prompts_per_step // config.num_minibatches} and"
            f" {config.prompts_per_step // config.num_minibatches + 1} prompts), and a prompt in a smaller step weighs"
            f" more; write one of {', '.join(map(str, fits))}"
        )
    if config.preset == "grape_alt":
        warnings.append(
            "grape_alt is experimental: one unnormalised ratio and clip per sequence is a looser constraint than the"
            " token level's and collapses more easily; write preset=grape, or gspo for ratios that do not grow with"
            " length"
        )
    if config.reward_override != "none":
        if row.truncation_policy in ("zero", "penalty"):
            row = replace(row, truncation_policy="score")
        warnings.append(
            f"reward_override={config.reward_override}: a control experiment, the rewards are not those of the task;"
            " verdicts, soft overlong penalties and truncation_policy=zero or penalty do not count either; leave reward_override out to train"
        )
    if (
        config.ref_mode == "refresh"
        and row.needs_reference
        and row.opponent != "mixture"
        and starts_at_reference(row, config)
    ):
        warnings.append(
            f"ref_mode=refresh with ref_sync_alpha=1 and ref_sync_steps={config.ref_sync_steps} copies the policy behind"
            " the last step of every iteration, so the reference is the policy that started the iteration; write "
            + ("kl_target=old" if row.kl_loss_estimator == "full" else "ref_mode=previous")
            + ", which is the same without a model of its own, or ref_sync_steps=512 for a reference that stays behind"
        )
    if row.advantage == "win_rate" and row.opponent == "mixture" and config.sampling_dtype != "float32":
        warnings.append(
            f"sampling_dtype={config.sampling_dtype}: opponent=mixture reads policy and reference as they are held for"
            " training, since copies of both in another type would take more memory than they save; its answers are"
            " sampled in the type of those weights, the policy's own in sampling_dtype; write sampling_dtype=float32 for one"
            " type"
        )
    to_start = row.kl_target == "old" or starts_at_reference(row, config)
    to_sampler = row.behaviour_ratio and row.kl_loss_estimator != "full"  # who may be an older policy
    if (
        row.kl_loss_coef
        and to_start
        and not to_sampler
        and row.update != "trust_region"
        and row.num_iterations * config.num_minibatches == 1
    ):
        warnings.append(
            f"preset={config.preset}: the KL in the loss is to the policy that starts the iteration, and the only"
            " optimizer step of an iteration is taken there, where this KL's gradient is 0, so it holds nothing back;"
            " write num_iterations=4 or num_minibatches=4 (with a surrogate that has a ratio), or "
            + (
                "kl_target=ref"
                if row.kl_target == "old"
                else "ref_mode=refresh"
                if config.ref_mode == "previous"
                else "ref_sync_steps=512"
            )
        )
    if config.kl_reward_estimator != "k1" and row.kl_reward_coef:
        warnings.append(
            "kl_reward_estimator=full: the exact KL does not depend on the token that was sampled, so at its own step"
            " it is a baseline and regularises through later tokens only; write kl_reward_estimator=k1 for the reverse-KL gradient"
            if config.kl_reward_estimator == "full"
            else (
                f"kl_reward_estimator={config.kl_reward_estimator} in the reward gives a biased gradient; write"
                " kl_reward_estimator=k1 for the reverse-KL gradient"
            )
        )
    return row, warnings
