"""TRPO: a natural-gradient step inside a trust region, in place of the optimizer (``rl.md`` TRPO; Schulman et al. 2015).

Maximise the surrogate subject to mean KL(old||new) <= max_kl over the trained tokens: gradient, conjugate gradient with
Fisher-vector products (double backward of the exact KL), full step, backtracking line search. The full vocabulary's second
derivatives make this a method for small models.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from stages import lean
from stages.batching import Item, collate, pad, plan
from stages.divergence import exact_kl
from stages.losses import full_kl
from stages.modeling import freeze, head_of, hidden_states, precise
from stages.training import Trainer, TrainingError


def conjugate_gradient(product, b: torch.Tensor, iterations: int, tolerance: float = 1e-10) -> tuple[torch.Tensor, float]:
    """x ~ H^-1 b with ``product(v) = H v`` (H symmetric, positive definite), and the squared residual |b - H x|^2."""
    x, r = torch.zeros_like(b), b.clone()
    p, rr = r.clone(), float(r @ r)
    for _ in range(iterations):
        if rr <= tolerance:
            break
        hp = product(p)
        alpha = rr / float(p @ hp)
        x, r = x + alpha * p, r - alpha * hp
        new = float(r @ r)
        p, rr = r + (new / rr) * p, new
    return x, rr


def backtrack(try_step, max_kl: float, coefficient: float, tries: int):
    """First fraction ``coefficient^j`` whose (kl, gain) = try_step(fraction) has kl <= max_kl and gain > 0, as
    (fraction, kl, gain); None when no fraction does."""
    for j in range(tries):
        kl, gain = try_step(coefficient ** j)
        if kl <= max_kl and gain > 0:
            return coefficient ** j, kl, gain
    return None


class TrustRegionTrainer(Trainer):
    """A :class:`stages.training.Trainer` whose step is TRPO's; learning rate and gradient clipping have no meaning here."""

    def __init__(self, model, objective, config, total_steps: int, device: str = "cpu"):
        super().__init__(model, objective, config, total_steps, device)
        count = sum(p.numel() for p in self.parameters.values())
        if count > config.trust_region_max_parameters:
            raise TrainingError(f"TRPO on {count} parameters would take second derivatives of all of them (limit trust_region_max_parameters="
                                f"{config.trust_region_max_parameters}); use preset=ppo, or raise the limit.")

    def step(self, items: Sequence[Item]) -> dict[str, float]:
        config, parameters = self.config, list(self.parameters.values())
        self.step_index += 1
        live = [i for i in items if i.n_targets and not i.extra.get("skip_forward")]
        if not live:
            return {"loss": 0.0, "grad_norm": 0.0, "skipped_steps": float(self.skipped), "empty_step": 1.0}
        counts = self.objective.counts(items)
        totals: dict[str, float] = {"loss": 0.0}
        g = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device, dtype=parameters[0].dtype)
        for group in plan(live, config.max_tokens_per_micro_batch):
            sums = self.objective(self.model, collate(group, self.device))
            loss = sum(total / max(counts[by], 1e-12) for total, by in sums.loss.values())
            g -= flat(torch.autograd.grad(loss, parameters, allow_unused=True), parameters)
            totals["loss"] += float(loss.detach())
            for name, (total, by) in sums.metrics.items():
                totals[name] = totals.get(name, 0.0) + float(total.detach()) / max(counts[by], 1e-12)
        totals |= {"grad_norm": float(g.norm()), "trpo/kl": 0.0, "trpo/surrogate_gain": 0.0, "trpo/step_fraction": 0.0}
        if not math.isfinite(totals["grad_norm"] + totals["loss"]):
            self._skip(items)
        elif totals["grad_norm"] > 0:
            totals |= self._natural_step(live, g, totals["loss"], parameters)
        return {**totals, "skipped_steps": float(self.skipped)}

    def _natural_step(self, live, g, loss, parameters) -> dict[str, float]:
        config = self.config
        batches = [collate(group, self.device) for group in plan(live, config.max_tokens_per_micro_batch)]
        tokens = sum(len(b.src_N) for b in batches)
        old = freeze(copy.deepcopy(self.model))

        def product(v):
            return self._fisher_product(batches, tokens, v, parameters) + config.cg_damping * v

        x, residual = conjugate_gradient(product, g, config.cg_iters)
        curvature = float(x @ product(x))
        found = {"trpo/cg_residual": residual, "trpo/failed_line_search": 1.0}
        if not (math.isfinite(curvature) and curvature > 0):
            return found
        step = math.sqrt(2 * config.max_kl / curvature) * x
        start = flat([p.detach() for p in parameters], parameters)

        def try_step(fraction):
            assign(parameters, start + fraction * step)
            return self._mean_kl(old, batches, tokens), loss - self.evaluate(live)["loss"]

        accepted = backtrack(try_step, config.max_kl, config.backtrack_coeff, config.backtrack_iters)
        if accepted is None:
            assign(parameters, start)
            return found
        fraction, kl, gain = accepted
        return {**found, "trpo/kl": kl, "trpo/surrogate_gain": gain, "trpo/step_fraction": fraction, "trpo/failed_line_search": 0.0}

    def _fisher_product(self, batches, tokens: int, v, parameters):
        """F v: double backward of the mean exact KL(sg(old)||new) at new = old."""
        out = torch.zeros_like(v)
        for batch in batches:
            with sdpa_kernel([SDPBackend.MATH]):  # the fused kernels have no second derivative
                states = plain_states(self.model, batch)
                z = precise(head_of(self.model).logits(states)) / self.config.temperature
                kl = full_kl(z.detach(), z).sum() / tokens
                first = torch.autograd.grad(kl, parameters, create_graph=True, allow_unused=True)
                along = sum((f * part).sum() for f, part in zip(first, split(v, parameters)) if f is not None)
                out += flat(torch.autograd.grad(along, parameters, allow_unused=True), parameters)
        return out

    @torch.no_grad()
    def _mean_kl(self, old, batches, tokens: int) -> float:
        """Mean exact KL(old||new) over the trained tokens."""
        return float(sum(exact_kl(head_of(old), hidden_states(old, b, b.src_N), head_of(self.model), hidden_states(self.model, b, b.src_N),
                                  self.config.temperature).sum() for b in batches)) / tokens


def plain_states(model, batch) -> torch.Tensor:
    """Hidden states at the trained positions through the model's own forward, every operation of which has second derivatives."""
    rows = pad(batch, "rows")
    out = lean.core_of(model)(input_ids=rows.ids_BT, position_ids=rows.positions_BT, use_cache=False).last_hidden_state
    return out.flatten(0, 1)[rows.where_U[batch.src_N]]


def flat(parts, parameters) -> torch.Tensor:
    """One vector of per-parameter tensors; None is zero."""
    return torch.cat([(torch.zeros_like(p) if part is None else part).reshape(-1) for part, p in zip(parts, parameters)])


def split(vector, parameters) -> list[torch.Tensor]:
    return [part.view_as(p) for part, p in zip(vector.split([p.numel() for p in parameters]), parameters)]


@torch.no_grad()
def assign(parameters, vector) -> None:
    for parameter, part in zip(parameters, split(vector, parameters)):
        parameter.copy_(part)
