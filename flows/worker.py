"""Starts a worker: `python -m flows.worker COMMAND…` sees to the runs that died with an earlier one and becomes the
command.

Prefect's automation "heartbeat lost" waits for heartbeats that a server has seen since it started. A run that is killed
together with its server sends none to the next one and would stay Running for ever; its process says whether it lives.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timedelta, timezone
from typing import Any

AGAIN = "--again"  # look once more, when heartbeats of the dead are old and what starts has started, and become nothing
SERVER_SECONDS = 180.0  # a server that starts again, since it died with the worker, answers in less
PENDING_SECONDS = 30.0  # a run that another worker of this machine is about to start is Pending for less


def recover(pool: str) -> tuple[list[str], bool]:
    """Declare Crashed the pool's runs whose process is gone, and start again those that the automation "recover crashed
    runs" would; returns the ids, and whether there are runs of which only time will tell (:func:`judged`).

    It is not left to the automation, which misses what happens before its server has read it. It sees the new state and
    does nothing.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
    from prefect.states import AwaitingRetry, Crashed

    from flows.deploy import ATTEMPTS, RECOVER

    active = FlowRunFilter.model_validate({"state": {"type": {"any_": ["RUNNING", "PENDING"]}}})
    ours = WorkPoolFilter.model_validate({"name": {"any_": [pool]}})
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(flow_run_filter=active, work_pool_filter=ours)
        alone = bool(found) and all(
            worker.name.startswith(f"{socket.gethostname()}-") for worker in client.read_workers_for_work_pool(pool)
        )
        dead, more = judged(found, alone)
        again = bool(dead) and recovery_enabled()
        for run in dead:
            client.set_flow_run_state(run.id, Crashed(message="its process is gone"), force=True)
            if again and RECOVER in run.tags and run.run_count < ATTEMPTS:
                client.set_flow_run_state(run.id, AwaitingRetry(message="continuing after a crash"), force=True)
    return [str(run.id) for run in dead], more


def judged(found: list[Any], alone: bool) -> tuple[list[Any], bool]:
    """(those of active flow runs that are :func:`gone`, whether it is yet to be seen of one of the others: it is
    :func:`unsure`, or about to start, which one whose worker was killed then looks like and stays).
    """
    known = run_records() if found else {}
    record = lambda run: known.get(str(run.id))
    dead = [run for run in found if gone(run, record(run), alone)]
    starting = [run for run in found if alone and run.state.is_pending()]
    return dead, any(unsure(record(run)) or run in starting for run in found if run not in dead)


def unsure(record: dict[str, Any] | None) -> bool:
    """Whether the process of an active flow run was in another container with the name of this one: beside it, or this
    one itself before it was started again.
    """
    from storage import leases

    return record is not None and record["status"] == "RUNNING" and not leases.seen(record["owner"])


def run_records() -> dict[str, dict[str, Any]]:
    """Id of a Prefect flow run -> the newest run record that it works on."""
    from storage import records

    return {(one.data.get("prefect") or {}).get("flow_run_id"): one.data for one in reversed(records.all_runs())}


def gone(run: Any, record: dict[str, Any] | None, alone: bool) -> bool:
    """Whether the process of an active flow run has ended. record: its run record; alone: all workers of its pool are
    on this machine, else only a run whose record names its process is judged.
    """
    from storage import leases

    if run.state.is_running() and record and record["status"] == "RUNNING" and not engine(run):
        return not leases.alive(record["owner"])
    if not alone or engine(run):
        return False
    return run.state.is_running() or datetime.now(timezone.utc) - run.state.timestamp > timedelta(
        seconds=PENDING_SECONDS
    )


def engine(run: Any) -> bool:
    """Whether the process that a worker of this machine started for a flow run is there."""
    import psutil

    pid = str(run.infrastructure_pid or "").rpartition(":")[2]
    try:
        process = psutil.Process(int(pid))
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get("PREFECT__FLOW_RUN_ID") == str(run.id)
    except (psutil.Error, ValueError):
        return False


def recovery_enabled() -> bool:
    """Whether `posttrain deploy` has installed crash recovery and nobody has switched it off."""
    from prefect.automations import Automation

    from flows.deploy import AUTOMATIONS

    try:
        return Automation.read(name=AUTOMATIONS[1]).enabled
    except ValueError:
        return False


def own_temporary_directory() -> str:
    """A temporary directory of this user, below the usual one. Prefect keeps what belongs to runs in a directory
    `runner_storage` there, which is that of whoever started a worker on this machine first: nobody else's would start.
    """
    path = os.path.join(tempfile.gettempdir(), f"posttrain-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    return (
        path if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() else tempfile.mkdtemp(prefix="posttrain-")
    )


def main(command: list[str]) -> None:
    import httpx

    from flows.services import POOL
    from storage.leases import BESIDE_STALE_SECONDS, HEARTBEAT_SECONDS

    if command == [AGAIN]:
        time.sleep(BESIDE_STALE_SECONDS + HEARTBEAT_SECONDS)
        recover(POOL)
        return
    until = time.monotonic() + SERVER_SECONDS
    while True:
        try:
            dead, more = recover(POOL)
            for run in dead:
                print(f"flow run {run}: its process is gone", flush=True)
            if more:
                subprocess.Popen([sys.executable, "-m", "flows.worker", AGAIN], stdin=subprocess.DEVNULL)
        except Exception as error:  # the worker is wanted all the same
            if isinstance(error, httpx.TransportError) and time.monotonic() < until:
                time.sleep(1)
                continue
            print(
                f"runs that died with an earlier worker were not looked for ({type(error).__name__}: {error});"
                " `posttrain down` and `posttrain up` look again",
                flush=True,
            )
        break
    os.environ["TMPDIR"] = own_temporary_directory()
    os.execvp(command[0], command)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m flows.worker COMMAND…")
    main(sys.argv[1:])
