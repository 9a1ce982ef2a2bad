"""Prefect's server goes on while one of its connections waits for another one's commit."""

from __future__ import annotations

import subprocess
import sys

from tests.flows.conftest import ROOT

# As the server does: a thread per connection, and commits from the event loop. What a cancelled request leaves is a
# cursor in a cycle, whose statement is not at its end.
ASKED_BY_THREADS = """
import asyncio, sqlite3, sys
from concurrent.futures import ThreadPoolExecutor
from flows.prefect_server import collect_beside

collect_beside()

async def main():
    loop = asyncio.get_running_loop()
    writer, waiter = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    connect = lambda: sqlite3.connect(sys.argv[1], isolation_level=None, timeout=20, check_same_thread=False)
    one = await loop.run_in_executor(writer, connect)
    two = await loop.run_in_executor(waiter, connect)
    await loop.run_in_executor(writer, one.executescript, "PRAGMA journal_mode=WAL; CREATE TABLE t (x);")
    cycle = [await loop.run_in_executor(waiter, two.execute, "SELECT 1 UNION SELECT 2")]
    cycle.append(cycle)
    del cycle
    await loop.run_in_executor(writer, one.execute, "BEGIN IMMEDIATE")
    waits = loop.run_in_executor(waiter, two.execute, "INSERT INTO t VALUES (1)")
    await asyncio.sleep(0.5)
    work = [[] for _ in range(100_000)]  # after some of which Python collects garbage
    await asyncio.sleep(2)
    await loop.run_in_executor(writer, one.execute, "COMMIT")
    await waits
    print("written")

asyncio.run(main())
"""


def test_garbage_does_not_hold_up_the_event_loop_until_a_lock_times_out(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ASKED_BY_THREADS, str(tmp_path / "db")], capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout == "written\n", done.stderr  # else `database is locked`
