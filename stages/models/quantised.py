"""Frozen matrices in 4 bits, NF4 as QLoRA has it (Dettmers et al. 2023, section 3; catalogue ``peft.lora``).

Blocks of 64 values, each stored as its block's greatest absolute value times one of 16 levels, the quantiles of a
normal distribution. ``nf4`` keeps that greatest value in float32 (4.5 bits per weight), ``nf4_double`` in 8 bits, 256
of them under a float32 scale and a common offset (4.13 bits). bitsandbytes quantises and dequantises (the extra
``qlora``). To everything else such a weight is a float32 tensor: whoever reads it gets the dequantised values, which it
keeps as long as it needs them, and never the rounded ones of before.
"""

from __future__ import annotations

import functools
import logging

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from stages.models.memory import NF4_BLOCK, NF4_DOUBLE_BLOCK

FORMS = ("nf4", "nf4_double")
#: Values that are quantised at a time, of which the library makes several copies; whole blocks.
AT_ONCE = 1 << 18


class QuantisationError(ValueError):
    """A weight cannot be kept in 4 bits; the message says what to write instead."""


@functools.cache
def bitsandbytes(setting: str = "frozen_dtype=nf4", instead: str = "frozen_dtype=bfloat16"):
    """bitsandbytes' functional interface, for what ``setting`` asks.

    Raises:
        QuantisationError: it is not installed.
    """
    log = logging.getLogger("bitsandbytes")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of a kernel for products, which are not its here
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise QuantisationError(
            f"{setting} needs bitsandbytes ({error}); run pip install 'posttrain[qlora]', or write {instead}"
        ) from error
    finally:
        log.setLevel(level)
    return functional


class NF4(torch.Tensor):
    """A matrix [out, in] in NF4: a float32 tensor to whoever computes with it, which never changes; copies share what
    is stored. ``rows``: those of a larger one.
    """

    def __new__(cls, parts: dict[str, torch.Tensor], size: torch.Size, rows: slice | None = None):
        shape = size if rows is None else (rows.stop - rows.start, *size[1:])
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=parts["packed"].device)

    def __init__(self, parts, size, rows=None):
        self.parts, self.size_of_all, self.rows = parts, torch.Size(size), rows

    def dense(self) -> torch.Tensor:
        """The dequantised values, float32, in memory of their own."""
        library = bitsandbytes()
        state = {
            "shape": _stored_shape(self.size_of_all),
            "dtype": torch.float32,
            "blocksize": NF4_BLOCK,
            "quant_type": "nf4",
            "code": _levels(self.device),
        }
        if "offset" in self.parts:
            inner = library.QuantState(
                absmax=self.parts["scale_of_scales"],
                blocksize=NF4_DOUBLE_BLOCK,
                code=_dynamic(self.device),
                dtype=torch.float32,
            )
            state |= {"offset": self.parts["offset"], "state2": inner}
        with torch.no_grad():
            flat = library.dequantize_4bit(
                self.parts["packed"], library.QuantState(absmax=self.parts["scales"], **state)
            ).reshape(-1)
            whole = flat[: self.size_of_all.numel()].view(self.size_of_all)
        return whole if self.rows is None else whole[self.rows]

    @torch.inference_mode(False)  # a view of a tensor that is none of inference mode's is none either
    def _with(self, parts=None, rows=None) -> NF4:
        return NF4(self.parts if parts is None else parts, self.size_of_all, self.rows if rows is None else rows)

    def _rows(self, sizes) -> list[NF4]:
        at, found = 0 if self.rows is None else self.rows.start, []
        for size in sizes:
            found.append(self._with(rows=slice(at, at + size)))
            at += size
        return found

    def __deepcopy__(self, memo):
        memo[id(self)] = copy = as_parameter(self._with())
        return copy

    def __repr__(self, **_):
        return f"NF4({tuple(self.shape)}, {nbytes(self)} bytes on {self.device})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs, aten = kwargs or {}, torch.ops.aten
        first = args[0] if args else None
        if function in (aten.detach.default, aten.alias.default, aten.clone.default):
            return first._with()
        if function is aten._to_copy.default and kwargs.get("dtype") in (None, torch.float32):
            return first._with(
                {name: part.to(kwargs.get("device") or part.device) for name, part in first.parts.items()}
            )
        if (
            function in (aten.split.Tensor, aten.split_with_sizes.default)
            and (args[2:] or (kwargs.get("dim", 0),))[0] == 0
        ):
            rows = first.shape[0]
            return first._rows(
                args[1] if not isinstance(args[1], int) else [min(args[1], rows - at) for at in range(0, rows, args[1])]
            )
        if function._schema.is_mutable and any(
            isinstance(value, NF4) and argument.alias_info is not None and argument.alias_info.is_write
            for argument, value in zip(function._schema.arguments, args)
        ):
            raise QuantisationError(
                "a weight that is kept in 4 bits cannot be written to; write frozen_dtype=auto where it has to change"
            )
        return function(*tree_map(dense, args), **tree_map(dense, kwargs))

    __torch_function__ = torch._C._disabled_torch_function_impl


def is_quantised(tensor) -> bool:
    return isinstance(tensor, NF4)


def dense(tensor):
    """The dequantised values of a weight in 4 bits; anything else as it is."""
    return tensor.dense() if isinstance(tensor, NF4) else tensor


def nbytes(tensor: NF4) -> int:
    """Bytes that are stored of a weight in 4 bits."""
    return sum(part.nbytes for part in tensor.parts.values())


def as_parameter(tensor: NF4) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


@torch.no_grad()
def quantise(weight: torch.Tensor, form: str) -> torch.nn.Parameter:
    """A matrix in NF4 (``form``: of :data:`FORMS`), on its device.

    Raises:
        QuantisationError: bitsandbytes is not installed, or the matrix holds NaN or infinity, of which a block of 64
            would be left with nothing.
    """
    library = bitsandbytes()
    flat = weight.detach().reshape(-1)
    if not bool(torch.isfinite(flat).all()):
        raise QuantisationError(
            "a weight holds NaN or infinity, so the model can neither answer nor be trained; copy or download it again,"
            " or take an earlier checkpoint"
        )
    done = [
        library.quantize_4bit(F.pad(part.float(), (0, len(part) % 2)), blocksize=NF4_BLOCK, quant_type="nf4")
        for part in flat.split(AT_ONCE)
    ]
    parts = {
        "packed": torch.cat([packed for packed, _ in done]),
        "scales": torch.cat([state.absmax for _, state in done]),
    }
    if form == "nf4_double":
        parts["offset"] = parts["scales"].mean()
        parts["scales"], state = library.quantize_blockwise(
            parts["scales"] - parts["offset"], blocksize=NF4_DOUBLE_BLOCK
        )
        parts["scale_of_scales"] = state.absmax
    return as_parameter(NF4(parts, weight.shape))


def _stored_shape(size: torch.Size) -> torch.Size:
    """The form a matrix is stored in: its own, or one row where its rows have an odd length."""
    return torch.Size(size) if size[-1] % 2 == 0 else torch.Size((size.numel() + size.numel() % 2,))


@functools.cache
def _levels(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return bitsandbytes().get_4bit_type("nf4", device=device)


@functools.cache
def _dynamic(device: torch.device) -> torch.Tensor:
    """The 256 levels of a block's greatest value under double quantisation."""
    with torch.inference_mode(False):
        return bitsandbytes().create_dynamic_map().to(device)


# -- products with frozen weights --------------------------------------------------------------------------------------


def product(x, weight, bias, turned: bool = False):
    """x W^T + b (``turned``: x W + b) in x's type, or autocast's, for a frozen weight that lies in another one."""
    if isinstance(weight, NF4):
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return Widened.apply(x, weight, None if bias is None else bias.to(x.dtype), turned)
    if weight.dtype == x.dtype or torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight.t() if turned else weight, bias)
    if torch.compiler.is_compiling():  # which makes cheap things again in backward by itself
        return F.linear(x, _wide(weight, x, turned), bias)
    return Widened.apply(x, weight, bias, turned)


class Widened(torch.autograd.Function):
    """A product with a frozen weight in another type than x's: the widened weight lives as long as the product, and
    nothing but the weight as it lies is kept for backward.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, turned):
        ctx.save_for_backward(weight)
        ctx.save_for_forward(weight)
        ctx.turned = turned
        return F.linear(x, _wide(weight, x, turned), bias)

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return grad @ _wide(weight, grad, ctx.turned), None, None, None

    @staticmethod
    def jvp(ctx, moved, *_):
        (weight,) = ctx.saved_tensors
        return F.linear(moved, _wide(weight, moved, ctx.turned))


def _wide(weight, like, turned: bool) -> torch.Tensor:
    weight = dense(weight).to(like.dtype)
    return weight.t() if turned else weight
