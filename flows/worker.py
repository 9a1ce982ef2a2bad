"""Starts a worker: `python -m flows.worker COMMAND…` sees to the runs that died with an earlier one and becomes the
command.

Prefect's automation "heartbeat lost" waits for heartbeats that a server has seen since it started. A run that is killed
together with its server sends none to the next one and would stay Running for ever; its process says whether it lives.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import datetime, timedelta, timezone
from typing import Any

SERVER_SECONDS = 180.0  # a server that starts again, since it died with the worker, answers in less
PENDING_SECONDS = 30.0  # a run that another worker of this machine is about to start is Pending for less


def recover(pool: str) -> list[str]:
    """Declare Crashed the pool's runs whose process is gone, and start again those that the automation "recover crashed
    runs" would; returns the ids.

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
        dead = [run for run in found if gone(run, alone)]
        again = bool(dead) and recovery_enabled()
        for run in dead:
            client.set_flow_run_state(run.id, Crashed(message="its process is gone"), force=True)
            if again and RECOVER in run.tags and run.run_count < ATTEMPTS:
                client.set_flow_run_state(run.id, AwaitingRetry(message="continuing after a crash"), force=True)
    return [str(run.id) for run in dead]


def gone(run: Any, alone: bool) -> bool:
    """Whether the process of an active flow run has ended. alone: all workers of its pool are on this machine; else
    only a run whose record names its process is judged.
    """
    from storage import leases, records

    of_run = [
        one.data for one in records.all_runs() if (one.data.get("prefect") or {}).get("flow_run_id") == str(run.id)
    ]
    if run.state.is_running() and of_run and of_run[0]["status"] == "RUNNING" and not engine(run):
        return not leases.alive(of_run[0]["owner"])
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


def main(command: list[str]) -> None:
    import httpx

    from flows.services import POOL

    until = time.monotonic() + SERVER_SECONDS
    while True:
        try:
            for run in recover(POOL):
                print(f"flow run {run}: its process is gone", flush=True)
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
    os.execvp(command[0], command)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m flows.worker COMMAND…")
    main(sys.argv[1:])
