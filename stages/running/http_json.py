"""JSON over HTTP to servers with an OpenAI interface (judges, writers, sampling engines) and to reward servers: one
call, one deadline, one kind of error. What becomes of an error is told in stages/running/servers.py.
"""

from __future__ import annotations

import email.utils
import json
import math
import os
import re
import time
import urllib.parse
import zlib

#: Settings that say which server is asked and how, wherever a stage asks one.
SERVER_SETTINGS = ("endpoint", "endpoint_model", "key_variable", "timeout_s", "concurrency")
#: Bytes of an answer at most, unpacked: log-probabilities of a long completion are some MiB.
LONGEST_ANSWER = 64 << 20


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

    timeout_s: seconds until all of the answer is there, from looking up the server's name on.

    Raises:
        ServerError: no whole answer in time, an HTTP error, an answer that is no JSON or longer than
            ``LONGEST_ANSWER``, or a key that is not set.
    """
    from stages.running import connections  # most stages ask no server

    headers, key = {"Content-Type": "application/json", "User-Agent": "posttrain"}, ""
    if key_variable:
        key = _key(key_variable)
        headers["Authorization"] = "Bearer " + key
    sent = None if body is None else json.dumps(body).encode()
    try:
        with connections.answer(url, sent, headers, timeout_s) as answer:
            status, headers, why = answer.status, answer.headers, answer.reason
            text = _whole(answer) if 200 <= status < 300 else _beginning(answer)
    except connections.Broken as error:
        reason = error.__cause__
        raise ServerError(
            f"{type(reason).__name__}: {_without(str(reason), key)}"
            + (_way_there(url, reason) if error.unreachable else ""),
            unreachable=error.unreachable,
            final=error.unreachable and connections.stays_broken(reason),
        ) from reason
    if 200 <= status < 300:
        return _parsed(text, _first(headers, "Content-Type"), key) if text.strip() else None
    said = text.decode(errors="replace").strip()
    if 300 <= status < 400:
        said = f"it sends on to {_first(headers, 'Location')}; write that address, keys are not sent on"
    wait = _seconds(headers)
    raise ServerError(
        f"HTTP {status}: {_without(said, key)[:400] or why}" + f" (ask again after {wait:.0f} seconds)" * (wait >= 1),
        status,
        wait,
    )


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


def _way_there(url: str, reason: BaseException) -> str:
    """What is to be known where no connection came about."""
    import ssl

    from stages.running import connections

    if isinstance(reason, ssl.SSLCertVerificationError):
        return "; if the server is yours, export SSL_CERT_FILE=FILE with the certificate that signs its own"
    if isinstance(reason, ssl.SSLError):
        return "; a server without TLS is written with http://"
    if isinstance(reason, ValueError):  # the address of nobody
        return ""
    if proxy := connections.proxy_of(url):
        host = urllib.parse.urlsplit(proxy)
        if connections.REFUSED_TUNNEL in str(reason):
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


def _whole(answer) -> bytes:
    """The body of an answer, unpacked. Raises ServerError for one longer than ``LONGEST_ANSWER``."""
    parts, size = [], 0
    for part in answer.stream(1 << 16):
        parts.append(part)
        if (size := size + len(part)) > LONGEST_ANSWER:
            raise _too_long()
    return _unpacked(b"".join(parts), answer.headers)


def _beginning(answer) -> bytes:
    """What an error says, as far as it can be read; its status is what counts."""
    from stages.running.connections import Broken, broken

    try:
        with broken():
            return _unpacked(answer.read(4000), answer.headers, partly=True)
    except Broken:
        return b""


def _too_long() -> ServerError:
    return ServerError(f"the answer is longer than {LONGEST_ANSWER >> 20} MiB", 413)


def _unpacked(body: bytes, headers, partly: bool = False) -> bytes:
    """A body without its compression, which some gateways use unasked."""
    if (_first(headers, "Content-Encoding") or "").strip().lower() not in ("gzip", "x-gzip", "deflate"):
        return body
    unpack = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    text = unpack.decompress(body, LONGEST_ANSWER + 1)
    if len(text) > LONGEST_ANSWER:
        raise _too_long()
    if not unpack.eof and not partly:
        raise ValueError("the compressed answer is cut")
    return text


def _first(headers, name: str) -> str | None:
    """The header of a name; the first, where there are several."""
    return next(iter(headers.getlist(name)), None)


def _seconds(headers) -> float:
    """Seconds after which a server wants to be asked again: of ``Retry-After``, which may be a date, or, where it says
    them, milliseconds of ``retry-after-ms``.
    """
    for name, unit in (("retry-after-ms", 1e-3), ("Retry-After", 1.0)):
        text = _first(headers, name)
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
