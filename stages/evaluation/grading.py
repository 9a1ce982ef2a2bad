"""How one answer is graded: read, parsed, verified; and how hard its prompt says it is."""

from __future__ import annotations


def read_of(sample, component=None) -> str:
    """The text of a sample that a component's view takes apart; of one that sees all of it, as it was written."""
    return sample.text if component is not None and component.view == "full" else sample.seen


def parse(row: dict, text: str, component=None) -> tuple[bool | None, bool | None, str | None]:
    """(right by strict extraction, right by flexible extraction, extracted answer) of a row with a checkable answer;
    all ``None`` for other rows. Both readings are reported, because formatting alone can move a score (section D.0).
    ``component``: the configured verifier, whose choice of verifier, view and tolerance counts here too."""
    from stages.verification.golds import BadGold
    from stages.verification.responses import view
    from stages.verification.verifiers import VERIFIERS, verifier_of

    if row.get("answer") is None:
        return None, None, None
    try:
        verify = VERIFIERS[
            verifier_of(row) if component is None or component.verifier == "auto" else component.verifier
        ]
        seen = view(text, component.view if component else "answer_only")
        rel_tol = component.rel_tol if component else 0.0
        strict, extracted = verify(row, seen, False, rel_tol)
        return strict, bool(strict or verify(row, seen, True, rel_tol)[0]), extracted
    except BadGold:
        return None, None, None


def parse_all(
    answers: list[tuple[dict, str] | None], component=None
) -> list[tuple[bool | None, bool | None, str | None]]:
    """:func:`parse` of each (row, text), all ``None`` for no answer; where ``component`` says symbolic, an answer that
    both readings call wrong may yet be proved right.
    """
    from stages.reward.scorers import symbolically
    from stages.verification.responses import view
    from stages.verification.verifiers import VERIFIERS, verifier_of

    found = [(None, None, None) if one is None else parse(*one, component) for one in answers]
    if component is None or not component.symbolic:
        return found
    strict = symbolically(
        component, [({}, None) if read[0] is not False else (one[0], read[2]) for one, read in zip(answers, found)]
    )
    found = [(True, True, read[2]) if proved else read for read, proved in zip(found, strict)]

    def loosely(row: dict, text: str) -> str | None:
        return VERIFIERS[verifier_of(row) if component.verifier == "auto" else component.verifier](
            row, view(text, component.view), True, component.rel_tol
        )[1]

    flexible = symbolically(
        component,
        [({}, None) if read[1] is not False else (one[0], loosely(*one)) for one, read in zip(answers, found)],
    )
    return [(read[0], True, read[2]) if proved else read for read, proved in zip(found, flexible)]


def constraint_verdicts(row: dict, text: str, component=None) -> dict | None:
    """Which instructions of a row with constraints an answer follows (eval.ifeval): {"strict": [...], "loose": [...]},
    {"unscorable": why} where one cannot be checked, None for other rows. ``component``: the configured component of
    kind constraints, whose view counts here too; without one, a thought is no part of the answer."""
    import json

    from stages.measures.suites import ifeval_loose_variants
    from stages.verification.constraints import check_constraint
    from stages.verification.golds import BadGold
    from stages.verification.responses import view

    if not row.get("constraints"):
        return None
    seen = view(text, component.view if component else "answer_only")
    # an empty answer follows nothing
    passes = lambda one, reading: check_constraint(*one, reading) and bool(reading.strip())
    try:
        asked = [(one["id"], json.loads(one["kwargs_json"] or "{}")) for one in row["constraints"]]
        return {
            "strict": [passes(one, seen) for one in asked],
            "loose": [any(passes(one, reading) for reading in ifeval_loose_variants(seen)) for one in asked],
        }
    except (BadGold, ValueError) as error:
        return {"unscorable": str(error)}


def difficulty_of(row: dict) -> str | None:
    """Difficulty of a prompt row: a column or an ``extra_json`` entry named difficulty or level."""
    import json

    extra = json.loads(row["extra_json"]) if row.get("extra_json") else {}
    for holder in (row, extra if isinstance(extra, dict) else {}):
        for name in ("difficulty", "level"):
            if holder.get(name) is not None:
                value = holder[name]
                return str(int(value)) if isinstance(value, float) and value == int(value) else str(value)
    return None
