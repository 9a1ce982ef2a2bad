"""The processes that train one model together: who this one is, and exact sums over all of them.

A stage that runs on several devices is started once per device (`stages/running/launch.py`). Every rank reads the same
rows and plans the same micro-batches; each computes its share, and gradients, losses and metrics are summed over ranks
before anything is divided (`stages.training`). So the number of ranks changes a result only by the rounding of one sum.
With one process all of this is free.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

#: Elements summed in one message.
BUCKET_ELEMENTS = 1 << 24


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def connect(device: str = "cpu") -> int:
    """Join the process group named by the environment, which is torchrun's (gloo on the CPU, NCCL on CUDA); returns the
    number of ranks.
    """
    size = world_size()
    if size > 1 and not dist.is_initialized():
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        # One rank may compute a reference cache or write a report while the others wait.
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", timeout=timedelta(hours=4))
    return size


def shares(groups: Sequence[Sequence], cost: Callable[[Sequence], int]) -> list[list[Sequence]]:
    """The micro-batches of every rank: the dearest first, each to the rank with the least work so far. One rank keeps
    their order.
    """
    if world_size() == 1:
        return [list(groups)]
    load, found = [0] * world_size(), [[] for _ in range(world_size())]
    for group in sorted(groups, key=cost, reverse=True):
        owner = load.index(min(load))
        load[owner] += cost(group)
        found[owner].append(group)
    return found


def sum_numbers(values: dict[str, float]) -> dict[str, float]:
    """Sum per name over ranks, in rank order, of names that end with ``_max`` the maximum; a name missing on a rank
    counts as 0.
    """
    if world_size() == 1:
        return values
    everyone: list[dict[str, float]] = [{}] * world_size()
    dist.all_gather_object(everyone, values)
    names = dict.fromkeys(name for one in everyone for name in one)
    return {name: (max if name.endswith("_max") else sum)(one.get(name, 0.0) for one in everyone) for name in names}


def sum_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Sum the gradients over ranks, in place; a parameter without a gradient on every rank keeps none."""
    if world_size() == 1:
        return
    parameters = list(parameters)
    device = parameters[0].device
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=device)
    dist.all_reduce(present)
    bucket: list[torch.nn.Parameter] = []
    for p, any_rank in zip(parameters, present.tolist()):
        if not any_rank:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if bucket and (
            p.grad.dtype != bucket[0].grad.dtype or sum(b.numel() for b in bucket) + p.numel() > BUCKET_ELEMENTS
        ):
            _sum_bucket(bucket)
            bucket = []
        bucket.append(p)
    if bucket:
        _sum_bucket(bucket)


def _sum_bucket(bucket) -> None:
    flat = sum_tensor(torch.cat([p.grad.reshape(-1) for p in bucket]))
    for p, part in zip(bucket, flat.split([p.numel() for p in bucket])):
        p.grad.copy_(part.view_as(p))


def sum_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over ranks, in place; the same bytes on every rank. Returns it."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def gather(value):
    """Every rank's value, in rank order."""
    if world_size() == 1:
        return [value]
    everyone = [None] * world_size()
    dist.all_gather_object(everyone, value, group=_thread.group)
    return everyone


def barrier() -> None:
    if world_size() > 1 and dist.is_initialized():
        dist.barrier(group=_thread.group)


class _Thread(threading.local):
    group = None  # of this thread's messages; None = the group of all ranks


_thread = _Thread()


def beside():
    """A group of all ranks for the messages of one more thread (:func:`speak_in`), which would meet those of this one
    out of order; every rank must ask. None where there is one rank."""
    return dist.new_group(backend="gloo", timeout=timedelta(hours=4)) if world_size() > 1 else None


def speak_in(group) -> None:
    """What :func:`gather` and :func:`barrier` use in this thread from now on."""
    _thread.group = group


@contextlib.contextmanager
def first_rank_only():
    """``with first_rank_only() as here: if here: ...``: rank 0 works, the others wait for the end of the block."""
    try:
        yield rank() == 0
    finally:
        barrier()
