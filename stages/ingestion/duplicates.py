"""What makes two rows the same (`data.dedup`): keys of 16 bytes for :class:`stages.ingestion.seen.SeenRows`."""

from __future__ import annotations

import hashlib

from stages.ingestion import rules
from storage.schema import normalise_text, row_id


def identity(kind: str, row: dict, deduplicate: str) -> tuple[bytes, bool]:
    """(key of a row for duplicates, whether it is the row id): the content after strip, or with `deduplicate: auto` the
    normalised text of prompts and demonstrations.
    """
    if deduplicate == "auto" and kind == "prompts/1":
        text = "\x1f".join(
            f"{m['role']}:{normalise_text(m.get('content') or '')}{m.get('functions') or ''}" for m in row["prompt"]
        )
        return hashlib.blake2b(b"prompt\x1f" + text.encode(), digest_size=16).digest(), False
    if deduplicate == "auto" and kind == "demonstrations/1":
        text = "\x1f".join(
            f"{m['role']}:{normalise_text(m.get('content') or '')}:{m.get('function_calls') or ''}{m.get('functions') or ''}"
            for m in row["messages"]
        )
        return (
            hashlib.blake2b(f"demonstration\x1f{row['train_turns']}".encode() + text.encode(), digest_size=16).digest(),
            False,
        )
    same = stripped(kind, row)
    return bytes.fromhex(row_id(kind, same)), same is row


def stripped(kind: str, row: dict) -> dict:
    """The row with its messages as equality sees them; the row itself where there is nothing to strip."""
    changed = {
        name: clean
        for name in rules.CONTENT[kind]
        if isinstance(value := row.get(name), list)
        and value
        and isinstance(value[0], dict)
        and (clean := rules.stripped(value)) is not value
    }
    return {**row, **changed} if changed else row


def reversed_id(pair: dict) -> str:
    """Row id of the pair with its answers swapped, which would contradict it."""
    pair = stripped("pairs/1", pair)
    return row_id("pairs/1", {"prompt": pair["prompt"], "chosen": pair["rejected"], "rejected": pair["chosen"]})


def tagged(row_identity: str, tag: bytes = b"pair") -> bytes:
    """Key of a row id that is remembered apart from those of input rows."""
    return hashlib.blake2b(tag + b"\x1f" + bytes.fromhex(row_identity), digest_size=16).digest()


def id_key(source: str, row: dict) -> bytes | None:
    """Key of the id that a row of a file gives itself (column ``id``); None without one. It is no content: two rows with
    one id are duplicates only where they say the same.
    """
    name = row.get("id")
    if isinstance(name, bool) or not isinstance(name, (str, int)) or name == "":
        return None
    return hashlib.blake2b(f"id\x1f{source}\x1f{type(name).__name__}\x1f{name}".encode(), digest_size=16).digest()


def gold_keys(key: bytes, row: dict) -> tuple[bytes, ...]:
    """Keys of a prompt that has a gold answer, and of the prompt with this one; none without an answer. ``key``: that
    of the prompt (:func:`identity`).
    """
    answer = normalise_text(str(row.get("answer") or ""))
    return (tagged(key.hex(), b"answered"), tagged(key.hex(), b"answer\x1f" + answer.encode())) if answer else ()
