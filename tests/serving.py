"""A server of the tests while it serves, and ports for those in processes of their own."""

import random
import socket
import threading
from contextlib import contextmanager


@contextmanager
def serving(server):
    """The server, which answers in a thread of its own until the end of the block."""
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def free_port() -> int:
    """A port at which nothing listens, drawn so that the suites of two checkouts hardly get the same one. It lies below
    those that systems give to connections, which might take it before a server does, or while one is started again.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
