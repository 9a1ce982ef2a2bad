"""A decoding step captured once and replayed: the built-in sampler on CUDA.

Of a step for some rows of a small model the GPU computes for half a millisecond what takes Python several to launch. So
a step is captured as a CUDA graph, from token ids to the token drawn, and then replayed with one launch. A graph has
fixed shapes and addresses:

* the number of rows is rounded up to a bucket (rows past the live ones compute on slots nobody owns and are thrown
  away), and so are the columns that are attended to (those past a row's end are masked, as they are without graphs);
* what changes from step to step travels in one buffer to the device, what was drawn in one buffer back;
* it is captured when a bucket has run ``WARM`` times as it is, which is also the warm-up that capturing wants, and
  thrown away with the KV storage or the weights it was captured over.

Drawing is part of the graph where it has no branch that depends on numbers (all but top-p) and where logits are not
processed; else the graph ends with the logits.

Without CUDA the tests put a capture that calls the step again in the place of :func:`cuda_graphs`: all but the capture
itself (buckets, buffers, when a step is thrown away) is then held to the tokens of the sampler without it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from stages.decoding.sampling import SamplingParams, sample_step
from stages.running import cuda

ROWS, COLUMNS = 8, 128  # buckets are multiples of these, rows below the first powers of two
WARM = 3  # runs of a bucket as it is before it is captured
TOKEN, COLUMN, UNIFORM = range(3)  # rows of the buffer that travels to the device; the uniform number by its bits

Step = Callable[[], torch.Tensor]


def bucket(n: int, most: int) -> int:
    """Rows that a step for ``n`` live ones computes, ``most`` at the most: 2, 4, 8, 16, 24 ... (the order in which a
    scan over one row alone adds is not fixed).
    """
    return min(most, max(2, 1 << (n - 1).bit_length()) if n < ROWS else -(-n // ROWS) * ROWS)


def draws_alone(params: SamplingParams) -> bool:
    """Whether drawing a token needs no decision of the host: no top-p (it may have to sort), no changes of the
    logits.
    """
    return not params.processed and params.top_p == 1


class Replayed:
    """The decoding steps of one run of the sampler over its KV storage.

    Args:
        decoder: a ``decoders.LeanDecoder`` whose weights stay as they are meanwhile.
        slots: rows of the KV storage.
    """

    def __init__(self, decoder, params: SamplingParams, slots: int):
        self.decoder, self.params, self.slots = decoder, params, slots
        self.draws = draws_alone(params)
        self.kv, self.columns, self.capture = None, 0, None
        self.steps: dict[tuple[int, int], tuple[int, Step]] = {}  # bucket -> (runs so far, what runs it)
        self.sent = torch.zeros(3, slots, dtype=torch.int64, device=decoder.device)
        pinned = decoder.device.type == "cuda"
        self.outgoing = torch.zeros(3, slots, dtype=torch.int64, pin_memory=pinned)

    def __call__(
        self, kv, tokens: np.ndarray, columns: np.ndarray, uniforms: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray] | torch.Tensor:
        """One step for the first n slots: tokens [n] int64 at columns [n] int64, uniforms [n] float64.

        Returns (tokens [n] int64, their log-probs [n] float32) where drawing is part of the step, else logits [n, V],
        which the next step overwrites.
        """
        n = len(tokens)
        # another one, or it has grown: what was captured wrote elsewhere
        if kv is not self.kv or kv.columns != self.columns:
            self.kv, self.columns, self.steps = kv, kv.columns, {}
            self.capture = cuda_graphs()  # with a pool of its own: one whose graphs are all gone takes no other
        rows, width = bucket(n, self.slots), min(-(-(int(columns.max()) + 1) // COLUMNS) * COLUMNS, kv.columns)
        out = self.outgoing.numpy()
        out[:, n:rows] = 0  # a token in the first column of slots that nobody owns
        out[TOKEN, :n], out[COLUMN, :n], out[UNIFORM, :n] = tokens, columns, uniforms.view(np.int64)
        self.sent[:, :rows].copy_(self.outgoing[:, :rows], non_blocking=True)
        runs, step = self.steps.get((rows, width), (0, None))
        if step is None:
            step = self._step(kv, rows, width)
        if runs == WARM:
            step = self.capture(step)
        self.steps[rows, width] = runs + 1, step
        found = step()
        if not self.draws:
            return found[:n]
        token, logp = found[:, :n].cpu().numpy()  # waits for the step
        return token.astype(np.int64), logp.astype(np.float32)

    def _step(self, kv, rows: int, width: int) -> Step:
        # not through this object, which holds the steps: its graphs go when nobody has it any more
        decoder, params, draws = self.decoder, self.params, self.draws
        tokens, columns, bits = self.sent[:, :rows]
        table = decoder.rotations(kv.columns)  # this one, also if a longer prompt makes the decoder compute another

        def step() -> torch.Tensor:
            logits = decoder.decode(kv, tokens, columns, [(0, rows, width)], table=table)
            return (
                torch.stack([x.double() for x in sample_step(logits, bits.view(torch.float64), params)])
                if draws
                else logits
            )

        return step


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
