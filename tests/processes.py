"""Stage processes forked from parents that have imported everything: what takes a new interpreter seconds takes these milliseconds.

For tests of what a stage writes when it is killed, continued, or shared among ranks; those of the start itself use ``python -m stages``.
A forked process differs from a started one in its imports only: it has an environment, a session, random state and output of its own.
Two parents serve in turn, with hash seeds of their own, since processes that must agree (ranks, a run and its continuation) must do so
whatever the order of their sets is.
"""

import atexit
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STAGES = "stages.harness:main"
ROOT = Path(__file__).resolve().parents[1]


class Parent:
    """The client's side of one warm parent: a line of JSON asks, a line of JSON answers."""

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, "-m", "tests.processes"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        start_new_session=True, env={**os.environ, "PYTHONHASHSEED": "random", "OMP_NUM_THREADS": "1"})
        atexit.register(self.process.stdin.close)  # it ends with its input, and its children with it

    def ask(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline() or "null")


class Forked:
    """One forked process, spoken to as a ``subprocess.Popen``; ``log`` holds all it said."""

    def __init__(self, parent: Parent, target: str, arguments: list[str], environment: dict, log: Path):
        self.parent, self.log, self.returncode = parent, log, None
        self.pid = parent.ask(target=target, arguments=arguments, environment=environment, log=str(log), owner=os.getpid())
        assert self.pid, "the warm parent is gone"

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.parent.ask(ended=self.pid)
        return self.returncode

    def kill(self) -> None:
        """SIGKILL; until it is asked for, the process stays a zombie, so that its id is no other's."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, seconds: float = 300) -> int:
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"not ended after {seconds:.0f} s: {self.said()}")
            time.sleep(0.005)
        return self.returncode

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


class Group:
    """Processes that work together."""

    def __init__(self, processes: list[Forked], store=None):
        self.processes, self.store = processes, store

    def poll(self) -> int | None:
        """None while all run; the first failure, or 0 once all have ended well."""
        codes = [p.poll() for p in self.processes]
        return next((c for c in codes if c), None if None in codes else 0)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def finish(self, seconds: float = 300) -> None:
        """Wait for a good end of all; one that fails takes the others down."""
        deadline = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        code = self.poll()
        self.kill()
        for process in self.processes:
            process.wait()
        assert code == 0, "\n".join(f"process {i} of {len(self.processes)} ended with {p.returncode}: {p.said()}" for i, p in enumerate(self.processes))

    def kill_when(self, reached, seconds: float = 120) -> None:
        """SIGKILL all of them as soon as ``reached()``, looking every few milliseconds; they must not end before."""
        deadline = time.monotonic() + seconds
        while not (done := reached()) and self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        self.kill()
        for process in self.processes:
            process.wait()
        assert done, f"never reached, exit codes {[p.returncode for p in self.processes]}: {self.processes[0].said()}"


class Forks:
    """``start(arguments)`` runs ``target(*arguments)``, a stage unless told otherwise, on one process or on several ranks."""

    def __init__(self, folder: Path):
        self.folder, self.parents, self.started = folder, [], 0

    def start(self, *arguments: str, target: str = STAGES, ranks: int = 1, **environment: str) -> Group:
        while len(self.parents) < 2:
            self.parents.append(Parent())
        common, store = {**os.environ, "OMP_NUM_THREADS": "1", **environment}, None
        if ranks > 1:
            from torch.distributed import TCPStore

            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # held by whoever starts the ranks, as under torchrun
            common |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        group = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)} if ranks > 1 else {}
            self.started += 1
            group.append(Forked(self.parents[self.started % 2], target, [str(a) for a in arguments], {**common, **own}, self.folder / f"{self.started}.log"))
        return Group(group, store)

    def run(self, *arguments: str, **options) -> None:
        self.start(*arguments, **options).finish()


# ------------------------------------------------------------------------------------------------------- the parent's side


def preload() -> None:
    """Import what stages import, on their way, and nothing that starts threads."""
    import pkgutil

    import stages

    for module in pkgutil.walk_packages(stages.__path__, "stages."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in LATE:
        importlib.import_module(name)


#: Imported by libraries only once they are used.
LATE = ("torch.distributed.fsdp", "peft", "pyarrow.parquet", "matplotlib.pyplot", "scipy.stats", "transformers.models.llama.modeling_llama",
        "transformers.models.bert.modeling_bert", "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto")


def serve() -> None:
    preload()
    import gc

    gc.collect()
    gc.freeze()
    threads = {p.read_text().strip() for p in Path("/proc/self/task").glob("*/comm") if p.parent.name != str(os.getpid())}
    assert threads <= {"jemalloc_bg_thd"}, f"an import starts {threads}, which a fork would lose"  # Arrow's allocator starts its own again
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    for line in requests:
        request = json.loads(line)
        if "ended" in request:
            pid, status = os.waitpid(request["ended"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                os.close(requests.fileno())
                os.close(answers.fileno())
                work(request)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def work(request: dict) -> None:
    """The forked process, to its end."""
    code = 1
    try:
        os.setsid()
        log, nothing = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), os.open(os.devnull, os.O_RDONLY)
        for number, file in enumerate((nothing, log, log)):
            os.dup2(file, number)
        os.environ.clear()
        os.environ.update(request["environment"])
        import random

        import numpy

        from stages.harness import die_with_parent

        die_with_parent(request["owner"])
        random.seed()  # as new interpreters do; torch's starts at a constant
        numpy.random.seed()
        module, _, name = request["target"].partition(":")
        code = getattr(importlib.import_module(module), name)(*request["arguments"]) or 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
