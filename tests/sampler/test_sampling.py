"""The per-step transforms: filters, log-probs, uniforms and the inverse CDF against exact answers."""

import math

import numpy as np
import pytest
import torch

from stages.sampling import SamplingParams, filtered_log_softmax, keep_threshold, sample_step, uniforms

LOGITS = torch.log(torch.tensor([[0.05, 0.40, 0.15, 0.30, 0.10]]))


def support(**settings):
    return torch.isfinite(filtered_log_softmax(LOGITS, SamplingParams(**settings)))[0].nonzero().flatten().tolist()


@pytest.mark.parametrize("settings, kept", [
    (dict(), [0, 1, 2, 3, 4]),
    (dict(top_k=2), [1, 3]),
    (dict(top_k=9), [0, 1, 2, 3, 4]),
    (dict(top_p=0.39), [1]),
    (dict(top_p=0.5), [1, 3]),
    (dict(top_p=0.71), [1, 2, 3]),
    (dict(top_k=3, top_p=0.8), [1, 3]),  # renormalised over three: .47 + .35 reach .8
    (dict(min_p=0.3), [1, 2, 3]),
    (dict(min_p=0.2, top_k=3), [1, 2, 3]),
    (dict(min_p=0.2, temperature=0.5), [1, 3]),  # squared odds
])
def test_filters_keep_the_documented_tokens(settings, kept):
    assert support(**settings) == kept


def test_filters_agree_with_transformers_warpers():
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(20, 700, generator=torch.Generator().manual_seed(0)) * 2
    for p, k, m in ((0.9, 0, 0.0), (1.0, 40, 0.0), (0.8, 300, 0.0), (0.99, 0, 0.02), (0.95, 50, 0.1)):
        want = logits / 1.3
        for warper in ([TopKLogitsWarper(k)] if k else []) + ([TopPLogitsWarper(p)] if p < 1 else []) + ([MinPLogitsWarper(m)] if m else []):
            want = warper(None, want)
        got = filtered_log_softmax(logits, SamplingParams(temperature=1.3, top_p=p, top_k=k, min_p=m))
        assert torch.equal(torch.isfinite(got), torch.isfinite(want))
        torch.testing.assert_close(got, torch.log_softmax(want, -1), atol=2e-6, rtol=0)


def test_step_logps_are_those_of_the_filtered_distribution():
    logits = torch.randn(400, 333, generator=torch.Generator().manual_seed(1)) * 3
    u = torch.from_numpy(uniforms(range(400), 1)[:, 0])
    for settings in (dict(), dict(temperature=0.6), dict(top_k=5), dict(top_p=0.7), dict(min_p=0.1), dict(top_k=20, top_p=0.9, temperature=1.4)):
        params = SamplingParams(**settings)
        token, logp = sample_step(logits, u, params)
        want = filtered_log_softmax(logits, params).gather(-1, token[:, None])[:, 0]
        torch.testing.assert_close(logp, want, atol=3e-6, rtol=0)
        threshold = keep_threshold(logits / params.temperature, params)
        if threshold is not None:
            assert bool((logits / params.temperature).gather(-1, token[:, None]).ge(threshold).all())


def test_inverse_cdf_is_exact_and_never_draws_an_impossible_token():
    logits = torch.full((6, 130), -math.inf)
    logits[:, 3], logits[:, 64], logits[:, 129] = math.log(0.25), math.log(0.25), math.log(0.5)
    u = torch.tensor([0.0, 0.2499, 0.2501, 0.4999, 0.5001, 1 - 2**-53], dtype=torch.float64)
    assert sample_step(logits, u, SamplingParams())[0].tolist() == [3, 3, 64, 64, 129, 129]


def test_draws_follow_the_distribution_chi_square():
    draws, logits = 40_000, torch.tensor([0.3, -1.0, 1.2, 0.0, -2.0, 0.7])
    params = SamplingParams(temperature=0.8, top_k=5)
    probability = filtered_log_softmax(logits[None], params)[0].exp().double().numpy()
    u = torch.from_numpy(uniforms(range(draws), 1)[:, 0])
    tokens = sample_step(logits.expand(draws, -1), u, params)[0].numpy()
    seen = np.bincount(tokens, minlength=6)
    assert seen[4] == 0 and probability[4] == 0
    live = probability > 0
    chi = ((seen - draws * probability)[live] ** 2 / (draws * probability[live])).sum()
    assert chi < 18.5  # 99.9% point of 4 degrees of freedom


def test_uniforms_depend_on_seed_and_position_only_and_look_uniform():
    u = uniforms([5, -1, 2**70 + 5, 6], 5000)
    assert u.shape == (4, 5000) and u.dtype == np.float64 and (u >= 0).all() and (u < 1).all()
    assert np.array_equal(u[0], u[2])  # seeds are taken modulo 2**64
    assert np.array_equal(uniforms([6], 7, start=100)[0], u[3, 100:107])
    assert abs(u[0].mean() - 0.5) < 0.02 and abs(np.corrcoef(u[0], u[3])[0, 1]) < 0.05
    assert abs(np.corrcoef(u[0, 1:], u[0, :-1])[0, 1]) < 0.05
    neighbours = uniforms(range(5000), 1)[:, 0]
    assert abs(np.corrcoef(neighbours[1:], neighbours[:-1])[0, 1]) < 0.05


@pytest.mark.parametrize("settings, advice", [
    (dict(temperature=-1), "0 for greedy"), (dict(top_p=0), r"\(0, 1\]"), (dict(top_k=-2), "0 turns"),
    (dict(min_p=1.0), "0.0 turns"), (dict(max_new_tokens=0), "at least 1"), (dict(stop_strings=("",)), "remove"),
    (dict(stop_strings="END"), r"stop_strings=\('END',\)")])
def test_bad_settings_say_what_to_write(settings, advice):
    with pytest.raises(ValueError, match=advice):
        SamplingParams(**settings)
