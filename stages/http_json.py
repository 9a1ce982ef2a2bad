"""JSON over HTTP to servers with an OpenAI interface (judges, sampling engines): one call, one deadline, one kind of error."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request


class ServerError(RuntimeError):
    """A server did not answer as it should; ``status`` is its HTTP status, None where there was no answer."""

    def __init__(self, text: str, status: int | None = None):
        super().__init__(text)
        self.status = status

    @property
    def passing(self) -> bool:
        """Whether asking again may help: no answer, overload, or a fault of the server."""
        return self.status is None or self.status in (408, 429) or self.status >= 500


def request_json(url: str, body: dict | None = None, *, key_variable: str = "", timeout_s: float = 60.0):
    """The parsed answer to a POST of ``body`` (a GET without one), or None where the answer is empty.

    key_variable: environment variable that holds the bearer key, if one is needed.

    Raises:
        ServerError: no answer in time, an HTTP error, an answer that is no JSON, or a key that is not set.
    """
    headers = {"Content-Type": "application/json"}
    if key_variable:
        if key_variable not in os.environ:
            raise ServerError(f"the key is expected in the environment variable {key_variable}, which is not set; export it", 401)
        headers["Authorization"] = "Bearer " + os.environ[key_variable]
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            text = answer.read()
        return json.loads(text) if text.strip() else None
    except urllib.error.HTTPError as error:
        raise ServerError(f"HTTP {error.code}: {error.read(400).decode(errors='replace').strip() or error.reason}", error.code) from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise ServerError(f"{type(error).__name__}: {error}") from error
