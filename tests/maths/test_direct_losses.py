"""Losses of direct alignment next to the formulas written out in plain Python, and their defaults next to the rows of
the table.
"""

from __future__ import annotations

import inspect
import itertools
import math

import pytest
import torch

from stages.algorithms import DIRECT_METHODS, resolve
from stages.direct import direct_losses as losses

#: Log-probs of chosen and rejected, under the policy and the reference: margins below and above 0, near and far.
PAIRS = [
    (-3.0, -5.0, -4.0, -4.5),
    (-9.0, -2.0, -4.0, -3.0),
    (-1.0, -40.0, -20.0, -6.0),
    (-30.0, -1.0, -2.0, -12.0),
    (-6.0, -6.5, -6.0, -6.5),
]


def columns(dtype=torch.float64):
    return [torch.tensor(column, dtype=dtype) for column in zip(*PAIRS)]


def sigmoid(x):
    return 1.0 / (1.0 + math.exp(-x))


def logistic(x):
    return math.log1p(math.exp(-x)) if x > -30 else -x


def differences():
    return [(pc - rc) - (pr - rr) for pc, pr, rc, rr in PAIRS]


def assert_close(found, wanted):
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("beta", [0.05, 1.3])
def test_discovered_losses_are_their_formulas(beta):
    """da.discopop: the family, the gate between both ends, PFL and AQL with the mean over the rows given."""
    us = [beta * h for h in differences()]
    gates = [sigmoid(u / 0.4) for u in us]
    assert_close(
        losses.discopop_loss(*columns(), beta=beta, discopop_tau=0.4),
        [(1 - g) * logistic(u) + g * math.exp(-u) for g, u in zip(gates, us)],
    )
    assert_close(
        losses.discovered_loss(*columns(), beta=beta, member="cell"), [(logistic(u) + math.exp(-u)) / 2 for u in us]
    )
    assert_close(
        losses.discovered_loss(*columns(), beta=beta, member="padll"),
        [(0.45 if u < 0 else 0.9) * logistic(u) for u in us],
    )
    at_reference = [torch.tensor([x]) for x in (-30.0, -20.0, -30.0 * (1 - 2**-23), -20.0)]  # h < 0 by one rounding
    torch.testing.assert_close(
        losses.discovered_loss(*at_reference, beta=beta, member="padll"), torch.tensor([0.9 * math.log(2)])
    )
    assert_close(
        losses.policy_focused_loss(*columns(), beta=beta),
        [logistic(u) / 2 if pair[0] > pair[1] else 2 * max(0.0, 1 - u) for u, pair in zip(us, PAIRS)],
    )
    mean = sum(differences()) / len(PAIRS)
    middle = 0.5 + 0.01 * (sigmoid(mean) - 0.5)
    shares = [sigmoid(-beta * (h - middle)) for h in differences()]
    assert_close(
        losses.adaptive_quantile_loss(*columns(), beta=beta, mean_h=torch.tensor(mean, dtype=torch.float64)),
        [q * logistic(u) + (1 - q) * max(0.0, 1 - u) for q, u in zip(shares, us)],
    )


def test_discopop_stays_finite_where_its_gate_is_shut():
    """exp(-u) of a pair far below 0 is cut at exp(80), where the gate leaves nothing of it: value and gradient are the
    logistic loss's.
    """
    policy = torch.tensor([-200.0], dtype=torch.float32, requires_grad=True)
    zero = torch.zeros(1)
    loss = losses.discopop_loss(policy, zero, zero, zero, beta=1.0)
    loss.sum().backward()
    assert loss.item() == pytest.approx(200.0) and policy.grad.item() == pytest.approx(-1.0)


def test_a_ranking_under_its_reference_is_plackett_lucean():
    """da.pl_dpo: the probability of the order is counted in implicit rewards, so the reference enters with a minus."""
    policy, reference = [-3.0, -4.5, -2.0, -9.0], [-5.0, -4.0, -2.5, -6.0]
    scores = [0.3 * (p - r) for p, r in zip(policy, reference)]
    wanted = -sum(scores[k] - math.log(sum(math.exp(s) for s in scores[k:])) for k in range(len(scores)))
    lengths = torch.ones(4, dtype=torch.float64)
    found = losses.pl_dpo_loss(
        torch.tensor(policy, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64), lengths, beta=0.3
    )
    assert found.item() == pytest.approx(wanted, rel=1e-12)


def test_sppo_regresses_on_the_win_rate_by_one_over_beta():
    """da.sppo: mean over the responses of (log-ratio - (P - 1/2) / beta)^2."""
    policy, reference, rates, beta = [-3.0, -4.5, -2.0], [-5.0, -4.0, -2.5], [0.9, 0.2, 0.5], 0.25
    wanted = sum((p - r - (w - 0.5) / beta) ** 2 for p, r, w in zip(policy, reference, rates)) / 3
    tensors = [torch.tensor(values, dtype=torch.float64) for values in (policy, reference, [4.0, 2.0, 9.0], rates)]
    assert losses.sppo_loss(*tensors[:3], beta=beta, win_prob=tensors[3]).item() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("average", [False, True])
def test_rrhf_counts_pairs_of_unequal_reward(average):
    """da.rrhf: ties make no pair; ``average`` divides by the pairs that there are and the best response's term by its
    length.
    """
    policy, lengths, rewards = [-6.0, -2.0, -10.0, -3.0], [3.0, 2.0, 4.0, 6.0], [1.0, 2.0, 2.0, 0.0]
    means = [p / n for p, n in zip(policy, lengths)]
    pairs = [(i, j) for i, j in itertools.permutations(range(4), 2) if rewards[i] < rewards[j]]
    ranked = sum(max(0.0, means[i] - means[j]) for i, j in pairs)
    wanted = ranked / len(pairs) - means[1] if average else ranked - policy[1]
    tensors = [torch.tensor(values, dtype=torch.float64) for values in (policy, lengths, rewards)]
    assert losses.rrhf_loss(tensors[0], None, tensors[1], rewards=tensors[2], average=average).item() == pytest.approx(
        wanted, rel=1e-12
    )
    equal = torch.ones(4, dtype=torch.float64)
    assert losses.rrhf_loss(tensors[0], None, tensors[1], rewards=equal, average=average).item() == pytest.approx(
        -means[0] if average else -policy[0]
    )


def test_segments_are_paired_weighted_and_signed():
    """da.2d_dpo: -log sigma of beta times what the chosen segment gained less what the rejected one did, by its
    weights.
    """
    gains = ([1.5, -0.5], [-2.0, 0.25], [2.0, 0.5], [1.0, 3.0])
    wanted = sum(logistic(0.4 * (w * c - v * r)) for c, r, w, v in zip(*gains))
    assert losses.two_d_dpo_loss(
        *(torch.tensor(values, dtype=torch.float64) for values in gains), beta=0.4
    ).item() == pytest.approx(wanted, rel=1e-12)


def test_one_pair_without_a_gap_is_enough_to_refuse_an_offset():
    with pytest.raises(ValueError, match="not above its rejected score"):
        losses.odpo_offset(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0]))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_exo_needs_a_smoothed_label(share):
    with pytest.raises(ValueError, match="write 0.001"):
        losses.exo_pair_loss(*columns(), label_smoothing=share)


# of rows that share a loss the first
@pytest.mark.parametrize("name", {row.loss: row.name for row in reversed(DIRECT_METHODS.values())}.values())
def test_a_loss_called_by_itself_has_the_defaults_of_its_row(name):
    """One method, one set of defaults: what the function does without its options is what ``align`` does without its
    settings.
    """
    row = DIRECT_METHODS[name]
    parameters = inspect.signature(resolve(row.loss)).parameters
    given = dict(row.options) | ({} if row.default_beta is None else {"beta": row.default_beta})
    differ = {
        option: (parameters[option].default, value)
        for option, value in given.items()
        if option in parameters
        and parameters[option].default is not inspect.Parameter.empty
        and parameters[option].default != value
    }
    assert not differ, f"(default of the function, of the row): {differ}"
