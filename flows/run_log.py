"""What the log of a run says of an error whose message is for the user: the message, once per task and once for the run.

Prefect logs a traceback of its engine wherever a task or a flow ends with an exception, three times over a hundred
lines for a setting that a stage refuses. A defect keeps them.
"""

from __future__ import annotations

import logging

LOGGERS = ("prefect.flow_runs", "prefect.task_runs")
#: Logged after the flow's own line; only where the parameters are wrong it is the one that reaches the run's log.
ENGINE = "Engine execution exited with unexpected exception"


def without_traceback(record: logging.LogRecord) -> bool:
    """A filter of Prefect's loggers: of an expected error the record says its message and nothing more; False for one
    that says nothing new."""
    from prefect.exceptions import ParameterTypeError

    from flows.commands.app import told

    error = record.exc_info[1] if record.exc_info else None
    if error is None or (expected := told(error)) is None and not isinstance(error, ParameterTypeError):
        return True
    if record.msg == ENGINE and expected:
        return False
    record.msg, record.args = expected[1] if expected else str(error), ()
    record.exc_info = record.exc_text = None
    return True


def install() -> None:
    """Filter the logs of the runs of this process; again changes nothing."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(without_traceback)
