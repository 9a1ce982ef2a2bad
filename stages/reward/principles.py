"""Principles: what answers are to be judged, criticised and revised by (a constitution), as files that people write and
as ``principles/1``.

A file of principles is plain text with one per line (``#`` begins a comment), or a list in YAML, JSON or JSON Lines, of
texts or of mappings::

    - Choose the answer that is less harmful.
    - {id: honest, axis: honesty, text: Be honest about what is not known., critique_request: ..., revision_request: ..., comparison_request: ...}

What is left out is empty, an ``id`` is made of the content, ``active: false`` puts a principle aside. The version ends
in a digest of the content, so an edited principle never passes for the old one (catalogue ``principles/1``;
``synth.cai_sl``, ``synth.cai_pref``).
"""

from __future__ import annotations

import json
from pathlib import Path

from storage.files import canonical_json, read_text, sha256_text

KIND = "principles/1"
TEXTS = ("text", "critique_request", "revision_request", "comparison_request")
_KEYS = ("id", "principle_id", "version", "axis", "kind", "active", *TEXTS)
_KINDS = ("principle", "trait", "safety_spec")


class PrincipleError(ValueError):
    """A file of principles that cannot be used; the text lists what is wrong and what to write."""


def read_principles(path: str) -> list[dict]:
    """Rows of ``principles/1`` (own columns only) of a file. Raises PrincipleError that lists everything that is wrong
    with it.
    """
    import yaml

    file = Path(path)
    suffix = file.suffix.lower()
    try:
        text = read_text(file)
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if suffix in (".yaml", ".yml", ".json"):
            found = json.loads(text) if suffix == ".json" else yaml.safe_load(text)
        else:
            found = (
                [json.loads(line) for line in lines]
                if suffix in (".jsonl", ".ndjson")
                else [line for line in lines if not line.startswith("#")]
            )
    except (ValueError, yaml.YAMLError) as error:
        raise PrincipleError(f"{file.name} cannot be read: {error}") from None
    found = found.get("principles") if isinstance(found, dict) else found
    if not isinstance(found, list) or not found:
        raise PrincipleError(
            f"{file.name} holds no principles; write one per line, or a list of texts or of mappings with `text`"
            " (stages/reward/principles.py)"
        )
    problems: list[str] = []
    rows = [row for number, one in enumerate(found, 1) if (row := _row(one, f"principle {number}", problems))]
    names = [row["principle_id"] for row in rows]
    problems += [
        f"the id {name!r} is used twice; give every principle its own"
        for name in sorted({n for n in names if names.count(n) > 1})
    ]
    if problems:
        raise PrincipleError(
            f"the principles of {file.name} have {len(problems)} problem{'s' * (len(problems) > 1)}:\n- "
            + "\n- ".join(problems)
        )
    return rows


def _row(given, where: str, problems: list[str]) -> dict | None:
    given = {"text": given} if isinstance(given, str) else given
    if not isinstance(given, dict):
        problems.append(f"{where}: it is neither a text nor a mapping; write {{id: NAME, text: ...}}")
        return None
    before = len(problems)
    problems += [f"{where}: unknown key {key!r}; write some of {', '.join(_KEYS)}" for key in given if key not in _KEYS]
    content = {name: given.get(name) or "" for name in ("axis", *TEXTS)}
    problems += [f"{where}: {name} is no text" for name, value in content.items() if not isinstance(value, str)]
    content["kind"] = given.get("kind") or "principle"
    if content["kind"] not in _KINDS:
        problems.append(f"{where}: kind {content['kind']!r} is unknown; write {', '.join(_KINDS)}")
    if not isinstance(given.get("active", True), bool):
        problems.append(f"{where}: active is neither true nor false")
    if not any(content[name] for name in TEXTS):
        problems.append(f"{where}: it says nothing; write its `text`, or {', '.join(TEXTS[1:])}")
    if len(problems) > before:
        return None
    digest = sha256_text(canonical_json(content))[:8]
    return {
        **content,
        "principle_id": str(given.get("id", given.get("principle_id")) or digest),
        "active": given.get("active", True),
        "version": "-".join(part for part in (str(given.get("version") or ""), digest) if part),
    }


def ingest(stage) -> None:
    """The ingest stage for principles: all of a file, or an error that lists all its problems."""
    from stages.reward.whole import ingest_whole

    ingest_whole(
        stage, KIND, read_principles, PrincipleError, lambda rows: {"active": sum(row["active"] for row in rows)}
    )


def load(stage, name: str = "principles") -> list[dict]:
    """The active principles of a stage input, in the order of their ids, so that draws do not depend on the order of
    the file.

    Raises ConfigError: none is active.
    """
    from stages.spec import ConfigError

    rows = sorted(
        (row for row in stage.dataset(name).iter_rows() if row["active"]),
        key=lambda row: (row["principle_id"], row["version"]),
    )
    if not rows:
        raise ConfigError(
            f"stage {stage.name}: no principle of the input {name!r} is active; write active: true, or leave"
            " `active` out"
        )
    return rows


def draw(stage, principles: list[dict], *counters) -> dict:
    """One principle, uniformly, by the run's seed and these counters (a row's id, a round) only."""
    return principles[int(stage.rng("principle", *counters).integers(len(principles)))]


def comparison_request(principle: dict) -> str:
    """What a judge of two answers is asked under a principle: its own request, else one made of its text; empty where
    it has neither.
    """
    by = "how well the answers show this trait of their author" if principle["kind"] == "trait" else "this principle"
    return principle["comparison_request"] or (principle["text"] and f"Judge by {by}: {principle['text']}")
