"""What stands between the matrix products of a layer, one Triton kernel each: norms, activations, rotations, sums.

On a GPU each of these is bound by memory, and composed of torch operations it goes over its numbers three to six times;
beside products in bfloat16 that is most of a training step's time. A kernel here reads each number once and writes once.
Inside everything is float32, also where bfloat16 is read and written. Sums over tokens (gradients of gains) are made in
an order that depends on the shape alone, so a repeated step gives the same bits.

Triton comes with torch's CUDA builds on Linux. Where it is missing, on the CPU and in float64 the torch compositions of
``stages.models.lean`` compute the same (:func:`on`); the tests hold the two together, on the CPU by Triton's
interpreter.

Shapes: U tokens, M numbers that are normalised together, G such parts of a token (heads; else 1), I intermediate size,
D head size. A tensor of U rows may be a slice of columns of a wider one; its columns are next to each other.
"""

from __future__ import annotations

import functools
import warnings

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch, and systems other than Linux
    triton = None

#: Parts of a sum over tokens, which are added up one after the other.
PARTS = 512
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def on(*tensors: torch.Tensor) -> bool:
    """Whether the kernels take these: on a GPU, in types up to float32."""
    return (
        triton is not None
        and all(t is None or (t.device.type == "cuda" and t.dtype in _TYPES) for t in tensors)
        and compiles()
    )


@functools.cache
def compiles() -> bool:
    """Whether Triton makes kernels here, tried once: it needs a C compiler, and bfloat16 a GPU of Ampere or later. Where
    the compiler is missing, a warning says what that costs.
    """
    if torch.cuda.get_device_capability() < (8, 0):
        return False
    try:
        with torch.inference_mode(False):
            one = torch.ones(1, device="cuda")
            return bool(added(one, one, 1.0, torch.empty_like(one)) == 2.0)
    except Exception as error:  # of Triton, of the compiler that it calls, or of the driver
        warnings.warn(
            "Triton makes no kernels here, so what stands between a layer's matrix products is computed by torch"
            " operations, which takes up to twice the time of a step. It needs a C compiler: install gcc (and Python's"
            f" headers), or set CC. What it said: {str(error).strip()[:300] or type(error).__name__}",
            stacklevel=2,
        )
        return False


if triton is not None:

    @triton.jit
    def _norm_kernel(
        x, x_row, gain, out, out_row, rstd, M, G, eps, KNOWN: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        token, part = row // G, row % G
        at = tl.arange(0, BLOCK)
        inside = at < M
        value = tl.load(x + token * x_row + part * M + at, inside, 0.0).to(tl.float32)
        if KNOWN:
            r = tl.load(rstd + row)
        else:
            r = tl.rsqrt(tl.sum(value * value, 0) / M + eps)
            tl.store(rstd + row, r)
        value = value * r * tl.load(gain + part * M + at, inside, 0.0).to(tl.float32)
        tl.store(out + token * out_row + part * M + at, value, inside)

    # not another kernel for every number of tokens
    @triton.jit(do_not_specialize=["tokens", "EACH"])
    def _norm_back_kernel(
        grad, grad_row, x, x_row, rstd, gain, add, out, out_row, sums, tokens, M, G, EACH,
        ADDS: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        part = tl.program_id(1).to(tl.int64)
        at = tl.arange(0, BLOCK)
        inside = at < M
        weight = tl.load(gain + part * M + at, inside, 0.0).to(tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        token = tl.program_id(0).to(tl.int64) * EACH
        end = tl.minimum(token + EACH, tokens)
        while token < end:
            row = token * G + part
            r = tl.load(rstd + row)
            hat = tl.load(x + token * x_row + part * M + at, inside, 0.0).to(tl.float32) * r
            g = tl.load(grad + token * grad_row + part * M + at, inside, 0.0).to(tl.float32)
            if SUMS:
                total += g * hat
            g = g * weight
            g = (g - hat * (tl.sum(g * hat, 0) / M)) * r
            if ADDS:
                g += tl.load(add + row * M + at, inside, 0.0).to(tl.float32)
            tl.store(out + token * out_row + part * M + at, g, inside)
            token += 1
        if SUMS:
            tl.store(sums + (tl.program_id(0).to(tl.int64) * G + part) * M + at, total, inside)

    @triton.jit
    def _tanh(x):
        return 2.0 * tl.sigmoid(2.0 * x) - 1.0

    @triton.jit
    def _active(gate, SILU: tl.constexpr):
        """(activation of gate, its derivative)."""
        if SILU:
            s = tl.sigmoid(gate)
            value = gate * s
            slope = s + value * (1.0 - s)
        else:  # gelu, by tanh
            inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
            t = _tanh(inner)
            value = 0.5 * gate * (1.0 + t)
            slope = 0.5 * (1.0 + t) + 0.5 * gate * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 0.134145 * gate * gate)
        return value, slope

    @triton.jit
    def _activated_kernel(gate_up, row, out, I, SILU: tl.constexpr, BLOCK: tl.constexpr):
        token = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < I
        gate = tl.load(gate_up + token * row + at, inside, 0.0).to(tl.float32)
        up = tl.load(gate_up + token * row + I + at, inside, 0.0).to(tl.float32)
        value, _ = _active(gate, SILU)
        tl.store(out + token * I + at, value * up, inside)

    @triton.jit
    def _activated_back_kernel(grad, gate_up, row, out, I, SILU: tl.constexpr, BLOCK: tl.constexpr):
        token = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < I
        gate = tl.load(gate_up + token * row + at, inside, 0.0).to(tl.float32)
        up = tl.load(gate_up + token * row + I + at, inside, 0.0).to(tl.float32)
        g = tl.load(grad + token * I + at, inside, 0.0).to(tl.float32)
        value, slope = _active(gate, SILU)
        tl.store(out + token * 2 * I + at, g * up * slope, inside)
        tl.store(out + token * 2 * I + I + at, g * value, inside)

    @triton.jit
    def _rotated_kernel(x, x_row, turn, out, out_row, PAIRS, HALF, BACK: tl.constexpr, BLOCK: tl.constexpr):
        token = tl.program_id(0).to(tl.int64)
        pair = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = pair < PAIRS
        angle = turn + (token * HALF + pair % HALF) * 2
        c = tl.load(angle, inside, 1.0)
        s = tl.load(angle + 1, inside, 0.0)
        if BACK:
            s = -s
        a = tl.load(x + token * x_row + 2 * pair, inside, 0.0).to(tl.float32)
        b = tl.load(x + token * x_row + 2 * pair + 1, inside, 0.0).to(tl.float32)
        tl.store(out + token * out_row + 2 * pair, a * c - b * s, inside)
        tl.store(out + token * out_row + 2 * pair + 1, a * s + b * c, inside)

    @triton.jit(do_not_specialize=["n"])
    def _added_kernel(x, y, out, scale, n, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        value = tl.load(x + at, inside, 0.0).to(tl.float32)
        tl.store(out + at, value + scale * tl.load(y + at, inside, 0.0).to(tl.float32), inside)

    @triton.jit
    def _gathered_kernel(x, starts, rows, out, width, BLOCK: tl.constexpr):
        token = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < width
        total = tl.zeros([BLOCK], tl.float32)
        k = tl.load(starts + token)
        end = tl.load(starts + token + 1)
        while k < end:
            source = tl.load(rows + k).to(tl.int64)
            total += tl.load(x + source * width + at, inside, 0.0).to(tl.float32)
            k += 1
        tl.store(out + token * width + at, total, inside)

    @triton.jit
    def _shown(z, scale, cap, CAPPED: tl.constexpr):
        """(logits as the model gives them, their slope over scale)."""
        z = z * scale
        slope = z * 0.0 + 1.0
        if CAPPED:
            t = _tanh(z / cap)
            z = cap * t
            slope = 1.0 - t * t
        return z, slope

    @triton.jit
    def _logps_kernel(
        z, targets, logps, sums, entropies, means, hits, V, scale, cap, colder,
        CAPPED: tl.constexpr, ENTROPY: tl.constexpr, MEAN: tl.constexpr, HITS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        most = tl.full([BLOCK], -float("inf"), tl.float32)
        mass = tl.zeros([BLOCK], tl.float32)
        weighed = tl.zeros([BLOCK], tl.float32)
        plain = tl.zeros([BLOCK], tl.float32)
        first = 0
        while first < V:
            at = first + tl.arange(0, BLOCK)
            inside = at < V
            shown, _ = _shown(tl.load(z + row * V + at, inside, 0.0).to(tl.float32), scale, cap, CAPPED)
            shown = shown * colder
            if MEAN:
                plain += tl.where(inside, shown, 0.0)
            shown = tl.where(inside, shown, -float("inf"))
            higher = tl.maximum(most, shown)
            fades = tl.where(most == -float("inf"), 0.0, tl.exp(most - higher))
            share = tl.where(inside, tl.exp(shown - higher), 0.0)
            mass = mass * fades + share
            if ENTROPY:
                weighed = weighed * fades + tl.where(inside, share * shown, 0.0)
            most = higher
            first += BLOCK
        top = tl.max(most, 0)
        fades = tl.where(most == -float("inf"), 0.0, tl.exp(most - top))
        total = tl.sum(mass * fades, 0)
        log_total = top + tl.log(total)
        chosen, _ = _shown(tl.load(z + row * V + tl.load(targets + row)).to(tl.float32), scale, cap, CAPPED)
        chosen = chosen * colder
        tl.store(logps + row, chosen - log_total)
        tl.store(sums + row, log_total)
        if ENTROPY:
            tl.store(entropies + row, log_total - tl.sum(weighed * fades, 0) / total)
        if MEAN:
            tl.store(means + row, tl.sum(plain, 0) / V - log_total)
        if HITS:
            tl.store(hits + row, chosen >= top)

    @triton.jit
    def _logps_back_kernel(
        z, targets, sums, entropies, grad, grad_entropies, grad_means, out, V, scale, cap, colder,
        CAPPED: tl.constexpr, ENTROPY: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < V
        shown, slope = _shown(tl.load(z + row * V + at, inside, 0.0).to(tl.float32), scale, cap, CAPPED)
        logp = shown * colder - tl.load(sums + row)
        p = tl.exp(logp)
        g = tl.load(grad + row)
        dz = tl.where(at == tl.load(targets + row), g, 0.0) - g * p
        if ENTROPY:
            dz -= tl.load(grad_entropies + row) * p * (logp + tl.load(entropies + row))
        if MEAN:
            dz += tl.load(grad_means + row) * (1.0 / V - p)
        tl.store(out + row * V + at, dz * slope * (scale * colder), inside)


def _block(n: int) -> tuple[int, int]:
    """(power of two that n numbers fit into, warps for them)."""
    size = triton.next_power_of_2(n)
    return size, min(16, max(1, size // 256))


def _parts(x: torch.Tensor, gain: torch.Tensor) -> tuple[int, int]:
    """(numbers normalised together, such parts of a token)."""
    return gain.shape[-1], x.shape[-1] // gain.shape[-1]


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x [U, n] with its columns next to each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def norm(x, gain, eps: float, out, rstd=None):
    """RMS norm of x [U, G M] over every M numbers times gain [M] or [G, M], into ``out`` [U, G M] of any type; returns 1
    / rms [U G, 1] float32, which may be given where it is known.
    """
    x, (size, parts), known = _rows(x), _parts(x, gain), rstd is not None
    if not known:
        rstd = x.new_empty(len(x) * parts, 1, dtype=torch.float32)
    block, warps = _block(size)
    if len(x):
        _norm_kernel[(len(x) * parts,)](
            x, x.stride(0), gain.contiguous(), out, out.stride(0), rstd, size, parts, eps,
            KNOWN=known, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return rstd


def norm_back(grad, x, rstd, gain, out, sums=None, add=None):
    """Gradient of :func:`norm` with respect to x, into ``out`` [U, G M].

    Args:
        grad: [U, G M] of the normed; x and rstd as given to and returned by :func:`norm`.
        sums: float32 like the gain; its gradient is added to it.
        add: [U, G M] that is added to the gradient of x.
    """
    grad, x, (size, parts) = _rows(grad), _rows(x), _parts(x, gain)
    if not len(x):
        return
    each = -(-len(x) // PARTS)
    programs = -(-len(x) // each)
    partial = None if sums is None else x.new_empty(programs, parts, size, dtype=torch.float32)
    block, warps = _block(size)
    _norm_back_kernel[(programs, parts)](
        grad, grad.stride(0), x, x.stride(0), rstd, gain.contiguous(), add, out, out.stride(0), partial, len(x),
        size, parts, each,
        ADDS=add is not None, SUMS=sums is not None, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    if sums is not None:
        sums += partial.sum(0).view(sums.shape)


def activated(gate_up, act: str, low):
    """act(gate) * up of gate_up [U, 2 I] -> [U, I]; act: ``silu`` or ``gelu`` (by tanh)."""
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2, dtype=low)
    _by_columns(_activated_kernel, out.shape[1], gate_up, gate_up.stride(0), out, out.shape[1], SILU=act == "silu")
    return out


def activated_back(grad, gate_up, act: str):
    """Gradient of :func:`activated` with respect to gate_up: grad [U, I] -> [U, 2 I]."""
    out = torch.empty_like(gate_up)
    grad = grad.contiguous()
    _by_columns(
        _activated_back_kernel, grad.shape[1], grad, gate_up, gate_up.stride(0), out, grad.shape[1], SILU=act == "silu"
    )
    return out


def rotated(x, turn, out, back: bool = False):
    """Pairs of columns of x [U, n D] times turn [U, 1, D / 2] complex64 (``back``: its conjugate), into ``out``, which
    may be x.
    """
    x, half = _rows(x), turn.shape[-1]
    turn = torch.view_as_real(turn.contiguous())
    _by_columns(
        _rotated_kernel, x.shape[1] // 2, x, x.stride(0), turn, out, out.stride(0), x.shape[1] // 2, half, BACK=back
    )
    return out


def added(x, y, scale: float, out):
    """x + scale * y of the same shape and any types, into ``out``."""
    if x.numel():
        _added_kernel[(triton.cdiv(x.numel(), 4096),)](
            x.contiguous(), y.contiguous(), out, scale, x.numel(), BLOCK=4096, num_warps=8
        )
    return out


def gathered(x, starts, rows):
    """Sums of rows of x [N, n]: of those in ``rows[starts[u] : starts[u + 1]]`` for each u, [U, n], added up in that
    order in float32; starts [U + 1], rows int64.
    """
    x = x.contiguous()
    out = x.new_empty(len(starts) - 1, x.shape[1])
    _by_columns(_gathered_kernel, x.shape[1], x, starts, rows, out, x.shape[1])
    return out


def _by_columns(kernel, width: int, *given, **more) -> None:
    """A program for each token (those of the last tensor given) and every 1024 columns."""
    tokens = len(next(t for t in reversed(given) if isinstance(t, torch.Tensor)))
    block = min(1024, triton.next_power_of_2(width))
    if tokens and width:
        kernel[(tokens, triton.cdiv(width, block))](*given, **more, BLOCK=block, num_warps=min(4, max(1, block // 256)))


def logps(z, targets, logps, entropies, means, hits, temperature: float, scale: float, cap: float | None):
    """Of products z [n, V] of an LM head: log softmax(shown / temperature)[target], where shown = scale * z or capped
    (cap * tanh(scale * z / cap)), into ``logps`` [n] float32; so entropy and mean log-probability where ``entropies``
    and ``means`` have a place for them, and whether no token is likelier where ``hits`` is given. Returns the log-sums
    [n].
    """
    sums = torch.empty_like(logps)
    if len(z):
        _logps_kernel[(len(z),)](
            z, targets, logps, sums, entropies, means, hits, z.shape[1], scale, cap or 1.0, 1.0 / temperature,
            CAPPED=bool(cap), ENTROPY=bool(len(entropies)), MEAN=bool(len(means)), HITS=hits is not None,
            BLOCK=min(4096, triton.next_power_of_2(z.shape[1])), num_warps=8,
        )  # fmt: skip
    return sums


def logps_back(
    z, targets, sums, entropies, grads, grad_entropies, grad_means, temperature: float, scale: float, cap: float | None
):
    """Gradient of :func:`logps` with respect to z, in z's type; grads, grad_entropies and grad_means [n] (None: zero)."""
    out = torch.empty_like(z)
    if len(z):
        block = min(4096, triton.next_power_of_2(z.shape[1]))
        _logps_back_kernel[(len(z), triton.cdiv(z.shape[1], block))](
            z, targets, sums, entropies, grads.contiguous(),
            None if grad_entropies is None else grad_entropies.contiguous(),
            None if grad_means is None else grad_means.contiguous(), out, z.shape[1], scale, cap or 1.0,
            1.0 / temperature,
            CAPPED=bool(cap), ENTROPY=grad_entropies is not None, MEAN=grad_means is not None, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return out
