"""TRPO: a natural-gradient step inside a trust region, in place of the optimizer (Schulman et al. 2015).

Maximise the surrogate subject to mean KL(old||new) <= max_kl over the trained tokens: gradient, conjugate gradient with
exact Fisher-vector products, full step, backtracking line search, over whatever is trained: all weights, or a LoRA
adapter.

At new = old the Hessian of the mean KL is the Fisher matrix J' M J (J: logits by parameters; M: diag(p) - p p' of every
token's distribution, over T^2 and the count of tokens). A product with it is one forward-mode derivative of the hidden
states, M on a chunk of logits at a time, and one backward: exact, without second derivatives, in the memory of an
ordinary step whatever the vocabulary. ``fisher_fraction`` takes the matrix of a part of the batch's prompts (Schulman
et al. 2015, appendix C: a tenth), the gradient, the KL and the line search remain those of all. All of it is computed
in the weights' own type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from stages.batching import Item, collate, pad, together
from stages.models import lean
from stages.models.divergence import exact_kl
from stages.models.modeling import Head, head_chunks, head_of, hidden_states, precise
from stages.running import cuda, ranks
from stages.training import NoRoom, Trainer, TrainingError


#: Of a step that changes nothing.
UNMOVED = dict.fromkeys(
    ("trpo/kl", "trpo/surrogate_gain", "trpo/step_fraction", "trpo/cg_residual", "trpo/failed_line_search"), 0.0
)


def conjugate_gradient(
    product, b: torch.Tensor, iterations: int, tolerance: float = 1e-10
) -> tuple[torch.Tensor, float]:
    """x ~ H^-1 b with ``product(v) = H v`` (H symmetric, positive definite), and the squared residual |b - H x|^2.

    Residuals are kept orthogonal to all earlier ones: rounding alone would lose that within a few iterations where the
    eigenvalues of H are far apart, as those of a policy's Fisher matrix are, and x would depend on the order of every
    sum.
    """
    x, r, earlier = torch.zeros_like(b), b.clone(), []
    p, rr = r.clone(), float(r @ r)
    for _ in range(iterations):
        if rr <= tolerance:
            break
        hp = product(p)
        curvature = float(p @ hp)
        if curvature <= 0:  # without damping, a direction that does not move the distribution
            break
        alpha = rr / curvature
        earlier.append(r / math.sqrt(rr))
        x, r = x + alpha * p, r - alpha * hp
        for q in earlier:
            r -= (q @ r) * q
        new = float(r @ r)
        p, rr = r + (new / rr) * p, new
    return x, rr


def full_step(x: torch.Tensor, curvature: float, max_kl: float) -> torch.Tensor:
    """The multiple of the direction ``x`` whose KL is ``max_kl`` to second order: sqrt(2 max_kl / x'Hx) x, ``curvature``
    = x'Hx (TRPO).
    """
    return math.sqrt(2 * max_kl / curvature) * x


def backtrack(try_step, max_kl: float, coefficient: float, tries: int):
    """First fraction ``coefficient^j`` whose (kl, gain) = try_step(fraction) has kl <= max_kl and gain > 0, as
    (fraction, kl, gain); None when no fraction does."""
    for j in range(tries):
        kl, gain = try_step(coefficient**j)
        if kl <= max_kl and gain > 0:
            return coefficient**j, kl, gain
    return None


class TrustRegionTrainer(Trainer):
    """A :class:`stages.training.Trainer` whose step is TRPO's; learning rate and gradient clipping have no meaning
    here.

    Several ranks share the micro-batches and sum vectors and numbers, so all of them take the same step.
    """

    def __init__(self, model, objective, config, total_steps: int, device: str = "cpu"):
        super().__init__(model, objective, config, total_steps, device)
        count = sum(p.numel() for p in self.parameters.values())
        if count > config.trust_region_max_parameters:
            raise TrainingError(
                f"TRPO on {count} trained parameters takes about {config.cg_iters} derivatives of the policy along"
                " vectors of that size for each step (limit"
                f" trust_region_max_parameters={config.trust_region_max_parameters}); write lora_rank=16 to train an"
                " adapter, use preset=ppo, or raise the limit."
            )

    def _step(self, items: Sequence[Item]) -> dict[str, float]:
        parameters = list(self.parameters.values())
        self.step_index += 1
        live = [i for i in items if i.n_targets and not i.extra.get("skip_forward")]
        if not live:
            return {"loss": 0.0, "grad_norm": 0.0, **UNMOVED, "skipped_steps": float(self.skipped), "empty_step": 1.0}
        counts = self.objective.counts(items)
        groups = self._micro_batches(live)
        batches = [collate(group, self.device) for group, _ in groups]
        totals = {"loss": 0.0}
        g = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device, dtype=parameters[0].dtype)
        each = iter(batches)

        def descend(group, counted):
            nonlocal g
            sums = self.objective(self.model, next(each))
            with cuda.strictly(self.device):
                g -= flat(torch.autograd.grad(sums.divided(counts), parameters, allow_unused=True), parameters)
            return sums.detached()

        found = self.through(groups, descend)
        self._add(totals, found, counts)
        ranks.sum_tensor(g)
        totals = ranks.sum_numbers(totals)
        totals |= {"grad_norm": float(g.norm()), **UNMOVED}
        if not math.isfinite(totals["grad_norm"] + totals["loss"]):
            self._skip(items)
        elif totals["grad_norm"] > 0:
            some = (
                batches
                if self.config.fisher_fraction == 1.0
                else [
                    collate(group, self.device)
                    for group, _ in self._micro_batches(thinned(live, self.config.fisher_fraction))
                ]
            )
            start, refused = flat([p.detach() for p in parameters], parameters), None
            try:
                totals |= self._natural_step(batches, some, counts, g, totals["loss"], start, parameters)
            except (MemoryError, RuntimeError) as error:
                assign(parameters, start)
                if not cuda.out_of_memory(error):
                    raise
                refused = self.refused(max((batch.items for batch in (*batches, *some)), key=together))
                if self.ranks > 1 and not refused[1]:  # the others wait for this one's part of a product
                    refused = (
                        refused[0],
                        (
                            f"TRPO's products with the Fisher matrix do not fit into memory with {refused[0]:,} tokens. Write"
                            f" max_tokens_per_micro_batch={max(1, refused[0] // 2)}, or a lower fisher_fraction."
                        ),
                    )
            if refused is not None:
                raise TrainingError(refused[1]) if refused[1] else NoRoom(refused[0])
            self._average()
        return {**totals, "skipped_steps": float(self.skipped)}

    def _natural_step(self, batches, some, counts, g, loss, start, parameters) -> dict[str, float]:
        config = self.config
        tokens, seen = (
            int(ranks.sum_numbers({"tokens": sum(len(b.src_N) for b in of)})["tokens"]) for of in (batches, some)
        )
        old = self._distributions(batches)

        def product(v):
            return ranks.sum_tensor(self._fisher_product(some, seen, v)) + config.cg_damping * v

        x, residual = conjugate_gradient(product, g, config.cg_iters)
        curvature = float(x @ product(x))
        found = {"trpo/cg_residual": residual, "trpo/failed_line_search": 1.0}
        if not (math.isfinite(curvature) and curvature > 0):
            return found
        step = full_step(x, curvature, config.max_kl)

        def try_step(fraction):
            assign(parameters, start + fraction * step)
            with torch.no_grad():
                moved = sum(float(self.objective(self.model, batch).divided(counts)) for batch in batches)
            whole = ranks.sum_numbers({"loss": moved, "kl": self._kl_sum(old, batches)})
            return whole["kl"] / tokens, loss - whole["loss"]

        accepted = backtrack(try_step, config.max_kl, config.backtrack_coeff, config.backtrack_iters)
        if accepted is None:
            assign(parameters, start)
            return found
        fraction, kl, gain = accepted
        return {
            **found,
            "trpo/kl": kl,
            "trpo/surrogate_gain": gain,
            "trpo/step_fraction": fraction,
            "trpo/failed_line_search": 0.0,
        }

    def _fisher_product(self, batches, tokens: int, v) -> torch.Tensor:
        """F v, this rank's micro-batches' part of it: the mean over ``tokens`` is over those of all ranks."""
        parameters = list(self.parameters.values())
        out, along = torch.zeros_like(v), dict(zip(self.parameters, split(v, parameters)))
        for batch in batches:
            moved = tangents(self.model, batch, along)
            hidden, head = hidden_states(self.model, batch, batch.src_N), head_of(self.model)
            pulled = head_fisher(head, hidden, *moved, self.config.temperature, tokens)
            ends = [
                (end, pull)
                for end, pull in zip((hidden, head.weight, head.bias), pulled)
                if end is not None and end.requires_grad
            ]
            ends, pulls = zip(*ends)
            with cuda.strictly(self.device):
                out += flat(torch.autograd.grad(ends, parameters, pulls, allow_unused=True), parameters)
        return out

    @torch.no_grad()
    def _distributions(self, batches) -> list[tuple[Head, torch.Tensor]]:
        """The policy as it is now at the trained tokens: its head and the hidden states of every micro-batch."""
        head = head_of(self.model)
        if head.weight.requires_grad:
            head = replace(head, weight=head.weight.clone(), bias=None if head.bias is None else head.bias.clone())
        return [(head, hidden_states(self.model, batch, batch.src_N)) for batch in batches]

    @torch.no_grad()
    def _kl_sum(self, old, batches) -> float:
        """Exact KL(old||new), summed over these batches' trained tokens."""
        return float(
            sum(
                exact_kl(
                    head,
                    hidden,
                    head_of(self.model),
                    hidden_states(self.model, batch, batch.src_N),
                    self.config.temperature,
                ).sum()
                for (head, hidden), batch in zip(old, batches)
            )
        )


class _Read(nn.Module):
    """What the policy's distributions are made of, as the output of a module, so that ``functional_call`` can put other
    weights in.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, rows):
        states = lean.core_of(self.model)(
            input_ids=rows.ids_BT, position_ids=rows.positions_BT, use_cache=False
        ).last_hidden_state
        head = head_of(self.model)
        return states, head.weight, head.bias


@torch.no_grad()
def tangents(
    model, batch, along: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Derivatives of hidden states at the trained positions ``[N, H]``, LM head ``[V, H]`` and its bias as the
    parameters ``along`` (name -> direction) move; None where the head does not. Forward mode, through the model's own
    forward."""
    rows, training = pad(batch, "rows"), model.training
    head_of(model)  # tries the head the first time, which must not happen under the derivative
    model.eval()  # recomputed activations are for backward
    try:
        with forward_ad.dual_level(), sdpa_kernel([SDPBackend.MATH]):  # the fused kernels have no forward mode
            named = dict(model.named_parameters())
            duals = {f"model.{name}": forward_ad.make_dual(named[name], direction) for name, direction in along.items()}
            primals, weight, bias = functional_call(_Read(model), duals, (rows,))
            states, weight, bias = (
                None if t is None else forward_ad.unpack_dual(t).tangent for t in (primals, weight, bias)
            )
            states = torch.zeros_like(primals) if states is None else states
            return states.flatten(0, 1)[rows.where_U[batch.src_N]], weight, bias
    finally:
        model.train(training)


@torch.no_grad()
def head_fisher(head: Head, hidden_NH, moved_NH, d_weight, d_bias, temperature: float, tokens: int):
    """M (J v) pulled back to what the logits are made of: (``[N, H]`` by the hidden states, ``[V, H]`` by the head,
    ``[V]`` by its bias), the last two None where the head is not trained. ``moved_NH, d_weight, d_bias`` are the
    derivatives along v (:func:`tangents`); memory is that of a chunk of logits."""
    by_hidden, head = torch.empty_like(hidden_NH), head.widened()
    by_weight = torch.zeros_like(head.weight) if d_weight is not None else None
    by_bias = torch.zeros_like(head.bias) if d_bias is not None else None
    for rows in head_chunks(len(hidden_NH), head.weight):
        z = precise(head.logits(hidden_NH[rows]))
        dz = torch.nn.functional.linear(moved_NH[rows], head.weight, d_bias)
        if d_weight is not None:
            dz += hidden_NH[rows] @ d_weight.t()
        # of z / T by hidden @ weight.T
        slope = head.scale / temperature * (1.0 - (z / head.softcap) ** 2 if head.softcap else 1.0)
        dz, p = precise(dz) * slope, torch.softmax(z / temperature, -1)
        pulled = (p * (dz - (p * dz).sum(-1, keepdim=True)) * slope / tokens).to(head.weight.dtype)
        by_hidden[rows] = pulled @ head.weight
        if by_weight is not None:
            by_weight += pulled.t() @ hidden_NH[rows]
        if by_bias is not None:
            by_bias += pulled.sum(0)
    return by_hidden, by_weight, by_bias


def thinned(items: Sequence[Item], fraction: float) -> list[Item]:
    """``fraction`` of the items, at least one, evenly spaced."""
    wanted = max(1, round(len(items) * fraction))
    return [items[i * len(items) // wanted] for i in range(wanted)]


def flat(parts, parameters) -> torch.Tensor:
    """One vector of per-parameter tensors; None is zero."""
    return torch.cat(
        [(torch.zeros_like(p) if part is None else part).reshape(-1) for part, p in zip(parts, parameters)]
    )


def split(vector, parameters) -> list[torch.Tensor]:
    return [part.view_as(p) for part, p in zip(vector.split([p.numel() for p in parameters]), parameters)]


@torch.no_grad()
def assign(parameters, vector) -> None:
    for parameter, part in zip(parameters, split(vector, parameters)):
        parameter.copy_(part)
