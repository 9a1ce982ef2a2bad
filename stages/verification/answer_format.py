r"""How worked solutions end, and the same solutions with another ending (``data.answer_format``).

boxed        ... so the area is $\boxed{12}$.          hash      ... \n#### 12
phrase       ... The answer is: 12                     answer_tag ... <answer>12</answer>

Sources that end in different ways teach a model to waver between them. An ending counts only where it closes the text;
of several marks the innermost counts ("The answer is $\boxed{12}$." is boxed), for that is what verifiers read.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from stages.verification.equality import math_equal
from stages.verification.extraction import FLEXIBLE_ORDER, extract, extract_boxed, extract_number, last_box
from stages.verification.normalisation import normalise_math
from stages.verification.plain_numbers import as_rational

STYLES = ("boxed", "hash", "phrase", "answer_tag")
#: A source has a style where so large a share of its answers has any, and a second one where so large a share of these
#: has it (ours).
MARKED, MIXED = 0.2, 0.1
_CLOSING = re.compile(r"[\s.$*\\)\]]*\Z")  # what may follow the box that ends a text
# what may be around a box behind "The answer is", for it to be all that is said there
_BARE = re.compile(r"[\s.$*\\()\[\]]*(?:[A-Za-z]\s?=)?[\s.$*\\()\[\]]*")
_HASH = re.compile(r"\n?[ \t]*#### *([^\n]+?)\s*\Z")
_TAG = re.compile(r"\n?<answer>([^\n]*?)</answer>\s*\Z")
_PHRASE = re.compile(
    r"(?i)(?:\A|(?<=[\s*]))(?:\*\*)?(?:(?:so|thus|hence|therefore),? )?the (?:final )?answer is:?\s*([^\n]*?)\s*\Z"
)
ENDINGS = {
    "boxed": "The answer is $\\boxed{{{}}}$.",
    "hash": "#### {}",
    "phrase": "The answer is: {}",
    "answer_tag": "<answer>{}</answer>",
}


@dataclass(frozen=True)
class Ending:
    """style, the answer it gives, and the text without the mark: what comes before the ending, or, of a box in a
    sentence, the sentence with what was in the box.
    """

    style: str
    answer: str
    before: str


def ending_of(text: str) -> Ending | None:
    """How a text ends, None where it has none of the ``STYLES``."""
    if found := _TAG.search(text):
        inside = found[1].strip()
        answer = extract_boxed(inside) or extract(inside, ("hash",)) or inside
        return Ending("answer_tag", answer.strip(), text[: found.start()]) if answer.strip() else None
    if (found := _HASH.search(text)) and found[1].strip():
        return Ending("hash", found[1].strip(), text[: found.start()])
    start, box, end = last_box(text) or (0, "", 0)
    if box.strip():
        if _CLOSING.match(text, end):
            said = _PHRASE.search(text)
            alone = said and said.start(1) <= start and _BARE.fullmatch(text[said.start(1) : start] + text[end:])
            return Ending("boxed", box.strip(), text[: said.start()] if alone else text[:start] + box + text[end:])
    if (
        (found := _PHRASE.search(text))
        and (answer := found[1].strip("* ").rstrip(".").strip())
        and not re.search(r"[.!?]\s+\S", answer)
    ):
        return Ending("phrase", answer, text[: found.start()])
    return None


def rewritten(text: str, style: str) -> str | None:
    """The text with its answer in another style; itself where it has that style already, None where it has no ending or
    the answer would not be read as the same: an earlier mark in the text, such as a second box, can come before the new
    ending for who reads it."""
    found = ending_of(text)
    if found is None or found.style == style:
        return text if found else None
    answer = found.answer.strip()
    # verifiers read "#### 18 dollars" as 18, but not a box or a tag with words
    if (
        found.style == "hash"
        and as_rational(normalise_math(answer)) is None
        and (number := extract_number(f"#### {answer}"))
    ):
        answer = number
    answer = (
        answer[1:-1].strip()
        if len(answer) > 2 and answer[0] == answer[-1] == "$" and "$" not in answer[1:-1]
        else answer
    )
    same = answer
    if style == "boxed":
        if "$" in answer and not re.fullmatch(r"\\?\$ ?[\d,.]+", answer):
            return None  # a formula within the formula
        answer = re.sub(r"(?<!\\)([$%])", r"\\\1", answer)
    elif style in ("phrase", "answer_tag") and "\\" in answer and "$" not in answer:
        answer = f"${answer}$"
    before = found.before.rstrip()
    new = f"{before}\n{ENDINGS[style].format(answer)}" if before else ENDINGS[style].format(answer)
    ending, read = ending_of(new), (extract(new, (style,)), extract(new, FLEXIBLE_ORDER))
    return (
        new
        if ending and ending.style == style and all(one is not None and math_equal(one, same) for one in read)
        else None
    )


def style_of(endings: Counter) -> list[str]:
    """Styles of a source whose answers ended so often in each (None: in none): the commonest, and others that are no
    rare exceptions; empty where few answers are marked at all.
    """
    marked = {name: n for name, n in endings.items() if name is not None and n}
    total = sum(marked.values())
    if not total or total < MARKED * endings.total():
        return []
    return [
        name
        for name in sorted(marked, key=lambda name: (-marked[name], STYLES.index(name)))
        if marked[name] >= MIXED * total
    ]
