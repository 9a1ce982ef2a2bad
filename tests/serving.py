"""A server of the tests while it serves."""

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
