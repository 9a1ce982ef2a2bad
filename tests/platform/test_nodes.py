"""A stage, and a recipe, on several machines: here two launchers of one machine that share a home, as two machines
would.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stages.spec import PROJECT_ROOT, ConfigError
from storage import leases, store
from storage.files import read_json, tree_digest
from tasks import nodes
from tasks.nodes import NodeError, Nodes, following, leading, nodes_of
from tasks.run import _for_others, _take_turn, prepare, run_stage
from tasks.stopping import STOPPED
from tests.evaluation.conftest import tiny  # noqa: F401
from tests.flows.test_together import prefect  # noqa: F401
from tests.serving import free_port
from tests.training.conftest import data  # noqa: F401


@pytest.mark.parametrize(
    "environment, given, found",
    [
        ({}, (None, None, None), None),
        ({}, (1, 0, "h:1"), None),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_NODEID": "1"}, (None, None, None), None),
        ({}, (2, 1, "first:29500"), (2, 1, "first", 29500)),
        ({}, (2, 1, "[fe80::1]:7"), (2, 1, "fe80::1", 7)),
        ({"SLURM_NODEID": "3", "RANK": "0", "MASTER_ADDR": "first"}, (4, None, None), (4, 3, "first", 29500)),
        ({"RANK": "1", "MASTER_ADDR": "first", "MASTER_PORT": "1234"}, (2, None, None), (2, 1, "first", 1234)),
        ({"RANK": "1"}, (2, 0, "a:2"), (2, 0, "a", 2)),
        ({}, (2, None, "h:1"), "--node-rank 0"),
        ({}, (2, 2, "h:1"), "0 to 1"),
        ({}, (2, 0, None), "--rendezvous HOST:PORT"),
        ({}, (2, 0, "host"), "HOST:PORT"),
        ({}, (None, 1, None), "--nodes N"),
        ({}, (None, None, "h:1"), "--nodes N"),
    ],
)
def test_which_node_this_is(environment, given, found, monkeypatch):
    for name in (*nodes.NUMBERS, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if isinstance(found, str):
        with pytest.raises(ConfigError, match=found):
            nodes_of(*given)
    else:
        one = nodes_of(*given)
        assert found == (one and (one.count, one.rank, one.address, one.port))


def test_a_node_that_ended_before_this_one_began_is_not_held_against_it(tmp_path, monkeypatch):
    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "home"))
    first, second = nodes.Nodes(2, 0, "h", 1), nodes.Nodes(2, 1, "h", 1)
    second.begin(tmp_path)
    second.end(tmp_path, "out of memory")
    first.begin(tmp_path)
    assert first.lost(tmp_path) is None
    again = nodes.Nodes(2, 1, "h", 1)
    again.begin(tmp_path)
    assert first.lost(tmp_path) is None and again.lost(tmp_path) is None
    again.end(tmp_path, "out of memory")
    assert (
        first.lost(tmp_path)
        == f"node 1 (process {os.getpid()} on {socket.gethostname()}) failed: out of memory"
        == first.blamed(tmp_path, "Connection closed by peer")
    )
    assert first.blamed(tmp_path, "the loss was not finite") is None
    entry = read_json(tmp_path / "nodes/1.json")
    (tmp_path / "nodes/1.json").write_text(
        json.dumps({**entry, "state": "running", "owner": {**leases.this_process(), "start": 1.0}})
    )
    assert first.lost(tmp_path).endswith(" died")
    again.end(tmp_path, None)
    assert first.lost(tmp_path) is None


def test_a_node_that_ends_while_node_0_clears_up_has_ended_well(tmp_path, monkeypatch):
    """The directory of its last word was gone while that was written."""
    second = nodes.Nodes(2, 1, "h", 1)
    second.begin(tmp_path)

    def cleared(path, value):
        shutil.rmtree(path.parent)
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(nodes, "atomic_write_json", cleared)
    second.end(tmp_path, None)
    assert not (tmp_path / "nodes").exists()


QUICK = {
    "GLOO_SOCKET_IFNAME": "lo",
    "POSTTRAIN_CHECKPOINT_SECONDS": "0",
    "POSTTRAIN_TRACKING_WAIT_SECONDS": "1",
}


#: The command line, with one more recipe.
PROGRAM = """
from tests.processes import share
share()
from flows import recipe
recipe.RECIPES.own["two_and_merged"] = "tests.platform.two_and_merged"
from flows.cli import main
main()
"""


def said(process):
    """(exit code, the JSON object of the last line, what it wrote on stderr) of a command, once it has ended."""
    out, err = process.communicate(timeout=900)
    return process.returncode, json.loads(out.splitlines()[-1]) if out.strip() else {}, err


def test_two_nodes_compute_what_one_does_and_one_that_dies_ends_the_other(tiny, data, tmp_path, monkeypatch, forks):  # noqa: F811
    """Two nodes of one rank each against one of two: the same bytes, also after node 1 was killed in the middle and
    both were started again.
    """
    forks.hold()
    port = free_port()
    environment = {**os.environ, **QUICK}
    # as some launchers leave them; not about the stage's ranks
    environment |= {"RANK": "7", "WORLD_SIZE": "9", "LOCAL_RANK": "3"}
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        "stage",
        "sft",
        "--input",
        f"model={tiny['policy']}",
        "--input",
        f"data={data['demonstrations']}",
        "--json",
        *(
            f"--set={pair}"
            for pair in ("learning_rate=1e-3", "batch_size=8", "max_steps=30", "max_length=64", "num_train_epochs=5")
        ),
    ]

    def start(home, *more):
        return subprocess.Popen(
            [*command, *more],
            env={**environment, "POSTTRAIN_HOME": str(tmp_path / home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def both():
        return [
            start("two", "--nodes", "2", "--node-rank", str(i), "--rendezvous", f"127.0.0.1:{port}") for i in (0, 1)
        ]

    pair = both()
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not any(
        len(p.read_text().splitlines()) >= 3 for p in (tmp_path / "two").glob("work/*/metrics.jsonl")
    ):
        assert all(one.poll() is None for one in pair), [said(one) for one in pair if one.poll() is not None]
        time.sleep(0.02)
    pair[1].send_signal(signal.SIGKILL)
    code, value, err = said(pair[0])
    assert (
        code == 1
        and f"node 1 (process {pair[1].pid} on {socket.gethostname()}) died" in value["error"]
        and "same command" in value["error"]
    ), (value, err)
    pair[1].communicate()
    (killed,) = (path for path in (tmp_path / "two").glob("work/*") if (path / "metrics.jsonl").exists())
    (code, first, err), (other, second, more) = map(said, both())
    assert (code, other) == (0, 0), (err, more)
    assert (
        first["outputs"] == second["outputs"]
        and first["metrics"] == second["metrics"]
        and first["key"] == second["key"]
    )
    code, one, err = said(start("one", "--devices", "2"))
    assert code == 0, err
    path = {}
    for home, value in (("one", one), ("two", first)):
        monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / home))
        path[home] = store.resolve(value["outputs"]["model"]).path
    assert tree_digest(path["one"]) == tree_digest(path["two"]) and Path(path["two"]).is_relative_to(tmp_path / "two")
    (alone,) = (path for path in (tmp_path / "one").glob("work/*") if (path / "metrics.jsonl").exists())
    assert (alone / "metrics.jsonl").read_bytes() == (killed / "metrics.jsonl").read_bytes()
    # a node that comes when all is done takes what is there
    code, late, err = said(start("two", "--nodes", "2", "--node-rank", "1", "--rendezvous", f"127.0.0.1:{port}"))
    assert code == 0 and late["outputs"] == first["outputs"], err


class Others:
    """Threads that follow node 0 of a recipe at one rendezvous."""

    def __init__(self):
        self.turns, self.ended, self.there = {1: [], 2: []}, {}, threading.Semaphore(0)

    def start(self, rank, what="run it", meanwhile=lambda follower, turn: None):
        def go():
            try:
                with following(Nodes(3, rank, "h", 1), what, lambda text: self.there.release()) as follower:
                    for turn in follower.turns():
                        self.turns[rank].append(turn["label"])
                        meanwhile(follower, turn)
                self.ended[rank] = follower.code
            except BaseException as error:
                self.ended[rank] = error

        thread = threading.Thread(target=go, daemon=True)
        thread.start()
        assert self.there.acquire(timeout=60)
        return thread


def test_followers_take_part_in_what_node_0_says_and_end_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "home"))
    others, stop, order = Others(), threading.Event(), []
    limit, token = threading.Timer(120, stop.set), STOPPED.set(stop)
    limit.start()
    who = f"node %d (process {os.getpid()} on {socket.gethostname()})"

    def slow(follower, turn):
        while not follower.over(turn):
            time.sleep(0.01)
        time.sleep(0.5)
        order.append(f"back from {turn['label']}: {follower.failed(turn)}")

    def failing(follower, turn):
        follower.error = "out of memory" if turn["label"] == "a" else None

    try:
        threads = [others.start(1, meanwhile=failing), others.start(2, meanwhile=slow)]
        with leading(Nodes(3, 0, "h", 1), "run it", print) as leader:
            for label in "ab":
                with leader.turn({"label": label}) as turn:
                    order.append(label)
                    turn.begin(tmp_path)
                    if label == "a":
                        while (told := turn.lost(tmp_path)) is None or not others.turns[2]:  # which may see it later
                            assert not stop.wait(0.02)
                        assert told == who % 1 + " failed: out of memory"
                    else:  # which one stage failed of is not held against the next
                        while not all("b" in turns for turns in others.turns.values()):
                            assert turn.lost(tmp_path) is None and not stop.wait(0.02)
                    turn.end(tmp_path, "it ended" if label == "a" else None)
            leader.code = 3
        for thread in threads:
            thread.join(60)
        assert others.ended == {1: 3, 2: 3} and others.turns == {1: ["a", "b"], 2: ["a", "b"]}
        assert order == ["a", "back from a: it ended", "b", "back from b: None"]

        # what the run before left is not taken for word of this one; a node with another command
        threads = [others.start(1), others.start(2, what="run that")]
        with pytest.raises(ConfigError, match="node 2 was given `posttrain run that --nodes 3`.*same command"):
            with leading(Nodes(3, 0, "h", 1), "run it", print):
                pass
        for thread in threads:
            thread.join(60)
        assert all(isinstance(others.ended[i], NodeError) for i in (1, 2))

        # one that has ended is missed by the next stage, and the others are told what came of the run
        def broken(follower, turn):
            raise ValueError("a defect")

        threads = [others.start(1, meanwhile=broken), others.start(2)]
        with pytest.raises(RuntimeError, match="no room"):
            with leading(Nodes(3, 0, "h", 1), "run it", print) as leader:
                with leader.turn({"label": "a"}) as turn:
                    turn.begin(tmp_path)
                    threads[0].join(60)
                    turn.end(tmp_path, None)
                with leader.turn({"label": "b"}) as turn:
                    assert turn.lost(tmp_path) == who % 1 + " failed: a defect"
                raise RuntimeError("no room\nleft")
        threads[1].join(60)
        assert str(others.ended[2]).startswith(who % 0 + " failed: no room; node 2 ended with it"), others.ended
    finally:
        limit.cancel()
        STOPPED.reset(token)


def test_nodes_do_not_wait_for_ever_for_one_that_does_not_come(tmp_path, monkeypatch):
    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("POSTTRAIN_NODES_WAIT_SECONDS", "0.5")
    with pytest.raises(NodeError, match="node 1, 2 has not come in 0.5 s: .*POSTTRAIN_NODES_WAIT_SECONDS"):
        with leading(Nodes(3, 0, "h", 1), "run it", print):
            pass
    others = Others()
    others.start(1).join(60)  # what node 0 left behind when it gave up is none of its business
    assert str(others.ended[1]).startswith("node 0 has not come in 0.5 s: it was not started with the same --rendez")


def test_a_follower_refuses_what_is_another_stage_on_its_machine(tiny, data, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "home"))
    told = _for_others(prepare("sft", {"model": tiny["policy"], "data": data["demonstrations"]}, {}), "sft", 1)
    other = {**told["inputs"], "data": {**told["inputs"]["data"], "digest": "0"}}
    for change, why in (
        ({"code": "0"}, r"node 0: its code or a library \(install the same version\) differ"),
        ({"inputs": other}, rf"node 0: input data \({data['demonstrations']}\) differ"),
        ({"seed": 1}, "node 0: its settings differ"),
    ):
        with pytest.raises(ConfigError, match=f"stage sft is another one on this machine than on {why}"):
            _take_turn({**told, "key": told["key"] if "seed" in change else "0", **change}, None, print)


def test_a_recipe_on_two_nodes_gives_what_one_does_whichever_of_them_is_killed(
    tiny, prefect, tmp_path, monkeypatch, forks
):  # noqa: F811
    """Two trainings at the same time, which need the same port, and a stage of one device. The raw file is where node 0
    is and nowhere else.
    """
    forks.hold()
    port, far, home = free_port(), tmp_path / "far", tmp_path / "two"
    far.mkdir()
    (tmp_path / "demos.jsonl").write_text(
        "".join(json.dumps({"prompt": f"say {i}", "completion": f"it is {i}"}) + "\n" for i in range(40))
    )
    settings = {"batch_size": 8, "max_steps": 30, "max_length": 64, "num_train_epochs": 10, "learning_rate": 1e-3}
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
    environment |= {**QUICK, "POSTTRAIN_GPU_SLOTS": "2", "PYTHONPATH": str(PROJECT_ROOT), "POSTTRAIN_HOME": str(home)}
    environment |= {"PREFECT_API_URL": prefect, "DO_NOT_TRACK": "true"}
    command = [sys.executable, "-c", PROGRAM, "run", "two_and_merged", f"model={tiny['policy']}"]
    command += ["demonstrations=demos.jsonl", *(f"sft.{key}={value}" for key, value in settings.items()), "--json"]
    command += ["--nodes", "2", "--rendezvous", f"127.0.0.1:{port}", "--node-rank"]

    def both():
        how = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return [subprocess.Popen([*command, str(i)], cwd=place, **how) for i, place in enumerate((tmp_path, far))]

    def killed(which, when):
        """The other one's exit code, what it said, and what it is to say of the one that was killed."""
        pair = both()
        while not when(*pair):
            assert all(one.poll() is None for one in pair), [said(one) for one in pair if one.poll() is not None]
            time.sleep(0.02)
        pair[which].send_signal(signal.SIGKILL)
        pair[which].communicate()
        return *said(pair[1 - which]), f"node {which} (process {pair[which].pid} on {socket.gethostname()}) died"

    def trains(first, second):
        return any(path.read_text().count("\n") > 2 for path in home.glob("work/*/metrics.jsonl"))

    def met(first, second):
        files = [read_json(home / f"nodes/127.0.0.1-{port}/{i}.json", {}) for i in (0, 1)]
        return files[1].get("leader") == files[0].get("token") and files[1]["owner"]["pid"] == second.pid

    code, value, err, who = killed(0, trains)
    assert code == 1 and value["error"].startswith(f"{who}; node 1 ended with it") and "same command" in err
    code, value, err, who = killed(1, met)  # missed by the first stage that is to be shared
    assert code == 1 and who in value["error"] and "same command" in value["error"], (value, err)
    (code, first, err), (other, second, more) = map(said, both())
    assert (code, other) == (0, 0), (err, more)
    fresh = [step["step"] for step in first["steps"] if not step["cached"]]
    assert (
        fresh[-1] == "merge" and second["took_part_in"] and {*second["took_part_in"]} <= {"sft_0", "sft_1"} & {*fresh}
    )
    monkeypatch.setenv("POSTTRAIN_HOME", str(tmp_path / "one"))
    inputs = {"model": tiny["policy"], "data": str(tmp_path / "demos.jsonl")}
    alone = [run_stage("sft", inputs, settings, seed=i, devices=2) for i in (0, 1)]
    assert [one.outputs for one in alone] == [step["outputs"] for step in first["steps"][:2]]
