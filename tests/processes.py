"""Stage processes forked from parents that have imported everything: what takes a new interpreter seconds takes these
milliseconds.

For tests of what a stage writes when it is killed, continued, or shared among ranks. The parents are the product's
(``stages/running/warm.py``), but they have imported the stages, too, and fork ranks and other functions. Two of them
serve in turn, with hash seeds of their own, since processes that must agree (ranks, a run and its continuation) must do
so whatever the order of their sets is. Where pytest runs in several processes, each has parents of its own, which are
forked, too: from two that have done the imports for all (``python -m tests.processes``).
"""

import contextlib
import fcntl
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stages.running import warm
from stages.spec import PROJECT_ROOT
from tasks.processes import Forked, Parent

STAGES = "stages.running.process:main"
UNDRAWN = "tests.processes:undrawn"
NUMBER = "POSTTRAIN_TEST_PARENT"
#: For ``python -c``: the command line whose stages are forked from the processes that tests share.
SHARED = "from tests.processes import share; share(); from flows.cli import program; program()"


class Process:
    """One forked process; ``log`` holds all it said."""

    def __init__(self, parent: Parent, target: str, arguments: list[str], environment: dict, log: Path):
        self.log = log
        environment = {**environment, "POSTTRAIN_PARENT_PID": str(os.getpid())}
        with open(log, "wb") as file:
            self.forked: Forked = parent.start(
                {"target": target, "arguments": arguments, "environment": environment}, file, stdout=file
            )
        self.poll = self.forked.poll

    def kill(self) -> None:
        """SIGKILL; until it is asked for, the process stays a zombie, so that its id is no other's."""
        if self.forked.returncode is None:
            os.kill(self.forked.pid, signal.SIGKILL)

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


class Group:
    """Processes that work together."""

    def __init__(self, processes: list[Process], store=None):
        self.processes, self.store = processes, store

    def poll(self) -> int | None:
        """None while all run; the first failure, or 0 once all have ended well."""
        codes = [p.poll() for p in self.processes]
        return next((c for c in codes if c), None if None in codes else 0)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.forked.wait(300)

    def finish(self, seconds: float = 300) -> None:
        """Wait for a good end of all; one that fails takes the others down."""
        deadline = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)  # each look is a question to the parents
        code = self.poll()
        self.kill()
        assert code == 0, "\n".join(
            f"process {i} of {len(self.processes)} ended with {p.poll()}: {p.said()}"
            for i, p in enumerate(self.processes)
        )

    def kill_when(self, reached, seconds: float = 120) -> None:
        """SIGKILL all of them as soon as ``reached()``, looking every few milliseconds; however soon after they end."""
        deadline = time.monotonic() + seconds
        while not (done := reached()) and self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        self.kill()
        assert done or reached(), (
            f"never reached, exit codes {[p.poll() for p in self.processes]}: {self.processes[0].said()}"
        )


class Forks:
    """``start(arguments)`` runs ``target(*arguments)``, a stage unless told otherwise, on one process or on several
    ranks.
    """

    def __init__(self, folder: Path):
        self.folder, self.parents, self.started = folder, [], 0

    def hold(self, count: int = 1) -> None:
        """Start the first parents now, or keep them: those that :func:`share` takes end when nobody has one."""
        while len(self.parents) < count:
            self.parents.append(
                Parent(
                    {
                        **os.environ,
                        "PYTHONHASHSEED": "random",
                        "OMP_NUM_THREADS": "1",
                        # as the product's are: transformers writes it into the configuration of a tokenizer
                        "HF_HUB_OFFLINE": "1",
                        NUMBER: str(len(self.parents)),
                    },
                    module="tests.processes",
                )
            )

    def start(self, *arguments: str, target: str = STAGES, ranks: int = 1, **environment: str) -> Group:
        self.hold(2)
        common, store = {**os.environ, "OMP_NUM_THREADS": "1", **environment}, None
        if ranks > 1:
            from torch.distributed import TCPStore

            # held by whoever starts the ranks, as under torchrun
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            common |= {
                "GLOO_SOCKET_IFNAME": "lo",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
        group = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)} if ranks > 1 else {}
            self.started += 1
            group.append(
                Process(
                    self.parents[self.started % 2],
                    target,
                    [str(a) for a in arguments],
                    {**common, **own},
                    self.folder / f"{self.started}.log",
                )
            )
        return Group(group, store)

    def run(self, *arguments: str, **options) -> None:
        self.start(*arguments, **options).finish()


def share() -> None:
    """In a command that a test has started: its stages are forked from the same processes as the test's. What such
    tests are about begins when the stage has started. Whoever starts commands one after the other holds these processes
    meanwhile (``Forks.hold``).
    """
    import functools

    from tasks import processes

    os.environ.setdefault(NUMBER, "0")
    processes.Parent = functools.partial(Parent, module="tests.processes")


# ------------------------------------------------------------------------------------------------------- the parent's side


def modules() -> list[str]:
    """All stages and what libraries import only once they are used."""
    import pkgutil

    import stages

    own = [m.name for m in pkgutil.walk_packages(stages.__path__, "stages.") if not m.name.endswith("__main__")]
    return [
        *warm.LIBRARIES,
        *own,
        "torch.distributed.fsdp",
        "peft",
        "matplotlib.pyplot",
        "scipy.stats",
        "transformers.models.bert.modeling_bert",
    ]


def undrawn(*specs: str) -> int:
    """Stages one after the other, until one fails, whose charts are not drawn."""
    from stages.reporting import reports
    from stages.running.process import main
    from tests.common import not_drawn

    reports._png = not_drawn
    return next((code for spec in specs if (code := main(spec))), 0)


def work(request: dict) -> int:
    """The forked process, to its end."""
    if "spec" in request:
        return warm.run_stage(request)
    module, _, name = request["target"].partition(":")
    return getattr(importlib.import_module(module), name)(*request["arguments"]) or 0


def hand_over(channel: int) -> None:
    """Have a fork of the process that has imported everything serve this channel. The first one starts that process."""
    where = Path(tempfile.gettempdir(), f"parents-{os.environ[NUMBER]}")
    # by its name in its directory: the whole path may be longer than a socket's address, 108 bytes, allows
    with held(where), contextlib.chdir(where.parent), socket.socket(socket.AF_UNIX) as there:
        try:
            there.connect(where.name)
        except OSError:
            where.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(where.name)
                listener.listen()
                subprocess.Popen(
                    [sys.executable, "-m", "tests.processes", str(where), str(listener.fileno())],
                    pass_fds=[listener.fileno()],
                    cwd=str(PROJECT_ROOT),
                    env={**os.environ, "PYTHONHASHSEED": "random"},
                    start_new_session=True,
                )
            there.connect(where.name)
        socket.send_fds(there, [b"."], [channel])


def serve_all(where: Path, listener: socket.socket) -> int:
    """Import everything, then fork a parent for every channel that is handed over, as long as one of them lives."""
    gc.disable()  # as warm.load
    for module in modules():
        importlib.import_module(module)
    # a table of every architecture, made where the first model is loaded
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
    gc.enable()
    gc.collect()
    gc.freeze()  # as warm.serve
    while True:
        if select.select([listener], [], [], 1.0)[0]:
            with listener.accept()[0] as connection:
                _, (channel,), _, _ = socket.recv_fds(connection, 1, 1)
            if not os.fork():
                listener.close()
                warm.leave(warm.serve(socket.socket(fileno=channel), work))
            os.close(channel)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # none is left
            with held(where):
                if not select.select([listener], [], [], 0.0)[0]:
                    where.unlink()
                    return 0


@contextlib.contextmanager
def held(where: Path):
    """Only one process at a time finds, starts or ends the one that listens there."""
    with open(f"{where}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    if len(sys.argv) == 2:
        hand_over(channel := int(sys.argv[1]))
        owner = select.poll()
        owner.register(channel, 0)
        owner.poll()  # as a parent that serves itself, this process ends with its owner and not before
    else:
        warm.leave(serve_all(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))))
