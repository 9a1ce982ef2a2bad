"""Which runs a worker that starts takes for dead."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from datetime import datetime, timedelta, timezone

import httpx
import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Pending, Running

from flows import worker
from storage import leases, records
from storage.files import atomic_write_json, read_json
from storage.home import runs_dir


def gone(run, alone):
    return worker.gone(run, worker.run_records().get(str(run.id)), alone)


def unsure(run):
    return worker.unsure(worker.run_records().get(str(run.id)))


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


def test_all_runs_are_judged_by_one_look_at_the_records(state_dir, processes, monkeypatch):
    """A state directory has a thousand of them, and a worker that starts may find many runs active."""
    run, living, ended = processes
    others = [FlowRun(id=uuid.uuid4(), flow_id=run.flow_id, state=Running()) for _ in range(3)]
    recorded(run, **leases.this_process(living.pid))
    for other in others:
        recorded(other, pid=ended.pid, start=1.0)
    looks, all_runs = [], records.all_runs
    monkeypatch.setattr(records, "all_runs", lambda: looks.append(1) or all_runs())
    assert worker.judged([run, *others], alone=True) == (others, False) and len(looks) == 1


def test_a_run_that_is_about_to_start_is_left_alone(state_dir, processes):
    run, _, _ = processes
    run.state = Pending()
    assert not gone(run, alone=True)
    # one whose worker was killed while it started looks the same: it stayed Submitting for ever
    assert worker.judged([run], alone=True) == ([], True) and worker.judged([run], alone=False) == ([], False)
    run.state = Pending(timestamp=datetime.now(timezone.utc) - timedelta(minutes=2))
    assert gone(run, alone=True) and not gone(run, alone=False)


def test_a_worker_waits_for_a_server_that_died_with_the_last_one(monkeypatch, capsys):
    """Both are started again at once, and the server takes longer."""
    answers = iter([httpx.ConnectError("refused"), httpx.ReadError("gone"), (["r-1"], False)])
    became = []

    def recover(pool):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(worker, "recover", recover)
    monkeypatch.setattr(worker.os, "execvp", lambda *command: became.append(command))
    worker.main(["prefect", "worker"])
    assert became == [("prefect", ["prefect", "worker"])] and next(answers, None) is None
    assert capsys.readouterr().out == "flow run r-1: its process is gone\n"


def test_a_worker_starts_where_no_server_comes(monkeypatch, capsys):
    def recover(pool):
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(worker, "recover", recover)
    monkeypatch.setattr(worker, "SERVER_SECONDS", 0.5)
    monkeypatch.setattr(worker.os, "execvp", lambda *command: print("started"))
    worker.main(["prefect", "worker"])
    told, started = capsys.readouterr().out.splitlines()
    assert "were not looked for (ConnectError: refused)" in told and started == "started"


def test_a_worker_has_a_temporary_directory_of_its_user(tmp_path, monkeypatch):
    """In the common one Prefect's `runner_storage` belongs to who started a worker first, and no other user's starts."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = worker.own_temporary_directory()
    assert os.path.dirname(own) == str(tmp_path) and os.stat(own).st_mode & 0o777 == 0o700
    assert worker.own_temporary_directory() == own
    os.rename(own, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", own)  # by somebody else, before this user had one
    assert worker.own_temporary_directory() not in (own, str(tmp_path / "elsewhere"))
