"""Tiny random models and a word tokenizer, built once per test session."""

import random

import pytest
import torch

VOCAB = 96
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=96,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}


def build(name):
    """A tiny random causal LM whose next-token distributions are peaked enough to be interesting."""
    import transformers as t

    torch.manual_seed(7)
    model = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SHAPE)),
        "llama3-rope": lambda: t.LlamaForCausalLM(t.LlamaConfig(rope_parameters=LLAMA3_ROPE, **SHAPE)),
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**SHAPE)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(head_dim=16, tie_word_embeddings=True, **SHAPE)),
        "mistral-window": lambda: t.MistralForCausalLM(t.MistralConfig(sliding_window=8, **SHAPE)),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(
                vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=96, bos_token_id=None, eos_token_id=None
            )
        ),
    }[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="session")
def models():
    cache = {}

    def get(name):
        if name not in cache:
            cache[name] = build(name)
        return cache[name]

    return get


@pytest.fixture(scope="session")
def prompts():
    rng = random.Random(3)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in (5, 1, 17, 9, 3, 12, 9)]


@pytest.fixture(scope="session")
def tokenizer():
    """Character-level tokenizer: ids 0..94 are the printable ASCII characters, 95 is the special token <end>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(32 + i): i for i in range(95)} | {"<end>": 95}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
