"""The sampler's CUDA graphs on the second device (tests/second_device.py), which replays what was captured at the
addresses it had.
"""

import gc
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from stages.decoding import replay
from stages.decoding.decoders import LeanDecoder
from stages.decoding.sampler import Sampler, SamplingParams
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
    monkeypatch.setattr("stages.decoding.sampler.COLUMN_STEP", 16)
    return log


def there(model):
    import copy

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
        run, plain = replay.Replayed(decoder, SamplingParams(max_new_tokens=9), 2), []
        for k in range(replay.WARM + 3):
            given = np.array([7, 8]), np.array([3 + k, 3 + k]), np.array([0.3, 0.6])
            if k == replay.WARM + 1:
                decoder.rotations(3 * decoder.positions)
            plain.append(run(kv, *given))
    assert captured == ["captured", "replayed", "replayed", "replayed"] and all(len(tokens) == 2 for tokens, _ in plain)


def second_kv(decoder, ids):
    from stages.decoding.decoders import SlotKV

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
