"""Numbers as people write them, in plain characters and LaTeX: their signs, sizes and exact values (reward.math)."""

from __future__ import annotations

import re
from fractions import Fraction


def without_thousands(text: str) -> str:
    """Commas before exactly three digits removed; with a bracket, which may hold a list, the text as it is."""
    return text if any(b in text for b in "([{") else re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)


def plain_minus(text: str) -> str:
    """The sign of a negative number as a hyphen: U+2212, and an en dash that is no range ("3–5"), are written so by
    many models and are no other numbers.
    """
    return re.sub(r"(?<![\w)\]}.%])–(?=[\d.\\$])", "-", text.replace("−", "-"))


#: A number with mark-up around it and at most words behind it: "**18**", "$18 dollars"; not "3. Last step", "3, 4" or
#: "18 or 20".
_MEASURED = re.compile(
    r"[*_ ]{0,9}((?:[+-] ?)?(?:\\?\$[+-]? ?)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+|"
    r" \d+/\d+)?)(?:\\?[%$*_]|°){0,9}(?:\.?[*_ ]{0,9}| {1,9}([^\W\d_][^\d,;]*))"
)
# words that say how large a number is, and are no unit of it
SCALES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "quadrillion": 10**15,
}
_SIZE = re.compile(rf"(?:{'|'.join(SCALES)})(?=s?(?:\s|$))", re.IGNORECASE)
NO_UNIT = re.compile(
    r"\b(?:or|and(?="
    rf" (?:an?|half|another|maybe|perhaps|zero|one|two|three|four|five|six|seven|eight|nine|ten|\w*teen|\w+ty)\b)|nor|not|but|either|maybe|perhaps|alternatively|wrong|incorrect|minus|plus|times|divided|over|squared|cubed|half|if|unless|otherwise|versus|vs|factorial|zero|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|(?:{'|'.join(SCALES)}|lakh|crore)s?|tens|score|gross|halves|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|(?:ten|hundred|thousand|(?:m|b|tr)illion)th)s|(?:tw|thr)ice|doubled|tripled)\b",
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
    if not found or NO_UNIT.search(behind) or strictly and words and not _A_UNIT.fullmatch(words):
        return None
    return f"{found[1]} {size}".strip()


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
    if sized := re.fullmatch(rf"(.*\d)({'|'.join(SCALES)})s?(?:dollars)?", text, re.IGNORECASE):
        value = as_rational(sized[1])
        return None if value is None else value * SCALES[sized[2].lower()]
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
