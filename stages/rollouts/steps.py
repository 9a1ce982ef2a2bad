"""Reasoning steps of a completion: where they end, and what each earned or is worth (GRPO-PROCESS, VINEPPO)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stages.generation import Sample, score, warn_of_failures
from stages.rollouts.groups import Group, control
from stages.rollouts.policy import PolicySampler


def step_ends(pieces: list[str], separator: str) -> list[int]:
    """Index of the last token of each non-blank reasoning step: the token that completes its separator, or the last token (GRPO-PROCESS)."""
    text, bounds = "".join(pieces), np.cumsum([len(p) for p in pieces])
    ends, start = [], 0
    for part in text.split(separator):
        stop = start + len(part) + len(separator)
        if part.strip():
            ends.append(int(min(np.searchsorted(bounds, stop), len(pieces) - 1)))
        start = stop
    return ends


def _pieces(renderer, ids: list[int]) -> list[str]:
    return [renderer.tokenizer.decode([t], skip_special_tokens=True) for t in ids]


def process_rewards(sample: Sample, scorer, renderer, separator: str) -> tuple[list[int], list[float]]:
    """(last token, reward) of each step: a process reward model's probability that it is right, or a scalar reward model's score of
    the response up to there (GRPO-PROCESS). A completion whose steps cannot be read has none."""
    pieces = _pieces(renderer, sample.ids)
    if hasattr(scorer, "step_probabilities"):
        from stages.reward_scorers import Response

        ends = step_ends(pieces, scorer.card.options["separator"])
        found = scorer.step_probabilities([Response(sample.prompt["prompt"], [{"role": "assistant", "content": sample.text}], row=sample.prompt)])[0]
        return (ends, found) if len(ends) == len(found) else ([], [])
    if not hasattr(scorer, "score_ids"):
        raise ValueError(f"advantage=process reads a process reward model (objective=prm) or a scalar one, not objective={scorer.card.objective}; give "
                         "another reward_model.")
    ends = step_ends(pieces, separator)
    rows = [list(sample.prompt_ids) + sample.ids[: end + 1] for end in ends]
    return ends, scorer.score_ids(rows) if rows else []


def monte_carlo(stage, policy: PolicySampler, rewards, samples: list[Sample], group_at: list[Group], iteration: int, version: int) -> tuple[list, list[list[float]]]:
    """(steps, values before each step) of every completion: the mean reward of ``vine_samples`` continuations from each border (VINEPPO).

    Steps end at the separator, in an environment with turns, whose actions are played again. Prompts are continued once for their group.
    Continuations that the engine lost or that have no score are left out. Where none is left, nothing was learned at that border: its value is
    the last known one (the step before it earns nothing, the one behind it what both did), the prompt's the mean reward of its group.
    """
    config, starts, borders, prompt_at = stage.config, [], [], {}  # starts: (sample, tokens or turns that are kept); borders: a completion's places there
    number, group_of = {id(g): k for k, g in enumerate(group_at)}, []  # of every start
    steps = [[t["end"] - 1 for t in s.turns] if policy.agent else step_ends(_pieces(policy.renderer, s.ids), config.step_separator) for s in samples]
    steps = [[*ends[:-1], len(s.ids) - 1] if s.ids else [] for ends, s in zip(steps, samples)]
    seeds = []

    def border(i: int, k: int) -> int:
        """The place of step k of completion i."""
        seeds.append([stage.seed_for("vine", iteration, samples[i].prompt["row_id"], i, k, j) for j in range(config.vine_samples)])
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
            control(stage, sample, "vine", iteration, k, j)
    found = [[s.total for s in group if np.isfinite(s.total)] for group in made]
    values = []
    for group, places in zip(group_at, borders):
        last = float(np.mean([s.total for s in group.samples if np.isfinite(s.total)] or [0.0]))
        values.append([last := float(np.mean(found[at])) if found[at] else last for at in places])
    return [(ends, None) for ends in steps], values
