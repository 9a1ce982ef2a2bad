"""Run on one process or on ranks: one float64 step of every objective; rank 0 writes the gradients and metrics. Not a
test module.
"""

import sys

import numpy as np
import torch

from stages.running import ranks
from stages.reward_models.reward_heads import new_reward_model
from stages.models.sharding import whole
from stages.models.modeling import load_policy
from stages.training import Trainer
from tests.training.test_invariance import objectives, taught

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
    torch.set_num_threads(1)
    found = {}
    for name, (objective, make, reward) in objectives().items():
        if name.startswith("rl/") and name not in PRESETS:
            continue
        from stages.settings import OptimizerConfig

        model = (new_reward_model(policy) if reward else load_policy(policy)).double()
        config = OptimizerConfig(
            max_tokens_per_micro_batch=24,
            max_grad_norm=1e9,
            sharding=sharding,
            forward="model" if sharding == "full" else "auto",
        )
        if getattr(getattr(objective, "row", None), "kl_loss_estimator", "") == "full":
            objective.anchor = load_policy(policy).double()
            for parameter in objective.anchor.parameters():
                parameter.data.mul_(0.9)
        trainer = Trainer(model, taught(objective), config, 3)
        items = make(np.random.default_rng(0))
        metrics = trainer.step(items)
        found[name] = (
            torch.cat([whole(p.grad).flatten() for p in model.parameters() if p.grad is not None]),
            metrics,
            trainer.evaluate(items[:3]),
        )
    everyone = ranks.gather({name: float(g.double().sum()) for name, (g, _, _) in found.items()})
    assert all(one == everyone[0] for one in everyone), "ranks disagree"
    if ranks.rank() == 0:
        torch.save(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
