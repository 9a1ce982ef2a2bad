"""Counter-based randomness: every random number is a function of (seed, stage, purpose, counters).

Nothing depends on a global generator, on the order of calls or on how often a process was restarted.
"""

from __future__ import annotations

from typing import Any

from storage.files import canonical_json, sha256_text


def seed_for(seed: int, stage: str, purpose: str, *counters: Any) -> int:
    """A 63-bit non-negative integer for this use of randomness. Counters are integers or strings (row ids)."""
    return int(_digest(seed, stage, purpose, counters)[:16], 16) >> 1


def rng(seed: int, stage: str, purpose: str, *counters: Any):
    """A fresh ``numpy.random.Generator`` (Philox, 128-bit key) for this use of randomness."""
    import numpy as np

    return np.random.Generator(np.random.Philox(key=int(_digest(seed, stage, purpose, counters)[:32], 16)))


def _digest(seed: int, stage: str, purpose: str, counters: tuple) -> str:
    plain = [c if isinstance(c, str) else int(c) for c in counters]
    return sha256_text(canonical_json([int(seed), stage, purpose, plain]))
