"""Vectors of multi-turn RL, tool use, trajectory rewards, debate, VinePPO and length rewards."""

from __future__ import annotations

import numpy as np
import pytest

from stages import estimators
from stages.acting import agent_rewards, tools
from stages.reward import debate
from stages.reward.components import RewardComponent
from stages.reward.rewards import Rewards
from stages.verification.rule_rewards import kimi_length, target_length
from tests.production import rendered_mask


def turn_returns(i, p):
    returns = estimators.turn_returns(i["turn_rewards"], p["gamma"])
    of = np.asarray(i["turn_of_token"])
    return {"turn_returns": returns, "advantages": np.where(of >= 0, returns[np.maximum(of, 0)] - p["baseline"], 0.0)}


def events_of(step):
    """One step of the catalogue as events: indicators of 0 and 1, and a share of fields."""
    happened = [name for name in ("url_changed", "ui_match", "file_created", "goal_verified") if step[name]]
    return [*happened, f"fields:{step['fields_filled']}/{step['fields_expected']}"]


def step_reward(i, p):
    rewards = agent_rewards.step_rewards([events_of(s) for s in i["steps"]], p["weights"])
    return {
        "reward": rewards,
        "weights_sum": sum(p["weights"].values()),
        "ordering_warning": bool(agent_rewards.check_step_weights(p["weights"])),
    }


def step_weighted(i, p):
    weights = dict(zip(i["order"], p["weights"]))
    steps = [
        {
            "url_changed": n,
            "ui_match": u,
            "fields_filled": round(4 * f),
            "fields_expected": 4,
            "file_created": c,
            "goal_verified": g,
        }
        for n, u, f, c, g in i["steps"]
    ]
    return step_reward({"steps": steps}, {"weights": weights})


def milestones(i, p):
    out = {
        "category_sums": agent_rewards.category_sums(i["catalogue"]),
        "sums": agent_rewards.category_sums(i["catalogue"]),
    }
    if "fired" in i:
        for name, normalise in (("cumulative", "none"), ("normalised", "category_sum")):
            worth = agent_rewards.milestones_of(i["catalogue"], normalise)
            out[name] = {
                c: sum(agent_rewards.milestone_rewards([[f"{c}.{k}"] for k, hit in enumerate(hits) if hit] * 2, worth))
                for c, hits in i["fired"].items()
            }
    if "events" in i:
        rewards = agent_rewards.milestone_rewards(
            [[e] for e in i["events"]], agent_rewards.milestones_of(i["catalogue"]), p["once"]
        )
        out |= {"reward": rewards, "cumulative": [sum(rewards[: k + 1]) for k in range(len(rewards))]}
    return out


def refused(weights):
    """The weights that a blend refuses."""
    with pytest.raises(ValueError, match="sum to 1"):
        agent_rewards.check_blend(dict(enumerate(weights)))
    return weights


def blend(i, p):
    weights = {"rule": p["alpha"], "learned": p["beta"], "judge": p["gamma"]}
    values = {
        name: i.get(name, i.get("r_" + {"rule": "rule", "learned": "rm", "judge": "judge"}[name])) for name in weights
    }
    kinds = {"rule": "verifier", "learned": "model", "judge": "judge"}
    rewards = Rewards(
        [RewardComponent(name=n, kind=kinds[n], weight=w, blend=True) for n, w in weights.items()], {}, None
    )
    return {
        "reward": rewards.total_of(values).total,
        "reward_learned_absent_renormalised": rewards.total_of({**values, "learned": None}).total,
        "judge_missing": rewards.total_of({**values, "judge": None}).total,
        "invalid_weights_error": refused([0.5, 0.3, 0.3]),
    }


def debates(i, p):
    """Through the reward component: the judge's probabilities are given, both seats of each debate are scored."""

    class Judge:
        def preferences(self, pairs):
            return [p for p in i["judge_prob_A"] for _ in (0, 1)]

    component = RewardComponent(kind="debate")
    rows = [
        {
            "prompt_row": {"prompt": []},
            "completion_ids": [],
            "debate": {"answers": ["A", "B"], "seat": seat, "said": [[], []]},
        }
        for _ in i["judge_prob_A"]
        for seat in (0, 1)
    ]
    totals = [scored.total for scored in Rewards([component], {component.name: Judge()}, None).score(rows)]
    first, second = totals[0::2], totals[1::2]
    return {
        "reward_A": first,
        "reward_B": second,
        "judge_accuracy": debate.judge_accuracy(i["judge_prob_A"], i["A_is_correct"]),
    }


def vine(i, p):
    values = [sum(r) / len(r) for r in i["rollout_outcomes_per_state"]]
    return {"values": values, "step_advantages": estimators.vine_advantages(values, i["final_reward"])}


def kimi(i, p):
    lengths = i.get("length", i.get("lengths"))
    rewards = kimi_length(lengths, i["correct"])
    return {
        "reward": rewards,
        "rewards": rewards,
        "lambda": kimi_length(lengths, [True] * len(lengths)),
        "all_equal_lengths": kimi_length([7, 7], [True, False]),
    }


def l1(i, p):
    return {
        mode: [
            target_length(n, i["n_target"], c, mode, p["alpha"], p["delta"]) for n, c in zip(i["lengths"], i["correct"])
        ]
        for mode in ("exact", "max")
    }


def masks(i, p):
    mask = rendered_mask(
        [role for role, n in i["segments"] for _ in range(n)],
        [k for k, (_, n) in enumerate(i["segments"]) for _ in range(n)],
        "all_assistant",
    )
    return {"loss_mask": mask, "trained_tokens": sum(mask)}


def interpreter(i, p):
    assert "repeat 50 times" in i["program"]  # the catalogue writes it in words
    return {"output": tools.run_python("a, b = 0, 1\nfor _ in range(50):\n    a, b = b, a + b\nprint(a)")}


ADAPTERS = {
    "step_reward": step_reward,
    "step_weighted": step_weighted,
    "milestone_catalogue": milestones,
    "milestone_sums": milestones,
    "milestone_episode": milestones,
    "reward_blend": blend,
    "blend_simplex": blend,
    "debate_rewards": debates,
    "vineppo_values": vine,
    "length_reward_kimi": kimi,
    "kimi_length_reward": kimi,
    "l1_length_rewards": l1,
    "tool_loss_mask": masks,
    "tool_code_interpreter": interpreter,
    "tool_parse_python_calls": lambda i, p: {"calls": tools.parse_calls(i["function_calls"], p["syntax"])},
    "tool_substitution": lambda i, p: {
        "output": [tools.substitute(t, i["tool_results"], p["mode"]) for t in i["texts"]]
    },
    "toolformer_filter": lambda i, p: {
        "gain": (
            g := tools.toolformer_gain(i["loss_no_call"], i["loss_call_without_result"], i["loss_call_with_result"])
        ),
        "keep": g >= p["tau_f"],
    },
}
METHOD_ADAPTERS = {
    "AGENT-RL": [({"turn_rewards", "turn_of_token"}, turn_returns)],
    "VINEPPO": [({"rollout_outcomes_per_state", "final_reward"}, vine)],
    "DEBATE": [({"judge_prob_A", "A_is_correct"}, debates)],
}
