"""What a stage that trains on rows warns of while it runs, at every validation pass: as the alarms of RL do
(:mod:`stages.policy.alarms`), each once and with what to do.

An alarm is a function of the metric rows so far, so that a resumed run says the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

#: Passes in a row at which the validation loss has to rise (ours; section H has three for displacement).
RISES = 3

RISING = (
    "validation_loss_rises",
    f"The validation loss rose at each of {RISES} passes in a row while the training loss fell: the model learns the"
    " training rows by heart. Train fewer steps, lower learning_rate, or add rows; select_by=loss publishes the best pass,"
    f" and early_stopping_patience={RISES} ends a run there.",
)


def rises(rows: Sequence[dict]) -> bool:
    """Whether ``validation/loss`` rose at each of the last ``RISES`` passes while the mean training loss of the steps
    between two passes fell from the first of them to the last.
    """
    losses, between = [], [[]]
    for row in rows:
        if _finite(row.get("loss")):
            between[-1].append(row["loss"])
        if _finite(row.get("validation/loss")):
            losses.append(row["validation/loss"])
            between.append([])
    last = losses[-RISES - 1 :]
    # those that the last passes end; a pass in the midst of training comes before the loss of its step
    stretches = [part for part in between[-RISES - 1 : -1] if part]
    if len(last) <= RISES or not all(a < b for a, b in zip(last, last[1:])) or len(stretches) < 2:
        return False
    first, now = (math.fsum(part) / len(part) for part in (stretches[0], stretches[-1]))
    return now < first


def _finite(value) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)  # others are texts: "nan"


def telling(
    stage,
    evaluate: Callable[[], dict[str, float]],
    more: Callable[[list[dict]], Iterable[tuple[str, str]]] | None = None,
) -> Callable[[], dict[str, float]]:
    """``evaluate``, behind each of whose passes the stage warns of what shows in the metric rows so far, the pass as the
    last one: :data:`RISING`, where no ``select_by`` chooses the pass that is published, and ``more`` (rows -> codes and
    texts). One rank warns.
    """
    from stages.reporting.curves import MetricLog

    log = MetricLog(stage)

    def told() -> dict[str, float]:
        found = evaluate()
        if stage.rank == 0:
            rows = [*log.rows(), {f"validation/{name}": value for name, value in found.items()}]
            alarms = [RISING] if not stage.config.select_by and rises(rows) else []
            for code, text in [*alarms, *(more(rows) if more is not None else ())]:
                stage.warn(code, text)
        return found

    return told
