"""Advantages, returns, reward shaping, whitening, baselines and KL controllers.

Everything here happens once per rollout batch, on numbers without gradients, so it is float64 numpy (torch CPU
tensors are accepted). Legend: B completions, T token columns; masks are 0/1; masked entries may hold NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

DEGENERATE = 1e-7  # relative range of rewards below which a group carries no signal (float32 resolution)

GROUP_MODES = (
    "mean_std",
    "mean",
    "leave_one_out",
    "leave_one_out_max",
    "leave_one_out_max_std",
    "length_weighted",
    "batch_std",
    "batch_centered_std",
    "batch_mean",
    "none",
)


def _f64(x):
    return np.asarray(x.detach().cpu() if hasattr(x, "detach") else x, dtype=np.float64)


def _bool(x):
    return np.asarray(x.detach().cpu() if hasattr(x, "detach") else x).astype(bool)


def _choice(name, value, allowed):
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known; write one of: {', '.join(allowed)}")
    return value


def is_constant(values) -> bool:
    """True when the range of `values` is within DEGENERATE of their size: statistics would be rounding noise."""
    values = _f64(values)
    return values.size < 2 or float(values.max() - values.min()) <= DEGENERATE * float(np.abs(values).max())


# --- advantages of groups -----------------------------------------------------------------------


def group_advantage(
    rewards, group_ids, mode: str = "mean_std", std_ddof: int = 1, std_eps: float = 1e-4, valid=None, lengths=None
):
    """Advantage per completion from the rewards of its prompt: (float64 [B], informative bool [B]).

    Rows are grouped by id, wherever they stand. `mean_std` GRPO; `mean` Dr. GRPO; `leave_one_out` RLOO;
    `leave_one_out_max` max r - max over the others, so that the best completion alone is credited, by what the group's
    maximum would lose without it (pass@k, Tang et al. 2025; `_std`: by the group's std, verl's grpo_passk);
    `length_weighted` less the mean weighted by the completions' `lengths` (OPO, Hao et al. 2025); `batch_std` /
    `batch_centered_std` divide the group-centred reward by the std of the raw / centred rewards of the batch;
    `batch_mean` subtracts the batch mean; `none` keeps the reward. NaN or infinite rewards and `valid=False` rows leave
    all statistics and get 0. A group with one valid row, or with equal rewards, gets exactly 0 and is not informative
    (for `none` and `batch_mean` only invalid rows are not).
    """
    _choice("advantage mode", mode, GROUP_MODES)
    r, ids = _f64(rewards), list(group_ids)
    if r.ndim != 1 or len(ids) != len(r):
        raise ValueError(
            f"rewards must be one number per completion with one group id each; got shape {r.shape} and {len(ids)} ids"
        )
    if mode == "length_weighted" and (lengths is None or len(lengths) != len(r)):
        raise ValueError("length_weighted needs the completions' lengths; give lengths=, tokens per completion")
    ok = np.isfinite(r) if valid is None else np.isfinite(r) & _bool(valid)
    out, informative = np.zeros(len(r)), np.zeros(len(r), dtype=bool)
    if mode in ("none", "batch_mean"):
        out[ok] = r[ok] - (r[ok].mean() if mode == "batch_mean" and ok.any() else 0.0)
        return out, ok
    groups: dict = {}
    for i, g in enumerate(ids):
        if ok[i]:
            groups.setdefault(g, []).append(i)
    for rows in groups.values():
        if is_constant(r[rows]):
            continue
        informative[rows] = True
        centred = r[rows] - (
            np.average(r[rows], weights=_f64(lengths)[rows]) if mode == "length_weighted" else r[rows].mean()
        )
        if mode == "leave_one_out":
            centred = centred * (len(rows) / (len(rows) - 1))
        elif mode.startswith("leave_one_out_max"):
            second, best = np.sort(r[rows])[-2:]
            gain = best - second if best - second > DEGENERATE * np.abs(r[rows]).max() else 0.0
            centred = np.where(np.arange(len(rows)) == r[rows].argmax(), gain, 0.0) / (
                _std(r[rows], std_ddof) + std_eps if mode.endswith("std") else 1.0
            )
            informative[rows] = gain > 0
        elif mode == "mean_std":
            centred = centred / (_std(r[rows], std_ddof) + std_eps)
        out[rows] = centred
    if mode.startswith("batch") and informative.any():
        spread = _std(r[ok] if mode == "batch_std" else out[ok], std_ddof)
        out = out / (spread + std_eps)
    return out, informative


def normalized_sum(parts_KB, weights_KB, group_ids, std_ddof: int = 1, std_eps: float = 1e-4, valid=None):
    """Reward per completion, each component normalised in its prompt's group before it is weighted: sum_k w_k (r_k -
    mean) / (std + eps) (reward.composite, normalize_then_sum): float64 [B].

    ``parts_KB``, ``weights_KB``: a row per component. A component that is not finite on a row leaves its statistics and
    adds 0 there; one that is equal over a group adds 0 to all of it.
    """
    total = np.zeros(len(list(group_ids)))
    for values, weights in zip(parts_KB, weights_KB, strict=True):
        total += (
            np.where(np.isfinite(_f64(values)), _f64(weights), 0.0)
            * group_advantage(values, group_ids, "mean_std", std_ddof, std_eps, valid)[0]
        )
    return total


def _std(values, ddof):
    return float(np.sqrt(np.square(values - values.mean()).sum() / max(len(values) - ddof, 1)))


def process_advantage(step_rewards, step_ends, lengths, ddof: int = 1, eps: float = 1e-4):
    """GRPO with process rewards, one group: list of [length] advantages (GRPO-PROCESS).

    `step_rewards[i][j]` is the reward of step j of completion i, `step_ends[i][j]` the 0-based index of its last
    token. Rewards are normalised over all steps of the group, then summed over the steps ending at or after a token.
    """
    flat = np.array([r for row in step_rewards for r in row], dtype=np.float64)
    constant = is_constant(flat)
    mean, std = (flat.mean(), _std(flat, ddof)) if len(flat) else (0.0, 0.0)
    out = []
    for rewards, ends, length in zip(step_rewards, step_ends, lengths):
        adv = np.zeros(length)
        for reward, end in zip(rewards, ends):
            if not constant:
                adv[: end + 1] += (reward - mean) / (std + eps)
        out.append(adv)
    return out


# --- returns and GAE ----------------------------------------------------------------------------


def reward_to_go(token_rewards_BT, mask_BT, gamma: float = 1.0):
    """G_t = r_t + gamma G_{t+1} over masked-in tokens [B, T]; masked tokens cost no discount and are 0 (RETURN)."""
    rewards, mask = _f64(token_rewards_BT), _bool(mask_BT)
    out, running = np.zeros_like(rewards), np.zeros(rewards.shape[0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        m = mask[:, t]
        running = np.where(m, np.where(m, rewards[:, t], 0.0) + gamma * running, running)
        out[:, t] = np.where(m, running, 0.0)
    return out


def gae(token_rewards_BT, values_BT, mask_BT, bootstrap_value_B=0.0, gamma: float = 1.0, lam: float = 0.95):
    """(advantages, returns = advantages + values), [B, T], 0 outside the mask (GAE, Schulman et al. 2016).

    `bootstrap_value_B` is V after the last token of truncated rows, 0 for terminated ones. Masked tokens (padding,
    tool output) are skipped: the next state of an action is the state before the next action, undiscounted in between.
    """
    rewards, values, mask = _f64(token_rewards_BT), _f64(values_BT), _bool(mask_BT)
    adv = np.zeros_like(rewards)
    next_value = np.broadcast_to(_f64(bootstrap_value_B), rewards.shape[:1]).copy()
    running = np.zeros(rewards.shape[0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        m = mask[:, t]
        r, v = np.where(m, rewards[:, t], 0.0), np.where(m, values[:, t], 0.0)
        running = np.where(m, r + gamma * next_value - v + gamma * lam * running, running)
        next_value = np.where(m, v, next_value)
        adv[:, t] = np.where(m, running, 0.0)
    return adv, np.where(mask, adv + np.where(mask, values, 0.0), 0.0)


def td_errors(token_rewards_BT, values_BT, mask_BT, bootstrap_value_B=0.0, gamma: float = 1.0):
    """delta_t = r_t + gamma V(s_{t+1}) - V(s_t) [B, T] (TD): GAE with lam 0."""
    return gae(token_rewards_BT, values_BT, mask_BT, bootstrap_value_B, gamma, 0.0)[0]


def nstep_returns(token_rewards_BT, values_BT, mask_BT, n: int, bootstrap_value_B=0.0, gamma: float = 1.0):
    """G_t^(n) = r_t + ... + gamma^(n-1) r_{t+n-1} + gamma^n V(s_{t+n}) [B, T], 0 outside the mask (TD). Past the end it
    is the return to the end plus the bootstrap; masked tokens are skipped as in :func:`gae`, and n counts the others.
    """
    rewards, values, mask = _f64(token_rewards_BT), _f64(values_BT), _bool(mask_BT)
    found, after = np.zeros_like(rewards), np.broadcast_to(_f64(bootstrap_value_B), rewards.shape[:1])
    for row, at in enumerate(map(np.flatnonzero, mask)):
        r, v = rewards[row, at], np.append(values[row, at], after[row])
        ends = np.minimum(np.arange(len(at)) + n, len(at))
        found[row, at] = gamma ** (ends - np.arange(len(at))) * v[ends]
        for ahead in range(min(n, len(at))):
            found[row, at[: len(at) - ahead]] += gamma**ahead * r[ahead:]
    return found


def turn_returns(turn_rewards_K, gamma: float = 1.0):
    """G_k = r_k + gamma G_{k+1} over the turns of one trajectory, float64 [K] (AGENT-RL)."""
    rewards = _f64(turn_rewards_K)
    return reward_to_go(rewards[None], np.ones((1, len(rewards)), bool), gamma)[0]


def vine_advantages(values_K, final_reward: float):
    """A_k = V(s_{k+1}) - V(s_k) of each step, gamma 1; the state after the last step is worth the reward (VINEPPO,
    Kazemnejad et al. 2024).
    """
    values = _f64(values_K)
    return np.append(values[1:], final_reward) - values


def token_baseline_advantages(returns_BT, energy_BT, mask_BT):
    """G_t - B_t of one group's completions, float64 [B, T], 0 outside the mask: B_t = sum_i W_it G_it / sum_i W_it over
    the completions that have a t-th token in the mask (optimal token baseline, 2026; verl).

    energy_BT: 1 - 2 pi + sum over the vocabulary of pi^2 of each token, the squared norm of d log pi / d logits; W_t is
    its sum up to t, what the gradient's variance grows by. Where one completion alone goes on, there is nothing to
    compare with and B_t is 0.
    """
    returns, energy, mask = _f64(returns_BT), _f64(energy_BT), _bool(mask_BT)
    out, at = np.zeros(returns.shape), [np.flatnonzero(row) for row in mask]
    gains = [returns[i, own] for i, own in enumerate(at)]
    weights = [np.where(mask[i], energy[i], 0.0)[own].cumsum() for i, own in enumerate(at)]
    for t in range(max(map(len, at), default=0)):
        rows = [i for i, own in enumerate(at) if len(own) > t]
        total = sum(weights[i][t] for i in rows)
        baseline = sum(weights[i][t] * gains[i][t] for i in rows) / total if len(rows) > 1 and total > 0 else 0.0
        for i in rows:
            out[i, at[i][t]] = gains[i][t] - baseline
    return out


# --- reward shaping -----------------------------------------------------------------------------

KL_REWARD_MODES = ("token_terminal", "token_broadcast", "sequence_sum", "sequence_mean")
TRUNCATION_POLICIES = ("score", "bootstrap", "zero", "penalty", "mask")


def place_terminal(scores_B, mask_BT):
    """[B, T] token rewards with the score on the last trained token of each row (rows without one get nothing)."""
    scores, mask = _f64(scores_B), _bool(mask_BT)
    out = np.zeros(mask.shape)
    rows = np.flatnonzero(mask.any(1))
    last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
    out[rows, last[rows]] = scores[rows]
    return out


def kl_estimates(log_ratios, kind: str):
    """Estimate of KL(pi||ref) of each sampled token from log pi/ref, nats (KL-EST): k1 the log-ratio itself, k2 and k3
    of the log-ratio clamped to +-20 (``stages.losses.kl_estimate``, as numbers).
    """
    d = _f64(log_ratios)
    held = d.clip(-20.0, 20.0)
    return {"k1": d, "k2": held * held / 2, "k3": np.expm1(-held) + held}[kind]


def shape_rewards(scores_B, kl_BT, mask_BT, kl_coef: float, mode: str = "sequence_sum"):
    """Rewards with the rollout-time KL (old - ref log-probs, a constant) taken off (KL-REWARD).

    `sequence_sum` / `sequence_mean` -> [B]; `token_terminal` -> token rewards [B, T] with the score on the last
    token; `token_broadcast` -> [B, T], each token's own return score - kl_coef kl_t (no accumulation).
    `scores_B` may be [B, T] process rewards for `token_terminal`.
    """
    _choice("kl_reward_mode", mode, KL_REWARD_MODES)
    scores, mask = _f64(scores_B), _bool(mask_BT)
    kl = np.where(mask, _f64(kl_BT), 0.0)
    if mode == "sequence_sum":
        return scores - kl_coef * kl.sum(1)
    if mode == "sequence_mean":
        return scores - kl_coef * kl.sum(1) / np.maximum(mask.sum(1), 1)
    if mode == "token_terminal":
        base = place_terminal(scores, mask) if scores.ndim == 1 else np.where(mask, scores, 0.0)
        return base - kl_coef * kl
    return np.where(mask, scores[:, None] - kl_coef * kl, 0.0)


def apply_truncation(
    scores_B,
    terminated_B,
    policy: str = "score",
    missing_eos_penalty: float = 1.0,
    missing_eos_mode: str = "replace",
    next_values_B=0.0,
):
    """What a cut completion earns: (terminal reward [B], bootstrap value [B], keep in loss bool [B]) (TERM).

    `score` keeps the score; `zero` gives 0; `penalty` replaces it by (or, `subtract`, lowers it by) the penalty;
    `bootstrap` gives no terminal reward and V(s_T); `mask` takes the row out of the loss. Terminated rows never change.
    """
    _choice("truncation_policy", policy, TRUNCATION_POLICIES)
    _choice("missing_eos_mode", missing_eos_mode, ("replace", "subtract"))
    scores, done = _f64(scores_B), _bool(terminated_B)
    cut = {
        "score": scores,
        "mask": scores,
        "zero": np.zeros_like(scores),
        "bootstrap": np.zeros_like(scores),
        "penalty": (scores if missing_eos_mode == "subtract" else np.zeros_like(scores)) - missing_eos_penalty,
    }[policy]
    bootstrap = np.where(done | (policy != "bootstrap"), 0.0, _f64(next_values_B))
    return np.where(done, scores, cut), bootstrap, done | (policy != "mask")


def overlong_penalty(lengths, max_completion_length: int, soft_punish_cache: int):
    """Soft overlong penalty in [-1, 0], to be added to the reward; tool output counts in the length (OVERLONG,
    DAPO).
    """
    if not 0 <= soft_punish_cache <= max_completion_length:
        raise ValueError(
            f"soft_punish_cache={soft_punish_cache} must be between 0 and max_completion_length={max_completion_length}"
        )
    n = _f64(lengths)
    if soft_punish_cache == 0:
        return np.where(n > max_completion_length, -1.0, 0.0)
    return np.clip((max_completion_length - soft_punish_cache - n) / soft_punish_cache, -1.0, 0.0)


def top_entropy_tokens(entropies_BT, mask_BT, share: float):
    """(tokens [B, T] of the mask whose entropy is at or above its (1 - share) quantile, that quantile in nats) (Wang et
    al. 2025, "Beyond the 80/20 rule").

    The quantile is taken over all tokens of the mask together; tokens of equal entropy are in or out together. Without
    a token in the mask: (none, 0).
    """
    mask = _bool(mask_BT)
    if not mask.any():
        return mask, 0.0
    entropies = np.where(mask, _f64(entropies_BT), -np.inf)
    threshold = float(np.quantile(entropies[mask], 1.0 - share))
    return entropies >= threshold, threshold


def token_covariances(logps_BT, advantages_BT, mask_BT):
    """(log pi - its mean) (A - its mean) [B, T], means over the mask, 0 outside: what a token adds to Cov(log pi, A),
    by which a policy gradient lowers the entropy (Cui et al. 2025, eq. 6).
    """
    mask = _bool(mask_BT)
    logps, advantages = np.where(mask, _f64(logps_BT), 0.0), np.where(mask, _f64(advantages_BT), 0.0)
    n = max(int(mask.sum()), 1)
    return np.where(mask, (logps - logps.sum() / n) * (advantages - advantages.sum() / n), 0.0)


def covariance_in_band(covariances_BT, mask_BT, share: float, band, rng):
    """Tokens [B, T]: a ``share`` of the mask's (at least one) at random from those whose covariance lies between the
    two bounds, or all of them (Clip-Cov, Cui et al. 2025, eq. 8).
    """
    mask = _bool(mask_BT)
    chosen = np.zeros(mask.shape, bool)
    inside = np.flatnonzero(mask & (covariances_BT > band[0]) & (covariances_BT < band[1]))
    chosen.flat[rng.permutation(inside)[: max(int(share * mask.sum()), 1)]] = True
    return chosen


def top_covariances(covariances_BT, mask_BT, share: float):
    """Tokens [B, T]: a ``share`` of the mask's (at least one), those of the largest covariance, the earlier ones of
    equal (KL-Cov, Cui et al. 2025, eq. 10).
    """
    mask = _bool(mask_BT)
    chosen, inside = np.zeros(mask.shape, bool), np.flatnonzero(mask)
    chosen.flat[inside[np.argsort(-covariances_BT.flat[inside], kind="stable")][: max(int(share * len(inside)), 1)]] = (
        True
    )
    return chosen


class DynamicSamplingExhausted(RuntimeError):
    """No full batch of informative prompts within max_num_gen_batches."""


def informative_groups(correct_counts, num_generations: int):
    """0 < correct < G per group: the filter of DYN-SAMPLING, on counts and not on shaped rewards."""
    counts = np.asarray(correct_counts)
    return (counts > 0) & (counts < num_generations)


def fill_informative(
    draw: Callable[[int], Sequence | None],
    no_signal: Callable[[Any], str | None],
    wanted: int,
    max_num_gen_batches: int = 10,
) -> dict:
    """Draw batches of prompt groups until ``wanted`` of them have a signal (DYN-SAMPLING).

    draw: the next batch of groups, given how many were drawn so far; None where there are no more. no_signal: why a
    group teaches nothing, or None; asked of all groups after every batch, by which their rewards may have changed.

    Returns ``kept`` and ``surplus`` groups, ``dropped`` ones with their reasons, ``batches`` drawn, and the
    ``filter_rate``: dropped of those drawn. Raises DynamicSamplingExhausted after `max_num_gen_batches` batches (0: no
    limit) or at the end of what can be drawn.
    """
    drawn, kept, dropped, batches = [], [], [], 0
    while len(kept) < wanted:
        batch = draw(len(drawn)) if not max_num_gen_batches or batches < max_num_gen_batches else None
        if batch is None:
            raise DynamicSamplingExhausted(
                f"{len(kept)} groups with a signal of {wanted} after {batches} generation batches"
                f" ({len(drawn)} groups): raise {'max_num_gen_batches or ' if max_num_gen_batches else ''}num_generations,"
                " use easier or harder prompts, or write dynamic_sampling=false with zero_advantage=mask"
            )
        batches += 1
        drawn += batch
        reasons = [no_signal(group) for group in drawn]
        kept = [group for group, reason in zip(drawn, reasons) if reason is None]
        dropped = [(group, reason) for group, reason in zip(drawn, reasons) if reason is not None]
    return {
        "kept": kept[:wanted],
        "surplus": kept[wanted:],
        "dropped": dropped,
        "batches": batches,
        "filter_rate": len(dropped) / max(len(drawn), 1),
    }


# --- normalisation -------------------------------------------------------------------------------


def whiten(values, mask=None, ddof: int = 0, eps: float = 1e-8, shift_mean: bool = True):
    """(x - mean) / (std + eps) over the masked-in entries of the whole batch; masked entries and constant input
    give exactly 0 (NORM, rm.calibrate). `shift_mean=False` adds the mean back (TRL whiten_rewards)."""
    x = _f64(values)
    m = np.ones(x.shape, bool) if mask is None else _bool(mask)
    out = np.zeros_like(x)
    if m.any():
        picked = x[m]
        mean = picked.mean()
        scaled = np.zeros_like(picked) if is_constant(picked) else (picked - mean) / (_std(picked, ddof) + eps)
        out[m] = scaled + (0.0 if shift_mean else mean)
    return out


REWARD_NORMS = ("none", "whiten", "whiten_without_shift", "minmax", "running")


class RunningScale:
    """(x - mean) / (std + eps) by the statistics of all values so far, these included; constant ones give 0 (NORM).
    Values that are not ``new`` (bool per value; None: all are) were counted before. Its state belongs in the
    checkpoint.
    """

    def __init__(self, eps: float = 1e-8):
        self.eps, self.count, self.mean, self.squares = eps, 0, 0.0, 0.0

    def use(self, values, new=None):
        x = _f64(values)
        seen = x if new is None else x[_bool(new)]
        if seen.size:
            total, shift = self.count + seen.size, float(seen.mean()) - self.mean
            self.squares += float(np.square(seen - seen.mean()).sum()) + shift * shift * self.count * seen.size / total
            self.mean, self.count = self.mean + shift * seen.size / total, total
        std = float(np.sqrt(self.squares / max(self.count, 1)))
        return (x - self.mean) / (std + self.eps) if std > DEGENERATE * abs(self.mean) else np.zeros_like(x)

    def state_dict(self) -> dict:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict) -> None:
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]


def normalise_rewards(rewards_B, kind: str, running: RunningScale | None = None, clip: float | None = None, new=None):
    """Rewards of a rollout batch by a rule of REWARD_NORMS, then clipped to +-clip; NaN ones stay and are in no
    statistic (NORM, reward side). ``new`` (bool [B]): which the running statistics do not hold yet; None: all.
    """
    _choice("reward_norm", kind, REWARD_NORMS)
    out = _f64(rewards_B).copy()
    ok = np.isfinite(out)
    if kind == "running":
        out[ok] = running.use(out[ok], None if new is None else _bool(new)[ok])
    elif kind == "minmax" and ok.any():
        out[ok] = minmax(out[ok])
    elif kind != "none":
        out[ok] = whiten(out[ok], shift_mean=kind == "whiten")
    return out if clip is None else out.clip(-clip, clip)


def minmax(values):
    """To [0, 1]; a constant batch gives 0.5 (rm.calibrate)."""
    x = _f64(values)
    low, high = x.min(), x.max()
    return np.full_like(x, 0.5) if high == low else (x - low) / (high - low)


def calibration_bias(anchor_scores, weights=None) -> float:
    """b = -mean of the anchor's scores, by the ``weights`` of their rows where given; calibrated score = raw + b
    (rm.calibrate).
    """
    anchor = _f64(anchor_scores)
    if not anchor.size or not np.isfinite(anchor).all():
        raise ValueError(
            "the calibration anchor needs at least one finite score: give demonstrations or reference samples that can"
            " be scored"
        )
    return float(-anchor.mean() if weights is None else -np.average(anchor, weights=_f64(weights)))


# --- baselines and controllers with state ----------------------------------------------------------


class MovingAverageBaseline:
    """b <- decay b + (1 - decay) batch mean, used before it is updated; the first batch uses its own mean
    (BASELINE).
    """

    def __init__(self, decay: float = 0.9):
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay={decay} must be in [0, 1); 0.9 is the default")
        self.decay, self.value = decay, None

    def use(self, rewards, new=None) -> float:
        """The baseline for this batch of rewards (invalid ones ignored), then update by those that are ``new`` (bool
        per reward; None: all are), the others were counted before.
        """
        rewards = _f64(rewards)
        rewards = rewards[np.isfinite(rewards) & (True if new is None else _bool(new))]
        if not rewards.size:
            return 0.0 if self.value is None else self.value
        mean = float(rewards.mean())
        used = mean if self.value is None else self.value
        self.value = mean if self.value is None else self.decay * self.value + (1 - self.decay) * mean
        return used

    def state_dict(self) -> dict:
        return {"decay": self.decay, "value": self.value}

    def load_state_dict(self, state: dict) -> None:
        self.decay, self.value = state["decay"], state["value"]


def moved_multiplier(multiplier: float, mean: float, at_least: float, step: float) -> float:
    """lambda <- max(0, lambda + step (c - mean R)): the multiplier of the constraint E[R] >= c after one batch
    (reward.constrained).
    """
    return max(0.0, multiplier + step * (at_least - mean))


class Multipliers:
    """Lagrange multipliers of constraints E[R_k] >= c_k on rewards, by name; the reward is then R_1 + sum lambda_k R_k
    (reward.constrained). Their values belong in the checkpoint.

    bounds: {name: (first multiplier, c, step)}.
    """

    def __init__(self, bounds: dict[str, tuple[float, float, float]]):
        self.bounds, self.values = bounds, {name: float(first) for name, (first, _, _) in bounds.items()}

    def update(self, name: str, mean: float) -> float:
        """Move one multiplier by its component's mean over a batch and return how far that falls short of c (negative:
        it is met).
        """
        _, at_least, step = self.bounds[name]
        self.values[name] = moved_multiplier(self.values[name], mean, at_least, step)
        return at_least - mean

    def state(self) -> dict:
        return dict(self.values)

    def restore(self, state: dict) -> None:
        self.values = dict(state)


def table_baseline(prompt_ids, table: dict, missing: float | None = None):
    """Baseline [B] looked up by prompt id; of an id that the table lacks it is ``missing``, where None an error that
    names it (BASELINE).
    """
    unknown = sorted({p for p in prompt_ids if p not in table})
    if unknown and missing is None:
        raise KeyError(f"no baseline for prompt ids {unknown[:5]}: add them to the table, or give missing=")
    return _f64([table.get(p, missing) for p in prompt_ids])


def v_star(reference_rewards, beta: float) -> float:
    """beta log mean exp(r / beta) over reference samples of one prompt (ASTAR-PO, BASELINE v_star)."""
    scaled = _f64(reference_rewards) / beta
    top = scaled.max()
    return float(beta * (top + np.log(np.exp(scaled - top).mean())))


def adaptive_ppo(coef: float, kl: float, target_kl: float, **_) -> float:
    """Halve below target/1.5, double above 1.5 target, strict (KL-CTRL, Schulman et al. 2017)."""
    return coef / 2 if kl < target_kl / 1.5 else coef * 2 if kl > target_kl * 1.5 else coef


def adaptive_ziegler(coef: float, kl: float, target_kl: float, k_beta: float = 0.1, **_) -> float:
    """coef (1 + k_beta clip(kl/target - 1, -0.2, 0.2)) (KL-CTRL, Ziegler et al. 2019); the horizon form is k_beta =
    completions / horizon.
    """
    return coef * (1 + k_beta * min(max(kl / target_kl - 1, -0.2), 0.2))


def fixed(coef: float, kl: float, target_kl: float = 0.0, **_) -> float:
    """The coefficient stays."""
    return coef


KL_CONTROLLERS = {"fixed": fixed, "adaptive_ppo": adaptive_ppo, "adaptive_ziegler": adaptive_ziegler}


class KLController:
    """A KL coefficient and the rule that moves it after each update; its state belongs in the checkpoint.

    ``k_beta``: gain of ``adaptive_ziegler`` per update; with a ``horizon`` it is the update's completions over it
    instead (TRL's kl_horizon).
    """

    def __init__(
        self,
        coef: float,
        controller: str = "fixed",
        target_kl: float | None = None,
        low: float | None = None,
        high: float | None = None,
        k_beta: float = 0.1,
        horizon: float | None = None,
    ):
        _choice("kl_controller", controller, KL_CONTROLLERS)
        if controller != "fixed" and not (target_kl and target_kl > 0):
            raise ValueError(
                f"kl_controller={controller} needs target_kl > 0 (6.0 nats per sequence is a common start)"
            )
        if low is not None and high is not None and low > high:
            raise ValueError(f"kl_coef_min={low} is above kl_coef_max={high}; write the smaller one first")
        self.coef = coef
        self.controller = controller
        self.target_kl = target_kl
        self.k_beta = k_beta
        self.horizon = horizon
        self.low, self.high = 0.0 if low is None else low, float("inf") if high is None else high

    def update(self, kl: float, completions: int = 0) -> float:
        """Move the coefficient by the measured KL (same unit as target_kl) of so many completions and return it."""
        if self.controller != "fixed":
            gain = completions / self.horizon if self.horizon else self.k_beta
            self.coef = min(
                max(KL_CONTROLLERS[self.controller](self.coef, kl, self.target_kl, k_beta=gain), self.low), self.high
            )
        return self.coef

    def state_dict(self) -> dict:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict) -> None:
        self.coef = state["coef"]


class EntropyController:
    """The coefficient of the entropy bonus, moved towards a target entropy after each optimizer step (Skywork-OR1,
    arXiv:2505.22312; TRL's use_adaptive_entropy); its state belongs in the checkpoint.

    A step adds ``delta`` where the entropy of its tokens [nats per token] is at most ``target``, else takes it off,
    within [``low``, ``high``]. The next step pays the bonus only where this one's entropy was at most the target, so
    that the first pays none. Without a target the coefficient stays and is always paid.
    """

    def __init__(
        self, coef: float, target: float | None = None, delta: float = 0.005, low: float = 0.0, high: float = 1.0
    ):
        self.coef, self.target, self.delta, self.low, self.high = coef, target, delta, low, high
        self.entropy: float | None = None  # of the newest step

    def paid(self) -> float:
        """The coefficient that the next step pays."""
        low = self.target is None or (self.entropy is not None and self.entropy <= self.target)
        return self.coef if low else 0.0

    def update(self, entropy: float) -> float:
        """Move the coefficient by the entropy of a step and return it."""
        if self.target is not None:
            self.entropy = entropy
            self.coef = (
                min(self.coef + self.delta, self.high)
                if entropy <= self.target
                else max(self.coef - self.delta, self.low)
            )
        return self.coef

    def state(self) -> dict:
        return {"coef": self.coef, "entropy": self.entropy}

    def restore(self, state: dict) -> None:
        self.coef, self.entropy = state["coef"], state["entropy"]
