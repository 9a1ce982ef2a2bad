"""JSON over HTTP to servers with an OpenAI interface (judges, writers, sampling engines) and to reward servers: one
call, one deadline, one kind of error. What becomes of an error is told in stages/running/servers.py.
"""

from __future__ import annotations

import email.utils
import functools
import http.client
import io
import json
import math
import os
import re
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib

#: Settings that say which server is asked and how, wherever a stage asks one.
SERVER_SETTINGS = ("endpoint", "endpoint_model", "key_variable", "timeout_s", "concurrency")
#: Bytes of an answer at most, unpacked: log-probabilities of a long completion are some MiB.
LONGEST_ANSWER = 64 << 20
#: What http.client says of a proxy that takes no user, or another.
REFUSED_TUNNEL = "Tunnel connection failed: 407"


class ServerError(RuntimeError):
    """A server did not answer as it should; ``status`` is its HTTP status, None where there was no whole answer;
    ``retry_after``: seconds after which it wants to be asked again; ``unreachable``: no connection came about;
    ``final``: asking again would give the same.
    """

    def __init__(
        self,
        text: str,
        status: int | None = None,
        retry_after: float = 0.0,
        unreachable: bool = False,
        final: bool = False,
    ):
        super().__init__(text)
        self.status, self.retry_after, self.unreachable, self.final = status, retry_after, unreachable, final


def request_json(url: str, body: dict | None = None, *, key_variable: str = "", timeout_s: float = 60.0):
    """The parsed answer to a POST of ``body`` (a GET without one), or None where the answer is empty.

    key_variable: environment variable that holds the bearer key, if one is needed.

    timeout_s: seconds until a connection is there, and until all of the answer is there, from its first byte on.

    Raises:
        ServerError: no whole answer in time, an HTTP error, an answer that is no JSON or longer than
            ``LONGEST_ANSWER``, or a key that is not set.
    """
    headers, key = {"Content-Type": "application/json"}, _key(key_variable) if key_variable else ""
    if key:
        headers["Authorization"] = "Bearer " + key
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    try:
        with _opener(request.type, _proxy(url)).open(request, timeout=timeout_s) as answer:
            text, kind = _whole(answer), answer.headers.get("Content-Type")
        return _parsed(text, kind, key) if text.strip() else None
    except urllib.error.HTTPError as error:
        try:
            said = _unpacked(error.read(4000), error.headers, partly=True).decode(errors="replace").strip()
        except (OSError, ValueError, zlib.error, http.client.HTTPException):  # the status is what counts
            said = ""
        if 300 <= error.code < 400:
            said = f"it sends on to {error.headers.get('Location')}; write that address, keys are not sent on"
        wait = _seconds(error.headers)
        raise ServerError(
            f"HTTP {error.code}: {_without(said, key)[:400] or error.reason}"
            + f" (ask again after {wait:.0f} seconds)" * (wait >= 1),
            error.code,
            wait,
        ) from error
    except (OSError, ValueError, RecursionError, zlib.error, http.client.HTTPException) as error:
        # urllib's own error is of the connection; one that broke while the request was sent is of this request
        reason = getattr(error, "reason", None)
        unreachable = isinstance(error, urllib.error.URLError) and not isinstance(
            reason, (ConnectionResetError, BrokenPipeError)
        )
        raise ServerError(
            f"{type(error).__name__}: {_without(str(error), key)}{_way_there(url, reason) if unreachable else ''}",
            unreachable=unreachable,
            final=unreachable and (isinstance(reason, ssl.SSLError) or REFUSED_TUNNEL in str(reason)),
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
    proxies = urllib.request.ProxyHandler({scheme: proxy} if proxy else {})
    return urllib.request.build_opener(_Stays, proxies, _SecureHandler() if scheme == "https" else _Handler)


def _way_there(url: str, reason) -> str:
    """What is to be known where no connection came about."""
    if isinstance(reason, ssl.SSLCertVerificationError):
        return "; if the server is yours, export SSL_CERT_FILE=FILE with the certificate that signs its own"
    if isinstance(reason, ssl.SSLError):
        return "; a server without TLS is written with http://"
    if proxy := _proxy(url):
        host = urllib.parse.urlsplit(proxy if "//" in proxy else f"//{proxy}")
        if REFUSED_TUNNEL in str(reason):
            return (
                f"; the proxy at {host.hostname}:{host.port} wants another user, export"
                " https_proxy=http://USER:PASSWORD@HOST:PORT (percent-encoded)"
            )
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


def shown(answer, key_variable: str, length: int) -> str:
    """The beginning of a parsed answer as JSON, as an error may show it."""
    return _without(json.dumps(answer), os.environ.get(key_variable, "").strip() if key_variable else "")[:length]


def _without(text: str, key: str) -> str:
    """What a server says, without the key, which some repeat where they do not take it."""
    return text.replace(key, "(the key)") if key else text


def _parsed(text: bytes, kind: str | None, key: str):
    try:
        return _writable(json.loads(text))
    except (ValueError, RecursionError) as error:
        begins = _without(text[:4000].decode(errors="replace").strip(), key)[:120]
        raise ServerError(
            f"{type(error).__name__}: {error}; the answer is no JSON but {kind or 'of no named kind'} and begins"
            f" {begins!r}"
        ) from error


class _Until(io.RawIOBase):
    """A socket's bytes until a deadline: a socket's own time-out begins anew with every byte, which servers send to
    keep a waiting request alive.
    """

    def __init__(self, raw, sock, until: float, seconds: float):
        self.raw, self.sock, self.until, self.seconds, self.begun = raw, sock, until, seconds, False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int | None:
        try:
            if (left := self.until - time.monotonic()) <= 0:
                raise TimeoutError
            self.sock.settimeout(left)
            size = self.raw.readinto(buffer)
        except TimeoutError:
            raise TimeoutError(
                f"{'only a part of the answer' if self.begun else 'no answer'} came in {self.seconds:g} seconds"
            ) from None
        self.begun = self.begun or bool(size)
        return size

    def close(self) -> None:
        if not self.closed:
            self.raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """An answer, of a proxy too, whose headers and body have one deadline."""

    def __init__(self, sock, *arguments, until: float, seconds: float, **more):
        super().__init__(sock, *arguments, **more)
        self.fp = io.BufferedReader(_Until(self.fp.detach(), sock, until, seconds))


class _Limited:
    """A connection whose answers have a deadline, its time-out from now on."""

    def __init__(self, *arguments, timeout: float, **more):
        super().__init__(*arguments, timeout=timeout, **more)
        self.response_class = functools.partial(_Response, until=time.monotonic() + timeout, seconds=timeout)


class _Connection(_Limited, http.client.HTTPConnection):
    pass


class _SecureConnection(_Limited, http.client.HTTPSConnection):
    pass


class _Handler(urllib.request.HTTPHandler):
    def http_open(self, request):
        return self.do_open(_Connection, request)


class _SecureHandler(urllib.request.HTTPSHandler):
    def __init__(self):
        super().__init__()
        self.certificates = ssl.create_default_context()
        self.certificates.set_alpn_protocols(["http/1.1"])

    def https_open(self, request):
        return self.do_open(_SecureConnection, request, context=self.certificates)


def _whole(answer) -> bytes:
    """The body of an answer, unpacked. Raises ServerError for one longer than ``LONGEST_ANSWER``."""
    parts, size = [], 0
    while part := answer.read1(1 << 16):
        parts.append(part)
        if (size := size + len(part)) > LONGEST_ANSWER:
            raise _too_long()
    if answer.length:  # read1 does not say so by itself
        raise http.client.IncompleteRead(b"".join(parts), answer.length)
    return _unpacked(b"".join(parts), answer.headers)


def _too_long() -> ServerError:
    return ServerError(f"the answer is longer than {LONGEST_ANSWER >> 20} MiB", 413)


def _unpacked(body: bytes, headers, partly: bool = False) -> bytes:
    """A body without its compression, which some gateways use unasked."""
    if (headers.get("Content-Encoding") or "").strip().lower() not in ("gzip", "x-gzip", "deflate"):
        return body
    unpack = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    text = unpack.decompress(body, LONGEST_ANSWER + 1)
    if len(text) > LONGEST_ANSWER:
        raise _too_long()
    if not unpack.eof and not partly:
        raise ValueError("the compressed answer is cut")
    return text


def _seconds(headers) -> float:
    """Seconds after which a server wants to be asked again: of ``Retry-After``, which may be a date, or, where it says
    them, milliseconds of ``retry-after-ms``.
    """
    for name, unit in (("retry-after-ms", 1e-3), ("Retry-After", 1.0)):
        text = headers.get(name)
        try:
            seconds = float(text or 0) * unit
        except ValueError:
            try:
                seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
            except (ValueError, OverflowError):
                continue
        if seconds > 0 and math.isfinite(seconds):
            return seconds
    return 0.0
