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

    error = record.exc_info[1] if record.exc_info else None
    if error is None or not (told_before := expected(error)) and not isinstance(error, ParameterTypeError):
        return True
    if record.msg == ENGINE and told_before:
        return False
    record.msg, record.args = message_of(error), ()
    record.exc_info = record.exc_text = None
    return True


def expected(error: BaseException) -> bool:
    """Whether an error has a message for the user, as the command line prints it."""
    from flows.commands.app import classify
    from storage.files import refusal

    return classify(error) is not None or refusal(error) is not None


def message_of(error: BaseException) -> str:
    """What the command line prints of an error: of one of the file system, wherever it comes from, what to do."""
    from flows.commands.app import classify
    from storage.files import refusal

    told = refusal(error) if classify(error) is None else None
    return told or str(error) or type(error).__name__


def install() -> None:
    """Filter the logs of the runs of this process; again changes nothing."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(without_traceback)
