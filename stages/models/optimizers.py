"""Optimizers: torch's own, chosen by ``OptimizerConfig.optimizer``, with weight decay on matrices only.

==========  =====================================================  ===============================================================================
adamw       bytes of state per trained weight: 8                    Loshchilov and Hutter 2019
adamw_8bit  2 and 8 per 256 weights; of embeddings and weights     Dettmers et al. 2022: moments in blocks of 256 values, of each its greatest and 8
            of less than 4,096 values adamw's                      bits per value (bitsandbytes); AdamW on all else
sgd         0, with momentum 4                                      weight decay is added to the gradient (L2)
adafactor   a row and a column of every matrix                      Shazeer and Stern 2018: a step is relative to the size of the weights it moves
muon        4                                                       Jordan et al. 2024 on matrices of the layers, their steps scaled to the size of AdamW's
                                                                    (Liu et al. 2025: 0.2 sqrt(max(rows, columns)));
                                                                    AdamW on all else
==========  =====================================================  ===============================================================================

Each keeps its state per weight (``optimizer.state[parameter]``), so the trainer's checkpoints do not know which one it
is.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import nn

from stages.models import lean, memory, quantised, sharding

#: Names of state tensors that have the shape and type of their weight; others are small, or of a run without shards, and
#: kept whole.
LIKE_THE_WEIGHT = ("exp_avg", "exp_avg_sq", "momentum_buffer", "variance")
IN_8_BITS = ("exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales")
STATE = (*LIKE_THE_WEIGHT, *IN_8_BITS, "step", "row_var", "col_var")


@functools.cache
def _levels(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What the 256 codes of first (signed) and second moments stand for, as shares of their block's greatest."""
    library = quantised.bitsandbytes("optimizer=adamw_8bit", "optimizer=adamw")
    return tuple(library.create_dynamic_map(signed=signed).to(device) for signed in (True, False))


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with its moments in 8 bits: codes [like the weight] and the greatest value of every block of 256."""

    def __init__(self, groups: list[dict], lr: float, betas: tuple[float, float], eps: float):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:
        update = quantised.bitsandbytes("optimizer=adamw_8bit", "optimizer=adamw").optimizer_update_8bit_blockwise
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                held = self.state[p]
                if not held:
                    held["step"] = torch.zeros(())
                    for name in ("exp_avg", "exp_avg_sq"):
                        held[f"{name}_codes"] = torch.zeros_like(p, dtype=torch.uint8, requires_grad=False)
                        held[f"{name}_scales"] = p.new_zeros(-(-p.numel() // memory.BLOCK_8BIT), dtype=torch.float32)
                held["step"] += 1
                update(
                    "adam",
                    p.grad.contiguous(),
                    p,
                    held["exp_avg_codes"],
                    held["exp_avg_sq_codes"],
                    *group["betas"],
                    0.0,
                    0.0,
                    group["eps"],
                    int(held["step"]),
                    group["lr"],
                    *_levels(p.device),
                    held["exp_avg_scales"],
                    held["exp_avg_sq_scales"],
                    group["weight_decay"],
                )


class Together:
    """Several optimizers of different weights as one: their groups and their state in one place."""

    def __init__(self, *parts: torch.optim.Optimizer):
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]
        self.state: defaultdict = defaultdict(dict)
        for part in parts:
            part.state = self.state

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)


class InTurns:
    """A torch optimizer that needs whole matrices, over shards: every weight is put together, moved, and parted again,
    one after the other, on every rank alike.

    State of the shape of a weight (momentum) stays parted between steps, the small rest whole. What a rank needs beyond
    its share is one weight with its gradient and state.
    """

    def __init__(self, inner: torch.optim.Optimizer):
        self.inner, self.param_groups = inner, inner.param_groups
        self.state: defaultdict = defaultdict(dict)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._move(p, group)
        self.inner.param_groups = self.param_groups

    def _move(self, p: nn.Parameter, group: dict) -> None:
        held = self.state[p]
        one = nn.Parameter(sharding.whole(p.detach()).clone(), requires_grad=p.requires_grad)
        one.grad = sharding.whole(p.grad)
        self.inner.param_groups, self.inner.state = (
            [{**group, "params": [one]}],
            defaultdict(dict, {one: {key: sharding.whole(value) for key, value in held.items()}} if held else {}),
        )
        self.inner.step()
        sharding.assign_whole(p, one.detach())
        for key, value in self.inner.state[one].items():
            if key in LIKE_THE_WEIGHT and sharding.is_sharded(p):
                held.setdefault(key, torch.empty_like(p.detach()))
                sharding.assign_whole(held[key], value)
            else:
                held[key] = value

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


def make(config, model: nn.Module, parameters: dict[str, nn.Parameter]):
    """The optimizer of these weights of a model as ``config`` (:class:`~stages.settings.OptimizerConfig`) asks for it;
    every group names its ``kind``.
    """

    def groups(kind: str, of) -> list[dict]:
        of = list(of)
        decays = [p for p in of if p.ndim >= 2], [p for p in of if p.ndim < 2]
        return [
            {"params": some, "weight_decay": decay, "kind": kind}
            for some, decay in zip(decays, (config.weight_decay, 0.0))
            if some or kind == "adamw"
        ]

    def adamw(of):
        return torch.optim.AdamW(
            groups("adamw", of),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            fused=True,
        )

    def beside(chosen: set[int], optimizer_of):
        """``optimizer_of(some)`` moves the chosen weights, AdamW the others."""
        some, rest = ([p for p in every if (id(p) in chosen) is inside] for inside in (True, False))
        return Together(*([optimizer_of(some)] if some else []), *([adamw(rest)] if rest else []))

    every = list(parameters.values())
    turns = InTurns if any(map(sharding.is_sharded, every)) else lambda optimizer: optimizer
    if config.optimizer == "sgd":
        # fused takes no shards
        return torch.optim.SGD(
            groups("sgd", every), lr=config.learning_rate, momentum=config.momentum or 0.0, foreach=False
        )
    if config.optimizer == "adafactor":
        return turns(torch.optim.Adafactor(groups("adafactor", every), lr=config.learning_rate))
    if config.optimizer == "muon":
        return beside(
            of_muon(model, parameters),
            lambda some: turns(
                torch.optim.Muon(
                    groups("muon", some),
                    lr=config.learning_rate,
                    weight_decay=config.weight_decay,
                    momentum=0.95 if config.momentum is None else config.momentum,
                    adjust_lr_fn="match_rms_adamw",
                )
            ),
        )
    if config.optimizer == "adamw_8bit":
        return beside(
            in_8_bits(model, parameters),
            lambda some: AdamW8bit(
                groups("adamw_8bit", some),
                lr=config.learning_rate,
                betas=(config.adam_beta1, config.adam_beta2),
                eps=config.adam_epsilon,
            ),
        )
    return adamw(every)


def in_8_bits(model: nn.Module, parameters: dict[str, nn.Parameter]) -> set[int]:
    """Ids of the weights whose moments ``adamw_8bit`` keeps in 8 bits: as in transformers, not embeddings, whose rows move
    by very different amounts, nor small ones.
    """
    embeddings = _of_embeddings(model)
    return {
        id(p) for p in parameters.values() if p.ndim >= 2 and p.numel() >= memory.FROM_8BIT and id(p) not in embeddings
    }


def _of_embeddings(model: nn.Module) -> set[int]:
    """Ids of embeddings, tied with the output layer or not."""
    return {
        id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module._parameters.values()
    }


def of_muon(model: nn.Module, parameters: dict[str, nn.Parameter]) -> set[int]:
    """Ids of the weights that Muon moves: matrices of the layers and of adapters on them, not embeddings, the output
    layer or heads.
    """
    inside = {
        id(p)
        for module in lean.core_of(model).modules()
        if not isinstance(module, nn.Embedding)
        for p in module._parameters.values()
        if p is not None
    }
    embeddings = _of_embeddings(model)
    return {
        id(p)
        for name, p in parameters.items()
        if p.ndim == 2 and id(p) in inside - embeddings and "lora_embedding" not in name
    }


def state_shapes(optimizer) -> Iterator[tuple[nn.Parameter, torch.Size | tuple, torch.dtype]]:
    """(weight, shape, type) of every tensor that the optimizer will hold from its first step on, but for counters of
    steps.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            if group["kind"] == "adafactor" and p.ndim >= 2:
                yield p, (*p.shape[:-1], 1), p.dtype
                yield p, (*p.shape[:-2], 1, p.shape[-1]), p.dtype
                continue
            if group["kind"] == "adamw_8bit":
                for _ in range(2):
                    yield p, p.shape, torch.uint8
                    yield p, (-(-p.numel() // memory.BLOCK_8BIT),), torch.float32
                continue
            many = {"adamw": 2, "sgd": int(group.get("momentum", 0.0) > 0), "adafactor": 1, "muon": 1}[group["kind"]]
            yield from ((p, p.shape, p.dtype) for _ in range(many))
