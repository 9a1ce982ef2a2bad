"""What passes over validation prompts measure beside rewards: how far the policy is from where it started, and how
often its answers are preferred to the reference's (REF-POLICY, NASH).
"""

from __future__ import annotations

import numpy as np
import torch

from stages.algorithms import RLPreset
from stages.batching import make_item
from stages.decoding.sampler import Sampler
from stages.generation import Sample, preferences, score
from stages.models.adapters import switched_off
from stages.models.sharding import root_of
from stages.rollouts.crediting import Crediting
from stages.rollouts.policy import PolicySampler


class Beside:
    """Called with the answers of a validation pass.

    Args:
        rewards: those of validation answers. start: the policy as it started, where its distance is logged
            (``monitor_kl`` under a reference that moves), or None.
        reference: what the preferences of ``row`` are anchored to, or None.
    """

    def __init__(
        self, stage, row: RLPreset, policy: PolicySampler, rewards, crediting: Crediting, reference=None, start=None
    ):
        self.stage, self.policy, self.rewards, self.crediting, self.start = stage, policy, rewards, crediting, start
        plays = row.reads_preferences and reference is not None and policy.agent is None and root_of(reference) is None
        self.reference = reference if plays else None
        self.frozen = stage.config.ref_mode == "frozen"
        self.answers: list[Sample] = []  # of a frozen reference, which are the same at every pass
        self.sampler: Sampler | None = None  # of one that moves, which gives its memory back as the policy's does

    def __call__(self, prompts, seeds, params, drawn: list[Sample]) -> dict[str, float]:
        """Metrics of ``drawn``, one answer to each of the ``(row, prompt ids)``."""
        return self._drift([s for s in drawn if s.error is None]) | (
            self._preferred(prompts, seeds, params, drawn) if self.reference is not None else {}
        )

    def _drift(self, samples: list[Sample]) -> dict[str, float]:
        """KL(policy || starting policy) by k1, nats per answer."""
        if self.start is None or not samples:
            return {}
        items = [make_item(s.prompt["row_id"], s.prompt_ids, [s.ids], [s.action_mask], by_response=()) for s in samples]
        now, then = (self.crediting.logprobs.of(model, items) for model in (self.policy.model, self.start))
        return {
            "kl/start_sequence_sum": float(
                np.mean([sum(np.subtract(a, b)[np.array(s.action_mask, bool)]) for a, b, s in zip(now, then, samples)])
            )
        }

    def _preferred(self, prompts, seeds, params, drawn: list[Sample]) -> dict[str, float]:
        """Mean P(the policy's answer beats the reference's), of the model that compares, else of a Bradley-Terry model
        of the scores.
        """
        if not self.answers or not self.frozen:
            sampler = self.sampler or self._sampler()
            self.answers = [group[0] for group in self.policy.draw(prompts, seeds, params, sampler)]
            self.sampler = None if self.frozen else sampler
            if self.crediting.asked is None:
                score(self.rewards, [s for s in self.answers if s.error is None])
        pairs = [(a, b) for a, b in zip(drawn, self.answers) if a.error is None and b.error is None]
        if self.crediting.asked is not None:
            won = preferences(self.crediting.rewards, self.crediting.asked, pairs) if pairs else []
        else:
            won = [1.0 / (1.0 + np.exp(-np.clip(a.total - b.total, -700, 700))) for a, b in pairs]
        return {"preference/win_rate_reference": float(np.nanmean(won))} if np.isfinite(won).any() else {}

    def _sampler(self) -> Sampler:
        tokenizer, n = self.policy.renderer.tokenizer, self.stage.config.generation_batch
        if isinstance(self.reference, torch.nn.Module):
            return Sampler(self.reference, tokenizer, max_batch=n)
        return WithoutAdapter(self.reference.model, tokenizer, max_batch=n)


class WithoutAdapter(Sampler):
    """Samples from the model under a LoRA adapter (``adapters.AdapterOff``)."""

    def generate(self, *args, **options):
        with switched_off(self.model):
            return super().generate(*args, **options)
