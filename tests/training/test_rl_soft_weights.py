"""What weighs or leaves out tokens and responses of the policy loss: SAPO's gate, VESPO's weights, off-policy masking,
high-entropy tokens, bounds of importance weights.
"""

import math

import numpy as np
import pytest
import torch

from stages.algorithms import SURROGATE_OPTIONS
from stages.estimators import top_entropy_tokens
from stages.generation import Sample
from stages.losses import gamma_weights, off_policy_keep, policy_loss, soft_gate, truncated_importance_weights
from stages.models.modeling import load_policy
from stages.policy.policy_update import PolicyGradient
from stages.rl import Config, resolve_preset
from stages.rollouts.groups import Group
from stages.spec import ConfigError
from tests.training.test_rl_parts import rl, rows_of  # noqa: F401

NAN = float("nan")


def by_hand(surrogate, logps, old, A, mask, options, weights=None):
    """The loss of every trained token, as the papers print it, in plain arithmetic on 0-dim tensors."""
    rows = []
    for i in range(len(logps)):
        live = [t for t in range(logps.shape[1]) if mask[i, t]]
        W = math.exp(
            sum(
                float(logps[i, t].detach() - old[i, t])
                + (math.log(float(weights[i, t])) if weights is not None else 0.0)
                for t in live
            )
        )
        row = []
        for t in range(logps.shape[1]):
            if t not in live:
                row.append(torch.zeros((), dtype=logps.dtype))
                continue
            rho = torch.exp(logps[i, t] - old[i, t])
            if surrogate == "sapo":
                tau = options["tau_pos"] if A[i, t] > 0 else options["tau_neg"]
                row.append(-A[i, t] * (4 / tau) / (1 + torch.exp(-tau * (rho - 1))))
            else:
                k, rate = (
                    (options["k_pos"], options["lambda_pos"])
                    if A[i, t] >= 0
                    else (options["k_neg"], options["lambda_neg"])
                )
                row.append(-(W**k * math.exp(rate * (1 - W))) * A[i, t] * logps[i, t])
        rows.append(torch.stack(row))
    return torch.stack(rows)


@pytest.mark.parametrize(
    "surrogate, options",
    [
        *SURROGATE_OPTIONS.items(),
        ("sapo", {"tau_pos": 3.0, "tau_neg": 0.4}),
        ("vespo", {"k_pos": 0.7, "lambda_pos": 0.3, "k_neg": 4.0, "lambda_neg": 5.0}),
    ],
)
@pytest.mark.parametrize("weighted", (False, True))
def test_soft_weights_equal_an_independent_computation(surrogate, options, weighted):
    """Values, gradients and the mean weight of the log, in float64; what lies outside the mask may be anything."""
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    logps = (-torch.rand(4, 4, dtype=torch.float64)).requires_grad_()
    old = logps.detach() + 0.3 * torch.randn(4, 4, dtype=torch.float64)
    A = torch.randn(4, 4, dtype=torch.float64)
    weights = 0.5 + torch.rand(4, 4, dtype=torch.float64)
    A[2, 1] = 0.0
    junk = [torch.where(mask, x, NAN) for x in (old, A, weights)]
    found, sums = policy_loss(
        torch.where(mask, logps, -torch.inf),
        junk[0],
        junk[1],
        mask,
        surrogate=surrogate,
        weights_BT=junk[2] if weighted else None,
        options=options,
    )
    expected = by_hand(surrogate, logps, old, A, mask, options, weights if weighted and surrogate == "vespo" else None)
    if weighted and surrogate == "sapo":
        expected = expected * torch.where(mask, weights, 0.0)
    assert torch.allclose(found, expected, atol=1e-12)
    ours, theirs = (torch.autograd.grad(x.sum(), logps, retain_graph=True)[0] for x in (found, expected))
    assert torch.allclose(ours, theirs, atol=1e-12) and float(ours.abs().max()) > 1e-2 and not ours[~mask].any()
    if not weighted:  # the gradient of rho A (sapo) or A log pi (vespo) times the logged weight
        plain = -torch.exp(logps - old) * A if surrogate == "sapo" else -A * logps
        unit = torch.where(mask, torch.autograd.grad(torch.where(mask, plain, 0.0).sum(), logps)[0], 0.0)
        ratios = (ours / unit)[mask & (A != 0)]
        zero = (
            soft_gate(torch.exp(logps - old)[2, 1], A[2, 1], **options)[1]
            if surrogate == "sapo"
            else gamma_weights(logps - old, A, mask, **options)[2, 1]
        )
        assert float(sums["soft_weight"]) == pytest.approx(float(ratios.sum() + zero))


def test_soft_weights_are_one_on_policy_and_fade_on_both_sides():
    ones = torch.zeros(2, 3, dtype=torch.float64)
    A = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    mask = torch.ones(2, 3)
    assert torch.equal(soft_gate(ones.exp(), A)[1], torch.ones(2, 3, dtype=torch.float64))
    assert torch.equal(gamma_weights(ones, A, mask), torch.ones(2, 3, dtype=torch.float64))
    ratio = torch.tensor([0.0, 0.5, 1.0, 2.0, 50.0], dtype=torch.float64)
    assert (soft_gate(ratio, torch.tensor(1.0))[1].diff()[:2] > 0).all() and (
        soft_gate(ratio, torch.tensor(1.0))[1].diff()[2:] < 0
    ).all()
    grid = torch.linspace(0.01, 4, 400, dtype=torch.float64)
    for sign, k, rate in ((1.0, 2.0, 3.0), (-1.0, 3.0, 2.0)):
        phi = gamma_weights(grid.log()[:, None], torch.full((400, 1), sign, dtype=torch.float64), torch.ones(400, 1))[
            :, 0
        ]
        assert float(grid[phi.argmax()]) == pytest.approx(k / rate, abs=0.01)
    far = gamma_weights(
        torch.tensor([[20.0] * 50, [-20.0] * 50]), torch.ones(2, 1), torch.ones(2, 50), torch.zeros(2, 50)
    )
    assert torch.isfinite(far).all() and float(far.max()) < 1e-10  # weights of 0 (token_mask) too


def test_off_policy_masking_drops_far_responses_of_negative_advantage_only():
    """DeepSeek-V3.2, eq. 9: rows are far and bad, far and good, near and bad, bad on average near, empty; a threshold
    is still near.
    """
    logps = torch.tensor(
        [[-2.0, -2.0], [-2.0, -2.0], [-1.1, -1.1], [-3.0, 1.0], [-2.0, -2.0], [-1.5, -9.0]], requires_grad=True
    )
    mu, mask = torch.full((6, 2), -1.0), torch.tensor([[1, 1], [1, 1], [1, 1], [1, 1], [0, 0], [1, 0]])
    mu[5, 1] = NAN
    A = torch.tensor([[-1.0], [1.0], [-1.0], [-1.0], [-1.0], [-1.0]])
    keep = off_policy_keep(logps, mu, A, mask, 0.5)
    assert keep[:, 0].tolist() == [False, True, True, True, True, True] and not keep.requires_grad
    by_token = off_policy_keep(logps, mu, A.expand(6, 2) * torch.tensor([1.0, -1.0]), mask, 0.5)
    assert by_token[0].tolist() == [False, True] and by_token[1].tolist() == [True, False]


def test_high_entropy_tokens_are_the_top_share_of_the_batch():
    entropies = np.array([[0.1, 0.9, 0.5, NAN], [0.7, 0.3, 9.0, 9.0]])
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0]])
    for share, kept in ((0.2, [0.9]), (0.5, [0.9, 0.7, 0.5]), (1.0, [0.1, 0.9, 0.5, 0.7, 0.3])):
        found, threshold = top_entropy_tokens(entropies, mask, share)
        assert sorted(entropies[found]) == sorted(kept) and not found[mask == 0].any()
        assert threshold == pytest.approx(
            float(torch.quantile(torch.tensor([0.1, 0.9, 0.5, 0.7, 0.3], dtype=torch.float64), 1 - share))
        )
    tied, _ = top_entropy_tokens(np.ones((2, 3)), np.ones((2, 3)), 0.2)
    assert tied.all()  # equal tokens are in together
    none, threshold = top_entropy_tokens(entropies, np.zeros((2, 4)), 0.2)
    assert not none.any() and threshold == 0.0


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("token_truncate", [[0.5, 1.0, 2.0]]),
        ("token_mask", [[0.0, 1.0, 0.0]]),
        ("sequence_truncate", [[1.0]]),
        ("sequence_mask", [[1.0]]),
    ],
)
def test_importance_weights_have_a_lower_bound(mode, expected):
    ratio = torch.tensor([[0.25, 1.0, 4.0]])
    assert torch.allclose(
        truncated_importance_weights(ratio.log(), torch.zeros(1, 3), torch.ones(1, 3), mode, 2.0, 0.5),
        torch.tensor(expected),
    )
    small = truncated_importance_weights(torch.full((1, 3), -1.0), torch.zeros(1, 3), torch.ones(1, 3), mode, 2.0, 0.5)
    assert (small == (0.5 if mode.endswith("truncate") else 0.0)).all()
    # no bound unless one is given
    assert (
        truncated_importance_weights(torch.full((1, 3), -1.0), torch.zeros(1, 3), torch.ones(1, 3), mode, 2.0) > 0
    ).all()


@pytest.mark.parametrize(
    "config, text",
    [
        ({"preset": "topr", "top_entropy_quantile": 0.2}, "preset=grpo"),
        ({"preset": "trpo", "top_entropy_quantile": 0.2}, "preset=grpo"),
        ({"preset": "grpo", "off_policy_mask_threshold": 0.1}, "num_iterations=2"),
        ({"preset": "sppo", "off_policy_mask_threshold": 0.1}, "preset=grpo"),
        ({"preset": "grpo", "importance_clip_min": 0.5}, "importance_correction=token_truncate"),
        (
            {"preset": "grpo", "importance_correction": "token_mask", "importance_clip_min": 3.0},
            "importance_clip_min=0.5",
        ),
        ({"preset": "vespo", "importance_correction": "sequence_mask"}, "token_truncate"),
        ({"preset": "vespo", "ratio_level": "sequence"}, "surrogate=clip"),
        ({"preset": "sapo", "epsilon": 0.1}, "surrogate=clip"),
        ({"preset": "grpo", "options": {"tau_pos": 1.0}}, "has none"),
        ({"preset": "sapo", "options": {"k_pos": 1.0}}, "tau_pos, tau_neg"),
        ({"preset": "sapo", "options": {"tau_neg": 0.0}}, "number > 0"),
    ],
)
def test_what_nothing_would_read_is_refused(config, text):
    with pytest.raises((ValueError, ConfigError), match=text):
        resolve_preset(Config(**config))


def test_a_surrogate_brings_its_constants_to_any_preset():
    row, _ = resolve_preset(Config(preset="dr_grpo", surrogate="sapo", options={"tau_neg": 2.0}))
    assert row.options == {"tau_pos": 1.0, "tau_neg": 2.0} and row.aggregation == "seq-mean-token-sum-norm"
    assert (
        Config(preset="vespo").effective()["options"] == SURROGATE_OPTIONS["vespo"]
        and resolve_preset(Config(preset="grpo"))[0].options == {}
    )


def test_the_stage_trains_on_high_entropy_tokens_and_drops_far_responses(rl):  # noqa: F811
    """The logged loss follows from the rollouts: with one token in three of the highest entropy, and without the bad
    responses the policy has left.
    """
    from stages.models.modeling import load_policy
    from tests.training.test_rl_presets import logps_of

    settings = {"preset": "dr_grpo", "max_steps": 2, "num_iterations": 2, "learning_rate": 3e-3, "beta": 0.0}
    result, metrics = rl("entropy", {**settings, "top_entropy_quantile": 0.3, "max_steps": 1})
    rows = rows_of(result)
    policy = load_policy(rl.tiny["policy"]).double()
    with torch.no_grad():
        full = [logps_of(policy, row)[1] for row in rows]
    entropies = [-(f.exp() * f).sum(-1) for f in full]
    threshold = float(torch.quantile(torch.cat(entropies), 0.7))
    assert metrics[0]["entropy/threshold"] == pytest.approx(threshold, abs=1e-4)
    kept = -sum(row["advantages"][0] * float((e >= threshold).sum()) for row, e in zip(rows, entropies)) / len(rows) / 6
    assert metrics[0]["loss"] == pytest.approx(kept, abs=1e-5) and abs(kept) > 1e-3

    result, metrics = rl("far", {**settings, "off_policy_mask_threshold": 0.02})
    rows = rows_of(result)
    after = load_policy(rl("first", {**settings, "max_steps": 1})[0]["outputs"]["model"]["path"]).double()
    loss = dropped = 0.0
    for row in rows:
        with torch.no_grad():
            d = logps_of(after, row)[0] - torch.tensor(row["logp_old"], dtype=torch.float64)
        A = row["advantages"][0]
        if A < 0 and float(-d.mean()) > 0.02:
            dropped += row["length"]
            continue
        loss -= float(torch.minimum(d.exp() * A, d.exp().clamp(0.8, 1.2) * A).sum()) / 8 / 6
    assert dropped and metrics[1]["loss"] == pytest.approx(loss, rel=1e-3, abs=1e-5)
    groups = [rows[i : i + 4] for i in range(0, len(rows), 4)]
    # groups of equal rewards do not go through the model
    forwarded = sum(row["length"] for group in groups if any(any(row["advantages"]) for row in group) for row in group)
    assert metrics[0]["policy/off_policy_masked"] == 0.0 and metrics[1]["policy/off_policy_masked"] == pytest.approx(
        dropped / forwarded
    )


# --- geometric means, group baselines, rejected tokens ----------------------------------------------------------------


def test_the_geometric_mean_is_that_of_clipped_ratios():
    """GMPO, eq. 4, in plain arithmetic: values, gradients, the clipped tokens; what lies outside the mask may be
    anything.
    """
    torch.manual_seed(4)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    logps = (-torch.rand(4, 4, dtype=torch.float64)).requires_grad_()
    old = logps.detach() + 0.4 * torch.randn(4, 4, dtype=torch.float64)
    A = torch.tensor([1.5, -0.7, 1.0, 0.0], dtype=torch.float64)
    found, sums = policy_loss(
        torch.where(mask, logps, NAN),
        torch.where(mask, old, NAN),
        A,
        mask,
        surrogate="geo_mean",
        epsilon=0.1,
        epsilon_high=0.2,
    )
    total, low, high = 0.0, 0, 0
    for i in range(4):
        live = [t for t in range(4) if mask[i, t]]
        product = torch.ones((), dtype=torch.float64)
        for t in live:
            rho = torch.exp(logps[i, t] - old[i, t])
            bounded = torch.clamp(rho, math.exp(-0.1), math.exp(0.2))
            product = product * (torch.minimum(rho, bounded) if A[i] > 0 else torch.maximum(rho, bounded))
            low = low + (A[i] < 0 and float(rho) < math.exp(-0.1))
            high = high + (A[i] > 0 and float(rho) > math.exp(0.2))
        if live:
            assert torch.allclose(found[i][mask[i]], (-A[i] * product ** (1 / len(live))).expand(len(live)), atol=1e-12)
            total = total - A[i] * product ** (1 / len(live)) * len(live)
    ours, theirs = (torch.autograd.grad(x, logps, retain_graph=True)[0] for x in (found.sum(), total))
    assert torch.allclose(ours, theirs, atol=1e-12) and float(ours.abs().max()) > 1e-2 and not ours[~mask].any()
    assert int(sums["clip_low"]) == low and int(sums["clip_high"]) == high and low and high


def test_the_geometric_mean_is_the_policy_gradient_on_policy():
    logps = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    A = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    mask = torch.ones(3, 4)
    by_mean, plain = (policy_loss(logps, logps.detach(), A, mask, surrogate=s)[0].mean() for s in ("geo_mean", "logp"))
    assert torch.allclose(*(torch.autograd.grad(x, logps)[0] for x in (by_mean, plain)), atol=1e-14)


@pytest.mark.parametrize("kind, low, high", [("dppo_tv", 0.05, 0.08), ("dppo_kl", 0.01, 0.03)])
def test_tokens_that_moved_too_far_leave_the_divergence_surrogates(kind, low, high):
    """DPPO in plain arithmetic: values, gradients, counted tokens; a token that comes back is kept however far it
    is.
    """
    torch.manual_seed(1)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    logps = (-1.5 * torch.rand(4, 4, dtype=torch.float64) - 0.05).requires_grad_()
    old = (logps.detach() + 0.5 * torch.randn(4, 4, dtype=torch.float64)).clamp(max=-0.02)
    A = torch.randn(4, 4, dtype=torch.float64)
    found, sums = policy_loss(
        torch.where(mask, logps, NAN),
        torch.where(mask, old, NAN),
        torch.where(mask, A, NAN),
        mask,
        surrogate=kind,
        epsilon=low,
        epsilon_high=high,
        clip_ratio_c=1.3,
    )
    total, out = 0.0, {"clip_low": 0, "clip_high": 0}
    for i, t in mask.nonzero().tolist():
        p, q, a = math.exp(logps[i, t]), math.exp(old[i, t]), float(A[i, t])
        D = abs(p - q) if kind == "dppo_tv" else q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        side = "clip_high" if a > 0 and p > q and D > high else "clip_low" if a < 0 and p < q and D > low else None
        if side:
            out[side] += 1
            assert float(found[i, t]) == 0.0
        else:
            total = total - min(p / q, 1.3) * a * logps[i, t]
    assert {k: int(sums[k]) for k in out} == out and all(out.values())
    assert float(found.sum()) == pytest.approx(float(total))
    ours, theirs = (torch.autograd.grad(x, logps, retain_graph=True)[0] for x in (found.sum(), total))
    assert torch.allclose(ours, theirs, atol=1e-12) and not ours[~mask].any()
    on_policy, plain = (policy_loss(logps, logps.detach(), A, mask, surrogate=s)[0].sum() for s in (kind, "logp"))
    assert torch.equal(*(torch.autograd.grad(x, logps, retain_graph=True)[0] for x in (on_policy, plain)))


@pytest.mark.parametrize("kind, epsilon", [("dppo_tv", 0.15), ("dppo_kl", 0.05)])
def test_the_clip_range_of_the_divergence_surrogates_is_a_divergence(kind, epsilon):
    """A rare token whose ratio is far from 1 did not leave it; one that moved by 0.2 of probability did."""
    old = torch.tensor([[1e-3, 0.5, 0.5, 0.5]]).log()
    logps = torch.tensor([[3e-3, 0.7, 0.25, 0.55]]).log()
    found, sums = policy_loss(
        logps, old, torch.tensor([0.5]), torch.ones(1, 4), surrogate=kind, epsilon=epsilon, clip_ratio_c=1.1
    )
    assert int(sums["outside_range"]) == 2 and int(sums["clip_high"]) == 1
    # the bound of the weights is on another scale than epsilon
    assert found[0, 0].item() == pytest.approx(-1.1 * 0.5 * math.log(3e-3))


def test_group_baselines_by_length_and_by_the_second_best():
    from stages.estimators import group_advantage

    rewards = [1.0, 0.0, 0.0, 2.0, 5.0, 5.0, 3.0, 3.0]
    groups = [0, 0, 0, 0, 1, 1, 2, 2]
    lengths = [1, 3, 4, 2, 1, 9, 1, 1]
    found, informative = group_advantage(rewards, groups, "length_weighted", lengths=lengths)
    # (1 + 2 * 2) / 10
    assert (
        found[:4] == pytest.approx([0.5, -0.5, -0.5, 1.5])
        and not found[4:].any()
        and informative.tolist() == [True] * 4 + [False] * 4
    )
    same, _ = group_advantage(rewards, groups, "length_weighted", lengths=[7] * 8)
    assert same == pytest.approx(group_advantage(rewards, groups, "mean")[0])
    found, informative = group_advantage(rewards, groups, "leave_one_out_max")
    assert found.tolist() == [0, 0, 0, 1, 0, 0, 0, 0] and informative.tolist() == [True] * 4 + [False] * 4
    scaled, _ = group_advantage(rewards, groups, "leave_one_out_max_std", std_eps=0.0)
    assert scaled[3] == pytest.approx(1 / np.std([1, 0, 0, 2], ddof=1))
    two_best, informative = group_advantage([1.0, 1.0, 0.0, float("nan")], [0] * 4, "leave_one_out_max")
    assert not two_best.any() and not informative.any()  # the maximum does not fall without either of them
    alone, informative = group_advantage([1.0, float("nan")], [0, 0], "leave_one_out_max")
    assert not alone.any() and not informative.any()


def test_the_maximum_less_that_of_the_others_has_the_gradient_of_the_maximum():
    """E[max over k draws] by enumeration (pass@k, Tang et al. 2025): its gradient is the mean of sum_i A_i d log
    pi(y_i).
    """
    import itertools

    from stages.estimators import group_advantage

    logits, reward, k = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True), [0.0, 1.0, 2.5], 3
    value = surrogate = 0.0
    logps = torch.log_softmax(logits, 0)
    for draw in itertools.product(range(3), repeat=k):
        p = sum(logps[y] for y in draw).exp()
        value = value + p * max(reward[y] for y in draw)
        A, _ = group_advantage([reward[y] for y in draw], [0] * k, "leave_one_out_max")
        surrogate = surrogate + p.detach() * sum(a * logps[y] for a, y in zip(A, draw))
    assert torch.allclose(
        *(torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (value, surrogate)), atol=1e-12
    )


def test_a_baseline_by_token_goes_by_the_variance_so_far():
    from stages.estimators import token_baseline_advantages

    returns = np.array([[1.0, 1, 1, NAN], [0, 0, NAN, NAN], [3, 3, 3, 3]])
    energy = np.array([[1.0, 1, 1, NAN], [2, 0, NAN, NAN], [1, 3, 0, 1]])
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    found = token_baseline_advantages(returns, energy, mask)
    # the last token is the longest one's alone
    baselines = [(1 * 1 + 2 * 0 + 1 * 3) / 4, (2 * 1 + 2 * 0 + 4 * 3) / 8, (3 * 1 + 4 * 3) / 7, 0.0]
    assert np.allclose(found, np.where(mask, np.nan_to_num(returns) - np.array(baselines), 0.0))
    moved = token_baseline_advantages(
        np.array([[1.0, NAN, 1, 1], [0, 0, NAN, NAN]]),
        np.array([[1.0, NAN, 1, 1], [2, 0, 0, 0]]),
        np.array([[1, 0, 1, 1], [1, 1, 0, 0]]),
    )
    # tokens are counted without those of a tool
    assert np.allclose(moved, [[1 - 1 / 3, 0, 1 - 2 / 4, 1], [-1 / 3, -1 / 2, 0, 0]])
    assert not token_baseline_advantages(np.zeros((2, 3)), np.zeros((2, 3)), np.ones((2, 3))).any()


@pytest.mark.parametrize("level", ("token", "sequence_sum", "sequence_mean", "sequence_max"))
@pytest.mark.parametrize("statistic", ("ratio", "k2", "k3", "binary_kl", "tv"))
def test_tokens_are_rejected_by_how_far_trainer_and_sampler_are_apart(level, statistic):
    from stages.losses import rejected_tokens

    torch.manual_seed(2)
    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)
    mu = -1.5 * torch.rand(5, 3, dtype=torch.float64) - 0.05
    old = (
        mu
        + torch.tensor([0.8, 0.1, -0.9, 0.0, 0.0], dtype=torch.float64)[:, None] * torch.rand(5, 3, dtype=torch.float64)
    ).clamp(max=-1e-3)
    low, high = {
        "ratio": (0.8, 1.3),
        "k2": (0.0, 0.02),
        "k3": (0.0, 0.02),
        "binary_kl": (0.0, 0.02),
        "tv": (0.0, 0.08),
    }[statistic]
    found = rejected_tokens(torch.where(mask, old, NAN), torch.where(mask, mu, NAN), mask, level, statistic, low, high)
    for i in range(5):
        values = []
        for t in (t for t in range(3) if mask[i, t]):
            p, q = math.exp(mu[i, t]), math.exp(old[i, t])
            values.append(
                {
                    "ratio": q / p,
                    "k2": math.log(q / p) ** 2 / 2,
                    "k3": q / p - 1 - math.log(q / p),
                    "tv": abs(p - q),
                    "binary_kl": p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)),
                }[statistic]
            )
        if values and level != "token":
            whole = (
                max(values)
                if level == "sequence_max"
                else (
                    (math.prod(values) if level == "sequence_sum" else math.prod(values) ** (1 / len(values)))
                    if statistic == "ratio"
                    else sum(values) / (1 if level == "sequence_sum" else len(values))
                )
            )
            values = [whole] * len(values)
        assert found[i][mask[i]].tolist() == [not low <= v <= high for v in values] and not found[i][~mask[i]].any()
    assert found.any() and not found[mask].all() and not found[4].any()  # who agrees is never rejected


def test_the_stage_drops_rejected_tokens_or_gives_them_no_weight(rl):  # noqa: F811
    """Against the trainer's bfloat16 a sampler in float32 is off by a little: a bound inside of that rejects some
    tokens, which leave the loss, or its numerator alone.
    """
    settings = {
        "preset": "dapo",
        "dynamic_sampling": False,
        "truncation_policy": "score",
        "soft_punish_cache": 0,
        "max_steps": 1,
        "compute_dtype": "bfloat16",
        "rejection": "token",
        "rejection_min": 0.99,
        "rejection_max": 1.01,
    }
    result, metrics = rl("reject", settings)
    found = {}
    for scope in ("drop", "zero"):
        result, metrics = rl(f"reject-{scope}", {**settings, "rejection_scope": scope})
        found[scope] = metrics[0]
        rows = rows_of(result)
    ratios = [np.exp(np.subtract(row["logp_old"], row["logp_rollout"])) for row in rows]
    kept = sum(row["advantages"][0] * float(((r >= 0.99) & (r <= 1.01)).sum()) for row, r in zip(rows, ratios))
    all_tokens, left = sum(map(len, ratios)), sum(float(((r >= 0.99) & (r <= 1.01)).sum()) for r in ratios)
    assert 0 < left < all_tokens
    assert found["drop"]["sampling/rejected_fraction"] == pytest.approx(1 - left / all_tokens, abs=1e-6)
    assert found["drop"]["groups/trained_tokens"] == left and found["zero"]["groups/trained_tokens"] == all_tokens
    assert found["drop"]["loss"] == pytest.approx(-kept / left, rel=5e-3, abs=1e-3) and found["zero"][
        "loss"
    ] == pytest.approx(-kept / all_tokens, rel=5e-3, abs=1e-3)


@pytest.mark.parametrize(
    "config, text",
    [
        ({"preset": "grpo", "rejection_max": 3.0}, "rejection=sequence_mean"),
        (
            {"preset": "grpo", "rejection": "token", "rejection_statistic": "k2", "rejection_min": 0.1},
            "rejection_statistic=ratio",
        ),
        ({"preset": "grpo", "rejection": "token", "rejection_min": 3.0}, "rejection_min=0.5"),
        ({"preset": "topr", "rejection": "token"}, "surrogate"),
        ({"preset": "vespo", "rejection": "token", "rejection_scope": "zero"}, "rejection_scope=drop"),
        ({"preset": "grpo", "importance_normalise": True}, "importance_correction=token_truncate"),
        ({"preset": "gmpo", "ratio_level": "sequence"}, "surrogate=clip"),
        ({"preset": "gmpo", "clip_ratio_c": 3.0}, "surrogate=clip"),
        ({"preset": "grpo", "surrogate": "dppo_tv", "ratio_level": "sequence"}, "surrogate=clip"),
        # would throw out what trainer and sampler agree on
        ({"preset": "grpo", "rejection": "token", "rejection_max": 0.05}, "rejection_max=2"),
        ({"preset": "grpo", "rejection": "sequence_mean", "rejection_min": 1.5}, "rejection_min=0.5"),
        (
            {"preset": "grpo", "importance_correction": "token_mask", "importance_clip_max": 0.5},
            "importance_clip_max=2",
        ),
        (
            {"preset": "grpo", "importance_correction": "sequence_mask", "importance_clip_min": 1.5},
            "importance_clip_min=0.5",
        ),
        ({"preset": "opo", "num_generations": 1}, "num_generations >= 2"),
        ({"preset": "opo", "num_iterations": 2}, "surrogate=clip"),
        ({"preset": "opo", "scale_rewards": "group"}, "advantage=group_mean"),
        ({"preset": "grpo_passk", "scale_rewards": "batch"}, "advantage=group_mean"),
        ({"preset": "otb", "std_eps": 0.1}, "scale_rewards=group"),
        ({"preset": "opo", "kl_coef": 0.1, "kl_reward_mode": "token_terminal"}, "sequence_sum"),
    ],
)
def test_what_the_new_axes_do_not_read_is_refused(config, text):
    with pytest.raises((ValueError, ConfigError), match=text):
        resolve_preset(Config(**config))


def test_tokens_are_chosen_by_their_covariance():
    from stages.estimators import covariance_in_band, token_covariances, top_covariances

    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)
    logps = np.array([[-0.1, -2.0, -0.5, NAN], [-3.0, -0.2, NAN, NAN]])
    A = np.array([[1.0, 1.0, 1.0, NAN], [-1.0, -1.0, NAN, NAN]])
    found = token_covariances(logps, A, mask)
    assert found[mask].mean() == pytest.approx(np.cov(logps[mask], A[mask], ddof=0)[0, 1]) and not found[~mask].any()
    assert found[0, 0] == pytest.approx((-0.1 + 1.16) * 0.8)
    order = sorted(zip(found[mask], np.flatnonzero(mask)), reverse=True)
    for share, n in ((0.0001, 1), (0.4, 2), (0.99, 4)):
        assert sorted(np.flatnonzero(top_covariances(found, mask, share))) == sorted(at for _, at in order[:n])
    assert top_covariances(np.ones((2, 4)), mask, 0.4).tolist() == [[True, True, False, False], [False] * 4]
    drawn = [covariance_in_band(found, mask, 0.2, (0.5, 5.0), np.random.default_rng(seed)) for seed in range(20)]
    inside = {at for value, at in order if 0.5 < value < 5}
    assert (
        len(inside) > 1
        and all(one.sum() == 1 for one in drawn)
        and {int(np.flatnonzero(one)[0]) for one in drawn} == inside
    )
    # no more than there are
    assert covariance_in_band(found, mask, 0.999, (0.5, 5.0), np.random.default_rng(0)).sum() == len(inside)
    assert not covariance_in_band(found, mask, 0.5, (50.0, 60.0), np.random.default_rng(0)).any()
    assert (
        not token_covariances(logps, A, mask & False).any()
        and not token_covariances(logps, np.ones((2, 4)), mask).any()
    )


def test_the_stage_leaves_tokens_out_or_keeps_them_close_by_their_covariance(rl):  # noqa: F811
    """The logged loss of a first step without the tokens of the band, and of a second step with the penalty of the top
    ones, follows from the rollouts.
    """
    from stages.models.modeling import load_policy
    from tests.training.test_rl_presets import logps_of

    def covariances(rows):
        logps, A = [np.array(row["logp_old"]) for row in rows], [row["advantages"][0] for row in rows]
        mean, tokens = np.concatenate(logps).mean(), sum(map(len, logps))
        mean_A = sum(a * len(x) for a, x in zip(A, logps)) / tokens
        return [(x - mean) * (a - mean_A) for a, x in zip(A, logps)], tokens

    settings = {
        "preset": "grpo",
        "beta": 0.0,
        "loss_agg_mode": "token-mean",
        "num_iterations": 2,
        "learning_rate": 3e-3,
    }
    result, metrics = rl(
        "clip-cov", {**settings, "max_steps": 1, "covariance_clip": 0.9, "covariance_band": [0.05, 50.0]}
    )
    rows = rows_of(result)
    found, tokens = covariances(rows)
    kept = sum(row["advantages"][0] * float((c <= 0.05).sum()) for row, c in zip(rows, found))
    left_out = sum(float((c > 0.05).sum()) for c in found)
    assert metrics[0]["covariance/clip_fraction"] == pytest.approx(left_out / tokens) and 0 < left_out < tokens
    assert metrics[0]["loss"] == pytest.approx(-kept / tokens, abs=1e-5) and abs(kept) > 1e-2

    settings = {**settings, "surrogate": "none", "covariance_kl": 0.3, "covariance_kl_coef": 2.0}
    result, metrics = rl("kl-cov", {**settings, "max_steps": 2})
    rows = rows_of(result)
    found, tokens = covariances(rows)
    bound = np.sort(np.concatenate(found))[::-1][int(0.3 * tokens) - 1]
    after = load_policy(rl("kl-cov-first", {**settings, "max_steps": 1})[0]["outputs"]["model"]["path"]).double()
    loss = penalty = 0.0
    for row, c in zip(rows, found):
        with torch.no_grad():
            d = logps_of(after, row)[0] - torch.tensor(row["logp_old"], dtype=torch.float64)
        loss -= row["advantages"][0] * float(d.exp().sum())
        penalty += 2.0 * float(d.abs()[torch.tensor(c >= bound)].sum())
    assert metrics[1]["loss"] == pytest.approx((loss + penalty) / tokens, rel=1e-3, abs=1e-5) and penalty > 1e-2


def test_a_group_without_advantage_is_forwarded_where_its_tokens_are_kept_close(rl):  # noqa: F811
    """The mean advantage of a batch of unequal lengths is not 0, so a token of a group of equal rewards can be of the
    largest covariance; its penalty must not leave the step with the group's forward.
    """
    source = rl.source(
        "kl-cov-dead", {"preset": "grpo", "beta": 0.0, "surrogate": "none", "covariance_kl": 0.4, "num_iterations": 2}
    )
    prompts = source.order.take(2, 0)
    totals, lengths = ((1.0, 0.0), (0.5, 0.5)), ((5, 1), (5, 5))
    groups = [
        Group(
            prompt,
            ids,
            [
                Sample(
                    prompt,
                    ids,
                    k,
                    list(range(5, 5 + n)),
                    [-3.0 if one[0] == one[1] else -0.1] * n,
                    "eos",
                    "",
                    total,
                    {},
                    {},
                )
                for k, (total, n) in enumerate(zip(one, long))
            ],
            0,
        )
        for (prompt, ids), one, long in zip(prompts, totals, lengths)
    ]
    live, dead = source.crediting(groups, 0, 0).items
    assert not np.any(dead.extra["advantages"]) and np.any(dead.extra["kept_close"]) and not dead.extra["skip_forward"]
    plain = rl.source("no-kl-cov", {"preset": "grpo", "beta": 0.0, "num_iterations": 2})
    live, dead = plain.crediting(groups, 0, 0).items
    assert dead.extra["skip_forward"] and not live.extra["skip_forward"]


def test_rounding_alone_pays_no_covariance_penalty(tiny):
    """|log pi/pi_old| is flat where nothing has moved: which way a log-prob was rounded (another micro-batch, the
    sampler's own order of sums) must not turn a gradient around.
    """
    from stages.batching import collate, make_item
    from stages.models.modeling import target_logps

    config = Config(preset="grpo", beta=0.0, surrogate="none", covariance_kl=0.5, num_iterations=2, log_entropy=False)
    objective, model, found = PolicyGradient(resolve_preset(config)[0], config), load_policy(tiny["policy"]), []
    make = lambda old, close: make_item(
        "a",
        [3, 4],
        [[5, 6, 7]],
        [[1, 1, 1]],
        by_response=("old_logps", "advantages", "kept_close"),
        old_logps=[old],
        advantages=[1.0],
        kept_close=[close],
    )
    with torch.no_grad():
        now = target_logps(model, collate([make([0.0] * 3, [0.0] * 3)]))[0]
    for old, close in ((now, 0.0), (now + 2e-6, 1.0), (now - 2e-6, 1.0), (now - 0.1, 1.0), (now - 0.1, 0.0)):
        items = [make(old.tolist(), [close] * 3)]
        model.zero_grad()
        objective(model, collate(items)).divided(objective.counts(items)).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    norm = found[0].norm()
    assert (
        (found[1] - found[0]).norm() < 1e-4 * norm
        and (found[2] - found[0]).norm() < 1e-4 * norm
        and (found[3] - found[4]).norm() > 0.1 * norm
    )


def test_what_is_thrown_out_is_not_in_the_stored_loss_mask(rl):  # noqa: F811
    """rejection drops tokens from every denominator, so the rollouts must not say that they were trained on; those of
    weight 0 are, as ever.
    """
    config = {"preset": "grpo", "beta": 0.0, "top_k": 100, "rejection": "token", "rejection_min": 0.75, "max_steps": 1}
    for scope in ("drop", "zero"):
        result, metrics = rl(f"reject-{scope}", {**config, "rejection_scope": scope})
        d = [np.subtract(r["logp_old"], r["logp_rollout"]) for r in rows_of(result)]
        out = [np.exp(x) < 0.75 for x in d]
        masks = [np.array(r["loss_mask"]) for r in rows_of(result)]
        assert any(o.any() for o in out) and any((~o).any() for o in out)
        assert all(np.array_equal(m, ~o if scope == "drop" else np.ones_like(m)) for m, o in zip(masks, out))
        assert metrics[0]["groups/trained_tokens"] == sum(m.sum() for m in masks)


@pytest.mark.parametrize(
    "config, text",
    [
        ({"preset": "topr", "covariance_clip": 1e-3}, "preset=grpo"),
        ({"preset": "trpo", "covariance_clip": 1e-3}, "preset=grpo"),
        ({"preset": "grpo", "covariance_kl": 1e-3}, "num_iterations=2"),
        ({"preset": "grpo", "covariance_band": [2.0, 3.0]}, "covariance_clip=2e-4"),
        ({"preset": "grpo", "covariance_kl_coef": 0.5}, "covariance_kl=2e-4"),
        ({"preset": "grpo", "covariance_clip": 1e-3, "covariance_band": [3.0, 2.0]}, "smaller one first"),
    ],
)
def test_covariances_that_nothing_would_read_are_refused(config, text):
    with pytest.raises((ValueError, ConfigError), match=text):
        resolve_preset(Config(**config))


def test_a_geometric_mean_under_a_mean_over_tokens_is_told():
    assert not any("by their length" in text for text in resolve_preset(Config(preset="gmpo"))[1])
    assert any(
        "by their length" in text for text in resolve_preset(Config(preset="gmpo", loss_agg_mode="token-mean"))[1]
    )
