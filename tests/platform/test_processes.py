"""How stage processes start: forked from a parent that has the libraries, or by themselves; the same work either
way.
"""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading

import psutil
import pytest

from flows import env
from stages.spec import PROJECT_ROOT
from tasks import processes
from tasks.run import StageError, run_stage
from tests import toy_stage

TOY = "tests.toy_stage"
FORKS = pytest.mark.skipif(sys.platform != "linux", reason="stages are forked on Linux only")


@pytest.fixture
def trains(monkeypatch):
    """The toy stage as one that trains: it waits for the libraries, and is forked."""
    monkeypatch.setattr(toy_stage, "SPEC", dataclasses.replace(toy_stage.SPEC, gpu=True))


@pytest.fixture
def fresh(monkeypatch):
    """No parent of stages yet; the one a test starts ends with it."""
    monkeypatch.setattr(processes, "_running", None)
    yield
    if processes._running is not None:
        processes._running.close()


def started(config, on_start=lambda process: None, seed=0):
    """(result, command line of the stage's process)."""
    seen = []

    def listen(event):
        if event["event"] == "started":
            process = psutil.Process(event["pid"])
            seen.append((" ".join(process.cmdline()), process.ppid(), os.getsid(process.pid) == process.pid))
            on_start(process)

    return run_stage(TOY, {}, config, seed=seed, on_event=listen), *seen


@FORKS
def test_a_forked_stage_does_what_a_started_one_does(state_dir, tmp_path, trains, fresh, monkeypatch):
    for name in {*env.defaults(state_dir), "PYTHONPATH"} - {"POSTTRAIN_HOME"}:  # and put back behind the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    forked, (command, parent, leads) = started({"steps": 9})
    assert "stages.running.warm" in command and parent == processes._running.process.pid and leads
    env.prepare()  # as a command or a recipe in the same process does; libraries read nothing else than before
    again, (_, same, _) = started({"steps": 9}, seed=1)
    assert same == parent and again.outputs != forked.outputs
    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "other"))
    monkeypatch.setenv("POSTTRAIN_FORK", "0")
    alone, (command, parent, leads) = started({"steps": 9})
    assert "SPEC.json" in command and parent == os.getpid() and leads
    assert alone.outputs == forked.outputs and alone.metrics == forked.metrics and alone.versions == forked.versions
    assert (tmp_path / "other/work" / alone.key / "metrics.jsonl").read_bytes() == (
        state_dir / "work" / forked.key / "metrics.jsonl"
    ).read_bytes()


@FORKS
def test_who_does_not_need_the_libraries_does_not_wait_for_them(state_dir, trains, fresh, monkeypatch):
    monkeypatch.setattr(toy_stage, "SPEC", dataclasses.replace(toy_stage.SPEC, gpu=False))
    assert "SPEC.json" in started({"steps": 2})[1][0] and processes._running is None
    processes.expect()  # as a recipe does
    while not processes._running.ready(1):
        pass
    for threads in ("1", "2"):  # the number of threads can be changed behind the imports
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        found, (command, _, _) = started({"steps": 2 + int(threads), "threads": True})
        assert "stages.running.warm" in command and found.perf["threads"] == int(threads)
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")  # read when torch is imported
    assert "SPEC.json" in started({"steps": 5})[1][0]


@FORKS
def test_a_killed_stage_and_a_killed_parent_cost_that_stage(state_dir, trains, fresh):
    with pytest.raises(StageError, match="ended by SIGKILL"):
        started({"steps": 500, "sleep": 0.02}, lambda process: process.kill())
    parent = processes._running.process.pid
    stages = []

    def kill_parent(process):
        stages.append(process)
        os.kill(parent, signal.SIGKILL)

    with pytest.raises(StageError, match="ended by SIGKILL"):
        started({"steps": 501, "sleep": 0.02}, kill_parent)
    assert psutil.wait_procs(stages, timeout=60)[1] == []
    found, (command, new, _) = started({"steps": 5})
    assert "stages.running.warm" in command and new != parent and found.outputs


@FORKS
def test_a_forked_process_ends_its_work_and_takes_nothing_apart():
    """Threads, exit handlers and buffers are heeded; destroying what was imported takes longer than many a stage."""
    code = """
        import atexit, os, socket, threading, time
        from stages.running import warm

        class Kept:
            def __del__(self, write=os.write):
                write(1, b"taken apart")

        def run(request):
            global kept
            kept = Kept()
            atexit.register(print, "exit handler")
            threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
            return 3

        ours, theirs = socket.socketpair()
        warm.send(ours, {"environment": dict(os.environ), "umask": 18}, (1, 2))
        ours.shutdown(socket.SHUT_WR)
        warm.serve(theirs, run)
        print(os.waitstatus_to_exitcode(os.wait()[1]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=PROJECT_ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["thread", "exit handler", "3"], done.stderr


@FORKS
def test_side_by_side_they_end_each_for_itself(state_dir, trains, fresh):
    found = {}

    def one(seed):
        try:
            found[seed] = started({"steps": 40, "sleep": 0.02, "fail_at": 30 if seed == 2 else -1}, seed=seed)[
                0
            ].outputs
        except StageError as error:
            found[seed] = str(error)

    threads = [threading.Thread(target=one, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "asked to fail at step 30" in found[2] and len({str(found[s]) for s in range(4)}) == 4


@FORKS
def test_they_end_with_their_owner(tmp_path):
    """SIGKILL of the process that runs the stages leaves neither the parent nor a stage."""
    code = f"""
        import dataclasses
        from tasks.run import run_stage
        from tests import toy_stage
        toy_stage.SPEC = dataclasses.replace(toy_stage.SPEC, gpu=True)
        run_stage({TOY!r}, {{}}, {{"steps": 5000, "sleep": 0.02}}, on_event=lambda e: e["event"] == "started" and print(e["pid"], flush=True))
    """
    environment = {**os.environ, "POSTTRAIN_HOME": str(tmp_path / "home"), "POSTTRAIN_TRACKING": "off"}
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=PROJECT_ROOT,
        env=environment,
    )
    stage = psutil.Process(int(owner.stdout.readline()))
    parent = stage.parent()
    assert parent.ppid() == owner.pid
    owner.kill()
    owner.communicate()
    assert psutil.wait_procs([stage, parent], timeout=60)[1] == []


def test_the_parent_holds_libraries_only_and_no_thread_that_a_fork_would_lose():
    """None of the project's modules, so that a stage edited between two runs runs as edited."""
    code = (
        "import importlib, os, sys\nfrom pathlib import Path\nfrom stages.running import warm\nfor name in"
        " warm.LIBRARIES:\n    importlib.import_module(name)\nprint(sorted(m for m in sys.modules if m.split('.')[0] in"
        " ('stages', 'storage', 'tasks', 'flows')),\n      {p.read_text().strip() for p in"
        " Path('/proc/self/task').glob('*/comm') if p.parent.name != str(os.getpid())} - {'jemalloc_bg_thd'})"
    )
    # its threads, and those of Arrow's allocator, are started again after a fork
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT_ROOT, env=environment, check=True
    )
    assert done.stdout.strip() == "['stages', 'stages.running', 'stages.running.warm'] set()"


def test_a_fork_that_cannot_use_its_gpu_becomes_a_new_interpreter(monkeypatch):
    import torch

    from stages.running import warm

    called = []
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(
        os, "execv", lambda path, arguments: called.append((path, arguments)) or (_ for _ in ()).throw(SystemExit)
    )
    with pytest.raises(SystemExit):
        warm.run_stage({"spec": "/x/SPEC.json"})
    assert called == [(sys.executable, [sys.executable, "-m", "stages", "/x/SPEC.json"])]


def test_the_parents_of_the_tests_are_found_under_a_temporary_directory_of_any_length(tmp_path, monkeypatch):
    """A socket's address holds 108 bytes."""
    from tests.processes import NUMBER, hand_over

    folder = tmp_path / ("a" * 90)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv(NUMBER, "0")
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(folder):
        listener.bind("parents-0")
        listener.listen()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            hand_over(theirs.fileno())
            with (
                listener.accept()[0] as connection,
                socket.socket(fileno=socket.recv_fds(connection, 1, 1)[1][0]) as received,
            ):
                received.sendall(b"here")
            assert ours.recv(4) == b"here"
