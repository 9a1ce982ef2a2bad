"""TRPO: exact Fisher-vector products over whatever is trained, the natural step, the line search, and the stage with
all weights or an adapter.
"""

import math
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from stages.algorithms import rl_preset
from stages.batching import collate, make_item
from stages.models.adapters import add_lora
from stages.models.modeling import load_policy
from stages.policy.policy_update import PolicyGradient
from stages.policy.trust_region import TrustRegionTrainer, assign, backtrack, conjugate_gradient, flat
from stages.rl import Config
from tests.training.test_rl_presets import SMALL, inputs_of, run


def test_a_trust_region_step_is_the_natural_gradient_on_a_small_softmax():
    """Gradient, Fisher product and full step of the trainer's parts against the closed form of a softmax bandit
    (oracles.natural_step).
    """
    from tests.oracles import natural_step

    logits = torch.tensor([0.3, -0.2, 0.5, 0.0], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([1.0, 0.0, 0.5, -1.0], dtype=torch.float64)
    (g,) = torch.autograd.grad((torch.softmax(logits, -1) * q).sum(), logits)

    def product(v):
        (first,) = torch.autograd.grad(
            torch.nn.functional.kl_div(
                torch.log_softmax(logits, -1), torch.softmax(logits.detach(), -1), reduction="sum"
            ),
            logits,
            create_graph=True,
        )
        return torch.autograd.grad((first * v).sum(), logits)[0] + 0.1 * v

    x, residual = conjugate_gradient(product, g, 10)
    oracle = natural_step(logits.detach(), q, 0.01, damping=0.1)
    assert residual < 1e-10 and np.allclose(g, oracle["grad"]) and np.allclose(x, oracle["x"])
    assert np.allclose(np.sqrt(0.02 / float(x @ product(x))) * x, oracle["step"])
    assert (
        backtrack(lambda f: (f, 1.0), 0.7, 0.5, 5) == (0.5, 0.5, 1.0)
        and backtrack(lambda f: (f, -1.0), 0.7, 0.5, 5) is None
    )


def test_conjugate_gradient_stops_where_a_direction_does_not_move_the_distribution():
    """A null direction of the Fisher matrix without damping (an adapter's A while B is 0), and a gradient inside the
    others.
    """
    fisher = torch.diag(torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64))
    x, residual = conjugate_gradient(lambda v: fisher @ v, torch.tensor([2.0, 3.0, 0.0], dtype=torch.float64), 10)
    assert residual < 1e-10 and torch.allclose(x, torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64))
    x, residual = conjugate_gradient(lambda v: fisher @ v, torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64), 10)
    assert residual == 1.0 and not x.any()


# --- the product against the Fisher matrix by enumeration of the vocabulary -------------------------------------------

ITEMS = [
    make_item("a", [20, 30, 40], [[50, 60], [70, 80, 90]], [[1, 1], [1, 0, 1]]),
    make_item("b", [25, 35], [[45]], [[1]]),
]
TOKENS = 5
ADAPTERS = {
    "all weights": {},
    "adapter": {"lora_rank": 1, "lora_targets": "q_proj,down_proj"},
    "adapter on the output layer": {"lora_rank": 2, "lora_targets": "v_proj,lm_head"},
}


def trainer_of(path, temperature=1.0, **lora):
    """A float64 trainer; an adapter has moved away from its start, where B is 0 and A cannot be seen."""
    config = Config(preset="trpo", num_generations=2, temperature=temperature, **lora)
    model = add_lora(load_policy(path), config, seed=3).double()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return TrustRegionTrainer(model, PolicyGradient(rl_preset("trpo"), config), config, 1)


def scores(trainer, temperature):
    """(p [N * V], gradient of every log-probability [N * V, P]) at the trained positions, through the model's own
    forward.
    """
    parameters, weights, rows = list(trainer.parameters.values()), [], []
    for item in ITEMS:
        for response, mask in zip(item.responses, item.masks):
            ids = torch.tensor([[*item.prompt, *response]])
            logp = torch.log_softmax(trainer.model(input_ids=ids, use_cache=False).logits[0].double() / temperature, -1)
            for t in np.flatnonzero(mask):
                here = logp[len(item.prompt) + t - 1]
                weights.append(here.detach().exp())
                rows += [
                    flat(torch.autograd.grad(one, parameters, retain_graph=True, allow_unused=True), parameters)
                    for one in here
                ]
    return torch.cat(weights), torch.stack(rows)


@pytest.mark.parametrize("which", ("adapter", "adapter on the output layer"))
@pytest.mark.parametrize("temperature", (1.0, 0.7))
def test_the_product_over_an_adapter_is_the_enumerated_fisher_matrix(tiny, which, temperature):
    """F = mean over tokens of sum_v p_v grad log p_v grad log p_v', built entry by entry."""
    trainer = trainer_of(tiny["policy"], temperature, **ADAPTERS[which])
    p, gradients = scores(trainer, temperature)
    fisher = gradients.t() @ (p[:, None] * gradients) / TOKENS
    assert (
        fisher.shape[0] == sum(q.numel() for n, q in trainer.model.named_parameters() if ".lora_" in n)
        and torch.linalg.matrix_rank(fisher) > 10
    )
    batches = [collate([item]) for item in ITEMS]
    size = float(fisher.abs().max())
    for column in (0, 7, fisher.shape[0] - 1):
        unit = torch.zeros(fisher.shape[0], dtype=torch.float64)
        unit[column] = 1.0
        assert torch.allclose(trainer._fisher_product(batches, TOKENS, unit), fisher[:, column], atol=1e-6 * size)
    v = torch.randn(fisher.shape[0], dtype=torch.float64)
    assert torch.allclose(trainer._fisher_product([collate(ITEMS)], TOKENS, v), fisher @ v, atol=1e-5 * size)


@pytest.mark.parametrize("which", ADAPTERS)
def test_the_product_is_the_second_derivative_of_the_kl(tiny, which):
    trainer = trainer_of(tiny["policy"], 0.8, **ADAPTERS[which])
    parameters, batches = list(trainer.parameters.values()), [collate(ITEMS)]
    start = flat([p.detach() for p in parameters], parameters)
    v = torch.randn_like(start)
    v /= v.norm()
    curvature, old, kls = float(v @ trainer._fisher_product(batches, TOKENS, v)), trainer._distributions(batches), []
    for h in (2e-2, -2e-2):  # KL(old||new) is a parabola around old
        assign(parameters, start + h * v)
        kls.append(trainer._kl_sum(old, batches) / TOKENS)
    assert curvature == pytest.approx((kls[0] + kls[1]) / 4e-4, rel=1e-2) and curvature > 0
    assign(parameters, start)
    assert trainer._kl_sum(old, batches) == pytest.approx(0, abs=1e-12)


def test_a_fresh_adapter_is_moved_through_b_alone(tiny):
    """B = 0: A changes no distribution, its Fisher entries and its gradient are 0, and the step is finite without
    damping.
    """
    trainer = trainer_of(tiny["policy"], lora_rank=1, lora_targets="q_proj")
    for name, parameter in trainer.parameters.items():
        if ".lora_B" in name:
            torch.nn.init.zeros_(parameter)
    along = [torch.ones_like(p) if ".lora_A" in n else torch.zeros_like(p) for n, p in trainer.parameters.items()]
    assert not trainer._fisher_product([collate(ITEMS)], TOKENS, flat(along, list(trainer.parameters.values()))).any()


# --- the stage --------------------------------------------------------------------------------------------------------


def test_a_part_of_the_batch_gives_the_fisher_matrix(monkeypatch, tiny):
    """fisher_fraction: evenly spaced items, at least one; products are of these and their tokens, the KL and the gain
    of the step are those of all.
    """
    from stages.policy.trust_region import thinned

    assert (
        thinned(list(range(10)), 0.3) == [0, 3, 6]
        and thinned([1, 2], 0.1) == [1]
        and thinned(list(range(7)), 1.0) == list(range(7))
    )
    config = Config(preset="trpo", num_generations=2, truncation_policy="score", fisher_fraction=0.5)
    model = load_policy(tiny["policy"])
    trainer, seen = TrustRegionTrainer(model, PolicyGradient(rl_preset("trpo"), config), config, 2), []
    product = trainer._fisher_product
    monkeypatch.setattr(
        trainer,
        "_fisher_product",
        lambda batches, tokens, v: (
            seen.append((sum(len(b.src_N) for b in batches), tokens)),
            product(batches, tokens, v),
        )[1],
    )
    items = [
        make_item(
            name,
            [20, 30, 40],
            [[50, 60], [70, 80, 90]],
            [[1, 1], [1, 1, 1]],
            advantages=[1.0, -1.0],
            old_logps=[[-5.0] * 2, [-5.0] * 3],
        )
        for name in "abcd"
    ]
    step = trainer.step(items)
    assert (
        set(seen) == {(10, 10)}
        and len(seen) > 2
        and 0 < step["trpo/kl"] <= config.max_kl
        and step["trpo/surrogate_gain"] > 0
    )


@pytest.mark.parametrize(
    "lora", ({}, {"lora_rank": 4}, {"fisher_fraction": 0.25}), ids=("all weights", "adapter", "part of the batch")
)
def test_trpo_stays_in_the_region_and_improves_the_surrogate(tiny, data, spec, lora):
    config = {**SMALL, "preset": "trpo", "max_kl": 0.01, **lora}
    made, result, metrics = run(spec, "trpo", inputs_of("trpo", tiny, data), config, label="trpo-region")
    for m in (m["metrics"] for m in metrics):
        assert (
            m["trpo/failed_line_search"] == 0
            and 0 < m["trpo/kl"] <= 0.01
            and m["trpo/surrogate_gain"] > 0
            and m["policy/ratio"] == pytest.approx(1, abs=1e-4)
        )
    assert max(m["metrics"]["trpo/kl"] for m in metrics) > 1e-3, "the step uses the region"
    after, before = (
        load_file(f"{path}/model.safetensors") for path in (result["outputs"]["model"]["path"], tiny["policy"])
    )
    moved = {n for n in before if not torch.equal(before[n], after[n])}
    assert moved and (
        moved == {n for n in before if n.endswith("_proj.weight")} if "lora_rank" in lora else "lm_head.weight" in moved
    )


def test_trpo_refuses_what_it_cannot_do(tiny, data, spec):
    given = inputs_of("trpo", tiny, data)
    config = {**SMALL, "preset": "trpo"}
    with pytest.raises(Exception, match="lora_rank=16"):
        run(spec, "trpo", given, {**config, "trust_region_max_parameters": 10}, label="trpo-large")
    for setting, advice in (
        ({"critic_mode": "shared"}, "critic_mode=separate"),
        ({"forward": "compiled"}, "forward=auto"),
    ):
        with pytest.raises(Exception, match=advice):
            run(spec, "trpo", given, {**config, **setting}, label="trpo-refused")


def test_steps_without_a_direction_change_nothing_and_a_single_token_is_enough(tiny):
    """Nothing trained, no advantage, and a gradient that is not finite, over several micro-batches; a step on one token
    beside a dead group.
    """

    def item(name, advantages, masks):
        old = [[-5.0] * 2, [-5.0] * 3]
        return make_item(
            name, [20, 30, 40], [[50, 60], [70, 80, 90]], masks, advantages=list(advantages), old_logps=old
        )

    whole, dead, single = ([[1, 1], [1, 1, 1]], [[0, 0], [0, 0, 0]], [[0, 1], [0, 0, 0]])
    for items, moves, skipped in (
        ([item("a", (0.0, 0.0), dead), item("b", (0.0, 0.0), dead)], False, 0),
        ([item("a", (0.0, 0.0), whole), item("b", (0.0, 0.0), dead)], False, 0),
        ([item("a", (math.nan, 1.0), whole), item("b", (1.0, -1.0), whole)], False, 1),
        ([item("a", (1.0, 0.0), single), item("b", (0.0, 0.0), dead)], True, 0),
    ):
        config = Config(preset="trpo", num_generations=2, truncation_policy="score", max_tokens_per_micro_batch=8)
        model = load_policy(tiny["policy"])
        trainer = TrustRegionTrainer(model, PolicyGradient(rl_preset("trpo"), config), config, 1)
        before = [p.detach().clone() for p in trainer.parameters.values()]
        found = trainer.step(items)
        assert any(not torch.equal(a, b) for a, b in zip(before, trainer.parameters.values())) == moves
        assert found["skipped_steps"] == skipped and 0 <= found["trpo/kl"] <= config.max_kl
        # every curve has every step
        assert (found["trpo/cg_residual"] > 0) == moves and found["trpo/failed_line_search"] == 0.0
        assert (found["trpo/surrogate_gain"] > 0) == (found["trpo/step_fraction"] > 0) == moves


def test_averaged_weights_follow_the_steps(tiny):
    """ema_decay: the published average has moved with the policy."""
    config = Config(preset="trpo", num_generations=2, ema_decay=0.5, lora_rank=2, truncation_policy="score")
    model = add_lora(load_policy(tiny["policy"]), config, seed=3)
    trainer = TrustRegionTrainer(model, PolicyGradient(rl_preset("trpo"), config), config, 2)
    items = [
        make_item(
            "a",
            [20, 30, 40],
            [[50, 60], [70, 80, 90]],
            [[1, 1], [1, 1, 1]],
            advantages=[1.0, -1.0],
            old_logps=[[-5.0] * 2, [-5.0] * 3],
        )
    ]
    start = {n: p.detach().clone() for n, p in trainer.parameters.items()}
    assert trainer.step(items)["trpo/step_fraction"] > 0
    moved = [n for n, p in trainer.parameters.items() if not torch.equal(p, start[n])]
    assert moved and all(torch.allclose(trainer.averages[n], (start[n] + trainer.parameters[n]) / 2) for n in moved)
