"""The sampler's CUDA graphs on the second device (tests/second_device.py), which replays what was captured at the
addresses it had.
"""

import copy
import gc
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from stages.decoding import replay
from stages.decoding.lean_decoder import LeanDecoder
from stages.decoding.sampler import HELD_SHARE, Sampler, SamplingParams
from stages.models.modeling import freeze
from stages.running import cuda
from tests import second_device as second
from tests.sampler.test_replay import PARAMS, prompts_of


pytestmark = pytest.mark.skipif(second.REAL, reason="of the pretended device; test_replay.py has the GPU's own")


@pytest.fixture
def captured(monkeypatch):
    """What was captured and replayed."""
    log, made, again = [], second.graph, second.CUDAGraph.replay
    monkeypatch.setattr(second, "graph", lambda *given, **more: (log.append("captured"), made(*given, **more))[1])
    monkeypatch.setattr(second.CUDAGraph, "replay", lambda graph: (log.append("replayed"), again(graph))[1])
    monkeypatch.setattr(replay, "COLUMNS", 16)  # rows of these models have 96 tokens at most
    monkeypatch.setattr("stages.decoding.sampler.COLUMN_STEP", 8)
    monkeypatch.setattr("stages.decoding.sampler.FIRST_COLUMNS", 16)
    return log


def there(model):
    return freeze(copy.deepcopy(model)).to(second.DEVICE)


@pytest.mark.parametrize("settings", PARAMS)
def test_graphs_draw_the_tokens_of_steps_without_them(models, captured, monkeypatch, settings):
    model = models("qwen3")
    prompts, seeds = prompts_of(model.config.vocab_size)
    wanted = Sampler(model, None, max_batch=5).generate(prompts, PARAMS[settings], seeds)
    with second.second_device(monkeypatch):
        found = Sampler(there(model), None, max_batch=5).generate(prompts, PARAMS[settings], seeds)
    assert captured.count("replayed") > captured.count("captured") > 0
    for mine, theirs in zip(found, wanted):
        for a, b in zip(mine, theirs):
            assert a.ids == b.ids and a.finish_reason == b.finish_reason
            np.testing.assert_allclose(a.logps, b.logps, atol=2e-5)


def test_storage_that_grows_takes_new_graphs_and_a_new_pool(models, captured, monkeypatch):
    """A pool of which every graph is gone is an error of torch's allocator for the next one."""
    model, long = models("llama"), SamplingParams(max_new_tokens=90)
    with second.second_device(monkeypatch):
        found = Sampler(there(model), None, max_batch=2).generate([[1, 2, 3]], long, [[1, 2]])
    assert captured.count("captured") >= 2
    assert [c.ids for c in found[0]] == [
        c.ids for c in Sampler(model, None, max_batch=2).generate([[1, 2, 3]], long, [[1, 2]])[0]
    ]


def test_rotary_tables_that_are_computed_anew_leave_those_of_a_graph(models, captured, monkeypatch):
    """A longer prompt that is computed beside rows that are decoded: what was captured reads the table of its time."""
    model = models("llama")
    with second.second_device(monkeypatch), torch.no_grad():
        decoder = LeanDecoder(there(model))
        decoder.refresh()
        ids = torch.tensor([[1, 2, 3], [4, 5, 6]], device=second.DEVICE)
        kv = second_kv(decoder, ids)
        run, plain = replay.Replayed(decoder, 2), []
        run.begin(SamplingParams(max_new_tokens=9))
        run.put([0, 1], [7, 8], [3, 3], [1, 1], np.random.default_rng(0).random((2, 9)))
        for k in range(replay.WARM + 3):
            if k == replay.WARM + 1:
                decoder.rotations(3 * decoder.positions)
            plain.append(run(kv, 2, 4 + k).read())
    assert captured == ["captured", "replayed", "replayed", "replayed"] and all(len(tokens) == 2 for tokens, _ in plain)


def tokens_of(found):
    return [[c.ids for c in group] for group in found]


@pytest.mark.parametrize("settings", ["plain", "top_p"])
def test_a_second_call_captures_nothing_and_sees_weights_that_changed(models, captured, monkeypatch, settings):
    """What was captured stays, over weights that are read again, and KV of the call before is not read."""
    model, params = copy.deepcopy(models("qwen3")), PARAMS[settings]
    prompts, seeds = prompts_of(model.config.vocab_size)
    with second.second_device(monkeypatch):
        away = there(model)
        sampler = Sampler(away, None, max_batch=5, dtype=torch.float64)  # its weights are copies
        first = sampler.generate(prompts, params, seeds)
        held = sampler.held
        with torch.no_grad():
            for k, parameter in enumerate(model.parameters()):
                parameter.mul_(1.1 + 0.01 * k)
            for name, parameter in away.named_parameters():
                parameter.copy_(model.get_parameter(name))
        held.kv.whole.fill_(50.0)
        held.kv.mask.fill_(0)
        found = sampler.generate(prompts, params, seeds)
        often = sum(runs > replay.WARM for runs, _ in held.replayed.steps.values())
        assert captured.count("captured") == often > 0 and sampler.held is held
        sampler.release()
        assert sampler.held is None and sampler.generate(prompts, params, seeds) == found
    assert tokens_of(found) == tokens_of(
        Sampler(model, None, max_batch=5, dtype=torch.float64).generate(prompts, params, seeds)
    )
    assert tokens_of(found) != tokens_of(first)


def test_weights_that_lie_elsewhere_are_captured_anew_and_not_written_to(models, captured, monkeypatch):
    """A model computed in its own type lends the sampler its tensors; averaged weights are swapped in and out."""
    model = models("llama")
    prompts, seeds = prompts_of(model.config.vocab_size)
    with second.second_device(monkeypatch):
        away = there(model)
        own = dict(away.named_parameters())
        others = {name: torch.nn.Parameter(p * 1.2, requires_grad=False) for name, p in own.items()}
        values = [{name: p.clone() for name, p in data.items()} for data in (own, others)]
        sampler, found = Sampler(away, None, max_batch=5), []
        for data in (own, others, own):
            for name, p in data.items():
                module, _, last = name.rpartition(".")
                setattr(away.get_submodule(module), last, p)
            found.append(sampler.generate(prompts, PARAMS["plain"], seeds))
        for data, was in zip((own, others), values):
            assert all(torch.equal(p, was[name]) for name, p in data.items())
        assert found[2] == Sampler(there(model), None, max_batch=5).generate(prompts, PARAMS["plain"], seeds)
    assert tokens_of(found[0]) == tokens_of(found[2]) != tokens_of(found[1])


def test_what_is_held_serves_other_settings_and_sizes(models, captured, monkeypatch):
    """Other temperatures, longer rows, more and fewer of them, one after the other from one sampler."""
    model = models("llama")
    prompts, seeds = prompts_of(model.config.vocab_size)
    calls = [
        (prompts, SamplingParams(max_new_tokens=9), seeds),
        (prompts[:2], SamplingParams(max_new_tokens=20, temperature=0.0), seeds[:2]),
        (prompts[2:], SamplingParams(max_new_tokens=24, temperature=0.5), seeds[2:]),
        (prompts[:1], SamplingParams(max_new_tokens=6, top_p=0.7), [[5]]),
        *((prompts[:1], SamplingParams(max_new_tokens=5, temperature=1 + k / 5), [[5]]) for k in range(5)),
        (prompts[:4], SamplingParams(max_new_tokens=9), seeds[:4]),
    ]
    with second.second_device(monkeypatch):
        sampler = Sampler(there(model), None, max_batch=6)
        found = [sampler.generate(*call) for call in calls]
        distributions = {key[0] for key in sampler.held.replayed.steps}
    for call, one in zip(calls, found):
        assert tokens_of(one) == tokens_of(Sampler(model, None, max_batch=6).generate(*call))
    assert 1 < len(distributions) <= replay.DISTRIBUTIONS


def test_little_of_the_memory_that_is_free_is_held(models, captured, monkeypatch):
    request = [[1, 2, 3]], SamplingParams(max_new_tokens=6), [[1]]
    with second.second_device(monkeypatch):
        sampler = Sampler(there(models("llama")), None, dtype=torch.float64)
        sampler.generate(*request)
        held = sampler.held
        kv = held.kv.whole
        assert held.bytes == 8 * (sum(p.numel() for p in sampler.model.parameters()) + kv.numel())
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (HELD_SHARE * held.bytes, second.MEMORY))
        sampler.generate(*request)
        assert sampler.held is held
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (HELD_SHARE * held.bytes - 1, second.MEMORY))
        sampler.generate(*request)
        assert sampler.held is None


def test_rows_that_end_at_every_step_draw_what_they_draw_alone(models, captured, monkeypatch):
    """A step is started before it is known which rows the last one has ended."""
    model, longest, slots = models("llama"), 6, 2
    prompts, seeds = [[1, 2, 3], [4], [5, 6]], [[1, 2], [3], [4, 5]]
    plain = Sampler(model, None, max_batch=1).generate(prompts, SamplingParams(max_new_tokens=longest), seeds)
    with second.second_device(monkeypatch):
        sampler = Sampler(there(model), None, max_batch=slots)
        for length in range(1, longest + 1):
            found = sampler.generate(prompts, SamplingParams(max_new_tokens=length), seeds)
            assert tokens_of(found) == [[ids[:length] for ids in group] for group in tokens_of(plain)]
        for stop in plain[0][1].ids:
            found = sampler.generate(prompts, SamplingParams(max_new_tokens=longest, stop_ids=frozenset([stop])), seeds)
            for group, whole in zip(tokens_of(found), tokens_of(plain)):
                assert group == [ids[: ids.index(stop) + 1] if stop in ids else ids for ids in whole]


def test_stop_strings_end_rows_whose_next_step_was_started(models, tokenizer, captured, monkeypatch):
    model, seeds = models("llama"), [[1, 2, 3], [4, 5]]
    request = [[40, 50], [60]], SamplingParams(max_new_tokens=20, stop_strings=("e", "7", "AB")), seeds
    with second.second_device(monkeypatch):
        found = Sampler(there(model), tokenizer, max_batch=2).generate(*request)
    wanted = Sampler(model, tokenizer, max_batch=2).generate(*request)
    assert [[(c.ids, c.text, c.finish_reason) for c in group] for group in found] == [
        [(c.ids, c.text, c.finish_reason) for c in group] for group in wanted
    ]
    assert any(c.finish_reason == "stop" for group in found for c in group)


def test_a_step_is_started_before_the_last_one_is_read(models, captured, monkeypatch):
    log, read, called = [], replay.Drawn.read, replay.Replayed.__call__
    monkeypatch.setattr(replay.Drawn, "read", lambda drawn: (log.append("read"), read(drawn))[1])
    monkeypatch.setattr(replay.Replayed, "__call__", lambda *given: (log.append("started"), called(*given))[1])
    with second.second_device(monkeypatch):
        Sampler(there(models("llama")), None).generate([[1, 2, 3]], SamplingParams(max_new_tokens=6), [[1]])
    assert log == ["started", *["started", "read"] * 4, "read"]


def test_threads_that_sample_from_one_sampler_draw_their_own_tokens(models, captured, monkeypatch):
    model = models("llama")
    prompts, seeds = prompts_of(model.config.vocab_size)
    wanted = tokens_of(Sampler(model, None, max_batch=5).generate(prompts, PARAMS["plain"], seeds))
    with second.second_device(monkeypatch):
        sampler, found = Sampler(there(model), None, max_batch=5), {}

        def sample(name):
            found[name] = [tokens_of(sampler.generate(prompts, PARAMS["plain"], seeds)) for _ in range(2)]

        threads = [threading.Thread(target=sample, args=(name,)) for name in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {0: [wanted] * 2, 1: [wanted] * 2}


def second_kv(decoder, ids):
    from stages.decoding.kv_cache import SlotKV

    prefilled = decoder.prefill(ids, torch.full((len(ids),), ids.shape[1], device=ids.device))
    kv = SlotKV(prefilled, len(ids), 16)
    for slot in range(len(ids)):
        kv.load(slot, prefilled, slot, ids.shape[1])
    return kv


@pytest.mark.parametrize("other", ["capture", "wait"])
def test_a_capture_is_not_met_by_another_thread(monkeypatch, other):
    """With async_rollouts a thread samples while another one trains, is measured or samples."""
    with second.second_device(monkeypatch):
        x, begun, errors, order = torch.ones(3, device="cuda"), threading.Event(), [], []

        def first():
            begun.set()
            time.sleep(0.2)  # the other one has come by now, and waits
            order.append("captured")
            return x + 1

        def second_one():
            begun.wait()
            try:
                replay.cuda_graphs()(lambda: x + 2) if other == "capture" else cuda.finish("cuda")
            except RuntimeError as error:
                errors.append(error)
            order.append(other)

        thread = threading.Thread(target=second_one)
        thread.start()
        step = replay.cuda_graphs()(first)
        thread.join()
        x.fill_(4)
        assert step().tolist() == [5.0] * 3
    assert not errors and order == ["captured", other]


def test_the_garbage_collector_destroys_no_graph_during_a_capture(monkeypatch):
    class Ring:
        pass

    before = gc.get_threshold()
    with second.second_device(monkeypatch):
        x = torch.ones(3, device="cuda")
        ring = Ring()
        ring.own, ring.step = ring, replay.cuda_graphs()(lambda: x + 1)
        gone = weakref.ref(ring)
        gc.set_threshold(0)  # from here to the capture nothing is collected by itself
        del ring

        def step():
            gc.set_threshold(1, 1, 1)
            [[] for _ in range(1000)]
            assert gone() is not None
            return x + 2

        try:
            again = replay.cuda_graphs()(step)
            assert gc.isenabled()
        finally:
            gc.set_threshold(*before)
        assert again().tolist() == [3.0] * 3


def test_the_device_notices_what_a_gpu_would(monkeypatch):
    with second.second_device(monkeypatch):
        x, w = torch.zeros(3, device="cuda"), torch.ones(3, device="cuda")
        pool, graph = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            found = (x + w) * 2
            with pytest.raises(RuntimeError, match="capturing"):
                found.sum().item()
        x.fill_(5)
        graph.replay()
        assert found.tolist() == [12.0] * 3
        del w
        with pytest.raises(RuntimeError, match="given back"):
            graph.replay()
        del graph
        with pytest.raises(RuntimeError, match="use_count"), torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool):
            pass
        host = torch.zeros(3, pin_memory=True)
        x.copy_(host, non_blocking=True)
        host += 1
        with pytest.raises(RuntimeError, match="pinned memory"):
            torch.cuda.synchronize()
        second._STREAM.sent.clear()
        x.fill_(2)
        late = x.to("cpu", non_blocking=True)
        assert late.tolist() != [2.0] * 3
        torch.cuda.synchronize()
        assert late.tolist() == [2.0] * 3
        with torch.autocast("cuda", torch.bfloat16):
            product = x[None] @ x[:, None]
            assert product.dtype == torch.bfloat16 and product.exp().dtype == torch.float32
        torch.use_deterministic_algorithms(True)
        with pytest.raises(RuntimeError, match="deterministic implementation"):
            x.cumsum(0)
