"""Rows of a data file as they are, for stages that compare what is there: read in any known format, but not curated.

The ingest stage refuses rows that teach nothing: identical answers, repeated rows, empty texts. An evaluation must
count them (two equal answers are a tie).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator


def read_rows(stage, name: str, kinds: tuple[str, ...], refused: Counter) -> Iterator[tuple[str, dict]]:
    """(kind, row) of the dataset, file or directory behind a stage input; rows that no reader understands are counted
    in `refused` by reason.

    Raises ConfigError: rows of another kind than `kinds`, or a file of no known format.
    """
    from stages.ingest import Config
    from stages.ingestion.published import adapter_of
    from stages.ingestion.rules import Bad
    from stages.ingestion.sources import Reading, SourceError, find_files, parse_json
    from stages.spec import ConfigError
    from storage.datasets import DatasetError, open_dataset
    from storage.schema import complete_row

    path = stage.path(name)
    wrong = f"stage {stage.name}: input {name!r} holds {{}}, but {' or '.join(kinds)} is needed"
    try:
        data = open_dataset(path)
    except DatasetError:
        data = None
    if data is not None:
        if data.kind not in kinds:
            raise ConfigError(wrong.format(f"rows of kind {data.kind}"))
        yield from ((data.kind, row) for row in data.iter_rows())
        return
    try:
        files = find_files(path)
    except SourceError as error:
        raise ConfigError(f"stage {stage.name}: input {name!r}: {error}") from None
    for source in files:
        adapter = adapter_of(source, Config())
        if adapter is None:
            raise ConfigError(wrong.format(f"{source.name}, whose rows fit no known format"))
        for record in adapter.records(Reading(source)):
            row, code = record.row, record.code
            if code is None and row is None:
                row, code = parse_json(record.raw)
            try:
                kind, native, codes = adapter(row) if code is None else (None, None, {code})
            except Bad as bad:
                kind, native, codes = None, None, bad.codes
            if codes:
                refused[f"rows of {source.name}: {', '.join(sorted(codes))}"] += 1
            elif kind not in kinds:
                raise ConfigError(wrong.format(f"{source.name}, whose rows are {kind}"))
            else:
                yield (
                    kind,
                    complete_row(
                        kind,
                        native,
                        dataset=source.name.split(".")[0],
                        source=native.get("source") or source.name,
                        origin="ai",
                    ),
                )
