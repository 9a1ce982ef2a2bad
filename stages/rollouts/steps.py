"""Reasoning steps of a completion: where they end, and what each earned or is worth (GRPO-PROCESS, VINEPPO)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from stages.generation import Sample, score, warn_of_failures
from stages.reward.process_rewards import step_ends, token_pieces
from stages.rollouts.groups import Group, override_reward
from stages.rollouts.policy import PolicySampler


class StepRewards:
    """What each reasoning step of a completion earns by the input ``reward_model``: a process reward model's
    probability that it is right, or a scalar reward model's score of the response up to there (GRPO-PROCESS). A
    completion is scored once.

    Raises:
        ValueError: a reward model of another kind.
    """

    def __init__(self, stage, renderer):
        from stages.reward_models.reward_scorers import load_scorer

        self.scorer = load_scorer(stage.path("reward_model"), stage.device, frozen=stage.config.frozen_dtype)
        self.renderer = renderer
        self.separator = stage.config.step_separator
        if not self.reads_text and not hasattr(self.scorer, "score_ids"):
            raise ValueError(
                "advantage=process reads a process reward model (objective=prm) or a scalar one, not"
                f" objective={self.scorer.card.objective}; give another reward_model."
            )
        if not self.reads_text and not self.scorer.reads_ids_of(renderer):
            raise ValueError(
                "advantage=process scores a completion's token ids with the input reward_model, which has another"
                " tokenizer or chat template than the policy; give a process reward model (objective=prm), which reads"
                " text, or a scalar one with the policy's tokenizer and template."
            )
        stage.warn(
            "rewards_watched",
            "advantage=process pays what the input reward_model says of each step;"
            f" {', '.join(c.name for c in stage.config.rewards)} {'is' if len(stage.config.rewards) == 1 else 'are'}"
            " scored, logged and stored, and paid to nobody. Leave them out, or write another preset to pay them.",
        )
        own = self.scorer.card.options["separator"] if self.reads_text else self.separator
        if own != self.separator:
            stage.warn(
                "step_separator",
                f"Steps end at {own!r}, which the process reward model was trained on, and not at"
                f" step_separator={self.separator!r}; write step_separator={own!r}.",
            )
            self.separator = own

    @property
    def reads_text(self) -> bool:
        return hasattr(self.scorer, "step_probabilities")

    def __call__(self, sample: Sample) -> tuple[list[int], list[float]]:
        """(last token, reward) of each step; none where the steps cannot be read."""
        if sample.steps is None:
            sample.steps = self._of(sample)
        return sample.steps[0], sample.steps[1]

    def _of(self, sample: Sample) -> tuple[list[int], list[float]]:
        ends = step_ends(token_pieces(self.renderer, sample.ids), self.separator)
        if self.reads_text:
            from stages.reward_models.reward_scorers import Response

            found = self.scorer.step_probabilities(
                [Response(sample.prompt["prompt"], [{"role": "assistant", "content": sample.text}], row=sample.prompt)]
            )[0]
        else:
            rows = [list(sample.prompt_ids) + sample.ids[: end + 1] for end in ends]
            found = self.scorer.score_ids(rows) if rows else []
        return (ends, found) if len(ends) == len(found) and np.isfinite(found).all() else ([], [])


def monte_carlo(
    stage,
    policy: PolicySampler,
    rewards,
    samples: list[Sample],
    group_at: list[Group],
    iteration: int,
    version: int,
    earned: Callable[[list[Sample], int], np.ndarray],
) -> tuple[list, list[list[float]]]:
    """(steps, values before each step) of every completion: the mean reward of ``vine_samples`` continuations from each
    border (VINEPPO); ``earned``: what completions sampled at an optimizer step are paid
    (:meth:`stages.rollouts.crediting.Crediting.earned`), cut and long ones as those that they continue.

    Steps end at the separator, in an environment with turns, whose actions are played again. Prompts are continued once
    for their group. Continuations that the engine lost or that have no score are left out. Where none is left, nothing
    was learned at that border: its value is the last known one (the step before it earns nothing, the one behind it
    what both did), the prompt's the mean reward of its group.
    """
    # starts: (sample, tokens or turns that are kept); borders: a completion's places there
    config, starts, borders, prompt_at = stage.config, [], [], {}
    number, group_of = {id(g): k for k, g in enumerate(group_at)}, []  # of every start
    steps = [
        (
            [t["end"] - 1 for t in s.turns]
            if policy.agent
            else step_ends(token_pieces(policy.renderer, s.ids), config.step_separator)
        )
        for s in samples
    ]
    steps = [[*ends[:-1], len(s.ids) - 1] if s.ids else [] for ends, s in zip(steps, samples)]
    seeds = []

    def border(i: int, k: int) -> int:
        """The place of step k of completion i."""
        seeds.append(
            [
                stage.seed_for("vine", iteration, samples[i].prompt["row_id"], i, k, j)
                for j in range(config.vine_samples)
            ]
        )
        starts.append((samples[i], k if policy.agent or not k else steps[i][k - 1] + 1))
        group_of.append(number[id(group_at[i])])
        return len(starts) - 1

    for i, (group, ends) in enumerate(zip(group_at, steps)):
        if not ends:  # the environment failed before anything was said
            borders.append([])
            continue
        if id(group) not in prompt_at:
            prompt_at[id(group)] = border(i, 0)
        borders.append([prompt_at[id(group)], *(border(i, k) for k in range(1, len(ends)))])
    policy.update()
    made = policy.go_on(starts, seeds, replace(policy.params, max_new_tokens=config.completion_limit(version)))
    warn_of_failures(stage, policy.engine, [s for group in made for s in group])
    score(rewards, [s for group in made for s in group], [k for k, group in zip(group_of, made) for _ in group])
    for k, group in enumerate(made):
        for j, sample in enumerate(group):
            override_reward(stage, sample, "vine", iteration, k, j)

    def paid(group: list[Sample], drawn: int) -> list[float]:
        rewards = earned(group, drawn)
        return rewards[np.isfinite(rewards)].tolist()

    found, means = (
        [paid(group, version) for group in made],
        {id(group): float(np.mean(paid(group.samples, group.version) or [0.0])) for group in group_at},
    )
    values = []
    for group, places in zip(group_at, borders):
        last = means[id(group)]
        values.append([last := float(np.mean(found[at])) if found[at] else last for at in places])
    return [(ends, None) for ends in steps], values
