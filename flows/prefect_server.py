"""Prefect's server without its freezes: `python -m flows.prefect_server prefect server start …`.

Its database in SQLite is asked by one thread per connection, and Python collects garbage in whichever thread comes to
it, mostly that of the event loop. Where it finds a cursor there (a request that was cancelled leaves one), SQLite waits
for the cursor's connection; that waits, at most the 60 s that Prefect sets, for the one who writes; and the writer for
the event loop, to commit. The server answers nobody meanwhile, and then `database is locked`.
"""

from __future__ import annotations

import gc
import sys
import threading
import time

YOUNG_SECONDS = 1.0
ALL_SECONDS = 60.0


def collect_beside() -> None:
    """From now on garbage of this process is collected by a thread that nobody waits for."""
    gc.disable()

    def collect() -> None:
        whole = time.monotonic() + ALL_SECONDS
        while True:
            time.sleep(YOUNG_SECONDS)
            if time.monotonic() < whole:
                gc.collect(1)
            else:
                gc.collect()
                whole = time.monotonic() + ALL_SECONDS

    threading.Thread(target=collect, name="garbage", daemon=True).start()


def main(command: list[str]) -> None:
    from prefect.cli import app

    collect_beside()
    sys.argv = command
    app()


if __name__ == "__main__":
    if sys.argv[1:2] != ["prefect"]:
        sys.exit("usage: python -m flows.prefect_server prefect server start …")
    main(sys.argv[1:])
