"""The server engine: any server with the OpenAI completions interface, held to the contract of
``stages.decoding.engines.Engine``.

Three dialects (``engine_api``):

``vllm``          ``vllm serve``: prompts as ids, sampled ids and log-probs back, all sampling settings; new weights over its
                  development endpoints (start it with ``VLLM_SERVER_DEV_MODE=1``, and with ``--logprobs-mode
                  processed_logprobs``
                  where temperature or filters change what is sampled: else its log-probs are kept only where nothing
                      does)
``transformers``  ``transformers serve``: text in, text out; all settings but frequency and presence penalty through a
generation
                  config; serves any model directory it can read, so new weights are a new directory. Its seed is global
                  to the
                  process: rows are asked for one at a time.
``openai``        what the interface promises everywhere: text out, temperature, top_p, seed, stop strings, penalties, logit_bias

Where text comes back, rows are marked ``reencoded``.
"""

from __future__ import annotations

import json
import math

from stages.decoding.engines import EngineError, refuse_all_failed, vocabulary_of
from stages.decoding.sampler import Completion, DerivedText, SamplerError, check_request
from stages.decoding.sampling import bad_word_ids
from stages.decoding.vllm_engine import completion_of, model_ends, vllm_settings
from stages.running import journal, usage
from stages.running.http_json import ServerError, request_json
from stages.running.servers import Served, Settings, each, finish_of, first_choice, patiently

#: Sampling settings that each dialect cannot express.
MISSING = {
    "vllm": (),
    "transformers": ("frequency_penalty", "presence_penalty"),
    "openai": ("top_k", "min_p", "repetition_penalty", "min_tokens", "bad_words"),
}


class ServerEngine:
    """A server at ``url`` (with its ``/v1``).

    path: the stage's model directory, whose tokenizer the server must share. model: name on the server; None: the only
    one it lists (``transformers``: ``path``). timeout_s: deadline of one completion. concurrency: requests under way at
    once.
    """

    exact_logps, shares_weights, takes_processors = False, False, False

    def __init__(
        self,
        url: str,
        tokenizer,
        path: str,
        *,
        model: str | None = None,
        api: str = "auto",
        key_variable: str = "",
        timeout_s: float = 600.0,
        concurrency: int = 32,
    ):
        self.url, self.tokenizer, self.key_variable, self.timeout_s = (
            url.rstrip("/"),
            tokenizer,
            key_variable,
            timeout_s,
        )
        self.root = self.url.removesuffix("/v1")
        self.concurrency, self.weights = concurrency, "input"
        self.served = Served(
            f"the server at {self.url}",
            "completions",
            EngineError,
            timeout_s,
            Settings("engine_url", "engine_model", "engine_key_variable", "engine_timeout_s", "engine_concurrency"),
        )
        self.vocabulary, self.positions = vocabulary_of(path)
        self.api = self._dialect() if api == "auto" else api
        self.model = model or (path if self.api == "transformers" else self._only())
        self.reencodes = self.api != "vllm"
        self.served.probe = lambda: self._asked({"model": self.model, "prompt": "Hello", "max_tokens": 1})
        self.ends = model_ends(path, tokenizer)
        self.processed_logps = self.api == "vllm" and self._gives_processed()
        self.name = f"server {self.api}: {self.model if self.api != 'transformers' or model else 'the model input'}"

    # -- what the server is --------------------------------------------------------------------------------------------

    def _call(self, url: str, body: dict | None = None, timeout_s: float | None = None):
        return request_json(url, body, key_variable=self.key_variable, timeout_s=timeout_s or self.timeout_s)

    def _dialect(self) -> str:
        """transformers serve and vLLM describe their endpoints; whoever does not is taken for a plain server."""
        try:
            paths = self._call(self.root + "/openapi.json", timeout_s=min(60.0, self.timeout_s)).get("paths") or {}
        except ServerError as error:
            # a page that is no JSON is an answer (of a user interface); what may be different the next time is none
            page = isinstance(error.__cause__, ValueError)
            if not page and (error.status in (None, 407, 408, 429, 502, 503, 504) or 300 <= error.status < 400):
                raise self._silent(error) from error
            return "openai"
        except AttributeError:
            return "openai"
        if "/load_model" in paths:
            return "transformers"
        return "vllm" if "/version" in paths and "/v1/completions" in paths else "openai"

    def _only(self) -> str:
        try:
            served = [
                entry["id"] for entry in self._call(self.url + "/models", timeout_s=min(60.0, self.timeout_s))["data"]
            ]
        except (ServerError, KeyError, TypeError) as error:
            raise self._silent(error) from error
        if len(served) != 1:
            raise EngineError(
                f"the server at {self.url} lists {len(served)} models; write engine_model with one of:"
                f" {', '.join(served[:20]) or 'none listed'}"
            )
        return served[0]

    def _gives_processed(self) -> bool:
        """Whether a vLLM server's log-probs are those of the sampled distribution; only one in development mode says
        so.
        """
        try:
            said = self._call(self.root + "/server_info?config_format=json", timeout_s=min(60.0, self.timeout_s))
            return said["vllm_config"]["model_config"]["logprobs_mode"] == "processed_logprobs"
        except (ServerError, KeyError, TypeError):
            return False

    def _silent(self, error) -> EngineError:
        return EngineError(
            f"no OpenAI server answers at {self.url} ({error}). Start it, and write engine_url with its /v1, for"
            " example engine_url=http://localhost:8000/v1."
        )

    # -- completions ---------------------------------------------------------------------------------------------------

    @usage.generated
    def generate(self, prompts, params, seeds, progress=None):
        """See :class:`stages.decoding.engines.Engine`."""
        check_request(
            prompts, params, seeds, vocabulary=self.vocabulary, positions=self.positions, tokenizer=self.tokenizer
        )
        self._refuse(params)
        text = DerivedText(self.tokenizer, params)
        settings = self._settings(params, text)
        rows = [(list(prompts[i]), seed) for i, of_prompt in enumerate(seeds) for seed in of_prompt]
        found: list[Completion] = each(
            lambda row: self._row(*row, params, settings, text),
            rows,
            1 if self.api == "transformers" else self.concurrency,
            progress,
            finish=journal.keeps(),
        )
        refuse_all_failed(found, f"the server at {self.url}")
        made = iter(found)
        return [[next(made) for _ in of_prompt] for of_prompt in seeds]

    def _refuse(self, params) -> None:
        asked = {
            "top_k": params.top_k and not params.greedy,
            "min_p": params.min_p and not params.greedy,
            "repetition_penalty": params.repetition_penalty != 1.0,
            "min_tokens": params.min_tokens,
            "bad_words": params.bad_words,
            "frequency_penalty": params.frequency_penalty,
            "presence_penalty": params.presence_penalty,
            "logit_processors": params.logit_processors,
        }
        for name in (name for name in (*MISSING[self.api], "logit_processors") if asked[name]):
            raise SamplerError(
                f"a server of kind {self.api} has no {name}: leave it out, or use engine=builtin or a vLLM server"
            )
        if self.api == "vllm" and (far := [token for token, bias in params.logit_bias if abs(bias) > 100]):
            raise SamplerError(
                f"logit_bias of {far[0]}: a vLLM server takes no more than 100 either way; write -100 to ban a token,"
                " 100 to force it, or use engine=vllm or builtin"
            )

    def _row(self, prompt, seed, params, settings, text) -> Completion:
        """One completion, asked for as ``stages.running.servers`` says. EngineError where nobody would get one."""
        try:
            sent = prompt if self.api == "vllm" else self._as_text(prompt)
            body = {"model": self.model, "prompt": sent, "seed": int(seed) % 2**31, **settings}
            about = body if self.weights == "input" else {**body, "model": self.name, "weights": self.weights}
            made: list[Completion] = []

            def kept(answer: dict) -> dict:
                made.append(self._completion(answer, prompt, params, text))  # what is none is not kept
                return _read(answer)

            def ask() -> dict:
                return patiently(lambda: self._asked(body), body)

            asked = ["completion", self.api, about]
            answer = journal.once(self.url, asked, ask, self.served, tuple(prompt), kept)
            return made[0] if made else self._completion(answer, prompt, params, text)
        except ServerError as error:
            why = str(error)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            why = f"the answer is not a completion ({type(error).__name__}: {error})"
        return Completion([], None, "error", "", self.api != "vllm", why)

    def _asked(self, body: dict) -> dict:
        """The answer to one request, with the choice that it holds."""
        try:
            answer = self._call(self.url + "/completions", body)
        except ServerError as error:
            self.served.refuse_restarted(error)
            raise
        first_choice(answer, "completion", self.key_variable)
        return answer

    def _as_text(self, prompt: list[int]) -> str:
        """The text that the server's tokenizer turns into these ids again (it may add the same special tokens in front
        that ours does).
        """
        whole = self.tokenizer.decode(prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        bare = self.tokenizer.decode(prompt[1:], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for text in (whole, bare):
            if self.tokenizer(text).input_ids == prompt:
                return text
        raise ValueError(
            "the prompt's ids do not survive being sent as text; use a server that takes ids (vLLM), or engine=builtin"
        )

    def _settings(self, p, text) -> dict:
        """What a request says beside model, prompt and seed."""
        if self.api == "vllm":
            settings = vllm_settings(p, text, self.tokenizer, self.ends) | {
                "return_token_ids": True,
                "add_special_tokens": False,
            }
            bias = {str(token): value for token, value in (settings["logit_bias"] or {}).items()}
            return {
                name: value for name, value in {**settings, "logit_bias": bias or None}.items() if value is not None
            }
        common = {"max_tokens": p.max_new_tokens, "temperature": p.temperature}
        common |= {"stop": list(p.stop_strings)} if p.stop_strings else {}
        if self.api == "transformers":
            # its temperature alone leaves a greedy generation config greedy, so the whole config is sent
            config = {
                "do_sample": not p.greedy,
                "max_new_tokens": p.max_new_tokens,
                "eos_token_id": sorted(p.stop_ids) or None,
                "repetition_penalty": p.repetition_penalty,
                "pad_token_id": (
                    self.tokenizer.pad_token_id
                    if self.tokenizer.pad_token_id is not None
                    else self.tokenizer.eos_token_id
                ),
            }
            config |= (
                {}
                if p.greedy
                else {"temperature": p.temperature, "top_p": p.top_p, "top_k": p.top_k, "min_p": p.min_p or None}
            )
            config |= {"min_new_tokens": p.min_tokens} if p.min_tokens else {}
            config |= {"bad_words_ids": bad_word_ids(self.tokenizer, p.bad_words)} if p.bad_words else {}
            config |= {"sequence_bias": [[[token], bias] for token, bias in p.logit_bias]} if p.logit_bias else {}
            del common["temperature"]
            return common | {"generation_config": json.dumps({k: v for k, v in config.items() if v is not None})}
        common |= {
            "top_p": 1.0 if p.greedy else p.top_p,
            "frequency_penalty": p.frequency_penalty,
            "presence_penalty": p.presence_penalty,
        }
        common |= {"logit_bias": {str(token): bias for token, bias in p.logit_bias}} if p.logit_bias else {}
        return common

    def _completion(self, answer: dict, prompt, params, text) -> Completion:
        choice = answer["choices"][0]
        read = (answer.get("usage") or {}).get("prompt_tokens")
        if self.api != "openai" and read is not None and read != len(prompt):
            raise ValueError(
                f"the server read the prompt as {read} tokens instead of {len(prompt)}: it does not have the model's"
                " tokenizer, or answers another request"
            )
        if self.api == "vllm":
            if choice.get("token_ids") is None:
                raise ValueError(
                    "it has no token_ids; vLLM returns them since 0.10.2, or write engine_api=openai to take text"
                )
            return self._from_ids([int(t) for t in choice["token_ids"]], choice, params, text)
        return self._from_text(choice.get("text"), finish_of(choice), params, text)

    def _from_ids(self, ids, choice, params, text) -> Completion:
        if (finish := finish_of(choice)) not in ("stop", "length") or not ids:
            raise ValueError(f"finish_reason is {choice.get('finish_reason')!r}")
        if not all(0 <= token < self.vocabulary for token in ids):
            raise ValueError("its token ids are not of the model's vocabulary")
        # a server gives raw log-probs unless started otherwise: they are those of the sampled distribution for sure
        # only where nothing changes it
        sure = self.processed_logps or params.temperature in (0, 1) and not params.filtered and not params.processed
        given = (choice.get("logprobs") or {}).get("token_logprobs") if sure else None
        logps = [float(v) for v in given] if given is not None and len(given) == len(ids) else None
        if logps is not None and not all(map(math.isfinite, logps)):
            raise ValueError("its log-probs are not finite")
        return completion_of(ids, logps, finish, choice.get("stop_reason"), text)

    def _from_text(self, said: str, finish: str, params, text) -> Completion:
        if not isinstance(said, str):
            raise ValueError("it holds no text")
        # content_filter, or none where the request was given up: not an end of the model's
        if finish not in ("stop", "length"):
            raise ValueError(f"finish_reason is {finish!r}")
        ids = self.tokenizer.encode(said, add_special_tokens=False)
        kept = said[: min([at for at in (said.find(s) for s in params.stop_strings) if at >= 0], default=len(said))]
        if finish == "length":
            return Completion(ids, None, "length", kept, True)
        # transformers serve leaves a stop string in the text; others cut it off and do not say whether it or a stop
        # token ended the row
        if (
            any(s in said for s in params.stop_strings)
            or not params.stop_ids
            or self.api == "openai"
            and params.stop_strings
        ):
            return Completion(ids, None, "stop", kept, True)
        if ids and ids[-1] in params.stop_ids:  # a stop token that is no special one is part of the text
            return Completion(ids, None, "eos", text.of(ids[:-1]), True)
        ends = self.tokenizer.eos_token_id if self.tokenizer.eos_token_id in params.stop_ids else min(params.stop_ids)
        return Completion([*ids, ends], None, "eos", kept, True)

    # -- weights -------------------------------------------------------------------------------------------------------

    def update(self, directory: str, weights: str) -> None:
        """See :class:`stages.decoding.engines.Engine`; the server must see the same file system. Of several ranks the
        first one tells it, and all must call.
        """
        from stages.running import ranks

        with ranks.first_rank_only() as here:
            if here:
                self._push(directory)
        if self.api == "transformers":
            self.model = str(directory)
        self.weights, self.served.loaded = weights, self.api == "vllm" and weights != "input"

    def _push(self, directory: str) -> None:
        try:
            if self.api == "vllm":
                body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
                patiently(lambda: self._call(self.root + "/collective_rpc", body))
                if (patiently(lambda: self._call(self.root + "/reset_prefix_cache", {})) or {}).get("success") is False:
                    raise EngineError(
                        f"the server at {self.url} did not empty its prefix cache, which holds what the old weights"
                        " computed: somebody else's requests are under way there. Give this stage a server of its own,"
                        " or start it with --no-enable-prefix-caching"
                    )
            elif self.api == "transformers":
                # forget the last version; the new directory is loaded by the next request
                patiently(lambda: self._call(self.root + "/reset", {}))
            else:
                raise EngineError(
                    f"the server at {self.url} cannot be given new weights, so a policy cannot be trained with its"
                    " samples; use `vllm serve` with VLLM_SERVER_DEV_MODE=1, `transformers serve`, or engine=builtin"
                )
        except ServerError as error:
            raise EngineError(
                f"the server at {self.url} did not take the new weights ({error}). A vLLM server needs"
                " VLLM_SERVER_DEV_MODE=1 and the same file system as this stage."
            ) from error

    def sleep(self, keep_weights: bool = True) -> None:
        """The server's memory is its own."""

    def close(self) -> None:
        """Nothing is held between requests."""


def _read(answer: dict) -> dict:
    """What is read of an answer: servers say several times as much of each token."""
    choice, used = answer["choices"][0], answer.get("usage")
    kept = {name: choice[name] for name in ("text", "token_ids", "finish_reason", "stop_reason") if name in choice}
    if isinstance(choice.get("logprobs"), dict):
        kept["logprobs"] = {"token_logprobs": choice["logprobs"].get("token_logprobs")}
    return {
        "choices": [kept],
        "usage": {"prompt_tokens": used["prompt_tokens"]} if used and "prompt_tokens" in used else {},
    }
