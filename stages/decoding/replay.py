"""A decoding step captured once and replayed: the built-in sampler on CUDA.

Of a step for some rows of a small model the GPU computes for half a millisecond what takes Python several to launch. So
a step is captured as a CUDA graph, from token ids to the token drawn, and then replayed with one launch. A graph has
fixed shapes and addresses:

* the number of rows is rounded up to a bucket (rows past the live ones compute on slots nobody owns and are thrown
  away), and so are the columns that are attended to (those past a row's end are masked, as they are without graphs);
* where drawing is part of the graph, a step leaves on the device what the next one begins with: the token, its column
  and how many tokens the row has. The host tells the device of rows that come, move and end, and nothing else, so that
  it may start a step before it has read what the last one drew;
* it is captured when a bucket has run ``WARM`` times as it is, which is also the warm-up that capturing wants, and
  thrown away when the KV storage, or the tensors that hold the weights, are others.

What was captured outlives a run of the sampler (:class:`Replayed` belongs to the sampler, see ``Sampler.release``).

Drawing is part of the graph where it has no branch that depends on numbers (all but top-p) and where logits are not
processed; else the graph ends with the logits.

Without CUDA the tests put a capture that calls the step again in the place of :func:`cuda_graphs`: all but the capture
itself (buckets, buffers, when a step is thrown away) is then held to the tokens of the sampler without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from stages.decoding import kernels
from stages.decoding.sampling import SamplingParams, sample_step
from stages.running import cuda

ROWS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128)  # buckets of rows; more are multiples of 64
COLUMNS = 128  # the least bucket of columns; the others are twice the one before
WARM = 2  # runs of a bucket as it is before it is captured
AHEAD = 1  # steps that are started before the last one's tokens are read
DISTRIBUTIONS = 4  # temperatures and filters whose steps are kept
TOKEN, COLUMN, COUNT = range(3)  # rows of the state

Step = Callable[[], torch.Tensor]


def bucket(n: int, most: int) -> int:
    """Rows that a step for ``n`` live ones computes, ``most`` at the most; two at least (the order in which a scan over
    one row alone adds is not fixed).
    """
    return min(most, next((rows for rows in ROWS if rows >= n), -(-n // 64) * 64))


def draws_alone(params: SamplingParams) -> bool:
    """Whether drawing a token needs no decision of the host: no top-p (it may have to sort), no changes of the
    logits.
    """
    return not params.processed and params.top_p == 1


class Drawn:
    """What a step draws for its n rows, on its way to the host."""

    def __init__(self, found: torch.Tensor, host: torch.Tensor, n: int):
        """found [2, rows] float64 on the device: tokens and log-probs. host: memory for at least as many numbers, not
        read or written by others before :meth:`read`.
        """
        self.n, self.host = n, host[: found.numel()].view_as(found)
        self.host.copy_(found, non_blocking=True)
        self.event = torch.cuda.Event() if found.device.type == "cuda" else None
        if self.event is not None:
            self.event.record()

    def wait(self) -> None:
        """Until the step is done."""
        if self.event is not None:
            self.event.synchronize()

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [n] int64 and their log-probs [n] float32, once the step is done."""
        self.wait()
        token, logp = self.host[:, : self.n].numpy()
        return token.astype(np.int64), logp.astype(np.float32)


class Replayed:
    """Decoding steps over one KV storage, and the state of its rows on the device.

    Args:
        decoder: a ``lean_decoder.LeanDecoder``.
        slots: rows of the KV storage.
    """

    def __init__(self, decoder, slots: int):
        self.decoder, self.slots, self.device = decoder, slots, decoder.device
        self.over = self.capture = self.last = None
        self.steps: dict[tuple, tuple[int, Step]] = {}  # (distribution, bucket) -> (runs so far, what runs it)
        self.distributions: list[tuple | None] = []
        self.state = torch.zeros(3, slots, dtype=torch.int64, device=self.device)
        self.uniform = torch.zeros(slots, 1, dtype=torch.float64, device=self.device)
        pinned = self.device.type == "cuda"
        self.hosts = [torch.zeros(2 * slots, dtype=torch.float64, pin_memory=pinned) for _ in range(AHEAD + 1)]
        self.turn = 0

    def begin(self, params: SamplingParams) -> None:
        """A run of the sampler with these settings."""
        self.params, self.draws = params, draws_alone(params)
        self.state.zero_()
        self.distribution = (params.temperature, params.top_k, params.min_p) if self.draws else None
        if self.draws and self.uniform.shape[1] < params.max_new_tokens:
            self.forget()
            width = 1 << (params.max_new_tokens - 1).bit_length()
            self.uniform = torch.zeros(self.slots, width, dtype=torch.float64, device=self.device)
        self.distributions = [one for one in self.distributions if one != self.distribution] + [self.distribution]
        if len(self.distributions) > DISTRIBUTIONS:
            gone = self.distributions.pop(0)
            self._drop({key: kept for key, kept in self.steps.items() if key[0] != gone})

    def forget(self) -> None:
        """Throw the steps away."""
        self._drop({})
        self.over = self.capture = None

    def _drop(self, kept: dict) -> None:
        if self.last is not None:
            self.last.wait()
        with cuda.capturing():  # the end of a graph would end another thread's capture
            self.steps = kept

    def put(self, slots: Sequence[int], token, column, count, uniforms: np.ndarray | None = None) -> None:
        """Rows that the next step has in these slots: their last tokens, the columns that these go to, how many tokens
        were drawn, each [k] int64, and their uniform numbers [k, max_new_tokens] float64 where the steps draw.
        """
        given = sent(np.stack([np.asarray(x, np.int64) for x in (slots, token, column, count)]), self.device)
        self.state.index_copy_(1, given[0], given[1:])
        if uniforms is not None:
            self.uniform[:, : uniforms.shape[1]].index_copy_(0, given[0], sent(uniforms, self.device))

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Rows go to other slots, none of which is a source."""
        given = sent(np.array([sources, targets], np.int64), self.device)
        for x, dim in ((self.state, 1), (self.uniform, 0)):
            x.index_copy_(dim, given[1], x.index_select(dim, given[0]))

    def clear(self, first: int, end: int) -> None:
        """Nobody owns these slots any more: token 0 in the first column."""
        self.state[:, first:end] = 0

    def __call__(self, kv, n: int, longest: int) -> Drawn | torch.Tensor:
        """Start one step for the first n slots, the longest of which has so many columns then.

        Returns what is drawn where drawing is part of the step (the next step draws on from there), else logits [n, V],
        which the next step overwrites.
        """
        # another storage, or it has grown, or the weights lie elsewhere: what was captured reads and writes there
        over = (kv, kv.columns, self.decoder.version)
        if over != self.over:
            self.forget()
            self.over = over
            self.capture = cuda_graphs()  # with a pool of its own: one whose graphs are all gone takes no other
        rows, width = bucket(n, self.slots), COLUMNS
        while width < longest:
            width *= 2
        # fused kernels read what a row has, and no bucket of columns
        key = self.distribution, rows, None if self.decoder.fusible else min(width, kv.columns)
        runs, step = self.steps.get(key, (0, None))
        if step is None:
            step = self._step(kv, *key[1:])
        if runs == WARM:
            step = self.capture(step)
        self.steps[key] = runs + 1, step
        found = step()
        if not self.draws:
            return found[:n]
        self.turn = (self.turn + 1) % len(self.hosts)
        self.last = Drawn(found, self.hosts[self.turn], n)
        return self.last

    def _step(self, kv, rows: int, width: int | None) -> Step:
        # not through this object, which holds the steps: its graphs go when nobody has it any more
        decoder, params, draws, uniform = self.decoder, self.params, self.draws, self.uniform
        tokens, at, counts = self.state[:, :rows]
        table = decoder.rotations(kv.columns)  # this one, also if a longer prompt makes the decoder compute another
        # a row that has ended may be computed on before the host knows, on and on where nobody owns the slot
        last = kv.columns - 1, uniform.shape[1] - 1
        state, plain = self.state, params.plain and not decoder.logit_cap

        def step() -> torch.Tensor:
            if width is None:
                normed = decoder.decode_fused(kv, tokens, at, table)
                if draws and plain:
                    logits = decoder.head(normed)
                    return kernels.draw(logits, uniform, state, decoder.logit_scale, params.temperature)
                logits = decoder.headed(normed)
            else:
                logits = decoder.decode(kv, tokens, at.clamp(max=last[0]), [(0, rows, width)], table=table)
            if not draws:
                return logits
            u = uniform[:rows].gather(1, counts.clamp(max=last[1])[:, None]).squeeze(1)
            token, logp = sample_step(logits, u, params)
            tokens.copy_(token)
            at.add_(1)  # may be a column that the storage has when it has grown
            counts.add_(1)
            return torch.stack([token.double(), logp.double()])

        return step


def sent(x: np.ndarray, device: torch.device) -> torch.Tensor:
    """On the device, without waiting for it."""
    found = torch.from_numpy(x)
    if device.type == "cpu":
        return found.clone()
    # the pinned memory is torch's, which reuses it when the copy is done
    return (found.pin_memory() if device.type == "cuda" else found).to(device, non_blocking=True)


def cuda_graphs() -> Callable[[Step], Step]:
    """A ``capture`` whose graphs share their memory: no result of one is read after another has run."""
    pool = torch.cuda.graph_pool_handle()

    def capture(step: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        # another thread may be training meanwhile (async_rollouts)
        with cuda.capturing(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            found = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return found

        # a graph knows addresses only: what the step reads (rotary tables, which the decoder may compute anew) must
        # stay there
        replay.reads = step
        return replay

    return capture
