"""Environment ``verdicts``: a coin says that an answer is right or wrong, and the policy goes on writing.

    posttrain stage rl --input model=DIR --input data=prompts.jsonl --set preset=dr_grpo --set
    loss_agg_mode=seq-mean-token-mean --set environment=verdicts --set max_turns=2

What is written behind the verdict changes no reward, so a loss without a bias leaves its length as it is. A mean over
each completion's tokens does not: a long completion that is said to be wrong loses less per token than a short one, and
one that is said to be right gains less, so that what follows "wrong" grows and what follows "right" shrinks (Dr. GRPO,
Liu et al. 2025; ``AGG``). In a task of its own a policy seldom knows, where it decides to stop, whether it is right;
here it is told. The coin is a function of prompt and answer that nobody can learn. Only the standard library is
imported: environments start at once.
"""

from __future__ import annotations

import hashlib
import json


class VerdictEnvironment:
    """Two turns: an answer, then remarks on the verdict, of which ``says`` are the two texts."""

    def __init__(self, right: str = "That is right.", wrong: str = "That is wrong."):
        self.says, self.won = (wrong, right), None

    def reset(self, task: dict, seed: int) -> list[dict]:
        self.asked, self.won = json.dumps(task["prompt"], sort_keys=True), None
        return list(task["prompt"])

    def step(self, action: str):
        if self.won is not None:
            return [], float(self.won), True, ["goal_verified"] if self.won else []
        self.won = hashlib.sha256(f"{self.asked}\n{action}".encode()).digest()[0] % 2
        return [{"role": "user", "content": self.says[self.won]}], 0.0, False, []
