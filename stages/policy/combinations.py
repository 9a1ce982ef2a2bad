"""Which axes of a policy-gradient algorithm go together, and which constants its own loss may have."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from stages.algorithms import (
    ADVANTAGES,
    BASELINES,
    CRITIC_TARGETS,
    RLPreset,
    SCALES,
    SURROGATE_OPTIONS,
    VALUE_ADVANTAGES,
)

#: Where constants of a preset's own loss make sense: numbers above the first and up to the second, or the words to
#: choose from; a pair of numbers is an interval of weights, low to high.
RL_OPTION_RANGES: dict[str, tuple] = {
    **{name: (0.0, float("inf")) for options in SURROGATE_OPTIONS.values() for name in options},
    **{name: (0.0, float("inf")) for name in ("tau", "beta", "eta", "epsilon")},
    "form": ("separate", "joint"),
}


def preset_options(row: RLPreset, given: dict) -> dict:
    """The constants of a preset's own loss, or of its surrogate, with those ``given`` in their place; ValueError where
    one is unknown, of another type, or makes no sense.
    """
    known, of = (
        (row.options, f"preset {row.name}")
        if row.objective or row.surrogate not in SURROGATE_OPTIONS
        else (SURROGATE_OPTIONS[row.surrogate], f"surrogate {row.surrogate}")
    )
    unknown = set(given) - set(known)
    if unknown:
        raise ValueError(f"options {', '.join(sorted(unknown))}: {of} has {', '.join(known) or 'none'}; remove them.")
    for name, value in given.items():
        like, who = known[name], f"options.{name}={list(value) if isinstance(value, tuple) else value!r} of {of}"
        if isinstance(like, tuple):
            if not isinstance(value, (tuple, list)) or not 0.0 <= value[0] <= value[1]:
                raise ValueError(f"{who}: write the smallest and the largest weight, 0 or more, like {list(like)}.")
        elif isinstance(like, str):
            if value not in RL_OPTION_RANGES[name]:
                raise ValueError(f"{who}: write one of {', '.join(RL_OPTION_RANGES[name])}.")
        elif (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not RL_OPTION_RANGES[name][0] < value < RL_OPTION_RANGES[name][1]
        ):
            raise ValueError(f"{who}: write a number > {RL_OPTION_RANGES[name][0]:g}, like {like:g}.")
    return {**known, **{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}}


def validate_rl(
    row: RLPreset,
    num_generations: int,
    *,
    updates_per_generation: int | None = None,
    max_staleness: int = 0,
    async_rollouts: bool = False,
    allow_double_kl: bool = False,
    loss_scale_factor: float | None = None,
) -> list[str]:
    """Refuse impossible combinations (ValueError saying what to write) and return warnings."""
    updates = updates_per_generation or row.num_iterations
    for text in chain(
        _values_refused(row),
        _batch_refused(row, num_generations),
        _kl_refused(row, allow_double_kl),
        _updates_refused(row, updates, max_staleness, async_rollouts),
        _sums_refused(row, loss_scale_factor),
        _truncation_refused(row),
    ):
        raise ValueError(f"RL preset {row.name}: {text}")
    return _warnings(row, num_generations, updates)


def _values_refused(row: RLPreset) -> Iterator[str]:
    """Names that no table has, and numbers below 0."""
    for name, value, known in (
        ("advantage", row.advantage, ADVANTAGES),
        ("scale_rewards", row.scale, SCALES),
        ("baseline", row.baseline, BASELINES),
        ("critic_target", row.critic_target, CRITIC_TARGETS),
    ):
        if value not in known:
            yield f"{name}={value!r}; write one of {', '.join(known)}"
    for name in ("epsilon", "kl_reward_coef", "kl_loss_coef", "ptx_coef"):
        if getattr(row, name) < 0:
            yield f"{name}={getattr(row, name)} is negative; write 0 to switch it off"


def _batch_refused(row: RLPreset, num_generations: int) -> Iterator[str]:
    """Groups too small for what compares them, clip ranges that exclude each other, text in a trust region's batch."""
    needed = max(row.min_generations, 2 if row.compares else 1)
    if num_generations < needed:
        yield f"num_generations={num_generations} gives no baseline inside the group; write num_generations >= {needed}"
    if row.epsilon_high is not None and row.epsilon_high < row.epsilon and row.surrogate == "clip":
        yield f"epsilon_high={row.epsilon_high} is below epsilon={row.epsilon}; write epsilon_high >= epsilon"
    high = row.epsilon if row.epsilon_high is None else row.epsilon_high
    if row.clip_ratio_c is not None and row.surrogate == "clip" and not row.objective and row.clip_ratio_c <= 1 + high:
        yield (
            f"clip_ratio_c={row.clip_ratio_c:g} bounds ratios that the clip at 1 + epsilon_high = {1 + high:g} does not"
            " reach; write clip_ratio_c=3.0"
        )
    if row.dynamic_sampling and num_generations < 2:
        yield (
            "dynamic_sampling=true drops groups whose answers all earn the same, which groups of one always do; write"
            " num_generations=4, or dynamic_sampling=false"
        )
    if row.update == "trust_region" and row.ptx_coef > 0:
        yield (
            "ptx_coef mixes pretraining text into the batch, which update=trust_region would measure its KL and Fisher"
            " matrix over; write ptx_coef=0, or preset=ppo_ptx"
        )


def _kl_refused(row: RLPreset, allow_double_kl: bool) -> Iterator[str]:
    """KL terms that are counted twice, teach nothing, or shape rewards that the advantage does not read."""
    in_reward, in_loss = row.kl_reward_coef > 0, row.kl_loss_coef > 0
    if in_reward and in_loss and row.kl_target == "ref" and not allow_double_kl:
        yield "KL is penalised in the reward and in the loss; set kl_coef or beta to 0, or allow_double_kl=true"
    if in_loss and row.kl_loss_estimator == "k1":
        yield (
            "k1 in the loss has zero expected gradient and regularises nothing; write kl_estimator=k3 or k2, or put the"
            " KL in the reward"
        )
    if row.kl_direction == "forward" and in_loss and row.kl_loss_estimator != "full":
        yield "kl_direction=forward needs the whole distribution; write kl_estimator=full"
    if row.objective and in_loss and row.unit == "pairs":
        yield "a loss on pairs has no token average to put a KL into; write beta=0 (kl_coef puts it into the reward)"
    if (
        in_reward
        and row.kl_reward_mode.startswith("token")
        and row.advantage not in ("reward_to_go", "token_baseline", *VALUE_ADVANTAGES)
    ):
        yield (
            f"kl_reward_mode={row.kl_reward_mode} shapes token rewards, but advantage={row.advantage} reads one reward"
            " per completion; write kl_reward_mode=sequence_sum"
        )
    if (
        in_reward
        and row.kl_reward_mode == "token_broadcast"
        and not (
            row.advantage == "reward_minus_value" and row.critic_target in ("kl_adjusted_outcome", "terminal", "bandit")
        )
    ):
        yield (
            f"kl_reward_mode=token_broadcast puts the whole reward on every token, and advantage={row.advantage} with"
            f" critic_target={row.critic_target} would add these up; write kl_reward_mode=token_terminal, or"
            " advantage=reward_minus_value with critic_target=kl_adjusted_outcome"
        )
    if in_reward and row.advantage == "process":
        yield (
            "advantage=process reads step rewards, which kl_coef does not lower; write beta=0.04 (the KL in the loss)"
            " and kl_coef=0"
        )
    if in_reward and row.advantage == "vine":
        yield (
            "advantage=vine compares values of steps, which kl_coef does not lower: the whole completion's KL would"
            " land on the last step; write beta=1e-4 (the KL in the loss, VinePPO's) and kl_coef=0"
        )
    if row.kl_controller != "fixed" and not (row.kl_loss_coef or row.kl_reward_coef):
        yield (
            f"kl_controller={row.kl_controller} multiplies a coefficient, and both are 0; write beta or kl_coef > 0 to"
            " start from, or kl_controller=fixed"
        )
    if row.kl_controller != "fixed" and not (row.target_kl and row.target_kl > 0):
        yield f"kl_controller={row.kl_controller} needs target_kl > 0 (6.0 nats per sequence is a common start)"


def _updates_refused(row: RLPreset, updates: int, max_staleness: int, async_rollouts: bool) -> Iterator[str]:
    """Updates without the critic they read, and of rollouts by another policy than they take them to be of."""
    if row.advantage in VALUE_ADVANTAGES and not row.needs_critic:
        yield "GAE needs a critic; write preset=ppo, or advantage=group_mean"
    if row.strictly_on_policy and updates > 1:
        one = (
            f"write num_iterations=1 and num_minibatches=1, which gives one optimizer step per rollout (here {updates})"
        )
        if row.update == "trust_region":
            yield f"update=trust_region measures its step from the policy that sampled; {one}, or preset=ppo"
        yield f"surrogate={row.surrogate} is strictly on-policy; {one}, or surrogate=clip"
    if max_staleness > 0 and not (row.off_policy_ok or async_rollouts):
        yield (
            "it is on-policy and accepts no stale rollouts; write max_staleness=0, or preset=topr, offline_is, copg,"
            " mdpo or oreo"
        )


def _sums_refused(row: RLPreset, loss_scale_factor: float | None) -> Iterator[str]:
    """Sums over tokens that would not be those of the loss."""
    if row.aggregation == "seq-mean-token-sum-norm" and loss_scale_factor is not None and loss_scale_factor <= 0:
        yield "loss_scale_factor must be > 0; write the maximum completion length"
    if row.unit == "tokens" and row.gamma != 1.0:
        yield (
            f"gamma={row.gamma:g} would discount rewards, and not the log-ratios to come that the regression takes off"
            " them; write gamma=1, or preset=ppo"
        )
    if row.unit == "tokens" and row.critic_target != "soft_bellman":
        yield (
            f"critic_target={row.critic_target}: the policy's regression takes the value to be that of the soft-Bellman"
            " regression, reward to come less beta times the log-ratios to come; leave critic_target out, or write"
            " preset=ppo"
        )


def _truncation_refused(row: RLPreset) -> Iterator[str]:
    """Cut completions that would be paid by a value that nothing gives or reads."""
    if row.truncation_policy == "bootstrap" and not row.needs_critic:
        yield "truncation_policy=bootstrap needs a critic's value of the cut state; write score, zero, penalty or mask"
    if row.truncation_policy == "bootstrap" and row.advantage != "gae":
        yield (
            "truncation_policy=bootstrap pays a cut completion by the value of its end, which"
            f" advantage={row.advantage} does not read; write score, zero, penalty or mask, or advantage=gae"
        )


def _warnings(row: RLPreset, num_generations: int, updates: int) -> list[str]:
    """What can be, and seldom does what it is meant to."""
    warnings = []
    of_sequences = row.ratio_level != "token" or row.surrogate == "geo_mean"
    if of_sequences and row.aggregation != "seq-mean-token-mean" and not row.objective:
        warnings.append(
            f"{row.name}: a sequence ratio with {row.aggregation} weights sequences by their length;"
            " write loss_agg_mode=seq-mean-token-mean, which gives one term each"
        )
    if row.name == "astar_po" and num_generations > 1:
        warnings.append(
            f"astar_po: A*-PO takes one completion of each prompt, here num_generations={num_generations}; write"
            " num_generations=1 (and more prompts_per_step)"
        )
    if row.num_iterations > 4:
        warnings.append(
            f"{row.name}: {row.num_iterations} epochs on one rollout; more than 4 is rarely stable; write num_iterations=4"
        )
    if row.surrogate == "none" and not row.kl_loss_coef and updates > 4:
        warnings.append(
            f"{row.name}: {updates} updates per rollout without a clip; texts say fewer than five; lower num_iterations or num_minibatches"
        )
    if row.kl_reward_coef > 0 and row.scale != "none":
        warnings.append(
            f"{row.name}: KL in the reward with std scaling does not give the reverse-KL gradient; use beta"
        )
    return warnings
