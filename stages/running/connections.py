"""Connections to servers over urllib3, each kept for the requests that follow: they are shared by the threads of a
process and by none of its forks, and each request has one deadline, from looking up a name to the last byte.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import os
import queue
import re
import ssl
import threading
import time
import urllib.parse
import urllib.request
import zlib
from collections.abc import Iterator

import urllib3
from urllib3.exceptions import ConnectTimeoutError, HTTPError, LocationValueError

#: Seconds after which a connection that nobody used is not used again: behind some gateways it is dead, and silent.
LONGEST_IDLE = 60.0
#: Bytes of a line between the parts of an answer at most; as in http.client, of a header.
LONGEST_LINE = 1 << 16
#: What http.client says of a proxy that takes no user, or another.
REFUSED_TUNNEL = "Tunnel connection failed: 407"

_asked = threading.local()  # the request of this thread: seconds that it has, until when, and whether it is connected
_lock = threading.Lock()


class Broken(Exception):
    """No whole answer came; the reason is the ``__cause__``. unreachable: no connection came about."""

    def __init__(self, unreachable: bool):
        super().__init__()
        self.unreachable = unreachable


@contextlib.contextmanager
def answer(url: str, body: bytes | None, headers: dict, timeout_s: float) -> Iterator[urllib3.BaseHTTPResponse]:
    """The answer to a POST of ``body`` (a GET without one), whose body is to be read within. No redirect is followed: a
    key would go to another host, and a GET for a POST.

    timeout_s: seconds until all of it is read.

    Raises:
        Broken: not all of it came.
    """
    _asked.seconds, _asked.until, _asked.connected = timeout_s, time.monotonic() + timeout_s, False
    with broken():
        made = _asked_for("GET" if body is None else "POST", url, body, headers)
        try:
            yield made
        finally:
            made.close()  # one that was read to its end has given its connection back


@contextlib.contextmanager
def broken() -> Iterator[None]:
    """What breaks while this thread's request is sent, or its answer read, is raised as ``Broken``."""
    try:
        yield
    except (HTTPError, OSError, ValueError, zlib.error) as error:
        reason = _reason(error)
        # what broke while the request was sent is of this request
        unreachable = not _asked.connected and not isinstance(reason, (ConnectionResetError, BrokenPipeError))
        raise Broken(unreachable) from reason


def stays_broken(reason: BaseException) -> bool:
    """Whether asking again would give the same where no connection came about: ValueError is of an address."""
    return isinstance(reason, (ssl.SSLError, ValueError)) or REFUSED_TUNNEL in str(reason)


def _asked_for(method: str, url: str, body: bytes | None, headers: dict) -> urllib3.BaseHTTPResponse:
    scheme, proxy = urllib.parse.urlsplit(url).scheme, proxy_of(url)
    with _lock:  # certificates are read once
        servers = _servers(scheme, proxy, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
    while True:
        try:
            return servers.urlopen(
                method,
                url,
                body=body,
                headers=headers,
                timeout=_left(),
                retries=False,
                redirect=False,
                preload_content=False,
                decode_content=False,
            )
        except HTTPError as error:
            if not isinstance(_reason(error), _Stale):
                raise


def _left() -> float:
    """Seconds that this thread's request has left."""
    return max(_asked.until - time.monotonic(), 1e-3)


def _reason(error: BaseException) -> BaseException:
    """What broke, without what urllib3 says around it."""
    while isinstance(error, HTTPError) and not isinstance(error, LocationValueError):
        within = [error.__cause__, *error.args, getattr(error, "original_error", None)]
        within = next((one for one in within if isinstance(one, BaseException)), None)
        if within is None:
            break
        error = within
    return error


def proxy_of(url: str) -> str | None:
    """The proxy that the environment names for an address (``https_proxy``, ``all_proxy``, ``no_proxy``); none for this
    machine's own servers, which no proxy reaches.
    """
    parts = urllib.parse.urlsplit(url)
    host = (parts.hostname or "").lower()
    if (
        host in ("localhost", "::1")
        or re.fullmatch(r"127(\.\d+){3}", host)
        or urllib.request.proxy_bypass(parts.netloc)
    ):
        return None
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme)
    if proxy is None and proxies.get("all", "").startswith(("http://", "https://")):
        proxy = proxies["all"]
    return proxy if not proxy or "//" in proxy else f"http://{proxy}"


@functools.cache
def _servers(scheme: str, proxy: str | None, *certificates: str | None) -> urllib3.PoolManager:
    """The connections to servers.

    scheme: of their addresses. proxy: address of the one that is asked for them. certificates: where the environment
    says that those are which are trusted.
    """
    more = {"maxsize": 1024, "num_pools": 32}
    if scheme == "https":
        more["ssl_context"] = ssl.create_default_context()
        more["ssl_context"].set_alpn_protocols(["http/1.1"])
    if proxy:
        parts = urllib.parse.urlsplit(proxy)
        if parts.username is not None:
            user = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            more["proxy_headers"] = urllib3.make_headers(proxy_basic_auth=user)
        try:
            servers = urllib3.ProxyManager(proxy, **more)
        except (LocationValueError, ValueError):  # which show its user
            raise LocationValueError(
                f"the environment's {scheme}_proxy (or all_proxy) is no proxy that can be asked; export"
                f" {scheme}_proxy=http://HOST:PORT, or no_proxy=HOST to ask without"
            ) from None
    else:
        servers = urllib3.PoolManager(**more)
    servers.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}
    return servers


def _forked() -> None:
    """The connections of a process are its parent's too, whose answers it would take."""
    global _lock
    _lock = threading.Lock()
    _servers.cache_clear()


os.register_at_fork(after_in_child=_forked)


# -- one deadline ----------------------------------------------------------------------------------------------------


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


class _Lines(io.BufferedReader):
    """Lines that end: urllib3 reads the length of a chunk to the end of its line, however long it is."""

    def readline(self, size: int | None = -1) -> bytes:
        line = super().readline(LONGEST_LINE + 1 if size is None or size < 0 else size)
        if len(line) > LONGEST_LINE:
            raise http.client.LineTooLong("answer")
        return line


class _Response(http.client.HTTPResponse):
    """An answer, of a proxy too, whose headers and body have one deadline."""

    def __init__(self, sock, *arguments, **more):
        super().__init__(sock, *arguments, **more)
        self.fp = _Lines(_Until(self.fp.detach(), sock, _asked.until, _asked.seconds))


class _Stale(ConnectionError):
    """The server closed a connection of earlier requests while this one was sent on it, which says nothing about it."""


class _Limited:
    """A connection whose requests have a deadline, that of the thread (``_asked``)."""

    response_class = _Response
    answered, used = False, 0.0

    def _new_conn(self):
        """A socket: looking up a name has no time-out of its own, and every address of a name has all of it."""
        made, connect, seconds = queue.SimpleQueue(), super()._new_conn, _asked.seconds

        def work() -> None:
            try:
                made.put(connect())  # closed with the queue, if nobody waits any more
            except BaseException as error:
                made.put(error)

        threading.Thread(target=work, daemon=True).start()
        try:
            found = made.get(timeout=_left())
        except queue.Empty:
            raise ConnectTimeoutError(self, "") from TimeoutError(f"no connection came about in {seconds:g} seconds")
        if isinstance(found, BaseException):
            raise found
        found.settimeout(_left())  # of what else connecting takes
        return found

    def connect(self) -> None:
        self.answered, self.used = False, time.monotonic()
        super().connect()
        _asked.connected = True

    @property
    def is_connected(self) -> bool:
        return time.monotonic() - self.used < LONGEST_IDLE and super().is_connected

    def request(self, *arguments, **more) -> None:
        _asked.connected = self.sock is not None
        with self._fresh():
            super().request(*arguments, **more)

    def getresponse(self):
        with self._fresh(ConnectionError):  # where it was sent, urllib3 looks for an answer first
            answer = super().getresponse()
        self.answered, self.used = True, time.monotonic()
        return answer

    @contextlib.contextmanager
    def _fresh(self, *ended: type[OSError]) -> Iterator[None]:
        try:
            yield
        except (ssl.SSLEOFError, *ended) as error:
            if not self.answered:
                raise
            raise _Stale(str(error)) from error


class _Connection(_Limited, urllib3.connection.HTTPConnection):
    pass


class _SecureConnection(_Limited, urllib3.connection.HTTPSConnection):
    pass


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _SecureConnection
