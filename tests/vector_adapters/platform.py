"""Vectors of the parts that are no method: keys, merged weights, memory, monitoring, the reward cascade."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from stages import merge, preflight
from stages.models import memory
from stages.policy.credit import explained_variance
from stages.registry import get_spec
from stages.reward import grape
from stages.spec import canonical_key
from storage import costs


def cache_key(i, p):
    canonical, key = canonical_key(i["stage"], i["code_version"], i["config"], i["inputs"])
    return {"canonical": canonical, "key": key}


def linear_merge(i, p):
    config = merge.Config(method="linear", coefficients=dict(zip("ab", i["coefficients"])))
    shares = merge.coefficients_of(config, ["a", "b"])
    return {
        "merged": merge.combine(
            config, "w", [torch.tensor(w, dtype=torch.float64) for w in i["weights"]], list(shares.values())
        )
    }


def cascade(i, p):
    found = [
        grape.route(s["rule"] if s["rule_valid"] else None, s["rm"], s["rm_conf"], s["judge"], p["rm_conf_min"])
        for s in i["samples"]
    ]
    return {"tier": [tier or "none" for _, tier in found], "reward": [reward for reward, _ in found]}


#: The plans that the texts count, as settings and inputs of our stages. The texts' DPO has a reference of its own;
#: where none is given, the policy stands for it.
PLANS = {
    "sft": ("sft", {}, ()),
    "ppo": ("rl", {"preset": "ppo", "rewards": [{"kind": "model"}]}, ("reward_model",)),
    "grpo_rm": ("rl", {"preset": "grpo", "beta": 0.04, "rewards": [{"kind": "model"}]}, ("reward_model",)),
    "grpo_rule_kl": ("rl", {"preset": "grpo", "beta": 0.04}, ()),
    "dapo_rule_no_kl": ("rl", {"preset": "dapo"}, ()),
    "grpo_plus": ("rl", {"preset": "grpo_plus"}, ()),
    "dr_grpo": ("rl", {"preset": "dr_grpo"}, ()),
    **{name: ("align", {"method": name}, ("reference",)) for name in ("dpo", "ipo", "kto", "apo_zero")},
    "dpo_cached_ref": ("align", {"method": "dpo"}, ()),
    **{name: ("align", {"method": name}, ()) for name in ("orpo", "simpo", "cpo")},
    "rm_train": ("reward_model", {}, ()),
}


def roles_of(plan):
    stage, config, given = PLANS[plan]
    spec = get_spec(stage)
    return spec.roles(spec.config(**config), {"model", "data", *given})


def models_held(roles):
    """Role multiple: models of the transformer's size that are held at a time at most."""
    return max(sum(not r.before for r in roles), sum(r.trained or r.before for r in roles))


def role_multiples(i, p):
    plans = {
        "ppo": ["ppo"],
        "grpo_with_rm": ["grpo_rm"],
        "grpo_rule_with_ref": ["grpo_rule_kl"],
        "dapo_grpo_plus_dr_grpo_rule": ["dapo_rule_no_kl", "grpo_plus", "dr_grpo"],
        "dpo_ipo_kto_apo": ["dpo", "ipo", "kto", "apo_zero"],
        "dpo_with_cached_ref": ["dpo_cached_ref"],
        "orpo_simpo_cpo": ["orpo", "simpo", "cpo"],
    }
    found = {}
    for name, alike in plans.items():
        (found[name],) = {models_held(roles_of(plan)) for plan in alike}
    return found


def states(i, p):
    found = {}
    for name in (*PLANS, "orpo_simpo_cpo"):
        roles = roles_of("simpo" if name == "orpo_simpo_cpo" else name)
        found[name] = memory.state_bytes(
            [i["params"]] * sum(r.trained for r in roles),
            [i["params"]] * sum(not r.trained for r in roles),
            p["bytes_trainable"],
            p["bytes_frozen"],
        )
    return {
        "bytes": {
            name: found[name]
            for name in (
                "sft",
                "ppo",
                "grpo_rm",
                "grpo_rule_kl",
                "dapo_rule_no_kl",
                "dpo",
                "dpo_cached_ref",
                "orpo_simpo_cpo",
                "rm_train",
            )
        }
    }


def costs_of_labels(i, p):
    rows = costs.ledger(
        [("people", {"human_labels": i["human_pairs"]}), ("judge", {"judge_calls": i["ai_pairs"]})],
        {"human_labels": p["human_unit"], "judge_calls": p["ai_unit"]},
    )
    return {"human": rows[0]["total"], "ai": rows[1]["total"], "total": costs.totals(rows)["total"]}


def kv_cache(i, p):
    """One sequence of the given length, prompt and completion, in values of the given size."""
    size = {2: torch.float16, 4: torch.float32}[p["bytes_per_value"]]
    text = SimpleNamespace(num_hidden_layers=i["layers"], num_key_value_heads=i["kv_heads"], head_dim=i["head_dim"])
    source = SimpleNamespace(
        config=SimpleNamespace(
            generation_batch=64, prompts_per_step=1, num_generations=1, longest_completion=i["tokens"] - 1024
        ),
        policy=SimpleNamespace(
            model=SimpleNamespace(
                config=SimpleNamespace(get_text_config=lambda: text), parameters=lambda: [torch.empty(1, dtype=size)]
            )
        ),
    )
    return {"bytes": preflight.kv_bytes(source, 1024)}


ADAPTERS = {
    "stage_cache_key": cache_key,
    "weight_merge_linear": linear_merge,
    "cascade_route": cascade,
    "memory_kv_cache": kv_cache,
    "memory_role_multiples": role_multiples,
    "memory_states_7b": states,
    "memory_lora": lambda i, p: {
        "bytes": memory.state_bytes([i["lora_params"]], [i["params"]], p["bytes_trainable"], p["bytes_frozen"])
    },
    "label_cost_ledger": costs_of_labels,
    "memory_logits": lambda i, p: {
        "bytes": memory.logits_bytes(i["batch"] * i["tokens"], i["vocab"], p["bytes_per_value"])
    },
    "explained_variance": lambda i, p: {
        "explained_variance": explained_variance(i["values"], i["returns"], np.ones(len(i["values"]), bool))
    },
}
