"""A stage on several machines: here two launchers of one machine that share a home, as two machines would."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.spec import ConfigError
from storage import leases, store
from storage.files import read_json, tree_digest
from tasks import nodes
from tasks.nodes import nodes_of
from tests.evaluation.conftest import tiny  # noqa: F401
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


def test_two_nodes_compute_what_one_does_and_one_that_dies_ends_the_other(tiny, data, tmp_path, monkeypatch):  # noqa: F811
    """Two nodes of one rank each against one of two: the same bytes, also after node 1 was killed in the middle and
    both were started again.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "POSTTRAIN_CHECKPOINT_SECONDS": "0",
        "POSTTRAIN_TRACKING_WAIT_SECONDS": "1",
    }
    # as some launchers leave them; not about the stage's ranks
    environment |= {"RANK": "7", "WORLD_SIZE": "9", "LOCAL_RANK": "3"}
    command = [
        sys.executable,
        "-m",
        "flows.cli",
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

    def said(process):
        out, err = process.communicate(timeout=400)
        return process.returncode, json.loads(out.splitlines()[-1]) if out.strip() else {}, err

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
