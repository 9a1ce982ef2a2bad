"""What a stage's judges remember of what they were asked, kept in its checkpoints: who goes on from one asks for no more
than who was never killed, and counts the same.
"""

from __future__ import annotations

from typing import Any

_tables: dict[str, dict] = {}
_known: dict[str, list] = {}


def begin(known: dict[str, list] | None = None) -> None:
    """Start a stage with what its checkpoint remembers."""
    global _tables, _known
    _tables, _known = {}, dict(known or {})


def learn(known: dict[str, list]) -> None:
    """Remember more: on a rank that hears of its checkpoint once it has tables, or where a block is read back."""
    for name, pairs in known.items():
        if name in _tables:
            _tables[name].update(map(tuple, pairs))
        else:
            _known[name] = [*_known.get(name, ()), *pairs]


def mark() -> dict[str, dict]:
    """What is remembered, for :func:`since`."""
    return {name: dict(held) for name, held in _tables.items()}


def since(before: dict[str, dict]) -> dict[str, list]:
    """What was learned behind a :func:`mark`, as plain JSON. Tables change their order and drop what is oldest, so it is
    told by its values.
    """
    new, found = object(), {}
    for name, held in _tables.items():
        known = before.get(name, {})
        if more := {key: value for key, value in list(held.items()) if known.get(key, new) is not value}:
            found[name] = _plain(more)
    return found


def table(name: str) -> dict[str, Any]:
    """A dict of texts to plain JSON (arrays become lists) that checkpoints hold, in its order. A name that was given
    before gets a table of its own.
    """
    count = 1
    while (own := f"{name} {count}") in _tables:
        count += 1
    _tables[own] = dict(map(tuple, _known.pop(own, ())))
    return _tables[own]


def so_far() -> dict[str, list]:
    """What a checkpoint holds: tables that nobody has asked for since the last one, too."""
    return _known | {name: _plain(held) for name, held in _tables.items() if held}


def _plain(held: dict) -> list:
    return [[key, getattr(value, "tolist", lambda value=value: value)()] for key, value in list(held.items())]
