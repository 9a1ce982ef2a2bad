"""Where the reference is the model under the LoRA adapter, it is that model with the adapter off: no second copy, the
same numbers (LORA-RL).
"""

import gc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stages.batching import collate
from stages.harness import execute
from stages.models.adapters import AdapterOff, add_lora
from stages.models.modeling import head_of, hidden_states, load_policy, move_towards, target_logps, weights_digest
from stages.settings import OptimizerConfig
from stages.sft import NextToken
from stages.training import Trainer
from storage.datasets import open_dataset
from tests.common import silent
from tests.training.test_invariance import text_items

RL = {
    "preset": "grpo",
    "beta": 0.1,
    "lora_rank": 4,
    "learning_rate": 1e-2,
    "max_steps": 4,
    "prompts_per_step": 4,
    "num_generations": 4,
    "num_iterations": 2,
    "max_completion_length": 10,
    "rewards": [{"name": "length", "kind": "length", "max_length": 10, "cache_length": 10}],
}


def adapted(path, forward="auto"):
    """A policy with an adapter that has learned something."""
    model = add_lora(load_policy(path), OptimizerConfig(lora_rank=4), seed=7)
    trainer = Trainer(
        model,
        NextToken("token-mean"),
        OptimizerConfig(learning_rate=1e-2, lora_rank=4, warmup_ratio=0, forward=forward),
        3,
    )
    for _ in range(3):
        trainer.step(text_items(np.random.default_rng(0)))
    return model


def test_the_adapter_off_answers_as_the_separate_reference(tiny):
    """What validation answers are compared with (``rollouts.beside``), whatever the settings of the sampler are."""
    from stages.chat import renderer_for
    from stages.decoding.sampler import Sampler
    from stages.decoding.sampling import SamplingParams
    from stages.rollouts.beside import Beside

    model, renderer = adapted(tiny["policy"]), renderer_for(tiny["policy"])
    beside = Beside.__new__(Beside)
    beside.reference = AdapterOff(model)
    beside.policy = SimpleNamespace(renderer=renderer)
    beside.stage = SimpleNamespace(config=SimpleNamespace(generation_batch=4))
    params = SamplingParams(max_new_tokens=8, stop_strings=("e",), repetition_penalty=1.3, min_tokens=2)
    asked = [renderer.prompt_ids([{"role": "user", "content": "what is 1 plus 1?"}])], params, [[1, 2, 3]]
    mine, apart, trained = (
        [c.ids for c in engine.generate(*asked)[0]]
        for engine in (
            beside._sampler(),
            Sampler(load_policy(tiny["policy"]), renderer.tokenizer),
            Sampler(model, renderer.tokenizer),
        )
    )
    assert mine == apart != trained


@pytest.mark.parametrize("forward", ("auto", "model"))
def test_the_adapter_off_is_the_separate_reference_to_the_last_bit(tiny, forward):
    model, separate, items = (
        adapted(tiny["policy"], forward),
        load_policy(tiny["policy"]),
        text_items(np.random.default_rng(1)),
    )
    if forward == "model":
        separate._posttrain_lean = False
    reference = AdapterOff(model)
    with torch.no_grad():
        mine, apart, trained = (target_logps(m, collate(items))[0] for m in (reference, separate, model))
    assert torch.equal(mine, apart) and not torch.allclose(mine, trained, atol=1e-2)
    ids = torch.arange(6)[None]
    assert torch.equal(reference(input_ids=ids).logits, separate(input_ids=ids).logits)
    assert torch.equal(head_of(reference).weight, head_of(separate).weight)
    assert all(p.requires_grad == (".lora_" in n) for n, p in model.named_parameters())  # the switch leaves them
    assert len(list(reference.named_parameters())) == len(list(separate.named_parameters()))
    before = weights_digest(reference)
    next(p for n, p in model.named_parameters() if ".lora_" in n).data.add_(1.0)
    assert weights_digest(reference) == before
    next(p for n, p in model.named_parameters() if "layernorm" in n).data.add_(1.0)
    assert weights_digest(reference) != before


def test_switching_off_for_the_reference_does_not_reach_the_policys_gradient(tiny):
    """The reference's forward between the policy's forward and its backward changes no gradient, recomputed layers
    included.
    """
    items = text_items(np.random.default_rng(2))
    gradients = []
    for interrupted in (False, True):
        model = adapted(tiny["policy"])
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.zero_grad()
        loss = -target_logps(model.train(), collate(items))[0].sum()
        if interrupted:
            with torch.no_grad():
                hidden_states(AdapterOff(model), collate(items))
        loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert gradients[0] and all(torch.equal(a, b) for a, b in zip(*gradients))


def test_rl_with_an_adapter_holds_the_base_once_and_gives_the_separate_references_numbers(
    tiny, data, spec, monkeypatch
):
    held, step = [], Trainer.step

    def measured(self, items):
        gc.collect()
        alive = {
            p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
            for p in gc.get_objects()
            if type(p) is torch.nn.Parameter
        }
        held.append(sum(alive.values()) - sum(before.values()))
        return step(self, items)

    monkeypatch.setattr(Trainer, "step", measured)
    results = {}
    for name, extra in (("off", {}), ("separate", {"reference": tiny["policy"]})):
        gc.collect()
        before = {
            p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
            for p in gc.get_objects()
            if type(p) is torch.nn.Parameter
        }
        held.clear()
        result = execute(spec("rl", RL, {"model": tiny["policy"], "data": data["prompts"], **extra}, name), silent)
        rows = list(open_dataset(result["outputs"]["rollouts"]["path"]).iter_rows())
        page = next(Path(r["markdown"]).read_text() for r in result["reports"] if r["name"] == "preflight")
        results[name] = (
            Path(result["outputs"]["model"]["path"], "model.safetensors").read_bytes(),
            [r["logp_ref"] for r in rows],
            [r["logp_old"] for r in rows],
            max(held),
            page,
        )
    model = load_policy(tiny["policy"])
    base = sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values())
    wrapped = add_lora(model, OptimizerConfig(lora_rank=4), seed=1)
    adapter = sum(p.nbytes for n, p in wrapped.named_parameters() if ".lora_" in n)
    (mine, refs, olds, bytes_off, page), (apart, other_refs, _, bytes_apart, _) = results["off"], results["separate"]
    assert mine == apart and refs == other_refs and refs != olds
    assert bytes_off == base + adapter and bytes_apart == 2 * base + adapter
    assert f"| weights held | {(base + adapter) / 2**20:,.1f} MiB |" in page


def test_align_computes_its_reference_with_the_policy_itself(tiny, data, spec, monkeypatch):
    """One model is loaded, with an adapter or without, and the cached log-probs are those of the model given as a
    reference.
    """
    from stages.models import modeling

    loaded, load = [], modeling.load_policy
    monkeypatch.setattr(modeling, "load_policy", lambda *a, **k: loaded.append(a) or load(*a, **k))
    found = {}
    for name, config, extra in (
        ("plain", {}, {}),
        ("adapter", {"lora_rank": 4}, {}),
        ("given", {}, {"reference": tiny["policy"]}),
    ):
        loaded.clear()
        result = execute(
            spec(
                "align",
                {"max_steps": 2, "batch_size": 6, "max_length": 96, **config},
                {"model": tiny["policy"], "data": data["pairs"], **extra},
                name,
            ),
            silent,
        )
        found[name] = [
            (r["ref_chosen_logp"], r["ref_rejected_logp"])
            for r in open_dataset(result["outputs"]["ref_logps"]["path"]).iter_rows()
        ]
        assert len(loaded) == (2 if extra else 1), name
    assert found["plain"] == found["adapter"] == found["given"]


def test_a_reference_that_follows_the_policy_takes_the_adapter_in(tiny):
    policy, reference = adapted(tiny["policy"]), load_policy(tiny["policy"])
    start = {n: p.detach().clone() for n, p in reference.named_parameters()}
    move_towards(reference, policy, 0.0)
    moved = {n: p.detach().clone() for n, p in reference.named_parameters()}
    merged = dict(policy.merge_and_unload().named_parameters())
    assert start.keys() == merged.keys() and all(torch.allclose(moved[n], p, atol=1e-6) for n, p in merged.items())
    assert any(not torch.equal(moved[n], start[n]) for n in start)


@pytest.mark.parametrize(
    "settings",
    (
        {"ref_mode": "refresh", "ref_sync_steps": 2, "ref_sync_alpha": 1.0},
        {"ref_mode": "ema"},
        {"kl_target": "old", "kl_estimator": "full", "kl_direction": "reverse"},
    ),
)
def test_rl_references_that_move_have_a_copy_of_their_own_beside_an_adapter(settings, tiny, data, spec):
    result = execute(
        spec("rl", {**RL, **settings}, {"model": tiny["policy"], "data": data["prompts"]}, "moving"), silent
    )
    assert result["summary"]["steps"] == 4 and result["summary"]["skipped_steps"] == 0
