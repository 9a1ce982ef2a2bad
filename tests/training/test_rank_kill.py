"""SIGKILL of one rank of a stage, at any step and inside the write of a checkpoint: the stage fails, nothing is left
over, and the same command ends with the same bytes."""

import contextlib
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from stages.running import process as stage_process
from storage.files import atomic_write_json, read_json, tree_digest
from tasks.run import StageError, prepare, run_stage
from tests.crash.conftest import state_dir  # noqa: F401

CONFIG = {
    "learning_rate": 1e-3,
    "batch_size": 8,
    "max_steps": 12,
    "max_length": 64,
    "sharding": "full",
    "ema_decay": 0.5,
}


def ranks_of(pid: int) -> dict[int, psutil.Process]:
    """The rank processes below a stage's launcher, as ``top`` shows them."""
    found = {}
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):
            if child.name().startswith("rank "):
                found[int(child.name().split()[1])] = child
    return found


def kill_one(inputs, config, victim: int, step: int, inside_write: bool) -> tuple[str, bool]:
    """Kill a rank behind a step (0: while the ranks still look for each other), or in a write of a checkpoint after it:
    (what the stage said, whether a write was cut short).

    Inside a write, the other rank is killed, too, once the launcher knows of the first: it might have all that it needs
    to end the write.
    """
    seen: dict = {}

    def kill():
        deadline = time.monotonic() + 60
        while len(seen["ranks"]) < 2 and time.monotonic() < deadline:
            seen["ranks"] = ranks_of(seen["pid"])
            time.sleep(0.01)
        folder, ranks = Path(seen["workdir"], "checkpoints"), seen["ranks"]
        while inside_write:  # halted for each look: on a busy machine a write is over before this thread is run again
            for rank in ranks.values():
                rank.suspend()
            while any(rank.status() != psutil.STATUS_STOPPED for rank in ranks.values()):
                time.sleep(0.0002)
            if any(folder.glob(".tmp-*")) or time.monotonic() > deadline:
                break
            for rank in ranks.values():
                rank.resume()
            time.sleep(0.002)
        ranks[victim].kill()
        if inside_write:
            ranks[victim].wait(30)
            ranks[1 - victim].kill()

    def listen(event):
        if event["event"] == "started":
            seen.update(pid=event["pid"], workdir=event["workdir"])
        if event.get("step", 0) == step and event["event"] == ("metric" if step else "started") and "ranks" not in seen:
            seen["ranks"] = {}
            threading.Thread(target=kill).start()

    with pytest.raises(StageError) as failure:
        run_stage("sft", inputs, config, seed=3, devices=2, on_event=listen)
    assert len(seen["ranks"]) == 2
    for process in (*seen["ranks"].values(), psutil.Process()):  # ours has no child left either
        assert (
            process.pid == psutil.Process().pid or not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        )
    return str(failure.value), any(Path(seen["workdir"], "checkpoints").glob(".tmp-*"))


@pytest.mark.parametrize("sharding, first, writer", [("full", 0, 1), ("none", random.Random(1).randrange(1, 4), 0)])
def test_a_killed_rank_takes_the_stage_down_and_the_next_run_ends_with_the_same_bytes(
    sharding, first, writer, tiny, data, state_dir, monkeypatch, tmp_path, forks
):
    """first: the step behind which a rank is killed; writer: the rank that is killed in a write."""
    inputs, config = {"model": tiny["policy"], "data": data["demonstrations"]}, {**CONFIG, "sharding": sharding}
    monkeypatch.setenv("POSTTRAIN_CHECKPOINT_SECONDS", "0")
    prepared = prepare("sft", inputs, config, seed=3)
    whole = tmp_path / "undisturbed"
    spec = {
        "stage": "sft",
        "key": prepared.key,
        "config": prepared.resolved,
        "seed": 3,
        "device": "cpu",
        "devices": 2,
        "workdir": str(whole),
        "inputs": {name: one.to_dict() for name, one in prepared.inputs.items()},
    }
    atomic_write_json(tmp_path / "SPEC.json", spec)
    forks.run(tmp_path / "SPEC.json", ranks=2)
    message, _ = kill_one(inputs, config, 1, first, inside_write=False)
    assert "rank 1 of 2 was ended by SIGKILL" in message and "same command" in message
    message, cut = kill_one(inputs, config, writer, 4, inside_write=True)
    assert f"rank {writer} of 2 was ended by SIGKILL" in message and cut
    result = run_stage("sft", inputs, config, seed=3, devices=2)  # waits for no slot of the dead
    undisturbed = read_json(whole / "result.json")
    assert result.key == prepared.key and tree_digest(result.paths["model"]) == tree_digest(whole / "out" / "model")
    assert result.metrics == undisturbed["summary"]
    killed = state_dir / "work" / result.key
    assert (killed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert not any((killed / "checkpoints").glob(".tmp-*"))


def test_the_error_told_is_that_of_the_rank_that_failed_first(tiny, data, state_dir):
    """A refusal reaches the user as it is, not as the broken connection that the other rank saw."""
    with pytest.raises(StageError, match="validation gives no such metric") as failure:
        run_stage(
            "sft",
            {"model": tiny["policy"], "data": data["demonstrations"]},
            {**CONFIG, "eval_every": 2, "select_by": "beauty"},
            devices=2,
        )
    assert failure.value.kind == "TrainingError"


def test_a_stage_that_is_asked_to_stop_ends_its_ranks(tiny, data, spec, forks):
    made = spec(
        "sft",
        {**CONFIG, "max_steps": 5000, "num_train_epochs": 5000},
        {"model": tiny["policy"], "data": data["demonstrations"]},
        "stopped",
    )
    Path(spec.path("stopped")).write_text(json.dumps({**made, "devices": 2}))
    (process,) = forks.start(spec.path("stopped")).processes
    metrics, deadline = Path(made["workdir"], "metrics.jsonl"), time.monotonic() + 120
    while not metrics.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    ranks = ranks_of(process.forked.pid)
    assert sorted(ranks) == [0, 1], process.said()
    os.kill(process.forked.pid, signal.SIGTERM)
    assert process.forked.wait(60) == 143 and "Terminated: the stage was asked to stop" in process.said()
    assert psutil.wait_procs(ranks.values(), timeout=60)[1] == []


@pytest.mark.parametrize(
    "failed, text",
    [
        ({1: 3}, "rank 1 of 2 ended with status 3 and no error message"),
        ({0: -signal.SIGABRT, 1: -signal.SIGKILL}, "rank 1 of 2 was ended by SIGKILL"),
        ({0: -signal.SIGABRT}, "rank 0 of 2 was ended by SIGABRT"),
    ],
)
def test_how_a_rank_ended_is_told(failed, text, tmp_path, monkeypatch):
    """An aborted rank is named only where no other one was killed: a broken connection may have aborted it."""
    said = []
    monkeypatch.setattr("stages.running.launch.launch", lambda *args, **more: failed)
    monkeypatch.setattr(stage_process, "_line_emitter", lambda: said.append)
    assert stage_process._launch_ranks("SPEC.json", "sft", 2, tmp_path) == 1
    assert [e["type"] for e in said] == ["RankDied"] and text in said[0]["message"]
