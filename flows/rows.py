"""Rows of a dataset for a person: ``posttrain show REF --rows N --where COLUMN=VALUE``.

Texts are shown whole and messages by their roles. Of rollouts every token of the completion is a row of a table, decoded
with the tokenizer of the policy that sampled it, with all that stands beside it: loss mask, log-probs, rewards, values,
advantages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flows.config import scalar
from stages.spec import ConfigError, did_you_mean

#: Elements of a list of numbers that are shown.
SHOWN = 16


def find(ref: str, where: Sequence[str], count: int) -> dict[str, Any]:
    """The first ``count`` rows of a dataset (ref or directory) whose columns have the values of ``where``
    (``COLUMN=VALUE``, numbers and true, false, null as in YAML), and how many there are.

    Raises ConfigError (no such column, no dataset), StoreError.
    """
    from storage import store
    from storage.datasets import open_dataset

    found = store.resolve(ref)
    if found.kind != "dataset":
        raise ConfigError(f"{ref} is a {found.kind}, which has no rows; leave --rows and --where out")
    data = open_dataset(found.path)
    columns = data.schema.names
    wanted = dict(_condition(text, columns) for text in where)
    if wanted:
        at = [
            i
            for i, row in enumerate(data.iter_rows(columns=list(wanted)))
            if all(_equal(name, row[name], value) for name, value in wanted.items())
        ]
    else:
        at = list(range(min(count, len(data))))
    chosen, rows = set(at[:count]), []
    for i, row in enumerate(data.iter_rows()) if chosen else ():
        if i in chosen:
            rows.append(row)
            if len(rows) == len(chosen):
                break
    return {
        "what": "rows",
        "ref": found.ref,
        "kind": data.kind,
        "of": len(at) if wanted else len(data),
        "where": list(where),
        "rows": rows,
    }


def _condition(text: str, columns: list[str]) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    name = name.strip()
    if not sign:
        raise ConfigError(f"--where {text!r}: write COLUMN=VALUE, for example --where {columns[0]}=VALUE")
    if name not in columns:
        raise ConfigError(
            f"--where {text!r}: there is no column {name!r}; {did_you_mean(name, columns)}the columns are:"
            f" {', '.join(columns)}"
        )
    return name, value


def _equal(column: str, value: Any, text: str) -> bool:
    """Whether a cell is what somebody wrote; of an id its beginning is enough."""
    if column.endswith("_id") and isinstance(value, str) and len(text) >= 6:
        return value.startswith(text)
    return value == text or value == scalar(text)


def print_rows(value: dict[str, Any]) -> None:
    """What :func:`find` gave, on stdout."""
    rows, asked = value["rows"], " and ".join(value["where"])
    print(
        f"{len(rows)} of {value['of']:,} rows of {value['ref']} ({value['kind']})" + (f" with {asked}" if asked else "")
    )
    decoders: dict[str, Callable[[list[int]], str]] = {}
    for row in rows:
        print(f"\n{row.get('row_id') or 'row'}")
        if value["kind"] == "rollouts/1":
            model = (row.get("gen") or {}).get("model_id") or ""
            if model not in decoders:
                decoders[model] = decoder(model)
            _print_rollout(row, decoders[model])
            continue
        for name, cell in row.items():
            if cell is not None and name != "row_id":
                _print_cell(name, cell)


def _print_cell(name: str, cell: Any) -> None:
    if isinstance(cell, list) and cell and all(isinstance(one, dict) and "role" in one for one in cell):
        print(f"  {name}:")
        for message in cell:
            more = {k: v for k, v in message.items() if k not in ("role", "content")}
            print(
                _indented(
                    f"[{message['role']}] {message.get('content') or ''}" + (f" {json.dumps(more)}" if more else ""), 4
                )
            )
    elif isinstance(cell, str):
        print(f"  {name} = {cell}" if "\n" not in cell else f"  {name}:\n{_indented(cell, 4)}")
    elif isinstance(cell, list) and len(cell) > SHOWN and all(isinstance(one, (int, float)) for one in cell):
        print(f"  {name} = [{', '.join(map(_number, cell[:SHOWN]))}, … {len(cell):,} in all]")
    elif isinstance(cell, (int, float)) and not isinstance(cell, bool):
        print(f"  {name} = {_number(cell)}")
    else:
        print(f"  {name} = {json.dumps(cell, ensure_ascii=False, default=str)}")


def _print_rollout(row: dict[str, Any], decode: Callable[[list[int]], str]) -> None:
    """A completion token by token; its prompt as text; all else as of any row."""
    from flows.display import table

    ids = row["completion_ids"]
    beside = {
        name: cell
        for name, cell in row.items()
        if isinstance(cell, list)
        and len(cell) == len(ids)
        and ids
        and all(isinstance(one, (int, float)) for one in cell)
    }
    for name, cell in row.items():
        if cell is not None and name not in ("row_id", "prompt_ids", *beside):
            _print_cell(name, cell)
    print(f"  prompt ({len(row['prompt_ids'])} tokens):\n{_indented(decode(row['prompt_ids']), 4)}")
    beside.pop("completion_ids", None)
    table(
        [
            {"token": json.dumps(decode([one]), ensure_ascii=False), "id": one}
            | {name: _number(cell[i]) for name, cell in beside.items()}
            for i, one in enumerate(ids)
        ],
        f"  completion ({len(ids)} tokens):",
    )


def decoder(model: str) -> Callable[[list[int]], str]:
    """Ids to text with a model's tokenizer, special tokens shown; to their numbers where it is not there any more."""
    from tokenizers import Tokenizer

    from storage import store

    try:
        tokenizer = Tokenizer.from_file(str(Path(store.resolve(model, "model").path) / "tokenizer.json"))
    except Exception:  # tokenizers raises plain Exceptions; the store its own errors
        return lambda ids: " ".join(map(str, ids))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def _indented(text: str, by: int) -> str:
    return "\n".join(" " * by + line for line in text.split("\n"))


def _number(value: float) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
