"""Rule verifiers: extract an answer, compare it with the gold answer, check constraints.

Pure functions on text (catalogue reward.math, reward.format, reward.if_constraints, reward.view, eval.mc_generation). An
extractor returns None when there is nothing to extract; a verdict is then False, never an error. A gold answer that
cannot be understood raises `BadGold`: the row is unscorable, not wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from fractions import Fraction

STRICT_ORDER = ("answer_tag", "boxed", "hash")
FLEXIBLE_ORDER = STRICT_ORDER + ("phrase", "last_number")


class BadGold(ValueError):
    """The gold answer of a row is missing or not of its own type; the text says what to write."""


# -------------------------------------------------------------------------------------------------- response views

def view(text: str, which: str, *, open_tag: str = "<think>", close_tag: str = "</think>", missing: str = "full") -> str:
    """The part of a response that a source sees: `full`, `answer_only` or `think_only` (reward.view).

    A thought that is opened and not closed has an empty answer. Text without any tag is all answer
    (`missing="full"`) or none (`missing="empty"`).
    """
    if which == "full":
        return text
    if which not in ("answer_only", "think_only"):
        raise ValueError(f"unknown view {which!r}; write full, answer_only or think_only")
    if close_tag in text:
        head, _, tail = text.rpartition(close_tag)
        return tail if which == "answer_only" else head.partition(open_tag)[2] if open_tag in head else head
    if open_tag in text:
        return "" if which == "answer_only" else text.partition(open_tag)[2]
    return text if (which == "answer_only") == (missing == "full") else ""


# -------------------------------------------------------------------------------------------------- extraction

def extract_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` or `\fbox{...}`; braces balanced, escaped braces are content, unclosed is None."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    begin = text.index("{", start) + 1
    depth, i = 1, begin
    while i < len(text):
        if text[i] == "\\":
            i += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i]
        i += 1
    return None


def extract_hash(text: str) -> str | None:
    """What follows the last `#### `, commas removed (GSM8K)."""
    found = re.findall(r"#### *([^\n]+)", text)
    return found[-1].strip().replace(",", "").strip() or None if found else None


def extract_answer_tag(text: str) -> str | None:
    """Content of the last `<answer>...</answer>`."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return (text[start + len("<answer>"):end].strip() or None) if start >= 0 else None


def extract_phrase(text: str) -> str | None:
    """X of the last "the answer is X", up to the end of the sentence."""
    found = re.findall(r"the answer is:?\s*([^\n]*)", text, re.IGNORECASE)
    if not found:
        return None
    return re.split(r"\.(?:\s|$)", found[-1])[0].strip().strip("*") or None


def extract_last_number(text: str) -> str | None:
    """Last number-like span, without currency sign, commas and final dot (the flexible GSM8K extraction)."""
    found = [a or b for a, b in re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", text)]
    found = [f for f in (re.sub(r"\.$", "", f.replace("$", "").replace(",", "")) for f in found) if re.search(r"\d", f)]
    return found[-1] if found else None


_EXTRACTORS = {"answer_tag": extract_answer_tag, "boxed": extract_boxed, "hash": extract_hash, "phrase": extract_phrase,
               "last_number": extract_last_number}


def extract(text: str, order: Sequence[str] = STRICT_ORDER) -> str | None:
    """The first extractor of `order` that yields a value (reward.math)."""
    for name in order:
        if name not in _EXTRACTORS:
            raise ValueError(f"unknown extractor {name!r}; write some of {', '.join(_EXTRACTORS)}")
        value = _EXTRACTORS[name](text)
        if value is not None:
            return value
    return None


def extract_mc_letter(text: str) -> str | None:
    """Letter of the last "Therefore, the answer is (X)" (eval.mc_generation); anything else is a format failure."""
    found = re.findall(r"Therefore, the answer is \(([A-Z])\)", text)
    return found[-1] if found else None


def extract_world(text: str) -> str | None:
    """Answer in the embedded world: what follows the last "Answer:", up to the end of the sentence; without that mark, the
    whole text if it is a single clause. White space is collapsed, case kept (capital letters can be the very task)."""
    marked = "Answer:" in text
    tail = " ".join((text.rpartition("Answer:")[2] if marked else text).split())
    sentences = [s.strip() for s in re.split(r"\.(?:\s|$)", tail) if s.strip()]
    if not sentences or (not marked and len(sentences) > 1):
        return None
    return sentences[0]


# -------------------------------------------------------------------------------------------------- equality

def normalise_math(text: str) -> str:
    r"""String form in which equal answers are mostly equal: `$`, `\text{}`, `\left`, degrees, percent, "x=" removed (reward.math)."""
    s = text.strip()
    s = re.sub(r"\\(?:text|mbox|mathrm|textbf)\{([^{}]*)\}\s*$", lambda m: m.group(1) if m.start() == 0 else "", s)
    s = re.sub(r"\\(?:text|mbox|mathrm|textbf)\{([^{}]*)\}", r"\1", s)
    for gone in ("\\left", "\\right", "\\!", "\\,", "\\;", "\\ ", "^{\\circ}", "^\\circ", "\\%", "%", "\\$", "$", "°"):
        s = s.replace(gone, "")
    s = s.strip().rstrip(".").strip()
    head, equals, tail = s.partition("=")
    if equals and "=" not in tail and len(head.strip()) <= 2:
        s = tail
    s = s.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac").replace(" ", "")
    s = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", s)
    s = re.sub(r"\\frac(\d)\{", r"\\frac{\1}{", s)
    s = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", s)
    if not any(b in s for b in "([{"):
        s = re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", s)
    return s


def as_rational(text: str) -> Fraction | None:
    r"""Exact value of an integer, decimal, `a/b` or `\frac{a}{b}`; None for anything else."""
    fraction = re.fullmatch(r"(-?)\\frac\{(-?\d+(?:\.\d+)?)\}\{(-?\d+(?:\.\d+)?)\}", text)
    if fraction:
        sign, top, bottom = fraction.groups()
    elif match := re.fullmatch(r"([+-]?)(\d+(?:\.\d*)?|\.\d+)(?:/(-?\d+(?:\.\d+)?))?", text):
        sign, top, bottom = match.group(1), match.group(2), match.group(3) or "1"
    else:
        return None
    if len(top) + len(bottom) > 400:
        return None
    value = Fraction(top if not top.endswith(".") else top[:-1])
    return None if Fraction(bottom) == 0 else (-1 if sign == "-" else 1) * value / Fraction(bottom)


def _parts(text: str) -> list[str] | None:
    """Elements of a bracketed tuple or interval, split at top-level commas; None if it is not one."""
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return None
    depth, parts, current = 0, [], ""
    for ch in text[1:-1]:
        depth += (ch in "([{") - (ch in ")]}")
        if ch == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += ch
    return parts + [current] if parts else None


def math_equal(answer: str, gold: str, *, rel_tol: float = 0.0) -> bool:
    """Whether two answers are the same value: equal strings after `normalise_math`, equal exact rationals, or tuples equal
    element by element. No float tolerance unless `rel_tol` is given (reward.math)."""
    a, b = normalise_math(answer), normalise_math(gold)
    if not a or not b:
        return False
    if a == b:
        return True
    x, y = as_rational(a), as_rational(b)
    if x is not None and y is not None:
        return x == y or (rel_tol > 0 and abs(x - y) <= Fraction(rel_tol) * max(abs(x), abs(y)))
    left, right = _parts(a), _parts(b)
    if left and right:
        return a[0] == b[0] and a[-1] == b[-1] and len(left) == len(right) and all(
            math_equal(p, q, rel_tol=rel_tol) for p, q in zip(left, right))
    return False


def same_text(answer: str, gold: str, *, ignore_case: bool = True) -> bool:
    """Equality after Unicode NFKC, white-space collapse, a final dot removed, and case folding unless told otherwise."""
    import unicodedata

    def clean(text: str) -> str:
        text = " ".join(unicodedata.normalize("NFKC", text).split()).rstrip(".").strip()
        return text.casefold() if ignore_case else text

    return clean(answer) == clean(gold)


# -------------------------------------------------------------------------------------------------- verdicts

def gold_of(row: dict) -> str:
    """The row's gold answer. Raises BadGold when it has none."""
    gold = row.get("answer")
    if gold is None or not str(gold).strip():
        raise BadGold("the prompt row has no answer; give prompts with an `answer` column or use a reward that needs none")
    return str(gold)


def verify_world(row: dict, text: str, flexible: bool = False) -> tuple[bool, str | None]:
    """(right?, extracted) in the embedded world; case matters."""
    answer = extract_world(text)
    return answer is not None and same_text(answer, gold_of(row), ignore_case=False), answer


def verify_math(row: dict, text: str, flexible: bool = False) -> tuple[bool, str | None]:
    """(right?, extracted) for numbers and LaTeX; a GSM8K gold (`... #### 18`) is reduced to its number first."""
    gold = gold_of(row)
    gold = extract_hash(gold) or extract_boxed(gold) or gold
    if row.get("answer_type") in ("integer", "number") and as_rational(normalise_math(gold)) is None:
        raise BadGold(f"answer {gold[:60]!r} is no number although answer_type says {row['answer_type']!r}; write text or latex")
    answer = extract(text, FLEXIBLE_ORDER if flexible else STRICT_ORDER)
    return answer is not None and math_equal(answer, gold), answer


def verify_text(row: dict, text: str, flexible: bool = False) -> tuple[bool, str | None]:
    """(right?, extracted): the tagged, boxed or hashed answer, else the whole text, equal up to case and white space."""
    answer = extract(text, STRICT_ORDER)
    answer = text if answer is None else answer
    return same_text(answer, gold_of(row)), answer


def verify_choice(row: dict, text: str, flexible: bool = False) -> tuple[bool, str | None]:
    """(right?, letter) for multiple choice; `flexible` also takes a lone letter or the last "(X)"."""
    gold = gold_of(row).strip().strip("().").upper()
    if not re.fullmatch(r"[A-Z]", gold):
        raise BadGold(f"answer {gold[:40]!r} is no letter although answer_type is mc; write one letter A-Z")
    letter = extract_mc_letter(text)
    if letter is None and flexible:
        found = re.findall(r"\(([A-Z])\)", text) or re.findall(r"^\s*([A-Z])[.):]?\s*$", text, re.MULTILINE)
        letter = found[-1] if found else None
    return letter == gold, letter


VERIFIERS = {"world": verify_world, "math": verify_math, "text": verify_text, "mc": verify_choice}


def verifier_of(row: dict) -> str:
    """Which verifier fits a `prompts/1` row: named in extra_json, else by answer_type."""
    extra = row.get("extra_json")
    named = json.loads(extra).get("verifier") if extra and '"verifier"' in extra else None
    if named is not None:
        if named not in VERIFIERS:
            raise BadGold(f"unknown verifier {named!r}; write one of {', '.join(VERIFIERS)}")
        return named
    return {"integer": "math", "number": "math", "latex": "math", "mc": "mc"}.get(row.get("answer_type") or "text", "text")


# -------------------------------------------------------------------------------------------------- format

def format_reward(text: str, preset: str, *, prefilled: str = "") -> float:
    """1.0 if the text has the structure of `preset`, else 0.0 (reward.format).

    `think_answer`: exactly one thought and one answer, in this order, nothing else, neither empty. `think_only`: one thought at
    the start and something after it. `answer_mark`: exactly one "Answer:", followed by text. Case-sensitive.
    """
    text = prefilled + text
    if preset == "answer_mark":
        return float(text.count("Answer:") == 1 and bool(text.rpartition("Answer:")[2].strip(" .\n")))
    once = all(text.count(tag) == 1 for tag in ("<think>", "</think>"))
    if preset == "think_only":
        match = re.fullmatch(r"\s*<think>(.*)</think>(.*)", text, re.DOTALL)
    elif preset == "think_answer":
        once = once and all(text.count(tag) == 1 for tag in ("<answer>", "</answer>"))
        match = re.fullmatch(r"\s*<think>(.*)</think>\s*<answer>(.*)</answer>\s*", text, re.DOTALL)
    else:
        raise ValueError(f"unknown format {preset!r}; write think_answer, think_only or answer_mark")
    return float(once and match is not None and all(part.strip() for part in match.groups()))


# -------------------------------------------------------------------------------------------------- constraints (IFEval)

def _related(count: int, relation: str, bound: int) -> bool:
    if relation not in ("at least", "less than"):
        raise ValueError(f"unknown relation {relation!r}; write 'at least' or 'less than'")
    return count >= bound if relation == "at least" else count < bound


def _sentences(text: str) -> int:
    return len([s for s in re.split(r"(?<=[.!?])[\"')\]]*\s+", text.strip()) if s])


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
    except ValueError:
        return False
    return True


def _highlights(text: str) -> int:
    single = [m for m in re.findall(r"\*[^\n*]*\*", text) if m.strip("*").strip()]
    double = [m for m in re.findall(r"\*\*[^\n*]*\*\*", text) if m.removeprefix("**").removesuffix("**").strip()]
    return len(single) + len(double)


def _two(text: str) -> bool:
    parts = text.split("******")
    kept = [p.strip() for i, p in enumerate(parts) if p.strip() or 0 < i < len(parts) - 1]
    return len(kept) == 2 and all(kept) and kept[0] != kept[1]


def _count(pattern: str, text: str, flags: int = 0) -> int:
    return len(re.findall(pattern, text, flags))


CHECKERS = {
    "punctuation:no_comma": lambda t: "," not in t,
    "length_constraints:number_words": lambda t, num_words, relation="at least": _related(_count(r"\w+", t), relation, num_words),
    "length_constraints:number_sentences": lambda t, num_sentences, relation="at least": _related(_sentences(t), relation, num_sentences),
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": lambda t, num_placeholders: _count(r"\[.*?\]", t) >= num_placeholders,
    "detectable_content:postscript": lambda t, postscript_marker: bool(re.search(
        r"^.*" + {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}.get(postscript_marker, re.escape(postscript_marker.lower())),
        t.lower(), re.MULTILINE)),
    "detectable_format:number_bullet_lists": lambda t, num_bullets:
        _count(r"^\s*\*[^*].*$", t, re.MULTILINE) + _count(r"^\s*-.*$", t, re.MULTILINE) == num_bullets,
    "detectable_format:number_highlighted_sections": lambda t, num_highlights: _highlights(t) >= num_highlights,
    "detectable_format:multiple_sections": lambda t, section_spliter, num_sections:
        _count(r"\s?" + re.escape(section_spliter) + r"\s?\d+\s?", t) >= num_sections,
    "detectable_format:title": lambda t: any(m.strip("<>").strip() for m in re.findall(r"<<[^\n]+>>", t)),
    "detectable_format:json_format": _json,
    "detectable_format:constrained_response": lambda t: any(o in t for o in ("My answer is yes.", "My answer is no.", "My answer is maybe.")),
    "combination:two_responses": _two,
    "combination:repeat_prompt": lambda t, prompt_to_repeat: t.strip().lower().startswith(prompt_to_repeat.strip().lower()),
    "startend:end_checker": lambda t, end_phrase: t.strip().strip('"').lower().endswith(end_phrase.strip().lower()),
    "startend:quotation": lambda t: len(t.strip()) > 1 and t.strip()[0] == t.strip()[-1] == '"',
    "change_case:english_capital": lambda t: t.isupper(),
    "change_case:english_lowercase": lambda t: t.islower(),
    "change_case:capital_word_frequency": lambda t, capital_frequency, capital_relation="at least": _related(
        sum(w.isupper() for w in re.findall(r"\w+(?:-\w+)*", t)), capital_relation, capital_frequency),
    "keywords:existence": lambda t, keywords: all(re.search(re.escape(k), t, re.IGNORECASE) for k in keywords),
    "keywords:forbidden_words": lambda t, forbidden_words: not any(
        re.search(r"\b" + re.escape(w) + r"\b", t, re.IGNORECASE) for w in forbidden_words),
    "keywords:frequency": lambda t, keyword, frequency, relation="at least": _related(
        _count(re.escape(keyword), t, re.IGNORECASE), relation, frequency),
    "keywords:letter_frequency": lambda t, letter, let_frequency, let_relation="at least": _related(
        t.lower().count(letter.lower()), let_relation, let_frequency),
}


def check_constraint(constraint_id: str, kwargs: dict, text: str) -> bool:
    """Whether `text` satisfies one constraint (reward.if_constraints). Raises BadGold for an id or arguments it does not know."""
    if constraint_id not in CHECKERS:
        raise BadGold(f"unknown constraint {constraint_id!r}; write one of {', '.join(CHECKERS)}")
    try:
        return bool(CHECKERS[constraint_id](text, **{k: v for k, v in kwargs.items() if v is not None}))
    except TypeError as error:
        raise BadGold(f"constraint {constraint_id}: wrong arguments {sorted(kwargs)} ({error})") from None


def constraint_reward(satisfied: Sequence[bool], mode: str = "all") -> float | None:
    """1 iff all constraints hold (`all`), or their share (`fraction`); None without constraints."""
    if not satisfied:
        return None
    return float(all(satisfied)) if mode == "all" else sum(map(bool, satisfied)) / len(satisfied)


def code_reward(passed: int, total: int, mode: str = "all", *, well_formatted: bool = True, threshold: float = 1.0) -> float | None:
    """Reward of `passed` of `total` tests (reward.code): `all`, `fraction` or `threshold`; None without tests."""
    if total == 0:
        return None
    if not well_formatted:
        return 0.0
    fraction = passed / total
    if mode == "fraction":
        return fraction
    return float(fraction >= (1.0 if mode == "all" else threshold))


def soft_overlong(length: int, max_length: int, cache_length: int) -> float:
    """R_len of DAPO: 0 up to max_length - cache_length, then linearly down to -1 at max_length (reward.length_soft_overlong).

    `length` counts completion tokens including the end token. cache_length 0 is a hard cut.
    """
    if length > max_length:
        return -1.0
    start = max_length - cache_length
    return 0.0 if length <= start else (start - length) / cache_length


def kimi_length(lengths: Sequence[int], correct: Sequence[bool]) -> list[float]:
    """Length reward of one prompt's answers: lambda = 0.5 - (len - min)/(max - min) for right ones, min(0, lambda) for wrong ones; 0 for all when
    they are equally long (reward.length_kimi, Kimi k1.5)."""
    low, high = min(lengths), max(lengths)
    if high == low:
        return [0.0] * len(lengths)
    shares = [0.5 - (n - low) / (high - low) for n in lengths]
    return [s if right else min(0.0, s) for s, right in zip(shares, correct)]


def target_length(length: int, target: int, correct: bool, mode: str = "exact", alpha: float = 3e-4, delta: float = 0.5) -> float:
    """Reward of an answer that was asked for ``target`` tokens: 1[correct] - alpha |target - n|, or (``max``) 1[correct] clip(alpha (target - n) + delta, 0, 1)
    (reward.length_target, L1, Aggarwal & Welleck 2025)."""
    if mode == "exact":
        return float(correct) - alpha * abs(target - length)
    return float(correct) * min(max(alpha * (target - length) + delta, 0.0), 1.0)
