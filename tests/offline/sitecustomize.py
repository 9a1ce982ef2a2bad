"""Put on PYTHONPATH by tests: no process of theirs reaches another machine, and each attempt is written to OFFLINE_LOG
with its stack.
"""

import os
import socket
import traceback

HERE = ("localhost", "0.0.0.0", "::", "::1", "", None, socket.gethostname())


def _ours(host) -> bool:
    host = host.decode() if isinstance(host, bytes) else host
    return host in HERE or str(host).startswith("127.")


def _refuse(what: str, host) -> None:
    with open(os.environ["OFFLINE_LOG"], "a") as log:
        log.write(f"{what} {host}\n{''.join(traceback.format_stack()[-12:-2])}\n")
    raise OSError(f"{what} {host}: tests do not leave this machine")


def _guard(kind, name):
    real = getattr(kind, name)

    def call(self, address, *rest):
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _ours(address[0]):
            _refuse(name, address[0])
        return real(self, address, *rest)

    setattr(kind, name, call)


def _lookup(real):
    def call(host, *rest, **named):
        if not _ours(host):
            _refuse("look up", host)
        return real(host, *rest, **named)

    return call


if os.environ.get("OFFLINE_LOG"):
    for _name in ("connect", "connect_ex"):
        _guard(socket.socket, _name)
    socket.getaddrinfo = _lookup(socket.getaddrinfo)
