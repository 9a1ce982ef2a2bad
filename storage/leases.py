"""Leases on disk: one owner at a time for a running stage, a fixed number of GPU slots.

A lease is a JSON file that names its owner: host, boot id, process id, process start time and a heartbeat. It is
free again the moment its owner is gone, whatever killed it: the next claimant looks whether that very process
(same boot, same start time, so a reused process id does not count) still lives. Owners on other hosts are judged by
their heartbeat, a file that they write again and again: how old it is tells the clock of the file system, so the hosts'
own clocks may differ. So are owners in another container of this machine that has the same host name (on the host's
network), whose process ids mean nothing here, and those of other users where the system hides their processes. What a
process owns beside leases (flow runs) names it by :func:`owner`, whose heartbeat is ``HOME/leases/alive/``. Nothing
here needs a server.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import signal
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any, Callable, Iterator

from storage import home
from storage.files import atomic_write_json, read_json, sha256_text

HEARTBEAT_SECONDS = 15.0
FOREIGN_STALE_SECONDS = 300.0  # a lease of another host is dead after this long without a heartbeat
BESIDE_STALE_SECONDS = 60.0  # the same of another container of this machine, whose files no network is in front of
POLL_SECONDS = 0.2


class LeaseBusy(RuntimeError):
    """The lease is held by a living owner (and waiting was not asked for, or took too long)."""

    def __init__(self, text: str, owner: dict[str, Any]):
        super().__init__(text)
        self.owner = owner


def boot_id() -> str:
    """Identity of this boot of this machine."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    import psutil

    return f"boot-{int(psutil.boot_time())}"


@functools.cache
def pid_space() -> str:
    """Identity of the set of processes that a process id here is one of; empty where there is only one."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def start_time(pid: int) -> float | None:
    """Start time of a living process (clock ticks since boot on Linux), None when there is none or it is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        import psutil

        try:
            process = psutil.Process(pid)
            return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
        except psutil.Error:
            return None
    fields = text.rsplit(")", 1)[1].split()  # the command name may hold spaces and brackets
    return None if fields[0] in "ZX" else float(fields[19])


def hidden(pid: int) -> bool:
    """Whether a process is one of another user of which this system shows nothing (/proc mounted with hidepid), not even
    when it began.
    """
    try:
        os.kill(pid, 0)
    except PermissionError:
        return Path("/proc/self/stat").exists() and not os.access(f"/proc/{pid}/stat", os.R_OK)
    except OSError:
        pass
    return False


def this_process(pid: int | None = None) -> dict[str, Any]:
    """Owner record of a process of this machine (default: the current one)."""
    pid = pid or os.getpid()
    return {
        "host": socket.gethostname(),
        "boot": boot_id(),
        "space": pid_space(),
        "pid": pid,
        "start": start_time(pid),
    }


def owner() -> dict[str, Any]:
    """Owner record of the current process for what it owns beside leases; from now on other hosts can see that it
    lives.
    """
    global _beating
    found = this_process()
    with _beating_lock:
        if _beating != (os.getpid(), home.home()):
            _beating = os.getpid(), home.home()
            for left in home.subdir("leases", "alive").iterdir():
                if not _fresh(left, 86400.0):
                    left.unlink(missing_ok=True)
            threading.Thread(
                target=_beat_of, args=(_beat_file(found), _beating), name="owner-beat", daemon=True
            ).start()
            atexit.register(_end_of, _beat_file(found), os.getpid())
            _beat_file(found).touch()
    return found


_beating: tuple[int, Path] | None = None  # (process, state directory) that the heartbeat is of
_beating_lock = threading.Lock()


def _beat_file(owner: dict[str, Any]) -> Path:
    return (
        home.home()
        / "leases"
        / "alive"
        / sha256_text(
            " ".join(str(owner[name]) for name in ("host", "boot", "space", "pid", "start") if name in owner)
        )[:24]
    )


def _beat_of(file: Path, mine: tuple[int, Path]) -> None:
    while _beating == mine:
        with contextlib.suppress(OSError):
            file.touch()
        time.sleep(HEARTBEAT_SECONDS)


def _end_of(file: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in what it forked
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


# heartbeats from the future -> (time written, monotonic clock when this process saw it first)
_ahead: dict[str, tuple[float, float]] = {}


def _fresh(file: Path, seconds: float = FOREIGN_STALE_SECONDS) -> bool:
    """Whether a file was written within so many seconds by the clock of its file system, which stamps the files of all
    hosts. One that is there and cannot be looked at counts as fresh. One from the future, since that clock was set
    back, is so until it was seen unchanged for as long by this process: a living owner writes it again by the present
    clock."""
    try:
        written = file.stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        # a failing disk or mount tells nobody's end, and a lock that is taken over too early breaks the run that holds
        # it
        return True
    try:
        probe = home.subdir("leases") / ".clock"
        probe.touch()
        age = probe.stat().st_mtime - written
    except OSError:  # a state directory that may only be read
        age = time.time() - written
    if age > -HEARTBEAT_SECONDS:
        return age < seconds
    seen, since = _ahead.get(str(file), (None, 0.0))
    if seen != written:
        since = time.monotonic()
        _ahead[str(file)] = written, since
    return time.monotonic() - since < seconds


def seen(owner: dict[str, Any]) -> bool:
    """Whether the process id of an owner record is one of this host and container."""
    return owner.get("host") == socket.gethostname() and owner.get("space", pid_space()) == pid_space()


def alive(owner: dict[str, Any] | None, file: Path | None = None) -> bool:
    """Whether the process of an owner record still runs. Another host's or container's owner counts as alive while its
    heartbeat is fresh: ``file``, by default that of :func:`owner`.
    """
    if not owner or "pid" not in owner:
        return False
    if owner.get("host") != socket.gethostname():
        return _fresh(file or _beat_file(owner))
    if owner.get("boot") != boot_id():
        return False
    if not seen(owner):
        return _fresh(file or _beat_file(owner), BESIDE_STALE_SECONDS)
    started = start_time(int(owner["pid"]))
    if started is None and hidden(int(owner["pid"])):
        return _fresh(file or _beat_file(owner), BESIDE_STALE_SECONDS)
    return started is not None and (owner.get("start") is None or started == owner["start"])


@contextlib.contextmanager
def _guard(path: Path) -> Iterator[None]:
    """Serialises reads and writes of lease files; an OS lock, so a dead holder frees it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / ".guard", "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


class Lease:
    """A held lease; use as a context manager or call :meth:`release`. ``index`` is the slot number for slot leases."""

    def __init__(self, path: Path, index: int | None = None):
        self.path = path
        self.index = index
        self.token = uuid.uuid4().hex
        self._extra: dict[str, Any] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"lease-{path.name}", daemon=True)

    def _write(self) -> None:
        atomic_write_json(self.path, {**this_process(), "token": self.token, "heartbeat": time.time(), **self._extra})

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):
                self._update()

    def _update(self) -> None:
        with _guard(self.path):
            held = read_json(self.path, None)
            if held and held.get("token") == self.token:
                self._write()

    def set_child(self, pid: int | None) -> None:
        """Name the process that does the work: the lease stays taken until that one is gone too."""
        self._extra["child"] = this_process(pid) if pid else None
        self._update()

    def release(self) -> None:
        """Give the lease back (only if it is still ours)."""
        self._stop.set()
        with _guard(self.path):
            held = read_json(self.path, None)
            if held and held.get("token") == self.token:
                self.path.unlink(missing_ok=True)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.release()


def holder(path: Path) -> dict[str, Any] | None:
    """The living owner of a lease file, or None. A worker whose owner died is ended here: it is about to die anyway,
    and until it has, its work directory is not free."""
    held = read_json(path, None)
    if not held:
        return None
    if alive(held, path):
        return held
    child = held.get("child")
    if child and seen(child) and alive(child):
        with contextlib.suppress(OSError):
            os.kill(int(child["pid"]), signal.SIGKILL)
        return held if alive(child) else None
    return None


def _describe(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid')} on {owner.get('host')}"


def acquire(
    name: str,
    *,
    wait: bool = True,
    timeout: float | None = None,
    on_wait: Callable[[str], Any] | None = None,
    on_poll: Callable[[], Any] | None = None,
) -> Lease:
    """Take the lease ``name``. A living owner means waiting (``on_wait`` is told once; ``on_poll`` is called all the
    while and may raise), or LeaseBusy with ``wait=False`` or after ``timeout`` seconds."""
    return _acquire([home.leases_dir() / f"{name}.json"], 1, name, wait, timeout, on_wait, on_poll)[0]


def acquire_slots(
    group: str,
    total: int,
    count: int = 1,
    *,
    apart: int | None = None,
    wait: bool = True,
    timeout: float | None = None,
    on_wait: Callable[[str], Any] | None = None,
    on_poll: Callable[[], Any] | None = None,
) -> list[Lease]:
    """Take ``count`` of ``total`` slots of a group (``gpu``), all or none. apart: no two of them are equal modulo it
    (slots that share a card).
    """
    if count > total:
        raise ValueError(
            f"{count} {group} slots were asked for but there are {total}; ask for at most {total} or set"
            f" POSTTRAIN_GPU_SLOTS={count}"
        )
    paths = [home.leases_dir() / group / f"slot-{i}.json" for i in range(total)]
    return _acquire(paths, count, f"{group} slot", wait, timeout, on_wait, on_poll, apart)


def _acquire(
    paths: list[Path],
    count: int,
    what: str,
    wait: bool,
    timeout: float | None,
    on_wait: Callable[[str], Any] | None,
    on_poll: Callable[[], Any] | None,
    apart: int | None = None,
) -> list[Lease]:
    deadline = None if timeout is None else time.monotonic() + timeout
    told = False
    while True:
        taken: list[Lease] = []
        owner: dict[str, Any] = {}
        with _guard(paths[0]):
            for index, path in enumerate(paths):
                if apart and any(lease.index % apart == index % apart for lease in taken):
                    continue
                found = holder(path)
                if found is None:
                    taken.append(Lease(path, index))
                    if len(taken) == count:
                        break
                else:
                    owner = found
            if len(taken) == count:
                try:
                    for lease in taken:
                        lease._write()
                except BaseException:  # a full disk: those that were written are nobody's
                    for lease in taken:
                        lease.path.unlink(missing_ok=True)
                    raise
        if len(taken) == count:
            for lease in taken:
                lease._thread.start()
            return taken
        if not wait or (deadline is not None and time.monotonic() > deadline):
            raise LeaseBusy(
                f"{what} is held by {_describe(owner)}; wait for it to end, or stop it and run the same command again",
                owner,
            )
        if on_wait and not told:
            on_wait(f"waiting for {what}, held by {_describe(owner)}")
            told = True
        if on_poll:
            on_poll()
        time.sleep(POLL_SECONDS)


def gpu_holders() -> list[dict[str, Any]]:
    """The living owners of GPU slots, for ``posttrain status``."""
    folder = home.leases_dir() / "gpu"
    found = [(path, holder(path)) for path in sorted(folder.glob("slot-*.json"))]
    return [{"slot": int(path.stem.split("-")[1]), **owner} for path, owner in found if owner]
