"""Parts of a run side by side: as many as there are slots, in one flow run, ended together, with the results of one
after the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path

import httpx
import psutil
import pytest

from flows import env, services
from flows.recipe import Run, get_recipe, load_config
from stages.registry import get_stage
from tasks.together import at_once, together
from tests.common import stage_processes
from tests.serving import with_prefects_tables

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, sys
from flows import env
env.prepare(quiet=True)
from tests.flows.slow_recipe import side_by_side, SideBySideConfig
print(json.dumps(side_by_side(config=SideBySideConfig.model_validate_json(sys.argv[1]))), flush=True)
"""


@pytest.fixture(scope="module")
def prefect(tmp_path_factory):
    """A Prefect server for the tests of this file; its URL."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POSTTRAIN_HOME", str(with_prefects_tables(tmp_path_factory.mktemp("prefect"))))
        with services.embedded(env.state_dir()) as wait:
            wait()
            yield os.environ["PREFECT_API_URL"]


def start(home: Path, url: str, fork: bool = False, program: str = PROGRAM, **config) -> subprocess.Popen:
    """fork: stages in processes forked from one that has loaded libraries, as usual."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_", "POSTTRAIN_"))
    }
    environment |= {
        "POSTTRAIN_HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "POSTTRAIN_GPU_SLOTS": "2",
        "POSTTRAIN_GRACE_SECONDS": "2",
        "PREFECT_API_URL": url,
        "DO_NOT_TRACK": "true",
        "POSTTRAIN_FORK": str(int(fork)),
    }
    # ignored in what a shell has put in the background
    return subprocess.Popen(
        [sys.executable, "-c", program, json.dumps(config)],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def spans(home: Path) -> dict[str, tuple[float, float]]:
    """label -> when its stage began and ended."""
    records = [json.loads(path.read_text()) for path in (home / "records").rglob("*.json")]
    return {record["label"]: (record["started"], record["finished"]) for record in records}


def test_two_slots_run_two_parts_at_a_time_and_results_keep_their_order(prefect, tmp_path):
    process = start(tmp_path, prefect, seconds=[4.0, 1.0, 1.0])
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["found"] == ["then_0", "then_1", "then_2"]
    assert [step["step"] for step in result["steps"]] == [
        f"{which}_{i}" for i in range(3) for which in ("first", "then")
    ]
    at = spans(tmp_path)
    assert len(at) == 6
    overlaps = [(a, b) for a in at for b in at if a < b and at[a][0] < at[b][1] and at[b][0] < at[a][1]]
    assert ("first_0", "first_1") in overlaps and at["first_1"][1] <= at["then_1"][0]
    moments = sorted([(begin, 1) for begin, _ in at.values()] + [(end, -1) for _, end in at.values()])
    running = [sum(change for _, change in moments[: i + 1]) for i in range(len(moments))]
    assert max(running) == 2
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        parents = database.execute("select count(*), sum(status = 'FINISHED') from runs").fetchone()
        children = database.execute("select count(*) from tags where key = 'mlflow.parentRunId'").fetchone()
    assert parents == (7, 7) and children == (6,)


def test_what_ends_the_run_ends_every_part(prefect, tmp_path):
    process = start(tmp_path, prefect, fork=True, seconds=[300.0, 300.0, 300.0])
    deadline = time.monotonic() + 120
    while len(ours := stage_processes(tmp_path)) < 2:
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()[1]
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)  # a busy machine's Prefect server takes its time over the last state
    assert process.returncode != 0
    assert not [
        one for one in ours if one.is_running() and one.status() != psutil.STATUS_ZOMBIE
    ] and not stage_processes(tmp_path), err
    assert not list((tmp_path / "leases").rglob("slot-*.json")), "slots are free again"


def test_a_signal_that_another_thread_was_given_ends_the_run():
    """The system gives a process's signal to any of its threads; Python raises it in the main one once that wakes."""
    program = (
        "import signal, threading, time\n"
        "from tasks.stopping import raise_if_stopped\n"
        "from tasks.together import together\n"
        "def part():\n"
        "    time.sleep(1.0)  # until the main thread waits\n"
        "    signal.pthread_kill(threading.get_ident(), signal.SIGINT)\n"
        "    while True:\n"
        "        raise_if_stopped()\n"
        "        time.sleep(0.05)\n"
        "together([part, part], limit=2)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    )
    try:
        assert process.wait(timeout=120) == -signal.SIGINT
    finally:
        process.kill()


@pytest.mark.parametrize("how", ["at once", "while its slot is to be given back", "by a signal to another thread"])
def test_a_run_that_is_ended_does_not_wait_for_a_server_that_is_gone(prefect, tmp_path, how):
    """Prefect's client asks again for minutes; what it would have said is said by the next run of the same command.
    A stage's slot of the server is given back on the way out, and the artifact of its progress, which is sent by the
    main thread, is being sent where nothing interrupts that."""
    gate = Gate(prefect)
    program = (
        "import sys\nfrom flows import recipe\nrecipe.RECIPES.own['side_by_side'] = 'tests.flows.slow_recipe'\nfrom"
        " flows.cli import main\nsys.argv = ['posttrain', 'run', 'side_by_side', '--set', 'seconds=[300]']\nmain()\n"
    )
    with slots(prefect) if how == "while its slot is to be given back" else contextlib.nullcontext():
        process = start(tmp_path, gate.url, program=program)
        deadline = time.monotonic() + 120
        while not (ours := stage_processes(tmp_path)):
            assert time.monotonic() < deadline and process.poll() is None, process.communicate()[1]
            time.sleep(0.2)
        gate.close()
        if how == "by a signal to another thread":
            time.sleep(3.0)  # the stage has told of progress by now
            other = max(psutil.Process(process.pid).threads(), key=lambda thread: thread.id).id
            assert other != process.pid
            assert not ctypes.CDLL(None).syscall(TGKILL[platform.machine()], process.pid, other, signal.SIGTERM)
        else:
            process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in ours)


#: The system call that gives a signal to one thread of another process.
TGKILL = {"x86_64": 234, "aarch64": 131}


@contextlib.contextmanager
def slots(prefect: str):
    """The limit that a server of `posttrain up` has."""
    with httpx.Client(base_url=prefect + "/") as client:
        client.post("v2/concurrency_limits/", json={"name": "gpu", "limit": 2}).raise_for_status()
        yield
        client.delete("v2/concurrency_limits/gpu").raise_for_status()


class Gate:
    """A port in front of a server, which can be closed: nothing that is sent comes through or back then."""

    def __init__(self, url: str):
        self.to = urllib.parse.urlsplit(url)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}{self.to.path}"
        self.open: list[socket.socket] = []
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        while True:
            try:
                near = self.socket.accept()[0]
            except OSError:
                return
            far = socket.create_connection((self.to.hostname, self.to.port))
            self.open += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    @staticmethod
    def _carry(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for one in (self.socket, *self.open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def test_a_part_that_fails_lets_the_others_end_and_starts_no_further_one(prefect, tmp_path):
    process = start(tmp_path, prefect, seconds=[1.0, 5.0, 0.1], fails=[0])
    _, err = process.communicate(timeout=300)
    assert process.returncode != 0 and "it was told to fail" in err
    assert set(spans(tmp_path)) == {"first_1", "then_1"}


def test_order_limit_errors_and_context():
    seen, lock, peak = [], threading.Lock(), []

    def part(i):
        with lock:
            seen.append(i)
            peak.append(len(seen))
        time.sleep(0.05 * (5 - i))
        with lock:
            seen.remove(i)
        return i

    assert together([lambda i=i: part(i) for i in range(5)], limit=3) == [0, 1, 2, 3, 4] and max(peak) == 3
    assert together([lambda: together([threading.get_ident, threading.get_ident], limit=2) for _ in range(2)], limit=1)
    inner = together([lambda: together([threading.get_ident] * 3) for _ in range(2)], limit=2)
    assert all(len(set(one)) == 1 for one in inner), "inside a part one thing at a time"

    def fail(i):
        raise ValueError(f"part {i}")

    with pytest.raises(ValueError, match="part 1"):
        together([lambda: 0, lambda: fail(1), lambda: fail(2)], limit=3)
    assert together([], limit=4) == []


def test_an_interrupt_waits_until_every_part_has_cleaned_up():
    """Also the one that was being waited for: an interrupted Thread.join takes its thread for ended."""
    program = (
        "import signal, time\nfrom tasks.stopping import STOPPED\nfrom tasks.together import together\ncleaned = []\n"
        "def interrupt(*_):\n    raise KeyboardInterrupt\n"
        "def part():\n    STOPPED.get().wait(30)\n    time.sleep(1)\n    cleaned.append(True)\n"
        "signal.signal(signal.SIGALRM, interrupt)\nsignal.setitimer(signal.ITIMER_REAL, 0.5)\n"
        "try:\n    together([part] * 3, limit=2)\nexcept KeyboardInterrupt:\n    print(len(cleaned))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "2", done.stderr


def test_trials_of_a_recipe_that_has_parts_of_its_own_keep_their_steps_in_order(monkeypatch):
    """A sweep over a recipe with an ensemble: trials side by side, inside them one step after the other."""
    threads = {}

    class Quick(Run):
        def execute(self, stage, label, inputs, config, name_as, seed):
            threads[label] = threading.get_ident()
            time.sleep(0.3 if "1e-05" in label else 0.05)
            return {
                "outputs": {name: f"{label}.{name}" for name in get_stage(stage).SPEC.planned_outputs()},
                "metrics": {"accuracy": config.learning_rate * 1e4 if stage == "reward_model" else 0.1},
                "cached": False,
                "seconds": 0.0,
            }

    monkeypatch.setenv("POSTTRAIN_GPU_SLOTS", "3")
    run = Quick("sweep", 0, [])
    found = get_recipe("sweep").method(
        run,
        load_config(
            "sweep",
            {
                "what": "reward",
                "metric": "reward_1.accuracy",
                "settings": {"model": "(given.model)", "data.path": "(given.pairs)", "members": 2},
                "over": {"reward_model.learning_rate": [1e-5, 2e-5]},
            },
        ),
    )
    assert [step.label for step in run.steps] == [
        f"learning_rate-{rate}.{step}"
        for rate in ("1e-05", "2e-05")
        for step in ("ingest", "reward_0", "reward_1", "reward_combine")
    ]
    assert len({*threads.values()}) == 2 and len({threads[label] for label in threads if "1e-05" in label}) == 1
    assert (
        found["best"]["settings"] == {"reward_model.learning_rate": 2e-5}
        and found["trials"][0]["reward_1.accuracy"] == 0.2
    )


def test_as_many_as_there_are_slots_for_the_devices_of_a_stage(monkeypatch):
    monkeypatch.delenv("POSTTRAIN_DEVICES", raising=False)
    monkeypatch.setenv("POSTTRAIN_GPU_SLOTS", "8")
    assert at_once() == 8
    monkeypatch.setenv("POSTTRAIN_DEVICES", "4")
    assert at_once() == 2
    monkeypatch.setenv("POSTTRAIN_DEVICES", "16")
    assert at_once() == 1
    monkeypatch.delenv("POSTTRAIN_GPU_SLOTS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert at_once() == 1
