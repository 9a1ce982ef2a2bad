"""A server of the tests while it serves; ports for those in processes of their own, and the tables of Prefect's."""

import fcntl
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

MAKE_TABLES = """
import asyncio
from prefect.server.database import provide_database_interface

async def make():
    database = provide_database_interface()
    await database.create_db()
    await (await database.engine()).dispose()

asyncio.run(make())
"""


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


def with_prefects_tables(home: Path) -> Path:
    """A new home whose Prefect database has its tables already. Its first server would make them, for five seconds of a
    core; here all processes of the suite copy those of one. What happens in a home without is tested in
    flows/test_servers.py.
    """
    made = Path(tempfile.gettempdir(), "prefect.db")
    with open(f"{made}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            new = f"{made}.new"
            done = subprocess.run(
                [sys.executable, "-c", MAKE_TABLES],
                env={
                    **os.environ,
                    "PREFECT_HOME": f"{made}.home",
                    "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{new}",
                },
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
            os.replace(new, made)
    (home / "prefect").mkdir(parents=True, exist_ok=True)
    shutil.copy(made, home / "prefect" / "prefect.db")
    return home
