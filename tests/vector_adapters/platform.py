"""Vectors of the parts that are no method: keys, merged weights, memory, monitoring, the reward cascade."""
from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from stages import grape, merge, preflight
from stages.credit import explained_variance
from stages.spec import canonical_key


def cache_key(i, p):
    canonical, key = canonical_key(i["stage"], i["code_version"], i["config"], i["inputs"])
    return {"canonical": canonical, "key": key}


def linear_merge(i, p):
    config = merge.Config(method="linear", coefficients=dict(zip("ab", i["coefficients"])))
    shares = merge.coefficients_of(config, ["a", "b"])
    return {"merged": merge.combine(config, "w", [torch.tensor(w, dtype=torch.float64) for w in i["weights"]], list(shares.values()))}


def cascade(i, p):
    found = [grape.route(s["rule"] if s["rule_valid"] else None, s["rm"], s["rm_conf"], s["judge"], p["rm_conf_min"]) for s in i["samples"]]
    return {"tier": [tier or "none" for _, tier in found], "reward": [reward for reward, _ in found]}


def kv_cache(i, p):
    """One sequence of the given length, prompt and completion, in values of the given size."""
    size = {2: torch.float16, 4: torch.float32}[p["bytes_per_value"]]
    text = SimpleNamespace(num_hidden_layers=i["layers"], num_key_value_heads=i["kv_heads"], head_dim=i["head_dim"])
    source = SimpleNamespace(config=SimpleNamespace(generation_batch=64, prompts_per_step=1, num_generations=1, longest_completion=i["tokens"] - 1024),
                             policy=SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text),
                                                                          parameters=lambda: [torch.empty(1, dtype=size)])))
    return {"bytes": preflight.kv_bytes(source, 1024)}


ADAPTERS = {
    "stage_cache_key": cache_key, "weight_merge_linear": linear_merge, "cascade_route": cascade, "memory_kv_cache": kv_cache,
    "explained_variance": lambda i, p: {"explained_variance": explained_variance(i["values"], i["returns"], np.ones(len(i["values"]), bool))},
}
