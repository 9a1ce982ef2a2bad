"""What servers answered, on disk as it comes, so that a stage that was ended or killed asks, and pays, for none of it
twice: files in ``answers/`` of the work directory, a line each.

:func:`once`      an answer to an engine, judge or reward server of what no checkpoint holds yet: the next start reads
                  it instead of asking, once. Checkpoints drop what they hold (:func:`settled`).
:class:`Journal`  a judge's replies of a whole stage, which asks for equal ones once (judge, rate, win_rate)

A kill loses what was under way, a power cut what came in the last ``SYNC_SECONDS``, ``SYNC_ANSWERS`` at most. Answers
are found by what was asked (the body of the request with its seed; who answers, by name; of a server that was given
weights their digest): keys, headers and addresses stay out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stages.running.http_json import ServerError
from stages.running.servers import Served, each, rule_of
from storage.files import fsync_dir

#: Answers, and seconds, after which what was written is made durable.
SYNC_ANSWERS, SYNC_SECONDS = 16, 1.0

_open: _Answers | None = None
_kept = threading.local()  # by_caller: who asks in this thread keeps the answers himself


# -- since the last checkpoint -----------------------------------------------------------------------------------------


def begin(folder: Path, rank: int, step: int, config: Any) -> None:
    """Keep the answers of the stage that starts now, on this rank.

    Args:
        step: of the checkpoint that it continues from, 0 without one. config: its settings as plain JSON, in which
            servers have their addresses.
    """
    global _open
    _open = _Answers(folder, rank, step, list(dict.fromkeys(_addresses(config))))


def end() -> None:
    """Keep no more."""
    global _open
    if _open is not None:
        _open.lines.close()
    _open = None


def keeps() -> bool:
    """Whether answers are kept: what is under way is then worth waiting for."""
    return _open is not None


def mark() -> int:
    """Where the answers from now on begin, for :func:`forget`."""
    return _open.lines.size() if _open is not None else 0


def forget(since: int) -> None:
    """Drop the answers behind a :func:`mark` of this start: what they were for is on disk (:mod:`stages.running.blocks`)."""
    if _open is not None:
        _open.lines.cut(since)


def settled(step: int, oldest: int) -> None:
    """The checkpoint of ``step`` is there: answers from now on are none of its, and those before the ``oldest`` one
    that is kept are dropped. By rank 0, whose files tell the others.
    """
    if _open is not None:
        _open.turn(step, oldest)


def once(
    address: str,
    about: list,
    ask: Callable[[], Any],
    served: Served,
    request: Hashable,
    keep: Callable[[Any], Any] = lambda answer: answer,
):
    """What ``ask()`` gives, plain JSON, asked as :meth:`Served.settle` says; or what the server at ``address`` answered
    to the same before the stage was killed.

    about: who answers and all that decides the answer, plain JSON. request: what it is, as ``settle`` takes it. keep:
    what is kept of an answer; of one that it gives None for nothing is, so that it is asked for another time.
    """
    if _open is None or getattr(_kept, "by_caller", False):
        return served.settle(ask, request)
    # a server may move, two of one name are told apart
    address = address.rstrip("/")
    place = _open.addresses.index(address) if address in _open.addresses else address
    key = hashlib.sha256(json.dumps([place, *about], sort_keys=True).encode()).hexdigest()[:32]
    if (known := _open.take(key)) is not None:
        served.has_answered(ask)
        return known[0]
    if _open.earlier:
        served.has_answered(served.probe)
    answer = served.settle(ask, request)
    if (kept := keep(answer)) is not None:
        _open.add({"key": key, "answer": kept})
    return answer


class _Answers:
    """The files ``STEP-RANK.jsonl`` of one rank: what was answered behind the checkpoint of a step.

    Ranks after the first learn of checkpoints by the first one's files. Every rank reads the files of all, since a
    checkpoint resumes on any number of them.
    """

    def __init__(self, folder: Path, rank: int, step: int, addresses: list[str]):
        self.folder, self.rank, self.addresses = folder, rank, addresses
        self.waiting: dict[str, deque] = {}
        self._lock = threading.Lock()
        there = files(folder)
        for (began, _), path in sorted(there.items()):
            if rank or began >= step:
                for entry in entries(path):
                    self.waiting.setdefault(entry["key"], deque()).append(entry["answer"])
        self.earlier = bool(step or self.waiting)  # servers have answered an earlier start
        self.step = step if rank == 0 else max((began for began, of in there if of == rank), default=0)
        self.lines = self._lines()

    def _lines(self) -> Lines:
        return Lines(self.folder / f"{self.step:010d}-{self.rank}.jsonl")

    def take(self, key: str) -> tuple | None:
        """(an answer,) of an earlier start that was not taken yet."""
        with self._lock:
            return (self.waiting[key].popleft(),) if self.waiting.get(key) else None

    def add(self, entry: dict) -> None:
        if self.rank:
            steps = sorted(began for began, of in files(self.folder) if of == 0)
            if steps and steps[-1] > self.step:
                self.turn(steps[-1], steps[-2] if len(steps) > 1 else steps[-1])
        self.lines.append(entry)

    def turn(self, step: int, oldest: int) -> None:
        with self._lock:
            if step > self.step or not self.rank:
                self.lines.close()
                self.step = step
                self.lines = self._lines()
                if self.folder.is_dir() or int(os.environ.get("WORLD_SIZE", "1")) > 1:  # the others learn of it by this
                    self.folder.mkdir(parents=True, exist_ok=True)
                    self.lines.path.touch()
        for (began, of), path in files(self.folder).items():
            if began < oldest and of == self.rank:
                path.unlink(missing_ok=True)


def files(folder: Path) -> dict[tuple[int, int], Path]:
    """{(step, rank): file} of the answers behind checkpoints."""
    found = {}
    for path in folder.glob("*-*.jsonl"):
        step, _, rank = path.stem.partition("-")
        if step.isdigit() and rank.isdigit():
            found[int(step), int(rank)] = path
    return found


def _addresses(value) -> Iterator[str]:
    """The addresses among settings, in their order."""
    if isinstance(value, dict):
        for one in value.values():
            yield from _addresses(one)
    elif isinstance(value, list):
        for one in value:
            yield from _addresses(one)
    elif isinstance(value, str) and value.startswith(("http://", "https://")):
        yield value.rstrip("/")


# -- of a whole stage --------------------------------------------------------------------------------------------------


class Journal:
    """The answers of a file: dataclasses with an ``error``, which those that are kept have not. Of a request without
    answer its key is kept, so that the next start asks it last; ``answered``: a request that was answered, as JSON gives
    it back.

    Args:
        path: of the file, in the stage's work directory. read: an answer of its fields, as JSON gives them back.
    """

    def __init__(self, path: Path, read: Callable[[dict], Any]):
        self.lines, self._lock = Lines(path), threading.Lock()
        self.known, self.answered, self._last = {}, None, set()
        for one in entries(path):
            if "answer" in one:
                self.known[one["key"]] = read(one["answer"])
                self.answered = self.answered or one.get("request")
            else:
                self._last.add(one["key"])

    def ask(self, requests: dict[str, Any], ask: Callable, concurrency: int) -> dict:
        """{key: answer} of each request, those that are not known from ``ask(request)``; the first error that concerns
        the server ends it, once what is under way is written.
        """
        keys = sorted((key for key in requests if key not in self.known), key=self._last.__contains__)
        found = dict(
            zip(keys, each(lambda key: self._one(key, requests[key], ask), keys, concurrency, finish=True), strict=True)
        )
        return {key: found[key] if key in found else self.known[key] for key in requests}

    def _one(self, key: str, request, ask: Callable):
        _kept.by_caller = True
        try:
            answer = ask(request)
        except Exception as error:
            if isinstance(error.__cause__, ServerError) and rule_of(error.__cause__).then == "doubt":
                self.lines.append({"key": key})
            raise
        finally:
            _kept.by_caller = False
        if answer.error is not None:
            self.lines.append({"key": key})
            return answer
        with self._lock:
            first, self.answered = self.answered is None, self.answered or request
        self.lines.append({"key": key, "answer": asdict(answer)} | ({"request": request} if first else {}))
        self.known[key] = answer
        return answer


# -- the files ---------------------------------------------------------------------------------------------------------


class Lines:
    """A file of JSON lines that threads write to, each line at once."""

    def __init__(self, path: Path):
        self.path = path
        self._file, self._lock, self._loose, self._synced = None, threading.Lock(), 0, 0.0

    def append(self, entry: dict) -> None:
        text = json.dumps(entry).encode() + b"\n"
        with self._lock:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(self.path, "ab")
                fsync_dir(self.path.parent)
                if _torn(self.path):
                    text = b"\n" + text
            self._file.write(text)
            self._file.flush()
            self._loose += 1
            if self._loose >= SYNC_ANSWERS or time.monotonic() - self._synced >= SYNC_SECONDS:
                os.fsync(self._file.fileno())
                self._loose, self._synced = 0, time.monotonic()

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def cut(self, size: int) -> None:
        with self._lock:
            if self.size() > size:
                os.truncate(self.path, size)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


def entries(path: Path) -> Iterator[dict]:
    """The whole lines of a file; one that a kill or a power cut tore is left out."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def _torn(path: Path) -> bool:
    with open(path, "rb") as file:
        return bool(file.seek(0, os.SEEK_END)) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
