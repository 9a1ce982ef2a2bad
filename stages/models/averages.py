"""Averages of weights that move while training goes on: what is validated and published in the weights' place, or stands
as a reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch


class Bema:
    """The bias-corrected moving average of weights (BEMA, Block & Zhang 2025, arXiv:2508.00180), by the names of TRL's
    BEMACallback: a moving average lags behind weights that travel, so a share of the way that they have come is added.

    At step t, every ``update_freq`` steps after ``update_after``::

        mean <- (1 - beta) mean + beta w,  beta  = max((lag + multiplier t)^-ema_power, min_ema_multiplier)
        average = mean + alpha (w - start), alpha = (lag + multiplier t)^-bias_power

    ``start`` is w after step ``update_after``, where ``mean`` begins, too.

    Args:
        config: ``stages.settings.BemaConfig``.
        weights: as training starts.
    """

    def __init__(self, config, weights: Mapping[str, torch.Tensor]):
        self.config, self.steps = config, 0
        self.start = {name: w.detach().clone() for name, w in weights.items()}
        self.mean = {name: w.clone() for name, w in self.start.items()}

    @property
    def burning_in(self) -> bool:
        """Whether no step has given an average yet."""
        return self.steps < self.config.update_after + self.config.update_freq

    @property
    def of_step(self) -> int:
        """The step whose average stands now; while it burns in, whose weights."""
        if self.burning_in:
            return self.steps
        return self.steps - (self.steps - self.config.update_after) % self.config.update_freq

    @torch.no_grad()
    def after_step(self, weights: Iterable[tuple[str, torch.Tensor]], into: Mapping[str, torch.Tensor] | None) -> None:
        """Take in the weights after one more step; ``into``: where the average goes of a step that gives one, None: it
        is not wanted.
        """
        config = self.config
        self.steps += 1
        since = self.steps - config.update_after
        if since < 0 or since % config.update_freq:
            return
        beta, alpha = shares(self.steps, config)
        for name, w in weights:
            if name not in self.mean:  # a value head is not part of a reference
                continue
            w = w.detach().to(self.mean[name].dtype)  # frozen matrices under an adapter may be kept in bfloat16
            if since == 0:
                self.start[name].copy_(w)
                self.mean[name].copy_(w)
                continue
            self.mean[name].lerp_(w, beta)
            if into is not None:
                into[name].copy_(w).sub_(self.start[name]).mul_(alpha).add_(self.mean[name])

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of it, beside :attr:`steps`."""
        return {f"bema/{part}/{name}": w for part in ("start", "mean") for name, w in getattr(self, part).items()}

    @torch.no_grad()
    def restore(self, steps: int, stored) -> None:
        """``stored``: the :class:`stages.models.tensor_files.TensorFiles` with :meth:`tensors`."""
        self.steps = steps
        for name, tensor in self.tensors().items():
            stored.into(name, tensor)


def shares(step: int, config) -> tuple[float, float]:
    """(beta, alpha) of an update after 1-based ``step``: the share of the weights that the mean takes in, and of the way
    since the start that is added to it.
    """
    age = config.lag + config.multiplier * step
    return max(age**-config.ema_power, config.min_ema_multiplier), age**-config.bias_power
