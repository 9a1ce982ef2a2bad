r"""Whether two answers are the same mathematical value: a LaTeX subset read token by token into sympy, and a proof that
the difference is zero (``reward.math``).

    equal(r"\sqrt{8}", r"2\sqrt{2}")  # True

Text of a model is never evaluated: the parser below builds every expression itself, and refuses what would grow without
bound (``9^{9^9}``) before sympy sees it. The module imports nothing of this project, because a sandbox worker runs its
source (``stages.verification.equality.equal_symbolically``), under a time and a memory limit.

Read are numbers (exact; mixed ``2\frac{1}{3}``), letters with indices, ``\pi``, e, i, ``+ - * / ^ ! |x|``, fractions,
roots, the usual functions, ``\binom``, degrees in trigonometric functions, ``\pm``; tuples and intervals, sets in
braces, unions, matrices, equations and inequalities, also two in a row (``1 < x < 2``, which is the interval (1, 2));
several answers with commas, "and" or "or" between them; the plain forms ``sqrt(2)/2``, ``x**2``, ``√2``. A percent sign, a
dollar sign and a unit say nothing about the value, as in ``normalise_math``. What is not read is equal to nothing:
:func:`equal` is then False.
"""

from __future__ import annotations

import re

import sympy

LONGEST, DEEPEST = 400, 40  # characters of an answer, levels of nesting
LARGEST_BITS = 20_000  # of a power of numbers
LARGEST_DEGREE = 40  # of a power of a sum
LARGEST_FACTORIAL = 500

_NAMES = {"pi": sympy.pi, "infty": sympy.oo, "infinity": sympy.oo, "inf": sympy.oo}
_FUNCTIONS = {
    "sin": sympy.sin,
    "cos": sympy.cos,
    "tan": sympy.tan,
    "cot": sympy.cot,
    "sec": sympy.sec,
    "csc": sympy.csc,
    "arcsin": sympy.asin,
    "arccos": sympy.acos,
    "arctan": sympy.atan,
    "sinh": sympy.sinh,
    "cosh": sympy.cosh,
    "tanh": sympy.tanh,
    "ln": sympy.log,
    "exp": sympy.exp,
    "log": None,
}
_TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc")
_GREEK = (
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "varepsilon",
    "zeta",
    "eta",
    "theta",
    "vartheta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
    "rho",
    "sigma",
    "tau",
    "phi",
    "varphi",
    "chi",
    "psi",
    "omega",
    "Gamma",
    "Delta",
    "Theta",
    "Lambda",
    "Xi",
    "Pi",
    "Sigma",
    "Phi",
    "Psi",
    "Omega",
    "ell",
)
_RELATIONS = {
    "=": "=",
    "<": "<",
    ">": ">",
    "le": "<=",
    "leq": "<=",
    "leqslant": "<=",
    "ge": ">=",
    "geq": ">=",
    "geqslant": ">=",
    "lt": "<",
    "gt": ">",
    "ne": "!=",
    "neq": "!=",
}
_UNICODE = {
    "−": "-",
    "–": "-",
    "×": "*",
    "·": "*",
    "⋅": "*",
    "÷": "/",
    "π": r"\pi ",
    "√": r"\root ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "∪": r"\cup ",
    "±": r"\pm ",
    "°": r"^\circ ",
    "²": "^2",
    "³": "^3",
    "½": r"\frac12 ",
    "θ": r"\theta ",
    "α": r"\alpha ",
    "β": r"\beta ",
    "λ": r"\lambda ",
    "μ": r"\mu ",
    "∅": r"\emptyset ",
    "**": "^",
    "<=": r"\le ",
    ">=": r"\ge ",
}
#: What stands behind a number and says nothing about the value; letters that could be variables are none.
_UNITS = (
    "cm mm km kg mg ml mph inch inches ft feet foot yard yards meter meters metre metres centimeter centimeters"
    " kilometer kilometers mile miles gram grams kilogram kilograms liter liters litre litres second seconds sec minute"
    " minutes min hour hours day days week weeks month months year years degree degrees radian radians dollar dollars"
    " cent cents percent unit units square cubic point points"
).split()
_WORDS = r"\\(?:text|textrm|textit|textbf|mbox|mathrm|operatorname)\s*\{((?:[^{}]|(?<=\^)\{[^{}]*\})*)\}"
_POWER = re.compile(r"(?<=[A-Za-z])\s?\^\s?(?:\{\s?-?\d\s?\}|-?\d)(?!\d)")  # of a unit
_JOINED = re.compile(
    r",?\s*\\(?:text|textrm|mbox|mathrm)\s*\{\s*(or|and)\s*\}|,?(?:\\quad|\s)\s*\b(or|and)\b(?=\\quad|\s)"
)
_NO_UNIT = re.compile(
    r"\d|,|\b(?:or|and|nor|not|but|either|maybe|perhaps|alternatively|wrong|incorrect|minus|plus|times|divided|over|squared|cubed|half|if|unless|otherwise|versus|vs|factorial|zero|two|three|four|five|six|"
    r"seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|(?:dozen|hundred|thousand|(?:m|b|tr|quadr)illion|lakh|crore)s?|"
    r"tens|score|gross|halves|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|(?:ten|hundred|thousand|(?:m|b|tr)illion)th)s|(?:tw|thr)ice|doubled|tripled)\b",
    re.IGNORECASE,
)  # words behind a number that change it, or say another one
_MATRICES = "pmatrix|bmatrix|Bmatrix|matrix|smallmatrix|array"
_NO_PRODUCTS = ("or", "and", "is", "no", "not", "if", "of", "to", "for", "the", "all", "yes")
_TOKEN = re.compile(r"\d+(?:\.\d*)?|\.\d+|\\[a-zA-Z]+|\\[{}|\\]|[a-zA-Z]+|[-+*/^_!|(){}\[\],=<>&;:']|\s+")
_DEGREE, _I = sympy.Symbol("degree", positive=True), sympy.I


class Unread(ValueError):
    """A text that is none of the mathematics that is read here."""


def clean(text: str) -> tuple[str, str]:
    """(formula, unit): without mark-up that says nothing about the value, and the plain unit behind it."""
    text = text.replace("\\\\", r"\row ")
    text = re.sub(
        rf"\\begin\{{(?:{_MATRICES})\}}(?:\{{[lcr|\s]*\}})?",
        r"\\matrix ",
        re.sub(rf"\\end\{{(?:{_MATRICES})\}}", r"\\end ", text),
    )
    for name, instead in _UNICODE.items():
        text = text.replace(name, instead)
    for gone in (
        r"\left",
        r"\right",
        r"\!",
        r"\,",
        r"\;",
        r"\:",
        r"\ ",
        r"\(",
        r"\)",
        r"\[",
        r"\]",
        r"\displaystyle",
        r"\%",
        "%",
        r"\$",
        "$",
        r"\limits",
        "~",
        r"\bigl",
        r"\bigr",
        r"\big",
    ):
        text = re.sub(re.escape(gone) + (r"(?![a-zA-Z])" if gone[-1].isalpha() else ""), " ", text)
    text = _JOINED.sub(lambda m: f" \\{m[1] or m[2]} ", text)
    text = re.sub(r"\\[dt]binom(?![a-zA-Z])", r"\\binom", re.sub(r"\\q?quad(?![a-zA-Z])", " ", text))
    text = re.sub(r"\{\s*(\w+)\s*\\choose\s*(\w+)\s*\}", r"\\binom{\1}{\2}", text)
    text = re.sub(rf"\\operatorname\s*\{{({'|'.join(_FUNCTIONS)})\}}", r"\\\1 ", text)
    text = re.sub(r"\\langle(?![a-zA-Z])", "(", re.sub(r"\\rangle(?![a-zA-Z])", ")", text))
    text = text.replace("{,}", "").strip().rstrip(".").strip()
    text = re.sub(r"\\mathrm\s*\{\s*([ei])\s*\}", r" \1 ", text)  # numbers, as they are set in print
    text = re.sub(
        r"^[a-zA-Z]\s*\\in(?![a-zA-Z])\s*", "", re.sub(r"\\(?:dfrac|tfrac|cfrac)(?![a-zA-Z])", r"\\frac", text)
    )
    if not any(bracket in text for bracket in "([{"):
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    units = []
    while found := re.search(
        rf"(?<=.)(?:{_WORDS}|(?<![a-zA-Z\\])({'|'.join(_UNITS)}))\s*(?:\^\s*\{{?-?\d\}}?)?$", text
    ):
        if found[1] and _NO_UNIT.search(_POWER.sub("", found[1])):  # the text stays, and is Unread
            break
        units.append(
            (found[1] or found[2] or "").strip().rstrip("s") + re.sub(r"\D", "", found[0][-3:]) if found[2] else ""
        )
        text = text[: found.start()].rstrip().removesuffix("/").removesuffix(r"\cdot").rstrip()
    return re.sub(r"(?<![\d.])(\d+) +(\d+) */ *(\d+)(?![\d.])", r"(\1+\2/\3)", text), " ".join(
        unit for unit in reversed(units) if unit
    )


def tokens_of(text: str) -> list[str]:
    """Tokens of a formula; runs of letters are one variable each, names of functions and constants stay whole."""
    if re.fullmatch(r"[a-zA-Z\s]{2,}", text) and text.strip() not in _NAMES:  # a word is no product of its letters
        raise Unread(text)
    out, at = [], 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if not found:
            raise Unread(text[at : at + 10])
        token, at = found[0], found.end()
        if token.isspace():
            if out and out[-1] != " ":
                out.append(" ")
        elif token.isalpha():
            known = token in _FUNCTIONS or token in _NAMES
            if not known and token != "sqrt" and (len(token) > 3 or token.lower() in _NO_PRODUCTS):
                raise Unread(token)
            out += [r"\root"] if token == "sqrt" else ["\\" + token] if known else list(token)
        else:
            out.append(token)
    return out


class Parser:
    """Recursive descent over tokens. ``value`` gives what an answer is: ("number", e), ("set" | "list", parts),
    ("tuple", opening, parts, closing), ("union", parts), ("both", inequalities), ("matrix", rows), ("relation", sign, e).
    """

    def __init__(self, tokens: list[str]):
        self.tokens, self.at, self.depth, self.bars, self.signs = tokens, 0, 0, 0, 0

    # -- tokens --------------------------------------------------------------------------------------------------------
    def peek(self, skip: bool = True) -> str:
        at = self.at
        while skip and at < len(self.tokens) and self.tokens[at] == " ":
            at += 1
        return self.tokens[at] if at < len(self.tokens) else ""

    def next(self) -> str:
        while self.at < len(self.tokens) and self.tokens[self.at] == " ":
            self.at += 1
        if self.at >= len(self.tokens):
            raise Unread("it ends too early")
        self.at += 1
        return self.tokens[self.at - 1]

    def take(self, *wanted: str) -> bool:
        if self.peek() in wanted and self.peek():
            self.next()
            return True
        return False

    def expect(self, *wanted: str) -> str:
        token = self.next()
        if token not in wanted:
            raise Unread(token)
        return token

    # -- answers -------------------------------------------------------------------------------------------------------
    def whole(self):
        found = self.value_list()
        if self.peek():
            raise Unread(self.peek())
        return found

    def value_list(self):
        parts, joints = [self.union()], set()
        while self.peek() in (",", ";", r"\or", r"\and"):
            joints.add(self.next())
            parts.append(self.union())
        if len(parts) == 1:
            return parts[0]
        if len(joints) == 1 and all(part[0] == "relation" and "<" in part[1] or part[0] == "both" for part in parts):
            if joints == {r"\or"}:  # x < 1 or x > 2
                return ("union", parts)
            if joints == {r"\and"}:
                return ("both", parts)
        return ("list", parts)

    def union(self):
        parts = [self.relation()]
        while self.take(r"\cup"):
            parts.append(self.relation())
        return parts[0] if len(parts) == 1 else ("union", parts)

    def sign_ahead(self) -> str | None:
        """The sign of the relation that comes next."""
        return _RELATIONS.get(self.peek().lstrip("\\"))

    def relation(self):
        left = self.value()
        sign = self.sign_ahead()
        if sign is None:
            return left
        self.next()
        # (x, y) = (1, 2)
        if left[0] == "tuple" and sign == "=" and all(part[0] == "number" and part[1].is_Symbol for part in left[2]):
            right = self.value()
            if right[0] != "tuple" or len(right[2]) != len(left[2]):
                raise Unread(sign)
            return right
        if left[0] != "number":
            raise Unread(sign)
        right = self.value()
        # 9 + 9 = 18 says 18, and 17 = 18 nothing
        while sign == "=" and right[0] == "number" and not left[1].free_symbols | right[1].free_symbols:
            if not same_number(left[1], right[1]):
                raise Unread(sign)
            left = right
            if not self.take("="):
                return right
            right = self.value()
        if right[0] != "number" and sign == "=" and left[1].is_Symbol:  # S = \{1, 2\}
            return right
        if right[0] != "number":
            raise Unread(sign)
        if (further := self.sign_ahead()) is not None:  # 1 < x < 2
            if sign[0] not in "<>" or further[0] != sign[0]:
                raise Unread(further)
            self.next()
            last = self.value()
            if last[0] != "number" or self.sign_ahead() is not None:
                raise Unread(further)
            return ("both", [_inequality(left[1], sign, right[1]), _inequality(right[1], further, last[1])])
        if sign == "=":
            return (
                "relation",
                "=",
                left[1] - right[1],
                right[1] if left[1].is_Symbol else left[1] if right[1].is_Symbol and not left[1].free_symbols else None,
            )
        return _inequality(left[1], sign, right[1])

    def value(self):
        """One bracketed thing, or an expression; two values where it has a ``\\pm``."""
        token, start = self.peek(), self.at
        if token == r"\{" or token == "{" and self._closes("}"):
            self.next()
            parts = [] if self.peek() in (r"\}", "}") else self._parts()
            self.expect(r"\}", "}")
            return ("set", parts)
        if token == r"\emptyset" or token == r"\varnothing":
            self.next()
            return ("set", [])
        if token == r"\matrix":
            return ("matrix", self.matrix())
        if token in ("(", "["):
            self.next()
            parts = self._try(self._parts)
            if (
                parts is not None
                and len(parts) == 1
                and parts[0][0] == "matrix"
                and self.take(")" if token == "(" else "]")
            ):
                return parts[0]
            if parts is not None and len(parts) > 1 and self.peek() in (")", "]"):
                return ("tuple", token, parts, self.next())
            self.at = start
        signs, start = self.signs, self.at
        value = self.sum()
        if self.signs == signs:
            return ("number", value)
        end, self.at = self.at, start
        self.upper = False
        try:
            other = self.sum()
        finally:
            self.upper = True
        if self.at != end:
            raise Unread(r"\pm")
        return ("set of signs", [("number", value), ("number", other)])

    def _closes(self, bracket: str) -> bool:
        """Whether a brace at this place is a set's: the one that closes it is the last token, and it holds a comma."""
        depth, comma, tokens = 0, False, [t for t in self.tokens[self.at :] if t != " "]
        for i, token in enumerate(tokens):
            depth += (token in ("{", "(", "[")) - (token in ("}", ")", "]"))
            comma = comma or token == "," and depth == 1
            if depth == 0:
                return comma and i == len(tokens) - 1
        return False

    def _parts(self) -> list:
        parts = [self.union()]
        while self.take(","):
            parts.append(self.union())
        return parts

    def _try(self, read):
        state = (self.depth, self.bars, self.signs)
        try:
            return read()
        except Unread:
            self.depth, self.bars, self.signs = state
            return None

    def matrix(self) -> list[list]:
        self.expect(r"\matrix")
        rows = [[]]
        while self.peek() != r"\end":
            signs = self.signs
            rows[-1].append(("number", self.sum()))
            if self.signs != signs:  # two matrices
                raise Unread(r"\pm")
            if self.take("&"):
                continue
            if not self.take(r"\row"):
                break
            if self.peek() != r"\end":
                rows.append([])
        self.expect(r"\end")
        return rows

    # -- expressions ---------------------------------------------------------------------------------------------------
    upper = True  # which sign of \pm is read

    def sum(self):
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unread("nested too deep")
        total = self.product()
        while (token := self.peek()) in ("+", "-", r"\pm", r"\mp"):
            self.next()
            term = self.product()
            total = _known(total + term * self._sign(token))
        self.depth -= 1
        return total

    def _sign(self, token: str) -> int:
        if token in ("+", "-"):
            return 1 if token == "+" else -1
        self.signs += 1
        return 1 if (token == r"\pm") == self.upper else -1

    def product(self):
        value = self.signed()
        while True:
            token = self.peek()
            if token in ("*", r"\cdot", r"\times", r"\ast"):
                self.next()
                value = _known(value * self.signed())
            elif token in ("/", r"\div"):
                self.next()
                value = _known(value / self.signed())
            elif self._begins(token):
                self._no_digits()
                value = _known(value * self.power())
            else:
                return value

    def _begins(self, token: str) -> bool:
        """Whether a token begins a factor of a product without a sign."""
        return bool(token) and (
            token[0].isalnum()
            or token[0] == "."
            or token in ("(", "[", "{")
            or token == "|"
            and not self.bars
            or token in (r"\lfloor", r"\lceil", r"\lvert", r"\frac", r"\binom", r"\sqrt", r"\root")
            or token[0] == "\\"
            and (token[1:] in _NAMES or token[1:] in _FUNCTIONS or token[1:] in _GREEK)
        )

    def _no_digits(self) -> None:
        """Raise Unread where a number follows a factor without a sign, also one in braces, which print as nothing:
        ``{5}{2}`` reads 52.
        """
        rest = [token for token in self.tokens[self.at : self.at + 6] if token != " "]
        first = next((token for token in rest if token != "{"), "")
        if first[:1].isdigit() or first[:1] == ".":
            raise Unread("two numbers beside each other")

    def signed(self):
        if self.peek() in ("+", "-", r"\pm", r"\mp"):
            token = self.next()
            self.depth += 1
            if self.depth > DEEPEST:
                raise Unread("nested too deep")
            value = self.signed()
            self.depth -= 1
            return value * self._sign(token)
        return self.power()

    def power(self):
        value = self.postfixed()
        if self.take("^"):
            if self.take(r"\circ"):
                return value * _DEGREE
            if self.peek() == "{" and self._is_circle():
                return value * _DEGREE
            exponent = self.exponent()
            return power_of(value, exponent)
        return value

    def _is_circle(self) -> bool:
        start = self.at
        if self.take("{") and self.take(r"\circ") and self.take("}"):
            return True
        self.at = start
        return False

    def exponent(self):
        """A group, or one signed factor (``2^-1``, ``2^x``), of which LaTeX takes one digit: ``2^10`` is read as people
        mean it.
        """
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unread("nested too deep")
        value = self.group() if self.peek() == "{" else -self.power() if self.take("-") else self.power()
        self.depth -= 1
        return value

    def group(self):
        self.expect("{")
        value = self.sum()
        self.expect("}")
        return value

    def postfixed(self):
        value = self.atom()
        while self.take("!"):
            if not (value.is_Integer and 0 <= value <= LARGEST_FACTORIAL or value.free_symbols):
                raise Unread("factorial")
            value = sympy.factorial(value)
        return value

    def atom(self):
        token = self.next()
        if token[0].isdigit() or token[0] == ".":
            if self.peek(skip=False) == "_":
                raise Unread("a number in another base")
            number = sympy.Rational(token.rstrip(".") if token[0] != "." else "0" + token)
            if self.peek() == r"\frac" and number.is_Integer and (part := self._mixed()) is not None:
                return number + part
            return number
        if token == "(" or token == "[":
            bars, self.bars = self.bars, 0
            value = self.sum()
            self.expect(")" if token == "(" else "]")
            self.bars = bars
            return value
        if token == "{":
            bars, self.bars = self.bars, 0
            value = self.sum()
            self.expect("}")
            self.bars = bars
            return value
        if token in ("|", r"\lvert"):
            self.bars += 1
            value = self.sum()
            self.expect("|", r"\rvert")
            self.bars -= 1
            return sympy.Abs(value)
        if token in (r"\lfloor", r"\lceil"):
            value = self.sum()
            self.expect(token.replace("l", "r", 1))
            return sympy.floor(value) if token == r"\lfloor" else sympy.ceiling(value)
        if token == r"\frac":
            top, bottom = self.argument(), self.argument()
            return _known(top / bottom)
        if token == r"\binom":
            n, k = self.argument(), self.argument()
            if n.free_symbols and k.is_Integer and 0 <= k <= 10:  # a polynomial in n
                return sympy.prod([n - i for i in range(int(k))]) / sympy.factorial(k)
            if not (n.is_Integer and k.is_Integer and 0 <= n <= 2 * LARGEST_FACTORIAL):
                raise Unread("binomial")
            return sympy.binomial(n, k)
        if token == r"\sqrt":
            degree = sympy.Integer(2)
            if self.take("["):
                degree = self.sum()
                self.expect("]")
            return root_of(self.argument(), degree)
        if token == r"\root":
            return root_of(self.atom(), sympy.Integer(2))
        if token.startswith("\\") and token[1:] in _FUNCTIONS:
            return self.function(token[1:])
        if token.startswith("\\") and token[1:] in _NAMES:
            return _NAMES[token[1:]]
        if token.isalpha() or token[1:] in _GREEK and token[0] == "\\":
            name = token.lstrip("\\")
            if self.peek(skip=False) == "_":
                self.next()
                index = self.next()
                if index == "{":
                    index = ""
                    while (part := self.next()) != "}":
                        index += part
                return sympy.Symbol(f"{name}_{index}", real=True)
            return sympy.E if name == "e" else _I if name == "i" else sympy.Symbol(name, real=True)
        raise Unread(token)

    def _mixed(self):
        r"""The fraction of a mixed number such as ``2\frac{1}{3}``; None where it is a factor."""
        start = self.at
        self.next()
        parts = self._try(lambda: (self.argument(), self.argument()))
        if parts is not None and all(part.is_Integer and part > 0 for part in parts) and parts[0] < parts[1]:
            return sympy.Rational(*parts)
        self.at = start
        return None

    def argument(self):
        r"""What ``\frac`` and ``\sqrt`` act on: a group, or one token, of a number its first digit."""
        token = self.peek()
        if token == "{":
            return self.group()
        if token.isdigit():
            self.next()
            self.tokens[self.at - 1 : self.at] = [token[0], *([token[1:]] if token[1:] else [])]
            return sympy.Integer(token[0])
        return self.atom()

    def function(self, name: str):
        base = exponent = None
        if name == "log":
            base = sympy.Integer(10)
            if self.take("_"):
                base = self.argument()
        if self.take("^"):
            exponent = self.exponent()
        if self.peek() in ("(", "{"):
            value = self.atom()
        else:  # \sin 2x is sin(2x); the next function, sign or bracket ends it
            value = self.power()
            while (
                self._begins(self.peek())
                and self.peek() not in ("(", "[", "|")
                and self.peek().lstrip("\\") not in _FUNCTIONS
            ):
                self._no_digits()
                value = value * self.power()
        if name in _TRIGONOMETRIC:
            value = value.subs(_DEGREE, sympy.pi / 180)
        if name == "exp":
            found = power_of(sympy.E, value)
        else:
            found = _known(sympy.log(value, base) if base is not None else _FUNCTIONS[name](value))
        if exponent == -1 and name in ("sin", "cos", "tan"):
            return {"sin": sympy.asin, "cos": sympy.acos, "tan": sympy.atan}[name](value)
        return found if exponent is None else power_of(found, exponent)


def _inequality(left, sign: str, right):
    return ("relation", sign.replace(">", "<"), right - left if ">" in sign else left - right, None)


def _known(value):
    if value.has(sympy.nan, sympy.zoo):
        raise Unread("it has no value")
    return value


def power_of(base, exponent):
    """base ** exponent, where it stays small: numbers up to ``LARGEST_BITS``, sums up to ``LARGEST_DEGREE``. Raises
    Unread.
    """
    base, exponent = sympy.sympify(base), sympy.sympify(exponent)
    if exponent.is_number and not exponent.is_infinite and base not in (0, 1, -1):
        inner, outer = base.as_base_exp()
        size = abs(exponent * outer) if outer.is_number else abs(exponent)
        if not exponent.is_Rational:
            large = abs(sympy.N(size, 5)) > LARGEST_DEGREE
        elif inner.is_Rational:
            large = size * max(inner.p.bit_length(), inner.q.bit_length()) > LARGEST_BITS
        else:
            large = sympy.N(size, 5) > (LARGEST_BITS if inner.is_Atom else LARGEST_DEGREE)
        if large or exponent.is_Rational and exponent.q > LARGEST_BITS:
            raise Unread("a power that is too large")
    return _known(base**exponent)


def root_of(value, degree):
    """The real root where there is one: that of an odd degree of a negative number is negative."""
    if degree.is_Integer and degree % 2 and value.is_number and value.is_negative:
        return -power_of(-value, 1 / degree)
    return power_of(value, _known(1 / degree))


def read(text: str):
    """(what an answer is, its unit). Raises Unread."""
    if len(text) > LONGEST:
        raise Unread("too long")
    formula, unit = clean(text)
    return Parser(tokens_of(formula)).whole(), unit


def equal(a: str, b: str) -> bool:
    """Whether two answers are provably the same value; False also where one of them cannot be read."""
    try:
        (x, unit), (y, other) = read(a), read(b)
        return (not unit or not other or unit == other) and same(x, y)
    except (Unread, RecursionError, ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError):
        # the last ones: what sympy makes nothing of
        return False


def same(x, y) -> bool:
    """Whether two answers as :class:`Parser` reads them are the same."""
    if x[0] == "relation" and y[0] != "relation" and x[3] is not None:  # x = 5 against 5
        x = ("number", x[3])
    if y[0] == "relation" and x[0] != "relation" and y[3] is not None:
        y = ("number", y[3])
    kinds = {x[0], y[0]}
    if kinds == {"number"}:
        return same_number(x[1], y[1])
    if "set of signs" in kinds and kinds <= {"set of signs", "set", "list"} or kinds == {"set"}:
        return _same_any_order(x[1], y[1])
    if kinds == {"list"}:
        return len(x[1]) == len(y[1]) and all(map(same, x[1], y[1]))
    if kinds == {"both"} and len(x[1]) == len(y[1]) and _same_any_order(x[1], y[1]):
        return True
    if kinds & {"union", "both"} or kinds == {"relation", "tuple"}:
        (left, of), (right, other) = _solutions(x), _solutions(y)
        return left is not None and right is not None and left == right and (None in (of, other) or of == other)
    if kinds == {"tuple"}:
        return x[1] == y[1] and x[3] == y[3] and len(x[2]) == len(y[2]) and all(map(same, x[2], y[2]))
    if kinds == {"matrix"}:
        return [len(row) for row in x[1]] == [len(row) for row in y[1]] and all(
            same(p, q) for row, other in zip(x[1], y[1]) for p, q in zip(row, other)
        )
    if kinds == {"relation"} and x[1] == y[1]:
        return _same_zeros(x[2], y[2], signed="<" in x[1])
    return False


def _same_any_order(left: list, right: list) -> bool:
    rest = list(right)
    for part in left:
        at = next((i for i, other in enumerate(rest) if same(part, other)), None)
        if at is None:
            return False
        del rest[at]
    return not rest


def _solutions(value):
    """(set, letter): the real numbers that intervals and sets of numbers make, with None, or that inequalities of one
    letter leave it; (None, None) for anything else.
    """
    if value[0] in ("union", "both"):
        parts = [_solutions(part) for part in value[1]]
        letters = {letter for _, letter in parts if letter is not None}
        if len(letters) > 1 or any(part is None for part, _ in parts):
            return None, None
        join = sympy.Union if value[0] == "union" else sympy.Intersection
        return join(*(part for part, _ in parts)), next(iter(letters), None)
    if value[0] == "relation" and "<" in value[1] and len(value[2].free_symbols) == 1:
        (letter,) = value[2].free_symbols
        found = sympy.expand(value[2])
        slope, rest = found.coeff(letter), found.subs(letter, 0)
        if not slope.is_nonzero or not rest.is_real or sympy.expand(found - slope * letter - rest) != 0:
            return None, None
        bound, open_ = -rest / slope, value[1] == "<"
        if slope.is_positive:
            return sympy.Interval(-sympy.oo, bound, True, open_), letter
        return sympy.Interval(bound, sympy.oo, open_, True), letter
    return _as_set(value), None


def _as_set(value):
    """The set of real numbers that an interval or a set of numbers is; None for anything else."""
    if value[0] == "set" and all(part[0] == "number" and part[1].is_real for part in value[1]):
        return sympy.FiniteSet(*(part[1] for part in value[1]))
    if (
        value[0] == "tuple"
        and len(value[2]) == 2
        and all(part[0] == "number" and part[1].is_extended_real and part[1].is_number for part in value[2])
    ):
        (_, low), (_, high) = value[2]
        return sympy.Interval(low, high, value[1] == "(", value[3] == ")")
    return None


def _same_zeros(x, y, signed: bool) -> bool:
    """Whether x = 0 and y = 0 (signed: x < 0 and y < 0) say the same because their quotient is a constant, and positive
    where that counts.
    """
    if same_number(y, sympy.Integer(0)) or same_number(x, sympy.Integer(0)):
        return False
    quotient = sympy.cancel(x / y) if x.is_rational_function() and y.is_rational_function() else sympy.simplify(x / y)
    return (
        quotient.is_number
        and quotient.is_finite is not False
        and bool(quotient.is_positive if signed else quotient.is_nonzero)
    )


def same_number(x, y) -> bool:
    """Whether the difference of two expressions is provably 0, for all real values of their letters."""
    x, y = x.subs(_DEGREE, 1), y.subs(_DEGREE, 1)
    if x == y:
        return True
    if x.is_infinite or y.is_infinite or x.is_Rational and y.is_Rational:
        return False
    letters = sorted(x.free_symbols | y.free_symbols, key=str)
    for k in range(2):  # two places where they would differ, first: most answers do
        at = {letter: sympy.Rational((-1) ** k * (7 * i + 11 * k + 3), 5 * i + 13) for i, letter in enumerate(letters)}
        p, q = x.subs(at), y.subs(at)
        p, q = sympy.N(p, 30), sympy.N(q, 30)
        if (
            p.is_number
            and q.is_number
            and p.is_finite
            and q.is_finite
            and abs(p - q) > sympy.Float("1e-20") * (1 + abs(p) + abs(q))
        ):
            return False
    difference = x - y
    for step in (
        sympy.expand,
        sympy.simplify,
        lambda d: sympy.sqrtdenest(sympy.radsimp(d)),
        lambda d: sympy.simplify(sympy.expand_log(sympy.expand_trig(d), force=False)),
    ):
        if step(difference) == 0:
            return True
    return difference.equals(0) is True
