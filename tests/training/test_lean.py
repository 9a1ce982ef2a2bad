"""The training forward against the models' own, and its written-out backward against autograd's and finite
differences.
"""

import numpy as np
import pytest
import torch

from stages.batching import choose_form, collate, make_item, pad
from stages.models import lean, varlen
from stages.models.modeling import hidden_states
from tests.second_device import DEVICE, second_device, sequenced

FAMILIES = ("llama", "llama-bias", "mistral", "qwen2", "qwen3")


def build(family: str, dtype=torch.float32, layers: int = 2):
    from transformers import AutoConfig, AutoModelForCausalLM

    extra = {"llama-bias": {"attention_bias": True, "mlp_bias": True}, "mistral": {"sliding_window": None}}.get(
        family, {}
    )
    config = AutoConfig.for_model(
        family.split("-")[0],
        vocab_size=61,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        **extra,
    )
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():  # gains off 1 and biases off 0, or their gradients go unseen
            if p.ndim == 1:
                p.add_(0.3 * torch.randn_like(p))
            else:
                p.mul_(4)
    return model.to(dtype)


def trees(seed=0, n=5, short=False):
    rng = np.random.default_rng(seed)
    items = []
    for i in range(n):
        prompt = rng.integers(1, 61, rng.integers(0, 90 if not short else 6)).tolist()
        responses = [rng.integers(1, 61, rng.integers(1, 80 if not short else 5)).tolist() for _ in range(1 + i % 4)]
        items.append(make_item(str(i), prompt, responses, [[1] * len(r) for r in responses]))
    return items


def own_forward(model, batch, form):
    rows = pad(batch, form)
    out = model.base_model(
        input_ids=rows.ids_BT, position_ids=rows.positions_BT, attention_mask=rows.attention_B1TT, use_cache=False
    ).last_hidden_state
    return out.flatten(0, 1)[rows.where_U]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ("rows", "tree"))
def test_states_and_gradients_are_the_models_own(family, form):
    """float64 weights; the model's own norms and rotary tables round to float32, which is the tolerance."""
    model = build(family, torch.float64)
    assert lean.why_not(model) is None
    batch = collate(trees())
    weights = torch.randn(len(batch.ids_U), 32, dtype=torch.float64)
    seen = []
    for forward in (lambda: hidden_states(model, batch), lambda: own_forward(model, batch, form)):
        model.zero_grad(set_to_none=True)
        out = forward()
        (out * weights).sum().backward()
        seen.append((out.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}))
    (ours, our_grads), (theirs, their_grads) = seen
    assert torch.allclose(ours, theirs, atol=2e-5)
    for name, grad in their_grads.items():
        assert torch.allclose(our_grads[name], grad, atol=1e-5 * float(grad.abs().max())), name


@pytest.mark.parametrize("mode", (torch.inference_mode, torch.no_grad, torch.enable_grad))
def test_who_asks_first_does_not_decide_how_long_groups_attend(mode):
    """Reference log-probs come first in one run and an update in its continuation; both must add in the same order."""
    lean._keeps_sums.cache_clear()
    with mode():
        assert lean._keeps_sums()


@pytest.mark.parametrize("family", ("llama", "qwen3"))
@pytest.mark.parametrize(
    "prompt, responses",
    ((85, (64,) * 8), (30, (40, 7, 7, 130, 1, 64)), (1, (200, 2, 200)), (150, (1, 1, 1, 150, 150, 150))),
)
def test_long_groups_attend_part_by_part(family, prompt, responses, monkeypatch):
    """A group whose responses are not multiplied with each other: values and every gradient are those behind the mask,
    in float64 to 1e-12.
    """
    model = build(family, torch.float64)
    rng = np.random.default_rng(7)
    item = make_item(
        "0",
        rng.integers(1, 61, prompt).tolist(),
        [rng.integers(1, 61, n).tolist() for n in responses],
        [[1] * n for n in responses],
    )
    batch = collate([item, *trees(2, 1, short=True)])
    plan = lean.blocks(batch.segments, torch.device("cpu"), torch.float64, 8)
    assert plan[0].tree == (prompt, responses)
    weights = torch.randn(len(batch.ids_U), 32, dtype=torch.float64)
    seen = []
    for possible in (True, False):
        monkeypatch.setattr(lean, "_keeps_sums", lambda possible=possible: possible)
        model.zero_grad(set_to_none=True)
        out = hidden_states(model, batch)
        (out * weights).sum().backward()
        seen.append([out.detach(), *(p.grad.clone() for p in model.parameters())])
    for ours, masked in zip(*seen):
        assert torch.allclose(ours, masked, rtol=0, atol=1e-12 * max(1.0, float(masked.abs().max())))


class Sequenced(torch.autograd.Function):
    """``varlen.attended`` by its definition, in any type."""

    @staticmethod
    def forward(ctx, q, k, v, plan, scale, window=None):
        ctx.save_for_backward(q, k, v)
        ctx.how = plan.queries, plan.keys, scale, window
        return sequenced(q, k, v, *ctx.how)

    @staticmethod
    def backward(ctx, grad):
        return *sequenced(*ctx.saved_tensors, *ctx.how, grad), None, None, None


UNEVEN = ((85, (64,) * 8), (30, (40, 7, 0, 7, 130, 1)), (1, (200, 2)), (0, (30, 89, 1)), (12, (0, 5, 0)), (9, ()))


def test_layers_of_another_window_share_the_plan_of_a_micro_batch(monkeypatch):
    from tests import architectures

    model = architectures.build("gemma3", torch.float64)
    batch = collate([make_item("a", list(range(1, 12)), [[4, 5], [6, 7, 8]], [[1] * 2, [1] * 3])])
    planned, windows, plain = [], set(), varlen.sequences
    monkeypatch.setattr(varlen, "attended", Sequenced.apply)
    monkeypatch.setattr(varlen, "sequences", lambda *given: planned.append(1) or plain(*given))
    with torch.no_grad():
        behind = lean.states(model, batch.ids_U, batch.positions_U, batch.segments)
        monkeypatch.setattr(varlen, "takes", lambda device, dtype, head_dim, window, cap: windows.add(window) or True)
        ours = lean.states(model, batch.ids_U, batch.positions_U, batch.segments)
    assert len(windows) == 2 and len(planned) == 1
    assert torch.allclose(ours, behind, rtol=0, atol=1e-12 * float(behind.abs().max()))


@pytest.mark.parametrize("recompute", (False, True))
@pytest.mark.parametrize("family, kernel", (("llama", True), ("qwen3", True), ("llama", False), ("qwen3", False)))
def test_other_devices_attend_as_behind_the_mask(family, kernel, recompute, monkeypatch):
    """The plans of a GPU, with and without a kernel for the type, done here: values and every gradient are those behind
    the mask, in float64 to 1e-12.
    """
    model = build(family, torch.float64)
    rng = np.random.default_rng(7)
    ids = lambda n: rng.integers(1, 61, n).tolist()
    items = [
        make_item(str(i), ids(prompt), [ids(n) for n in responses], [[1] * n for n in responses])
        for i, (prompt, responses) in enumerate(UNEVEN)
    ]
    batch = collate([*items, *trees(2, 1, short=True)])
    monkeypatch.setattr(lean, "_keeps_sums", lambda: False)
    monkeypatch.setattr(varlen, "attended", Sequenced.apply)
    plain, weights, seen = lean.blocks, torch.randn(len(batch.ids_U), 32, dtype=torch.float64), []

    def elsewhere(segments, *how):
        if not kernel:
            return [lean.Block(p + sum(r), bands=(p, tuple(r))) for p, r in segments]
        with monkeypatch.context() as patch:
            patch.setattr(varlen, "takes", lambda *given: True)
            return plain(segments, *how)

    for plan in (plain, elsewhere):
        monkeypatch.setattr(lean, "blocks", plan)
        model.zero_grad(set_to_none=True)
        out = lean.states(model, batch.ids_U, batch.positions_U, batch.segments, recompute=recompute)
        (out * weights).sum().backward()
        seen.append([out.detach(), *(p.grad.clone() for p in model.parameters())])
    for masked, ours in zip(*seen):
        assert torch.allclose(ours, masked, rtol=0, atol=1e-12 * max(1.0, float(masked.abs().max())))


def test_no_mask_is_larger_than_a_block_of_short_items():
    """Planned without computing, for a device that is not the CPU and has no kernel for it."""
    plan = lean.blocks(
        [(10, [5, 5]), (20, [4]), (3000, [9000] * 3 + [100] * 40), (700, [2000]), (0, [1500, 1500])],
        torch.device("meta"),
        torch.float32,
        8,
    )
    assert [b.length for b in plan] == [44, 34000, 2700, 3000]
    assert [b.mask is not None for b in plan] == [True, False, False, False]
    assert [b.bands is not None for b in plan] == [False, True, False, True]


@pytest.mark.parametrize(
    "dtype, head_dim, window, cap, takes",
    (
        (torch.bfloat16, 64, None, None, True),
        (torch.bfloat16, 64, 4096, None, True),
        (torch.bfloat16, 60, None, None, False),
        (torch.float16, 256, None, None, True),
        (torch.bfloat16, 320, None, None, False),
        (torch.bfloat16, 64, None, 30.0, False),
        (torch.float32, 60, None, None, True),
        (torch.float32, 62, None, None, False),
        (torch.float32, 64, 4096, None, False),
        (torch.float64, 64, None, None, False),
    ),
)
def test_what_the_kernels_of_a_gpu_take(dtype, head_dim, window, cap, takes, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    tried = lambda device, kind, windowed: kind == dtype and windowed == (window is not None)
    monkeypatch.setattr(varlen, "holds", tried)
    assert varlen.takes(torch.device("cuda:0"), dtype, head_dim, window, cap) == takes
    assert not varlen.takes(torch.device("cpu"), dtype, head_dim, window, cap)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert varlen.takes(torch.device("cuda:0"), dtype, head_dim, window, cap) == (takes and dtype == torch.float32)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(varlen, "holds", lambda *given: False)
    assert not varlen.takes(torch.device("cuda:0"), dtype, head_dim, window, cap)


@pytest.mark.parametrize(
    "dtype, windowed", ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True))
)
def test_a_kernel_is_tried_before_it_is_used(dtype, windowed, monkeypatch):
    """On the second device: right as it is; not with one token fewer in the window, other gradients, or none at all.
    No room for the few tokens says nothing of the kernel.
    """
    device = torch.device(DEVICE)
    with second_device(monkeypatch):
        varlen.holds.cache_clear()
        with torch.no_grad():
            assert varlen.holds(device, dtype, windowed)
        attended = varlen.attended
        for broken in (
            lambda *given: attended(*given[:5], 2) if windowed else attended(*given) * 1.2,
            lambda q, k, v, *how: attended(q, k.detach() + 0 * k, v, *how),
            lambda *given: torch.ops.aten._no_such_function(*given),
        ):
            varlen.holds.cache_clear()
            monkeypatch.setattr(varlen, "attended", broken)
            with pytest.warns(UserWarning, match="attend one by one"):
                assert not varlen.holds(device, dtype, windowed)
        varlen.holds.cache_clear()

        def full(*given):
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(varlen, "attended", full)
        with pytest.raises(torch.OutOfMemoryError):
            varlen.holds(device, dtype, windowed)
        monkeypatch.setattr(varlen, "attended", attended)
        assert varlen.holds(device, dtype, windowed)
    varlen.holds.cache_clear()


@pytest.mark.parametrize("family", ("llama-bias", "qwen3"))
def test_backward_equals_finite_differences(family):
    model = build(family, torch.float64)
    batch = collate(trees(1, 3, short=True))
    direction = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    weights = torch.randn(len(batch.src_N), 32, dtype=torch.float64)

    def value():
        return (hidden_states(model, batch, batch.src_N) * weights).sum()

    value().backward()
    for name, p in model.named_parameters():
        exact = float((p.grad * direction[name]).sum())
        original, step = p.detach().clone(), 1e-5
        with torch.no_grad():
            p.copy_(original + step * direction[name])
            up = float(value())
            p.copy_(original - step * direction[name])
            down = float(value())
            p.copy_(original)
        assert (up - down) / (2 * step) == pytest.approx(exact, rel=2e-6, abs=1e-7), name


def test_positions_read_and_chunk_size_change_nothing(monkeypatch):
    model = build("qwen3", torch.float64)
    batch = collate(trees(2))
    whole = hidden_states(model, batch)
    assert torch.allclose(hidden_states(model, batch, batch.src_N), whole[batch.src_N], atol=1e-12)
    weights = torch.randn_like(whole)
    grads = []
    for chunk, block in ((512, 256), (7, 256), (512, 1)):
        monkeypatch.setattr(lean, "CHUNK", chunk)
        monkeypatch.setattr(lean, "BLOCK", block)
        model.zero_grad(set_to_none=True)
        (hidden_states(model, batch) * weights).sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for other in grads[1:]:
        assert torch.allclose(other, grads[0], rtol=0, atol=1e-12 * float(grads[0].abs().max()))


def test_recomputing_layers_gives_the_same_gradient():
    model = build("llama")
    batch = collate(trees(3))
    grads = []
    for recompute in (False, True):
        model.zero_grad(set_to_none=True)
        lean.states(
            model, batch.ids_U, batch.positions_U, batch.segments, recompute=recompute
        ).square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(*grads)


def test_lora_products_are_pefts():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        build("qwen2", torch.float64), LoraConfig(r=3, lora_alpha=8, target_modules="all-linear", lora_dropout=0.0)
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.05)
    assert lean.why_not(model) is None
    batch = collate(trees(4))
    weights = torch.randn(len(batch.ids_U), 32, dtype=torch.float64)
    seen = []
    for forward in (lambda: hidden_states(model, batch), lambda: own_forward(model.get_base_model(), batch, "rows")):
        model.zero_grad(set_to_none=True)
        (forward() * weights).sum().backward()
        seen.append({n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad})
    assert seen[0] and all("lora" in n for n in seen[0])
    for name, grad in seen[1].items():
        assert torch.allclose(seen[0][name], grad, atol=1e-5 * float(grad.abs().max())), name
    with model.disable_adapter():
        plain = hidden_states(model, batch)
        assert torch.allclose(plain, own_forward(model.get_base_model(), batch, "rows"), atol=2e-5)


def test_bfloat16_products_stay_near_float32():
    model = build("qwen3")
    batch = collate(trees(5))
    exact = hidden_states(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        low = hidden_states(model, batch)
    assert low.dtype == torch.float32 and not torch.equal(low, exact)
    assert float((low - exact).norm() / exact.norm()) < 0.05
    low.square().mean().backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.dtype == torch.float32 for p in model.parameters())


def test_padded_forms_agree_and_the_cheaper_one_is_chosen():
    model = build("llama")
    batch = collate(trees(6))
    assert torch.allclose(own_forward(model, batch, "rows"), own_forward(model, batch, "tree"), atol=1e-5)
    assert (
        choose_form([(100, [10, 10])]) == "tree"
        and choose_form([(3, [50, 50])]) == "rows"
        and choose_form([(0, [7])]) == "rows"
    )


def test_refusals_name_the_reason():
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    shape = dict(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    assert "GPT2Model" in lean.why_not(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11)))
    assert "activation 'gelu'" in lean.why_not(LlamaForCausalLM(LlamaConfig(hidden_act="gelu", **shape)))
    partial = LlamaForCausalLM(LlamaConfig(**shape))
    partial.model.rotary_emb.inv_freq = partial.model.rotary_emb.inv_freq[:2]
    assert "partial" in lean.why_not(partial)


def test_copies_of_keys_are_not_kept_for_backward(monkeypatch):
    """Of a prompt of 200 tokens with 8 responses of 8: 1664 rows of keys and values for 264 tokens, in every layer."""
    model = build("llama", torch.float64)
    batch = collate([make_item("0", [5] * 200, [[7] * 8] * 8, [[1] * 8] * 8)])
    monkeypatch.setattr(varlen, "takes", lambda *given: True)
    monkeypatch.setattr(varlen, "attended", Sequenced.apply)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(len(t) if t.dim() else 0), t)[1], lambda t: t):
        out = lean.states(model, batch.ids_U, batch.positions_U, batch.segments)
    assert len(batch.ids_U) in kept and 200 + 8 * 208 not in kept
    out.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_sequences_of_a_micro_batch():
    """By hand: a conversation with several responses is its prompt, and each of them behind the prompt."""
    plan = varlen.sequences([(3, (4, 2)), (0, (5, 3)), (2, (0, 6)), (4, ()), (0, ())], torch.device("cpu"))
    assert plan.queries.tolist() == [0, 3, 7, 9, 14, 17, 25, 29] and plan.queries.dtype == torch.int32
    assert plan.keys.tolist() == [0, 3, 10, 15, 20, 23, 31, 35] and plan.longest == (8, 8)
    assert plan.copies.rows.tolist() == [0, 1, 2, *range(7), 0, 1, 2, 7, 8, *range(9, 29)]
    starts, places = plan.copies.starts.tolist(), plan.copies.places.tolist()
    assert starts == [0, 3, 6, 9, *range(10, 36)] and places[:10] == [0, 3, 10, 1, 4, 11, 2, 5, 12, 6]
    assert varlen.sequences([(1, (2, 3))], torch.device("cpu")).copies.rows.tolist() == [0, 0, 1, 2, 0, 3, 4, 5]
    assert varlen.sequences([(0, (5, 3)), (2, (6,)), (4, ())], torch.device("cpu")).copies is None


def test_few_shapes_reach_a_gpus_products():
    """Rows of zeros behind, 32 lengths at most between two powers of two: what is computed in vain is a share."""
    lengths = [len(lean.filled(torch.empty(n, 0))) for n in range(4097)]
    assert lengths == sorted(lengths) and lengths[0] == 0 and lengths[1:9] == [8] * 8 and lengths[4096] == 4096
    for n, length in enumerate(lengths):
        assert n <= length < n + max(8, n / 16) and length % 8 == 0
    for k in range(8, 12):
        assert len({length for length in lengths if 2**k < length <= 2 ** (k + 1)}) == 32
    x = torch.arange(1.0, 11.0).view(5, 2)
    assert torch.equal(lean.filled(x)[:5], x) and not lean.filled(x)[5:].any() and lean.filled(x).shape == (8, 2)
    assert torch.equal(lean.filled(x, 7), torch.cat([x, torch.zeros(2, 2)]))
    assert lean.filled(torch.tensor([3, 4]), 5).tolist() == [3, 4, 0, 0, 0]
    assert lean.filled(x, 5) is x and lean.filled(None) is None
