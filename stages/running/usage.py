"""What a stage process has used so far: generated tokens, questions to judges. Kept in its record, and priced by
``storage/costs.py``.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Sequence

_used: Counter = Counter()
_lock = threading.Lock()


def count(**more: float) -> None:
    """Add to the counts: ``completions``, ``generated_tokens``, ``judge_calls`` (to servers; ``judge_tokens_in`` and
    ``judge_tokens_out`` as they say), ``local_judge_calls``.
    """
    with _lock:
        _used.update({name: n for name, n in more.items() if n})


def so_far() -> dict[str, float]:
    with _lock:
        return dict(sorted(_used.items()))


def total(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The sums of several counts, of ranks or blocks."""
    return {
        name: sum(part.get(name, 0) for part in parts) for name in sorted({name for part in parts for name in part})
    }


def begin(known: dict[str, float] | None = None) -> None:
    """Start a stage at these counts, those of the checkpoint that it continues from."""
    with _lock:
        _used.clear()
        _used.update(known or {})


def generated(generate):
    """Decorates an engine's ``generate``: its completions and their tokens are counted."""

    @functools.wraps(generate)
    def counted(*args, **more):
        found = generate(*args, **more)
        count(completions=sum(map(len, found)), generated_tokens=sum(len(c.ids) for group in found for c in group))
        return found

    return counted
