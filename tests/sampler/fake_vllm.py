"""A stand-in for the package vllm with its public shapes: ``LLM``, ``SamplingParams``, request outputs, sleep mode,
weight reload.

It really samples (with transformers' forward and its own random numbers) and has the habits that an adapter must cope
with, as seen in vLLM 0.32.0 (``tests/sampler/test_real_vllm.py`` runs the same contract over vLLM itself): unknown
arguments are errors, a stop id is in ``token_ids`` but not in ``text``, EOS stops unless ignored and is banned below
``min_tokens`` all the same, temperatures below 0.01 become 0.01, bad words are not banned in every spelling, text is
wrong without detokenisation, log-probs are raw unless asked for processed, the prefix cache keeps what old weights
computed, level-2 sleep loses the weights, a worker's error arrives as a plain Exception with its text.
"""

from __future__ import annotations

import dataclasses
import math

import torch

__version__ = "0.0-fake"
#: Requests (by their number, counted over all instances) that end with finish_reason "abort" instead of a completion.
ABORT: set[int] = set()


class VLLMClientError(Exception):
    """A request that is refused; no ValueError."""


@dataclasses.dataclass
class SamplingParams:
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None

    def __post_init__(self):
        if self.temperature < 1e-5:  # greedy requests ignore the filters
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        elif self.temperature < 0.01:
            self.temperature = 0.01
        if self.temperature > 2:
            raise VLLMClientError(f"temperature must be in [0, 2], got {self.temperature}.")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise VLLMClientError(f"{name} must be in [-2, 2], got {getattr(self, name)}.")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError("seed must fit int64")
        if self.stop and not self.detokenize:
            raise ValueError(
                "stop strings are only supported when detokenize is True. Set detokenize=True to use stop."
            )


@dataclasses.dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclasses.dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclasses.dataclass
class RequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


class LLM:
    requests = 0

    def __init__(
        self,
        model: str,
        *,
        max_num_seqs: int = 256,
        enable_prefix_caching: bool | None = None,
        logprobs_mode: str = "raw_logprobs",
        enable_sleep_mode: bool = False,
        seed: int = 0,
        gpu_memory_utilization: float = 0.9,
        max_model_len: int | None = None,
        dtype: str = "auto",
        kv_cache_memory_bytes: int | None = None,
    ):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(model).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.logprobs_mode, self.sleep_mode, self.awake = logprobs_mode, enable_sleep_mode, {"weights", "kv_cache"}
        self.cache: dict[tuple, torch.Tensor] = {}  # prefix cache: what the last layer says after a prompt
        self.calls: list[str] = []

    def generate(self, prompts, sampling_params, use_tqdm=True):
        if self.awake != {"weights", "kv_cache"}:
            raise RuntimeError("the engine sleeps")
        return [
            self._request(prompt["prompt_token_ids"], params)
            for prompt, params in zip(prompts, sampling_params, strict=True)
        ]

    def _request(self, prompt: list[int], p: SamplingParams) -> RequestOutput:
        LLM.requests += 1
        if LLM.requests in ABORT:
            return RequestOutput(str(LLM.requests), list(prompt), [CompletionOutput(0, "", [], None, None, "abort")])
        draw = torch.Generator().manual_seed(p.seed if p.seed is not None else torch.seed())
        ids, logprobs, finish, why = [], [], "length", None
        while len(ids) < p.max_tokens:
            token, logprob = self._token(prompt, ids, p, draw)
            ids.append(token)
            logprobs.append({token: Logprob(logprob, 1, self.tokenizer.decode([token]))})
            if len(ids) >= p.min_tokens and token in (p.stop_token_ids or ()):
                finish, why = "stop", token
                break
            if not p.ignore_eos and token == self.model.config.eos_token_id:
                finish = "stop"
                break
            text = self.tokenizer.decode(ids, skip_special_tokens=p.skip_special_tokens)
            before = len(self.tokenizer.decode(ids[: p.min_tokens], skip_special_tokens=p.skip_special_tokens))
            hit = (
                next((s for s in p.stop or () if text.find(s, max(0, before - len(s) + 1)) >= 0), None)
                if len(ids) > p.min_tokens
                else None
            )
            if hit is not None:
                finish, why = "stop", hit
                break
        text = self.tokenizer.decode(ids, skip_special_tokens=p.skip_special_tokens) if p.detokenize else ""
        return RequestOutput(
            str(LLM.requests),
            list(prompt),
            [
                CompletionOutput(
                    0,
                    text.split(why)[0] if isinstance(why, str) else text,
                    ids,
                    None,
                    logprobs if p.logprobs is not None else None,
                    finish,
                    why,
                )
            ],
        )

    @torch.inference_mode()
    def _token(self, prompt, ids, p: SamplingParams, draw) -> tuple[int, float]:
        key = tuple(prompt)
        if ids or key not in self.cache:
            logits = self.model(torch.tensor([[*prompt, *ids]])).logits[0, -1].float()
            if not ids:
                self.cache[key] = logits
        else:
            logits = self.cache[key]
        z = self._processed(logits.clone(), prompt, ids, p)
        raw = torch.log_softmax(logits, -1)
        if p.temperature < 1e-5:
            token = int(z.argmax())
            return token, float((raw if self.logprobs_mode == "raw_logprobs" else torch.log_softmax(z, -1))[token])
        z /= p.temperature
        if p.min_p:
            z[z < z.max() + math.log(p.min_p)] = -math.inf
        if p.top_k > 0:
            z[z < z.topk(min(p.top_k, len(z))).values[-1]] = -math.inf
        if p.top_p < 1:
            order = z.argsort(descending=True)
            before = torch.softmax(z[order], -1).cumsum(-1) - torch.softmax(z[order], -1)
            z[order[before >= p.top_p]] = -math.inf
        logprobs = torch.log_softmax(z, -1)
        token = int(torch.multinomial(logprobs.exp(), 1, generator=draw))
        return token, float((raw if self.logprobs_mode == "raw_logprobs" else logprobs)[token])

    def _processed(self, z, prompt, ids, p: SamplingParams):
        for word in p.bad_words or ():
            bare, spaced = (
                self.tokenizer.encode(start + word.lstrip(), add_special_tokens=False) for start in ("", " ")
            )
            for *head, last in [bare] + ([spaced] if spaced[0] != bare[0] and len(spaced) == len(bare) else []):
                if not head or ids[-len(head) :] == head:
                    z[last] = -math.inf
        if len(ids) < p.min_tokens:
            z[[self.model.config.eos_token_id, *(p.stop_token_ids or ())]] = -math.inf
        for token, bias in (p.logit_bias or {}).items():
            z[token] += bias
        for token in {*prompt, *ids}:
            z[token] = z[token] / p.repetition_penalty if z[token] > 0 else z[token] * p.repetition_penalty
        for token in set(ids):
            z[token] -= p.frequency_penalty * ids.count(token) + p.presence_penalty
        return z

    # -- what RL needs

    def sleep(self, level: int = 1):
        if not self.sleep_mode:
            raise RuntimeError("sleep mode is not enabled")
        self.calls.append(f"sleep {level}")
        self.awake = set()
        self.cache.clear()
        if level == 2:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.zero_()

    def wake_up(self, tags: list[str] | None = None):
        self.calls.append(f"wake {' '.join(tags or ['all'])}")
        self.awake |= set(tags or ("weights", "kv_cache"))

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple = (), kwargs: dict | None = None):
        from safetensors.torch import load_file

        if method != "reload_weights" or "weights" not in self.awake:
            raise RuntimeError(f"cannot {method} now")
        self.calls.append("reload")
        try:
            weights = load_file(f"{kwargs['weights_path']}/model.safetensors")
        except OSError as error:
            raise Exception(f"Call to collective_rpc method failed: Worker failed with error '{error}'") from None
        self.model.load_state_dict(weights, strict=False)
        return [None]

    def reset_prefix_cache(self):
        self.calls.append("reset")
        self.cache.clear()
        return True
