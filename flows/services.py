"""The servers of one state directory: Prefect, MLflow and a worker, started detached and stopped completely.

HOME/services.json names what runs: {service: {url, pid, boot, start, log, kept}}. The process is that of `flows.keep`
(`kept`), below which the service runs and is started again when it dies. A process is ours only while its pid, the boot
and its start time since then match, so a reused pid is never mistaken for a server (nor killed), and setting the clock
makes none of them strange.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from flows import env, prefect_ui
from flows.keep import dies_with_parent
from storage import leases
from storage.files import atomic_write_json, database_damage, read_json, refusal
from storage.mlflow_database import follow_home, make_database

POOL = "posttrain"
PORTS = {"prefect": 4200, "mlflow": 5000}
LOCAL = "127.0.0.1"
EVERYWHERE = ("0.0.0.0", "::")  # all networks of this machine
START_SECONDS = 300.0
RESTARTS = 3  # of an embedded server in one run

#: Prefect's server at the socket that is given to it. uvicorn's own --fd takes it for one of another family, on which
#: small answers are delayed.
EMBEDDED = """
import socket, sys, uvicorn
from flows.prefect_server import collect_beside
collect_beside()
config = uvicorn.Config("prefect.server.api.server:create_app", factory=True, log_level="error", lifespan="on")
uvicorn.Server(config).run(sockets=[socket.socket(fileno=int(sys.argv[1]))])
"""


class ServiceError(RuntimeError):
    """A server did not start or answer; the message names its log file."""


# ---------------------------------------------------------------- what runs


def _file(state: Path) -> Path:
    return state / "services.json"


def recorded(state: Path) -> dict[str, dict]:
    """The services of `state` that were started and not stopped since, alive or not."""
    return read_json(_file(state), {})


def running(state: Path) -> dict[str, dict]:
    """The services of `state` whose processes are alive, by name (empty when none)."""
    found = recorded(state)
    return {name: entry for name, entry in found.items() if _process(entry) is not None or _hidden(entry)}


def url(state: Path, name: str) -> str | None:
    """The base URL of a live service, e.g. http://127.0.0.1:4200, or None."""
    return running(state).get(name, {}).get("url")


def models_page(server: str) -> str:
    """The page of an MLflow server with the registered models."""
    return f"{server}/#/models?workflowType=machine_learning"


def connect(state: Path) -> bool:
    """Point this process at the running servers of `state`; False when no Prefect server runs here.

    PREFECT_API_URL and MLFLOW_TRACKING_URI that the user has set are kept.
    """
    alive = running(state)
    if "mlflow" in alive:
        os.environ.setdefault("MLFLOW_TRACKING_URI", alive["mlflow"]["url"])
    if "prefect" in alive:
        os.environ.setdefault("PREFECT_API_URL", alive["prefect"]["url"] + "/api")
        _refresh()
    return bool(os.environ.get("PREFECT_API_URL"))


def reachable(api: str) -> None:
    """ServiceError where no Prefect server answers at an API URL within ten seconds."""
    deadline = time.monotonic() + 10
    while not answers(api.rstrip("/") + "/health", timeout=5):
        if time.monotonic() > deadline:
            raise ServiceError(
                f"no Prefect server answers at {api} (PREFECT_API_URL, or the server of `posttrain up`): `posttrain"
                " status` shows what runs here; start it (`posttrain up`), or unset PREFECT_API_URL and end what hangs"
                " (`posttrain down`), and the run brings a server of its own"
            )
        time.sleep(0.5)


def _hidden(entry: dict) -> bool:
    """Whether a service is one of another user, of whose processes this system shows nothing."""
    return entry.get("boot") == leases.boot_id() and leases.hidden(entry["pid"])


def _process(entry: dict):
    import psutil

    try:
        process = psutil.Process(entry["pid"])
        if "start" in entry:
            same = entry["boot"] == leases.boot_id() and leases.start_time(entry["pid"]) == entry["start"]
        else:  # started by an earlier version; by the clock
            same = abs(process.create_time() - entry["started"]) < 2
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, KeyError, TypeError):
        return None


# ---------------------------------------------------------------- start


def up(
    state: Path,
    *,
    prefect_port: int | None = None,
    mlflow_port: int | None = None,
    worker: bool = True,
    gpu_slots: int | None = None,
    host: str | None = None,
    say=lambda text: None,
) -> dict[str, dict]:
    """Start what is not running yet and return {service: {url, host, pid, boot, start, log, kept}}. What runs already
    stays where it is, and ``say`` tells of it where another address was asked for; host: default 127.0.0.1.

    Ports: the given one, else that of a server that died here (runs that outlived it, and links, go on), else the usual
    one when free, else any free one. Of several at once on one state directory the first starts what is missing and the
    others find it. Raises ServiceError when a server does not answer within five minutes, ConfigError where there is no
    such address.
    """
    _check_addresses(host or LOCAL, prefect_port, mlflow_port)
    with _starting(state, say):
        return _up(state, prefect_port, mlflow_port, worker, gpu_slots, host, say)


def _up(
    state: Path,
    prefect_port: int | None,
    mlflow_port: int | None,
    worker: bool,
    gpu_slots: int | None,
    wanted: str | None,
    say,
) -> dict[str, dict]:
    alive, host = running(state), wanted or LOCAL
    logs = state / "logs"
    for name, port in (("prefect", prefect_port), ("mlflow", mlflow_port)):
        if name in alive and _elsewhere(alive[name], wanted, port):
            say(
                f"{name} runs already, at {alive[name]['url']}, and stays there; to move it, `posttrain down` (which ends"
                " runs of deployments; they continue when they are started again) and then this command again"
            )

    def prefect(base: str, port: int) -> tuple[list[str], dict[str, str]]:
        serve = [env.python(), "-m", "flows.prefect_server", "prefect", "server", "start"]
        return [*serve, "--host", host, "--port", str(port)], env.child(
            state,
            PREFECT_API_URL=base + "/api",
            # a browser on another machine asks where it got the page from, not its own 127.0.0.1
            PREFECT_UI_API_URL=os.environ.get("PREFECT_UI_API_URL", "/api"),
            **prefect_ui.quiet(state / "prefect" / "ui"),
        )

    def mlflow(base: str, port: int) -> tuple[list[str], dict[str, str]]:
        store = f"sqlite:///{state / 'mlflow.db'}"
        make_database(store)  # while Prefect starts
        follow_home(store)
        command = [
            env.python(),
            "-m",
            "mlflow",
            "server",
            "--host",
            host,
            "--port",
            str(port),
            "--workers",
            "1",
            "--backend-store-uri",
            store,
            "--serve-artifacts",
            "--artifacts-destination",
            (state / "mlartifacts").as_uri(),
        ]
        return command, _without(names_here(host, port) | env.child(state), "MLFLOW_TRACKING_URI")

    with _choosing_ports(say):
        _serve(
            state,
            alive,
            {
                "prefect": Server("Prefect", prefect, "/api/health", prefect_port),
                "mlflow": Server("MLflow", mlflow, "/health", mlflow_port),
            },
            host,
            say,
        )
    os.environ["PREFECT_API_URL"] = alive["prefect"]["url"] + "/api"
    os.environ["MLFLOW_TRACKING_URI"] = alive["mlflow"]["url"]
    if worker and "worker" not in alive:
        from flows import deploy

        deploy.install_pool(gpu_slots=gpu_slots)
        say("starting a worker")
        process = _detach(
            "the worker",
            [
                env.python(),
                "-m",
                "flows.worker",
                env.python(),
                "-m",
                "prefect",
                "worker",
                "start",
                "--pool",
                POOL,
                "--type",
                "process",
                "--name",
                f"{socket.gethostname()}-{os.getpid()}",
            ],  # no --limit, see deploy.queues
            logs / "worker.log",
            # safe path: Prefect runs hooks as a script in its runner/, where its storage.py would hide our storage
            env.child(
                state,
                PREFECT_API_URL=os.environ["PREFECT_API_URL"],
                PREFECT_WORKER_QUERY_SECONDS="2",
                PYTHONSAFEPATH="1",
                **{env.WORKER_LOG: str(logs / "worker.log")},
                MLFLOW_TRACKING_URI=os.environ["MLFLOW_TRACKING_URI"],
                **({"POSTTRAIN_GPU_SLOTS": str(gpu_slots)} if gpu_slots else {}),
            ),
            state,
            whole=False,
        )
        _note(state, alive, "worker", process, None, logs / "worker.log")
    return alive


class Server(NamedTuple):
    """A server that `up` starts: its name for people, (base URL, port) -> command and environment, the path at which it
    says that it is well, and the port that was asked for."""

    title: str
    command: Callable[[str, int], tuple[list[str], dict[str, str]]]
    health: str
    port: int | None


def _serve(state: Path, alive: dict[str, dict], servers: dict[str, Server], host: str, say) -> None:
    """Start the servers that are not `alive` and wait until each answers. Where another process has taken the port
    between the choice and the start (another home's `posttrain up`, say), the server is started at another one: whoever
    talked to the other's would run in its home."""

    def start(name: str, port: int) -> None:
        base = f"http://{_reachable(host)}:{port}"
        say(f"starting {servers[name].title} on {base}")
        log = state / "logs" / f"{name}.log"
        command, environment = servers[name].command(base, port)
        started[name] = _detach(servers[name].title, command, log, environment, state)
        _note(state, alive, name, started[name], base, log, host)

    started: dict[str, subprocess.Popen] = {}
    usual = {name: _last_port(state, name) for name in servers}
    for name, server in servers.items():
        if name not in alive:
            start(name, _port(host, server.port, usual[name]))
    for name in list(started):
        server = servers[name]
        while not _wait(server.title, started[name], alive[name]["url"] + server.health, alive[name]["log"]):
            _stop([started[name].pid], grace=5, kept=True)
            if server.port is not None:
                raise ServiceError(
                    f"port {server.port} was taken by another process meanwhile; give another one or none (a free one is then"
                    " chosen)"
                )
            start(name, _free(host))


@contextlib.contextmanager
def _starting(state: Path, say=lambda text: None) -> Iterator[None]:
    """Held while servers of `state` are started or stopped: two that make the tables of one database at once fail, and
    of two that start at once `services.json` would know only the later, and nothing could stop the other."""
    logs = state / "logs"
    logs.mkdir(exist_ok=True)
    with (logs / ".starting").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another posttrain process that starts or stops servers of {state}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _choosing_ports(say) -> Iterator[None]:
    """Held from the choice of ports until servers listen there: of two homes that start theirs at once both would find
    the usual ones free."""
    path = Path(tempfile.gettempdir()) / f"posttrain-{os.getuid()}.ports"
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another `posttrain up` on this machine, which chooses its ports")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def embedded(state: Path) -> Iterator[Callable[[], None]]:
    """A Prefect server for the life of this process only, on a free port; yields a function that waits until it answers
    (starting takes seconds in which the caller can import what it needs). The port is held from here, so that no other
    process can take it while the server starts, or starts again.

    Same database as `up` uses, so that runs made without a server are seen later in the UI. Unlike Prefect's own
    temporary server it dies with its parent even when that is killed, and where it dies itself (the kernel ends one of
    the processes of a machine without memory) it is started again, at the same port: without it a run would be told
    nothing for minutes and then fail.
    """
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    logs = state / "logs"
    logs.mkdir(exist_ok=True)
    api = f"http://127.0.0.1:{port}/api"
    environment = env.child(
        state,
        PREFECT_UI_ENABLED="0",
        PREFECT_API_URL=api,
        PREFECT__SERVER_FINAL="1",
        PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED="false",
        PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED="false",
        # what the UI offers as blocks; it takes a fifth of the server's start, and a client makes those it uses itself
        PREFECT_SERVER_REGISTER_BLOCKS_ON_START="false",
    )
    held = contextlib.ExitStack()
    held.enter_context(_starting(state))  # until this one answers
    stopping = threading.Event()

    def start() -> subprocess.Popen:
        with (logs / "prefect-embedded.log").open("ab") as log:
            return subprocess.Popen(
                [env.python(), "-P", "-c", EMBEDDED, str(listening.fileno())],
                pass_fds=[listening.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=state,
                start_new_session=True,
                preexec_fn=dies_with_parent(),
            )

    def keep() -> None:  # lasts as long as the last one it started, which dies with this thread
        nonlocal process
        for left in range(RESTARTS, -1, -1):
            status = process.wait()
            if stopping.is_set() or not left:
                return
            print(
                f"the embedded Prefect server ended with status {status} and is started again; its log:"
                f" {logs / 'prefect-embedded.log'}",
                file=sys.stderr,
            )
            process = start()
            if stopping.is_set():  # asked while it started
                process.terminate()

    process = start()
    previous = os.environ.get("PREFECT_API_URL")
    os.environ["PREFECT_API_URL"] = api
    _refresh()

    def wait() -> None:
        _wait("the embedded Prefect server", process, api + "/health", str(logs / "prefect-embedded.log"))
        held.close()
        threading.Thread(target=keep, name="embedded-prefect", daemon=True).start()

    try:
        yield wait
    finally:
        held.close()
        _drain()
        stopping.set()
        _stop([process.pid], grace=10)
        listening.close()
        if previous is None:
            os.environ.pop("PREFECT_API_URL", None)
        else:
            os.environ["PREFECT_API_URL"] = previous


def _refresh() -> None:
    """Make a Prefect that is imported already read the environment again."""
    if "prefect.context" in sys.modules:
        sys.modules["prefect.context"].refresh_global_settings_context()


def _drain() -> None:
    """Send the logs and events that Prefect still holds; once its server is gone it would complain about each."""
    with contextlib.suppress(Exception):  # a server that died first has nothing to receive
        if "prefect.logging.handlers" in sys.modules:
            sys.modules["prefect.logging.handlers"].APILogWorker.drain_all(timeout=5)
        if "prefect.events.worker" in sys.modules:
            sys.modules["prefect.events.worker"].EventsWorker.drain_all(timeout=5)


def _detach(
    name: str, command: list[str], log: Path, environment: dict[str, str], cwd: Path, whole: bool = True
) -> subprocess.Popen:
    """Start a service that outlives this process and is started again when it dies, in a session of its own; see
    `flows.keep`.
    """
    with log.open("ab") as out:
        return subprocess.Popen(
            [env.python(), "-m", "flows.keep", *(["--whole"] if whole else []), name, *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=cwd,
            start_new_session=True,
        )


def _entry(process: subprocess.Popen, base: str | None, log: Path, host: str | None = None) -> dict:
    return {
        "url": base,
        "host": host,
        "pid": process.pid,
        "boot": leases.boot_id(),
        "start": leases.start_time(process.pid),
        "log": str(log),
        "kept": True,
    }


def _note(
    state: Path,
    alive: dict[str, dict],
    name: str,
    process: subprocess.Popen,
    base: str | None,
    log: Path,
    host: str | None = None,
) -> None:
    """Write down what was just started, before anything else can fail: what is in no file cannot be stopped later."""
    alive[name] = _entry(process, base, log, host)
    try:
        atomic_write_json(_file(state), alive)
    except BaseException:  # a full disk, an interrupt
        _stop([process.pid], grace=5, kept=True)
        raise


def _wait(name: str, process: subprocess.Popen, health: str, log: str) -> bool:
    """Wait until a server answers; False where who answers is not `process` or one below it."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            if shutil.disk_usage(Path(log).parent).free < 2**20:
                raise ServiceError(
                    f"{name} did not start: {refusal(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), log))}"
                )
            for file in (state_of(log) / "prefect" / "prefect.db", state_of(log) / "mlflow.db"):
                if file.stem in name.lower() and (wrong := database_damage(file)) is not None:
                    raise ServiceError(
                        f"{name} did not start: its database {file} is damaged ({wrong}). Move it away (mv {file}"
                        f" {file}.damaged; rm -f {file}-wal {file}-shm) and give the same command again; `posttrain"
                        " doctor` says what is in it and what is not"
                    )
            newer = (
                "Its database was written by a newer version of it; install that one (`pip install -U prefect mlflow`),"
                " or set POSTTRAIN_HOME to another directory. "
                if "Can't locate revision" in _tail(log, 60)
                else ""
            )
            raise ServiceError(
                f"{name} ended with status {process.returncode} while starting. {newer}Its log: {log}\n{_tail(log)}"
            )
        if answers(health):
            return _listens(process.pid, urllib.parse.urlsplit(health).port)
        time.sleep(0.1)
    raise ServiceError(f"{name} did not answer at {health} within {START_SECONDS:.0f} s. Its log: {log}\n{_tail(log)}")


def _listens(pid: int, port: int) -> bool:
    """Whether a process or one below it listens at a port; True where the system does not say."""
    import psutil

    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                for one in process.net_connections("tcp"):
                    if one.status == psutil.CONN_LISTEN and one.laddr.port == port:
                        return True
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
    return False


def state_of(log: str) -> Path:
    """The state directory of a service's log."""
    return Path(log).parent.parent


def answers(health: str, timeout: float = 2.0) -> bool:
    """True when the URL answers with a success status; of this machine's own servers no proxy is asked."""
    from stages.running import connections

    try:
        with connections.answer(health, None, {}, timeout) as found:
            return found.status < 300
    except connections.Broken:
        return False


def _tail(log: str, lines: int = 15) -> str:
    text = Path(log).read_text(errors="replace").splitlines() if Path(log).exists() else []
    return "\n".join(text[-lines:])


def _check_addresses(host: str, *ports: int | None) -> None:
    """Raise ConfigError where a server could never listen: an address of another machine, a port that there is not or
    that this user may not have, one port for two servers."""
    from stages.spec import ConfigError

    given = [port for port in ports if port is not None]
    if wrong := [port for port in given if not 1 <= port <= 65535]:
        raise ConfigError(f"port {wrong[0]} is none; write one from 1 to 65535, or none (a free one is then chosen)")
    if len(given) > len(set(given)):
        raise ConfigError(
            f"port {given[0]} is given for Prefect and for MLflow; give another one to one of them, or none"
        )
    for port in (0, *given):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except PermissionError:
                raise ConfigError(f"port {port} is not for this user; write one above 1023, or none") from None
            except OSError as error:  # a host that has no such name raises one, too
                if error.errno != errno.EADDRINUSE:
                    raise ConfigError(
                        f"host {host!r} is no address of this machine ({error.strerror}); write 127.0.0.1 for this machine"
                        " alone, 0.0.0.0 for all networks"
                    ) from None


def _port(host: str, wanted: int | None, usual: int) -> int:
    if wanted is not None:
        if not _is_free(host, wanted):
            raise ServiceError(f"port {wanted} is taken; give another one or none (a free one is then chosen)")
        return wanted
    return usual if _is_free(host, usual) else _free(host)


def _elsewhere(entry: dict, host: str | None, port: int | None) -> bool:
    """Whether a server runs at another address than the one that was asked for (None: none was)."""
    moved = port is not None and port != urllib.parse.urlsplit(entry["url"]).port
    return moved or host is not None and host != (entry.get("host") or host)


def from_other_machines(entry: dict) -> str | None:
    """The URL of a server that listens on all networks by the name of this machine; None of any other one."""
    if entry.get("host") not in EVERYWHERE:
        return None
    return f"http://{socket.gethostname().lower()}:{urllib.parse.urlsplit(entry['url']).port}"


def _last_port(state: Path, name: str) -> int:
    """The port at which a service of `state` was started last and not stopped since, else the usual one."""
    try:
        return urllib.parse.urlsplit(recorded(state)[name]["url"]).port or PORTS[name]
    except (KeyError, TypeError, ValueError):
        return PORTS[name]


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _free(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _reachable(host: str) -> str:
    return LOCAL if host in EVERYWHERE else host


def names_here(host: str, port: int) -> dict[str, str]:
    """Variables with which an MLflow server at `host` answers browsers of other machines, by the names and addresses
    that this one has. Without them it takes public addresses and all names for an attack (DNS rebinding), and refuses
    whatever a page that is not of localhost sends, be it the search for runs. {} where only this machine can reach it.
    """
    import psutil

    if host == "localhost" or host.startswith("127."):
        return {}
    cards = psutil.net_if_addrs().values()
    addresses = {one.address for card in cards for one in card if one.family == socket.AF_INET}
    names = sorted({host.lower(), socket.gethostname().lower(), *addresses} - {"0.0.0.0", "127.0.0.1"})
    served = [f"{name}:{port}" for name in names] + (names if port == 80 else [])
    private = ("10.*", "192.168.*", *(f"172.{i}.*" for i in range(16, 32)))  # as MLflow does by itself
    return {
        "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(["localhost:*", "127.0.0.1:*", *private, *served]),
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": ",".join(f"http://{one}" for one in served),
    }


def _without(environment: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environment.items() if key != name}


# ---------------------------------------------------------------- stop


def down(state: Path, *, say=lambda text: None) -> list[str]:
    """Cancel the worker's runs, stop every service with everything it started; returns the names stopped."""
    with _starting(state, say):
        return _down(state, say)


def _down(state: Path, say) -> list[str]:
    alive = running(state)
    others = {
        name: process.username() if process else "another user"
        for name, entry in alive.items()
        if ((process := _process(entry)) and os.geteuid() not in (0, process.uids().real)) or _hidden(entry)
    }
    if others:  # before any run is cancelled
        raise ServiceError(
            "; ".join(f"{name} was started by {user}" for name, user in others.items())
            + "; only who started a server, or root, can stop it: ask for a `posttrain down`"
        )
    if "prefect" in alive and "worker" in alive and answers(alive["prefect"]["url"] + "/api/health"):
        os.environ["PREFECT_API_URL"] = alive["prefect"]["url"] + "/api"
        cancelled = _cancel_runs(wait=25)
        if cancelled:
            say(f"cancelled {cancelled} running flow(s); the same run continues when started again")
    for name in ("worker", "mlflow", "prefect"):
        if name in alive:
            say(f"stopping {name}")
            _stop([alive[name]["pid"]], grace=15, kept=alive[name].get("kept", False))
    _file(state).unlink(missing_ok=True)
    return list(alive)


def _cancel_runs(wait: float) -> int:
    """Cancel the pool's runs through the worker: killing it would leave them RUNNING for ever."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
    from prefect.states import Cancelled, Cancelling

    active = FlowRunFilter.model_validate({"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}})
    pool = WorkPoolFilter.model_validate({"name": {"any_": [POOL]}})
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(flow_run_filter=active, work_pool_filter=pool)
        for run in runs:
            client.set_flow_run_state(run.id, Cancelling(message="posttrain down"))
        deadline = time.monotonic() + wait
        left = runs
        while left and time.monotonic() < deadline:
            time.sleep(0.5)
            left = client.read_flow_runs(flow_run_filter=active, work_pool_filter=pool)
        for run in left:
            client.set_flow_run_state(run.id, Cancelled(message="posttrain down"), force=True)
    return len(runs)


def _stop(pids: list[int], grace: float, kept: bool = False) -> None:
    """SIGTERM the processes, then SIGKILL whatever of their trees is left after `grace` seconds.

    kept: the processes are those of flows.keep, which then start nothing again and end with their command.
    """
    import psutil

    tree = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            if kept:
                root.send_signal(signal.SIGUSR1)
            tree += [root, *root.children(recursive=True)]
    for process in tree:
        if not kept or process.pid not in pids:
            with contextlib.suppress(psutil.Error):
                process.terminate()
    _, left = psutil.wait_procs(tree, timeout=grace)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=5)
