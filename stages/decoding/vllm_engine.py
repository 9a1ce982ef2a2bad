"""The vLLM engine: vLLM's offline interface in this process, held to the contract of ``stages.decoding.engines.Engine``.

Every completion is a request of its own with its own seed; vLLM's prefix cache computes a group's prompt once. New weights are
read from a directory by vLLM's own ``reload_weights`` (it works with tensor parallelism and engine processes), after which the
prefix cache is emptied: its keys and values belong to the old weights.
"""

from __future__ import annotations

import math
import os

import torch

from stages.decoding.engines import EngineError, refuse_all_failed, vocabulary_of
from stages.decoding.sampler import Completion, DerivedText, SamplerError, check_request
from stages.running import usage

#: Arguments of vllm.LLM that the adapter's promises rest on.
FIXED = ("model", "logprobs_mode", "seed", "skip_tokenizer_init", "enable_sleep_mode")


class VLLMEngine:
    """vLLM over the model directory ``path``.

    max_batch: sequences decoded together (``max_num_seqs``). options: further arguments of ``vllm.LLM``. sleeps: load it so that it can
    give its device memory back. Log-probs are asked for as processed ones: of the distribution after penalties, temperature and
    filters. vLLM applies min_p before top_k and top_p, so combinations of them keep other tokens than the built-in engine does.
    """

    exact_logps, shares_weights, reencodes, copies = False, False, False, True

    def __init__(self, path: str, tokenizer, *, max_batch: int = 64, options: dict | None = None, sleeps: bool = False):
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # nothing phones home
        try:
            import vllm
        except ImportError as error:
            raise EngineError(f"engine=vllm needs the package vllm, which does not load here ({error}). Install it (pip install vllm, a GPU is needed), or "
                              "write engine=builtin.") from error
        options = dict(options or {})
        for name in (name for name in FIXED if name in options):
            raise EngineError(f"engine_options sets {name}, which this platform decides; leave it out")
        self.vllm, self.tokenizer, self.sleeps = vllm, tokenizer, sleeps
        self.name = f"vllm {getattr(vllm, '__version__', '')}".strip()
        self.vocabulary, self.positions = vocabulary_of(path)
        self.positions = options.get("max_model_len") or self.positions
        self.weights, self.asleep = "input", 0
        torch.cuda.empty_cache()  # what torch keeps for later, vLLM cannot have
        self.llm = vllm.LLM(model=path, **{"max_num_seqs": max_batch, "enable_prefix_caching": True, "logprobs_mode": "processed_logprobs", "seed": 0,
                                           **({"enable_sleep_mode": True} if sleeps else {}), **options})

    @property
    def holds(self) -> torch.dtype | None:
        """The half type that this engine rounds weights to; None where it holds them in full, or does not say."""
        held = getattr(getattr(getattr(self.llm, "llm_engine", None), "model_config", None), "dtype", None)
        return held if held in (torch.bfloat16, torch.float16) else None

    @usage.generated
    def generate(self, prompts, params, seeds, progress=None):
        """See :class:`stages.decoding.engines.Engine`."""
        check_request(prompts, params, seeds, vocabulary=self.vocabulary, positions=self.positions, tokenizer=self.tokenizer)
        if params.logit_processors:
            raise SamplerError("vLLM takes no logit processors of ours; write engine=builtin, or use the penalties, bad_words and logit_bias")
        if self.asleep == 2:
            raise EngineError("the engine slept without its weights and got no new ones: call update first")
        if self.asleep:
            self._wake()
            self.asleep = 0
        text = DerivedText(self.tokenizer, params)
        rows = [(i, seed) for i, of_prompt in enumerate(seeds) for seed in of_prompt]
        found = self._ask(prompts, params, rows, text)
        again = [k for k, c in enumerate(found) if c.finish_reason == "error"]
        for k, c in zip(again, self._ask(prompts, params, [rows[k] for k in again], text)):
            found[k] = c
        refuse_all_failed(found, self.name)
        if progress is not None and rows:
            progress(len(rows), len(rows))
        made = iter(found)
        return [[next(made) for _ in of_prompt] for of_prompt in seeds]

    def _ask(self, prompts, params, rows, text) -> list[Completion]:
        if not rows:
            return []
        outputs = self.llm.generate([{"prompt_token_ids": list(prompts[i])} for i, _ in rows], [self._params(params, seed) for _, seed in rows], use_tqdm=False)
        if [list(o.prompt_token_ids) for o in outputs] != [list(prompts[i]) for i, _ in rows]:
            raise EngineError(f"{self.name} returned its requests in another order or with other prompts; this adapter cannot be used with that version")
        return [self._completion(output.outputs[0], params, text) for output in outputs]

    def _params(self, p, seed: int):
        more = {"top_k": p.top_k or -1, "top_p": p.top_p, "min_p": p.min_p} if not p.greedy else {}
        return self.vllm.SamplingParams(
            n=1, temperature=p.temperature, seed=int(seed) % 2**63, max_tokens=p.max_new_tokens, min_tokens=p.min_tokens, stop=list(p.stop_strings) or None,
            stop_token_ids=sorted(p.stop_ids) or None, ignore_eos=True, logprobs=0, detokenize=bool(p.stop_strings), skip_special_tokens=True,
            repetition_penalty=p.repetition_penalty, frequency_penalty=p.frequency_penalty, presence_penalty=p.presence_penalty,
            logit_bias=dict(p.logit_bias) or None, bad_words=list(p.bad_words) or None, **more)

    def _completion(self, output, params, text) -> Completion:
        ids = [int(t) for t in output.token_ids]
        if output.finish_reason not in ("stop", "length") or not ids:
            return Completion([], None, "error", "", error=f"vLLM ended the request with finish_reason={output.finish_reason!r}")
        reason = "length" if output.finish_reason == "length" else "stop" if isinstance(output.stop_reason, str) else "eos"
        logps = None if output.logprobs is None else [float(entry[token].logprob) for entry, token in zip(output.logprobs, ids)]
        if logps is not None and (len(logps) != len(ids) or not all(math.isfinite(v) for v in logps)):
            return Completion([], None, "error", "", error="vLLM returned log-probs that are missing or not finite")
        return Completion(ids, logps, reason, text.of(ids[:-1] if reason == "eos" else ids))

    def update(self, directory: str, weights: str) -> None:
        if self.asleep:
            self._wake(["weights"])  # the cache stays away until the weights are in: both together may not fit
        try:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})
        except (TypeError, NotImplementedError, AttributeError) as error:
            raise EngineError(f"{self.name} cannot read new weights from a directory ({error}). Use a version whose workers have reload_weights(weights_path=...), "
                              "or write engine=builtin.") from error
        if self.asleep:
            self._wake(["kv_cache"])
        self.llm.reset_prefix_cache()
        self.weights, self.asleep = weights, 0

    def _wake(self, tags: list[str] | None = None) -> None:
        torch.cuda.empty_cache()  # training has freed its memory to torch only, and vLLM takes back what it had from the device
        self.llm.wake_up(**({} if tags is None else {"tags": tags}))

    def sleep(self, keep_weights: bool = True) -> None:
        if self.sleeps and not self.asleep:
            self.asleep = 1 if keep_weights else 2
            self.weights = self.weights if keep_weights else "none"
            self.llm.sleep(level=self.asleep)

    def close(self) -> None:
        self.llm = None
