"""A stage, or a recipe, on several machines that share ``POSTTRAIN_HOME``: the same command is given on each, with its
number.

Node 0 runs and publishes a stage as always. The others compute the same key, start their ranks in the same work
directory in one process group, and take the record that node 0 writes. Each keeps ``nodes/<number>.json`` there: who it
is and how it ended, so that when one dies the others end and say which.

Node 0 runs a recipe as always, too. Around it (:func:`leading`) it keeps ``HOME/nodes/<rendezvous>/0.json``, which names
the stage that is shared now: refs, settings, seed and devices. The others (:func:`following`) keep
``<number>.json`` beside it and take part in what they read there:

    a follower writes who it is -> node 0, which waits for all, lists them: a follower believes only what lists it, so
    nothing that an earlier run left -> node 0 begins a turn, numbered from 1; when it is over it says so -> the
    followers, whether they computed or found it over, write its number as done, and their error -> only when all
    have does the next turn begin, so that ranks of two turns never meet at the rendezvous -> node 0 writes how its
    run ended, and the followers end so

Stages of a recipe that run at the same time have the group one after the other; those that are found done, and those
that run on one device, do not ask for it. A rendezvous is one run's: a second one waits for its leases.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.spec import ConfigError
from storage import home, leases
from storage.files import atomic_write_json, read_json
from tasks.stopping import raise_if_stopped

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
POLL_SECONDS = 0.2
#: How long the nodes of a recipe wait for each other at its start (POSTTRAIN_NODES_WAIT_SECONDS).
WAIT_SECONDS = 1800.0
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

    def anew(self) -> Nodes:
        """The same for another stage."""
        return Nodes(self.count, self.rank, self.address, self.port)

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
        with contextlib.suppress(FileNotFoundError):  # node 0 has published meanwhile, and cleared up
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


# -------------------------------------------------------------------------------------------------------------- recipes


class NodeError(RuntimeError):
    """Node 0's run ended otherwise than well, and this node, which takes part in it, with it."""


class Leader:
    """Node 0 of a recipe and the others that it has found; made by :func:`leading`. ``code``: the exit code that the
    followers end with when the run has finished."""

    def __init__(self, nodes: Nodes, what: str, folder: Path):
        self.nodes, self.what, self.folder, self.code = nodes, what, folder, 0
        self._turn, self._writing = threading.Lock(), threading.Lock()
        self._entry: dict[str, Any] = {
            "token": nodes.token,
            "owner": leases.owner(),
            "state": "running",
            "error": None,
            "code": None,
            "members": {},
            "turn": {"number": 0, "over": True},
        }

    def _write(self, **changes: Any) -> None:
        with self._writing:
            self._entry |= changes
            atomic_write_json(self.folder / "0.json", self._entry)

    def gather(self, tell: Callable[[str], None]) -> None:
        """Wait until every other node is there.

        Raises:
            ConfigError: one was given another command.
            NodeError: one did not come in time.
        """
        told, members, deadline = False, None, time.monotonic() + wait_seconds()
        while members is None or len(members) < self.nodes.count - 1:
            found = {
                i: entry
                for i in range(1, self.nodes.count)
                if (entry := read_json(self.folder / f"{i}.json", None))
                and entry["leader"] in (None, self.nodes.token)
                and entry["state"] == "running"
                and leases.alive(entry["owner"])
            }
            if members != (members := {str(i): entry["token"] for i, entry in found.items()}):
                self._write(members=members)
            for i, entry in found.items():
                if (entry["what"], entry["count"]) != (self.what, self.nodes.count):
                    raise ConfigError(
                        f"node {i} was given `posttrain {entry['what']} --nodes {entry['count']}`, and node 0"
                        f" `posttrain {self.what} --nodes {self.nodes.count}`; give the same command on every node"
                    )
            if len(members) < self.nodes.count - 1:
                missing = ", ".join(str(i) for i in range(1, self.nodes.count) if i not in found)
                if time.monotonic() > deadline:
                    raise _missed(f"node {missing}")
                if not told:
                    tell(f"node 0 of {self.nodes.count}: waits for node {missing}, to be given the same command")
                told = True
                raise_if_stopped()
                time.sleep(POLL_SECONDS)

    def lost(self) -> str | None:
        """Which follower died, ended, or failed in the present turn; None while all are well."""
        for i, token in self._entry["members"].items():
            entry = read_json(self.folder / f"{i}.json", None)
            if entry is None or entry["token"] != token:
                return f"node {i} was started anew in the middle of the run"
            turn = self._entry["turn"]
            failed = entry["done"] == turn["number"] and not turn["over"] and entry["error"]
            if told := _end_of(int(i), {**entry, "state": "failed"} if failed else entry):
                return told
        return None

    @contextlib.contextmanager
    def turn(self, told: dict[str, Any]) -> Iterator[Turn]:
        """The group for one stage, once it is free and all followers are back from the stage before; ``told`` is what
        they are to know of it. The stage begins for them with :meth:`Turn.begin`.
        """
        while not self._turn.acquire(timeout=POLL_SECONDS):
            raise_if_stopped()
        try:
            while self.lost() is None and not all(
                read_json(self.folder / f"{i}.json")["done"] >= self._entry["turn"]["number"]
                for i in self._entry["members"]
            ):
                raise_if_stopped()
                time.sleep(POLL_SECONDS)
            one = self.nodes
            yield Turn(one.count, one.rank, one.address, one.port, leader=self, told=told)
        finally:
            self._turn.release()

    def begin(self, told: dict[str, Any]) -> None:
        self._write(turn={**told, "number": self._entry["turn"]["number"] + 1, "over": False})

    def over(self, error: str | None) -> None:
        self._write(turn={**self._entry["turn"], "over": True, "error": error})

    def end(self, error: BaseException | None) -> None:
        """Tell the followers how the run ended."""
        if error is None:
            self._write(state="finished", code=self.code)
        else:
            told = _sentence(error) if isinstance(error, Exception) else "it was stopped"
            with contextlib.suppress(OSError):  # on a full disk the error itself is what must be told
                self._write(state="failed", error=told)


@dataclass(kw_only=True)
class Turn(Nodes):
    """Node 0 in a stage of its recipe that the others take part in."""

    leader: Leader
    told: dict[str, Any]

    def begin(self, workdir: Path) -> None:
        super().begin(workdir)
        self.leader.begin(self.told)

    def end(self, workdir: Path, error: str | None) -> None:
        super().end(workdir, error)
        self.leader.over(error)

    def lost(self, workdir: Path) -> str | None:
        return super().lost(workdir) or self.leader.lost()


class Follower:
    """Node 1 or further of a recipe; made by :func:`following`. ``error``: what it failed of in the present turn, set
    by who takes part."""

    def __init__(self, nodes: Nodes, what: str, folder: Path):
        self.nodes, self.folder, self.error, self.done = nodes, folder, None, 0
        self.code = 0
        self._entry: dict[str, Any] = {
            "token": nodes.token,
            "owner": leases.owner(),
            "what": what,
            "count": nodes.count,
            "leader": None,
        }
        self.write("running")

    def write(self, state: str) -> None:
        entry = {**self._entry, "state": state, "error": self.error, "done": self.done}
        atomic_write_json(self.folder / f"{self.nodes.rank}.json", entry)

    def _session(self) -> dict[str, Any] | None:
        """What node 0 says to this node; None while it has said nothing.

        Raises:
            NodeError: node 0 ended without finishing.
        """
        session = read_json(self.folder / "0.json", {})
        mine = session.get("members", {}).get(str(self.nodes.rank)) == self.nodes.token
        told = _end_of(0, session) if mine else None
        if not mine and self._entry["leader"] is not None:
            told = "node 0 was started anew without this node"
        if told:
            raise NodeError(
                f"{told}; node {self.nodes.rank} ended with it, and the same command on every node goes on where it"
                " stopped"
            )
        return session if mine else None

    def turns(self) -> Iterator[dict[str, Any]]:
        """Every stage that node 0 shares, as it begins, until node 0's run has finished.

        Raises:
            NodeError: it failed, its process died, or it did not come in time.
        """
        deadline = time.monotonic() + wait_seconds()
        while True:
            raise_if_stopped()
            session = self._session()
            if session is None and time.monotonic() > deadline:
                raise _missed("node 0")
            if session is not None:
                if self._entry["leader"] is None:
                    self._entry["leader"] = session["token"]
                    self.write("running")
                if session["state"] == "finished":
                    self.code = session["code"]
                    return
                turn = session["turn"]
                if turn["number"] > self.done:
                    if not turn["over"]:
                        yield turn
                    self.done = turn["number"]
                    self.write("running")
                    self.error = None
            time.sleep(POLL_SECONDS)

    def over(self, turn: dict[str, Any]) -> bool:
        """Whether node 0 is through with a turn, with or without a result."""
        now = read_json(self.folder / "0.json", {})
        return (
            now.get("token") != self._entry["leader"] or now["turn"]["over"] or now["turn"]["number"] != turn["number"]
        )

    def failed(self, turn: dict[str, Any]) -> str | None:
        """What node 0 says that the stage of a turn failed of; None where it has not, or is not through with it."""
        now = read_json(self.folder / "0.json", {}).get("turn", {})
        return now.get("error") if now.get("number") == turn["number"] else None


def wait_seconds() -> float:
    return float(os.environ.get("POSTTRAIN_NODES_WAIT_SECONDS", WAIT_SECONDS))


def _missed(who: str) -> NodeError:
    return NodeError(
        f"{who} has not come in {wait_seconds():g} s: it was not started with the same --rendezvous and POSTTRAIN_HOME, or"
        " ended before (see what it said); POSTTRAIN_NODES_WAIT_SECONDS sets how long the nodes wait for each other"
    )


def _sentence(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _place(nodes: Nodes, tell: Callable[[str], None]) -> tuple[Path, leases.Lease]:
    """The directory of a rendezvous, and this node's number at it, for as long as the lease is held."""
    name = f"{re.sub(r'[^A-Za-z0-9.-]', '_', nodes.address)}-{nodes.port}"
    lease = leases.acquire(f"nodes-{name}-{nodes.rank}", on_wait=tell, on_poll=raise_if_stopped)
    return home.subdir("nodes", name), lease


_leader: Leader | None = None  # what this process runs is shared by it


@contextlib.contextmanager
def leading(nodes: Nodes, what: str, tell: Callable[[str], None]) -> Iterator[Leader]:
    """On node 0: wait for the other nodes, share with them the stages that this process runs in the block
    (:func:`shared`), and tell them how it ended. what: the command, for people. tell: is told what is waited for.

    Raises:
        ConfigError: a node was given another command.
    """
    global _leader
    folder, lease = _place(nodes, tell)
    with lease:
        leader = Leader(nodes, what, folder)
        try:
            leader.gather(tell)
            _leader = leader
            yield leader
        except BaseException as error:
            leader.end(error)
            raise
        else:
            leader.end(None)
        finally:
            _leader = None


@contextlib.contextmanager
def following(nodes: Nodes, what: str, tell: Callable[[str], None]) -> Iterator[Follower]:
    """On another node, see :func:`leading`: there for node 0 until the end of the block."""
    folder, lease = _place(nodes, tell)
    with lease:
        follower = Follower(nodes, what, folder)
        tell(f"follows node 0 at {nodes.address}:{nodes.port}, {nodes.count} nodes in all")
        try:
            yield follower
        except BaseException as error:
            follower.error = _sentence(error) if isinstance(error, Exception) else "it was stopped"
            follower.write("failed")
            raise
        else:
            follower.write("finished")


@contextlib.contextmanager
def shared(parallel: bool, told: Callable[[], dict[str, Any]]) -> Iterator[Turn | None]:
    """The turn of a stage that the other nodes are to take part in, if this process leads some and the stage can share
    its work; else None. told: what they are to know of it.
    """
    if _leader is None or not parallel:
        yield None
        return
    with _leader.turn(told()) as turn:
        yield turn


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
