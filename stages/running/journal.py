"""A server's answers on disk as they come, so that a stage that was ended or killed asks, and pays, for none of them
twice.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stages.running.http_json import ServerError
from stages.running.servers import each, rule_of


class Journal:
    """The answers of a file, a line each: dataclasses with an ``error``, which those that are kept have not. Of a
    request without answer its key is kept, so that the next start asks it last; ``answered``: a request that was
    answered, as JSON gives it back.

    Args:
        path: of the file, in the stage's work directory. read: an answer of its fields, as JSON gives them back.
    """

    def __init__(self, path: Path, read: Callable[[dict], Any]):
        self.path, self.known, self.answered = path, {}, None
        self._last: set[str] = set()
        self._lock = threading.Lock()
        text = path.read_bytes() if path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):  # the kill tore the last line
            os.truncate(path, len(whole))
        for line in whole.splitlines():
            one = json.loads(line)
            if "reply" in one:
                self.known[one["key"]] = read(one["reply"])
                self.answered = self.answered or one.get("request")
            else:
                self._last.add(one["key"])

    def ask(self, requests: dict[str, Any], ask: Callable, concurrency: int) -> dict:
        """{key: answer} of each request, those that are not known from ``ask(request)``; the first error that concerns
        the server ends it, once what is under way is written.
        """
        keys = sorted((key for key in requests if key not in self.known), key=self._last.__contains__)
        found = dict(
            zip(
                keys, each(lambda key: self._kept(key, requests[key], ask), keys, concurrency, finish=True), strict=True
            )
        )
        return {key: found[key] if key in found else self.known[key] for key in requests}

    def _kept(self, key: str, request, ask: Callable):
        try:
            answer = ask(request)
        except Exception as error:
            if isinstance(error.__cause__, ServerError) and rule_of(error.__cause__).then == "doubt":
                self._write({"key": key})
            raise
        if answer.error is not None:
            self._write({"key": key})
            return answer
        with self._lock:
            first, self.answered = self.answered is None, self.answered or request
        self._write({"key": key, "reply": asdict(answer)} | ({"request": request} if first else {}))
        self.known[key] = answer
        return answer

    def _write(self, line: dict) -> None:
        with self._lock, open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
