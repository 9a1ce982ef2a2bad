"""Log-probs of an iteration's completions, and what else is computed of every token of theirs by a model.

Which log-probs ratios start from, and how far the trainer's policy is from whoever sampled: another precision, another
engine, an earlier policy. Legend as in :mod:`stages.rollouts.crediting`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stages.algorithms import RLPreset
from stages.batching import Item, per_response
from stages.models import sharding
from stages.policy.credit import Batch
from stages.rollouts.groups import Completions, item_of, stale
from stages.rollouts.metrics import mismatch_metrics, off_policy_metrics, weight_metrics
from stages.rollouts.policy import PolicySampler
from stages.running import ranks
from stages.training import TrainingError


@dataclass
class Logps:
    """Log-probs of the completions' tokens, a list per completion; what each is for: :class:`.crediting.Scored`."""

    sampled: list[list[float] | None]
    old: list[list[float]]
    plain: list[list[float]]
    start: list[list[float]] | None
    ref: list[list[float]] | None


class LogProbs:
    """What the models say of every token of the completions.

    Args:
        stage: for its config and device. row: the resolved preset.
        policy: the policy and its engine. reference: the frozen one; None where unused.
    """

    def __init__(self, stage, row: RLPreset, policy: PolicySampler, reference=None):
        self.stage, self.config, self.row = stage, stage.config, row
        self.policy, self.reference = policy, reference

    def of(self, model, items: list[Item], compute_dtype: str | None = None) -> list[list[float]]:
        """Log-probs of every response token under ``model`` at the sampling temperature, in sample order, in the
        precision of the training forward unless another one is asked for.
        """
        from stages.models.modeling import target_logps

        return self._by_token(
            model, items, lambda batch: target_logps(model, batch, self.config.temperature)[0], compute_dtype
        )

    def entropies(self, items: list[Item]) -> list[list[float]]:
        """Entropy of the policy's distribution at every response token, nats, as :meth:`of`."""
        from stages.models.modeling import target_logps

        model = self.policy.model
        return self._by_token(
            model, items, lambda batch: target_logps(model, batch, self.config.temperature, entropy=True)[1]
        )

    def collisions(self, items: list[Item]) -> list[list[float]]:
        """Sum of squared probabilities over the vocabulary at every response token under the policy, as
        :meth:`of`.
        """
        from stages.models.modeling import head_of, hidden_states, log_collision

        model = self.policy.model
        return self._by_token(
            model,
            items,
            lambda batch: log_collision(
                head_of(model), hidden_states(model, batch, batch.src_N), self.config.temperature
            ).exp(),
        )

    def exact_kl(self, items: list[Item]) -> list[list[float]]:
        """KL(policy || reference) over the vocabulary at every response token, nats at the sampling temperature, in
        sample order (KL-FULL).
        """
        from stages.models.divergence import exact_kl
        from stages.models.modeling import head_of, hidden_states

        def compute(batch):
            own, other = (hidden_states(m, batch, batch.src_N) for m in (self.policy.model, self.reference))
            return exact_kl(head_of(self.policy.model), own, head_of(self.reference), other, self.config.temperature)

        return self._by_token(self.policy.model, items, compute)

    def _by_token(self, model, items: list[Item], values, compute_dtype: str | None = None) -> list[list[float]]:
        """``values(batch)`` of every response token, in sample order: a number per trained position of a
        micro-batch.
        """
        from stages.training import products

        config, device = self.config, self.stage.device
        precision = config.model_copy(update={"compute_dtype": compute_dtype or config.compute_dtype})

        def compute(batch):
            with products(precision, device):
                padded = batch.padded(values(batch)).cpu().numpy()
            lengths = [len(response) for item in batch.items for response in item.responses]
            return [row[:length].tolist() for row, length in zip(padded, lengths)]

        if sharding.root_of(model) is not None:
            return [
                row for rows in per_response(items, config.micro_batch_tokens, device, compute, model) for row in rows
            ]
        mine = range(ranks.rank(), len(items), ranks.world_size())
        found = dict(
            zip(mine, per_response([items[i] for i in mine], config.micro_batch_tokens, device, compute, model))
        )
        everyone = {i: rows for part in ranks.gather(found) for i, rows in part.items()}
        return [row for i in range(len(items)) for row in everyone[i]]

    def read(self, groups, samples, items, version: int) -> Logps:
        """The log-probs that an iteration reads; those that are no others are not computed again."""
        config, row = self.config, self.row
        sampled = [s.logps for s in samples]
        old = plain = self._old_logps(groups, samples, sampled, items, version)
        # of early stopping, where ratios are to whoever sampled and not to the policy that starts the iteration
        start = None
        if (
            config.early_stop_kl is not None
            and old is sampled
            and (not self.policy.exact_logps or stale(groups, version))
        ):
            start = self.of(self.policy.model, items)
        if any(s.context_ids is not None for s in samples):
            plain = self.of(self.policy.model, [item_of(g, g.ids, g.samples) for g in groups])
        ref = None
        if row.needs_reference or config.monitor_kl:
            ref = old if config.ref_mode == "previous" else self.of(self.reference, items)
        return Logps(sampled, old, plain, start, ref)

    def _old_logps(self, groups, samples, sampled, items, version: int) -> list[list[float]]:
        """Log-probs that ratios start from: the sampler's where they are the policy's or the ratio is to whoever
        sampled, else the policy's.
        """
        known = all(logps is not None for logps in sampled)
        fresh = all(g.fresh for g in groups)
        engine = self.policy.engine.name
        for name in (
            n for n in ("importance_correction", "rejection") if getattr(self.config, n) != "none" and not known
        ):
            raise ValueError(
                f"{name}={getattr(self.config, name)} compares with the sampler's log-probs, and {engine} gives none;"
                f" write {name}=none, or use engine=vllm."
            )
        # sampled ahead too: the iterate is the policy that starts the iteration
        if self.row.on_policy_logps and any(g.version != version for g in groups):
            return self.of(self.policy.model, items)
        if (fresh and self.policy.exact_logps or self.row.behaviour_ratio and known) and not any(
            s.off_policy for s in samples
        ):
            return sampled
        if fresh or self.row.on_policy_logps:
            return self.of(self.policy.model, items)
        if not known:
            raise ValueError(
                f"replayed rollouts need the log-probs of who sampled them, and {engine} gives none; write"
                " replay_fraction=0, or use engine=builtin or engine=vllm."
            )
        return sampled

    def corrections(
        self, all_B: Completions, logps: Logps
    ) -> tuple[np.ndarray | None, tuple[float, float] | None, np.ndarray | None]:
        """(importance weights [B, T], the smallest and largest that they may be, tokens that are rejected [B, T]) of what
        trainer and sampler disagree on; None of what is switched off.
        """
        weights = bounds = rejected = None
        if self.config.importance_correction != "none":
            weights, bounds = self.importance_weights(
                all_B.padded(logps.old), all_B.padded(logps.sampled), all_B.mask_BT
            )
        if self.config.rejection != "none":
            rejected = self._rejected(all_B.padded(logps.old), all_B.padded(logps.sampled), all_B.mask_BT)
        return weights, bounds, rejected

    def importance_weights(self, old, sampled, mask) -> tuple[np.ndarray, tuple[float, float]]:
        """(importance weights [B, T], the smallest and largest that they may be)."""
        import torch

        from stages.losses import truncated_importance_weights

        found = truncated_importance_weights(
            torch.tensor(old),
            torch.tensor(sampled),
            torch.tensor(mask),
            self.config.importance_correction,
            self.config.importance_clip_max,
            self.config.importance_clip_min,
        )
        weights, config = found.expand(mask.shape).numpy(), self.config
        low, high = config.importance_clip_min, config.importance_clip_max
        if not config.importance_normalise:
            return weights, (low, high)
        # of a sequence at its first token
        on = mask if self.config.importance_correction.startswith("token") else mask & (mask.cumsum(1) == 1)
        mean = weights[on].mean() if on.any() else 0.0
        return (weights / mean, (low / mean, high / mean)) if mean > 0 else (weights, (low, high))

    def _rejected(self, old, sampled, mask):
        import torch

        from stages.losses import rejected_tokens

        c = self.config
        return rejected_tokens(
            torch.tensor(old),
            torch.tensor(sampled),
            torch.tensor(mask),
            c.rejection,
            c.rejection_statistic,
            c.rejection_min,
            c.rejection_max,
        ).numpy()

    def _mismatch(self, samples, old) -> dict[str, float]:
        found, engine, limit = mismatch_metrics(samples, old), self.policy.engine, self.config.engine_max_mismatch
        if found and limit and not engine.exact_logps and found["sampling/sampling_logp_difference/mean"] > limit:
            raise TrainingError(
                f"The log-probs of {engine.name} differ from the trainer's by"
                f" {found['sampling/sampling_logp_difference/mean']:.3f} nats per token, over engine_max_mismatch={limit}: it"
                " does not sample from the policy's weights, or with other settings. Check that it serves the"
                " directory it is given, with its tokenizer and without a sampling default of its own."
            )
        return found

    def drift(self, items: list[Item], since_start: bool = False) -> float:
        """Mean k3 of KL(old||new) over the trained tokens of ``items``, nats; ``since_start``: from the policy that
        started the iteration, whoever sampled.
        """
        live = [i for i in items if i.n_targets]
        total = count = 0.0
        for new, old, mask in zip(
            self.of(self.policy.model, live),
            (o for i in live for o in (i.extra.get("start_logps") if since_start else None) or i.extra["old_logps"]),
            (m for i in live for m in i.masks),
        ):
            d = np.where(mask > 0, np.subtract(new, old) if len(new) else 0.0, 0.0).clip(-20, 20)
            total, count = total + float((np.expm1(d) - d).sum()), count + float((mask > 0).sum())
        return total / max(count, 1.0)

    def correction_metrics(self, batch: Batch, trained, weights, bounds, rejected) -> dict[str, float]:
        """Of what :meth:`corrections` found, over the tokens that are trained on."""
        metrics = {}
        if weights is not None:
            low, high = bounds
            metrics |= weight_metrics(weights, batch.trained(trained), self.config.importance_correction, high, low)
        if rejected is not None:
            on = batch.mask_BT & trained[:, None]
            metrics |= {
                "sampling/rejected_fraction": float(rejected[on].mean()) if on.any() else 0.0,
                "sampling/rejected_sequences": float((rejected & on).any(1)[on.any(1)].mean()) if on.any() else 0.0,
            }
        return metrics

    def sampler_metrics(self, groups, samples, logps: Logps, items, version: int) -> dict[str, float]:
        """How far the trainer's policy is from whoever sampled: by staleness, else by the engine's precision."""
        if stale(groups, version):
            return off_policy_metrics(
                [g.version for g in groups], version, logps.sampled, logps.old, [s.action_mask for s in samples]
            )
        if all(one is not None for one in logps.sampled) and (
            logps.old is not logps.sampled or not self.policy.engine.exact_logps
        ):
            return self._mismatch(
                samples, self.of(self.policy.model, items) if logps.old is logps.sampled else logps.old
            )
        return {}
