"""Steps of fixed shapes that are captured and replayed (stages/decoding/replay.py), with a capture that stands for a
CUDA graph: it always computes from the same buffers and always writes the same one."""

import copy

import numpy as np
import pytest
import torch

from stages.decoding import lean_weights, replay
from stages.decoding.lean_decoder import LeanDecoder
from stages.decoding.model_decoders import copied_as
from stages.decoding.sampler import Sampler, SamplingParams

PARAMS = {
    "plain": SamplingParams(max_new_tokens=40, stop_ids=frozenset(range(12))),
    "top_k": SamplingParams(max_new_tokens=24, top_k=7, min_p=0.02, temperature=0.7, stop_ids=frozenset(range(4))),
    "greedy": SamplingParams(max_new_tokens=12, temperature=0.0),
    "top_p": SamplingParams(max_new_tokens=24, top_p=0.6, stop_ids=frozenset(range(4))),
    "penalties": SamplingParams(max_new_tokens=24, repetition_penalty=1.3, min_tokens=5, stop_ids=frozenset(range(9))),
}


def graph_like(log):
    """A capture whose result writes one and the same tensor each time, as a CUDA graph does."""

    def capture(step):
        found = []
        log.append("captured")

        def again():
            log.append("replayed")
            now = step()
            if not found:
                found.append(now.clone())
            return found[0].copy_(now)

        return again

    return capture


@pytest.fixture
def as_on_cuda(monkeypatch):
    """The sampler takes the way that it takes on CUDA; what was captured and replayed."""
    log = []
    monkeypatch.setattr(LeanDecoder, "replayable", property(lambda self: True))
    monkeypatch.setattr(LeanDecoder, "wants_blocks", property(lambda self: False))
    monkeypatch.setattr(lean_weights, "prefers_onednn", lambda: False)  # as AMD's processors do, in a layout of its own
    monkeypatch.setattr(replay, "cuda_graphs", lambda: graph_like(log))
    monkeypatch.setattr(replay, "COLUMNS", 16)  # rows of these models have 96 tokens at most
    monkeypatch.setattr("stages.decoding.sampler.COLUMN_STEP", 8)
    monkeypatch.setattr("stages.decoding.sampler.FIRST_COLUMNS", 16)
    return log


def prompts_of(vocabulary: int):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocabulary, n).tolist() for n in (3, 9, 1, 50, 30, 7, 40)]
    return prompts, [[10 * i + g for g in range(1 + i % 3)] for i in range(len(prompts))]


@pytest.mark.parametrize("settings", PARAMS)
@pytest.mark.parametrize("slots", [1, 3, 13, 64])
def test_replayed_steps_draw_the_same_tokens(models, as_on_cuda, monkeypatch, settings, slots):
    model = models("qwen3")
    prompts, seeds = prompts_of(model.config.vocab_size)
    found = Sampler(model, None, max_batch=slots).generate(prompts, PARAMS[settings], seeds)
    assert as_on_cuda.count("replayed") > as_on_cuda.count("captured") > 0
    monkeypatch.undo()
    wanted = Sampler(model, None, max_batch=slots).generate(prompts, PARAMS[settings], seeds)
    for mine, theirs in zip(found, wanted):
        for a, b in zip(mine, theirs):
            assert a.ids == b.ids and a.finish_reason == b.finish_reason
            np.testing.assert_allclose(a.logps, b.logps, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "llama3-rope", "qwen2"])
def test_every_family_replays(models, as_on_cuda, monkeypatch, family):
    model = models(family)
    prompts, seeds = prompts_of(model.config.vocab_size)
    found = Sampler(model, None, max_batch=8).generate(prompts, PARAMS["plain"], seeds)
    monkeypatch.undo()
    assert [[c.ids for c in group] for group in found] == [
        [c.ids for c in group] for group in Sampler(model, None, max_batch=8).generate(prompts, PARAMS["plain"], seeds)
    ]


def test_prompts_are_prefilled_in_few_shapes(models, as_on_cuda, monkeypatch):
    """Whatever their number and lengths; what fills a batch up is nobody's."""
    model, params = models("llama"), SamplingParams(max_new_tokens=3)
    shapes, prefill = set(), LeanDecoder.prefill
    requests = [
        ([[5 + k] * (1 + (7 * k + n) % 60) for k in range(n)], [[k] for k in range(n)]) for n in range(1, 20, 3)
    ]
    with monkeypatch.context() as patch:
        patch.setattr(
            LeanDecoder, "prefill", lambda self, ids, *more: (shapes.add(ids.shape), prefill(self, ids, *more))[1]
        )
        found = [Sampler(model, None, max_batch=16).generate(prompts, params, seeds) for prompts, seeds in requests]
    monkeypatch.undo()
    wanted = [Sampler(model, None, max_batch=16).generate(prompts, params, seeds) for prompts, seeds in requests]
    assert {rows for rows, _ in shapes} == {2, 4, 8, 16} and {width for _, width in shapes} == {32, 64}
    assert [[[c.ids for c in group] for group in one] for one in found] == [
        [[c.ids for c in group] for group in one] for one in wanted
    ]


def test_a_step_is_thrown_away_with_the_storage_it_wrote_to(models, as_on_cuda):
    """Rows that outgrow the KV storage get a new one; what was captured over the old one must not run again."""
    model = models("llama")
    long = SamplingParams(max_new_tokens=90)
    prompts, seeds = [[1, 2, 3]], [[1, 2]]
    replayed = Sampler(model, None, max_batch=2).generate(prompts, long, seeds)
    assert as_on_cuda.count("captured") >= 2
    assert [c.ids for c in replayed[0]] == [
        c.ids for c in Sampler(model, None, max_batch=2, lean=False).generate(prompts, long, seeds)[0]
    ]


def test_buckets():
    assert [replay.bucket(n, 64) for n in (1, 2, 3, 5, 8, 9, 16, 17, 60, 64)] == [2, 2, 4, 8, 8, 16, 16, 24, 64, 64]
    assert [replay.bucket(n, 11) for n in (1, 9, 11)] == [2, 11, 11] and replay.bucket(1, 1) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("settings", PARAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_graphs_draw_what_steps_without_them_draw(models, monkeypatch, settings, dtype):
    model = models("qwen3").to("cuda")
    prompts, seeds = prompts_of(model.config.vocab_size)
    try:
        found = Sampler(model, None, max_batch=13, dtype=dtype).generate(prompts, PARAMS[settings], seeds)
        monkeypatch.setattr(LeanDecoder, "replayable", property(lambda self: False))
        wanted = Sampler(model, None, max_batch=13, dtype=dtype).generate(prompts, PARAMS[settings], seeds)
    finally:
        model.to("cpu")
    if dtype == torch.float32:
        assert [[c.ids for c in group] for group in found] == [[c.ids for c in group] for group in wanted]
    else:  # rounding may decide a draw, and then everything after it
        same = [a.ids[0] == b.ids[0] for mine, theirs in zip(found, wanted) for a, b in zip(mine, theirs)]
        assert sum(same) >= 0.9 * len(same)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("fuses", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_steps_outlive_a_call(models, monkeypatch, dtype, fuses):
    """They compute with the weights of the next one, and draw what a sampler draws that has captured nothing yet."""
    monkeypatch.setattr(LeanDecoder, "fuses", fuses)
    model = copy.deepcopy(models("llama")).to("cuda")
    prompts, seeds = prompts_of(model.config.vocab_size)
    sampler, made = Sampler(model, None, max_batch=13, dtype=dtype), []
    capture = replay.cuda_graphs
    monkeypatch.setattr(replay, "cuda_graphs", lambda: lambda step, inner=capture(): (made.append(1), inner(step))[1])
    for _ in range(1 + replay.WARM):
        sampler.generate(prompts, PARAMS["plain"], seeds)
    count = len(made)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    found = sampler.generate(prompts, PARAMS["plain"], seeds)
    assert len(made) == count > 0
    fresh = Sampler(model, None, max_batch=13, dtype=dtype).generate(prompts, PARAMS["plain"], seeds)
    assert [[c.ids for c in group] for group in found] == [[c.ids for c in group] for group in fresh]


@pytest.mark.parametrize("name, lean", [("llama", True), ("qwen3", True), ("gpt2", False), ("qwen2", False)])
def test_bfloat16_samples_as_the_model_in_bfloat16_does(models, name, lean):
    """Two ways to the same weights: rounded by the sampler at every call, and by the model itself once."""
    model = models(name)
    prompts, seeds = prompts_of(model.config.vocab_size)
    sampler = Sampler(model, None, max_batch=5, lean=lean, dtype=torch.bfloat16)
    rounded = Sampler(copied_as(model, torch.bfloat16), None, max_batch=5, lean=lean)
    found, wanted = (engine.generate(prompts, PARAMS["plain"], seeds) for engine in (sampler, rounded))
    # its heads have 8 values: the own forward folds a scale into the queries that is no power of two, before rounding
    if name != "llama":
        assert [[(c.ids, c.logps) for c in group] for group in found] == [
            [(c.ids, c.logps) for c in group] for group in wanted
        ]
    assert (
        max(
            abs(a.logps[0] - b.logps[0])
            for mine, theirs in zip(found, wanted)
            for a, b in zip(mine, theirs)
            if a.ids[0] == b.ids[0]
        )
        < 0.02
    )
    assert not sampler.exact_logps and rounded.exact_logps and sampler.name == "built-in in bfloat16"
    assert model.dtype == torch.float32 and Sampler(model, None, dtype=torch.float32).exact_logps
    exact = Sampler(model, None, max_batch=5, lean=lean).generate(prompts, PARAMS["plain"], seeds)
    first = [
        (a.logps[0], b.logps[0])
        for mine, theirs in zip(found, exact)
        for a, b in zip(mine, theirs)
        if a.ids[0] == b.ids[0]
    ]
    assert 0 < max(abs(a - b) for a, b in first) < 0.2  # it is another type, and near
