"""The answer that a response gives: in a box, a tag or a sentence, as a number, or the letter of a choice (reward.math,
eval.mc_generation).

An extractor returns None when there is nothing to extract.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from stages.verification.normalisation import normalise_math, number_said, without_estimate
from stages.verification.plain_numbers import as_rational, plain_minus, without_thousands
from stages.verification.units import contradicts

STRICT_ORDER = ("answer_tag", "boxed", "hash")
FLEXIBLE_ORDER = STRICT_ORDER + ("phrase", "last_number")

# "\boxed 18" as people write it
_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*\{|[ \t]+([-+−]?(?:\d|\.\d|\\[a-zA-Z])[^\s$]*))")


def last_box(text: str) -> tuple[int, str, int] | None:
    r"""(start, content, end) of the last `\boxed{...}` or `\fbox{...}`; braces balanced, escaped braces are content,
    unclosed is None.
    """
    found = None
    for found in _BOX.finditer(text):
        pass
    if found is None:
        return None
    if found[1] is not None:
        said = found[1].rstrip(".,;")
        return found.start(), said, found.start(1) + len(said)
    depth, i = 1, found.end()
    while i < len(text):
        if text[i] == "\\":
            i += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return found.start(), text[found.end() : i], i + 1
        i += 1
    return None


def extract_boxed(text: str) -> str | None:
    """Content of :func:`last_box`."""
    found = last_box(text)
    return None if found is None else found[1]


def extract_hash(text: str) -> str | None:
    """What follows the last `#### `, thousands commas removed (GSM8K)."""
    found = re.findall(r"#### *([^\n]+)", text)
    return without_thousands(found[-1].strip()) or None if found else None


def extract_answer_tag(text: str) -> str | None:
    """Content of the last `<answer>...</answer>`, or the box or the `#### ` in it."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    inside = text[start + len("<answer>") : end].strip() if start >= 0 else ""
    return extract_boxed(inside) or extract_hash(inside) or inside or None


def extract_phrase(text: str) -> str | None:
    """X of the last "the (final, correct) answer is X", up to the end of the sentence."""
    found = re.findall(r"the (?:final |correct )?answer is:?\s*([^\n]*)", text, re.IGNORECASE)
    if not found:
        return None
    return re.split(r"\.(?:\s|$)", found[-1])[0].strip().strip("*") or None


def extract_last_number(text: str) -> str | None:
    """Last number-like span, without currency sign, commas and final dot (the flexible GSM8K extraction)."""
    found = [a or b for a, b in re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", plain_minus(text))]
    found = [f for f in (re.sub(r"\.$", "", f.replace("$", "").replace(",", "")) for f in found) if re.search(r"\d", f)]
    return found[-1] if found else None


_EXTRACTORS = {
    "answer_tag": extract_answer_tag,
    "boxed": extract_boxed,
    "hash": extract_hash,
    "phrase": extract_phrase,
    "last_number": extract_last_number,
}


def extract(text: str, order: Sequence[str] = STRICT_ORDER) -> str | None:
    """The first extractor of `order` that yields a value (reward.math)."""
    for name in order:
        if name not in _EXTRACTORS:
            raise ValueError(f"unknown extractor {name!r}; write some of {', '.join(_EXTRACTORS)}")
        value = _EXTRACTORS[name](text)
        if value is not None:
            return value
    return None


def extract_number(text: str, flexible: bool = False, gold: str = "") -> str | None:
    """As `extract`, where the gold answer is a number: of what is marked as the answer the number, without mark-up and
    unit (:func:`measured`); `flexible` passes over what is no number for the next extractor that finds one. A unit that
    contradicts the one of ``gold`` stays."""
    first = None
    for name in FLEXIBLE_ORDER if flexible else STRICT_ORDER:
        value = extract(text, (name,))
        if value is None:
            continue
        if contradicts(value, gold):
            return value
        number = as_rational(normalise_math(without_estimate(value))) is not None
        if not number and name in STRICT_ORDER and (said := number_said(value, strictly=name != "hash")) is not None:
            value, number = said, True
        if number or not flexible:
            return value
        first = value if first is None else first
    return first


def extract_mc_letter(text: str) -> str | None:
    """Letter of the last "Therefore, the answer is (X)" (eval.mc_generation); anything else is a format failure."""
    found = re.findall(r"Therefore, the answer is \(([A-Z])\)", text)
    return found[-1] if found else None


# a letter in whatever mark-up is around it
_LETTER = r"(?:[\[(*_$\s]|\\boxed\{|\\(?:text|textbf|mathrm|mathbf)\{|\\\(){0,9}([A-Z])(?![A-Za-z'’])[\])*_$}]{0,9}"
_SAID = re.compile(
    r"(?i:answer(?:\s{1,3}is|\s{0,3}[:=])\s{0,3}(?:the\s)?(?:option|choice|letter)?:?)"
    + _LETTER
    + r"(?=(?P<behind>[^\n]{0,200}))"
)


def _another(behind: str) -> bool:
    """Whether another letter is named right behind a first one: ", B", "; A", "(or A)", " (B)"; not the words I and A
    of a sentence.
    """
    found = re.match(
        r"[\])*_$}\s]{0,9}[,;/|&+–-]?\s{0,3}(?:\(?\s{0,3}(?:or|and|as well"
        r" as)\b,?)?\s{0,3}(?:(?:but|maybe|perhaps|possibly|also|alternatively),?\s{1,3}){0,2}[\[(*_$]{0,9}([A-Z])(?![A-Za-z'’])(.?.?.?)",
        behind,
    )
    return found is not None and not (
        found[1] in "IA" and re.match(r" [a-z]", found[2]) and not re.match(r" (?:or|an)", found[2])
    )


def extract_mc_anywhere(text: str) -> str | None:
    """A letter where people and benchmarks write it besides: in a box or an answer tag, behind "answer is" or
    "Answer:", as the last "(X)", or alone on a line. None where two are named at once ("(A) or (B)"), and for the words
    I and A of a sentence."""
    strict = extract_mc_letter(text)
    if strict is not None:
        return (
            None
            if _another(
                text[text.rindex(f"Therefore, the answer is ({strict})") + len("Therefore, the answer is (X)") :][:200]
            )
            else strict
        )
    for marked in (extract_answer_tag(text), extract_boxed(text)):
        if (
            marked is not None
            and (found := re.fullmatch(rf"{_LETTER}((?:[.:,;/)\s].*)?)", marked.strip(), re.DOTALL))
            and (found[2][:1] in (*".:,;/)", "") or _another(found[2]))
        ):
            return None if _another(found[2]) else found[1]
    if said := list(_SAID.finditer(text)):
        behind = said[-1]["behind"]
        several = _another(behind)
        word = (
            said[-1][1] in "IA"
            and re.match(r" [a-z]", behind)
            and not re.match(r" (?:because|since|as|is|and|so|which|for)\b", behind)
        )
        return None if several or word else said[-1][1]
    named = [
        found
        for found in re.finditer(r"\(([A-Z])\)", text)
        if not re.search(r"(?:\bnot|n['’]t)\s{1,3}\Z", text[max(0, found.start() - 8) : found.start()])
    ]
    if len(named) > 1 and re.fullmatch(r"[\s,;/&|*]*(?:or|and)?\s*", text[named[-2].end() : named[-1].start()]):
        return None
    found = (
        [one[1] for one in named]
        or re.findall(r"^\s*\**([A-Z])[.):]?\**\s*$", text, re.MULTILINE)
        or re.findall(r"\A\s*\**([A-Z])[.):]\**\s", text)
    )
    return found[-1] if found else None


def extract_world(text: str) -> str | None:
    """Answer in the embedded world: what follows the last "Answer:", up to the end of the sentence; without that mark,
    the whole text if it is a single clause. White space is collapsed, case kept (capital letters can be the very task).
    """
    marked = "Answer:" in text
    tail = " ".join((text.rpartition("Answer:")[2] if marked else text).split())
    sentences = [s.strip() for s in re.split(r"\.(?:\s|$)", tail) if s.strip()]
    if not sentences or (not marked and len(sentences) > 1):
        return None
    return sentences[0]
