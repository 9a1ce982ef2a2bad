"""Rewards that compare answers with each other: who asks them for P(y > y'), and where an answer would be alone (NASH,
SPPO, ONLINE-IPO, rs.rank).
"""

from __future__ import annotations

from stages.algorithms import RLPreset
from stages.reward.components import RewardComponent
from stages.reward.rewards import Rewards
from stages.spec import ConfigError

#: What a component may be told about the size of a score, which P(y > y') is not: setting -> what leaves it alone.
_OF_A_SCORE = {
    "at_least": None,
    "weight": 1.0,
    "from_step": 0,
    "clip": None,
    "squash": "none",
    "normalise": "none",
    "no_eos_reward": None,
    "empty_reward": -1.0,
    "ranking": "round_robin",
}

#: Metrics of validation answers that say nothing where every reward that counts was left out.
NOTHING_COUNTED = ("reward", "reward/raw", "reward_std", "reward/unscorable_fraction")


def counted(rewards: Rewards) -> list[RewardComponent]:
    """The components that are paid at all; one of weight 0 is only watched."""
    return [c for c in rewards.components if c.counts]


def preferences_by(config, row: RLPreset, rewards: Rewards) -> str | None:
    """Name of the component that is asked for P(y > y'), where the preset's advantage or loss is made of such
    probabilities and a model that compares is the reward; None where they are those of a Bradley-Terry model, sigmoid(r
    - r').

    Raises:
        ConfigError: what else is set would not enter the probability.
    """
    # whose rewards are numbers of the control
    if not row.reads_preferences or config.reward_override in ("random", "format_only"):
        return None
    asked = [c for c in counted(rewards) if rewards.relative(c)]
    if not asked:
        return None
    component, others = asked[0], [c.name for c in counted(rewards) if c is not asked[0]]
    who = f"preset={config.preset} asks reward {component.name!r} how probable it is that one answer beats another"
    if others:
        raise ConfigError(
            f"{who}, which {', '.join(others)} would not change; write weight: 0 for"
            f" {'it' if len(others) == 1 else 'them'} (then only watched), or preset=grpo, which adds rewards up."
        )
    if not hasattr(rewards.scorers[component.name], "preferences"):
        raise ConfigError(
            f"{who}, and the combined model of its input has no such probability of its own; give one of its members,"
            " or write preset=grpo."
        )
    unread = [
        f"{name}={getattr(component, name)}" for name, plain in _OF_A_SCORE.items() if getattr(component, name) != plain
    ]
    if unread:
        raise ConfigError(
            f"{who}, which {', '.join(unread)} of that reward would not change; leave"
            f" {'it' if len(unread) == 1 else 'them'} out, or write preset=grpo."
        )
    cache = bool(row.soft_punish_share) if config.soft_punish_cache is None else config.soft_punish_cache > 0
    refused = {
        f"truncation_policy={row.truncation_policy} (write score or mask; a cut answer loses against every other)": (
            row.truncation_policy in ("zero", "penalty")
        ),
        "the soft overlong penalty (write soft_punish_cache=0)": cache and config.reward_override == "none",
        f"kl_coef={row.kl_reward_coef} (write kl_coef=0; the loss has the KL to the reference as tau)": (
            row.kl_reward_coef > 0 and row.advantage != "win_rate"
        ),
        "dynamic_sampling, which looks at win rates inside the group (write dynamic_sampling=false)": (
            row.dynamic_sampling and not inside(row)
        ),
    }
    for text in (text for text, on in refused.items() if on):
        raise ConfigError(f"{who}, which does not go with {text}.")
    return component.name


def inside(row: RLPreset) -> bool:
    """Whether the probabilities that are read are those inside the group, averaged: equal ones then say that it teaches
    nothing.
    """
    return row.advantage == "win_rate" and row.opponent == "self"


def check_constraints(rewards: Rewards) -> None:
    """Refuse ``at_least`` of rewards that say how an answer does beside the others of its group: their mean is the same
    whatever the policy does.

    Raises:
        ConfigError: what to write instead.
    """
    for component in (c for c in rewards.components if c.at_least is not None and rewards.relative(c)):
        raise ConfigError(
            f"reward {component.name!r} compares the answers of a group with each other, so its mean is that of every"
            f" policy and at_least={component.at_least:g} says nothing; give a reward that scores answers one by one,"
            " or write a weight instead."
        )


def check_company(config, row: RLPreset, rewards: Rewards, stored: bool = False) -> None:
    """Refuse rewards that say how an answer does beside the others of its group, where it would be alone: they would be
    the same number for every answer. Answers that are ``stored`` have earned theirs.

    Raises:
        ConfigError: what to write instead.
    """
    alone = {
        f"num_generations={config.num_generations} (write num_generations=4)": (
            config.num_generations == 1 and not stored
        ),
        "baseline=greedy, one completion (write baseline=moving_average)": row.read_baseline == "greedy",
        "baseline_samples=1 (write baseline_samples=8)": (
            row.read_baseline in ("table", "v_star") and config.baseline_samples == 1
        ),
        "vine_samples=1 (write vine_samples=9)": row.advantage == "vine" and config.vine_samples == 1,
    }
    for component in (
        c for c in counted(rewards) if rewards.compares(c) and config.reward_override in ("none", "inverted")
    ):
        for text in (text for text, on in alone.items() if on):
            raise ConfigError(
                f"reward {component.name!r} ({component.kind}) compares an answer with the others of its group, and"
                f" there are none with {text}; or take a reward that scores answers one by one."
            )
        if row.advantage == "vine" and rewards.relative(component):
            raise ConfigError(
                f"reward {component.name!r} compares continuations with each other, so that every step is worth 1/2;"
                " write advantage=group_mean, or take a reward that scores answers one by one."
            )


def held_out(stage, rewards: Rewards) -> Rewards:
    """The rewards of validation answers, of which there is one per prompt: without those that compare answers.

    Raises:
        ConfigError: ``select_by`` reads one that is left out.
    """
    names = [c.name for c in rewards.components if rewards.compares(c)]
    if not names or not stage.config.eval_prompts:
        return rewards
    left = rewards.without(names)
    gone = {f"reward/{name}" for name in names} | (set() if counted(left) else set(NOTHING_COUNTED))
    if stage.config.select_by in gone:
        raise ConfigError(
            f"select_by={stage.config.select_by}: validation draws one answer per prompt, which {', '.join(names)}"
            " cannot compare with another; write select_by=completions/correct_fraction with a reward of kind verifier"
            " (weight: 0 watches it), or leave select_by out."
        )
    stage.warn(
        "validation_rewards",
        f"Validation draws one answer per prompt, which {', '.join(names)} cannot compare with another, so "
        + (
            "validation/reward holds the other rewards only. Add a scalar reward model with weight 0 to watch what they say."
            if counted(left)
            else (
                "there is no validation/reward, and over-optimisation is told from verdicts alone. "
                "Add {name: verdict, kind: verifier, weight: 0}, or a scalar reward model with weight 0, to watch."
            )
        ),
    )
    return left
