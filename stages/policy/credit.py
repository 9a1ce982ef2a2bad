"""From the rewards of one rollout batch to an advantage for every token.

:class:`Batch` holds the numbers of a rollout batch, :func:`assign` the order in which they are shaped: KL off the
reward, an advantage by the preset's name (a row of ``ADVANTAGES``), the critic's targets, whitening last. Everything is
float64 numpy, computed once per rollout batch, and a function of columns that the ``rollouts/1`` dataset keeps.

Legend: B completions, T token columns; masks are 1 on tokens that the policy chose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from stages.estimators import (
    DEGENERATE,
    gae,
    group_advantage,
    nstep_returns,
    place_terminal,
    process_advantage,
    reward_to_go,
    shape_rewards,
    token_baseline_advantages,
    turn_returns,
    vine_advantages,
    whiten,
)


@dataclass
class Batch:
    """One rollout batch. ``rewards_B`` follow the truncation rule (NaN = unscorable); ``kept_B`` rows are trained on,
    ``counted_B`` rows enter group statistics."""

    rewards_B: np.ndarray
    group_of_B: np.ndarray
    mask_BT: np.ndarray
    kept_B: np.ndarray
    counted_B: np.ndarray
    kl_BT: np.ndarray | None = None  # estimator of log pi_old/pi_ref for the KL in the reward, a constant
    baseline: Callable | np.ndarray | float = 0.0  # per row, one for all, or a function of the counted rewards
    values_BT: np.ndarray | None = None
    bootstrap_B: np.ndarray | float = 0.0  # V after the last token of rows cut by the length limit
    # (last token, reward) of each reasoning step, per row
    steps: list[tuple[list[int], list[float]]] = field(default_factory=list)
    preference_BO: np.ndarray | None = None  # P(completion preferred to each of its opponents); NaN = not comparable
    # of trajectories: (last token, reward) of each turn of the policy; of steps that are paid, of each step
    turns: list[tuple[list[int], list[float]]] = field(default_factory=list)
    log_ratio_BT: np.ndarray | None = None  # log pi_old/pi_ref, where there is a reference
    steps_paid: bool = False  # whether ``turns`` are steps
    rejected_BT: np.ndarray | None = None  # tokens that are trained on no more (rejection)
    # squared norm of d log pi / d logits of each token (advantage=token_baseline)
    energy_BT: np.ndarray | None = None
    # Monte-Carlo values of the states before each step (VINEPPO)
    step_values: list[list[float]] = field(default_factory=list)

    def trained(self, rows_B):
        """[B, T]: tokens of the mask and of ``rows_B`` that were not rejected."""
        on = self.mask_BT & rows_B[:, None]
        return on if self.rejected_BT is None else on & ~self.rejected_BT

    def token_rewards(self, rewards_B):
        """[B, T]: a completion's reward on its last token; a trajectory's on the last token of each turn and that of
        paid steps on theirs, whatever the truncation rule, a penalty or an outcome added on the last one."""
        if not self.turns:
            return place_terminal(rewards_B, self.mask_BT)
        out = np.zeros(self.mask_BT.shape)
        for i, (ends, parts) in enumerate(self.turns):
            out[i, ends] = parts
            if ends:
                out[i, ends[-1]] += rewards_B[i] - sum(parts)
        return out


@dataclass
class Credit:
    """What the update reads: advantages and the critic's targets ``[B, T]``, both 0 outside the mask."""

    advantages_BT: np.ndarray
    returns_BT: np.ndarray | None
    rewards_B: np.ndarray  # with a KL penalty taken off, if any
    token_rewards_BT: np.ndarray
    informative_B: np.ndarray
    raw_BT: np.ndarray  # advantages before whitening and clipping


def shaped(row, batch: Batch, kl_coef: float):
    """(rewards [B], token rewards [B, T], outcome [B, T]) after the KL penalty (KL-REWARD). ``outcome`` is what a token
    is credited with when nothing is accumulated: the row's reward, or with ``token_broadcast`` less the token's own KL.
    """
    rewards = np.where(np.isfinite(batch.rewards_B), batch.rewards_B, 0.0)
    if not kl_coef or batch.kl_BT is None:
        return rewards, batch.token_rewards(rewards), np.where(batch.mask_BT, rewards[:, None], 0.0)
    start = batch.token_rewards(rewards) if row.kl_reward_mode == "token_terminal" else rewards
    made = shape_rewards(start, batch.kl_BT, batch.mask_BT, kl_coef, row.kl_reward_mode)
    if made.ndim == 1:
        return made, batch.token_rewards(made), np.where(batch.mask_BT, made[:, None], 0.0)
    total = rewards - kl_coef * np.where(batch.mask_BT, batch.kl_BT, 0.0).sum(1)
    if row.kl_reward_mode == "token_broadcast":
        return total, made, made
    return total, made, np.where(batch.mask_BT, total[:, None], 0.0)


def _per_row(values_B, batch: Batch):
    return np.where(batch.mask_BT, values_B[:, None], 0.0)


def _baseline(batch, rewards):
    return batch.baseline(rewards[batch.counted_B]) if callable(batch.baseline) else batch.baseline


def _group(row, batch, rewards, tokens, outcome):
    if batch.steps_paid and row.advantage == "leave_one_out":
        return _turn_returns(row, batch, rewards, tokens, outcome, leave_one_out=True)
    baseline = _baseline(batch, rewards)
    rewards = np.where(np.isfinite(batch.rewards_B), rewards, np.nan)
    lengths = np.maximum(batch.mask_BT.sum(1), 1)
    advantages, informative = group_advantage(
        rewards - baseline, batch.group_of_B, row.group_mode, row.std_ddof, row.std_eps, batch.counted_B, lengths
    )
    if row.advantage in ("group_mean", "leave_one_out"):
        for group in np.unique(batch.group_of_B):  # ops.invariants
            total = abs(advantages[batch.group_of_B == group].sum())
            if total > 1e-6 * max(1.0, np.abs(advantages).max()) * (batch.group_of_B == group).sum():
                raise ArithmeticError(
                    f"the advantages of prompt group {group} sum to {total:g} instead of 0; report this with the"
                    " rewards"
                )
    return _per_row(advantages, batch), informative


def _process(row, batch, rewards, tokens, outcome):
    """GRPO-PROCESS: normalised over all step rewards of a group, summed over the steps that end at or after a token."""
    out, lengths, informative = np.zeros(batch.mask_BT.shape), batch.mask_BT.shape[1], np.zeros(len(rewards), bool)
    for group in np.unique(batch.group_of_B):
        rows = [i for i in np.flatnonzero(batch.group_of_B == group) if batch.counted_B[i]]
        found = process_advantage(
            [batch.steps[i][1] for i in rows],
            [batch.steps[i][0] for i in rows],
            [lengths] * len(rows),
            row.std_ddof,
            row.std_eps,
        )
        for i, advantage in zip(rows, found):
            out[i] = np.where(batch.mask_BT[i], advantage, 0.0)
        informative[rows] = out[rows].any()
    return out, informative


def _turn_returns(row, batch, rewards, tokens, outcome, leave_one_out: bool = False):
    """AGENT-RL: every token of a turn (of a paid step) gets the turn's discounted return less the group's mean return
    at the same turn; a turn that one trajectory alone reached is compared with the group's mean return of whole
    trajectories. Reward on the last turn only, gamma 1 and turns that all reach: the group-mean advantage.
    ``leave_one_out``: the means are over the other trajectories (RLOO), which no action of this one moves."""
    out, informative = np.zeros(batch.mask_BT.shape), np.zeros(len(rewards), bool)
    for group in np.unique(batch.group_of_B):
        rows = [i for i in np.flatnonzero(batch.group_of_B == group) if batch.counted_B[i] and batch.turns[i][0]]
        returns = {i: turn_returns(tokens[i, batch.turns[i][0]], row.gamma) for i in rows}
        if not rows:
            continue
        flat = np.concatenate(list(returns.values()))
        scale = flat.std(ddof=row.std_ddof) + row.std_eps if row.scale == "group" and len(flat) > row.std_ddof else 1.0
        for k in range(max(map(len, returns.values()))):
            here = [i for i in rows if len(returns[i]) > k]
            baseline = (
                np.mean([returns[i][k] for i in here]) if len(here) > 1 else np.mean([returns[i][0] for i in rows])
            )
            for i in here:
                if leave_one_out and len(rows) > 1:
                    baseline = np.mean(
                        [returns[j][k] for j in here if j != i]
                        if len(here) > 1
                        else [returns[j][0] for j in rows if j != i]
                    )
                value = (returns[i][k] - baseline) / scale if len(rows) > 1 else 0.0
                start = batch.turns[i][0][k - 1] + 1 if k else 0
                out[i, start : batch.turns[i][0][k] + 1] = value
        for i in rows:
            out[i] = np.where(
                batch.mask_BT[i] & (np.abs(out[i]) > DEGENERATE * max(1.0, np.abs(flat).max())), out[i], 0.0
            )
        # of the group: a trajectory as good as its mean is one of those that are compared
        informative[rows] = out[rows].any()
    return out, informative


def _vine(row, batch, rewards, tokens, outcome):
    """VINEPPO: V(next state) - V(state) on every token of a step, values from Monte-Carlo continuations; the last
    step's next value is the reward.
    """
    out = np.zeros(batch.mask_BT.shape)
    for i, values in enumerate(batch.step_values):
        start = 0
        for end, advantage in zip(batch.steps[i][0], vine_advantages(values, rewards[i])):
            out[i, start : end + 1] = advantage
            start = end + 1
    return np.where(batch.mask_BT, out, 0.0), out.any(1) & np.isfinite(batch.rewards_B)


def _win_rate(row, batch, rewards, tokens, outcome):
    """P(preferred to an opponent) - 1/2, the mean over opponents, less the KL penalty (NASH, SPPO)."""
    known = np.isfinite(batch.preference_BO)
    ok = known.any(1)
    rates = np.where(known, batch.preference_BO, 0.0).sum(1) / np.maximum(known.sum(1), 1)
    penalty = np.where(np.isfinite(batch.rewards_B), batch.rewards_B, 0.0) - rewards
    return _per_row(np.where(ok, rates - 0.5 - penalty, 0.0), batch), ok


def _reward_to_go(row, batch, rewards, tokens, outcome):
    """G_t less the completion's baseline (REINFORCE, BASELINE)."""
    baseline = np.broadcast_to(_baseline(batch, rewards), rewards.shape)
    ok = np.isfinite(batch.rewards_B) & np.isfinite(baseline)
    returns = reward_to_go(tokens, batch.mask_BT, row.gamma)
    return np.where(batch.mask_BT & ok[:, None], returns - np.where(ok, baseline, 0.0)[:, None], 0.0), ok


def _token_baseline(row, batch, rewards, tokens, outcome):
    """G_t less the group's baseline of least variance at the same token."""
    out, informative = np.zeros(batch.mask_BT.shape), np.zeros(len(rewards), bool)
    returns = reward_to_go(tokens, batch.mask_BT, row.gamma)
    for group in np.unique(batch.group_of_B):
        rows = [
            i
            for i in np.flatnonzero(batch.group_of_B == group)
            if batch.counted_B[i] and np.isfinite(batch.rewards_B[i])
        ]
        if len(rows) > 1:
            out[rows] = token_baseline_advantages(returns[rows], batch.energy_BT[rows], batch.mask_BT[rows])
            informative[rows] = out[rows].any()
    return out, informative


def policy_lambda(row, batch: Batch):
    """GAE lambda of the policy's advantages: the row's, or 1 - 1/(lam_alpha * length) per completion, at least 0
    (VAPO).
    """
    if row.lam_alpha is None:
        return row.lam
    return length_adaptive_lambda(batch.mask_BT.sum(1), row.lam_alpha)


def length_adaptive_lambda(lengths, alpha: float):
    """1 - 1/(alpha * length), clamped at 0 for short answers (VAPO)."""
    return np.maximum(1.0 - 1.0 / (alpha * np.maximum(np.asarray(lengths, float), 1.0)), 0.0)


def _gae(row, batch, rewards, tokens, outcome):
    advantages, _ = gae(tokens, batch.values_BT, batch.mask_BT, batch.bootstrap_B, row.gamma, policy_lambda(row, batch))
    return advantages, np.isfinite(batch.rewards_B)


def _reward_minus_value(row, batch, rewards, tokens, outcome):
    return np.where(batch.mask_BT, outcome - batch.values_BT, 0.0), np.isfinite(batch.rewards_B)


ADVANTAGES = {
    "reward_minus_baseline": _group,
    "group_mean": _group,
    "leave_one_out": _group,
    "leave_one_out_max": _group,
    "length_weighted": _group,
    "token_baseline": _token_baseline,
    "process": _process,
    "win_rate": _win_rate,
    "turn_returns": _turn_returns,
    "vine": _vine,
    "reward_to_go": _reward_to_go,
    "gae": _gae,
    "reward_minus_value": _reward_minus_value,
}


def critic_targets(row, batch: Batch, rewards, tokens, outcome):
    """Regression targets of the critic ``[B, T]`` by ``row.critic_target`` (CRITIC-LOSS); ``bandit`` reads the first
    token only. A completion that was cut under truncation_policy=bootstrap is worth the value of its end, not 0."""
    kind, mask = row.critic_target, batch.mask_BT
    after = np.broadcast_to(batch.bootstrap_B, rewards.shape)
    if kind in ("lambda_return", "mc_return", "td0"):
        lam = {"lambda_return": row.lam if row.lam_critic is None else row.lam_critic, "mc_return": 1.0, "td0": 0.0}[
            kind
        ]
        return gae(tokens, batch.values_BT, mask, batch.bootstrap_B, row.gamma, lam)[1]
    if kind == "n_step":
        return nstep_returns(tokens, batch.values_BT, mask, row.n_steps, batch.bootstrap_B, row.gamma)
    if kind == "kl_adjusted_outcome":
        return np.where(mask, outcome + after[:, None], 0.0)
    if kind == "soft_bellman":  # V regresses on what is still to come, less beta times the log-ratios to come (OREO)
        # the log-ratio of the policy's loss, whatever estimates the KL in the reward
        kl = np.where(mask, batch.log_ratio_BT, 0.0)
        return np.where(
            mask, reward_to_go(tokens, mask, row.gamma) - row.options["beta"] * kl[:, ::-1].cumsum(1)[:, ::-1], 0.0
        )
    return _per_row(np.where(np.isfinite(batch.rewards_B), batch.rewards_B, 0.0) + after, batch)  # terminal, bandit


def assign(row, batch: Batch, kl_coef: float, advantage_clip: float | None = None, drop_dead: bool = False) -> Credit:
    """Advantages and critic targets of a rollout batch under a preset's row (``stages.algorithms.RLPreset``).
    ``drop_dead``: groups without a signal are not trained on, so they are in no statistic of the whitening either."""
    rewards, tokens, outcome = shaped(row, batch, kl_coef)
    advantages, informative = ADVANTAGES[row.advantage](row, batch, rewards, tokens, outcome)
    trained = batch.trained(batch.kept_B)
    advantages = np.where(trained, advantages, 0.0)
    raw = advantages
    returns = np.where(trained, critic_targets(row, batch, rewards, tokens, outcome), 0.0) if row.needs_critic else None
    if row.whiten:
        learned = batch.trained(batch.kept_B & informative) if drop_dead else trained
        advantages = whiten(advantages, learned, row.adv_norm_ddof)
    if advantage_clip is not None:
        advantages = advantages.clip(-advantage_clip, advantage_clip)
    return Credit(advantages, returns, rewards, tokens, informative & batch.kept_B, raw)


def explained_variance(values_BT, returns_BT, mask_BT) -> float | None:
    """1 - Var(returns - values) / Var(returns) over the mask; None for constant returns, of which there is nothing to
    explain (ACTOR-CRITIC, ops.monitor).
    """
    values, returns = np.asarray(values_BT)[mask_BT], np.asarray(returns_BT)[mask_BT]
    spread = returns.var() if returns.size else 0.0
    return float(1.0 - (returns - values).var() / spread) if spread > 1e-12 else None
