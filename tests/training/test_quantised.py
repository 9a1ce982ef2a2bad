"""QLoRA: frozen linear layers in 4 bits. Every stage computes the model of the dequantised matrices, to the bit, in an
eighth of the memory.
"""

import copy
import gc
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("bitsandbytes", reason="the extra `qlora` is not installed")

from stages.models import frozen, memory, pending, quantised  # noqa: E402
from stages.models.adapters import AdapterOff  # noqa: E402
from stages.batching import collate, make_item  # noqa: E402
from stages.chat import load_tokenizer  # noqa: E402
from stages.harness import execute  # noqa: E402
from stages.models.modeling import load_frozen, load_policy, policy_to_train, save_policy, save_weights, target_logps  # noqa: E402
from stages.registry import get_spec  # noqa: E402
from stages.running import allocator  # noqa: E402
from stages.decoding.sampler import Sampler  # noqa: E402
from stages.decoding.sampling import SamplingParams  # noqa: E402
from stages.settings import OptimizerConfig  # noqa: E402
from storage.files import tree_digest  # noqa: E402
from tests.architectures import build, items_of  # noqa: E402
from tests.common import silent  # noqa: E402
from tests.sampler.test_replay import as_on_cuda  # noqa: E402, F401
from tests.training.fresh import scores, scores_elsewhere
from tests.training.test_frozen import RL, SFT, STAGES, to_train, trained  # noqa: E402
from tests.training.test_invariance import text_items  # noqa: E402

#: Quantiles of a normal distribution, scaled into [-1, 1] (Dettmers et al. 2023, appendix E).
LEVELS = torch.tensor(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ]
)


def rounded(weight, scales):
    """Each value by the level nearest to its share of its block's scale."""
    flat = torch.nn.functional.pad(weight.reshape(-1), (0, -weight.numel() % 64)).view(-1, 64)
    share = torch.where(scales[:, None] > 0, flat / scales[:, None], 0.0)
    return share, (LEVELS[(share[..., None] - LEVELS).abs().argmin(-1)] * scales[:, None]).reshape(-1)[
        : weight.numel()
    ].view(weight.shape)


def made(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def in_4_bits(model) -> set[str]:
    return {n for n, p in model.named_parameters() if quantised.is_quantised(p)}


@pytest.mark.parametrize("shape", ((64, 64), (48, 10), (33, 7), (3, 5), (1, 64), (128, 2)))
def test_every_value_is_the_nearest_level_of_its_block(shape):
    weight = made(*shape)
    weight.view(-1)[:64] = 0.0  # a block of zeros stays one
    kept = quantised.quantise(weight, "nf4")
    scales = torch.nn.functional.pad(weight.reshape(-1), (0, -weight.numel() % 64)).view(-1, 64).abs().amax(1)
    assert torch.equal(kept.parts["scales"][scales > 0], scales[scales > 0])
    assert torch.equal(kept.dense(), rounded(weight, scales)[1]) and kept.shape == weight.shape
    assert quantised.nbytes(kept) == memory.nf4_bytes(weight.numel(), "nf4")
    assert torch.equal(quantised.quantise(kept.dense(), "nf4").dense(), kept.dense())


@pytest.mark.parametrize("shape", ((64, 64), (33, 7), (300, 128)))
def test_double_quantisation_keeps_the_scales_in_8_bits(shape):
    weight = made(*shape)
    kept, exact = (quantised.quantise(weight, form) for form in ("nf4_double", "nf4"))
    scales, true = kept.parts["scales"], exact.parts["scales"]
    assert (
        scales.dtype == torch.uint8
        and torch.equal(kept.parts["packed"], exact.parts["packed"])
        and kept.parts["offset"] == true.mean()
    )
    found = (kept.dense() / exact.dense()).nan_to_num(1.0)
    assert 0 < (found - 1).abs().max() < 0.02
    shift = (true - true.mean()).split(256)
    assert torch.equal(kept.parts["scale_of_scales"], torch.stack([part.abs().max() for part in shift]))
    assert (
        quantised.nbytes(kept)
        == memory.nf4_bytes(weight.numel(), "nf4_double")
        < memory.nf4_bytes(weight.numel(), "nf4")
    )


def test_it_is_a_float32_tensor_to_whoever_reads_it():
    weight = made(32, 10)
    kept = quantised.quantise(weight, "nf4")
    dense, x = kept.dense(), made(4, 10, seed=1)
    assert kept.dtype == torch.float32 and not kept.requires_grad and isinstance(kept, torch.nn.Parameter)
    assert (
        torch.equal(x @ kept.t(), x @ dense.t())
        and torch.equal(kept + 1, dense + 1)
        and torch.equal(kept[3:5], dense[3:5])
    )
    assert torch.equal(kept.to(torch.bfloat16), dense.bfloat16()) and not quantised.is_quantised(
        kept.to(torch.bfloat16)
    )
    for part, expected in zip(kept.split([20, 12]), dense.split([20, 12])):
        assert quantised.is_quantised(part) and torch.equal(part.dense(), expected)
        assert all(torch.equal(a.dense(), b) for a, b in zip(part.split(7), expected.split(7)))
    twin = copy.deepcopy(kept)
    assert (
        quantised.is_quantised(twin)
        and twin.parts["packed"] is kept.parts["packed"]
        and torch.equal(twin.dense(), dense)
    )
    assert torch.equal(torch.zeros(32, 10).copy_(kept), dense)
    with pytest.raises(ValueError, match="frozen_dtype=auto"), torch.no_grad():
        kept.mul_(2)
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantised.quantise(weight.index_fill(1, torch.tensor(3), float("inf")), "nf4")


@pytest.mark.parametrize("turned", (False, True))
def test_a_product_has_the_gradient_of_the_dequantised_weight_and_keeps_none(turned):
    kept, x = quantised.quantise(made(10, 6), "nf4"), made(4, 10 if turned else 6, seed=1).double().requires_grad_()
    bias = made(6 if turned else 10, seed=2).double()
    run = lambda x: quantised.product(x, kept, bias, turned)  # noqa: E731
    dense = kept.dense().double()
    assert torch.allclose(run(x), x @ (dense if turned else dense.t()) + bias, rtol=1e-14)
    assert torch.autograd.gradcheck(run, (x,), check_forward_ad=True)
    found = run(x)
    assert all(quantised.is_quantised(t) for t in found.grad_fn.saved_tensors)


@pytest.fixture(scope="session")
def dequantised(tiny, tmp_path_factory):
    """{form: {model: directory of the float32 model whose linear layers are the dequantised ones}}."""
    from safetensors.torch import load_file, save_file
    import shutil

    found = {}
    for form in quantised.FORMS:
        for which in ("policy", "other", "reward"):
            target = tmp_path_factory.mktemp(form) / which
            shutil.copytree(tiny[which], target)
            weights = load_file(target / "model.safetensors")
            for name, value in weights.items():
                if value.ndim == 2 and not memory.outside_layers(name):
                    weights[name] = quantised.quantise(value, form).dense()
            save_file(weights, target / "model.safetensors", {"format": "pt"})
            found.setdefault(form, {})[which] = str(target)
    return found


@pytest.mark.parametrize("form", quantised.FORMS)
@pytest.mark.parametrize(
    "settings",
    (
        {},
        {"compute_dtype": "bfloat16"},
        {"forward": "model"},
        {"forward": "model", "compute_dtype": "bfloat16"},
        {"activation_checkpointing": True},
        {"forward": "model", "activation_checkpointing": True},
        {"lora_targets": "q_proj,lm_head"},
        {"lora_modules_to_save": "down_proj", "lora_targets": "q_proj"},
    ),
)
def test_training_is_that_of_the_adapter_on_the_dequantised_model(settings, form, tiny, dequantised):
    """Losses, gradients (as they move the adapter) and log-probs of trained model and reference, in every way that the
    layers are computed.
    """
    (kept, steps), (wide, expected) = (
        trained(tiny["policy"], frozen_dtype=form, **settings),
        trained(dequantised[form]["policy"], frozen_dtype="float32", **settings),
    )
    trained_whole = {n for n, p in kept.named_parameters() if ".modules_to_save." in n}
    # the copy that is trained starts at the weights as they were, the other model's at the rounded ones
    if trained_whole:
        assert not in_4_bits(kept) & trained_whole and all(p.dtype == torch.float32 for n, p in kept.named_parameters())
        return
    assert in_4_bits(kept) == {
        n
        for n, p in kept.named_parameters()
        if p.ndim == 2 and not p.requires_grad and "embed" not in n and "lm_head" not in n
    } and not in_4_bits(wide)
    assert steps == expected and steps[0]["loss"] != steps[1]["loss"]
    items = text_items(np.random.default_rng(9))
    with torch.no_grad():
        for view in (lambda m: m, AdapterOff):
            for model in (kept, wide):
                model.eval()
            assert torch.equal(*(target_logps(view(m), collate(items))[0] for m in (kept, wide)))
    if not settings:
        with torch.no_grad():
            assert torch.equal(
                target_logps(AdapterOff(kept), collate(items))[0],
                target_logps(load_frozen(tiny["policy"], how=form), collate(items))[0],
            )
    mine, theirs = (dict(m.named_parameters()) for m in (kept, wide))
    assert all(torch.equal(mine[n], theirs[n]) for n in mine if ".lora_" in n)


def test_the_sampler_samples_what_the_trainer_computes(tiny, dequantised):
    (kept, _), (wide, _) = trained(tiny["policy"], frozen_dtype="nf4"), trained(dequantised["nf4"]["policy"])
    prompts, seeds = [[1, 40, 50, 60], [1, 70, 80]], [[1, 2], [3, 4]]
    for dtype, lean in ((torch.float32, None), (torch.float32, False), (torch.bfloat16, None), (torch.bfloat16, False)):
        mine, theirs = (Sampler(m, None, dtype=dtype, lean=lean) for m in (kept, wide))
        assert mine.exact_logps == theirs.exact_logps == (dtype == torch.float32)
        mine, theirs = (s.generate(prompts, SamplingParams(max_new_tokens=8), seeds) for s in (mine, theirs))
        assert mine == theirs
    assert in_4_bits(kept)


def test_the_sampler_keeps_its_copy_between_calls(tiny, as_on_cuda):  # noqa: F811
    model, _ = trained(tiny["policy"], frozen_dtype="nf4")
    sampler, request = Sampler(model, None), ([[1, 40, 50, 60]], SamplingParams(max_new_tokens=8), [[1, 2]])
    first = sampler.generate(*request)
    copied = sampler.held.decoder.kept.parts[1].qkv
    assert sampler.generate(*request) == first and sampler.held.decoder.kept.parts[1].qkv is copied


@pytest.mark.parametrize("case", STAGES)
def test_a_stage_publishes_the_bytes_of_the_dequantised_model(case, tiny, dequantised, data, spec):
    stage, config, rows, more = STAGES[case]
    if config.get("preset") == "trpo":  # without a critic, which is trained from the weights as they were
        config = {**config, "advantage": "reward_minus_baseline", "baseline": "table", "baseline_samples": 2}
    found = {}
    for how, models in (("nf4", tiny), ("float32", dequantised["nf4"])):
        inputs = {
            "model": models["policy"],
            "data": data[rows],
            **{name: models[which] for name, which in more.items()},
        }
        made = spec(stage, {**config, "frozen_dtype": how}, inputs, how)
        result = execute(made, silent)
        out = Path(made["workdir"], "out")
        found[how] = (
            {p.name: tree_digest(p) for p in out.iterdir()},
            Path(made["workdir"], "metrics.jsonl").read_bytes(),
            result["summary"],
        )
        assert any(w["code"] == "frozen_rounded" for w in result["warnings"]) == (how == "nf4")
    if stage == "align":  # cached log-probs of a reference are marked by how it is kept
        for digests, *_ in found.values():
            digests.pop("ref_logps", None)
    assert found["nf4"] == found["float32"]


def test_scores_come_back_to_the_bit_in_a_fresh_process(tiny, tmp_path, forks):
    """The base in 4 bits with the adapter gives the trained scores; the published directory those of its own weights,
    which are the dequantised ones with the adapter.
    """
    model, _ = trained(tiny["policy"], frozen_dtype="nf4")
    mine = scores(model)
    save_policy(model, load_tokenizer(tiny["policy"]), tmp_path / "out", base="model:base")
    merged = scores(load_policy(str(tmp_path / "out")))
    assert merged == pytest.approx(mine, abs=1e-4)
    policy, out = tiny["policy"], str(tmp_path / "out")
    assert scores_elsewhere(
        forks,
        f"PeftModel.from_pretrained(load_frozen({policy!r}, how='nf4'), {out + '/adapter'!r})",
        f"load_policy({out!r})",
    ) == [mine, merged]
    assert json.loads(Path(tmp_path, "out/config.json").read_text())[
        "dtype"
    ] == "float32" and "quantization_config" not in json.loads(Path(tmp_path, "out/config.json").read_text())


@pytest.mark.parametrize(
    "name", ("llama", "llama tied", "gemma3", "phi3", "glm4", "mixtral", "gpt2", "deepseek-v3", "qwen3.5")
)
@pytest.mark.parametrize("adapter", (False, True))
def test_any_architecture_computes_the_dequantised_model(name, adapter, tmp_path):
    """Log-probs and an adapter's gradient, read tensor by tensor; and what is published."""
    build(name).bfloat16().save_pretrained(tmp_path)
    path, items, found = str(tmp_path), items_of((30, (6, 9)), (12, (5, 3)), (4, (3, 4))), []
    for widened in (False, True):
        model = to_train(path, frozen_dtype="nf4")[0] if adapter else load_frozen(path, how="nf4")
        kept = in_4_bits(model)
        if widened:
            frozen.widen(model)
            assert not in_4_bits(model)
        if adapter:
            with torch.no_grad():
                for n, p in model.named_parameters():
                    if ".lora_B" in n:
                        p.fill_(0.01)
        logps = target_logps(model.train(), collate(items))[0]
        gradients = (
            torch.autograd.grad(logps.sum(), [p for p in model.parameters() if p.requires_grad]) if adapter else ()
        )
        if adapter:
            save_weights(model, tmp_path / str(widened))
        found.append((kept, logps.detach(), gradients))
    (kept, mine, gradients), (_, expected, others) = found
    assert kept and torch.equal(mine, expected) and all(torch.equal(a, b) for a, b in zip(gradients, others))
    if adapter:
        assert {p.name: p.read_bytes() for p in (tmp_path / "False").iterdir()} == {
            p.name: p.read_bytes() for p in (tmp_path / "True").iterdir()
        }


@pytest.mark.parametrize("form", quantised.FORMS)
@pytest.mark.parametrize("name", ("llama", "llama tied", "gemma3", "mixtral", "gpt2"))
def test_the_plan_knows_what_a_frozen_model_takes(name, form, tmp_path):
    for low in (False, True):
        model = build(name)
        (model.bfloat16() if low else model).save_pretrained(tmp_path)
        held = sum(
            quantised.nbytes(p) if quantised.is_quantised(p) else p.nbytes
            for p in load_frozen(str(tmp_path), how=form).parameters()
        )
        assert memory.shape_of(tmp_path).frozen_bytes(form) == held


@pytest.mark.parametrize("stage,rows", (("sft", "demonstrations"), ("rl", "prompts"), ("reward_model", "pairs")))
def test_the_plan_of_memory_is_what_is_held(stage, rows, tiny, data, spec, monkeypatch):
    from stages import preflight
    from transformers import PreTrainedModel

    alive = lambda: {id(one): one for one in gc.get_objects() if isinstance(one, PreTrainedModel)}  # noqa: E731
    gc.collect()
    before, held = set(alive()), []

    def looked_at(running, trainer, *arguments, **more):
        gc.collect()
        held.append(sum(preflight.held_bytes([one for key, one in alive().items() if key not in before], [trainer])))
        raise InterruptedError

    monkeypatch.setattr(preflight, "rl_preflight" if stage == "rl" else "preflight", looked_at)
    settings = {**(RL if stage == "rl" else SFT), "frozen_dtype": "nf4"}
    with pytest.raises(InterruptedError):
        execute(spec(stage, settings, {"model": tiny["policy"], "data": data[rows]}, "nf4"), silent)
    config = get_spec(stage).config(**settings)
    roles, shape = get_spec(stage).roles(config, {"model", "data"}), memory.shape_of(tiny["policy"])
    found = memory.need(roles, {"model": shape}, config)
    assert found.states == pytest.approx(held[0], rel=0.02)
    refused = memory.refusal(
        stage, roles, {"model": shape}, config.model_copy(update={"frozen_dtype": "auto"}), found.states
    )
    assert f"frozen_dtype=nf4 (needs {memory.shown(found.states)})" in refused


def grown(small: str, large: str, how: str, out: str) -> None:
    """In a process of its own: by how much it grows at most, in bytes, while ``large`` is loaded under an adapter, and
    by the end of two passes over it.
    """
    allocator.return_freed_memory()  # so that what was freed does not count

    def step(path):
        class Stage:
            config = OptimizerConfig(lora_rank=4, frozen_dtype=how)
            device = "cpu"
            warn = log = staticmethod(lambda *a: None)
            seed_for = staticmethod(lambda *a: 7)

        Stage.path = staticmethod(lambda name: path)
        model = policy_to_train(Stage)
        yield
        for _ in range(2):
            target_logps(model.train(), collate([make_item("a", [1, 2, 3], [[4, 5]], [[1, 1]])]))[0].sum().backward()
        yield

    def held():  # that is in no file
        return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) * 1024

    def watch():
        while True:
            most[0] = max(most[0], held())
            time.sleep(0.002)

    list(step(small))  # whatever is imported and made once
    start, most = held(), [0]
    threading.Thread(target=watch, daemon=True).start()
    Path(out).write_text(json.dumps([most[0] - start for _ in step(large)]))


def test_the_peak_of_memory_falls(tmp_path, forks):
    """A model of 216 MiB in float32, loaded under an adapter and taken through a step, in processes of their own:
    nothing of it is ever whole in memory.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=12,
    )
    LlamaForCausalLM(config).save_pretrained(large := tmp_path / "large")
    build("llama").save_pretrained(small := tmp_path / "small")
    shape, found = memory.shape_of(large), {}
    for how in ("bfloat16", "nf4"):
        forks.run(small, large, how, tmp_path / how, target="tests.training.test_quantised:grown")
        found[how] = json.loads((tmp_path / how).read_text())
    planned = {how: shape.frozen_bytes(how) for how in found}
    assert planned["nf4"] < 0.3 * planned["bfloat16"]
    for at in (0, 1):
        assert found["bfloat16"][at] - found["nf4"][at] > 0.6 * (planned["bfloat16"] - planned["nf4"])
    assert found["nf4"][1] < planned["nf4"] + 4 * shape.widest_layer() + (32 << 20)


def test_a_copy_that_samples_meanwhile_shares_what_is_stored(tiny):
    model, _ = to_train(tiny["policy"], frozen_dtype="nf4")
    twin = pending.fill(copy.deepcopy(model)).requires_grad_(False)
    mine, theirs = dict(model.named_parameters()), dict(twin.named_parameters())
    assert in_4_bits(twin) == in_4_bits(model) and all(
        mine[n].parts["packed"] is theirs[n].parts["packed"] for n in in_4_bits(model)
    )
    items = text_items(np.random.default_rng(0))
    with torch.no_grad():
        assert torch.equal(*(target_logps(m.eval(), collate(items))[0] for m in (model, twin)))


def test_what_cannot_be_together_is_refused_with_what_to_write(tiny, data, spec, monkeypatch, tmp_path):
    for settings, said in (
        ({"sharding": "full"}, "sharding=none"),
        ({"lora_dora": True}, "lora_dora=false"),
        ({"forward": "compiled"}, "forward=auto"),
    ):
        with pytest.raises(ValueError, match=said):
            OptimizerConfig(lora_rank=4, frozen_dtype="nf4", **settings)
    with pytest.raises(ValueError, match="nothing is frozen.*lora_rank=16"):
        execute(
            spec(
                "sft",
                {**SFT, "lora_rank": 0, "frozen_dtype": "nf4"},
                {"model": tiny["policy"], "data": data["demonstrations"]},
                "unread",
            ),
            silent,
        )
    build("falcon").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="FalconForCausalLM has none.*frozen_dtype=bfloat16"):
        load_frozen(str(tmp_path), how="nf4")
    monkeypatch.setattr(memory.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'posttrain\[qlora\]'"):
        execute(
            spec(
                "sft",
                {**SFT, "frozen_dtype": "nf4"},
                {"model": tiny["policy"], "data": data["demonstrations"]},
                "absent",
            ),
            silent,
        )
