"""Tensors in files of a checkpoint, in host memory one at a time (safetensors format).

Each rank writes a file of its own: whole tensors on the first one only, of sharded tensors the rows it holds, with
where they belong in the header. :class:`TensorFiles` puts them together again for any other number of ranks: each reads
just the rows it needs.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path

import torch

from stages.models import sharding
from stages.running import ranks
from storage.checkpoints import Sha256

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def writer_of(tensors: Mapping[str, torch.Tensor]) -> Callable[[Path], Sha256]:
    """A function that writes this rank's part of the tensors to a path and returns the file's sha256; they must not
    change before it is called.
    """

    @torch.no_grad()
    def write(path: Path) -> Sha256:
        parts, rows = {}, {}
        for name, tensor in tensors.items():
            place = sharding.rows_of(tensor)
            if place is None and ranks.rank() != 0:
                continue  # the same on every rank
            parts[name] = sharding.local(tensor.detach())
            if place is not None:
                rows[name] = place
        return _write(path, parts, {"rows": json.dumps(rows)})

    return write


def header(tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> tuple[bytes, dict[str, int], int]:
    """The start of a safetensors file, where in the file each tensor's values begin, in the mapping's order, and the
    file's length.
    """
    entries, at = {"__metadata__": metadata}, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8)
    start = struct.pack("<Q", len(head)) + head
    return start, {name: len(start) + entries[name]["data_offsets"][0] for name in tensors}, len(start) + at


def raw(tensor: torch.Tensor) -> memoryview:
    """A tensor's values as a safetensors file holds them."""
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def _write(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> Sha256:
    digest = hashlib.sha256()
    with open(path, "wb") as handle:
        for part in chain([header(tensors, metadata)[0]], map(raw, tensors.values())):
            handle.write(part)
            digest.update(part)
    return Sha256(digest.hexdigest())


class TensorFiles:
    """What the files of any number of ranks hold together."""

    def __init__(self, paths: Iterable[Path]):
        from safetensors import safe_open

        self._parts: dict[str, list] = {}  # name -> [(file, first row, end row)], or one (file, None, None)
        for path in paths:
            file = safe_open(str(path), "pt")
            rows = json.loads((file.metadata() or {}).get("rows", "{}"))
            for name in file.keys():
                self._parts.setdefault(name, []).append((file, *rows.get(name, (None, None))))

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def whole(self, name: str) -> torch.Tensor:
        """A tensor that was not sharded."""
        return self._parts[name][0][0].get_tensor(name)

    @torch.no_grad()
    def into(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a stored tensor into one of the same whole shape, or into the rows that this rank holds of it; returns
        it.
        """
        here, place = sharding.local(tensor), sharding.rows_of(tensor)
        first, end = place or (0, tensor.shape[0] if tensor.ndim else 0)
        for file, start, stop in self._parts[name]:
            if start is None:
                here.copy_(file.get_slice(name)[first:end] if place else file.get_tensor(name))
            elif max(first, start) < min(end, stop):
                low, high = max(first, start), min(end, stop)
                here[low - first : high - first].copy_(file.get_slice(name)[low - start : high - start])
        return tensor
