"""Tiny random models of many architectures, and transformers' own forward in float64 throughout."""

from __future__ import annotations

import contextlib

import numpy as np
import torch
import transformers

from stages.batching import collate, make_item
from stages.models import products
from stages.models.modeling import disable_dropout, target_logps

VOCABULARY = 97
BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HALF = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}


def rope(**settings):
    return {"rope_parameters": {"rope_theta": 10000.0, **settings}}


#: What the own forward and decoder compute: (class prefix in transformers, what its config needs beside BASE).
FAST = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3 rope": (
        "Llama",
        rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "yarn": ("Qwen2", rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)),
    "linear rope": ("Mistral", {**rope(rope_type="linear", factor=4.0), "sliding_window": None}),
    "mistral window": ("Mistral", {"sliding_window": 8}),
    "qwen2 window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 window": (
        "Qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            **HALF,
        },
    ),
    "gemma3": ("Gemma3", {"head_dim": 16, "query_pre_attn_scalar": 32, **HALF}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", HALF),
    "phi3": ("Phi3", {}),
    "phi3 window": ("Phi3", {"sliding_window": 8}),
    "longrope": (
        "Phi3",
        {
            **rope(rope_type="longrope", short_factor=[1.5] * 4, long_factor=[2.0] * 4),
            "original_max_position_embeddings": 1024,
        },
    ),
    "phi3 partial": ("Phi3", rope(partial_rotary_factor=0.5, rope_type="default")),
    "longrope partial": (
        "Phi3",
        {
            **rope(rope_type="longrope", partial_rotary_factor=0.5, short_factor=[1.5] * 2, long_factor=[2.0] * 2),
            "original_max_position_embeddings": 1024,
        },
    ),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "granite": (
        "Granite",
        {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 4.0},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "smollm3 window": ("SmolLM3", {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 8}),
    "seed-oss": ("SeedOss", {"head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "mixtral window": ("Mixtral", {"num_local_experts": 4, "sliding_window": 8}),
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 16, "mlp_only_layers": [0], "norm_topk_prob": True, **MOE}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
}
#: What goes through its own code.
OTHER = {
    "gpt2": ("GPT2", None),
    "gpt-neox": ("GPTNeoX", {}),
    "falcon": ("Falcon", {"intermediate_size": None, "num_key_value_heads": None, "ffn_hidden_size": 64}),
    "stablelm": ("StableLm", {"qk_layernorm": True}),
    "starcoder2": ("Starcoder2", {"sliding_window": 8}),
    "cohere2": ("Cohere2", {"logit_scale": 0.5, **HALF}),
    "glm4-moe": (
        "Glm4Moe",
        {
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
        },
    ),
    "qwen2-moe": ("Qwen2Moe", {"shared_expert_intermediate_size": 40, **MOE}),
    "deepseek-v3": ("DeepseekV3", LATENT),
    "gpt-oss": ("GptOss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, **HALF}),
    "exaone4": ("Exaone4", HALF),
    "qwen3.5": ("Qwen3_5", {"head_dim": 16, **LINEAR}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
}
MODELS = FAST | OTHER


def build(name: str, dtype: torch.dtype = torch.float32, **changes):
    """The model of an entry, its gains off 1 and its biases off 0, or their gradients go unseen; experts and attention
    in code that takes float64.
    """
    family, more = MODELS[name] if isinstance(name, str) else name
    torch.manual_seed(3)
    if family == "GPT2":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=2048)
        )
    else:
        kind = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
        model = getattr(transformers, f"{family}ForCausalLM")(
            kind(**{k: v for k, v in (BASE | more | changes).items() if v is not None or k == "sliding_window"})
        )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2 and parameter.std() < 0.05:
                parameter.mul_(4.0)
            elif parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"
    disable_dropout(model)
    return model.to(dtype).eval()


@contextlib.contextmanager
def in_float64():
    """transformers' modules compute norms, rotations and softmaxes in float32; here in float64, so that two forwards
    can be compared to 1e-10.
    """
    wide, narrow, products_of = torch.float64, torch.float32, products.prefers_onednn
    cast = torch.Tensor.float
    torch.float32 = torch.float = wide
    torch.Tensor.float, products.prefers_onednn = torch.Tensor.double, lambda: False
    try:
        yield
    finally:
        torch.float32 = torch.float = narrow
        torch.Tensor.float, products.prefers_onednn = cast, products_of


def items_of(*shapes, seed: int = 0):
    """Items with random tokens: (prompt length, response lengths) each."""
    rng = np.random.default_rng(seed)
    return [
        make_item(
            str(i),
            rng.integers(3, VOCABULARY, prompt),
            [rng.integers(3, VOCABULARY, n) for n in answers],
            [[1] * n for n in answers],
            by_response=(),
        )
        for i, (prompt, answers) in enumerate(shapes)
    ]


def own_logps(model, items) -> list[torch.Tensor]:
    """Log-probs of every response's tokens by the model's own forward over that conversation alone."""
    found = []
    for item in items:
        for response in item.responses:
            ids = torch.as_tensor(np.concatenate([item.prompt, response]).astype(np.int64))[None]
            logps = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0], -1)
            found.append(logps[len(item.prompt) - 1 : -1].gather(1, ids[0, len(item.prompt) :, None])[:, 0])
    return found


def trained_logps(model, items) -> list[torch.Tensor]:
    """The same as the training forward computes them, all items in one micro-batch."""
    batch = collate(items)
    logps = target_logps(model, batch)[0]
    return [logps[batch.seq_N == s] for s in range(len(batch.last_S))]


def gradients(model, groups, forward) -> dict[str, torch.Tensor]:
    """Gradient of a sum over all log-probs with weights that differ, group by group."""
    model.zero_grad(set_to_none=True)
    for group in groups:
        sum(
            (logps * torch.sin(1.0 + torch.arange(len(logps), dtype=logps.dtype))).sum()
            for logps in forward(model, group)
        ).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
