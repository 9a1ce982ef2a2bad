"""The sampler on every architecture: its tokens' log-probs are the trainer's, whatever sits in the other slots, and
what it cannot decode it refuses.
"""

import numpy as np
import pytest
import torch
import transformers

from stages.batching import make_item
from stages.decoding.decoders import DecoderError, make_decoder
from stages.decoding.lean_decoder import LeanDecoder, why_not_lean
from stages.decoding.model_decoders import GenericDecoder, WholeDecoder
from stages.decoding.sampler import Sampler, SamplingParams
from tests.architectures import FAST, MODELS, OTHER, VOCABULARY, build, own_logps

STATEFUL = {"qwen3.5", "lfm2"}  # decoded whole
PARAMS = SamplingParams(max_new_tokens=24, stop_ids={3, 4})


def prompts(seed: int = 0):
    """Some longer than every window, one that begins like another, and several that share a beginning worth keeping."""
    rng = np.random.default_rng(seed)
    made = [rng.integers(5, VOCABULARY, n).tolist() for n in (5, 30, 3, 14)]
    shared = rng.integers(5, VOCABULARY, 70).tolist()
    return [*made, made[1][:20] + [7], *(shared + rng.integers(5, VOCABULARY, n).tolist() for n in (3, 9, 1, 5, 2))]


def check(model, given, found, params=PARAMS):
    for prompt, group in zip(given, found):
        for row in group:
            item = make_item("row", prompt, [row.ids], [[1] * len(row.ids)])
            with torch.no_grad():
                (logps,) = own_logps(model, [item])
            torch.testing.assert_close(torch.tensor(row.logps), logps, atol=5e-5, rtol=0)


@pytest.mark.parametrize("lean", (None, False))
@pytest.mark.parametrize("name", MODELS)
def test_log_probs_are_the_models_own_in_any_company(name, lean):
    if lean is False and name in OTHER:
        pytest.skip("the same engine")
    model, given = build(name), prompts()
    engine = LeanDecoder if name in FAST and lean is None else WholeDecoder if name in STATEFUL else GenericDecoder
    assert type(make_decoder(model, lean)) is engine, why_not_lean(model)
    seeds = [[10 * i, 10 * i + 1] for i in range(len(given))]
    found = Sampler(model, None, max_batch=5, lean=lean).generate(given, PARAMS, seeds)
    check(model, given, found)
    again = Sampler(model, None, max_batch=1, lean=lean).generate(given[::-1], PARAMS, seeds[::-1])[::-1]
    assert [[row.ids for row in group] for group in again] == [[row.ids for row in group] for group in found]


@pytest.mark.parametrize(
    "name", ("gemma2", "gemma3", "olmo3", "phi3 window", "granite", "qwen3-moe", "cohere2", "gpt-oss", "lfm2")
)
def test_turns_continue_rows_that_are_kept(name):
    model, given = build(name), prompts()[5:]
    sampler = Sampler(model, None, max_batch=4)
    with sampler.remembering():
        first = sampler.generate(given, PARAMS, [[i] for i in range(len(given))])
        longer = [prompt + row.ids + [9, 8] for prompt, (row,) in zip(given, first)]
        check(model, longer, sampler.generate(longer, PARAMS, [[i] for i in range(len(given))]))


@pytest.mark.parametrize("name", ("gemma2", "gemma3", "granite", "mixtral", "olmo2", "lfm2"))
def test_another_type_is_that_of_all_weights(name):
    model, given = build(name), prompts()
    found = Sampler(model, None, max_batch=5, dtype=torch.float64).generate(given, PARAMS, [[1]] * len(given))
    check(model, given, found)
    low = Sampler(model, None, max_batch=5, dtype=torch.bfloat16).generate(
        given, SamplingParams(max_new_tokens=1), [[1]] * len(given)
    )
    assert all(np.isfinite(row.logps).all() for (row,) in low)


def test_windows_that_a_config_names_otherwise_are_kept_to():
    torch.manual_seed(0)
    config = transformers.GPTNeoConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=16,
        max_position_embeddings=256,
    )
    model = transformers.GPTNeoForCausalLM(config).eval()
    given, params = [[5] * 9, [7, 8, 9]], SamplingParams(max_new_tokens=7)
    check(model, given, Sampler(model, None).generate(given, params, [[1], [2]]), params)
    with pytest.raises(DecoderError, match="windows of its own kind.*<= 16"):
        Sampler(model, None).generate(given, SamplingParams(max_new_tokens=8), [[1], [2]])


def test_a_model_that_cannot_be_decoded_row_by_row_is_computed_whole():
    """ALiBi counts places in a batch; so does a model whose positions are not given to it."""
    torch.manual_seed(0)
    shape = dict(vocab_size=VOCABULARY, hidden_size=32)
    for model, reason in (
        (
            transformers.FalconForCausalLM(
                transformers.FalconConfig(num_hidden_layers=1, num_attention_heads=4, alibi=True, **shape)
            ),
            "rows of different length",
        ),
        (
            transformers.BloomForCausalLM(transformers.BloomConfig(n_layer=1, n_head=4, **shape)),
            "takes no position_ids",
        ),
        (build("stablelm"), "other log-probs than each by itself"),
    ):
        if reason.startswith("other"):
            inner = model.forward
            model.forward = lambda *args, position_ids=None, past_key_values=None, inner=inner, **more: inner(
                *args, past_key_values=past_key_values, **more
            )
        found = make_decoder(model.eval())
        assert type(found) is WholeDecoder and reason in found.reason
        given = prompts()
        check(model, given, Sampler(model, None, max_batch=4).generate(given, PARAMS, [[1, 2]] * len(given)))
