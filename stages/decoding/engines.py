"""Sampling engines behind one interface: this process, vLLM, or a server (``engine=builtin|vllm|server``).

:class:`Engine` is the contract; ``tests/sampler/contract.py`` holds every engine to it. :func:`make_engine` builds the
one that a stage's :class:`~stages.settings.SamplingConfig` names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from stages.decoding.sampler import Completion, Sampler
from stages.decoding.sampling import SamplingParams


class EngineError(RuntimeError):
    """An engine that cannot be used or does not answer; the text says what to change."""


class Engine(Protocol):
    """Draws completions of token-id prompts. What every engine promises:

    * ``generate(prompts, params, seeds)`` returns ``len(seeds[i])`` completions of prompt i, in the order of prompts
      and seeds. One prompt with several seeds is one group; engines compute (or cache) its prompt once.
    * **Ids are the truth.** Prompts go in as ids; ``Completion.ids`` are the sampled ids verbatim, a stop id that ended
      the row included. An engine that can only be told and only returns text sets ``reencoded`` on every row, and fails
      a row whose prompt does not survive as text (``engine.reencodes``).
    * ``text`` is derived from the ids by one function for all engines: without stop id and special tokens, cut before
      the first stop string, wherever token borders lie.
    * ``finish_reason``: "eos" (the last id is one of ``params.stop_ids``, and no other id is), "stop" (the text of the
      ids holds a stop string), "length" (exactly ``max_new_tokens`` ids), or "error".
    * **Seeds**: a row's tokens are a function of (weights, prompt, its seed, params) up to the rounding of batched
      products, so the same request gives the same rows again and rows do not depend on their neighbours. Which function
      it is, is the engine's own.
    * ``logps`` are natural log-probs of the distribution that was really sampled (bans, biases, penalties, temperature
      and filters applied and renormalised; of temperature 1 where greedy), one per id, or None. Only with
      ``exact_logps`` do they equal the trainer's to float32 rounding; otherwise RL computes old log-probs with the
      trainer and keeps these beside them (TIS).
    * A killed stage continues at its last complete unit with every engine, and does not ask a server again for what it
      answered (``stages.running.journal``); that it ends with the same *bytes* holds for the built-in one, and for others
      as far as they repeat themselves.
    * Settings an engine cannot honour are refused before anything is sampled (SamplerError), never ignored.
    * **Errors per row**: what fails on one row is tried once more and then returned as an "error" row with the reason,
      without ids; EngineError is raised only if every row failed.
    * ``update(directory, weights)``: sample from the weights of that Hugging Face directory from now on;
      ``engine.weights`` is then ``weights`` (it is "input" before). ``shares_weights`` engines read the trainer's own
      parameters and need none.
    * An engine may have ``holds``, the type in which it holds weights (values are given to it in that), ``copies``:
      nothing reads the directory after ``update``, and ``takes_processors=False``: it refuses ``logit_processors``.
    * ``sleep(keep_weights)`` frees device memory between calls; the next ``generate`` (or ``update``) wakes the engine.
      After ``keep_weights=False`` only ``update`` does.
    """

    name: str
    exact_logps: bool
    shares_weights: bool
    reencodes: bool
    weights: str

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        seeds: Sequence[Sequence[int]],
        progress: Callable[[int, int], None] | None = None,
    ) -> list[list[Completion]]: ...

    def update(self, directory: str, weights: str) -> None: ...

    def sleep(self, keep_weights: bool = True) -> None: ...

    def close(self) -> None: ...


def make_engine(stage, renderer, model=None, *, sleeps: bool = False, role: str = "model") -> Engine:
    """The engine that ``stage.config`` asks for, over the model input ``role``.

    model: the loaded policy, or a function that loads it; only the built-in engine needs it, and loads it itself where
    none is given. sleeps: the engine shall be able to give its device memory back between calls.
    """
    config, path = stage.config, stage.path(role)
    if config.engine == "builtin":
        dtype = getattr(torch, config.sampling_dtype)
        if model is None:
            from stages.models.modeling import freeze, load_frozen, load_policy

            model = (
                load_frozen(path, stage.device)
                if dtype == torch.float32
                else freeze(load_policy(path, stage.device, dtype))
            )
        return Sampler(
            model() if callable(model) and not isinstance(model, torch.nn.Module) else model,
            renderer.tokenizer,
            max_batch=config.generation_batch,
            dtype=dtype,
        )
    from stages.running import ranks

    together = ranks.world_size()
    if config.engine == "vllm":
        if together > 1:
            raise EngineError(
                f"engine=vllm with {together} devices: each of them would hold a vLLM of its own. Write engine=server,"
                " a `vllm serve` that all of them ask, or engine=builtin, or train on one device (vLLM takes more by"
                " engine_options={tensor_parallel_size: N})."
            )
        from stages.decoding.vllm_engine import VLLMEngine

        options = {**beside_training(stage, path, sleeps), **config.engine_options}
        engine = VLLMEngine(path, renderer.tokenizer, max_batch=config.generation_batch, options=options, sleeps=sleeps)
    else:
        from stages.decoding.server_engine import ServerEngine

        engine = ServerEngine(
            config.engine_url,
            renderer.tokenizer,
            path,
            model=config.engine_model,
            api=config.engine_api,
            key_variable=config.engine_key_variable,
            timeout_s=config.engine_timeout_s,
            concurrency=max(1, config.engine_concurrency // together),
        )
        if together > 1 and engine.api == "transformers":
            raise EngineError(
                f"`transformers serve` has one seed for all who ask, so {together} devices would change each other's"
                " completions; write devices=1, or use `vllm serve`."
            )
    stage.log(f"engine: {engine.name}")
    return engine


def beside_training(stage, path: str, sleeps: bool) -> dict:
    """vLLM's defaults of a stage that trains beside it (RL): room for the longest prompt and completion and no more,
    and the memory that training leaves. vLLM's own are the model's longest sequence, and nine tenths of the GPU."""
    from stages.models import memory
    from stages.running import cuda

    config = stage.config
    if stage.spec.roles is None or not hasattr(config, "longest_completion"):
        return {}
    longest, (_, positions) = config.max_prompt_length + config.longest_completion, vocabulary_of(path)
    found = {"max_model_len": min(longest, positions or longest)}
    if cuda.is_cuda(stage.device) and "gpu_memory_utilization" not in config.engine_options:
        need = memory.need(
            stage.spec.roles(config, set(stage.inputs)),
            {role: memory.shape_of(one.path) for role, one in stage.inputs.items() if one.kind == "model"},
            config,
            device=stage.device,
        )
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(torch.device(stage.device))
        share = memory.engine_share(
            free,
            total,
            sum(row["held"] for row in need.rows),
            need.states,
            max(need.caches.values(), default=0),
            sleeps,
        )
        stage.log(
            f"vLLM may take {share:.0%} of {memory.shown(total)} on the GPU, of which {memory.shown(free)} are free and"
            " training needs more; another share is engine_options={gpu_memory_utilization: SHARE}"
        )
        found["gpu_memory_utilization"] = share
    return found


def engine_label(config) -> str:
    """Name of the configured engine in protocols and lineage (without versions, which only a running engine knows)."""
    if config.engine == "builtin":
        return "built-in"
    return (
        config.engine if config.engine == "vllm" else f"server:{config.engine_model or 'default'}:{config.engine_api}"
    )


def refuse_all_failed(found: list[Completion], name: str) -> None:
    """Raise EngineError where not one row of a request succeeded: that is the engine's failure, not the rows'."""
    if found and all(c.finish_reason == "error" for c in found):
        raise EngineError(f"{name} failed on all {len(found)} completions. The first one: {found[0].error}")


def vocabulary_of(path: str) -> tuple[int, int | None]:
    """(number of token ids, longest sequence or None) of a model directory, without loading its weights."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path).get_text_config(decoder=True)
    return config.vocab_size, getattr(config, "max_position_embeddings", None)


def memory_disk(name: str, size: int) -> Path | None:
    """A directory of this user in the machine's memory (/dev/shm) for ``size`` bytes, twice which must be free there;
    None where there is none. What a killed process left under the same ``name`` is removed."""
    import hashlib
    import os
    import shutil

    root = Path("/dev/shm")
    found = root / f"posttrain-{os.getuid()}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    shutil.rmtree(found, ignore_errors=True)
    if not os.access(root, os.W_OK) or shutil.disk_usage(root).free < 2 * size:
        return None
    found.mkdir(mode=0o700)
    return found


def write_weights(model, tokenizer, directory: str | Path, dtype: torch.dtype | None = None) -> None:
    """A Hugging Face directory of the policy as it is now, the model left as it is: how engines in other processes get
    new weights. Rank 0 writes; every rank must call where the model is sharded. dtype: what the engine will make of the
    values, so that no more is written (None: as they are)."""
    import copy

    from safetensors.torch import save_file

    from stages.decoding.decoders import bare
    from stages.models.adapters import plain_parameters
    from stages.running import ranks

    base, directory, first = bare(model), Path(directory), ranks.rank() == 0
    values = {
        name: value.detach().to(dtype or value.dtype).cpu().contiguous() if first else None
        for name, value in plain_parameters(model)
    }
    if not first:
        return
    directory.mkdir(parents=True, exist_ok=True)
    save_file(values, directory / "model.safetensors", metadata={"format": "pt"})
    config = copy.deepcopy(base.config)
    config.use_cache, config.architectures = True, [type(base).__name__]
    config.dtype = dtype or config.dtype
    config.save_pretrained(directory)
    base.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
