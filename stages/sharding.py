"""FSDP2: every weight, gradient and optimizer state split over the ranks, gathered layer by layer where it is needed.

The objective runs inside the root's forward, so that the LM head, the embedding and the norms are whole there. Gradients are summed
over ranks, not averaged: the step has divided by the counts of all ranks already. Layers run through the model's own forward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from stages import lean, ranks


class Root(nn.Module):
    """Holds the sharded model; ``root(call)`` runs ``call()``, which must return tensors, with the root's weights whole."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, call: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return call()


def shard(model, device: str) -> Root:
    """Split the model over all ranks, one unit per layer, in place."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.split(":")[0], (ranks.world_size(),))
    core = lean.core_of(model)
    root = Root(model)
    for layer in getattr(core, "layers", None) or getattr(core, "h", None) or ():
        fully_shard(layer, mesh=mesh)
    fully_shard(root, mesh=mesh)
    for module in root.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    model._posttrain_lean = False
    return root


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a sharded one (every rank must ask), any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assign(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a full or equally sharded value into a parameter, sharded or not."""
    if hasattr(parameter, "full_tensor") and not hasattr(value, "full_tensor"):
        value = like(value, parameter)
    parameter.copy_(value)


def like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A full value split as the parameter is (as it is where the parameter is not)."""
    if not hasattr(parameter, "full_tensor"):
        return value.to(parameter.device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


@torch.no_grad()
def gather(model) -> dict[str, torch.Tensor] | None:
    """Whole weights by name, on the CPU of rank 0 (empty elsewhere; every rank must ask); None where nothing is sharded."""
    state = model.state_dict()
    if not any(hasattr(t, "full_tensor") for t in state.values()):
        return None
    found = {}
    for name, tensor in state.items():
        full = whole(tensor)
        if ranks.rank() == 0:
            found[name] = full.cpu()
    return found
