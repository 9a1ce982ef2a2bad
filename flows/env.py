"""The environment of everything that speaks Prefect or MLflow, decided in one place before either is imported.

Both read their settings from the environment once, at import; so call `prepare()` first. Whatever the user
has set already wins. Nothing is sent anywhere: telemetry, analytics and promotional content are off.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from storage.home import home, is_shared

ROOT = Path(__file__).resolve().parent.parent
HEARTBEAT_SECONDS = 30
# A run that is cancelled before its process listens stays Cancelling for so long (Prefect: 300). One that listens has
# ended, or was killed, after 30; and a Cancelled run whose process is yet to start would start all the same.
CANCELLING_SECONDS = 90
WORKER_LOG = "POSTTRAIN_WORKER_LOG"  # the file that a worker and its runs write to

# Prefect keeps leases in memory by default and loses slots on a restart; the file system keeps them.
LEASES = "flows.prefect_leases"


#: Nothing is sent anywhere.
SILENT = {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def send_nothing() -> None:
    """Switch telemetry off where the user has not said otherwise."""
    for name, value in SILENT.items():
        os.environ.setdefault(name, value)


def defaults(state: Path) -> dict[str, str]:
    """Variables for servers, workers and flows whose state lives under `state` (an absolute path)."""
    prefect = state / "prefect"
    return SILENT | {
        "POSTTRAIN_HOME": str(state),
        "PREFECT_HOME": str(prefect),
        "PREFECT_LOCAL_STORAGE_PATH": str(prefect / "results"),
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": LEASES,
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
        "PREFECT_SERVER_SERVICES_CANCELLATION_CLEANUP_CANCELLING_TIMEOUT_SECONDS": str(CANCELLING_SECONDS),
        "PREFECT_CLI_PROMPT": "false",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "TOKENIZERS_PARALLELISM": "false",
    }


def state_dir() -> Path:
    """The absolute state directory (POSTTRAIN_HOME, default ./.posttrain); created when missing."""
    wanted = os.environ.get("POSTTRAIN_HOME") or "./.posttrain"
    if any(sign in str(Path(wanted).expanduser().resolve()) for sign in "?\n"):  # before anything is made there
        from stages.spec import ConfigError

        raise ConfigError(
            f"the state directory POSTTRAIN_HOME={wanted!r} has a question mark or a line break in its path, at which"
            " the addresses of databases end; set POSTTRAIN_HOME to a directory without"
        )
    try:
        return home().resolve()
    except (FileExistsError, NotADirectoryError, FileNotFoundError) as error:
        from stages.spec import ConfigError

        raise ConfigError(
            f"the state directory POSTTRAIN_HOME={wanted} cannot be made ({error.strerror}); set POSTTRAIN_HOME to a"
            " directory"
        ) from None


def leave_own_servers_to_no_proxy() -> None:
    """Where the environment names a proxy, Prefect's and MLflow's clients would ask it for servers of this machine."""
    if not any(os.environ.get(name) for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")):
        return
    known = [host.strip() for host in (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",")]
    if "*" in known:  # for nobody; beside other hosts urllib does not know it
        return
    hosts = dict.fromkeys([*filter(None, known), "127.0.0.1", "localhost"])
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(hosts)


def prepare(*, quiet: bool = False) -> Path:
    """Set this process's environment; returns the state directory.

    quiet: keep Prefect's own log off the terminal (it is still stored and shown in its UI).
    """
    state = state_dir()
    for name, value in defaults(state).items():
        os.environ.setdefault(name, value)
    os.environ["POSTTRAIN_HOME"] = str(state)
    leave_own_servers_to_no_proxy()
    os.environ["PYTHONPATH"] = python_path()
    # Prefect makes its directory for its owner alone, and SQLite its database without the group's right to write
    if is_shared(state):
        with contextlib.suppress(OSError):  # a home that may only be read
            (state / "prefect").mkdir(mode=0o770, exist_ok=True)
            (state / "prefect" / "prefect.db").touch()
    if quiet:
        os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    return state


def own_output() -> None:
    """Have a run that a worker started write into the worker's log itself. Through the worker it would lose its output
    with it, and rich, by which Prefect prints, ends a process that nobody reads: the run of a killed worker would crash.
    """
    log = os.environ.get(WORKER_LOG)
    if log and os.environ.get("PREFECT__FLOW_RUN_ID"):
        with contextlib.suppress(OSError), open(log, "ab") as out:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(BrokenPipeError):
                    stream.flush()
                os.dup2(out.fileno(), stream.fileno())


def python_path() -> str:
    """PYTHONPATH under which `flows`, `tasks`, `stages` and `storage` import in any child, installed or not."""
    parts = [str(ROOT)] + [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return os.pathsep.join(dict.fromkeys(parts))


def child(state: Path, **extra: str) -> dict[str, str]:
    """The environment for a long-lived child (server, worker) of the state directory."""
    return {**os.environ, **defaults(state), "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1", **extra}


def python() -> str:
    return sys.executable
