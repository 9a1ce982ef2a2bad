"""What a decoder layer computes, read off a Hugging Face model's own modules: the one description under the training
forward (`stages.models.lean`) and the sampler's decoder (`stages.decoding.lean_decoder`).

With x the residual stream [tokens, M], every layer of a known family is

    x <- x + r * after_attention(W_o attention(turn(norm_q(W_q h)), turn(norm_k(W_k h)), W_v h)),   h = before_attention(x)
    x <- x + r * after_mlp(W_down(act(W_gate h) * W_up h)),                                         h = before_mlp(x)

where any of the norms may be missing, an attention may see a window only or cap its scores (cap * tanh(score / cap)),
the rotation may be that of the layer's kind or missing, fused weights are read in parts, and experts may stand in the
place of the MLP. :data:`FAMILIES` says where a family keeps its norms and what its config means; whatever else a config
asks for that is not computed, :func:`odd_layers` names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

FIXED_ROPE = {"default", "linear", "llama3", "yarn"}  # tables that do not depend on the running length
GROWING_ROPE = {"dynamic", "longrope"}  # tables that do, past a length: see :func:`rope_limit`
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
#: Names of the norms before attention, behind it, before the MLP and behind it; None: there is none.
PRE = ("input_layernorm", None, "post_attention_layernorm", None)
POST = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
BOTH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class Family:
    """How the models of one ``model_type`` differ from Llama.

    Args:
        stack: class name of the decoder stack in transformers.
        norms: see :data:`PRE`.
        plus_one: a norm's gain is 1 + its weight.
        head_norm: what q and k are normalised over: nothing, each ``head``, or the ``whole`` projection.
        window: which layers see ``config.sliding_window`` only: none, all, or those of the ``types``
            "sliding_attention".
        turns: rotary tables per layer type instead of one.
        activation: the config's name for it.
        caps: whether scores are capped as the config says.
        partly: whether less than a head may be rotated (its first rows).
        paired: whether the rows of a head that are rotated together stand next to each other, not half a rotation
            apart.
    """

    stack: str
    norms: tuple[str | None, ...] = PRE
    plus_one: bool = False
    head_norm: str | None = None
    window: str = "none"
    turns: bool = False
    activation: str = "hidden_act"
    caps: bool = False
    partly: bool = False
    paired: bool = False


FAMILIES = {
    "llama": Family("LlamaModel"),
    "mistral": Family("MistralModel", window="all"),
    "qwen2": Family("Qwen2Model", window="types"),
    "qwen3": Family("Qwen3Model", head_norm="head", window="types"),
    "gemma": Family("GemmaModel", plus_one=True),
    "gemma2": Family(
        "Gemma2Model", norms=BOTH, plus_one=True, window="types", activation="hidden_activation", caps=True
    ),
    "gemma3_text": Family(
        "Gemma3TextModel",
        norms=BOTH,
        plus_one=True,
        head_norm="head",
        window="types",
        turns=True,
        activation="hidden_activation",
    ),
    "olmo2": Family("Olmo2Model", norms=POST, head_norm="whole"),
    "olmo3": Family("Olmo3Model", norms=POST, head_norm="whole", window="types", turns=True),
    "phi3": Family("Phi3Model", window="all", partly=True),
    "glm": Family("GlmModel", partly=True, paired=True),
    "glm4": Family(
        "Glm4Model",
        norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        partly=True,
        paired=True,
    ),
    "granite": Family("GraniteModel"),
    "smollm3": Family("SmolLM3Model", window="types"),
    "seed_oss": Family("SeedOssModel"),
    "mixtral": Family("MixtralModel", window="all"),
    "qwen3_moe": Family("Qwen3MoeModel", head_norm="head", window="all"),
    "olmoe": Family("OlmoeModel", head_norm="whole"),
}
KNOWN = (
    "Llama, Mistral, Qwen2, Qwen3, Gemma, Gemma2, Gemma3, OLMo2, OLMo3, Phi3, GLM, GLM-4, Granite, SmolLM3, Seed-OSS,"
    " Mixtral, Qwen3-MoE or OLMoE"
)


@dataclass(frozen=True)
class Layer:
    """One layer's modules and constants, in the notation of the module's text.

    Args:
        qkv: the linear layers of q, k and v, or one that holds all three one below the other; ``gate_up`` alike; None
            where there are experts.
        window: how many tokens up to itself a token sees, None: all.
        cap: of the attention scores, None: none.
        turn: key of the layer's rotary table (:func:`rotary_tables`), None: q and k are not rotated.
        residual: r.
    """

    before_attention: nn.Module | None
    after_attention: nn.Module | None
    before_mlp: nn.Module | None
    after_mlp: nn.Module | None
    qkv: tuple[nn.Module, ...]
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    out: nn.Module
    gate_up: tuple[nn.Module, ...] | None
    down: nn.Module | None
    router: nn.Module | None
    experts: nn.Module | None
    scale: float
    window: int | None
    cap: float | None
    turn: str | None
    residual: float

    @property
    def linears(self) -> tuple[nn.Module, ...]:
        return (*self.qkv, self.out) if self.gate_up is None else (*self.qkv, self.out, *self.gate_up, self.down)

    @property
    def norms(self) -> tuple[nn.Module, ...]:
        return tuple(
            n
            for n in (
                self.before_attention,
                self.after_attention,
                self.before_mlp,
                self.after_mlp,
                self.q_norm,
                self.k_norm,
            )
            if n is not None
        )


def family_of(core) -> Family | None:
    """The family of a decoder stack; None where it is not exactly a known class of transformers."""
    family = FAMILIES.get(getattr(getattr(core, "config", None), "model_type", None))
    return (
        family
        if family is not None
        and type(core).__name__ == family.stack
        and type(core).__module__.startswith("transformers.")
        else None
    )


def layers_of(core) -> list[Layer]:
    """The layers of a stack of a known family."""
    config, family = core.config, family_of(core)
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    found = []
    for i, layer in enumerate(core.layers):
        attention, mlp = layer.self_attn, layer.mlp
        sliding = family.window == "all" or family.window == "types" and types[i] == "sliding_attention"
        experts = getattr(mlp, "experts", None)
        fused = getattr(attention, "qkv_proj", None)
        pair = (
            None
            if experts is not None
            else (mlp.gate_up_proj,)
            if hasattr(mlp, "gate_up_proj")
            else (mlp.gate_proj, mlp.up_proj)
        )
        found.append(
            Layer(
                *(None if name is None else getattr(layer, name) for name in family.norms),
                (fused,) if fused is not None else (attention.q_proj, attention.k_proj, attention.v_proj),
                getattr(attention, "q_norm", None),
                getattr(attention, "k_norm", None),
                attention.o_proj,
                pair,
                None if experts is not None else mlp.down_proj,
                None if experts is None else mlp.gate,
                experts,
                attention.scaling,
                window if sliding else None,
                config.attn_logit_softcapping if family.caps else None,
                None if not getattr(attention, "use_rope", True) else types[i] if family.turns else "",
                getattr(layer, "residual_multiplier", 1.0),
            )
        )
    return found


def gain_of(norm: nn.Module | None, family: Family):
    """What a norm multiplies with, [width]; differentiable in its weight."""
    return None if norm is None else 1.0 + norm.weight if family.plus_one else norm.weight


def epsilon_of(norm: nn.Module) -> float:
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


def rotary_tables(core) -> dict[str, tuple]:
    """{``Layer.turn``: (frequencies [D / 2], factor of cosine and sine)}."""
    rotary = core.rotary_emb
    if not family_of(core).turns:
        return {"": (rotary.inv_freq, float(getattr(rotary, "attention_scaling", 1.0)))}
    return {
        name: (getattr(rotary, f"{name}_inv_freq"), float(getattr(rotary, f"{name}_attention_scaling")))
        for name in rotary.layer_types
    }


def interleave(weight: torch.Tensor, heads: int, back: bool = False, turned: int | None = None) -> torch.Tensor:
    """Rows of each head reordered from (first halves, second halves) to (first, second) pairs, so that the rotation of
    pair i is one complex product; `back` undoes it. Dot products of queries and keys do not change. weight [heads * D,
    ...]; turned: how many first rows of a head to reorder, None: all (:func:`turned_rows`)."""
    tail = weight.shape[1:]
    halves = (-1, 2) if back else (2, -1)
    if turned == 0:
        return weight
    if turned is not None:
        rows = weight.reshape(heads, -1, *tail)
        first = rows[:, :turned].reshape(heads, *halves, *tail).transpose(1, 2).reshape(heads, turned, *tail)
        return torch.cat([first, rows[:, turned:]], 1).reshape(weight.shape)
    return weight.reshape(heads, *halves, *tail).transpose(1, 2).reshape(weight.shape)


def turned_rows(core) -> int | None:
    """How many first rows of a head :func:`interleave` has to reorder before it is rotated; None: all of them."""
    if family_of(core).paired:
        return 0
    rows = 2 * next(iter(rotary_tables(core).values()))[0].shape[0]
    return None if rows == core.layers[0].self_attn.head_dim else rows


def turns(angles: torch.Tensor, scale: float, head_dim: int) -> torch.Tensor:
    """exp(i * angle) * scale for angles [..., R], as complex [..., D / 2]; what a rotation of less than the head leaves
    is multiplied with 1.
    """
    turn = torch.complex(angles.cos() * scale, angles.sin() * scale)
    left = head_dim // 2 - turn.shape[-1]
    return torch.cat([turn, turn.new_ones(*turn.shape[:-1], left)], -1) if left else turn


def logit_scaling(config) -> tuple[float, float | None]:
    """(scale, cap) of a model's logits: ``cap * tanh(scale * logits / cap)``; no cap: None."""
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return scale, getattr(config, "final_logit_softcapping", None)


def embedding_scales(core) -> tuple[torch.Tensor | None, float]:
    """What embeddings are multiplied with by the embedding itself (None: nothing), and behind it; between them noise is
    added.
    """
    return getattr(core.embed_tokens, "embed_scale", None), float(getattr(core, "embedding_multiplier", 1.0))


def rope_limit(config) -> tuple[str, int] | None:
    """(rotary type, positions) of a text config whose rotary table is another one for batches with a longer row than
    that; None where there is one table.

    Past it a token's hidden state depends on what else is computed with it and on what comes after it, so there is no
    one log-probability to train on.
    """
    given = getattr(config, "rope_parameters", None) or {}
    for one in given.values() if given and all(isinstance(v, dict) for v in given.values()) else [given]:
        kind = one.get("rope_type", "default")
        if kind in GROWING_ROPE:
            return kind, int(
                one.get("original_max_position_embeddings") if kind == "longrope" else config.max_position_embeddings
            )
    return None


def windows_of(config) -> dict[str, int]:
    """What a text config says about windows and chunks of attention, in tokens."""
    return {
        name: n
        for name, n in config.to_dict().items()
        if ("window" in name or "chunk" in name)
        and not name.endswith(("_layers", "_pattern"))
        and type(n) is int
        and n > 0
    }


def odd_layers(core, refuses: Callable) -> str | None:
    """What in a decoder stack an own forward does not compute, None when nothing is.

    refuses: a layer's linear modules -> why it cannot be read, None when it can.
    """
    family = family_of(core)
    if family is None:
        return f"{type(core).__name__} is not a {KNOWN} decoder"
    config, rotary = core.config, core.rotary_emb
    kinds = (
        rotary.rope_type.values()
        if isinstance(getattr(rotary, "rope_type", None), dict)
        else [getattr(rotary, "rope_type", "default")]
    )
    for kind in kinds:
        if kind not in FIXED_ROPE | GROWING_ROPE:
            return f"rotary type {kind!r}"
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        return f"layers of the types {sorted(set(config.layer_types))}"
    if family.window == "none" and (
        getattr(config, "sliding_window", None) is not None
        or "sliding_attention" in (getattr(config, "layer_types", None) or ())
    ):
        return "a sliding window"
    if getattr(config, "use_bidirectional_attention", None):
        return "attention in both directions"
    if getattr(config, "clip_qkv", None) is not None:
        return "clipped queries, keys and values"
    activation = ACTIVATIONS.get(getattr(config, family.activation))
    if activation is None or activation != "silu" and any(hasattr(layer.mlp, "experts") for layer in core.layers):
        return f"activation {getattr(config, family.activation)!r}"
    if type(core.embed_tokens) is not nn.Embedding and not type(core.embed_tokens).__name__.endswith(
        "TextScaledWordEmbedding"
    ):
        return f"a {type(core.embed_tokens).__name__} in place of the embedding"
    for module in core.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return "forward hooks"
    if len(core.layers) != config.num_hidden_layers:
        return f"{len(core.layers)} layers where the config says {config.num_hidden_layers}"
    width = core.layers[0].self_attn.head_dim
    if width % 2 or any(
        frequencies.shape[0] * 2 > width or frequencies.shape[0] * 2 < width and not family.partly
        for frequencies, _ in rotary_tables(core).values()
    ):
        return "partial rotary embeddings"
    epsilon = epsilon_of(core.norm)
    for layer in layers_of(core):
        if (layer.q_norm is not None) != (family.head_norm is not None):
            return "norms of queries and keys that are not the family's"
        if layer.experts is not None and (
            type(layer.experts).__name__ != family.stack.removesuffix("Model") + "Experts"
            or getattr(layer.experts, "is_transposed", False)
        ):
            return f"a {type(layer.experts).__name__} in place of the experts"
        if (
            layer.router is not None
            and type(layer.router).__name__ != family.stack.removesuffix("Model") + "TopKRouter"
        ):
            return f"a {type(layer.router).__name__} in place of the router"
        if any(epsilon_of(norm) != epsilon for norm in layer.norms):
            return "norms with different epsilons"
        for linear in layer.linears:
            reason = refuses(linear)
            if reason:
                return reason
    return None
