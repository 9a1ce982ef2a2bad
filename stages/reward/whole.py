"""Files whose rows only mean something together (a rubric, a constitution): all of one is ingested, or an error lists
all that is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def ingest_whole(
    stage,
    kind: str,
    read: Callable[[str], list[dict]],
    refused: type[Exception],
    counts: Callable[[list[dict]], dict[str, int]],
) -> None:
    """The ingest stage for such a file: rows of ``kind`` as ``read`` gives them, an empty quarantine, and ``counts`` of
    the rows in the summary.

    Raises ConfigError: ``read`` raised ``refused``, or the file cannot be read.
    """
    from stages.spec import ConfigError
    from storage.schema import complete_row

    name = stage.config.dataset or Path(stage.path("data")).name.split(".")[0]
    try:
        rows = read(stage.path("data"))
    except (refused, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"stage ingest, kind={kind}: {error}") from None
    writer = stage.writer("data", kind)
    writer.write([complete_row(kind, row, dataset=name, source=name, origin=stage.config.origin) for row in rows])
    writer.close({"rows": len(rows)})
    stage.writer("quarantine", "quarantine/1").close({})
    stage.summary({"rows_in": len(rows), "rows_kept": len(rows), "rows_quarantined": 0, **counts(rows)})
