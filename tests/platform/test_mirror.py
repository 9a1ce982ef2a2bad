"""POSTTRAIN_MIRROR: every metric once and in order, beside the stage and never in its way."""

import subprocess
import sys
import threading
import time

import pytest

from tasks import mirror
from tasks.run import StageError, _events, run_stage

TOY, seen = "tests.toy_stage", []


def keep(run, step, metrics):
    seen.append((run, step, metrics, threading.current_thread().name))


def fail(run, step, metrics):
    seen.append(step)
    raise OSError("no network")


def hang(run, step, metrics):
    time.sleep(60)


@pytest.fixture(autouse=True)
def emptied():
    seen.clear()


def test_every_metric_comes_once_and_in_order(state_dir, monkeypatch, capfd):
    monkeypatch.setenv("POSTTRAIN_MIRROR", f"{__name__}:keep")
    result = run_stage(TOY, {}, {"steps": 6}, flow_run=None)
    assert [step for _, step, _, _ in seen] == [*range(6), None] and {name for *_, name in seen} == {"mirror"}
    run, _, metrics, _ = seen[-1]
    assert metrics["position"] == seen[-2][2]["position"] == result.metrics["position"]
    assert (run["stage"], run["label"], run["key"], run["run_id"], run["config"]["steps"]) == (
        "toy",
        "toy",
        result.key,
        None,
        6,
    )
    assert run_stage(TOY, {}, {"steps": 6}).cached and len(seen) == 7  # what does not run has no metrics
    with pytest.raises(StageError):
        run_stage(TOY, {}, {"steps": 6, "fail_at": 3})
    assert [step for _, step, _, _ in seen[7:]] == [0, 1, 2]
    assert "POSTTRAIN_MIRROR" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "target, said", (("fail", "OSError: no network"), ("absent", "AttributeError"), ("hang", "not waited for"))
)
def test_what_it_does_wrong_is_told_once_and_changes_nothing(target, said, state_dir, monkeypatch, capfd):
    monkeypatch.setattr(mirror, "LAST_SECONDS", 0.2)
    plain = run_stage(TOY, {}, {"steps": 5})
    monkeypatch.setenv("POSTTRAIN_MIRROR", f"{__name__}:{target}")
    result = run_stage(TOY, {}, {"steps": 5}, force=True)
    err = capfd.readouterr().err
    assert (
        not result.cached
        and result.outputs == plain.outputs
        and err.count("POSTTRAIN_MIRROR") == 1
        and said in err
        and "the stage goes on" in err
    )
    if target == "fail":
        assert seen == [*range(5), None]


def test_a_module_that_is_not_there_is_told_of(state_dir, monkeypatch, capfd):
    monkeypatch.setenv("POSTTRAIN_MIRROR", "no_such_module:log")
    assert run_stage(TOY, {}, {"steps": 2}).metrics and "no_such_module" in capfd.readouterr().err


def test_what_is_printed_into_the_channel_of_events_is_a_line_of_the_log(monkeypatch):
    """A JSON object that names no event ended the stage that a mirror was beside."""
    monkeypatch.setenv("POSTTRAIN_MIRROR", f"{__name__}:keep")
    lines = ('{"loss": 1.5}', "7", "plain", '{"event": "metric"}', '{"event": "log", "text": "its own"}')
    child = subprocess.Popen([sys.executable, "-c", f"print(*{lines}, sep=chr(10))"], stdout=subprocess.PIPE)
    told = []
    with mirror.beside(told.append, None) as tell:
        for event in _events(child, lambda: None):
            tell(event)
        tell({"text": "of nobody"})
    assert [event.get("text") for event in told] == ['{"loss": 1.5}', "7", "plain", None, "its own", "of nobody"]
    assert [event.get("event") for event in told] == ["log", "log", "log", "metric", "log", None]
    assert [call[1:3] for call in seen] == [(None, {})]
