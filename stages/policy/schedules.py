"""What changes over an RL run by the step count: length limits, reference, prompt order, replay, freshness.

Plain functions of counters and numbers, so a resumed run follows the same schedule.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stages.estimators import is_constant
from stages.settings import whole_part


def step_function(schedule: Sequence[Sequence[int]], step: int, default: int) -> int:
    """Value of ``[[first step, value], ...]`` (ascending) at 0-based ``step``; ``default`` before the first entry
    (GRPO-PLUS).
    """
    value = default
    for start, entry in schedule:
        if step >= start:
            value = entry
    return value


def reference_due(mode: str, step: int, every: int) -> bool:
    """Whether the reference moves after optimizer step ``step`` (1-based): ``ema`` always, ``refresh`` every ``every``
    steps (REF-POLICY).
    """
    return mode == "ema" or (mode == "refresh" and step % every == 0)


EARLY_STOP_FACTOR = 1.5  # of early_stop_kl, by which the KL of the whole policy may exceed it


def stops_early(approx_kl: float, early_stop_kl: float) -> bool:
    """Whether the rest of an iteration's minibatches is left out: KL(start of the iteration || policy) in nats per
    token on the next one is above 1.5 times the target (PPO-CLIP).
    """
    return approx_kl > EARLY_STOP_FACTOR * early_stop_kl


def staleness(current_version: int, versions: Sequence[int]) -> list[int]:
    """Trainer version minus (oldest) sample version (ASYNC, ops.async)."""
    return [current_version - v for v in versions]


def freshness_guard(current_version: int, versions: Sequence[int], max_staleness: int) -> list[bool]:
    """Which samples may be trained on (ASYNC, ops.freshness)."""
    return [0 <= x <= max_staleness for x in staleness(current_version, versions)]


def replay_plan(iteration: int, stored: Sequence[int], batch_size: int, window: int, fraction: float) -> dict:
    """Sliding window: which stored iterations may be replayed, which are evicted, how many fresh and replayed (REPLAY).

    The window counts iterations including the current one; the current one is fresh, not replayed.
    """
    eligible = [i for i in stored if iteration - window < i < iteration]
    replayed = whole_part(fraction, batch_size) if eligible else 0
    return {
        "eligible_replay": eligible,
        "evicted": [i for i in stored if i <= iteration - window],
        "num_fresh": batch_size - replayed,
        "num_replay": replayed,
    }


def e2h_probabilities(
    kind: str, step: float, total_steps: float, levels: int, beta: float = 1.0, sigma: float = 0.75
) -> np.ndarray:
    """Probability of each difficulty level (0 easiest) at ``step``: ``cosine`` or ``gaussian`` (E2H, Parashar et al.
    2025).
    """
    k, t = np.arange(levels, dtype=float), min(step / max(total_steps, 1e-12), 1.0)
    if kind == "cosine":
        a = (1 + np.cos(np.pi * t)) / 2
        weights = a * (levels - 1 - k) + (1 - a) * k
    elif kind == "gaussian":
        far = (t**beta * (levels - 1) - k) ** 2 / (2 * sigma**2)
        weights = np.exp(-far)
        if not weights.sum():  # a sigma so small that all of them underflow
            weights = np.exp(far.min() - far)
    else:
        raise ValueError(f"curriculum {kind!r} is not known; write cosine or gaussian")
    return weights / weights.sum() if weights.sum() else np.full(levels, 1 / levels)


def pass_at_k_band(counts: dict[str, tuple[int, int]], k: int, bands: Sequence[float], progress: float) -> list[str]:
    """Prompts admitted at ``progress`` in [0, 1) of a run: those whose pass@k under the policy is at least the band's
    bound (PASSK-CURR).

    counts: prompt -> (samples, right ones). bands: falling bounds, each for an equal part of the run; a band that would
    admit none falls to the next, the last one to all prompts. Raises ValueError for a prompt with fewer than k samples.
    """
    from stages.measures.sampling import pass_at_k

    chance = {prompt: pass_at_k(n, c, k) for prompt, (n, c) in counts.items()}
    short = [prompt for prompt, p in chance.items() if p is None]
    if short:
        raise ValueError(
            f"pass@{k} of prompt {short[0][:12]} cannot be estimated from {counts[short[0]][0]} samples; write passk_k"
            " <= the samples per prompt"
        )
    for bound in bands[min(int(progress * len(bands)), len(bands) - 1) :]:
        admitted = [prompt for prompt, p in chance.items() if p >= bound]
        if admitted:
            return admitted
    return list(chance)


def self_paced_admitted(counts: dict[str, tuple[int, int]], thresholds: Sequence[float], progress: float) -> list[str]:
    """Prompts admitted at ``progress`` in [0, 1] of a run: v = 1 iff the prompt's loss, its share of wrong answers
    under the policy, is below 1/K (SELF-PACED; Kumar et al. 2010). 1/K grows by a constant factor from
    ``thresholds[0]`` to ``thresholds[1]``; above 1 it admits every prompt.

    counts: prompt -> (samples, right ones). Where 1/K admits none, the easiest ones are: some prompt has to be trained
    on for losses to fall.
    """
    from stages.ingestion.curation import self_paced

    start, end = thresholds
    losses = {prompt: 1 - right / samples for prompt, (samples, right) in counts.items()}
    chosen = self_paced(list(losses.values()), 1 / (start * (end / start) ** progress))
    return [prompt for prompt, v in zip(losses, chosen) if v] or [
        prompt for prompt, loss in losses.items() if loss == min(losses.values())
    ]


#: Curricula that decide from each prompt's verdicts under the policy which prompts are in.
ADMITTING = ("pass_at_k", "self_paced")


def admitted_prompts(config, counts: dict[str, tuple[int, int]], progress: float) -> list[str]:
    """Prompts that ``config.curriculum``, one of ``ADMITTING``, lets in at ``progress`` of a run; counts: prompt ->
    (samples, right ones).
    """
    if config.curriculum == "self_paced":
        return self_paced_admitted(counts, config.self_paced_thresholds, progress)
    return pass_at_k_band(counts, config.passk_k, config.passk_bands, progress)


def learning_scores(
    rewards_by_prompt: dict[str, Sequence[float]],
    kind: str = "mean_deviation",
    logps: dict[str, Sequence[float]] | None = None,
) -> dict[str, float]:
    """What each prompt's last group could teach: mean |r - mean r|, the ``std`` of its rewards, or (``confidence``) the
    perplexity of its tokens' ``logps``, the least confident answers most; 0 where rewards are equal and nothing can be
    learned (PROMPT-RERANK)."""

    def one(prompt, rewards):
        if is_constant(rewards):
            return 0.0
        if kind == "confidence":
            return float(np.exp(-np.mean(logps[prompt])))
        return float(np.std(rewards) if kind == "std" else np.abs(np.asarray(rewards, float) - np.mean(rewards)).mean())

    return {prompt: one(prompt, rewards) for prompt, rewards in rewards_by_prompt.items()}


def rerank(scores: dict[str, float]) -> tuple[list[str], list[str]]:
    """(prompts by falling score, prompts without signal); ties keep their order (PROMPT-RERANK)."""
    kept = [p for p in scores if scores[p] > 0]
    return sorted(kept, key=lambda p: -scores[p]), [p for p in scores if scores[p] <= 0]


def changed_roles(hashes: dict[str, tuple[str, str]], frozen: Sequence[str]) -> tuple[bool, list[str]]:
    """(frozen roles are unchanged, names of the roles whose weight hash changed) (ops.invariants)."""
    changed = [name for name, (before, after) in hashes.items() if before != after]
    return not set(changed) & set(frozen), changed
