"""The load-balancing loss of mixtures of experts (Fedus et al. 2021, equations 4 to 6, as transformers computes it for
Mixtral, Qwen3-MoE and OLMoE).

Over the T tokens of an optimizer step and the L layers that have experts, f_e is the share of tokens that expert e is
among the k chosen for (so the f_e add up to k) and P_e the mean probability that the routers give it; the loss is
``router_aux_loss_coef * E * sum_e f_e P_e``, at least k times the coefficient, which even loads reach.

f and P are those of the whole optimizer step, over all micro-batches and ranks, so how a step is cut changes nothing. f
has no gradient, and with f known the loss is linear in the tokens: where a step has more than one micro-batch, f is
counted by one more forward, without gradients, before the first of them. transformers and TRL take f of every
micro-batch alone; with one micro-batch a step the numbers are the same.

A token counts once for every trained response that it belongs to: a prompt that several responses share as often as
there are, padding never.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

import torch

from stages.batching import Batch, Item
from stages.models import lean


def load_balancing_loss(shares_E, probabilities_E):
    """E * sum_e f_e P_e of the shares f and mean probabilities P of E experts, both ``[E]``; differentiable in P."""
    return len(shares_E) * (shares_E * probabilities_E).sum()


def counted(item: Item) -> list[bool]:
    """Which responses of an item the loss is about: those with a target, or all of an item that has none (reward
    models).
    """
    none = not any(m.any() for m in (item.whole or item).masks)
    return [none or bool(m.any()) for m in item.masks]


def tokens_of(item: Item) -> int:
    """Tokens of an item, each once for every response that it belongs to and that is counted."""
    return sum(len(item.prompt) + len(response) for response, on in zip(item.responses, counted(item)) if on)


def weights_of(batch: Batch) -> torch.Tensor:
    """How often each of the U tokens counts, [U]."""
    found = []
    for item in batch.items:
        on = counted(item)
        found += [float(sum(on))] * len(item.prompt) + [
            float(k) for response, k in zip(item.responses, on) for _ in range(len(response))
        ]
    return torch.tensor(found, device=batch.ids_U.device)


class Watch:
    """The routers of one model: who computes its layers inside :meth:`__enter__` tells it what they chose, once
    (:func:`stages.models.modeling.hidden_states`).
    """

    def __init__(self, core, k: int):
        self.core, self.k, self.loads = core, k, None

    def __enter__(self) -> Watch:
        self.loads = None
        self.core.__dict__["_posttrain_watch"] = self
        return self

    def __exit__(self, *_) -> None:
        self.core.__dict__.pop("_posttrain_watch", None)

    def tell(self, loads: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Per layer with experts what :func:`stages.models.experts.routed` gives."""
        self.loads = tuple(torch.stack(part) for part in zip(*loads))  # [L, E] each
        self.core.__dict__.pop("_posttrain_watch", None)


def watched(model) -> Watch | None:
    """The watch that waits for this model's routers."""
    return lean.core_of(model).__dict__.get("_posttrain_watch")


@contextlib.contextmanager
def unwatched(model) -> Iterator[None]:
    """Nobody is told what the routers choose inside the block: for what is tried out in the middle of a step."""
    core = lean.core_of(model).__dict__
    watch = core.pop("_posttrain_watch", None)
    try:
        yield
    finally:
        if watch is not None:
            core["_posttrain_watch"] = watch


def routers_of(model) -> Watch | None:
    """A watch over a model's routers, None where it has none that transformers has a load-balancing loss for."""
    core = lean.core_of(model)
    config = getattr(core, "config", None)
    k = getattr(config, "num_experts_per_tok", None)
    known = hasattr(sys.modules.get(type(core).__module__), "load_balancing_loss_func") and hasattr(
        config, "router_aux_loss_coef"
    )
    return Watch(core, k) if known and k and any("Router" in type(m).__name__ for m in core.modules()) else None


def coefficient(model, config) -> float:
    """``router_aux_loss_coef`` for this model: as it is set, else (``sft``, unless it is compiled) that of the model's
    config.

    Raises:
        TrainingError: it is set, and the model has no such experts.
    """
    given = getattr(config, "router_aux_loss_coef", 0.0)
    watch = routers_of(model) if given is None or given else None
    if given is None:
        return (
            float(watch.core.config.router_aux_loss_coef)
            if watch is not None and config.BALANCES and config.forward != "compiled"
            else 0.0
        )
    if given and watch is None:
        from stages.training import TrainingError

        raise TrainingError(
            f"router_aux_loss_coef={given}: {type(model).__name__} has no routers that transformers has a"
            " load-balancing loss for (Mixtral, Qwen-MoE, OLMoE ...); leave it out"
        )
    return given


class Balanced:
    """An objective with the load-balancing loss on top. ``shares`` [E]: f of the step, None: of the one micro-batch
    that is computed.

    Without gradients (validation) it is the objective alone.
    """

    def __init__(self, objective, watch: Watch, coefficient: float):
        self.objective, self.watch, self.coefficient = objective, watch, coefficient
        self.shares: torch.Tensor | None = None
        self.loads: torch.Tensor | None = None  # tokens per layer and expert of the step, [L, E]

    def __getattr__(self, name):
        return getattr(self.__dict__["objective"], name)

    def counts(self, items: Sequence[Item]) -> dict[str, float]:
        return {
            **self.objective.counts(items),
            "router_tokens": float(sum(tokens_of(i) for i in items if not i.extra.get("skip_forward"))),
        }

    def __call__(self, model, batch: Batch):
        if not torch.is_grad_enabled():
            return self.objective(model, batch)
        with self.watch as watch:
            sums = self.objective(model, batch)
        probabilities, counts = watch.loads
        layers, tokens = len(counts), float(weights_of(batch).sum())
        if self.shares is None:
            self.loads = counts
        shares = counts.sum(0) / (layers * tokens) if self.shares is None else self.shares
        total = load_balancing_loss(shares, probabilities.sum(0) / layers)
        sums.loss["router_aux"] = (self.coefficient * total, "router_tokens")
        sums.metrics["aux_loss"] = (total.detach(), "router_tokens")
        return sums

    def know(self, loads: torch.Tensor | None) -> None:
        """The tokens per layer and expert of the step that comes, [L, E], or that it is one micro-batch, which will
        say.
        """
        self.loads = loads
        self.shares = None if loads is None else loads.sum(0) * self.watch.k / loads.sum()

    def metrics(self) -> dict[str, float]:
        """Loads of the step's experts, 1 is an even one: of each (over all layers, up to 64), the largest violation max
        load - 1 of a layer, experts without a token.
        """
        if self.loads is None:
            return {}
        relative = self.loads / self.loads.mean(1, keepdim=True).clamp_min(1e-12)
        each = relative.mean(0).tolist()
        shown = {f"router/load/{e:02d}": load for e, load in enumerate(each)} if len(each) <= 64 else {}
        return {
            "router/violation_mean": float(relative.amax(1).mean() - 1),
            "router/violation_max": float(relative.max() - 1),
            "router/unused_experts": float((self.loads == 0).sum()),
            **shown,
        }
