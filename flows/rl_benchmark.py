"""rl_benchmark: every RL preset from the same model with the same budget, over several seeds, in one table with curves.

    posttrain run rl_benchmark --preset demo                                   # all presets on the embedded world, seeds 0 1 2
    posttrain run rl_benchmark --preset length_bias                            # the sequence mean of GRPO against a constant and a token mean: lengths of right and of wrong answers
    posttrain run rl_benchmark --set model=path/or/ref --set data.prompts=prompts.jsonl --set arms='{grpo: {}, dapo: {},
    mine: {preset: grpo, beta: 0}}'

The budget is ``iterations`` rollout batches of the same number of completions. An arm is a name with the settings in
which it differs from the section ``rl`` (its preset is its name where it names none). Steps: `rl_ARM_SEED`,
`evaluate_ARM_SEED`, and `learning` with the table.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from flows.config import ConfigError, merge
from flows.recipe import Run, recipe
from flows.start import IteratedConfig, reward_inputs, scorer, starting_policy
from flows.steps import Source, evaluate, ingest
from stages.algorithms import RL_PRESETS
from stages.learning import Config as LearningConfig
from stages.reward.components import RewardComponent
from stages.rl import Config as RLConfig
from stages.rl import arm_of

#: What a preset needs to be itself at a small scale, where answers have some twenty tokens and rewards are 0 and 1;
#: everything else is the section `rl`. online_ipo: a verdict against the other makes p = sigmoid(1) = .73, so that tau
#: = .05 asks for the 4.6 nats between two answers that labels of 0 and 1 ask for at the paper's .1 (at .5 it asks for
#: .46, which is next to nothing). vapo: its lambda 1 - 1/(.05 length) is 0 below 20 tokens, one-step TD errors of a
#: critic that has just begun; lam_alpha = 1 makes it .93 at 15 tokens. sdpo: its teacher, whatever the section's reference.
NEEDS: dict[str, dict[str, Any]] = {
    "astar_po": {"num_generations": 1, "options": {"beta": 0.1}},
    "ppo_ptx": {"ptx_coef": 0.1, "ptx_batch_ratio": 0.25, "ptx_max_length": 128},
    "vapo": {"critic_warmup_steps": 5, "lam_alpha": 1.0},
    "ppo_penalty_adaptive": {"target_kl": 0.01},
    "grpo_plus": {"context_schedule": []},
    "sppo": {"options": {"eta": 10.0}},
    "online_ipo": {"options": {"tau": 0.05}},
    "trpo": {"fisher_fraction": 0.125},
    "sdpo": {"ref_mode": "ema", "ref_decay": 0.95},
}


class Config(IteratedConfig):
    NOT_READ: ClassVar = dict.fromkeys(("promote", "promote_as"), "a study puts no model into office")
    arms: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description=(
            "Name -> settings in which the arm differs from `rl`; empty: every preset "
            "that answers a prompt once (all but agent, unless `rl` has an environment)."
        ),
    )
    seeds: list[int] = Field(default_factory=lambda: [0, 1, 2], min_length=1, description="Seeds of each arm.")
    iterations: int = Field(
        40, ge=1, description="Rollout batches per run; max_steps follows from num_iterations and num_minibatches."
    )
    rl: RLConfig = Field(RLConfig(), description="What all arms share.")
    learning: LearningConfig = Field(LearningConfig(), description="The table.")


def arm_config(shared: RLConfig, name: str, settings: dict[str, Any], iterations: int) -> RLConfig:
    """The settings of one arm: its preset, its needs, the budget in optimizer steps and in completions."""
    preset = settings.get("preset", name)
    if preset not in RL_PRESETS:
        raise ConfigError(
            f"arms: {name} names no preset; write {name}: {{preset: grpo, ...}}. The presets are:"
            f" {', '.join(RL_PRESETS)}"
        )
    values = merge(
        merge(shared.model_dump(mode="json", exclude_unset=True), NEEDS.get(preset, {})), {**settings, "preset": preset}
    )
    arm = arm_of(values, settings)
    passes = arm.num_iterations or RL_PRESETS[preset].num_iterations
    prompts = max(1, shared.prompts_per_step * shared.num_generations // arm.num_generations)
    return arm.model_copy(update={"max_steps": iterations * passes * arm.num_minibatches, "prompts_per_step": prompts})


@recipe(Config)
def rl_benchmark(run: Run, config: Config) -> dict:
    """Every RL preset from the same model with the same budget over several seeds: one table with curves."""
    source = Source(run, config)
    wanted = config.arms or {name: {} for name in RL_PRESETS if name != "agent" or config.rl.environment}
    arms = {name: arm_config(config.rl, name, settings, config.iterations) for name, settings in wanted.items()}
    prompts = ingest(run, "prompts", source("prompts"), config)
    start = starting_policy(run, source, config)
    steps = [name for name, arm in arms.items() if RL_PRESETS[arm.preset].advantage == "process"]
    components = [
        *config.evaluate.rewards,
        *(c for arm in arms.values() for c in arm.rewards),
        *([RewardComponent(name="steps", kind="model")] if steps else []),
    ]
    judge = scorer(run, source, config, components, start)
    held_out = {
        "prompts": prompts,
        "reward_model": judge,
        **reward_inputs(source, config, config.evaluate.rewards, start),
    }
    before = evaluate(run, "start", start, config.evaluate, **held_out)

    def trained(seed: int, name: str, arm: RLConfig) -> tuple[str, str]:
        asks = name in steps or any(c.kind == "model" for c in arm.rewards)
        done = run(
            "rl",
            f"rl_{name}_{seed}",
            model=start,
            data=prompts,
            config=arm,
            seed=seed,
            reward_model=judge if asks else None,
            ptx=source("text") if arm.preset == "ppo_ptx" else None,
            name_as=f"{name}-{seed}",
            **reward_inputs(source, config, arm.rewards, start),
        )
        return done["rollouts"], evaluate(run, f"{name}_{seed}", done["model"], config.evaluate, **held_out)["samples"]

    runs = [(seed, name) for seed in config.seeds for name in arms]
    found = run.together([lambda seed=seed, name=name: trained(seed, name, arms[name]) for seed, name in runs])
    rollouts, evaluations = ({f"{name}.{seed}": pair[i] for (seed, name), pair in zip(runs, found)} for i in (0, 1))
    outcome = run(
        "learning", rollouts=rollouts, evaluations=evaluations, start=before["samples"], config=config.learning
    )
    metric, rows = config.learning.metric, []
    for name in arms if outcome.metrics else ():  # a plan has no numbers
        value, low, high, worst, best = (
            outcome.metrics[f"{name}/{key}"] for key in ("value", "low", "high", "worst_seed", "best_seed")
        )
        lengths = {
            f"tokens, {which}": " to ".join(
                f"{outcome.metrics[key]:.1f}"
                for when in ("first", "last")
                if (key := f"{name}/length_{which}_{when}") in outcome.metrics
            )
            for which in ("right", "wrong")
        }
        rows.append(
            {
                "arm": name,
                metric: round(value, 4),
                "95%": f"[{low:.3f}, {high:.3f}]",
                "seeds": f"{worst:.3f} to {best:.3f}",
                **lengths,
            }
        )
    return {
        "start": before.metrics.get(metric),
        "scores": sorted(rows, key=lambda row: -row[metric]),
        "results": outcome["results"],
    }
