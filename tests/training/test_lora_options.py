"""Forms of LoRA that peft users know: DoRA, excluded layers, modules trained whole; against peft's own forward, merged,
sampled, resumed and exported.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from stages.batching import collate
from stages.chat import load_tokenizer
from stages.decoding.sampler import Sampler
from stages.decoding.sampling import SamplingParams
from stages.harness import execute
from stages.models import frozen, memory
from stages.models.adapters import AdapterOff, add_lora
from stages.models.modeling import ModelError, load_policy, save_policy, target_logps
from stages.settings import OptimizerConfig
from tests.common import silent
from tests.training.test_frozen import trained
from tests.training.test_invariance import text_items

FORMS = {
    "dora": {"lora_dora": True},
    "dora on the output layer": {"lora_dora": True, "lora_targets": "v_proj,down_proj,lm_head"},
    "excluded": {"lora_exclude": "k_proj,down_proj"},
    "whole modules": {"lora_modules_to_save": "embed_tokens,lm_head"},
    "embedding": {"lora_targets": "q_proj,embed_tokens"},
}


def logps(model, items):
    model.eval()
    with torch.no_grad():
        return target_logps(model, collate(items))[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("base", ("tiny", "half"))
def test_every_form_is_merged_sampled_and_reloaded_as_it_was_trained(form, base, tiny, half, tmp_path):
    """The trained model's log-probs are those of its own forward, of the merged directory, of base and adapter under
    peft, and of what is sampled; off, the base's.
    """
    from peft import PeftModel

    path, items = {"tiny": tiny, "half": half}[base]["policy"], text_items(np.random.default_rng(9))
    model, steps = trained(path, **FORMS[form])
    assert frozen.is_kept(model) == (base == "half")
    mine, start = logps(model, items), logps(load_policy(path), items)
    assert (mine - start).abs().max() > 0.05 and torch.allclose(logps(AdapterOff(model), items), start, atol=2e-6)
    item = items[0]
    ids = torch.tensor([[*item.prompt, *item.responses[0]]])
    with torch.no_grad():
        whole = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), -1)
    own = [
        float(whole[len(item.prompt) + t - 1, token]) for t, token in enumerate(item.responses[0]) if item.masks[0][t]
    ]
    assert logps(model, [item])[: len(own)].tolist() == pytest.approx(own, abs=2e-5)
    found = [
        Sampler(model, None, lean=lean).generate([[1, 40, 50, 60]], SamplingParams(max_new_tokens=8), [[1, 2]])[0]
        for lean in (None, False)
    ]
    assert [c.ids for c in found[0]] == [c.ids for c in found[1]] and found[0][0].logps == pytest.approx(
        found[1][0].logps, abs=1e-4
    )
    save_policy(model, load_tokenizer(path), tmp_path / "out", base="model:base")
    merged = logps(load_policy(str(tmp_path / "out")), items)
    assert torch.allclose(merged, mine, atol=2e-4)
    again = logps(PeftModel.from_pretrained(load_policy(path), str(tmp_path / "out/adapter")), items)
    assert torch.allclose(again, mine, atol=2e-5)
    assert torch.equal(logps(load_policy(str(tmp_path / "out")), items), merged)


@pytest.mark.parametrize("form", ("dora", "whole modules", "embedding"))
def test_what_is_kept_in_bfloat16_trains_to_the_bits_of_float32(form, half):
    (kept, steps), (wide, expected) = (
        trained(half["policy"], frozen_dtype=how, **FORMS[form]) for how in ("auto", "float32")
    )
    assert steps == expected
    mine, theirs = (dict(m.named_parameters()) for m in (kept, wide))
    assert all(torch.equal(mine[n], p) for n, p in theirs.items() if p.requires_grad)


def test_the_first_step_of_dora_is_the_base_whatever_its_weights_are_kept_in(tiny, half):
    items = text_items(np.random.default_rng(1))
    for path, how in ((tiny["policy"], "auto"), (half["policy"], "auto"), (tiny["policy"], "bfloat16")):
        from tests.training.test_frozen import to_train

        model, _ = to_train(path, frozen_dtype=how, lora_dora=True)
        off = logps(AdapterOff(model), items)  # asked first: it is computed as the policy will be
        assert torch.equal(logps(model, items), off)


@pytest.mark.parametrize("turned", (False, True))
def test_doras_merged_weight_is_the_papers(turned):
    """m V / ||V|| with V = W + (alpha / r) B A row by row, and its gradient with ||V|| held: autograd in float64."""
    from stages.models.adapters import merged

    class Layer:
        scaling, active_adapters, fan_in_fan_out = {"default": 0.5}, ["default"], turned

    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    w, a, b, m = draw(6, 4), draw(2, 4).requires_grad_(), draw(6, 2).requires_grad_(), draw(6).requires_grad_()
    hold = lambda weight: {"default": type("Factor", (), {"weight": weight})()}
    Layer.lora_A, Layer.lora_B, Layer.lora_magnitude_vector = hold(a), hold(b), hold(m)
    found = merged(Layer, w.t() if turned else w)
    found = found.t() if turned else found
    v = w + 0.5 * (b @ a)
    length = v.detach().square().sum(1, keepdim=True).sqrt()
    assert torch.allclose(found, m[:, None] * v / length)
    weights = draw(6, 4)
    got = torch.autograd.grad((found * weights).sum(), (a, b, m))
    g = m.detach()[:, None] * weights / length
    assert all(
        torch.allclose(x, y)
        for x, y in zip(
            got, (0.5 * b.detach().t() @ g, 0.5 * g @ a.detach().t(), (weights * v.detach() / length).sum(1))
        )
    )


def test_excluded_layers_have_no_adapter_and_modules_are_trained_whole(tiny, data, spec):
    sft = {"learning_rate": 1e-2, "batch_size": 8, "max_steps": 2, "max_length": 64, "lora_rank": 2}
    before = load_file(Path(tiny["policy"], "model.safetensors"))
    for more, changed in (
        (
            {"lora_exclude": "k_proj,down_proj"},
            lambda n: n.endswith("_proj.weight") and not n.endswith(("k_proj.weight", "down_proj.weight")),
        ),
        (
            {"lora_targets": "q_proj", "lora_modules_to_save": "embed_tokens,lm_head"},
            lambda n: n.endswith(("q_proj.weight", "embed_tokens.weight", "lm_head.weight")),
        ),
    ):
        result = execute(
            spec("sft", {**sft, **more}, {"model": tiny["policy"], "data": data["demonstrations"]}, "one"), silent
        )
        after = load_file(Path(result["outputs"]["model"]["path"], "model.safetensors"))
        assert after.keys() == before.keys() and {n for n in before if not torch.equal(before[n], after[n])} == {
            n for n in before if changed(n)
        }
        config = OptimizerConfig(**{k: v for k, v in {**sft, **more}.items() if k in OptimizerConfig.model_fields})
        model = add_lora(load_policy(tiny["policy"]), config, 0)
        assert memory.lora_parameters(memory.shape_of(tiny["policy"]), config) == sum(
            p.numel() for p in model.parameters() if p.requires_grad
        )
    config = OptimizerConfig(lora_rank=2, lora_dora=True)
    model = add_lora(load_policy(tiny["policy"]), config, 0)
    assert memory.lora_parameters(memory.shape_of(tiny["policy"]), config) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )


def test_modules_that_cannot_be_trained_whole_are_refused(tiny):
    with pytest.raises(ModelError, match="no such module.*embed_tokens"):
        add_lora(load_policy(tiny["policy"]), OptimizerConfig(lora_rank=2, lora_modules_to_save="quack"), 0)
    tied = load_policy(tiny["policy"])
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    with pytest.raises(ModelError, match="one weight for the embedding and the output layer"):
        add_lora(tied, OptimizerConfig(lora_rank=2, lora_modules_to_save="embed_tokens"), 0)
    with pytest.raises(ValueError, match="lora_rank=16"):
        OptimizerConfig(lora_dora=True)


def test_an_adapter_alone_is_exported_for_peft(tiny, data, tmp_path, monkeypatch):
    """posttrain export --adapter: AutoPeftModel finds the base by the path that was given and computes what the merged
    model does.
    """
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    from tests.platform.test_costs import command

    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "home"))
    sft = [
        "stage",
        "sft",
        "--input",
        f"model={tiny['policy']}",
        "--input",
        f"data={data['demonstrations']}",
        "--set",
        "max_steps=2",
        "--set",
        "max_length=64",
        "--set",
        "learning_rate=0.01",
    ]
    plain = command(*sft)["outputs"]["model"]
    adapted = command(*sft, "--set", "lora_rank=4", "--set", "lora_dora=true")["outputs"]["model"]
    assert "no adapter beside its weights" in str(command("export", plain, tmp_path / "no", "--adapter", code=2))
    assert "write --adapter too" in str(command("export", adapted, tmp_path / "no", "--base", "x", code=2))
    command("export", adapted, tmp_path / "adapter", "--adapter", "--base", tiny["policy"])
    command("export", adapted, tmp_path / "whole")
    names = {p.name for p in (tmp_path / "adapter").iterdir()}
    assert {
        "adapter_model.safetensors",
        "adapter_config.json",
        "README.md",
        "tokenizer.json",
    } <= names and "model.safetensors" not in names
    ids = torch.tensor([[1, 40, 50, 60, 70]])
    with torch.no_grad():
        mine, merged = (
            m.eval()(input_ids=ids).logits
            for m in (
                AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter"),
                AutoModelForCausalLM.from_pretrained(tmp_path / "whole"),
            )
        )
        base = AutoModelForCausalLM.from_pretrained(tiny["policy"])(input_ids=ids).logits
    assert torch.allclose(mine, merged, atol=1e-4) and not torch.allclose(mine, base, atol=1e-2)
