"""Environments a policy acts in over several turns, each episode in a killable, limited process of its own (AGENT-RL).

    class MyEnvironment:
        def __init__(self, **options): ...
        def reset(self, task: dict, seed: int) -> list[dict]                     # the messages an episode starts with
        def step(self, action: str) -> (messages, reward, done, events)          # what the policy's text led to

``task`` is a ``prompts/1`` row. An environment is a function of (task, seed, actions): the trajectories of a group
start from the same messages. ``messages`` are shown to the policy before its next turn, normally ``{"role": "tool",
"content": ...}``; ``events`` are strings: what happened, for rewards and metrics. ``goal_verified`` says that the task
is solved, ``error:WHY`` that a call failed (a failure is an observation, not an exception), ``NAME:2/4`` that two of
four were done.

Processes. One host per pool imports the environment once and forks a child per episode: a child that hangs, crashes or
eats memory is killed and costs its own trajectory; one whose episode ended well serves another, with an environment of
its own. Children have limits on memory, file size and open files, no network unless asked for, and die with the host,
which dies with the stage. Nothing but the standard library is imported here, so that a host starts at once.
"""

from __future__ import annotations

import collections
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import Any

from stages.running.sandbox import end_with_parent, limit_resources, no_network

#: Built-in environments: name -> "module:Class".
ENVIRONMENTS = {"tools": "stages.acting.tools:ToolEnvironment", "verdicts": "stages.acting.verdicts:VerdictEnvironment"}
GOAL = "goal_verified"
_START_S = 120.0  # a loaded machine may need this long to start an interpreter and import somebody's packages
_LINE = 8 << 20


class EnvironmentFailure(RuntimeError):
    """The environment cannot be started, or its host died; the text says why."""


@dataclass(frozen=True)
class EnvironmentLimits:
    """timeout_s: wall seconds per reset or step. memory_mib: address space of an episode. workers: episodes that
    compute at a time (0 = one per core). network: whether an episode may open sockets."""

    timeout_s: float = 10.0
    memory_mib: int = 1024
    workers: int = 0
    network: bool = False


@dataclass(frozen=True)
class Observation:
    """Answer of an environment to a reset or a step, after so many wall ``seconds``; ``error`` is set when the
    episode's process failed, and nothing else counts then."""

    messages: tuple = ()
    reward: float = 0.0
    done: bool = False
    events: tuple[str, ...] = ()
    error: str | None = None
    seconds: float = 0.0


def path_of(name: str) -> str:
    """ "module:Class" of an environment's name; raises ValueError that says what to write."""
    if ":" in name:
        return name
    if name not in ENVIRONMENTS:
        raise ValueError(
            f"there is no environment {name!r}; write one of {', '.join(ENVIRONMENTS)} (in rl also debate), or"
            " module:Class of your own"
        )
    return ENVIRONMENTS[name]


class EnvironmentPool:
    """Episodes of one kind of environment. ``reset`` opens some, ``step`` advances some, ``close`` ends some (or all,
    and the host).
    """

    def __init__(self, name: str, options: dict | None = None, limits: EnvironmentLimits = EnvironmentLimits()):
        self.path, self.options, self.limits = path_of(name), dict(options or {}), limits
        self.process, self.next_id = None, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def reset(self, tasks: list[dict], seeds: list[int]) -> tuple[list[int], list[Observation]]:
        """(episode ids, first observations) of new episodes."""
        ids = list(range(self.next_id, self.next_id + len(tasks)))
        self.next_id += len(tasks)
        return ids, self._ask(
            [{"id": i, "op": "reset", "task": t, "seed": int(s)} for i, t, s in zip(ids, tasks, seeds)]
        )

    def step(self, ids: list[int], actions: list[str]) -> list[Observation]:
        """What each episode's action led to."""
        return self._ask([{"id": i, "op": "step", "action": a} for i, a in zip(ids, actions)])

    def end(self, ids: list[int]) -> None:
        """End episodes."""
        if ids and self.process is not None:
            self._ask([{"id": i, "op": "close"} for i in ids])

    def close(self) -> None:
        """End the host and every episode."""
        if self.process is None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # its children are told by the kernel
        except ProcessLookupError:
            pass
        self.process.wait()
        self.requests.close()
        self.replies.close()
        self.directory.cleanup()
        self.process = None

    def _start(self) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="environment-")
        read_fd, write = os.pipe()
        read, write_fd = os.pipe()
        home = self.directory.name
        paths = [os.path.abspath(p) for p in sys.path]
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": home,
            "TMPDIR": home,
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join(paths),
        }
        about = json.dumps(
            {
                "path": self.path,
                "options": self.options,
                "timeout_s": self.limits.timeout_s,
                "memory": self.limits.memory_mib << 20,
                "workers": self.limits.workers or len(os.sched_getaffinity(0)),
                "network": self.limits.network,
            }
        )
        with open(os.path.join(home, "host.log"), "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "stages.acting.environments", str(read_fd), str(write_fd), about],
                pass_fds=(read_fd, write_fd),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=home,
                env=environment,
                start_new_session=True,
            )
        os.close(read_fd)
        os.close(write_fd)
        self.requests, self.replies = os.fdopen(write, "w", encoding="utf-8"), os.fdopen(read, "r", encoding="utf-8")
        said = self.replies.readline() if select.select([self.replies], [], [], _START_S)[0] else ""
        first = json.loads(said) if said.endswith("\n") else {"error": "no answer"}
        if "error" in first:
            text = f"environment {self.path} cannot be started: {first['error']}{self._log()}"
            self.close()
            raise EnvironmentFailure(text)

    def _log(self) -> str:
        with open(os.path.join(self.directory.name, "host.log"), encoding="utf-8", errors="replace") as log:
            tail = log.read()[-1500:].strip()
        return f"\n{tail}" if tail else ""

    def _ask(self, requests: list[dict]) -> list[Observation]:
        if not requests:
            return []
        if self.process is None:
            self._start()

        def send():
            try:
                for request in requests:
                    self.requests.write(json.dumps(request) + "\n")
                self.requests.flush()
            except (BrokenPipeError, ValueError):
                pass  # the host is gone; the reader below says so

        writer = threading.Thread(target=send, daemon=True)
        writer.start()
        found: dict[int, Observation] = {}
        while len(found) < len(requests):
            line = self.replies.readline()
            if not line.endswith("\n"):
                raise EnvironmentFailure(f"the host of environment {self.path} ended{self._log()}")
            reply = json.loads(line)
            seconds = reply.get("seconds", 0.0)
            found[reply["id"]] = (
                Observation(error=reply["error"], seconds=seconds)
                if reply.get("error")
                else Observation(
                    tuple(reply["messages"]), reply["reward"], reply["done"], tuple(reply["events"]), seconds=seconds
                )
            )
        writer.join()
        return [found[r["id"]] for r in requests]


# ------------------------------------------------------------------------------------------------------------ the host process


def well_formed(text: Any) -> str:
    """As text that can be tokenised and stored: a lone half of a surrogate pair (``json.loads('"\\ud83d"')``,
    ``errors="surrogateescape"``) becomes U+FFFD.
    """
    return str(text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def plain_reply(answer: Any, op: str) -> dict:
    """A reset's or step's answer as JSON, checked: an environment that answers wrongly is told what to return."""
    if op == "reset":
        answer = (answer, 0.0, False, ())
    try:
        messages, reward, done, events = answer
    except (TypeError, ValueError):
        raise TypeError(f"step must return (messages, reward, done, events), not {answer!r:.80}") from None
    try:
        messages = [
            {well_formed(k): None if v is None else well_formed(v) for k, v in dict(m).items()} for m in messages
        ]
    except (TypeError, ValueError):
        raise TypeError(
            f"{op} must return a list of messages such as {{'role': 'tool', 'content': 'text'}}, not {messages!r:.80}"
        ) from None
    if any("role" not in m for m in messages) or (op == "reset" and not messages):
        raise TypeError(
            f"{op} must return a list of messages such as {{'role': 'user', 'content': 'text'}}, not {messages!r:.80}"
        )
    if isinstance(done, str):
        raise TypeError(f"step must return done as True or False, not the text {done!r:.80}")
    if events is None or isinstance(events, (str, bytes)):
        raise TypeError(
            f"step must return events as a list of strings such as ['goal_verified'] or [], not {events!r:.80}"
        )
    try:
        reward = float(reward)
    except (TypeError, ValueError):
        raise TypeError(f"step must return its reward as a number, not {reward!r:.80}") from None
    if reward != reward or abs(reward) == float("inf"):
        raise ValueError(f"the reward of a step must be a finite number, not {reward}")
    return {"messages": messages, "reward": reward, "done": bool(done), "events": [well_formed(e) for e in events]}


def _episode(made, read_fd: int, write_fd: int, memory: int, options: dict) -> None:
    """The child of one episode: answers its requests until its pipe closes."""
    os.setsid()
    end_with_parent()
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in (read_fd, write_fd):
            try:
                os.close(fd)
            except OSError:
                pass  # the listing's own
    limit_resources(memory)
    environment = None
    for line in os.fdopen(read_fd, "r", encoding="utf-8"):
        request = json.loads(line)
        try:
            if request["op"] == "reset":
                environment = made(**options)
                reply = plain_reply(environment.reset(request["task"], request["seed"]), "reset")
            else:
                reply = plain_reply(environment.step(request["action"]), "step")
            data = json.dumps(reply)
        except MemoryError:
            environment = None
            data = json.dumps({"error": f"memory limit of {memory >> 20} MiB (environment_memory_mib)"})
        except BaseException as error:
            data = json.dumps({"error": well_formed(f"{type(error).__name__}: {str(error)[:300]}")})
        data = data.encode() + b"\n"
        while data:
            data = data[os.write(write_fd, data) :]


class _Host:
    """Relays requests to the episodes' processes, a few at a time, and kills what takes too long."""

    def __init__(self, made, about: dict, read_fd: int, write_fd: int):
        self.made, self.about, self.read_fd, self.write_fd = made, about, read_fd, write_fd
        self.children: dict[int, tuple[int, int, int]] = {}  # episode -> (pid, its requests, its replies)
        self.waiting: collections.deque[dict] = collections.deque()
        self.running: dict[int, float] = {}  # episode -> deadline
        self.buffers: dict[int, bytes] = {}
        self.idle: list[tuple[int, int, int]] = []  # processes whose episode was ended without a failure

    def reply(self, episode: int, **values) -> None:
        data = (json.dumps({"id": episode, **values}) + "\n").encode()
        while data:
            data = data[os.write(self.write_fd, data) :]

    def serve(self) -> None:
        buffer = b""
        while True:
            while self.waiting and len(self.running) < self.about["workers"]:
                self.dispatch(self.waiting.popleft())
            owners = {self.children[e][2]: e for e in self.running}
            wait = None if not self.running else max(0.0, min(self.running.values()) - time.monotonic())
            poll = select.poll()
            for fd in (self.read_fd, *owners):
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll(None if wait is None else wait * 1000 + 1):
                if fd == self.read_fd:
                    chunk = os.read(fd, 1 << 16)
                    if not chunk:
                        return
                    *lines, buffer = (buffer + chunk).split(b"\n")
                    self.waiting.extend(map(json.loads, lines))
                else:
                    self.hear(owners[fd])
            now = time.monotonic()
            for episode in [e for e, deadline in self.running.items() if deadline <= now]:
                self.kill(episode)
                self.reply(
                    episode, error=f"time-out after {self.about['timeout_s']:g} s", seconds=self.about["timeout_s"]
                )

    def dispatch(self, request: dict) -> None:
        episode = request["id"]
        if request["op"] == "close":
            if episode in self.children:
                self.idle.append(self.children.pop(episode))
                del self.buffers[episode]
            self.reply(episode, messages=[], reward=0.0, done=True, events=[])
            return
        if request["op"] == "reset":
            self.children[episode] = self.idle.pop() if self.idle else self.fork()
            self.buffers[episode] = b""
        if episode not in self.children:
            self.reply(episode, error="the episode has ended")
            return
        self.running[episode] = time.monotonic() + self.about["timeout_s"]
        data = json.dumps(request).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self.children[episode][1], data) :]
        except BrokenPipeError:
            self.gone(episode)

    def fork(self) -> tuple[int, int, int]:
        child_read, requests = os.pipe()
        replies, child_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _episode(self.made, child_read, child_write, self.about["memory"], self.about["options"])
            finally:
                os._exit(0)
        os.close(child_read)
        os.close(child_write)
        return pid, requests, replies

    def hear(self, episode: int) -> None:
        chunk = os.read(self.children[episode][2], 1 << 16)
        self.buffers[episode] += chunk
        if not chunk or len(self.buffers[episode]) > _LINE:
            self.gone(episode, "more than 8 MiB of observation" if chunk else None)
        elif self.buffers[episode].endswith(b"\n"):
            line, self.buffers[episode] = self.buffers[episode], b""
            seconds = time.monotonic() - (self.running.pop(episode) - self.about["timeout_s"])
            reply = json.loads(line)
            if "error" in reply:
                self.kill(episode)
            self.reply(episode, **reply, seconds=seconds)

    def gone(self, episode: int, reason: str | None = None) -> None:
        status = self.kill(episode, grace=0.0 if reason else 0.5)
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit status {os.WEXITSTATUS(status)}"
        self.reply(episode, error=reason or f"crashed ({how})")

    def kill(self, episode: int, grace: float = 0.0) -> int:
        """End an episode's process and everything it started; its wait status (0 where there is none). ``grace``:
        seconds for one that is ending by itself.
        """
        self.running.pop(episode, None)
        self.buffers.pop(episode, None)
        pid, requests, replies = self.children.pop(episode, (0, -1, -1))
        if not pid:
            return 0
        os.close(requests)
        os.close(replies)
        ended, status = os.waitpid(pid, os.WNOHANG)
        until = time.monotonic() + grace
        while not ended and time.monotonic() < until:
            time.sleep(0.002)
            ended, status = os.waitpid(pid, os.WNOHANG)
        for target in (os.killpg, os.kill):  # the group exists once the child has called setsid
            try:
                target(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        return status if ended else os.waitpid(pid, 0)[1]


def main() -> None:
    read_fd, write_fd, about = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    end_with_parent()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard > 0 else 65536, hard))
    try:
        module, _, name = about["path"].partition(":")
        made = getattr(importlib.import_module(module), name)
    except Exception as error:
        os.write(write_fd, (json.dumps({"error": f"{type(error).__name__}: {str(error)[:500]}"}) + "\n").encode())
        return
    if not about["network"]:  # after the import: packages that look at sockets when they are imported still can
        no_network("no network in an environment; write environment_network=true to allow it")
    os.write(write_fd, b'{"ready": true}\n')
    _Host(made, about, read_fd, write_fd).serve()


if __name__ == "__main__":
    main()
