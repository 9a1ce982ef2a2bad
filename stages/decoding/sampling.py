"""Per-step sampling transforms: pure functions of (logits, uniforms, params), vectorised over rows.

Everything here is row-independent, so a completion cannot depend on which rows it shared a batch with.
Order of the transforms: bad words, min tokens, logit bias, repetition, frequency and presence penalty, further logit
processors, temperature, top-k, top-p (over the top-k survivors, renormalised), min-p. Log-probs are natural logs in
float32 of the distribution that was really sampled (renormalised after the filters).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

_MASK64 = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 64  # vocabulary entries summed together in the two-level inverse CDF
_PROBE = 256  # top-p looks at this many best tokens before it sorts the vocabulary


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn and when a completion ends.

    temperature     > 0 divides the logits; 0 is greedy (argmax; log-probs are then those of temperature 1, unfiltered)
    top_p           in (0, 1]: smallest set of best tokens with mass >= top_p (ties with the last one stay)
    top_k           0 is off, else the k best tokens (ties with the k-th stay)
    min_p           in [0, 1): drops tokens with p < min_p * max p
    max_new_tokens  >= 1, the stop token included
    stop_ids        token ids that end a completion (kept in its ids; finish reason "eos")
    stop_strings    strings that end a completion (their tokens stay in ids, the text is cut before them; "stop")
    min_tokens      no stop id and no stop string ends a completion before it has this many tokens
    logit_bias      (token id, number added to its logit) pairs, or a mapping; -100 bans, 100 forces (OpenAI)
    bad_words       strings whose last token is impossible after their first ones, among the generated tokens
    repetition_penalty  > 0; logits of tokens in prompt or completion divided by it where positive, multiplied where
    negative (CTRL,
                    Keskar et al. 2019)
    frequency_penalty, presence_penalty  subtracted per occurrence, and once, from the logits of generated tokens
    (OpenAI) logit_processors  callables (logits [n, V] float32, generated [n, T] int64, counts [n] int64) -> logits [n,
    V];
                    row i has counts[i] generated tokens in generated[i, :counts[i]]; must be row-independent
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 64
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_processors: tuple[Callable, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "stop_ids", frozenset(int(i) for i in self.stop_ids))
        if isinstance(self.stop_strings, str):
            raise ValueError(f"stop_strings is a tuple of strings: write stop_strings=({self.stop_strings!r},)")
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))
        object.__setattr__(self, "logit_processors", tuple(self.logit_processors))
        bias = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        object.__setattr__(self, "logit_bias", tuple((int(i), float(v)) for i, v in bias))
        if isinstance(self.bad_words, str):
            raise ValueError(f"bad_words is a tuple of strings: write bad_words=({self.bad_words!r},)")
        object.__setattr__(self, "bad_words", tuple(self.bad_words))
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature}: write 0 for greedy or a positive number such as 1.0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: write a number in (0, 1]; 1.0 turns the filter off")
        if self.top_k < 0 or int(self.top_k) != self.top_k:
            raise ValueError(f"top_k={self.top_k}: write a whole number; 0 turns the filter off")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p={self.min_p}: write a number in [0, 1); 0.0 turns the filter off")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: write at least 1")
        if any(not isinstance(s, str) or not s for s in self.stop_strings):
            raise ValueError("stop_strings holds an empty or non-string entry: remove it")
        if any(not isinstance(s, str) or not s.strip() for s in self.bad_words):
            raise ValueError("bad_words holds an empty or non-string entry: remove it")
        if not 0 <= self.min_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens}: write a number from 0 to max_new_tokens={self.max_new_tokens}"
            )
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(f"repetition_penalty={self.repetition_penalty}: write a positive number; 1.0 turns it off")
        if not all(
            math.isfinite(v) for v in (self.frequency_penalty, self.presence_penalty, *(v for _, v in self.logit_bias))
        ):
            raise ValueError(
                "frequency_penalty, presence_penalty and logit_bias are finite numbers: write 0.0 to turn one off, -100"
                " to ban a token"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def processed(self) -> bool:
        """Whether logits are changed before temperature and filters."""
        return bool(
            self.min_tokens
            or self.logit_bias
            or self.bad_words
            or self.repetition_penalty != 1.0
            or self.frequency_penalty
            or self.presence_penalty
            or self.logit_processors
        )

    @property
    def plain(self) -> bool:
        """Whether tokens come from softmax(logits / temperature) itself, which is what a trainer's forward gives."""
        return not self.greedy and not self.filtered and not self.processed


def _mix(z: np.ndarray) -> np.ndarray:
    """splitmix64 finaliser, uint64 -> uint64 (a bijection with full avalanche)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniforms(seeds: Sequence[int], count: int, start: int = 0) -> np.ndarray:
    """u[i, j] = hash(seeds[i], start + j) in [0, 1), float64 [n, count], 53 random bits each.

    Any python integer is a seed (taken modulo 2**64). The value is a function of (seed, position) only.
    """
    keys = np.array([int(s) & _MASK64 for s in seeds], dtype=np.uint64)[:, None]
    t = np.arange(start + 1, start + count + 1, dtype=np.uint64)[None, :]
    with np.errstate(over="ignore"):
        h = _mix(_mix(keys + _GOLDEN) + t * _GOLDEN)
    return (h >> np.uint64(11)).astype(np.float64) * 2.0**-53


def token_counts(ids: torch.Tensor, lengths: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """How often each token occurs in the first lengths[i] ids of row i: ids [n, T] int64, lengths [n] -> [n, V]
    float32.
    """
    live = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    return torch.zeros(ids.shape[0], vocabulary, device=ids.device).scatter_add_(1, ids, live.float())


def bad_word_ids(tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Token sequences of the words, at the start of a text and after a space (the two spellings of most tokenizers)."""
    found = []
    for word in words:
        for text in (word, " " + word.lstrip()):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if ids and ids not in found:
                found.append(ids)
    return found


def processed_logits(
    logits: torch.Tensor,
    params: SamplingParams,
    generated: torch.Tensor,
    counts: torch.Tensor,
    prompts: torch.Tensor | None = None,
    prompt_lengths: torch.Tensor | None = None,
    bad_ids: Sequence[Sequence[int]] = (),
) -> torch.Tensor:
    """Logits [n, V] after params' bans, biases and penalties, float32; ``logits`` is left as it is.

    generated [n, T] int64 with counts [n] tokens each; prompts [n, P] int64 with prompt_lengths [n] (repetition penalty
    only); bad_ids: token sequences of ``params.bad_words``.
    """
    z = logits.float().clone()
    for *head, last in bad_ids:
        if not head:
            z[:, last] = -math.inf
        elif len(head) <= generated.shape[1]:
            at = counts[:, None] - len(head) + torch.arange(len(head), device=z.device)
            hit = (counts >= len(head)) & (
                generated.gather(1, at.clamp(min=0)) == torch.tensor(head, device=z.device)
            ).all(1)
            z[hit, last] = -math.inf
    if params.min_tokens and params.stop_ids:
        early = (counts < params.min_tokens).nonzero()[:, 0]
        z[early[:, None], torch.tensor(sorted(params.stop_ids), device=z.device)] = -math.inf
    for token, bias in params.logit_bias:
        z[:, token] += bias
    if params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty:
        said = token_counts(generated, counts, z.shape[1])
        if params.repetition_penalty != 1.0:
            seen = (said > 0) | (token_counts(prompts, prompt_lengths, z.shape[1]) > 0)
            z = torch.where(seen, torch.where(z > 0, z / params.repetition_penalty, z * params.repetition_penalty), z)
        z -= params.frequency_penalty * said + params.presence_penalty * (said > 0)
    for processor in params.logit_processors:
        z = processor(z, generated, counts)
    return z


def keep_threshold(z: torch.Tensor, params: SamplingParams) -> torch.Tensor | None:
    """The filters as one cut: tokens with z >= threshold [n, 1] survive. z [n, V] float32 = logits / temperature.

    None when no filter is on.
    """
    if not params.filtered:
        return None
    n, v = z.shape
    threshold = torch.full((n, 1), -math.inf, dtype=z.dtype, device=z.device)
    k = min(int(params.top_k), v)
    if params.top_p < 1:
        if k:
            best = torch.topk(z, k, dim=-1).values
            cut = _top_p_cut(best, torch.logsumexp(best.double(), -1, keepdim=True), params.top_p)
        else:
            total = torch.logsumexp(z, -1, keepdim=True).double()
            best = torch.topk(z, min(_PROBE, v), dim=-1).values
            cut = _top_p_cut(best, total, params.top_p)
            short = cut.squeeze(-1) == -math.inf
            if bool(short.any()):
                full = torch.sort(z[short], dim=-1, descending=True).values
                cut[short] = _top_p_cut(full, total[short], params.top_p)
        threshold = torch.maximum(threshold, cut)
        if k:
            threshold = torch.maximum(threshold, best[:, -1:])
    elif k:
        threshold = torch.topk(z, k, dim=-1).values[:, -1:]
    if params.min_p > 0:
        threshold = torch.maximum(threshold, z.amax(-1, keepdim=True) + math.log(params.min_p))
    return threshold


def _top_p_cut(best: torch.Tensor, log_total: torch.Tensor, top_p: float) -> torch.Tensor:
    """z of the last token kept by top-p; best [n, m] float32 descending, log_total [n, 1] float64. -inf where the
    m best tokens do not reach top_p."""
    mass = torch.exp(best.double() - log_total).cumsum(-1)
    last = (mass < top_p).sum(-1, keepdim=True)
    cut = best.gather(-1, last.clamp(max=best.shape[-1] - 1))
    return torch.where(last < best.shape[-1], cut, torch.full_like(cut, -math.inf))


def scaled_logits(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """logits / temperature in float32 (a greedy run uses temperature 1), [n, V]."""
    z = logits.float()
    return z if params.greedy or params.temperature == 1.0 else z / params.temperature


def sample_step(logits: torch.Tensor, u: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row. logits [n, V]; u [n] float64 in [0, 1) (unused when greedy).

    Returns (tokens [n] int64, log-probs [n] float32). Inverse CDF over the vocabulary order: the token is the first
    with cumulative mass > u. Block sums are float32, everything across blocks float64.
    """
    z = scaled_logits(logits, params)
    top = z.amax(-1, keepdim=True)
    if params.greedy:
        token = z.argmax(-1)
        return token, (z.gather(-1, token[:, None]) - torch.logsumexp(z, -1, keepdim=True)).squeeze(-1)
    threshold = keep_threshold(z, params)
    e = torch.sub(z, top).exp_()
    if threshold is not None:
        e.masked_fill_(z < threshold, 0.0)
    n, v = e.shape
    blocks = -(-v // _BLOCK)
    if blocks * _BLOCK != v:
        e = torch.nn.functional.pad(e, (0, blocks * _BLOCK - v))
    e = e.view(n, blocks, _BLOCK)
    cdf = e.sum(-1).double().cumsum(-1)
    total = cdf[:, -1:]
    target = torch.minimum(u[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    block = (cdf <= target).sum(-1, keepdim=True)
    before = torch.where(block > 0, cdf.gather(-1, (block - 1).clamp_(min=0)), 0.0)
    inner = e.gather(1, block[:, :, None].expand(n, 1, _BLOCK)).squeeze(1).double().cumsum(-1)
    mass = inner[:, -1:]
    target = torch.minimum(target - before, torch.nextafter(mass, torch.zeros_like(mass)))
    token = block * _BLOCK + (inner <= target).sum(-1, keepdim=True)
    logp = z.gather(-1, token) - top - total.log().float()
    return token.squeeze(-1), logp.squeeze(-1)
