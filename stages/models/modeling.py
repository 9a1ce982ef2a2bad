"""Models as the stages use them: loading, the backbone and the chunked LM head (reward heads:
stages/reward_models/reward_heads.py).

Shapes: ``N`` trained positions of a batch (flat), ``H`` hidden size, ``V`` vocabulary, ``B`` rows, ``T`` padded length.

Only trained positions reach the LM head (:func:`token_logps`), in chunks over tokens, so memory does not grow with
vocabulary x length. Log-probabilities are always float32 (catalogue section 0, "Token log-probs").
"""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from stages.batching import (
    Batch,
    Cost,
    Padded,
    choose_form,
    collate,
    make_item,
    pad,
    padded_size,
    segments_of,
    together,
)
from stages.chat import Renderer
from stages.models import adapters, balance, dropout, experts, frozen, fused, lean, pending, quantised, sharding
from stages.models.layers import logit_scaling, rope_limit, windows_of
from stages.models.memory import HEAD_CHUNK_ON_GPU, HEAD_KEEP_BYTES_ON_GPU, HEAD_KEEP_ELEMENTS
from stages.models.products import linear
from stages.models.tensor_files import TensorFiles, writer_of
from stages.running import ranks

#: Elements of logits computed at a time by the head (a few MiB, so that they stay in a CPU's cache; HEAD_CHUNK_ON_GPU
#: on a GPU). Like those kept for backward (HEAD_KEEP_ELEMENTS) fixed, so that peak memory is flat in vocabulary size.
HEAD_CHUNK_ELEMENTS = 1 << 20


class ModelError(ValueError):
    """A model cannot be used as asked; the message says what to do instead."""


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout and every noise on what experts are given to 0, whatever their modules call it, so that policy
    equals reference at step 0.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (
                "dropout" in name or name in ("jitter_noise", "input_jitter_noise", "moe_jitter_eps")
            ):
                setattr(module, name, 0.0)


def load_policy(path: str, device: str = "cpu", dtype: torch.dtype = torch.float32, in_shards: bool = False):
    """Causal LM from a model directory or hub id: float32 master weights by default, SDPA attention, dropout off.

    Args:
        in_shards: leave the weights in their files until the model is sharded (:mod:`stages.models.pending`), where
            that can be done.

    Raises:
        ModelError: the directory holds no causal LM.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        # one with tied embeddings would load without its head
        for kind in AutoConfig.from_pretrained(path).architectures or ():
            if kind.endswith(("ForSequenceClassification", "ForTokenClassification")):
                raise ValueError(f"it is a {kind}, whose head gives scores and no words")
        model = pending.load(AutoModelForCausalLM, path, device, in_shards, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} is not a causal language model that transformers can load ({error}). Give a directory "
            "with config.json, *.safetensors and tokenizer files, or a hub id that is reachable."
        ) from error
    disable_dropout(model)
    model.config.use_cache = False
    return model


def note_types(stage, path: str) -> None:
    """Say in the log where a model that is stored in half precision will be published in float32, or frozen weights are
    rounded.
    """
    from transformers import AutoConfig

    stored = str(getattr(AutoConfig.from_pretrained(path), "dtype", None) or "float32").removeprefix("torch.")
    if getattr(stage.config, "lora_rank", 0) and stage.config.frozen_dtype == "bfloat16" and stored != "bfloat16":
        stage.warn(
            "frozen_rounded",
            f"frozen_dtype=bfloat16 rounds the frozen matrices of a model that is stored as {stored} to 8 significant"
            " bits. The adapter is trained on the rounded model, which is also its own reference, and the published"
            " model is the rounded one with the adapter on top. Write frozen_dtype=auto where there is memory for them"
            " as they are.",
        )
    if getattr(stage.config, "lora_rank", 0) and stage.config.frozen_dtype in quantised.FORMS:
        stage.warn(
            "frozen_rounded",
            f"frozen_dtype={stage.config.frozen_dtype} rounds the frozen linear layers to 4 bits. The adapter is"
            " trained on the rounded model, which is also its own reference, and the published model is the rounded"
            " one with the adapter merged in, as it was validated, in save_dtype; adapter/ put on the model as it was"
            " gives other numbers. Write frozen_dtype=auto or bfloat16 where there is memory for it.",
        )
    if stored in ("bfloat16", "float16") and getattr(stage.config, "save_dtype", "float32") == "float32":
        stage.log(
            f"the input model is stored as {stored}; the new weights are published as they were computed, in float32,"
            f" which takes twice the space and keeps the small changes that {stored} rounds away. "
            + (
                "Write save_dtype=bfloat16"
                if hasattr(stage.config, "save_dtype")
                else f"Load them with dtype=torch.{stored}"
            )
            + " where that is enough"
        )


def load_frozen(path: str, device: str = "cpu", how: str = "auto", in_shards: bool = False):
    """:func:`load_policy` of a model that is never trained and never moves, its matrices kept as ``how``
    (``frozen_dtype``) says; its products stay float32 (or autocast's).
    """
    return settled(
        freeze(load_policy(path, device, in_shards=in_shards or frozen.may_keep(path, how))),
        path,
        device,
        how,
        in_shards,
    )


def settled(model, path: str, device: str, how: str, in_shards: bool):
    """A model whose trained part is known, with its frozen matrices kept as ``how`` says, and its weights read unless
    it will be sharded.
    """
    if frozen.may_keep(path, how):
        frozen.keep(model, how)
    return model if in_shards else pending.fill(model).to(device)


def waits(config, path: str) -> bool:
    """Whether the weights of a model that is to be trained stay in their files at first: where it will be sharded, or
    an adapter leaves them frozen that may be kept in bfloat16. Not those of DoRA, whose magnitudes are read off them.
    """
    return not (config.lora_rank and config.lora_dora) and (
        sharding.asked(config) or bool(config.lora_rank) and frozen.may_keep(path, config.frozen_dtype)
    )


def adapted(model, stage, path: str, add: Callable):
    """A loaded model (:func:`waits`) with the adapter that ``add(model)`` puts on it, if any, and what that leaves
    frozen kept as ``frozen_dtype`` says.
    """
    config = stage.config
    if not config.lora_rank:
        return add(model)
    if config.lora_dora and config.frozen_dtype == "bfloat16":  # magnitudes of the weights as they will be
        frozen.widen(frozen.keep(freeze(model), "bfloat16"))
    return settled(add(model), path, stage.device, config.frozen_dtype, sharding.asked(config))


def policy_to_train(stage):
    """The stage's input policy, ready to train: with the LoRA adapter its config asks for, and what that leaves frozen
    kept as ``frozen_dtype`` says.
    """
    config, path = stage.config, stage.path("model")
    model = load_policy(path, stage.device, in_shards=waits(config, path))
    note_types(stage, path)
    return adapted(model, stage, path, lambda model: adapters.add_lora(model, config, stage.seed_for("lora")))


def save_policy(
    model,
    tokenizer,
    directory: str | Path,
    base: str | None = None,
    dtype: torch.dtype | None = None,
    trains_on: bool = False,
) -> None:
    """Write a Hugging Face model directory (safetensors, tokenizer, chat template, generation config). Rank 0 writes;
    every rank must call.

    A LoRA adapter is merged in (the wrapped model is used up) and written beside it under ``adapter/``; ``base`` is the
    name of the model it was trained on. A sharded model may be used up too. ``dtype``, ``trains_on``: see
    :func:`save_weights`.
    """
    adapters.save_adapter(model, directory, base)
    plain = pending.plain(model)
    plain.config.use_cache = True
    save_weights(model, directory, dtype, trains_on)
    plain.config.use_cache = False
    if ranks.rank() == 0:
        tokenizer.save_pretrained(directory)
        stopping_where_turns_end(plain.generation_config, tokenizer).save_pretrained(directory)


def stopping_where_turns_end(generation_config, tokenizer):
    """The generation config with every token that ends an assistant turn among its ``eos_token_id``, so that other
    tools stop there, too: a base model's config names the end of a document only."""
    if not tokenizer.chat_template:
        return generation_config
    stops, given = Renderer(tokenizer, generation_config).stop_ids, generation_config.eos_token_id
    if stops > ({given} if isinstance(given, int) else set(given or ())):
        generation_config = copy.deepcopy(generation_config)
        generation_config.eos_token_id = sorted(stops)
    return generation_config


def save_weights(model, directory: str | Path, dtype: torch.dtype | None = None, trains_on: bool = False) -> None:
    """Weights and config of the plain model, an adapter merged in, as ``save_pretrained`` writes them: of a sharded
    model, or one that is kept in bfloat16, one tensor after the other. Rank 0 writes; every rank must call. The model
    is used up.

    Args:
        dtype: what the weights are rounded to as they are written (None: as they were computed, which is float32 for
            those only kept in bfloat16); an adapter is merged in float32.
        trains_on: the model is not used up. Raises ValueError for a sharded one whose library stores weights under
            other names.
    """
    changed = frozen.is_kept(model) or dtype not in (None, torch.float32)
    if (sharding.root_of(model) is not None or changed or trains_on and adapters.is_adapted(model)) and pending.write(
        model, directory, dtype=dtype
    ):
        return
    if trains_on and sharding.root_of(model) is not None:
        raise ValueError(
            f"the library stores the weights of {type(pending.plain(model)).__name__} under other names, so that a"
            " sharded one can be written at the end only; write sharding=none, or leave publish_epochs out"
        )
    if trains_on and (changed or adapters.is_adapted(model)):
        model = copy.deepcopy(model)
    sharding.collect(model)
    if ranks.rank() == 0:
        frozen.widen(model)
        plain = model.merge_and_unload() if adapters.is_adapted(model) else model
        (plain if dtype is None else plain.to(dtype)).save_pretrained(directory, safe_serialization=True)


def publish(stage, model, tokenizer, epochs=None) -> None:
    """Write a stage's trained policy as its output, in the stage's ``save_dtype``; every rank must call. ``epochs``:
    what :func:`stages.training.fit` was given (:class:`stages.models.epochs.Epochs`).
    """
    dtype = save_type(stage, model)
    with stage.output_model("model", role="policy") as directory:
        save_policy(model, tokenizer, directory, base=stage.inputs["model"].ref, dtype=dtype)
    if epochs is not None:
        epochs.conclude()


def save_type(stage, model) -> torch.dtype | None:
    """The type that ``save_dtype`` asks for, None for float32; says what rounding to it costs. Every rank must call."""
    if stage.config.save_dtype == "float32":
        return None
    dtype = getattr(torch, stage.config.save_dtype)
    share = adapters.rounding(model, dtype)
    stage.warn(
        "rounded_weights",
        f"save_dtype={stage.config.save_dtype}: the published weights are rounded to {stage.config.save_dtype}; the"
        " validation numbers of this stage are of the weights before. "
        + (
            ""
            if share is None
            else f"Rounding moves the adapted matrices by {share:.1%} of what the adapter moved them. "
        )
        + "Write save_dtype=float32 to keep them as they were computed"
        + (", or load adapter/ on its base." if share is not None else "."),
    )
    return dtype


def freeze(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.eval()


def is_lean(model) -> bool:
    """Whether our own forward computes this model (:mod:`stages.models.lean`); decided at first use, see
    ``lean.why_not``.
    """
    known = vars(model).get("_posttrain_lean")  # not what is known of the model inside an adapter
    if known is None:
        known = model._posttrain_lean = lean.why_not(model) is None
    return known


def hidden_states(model, batch: Batch, at_N=None, noise_UH=None) -> torch.Tensor:
    """Last hidden states of a decoder, ``[N, H]`` at the flat positions ``at_N``, or of all tokens ``[U, H]``.
    ``noise_UH`` is added to the tokens' embeddings.

    Without padding through :mod:`stages.models.lean` where it knows the architecture, else through the model's own
    forward over padded rows: padding comes after every real token, so it cannot be seen by one.
    """
    if isinstance(model, adapters.AdapterOff):
        with adapters.switched_off(model.model):
            return hidden_states(model.model, batch, at_N, noise_UH)
    _check_rope(model, batch.segments)
    watch, places = balance.watched(model), dropout.active(model)
    if is_lean(model):
        kind = batch.ids_U.device.type
        low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        with torch.autocast(kind, enabled=False):
            return lean.states(
                model,
                batch.ids_U,
                batch.positions_U,
                batch.segments,
                at_N,
                low,
                recompute=model.training and getattr(lean.core_of(model).layers[0], "gradient_checkpointing", False),
                noise_UH=noise_UH,
                watch=watch,
                weights_U=None if watch is None else balance.weights_of(batch),
                keys_U=None if places is None else places.of(batch),
            )
    rows = pad(batch, form_for(model, batch.segments))
    if places is not None:
        places.in_rows(batch, rows)
    return _padded_states(
        lean.core_of(model),
        rows,
        at_N,
        noise_UH,
        (
            None
            if watch is None
            else lambda out: watch.tell(
                [
                    experts.routed(logits.flatten(0, -2)[rows.where_U], watch.k, balance.weights_of(batch))
                    for logits in out.router_logits
                ]
            )
        ),
    )


def _longest(segments) -> int:
    return max((prompt + max(responses, default=0) for prompt, responses in segments), default=0)


def _check_rope(model, segments) -> None:
    """Refuse a conversation past the length up to which a model has one rotary table."""
    limit = rope_limit(model.config.get_text_config())
    if limit is not None and (longest := _longest(segments)) > limit[1]:
        raise ModelError(
            f"{type(model).__name__} has {limit[0]} rotary embeddings, which past {limit[1]} tokens differ with the"
            f" longest row of a batch, and a row has {longest}: write a max_length (rl: prompt and completion together)"
            f" of at most {limit[1]}, or give the model's config a fixed rope_type such as yarn"
        )


def form_for(model, segments) -> str:
    """How a model's own forward is to compute items that share a prompt: ``tree`` (each prompt once, a mask between the
    answers) where that is cheaper and exact, else ``rows``."""
    return choose_form(segments) if shared_up_to(model) >= _longest(segments) else "rows"


def tokens_together(model) -> Cost:
    """What counts the tokens of a micro-batch as this model computes it: without padding by our own forward, else those
    of its padded rows. Every rank must call.
    """
    model = model.model if isinstance(model, adapters.AdapterOff) else model
    if getattr(model, "reads_both_ways", False):
        return lambda items: padded_size(segments_of(items), "rows")
    if not hasattr(model, "config") or is_lean(model):  # without a config it is no transformer (a preference module)
        return together
    if getattr(model, "_posttrain_shared", None) is None:
        sharding.run(model, lambda: shared_up_to(model))  # the trial reads weights

    def cost(items) -> int:
        segments = segments_of(items)
        return padded_size(segments, form_for(model, segments))

    return cost


def shared_up_to(model) -> float:
    """The longest conversation that the model's own forward computes rightly behind a mask of one's own (``tree``), in
    tokens; 0: none.

    A mask takes the place of a sliding or chunked one, so it holds within a window only; convolutions, state-space and
    linear attention layers read what stands before a token whatever a mask says; ALiBi counts places, not positions.
    What a model does is tried once, at its first use.
    """
    known = getattr(model, "_posttrain_shared", None)
    if known is None:
        windows = windows_of(model.config.get_text_config()).values()
        known = model._posttrain_shared = min(windows, default=float("inf")) if _reads_masks(model) else 0.0
    return known


def _reads_masks(model) -> bool:
    """Whether two answers to one prompt have the same hidden states side by side behind a mask as each by itself. Every
    rank must call.
    """
    core, device = lean.core_of(model), next(model.parameters()).device
    vocabulary = model.config.get_text_config().vocab_size
    # shorter than any window
    tokens = [[(7 * i + 3) % vocabulary for i in part] for part in (range(3), range(3, 5), range(5, 7))]
    batch = collate([make_item("probe", tokens[0], tokens[1:], [[1] * 2] * 2)], str(device))

    def states(form: str) -> torch.Tensor:
        return _padded_states(core, pad(batch, form))

    with torch.no_grad(), uncompiled(), torch.autocast(device.type, enabled=False):
        alone = states("rows")
        try:
            masked = states("tree")
        except (TypeError, ValueError, RuntimeError):  # it takes no such mask
            return False
    error = (masked.float() - alone.float()).norm() / alone.float().norm().clamp_min(1e-12)
    return bool(error < (1e-3 if alone.dtype in (torch.float32, torch.float64) else 3e-2))


def uncompiled():
    """Around trials of what a model does: under torch.compile (``forward=compiled``) too they run its code as it is,
    since graphs of a few tokens take as long to compile as those of training, and nothing uses them again.
    """
    # without torch._dynamo, whose import takes a second, nothing is compiled
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _padded_states(core, rows: Padded, at_N=None, noise_UH=None, tell=None) -> torch.Tensor:
    """Last hidden states of a backbone's own forward over padded rows, at the flat positions ``at_N`` or of all tokens.
    ``tell`` gets what it returns, router logits with it.

    Noise is added to what the embedding gives, by a hook, so that whatever else a model makes of its input ids stays;
    rows must not share a prompt then.
    """
    hook = None
    if noise_UH is not None:

        def noisy(module, given, embedded):
            flat = embedded.new_zeros(rows.ids_BT.numel(), embedded.shape[-1]).index_copy(
                0, rows.where_U, noise_UH.to(embedded.dtype)
            )
            return embedded + flat.view_as(embedded)

        hook = core.get_input_embeddings().register_forward_hook(noisy)
    try:
        found = core(
            input_ids=rows.ids_BT,
            position_ids=rows.positions_BT,
            attention_mask=rows.attention_B1TT,
            use_cache=False,
            **({} if tell is None else {"output_router_logits": True}),
        )
    finally:
        if hook is not None:
            hook.remove()
    if tell is not None:
        tell(found)
    out = found.last_hidden_state.flatten(0, 1)
    return out[rows.where_U if at_N is None else rows.where_U[at_N]]


def precise(x: torch.Tensor) -> torch.Tensor:
    """float32 or better: half types are widened, float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True)
class Head:
    """The LM head as data: ``logits = cap(scale * (hidden @ weight.T + bias))``. ``dtype``: of its products outside
    autocast, where the weight is only kept in another one.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    scale: float = 1.0
    softcap: float | None = None
    dtype: torch.dtype | None = None

    @property
    def low(self) -> torch.dtype:
        return self.dtype or self.weight.dtype

    def widened(self) -> Head:
        """The head with its weight in the type of its products, for several of them."""
        return self if self.weight.dtype == self.low else replace(self, weight=self.weight.to(self.low))

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        out = linear(hidden_NH, self.weight, self.bias)
        if self.scale != 1.0:
            out = out * self.scale
        if self.softcap:
            out = self.softcap * torch.tanh(out / self.softcap)
        return out


def head_of(model) -> Head:
    """The model's LM head with its architecture's scaling, checked once against the model's own forward.

    Raises:
        ModelError: the architecture post-processes logits in a way this head does not know.
    """
    if isinstance(model, adapters.AdapterOff):
        with adapters.switched_off(model.model):
            return head_of(model.model)
    cached = getattr(model, "_posttrain_head", None)
    if cached is not None:
        scale, softcap = cached
    else:
        scale, softcap = logit_scaling(model.config.get_text_config())
    output = model.get_output_embeddings()
    weight = adapters.output_weight(output)
    head = Head(
        weight,
        getattr(output, "bias", None),
        scale,
        softcap,
        torch.float32 if frozen.is_kept(model) and weight.dtype == frozen.LOW else None,
    )
    if cached is None:
        ids = torch.arange(4, device=head.weight.device).remainder(head.weight.shape[0])[None]
        # in bfloat16 the two round differently
        with torch.no_grad(), uncompiled(), balance.unwatched(model), torch.autocast(ids.device.type, enabled=False):
            positions = torch.arange(4, device=ids.device)[None]
            ours = (
                head.widened()
                .logits(
                    hidden_states(model, collate([make_item("probe", [], [ids[0].tolist()], [[0] * 4])], ids.device))
                )
                .float()
            )
            theirs = model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()
        if not torch.isfinite(theirs).all():
            bad = [name for name, weight in pending.plain(model).named_parameters() if not torch.isfinite(weight).all()]
            raise ModelError(
                f"The model's weights hold NaN or infinity ({len(bad)} tensors, the first is {bad[0]}), so it can"
                " neither answer nor be trained; copy or download it again, or take an earlier checkpoint."
                if bad
                else (
                    f"{type(model).__name__} gives logits that are no finite numbers although its weights are; load it"
                    " in float32, or report this with the model's architecture."
                )
            )
        if not torch.allclose(ours, theirs, atol=1e-3, rtol=1e-3):
            raise ModelError(
                f"{type(model).__name__} changes its logits after the LM head in a way that is not supported; "
                "use a Llama-, Qwen-, Mistral-, Gemma-, Granite-, Cohere- or GPT-2-class model."
            )
        model._posttrain_head = (scale, softcap)
    return head


class _ChunkedLogps(torch.autograd.Function):
    """log softmax(logits / temperature)[target], entropy and mean over the vocabulary, per token, chunk by chunk.

    The first ``HEAD_KEEP_ELEMENTS`` log-probabilities are kept for backward, the others are computed again there.
    """

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, targets, temperature, scale, softcap, want_entropy, low, hits, want_mean=False
    ):
        n, wide = hidden.shape[0], torch.float64 if hidden.dtype == torch.float64 else torch.float32
        head = Head(weight.to(low), None if bias is None else bias.to(low), scale, softcap)
        logps = hidden.new_empty(n, dtype=wide)
        entropies = hidden.new_zeros(n if want_entropy else 0, dtype=wide)
        means = hidden.new_zeros(n if want_mean else 0, dtype=wide)
        chunks = head_chunks(n, weight)
        keep = HEAD_KEEP_ELEMENTS // weight.shape[0] if any(ctx.needs_input_grad) and not softcap else 0
        kept = []
        for rows in chunks:
            z = precise(head.logits(hidden[rows].to(low)))
            logp = torch.log_softmax(z if temperature == 1.0 else z / temperature, dim=-1)
            logps[rows] = logp.gather(1, targets[rows, None])[:, 0]
            if hits is not None:
                hits[rows] = logps[rows] >= logp.amax(-1)
            if want_entropy:
                entropies[rows] = -logp.exp().mul_(logp).sum(-1)
            if want_mean:
                means[rows] = logp.mean(-1)
            if rows.stop <= keep:
                kept.append(logp)
        ctx.save_for_backward(hidden, weight, bias, targets, entropies, *kept)
        ctx.settings = (temperature, scale, softcap, low, chunks)
        # an entropy that is only logged has no gradient, and costs nothing in backward
        ctx.set_materialize_grads(False)
        return logps, entropies, means

    @staticmethod
    def backward(ctx, grad_logps, grad_entropies, grad_means):
        hidden, weight, bias, targets, entropies, *kept = ctx.saved_tensors
        temperature, scale, softcap, low, chunks = ctx.settings
        if grad_logps is None:
            grad_logps = entropies.new_zeros(len(hidden))
        weight_low, bias_low = weight.to(low), None if bias is None else bias.to(low)
        grad_hidden = torch.empty_like(hidden)
        wide = grad_logps.dtype
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and ctx.needs_input_grad[2] else None
        for i, rows in enumerate(chunks):
            capped, h = None, hidden[rows].to(low)
            if i < len(kept):
                logp = kept[i]
            else:
                z = precise(linear(h, weight_low, bias_low)) * scale
                if softcap:
                    capped = torch.tanh(z / softcap)
                    z = softcap * capped
                logp = torch.log_softmax(z if temperature == 1.0 else z / temperature, dim=-1)
            g = grad_logps[rows, None]
            p = logp.exp()
            if grad_entropies is not None:  # d entropy / d z_v = -p_v (log p_v + entropy)
                dz = -g * p - grad_entropies[rows, None] * p * (logp + entropies[rows, None])
            else:
                dz = p.mul_(-g)
            dz.scatter_add_(1, targets[rows, None], g)
            if grad_means is not None:  # d mean / d z_v = 1/V - p_v
                dz += grad_means[rows, None] * (1.0 / logp.shape[1] - logp.exp())
            factor = scale / temperature
            if factor != 1.0:
                dz = dz * factor
            if capped is not None:
                dz = dz * (1.0 - capped * capped)
            if grad_bias is not None:
                grad_bias += dz.sum(0)
            dz = dz.to(low)
            grad_hidden[rows] = dz @ weight_low
            if grad_weight is not None:
                grad_weight.addmm_(dz.t(), h) if low == wide else grad_weight.add_(dz.t() @ h)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 8,
        )


class _FusedLogps(torch.autograd.Function):
    """The same on a GPU: one kernel (``stages.models.fused``) reads the logits of a chunk once. The logits of the first
    chunks, ``HEAD_KEEP_BYTES_ON_GPU`` of them, are kept for backward. All chunks have one length, for which
    :func:`lean.filled` takes few.
    """

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, targets, temperature, scale, softcap, want_entropy, low, hits, want_mean=False
    ):
        n, most = len(hidden), max(1, HEAD_CHUNK_ON_GPU // len(weight))
        size = len(lean.filled(targets[: -(-n // max(1, -(-n // most)))]))
        whole = -(-n // max(1, size)) * size
        weight_low, bias_low = weight.to(low), None if bias is None else bias.to(low)
        filled, aims = lean.filled(hidden.to(low), whole), lean.filled(targets, whole)
        logps, sums = (hidden.new_empty(whole, dtype=torch.float32) for _ in range(2))
        entropies, means = (logps.new_zeros(whole if wanted else 0) for wanted in (want_entropy, want_mean))
        all_hits = None if hits is None else torch.empty(whole, dtype=torch.bool, device=hidden.device)
        keep = HEAD_KEEP_BYTES_ON_GPU // (len(weight) * weight_low.element_size()) if any(ctx.needs_input_grad) else 0
        kept, chunks = [], [slice(i, i + size) for i in range(0, whole, max(1, size))]
        for rows in chunks:
            z = linear(filled[rows], weight_low, bias_low)
            places = (None if t is None else t[rows] for t in (entropies, means, all_hits))
            sums[rows] = fused.logps(z, aims[rows], logps[rows], *places, temperature, scale, softcap)
            if rows.stop <= keep:
                kept.append(z)
        if hits is not None:
            hits.copy_(all_hits[:n])
        ctx.save_for_backward(hidden, weight, bias, aims, sums, entropies, *kept)
        ctx.settings = temperature, scale, softcap, low, chunks
        ctx.set_materialize_grads(False)
        return logps[:n], entropies[:n], means[:n]

    @staticmethod
    def backward(ctx, grad_logps, grad_entropies, grad_means):
        hidden, weight, bias, aims, sums, entropies, *kept = ctx.saved_tensors
        temperature, scale, softcap, low, chunks = ctx.settings
        weight_low, bias_low = weight.to(low), None if bias is None else bias.to(low)
        filled = lean.filled(hidden.to(low), len(aims))
        if grad_logps is None:
            grad_logps = sums.new_zeros(len(hidden))
        grads = [lean.filled(g, len(aims)) for g in (grad_logps, grad_entropies, grad_means)]
        grad_hidden = torch.empty_like(filled, dtype=hidden.dtype)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = (
            torch.zeros_like(bias, dtype=torch.float32) if bias is not None and ctx.needs_input_grad[2] else None
        )
        for i, rows in enumerate(chunks):
            z = kept[i] if i < len(kept) else linear(filled[rows], weight_low, bias_low)
            mine = (None if g is None else g[rows] for g in grads)
            dz = fused.logps_back(z, aims[rows], sums[rows], entropies[rows], *mine, temperature, scale, softcap)
            grad_hidden[rows] = dz @ weight_low
            if grad_bias is not None:
                grad_bias += dz.sum(0, dtype=torch.float32)
            if grad_weight is not None:
                grad_weight.addmm_(dz.t(), filled[rows]) if low == torch.float32 else grad_weight.add_(
                    dz.t() @ filled[rows]
                )
        return (
            grad_hidden[: len(hidden)],
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 8,
        )


def head_chunks(n: int, weight, times: int = 1) -> list[slice]:
    """Slices of ``n`` positions whose logits are computed at a time; ``times``: as many times fewer, where more is made
    of them.
    """
    elements = HEAD_CHUNK_ELEMENTS if weight.device.type == "cpu" else HEAD_CHUNK_ON_GPU
    size = max(1, elements // (times * weight.shape[0]))
    return [slice(i, min(n, i + size)) for i in range(0, n, size)]


def logps_of(hidden_NH, head: Head):
    """Who computes a head's log-probabilities of these hidden states."""
    return _FusedLogps if fused.on(hidden_NH, head.weight) else _ChunkedLogps


def token_logps(head: Head, hidden_NH, targets_N, temperature: float = 1.0, entropy: bool = False, hits=None):
    """Log-probability of each target token, float32 ``[N]``, and the distribution's entropy ``[N]`` (nats) if asked
    for.

    Differentiable in ``hidden``, weight and bias; memory is bounded by ``HEAD_CHUNK_ELEMENTS`` and
    ``HEAD_KEEP_ELEMENTS`` whatever V is. Under autocast the products run in its type. ``hits``, a bool tensor ``[N]``,
    is told where the target is the likeliest token.
    """
    kind = hidden_NH.device.type
    low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.low
    with torch.autocast(kind, enabled=False):
        logps, entropies, _ = logps_of(hidden_NH, head).apply(
            hidden_NH,
            head.weight,
            head.bias,
            targets_N,
            float(temperature),
            head.scale,
            head.softcap,
            entropy,
            low,
            hits,
        )
    return logps, (entropies if entropy else None)


def token_and_mean_logps(head: Head, hidden_NH, targets_N, hits=None):
    """:func:`token_logps` and the mean log-probability over all V tokens of the head, each ``[N]``, from the same pass;
    differentiable (label smoothing).
    """
    kind = hidden_NH.device.type
    low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.low
    with torch.autocast(kind, enabled=False):
        logps, _, means = logps_of(hidden_NH, head).apply(
            hidden_NH, head.weight, head.bias, targets_N, 1.0, head.scale, head.softcap, False, low, hits, True
        )
    return logps, means


def target_logps(model, batch, temperature: float = 1.0, entropy: bool = False, hits=None):
    """:func:`token_logps` of a batch's trained positions: (log-probs ``[N]``, entropies ``[N]`` or None)."""
    return token_logps(
        head_of(model), hidden_states(model, batch, batch.src_N), batch.target_N, temperature, entropy, hits
    )


@torch.no_grad()
def log_collision(head: Head, hidden_NH, temperature: float = 1.0):
    """log of the sum of squared probabilities over the vocabulary per position ``[N]``, nats, at a temperature: how
    likely two draws are to agree; 0 where one token is certain. Chunk by chunk.
    """
    parts = [
        torch.log_softmax(precise(head.logits(hidden_NH[rows])) / temperature, -1).mul_(2).logsumexp(-1)
        for rows in head_chunks(len(hidden_NH), head.weight)
    ]
    return torch.cat(parts) if parts else hidden_NH.new_zeros(0)


class _ChunkedColumns(torch.autograd.Function):
    """log softmax(logits / temperature) at K given tokens per position and, if asked for, log of the mass of all
    others, chunk by chunk.

    Nothing of size V is kept: chunks are computed again in backward.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, columns, scale, softcap, temperature, want_rest, low):
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logps = hidden.new_empty(columns.shape, dtype=wide)
        rest = hidden.new_zeros(columns.shape[0] if want_rest else 0, dtype=wide)
        head = Head(weight.to(low), None if bias is None else bias.to(low), scale, softcap)
        for rows in head_chunks(len(hidden), weight):
            logp, _ = _ChunkedColumns._logs(head, hidden[rows], temperature)
            logps[rows] = logp.gather(1, columns[rows])
            if want_rest:
                rest[rows] = logp.scatter_(1, columns[rows], -torch.inf).logsumexp(-1)
        ctx.save_for_backward(hidden, weight, bias, columns, rest)
        ctx.settings = scale, softcap, temperature, want_rest, low
        return logps, rest

    @staticmethod
    def _logs(head, hidden, temperature):
        """(log-probs, logits after scale and softcap) of a chunk."""
        z = precise(head.logits(hidden.to(head.weight.dtype)))
        return torch.log_softmax(z if temperature == 1.0 else z / temperature, dim=-1), z

    @staticmethod
    def backward(ctx, grad_logps, grad_rest):
        hidden, weight, bias, columns, rest = ctx.saved_tensors
        scale, softcap, temperature, want_rest, low = ctx.settings
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=grad_logps.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = (
            torch.zeros_like(bias, dtype=grad_logps.dtype) if bias is not None and ctx.needs_input_grad[2] else None
        )
        head = Head(weight.to(low), None if bias is None else bias.to(low), scale, softcap)
        for rows in head_chunks(len(hidden), weight):
            logp, z = _ChunkedColumns._logs(head, hidden[rows], temperature)
            g = grad_logps[rows]
            total = g.sum(-1, keepdim=True)
            # d rest / d z_v = p_v / mass of the rest for v in the rest, minus p_v; without a rest there is nothing to
            # move
            if want_rest:
                g_rest = torch.where(rest[rows].isfinite(), grad_rest[rows], 0.0)[:, None]
                others = (
                    (logp - rest[rows].nan_to_num(neginf=0.0)[:, None])
                    .exp()
                    .scatter_(1, columns[rows], 0.0)
                    .mul_(g_rest)
                )
                dz = others - logp.exp_() * (total + g_rest)
            else:
                dz = logp.exp_().mul_(-total)
            dz.scatter_add_(1, columns[rows], g)
            dz *= scale / temperature
            if softcap:
                dz *= 1.0 - (z / softcap) ** 2
            if grad_bias is not None:
                grad_bias += dz.sum(0)
            dz = dz.to(low)
            grad_hidden[rows] = (dz @ head.weight).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += dz.t() @ hidden[rows].to(low)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 6,
        )


def column_logps(head: Head, hidden_NH, columns_NK, temperature: float = 1.0, rest: bool = False):
    """Log-probabilities ``[N, K]`` (float32 or better, nats) of K tokens per position, and log of the mass of all other
    tokens ``[N]`` where ``rest`` (-inf where there are none), else None.

    Differentiable in ``hidden``, weight and bias; memory is bounded by ``HEAD_CHUNK_ELEMENTS`` and N x K whatever V is.
    With ``rest`` the tokens of a position must differ from each other.
    """
    kind = hidden_NH.device.type
    low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.low
    with torch.autocast(kind, enabled=False):
        logps, others = _ChunkedColumns.apply(
            hidden_NH, head.weight, head.bias, columns_NK, head.scale, head.softcap, float(temperature), rest, low
        )
    return logps, (others if rest else None)


@torch.no_grad()
def top_logps(head: Head, hidden_NH, k: int, temperature: float = 1.0):
    """The k most likely tokens per position, best first: (ids ``[N, k]``, log-probs ``[N, k]``, log of the mass of all
    others ``[N]``).

    k is at most the vocabulary, whose rest is -inf. Computed chunk by chunk.
    """
    k, head = min(k, head.weight.shape[0]), head.widened()
    parts = []
    for rows in head_chunks(len(hidden_NH), head.weight):
        logp = torch.log_softmax(precise(head.logits(hidden_NH[rows])) / temperature, -1)
        best, ids = logp.topk(k, -1)
        parts.append((ids, best, logp.scatter_(1, ids, -torch.inf).logsumexp(-1)))
    return tuple(map(torch.cat, zip(*parts)))


# -- weights of models that follow another ----------------------------------------------------------------------------


@torch.no_grad()
def move_towards(model, policy, keep: float) -> None:
    """In place: model <- keep * model + (1 - keep) * policy (``da.reference``, REF-POLICY); the policy's adapter counts
    as merged. Every rank must call where the policy is sharded."""
    own = dict(model.named_parameters())
    for name, value in adapters.plain_parameters(policy):
        if name in own:  # a value head on the policy is not part of the reference
            own[name].copy_(value) if keep == 0.0 else own[name].mul_(keep).add_(value, alpha=1.0 - keep)


def follower(path: str, device: str, policy, config, starts_there: bool) -> nn.Module:
    """A frozen float32 model that will follow ``policy`` (:func:`move_towards`), as it is at ``path``; where the policy
    ``starts_there``, as the policy keeps it: ``frozen_dtype`` rounds what lies under an adapter. Every rank must call
    where the policy is sharded."""
    model = freeze(load_policy(path, device))
    if starts_there and config.lora_rank and config.frozen_dtype not in ("auto", "float32"):
        move_towards(model, policy, keep=0.0)
    return model


def weights_file(model) -> Callable[[Path], None]:
    """What writes a model's parameters into a checkpoint."""
    return writer_of(dict(model.named_parameters()))


def load_weights(model, path: Path) -> None:
    """Put what :func:`weights_file` wrote back."""
    stored = TensorFiles([path])
    for name, parameter in model.named_parameters():
        stored.into(name, parameter)


def weights_digest(model) -> str:
    """Hash of a model's parameters, of this rank's rows where it is sharded (ops.invariants)."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(
            memoryview(sharding.local(parameter.detach()).cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        )
    return digest.hexdigest()
