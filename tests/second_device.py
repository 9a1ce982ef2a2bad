"""A second device that computes on the CPU: what runs on it would not trip over tensors of two devices on a GPU.

    with second_device():
        execute({**spec, "device": DEVICE})

Its tensors say that they are on ``DEVICE`` and hold CPU tensors. As with CUDA, an operation on tensors of both devices is an error unless the other
one has no dimensions, indices may come from the CPU, NumPy sees none of them, and copies between the two are made with ``.to``. ``lazy`` is a device type
that PyTorch knows and has no kernels for, and whose gradients autograd computes in the calling thread; code that asks whether a device is the CPU takes
the way that it takes on CUDA. What CUDA computes differently, autocast, streams and memory are not tried by this.
"""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager, nullcontext

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = "lazy:0"

#: Operations whose tensors may be on two devices, and those whose indices may come from the CPU.
ACROSS = {"aten::_to_copy", "aten::to", "aten::copy_"}
INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index", "aten::_unsafe_index_put", "aten::_index_put_impl_"}


class There(torch.Tensor):
    """A tensor on the second device."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=torch.device(DEVICE))

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return compute(operation, args, kwargs or {})


def compute(operation, args, kwargs):
    """The operation on what the tensors hold; its results are where CUDA's would be."""
    name = operation._schema.name
    given = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    there = [one for one in given if isinstance(one, There)]
    goes = bool(there)
    wanted = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.device)]
    if wanted:
        goes = wanted[0].type == "lazy"
    if there and name not in ACROSS:
        exempt = pytree.tree_leaves(args[1]) if name in INDEXED and isinstance(args[0], There) else []
        here = [one for one in given if not isinstance(one, There) and one.dim() and not any(one is index for index in exempt)]
        if here:
            raise RuntimeError(f"{name}: tensors on {DEVICE} and on the CPU, of shapes {[tuple(one.shape) for one in there]} and {[tuple(one.shape) for one in here]}")
    held = {id(one.held): one for one in there}
    if name == "aten::copy_":
        goes = isinstance(args[0], There)
    if name == "aten::_conj":  # lazily marked tensors would lose the mark here
        operation = torch.ops.aten._conj_physical.default
    result = operation(*pytree.tree_map(_held, args), **pytree.tree_map(_held, kwargs))
    return pytree.tree_map(lambda one: one if not isinstance(one, torch.Tensor) else held[id(one)] if id(one) in held else There(one) if goes else one, result)


def _held(one):
    return one.held if isinstance(one, There) else torch.device("cpu") if isinstance(one, torch.device) else one


class Places(TorchDispatchMode):
    """New tensors are made where they are wanted."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return compute(operation, args, kwargs or {})


class Makers(TorchFunctionMode):
    """Tensors made of Python's numbers are made on the CPU first, and read there: PyTorch asks no dispatch mode about either, nor about storages."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if function in (torch.tensor, torch.as_tensor, torch.asarray) and device is not None and torch.device(device).type == "lazy":
            return function(*args, **{**kwargs, "device": None}).to(device)
        if function is torch.Tensor.new_tensor and isinstance(args[0], There):
            return args[0].held.new_tensor(*args[1:], **kwargs).to(DEVICE)
        if function in (torch.Tensor.tolist, torch.Tensor.untyped_storage, torch.Tensor.data_ptr) and isinstance(args[0], There):
            return function(args[0].held)
        return function(*args, **kwargs)


class Module:
    """What torch.cuda is to CUDA, as far as recomputing activations asks."""

    get_rng_state, set_rng_state, _initialized, _is_in_bad_fork = torch.get_rng_state, torch.set_rng_state, False, staticmethod(lambda: False)
    device = staticmethod(lambda index: nullcontext())


@contextmanager
def second_device(monkeypatch):
    """Within it the second device is there, in threads that are started within it too."""
    import stages.models.lean

    started = threading.Thread.run

    def run(thread):
        with Makers(), Places():
            started(thread)

    for name in ("autocast", "is_autocast_enabled", "get_autocast_dtype"):  # this device has none of its own
        known = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda device, *rest, known=known, **options: known("cpu" if device == "lazy" else device, *rest, **options))
    monkeypatch.setattr(torch, "lazy", Module, raising=False)
    monkeypatch.setattr(sys.modules[torch.optim.Adam.__module__], "_device_dtype_check_for_fused", lambda *given, **options: None)
    monkeypatch.setattr(threading.Thread, "run", run)
    monkeypatch.setattr(torch.inference_mode, "__enter__", lambda mode: setattr(mode, "graph", torch.no_grad()) or mode.graph.__enter__())  # its tensors take no out=
    monkeypatch.setattr(torch.inference_mode, "__exit__", lambda mode, *error: mode.graph.__exit__(*error))
    monkeypatch.setitem(stages.models.lean.BLOCK, "lazy", stages.models.lean.BLOCK["cuda"])
    # torch makes no object of this class within a dispatch mode; on a device without kernels of its own it becomes this mask
    monkeypatch.setattr(stages.models.lean, "causal_lower_right", lambda queries, keys: torch.ones(queries, keys, dtype=torch.bool, device=DEVICE).tril(keys - queries))
    with Makers(), Places():
        yield
