"""A second device, ``cuda:0``, that computes on the CPU: what runs on it takes every way that is taken on CUDA.

    with second_device():
        execute({**spec, "device": DEVICE})

Its tensors say that they are on ``DEVICE`` and hold CPU tensors. As with CUDA

* an operation on tensors of both devices is an error unless the other one has no dimensions; indices may come from the
  CPU, NumPy sees none of them, and copies between the two are made with ``.to``;
* ``torch.autocast("cuda")`` casts what CUDA's lists name, which are not the CPU's;
* in the strict mode of ``torch.use_deterministic_algorithms`` what has no deterministic form is refused;
* a copy that does not block reads pinned memory later, and what it brings to the host is not there before something has
  waited (:class:`Stream`);
* a graph replays the operations that were captured, at the addresses that they had (:class:`CUDAGraph`): what would
  wait for the device is refused while one is captured, so are a second capture, a wait for the whole device by any
  thread, and the end of another graph; memory that was given back is not there any more, and a pool whose graphs are
  all gone takes no other.

For PyTorch's own dispatcher the tensors are of the device type ``lazy``, which it knows and has no kernels for, and
whose gradients autograd computes in the calling thread. What is not tried: streams beside the current one, kernels and
their rounding, how much memory there is, several devices.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as recomputed
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

DEVICE = "cuda:0"
REAL = torch.cuda.is_available()
_BELOW = torch.device("lazy:0")  # what the dispatcher is told

#: Operations whose tensors may be on two devices, and those whose indices may come from the CPU.
ACROSS = {"aten::_to_copy", "aten::to", "aten::copy_"}
INDEXED = {
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_unsafe_index",
    "aten::_unsafe_index_put",
    "aten::_index_put_impl_",
}
#: Operations that wait for the device, since the host needs their numbers or their result's size.
WAITING = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::_unique2",
    "aten::bincount",
    "aten::repeat_interleave",
    "aten::histc",
}
#: Those that refuse the strict mode on CUDA (torch.use_deterministic_algorithms), of floating-point numbers.
UNORDERED = {
    "aten::cumsum",
    "aten::cumsum_",
    "aten::bincount",
    "aten::kthvalue",
    "aten::histc",
    "aten::median",
    "aten::_embedding_bag",
    "aten::put_",
    "aten::scatter_reduce_",
    "aten::nll_loss2d_forward",
    "aten::_ctc_loss",
}
#: ``torch.autocast("cuda")``: what it computes in the lower type, what in float32, and what in the widest type given
#: (torch's docs/source/amp.md; aten/src/ATen/autocast_mode.h).
LOWER = {
    "conv1d",
    "conv2d",
    "conv3d",
    "prelu",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "mm",
    "mv",
    "linear",
    "addbmm",
    "baddbmm",
    "bmm",
    "einsum",
    "chain_matmul",
    "multi_dot",
    "vecdot",
    "scaled_dot_product_attention",
    "__matmul__",
    "__rmatmul__",
}
WIDER = {
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow",
    "__pow__",
    "__rpow__",
    "softplus",
    "layer_norm",
    "group_norm",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "prod",
    "softmax",
    "log_softmax",
    "cumprod",
    "cumsum",
    "sum",
    "norm",
    "vector_norm",
    "matrix_norm",
    "cross_entropy",
}
WIDEST = {
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "grid_sample",
    "index_put",
    "tensordot",
    "scatter_add",
}


class There(torch.Tensor):
    """A tensor on the second device."""

    device = property(lambda self: torch.device(DEVICE))
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=_BELOW,
        )

    def __init__(self, held):
        self.held = held

    def __format__(self, how):
        return format(self.item() if not self.dim() else repr(self), how)

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return compute(operation, args, kwargs or {})


def sequenced(q, k, v, queries, keys, scale: float, window: int | None = None, grad=None):
    """Attention within sequences, by its definition: q [U, H, D], k and v [N, K, D], queries and keys [S + 1] -> [U, H,
    D]; with ``grad`` of that, the gradients of q, k and v."""
    group = q.shape[1] // k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    outs, grads = [], [torch.zeros_like(x, dtype=wide) for x in (q, k, v)]
    for a, b, c, d in zip(*(x.tolist()[i:] for x in (queries, keys) for i in (0, 1))):
        own, before = (x[c:d].to(wide).repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        asked = q[a:b].to(wide).transpose(0, 1)
        far = torch.arange(d - c) - torch.arange(d - c - (b - a), d - c)[:, None]  # negative: stands before
        open_ = (far <= 0) & (far > -(d - c if window is None else window))
        weights = torch.softmax((asked @ own.mT * scale).masked_fill(~open_, -torch.inf), -1)
        outs.append((weights @ before).transpose(0, 1).to(q.dtype))
        if grad is not None:
            g = grad[a:b].to(wide).transpose(0, 1)
            slope = g @ before.mT
            slope = weights * (slope - (slope * weights).sum(-1, keepdim=True)) * scale
            grads[0][a:b] += (slope @ own).transpose(0, 1)
            for total, part in zip(grads[1:], (slope.mT @ asked, weights.mT @ g)):
                total[c:d] += part.transpose(0, 1).unflatten(1, (-1, group)).sum(2)
    return torch.cat(outs) if grad is None else tuple(x.to(q.dtype) for x in grads)


def _flash(q, k, v, queries, keys, most, longest, p, causal, debug, scale=None, window_size_left=None, **more):
    assert q.dtype in (torch.bfloat16, torch.float16) and causal and q.shape[2] % 8 == 0
    window = None if window_size_left is None else window_size_left + 1
    nothing = q.new_zeros(0)
    return sequenced(q, k, v, queries, keys, scale, window), nothing, nothing, nothing, nothing


def _flash_back(
    grad, q, k, v, out, sums, queries, keys, most, longest, *rest, scale=None, window_size_left=None, **more
):
    window = None if window_size_left is None else window_size_left + 1
    return sequenced(q, k, v, queries, keys, scale, window, grad)


def _efficient(q, k, v, bias, queries, keys, most, longest, p, kind, sums=False, scale=None, **more):
    assert kind == 2 and q.shape[2] == k.shape[2], "causal from the bottom right, without grouped heads"
    nothing = q.new_zeros(0)
    return sequenced(q[0], k[0], v[0], queries, keys, scale)[None], nothing, nothing, nothing, most, longest


def _efficient_back(grad, q, k, v, bias, out, queries, keys, most, longest, *rest, scale=None, **more):
    found = sequenced(q[0], k[0], v[0], queries, keys, scale, grad=grad[0])
    return *(x[None] for x in found), q.new_zeros(0)


#: What has kernels on GPUs only.
KERNELS = {
    "aten::_flash_attention_forward": _flash,
    "aten::_flash_attention_backward": _flash_back,
    "aten::_efficient_attention_forward": _efficient,
    "aten::_efficient_attention_backward": _efficient_back,
}


BRANCHES = (list, tuple, dict)


def _leaves(one) -> list:
    """What lies in arguments or results, in order. Those of operations are lists, tuples and dictionaries, and PyTorch's
    own way through trees of any kind takes longer than the operations.
    """
    found = []
    for inner in one.values() if isinstance(one, dict) else one if isinstance(one, BRANCHES) else (one,):
        if isinstance(inner, BRANCHES):
            found += _leaves(inner)
        else:
            found.append(inner)
    return found


def _mapped(function, one):
    """The same lists, tuples and dictionaries of what a function makes of what lies in them."""
    if isinstance(one, dict):
        return {name: _mapped(function, inner) for name, inner in one.items()}
    if not isinstance(one, BRANCHES):
        return function(one)
    inner = [_mapped(function, each) if isinstance(each, BRANCHES) else function(each) for each in one]
    return inner if isinstance(one, list) else tuple(inner)


def is_there(device) -> bool:
    return device.type in ("cuda", "lazy")


def compute(operation, args, kwargs):
    """The operation on what the tensors hold; its results are where CUDA's would be."""
    name = operation._schema.name
    leaves = _leaves((args, kwargs))
    given = [one for one in leaves if isinstance(one, torch.Tensor)]
    there = [one for one in given if isinstance(one, There)]
    goes = bool(there)
    wanted = [one for one in leaves if isinstance(one, torch.device)]
    if wanted:
        goes = is_there(wanted[0])
    if there and name not in ACROSS:
        exempt = _leaves(args[1]) if name in INDEXED and isinstance(args[0], There) else []
        here = [
            one
            for one in given
            if not isinstance(one, There) and one.dim() and not any(one is index for index in exempt)
        ]
        if here:
            raise RuntimeError(
                f"{name}: tensors on {DEVICE} and on the CPU, of shapes {[tuple(one.shape) for one in there]} and"
                f" {[tuple(one.shape) for one in here]}"
            )
    if (
        there
        and name in UNORDERED
        and there[0].is_floating_point()
        and torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    ):
        raise RuntimeError(
            f"{name} does not have a deterministic implementation, but you set"
            " 'torch.use_deterministic_algorithms(True)'."
        )
    if name == "aten::copy_":
        goes = isinstance(args[0], There)
    operation = KERNELS.get(name, operation)
    if name == "aten::_conj":  # lazily marked tensors would lose the mark here
        operation = torch.ops.aten._conj_physical.default
    _STREAM.meets(name, args, kwargs, there, given, goes)
    held = {id(one.held): one for one in there}
    below = _mapped(_held, args), _mapped(_held, kwargs)
    if goes and _STREAM.graph is not None:
        _STREAM.graph.saves(operation, *below)
    result = operation(*below[0], **below[1])
    if goes and _STREAM.graph is not None:
        _STREAM.graph.keep(operation, *below, result)
    result = _mapped(
        lambda one: (
            one
            if not isinstance(one, torch.Tensor)
            else held[id(one)]
            if id(one) in held
            else There(one)
            if goes
            else one
        ),
        result,
    )
    if (
        there
        and not goes
        and name in ACROSS
        and (kwargs.get("non_blocking") or name == "aten::copy_" and len(args) > 2 and args[2])
    ):
        _STREAM.brings(args[0] if name == "aten::copy_" else result)
    return result


def _held(one):
    return one.held if isinstance(one, There) else torch.device("cpu") if isinstance(one, torch.device) else one


# -- time --------------------------------------------------------------------------------------------------------------


class Stream:
    """What the device has still to do, as far as the host may notice it: copies that do not block."""

    def __init__(self):
        self.graph: CUDAGraph | None = None
        self.capturing = None  # the thread that captures it
        self.spoiled = ""  # what has ended the capture, which says so when it is done
        # pinned memory that is read later, what it held when it was sent
        self.sent: list[tuple[torch.Tensor, torch.Tensor]] = []
        # memory of the host that is written later, what it will hold
        self.coming: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.pinned: dict[int, StorageWeakRef] = {}
        # a thread that waits while another one does goes on when both are done: the device has read what it sends
        self.order = threading.RLock()

    def meets(self, name, args, kwargs, there, given, goes) -> None:
        """An operation is about to be started."""
        if not there and not goes:
            return
        leaves = name in ACROSS and bool(there) and not goes
        arrives = name in ACROSS and goes and any(not isinstance(one, There) for one in given)
        late = bool(kwargs.get("non_blocking") or name == "aten::copy_" and len(args) > 2 and args[2])
        source = next((one for one in reversed(given) if not isinstance(one, There)), None) if arrives else None
        if arrives and late and self.is_pinned(source):
            with self.order:
                self.sent.append((source, source.clone()))
        waits = (
            name in WAITING
            or leaves
            and not late
            or arrives
            and not (late and self.is_pinned(source))
            or name in INDEXED
            and any(one.dtype in (torch.bool, torch.uint8) for one in _leaves(args[1]) if isinstance(one, torch.Tensor))
            or name == "aten::where"
            and len(there) < len(given)
        )
        if not waits:
            return
        if self.graph is not None and self.capturing is threading.current_thread():
            raise RuntimeError(
                f"{name}: operation not permitted when stream is capturing: the host would wait for the device"
            )
        self.wait()

    def wait(self, sent=None, coming=None) -> None:
        """Everything that was started is done, or these copies of it."""
        with self.order:
            sent, coming = (
                ([one for one in self.sent if sent is None or any(one is other for other in sent)]),
                ([one for one in self.coming if coming is None or any(one is other for other in coming)]),
            )
            self.sent = [one for one in self.sent if not any(one is other for other in sent)]
            self.coming = [one for one in self.coming if not any(one is other for other in coming)]
            for source, was in sent:
                if not torch.equal(source, was):
                    raise RuntimeError("pinned memory was written before a copy that does not block had read it")
            for target, value in coming:
                target.copy_(value)

    def brings(self, target) -> None:
        """A copy to the host that is not there yet."""
        with self.order:
            self.coming.append((target, target.clone()))
            target.fill_(-77)

    def pin(self, tensor):
        self.pinned[tensor.untyped_storage()._cdata] = StorageWeakRef(tensor.untyped_storage())
        return tensor

    def is_pinned(self, tensor) -> bool:
        found = self.pinned.get(tensor.untyped_storage()._cdata)
        return found is not None and not found.expired()


_STREAM = Stream()


class Pool:
    """Memory that graphs share, for as long as there is one of them."""

    def __init__(self):
        self.used, self.graphs = False, weakref.WeakSet()


class CUDAGraph:
    """The operations of a capture, done again at the same addresses."""

    def __init__(self):
        self.steps: list[tuple] = []
        self.own: set[int] = set()  # storages that belong to the graph
        self.kept: list = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what a capture, which computes nothing, wrote

    def saves(self, operation, args, kwargs) -> None:
        """What an operation of a capture is about to write over."""
        if _STREAM.capturing is not threading.current_thread() or not operation._schema.is_mutable:
            return
        for place, argument in enumerate(operation._schema.arguments):
            one = args[place] if place < len(args) else kwargs.get(argument.name)
            if argument.alias_info is None or not argument.alias_info.is_write or not isinstance(one, torch.Tensor):
                continue
            storage = one.untyped_storage()
            if storage._cdata not in self.own and storage._cdata not in self.before:
                self.before[storage._cdata] = storage, storage.clone()

    def undo(self) -> None:
        """The capture has ended."""
        for storage, was in self.before.values():
            storage.copy_(was)
        self.before.clear()

    def keep(self, operation, args, kwargs, result) -> None:
        if _STREAM.capturing is not threading.current_thread():
            return
        outputs = [one for one in _leaves(result) if isinstance(one, torch.Tensor)]
        inputs = [one for one in _leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        before = {one.untyped_storage()._cdata for one in inputs}
        self.own |= {one.untyped_storage()._cdata for one in outputs if one.untyped_storage()._cdata not in before}
        self.kept += [one.untyped_storage() for one in outputs if one.untyped_storage()._cdata in self.own]
        if (
            outputs
            and all(one.untyped_storage()._cdata in before for one in outputs)
            and not operation._schema.is_mutable
        ):
            return  # views, which are addresses and no work
        self.steps.append(
            (
                operation,
                *(_mapped(self._address, part) for part in (args, kwargs)),
                [self._address(one) for one in outputs],
            )
        )

    def __del__(self):
        if _STREAM.graph is not None and _STREAM.graph is not self and _STREAM.capturing is threading.current_thread():
            _STREAM.spoiled = "a graph was destroyed"

    def _address(self, one):
        if not isinstance(one, torch.Tensor):
            return one
        reference = StorageWeakRef(one.untyped_storage())
        strong = (
            one.untyped_storage() if reference.cdata in self.own or one.untyped_storage()._cdata in self.own else None
        )
        return SimpleNamespace(
            reference=reference, strong=strong, place=(one.storage_offset(), one.size(), one.stride()), dtype=one.dtype
        )

    def replay(self) -> None:
        # of tensors below the second device, as when they were captured: nobody is to ask where they are
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            for operation, args, kwargs, outputs in self.steps:
                result = operation(*_mapped(self._tensor, args), **_mapped(self._tensor, kwargs))
                for found, place in zip((one for one in _leaves(result) if isinstance(one, torch.Tensor)), outputs):
                    target = self._tensor(place)
                    if target.data_ptr() != found.data_ptr():
                        target.copy_(found)

    @staticmethod
    def _tensor(one):
        if not isinstance(one, SimpleNamespace):
            return one
        storage = (
            one.strong
            if one.strong is not None
            else None
            if one.reference.expired()
            else torch.UntypedStorage._new_with_weak_ptr(one.reference.cdata)
        )
        if storage is None:
            raise RuntimeError("a graph reads memory that was given back after it was captured")
        return torch.empty(0, dtype=one.dtype).set_(storage, *one.place)


class Event:
    """What was started before :meth:`record`: after :meth:`synchronize` it is done, and nothing else is."""

    def record(self) -> None:
        with _STREAM.order:
            self.sent, self.coming = list(_STREAM.sent), list(_STREAM.coming)

    def synchronize(self) -> None:
        _STREAM.wait(self.sent, self.coming)


@contextmanager
def graph(made, pool=None, stream=None, capture_error_mode="global", **more):
    """``torch.cuda.graph``."""
    if _STREAM.graph is not None:
        raise RuntimeError("only one capture may be underway at a time in the process")
    if pool is not None and pool.used and not pool.graphs:
        raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED: the graphs of this pool are gone")
    _STREAM.wait()
    if pool is not None:
        pool.used = True
        pool.graphs.add(made)
    _STREAM.graph, _STREAM.capturing, _STREAM.spoiled = made, threading.current_thread(), ""
    try:
        yield
    finally:
        _STREAM.graph = _STREAM.capturing = None
        made.undo()
    if _STREAM.spoiled:
        raise RuntimeError(f"operation failed due to a previous error during capture: {_STREAM.spoiled}")


# -- what is said in Python --------------------------------------------------------------------------------------------


class Places(TorchDispatchMode):
    """New tensors are made where they are wanted."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return compute(operation, args, kwargs or {})


def _below(one):
    if isinstance(one, torch.device):
        return _BELOW if one.type == "cuda" else one
    return _BELOW if isinstance(one, str) and one.split(":")[0] == "cuda" else one


class Makers(TorchFunctionMode):
    """Devices are told to the dispatcher by its own name. Tensors made of Python's numbers are made on the CPU first,
    and read there: PyTorch asks no dispatch mode about either, nor about storages. And autocast, and the masks that
    attention takes."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.device:
            return function(*args, **kwargs)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _below(kwargs["device"])}
        if any(isinstance(one, (str, torch.device)) for one in args):
            args = tuple(map(_below, args))
        device = kwargs.get("device")
        if (
            function in (torch.tensor, torch.as_tensor, torch.asarray)
            and device is not None
            and torch.device(device).type == "lazy"
        ):
            return function(*args, **{**kwargs, "device": None}).to(device)
        if function is torch.Tensor.new_tensor and isinstance(args[0], There):
            return args[0].held.new_tensor(*args[1:], **kwargs).to(_BELOW)
        if function in (torch.Tensor.tolist, torch.Tensor.untyped_storage, torch.Tensor.data_ptr) and isinstance(
            args[0], There
        ):
            if function is torch.Tensor.tolist:
                _STREAM.meets("aten::item", args, {}, [args[0]], [args[0]], False)
            return function(args[0].held)
        if function is torch.Tensor.cuda:
            return args[0].to(_BELOW)
        if function is torch.Tensor.pin_memory:
            return _STREAM.pin(args[0].clone())
        if kwargs.get("pin_memory"):
            return _STREAM.pin(function(*args, **{**kwargs, "pin_memory": False}))
        name = getattr(function, "__name__", "")
        if torch.is_autocast_enabled("cuda") and (
            name in LOWER or name in WIDER or name in WIDEST or name == "binary_cross_entropy"
        ):
            args, kwargs = _cast(name, args, kwargs)
        if function is torch.nn.functional.scaled_dot_product_attention and isinstance(args[0], There):
            query, mask = args[0], kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            if mask is not None and mask.dtype not in (torch.bool, query.dtype):
                raise RuntimeError(
                    f"Expected attn_mask dtype to be bool or to match query dtype, but got {mask.dtype} and"
                    f" {query.dtype}"
                )
        return function(*args, **kwargs)


@contextmanager
def _within(context):
    with context, Makers():
        yield


def _cast(name, args, kwargs):
    """The arguments as CUDA's autocast gives them on."""
    floats = [
        one
        for one in _leaves((args, kwargs))
        if isinstance(one, There) and one.is_floating_point() and one.dtype != torch.float64
    ]
    if not floats:
        return args, kwargs
    if name == "binary_cross_entropy":
        raise RuntimeError("torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.")
    if name in WIDER and kwargs.get("dtype") is not None:
        return args, kwargs
    to = torch.get_autocast_dtype("cuda") if name in LOWER else torch.float32
    if name in WIDEST:
        to = functools.reduce(torch.promote_types, (one.dtype for one in floats))
    ids = {id(one) for one in floats if one.dtype != to}
    return _mapped(lambda one: one.to(to) if id(one) in ids else one, (args, kwargs))


MEMORY = 80 * 2**30


def _index(device=None) -> int:
    """The number of a device as torch.cuda's functions read it."""
    found = torch.device(device) if isinstance(device, str) else device
    number = found if isinstance(found, int) else None if found is None else found.index
    if not isinstance(found, int) and found is not None and found.type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {device}")
    if number not in (None, 0):
        raise RuntimeError("CUDA error: invalid device ordinal")
    return 0


def _set_device(device) -> None:
    if torch.device(device).index is None if not isinstance(device, int) else False:
        raise ValueError(f"Expected a torch.device with a specified index or an integer, but got: {device}")
    _index(device)


def _waited(device=None) -> None:
    _index(device)
    if _STREAM.graph is not None:  # of whatever thread: the device is waited for, and a part of it is capturing
        _STREAM.spoiled = "the device was waited for"
        raise RuntimeError("operation not permitted when stream is capturing: synchronize")
    _STREAM.wait()


def _pretend(monkeypatch) -> None:
    """What torch.cuda answers where there is a device."""
    memory = lambda device=None: _index(device) or 2**28
    answers = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _set_device,
        "device": lambda device: nullcontext(_index(device)),
        "synchronize": _waited,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "memory_allocated": memory,
        "max_memory_allocated": memory,
        "memory_reserved": memory,
        "max_memory_reserved": memory,
        "reset_peak_memory_stats": lambda device=None: None,
        "mem_get_info": lambda device=None: _index(device) or (MEMORY - 2**30, MEMORY),
        "get_device_name": lambda device=None: "second device",
        "_initialized": True,
        "get_device_properties": lambda device=None: SimpleNamespace(
            name="second device", total_memory=MEMORY, major=9, minor=0, multi_processor_count=132
        ),
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
        "is_current_stream_capturing": lambda: _STREAM.graph is not None,
        "CUDAGraph": CUDAGraph,
        "Event": Event,
        "graph": graph,
        "graph_pool_handle": Pool,
        "_is_in_bad_fork": lambda: False,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)


@contextmanager
def _modes(monkeypatch):
    """What a stage on CUDA switches in its process is switched back afterwards."""
    from stages.running import cuda
    from transformers import AttentionInterface

    for name in ("_shared", "_given_up"):
        monkeypatch.setattr(cuda, name, False)
    before = (
        dict(AttentionInterface._global_mapping),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    try:
        yield
    finally:
        AttentionInterface._global_mapping.clear()
        AttentionInterface._global_mapping.update(before[0])
        torch.backends.cuda.enable_cudnn_sdp(before[1])
        torch.use_deterministic_algorithms(before[2], warn_only=before[3])


@contextmanager
def second_device(monkeypatch):
    """Within it the second device is there, in threads that are started within it too. Where there is a GPU, it is
    that: the same tests show then what only kernels can."""
    if REAL:
        with _modes(monkeypatch):
            yield
        return
    from stages.models import fused

    global _STREAM
    started = threading.Thread.run

    def run(thread):
        with Makers(), Places():
            started(thread)

    _pretend(monkeypatch)
    monkeypatch.setattr(
        sys.modules[torch.optim.Adam.__module__], "_device_dtype_check_for_fused", lambda *given, **options: None
    )
    monkeypatch.setattr(threading.Thread, "run", run)
    again = recomputed._recomputation_hook
    # autograd calls what is recomputed for backward without the mode
    monkeypatch.setattr(recomputed, "_recomputation_hook", lambda *given: _within(again(*given)))
    # its tensors take no out=
    monkeypatch.setattr(
        torch.inference_mode,
        "__enter__",
        lambda mode: setattr(mode, "graph", torch.no_grad()) or mode.graph.__enter__(),
    )
    monkeypatch.setattr(torch.inference_mode, "__exit__", lambda mode, *error: mode.graph.__exit__(*error))
    monkeypatch.setattr(fused, "triton", None)
    _STREAM = Stream()
    with _modes(monkeypatch), Makers(), Places():
        yield
