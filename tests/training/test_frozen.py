"""Frozen matrices kept in bfloat16: the bits of float32 where the checkpoint is stored so, in every stage that holds a
frozen model, in half the memory.
"""

import gc
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.models import frozen, memory
from stages.models.adapters import AdapterOff
from stages.batching import collate
from stages.models.divergence import divergence
from stages.harness import execute
from stages.models.modeling import (
    Head,
    head_of,
    hidden_states,
    load_frozen,
    load_policy,
    policy_to_train,
    save_policy,
    target_logps,
    top_logps,
)
from stages.chat import load_tokenizer
from stages.registry import get_spec
from stages.decoding.sampler import Sampler
from stages.decoding.sampling import SamplingParams
from stages.settings import OptimizerConfig
from stages.sft import NextToken
from stages.training import Trainer, products
from storage.files import tree_digest
from tests.architectures import build, items_of
from tests.common import silent
from tests.reward.conftest import encoder  # noqa: F401
from tests.training.fresh import scores, scores_elsewhere
from tests.training.test_invariance import text_items
from tests.training.test_lora_reference import RL

SFT = {"learning_rate": 1e-2, "batch_size": 8, "num_train_epochs": 1, "max_length": 64, "lora_rank": 4}


def low(model) -> set[str]:
    return {n for n, p in model.named_parameters() if p.dtype == torch.bfloat16}


def to_train(path, **settings):
    class Stage:
        config = OptimizerConfig(lora_rank=4, learning_rate=1e-2, warmup_ratio=0, **settings)
        device, path = "cpu", None
        warn = log = staticmethod(lambda *a: None)
        seed_for = staticmethod(lambda *a: 7)

    Stage.path = staticmethod(lambda name: path)
    return policy_to_train(Stage), Stage.config


def trained(path, **settings):
    """A policy whose adapter has learned something, and the numbers of its steps."""
    model, config = to_train(path, **settings)
    trainer, steps = Trainer(model, NextToken("token-mean"), config, 3), []
    for seed in range(3):
        steps.append(trainer.step(text_items(np.random.default_rng(seed))))
    return model, steps


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
    ),
)
def test_what_is_stored_in_bfloat16_gives_the_bits_of_float32(half, settings):
    """Losses, gradients (as they move the adapter) and log-probs of trained model and reference, in every way that the
    layers are computed.
    """
    (kept, steps), (wide, expected) = (
        trained(half["policy"], frozen_dtype=how, **settings) for how in ("auto", "float32")
    )
    assert low(kept) == {n for n, p in kept.named_parameters() if p.ndim == 2 and not p.requires_grad} and not low(wide)
    assert frozen.arithmetic(kept) == torch.float32
    assert steps == expected and steps[0]["loss"] != steps[1]["loss"]
    items = text_items(np.random.default_rng(9))
    with torch.no_grad(), products(OptimizerConfig(compute_dtype=settings.get("compute_dtype", "float32")), "cpu"):
        for view in (lambda m: m, AdapterOff):
            for model in (kept, wide):
                model.eval()
            assert torch.equal(*(target_logps(view(m), collate(items))[0] for m in (kept, wide)))
    mine, theirs = (dict(m.named_parameters()) for m in (kept, wide))
    assert all(torch.equal(mine[n], theirs[n]) for n in mine if ".lora_" in n)


def test_a_float32_model_kept_in_bfloat16_is_the_model_of_its_rounded_matrices(tiny, half):
    """Norms are not rounded; auto leaves a float32 checkpoint as it is."""
    items = text_items(np.random.default_rng(0))
    rounded = load_policy(tiny["policy"])
    for parameter in rounded.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.bfloat16().float()
    with torch.no_grad():
        assert torch.equal(
            *(target_logps(m, collate(items))[0] for m in (load_frozen(tiny["policy"], how="bfloat16"), rounded))
        )
    assert not low(load_frozen(tiny["policy"])) and not low(load_frozen(half["policy"], how="float32"))
    assert low(load_frozen(half["policy"])) == low(load_frozen(tiny["policy"], how="bfloat16")) != set()
    model = frozen.widen(load_frozen(half["policy"]))
    assert not low(model) and not frozen.is_kept(model) and "forward" not in model.lm_head.__dict__


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_policy_and_reference_are_the_same_numbers_at_the_first_step(tiny, half, dtype):
    """log pi / ref is exactly 0 before the first update, by the adapter switched off and by a model of its own,
    whatever the products' type.
    """
    items = text_items(np.random.default_rng(3))
    for path, how in ((half["policy"], "auto"), (tiny["policy"], "bfloat16")):
        model, config = to_train(path, frozen_dtype=how, compute_dtype=dtype)
        with torch.no_grad(), products(config, "cpu"):
            policy, off, apart = (
                target_logps(m, collate(items))[0]
                for m in (model.train(), AdapterOff(model), load_frozen(path, how=how))
            )
        assert torch.equal(policy, off) and torch.equal(policy, apart)


def test_the_sampler_samples_what_the_trainer_computes(half):
    """Tokens and log-probs are those of the float32 model, which are the trainer's; in bfloat16 too the adapter is
    merged in float32 and rounded once.
    """
    (kept, _), (wide, _) = (trained(half["policy"], frozen_dtype=how) for how in ("auto", "float32"))
    prompts, seeds = [[1, 40, 50, 60], [1, 70, 80]], [[1, 2], [3, 4]]
    for dtype, lean in ((torch.float32, None), (torch.float32, False), (torch.bfloat16, None), (torch.bfloat16, False)):
        mine, theirs = (Sampler(m, None, dtype=dtype, lean=lean) for m in (kept, wide))
        assert mine.exact_logps == theirs.exact_logps == (dtype == torch.float32)
        mine, theirs = (s.generate(prompts, SamplingParams(max_new_tokens=8), seeds) for s in (mine, theirs))
        assert mine == theirs
    (row,) = Sampler(kept, None).generate([prompts[0]], SamplingParams(max_new_tokens=8), [[5]])[0]
    from stages.batching import make_item

    with torch.no_grad():
        logps, _ = target_logps(kept.eval(), collate([make_item("r", prompts[0], [row.ids], [[1] * len(row.ids)])]))
    assert row.logps == pytest.approx(logps.tolist(), abs=1e-5)


def test_distributions_under_a_kept_head_are_those_of_the_widened_one(half):
    items = text_items(np.random.default_rng(1))
    kept, wide = load_frozen(half["policy"]), load_policy(half["policy"])
    batch = collate(items)
    with torch.no_grad():
        states = hidden_states(wide, batch, batch.src_N)
        assert torch.equal(states, hidden_states(kept, batch, batch.src_N))
        assert all(
            torch.equal(a, b) for a, b in zip(top_logps(head_of(kept), states, 5), top_logps(head_of(wide), states, 5))
        )
    student = Head(torch.randn(wide.lm_head.weight.shape, generator=torch.Generator().manual_seed(0)), None)
    for teacher_first in (False, True):
        found = []
        for model in (kept, wide):
            moved = states.clone().requires_grad_()
            heads = (student, head_of(model)) if not teacher_first else (head_of(model), student)
            value = divergence(heads[0], moved, heads[1], states, "reverse")
            value.sum().backward()
            found.append((value.detach(), moved.grad))
        assert all(torch.equal(a, b) for a, b in zip(*found))


STAGES = {
    "sft": ("sft", {**SFT, "eval_every": 2}, "demonstrations", {}),
    "sft in bfloat16": ("sft", {**SFT, "compute_dtype": "bfloat16"}, "demonstrations", {}),
    "align": ("align", {**SFT, "max_length": 96}, "pairs", {}),
    "align with a given reference": ("align", {**SFT, "max_length": 96}, "pairs", {"reference": "other"}),
    "distill from a teacher": (
        "distill",
        {**SFT, "method": "logit", "direction": "forward"},
        "demonstrations",
        {"teacher": "other"},
    ),
    "reward_model": ("reward_model", {**SFT, "max_length": 96}, "pairs", {}),
    "rl": ("rl", RL, "prompts", {}),
    "rl with a reference of its own and a reward model": (
        "rl",
        {**RL, "rewards": [{"kind": "model"}]},
        "prompts",
        {"reference": "other", "reward_model": "reward"},
    ),
    "rl with a trust region": (
        "rl",
        {**RL, "preset": "trpo", "beta": 0, "truncation_policy": "score", "num_iterations": 1, "cg_iters": 3},
        "prompts",
        {},
    ),
}


@pytest.mark.parametrize("case", STAGES)
def test_a_stage_on_a_bfloat16_checkpoint_publishes_the_bytes_of_float32(case, half, data, spec):
    """frozen_dtype=auto against float32: metrics, published model, adapter and datasets are the same bytes; the
    published model is float32.
    """
    stage, config, rows, more = STAGES[case]
    inputs = {
        "model": half["policy"],
        "data": data[rows],
        **{name: half[which] for name, which in more.items()},
    }
    found = {}
    for how in ("auto", "float32"):
        made = spec(stage, {**config, "frozen_dtype": how}, inputs, how)
        result = execute(made, silent)
        out = Path(made["workdir"], "out")
        found[how] = (
            {p.name: tree_digest(p) for p in out.iterdir()},
            Path(made["workdir"], "metrics.jsonl").read_bytes(),
            result["summary"],
        )
    assert found["auto"] == found["float32"]
    published = (
        load_policy
        if stage != "reward_model"
        else __import__("stages.reward_models.reward_heads", fromlist=["x"]).load_reward_model
    )
    assert (
        not low(published(str(out / "model")))
        and json.loads((out / "model/config.json").read_text())["dtype"] == "float32"
    )
    assert not memory.shape_of(out / "model").low


def test_scores_come_back_to_the_bit_in_a_fresh_process(half, tmp_path, forks):
    """Base and adapter give the trained scores; the published directory those of its own weights."""
    model, _ = trained(half["policy"])
    mine = scores(model)
    save_policy(model, load_tokenizer(half["policy"]), tmp_path / "out", base="model:base")
    merged = scores(load_policy(str(tmp_path / "out")))
    assert merged == pytest.approx(mine, abs=1e-4)
    policy, out = half["policy"], str(tmp_path / "out")
    assert scores_elsewhere(
        forks,
        f"PeftModel.from_pretrained(load_policy({policy!r}), {out + '/adapter'!r})",
        f"load_policy({out!r})",
        f"load_frozen({out!r})",
    ) == [mine, merged, merged]


@pytest.mark.parametrize("stage,rows", (("sft", "demonstrations"), ("reward_model", "pairs")))
@pytest.mark.parametrize("rank", (0, 4))
def test_published_in_bfloat16_is_the_float32_model_rounded_once_and_it_is_said(stage, rows, rank, tiny, data, spec):
    from safetensors.torch import load_file

    config, found = {**SFT, "max_length": 96, "lora_rank": rank}, {}
    for dtype in ("float32", "bfloat16"):
        result = execute(
            spec(stage, {**config, "save_dtype": dtype}, {"model": tiny["policy"], "data": data[rows]}, dtype), silent
        )
        found[dtype] = (
            load_file(Path(result["outputs"]["model"]["path"], "model.safetensors")),
            [w for w in result["warnings"] if w["code"] == "rounded_weights"],
        )
    (exact, none), (rounded, (warned,)) = found["float32"], found["bfloat16"]
    assert not none and exact.keys() == rounded.keys()
    assert all(v.dtype == torch.bfloat16 and torch.equal(v, exact[n].bfloat16()) for n, v in rounded.items())
    assert json.loads(Path(result["outputs"]["model"]["path"], "config.json").read_text())["dtype"] == "bfloat16"
    assert "save_dtype=bfloat16" in warned["text"]
    if rank:
        base = load_file(Path(tiny["policy"], "model.safetensors"))
        adapted = [n for n in base if n in exact and not torch.equal(base[n], exact[n])]
        share = (
            sum(float((rounded[n].float() - exact[n]).square().sum()) for n in adapted)
            / sum(float((exact[n] - base[n]).square().sum()) for n in adapted)
        ) ** 0.5
        assert f"by {share:.1%} of what the adapter moved them" in warned["text"]


@pytest.mark.parametrize("stage,rows", (("sft", "demonstrations"), ("rl", "prompts"), ("reward_model", "pairs")))
def test_the_plan_of_memory_is_what_is_held(stage, rows, tiny, half, data, spec, monkeypatch):
    """Bytes of all parameters that are alive when training begins, for a checkpoint in bfloat16 under auto and for a
    float32 one kept so.
    """
    from stages import preflight
    from transformers import PreTrainedModel

    alive = lambda: {id(one): one for one in gc.get_objects() if isinstance(one, PreTrainedModel)}
    for path, how in ((half["policy"], "auto"), (tiny["policy"], "bfloat16")):
        gc.collect()
        before, held = set(alive()), []

        def looked_at(running, trainer, *arguments, **more):
            gc.collect()
            held.append(
                sum(preflight.held_bytes([one for key, one in alive().items() if key not in before], [trainer]))
            )
            raise InterruptedError

        monkeypatch.setattr(preflight, "rl_preflight" if stage == "rl" else "preflight", looked_at)
        settings = {**(RL if stage == "rl" else SFT), "frozen_dtype": how}
        with pytest.raises(InterruptedError):
            execute(spec(stage, settings, {"model": path, "data": data[rows]}, how), silent)
        config = get_spec(stage).config(**settings)
        roles = get_spec(stage).roles(config, {"model", "data"})
        shape = memory.shape_of(path)
        found = memory.need(roles, {"model": shape}, config)
        assert found.states == pytest.approx(held[0], rel=0.02)
        wide = memory.need(roles, {"model": shape}, config.model_copy(update={"frozen_dtype": "float32"})).states
        assert found.states < wide - 1.8 * sum(
            a * b for n, (a, b) in shape.matrices.items() if n != "lm_head.weight" or stage != "reward_model"
        )
        if how == "bfloat16":
            refused = memory.refusal(
                stage, roles, {"model": shape}, config.model_copy(update={"frozen_dtype": "auto"}), found.states
            )
            assert f"frozen_dtype=bfloat16 (needs {memory.shown(found.states)})" in refused


@pytest.mark.parametrize(
    "name",
    (
        "llama",
        "llama tied",
        "mistral window",
        "gemma2",
        "gemma3",
        "olmo3",
        "phi3",
        "glm4",
        "granite",
        "smollm3",
        "mixtral",
        "olmoe",
        "gpt2",
        "falcon",
        "deepseek-v3",
        "gpt-oss",
        "qwen3.5",
        "lfm2",
    ),
)
@pytest.mark.parametrize("adapter", (False, True))
def test_any_architecture_computes_the_same_bits(name, adapter, tmp_path):
    """Log-probs and an adapter's gradient, of a checkpoint stored in bfloat16, read tensor by tensor; and what is
    published.
    """
    build(name).bfloat16().save_pretrained(tmp_path)
    path, items, found = str(tmp_path), items_of((30, (6, 9)), (12, (5, 3)), (4, (3, 4))), []
    for how in ("auto", "float32"):
        if adapter:
            model, _ = to_train(path, frozen_dtype=how)
            with torch.no_grad():
                for n, p in model.named_parameters():
                    if ".lora_B" in n:
                        p.fill_(0.01)
        else:
            model = load_frozen(path, how=how)
        logps, narrow = target_logps(model.train(), collate(items))[0], low(model)
        gradients = (
            torch.autograd.grad(logps.sum(), [p for p in model.parameters() if p.requires_grad]) if adapter else ()
        )
        if adapter:
            from stages.models.modeling import save_weights

            save_weights(model, tmp_path / how)
        found.append((narrow, logps.detach(), gradients))
    (kept, mine, gradients), (wide, expected, others) = found
    assert (
        kept and not wide and torch.equal(mine, expected) and all(torch.equal(a, b) for a, b in zip(gradients, others))
    )
    if adapter:
        assert {p.name: p.read_bytes() for p in (tmp_path / "auto").iterdir()} == {
            p.name: p.read_bytes() for p in (tmp_path / "float32").iterdir()
        }


@pytest.mark.parametrize("name", ("llama", "llama tied", "gemma3", "mixtral", "olmoe"))
def test_the_plan_knows_what_stays_float32(name, tmp_path):
    build(name).bfloat16().save_pretrained(tmp_path)
    held = sum(p.numel() * p.element_size() for p in load_frozen(str(tmp_path)).parameters())
    assert memory.shape_of(tmp_path).frozen_bytes("auto") == held


def test_an_encoder_scores_the_same_bits(encoder, tmp_path):
    from transformers import AutoTokenizer

    from stages.reward_models.reward_heads import RewardCard, new_reward_model, save_reward_model
    from stages.reward_models.reward_scorers import Response, load_scorer

    save_reward_model(
        new_reward_model(encoder),
        AutoTokenizer.from_pretrained(encoder),
        tmp_path,
        RewardCard(pooling="mean", max_length=128),
        torch.bfloat16,
    )
    asked = [
        Response([{"role": "user", "content": "which one?"}], [{"role": "assistant", "content": text}])
        for text in ("yes", "no no")
    ]
    kept, wide = (load_scorer(str(tmp_path), frozen=how) for how in ("auto", "float32"))
    assert low(kept.model) and not low(wide.model) and kept.score(asked) == wide.score(asked)
    assert torch.nn.Linear(1, 1).weight.dtype == next(iter(kept.model.classifier.parameters())).dtype


def test_under_torch_compile_weights_are_kept_so_too(half):
    assert low(to_train(half["policy"], forward="compiled")[0])


def test_a_setting_that_nothing_reads_is_refused(tiny, data, spec):
    with pytest.raises(ValueError, match="nothing is frozen.*lora_rank=16"):
        execute(
            spec(
                "sft",
                {**SFT, "lora_rank": 0, "frozen_dtype": "bfloat16"},
                {"model": tiny["policy"], "data": data["demonstrations"]},
                "unread",
            ),
            silent,
        )


def test_a_moving_reference_starts_at_the_policy_as_it_is_kept(tiny, data, spec):
    """Rounded under an adapter: the reference was the model before that, so that losses began away from their start, and
    DPO on weights in 4 bits was refused.
    """
    config = {**SFT, "max_length": 96, "frozen_dtype": "bfloat16", "reference_update": "ema", "max_steps": 1}
    made = spec("align", config, {"model": tiny["policy"], "data": data["pairs"]}, "moving")
    execute(made, silent)
    first = json.loads(Path(made["workdir"], "metrics.jsonl").read_text().splitlines()[0])["metrics"]
    assert first["validation/loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert first["validation/rewards/chosen"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("settings", ({"ref_mode": "ema", "beta": 0.1}, {"ref_mode": "refresh", "beta": 0.1}))
def test_a_reference_of_rl_that_follows_starts_at_the_policy_as_it_is_kept(settings, tiny, data, spec):
    """Rounded under an adapter: the first KL was that of the rounding."""
    config = {**RL, **settings, "frozen_dtype": "bfloat16", "max_steps": 1}
    made = spec("rl", config, {"model": tiny["policy"], "data": data["prompts"]}, settings["ref_mode"])
    execute(made, silent)
    first = json.loads(Path(made["workdir"], "metrics.jsonl").read_text().splitlines()[0])["metrics"]
    assert abs(first["kl"]) < 1e-9
