"""What moves the weights: torch's optimizers against their formulas, what they hold, and the learning rates of a run
against transformers' schedules.
"""

import gc
import math

import numpy as np
import pytest
import torch

from stages import preflight
from stages.harness import execute
from stages.models import memory, optimizers
from stages.models.adapters import add_lora
from stages.models.modeling import load_policy
from stages.registry import get_spec
from stages.settings import OptimizerConfig
from stages.sft import NextToken
from stages.training import Trainer, learning_rate_at
from tests.common import silent
from tests.training.test_invariance import text_items

RATES = {
    "adamw": {},
    "adamw_8bit": {},
    "sgd": {"learning_rate": 0.1},
    "sgd with momentum": {"learning_rate": 0.1, "momentum": 0.9},
    "adafactor": {},
    "muon": {},
}


def settings(name, **more) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer=name.split()[0], **{"warmup_ratio": 0, "lr_schedule": "constant", **RATES[name], **more}
    )


@pytest.fixture(autouse=True)
def small_matrices_too(monkeypatch):
    """The tiny models' matrices have 1,024 and 2,048 values."""
    monkeypatch.setattr(memory, "FROM_8BIT", 1024)


def levels(signed: bool) -> torch.Tensor:
    """Dynamic tree quantisation (Dettmers et al. 2022, section 2.2 and appendix): decades down to 1e-7, the higher ones
    with more steps; without a sign one more bit.
    """
    found = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1, 2 ** (i + (not signed)) + 1)
        middles = 10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2
        found += [*middles, *(-middles if signed else ())]
    assert len(found) == 255 + (not signed) or len(found) == 256
    return torch.tensor(sorted(found), dtype=torch.float64)


def in_8_bits(x, signed: bool):
    """x as bitsandbytes keeps it, blocks of 256 values."""
    from bitsandbytes import functional

    codes, state = functional.quantize_blockwise(x.float(), code=functional.create_dynamic_map(signed), blocksize=256)
    return functional.dequantize_blockwise(codes, state).double().view_as(x)


@pytest.mark.parametrize("signed", (True, False))
def test_a_moment_in_8_bits_is_near_the_nearest_level_of_its_block(signed):
    """The processor's kernel rounds a little worse than to the nearest one: 6% more error on second moments."""
    x = torch.randn(16, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) ** 3
    x = x if signed else x * x
    scale = x.abs().amax(1, keepdim=True)
    of = levels(signed)
    nearest = of[(x / scale)[..., None].sub(of).abs().argmin(-1)] * scale
    away = (in_8_bits(x, signed) - x).abs().sum() / (nearest - x).abs().sum()
    assert 1 - 1e-3 < away < 1.1


def expected(name, config, value, gradients, muon: bool, small: bool = False):
    """Weight after steps with these gradients, written out in float64 (Muon's polynomial in bfloat16, as its paper runs
    it); ``small``: moments in 8 bits between steps.
    """
    w, lr, decay = value.double(), config.learning_rate, config.weight_decay if value.ndim >= 2 else 0.0
    first, second, row, column = torch.zeros_like(w), torch.zeros_like(w), 0.0, 0.0
    for t, g in enumerate((g.double() for g in gradients), 1):
        if name.startswith("adamw") or name == "muon" and not muon:
            b1, b2 = config.adam_beta1, config.adam_beta2
            first, second = b1 * first + (1 - b1) * g, b2 * second + (1 - b2) * g * g
            w = w * (1 - lr * decay) - lr * (first / (1 - b1**t)) / (
                (second / (1 - b2**t)).sqrt() + config.adam_epsilon
            )
            if small:
                first, second = in_8_bits(first, True), in_8_bits(second, False)
        elif name.startswith("sgd"):
            g = g + decay * w
            first = g if t == 1 else (config.momentum or 0.0) * first + g
            w = w - lr * first
        elif name == "adafactor":
            keep, eps = 1 - t**-0.8, torch.finfo(torch.float32).eps
            w2 = w * (1 - lr * decay)
            if w.ndim >= 2:
                row = keep * row + (1 - keep) * (g * g).mean(-1, keepdim=True)
                column = keep * column + (1 - keep) * (g * g).mean(-2, keepdim=True)
                v = row * column / row.mean()
            else:
                v = second = keep * second + (1 - keep) * g * g
            update = g / v.clamp(min=eps * eps).sqrt()
            update = update / max(1.0, float((update**2).mean().sqrt()))
            w = w2 - max(1e-3, float((w**2).mean().sqrt())) * min(lr, t**-0.5) * update
        else:
            momentum = 0.95 if config.momentum is None else config.momentum
            first = momentum * first + (1 - momentum) * g
            x = ((1 - momentum) * g + momentum * first).bfloat16()
            tall = x.shape[0] > x.shape[1]
            x = x.T if tall else x
            x = x / x.norm().clamp(min=1e-7)
            for _ in range(5):
                a = x @ x.T
                x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
            x = (x.T if tall else x).double()
            w = w * (1 - lr * decay) - lr * 0.2 * math.sqrt(max(w.shape)) * x
    return w.float()


@pytest.mark.parametrize("name", RATES)
def test_three_steps_are_those_of_the_papers(name, tiny):
    """Every weight of the model, matrices with weight decay and vectors without; of Muon the layers' matrices, while
    embedding and head take AdamW's step.
    """
    config = settings(
        name,
        weight_decay=0.1,
        max_grad_norm=1e9,
        **({"learning_rate": 1e-3} if name.startswith(("adamw", "muon")) else {}),
    )
    model = load_policy(tiny["policy"])
    trainer = Trainer(model, NextToken("token-mean"), config, 3)
    before, seen = {n: p.detach().clone() for n, p in trainer.parameters.items()}, {n: [] for n in trainer.parameters}
    step = trainer.optimizer.step

    def watched():
        for n, p in trainer.parameters.items():
            seen[n].append(p.grad.clone())
        step()

    trainer.optimizer.step = watched
    for seed in range(3):
        trainer.step(text_items(np.random.default_rng(seed)))
    moved = optimizers.of_muon(model, trainer.parameters)
    assert {n for n, p in trainer.parameters.items() if id(p) in moved} == {n for n in before if "_proj" in n}
    small = optimizers.in_8_bits(model, trainer.parameters) if name == "adamw_8bit" else ()
    if small:
        names = {n for n, p in trainer.parameters.items() if id(p) in small}
        assert names == {n for n in before if "_proj" in n or "lm_head" in n}
    for n, p in trainer.parameters.items():
        wanted = expected(name, config, before[n], seen[n], id(p) in moved, id(p) in small)
        size = float((wanted - before[n]).abs().max())
        if name == "muon" and id(p) in moved:  # in bfloat16
            assert float((p.detach() - wanted).norm() / (wanted - before[n]).norm()) < 0.05, n
        elif id(p) in small:  # a value midway between two levels goes to either
            whole = expected("adamw", config, before[n], seen[n], False)
            away = float((p.detach() - wanted).norm())
            assert away < 0.02 * float((whole - wanted).norm()) < 0.02 * float((wanted - before[n]).norm()), n
        else:
            assert size > 0 and torch.allclose(p, wanted, rtol=0, atol=2e-3 * size + 3e-7), n


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("rank", (0, 4))
def test_the_plan_of_memory_counts_what_the_optimizer_holds(name, rank, tiny, monkeypatch):
    """States after a step, before it (state_shapes, for the trial) and in the plan; counters of steps are four bytes
    each.
    """
    if rank and name == "adafactor":
        pytest.skip("refused")
    monkeypatch.setattr(memory, "FROM_8BIT", 64)  # the adapter's parts, too
    config = settings(name, lora_rank=rank)
    model = add_lora(load_policy(tiny["policy"]), config, 1)
    trainer = Trainer(model, NextToken("token-mean"), config, 1)
    before = preflight.held_bytes([model], [trainer])
    stand_in = preflight.optimizer_state(trainer)
    trainer.step(text_items(np.random.default_rng(0)))
    held = [
        value
        for state in trainer.optimizer.state.values()
        for key, value in state.items()
        if value is not None and key != "step"
    ]
    assert sum(t.nbytes for t in held) == sum(t.nbytes for t in stand_in)
    trained = sum(p.nbytes for p in trainer.parameters.values())
    assert preflight.held_bytes([model], [trainer]) == before and before[1] == trained + sum(t.nbytes for t in held)
    roles = get_spec("sft").roles(config, {"model", "data"})
    planned = memory.need(roles, {"model": memory.shape_of(tiny["policy"])}, config).states
    # the plan of an adapter does not know its matrices, the last block of each of which is not full
    spare = 8 * len(trainer.parameters) if rank and name == "adamw_8bit" else 0
    assert planned <= sum(before) <= planned + spare


@pytest.mark.parametrize(
    "given,says",
    (
        ({"optimizer": "sgd"}, "learning_rate=0.1"),
        ({"optimizer": "sgd", "learning_rate": 0.1, "adam_beta2": 0.95}, "optimizer=adamw"),
        ({"momentum": 0.9}, "optimizer=sgd"),
        ({"optimizer": "adafactor", "lora_rank": 8}, "adamw"),
        ({"optimizer": "adamw_8bit", "sharding": "full"}, "sharding=none"),
        ({"optimizer": "adamw_8bit", "momentum": 0.9}, "optimizer=sgd"),
        ({"lr_schedule": "warmup_stable_decay"}, "lr_schedule=wsd"),
        ({"lr_schedule": "cosine_with_min_lr"}, "min_lr_ratio"),
        ({"lr_power": 2.0}, "lr_schedule=polynomial"),
        ({"lr_cycles": 2}, "cosine_with_restarts"),
        ({"decay_type": "cosine"}, "lr_schedule=wsd"),
        ({"warmup_ratio": 0.3, "warmup_steps": 5}, "leave warmup_steps out"),
    ),
)
def test_settings_that_nothing_would_read_are_refused(given, says):
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        OptimizerConfig(**given)


def test_default_learning_rates():
    rate = lambda stage, **given: get_spec(stage).config(**given).learning_rate
    assert rate("sft") == rate("sft", optimizer="muon") == 2e-5 and rate("sft", optimizer="adafactor") == pytest.approx(
        1e-3
    )
    assert rate("sft", lora_rank=4, optimizer="muon") == pytest.approx(2e-4) and rate(
        "rl", optimizer="adafactor"
    ) == pytest.approx(5e-5)
    assert rate("sft", optimizer="adafactor", learning_rate=1e-4) == 1e-4


def test_a_plan_that_cannot_fit_names_the_optimizer_that_does(tiny):
    shape, config = memory.shape_of(tiny["policy"]), get_spec("sft").config()
    roles = get_spec("sft").roles(config, {"model", "data"})
    for optimizer in ("adafactor", "adamw_8bit"):
        small = memory.need(roles, {"model": shape}, config.model_copy(update={"optimizer": optimizer})).states
        assert f"optimizer={optimizer} (needs {memory.shown(small)})" in memory.refusal(
            "sft", roles, {"model": shape}, config, small
        )


def test_trpo_reads_no_optimizer_and_a_critic_keeps_adamw(tiny, data, spec, monkeypatch):
    rl = {
        "max_steps": 1,
        "prompts_per_step": 2,
        "num_generations": 2,
        "max_completion_length": 4,
        "rewards": [{"kind": "length"}],
    }
    with pytest.raises(ValueError, match="optimizer=muon would change nothing"):
        execute(
            spec(
                "rl",
                {**rl, "preset": "trpo", "optimizer": "muon"},
                {"model": tiny["policy"], "data": data["prompts"]},
                "trpo",
            ),
            silent,
        )
    gc.collect()
    made = []
    real = optimizers.make
    monkeypatch.setattr(optimizers, "make", lambda config, *rest: made.append(config.optimizer) or real(config, *rest))
    execute(
        spec(
            "rl",
            {**rl, "preset": "ppo", "optimizer": "muon"},
            {"model": tiny["policy"], "data": data["prompts"]},
            "ppo",
        ),
        silent,
    )
    assert sorted(made) == ["adamw", "muon"]


# --- learning rates ---------------------------------------------------------------------------------------------------

TOTAL, WARMUP = 97, 13
SCHEDULES = {  # ours -> transformers' name and arguments; its lr_end is an absolute rate
    "constant": ({}, "constant_with_warmup", {}),
    "linear": ({}, "linear", {}),
    "cosine": ({}, "cosine", {}),
    "cosine to a tenth": ({"min_lr_ratio": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
    "cosine_with_restarts": ({"lr_cycles": 3}, "cosine_with_restarts", {"num_cycles": 3}),
    "cosine_with_restarts once": ({}, "cosine_with_restarts", {"num_cycles": 1}),
    "polynomial": ({"lr_power": 2.0, "min_lr_ratio": 0.05}, "polynomial", {"power": 2.0, "lr_end": 0.05 * 0.02}),
    "wsd": (
        {"decay_ratio": 20 / TOTAL, "min_lr_ratio": 0.1},
        "warmup_stable_decay",
        {"num_decay_steps": 20, "min_lr_ratio": 0.1, "decay_type": "linear"},
    ),
    "wsd by cosine": (
        {"decay_ratio": 20 / TOTAL, "decay_type": "cosine"},
        "warmup_stable_decay",
        {"num_decay_steps": 20, "decay_type": "cosine"},
    ),
    "wsd by root": (
        {"decay_ratio": 20 / TOTAL, "decay_type": "1-sqrt"},
        "warmup_stable_decay",
        {"num_decay_steps": 20, "decay_type": "1-sqrt"},
    ),
    "inverse_sqrt": ({}, "inverse_sqrt", {}),
}


@pytest.mark.parametrize("case", SCHEDULES)
@pytest.mark.parametrize("warmup", (0, WARMUP))
def test_rates_are_those_of_transformers(case, warmup):
    """Step by step from the end of warm-up on; within it one step ahead of transformers, whose first step has the rate
    0.
    """
    from transformers import get_scheduler

    given, name, arguments = SCHEDULES[case]
    if case == "inverse_sqrt" and not warmup:
        pytest.skip("transformers takes 10,000 steps for the time scale then, we one")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.02)
    theirs = []
    schedule = get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=TOTAL, scheduler_specific_kwargs=arguments
    )
    for _ in range(TOTAL + 1):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    config = OptimizerConfig(learning_rate=0.02, lr_schedule=case.split()[0], warmup_steps=warmup, **given)
    ours = [learning_rate_at(step, TOTAL, config) for step in range(TOTAL)]
    if case == "wsd":  # its warm-up starts at min_lr_ratio
        theirs[1:warmup] = [0.02 * (k + 1) / warmup for k in range(warmup)][: warmup - 1]
    assert ours[:warmup] == pytest.approx(theirs[1 : warmup + 1])
    ahead = case == "inverse_sqrt"
    assert ours[warmup:] == pytest.approx(theirs[warmup + ahead : TOTAL + ahead])


def test_warm_up_steps_are_the_ratios_steps():
    by_ratio, by_steps = (
        OptimizerConfig(learning_rate=1.0, **given) for given in ({"warmup_ratio": 0.25}, {"warmup_steps": 10})
    )
    assert [learning_rate_at(s, 40, by_ratio) for s in range(40)] == [
        learning_rate_at(s, 40, by_steps) for s in range(40)
    ]
    rounded = OptimizerConfig(learning_rate=1.0, warmup_ratio=0.29)
    assert learning_rate_at(27, 100, rounded) < 1.0 == learning_rate_at(28, 100, rounded), (
        "29 steps, though 0.29 * 100 < 29"
    )
    short = OptimizerConfig(learning_rate=1.0, warmup_steps=100)
    assert learning_rate_at(2, 3, short) == 1.0  # a run that is shorter than its warm-up
