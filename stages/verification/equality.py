"""Whether two answers are the same value, or the same text (reward.math)."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction

from stages.verification.normalisation import (
    LONGEST,
    STOPS,
    SYMBOL,
    WORDS,
    agrees,
    closing_brace,
    normalise_math,
    rounded,
    unmarked,
    without_estimate,
    without_name,
)
from stages.verification.plain_numbers import as_rational
from stages.verification.units import contradicts, number_before_unit


def _parts(text: str) -> tuple[str, list[str], str] | None:
    r"""(opening, elements, closing) of a tuple, an interval or a set in `{}` or `\{\}`, split at top-level commas; None
    if it is not one.
    """
    text = text.replace("\\{", "{").replace("\\}", "}")
    if len(text) < 2 or text[0] not in "([{" or text[-1] not in ")]}" or (text[0] == "{") != (text[-1] == "}"):
        return None
    depth, parts, current = 0, [], ""
    for ch in text[1:-1]:
        depth += (ch in "([{") - (ch in ")]}")
        if depth < 0:
            return None
        if ch == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += ch
    return (text[0], parts + [current], text[-1]) if parts or text[0] == "{" else None


def _matrix(text: str) -> list[list[str]] | None:
    """Rows of a matrix, whatever its brackets; None if it is none. A determinant is a number."""
    inside = text[1:-1] if text[:1] + text[-1:] in ("()", "[]") else text  # \left( \begin{array} ... \right)
    found = re.fullmatch(
        r"\\begin\{([pbB]?matrix|smallmatrix|array)\}(?:\{[lcr|]*\})?(.*?)(?:\\\\)?\\end\{\1\}", inside, re.DOTALL
    )
    return [row.split("&") for row in found[2].split("\\\\")] if found and "\\begin" not in found[2] else None


def math_equal(answer: str, gold: str, *, rel_tol: float = 0.0) -> bool:
    r"""Whether two answers are the same value: equal strings after `normalise_math`, equal exact rationals, tuples and
    matrices equal element by element, sets in braces with equal elements in any order, or words in `\text{}` that are
    equal but for case; also lists element by element in order, of which ``y=2, x=1`` is in that of its letters and equals
    ``(1,2)``, and words but for capitals at their beginning. Units are stripped, but two that contradict each other (`units.contradicts`: km for cm, pm for
    am) make the answers unequal. No float tolerance unless `rel_tol` is given (reward.math)."""
    a, b = normalise_math(answer), normalise_math(gold)
    if not a or not b or contradicts(answer, gold):
        return False
    if a == b:
        return True
    if "\\approx" in a and "\\approx" not in b and (said := rounded(answer)) is not None:
        return agrees(*said) and any(
            math_equal(one, gold, rel_tol=rel_tol)
            for one in said
            if one is said[0] or as_rational(normalise_math(said[0])) is not None
        )
    while a[0] == "{" != b[0] and closing_brace(a) == len(a) - 1 > 1 and "," not in a:
        a = a[1:-1]
    x, y = _measure(answer, a), _measure(gold, b)
    if x is not None and y is not None:
        return x == y or (rel_tol > 0 and abs(x - y) <= Fraction(rel_tol) * max(abs(x), abs(y)))
    if re.search(WORDS, gold) and len(b) > 2 and a.isalpha() and b.isalpha():  # \text{Even}
        return a.casefold() == b.casefold()
    if len(b) > 2 and (words := _words(gold)) is not None and words == _words(answer):
        return True
    rows, others = _matrix(a), _matrix(b)
    if rows and others:
        return [len(row) for row in rows] == [len(row) for row in others] and all(
            math_equal(p, q, rel_tol=rel_tol) for row, other in zip(rows, others) for p, q in zip(row, other)
        )
    left, right = _parts(a), _parts(b)
    if not left or not right:
        return _same_lists(answer, gold, rel_tol)
    if left[::2] != right[::2] or len(left[1]) != len(right[1]):
        return False
    if left[0] != "{":
        return all(math_equal(p, q, rel_tol=rel_tol) for p, q in zip(left[1], right[1]))
    rest = list(right[1])
    for part in left[1]:
        at = next((i for i, other in enumerate(rest) if math_equal(part, other, rel_tol=rel_tol)), None)
        if at is None:
            return False
        del rest[at]
    return True


def classes(answers: Sequence[str | None]) -> list[str | None]:
    """For each answer the first of them that it equals (:func:`math_equal`), which stands for all that are one vote; None
    for None (reward.majority).
    """
    of: dict[str, str] = {}  # normal form -> the answer that stands for its class
    forms = [None if answer is None else normalise_math(answer) for answer in answers]
    for answer, form in zip(answers, forms):
        if form is not None and form not in of:
            of[form] = next((one for one in dict.fromkeys(of.values()) if math_equal(answer, one)), answer)
    return [None if form is None else of[form] for form in forms]


def _measure(text: str, normal: str) -> Fraction | None:
    """The number of an answer whose normal form is given, also of one with a unit in plain letters (``18 km``)."""
    value = as_rational(normal)
    if value is not None or len(text) > LONGEST or (number := number_before_unit(text)) is None:
        return value
    return as_rational(normalise_math(number))


def _words(text: str) -> list[str] | None:
    """Words of a text of nothing else, the first letter of each in lower case: AB and ab are no words that are equal."""
    said = re.sub(WORDS, r"\1", text).strip().strip("$*").rstrip(STOPS).split()
    return [word[:1].lower() + word[1:] for word in said] if said and all(word.isalpha() for word in said) else None


_THOUSANDS = re.compile(r"(?<=\d),\d{3}(?!\d)")
_JOINT = re.compile(r",? ?(?:\\(?:text|mathrm|textrm|mbox) ?\{ ?(?:and|or) ?\}|\b(?:and|or)\b) ?")


def _listed(text: str, thousands: bool = True) -> list[tuple[str, str]] | None:
    """(name, value) of each of several answers with commas, "and" or "or" between them: (x, 1) of ``x=1``, else the
    name is empty; None of anything else. thousands: a comma before exactly three digits is part of a number.
    """
    if len(text) > LONGEST:
        return None
    text = " ".join(re.sub(r"~|\\q?quad(?![a-zA-Z])", " ", unmarked(text).strip(" $")).split())
    text = re.sub(r", ?\\! ?", ",", text)
    if not re.search(r"[<>]|\\(?:le|ge|ne)", text):  # "x<1 and x>2" is no list
        text = _JOINT.sub(", ", text)
    depth, parts = 0, [""]
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character != "," or depth:
            parts[-1] += character
        elif thousands and _THOUSANDS.match(text, at):
            parts[-1] += character
        else:
            parts.append("")
    if len(parts) < 2:
        return None
    found = [re.fullmatch(rf"\s*(?:({SYMBOL})\s*=)?\s*([^=]+)", part) for part in parts]
    return [(one[1] or "", one[2]) for one in found] if all(found) else None


def _same_lists(answer: str, gold: str, rel_tol: float) -> bool:
    """Whether two lists have equal elements in order; those with a name each are in the order of their names, also
    against a tuple."""
    left, right = _listed(answer), _listed(gold)
    if left is None and right is not None:  # a list of 100 and 200 may be written 100,200
        left = _listed(answer, thousands=False)
    named = [found is not None and len({name for name, _ in found} - {""}) == len(found) for found in (left, right)]
    left, right = (sorted(found) if by_name else found for found, by_name in zip((left, right), named))
    if all(named) and [name for name, _ in left] != [name for name, _ in right]:
        return False
    if any(named) and (left is None or right is None):
        whole = _parts(normalise_math(answer if left is None else gold))
        if whole is None or whole[::2] != ("(", ")"):
            return False
        inside = [("", part) for part in whole[1]]
        left, right = left or inside, right or inside
    return (
        left is not None
        and right is not None
        and len(left) == len(right)
        and all(math_equal(p, q, rel_tol=rel_tol) for (_, p), (_, q) in zip(left, right))
    )


def equal_symbolically(pairs: Sequence[tuple[str, str]], limits=None) -> list[bool | None]:
    """Whether (answer, gold) are provably the same value (:mod:`stages.verification.symbolic`), each in a limited
    process; None where that took too long or too much memory (reward.math).

    limits: ``stages.running.sandbox.Limits``; 5 seconds unless given.
    """
    import inspect

    from stages.running.sandbox import Limits, run_jobs
    from stages.verification import symbolic

    distinct = list(dict.fromkeys(pairs))
    distinct = [pair for pair in distinct if not contradicts(*pair)]
    plain = lambda text: without_name(unmarked(text))
    jobs = [
        {"kind": "call", "function": "equal", "args": [without_estimate(plain(answer)), plain(gold)]}
        for answer, gold in distinct
    ]
    found = dict(zip(distinct, run_jobs(jobs, limits or Limits(), setup=inspect.getsource(symbolic) if jobs else "")))
    return [False if pair not in found else found[pair].value if found[pair].error is None else None for pair in pairs]


def same_text(answer: str, gold: str, *, ignore_case: bool = True) -> bool:
    """Equality after Unicode NFKC, white-space collapse, a final dot (or another script's full stop) removed, and case
    folding unless told otherwise.
    """

    def clean(text: str) -> str:
        text = " ".join(unicodedata.normalize("NFKC", text).split()).rstrip(STOPS).strip()
        return text.casefold() if ignore_case else text

    return clean(answer) == clean(gold)
