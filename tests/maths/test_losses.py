"""Losses: sums and counts do not depend on micro-batching, padding is inert, gradients equal independent formulas."""

import math

import numpy as np
import pytest
import torch

from stages import losses
from stages.direct import direct_losses
from stages.align import Config
from stages.algorithms import DIRECT_METHODS, RL_PRESETS, resolve, rl_preset
from stages.direct.direct_alignment import DirectAlignment
from tests.production import critic_update, response_logps, step_mean

F64 = torch.float64


def batch(seed, B=7, T=9):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, T + 1, (B,), generator=g)
    lengths[0], lengths[1] = 0, T
    mask = (torch.arange(T) < lengths.unsqueeze(1)).long()
    mask[2, : T // 2] = 0  # a hole, as tool tokens leave it
    x = {k: torch.randn(B, T, generator=g, dtype=F64) * 0.3 - 1 for k in ("logp", "old", "ref")}
    return x, mask, torch.randn(B, generator=g, dtype=F64)


def grpo_like(preset):
    row = RL_PRESETS[preset]

    def loss(logp, x, adv, mask):
        per, _ = losses.policy_loss(
            logp,
            x["old"],
            adv,
            mask,
            epsilon=row.epsilon,
            epsilon_high=row.epsilon_high,
            ratio_level=row.ratio_level,
            surrogate=row.surrogate,
        )
        if row.kl_loss_coef and row.kl_loss_estimator in losses.KL_ESTIMATORS:
            per = per + row.kl_loss_coef * losses.kl_estimate(logp, x["ref"], row.kl_loss_estimator, mask)
        return per

    return loss, row.aggregation


CASES = {
    "nll": (lambda logp, x, adv, mask: losses.token_nll(logp), None),
    "value": (lambda logp, x, adv, mask: losses.value_loss(logp, x["ref"], mask, x["old"], 0.2), "token-mean"),
    **{name: grpo_like(name) for name in RL_PRESETS},
}


@pytest.mark.parametrize("mode", losses.LOSS_AGG_MODES)
@pytest.mark.parametrize("name", CASES)
def test_step_is_invariant_to_microbatching(name, mode):
    """Splits, order and simulated ranks give the same gradient to 1e-12 when the step divides once."""
    fn, _ = CASES[name]
    x, mask, adv = batch(3)
    B = len(adv)
    rng = np.random.default_rng(0)

    def run(parts):
        logp = x["logp"].clone().requires_grad_()
        count = 0
        for part in parts:
            i = torch.tensor(part)
            per = fn(logp[i], {k: v[i] for k, v in x.items()}, adv[i], mask[i])
            total, counts = losses.aggregate(per, mask[i], mode, 9.0)
            total.backward()
            count += counts[losses.denominator_of(mode)]
        return logp.grad / count, count

    whole, count = run([list(range(B))])
    shuffled = rng.permutation(B).tolist()
    for parts in (
        [[i] for i in range(B)],
        [shuffled[:3], shuffled[3:4], shuffled[4:]],
        [list(range(B))[::-1]],
        [[0, 2, 4, 6], [1, 3, 5]],
    ):
        other, n = run(parts)
        assert n == count
        assert torch.allclose(other, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_padding_content_changes_nothing(name):
    fn, mode = CASES[name]
    x, mask, adv = batch(5)
    results = []
    for fill in (0.0, 7.0, math.nan, math.inf, -math.inf):
        padded = {k: torch.where(mask.bool(), v, torch.tensor(fill, dtype=F64)) for k, v in x.items()}
        logp = padded["logp"].clone().requires_grad_()
        total, _ = losses.aggregate(fn(logp, padded, adv, mask), mask, mode or "token-mean", 9.0)
        total.backward()
        assert torch.equal(logp.grad[~mask.bool()], torch.zeros_like(logp.grad[~mask.bool()]))
        results.append((total.detach(), logp.grad))
    for total, grad in results[1:]:
        assert torch.equal(total, results[0][0]) and torch.equal(grad, results[0][1])


@pytest.mark.parametrize("name", CASES)
def test_extra_padding_columns_change_nothing(name):
    fn, mode = CASES[name]
    x, mask, adv = batch(6)
    wide = {k: torch.cat([v, torch.full((len(v), 3), math.nan, dtype=F64)], 1) for k, v in x.items()}
    wide_mask = torch.cat([mask, torch.zeros(len(mask), 3, dtype=mask.dtype)], 1)
    a, _ = losses.aggregate(fn(x["logp"], x, adv, mask), mask, mode or "token-mean", 9.0)
    b, _ = losses.aggregate(fn(wide["logp"], wide, adv, wide_mask), wide_mask, mode or "token-mean", 9.0)
    assert torch.equal(a, b)


def test_length_weighting_of_each_normaliser():
    """Gradient per token of two responses of length 10 and 1000 with equal advantage."""
    mask = torch.zeros(2, 1000)
    mask[0, :10], mask[1] = 1, 1
    expected = {
        "token-mean": (1 / 1010, 1 / 1010),
        "seq-mean-token-sum": (1 / 2, 1 / 2),
        "seq-mean-token-mean": (1 / 20, 1 / 2000),
        "seq-mean-token-sum-norm": (1 / 2000, 1 / 2000),
    }
    for mode, (short, long) in expected.items():
        logp = torch.zeros(2, 1000, dtype=F64, requires_grad=True)
        step_mean(losses.token_nll(logp), mask, mode, 1000.0).backward()
        assert logp.grad[0, 0].item() == pytest.approx(-short, abs=1e-15)
        assert logp.grad[1, 0].item() == pytest.approx(-long, abs=1e-15)


def test_empty_batch_gives_zero_connected_to_the_graph():
    logp = torch.randn(2, 3, dtype=F64, requires_grad=True)
    per, _ = losses.policy_loss(logp, logp.detach(), torch.ones(2, dtype=F64), torch.zeros(2, 3))
    loss = step_mean(per, torch.zeros(2, 3), "token-mean")
    loss.backward()
    assert loss.item() == 0.0 and torch.equal(logp.grad, torch.zeros_like(logp))


# --- gradients against independent formulas ------------------------------------------------------


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x)))


def test_bradley_terry_gradients_and_options():
    g = np.random.default_rng(1)
    w, l, m, p = g.normal(size=6), g.normal(size=6), g.uniform(0, 1, 6), g.uniform(0, 1, 6)
    tw, tl = torch.tensor(w, requires_grad=True), torch.tensor(l, requires_grad=True)
    losses.bradley_terry_loss(tw, tl, margin=torch.tensor(m), center_rewards_coefficient=0.01).sum().backward()
    assert np.allclose(tw.grad, -sigmoid(-(w - l - m)) + 0.02 * (w + l))
    assert np.allclose(tl.grad, sigmoid(-(w - l - m)) + 0.02 * (w + l))
    tw.grad = None
    losses.bradley_terry_loss(tw, tl, label_prob=torch.tensor(p), label_smoothing=0.1).sum().backward()
    q = p * 0.9 + (1 - p) * 0.1
    assert np.allclose(tw.grad, sigmoid(w - l) - q)


def test_margin_tightens():
    w, l = torch.tensor([1.0]), torch.tensor([0.0])
    assert losses.bradley_terry_loss(w, l, margin=torch.tensor([0.5])) > losses.bradley_terry_loss(w, l)


def test_dpo_gradient_weights_and_ln2_at_the_reference():
    v = [torch.randn(5, dtype=F64, requires_grad=True) for _ in range(2)] + [
        torch.randn(5, dtype=F64) for _ in range(2)
    ]
    losses.dpo_loss(*v, beta=0.3).sum().backward()
    u = 0.3 * ((v[0] - v[2]) - (v[1] - v[3])).detach().numpy()
    assert np.allclose(v[0].grad, -0.3 * sigmoid(-u)) and np.allclose(v[1].grad, 0.3 * sigmoid(-u))
    same = losses.dpo_loss(v[0], v[1], v[0], v[1], beta=0.7)
    assert torch.equal(same, torch.full_like(same, math.log(2)))


def call(row, policy, refs, **changes):
    """A row's loss on four values per side, whatever kind of data it reads."""
    g = torch.Generator().manual_seed(8)
    columns = {name: torch.rand(4, generator=g, dtype=F64) * 2 + 0.6 for name in row.columns}
    given = {**({} if row.default_beta is None else {"beta": row.default_beta}), **row.options, **columns, **changes}
    fn, refs = resolve(row.loss), refs if row.needs_reference else (None, None)
    if row.data == "unpaired":
        label = torch.tensor([True, False, True, True])
        return fn(policy[0] - refs[0], label=label, **given, **({"z0": 0.05} if row.statistic == "z0" else {}))
    if row.data == "rankings":
        return fn(policy[0], refs[0], torch.tensor([3.0, 2.0, 5.0, 4.0], dtype=F64), **given)
    if row.data == "segments":
        weights = torch.tensor([0.9, 0.4, 0.3, 0.7], dtype=F64)
        return fn(policy[0] - refs[0], policy[1] - refs[1], weights, weights.flip(0), **given)
    return fn(*policy, *refs, **given)


# those detach on purpose; see test_align_methods
@pytest.mark.parametrize("name", [n for n in DIRECT_METHODS if n not in ("wpo", "aot_unpaired")])
def test_direct_losses_match_finite_differences(name):
    row = DIRECT_METHODS[name]
    g = torch.Generator().manual_seed(4)
    args = [-torch.rand(4, generator=g, dtype=F64) * 2 - 0.1 for _ in range(4)]
    pc, pr = (a.clone().requires_grad_() for a in args[:2])
    call(row, (pc, pr), args[2:]).sum().backward()
    eps = 1e-6
    for leaf, k in ((pc, 0), (pr, 1)):
        if leaf.grad is None:  # one response per row
            continue
        for i in range(4):
            moved = []
            for sign in (1, -1):
                shifted = [a.clone() for a in args[:2]]
                shifted[k][i] += sign * eps
                moved.append(call(row, shifted, args[2:]).sum())
            assert (moved[0] - moved[1]) / (2 * eps) == pytest.approx(leaf.grad[i].item(), rel=1e-5, abs=1e-6), name


def test_every_option_of_the_direct_losses_matters():
    """A field that is silently ignored would leave the loss unchanged."""
    g = torch.Generator().manual_seed(9)
    args = [-torch.rand(4, generator=g, dtype=F64) - 0.2 for _ in range(4)]
    words = {"offset_fn": "identity", "member": "cell", "code": "relu(1 - beta * (pc - pr - rc + rr))"}
    for name, row in DIRECT_METHODS.items():
        base = call(row, args[:2], args[2:])
        if row.default_beta is not None:
            assert not torch.equal(base, call(row, args[:2], args[2:], beta=row.default_beta * 2)), f"{name}: beta"
        for option, value in row.options.items():
            changed = (
                (not value)
                if isinstance(value, bool)
                else words[option]
                if isinstance(value, str)
                else value / 2 + 0.03
            )
            assert not torch.equal(base, call(row, args[:2], args[2:], **{option: changed})), f"{name}: {option}"


def test_relations_between_direct_losses():
    g = torch.Generator().manual_seed(2)
    a = [torch.randn(6, generator=g, dtype=F64) for _ in range(4)]
    dpo = losses.dpo_loss(*a, beta=0.4)
    h = (a[0] - a[2]) - (a[1] - a[3])
    zero = torch.zeros(6, dtype=F64)
    assert torch.allclose(dpo, losses.dpo_loss(*a, beta=0.4, label_prob=1.0, label_smoothing=0.0))
    assert torch.allclose(dpo, losses.plackett_luce_loss(torch.stack([0.4 * (a[0] - a[2]), 0.4 * (a[1] - a[3])], -1)))
    assert torch.allclose(dpo, direct_losses.odpo_loss(*a, beta=0.4, offset=0.0))
    assert torch.allclose(
        direct_losses.reference_free_loss(a[0], a[1], beta=0.4), losses.dpo_loss(a[0], a[1], zero, zero, beta=0.4)
    )
    m = -a[0].abs(), -a[1].abs()
    assert torch.allclose(direct_losses.alphapo_loss(*m, alpha=1e-7), direct_losses.simpo_loss(*m))
    assert torch.allclose(direct_losses.apo_zero_loss(zero, zero, zero, zero), torch.ones(6, dtype=F64))
    assert torch.allclose(
        direct_losses.ipo_loss(zero, zero, zero, zero, beta=0.2), torch.full((6,), 1 / (4 * 0.04), dtype=F64)
    )
    gap = h * 0.4
    assert torch.allclose(direct_losses.rpo_loss(*a, beta=0.4, score_gap=gap, eta=1.0), zero, atol=1e-12)
    assert torch.allclose(
        direct_losses.kto_loss(
            zero, 0.0, torch.tensor([True, False] * 3), desirable_weight=1.0, undesirable_weight=2.0
        ),
        torch.tensor([0.5, 1.0] * 3, dtype=F64),
    )


def f_prime(t, kind, alpha):
    """f'(t) of the four divergences as the paper's table has them, less the constant that cancels (Wang et al.
    2023).
    """
    return {
        "reverse_kl": lambda: np.log(t),
        "forward_kl": lambda: 1 - 1 / t,
        "js_divergence": lambda: np.log(2 * t / (1 + t)),
        "alpha_divergence": lambda: (t ** (alpha - 1) - 1) / (alpha - 1),
    }[kind]()


DIVERGENCES = [
    ("reverse_kl", 0.5),
    ("forward_kl", 0.5),
    ("js_divergence", 0.5),
    *(("alpha_divergence", a) for a in (0.0, 0.3, 0.5, 0.9)),
]


@pytest.mark.parametrize("kind,alpha", DIVERGENCES)
def test_f_divergence_scores_are_the_derivative_at_the_ratio(kind, alpha):
    h = torch.linspace(-9, 9, 37, dtype=F64, requires_grad=True)
    score = direct_losses.f_divergence_score(h, kind, alpha)
    assert np.allclose(score.detach(), f_prime(np.exp(h.detach().numpy()), kind, alpha), rtol=1e-12, atol=1e-13)
    assert float(direct_losses.f_divergence_score(torch.zeros((), dtype=F64), kind, alpha)) == pytest.approx(
        0.0, abs=1e-15
    )
    (slope,) = torch.autograd.grad(score.sum(), h)
    eps = 1e-6
    moved = [direct_losses.f_divergence_score(h.detach() + s * eps, kind, alpha) for s in (1, -1)]
    # a higher ratio is a higher reward
    assert (slope > 0).all() and np.allclose(slope, (moved[0] - moved[1]) / (2 * eps), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind,alpha", DIVERGENCES)
def test_f_divergence_scores_keep_float32s_digits(kind, alpha):
    h = torch.linspace(-15, 15, 31, requires_grad=True)
    wide = h.detach().double().requires_grad_()
    scores = [direct_losses.f_divergence_score(x, kind, alpha) for x in (h, wide)]
    slopes = [torch.autograd.grad(s.sum(), x)[0].double() for s, x in zip(scores, (h, wide))]
    assert torch.allclose(scores[0].double(), scores[1], rtol=1e-5, atol=1e-6) and torch.allclose(
        *slopes, rtol=1e-5, atol=2e-7
    )


@pytest.mark.parametrize("kind,alpha", DIVERGENCES)
def test_f_divergence_scores_stay_finite_and_keep_their_order_far_off(kind, alpha):
    """Log-ratios of 10 000 nats in float32: a finite loss and gradient, the tangent where the power would overflow,
    still rising.
    """
    h = torch.tensor([-1e4, -300.0, -41.0, -5.0, 5.0, 300.0, 1e4], requires_grad=True)
    score = direct_losses.f_divergence_score(h, kind, alpha)
    loss = losses.dpo_loss(score, score.flip(0), torch.zeros(7), torch.zeros(7))
    loss.sum().backward()
    assert (
        torch.isfinite(score).all()
        and torch.isfinite(loss).all()
        and torch.isfinite(h.grad).all()
        and (score.diff() >= 0).all()
        and (score[:4].diff() > 0).all()
    )
    power = {"forward_kl": -1.0, "alpha_divergence": alpha - 1}.get(kind)
    if power:
        at = losses.LOG_RATIO_CLAMP / power
        inside, beyond = (torch.tensor(at * s, dtype=F64, requires_grad=True) for s in (1 - 1e-9, 1 + 1e-9))
        values = [direct_losses.f_divergence_score(x, kind, alpha) for x in (inside, beyond)]
        slopes = [torch.autograd.grad(v, x)[0] for v, x in zip(values, (inside, beyond))]
        assert float(values[0].detach()) == pytest.approx(float(values[1].detach()), rel=1e-6) and float(
            slopes[0]
        ) == pytest.approx(float(slopes[1]), rel=1e-6)


def test_alpha_divergences_end_in_the_kl_divergences():
    h = torch.linspace(-5, 5, 11, dtype=F64)
    of = direct_losses.f_divergence_score
    assert (
        torch.allclose(of(h, "alpha_divergence", 0.0), of(h, "forward_kl"))
        and torch.equal(of(h, "alpha_divergence", 1.0), h)
        and torch.equal(of(h), h)
    )
    assert torch.allclose(of(h, "alpha_divergence", 1 - 1e-5), h, atol=2e-4)
    with pytest.raises(ValueError, match="js_divergence"):
        of(h, "js")


@pytest.mark.parametrize("eps", (0.0, 0.2))
def test_aot_taken_apart_by_rows_is_the_sorted_loss_of_the_batch(eps):
    """Both forms against the sort of the whole batch in numpy; and value and gradient of the rows add up to it."""
    g = torch.Generator().manual_seed(3)
    pc, pr, rc, rr = (torch.randn(9, generator=g, dtype=F64) * 3 for _ in range(4))
    pc.requires_grad_(), pr.requires_grad_()

    def logistic(delta):
        return np.mean((1 - eps) * np.logaddexp(0, -0.3 * delta) + eps * np.logaddexp(0, 0.3 * delta))

    c, r, qc, qr = (x.detach().numpy() for x in (pc, pr, rc, rr))
    margin = direct_losses.equal_ranks((pc - pr).detach(), rc - rr)
    paired = direct_losses.aot_paired_loss(pc, pr, rc, rr, beta=0.3, label_smoothing=eps, matched_margin=margin).mean()
    assert float(paired.detach()) == pytest.approx(logistic(np.sort(c - r) - np.sort(qc - qr)), rel=1e-12)
    by_sort = losses.soft_bce(0.3 * (torch.sort(pc - pr).values - torch.sort(rc - rr).values), 1 - eps).mean()
    for one, two in zip(torch.autograd.grad(paired, (pc, pr)), torch.autograd.grad(by_sort, (pc, pr))):
        assert torch.allclose(one, two, atol=1e-15)
    unpaired = losses.soft_bce(0.3 * (torch.sort(pc - rc).values - torch.sort(pr - rr).values), 1 - eps).mean()
    assert float(unpaired.detach()) == pytest.approx(logistic(np.sort(c - qc) - np.sort(r - qr)), rel=1e-12)
    matches = dict(
        zip(("matched_rejected", "matched_chosen"), direct_losses.aot_matches((pc - rc).detach(), (pr - rr).detach()))
    )
    rows = direct_losses.aot_matched_loss(pc, pr, rc, rr, beta=0.3, label_smoothing=eps, **matches).mean()
    assert float(rows.detach()) == pytest.approx(float(unpaired.detach()), rel=1e-12)
    for one, two in zip(torch.autograd.grad(rows, (pc, pr)), torch.autograd.grad(unpaired, (pc, pr))):
        assert torch.allclose(one, two, atol=1e-15)


def test_equal_ranks_of_equal_values_and_of_one():
    tie, ones = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([5.0])
    assert direct_losses.equal_ranks(tie, torch.tensor([9.0, 7.0, 8.0])).tolist() == [8.0, 9.0, 7.0]
    assert direct_losses.equal_ranks(ones, ones * 2).tolist() == [10.0]


def test_dynamic_and_smoothed_token_losses():
    """DFT's gradient is p times the NLL's; smoothing is Hugging Face's own LabelSmoother; eps 0 is the NLL."""
    from transformers.trainer_pt_utils import LabelSmoother

    z = torch.randn(2, 5, 7, dtype=F64, requires_grad=True)
    labels = torch.randint(0, 7, (2, 5))
    labels[0, 3] = -100
    logp = torch.log_softmax(z, -1)
    picked, trained = logp.gather(-1, labels.clamp(min=0)[..., None])[..., 0], labels >= 0
    theirs = LabelSmoother(epsilon=0.1)({"logits": z.float()}, labels)
    ours = losses.smoothed_nll(picked, logp.mean(-1), 0.1)[trained].mean()
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-6)
    assert torch.equal(losses.smoothed_nll(picked, logp.mean(-1), 0.0), losses.token_nll(picked))
    p = picked.detach().exp().numpy()
    assert np.allclose(losses.dynamic_nll(picked).detach(), -p * np.log(p))
    (gradient,) = torch.autograd.grad(losses.dynamic_nll(picked).sum(), z, retain_graph=True)
    one_hot = np.eye(7)[labels.clamp(min=0).numpy()]
    assert np.allclose(gradient, p[..., None] * (logp.detach().exp().numpy() - one_hot))
    certain = torch.tensor([0.0, -1e4], requires_grad=True)
    losses.dynamic_nll(certain).sum().backward()
    assert certain.grad.tolist() == [-1.0, 0.0]


def test_doubling_a_response_doubles_dpo_margins_and_leaves_mean_methods_alone():
    one, two = torch.full((1, 4), -0.7, dtype=F64), torch.full((1, 8), -0.7, dtype=F64)
    (s, n), (s2, n2) = (
        response_logps(DirectAlignment(Config(method="dpo")), x, torch.ones_like(x)) for x in (one, two)
    )
    assert torch.allclose(s2, 2 * s) and torch.allclose(s2 / n2, s / n)


def test_orpo_is_finite_near_certainty():
    for value in (-1e-8, -1e-4, -50.0):
        m = torch.tensor([value], dtype=F64, requires_grad=True)
        loss = direct_losses.orpo_loss(m, torch.tensor([-1.0], dtype=F64))
        loss.backward()
        assert torch.isfinite(loss) and torch.isfinite(m.grad)


def test_numerics_at_the_extremes():
    big = torch.tensor([1e4, -1e4], dtype=torch.float32)
    assert torch.isfinite(losses.bradley_terry_loss(big, torch.zeros(2))).all()
    logp = torch.tensor([[-1e4, 0.0]], requires_grad=True)
    per, _ = losses.policy_loss(logp, torch.zeros(1, 2), torch.tensor([1.0]), torch.ones(1, 2))
    per.sum().backward()
    assert torch.isfinite(per).all() and torch.isfinite(logp.grad).all()
    x = torch.tensor([-1e-17, -1e-12, -0.5, -100.0], dtype=F64)
    assert torch.allclose(
        losses.log1mexp(x),
        torch.tensor([math.log(1e-17), math.log(1e-12), math.log(1 - math.exp(-0.5)), -math.exp(-100)], dtype=F64),
        rtol=1e-12,
        atol=0,
    )


def metrics_by_hand(surrogate, rows, epsilon, high):
    """The sums that :func:`stages.losses.policy_loss` documents, of (log pi, log pi_old, A) of every trained token."""
    found = dict.fromkeys(("clip_low", "clip_high", "ratio", "ratio_sq", "k1", "k2", "k3"), 0.0)
    ranged = surrogate not in ("none", "sapo", "vespo")  # which have no range to be outside of
    if ranged:
        found["outside_range"] = 0.0
    for logp, old, advantage in rows:
        d, p, q = logp - old, math.exp(logp), math.exp(old)
        ratio = math.exp(d)
        if surrogate.startswith("dppo"):
            far = abs(p - q) if surrogate == "dppo_tv" else q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
            low, up = p < q and far > epsilon, p > q and far > high
        elif surrogate == "geo_mean":
            low, up = d < -epsilon, d > high
        else:
            low, up = ratio < 1 - epsilon and surrogate != "cispo", ratio > 1 + high
        if ranged:
            found["outside_range"] += low or up
        if surrogate in ("clip", "geo_mean", "dppo_tv", "dppo_kl"):
            found["clip_low"] += low and advantage < 0
            found["clip_high"] += up and advantage > 0
        for name, value in (
            ("ratio", ratio),
            ("ratio_sq", ratio**2),
            ("k1", -d),
            ("k2", d**2 / 2),
            ("k3", ratio - 1 - d),
        ):
            found[name] += value
    found["ratio_max"] = max(math.exp(logp - old) for logp, old, _ in rows)
    return found | {"tokens": len(rows), "log_ratio_clamped": 0}


@pytest.mark.parametrize("surrogate", ("clip", "none", "cispo", "sapo", "vespo", "geo_mean", "dppo_tv", "dppo_kl"))
def test_metrics_of_a_policy_loss_are_sums_over_its_trained_tokens(surrogate):
    x, mask, advantages = batch(4)
    advantages[3] = 0.0  # nothing is zeroed where nothing is pushed
    epsilon, high = (0.05, 0.1) if surrogate.startswith("dppo") else (0.2, 0.4)
    dirt = torch.where(mask.bool(), 0.0, math.nan)
    _, sums = losses.policy_loss(
        x["logp"] + dirt, x["old"], advantages, mask, surrogate=surrogate, epsilon=epsilon, epsilon_high=high
    )
    rows = [(float(x["logp"][b, t]), float(x["old"][b, t]), float(advantages[b])) for b, t in mask.nonzero().tolist()]
    expected = metrics_by_hand(surrogate, rows, epsilon, high)
    assert {name: float(sums[name]) for name in expected} == pytest.approx(expected, rel=1e-9)
    assert ("outside_range" in sums) == ("outside_range" in expected)
    assert 0 < expected.get("outside_range", 1) < expected["tokens"]


def test_only_the_policys_log_probs_are_trained():
    """Advantages, weights, targets and whatever was computed for an earlier policy are constants of a loss."""
    x, mask, advantages = batch(5)
    weights = torch.full_like(x["logp"], 0.7)
    others = [t.requires_grad_() for t in (x["old"], advantages, weights)]
    for surrogate in losses.SURROGATES:
        logp = x["logp"].detach().clone().requires_grad_()
        per, _ = losses.policy_loss(logp, x["old"], advantages, mask, surrogate=surrogate, weights_BT=weights)
        own, *rest = torch.autograd.grad(per.sum(), [logp, *others], allow_unused=True)
        assert own.abs().sum() > 0 and rest == [None] * 3, surrogate
    values, targets, before = (x[k].detach().clone().requires_grad_() for k in ("logp", "old", "ref"))
    loss = losses.value_loss(values, targets, mask, before, cliprange_value=0.1).sum()
    assert torch.autograd.grad(loss, [targets, before], allow_unused=True) == (None, None)


def test_impossible_settings_say_what_to_write():
    x = torch.zeros(1, 1)
    for call, word in (
        (lambda: losses.aggregate(x, x, "mean"), "token-mean"),
        (lambda: losses.aggregate(x, x, "seq-mean-token-sum-norm"), "loss_scale_factor"),
        (lambda: losses.policy_loss(x, x, x, x, surrogate="ppo"), "clip"),
        (lambda: losses.policy_loss(x, x, x, x, epsilon=0.0), "surrogate='none'"),
        (lambda: losses.kl_estimate(x, x, "k4", x), "k3"),
        (lambda: losses.dpo_loss(x, x, x, x, beta=0.0), "0.1"),
        (lambda: losses.bradley_terry_loss(x, x, label_smoothing=0.6), "label_smoothing"),
        (lambda: losses.value_loss(x, x, x, cliprange_value=0.2), "old_values_BT"),
    ):
        with pytest.raises(ValueError, match=word):
            call()


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_the_log_ratio_of_a_kl_estimator_is_clamped_in_loss_and_reward(kind):
    """To 20 nats on both sides (1.2, KL-EST), where k2 grew with the square and k3 of the reward with the log-ratio."""
    from stages.estimators import kl_estimates

    d = torch.tensor([[-25.0, -20.0, -1.0, 0.0, 1.0, 20.0, 30.0]], dtype=torch.float64)
    held = d.clamp(-20, 20)
    expected = held**2 / 2 if kind == "k2" else torch.expm1(-held) + held
    logps = d.clone().requires_grad_()
    found = losses.kl_estimate(logps, torch.zeros_like(d), kind, torch.ones_like(d))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    (gradient,) = torch.autograd.grad(found.sum(), logps)
    assert gradient[0, 0] == gradient[0, -1] == 0.0
    assert kl_estimates(d.numpy(), kind)[0].tolist() == pytest.approx(expected[0].tolist(), rel=1e-12)
    assert kl_estimates(d.numpy(), "k1").tolist() == d.tolist()


def test_the_weight_of_a_sequence_clamps_the_sum_of_its_log_ratios():
    """Not each token's: one that is far off beside others that are far off the other way is no longer 20 nats (1.2 of
    methods/rl.md)."""
    old, mu = torch.tensor([[-1.0, -16.0]], dtype=F64), torch.tensor([[-31.0, -1.0]], dtype=F64)
    mask = torch.ones(1, 2)
    of_all = losses.truncated_importance_weights(old, mu, mask, "sequence_truncate", math.inf)
    assert torch.allclose(of_all.log(), torch.tensor([[15.0]], dtype=F64))
    beyond = losses.truncated_importance_weights(old + 10, mu, mask, "sequence_truncate", math.inf)
    assert torch.allclose(beyond.log(), torch.tensor([[20.0]], dtype=F64))
    tokens = losses.truncated_importance_weights(old, mu, mask, "token_truncate", math.inf)
    assert torch.allclose(tokens.log(), torch.tensor([[20.0, -15.0]], dtype=F64))
    for level, log_ratio in (("sequence_sum", 15.0), ("sequence_mean", 7.5), ("sequence_max", 20.0)):
        for high, out in ((math.exp(log_ratio) * 1.01, False), (math.exp(log_ratio) * 0.99, True)):
            assert losses.rejected_tokens(old, mu, mask, level, "ratio", 0.0, high).all() == out, level


@pytest.mark.parametrize("mode", losses.LOSS_AGG_MODES)
@pytest.mark.parametrize("denominator", ("nonempty", "all"))
def test_a_separate_critics_errors_are_aggregated_as_the_policys_loss(mode, denominator):
    """CRITIC-LOSS: the constant of seq-mean-token-sum-norm included; one value per prompt has no length to divide by."""
    x, mask, _ = batch(4)
    values, returns = x["logp"], x["ref"]
    config = {"seq_denominator": denominator, "loss_scale_factor": 11.0 if mode.endswith("norm") else None}
    row = rl_preset("ppo", aggregation=mode, kl_reward_coef=0.0)
    _, loss = critic_update(row, values, returns, values, mask, config)
    error = torch.where(mask.bool(), (values - returns) ** 2, 0.0)
    assert torch.allclose(loss, step_mean(error, mask, mode, 11.0, denominator), rtol=1e-6)
    first = mask * (mask.cumsum(1) == 1)
    _, of_prompts = critic_update(
        rl_preset("ppo", aggregation=mode, kl_reward_coef=0.0, critic_target="bandit"),
        values,
        returns,
        values,
        first,
        config,
    )
    plain = mode.removesuffix("-norm")
    assert torch.allclose(of_prompts, step_mean(error, first, plain, None, denominator), rtol=1e-6)
