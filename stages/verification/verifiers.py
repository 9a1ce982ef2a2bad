"""Rule verifiers: a response against the gold answer of its prompt row, by the kind of answer.

Pure functions on text. A verdict is False where a response has no answer, never an error; a gold answer that cannot be
understood raises `BadGold`: the row is unscorable, not wrong.
"""

from __future__ import annotations

import json
import re
from collections import Counter

from stages.verification.constraints import check_constraint
from stages.verification.equality import math_equal, same_text
from stages.verification.extraction import (
    FLEXIBLE_ORDER,
    STRICT_ORDER,
    extract,
    extract_boxed,
    extract_hash,
    extract_last_number,
    extract_mc_anywhere,
    extract_mc_letter,
    extract_number,
    extract_world,
)
from stages.verification.golds import BadGold, gold_of, golds_of, math_gold
from stages.verification.normalisation import WORDS, normalise_math
from stages.verification.plain_numbers import as_rational, without_thousands
from stages.verification.responses import view
from stages.verification.rule_rewards import constraint_reward


def verify_world(row: dict, text: str, flexible: bool = False, rel_tol: float = 0.0) -> tuple[bool, str | None]:
    """(right?, extracted) in the embedded world; case matters."""
    answer = extract_world(text)
    return answer is not None and same_text(answer, gold_of(row), ignore_case=False), answer


def verify_math(row: dict, text: str, flexible: bool = False, rel_tol: float = 0.0) -> tuple[bool, str | None]:
    """(right?, extracted) for numbers and LaTeX; a GSM8K gold (`... #### 18`) is reduced to its number first."""
    gold = math_gold(row)
    number = as_rational(normalise_math(gold)) is not None
    if row.get("answer_type") in ("integer", "number") and not number:
        raise BadGold(
            f"answer {gold[:60]!r} is no number although answer_type says {row['answer_type']!r}; write text or latex"
        )
    answer = (
        extract_number(text, flexible, gold) if number else extract(text, FLEXIBLE_ORDER if flexible else STRICT_ORDER)
    )
    return answer is not None and math_equal(answer, gold, rel_tol=rel_tol), answer


def verify_text(row: dict, text: str, flexible: bool = False, rel_tol: float = 0.0) -> tuple[bool, str | None]:
    r"""(right?, extracted): the tagged, boxed or hashed answer (`flexible`: also what is said to be the answer), else
    the whole text, equal to the gold answer or one of its aliases up to case, white space, `\text{}` and thousands
    commas."""
    answer = extract(text, STRICT_ORDER + ("phrase",) * flexible)
    answer = text if answer is None else answer
    plain = lambda said: without_thousands(re.sub(WORDS, r"\1", said))
    return (
        any(
            same_text(plain(answer), plain(extract_hash(gold) or extract_boxed(gold) or gold)) for gold in golds_of(row)
        ),
        answer,
    )


def verify_choice(row: dict, text: str, flexible: bool = False, rel_tol: float = 0.0) -> tuple[bool, str | None]:
    """(right?, letter) for multiple choice by the sentence that the prompt asks for; `flexible`: by
    :func:`extract_mc_anywhere`.
    """
    gold = gold_of(row).strip().strip("().").upper()
    if not re.fullmatch(r"[A-Z]", gold):
        raise BadGold(f"answer {gold[:40]!r} is no letter although answer_type is mc; write one letter A-Z")
    letter = extract_mc_anywhere(text) if flexible else extract_mc_letter(text)
    return letter == gold, letter


def verify_gsm8k(row: dict, text: str, flexible: bool = False, rel_tol: float = 0.0) -> tuple[bool, str | None]:
    """(right?, extracted) by the last number of the response, without a mark before it (open-instruct's GSM8K rows,
    whose prompts ask for none).
    """
    gold = math_gold(row)
    if as_rational(normalise_math(gold)) is None:
        raise BadGold(
            f"answer {gold[:60]!r} is no number although its verifier is gsm8k; write a number, or the verifier math"
        )
    answer = extract_last_number(text)
    return answer is not None and math_equal(answer, gold, rel_tol=rel_tol), answer


def _without_tags(text: str) -> str:
    return view(text, "answer_only").replace("<answer>", "").replace("</answer>", "").strip()


def string_f1(answer: str, gold: str) -> float:
    """F1 of the words of two texts, in lower case, without punctuation and articles: 2 P R / (P + R) over words in
    common, counted (SQuAD, Rajpurkar et al. 2016); 0 without any.
    """
    import string

    words = lambda text: re.sub(
        r"\b(?:a|an|the)\b", " ", text.lower().translate(str.maketrans("", "", string.punctuation))
    ).split()
    a, b = Counter(words(answer)), Counter(words(gold))
    shared = (a & b).total()
    return 2.0 * shared / (a.total() + b.total()) if shared else 0.0


def verify_string_f1(row: dict, text: str, flexible: bool = False, rel_tol: float = 0.0) -> tuple[bool, str | None]:
    """(all words right?, answer): the whole answer behind the thought, without answer tags; its share is its F1, the
    best over the gold answer and its aliases (open-instruct, SQuAD).
    """
    answer = _without_tags(text)
    return _best_f1(row, answer) == 1.0, answer


def _best_f1(row: dict, answer: str) -> float:
    return max(string_f1(answer, gold) for gold in golds_of(row))


def _satisfied(row: dict, text: str) -> list[bool]:
    if not row.get("constraints"):
        raise BadGold(
            "the prompt row has no constraints although its verifier is ifeval; give prompts with a `constraints`"
            " column, or another verifier"
        )
    try:
        return [check_constraint(c["id"], json.loads(c["kwargs_json"] or "{}"), text) for c in row["constraints"]]
    except ValueError as error:
        raise BadGold(str(error)) from None


def verify_ifeval(row: dict, text: str, flexible: bool = False, rel_tol: float = 0.0) -> tuple[bool, str | None]:
    """(all constraints of the row met?, None) by the answer behind the thought; its share is the share of constraints
    (open-instruct).
    """
    return all(_satisfied(row, _without_tags(text))), None


VERIFIERS = {
    "world": verify_world,
    "math": verify_math,
    "text": verify_text,
    "mc": verify_choice,
    "gsm8k": verify_gsm8k,
    "string_f1": verify_string_f1,
    "ifeval": verify_ifeval,
}
#: Verifiers that also know degrees: how right an answer is, from 0 to 1 where it is all right.
SHARES = {
    "string_f1": lambda row, text: _best_f1(row, _without_tags(text)),
    "ifeval": lambda row, text: constraint_reward(_satisfied(row, _without_tags(text)), "fraction"),
}


def verifier_of(row: dict) -> str:
    """Which verifier fits a `prompts/1` row: named in extra_json, else by answer_type."""
    extra = row.get("extra_json")
    named = json.loads(extra).get("verifier") if extra and '"verifier"' in extra else None
    if named is not None:
        if named not in VERIFIERS:
            raise BadGold(f"unknown verifier {named!r}; write one of {', '.join(VERIFIERS)}")
        return named
    return {"integer": "math", "number": "math", "latex": "math", "mc": "mc"}.get(
        row.get("answer_type") or "text", "text"
    )
