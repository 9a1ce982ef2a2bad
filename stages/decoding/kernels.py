"""Kernels of a decoding step in Triton: what lies between a layer's matrix products and is of sampling alone, in one
kernel each (``stages.models.fused`` has those that training has, too, and says where there are kernels).
``lean_decoder.LeanDecoder.decode`` composes the same of torch's operations and is what these are held to; sums are in
float32 and numbers are rounded where they are stored.

Nothing here depends on numbers that change from step to step but through tensors, so that a step can be captured as a
CUDA graph.

Shapes: m rows, H query heads, K key/value heads, G = H / K, D head size (even), S >= m slots, C columns of KV storage,
I width of the MLP, E hidden size. Row r writes to and reads from slot r.
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a build of torch for the CPU
    triton = None

PROGRAMS = 512  # of attention at least, if rows and heads are few then by splitting their columns
BLOCK = (
    64  # entries of the vocabulary whose sum is one step of the distribution function, as in ``sampling.sample_step``
)
CHUNK = 4096  # entries of the vocabulary that one program reads


if triton is not None:

    @triton.jit
    def _turn_and_keep(
        qkv,
        gains,
        table,
        columns,
        keys,
        values,
        eps,
        slot_stride,
        head_stride,
        HEADS: tl.constexpr,
        GROUPS: tl.constexpr,
        D: tl.constexpr,
        HALF: tl.constexpr,
        NORM: tl.constexpr,
        TURN: tl.constexpr,
    ):
        row, head = tl.program_id(0), tl.program_id(1)
        pair = tl.arange(0, HALF)
        real = pair < D // 2
        column = tl.minimum(tl.load(columns + row), head_stride // D - 1)
        at = qkv + (row.to(tl.int64) * (HEADS + 2 * GROUPS) + head) * D + 2 * pair
        first = tl.load(at, mask=real, other=0.0)
        second = tl.load(at + 1, mask=real, other=0.0)
        if head < HEADS + GROUPS:
            x, y = first.to(tl.float32), second.to(tl.float32)
            if NORM:
                scale = tl.rsqrt((tl.sum(x * x, 0) + tl.sum(y * y, 0)) / D + eps)
                x *= scale * tl.load(gains + head * D + 2 * pair, mask=real, other=0.0).to(tl.float32)
                y *= scale * tl.load(gains + head * D + 2 * pair + 1, mask=real, other=0.0).to(tl.float32)
            if TURN:
                angle = table + column * D + 2 * pair
                cos = tl.load(angle, mask=real, other=0.0)
                sin = tl.load(angle + 1, mask=real, other=0.0)
                x, y = x * cos - y * sin, x * sin + y * cos
            first, second = x.to(first.dtype), y.to(first.dtype)
        if head < HEADS:
            tl.store(at, first, mask=real)
            tl.store(at + 1, second, mask=real)
        else:
            group = (head - HEADS) % GROUPS
            to = row.to(tl.int64) * slot_stride + group.to(tl.int64) * head_stride + column * D + 2 * pair
            if head < HEADS + GROUPS:
                tl.store(keys + to, first, mask=real)
                tl.store(keys + to + 1, second, mask=real)
            else:
                tl.store(values + to, first, mask=real)
                tl.store(values + to + 1, second, mask=real)

    @triton.jit
    def _attend(
        qkv,
        keys,
        values,
        columns,
        out,
        parts,
        window,
        slot_stride,
        head_stride,
        HEADS: tl.constexpr,
        GROUPS: tl.constexpr,
        D: tl.constexpr,
        WIDTH: tl.constexpr,
        QUERIES: tl.constexpr,
        STEP: tl.constexpr,
        SPLITS: tl.constexpr,
        WINDOW: tl.constexpr,
    ):
        row, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        EACH: tl.constexpr = HEADS // GROUPS
        query, dim, step = tl.arange(0, QUERIES), tl.arange(0, WIDTH), tl.arange(0, STEP)
        end = tl.minimum(tl.load(columns + row) + 1, head_stride // D).to(tl.int32)
        begin = end * 0
        if WINDOW:
            begin = tl.maximum(end - window, 0)
        if SPLITS > 1:
            share = tl.cdiv(tl.cdiv(end - begin, SPLITS), STEP) * STEP
            begin += split * share
            end = tl.minimum(end, begin + share)
        wanted = (query < EACH)[:, None] & (dim < D)[None, :]
        at = row.to(tl.int64) * (HEADS + 2 * GROUPS) * D + (group * EACH + query)[:, None] * D + dim[None, :]
        q = tl.load(qkv + at, mask=wanted, other=0.0)
        base = row.to(tl.int64) * slot_stride + group.to(tl.int64) * head_stride
        top = tl.full([QUERIES], -1.0e30, tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        mixed = tl.zeros([QUERIES, WIDTH], tl.float32)
        for start in range(begin, end, STEP):
            column = start + step
            there = column < end
            place = base + column.to(tl.int64)[:, None] * D + dim[None, :]
            real = there[:, None] & (dim < D)[None, :]
            k = tl.load(keys + place, mask=real, other=0.0)
            v = tl.load(values + place, mask=real, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            scores = tl.where(there[None, :], scores, -1.0e30)
            now = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp(scores - now[:, None])
            weights = tl.where(there[None, :], weights, 0.0)
            before = tl.exp(top - now)
            total = total * before + tl.sum(weights, 1)
            mixed = mixed * before[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            top = now
        if SPLITS == 1:
            to = row.to(tl.int64) * HEADS * D + (group * EACH + query)[:, None] * D + dim[None, :]
            tl.store(out + to, (mixed / total[:, None]).to(out.dtype.element_ty), mask=wanted)
        else:
            # of every query of every split: what is mixed, the greatest score, the sum of weights
            place = (row.to(tl.int64) * HEADS + group * EACH + query) * SPLITS + split
            tl.store(parts + place[:, None] * (D + 2) + dim[None, :], mixed, mask=wanted)
            tl.store(parts + place * (D + 2) + D, top, mask=query < EACH)
            tl.store(parts + place * (D + 2) + D + 1, total, mask=query < EACH)

    @triton.jit
    def _join(parts, out, D: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
        head = tl.program_id(0).to(tl.int64)
        split, dim = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
        at = parts + (head * SPLITS + split) * (D + 2)
        top = tl.load(at + D)
        weight = tl.exp(top - tl.max(top, 0))
        total = tl.sum(weight * tl.load(at + D + 1), 0)
        found = tl.load(at[:, None] + dim[None, :], mask=(dim < D)[None, :], other=0.0)
        mixed = tl.sum(weight[:, None] * found, 0) / total
        tl.store(out + head * D + dim, mixed.to(out.dtype.element_ty), mask=dim < D)

    @triton.jit
    def _add_and_norm(x, more, gain, out, normed, factor, eps, width, NORM: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, BLOCK)
        real = at < width
        found = tl.load(x + row * width + at, mask=real, other=0.0).to(tl.float32)
        found += factor * tl.load(more + row * width + at, mask=real, other=0.0).to(tl.float32)
        kept = found.to(out.dtype.element_ty)
        tl.store(out + row * width + at, kept, mask=real)
        if NORM:
            found = kept.to(tl.float32)
            scale = tl.rsqrt(tl.sum(found * found, 0) / width + eps)
            found = found * scale * tl.load(gain + at, mask=real, other=0.0).to(tl.float32)
            tl.store(normed + row * width + at, found.to(normed.dtype.element_ty), mask=real)

    @triton.jit
    def _scaled(logits, scale, temperature, SCALED: tl.constexpr, TEMPERED: tl.constexpr):
        z = logits.to(tl.float32)
        if SCALED:
            z = z * scale
        if TEMPERED:
            z = tl.div_rn(z, temperature)
        return z

    @triton.jit
    def _tops(
        logits, tops, scale, temperature, width, SCALED: tl.constexpr, TEMPERED: tl.constexpr, CHUNK: tl.constexpr
    ):
        row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        found = tl.load(logits + row * width + at, mask=at < width, other=float("-inf"))
        z = _scaled(found, scale, temperature, SCALED, TEMPERED)
        tl.store(tops + row * tl.num_programs(1) + chunk, tl.max(z, 0))

    @triton.jit
    def _sums(
        logits,
        tops,
        sums,
        scale,
        temperature,
        width,
        blocks,
        SCALED: tl.constexpr,
        TEMPERED: tl.constexpr,
        CHUNK: tl.constexpr,
        BLOCK: tl.constexpr,
        CHUNKS: tl.constexpr,
    ):
        row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
        part = tl.arange(0, CHUNKS)
        count = tl.num_programs(1)
        top = tl.max(tl.load(tops + row * count + part, mask=part < count, other=float("-inf")), 0)
        block = chunk * (CHUNK // BLOCK) + tl.arange(0, CHUNK // BLOCK)
        at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        found = tl.load(logits + row * width + at, mask=at < width, other=float("-inf"))
        weights = tl.exp(_scaled(found, scale, temperature, SCALED, TEMPERED) - top)
        tl.store(sums + row * blocks + block, tl.sum(weights, 1), mask=block < blocks)

    @triton.jit
    def _before(x):
        """The next smaller number of a positive one in float64."""
        return (x.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)

    @triton.jit
    def _draw(
        logits,
        tops,
        sums,
        uniform,
        tokens,
        columns,
        counts,
        out,
        scale,
        temperature,
        width,
        blocks,
        chunks,
        uniform_stride,
        last_count,
        SCALED: tl.constexpr,
        TEMPERED: tl.constexpr,
        BLOCK: tl.constexpr,
        BLOCKS: tl.constexpr,
        CHUNKS: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        part, block, inner = tl.arange(0, CHUNKS), tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
        top = tl.max(tl.load(tops + row * chunks + part, mask=part < chunks, other=float("-inf")), 0)
        cdf = tl.cumsum(tl.load(sums + row * blocks + block, mask=block < blocks, other=0.0).to(tl.float64), 0)
        total = tl.sum(tl.where(block == blocks - 1, cdf, 0.0), 0)
        count = tl.minimum(tl.load(counts + row), last_count)
        u = tl.load(uniform + row * uniform_stride + count)
        target = tl.minimum(u * total, _before(total))
        taken = tl.minimum(tl.sum(((cdf <= target) & (block < blocks)).to(tl.int32), 0), blocks - 1)
        before = tl.sum(tl.where(block == taken - 1, cdf, 0.0), 0)
        at = taken * BLOCK + inner
        found = tl.load(logits + row * width + at, mask=at < width, other=float("-inf"))
        z = _scaled(found, scale, temperature, SCALED, TEMPERED)
        cdf_in = tl.cumsum(tl.exp(z - top).to(tl.float64), 0)
        mass = tl.sum(tl.where(inner == BLOCK - 1, cdf_in, 0.0), 0)
        target = tl.minimum(target - before, _before(mass))
        place = tl.minimum(tl.sum((cdf_in <= target).to(tl.int32), 0), BLOCK - 1)
        token = tl.minimum(taken * BLOCK + place, width - 1)
        logp = tl.sum(tl.where(inner == place, z, 0.0), 0) - top - tl.log(total).to(tl.float32)
        tl.store(tokens + row, token.to(tl.int64))
        tl.store(columns + row, tl.load(columns + row) + 1)
        tl.store(counts + row, count + 1)
        tl.store(out + row, token.to(tl.float64))
        tl.store(out + tl.num_programs(0) + row, logp.to(tl.float64))


def turn_and_keep(
    qkv: torch.Tensor,
    gains: torch.Tensor | None,
    table: torch.Tensor | None,
    columns: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    heads: int,
    eps: float,
) -> None:
    """Rotate queries and keys, the queries in place, and write keys and values to their columns of the KV storage.

    qkv [m, (H + 2 K) * D]: queries, keys and values of one token per row, the two numbers that are turned together
    beside each other. gains [H + K, D]: of the RMS norm of every head before, None: there is none. table [P, D / 2]
    complex64: the turn of every position, None: none. columns [m] int64: the tokens' positions, C - 1 in the place of
    what is more. keys, values [S, K, C, D].
    """
    groups, d = keys.shape[1], keys.shape[3]
    _turn_and_keep[(qkv.shape[0], heads + 2 * groups)](
        qkv,
        gains,
        None if table is None else torch.view_as_real(table),
        columns,
        keys,
        values,
        eps,
        keys.stride(0),
        keys.stride(1),
        HEADS=heads,
        GROUPS=groups,
        D=d,
        HALF=triton.next_power_of_2(d // 2),
        NORM=gains is not None,
        TURN=table is not None,
        num_warps=1,
    )


def attend(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    columns: torch.Tensor,
    heads: int,
    window: int | None = None,
) -> torch.Tensor:
    """One query per row over columns 0 ... columns[row] of its slot, the last `window` of them: [m, H * D].

    qkv [m, (H + 2 K) * D] with scaled and turned queries; keys, values [S, K, C, D]; columns [m] int64.
    """
    rows, groups, d = qkv.shape[0], keys.shape[1], keys.shape[3]
    # not by the storage's columns: it is kept from call to call, and a run that goes on has another one
    splits = min(16, triton.next_power_of_2(-(-PROGRAMS // (rows * groups))))
    width, out = triton.next_power_of_2(d), qkv.new_empty(rows, heads * d)
    parts = qkv.new_empty(rows * heads * splits * (d + 2), dtype=torch.float32) if splits > 1 else out
    _attend[(rows, groups, splits)](
        qkv,
        keys,
        values,
        columns,
        out,
        parts,
        window or 0,
        keys.stride(0),
        keys.stride(1),
        HEADS=heads,
        GROUPS=groups,
        D=d,
        WIDTH=max(16, width),
        QUERIES=max(16, triton.next_power_of_2(heads // groups)),
        STEP=64 if qkv.dtype.itemsize == 2 and width <= 128 else 32,
        SPLITS=splits,
        WINDOW=window is not None,
        num_warps=4,
        num_stages=3 if qkv.dtype.itemsize == 2 else 2,
    )
    if splits > 1:
        _join[(rows * heads,)](parts, out, D=d, WIDTH=width, SPLITS=splits, num_warps=1)
    return out


def add_and_norm(
    x: torch.Tensor, more: torch.Tensor, gain: torch.Tensor | None, factor: float, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + factor * more, and its RMS norm times gain [E]; both [m, E]. gain None: the sum twice."""
    out = torch.empty_like(x)
    normed = torch.empty_like(x) if gain is not None else out
    block = triton.next_power_of_2(x.shape[1])
    _add_and_norm[(x.shape[0],)](
        x,
        more,
        gain,
        out,
        normed,
        factor,
        eps,
        x.shape[1],
        NORM=gain is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 256)),
    )
    return out, normed


def draw(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    state: torch.Tensor,
    scale: float = 1.0,
    temperature: float = 1.0,
) -> torch.Tensor:
    """A token per row from softmax(scale * logits / temperature), by the definition of ``sampling.sample_step``.

    logits [m, V]; uniform [S, T] float64; state [3, S] int64: a row's token, its column, and which of its uniform
    numbers is taken (T - 1 at most). The token drawn, the next column and the next number replace them. Returns [2, m]
    float64: tokens, and their log-probs, of float32.
    """
    (rows, width), blocks = logits.shape, triton.cdiv(logits.shape[1], BLOCK)
    chunks = triton.cdiv(width, CHUNK)
    tops = logits.new_empty(rows, chunks, dtype=torch.float32)
    sums = logits.new_empty(rows, blocks, dtype=torch.float32)
    out = logits.new_empty(2, rows, dtype=torch.float64)
    how = {"SCALED": scale != 1.0, "TEMPERED": temperature != 1.0}
    most = triton.next_power_of_2(chunks)
    _tops[(rows, chunks)](logits, tops, scale, temperature, width, **how, CHUNK=CHUNK, num_warps=8)
    _sums[(rows, chunks)](
        logits, tops, sums, scale, temperature, width, blocks, **how, CHUNK=CHUNK, BLOCK=BLOCK, CHUNKS=most, num_warps=8
    )
    _draw[(rows,)](
        logits,
        tops,
        sums,
        uniform,
        *state,
        out,
        scale,
        temperature,
        width,
        blocks,
        chunks,
        uniform.stride(0),
        uniform.shape[1] - 1,
        **how,
        BLOCK=BLOCK,
        BLOCKS=triton.next_power_of_2(blocks),
        CHUNKS=most,
        num_warps=8,
    )
    return out
