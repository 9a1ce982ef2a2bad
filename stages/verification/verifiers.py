"""Rule verifiers: extract an answer, compare it with the gold answer, check constraints.

Pure functions on text (catalogue reward.math, reward.format, reward.if_constraints, reward.view, eval.mc_generation).
An extractor returns None when there is nothing to extract; a verdict is then False, never an error. A gold answer that
cannot be understood raises `BadGold`: the row is unscorable, not wrong.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from stages.verification.units import contradicts, number_before_unit

STRICT_ORDER = ("answer_tag", "boxed", "hash")
FLEXIBLE_ORDER = STRICT_ORDER + ("phrase", "last_number")
#: Tags of a response's parts. Where they are special tokens, a completion's text keeps them
#: (stages/decoding/sampler.py).
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


class BadGold(ValueError):
    """The gold answer of a row is missing or not of its own type; the text says what to write."""


# -------------------------------------------------------------------------------------------------- response views


def view(
    text: str, which: str, *, open_tag: str = "<think>", close_tag: str = "</think>", missing: str = "full"
) -> str:
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


#: Scripts that a language is written in, by its code; languages of one script cannot be told apart by it.
SCRIPTS = {
    **dict.fromkeys(
        ("en", "de", "fr", "es", "it", "pt", "nl", "pl", "cs", "sv", "da", "no", "fi", "tr", "ro", "hu", "vi", "id"),
        ("LATIN",),
    ),
    **dict.fromkeys(("ru", "uk", "bg", "sr"), ("CYRILLIC",)),
    "zh": ("CJK",),
    "ja": ("CJK", "HIRAGANA", "KATAKANA"),
    "ko": ("HANGUL", "CJK"),
    **dict.fromkeys(("ar", "fa", "ur"), ("ARABIC",)),
    **dict.fromkeys(("hi", "mr", "ne"), ("DEVANAGARI",)),
    "he": ("HEBREW",),
    "th": ("THAI",),
    "bn": ("BENGALI",),
    "ta": ("TAMIL",),
    "te": ("TELUGU",),
}
_NO_PROSE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\\\(.*?\\\)|\\\[.*?\\\]", re.S)


_JOINS = "\u200c\u200d\u30fc\uff70"  # zero-width joiner and non-joiner, and the sign of a long vowel of Japanese


def language_share(text: str, scripts: Sequence[str], unit: str = "word") -> float:
    """Share of the words (``unit="char"``: letters) of a text that are of the given scripts; 1 without any
    (reward.language).

    Words are runs of letters of one script, with the vowel signs and accents between them; an ideograph is a word of
    its own; code and formulas do not count.
    """
    from stages.measures.text import script_of

    counts, previous = {True: 0, False: 0}, ""
    for character in _NO_PROSE.sub(" ", text):
        script = script_of(character)
        # part of the word that it stands in
        if not script and (character in _JOINS or unicodedata.category(character)[0] == "M"):
            continue
        if script and (unit == "char" or script == "CJK" or script != previous):
            counts[script in scripts] += 1
        previous = script
    return counts[True] / (counts[True] + counts[False]) if any(counts.values()) else 1.0


def language_of(row: dict) -> tuple[str, ...] | None:
    """Scripts that an answer to a prompt row is expected in: those of its column language, else the most frequent one
    of the prompt. None for a language that has no entry in ``SCRIPTS``, or a prompt without letters."""
    from stages.measures.text import script_of

    if row.get("language"):
        return SCRIPTS.get(row["language"].lower().replace("_", "-").split("-")[0])
    letters = [
        script
        for message in row.get("prompt") or ()
        for character in _NO_PROSE.sub(" ", message.get("content") or "")
        if (script := script_of(character))
    ]
    if not letters:
        return None
    most = max(sorted(set(letters)), key=letters.count)
    # Japanese of many ideographs
    if most == "CJK" and 10 * sum(letter in ("HIRAGANA", "KATAKANA") for letter in letters) > letters.count("CJK"):
        return SCRIPTS["ja"]
    return {"HIRAGANA": SCRIPTS["ja"], "KATAKANA": SCRIPTS["ja"], "HANGUL": SCRIPTS["ko"]}.get(most, (most,))


# -------------------------------------------------------------------------------------------------- extraction

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


def without_thousands(text: str) -> str:
    """Commas before exactly three digits removed; with a bracket, which may hold a list, the text as it is."""
    return text if any(b in text for b in "([{") else re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)


def plain_minus(text: str) -> str:
    """The sign of a negative number as a hyphen: U+2212, and an en dash that is no range ("3–5"), are written so by
    many models and are no other numbers.
    """
    return re.sub(r"(?<![\w)\]}.%])–(?=[\d.\\$])", "-", text.replace("−", "-"))


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


#: A number with mark-up around it and at most words behind it: "**18**", "$18 dollars"; not "3. Last step", "3, 4" or
#: "18 or 20".
_MEASURED = re.compile(
    r"[*_ ]{0,9}((?:[+-] ?)?(?:\\?\$[+-]? ?)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+|"
    r" \d+/\d+)?)(?:\\?[%$*_]|°){0,9}(?:\.?[*_ ]{0,9}| {1,9}([^\W\d_][^\d,;]*))"
)
# words that say how large a number is, and are no unit of it
_SCALES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "quadrillion": 10**15,
}
_SIZE = re.compile(rf"(?:{'|'.join(_SCALES)})(?=s?(?:\s|$))", re.IGNORECASE)
_NO_UNIT = re.compile(
    r"\b(?:or|and(?="
    rf" (?:an?|half|another|maybe|perhaps|zero|one|two|three|four|five|six|seven|eight|nine|ten|\w*teen|\w+ty)\b)|nor|not|but|either|maybe|perhaps|alternatively|wrong|incorrect|minus|plus|times|divided|over|squared|cubed|half|if|unless|otherwise|versus|vs|factorial|zero|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|(?:{'|'.join(_SCALES)}|lakh|crore)s?|tens|score|gross|halves|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|(?:ten|hundred|thousand|(?:m|b|tr)illion)th)s|(?:tw|thr)ice|doubled|tripled)\b",
    re.IGNORECASE,
)
#: What may stand behind a number in a box or an answer tag: a word, which is no variable and no function; of the short
#: units those that are no variables.
_A_UNIT = re.compile(
    r"(?!(?:sqrt|log|exp|sin|cos|tan|cot|sec|csc|mod)\b)(?:[^\W\d_]{3,}|(?:cm|mm|km|kg|mg|ml|ft|in|oz|lb|hr|am|pm|Hz|Pa|kJ|kN|kV|kW|eV|mA|mV|dB)\b)[^\W\d_]*[^\d,;=+^\\<>()\[\]{}]*"
)


def measured(text: str, strictly: bool = False) -> str | None:
    """The number of "**18**" or "$18 dollars", with the word of its size ("18 thousand people"), where the other words
    say nothing about its size or another answer; ``strictly``:
    and begin with no variable or function. None for anything else.
    """
    found = _MEASURED.fullmatch(plain_minus(text))
    words = (found[2] or "").strip() if found else ""
    size, behind = (sized[0], words[sized.end() :]) if (sized := _SIZE.match(words)) else ("", words)
    if not found or _NO_UNIT.search(behind) or strictly and words and not _A_UNIT.fullmatch(words):
        return None
    return f"{found[1]} {size}".strip()


def _number_said(value: str, strictly: bool) -> str | None:
    r"""The number of what is marked as the answer, with words or a unit behind it: ``x = 18\,kg``, ``18 m/s``."""
    value = _ABOUT.sub("", without_name(unmarked(value)))
    plain = re.sub(r"\\(?:[,;:!( ]|\)|quad(?![a-z]))|[€£¥₹]", " ", re.sub(_WORDS, r"\1", value)).strip()
    plain = re.sub(r"\A(?:[A-Za-z] ?= ?|(?:USD|EUR|GBP|Rs\.?) ?(?=\d)|US ?(?=\\?\$))", "", plain)
    if (said := measured(plain, strictly)) is not None:
        return said
    said = number_before_unit(plain)
    return said if said is not None and as_rational(normalise_math(said)) is not None else None


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
        if not number and name in STRICT_ORDER and (said := _number_said(value, strictly=name != "hash")) is not None:
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


# -------------------------------------------------------------------------------------------------- equality

_STOPS = ".。।۔｡"  # what ends a sentence, in several scripts
# words in a formula, and the powers of a unit in them
_WORDS = r"\\(?:text|textrm|textit|textbf|mbox|mathrm|mathbf) ?\{((?:[^{}]|(?<=\^)\{ ?-?\d ?\})*)\}"
_POWER = r"\^ ?(?:\{ ?-?\d ?\}|-?\d)(?!\d)"
# words behind a number that are no unit: "18\text{ or 19}"
_TWO_ANSWERS = re.compile(rf"\d|,|\band\b|{_NO_UNIT.pattern}", re.IGNORECASE)
_BETWEEN = "\x01"  # of two numbers beside each other
_ROW = "\x00"  # stands for the end of a matrix's row, two backslashes, while single ones are read
_ONE_UNIT = rf"{_WORDS}(?: ?\^ ?\{{?-?\d+\}}?)?"
_UNIT = re.compile(
    rf"(?: ?(?:/|\\cdot)? ?{_ONE_UNIT}){{1,6}}$| ?\\[tdc]?frac ?\{{ ?{_ONE_UNIT} ?\}} ?\{{ ?{_ONE_UNIT} ?\}}$"
)
_WRITTEN = {
    "π": "\\pi ",
    "∞": "\\infty ",
    "∪": "\\cup ",
    "≤": "\\le ",
    "≥": "\\ge ",
    "≠": "\\ne ",
    "×": "\\times ",
    "⋅": "\\cdot ",
}
#: Signs that have a name in LaTeX, however they are typed.
_TYPED = {
    "\\approx ": r"[≈≃≅]|\\(?:approxeq|thickapprox|simeq|cong|doteq)(?![a-zA-Z])",
    "\\pm ": "±",
    "\\Omega ": "[Ω\u2126]",
    "\\le ": "<=",
    "\\ge ": ">=",
    ">": r"\\gt(?![a-zA-Z])",
    "<": r"\\lt(?![a-zA-Z])",
    ":": r"\\colon(?![a-zA-Z])",
    "$": r"\\textdollar(?![a-zA-Z])",
    "[": r"\\lbrack(?![a-zA-Z])",
    "]": r"\\rbrack(?![a-zA-Z])",
    "\\{": r"\\lbrace(?![a-zA-Z])",
    "\\}": r"\\rbrace(?![a-zA-Z])",
    "\\frac": r"\\(?:nice|s|x)frac(?![a-zA-Z])",
    "\\times ": r"(?<=\d) ?[xX] ?(?=10\^)",
}
LONGEST = 4000  # characters of an answer whose marks are looked at
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_LOOKS = re.compile(
    r"\\(?:(?:textcolor|color) ?\{[^{}]*\}|(?:boldsymbol|bm|pmb|underline|mathit|mathsf|mathtt|emph|textsf|texttt"
    r"|displaystyle|textstyle|tiny|small|normalsize|large|Large|LARGE|huge|Huge)(?![a-zA-Z])) ?"
)


def unmarked(text: str) -> str:
    r"""Without colours, sizes and faces of letters (``\textcolor{red}{18}``, ``{\color{red}18}``), and with signs by
    LaTeX names; a text of more than ``LONGEST`` characters as it is."""
    if len(text) > LONGEST:
        return text
    for _ in range(20):
        if not (found := _LOOKS.search(text)):
            break
        text = text[: found.start()] + "\x02" + text[found.end() :]
        at, inside = found.start(), text[found.start() + 1 :]
        if inside[:1] == "{" and (end := _closing(inside)) is not None:
            text = text[:at] + inside[1:end] + inside[end + 1 :]
        elif text[max(0, at - 1) : at] == "{" and (end := _closing("{" + inside)) is not None:
            text = text[: at - 1] + inside[: end - 1] + inside[end:]
        else:
            text = text[:at] + inside
    text = re.sub("[⁰¹²³⁴-⁹⁻]+", lambda m: "^{%s}" % m[0].translate(_RAISED), text)
    text = re.sub(r"√ ?(?:(\d+|[a-zA-Z])|\{?\(([^()]*)\)\}?|\{([^{}]*)\})", r"\\sqrt{\1\2\3}", text)
    for name, sign in _TYPED.items():
        text = re.sub(sign, lambda m: name, text)
    return re.sub(r"\{([^{}]*)\\over(?![a-zA-Z])([^{}]*)\}", r"\\frac{\1}{\2}", text)


def _closing(text: str) -> int | None:
    """Where the brace that a text begins with is closed."""
    depth = 0
    for found in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    return None


_ABOUT = re.compile(r"\A[\s$]*(?:(?:[A-Za-z] ?)?\\(?:approx|sim)(?![a-zA-Z])|~)\s*(?=\S)")
_GREEK = (
    r"\\(?:alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|(?:var)?theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau"
    r"|(?:var)?phi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega|ell)(?![a-zA-Z])"
)
_SYMBOL = rf"(?:[^\W\d_][A-Za-z0-9']?|(?:[a-zA-Z]|{_GREEK})(?: ?_ ?(?:\w|\{{[^{{}}]{{1,20}}\}}))?)"
_FUNCTION = r"(?:\\?(?:sqrt|log|ln|exp|sinh?|cosh?|tanh?|cot|sec|csc|arc\w+))"
_ROLE = re.compile(
    rf"(?!{_FUNCTION}(?![a-zA-Z]))(?:[A-Za-z]{{4,}}(?: [A-Za-z]+){{0,7}}|(?:[a-zA-Z]|\\?(?:gcd|lcm|max|min|deg|dim|det))"
    r" ?\([^()=]{1,30}\)|(?:m ?)?\\angle ?\{?[A-Z]{1,3}\}?)"
)
# of these the value behind "=" is not theirs
_OTHER_VALUE = re.compile(
    r"(?i)\b(?:squares?|cubes?|roots?|inverse|reciprocal|negative|opposite|never|logarithm|sine|cosine|tangent)\b"
)


def without_name(text: str) -> str:
    r"""What is said of a quantity that is named in words or as a value of a function: 18 of ``\text{Total} = 18``,
    ``Total area = 18``, ``f(2) = 18``, ``\angle ABC = 18``; ``(x,y) = (1,2)`` says (1,2)."""
    head, equals, tail = text.partition("=")
    if not equals or "=" in tail:
        return text
    words = re.fullmatch(rf"\s*{_WORDS}\s*", head)
    said = (words[1] if words else head).strip(" $*:")
    if letters := re.fullmatch(r"(?:\\left)? ?\( ?([a-z](?: ?, ?[a-z])+) ?(?:\\right)? ?\)", said):
        names = letters[1].replace(" ", "").split(",")
        return tail if names == sorted(names) else text
    named = re.fullmatch(r"[A-Za-z]{2,}(?: [A-Za-z]+)*", said) if words else _ROLE.fullmatch(said)
    return tail if named and not _NO_UNIT.search(said) and not _OTHER_VALUE.search(said) else text


def without_estimate(text: str) -> str:
    r"""The answer of ``\frac{55}{3} \approx 18.33``, which is the exact value; of ``\approx 18``, which is 18."""
    said = _rounded(text)
    return _ABOUT.sub("", unmarked(text)) if said is None else said[0] if _agree(*said) else text


def _rounded(text: str) -> tuple[str, str] | None:
    r"""(exact, estimate) of ``\frac{55}{3} \approx 18.33``; None of anything else."""
    exact, sign, estimate = _ABOUT.sub("", unmarked(text)).partition("\\approx")
    return (exact, estimate) if sign and exact.strip(" $") and estimate.strip(" $") else None


_CELSIUS = re.compile(r"(?:° ?[CF]|\^ ?(?:\\circ|\{ ?\\circ ?\}) ?[CF]|℃|℉)(?=[\s.$]*$)")  # degrees behind a number


def normalise_math(text: str) -> str:
    r"""String form in which equal answers are mostly equal: `$`, units in `\text{}`, `\left`, degrees, percent, "x="
    removed (reward.math).
    """
    s = plain_minus(text).replace("\\\\", _ROW)
    s = without_name(unmarked(s))
    s = _ABOUT.sub("", s)
    s = " ".join(re.sub(r"\\[,;: ]|(?<=\S)~", " ", re.sub(r",\s*\\!\s*", ",", s)).split())
    s = re.sub(r"(?<![\w.,'’])\d{1,3}(?:['’]\d{3})+(?![\d'’])", lambda m: re.sub("['’]", "", m[0]), s)
    s = re.sub(r"\A[a-zA-Z] ?\\in(?![a-zA-Z]) ?", "", s)
    s = re.sub(r"(?i)(?<=\d:\d\d) ?[ap]\.?m\.?$", "", s)  # units.contradicts tells them apart
    s = re.sub(r"(?<=[\d} ]) ?(?:[kM]|\\(?:text|mathrm) ?\{ ?[kM]? ?\})? ?\\Omega$", r"\\text{ ohm}", s.rstrip(" .$"))
    if not any(bracket in s for bracket in "([{"):
        s = re.sub(r"(?<=\d) ?, +(?=\d{3}(?!\d))", "," + _BETWEEN, s)  # a list
    for sign, name in _WRITTEN.items():
        s = s.replace(sign, name)
    s = re.sub("[¼-¾⅐-⅞]", lambda m: "\\frac{%s}{%s}" % tuple(unicodedata.normalize("NFKC", m[0]).split("⁄")), s)
    s = re.sub(r"\\(le|ge|ne)q(?:slant)?(?![a-zA-Z])", r"\\\1", _CELSIUS.sub("°", s))
    s = re.sub(r"\\mathbb ([A-Z])(?![a-zA-Z])", r"\\mathbb{\1}", s)
    for gone in (
        "\\left",
        "\\right",
        "\\displaystyle",
        "\\textstyle",
        "\\qquad",
        "\\quad",
        "\\degree",
        "\\!",
        "\\(",
        "\\)",
        "\\%",
        "%",
        "\\$",
        "$",
        "€",
        "£",
        "¥",
        "₹",
        "°",
    ):
        s = s.replace(gone, "")
    s = re.sub(r" ?\^ ?(?:\\circ|\{ ?\\circ ?\})", "", s.replace("{,}", ",")).strip().rstrip(_STOPS).strip()
    s = " ".join(s.split())
    s = re.sub(r"(?<=\d) +(\d+)/(\d+)", r"\\frac{\1}{\2}", s)  # 1 1/2 is not 11/2
    s = re.sub(r"(?<=\d) +(?=\d)(?!\d{3}(?!\d))", _BETWEEN, s)  # nor 3 4 34, but 1 000 is 1000
    s = re.sub(r"\\mathrm ?\{ ?([ei]) ?\}", r"\1", s)  # numbers, as they are set in print
    s = _UNIT.sub(
        lambda m: (
            ""
            if m.start()
            and not any(
                _TWO_ANSWERS.search(re.sub(rf"(?<=[A-Za-z]) ?{_POWER}", "", word))
                for word in re.findall(_WORDS, m.group())
            )
            else m.group()
        ),
        s,
    )
    s = re.sub(_WORDS, r"\1", s).strip().rstrip(_STOPS).strip()
    head, equals, tail = s.partition("=")
    # of 2x=5 and -x=5 the value is another
    if equals and "=" not in tail and re.fullmatch(rf"(?!{_FUNCTION}$)(?:{_SYMBOL})?", head.strip()):
        s = tail
    s = re.sub(r"\\[tdc]frac(?![a-zA-Z])", r"\\frac", s).replace(" ", "")
    s = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", s)
    s = re.sub(r"\\frac(\d)\{", r"\\frac{\1}{", s)
    s = re.sub(r"\\frac\{([^{}]*)\}(\w)", r"\\frac{\1}{\2}", s)
    s = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", s)
    s = re.sub(r"([_^])\{(\w)\}", r"\1\2", s)
    s = re.sub(r"^\(([A-Z])\)$", r"\1", s)  # the letter of a choice
    s = re.sub(r"(?<![^(\[{,=])\+(?=\\infty)", "", s)
    return without_thousands(s).replace(_ROW, "\\\\")


_POWERED = re.compile(
    r"([+-]?)(?:(\d+(?:\.\d*)?|\.\d+)(?:\\times|\\cdot|\*))?10\^(?:\{([+-]?\d{1,3})\}|(-?\d{1,3}))|"
    r"([+-]?)(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d{1,3})"
)
_REPEATS = re.compile(r"([+-]?)(\d*)\.(\d*)\\(?:overline|bar|dot(?!\{?\d\d))(?:\{(\d+)\}|(\d))")


def as_rational(text: str) -> Fraction | None:
    r"""Exact value of an integer, decimal, `a/b`, `\frac{a}{b}` or mixed number (`2\frac{1}{3}`, `2+1/3`), of a decimal
    that repeats (`0.\overline{3}`) or has a power of ten (`1.8\times10^4`, `1.8e4`), or of one with its size in a word
    (`2.5million`); None for anything else.
    """
    if sized := re.fullmatch(rf"(.*\d)({'|'.join(_SCALES)})s?(?:dollars)?", text, re.IGNORECASE):
        value = as_rational(sized[1])
        return None if value is None else value * _SCALES[sized[2].lower()]
    if (
        mixed := re.fullmatch(
            r"(-?)(\d{1,400})(?:\\frac\{(\d{1,400})\}\{(\d{1,400})\}|\+(\d{1,400})/(\d{1,400}))", text
        )
    ) and not (mixed[1] and mixed[5]):
        whole, top, bottom = (int(part) for part in (mixed[2], mixed[3] or mixed[5], mixed[4] or mixed[6]))
        return (-1 if mixed[1] else 1) * (whole + Fraction(top, bottom)) if top < bottom else None
    if powered := _POWERED.fullmatch(text):
        sign, digits = powered[1] or powered[5], powered[2] or powered[6] or "1"
        exponent = int(powered[3] or powered[4] or powered[7])
        if len(digits) > 400 or abs(exponent) > 400:
            return None
        return (-1 if sign == "-" else 1) * Fraction(digits.rstrip(".")) * Fraction(10) ** exponent
    if (repeats := _REPEATS.fullmatch(text)) and len(text) <= 400:
        sign, whole, once, again = repeats[1], repeats[2], repeats[3], repeats[4] or repeats[5]
        value = Fraction(f"{whole or 0}.{once}0") + Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(once))
        return -value if sign == "-" else value
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
    if "\\approx" in a and "\\approx" not in b and (said := _rounded(answer)) is not None:
        return _agree(*said) and any(
            math_equal(one, gold, rel_tol=rel_tol)
            for one in said
            if one is said[0] or as_rational(normalise_math(said[0])) is not None
        )
    while a[0] == "{" != b[0] and _closing(a) == len(a) - 1 > 1 and "," not in a:
        a = a[1:-1]
    x, y = _measure(answer, a), _measure(gold, b)
    if x is not None and y is not None:
        return x == y or (rel_tol > 0 and abs(x - y) <= Fraction(rel_tol) * max(abs(x), abs(y)))
    if re.search(_WORDS, gold) and len(b) > 2 and a.isalpha() and b.isalpha():  # \text{Even}
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


def _measure(text: str, normal: str) -> Fraction | None:
    """The number of an answer whose normal form is given, also of one with a unit in plain letters (``18 km``)."""
    value = as_rational(normal)
    if value is not None or len(text) > LONGEST or (number := number_before_unit(text)) is None:
        return value
    return as_rational(normalise_math(number))


def _agree(exact: str, estimate: str) -> bool:
    """Whether an estimate is a number rounded to the digits it has; True where one of the two is not read here."""
    x, y = as_rational(normalise_math(exact)), as_rational(normalise_math(estimate))
    digits = re.fullmatch(r"-?\d*\.?(\d*)", normalise_math(estimate))
    return x is None or y is None or digits is not None and 2 * abs(x - y) < Fraction(1, 10 ** len(digits[1]))


def _words(text: str) -> list[str] | None:
    """Words of a text of nothing else, the first letter of each in lower case: AB and ab are no words that are equal."""
    said = re.sub(_WORDS, r"\1", text).strip().strip("$*").rstrip(_STOPS).split()
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
    found = [re.fullmatch(rf"\s*(?:({_SYMBOL})\s*=)?\s*([^=]+)", part) for part in parts]
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
        text = " ".join(unicodedata.normalize("NFKC", text).split()).rstrip(_STOPS).strip()
        return text.casefold() if ignore_case else text

    return clean(answer) == clean(gold)


# -------------------------------------------------------------------------------------------------- verdicts


def gold_of(row: dict) -> str:
    """The row's gold answer. Raises BadGold when it has none."""
    gold = row.get("answer")
    if gold is None or not str(gold).strip():
        raise BadGold(
            "the prompt row has no answer; give prompts with an `answer` column or use a reward that needs none"
        )
    return str(gold)


def verify_world(row: dict, text: str, flexible: bool = False, rel_tol: float = 0.0) -> tuple[bool, str | None]:
    """(right?, extracted) in the embedded world; case matters."""
    answer = extract_world(text)
    return answer is not None and same_text(answer, gold_of(row), ignore_case=False), answer


def math_gold(row: dict) -> str:
    """The gold answer of a row of mathematics, without the solution that leads to it. Raises BadGold when there is
    none.
    """
    gold = gold_of(row)
    return extract_hash(gold) or extract_boxed(gold) or gold


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


def golds_of(row: dict) -> list[str]:
    """The row's gold answer and what `extra_json` names as other ways to say it, ``{"aliases": [...]}``. Raises BadGold
    when it has none.
    """
    extra = row.get("extra_json")
    aliases = json.loads(extra).get("aliases") if extra and '"aliases"' in extra else None
    return (
        [gold_of(row), *(str(one) for one in aliases if str(one).strip())]
        if isinstance(aliases, list)
        else [gold_of(row)]
    )


def verify_text(row: dict, text: str, flexible: bool = False, rel_tol: float = 0.0) -> tuple[bool, str | None]:
    r"""(right?, extracted): the tagged, boxed or hashed answer (`flexible`: also what is said to be the answer), else
    the whole text, equal to the gold answer or one of its aliases up to case, white space, `\text{}` and thousands
    commas."""
    answer = extract(text, STRICT_ORDER + ("phrase",) * flexible)
    answer = text if answer is None else answer
    plain = lambda said: without_thousands(re.sub(_WORDS, r"\1", said))
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


# -------------------------------------------------------------------------------------------------- format


def format_reward(text: str, preset: str, *, prefilled: str = "") -> float:
    """1.0 if the text has the structure of `preset`, else 0.0 (reward.format).

    `think_answer`: exactly one thought and one answer, in this order, nothing else, neither empty. `think_only`: one
    thought at the start and something after it. `answer_mark`: exactly one "Answer:", followed by text. Case-sensitive.
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


_SCRIPTS = {
    "el": "\u0370-\u03ff",
    "ru": "\u0400-\u052f",
    "he": "\u0590-\u05ff",
    "ar": "\u0600-\u06ff\u0750-\u077f\ufb50-\ufdff\ufe70-\ufeff",
    "hi": "\u0900-\u097f",
    "bn": "\u0980-\u09ff",
    "pa": "\u0a00-\u0a7f",
    "gu": "\u0a80-\u0aff",
    "ta": "\u0b80-\u0bff",
    "te": "\u0c00-\u0c7f",
    "kn": "\u0c80-\u0cff",
    "ml": "\u0d00-\u0d7f",
    "th": "\u0e00-\u0e7f",
    "ko": "\u1100-\u11ff\u3130-\u318f\uac00-\ud7af",
    "ja": "\u3040-\u30ff",
    "zh": "\u4e00-\u9fff",
    "en": "A-Za-z\u00aa-\u024f\u1e00-\u1eff",
}
#: Frequent words, by language that shares its script with others; the first of a script is the guess where none occurs.
_STOP_WORDS = {
    "en": {
        "en": (
            "the of and to in is that it for was with as on are be this by at from have not you i we they he she or a"
            " an my your will can but what when if so all do how his her has had there their which who more about would"
            " could should does did than then some any only one out up its our been were into them these those make me"
            " write like just because after where why much many most each"
        ),
        "de": (
            "der die das und ist nicht ein eine einen einem zu mit den dem von auf für im sich es sie ich wir ihr auch"
            " als wie an bei aus oder haben sind wird werden guten"
        ),
        "fr": (
            "le la les et est un une des du que qui dans pour pas ne sur avec au aux il elle je nous vous ce cette sont"
            " être plus par mais ou où bonjour"
        ),
        "es": (
            "el la los las y es un una de del que en por para con no se su al lo como más pero este esta son muy hola"
            " está o también yo a me mi mí sobre cuando hay sin porque qué"
        ),
        "pt": (
            "o a os as e é um uma de do da dos das que em por para com não se seu sua no na ao como mais mas este esta"
            " são muito olá está ou também eu você me à pela pelo quando sem foi isso"
        ),
        "it": (
            "il lo la i gli le e è un una di del della dei che in per con non si su al come più ma questo questa sono"
            " molto ciao anche nel alla io a mi mia mio quando cosa hanno"
        ),
        "nl": (
            "de het een en is van ik je dat niet in op te voor met zijn er aan ook als maar om hij wij ze dit naar bij"
            " uit worden"
        ),
        "sv": (
            "och att det som en på är av för med den till inte jag har de ett om vi du men han hon eller från kan hur"
            " vad när"
        ),
        "fi": (
            "ja on ei se että hän oli mutta myös kuin joka tämä ovat minä sinä olen voi jos niin kun sen mitä tai ole"
            " hyvää"
        ),
        "pl": "i w na z się nie to że do jest jak o co ale po dla tak od czy są był przez ten już tylko a ma ale",
        "tr": "ve bir bu da de için ile çok ama ne gibi daha var olarak ben sen değil olan kadar sonra her",
        "id": "dan yang di untuk dengan ini itu tidak dari dalam adalah pada akan saya ke juga anda atau ada bisa apa",
        "sw": (
            "na ya wa kwa ni katika la za kuwa hii cha kama yake si sana watu lakini pia au mimi huu hiyo ili yangu"
            " wetu vya"
        ),
        "vi": "và là của có một không những được cho các trong người với tôi này đã để như khi bạn từ cũng về rất",
    },
    "ru": {
        "ru": "и в не на я что он с как это по но они мы к у вы за бы так от все она его для был ещё из о",
        "bg": (
            "и в не на е се да от за с че са като по до това ще или може си но беше при съм аз много ни към след което"
        ),
        "uk": "і в не на що я з у як це та він до й за але ми є вони від для був про його або ще також",
    },
    "ar": {
        "ar": "في من على إلى أن هذا هذه التي الذي ما لا هو هي كان مع عن أو و كل قد ذلك بين ثم إن لم",
        "fa": "و در به از که این را با است برای آن یک می تا بر هم شد شما من ما هر یا اما خود کند های بود باشد",
        "ur": "کے کی میں ہے اور سے کا کو نے پر یہ وہ کہ ہیں بھی ایک اس تھا نہیں آپ ہو لیے کر ہم تو جو",
    },
    "hi": {
        "hi": "है के की का में और को से पर यह हैं ने भी एक वह नहीं कि हो था लिए कर आप हम तो जो इस या मैं",
        "mr": ("आहे आणि मी या ते तो ही हे त्या आहेत नाही एक च्या ला होते होता पण करून साठी काय तुम्ही आम्ही की असे मध्ये आपण"),
        "ne": "छ र को मा हो यो छन् पनि लाई गर्न भने त्यो एक तर म हामी तपाईं गरेको थियो हुन्छ का ले बाट यस हुन् छैन",
    },
}


def guess_language(text: str) -> str | None:
    """Code of the language that a text is most likely written in: by the script of most letters, and by frequent words
    where languages share it; None without a letter.
    """
    letters = {name: len(re.findall(f"[{span}]", text)) for name, span in _SCRIPTS.items()}
    if not any(letters.values()):
        return None
    script = max(letters, key=letters.get)
    if script == "zh" and letters["ja"] * 10 > letters["zh"]:
        return "ja"
    if script not in _STOP_WORDS:
        return script
    words = re.findall(r"[^\W\d_](?:[^\W\d_]|[\u0300-\u036f\u0900-\u097f])*", text.lower())
    counts = {
        name: sum(word in found for word in words)
        for name, found in ((n, set(w.split())) for n, w in _STOP_WORDS[script].items())
    }
    return max(counts, key=counts.get)


def _is_english(text: str) -> bool:
    return guess_language(text) in ("en", None)


def _in_language(text: str, language: str) -> bool:
    wanted = language.lower().partition("-")[0]
    if wanted not in LANGUAGES:
        raise BadGold(f"language {language!r} cannot be recognised; write one of {', '.join(sorted(LANGUAGES))}")
    return guess_language(text) == wanted


LANGUAGES = {*_SCRIPTS, *(name for group in _STOP_WORDS.values() for name in group)}


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
    "length_constraints:number_words": lambda t, num_words, relation="at least": _related(
        _count(r"\w+", t), relation, num_words
    ),
    "length_constraints:number_sentences": lambda t, num_sentences, relation="at least": _related(
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
    "change_case:capital_word_frequency": lambda t, capital_frequency, capital_relation="at least": _related(
        sum(w.isupper() for w in re.findall(r"\w+(?:[-./]\w+)*", t)), capital_relation, capital_frequency
    ),
    "keywords:existence": lambda t, keywords: all(re.search(re.escape(k), t, re.IGNORECASE) for k in keywords),
    "keywords:forbidden_words": lambda t, forbidden_words: (
        not any(re.search(rf"(?<!\w){re.escape(w.strip())}(?!\w)", t, re.IGNORECASE) for w in forbidden_words)
    ),
    "keywords:frequency": lambda t, keyword, frequency, relation="at least": _related(
        _count(re.escape(keyword), t, re.IGNORECASE), relation, frequency
    ),
    "keywords:letter_frequency": lambda t, letter, let_frequency, let_relation="at least": _related(
        t.lower().count(letter.lower()), let_relation, let_frequency
    ),
}


def check_constraint(constraint_id: str, kwargs: dict, text: str) -> bool:
    """Whether `text` satisfies one constraint of IFEval, IFBench or IFTrain (reward.if_constraints); an empty text
    satisfies none. Raises BadGold for an id or arguments it does not know.
    """
    from stages.verification import more_constraints

    checker = CHECKERS.get(constraint_id) or more_constraints.CHECKERS.get(constraint_id)
    if checker is None:
        if constraint_id in more_constraints.UNDECIDED:
            raise BadGold(
                f"constraint {constraint_id!r} needs {more_constraints.UNDECIDED[constraint_id]}, which is not here;"
                " leave out the rows that have it"
            )
        raise BadGold(
            f"unknown constraint {constraint_id!r}; write one of {', '.join((*CHECKERS, *more_constraints.CHECKERS))}"
        )
    # Parquet keeps a count with nulls as a float
    given = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in kwargs.items() if v is not None}
    try:
        return bool(checker(text if text.strip() else "?", **given)) and bool(text.strip())
    except (TypeError, AttributeError, IndexError) as error:
        raise BadGold(f"constraint {constraint_id}: wrong arguments {sorted(kwargs)} ({error})") from None


def constraint_reward(satisfied: Sequence[bool], mode: str = "all", threshold: float = 1.0) -> float | None:
    """1 iff all constraints hold (`all`), their share (`fraction`), or 1 iff that is at least `threshold`; None without
    constraints.
    """
    return code_reward(sum(map(bool, satisfied)), len(satisfied), mode, threshold=threshold)


def code_reward(
    passed: int, total: int, mode: str = "all", *, well_formatted: bool = True, threshold: float = 1.0
) -> float | None:
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
    """R_len of DAPO: 0 up to max_length - cache_length, then linearly down to -1 at max_length
    (reward.length_soft_overlong).

    `length` counts completion tokens including the end token. cache_length 0 is a hard cut.
    """
    if length > max_length:
        return -1.0
    start = max_length - cache_length
    return 0.0 if length <= start else (start - length) / cache_length


def kimi_length(lengths: Sequence[int], correct: Sequence[bool]) -> list[float]:
    """Length reward of one prompt's answers: lambda = 0.5 - (len - min)/(max - min) for right ones, min(0, lambda) for
    wrong ones; 0 for all when they are equally long (reward.length_kimi, Kimi k1.5)."""
    low, high = min(lengths), max(lengths)
    if high == low:
        return [0.0] * len(lengths)
    shares = [0.5 - (n - low) / (high - low) for n in lengths]
    return [s if right else min(0.0, s) for s, right in zip(shares, correct)]


def target_length(
    length: int, target: int, correct: bool, mode: str = "exact", alpha: float = 3e-4, delta: float = 0.5
) -> float:
    """Reward of an answer that was asked for ``target`` tokens: 1[correct] - alpha |target - n|, or (``max``)
    1[correct] clip(alpha (target - n) + delta, 0, 1) (reward.length_target, L1, Aggarwal & Welleck 2025)."""
    if mode == "exact":
        return float(correct) - alpha * abs(target - length)
    return float(correct) * min(max(alpha * (target - length) + delta, 0.0), 1.0)
