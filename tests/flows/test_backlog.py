"""A backlog of scheduled runs: the worker of `posttrain up` starts as many processes as the queues let through, and not
all of them at once.
"""

from __future__ import annotations

import os
import time

import psutil
import pytest

from flows.deploy import queues

#: Making and removing them takes most of the time; a hundred with POSTTRAIN_TEST_LONG=1.
BACKLOG = 100 if os.environ.get("POSTTRAIN_TEST_LONG") else 40
#: Half of it on each queue, of stages of their own: a second copy of one that runs would be refused. A server that is
#: busy is asked again.
FILL = f"""
from prefect.client.orchestration import get_client
with get_client(sync_client=True) as client:
    queues = [client.read_deployment_by_name(f"slow_recipe/{{name}}").id for name in ("test", "backlog")]
    for i in range({BACKLOG}):
        parameters = {{"config": {{"slow": {{"seconds": 600 + i}}}}}}
        print(client.create_flow_run_from_deployment(queues[i % 2], parameters=parameters, idempotency_key=str(i)).id)
"""


@pytest.fixture()
def backlog(servers, slow_recipe):
    """Ids of runs that are due now, half of them on each queue; what is left of them is removed."""
    servers.python(
        "from flows.deploy import apply; from tests.flows.slow_recipe import slow_recipe\napply(slow_recipe, 'backlog',"
        " {'queue': 'cpu'})"
    )
    made = []
    try:
        made += servers.python(FILL).split()
        yield made
    finally:
        begun = set(processes(servers))
        for run in made:
            if run not in begun:
                servers.api(f"/flow_runs/{run}", method="DELETE")
        begun |= set(processes(servers))
        for run in begun & set(made):
            servers.api(f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
        servers.wait(lambda: not set(processes(servers)) & set(made), limit=300)


def processes(servers) -> list[str]:
    """The flow runs that have a process."""
    return [
        environment["PREFECT__FLOW_RUN_ID"]
        for one in psutil.process_iter(["environ"])
        if (environment := one.info["environ"] or {}).get("POSTTRAIN_HOME") == str(servers.home)
        and "PREFECT__FLOW_RUN_ID" in environment
    ]


def test_a_backlog_of_runs_starts_as_many_processes_as_the_queues_let_through(servers, backlog):
    slots = servers.api("/v2/concurrency_limits/gpu")["limit"]
    most = sum(queue["concurrency_limit"] for queue in queues(slots).values())
    assert most == slots + 4
    servers.wait(lambda: len(set(processes(servers)) & set(backlog)) >= most, limit=300)
    deadline = time.monotonic() + 10  # the worker looks at the queues every two seconds
    while time.monotonic() < deadline:
        assert len(set(processes(servers)) & set(backlog)) <= most
        assert servers.api("/v2/concurrency_limits/gpu")["active_slots"] <= slots
        time.sleep(0.5)
    states = [
        row["state_type"]
        for row in servers.api("/flow_runs/filter", {"flow_runs": {"id": {"any_": backlog}}, "limit": 200})
    ]
    assert len(states) == BACKLOG and states.count("SCHEDULED") == BACKLOG - most
