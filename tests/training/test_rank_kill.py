"""SIGKILL of one rank of a stage, at any step and inside the write of a checkpoint: the stage fails, nothing is left over, and the same
command ends with the same bytes."""

import random
import threading
import time
from pathlib import Path

import psutil
import pytest

from storage.files import tree_digest
from tasks.run import StageError, run_stage
from tests.crash.conftest import state_dir  # noqa: F401

CONFIG = {"learning_rate": 1e-3, "batch_size": 8, "max_steps": 12, "max_length": 64, "sharding": "full", "ema_decay": 0.5}


def ranks_of(pid: int) -> dict[int, psutil.Process]:
    """The rank processes below a stage's launcher."""
    found = {}
    for child in psutil.Process(pid).children(recursive=True):
        try:
            rank = child.environ().get("RANK")
        except psutil.Error:
            continue
        if rank is not None:
            found.setdefault(int(rank), child)  # children of a rank inherit the variable and come behind it
    return found


def kill_one(inputs, config, victim: int, step: int, inside_write: bool) -> tuple[str, bool]:
    """Kill a rank behind a step (0: while the ranks still look for each other), or in the next write of a checkpoint after it: (what the
    stage said, whether a write was cut short)."""
    seen: dict = {}

    def kill():
        deadline = time.monotonic() + 60
        while len(seen["ranks"]) < 2 and time.monotonic() < deadline:
            seen["ranks"] = ranks_of(seen["pid"])
            time.sleep(0.01)
        folder = Path(seen["workdir"], "checkpoints")
        while inside_write and time.monotonic() < deadline and not any(folder.glob(".tmp-*")):
            time.sleep(0.0002)
        seen["ranks"][victim].kill()

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
        assert process.pid == psutil.Process().pid or not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return str(failure.value), any(Path(seen["workdir"], "checkpoints").glob(".tmp-*"))


@pytest.mark.parametrize("sharding", ("full", "none"))
def test_a_killed_rank_takes_the_stage_down_and_the_next_run_ends_with_the_same_bytes(sharding, tiny, data, state_dir, monkeypatch, tmp_path):
    inputs, config = {"model": tiny["policy"], "data": data["demonstrations"]}, {**CONFIG, "sharding": sharding}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("POSTTRAIN_CHECKPOINT_SECONDS", "0")
    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "undisturbed"))
    whole = run_stage("sft", inputs, config, seed=3, devices=2)
    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "killed"))
    dice = random.Random(sharding)
    for victim, step in ((1, 0), (1, dice.randrange(1, 4))):
        message, _ = kill_one(inputs, config, victim, step, inside_write=False)
        assert f"rank {victim} of 2 was ended by SIGKILL" in message and "same command" in message
    cut = [kill_one(inputs, config, victim, step, inside_write=True) for victim, step in ((1, 4), (0, 6))]
    assert all(f"rank {v} of 2 was ended by SIGKILL" in text for v, (text, _) in zip((1, 0), cut))
    assert any(partial for _, partial in cut), "no kill hit a write"
    result = run_stage("sft", inputs, config, seed=3, devices=2)  # waits for no slot of the dead
    assert result.key == whole.key and tree_digest(result.paths["model"]) == tree_digest(whole.paths["model"])
    assert result.metrics == whole.metrics
    metrics = [(Path(tmp_path, home, "work", result.key, "metrics.jsonl")).read_bytes() for home in ("undisturbed", "killed")]
    assert metrics[0] == metrics[1]
    assert not any(Path(tmp_path, "killed", "work", result.key, "checkpoints").glob(".tmp-*"))


def test_the_error_told_is_that_of_the_rank_that_failed_first(tiny, data, state_dir, monkeypatch):
    """A refusal reaches the user as it is, not as the broken connection that the other rank saw."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(StageError, match="validation gives no such metric") as failure:
        run_stage("sft", {"model": tiny["policy"], "data": data["demonstrations"]}, {**CONFIG, "eval_every": 2, "select_by": "beauty"}, devices=2)
    assert failure.value.kind == "TrainingError"
