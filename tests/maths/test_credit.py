"""Advantages and critic targets of random rollout batches against loops over the catalogue's formulas (methods: RETURN,
GAE, KL-REWARD, GRPO, RLOO, DR-GRPO, CRITIC-LOSS, NORM): gaps in masks, empty completions, rewards that are missing,
completions that are left out, equal groups.
"""

import numpy as np
import pytest

from stages.algorithms import rl_preset
from stages.policy import credit

GROUPS, COLUMNS = 3, 7
#: The preset that stands for an advantage, and its own axes.
ROWS = {
    "group": ("grpo", {}),
    "batch": ("grpo", {"scale": "batch"}),
    "batch_centered": ("grpo", {"scale": "batch_centered"}),
    "mean": ("dr_grpo", {}),
    "leave_one_out": ("rloo", {}),
    "to_go": ("reinforce", {"advantage": "reward_to_go", "baseline": "constant"}),
    "gae": ("ppo", {"lam_critic": None}),
    "less_value": ("ppo_outcome", {"lam_critic": None}),
}
TARGETS = ("lambda_return", "mc_return", "td0", "n_step", "terminal", "kl_adjusted_outcome")


def drawn(rng, advantage: str):
    """(row, batch, kl_coef, clip) of one case; masked entries hold NaN."""
    size = int(rng.integers(2, 5))
    B, of_values = GROUPS * size, advantage in ("gae", "less_value")
    mask = np.zeros((B, COLUMNS), bool)
    for i in range(B):
        length = int(rng.integers(0 if i == 2 else 1, COLUMNS + 1))
        mask[i, :length] = True
        if length > 2 and rng.random() < 0.4:  # a tool's token
            mask[i, int(rng.integers(0, length - 1))] = False
    rewards = np.round(rng.normal(size=B), 1) if rng.random() < 0.5 else (rng.random(B) < 0.5).astype(float)
    rewards[:size] = 0.3 if rng.random() < 0.3 else rewards[:size]
    rewards[int(rng.integers(B))] = np.nan if rng.random() < 0.4 else 0.7
    kept = np.isfinite(rewards) & (rng.random(B) < 0.9)
    counted = np.isfinite(rewards) & (kept | bool(rng.integers(2)))

    def tokens(scale):
        return np.where(mask, scale * rng.normal(size=mask.shape), np.nan)

    modes = ["sequence_sum", "sequence_mean"] + ["token_terminal"] * (of_values or advantage == "to_go")
    target = str(rng.choice(TARGETS))
    if advantage == "less_value" and target in ("terminal", "kl_adjusted_outcome"):
        modes.append("token_broadcast")
    name, axes = ROWS[advantage]
    row = rl_preset(
        name,
        **axes,
        **({"critic_target": target} if of_values else {}),
        kl_reward_mode=str(rng.choice(modes)),
        std_ddof=int(rng.integers(2)),
        gamma=float(rng.choice([1.0, 0.9])),
        lam=float(rng.choice([1.0, 0.5])),
        whiten=bool(rng.integers(2)),
        adv_norm_ddof=int(rng.integers(2)),
    )
    batch = credit.Batch(
        rewards,
        np.repeat(np.arange(GROUPS), size),
        mask,
        kept,
        counted,
        kl_BT=tokens(0.5),
        baseline=0.4 if advantage == "to_go" else 0.0,
        values_BT=tokens(1.0) if of_values else None,
        bootstrap_B=np.where(rng.random(B) < 0.3, rng.normal(size=B), 0.0) if advantage == "gae" else 0.0,
    )
    return row, batch, float(rng.choice([0.0, 0.1])), None if rng.random() < 0.7 else 0.6


def by_loops(advantage: str, row, batch, coef: float, clip: float | None):
    """(advantages, critic targets or None) [B, T]."""
    mask, B, gamma = batch.mask_BT, len(batch.mask_BT), row.gamma
    at = [np.flatnonzero(own) for own in mask]
    reward = np.where(np.isfinite(batch.rewards_B), batch.rewards_B, 0.0)
    after = np.broadcast_to(batch.bootstrap_B, B)
    kl = [coef * batch.kl_BT[i, at[i]] for i in range(B)]
    whole = reward - [k.mean() if row.kl_reward_mode == "sequence_mean" and len(k) else k.sum() for k in kl]
    paid = []  # of each token
    for i in range(B):
        own = -kl[i] if row.kl_reward_mode == "token_terminal" else np.zeros(len(at[i]))
        if len(own):
            own[-1] += reward[i] if row.kl_reward_mode == "token_terminal" else whole[i]
        paid.append(own)

    def outcome(i):
        return reward[i] - kl[i] if row.kl_reward_mode == "token_broadcast" else np.full(len(at[i]), whole[i])

    def returns(i, t, steps):
        """What is paid on ``steps`` tokens from the t-th on, and the value behind them."""
        steps = min(steps, len(at[i]) - t)
        values = np.append(batch.values_BT[i, at[i]], after[i])
        return sum(gamma**k * paid[i][t + k] for k in range(steps)) + gamma**steps * values[t + steps]

    def lambda_return(i, t, lam):
        left = len(at[i]) - t
        return (1 - lam) * sum(lam ** (n - 1) * returns(i, t, n) for n in range(1, left)) + lam ** (left - 1) * returns(
            i, t, left
        )

    each = np.zeros(B)
    if advantage in ("group", "batch", "batch_centered", "mean", "leave_one_out"):
        rows_of = [[i for i in np.flatnonzero(batch.group_of_B == g) if batch.counted_B[i]] for g in range(GROUPS)]
        for rows in rows_of:
            if len(rows) < 2 or np.ptp(whole[rows]) < 1e-12:
                continue
            for i in rows:
                others = [j for j in rows if j != i] if advantage == "leave_one_out" else rows
                each[i] = whole[i] - whole[others].mean()
            if advantage == "group":
                each[rows] /= whole[rows].std(ddof=row.std_ddof) + row.std_eps
        if advantage.startswith("batch"):
            every = np.flatnonzero(batch.counted_B)
            each /= (whole if advantage == "batch" else each)[every].std(ddof=row.std_ddof) + row.std_eps
    found, targets = np.zeros(mask.shape), np.zeros(mask.shape)
    for i in range(B):
        for t, column in enumerate(at[i]):
            if advantage == "gae":
                found[i, column] = lambda_return(i, t, row.lam) - batch.values_BT[i, column]
            elif advantage == "to_go":
                found[i, column] = sum(gamma**k * x for k, x in enumerate(paid[i][t:])) - batch.baseline
            elif advantage == "less_value":
                found[i, column] = outcome(i)[t] - batch.values_BT[i, column]
            else:
                found[i, column] = each[i]
            if row.needs_critic:
                targets[i, column] = {
                    "lambda_return": lambda: lambda_return(i, t, row.lam),
                    "mc_return": lambda: returns(i, t, COLUMNS),
                    "td0": lambda: returns(i, t, 1),
                    "n_step": lambda: returns(i, t, row.n_steps),
                    "terminal": lambda: reward[i] + after[i],
                    "kl_adjusted_outcome": lambda: outcome(i)[t] + after[i],
                }[row.critic_target]()
    on = mask & batch.kept_B[:, None]
    found, targets = np.where(on, found, 0.0), np.where(on, targets, 0.0)
    if row.whiten:
        picked = found[on]
        same = len(picked) < 2 or np.ptp(picked) < 1e-9
        found[on] = 0.0 if same else (picked - picked.mean()) / (picked.std(ddof=row.adv_norm_ddof) + 1e-8)
    return found if clip is None else found.clip(-clip, clip), targets if row.needs_critic else None


@pytest.mark.parametrize("advantage", ROWS)
def test_random_batches_have_the_credit_of_the_formulas(advantage):
    moved = 0
    for seed in range(60):
        row, batch, coef, clip = drawn(np.random.default_rng(seed), advantage)
        got = credit.assign(row, batch, coef, clip)
        want, targets = by_loops(advantage, row, batch, coef, clip)
        assert np.abs(got.advantages_BT - want).max() < 1e-9, (seed, row)
        assert (got.returns_BT is None) == (targets is None)
        if targets is not None:
            assert np.abs(got.returns_BT - targets).max() < 1e-9, (seed, row)
        moved += bool(want.any())
    assert moved > 40
