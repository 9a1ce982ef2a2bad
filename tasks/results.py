"""The small JSON form of a stage result."""

from __future__ import annotations

from typing import Any

from tasks.run import StageResult


def small(result: StageResult) -> dict[str, Any]:
    """The small JSON of a stage result that crosses task boundaries and the command line; `metrics` include the
    measured `tokens_per_second` (None where nothing is counted in tokens), `seconds` and `peak_memory_mib`."""
    value = {key: item for key, item in result.to_dict().items() if key not in ("reports", "versions", "perf")}
    return {**value, "metrics": {"tokens_per_second": None, **result.metrics, **result.perf}}
