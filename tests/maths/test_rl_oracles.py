"""Every advantage estimator, surrogate and loss on whole responses of the RL presets against exact sums over a toy
language: what the expected gradient is the gradient of.

Two completions of the prompt make a group; expectations are over all ordered pairs. Truths are autograd of functions of
the completions' probabilities, which no estimator reads.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from stages import estimators, losses
from stages.algorithms import ADVANTAGES, RL_PRESETS, SURROGATE_OPTIONS, resolve
from stages.policy.credit import Batch, assign
from stages.policy.sequence_losses import Responses
from tests import oracles
from tests.maths import toy

POLICY, REF, OTHER = toy.random_policy(1), toy.random_policy(2), toy.random_policy(5)
N, T, ON = len(toy.COMPLETIONS), toy.HORIZON, toy.MASK.bool()
REWARD = torch.randn(N, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
P, MU = toy.probabilities(POLICY), toy.probabilities(OTHER)
PAIRS = np.array(list(itertools.product(range(N), repeat=2)))  # completions of the groups of two
FLAT, GROUP = PAIRS.reshape(-1), np.repeat(np.arange(len(PAIRS)), 2)  # every group's members, one after the other
CHANCE = (P[PAIRS[:, 0]] * P[PAIRS[:, 1]]).repeat_interleave(2)  # of the group that a member is in
PLAIN = RL_PRESETS["reinforce"]
WINS = torch.sigmoid(torch.randn(N, N, generator=torch.Generator().manual_seed(4), dtype=torch.float64))
WINS = (WINS + 1 - WINS.T) / 2  # P(y beats y'), cycles included


def gradient_of(function, at=POLICY):
    """d function(logits) / d logits."""
    theta = at.clone().requires_grad_()
    return toy.gradient(function(theta), theta)


def mean_reward(theta, reward=REWARD):
    return (toy.probabilities(theta) * reward).sum()


def regularised(beta):
    return lambda theta: mean_reward(theta) - beta * toy.kl(theta, REF)


def batch(rewards, of=FLAT, **more):
    """All groups of two as one rollout batch."""
    ok = np.ones(len(of), bool)
    return Batch(np.asarray(rewards, float)[of], GROUP[: len(of)], ON.numpy()[of], ok, ok.copy(), **more)


def ascent(credit, of=FLAT, chance=CHANCE, members=2):
    """E of sum_t A_t grad log pi(y_t) per completion, with the credited advantages."""
    theta = POLICY.clone().requires_grad_()
    logps = torch.where(ON, toy.token_logps(theta), 0.0)[of]
    return toy.gradient((chance.detach()[:, None] * torch.tensor(credit.advantages_BT) * logps).sum() / members, theta)


def close(a, b):
    return torch.allclose(a, b, atol=1e-10)


def kl_tokens():
    return torch.where(ON, toy.token_logps(POLICY) - toy.token_logps(REF), 0.0).numpy()


def state_values(policy, reward):
    """V(s) of every prefix and completion: expected reward of what follows."""
    p = toy.probabilities(policy)
    below = {}
    for prefix in [*toy.STATES, *toy.COMPLETIONS]:
        rows = [i for i, y in enumerate(toy.COMPLETIONS) if y[: len(prefix)] == prefix]
        below[prefix] = float((p[rows] * reward[rows]).sum() / p[rows].sum())
    return below


# --- advantages ------------------------------------------------------------------------------------------------------

GREEDY = int(torch.argmax(P))
ALONE = {"of": np.arange(N), "chance": P, "members": 1}  # completions by themselves
BASELINES = {
    "none": (0.0, 1.0),
    "constant": (1.7, 1.0),
    "greedy": (float(REWARD[GREEDY]), 1.0),
    "table": (float((toy.probabilities(REF) * REWARD).sum()), 1.0),
    "v_star": (estimators.v_star(REWARD.tolist(), 0.5), 1.0),
}


@pytest.mark.parametrize("advantage", ["reward_minus_baseline", "reward_to_go"])
@pytest.mark.parametrize("kind", BASELINES)
def test_baselines_that_no_action_moves_are_unbiased(kind, advantage):
    value, factor = BASELINES[kind]
    row = replace(PLAIN, advantage=advantage, baseline=kind, kl_reward_coef=0.0)
    credit = assign(row, batch(REWARD, ALONE["of"], baseline=np.full(N, value)), 0.0)
    assert close(ascent(credit, **ALONE), factor * gradient_of(mean_reward))


def test_a_moving_average_is_of_earlier_batches_and_a_batch_mean_shrinks_the_gradient():
    """BASELINE: a batch of two completions at a time. The average of earlier batches is unbiased; the batch's own mean
    (also the first moving average) costs (n - 1)/n.
    """

    def expected(row, baseline):
        total = 0.0
        for k, pair in enumerate(PAIRS):
            credit = assign(
                row,
                Batch(
                    REWARD.numpy()[pair],
                    np.zeros(2, int),
                    ON.numpy()[pair],
                    np.ones(2, bool),
                    np.ones(2, bool),
                    baseline=baseline(),
                ),
                0.0,
            )
            total = total + ascent(credit, pair, CHANCE[2 * k : 2 * k + 2])
        return total

    started = estimators.MovingAverageBaseline(0.9)
    started.use([0.3, -0.2])
    for baseline, factor in ((started, 1.0), (estimators.MovingAverageBaseline(0.9), 0.5)):
        before = baseline.state_dict()

        def fresh():
            again = estimators.MovingAverageBaseline(0.9)
            again.load_state_dict(before)
            return again.use

        assert close(
            expected(replace(PLAIN, baseline="moving_average", kl_reward_coef=0.0), fresh),
            factor * gradient_of(mean_reward),
        )
    assert close(
        expected(replace(PLAIN, baseline="batch_mean", kl_reward_coef=0.0), lambda: 0.0), 0.5 * gradient_of(mean_reward)
    )


@pytest.mark.parametrize("preset, factor", [("rloo", 1.0), ("dr_grpo", 0.5)])
def test_group_means_with_and_without_the_own_sample(preset, factor):
    row = replace(RL_PRESETS[preset], kl_reward_coef=0.0)
    assert close(ascent(assign(row, batch(REWARD), 0.0)), factor * gradient_of(mean_reward))


def test_a_groups_std_turns_rewards_into_wins():
    """GRPO with two completions: (r - mean)/std is +-1/sqrt(2) whatever the difference, so the gradient is that of the
    rate of wins over the frozen policy.
    """
    wins = torch.sign(REWARD[:, None] - REWARD[None, :])
    truth = gradient_of(lambda theta: (toy.probabilities(theta) * (wins @ P)).sum()) / 2**0.5
    for scale in ("group", "batch", "batch_centered"):  # of a batch of one group, they are one another
        row = replace(RL_PRESETS["grpo"], scale=scale, std_eps=0.0, kl_loss_coef=0.0)
        if scale == "group":
            found = ascent(assign(row, batch(REWARD), 0.0))
        else:
            found = sum(
                ascent(
                    assign(
                        row,
                        Batch(
                            REWARD.numpy()[pair], np.zeros(2, int), ON.numpy()[pair], np.ones(2, bool), np.ones(2, bool)
                        ),
                        0.0,
                    ),
                    pair,
                    CHANCE[2 * k : 2 * k + 2],
                )
                for k, pair in enumerate(PAIRS)
            )
        assert close(found, truth)


@pytest.mark.parametrize("advantage", ["gae", "reward_minus_value"])
def test_critics_are_unbiased_baselines(advantage):
    """GAE with lambda 1 and R - V for any V; GAE with lambda below 1 for the exact one."""
    exact, rng = state_values(POLICY, REWARD), np.random.default_rng(0)

    def by_state(value):
        return np.array([[value[y[:t]] if t < len(y) else 0.0 for t in range(T)] for y in toy.COMPLETIONS])

    wrong = {state: rng.normal() for state in exact}
    cases = [(exact, 0.0), (exact, 0.7), (exact, 1.0), (wrong, 1.0)]
    for value, lam in cases:
        row = replace(RL_PRESETS["ppo"], advantage=advantage, lam=lam, whiten=False, kl_reward_coef=0.0)
        assert close(
            ascent(assign(row, batch(REWARD, ALONE["of"], values_BT=by_state(value)), 0.0), **ALONE),
            gradient_of(mean_reward),
        ), (lam, value is wrong)


@pytest.mark.parametrize("mode", ["token_terminal", "sequence_sum", "token_broadcast"])
def test_where_the_kl_of_the_reward_is_paid(mode):
    """KL-REWARD: summed, or accumulated over the tokens to come, the gradient of E[r] - beta KL; a token's own KL alone
    leaves out what it does to later ones.
    """
    beta, zero = 0.3, np.zeros((N, T))
    if mode == "sequence_sum":
        row = replace(PLAIN, baseline="none", kl_reward_mode=mode)
    else:
        row = replace(
            RL_PRESETS["ppo" if mode == "token_terminal" else "ppo_outcome"], kl_reward_mode=mode, whiten=False, lam=1.0
        )
    found = ascent(
        assign(row, batch(REWARD, ALONE["of"], kl_BT=kl_tokens(), values_BT=zero if row.needs_critic else None), beta),
        **ALONE,
    )
    if mode != "token_broadcast":
        assert close(found, gradient_of(regularised(beta)))
        return
    # how often a state is visited, held fixed
    weight = torch.stack(
        [sum(P[i] for i, y in enumerate(toy.COMPLETIONS) if y[: len(state)] == state) for state in toy.STATES]
    )

    def local(theta):
        new, ref = torch.log_softmax(theta, -1), torch.log_softmax(REF, -1)
        return mean_reward(theta) - beta * (weight * (new.exp() * (new - ref)).sum(-1)).sum()

    assert close(found, gradient_of(local)) and not close(found, gradient_of(regularised(beta)))


STEP = torch.randn(N, T, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
_OWN = {}
for _i, _y in enumerate(toy.COMPLETIONS):  # a step's reward is a function of what was said up to it
    for _t in range(len(_y)):
        _OWN.setdefault(_y[: _t + 1], float(STEP[_i, _t]))
STEPS = [(list(range(len(y))), [_OWN[y[: t + 1]] for t in range(len(y))]) for y in toy.COMPLETIONS]
PAID = torch.tensor([sum(rewards) for _, rewards in STEPS], dtype=torch.float64)


@pytest.mark.parametrize("advantage, factor", [("leave_one_out", 1.0), ("turn_returns", 0.5)])
def test_returns_of_turns_less_the_groups(advantage, factor):
    """AGENT-RL: every token a turn that is paid. The others' means are an unbiased baseline at every turn, the group's
    own cost (G - 1)/G, also where one trajectory alone gets so far.
    """
    row = replace(RL_PRESETS["agent"], advantage=advantage)
    credit = assign(row, batch(PAID, turns=[STEPS[i] for i in FLAT], steps_paid=True), 0.0)
    assert close(ascent(credit), factor * gradient_of(lambda theta: mean_reward(theta, PAID)))


def test_steps_that_are_normalised_in_the_group():
    """GRPO-PROCESS: the sum of the later steps' rewards on every token is each step's reward times the log-prob of all
    that was said up to its end.
    """
    row = replace(RL_PRESETS["grpo_process"], kl_loss_coef=0.0)
    found = ascent(assign(row, batch(PAID, steps=[STEPS[i] for i in FLAT]), 0.0))

    def truth(theta):
        said = torch.where(ON, toy.token_logps(theta), 0.0).cumsum(1)
        total = 0.0
        for a, b in PAIRS:
            flat = torch.tensor(STEPS[a][1] + STEPS[b][1], dtype=torch.float64)
            normal = (flat - flat.mean()) / (flat.std() + row.std_eps)
            upto = torch.cat([said[a, : len(STEPS[a][1])], said[b, : len(STEPS[b][1])]])
            total = total + P[a] * P[b] * (normal * upto).sum() / 2 * (flat.max() - flat.min() > 1e-6)
        return total

    assert close(found, gradient_of(truth))


@pytest.mark.parametrize("first", [0, 1])
def test_exact_values_at_step_borders_are_unbiased(first):
    """VINEPPO: V(next border) - V(border) on every token of a step, the first step ending with the token ``first``."""
    exact, steps, values = state_values(POLICY, REWARD), [], []
    for y in toy.COMPLETIONS:
        ends = [len(y) - 1] if len(y) - 1 <= first else [first, len(y) - 1]
        steps.append((ends, [0.0] * len(ends)))
        values.append([exact[()]] + [exact[y[: end + 1]] for end in ends[:-1]])
    credit = assign(RL_PRESETS["vineppo"], batch(REWARD, ALONE["of"], steps=steps, step_values=values), 0.0)
    assert close(ascent(credit, **ALONE), gradient_of(mean_reward))


def test_win_rates_over_an_opponent_less_the_kl():
    """NASH: P(y beats an opponent's answer) - 1/2 - tau log pi/ref is the gradient of P(pi beats the opponent) - tau
    KL, the opponent held fixed.
    """
    row, tau = RL_PRESETS["nash_md"], 0.1
    of, against = PAIRS[:, 0], PAIRS[:, 1]
    found = batch(np.zeros(N), of, kl_BT=kl_tokens()[of], preference_BO=WINS[of, against].numpy()[:, None])
    credit = assign(row, replace(found, group_of_B=np.arange(len(of))), row.kl_reward_coef)
    truth = gradient_of(lambda theta: (toy.probabilities(theta) * (WINS @ MU)).sum() - tau * toy.kl(theta, REF))
    assert row.kl_reward_coef == tau and close(ascent(credit, of, P[of] * MU[against], 1), truth)


def test_credit_by_what_the_maximum_would_lose_is_the_gradient_of_the_maximum():
    """pass@k: max r - max over the others is an unbiased baseline of E[max of the group]."""
    best = torch.maximum(REWARD[:, None], REWARD[None, :])

    def mean_of_the_best(theta):
        chance = toy.probabilities(theta)
        return chance @ best @ chance

    assert close(2 * ascent(assign(RL_PRESETS["grpo_passk"], batch(REWARD), 0.0)), gradient_of(mean_of_the_best))


def test_means_weighted_by_lengths():
    """OPO: a completion is compared with the other by the other's share of the tokens, so that where both are of one
    length the gradient is (G - 1)/G of the policy's.
    """
    lengths = toy.MASK.sum(1)
    weighed = lengths[None, :] / (lengths[:, None] + lengths[None, :]) * (REWARD[:, None] - REWARD[None, :])
    found = ascent(assign(RL_PRESETS["opo"], batch(REWARD), 0.0))
    assert close(found, gradient_of(lambda theta: toy.probabilities(theta) @ (weighed @ P)))
    assert not close(found, 0.5 * gradient_of(mean_reward))


def test_the_baseline_of_least_variance():
    """OTB: pair by pair, token by token, less the mean weighted by the squared norms of the log-prob's gradient up to
    there; nothing where one completion goes on alone.
    """
    energy = squared_norms()
    so_far = energy.cumsum(1)

    def expected(theta):
        logps, total = torch.where(ON, toy.token_logps(theta), 0.0), 0.0
        for i, j in PAIRS:
            for t in range(int(toy.MASK[i].sum())):
                baseline = (
                    (so_far[i, t] * REWARD[i] + so_far[j, t] * REWARD[j]) / (so_far[i, t] + so_far[j, t])
                    if ON[j, t]
                    else 0.0
                )
                total = total + P[i].detach() * P[j].detach() * (REWARD[i] - baseline) * logps[i, t]
        return total

    credit = assign(RL_PRESETS["otb"], batch(REWARD, energy_BT=energy.numpy()[FLAT]), 0.0)
    assert close(ascent(credit), gradient_of(expected))


def squared_norms():
    """[N, T]: of d log pi(y_t) / d logits, by autograd."""
    leaf, norms = POLICY.clone().requires_grad_(), torch.zeros(N, T, dtype=torch.float64)
    for i in range(N):
        for t in range(int(toy.MASK[i].sum())):
            norms[i, t] = torch.autograd.grad(toy.token_logps(leaf)[i, t], leaf)[0].square().sum()
    return norms


def test_every_advantage_has_an_oracle():
    assert set(ADVANTAGES) == {
        "reward_minus_baseline",
        "reward_to_go",
        "group_mean",
        "leave_one_out",
        "leave_one_out_max",
        "length_weighted",
        "token_baseline",
        "gae",
        "reward_minus_value",
        "turn_returns",
        "process",
        "vine",
        "win_rate",
    }


# --- surrogates ------------------------------------------------------------------------------------------------------


def descent(surrogate, sampled, chance, level="token", aggregation="seq-mean-token-sum", at=POLICY, **more):
    """E over ``chance`` of the loss's gradient at ``at``, the completions sampled from the policy ``sampled``."""
    theta = at.clone().requires_grad_()
    loss, _ = losses.policy_loss(
        toy.token_logps(theta),
        toy.token_logps(sampled),
        REWARD,
        toy.MASK,
        surrogate=surrogate,
        ratio_level=level,
        options=SURROGATE_OPTIONS.get(surrogate, {}),
        **more,
    )
    per_row = loss.sum(1) if aggregation == "seq-mean-token-sum" else loss.sum(1) / toy.MASK.sum(1)
    return toy.gradient((chance.detach() * per_row).sum(), theta)


@pytest.mark.parametrize("surrogate", losses.SURROGATES)
def test_every_surrogate_is_the_policy_gradient_where_the_policy_sampled(surrogate):
    """To a rounding of the gamma weights, which are 1 there."""
    assert close(descent(surrogate, POLICY, P), -gradient_of(mean_reward))


def test_sequence_ratios_where_the_policy_sampled():
    """PPO-SEQ: the product ratio is the policy gradient; GSPO: the geometric mean weighs every completion by one over
    its length.
    """
    assert close(descent("clip", POLICY, P, "sequence", "seq-mean-token-mean"), -gradient_of(mean_reward))
    shares = P * REWARD / toy.MASK.sum(1)
    assert close(
        descent("clip", POLICY, P, "sequence_mean", "seq-mean-token-mean"),
        -gradient_of(lambda theta: (shares * toy.sequence_logps(theta)).sum()),
    )


def test_capped_weights_under_another_policy():
    """CISPO: sum_t min(rho_t, 1 + eps) R grad log pi(y_t), over completions of another policy."""
    rho = torch.where(ON, (toy.token_logps(POLICY) - toy.token_logps(OTHER)).exp(), 0.0).clamp(max=1.28)
    truth = gradient_of(
        lambda theta: (MU[:, None] * rho * REWARD[:, None] * torch.where(ON, toy.token_logps(theta), 0.0)).sum()
    )
    assert close(descent("cispo", OTHER, MU, epsilon=0.2, epsilon_high=0.28), -truth)


def test_gamma_weights_and_soft_gates_under_another_policy():
    """VESPO: phi of the product ratio on log pi; SAPO: the derivative of the gate, token by token."""
    w = (toy.sequence_logps(POLICY) - toy.sequence_logps(OTHER)).exp()
    k, lam = torch.where(REWARD >= 0, 2.0, 3.0), torch.where(REWARD >= 0, 3.0, 2.0)
    phi = w**k * torch.exp(lam * (1 - w))
    assert close(
        descent("vespo", OTHER, MU), -gradient_of(lambda theta: (MU * phi * REWARD * toy.sequence_logps(theta)).sum())
    )
    rho = torch.where(ON, (toy.token_logps(POLICY) - toy.token_logps(OTHER)).exp(), 0.0)
    s = torch.sigmoid(torch.where(REWARD > 0, 1.0, 1.05)[:, None] * (rho - 1))
    weight = torch.where(ON, 4 * s * (1 - s) * rho, 0.0)
    assert close(
        descent("sapo", OTHER, MU),
        -gradient_of(
            lambda theta: (MU[:, None] * weight * REWARD[:, None] * torch.where(ON, toy.token_logps(theta), 0.0)).sum()
        ),
    )


# --- losses on whole responses ----------------------------------------------------------------------------------------


def responses(theta, of, sampled, advantages=None, values=None, preferences=None, pairs=False):
    def tokens(policy):
        return torch.where(ON, toy.token_logps(policy), 0.0)[of]

    spread = torch.zeros(len(of), T, dtype=torch.float64) if advantages is None else advantages[of]
    return Responses(
        tokens(theta),
        tokens(sampled),
        tokens(REF),
        ON[of],
        REWARD[of],
        spread * ON[of],
        values,
        torch.arange(len(of)).reshape(-1, 2) if pairs else torch.zeros(0, 2, dtype=torch.long),
        preferences,
    )


def objective_gradient(preset, chance, of=None, at=POLICY, sampled=POLICY, options=None, **more):
    """E over ``chance`` of the gradient of a preset's own loss; per pair where it is one on pairs."""
    row, of = RL_PRESETS[preset], np.arange(N) if of is None else of
    theta = at.clone().requires_grad_()
    values = resolve(row.objective)(responses(theta, of, sampled, **more), **{**row.options, **(options or {})})
    values = values.sum(-1) if values.dim() == 2 else values
    return toy.gradient((chance.detach() * values).sum(), theta)


PAIR_CHANCE = P[PAIRS[:, 0]] * P[PAIRS[:, 1]]
BY_REWARD = REWARD[:, None].expand(N, T)


def test_tapered_weights_are_importance_sampling_where_nothing_is_clipped():
    """OFFPOL-IS; TOPR: right answers at weight 1, wrong ones at most at theirs; A-LoL: wrong ones not at all."""
    kwargs = {"at": POLICY, "sampled": OTHER, "advantages": BY_REWARD}
    assert close(
        objective_gradient("offline_is", MU, options={"clip_pos": (0.0, 1e9), "clip_neg": (0.0, 1e9)}, **kwargs),
        -gradient_of(mean_reward),
    )
    w = (toy.sequence_logps(POLICY) - toy.sequence_logps(OTHER)).exp()
    for preset, right, wrong in (
        ("topr", torch.ones_like(w), w.clamp(max=1.0)),
        ("a_lol", w.clamp(max=2.0), 0.0 * w),
        ("offline_is", w.clamp(max=2.0), w.clamp(max=2.0)),
    ):
        weight = torch.where(REWARD > 0, right, wrong) * MU * REWARD
        assert close(
            objective_gradient(preset, MU, **kwargs),
            -gradient_of(lambda theta: (weight * toy.sequence_logps(theta)).sum()),
        ), preset


@pytest.mark.parametrize("form", ["separate", "joint"])
def test_pairwise_ppo_is_the_policy_gradient_where_the_policy_sampled(form):
    assert close(
        objective_gradient("p3o", PAIR_CHANCE, FLAT, options={"form": form}, pairs=True), -gradient_of(mean_reward)
    )


def test_contrastive_policy_gradient_is_that_of_the_regularised_reward():
    """CoPG on the policy's own pairs: twice the gradient of E[r] - beta KL, and 0 at the optimum whoever sampled."""
    beta = RL_PRESETS["copg"].options["beta"]
    assert close(objective_gradient("copg", PAIR_CHANCE, FLAT, pairs=True), -2 * gradient_of(regularised(beta)))
    best = table_of(oracles.kl_optimum(toy.probabilities(REF), REWARD, 1.0)["pi"])
    assert close(
        objective_gradient("copg", MU[PAIRS[:, 0]] * MU[PAIRS[:, 1]], FLAT, at=best, options={"beta": 1.0}, pairs=True),
        torch.zeros_like(POLICY),
    )


def table_of(distribution):
    """Logits of the policy with this distribution over completions."""
    p = torch.as_tensor(distribution, dtype=torch.float64)
    mass = lambda prefix: sum(p[i] for i, y in enumerate(toy.COMPLETIONS) if y[: len(prefix)] == prefix)
    found = torch.stack(
        [torch.stack([mass((*state, token)) for token in range(toy.VOCAB)]) for state in toy.STATES]
    ).log()
    assert torch.allclose(toy.probabilities(found), p, atol=1e-12)
    return found


def test_mirror_descent_starts_as_the_policy_gradient_and_pulls_back():
    """MDPO: at the iterate the gradient of E[A log pi]; away from it, tau times the log-ratio is taken off A."""
    assert close(objective_gradient("mdpo", P, advantages=BY_REWARD), -gradient_of(mean_reward))
    h = toy.sequence_logps(OTHER) - toy.sequence_logps(POLICY)
    truth = gradient_of(lambda theta: (P * (REWARD - 0.1 * h) * toy.sequence_logps(theta)).sum(), OTHER)
    assert close(objective_gradient("mdpo", P, at=OTHER, sampled=POLICY, advantages=BY_REWARD), -truth)


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_astar_po_is_the_regularised_policy_gradient_for_any_value_and_zero_at_the_optimum(value):
    beta = 0.7
    found = objective_gradient("astar_po", P, options={"beta": beta}, advantages=(REWARD - value)[:, None].expand(N, T))
    assert close(found, -2 * beta * gradient_of(regularised(beta)))
    star = oracles.kl_optimum(toy.probabilities(REF), REWARD, beta)
    exact = (REWARD - star["objective"])[:, None].expand(N, T)  # V* = beta log Z
    assert close(
        objective_gradient("astar_po", MU, at=table_of(star["pi"]), options={"beta": beta}, advantages=exact),
        torch.zeros_like(POLICY),
    )


def test_oreo_is_zero_at_the_soft_values_and_the_optimum():
    """Soft Bellman: V*(s) = beta log sum ref exp(r/beta) of what follows s. At every token of every completion both
    losses are 0, whoever sampled; with another V the policy's is not.
    """
    from stages.policy.sequence_losses import oreo_losses

    beta, ref = 0.7, toy.probabilities(REF)
    star = table_of(oracles.kl_optimum(ref, REWARD, beta)["pi"])
    soft = {}
    for prefix in toy.STATES:
        rows = [i for i, y in enumerate(toy.COMPLETIONS) if y[: len(prefix)] == prefix]
        soft[prefix] = float(beta * torch.log((ref[rows] / ref[rows].sum() * torch.exp(REWARD[rows] / beta)).sum()))
    values = torch.tensor(
        [[soft[y[:t]] if t < len(y) else 0.0 for t in range(T)] for y in toy.COMPLETIONS], dtype=torch.float64
    )
    ratio = torch.where(ON, toy.token_logps(star) - toy.token_logps(REF), 0.0)
    value, policy = oreo_losses(ratio, values, BY_REWARD, toy.MASK, beta)
    assert value.abs().max() < 1e-20 and policy.abs().max() < 1e-20
    row = replace(RL_PRESETS["oreo"], options={"beta": beta})
    targets = assign(
        row, batch(REWARD, ALONE["of"], values_BT=values.numpy(), log_ratio_BT=ratio.numpy()), 0.0
    ).returns_BT
    assert np.allclose(targets, np.where(ON, values, 0.0), atol=1e-12)  # what the critic regresses on
    assert not close(
        objective_gradient("oreo", MU, at=star, options={"beta": beta}, advantages=BY_REWARD, values=values + 1.0),
        torch.zeros_like(POLICY),
    )


def test_self_play_regression_is_the_gradient_of_the_win_rate():
    """SPPO at the iterate: -2 eta times the gradient of P(pi beats the iterate)."""
    wins = (WINS @ P - 0.5)[:, None].expand(N, T)
    truth = gradient_of(lambda theta: (toy.probabilities(theta) * (WINS @ P)).sum())
    assert torch.allclose(objective_gradient("sppo", P, advantages=wins), -2e3 * truth, atol=1e-7)


@pytest.mark.parametrize("tau", [0.3, 1.0])
def test_online_ipo_rests_at_the_equilibrium_and_moves_towards_it(tau):
    """ONLINE-IPO: the expected gradient is 0 at the Nash equilibrium of the regularised game, cycles included, and
    descending it from the reference gets there. With scores p is sigmoid(r - r').
    """
    for wins, preferences in (
        (WINS, WINS[FLAT, PAIRS[:, ::-1].reshape(-1)]),
        (torch.sigmoid(REWARD[:, None] - REWARD[None, :]), None),
    ):
        nash = oracles.nash_equilibrium(toy.probabilities(REF), wins, tau)
        at = torch.as_tensor(nash)
        chance = lambda p: p[PAIRS[:, 0]] * p[PAIRS[:, 1]]
        options = {"options": {"tau": tau}, "pairs": True, "preferences": preferences}
        assert torch.allclose(
            objective_gradient("online_ipo", chance(at), FLAT, at=table_of(at), **options),
            torch.zeros_like(POLICY),
            atol=1e-9,
        )
        theta = REF.clone()
        first = objective_gradient("online_ipo", chance(toy.probabilities(REF)), FLAT, at=REF, **options)
        # at the reference: -4/tau times the gradient of the win rate over it
        truth = gradient_of(lambda logits: (toy.probabilities(logits) * (wins @ toy.probabilities(REF))).sum(), REF)
        assert torch.allclose(first, -4 / tau * truth, atol=1e-9)
        for _ in range(375):
            theta = theta - 0.6 * objective_gradient(
                "online_ipo", chance(toy.probabilities(theta)), FLAT, at=theta, **options
            )
        assert torch.allclose(toy.probabilities(theta), at, atol=2e-3)


def test_every_loss_on_whole_responses_has_an_oracle():
    assert {row.objective.partition(":")[2] for row in RL_PRESETS.values() if row.objective} == {
        "tapered",
        "pairwise_ppo",
        "contrastive",
        "mirror_descent",
        "optimal_advantage",
        "soft_bellman",
        "win_rate_regression",
        "on_policy_ipo",
    }
