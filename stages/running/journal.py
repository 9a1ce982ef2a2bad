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

from stages.running.servers import each


class Journal:
    """The answers of a file, a line each: dataclasses with an ``error``, which those that are kept have not.

    Args:
        path: of the file, in the stage's work directory. read: an answer of its fields, as JSON gives them back.
    """

    def __init__(self, path: Path, read: Callable[[dict], Any]):
        self.path, self.known = path, {}
        self._lock = threading.Lock()
        text = path.read_bytes() if path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):  # the kill tore the last line
            os.truncate(path, len(whole))
        for line in whole.splitlines():
            one = json.loads(line)
            self.known[one["key"]] = read(one["reply"])

    def ask(self, requests: dict[str, Any], ask: Callable, concurrency: int) -> dict:
        """{key: answer} of each request, those that are not known from ``ask(request)``; the first error that concerns
        the server ends it, once what is under way is written.
        """
        fresh = {key: request for key, request in requests.items() if key not in self.known}
        found = dict(
            zip(fresh, each(lambda key: self._kept(key, ask(fresh[key])), fresh, concurrency, finish=True), strict=True)
        )
        return {key: found[key] if key in found else self.known[key] for key in requests}

    def _kept(self, key: str, answer):
        if answer.error is None:
            with self._lock, open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "reply": asdict(answer)}) + "\n")
                file.flush()
                os.fsync(file.fileno())
                self.known[key] = answer
        return answer
