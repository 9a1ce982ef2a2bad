"""What a published form is, and the words that the forms share."""

from __future__ import annotations

from typing import Any, Callable, Iterator, NamedTuple

import orjson

from stages.ingestion.formats import rename
from stages.ingestion.rules import Bad
from stages.ingestion.sources import Record, canonical_bytes, parse_json


class Form(NamedTuple):
    """columns: all are in a row of this form and not null. read(row, options) -> its rows in our columns; raises Bad.
    fits(row, options): what more a row of this form has.

    stream, instead of read: records -> records, where a row of ours takes several; format: what they then are, by the
    kind that is wanted.
    """

    columns: tuple[str, ...]
    read: Callable[[dict, Any], list[dict]] | None = None
    fits: Callable[[dict, Any], bool] = lambda row, options: True
    stream: Callable[[Iterator[Record], Any], Iterator[Record]] | None = None
    format: Callable[[Any], str] | None = None

    def of(self, row: dict, options) -> bool:
        """Whether a row is of this form."""
        return all(row.get(name) is not None for name in self.columns) and self.fits(row, options)


def records_of(form: Form, records: Iterator[Record], options, columns: dict | None = None) -> Iterator[Record]:
    """Records of a form with rows in our columns; the line, and the raw row for the quarantine, stay those of the
    source.
    """

    def parsed() -> Iterator[Record]:
        for record in records:
            row, code = record.row, record.code
            if code is None and row is None:
                row, code = parse_json(record.raw)
            yield record._replace(row=rename(row, columns) if columns and row else row, code=code)

    if form.stream is not None:
        yield from form.stream(parsed(), options)
        return
    for record in parsed():
        if record.code is not None or not form.of(record.row, options):
            yield record
            continue
        raw = record.raw if record.raw is not None else canonical_bytes(record.row)
        try:
            rows = form.read(record.row, options)
        except Bad as bad:
            yield Record(record.line, raw, None, bad.codes[0])
            continue
        if not rows:  # nothing vanishes
            yield Record(record.line, raw, None, "missing_column")
        for row in rows:
            yield Record(record.line, raw, row, None)


def without(row: dict, *names: str, **new) -> dict:
    """The row without the columns that were read, with what they say in ours."""
    return {key: value for key, value in row.items() if key not in names and key not in new} | {
        key: value for key, value in new.items() if value is not None
    }


def utterance(role: str, text: Any) -> dict:
    return {"role": role, "content": text}


def json_value(value: Any) -> Any:
    """A JSON text as what it holds, all else as it is; Bad(wrong_type) for a broken one."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        raise Bad("wrong_type") from None


def are_dicts(value: Any, *names: str) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(isinstance(item, dict) and all(name in item for name in names) for item in value)
    )


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def side(number: Any) -> str:
    """ "A" for 0, "B" for 1; Bad(bad_label) else."""
    if not is_number(number) or number not in (0, 1):
        raise Bad("bad_label")
    return "B" if number else "A"


def listed(name: str, said: str) -> Form:
    """Answers or steps in a list called ``name``, beside what is ``said`` of each (catalogue section 0)."""
    return Form(
        ("prompt", name, said),
        lambda row, options: [without(row, name, completions=row[name])],
        lambda row, options: row.get("completions") is None and isinstance(row[name], list),
    )


def for_prompts(row: dict, options) -> bool:
    return options.kind in ("auto", "prompts/1")


#: Columns that hold an answer, and columns that hold a conversation, in datasets without names of their own.
ANSWERS = ("response", "output", "completion")
TALKS = ("conversations", "messages", "trajectory", "conversation")
