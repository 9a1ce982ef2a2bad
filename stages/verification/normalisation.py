r"""One string form for mathematical answers that are written in many: LaTeX without its looks, names of quantities,
units and estimates (reward.math).
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

from stages.verification.plain_numbers import NO_UNIT, as_rational, measured, plain_minus, without_thousands
from stages.verification.units import number_before_unit

STOPS = ".。।۔｡"  # what ends a sentence, in several scripts
# words in a formula, and the powers of a unit in them
WORDS = r"\\(?:text|textrm|textit|textbf|mbox|mathrm|mathbf) ?\{((?:[^{}]|(?<=\^)\{ ?-?\d ?\})*)\}"
_POWER = r"\^ ?(?:\{ ?-?\d ?\}|-?\d)(?!\d)"
# words behind a number that are no unit: "18\text{ or 19}"
_TWO_ANSWERS = re.compile(rf"\d|,|\band\b|{NO_UNIT.pattern}", re.IGNORECASE)
_BETWEEN = "\x01"  # of two numbers beside each other
_ROW = "\x00"  # stands for the end of a matrix's row, two backslashes, while single ones are read
_ONE_UNIT = rf"{WORDS}(?: ?\^ ?\{{?-?\d+\}}?)?"
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
        if inside[:1] == "{" and (end := closing_brace(inside)) is not None:
            text = text[:at] + inside[1:end] + inside[end + 1 :]
        elif text[max(0, at - 1) : at] == "{" and (end := closing_brace("{" + inside)) is not None:
            text = text[: at - 1] + inside[: end - 1] + inside[end:]
        else:
            text = text[:at] + inside
    text = re.sub("[⁰¹²³⁴-⁹⁻]+", lambda m: "^{%s}" % m[0].translate(_RAISED), text)
    text = re.sub(r"√ ?(?:(\d+|[a-zA-Z])|\{?\(([^()]*)\)\}?|\{([^{}]*)\})", r"\\sqrt{\1\2\3}", text)
    for name, sign in _TYPED.items():
        text = re.sub(sign, lambda m: name, text)
    return re.sub(r"\{([^{}]*)\\over(?![a-zA-Z])([^{}]*)\}", r"\\frac{\1}{\2}", text)


def closing_brace(text: str) -> int | None:
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
SYMBOL = rf"(?:[^\W\d_][A-Za-z0-9']?|(?:[a-zA-Z]|{_GREEK})(?: ?_ ?(?:\w|\{{[^{{}}]{{1,20}}\}}))?)"
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
    words = re.fullmatch(rf"\s*{WORDS}\s*", head)
    said = (words[1] if words else head).strip(" $*:")
    if letters := re.fullmatch(r"(?:\\left)? ?\( ?([a-z](?: ?, ?[a-z])+) ?(?:\\right)? ?\)", said):
        names = letters[1].replace(" ", "").split(",")
        return tail if names == sorted(names) else text
    named = re.fullmatch(r"[A-Za-z]{2,}(?: [A-Za-z]+)*", said) if words else _ROLE.fullmatch(said)
    return tail if named and not NO_UNIT.search(said) and not _OTHER_VALUE.search(said) else text


def without_estimate(text: str) -> str:
    r"""The answer of ``\frac{55}{3} \approx 18.33``, which is the exact value; of ``\approx 18``, which is 18."""
    said = rounded(text)
    return _ABOUT.sub("", unmarked(text)) if said is None else said[0] if agrees(*said) else text


def rounded(text: str) -> tuple[str, str] | None:
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
    s = re.sub(r" ?\^ ?(?:\\circ|\{ ?\\circ ?\})", "", s.replace("{,}", ",")).strip().rstrip(STOPS).strip()
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
                for word in re.findall(WORDS, m.group())
            )
            else m.group()
        ),
        s,
    )
    s = re.sub(WORDS, r"\1", s).strip().rstrip(STOPS).strip()
    head, equals, tail = s.partition("=")
    # of 2x=5 and -x=5 the value is another
    if equals and "=" not in tail and re.fullmatch(rf"(?!{_FUNCTION}$)(?:{SYMBOL})?", head.strip()):
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


def agrees(exact: str, estimate: str) -> bool:
    """Whether an estimate is a number rounded to the digits it has; True where one of the two is not read here."""
    x, y = as_rational(normalise_math(exact)), as_rational(normalise_math(estimate))
    digits = re.fullmatch(r"-?\d*\.?(\d*)", normalise_math(estimate))
    return x is None or y is None or digits is not None and 2 * abs(x - y) < Fraction(1, 10 ** len(digits[1]))


def number_said(value: str, strictly: bool) -> str | None:
    r"""The number of what is marked as the answer, with words or a unit behind it: ``x = 18\,kg``, ``18 m/s``."""
    value = _ABOUT.sub("", without_name(unmarked(value)))
    plain = re.sub(r"\\(?:[,;:!( ]|\)|quad(?![a-z]))|[€£¥₹]", " ", re.sub(WORDS, r"\1", value)).strip()
    plain = re.sub(r"\A(?:[A-Za-z] ?= ?|(?:USD|EUR|GBP|Rs\.?) ?(?=\d)|US ?(?=\\?\$))", "", plain)
    if (said := measured(plain, strictly)) is not None:
        return said
    said = number_before_unit(plain)
    return said if said is not None and as_rational(normalise_math(said)) is not None else None
