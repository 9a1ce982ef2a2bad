"""A stage on several machines that share ``POSTTRAIN_HOME``: the same command is given on each, with its number.

Node 0 runs and publishes the stage as always. The others compute the same key, start their ranks in the same work
directory in one process group, and take the record that node 0 writes. Each keeps ``nodes/<number>.json`` there: who it
is and how it ended, so that when one dies the others end and say which.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.spec import ConfigError
from storage import leases
from storage.files import atomic_write_json, read_json

#: Variables that launchers set for processes of theirs and that would make a stage's process take itself for a rank.
RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
#: Where launchers tell the number of a node, and how long to wait for a node's own word when the connection to it
#: broke.
NUMBERS, WORD_SECONDS = ("SLURM_NODEID", "NODE_RANK", "JOB_COMPLETION_INDEX", "RANK"), 10.0
_BROKEN = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|gloo|nccl|timed out|socket|peer|SIGABRT", re.IGNORECASE
)


@dataclass
class Nodes:
    """This machine among ``count``: its number ``rank``, and where node 0 listens."""

    count: int
    rank: int
    address: str
    port: int
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    old: dict[int, str] = field(default_factory=dict)

    def spec(self) -> dict[str, Any]:
        """For the stage's process."""
        return {"count": self.count, "rank": self.rank, "address": self.address, "port": self.port}

    def file(self, name: str) -> str:
        """Name of a file of which every node has its own; node 0's is as without nodes."""
        stem, _, end = name.rpartition(".")
        return name if self.rank == 0 else f"{stem}-node{self.rank}.{end}"

    def begin(self, workdir: Path) -> None:
        """From now on the others can see this node; what is left of nodes that ended before does not count."""
        self.old = {i: entry["token"] for i, entry in self._others(workdir) if _end_of(i, entry)}
        self._write(workdir, "running")

    def end(self, workdir: Path, error: str | None) -> None:
        self._write(workdir, "failed" if error else "finished", error)

    def _write(self, workdir: Path, state: str, error: str | None = None) -> None:
        (workdir / "nodes").mkdir(parents=True, exist_ok=True)
        atomic_write_json(
            workdir / "nodes" / f"{self.rank}.json",
            {"token": self.token, "owner": leases.owner(), "state": state, "error": error},
        )

    def _others(self, workdir: Path) -> list[tuple[int, dict[str, Any]]]:
        found = ((i, read_json(workdir / "nodes" / f"{i}.json", None)) for i in range(self.count) if i != self.rank)
        return [(i, entry) for i, entry in found if entry]

    def lost(self, workdir: Path) -> str | None:
        """Which other node has failed or died since this one began; None while all run."""
        return next(
            (
                told
                for i, entry in self._others(workdir)
                if self.old.get(i) != entry["token"] and (told := _end_of(i, entry))
            ),
            None,
        )

    def unpublished(self, workdir: Path) -> str | None:
        """Whether node 0 ended without a record of what all have computed."""
        entry = read_json(workdir / "nodes" / "0.json", {})
        return (
            None
            if not entry or leases.alive(entry["owner"])
            else (
                f"node 0 (process {entry['owner'].get('pid')} on {entry['owner'].get('host')}) ended before it"
                " published the result"
            )
        )

    def blamed(self, workdir: Path, message: str) -> str | None:
        """The node behind an error of this one that is only a broken connection, which may tell of it a moment later;
        None where the error is this node's own.
        """
        deadline = time.monotonic() + WORD_SECONDS
        while _BROKEN.search(message):
            told = self.lost(workdir)
            if told or time.monotonic() > deadline:
                return told
            time.sleep(0.2)
        return None


def _end_of(i: int, entry: dict[str, Any]) -> str | None:
    """What is to be said of a node that did not end well; None of one that runs or has finished."""
    who = f"node {i} (process {entry['owner'].get('pid')} on {entry['owner'].get('host')})"
    if entry["state"] == "failed":
        return f"{who} failed: {entry['error']}"
    return None if entry["state"] == "finished" or leases.alive(entry["owner"]) else f"{who} died"


def nodes_of(count: int | None, rank: int | None, rendezvous: str | None) -> Nodes | None:
    """What ``--nodes``, ``--node-rank`` and ``--rendezvous`` say, the last two with what Slurm, Kubernetes or
    torchrun's variables say in their place; None for one machine.

    Raises:
        ConfigError: they do not fit together.
    """
    if count in (None, 1):
        if rank or rendezvous and count is None:
            raise ConfigError(
                "--node-rank and --rendezvous are about one of several machines; write --nodes N too, or leave them out"
            )
        return None
    if rank is None:
        told = next((os.environ[name] for name in NUMBERS if os.environ.get(name, "").isdigit()), None)
        if told is None:
            raise ConfigError(
                f"--nodes {count}: which of them is this? write --node-rank 0 on the first, 1 on the next (or set"
                f" {', '.join(NUMBERS[:3])} or {NUMBERS[3]})"
            )
        rank = int(told)
    if not 0 <= rank < count:
        raise ConfigError(f"--node-rank {rank}: the {count} nodes are numbered 0 to {count - 1}")
    if rendezvous is None:
        if not os.environ.get("MASTER_ADDR"):
            raise ConfigError(
                f"--nodes {count}: where does node 0 listen? write --rendezvous HOST:PORT, the same on every node, or"
                " set MASTER_ADDR and MASTER_PORT; under Slurm HOST is $(scontrol show hostnames | head -n 1)"
            )
        rendezvous = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '29500')}"
    address, _, port = rendezvous.rpartition(":")
    if not address or not port.isdigit():
        raise ConfigError(
            f"--rendezvous {rendezvous!r}: write HOST:PORT, a name or address of node 0 that the others reach and a"
            " free port of it"
        )
    return Nodes(count, rank, address.strip("[]"), int(port))
