"""Prefect's concurrency leases on disk, with the mode that other files of the state directory have: Prefect's own are
for their owner alone, and a server of another user of the directory could not read them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect.server.concurrency.lease_storage import filesystem

from storage.files import atomic_write_json


class ConcurrencyLeaseStorage(filesystem.ConcurrencyLeaseStorage):
    """Found by its name (PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE)."""

    def _atomic_write_json(self, file_path: Path, data: Any) -> None:
        atomic_write_json(file_path, data)
