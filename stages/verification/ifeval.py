"""The 25 kinds of constraints of IFEval, and what a program counts to check one (Zhou et al. 2023; reward.if_constraints,
eval.ifeval).
"""

from __future__ import annotations

import json
import re

from stages.verification.golds import BadGold
from stages.verification.languages import LANGUAGES, guess_language


def related(count: int, relation: str, bound: int) -> bool:
    """IFEval's two relations, and the further ones of Tulu 3's prompts (around: within a tenth, and at least one)."""
    if relation not in ("at least", "less than", "at most", "exactly", "around"):
        raise ValueError(
            f"unknown relation {relation!r}; write 'at least', 'less than', 'at most', 'exactly' or 'around'"
        )
    return {
        "at least": count >= bound,
        "less than": count < bound,
        "at most": count <= bound,
        "exactly": count == bound,
        "around": abs(count - bound) <= max(round(bound * 0.1), 1),
    }[relation]


# a sentence goes on behind these; the last ones number the items of a list
_TITLES = re.compile(
    r"(?:^|[\s(\"'])(?:Dr|Mr|Mrs|Ms|Mx|Prof|St|Mt|Gen|Col|Capt|Lt|Sgt|Rev|Hon|Gov|Sen|Rep|Pres|Fig|figs?|No|Nos|Vol|pp?|ed|eds|cf|vs|approx|e\.g|i\.e|[A-HJ-Z])\.$"
    r"|(?:^|\n)\s*(?:\d+|[a-zA-Z])\.$"
)
# it ends before a word that begins one
_MAY_END = re.compile(
    r"(?:^|[\s(])(?:(?:[A-Za-z]\.)+[A-Za-z]|etc|Inc|Ltd|Co|Corp|Jr|Sr|al|Jan|Feb|Aug|Sept?|Oct|Nov|Dec|Ave|Blvd)\.$"
)
_STARTS = re.compile(
    r"(?:The|This|That|These|Those|He|She|It|They|We|You|I|A|An|In|On|At|But|And|So|When|If|There|However|My|His|Her|Our|Their)\b|$"
)


def sentences_of(text: str) -> list[str]:
    """Sentences with their marks: they end with . ! or ?, abbreviations and numbers of list items aside; a numbered
    item begins one of its own.
    """
    found, start = [], 0
    for end in [*re.finditer(r"(?<=[.!?])[\"')\]]*\s+|\n\s*(?=\d+[.)]\s)", text := text.strip() + "\n"), None]:
        stop, behind = end.span() if end else (len(text), len(text))
        last = text[max(start, stop - 40) : stop]
        if end and (_TITLES.search(last) or _MAY_END.search(last) and not _STARTS.match(text, behind)):
            continue
        if text[start:stop].strip():
            found.append(text[start:behind].strip())
        start = behind
    return found


def _is_english(text: str) -> bool:
    return guess_language(text) in ("en", None)


def _in_language(text: str, language: str) -> bool:
    wanted = language.lower().partition("-")[0]
    if wanted not in LANGUAGES:
        raise BadGold(f"language {language!r} cannot be recognised; write one of {', '.join(sorted(LANGUAGES))}")
    return guess_language(text) == wanted


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    parts = re.split(r"\s?\*\*\*\s?", text)
    count = len(parts)
    for i, part in enumerate(parts):
        if not part.strip():
            if i not in (0, len(parts) - 1):
                return False
            count -= 1
    return count == num_paragraphs


def _first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = [p.strip() for p in re.split(r"\n\n", text) if p.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'\"").lower()
    return re.split(r"[.,?!'\"]", word)[0] == first_word.lower()


def _json(text: str) -> bool:
    body = re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.IGNORECASE).strip()
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def _highlights(text: str) -> int:
    single = [m for m in re.findall(r"\*[^\n*]*\*", text) if m.strip("*").strip()]
    double = [m for m in re.findall(r"\*\*[^\n*]*\*\*", text) if m.removeprefix("**").removesuffix("**").strip()]
    return len(single) + len(double)


def _placeholders(text: str) -> int:
    r"""Matches of ``\[.*?\]``; its own search starts anew at every bracket of a line without a closing one."""
    count = 0
    for line in text.split("\n"):
        end = 0
        while (start := line.find("[", end)) >= 0 and (end := line.find("]", start) + 1):
            count += 1
    return count


def _two(text: str) -> bool:
    parts = text.split("******")
    kept = [p.strip() for i, p in enumerate(parts) if p.strip() or 0 < i < len(parts) - 1]
    return len(kept) == 2 and all(kept) and kept[0] != kept[1]


def _count(pattern: str, text: str, flags: int = 0) -> int:
    return len(re.findall(pattern, text, flags))


CHECKERS = {
    "punctuation:no_comma": lambda t: "," not in t,
    "length_constraints:number_words": lambda t, num_words, relation="at least": related(
        _count(r"\w+", t), relation, num_words
    ),
    "length_constraints:number_sentences": lambda t, num_sentences, relation="at least": related(
        len(sentences_of(t)), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": lambda t, num_placeholders: _placeholders(t) >= num_placeholders,
    "detectable_content:postscript": lambda t, postscript_marker: bool(
        re.search(
            r"^.*"
            + {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}.get(
                postscript_marker, re.escape(postscript_marker.lower())
            ),
            t.lower(),
            re.MULTILINE,
        )
    ),
    "detectable_format:number_bullet_lists": (
        lambda t, num_bullets: (
            _count(r"^[^\S\n]*\*[^*].*$", t, re.MULTILINE) + _count(r"^[^\S\n]*-.*$", t, re.MULTILINE) == num_bullets
        )
    ),
    "detectable_format:number_highlighted_sections": lambda t, num_highlights: _highlights(t) >= num_highlights,
    "detectable_format:multiple_sections": (
        lambda t, section_spliter, num_sections: (
            _count(r"\s?" + re.escape(section_spliter) + r"\s?\d+\s?", t) >= num_sections
        )
    ),
    "detectable_format:title": lambda t: any(m.strip("<>").strip() for m in re.findall(r"<<[^\n]+>>", t)),
    "detectable_format:json_format": _json,
    "detectable_format:constrained_response": lambda t: any(
        o in t for o in ("My answer is yes.", "My answer is no.", "My answer is maybe.")
    ),
    "combination:two_responses": _two,
    "combination:repeat_prompt": (
        lambda t, prompt_to_repeat: t.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda t, end_phrase: t.strip().strip('"').lower().endswith(end_phrase.strip().lower()),
    "startend:quotation": lambda t: len(t.strip()) > 1 and t.strip()[0] == t.strip()[-1] == '"',
    "change_case:english_capital": lambda t: t.isupper() and _is_english(t),
    "change_case:english_lowercase": lambda t: t.islower() and _is_english(t),
    "language:response_language": _in_language,
    "change_case:capital_word_frequency": lambda t, capital_frequency, capital_relation="at least": related(
        sum(w.isupper() for w in re.findall(r"\w+(?:[-./]\w+)*", t)), capital_relation, capital_frequency
    ),
    "keywords:existence": lambda t, keywords: all(re.search(re.escape(k), t, re.IGNORECASE) for k in keywords),
    "keywords:forbidden_words": lambda t, forbidden_words: (
        not any(re.search(rf"(?<!\w){re.escape(w.strip())}(?!\w)", t, re.IGNORECASE) for w in forbidden_words)
    ),
    "keywords:frequency": lambda t, keyword, frequency, relation="at least": related(
        _count(re.escape(keyword), t, re.IGNORECASE), relation, frequency
    ),
    "keywords:letter_frequency": lambda t, letter, let_frequency, let_relation="at least": related(
        t.lower().count(letter.lower()), let_relation, let_frequency
    ),
}
