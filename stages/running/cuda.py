"""What has to be said to torch and transformers on CUDA and nowhere else: repeatable sums, attention kernels, and a GPU
that it cannot use.

Determinism. A stage that was killed must end with the bytes of an undisturbed one, so sums may not depend on the order
in which threads arrive. ``torch.use_deterministic_algorithms(True, warn_only=True)`` gives that for everything but
attention: backward of flash and of memory-efficient attention takes its deterministic way only in the strict mode, with
``warn_only=False`` (aten, ``attention_backward.cu``). The strict mode in turn refuses operations that have no
deterministic form, the cumulative sums of sampling among them, so it is on around backward alone (:func:`strictly`).
Sampling needs neither, its writes go to places of their own, and would pay for a sort at every write into the KV cache:
it is taken out (:func:`freely`).

All of these are switches of the process. Where a thread samples while another one trains (``async_rollouts``),
:func:`share` leaves the weaker mode on for both. On the CPU nothing here does anything: the mode that the trainer sets
is the one for all.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import torch

_shared = _given_up = False
_CAPTURES = threading.RLock()


def is_cuda(device: str | torch.device) -> bool:
    return torch.device(device).type == "cuda"


def settle(device: str | torch.device) -> None:
    """Once in a process that computes on CUDA. The device is the current one from now on: on the current one's stream
    graphs are captured, and of its memory torch.cuda tells. No cuDNN attention: it builds a plan for every exact shape
    (up to some tenths of a second), micro-batches have new shapes all the time, and its backward is not deterministic.
    And :func:`attend` in the place of transformers' SDPA."""
    from transformers import AttentionInterface

    if (device := torch.device(device)).index is not None:
        torch.cuda.set_device(device)
    torch.backends.cuda.enable_cudnn_sdp(False)
    AttentionInterface.register("sdpa", attend)


def attend(module, query, key, value, attention_mask, **options):
    """transformers' SDPA for a model's own forward, with keys and values repeated for grouped heads in float32. Without
    a mask transformers leaves the repeating to torch, whose memory-efficient kernel, the only fused one for float32,
    cannot: what is left is the product of all queries and keys at once.

    query ``[B, H, T, D]``, key and value ``[B, K, T, D]``; returns (``[B, T, H, D]``, None).
    """
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    groups = getattr(module, "num_key_value_groups", 1)
    if (
        groups > 1
        and attention_mask is None
        and query.dtype == torch.float32
        and not torch.is_autocast_enabled(query.device.type)
        and options.get("cache") is None
    ):
        key = repeat_kv(key, groups)
        value = repeat_kv(value, groups)
        module = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def share() -> None:
    """From now on another thread computes beside this one: what is switched for the one would be switched for the
    other.
    """
    global _shared
    _shared = True


@contextlib.contextmanager
def strictly(device: str | torch.device) -> Iterator[None]:
    """Around backward: every sum is deterministic, that of attention, too.

    Raises:
        RuntimeError: by torch, where an operation has no deterministic form (see :func:`give_up`).
    """
    with _mode(True, False) if is_cuda(device) and not _shared and not _given_up else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def freely(device: str | torch.device) -> Iterator[None]:
    """Around sampling: the fastest algorithms."""
    with _mode(False, False) if is_cuda(device) and not _shared else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _mode(on: bool, warn_only: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(on, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Around the capture of a CUDA graph. Three things would end it with an error: another capture (torch knows one at
    a time), a thread that waits for the whole device (:func:`finish`), and the garbage collector, where it destroys a
    graph that nobody has any more."""
    with _CAPTURES:
        collected = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collected:
                gc.enable()


def give_up(error: RuntimeError) -> bool:
    """Whether this is torch's refusal of an operation that has no deterministic form (in a model's own forward): then
    :func:`strictly` does nothing any more, and what was refused can be done again."""
    global _given_up
    if _given_up or "deterministic" not in str(error):
        return False
    _given_up = True
    warnings.warn(
        "backward of this model is not deterministic on CUDA, so a run that was killed ends with other last bits than"
        f" an undisturbed one: {error}",
        stacklevel=2,
    )
    return True


#: What torch, cuBLAS and the CPU's allocator say where memory does not suffice, other than by an exception's type.
MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")


def out_of_memory(error: BaseException) -> bool:
    """Whether memory, the GPU's or the machine's, did not suffice."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(said in str(error).lower() for said in MEMORY)
    )


def release(device: str | torch.device) -> None:
    """Give back what a computation that :func:`out_of_memory` ended has left behind; call it outside of the handler,
    whose exception holds the tensors of every frame."""
    with _CAPTURES:
        gc.collect()
        if is_cuda(device):
            torch.cuda.empty_cache()


def numbers(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Tensors of one number each as Python's, exactly; those of a GPU in one transfer, since each would wait for
    everything that was started there.
    """
    away = [k for k, one in enumerate(tensors) if one.device.type != "cpu"]
    together = torch.stack([tensors[k].detach().double().reshape(()) for k in away]).tolist() if away else []
    read = dict(zip(away, together))
    return [read[k] if k in read else float(one.detach()) for k, one in enumerate(tensors)]


def knows_bfloat16(device: str | torch.device) -> bool:
    """Whether this is a GPU that multiplies bfloat16 in hardware (Ampere and later)."""
    return is_cuda(device) and torch.cuda.is_bf16_supported(including_emulation=False)


def finish(device: str | torch.device) -> None:
    """Wait for what was started on this device: only then does a clock show what it took."""
    if is_cuda(device):
        with _CAPTURES:
            torch.cuda.synchronize(torch.device(device))


def unusable(cards: str) -> str:
    """Why torch finds no GPU where ``cards`` (their ids) are, and what to do."""
    built = (
        f"it is built for CUDA {torch.version.cuda}, which the GPU's driver is probably too old for"
        if torch.version.cuda
        else "it is built for the CPU only"
    )
    way = (
        "update the driver, or install a torch built for an older CUDA"
        if torch.version.cuda
        else "install a torch built for CUDA"
    )
    return (
        f"there are GPUs ({cards}), and the installed torch {torch.__version__} cannot use them: {built}. Compare with"
        f" what nvidia-smi says; {way}."
    )
