"""Answers that the evaluated policy samples: one greedy, several drawn, or over the turns of an environment."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stages.evaluation.plan import Plan


class Sampled:
    """Answers of the policy of an evaluation. The counterpart of ``stages.evaluation.given.Given``."""

    def __init__(self, plan: Plan):
        self.plan, self.stage, self.config = plan, plan.stage, plan.config
        self.agent = None

    @property
    def fewest(self) -> int:
        """Answers to every prompt."""
        return self.config.num_samples + self.config.greedy

    def drawn(self, rows: Sequence[tuple[dict, list[int]]]) -> list[tuple[str, Any, dict]]:
        """(mode, sample, {}) of every answer to these prompts, prompt by prompt."""
        from stages.generation import sampling_params, warn_of_failures

        stage, config, sampler = self.stage, self.config, self.plan.sampler
        params = sampling_params(config, self.plan.renderer)
        started = time.monotonic()
        groups = {}
        if config.num_samples:
            seeds = [
                [
                    stage.seed_for("eval", row["row_id"], k + row.get("order", 0) * config.num_samples)
                    for k in range(config.num_samples)
                ]
                for row, _ in rows
            ]
            groups["sample"] = self.draw(sampler, rows, params, seeds)
        if config.greedy:
            greedy = replace(params, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
            groups["greedy"] = self.draw(sampler, rows, greedy, [[0] for _ in rows])
        tokens = sum(len(s.ids) for part in groups.values() for group in part for s in group)
        stage.perf(len(rows), {"tokens_per_second": tokens / max(1e-9, time.monotonic() - started)})
        flat = [(mode, sample, {}) for i in range(len(rows)) for mode, part in groups.items() for sample in part[i]]
        warn_of_failures(stage, sampler, [sample for _, sample, _ in flat])
        return flat

    def draw(self, sampler, rows, params, seeds) -> list[list]:
        """Answers, or in an environment trajectories, of each ``(row, prompt ids)``."""
        from stages.acting.agents import Agent
        from stages.evaluation import forcing
        from stages.generation import check_continued, sample_groups
        from stages.reward.debate import Debaters

        config, renderer = self.config, self.plan.renderer
        if config.environment:
            if self.agent is None:
                self.agent = (Debaters if self.plan.debate else Agent)(config, renderer)
            return self.agent.sample(sampler, rows, params, seeds)
        if forcing.asked(config):
            check_continued(sampler, params)
        groups = sample_groups(sampler, rows, params, seeds)
        if not forcing.asked(config):
            return groups
        return forcing.forced(
            config,
            sampler,
            renderer,
            rows,
            groups,
            params,
            lambda row, k, n: self.stage.seed_for("forced", row["row_id"], row.get("order", 0), k, n),
        )

    def close(self) -> None:
        """End the environment's processes."""
        if self.agent is not None:
            self.agent.close()
            self.agent = None


def not_of_the_policy(config) -> str:
    """Why answers are not drawn from the policy's own distribution; empty where they are."""
    if not config.num_samples:
        return "they are greedy (num_samples=0)"
    changed = [
        f"{name}={getattr(config, name)}"
        for name, plain in (
            ("temperature", 1.0),
            ("top_p", 1.0),
            ("top_k", 0),
            ("min_p", 0.0),
            ("repetition_penalty", 1.0),
            ("frequency_penalty", 0.0),
            ("presence_penalty", 0.0),
        )
        if getattr(config, name) != plain
    ]
    return f"they are drawn with {', '.join(changed)}" if changed else ""
