"""Rewards of one's own and behind a URL, through the stage: what is scored as a group, asked in batches, stored and
logged.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.chat_server import chat_server
from tests.training.test_rl_parts import rl, rows_of  # noqa: F401

GROUP = """
async def score(prompts, completions, rows):
    assert all(p == prompts[0] for p in prompts) and all(r["source"] for r in rows)
    best = max(map(len, completions))
    return [{"reward": len(c) / max(1, best), "size": len(completions), "empty": not c} for c in completions]
"""


def test_a_group_function_and_a_reward_server_train_a_policy(rl):
    """Every group is one call of all its completions; the server sees them all; parts, metrics and means agree with
    what is stored.
    """
    with chat_server(
        lambda body: json.dumps({"rewards": [float(len(query) % 3) for query in body["query"]]}).encode()
    ) as server:
        result, metrics = rl(
            "own",
            {
                "preset": "dr_grpo",
                "reward_override": "none",
                "truncation_policy": "score",
                "max_steps": 2,
                "num_generations": 4,
                "rewards": [
                    {"name": "mine", "kind": "python", "source": GROUP, "scope": "group"},
                    {
                        "name": "rm",
                        "kind": "remote",
                        "url": server.url,
                        "endpoint_model": "served",
                        "batch_size": 3,
                        "weight": 0.5,
                    },
                ],
            },
        )
        seen = [body for body in server.seen]
    rows = rows_of(result)
    assert (
        rows and all(len(body["query"]) <= 3 for body in seen) and sum(len(body["query"]) for body in seen) >= len(rows)
    )
    for row in rows:
        parts = {c["name"]: c["value"] for c in row["reward_components"]}
        assert (
            list(parts) == ["mine", "rm", "mine/size", "mine/empty"]
            and parts["mine/size"] % 4 == 0
            and parts["rm"] in (0.0, 1.0, 2.0)
        )
        assert row["reward"] == pytest.approx(parts["mine"] + 0.5 * parts["rm"])
        assert {c["name"]: c["weight"] for c in row["reward_components"]} == {
            "mine": 1.0,
            "rm": 0.5,
            "mine/size": 0.0,
            "mine/empty": 0.0,
        }
    for iteration, found in enumerate(metrics):
        own = [
            {c["name"]: c["value"] for c in row["reward_components"]} for row in rows if row["iteration"] == iteration
        ]
        assert found["reward/mine/size"] == pytest.approx(np.mean([one["mine/size"] for one in own])) and found[
            "reward/mine"
        ] == pytest.approx(np.mean([one["mine"] for one in own]))
        assert found["reward/rm/unscorable_fraction"] == 0.0
