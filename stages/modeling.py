"""Models as the stages use them: loading, the backbone and the chunked LM head (reward heads: stages/reward_heads.py).

Shapes: ``N`` trained positions of a batch (flat), ``H`` hidden size, ``V`` vocabulary, ``B`` rows, ``T`` padded length.

Only trained positions reach the LM head (:func:`token_logps`), in chunks over tokens, so memory does not grow with
vocabulary x length. Log-probabilities are always float32 (catalogue section 0, "Token log-probs").
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

#: Elements of logits held at a time by the head (fixed, so peak memory is flat in vocabulary size).
HEAD_CHUNK_ELEMENTS = 1 << 23


class ModelError(ValueError):
    """A model cannot be used as asked; the message says what to do instead."""


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout to 0, in modules and in the config, so that policy equals reference at step 0."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attn_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def load_policy(path: str, device: str = "cpu", dtype: torch.dtype = torch.float32):
    """Causal LM from a model directory or hub id: float32 master weights by default, SDPA attention, dropout off.

    Raises:
        ModelError: the directory holds no causal LM.
    """
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not a causal language model that transformers can load ({error}). Give a directory "
                         "with config.json, *.safetensors and tokenizer files, or a hub id that is reachable.") from error
    disable_dropout(model)
    model.config.use_cache = False
    return model.to(device)


def save_policy(model, tokenizer, directory: str | Path, generation_config=None) -> None:
    """Write a Hugging Face model directory (safetensors, tokenizer, chat template, generation config)."""
    model.config.use_cache = True
    model.save_pretrained(directory, safe_serialization=True)
    model.config.use_cache = False
    tokenizer.save_pretrained(directory)
    (generation_config or model.generation_config).save_pretrained(directory)


def freeze(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.eval()


def hidden_states(model, input_ids_BT, position_ids_BT, mask_B1TT=None) -> torch.Tensor:
    """Last hidden states ``[B, T, H]`` of a decoder.

    Rows are right-padded. Without ``mask`` attention is plainly causal, so padding (which comes after every real token)
    cannot be seen by one; ``mask`` (bool, True = may attend) serves rows whose responses share a prompt.
    """
    return model.base_model(input_ids=input_ids_BT, position_ids=position_ids_BT, attention_mask=mask_B1TT,
                            use_cache=False).last_hidden_state


def precise(x: torch.Tensor) -> torch.Tensor:
    """float32 or better: half types are widened, float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True)
class Head:
    """The LM head as data: ``logits = cap(scale * (hidden @ weight.T + bias))``."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        out = torch.nn.functional.linear(hidden_NH, self.weight, self.bias)
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
    cached = getattr(model, "_posttrain_head", None)
    if cached is not None:
        scale, softcap = cached
    else:
        config = model.config.get_text_config()
        scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
        softcap = getattr(config, "final_logit_softcapping", None)
    output = model.get_output_embeddings()
    head = Head(output.weight, getattr(output, "bias", None), scale, softcap)
    if cached is None:
        ids = torch.arange(4, device=output.weight.device).remainder(output.weight.shape[0])[None]
        with torch.no_grad():
            positions = torch.arange(4, device=ids.device)[None]
            ours = head.logits(hidden_states(model, ids, positions)).float()
            theirs = model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()
        if not torch.allclose(ours, theirs, atol=1e-3, rtol=1e-3):
            raise ModelError(f"{type(model).__name__} changes its logits after the LM head in a way that is not supported; "
                             "use a Llama-, Qwen-, Mistral-, Gemma-, Granite-, Cohere- or GPT-2-class model.")
        model._posttrain_head = (scale, softcap)
    return head


class _ChunkedLogps(torch.autograd.Function):
    """log softmax(logits / temperature)[target] and entropy, per token, with logits recomputed chunk by chunk in backward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, scale, softcap, want_entropy):
        chunk = max(1, HEAD_CHUNK_ELEMENTS // weight.shape[0])
        n = hidden.shape[0]
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logps = hidden.new_empty(n, dtype=wide)
        entropies = hidden.new_zeros(n if want_entropy else 0, dtype=wide)
        head = Head(weight, bias, scale, softcap)
        keep = n <= chunk and any(ctx.needs_input_grad)
        kept = None
        for start in range(0, n, chunk):
            z = precise(head.logits(hidden[start:start + chunk]))
            if temperature != 1.0:
                z = z / temperature
            logp = torch.log_softmax(z, dim=-1)
            logps[start:start + chunk] = logp.gather(1, targets[start:start + chunk, None])[:, 0]
            if want_entropy:
                entropies[start:start + chunk] = -(logp.exp() * logp).sum(-1)
            if keep and not softcap:
                kept = logp
        ctx.save_for_backward(hidden, weight, bias, targets, kept)
        ctx.settings = (temperature, scale, softcap, want_entropy, chunk)
        return logps, entropies

    @staticmethod
    def backward(ctx, grad_logps, grad_entropies):
        hidden, weight, bias, targets, kept = ctx.saved_tensors
        temperature, scale, softcap, want_entropy, chunk = ctx.settings
        grad_hidden = torch.empty_like(hidden)
        wide = grad_logps.dtype
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and ctx.needs_input_grad[2] else None
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            capped = None
            if kept is not None:
                logp = kept
            else:
                z = precise(torch.nn.functional.linear(hidden[rows], weight, bias)) * scale
                if softcap:
                    capped = torch.tanh(z / softcap)
                    z = softcap * capped
                logp = torch.log_softmax(z / temperature, dim=-1)
            p = logp.exp()
            g = grad_logps[rows, None]
            if want_entropy:  # d entropy / d z_v = -p_v (log p_v + entropy)
                entropy = -(p * logp).sum(-1, keepdim=True)
                dz = -g * p - grad_entropies[rows, None] * p * (logp + entropy)
            else:
                dz = p.mul_(-g)
            dz.scatter_add_(1, targets[rows, None], g)
            factor = scale / temperature
            if factor != 1.0:
                dz = dz * factor
            if capped is not None:
                dz = dz * (1.0 - capped * capped)
            dz = dz.to(weight.dtype)
            torch.mm(dz, weight, out=grad_hidden[rows]) if hidden.dtype == weight.dtype else grad_hidden[rows].copy_(dz @ weight)
            if grad_weight is not None:
                grad_weight.addmm_(dz.t().to(wide), hidden[rows].to(wide))
            if grad_bias is not None:
                grad_bias += dz.sum(0).to(wide)
        return (grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype),
                None if grad_bias is None else grad_bias.to(bias.dtype), None, None, None, None, None)


def token_logps(head: Head, hidden_NH, targets_N, temperature: float = 1.0, entropy: bool = False):
    """Log-probability of each target token, float32 ``[N]``, and the distribution's entropy ``[N]`` (nats) if asked for.

    Differentiable in ``hidden``, weight and bias; peak memory is ``HEAD_CHUNK_ELEMENTS`` logits whatever V is.
    """
    logps, entropies = _ChunkedLogps.apply(hidden_NH, head.weight, head.bias, targets_N, float(temperature),
                                           head.scale, head.softcap, entropy)
    return logps, (entropies if entropy else None)


def target_logps(model, batch, temperature: float = 1.0, entropy: bool = False):
    """:func:`token_logps` of a batch's trained positions: (log-probs ``[N]``, entropies ``[N]`` or None)."""
    states = hidden_states(model, batch.input_ids_BT, batch.position_ids_BT, batch.attention_B1TT)
    return token_logps(head_of(model), states.flatten(0, 1)[batch.src_N], batch.target_N, temperature, entropy)
