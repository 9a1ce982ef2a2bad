"""Run on one process or on ranks: one float64 step of every objective; rank 0 writes the gradients and metrics. Not a
test module.
"""

import json
import sys

import numpy as np
import torch

from stages.running import ranks
from stages.reward_models.reward_heads import new_reward_model
from stages.models.sharding import whole
from stages.models.modeling import load_policy
from stages.settings import OptimizerConfig
from stages.training import Trainer
from tests.training.test_invariance import complete, objectives

#: One preset for each way a policy gradient is summed over ranks; the others differ in what is computed per token.
PRESETS = (
    "rl/reinforce",
    "rl/rloo",
    "rl/grpo",
    "rl/dr_grpo",
    "rl/gspo",
    "rl/ppo_clip_kl",
    "rl/p3o",
    "rl/oreo",
    "rl/sppo",
)


def main(policy: str, out: str, sharding: str = "none") -> None:
    def faded():
        model = load_policy(policy)
        for parameter in model.parameters():
            parameter.data.mul_(0.9)
        return model

    found = {}
    for name, (objective, make, reward) in objectives().items():
        if name.startswith("rl/") and name not in PRESETS:
            continue
        model = (new_reward_model(policy) if reward else load_policy(policy)).double()
        complete(name, objective, faded)
        found[name] = stepped(model, objective, make(np.random.default_rng(0)), 24, sharding)
    written(found, out)


def every_loss(policy: str, other: str, preferences: str, rows: str, out: str) -> None:
    """Every row of the tables of losses, with the numbers of a whole step that some of them need: direct alignment,
    reward models, RL with its variants, critics.

    preferences, rows: JSON, the datasets of tests/training/test_align_methods.py and tests/reward/conftest.py.
    """
    from stages.algorithms import DIRECT_METHODS, RL_PRESETS
    from stages.policy.critics import ValueRegression
    from stages.policy.policy_update import PolicyGradient
    from stages.reward_models.reward_data import standardise
    from stages.rl import Config, resolve_preset
    from tests.common import random_value_head
    from tests.reward.test_losses import CASES, OUTPUTS, setup
    from tests.training.test_align_methods import World
    from tests.training.test_micro_batches import GROUP, VARIANTS, groups, texts

    torch.set_num_threads(1)
    found, paths = {}, {"policy": policy, "other": other}
    for method in DIRECT_METHODS:
        world = World(paths, json.loads(preferences), method=method)
        logged = world.objective.prepare(world.policy, world.items, "cpu")
        gradient, metrics, judged = stepped(world.policy, world.objective, world.items, 150)
        found[f"align/{method}"] = gradient, {**metrics, **logged}, judged
    for name, (data, objective, settings, _) in CASES.items():
        outputs = OUTPUTS.get(name, 1)
        model, items, loss, _ = setup(policy, json.loads(rows)[data], objective, n=6, outputs=outputs, **settings)
        del model._posttrain_lean  # our own forward, which rounds nothing to float32
        if objective == "regression":
            standardise(items, None)
        found[f"reward_model/{name}"] = stepped(model, loss, items, 100)
    for name in (*RL_PRESETS, *VARIANTS):
        preset, changes = VARIANTS.get(name, (name, {}))
        config = Config(preset=preset, num_generations=GROUP, **changes)
        row = resolve_preset(config)[0] if name in VARIANTS else RL_PRESETS[name]
        head = random_value_head(32).double() if "shared" in name else None
        objective = PolicyGradient(row, config, value_head=head)
        if row.kl_loss_estimator == "full":
            objective.anchor = load_policy(other).double()
        if row.distillation_weight:
            objective.teacher = load_policy(other).double()
        items = groups() + (texts() if row.ptx_coef else [])
        found[f"rl/{name}"] = stepped(load_policy(policy).double(), objective, items, 60)
    for preset, changes in (("ppo", {}), ("ppo", {"cliprange_value": 0.2}), ("ppo_outcome", {}), ("vapo", {})):
        config = Config(preset=preset, num_generations=GROUP, **changes)
        objective = ValueRegression(resolve_preset(config)[0], config, 0.5)
        model = new_reward_model(policy).double()
        found[f"critic/{preset} {len(changes)}"] = stepped(model, objective, groups(), 45)
    written(found, out)


def stepped(model, objective, items, max_tokens: int, sharding: str = "none"):
    """(gradient, metrics, metrics of a pass over three items) of a first step."""
    torch.set_num_threads(1)
    config = OptimizerConfig(
        max_tokens_per_micro_batch=max_tokens,
        max_grad_norm=1e9,
        sharding=sharding,
        forward="model" if sharding == "full" else "auto",
    )
    trainer = Trainer(model, objective, config, 3)
    metrics = trainer.step(items)
    gradient = torch.cat([whole(p.grad).flatten() for p in model.parameters() if p.grad is not None])
    return gradient, metrics, trainer.evaluate(items[:3])


def written(found, out: str) -> None:
    everyone = ranks.gather({name: float(g.double().sum()) for name, (g, _, _) in found.items()})
    assert all(one == everyone[0] for one in everyone), "ranks disagree"
    if ranks.rank() == 0:
        torch.save(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
