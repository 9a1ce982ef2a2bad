"""JSON over HTTP to servers with an OpenAI interface (judges, writers, sampling engines) and to reward servers: one
call, one deadline, one kind of error, one way of asking again.
"""

from __future__ import annotations

import email.utils
import functools
import http.client
import json
import os
import re
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

#: Settings that say which server is asked and how, wherever a stage asks one.
SERVER_SETTINGS = ("endpoint", "endpoint_model", "key_variable", "timeout_s", "concurrency")
#: Seconds before a server that is away or overloaded is asked again, unless it asks for more (``Retry-After``).
WAITS = (1.0, 4.0, 15.0)
#: Seconds of a server's ``Retry-After`` that are waited at most.
LONGEST_WAIT = 120.0


class ServerError(RuntimeError):
    """A server did not answer as it should; ``status`` is its HTTP status, None where there was no answer;
    ``retry_after``: seconds after which it wants to be asked again; ``unreachable``: no connection came about.
    """

    def __init__(self, text: str, status: int | None = None, retry_after: float = 0.0, unreachable: bool = False):
        super().__init__(text)
        self.status, self.retry_after, self.unreachable = status, retry_after, unreachable

    @property
    def passing(self) -> bool:
        """Whether asking again may help: no answer or one that is none, overload, or a fault of the server."""
        return self.status is None or self.status in (200, 408, 429) or self.status >= 500

    @property
    def refusal(self) -> bool:
        """Whether it is about this one request (too long, refused content, an answer that is none) and not about the
        server.
        """
        return self.status in (200, 400, 413, 422)

    @property
    def away(self) -> bool:
        """Whether it is about the server whatever is asked: nobody listens there, it does not take the key, wants to be
        paid, does not know the path or the model, or has no room for long.
        """
        return (
            self.unreachable
            or 300 <= (self.status or 0) < 400
            or self.status in (401, 402, 403, 404, 405, 407, 410, 429, 502, 503, 504)
        )

    @property
    def of_one(self) -> bool:
        """Whether it may be about one request where the server answers others: it took too long, for the server or one
        before it, or is refused for what it says.
        """
        return self.status in (403, 504) or self.status is None and not self.unreachable


def request_json(url: str, body: dict | None = None, *, key_variable: str = "", timeout_s: float = 60.0):
    """The parsed answer to a POST of ``body`` (a GET without one), or None where the answer is empty.

    key_variable: environment variable that holds the bearer key, if one is needed.

    timeout_s: seconds until the server says something, and until all of its answer is there.

    Raises:
        ServerError: no whole answer in time, an HTTP error, an answer that is no JSON, or a key that is not set.
    """
    headers, key = {"Content-Type": "application/json"}, _key(key_variable) if key_variable else ""
    if key:
        headers["Authorization"] = "Bearer " + key
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    try:
        with _opener(request.type, _proxy(url)).open(request, timeout=timeout_s) as answer:
            text = _whole(answer, timeout_s)
        return _writable(json.loads(text)) if text.strip() else None
    except urllib.error.HTTPError as error:
        try:
            said = error.read(4000).decode(errors="replace").strip()
        except (OSError, http.client.HTTPException):  # the status is what counts
            said = ""
        if 300 <= error.code < 400:
            said = f"it sends on to {error.headers.get('Location')}; write that address, keys are not sent on"
        if key:  # some servers repeat what they do not take
            said = said.replace(key, "(the key)")
        raise ServerError(
            f"HTTP {error.code}: {said[:400] or error.reason}", error.code, _seconds(error.headers.get("Retry-After"))
        ) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        # urllib's own error is of the connection; one that broke while the request was sent is of this request
        reason = getattr(error, "reason", None)
        unreachable = isinstance(error, urllib.error.URLError) and not isinstance(
            reason, (ConnectionResetError, BrokenPipeError)
        )
        raise ServerError(
            f"{type(error).__name__}: {error}{_way_there(url, reason) if unreachable else ''}",
            unreachable=unreachable,
        ) from error


def _key(variable: str) -> str:
    """The key in an environment variable, without the line break that files end with."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ServerError(
            f"the key is expected in the environment variable {variable}, which is"
            f" {'empty' if variable in os.environ else 'not set'}; export it",
            401,
        )
    if not (key.isascii() and key.isprintable()):  # what http.client says of it would show it
        raise ServerError(
            f"the environment variable {variable} holds a line break or another character that no key has; export the"
            " key alone",
            401,
        )
    return key


class _Stays(urllib.request.HTTPRedirectHandler):
    """A request that is sent on is an HTTPError: urllib would send the key to another host, and a GET for a POST."""

    def redirect_request(self, *arguments):
        return None


def _proxy(url: str) -> str | None:
    """The proxy that the environment names for an address (``https_proxy``, ``no_proxy``); none for this machine's own
    servers, which no proxy reaches.
    """
    parts = urllib.parse.urlsplit(url)
    host = (parts.hostname or "").lower()
    if (
        host in ("localhost", "::1")
        or re.fullmatch(r"127(\.\d+){3}", host)
        or urllib.request.proxy_bypass(parts.netloc)
    ):
        return None
    return urllib.request.getproxies().get(parts.scheme)


@functools.cache
def _opener(scheme: str, proxy: str | None) -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_Stays, urllib.request.ProxyHandler({scheme: proxy} if proxy else {}))


def _way_there(url: str, reason) -> str:
    """What is to be known where no connection came about."""
    if isinstance(reason, ssl.SSLCertVerificationError):
        return "; if the server is yours, export SSL_CERT_FILE=FILE with the certificate that signs its own"
    if isinstance(reason, ssl.SSLError):
        return "; a server without TLS is written with http://"
    if proxy := _proxy(url):
        host = urllib.parse.urlsplit(proxy if "//" in proxy else f"//{proxy}")
        return (
            f"; it was asked through the environment's proxy at {host.hostname}:{host.port}, no_proxy=HOST asks without"
        )
    return ""


def _writable(value):
    """A parsed answer whose texts can be written as UTF-8: half of a character (a server that streams bytes cuts emoji
    in two) becomes the replacement character.
    """
    if isinstance(value, str):
        return value if value.isascii() else re.sub("[\ud800-\udfff]", "\ufffd", value)
    if isinstance(value, list):
        return [_writable(one) for one in value]
    return {_writable(name): _writable(one) for name, one in value.items()} if isinstance(value, dict) else value


def _whole(answer, timeout_s: float) -> bytes:
    """The body of an answer. A socket's time-out begins anew with every byte, which servers send to keep a waiting
    request alive, so the whole has a deadline of its own.
    """
    parts, deadline = [], time.monotonic() + timeout_s
    while part := answer.read1(1 << 16):
        parts.append(part)
        if time.monotonic() > deadline:
            raise TimeoutError(f"only a part of the answer came in {timeout_s:g} seconds")
    if answer.length:  # read1 does not say so by itself
        raise http.client.IncompleteRead(b"".join(parts), answer.length)
    return b"".join(parts)


def _seconds(text: str | None) -> float:
    """Seconds of a Retry-After header, which may be a date."""
    try:
        return max(0.0, float(text or 0))
    except ValueError:
        try:
            return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
        except ValueError:
            return 0.0


def patiently(ask: Callable):
    """What ``ask()`` gives. Where asking again may help it is asked again, after growing waits.

    Raises the last ServerError.
    """
    for wait in (*WAITS, None):
        try:
            return ask()
        except ServerError as error:
            if wait is None or not error.passing:
                raise
            time.sleep(max(wait, min(error.retry_after, LONGEST_WAIT)))


class ChatServer:
    """The model of a server with the OpenAI chat interface (``/chat/completions``).

    Args:
        endpoint: base URL, for example ``http://localhost:8000/v1``. model: name the server knows. key_variable:
            environment variable that holds the key, if one is needed; keys never enter a configuration. timeout_s:
            seconds of one answer. concurrency: requests under way at once.
    """

    def __init__(
        self, endpoint: str, model: str, key_variable: str = "", timeout_s: float = 60.0, concurrency: int = 8
    ):
        self.endpoint = endpoint.rstrip("/")
        self.model = model
        self.key_variable = key_variable
        self.timeout_s = timeout_s
        self.concurrency = concurrency
        self.answered = False  # anything at all: a 403 may then be of one request

    def ask(self, messages: list[dict], **settings) -> dict:
        """The choice that answers a conversation, with the answer's ``usage``.

        Raises ServerError, after asking again where that may help.
        """
        body = {"model": self.model, "messages": messages, **settings}

        def once() -> dict:
            answer = request_json(
                self.endpoint + "/chat/completions", body, key_variable=self.key_variable, timeout_s=self.timeout_s
            )
            try:
                return {**answer["choices"][0], "usage": answer.get("usage") or {}}
            except (KeyError, IndexError, TypeError, AttributeError) as error:
                raise ServerError(
                    f"the answer is no chat completion ({type(error).__name__}: {error})"
                    + f": {json.dumps(answer)[:200]}" * (answer is not None),
                    200,
                ) from error

        choice = patiently(once)
        self.answered = True
        return choice

    def each(self, function: Callable, of: Iterable) -> list:
        """As :func:`each`, with as many under way as the server is to be asked at once."""
        return each(function, of, self.concurrency)


def each(
    function: Callable, of: Iterable, concurrency: int, progress: Callable[[int, int], None] | None = None
) -> list:
    """``function`` of each, in their order, at most ``concurrency`` under way at once; its first error ends it.
    progress: told after each how many there are by now, and of how many.
    """
    of, found = list(of), []

    def keep(value) -> None:
        found.append(value)
        if progress is not None:
            progress(len(found), len(of))

    if len(of) < 2 or concurrency == 1:
        for one in of:
            keep(function(one))
        return found
    with ThreadPoolExecutor(min(concurrency, len(of))) as pool:
        futures = [pool.submit(function, one) for one in of]
        try:
            for future in futures:
                keep(future.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return found


def said(choice: dict) -> str:
    """The text of a choice, which some servers send in parts; empty where it has none."""
    content = (choice.get("message") or {}).get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)
