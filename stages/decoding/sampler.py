"""The built-in sampler: continuous batching over slots of static KV.

    sampler = Sampler(model, tokenizer, max_batch=64)
    groups = sampler.generate(prompts, SamplingParams(max_new_tokens=256, stop_ids={eos}), seeds)
    groups[i][g].ids, .logps, .finish_reason, .text        # completion g of prompt i

What a caller may rely on:

* Token ids are the truth: prompts come in as ids, completions go out as ids, text is derived and never re-tokenised.
* A completion is a function of (weights, prompt, seed, params). Its randomness is hash(seed, position), so batch size,
  order and the other prompts do not matter beyond the rounding of batched products; prompts may be generated in chunks,
  again after a restart, or elsewhere. Scheduling itself is deterministic too.
* Log-probs are those of the sampled distribution in float32 (temperature and filters included).
* Weights are read at every `generate` call, so an optimizer step between calls is seen.
* On a GPU what costs time to make is kept for the next call: captured steps, KV storage and the copy of the weights
  (``Sampler.release``).

Nothing is computed twice: a prompt is prefilled once, whatever its number of completions, and so is a long beginning
that prompts share, or a row of an earlier call that a prompt continues (``remembering``, ``stages.decoding.prefixes``).
On the CPU what several rows begin with is also kept and attended to once (``kv_cache.Trunks``). Prompts are prefilled
together, sorted by length; a finished row's slot is given to the next waiting row before the next step.
"""

from __future__ import annotations

import math
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from os.path import commonprefix
from typing import Callable, Sequence

import numpy as np
import torch

from stages.decoding.decoders import make_decoder, max_positions
from stages.decoding.kv_cache import Prefilled, SlotKV, Trunks, WholeKV
from stages.decoding.lean_decoder import LeanDecoder
from stages.decoding.prefixes import Kept, KeptRows, prefilled_continuing, prefilled_groups, shared_beginnings
from stages.decoding.replay import AHEAD, Drawn, Replayed, sent
from stages.decoding.sampling import SamplingParams, bad_word_ids, processed_logits, sample_step, uniforms
from stages.models.frozen import arithmetic
from stages.running import cuda, usage
from stages.verification.responses import TAGS

__all__ = ["Completion", "DerivedText", "Sampler", "SamplerError", "SamplingParams", "check_request", "text_of"]

# prompt tokens per completion that need not be kept and read again, where prompts of several completions are kept once
MIN_TRUNK = 48
COLUMN_STEP = 128  # KV columns are added in multiples of this
FIRST_COLUMNS = 1024  # of storage that captured steps write to, which are thrown away when it grows
HELD_SHARE = 4  # what is kept between calls is at most this part of the memory that is free then
BLOCK = 16  # slots that share one attention length; longer rows are kept in earlier blocks


class SamplerError(ValueError):
    """A request that cannot be generated; the message says what to write instead."""


@dataclass(frozen=True)
class Completion:
    """One row of what an engine returns (``stages.decoding.engines``).

    ids: sampled tokens, a sampled stop token included. logps: natural log-prob of each under the sampled distribution,
    float32; None where the engine does not give them. finish_reason: "eos" (stop id) | "stop" (stop string) | "length"
    (max_new_tokens) | "error". text: decoded ids (:func:`text_of`) without the stop token, cut before a stop string.
    reencoded: the engine returned text only and ``ids`` are its encoding, which need not be what was sampled. error:
    why an "error" row has no tokens."""

    ids: list[int]
    logps: list[float] | None
    finish_reason: str
    text: str
    reencoded: bool = False
    error: str | None = None


@dataclass
class Held:
    """What a sampler keeps between `generate` calls on a GPU: the decoder with its copy of the weights (what is
    stacked, merged or of another type than the model's own), captured steps with the memory they compute in, and KV
    storage.
    """

    decoder: LeanDecoder
    replayed: Replayed
    kv: WholeKV | None = None

    @property
    def bytes(self) -> int:
        """Memory of weights and KV."""
        kv = 0 if self.kv is None else self.kv.whole.numel() * self.kv.whole.element_size()
        return self.decoder.held_bytes() + kv

    def has_room(self) -> bool:
        """Whether little enough of the memory that is free is held."""
        device = self.decoder.device
        if device.type != "cuda":
            return True
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return HELD_SHARE * self.bytes <= free


class Sampler:
    """Continuous-batching sampler over a Hugging Face causal LM.

    max_batch is the number of slots (rows decoded together). device moves the model there first (None: where it is).
    tokenizer may be None when no text is wanted (text is then "" and stop_strings are refused).
    lean: None picks the fast engine when it computes the same function, False forces the model's own forward.
    dtype: what it computes in (weights, KV and products), None for the weights' own type; in another one its log-probs
    are not the trainer's. As an engine (``stages.decoding.engines.Engine``) it reads the model's own parameters, so
    there are no weights to push and nothing to wake.
    """

    weights, shares_weights, reencodes = "input", True, False

    def __init__(
        self,
        model,
        tokenizer,
        *,
        max_batch: int = 64,
        device=None,
        lean: bool | None = None,
        dtype: torch.dtype | None = None,
    ):
        if max_batch < 1:
            raise SamplerError(f"max_batch={max_batch}: write at least 1")
        self.model = model.to(device) if device is not None else model
        self.tokenizer = tokenizer
        self.max_batch = int(max_batch)
        self.lean, self.dtype = lean, dtype
        self.exact_logps = dtype in (None, arithmetic(self.model))
        self.name = "built-in" if self.exact_logps else f"built-in in {str(dtype).removeprefix('torch.')}"
        self.kept: KeptRows | None = None
        self._held: list[Held] = []  # one at most; taken out while it is in use
        self.steps = 0  # decoding steps of all calls

    @usage.generated
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        seeds: Sequence[Sequence[int]],
        progress: Callable[[int, int], None] | None = None,
        on_token: Callable[[int, int, list[int]], None] | None = None,
    ) -> list[list[Completion]]:
        """len(seeds[i]) completions of each prompt i, in the order of prompts and seeds.

        progress(done, total) is called with completion counts as rows finish, on_token(prompt, completion, ids so far)
        with every token that is read.
        Raises SamplerError for an empty prompt, ids outside the vocabulary, too long rows, unusable stop settings, and
        where memory does not suffice.
        """
        self._check(prompts, params, seeds)
        total = sum(len(s) for s in seeds)
        if not total:
            return [[] for _ in prompts]
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode():
                try:  # whoever samples meanwhile, from another thread or from `progress`, finds nothing held
                    held = self._held.pop()
                except IndexError:
                    held = None
                run = _Run(self, prompts, params, seeds, progress, total, held, on_token)
                found = run.finish()
                self.steps += run.steps
                if run.held is not None and run.held.has_room():
                    self.release()
                    self._held.append(run.held)
                return found
        except (MemoryError, RuntimeError) as error:
            if not cuda.out_of_memory(error):
                raise
            rows = min(total, self.max_batch)
            raise SamplerError(
                f"Memory does not suffice to sample {rows} completions of up to {params.max_new_tokens:,} tokens at a"
                f" time. Write {f'generation_batch={rows // 2} or ' if rows > 1 else ''}a lower max_completion_length."
            ) from error
        finally:
            self.model.train(was_training)

    @contextmanager
    def remembering(self):
        """While this lasts and the weights stay as they are, finished rows are kept and prompts that continue one do
        not compute it again.
        """
        self.kept = KeptRows()
        try:
            yield
        finally:
            self.kept = None

    def _check(self, prompts, params, seeds) -> None:
        check_request(
            prompts,
            params,
            seeds,
            vocabulary=self.model.get_input_embeddings().weight.shape[0],
            positions=max_positions(self.model),
            tokenizer=self.tokenizer,
        )

    def update(self, directory: str, weights: str) -> None:
        """Nothing to do: weights are read at every ``generate``."""

    def release(self) -> None:
        """Give back what is kept between calls on a GPU (:class:`Held`), where it is a quarter of the memory free at
        the end of a call at most: the copy of the weights, KV storage of the rows of one call, and the memory of
        captured steps, some rows of logits. The next call makes it anew, which takes it some seconds.
        """
        with cuda.capturing():  # the end of a graph would end another thread's capture
            self._held.clear()

    @property
    def held(self) -> Held | None:
        """What is kept for the next call."""
        return self._held[-1] if self._held else None

    def sleep(self, keep_weights: bool = True) -> None:
        """As :meth:`release`."""
        self.release()

    def close(self) -> None:
        """As :meth:`release`."""
        self.release()


def check_request(prompts, params: SamplingParams, seeds, *, vocabulary: int, positions: int | None, tokenizer) -> None:
    """Raise SamplerError for a request that no engine can serve; the message says what to write instead.

    vocabulary: number of token ids of the model; positions: its longest sequence, None when not limited.
    """
    if len(prompts) != len(seeds):
        raise SamplerError(f"{len(prompts)} prompts but {len(seeds)} seed lists: give one list of seeds per prompt")
    if (params.stop_strings or params.bad_words) and tokenizer is None:
        raise SamplerError("stop_strings and bad_words need text: give the Sampler a tokenizer or use stop_ids")
    unseen = unseen_tokens(tokenizer) if params.stop_strings else {}
    for stop, token in ((s, t) for s in params.stop_strings for t in unseen if t in s):
        raise SamplerError(
            f"stop string {stop!r} holds the special token {token!r}, which the text of a completion is without, so it"
            f" would never be found: write {token!r} alone in a stage's stop_strings, which makes it a stop token, or"
            " the text around it without it"
        )
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            bos = getattr(tokenizer, "bos_token_id", None)
            hint = f"[{bos}] (the tokenizer's bos token)" if bos is not None else "at least one token id"
            raise SamplerError(
                f"prompt {i} is empty, so there is nothing to condition on: write {hint} or drop the row"
            )
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            raise SamplerError(
                f"prompt {i} holds token id {max(prompt) if min(prompt) >= 0 else min(prompt)}, outside the model's "
                f"vocabulary of {vocabulary}: encode it with the model's own tokenizer"
            )
        if positions is not None and len(prompt) + params.max_new_tokens > positions:
            raise SamplerError(
                f"prompt {i} has {len(prompt)} tokens and max_new_tokens is {params.max_new_tokens}, together over the"
                f" model's {positions} positions: shorten the prompt to {max(positions - params.max_new_tokens, 0)}"
                f" tokens or write max_new_tokens <= {max(positions - len(prompt), 0)}"
            )
    for name, ids in (("stop_ids", params.stop_ids), ("logit_bias", [i for i, _ in params.logit_bias])):
        bad = [i for i in ids if not 0 <= i < vocabulary]
        if bad:
            raise SamplerError(
                f"{name} {sorted(bad)} are outside the model's vocabulary of {vocabulary}: "
                "use the ids of the model's own tokenizer"
            )


class Seats:
    """Where rows sit in :class:`stages.decoding.kv_cache.Trunks`: a seat per trunk in use, a lane of it per row, always
    the lowest free ones.
    """

    def __init__(self):
        self.of: dict[tuple, int] = {}  # trunk -> seat
        self.lanes: dict[int, set[int]] = {}  # seat -> lanes taken

    def take(self, trunk: tuple) -> tuple[int, int, bool]:
        """(seat, lane, whether the seat is new to this trunk) for one more row."""
        fresh = trunk not in self.of
        if fresh:
            self.of[trunk] = next(seat for seat in count() if seat not in self.lanes)
            self.lanes[self.of[trunk]] = set()
        taken = self.lanes[self.of[trunk]]
        lane = next(lane for lane in count() if lane not in taken)
        taken.add(lane)
        return self.of[trunk], lane, fresh

    def leave(self, seat: int, lane: int) -> None:
        """A row has ended; the last one of a trunk frees its seat."""
        self.lanes[seat].discard(lane)
        if not self.lanes[seat]:
            del self.lanes[seat]
            self.of = {trunk: one for trunk, one in self.of.items() if one != seat}


@dataclass
class _Flying:
    """A step that was started. owners [n]: the slots that its rows' tokens are for, -1 where nobody wants one."""

    drawn: Drawn
    owners: np.ndarray


class _Run:
    """One `generate` call: the queue, the slots and the step loop. Slots 0..live-1 are always the live rows."""

    def __init__(
        self, sampler: Sampler, prompts, params, seeds, progress, total, held: Held | None = None, on_token=None
    ):
        """held: what the sampler has kept of an earlier call; ``self.held`` is what it may keep of this one."""
        self.params, self.prompts, self.progress, self.total = params, prompts, progress, total
        self.on_token = on_token
        self.seeds = [[int(s) for s in one] for one in seeds]
        self.device = sampler.model.get_input_embeddings().weight.device
        self.decoder = make_decoder(sampler.model, sampler.lean, sampler.dtype)
        if held is not None and held.decoder.continues(self.decoder):
            self.decoder = held.decoder
        elif held is not None:
            held.replayed.forget()
            held = None
        self.decoder.check_length(max(len(p) for p in prompts) + params.max_new_tokens)
        self.decoder.refresh()
        self.text = DerivedText(sampler.tokenizer, params)
        self.bad_ids = bad_word_ids(sampler.tokenizer, params.bad_words)
        order = sorted((i for i in range(len(prompts)) if len(seeds[i])), key=lambda i: (-len(prompts[i]), i))
        self.kept = sampler.kept
        found = {i: self.kept.longest(prompts[i]) for i in order} if self.kept is not None else {}
        # prompt -> the row it continues, and for how many tokens
        self.continued = {i: row for i, row in found.items() if row is not None}
        continuing = list(self.continued)
        groups = shared_beginnings(prompts, [i for i in order if i not in self.continued])
        order = continuing + [i for members, _ in groups for i in members]
        self.trunk = self._trunk_lengths(groups, seeds)
        self.trunks: Trunks | None = None
        self.seats = Seats()
        slots, width = min(sampler.max_batch, total), params.max_new_tokens
        self.batches = chain(
            prefilled_continuing(self.decoder, prompts, self.continued, slots, self._send),
            prefilled_groups(self.decoder, prompts, groups, slots, self._send),
        )
        self.queue = [(i, g, int(s)) for i in order for g, s in enumerate(seeds[i])]
        self.next_row = 0
        self.prefilled: dict[int, tuple[Prefilled, int]] = {}
        self.results: list[list[Completion | None]] = [[None] * len(s) for s in seeds]
        self.done = self.steps = 0

        self.slots = slots
        self.held: Held | None = None
        if self.decoder.replayable:
            if held is not None and (held.replayed.slots < slots or held.replayed.device != self.decoder.device):
                held.replayed.forget()
                held = None
            self.held = held or Held(self.decoder, Replayed(self.decoder, slots))
            self.held.replayed.begin(params)
        self.replayed = None if self.held is None else self.held.replayed
        # steps draw on by themselves, and are started before the host has read the last one
        self.ahead = self.replayed is not None and self.replayed.draws
        self.flying: deque[_Flying] = deque()
        self.first: dict[tuple[int, int], tuple[int, float]] = {}  # row -> its first token and log-prob
        self.live = 0
        self.kv: SlotKV | None = None
        self.row = np.zeros((slots, 2), np.int64)  # (prompt, completion) of a slot
        self.length = np.zeros(slots, np.int64)  # tokens in its KV = column of its next token
        self.count = np.zeros(slots, np.int64)  # tokens sampled
        self.started = np.zeros(slots, np.int64)  # tokens sampled or being sampled
        self.token = np.zeros(slots, np.int64)  # last token sampled
        self.seat, self.lane = np.zeros(slots, np.int64), np.zeros(slots, np.int64)  # of its trunk
        self.uniform = np.zeros((slots, width))
        self.out_ids = np.zeros((slots, width), np.int64)
        self.out_logps = np.zeros((slots, width), np.float32)
        longest = max(map(len, prompts)) if params.repetition_penalty != 1.0 else 0
        # a slot's prompt, where it is read again (repetition penalty)
        self.prompt = np.zeros((slots, longest), np.int64)
        self.prompt_length = np.zeros(slots, np.int64)
        self.stops = np.zeros(sampler.model.get_input_embeddings().weight.shape[0], bool)  # of the vocabulary
        self.stops[list(params.stop_ids)] = True

    def finish(self) -> list[list[Completion]]:
        free = list(range(self.slots))
        while True:
            free = self._admit(free)
            if free:
                self._close(free)
                free = list(range(self.live, self.slots)) if self.next_row < len(self.queue) else []
            if not self.live and not self.flying:
                for row, _ in self.continued.values():
                    self.kept.drop(row)
                return self.results
            free = free + (self._step_ahead() if self.ahead else self._step())

    def _step(self) -> list[int]:
        """One token for every live slot; the slots of rows that end."""
        rows = np.arange(self.live)
        bounds = self._bounds()
        self.steps += 1
        self._reach(max(width for _, _, width in bounds))
        if self.replayed is None:
            logits = self.decoder.decode(
                self.kv,
                self._send(self.token[: self.live]),
                self._send(self.length[: self.live]),
                bounds,
                *self._trunks(),
            )
        else:
            self.replayed.put(rows, self.token[: self.live], self.length[: self.live], self.count[: self.live])
            logits = self.replayed(self.kv, self.live, int(self.length[: self.live].max()) + 1)
        self.length[: self.live] += 1
        return self._sample(logits, rows)

    def _step_ahead(self) -> list[int]:
        """Start a step for the live slots and read the one before it, or what is left; the slots of rows that end."""
        going = self.started[: self.live] < self.params.max_new_tokens
        if going.any():
            longest = int(self.length[: self.live].max()) + 1
            self._reach(longest)
            self.steps += 1
            owners = np.where(going, np.arange(self.live), -1)
            self.flying.append(_Flying(self.replayed(self.kv, self.live, longest), owners))
            self.length[: self.live] += going
            self.started[: self.live] += going
        if len(self.flying) <= AHEAD and going.any():
            return []
        oldest = self.flying.popleft()
        token, logp = oldest.drawn.read()
        of_rows = oldest.owners >= 0
        finished = self._take(token[of_rows], logp[of_rows], oldest.owners[of_rows])
        for step in self.flying:  # it has drawn one token too many for these
            step.owners[np.isin(step.owners, finished)] = -1
        return finished

    def _reach(self, columns: int) -> None:
        """So many columns of KV at least."""
        if columns > self.kv.columns:
            self.kv.grow(self._columns(columns))

    def _trunk_lengths(self, groups, seeds) -> dict[int, int]:
        """Of every prompt, how many first tokens its rows attend to in a trunk (``kv_cache.Trunks``): what all prompts
        begin with, else the whole prompt where several completions are sampled and enough is saved, else none."""
        order = [i for members, _ in groups for i in members]
        if self.kept is not None or not self.decoder.attends_in_trunks:
            return dict.fromkeys(range(len(self.prompts)), 0)
        if len(groups) == 1 and groups[0][1]:
            return dict.fromkeys(order, groups[0][1])
        saved = sum((len(seeds[i]) - 1) * len(self.prompts[i]) for i in order)
        return {i: len(self.prompts[i]) if saved >= MIN_TRUNK * self.total else 0 for i in order}

    def _trunks(self) -> tuple:
        """The trunks as the live rows have them now, where there are any."""
        if self.trunks is None:
            return ()
        self.trunks.arrange(self._send(self.seat[: self.live]), self._send(self.lane[: self.live]))
        return (self.trunks,)

    def _bounds(self) -> list[tuple[int, int, int]]:
        """(first slot, end slot, columns in use) of runs of blocks with about the same longest row."""
        if not self.decoder.wants_blocks:
            return [(0, self.live, int(self.length[: self.live].max()) + 1)]
        bounds: list[tuple[int, int, int]] = []
        for start in range(0, self.live, BLOCK):
            end = min(start + BLOCK, self.live)
            width = int(self.length[start:end].max()) + 1
            if bounds and abs(width - bounds[-1][2]) * 5 < max(width, bounds[-1][2]):
                bounds[-1] = (bounds[-1][0], end, max(width, bounds[-1][2]))
            else:
                bounds.append((start, end, width))
        return bounds

    def _send(self, x: np.ndarray) -> torch.Tensor:
        return sent(x, self.device)

    def _columns(self, needed: int) -> int:
        most = max(len(self.prompts[i]) - self.trunk[i] for i in self.trunk) + self.params.max_new_tokens
        wanted, whole = needed + max(COLUMN_STEP, needed // 2), lambda n: math.ceil(n / COLUMN_STEP) * COLUMN_STEP
        if self.replayed is None:
            return min(whole(wanted), max(most, needed))
        return min(whole(max(2 * needed, FIRST_COLUMNS)), 2 * whole(max(most, needed) / 2))

    # ---- admission

    def _admit(self, free: list[int]) -> list[int]:
        """Give free slots to waiting rows and draw their first tokens; returns the slots that stay free."""
        free = sorted(free)
        while free and self.next_row < len(self.queue):
            taken = self.queue[self.next_row : self.next_row + len(free)]
            self.next_row += len(taken)
            holes, free = free[: len(taken)], free[len(taken) :]
            slots, logits, held = [], [], set(holes) | set(free)
            for hole, (i, g, seed) in zip(holes, taken):
                while i not in self.prefilled:
                    self._prefill()
                batch, j = self.prefilled[i]
                slot = self._make_room(hole, len(self.prompts[i]) - self.trunk[i], held)
                slots.append(slot)
                held.add(slot)
                self._load(slot, i, g, batch, j)
                if not self.ahead:
                    logits.append(batch.logits[j])
                if g == len(self.results[i]) - 1:
                    del self.prefilled[i]
            drawn = uniforms([seed for _, _, seed in taken], self.uniform.shape[1])
            self.uniform[slots] = drawn
            self.live = max(self.live, max(slots) + 1)
            if self.ahead:
                first = [self.first.pop((i, g)) for i, g, _ in taken]
                token, logp = np.array([t for t, _ in first]), np.array([p for _, p in first], np.float32)
                self.replayed.put(slots, token, self.length[slots], np.ones(len(slots), np.int64), drawn)
                ended = self._take(token, logp, np.array(slots))
            else:
                ended = self._sample(torch.stack(logits), np.array(slots))
            free = sorted(free + ended)
        return free

    def _make_room(self, hole: int, length: int, held: set[int]) -> int:
        """The slot for a new row of `length` tokens: longer rows of later blocks move up into the hole first, so that
        blocks stay ordered by length. held: slots that are free or just given, which stay where they are."""
        while self.decoder.wants_blocks:
            start = (hole // BLOCK + 1) * BLOCK
            rows = [s for s in range(start, min(start + BLOCK, self.live)) if s not in held]
            if not rows:
                break
            longest = max(rows, key=self.length.__getitem__)
            if self.length[longest] <= length:
                break
            self._move(longest, hole)
            hole = longest
        return hole

    def _move(self, source: int, target: int) -> None:
        """A live row to another slot, its KV and its books on the host."""
        self.kv.move(source, target, int(self.length[source]))
        for x in (
            self.row,
            self.length,
            self.count,
            self.started,
            self.token,
            self.uniform,
            self.out_ids,
            self.out_logps,
            self.prompt,
            self.prompt_length,
            self.seat,
            self.lane,
        ):
            x[target] = x[source]

    def _prefill(self) -> None:
        """Prefill the next waiting prompts together."""
        take, batch = next(self.batches)
        for j, i in enumerate(take):
            self.prefilled[i] = (batch, j)
        if self.ahead:
            self._draw_first(take, batch)

    def _draw_first(self, take: list[int], batch: Prefilled) -> None:
        """First tokens of all rows of prompts that were prefilled together; the host waits for them here, and not as
        every row comes.
        """
        rows = [(j, i, g, seed) for j, i in enumerate(take) for g, seed in enumerate(self.seeds[i])]
        drawn = []
        for start in range(0, len(rows), self.slots):
            part = rows[start : start + self.slots]
            logits = batch.logits[self._send(np.array([j for j, *_ in part]))]
            u = self._send(uniforms([seed for *_, seed in part], 1)[:, 0])
            drawn.append(torch.stack([x.double() for x in sample_step(logits, u, self.params)]))
        tokens, logps = torch.cat(drawn, 1).cpu().numpy()
        for (_, i, g, _), token, logp in zip(rows, tokens, logps):
            self.first[i, g] = int(token), float(logp)

    def _load(self, slot: int, i: int, g: int, batch: Prefilled, j: int) -> None:
        length = len(self.prompts[i])
        own = length - self.trunk[i]
        if self.kv is None and self.held is not None:
            if self.held.kv is None or not self.held.kv.fits(batch, self.replayed.slots, own + 1):
                self.held.kv = None
                self.replayed.forget()  # which holds on to the storage
                self.held.kv = WholeKV(batch, self.replayed.slots, self._columns(own))
            self.kv = self.held.kv
        elif self.kv is None:
            self.kv = SlotKV(batch, self.slots, self._columns(own))
        elif own > self.kv.columns:
            self.kv.grow(self._columns(own))
        self.kv.load(slot, batch, j, own, self.trunk[i])
        if self.trunk[i]:
            if self.trunks is None:
                different = {tuple(self.prompts[one][:known]) for one, known in self.trunk.items()}
                self.trunks = Trunks(batch, min(self.slots, len(different)), max(self.trunk.values()))
            self.seat[slot], self.lane[slot], fresh = self.seats.take(tuple(self.prompts[i][: self.trunk[i]]))
            if fresh:
                self.trunks.load(int(self.seat[slot]), batch, j, self.trunk[i])
        self.row[slot], self.length[slot], self.count[slot], self.started[slot] = (i, g), own, 0, 1
        if self.prompt.shape[1]:
            self.prompt[slot, :length], self.prompt_length[slot] = self.prompts[i], length

    def _close(self, holes: list[int]) -> None:
        """Fill holes among the live slots with the last live rows, so that the live ones are a prefix."""
        empty, before, moved = set(holes), self.live, {}
        for hole in sorted(holes):
            while self.live and self.live - 1 in empty:
                self.live -= 1
            if hole >= self.live:
                break
            self._move(self.live - 1, hole)
            moved[self.live - 1] = hole
            empty.discard(hole)
            self.live -= 1
        if self.ahead:
            for step in self.flying:
                step.owners = np.array([moved.get(slot, slot) for slot in step.owners.tolist()], np.int64)
            if moved:
                self.replayed.move(list(moved), list(moved.values()))
            if self.live < before:
                self.replayed.clear(self.live, before)

    # ---- one token for some slots

    def _sample(self, logits: torch.Tensor, slots: np.ndarray) -> list[int]:
        """Draw one token per slot from logits [len(slots), V]; harvest finished rows; returns their slots."""
        params, count = self.params, self.count[slots]
        if params.processed:
            logits = processed_logits(
                logits,
                params,
                self._send(self.out_ids[slots]),
                self._send(count),
                self._send(self.prompt[slots]),
                self._send(self.prompt_length[slots]),
                self.bad_ids,
            )
        token, logp = sample_step(logits, self._send(self.uniform[slots, count]), params)
        return self._take(token.cpu().numpy(), logp.cpu().numpy(), slots)

    def _take(self, token: np.ndarray, logp: np.ndarray, slots: np.ndarray) -> list[int]:
        """One token per slot, drawn with this log-prob; harvest finished rows; returns their slots."""
        params, count = self.params, self.count[slots]
        if np.isnan(logp).any():
            self._refuse_nothing(int(slots[np.isnan(logp).argmax()]))
        self.token[slots] = token
        self.out_ids[slots, count] = token
        self.out_logps[slots, count] = logp
        self.count[slots] = count + 1
        if self.on_token is not None:
            for slot in slots:
                self.on_token(*map(int, self.row[slot]), self.out_ids[slot, : self.count[slot]].tolist())
        eos = self.stops[token]
        ended = eos | (count + 1 >= params.max_new_tokens)
        stopped = self.text.watch(token, slots, self.out_ids, self.count) if params.stop_strings else ()
        if not len(stopped) and not ended.any():
            return []
        ended[list(stopped)] = True
        finished = []
        for j in np.nonzero(ended)[0]:
            slot = int(slots[j])
            self._harvest(slot, "eos" if eos[j] else "stop" if j in stopped else "length")
            finished.append(slot)
        return finished

    def _refuse_nothing(self, slot: int) -> None:
        """A slot's logits leave nothing to draw from: they are no numbers, or all tokens are banned."""
        banned = (
            " Or bad_words, min_tokens and logit processors together ban every token: leave some out."
            if self.params.processed
            else ""
        )
        raise SamplerError(
            f"the model gives no probabilities for token {self.count[slot] + 1} after prompt {self.row[slot, 0]}: its"
            " logits are not finite. Look for weights that are not (a training that diverged, a damaged copy), compute"
            f" in float32 where a half type overflows, or write a temperature that is 0 or not as small.{banned}"
        )

    def _harvest(self, slot: int, reason: str) -> None:
        i, g = self.row[slot]
        n = int(self.count[slot])
        ids = self.out_ids[slot, :n].tolist()
        if self.kept is not None:  # the last token's KV is not computed
            self.kept.add(Kept([*self.prompts[i], *ids[:-1]], *self.kv.copy(slot, len(self.prompts[i]) + n - 1)))
        text = self.text.of(ids[:-1] if reason == "eos" else ids)
        if self.trunk[i]:
            self.seats.leave(int(self.seat[slot]), int(self.lane[slot]))
        self.results[i][g] = Completion(ids, self.out_logps[slot, :n].tolist(), reason, text)
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)


def tag_ids(tokenizer) -> set[int]:
    """Ids of the tags of a response's parts (``responses.TAGS``) that are special tokens, which decoding would drop."""
    found = {tag: tokenizer.convert_tokens_to_ids(tag) for tag in TAGS}
    return {
        i
        for tag, i in found.items()
        if i is not None
        and tokenizer.convert_ids_to_tokens(i) == tag
        and not tokenizer.decode([i], skip_special_tokens=True)
    }


def special_ids(tokenizer) -> set[int]:
    """Ids of all special tokens, also of those without a role (reserved ones)."""
    return {
        *(getattr(tokenizer, "all_special_ids", ()) or ()),
        *(i for i, token in (getattr(tokenizer, "added_tokens_decoder", None) or {}).items() if token.special),
    }


def unseen_tokens(tokenizer) -> dict[str, int]:
    """Special tokens that texts are without (:func:`text_of`), and their ids."""
    tags = tag_ids(tokenizer)
    return {
        str(token): i
        for i, token in tokenizer.added_tokens_decoder.items()
        if (token.special or i in tokenizer.all_special_ids) and i not in tags and str(token)
    }


def text_of(tokenizer, ids, tags: set[int] | None = None) -> str:
    """Decoded ids without special tokens other than the tags of thought and answer, which rewards and views read. tags:
    :func:`tag_ids`, where it is known.
    """
    tags = tag_ids(tokenizer) if tags is None else tags
    if not tags.intersection(ids):
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    special = special_ids(tokenizer) - tags
    return tokenizer.decode(
        [t for t in ids if t not in special],
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
        spaces_between_special_tokens=False,
    )


class DerivedText:
    """Text of completions and their stop strings. While sampling, only rows whose new token could end a stop string are
    decoded.
    """

    def __init__(self, tokenizer, params: SamplingParams):
        self.tokenizer, self.stops, self.min_tokens = tokenizer, params.stop_strings, params.min_tokens
        self.tags = tag_ids(tokenizer) if tokenizer is not None else set()
        self.special = special_ids(tokenizer) - self.tags
        self.tail = max((len(s.encode()) for s in self.stops), default=0) + 4
        self.ends = {s[-1] for s in self.stops}
        self.candidate: dict[int, bool] = {}

    def decode(self, ids: list[int]) -> str:
        return text_of(self.tokenizer, ids, self.tags)

    def of(self, ids: list[int], begun: int = 0) -> str:
        """Text of a completion, cut before its first stop string. begun: how many tokens it began with; no stop string
        ends among them.
        """
        if self.tokenizer is None:
            return ""
        text = self.decode(ids)
        cuts = self._cuts(text, ids, begun)
        return text[: min(cuts)] if cuts else text

    def ended(self, begun: list[int], new: list[int], reason: str) -> tuple[list[int], str]:
        """A completion of tokens that were given and new ones that an engine drew behind them, and how it ended: also
        at a stop string that begins among the given ones, where the engine, which sees the new ones alone, went on."""
        ids = begun + new
        if self.stops and new and self._cuts(self.decode(ids), ids, len(begun)):
            for n in range(len(begun) + 1, len(ids) + 1):
                if self._cuts(self.decode(ids[:n]), ids, len(begun)):
                    return ids[:n], "stop"
        return ids, reason

    def trimmed(self, ids: list[int], reason: str) -> tuple[list[int], str]:
        """A completion of an engine that looks for stop strings in a text of its own, and how it ended: cut behind the
        first token after which this text holds one.
        """
        found, stopped = self.ended([], ids[:-1] if reason in ("eos", "stop") else ids, "")
        return (found, "stop") if stopped else (ids, reason)

    def shows_tags(self) -> bool:
        """Whether a stop string holds a tag that is a special token: text without special tokens never has it."""
        return any(
            tag in stop for tag in (self.tokenizer.convert_ids_to_tokens(i) for i in self.tags) for stop in self.stops
        )

    def _cuts(self, text: str, ids: list[int], begun: int = 0) -> list[int]:
        """Where stop strings begin that count: those that end after the first min_tokens tokens, and after those that
        the completion began with.
        """
        first = max(self.min_tokens, begun)
        # which may end inside of a character
        before = len(commonprefix([self.decode(ids[:first]), text])) if first else 0
        return [at for at in (text.find(s, max(0, before - len(s) + 1) if first else 0) for s in self.stops) if at >= 0]

    def _may_end(self, token: int) -> bool:
        """Whether a token's text may hold the last character of a stop string (unsure counts as yes)."""
        if token not in self.candidate:
            piece = self.decode([token])
            unsure = "\ufffd" in piece or any(c.isspace() for c in self.ends)
            self.candidate[token] = unsure or any(c in piece for c in self.ends)
        return self.candidate[token]

    def watch(self, tokens: np.ndarray, slots: np.ndarray, out_ids: np.ndarray, counts: np.ndarray) -> list[int]:
        """Indices j of rows whose text now holds a stop string; out_ids [S, T], counts [S]."""
        found = []
        for j, token in enumerate(tokens.tolist()):
            if counts[slots[j]] < self.min_tokens or not self._may_end(token):
                continue
            ids = out_ids[slots[j], : counts[slots[j]]].tolist()
            if self.min_tokens:
                hit = bool(self._cuts(self.decode(ids), ids))
            else:
                text = self.decode([t for t in ids if t not in self.special][-self.tail :])
                hit = any(s in text for s in self.stops)
            if hit:
                found.append(j)
        return found
