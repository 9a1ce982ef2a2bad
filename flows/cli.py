"""The command line. Every command imports what it needs itself, so that `--help` stays instant."""

from __future__ import annotations

import sys

from flows.commands.app import EXIT_CODES, app, emit, fail, flowing, terminate, told
from flows.commands.pipelines import answer, rerun, run, sweep
from flows.commands.results import alias, chat, compare, cost, export, lineage, ls, promote, rm, select, show
from flows.commands.servers import deploy, doctor, down, status, up
from flows.commands.stage import stage

#: The commands by the panels of the help.
COMMANDS = {
    "Pipelines": (run, sweep, rerun, answer, stage),
    "Servers": (up, down, status, deploy, doctor),
    "Results": (ls, show, rm, cost, lineage, compare, promote, alias, select, export, chat),
}
#: What goes on where it was stopped when the same command is given again.
GOES_ON = (run, sweep, rerun, stage, promote, select)

for panel, commands in COMMANDS.items():
    for command in commands:
        app.command(help=flowing(command.__doc__), rich_help_panel=panel, epilog=EXIT_CODES)(command)


def main() -> None:
    """Entry point: runs the command and turns errors into messages and exit codes."""
    import shlex
    import signal

    from tasks.stopping import wake_main_thread

    signal.signal(signal.SIGTERM, terminate)
    wake_main_thread()
    try:
        app()
    except BaseException as error:
        # typer keeps the interrupt to itself and exits
        if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code == 130):
            goes_on = any(sys.argv[1:2] == [command.__name__] for command in GOES_ON)
            again = f"; this goes on where it stopped: {shlex.join(['posttrain', *sys.argv[1:]])}"
            fail("interrupted" + again * goes_on, 130)
        if isinstance(error, SystemExit):
            if isinstance(error.__context__, BrokenPipeError):  # who read this has gone (`posttrain ls runs | head`)
                sys.exit(128 + signal.SIGPIPE)
            if "--json" in sys.argv and hasattr(
                error.__context__, "format_message"
            ):  # an option or command that is none
                emit({"status": "failed", "exit_code": error.code, "error": error.__context__.format_message()})
            raise
        if (expected := told(error)) is None:
            raise
        code, text = expected
        fail(text, code)


def program() -> None:
    """:func:`main` in a process of its own, which ends with it."""
    from stages.running.warm import leave

    try:
        main()
    except SystemExit as error:
        if not isinstance(error.code, int):
            raise
        leave(error.code)
    leave(0)


if __name__ == "__main__":
    program()
