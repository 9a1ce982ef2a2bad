"""FSDP2: every weight, gradient and optimizer state split over the ranks, gathered layer by layer where it is needed.

The objective runs inside the root's forward, so that the LM head, the embedding and the norms are whole there; so does
everything else that reads a sharded model (:func:`run`). Every rank must make the same calls in the same order.
Gradients are summed over ranks, not averaged: the step has divided by the counts of all ranks already. Layers run
through the model's own forward.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import nn

from stages.models import lean
from stages.running import allocator, ranks


class Root(nn.Module):
    """Holds the sharded model; ``root(call)`` runs ``call()``, which must return tensors, with the root's weights
    whole.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, call: Callable):
        return call()


def shard(model, device: str) -> Root:
    """Split the model over all ranks, one unit per layer, in place (frozen weights too). What is still in files is read
    a unit at a time.
    """
    from stages.models import pending
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks.connect(device)
    if device == "cpu":
        allocator.return_freed_memory()
    mesh = init_device_mesh(device.split(":")[0], (ranks.world_size(),))
    root = Root(model)
    for layer in layers_of(model):
        pending.fill(model, [layer])
        fully_shard(layer, mesh=mesh)
    pending.fill(model)
    fully_shard(root, mesh=mesh)
    for module in root.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    model._posttrain_lean = False
    model.__dict__["_posttrain_root"] = root  # not a submodule: the root holds the model
    return root


def asked(config) -> bool:
    """Whether this process's trained models will be sharded."""
    return config.sharding == "full" and ranks.world_size() > 1


def layers_of(model) -> nn.ModuleList | tuple:
    """The transformer layers that read text, in the backbone of a decoder or encoder: the outermost list of as many
    modules as the text part of the config names, and not a vision tower or the experts of a layer, which may be longer.
    Where none has that length (shared layers), the longest.
    """
    core, text = lean.core_of(model), model.config.get_text_config()
    reader = next((m for m in core.modules() if getattr(m, "config", None) is text), core)
    lists = [m for m in reader.modules() if isinstance(m, nn.ModuleList)]
    named = next((m for m in lists if len(m) == text.num_hidden_layers), None)
    return named or max(lists, key=len, default=())


def root_of(model) -> Root | None:
    """The root of a sharded model, None for a whole one."""
    return getattr(model, "_posttrain_root", None)


@torch.no_grad()
def run(model, call: Callable):
    """``call()``, which reads the model's weights without gradients, and its result."""
    root = root_of(model)
    if root is None:
        return call()
    try:
        return root(call)
    finally:
        root.reshard()  # the root keeps its weights for a backward that never comes, and would not see them change


# -- one tensor --------------------------------------------------------------------------------------------------------


def is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a sharded one (every rank must ask), any other as it is."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of a sharded tensor that lie on this rank, sharing its memory; any other tensor as it is."""
    return tensor._local_tensor if is_sharded(tensor) else tensor


def rows_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """(first, end) of the rows that lie on this rank; None where the tensor is whole."""
    if not is_sharded(tensor):
        return None
    rows, share = tensor.shape[0], math.ceil(tensor.shape[0] / ranks.world_size())
    return min(rows, ranks.rank() * share), min(rows, (ranks.rank() + 1) * share)


def assign(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value into a parameter, both sharded alike or both whole."""
    local(parameter).copy_(local(value))


def assign_whole(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy into a tensor, sharded or whole, its part of a whole value."""
    at = rows_of(tensor)
    local(tensor).copy_(value if at is None else value[slice(*at)])


# -- the model as a whole ----------------------------------------------------------------------------------------------


class Acting:
    """A trained model for code that reads all its weights at once (the sampler): ``model``, up to date after
    :meth:`refresh`.

    It is the trained model itself, or ``apart`` a whole frozen copy: where that is about to be sharded (make this
    before the trainer), or trains on meanwhile.
    """

    def __init__(self, source, apart: bool):
        from stages.models import pending

        self.source = self.model = source
        if apart:
            self.model = pending.fill(copy.deepcopy(source)).requires_grad_(False)

    @torch.no_grad()
    def refresh(self) -> None:
        """Gather what was trained, one tensor after the other; every rank must call."""
        if self.model is self.source:
            return
        own = dict(self.model.named_parameters())
        for name, parameter in self.source.named_parameters():
            if parameter.requires_grad:
                own[name].copy_(whole(parameter))


@torch.no_grad()
def collect(model) -> None:
    """Make a sharded model whole on the CPU of rank 0, one tensor after the other, to be written out; nothing happens
    to a whole one. Every rank must call; the others' models are used up."""
    root = root_of(model)
    if root is None:
        return
    root.reshard()
    found: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if parameter not in found:
                full = whole(parameter)
                found[parameter] = nn.Parameter(
                    full.cpu() if ranks.rank() == 0 else full.new_empty(0), requires_grad=False
                )
            module._parameters[name] = found[parameter]
        for name, value in list(module._buffers.items()):
            module._buffers[name] = None if value is None else value.cpu()
    del model.__dict__["_posttrain_root"]
