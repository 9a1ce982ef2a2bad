"""Locks and GPU slots follow the life of their owner."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from stages.spec import PROJECT_ROOT
from storage import home, leases, records
from storage.files import atomic_write_json, read_json

HOLD = "import sys, time\nfrom storage import leases\nheld = leases.{call}\nprint('held', flush=True)\ntime.sleep(60)"


def hold(call):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(call=call)], cwd=PROJECT_ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_gpu_lease_after_sigkill(state_dir):
    process = hold("acquire_slots('gpu', 1)")
    with pytest.raises(leases.LeaseBusy, match=str(process.pid)):
        leases.acquire_slots("gpu", 1, wait=False)
    assert [h["pid"] for h in leases.gpu_holders()] == [process.pid]
    threading.Timer(0.5, process.kill).start()
    waited = []
    taken = leases.acquire_slots("gpu", 1, timeout=30, on_wait=waited.append)  # free as soon as its owner is gone
    process.wait()
    assert len(taken) == 1 and len(waited) == 1
    taken[0].release()
    assert leases.gpu_holders() == []


def test_reused_process_id_is_not_an_owner(state_dir):
    path = home.leases_dir() / "x.json"
    for change in ({"start": 1.0}, {"boot": "another"}, {"pid": 2**22 - 3}):
        atomic_write_json(path, {**leases.this_process(), "token": "t", **change})
        assert leases.holder(path) is None
    leases.acquire("x", wait=False).release()


def test_other_host_is_judged_by_its_heartbeat(state_dir):
    path = home.leases_dir() / "x.json"
    atomic_write_json(path, {**leases.this_process(), "host": "elsewhere", "heartbeat": time.time()})
    assert leases.holder(path)
    os.utime(path, (time.time() - 1e4,) * 2)
    assert leases.holder(path) is None


CONTAINER = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]


@pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run([*CONTAINER, "true"], capture_output=True).returncode != 0,
    reason="no process namespaces here",
)
def test_a_container_with_the_name_of_its_host_keeps_its_lease_while_it_beats(state_dir):
    """Its process id is nobody's, or somebody else's, here: its lock, and its GPU, were taken from it while it ran."""
    process = subprocess.Popen(
        [*CONTAINER, sys.executable, "-c", HOLD.format(call="acquire('x')")],
        cwd=PROJECT_ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    try:
        with pytest.raises(leases.LeaseBusy):
            leases.acquire("x", wait=False)
    finally:
        process.kill()
        process.communicate()
    os.utime(home.leases_dir() / "x.json", (time.time() - 90,) * 2)
    leases.acquire("x", wait=False).release()


HIDING = [
    "sh",
    "-c",
    'mount -t proc -o hidepid=2,gid=4242 proc /proc && exec setpriv --bounding-set=-sys_ptrace,-kill "$@"',
    "sh",
]


@pytest.mark.skipif(
    not shutil.which("setpriv")
    or subprocess.run(["unshare", "--mount", *HIDING, "true"], capture_output=True).returncode != 0,
    reason="needs the right to hide processes",
)
def test_another_users_process_that_the_system_hides_is_judged_by_its_heartbeat(state_dir):
    """Machines of many users mount /proc with hidepid: nothing is to be seen of the process, not even whether it is
    there, and its run was declared killed and its lease taken while it worked."""
    code = (
        "import sys; from storage import leases; from storage.files import read_json; path = sys.argv[1];"
        " print(leases.start_time(int(sys.argv[2])), leases.alive(read_json(path), leases.Path(path)))"
    )
    other = subprocess.Popen(["setpriv", "--reuid=12345", "--clear-groups", "sleep", "60"])
    path = home.leases_dir() / "x.json"
    look = lambda: subprocess.run(
        ["unshare", "--mount", *HIDING, sys.executable, "-c", code, str(path), str(other.pid)],
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    try:
        atomic_write_json(path, leases.this_process(other.pid))
        assert look() == ["None", "True"]
        os.utime(path, (time.time() - leases.BESIDE_STALE_SECONDS - 1,) * 2)
        assert look() == ["None", "False"]
        atomic_write_json(path, leases.this_process(other.pid))
    finally:
        other.kill()
        other.wait()
    assert look() == ["None", "False"]


def test_a_clock_that_was_set_back_does_not_keep_the_lease_of_a_dead_host_for_hours(state_dir, monkeypatch):
    path, passed = home.leases_dir() / "x.json", [0.0]
    clock = time.monotonic
    monkeypatch.setattr(leases.time, "monotonic", lambda: clock() + passed[0])
    atomic_write_json(path, {**leases.this_process(), "host": "elsewhere", "heartbeat": time.time()})
    for ahead in (7200, 7100):  # the second time it was written once more before the clock was set
        os.utime(path, (time.time() + ahead,) * 2)
        assert leases.holder(path)
        passed[0] += 200
        assert leases.holder(path)
    passed[0] += 200
    assert leases.holder(path) is None
    path.touch()  # it lives after all
    assert leases.holder(path)


def test_the_newest_run_is_the_one_that_began_last_whatever_the_clock_said(state_dir, monkeypatch):
    """`latest`, and the run that the same command goes on with."""
    clock = time.time
    before = records.start_run("demo", {}, identity="i")
    records.finish_run(before.run_id, "FINISHED")
    monkeypatch.setattr(records.time, "time", lambda: clock() - 7200)
    other = records.start_run("demo", {}, identity="j")
    newest = records.start_run("demo", {}, identity="i")
    records.finish_run(newest.run_id, "FAILED")
    assert records.get_run("latest").run_id == newest.run_id and [run.run_id for run in records.all_runs()] == [
        newest.run_id,
        other.run_id,
        before.run_id,
    ]
    assert records.start_run("demo", {}, identity="i").run_id == newest.run_id


def test_one_owner_among_many_threads(state_dir):
    inside, most, order = [], [], []

    def work(n):
        with leases.acquire("shared"):
            inside.append(n)
            most.append(len(inside))
            time.sleep(0.01)
            inside.remove(n)
            order.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert max(most) == 1 and len(order) == 6


def test_slots_are_all_or_none(state_dir):
    two = leases.acquire_slots("gpu", 3, 2)
    with pytest.raises(leases.LeaseBusy):
        leases.acquire_slots("gpu", 3, 2, wait=False)
    one = leases.acquire_slots("gpu", 3, 1, wait=False)
    assert sorted(x.index for x in two + one) == [0, 1, 2]
    with pytest.raises(ValueError, match="ask for at most 3"):
        leases.acquire_slots("gpu", 3, 4)
    [x.release() for x in two + one]


def test_orphaned_worker_is_ended_before_its_lease_is_given(state_dir):
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    path = home.leases_dir() / "x.json"
    atomic_write_json(path, {**leases.this_process(), "start": 1.0, "child": leases.this_process(worker.pid)})
    leases.acquire("x", timeout=60).release()
    assert worker.wait(timeout=60) == -signal.SIGKILL


def test_release_leaves_a_foreign_lease_alone(state_dir):
    lease = leases.acquire("x")
    atomic_write_json(lease.path, {**leases.this_process(), "token": "somebody else"})
    lease.release()
    assert read_json(lease.path)["token"] == "somebody else"
    os.unlink(lease.path)
