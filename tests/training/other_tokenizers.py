"""Tiny models with tokenizers and chat templates of their own, for teachers that do not share the student's."""

from __future__ import annotations

import json

TEXT = [
    "what is four plus four? the answer is eight, say so and say it again",
    "Say aaaa bbbb cc 12 34 56 yes no maybe naïve café — 東京 🙂",
]
#: Two spaces around roles, a begin token, an end token of another name.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '[' + m['role'] + ']  ' + m['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]  ' }}{% endif %}"
)


def other_tokenizer(form: str, template: str = TEMPLATE, specials=("<begin>", "<end>", "<pad>"), vocab_size=340):
    """``bytes``: byte-level; ``lower``: the same, which reads everything in lower case; ``spaces``: SentencePiece's
    marks for spaces, with tokens of single bytes; ``words``: a token per word, which nothing here can read.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    specials = list(specials)
    if form in ("bytes", "lower"):
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        if form == "lower":
            core.normalizer = normalizers.Lowercase()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        core.normalizer = normalizers.Replace(" ", "\u2581")
        alphabet = [chr(c) for c in range(0x21, 0x7F)]
    core.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet)
    )
    if form == "spaces":
        core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
        said = json.loads(core.to_str())
        for byte in range(256):
            said["model"]["vocab"][f"<0x{byte:02X}>"] = len(said["model"]["vocab"])
        said["model"]["byte_fallback"] = True
        core = Tokenizer.from_str(json.dumps(said))
    if form == "words":
        core.decoder = decoders.WordPiece()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=specials[0], eos_token=specials[1], pad_token=specials[-1]
    )
    fast.chat_template = template
    return fast


def other_policy(path: str, form: str, seed: int = 5, **tokenizer) -> str:
    """Saves a Llama of hidden size 24 with such a tokenizer; its path."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from stages.models.modeling import save_policy

    fast = other_tokenizer(form, **tokenizer)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(fast),
            hidden_size=24,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.2,
            bos_token_id=fast.bos_token_id,
            eos_token_id=fast.eos_token_id,
            pad_token_id=fast.pad_token_id,
        )
    )
    save_policy(model, fast, path)
    return path
