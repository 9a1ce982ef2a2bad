"""One loop, one optimizer step, for everything that is trained.

Supervised tuning, reward models, direct alignment and RL differ in two plain objects only:

* an **objective** turns a micro-batch into *sums* and says, before any forward pass, what the sums are divided by;
* a **source** yields the items of each optimizer step (a shuffled dataset, or rollouts generated on the spot).

The step divides once, by the counts of the whole optimizer step over all micro-batches and ranks. So micro-batch size,
order, gradient accumulation and the number of ranks cannot change the result (row ``AGG`` of ``tests/methods.yaml``).
On several devices every rank plans the same micro-batches and computes its share of them (:mod:`stages.running.ranks`).

Killed at any instant, the next run continues from the last checkpoint and computes the same bytes: the state is
weights, optimizer, step and the source's own state; randomness is counter-based.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from stages.batching import Batch, Item, collate, cut, filled, plan, size
from stages.models import balance, dropout, lean, optimizers, sharding
from stages.models.averages import Bema
from stages.models.modeling import head_of, hidden_states, tokens_together
from stages.models.tensor_files import TensorFiles, writer_of
from stages.reporting.curves import logged_metrics
from stages.reporting.former_names import renamed
from stages.running import cuda, ranks
from stages.running.stopping import Terminated, stopping
from stages.selection import is_better, largest_remainder
from stages.settings import OptimizerConfig, whole_part
from storage.checkpoints import Files
from storage.files import atomic_write_json, read_json


class TrainingError(RuntimeError):
    """Training cannot go on; the message names the rows and what to change."""


class NoRoom(Exception):
    """Memory did not suffice for a micro-batch of ``tokens`` tokens, and smaller ones are possible. Nothing has moved,
    and every rank raises it."""

    def __init__(self, tokens: int):
        super().__init__(tokens)
        self.tokens = tokens


class OutOfRoom(TrainingError):
    """The same with sharded weights, where the other ranks wait inside a layer and the step cannot be done again in
    these processes: ``tokens`` of a micro-batch may fit."""

    def __init__(self, text: str, tokens: int):
        super().__init__(text)
        self.tokens = tokens


@dataclass
class Sums:
    """What an objective returns for one micro-batch.

    ``loss`` and ``metrics`` map a name to ``(sum, name of the count that divides it)``; a metric whose name ends with
    ``_max`` is a maximum (0 or more), divided by nothing.
    """

    loss: dict[str, tuple[torch.Tensor, str]]
    metrics: dict[str, tuple[torch.Tensor, str]] = field(default_factory=dict)

    def detached(self) -> Sums:
        """The same numbers without what made them."""
        loss, metrics = (
            {name: (total.detach(), by) for name, (total, by) in part.items()} for part in (self.loss, self.metrics)
        )
        return Sums(loss, metrics)

    def divided(self, counts: dict[str, float]) -> torch.Tensor:
        """The loss: every sum by its count of the whole step."""
        return sum(total / max(counts[by], 1e-12) for total, by in self.loss.values())


class Objective(Protocol):
    """What is minimised. It may have ``units(item)``: the places of the responses whose loss reads each other, for
    items that may be parted (``Item.by_response``); without it every response of such an item is by itself."""

    def counts(self, items: Sequence[Item]) -> dict[str, float]:
        """Denominators of these items, additive over items; known before the first forward pass."""

    def __call__(self, model, batch: Batch) -> Sums:
        """Sums of one micro-batch; never divides by a count."""


class Source(Protocol):
    total_steps: int

    def items(self, step: int) -> list[Item]:
        """Items of optimizer step ``step`` (0-based)."""

    def state(self) -> tuple[dict, dict[str, bytes]]:
        """(JSON-able state, files: bytes, or functions that write a path) to resume from."""

    def restore(self, state: dict, read: Files) -> None: ...

    def after_step(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Extra metrics of the step; controllers and schedules advance here."""


def products(config: OptimizerConfig, device: str):
    """Context in which matrix products have ``config.compute_dtype``. What is compared with a training forward
    (reference log-probs) is computed in it too.
    """
    return torch.autocast(device.split(":")[0], torch.bfloat16, enabled=config.compute_dtype == "bfloat16")


def learning_rate_at(step: int, total: int, config: OptimizerConfig) -> float:
    """Learning rate of 0-based ``step``: linear warm-up, then the chosen decay to ``min_lr_ratio * learning_rate``.

    From the end of warm-up on it is what transformers' schedule of that name gives at the same step. Warm-up is one
    step ahead of transformers', whose first step moves nothing, and so is ``inverse_sqrt``, which goes on from it.
    """
    warmup = whole_part(config.warmup_ratio, total) if config.warmup_steps is None else min(config.warmup_steps, total)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.lr_schedule == "constant":
        return config.learning_rate
    if config.lr_schedule == "inverse_sqrt":
        return config.learning_rate * max(config.min_lr_ratio, math.sqrt(max(1, warmup) / (step + 1)))
    start = max(warmup, total - round(config.decay_ratio * total)) if config.lr_schedule == "wsd" else warmup
    done = max(0.0, (step - start) / max(1, total - start))
    how = {"wsd": config.decay_type, "cosine_with_restarts": "cosine"}.get(config.lr_schedule, config.lr_schedule)
    if config.lr_schedule == "cosine_with_restarts":
        done = config.lr_cycles * done % 1.0 if done < 1.0 else 1.0
    shape = {
        "cosine": lambda: 0.5 * (1.0 + math.cos(math.pi * done)),
        "polynomial": lambda: max(0.0, 1.0 - done) ** config.lr_power,
        "1-sqrt": lambda: 1.0 - math.sqrt(done),
    }.get(how, lambda: 1.0 - done)()
    return config.learning_rate * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape)


#: Ends of metric names for which less is better: losses and their terms, divergences, errors, and shares of what goes
#: wrong (:func:`less_is_better`).
LESS_IS_BETTER = (
    "loss",
    "nll",
    "ece",
    "perplexity",
    "brier",
    "kl",
    "divergence",
    "distance",
    "bce",
    "cross_entropy",
    "mse",
    "huber",
    "error",
    "ranking",
    "language_model",
    "preference",
    "unlikelihood",
    "repeat_probability",
    "inconsistency",
    "no_eos_fraction",
    "eos_missing_fraction",
    "displaced_fraction",
    "both_fell_fraction",
    "gradient_weight",
    "truncated_fraction",
    "unscorable_fraction",
    "empty_fraction",
    "clipped_ratio",
    "repetition",
    "special_characters",
    "stock_phrases",
    "refusals",
    "language_switch",
    "all_wrong_fraction",
    "start_sequence_sum",
)


def less_is_better(metric: str) -> bool:
    """Whether a validation metric is one of :data:`LESS_IS_BETTER`. A component of the reward (``reward/NAME``) has the
    name that its user gave it, and more of it is better.
    """
    return metric.endswith("unscorable_fraction" if metric.startswith("reward/") else LESS_IS_BETTER)


class Trainer:
    """Owns the trained model, its optimizer and the step counter.

    Args:
        model: float32 master weights; ``requires_grad`` says what is trained.
        objective: see :class:`Objective`.
        total_steps: optimizer steps of the whole run (the schedule's length).

    Raises:
        TrainingError: the run ends before its average (``bema``) would move.
    """

    def __init__(self, model, objective: Objective, config: OptimizerConfig, total_steps: int, device: str = "cpu"):
        if config.bema is not None:
            refuse_unmoved(config.bema, total_steps)
        self.model, self.objective, self.config = model, objective, config
        self.total_steps, self.device = total_steps, device
        self.step_index = self.skipped = 0
        # of a micro-batch; halved where one does not fit into memory (within_memory)
        self.budget = config.micro_batch_tokens
        self.instead = ""  # what helps a model that takes no LoRA adapter where memory does not suffice
        self.fill = 0.0  # of the newest step's micro-batches
        self.best: dict[str, Any] = {}
        self.ranks = ranks.connect(device)
        # Responses of a tree share their prompt's last position, so its gradient is a sum over them; by default torch
        # adds such terms in the order in which threads arrive, and a resumed run would differ in the last bits (on CUDA
        # more is needed: stages.running.cuda).
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        model.train()
        choose_forward(model, config.forward)
        if config.activation_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            # it serves the reentrant form only, and keeps our forward from a model whose layers it takes for changed
            if hasattr(model, "_require_grads_hook"):
                model.disable_input_require_grads()
        if share := balance.coefficient(model, config):
            self.objective = balance.Balanced(objective, balance.routers_of(model), share)
        self.places = dropout.places_of(model)
        self.root = None
        if sharding.asked(config):
            self.root = sharding.shard(model, device)
            # both try something once, which must not happen later on some ranks only
            if model.get_output_embeddings() is not None:
                sharding.run(model, lambda: head_of(model))
            else:
                tokens_together(model)
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.bema = None if config.bema is None else Bema(config.bema, self.parameters)
        averaged = config.ema_decay or config.bema is not None
        self.averages = {n: p.detach().clone() for n, p in self.parameters.items()} if averaged else {}
        self.best_weights: dict[str, torch.Tensor] = {}
        self.optimizer = optimizers.make(config, model, self.parameters)

    def _micro_batches(self, items: Sequence[Item]) -> list[tuple[list[Item], bool]]:
        """This rank's micro-batches of a step.

        With sharded weights every rank must run as many as the others: ``False`` marks one that only keeps them
        company.
        """
        groups = self.planned(items)
        shares = ranks.shares(groups, lambda group: sum(map(size, group)))
        mine = shares[ranks.rank()]
        company = max(map(len, shares)) - len(mine) if self.root is not None else 0
        return [(group, True) for group in mine] + [(groups[0], False)] * company

    def planned(self, items: Sequence[Item]) -> list[list[Item]]:
        """All ranks' micro-batches of a step; small steps are shared out so that every rank has work."""
        budget = self.budget
        cost = tokens_together(self.model)
        items = cut(items, budget, self.units, cost)
        if self.ranks > 1:
            budget = min(budget, max(1, math.ceil(sum(map(size, items)) / self.ranks)))
        return plan(items, budget, self.config.packing, cost)

    def units(self, item: Item) -> list[tuple[int, ...]]:
        """Places of the responses that stay together where an item is parted; those without a target, which add nothing
        to any sum, are left out.
        """
        together = getattr(self.objective, "units", None)
        units = [(k,) for k in range(len(item.responses))] if together is None else together(item)
        return [unit for unit in units if any(item.masks[k].any() for k in unit)] or units

    def _sums(self, group: list[Item]) -> Sums:
        with products(self.config, self.device):
            if self.root is None:
                return self.objective(self.model, collate(group, self.device))
            if not torch.is_grad_enabled():
                return sharding.run(self.model, lambda: self.objective(self.model, collate(group, self.device)))
            found: list[Sums] = []

            def call() -> dict[str, torch.Tensor]:
                found.append(self.objective(self.model, collate(group, self.device)))
                return {name: total for name, (total, _) in found[0].loss.items()}

            totals = self.root(call)
            return Sums({name: (totals[name], by) for name, (_, by) in found[0].loss.items()}, found[0].metrics)

    def step(self, items: Sequence[Item]) -> dict[str, float]:
        """One optimizer step over ``items``; returns its metrics. A non-finite step changes nothing and is counted. One
        whose micro-batches do not fit into memory is done again in smaller ones (:meth:`within_memory`).
        """
        return self.within_memory(lambda: self._step(items))

    def within_memory(self, attempt: Callable):
        """``attempt()``, which moves nothing before all its micro-batches are through the model. Where one of them does
        not fit into memory ``budget`` is halved, and all is done again from the start: the same step, since no
        micro-batch divides anything and randomness is by counters.
        """
        index = self.step_index
        while True:
            tokens = None
            try:
                return attempt()
            except NoRoom as error:
                tokens = error.tokens
            except RuntimeError as error:  # of the first backward there is
                if not cuda.give_up(error):
                    raise
            self.step_index = index
            self.optimizer.zero_grad(set_to_none=True)
            if tokens is not None:
                cuda.release(self.device)
                self.budget = max(1, min(self.budget, tokens) // 2)

    def through(self, groups: Sequence[tuple[list[Item], bool]], compute: Callable[[list[Item], bool], Any]) -> list:
        """``compute(group, counted)`` of this rank's micro-batches; what it gave of those that count.

        Raises:
            NoRoom: memory did not suffice, here or on another rank.
            TrainingError: it does not for a single row.
            OutOfRoom: it did not, and weights are sharded.
        """
        found, refused = [], None
        for group, counted in groups:
            try:
                one = compute(group, counted)
            except (MemoryError, RuntimeError) as error:
                if not cuda.out_of_memory(error):
                    raise
                refused = self.refused(group)
                if self.root is not None:
                    raise self._ends(*refused) from error
            if refused is not None:
                break
            if counted:
                found.append(one)
        everyone = [one for one in ranks.gather(refused) if one is not None]
        if any(text for _, text in everyone):
            raise TrainingError(next(text for _, text in everyone if text))
        if everyone:
            raise NoRoom(min(tokens for tokens, _ in everyone))
        return found

    def refused(self, group: list[Item]) -> tuple[int, str]:
        """(tokens of a micro-batch that does not fit into memory; what to write where it cannot be smaller, else "")."""
        cost = tokens_together(self.model)
        tokens = cost(group)
        if max(cost([part]) for part in cut(group, 1, self.units, cost)) < tokens:
            return tokens, ""
        config = self.config
        settings = (
            "max_completion_length or max_prompt_length" if hasattr(config, "max_prompt_length") else "max_length"
        )
        if hasattr(config, "max_reprompt_len") and getattr(self.objective, "teacher", None) is not None:
            settings += ", or max_reprompt_len (what the teacher reads)"
        write = [
            *(["activation_checkpointing=true"] if not config.activation_checkpointing else []),
            *([self.instead] if self.instead else ["lora_rank=16"] if not config.lora_rank else []),
        ]
        return tokens, (
            f"Row {group[0].row_id} ({sum(len(i.responses) for i in group)} responses, {tokens:,} tokens) does not fit"
            f" into memory by itself, so a lower max_tokens_per_micro_batch (now {self.budget:,}) cannot help. Lower"
            f" {settings}" + (f", or write {' or '.join(write)}." if write else ".")
        )

    def _ends(self, tokens: int, text: str) -> TrainingError:
        if text:
            return TrainingError(text)
        half = max(1, min(self.budget, tokens) // 2)
        return OutOfRoom(
            f"A micro-batch of {tokens:,} tokens does not fit into memory, and with sharding=full a step cannot be done"
            f" again within the run. Write max_tokens_per_micro_batch={half}.",
            half,
        )

    def _step(self, items: Sequence[Item]) -> dict[str, float]:
        learning_rate = learning_rate_at(self.step_index, self.total_steps, self.config)
        self.step_index += 1
        counts = self.objective.counts(items)
        self.optimizer.zero_grad(set_to_none=True)
        totals: dict[str, float] = {"loss": 0.0}
        # counted above, but they cannot move a weight
        forwarded = [i for i in items if not i.extra.get("skip_forward")]
        if not forwarded:
            return {
                "loss": 0.0,
                "grad_norm": 0.0,
                "learning_rate": learning_rate,
                "skipped_steps": float(self.skipped),
                "empty_step": 1.0,
            }
        groups = self._micro_batches(forwarded)
        self.fill = filled([group for group, counted in groups if counted], self.budget)
        self._count_loads(groups)
        found = self.through(groups, lambda group, counted: self.backward(group, counts, counted).detached())
        self._add(totals, found, counts)
        totals = ranks.sum_numbers(totals)
        if isinstance(self.objective, balance.Balanced):
            totals |= self.objective.metrics()
        norm = self._clipped(self.config.max_grad_norm)
        if math.isfinite(norm) and math.isfinite(totals["loss"]):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            self._average()
        else:
            self._skip(items)
        return {**totals, "grad_norm": norm, "learning_rate": learning_rate, "skipped_steps": float(self.skipped)}

    def backward(self, group: list[Item], counts: dict[str, float], counted: bool = True) -> Sums:
        """Forward and backward of one micro-batch of a step with these counts; gradients are added up (zeros if not
        ``counted``).
        """
        with contextlib.nullcontext() if self.places is None else self.places.at_step(self.step_index):
            sums = self._sums(group)
            loss = sums.divided(counts)
            if not counted:
                loss = 0.0 * loss
            if loss.requires_grad:
                with cuda.strictly(self.device):
                    loss.backward()
        return sums

    @torch.no_grad()
    def _count_loads(self, groups: Sequence[tuple[list[Item], bool]]) -> None:
        """Tell the load-balancing loss, if there is one, how many tokens of the step each expert gets
        (:mod:`stages.models.balance`).
        """
        if not isinstance(self.objective, balance.Balanced):
            return
        # noise and dropout have no part in f, however a step is cut
        if (
            self.ranks == 1
            and len(groups) == 1
            and getattr(self.objective, "noise", None) is None
            and self.places is None
        ):
            self.objective.know(None)
            return

        def loads_of(group, counted):
            batch = collate(group, self.device)
            with products(self.config, self.device), self.objective.watch as watch:
                sharding.run(self.model, lambda: hidden_states(self.model, batch, batch.src_N))
            return watch.loads[1]

        found = self.through(groups, loads_of)
        loads = sum(found[1:], found[0]) if found else None
        self.objective.know(
            sum(
                part.to(self.device)
                for part in ranks.gather(None if loads is None else loads.cpu())
                if part is not None
            )
        )

    def _clipped(self, most: float) -> float:
        """Norm of the gradient over all ranks, which is then cut to ``most``."""
        if self.root is None:
            ranks.sum_gradients(list(self.parameters.values()))
        return float(sharding.whole(torch.nn.utils.clip_grad_norm_(self.parameters.values(), most)))

    def gradient_norm(self, items: Sequence[Item]) -> float:
        """Norm of the gradient that a step over ``items`` would take; nothing moves."""
        return self.within_memory(lambda: self._gradient_norm(items))

    def _gradient_norm(self, items: Sequence[Item]) -> float:
        counts = self.objective.counts(items)
        self.optimizer.zero_grad(set_to_none=True)
        groups = self._micro_batches([i for i in items if not i.extra.get("skip_forward")] or items)
        self._count_loads(groups)
        self.through(groups, lambda group, counted: self.backward(group, counts, counted).detached())
        norm = self._clipped(math.inf)
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    @torch.no_grad()
    def _average(self) -> None:
        if self.bema is not None:
            self.bema.after_step(self.parameters.items(), self.averages)
            if self.bema.burning_in:
                for name, average in self.averages.items():
                    average.copy_(self.parameters[name])
            return
        for name, average in self.averages.items():
            average.lerp_(self.parameters[name].detach(), 1.0 - self.config.ema_decay)

    @staticmethod
    def _add(totals: dict[str, float], found: Sequence[Sums], counts: dict[str, float]) -> None:
        """Add the micro-batches' parts of every loss term and metric to the step's totals. All are read together: each
        reading would wait for the GPU.
        """
        read = iter(
            cuda.numbers([total for sums in found for total, _ in (*sums.loss.values(), *sums.metrics.values())])
        )
        for sums in found:
            parts = {name: next(read) / max(counts[by], 1e-12) for name, (_, by) in sums.loss.items()}
            totals["loss"] = totals.get("loss", 0.0) + sum(parts.values())
            shown = {
                **(parts if len(parts) > 1 else {}),
                **{
                    n: next(read) / (1.0 if n.endswith("_max") else max(counts[by], 1e-12))
                    for n, (_, by) in sums.metrics.items()
                },
            }
            for name, value in shown.items():
                totals[name] = (
                    max(totals.get(name, 0.0), value) if name.endswith("_max") else totals.get(name, 0.0) + value
                )

    def _skip(self, items: Sequence[Item]) -> None:
        self.skipped += 1
        if self.skipped > self.config.max_nonfinite_steps:
            rows = ", ".join(i.row_id for i in items[:8])
            raise TrainingError(
                f"The loss or gradient was not finite in {self.skipped} optimizer steps (limit"
                f" max_nonfinite_steps={self.config.max_nonfinite_steps}); rows of the last one: {rows}. Lower"
                " learning_rate, check these rows, or raise max_nonfinite_steps."
            )

    @torch.no_grad()
    def evaluate(self, items: Sequence[Item]) -> dict[str, float]:
        """The objective's loss and metrics over ``items`` without training."""
        if not items:
            return {}
        counts = self.objective.counts(items)
        totals: dict[str, float] = {}
        found = self.within_memory(
            lambda: self.through(self._micro_batches(items), lambda group, counted: self._sums(group))
        )
        self._add(totals, found, counts)
        return ranks.sum_numbers(totals)

    # -- which weights count ------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def averaged(self):
        """The averaged weights (``ema_decay``, ``bema``) in place inside the block; nothing happens without them."""
        kept = {n: self.parameters[n].detach().clone() for n in self.averages}
        self._load(self.averages)
        try:
            yield
        finally:
            self._load(kept)

    @torch.no_grad()
    def _load(self, weights: dict[str, torch.Tensor]) -> None:
        for name, value in weights.items():
            sharding.assign(self.parameters[name], value)

    def consider(self, metrics: dict[str, float]) -> bool:
        """Keep the weights of a validation pass if it is the best by ``select_by``; True when training should stop.

        Call it inside :meth:`averaged`. A value that is not finite is never the best, and of equal ones the first is. A
        pass over an average (``bema``) that has not moved since the last one does not count against patience.
        """
        name = self.config.select_by
        if not name:
            return False
        if name not in metrics:
            raise TrainingError(
                f"select_by={name}: validation gives no such metric; {renamed(name, metrics, validation=True)}write one of:"
                f" {', '.join(sorted(metrics)) or 'none (there are no validation rows)'}"
            )
        value = metrics[name] * (-1.0 if less_is_better(name) else 1.0)
        least, seen = self.best.get("value", -math.inf), self.best.get("average")
        average = None if self.bema is None else self.bema.of_step
        if is_better(value, least):
            self.best = {"value": value, "step": self.step_index, "passes_since": 0}
            self.best_weights = {n: p.detach().clone() for n, p in self.parameters.items()}
        elif average is None or average != seen:
            self.best["passes_since"] = self.best.get("passes_since", 0) + 1
        if average is not None:
            self.best["average"] = average
        return 0 < self.config.early_stopping_patience <= self.best.get("passes_since", 0)

    def settle(self) -> None:
        """Put the weights in place that the stage publishes: the best (``select_by``), the averaged (``ema_decay``,
        ``bema``), or the last.
        """
        self._load(self.best_weights or self.averages)

    # -- state --------------------------------------------------------------------------------------------------
    def state(self) -> tuple[dict, dict[str, Callable[[Path], None]]]:
        """(JSON state, files): weights, what the optimizer holds of each, averages and best weights, exactly. With
        sharded weights every rank's file holds its own rows; they resume on any number of ranks."""
        tensors = {f"weight/{n}": p for n, p in self.parameters.items()}
        tensors |= {f"average/{n}": t for n, t in self.averages.items()} | {
            f"best/{n}": t for n, t in self.best_weights.items()
        }
        averaged = {}
        if self.bema is not None:
            tensors |= self.bema.tensors()
            averaged = {"averaged_steps": self.bema.steps}
        for name, parameter in self.parameters.items():
            tensors |= {
                f"optimizer/{key}/{name}": value
                for key, value in self.optimizer.state.get(parameter, {}).items()
                if value is not None
            }
        parts, mine = (self.ranks, ranks.rank()) if self.root is not None else (1, 0)
        return (
            {
                "step": self.step_index,
                "skipped": self.skipped,
                "best": self.best,
                "parts": parts,
                # where it was halved; else whoever goes on chooses it for his device
                "micro_batch_tokens": self.budget if self.budget < self.config.micro_batch_tokens else None,
                **averaged,
            },
            {f"trainer-{mine}.safetensors": writer_of(tensors)},
        )

    @torch.no_grad()
    def restore(self, state: dict, read: Files) -> None:
        stored = TensorFiles(read.path(f"trainer-{k}.safetensors") for k in range(state["parts"]))
        for name, parameter in self.parameters.items():
            stored.into(f"weight/{name}", parameter)
            if name in self.averages:
                stored.into(f"average/{name}", self.averages[name])
            if f"best/{name}" in stored:
                self.best_weights[name] = stored.into(f"best/{name}", torch.empty_like(parameter.detach()))
            held = {key: f"optimizer/{key}/{name}" for key in optimizers.STATE if f"optimizer/{key}/{name}" in stored}
            if held:
                self.optimizer.state[parameter] = {
                    key: (
                        stored.into(where, torch.empty_like(parameter.detach()))
                        if key in optimizers.LIKE_THE_WEIGHT
                        else stored.whole(where).to(parameter.device)
                    )
                    for key, where in held.items()
                }
        if self.bema is not None:
            self.bema.restore(state["averaged_steps"], stored)
        self.step_index, self.skipped, self.best = state["step"], state["skipped"], state["best"]
        self.budget = min(self.budget, state["micro_batch_tokens"] or self.budget)


def was_skipped(metrics: dict[str, float]) -> bool:
    """Whether the step of these metrics changed nothing because its loss or gradient was not finite."""
    return not all(math.isfinite(metrics.get(name, 0.0)) for name in ("loss", "grad_norm"))


def tell_budget(stage, trainer: Trainer) -> dict[str, float]:
    """Warn where a trainer's micro-batches became smaller than they were to be, and the metric that says so: {} where
    all fitted.
    """
    asked = trainer.config.micro_batch_tokens
    if trainer.budget >= asked:
        return {}
    stage.warn(
        "micro_batch_halved",
        f"Micro-batches of max_tokens_per_micro_batch={asked:,} tokens did not fit into memory, so they have"
        f" {trainer.budget:,} at most from then on; optimizer steps are the same up to rounding. Write"
        f" max_tokens_per_micro_batch={trainer.budget} to spare the attempts"
        + ("." if trainer.config.activation_checkpointing else ", or activation_checkpointing=true."),
    )
    return {"micro_batch_tokens": float(trainer.budget)}


#: In a stage's directory: the tokens of a micro-batch with which it goes on after an :class:`OutOfRoom`.
SMALLER = "micro_batch_tokens.json"


def kept_budget(stage, trainer: Trainer) -> None:
    """Give a trainer the smaller micro-batches that an earlier start of this stage left (:func:`or_keep`)."""
    kept = [one["tokens"] for one in ranks.gather(read_json(stage.workdir / SMALLER, None)) if one]
    trainer.budget = min([trainer.budget, *kept])


def or_keep(stage, attempt: Callable):
    """``attempt()``; where it ends with :class:`OutOfRoom` the next start of this stage has smaller micro-batches.

    Raises:
        TrainingError: says that the same command goes on.
    """
    try:
        return attempt()
    except OutOfRoom as error:
        atomic_write_json(stage.workdir / SMALLER, {"tokens": error.tokens})
        raise TrainingError(
            f"{error} Or give the same command again: it goes on from the last checkpoint, with micro-batches of"
            f" {error.tokens:,} tokens."
        ) from error


def refuse_unmoved(bema, total_steps: int) -> None:
    """Refuse an average (``bema``) that would stay where it starts, so that untrained weights would be published.

    Raises:
        TrainingError: its first update lies behind the last step.
    """
    if bema.update_after + bema.update_freq > total_steps:
        raise TrainingError(
            f"bema moves every update_freq={bema.update_freq} optimizer steps after update_after={bema.update_after}, and"
            f" this run has {total_steps}, so that what is published would not be trained; write for example"
            f" bema='{{update_freq: {max(1, total_steps // 10)}}}', or leave bema out"
        )


def choose_forward(model, forward: str) -> None:
    """Apply ``OptimizerConfig.forward`` to a model.

    Raises:
        TrainingError: ``own`` for an architecture that our forward does not compute.
    """
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    embedding = getattr(embedding, "base_layer", embedding)  # under an adapter
    if getattr(embedding, "padding_idx", None) is not None:
        # torch would leave this token out of the gradient where a text or a sample holds it; padding itself is masked
        embedding.padding_idx = None
    if forward == "own":
        reason = lean.why_not(model)
        if reason:
            raise TrainingError(f"forward=own does not take this model ({reason}); write forward=auto or forward=model")
    if forward in ("model", "compiled"):
        model._posttrain_lean = False
    if forward == "compiled":
        core = lean.core_of(model)
        core.forward = torch.compile(core.forward, dynamic=True)


HOLD_OUT = (
    "hold some out: posttrain stage ingest --input data=FILE --set validation_fraction=0.05, whose dataset is the input"
    " here (or data that has a column split, or files called train and validation)"
)


def check_selection(config: OptimizerConfig, validates: bool) -> None:
    """Refuse ``select_by`` where nothing is validated.

    Raises:
        TrainingError: there are no validation rows.
    """
    if config.select_by and not validates:
        raise TrainingError(
            f"select_by={config.select_by} needs validation rows and there are none; {HOLD_OUT}, or leave select_by out"
        )


def checkpoint_seconds() -> float:
    """Seconds between checkpoints at least (``POSTTRAIN_CHECKPOINT_SECONDS``, default 30; 0 = every step). Cannot
    change results.
    """
    return float(os.environ.get("POSTTRAIN_CHECKPOINT_SECONDS", "30"))


def checkpoint_due(waited: float, took: float) -> bool:
    """Whether to save ``waited`` seconds after the last save, which took ``took``: every :func:`checkpoint_seconds`,
    and for large models not more than a twentieth of the time.
    """
    every = checkpoint_seconds()
    return waited >= max(every, 20.0 * took if every else 0.0)


#: A loss that ends above so many times that of its first step is warned of.
DIVERGED = 3.0


def fit(
    stage,
    trainer: Trainer,
    source: Source,
    *,
    evaluate: Callable[[], dict[str, float]] | None = None,
    eval_every: int = 0,
    again: bool = True,
    falls: bool = True,
    epochs=None,
) -> tuple[dict[str, float], dict[str, float]]:
    """Run the loop to its end, resuming from the stage's last checkpoint.

    Args:
        again: evaluate the weights that are published once more where they are not those of the last pass; False where
            every pass leaves rows behind.
        falls: the loss falls where training goes well, so that one that ends at ``DIVERGED`` times its start is warned of;
            a policy gradient's value says nothing of the kind.
        epochs: writes the model behind every pass over the rows (:class:`stages.models.epochs.Epochs`).

    Returns:
        the evaluations of the starting and of the final weights (``{}`` without ``evaluate``), the same whether resumed
        or not.

    ``tokens_per_second`` (a ``perf`` number, not an output) counts the real tokens of the rows, prompt and completion,
    over whole steps after the first, as ``steps_per_second`` does; ``packing_fill`` is how full this step's
    micro-batches were (:func:`stages.batching.filled`).
    """
    check_selection(trainer.config, evaluate is not None)
    if eval_every and evaluate is None:
        stage.warn("no_validation_rows", f"There are no validation rows, so eval_every validates nothing; {HOLD_OUT}.")
    found = stage.checkpoints.latest()
    initial = None
    if found is not None and found.state.get("phase") == "train":
        initial = found.state["initial"]
        trainer.restore(found.state["trainer"], Files(found))
        source.restore(found.state["source"], Files(found))
        stage.log(f"resumed at step {trainer.step_index} of {trainer.total_steps}")
    kept_budget(stage, trainer)

    def judge() -> tuple[dict[str, float], bool]:
        if evaluate is None:
            return {}, False
        with trainer.averaged():
            metrics = or_keep(stage, evaluate)
            return metrics, trainer.consider(metrics)

    if initial is None:
        initial, _ = judge()
        if initial:
            stage.metric(0, {f"validation/{k}": v for k, v in initial.items()})
    last_save, save_took = time.monotonic(), 0.0
    tokens = seconds = 0.0
    first = trainer.step_index
    stop = False
    ending = False
    stopping.begin_steps()
    while trainer.step_index < trainer.total_steps and not stop:
        started = time.monotonic()
        items = source.items(trainer.step_index)
        metrics = or_keep(stage, lambda: trainer.step(items))
        step = trainer.step_index
        metrics.update(source.after_step(step, metrics))
        elapsed = time.monotonic() - started
        if evaluate is not None and eval_every and step % eval_every == 0 and step < trainer.total_steps:
            judged, stop = judge()
            metrics.update({f"validation/{k}": v for k, v in judged.items()})
            if stop:
                stage.log(
                    f"early stop at step {step}: "
                    + (
                        f"no better {trainer.config.select_by} than at step {trainer.best['step']}"
                        if "step" in trainer.best
                        else f"{trainer.config.select_by} was not finite in any validation pass"
                    )
                )
        if epochs is not None:
            epochs.after_step(trainer)
        metrics.update(tell_budget(stage, trainer))
        stage.metric(step, metrics)
        if step > first + 1:
            counted = getattr(source, "step_tokens", None)
            tokens += counted if counted is not None else sum(i.n_tokens for i in items)
            seconds += elapsed
        stage.progress(
            step,
            trainer.total_steps,
            f"loss {metrics.get('loss', float('nan')):.4f}"
            + (f"  reward {metrics['reward']:.4g}" if "reward" in metrics else ""),
        )
        if seconds and (step == trainer.total_steps or step % 10 == 0):
            stage.perf(
                step,
                {
                    "tokens_per_second": tokens / seconds,
                    "steps_per_second": (step - first - 1) / seconds,
                    "step_time": elapsed,
                    **({"packing_fill": trainer.fill} if trainer.fill else {}),
                },
            )
        # Ranks must agree on when to save, and their clocks do not.
        due = step < trainer.total_steps and checkpoint_due(time.monotonic() - last_save, save_took)
        due, ending = ranks.gather((due, stopping.asked))[0]
        if (due or ending) and not stop:
            began, stopping.saving = time.monotonic(), ending
            save(stage, trainer, source, initial)
            last_save = time.monotonic()
            save_took = last_save - began
        if ending:
            break
    stopping.end_steps()
    if ending:  # asked of another rank
        raise Terminated()
    final: dict[str, float] = {}
    if not stop:
        final, _ = judge()
        if final:
            stage.metric(trainer.step_index, {f"validation/{k}": v for k, v in final.items()})
    if epochs is not None:
        epochs.before_settling(trainer)
    trainer.settle()
    if smaller := tell_budget(stage, trainer):
        stage.summary(smaller)
    # others are texts: "nan"
    rows = [row for row in logged_metrics(stage) if isinstance(row.get("loss"), (int, float))]
    losses = [row["loss"] for row in rows]
    if rows and all(row.get("empty_step") for row in rows):
        stage.warn(
            "nothing_trained",
            f"None of {len(rows)} steps held anything that can move a weight (no target, or every advantage is 0), so what"
            " is published is the model that this began with. Look at the samples and, in RL, at dead groups: prompts that"
            " are sometimes solved, or a reward with more values than two, give a signal.",
        )
    if losses:  # the last tenth of the steps; read from what was logged, so a resumed run says the same
        late = losses[-max(1, len(losses) // 10) :]
        ended = math.fsum(late) / len(late)
        stage.summary({"loss": ended})
        if falls and 0 < DIVERGED * losses[0] < ended:
            stage.warn(
                "diverged",
                f"The loss ended at {ended:.4g}, {ended / losses[0]:.3g} times that of the first step"
                f" ({losses[0]:.4g}), which was taken before any update: unless single batches differ that much, training"
                f" diverged. Write a learning_rate below {trainer.config.learning_rate:g}, or a longer warmup_ratio.",
            )
    if "step" in trainer.best:
        stage.summary({"selected_step": trainer.best["step"]})
    elif trainer.best:
        stage.warn(
            "nothing_selected",
            f"{trainer.config.select_by} was not finite in any validation pass, so no pass was the best and the last"
            " weights are published. Write another select_by, or look at the validation rows.",
        )
    if again and evaluate is not None and (stop or trainer.best.get("step", trainer.step_index) != trainer.step_index):
        final = evaluate()
    return initial, final


def save(stage, trainer: Trainer, source: Source, initial: dict[str, float]) -> None:
    """Write one checkpoint: trainer and source together, by rank 0 (the others' states are the same), or by every rank
    its own shards.
    """
    together = trainer.root is not None
    if ranks.rank() != 0 and not together:
        return stage.hear_ranks()
    trainer_state, files = trainer.state()
    source_state, source_files = source.state()
    stage.hear_ranks()
    stage.save_checkpoint(
        trainer.step_index,
        {"phase": "train", "initial": initial, "trainer": trainer_state, "source": source_state},
        {**files, **source_files},
        together,
    )


class ShuffledRows:
    """A fixed list of items, reshuffled every epoch by a counter-based permutation; its state is the step alone."""

    def __init__(self, stage, items: Sequence[Item], batch_size: int, epochs: float, max_steps: int | None):
        if not items:
            raise TrainingError(
                "No row is left to train on. Look at the dropped rows in this stage's log and at the ingest report's"
                " quarantine counts, or give a dataset with a train split."
            )
        self._stage, self._items, self._batch_size = stage, items, min(batch_size, len(items))
        self.steps_per_epoch = math.ceil(len(items) / self._batch_size)
        self.total_steps = max_steps if max_steps is not None else max(1, round(epochs * self.steps_per_epoch))
        self._epoch, self._order = -1, None

    def items(self, step: int) -> list[Item]:
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._stage.rng("order", epoch).permutation(len(self._items))
        return [self._items[i] for i in self._order[index * self._batch_size : (index + 1) * self._batch_size]]

    def state(self) -> tuple[dict, dict[str, bytes]]:
        return {}, {}

    def restore(self, state: dict, read: Files) -> None:
        pass

    def after_step(self, step: int, metrics: dict[str, Any]) -> dict[str, float]:
        return {"epoch": step / self.steps_per_epoch}


class StagedRows:
    """Parts of the rows one after the other, each for all its epochs (curricula); ``max_steps`` shares the steps out by
    the parts' sizes.

    Args:
        part: per item its part's number; parts are trained in ascending order.
    """

    def __init__(self, stage, items: Sequence[Item], part: Sequence[float], config):
        groups = [[i for i, p in zip(items, part) if p == value] for value in sorted(set(part))]
        self.parts = [ShuffledRows(stage, g, config.batch_size, config.num_train_epochs, None) for g in groups]
        steps = [p.total_steps for p in self.parts]
        self.steps = steps if config.max_steps is None else largest_remainder(config.max_steps, steps)
        self.total_steps = sum(self.steps)

    def _at(self, step: int) -> tuple[int, int]:
        """(part, step within it)."""
        for index, count in enumerate(self.steps):
            if step < count:
                return index, step
            step -= count
        return len(self.steps) - 1, self.steps[-1] - 1

    def items(self, step: int) -> list[Item]:
        index, inner = self._at(step)
        return self.parts[index].items(inner)

    def state(self) -> tuple[dict, dict[str, bytes]]:
        return {}, {}

    def restore(self, state: dict, read: Files) -> None:
        pass

    def after_step(self, step: int, metrics: dict[str, Any]) -> dict[str, float]:
        return {"curriculum_stage": float(self._at(step - 1)[0])}
