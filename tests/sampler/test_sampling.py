"""The per-step transforms: filters, log-probs, uniforms and the inverse CDF against exact answers."""

import math

import numpy as np
import pytest
import torch

from stages.decoding.sampling import (
    SamplingParams,
    bad_word_ids,
    keep_threshold,
    processed_logits,
    sample_step,
    uniforms,
)
from tests.sampler.contract import filtered_log_softmax

LOGITS = torch.log(torch.tensor([[0.05, 0.40, 0.15, 0.30, 0.10]]))


def support(**settings):
    return torch.isfinite(filtered_log_softmax(LOGITS, SamplingParams(**settings)))[0].nonzero().flatten().tolist()


@pytest.mark.parametrize(
    "settings, kept",
    [
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
    ],
)
def test_filters_keep_the_documented_tokens(settings, kept):
    assert support(**settings) == kept


def test_filters_agree_with_transformers_warpers():
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(20, 700, generator=torch.Generator().manual_seed(0)) * 2
    for p, k, m in ((0.9, 0, 0.0), (1.0, 40, 0.0), (0.8, 300, 0.0), (0.99, 0, 0.02), (0.95, 50, 0.1)):
        want = logits / 1.3
        for warper in (
            ([TopKLogitsWarper(k)] if k else [])
            + ([TopPLogitsWarper(p)] if p < 1 else [])
            + ([MinPLogitsWarper(m)] if m else [])
        ):
            want = warper(None, want)
        got = filtered_log_softmax(logits, SamplingParams(temperature=1.3, top_p=p, top_k=k, min_p=m))
        assert torch.equal(torch.isfinite(got), torch.isfinite(want))
        torch.testing.assert_close(got, torch.log_softmax(want, -1), atol=2e-6, rtol=0)


def test_step_logps_are_those_of_the_filtered_distribution():
    logits = torch.randn(400, 333, generator=torch.Generator().manual_seed(1)) * 3
    u = torch.from_numpy(uniforms(range(400), 1)[:, 0])
    for settings in (
        dict(),
        dict(temperature=0.6),
        dict(top_k=5),
        dict(top_p=0.7),
        dict(min_p=0.1),
        dict(top_k=20, top_p=0.9, temperature=1.4),
    ):
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


def test_every_token_of_a_large_vocabulary_has_its_own_interval():
    """The middle of each token's interval of the cumulated probabilities draws that token, in whatever block of the
    two-level sum it lies; greedy rows keep their own log-probs.
    """
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(0))
    p = torch.softmax(logits[0].double(), -1)
    middles = p.cumsum(-1) - p / 2
    tokens, logps = sample_step(logits.expand(200, -1), middles, SamplingParams())
    assert tokens.tolist() == list(range(200)) and torch.allclose(logps.double(), p.log(), atol=1e-5)
    rows = torch.stack([logits[0], 2 * logits[0].flip(0), 0.5 * logits[0]])
    best, logps = sample_step(rows, torch.zeros(3, dtype=torch.float64), SamplingParams(temperature=0.0))
    assert best.tolist() == rows.argmax(-1).tolist() and torch.allclose(
        logps, torch.log_softmax(rows, -1).amax(-1), atol=1e-5
    )


def test_a_word_of_one_token_is_banned_everywhere():
    z = processed_logits(
        torch.zeros(2, 9),
        SamplingParams(bad_words=("no",)),
        torch.zeros(2, 1, dtype=torch.int64),
        torch.tensor([0, 1]),
        bad_ids=[[7]],
    )
    assert (z[:, 7] == -math.inf).all() and (z[:, :7] == 0).all() and (z[:, 8] == 0).all()


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


def test_uniforms_are_those_of_splitmix64():
    """The draws of a seed are part of what a run is: by plain integers, and against published numbers of the generator
    (Rosetta Code, seed 1234567).
    """

    def splitmix(state, n):
        for _ in range(n):
            state = (state + 0x9E3779B97F4A7C15) % 2**64
            z = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) % 2**64
            z = ((z ^ z >> 27) * 0x94D049BB133111EB) % 2**64
            yield z ^ z >> 31

    assert list(splitmix(1234567, 3)) == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    for seed in (0, 1234567, -1, 2**63 + 9):
        (key,) = splitmix(seed % 2**64, 1)
        assert uniforms([seed], 5)[0].tolist() == [(z >> 11) / 2**53 for z in splitmix(key, 5)]
        assert uniforms([seed], 2, start=3)[0].tolist() == uniforms([seed], 5)[0, 3:].tolist()


@pytest.mark.parametrize(
    "settings, advice",
    [
        (dict(temperature=-1), "0 for greedy"),
        (dict(top_p=0), r"\(0, 1\]"),
        (dict(top_k=-2), "0 turns"),
        (dict(min_p=1.0), "0.0 turns"),
        (dict(max_new_tokens=0), "at least 1"),
        (dict(stop_strings=("",)), "remove"),
        (dict(stop_strings="END"), r"stop_strings=\('END',\)"),
        (dict(bad_words="no"), r"bad_words=\('no',\)"),
        (dict(bad_words=(" ",)), "remove"),
        (dict(repetition_penalty=0), "1.0 turns"),
        (dict(min_tokens=99), "max_new_tokens=64"),
        (dict(logit_bias={3: math.inf}), "-100 to ban"),
    ],
)
def test_bad_settings_say_what_to_write(settings, advice):
    with pytest.raises(ValueError, match=advice):
        SamplingParams(**settings)


def rows(n=6, vocabulary=50, seed=3):
    """Random logits with prompts and completions of uneven length: logits, generated, counts, prompts, prompt
    lengths.
    """
    g = torch.Generator().manual_seed(seed)
    counts, lengths = torch.tensor([0, 1, 2, 5, 7, 8][:n]), torch.tensor([4, 1, 3, 4, 2, 4][:n])
    return (
        torch.randn(n, vocabulary, generator=g) * 3,
        torch.randint(0, vocabulary, (n, 8), generator=g),
        counts,
        torch.randint(0, vocabulary, (n, 4), generator=g),
        lengths,
    )


def test_processors_agree_with_transformers():
    """Repetition penalty, minimum length and biases of whole rows, against transformers' own processors on each row
    alone.
    """
    from transformers import (
        MinNewTokensLengthLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
    )

    logits, generated, counts, prompts, lengths = rows()
    kept = logits.clone()
    params = SamplingParams(repetition_penalty=1.4, min_tokens=3, stop_ids={1, 2}, logit_bias={5: 2.5, 9: -100.0})
    got = processed_logits(logits, params, generated, counts, prompts, lengths)
    assert torch.equal(logits, kept)
    for i in range(6):
        ids = torch.cat([prompts[i, : lengths[i]], generated[i, : counts[i]]])[None]
        want = SequenceBiasLogitsProcessor({(5,): 2.5, (9,): -100.0})(ids, logits[i : i + 1].clone())
        want = RepetitionPenaltyLogitsProcessor(1.4)(ids, want)
        want = MinNewTokensLengthLogitsProcessor(int(lengths[i]), 3, [1, 2])(ids, want)
        torch.testing.assert_close(got[i : i + 1], want)


def test_frequency_and_presence_count_the_completion_only():
    logits, generated, counts, prompts, lengths = rows()
    got = processed_logits(
        logits, SamplingParams(frequency_penalty=0.5, presence_penalty=0.25), generated, counts, prompts, lengths
    )
    for i in range(6):
        said = generated[i, : counts[i]].tolist()
        want = logits[i] - torch.tensor([0.5 * said.count(v) + 0.25 * (v in said) for v in range(50)])
        torch.testing.assert_close(got[i], want)


def test_bad_words_ban_the_last_token_after_the_first_ones():
    logits, generated, counts, *_ = rows()
    generated[3, 3:5] = torch.tensor([11, 12])  # row 3 has 5 tokens, and ends so; row 4 has 7 and does not
    generated[5, 6:8] = torch.tensor([11, 12])
    generated[4, 3:5] = torch.tensor([11, 12])
    got = processed_logits(logits, SamplingParams(), generated, counts, bad_ids=[[4], [11, 12, 13]])
    banned = [torch.isinf(row).nonzero().flatten().tolist() for row in got]
    assert banned == [[4], [4], [4], [4, 13], [4], [4, 13]]


def test_bad_words_are_banned_at_the_start_and_after_a_space(tokenizer):
    assert bad_word_ids(tokenizer, ["ab"]) == [[65, 66], [0, 65, 66]]


def test_log_probs_are_those_of_the_processed_and_filtered_distribution():
    logits, generated, counts, prompts, lengths = rows(vocabulary=300)
    params = SamplingParams(
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        logit_bias={7: 4.0},
        temperature=0.8,
        top_p=0.9,
    )
    z = processed_logits(logits, params, generated, counts, prompts, lengths)
    token, logp = sample_step(z, torch.from_numpy(uniforms(range(6), 1)[:, 0]), params)
    torch.testing.assert_close(
        logp, filtered_log_softmax(z, params).gather(-1, token[:, None])[:, 0], atol=3e-6, rtol=0
    )
    assert (
        not params.plain
        and SamplingParams(temperature=0.3).plain
        and not SamplingParams(top_k=3).plain
        and not SamplingParams(temperature=0).plain
    )
