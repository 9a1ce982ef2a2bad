"""Float32 matrix products on the CPU by the faster of the two libraries that torch carries.

torch multiplies with MKL, which has its good code for few rows, and for widths that are no multiple of 16, on Intel's
processors alone. oneDNN, which torch has for convolutions and compiled models, has the same code for all: on an AMD
EPYC (Zen 4, two cores) a product of 32 rows with 512 x 2560 weights takes 465 microseconds in the place of 872, one of
8 rows 228 in the place of 567, the logits of 512 rows over 6,375 tokens run at 198 GFLOP/s in the place of 114; large
even products gain 7 to 12%, less than a copy of the result costs. On Intel's oneDNN was not faster.

Which library it is depends on the processor and nothing else, so equal machines compute equal bits.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch


def vendor() -> str:
    """The processor's vendor as it names itself, such as "AuthenticAMD" or "GenuineIntel"; "" where it does not say."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("vendor_id"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return next((name for name in ("AuthenticAMD", "GenuineIntel") if name in platform.processor()), "")


@functools.cache
@torch.inference_mode()
def prefers_onednn() -> bool:
    """Whether products go through oneDNN here: an AMD processor, and a torch whose oneDNN operators are those that this
    module calls.
    """
    if vendor() not in ("AuthenticAMD", "HygonGenuine") or not torch.backends.mkldnn.is_available():
        return False
    x, weight, bias, other = (
        torch.sin(torch.arange(1.0, 1 + n)).view(shape)
        for n, shape in ((12, (2, 6)), (30, (5, 6)), (5, (5,)), (10, (2, 5)))
    )
    try:
        found = (Packed(weight)(x), Packed(weight, bias)(x, other), onednn_linear(x, weight))
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):  # another torch
        return False
    plain = x @ weight.t()
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, (plain, plain + bias + other, plain)))


class Packed:
    """A weight [out, in] laid out as oneDNN reads it: x [n, in] -> x W^T + b [n, out], plus ``add`` [n, out] in the
    same pass. float32, no gradient.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        self.bias = bias

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        if add is None:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, add, self.weight, self.bias, "add")


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [n, in] times a weight [out, in] as it lies, plus a bias [out]: [n, out]. float32 on the CPU; no gradient."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``torch.nn.functional.linear``, where no gradient is recorded by the faster library."""
    plain = (
        type(x) is torch.Tensor
        and type(weight) in (torch.Tensor, torch.nn.Parameter)
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
    )
    if plain and not torch.is_grad_enabled() and prefers_onednn():
        return onednn_linear(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias)
