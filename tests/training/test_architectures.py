"""Any architecture's answers are scored as if each stood alone, however many share a prompt and a micro-batch."""

import pytest
import torch
import transformers

from stages.models import adapters, banded, lean
from stages.batching import collate, cut, make_item, pad, per_response, plan
from stages.decoding.decoders import DecoderError
from stages.models.modeling import (
    ModelError,
    form_for,
    head_of,
    hidden_states,
    is_lean,
    load_policy,
    save_weights,
    shared_up_to,
    target_logps,
    tokens_together,
)
from stages.decoding.sampler import Sampler, SamplerError, SamplingParams
from stages.settings import OptimizerConfig
from stages.training import Sums, Trainer
from tests.architectures import (
    BASE,
    FAST,
    MODELS,
    build,
    gradients,
    in_float64,
    items_of,
    own_logps,
    rope,
    trained_logps,
)

#: Up to which length an answer may share its prompt with others in the model's own code.
SHARED = {
    "llama": float("inf"),
    "granite": float("inf"),
    "gpt2": float("inf"),
    "mistral window": 8,
    "gemma3": 8,
    "gemma2": 0,
    "olmo3": 8,
    "qwen3.5": 0,
    "lfm2": 0,
    "gpt-oss": 0,
    "starcoder2": 8,
    "cohere2": 8,
    "deepseek-v3": float("inf"),
}
SHAPES = ((30, (6, 9)), (12, (5, 3)), (25, (4, 8)), (4, (3, 4)))


def largest(ours, theirs) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_are_the_models_own(name):
    """Of answers that share prompts and a micro-batch, each as if it stood alone: in float64 to 1e-10."""
    model, items = build(name, torch.float64), items_of(*SHAPES)
    assert is_lean(model) == (name in FAST), lean.why_not(model)
    with torch.no_grad(), in_float64():
        for group in (items, items[3:]):
            assert largest(trained_logps(model, group), own_logps(model, group)) < 1e-10


@pytest.mark.parametrize("name", SHARED)
def test_answers_share_a_prompt_where_the_models_own_code_can_tell_them_apart(name):
    model, limit = build(name), SHARED[name]
    model._posttrain_lean = False
    assert shared_up_to(model) == limit
    assert form_for(model, [(4, [3, 4])]) == ("tree" if limit else "rows") and form_for(model, [(30, [6, 9])]) == (
        "tree" if limit > 39 else "rows"
    )
    items = items_of(*SHAPES)
    with torch.no_grad():
        assert largest(trained_logps(model, items), own_logps(model, items)) < 2e-4


#: Beside SHAPES, what is longer than a block of short items and than a band.
LONG = (*SHAPES, (270, (40, 300)), (3, (290,)), (300, (0, 7)))


@pytest.mark.parametrize("name", FAST)
def test_the_fast_forward_is_the_models_own(name, monkeypatch):
    """Log-probs and every gradient, in float64 to 1e-10 of the largest, of short and long conversations, with and
    without recomputing, under any split.
    """
    monkeypatch.setattr(banded, "BAND", 50)
    model, items = build(name, torch.float64).train(), items_of(*LONG)
    with in_float64():
        assert (
            largest(*([x for x in forward(model, items) if len(x)] for forward in (trained_logps, own_logps))) < 1e-10
        )
        wanted = gradients(model, [[i] for i in items], own_logps)
        scale = max(float(g.abs().max()) for g in wanted.values())
        found = {
            "together": gradients(model, [items], trained_logps),
            "each": gradients(model, [[i] for i in items], trained_logps),
        }
        monkeypatch.setattr(lean, "CHUNK", 17)
        monkeypatch.setattr(lean, "BLOCK", 1)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        found["in small pieces, recomputed"] = gradients(model, [items], trained_logps)
    for how, grads in found.items():
        assert set(grads) == set(wanted)
        for name, grad in wanted.items():
            assert float((grads[name] - grad).abs().max()) < 1e-10 * scale, (how, name)


@pytest.mark.parametrize("name", ("gemma2", "olmo2", "granite", "phi3", "mixtral window"))
def test_an_empty_prompt_and_positions_that_are_not_read(name):
    """Items without a prompt, and hidden states of some positions only, are those of all positions."""
    model = build(name, torch.float64)
    batch = collate(items_of((0, (20, 30)), (5, (3,)), (300, (0, 7))))
    everything = hidden_states(model, batch)
    assert torch.allclose(hidden_states(model, batch, batch.src_N), everything[batch.src_N], atol=1e-12)
    start = 0
    for prompt, responses in batch.segments:
        for k, n in enumerate(responses):
            at = [
                *range(start, start + prompt),
                *range(start + prompt + sum(responses[:k]), start + prompt + sum(responses[: k + 1])),
            ]
            alone = collate([make_item("x", [], [batch.ids_U[at].tolist()], [[0] * len(at)])])
            assert torch.allclose(hidden_states(model, alone), everything[at], atol=1e-12)
        start += prompt + sum(responses)


@pytest.mark.parametrize("name", ("gemma2", "gemma3", "qwen3-moe"))
def test_bfloat16_products_stay_near_float32(name):
    model, items = build(name), items_of(*SHAPES)
    exact = hidden_states(model, collate(items))
    with torch.autocast("cpu", torch.bfloat16):
        low = hidden_states(model, collate(items))
    assert low.dtype == torch.float32 and 0 < float((low - exact).norm() / exact.norm()) < 0.1
    low.square().mean().backward()
    assert all(
        torch.isfinite(p.grad).all() and p.grad.dtype == torch.float32
        for n, p in model.named_parameters()
        if p.grad is not None
    )


#: Values of config keys that are not the default, where a number halved or a flag turned is no model.
CHANGED = {
    "hidden_act": ["gelu", "gelu_pytorch_tanh"],
    "hidden_activation": ["gelu", "silu"],
    "rope_parameters": [rope(rope_type="linear", factor=2.0)["rope_parameters"]],
    "layer_types": [["full_attention", "sliding_attention"], ["full_attention"] * 2],
    "sliding_window": [None, 5],
    "num_hidden_layers": [1],
    "head_dim": [32],
    "num_attention_heads": [2],
    "num_key_value_heads": [1, 4],
    "mlp_only_layers": [[1]],
    "no_rope_layers": [[0, 1]],
    "use_bidirectional_attention": [True],
    "clip_qkv": [0.05],
    "attn_logit_softcapping": [1.5, None],
    "final_logit_softcapping": [2.0, None],
    "partial_rotary_factor": [0.5],
    "decoder_sparse_step": [2],
    "attention_dropout": [0.3],
    "use_sliding_window": [True, False],
    "residual_dropout": [0.3],
    "router_jitter_noise": [0.3],
    "resid_pdrop": [0.3],
    "embd_pdrop": [0.3],
    "max_window_layers": [0, 2],
}
#: What decides where and how a config is read, not what is computed.
LEFT = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "dtype",
    "chunk_size_feed_forward",
    "problem_type",
    "pretraining_tp",
    "moe_intermediate_size",
    "original_max_position_embeddings",
    "no_rope_layer_interval",
    "is_encoder_decoder",
    "output_hidden_states",
    "output_attentions",
    "return_dict",
    "initializer_range",
    "use_cache",
    "output_router_logits",
}


@pytest.mark.parametrize(
    "name",
    (
        "llama",
        "mistral window",
        "qwen2 window",
        "qwen3 window",
        "gemma2",
        "gemma3",
        "olmo2",
        "olmo3",
        "phi3",
        "granite",
        "smollm3 window",
        "mixtral",
        "qwen3-moe",
        "olmoe",
    ),
)
def test_no_key_of_a_config_is_ignored(name):
    """Every key of the config, changed: the training forward, in training mode, gives the model's own log-probs, or
    says that it does not know this model.
    """
    family, more = FAST[name]
    config = build(name).config
    tried = 0
    for key in sorted(
        set(type(config).__dataclass_fields__) - LEFT
        if hasattr(type(config), "__dataclass_fields__")
        else set(config.to_dict()) - LEFT
    ):
        value = getattr(config, key, None)
        values = CHANGED.get(
            key,
            (
                [not value]
                if isinstance(value, bool)
                else (
                    [max(1, value // 2)]
                    if isinstance(value, int)
                    else [value * 0.5 + 0.1]
                    if isinstance(value, float)
                    else []
                )
            ),
        )
        for changed in values:
            if changed == value:
                continue
            try:
                model = build((family, more), torch.float64, **{key: changed})
                with torch.no_grad(), in_float64():
                    theirs = own_logps(model, items_of(*SHAPES))
            except Exception:  # noqa: BLE001 -- transformers itself does not take this value
                continue
            tried += 1
            model.train()
            if key == "use_bidirectional_attention":
                assert "both directions" in lean.why_not(model)
                continue
            with torch.no_grad(), in_float64():
                assert largest(trained_logps(model, items_of(*SHAPES)), theirs) < 1e-10, (key, changed)
    assert tried >= 8


@pytest.mark.parametrize(
    "name, key",
    (
        ("starcoder2", "residual_dropout"),
        ("starcoder2", "embedding_dropout"),
        ("seed-oss", "residual_dropout"),
        ("mixtral", "router_jitter_noise"),
        ("gpt-neox", "hidden_dropout"),
    ),
)
def test_nothing_is_random_in_training(name, key):
    """Dropouts that modules keep as numbers under names of their own, and noise on what a router sees."""
    model, items = build(name, **{key: 0.4}).train(), items_of(*SHAPES)
    model._posttrain_lean = False
    with torch.no_grad():
        trained = trained_logps(model, items)
        assert largest(trained, own_logps(model.eval(), items)) < 2e-4


@pytest.mark.parametrize("kind", ("dynamic", "longrope"))
def test_rotary_tables_that_change_with_the_length_are_used_as_far_as_they_do_not(kind):
    settings = {
        "dynamic": {**rope(rope_type="dynamic", factor=4.0), "max_position_embeddings": 32},
        "longrope": {**MODELS["longrope"][1], "original_max_position_embeddings": 32},
    }[kind]
    model = build(("Phi3" if kind == "longrope" else "Llama", settings), torch.float64)
    for own in (True, False):
        model._posttrain_lean = own
        with torch.no_grad(), in_float64():
            short = items_of((20, (12, 4)))
            assert largest(trained_logps(model, short), own_logps(model, short)) < 1e-10
            with pytest.raises(ModelError, match="past 32 tokens.*max_length.*at most 32"):
                trained_logps(model, items_of((20, (13,))))
    with pytest.raises((DecoderError, SamplerError), match="<= 32|<= 12"):
        Sampler(model.float(), None).generate([[5] * 20], SamplingParams(max_new_tokens=13), [[0]])


@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_is_the_trained_one(name, tmp_path):
    """Save and load bit for bit; an adapter finds its layers, is merged, and is counted in by what follows the
    policy.
    """
    model, items = build(name), items_of(*SHAPES)
    save_weights(model, tmp_path / "whole")
    again = load_policy(str(tmp_path / "whole")).state_dict()
    assert set(again) == set(model.state_dict()) and all(
        torch.equal(value, again[key]) for key, value in model.state_dict().items()
    )
    config = OptimizerConfig(lora_rank=2)
    adapted = adapters.add_lora(model, config, 1)
    with torch.no_grad():
        for key, p in adapted.named_parameters():
            if "lora_B" in key:
                p.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    logps = trained_logps(adapted, items)
    sum(x.sum() for x in logps).backward()
    trained = {key: p for key, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) >= 8 and all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained.values())
    plain = {key: value.clone() for key, value in adapters.plain_parameters(adapted)}
    save_weights(adapted, tmp_path / "merged")
    merged = load_policy(str(tmp_path / "merged"))
    with torch.no_grad():
        assert largest(trained_logps(merged, items), logps) < 2e-4
    assert set(plain) == {key for key, _ in merged.named_parameters()}
    assert all(torch.allclose(value, plain[key], atol=1e-6) for key, value in merged.named_parameters())


@pytest.mark.parametrize("targets, fast", (("q_proj,k_proj,v_proj,o_proj", True), ("all-linear", False)))
def test_an_adapter_on_attention_alone_leaves_experts_to_the_fast_forward(targets, fast):
    items = items_of(*SHAPES)
    model = adapters.add_lora(build("qwen3-moe", torch.float64), OptimizerConfig(lora_rank=2, lora_targets=targets), 1)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "lora_B" in key:
                p.normal_(std=0.1)
    assert is_lean(model) == fast and (fast or "router" in lean.why_not(model) or "experts" in lean.why_not(model))
    with in_float64():
        assert largest(trained_logps(model, items), own_logps(model, items)) < 1e-10
        ours, theirs = (gradients(model, [items], forward) for forward in (trained_logps, own_logps))
    assert set(ours) == set(theirs) and all(
        torch.allclose(ours[key], grad, atol=1e-10 * float(grad.abs().max())) for key, grad in theirs.items()
    )


@pytest.mark.parametrize("name", ("gpt2", "gpt-oss", "cohere2", "qwen3.5"))
def test_padding_counts_in_a_micro_batch(name):
    """The rows that a model's own code computes stay within the budget, padding counted, and the numbers are those of
    one micro-batch.
    """
    model = build(name)
    shapes = (
        (30, (6, 9, 4, 5)),
        (12, (5, 3)),
        (2, (40,)),
        (25, (4, 8)),
        (4, (3, 4)),
        (3, (50,)),
        (90, (5,)),
        (5, (1,) * 9),
    )
    items, budget, cost = items_of(*shapes), 80, tokens_together(model)
    groups = plan(cut(items, budget, cost=cost), budget, cost=cost)
    assert len(groups) > 4
    for group in groups:
        batch = collate(group)
        rows = pad(batch, form_for(model, batch.segments))
        assert rows.ids_BT.numel() == cost(group)
        assert rows.ids_BT.numel() <= budget or len(group) == len(group[0].responses) == 1
    assert sorted(n for group in groups for item in group for n in map(len, item.responses)) == sorted(
        n for _, answers in shapes for n in answers
    )
    trainer = Trainer(model, Likelihood(), OptimizerConfig(max_tokens_per_micro_batch=budget, learning_rate=1e-3), 1)
    assert [sorted(map(len, (i.prompt for i in g))) for g in trainer.planned(items)] == [
        sorted(map(len, (i.prompt for i in g))) for g in groups
    ]
    found = per_response(
        items,
        budget,
        "cpu",
        lambda batch: torch.zeros(len(batch.last_S)).index_add(0, batch.seq_N, target_logps(model, batch)[0]).tolist(),
        model,
    )
    with torch.no_grad():
        assert torch.allclose(
            torch.tensor([x for row in found for x in row]),
            torch.stack([x.sum() for x in own_logps(model, items)]),
            atol=2e-4,
        )


class Likelihood:
    def counts(self, items):
        return {"tokens": float(sum(i.n_targets for i in items))}

    def __call__(self, model, batch):
        return Sums({"loss": (-target_logps(model, batch)[0].sum(), "tokens")})


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
    """A base model's generation config names the end of a document; its chat template closes turns with another
    token.
    """
    from stages.base_model import TURN_END, train_tokenizer
    from stages.models.modeling import save_policy

    tokenizer = train_tokenizer(["hello there"] * 9, 300, 64)
    model, turn_end = build("llama"), tokenizer.convert_tokens_to_ids(TURN_END)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    for folder, given in (("base", tokenizer.eos_token_id), ("chat", [turn_end, tokenizer.eos_token_id])):
        model.generation_config.eos_token_id = given
        save_policy(model, tokenizer, tmp_path / folder)
        assert set(transformers.GenerationConfig.from_pretrained(tmp_path / folder).eos_token_id) == {
            turn_end,
            tokenizer.eos_token_id,
        }
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "chat").eos_token_id == given  # as it was


@pytest.mark.parametrize("architecture", ("llama", "qwen2", "qwen3"))
def test_a_new_models_tokenizer_is_the_one_that_was_trained(tmp_path, architecture):
    """Transformers has rules of its own for the tokenizer of some architectures."""
    from stages.base_model import Config, new_model, train_tokenizer
    from stages.chat import load_tokenizer

    tokenizer = train_tokenizer(["what is 12 plus 34? caf\u00e9 2024"] * 9, 300, 64, architecture)
    new_model(
        Config(architecture=architecture, hidden_size=32, num_attention_heads=2, num_key_value_heads=1),
        len(tokenizer),
        tokenizer,
        0,
    ).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    for text in ("what is 12 plus 34? cafe\u0301 2024", " a\n\n  b\t\u00df \u4e2d 1,000"):
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"] and loaded.decode(
            loaded(text)["input_ids"]
        ) in (text, text.replace("e\u0301", "\u00e9"))
