"""What answers look like: diversity, style signs, contrast (eval.diversity, eval.style_signs, eval.contrastiveness)."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache

import numpy as np

STOCK_PHRASES = (
    "As an AI language model",
    "As a large language model",
    "Certainly!",
    "I apologize",
    "I'm sorry",
    "I cannot",
    "Great question",
    "It's important to note",
    "I hope this helps",
    "delve into",
)
REFLECTION_WORDS = ("wait", "re-evaluate", "let me check", "aha")


#: Characters of scripts that put no space between words: Thai to Khmer, kana, ideographs.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)


def words_of(text: str) -> list[str]:
    """What stands between white space; of scripts that put none between words every character."""
    return text.split() if text.isascii() else _UNSPACED.sub(r" \g<0> ", text).split()


def ngrams(tokens: Sequence[Hashable], n: int) -> list[tuple]:
    """All n-grams in order; empty when the text is shorter than n."""
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def distinct_n(texts: Iterable[Sequence[Hashable]], n: int) -> float | None:
    """Unique n-grams / n-grams, pooled over the given token sequences; ``None`` without any n-gram."""
    grams = [gram for tokens in texts for gram in ngrams(tokens, n)]
    return len(set(grams)) / len(grams) if grams else None


def repetition_n(tokens: Sequence[Hashable], n: int) -> float | None:
    """1 - distinct-n inside one text; ``None`` when the text has no n-gram."""
    distinct = distinct_n([tokens], n)
    return None if distinct is None else 1.0 - distinct


def phrase_rates(texts: Sequence[str], phrases: Sequence[str] = STOCK_PHRASES) -> dict:
    """Share of texts that contain any phrase, and each phrase (case-insensitive substrings)."""
    lowered = [text.lower() for text in texts]
    hits = {phrase: [phrase.lower() in text for text in lowered] for phrase in phrases}
    count = max(1, len(texts))
    return {
        "rate": sum(any(column) for column in zip(*hits.values())) / count if hits and texts else 0.0,
        "per_phrase": {phrase: sum(column) / count for phrase, column in hits.items()},
    }


def reflection_counts(texts: Sequence[str], words: Sequence[str] = REFLECTION_WORDS) -> dict:
    """Whole-word, case-insensitive counts of reflection words per text and the share of texts with any."""
    pattern = re.compile("|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in words), re.IGNORECASE)
    counts = [len(pattern.findall(text)) for text in texts]
    return {"count": counts, "share_with_any": sum(count > 0 for count in counts) / len(counts) if counts else 0.0}


_NO_SCRIPT = (
    "GREEK",
    "MATHEMATICAL",
    "DOUBLE-STRUCK",
    "SCRIPT",
    "BLACK-LETTER",
    "MICRO",
    "FEMININE",
    "MASCULINE",
    "MODIFIER",
    "KATAKANA-HIRAGANA",
    "SUPERSCRIPT",
    "OHM",
    "KELVIN",
    "ANGSTROM",
    "PLANCK",
    "EULER",
    "ALEF",
    "BET",
    "GIMEL",
    "DALET",
    "INFORMATION",
)


@lru_cache(maxsize=65536)
def script_of(character: str) -> str:
    """First word of a letter's Unicode name (LATIN, CYRILLIC, CJK ...), of letters in full or half width the next one;
    empty for everything else, for GREEK and the letters of formulas and units, and for the sign of a long vowel that
    both scripts of Japanese have."""
    names = unicodedata.name(character, "").split(" ") if character.isalpha() else [""]
    found = names[1] if names[0] in ("FULLWIDTH", "HALFWIDTH") else {"IDEOGRAPHIC": "CJK"}.get(names[0], names[0])
    return "" if found in _NO_SCRIPT else found


def scripts(text: str) -> set[str]:
    """Scripts of the letters of a text; one with Japanese letters has all three that Japanese is written in."""
    found = {script_of(character) for character in set(text)} - {""}
    return found | {"HIRAGANA", "KATAKANA", "CJK"} if found & {"HIRAGANA", "KATAKANA"} else found


def mixed_scripts(text: str) -> float:
    """Share of the letters that are not of the text's most frequent script; the three scripts of Japanese are one where
    there is kana. 0 for a text without letters.
    """
    counts = Counter(script for character in text if (script := script_of(character)))
    if counts.keys() & {"HIRAGANA", "KATAKANA"}:
        counts["HIRAGANA"] += counts.pop("KATAKANA", 0) + counts.pop("CJK", 0)
    return 1.0 - max(counts.values()) / counts.total() if counts else 0.0


def special_character_rate(text: str) -> float:
    """Share of characters that no keyboard writes: control, private, unassigned and replacement characters, emoji and
    other pictures; 0 for an empty text.
    """
    odd = [
        c for c in set(text) if c not in "\n\t\r" and (unicodedata.category(c) in ("Cc", "Cf", "Co", "Cn", "Cs", "So"))
    ]
    return sum(map(text.count, odd)) / max(1, len(text))


def levenshtein(a: str, b: str) -> int:
    """Edit distance over code points (insert, delete, substitute cost 1)."""
    if len(a) < len(b):
        a, b = b, a
    codes, steps = np.array([ord(c) for c in b], np.int64), np.arange(len(b) + 1)
    row = steps
    # insertions of a whole row at once: row[j] = min over k <= j of made[k] + (j - k)
    for i, left in enumerate(a, start=1):
        made = np.concatenate(([i], np.minimum(row[1:] + 1, row[:-1] + (codes != ord(left)))))
        row = np.minimum.accumulate(made - steps) + steps
    return int(row[-1])


def rouge_l(left: Sequence[Hashable], right: Sequence[Hashable]) -> dict:
    """Longest common subsequence of two token lists and its F1 (harmonic mean of LCS / len of either); 0 where one is
    empty (``synth.self_instruct``).
    """
    row = [0] * (len(right) + 1)
    for a in left:
        before = 0  # of the row above, one to the left
        for j, b in enumerate(right, start=1):
            before, row[j] = row[j], before + 1 if a == b else max(row[j], row[j - 1])
    return {"lcs": row[-1], "f1": 2.0 * row[-1] / (len(left) + len(right)) if row[-1] else 0.0}


def contrastiveness(chosen: str, rejected: str) -> dict:
    """Jaccard similarity of the word sets and Levenshtein distance (also divided by the longer length)."""
    left, right = set(chosen.split()), set(rejected.split())
    distance = levenshtein(chosen, rejected)
    longest = max(len(chosen), len(rejected))
    return {
        "jaccard": len(left & right) / len(left | right) if left | right else 1.0,
        "levenshtein": distance,
        "levenshtein_normalised": distance / longest if longest else 0.0,
    }


def style_counts(text: str) -> dict[str, int]:
    """Characters, headers, list items and bold spans of a Markdown answer (covariates of style control)."""
    return {
        "length": len(text),
        "headers": len(re.findall(r"^#{1,6} ", text, re.MULTILINE)),
        "lists": len(re.findall(r"^\s*(?:[-*+]|\d+\.) ", text, re.MULTILINE)),
        "bold": len(re.findall(r"\*\*[^*\n]+\*\*", text)),
    }
