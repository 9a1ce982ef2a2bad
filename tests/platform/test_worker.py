"""Which runs a worker that starts takes for dead."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from datetime import datetime, timedelta, timezone

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Pending, Running

from flows.worker import gone, unsure
from storage import leases, records
from storage.files import atomic_write_json, read_json
from storage.home import runs_dir


@pytest.fixture
def processes():
    """(a flow run, a living process that was started for it, one that has ended)."""
    run = FlowRun(id=uuid.uuid4(), flow_id=uuid.uuid4(), state=Running())
    living = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PREFECT__FLOW_RUN_ID": str(run.id)},
    )
    living.stdout.readline()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    yield run, living, ended
    living.kill()
    living.communicate()


def recorded(run, **owner):
    path = (
        runs_dir()
        / f"{records.start_run('preference', {}, run_id=str(run.id), prefect={'flow_run_id': str(run.id)}).run_id}.json"
    )
    data = read_json(path)
    atomic_write_json(path, {**data, "owner": {**data["owner"], **owner}})


def test_a_run_without_a_record_is_judged_by_its_process(state_dir, processes):
    run, living, ended = processes
    # this process was not started for it
    for pid, dead in ((living.pid, False), (ended.pid, True), (os.getpid(), True), (None, True)):
        run.infrastructure_pid = pid and str(pid)
        assert gone(run, alone=True) == dead
        assert not gone(run, alone=False)  # the process of another machine's worker may have the number


def test_a_run_with_a_record_is_judged_by_the_owner_of_that(state_dir, processes):
    run, living, ended = processes
    run.infrastructure_pid = str(ended.pid)
    recorded(run, **leases.this_process(living.pid))
    assert not gone(run, alone=True) and not gone(run, alone=False)
    recorded(run, pid=ended.pid, start=1.0)
    assert gone(run, alone=True) and gone(run, alone=False)


def test_a_run_of_another_container_with_this_ones_name_is_judged_by_its_heartbeat(state_dir, processes):
    """A container that is started again has the name, and other process ids, of the one that died."""
    run, living, _ = processes
    recorded(run, **leases.this_process(living.pid))
    assert not unsure(run)
    recorded(run, **(owner := leases.this_process(living.pid) | {"space": "pid:[1]"}))
    beat = state_dir / "leases" / "alive" / leases._beat_file(owner).name
    beat.touch()
    run.infrastructure_pid = None
    assert unsure(run) and not gone(run, alone=True)
    os.utime(beat, (beat.stat().st_mtime - 2 * leases.BESIDE_STALE_SECONDS,) * 2)
    assert gone(run, alone=True)


def test_a_run_that_is_about_to_start_is_left_alone(state_dir, processes):
    run, _, _ = processes
    run.state = Pending()
    assert not gone(run, alone=True)
    run.state = Pending(timestamp=datetime.now(timezone.utc) - timedelta(minutes=2))
    assert gone(run, alone=True) and not gone(run, alone=False)
