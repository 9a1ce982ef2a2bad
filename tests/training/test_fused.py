"""The kernels around a layer's products against their torch compositions: on a GPU, elsewhere in Triton's interpreter
where Triton is installed.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with torch's CUDA builds")

REAL = torch.cuda.is_available()
DEVICE = "cuda:0" if REAL else "cpu"

if not REAL and not os.environ.get("TRITON_INTERPRET"):

    def test_kernels_in_the_interpreter():
        """In a process of its own: Triton reads the switch when a kernel is defined."""
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__],
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-3000:]

else:
    from stages.models import fused, lean, modeling

    KINDS = [torch.float32, torch.bfloat16]

    def near(kind):
        return {"rtol": 2e-2, "atol": 2e-2} if kind == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}

    def random(*shape, kind=torch.float32, seed=0):
        made = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=made).to(DEVICE, kind)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("tokens, size, parts", [(1, 64, 1), (7, 100, 1), (5, 8, 3), (9, 33, 2)])
    def test_norms_and_their_gradients(kind, tokens, size, parts, monkeypatch):
        monkeypatch.setattr(fused, "PARTS", 4)
        h = random(tokens, size * parts + 6)[:, : size * parts]
        grad, more = (random(tokens, size * parts, kind=kind, seed=k) for k in (2, 3))
        gain = random(size, seed=4) if parts == 1 else random(parts, size, seed=4)
        out = torch.empty_like(grad)
        rstd = fused.norm(h, gain, 1e-5, out)
        split = h.reshape(tokens, parts, size) if parts > 1 else h
        wanted, inverse = lean._normalised(split, gain, 1e-5)
        torch.testing.assert_close(out.float(), wanted.reshape(out.shape), **near(kind))
        torch.testing.assert_close(rstd.flatten(), inverse.flatten())
        again = torch.empty_like(out)
        fused.norm(h, gain, 1e-5, again, rstd=rstd)
        torch.testing.assert_close(again, out, **near(kind))
        sums, known = torch.ones_like(gain), torch.ones_like(gain)
        back = torch.empty(h.shape, device=DEVICE)
        fused.norm_back(grad, h, rstd, gain, back, sums=sums, add=more.float())
        theirs = lean._normalised_back(grad.float().view(split.shape), split * inverse, inverse, gain, known)
        torch.testing.assert_close(back, theirs.reshape(h.shape) + more.float(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(sums, known, rtol=1e-4, atol=1e-3)
        first = sums.clone()
        fused.norm_back(grad, h, rstd, gain, back, sums=sums.fill_(1.0))
        assert torch.equal(sums, first), "the same sums in the same order"
        without = torch.empty_like(back)
        fused.norm_back(grad, h, rstd, gain, without)
        assert torch.equal(without, back), "of a gain that is not trained"

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("act", ["silu", "gelu"])
    @pytest.mark.parametrize("tokens, size", [(1, 5), (2, 1500)])
    def test_gated_activations_and_their_gradient(kind, act, tokens, size):
        gate_up = random(tokens, 2 * size, kind=kind).requires_grad_()
        gate, up = gate_up.float().chunk(2, 1)
        wanted = (
            torch.nn.functional.silu(gate) if act == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
        ) * up
        torch.testing.assert_close(fused.activated(gate_up.detach(), act, kind).float(), wanted, **near(kind))
        grad = random(tokens, size, kind=kind, seed=1)
        (theirs,) = torch.autograd.grad(wanted, gate_up, grad.float())
        torch.testing.assert_close(fused.activated_back(grad, gate_up.detach(), act), theirs, **near(kind))

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("heads, size", [(1, 2), (5, 16), (20, 128)])
    def test_rotations_and_back(kind, heads, size):
        wide = random(4, heads * size + 8, kind=kind)
        x = wide[:, : heads * size]
        turn = torch.polar(torch.ones(4, 1, size // 2), random(4, 1, size // 2, seed=1).cpu()).to(DEVICE)
        wanted = lean._rotated(x, turn, torch.float32)
        found = fused.rotated(x, turn, torch.empty(4, heads * size, device=DEVICE, dtype=kind))
        torch.testing.assert_close(found, wanted, **near(kind))
        back = fused.rotated(wanted, turn, torch.empty_like(found), back=True)
        torch.testing.assert_close(back, lean._rotated(wanted, turn.conj(), torch.float32), **near(kind))
        apart = torch.stack([turn, 0 * turn], -1)[..., 0]
        assert torch.equal(fused.rotated(x, apart, torch.empty_like(found)), found) and not apart.is_contiguous()
        fused.rotated(x, turn, x)
        assert torch.equal(x, found), "in its place"

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("terms", ["", "entropy", "mean", "entropy and mean"])
    @pytest.mark.parametrize("cap, scale, temperature", [(None, 1.0, 1.0), (3.0, 0.5, 0.7)])
    def test_log_probs_and_their_gradient(kind, terms, cap, scale, temperature):
        n, size = 5, 1000 if kind == torch.float32 else 5000
        z = random(n, size, kind=kind).requires_grad_()
        targets = torch.tensor([0, 3, size - 1, 7, 7], device=DEVICE)
        with torch.no_grad():
            z[1, 3] = 9.0
        shown = z.float() * scale
        logs = torch.log_softmax((cap * torch.tanh(shown / cap) if cap else shown) / temperature, -1)
        wanted = [logs[range(n), targets], -(logs.exp() * logs).sum(-1), logs.mean(-1)]
        place = lambda wants: torch.empty(n if wants else 0, device=DEVICE)
        found, entropies, means = place(True), place("entropy" in terms), place("mean" in terms)
        hits = torch.empty(n, dtype=torch.bool, device=DEVICE)
        sums = fused.logps(z.detach(), targets, found, entropies, means, hits, temperature, scale, cap)
        for one, other in zip((found, entropies, means), wanted):
            torch.testing.assert_close(one, other.detach()[: len(one)], rtol=1e-5, atol=1e-5)
        assert hits.tolist() == (logs.argmax(-1) == targets).tolist() and hits[1]
        again = torch.empty_like(found)
        fused.logps(z.detach(), targets, again, place(False), place(False), None, temperature, scale, cap)
        assert torch.equal(again, found), "alone"
        grads = [random(n, seed=k) if len(one) else None for k, one in enumerate((found, entropies, means))]
        (theirs,) = torch.autograd.grad(sum((g * w).sum() for g, w in zip(grads, wanted) if g is not None), z)
        ours = fused.logps_back(z.detach(), targets, sums, entropies, *grads, temperature, scale, cap)
        torch.testing.assert_close(ours, theirs, **near(kind))

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("kept", [0, 1 << 30])
    def test_a_head_gives_what_it_gives_elsewhere(kind, kept, monkeypatch):
        """Chunk by chunk, with logits kept and computed again: values and gradients."""
        monkeypatch.setattr(modeling, "HEAD_CHUNK_ON_GPU", 70 * 12)
        monkeypatch.setattr(modeling, "HEAD_KEEP_BYTES_ON_GPU", kept)
        hidden, weight, bias = random(29, 16), random(70, 16, seed=1), random(70, seed=2)
        targets = torch.arange(29, device=DEVICE) % 70
        found = []
        for function in (modeling._FusedLogps, modeling._ChunkedLogps):
            hits = torch.empty(29, dtype=torch.bool, device=DEVICE)
            given = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
            outs = function.apply(*given, targets, 0.7, 0.5, 3.0, True, kind, hits, True)
            sum((out * random(29, seed=3 + k)).sum() for k, out in enumerate(outs)).backward()
            found.append([*(out.detach() for out in outs), *(t.grad for t in given), hits])
        for ours, theirs in zip(*found):
            torch.testing.assert_close(ours, theirs, **near(kind))

    def test_sums():
        x, y = random(37, 300), random(37, 300, kind=torch.bfloat16, seed=1)
        torch.testing.assert_close(fused.added(x, y, 0.25, torch.empty_like(x)), x + 0.25 * y.float())
        found = fused.added(x.t(), y.t(), 0.25, torch.empty(300, 37, device=DEVICE))
        torch.testing.assert_close(found, x.t() + 0.25 * y.t().float())
        starts, rows = torch.tensor([0, 2, 2, 5], device=DEVICE), torch.tensor([3, 30, 1, 1, 36], device=DEVICE)
        found = fused.gathered(x, starts, rows)
        wanted = torch.stack([x[3] + x[30], 0 * x[0], x[1] + x[1] + x[36]])
        torch.testing.assert_close(found, wanted)

    def test_nothing_to_compute():
        gain, none = random(16), torch.empty(0, 16, device=DEVICE)
        rstd = fused.norm(none, gain, 1e-5, torch.empty_like(none))
        fused.norm_back(none, none, rstd, gain, torch.empty_like(none), sums=torch.zeros_like(gain))
        assert len(fused.activated(none, "silu", torch.float32)) == len(fused.added(none, none, 1.0, none)) == 0

    def test_which_tensors_it_takes():
        assert fused.on(random(2, 2)) == REAL and not fused.on(random(2, 2, kind=torch.float64))

    @pytest.mark.parametrize("works", [True, False])
    def test_which_tensors_it_takes_on_a_gpu(works, monkeypatch):
        of = lambda place, kind: SimpleNamespace(device=torch.device(place), dtype=kind)
        there = [of("cuda", kind) for kind in (torch.float32, torch.bfloat16, torch.float16)]
        monkeypatch.setattr(fused, "compiles", lambda: works)
        assert fused.on(*there, None) == works
        assert not fused.on(*there, of("cuda", torch.float64)) and not fused.on(*there, of("cpu", torch.float32))

    def test_without_a_compiler_it_says_what_to_install(monkeypatch):
        monkeypatch.setattr(fused, "added", lambda *given: (_ for _ in ()).throw(RuntimeError("no C compiler")))
        monkeypatch.setattr(torch, "ones", lambda *size, device: torch.zeros(*size))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        fused.compiles.cache_clear()
        try:
            with pytest.warns(UserWarning, match="install gcc .*no C compiler"):
                assert not fused.compiles()
            assert not fused.compiles(), "and is not asked again"
            monkeypatch.setattr(fused, "added", lambda *given: torch.tensor([2.0]))
            for capability, works in (((7, 5), False), ((8, 0), True)):
                fused.compiles.cache_clear()
                monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
                assert fused.compiles() == works
        finally:
            fused.compiles.cache_clear()
