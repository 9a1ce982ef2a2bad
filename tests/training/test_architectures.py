"""Any architecture's answers are scored as if each stood alone, however many share a prompt and a micro-batch."""

import numpy as np
import pytest
import torch
import transformers

from stages.batching import collate, make_item
from stages.modeling import disable_dropout, form_for, head_of, is_lean, shared_up_to, target_logps

BASE = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256}
HALF = ["sliding_attention", "full_attention"]

#: Model class, what its config needs beside BASE, and up to which length an answer may share its prompt with others.
MODELS = {
    "llama": ("Llama", {}, float("inf")),
    "granite": ("Granite", {"attention_multiplier": 0.3}, float("inf")),
    "gpt2": ("GPT2", None, float("inf")),
    "mistral with a window": ("Mistral", {"sliding_window": 8}, 8),
    "mistral with a wide window": ("Mistral", {"sliding_window": 100}, 100),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 8, "layer_types": HALF}, 8),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 8}, 0),  # its own attention adds a mask of True and False to the scores
    "olmo3": ("Olmo3", {"sliding_window": 8, "layer_types": HALF}, 8),
    "convolutions": ("Lfm2", {"layer_types": ["conv", "full_attention"]}, 0),
    "linear attention": ("Qwen3Next", {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "num_experts": 0, "linear_num_value_heads": 4,
                                       "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}, 0),
    "state space": ("FalconH1", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 16}, 0),
}


def build(family, more):
    torch.manual_seed(0)
    if family == "GPT2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=256))
    else:
        config = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
        model = getattr(transformers, f"{family}ForCausalLM")(config(**BASE, **more))
    with torch.no_grad():  # what is attended to must matter
        for parameter in model.parameters():
            if parameter.ndim >= 2 and parameter.std() < 0.05:
                parameter.mul_(4.0)
    disable_dropout(model)
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_answers_to_one_prompt_do_not_see_each_other(name):
    family, more, limit = MODELS[name]
    model, rng = build(family, more), np.random.default_rng(0)
    items = [make_item(str(i), rng.integers(10, 250, prompt), [rng.integers(10, 250, n) for n in answers], [[1] * n for n in answers])
             for i, (prompt, answers) in enumerate([(30, (6, 9)), (12, (5, 3)), (25, (4, 8)), (4, (3, 4))])]
    alone = []
    with torch.no_grad():
        for item in items:
            for answer in item.responses:
                ids = torch.as_tensor(np.concatenate([item.prompt, answer]).astype(np.int64))[None]
                logp = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), -1)
                alone.append(logp[len(item.prompt) - 1:-1].gather(1, ids[0, len(item.prompt):, None]).sum())
        for group in (items, items[3:]):
            batch = collate(group)
            found = torch.zeros(len(batch.last_S)).index_add(0, batch.seq_N, target_logps(model, batch)[0])
            assert torch.allclose(found, torch.stack(alone)[-len(found):], atol=2e-4)
    if not is_lean(model):
        assert shared_up_to(model) == limit
        assert form_for(model, [(4, [3, 4])]) == ("tree" if limit else "rows") and form_for(model, [(30, [6, 9])]) == ("tree" if limit > 39 else "rows")


def test_the_head_is_tried_in_full_precision():
    """Under bfloat16 products ours and the model's own forward round differently, once norms have been trained."""
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**BASE, head_dim=16)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1.0 + 2.0 * torch.rand_like(parameter) if "norm" in name else 6.0)
    with torch.autocast("cpu", torch.bfloat16):
        head_of(model)


def test_published_models_stop_where_turns_end(tmp_path):
    """A base model's generation config names the end of a document; its chat template closes turns with another token."""
    from stages.base_model import TURN_END, train_tokenizer
    from stages.modeling import save_policy

    tokenizer = train_tokenizer(["hello there"] * 9, 300, 64)
    model, turn_end = build("Llama", {}), tokenizer.convert_tokens_to_ids(TURN_END)
    model.generation_config = transformers.GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    for folder, given in (("base", tokenizer.eos_token_id), ("chat", [turn_end, tokenizer.eos_token_id])):
        model.generation_config.eos_token_id = given
        save_policy(model, tokenizer, tmp_path / folder)
        assert set(transformers.GenerationConfig.from_pretrained(tmp_path / folder).eos_token_id) == {turn_end, tokenizer.eos_token_id}
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "chat").eos_token_id == given  # as it was


@pytest.mark.parametrize("architecture", ("llama", "qwen2", "qwen3"))
def test_a_new_models_tokenizer_is_the_one_that_was_trained(tmp_path, architecture):
    """Transformers has rules of its own for the tokenizer of some architectures."""
    from stages.base_model import Config, new_model, train_tokenizer
    from stages.chat import load_tokenizer

    tokenizer = train_tokenizer(["what is 12 plus 34? caf\u00e9 2024"] * 9, 300, 64, architecture)
    new_model(Config(architecture=architecture, hidden_size=32, num_attention_heads=2, num_key_value_heads=1), len(tokenizer), tokenizer, 0).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    for text in ("what is 12 plus 34? cafe\u0301 2024", " a\n\n  b\t\u00df \u4e2d 1,000"):
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"] and loaded.decode(loaded(text)["input_ids"]) in (text, text.replace("e\u0301", "\u00e9"))
