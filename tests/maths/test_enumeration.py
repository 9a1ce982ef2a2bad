"""Estimators and policy gradients against exact sums over every completion of a toy language."""

import itertools

import numpy as np
import pytest
import torch

from stages import algorithms, estimators, losses
from stages.direct import direct_losses
from tests import oracles
from tests.maths import toy
from tests.production import full_kl

POLICY, REF = toy.random_policy(1), toy.random_policy(2)
REWARD = torch.randn(len(toy.COMPLETIONS), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
P = toy.probabilities(POLICY)


def leaf():
    return POLICY.clone().requires_grad_()


def test_the_toy_language_is_a_distribution():
    assert P.sum().item() == pytest.approx(1.0, abs=1e-12)


# --- KL estimators --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_estimators_by_enumeration(kind):
    """E_pi of the summed estimator is the exact sequence KL for k1; k3 is unbiased per token given the prefix."""
    k = losses.kl_estimate(toy.token_logps(POLICY), toy.token_logps(REF), kind, toy.MASK)
    assert (P @ k.sum(1)).item() == pytest.approx(toy.kl(POLICY, REF).item(), abs=1e-10)


def test_k3_is_nonnegative_and_k2_is_biased():
    k = {
        n: losses.kl_estimate(toy.token_logps(POLICY), toy.token_logps(REF), n, toy.MASK) for n in losses.KL_ESTIMATORS
    }
    assert (k["k3"] >= 0).all()
    assert abs((P @ k["k2"].sum(1)).item() - toy.kl(POLICY, REF).item()) > 1e-3


def single_step(kind, weighted=False):
    """E over fixed samples of the gradient of the estimate, at one state with three actions."""
    pi, ref = torch.softmax(POLICY[0], 0), torch.log_softmax(REF[0], 0)
    theta = POLICY[0].clone().requires_grad_()
    logp = torch.log_softmax(theta, 0)
    estimate = losses.kl_estimate(logp, ref, kind, torch.ones(3), pi.log() if weighted else None)
    return torch.autograd.grad((pi * estimate).sum(), theta)[0]


def exact_single(direction):
    theta = POLICY[0].clone().requires_grad_()
    return torch.autograd.grad(full_kl(theta, REF[0], direction=direction), theta)[0]


def test_gradients_of_kl_in_the_loss():
    """k2 and the ratio-weighted forms give the reverse-KL gradient, k3 the forward one, k1 none."""
    reverse, forward = exact_single("reverse"), exact_single("forward")
    assert torch.allclose(single_step("k2"), reverse, atol=1e-10)
    assert torch.allclose(single_step("k1", True), reverse, atol=1e-10) and torch.allclose(
        single_step("k3", True), reverse, atol=1e-10
    )
    assert torch.allclose(single_step("k3"), forward, atol=1e-10) and not torch.allclose(forward, reverse, atol=1e-3)
    assert torch.allclose(single_step("k1"), torch.zeros(3, dtype=torch.float64), atol=1e-12)


def surrogate_gradient(advantages, surrogate="logp", mode="sum"):
    """E_pi of the gradient of the policy loss with the given [completions] or [completions, T] advantages."""
    theta = leaf()
    logp = toy.token_logps(theta)
    loss, _ = losses.policy_loss(logp, logp.detach(), advantages, toy.MASK, surrogate=surrogate)
    return toy.gradient((P.detach() * loss.sum(1)).sum(), theta)


def exact_gradient(of):
    theta = leaf()
    return toy.gradient(of(theta), theta)


def test_kl_in_the_reward_gives_the_reverse_kl_gradient():
    """Every linear placement of k1 in the reward: sequence sum, and per token with returns."""
    kl = losses.kl_estimate(toy.token_logps(POLICY), toy.token_logps(REF), "k1", toy.MASK)
    truth = exact_gradient(lambda theta: toy.kl(theta, REF))
    zero = np.zeros(len(P))
    summed = estimators.shape_rewards(zero, kl, toy.MASK, 1.0, "sequence_sum")
    tokens = estimators.shape_rewards(zero, kl, toy.MASK, 1.0, "token_terminal")
    to_go = estimators.reward_to_go(tokens, toy.MASK)
    assert torch.allclose(surrogate_gradient(torch.tensor(summed)), truth, atol=1e-10)
    assert torch.allclose(surrogate_gradient(torch.tensor(to_go)), truth, atol=1e-10)
    k3 = losses.kl_estimate(toy.token_logps(POLICY), toy.token_logps(REF), "k3", toy.MASK)
    biased = estimators.shape_rewards(zero, k3, toy.MASK, 1.0, "sequence_sum")
    assert not torch.allclose(surrogate_gradient(torch.tensor(biased)), truth, atol=1e-3)


# --- policy gradients ---------------------------------------------------------------------------------------


def reward_gradient():
    return exact_gradient(lambda theta: -(toy.probabilities(theta) * REWARD).sum())


@pytest.mark.parametrize("surrogate", ["logp", "none", "clip", "stopgrad_ratio"])
def test_policy_gradients_by_enumeration(surrogate):
    """On-policy every surrogate has the gradient of -E[R], with and without a constant baseline."""
    for baseline in (0.0, 1.7):
        assert torch.allclose(surrogate_gradient(REWARD - baseline, surrogate), reward_gradient(), atol=1e-10)


def test_reward_to_go_and_gae_with_exact_values_are_unbiased():
    terminal = estimators.place_terminal(REWARD, toy.MASK)
    to_go = estimators.reward_to_go(terminal, toy.MASK)
    assert torch.allclose(surrogate_gradient(torch.tensor(to_go)), reward_gradient(), atol=1e-10)
    value = {}
    for prefix in sorted(toy.STATES, key=len, reverse=True):
        below = [y for y in toy.COMPLETIONS if y[: len(prefix)] == prefix]
        w = torch.stack([P[toy.COMPLETIONS.index(y)] for y in below])
        value[prefix] = float((w * torch.stack([REWARD[toy.COMPLETIONS.index(y)] for y in below])).sum() / w.sum())
    values = np.array([[value[y[:t]] if t < len(y) else np.nan for t in range(toy.HORIZON)] for y in toy.COMPLETIONS])
    for lam in (0.0, 0.7, 1.0):
        adv, _ = estimators.gae(terminal, values, toy.MASK, 0.0, 1.0, lam)
        assert torch.allclose(surrogate_gradient(torch.tensor(adv)), reward_gradient(), atol=1e-10), lam
    wrong, _ = estimators.gae(terminal, np.where(np.isnan(values), np.nan, 5.0 * values), toy.MASK, 0.0, 1.0, 0.0)
    assert not torch.allclose(surrogate_gradient(torch.tensor(wrong)), reward_gradient(), atol=1e-3)


@pytest.mark.parametrize("mode, factor", [("leave_one_out", 1.0), ("mean", 0.5)])
def test_group_advantages_in_expectation(mode, factor):
    """Groups of 2: leave-one-out is unbiased, the group mean shrinks the gradient by exactly (G-1)/G."""
    weights = np.zeros(len(P))
    for a, b in itertools.product(range(len(P)), repeat=2):
        adv, _ = estimators.group_advantage(REWARD[[a, b]], ["q", "q"], mode)
        both = float(P[a] * P[b])
        weights[a] += both * adv[0] / 2
        weights[b] += both * adv[1] / 2
    got = surrogate_gradient(torch.tensor(weights) / P)
    assert torch.allclose(got, factor * reward_gradient(), atol=1e-10)


@pytest.mark.parametrize("preset, biased", [("grpo", True), ("dr_grpo", False), ("dapo", False)])
def test_the_sequence_mean_spares_long_wrong_answers(preset, biased):
    """AGG, Dr. GRPO: every completion of the toy language sampled once, one of them right. The shipped advantage and
    loss give each token of a wrong answer a weight that falls as 1/length under the sequence mean and is one constant
    otherwise; a step of the distribution along these weights then makes wrong answers longer, or leaves their lengths
    alone."""
    row = algorithms.RL_PRESETS[preset]
    lengths = toy.MASK.sum(1)
    rewards = np.zeros(len(P))
    rewards[3] = 1.0
    wrong = torch.tensor(rewards == 0)
    advantages, _ = estimators.group_advantage(rewards, ["q"] * len(P), row.group_mode)
    logps = torch.where(toy.MASK.bool(), toy.token_logps(POLICY), 0.0).detach().requires_grad_()
    per_token, _ = losses.policy_loss(
        logps, logps.detach(), torch.tensor(advantages), toy.MASK, surrogate=row.surrogate, epsilon=row.epsilon
    )
    total, counts = losses.aggregate(per_token, toy.MASK, row.aggregation, float(toy.HORIZON))
    # how much one step raises the log-prob of each token
    push = -toy.gradient(total / counts[losses.denominator_of(row.aggregation)], logps)
    by_length = {int(n): torch.unique(push[wrong & (lengths == n)][:, :n].round(decimals=12)) for n in lengths.unique()}
    assert sorted(by_length) == [1, 2, 3] and all(
        values.numel() == 1 and values.item() < 0 for values in by_length.values()
    )
    short, middle, long = (by_length[n].item() for n in (1, 2, 3))
    assert (short, short) == (
        pytest.approx(2 * middle if biased else middle),
        pytest.approx(3 * long if biased else long),
    )

    def wrong_length(probability):
        return float((probability * lengths)[wrong].sum() / probability[wrong].sum())

    # natural gradient of the distribution over completions: d log p(y) is the weight of y's tokens
    moved = P * torch.exp(0.5 * push[:, 0] / abs(short))
    assert (
        wrong_length(moved) > wrong_length(P) + 0.01
        if biased
        else wrong_length(moved) == pytest.approx(wrong_length(P), abs=1e-12)
    )


def test_importance_sampling_recovers_the_target_policys_gradient():
    """CPI with a product ratio under samples of another policy."""
    behaviour = toy.random_policy(5)
    mu = toy.probabilities(behaviour)
    theta = leaf()
    loss, _ = losses.policy_loss(
        toy.token_logps(theta),
        toy.token_logps(behaviour),
        REWARD,
        toy.MASK,
        surrogate="none",
        ratio_level="sequence",
        log_ratio_clamp=50.0,
    )
    per_sequence = loss.sum(1) / toy.MASK.sum(1)
    assert torch.allclose(toy.gradient((mu * per_sequence).sum(), theta), reward_gradient(), atol=1e-10)


def test_training_on_exact_gradients_reaches_the_kl_optimum():
    """REINFORCE with k1 in the reward, and DPO on population preferences, converge to ref exp(r/beta)/Z."""
    ref = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    r = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
    beta = 0.5
    target = torch.tensor(oracles.kl_optimum(ref, r, beta)["pi"])
    theta = ref.log().clone()
    for _ in range(3000):
        pi = torch.softmax(theta, 0)
        shaped = estimators.shape_rewards(
            r.numpy(), (pi.log() - ref.log()).numpy()[:, None], np.ones((3, 1)), beta, "sequence_sum"
        )
        theta = theta + 0.5 * torch.tensor(oracles.softmax_policy_gradient(pi, shaped))
    assert torch.allclose(torch.softmax(theta, 0), target, atol=1e-3)
    theta = ref.log().clone().requires_grad_()
    optimizer = torch.optim.Adam([theta], lr=0.05)
    preferred = torch.sigmoid(r.unsqueeze(1) - r.unsqueeze(0)).flatten()
    for _ in range(1500):
        logp = torch.log_softmax(theta, 0)
        loss = losses.dpo_loss(
            logp.repeat_interleave(3),
            logp.repeat(3),
            ref.log().repeat_interleave(3),
            ref.log().repeat(3),
            beta=beta,
            label_prob=preferred,
        )
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    assert torch.allclose(torch.softmax(theta.detach(), 0), target, atol=1e-3)


def test_ipo_and_rebel_reach_their_oracles():
    ref = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    pref, tau = torch.tensor([[0.5, 0.8, 0.9], [0.2, 0.5, 0.7], [0.1, 0.3, 0.5]], dtype=torch.float64), 0.5
    rewards = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
    a, b = torch.arange(3).repeat_interleave(3), torch.arange(3).repeat(3)
    cases = {
        "ipo": (
            lambda logp: direct_losses.ipo_loss(
                logp[a], logp[b], ref.log()[a], ref.log()[b], beta=tau, label_prob=pref.flatten()
            ).mean(),
            oracles.psi_po_optimum(ref, pref, tau)["pi"],
        ),
        "rebel": (
            lambda logp: direct_losses.rebel_pair_loss(
                logp[a], logp[b], ref.log()[a], ref.log()[b], beta=0.5, score_gap=rewards[a] - rewards[b]
            ).mean(),
            oracles.kl_optimum(ref, rewards, 0.5)["pi"],
        ),
    }
    for name, (loss, target) in cases.items():
        theta = ref.log().clone().requires_grad_()
        optimizer = torch.optim.Adam([theta], lr=0.05)
        for _ in range(1500):
            optimizer.zero_grad()
            loss(torch.log_softmax(theta, 0)).backward()
            optimizer.step()
        assert np.allclose(torch.softmax(theta.detach(), 0), target, atol=1e-3), name
