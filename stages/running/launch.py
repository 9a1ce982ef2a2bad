"""The ranks of a stage that runs on several devices: started together, ended together.

Every rank is forked from the process that launches them, once that has imported what the stage needs: new interpreters
would import it once each. They get the variables that torchrun gives (``RANK``, ``WORLD_SIZE``, ``MASTER_PORT``, ...),
and the launcher keeps the store in which they find each other. A rank that finds that an import has opened CUDA becomes
a new interpreter, since a fork could not use the GPU; so does every rank where processes are not forked
(:func:`stages.running.warm.forks`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from stages.registry import STAGES, get_stage
from stages.running import warm
from stages.spec import ConfigError

GRACE_SECONDS = 30.0  # a rank inside a collective takes five of them
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def launch(
    spec_path: str,
    stage: str,
    devices: int,
    run: Callable[[str], int],
    started: Callable[[], None] = lambda: None,
    nodes: dict[str, Any] | None = None,
) -> dict[int, int]:
    """Run ``run(spec_path)`` on ``devices`` ranks to their end: {} where all ended with 0; else rank -> exit code (-N:
    ended by signal N) of those that failed by themselves, nearly always one, upon which the others are ended.

    stage: the stage's name, for its imports. started: called in this process once the ranks are there. nodes: which
    machine this is among several that have so many ranks each ({"count", "rank", "address", "port"}); the store is with
    the first. Whatever is raised here (SIGTERM's handler may) ends the ranks first.
    """
    forked = warm.forks()
    if forked:
        with warm.closed_devices():
            warm.load()
            # the project's own; what somebody else's does when it is imported is not known to survive a fork
            if stage in STAGES.own:
                get_stage(stage)
        gc.freeze()
    running: dict[int, int] = {}  # process id -> rank
    failed: dict[int, int] = {}
    store = None
    try:
        with _listener(nodes) as listener:
            common = _environment(devices, listener.getsockname()[1] if listener else 0, nodes)
            with _signals_blocked():
                for local in range(devices):
                    rank = str(local + devices * (nodes["rank"] if nodes else 0))
                    pid = os.fork()
                    if pid == 0:
                        if listener:
                            listener.close()
                        _be_rank(
                            {**common, "RANK": rank, "LOCAL_RANK": str(local), "ROLE_RANK": rank},
                            spec_path,
                            stage,
                            run,
                            forked,
                        )
                    running[pid] = int(rank)
                    _lead(pid)
            started()
            # its thread would be lost in a fork, so it starts behind them; until then they wait at its port
            store = _store(listener) if listener else None
        while running and not failed:
            _collect(running, failed)
        _collect(running, failed, os.WNOHANG)  # those that ended at the same time
        return failed
    finally:
        _end(running)
        del store  # not before: a rank that loses it may abort


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """SIGTERM and SIGINT wait: their handlers, raising in a rank that is not one yet, would unwind the launcher's part
    of it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _listener(nodes: dict[str, Any] | None) -> contextlib.AbstractContextManager[socket.socket | None]:
    """Where the store will be: at any port for the ranks of this machine, at the one agreed on for those of several,
    nowhere on all of these but the first.

    Raises:
        ConfigError: the port is not free.
    """
    if not nodes:
        return socket.create_server(("127.0.0.1", 0))
    if nodes["rank"]:
        return contextlib.nullcontext()
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", nodes["port"]), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both
        )
    except OSError as error:
        raise ConfigError(
            f"--rendezvous: port {nodes['port']} of this node cannot be listened at ({error.strerror}); write another"
            " one, the same on every node"
        ) from None


def _environment(devices: int, port: int, nodes: dict[str, Any] | None) -> dict[str, str]:
    """torchrun's variables that all ranks share, and the process they end with."""
    here, count, address, port = (
        (nodes["rank"], nodes["count"], nodes["address"], nodes["port"]) if nodes else (0, 1, "127.0.0.1", port)
    )
    everyone = str(devices * count)
    return {
        "WORLD_SIZE": everyone,
        "LOCAL_WORLD_SIZE": str(devices),
        "ROLE_WORLD_SIZE": everyone,
        "GROUP_RANK": str(here),
        "GROUP_WORLD_SIZE": str(count),
        "ROLE_NAME": "default",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "POSTTRAIN_PARENT_PID": str(os.getpid()),
    }


def _store(listener: socket.socket):
    """The store in which ranks find each other, on a port that listens already."""
    from torch.distributed import TCPStore

    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _be_rank(environment: dict[str, str], spec_path: str, stage: str, run: Callable[[str], int], forked: bool) -> None:
    """In the forked process, to its end."""
    code = 1
    try:
        _lead(0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        threads = os.environ.get("OMP_NUM_THREADS")
        os.environ.update(environment)
        if not forked or warm.unusable_devices():
            os.execv(sys.executable, [sys.executable, "-m", "stages", spec_path])
        if threads is None:
            warm.limit_threads(int(environment["OMP_NUM_THREADS"]))
        warm.call_it(f"rank {environment['RANK']} {stage}")
        warm.draw_anew()
        code = run(spec_path)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        # threads of the process group that still run must not abort the interpreter's end, which would be this rank's
        os._exit(code)


def _lead(pid: int) -> None:
    """A process group of its own in the stage's session, so that a rank's end can be that of all it started."""
    with contextlib.suppress(OSError):  # it has one, or is gone
        os.setpgid(pid, pid)


def _collect(running: dict[int, int], failed: dict[int, int], options: int = 0) -> None:
    """Wait for a rank that ends, and note it; with WNOHANG all those that have ended."""
    while running:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | options)
        if ended is None:
            return
        rank = running.get(ended.si_pid)
        if rank is not None:
            # what it left; its number is no other group's while it is not yet collected
            _signal(ended.si_pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(ended.si_pid, 0)[1])
        if rank is not None:
            del running[ended.si_pid]
            if code:
                failed[rank] = code
            if not options:
                return


def _end(running: dict[int, int]) -> None:
    """SIGTERM, time to save, SIGKILL."""
    if not running:
        return
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # asked once more, it would leave them
    for pid in running:
        _signal(pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while running and time.monotonic() < deadline:
        _collect(running, {}, os.WNOHANG)
        time.sleep(0.02)
    for pid in running:
        _signal(pid, signal.SIGKILL)
    while running:
        _collect(running, {})


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
