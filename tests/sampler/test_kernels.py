"""The Triton kernels of a decoding step (stages/decoding/kernels.py) against the same composed of torch's operations: on
a GPU, and without one in Triton's interpreter where Triton is installed (a process of its own: the switch is read when
it is imported).
"""

import os
import subprocess
import sys

import pytest
import torch

from stages.decoding import kernels, lean_weights, replay
from stages.decoding.lean_decoder import LeanDecoder
from stages.decoding.sampler import Sampler, SamplingParams
from stages.decoding.sampling import sample_step
from stages.models import fused
from stages.models.layers import turns
from tests.architectures import build
from tests.sampler.test_replay import graph_like

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and kernels.triton is not None
DEVICE = "cpu" if INTERPRETED else "cuda"
runs_here = pytest.mark.skipif(
    kernels.triton is None or not INTERPRETED and not torch.cuda.is_available(), reason="needs Triton and CUDA"
)
if INTERPRETED:  # which asks NumPy for the number in an array of one; since 2.4 that is an error
    from triton.runtime import interpreter

    patched = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor, scope):
        patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_lang_tensor
    whole, inside = interpreter._patch_lang, set()

    def _patch_lang(fn):
        """Triton puts its interpreter in the place of the whole language at every call of a function by a kernel, a third
        of the time; here once in each launch for each module that calls come from.
        """
        outermost = not inside
        if fn.__module__ in inside:
            return interpreter._LangPatchScope()
        inside.add(fn.__module__)
        scope = whole(fn)
        if outermost:
            put_back = scope.restore
            scope.restore = lambda: (inside.clear(), put_back())
        return scope

    interpreter._patch_lang = _patch_lang

SIZES = [(1, 4, 64), (7, 1, 80), (3, 3, 128), (8 if INTERPRETED else 64, 2, 16)]  # rows, queries per key, head size
SOME = ["llama", "qwen3", "glm4", "gemma2", "gemma3", "granite", "mixtral", "olmo2", "phi3 partial", "smollm3"]
TYPES = [torch.float32, torch.bfloat16]  # the interpreter multiplies the bits of bfloat16 matrices


def given(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(found, wanted):
    bound = 5e-6 if found.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), wanted.double(), atol=bound, rtol=bound)


@pytest.mark.skipif(
    kernels.triton is None or INTERPRETED or torch.cuda.is_available(), reason="needs Triton, and no GPU"
)
def test_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]


@runs_here
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows, each, d", SIZES[:3])
@pytest.mark.parametrize("normed, turned", [(False, True), (True, True), (True, False)])
def test_keys_and_values_are_turned_and_kept(rows, each, d, dtype, normed, turned):
    groups, places = 2, 40
    heads = groups * each
    qkv, keys, values = (
        given(rows, (heads + 2 * groups) * d, dtype=dtype),
        *given(2, rows, groups, places, d, dtype=dtype),
    )
    gains = given(heads + groups, d, dtype=dtype, seed=1) if normed else None
    table = turns(torch.arange(places)[:, None] * torch.rand(d // 2), 1.1, d).to(DEVICE) if turned else None
    columns = torch.randint(0, places, (rows,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    both = qkv.view(rows, -1, d)[:, : heads + groups].float()
    if normed:
        both = torch.nn.functional.rms_norm(both, (d,), None, 1e-5) * gains.float()
    if turned:
        both = torch.view_as_real(torch.view_as_complex(both.unflatten(-1, (-1, 2))) * table[columns][:, None]).flatten(
            -2
        )
    wanted_keys, wanted_values, at = keys.clone(), values.clone(), torch.arange(rows, device=DEVICE)
    wanted_keys[at, :, columns] = both[:, heads:].to(dtype)
    wanted_values[at, :, columns] = qkv.view(rows, -1, d)[:, heads + groups :]
    kernels.turn_and_keep(qkv, gains, table, columns, keys, values, heads, 1e-5)
    close(qkv.view(rows, -1, d)[:, :heads], both[:, :heads])
    close(keys, wanted_keys)
    assert torch.equal(values, wanted_values)


@runs_here
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] if INTERPRETED else TYPES)
@pytest.mark.parametrize("rows, each, d", SIZES)
@pytest.mark.parametrize("window", [None, 9])
def test_a_query_attends_to_its_own_columns(rows, each, d, dtype, window):
    """What lies behind a row's columns, or before its window, may be anything."""
    groups, places = 2, 300
    heads = groups * each
    qkv = given(rows, (heads + 2 * groups) * d, dtype=dtype) / d**0.25
    keys, values = given(2, rows + 1, groups, places, d, dtype=dtype, seed=1) / d**0.25
    columns = (torch.arange(rows, device=DEVICE) * 41 + (0 if rows > 1 else 299)) % places
    seen = torch.arange(places, device=DEVICE) <= columns[:, None]
    if window is not None:
        seen &= torch.arange(places, device=DEVICE) > columns[:, None] - window
    wanted = torch.nn.functional.scaled_dot_product_attention(
        qkv.view(rows, -1, d)[:, :heads].double().view(rows, groups, each, d),
        keys[:rows].double(),
        values[:rows].double(),
        attn_mask=seen[:, None, None],
        scale=1.0,
    )
    for x in (keys[:rows], values[:rows]):
        x.masked_fill_(~seen[:, None, :, None], float("nan"))
    close(kernels.attend(qkv, keys, values, columns, heads, window), wanted.view(rows, -1))


@runs_here
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] if INTERPRETED else TYPES)
@pytest.mark.parametrize("splits", [1, 2])
def test_one_program_goes_over_many_columns(monkeypatch, dtype, splits):
    """What is summed before a greater score comes is scaled down to it. All scores may be far below zero."""
    monkeypatch.setattr(kernels, "PROGRAMS", splits)
    groups, each, places, d = 1, 2, 150, 16
    keys, values = given(2, 1, groups, places, d, dtype=dtype, seed=1)
    keys.zero_()[..., 0] = torch.arange(places, device=DEVICE) / 8 - 200  # products without rounding
    qkv = given(1, (each + 2) * d, dtype=dtype)
    qkv.view(-1, d)[:each, 0] = torch.tensor([1.0, 0.75])
    found = kernels.attend(qkv, keys, values, torch.tensor([places - 1], device=DEVICE), each)
    scores = qkv.view(-1, d)[:each].double() @ keys[0, 0].double().T
    assert (scores < -100).all()
    close(found, (scores.softmax(-1) @ values[0, 0].double()).view(1, -1))


@runs_here
@pytest.mark.gpu
def test_a_row_past_the_storage_computes_in_its_last_column():
    """Of a row that has ended the next step may be started before the host knows; other rows' memory stays as it is."""
    rows, groups, places, d = 3, 2, 40, 16
    heads = 2 * groups
    columns = torch.tensor([places + 30, 7, places], device=DEVICE)
    made = []
    for at in (columns, columns.clamp(max=places - 1)):
        qkv = given(rows, (heads + 2 * groups) * d)
        keys, values = given(2, rows + 1, groups, places, d, seed=1)
        table = turns(torch.arange(places)[:, None] * torch.arange(d // 2), 1.0, d).to(DEVICE)
        kernels.turn_and_keep(qkv, None, table, at, keys[:rows], values[:rows], heads, 1e-5)
        made.append((qkv, keys, values, kernels.attend(qkv, keys[:rows], values[:rows], at, heads)))
    for found, wanted in zip(*made):
        assert torch.equal(found, wanted)


@runs_here
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows, width", [(1, 64), (7, 80), (3, 2048)])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_a_sum_and_its_norm(rows, width, dtype, factor):
    x, more, gain = given(rows, width, dtype=dtype), given(rows, width, dtype=dtype, seed=1), given(width, dtype=dtype)
    wanted = (x.float() + factor * more.float()).to(dtype)
    found, normed = kernels.add_and_norm(x, more, gain, factor, 1e-6)
    close(found, wanted)
    close(normed, torch.nn.functional.rms_norm(found.float(), (width,), None, 1e-6) * gain.float())
    both = kernels.add_and_norm(x, more, None, factor, 1e-6)
    assert torch.equal(both[0], found) and torch.equal(both[1], found)


@runs_here
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows, vocabulary", [(1, 7), (5, 64), (7, 4999)])
@pytest.mark.parametrize("scale, temperature", [(1.0, 1.0), (0.5, 0.7)])
def test_a_token_is_drawn_as_the_sampler_draws_it(rows, vocabulary, dtype, scale, temperature):
    logits = 3 * given(rows, vocabulary, dtype=dtype)
    uniform = torch.rand(rows + 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    uniform[0, 1:] = torch.tensor([0.0, 1 - 2**-53])
    state = torch.tensor([[0] * (rows + 1), [5] * (rows + 1), [0] * (rows + 1)], device=DEVICE)
    for k in range(3):
        found = kernels.draw(logits, uniform, state, scale, temperature)
        token, logp = sample_step(logits.float() * scale, uniform[:rows, k], SamplingParams(temperature=temperature))
        assert torch.equal(found[0].long(), token) and torch.equal(state[0, :rows], token)
        torch.testing.assert_close(found[1].float(), logp, atol=2e-6, rtol=1e-6)
        assert (state[1, :rows] == 6 + k).all() and (state[2, :rows] == k + 1).all()
    again = kernels.draw(logits, uniform, state, scale, temperature)  # of a row that has ended
    assert torch.equal(again, found)
    assert state[:, rows].tolist() == [0, 5, 0]
    logits[0, 3] = float("nan")
    assert kernels.draw(logits, uniform, state)[1].isnan().tolist() == [True] + [False] * (rows - 1)


@runs_here
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
def test_what_has_no_mass_is_not_drawn_and_what_has_little_is(dtype):
    logits = torch.full((1, 200), -1e4, device=DEVICE, dtype=dtype)
    logits[0, 70], logits[0, 130] = 0.0, -17.0  # of other blocks; beside 1 this is lost in float32
    for u, token in ((0.0, 70), (1 - 1e-8, 130)):
        state = torch.zeros(3, 1, dtype=torch.int64, device=DEVICE)
        found = kernels.draw(logits, torch.full((1, 1), u, dtype=torch.float64, device=DEVICE), state)
        assert found[0].tolist() == [token] == state[0].tolist()


@pytest.fixture
def replaying(monkeypatch):
    """In the interpreter the sampler takes the way that it takes on CUDA."""
    if not INTERPRETED:
        return
    monkeypatch.setattr(LeanDecoder, "replayable", property(lambda self: not self.has_experts))
    monkeypatch.setattr(LeanDecoder, "wants_blocks", property(lambda self: False))
    monkeypatch.setattr(lean_weights, "prefers_onednn", lambda: False)  # as AMD's processors do, in a layout of its own
    monkeypatch.setattr(replay, "cuda_graphs", lambda: graph_like([]))
    monkeypatch.setattr(fused, "on", lambda *tensors: all(x.dtype in TYPES for x in tensors))


@runs_here
@pytest.mark.gpu
@pytest.mark.parametrize("name", SOME)
def test_steps_of_every_family_draw_what_torchs_operations_draw(replaying, monkeypatch, name):
    model = build(name).to(DEVICE)
    used, before = [], LeanDecoder.decode_fused
    monkeypatch.setattr(LeanDecoder, "decode_fused", lambda *given: (used.append(1), before(*given))[1])
    length = 4 if INTERPRETED else 20
    request = [[5, 6, 7] * 4, [9]], SamplingParams(max_new_tokens=length, stop_ids={3, 4}), [[1], [3]]
    try:
        sampler = Sampler(model, None, max_batch=3)
        found = sampler.generate(*request)
        monkeypatch.setattr(LeanDecoder, "fuses", False)
        sampler.release()
        wanted = sampler.generate(*request)
    finally:
        model.to("cpu")
    # capped scores, experts
    assert bool(used) != name.startswith(("gemma2", "qwen3-moe", "mixtral", "olmoe"))
    for mine, theirs in zip(found, wanted):
        for a, b in zip(mine, theirs):
            assert a.ids == b.ids
            torch.testing.assert_close(torch.tensor(a.logps), torch.tensor(b.logps), atol=2e-5, rtol=0)
