"""What the C library does with freed memory, for stage processes that train or sample. glibc only; elsewhere nothing
happens.

A step frees tensors of tens of MiB and asks for the like again. By default glibc hands blocks that large back to the
system, and every page of the next one is a page fault and a zeroed page.
"""

from __future__ import annotations

import contextlib
import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt's names, malloc.h


def keep_freed_memory() -> None:
    """Keep what is freed for what is asked for next: up to 2 GiB of it, in blocks of up to 1 GiB."""
    _set(_MMAP_THRESHOLD, 1 << 30)
    _set(_TRIM_THRESHOLD, (1 << 31) - 1)


def return_freed_memory() -> None:
    """Give every block of a MiB and more a mapping of its own from now on: for what comes and goes between blocks that
    stay (layers that are gathered between shards), among which kept memory would grow to the sum of all of it."""
    _set(_MMAP_THRESHOLD, 1 << 20)
    _set(_TRIM_THRESHOLD, 1 << 17)


def _set(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(option, value)
