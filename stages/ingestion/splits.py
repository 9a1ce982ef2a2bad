"""Which split a row goes to, and which rows a split never cuts apart (`data.split`)."""

from __future__ import annotations

from stages.ingestion import curation
from stages.ingestion.input_data import HELD_OUT, InputData
from storage.schema import normalise_text, prompt_of


class Splits:
    """Where rows go. ``all_in`` is the split of every row that brings none, or None where their groups are dealt out by
    `validation_fraction`, `test_fraction` or `halves`.
    """

    def __init__(self, data: InputData):
        self.config = config = data.config
        self.of_files = data.file_splits
        self._fractions = config.fractions()
        self.all_in = None if config.halves or (self._fractions["train"] < 1 and not data.holds_out()) else "train"
        # Only where the data itself says what belongs together or where it goes can a prompt come to lie in two splits.
        self.watched = bool(self.of_files or data.named("group_id", "split"))

    def stays(self, split: str) -> bool:
        """Whether a row stays in the split that it came with: all do where the input has held-out rows, and the
        held-out ones do always.
        """
        return self.all_in is not None or split in HELD_OUT or (split != "train" and not self.config.halves)

    def of(self, row: dict) -> str:
        """The split of a row that brings none, or must not stay in its own."""
        if self.all_in is not None:
            return self.all_in
        return (
            curation.half_of(row["group_id"])
            if self.config.halves
            else curation.split_of(row["group_id"], self.config.salt, self._fractions)
        )


def asked_text(messages: list[dict], group_by: str) -> str:
    """The text that a split never cuts, normalised: the first user turn, or the whole prompt; the system message left
    out.
    """
    said = [
        normalise_text(message.get("content") or "")
        for message in messages
        if message["role"] == "user" or (group_by == "prompt" and message["role"] != "system")
    ]
    return "\n".join(said if group_by == "prompt" else said[:1])


def group_text(kind: str, row: dict, group_by: str) -> str:
    """:func:`asked_text` of a row's prompt; the text itself of text rows."""
    return row["text"] if kind == "text/1" else asked_text(prompt_of(kind, row), group_by)
