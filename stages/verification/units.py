r"""Units behind an answer's number: whether two answers state units of one dimension that differ (``reward.math``).

Verifiers strip units, because benchmarks do: 11 is right where 11 cm is asked for. A unit that *is* stated and
contradicts the gold answer's own makes another quantity of the same number (11 km for 11 cm, 3 pm for 3 am, 18 cents
for 18 dollars), which is wrong. What is no unit of :data:`UNITS` contradicts nothing, nor does a unit of another
dimension, which people leave out or shorten (cm for an area in cm²).
"""

from __future__ import annotations

import re
from fractions import Fraction as F

#: dimension -> {names of a unit: its size in any fixed unit of that dimension}
UNITS: dict[str, dict[str, F]] = {
    "length": {
        "nm nanometer nanometre": F(1, 10**9),
        "mm millimeter millimetre": F(1, 1000),
        "cm centimeter centimetre": F(1, 100),
        "dm decimeter decimetre": F(1, 10),
        "m meter metre": F(1),
        "km kilometer kilometre": F(1000),
        "in inch inche": F(254, 10_000),
        "ft foot feet": F(3048, 10_000),
        "yd yard": F(9144, 10_000),
        "mi mile": F(1_609_344, 1000),
    },
    "mass": {
        "mg milligram": F(1, 1000),
        "g gram": F(1),
        "kg kilogram kilo": F(1000),
        "oz ounce": F(28_349_523_125, 10**9),
        "lb pound": F(45_359_237, 10**5),
        "ton tonne": F(10**6),
    },
    "time": {
        "ms millisecond": F(1, 1000),
        "s sec second": F(1),
        "min minute": F(60),
        "h hr hour": F(3600),
        "day": F(86_400),
        "wk week": F(604_800),
        "month": F(2_629_746),
        "yr year": F(31_556_952),
        "decade": F(315_569_520),
        "century centurie": F(3_155_695_200),
    },
    "volume": {
        "ml milliliter millilitre": F(1, 1000),
        "cl centiliter centilitre": F(1, 100),
        "dl deciliter decilitre": F(1, 10),
        "l liter litre": F(1),
        "gal gallon": F(3_785_411_784, 10**9),
        "quart": F(946_352_946, 10**9),
        "pint": F(473_176_473, 10**9),
    },
    "frequency": {"hz hertz": F(1), "khz": F(1000), "mhz": F(10**6), "ghz": F(10**9)},
    "force": {"n newton": F(1), "kn kilonewton": F(1000)},
    "pressure": {"pa pascal": F(1), "kpa kilopascal": F(1000)},
    "energy": {"j joule": F(1), "kj kilojoule": F(1000), "cal calorie": F(4184, 1000), "kcal kilocalorie": F(4184)},
    "power": {"w watt": F(1), "kw kilowatt": F(1000)},
    "voltage": {"v volt": F(1), "kv kilovolt": F(1000)},
    "resistance": {"ohm": F(1), "kohm kiloohm kilohm": F(1000), "megaohm megohm": F(10**6)},
    "money": {"cent penny pennie": F(1, 100), "dollar buck": F(1)},
    "angle": {"degree deg": F(1), "radian rad": F(572_957_795, 10**7)},
    "temperature": {"celsius": F(1), "fahrenheit": F(5, 9)},
    "time of day": {"am": F(1), "pm": F(2)},
}
LONGEST = 80  # characters of a unit and what follows it
_UNITS = {
    name: (dimension, size)
    for dimension, units in UNITS.items()
    for names, size in units.items()
    for name in names.split()
}
_WORDS = re.compile(
    r"\\(?:text|textrm|textit|textbf|mbox|mathrm|mathbf|operatorname) ?\{((?:[^{}]|(?<=\^)\{[^{}]*\})*)\}"
)
_NUMBER = re.compile(
    r"[-+]? ?(?:\\?\$)? ?(?:\d[\d,: ]*(?:\.\d+)?|\.\d+|\\[dtc]?frac ?\{[^{}]*\} ?\{[^{}]*\}|\\sqrt"
    r" ?\{[^{}]*\}|\\pi|/| )+"
)
_TOKEN = re.compile(r"[a-z]+|\^ ?\{? ?-?\d+ ?\}?|[²³]|[/·*]|\\cdot|\S")


def number_before_unit(answer: str) -> str | None:
    """The number of an answer that is one with a unit behind it and nothing else: 18 of ``18 m/s`` or ``18 cm^2``; None
    for anything else, also where the unit is one letter, as a variable is (``18 m``).
    """
    text = _plain(answer)
    number = _NUMBER.match(text)
    behind = text[number.end() :].strip() if number else ""
    names = re.findall(r"[a-z]+", behind)
    known = [name for name in names if name not in ("per", "square", "sq", "cubic", "cu")]
    if (
        len(known) < 1
        or len(known) == 1
        and len(known[0]) < 2
        or not all(name in _UNITS or name.removesuffix("s") in _UNITS for name in known)
        or not re.fullmatch(r"(?:[a-z]+\.?(?: ?\^ ?\{? ?-?\d ?\}?|[²³])?(?: ?[/·*] ?| |$))+", behind)
        or len(known) > 1
        and not re.search(r"/|\bper\b", behind)
        or unit_of(answer) is None
    ):
        return None
    return number[0].strip()


def _plain(answer: str) -> str:
    """Lower case, with words and degrees as words and without spaces of formulas."""
    text = _WORDS.sub(r" \1 ", answer.strip().strip("$"))
    text = re.sub(r"(?<![a-zA-Z\\])([kM]?) {0,3}(?:\\Omega(?![a-zA-Z])|[Ω\u2126])", _ohms, text)
    for gone in ("\\left", "\\right", "\\,", "\\;", "\\:", "\\!", "\\ ", "~", "{,}", "\\$"):
        text = text.replace(gone, " ")
    text = re.sub(r"\^ ?(?:\\circ(?![a-z])|\{ ?\\circ ?\})|°|\\degree(?![a-z])", " degree ", text)
    text = re.sub(r"\bdegrees? *(?:C|[Cc]elsius)\b|℃", " celsius ", text)
    text = re.sub(r"\bdegrees? *(?:F|[Ff]ahrenheit)\b|℉", " fahrenheit ", text)
    text = re.sub(r"(?i)\bmph\b", "mi/h", re.sub(r"(?i)\bkm/hr|\bkm?ph\b", "km/h", text))
    return re.sub(r"\b([ap])\.\s?m\.?(?!\w)", r"\1m", " ".join(text.split()).lower())


def _ohms(found: re.Match) -> str:
    return {"": " ohm ", "k": " kohm ", "M": " megohm "}[found[1]]


def unit_of(answer: str) -> tuple[tuple[tuple[str, int], ...], F] | None:
    r"""(dimensions with their powers, size) of the unit behind the number of an answer such as ``11\text{ cm}^2``, ``60
    miles per hour`` or ``\$18``; None without one.
    """
    text = answer.strip()
    money = re.match(r"[-+]? ?(?:\\\$|\$(?=[^$]*\Z))", text) is not None
    text = _plain(text)
    if not (number := _NUMBER.match(text)) or not re.search(r"\d|\\pi", number[0]):
        return None
    if not (behind := text[number.end() :].strip(" .*_$()")):
        return ((("money", 1),), F(1)) if money else None
    if len(behind) > LONGEST:
        return None
    powers: dict[str, int] = {}
    size, sign, power, last, tokens = F(1), 1, 1, None, _TOKEN.findall(behind)
    for at, token in enumerate(tokens):
        found = _UNITS.get(token) or _UNITS.get(token.removesuffix("s"))
        if found and (last is None or sign < 0 or tokens[at - 1] in ("·", "*", "\\cdot")):
            last = (found, sign * power)
            powers[found[0]] = powers.get(found[0], 0) + last[1]
            size, power = size * found[1] ** last[1], 1
            sign = 1
        elif token in ("square", "sq", "cubic", "cu") and (last is None or sign < 0):
            power = 2 if token in ("square", "sq") else 3
        elif last and (token[0] == "^" or token in "²³"):
            (dimension, one), before = last
            written = {"²": "2", "³": "3"}.get(token, re.sub(r"[^-\d]", "", token))
            if len(written.lstrip("-")) > 1:  # no unit, and a size that grows without bound
                return None
            now = (1 if before > 0 else -1) * int(written)
            powers[dimension] += now - before
            size, last = size * one ** (now - before), (last[0], now)
        elif token in ("/", "per") and last:
            sign = -1
        elif token not in ("·", "*", "\\cdot"):
            # "18 in total" are no inches, and "11 kilometers away" are kilometers
            if last is None or len(tokens[0]) < 4:
                return None
            break
    if last is None or sign < 0:
        return None
    return tuple(sorted((dimension, n) for dimension, n in powers.items() if n)), size


def contradicts(answer: str, gold: str) -> bool:
    """Whether both answers state a unit, of the same dimension but not the same: 11 km for 11 cm."""
    if not re.search(r"[a-zA-Z$°]", gold) or (asked := unit_of(gold)) is None or (said := unit_of(answer)) is None:
        return False
    return said[0] == asked[0] and said[1] != asked[1]
