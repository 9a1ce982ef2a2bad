"""One answer and whether it is wanted: BeaverTails, conversations with a label, signals of a product."""

from __future__ import annotations

from datetime import datetime, timezone

from stages.ingestion.pairing import EVENT_MAP
from stages.ingestion.published.forms import ANSWERS, TALKS, Form, are_dicts, is_number, without
from stages.ingestion.rules import Bad


def _beavertails(row: dict, options) -> list[dict]:
    return [without(row, "response", "is_safe", completion=row["response"], label=row["is_safe"], label_kind="safety")]


def _labelled_talk(row: dict, options) -> list[dict]:
    """A conversation and whether its last answer is wanted."""
    name, label = next(name for name in TALKS if are_dicts(row.get(name))), row.get("kto_tag", row.get("label"))
    return [without(row, name, "kto_tag", prompt=row[name][:-1], completion=row[name][-1:], label=label)]


def _is_labelled_talk(row: dict, options) -> bool:
    talk = next((row[name] for name in TALKS if are_dicts(row.get(name))), None)
    label = row.get("kto_tag", row.get("label"))
    return (
        talk is not None
        and isinstance(label, bool)
        and len(talk) > 1
        and talk[-1].get("role", talk[-1].get("from")) in ("assistant", "gpt")
    )


_TIMES = ("collected_at", "ts", "timestamp", "created_at")


def _events(row: dict, options) -> list[dict]:
    """A product signal about an answer; of an edit, where no pairs are wanted, also the edited text as an answer that
    is wanted.
    """
    at = next((row[name] for name in _TIMES if row.get(name) is not None), None)
    text = next((row[name] for name in _EDITED if row.get(name) is not None), None)
    if is_number(at):  # seconds or milliseconds since 1970
        at = datetime.fromtimestamp(at / 1000 if at > 1e11 else at, timezone.utc).isoformat()
    name = next(name for name in ANSWERS if row.get(name) is not None)
    if row["action"] == "edit" and text is None:
        raise Bad("missing_column")
    new = without(row, *_TIMES, *_EDITED, name, completion=row[name], collected_at=at)
    if row["action"] != "edit" or options.kind == "pairs/1":
        return [new | ({"edited_text": text} if text is not None else {})]
    return [new, {**new, "completion": text, "action": "edited"}]


_EDITED = ("edited", "edited_text", "edited_response")


def _is_event(row: dict, options) -> bool:
    return (
        any(row.get(name) is not None for name in ANSWERS)
        and (row["action"] in EVENT_MAP or row["action"] in options.event_map or options.format == "events")
        and row.get("label") is None
    )


BEAVERTAILS = Form(("prompt", "response", "is_safe"), _beavertails)
EVENTS = Form(("prompt", "action"), _events, _is_event, format=lambda options: "events")
LABELLED_TALK = Form((), _labelled_talk, _is_labelled_talk)
