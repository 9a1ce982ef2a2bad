"""SIGKILL of the stage process, of its parent, and of both, at random moments: the same command again ends with the
same bytes.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest

from stages.spec import PROJECT_ROOT
from storage import store
from storage.files import read_json, tree_digest
from tasks.run import StageError, run_stage

CONFIG = {"steps": 24, "save_every": 5, "sleep": 0.02}
TOY = "tests.toy_stage"
CODE = (
    f"import json, sys; from tasks.run import run_stage; run_stage({TOY!r}, {{}}, json.loads(sys.argv[1]), seed=3,"
    " on_event=lambda e: e['event'] == 'started' and print(e['pid'], e['workdir'], flush=True))"
)


def bytes_of(result, home):
    work = home / "work" / result.key
    return {
        "data": tree_digest(store.resolve(result.outputs["data"]).path),
        "model": tree_digest(result.paths["model"]),
        "metrics": (work / "metrics.jsonl").read_bytes(),
        "perf": (work / "perf.jsonl").read_bytes(),
        "summary": result.metrics,
        "reports": [p.read_bytes() for p in sorted((work / "reports").iterdir())],
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    home = tmp_path_factory.mktemp("undisturbed")
    before = {k: os.environ.get(k) for k in ("POSTTRAIN_HOME", "POSTTRAIN_TRACKING")}
    os.environ.update(POSTTRAIN_HOME=str(home), POSTTRAIN_TRACKING="off")
    try:
        return bytes_of(run_stage(TOY, {}, CONFIG, seed=3), home)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def gone(pid, seconds=30):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def start_and_kill(victim, lines, extra):
    """Start the stage in a process of its own and kill after ``lines`` metric lines (and ``extra`` seconds)."""
    parent = subprocess.Popen(
        [sys.executable, "-c", CODE, json.dumps(CONFIG)],
        cwd=PROJECT_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    first = parent.stdout.readline().split()
    if not first:  # it was already finished
        return parent.wait() == 0
    child, workdir = int(first[0]), first[1]
    metrics = os.path.join(workdir, "metrics.jsonl")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and parent.poll() is None:
        if lines == 0 or (os.path.exists(metrics) and open(metrics, "rb").read().count(b"\n") >= lines):
            break
        time.sleep(0.002)
    time.sleep(extra)
    for pid in {"parent": [parent.pid], "child": [child], "both": [parent.pid, child]}[victim]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    parent.wait(timeout=60)
    assert gone(child), "the stage process outlived its parent"
    return False


@pytest.mark.parametrize("victim", ["child", "parent", "both"])
def test_kill9_equals_uninterrupted(state_dir, undisturbed, victim):
    dice = random.Random(f"{victim} {os.environ.get('POSTTRAIN_TEST_SEED', '0')}")
    for lines in sorted(dice.randrange(0, CONFIG["steps"]) for _ in range(3)):
        start_and_kill(victim, lines, dice.random() * 0.03)
    result = run_stage(TOY, {}, CONFIG, seed=3)
    assert bytes_of(result, state_dir) == undisturbed
    assert run_stage(TOY, {}, CONFIG, seed=3).cached


def test_killed_child_is_reported_as_such(state_dir):
    def kill(event):
        if event["event"] == "started":
            os.kill(event["pid"], signal.SIGKILL)

    with pytest.raises(StageError, match="SIGKILL"):
        run_stage(TOY, {}, {"steps": 3}, on_event=kill)


def test_resume_uses_the_checkpoint_and_survives_its_damage(state_dir, undisturbed):
    start_and_kill("both", 16, 0.0)
    work = next((state_dir / "work").iterdir())
    newest = max((work / "checkpoints").glob("step-*"))
    (newest / "position").write_bytes(b"")
    (work / "metrics.jsonl").open("a").write('{"step": 99, "metr')  # a torn line
    logs = []
    result = run_stage(TOY, {}, CONFIG, seed=3, on_event=lambda e: logs.append(e.get("text", "")))
    assert any(text.startswith("resuming from the checkpoint") for text in logs)
    assert bytes_of(result, state_dir) == undisturbed
    assert read_json(result.record_path)["attempts"] == 2


def test_lost_dataset_part_means_an_older_checkpoint(state_dir, undisturbed):
    start_and_kill("both", 16, 0.0)
    work = next((state_dir / "work").iterdir())
    max((work / "out" / "data").glob("part-*.parquet")).unlink()
    assert bytes_of(run_stage(TOY, {}, CONFIG, seed=3), state_dir) == undisturbed


def test_killed_forced_run_continues(state_dir):
    first = run_stage(TOY, {}, {"steps": 8, "save_every": 2})
    killed = []

    def kill(event):
        if event["event"] == "started":
            killed.append(event["pid"])
        if event["event"] == "metric" and event["step"] == 5:
            os.kill(killed[0], signal.SIGKILL)

    with pytest.raises(StageError):
        run_stage(TOY, {}, {"steps": 8, "save_every": 2, "sleep": 0.05}, force=True, on_event=kill)
    logs = []
    again = run_stage(
        TOY, {}, {"steps": 8, "save_every": 2}, force=True, on_event=lambda e: logs.append(e.get("text", ""))
    )
    assert any(text.startswith("resuming") for text in logs) and again.outputs == first.outputs
