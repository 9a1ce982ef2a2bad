"""What weighs or leaves out tokens and responses of the policy loss: SAPO's gate, VESPO's weights, off-policy masking, high-entropy tokens, bounds of importance weights."""

import math

import numpy as np
import pytest
import torch

from stages.algorithms import SURROGATE_OPTIONS
from stages.estimators import top_entropy_tokens
from stages.losses import gamma_weights, off_policy_keep, policy_loss, soft_gate, truncated_importance_weights
from stages.rl import Config, resolve_preset
from stages.spec import ConfigError
from tests.training.test_rl_parts import rl, rows_of  # noqa: F401

NAN = float("nan")


def by_hand(surrogate, logps, old, A, mask, options, weights=None):
    """The loss of every trained token, as the papers print it, in plain arithmetic on 0-dim tensors."""
    rows = []
    for i in range(len(logps)):
        live = [t for t in range(logps.shape[1]) if mask[i, t]]
        W = math.exp(sum(float(logps[i, t].detach() - old[i, t]) + (math.log(float(weights[i, t])) if weights is not None else 0.0) for t in live))
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
                k, rate = (options["k_pos"], options["lambda_pos"]) if A[i, t] >= 0 else (options["k_neg"], options["lambda_neg"])
                row.append(-(W ** k * math.exp(rate * (1 - W))) * A[i, t] * logps[i, t])
        rows.append(torch.stack(row))
    return torch.stack(rows)


@pytest.mark.parametrize("surrogate, options", [*SURROGATE_OPTIONS.items(), ("sapo", {"tau_pos": 3.0, "tau_neg": 0.4}), ("vespo", {"k_pos": 0.7, "lambda_pos": 0.3, "k_neg": 4.0, "lambda_neg": 5.0})])
@pytest.mark.parametrize("weighted", (False, True))
def test_soft_weights_equal_an_independent_computation(surrogate, options, weighted):
    """Values, gradients and the mean weight of the log, in float64; what lies outside the mask may be anything."""
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    logps = (-torch.rand(4, 4, dtype=torch.float64)).requires_grad_()
    old, A, weights = logps.detach() + 0.3 * torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64), 0.5 + torch.rand(4, 4, dtype=torch.float64)
    A[2, 1] = 0.0
    junk = [torch.where(mask, x, NAN) for x in (old, A, weights)]
    found, sums = policy_loss(torch.where(mask, logps, -torch.inf), junk[0], junk[1], mask, surrogate=surrogate, weights_BT=junk[2] if weighted else None, options=options)
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
        zero = soft_gate(torch.exp(logps - old)[2, 1], A[2, 1], **options)[1] if surrogate == "sapo" else gamma_weights(logps - old, A, mask, **options)[2, 1]
        assert float(sums["soft_weight"]) == pytest.approx(float(ratios.sum() + zero))


def test_soft_weights_are_one_on_policy_and_fade_on_both_sides():
    ones, A, mask = torch.zeros(2, 3, dtype=torch.float64), torch.tensor([[1.0], [-1.0]], dtype=torch.float64), torch.ones(2, 3)
    assert torch.equal(soft_gate(ones.exp(), A)[1], torch.ones(2, 3, dtype=torch.float64))
    assert torch.equal(gamma_weights(ones, A, mask), torch.ones(2, 3, dtype=torch.float64))
    ratio = torch.tensor([0.0, 0.5, 1.0, 2.0, 50.0], dtype=torch.float64)
    assert (soft_gate(ratio, torch.tensor(1.0))[1].diff()[:2] > 0).all() and (soft_gate(ratio, torch.tensor(1.0))[1].diff()[2:] < 0).all()
    grid = torch.linspace(0.01, 4, 400, dtype=torch.float64)
    for sign, k, rate in ((1.0, 2.0, 3.0), (-1.0, 3.0, 2.0)):
        phi = gamma_weights(grid.log()[:, None], torch.full((400, 1), sign, dtype=torch.float64), torch.ones(400, 1))[:, 0]
        assert float(grid[phi.argmax()]) == pytest.approx(k / rate, abs=0.01)
    far = gamma_weights(torch.tensor([[20.0] * 50, [-20.0] * 50]), torch.ones(2, 1), torch.ones(2, 50), torch.zeros(2, 50))
    assert torch.isfinite(far).all() and float(far.max()) < 1e-10  # weights of 0 (token_mask) too


def test_off_policy_masking_drops_far_responses_of_negative_advantage_only():
    """DeepSeek-V3.2, eq. 9: rows are far and bad, far and good, near and bad, bad on average near, empty; a threshold is still near."""
    logps = torch.tensor([[-2.0, -2.0], [-2.0, -2.0], [-1.1, -1.1], [-3.0, 1.0], [-2.0, -2.0], [-1.5, -9.0]], requires_grad=True)
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
        assert threshold == pytest.approx(float(torch.quantile(torch.tensor([0.1, 0.9, 0.5, 0.7, 0.3], dtype=torch.float64), 1 - share)))
    tied, _ = top_entropy_tokens(np.ones((2, 3)), np.ones((2, 3)), 0.2)
    assert tied.all()  # equal tokens are in together
    none, threshold = top_entropy_tokens(entropies, np.zeros((2, 4)), 0.2)
    assert not none.any() and threshold == 0.0


@pytest.mark.parametrize("mode, expected", [("token_truncate", [[0.5, 1.0, 2.0]]), ("token_mask", [[0.0, 1.0, 0.0]]), ("sequence_truncate", [[1.0]]), ("sequence_mask", [[1.0]])])
def test_importance_weights_have_a_lower_bound(mode, expected):
    ratio = torch.tensor([[0.25, 1.0, 4.0]])
    assert torch.allclose(truncated_importance_weights(ratio.log(), torch.zeros(1, 3), torch.ones(1, 3), mode, 2.0, 0.5), torch.tensor(expected))
    small = truncated_importance_weights(torch.full((1, 3), -1.0), torch.zeros(1, 3), torch.ones(1, 3), mode, 2.0, 0.5)
    assert (small == (0.5 if mode.endswith("truncate") else 0.0)).all()
    assert (truncated_importance_weights(torch.full((1, 3), -1.0), torch.zeros(1, 3), torch.ones(1, 3), mode, 2.0) > 0).all()  # no bound unless one is given


@pytest.mark.parametrize("config, text", [
    ({"preset": "topr", "top_entropy_quantile": 0.2}, "preset=grpo"), ({"preset": "trpo", "top_entropy_quantile": 0.2}, "preset=grpo"),
    ({"preset": "grpo", "off_policy_mask_threshold": 0.1}, "num_iterations=2"), ({"preset": "sppo", "off_policy_mask_threshold": 0.1}, "preset=grpo"),
    ({"preset": "grpo", "importance_clip_min": 0.5}, "importance_correction=token_truncate"),
    ({"preset": "grpo", "importance_correction": "token_mask", "importance_clip_min": 3.0}, "importance_clip_min=0.5"),
    ({"preset": "vespo", "importance_correction": "sequence_mask"}, "token_truncate"), ({"preset": "vespo", "ratio_level": "sequence"}, "surrogate=clip"),
    ({"preset": "sapo", "epsilon": 0.1}, "surrogate=clip"), ({"preset": "grpo", "options": {"tau_pos": 1.0}}, "has none"), ({"preset": "sapo", "options": {"k_pos": 1.0}}, "tau_pos, tau_neg"),
    ({"preset": "sapo", "options": {"tau_neg": 0.0}}, "number > 0")])
def test_what_nothing_would_read_is_refused(config, text):
    with pytest.raises((ValueError, ConfigError), match=text):
        resolve_preset(Config(**config))


def test_a_surrogate_brings_its_constants_to_any_preset():
    row, _ = resolve_preset(Config(preset="dr_grpo", surrogate="sapo", options={"tau_neg": 2.0}))
    assert row.options == {"tau_pos": 1.0, "tau_neg": 2.0} and row.aggregation == "seq-mean-token-sum-norm"
    assert Config(preset="vespo").effective()["options"] == SURROGATE_OPTIONS["vespo"] and resolve_preset(Config(preset="grpo"))[0].options == {}


def test_the_stage_trains_on_high_entropy_tokens_and_drops_far_responses(rl):  # noqa: F811
    """The logged loss follows from the rollouts: with one token in three of the highest entropy, and without the bad responses the policy has left."""
    from stages.modeling import load_policy
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
    assert metrics[0]["train/loss"] == pytest.approx(kept, abs=1e-5) and abs(kept) > 1e-3

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
    assert dropped and metrics[1]["train/loss"] == pytest.approx(loss, rel=1e-3, abs=1e-5)
    groups = [rows[i:i + 4] for i in range(0, len(rows), 4)]
    forwarded = sum(row["length"] for group in groups if any(any(row["advantages"]) for row in group) for row in group)  # groups of equal rewards do not go through the model
    assert metrics[0]["policy/off_policy_masked"] == 0.0 and metrics[1]["policy/off_policy_masked"] == pytest.approx(dropped / forwarded)
